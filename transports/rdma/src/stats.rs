//! Counters of the RDMA transport.
//!
//! [`Stats`] has those of the data path: a set for each core and device. A set consists of relaxed
//! atomics that one core writes and any thread can read. [`ControlCounts`] has those of the
//! management thread.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use nacre_nvmf::subsystems::{LATENCY_BUCKETS, latency_bucket};
use nacre_nvmf_wire::rdma::RejectStatus;
use nacre_transport_rdma_verbs::{CmEventKind, WcStatus};

/// Upper bounds of the classes of the poll batch histogram, in completions per poll.
pub const BATCH_CLASSES: [usize; 8] = [0, 1, 2, 4, 8, 16, 32, usize::MAX];

const STATUSES: usize = WcStatus::ALL.len();

/// The kinds of work requests whose latency is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Timed {
    Send = 0,
    Read = 1,
    Write = 2,
}

impl Timed {
    pub const ALL: [Self; 3] = [Self::Send, Self::Read, Self::Write];

    /// The name in metrics and replies.
    pub fn name(self) -> &'static str {
        match self {
            Self::Send => "send",
            Self::Read => "read",
            Self::Write => "write",
        }
    }
}

/// A histogram of the times from post to completion, in the buckets of [`LATENCY_BUCKETS`], and
/// their sum.
#[derive(Debug, Default)]
pub struct Latency {
    sum_ns: AtomicU64,
    buckets: [AtomicU64; LATENCY_BUCKETS],
}

impl Latency {
    fn snapshot(&self) -> LatencySnapshot {
        LatencySnapshot {
            sum_ns: self.sum_ns.load(Ordering::Relaxed),
            buckets: std::array::from_fn(|at| self.buckets[at].load(Ordering::Relaxed)),
        }
    }
}

/// The values of [`Latency`] at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LatencySnapshot {
    /// Sum of all times.
    pub sum_ns: u64,
    /// Completions per latency bucket; see [`LATENCY_BUCKETS`].
    pub buckets: [u64; LATENCY_BUCKETS],
}

impl LatencySnapshot {
    /// Number of times, in all buckets.
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// The quantile `fraction` (0 to 1) of the times, in microseconds: the upper end of its bucket,
    /// or the lower end of the last bucket. `None`: nothing was measured.
    pub fn quantile_us(&self, fraction: f64) -> Option<u64> {
        let wanted = (self.count() as f64 * fraction).ceil().max(1.0) as u64;
        let mut seen = 0;
        for (at, count) in self.buckets.iter().enumerate() {
            seen += count;
            if *count > 0 && seen >= wanted {
                return Some(1 << at.min(LATENCY_BUCKETS - 2));
            }
        }
        None
    }
}

