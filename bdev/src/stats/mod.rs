//! I/O counts and latencies of a device: counted per queue without locks, merged on request.
//!
//! ```text
//! LayerQueue ── StatWriter ──> StatBlock     one per open queue, one writer, relaxed stores
//! control plane <── snapshot ── DeviceStats ─┴─ every open queue's block + totals of closed ones
//! ```
//!
//! A reset does not touch another core's counters: it raises an epoch, the writer clears its own
//! block in its next turn, and a reader counts a block with an old epoch as zero.

mod histogram;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub use histogram::{BUCKETS, GRANULARITIES, GRANULARITY, Histogram, HistogramSnapshot};

use crate::io::{Op, Status};
use Ordering::Relaxed;
use parking_lot::Mutex;

/// The values that a reset clears.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reset {
    /// Counters, sums, extremes and histograms.
    All,
    /// Only the smallest and largest latencies.
    Extremes,
    /// Only error counts, by operation and by kind.
    Errors,
}

/// Operations that share a latency histogram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    Read = 0,
    Write = 1,
    Other = 2,
}

impl Class {
    pub const ALL: [Self; 3] = [Self::Read, Self::Write, Self::Other];

    pub fn of(op: Op) -> Self {
        match op {
            Op::Read => Self::Read,
            Op::Write => Self::Write,
            _ => Self::Other,
        }
    }
}

/// One operation's counts. Latencies in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OpStats {
    /// Operations that completed without an error.
    pub ops: u64,
    pub bytes: u64,
    /// Operations that completed with an error (a miscompare is one).
    pub errors: u64,
    /// Sum of the latencies of all completed operations, with or without an error.
    pub latency_sum_ns: u64,
    /// Smallest latency; 0 when nothing completed.
    pub latency_min_ns: u64,
    pub latency_max_ns: u64,
}

/// All counts of a device, or of one of its queues, at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// Counts of each operation, indexed by [`Op::index`].
    pub ops: [OpStats; Op::COUNT],
    /// Number of failed I/Os by status, indexed by [`Status::kind`]; 0 for [`Status::Ok`].
    pub statuses: [u64; Status::KINDS],
    /// Latency histograms, indexed by [`Class`]. A successful [`crate::Queue::run_sync`] counts as
    /// 0 ns.
    pub histograms: [HistogramSnapshot; 3],
    /// I/Os in flight, as of each queue's last turn.
    pub inflight: u64,
    /// How often a queue was full and handed an I/O back.
    pub busy: u64,
    /// I/Os that a rate limit delayed.
    pub throttled: u64,
}

impl Default for Snapshot {
    fn default() -> Self {
        Self {
            ops: Default::default(),
            statuses: [0; Status::KINDS],
            histograms: Default::default(),
            inflight: 0,
            busy: 0,
            throttled: 0,
        }
    }
}

impl Snapshot {
    pub fn op(&self, op: Op) -> &OpStats {
        &self.ops[op.index()]
    }

    pub fn histogram(&self, class: Class) -> &HistogramSnapshot {
        &self.histograms[class as usize]
    }

    /// Every latency of every operation.
    pub fn histogram_all(&self) -> HistogramSnapshot {
        let mut all = HistogramSnapshot::default();
        self.histograms.iter().for_each(|h| all.merge(h));
        all
    }
}

/// A snapshot of one queue's counts.
#[derive(Debug, Clone)]
pub struct QueueSnapshot {
    /// The name of the thread that opened the queue.
    pub thread: String,
    pub snapshot: Snapshot,
}

/// The statistics of one device over all its queues.
#[derive(Debug, Default)]
pub struct DeviceStats {
    epoch: AtomicU64,
    blocks: Mutex<Blocks>,
}

#[derive(Debug, Default)]
struct Blocks {
    open: Vec<Arc<StatBlock>>,
    /// Counts of closed queues since the last reset.
    closed: Option<Box<Snapshot>>,
}

/// Numbers of resets of each kind, which may wrap. One word, so that a read is atomic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Epoch(u64);

impl Epoch {
    const BITS: u32 = 21;

    fn of(self, what: Reset) -> u64 {
        self.0 >> (Self::BITS * what as u32) & ((1 << Self::BITS) - 1)
    }

    fn raised(self, what: Reset) -> Self {
        let (mask, shift) = ((1 << Self::BITS) - 1, Self::BITS * what as u32);
        let next = (self.of(what) + 1) & mask;
        Self(self.0 & !(mask << shift) | next << shift)
    }
}

impl DeviceStats {
    /// The sum over all queues, open and closed.
    pub fn snapshot(&self) -> Snapshot {
        let blocks = self.blocks.lock();
        let mut sum = blocks.closed.as_deref().cloned().unwrap_or_default();
        let epoch = self.epoch();
        blocks
            .open
            .iter()
            .for_each(|block| block.add_to(&mut sum, epoch));
        sum
    }

