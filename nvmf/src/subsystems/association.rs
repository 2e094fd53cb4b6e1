//! The state of an association that all cores and management calls share: its queues, its phase,
//! and the namespaces that the host may access.
//!
//! The controller itself (registers, features, event requests) lives on the core of its admin
//! queue. An I/O queue reads `phase` and `view_version` without a lock. It locks only to adopt a
//! new view and to record a failed command.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use nacre_nvmf_wire::{Nqn, StatusCode};
use parking_lot::{Mutex, MutexGuard};

use crate::subsystems::authentication::QueueAuthState;
use crate::subsystems::core_handle::{GroupHandle, QueueId};
use crate::subsystems::generated::is_same;
use crate::subsystems::hosts::Hosts;
use crate::subsystems::namespace::View;
use crate::subsystems::reservation::{Notice, NoticeLog};
use crate::subsystems::stats::{QueueStats, Totals};
use crate::tls::{Psk, SecureChannel};
use crate::transport::{Address, ListenerId, TransportType};

/// The phase of an association. CC.EN changes it between `Connected` and `Ready`; `Closing` is
/// final.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Phase {
    /// Connected and not enabled: only admin commands.
    Connected = 0,
    /// CSTS.RDY is 1: I/O queues may connect.
    Ready = 1,
    /// Being torn down: its connections are closed by the cores that own them, then it is removed.
    Closing = 2,
}

/// The reason for the end of an association, for the log and for events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Teardown {
    /// The admin connection ended.
    HostLeft,
    KeepAliveExpired,
    /// No command within `idle_timeout_s` of the listener.
    Idle,
    HostRemoved,
    SubsystemDeleted,
    ListenerRemoved,
    /// Hosts may not use the listener any more.
    ListenerWithheld,
    TargetStopping,
    /// Authentication failed, or did not complete in time.
    NotAuthenticated,
    /// The host was given a PSK, and its connections do not use TLS.
    MustEncrypt,
    /// Another node of the cluster may serve the namespaces now.
    Elsewhere,
}

impl Teardown {
    pub fn text(self) -> &'static str {
        match self {
            Self::HostLeft => "the host left",
            Self::KeepAliveExpired => "the keep-alive timeout expired",
            Self::Idle => "no command within idle_timeout_s of the listener",
            Self::HostRemoved => "the host is not allowed any more",
            Self::SubsystemDeleted => "the subsystem was deleted",
            Self::ListenerRemoved => "the listener was removed",
            Self::ListenerWithheld => "the listener was withheld from hosts",
            Self::TargetStopping => "the target stops",
            Self::Elsewhere => "another node of the cluster may serve its volume",
            Self::NotAuthenticated => "the host did not authenticate itself",
            Self::MustEncrypt => "the host must use TLS now",
        }
    }
}

/// Bits of the asynchronous events that a controller reports.
pub mod pending {
    /// Namespaces were added, removed or changed (log page 04h).
    pub const NAMESPACES: u32 = 1;
    /// The discovery log changed (log page 70h).
    pub const DISCOVERY: u32 = 2;
    /// ANA states changed (log page 0Ch).
    pub const ANA: u32 = 4;
    /// A reservation notification is available (log page 80h).
    pub const RESERVATION: u32 = 8;
}

/// One queue of an association.
#[derive(Clone)]
pub struct QueueInfo {
    pub qid: u16,
    pub entries: u16,
    pub group: GroupHandle,
    /// The queue pair of that group.
    pub(crate) id: QueueId,
    pub transport: TransportType,
    pub listener: ListenerId,
    pub local: Address,
    pub peer: Address,
    pub stats: Arc<QueueStats>,
    /// The state of its latest authentication.
    pub auth: Arc<QueueAuthState>,
    /// The TLS channel of its connection; `None`: not encrypted.
    pub secure: Option<Arc<SecureChannel>>,
    /// The queue is closed, but devices still have commands of it.
    pub(crate) ending: bool,
}

impl QueueInfo {
    /// True if the queue accepts commands: the host has authenticated it, or need not.
    pub fn is_authenticated(&self) -> bool {
        !self.auth.is_pending()
    }
}

/// The reason why an association refuses a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NoQueue {
    /// A queue with this identifier exists.
    InUse,
    /// A queue with this identifier exists and is being closed.
    Ending,
    /// The association itself is being closed.
    Closing,
}

