//! The table of disks in a superblock.

use super::superblock::Feature;
use super::{Reader, Writer};
use crate::disks::{
    DiskState, DiskTable, HOLE, MAX_DISKS, MAX_RANGES, MIN_UNITS, PoolDisk, added_disk_units,
};
use crate::geometry::Geometry;

/// The bytes of a superblock's table.
impl DiskTable {
    pub(crate) const BYTES: usize = 40 * MAX_DISKS;
    const RANGES: usize = 24 * MAX_DISKS;

    const LEAVING: usize = Self::RANGES + 8 + 8 * MAX_RANGES;

    /// The features that a superblock with this table names.
    pub fn features(&self) -> u64 {
        let several = match self.present().nth(1) {
            None => 0,
            Some(_) => Feature::SeveralDisks as u64,
        };
        several | self.removal_feature()
    }

    /// The feature of a table with a disk that leaves, or a hole.
    pub(crate) fn removal_feature(&self) -> u64 {
        let has_hole = || self.stored_ranges().iter().any(|(disk, _)| *disk == HOLE);
        if self.leaving().is_some() || has_hole() {
            Feature::LeavingDisks as u64
        } else {
            0
        }
    }

    /// The ranges as a superblock has them: by the number of the disk there, and units. Holes that
    /// adjoin are one, and there is none at the end.
    fn stored_ranges(&self) -> Vec<(usize, u64)> {
        let present: Vec<usize> = self.present().collect();
        let number = |disk| {
            let at = present.iter().position(|known| *known == disk);
            at.unwrap_or(HOLE)
        };
        let mut stored: Vec<(usize, u64)> = Vec::new();
        for range in &self.ranges {
            match (number(range.disk), stored.last_mut()) {
                (HOLE, Some((HOLE, units))) => *units += range.units,
                (disk, _) => stored.push((disk, range.units)),
            }
        }
        stored.pop_if(|(disk, _)| *disk == HOLE);
        stored
    }

    /// A pool of one disk without holes has the table of versions that know no other.
    pub(crate) fn write(&self, w: &mut Writer) {
        let start = w.position();
        let present: Vec<PoolDisk> = self.present().map(|disk| self.disks[disk]).collect();
        let ranges = self.stored_ranges();
        if let ([disk], [(_, units)]) = (&present[..], &ranges[..]) {
            w.uuid(disk.id);
            w.u64(0);
            w.u64(*units);
            w.u64(1);
        } else {
            for disk in &present {
                w.uuid(disk.id);
                w.u64(disk.bytes);
            }
            w.skip_to(start + Self::RANGES);
            w.u64(ranges.len() as u64);
            for (disk, units) in ranges {
                w.u64(units << 8 | disk as u64);
            }
            w.skip_to(start + Self::LEAVING);
            let leaving = present.iter().enumerate();
            let leaving = leaving.filter(|(_, disk)| disk.state == DiskState::Leaving);
            w.u64(leaving.fold(0, |set, (number, _)| set | 1 << number));
        }
        w.skip_to(start + Self::BYTES);
    }

    /// Reads a table of `count` disks. The geometry's added units become those of the table.
    pub(crate) fn read(r: &mut Reader, count: u32, geometry: &mut Geometry) -> Option<Self> {
        let start = r.position();
        let (first, bytes) = (r.uuid()?, r.u64()?);
        if count == 1 && bytes == 0 {
            let rest = (r.u64()?, r.u64()?);
            let is_sound = rest == (geometry.first_disk_units(), 1);
            let table = Self::new(first, geometry);
            return (is_sound && r.is_zero_until(start + Self::BYTES)).then_some(table);
        }
        let count = usize::try_from(count).ok()?;
        if !(1..=MAX_DISKS).contains(&count) || bytes != geometry.disk_bytes {
            return None;
        }
        let state = DiskState::In;
        let mut wanted = vec![PoolDisk {
            id: first,
            bytes,
            state,
        }];
        for _ in 1..count {
            let (id, bytes) = (r.uuid()?, r.u64()?);
            let is_known = wanted.iter().any(|disk: &PoolDisk| disk.id == id);
            if id.is_nil() || is_known || bytes > 1 << 60 {
                return None;
            }
            wanted.push(PoolDisk { id, bytes, state });
        }
        if !r.is_zero_until(start + Self::RANGES) {
            return None;
        }
        let mut table = Self {
            disks: wanted,
            ranges: Vec::new(),
            unit_bytes: geometry.unit_bytes(),
        };
        let ranges = usize::try_from(r.u64()?).ok()?;
        if !(count..=MAX_RANGES).contains(&ranges) {
            return None;
        }
        for at in 0..ranges {
            let word = r.u64()?;
            let (disk, units) = ((word & 0xff) as usize, word >> 8);
            let adjoins = table.ranges.last().is_some_and(|last| last.disk == disk);
            let is_known = disk < count || disk == HOLE;
            if !is_known || units == 0 || adjoins || (at == 0 && disk != 0) {
                return None;
            }
            // So no byte offset overflows.
            let most = (1 << 60) / table.unit_bytes;
            if units > most || table.units() > most {
                return None;
            }
            table.extend(geometry, disk, units).ok()?;
        }
        let is_whole = |(at, disk): (usize, &PoolDisk)| {
            let units = match at {
                0 => geometry.first_disk_units(),
                _ => added_disk_units(geometry, disk.bytes),
            };
            units >= MIN_UNITS && table.units_of(at) == units
        };
        let ends_in_hole = table.ranges.last()?.disk == HOLE;
        if ends_in_hole || !table.disks.iter().enumerate().all(is_whole) {
            return None;
        }
        if !r.is_zero_until(start + Self::LEAVING) {
            return None;
        }
        // The first disk has the log, and one disk leaves at a time.
        let leaving = r.u64()?;
        let number = leaving.trailing_zeros() as usize;
        if leaving != 0 {
            if leaving.count_ones() > 1 || !(1..count).contains(&number) {
                return None;
            }
            table.set_state(number, DiskState::Leaving);
        }
        // A table of one disk without holes has the short form.
        if count == 1 && ranges == 1 {
            return None;
        }
        geometry.added_units = table.units() - geometry.first_disk_units();
        r.is_zero_until(start + Self::BYTES).then_some(table)
    }
}
