//! The map of an external device: a block device outside of the pool, of which volumes are clones.
//! One shared node says that all places below it are on the device, so the map is small.

use std::sync::Arc;

use super::entry::{Entry, Part};
use super::tree::{Node, Shape, Tree, interior, leaf_of};

impl Tree {
    /// A map whose first `places` places are on an external device. `part`: the entry of each
    /// place.
    pub fn external(shape: Shape, part: Part, places: u64) -> Self {
        let whole = Arc::new(Node::External(part));
        Self {
            root: node(&whole, part, shape, shape.levels, places),
        }
    }
}

/// The node at `levels` above the leaves, of which the first `places` places are external. `None`:
/// it has none. The root is an interior node, or `None`.
fn node(
    whole: &Arc<Node>,
    part: Part,
    shape: Shape,
    levels: u32,
    places: u64,
) -> Option<Arc<Node>> {
    let per_leaf = shape.units_per_leaf as u64;
    if places == 0 {
        return None;
    }
    if places >= shape.span(levels) * per_leaf && levels < shape.levels {
        return Some(Arc::clone(whole));
    }
    if levels == 0 {
        let mut entries = vec![Entry::default(); shape.units_per_leaf];
        for entry in entries.iter_mut().take(places as usize) {
            entry.own = part;
        }
        return Some(Arc::new(leaf_of(entries)));
    }
    let below = shape.span(levels - 1) * per_leaf;
    let children = (0..shape.fan_out as u64).map(|at| {
        let places = places.saturating_sub(at * below).min(below);
        node(whole, part, shape, levels - 1, places)
    });
    Some(Arc::new(interior(children.collect())))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape {
        fan_out: 2,
        levels: 2,
        units_per_leaf: 2,
    };

    /// Every size covers exactly its places, and a change of one place leaves the others as they
    /// were. A copy keeps its contents.
    #[test]
    fn an_external_map_covers_its_places() {
        let part = Part::external(3, 0b11);
        for places in 0..=8 {
            let tree = Tree::external(SHAPE, part, places);
            let is_there = |tree: &Tree, place| {
                let entry = tree.entry(SHAPE, place).unwrap();
                assert!(entry.is_empty() || entry.own == part);
                !entry.is_empty()
            };
            for place in 0..8 {
                assert_eq!(
                    is_there(&tree, place),
                    place < places,
                    "{place} of {places}"
                );
            }
            for changed in 0..places {
                let mut other = tree.clone();
                let (entries, copied) = other.change(SHAPE, changed / 2).unwrap();
                assert!(copied > 0);
                entries[(changed % 2) as usize] = Entry::default();
                for place in 0..8 {
                    let expected = place < places && place != changed;
                    assert_eq!(is_there(&other, place), expected, "{place} of {places}");
                    assert_eq!(is_there(&tree, place), place < places);
                }
            }
            let leaves = (0..4).filter(|leaf| tree.next_present(SHAPE, *leaf) == Some(*leaf));
            assert_eq!(leaves.count() as u64, places.div_ceil(2));
        }
    }

    /// Leaves of an external map have no units, so a search for differences finds those only that
    /// have entries of their own.
    #[test]
    fn differences_are_leaves_with_entries() {
        let tree = Tree::external(SHAPE, Part::external(3, 0b11), 8);
        assert_eq!(tree.next_difference(None, SHAPE, 0), None);
        let mut other = tree.clone();
        other.change(SHAPE, 2).unwrap().0[0] = Entry::default();
        assert_eq!(other.next_difference(Some(&tree), SHAPE, 0), Some(2));
        assert_eq!(other.next_difference(Some(&tree), SHAPE, 3), None);
        assert_eq!(tree.next_difference(Some(&other), SHAPE, 0), None);
    }
}
