//! The free units of a pool, and those that become free soon.
//!
//! A unit that becomes unused goes to *limbo*: it is free when the record that freed it is settled,
//! and when every I/O that was in flight on any core then has ended (a grace period).
//!
//! For discards, free units are counted in aligned blocks: a block is worth a discard when one of
//! its units was freed since the last one, and all of them are free.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;

use crate::bits::Bits;
use crate::disks::{DiskTable, HOLE};
use crate::ids::{Lsn, VersionId};
use crate::mutation::Mutation;

/// The order in which free units are allocated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Allocation {
    /// Ascending from the last allocation, around the end of the disk.
    #[default]
    Next,
    /// The unit that was freed last, of the disks in turn. For tests: it reuses
    /// units as early as possible.
    LastFreed,
}

#[derive(Debug)]
pub struct Space {
    /// One bit per unit: in use, or in limbo.
    used: Bits,
    units: u64,
    /// Free units of the disks that units are allocated on.
    free: u64,
    /// The units of each disk, in order. A disk that grew late has several.
    regions: Vec<Region>,
    /// The disk that each volume's units come from, as far as it is known.
    homes: HashMap<VersionId, usize>,
    limbo: VecDeque<Limbo>,
    allocation: Allocation,
    freed: Vec<u64>,
    /// The disk that was last in turn.
    turn: usize,
    /// Units of a discard block. 0: the disk takes no discards.
    block: u64,
    /// One bit per block: a unit was freed since the block was last discarded.
    freed_blocks: Box<[u64]>,
}

