//! Verified load: writes, zeroes, deallocations, reads and flushes over two queues, each checked on
//! completion.

use std::collections::HashMap;
use std::fmt;
use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::Instant;

use nacre_bdev::{Completion, Flags, Io, Op, Status};
use nacre_nvmf::host::{HostOptions, IoQueue, IoStats};
use nacre_random::Random;
use nacre_tests::host::Host;

use crate::ledger::{BLOCK, Ledger};

pub(crate) const BLOCKS: usize = 1024;
/// Blocks of the largest write.
const MAX_RUN: usize = 8;
/// I/Os kept in flight on each queue.
const DEPTH: usize = 16;
/// Writes between two flushes.
const FLUSH_EVERY: u32 = 40;

enum Work {
    Write {
        lba: usize,
        blocks: usize,
    },
    Zeroes {
        lba: usize,
        blocks: usize,
        deallocate: bool,
    },
    /// Every device in these tests reads as zeroes after it.
    Unmap {
        lba: usize,
        blocks: usize,
    },
    Read {
        lba: usize,
    },
    Flush {
        promised: Vec<u64>,
    },
}

impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Write { lba, blocks } => write!(f, "write of {lba}+{blocks}"),
            Self::Zeroes {
                lba,
                blocks,
                deallocate,
            } => {
                write!(f, "zeroes to {lba}+{blocks}, deallocate: {deallocate}")
            }
            Self::Unmap { lba, blocks } => write!(f, "unmap of {lba}+{blocks}"),
            Self::Read { lba } => write!(f, "read of {lba}"),
            Self::Flush { .. } => f.write_str("flush"),
        }
    }
}

pub(crate) struct Load {
    pub host: Host,
    pub ledger: Ledger,
    rng: Random,
    under_way: HashMap<u64, (Work, Instant)>,
    writes: u32,
    completed: u64,
}

impl Load {
    /// Starts on a fresh namespace of [`BLOCKS`] blocks.
    pub(crate) fn start(
        address: SocketAddr,
        mut options: HostOptions,
        nsid: u32,
        rng: &mut Random,
    ) -> Self {
        options.io_queues = 2;
        let mut host = Host::new(address, options, 2 * DEPTH);
        host.until("live", |h| h.controller.is_live());
        host.open_queue(nsid);
        host.open_queue(nsid);
        Self {
            host,
            ledger: Ledger::new(BLOCKS, rng.draw()),
            rng: Random::new(rng.draw()),
            under_way: HashMap::new(),
            writes: 0,
            completed: 0,
        }
    }

    pub(crate) fn stats(&self) -> Vec<IoStats> {
        self.host.queues.iter().map(|q| q.stats()).collect()
    }

