//! Allocates the 4 KiB pages of a pool's metadata. A *zone* is a unit (64 KiB) that holds metadata
//! pages only, up to 16; zones are anywhere on the pool's disks.
//!
//! A zone is a single unit, so fragmented free space never prevents a checkpoint. The two copies of
//! a page are in two different zones, unless only one has room. Page `n` is granule `n % 16` of
//! unit `n / 16`.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use crate::bits::Bits;
use crate::format::chain::Zone;
use crate::geometry::{Geometry, granules_of};
use crate::space::Space;

#[derive(Debug)]
pub(crate) struct Zones {
    granules_per_unit: u64,
    /// The bits of all granules of a unit.
    whole: u16,
    /// Zones by their units, with a bit for each page in use.
    zones: BTreeMap<u64, u16>,
    /// The units of all zones as a bitmap, of which a check takes a copy.
    units: Bits,
    /// Zones with room for a page.
    partial: BTreeSet<u64>,
    /// Units of a disk that is being removed: no page is allocated there.
    barred: Vec<Range<u64>>,
}

impl Zones {
    pub(crate) fn new(geometry: &Geometry) -> Self {
        Self {
            granules_per_unit: u64::from(geometry.granules_per_unit),
            whole: geometry.whole(),
            zones: BTreeMap::new(),
            units: Bits::new(geometry.units()),
            partial: BTreeSet::new(),
            barred: Vec::new(),
        }
    }

    /// Adds a zone that an import has read from the page map. Returns false if it was added before.
    pub(crate) fn restore(&mut self, zone: Zone) -> bool {
        if zone.used != self.whole {
            self.partial.insert(zone.unit);
        }
        self.add(zone.unit, zone.used)
    }

    fn add(&mut self, unit: u64, used: u16) -> bool {
        self.units.grow_to(unit + 1);
        self.units.add(unit);
        self.zones.insert(unit, used).is_none()
    }

    fn remove(&mut self, unit: u64) {
        if self.zones.remove(&unit).is_some() {
            self.units.remove(unit);
        }
        self.partial.remove(&unit);
    }

    /// Sets the units in which no page is allocated from now on.
    pub(crate) fn bar(&mut self, units: Vec<Range<u64>>) {
        self.barred = units;
        let whole = self.whole;
        let partial = self.zones.iter().filter(|(_, used)| **used != whole);
        let partial = partial.map(|(unit, _)| *unit);
        let partial = partial.filter(|unit| !self.is_barred(*unit));
        self.partial = partial.collect();
    }

    fn is_barred(&self, unit: u64) -> bool {
        self.barred.iter().any(|range| range.contains(&unit))
    }

    /// True when a page is in the units of [`Zones::bar`].
    pub(crate) fn is_page_barred(&self, page: u64) -> bool {
        self.is_barred(self.unit_of(page))
    }

    /// True when a page in the units of [`Zones::bar`] is in use.
    pub(crate) fn has_barred(&self) -> bool {
        self.zones.keys().any(|unit| self.is_barred(*unit))
    }

    /// One bit per unit of the pool: set if it is a zone.
    pub(crate) fn bits(&self) -> &Bits {
        &self.units
    }

    /// The units that are zones.
    pub(crate) fn units(&self) -> impl Iterator<Item = u64> {
        self.zones.keys().copied()
    }

    /// All zones, as a checkpoint writes them to the page map.
    pub(crate) fn table(&self) -> Vec<Zone> {
        let zones = self.zones.iter();
        zones
            .map(|(unit, used)| Zone {
                unit: *unit,
                used: *used,
            })
            .collect()
    }

    /// Number of zones.
    pub(crate) fn len(&self) -> usize {
        self.zones.len()
    }

    /// True when `page` is in use.
    pub(crate) fn holds(&self, page: u64) -> bool {
        let (unit, granule) = self.split(page);
        self.zones
            .get(&unit)
            .is_some_and(|used| used >> granule & 1 == 1)
    }

    /// All pages in use.
    pub(crate) fn pages(&self) -> impl Iterator<Item = u64> {
        self.zones.iter().flat_map(move |(unit, used)| {
            granules_of(*used)
                .map(move |granule| unit * self.granules_per_unit + u64::from(granule))
        })
    }

    /// Allocates two pages, for the two copies. May make a free unit of `space` a zone. `None` if
    /// the pool has no room.
    pub(crate) fn allocate_pair(&mut self, space: &mut Space) -> Option<[u64; 2]> {
        if self.partial.len() < 2
            && let Some(unit) = space.allocate()
        {
            self.add(unit, 0);
            self.partial.insert(unit);
        }
        let first = *self.partial.first()?;
        let a = self.take(first);
        let Some(last) = self.partial.last().copied() else {
            self.free(a, space);
            return None;
        };
        Some([a, self.take(last)])
    }

    fn take(&mut self, unit: u64) -> u64 {
        let used = self.zones.get_mut(&unit).expect("a zone");
        let granule = (!*used).trailing_zeros();
        *used |= 1 << granule;
        if *used == self.whole {
            self.partial.remove(&unit);
        }
        unit * self.granules_per_unit + u64::from(granule)
    }

    /// Frees a page. Returns a zone without pages in use to `space`.
    pub(crate) fn free(&mut self, page: u64, space: &mut Space) {
        let (unit, granule) = self.split(page);
        let Some(used) = self.zones.get_mut(&unit) else {
            debug_assert!(false, "page {page} is in no zone");
            return;
        };
        debug_assert!(*used >> granule & 1 == 1, "page {page} is free already");
        *used &= !(1 << granule);
        let is_empty = *used == 0;
        if !self.is_barred(unit) {
            self.partial.insert(unit);
        }
        if is_empty {
            self.remove(unit);
            space.give_back(unit);
        }
    }

    /// Removes a zone whose unit was given to another use.
    pub(crate) fn forget(&mut self, unit: u64) {
        self.remove(unit);
    }

    /// The unit of a page.
    pub(crate) fn unit_of(&self, page: u64) -> u64 {
        page / self.granules_per_unit
    }

    fn split(&self, page: u64) -> (u64, u32) {
        (
            page / self.granules_per_unit,
            (page % self.granules_per_unit) as u32,
        )
    }
}