pub struct Association {
    pub cntlid: u16,
    pub hostid: [u8; 16],
    pub hostnqn: Nqn,
    /// The NQN of its subsystem.
    pub subnqn: Nqn,
    pub listener: ListenerId,
    pub transport: TransportType,
    phase: AtomicU8,
    /// A command arrived since the last [`Association::take_touched`] (traffic based keep-alive).
    touched: AtomicBool,
    /// The host has authenticated its admin queue, or need not.
    authenticated: AtomicBool,
    /// The PSK that the latest authentication of its admin queue generated.
    generated: Mutex<Option<Arc<Psk>>>,
    /// Keep-alive timeout (KATO) of the Connect, in milliseconds; 0: none.
    keep_alive_ms: AtomicU32,
    /// Incremented with every change of the view.
    view_version: AtomicU64,
    view: Mutex<Arc<View>>,
    queues: Mutex<BTreeMap<u16, QueueInfo>>,
    /// The statistics of the subsystem's hosts.
    hosts: Arc<Hosts>,
    /// Statistics of deleted queues. Locked after `queues`.
    retired: Mutex<Totals>,
    /// Number of I/O queues granted to the host (Number of Queues).
    io_queues: AtomicU16,
    /// The host honours retry delays (Host Behavior Support, ACRE).
    retry_delays: AtomicBool,
    media_errors: AtomicU64,
    pending: AtomicU32,
    changed_namespaces: Mutex<BTreeSet<u32>>,
    reservations: Mutex<NoticeLog>,
    teardown: Mutex<Option<Teardown>>,
    errors: Mutex<ErrorLog>,
}

/// The identity of an admitted host, and the controller and listener of its association.
pub(crate) struct Admitted {
    pub cntlid: u16,
    pub hostid: [u8; 16],
    pub hostnqn: Nqn,
    pub listener: ListenerId,
    pub transport: TransportType,
}

/// One failed command, for the error information log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ErrorRecord {
    /// Error count since the start of the association, from 1. Set when the error is recorded.
    pub number: u64,
    pub sqid: u16,
    pub cid: u16,
    pub status: StatusCode,
    pub lba: u64,
    pub nsid: u32,
    pub opcode: u8,
}

struct ErrorLog {
    /// Newest first, at most `limit`.
    records: VecDeque<ErrorRecord>,
    limit: usize,
    count: u64,
}

/// Most entries of the Changed Namespace List (Base 5.16.1.5).
pub const MAX_CHANGED_NAMESPACES: usize = 1024;

impl Association {
    pub(crate) fn new(
        admitted: Admitted,
        subnqn: Nqn,
        hosts: Arc<Hosts>,
        view: Arc<View>,
        error_entries: usize,
    ) -> Self {
        Self {
            cntlid: admitted.cntlid,
            hostid: admitted.hostid,
            hostnqn: admitted.hostnqn,
            subnqn,
            listener: admitted.listener,
            transport: admitted.transport,
            phase: AtomicU8::new(Phase::Connected as u8),
            touched: AtomicBool::new(false),
            authenticated: AtomicBool::new(false),
            generated: Mutex::default(),
            keep_alive_ms: AtomicU32::new(0),
            view_version: AtomicU64::new(1),
            view: Mutex::new(view),
            queues: Mutex::new(BTreeMap::new()),
            hosts,
            retired: Mutex::new(Totals::default()),
            io_queues: AtomicU16::new(u16::MAX),
            retry_delays: AtomicBool::new(false),
            media_errors: AtomicU64::new(0),
            pending: AtomicU32::new(0),
            changed_namespaces: Mutex::new(BTreeSet::new()),
            reservations: Mutex::default(),
            teardown: Mutex::new(None),
            errors: Mutex::new(ErrorLog {
                records: VecDeque::with_capacity(error_entries.max(1)),
                limit: error_entries.max(1),
                count: 0,
            }),
        }
    }

    pub fn phase(&self) -> Phase {
        match self.phase.load(Ordering::Acquire) {
            0 => Phase::Connected,
            1 => Phase::Ready,
            _ => Phase::Closing,
        }
    }

    /// Sets the phase after a change of CC.EN; 0 ends the I/O queues. No effect while closing.
    pub fn set_ready(&self, ready: bool) {
        let (from, to) = if ready { (0, 1) } else { (1, 0) };
        let changed = self
            .phase
            .compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok();
        if changed && !ready {
            self.attend_queues();
        }
    }

    /// Starts the end of the association: the cores that own its connections close them. Only the
    /// first reason is recorded.
    pub fn tear_down(&self, why: Teardown) {
        self.teardown.lock().get_or_insert(why);
        self.phase.store(Phase::Closing as u8, Ordering::Release);
        self.attend_queues();
    }

    /// True if a queue does not use TLS.
    pub(crate) fn has_clear_queue(&self) -> bool {
        self.queues
            .lock()
            .values()
            .any(|queue| queue.secure.is_none())
    }

