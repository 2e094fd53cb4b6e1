//! Tracks each unit ([`Job::unit_blocks`](crate::Job::unit_blocks)) for the verification: the
//! generation of its last write, and whether an I/O uses it.
//!
//! A unit is in use while an I/O on it is in flight. I/Os of a lane never overlap, so the contents
//! that a read must return are known exactly, except of units that no write reached or whose last
//! write failed.

use super::access::Place;

/// The state of each unit of one lane, in 32 bits.
pub(crate) struct Ledger {
    places: Box<[u32]>,
}

/// An I/O on this unit is in flight.
const IN_USE: u32 = 1 << 31;
/// A write failed: the unit may have the old contents, the new ones, or parts of both.
const UNKNOWN: u32 = 1 << 30;
const GENERATION: u32 = UNKNOWN - 1;

impl Ledger {
    pub(crate) fn new(places: u64) -> Self {
        Self {
            places: vec![0; places as usize].into_boxed_slice(),
        }
    }

    /// Marks the units of an I/O as in use. Returns false if any of them is in use already.
    #[inline]
    pub(crate) fn take(&mut self, place: Place) -> bool {
        let places = self.slice(place);
        if places.iter().any(|p| p & IN_USE != 0) {
            return false;
        }
        places.iter_mut().for_each(|p| *p |= IN_USE);
        true
    }

    #[inline]
    /// Marks the units of an I/O as free again.
    pub(crate) fn release(&mut self, place: Place) {
        self.slice(place).iter_mut().for_each(|p| *p &= !IN_USE);
    }

    /// The generation of the next write of `unit`.
    #[inline]
    pub(crate) fn next_generation(&self, unit: u64) -> u32 {
        // The generation restarts at 1 after a billion writes of one unit.
        (self.places[unit as usize] & GENERATION) % GENERATION + 1
    }

    /// The generation of the last write of `unit`. `None`: no write, or the last write failed.
    #[inline]
    pub(crate) fn generation(&self, unit: u64) -> Option<u32> {
        let place = self.places[unit as usize];
        (place & UNKNOWN == 0 && place & GENERATION > 0).then_some(place & GENERATION)
    }

    /// Records the end of a write: each unit has its next generation, or is unknown after a
    /// failure.
    #[inline]
    pub(crate) fn wrote(&mut self, place: Place, ok: bool) {
        for unit in place.unit..place.unit + u64::from(place.units) {
            let next = self.next_generation(unit) | IN_USE;
            self.places[unit as usize] = if ok { next } else { next | UNKNOWN };
        }
    }

    /// The next range at or after `unit`, of at most `most` units with known contents.
    pub(crate) fn next_known(&self, unit: u64, most: u32) -> Option<Place> {
        let known = |unit: &u64| self.generation(*unit).is_some();
        let first = (unit..self.places.len() as u64).find(known)?;
        let units = (first..self.places.len() as u64)
            .take(most as usize)
            .take_while(known)
            .count();
        Some(Place {
            unit: first,
            units: units as u32,
        })
    }

    fn slice(&mut self, place: Place) -> &mut [u32] {
        let unit = place.unit as usize;
        &mut self.places[unit..unit + place.units as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_taken_and_counted() {
        let mut ledger = Ledger::new(8);
        let (low, high) = (Place { unit: 0, units: 3 }, Place { unit: 2, units: 3 });
        assert!(ledger.take(low));
        assert!(!ledger.take(high), "one unit is shared");
        assert_eq!(ledger.next_generation(0), 1);
        ledger.wrote(low, true);
        ledger.release(low);
        assert!(ledger.take(high));
        ledger.wrote(high, true);
        ledger.release(high);
        let generations =
            |ledger: &Ledger| (0..6).map(|u| ledger.generation(u)).collect::<Vec<_>>();
        assert_eq!(
            generations(&ledger),
            [Some(1), Some(1), Some(2), Some(1), Some(1), None]
        );
        assert_eq!(ledger.next_known(0, 4), Some(Place { unit: 0, units: 4 }));
        assert_eq!(ledger.next_known(4, 4), Some(Place { unit: 4, units: 1 }));
        assert_eq!(ledger.next_known(5, 4), None);

        // After a failed write the contents are unknown until the next one; its generation is used
        // up.
        assert!(ledger.take(low));
        ledger.wrote(low, false);
        ledger.release(low);
        assert_eq!(
            generations(&ledger),
            [None, None, None, Some(1), Some(1), None]
        );
        assert!(ledger.take(low));
        assert_eq!(ledger.next_generation(0), 3);
        ledger.wrote(low, true);
        ledger.release(low);
        assert_eq!(ledger.generation(0), Some(3));
    }

    #[test]
    fn generations_wrap_around() {
        let mut ledger = Ledger::new(1);
        ledger.places[0] = GENERATION;
        assert_eq!(ledger.generation(0), Some(GENERATION));
        assert_eq!(ledger.next_generation(0), 1);
    }
}
