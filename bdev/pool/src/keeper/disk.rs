//! The I/O of a pool's keeper on one disk of the pool (a bdev): writes of 4 KiB pages, flushes,
//! discards, and reads of any length. The data of host I/O does not pass here, only data of volumes
//! that the keeper itself copies.
//!
//! I/O that finds no buffer or no room in the bdev's queue waits in order. I/O that completes with
//! [`Status::Retry`] waits at the end. A few buffers are reserved for page writes, so that the log
//! continues when the core's buffer pool is empty.

use std::collections::{HashMap, HashSet, VecDeque};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use nacre_bdev::{
    Bdev, Busy, Completion, Done, Extents, Io, LayerQueue, Op, Queue, Status, Support,
};
use nacre_bdev_pool_core::format::Page;
use nacre_bdev_pool_core::geometry::PAGE;
use nacre_hugepages::{Buf, Pool};
use nacre_reactor::{Idle, Nanos};
use slab::Slab;

/// Buffers reserved for page writes.
const SPARE: usize = 8;
/// Most bytes of one read command.
const PIECE: usize = 64 << 10;
/// Delay before I/O is tried again that found no buffer, or that the bdev had no resources for.
const PAUSE: Duration = Duration::from_millis(1);

/// The caller's number of an I/O; its completion has it.
pub(crate) type Tag = u64;

/// A completion.
#[derive(Debug)]
pub(crate) enum Ended {
    Written(Tag, Status),
    Flushed(Tag, Status),
    Discarded(Tag, Status),
    Read(Tag, Result<Vec<u8>, Status>),
}

pub(crate) struct Disk {
    queue: LayerQueue,
    memory: Pool,
    block_size: u64,
    /// Commands in flight.
    calls: Slab<Wanted>,
    waiting: VecDeque<Wanted>,
    reads: HashMap<Tag, Reading>,
    /// Commands in flight of reads that were given up.
    given_up: HashSet<usize>,
    spare: Vec<Buf>,
    done: Done,
    /// Completions of I/O that needs no command.
    at_once: Vec<Ended>,
    /// The bdev has a volatile write cache.
    has_cache: bool,
    takes_discards: bool,
    /// No waiting I/O begins before this time.
    paused_until: Nanos,
}

/// A command to the bdev. Offsets and lengths are bytes, multiples of the block size.
#[derive(Debug, Clone)]
enum Wanted {
    Write {
        tag: Tag,
        offset: u64,
        bytes: Arc<Page>,
    },
    Flush {
        tag: Tag,
    },
    Discard {
        tag: Tag,
        offset: u64,
        len: u64,
    },
    /// A part of a read: `at` is its offset in the read.
    Piece {
        tag: Tag,
        offset: u64,
        at: usize,
        len: usize,
    },
}

#[derive(Debug)]
struct Reading {
    bytes: Vec<u8>,
    pieces: usize,
    status: Status,
}

impl Disk {
    pub(crate) fn new(queue: LayerQueue, base: &dyn Bdev, memory: Pool) -> Self {
        let spare = (0..SPARE).map_while(|_| memory.acquire(PAGE)).collect();
        Self {
            queue,
            block_size: u64::from(base.geometry().block_size),
            calls: Slab::with_capacity(64),
            waiting: VecDeque::new(),
            reads: HashMap::new(),
            given_up: HashSet::new(),
            spare,
            done: Done::with_capacity(64),
            at_once: Vec::new(),
            has_cache: base.limits().volatile_cache,
            takes_discards: base.supports(Op::Unmap) != Support::No,
            paused_until: Nanos::ZERO,
            memory,
        }
    }

    /// Writes a page at `offset`, in bytes.
    pub(crate) fn write(&mut self, tag: Tag, offset: u64, bytes: Arc<Page>) {
        self.waiting.push_back(Wanted::Write { tag, offset, bytes });
    }

    /// Flushes the bdev. Completes without a command if it has no volatile cache.
    pub(crate) fn flush(&mut self, tag: Tag) {
        if !self.has_cache {
            return self.at_once.push(Ended::Flushed(tag, Status::Ok));
        }
        self.waiting.push_back(Wanted::Flush { tag });
    }

    /// Unmaps `len` bytes at `offset`. Completes with `Unsupported` if the bdev cannot.
    pub(crate) fn discard(&mut self, tag: Tag, offset: u64, len: u64) {
        if !self.takes_discards {
            let ended = Ended::Discarded(tag, Status::Unsupported);
            return self.at_once.push(ended);
        }
        self.waiting.push_back(Wanted::Discard { tag, offset, len });
    }

    /// Reads `len` bytes at `offset`, with several commands if needed.
    pub(crate) fn read(&mut self, tag: Tag, offset: u64, len: usize) {
        let most = PIECE.min(self.memory.max_len());
        let starts = (0..len).step_by(most);
        let pieces = starts.len();
        self.waiting.extend(starts.map(|at| Wanted::Piece {
            tag,
            offset: offset + at as u64,
            at,
            len: most.min(len - at),
        }));
        let reading = Reading {
            bytes: vec![0; len],
            pieces,
            status: Status::Ok,
        };
        self.reads.insert(tag, reading);
    }

