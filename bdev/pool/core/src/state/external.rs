//! External devices: the oldest ancestors of volumes that show their contents.

use super::{ApplyError, State, Version};
use crate::format::record::Identity;
use crate::ids::VersionId;
use crate::map::{Part, Tree};

impl State {
    /// The external device that a version shows where no version of its family has data.
    pub fn external_parent(&self, id: VersionId) -> Option<VersionId> {
        let mut oldest = id;
        while let Some(parent) = self.versions.get(&oldest)?.parent {
            oldest = parent;
        }
        self.versions[&oldest].is_external.then_some(oldest)
    }

    /// The external devices of the pool, as versions.
    pub fn externals(&self) -> impl Iterator<Item = (VersionId, &Version)> {
        let versions = self.versions.iter().map(|(id, version)| (*id, version));
        versions.filter(|(_, version)| version.is_external && !version.is_hidden)
    }

    /// The version of an external device of this size.
    pub fn find_external(&self, device: uuid::Uuid, units: u64) -> Option<VersionId> {
        let is_it = |version: &Version| version.identity.id == device && version.units == units;
        let mut found = self.externals().filter(|(_, version)| is_it(version));
        found.next().map(|(id, _)| id)
    }

    /// The first leaf with units of the pool at or after the place `from`.
    pub fn first_leaf_with_units(&self, id: VersionId, from: u64) -> Option<u64> {
        let tree = &self.versions[&id].tree;
        tree.next_difference(None, self.shape(), self.leaf_of(from))
    }

    pub(super) fn create_external(
        &mut self,
        id: VersionId,
        identity: &Identity,
        units: u64,
    ) -> Result<(), ApplyError> {
        if units == 0 || units > self.geometry.max_volume_units() {
            return Err(ApplyError::OutOfRange);
        }
        let generation = self.take_generation()?;
        let part = Part::external(generation, self.geometry.whole());
        let version = Version {
            identity: identity.clone(),
            parent: None,
            generation,
            is_snapshot: true,
            is_thick: false,
            is_hidden: false,
            is_read_only: false,
            is_external: true,
            units,
            pass: None,
            tree: Tree::external(self.shape(), part, units),
            owned: 0,
            hidden_at: 0,
        };
        // At most the nodes on the path to the end of the device.
        self.changed_nodes += self.geometry.levels as usize + 1;
        self.insert(id, version)
    }
}

impl Version {
    /// Users see it among the volumes and snapshots of the pool.
    pub fn is_visible(&self) -> bool {
        !self.is_hidden && !self.is_external
    }
}
