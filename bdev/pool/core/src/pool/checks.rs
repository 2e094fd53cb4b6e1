//! Checks requests against the pool's metadata: volumes and snapshots exist, new names and ids are
//! unique, ranges are valid. A failed check returns a [`Refusal`]. No check changes the metadata.

use super::store::Store;
use crate::format::record::Identity;
use crate::format::superblock::MAX_NAME;
use crate::ids::{MAX_VERSIONS, VersionId};
use crate::interface::{Refusal, Write};
use crate::mutation::Mutation;
use crate::state::Version;

impl Store {
    /// The volume or snapshot with this id, unless it is deleted or an external device.
    pub(super) fn visible(&self, id: VersionId) -> Result<&Version, Refusal> {
        let version = self.state.versions.get(&id);
        let version = version.filter(|version| version.is_visible());
        version.ok_or(Refusal::UnknownVersion)
    }

    /// Checks the names and ids of new volumes and snapshots: they are valid, and used neither by
    /// existing ones nor twice in `new`. Checks also that the pool can hold so many.
    pub(super) fn check_identities<'a>(
        &self,
        new: impl IntoIterator<Item = &'a Identity>,
    ) -> Result<(), Refusal> {
        let mut seen: Vec<&Identity> = Vec::new();
        for identity in new {
            if identity.name.is_empty() || identity.name.len() > MAX_NAME || identity.id.is_nil() {
                return Err(Refusal::OutOfRange);
            }
            let existing = self.state.versions.values();
            let existing = existing.filter(|version| version.is_visible());
            let mut others = existing
                .map(|version| &version.identity)
                .chain(seen.iter().copied());
            if others.any(|other| other.id == identity.id || other.name == identity.name) {
                return Err(Refusal::Exists);
            }
            seen.push(identity);
        }
        if self.state.versions.len() + seen.len() > MAX_VERSIONS as usize {
            Err(Refusal::TooMany)
        } else {
            Ok(())
        }
    }

    /// True when an unsettled record is about one of these granules of a unit. Nothing may
    /// overwrite such a granule: a recovery compares it with the record's checksum. `valid`: the
    /// granules that the map has there; only the tests' fault [`Mutation::OverwriteAfterUnmap`]
    /// uses it.
    pub(super) fn is_unsettled(&self, unit: u64, granules: u16, valid: u16) -> bool {
        let granules = if Mutation::OverwriteAfterUnmap.is_active() {
            granules & valid
        } else {
            granules
        };
        self.settle.is_unsettled(unit, granules) && !Mutation::OverwriteUnsettled.is_active()
    }

    /// Checks a write: the volume is writable, its place and granules exist, and each granule has a
    /// checksum.
    pub(super) fn check_write(&self, write: &Write) -> Result<(), Refusal> {
        let version = self.visible(write.version)?;
        if version.is_fixed() {
            return Err(Refusal::WrongKind);
        }
        let whole = self.superblock.geometry.whole();
        let is_sound = write.place < version.units
            && write.granules != 0
            && write.granules & !whole == 0
            && write.checksums.len() == write.granules.count_ones() as usize;
        is_sound.then_some(()).ok_or(Refusal::OutOfRange)
    }

    /// Checks a new name of a volume or snapshot: it is valid, and no other one has it.
    pub(super) fn check_name(&self, id: VersionId, name: &str) -> Result<(), Refusal> {
        self.visible(id)?;
        if name.is_empty() || name.len() > MAX_NAME {
            return Err(Refusal::OutOfRange);
        }
        let mut others = self.state.versions.iter();
        let is_taken = |other: &Version| other.is_visible() && other.identity.name == name;
        if others.any(|(of, other)| *of != id && is_taken(other)) {
            return Err(Refusal::Exists);
        }
        Ok(())
    }

    /// Checks an unmap of `granules` granules, from granule `first` of the volume on. The volume is
    /// writable, the range is inside it and in one leaf of its map, and the leaf is readable.
    /// Returns the places of the range.
    pub(super) fn check_unmap(
        &self,
        id: VersionId,
        first: u64,
        granules: u64,
    ) -> Result<std::ops::Range<u64>, Refusal> {
        let per_unit = u64::from(self.superblock.geometry.granules_per_unit);
        let version = self.visible(id)?;
        if version.is_fixed() {
            return Err(Refusal::WrongKind);
        }
        let end = first.checked_add(granules);
        let end = end.filter(|end| granules > 0 && *end <= version.units * per_unit);
        let end = end.ok_or(Refusal::OutOfRange)?;
        let places = first / per_unit..(end - 1) / per_unit + 1;
        let leaf = self.state.leaf_of(places.start);
        if leaf != self.state.leaf_of(places.end - 1) {
            return Err(Refusal::OutOfRange);
        }
        if self.state.entry(id, places.start).is_err() {
            return Err(Refusal::Damaged);
        }
        Ok(places)
    }
}
