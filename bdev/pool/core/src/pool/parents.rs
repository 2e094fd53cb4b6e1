//! Requests that change a volume's parent, and the one that ends its changes.
//!
//! | request | steps | end |
//! |---|---|---|
//! | decouple | a copy of each place that has units of the ancestor | DECOUPLE |
//! | set parent | PREPARE, then a copy of each place that the volume owns | ADOPT |
//! | read-only | records in flight end, as for a snapshot | READONLY |

use super::Attempt;
use super::durable::Until;
use super::jobs::Work;
use super::requests::Changes;
use crate::format::record::Record;
use crate::format::superblock::Feature;
use crate::ids::{Token, VersionId};
use crate::interface::{Answer, Refusal};
use crate::mutation::Mutation;

impl Changes<'_> {
    pub(super) fn attempt_decouple(
        &mut self,
        token: Token,
        id: VersionId,
    ) -> Result<Attempt, Refusal> {
        if self.store.visible(id)?.is_fixed() {
            return Err(Refusal::WrongKind);
        }
        let ancestor = self
            .store
            .state
            .visible_parent(id)
            .ok_or(Refusal::NoParent)?;
        if self.jobs.is_on(id) || self.jobs.is_on(ancestor) || self.durable.is_creating(ancestor) {
            return Err(Refusal::Changing);
        }
        if !self.store.may_use(Feature::Decouple) || self.durable.is_frozen(id) {
            return Ok(Attempt::Wait);
        }
        let work = Work::Decouple {
            ancestor,
            base: self.store.state.versions[&ancestor].parent,
            next: 0,
        };
        self.jobs.begin(token, id, work);
        self.store.has_news = true;
        Ok(Attempt::Begun)
    }

    pub(super) fn attempt_set_parent(
        &mut self,
        token: Token,
        id: VersionId,
        source: VersionId,
    ) -> Result<Attempt, Refusal> {
        let outcome = self.prepare(token, id, source);
        if outcome.is_err() {
            self.durable.thaw(token);
        }
        outcome
    }

    /// Begins to copy what the volume owns. Its new records wait until the end.
    fn prepare(
        &mut self,
        token: Token,
        id: VersionId,
        source: VersionId,
    ) -> Result<Attempt, Refusal> {
        let (version, snapshot) = (self.store.visible(id)?, self.store.visible(source)?);
        if version.is_fixed() || version.is_thick || !snapshot.is_snapshot {
            return Err(Refusal::WrongKind);
        }
        if version.units != snapshot.units {
            return Err(Refusal::OtherSize);
        }
        if self.store.state.visible_parent(id) == Some(source) {
            return Err(Refusal::SameParent);
        }
        if self.jobs.is_on(id) || self.jobs.is_on(source) || self.durable.is_creating(source) {
            return Err(Refusal::Changing);
        }
        let is_still = self.is_still(id, token);
        if !self.store.may_use(Feature::SetParent) || !is_still {
            return Ok(Attempt::Wait);
        }
        self.begin_copies(token, id, source)
    }

    /// Freezes a volume. Returns true when no I/O of it is in flight.
    pub(super) fn is_still(&mut self, id: VersionId, token: Token) -> bool {
        self.durable.freeze(id, token) && !self.writes.is_busy(id) && !self.durable.is_cut(id)
    }

    /// Prepares the new contents of a volume that is still, and begins to copy its own granules.
    pub(super) fn begin_copies(
        &mut self,
        token: Token,
        id: VersionId,
        source: VersionId,
    ) -> Result<Attempt, Refusal> {
        let new = self.store.state.free_slot(&[]).ok_or(Refusal::TooMany)?;
        let record = Record::Prepare {
            version: id,
            source,
            new,
        };
        if !self.store.log_takes(&record) {
            return Ok(Attempt::Wait);
        }
        let prepared = self.store.append(&record);
        self.store.apply(prepared, &record);
        let work = Work::SetParent {
            source,
            new,
            above: self.store.state.own_above(id),
            prepared,
            next: 0,
        };
        self.jobs.begin(token, id, work);
        self.store.has_news = true;
        Ok(Attempt::Begun)
    }

    pub(super) fn attempt_read_only(
        &mut self,
        token: Token,
        id: VersionId,
    ) -> Result<Attempt, Refusal> {
        let outcome = self.end_changes(token, id);
        if !matches!(outcome, Ok(Attempt::Wait)) {
            self.durable.thaw(token);
        }
        outcome
    }

    fn end_changes(&mut self, token: Token, id: VersionId) -> Result<Attempt, Refusal> {
        let version = self.store.visible(id)?;
        if version.is_snapshot {
            return Err(Refusal::WrongKind);
        }
        if version.is_read_only {
            // Writes from before the first such request may be in flight, and its record too.
            if self.durable.is_cut(id) {
                return Ok(Attempt::Wait);
            }
            let last = self.store.log.next_lsn() - 1;
            let epoch = self.store.grace.ended();
            self.durable
                .wait(token, last, Until::Cut { epoch }, Answer::Done);
            self.store.has_news = true;
            return Ok(Attempt::Begun);
        }
        if self.jobs.is_on(id) {
            return Err(Refusal::Changing);
        }
        let is_ready = self.durable.freeze(id, token) && !self.writes.is_busy(id);
        let record = Record::ReadOnly { version: id };
        let may_use = self.store.may_use(Feature::ReadOnly);
        if !is_ready || !may_use || !self.store.log_takes(&record) {
            return Ok(Attempt::Wait);
        }
        let epoch = self.store.grace.request();
        self.durable.note_cut(id, epoch);
        let skips = Mutation::ReadOnlyWithoutGrace.is_active();
        let until = if skips {
            Until::Settled
        } else {
            Until::Cut { epoch }
        };
        Ok(self.change(token, &record, until, Answer::Done))
    }
}
