//! Room for the metadata of the next root (checkpoint), in a pool with external devices.
//!
//! Elsewhere a map grows with the units that it refers to, and the reserve, units that new data may
//! not take, covers its pages. On an external device it also grows without a unit: a trim of a
//! granule splits the node that stood for many places. So each request that changes a node needs
//! room for the node's pages, beside those of all nodes that changed since the last root. A request
//! that finds none waits for the next root, which takes the pages of earlier changes and returns
//! those of the root before; after a few roots it is refused.
//!
//! ```text
//!   free units
//!   ▲  above the reserve and all guarantees    trims that split a leaf, new devices
//!   │  above 3/4 of the reserve                trims of whole leaves that split interior nodes
//!   │  above 1/2 of the reserve                other changes of maps
//!   │  above 1/4 of the reserve                writes of thick volumes to space kept for them
//!   └  always                                  deletions, moves, the directory, the lists
//! ```
//!
//! An import needs the same pages: it replays the records that the running pool has counted.

use super::MapGrowth;
use super::requests::Changes;
use crate::ids::VersionId;
use crate::interface::Refusal;
use crate::mutation::Mutation;

/// Most pages of a node: both copies of a leaf with second units.
const PAGES_OF_NODE: u64 = 4;
/// Roots that a change waits for. One may have begun before, the next takes the changes, and that
/// after it returns their former pages. More would not help: other I/O changes maps meanwhile.
const ROOTS: u64 = 4;
/// A shortage that began so many roots ago is over, or another one.
const STALE: u64 = 16;

impl Changes<'_> {
    /// True when the next root has room after a change of a leaf that also takes `units`. False:
    /// try again after the next root. An error: the pool is full.
    pub(super) fn has_room(
        &mut self,
        id: VersionId,
        leaf: u64,
        growth: MapGrowth,
        units: u64,
    ) -> Result<bool, Refusal> {
        let state = &self.store.state;
        if !state.has_externals() {
            return Ok(true);
        }
        let removes = growth == MapGrowth::Removal;
        let known = state.versions.get(&id).ok_or(Refusal::UnknownVersion)?;
        let nodes = known.tree.nodes_to_change(state.shape(), leaf, removes);
        if nodes == 0 && units == 0 {
            return Ok(true);
        }
        self.has_room_for(nodes, growth, units)
    }

    /// As `has_room`, for this number of changed nodes.
    pub(super) fn has_room_for(
        &mut self,
        nodes: usize,
        growth: MapGrowth,
        units: u64,
    ) -> Result<bool, Refusal> {
        let geometry = &self.store.superblock.geometry;
        // A record in flight changes the nodes of one path, once it is published.
        let in_flight = self.writes.records() * (geometry.levels as usize + 1);
        let changed = self.store.state.changed_nodes + in_flight;
        let pages = (changed + nodes) as u64 * PAGES_OF_NODE;
        let needed = pages.div_ceil(u64::from(geometry.granules_per_unit)) + units;
        let (free, kept) = self.store.free_units();
        let reserve = self.store.superblock.reserve_units;
        let floor = match growth {
            MapGrowth::Split => kept,
            MapGrowth::Removal => kept - reserve / 4,
            MapGrowth::Change => kept - reserve.div_ceil(2),
            MapGrowth::Kept => kept - (reserve - reserve / 4),
        };
        let root = self.store.superblock.sequence;
        let since = &mut self.store.next_root.short_since[growth as usize];
        if free >= floor + needed || Mutation::MapWithoutRoom.is_active() {
            *since = None;
            return Ok(true);
        }
        let began = since.take_if(|began| root < *began + STALE).unwrap_or(root);
        *since = Some(began);
        let may_help = root < began + ROOTS;
        let returning = self.store.next_root.returns_pages();
        if may_help && (changed > 0 || returning) {
            // Once: the request comes here again in each turn.
            if !(self.store.wants_checkpoint && self.store.has_changes) {
                self.store.want_root();
            }
            return Ok(false);
        }
        if may_help && !self.discards.is_idle() {
            return Ok(false);
        }
        self.store.settle.want(self.store.log.next_lsn() - 1);
        Err(Refusal::NoSpace {
            returning: self.is_space_returning(),
        })
    }
}
