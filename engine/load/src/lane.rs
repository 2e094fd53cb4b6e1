//! A lane: one I/O queue, kept at the depth of the job as far as its rate allows. It submits I/O,
//! collects completions, and verifies data. A [`crate::worker::Worker`] polls its lanes.

use nacre_bdev::{Busy, Completion, Done, Io, Op, Queue};
use nacre_hugepages::{Buf, Pool};
use nacre_reactor::Nanos;

use super::access::{Access, Place};
use super::job::{Area, Job, Verify};
use super::ledger::Ledger;
use super::pattern::Stamp;
use super::report::Tally;

/// Attempts to find a range without an I/O in flight.
const TRIES: u32 = 64;

/// Total bytes of the write buffers that a lane uses in turn if contents do not matter. They fit
/// into the core's cache, so that the run measures the target and not this machine's memory.
const SOURCES: usize = 256 << 10;

/// The number of these buffers; 0 with verification, and for jobs that only read.
pub(crate) fn sources(job: &Job) -> usize {
    match (job.verify, job.read_percent()) {
        (Verify::Off, 0..100) => {
            (SOURCES / job.sizes.max as usize).clamp(1, usize::from(job.options.depth))
        }
        _ => 0,
    }
}

/// The current activity of a lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Write every unit once, so that later reads can be verified.
    Fill,
    /// Run the requested load.
    Run,
    /// Read every unit whose contents are known: it was written, and its last write succeeded.
    ReadBack,
    /// Read every unit, and check it against the pattern of any run.
    Scan,
}

/// The namespace, and values common to all its I/O.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Namespace {
    pub nsid: u32,
    pub block_size: u32,
    /// Distinguishes this run's blocks from those of other runs.
    pub run: u64,
}

#[derive(Clone, Copy)]
struct Slot {
    op: Op,
    since: Nanos,
    place: Place,
}

/// A queue that a lane drives: an NVMe-oF I/O queue or a queue of a drive.
pub(crate) trait Load: Queue {
    /// The queue id within its controller.
    fn qid(&self) -> u16;

    /// True if the queue is connected.
    fn is_live(&self) -> bool {
        true
    }

    /// The reason why the queue can never connect; `None` while retries are useful.
    fn refusal(&self) -> Option<&str> {
        None
    }

    /// The reason of the last failed attempt to connect.
    fn failure(&self) -> Option<&str> {
        None
    }

    fn connection_counts(&self) -> ConnectionCounts {
        ConnectionCounts::default()
    }

    /// Sends submitted I/O now instead of at the next poll, which comes after all other queues.
    fn flush(&mut self) {}
}

/// Counters of connection problems of a queue.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ConnectionCounts {
    /// Connections that were lost.
    pub losses: u64,
    /// I/Os resent.
    pub resent: u64,
    /// Moves to another transport (RDMA or TCP) with no I/O in flight.
    pub moves: u64,
}

/// A queue with its I/O in flight, its part of the namespace, and its write history.
pub(crate) struct Lane<Q> {
    queue: Q,
    namespace: Namespace,
    area: Area,
    unit_blocks: u32,
    access: Access,
    ledger: Option<Ledger>,
    scans: bool,
    pool: Pool,
    slots: Box<[Slot]>,
    free: Vec<u16>,
    /// Buffers of the last size, for reuse.
    spare: Vec<Buf>,
    /// Shared write buffers, if contents do not matter: see [`sources`].
    sources: Vec<Buf>,
    /// An I/O that the full queue handed back.
    held: Option<Io>,
    /// The next unit, in a phase that visits all units.
    cursor: u64,
}

impl<Q: Load> Lane<Q> {
    pub(crate) fn new(
        queue: Q,
        job: &Job,
        area: Area,
        namespace: Namespace,
        index: u64,
        pool: Pool,
    ) -> Self {
        let access = Access::new(job, area, namespace.block_size, index);
        let depth = usize::from(job.options.depth);
        let idle = Slot {
            op: Op::Read,
            since: Nanos::ZERO,
            place: Place { unit: 0, units: 0 },
        };
        Self {
            queue,
            namespace,
            area,
            unit_blocks: job.unit_blocks(namespace.block_size),
            ledger: (job.verify == Verify::On).then(|| Ledger::new(access.units())),
            scans: job.verify == Verify::Only,
            access,
            sources: (0..sources(job))
                .map_while(|_| pool.acquire(job.sizes.max as usize))
                .collect(),
            pool,
            slots: vec![idle; depth].into_boxed_slice(),
            free: (0..job.options.depth).rev().collect(),
            spare: Vec::with_capacity(depth),
            held: None,
            cursor: 0,
        }
    }

