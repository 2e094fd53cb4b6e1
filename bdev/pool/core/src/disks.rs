//! The disks of a pool, and the ranges of units that each of them holds.
//!
//! ```text
//!   units    0 ─────────── 400 ─────── 600 ───── 700      the pool
//!   ranges   │ disk 0      │ disk 1    │ disk 0  │        disk 0 grew after disk 1 came
//! ```
//!
//! A unit keeps its number: a new disk, or the new space of a disk that has grown, gets the numbers
//! after the last one. The ranges of one disk lie one after the other on it. The first disk holds
//! the log.
//!
//! A disk that leaves keeps its number until the pool is opened again. Its ranges become a hole:
//! numbers of units that no disk has.

use uuid::Uuid;

use crate::geometry::{Geometry, GeometryError, PAGE, superblock_offsets};
use crate::mutation::Mutation;

/// Most disks of a pool.
pub const MAX_DISKS: usize = 64;
/// Most ranges of units.
pub const MAX_RANGES: usize = 120;
/// Fewest units of a disk.
pub(crate) const MIN_UNITS: u64 = 8;

/// A byte offset on one disk. Disks count from 0, in the order of the pool's table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Location {
    pub disk: usize,
    pub offset: u64,
}

/// A disk of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolDisk {
    pub id: Uuid,
    /// Bytes that the pool uses.
    pub bytes: u64,
    pub state: DiskState,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskState {
    In,
    /// Its units move to the other disks.
    Leaving,
    /// It has left since the pool was opened. No superblock has it.
    Gone,
}

/// The number that stands for no disk, in ranges of units that no disk has.
pub const HOLE: usize = 0xff;

/// Consecutive units on one disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UnitRange {
    pub disk: usize,
    pub first: u64,
    pub units: u64,
    /// Byte offset of the first unit on the disk.
    pub offset: u64,
}

impl UnitRange {
    pub fn end(&self) -> u64 {
        self.first + self.units
    }
}

/// All disks of a pool, the one with the log first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskTable {
    pub(crate) disks: Vec<PoolDisk>,
    pub(crate) ranges: Vec<UnitRange>,
    pub(crate) unit_bytes: u64,
}

impl DiskTable {
    /// The table of a pool of one disk.
    pub fn new(id: Uuid, geometry: &Geometry) -> Self {
        let disk = PoolDisk {
            id,
            bytes: geometry.disk_bytes,
            state: DiskState::In,
        };
        let range = UnitRange {
            disk: 0,
            first: 0,
            units: geometry.first_disk_units(),
            offset: geometry.granule_offset(0, 0),
        };
        Self {
            disks: vec![disk],
            ranges: vec![range],
            unit_bytes: geometry.unit_bytes(),
        }
    }

    pub fn disks(&self) -> &[PoolDisk] {
        &self.disks
    }

    pub fn ranges(&self) -> &[UnitRange] {
        &self.ranges
    }

    /// The numbers of the disks that have not left the pool.
    pub fn present(&self) -> impl Iterator<Item = usize> {
        let disks = self.disks.iter().enumerate();
        disks
            .filter(|(_, disk)| disk.state != DiskState::Gone)
            .map(|(number, _)| number)
    }

    /// The disk that leaves the pool.
    pub fn leaving(&self) -> Option<usize> {
        let mut disks = self.disks.iter();
        disks.position(|disk| disk.state == DiskState::Leaving)
    }

    /// One more than the highest number of a unit.
    pub fn units(&self) -> u64 {
        self.ranges.last().map_or(0, UnitRange::end)
    }

    /// Units of one disk.
    pub fn units_of(&self, disk: usize) -> u64 {
        let ranges = self.ranges.iter().filter(|range| range.disk == disk);
        ranges.map(|range| range.units).sum()
    }

    /// The number of the disk with an id.
    pub fn position(&self, id: Uuid) -> Option<usize> {
        let mut disks = self.disks.iter();
        disks.position(|disk| disk.id == id && disk.state != DiskState::Gone)
    }

    /// True when no disk has the unit.
    pub fn is_hole(&self, unit: u64) -> bool {
        unit >= self.units() || self.is_empty_range(self.range_of(unit))
    }

    fn is_empty_range(&self, range: &UnitRange) -> bool {
        let disk = self.disks.get(range.disk);
        disk.is_none_or(|disk| disk.state == DiskState::Gone)
    }

    /// The range of a unit, which the pool must have.
    fn range_of(&self, unit: u64) -> &UnitRange {
        let at = self.ranges.partition_point(|range| range.end() <= unit);
        &self.ranges[at.min(self.ranges.len() - 1)]
    }

    pub fn disk_of(&self, unit: u64) -> usize {
        self.range_of(unit).disk
    }

    /// The location of a granule of a unit.
    pub fn granule(&self, unit: u64, granule: u32) -> Location {
        let range = self.range_of(unit);
        if range.disk == HOLE {
            // Damaged metadata may name such a unit: a superblock never passes for its contents.
            return Location { disk: 0, offset: 0 };
        }
        let disk = if Mutation::WrongDisk.is_active() {
            0
        } else {
            range.disk
        };
        let inside = (unit - range.first) * self.unit_bytes + u64::from(granule) * PAGE as u64;
        Location {
            disk,
            offset: range.offset + inside,
        }
    }

    /// The location of a metadata page.
    pub fn page(&self, page: u64) -> Location {
        let granules = self.unit_bytes / PAGE as u64;
        self.granule(page / granules, (page % granules) as u32)
    }

    /// The four places of superblocks on a disk.
    pub fn superblocks(&self, disk: usize, geometry: &Geometry) -> [Location; 4] {
        let offsets = superblock_offsets(self.disks[disk].bytes, geometry.edge_bytes);
        offsets.map(|offset| Location { disk, offset })
    }