    /// True if a queue with this TLS channel may join the association. There may be a PSK that
    /// authentication on the admin queue generated, or a generated one that the admin queue's
    /// channel uses. If so, the channel must use one of these two.
    pub(crate) fn takes_channel(&self, channel: Option<&SecureChannel>) -> bool {
        let own = self.generated.lock().clone();
        let queues = self.queues.lock();
        let of_admin = queues.get(&0).and_then(|admin| admin.secure.as_ref());
        let of_admin = of_admin.filter(|channel| channel.identity.is_generated);
        if own.is_none() && of_admin.is_none() {
            return true;
        }
        channel.is_some_and(|channel| {
            own.is_some_and(|own| is_same(&own, &channel.psk))
                || of_admin.is_some_and(|admin| Arc::ptr_eq(&admin.psk, &channel.psk))
        })
    }

    /// True if the controller is ready and has an I/O queue, and `holds` is true of each of its
    /// queues.
    pub(crate) fn all_queues(&self, holds: impl FnMut(&QueueInfo) -> bool) -> bool {
        let queues = self.queues.lock();
        self.phase() == Phase::Ready && queues.len() > 1 && queues.values().all(holds)
    }

    fn attend_queues(&self) {
        for queue in self.queues.lock().values() {
            queue.group.wake();
        }
    }

    pub fn teardown_reason(&self) -> Option<Teardown> {
        *self.teardown.lock()
    }

    /// Records that a command arrived. Called for every command.
    pub fn touch(&self) {
        if !self.touched.load(Ordering::Relaxed) {
            self.touched.store(true, Ordering::Relaxed);
        }
    }

    /// True if a command arrived since the last call.
    pub fn take_touched(&self) -> bool {
        self.touched.load(Ordering::Relaxed) && self.touched.swap(false, Ordering::Relaxed)
    }

    /// True if the host may use the controller: it has authenticated itself, or need not.
    pub fn is_authenticated(&self) -> bool {
        self.authenticated.load(Ordering::Acquire)
    }

    /// Stores the PSK that the authentication of the admin queue generated. Returns the previous
    /// one.
    pub(crate) fn set_generated(&self, psk: Arc<Psk>) -> Option<Arc<Psk>> {
        self.generated.lock().replace(psk)
    }

    pub(crate) fn set_authenticated(&self) {
        self.authenticated.store(true, Ordering::Release);
    }

    /// The keep-alive timeout of the Connect; zero: none.
    pub(crate) fn keep_alive(&self) -> Duration {
        Duration::from_millis(self.keep_alive_ms.load(Ordering::Relaxed).into())
    }

    pub(crate) fn set_keep_alive(&self, kato_ms: u32) {
        self.keep_alive_ms.store(kato_ms, Ordering::Relaxed);
    }

    pub fn view_version(&self) -> u64 {
        self.view_version.load(Ordering::Acquire)
    }

    pub fn view(&self) -> Arc<View> {
        Arc::clone(&self.view.lock())
    }

    /// Installs a new view, and adds the changes to the Changed Namespace List.
    pub(crate) fn set_view(&self, view: Arc<View>, changed: &[u32]) {
        *self.view.lock() = view;
        self.view_version.fetch_add(1, Ordering::AcqRel);
        if !changed.is_empty() {
            let mut list = self.changed_namespaces.lock();
            for &nsid in changed {
                // Store one more entry than fits, to indicate an overflow.
                if list.len() <= MAX_CHANGED_NAMESPACES {
                    list.insert(nsid);
                }
            }
            drop(list);
            self.notify(pending::NAMESPACES);
        }
    }

    /// Takes the Changed Namespace List and empties it. More than [`MAX_CHANGED_NAMESPACES`]
    /// entries mean an overflow.
    pub fn take_changed_namespaces(&self) -> BTreeSet<u32> {
        std::mem::take(&mut self.changed_namespaces.lock())
    }

    pub fn changed_namespaces(&self) -> BTreeSet<u32> {
        self.changed_namespaces.lock().clone()
    }

    /// Queues a reservation notification for the host, unless it has masked that type.
    pub(crate) fn notify_reservation(&self, nsid: u32, notice: Notice) {
        if self.reservations().add(nsid, notice) {
            self.notify(pending::RESERVATION);
        }
    }