    pub(crate) fn queue(&self) -> &Q {
        &self.queue
    }

    /// Progress of a phase that visits all units: `(all units, visited units)`.
    pub(crate) fn position(&self) -> (u64, u64) {
        (self.access.units(), self.cursor)
    }

    pub(crate) fn begin(&mut self) {
        self.cursor = 0;
    }

    pub(crate) fn inflight(&self) -> usize {
        self.slots.len() - self.free.len() - usize::from(self.held.is_some())
    }

    /// Collects completions. Returns their number.
    #[inline]
    pub(crate) fn poll(
        &mut self,
        now: Nanos,
        done: &mut Done,
        tally: &mut Tally,
        measure: bool,
    ) -> usize {
        let count = self.queue.poll(now, done);
        for completion in done.drain() {
            self.completed(completion, now, tally, measure);
        }
        count
    }

    /// Starts up to `budget` I/Os. Returns their number, and true if the phase has more.
    #[inline]
    pub(crate) fn submit(&mut self, phase: Phase, now: Nanos, budget: u64) -> (u64, bool) {
        let mut left = budget;
        let mut over = false;
        while left > 0 {
            let io = match self.held.take() {
                Some(io) => io,
                None => {
                    let Some(&slot) = self.free.last() else { break };
                    let (op, place) = match self.next(phase) {
                        Next::Io(op, place) => (op, place),
                        Next::Later => break,
                        Next::Over => {
                            over = true;
                            break;
                        }
                    };
                    let Some(io) = self.prepare(slot, op, place, now) else {
                        // Retry this range later.
                        self.cursor = self.cursor.min(place.unit);
                        break;
                    };
                    self.free.pop();
                    io
                }
            };
            if let Err((Busy, io)) = self.queue.submit(io) {
                self.held = Some(io);
                break;
            }
            left -= 1;
        }
        if left < budget {
            self.queue.flush();
        }
        (budget - left, !over)
    }

    /// Drops the I/O that the full queue refused, at the end of a phase.
    pub(crate) fn drop_held(&mut self) {
        if let Some(mut io) = self.held.take() {
            let slot = self.slots[io.token as usize];
            if let Some(ledger) = &mut self.ledger {
                ledger.release(slot.place);
            }
            self.free.push(io.token as u16);
            self.reuse(io.data.pop());
        }
    }

    #[inline]
    fn next(&mut self, phase: Phase) -> Next {
        if phase != Phase::Run {
            return self.next_in_order(phase);
        }
        let op = if self.access.reads() {
            Op::Read
        } else {
            Op::Write
        };
        let mut place = self.access.next();
        if let Some(ledger) = &mut self.ledger {
            let mut tries = TRIES;
            while !ledger.take(place) {
                place = self.access.after(place);
                tries -= 1;
                if tries == 0 {
                    return Next::Later;
                }
            }
        }
        Next::Io(op, place)
    }

    fn next_in_order(&mut self, phase: Phase) -> Next {
        let most = self.access.largest();
        let rest = self.access.units() - self.cursor;
        let (op, place) = match (phase, &self.ledger) {
            (Phase::ReadBack, Some(ledger)) => match ledger.next_known(self.cursor, most) {
                Some(place) => (Op::Read, place),
                None => {
                    self.cursor = self.access.units();
                    return Next::Over;
                }
            },
            _ if rest == 0 => return Next::Over,
            (phase, _) => {
                let op = if phase == Phase::Fill {
                    Op::Write
                } else {
                    Op::Read
                };
                let units = rest.min(u64::from(most)) as u32;
                let unit = self.cursor;
                (op, Place { unit, units })
            }
        };
        if let Some(ledger) = &mut self.ledger
            && !ledger.take(place)
        {
            return Next::Later;
        }
        self.cursor = place.unit + u64::from(place.units);
        Next::Io(op, place)
    }

    /// Builds an I/O with its buffer. `None`: no buffer is free, because a lost connection still
    /// has some of them; the pool is large enough for the depth.
    #[inline]
    fn prepare(&mut self, slot: u16, op: Op, place: Place, now: Nanos) -> Option<Io> {
        let blocks = place.units * self.unit_blocks;
        let len = blocks as usize * self.namespace.block_size as usize;
        let buf = if op == Op::Write && !self.sources.is_empty() {
            let source = usize::from(slot) % self.sources.len();
            Some(self.sources[source].slice(0, len))
        } else {
            match self.spare.pop() {
                Some(buf) if buf.len() == len => Some(buf),
                _ => self.pool.acquire(len),
            }
        };
        let Some(mut buf) = buf else {
            if let Some(ledger) = &mut self.ledger {
                ledger.release(place);
            }
            return None;
        };
        let lba = self.area.first + place.unit * u64::from(self.unit_blocks);
        match op {
            Op::Write if self.ledger.is_some() => self.stamp(&mut buf, lba),
            Op::Read if self.ledger.is_some() || self.scans => blank(&mut buf),
            _ => {}
        }
        self.slots[usize::from(slot)] = Slot {
            op,
            since: now,
            place,
        };
        Some(Io::new(u64::from(slot), op, lba, blocks).with(buf))
    }

