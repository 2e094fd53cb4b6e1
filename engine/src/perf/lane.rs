//! A lane: one I/O queue kept full.

use nacre_bdev::{Busy, Completion, Done, Io, Op, Queue};
use nacre_hugepages::{Buf, Pool};
use nacre_reactor::Nanos;

use super::access::{Access, Place};
use super::job::{Area, Job, Verify};
use super::ledger::Ledger;
use super::pattern::Stamp;
use super::report::Tally;

/// Places tried when the one chosen is in use.
const TRIES: u32 = 64;

/// Bytes that the writes of a lane are taken from, in turn, when nobody looks at what they say: few
/// enough to stay in the cache of the core, so that it is the target that is measured.
const SOURCES: usize = 256 << 10;

/// How many buffers that is.
pub fn sources(job: &Job) -> usize {
    match (job.verify, job.read_percent()) {
        (Verify::Off, 0..100) => {
            (SOURCES / job.sizes.max as usize).clamp(1, usize::from(job.depth))
        }
        _ => 0,
    }
}

/// What a lane does at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Writes every place once, so that what is read can be judged.
    Fill,
    /// What was asked for.
    Run,
    /// Reads every place that was written.
    ReadBack,
    /// Reads every place, whoever wrote it.
    Scan,
}

/// The namespace and what is the same for every I/O of it.
#[derive(Debug, Clone, Copy)]
pub struct Namespace {
    pub nsid: u32,
    pub block_size: u32,
    /// Tells this run's blocks from those of others.
    pub run: u64,
}

#[derive(Clone, Copy)]
struct Slot {
    op: Op,
    since: Nanos,
    place: Place,
}

/// A queue that load is put on.
pub trait Load: Queue {
    /// Names it among those of its controller.
    fn qid(&self) -> u16;

    /// Whether it was connected.
    fn is_live(&self) -> bool {
        true
    }

    /// Why it cannot be connected, and trying again is of no use.
    fn refusal(&self) -> Option<&str> {
        None
    }

    /// Why the last attempt to connect it failed.
    fn failure(&self) -> Option<&str> {
        None
    }

    fn troubles(&self) -> Troubles {
        Troubles::default()
    }

    /// Has what was submitted leave, where it would wait for the next poll, which is that of all other queues away.
    fn flush(&mut self) {}
}

/// What a queue went through.
#[derive(Debug, Clone, Copy, Default)]
pub struct Troubles {
    /// Connections that were lost.
    pub losses: u64,
    /// I/Os sent again.
    pub resent: u64,
    /// Times that it was moved to another transport with nothing under way.
    pub moves: u64,
}

pub struct Lane<Q> {
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
    /// Buffers of the last size, ready to be used again.
    spare: Vec<Buf>,
    /// What is written, if it may be the same again: see [`sources`].
    sources: Vec<Buf>,
    /// Handed back by a queue that was full.
    held: Option<Io>,
    /// In a phase that goes through all places: the next one.
    cursor: u64,
}

impl<Q: Load> Lane<Q> {
    pub fn new(
        queue: Q,
        job: &Job,
        area: Area,
        namespace: Namespace,
        index: u64,
        pool: Pool,
    ) -> Lane<Q> {
        let access = Access::new(job, area, namespace.block_size, index);
        let depth = usize::from(job.depth);
        let idle = Slot {
            op: Op::Read,
            since: Nanos::ZERO,
            place: Place { unit: 0, units: 0 },
        };
        Lane {
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
            free: (0..job.depth).rev().collect(),
            spare: Vec::with_capacity(depth),
            held: None,
            cursor: 0,
        }
    }

    pub fn queue(&self) -> &Q {
        &self.queue
    }

    /// Places in all, and those that the phase has gone through.
    pub fn position(&self) -> (u64, u64) {
        (self.access.units(), self.cursor)
    }

    pub fn begin(&mut self) {
        self.cursor = 0;
    }

    pub fn inflight(&self) -> usize {
        self.slots.len() - self.free.len() - usize::from(self.held.is_some())
    }

    /// Takes what came back. Answers how many.
    #[inline]
    pub fn poll(&mut self, now: Nanos, done: &mut Done, tally: &mut Tally, measure: bool) -> usize {
        let count = self.queue.poll(now, done);
        for completion in done.drain() {
            self.completed(completion, now, tally, measure);
        }
        count
    }