    /// Splits consecutive units into parts, each of which is contiguous on one disk. Leaves out
    /// units that no disk has.
    pub fn split(&self, units: std::ops::Range<u64>) -> Vec<std::ops::Range<u64>> {
        let ranges = self.ranges.iter();
        let ranges = ranges.filter(|range| !self.is_empty_range(range));
        let parts = ranges.map(|range| {
            let (start, end) = (units.start.max(range.first), units.end.min(range.end()));
            start..end
        });
        parts.filter(|part| part.start < part.end).collect()
    }
}

/// Changes of the table. The geometry has the same sizes.
impl DiskTable {
    /// Adds a disk of `bytes`, with its units after all others. After an error, discard the table
    /// and the geometry: they may be changed in part.
    pub fn add(
        &mut self,
        geometry: &mut Geometry,
        id: Uuid,
        bytes: u64,
    ) -> Result<(), GeometryError> {
        let units = added_disk_units(geometry, bytes);
        if units < MIN_UNITS || bytes > 1 << 60 {
            return Err(GeometryError { field: "disk size" });
        }
        if self.disks.len() >= MAX_DISKS || id.is_nil() || self.position(id).is_some() {
            return Err(GeometryError {
                field: "number of disks",
            });
        }
        let state = DiskState::In;
        self.disks.push(PoolDisk { id, bytes, state });
        self.extend(geometry, self.disks.len() - 1, units)?;
        geometry.added_units += units;
        geometry.check()
    }

    pub fn set_state(&mut self, disk: usize, state: DiskState) {
        if let Some(disk) = self.disks.get_mut(disk) {
            disk.state = state;
        }
    }

    /// Adds the new space of a disk that has grown to `bytes`. Errors: as for [`DiskTable::add`].
    pub fn grow(
        &mut self,
        geometry: &mut Geometry,
        disk: usize,
        bytes: u64,
    ) -> Result<(), GeometryError> {
        let known = self.disks.get(disk);
        let is_in = known.is_some_and(|known| known.state == DiskState::In);
        if !is_in || known.is_none_or(|known| bytes < known.bytes) || bytes > 1 << 60 {
            return Err(GeometryError { field: "disk size" });
        }
        let before = self.units_of(disk);
        let after = if disk == 0 {
            geometry.disk_bytes = bytes;
            geometry.first_disk_units()
        } else {
            added_disk_units(geometry, bytes)
        };
        self.disks[disk].bytes = bytes;
        self.extend(geometry, disk, after - before)?;
        if disk != 0 {
            geometry.added_units += after - before;
        }
        geometry.check()
    }

    /// Adds units of a disk at the end of the pool's.
    pub(crate) fn extend(
        &mut self,
        geometry: &Geometry,
        disk: usize,
        units: u64,
    ) -> Result<(), GeometryError> {
        if units == 0 {
            return Ok(());
        }
        let (first, held) = (self.units(), self.units_of(disk));
        let is_full = self.ranges.len() >= MAX_RANGES;
        match self.ranges.last_mut() {
            Some(last) if last.disk == disk => last.units += units,
            _ if is_full => {
                return Err(GeometryError {
                    field: "number of ranges",
                });
            }
            _ => self.ranges.push(UnitRange {
                disk,
                first,
                units,
                offset: data_offset(geometry, disk) + held * self.unit_bytes,
            }),
        }
        Ok(())
    }
}

/// Byte offset of the first unit on a disk.
fn data_offset(geometry: &Geometry, disk: usize) -> u64 {
    match disk {
        0 => geometry.granule_offset(0, 0),
        _ => geometry.edge_bytes,
    }
}

/// Units of a disk without a log.
pub(crate) fn added_disk_units(geometry: &Geometry, bytes: u64) -> u64 {
    bytes.saturating_sub(2 * geometry.edge_bytes) / geometry.unit_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::rig;

    /// Goal: every unit has one place, in order, and never moves. Method: disks are added and
    /// grown in turn; the places of all units are compared with those before.
    #[test]
    fn units_keep_their_places() {
        let mut geometry = rig::geometry(20);
        let mut table = DiskTable::new(Uuid::from_u128(1), &geometry);
        let mut known: Vec<Location> = Vec::new();
        let bytes = |units: u64| 2 * rig::EDGE + units * 4 * PAGE as u64;
        for step in 0..4 {
            match step {
                0 => {}
                1 => table
                    .add(&mut geometry, Uuid::from_u128(2), bytes(10))
                    .unwrap(),
                2 => {
                    let more = geometry.disk_bytes + 5 * geometry.unit_bytes();
                    table.grow(&mut geometry, 0, more).unwrap();
                }
                _ => table.grow(&mut geometry, 1, bytes(13)).unwrap(),
            }
            assert_eq!(table.units(), geometry.units());
            let places: Vec<Location> = (0..table.units())
                .map(|unit| table.granule(unit, 0))
                .collect();
            assert_eq!(places[..known.len()], known[..]);
            let mut sorted = places.clone();
            sorted.sort();
            let unit = geometry.unit_bytes();
            for pair in sorted.windows(2) {
                assert!(pair[0].disk < pair[1].disk || pair[0].offset + unit == pair[1].offset);
            }
            known = places;
        }
        assert_eq!(table.ranges().len(), 4);
        assert_eq!(table.split(18..32), [18..20, 20..30, 30..32]);
        let same = table.add(&mut geometry, Uuid::from_u128(2), bytes(10));
        assert_eq!(same.unwrap_err().field, "number of disks");
        let small = table.add(&mut geometry, Uuid::from_u128(3), bytes(7));
        assert_eq!(small.unwrap_err().field, "disk size");
        assert!(table.grow(&mut geometry, 1, bytes(12)).is_err());
    }
}
