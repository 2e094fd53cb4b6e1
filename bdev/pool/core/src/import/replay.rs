//! Decides which records of the log count, and applies them to the state of the last root.
//!
//! Records up to the settled mark count. A later record with data counts if every granule on the
//! disk has its checksum. What depends on one that does not count does not count either: a new own
//! unit of the place, and everything after that. Nothing that was flushed depends on such a record,
//! because a record that depends on another is only written after the other has ended.

use std::collections::{BTreeSet, HashMap, HashSet};

use super::log::ReadLog;
use super::nodes::Nodes;
use super::{Import, ImportError, Phase, ReadFor};
use crate::check;
use crate::disks::DiskTable;
use crate::format::data_checksum;
use crate::format::directory::VersionEntry;
use crate::format::record::Record;
use crate::geometry::{PAGE, granules_of};
use crate::ids::{Lsn, VersionId};
use crate::image::Image;
use crate::interface::IoFailed;
use crate::map::{Part, Tree};
use crate::mutation::Mutation;
use crate::pool::{Pool, Start};
use crate::space::{Allocation, Space};
use crate::state::{ApplyError, State, Version};
use crate::zones::Zones;

#[derive(Debug, Default)]
pub(super) struct Verification {
    cancelled: HashSet<Lsn>,
    failed: HashSet<Lsn>,
}

/// Records that do not count.
#[derive(Debug, Default)]
pub(super) struct Verified {
    /// Their data could not be written, and the pool went on without them.
    cancelled: HashSet<Lsn>,
    /// Their data is not on the disk.
    failed: HashSet<Lsn>,
}

impl Verification {
    pub(super) fn finish(self) -> Verified {
        Verified {
            cancelled: self.cancelled,
            failed: self.failed,
        }
    }
}

/// A place that lacks a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Missing {
    /// Granules of its own unit.
    Granules,
    /// Its own unit.
    Unit,
}

impl Import {
    /// Reads the data of every record that is not settled.
    pub(super) fn begin_verification(&mut self) {
        let root = self.root();
        let (geometry, disks) = (root.geometry, root.disks.clone());
        let Some(log) = &self.log else {
            return;
        };
        let cancelled = log.records.iter().filter_map(|(_, record)| match record {
            Record::Cancel { lsn } => Some(*lsn),
            _ => None,
        });
        let cancelled: HashSet<Lsn> = cancelled.collect();
        let skip = Mutation::SkipVerification.is_active();
        for (index, (lsn, record)) in log.records.iter().enumerate() {
            let Record::Map {
                unit,
                granules,
                checksums,
                ..
            } = record
            else {
                continue;
            };
            if *lsn <= log.settled || cancelled.contains(lsn) || skip {
                continue;
            }
            if disks.is_hole(*unit) || granules & !geometry.whole() != 0 {
                return self.fail(ImportError::Record { lsn: *lsn });
            }
            for (granule, checksum) in granules_of(*granules).zip(checksums) {
                let read = ReadFor::Verify {
                    record: index,
                    checksum: *checksum,
                };
                self.queue
                    .push_back((read, disks.granule(*unit, granule), PAGE));
            }
        }
        self.phase = Phase::Verify(Verification {
            cancelled,
            failed: HashSet::new(),
        });
    }

    pub(super) fn verified(
        &mut self,
        record: usize,
        checksum: u32,
        result: Result<&[u8], IoFailed>,
    ) {
        let is_there = result.is_ok_and(|bytes| data_checksum(bytes) == checksum);
        if let (Phase::Verify(verification), Some(log), false) =
            (&mut self.phase, &self.log, is_there)
        {
            verification.failed.insert(log.records[record].0);
        }
    }

    /// Begins to read the maps of all versions.
    pub(super) fn begin_nodes(&mut self) {
        let root = self.root();
        let mut nodes = Nodes::new(root.geometry, root.tag());
        let entries = self.directory.values().flat_map(|(entries, _)| entries);
        for entry in entries.filter(|entry| !entry.root.is_none()) {
            nodes.want_root(entry.root);
        }
        for (place, key) in nodes.take_wanted() {
            self.fetch(place, key);
        }
        self.phase = Phase::Nodes(nodes);
    }

    /// All pages are read: replays the log, and starts the pool.
    pub(super) fn finish(&mut self) {
        match self.try_finish() {
            Ok(pool) => self.outcome = Some(Ok(Box::new(pool))),
            Err(error) => self.fail(error),
        }
    }

