//! Moves units in the maps of all versions that share them, as when a disk leaves the pool.
//!
//! All versions that share a unit are relatives (a volume, its snapshots, their clones), and have
//! it at the same place.

use super::{ApplyError, State, Version};
use crate::format::record::PassKind;
use crate::ids::VersionId;
use crate::map::{LostNode, Node, Part, Rewritten};
use crate::mutation::Mutation;

/// The versions whose maps refer to a unit.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Users {
    /// In the order of their ids.
    pub versions: Vec<VersionId>,
    /// The one that the search found first.
    first: Option<VersionId>,
    /// Steps of the search: map entries compared with the unit, a measure of its cost.
    pub looks: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Relation {
    Uses,
    Lacks,
    /// The entry is unreadable, or no longer counts: the version is being freed, or merged into its
    /// child, which owns the entry now.
    Unknown,
}

impl State {
    /// The versions that have a unit at a place. The search for the first one begins at the id
    /// `near`.
    ///
    /// A version that shares a unit has it from its parent, which keeps it. So the users are
    /// connected: from one of them, parents and children lead to all others.
    pub fn users(&self, near: VersionId, place: u64, unit: u64) -> Users {
        let mut users = Users::default();
        let ids = self
            .versions
            .range(near..)
            .chain(self.versions.range(..near));
        let mut ids = ids.map(|(id, _)| *id);
        let first = ids.find(|id| {
            users.looks += 1;
            self.relation(*id, place, unit) == Relation::Uses
        });
        users.first = first;
        let Some(mut top) = first else {
            return users;
        };
        while let Some(parent) = self.versions[&top].parent
            && self.relation(parent, place, unit) != Relation::Lacks
        {
            users.looks += 1;
            top = parent;
        }
        let mut left = vec![(top, self.relation(top, place, unit))];
        while let Some((id, relation)) = left.pop() {
            if relation == Relation::Uses {
                users.versions.push(id);
            }
            for child in self.versions.children(id) {
                users.looks += 1;
                let relation = self.relation(child, place, unit);
                if relation != Relation::Lacks {
                    left.push((child, relation));
                }
            }
        }
        users.versions.sort_unstable();
        #[cfg(test)]
        self.check_users(&users, place, unit);
        users
    }

    /// Every simulation compares the users with those that a look at all versions finds.
    #[cfg(test)]
    fn check_users(&self, users: &Users, place: u64, unit: u64) {
        let uses = |id: &&VersionId| self.relation(**id, place, unit) == Relation::Uses;
        let all: Vec<VersionId> = self.versions.keys().filter(uses).copied().collect();
        let is_broken = Mutation::is_any_active();
        assert!(is_broken || all == users.versions, "{all:?} {users:?}");
    }

    fn relation(&self, id: VersionId, place: u64, unit: u64) -> Relation {
        let Some(version) = self.versions.get(&id) else {
            return Relation::Lacks;
        };
        if self.leaf_of(place) < first_leaf(version) {
            return Relation::Unknown;
        }
        match version.tree.entry(self.shape(), place) {
            Ok(entry) if entry.uses(unit) => Relation::Uses,
            Ok(_) => Relation::Lacks,
            Err(LostNode) => Relation::Unknown,
        }
    }

    /// The granules of a unit that at least one of these versions has at a place: bit n is granule
    /// n.
    pub fn granules_of_users(&self, users: &Users, place: u64, unit: u64) -> u16 {
        let entries = users
            .versions
            .iter()
            .filter_map(|id| self.entry(*id, place).ok());
        let parts = entries.flat_map(|entry| [entry.own, entry.second]);
        let parts = parts.filter(|part| !part.is_none() && part.unit == unit);
        parts.fold(0, |set, part| set | part.granules)
    }

