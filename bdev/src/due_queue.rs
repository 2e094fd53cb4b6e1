//! Requests of a stacked device that have their result and wait for the time to complete.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use nacre_reactor::{Idle, Nanos};

/// Indexes of requests by the time they are due.
pub(crate) struct Held(BinaryHeap<Reverse<(Nanos, usize)>>);

impl Held {
    pub fn with_capacity(capacity: usize) -> Held {
        Held(BinaryHeap::with_capacity(capacity))
    }

    pub fn push(&mut self, due: Nanos, index: usize) {
        self.0.push(Reverse((due, index)));
    }

    /// The request that is due for the longest time.
    pub fn pop_due(&mut self, now: Nanos) -> Option<usize> {
        let Reverse((due, index)) = *self.0.peek()?;
        if due > now {
            return None;
        }
        self.0.pop();
        Some(index)
    }

    pub fn remove(&mut self, index: usize) {
        self.0.retain(|Reverse((_, held))| *held != index);
    }

    pub fn arm(&self, now: Nanos) -> Idle {
        match self.0.peek() {
            Some(Reverse((due, _))) if *due <= now => Idle::Busy,
            Some(Reverse((due, _))) => Idle::Until(*due),
            None => Idle::Quiet,
        }
    }
}