    /// Starts up to `budget` I/Os. Answers how many, and whether there are more in this phase.
    #[inline]
    pub fn submit(&mut self, phase: Phase, now: Nanos, budget: u64) -> (u64, bool) {
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
                        // Its turn comes again.
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

    /// Gives up what waits for room, at the end of a phase.
    pub fn drop_held(&mut self) {
        if let Some(mut io) = self.held.take() {
            let slot = self.slots[io.token as usize];
            if let Some(ledger) = &mut self.ledger {
                ledger.release(slot.place);
            }
            self.free.push(io.token as u16);
            self.keep(io.data.pop());
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

    /// The I/O with its buffer. `None`: no buffer, which cannot be while the pool was made for the
    /// depth, but for those that a lost connection still holds.
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
            self.judge(&slot, &completion, tally);
        }
        self.keep(completion.data.pop());
    }

    /// Keeps a buffer for the next I/O, if nobody else has it.
    #[inline]
    fn keep(&mut self, buf: Option<Buf>) {
        self.spare.extend(buf.filter(|buf| buf.is_unshared()));
    }

    /// Checks what was read, or takes note of what was written.
    fn judge(&mut self, slot: &Slot, completion: &Completion, tally: &mut Tally) {
        let ok = completion.status.is_ok();
        if slot.op == Op::Read && ok {
            let first = self.area.first + slot.place.unit * u64::from(self.unit_blocks);
            for buf in &completion.data {
                let blocks = buf.chunks_exact(self.namespace.block_size as usize);
                for (lba, block) in (first..).zip(blocks) {
                    self.judge_block(lba, block, tally);
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

    fn judge_block(&self, lba: u64, block: &[u8], tally: &mut Tally) {
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
            // Whatever run and generation it says it is of, it must be this very block.
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

/// What the buffer had before must not be taken for what was read: it may be this very block.
fn blank(buf: &mut Buf) {
    buf.bytes_mut().expect("no I/O has the buffer").fill(0x5a);
}

enum Next {
    Io(Op, Place),
    /// Nothing now: every place that was tried is in use.
    Later,
    Over,
}

#[cfg(test)]
mod tests {
    use super::super::job::{Rw, Sizes, tests::job};
    use super::*;

    /// A device that keeps what it is given, and what had been submitted when it was last flushed.
    #[derive(Default)]
    struct Keeps {
        ios: Vec<Io>,
        flushed: Vec<usize>,
    }

    impl Queue for Keeps {
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

    impl Load for Keeps {
        fn qid(&self) -> u16 {
            1
        }

        fn flush(&mut self) {
            self.flushed.push(self.ios.len());
        }
    }

    /// What is started together leaves together and at once, not when all other lanes have had their turn; where
    /// nothing was started there is nothing to send.
    #[test]
    fn what_is_started_leaves_at_once() {
        let job = Job { depth: 4, ..job() };
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
        let mut lane = Lane::new(Keeps::default(), &job, area, namespace, 0, pool);
        assert_eq!(lane.submit(Phase::Run, Nanos::ZERO, 3), (3, true));
        assert_eq!(lane.submit(Phase::Run, Nanos::ZERO, 0), (0, true));
        assert_eq!(lane.submit(Phase::Run, Nanos::ZERO, 8), (1, true));
        assert_eq!(lane.submit(Phase::Run, Nanos::ZERO, 8), (0, true));
        let (mut done, mut tally) = (Done::with_capacity(4), Tally::new());
        lane.poll(Nanos::ZERO, &mut done, &mut tally, true);
        assert_eq!(lane.submit(Phase::Run, Nanos::ZERO, 8), (1, true));
        assert_eq!(lane.queue().flushed, [3, 4, 4]);
    }

    /// A device that answers a read and brings nothing is found out, although the buffer had what it should have brought.
    #[test]
    fn what_was_in_the_buffer_is_not_what_was_read() {
        let job = Job {
            depth: 1,
            verify: Verify::On,
            ..job()
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
        let mut lane = Lane::new(Keeps::default(), &job, area, namespace, 0, pool);
        let (mut done, mut tally) = (Done::with_capacity(4), Tally::new());
        for phase in [Phase::Fill, Phase::ReadBack] {
            lane.begin();
            assert_eq!(lane.submit(phase, Nanos::ZERO, 1), (1, true));
            lane.poll(Nanos::ZERO, &mut done, &mut tally, true);
        }
        let verify = &tally.verify;
        assert_eq!((verify.blocks_checked, verify.blocks_wrong), (1, 1));
    }

    /// Writes share buffers only where nobody looks at what they say: a few, at least one, never more
    /// than can be under way.
    #[test]
    fn writes_share_few_buffers() {
        let sources_of = |rw, size, depth, verify| {
            sources(&Job {
                rw,
                sizes: Sizes {
                    min: 4096,
                    max: size,
                },
                depth,
                verify,
                ..job()
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
