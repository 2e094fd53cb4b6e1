//! The maps that lanes read: filled on demand, and kept equal to the map of the core (the pool's
//! decisions without I/O).

use std::sync::Arc;

use nacre_bdev_pool_core::ids::{Lsn, VersionId};
use nacre_bdev_pool_core::interface::{Change, Refusal};
use nacre_bdev_pool_core::map::Entry;
use nacre_bdev_pool_core::pool::Pool;

use super::{Keeper, Stage};
use crate::map::LvolMap;

impl Keeper {
    /// Fills the leaf of a place in the lanes' map.
    pub(super) fn load(&mut self, version: VersionId, place: u64) {
        let (Stage::Open(pool), Some(map)) = (&mut self.stage, self.maps.get(&version)) else {
            return;
        };
        if !map.is_loaded(place) {
            let lsn = pool.follow().last_lsn();
            fill(pool, map, place, lsn);
        }
    }

    /// Shows lanes the places of new units, before a map has one.
    pub(super) fn publish_table(&mut self) {
        let Stage::Open(pool) = &self.stage else {
            return;
        };
        let table = &pool.superblock().disks;
        if self.table_units != table.units() {
            self.table_units = table.units();
            let table = Arc::new(table.clone());
            self.shared.table.store(Some(table));
        }
    }

    /// Takes the core's changes over to the maps.
    pub(super) fn publish(&mut self) {
        let Stage::Open(pool) = &mut self.stage else {
            return;
        };
        let mut changes = std::mem::take(&mut self.changes);
        pool.follow().take_changes(&mut changes);
        let lsn = pool.follow().last_lsn();
        let mut families = Vec::new();
        for change in changes.drain(..) {
            match change {
                Change::Places {
                    version,
                    first,
                    end,
                } => {
                    let Some(map) = self.maps.get(&version) else {
                        continue;
                    };
                    for place in (first..end).filter(|place| map.is_loaded(*place)) {
                        let entry = pool.lookup(version, place).ok();
                        map.set(place, seen_as(pool, entry, lsn), entry);
                    }
                    show_mapped(pool, map);
                }
                Change::Version(version) | Change::Contents(version) => {
                    families.push(version);
                    let Some(map) = self.maps.get(&version) else {
                        continue;
                    };
                    let state = pool.state();
                    let Some(of) = state.versions.get(&version).filter(|v| !v.is_hidden) else {
                        if map.set_gone() {
                            self.shared.announce_external();
                        }
                        self.maps.remove(&version);
                        continue;
                    };
                    map.set_floor(floor_of(pool, version));
                    map.set_units(of.units);
                    show_mapped(pool, map);
                    if of.is_fixed() {
                        map.set_read_only();
                    }
                    if matches!(change, Change::Contents(_)) {
                        // Entries may be places of another device from here on.
                        map.set_external(None);
                        for place in map.loaded() {
                            fill(pool, map, place, lsn);
                        }
                    }
                }
            }
        }
        self.changes = changes;
        if !families.is_empty() {
            self.refresh_externals(Some(&families));
        }
    }
}

/// Shows lanes and hosts the number of places with data.
pub(super) fn show_mapped(pool: &Pool, map: &LvolMap) {
    if let Some(version) = pool.state().versions.get(&map.version) {
        map.set_mapped((!version.is_thick).then_some(version.mapped));
    }
}

fn fill(pool: &Pool, map: &LvolMap, place: u64, lsn: Lsn) {
    let version = map.version;
    map.load(place, |place| {
        let entry = match pool.lookup(version, place) {
            Ok(entry) => Some(entry),
            // The last leaf goes on behind the end of the volume.
            Err(Refusal::OutOfRange) => Some(Default::default()),
            Err(_) => None,
        };
        (entry, seen_as(pool, entry, lsn))
    });
}

/// The record that lanes take for the last one of an entry. That of a unit on its way to another
/// disk is never settled: lanes ask the keeper before they write to it.
fn seen_as(pool: &Pool, entry: Option<Entry>, lsn: Lsn) -> Lsn {
    if entry.is_some_and(|entry| pool.is_moving(&entry)) {
        Lsn::MAX
    } else {
        lsn
    }
}

/// The generation up to which units of a version may be shared, wherever they are.
pub(super) fn floor_of(pool: &Pool, version: VersionId) -> u32 {
    let versions = &pool.state().versions;
    let parent = versions.get(&version).and_then(|version| version.parent);
    let parent = parent.and_then(|parent| versions.get(&parent));
    parent.map_or(0, |parent| parent.generation)
}
