//! The table of a lane's requests: the I/O of hosts that this core's queue to the volume has
//! accepted and not completed. A request keeps its index from start to end; indexes are reused.
//!
//! A *child* is the part of a request that one replica executes. A *slot* is the index of a replica
//! in the volume. Nearly every read is *direct*: one replica gets it unchanged, and the table keeps
//! only the few fields that its completion needs. Any other event makes it an ordinary request
//! first ([`Requests::make_ordinary`]). An *orphan* is a child that a device has not completed
//! although its request has ended.

use std::ops::{Index, IndexMut};

use nacre_bdev::{Io, Pending, Token};
use nacre_reactor::Nanos;
use slab::Slab;

use super::request::{Failures, NO_FAILURES, Request, Stage};
use super::slots::bit;
use crate::shared::Failure;

#[derive(Default)]
pub(super) struct Requests {
    places: Vec<Request>,
    free: Vec<u32>,
    /// Number of [`Stage::Direct`] requests.
    direct: usize,
    /// Failed children of requests, for the requests that have any.
    failures: Slab<Failures>,
}

impl Requests {
    pub(super) fn with_capacity(capacity: usize) -> Self {
        Self {
            places: Vec::with_capacity(capacity),
            free: Vec::with_capacity(capacity),
            direct: 0,
            failures: Slab::new(),
        }
    }

    /// Number of requests.
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.places.len() - self.free.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// One more than the highest index that was ever in use.
    pub(super) fn end(&self) -> usize {
        self.places.len()
    }

    /// Adds an ordinary request. Returns its index. `generation` distinguishes it from earlier
    /// requests at that index, in the tokens of children.
    #[inline]
    pub(super) fn insert(&mut self, io: Io, generation: u32, start: Nanos) -> usize {
        let index = self.place();
        self.places[index].begin(io, generation, start);
        index
    }

    /// Adds a direct read that the replica in `slot` gets. Returns its index.
    #[inline]
    pub(super) fn insert_direct(
        &mut self,
        io: &Io,
        slot: usize,
        generation: u32,
        start: Nanos,
    ) -> usize {
        let index = self.place();
        self.places[index].begin_sync(io, slot, generation, start);
        self.direct += 1;
        index
    }

    #[inline]
    fn place(&mut self) -> usize {
        match self.free.pop() {
            Some(index) => index as usize,
            None => self.grow(),
        }
    }

    #[inline]
    pub(super) fn is_direct(&self, index: usize, generation: u32) -> bool {
        let place = self.places.get(index);
        place.is_some_and(|r| r.generation == generation && matches!(r.stage, Stage::Direct(_)))
    }

    /// Removes a direct request. Returns its I/O, for the caller to complete, its arrival time and
    /// its number of blocks.
    ///
    /// # Panics
    /// When the request is not direct.
    #[inline]
    pub(super) fn remove_direct(&mut self, index: usize) -> (Pending, Nanos, u32) {
        let request = &mut self.places[index];
        let pending = request.pending.take().expect("a direct one is open");
        request.stage = Stage::Free;
        self.direct -= 1;
        self.free.push(index as u32);
        (pending, request.start, request.blocks)
    }

    /// Makes all direct requests ordinary ones. Call this before any access but
    /// [`Requests::is_direct`] and [`Requests::remove_direct`].
    #[inline]
    pub(super) fn make_ordinary(&mut self) {
        if self.direct > 0 {
            self.make_all_ordinary();
        }
    }

    #[cold]
    fn make_all_ordinary(&mut self) {
        self.places.iter_mut().for_each(Request::make_ordinary);
        self.direct = 0;
    }

    #[cold]
    fn grow(&mut self) -> usize {
        self.places.push(Request::free());
        self.places.len() - 1
    }

    /// Removes a request whose I/O was completed; panics otherwise.
    #[inline]
    pub(super) fn remove(&mut self, index: usize) {
        let request = &mut self.places[index];
        debug_assert!(request.stage != Stage::Free, "ended twice");
        request.stage = Stage::Free;
        request.data.clear();
        // Panics if the I/O was not completed.
        request.pending = None;
        self.free.push(index as u32);
    }

    /// Ends an ordinary request: takes its I/O, for the caller to complete.
    /// The request stays in the table while it has orphans. `None`: the I/O was completed before.
    #[inline]
    pub(super) fn close(&mut self, index: usize) -> Option<Pending> {
        let request = &mut self.places[index];
        debug_assert!(
            !matches!(request.stage, Stage::Direct(_)),
            "make it ordinary first"
        );
        let pending = request.pending.take();
        if request.failures != NO_FAILURES {
            self.failures.remove(request.failures as usize);
            request.failures = NO_FAILURES;
        }
        if request.children.orphans == 0 {
            self.remove(index);
        } else {
            request.stage = Stage::Orphaned;
        }
        pending
    }