    fn stamp(&self, buf: &mut Buf, lba: u64) {
        let Some(ledger) = &self.ledger else { return };
        let bytes = buf.bytes_mut().expect("no I/O has the buffer");
        let blocks = bytes.chunks_exact_mut(self.namespace.block_size as usize);
        for (lba, block) in (lba..).zip(blocks) {
            let generation = ledger.next_generation(self.unit_of(lba));
            self.stamp_of(lba, generation).fill(block);
        }
    }

    #[inline]
    fn completed(
        &mut self,
        mut completion: Completion,
        now: Nanos,
        tally: &mut Tally,
        measure: bool,
    ) {
        let slot = self.slots[completion.token as usize];
        self.free.push(completion.token as u16);
        let blocks = slot.place.units * self.unit_blocks;
        let bytes = u64::from(blocks) * u64::from(self.namespace.block_size);
        let ok = completion.status.is_ok();
        if ok && measure {
            let counted = match slot.op {
                Op::Read => &mut tally.read,
                _ => &mut tally.write,
            };
            counted.count(bytes, now.since(slot.since));
        }
        if !ok {
            let lba = self.area.first + slot.place.unit * u64::from(self.unit_blocks);
            tally.failed(slot.op, lba, blocks, completion.status);
        }
        if self.ledger.is_some() || self.scans {
            self.check(&slot, &completion, tally);
        }
        self.reuse(completion.data.pop());
    }

    /// Stores a buffer for the next I/O, unless it is shared.
    #[inline]
    fn reuse(&mut self, buf: Option<Buf>) {
        self.spare.extend(buf.filter(|buf| buf.is_unshared()));
    }

    /// Verifies read data, or records a write.
    fn check(&mut self, slot: &Slot, completion: &Completion, tally: &mut Tally) {
        let ok = completion.status.is_ok();
        if slot.op == Op::Read && ok {
            let first = self.area.first + slot.place.unit * u64::from(self.unit_blocks);
            for buf in &completion.data {
                let blocks = buf.chunks_exact(self.namespace.block_size as usize);
                for (lba, block) in (first..).zip(blocks) {
                    self.check_block(lba, block, tally);
                }
            }
        }
        let Some(ledger) = &mut self.ledger else {
            return;
        };
        if slot.op == Op::Write {
            ledger.wrote(slot.place, ok);
            if ok {
                tally.verify.blocks_written += u64::from(slot.place.units * self.unit_blocks);
            }
        }
        ledger.release(slot.place);
    }

    fn check_block(&self, lba: u64, block: &[u8], tally: &mut Tally) {
        let outcome = match &self.ledger {
            Some(ledger) => match ledger.generation(self.unit_of(lba)) {
                Some(generation) => {
                    let expected = self.stamp_of(lba, generation);
                    expected.check(block).map_err(|wrong| (expected, wrong))
                }
                None => {
                    tally.verify.blocks_unknown += 1;
                    return;
                }
            },
            // Accept any run and generation of this block.
            None => {
                let found = Stamp::read(block);
                let expected = Stamp {
                    lba,
                    nsid: self.namespace.nsid,
                    generation: found.map_or(0, |f| f.generation),
                    run: found.map_or(0, |f| f.run),
                };
                expected.check(block).map_err(|wrong| (expected, wrong))
            }
        };
        tally.verify.blocks_checked += 1;
        if let Err((expected, wrong)) = outcome {
            tally.mismatch(lba, expected, wrong);
        }
    }

    fn stamp_of(&self, lba: u64, generation: u32) -> Stamp {
        Stamp {
            lba,
            nsid: self.namespace.nsid,
            generation,
            run: self.namespace.run,
        }
    }

    fn unit_of(&self, lba: u64) -> u64 {
        (lba - self.area.first) / u64::from(self.unit_blocks)
    }
}

/// Overwrites the previous contents, which could be this very block and pass for read data.
fn blank(buf: &mut Buf) {
    buf.bytes_mut().expect("no I/O has the buffer").fill(0x5a);
}

enum Next {
    Io(Op, Place),
    /// No range without an I/O in flight was found; try later.
    Later,
    Over,
}

