//! All places of a version: a tree whose nodes versions share.
//!
//! A change copies the path from the root to its leaf, unless this tree alone has the nodes. So a
//! snapshot, a clone and the image of a checkpoint are copies of one pointer, and each keeps its
//! contents. A node that is on the disk knows its pages; a copy that a change made does not.
//!
//! When the last tree drops a node, its pages go to the [`PageGarbage`]. The images of the last two
//! checkpoints are such trees: so no page of theirs is reused.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use super::entry::{Entry, Part, count_mapped};
use crate::geometry::Geometry;
use crate::ids::{Lsn, Place};

/// Pages that no tree refers to any more.
#[derive(Debug, Clone, Default)]
pub struct PageGarbage(Arc<Mutex<Vec<u64>>>);

impl PageGarbage {
    pub fn take(&self) -> Vec<u64> {
        let mut pages = self.0.lock();
        std::mem::take(&mut pages)
    }

    fn give(&self, pages: [u64; 2]) {
        let mut garbage = self.0.lock();
        garbage.extend(pages);
    }
}

/// The two copies of a page on the disk. Dropping it puts both into the [`PageGarbage`].
#[derive(Debug)]
pub struct PagePair {
    pub place: Place,
    garbage: PageGarbage,
}

impl PagePair {
    pub fn new(place: Place, garbage: &PageGarbage) -> Self {
        Self {
            place,
            garbage: garbage.clone(),
        }
    }
}

impl Drop for PagePair {
    fn drop(&mut self) {
        self.garbage.give([self.place.a, self.place.b]);
    }
}

/// The pages of a node: a leaf with second units has two.
#[derive(Debug)]
pub struct NodePages {
    /// The checkpoint that wrote them.
    pub lsn: Lsn,
    pub first: PagePair,
    pub rest: Option<PagePair>,
}

#[derive(Debug)]
pub enum Node {
    Interior(Interior),
    Leaf(Leaf),
    /// All its places are this part of an external device. It has no page, at any level.
    External(Part),
    /// Both copies of the node are unreadable: its places answer errors.
    Lost {
        pages: OnceLock<NodePages>,
    },
}

#[derive(Debug, Default)]
pub struct Interior {
    pub children: Box<[Option<Arc<Node>>]>,
    pub pages: OnceLock<NodePages>,
}

#[derive(Debug, Default)]
pub struct Leaf {
    pub entries: Box<[Entry]>,
    /// Empty: not on the disk yet.
    pub pages: OnceLock<NodePages>,
}

impl Node {
    /// The pages that hold this node. `None`: it has changed, or needs none.
    pub fn pages(&self) -> Option<&NodePages> {
        match self {
            Self::Interior(node) => node.pages.get(),
            Self::Leaf(leaf) => leaf.pages.get(),
            Self::Lost { pages } => pages.get(),
            Self::External(_) => None,
        }
    }

    pub fn set_pages(&self, new: NodePages) {
        let pages = match self {
            Self::Interior(node) => &node.pages,
            Self::Leaf(leaf) => &leaf.pages,
            Self::Lost { pages } => pages,
            Self::External(_) => unreachable!("an external node has no page"),
        };
        pages.set(new).expect("a node is written once");
    }

    /// Places with data of a node, without its children. `levels`: of interior nodes below it.
    pub fn own_mapped(&self, shape: Shape, levels: u32) -> u64 {
        match self {
            Self::Leaf(leaf) => count_mapped(&leaf.entries),
            Self::External(_) => shape.span(levels) * shape.units_per_leaf as u64,
            Self::Interior(_) | Self::Lost { .. } => 0,
        }
    }

    /// The node, for a change: no longer the one on the disk.
    pub(super) fn changed(&self) -> Self {
        match self {
            Self::Interior(node) => Self::Interior(Interior {
                children: node.children.clone(),
                pages: OnceLock::new(),
            }),
            Self::Leaf(leaf) => Self::Leaf(Leaf {
                entries: leaf.entries.clone(),
                pages: OnceLock::new(),
            }),
            Self::Lost { .. } => Self::Lost {
                pages: OnceLock::new(),
            },
            Self::External(part) => Self::External(*part),
        }
    }
}

/// The path to the place has a node that is unreadable in both copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LostNode;

#[derive(Debug, Clone, Default)]
pub struct Tree {
    pub root: Option<Arc<Node>>,
}