    fn try_finish(&mut self) -> Result<Pool, ImportError> {
        let mut superblock = self.root().clone();
        superblock.holder = self.holder.id;
        let geometry = superblock.geometry;
        let phase = std::mem::replace(&mut self.phase, Phase::Superblocks);
        let (Phase::Nodes(mut nodes), Some(log), Some(mut zones)) =
            (phase, self.log.take(), self.zones.take())
        else {
            unreachable!("the phases before have run");
        };
        let mut state = State::new(geometry);
        state.next_generation = superblock.next_generation;
        let entries = self.directory.values().flat_map(|(entries, _)| entries);
        for entry in entries.clone().filter(|entry| entry.is_external) {
            let part = Part::external(entry.generation, geometry.whole());
            let map = Tree::external(state.shape(), part, entry.units);
            let restored = nodes.restore(entry.root, &map);
            self.report.lost -= restored;
            self.report.healed += restored;
        }
        for entry in entries {
            let tree = nodes.tree(entry.root, &self.garbage);
            state.versions.insert(entry.version, version(entry, tree));
        }
        state.changed_nodes += nodes.unplaced();
        check_directory(&state)?;
        let mut old_pages = self.pages_of_older_roots(&zones, &nodes)?;
        let directory = std::mem::take(&mut self.directory);
        let image = Image::loaded(&state, directory, std::mem::take(&mut self.chains));
        // The memory of decoded pages is not needed any more.
        drop(nodes);
        let verified = self.verified.take().unwrap_or_default();
        count_places(&mut state);
        let unsettled = unsettled_units(&log);
        self.replay(&mut state, log.records, &verified)?;
        forget_reused_zones(&state, &unsettled, &mut zones, &mut old_pages)?;
        let mut space = used_units(&superblock.disks, &state, &zones, self.limits.allocation)?;
        let until_root = unsettled
            .into_iter()
            .filter(|unit| space.take(*unit))
            .collect();
        Ok(Pool::start(Start {
            tail: superblock.log_sequence,
            superblock,
            limits: self.limits.clone(),
            state,
            space,
            zones,
            garbage: self.garbage.clone(),
            image,
            old_pages,
            until_root,
            log: log.end,
            repairs: std::mem::take(&mut self.repairs),
        }))
    }

    /// Pages that the page map has, and that this root does not refer to: of the root before it.
    fn pages_of_older_roots(&self, zones: &Zones, nodes: &Nodes) -> Result<Vec<u64>, ImportError> {
        let lists = self.chains.iter();
        let directory = self.directory.values().map(|(_, page)| &**page);
        let pairs = lists.chain(directory).map(|pair| pair.place);
        let mut ours: HashSet<u64> = pairs.flat_map(|place| [place.a, place.b]).collect();
        ours.extend(nodes.pages());
        if ours.iter().any(|page| !zones.holds(*page)) {
            return Err(ImportError::ListLost { list: "page map" });
        }
        Ok(zones.pages().filter(|page| !ours.contains(page)).collect())
    }

    fn replay(
        &mut self,
        state: &mut State,
        records: Vec<(Lsn, Record)>,
        verified: &Verified,
    ) -> Result<(), ImportError> {
        let mut missing: HashMap<(VersionId, u64), Missing> = HashMap::new();
        let mut released = Vec::new();
        for (lsn, record) in records {
            if verified.cancelled.contains(&lsn) {
                continue;
            }
            if let Record::Map {
                version,
                place,
                unit,
                ..
            } = &record
                && state.versions.contains_key(version)
            {
                let key = (*version, *place);
                let entry = state.entry(*version, *place).unwrap_or_default();
                let is_switch = entry.own.is_none() || entry.own.unit != *unit;
                let lacks = match (missing.get(&key), is_switch) {
                    (Some(Missing::Unit), _) | (Some(Missing::Granules), true) => true,
                    _ => verified.failed.contains(&lsn),
                };
                if lacks {
                    let what = if is_switch {
                        Missing::Unit
                    } else {
                        Missing::Granules
                    };
                    let known = missing.entry(key).or_insert(what);
                    if what == Missing::Unit {
                        *known = what;
                    }
                    self.report.dropped += 1;
                    continue;
                }
            }
            match state.apply(lsn, &record, &mut released) {
                Ok(()) => self.report.replayed += 1,
                Err(ApplyError::Lost) => self.report.dropped += 1,
                Err(_) => return Err(ImportError::Record { lsn }),
            }
        }
        state
            .versions
            .values_mut()
            .for_each(|version| version.hidden_at = 0);
        Ok(())
    }
}