#[cfg(test)]
mod tests {
    use super::super::job::{Rw, Sizes, tests::job_with};
    use super::*;

    /// A device that holds its I/Os, and counts those submitted before the last flush.
    #[derive(Default)]
    struct HoldingQueue {
        ios: Vec<Io>,
        flushed: Vec<usize>,
    }

    impl Queue for HoldingQueue {
        fn submit(&mut self, io: Io) -> Result<(), (Busy, Io)> {
            self.ios.push(io);
            Ok(())
        }

        fn poll(&mut self, _now: Nanos, done: &mut Done) -> usize {
            let first = self.ios.remove(0);
            done.push(first.complete(nacre_bdev::Status::Ok));
            1
        }

        fn abort(&mut self, _token: u64) -> bool {
            false
        }

        fn inflight(&self) -> usize {
            self.ios.len()
        }
    }

    impl Load for HoldingQueue {
        fn qid(&self) -> u16 {
            1
        }

        fn flush(&mut self) {
            self.flushed.push(self.ios.len());
        }
    }

    /// Goal: I/Os started together are sent together at once, not after all other lanes had their
    /// turn; with none started nothing is flushed.
    #[test]
    fn started_io_is_flushed_at_once() {
        let job = job_with(|options| options.depth = 4);
        let area = Area {
            first: 0,
            blocks: 64,
        };
        let namespace = Namespace {
            nsid: 1,
            block_size: 4096,
            run: 1,
        };
        let pool = Pool::heap(&[nacre_hugepages::ClassSpec {
            size: 4096,
            count: 4,
        }]);
        let mut lane = Lane::new(HoldingQueue::default(), &job, area, namespace, 0, pool);
        assert_eq!(lane.submit(Phase::Run, Nanos::ZERO, 3), (3, true));
        assert_eq!(lane.submit(Phase::Run, Nanos::ZERO, 0), (0, true));
        assert_eq!(lane.submit(Phase::Run, Nanos::ZERO, 8), (1, true));
        assert_eq!(lane.submit(Phase::Run, Nanos::ZERO, 8), (0, true));
        let (mut done, mut tally) = (Done::with_capacity(4), Tally::new());
        lane.poll(Nanos::ZERO, &mut done, &mut tally, true);
        assert_eq!(lane.submit(Phase::Run, Nanos::ZERO, 8), (1, true));
        assert_eq!(lane.queue().flushed, [3, 4, 4]);
    }

    /// Goal: a device that completes a read without data is detected, even if the buffer held the
    /// expected data before.
    #[test]
    fn stale_buffer_contents_do_not_pass_for_read_data() {
        let job = Job {
            verify: Verify::On,
            ..job_with(|options| options.depth = 1)
        };
        let area = Area {
            first: 0,
            blocks: 1,
        };
        let namespace = Namespace {
            nsid: 1,
            block_size: 4096,
            run: 1,
        };
        let pool = Pool::heap(&[nacre_hugepages::ClassSpec {
            size: 4096,
            count: 1,
        }]);
        let mut lane = Lane::new(HoldingQueue::default(), &job, area, namespace, 0, pool);
        let (mut done, mut tally) = (Done::with_capacity(4), Tally::new());
        for phase in [Phase::Fill, Phase::ReadBack] {
            lane.begin();
            assert_eq!(lane.submit(phase, Nanos::ZERO, 1), (1, true));
            lane.poll(Nanos::ZERO, &mut done, &mut tally, true);
        }
        let verify = &tally.verify;
        assert_eq!((verify.blocks_checked, verify.blocks_wrong), (1, 1));
    }

    /// Goal: writes share buffers only without verification: a few, at least one, and never more
    /// than the depth.
    #[test]
    fn writes_share_few_buffers() {
        let sources_of = |rw, size, depth, verify| {
            sources(&Job {
                sizes: Sizes {
                    min: 4096,
                    max: size,
                },
                verify,
                ..job_with(|options| (options.rw, options.depth) = (rw, depth))
            })
        };
        let off = Verify::Off;
        assert_eq!(sources_of(Rw::RandWrite, 128 << 10, 16, off), 2);
        assert_eq!(sources_of(Rw::RandRw, 1 << 20, 16, off), 1);
        assert_eq!(sources_of(Rw::Write, 4096, 128, off), 64);
        assert_eq!(sources_of(Rw::Write, 4096, 16, off), 16);
        assert_eq!(sources_of(Rw::RandRead, 4096, 16, off), 0);
        assert_eq!(sources_of(Rw::RandWrite, 4096, 16, Verify::On), 0);
        assert_eq!(sources_of(Rw::RandWrite, 4096, 16, Verify::Only), 0);
    }
}
