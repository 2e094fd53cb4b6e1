//! Reads the block maps of all volumes and snapshots of a pool at an import. Each map is a tree of
//! nodes, and a node is one page, or two for a leaf. Volumes and snapshots share nodes; each page
//! is read once. The caller does the I/O: it takes the wanted pages, and returns their contents.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use crate::format::leaf::{decode_own, decode_rest};
use crate::format::node::{self, Child, is_page_pair};
use crate::format::{FormatError, Page, lsn_of};
use crate::geometry::Geometry;
use crate::ids::{Generation, Lsn, Place};
use crate::map::{
    Entry, Interior, Leaf, Node, NodePages, PageGarbage, PagePair, Part, Shape, Tree,
};
use crate::mutation::Mutation;

/// The place of a node, levels below it, first leaf. The place has the checksum, so a page that was
/// given to another node is not taken for the one that was there before.
type NodeKey = (Place, u32, u64);

#[derive(Debug)]
pub(super) struct Nodes {
    geometry: Geometry,
    shape: Shape,
    tag: u64,
    /// Requested pages by key: the node, and whether it is the second page of a leaf.
    asked: Vec<(NodeKey, bool)>,
    /// The same, to request each page once.
    known: HashMap<(NodeKey, bool), ()>,
    /// Pages that the caller has not taken yet.
    wanted: Vec<(Place, u64)>,
    loaded: HashMap<NodeKey, Loaded>,
    /// Nodes in their final form.
    built: HashMap<NodeKey, Arc<Node>>,
    /// The external node of each generation: all its places look alike.
    external: HashMap<Generation, Arc<Node>>,
    /// Pages of the nodes in `built`.
    pages: Vec<u64>,
    /// Nodes in `built` that the next image has to write.
    unplaced: usize,
}

#[derive(Debug)]
enum Loaded {
    Interior {
        lsn: Lsn,
        children: Vec<Child>,
    },
    /// The own units, the place of the second units, and those once they are loaded.
    Leaf {
        lsn: Lsn,
        own: Vec<Part>,
        rest: Place,
        entries: Option<Vec<Entry>>,
    },
    Lost,
}

impl Nodes {
    pub(super) fn new(geometry: Geometry, tag: u64) -> Self {
        Self {
            geometry,
            shape: Shape::from(&geometry),
            tag,
            asked: Vec::new(),
            known: HashMap::new(),
            wanted: Vec::new(),
            loaded: HashMap::new(),
            built: HashMap::new(),
            external: HashMap::new(),
            pages: Vec::new(),
            unplaced: 0,
        }
    }

    /// Requests the root of a map, and then all nodes below it.
    pub(super) fn want_root(&mut self, place: Place) {
        self.want(place, (place, self.geometry.levels, 0), false);
    }

    /// Takes the pages to read next, each with its key.
    pub(super) fn take_wanted(&mut self) -> Vec<(Place, u64)> {
        std::mem::take(&mut self.wanted)
    }

    fn want(&mut self, place: Place, node: NodeKey, is_rest: bool) {
        if self.known.insert((node, is_rest), ()).is_none() {
            self.wanted.push((place, self.asked.len() as u64));
            self.asked.push((node, is_rest));
        }
    }

    /// Reports that both copies of a page are unreadable: its node is lost.
    pub(super) fn lost(&mut self, key: u64) {
        let (node, _) = self.asked[key as usize];
        self.loaded.insert(node, Loaded::Lost);
    }

    /// Passes the contents of a page, whose checksum is right. If they are malformed, the node is
    /// lost, and the error says why.
    pub(super) fn loaded(&mut self, key: u64, page: &Page) -> Result<(), FormatError> {
        let (node, is_rest) = self.asked[key as usize];
        let outcome = self.decode(node, is_rest, page);
        if outcome.is_err() {
            self.loaded.insert(node, Loaded::Lost);
        }
        outcome
    }

    fn decode(&mut self, node: NodeKey, is_rest: bool, page: &Page) -> Result<(), FormatError> {
        let (_, levels, first) = node;
        let geometry = self.geometry;
        if is_rest {
            let Some(Loaded::Leaf { own, entries, .. }) = self.loaded.get_mut(&node) else {
                return Ok(());
            };
            let own = std::mem::take(own);
            *entries = Some(decode_rest(own, page, &geometry, self.tag, first)?);
            return Ok(());
        }
        if levels > 0 {
            let children = node::decode(page, &geometry, self.tag, first)?;
            let span = self.shape.span(levels - 1);
            for (at, child) in children.iter().enumerate() {
                match child {
                    Child::Page { place, .. } => {
                        let child = (*place, levels - 1, first + at as u64 * span);
                        self.want(*place, child, false);
                    }
                    // Only leaves are linear.
                    Child::Linear(_) if levels > 1 => {
                        return Err(FormatError {
                            structure: "interior node",
                            field: "child",
                        });
                    }
                    _ => {}
                }
            }
            let lsn = lsn_of(page);
            self.loaded.insert(node, Loaded::Interior { lsn, children });
            return Ok(());
        }
        let (own, rest) = decode_own(page, &geometry, self.tag, first)?;
        let entries = rest.is_none().then(|| {
            let entry = |own: &Part| Entry {
                own: *own,
                second: Part::NONE,
            };
            own.iter().map(entry).collect()
        });
        if !rest.is_none() {
            if !is_page_pair(&rest, &geometry) {
                return Err(FormatError {
                    structure: "leaf",
                    field: "place of the second units",
                });
            }
            self.want(rest, node, true);
        }
        let leaf = Loaded::Leaf {
            lsn: lsn_of(page),
            own,
            rest,
            entries,
        };
        self.loaded.insert(node, leaf);
        Ok(())
    }

