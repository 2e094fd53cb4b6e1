//! The map: from a place in a volume to units of the disk.
//!
//! [`entry`] is the algebra of one place, [`tree`] all places of a version. Both are pure.

pub mod entry;
pub mod tree;

pub use entry::{Entry, MapError, Part};
pub use tree::{Interior, Leaf, LostNode, Node, NodePages, PageGarbage, PagePair, Shape, Tree};
