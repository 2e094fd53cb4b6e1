//! The table of disks in a superblock.

use super::superblock::Feature;
use super::{Reader, Writer};
use crate::disks::{DiskTable, MAX_DISKS, MAX_RANGES, MIN_UNITS, PoolDisk, added_disk_units};
use crate::geometry::Geometry;

/// The bytes of a superblock's table.
impl DiskTable {
    pub(crate) const BYTES: usize = 40 * MAX_DISKS;
    const RANGES: usize = 24 * MAX_DISKS;

    /// The feature that a superblock with this table names.
    pub fn feature(&self) -> u64 {
        match self.disks.len() {
            1 => 0,
            _ => Feature::SeveralDisks as u64,
        }
    }

    /// A pool of one disk has the table of versions that know no other.
    pub(crate) fn write(&self, w: &mut Writer) {
        let start = w.position();
        if let [disk] = self.disks[..] {
            w.uuid(disk.id);
            w.u64(0);
            w.u64(self.units());
            w.u64(1);
        } else {
            for disk in &self.disks {
                w.uuid(disk.id);
                w.u64(disk.bytes);
            }
            w.skip_to(start + Self::RANGES);
            w.u64(self.ranges.len() as u64);
            for range in &self.ranges {
                w.u64(range.units << 8 | range.disk as u64);
            }
        }
        w.skip_to(start + Self::BYTES);
    }

    /// Reads a table of `count` disks. The geometry's added units become those of the table.
    pub(crate) fn read(r: &mut Reader, count: u32, geometry: &mut Geometry) -> Option<Self> {
        let start = r.position();
        let first = r.uuid()?;
        if count == 1 {
            let rest = (r.u64()?, r.u64()?, r.u64()?);
            let is_sound = rest == (0, geometry.first_disk_units(), 1);
            let table = Self::new(first, geometry);
            return (is_sound && r.is_zero_until(start + Self::BYTES)).then_some(table);
        }
        let count = usize::try_from(count).ok()?;
        if !(2..=MAX_DISKS).contains(&count) || r.u64()? != geometry.disk_bytes {
            return None;
        }
        let mut wanted = vec![PoolDisk {
            id: first,
            bytes: geometry.disk_bytes,
        }];
        for _ in 1..count {
            let (id, bytes) = (r.uuid()?, r.u64()?);
            let is_known = wanted.iter().any(|disk: &PoolDisk| disk.id == id);
            if id.is_nil() || is_known || bytes > 1 << 60 {
                return None;
            }
            wanted.push(PoolDisk { id, bytes });
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
            if disk >= count || units == 0 || adjoins || (at == 0 && disk != 0) {
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
        if !table.disks.iter().enumerate().all(is_whole) {
            return None;
        }
        geometry.added_units = table.units() - geometry.first_disk_units();
        r.is_zero_until(start + Self::BYTES).then_some(table)
    }
}
