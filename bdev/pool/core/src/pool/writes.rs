//! Writes: in place, or to a unit that becomes known by a record.
//!
//! A record of the log and its data go out together. The map changes only when both are on the
//! disk: until then reads see the old contents. Records about one place are ordered:
//!
//! - *additions* (granules that are not valid yet, in the place's own unit) run side by side;
//! - a *switch* (a new own unit) runs alone.

use std::collections::{BTreeMap, HashMap, VecDeque};

use super::store::Store;
use super::{Attempt, MapGrowth, Pool, Purpose};
use crate::format::record::Record;
use crate::geometry::granules_of;
use crate::ids::{Generation, Lsn, Token, VersionId};
use crate::interface::{Answer, Intent, IoFailed, Refusal, Write};
use crate::map::{EXTERNAL_UNIT, Part};
use crate::mutation::Mutation;

#[derive(Debug, Default)]
pub(super) struct Writes {
    /// Records in flight.
    records: BTreeMap<Lsn, RecordInFlight>,
    by_token: HashMap<Token, Lsn>,
    /// Writes in place, of which the pool only knows the end.
    in_place: HashMap<Token, Write>,
    /// Switches that first read granules of the second unit.
    sources: HashMap<Token, Source>,
    /// Those of them that have all their granules: their records are next.
    ready: VecDeque<Token>,
    occupied: HashMap<(VersionId, u64), Occupied>,
    /// Places of each version that are occupied.
    by_version: HashMap<VersionId, usize>,
}

#[derive(Debug)]
struct RecordInFlight {
    token: Token,
    record: Record,
    version: VersionId,
    place: u64,
    granules: u16,
    /// The unit was allocated for this record.
    is_switch: bool,
    fua: bool,
    data: Data,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Data {
    InFlight,
    Written,
    /// Not written: the record CANCEL says so.
    Failed {
        cancel: Lsn,
    },
}

#[derive(Debug)]
struct Source {
    write: Write,
    unit: u64,
    /// The unit was allocated for this write.
    is_switch: bool,
    /// Reads that are left, the one in flight first.
    reads: Vec<(u64, u16)>,
    copy: u16,
    /// Granules that were read, with their checksums.
    sums: Vec<(u32, u32)>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Occupied {
    records: usize,
    granules: u16,
    is_switch: bool,
}

impl Writes {
    /// No record is in flight. Copies may be reading their sources.
    pub(super) fn has_no_record(&self) -> bool {
        self.records.is_empty()
    }

    /// Records in flight, and those that wait for their sources.
    pub(super) fn records(&self) -> usize {
        self.records.len() + self.sources.len()
    }

    /// Units that were allocated for writes in flight.
    pub(super) fn new_units(&self) -> impl Iterator<Item = u64> {
        let records = self.records.values().filter(|record| record.is_switch);
        let records = records.filter_map(|record| match record.record {
            Record::Map { unit, .. } => Some(unit),
            _ => None,
        });
        let sources = self.sources.values().filter(|source| source.is_switch);
        records.chain(sources.map(|source| source.unit))
    }

    /// No write of any kind is in flight.
    pub(super) fn is_idle(&self) -> bool {
        self.records.is_empty() && self.sources.is_empty() && self.in_place.is_empty()
    }

    /// Records of this version are in flight.
    pub(super) fn is_busy(&self, version: VersionId) -> bool {
        self.by_version.contains_key(&version)
    }

    /// Records about one of these places are in flight.
    pub(super) fn occupies(&self, version: VersionId, places: std::ops::Range<u64>) -> bool {
        self.is_busy(version)
            && places
                .into_iter()
                .any(|place| self.occupied.contains_key(&(version, place)))
    }

    /// True when a copy reads this unit.
    pub(super) fn reads(&self, unit: u64) -> bool {
        let mut sources = self.sources.values();
        sources.any(|source| source.reads.iter().any(|(of, _)| *of == unit))
    }

    /// The last record before the first one whose data is in flight.
    pub(super) fn before_first(&self) -> Lsn {
        let first = self.records.first_key_value();
        first.map_or(Lsn::MAX, |(lsn, _)| lsn - 1)
    }

    /// Forgets all writes. Returns their tokens, without those in place.
    pub(super) fn drain(&mut self) -> Vec<Token> {
        let records = std::mem::take(&mut self.records).into_values();
        let mut tokens: Vec<Token> = records.map(|record| record.token).collect();
        tokens.extend(self.sources.drain().map(|(token, _)| token));
        self.ready.clear();
        self.by_token.clear();
        self.occupied.clear();
        self.by_version.clear();
        tokens
    }