/// The sizes of a tree.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    pub fan_out: usize,
    pub levels: u32,
    pub units_per_leaf: usize,
}

impl From<&Geometry> for Shape {
    fn from(geometry: &Geometry) -> Self {
        Self {
            fan_out: geometry.fan_out as usize,
            levels: geometry.levels,
            units_per_leaf: geometry.units_per_leaf as usize,
        }
    }
}

impl Shape {
    /// Leaves below a node with this many levels of interior nodes.
    pub fn span(self, levels: u32) -> u64 {
        (self.fan_out as u64).pow(levels)
    }

    pub(super) fn child(self, levels: u32, leaf: u64) -> usize {
        (leaf / self.span(levels - 1) % self.fan_out as u64) as usize
    }
}

impl Tree {
    /// The leaf with this number, or the external node that stands for it. `Ok(None)`: all its
    /// places are empty.
    pub fn leaf(&self, shape: Shape, leaf: u64) -> Result<Option<&Arc<Node>>, LostNode> {
        let mut node = self.root.as_ref();
        for levels in (1..=shape.levels).rev() {
            node = match node.map(|node| &**node) {
                None => return Ok(None),
                Some(Node::Lost { .. }) => return Err(LostNode),
                Some(Node::External(_)) => return Ok(node),
                Some(Node::Interior(interior)) => {
                    interior.children[shape.child(levels, leaf)].as_ref()
                }
                Some(Node::Leaf(_)) => unreachable!("leaves are at the bottom"),
            };
        }
        match node.map(|node| &**node) {
            Some(Node::Lost { .. }) => Err(LostNode),
            _ => Ok(node),
        }
    }

    /// The leaves below the lost node on the path to `leaf`. `None`: the path is readable.
    pub fn lost_span(&self, shape: Shape, leaf: u64) -> Option<Range<u64>> {
        if leaf >= shape.span(shape.levels) {
            return None;
        }
        let mut node = self.root.as_deref()?;
        for levels in (0..=shape.levels).rev() {
            match node {
                Node::Lost { .. } => {
                    let span = shape.span(levels);
                    let first = leaf / span * span;
                    return Some(first..first + span);
                }
                Node::Interior(interior) if levels > 0 => {
                    node = interior.children[shape.child(levels, leaf)].as_deref()?;
                }
                Node::Interior(_) | Node::Leaf(_) | Node::External(_) => return None,
            }
        }
        None
    }

    /// The external node that has a leaf: its part, and the first leaf behind it.
    pub fn external_span(&self, shape: Shape, leaf: u64) -> Option<(Part, u64)> {
        if leaf >= shape.span(shape.levels) {
            return None;
        }
        let mut node = self.root.as_deref()?;
        for levels in (0..=shape.levels).rev() {
            match node {
                Node::External(part) => {
                    let span = shape.span(levels);
                    return Some((*part, (leaf / span + 1) * span));
                }
                Node::Interior(interior) if levels > 0 => {
                    node = interior.children[shape.child(levels, leaf)].as_deref()?;
                }
                Node::Interior(_) | Node::Leaf(_) | Node::Lost { .. } => return None,
            }
        }
        None
    }

    /// The entry at `place`, counted in units.
    pub fn entry(&self, shape: Shape, place: u64) -> Result<Entry, LostNode> {
        let units = shape.units_per_leaf as u64;
        match self.leaf(shape, place / units)?.map(|node| &**node) {
            Some(Node::Leaf(leaf)) => Ok(leaf.entries[(place % units) as usize]),
            Some(Node::External(part)) => Ok(Entry {
                own: *part,
                second: Part::NONE,
            }),
            _ => Ok(Entry::default()),
        }
    }

    /// The entries of a leaf, to change them, and the number of nodes on the disk that became
    /// changed ones by that.
    pub fn change(&mut self, shape: Shape, leaf: u64) -> Result<(&mut [Entry], usize), LostNode> {
        self.leaf(shape, leaf)?;
        let mut copied = 0;
        let mut at = &mut self.root;
        for levels in (1..=shape.levels).rev() {
            expand(at, shape, levels, &mut copied);
            let empty = || interior(vec![None; shape.fan_out]);
            let Node::Interior(interior) = own(at, empty, &mut copied) else {
                return Err(LostNode);
            };
            at = &mut interior.children[shape.child(levels, leaf)];
        }
        expand(at, shape, 0, &mut copied);
        let empty = || leaf_of(vec![Entry::default(); shape.units_per_leaf]);
        match own(at, empty, &mut copied) {
            Node::Leaf(leaf) => Ok((&mut leaf.entries, copied)),
            _ => Err(LostNode),
        }
    }