    /// Records the failure of the child in `slot`. `ticket` is the number of the report to the
    /// volume's control, which decides about the replica.
    pub(super) fn note_failure(&mut self, index: usize, slot: usize, ticket: u64, why: Failure) {
        let request = &mut self.places[index];
        if request.failures == NO_FAILURES {
            request.failures = self.failures.insert(Failures::new()) as u32;
        }
        let failures = &mut self.failures[request.failures as usize];
        (failures.tickets[slot], failures.why[slot]) = (ticket, why);
        request.children.failed |= bit(slot);
    }

    /// A request, and the failures of its children.
    pub(super) fn with_failures(&mut self, index: usize) -> (&mut Request, Option<&Failures>) {
        let request = &mut self.places[index];
        debug_assert!(
            !matches!(request.stage, Stage::Direct(_)),
            "make it ordinary first"
        );
        let failures = self.failures.get(request.failures as usize);
        (request, failures)
    }

    #[cfg(test)]
    pub(super) fn failures(&self) -> usize {
        self.failures.len()
    }

    /// Drops the orphans in `slot`: the queue to that replica was closed, so none will complete.
    pub(super) fn give_up_orphans(&mut self, slot: usize) {
        for (_, request) in self.iter_mut() {
            request.children.orphans &= !bit(slot);
        }
        for index in 0..self.end() {
            let request = &self.places[index];
            if request.stage == Stage::Orphaned && request.children.orphans == 0 {
                self.remove(index);
            }
        }
    }

    /// The index of the open request whose I/O has this token.
    pub(super) fn with_token(&self, token: Token) -> Option<usize> {
        let has_token = |r: &Request| r.pending.as_ref().is_some_and(|p| p.token() == token);
        let found = self.iter().find(|(_, r)| has_token(r));
        found.map(|(index, _)| index)
    }

    #[inline]
    pub(super) fn get_mut(&mut self, index: usize) -> Option<&mut Request> {
        let request = self.places.get_mut(index)?;
        (request.stage != Stage::Free).then_some(request)
    }

    pub(super) fn contains(&self, index: usize) -> bool {
        debug_assert_eq!(self.direct, 0, "make direct requests ordinary first");
        let place = self.places.get(index);
        place.is_some_and(|request| request.stage != Stage::Free)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (usize, &Request)> {
        debug_assert_eq!(self.direct, 0, "make direct requests ordinary first");
        let places = self.places.iter().enumerate();
        places.filter(|(_, request)| request.stage != Stage::Free)
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (usize, &mut Request)> {
        debug_assert_eq!(self.direct, 0, "make direct requests ordinary first");
        let places = self.places.iter_mut().enumerate();
        places.filter(|(_, request)| request.stage != Stage::Free)
    }
}

impl Index<usize> for Requests {
    type Output = Request;

    #[inline]
    fn index(&self, index: usize) -> &Request {
        let request = &self.places[index];
        debug_assert!(
            !matches!(request.stage, Stage::Direct(_)),
            "make it ordinary first"
        );
        request
    }
}

impl IndexMut<usize> for Requests {
    #[inline]
    fn index_mut(&mut self, index: usize) -> &mut Request {
        let request = &mut self.places[index];
        debug_assert!(
            !matches!(request.stage, Stage::Direct(_)),
            "make it ordinary first"
        );
        request
    }
}

#[cfg(test)]
mod tests {
    use nacre_bdev::Op;

    use super::*;

    fn io(token: u64) -> Io {
        Io::new(token, Op::Read, 3, 4)
    }

    fn end(requests: &mut Requests, index: usize) {
        let pending = requests[index].pending.take();
        pending.expect("not answered").abandon();
        requests.remove(index);
    }

    #[test]
    fn a_reused_slot_is_empty() {
        let mut requests = Requests::with_capacity(2);
        let (a, b) = (
            requests.insert(io(1), 7, Nanos(1)),
            requests.insert(io(2), 8, Nanos(2)),
        );
        assert_eq!((requests.len(), requests.end()), (2, 2));
        let first = &mut requests[a];
        (first.children.tried, first.aborted, first.held) = (1, true, true);
        first.children.ages = [9; 5];
        end(&mut requests, a);
        assert!(!requests.contains(a) && requests.get_mut(a).is_none());
        assert_eq!(
            requests.iter().map(|(index, _)| index).collect::<Vec<_>>(),
            [b]
        );
        let again = requests.insert(io(3), 9, Nanos(3));
        assert_eq!((again, requests.end()), (a, 2));
        let second = &requests[again];
        assert_eq!((second.children.tried, second.generation), (0, 9));
        assert!(!second.aborted && !second.held && second.children.ages == [0; 5]);
        assert_eq!(requests.iter_mut().count(), 2);
        end(&mut requests, a);
        end(&mut requests, b);
        assert!(requests.is_empty());
    }

    /// Every request must be completed.
    #[test]
    #[cfg_attr(debug_assertions, should_panic(expected = "without an answer"))]
    fn removing_an_uncompleted_request_panics() {
        let mut requests = Requests::default();
        let index = requests.insert(io(1), 1, Nanos::ZERO);
        requests.remove(index);
    }
}
