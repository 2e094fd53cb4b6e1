//! External devices: devices outside the pool that volumes are clones of. The metadata has one as a
//! *version* (a volume, a snapshot or an external device): the oldest ancestor of its clones, which
//! show its contents where neither they nor a snapshot between has data.

use super::{ApplyError, State, Version};
use crate::format::record::Identity;
use crate::ids::VersionId;
use crate::map::{LostNode, Node, Part, Tree};

/// The effect of an unmap on the map of a volume, a tree. A leaf maps a fixed number of *units* (64
/// KiB) of the volume; a node of the tree can stand for a range that is wholly on the external
/// device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnmapEffect {
    /// Nothing is mapped there, or the node cannot be read.
    None,
    /// The entries of a leaf change.
    Change,
    /// The range of a whole leaf that is on the external device is unmapped; it needs no leaf.
    Removal,
    /// A part of such a range is unmapped: the rest needs a leaf of its own.
    Split,
}

impl State {
    /// The external device that is the oldest ancestor of a version. `None`: the oldest ancestor is
    /// a volume or snapshot of the pool, or the version does not exist.
    pub fn external_parent(&self, id: VersionId) -> Option<VersionId> {
        let mut oldest = id;
        while let Some(parent) = self.versions.get(&oldest)?.parent {
            oldest = parent;
        }
        self.versions[&oldest].is_external.then_some(oldest)
    }

    /// The external devices of the pool, as versions, without those that are being deleted.
    pub fn externals(&self) -> impl Iterator<Item = (VersionId, &Version)> {
        let versions = self.versions.externals();
        let versions = versions.map(|id| (id, &self.versions[&id]));
        versions.filter(|(_, version)| !version.is_hidden)
    }

    /// True while the pool knows an external device, or a deletion of one is in progress.
    pub fn has_externals(&self) -> bool {
        self.versions.externals().len() > 0
    }

    /// The effect of an unmap of granules of one leaf on the nodes of the map.
    pub fn effect_of_unmap(&self, id: VersionId, first: u64, granules: u64) -> UnmapEffect {
        let per_unit = u64::from(self.geometry.granules_per_unit);
        let leaf = self.leaf_of(first / per_unit);
        let Some(version) = self.versions.get(&id) else {
            return UnmapEffect::None;
        };
        match version.tree.leaf(self.shape(), leaf) {
            Ok(Some(node)) if !matches!(**node, Node::External(_)) => UnmapEffect::Change,
            Ok(Some(_)) if granules == per_unit * u64::from(self.geometry.units_per_leaf) => {
                UnmapEffect::Removal
            }
            Ok(Some(_)) => UnmapEffect::Split,
            Ok(None) | Err(LostNode) => UnmapEffect::None,
        }
    }

    /// The version of the external device with this UUID and this size in units.
    pub fn find_external(&self, device: uuid::Uuid, units: u64) -> Option<VersionId> {
        let is_it = |version: &Version| version.identity.id == device && version.units == units;
        let mut found = self.externals().filter(|(_, version)| is_it(version));
        found.next().map(|(id, _)| id)
    }

    /// The first leaf with units of the pool, from the leaf of the volume's unit `from` on.
    pub fn first_leaf_with_units(&self, id: VersionId, from: u64) -> Option<u64> {
        let tree = &self.versions[&id].tree;
        tree.next_difference(None, self.shape(), self.leaf_of(from))
    }

    /// Most nodes with pages of a new external device: those on the path to its end.
    pub fn nodes_of_external(&self) -> usize {
        self.geometry.levels as usize + 1
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
            mapped: units,
            hidden_at: 0,
        };
        self.changed_nodes += self.nodes_of_external();
        self.insert(id, version)
    }
}

impl Version {
    /// True for volumes and snapshots that users see: neither hidden nor an external device.
    pub fn is_visible(&self) -> bool {
        !self.is_hidden && !self.is_external
    }
}
