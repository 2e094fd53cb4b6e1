//! Counts the open queues of a device, and reports the close of the last one to a removal.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use nacre_hugepages::MemoryView;
use nacre_reactor::{Idle, Nanos};
use parking_lot::Mutex;

use crate::io::{Io, Status, Token};
use crate::queue::{Busy, Done, Queue};
use crate::reservation::Reserve;

/// Counts the queues of a device.
#[derive(Default)]
pub(super) struct Opens {
    state: Mutex<OpensState>,
}

#[derive(Default)]
struct OpensState {
    count: usize,
    calls: Vec<Box<dyn FnOnce() + Send>>,
}

impl Opens {
    pub(super) fn open(self: &Arc<Self>) -> Open {
        self.state.lock().count += 1;
        Open {
            opens: Arc::clone(self),
        }
    }

    pub(super) fn count(&self) -> usize {
        self.state.lock().count
    }

    /// Calls `call` as soon as no queue is open.
    pub(super) fn when_none(&self, call: Box<dyn FnOnce() + Send>) {
        let mut state = self.state.lock();
        if state.count > 0 {
            state.calls.push(call);
            return;
        }
        drop(state);
        call();
    }
}

/// The guard of an open queue. Dropping it counts the queue as closed.
pub(super) struct Open {
    opens: Arc<Opens>,
}

impl Drop for Open {
    fn drop(&mut self) {
        let mut state = self.opens.state.lock();
        state.count -= 1;
        if state.count == 0 {
            let calls = std::mem::take(&mut state.calls);
            drop(state);
            calls.into_iter().for_each(|call| call());
        }
    }
}

/// A module's own queue, counted as open.
pub struct ModuleQueue {
    // Dropped in this order: the queue is closed before it is counted as closed.
    inner: Box<dyn Queue>,
    open: Open,
}

impl ModuleQueue {
    pub(super) fn new(inner: Box<dyn Queue>, open: Open) -> Self {
        Self { inner, open }
    }

    pub(super) fn into_parts(self) -> (Box<dyn Queue>, Open) {
        (self.inner, self.open)
    }
}

impl Queue for ModuleQueue {
    fn submit(&mut self, io: Io) -> Result<(), (Busy, Io)> {
        self.inner.submit(io)
    }

    fn poll(&mut self, now: Nanos, done: &mut Done) -> usize {
        self.inner.poll(now, done)
    }

    fn run_sync(&mut self, io: &mut Io, zero_copy: &mut Option<MemoryView>) -> Option<Status> {
        self.inner.run_sync(io, zero_copy)
    }

    fn abort(&mut self, token: Token) -> bool {
        self.inner.abort(token)
    }

    fn inflight(&self) -> usize {
        self.inner.inflight()
    }

    fn is_settled(&self) -> bool {
        self.inner.is_settled()
    }

    fn reserve(&mut self, request: Reserve) -> Result<(), Reserve> {
        self.inner.reserve(request)
    }

    fn arm(&mut self, now: Nanos) -> Idle {
        self.inner.arm(now)
    }

    fn disarm(&mut self) {
        self.inner.disarm();
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner.wake_fd()
    }
}
