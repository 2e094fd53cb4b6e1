//! The delay device's queue: completions of the base wait in a heap until they are due.
//!
//! ```text
//!   submit ──> base ──completed──> due? ──yes──> done
//!                                   └──no──> held, by due time ──poll(now)──> done
//! ```

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use nacre_random::Random;
use nacre_reactor::{Idle, Nanos};
use slab::Slab;

use super::{Delay, Latency};
use crate::due_queue::DueQueue;
use crate::io::{Extents, Io, Op, Status, Token};
use crate::layer::ModuleQueue;
use crate::pending::Pending;
use crate::queue::{Busy, Done, Queue};

pub(super) struct Channel {
    base: ModuleQueue,
    latencies_us: Arc<[AtomicU64; 4]>,
    depth: usize,
    /// All accepted I/O: in flight at the base, or delayed.
    requests: Slab<Request>,
    delayed: DueQueue,
    from_base: Done,
    random: Random,
}

struct Request {
    pending: Pending,
    latency: Option<Latency>,
    /// The result from the base, once it has arrived.
    answer: Option<(Status, Extents)>,
}

impl Channel {
    pub(super) fn new(delay: &Delay, base: ModuleQueue) -> Self {
        let depth = delay.base.limits().queue_depth as usize;
        Self {
            base,
            latencies_us: Arc::clone(&delay.latencies_us),
            depth,
            requests: Slab::with_capacity(depth.min(64)),
            delayed: DueQueue::with_capacity(depth.min(64)),
            from_base: Done::with_capacity(64),
            random: Random::new(delay.uuid.as_u64_pair().0),
        }
    }

    /// Chooses the latency of an operation.
    fn choose(&mut self, op: Op) -> Option<Latency> {
        let slow = self.random.below(100) == 0;
        match op {
            Op::Read | Op::Compare | Op::Verify if slow => Some(Latency::P99Read),
            Op::Read | Op::Compare | Op::Verify => Some(Latency::AvgRead),
            Op::Flush | Op::Unmap => None,
            _ if slow => Some(Latency::P99Write),
            _ => Some(Latency::AvgWrite),
        }
    }

    fn hold(&mut self, now: Nanos) {
        for ended in self.from_base.drain() {
            let index = ended.token as usize;
            let Some(request) = self.requests.get_mut(index) else {
                continue;
            };
            let latency_us = match request.latency {
                Some(which) => self.latencies_us[which as usize].load(Ordering::Relaxed),
                None => 0,
            };
            request.answer = Some((ended.status, ended.data));
            self.delayed
                .push(now + Duration::from_micros(latency_us), index);
        }
    }

    fn release(&mut self, now: Nanos, done: &mut Done) -> usize {
        let before = done.len();
        while done.has_room()
            && let Some(index) = self.delayed.pop_due(now)
        {
            let request = self.requests.remove(index);
            // A delayed I/O has its result already.
            let (status, data) = request
                .answer
                .unwrap_or_else(|| (Status::DeviceError, Extents::new()));
            done.push(request.pending.complete(status, data));
        }
        done.len() - before
    }
}

impl Queue for Channel {
    fn submit(&mut self, mut io: Io) -> Result<(), (Busy, Io)> {
        if self.requests.len() >= self.depth {
            return Err((Busy, io));
        }
        let latency = self.choose(io.op);
        let token = io.token;
        let request = Request {
            pending: Pending::new(token),
            latency,
            answer: None,
        };
        let index = self.requests.insert(request);
        io.token = index as Token;
        self.base.submit(io).map_err(|(busy, mut io)| {
            self.requests.remove(index).pending.abandon();
            io.token = token;
            (busy, io)
        })
    }

    fn poll(&mut self, now: Nanos, done: &mut Done) -> usize {
        while self.base.poll(now, &mut self.from_base) > 0 {
            self.hold(now);
        }
        self.release(now, done)
    }

    fn abort(&mut self, token: Token) -> bool {
        let mut requests = self.requests.iter_mut();
        let Some((index, request)) = requests.find(|(_, r)| r.pending.token() == token) else {
            return false;
        };
        let Some((status, _)) = &mut request.answer else {
            return self.base.abort(index as Token);
        };
        // The base executed the I/O, but its completion was not returned: it counts as not
        // executed.
        *status = Status::Aborted;
        self.delayed.remove(index);
        self.delayed.push(Nanos::ZERO, index);
        true
    }

    fn inflight(&self) -> usize {
        self.requests.len()
    }

    fn is_settled(&self) -> bool {
        self.inflight() == 0 && self.base.is_settled()
    }

    fn arm(&mut self, now: Nanos) -> Idle {
        self.delayed.arm(now).and(self.base.arm(now))
    }

    fn disarm(&mut self) {
        self.base.disarm();
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.base.wake_fd()
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        for request in self.requests.drain() {
            request.pending.abandon();
        }
    }
}
