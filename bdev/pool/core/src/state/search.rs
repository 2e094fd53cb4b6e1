//! Searches of a map. Each looks at a bounded number of leaves.

use super::State;
use crate::geometry::MAX_UNITS_PER_LEAF;
use crate::ids::{Generation, VersionId};
use crate::map::{LostNode, Part};

/// Leaves that one search looks at: 65,536 places, in a fraction of a millisecond.
const LEAVES: usize = if cfg!(test) {
    2
} else {
    65_536 / MAX_UNITS_PER_LEAF as usize
};

/// The outcome of a search for a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    Place(u64),
    /// None so far: go on from this place.
    Later(u64),
    Nothing,
}

impl State {
    /// The first leaf from a place on that is in the map, unreadable ones included. Its places may
    /// be empty.
    pub fn next_leaf(&self, id: VersionId, from: u64) -> Option<u64> {
        let tree = &self.versions[&id].tree;
        tree.next_present(self.shape(), self.leaf_of(from))
    }

    /// The first leaf with data beyond a smaller size of a volume, or none of whose places it has.
    pub fn next_leaf_beyond(&self, id: VersionId, units: u64) -> Option<u64> {
        let per_leaf = self.shape().units_per_leaf as u64;
        // Behind the end, a pool of an older version may have leaves without data.
        let is_within = |leaf: &u64| leaf * per_leaf < self.versions[&id].units;
        let leaf = self.next_leaf(id, units).filter(is_within)?;
        let is_beyond = leaf * per_leaf >= units;
        let has_data = |place| {
            let entry = self.entry(id, place);
            entry.map_or(true, |entry| !entry.is_empty())
        };
        // A leaf with the end of the volume stays.
        if is_beyond || (units..(leaf + 1) * per_leaf).any(has_data) {
            return Some(leaf);
        }
        self.next_leaf(id, (leaf + 1) * per_leaf).filter(is_within)
    }

    /// The first place from `from` on with a part above a generation.
    pub fn next_above(
        &self,
        id: VersionId,
        from: u64,
        above: Generation,
    ) -> Result<Found, LostNode> {
        self.next_part(id, from, |part, _, _| part.is_exclusive(above))
    }

    /// The first place from `from` on with a part that the version shares; with `ancestor`: that it
    /// has from there or from a version between.
    pub fn next_shared(
        &self,
        id: VersionId,
        from: u64,
        ancestor: Option<VersionId>,
    ) -> Result<Found, LostNode> {
        self.next_part(id, from, |part, floor, leaf| {
            let above = ancestor.map_or(0, |ancestor| self.floor(ancestor, leaf));
            !part.is_exclusive(floor) && part.generation > above
        })
    }

    fn next_part(
        &self,
        id: VersionId,
        from: u64,
        matches: impl Fn(&Part, Generation, u64) -> bool,
    ) -> Result<Found, LostNode> {
        let (shape, tree) = (self.shape(), &self.versions[&id].tree);
        let per_leaf = shape.units_per_leaf as u64;
        let mut next = tree.next_present(shape, self.leaf_of(from));
        for _ in 0..LEAVES {
            let Some(leaf) = next else {
                return Ok(Found::Nothing);
            };
            let floor = self.floor(id, leaf);
            let first = from.max(leaf * per_leaf);
            if let Some((part, end)) = tree.external_span(shape, leaf) {
                // The device is the oldest of the family, so one place stands for all.
                if matches(&part, floor, leaf) {
                    return Ok(Found::Place(first));
                }
                next = tree.next_present(shape, end);
                continue;
            }
            for place in first..(leaf + 1) * per_leaf {
                let entry = tree.entry(shape, place)?;
                if entry.parts().any(|part| matches(&part, floor, leaf)) {
                    return Ok(Found::Place(place));
                }
            }
            next = tree.next_present(shape, leaf + 1);
        }
        Ok(next.map_or(Found::Nothing, |leaf| Found::Later(leaf * per_leaf)))
    }
}