    /// Records whose outcome is known: up to `complete`, the log is on the disk.
    fn ended(&self, complete: Lsn) -> Vec<Lsn> {
        let forget_data = Mutation::ForgetData.is_active();
        let records = self.records.iter();
        let ended = records.filter(|(lsn, record)| match record.data {
            Data::InFlight => forget_data && **lsn <= complete,
            Data::Written => **lsn <= complete,
            Data::Failed { cancel } => cancel <= complete,
        });
        ended.map(|(lsn, _)| *lsn).collect()
    }

    /// Reads the next granules of a copy.
    fn read(&mut self, store: &mut Store, token: Token, source: Source) {
        let (unit, granules) = source.reads[0];
        let (version, place) = (source.write.version, source.write.place);
        self.sources.insert(token, source);
        let intent = if unit == EXTERNAL_UNIT {
            Intent::ReadExternal {
                token,
                version,
                place,
                granules,
            }
        } else {
            Intent::ReadSource {
                token,
                unit,
                granules,
            }
        };
        store.out.push_back(intent);
    }

    fn occupy(&mut self, version: VersionId, place: u64, granules: u16, is_switch: bool) {
        let occupied = self.occupied.entry((version, place)).or_default();
        if occupied.records == 0 {
            *self.by_version.entry(version).or_default() += 1;
        }
        occupied.records += 1;
        occupied.granules |= granules;
        occupied.is_switch |= is_switch;
    }

    fn vacate(&mut self, version: VersionId, place: u64, granules: u16) {
        let Some(occupied) = self.occupied.get_mut(&(version, place)) else {
            return;
        };
        occupied.records -= 1;
        occupied.granules &= !granules;
        if occupied.records > 0 {
            return;
        }
        self.occupied.remove(&(version, place));
        if let Some(places) = self.by_version.get_mut(&version) {
            *places -= 1;
            if *places == 0 {
                self.by_version.remove(&version);
            }
        }
    }
}

impl Writes {
    /// Appends the record of a write with its copies, whose granules are all read.
    fn copy(&mut self, store: &mut Store, token: Token, source: Source) {
        let Source {
            write,
            unit,
            is_switch,
            copy,
            mut sums,
            ..
        } = source;
        sums.extend(granules_of(write.granules).zip(write.checksums.iter().copied()));
        sums.sort_unstable();
        let record = Record::Map {
            version: write.version,
            place: write.place,
            unit,
            granules: write.granules | copy,
            checksums: sums.into_iter().map(|(_, sum)| sum).collect(),
        };
        self.begin_record(store, token, &write, record, is_switch, copy);
    }

    fn begin_record(
        &mut self,
        store: &mut Store,
        token: Token,
        write: &Write,
        record: Record,
        is_switch: bool,
        copy: u16,
    ) {
        let Record::Map { unit, granules, .. } = record else {
            unreachable!("writes have MAP records");
        };
        let lsn = store.append(&record);
        self.occupy(write.version, write.place, granules, is_switch || copy != 0);
        let disk = store.superblock.disks.disk_of(unit);
        store.settle.note(lsn, unit, granules, disk);
        let in_flight = RecordInFlight {
            token,
            record,
            version: write.version,
            place: write.place,
            granules,
            is_switch,
            fua: write.fua,
            data: Data::InFlight,
        };
        self.records.insert(lsn, in_flight);
        self.by_token.insert(token, lsn);
        store.out.push_back(Intent::Data {
            token,
            unit,
            granules: write.granules,
            copy,
        });
    }

    /// Appends the records of copies whose granules are read. A read of an external device may take
    /// any time: neither a checkpoint nor the log has waited for it.
    pub(super) fn begin_copies(&mut self, store: &mut Store, is_draining: bool) {
        while let Some(token) = self.ready.front().copied() {
            if is_draining || !may_append(store) || !store.log_takes(&largest_record()) {
                return;
            }
            self.ready.pop_front();
            if let Some(source) = self.sources.remove(&token) {
                self.vacate(source.write.version, source.write.place, u16::MAX);
                self.copy(store, token, source);
            }
        }
    }

