//! The map of a version: from each place (64 KiB of its address range) to units of the disks.
//!
//! [`entry`] has one place and its changes, [`tree`] all places of a version, [`rewrite`] changes
//! of all versions at once. No I/O.

pub mod entry;
mod external;
pub mod rewrite;
pub mod tree;

pub use entry::{EXTERNAL_UNIT, Entry, MapError, Part, count_mapped};
pub use rewrite::Rewritten;
pub use tree::{Interior, Leaf, LostNode, Node, NodePages, PageGarbage, PagePair, Shape, Tree};
