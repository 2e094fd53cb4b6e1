//! The I/O of a simulation run: reads, writes, zeroes, unmaps and flushes on a few ranges, so that
//! they overlap often.

use std::collections::BTreeMap;

use nacre_bdev::{Bdev, Done, Flags, Io, LayerQueue, Op, Queue, Status};
use nacre_hugepages::Pool;
use nacre_random::Random;
use nacre_reactor::Nanos;

use crate::checker::{Checker, Moment};
use crate::media::Format;

/// I/Os of one lane at once.
const DEPTH: usize = 24;

/// One queue of the volume, and its I/O in flight.
pub(crate) struct Lane {
    pub queue: LayerQueue,
    format: Format,
    done: Done,
    pub ongoing: BTreeMap<u64, Ongoing>,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Ongoing {
    pub op: Op,
    pub flags: Flags,
    pub lba: u64,
    pub blocks: u64,
    pub began: Moment,
}

/// A request that was not submitted yet, so it has no number.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NewRequest {
    pub op: Op,
    pub flags: Flags,
    pub lba: u64,
    pub blocks: u64,
}

/// Numbers used once in a run.
#[derive(Default)]
pub(crate) struct Numbers {
    pub ios: u64,
    pub tags: u64,
    pub moment: Moment,
}

impl Numbers {
    pub(crate) fn now(&mut self) -> Moment {
        self.moment += 1;
        self.moment
    }
}

/// The behaviour of hosts.
pub(crate) struct Hosts {
    pub(crate) hot: HotRanges,
    /// Factor on the pauses between bursts of I/O; 1 in most runs.
    pub(crate) pace: u64,
    /// Decides whether hosts abort I/O, and which.
    pub(crate) aborts: Option<Random>,
    /// Decides whether hosts disconnect with I/O in flight, and when.
    pub(crate) leaves: Option<Random>,
    pub(crate) next_io: Nanos,
    /// I/Os before the next pause.
    pub(crate) burst: u64,
}

/// The block ranges that hosts read and write most.
pub(crate) struct HotRanges {
    ranges: Vec<(u64, u64)>,
    blocks: u64,
}

impl HotRanges {
    pub(crate) fn new(random: &mut Random, most: u64, blocks: u64, region_blocks: u64) -> Self {
        // 64 KiB.
        let stripe = region_blocks / 16;
        let mut ranges = Vec::new();
        for _ in 0..random.within(2.min(most), most) {
            let len = random.within(2, 10);
            let edge = match random.below(4) {
                // Across a region's end, a stripe's, or neither.
                0 => random.within(1, (blocks / region_blocks).max(1)) * region_blocks,
                1 => random.below(blocks / stripe) * stripe,
                _ => random.below(blocks),
            };
            let lba = edge.saturating_sub(len / 2).min(blocks - len);
            ranges.push((lba, len));
        }
        Self { ranges, blocks }
    }

    /// A few blocks within the areas of the load.
    pub(crate) fn somewhere(&self, random: &mut Random) -> (u64, u64) {
        let (start, len) = *random.pick(&self.ranges);
        let lba = start + random.below(len);
        (lba, random.within(1, start + len - lba))
    }

    /// Draws a request. `now` is the present size of the volume in blocks.
    pub(crate) fn wish(&self, random: &mut Random, now: u64) -> NewRequest {
        let (lba, mut blocks) = self.somewhere(random);
        if random.one_in(40) {
            blocks = random.within(1, 96).min(self.blocks - lba);
        }
        let lba = lba.min(now - 1);
        let blocks = blocks.min(now - lba);
        let op = match random.below(20) {
            0..8 => Op::Write,
            8..15 => Op::Read,
            15..17 => Op::Flush,
            17 => Op::Unmap,
            _ => Op::WriteZeroes,
        };
        let mut flags = Flags::empty();
        if op.is_write() && op != Op::Unmap && random.one_in(6) {
            flags |= Flags::FUA;
        }
        if op == Op::WriteZeroes && random.one_in(2) {
            flags |= Flags::DEALLOCATE;
        }
        let (lba, blocks) = if op == Op::Flush {
            (0, 0)
        } else {
            (lba, blocks)
        };
        NewRequest {
            op,
            flags,
            lba,
            blocks,
        }
    }
}

