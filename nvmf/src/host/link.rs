//! The state of a controller that its I/O queues on other cores read: whether there is an
//! association, the controller's limits, and its namespaces.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use nacre_bdev::injection::Injection;
use nacre_nvmf_wire::log::ana::AnaState;
use parking_lot::Mutex;

use super::injection::{InjectionChanges, InjectionQueues};
use super::namespace::NamespaceInfo;
use crate::transport::TransportType;

/// State shared by a controller and its I/O queues. The controller's core writes most of it. An I/O
/// queue reads it once per turn without a lock; it locks only to connect, and to adopt a changed
/// [`Link::version`].
#[derive(Debug, Default)]
pub struct Link {
    /// Incremented at each start and each end of an association, so odd while there is one. The bit
    /// [`MOVING`] is set while I/O queues must close their connections.
    generation: AtomicU64,
    /// Number of I/O queues with a connection or an attempt to connect.
    connected: AtomicUsize,
    /// The reason why an I/O queue cannot connect although there is an association.
    unreachable: Mutex<Option<String>>,
    /// Incremented with each change of the namespaces, their ANA states, or error injections.
    version: AtomicU64,
    /// An I/O queue has requested the end of the association.
    reset: AtomicBool,
    failed: AtomicBool,
    /// There was no association for longer than I/O may wait.
    away: AtomicBool,
    /// Connections that ended with possible data loss at the target; see [`Link::losses`].
    losses: AtomicU64,
    /// Losses of all paths to a subsystem, which share this counter.
    all_losses: Arc<AtomicU64>,
    injections: InjectionChanges,
    state: Mutex<LinkState>,
    waker: Mutex<Waker>,
}

/// The callback that wakes the controller's core.
#[derive(Default)]
struct Waker(Option<Box<dyn Fn() + Send + Sync>>);

impl fmt::Debug for Waker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Waker" } else { "None" })
    }
}

/// Bit of the generation: the association ends for a move as soon as no command is in flight.
const MOVING: u64 = 1 << 63;

/// The attributes of the controller and of its namespaces, as read in the latest association.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LinkState {
    /// The transport of the association, if there are two: I/O queues must use the same.
    pub transport: Option<TransportType>,
    pub cntlid: u16,
    /// This host has authenticated itself on the admin queue of the association, or by the
    /// authentication that generated the association's PSK.
    pub is_authenticated: bool,
    /// Number of I/O queues that the controller granted.
    pub io_queues: u16,
    /// Entries per I/O queue.
    pub queue_entries: u16,
    pub in_capsule_bytes: u32,
    pub max_transfer_bytes: u32,
    pub max_dsm_ranges: u32,
    pub write_zeroes_bytes: u64,
    pub verify_bytes: u64,
    pub oncs: u16,
    /// The controller supports fused Compare and Write (FUSES).
    pub fused_compare_and_write: bool,
    /// Most blocks of a fused Compare and Write on any namespace, 0's based (ACWU).
    pub acwu: u16,
    pub volatile_cache: bool,
    pub namespaces: BTreeMap<u32, NamespaceInfo>,
    /// The state of each ANA group. Namespaces without a group are accessible.
    pub ana: BTreeMap<u32, AnaState>,
}

impl LinkState {
    /// The ANA state of a namespace on this path.
    pub fn access(&self, namespace: &NamespaceInfo) -> AnaState {
        let state = self.ana.get(&namespace.ana_group);
        state.copied().unwrap_or(AnaState::Optimized)
    }
}

impl Link {
    /// One of several paths to a subsystem, whose losses are also counted in `all_losses`.
    pub fn counting(all_losses: Arc<AtomicU64>) -> Self {
        Self {
            all_losses,
            ..Self::default()
        }
    }

    /// Identifies the association; `None` while there is none.
    #[inline]
    pub fn generation(&self) -> Option<u64> {
        match self.generation.load(Ordering::Acquire) & !MOVING {
            g if g & 1 == 1 => Some(g),
            _ => None,
        }
    }

    /// True while the association `generation` exists and is not about to move.
    #[inline]
    pub(super) fn is_current(&self, generation: u64) -> bool {
        self.generation.load(Ordering::Acquire) == generation
    }

    /// True if I/O queues must complete their I/O in flight and close their connections.
    pub fn is_moving(&self) -> bool {
        self.generation.load(Ordering::Acquire) & MOVING != 0
    }

    /// Number of I/O queues with a connection or an attempt to connect.
    pub fn connected(&self) -> usize {
        self.connected.load(Ordering::Acquire)
    }

    pub(super) fn enter(&self) {
        self.connected.fetch_add(1, Ordering::AcqRel);
    }

    pub(super) fn leave(&self) {
        self.connected.fetch_sub(1, Ordering::AcqRel);
    }

