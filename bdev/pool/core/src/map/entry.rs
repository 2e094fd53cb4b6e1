//! One place of a volume: the unit that new data goes to, and the older unit below it.
//!
//! ```text
//!   granule    0 1 2 3 4 5 6 7
//!   own        ■ ■ · · · · · ·     written since the last snapshot
//!   second     · · ■ ■ ■ · · ·     older data, where `own` has none
//!   reads      o o s s s 0 0 0     in neither: zeroes
//! ```
//!
//! Invariants: the two sets are disjoint, a part without granules has no unit, and `second` is
//! absent when `own` is. A part is *exclusive* to a version when its generation is above the
//! version's floor: no other version can refer to its unit.
//!
//! An *external* part has no unit of the pool: its granules are at the same place of the external
//! device below the version's oldest ancestor. It is never exclusive, so nothing writes to it.

use crate::geometry::MAX_UNITS;
use crate::ids::Generation;

/// The unit of external parts: beyond every unit of a pool.
pub const EXTERNAL_UNIT: u64 = MAX_UNITS;

/// A unit, and the granules of it that are valid here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Part {
    pub unit: u64,
    pub generation: Generation,
    /// Valid granules. 0: there is no part.
    pub granules: u16,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Entry {
    pub own: Part,
    pub second: Part,
}

/// The reason why a record cannot be applied to an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MapError {
    /// The granules of the second unit would need a third one.
    ThirdUnit,
}

impl Part {
    pub const NONE: Self = Self {
        unit: 0,
        generation: 0,
        granules: 0,
    };

    /// Granules of an external device.
    pub fn external(generation: Generation, granules: u16) -> Self {
        Self {
            unit: EXTERNAL_UNIT,
            generation,
            granules,
        }
    }

    pub fn is_none(self) -> bool {
        self.granules == 0
    }

    pub fn is_external(self) -> bool {
        self.unit == EXTERNAL_UNIT
    }

    /// True when only this version can refer to the unit.
    pub fn is_exclusive(self, floor: Generation) -> bool {
        !self.is_none() && !self.is_external() && self.generation > floor
    }

    fn without(self, granules: u16) -> Self {
        match self.granules & !granules {
            0 => Self::NONE,
            rest => Self {
                granules: rest,
                ..self
            },
        }
    }
}

impl Entry {
    pub fn is_empty(&self) -> bool {
        self.own.is_none()
    }

    pub fn parts(&self) -> impl Iterator<Item = Part> {
        [self.own, self.second]
            .into_iter()
            .filter(|part| !part.is_none())
    }

    /// The parts that have units of the pool.
    pub fn units(&self) -> impl Iterator<Item = Part> {
        self.parts().filter(|part| !part.is_external())
    }

    pub fn uses(&self, unit: u64) -> bool {
        self.parts().any(|part| part.unit == unit)
    }

    /// The unit after the own one: the best unit for new data of the next place.
    pub fn next_unit(&self) -> Option<u64> {
        let has_unit = !self.own.is_none() && !self.own.is_external();
        has_unit.then_some(self.own.unit + 1)
    }

    /// Granules with data.
    pub fn valid(&self) -> u16 {
        self.own.granules | self.second.granules
    }

    /// Granules that a write of `granules` to a new unit must copy there, so that the entry refers
    /// to at most two units.
    pub fn to_copy(&self, granules: u16) -> u16 {
        self.second.granules & !granules
    }

    /// Maps `granules` to `unit`. Exclusive units that lose their last granule go to `released`.
    pub fn map(
        &mut self,
        new: Part,
        floor: Generation,
        released: &mut Vec<u64>,
    ) -> Result<(), MapError> {
        if !self.own.is_none() && self.own.unit == new.unit {
            self.own.granules |= new.granules;
            let second = self.second.without(new.granules);
            self.replace_second(second, floor, released);
            return Ok(());
        }
        if !self.second.without(new.granules).is_none() {
            return Err(MapError::ThirdUnit);
        }
        self.replace_second(Part::NONE, floor, released);
        let older = self.own.without(new.granules);
        if older.is_none() {
            release(self.own, floor, released);
        }
        *self = Self {
            own: new,
            second: older,
        };
        Ok(())
    }

