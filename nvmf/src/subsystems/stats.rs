//! Statistics of queues. The core that owns a queue writes them; any thread can read them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The kind of a command, for statistics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Read = 0,
    Write = 1,
    /// All other commands.
    Other = 2,
}

/// Number of latency buckets. Bucket `i` counts commands that took less than `2^i` microseconds and
/// do not belong to a lower bucket; the last one counts all longer ones.
pub const LATENCY_BUCKETS: usize = 26;

/// The bucket of a latency in nanoseconds.
#[inline]
pub fn latency_bucket(nanos: u64) -> usize {
    let micros = nanos / 1000;
    ((u64::BITS - micros.leading_zeros()) as usize).min(LATENCY_BUCKETS - 1)
}

#[derive(Default)]
#[repr(align(128))]
pub struct KindStats {
    pub operations: AtomicU64,
    pub bytes: AtomicU64,
    pub errors: AtomicU64,
    pub latency_ns: AtomicU64,
    pub latency: [AtomicU64; LATENCY_BUCKETS],
}

/// Counters of one queue.
#[derive(Default)]
pub struct QueueStats {
    kinds: [KindStats; 3],
    /// Outstanding commands, at the last upkeep of the core.
    pub inflight: AtomicU64,
}

/// Totals of a set of queues: all completed commands, and the bytes of the successful ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Totals {
    pub read: KindTotals,
    pub write: KindTotals,
    pub other: KindTotals,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct KindTotals {
    pub operations: u64,
    pub bytes: u64,
    pub errors: u64,
}

impl Totals {
    /// Completed commands of all kinds, successful or not.
    pub fn operations(&self) -> u64 {
        self.read.operations + self.write.operations + self.other.operations
    }
}

impl Totals {
    /// The larger value of each counter.
    pub(crate) fn max(&self, other: &Self) -> Self {
        let kind = |a: &KindTotals, b: &KindTotals| KindTotals {
            operations: a.operations.max(b.operations),
            bytes: a.bytes.max(b.bytes),
            errors: a.errors.max(b.errors),
        };
        Self {
            read: kind(&self.read, &other.read),
            write: kind(&self.write, &other.write),
            other: kind(&self.other, &other.other),
        }
    }
}

impl std::ops::AddAssign for Totals {
    fn add_assign(&mut self, more: Self) {
        for (sum, more) in [
            (&mut self.read, more.read),
            (&mut self.write, more.write),
            (&mut self.other, more.other),
        ] {
            sum.operations += more.operations;
            sum.bytes += more.bytes;
            sum.errors += more.errors;
        }
    }
}

impl QueueStats {
    pub fn totals(&self) -> Totals {
        let kind = |kind| {
            let stats = self.kind(kind);
            KindTotals {
                operations: stats.operations.load(Ordering::Relaxed),
                bytes: stats.bytes.load(Ordering::Relaxed),
                errors: stats.errors.load(Ordering::Relaxed),
            }
        };
        Totals {
            read: kind(Kind::Read),
            write: kind(Kind::Write),
            other: kind(Kind::Other),
        }
    }

    pub fn kind(&self, kind: Kind) -> &KindStats {
        &self.kinds[kind as usize]
    }

    /// Counts a completed command. Only for the owning core, so a load and a store suffice.
    pub(crate) fn finished(&self, kind: Kind, bytes: u64, ok: bool, took: Duration) {
        let stats = &self.kinds[kind as usize];
        let nanos = took.as_nanos() as u64;
        add(&stats.operations, 1);
        add(&stats.latency_ns, nanos);
        add(&stats.latency[latency_bucket(nanos)], 1);
        if ok {
            add(&stats.bytes, bytes);
        } else {
            add(&stats.errors, 1);
        }
    }
}

fn add(counter: &AtomicU64, by: u64) {
    counter.store(
        counter.load(Ordering::Relaxed).wrapping_add(by),
        Ordering::Relaxed,
    );
}