    /// Changes the map for writes that are on the disk with their records, and answers them.
    pub(super) fn publish(&mut self, store: &mut Store) {
        let complete = store.log.complete();
        for lsn in self.ended(complete) {
            let Some(record) = self.records.remove(&lsn) else {
                continue;
            };
            self.by_token.remove(&record.token);
            self.vacate(record.version, record.place, record.granules);
            store.has_news = true;
            if let Data::Failed { cancel } = record.data {
                if let (true, Record::Map { unit, .. }) = (record.is_switch, &record.record) {
                    store.release(vec![*unit], cancel);
                }
                store.answer(record.token, Err(Refusal::Medium));
                continue;
            }
            store.apply(lsn, &record.record);
            if record.fua {
                store.flush(Purpose::RequestFlush(record.token), false)
            } else {
                store.answer(record.token, Ok(Answer::Done))
            }
        }
    }
}

impl Pool {
    /// The request's data is written, or could not be.
    pub fn data_written(&mut self, token: Token, result: Result<(), IoFailed>) {
        self.store.has_news = true;
        if self.leaving.moves.written(token, result) {
            return;
        }
        if let Some(write) = self.writes.in_place.remove(&token) {
            return match result {
                Ok(()) if write.fua => self.store.flush(Purpose::RequestFlush(token), false),
                Ok(()) => self.store.answer(token, Ok(Answer::Done)),
                Err(IoFailed) => self.store.answer(token, Err(Refusal::Medium)),
            };
        }
        let Some(lsn) = self.writes.by_token.get(&token).copied() else {
            return;
        };
        let data = match result {
            Ok(()) => Data::Written,
            Err(IoFailed) => Data::Failed {
                cancel: if Mutation::ForgetCancel.is_active() {
                    lsn
                } else {
                    self.store.append(&Record::Cancel { lsn })
                },
            },
        };
        if let Some(record) = self.writes.records.get_mut(&lsn) {
            record.data = data;
        }
    }

    /// The granules of an intent `ReadSource` are read: their checksums, in order.
    pub fn source_read(&mut self, token: Token, result: Result<Vec<u32>, IoFailed>) {
        self.store.has_news = true;
        if self.leaving.moves.read(&mut self.store, token, &result) {
            return;
        }
        let Some(mut source) = self.writes.sources.remove(&token) else {
            return;
        };
        let (version, place) = (source.write.version, source.write.place);
        let Ok(sums) = result else {
            self.writes.vacate(version, place, u16::MAX);
            if source.is_switch {
                self.store.space.give_back(source.unit);
            }
            return self.store.answer(token, Err(Refusal::Medium));
        };
        let (_, granules) = source.reads.remove(0);
        source.sums.extend(granules_of(granules).zip(sums));
        if !source.reads.is_empty() {
            return self.writes.read(&mut self.store, token, source);
        }
        self.writes.sources.insert(token, source);
        self.writes.ready.push_back(token);
    }

    /// Copies the shared granules of a place, so that all of its units are its own.
    pub(super) fn attempt_fill(
        &mut self,
        token: Token,
        version: VersionId,
        place: u64,
    ) -> Result<Attempt, Refusal> {
        let known = self.store.visible(version)?;
        if known.is_fixed() {
            return Err(Refusal::WrongKind);
        }
        if place >= known.units {
            return Err(Refusal::OutOfRange);
        }
        let leaf = self.store.state.leaf_of(place);
        let entry = self.store.state.entry(version, place);
        let entry = entry.map_err(|_| Refusal::Damaged)?;
        let floor = self.store.state.floor(version, leaf);
        if entry.parts().all(|part| part.is_exclusive(floor)) {
            if self.writes.occupies(version, place..place + 1) {
                return Ok(Attempt::Wait);
            }
            self.store.answer(token, Ok(Answer::Done));
            return Ok(Attempt::Begun);
        }
        let may_change = self.durable.is_cut(version) && !Mutation::CopyWithoutGrace.is_active();
        if self.writes.occupies(version, place..place + 1)
            || self.leaving.moves.is_on(&entry)
            || may_change
            || !self.may_record(version, leaf)
            || !self.store.log_takes(&largest_record())
        {
            return Ok(Attempt::Wait);
        }
        let is_switch = !entry.own.is_exclusive(floor);
        if !self.has_room_for_write(version, leaf, is_switch)? {
            return Ok(Attempt::Wait);
        }
        let reads: Vec<Part> = entry
            .parts()
            .filter(|part| is_switch || part.unit != entry.own.unit)
            .collect();
        let copy = reads.iter().fold(0, |set, part| set | part.granules);
        if !is_switch && self.store.is_unsettled(entry.own.unit, copy, 0) {
            self.store.settle.want(self.store.log.next_lsn() - 1);
            return Ok(Attempt::Wait);
        }
        let write = copy_of(version, place);
        let unit = if is_switch {
            self.allocate_unit(&write)?
        } else {
            entry.own.unit
        };
        self.writes.occupy(version, place, u16::MAX, true);
        let reads = reads.iter().map(|part| (part.unit, part.granules));
        let source = Source {
            write,
            unit,
            is_switch,
            reads: reads.collect(),
            copy,
            sums: Vec::new(),
        };
        self.writes.read(&mut self.store, token, source);
        Ok(Attempt::Begun)
    }

