//! A queue of requests, ordered by the time at which each is due. The delay and fault modules
//! complete their requests from it.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use nacre_reactor::{Idle, Nanos};

/// Indexes of requests, ordered by due time.
pub(crate) struct DueQueue(BinaryHeap<Reverse<(Nanos, usize)>>);

impl DueQueue {
    pub(crate) fn with_capacity(capacity: usize) -> Self {
        Self(BinaryHeap::with_capacity(capacity))
    }

    pub(crate) fn push(&mut self, due: Nanos, index: usize) {
        self.0.push(Reverse((due, index)));
    }

    /// Removes and returns the request with the earliest due time, if it is due at `now`.
    pub(crate) fn pop_due(&mut self, now: Nanos) -> Option<usize> {
        let Reverse((due, index)) = *self.0.peek()?;
        if due > now {
            return None;
        }
        self.0.pop();
        Some(index)
    }

    pub(crate) fn remove(&mut self, index: usize) {
        self.0.retain(|Reverse((_, held))| *held != index);
    }

    pub(crate) fn arm(&self, now: Nanos) -> Idle {
        match self.0.peek() {
            Some(Reverse((due, _))) if *due <= now => Idle::Busy,
            Some(Reverse((due, _))) => Idle::Until(*due),
            None => Idle::Quiet,
        }
    }
}
