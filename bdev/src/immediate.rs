//! A list of completions until the next poll, for modules that complete their I/O in `submit`
//! (null, malloc).

use nacre_reactor::Idle;

use crate::io::Completion;
use crate::queue::Done;

pub(crate) struct Immediate {
    ended: Vec<Completion>,
    depth: usize,
}

impl Immediate {
    pub(crate) fn new(depth: usize) -> Self {
        // Grows to the used depth and keeps that size.
        Self {
            ended: Vec::with_capacity(depth.min(32)),
            depth,
        }
    }

    pub(crate) fn is_full(&self) -> bool {
        self.ended.len() >= self.depth
    }

    pub(crate) fn len(&self) -> usize {
        self.ended.len()
    }

    #[inline]
    pub(crate) fn push(&mut self, completion: Completion) {
        self.ended.push(completion);
    }

    #[inline]
    pub(crate) fn hand_over(&mut self, done: &mut Done) -> usize {
        done.take_from(&mut self.ended)
    }

    pub(crate) fn arm(&self) -> Idle {
        if self.ended.is_empty() {
            Idle::Quiet
        } else {
            Idle::Busy
        }
    }
}
