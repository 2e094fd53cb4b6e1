//! The requests of a lane, each in one place from start to end. Places are reused in place, so that
//! no request moves.

use std::ops::{Index, IndexMut};

use nacre_bdev::{Io, Pending};
use nacre_reactor::Nanos;

use super::request::{Request, Stage};

#[derive(Default)]
pub(super) struct Requests {
    places: Vec<Request>,
    free: Vec<u32>,
    /// Number of [`Stage::Swift`] requests.
    swift: usize,
}

impl Requests {
    pub fn with_capacity(capacity: usize) -> Requests {
        Requests {
            places: Vec::with_capacity(capacity),
            free: Vec::with_capacity(capacity),
            swift: 0,
        }
    }

    /// Number of requests.
    #[inline]
    pub fn len(&self) -> usize {
        self.places.len() - self.free.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Every index is below this.
    pub fn end(&self) -> usize {
        self.places.len()
    }

    /// Puts an I/O into a free place.
    #[inline]
    pub fn insert(&mut self, io: Io, generation: u32, start: Nanos) -> usize {
        let index = self.place();
        self.places[index].begin(io, generation, start);
        index
    }

    /// Puts a read that the replica in `slot` gets directly into a free place, with its data.
    #[inline]
    pub fn insert_swift(&mut self, io: &Io, slot: usize, generation: u32, start: Nanos) -> usize {
        let index = self.place();
        self.places[index].begin_swift(io, slot, generation, start);
        self.swift += 1;
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
    pub fn is_swift(&self, index: usize, generation: u32) -> bool {
        let place = self.places.get(index);
        place.is_some_and(|r| r.generation == generation && matches!(r.stage, Stage::Swift(_)))
    }

    /// Ends a swift request, for the caller to complete it: returns its arrival time and length.
    ///
    /// # Panics
    /// When it is not swift.
    #[inline]
    pub fn remove_swift(&mut self, index: usize) -> (Pending, Nanos, u32) {
        let request = &mut self.places[index];
        let pending = request.pending.take().expect("a swift one is open");
        request.stage = Stage::Free;
        self.swift -= 1;
        self.free.push(index as u32);
        (pending, request.start, request.blocks)
    }

    /// Makes swift requests ordinary ones: they are about to be checked.
    #[inline]
    pub fn settle(&mut self) {
        if self.swift > 0 {
            self.settle_all();
        }
    }

    #[cold]
    fn settle_all(&mut self) {
        self.places.iter_mut().for_each(Request::settle);
        self.swift = 0;
    }

    #[cold]
    fn grow(&mut self) -> usize {
        self.places.push(Request::free());
        self.places.len() - 1
    }

    /// Ends a request: its place is free.
    #[inline]
    pub fn remove(&mut self, index: usize) {
        let request = &mut self.places[index];
        debug_assert!(request.stage != Stage::Free, "ended twice");
        request.stage = Stage::Free;
        request.data.clear();
        // Panics, if it was not completed.
        request.pending = None;
        self.free.push(index as u32);
    }

    #[inline]
    pub fn get_mut(&mut self, index: usize) -> Option<&mut Request> {
        let request = self.places.get_mut(index)?;
        (request.stage != Stage::Free).then_some(request)
    }

    pub fn contains(&self, index: usize) -> bool {
        debug_assert_eq!(self.swift, 0, "settle the swift requests first");
        let place = self.places.get(index);
        place.is_some_and(|request| request.stage != Stage::Free)
    }

    pub fn iter(&self) -> impl Iterator<Item = (usize, &Request)> {
        debug_assert_eq!(self.swift, 0, "they are to be settled first");
        let places = self.places.iter().enumerate();
        places.filter(|(_, request)| request.stage != Stage::Free)
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = (usize, &mut Request)> {
        debug_assert_eq!(self.swift, 0, "they are to be settled first");
        let places = self.places.iter_mut().enumerate();
        places.filter(|(_, request)| request.stage != Stage::Free)
    }
}

impl Index<usize> for Requests {
    type Output = Request;

    #[inline]
    fn index(&self, index: usize) -> &Request {
        let request = &self.places[index];
        debug_assert!(!matches!(request.stage, Stage::Swift(_)), "settle it first");
        request
    }
}

impl IndexMut<usize> for Requests {
    #[inline]
    fn index_mut(&mut self, index: usize) -> &mut Request {
        let request = &mut self.places[index];
        debug_assert!(!matches!(request.stage, Stage::Swift(_)), "settle it first");
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
    fn a_place_is_used_again_with_nothing_left_in_it() {
        let mut requests = Requests::with_capacity(2);
        let (a, b) = (
            requests.insert(io(1), 7, Nanos(1)),
            requests.insert(io(2), 8, Nanos(2)),
        );
        assert_eq!((requests.len(), requests.end()), (2, 2));
        let first = &mut requests[a];
        (first.tried, first.aborted, first.held) = (1, true, true);
        first.ages = [9; 5];
        end(&mut requests, a);
        assert!(!requests.contains(a) && requests.get_mut(a).is_none());
        assert_eq!(
            requests.iter().map(|(index, _)| index).collect::<Vec<_>>(),
            [b]
        );
        let again = requests.insert(io(3), 9, Nanos(3));
        assert_eq!((again, requests.end()), (a, 2));
        let second = &requests[again];
        assert_eq!((second.tried, second.generation), (0, 9));
        assert!(!second.aborted && !second.held && second.ages == [0; 5]);
        assert_eq!(requests.iter_mut().count(), 2);
        end(&mut requests, a);
        end(&mut requests, b);
        assert!(requests.is_empty());
    }

    /// Every request must be completed.
    #[test]
    #[cfg_attr(debug_assertions, should_panic(expected = "without an answer"))]
    fn ending_what_was_not_answered_is_loud() {
        let mut requests = Requests::default();
        let index = requests.insert(io(1), 1, Nanos::ZERO);
        requests.remove(index);
    }
}