impl std::ops::Add for LatencySnapshot {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            sum_ns: self.sum_ns + other.sum_ns,
            buckets: std::array::from_fn(|at| self.buckets[at] + other.buckets[at]),
        }
    }
}

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// The counters of one device on one core. Only that core writes them.
        #[derive(Debug, Default)]
        pub struct Stats {
            $($(#[$doc])* pub $name: AtomicU64,)*
            /// Failed completions by the number of their [`WcStatus`]. Flushes are not counted.
            pub errors: [AtomicU64; STATUSES],
            /// Polls of the completion queue by their completions; see [`BATCH_CLASSES`].
            pub batches: [AtomicU64; BATCH_CLASSES.len()],
            /// Latency of work requests, indexed by [`Timed`].
            pub latency: [Latency; Timed::ALL.len()],
            /// Receive slots now, and those of them that are not posted for lack of buffers.
            pub receives: AtomicU64,
            /// Gauge: receives that were not posted at the end of the last turn, for lack of
            /// buffers.
            pub receives_waiting: AtomicU64,
        }

        /// The values of [`Stats`] at one moment.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
        pub struct StatsSnapshot {
            $($(#[$doc])* pub $name: u64,)*
            pub errors: [u64; STATUSES],
            pub batches: [u64; BATCH_CLASSES.len()],
            pub latency: [LatencySnapshot; Timed::ALL.len()],
            pub receives: u64,
            pub receives_waiting: u64,
        }

        impl Stats {
            /// Reads all counters, one after the other.
            pub fn snapshot(&self) -> StatsSnapshot {
                StatsSnapshot {
                    $($name: self.$name.load(Ordering::Relaxed),)*
                    errors: std::array::from_fn(|at| self.errors[at].load(Ordering::Relaxed)),
                    batches: std::array::from_fn(|at| self.batches[at].load(Ordering::Relaxed)),
                    latency: std::array::from_fn(|at| self.latency[at].snapshot()),
                    receives: self.receives.load(Ordering::Relaxed),
                    receives_waiting: self.receives_waiting.load(Ordering::Relaxed),
                }
            }
        }

        impl StatsSnapshot {
            /// Names and values of the single counters, for metrics: without `errors`, `batches`
            /// and `latency`.
            pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
                let now = [
                    ("receives", self.receives),
                    ("receives_waiting", self.receives_waiting),
                ];
                [$((stringify!($name), self.$name),)*].into_iter().chain(now)
            }
        }

        impl std::ops::Add for StatsSnapshot {
            type Output = StatsSnapshot;

            fn add(self, other: StatsSnapshot) -> StatsSnapshot {
                StatsSnapshot {
                    $($name: self.$name + other.$name,)*
                    errors: std::array::from_fn(|at| self.errors[at] + other.errors[at]),
                    batches: std::array::from_fn(|at| self.batches[at] + other.batches[at]),
                    latency: std::array::from_fn(|at| self.latency[at] + other.latency[at]),
                    receives: self.receives + other.receives,
                    receives_waiting: self.receives_waiting + other.receives_waiting,
                }
            }
        }
    };
}

counters! {
    /// Connections established since the start.
    accepted,
    /// Connections ended, by cause. This one: the host disconnected.
    closed_by_peer,
    /// A request, the queue pair, its queues or its device failed.
    closed_broken,
    /// The host violated NVMe/RDMA.
    closed_protocol,
    /// The host did not connect its queue in time, or the queue did not drain in time.
    closed_timeout,
    /// Connections that this side closed.
    closed_local,
    /// Capsules received.
    recv_ops,
    /// Bytes of the capsules received.
    recv_bytes,
    /// SENDs queued: one for each response.
    send_ops,
    /// Bytes of the SENDs queued.
    send_bytes,
    /// RDMA READs queued, which fetch data of hosts.
    read_ops,
    /// Bytes of the RDMA READs queued.
    read_bytes,
    /// RDMA WRITEs queued, which return data to hosts.
    write_ops,
    /// Bytes of the RDMA WRITEs queued.
    write_bytes,
    /// Completions polled, of all kinds, failed and flushed ones included.
    completions,
    /// Doorbells of send queues: batches of work requests posted.
    doorbells,
    /// Receives posted, to shared receive queues and to those of single connections.
    receives_posted,
    /// Turns that ended with receives that are not posted, because commands in flight hold the
    /// buffers. Hosts have to wait.
    receives_waited,
    /// Posts of a connection's requests after which READs still waited, for the negotiated depth
    /// or for room in the send queue.
    reads_waited,
    /// Responses that waited for room in the send queue.
    responses_waited,
    /// Commands that failed because of their SGL, or because their response has too many RDMA
    /// WRITEs for the send queue.
    sgl_refused,
    /// Queue pairs that were destroyed before all their work requests were flushed.
    drains_given_up,
}

impl StatsSnapshot {
    /// The latency of one kind of work requests.
    pub fn latency(&self, of: Timed) -> &LatencySnapshot {
        &self.latency[of as usize]
    }

    /// Failed completions by the C name of their status, zeros included. Flushes are left out.
    pub fn completion_errors(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let statuses = WcStatus::ALL.iter().zip(self.errors);
        let failures = statuses.filter(|(status, _)| {
            !matches!(status, WcStatus::Success | WcStatus::WorkRequestFlushed)
        });
        failures.map(|(status, count)| (status.name(), count))
    }

    /// Completions with `IBV_WC_RETRY_EXC_ERR` or `IBV_WC_RNR_RETRY_EXC_ERR`.
    pub fn retry_exceeded(&self) -> u64 {
        let of = |status: WcStatus| self.errors[status as usize];
        of(WcStatus::RetryExceeded) + of(WcStatus::RnrRetryExceeded)
    }
}

/// Adds to a counter without a locked instruction, because only one thread writes it.
#[inline]
pub(crate) fn add(counter: &AtomicU64, n: u64) {
    let sum = counter.load(Ordering::Relaxed).wrapping_add(n);
    counter.store(sum, Ordering::Relaxed);
}

impl Stats {
    /// Adds `more` receive slots, and removes `fewer`.
    pub(crate) fn receives_are(&self, more: usize, fewer: usize) {
        let now = self.receives.load(Ordering::Relaxed) + more as u64;
        self.receives
            .store(now.saturating_sub(fewer as u64), Ordering::Relaxed);
    }

    /// Counts a poll that returned this many completions.
    #[inline]
    pub(crate) fn batch(&self, completions: usize) {
        let class = BATCH_CLASSES.iter().position(|most| completions <= *most);
        add(&self.batches[class.unwrap_or(BATCH_CLASSES.len() - 1)], 1);
    }

    /// Adds the latency of one work request.
    #[inline]
    pub(crate) fn timed(&self, what: Timed, nanos: u64) {
        let latency = &self.latency[what as usize];
        add(&latency.sum_ns, nanos);
        add(&latency.buckets[latency_bucket(nanos)], 1);
    }
}

/// Counters of the management thread.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ControlCounts {
    /// Events of the connection manager, by the names of `rdma_event_str(3)`, or `other`.
    pub events: BTreeMap<&'static str, u64>,
    /// Asynchronous events of devices and ports.
    pub async_events: u64,
    /// Connection requests refused, by the status sent to the host.
    pub rejects: BTreeMap<&'static str, u64>,
    pub rejected_total: u64,
    /// Enlargements of completion queues.
    pub cq_resizes: u64,
}

