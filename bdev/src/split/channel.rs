//! The split module's queue: the base's queue, with block addresses relative to the part.
//!
//! The queue checks each range itself. The layer above checks it too; this check protects the data
//! of other parts from a bug there.

use std::os::fd::BorrowedFd;

use nacre_hugepages::MemoryView;
use nacre_reactor::{Idle, Nanos};

use super::Part;
use crate::io::{Completion, Io, Op, Status, Token};
use crate::layer::ModuleQueue;
use crate::queue::{Busy, Done, Queue};

pub(super) struct Channel {
    base: ModuleQueue,
    offset: u64,
    blocks: u64,
    depth: usize,
    /// I/Os outside the part: at most `depth`, until the next poll.
    refused: Vec<Completion>,
}

impl Channel {
    pub(super) fn new(part: &Part, base: ModuleQueue) -> Self {
        Self {
            base,
            offset: part.offset,
            blocks: part.blocks,
            depth: part.parts.base.limits().queue_depth as usize,
            refused: Vec::new(),
        }
    }

    fn is_inside(&self, io: &Io) -> bool {
        let inside = |lba: u64| {
            let end = lba.checked_add(u64::from(io.blocks));
            end.is_some_and(|end| end <= self.blocks)
        };
        match io.op {
            Op::Flush => true,
            Op::Copy => inside(io.lba) && inside(io.source_lba),
            _ => inside(io.lba),
        }
    }

    /// Block numbers of the part to those of the base. An I/O inside the part cannot overflow.
    fn shift(&self, io: &mut Io) {
        if io.op != Op::Flush {
            io.lba += self.offset;
        }
        if io.op == Op::Copy {
            io.source_lba += self.offset;
        }
    }

    fn shift_back(&self, io: &mut Io) {
        if io.op != Op::Flush {
            io.lba -= self.offset;
        }
        if io.op == Op::Copy {
            io.source_lba -= self.offset;
        }
    }
}

impl Queue for Channel {
    fn submit(&mut self, mut io: Io) -> Result<(), (Busy, Io)> {
        if !self.is_inside(&io) {
            if self.refused.len() >= self.depth {
                return Err((Busy, io));
            }
            self.refused.push(io.complete(Status::OutOfRange));
            return Ok(());
        }
        self.shift(&mut io);
        self.base.submit(io).map_err(|(busy, mut io)| {
            self.shift_back(&mut io);
            (busy, io)
        })
    }

    fn poll(&mut self, now: Nanos, done: &mut Done) -> usize {
        done.take_from(&mut self.refused) + self.base.poll(now, done)
    }

    fn run_sync(&mut self, io: &mut Io, zero_copy: &mut Option<MemoryView>) -> Option<Status> {
        if !self.is_inside(io) {
            return Some(Status::OutOfRange);
        }
        self.shift(io);
        let status = self.base.run_sync(io, zero_copy);
        self.shift_back(io);
        status
    }

    fn abort(&mut self, token: Token) -> bool {
        self.base.abort(token)
    }

    fn inflight(&self) -> usize {
        self.refused.len() + self.base.inflight()
    }

    fn is_settled(&self) -> bool {
        self.refused.is_empty() && self.base.is_settled()
    }

    fn arm(&mut self, now: Nanos) -> Idle {
        if self.refused.is_empty() {
            self.base.arm(now)
        } else {
            Idle::Busy
        }
    }

    fn disarm(&mut self) {
        self.base.disarm();
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.base.wake_fd()
    }
}