    /// Makes `granules` read as zeroes. Never needs a unit.
    pub fn unmap(&mut self, granules: u16, floor: Generation, released: &mut Vec<u64>) {
        let second = self.second.without(granules);
        self.replace_second(second, floor, released);
        let own = self.own.without(granules);
        if own.is_none() {
            release(self.own, floor, released);
            self.own = std::mem::take(&mut self.second);
        } else {
            self.own = own;
        }
    }

    /// Removes the parts that `keeps` refuses, without releasing their units.
    pub fn retain(&mut self, keeps: impl Fn(Part) -> bool) {
        for part in [&mut self.own, &mut self.second] {
            if !part.is_none() && !keeps(*part) {
                *part = Part::NONE;
            }
        }
        if self.own.is_none() {
            self.own = std::mem::take(&mut self.second);
        }
    }

    /// Replaces the unit `from` by `to`.
    pub fn relocate(&mut self, from: u64, to: u64) {
        for part in [&mut self.own, &mut self.second] {
            if !part.is_none() && part.unit == from {
                part.unit = to;
            }
        }
    }

    fn replace_second(&mut self, second: Part, floor: Generation, released: &mut Vec<u64>) {
        if second.is_none() {
            release(self.second, floor, released);
        }
        self.second = second;
    }
}

/// Places with data.
pub fn count_mapped(entries: &[Entry]) -> u64 {
    entries.iter().filter(|entry| !entry.is_empty()).count() as u64
}

fn release(part: Part, floor: Generation, released: &mut Vec<u64>) {
    if part.is_exclusive(floor) {
        released.push(part.unit);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(unit: u64, generation: Generation, granules: u16) -> Part {
        Part {
            unit,
            generation,
            granules,
        }
    }

    fn mapped(entry: &mut Entry, new: Part, floor: Generation) -> Vec<u64> {
        let mut released = Vec::new();
        entry.map(new, floor, &mut released).unwrap();
        released
    }

    /// A place from its first write over a snapshot to its last trim.
    #[test]
    fn the_life_of_a_place() {
        let mut entry = Entry::default();
        assert_eq!(mapped(&mut entry, part(7, 1, 0b0011), 0), []);
        assert_eq!(mapped(&mut entry, part(7, 1, 0b0100), 0), []);
        assert_eq!(entry.own, part(7, 1, 0b0111));
        // After a snapshot the floor is 1: unit 7 is shared.
        assert_eq!(mapped(&mut entry, part(9, 2, 0b0001), 1), []);
        assert_eq!(entry.own, part(9, 2, 0b0001));
        assert_eq!(entry.second, part(7, 1, 0b0110));
        // A second snapshot: a third unit would be needed for granules 1 and 2.
        assert_eq!(entry.to_copy(0b0010), 0b0100);
        let third = entry.map(part(11, 3, 0b0010), 2, &mut Vec::new());
        assert_eq!(third, Err(MapError::ThirdUnit));
        assert_eq!(mapped(&mut entry, part(11, 3, 0b0110), 2), []);
        assert_eq!(entry.second, part(9, 2, 0b0001));
        // The trims release the exclusive unit only.
        let mut released = Vec::new();
        entry.unmap(0b0110, 2, &mut released);
        assert_eq!((entry.own, entry.second), (part(9, 2, 0b0001), Part::NONE));
        entry.unmap(0b1111, 2, &mut released);
        assert!(entry.is_empty());
        assert_eq!(released, [11]);
    }

    #[test]
    fn an_exclusive_second_unit_is_released_with_its_last_granule() {
        let mut entry = Entry {
            own: part(2, 5, 0b01),
            second: part(1, 4, 0b10),
        };
        assert_eq!(mapped(&mut entry, part(2, 5, 0b10), 3), [1]);
        assert_eq!(entry.own.granules, 0b11);
    }
}
