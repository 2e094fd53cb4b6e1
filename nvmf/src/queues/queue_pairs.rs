//! The table of a core's queue pairs.

use std::sync::Arc;

use crate::queues::queue_pair::{QueueId, QueuePair, Stage};
use crate::queues::request::{Request, Step};
use crate::subsystems::association::Association;
use crate::subsystems::core_handle::ReqRef;

pub(crate) struct QueuePairs {
    table: Vec<Option<Box<QueuePair>>>,
    free: Vec<u32>,
    /// Of the latest queue pair.
    generation: u32,
    max: usize,
}

impl QueuePairs {
    /// An empty table for at most `max` queue pairs.
    pub fn new(max: usize) -> QueuePairs {
        QueuePairs {
            table: Vec::new(),
            free: Vec::new(),
            generation: 0,
            max,
        }
    }

    /// The id of the next queue pair. `None`: the table is full.
    pub fn reserve(&mut self) -> Option<QueueId> {
        let index = match self.free.pop() {
            Some(index) => index,
            None if self.table.len() < self.max => {
                self.table.push(None);
                self.table.len() as u32 - 1
            }
            None => return None,
        };
        self.generation = self.generation.wrapping_add(1);
        Some(QueueId {
            index,
            generation: self.generation,
        })
    }

    /// Puts a queue pair into the place that its id has reserved.
    pub fn insert(&mut self, qp: QueuePair) {
        let place = qp.id.index as usize;
        self.table[place] = Some(Box::new(qp));
    }

    pub fn remove(&mut self, q: u32) -> Box<QueuePair> {
        self.free.push(q);
        self.table[q as usize].take().expect("queue pair")
    }

    /// The most queue pairs.
    pub fn max(&self) -> usize {
        self.max
    }

    /// Queue pairs.
    pub fn len(&self) -> usize {
        self.table.len() - self.free.len()
    }

    /// Places, with and without a queue pair.
    pub fn places(&self) -> u32 {
        self.table.len() as u32
    }

    pub fn iter(&self) -> impl Iterator<Item = &QueuePair> {
        self.table.iter().flatten().map(Box::as_ref)
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut QueuePair> {
        self.table.iter_mut().flatten().map(Box::as_mut)
    }

    /// Queue `qid` of an association, if it is on this core.
    pub fn of_association(
        &mut self,
        association: &Arc<Association>,
        qid: u16,
    ) -> Option<&mut QueuePair> {
        let is_it = |of: &Arc<Association>| Arc::ptr_eq(of, association);
        self.iter_mut()
            .find(|qp| qp.qid == qid && qp.association.as_ref().is_some_and(is_it))
    }

    /// A queue pair that is known to be there: it has an event, or an I/O in a device.
    #[inline]
    pub fn present(&mut self, q: u32) -> &mut QueuePair {
        self.table[q as usize].as_mut().expect("queue pair")
    }

    #[inline]
    pub fn get(&self, q: u32) -> Option<&QueuePair> {
        self.table.get(q as usize)?.as_deref()
    }

    pub fn get_mut(&mut self, q: u32) -> Option<&mut QueuePair> {
        self.table.get_mut(q as usize)?.as_deref_mut()
    }

    /// A named request, if it is still there and its queue takes and answers commands.
    pub fn current(&self, name: &ReqRef) -> Option<&Request> {
        let qp = self.get(name.queue)?;
        if qp.id.generation != name.generation || qp.stage == Stage::Ending {
            return None;
        }
        let request = &qp.requests[name.request];
        (request.step != Step::Free && request.begun() == name.begun).then_some(request)
    }

    pub fn waits_for_buffer(&self, name: &ReqRef) -> bool {
        self.current(name)
            .is_some_and(|request| request.step == Step::Buffer)
    }

    pub fn waits_for_room(&self, name: &ReqRef) -> bool {
        self.current(name).is_some_and(|request| request.waiting)
    }
}
