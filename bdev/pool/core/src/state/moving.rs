//! Units that move to another disk, with all versions that share them.
//!
//! Position is identity: versions of a family have a unit at the same place, and no others have it.

use super::{ApplyError, State, Version};
use crate::format::record::PassKind;
use crate::ids::VersionId;
use crate::map::{LostNode, Part, Rewritten};
use crate::mutation::Mutation;

impl State {
    /// The versions that have a unit at a place.
    pub fn users(&self, place: u64, unit: u64) -> Vec<VersionId> {
        let (versions, leaf) = (self.versions.iter(), self.leaf_of(place));
        let users = versions.filter(|(_, version)| {
            if leaf < first_leaf(version) {
                return false;
            }
            let entry = version.tree.entry(self.shape(), place);
            entry.is_ok_and(|entry| entry.uses(unit))
        });
        users.map(|(id, _)| *id).collect()
    }

    /// The granules of a unit that one of these versions has at a place.
    pub fn granules_of_users(&self, users: &[VersionId], place: u64, unit: u64) -> u16 {
        let entries = users.iter().filter_map(|id| self.entry(*id, place).ok());
        let parts = entries.flat_map(|entry| [entry.own, entry.second]);
        let parts = parts.filter(|part| !part.is_none() && part.unit == unit);
        parts.fold(0, |set, part| set | part.granules)
    }

    /// The first leaf of a version from `from` on that its parent does not share.
    pub fn next_own_leaf(&self, id: VersionId, from: u64) -> Option<u64> {
        let version = self.versions.get(&id)?;
        let from = from.max(first_leaf(version));
        let parent = version.parent.and_then(|id| self.versions.get(&id));
        // The child of a version that is being merged owns the units of that version.
        let parent = parent.filter(|parent| !matches!(parent.pass, Some((PassKind::Merge, _))));
        let parent = parent.map(|parent| &parent.tree);
        version.tree.next_difference(parent, self.shape(), from)
    }

    /// The parts of a leaf, with their places.
    pub fn parts_of_leaf(&self, id: VersionId, leaf: u64) -> Result<Vec<(u64, Part)>, LostNode> {
        let per_leaf = self.shape().units_per_leaf as u64;
        let mut parts = Vec::new();
        for place in leaf * per_leaf..(leaf + 1) * per_leaf {
            let entry = self.entry(id, place)?;
            parts.extend(entry.parts().map(|part| (place, part)));
        }
        Ok(parts)
    }

    pub(super) fn relocate(
        &mut self,
        place: u64,
        from: u64,
        to: u64,
        released: &mut Vec<u64>,
    ) -> Result<(), ApplyError> {
        if from >= self.geometry.units() || to >= self.geometry.units() || from == to {
            return Err(ApplyError::OutOfRange);
        }
        let mut users = self.users(place, from);
        if Mutation::MoveOneVersion.is_active() {
            users.truncate(1);
        }
        let (shape, mut rewritten) = (self.shape(), Rewritten::default());
        let trees = users.iter().map(|id| {
            let tree = &self.versions[id].tree;
            rewritten.with_entry(tree, shape, place, &|entry| entry.relocate(from, to))
        });
        let trees: Vec<_> = trees.collect();
        for (id, tree) in users.iter().zip(trees) {
            self.version_mut(*id)?.tree = tree;
        }
        self.changed_nodes += rewritten.copied;
        if !users.is_empty() {
            released.push(from);
        }
        Ok(())
    }

    /// Makes every node with a page that `leaves` names a changed one: the next image writes it to
    /// another place.
    pub fn leave_pages(&mut self, leaves: impl Fn(u64) -> bool) {
        let mut rewritten = Rewritten::default();
        let versions = self.versions.iter();
        let trees = versions.filter_map(|(id, version)| {
            let tree = rewritten.without_pages(&version.tree, &leaves)?;
            Some((*id, tree))
        });
        let trees: Vec<_> = trees.collect();
        for (id, tree) in trees {
            if let Some(version) = self.versions.get_mut(&id) {
                version.tree = tree;
            }
        }
        self.changed_nodes += rewritten.copied;
    }
}

/// The first leaf whose entries count: a pass has visited the leaves before, which belong to the
/// child, or are free.
fn first_leaf(version: &Version) -> u64 {
    match version.pass {
        Some((PassKind::Free | PassKind::Merge, cursor)) => cursor,
        _ => 0,
    }
}