    /// Replaces the lost nodes below the root of an external device, whose whole map is known from
    /// its size. Maps of volumes that share these nodes have them again, too. Returns their number.
    pub(super) fn restore(&mut self, root: Place, map: &Tree) -> u64 {
        let key = (root, self.geometry.levels, 0);
        match &map.root {
            Some(known) if !root.is_none() => self.restore_node(key, known),
            _ => 0,
        }
    }

    fn restore_node(&mut self, key: NodeKey, known: &Arc<Node>) -> u64 {
        let (_, levels, first) = key;
        let children = match self.loaded.get(&key) {
            Some(Loaded::Lost) if !self.built.contains_key(&key) => {
                self.built.insert(key, Arc::clone(known));
                return 1;
            }
            Some(Loaded::Interior { children, .. }) => children.clone(),
            _ => return 0,
        };
        let Node::Interior(interior) = &**known else {
            return 0;
        };
        let span = self.shape.span(levels - 1);
        let below = children.into_iter().zip(&interior.children).enumerate();
        let restored = below.filter_map(|(at, (child, known))| {
            let Child::Page { place, .. } = child else {
                return None;
            };
            let key = (place, levels - 1, first + at as u64 * span);
            Some(self.restore_node(key, known.as_ref()?))
        });
        restored.sum()
    }

    /// Builds the map below a root, when no page is wanted any more. Maps share their common nodes.
    pub(super) fn tree(&mut self, root: Place, garbage: &PageGarbage) -> Tree {
        if root.is_none() {
            return Tree::default();
        }
        let levels = self.geometry.levels;
        let node = self.build((root, levels, 0), garbage);
        // A root is an interior node: a lost one becomes one whose children are all lost.
        let node = match &*node {
            Node::Lost { .. } => Arc::new(Node::Interior(Interior {
                children: (0..self.geometry.fan_out).map(|_| Some(lost())).collect(),
                pages: OnceLock::new(),
            })),
            _ => node,
        };
        Tree { root: Some(node) }
    }

    /// The page numbers of all pages that the maps keep, both copies.
    pub(super) fn pages(&self) -> impl Iterator<Item = u64> {
        self.pages.iter().copied()
    }

    /// Nodes that the next image has to write, because a node below them has no page any more.
    pub(super) fn unplaced(&self) -> usize {
        self.unplaced
    }

    /// The node of a key. One above a node that is lost, or that was made again, keeps no page of
    /// its own: that page names the place of the lost one, which other nodes get some day.
    fn build(&mut self, key: NodeKey, garbage: &PageGarbage) -> Arc<Node> {
        if let Some(built) = self.built.get(&key) {
            return Arc::clone(built);
        }
        let (place, levels, first) = key;
        let own_pages = |taken: &mut Vec<u64>, lsn: Lsn, rest: Option<Place>| {
            let places = [place].into_iter().chain(rest);
            taken.extend(places.flat_map(|place| [place.a, place.b]));
            let pages = OnceLock::new();
            let new = NodePages {
                lsn,
                first: PagePair::new(place, garbage),
                rest: rest.map(|rest| PagePair::new(rest, garbage)),
            };
            pages.set(new).expect("a new cell");
            pages
        };
        let node = match self.loaded.remove(&key) {
            Some(Loaded::Interior { lsn, children }) => {
                let span = self.shape.span(levels - 1);
                let mut has_moved = false;
                let children = children.into_iter().enumerate().map(|(at, child)| {
                    let first = first + at as u64 * span;
                    match child {
                        Child::None => None,
                        Child::Lost => Some(lost()),
                        Child::External { generation } => Some(self.external(generation)),
                        Child::Linear(linear) => Some(Arc::new(Node::Leaf(Leaf {
                            entries: linear.entries(&self.geometry).into_boxed_slice(),
                            pages: OnceLock::new(),
                        }))),
                        Child::Page { place, .. } => {
                            let child = self.build((place, levels - 1, first), garbage);
                            has_moved |= child.pages().is_none();
                            Some(child)
                        }
                    }
                });
                let children = children.collect();
                let pages = if has_moved && !Mutation::KeepParentOfLost.is_active() {
                    self.unplaced += 1;
                    OnceLock::new()
                } else {
                    own_pages(&mut self.pages, lsn, None)
                };
                Arc::new(Node::Interior(Interior { children, pages }))
            }
            Some(Loaded::Leaf {
                lsn,
                rest,
                entries: Some(entries),
                ..
            }) => Arc::new(Node::Leaf(Leaf {
                entries: entries.into_boxed_slice(),
                pages: own_pages(&mut self.pages, lsn, (!rest.is_none()).then_some(rest)),
            })),
            _ => lost(),
        };
        self.built.insert(key, Arc::clone(&node));
        node
    }
}

impl Nodes {
    fn external(&mut self, generation: Generation) -> Arc<Node> {
        let part = Part::external(generation, self.geometry.whole());
        let node = self.external.entry(generation);
        Arc::clone(node.or_insert_with(|| Arc::new(Node::External(part))))
    }
}

fn lost() -> Arc<Node> {
    Arc::new(Node::Lost {
        pages: OnceLock::new(),
    })
}
