//! Counters of the transport: one set per core, and one of the management thread. They are relaxed
//! atomics, which any thread can read.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use nacre_nvmf::subsystems::{LATENCY_BUCKETS, latency_bucket};
use nacre_nvmf_wire::rdma::RejectStatus;
use nacre_transport_rdma_verbs::{CmEventKind, WcStatus};

/// Bounds of the classes of the poll batch histogram: completions of one poll, at most.
pub const BATCH_CLASSES: [usize; 8] = [0, 1, 2, 4, 8, 16, 32, usize::MAX];

const STATUSES: usize = WcStatus::ALL.len();

/// What requests are timed by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Timed {
    Send = 0,
    Read = 1,
    Write = 2,
}

impl Timed {
    pub const ALL: [Self; 3] = [Self::Send, Self::Read, Self::Write];

    pub fn name(self) -> &'static str {
        match self {
            Self::Send => "send",
            Self::Read => "read",
            Self::Write => "write",
        }
    }
}

/// Times from post to completion: their number by bucket (the buckets of NVMe commands), and their
/// sum.
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

/// What [`Latency`] said at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LatencySnapshot {
    pub sum_ns: u64,
    /// Completions per latency bucket; see [`LATENCY_BUCKETS`].
    pub buckets: [u64; LATENCY_BUCKETS],
}

impl LatencySnapshot {
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// The time in microseconds that at least `fraction` of all stayed below, as precise as the
    /// buckets; for the last bucket its lower end. `None`: no times.
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
        /// The counters of one core. Written by that core only.
        #[derive(Debug, Default)]
        pub struct Stats {
            $($(#[$doc])* pub $name: AtomicU64,)*
            /// Completions that were errors, by the number of their status.
            pub errors: [AtomicU64; STATUSES],
            /// Polls by the completions that they found; see [`BATCH_CLASSES`].
            pub batches: [AtomicU64; BATCH_CLASSES.len()],
            /// Latency by kind; see [`Timed`].
            pub latency: [Latency; Timed::ALL.len()],
            /// The present receives, and those of them that wait for buffers to be posted with.
            pub receives: AtomicU64,
            pub receives_waiting: AtomicU64,
        }

        /// What [`Stats`] said at one moment.
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
            /// Names and values, for metrics.
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
    /// Turns at whose end receives waited for buffers, which commands in flight hold: hosts have to
    /// wait.
    receives_waited,
    /// READs that waited for the negotiated depth, and responses that waited for room.
    reads_waited,
    responses_waited,
    /// Commands whose data pointer was refused.
    sgl_refused,
    /// Queue pairs that were destroyed before they had flushed.
    drains_given_up,
}

impl StatsSnapshot {
    pub fn latency(&self, of: Timed) -> &LatencySnapshot {
        &self.latency[of as usize]
    }

    /// Completions that failed, by the name of each status, zeros included. Flushes are not
    /// failures.
    pub fn completion_errors(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let statuses = WcStatus::ALL.iter().zip(self.errors);
        let failures = statuses.filter(|(status, _)| {
            !matches!(status, WcStatus::Success | WcStatus::WorkRequestFlushed)
        });
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
    /// Receives came or went.
    pub(crate) fn receives_are(&self, more: usize, fewer: usize) {
        let now = self.receives.load(Ordering::Relaxed) + more as u64;
        self.receives
            .store(now.saturating_sub(fewer as u64), Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn batch(&self, completions: usize) {
        let class = BATCH_CLASSES.iter().position(|most| completions <= *most);
        add(&self.batches[class.unwrap_or(BATCH_CLASSES.len() - 1)], 1);
    }

    #[inline]
    pub(crate) fn timed(&self, what: Timed, nanos: u64) {
        let latency = &self.latency[what as usize];
        add(&latency.sum_ns, nanos);
        add(&latency.buckets[latency_bucket(nanos)], 1);
    }
}

/// Counts of the management thread.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ControlCounts {
    /// Events of the connection manager, by name.
    pub events: BTreeMap<&'static str, u64>,
    /// Asynchronous events of devices.
    pub async_events: u64,
    /// Connection requests refused, by reason.
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

/// Returns the name that `rdma_event_str(3)` returns.
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
