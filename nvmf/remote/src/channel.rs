//! One core's bdev queue to a remote namespace. It completes I/O that the target does not support,
//! or that must not be sent; all other I/O goes to the queues of the namespace's paths.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use nacre_bdev::reservation::Reserve;
use nacre_bdev::{Busy, Completion, Done, Flags, Io, Queue, Status, Token};
use nacre_reactor::{Idle, Nanos};

use crate::namespace::Namespace;
use crate::path_queues::PathQueues;

/// The queue of a remote bdev on one core.
pub(crate) struct RemoteQueue {
    queue: PathQueues,
    namespace: Arc<Namespace>,
    /// Completions of I/O that is not sent: unsupported operations, and all I/O while every path is
    /// refused.
    ended: VecDeque<Completion>,
    /// Most entries of `ended`.
    depth: usize,
}

impl RemoteQueue {
    pub(crate) fn new(queue: PathQueues, namespace: Arc<Namespace>) -> Self {
        let depth = namespace.promise.limits.queue_depth as usize;
        Self {
            queue,
            namespace,
            ended: VecDeque::with_capacity(depth),
            depth,
        }
    }
}

impl Queue for RemoteQueue {
    #[inline]
    fn submit(&mut self, mut io: Io) -> Result<(), (Busy, Io)> {
        // A target that deallocates with zeroes announces it (DLFEAT bit 3). Other targets may
        // refuse the flag, and SPDK's target does. The blocks are zeroed without it.
        if io.flags.contains(Flags::DEALLOCATE) && !self.namespace.promise.limits.zeroes_deallocate
        {
            io.flags.remove(Flags::DEALLOCATE);
        }
        let status = if self.namespace.paths.is_refused() {
            Status::Gone
        } else if !self.namespace.does(io.op) {
            Status::Unsupported
        } else {
            return self.queue.submit(io);
        };
        // Bound the list of completions.
        if self.ended.len() >= self.depth {
            return Err((Busy, io));
        }
        self.ended.push_back(io.complete(status));
        Ok(())
    }

    #[inline]
    fn poll(&mut self, now: Nanos, done: &mut Done) -> usize {
        let before = done.len();
        while done.has_room()
            && let Some(completion) = self.ended.pop_front()
        {
            done.push(completion);
        }
        self.queue.poll(now, done);
        done.len() - before
    }

    fn abort(&mut self, token: Token) -> bool {
        self.queue.abort(token)
    }

    fn inflight(&self) -> usize {
        self.ended.len() + self.queue.inflight()
    }

    fn is_settled(&self) -> bool {
        self.ended.is_empty() && self.queue.is_settled()
    }

    fn reserve(&mut self, request: Reserve) -> Result<(), Reserve> {
        if self.namespace.paths.is_refused() || !self.namespace.reserves() {
            Err(request)
        } else {
            self.queue.reserve(request)
        }
    }

    fn arm(&mut self, now: Nanos) -> Idle {
        if self.ended.is_empty() {
            self.queue.arm(now)
        } else {
            Idle::Busy
        }
    }

    fn disarm(&mut self) {
        self.queue.disarm();
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.queue.wake_fd()
    }
}
