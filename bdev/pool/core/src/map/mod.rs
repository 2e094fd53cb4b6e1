//! The map: from a place in a volume to units of the disk.
//!
//! [`entry`] is the algebra of one place, [`tree`] all places of a version, [`rewrite`] changes of
//! all versions at once. All are pure.

pub mod entry;
mod external;
pub mod rewrite;
pub mod tree;

pub use entry::{EXTERNAL_UNIT, Entry, MapError, Part};
pub use rewrite::Rewritten;
pub use tree::{Interior, Leaf, LostNode, Node, NodePages, PageGarbage, PagePair, Shape, Tree};