fn version(entry: &VersionEntry, tree: Tree) -> Version {
    Version {
        identity: entry.identity.clone(),
        parent: entry.parent,
        generation: entry.generation,
        is_snapshot: entry.is_snapshot,
        is_thick: entry.is_thick,
        is_hidden: entry.is_hidden,
        is_read_only: entry.is_read_only,
        is_external: entry.is_external,
        units: entry.units,
        pass: entry.pass,
        tree,
        owned: 0,
        mapped: 0,
        hidden_at: 0,
    }
}

/// Parents exist, do not change, and are older than their children.
fn check_directory(state: &State) -> Result<(), ImportError> {
    for version in state.versions.values() {
        let is_sound = match version.parent {
            None => true,
            Some(parent) => state
                .versions
                .get(&parent)
                .is_some_and(|parent| parent.is_fixed() && parent.generation < version.generation),
        };
        let is_sound = is_sound
            && version.generation < state.next_generation
            && (version.pass.is_none() || version.is_hidden);
        if !is_sound {
            return Err(ImportError::Directory);
        }
    }
    Ok(())
}

/// Units of records that a second import would verify again: if this one is interrupted, that one
/// must come to the same result. So they stay as they are until the root is durable, even those
/// that a later record freed. In order: the pool frees them in that order.
fn unsettled_units(log: &ReadLog) -> BTreeSet<u64> {
    let records = log.records.iter().filter(|(lsn, _)| *lsn > log.settled);
    let units = records.filter_map(|(_, record)| match record {
        Record::Map { unit, .. } => Some(*unit),
        _ => None,
    });
    if Mutation::ReuseVerified.is_active() {
        BTreeSet::new()
    } else {
        units.collect()
    }
}

/// The page map keeps pages of older roots. A unit that held only those may have been freed after
/// this root, and hold data now.
fn forget_reused_zones(
    state: &State,
    unsettled: &BTreeSet<u64>,
    zones: &mut Zones,
    old_pages: &mut Vec<u64>,
) -> Result<(), ImportError> {
    let old: HashSet<u64> = old_pages.iter().copied().collect();
    let ours = zones.pages().filter(|page| !old.contains(page));
    let ours: HashSet<u64> = ours.map(|page| zones.unit_of(page)).collect();
    let uses = check::uses(state).map_err(|unit| ImportError::UnitUsedTwice { unit })?;
    // Units of unsettled records keep their data until the next root: a crash before it reads them.
    let forgets = Mutation::ReuseUnsettledZones.is_active();
    let is_reused = |unit: &u64| uses.contains_key(unit) || (unsettled.contains(unit) && !forgets);
    let reused = zones.units().filter(is_reused);
    let reused: BTreeSet<u64> = reused.collect();
    if let Some(unit) = reused.iter().find(|unit| ours.contains(unit)) {
        return Err(ImportError::UnitUsedTwice { unit: *unit });
    }
    old_pages.retain(|page| !reused.contains(&zones.unit_of(*page)));
    reused.into_iter().for_each(|unit| zones.forget(unit));
    Ok(())
}

/// Derives the used units from the maps. Two places with one unit are damage.
fn used_units(
    disks: &DiskTable,
    state: &State,
    zones: &Zones,
    allocation: Allocation,
) -> Result<Space, ImportError> {
    let mut space = Space::of(disks, allocation);
    for unit in zones.units() {
        if !space.take(unit) {
            return Err(ImportError::UnitUsedTwice { unit });
        }
    }
    let uses = check::uses(state).map_err(|unit| ImportError::UnitUsedTwice { unit })?;
    for unit in uses.keys() {
        if !space.take(*unit) {
            return Err(ImportError::UnitUsedTwice { unit: *unit });
        }
    }
    Ok(space)
}

/// Counts what the disk has no counts of.
fn count_places(state: &mut State) {
    for (id, owned) in check::owned(state) {
        if let Some(version) = state.versions.get_mut(&id) {
            version.owned = owned;
        }
    }
    for (id, mapped) in check::mapped(state) {
        if let Some(version) = state.versions.get_mut(&id) {
            version.mapped = mapped;
        }
    }
}