    /// Keeps running while `meanwhile` acts on the daemon.
    pub(crate) fn run_during<T: Send>(&mut self, meanwhile: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| {
            let meanwhile = scope.spawn(meanwhile);
            let load = catch_unwind(AssertUnwindSafe(|| {
                while !meanwhile.is_finished() {
                    self.fill();
                    self.turn();
                }
            }));
            let after = meanwhile.join();
            // A panicking thread drops its daemon, which prints the log.
            load.unwrap_or_else(|why| resume_unwind(why));
            after.expect("the other thread did not panic")
        })
    }

    pub(crate) fn turn(&mut self) {
        self.host.turn_or_nap();
        while let Some(completion) = self.host.take_completion() {
            self.completed(completion);
        }
    }

    pub(crate) fn fill(&mut self) {
        for queue in 0..self.host.queues.len() {
            let mut tries = 0;
            while self.under_way.len() < DEPTH * (queue + 1) && tries < 2 * DEPTH {
                self.submit(queue);
                tries += 1;
            }
        }
    }

    fn submit(&mut self, queue: usize) {
        let work = match self.rng.below(10) {
            _ if self.writes >= FLUSH_EVERY => {
                self.writes = 0;
                let promised = self.ledger.acknowledged();
                Work::Flush { promised }
            }
            0..3 => Work::Read {
                lba: self.rng.below(BLOCKS as u64) as usize,
            },
            _ => {
                let blocks = 1 + self.rng.below(MAX_RUN as u64) as usize;
                let lba = self.rng.below((BLOCKS - blocks) as u64) as usize;
                match self.rng.below(8) {
                    draw @ 0..2 => Work::Zeroes {
                        lba,
                        blocks,
                        deallocate: draw == 0,
                    },
                    2 => Work::Unmap { lba, blocks },
                    _ => Work::Write { lba, blocks },
                }
            }
        };
        let (op, lba, blocks) = match &work {
            Work::Write { lba, blocks } => (Op::Write, *lba, *blocks),
            Work::Zeroes { lba, blocks, .. } => (Op::WriteZeroes, *lba, *blocks),
            Work::Unmap { lba, blocks } => (Op::Unmap, *lba, *blocks),
            Work::Read { lba } => (Op::Read, *lba, 1),
            Work::Flush { .. } => (Op::Flush, 0, 0),
        };
        let entries = &mut self.ledger.entries[lba..lba + blocks];
        if entries.iter().any(|e| e.in_use) {
            return;
        }
        let mut io = Io::new(0, op, lba as u64, blocks as u32);
        if matches!(op, Op::Read | Op::Write) {
            let Some(buf) = self.host.buf(blocks * BLOCK) else {
                return;
            };
            io = io.with(buf);
        }
        if let Work::Zeroes {
            deallocate: true, ..
        } = work
        {
            io = io.flags(Flags::DEALLOCATE);
        }
        for entry in entries {
            entry.in_use = true;
            entry.submitted += u64::from(op.is_write());
            if matches!(op, Op::WriteZeroes | Op::Unmap) {
                entry.zeroes = entry.submitted;
            }
        }
        for buf in &mut io.data {
            let bytes = buf.bytes_mut().expect("the buffer is not shared");
            for (at, block) in bytes.chunks_exact_mut(BLOCK).enumerate() {
                match op {
                    Op::Write => {
                        let generation = self.ledger.entries[lba + at].submitted;
                        self.ledger.fill(lba + at, generation, block);
                    }
                    _ => block.fill(0xee),
                }
            }
        }
        let token = self.host.submit(queue, |token| Io { token, ..io });
        let token = token.expect("the queue is deeper than the load");
        self.writes += u32::from(op.is_write());
        self.under_way.insert(token, (work, Instant::now()));
    }

    fn completed(&mut self, completion: Completion) {
        let (work, since) = self.under_way.remove(&completion.token).expect("ours");
        assert_eq!(
            completion.status,
            Status::Ok,
            "the host gave up an I/O: {work} after {:?}; controller {:?}; {:?}",
            since.elapsed(),
            self.host.controller.state(),
            self.stats(),
        );
        self.completed += 1;
        match work {
            Work::Write { lba, blocks }
            | Work::Zeroes { lba, blocks, .. }
            | Work::Unmap { lba, blocks } => {
                for entry in &mut self.ledger.entries[lba..lba + blocks] {
                    entry.acknowledged = entry.submitted;
                    entry.in_use = false;
                }
            }
            Work::Read { lba } => {
                let found = self.ledger.check(lba, &completion.data[0]);
                found.unwrap_or_else(|wrong| panic!("while it runs: {wrong}"));
                self.ledger.entries[lba].in_use = false;
            }
            Work::Flush { promised } => self.ledger.flushed(&promised),
        }
    }

    /// I/Os completed so far.
    pub(crate) fn count(&self) -> u64 {
        self.completed
    }

    /// Runs this many more I/Os.
    pub(crate) fn run(&mut self, ios: u64) {
        let until = self.completed + ios;
        while self.completed < until {
            self.fill();
            self.turn();
        }
    }

    /// Runs until both queues are live, so that the next failure affects both.
    pub(crate) fn until_connected(&mut self) {
        while !self.host.queues.iter().all(IoQueue::is_live) {
            self.fill();
            self.turn();
        }
    }

    pub(crate) fn drain(&mut self) {
        while !self.under_way.is_empty() {
            self.turn();
        }
    }

    pub(crate) fn check_all(&mut self, when: &str) {
        for lba in 0..BLOCKS {
            let block = self.host.read(lba % 2, lba as u64, 1, BLOCK);
            let found = self.ledger.check(lba, &block);
            found.unwrap_or_else(|wrong| panic!("{when}: {wrong}"));
        }
    }
}
