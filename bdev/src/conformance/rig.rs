//! The harness of a conformance case: a queue of the device under test, with buffers, tokens and a
//! clock. It checks that every token completes exactly once.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nacre_hugepages::{Buf, ClassSpec, Pool};
use nacre_reactor::Nanos;

use super::Subject;
use crate::device::Geometry;
use crate::io::{Completion, Extents, Flags, Io, Op, Status, Token};
use crate::queue::{Busy, Done, Queue};

pub(super) const LARGEST_BUF: usize = 1 << 20;
/// Time limit of a request.
const DEADLINE: Duration = Duration::from_secs(30);

const CLASSES: [ClassSpec; 4] = [
    ClassSpec {
        size: 512,
        count: 512,
    },
    ClassSpec {
        size: 4096,
        count: 1200,
    },
    ClassSpec {
        size: 64 << 10,
        count: 48,
    },
    ClassSpec {
        size: LARGEST_BUF,
        count: 14,
    },
];

pub(super) struct Rig {
    pub queue: Box<dyn Queue>,
    pub pool: Pool,
    pub geometry: Geometry,
    done: Done,
    started: Instant,
    next: Token,
    open: HashSet<Token>,
    ended: HashMap<Token, Completion>,
}

impl Rig {
    pub(super) fn new(subject: &Subject) -> Self {
        let pool = (subject.memory)(&CLASSES);
        let queue = Arc::clone(&subject.device)
            .open(&pool)
            .expect("the device opens");
        Self {
            queue,
            pool,
            geometry: subject.device.geometry(),
            done: Done::with_capacity(32),
            started: Instant::now(),
            // Odd tokens with high bits: a layer must preserve all 64 bits.
            next: 0xFFFF_0000_0000_0001,
            open: HashSet::new(),
            ended: HashMap::new(),
        }
    }

    pub(super) fn now(&self) -> Nanos {
        Nanos(1) + self.started.elapsed()
    }

    pub(super) fn io(&mut self, op: Op, lba: u64, blocks: u32) -> Io {
        self.next += 2;
        Io::new(self.next, op, lba, blocks)
    }

    pub(super) fn bytes(&self, blocks: u32) -> usize {
        blocks as usize * self.geometry.block_size as usize
    }

    /// A buffer for `blocks` blocks, filled with a byte.
    pub(super) fn buf(&self, blocks: u32, fill: u8) -> Buf {
        let mut buf = self
            .pool
            .acquire(self.bytes(blocks))
            .expect("the case has buffers enough");
        buf.bytes_mut()
            .expect("a new buffer is not shared")
            .fill(fill);
        buf
    }

    pub(super) fn buf_of(&self, bytes: &[u8]) -> Buf {
        let mut buf = self
            .pool
            .acquire(bytes.len())
            .expect("the case has buffers enough");
        buf.bytes_mut()
            .expect("a new buffer is not shared")
            .copy_from_slice(bytes);
        buf
    }

    /// Submits once, without a retry.
    #[allow(clippy::result_large_err)]
    pub(super) fn try_submit(&mut self, io: Io) -> Result<Token, (Busy, Io)> {
        let token = io.token;
        self.queue.submit(io)?;
        assert!(self.open.insert(token), "the case used a token twice");
        Ok(token)
    }

    /// Submits, polling while the queue is full.
    pub(super) fn submit(&mut self, mut io: Io) -> Token {
        let since = Instant::now();
        loop {
            match self.try_submit(io) {
                Ok(token) => return token,
                Err((Busy, back)) => io = back,
            }
            self.turn();
            assert!(
                since.elapsed() < DEADLINE,
                "the queue is full forever: {io:?}"
            );
        }
    }

    /// Runs one turn.
    pub(super) fn turn(&mut self) {
        let now = self.now();
        let collected = self.queue.poll(now, &mut self.done);
        assert_eq!(
            collected,
            self.done.len(),
            "poll returns the number of collected completions"
        );
        if collected == 0 {
            std::thread::yield_now();
        }
        for completion in self.done.drain() {
            let token = completion.token;
            assert!(
                self.open.remove(&token),
                "{token:#x} completed though it was not under way"
            );
            self.ended.insert(token, completion);
        }
        assert_eq!(
            self.queue.inflight(),
            self.open.len(),
            "inflight() counts the I/Os in flight"
        );
    }

    pub(super) fn wait(&mut self, token: Token) -> Completion {
        let since = Instant::now();
        loop {
            if let Some(completion) = self.ended.remove(&token) {
                return completion;
            }
            assert!(since.elapsed() < DEADLINE, "{token:#x} does not complete");
            self.turn();
        }
    }

    /// Waits for all I/O in flight.
    pub(super) fn wait_all(&mut self) -> Vec<Completion> {
        let since = Instant::now();
        while !self.open.is_empty() {
            assert!(
                since.elapsed() < DEADLINE,
                "{} I/Os do not complete",
                self.open.len()
            );
            self.turn();
        }
        self.ended
            .drain()
            .map(|(_, completion)| completion)
            .collect()
    }

    /// Executes one I/O.
    pub(super) fn run(&mut self, io: Io) -> Completion {
        let token = self.submit(io);
        self.wait(token)
    }

    pub(super) fn status_of(&mut self, io: Io) -> Status {
        self.run(io).status
    }

    pub(super) fn ok(&mut self, io: Io) {
        let what = format!("{io:?}");
        assert_eq!(self.status_of(io), Status::Ok, "{what}");
    }

    pub(super) fn write(&mut self, lba: u64, bytes: &[u8]) {
        self.write_with(lba, bytes, Flags::empty());
    }

    pub(super) fn write_with(&mut self, lba: u64, bytes: &[u8], flags: Flags) {
        let blocks = (bytes.len() / self.geometry.block_size as usize) as u32;
        let buf = self.buf_of(bytes);
        let io = self.io(Op::Write, lba, blocks).with(buf).flags(flags);
        self.ok(io);
    }

    pub(super) fn read(&mut self, lba: u64, blocks: u32) -> Vec<u8> {
        let buf = self.buf(blocks, 0xA5);
        let io = self.io(Op::Read, lba, blocks).with(buf);
        let completion = self.run(io);
        assert_eq!(
            completion.status,
            Status::Ok,
            "read of {blocks} blocks at {lba}"
        );
        let bytes = flat(&completion.data);
        assert_eq!(
            bytes.len(),
            self.bytes(blocks),
            "a read returns the buffers it was given"
        );
        bytes
    }
}

/// Joins the bytes of all extents.
pub(super) fn flat(data: &Extents) -> Vec<u8> {
    let parts: Vec<&[u8]> = data.iter().map(|buf| &**buf).collect();
    parts.concat()
}

/// Bytes that identify their position: each word differs between blocks and tags.
pub(super) fn pattern(blocks: u32, block_size: u32, lba: u64, tag: u8) -> Vec<u8> {
    let words = u64::from(blocks) * u64::from(block_size) / 8;
    let first = lba * u64::from(block_size) / 8;
    let word = |at: u64| (first + at).wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ u64::from(tag) << 32;
    let mut bytes = Vec::with_capacity(words as usize * 8);
    (0..words).for_each(|at| bytes.extend_from_slice(&word(at).to_le_bytes()));
    bytes
}
