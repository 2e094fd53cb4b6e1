//! Requests other than writes: their checks and their records.

use super::deletion::Deletion;
use super::discards::Discards;
use super::durable::{Durable, Until};
use super::jobs::{Jobs, Work};
use super::store::Store;
use super::writes::Writes;
use super::{Attempt, MapGrowth, Pool, Purpose};
use crate::format::record::{Cut, Identity, MAX_SNAPSHOTS, Record};
use crate::ids::{Token, VersionId};
use crate::interface::{Answer, Refusal, Request};
use crate::mutation::Mutation;
use crate::state::UnmapEffect;

impl Pool {
    /// The parts that requests about versions change.
    pub(super) fn changes(&mut self) -> Changes<'_> {
        Changes {
            store: &mut self.store,
            writes: &self.writes,
            durable: &mut self.durable,
            deletion: &mut self.deletion,
            discards: &self.discards,
            jobs: &mut self.jobs,
        }
    }

    pub(super) fn attempt(&mut self, token: Token, request: &Request) -> Attempt {
        if !self.store.has_root {
            return Attempt::Wait;
        }
        if self.store.exporting.is_some() {
            return Refusal::Exported.into();
        }
        let outcome = match request {
            Request::Write(write) => return self.attempt_write(token, write),
            Request::Flush => {
                let skip = Mutation::ForgetFlush.is_active();
                self.store.flush(Purpose::RequestFlush(token), skip);
                return Attempt::Begun;
            }
            Request::Unmap {
                version,
                first,
                granules,
            } => self
                .changes()
                .attempt_unmap(token, *version, *first, *granules),
            Request::Create {
                identity,
                units,
                thick,
            } => self
                .changes()
                .attempt_create(token, identity, *units, *thick),
            Request::Snapshot(cuts) => self.changes().attempt_snapshot(token, cuts),
            Request::Clone {
                source,
                identity,
                thick,
            } => self
                .changes()
                .attempt_clone(token, *source, identity, *thick),
            Request::CloneExternal { device, identity } => self
                .changes()
                .attempt_clone_external(token, device, identity),
            Request::SetExternal { version, device } => {
                self.changes().attempt_set_external(token, *version, device)
            }
            Request::Resize { version, units } => {
                self.changes().attempt_resize(token, *version, *units)
            }
            Request::Rename { version, name } => {
                self.changes().attempt_rename(token, *version, name)
            }
            Request::Restore { version, source } => {
                self.changes().attempt_restore(token, *version, *source)
            }
            Request::Inflate { version } => self.changes().attempt_inflate(token, *version),
            Request::Decouple { version } => self.changes().attempt_decouple(token, *version),
            Request::SetParent { version, source } => {
                self.changes().attempt_set_parent(token, *version, *source)
            }
            Request::ReadOnly { version } => self.changes().attempt_read_only(token, *version),
            Request::Copy {
                version,
                from,
                above,
                place,
            } => self.attempt_copy(token, (*version, *from), *above, *place),
            Request::Fill { version, place } => self.attempt_fill(token, *version, *place),
            Request::Grow { disk, disk_bytes } => {
                self.store.attempt_grow(token, *disk, *disk_bytes)
            }
            Request::AddDisk { id, disk_bytes } => {
                self.store.attempt_add_disk(token, *id, *disk_bytes)
            }
            Request::RemoveDisk { disk } => self.removal().attempt_remove_disk(token, *disk),
            Request::KeepDisk { disk } => self.removal().attempt_keep_disk(token, *disk),
            Request::RenamePool { name } => self.store.attempt_name(token, name),
            Request::Check => return self.attempt_check(token),
            Request::Export => Ok(self.attempt_export(token)),
            Request::Delete { version } => self.changes().attempt_delete(token, *version),
            Request::Clear { version, place } => {
                self.changes().attempt_clear(token, *version, *place)
            }
        };
        outcome.unwrap_or_else(Attempt::Refused)
    }

    /// Closes the pool when nothing else is in it. A check ends without a report.
    fn attempt_export(&mut self, token: Token) -> Attempt {
        self.checking.stop();
        let is_still = self.leaving.pause();
        let is_quiet =
            is_still && self.writes.is_idle() && self.durable.is_empty() && self.jobs.is_empty();
        let has_root = self.store.next_root.is_empty();
        if !is_quiet || !has_root || !self.checking.is_idle() {
            return Attempt::Wait;
        }
        self.store.exporting = Some(token);
        self.store.want_root();
        Attempt::Begun
    }
}