    /// The counts of each open queue.
    pub fn per_queue(&self) -> Vec<QueueSnapshot> {
        let epoch = self.epoch();
        let one = |block: &Arc<StatBlock>| {
            let mut snapshot = Snapshot::default();
            block.add_to(&mut snapshot, epoch);
            QueueSnapshot {
                thread: block.thread.clone(),
                snapshot,
            }
        };
        self.blocks.lock().open.iter().map(one).collect()
    }

    /// I/Os in flight over all queues, as of each queue's last turn.
    pub fn inflight(&self) -> u64 {
        self.blocks
            .lock()
            .open
            .iter()
            .map(|block| block.inflight.load(Relaxed))
            .sum()
    }

    pub fn reset(&self, what: Reset) {
        let mut blocks = self.blocks.lock();
        match (what, blocks.closed.as_deref_mut()) {
            (Reset::All, _) => blocks.closed = None,
            (Reset::Extremes, Some(closed)) => {
                for op in &mut closed.ops {
                    (op.latency_min_ns, op.latency_max_ns) = (0, 0);
                }
            }
            (Reset::Errors, Some(closed)) => {
                closed.ops.iter_mut().for_each(|op| op.errors = 0);
                closed.statuses.fill(0);
            }
            (_, None) => {}
        }
        // The lock is held, so no other thread raises the epoch.
        self.epoch.store(self.epoch().raised(what).0, Relaxed);
    }

    fn epoch(&self) -> Epoch {
        Epoch(self.epoch.load(Relaxed))
    }

    pub(crate) fn writer(self: &Arc<Self>) -> StatWriter {
        let thread = std::thread::current();
        let name = thread
            .name()
            .map_or_else(|| format!("{:?}", thread.id()), str::to_owned);
        let mut blocks = self.blocks.lock();
        let epoch = self.epoch();
        let block = Arc::new(StatBlock::new(name, epoch));
        blocks.open.push(Arc::clone(&block));
        drop(blocks);
        StatWriter {
            epoch,
            block,
            device: Arc::clone(self),
            sync: Default::default(),
            any_sync: false,
        }
    }
}

/// One queue's counters, on their own cache lines, so that cores do not share lines.
#[derive(Debug)]
#[repr(align(128))]
struct StatBlock {
    ops: [OpCounters; Op::COUNT],
    statuses: [AtomicU64; Status::KINDS],
    inflight: AtomicU64,
    busy: AtomicU64,
    throttled: AtomicU64,
    /// The epoch of the counters.
    epoch: AtomicU64,
    histograms: [Histogram; 3],
    thread: String,
}

#[derive(Debug)]
struct OpCounters {
    ops: AtomicU64,
    bytes: AtomicU64,
    errors: AtomicU64,
    latency_sum: AtomicU64,
    /// `u64::MAX` before the first completion.
    latency_min: AtomicU64,
    latency_max: AtomicU64,
}

impl StatBlock {
    fn new(thread: String, epoch: Epoch) -> Self {
        let counters = |_| OpCounters {
            ops: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            errors: AtomicU64::new(0),
            latency_sum: AtomicU64::new(0),
            latency_min: AtomicU64::new(u64::MAX),
            latency_max: AtomicU64::new(0),
        };
        Self {
            ops: std::array::from_fn(counters),
            statuses: std::array::from_fn(|_| AtomicU64::new(0)),
            inflight: AtomicU64::new(0),
            busy: AtomicU64::new(0),
            throttled: AtomicU64::new(0),
            epoch: AtomicU64::new(epoch.0),
            histograms: std::array::from_fn(|_| Histogram::new()),
            thread,
        }
    }

    fn add_to(&self, sum: &mut Snapshot, epoch: Epoch) {
        sum.inflight += self.inflight.load(Relaxed);
        // Acquire: a reader that sees the epoch also sees the cleared counters.
        let own = Epoch(self.epoch.load(Ordering::Acquire));
        let is_of = |what| own.of(what) == epoch.of(what);
        if !is_of(Reset::All) {
            return;
        }
        sum.busy += self.busy.load(Relaxed);
        sum.throttled += self.throttled.load(Relaxed);
        for (total, op) in sum.ops.iter_mut().zip(&self.ops) {
            total.ops += op.ops.load(Relaxed);
            total.bytes += op.bytes.load(Relaxed);
            if is_of(Reset::Errors) {
                total.errors += op.errors.load(Relaxed);
            }
            total.latency_sum_ns += op.latency_sum.load(Relaxed);
            let (min, max) = (op.latency_min.load(Relaxed), op.latency_max.load(Relaxed));
            if is_of(Reset::Extremes) && min != u64::MAX {
                total.latency_min_ns = match total.latency_min_ns {
                    0 => min,
                    other => other.min(min),
                };
                total.latency_max_ns = total.latency_max_ns.max(max);
            }
        }
        if is_of(Reset::Errors) {
            for (total, status) in sum.statuses.iter_mut().zip(&self.statuses) {
                *total += status.load(Relaxed);
            }
        }
        for (total, histogram) in sum.histograms.iter_mut().zip(&self.histograms) {
            histogram.add_to(total);
        }
    }