    /// Reports that an I/O queue cannot connect over the association's transport.
    pub(super) fn set_unreachable(&self, why: String) {
        *self.unreachable.lock() = Some(why);
        self.request_reset();
    }

    pub(super) fn take_unreachable(&self) -> Option<String> {
        self.unreachable.lock().take()
    }

    /// Sets whether I/O queues must close their connections. Only for the controller's core, like
    /// [`Link::set_up`].
    pub(super) fn set_moving(&self, moving: bool) {
        let now = self.generation.load(Ordering::Acquire) & !MOVING;
        let moving = if moving { MOVING } else { 0 };
        self.generation.store(now | moving, Ordering::Release);
    }

    /// Changes with every change of [`LinkState::namespaces`] or [`LinkState::ana`], and of error
    /// injections.
    #[inline]
    pub fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    pub fn state(&self) -> LinkState {
        self.state.lock().clone()
    }

    pub fn namespace(&self, nsid: u32) -> Option<NamespaceInfo> {
        let state = self.state.lock();
        state.namespaces.get(&nsid).cloned()
    }

    /// The namespace, if the controller has it, and its ANA state on this path.
    pub fn namespace_with_access(&self, nsid: u32) -> (Option<NamespaceInfo>, AnaState) {
        let state = self.state.lock();
        let found = state.namespaces.get(&nsid);
        let access = found.map_or(AnaState::Inaccessible, |found| state.access(found));
        (found.cloned(), access)
    }

    /// True when the controller has failed for good: no association will follow.
    #[inline]
    pub fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    /// Makes the controller drop its association and connect again.
    pub fn request_reset(&self) {
        self.reset.store(true, Ordering::Release);
        self.wake();
    }

    fn wake(&self) {
        let waker = self.waker.lock();
        if let Some(wake) = &waker.0 {
            wake();
        }
    }

    /// Sets the rule of error injection for an opcode, in the connected queues; `None` removes it.
    pub fn inject(&self, queues: InjectionQueues, opcode: u8, injection: Option<Injection>) {
        self.injections.set(queues, opcode, injection);
        // I/O queues look at changes of the version only.
        self.version.fetch_add(1, Ordering::AcqRel);
        self.wake();
    }

    pub(super) fn injections(&self) -> &InjectionChanges {
        &self.injections
    }

    /// Sets the callback that wakes the core of the controller, so that requests to an idle
    /// controller are handled immediately.
    pub fn set_waker(&self, wake: impl Fn() + Send + Sync + 'static) {
        *self.waker.lock() = Waker(Some(Box::new(wake)));
    }

    pub(super) fn take_reset(&self) -> bool {
        self.reset.load(Ordering::Relaxed) && self.reset.swap(false, Ordering::AcqRel)
    }

    pub(super) fn change(&self, with: impl FnOnce(&mut LinkState)) {
        with(&mut self.state.lock());
    }

    pub(super) fn set_namespaces(&self, found: BTreeMap<u32, NamespaceInfo>) {
        let mut state = self.state.lock();
        if state.namespaces != found {
            state.namespaces = found;
            self.version.fetch_add(1, Ordering::AcqRel);
        }
    }

    pub(super) fn set_access(&self, groups: BTreeMap<u32, AnaState>) {
        let mut state = self.state.lock();
        if state.ana != groups {
            state.ana = groups;
            self.version.fetch_add(1, Ordering::AcqRel);
        }
    }

    pub(super) fn set_up(&self, up: bool) {
        let now = self.generation.load(Ordering::Acquire) & !MOVING;
        if (now & 1 == 1) != up {
            self.generation.store(now + 1, Ordering::Release);
        }
    }

    /// Counts the ends of connections after which the target may have lost completed but unflushed
    /// writes. The end of a connection is counted before any I/O completes on the next one.
    #[inline]
    pub fn losses(&self) -> u64 {
        self.losses.load(Ordering::Acquire)
    }

    pub(super) fn count_loss(&self) {
        self.losses.fetch_add(1, Ordering::AcqRel);
        self.all_losses.fetch_add(1, Ordering::AcqRel);
    }

    /// True while there has been no association for longer than
    /// [`super::HostOptions::fast_io_fail`].
    #[inline]
    pub fn is_away(&self) -> bool {
        self.away.load(Ordering::Acquire)
    }

    pub(super) fn set_away(&self, away: bool) {
        self.away.store(away, Ordering::Release);
    }

    /// Clears the failure, for a new controller in place of the failed one.
    pub(super) fn revive(&self) {
        self.failed.store(false, Ordering::Release);
    }

    pub(super) fn fail(&self) {
        self.set_up(false);
        self.failed.store(true, Ordering::Release);
    }
}
