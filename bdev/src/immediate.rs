//! For modules whose I/O is over when it is submitted: completions that wait for the next poll.

use std::collections::VecDeque;

use nacre_reactor::Idle;

use crate::io::Completion;
use crate::queue::Done;

pub(crate) struct Immediate {
    ended: VecDeque<Completion>,
    depth: usize,
}

impl Immediate {
    pub fn new(depth: usize) -> Immediate {
        // Grows to what is really used, up to the depth, and stays there.
        Immediate {
            ended: VecDeque::with_capacity(depth.min(32)),
            depth,
        }
    }

    pub fn is_full(&self) -> bool {
        self.ended.len() >= self.depth
    }

    pub fn len(&self) -> usize {
        self.ended.len()
    }

    pub fn push(&mut self, completion: Completion) {
        self.ended.push_back(completion);
    }

    pub fn hand_over(&mut self, done: &mut Done) -> usize {
        let count = self.ended.len().min(done.room());
        for completion in self.ended.drain(..count) {
            done.push(completion);
        }
        count
    }

    pub fn arm(&self) -> Idle {
        if self.ended.is_empty() {
            Idle::Quiet
        } else {
            Idle::Busy
        }
    }
}
