//! The passthru device's queue: the base's.

use std::os::fd::RawFd;

use nacre_reactor::{Idle, Nanos};

use crate::io::{Io, Token};
use crate::layer::ModuleQueue;
use crate::queue::{Busy, Done, Queue};
use crate::reservation::Reserve;

pub(super) struct Channel {
    base: ModuleQueue,
}

impl Channel {
    pub fn new(base: ModuleQueue) -> Channel {
        Channel { base }
    }
}

impl Queue for Channel {
    fn submit(&mut self, io: Io) -> Result<(), (Busy, Io)> {
        self.base.submit(io)
    }

    fn poll(&mut self, now: Nanos, done: &mut Done) -> usize {
        self.base.poll(now, done)
    }

    fn abort(&mut self, token: Token) -> bool {
        self.base.abort(token)
    }

    fn inflight(&self) -> usize {
        self.base.inflight()
    }

    fn is_settled(&self) -> bool {
        self.inflight() == 0 && self.base.is_settled()
    }

    fn reserve(&mut self, request: Reserve) -> Result<(), Reserve> {
        self.base.reserve(request)
    }

    fn arm(&mut self, now: Nanos) -> Idle {
        self.base.arm(now)
    }

    fn disarm(&mut self) {
        self.base.disarm();
    }

    fn wake_fd(&self) -> Option<RawFd> {
        self.base.wake_fd()
    }
}