impl Lane {
    pub(crate) fn new(queue: LayerQueue, format: Format) -> Self {
        Self {
            queue,
            format,
            done: Done::with_capacity(DEPTH),
            ongoing: BTreeMap::new(),
        }
    }

    pub(crate) fn is_full(&self) -> bool {
        self.ongoing.len() >= DEPTH
    }

    /// Submits the request and reports it to the checker. False: it is not accepted now.
    pub(crate) fn submit(
        &mut self,
        wish: NewRequest,
        pool: &Pool,
        numbers: &mut Numbers,
        checker: &mut Checker,
    ) -> bool {
        let began = numbers.now();
        let number = numbers.ios + 1;
        let tag = numbers.tags + 1;
        let mut io = Io::new(number, wish.op, wish.lba, wish.blocks as u32).flags(wish.flags);
        if matches!(wish.op, Op::Read | Op::Write) {
            let Some(mut buf) = pool.acquire(wish.blocks as usize * self.format.block) else {
                return false;
            };
            if wish.op == Op::Write {
                let bytes = buf.bytes_mut().expect("no other holder has it");
                bytes.fill(0);
                for (tag, block) in (tag..).zip(bytes.chunks_exact_mut(self.format.block)) {
                    block[..8].copy_from_slice(&tag.to_le_bytes());
                }
            }
            io = io.with(buf);
        }
        let tries = self.queue.layer().limits().is_sync;
        let status = if tries {
            self.queue.run_sync(&mut io, &mut None)
        } else {
            None
        };
        match status {
            // Reported with the next completions.
            Some(status) => self.done.push(io.complete(status)),
            None if self.queue.submit(io).is_err() => return false,
            None => {}
        }
        numbers.ios = number;
        let NewRequest {
            op,
            flags,
            lba,
            blocks,
        } = wish;
        if op.is_write() {
            let tag = if op == Op::Write { tag } else { 0 };
            numbers.tags += blocks;
            checker.write_began(number, lba, blocks, tag, began);
        }
        let ongoing = Ongoing {
            op,
            flags,
            lba,
            blocks,
            began,
        };
        self.ongoing.insert(number, ongoing);
        true
    }

    /// Collects completions and reports them to the checker, whose verdict is the error.
    pub(crate) fn poll(
        &mut self,
        now: Nanos,
        numbers: &mut Numbers,
        checker: &mut Checker,
        mut on_completion: impl FnMut(u64, &Ongoing, Status),
    ) -> Result<usize, String> {
        let count = self.queue.poll(now, &mut self.done);
        for ended in self.done.drain() {
            let moment = numbers.now();
            let ongoing = self.ongoing.remove(&ended.token);
            let ongoing = ongoing.ok_or_else(|| format!("an answer to nothing: {ended:?}"))?;
            on_completion(ended.token, &ongoing, ended.status);
            let ok = ended.status.is_ok();
            let Ongoing {
                op,
                flags,
                lba,
                blocks,
                began,
            } = ongoing;
            match op {
                Op::Read if ok => {
                    let size = self.format.block;
                    let bytes = ended.data.iter().flat_map(|buf| buf.chunks_exact(size));
                    let tags: Vec<u64> = bytes.map(tag_of).collect();
                    assert_eq!(tags.len() as u64, blocks, "a read's buffers");
                    checker.read_ended(lba, &tags, began, moment)?;
                }
                Op::Read => {}
                Op::Flush if ok => checker.flushed(began),
                Op::Flush => {}
                _ => {
                    let durable = flags.contains(Flags::FUA);
                    checker.write_ended(ended.token, (lba, blocks), ok, durable, moment);
                }
            }
        }
        Ok(count)
    }

    /// Reports the writes in flight to the checker: the holder stopped.
    pub(crate) fn orphan(&self, checker: &mut Checker) {
        for (number, ongoing) in &self.ongoing {
            if ongoing.op.is_write() {
                checker.write_orphaned(*number, ongoing.lba, ongoing.blocks);
            }
        }
    }
}

fn tag_of(block: &[u8]) -> u64 {
    u64::from_le_bytes(block[..8].try_into().expect("eight bytes"))
}
