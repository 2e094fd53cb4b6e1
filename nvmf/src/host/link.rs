//! What I/O queues, on whatever core, need to know of their controller.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use nacre_nvmf_wire::log::ana::AnaState;
use parking_lot::Mutex;

use super::namespace::NamespaceInfo;
use crate::transport::TransportType;

/// Written by the controller's core, read by all: by the I/O queues once per turn, without a lock,
/// but for when they connect.
#[derive(Debug, Default)]
pub struct Link {
    /// Odd while there is an association; grows by one with each beginning and each end. [`MOVING`]
    /// while I/O queues are to let go of it.
    generation: AtomicU64,
    /// I/O queues that have a connection or are making one.
    connected: AtomicUsize,
    /// Why an I/O queue could not be connected although the association lives.
    unreachable: Mutex<Option<String>>,
    /// Grows whenever the namespaces change, or how they can be reached.
    version: AtomicU64,
    /// An I/O queue found the association stuck.
    reset: AtomicBool,
    failed: AtomicBool,
    /// The association has been away for longer than I/O is to wait.
    away: AtomicBool,
    /// Connections that ended with possible data loss at the target; see [`Link::losses`].
    losses: AtomicU64,
    state: Mutex<LinkState>,
    waker: Mutex<Waker>,
}

/// Wakes the controller's core, if that sleeps.
#[derive(Default)]
struct Waker(Option<Box<dyn Fn() + Send + Sync>>);

impl fmt::Debug for Waker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Waker" } else { "None" })
    }
}

/// Bit of the generation: the association ends as soon as no command is in flight.
const MOVING: u64 = 1 << 63;

/// The attributes of the controller and of its namespaces.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LinkState {
    /// The transport of the association, where there are several: its I/O queues use the same.
    pub transport: Option<TransportType>,
    pub cntlid: u16,
    /// I/O queues granted.
    pub io_queues: u16,
    /// Entries of an I/O queue.
    pub queue_entries: u16,
    pub in_capsule_bytes: u32,
    pub max_transfer_bytes: u32,
    pub max_dsm_ranges: u32,
    pub write_zeroes_bytes: u64,
    pub verify_bytes: u64,
    pub oncs: u16,
    /// Compare and Write can be fused.
    pub fused_compare_and_write: bool,
    /// Blocks of a fused Compare and Write that every namespace takes, less one.
    pub acwu: u16,
    pub volatile_cache: bool,
    pub namespaces: BTreeMap<u32, NamespaceInfo>,
    /// The state of each ANA group; those of no group are accessible.
    pub ana: BTreeMap<u32, AnaState>,
}

impl LinkState {
    /// How a namespace can be reached by this path.
    pub fn access(&self, namespace: &NamespaceInfo) -> AnaState {
        let state = self.ana.get(&namespace.ana_group);
        state.copied().unwrap_or(AnaState::Optimized)
    }
}

impl Link {
    /// `None` while there is no association.
    #[inline]
    pub fn generation(&self) -> Option<u64> {
        match self.generation.load(Ordering::Acquire) & !MOVING {
            g if g & 1 == 1 => Some(g),
            _ => None,
        }
    }

    /// Whether the association `generation` goes on as it is: neither over nor about to move.
    #[inline]
    pub(super) fn goes_on(&self, generation: u64) -> bool {
        self.generation.load(Ordering::Acquire) == generation
    }

    /// True if I/O queues must complete their I/O in flight and close their connections.
    pub fn is_moving(&self) -> bool {
        self.generation.load(Ordering::Acquire) & MOVING != 0
    }

    /// I/O queues that have a connection, or are making one.
    pub fn connected(&self) -> usize {
        self.connected.load(Ordering::Acquire)
    }

    pub(super) fn enter(&self) {
        self.connected.fetch_add(1, Ordering::AcqRel);
    }

    pub(super) fn leave(&self) {
        self.connected.fetch_sub(1, Ordering::AcqRel);
    }

    /// An I/O queue cannot be connected by the association's transport.
    pub(super) fn set_unreachable(&self, why: String) {
        *self.unreachable.lock() = Some(why);
        self.request_reset();
    }

    pub(super) fn take_unreachable(&self) -> Option<String> {
        self.unreachable.lock().take()
    }

    /// Whether I/O queues let go. For the controller's core only, as [`Link::set_up`].
    pub(super) fn set_moving(&self, moving: bool) {
        let now = self.generation.load(Ordering::Acquire) & !MOVING;
        let moving = if moving { MOVING } else { 0 };
        self.generation.store(now | moving, Ordering::Release);
    }

    /// Changes whenever [`LinkState::namespaces`] or [`LinkState::ana`] does.
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

    /// The controller will not come back.
    #[inline]
    pub fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    /// Makes the controller drop its association and connect again.
    pub fn request_reset(&self) {
        self.reset.store(true, Ordering::Release);
        let waker = self.waker.lock();
        if let Some(wake) = &waker.0 {
            wake();
        }
    }

    /// Sets how to wake the core that polls the controller: a request to an idle controller must
    /// not wait for its next keep-alive.
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

    /// Grows with each end of a connection after which the target may have lost completed writes
    /// that it was not yet asked to flush. The end of an association is counted before the next
    /// begins, and that of an I/O queue before it connects again. So no I/O completes over a
    /// connection before the end of the previous one was counted.
    #[inline]
    pub fn losses(&self) -> u64 {
        self.losses.load(Ordering::Acquire)
    }

    pub(super) fn count_loss(&self) {
        self.losses.fetch_add(1, Ordering::AcqRel);
    }

    /// The association has been away for longer than [`super::HostOptions::fast_io_fail`].
    #[inline]
    pub fn is_away(&self) -> bool {
        self.away.load(Ordering::Acquire)
    }

    pub(super) fn set_away(&self, away: bool) {
        self.away.store(away, Ordering::Release);
    }

    /// Another controller takes the place of the one that has failed.
    pub(super) fn revive(&self) {
        self.failed.store(false, Ordering::Release);
    }

    pub(super) fn fail(&self) {
        self.set_up(false);
        self.failed.store(true, Ordering::Release);
    }
}
