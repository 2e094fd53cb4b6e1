//! A lane's queue to the device of one replica, with the *children* in flight there: a child is the
//! I/O that one replica executes for a request.

use std::collections::VecDeque;

use nacre_bdev::{Busy, Flags, Io, LayerQueue, Op, Queue, Status, Token};
use nacre_hugepages::MemoryView;
use nacre_reactor::Nanos;

use crate::lane::request::{Request, child_token};
use crate::lane::slots::bit;

pub(in crate::lane) struct ReplicaQueue {
    pub queue: LayerQueue,
    /// Children in flight at the device.
    pub inflight: u32,
    /// Children that the device has not accepted yet, oldest first.
    pub waiting: VecDeque<Child>,
    /// Unmapped blocks read as undefined data: write zeroes instead, so that all replicas are
    /// equal.
    zeroes_for_unmap: bool,
    /// Number of device blocks before the volume's first block.
    first: u64,
}

/// A child that waits for space in the replica's queue.
#[derive(Clone, Copy)]
pub(in crate::lane) struct Child {
    pub index: u32,
    pub generation: u32,
    /// Not submitted before this time; zero: when the queue has space.
    pub after: Nanos,
}

impl ReplicaQueue {
    pub(crate) fn new(queue: LayerQueue, zeroes_for_unmap: bool, first: u64) -> Self {
        Self {
            queue,
            inflight: 0,
            waiting: VecDeque::with_capacity(16),
            zeroes_for_unmap,
            first,
        }
    }

    /// Passes a read to the device unchanged, or hands it back.
    #[inline]
    #[allow(clippy::result_large_err)]
    pub(crate) fn pass(&mut self, mut io: Io, token: Token) -> Result<(), Io> {
        if !self.waiting.is_empty() {
            return Err(io);
        }
        if self.inflight == 0 {
            self.queue.rested();
        }
        let own = std::mem::replace(&mut io.token, token);
        io.lba += self.first;
        match self.queue.pass_read(io) {
            Ok(()) => {
                self.inflight += 1;
                Ok(())
            }
            Err(mut io) => {
                io.token = own;
                io.lba -= self.first;
                Err(io)
            }
        }
    }

    /// See [`Queue::run_sync`].
    #[inline]
    pub(crate) fn run_sync(
        &mut self,
        io: &mut Io,
        zero_copy: &mut Option<MemoryView>,
    ) -> Option<Status> {
        if !self.waiting.is_empty() {
            return None;
        }
        io.lba += self.first;
        let status = self.queue.run_sync(io, zero_copy);
        io.lba -= self.first;
        status
    }

    /// Submits a child to the device. Returns false when the queue is full. `sole`: no other
    /// replica gets the request, so the child needs no handle of its own on the data.
    #[inline]
    pub(crate) fn hand(
        &mut self,
        request: &mut Request,
        index: usize,
        slot: usize,
        sole: bool,
    ) -> bool {
        if self.inflight == 0 {
            self.queue.rested();
        }
        let (mut op, mut flags) = (request.op, request.flags);
        if op == Op::Unmap && self.zeroes_for_unmap {
            (op, flags) = (Op::WriteZeroes, flags | Flags::DEALLOCATE);
        }
        let moved = sole || request.is_read();
        let data = if moved {
            std::mem::take(&mut request.data)
        } else {
            request.data.clone()
        };
        let io = Io {
            token: child_token(index, slot, request.generation),
            op,
            flags,
            lba: match op {
                Op::Flush => 0,
                _ => request.lba + self.first,
            },
            blocks: request.blocks,
            source_lba: 0,
            data,
        };
        match self.queue.submit(io) {
            Ok(()) => {
                request.children.with |= bit(slot);
                self.inflight += 1;
                true
            }
            Err((Busy, io)) => {
                if moved {
                    request.data = io.data;
                }
                false
            }
        }
    }

    /// Appends a child that the device has not accepted yet.
    pub(crate) fn wait(&mut self, request: &mut Request, index: usize, slot: usize, after: Nanos) {
        request.children.queued |= bit(slot);
        self.waiting.push_back(Child {
            index: index as u32,
            generation: request.generation,
            after,
        });
    }

    /// Counts a child that was passed to the device unchanged and has completed. `start` is the
    /// request's arrival time, or zero if unknown.
    #[inline]
    pub(crate) fn passed_ended(&mut self, blocks: u32, status: Status, start: Nanos) {
        let start = (start != Nanos::ZERO).then_some(start);
        self.queue.count_read(blocks, status, start);
    }
}