    fn clear(&self, what: Reset) {
        let all = what == Reset::All;
        for op in &self.ops {
            if all || what == Reset::Extremes {
                op.latency_min.store(u64::MAX, Relaxed);
                op.latency_max.store(0, Relaxed);
            }
            if all || what == Reset::Errors {
                op.errors.store(0, Relaxed);
            }
            if all {
                for counter in [&op.ops, &op.bytes, &op.latency_sum] {
                    counter.store(0, Relaxed);
                }
            }
        }
        if all || what == Reset::Errors {
            self.statuses
                .iter()
                .for_each(|status| status.store(0, Relaxed));
        }
        if all {
            self.busy.store(0, Relaxed);
            self.throttled.store(0, Relaxed);
            self.histograms.iter().for_each(Histogram::clear);
        }
    }
}

/// The writer of a block: a queue, on its core.
#[derive(Debug)]
pub(crate) struct StatWriter {
    epoch: Epoch,
    block: Arc<StatBlock>,
    device: Arc<DeviceStats>,
    /// Synchronous operations since the last turn, and their bytes, indexed by [`Op::index`].
    sync: [(u64, u64); Op::COUNT],
    any_sync: bool,
}

impl StatWriter {
    /// Ends a turn: publishes synchronous operations and the number in flight, and applies resets.
    pub(crate) fn turn(&mut self, inflight: usize) {
        if self.any_sync {
            self.publish_sync();
        }
        self.block.inflight.store(inflight as u64, Relaxed);
        let epoch = self.device.epoch();
        if epoch != self.epoch {
            for what in [Reset::All, Reset::Extremes, Reset::Errors] {
                if epoch.of(what) != self.epoch.of(what) {
                    self.block.clear(what);
                }
            }
            self.epoch = epoch;
            self.block.epoch.store(epoch.0, Ordering::Release);
        }
    }

    /// Counts a successful synchronous operation; readers see it after the next turn.
    #[inline]
    pub(crate) fn ran_sync(&mut self, op: Op, bytes: u64) {
        let (ops, sum) = &mut self.sync[op.index()];
        (*ops, *sum) = (*ops + 1, *sum + bytes);
        self.any_sync = true;
    }

    fn publish_sync(&mut self) {
        self.any_sync = false;
        for op in Op::ALL {
            let (ops, bytes) = std::mem::take(&mut self.sync[op.index()]);
            if ops > 0 {
                let counters = &self.block.ops[op.index()];
                add(&counters.ops, ops);
                add(&counters.bytes, bytes);
                // A latency of 0 becomes 1, as in `completed`.
                counters.latency_min.store(1, Relaxed);
                self.block.histograms[Class::of(op) as usize].record(0, ops);
            }
        }
    }

    #[inline]
    pub(crate) fn completed(&self, op: Op, bytes: u64, status: Status, latency_ns: u64) {
        let counters = &self.block.ops[op.index()];
        if status.is_ok() {
            add(&counters.ops, 1);
            add(&counters.bytes, bytes);
        } else {
            add(&counters.errors, 1);
            add(&self.block.statuses[status.kind()], 1);
        }
        add(&counters.latency_sum, latency_ns);
        if latency_ns < counters.latency_min.load(Relaxed) {
            // 0 means no value in a snapshot, so the smallest latency is 1.
            counters.latency_min.store(latency_ns.max(1), Relaxed);
        }
        if latency_ns > counters.latency_max.load(Relaxed) {
            counters.latency_max.store(latency_ns, Relaxed);
        }
        self.block.histograms[Class::of(op) as usize].record(latency_ns, 1);
    }

    pub(crate) fn busy(&self) {
        add(&self.block.busy, 1);
    }

    pub(crate) fn throttled(&self) {
        add(&self.block.throttled, 1);
    }
}

impl Drop for StatWriter {
    fn drop(&mut self) {
        self.turn(0);
        let mut blocks = self.device.blocks.lock();
        blocks.open.retain(|block| !Arc::ptr_eq(block, &self.block));
        let epoch = self.device.epoch();
        let mut closed = blocks.closed.take().unwrap_or_default();
        self.block.add_to(&mut closed, epoch);
        blocks.closed = Some(closed);
    }
}

