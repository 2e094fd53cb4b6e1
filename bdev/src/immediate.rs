//! A list of completions until the next poll, for modules whose I/O ends in `submit` (null,
//! malloc).

use nacre_reactor::Idle;

use crate::io::Completion;
use crate::queue::Done;

pub(crate) struct Immediate {
    ended: Vec<Completion>,
    depth: usize,
}

impl Immediate {
    pub fn new(depth: usize) -> Immediate {
        // Grows to the used depth and keeps that size.
        Immediate {
            ended: Vec::with_capacity(depth.min(32)),
            depth,
        }
    }

    pub fn is_full(&self) -> bool {
        self.ended.len() >= self.depth
    }

    pub fn len(&self) -> usize {
        self.ended.len()
    }

    #[inline]
    pub fn push(&mut self, completion: Completion) {
        self.ended.push(completion);
    }

    #[inline]
    pub fn hand_over(&mut self, done: &mut Done) -> usize {
        done.take_from(&mut self.ended)
    }

    pub fn arm(&self) -> Idle {
        if self.ended.is_empty() {
            Idle::Quiet
        } else {
            Idle::Busy
        }
    }
}