    /// The first leaf of a version, from `from` on, that it does not share with its parent. Without
    /// leaves that a free or merge of the version has passed. A parent that is being merged into
    /// the version does not count. `None`: no such leaf, or no such version.
    pub fn next_own_leaf(&self, id: VersionId, from: u64) -> Option<u64> {
        let version = self.versions.get(&id)?;
        let from = from.max(first_leaf(version));
        let parent = version.parent.and_then(|id| self.versions.get(&id));
        // The child of a version that is being merged owns the units of that version.
        let parent = parent.filter(|parent| !matches!(parent.pass, Some((PassKind::Merge, _))));
        let parent = parent.map(|parent| &parent.tree);
        version.tree.next_difference(parent, self.shape(), from)
    }

    /// The parts of all entries of a leaf, each with its place. Panics if there is no version `id`.
    pub fn parts_of_leaf(&self, id: VersionId, leaf: u64) -> Result<Vec<(u64, Part)>, LostNode> {
        let first = leaf * self.shape().units_per_leaf as u64;
        let mut parts = Vec::new();
        let node = self.versions[&id].tree.leaf(self.shape(), leaf)?;
        if let Some(Node::Leaf(leaf)) = node.map(|node| &**node) {
            for (place, entry) in (first..).zip(&leaf.entries) {
                parts.extend(entry.parts().map(|part| (place, part)));
            }
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
        // Moves come in the order of versions: together, their searches look at each version once.
        let users = self.users(self.last_moved, place, from);
        self.last_moved = users.first.unwrap_or(self.last_moved);
        let mut users = users.versions;
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

    /// Marks the nodes stored on pages for which `leaves` returns true as changed, so that the next
    /// image of the map writes them to other pages.
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

/// The first leaf whose entries count. A free or merge of the version has passed the leaves before:
/// they are free, or belong to the child.
fn first_leaf(version: &Version) -> u64 {
    match version.pass {
        Some((PassKind::Free | PassKind::Merge, cursor)) => cursor,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::record::{Cut, Identity, Record};
    use crate::tests::rig::geometry;

    const SNAPSHOTS: u32 = 20_000;
    const VOLUME: VersionId = VersionId(0);

    /// A volume with as many snapshots. Each has a unit of its own at place 0, and all share the
    /// one at place 1.
    fn family() -> State {
        let mut state = State::new(geometry(2 * u64::from(SNAPSHOTS)));
        let identity = |number: u32| Identity {
            id: uuid::Uuid::from_u128(u128::from(number) + 1),
            name: number.to_string(),
        };
        let mut apply = |record| state.apply(1, &record, &mut Vec::new()).unwrap();
        apply(Record::Create {
            version: VOLUME,
            units: 4,
            identity: identity(0),
            thick: false,
        });
        let map = |place, unit| Record::Map {
            version: VOLUME,
            place,
            unit,
            granules: 0xf,
            checksums: Vec::new(),
        };
        apply(map(1, 0));
        for number in 1..=SNAPSHOTS {
            apply(map(0, u64::from(number)));
            let cut = Cut {
                volume: VOLUME,
                snapshot: VersionId(number),
                identity: identity(number),
            };
            apply(Record::Snapshot { cuts: vec![cut] });
        }
        state
    }

    /// Goal: to move a unit, the state looks at the versions that have it, however many others a
    /// pool has. Method: units of consecutive snapshots move; all looks are counted.
    #[test]
    fn a_move_looks_at_few_of_many_versions() {
        let mut state = family();
        for number in 1000..1100 {
            let (unit, near) = (u64::from(number), VersionId(number));
            let users = state.users(near, 0, unit);
            assert_eq!(users.versions, [near]);
            assert!(users.looks <= 4, "{users:?}");
            let record = Record::Move {
                place: 0,
                from: unit,
                to: u64::from(SNAPSHOTS) + unit,
            };
            // The replay of a log has no other hint than the move before.
            let looks = state.users(state.last_moved, 0, unit).looks;
            assert!(looks <= 4 || number == 1000, "{looks}");
            let mut released = Vec::new();
            state.apply(1, &record, &mut released).unwrap();
            assert_eq!(released, [unit]);
        }
        let shared = state.users(VersionId(77), 1, 0);
        assert_eq!(shared.versions.len() as u32, SNAPSHOTS + 1);
        assert!(shared.looks as u32 <= 3 * SNAPSHOTS, "{}", shared.looks);
    }
}