    /// Ends a read: no completion follows. Its commands in flight stay until the bdev completes
    /// them.
    pub(crate) fn give_up(&mut self, tag: Tag) {
        self.reads.remove(&tag);
        let is_of = |wanted: &Wanted| matches!(wanted, Wanted::Piece { tag: of, .. } if *of == tag);
        self.waiting.retain(|wanted| !is_of(wanted));
        let calls = self.calls.iter().filter(|(_, wanted)| is_of(wanted));
        let calls: Vec<usize> = calls.map(|(key, _)| key).collect();
        for key in calls {
            self.given_up.insert(key);
            // The outcome comes earlier if the bdev can abort it.
            self.queue.abort(key as u64);
        }
    }

    /// Number of commands in flight that were given up.
    pub(crate) fn given_up(&self) -> usize {
        self.given_up.len()
    }

    /// True when all I/O has completed, but for reads that were given up.
    pub(crate) fn is_idle(&self) -> bool {
        let is_done = self.waiting.is_empty() && self.at_once.is_empty();
        is_done && self.calls.len() == self.given_up.len()
    }

    /// Submits waiting I/O, and adds completions to `ended`.
    pub(crate) fn poll(&mut self, now: Nanos, ended: &mut Vec<Ended>) {
        ended.append(&mut self.at_once);
        loop {
            self.submit(now);
            let mut done = std::mem::replace(&mut self.done, Done::with_capacity(0));
            let count = self.queue.poll(now, &mut done);
            for completion in done.drain() {
                self.completed(now, completion, ended);
            }
            self.done = done;
            if count == 0 {
                return;
            }
        }
    }

    fn submit(&mut self, now: Nanos) {
        if now < self.paused_until {
            return;
        }
        while let Some(wanted) = self.waiting.pop_front() {
            let Some(mut io) = self.io(&wanted) else {
                self.waiting.push_front(wanted);
                self.paused_until = now + PAUSE;
                return;
            };
            let key = self.calls.insert(wanted);
            io.token = key as u64;
            if let Err((Busy, io)) = self.queue.submit(io) {
                let wanted = self.calls.remove(key);
                self.waiting.push_front(wanted);
                self.keep(io.data);
                return;
            }
        }
    }

    fn io(&mut self, wanted: &Wanted) -> Option<Io> {
        let long = |len: u64| (len / self.block_size) as u32;
        let blocks = |len: usize| long(len as u64);
        Some(match wanted {
            Wanted::Flush { .. } => Io::new(0, Op::Flush, 0, 0),
            Wanted::Discard { offset, len, .. } => {
                Io::new(0, Op::Unmap, offset / self.block_size, long(*len))
            }
            Wanted::Write { offset, bytes, .. } => {
                let mut buf = self.memory.acquire(PAGE).or_else(|| self.spare.pop())?;
                buf.bytes_mut()?.copy_from_slice(&bytes[..]);
                Io::new(0, Op::Write, offset / self.block_size, blocks(PAGE)).with(buf)
            }
            Wanted::Piece { offset, len, .. } => {
                let buf = self.memory.acquire(*len)?;
                Io::new(0, Op::Read, offset / self.block_size, blocks(*len)).with(buf)
            }
        })
    }

    /// Returns buffers of a page to the reserve, up to [`SPARE`].
    fn keep(&mut self, data: Extents) {
        for buf in data {
            if self.spare.len() < SPARE && buf.len() == PAGE && buf.is_unshared() {
                self.spare.push(buf);
            }
        }
    }

    fn completed(&mut self, now: Nanos, completion: Completion, ended: &mut Vec<Ended>) {
        let Some(wanted) = self.calls.try_remove(completion.token as usize) else {
            return;
        };
        if self.given_up.remove(&(completion.token as usize)) {
            return;
        }
        if completion.status == Status::Retry {
            self.waiting.push_back(wanted);
            self.paused_until = now + PAUSE;
            return self.keep(completion.data);
        }
        let status = completion.status;
        match wanted {
            Wanted::Write { tag, .. } => {
                self.keep(completion.data);
                ended.push(Ended::Written(tag, status));
            }
            Wanted::Discard { tag, .. } => ended.push(Ended::Discarded(tag, status)),
            Wanted::Flush { tag } => ended.push(Ended::Flushed(tag, status)),
            Wanted::Piece { tag, at, len, .. } => {
                let Some(reading) = self.reads.get_mut(&tag) else {
                    return;
                };
                match completion.data.first() {
                    Some(buf) if status.is_ok() => reading.bytes[at..at + len].copy_from_slice(buf),
                    _ if reading.status.is_ok() => reading.status = status,
                    _ => {}
                }
                reading.pieces -= 1;
                if reading.pieces == 0
                    && let Some(reading) = self.reads.remove(&tag)
                {
                    let result = match reading.status {
                        Status::Ok => Ok(reading.bytes),
                        status => Err(status),
                    };
                    ended.push(Ended::Read(tag, result));
                }
            }
        }
    }

    pub(crate) fn arm(&mut self, now: Nanos) -> Idle {
        let idle = self.queue.arm(now);
        if !self.at_once.is_empty() {
            return Idle::Busy;
        }
        if self.waiting.is_empty() {
            idle
        } else if now < self.paused_until {
            idle.and(Idle::Until(self.paused_until))
        } else if self.queue.inflight() == 0 {
            Idle::Busy
        } else {
            idle
        }
    }

    pub(crate) fn disarm(&mut self) {
        self.queue.disarm();
    }

    pub(crate) fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.queue.wake_fd()
    }
}