impl ControlCounts {
    pub(crate) fn reject(&mut self, status: RejectStatus) {
        *self.rejects.entry(status.name()).or_default() += 1;
        self.rejected_total += 1;
    }

    pub(crate) fn event(&mut self, kind: &CmEventKind) {
        let name = event_name(kind);
        debug_assert!(EVENT_NAMES.contains(&name), "{name}");
        *self.events.entry(name).or_default() += 1;
    }

    /// The counts of all events, zeros included.
    pub fn all_events(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let count = |name| self.events.get(name).copied().unwrap_or_default();
        EVENT_NAMES.into_iter().map(move |name| (name, count(name)))
    }

    /// The counts of all reasons for a refusal, zeros included.
    pub fn all_rejects(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let count = |name| self.rejects.get(name).copied().unwrap_or_default();
        let names = RejectStatus::ALL.iter().map(|status| status.name());
        names.map(move |name| (name, count(name)))
    }
}

/// All names that [`event_name`] returns.
const EVENT_NAMES: [&str; 14] = [
    "RDMA_CM_EVENT_ADDR_RESOLVED",
    "RDMA_CM_EVENT_ADDR_ERROR",
    "RDMA_CM_EVENT_ROUTE_RESOLVED",
    "RDMA_CM_EVENT_ROUTE_ERROR",
    "RDMA_CM_EVENT_CONNECT_REQUEST",
    "RDMA_CM_EVENT_CONNECT_ERROR",
    "RDMA_CM_EVENT_UNREACHABLE",
    "RDMA_CM_EVENT_REJECTED",
    "RDMA_CM_EVENT_ESTABLISHED",
    "RDMA_CM_EVENT_DISCONNECTED",
    "RDMA_CM_EVENT_DEVICE_REMOVAL",
    "RDMA_CM_EVENT_ADDR_CHANGE",
    "RDMA_CM_EVENT_TIMEWAIT_EXIT",
    "other",
];

/// The name of an event, as `rdma_event_str(3)` returns it; `other` for unused ones.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Bucket limits are powers of two of microseconds, the sum keeps the exact times, and times
    /// beyond the last limit are in the last bucket.
    #[test]
    fn latencies() {
        let stats = Stats::default();
        assert_eq!(stats.snapshot().latency(Timed::Send).quantile_us(0.5), None);
        let times = [999, 1000, 1999, 2000, 9_999_999_999, u64::MAX / 8];
        times
            .into_iter()
            .for_each(|nanos| stats.timed(Timed::Read, nanos));
        let once = *stats.snapshot().latency(Timed::Read);
        assert_eq!(
            (once.buckets[..3].to_vec(), once.count()),
            (vec![1, 2, 1], 6)
        );
        // Ten seconds are not beyond it.
        assert_eq!(once.buckets[LATENCY_BUCKETS - 2..], [1, 1]);
        assert_eq!(once.sum_ns, times.iter().sum::<u64>());
        let quantiles = [0.0, 0.5, 0.6, 0.8, 1.0].map(|of| once.quantile_us(of).unwrap());
        assert_eq!(quantiles, [1, 2, 4, 1 << 24, 1 << 24]);
        let sum = stats.snapshot() + stats.snapshot();
        assert_eq!(sum.latency(Timed::Read).count(), 12);
        assert_eq!(sum.latency(Timed::Read).sum_ns, 2 * once.sum_ns);
        assert_eq!(*sum.latency(Timed::Write), LatencySnapshot::default());
    }
}