    /// Removes a leaf, which makes all its places empty. Returns the number of nodes on the disk
    /// that became changed ones.
    pub fn remove_leaf(&mut self, shape: Shape, leaf: u64) -> Result<usize, LostNode> {
        self.leaf(shape, leaf)?;
        let mut copied = 0;
        remove(&mut self.root, shape, shape.levels, leaf, &mut copied);
        Ok(copied)
    }

    /// The number of nodes that a change of a leaf would change or make. Each needs new pages in
    /// the next image. `removes`: the whole leaf becomes empty.
    pub fn nodes_to_change(&self, shape: Shape, leaf: u64, removes: bool) -> usize {
        let (mut count, mut is_shared) = (0, false);
        let mut node = self.root.as_ref();
        for levels in (0..=shape.levels).rev() {
            let Some(present) = node else {
                return if removes {
                    0
                } else {
                    count + levels as usize + 1
                };
            };
            is_shared |= present.pages().is_some() || Arc::strong_count(present) > 1;
            is_shared |= matches!(**present, Node::External(_));
            count += usize::from(is_shared && (levels > 0 || !removes));
            if let (Node::Interior(interior), true) = (&**present, levels > 0) {
                node = interior.children[shape.child(levels, leaf)].as_ref();
            }
        }
        count
    }

    /// Replaces a lost leaf or subtree on the path to `leaf` by an empty one. Returns the number of
    /// nodes on the disk that became changed ones.
    pub fn clear_lost(&mut self, shape: Shape, leaf: u64) -> usize {
        let mut copied = 0;
        let mut at = &mut self.root;
        for levels in (0..=shape.levels).rev() {
            match at.as_deref() {
                None => return copied,
                Some(Node::Lost { .. }) => {
                    *at = None;
                    return copied;
                }
                Some(Node::Leaf(_) | Node::External(_)) => return copied,
                Some(Node::Interior(_)) => {}
            }
            let Node::Interior(interior) = own(at, || unreachable!("present"), &mut copied) else {
                return copied;
            };
            at = &mut interior.children[shape.child(levels, leaf)];
        }
        copied
    }

    /// The first leaf from `from` that `self` has and that is not the same node in `other`. `None`
    /// for `other` compares with an empty tree. External nodes do not count: they have no unit.
    pub fn next_difference(&self, other: Option<&Self>, shape: Shape, from: u64) -> Option<u64> {
        let other = other.and_then(|tree| tree.root.as_ref());
        difference(
            self.root.as_ref(),
            other,
            (shape, false),
            shape.levels,
            0,
            from,
        )
    }

    /// The first leaf from `from` that is not empty, external ones included.
    pub fn next_present(&self, shape: Shape, from: u64) -> Option<u64> {
        difference(
            self.root.as_ref(),
            None,
            (shape, true),
            shape.levels,
            0,
            from,
        )
    }
}

/// The node in `at`, which nothing else refers to and which is not on the disk.
fn own<'a>(
    at: &'a mut Option<Arc<Node>>,
    empty: impl FnOnce() -> Node,
    copied: &mut usize,
) -> &'a mut Node {
    let node = at.get_or_insert_with(|| {
        *copied += 1;
        Arc::new(empty())
    });
    if node.pages().is_some() || Arc::get_mut(node).is_none() {
        *copied += 1;
        *node = Arc::new(node.changed());
    }
    Arc::get_mut(node).expect("copied just now")
}

/// Replaces an external node by one that can be changed in part, with the same places.
fn expand(at: &mut Option<Arc<Node>>, shape: Shape, levels: u32, copied: &mut usize) {
    let Some(node) = at else { return };
    let Node::External(part) = **node else { return };
    let expanded = if levels == 0 {
        let entry = Entry {
            own: part,
            second: Part::NONE,
        };
        leaf_of(vec![entry; shape.units_per_leaf])
    } else {
        interior(vec![Some(Arc::clone(node)); shape.fan_out])
    };
    *copied += 1;
    *node = Arc::new(expanded);
}