    /// The notifications that the host has not read, and its masks.
    pub(crate) fn reservations(&self) -> MutexGuard<'_, NoticeLog> {
        self.reservations.lock()
    }

    /// Records events (bits of [`pending`]) for the controller and wakes its core.
    pub fn notify(&self, events: u32) {
        self.pending.fetch_or(events, Ordering::AcqRel);
        if let Some(admin) = self.queues.lock().get(&0) {
            admin.group.wake();
        }
    }

    /// The events recorded since the last call.
    pub fn take_pending(&self) -> u32 {
        if self.pending.load(Ordering::Relaxed) == 0 {
            0
        } else {
            self.pending.swap(0, Ordering::AcqRel)
        }
    }

    /// Adds an entry to the Error Information log. A full log drops its oldest entry.
    pub(crate) fn record_error(&self, mut record: ErrorRecord) {
        if is_media_error(record.status) {
            self.media_errors.fetch_add(1, Ordering::Relaxed);
        }
        let mut log = self.errors.lock();
        log.count += 1;
        record.number = log.count;
        let limit = log.limit;
        log.records.truncate(limit - 1);
        log.records.push_front(record);
    }

    /// The entries of the Error Information log, newest first, and the number of errors so far.
    pub fn errors(&self) -> (Vec<ErrorRecord>, u64) {
        let log = self.errors.lock();
        (log.records.iter().copied().collect(), log.count)
    }

    pub(crate) fn add_queue(&self, info: QueueInfo) -> Result<(), NoQueue> {
        let mut queues = self.queues.lock();
        if self.phase() == Phase::Closing {
            return Err(NoQueue::Closing);
        }
        match queues.get(&info.qid) {
            Some(before) if before.ending => return Err(NoQueue::Ending),
            Some(_) => return Err(NoQueue::InUse),
            None => {}
        }
        let counts = info.group.counts();
        let ever = match info.qid {
            0 => &counts.admin_queues,
            _ => &counts.io_queues,
        };
        ever.fetch_add(1, Ordering::Relaxed);
        self.hosts.came(&self.hostnqn, info.transport, &info.stats);
        queues.insert(info.qid, info);
        Ok(())
    }

    /// Marks a queue as closed.
    pub(crate) fn end_queue(&self, qid: u16) {
        if let Some(queue) = self.queues.lock().get_mut(&qid) {
            queue.ending = true;
        }
    }

    /// True while an I/O queue has a command in progress, as of the last upkeep of its core.
    pub(crate) fn has_io_in_progress(&self) -> bool {
        let queues = self.queues.lock();
        let mut io_queues = queues.range(1..);
        io_queues.any(|(_, queue)| queue.stats.inflight.load(Ordering::Relaxed) > 0)
    }

    /// Removes a queue. Returns the number of remaining queues.
    pub(crate) fn remove_queue(&self, qid: u16) -> usize {
        let mut queues = self.queues.lock();
        if let Some(queue) = queues.remove(&qid) {
            let totals = queue.stats.totals();
            queue.group.counts().retire(queue.listener, totals);
            self.hosts
                .went(&self.hostnqn, queue.transport, &queue.stats);
            *self.retired.lock() += totals;
        }
        queues.len()
    }

    /// Statistics of all queues, including deleted ones.
    pub fn totals(&self) -> Totals {
        let queues = self.queues.lock();
        let mut totals = *self.retired.lock();
        for queue in queues.values() {
            totals += queue.stats.totals();
        }
        totals
    }

    /// Commands that failed with an unrecovered media or data integrity error (SMART log).
    pub fn media_errors(&self) -> u64 {
        self.media_errors.load(Ordering::Relaxed)
    }

    /// Number of I/O queues that the host may connect; `u16::MAX` if it has not requested a number.
    pub fn io_queues(&self) -> u16 {
        self.io_queues.load(Ordering::Relaxed)
    }

    pub(crate) fn set_io_queues(&self, granted: u16) {
        self.io_queues.store(granted, Ordering::Relaxed);
    }

    /// True if the host honours retry delays (ACRE), and so understands Command Interrupted.
    pub fn retry_delays(&self) -> bool {
        self.retry_delays.load(Ordering::Relaxed)
    }

    pub(crate) fn set_retry_delays(&self, honoured: bool) {
        self.retry_delays.store(honoured, Ordering::Relaxed);
    }

    pub fn queues(&self) -> Vec<QueueInfo> {
        self.queues.lock().values().cloned().collect()
    }

    pub fn queue(&self, qid: u16) -> Option<QueueInfo> {
        self.queues.lock().get(&qid).cloned()
    }
}

/// True for unrecovered media and data integrity errors (Base figure 207); false for Compare
/// Failure.
fn is_media_error(status: StatusCode) -> bool {
    let code = status.code();
    code == StatusCode::UNRECOVERED_READ_ERROR
        || code == StatusCode::WRITE_FAULT
        || code == StatusCode::GUARD_CHECK_ERROR
        || code == StatusCode::APPLICATION_TAG_CHECK_ERROR
        || code == StatusCode::REFERENCE_TAG_CHECK_ERROR
        || code == StatusCode::STORAGE_TAG_CHECK_ERROR
}