    /// Copies granules of `from` at a place to a new unit of a prepared version, with those that
    /// would be in a third unit.
    pub(super) fn attempt_copy(
        &mut self,
        token: Token,
        (version, from): (VersionId, VersionId),
        above: Generation,
        place: u64,
    ) -> Result<Attempt, Refusal> {
        let state = &self.store.state;
        let leaf = state.leaf_of(place);
        let known = |id| state.versions.get(&id).ok_or(Refusal::UnknownVersion);
        if place >= known(version)?.units.min(known(from)?.units) {
            return Err(Refusal::OutOfRange);
        }
        let entry = |id| state.entry(id, place).map_err(|_| Refusal::Damaged);
        let (own, below) = (entry(from)?, entry(version)?);
        let is_moving = self.leaving.moves.is_on(&own) || self.leaving.moves.is_on(&below);
        if is_moving || !self.may_record(version, leaf) || !self.store.log_takes(&largest_record())
        {
            return Ok(Attempt::Wait);
        }
        let owned: Vec<Part> = own
            .parts()
            .filter(|part| part.is_exclusive(above))
            .collect();
        let covered = owned.iter().fold(0, |set, part| set | part.granules);
        let third = below.to_copy(covered);
        if !self.has_room_for_write(version, leaf, true)? {
            return Ok(Attempt::Wait);
        }
        let write = copy_of(version, place);
        let unit = self.allocate_unit(&write)?;
        self.writes.occupy(version, place, u16::MAX, true);
        let mut reads: Vec<(u64, u16)> = owned
            .iter()
            .map(|part| (part.unit, part.granules))
            .collect();
        if third != 0 {
            reads.push((below.second.unit, third));
        }
        let source = Source {
            write,
            unit,
            is_switch: true,
            reads,
            copy: covered | third,
            sums: Vec::new(),
        };
        self.writes.read(&mut self.store, token, source);
        Ok(Attempt::Begun)
    }

    pub(super) fn attempt_write(&mut self, token: Token, write: &Write) -> Attempt {
        if let Err(refusal) = self.store.check_write(write) {
            return refusal.into();
        }
        let Write {
            version,
            place,
            granules,
            ..
        } = *write;
        let occupied = self.writes.occupied.get(&(version, place)).copied();
        let occupied = occupied.unwrap_or_default();
        if occupied.is_switch || occupied.granules & granules != 0 {
            return Attempt::Wait;
        }
        let leaf = self.store.state.leaf_of(place);
        let Ok(entry) = self.store.state.entry(version, place) else {
            return Refusal::Damaged.into();
        };
        if self.leaving.moves.is_on(&entry) && !Mutation::MoveBesideWrites.is_active() {
            return Attempt::Wait;
        }
        let floor = if Mutation::WriteShared.is_active() {
            0
        } else {
            self.store.state.floor(version, leaf)
        };
        if !entry.own.is_exclusive(floor) {
            if occupied.records > 0 || !self.may_record(version, leaf) {
                return Attempt::Wait;
            }
            return self.begin_switch(token, write, entry.own, entry.second);
        }
        let unit = entry.own.unit;
        if self.store.is_unsettled(unit, granules, entry.own.granules) {
            self.store.settle.want(self.store.log.next_lsn() - 1);
            return Attempt::Wait;
        }
        let new = granules & !entry.own.granules;
        if new == 0 {
            self.writes.in_place.insert(token, write.clone());
            self.store.out.push_back(Intent::Data {
                token,
                unit,
                granules,
                copy: 0,
            });
            return Attempt::Begun;
        }
        let sums = granules_of(granules).zip(&write.checksums);
        let sums = sums.filter(|(granule, _)| new >> granule & 1 == 1);
        let record = Record::Map {
            version,
            place,
            unit,
            granules: new,
            checksums: sums.map(|(_, sum)| *sum).collect(),
        };
        if !self.may_record(version, leaf) || !self.store.log_takes(&record) {
            return Attempt::Wait;
        }
        match self.has_room_for_write(version, leaf, false) {
            Ok(true) => {}
            Ok(false) => return Attempt::Wait,
            Err(refusal) => return refusal.into(),
        }
        self.writes
            .begin_record(&mut self.store, token, write, record, false, 0);
        Attempt::Begun
    }

