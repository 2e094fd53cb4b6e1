//! Changes of a version's parent.

use super::{ApplyError, PREPARED, State, Version};
use crate::ids::{Generation, Lsn, VersionId};
use crate::mutation::Mutation;

impl State {
    /// The nearest ancestor that is not deleted: a snapshot, a volume or an external device.
    pub fn visible_parent(&self, id: VersionId) -> Option<VersionId> {
        let mut parent = self.versions.get(&id)?.parent;
        while let Some(id) = parent
            && self.versions.get(&id)?.is_hidden
        {
            parent = self.versions.get(&id)?.parent;
        }
        parent
    }

    /// The generation above which units count as the version's own in figures for users. Units of a
    /// deleted ancestor count too, whether a pass has merged them into the version yet or not.
    pub fn own_above(&self, id: VersionId) -> Generation {
        let parent = self.visible_parent(id);
        parent.map_or(0, |parent| self.versions[&parent].generation)
    }

    /// The ancestors of `id` in order, from its parent to the parent of `ancestor`. `None`:
    /// `ancestor` is not one of them.
    pub fn path_beyond(&self, id: VersionId, ancestor: VersionId) -> Option<Vec<VersionId>> {
        let mut path = Vec::new();
        let mut next = self.versions.get(&id)?.parent;
        while let Some(above) = next {
            path.push(above);
            next = self.versions.get(&above)?.parent;
            if path.ends_with(&[ancestor]) {
                path.extend(next);
                return Some(path);
            }
        }
        None
    }

    /// True when a pass changes the owners of units on this path.
    pub fn is_passed(&self, path: &[VersionId]) -> bool {
        let is_passed = |id| self.versions.get(id).is_some_and(|v| v.pass.is_some());
        path.iter().any(is_passed)
    }

    pub(super) fn decouple(
        &mut self,
        id: VersionId,
        ancestor: VersionId,
    ) -> Result<(), ApplyError> {
        let version = self.versions.get(&id).ok_or(ApplyError::UnknownVersion)?;
        let path = self.path_beyond(id, ancestor);
        let path = path.ok_or(ApplyError::UnknownVersion)?;
        let ignores = Mutation::DecoupleDuringPass.is_active();
        if version.is_fixed() || (self.is_passed(&path) && !ignores) {
            return Err(ApplyError::WrongKind);
        }
        let next = self.versions[&ancestor].parent;
        let next = next.filter(|_| !Mutation::DecoupleFromAll.is_active());
        self.versions.set_parent(id, next);
        Ok(())
    }

    pub(super) fn prepare(
        &mut self,
        id: VersionId,
        source: VersionId,
        new: VersionId,
    ) -> Result<(), ApplyError> {
        let version = self.versions.get(&id).ok_or(ApplyError::UnknownVersion)?;
        let identity = version.identity.clone();
        let snapshot = self.versions.get(&source);
        let snapshot = snapshot.ok_or(ApplyError::UnknownVersion)?;
        if version.is_fixed() || !snapshot.is_snapshot || snapshot.is_hidden {
            return Err(ApplyError::WrongKind);
        }
        let prepared = Version {
            identity,
            parent: Some(source),
            generation: self.next_generation,
            // An external device may have fewer units.
            units: version.units,
            is_snapshot: false,
            is_external: false,
            is_hidden: true,
            hidden_at: PREPARED,
            owned: 0,
            ..snapshot.clone()
        };
        self.take_generation()?;
        self.insert(new, prepared)
    }

    pub(super) fn adopt(
        &mut self,
        lsn: Lsn,
        id: VersionId,
        new: VersionId,
    ) -> Result<(), ApplyError> {
        let known = |id| self.versions.get(&id).ok_or(ApplyError::UnknownVersion);
        let (old, prepared) = (known(id)?.clone(), known(new)?.clone());
        if old.is_fixed() || old.is_hidden || old.is_thick || prepared.pass.is_some() {
            return Err(ApplyError::WrongKind);
        }
        // A request may have renamed the volume meanwhile.
        let adopted = Version {
            identity: old.identity.clone(),
            is_hidden: false,
            hidden_at: 0,
            ..prepared
        };
        let hidden = Version {
            is_hidden: true,
            hidden_at: lsn,
            ..old
        };
        self.versions.insert(id, adopted);
        self.versions.insert(new, hidden);
        Ok(())
    }
}
