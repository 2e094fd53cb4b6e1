//! Counters: per core, relaxed, read by whoever asks; and those of the management thread.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use nacre_nvmf_wire::rdma::RejectStatus;
use nacre_rdma_verbs::{CmEventKind, WcStatus};

/// Bounds of the classes of the poll batch histogram: completions of one poll, at most.
pub const BATCH_CLASSES: [usize; 8] = [0, 1, 2, 4, 8, 16, 32, usize::MAX];

const STATUSES: usize = WcStatus::ALL.len();

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// The counters of one core. Written by that core only.
        #[derive(Debug, Default)]
        pub struct Stats {
            $($(#[$doc])* pub $name: AtomicU64,)*
            /// Completions that were errors, by the number of their status.
            pub errors: [AtomicU64; STATUSES],
            /// Polls by the completions that they found; see [`BATCH_CLASSES`].
            pub batches: [AtomicU64; BATCH_CLASSES.len()],
        }

        /// What [`Stats`] said at one moment.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
        pub struct StatsSnapshot {
            $($(#[$doc])* pub $name: u64,)*
            pub errors: [u64; STATUSES],
            pub batches: [u64; BATCH_CLASSES.len()],
        }

        impl Stats {
            pub fn snapshot(&self) -> StatsSnapshot {
                StatsSnapshot {
                    $($name: self.$name.load(Ordering::Relaxed),)*
                    errors: std::array::from_fn(|at| self.errors[at].load(Ordering::Relaxed)),
                    batches: std::array::from_fn(|at| self.batches[at].load(Ordering::Relaxed)),
                }
            }
        }

        impl StatsSnapshot {
            /// Names and values, for metrics.
            pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name),)*].into_iter()
            }
        }

        impl std::ops::Add for StatsSnapshot {
            type Output = StatsSnapshot;

            fn add(self, other: StatsSnapshot) -> StatsSnapshot {
                StatsSnapshot {
                    $($name: self.$name + other.$name,)*
                    errors: std::array::from_fn(|at| self.errors[at] + other.errors[at]),
                    batches: std::array::from_fn(|at| self.batches[at] + other.batches[at]),
                }
            }
        }
    };
}

counters! {
    /// Connections that a host opened.
    accepted,
    /// Connections ended, by cause.
    closed_by_peer,
    closed_broken,
    closed_protocol,
    closed_timeout,
    closed_local,
    recv_ops,
    recv_bytes,
    send_ops,
    send_bytes,
    read_ops,
    read_bytes,
    write_ops,
    write_bytes,
    /// Completions taken, of all kinds.
    completions,
    /// Doorbells of send queues.
    doorbells,
    /// Receive buffers posted.
    receives_posted,
    /// Data that was copied on its way between the wire and a buffer: none, ever.
    copied_bytes,
    /// READs that waited for the negotiated depth, and responses that waited for room.
    reads_waited,
    responses_waited,
    /// Commands whose data pointer was refused.
    sgl_refused,
    /// Queue pairs that were destroyed before they had flushed.
    drains_given_up,
}

impl StatsSnapshot {
    /// Completions that failed, by the name of their status; flushes are not failures.
    pub fn completion_errors(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let statuses = WcStatus::ALL.iter().zip(self.errors);
        let failures = statuses.filter(|(status, _)| **status != WcStatus::Success);
        failures.map(|(status, count)| (status.name(), count))
    }

    pub fn retry_exceeded(&self) -> u64 {
        let of = |status: WcStatus| self.errors[status as usize];
        of(WcStatus::RetryExceeded) + of(WcStatus::RnrRetryExceeded)
    }
}

/// Adds without a locked instruction: there is one writer.
#[inline]
pub(crate) fn add(counter: &AtomicU64, n: u64) {
    let sum = counter.load(Ordering::Relaxed).wrapping_add(n);
    counter.store(sum, Ordering::Relaxed);
}

impl Stats {
    #[inline]
    pub(crate) fn batch(&self, completions: usize) {
        let class = BATCH_CLASSES.iter().position(|most| completions <= *most);
        add(&self.batches[class.unwrap_or(BATCH_CLASSES.len() - 1)], 1);
    }
}

/// What the management thread has seen.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ControlCounts {
    /// Events of the connection manager, by name.
    pub events: BTreeMap<&'static str, u64>,
    /// Asynchronous events of devices.
    pub async_events: u64,
    /// Connection requests refused, by what they were told.
    pub rejects: BTreeMap<&'static str, u64>,
    pub rejected_total: u64,
    /// Completion queues that were made larger.
    pub cq_resizes: u64,
}

impl ControlCounts {
    pub(crate) fn reject(&mut self, status: RejectStatus) {
        *self.rejects.entry(status.name()).or_default() += 1;
        self.rejected_total += 1;
    }

    pub(crate) fn event(&mut self, kind: &CmEventKind) {
        *self.events.entry(event_name(kind)).or_default() += 1;
    }
}

/// As `rdma_event_str(3)` calls it.
pub(crate) fn event_name(kind: &CmEventKind) -> &'static str {
    match kind {
        CmEventKind::AddressResolved { .. } => "RDMA_CM_EVENT_ADDR_RESOLVED",
        CmEventKind::AddressError { .. } => "RDMA_CM_EVENT_ADDR_ERROR",
        CmEventKind::RouteResolved => "RDMA_CM_EVENT_ROUTE_RESOLVED",
        CmEventKind::RouteError { .. } => "RDMA_CM_EVENT_ROUTE_ERROR",
        CmEventKind::ConnectRequest { .. } => "RDMA_CM_EVENT_CONNECT_REQUEST",
        CmEventKind::ConnectError { .. } => "RDMA_CM_EVENT_CONNECT_ERROR",
        CmEventKind::Unreachable { .. } => "RDMA_CM_EVENT_UNREACHABLE",
        CmEventKind::Rejected { .. } => "RDMA_CM_EVENT_REJECTED",
        CmEventKind::Established { .. } => "RDMA_CM_EVENT_ESTABLISHED",
        CmEventKind::Disconnected => "RDMA_CM_EVENT_DISCONNECTED",
        CmEventKind::DeviceRemoval => "RDMA_CM_EVENT_DEVICE_REMOVAL",
        CmEventKind::AddressChange => "RDMA_CM_EVENT_ADDR_CHANGE",
        CmEventKind::TimewaitExit => "RDMA_CM_EVENT_TIMEWAIT_EXIT",
        CmEventKind::Other { .. } => "other",
    }
}