    /// True when a write of this leaf may append a record now.
    fn may_record(&mut self, version: VersionId, leaf: u64) -> bool {
        let is_drained =
            self.durable.is_frozen(version) && !Mutation::SnapshotWithoutDrain.is_active();
        let is_drained = is_drained || self.checkpoint.is_draining();
        may_append(&mut self.store) && !is_drained && !self.deletion.holds(version, leaf)
    }

    fn begin_switch(&mut self, token: Token, write: &Write, own: Part, second: Part) -> Attempt {
        let second_valid = if own.is_none() {
            0
        } else {
            second.granules & !write.granules
        };
        // A write in place from before the cut may not have reached the source yet.
        let may_change =
            self.durable.is_cut(write.version) && !Mutation::CopyWithoutGrace.is_active();
        if second_valid != 0 && may_change {
            return Attempt::Wait;
        }
        if !self.store.log_takes(&largest_record()) {
            return Attempt::Wait;
        }
        let leaf = self.store.state.leaf_of(write.place);
        match self.has_room_for_write(write.version, leaf, true) {
            Ok(true) => {}
            Ok(false) => return Attempt::Wait,
            Err(refusal) => return refusal.into(),
        }
        let unit = match self.allocate_unit(write) {
            Ok(unit) => unit,
            Err(refusal) => return refusal.into(),
        };
        debug_assert!(!self.store.settle.is_unsettled(unit, u16::MAX) || cfg!(test));
        let mut source = Source {
            write: write.clone(),
            unit,
            is_switch: true,
            reads: Vec::new(),
            copy: second_valid,
            sums: Vec::new(),
        };
        if second_valid == 0 {
            self.writes.copy(&mut self.store, token, source);
            return Attempt::Begun;
        }
        self.writes
            .occupy(write.version, write.place, u16::MAX, true);
        source.reads.push((second.unit, second_valid));
        self.writes.read(&mut self.store, token, source);
        Attempt::Begun
    }

    /// True when the next root has room after a write.
    fn has_room_for_write(
        &mut self,
        version: VersionId,
        leaf: u64,
        takes_unit: bool,
    ) -> Result<bool, Refusal> {
        let is_kept = self.store.state.versions[&version].guaranteed() > 0;
        // The unit is among those that the pool keeps for the volume.
        let (growth, units) = if is_kept {
            (MapGrowth::Kept, 0)
        } else {
            (MapGrowth::Change, u64::from(takes_unit))
        };
        self.changes().has_room(version, leaf, growth, units)
    }

    fn allocate_unit(&mut self, write: &Write) -> Result<u64, Refusal> {
        let version = &self.store.state.versions[&write.version];
        let own_guarantee = if version.is_thick {
            version.units.saturating_sub(version.owned)
        } else {
            0
        };
        let reserve = self.store.superblock.reserve_units;
        // Pages of maps may have taken a part of the reserve, but not of the guarantees. Where they
        // are counted, the rest of the reserve is for them.
        let is_counted = own_guarantee > 0 && self.store.state.has_externals();
        let reserved = if is_counted { reserve / 4 } else { reserve };
        let kept = reserved + self.store.state.guaranteed() - own_guarantee;
        let before = match write.place.checked_sub(1) {
            Some(before) => self
                .store
                .state
                .entry(write.version, before)
                .unwrap_or_default(),
            None => Default::default(),
        };
        let goal = before.next_unit();
        let unit = if self.store.space.free() > kept {
            let state = &self.store.state;
            let home = || state.first_unit(write.version);
            self.store
                .space
                .allocate_for(write.version, goal, reserved, home)
        } else {
            None
        };
        unit.ok_or_else(|| {
            self.store.settle.want(self.store.log.next_lsn() - 1);
            Refusal::NoSpace {
                returning: self.changes().is_space_returning(),
            }
        })
    }
}

/// A write without data of a request: it copies a place.
fn copy_of(version: VersionId, place: u64) -> Write {
    Write {
        version,
        place,
        granules: 0,
        checksums: Vec::new(),
        fua: false,
    }
}

/// True when the number of records that are not settled leaves room for one.
fn may_append(store: &mut Store) -> bool {
    let has_room = store.settle.unsettled_records() < store.limits.unsettled;
    if !has_room {
        store.settle.want(store.log.next_lsn() - 1);
    }
    has_room
}

/// The log takes this record only if it takes every record about a place.
fn largest_record() -> Record {
    Record::Map {
        version: VersionId(0),
        place: 0,
        unit: 0,
        granules: u16::MAX,
        checksums: vec![0; 16],
    }
}