/// A range of units of one disk.
#[derive(Debug)]
struct Region {
    disk: usize,
    end: u64,
    free: u64,
    /// Where the search for a free unit begins.
    next: u64,
    /// The disk leaves the pool, or has left: none of its units is allocated.
    is_barred: bool,
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
            regions: vec![Region {
                disk: 0,
                end: units,
                free: units,
                next: 0,
                is_barred: false,
            }],
            homes: HashMap::new(),
            limbo: VecDeque::new(),
            allocation,
            freed: Vec::new(),
            turn: 0,
            block: 0,
            freed_blocks: Box::default(),
        }
    }

    /// The space of these disks, all of it free.
    pub fn of(disks: &DiskTable, allocation: Allocation) -> Self {
        let mut space = Self::new(0, allocation);
        space.regions.clear();
        space.grow(disks);
        space
    }

    /// Records freed units from now on, in aligned blocks of this many units. 0: records none.
    pub fn note_frees(&mut self, block: u64) {
        self.block = block;
        let blocks = self.units.checked_div(block).unwrap_or(0);
        self.freed_blocks = vec![0; blocks.div_ceil(64) as usize].into_boxed_slice();
    }

    /// Ends the allocation of units of a disk, or begins it again.
    pub fn bar(&mut self, disk: usize, is_barred: bool) {
        for region in self.regions.iter_mut().filter(|region| region.disk == disk) {
            match (region.is_barred, is_barred) {
                (false, true) => self.free -= region.free,
                (true, false) => self.free += region.free,
                _ => continue,
            }
            region.is_barred = is_barred;
        }
    }

    pub fn is_barred(&self, unit: u64) -> bool {
        let mut regions = self.regions.iter();
        let region = regions.find(|region| unit < region.end);
        region.is_none_or(|region| region.is_barred)
    }

    /// True for units of one disk that leaves, or has left.
    fn is_all_barred(&self, units: &Range<u64>) -> bool {
        let mut regions = self.regions.iter();
        let region = regions.find(|region| units.start < region.end);
        region.is_none_or(|region| region.is_barred && units.end <= region.end)
    }

    /// Units of a disk that are not free.
    pub fn used_of(&self, disk: usize) -> u64 {
        let (mut used, mut first) = (0, 0);
        for region in &self.regions {
            if region.disk == disk {
                used += region.end - first - region.free;
            }
            first = region.end;
        }
        used
    }

    /// Adds the units of new disks, and of disks that grew, as free ones.
    pub fn grow(&mut self, disks: &DiskTable) {
        let units = disks.units();
        for (at, range) in disks.ranges().iter().enumerate() {
            match self.regions.get_mut(at) {
                Some(region) => {
                    let more = range.end() - region.end;
                    region.free += more;
                    region.end = range.end();
                    self.free += more;
                }
                None => {
                    let is_hole = range.disk == HOLE;
                    let free = if is_hole { 0 } else { range.units };
                    self.free += free;
                    self.regions.push(Region {
                        disk: range.disk,
                        end: range.end(),
                        free,
                        next: range.first,
                        is_barred: is_hole,
                    });
                }
            }
        }
        self.used.grow(units);
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

    /// Marks a unit as used. Returns false if it is used already, or if no disk has it.
    pub fn take(&mut self, unit: u64) -> bool {
        if self.is_used(unit) || self.disk_of(unit) == Some(HOLE) {
            return false;
        }
        self.used.add(unit);
        let region = self.region_of(unit);
        region.free -= 1;
        if !region.is_barred {
            self.free -= 1;
        }
        true
    }

    fn region_of(&mut self, unit: u64) -> &mut Region {
        let last = self.regions.len() - 1;
        let at = self.regions.iter().position(|region| unit < region.end);
        &mut self.regions[at.unwrap_or(last)]
    }

    fn disk_of(&self, unit: u64) -> Option<usize> {
        let mut regions = self.regions.iter();
        Some(regions.find(|region| unit < region.end)?.disk)
    }

    /// Free units of a disk.
    pub fn free_of(&self, disk: usize) -> u64 {
        let regions = self.regions.iter().filter(|region| region.disk == disk);
        regions.map(|region| region.free).sum()
    }

    /// A free unit for metadata: of the first disk, if that has one.
    pub fn allocate(&mut self) -> Option<u64> {
        if let Some(unit) = self.freed_last() {
            return Some(unit);
        }
        let regions = self.regions.iter();
        let disks = regions.filter(|region| region.free > 0 && !region.is_barred);
        let disk = disks.map(|region| region.disk).min()?;
        self.allocate_on(disk)
    }

    /// A free unit for data of a volume, which stays on one disk while that has room; `goal`, if
    /// that is free there. The first disk keeps `reserve` units for metadata.
    pub fn allocate_for(
        &mut self,
        version: VersionId,
        goal: Option<u64>,
        reserve: u64,
        known_home: impl FnOnce() -> Option<u64>,
    ) -> Option<u64> {
        if let Some(unit) = self.freed_last() {
            return Some(unit);
        }
        let goal = goal.filter(|goal| *goal < self.units);
        if self.regions.len() == 1 {
            return match goal {
                Some(goal) if self.take(goal) => Some(goal),
                _ => self.allocate_on(0),
            };
        }
        let disk = self.home(version, reserve, known_home)?;
        if let Some(goal) = goal
            && self.disk_of(goal) == Some(disk)
            && self.take(goal)
        {
            return Some(goal);
        }
        self.allocate_on(disk)
    }

    /// The disk of a volume's next unit. It changes when the disk has no room.
    fn home(
        &mut self,
        version: VersionId,
        reserve: u64,
        known_home: impl FnOnce() -> Option<u64>,
    ) -> Option<usize> {
        let room = |disk| {
            if self.is_disk_barred(disk) {
                return 0;
            }
            let kept = if disk == 0 { reserve } else { 0 };
            self.free_of(disk).saturating_sub(kept)
        };
        let known = self.homes.get(&version).copied();
        let known = known.or_else(|| known_home().and_then(|unit| self.disk_of(unit)));
        let home = match known {
            Some(disk) if room(disk) > 0 => disk,
            _ => {
                let disks = self.regions.iter().map(|region| region.disk);
                // Of equal disks, the one that came last.
                disks
                    .filter(|disk| room(*disk) > 0)
                    .max_by_key(|disk| (room(*disk), *disk))?
            }
        };
        self.homes.insert(version, home);
        Some(home)
    }

    fn is_disk_barred(&self, disk: usize) -> bool {
        let mut regions = self.regions.iter();
        let allocates = Mutation::AllocateLeaving.is_active();
        regions.any(|region| region.disk == disk && region.is_barred) && !allocates
    }

    /// Forgets the disk of a version, whose units may come from any disk from now on.
    pub fn forget_home(&mut self, version: VersionId) {
        self.homes.remove(&version);
    }

    /// The unit that was freed last, if the allocation prefers it; of several disks in turn.
    fn freed_last(&mut self) -> Option<u64> {
        if self.allocation != Allocation::LastFreed {
            return None;
        }
        let disks = self.regions.iter().map(|region| region.disk);
        let disks = disks.filter(|disk| *disk != HOLE).max()? + 1;
        self.turn += 1;
        (0..disks).find_map(|step| {
            let disk = (self.turn + step) % disks;
            if self.is_disk_barred(disk) {
                return None;
            }
            while let Some(at) = self
                .freed
                .iter()
                .rposition(|unit| self.disk_of(*unit) == Some(disk))
            {
                let unit = self.freed.remove(at);
                if self.take(unit) {
                    return Some(unit);
                }
            }
            if disks > 1 {
                self.allocate_on(disk)
            } else {
                None
            }
        })
    }

    fn allocate_on(&mut self, disk: usize) -> Option<u64> {
        let mut first = 0;
        for at in 0..self.regions.len() {
            let region = &self.regions[at];
            let range = first..region.end;
            first = region.end;
            if region.disk != disk || region.free == 0 {
                continue;
            }
            let unit = self.search(&range, region.next)?;
            self.regions[at].next = unit + 1;
            self.take(unit);
            return Some(unit);
        }
        None
    }

    /// The first free unit of a range from `next` on, around its end.
    fn search(&self, range: &Range<u64>, next: u64) -> Option<u64> {
        let start = if range.contains(&next) {
            next
        } else {
            range.start
        };
        let find = |from: u64, until: u64| {
            let words = from / 64..until.div_ceil(64);
            words.into_iter().find_map(|word| {
                let mut free = !self.used.word(word as usize);
                if word == from / 64 {
                    free &= u64::MAX << (from % 64);
                }
                let unit = word * 64 + u64::from(free.trailing_zeros());
                (free != 0 && unit < until).then_some(unit)
            })
        };
        find(start, range.end).or_else(|| find(range.start, start))
    }

    /// Frees a unit that no record refers to: it is free immediately.
    pub fn give_back(&mut self, unit: u64) {
        self.give_back_quietly(unit);
        self.note_freed(&(unit..unit + 1));
    }

    fn give_back_quietly(&mut self, unit: u64) {
        debug_assert!(self.is_used(unit), "unit {unit} is free already");
        self.used.remove(unit);
        let region = self.region_of(unit);
        region.free += 1;
        if !region.is_barred {
            self.free += 1;
        }
        if self.allocation == Allocation::LastFreed {
            self.freed.push(unit);
        }
    }

    /// Puts a unit that the record `lsn` freed into limbo. `epoch`: the grace period that must end
    /// before the unit is free.
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

    /// Runs of whole blocks that are free and recorded as freed: at most `runs`, each of at most
    /// `units` or of one block. Their records are removed. Blocks of a disk that leaves stay
    /// recorded.
    pub fn take_freed(&mut self, units: u64, runs: usize) -> Vec<Range<u64>> {
        let mut found: Vec<Range<u64>> = Vec::new();
        if self.block == 0 {
            return found;
        }
        for word in 0..self.freed_blocks.len() {
            let mut bits = self.freed_blocks[word];
            let start = word as u64 * 64 * self.block;
            if bits == 0 || self.is_all_barred(&(start..start + 64 * self.block)) {
                continue;
            }
            while bits != 0 {
                let bit = bits.trailing_zeros();
                bits &= bits - 1;
                let first = (word as u64 * 64 + u64::from(bit)) * self.block;
                let run = first..first + self.block;
                let is_in = run.end <= self.units && !self.is_all_barred(&run);
                if !is_in || run.clone().any(|unit| self.is_used(unit)) {
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
        let volume = VersionId(1);
        let none = || None;
        assert_eq!(space.allocate_for(volume, Some(69), 0, none), Some(69));
        assert_eq!(space.allocate_for(volume, Some(69), 0, none), Some(0));
        let rest: Vec<u64> = std::iter::from_fn(|| space.allocate()).collect();
        assert_eq!(rest, (1..69).collect::<Vec<u64>>());
        space.give_back(3);
        assert_eq!(
            (space.free(), space.allocate_for(volume, Some(100), 0, none)),
            (1, Some(3))
        );
    }

    /// Goal: a volume stays on its disk while that has room, another one begins on the emptiest
    /// disk, and the first disk keeps the reserve. Method: two disks are filled by two volumes.
    #[test]
    fn a_volume_stays_on_one_disk() {
        let mut geometry = crate::tests::rig::geometry(20);
        let mut disks = DiskTable::new(uuid::Uuid::from_u128(1), &geometry);
        let bytes = 2 * geometry.edge_bytes + 30 * geometry.unit_bytes();
        disks
            .add(&mut geometry, uuid::Uuid::from_u128(2), bytes)
            .unwrap();
        let mut space = Space::of(&disks, Allocation::Next);
        let mut next = |version, goal| {
            let unit = space.allocate_for(VersionId(version), goal, 4, || None);
            unit.map(|unit| (unit, space.free_of(0), space.free_of(1)))
        };
        assert_eq!(next(1, None), Some((20, 20, 29)));
        assert_eq!(next(1, Some(21)), Some((21, 20, 28)));
        // The goal is on another disk.
        assert_eq!(next(1, Some(7)), Some((22, 20, 27)));
        (0..10).for_each(|_| assert!(next(1, None).unwrap().0 >= 20));
        assert_eq!(next(2, None), Some((33, 20, 16)), "16 of 20 are for data");
        (0..16).for_each(|_| assert!(next(2, None).unwrap().0 >= 20));
        assert_eq!(next(2, None), Some((0, 19, 0)));
        (0..15).for_each(|_| assert!(next(1, None).unwrap().0 < 20));
        assert_eq!(next(1, None), None);
        assert_eq!((space.allocate(), space.free()), (Some(16), 3));
        space.give_back(25);
        assert_eq!(space.allocate(), Some(17));
        assert_eq!(space.free_of(1), 1);
        // The home is that of a unit which the volume has.
        let home = || Some(24);
        assert_eq!(space.allocate_for(VersionId(3), None, 0, home), Some(25));
    }

    /// Only whole free blocks are discarded, each once. Blocks that were never freed are not.
    #[test]
    fn freed_blocks_are_found_once() {
        let mut space = Space::new(70, Allocation::Next);
        space.note_frees(4);
        assert_eq!(space.take_freed(100, 9), []);
        while space.allocate().is_some() {}
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
        while space.allocate().is_some() {}
        space.release(2, 10, 1);
        space.reap(9, 1);
        space.reap(10, 0);
        assert_eq!(space.free(), 0);
        space.reap(10, 1);
        assert_eq!(space.allocate(), Some(2));
    }
}