/// Removes a leaf, or the external places that it would have, and the interior nodes that have no
/// child after that.
fn remove(at: &mut Option<Arc<Node>>, shape: Shape, levels: u32, leaf: u64, copied: &mut usize) {
    if levels == 0 {
        *at = None;
    }
    if at.is_none() {
        return;
    }
    expand(at, shape, levels, copied);
    let Node::Interior(interior) = own(at, || unreachable!("present"), copied) else {
        return;
    };
    let child = &mut interior.children[shape.child(levels, leaf)];
    remove(child, shape, levels - 1, leaf, copied);
    if interior.children.iter().all(Option::is_none) {
        *at = None;
    }
}

pub(super) fn leaf_of(entries: Vec<Entry>) -> Node {
    Node::Leaf(Leaf {
        entries: entries.into_boxed_slice(),
        pages: OnceLock::new(),
    })
}

pub(super) fn interior(children: Vec<Option<Arc<Node>>>) -> Node {
    Node::Interior(Interior {
        children: children.into_boxed_slice(),
        pages: OnceLock::new(),
    })
}

fn difference(
    node: Option<&Arc<Node>>,
    other: Option<&Arc<Node>>,
    (shape, with_external): (Shape, bool),
    levels: u32,
    first: u64,
    from: u64,
) -> Option<u64> {
    let node = node?;
    if other.is_some_and(|other| Arc::ptr_eq(node, other)) || first + shape.span(levels) <= from {
        return None;
    }
    if matches!(**node, Node::External(_)) && !with_external {
        return None;
    }
    let Node::Interior(interior) = &**node else {
        // A lost subtree counts as one leaf: the caller cannot look into it.
        return Some(first.max(from));
    };
    let span = shape.span(levels - 1);
    interior
        .children
        .iter()
        .enumerate()
        .find_map(|(at, child)| {
            let other = match other.map(|other| &**other) {
                Some(Node::Interior(other)) => other.children[at].as_ref(),
                _ => None,
            };
            let first = first + at as u64 * span;
            let how = (shape, with_external);
            difference(child.as_ref(), other, how, levels - 1, first, from)
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    const SHAPE: Shape = Shape {
        fan_out: 2,
        levels: 2,
        units_per_leaf: 2,
    };

    fn set(tree: &mut Tree, place: u64, unit: u64) {
        let (entries, _) = tree.change(SHAPE, place / 2).unwrap();
        entries[(place % 2) as usize].own = Part {
            unit,
            generation: 1,
            granules: 1,
        };
    }

    fn unit(tree: &Tree, place: u64) -> u64 {
        tree.entry(SHAPE, place).unwrap().own.unit
    }

    /// A copy keeps its contents, and the difference of two trees is the leaves that changed.
    #[test]
    fn copies_are_independent() {
        let mut tree = Tree::default();
        (0..8).for_each(|place| set(&mut tree, place, 10 + place));
        let copy = tree.clone();
        set(&mut tree, 5, 99);
        assert_eq!((unit(&tree, 5), unit(&copy, 5)), (99, 15));
        assert_eq!((unit(&tree, 4), unit(&copy, 4)), (14, 14));
        assert_eq!(tree.next_difference(Some(&copy), SHAPE, 0), Some(2));
        assert_eq!(tree.next_difference(Some(&copy), SHAPE, 3), None);
        assert_eq!(tree.next_difference(None, SHAPE, 3), Some(3));
        assert_eq!(tree.next_difference(None, SHAPE, 4), None);
    }

    /// A change of a node that is on the disk leaves its pages to the other trees; the last tree
    /// that goes gives them back.
    #[test]
    fn pages_come_back_with_the_last_tree() {
        let garbage = PageGarbage::default();
        let mut tree = Tree::default();
        set(&mut tree, 0, 1);
        let leaf = tree.leaf(SHAPE, 0).unwrap().unwrap();
        let place = Place { a: 4, b: 5, sum: 0 };
        let first = PagePair::new(place, &garbage);
        leaf.set_pages(NodePages {
            lsn: 1,
            first,
            rest: None,
        });
        let image = tree.clone();
        set(&mut tree, 1, 2);
        assert!(tree.leaf(SHAPE, 0).unwrap().unwrap().pages().is_none());
        assert_eq!(garbage.take(), []);
        drop(image);
        assert_eq!(garbage.take(), [4, 5]);
    }
}
