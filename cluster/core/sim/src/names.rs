//! Constants of the simulator (times are nanoseconds), and the ids of its nodes and replicas, which
//! follow from their indexes.

use nacre_cluster_core::{NodeId, ReplicaId, VolumeId};
use uuid::Uuid;

pub(crate) const BLOCKS: usize = 3;
pub(crate) const MICRO: u64 = 1_000;
pub(crate) const MILLI: u64 = 1_000_000;
pub(crate) const SECOND: u64 = 1_000_000_000;
/// Interval between the turns of a node's management and of its lanes.
pub(crate) const TURN: u64 = 20 * MILLI;
pub(crate) const VOLUME: VolumeId = VolumeId(Uuid::from_u128(0x7000));
/// A stall of this core number, or of a greater one, is one of all three cores of a node.
pub(crate) const ALL_CORES: u64 = 3;

pub(crate) fn node_id(index: usize) -> NodeId {
    NodeId(Uuid::from_u128(0x1000 + index as u128))
}

pub(crate) fn index_of(node: NodeId) -> usize {
    (node.0.as_u128() - 0x1000) as usize
}

pub(crate) fn replica_id(index: usize) -> ReplicaId {
    ReplicaId(Uuid::from_u128(0x2000 + index as u128))
}

pub(crate) fn replica_index(replica: ReplicaId) -> usize {
    (replica.0.as_u128() - 0x2000) as usize
}