/// The parts of a pool that requests about versions change.
pub(super) struct Changes<'a> {
    pub store: &'a mut Store,
    pub writes: &'a Writes,
    pub durable: &'a mut Durable,
    pub deletion: &'a mut Deletion,
    pub discards: &'a Discards,
    pub jobs: &'a mut Jobs,
}

impl Changes<'_> {
    /// Appends and applies a record that was checked, if the log takes it.
    pub(super) fn change(
        &mut self,
        token: Token,
        record: &Record,
        until: Until,
        answer: Answer,
    ) -> Attempt {
        if !self.store.log_takes(record) {
            return Attempt::Wait;
        }
        let lsn = self.store.append(record);
        self.store.apply(lsn, record);
        if until == Until::Settled {
            self.store.settle.want(lsn);
        }
        self.durable.wait(token, lsn, until, answer);
        Attempt::Begun
    }

    fn attempt_unmap(
        &mut self,
        token: Token,
        id: VersionId,
        first: u64,
        granules: u64,
    ) -> Result<Attempt, Refusal> {
        let places = self.store.check_unmap(id, first, granules)?;
        let leaf = self.store.state.leaf_of(places.start);
        if self.writes.occupies(id, places) || self.deletion.holds(id, leaf) {
            return Ok(Attempt::Wait);
        }
        let growth = match self.store.state.effect_of_unmap(id, first, granules) {
            UnmapEffect::None => {
                self.answer_when_logged(token);
                return Ok(Attempt::Begun);
            }
            UnmapEffect::Change => MapGrowth::Change,
            UnmapEffect::Removal => MapGrowth::Removal,
            UnmapEffect::Split => MapGrowth::Split,
        };
        if !self.has_room(id, leaf, growth, 0)? {
            return Ok(Attempt::Wait);
        }
        let record = Record::Unmap {
            version: id,
            first,
            granules,
        };
        Ok(self.change(token, &record, Until::Logged, Answer::Done))
    }

    /// Answers a request that finds nothing to change. The record that left nothing may not be on
    /// the disk yet: without it, a loss of power would bring old data back after this answer.
    fn answer_when_logged(&mut self, token: Token) {
        if Mutation::UnmapUnlogged.is_active() {
            return self.store.answer(token, Ok(Answer::Done));
        }
        let last = self.store.log.next_lsn() - 1;
        self.durable.wait(token, last, Until::Logged, Answer::Done);
        self.store.has_news = true;
    }

    fn attempt_create(
        &mut self,
        token: Token,
        identity: &Identity,
        units: u64,
        thick: bool,
    ) -> Result<Attempt, Refusal> {
        self.store.check_identities([identity])?;
        if units > self.store.superblock.geometry.max_volume_units() {
            return Err(Refusal::OutOfRange);
        }
        self.check_guarantee(if thick { units } else { 0 })?;
        let version = self.store.state.free_slot(&[]).ok_or(Refusal::TooMany)?;
        let record = Record::Create {
            version,
            units,
            identity: identity.clone(),
            thick,
        };
        Ok(self.change(token, &record, Until::Settled, Answer::Created(version)))
    }

    fn attempt_snapshot(
        &mut self,
        token: Token,
        wanted: &[(VersionId, Identity)],
    ) -> Result<Attempt, Refusal> {
        let outcome = self.snapshot(token, wanted);
        if !matches!(outcome, Ok(Attempt::Wait)) {
            self.durable.thaw(token);
        }
        outcome
    }

    fn snapshot(
        &mut self,
        token: Token,
        wanted: &[(VersionId, Identity)],
    ) -> Result<Attempt, Refusal> {
        if wanted.is_empty() || wanted.len() > MAX_SNAPSHOTS {
            return Err(Refusal::OutOfRange);
        }
        self.store
            .check_identities(wanted.iter().map(|(_, identity)| identity))?;
        let mut cuts: Vec<Cut> = Vec::new();
        let (mut taken, mut shared) = (Vec::new(), 0);
        for (volume, identity) in wanted {
            let version = self.store.visible(*volume)?;
            if self.jobs.copies_for(*volume) {
                return Err(Refusal::Changing);
            }
            if version.is_fixed() || cuts.iter().any(|cut| cut.volume == *volume) {
                return Err(Refusal::WrongKind);
            }
            // A thick volume needs its size once more.
            shared += version.owned * u64::from(version.is_thick);
            let snapshot = self.store.state.free_slot(&taken).ok_or(Refusal::TooMany)?;
            taken.push(snapshot);
            cuts.push(Cut {
                volume: *volume,
                snapshot,
                identity: identity.clone(),
            });
        }
        self.check_guarantee(shared)?;
        let mut is_ready = true;
        for (volume, _) in wanted {
            is_ready &= self.durable.freeze(*volume, token);
            is_ready &= !self.writes.is_busy(*volume) || Mutation::SnapshotWithoutDrain.is_active();
        }
        let record = Record::Snapshot { cuts };
        if !is_ready || !self.store.log_takes(&record) {
            return Ok(Attempt::Wait);
        }
        let epoch = self.store.grace.request();
        for (volume, _) in wanted {
            self.durable.note_cut(*volume, epoch);
        }
        Ok(self.change(
            token,
            &record,
            Until::Cut { epoch },
            Answer::Snapshots(taken),
        ))
    }

    fn attempt_clone(
        &mut self,
        token: Token,
        source: VersionId,
        identity: &Identity,
        thick: bool,
    ) -> Result<Attempt, Refusal> {
        self.store.check_identities([identity])?;
        let of = self.store.visible(source)?;
        if !of.is_fixed() || self.durable.is_creating(source) {
            return Err(Refusal::WrongKind);
        }
        // Writes from before a volume became read-only may be in flight.
        if self.durable.is_cut(source) && of.is_read_only {
            return Ok(Attempt::Wait);
        }
        self.check_guarantee(if thick { of.units } else { 0 })?;
        let version = self.store.state.free_slot(&[]).ok_or(Refusal::TooMany)?;
        let record = Record::Clone {
            version,
            source,
            identity: identity.clone(),
            thick,
        };
        Ok(self.change(token, &record, Until::Settled, Answer::Created(version)))
    }

    fn attempt_resize(
        &mut self,
        token: Token,
        id: VersionId,
        units: u64,
    ) -> Result<Attempt, Refusal> {
        let version = self.store.visible(id)?;
        if version.is_fixed() {
            return Err(Refusal::WrongKind);
        }
        if units > self.store.superblock.geometry.max_volume_units() {
            return Err(Refusal::OutOfRange);
        }
        let more = units.saturating_sub(version.units) * u64::from(version.is_thick);
        let is_smaller = units < version.units;
        if self.jobs.is_on(id) {
            return Ok(Attempt::Wait);
        }
        self.check_guarantee(more)?;
        if is_smaller {
            if self.writes.is_busy(id) {
                return Ok(Attempt::Wait);
            }
            if self.store.state.next_leaf_beyond(id, units).is_some() {
                self.jobs.begin(token, id, Work::Shrink { units });
                self.store.has_news = true;
                return Ok(Attempt::Begun);
            }
        }
        let record = Record::Resize { version: id, units };
        Ok(self.change(token, &record, Until::Settled, Answer::Done))
    }

    fn attempt_delete(&mut self, token: Token, id: VersionId) -> Result<Attempt, Refusal> {
        self.store.visible(id)?;
        if self.jobs.is_on(id) {
            return Err(Refusal::Changing);
        }
        if self.durable.is_creating(id) || self.durable.is_frozen(id) {
            return Err(Refusal::WrongKind);
        }
        if self.writes.is_busy(id) {
            return Ok(Attempt::Wait);
        }
        let record = Record::Hide { version: id };
        let attempt = self.change(token, &record, Until::Settled, Answer::Done);
        self.deletion.search();
        Ok(attempt)
    }

    fn attempt_rename(
        &mut self,
        token: Token,
        id: VersionId,
        name: &str,
    ) -> Result<Attempt, Refusal> {
        self.store.check_name(id, name)?;
        let record = Record::Rename {
            version: id,
            name: name.to_owned(),
        };
        Ok(self.change(token, &record, Until::Settled, Answer::Done))
    }

    fn attempt_restore(
        &mut self,
        token: Token,
        id: VersionId,
        source: VersionId,
    ) -> Result<Attempt, Refusal> {
        let version = self.store.visible(id)?;
        let snapshot = self.store.visible(source)?;
        if version.is_fixed() || !snapshot.is_snapshot || self.durable.is_creating(source) {
            return Err(Refusal::WrongKind);
        }
        if self.jobs.is_on(id) {
            return Err(Refusal::Changing);
        }
        // The guarantee of a thick volume begins anew, with the size of the snapshot.
        let guaranteed = if version.is_thick {
            (snapshot.units + version.owned).saturating_sub(version.units)
        } else {
            0
        };
        self.check_guarantee(guaranteed)?;
        if self.writes.is_busy(id) || self.durable.is_frozen(id) {
            return Ok(Attempt::Wait);
        }
        let old = self.store.state.free_slot(&[]).ok_or(Refusal::TooMany)?;
        let record = Record::Restore {
            version: id,
            source,
            old,
        };
        let attempt = self.change(token, &record, Until::Settled, Answer::Done);
        self.deletion.search();
        Ok(attempt)
    }

    fn attempt_inflate(&mut self, token: Token, id: VersionId) -> Result<Attempt, Refusal> {
        if self.store.visible(id)?.is_fixed() {
            return Err(Refusal::WrongKind);
        }
        if self.jobs.is_on(id) || self.durable.is_frozen(id) {
            return Ok(Attempt::Wait);
        }
        self.jobs.begin(token, id, Work::Inflate { next: 0 });
        self.store.has_news = true;
        Ok(Attempt::Begun)
    }

    fn attempt_clear(
        &mut self,
        token: Token,
        id: VersionId,
        place: u64,
    ) -> Result<Attempt, Refusal> {
        let version = self.store.visible(id)?;
        if place >= version.units {
            return Err(Refusal::OutOfRange);
        }
        if self.store.state.entry(id, place).is_ok() {
            return Err(Refusal::WrongKind);
        }
        let leaf = self.store.state.leaf_of(place);
        if !self.has_room(id, leaf, MapGrowth::Removal, 0)? {
            return Ok(Attempt::Wait);
        }
        let record = Record::Clear { version: id, leaf };
        Ok(self.change(token, &record, Until::Logged, Answer::Done))
    }

    /// True when space will come back without a request.
    pub(super) fn is_space_returning(&self) -> bool {
        self.store.space.in_limbo() > 0 || !self.deletion.is_idle() || !self.discards.is_idle()
    }

    /// Checks that the pool can promise so many units more.
    fn check_guarantee(&mut self, units: u64) -> Result<(), Refusal> {
        let (free, kept) = self.store.free_units();
        if units > 0 && free < kept + units {
            self.store.settle.want(self.store.log.next_lsn() - 1);
            return Err(Refusal::NoSpace {
                returning: self.is_space_returning(),
            });
        }
        Ok(())
    }
}
