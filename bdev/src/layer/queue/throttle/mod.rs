//! Delays I/O that exceeds a rate limit of the device; see [`crate::qos`].
//!
//! ```text
//!   submit ──no limit, or admitted──> start
//!              └──> queued: reads | others, in order ──poll(now): admitted──> start
//! ```
//!
//! Delayed I/O counts as accepted: towards the queue's depth, so that a full queue slows the host
//! down, and towards the latency. Reads (with compares and verifies) and other I/O have separate
//! lists, because they have separate limits. Flushes and unmaps are never delayed.

use std::collections::VecDeque;
use std::time::Duration;

use nacre_reactor::{Idle, Nanos};

use super::LayerQueue;
use crate::io::{Io, Op, Status, Token};
use crate::qos::Chain;
use crate::queue::{Busy, Queue};

/// A raised limit does not wake a queue: the queue checks at this interval.
const LOOK_EVERY: Duration = Duration::from_millis(100);

pub(super) struct Throttle {
    chain: Chain,
    block_size: u64,
    /// Waiting reads, compares and verifies, and waiting I/O of other kinds.
    queued: [VecDeque<QueuedIo>; 2],
    /// The index of the list to serve next.
    turn: usize,
}

/// An I/O that waits for its limit.
struct QueuedIo {
    io: Io,
    /// Time of arrival; `None`: unknown.
    since: Option<Nanos>,
    /// The limit has admitted it, but the module was busy.
    admitted: bool,
}

impl Throttle {
    pub(super) fn new(chain: &Chain, block_size: u32) -> Self {
        Self {
            chain: chain.clone(),
            block_size: u64::from(block_size),
            queued: Default::default(),
            turn: 0,
        }
    }

    /// True if the next I/O must pass the throttle: a limit is set, or I/O waits.
    #[inline]
    pub(super) fn is_active(&self) -> bool {
        self.chain.is_on() || self.holds()
    }

    #[inline]
    pub(super) fn holds(&self) -> bool {
        self.len() > 0
    }

    #[inline]
    pub(super) fn len(&self) -> usize {
        self.queued[0].len() + self.queued[1].len()
    }

    /// Sets the arrival time of I/O that arrived while the time was unknown.
    pub(super) fn woken(&mut self, now: Nanos) {
        for held in self.queued.iter_mut().flatten() {
            held.since.get_or_insert(now);
        }
    }

    fn bytes(&self, io: &Io) -> u64 {
        u64::from(io.blocks) * self.block_size
    }

    /// Removes and returns the next I/O that the limits admit, or that no limit applies to any
    /// more.
    fn next(&mut self, now: Nanos, all: bool) -> Option<(usize, QueuedIo)> {
        for side in [self.turn, 1 - self.turn] {
            let Some(first) = self.queued[side].front() else {
                continue;
            };
            let (op, bytes) = (first.io.op, self.bytes(&first.io));
            if all || first.admitted || self.chain.admit(op, bytes, now) {
                self.turn = 1 - side;
                return self.queued[side].pop_front().map(|held| (side, held));
            }
        }
        None
    }

    /// Returns how long a reactor may sleep. `comes`: the module has I/O whose completion wakes it.
    pub(super) fn arm(&self, now: Nanos, comes: bool) -> Idle {
        let mut idle = Idle::Quiet;
        for first in self.queued.iter().filter_map(VecDeque::front) {
            let due = self.chain.due(first.io.op, self.bytes(&first.io));
            idle = idle.and(match first.admitted || due <= now {
                true if comes => Idle::Quiet,
                true => Idle::Busy,
                false => Idle::Until(due.min(now + LOOK_EVERY)),
            });
        }
        idle
    }

    fn take(&mut self, token: Token) -> Option<QueuedIo> {
        self.queued.iter_mut().find_map(|held| {
            let at = held.iter().position(|held| held.io.token == token)?;
            held.remove(at)
        })
    }
}

fn side(op: Op) -> usize {
    usize::from(!matches!(op, Op::Read | Op::Compare | Op::Verify))
}

impl LayerQueue {
    /// Submits an I/O to a device with limits, or with delayed I/O.
    #[cold]
    #[allow(clippy::result_large_err)]
    pub(super) fn submit_limited(&mut self, io: Io) -> Result<(), (Busy, Io)> {
        let free = matches!(io.op, Op::Flush | Op::Unmap);
        let (side, bytes) = (side(io.op), self.throttle.bytes(&io));
        if self.inflight() >= self.depth {
            self.stats.busy();
            return Err((Busy, io));
        }
        let first = self.throttle.queued[side].is_empty();
        if free || first && self.throttle.chain.admit(io.op, bytes, self.now) {
            return self.start(io);
        }
        let since = (!self.stale).then_some(self.now);
        self.stats.throttled();
        self.throttle.queued[side].push_back(QueuedIo {
            io,
            since,
            admitted: false,
        });
        Ok(())
    }

    /// Starts the delayed I/O that the limits admit at this time.
    #[cold]
    pub(super) fn release_held(&mut self) {
        let all = self.layer.is_gone();
        while !self.is_blocked()
            && let Some((side, held)) = self.throttle.next(self.now, all)
        {
            let since = held.since;
            self.arrived = since;
            let outcome = self.start(held.io);
            self.arrived = None;
            if let Err((Busy, io)) = outcome {
                self.throttle.queued[side].push_front(QueuedIo {
                    io,
                    since,
                    admitted: true,
                });
                return;
            }
        }
    }

    /// Aborts a delayed I/O. Returns false if it is not delayed.
    pub(super) fn abort_held(&mut self, token: Token) -> bool {
        let Some(held) = self.throttle.take(token) else {
            return false;
        };
        self.arrived = held.since;
        self.answer(held.io, Status::Aborted);
        self.arrived = None;
        true
    }
}

#[cfg(test)]
mod tests;
