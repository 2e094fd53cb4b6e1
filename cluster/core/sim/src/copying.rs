//! Copies between replicas: the merge, and the copy to a replica that returns. The merge makes the
//! in-sync replicas equal when a new holder opens the volume.

use std::collections::BTreeMap;

use nacre_cluster_core::mutation::Mutation;

use crate::events::Core;
use crate::names::{BLOCKS, replica_id, replica_index};
use crate::node::{Copying, Target};
use crate::replica::{Io, IoResult};
use crate::world::World;

pub(crate) fn start_copy(world: &mut World, node: usize, target: Target) {
    if let Target::Merge(number) = target
        && Mutation::SkipMerge.is_active()
    {
        return merged(world, node, number);
    }
    let is_full = matches!(target, Target::Replica(_));
    if world.nodes[node].copy.is_some() {
        // Ending its sessions makes the volume ask again.
        return end_copy(world, node);
    }
    let place = &world.nodes[node];
    let Some(record) = place.control.record() else {
        return;
    };
    let sources: Vec<usize> = record
        .in_sync()
        .filter(|replica| place.control.has_gate(replica.id))
        .map(|replica| replica_index(replica.id))
        .collect();
    let mut missing = BTreeMap::new();
    for replica in sources {
        let id = world.send_io(node, Core::Management, replica, Io::ReadAll);
        missing.insert(id, replica);
        if is_full {
            break;
        }
    }
    world.nodes[node].copy = Some(Copying {
        target,
        began: world.now,
        missing,
        source: None,
        dirty: [is_full; BLOCKS],
        writes: false,
    });
}

pub(crate) fn copied(world: &mut World, node: usize, id: u64, result: IoResult) {
    let place = &mut world.nodes[node];
    let Some(copy) = &mut place.copy else { return };
    let Some(replica) = copy.missing.remove(&id) else {
        return;
    };
    match result {
        IoResult::Refused(current) => {
            end_copy(world, node);
            world.gate_said_no(node, replica, current);
            world.nodes[node].control.put_out(replica_id(replica));
            return;
        }
        IoResult::All(blocks, dirty) => {
            copy.source.get_or_insert(blocks);
            for (of_all, of_this) in copy.dirty.iter_mut().zip(dirty) {
                *of_all |= of_this;
            }
        }
        IoResult::Done(_) => {}
    }
    if !copy.missing.is_empty() {
        return;
    }
    if copy.writes {
        let target = copy.target;
        end_copy(world, node);
        match target {
            Target::Merge(number) => merged(world, node, number),
            Target::Replica(replica) => {
                world.report.promotions += 1;
                world.nodes[node].filled.insert(replica);
                world.nodes[node].control.promote(replica_id(replica));
                plan_promotion(world, node);
            }
        }
        return;
    }
    copy.writes = true;
    let Some(source) = copy.source else { return };
    let blocks: Vec<(usize, u64)> = (0..BLOCKS)
        .filter(|block| copy.dirty[*block])
        .map(|block| (block, source[block]))
        .collect();
    let targets: Vec<usize> = match copy.target {
        Target::Replica(target) => vec![target],
        Target::Merge(_) => {
            let record = place.control.record();
            let replicas = record.into_iter().flat_map(|record| record.in_sync());
            replicas.map(|replica| replica_index(replica.id)).collect()
        }
    };
    let mut missing = BTreeMap::new();
    for replica in targets {
        let blocks = blocks.clone();
        let id = world.send_io(node, Core::Management, replica, Io::WriteSome { blocks });
        missing.insert(id, replica);
    }
    if let Some(copy) = &mut world.nodes[node].copy {
        copy.missing = missing;
    }
}

/// The replicas are equal: the volume opens to hosts.
fn merged(world: &mut World, node: usize, number: u64) {
    if !world.nodes[node].control.merged(number) {
        return;
    }
    world.report.takes += 1;
    world.note(|| format!("node {node} serves"));
    world.open_lanes(node);
    let place = &mut world.nodes[node];
    place.volume.opened(place.control.opening());
}

/// Ends the copy. Its I/O under way must not land later, so the sessions end with it.
pub(crate) fn end_copy(world: &mut World, node: usize) {
    let place = &mut world.nodes[node];
    place.lane.frozen = false;
    let missing = place.copy.take().map(|copy| copy.missing);
    for replica in missing.unwrap_or_default().into_values() {
        world.lose_session(node, replica);
    }
}

/// A promotion is about to be sent: sometimes its answer is lost, and the holder is cut off
/// from all other nodes just then.
pub(crate) fn plan_promotion(world: &mut World, node: usize) {
    if world.lively && world.random.one_in(3) {
        world.nodes[node].link.is_cut_by_commit = true;
    }
}
