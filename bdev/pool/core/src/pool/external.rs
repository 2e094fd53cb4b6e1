//! Volumes that show the contents of an external device.
//!
//! The pool has such a device as a snapshot whose whole map is external. So a volume on it is a
//! clone, and has the rules of clones. A write covers the device's granules, a trim hides them for
//! good, a snapshot shares them. No place of the map ever returns to the device.
//!
//! | request | records |
//! |---|---|
//! | clone | EXTERNAL if the device is new, CLONE |
//! | set parent | EXTERNAL if the device is new, then as for a snapshot |
//!
//! A device without a volume goes as a deleted snapshot does ([`super::deletion`]).

use super::durable::Until;
use super::requests::Changes;
use super::{Attempt, MapGrowth};
use crate::format::record::{Identity, Record};
use crate::format::superblock::{Feature, MAX_NAME};
use crate::ids::{Token, VersionId};
use crate::interface::{Answer, External, Refusal};

impl Changes<'_> {
    pub(super) fn attempt_clone_external(
        &mut self,
        token: Token,
        device: &External,
        identity: &Identity,
    ) -> Result<Attempt, Refusal> {
        self.check_device(device)?;
        self.store.check_identities([identity])?;
        let clone = |source, version| Record::Clone {
            version,
            source,
            identity: identity.clone(),
            thick: false,
        };
        let Some(source) = self.external(device, clone(VersionId(0), VersionId(0)))? else {
            return Ok(Attempt::Wait);
        };
        let version = self.store.state.free_slot(&[]).ok_or(Refusal::TooMany)?;
        let record = clone(source, version);
        Ok(self.change(token, &record, Until::Settled, Answer::Created(version)))
    }

    pub(super) fn attempt_set_external(
        &mut self,
        token: Token,
        id: VersionId,
        device: &External,
    ) -> Result<Attempt, Refusal> {
        let outcome = self.prepare_external(token, id, device);
        if outcome.is_err() {
            self.durable.thaw(token);
        }
        outcome
    }

    fn prepare_external(
        &mut self,
        token: Token,
        id: VersionId,
        device: &External,
    ) -> Result<Attempt, Refusal> {
        self.check_device(device)?;
        let version = self.store.visible(id)?;
        let units = version.units.min(device.units);
        if version.is_fixed() || version.is_thick {
            return Err(Refusal::WrongKind);
        }
        if units == 0 {
            return Err(Refusal::OtherSize);
        }
        let parent = self.store.state.visible_parent(id);
        let parent = parent.and_then(|parent| self.store.state.versions.get(&parent));
        if parent.is_some_and(|of| of.is_external && of.identity.id == device.identity.id) {
            return Err(Refusal::SameParent);
        }
        if self.jobs.is_on(id) {
            return Err(Refusal::Changing);
        }
        let is_still = self.is_still(id, token);
        if !self.store.may_use(Feature::SetParent) || !is_still {
            return Ok(Attempt::Wait);
        }
        // A smaller volume has no place for the rest: what it grows by reads as zeroes.
        let device = External {
            units,
            ..device.clone()
        };
        let none = VersionId(0);
        let prepare = Record::Prepare {
            version: id,
            source: none,
            new: none,
        };
        match self.external(&device, prepare)? {
            Some(source) => self.begin_copies(token, id, source),
            None => Ok(Attempt::Wait),
        }
    }

    fn check_device(&self, device: &External) -> Result<(), Refusal> {
        let Identity { id, name } = &device.identity;
        let most = self.store.superblock.geometry.max_volume_units();
        let is_sound = (1..=most).contains(&device.units)
            && !id.is_nil()
            && (1..=MAX_NAME).contains(&name.len());
        is_sound.then_some(()).ok_or(Refusal::OutOfRange)
    }

    /// The version of a device, which becomes known if the log takes the record `next` after it.
    /// `None`: not now.
    fn external(&mut self, device: &External, next: Record) -> Result<Option<VersionId>, Refusal> {
        if !self.store.may_use(Feature::ExternalParents) || !self.store.log_takes(&next) {
            return Ok(None);
        }
        let found = self
            .store
            .state
            .find_external(device.identity.id, device.units);
        if found.is_some() {
            return Ok(found);
        }
        let version = self.store.state.free_slot(&[]).ok_or(Refusal::TooMany)?;
        if self.store.state.free_slot(&[version]).is_none() {
            return Err(Refusal::TooMany);
        }
        let nodes = self.store.state.nodes_of_external();
        if !self.has_room_for(nodes, MapGrowth::Split, 0)? {
            return Ok(None);
        }
        let record = Record::External {
            version,
            units: device.units,
            identity: device.identity.clone(),
        };
        if !self.store.log_takes(&record) {
            return Ok(None);
        }
        let lsn = self.store.append(&record);
        self.store.apply(lsn, &record);
        // Without a volume, the device goes again.
        self.deletion.search();
        Ok(Some(version))
    }
}
