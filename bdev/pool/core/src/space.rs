//! Which units are free, and which will be.
//!
//! A unit that becomes unused goes to *limbo*: it is free when the record that freed it is settled,
//! and when every I/O that was in flight on any core then has ended (a grace period).
//!
//! For discards, free units are counted in aligned blocks: a block is worth a discard when one of
//! its units was freed since the last one, and all of them are free.

use std::collections::VecDeque;
use std::ops::Range;

use crate::bits::Bits;
use crate::ids::Lsn;
use crate::mutation::Mutation;

/// Which free unit comes next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Allocation {
    /// The next one in the order of the disk.
    #[default]
    Next,
    /// The one that was freed last: reuses too early what may be reused at all. For tests.
    LastFreed,
}

#[derive(Debug)]
pub struct Space {
    /// One bit per unit: in use, or in limbo.
    used: Bits,
    units: u64,
    free: u64,
    /// Where the search for a free unit begins.
    next: u64,
    limbo: VecDeque<Limbo>,
    allocation: Allocation,
    freed: Vec<u64>,
    /// Units of a discard block. 0: the disk takes no discards.
    block: u64,
    /// One bit per block: a unit was freed since the block was last discarded.
    freed_blocks: Box<[u64]>,
}

#[derive(Debug)]
struct Limbo {
    unit: u64,
    lsn: Lsn,
    epoch: u64,
}

impl Space {
    pub fn new(units: u64, allocation: Allocation) -> Self {
        Self {
            used: Bits::new(units),
            units,
            free: units,
            next: 0,
            limbo: VecDeque::new(),
            allocation,
            freed: Vec::new(),
            block: 0,
            freed_blocks: Box::default(),
        }
    }

    /// From now on notes freed units, in aligned blocks of this many. 0: notes nothing.
    pub fn note_frees(&mut self, block: u64) {
        self.block = block;
        let blocks = self.units.checked_div(block).unwrap_or(0);
        self.freed_blocks = vec![0; blocks.div_ceil(64) as usize].into_boxed_slice();
    }

    /// Adds free units, so that there are `units`.
    pub fn grow(&mut self, units: u64) {
        self.used.grow(units);
        self.free += units - self.units;
        self.units = units;
        let mut freed = std::mem::take(&mut self.freed_blocks).into_vec();
        let blocks = units.checked_div(self.block).unwrap_or(0);
        freed.resize(blocks.div_ceil(64) as usize, 0);
        self.freed_blocks = freed.into_boxed_slice();
    }

    pub fn free(&self) -> u64 {
        self.free
    }

    pub fn units(&self) -> u64 {
        self.units
    }

    pub fn in_limbo(&self) -> u64 {
        self.limbo.len() as u64
    }

    /// One bit per unit: in use, or in limbo.
    pub(crate) fn used(&self) -> &Bits {
        &self.used
    }

    pub fn is_used(&self, unit: u64) -> bool {
        self.used.has(unit)
    }

    /// Marks a unit as used. Returns false if it is already.
    pub fn take(&mut self, unit: u64) -> bool {
        if self.is_used(unit) {
            return false;
        }
        self.used.add(unit);
        self.free -= 1;
        true
    }

    /// A free unit; `goal`, if that is free.
    pub fn allocate(&mut self, goal: Option<u64>) -> Option<u64> {
        if self.free == 0 {
            return None;
        }
        if self.allocation == Allocation::LastFreed {
            while let Some(unit) = self.freed.pop() {
                if self.take(unit) {
                    return Some(unit);
                }
            }
        }
        if let Some(goal) = goal.filter(|goal| *goal < self.units)
            && self.take(goal)
        {
            return Some(goal);
        }
        let unit = self.search()?;
        self.next = unit + 1;
        self.take(unit);
        Some(unit)
    }

    /// The first free unit from `next` on, around the end.
    fn search(&self) -> Option<u64> {
        let words = self.used.words() as u64;
        let start = self.next % self.units;
        (0..=words).find_map(|step| {
            let word = (start / 64 + step) % words;
            let mut free = !self.used.word(word as usize);
            if step == 0 {
                free &= u64::MAX << (start % 64);
            }
            let unit = word * 64 + u64::from(free.trailing_zeros());
            (free != 0 && unit < self.units).then_some(unit)
        })
    }

    /// A unit without content: free at once.
    pub fn give_back(&mut self, unit: u64) {
        self.give_back_quietly(unit);
        self.note_freed(&(unit..unit + 1));
    }

    fn give_back_quietly(&mut self, unit: u64) {
        debug_assert!(self.is_used(unit), "unit {unit} is free already");
        self.used.remove(unit);
        self.free += 1;
        if self.allocation == Allocation::LastFreed {
            self.freed.push(unit);
        }
    }

    /// A unit that the record `lsn` freed. `epoch`: the grace period that must end first.
    pub fn release(&mut self, unit: u64, lsn: Lsn, epoch: u64) {
        self.limbo.push_back(Limbo { unit, lsn, epoch });
    }

