//! The versions of a pool by id, with the children of each.
//!
//! A pool has tens of thousands of versions. Neither a pass nor a move may look at all of them to
//! find the children of one.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Deref;

use super::Version;
use crate::ids::VersionId;

/// Reads as a map. [`Versions::set_parent`] is the only way to change the parent of a version.
#[derive(Debug, Clone, Default)]
pub struct Versions {
    list: BTreeMap<VersionId, Version>,
    children: BTreeMap<VersionId, BTreeSet<VersionId>>,
    externals: BTreeSet<VersionId>,
}

impl Versions {
    /// Adds a version, or replaces one.
    pub fn insert(&mut self, id: VersionId, version: Version) {
        self.leave_parent(id);
        if let Some(parent) = version.parent {
            self.children.entry(parent).or_default().insert(id);
        }
        if version.is_external {
            self.externals.insert(id);
        } else {
            self.externals.remove(&id);
        }
        self.list.insert(id, version);
    }

    pub fn remove(&mut self, id: VersionId) -> Option<Version> {
        self.leave_parent(id);
        self.externals.remove(&id);
        self.list.remove(&id)
    }

    /// A version, to change anything but its parent and its kind.
    pub fn get_mut(&mut self, id: &VersionId) -> Option<&mut Version> {
        self.list.get_mut(id)
    }

    /// All versions, to change anything but their parents.
    pub fn values_mut(&mut self) -> impl Iterator<Item = &mut Version> {
        self.list.values_mut()
    }

    /// Returns false if there is no such version.
    pub fn set_parent(&mut self, id: VersionId, parent: Option<VersionId>) -> bool {
        self.leave_parent(id);
        let Some(version) = self.list.get_mut(&id) else {
            return false;
        };
        version.parent = parent;
        if let Some(parent) = parent {
            self.children.entry(parent).or_default().insert(id);
        }
        true
    }

    /// The external devices, hidden ones included.
    pub fn externals(&self) -> impl ExactSizeIterator<Item = VersionId> {
        self.externals.iter().copied()
    }

    /// The versions with this parent, in the order of their ids.
    pub fn children(&self, of: VersionId) -> impl ExactSizeIterator<Item = VersionId> {
        const NONE: &BTreeSet<VersionId> = &BTreeSet::new();
        self.children.get(&of).unwrap_or(NONE).iter().copied()
    }

    fn leave_parent(&mut self, id: VersionId) {
        let Some(parent) = self.list.get(&id).and_then(|version| version.parent) else {
            return;
        };
        if let Some(children) = self.children.get_mut(&parent) {
            children.remove(&id);
            if children.is_empty() {
                self.children.remove(&parent);
            }
        }
    }
}

impl Deref for Versions {
    type Target = BTreeMap<VersionId, Version>;

    fn deref(&self) -> &Self::Target {
        &self.list
    }
}

impl<'a> IntoIterator for &'a Versions {
    type Item = (&'a VersionId, &'a Version);
    type IntoIter = std::collections::btree_map::Iter<'a, VersionId, Version>;

    fn into_iter(self) -> Self::IntoIter {
        self.list.iter()
    }
}