/// Adds to a counter that only this core writes.
fn add(counter: &AtomicU64, by: u64) {
    counter.store(counter.load(Relaxed) + by, Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A reset of errors keeps other counts. Readers see it immediately, for open and closed
    /// queues.
    #[test]
    fn errors_are_reset_alone() {
        let stats = Arc::new(DeviceStats::default());
        let (mut open, closed) = (stats.writer(), stats.writer());
        for writer in [&open, &closed] {
            writer.completed(Op::Read, 512, Status::Ok, 10);
            writer.completed(Op::Read, 512, Status::ReadError, 20);
        }
        drop(closed);
        assert_eq!(stats.snapshot().op(Op::Read).errors, 2);
        stats.reset(Reset::Errors);
        for _ in 0..2 {
            let now = stats.snapshot();
            let read = now.op(Op::Read);
            assert_eq!((read.ops, read.bytes, read.errors), (2, 1024, 0));
            assert_eq!((read.latency_min_ns, read.latency_max_ns), (10, 20));
            assert_eq!(now.statuses, [0; Status::KINDS]);
            open.turn(0);
        }
        open.completed(Op::Write, 512, Status::WriteError, 5);
        assert_eq!(stats.snapshot().op(Op::Write).errors, 1);
    }

    /// Readers see a synchronous I/O after the next turn, or when its queue closes. It counts
    /// before a later reset.
    #[test]
    fn synchronous_io_is_counted() {
        let stats = Arc::new(DeviceStats::default());
        let mut queue = stats.writer();
        queue.ran_sync(Op::Read, 512);
        queue.ran_sync(Op::Read, 4096);
        queue.ran_sync(Op::Write, 512);
        queue.turn(0);
        let snapshot = stats.snapshot();
        let read = OpStats {
            ops: 2,
            bytes: 4608,
            latency_min_ns: 1,
            ..OpStats::default()
        };
        assert_eq!(snapshot.op(Op::Read), &read);
        assert_eq!(snapshot.op(Op::Write).ops, 1);
        let classes = [Class::Read, Class::Write].map(|c| snapshot.histogram(c).count());
        assert_eq!(classes, [2, 1]);
        queue.turn(0);
        assert_eq!(stats.snapshot(), snapshot, "counted once");
        queue.ran_sync(Op::Read, 512);
        stats.reset(Reset::All);
        queue.turn(0);
        assert_eq!(stats.snapshot(), Snapshot::default());
        queue.ran_sync(Op::Read, 512);
        drop(queue);
        assert_eq!(stats.snapshot().op(Op::Read).ops, 1);
    }

    /// Reset counts of one kind wrap without changing the others.
    #[test]
    fn epochs_wrap_by_themselves() {
        let last = Epoch(((1 << Epoch::BITS) - 1) << Epoch::BITS);
        assert_eq!(last.raised(Reset::Extremes), Epoch(0));
        let one = Epoch(0).raised(Reset::All).raised(Reset::Errors);
        let of = [Reset::All, Reset::Extremes, Reset::Errors].map(|what| one.of(what));
        assert_eq!(of, [1, 0, 1]);
    }

    /// Counts of several queues add up, also after one closed. A reset clears them all at once for
    /// readers, although the writers clear their blocks only in their next turn.
    #[test]
    fn merge_and_reset() {
        let stats = Arc::new(DeviceStats::default());
        let (mut one, two) = (stats.writer(), stats.writer());
        one.completed(Op::Read, 4096, Status::Ok, 100);
        one.completed(Op::Read, 4096, Status::ReadError, 300);
        two.completed(Op::Read, 512, Status::Ok, 50);
        two.busy();
        drop(two);
        let snapshot = stats.snapshot();
        let read = OpStats {
            ops: 2,
            bytes: 4608,
            errors: 1,
            latency_sum_ns: 450,
            latency_min_ns: 50,
            latency_max_ns: 300,
        };
        assert_eq!(snapshot.op(Op::Read), &read);
        assert_eq!(snapshot.statuses[Status::ReadError.kind()], 1);
        assert_eq!(
            (snapshot.busy, snapshot.histogram(Class::Read).count()),
            (1, 3)
        );
        assert_eq!(stats.per_queue().len(), 1);

        stats.reset(Reset::Extremes);
        let read = OpStats {
            latency_min_ns: 0,
            latency_max_ns: 0,
            ..read
        };
        assert_eq!(stats.snapshot().op(Op::Read), &read);
        stats.reset(Reset::All);
        assert_eq!(stats.snapshot(), Snapshot::default());
        one.turn(3);
        assert_eq!(
            stats.snapshot(),
            Snapshot {
                inflight: 3,
                ..Snapshot::default()
            }
        );
        one.completed(Op::Write, 1, Status::Ok, 0);
        assert_eq!(stats.snapshot().op(Op::Write).latency_min_ns, 1);
    }
}