    /// Frees the units whose records are settled and whose grace periods have ended. Returns
    /// whether there were any.
    pub fn reap(&mut self, settled: Lsn, ended_epoch: u64) -> bool {
        let before = self.free;
        let unsettled = Mutation::ReuseUnsettled.is_active();
        let graceless = Mutation::ReuseWithoutGrace.is_active();
        while let Some(first) = self.limbo.front() {
            let is_settled = first.lsn <= settled || unsettled;
            if !is_settled || (first.epoch > ended_epoch && !graceless) {
                break;
            }
            let unit = first.unit;
            self.limbo.pop_front();
            self.give_back(unit);
        }
        self.free > before
    }

    /// True when freed units are noted.
    pub fn notes_frees(&self) -> bool {
        self.block > 0
    }

    /// Notes the blocks of these units as freed.
    pub fn note_freed(&mut self, units: &Range<u64>) {
        if self.block == 0 {
            return;
        }
        for block in units.start / self.block..units.end.div_ceil(self.block) {
            // The last units of the disk may be less than a block.
            if let Some(word) = self.freed_blocks.get_mut((block / 64) as usize) {
                *word |= 1 << (block % 64);
            }
        }
    }

    pub fn note_all_freed(&mut self) {
        self.note_freed(&(0..self.units));
    }

    /// Runs of whole blocks that are free and noted as freed: at most `runs`, each of at most
    /// `units` or of one block. They are no longer noted.
    pub fn take_freed(&mut self, units: u64, runs: usize) -> Vec<Range<u64>> {
        let mut found: Vec<Range<u64>> = Vec::new();
        if self.block == 0 {
            return found;
        }
        for word in 0..self.freed_blocks.len() {
            let mut bits = self.freed_blocks[word];
            while bits != 0 {
                let bit = bits.trailing_zeros();
                bits &= bits - 1;
                let first = (word as u64 * 64 + u64::from(bit)) * self.block;
                let run = first..first + self.block;
                if run.end > self.units || run.clone().any(|unit| self.is_used(unit)) {
                    continue;
                }
                if let Some(last) = found.last_mut()
                    && last.end == first
                    && run.end - last.start <= units
                {
                    last.end = run.end;
                } else if found.len() < runs {
                    found.push(run);
                } else {
                    return found;
                }
                self.freed_blocks[word] &= !(1 << bit);
            }
        }
        found
    }

    /// Marks free units as used. Returns false, and changes nothing, if one is used already.
    pub fn take_run(&mut self, run: &Range<u64>) -> bool {
        if run.clone().any(|unit| self.is_used(unit)) {
            return false;
        }
        run.clone().all(|unit| self.take(unit))
    }

    /// Frees units that were discarded.
    pub fn give_back_discarded(&mut self, run: &Range<u64>) {
        run.clone().for_each(|unit| self.give_back_quietly(unit));
    }

    /// Units in limbo.
    pub fn limbo(&self) -> impl Iterator<Item = u64> {
        self.limbo.iter().map(|limbo| limbo.unit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_unit_is_found_once() {
        let mut space = Space::new(70, Allocation::Next);
        assert_eq!(space.allocate(Some(69)), Some(69));
        assert_eq!(space.allocate(Some(69)), Some(0));
        let rest: Vec<u64> = std::iter::from_fn(|| space.allocate(None)).collect();
        assert_eq!(rest, (1..69).collect::<Vec<u64>>());
        space.give_back(3);
        assert_eq!((space.free(), space.allocate(Some(100))), (1, Some(3)));
    }

    /// Only whole free blocks are discarded, each once. Blocks that were never freed are not.
    #[test]
    fn freed_blocks_are_found_once() {
        let mut space = Space::new(70, Allocation::Next);
        space.note_frees(4);
        assert_eq!(space.take_freed(100, 9), []);
        while space.allocate(None).is_some() {}
        (4..20).for_each(|unit| space.give_back(unit));
        space.give_back(30);
        space.give_back(69);
        assert_eq!(space.take_freed(8, 1), vec![4..12; 1]);
        assert_eq!(space.take_freed(8, 9), vec![12..20; 1]);
        assert_eq!(space.take_freed(8, 9), []);
        assert!(space.take_run(&(4..8)) && !space.take_run(&(4..8)));
        space.give_back_discarded(&(4..8));
        assert_eq!(space.take_freed(8, 9), []);
        for unit in [28, 29, 31] {
            space.give_back(unit);
        }
        assert_eq!(space.take_freed(8, 9), vec![28..32; 1]);
    }

    #[test]
    fn a_unit_in_limbo_waits_for_its_record_and_its_readers() {
        let mut space = Space::new(4, Allocation::Next);
        while space.allocate(None).is_some() {}
        space.release(2, 10, 1);
        space.reap(9, 1);
        space.reap(10, 0);
        assert_eq!(space.free(), 0);
        space.reap(10, 1);
        assert_eq!(space.allocate(None), Some(2));
    }
}
