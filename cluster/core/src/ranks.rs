//! Computes which nodes observe the lease of another node, and in which order nodes take a volume.
//! All nodes compute the same from the same facts; where their facts differ, the transactions of
//! the store decide.

use std::cmp::Reverse;
use std::time::Duration;

use arrayvec::ArrayVec;
use uuid::Uuid;

use crate::ids::{NodeId, VolumeId};
use crate::record::Record;

/// Most observers of one node.
pub const OBSERVERS: usize = 3;
/// The wait of one rank before the next one takes.
const TURN: Duration = Duration::from_millis(150);

/// The observers of `of` among the live nodes, by rank.
pub fn observers(of: NodeId, live: &[NodeId]) -> ArrayVec<NodeId, OBSERVERS> {
    let mut found: ArrayVec<NodeId, OBSERVERS> = ArrayVec::new();
    let weight = |node: &NodeId| (weight(of.0, node.0), *node);
    for node in live.iter().filter(|node| **node != of) {
        let place = found.partition_point(|other| weight(other) > weight(node));
        if found.is_full() {
            if place == OBSERVERS {
                continue;
            }
            found.pop();
        }
        found.insert(place, *node);
    }
    found
}

/// The order in which the candidates take the volume: `next` first, then nodes with an in-sync
/// replica, then the others, each group by hash; cordoned nodes last. The hash spreads the volumes
/// of one dead node.
pub fn order(volume: VolumeId, record: &Record, candidates: &mut [NodeId], cordoned: &[NodeId]) {
    candidates.sort_by_key(|node| {
        (
            record.next != Some(*node),
            cordoned.contains(node),
            !record.in_sync().any(|replica| replica.node == *node),
            Reverse(weight(volume.0, node.0)),
            *node,
        )
    });
}

/// The wait of the node with this rank, from the time at which the volume has no holder: 150 ms for
/// each rank before it.
pub fn turn(rank: usize) -> Duration {
    TURN * u32::try_from(rank).unwrap_or(u32::MAX)
}

/// The weight of `node` for `subject` (rendezvous hashing).
pub(crate) fn weight(subject: Uuid, node: Uuid) -> u64 {
    let fold = |sum: u64, id: Uuid| {
        let (high, low) = id.as_u64_pair();
        nacre_random::mix(nacre_random::mix(sum ^ high) ^ low)
    };
    fold(fold(0, subject), node)
}
