//! Changes of all versions at once: nodes that versions share stay shared.
//!
//! The memory of visited nodes goes by their address. So every old tree lives until all trees are
//! changed: the caller replaces them after the last call.

use std::collections::HashMap;
use std::sync::Arc;

use super::entry::Entry;
use super::tree::{Node, Shape, Tree};

/// The nodes that were visited for earlier versions, with their copies; `None`: the node stays.
#[derive(Debug, Default)]
pub struct Rewritten {
    copies: HashMap<*const Node, Option<Arc<Node>>>,
    /// Nodes that were copied.
    pub copied: usize,
}

impl Rewritten {
    /// The tree with another entry at a place, which must be readable.
    pub fn with_entry(
        &mut self,
        tree: &Tree,
        shape: Shape,
        place: u64,
        change: &impl Fn(&mut Entry),
    ) -> Tree {
        let per_leaf = shape.units_per_leaf as u64;
        let at = (place / per_leaf, (place % per_leaf) as usize);
        let root = tree.root.as_ref();
        let root = root.map(|root| self.path(root, shape, shape.levels, at, change));
        Tree { root }
    }

    fn path(
        &mut self,
        node: &Arc<Node>,
        shape: Shape,
        levels: u32,
        at: (u64, usize),
        change: &impl Fn(&mut Entry),
    ) -> Arc<Node> {
        if let Some(Some(known)) = self.copies.get(&Arc::as_ptr(node)) {
            return Arc::clone(known);
        }
        let mut copy = node.changed();
        match &mut copy {
            Node::Interior(interior) => {
                let child = &mut interior.children[shape.child(levels, at.0)];
                if let Some(below) = child {
                    *below = self.path(below, shape, levels - 1, at, change);
                }
            }
            Node::Leaf(leaf) => change(&mut leaf.entries[at.1]),
            // A version that uses a unit has a leaf for it.
            Node::External(_) | Node::Lost { .. } => {}
        }
        self.copied += 1;
        let copy = Arc::new(copy);
        let known = Some(Arc::clone(&copy));
        self.copies.insert(Arc::as_ptr(node), known);
        copy
    }

    /// The tree in which nodes with a page for which `leaves` returns true count as changed.
    /// `None`: it has no such page.
    pub fn without_pages(&mut self, tree: &Tree, leaves: &impl Fn(u64) -> bool) -> Option<Tree> {
        let root = self.node_without(tree.root.as_ref()?, leaves)?;
        Some(Tree { root: Some(root) })
    }

    fn node_without(
        &mut self,
        node: &Arc<Node>,
        leaves: &impl Fn(u64) -> bool,
    ) -> Option<Arc<Node>> {
        if let Some(known) = self.copies.get(&Arc::as_ptr(node)) {
            return known.clone();
        }
        let has_page = node.pages().is_some_and(|pages| {
            let mut pairs = std::iter::once(&pages.first).chain(&pages.rest);
            pairs.any(|pair| leaves(pair.place.a) || leaves(pair.place.b))
        });
        let mut copy = has_page.then(|| node.changed());
        if let Node::Interior(interior) = &**node {
            for (at, child) in interior.children.iter().enumerate() {
                let Some(below) = child else { continue };
                let Some(below) = self.node_without(below, leaves) else {
                    continue;
                };
                if let Node::Interior(interior) = copy.get_or_insert_with(|| node.changed()) {
                    interior.children[at] = Some(below);
                }
            }
        }
        self.copied += usize::from(copy.is_some());
        let copy = copy.map(Arc::new);
        self.copies.insert(Arc::as_ptr(node), copy.clone());
        copy
    }
}
