//! Snapshots as clients make, list and delete them, on any node.

use std::rc::Rc;
use std::time::Duration;

use nacre_bdev_replica::model::Origin;
use nacre_cluster_core::{NodeId, PoolId, VolumeId};
use nacre_cluster_node::export::Want;
use nacre_cluster_node::{CloneSource, Cut, CutHolder, CutState, SnapshotKey};
use tokio::time::{Instant, sleep};
use tracing::debug;
use uuid::Uuid;

use super::super::Running;
use crate::refusal::OrRefuse;
use crate::rpc::RpcError;
use crate::rpc::error::Errno;
use crate::services::Engine;
use crate::services::volumes::snapshots::{
    SnapshotLvol, VolumeSnapshot, VolumeSnapshotState, absent, one_of,
};

/// Polling interval while a snapshot is made or deleted.
const LOOK: Duration = Duration::from_millis(50);
/// Time limit for the nodes to make a snapshot, including the time in which another node takes the
/// volume.
const MADE: Duration = Duration::from_secs(20);
/// Time limit for a node to delete an lvol.
const DELETED: Duration = Duration::from_secs(10);

fn view(running: &Running, id: Uuid, key: &SnapshotKey) -> VolumeSnapshot {
    let cuts = if key.want == Want::Gone {
        &key.former
    } else {
        &key.cuts
    };
    let lvols: Vec<_> = cuts.iter().map(|cut| lvol(running, key, cut)).collect();
    let noted = key.why.as_ref().map(|why| why.text.clone());
    let absent = lvols.iter().find_map(|lvol| lvol.why.clone());
    let (state, why) = match key.is {
        _ if key.want == Want::Gone => (VolumeSnapshotState::Deleting, absent.or(noted)),
        CutState::Asked | CutState::Chosen => (VolumeSnapshotState::Making, None),
        CutState::Failed => (VolumeSnapshotState::Failed, noted),
        CutState::There if lvols.iter().any(|lvol| lvol.why.is_none()) => {
            (VolumeSnapshotState::Ready, None)
        }
        CutState::There => (VolumeSnapshotState::Unavailable, absent.or(noted)),
    };
    VolumeSnapshot {
        id,
        name: key.name.clone(),
        volume: key.volume().0,
        bytes: key.bytes,
        created: (key.created > 0).then_some(key.created),
        state,
        why,
        lvols,
    }
}

fn lvol(running: &Running, key: &SnapshotKey, cut: &Cut) -> SnapshotLvol {
    let node = NodeId(cut.node);
    let name = running.name_of(node);
    // Earlier versions wrote the reason of the only lvol there.
    let alone = key.why.as_ref().filter(|_| key.cuts.len() == 1);
    let noted = cut.why.as_ref().or(alone).map(|why| why.text.clone());
    let why = if running.inbox.name_of(node).is_none() {
        Some(format!(
            "node {name}, which has it, was removed from the cluster"
        ))
    } else if running.inbox.is_node_away(node) {
        Some(format!("node {name}, which has it, has no lease"))
    } else {
        noted
    };
    SnapshotLvol {
        node: Some(cut.node),
        pool: cut.pool,
        lvol: cut.lvol,
        why,
    }
}

/// Refuses while a node of the cluster runs a version without snapshots.
async fn must_know_snapshots(running: &Running) -> Result<(), RpcError> {
    let without = running
        .operator
        .snapshots()
        .nodes_without()
        .await
        .or_refuse()?;
    let Some(first) = without.first() else {
        return Ok(());
    };
    let cause = match without.len() - 1 {
        0 => format!("node {first} runs a version without snapshots of volumes"),
        more => format!("node {first} and {more} more run versions without snapshots of volumes"),
    };
    Err(RpcError::errno(Errno::ENOTSUP, cause)
        .remedy("upgrade all nodes, and remove those that never return: nacre cluster nodes"))
}

/// Makes a snapshot of the volume with this id, or finds the one of an earlier call. It contains
/// every write that was acknowledged before the first call.
pub async fn create_snapshot(
    engine: &Rc<Engine>,
    volume: Uuid,
    id: Uuid,
    name: &str,
) -> Result<VolumeSnapshot, RpcError> {
    let running = engine.cluster.joined()?;
    must_know_snapshots(&running).await?;
    let end = Instant::now() + MADE;
    let volume = VolumeId(volume);
    let asked = running.operator.snapshots().ask(id, volume, name).await;
    let mut seen = asked.or_refuse()?;
    let of = seen.key.volume();
    if of != volume {
        let cause = format!("snapshot {id} exists, and is one of volume {}", of.0);
        return Err(RpcError::errno(Errno::EEXIST, cause).field("uuid"));
    }
    loop {
        let is_late = Instant::now() >= end;
        match seen.key.is {
            _ if seen.key.want == Want::Gone => return Err(deleted(id)),
            CutState::There => return Ok(view(&running, id, &seen.key)),
            CutState::Failed => return Err(failed(&running, id, &seen.key).await),
            CutState::Asked | CutState::Chosen if is_late => {
                return Err(late(&running, &seen.key).await);
            }
            CutState::Asked | CutState::Chosen => sleep(LOOK).await,
        }
        let now = running.operator.snapshots().get(id).await.or_refuse()?;
        seen = now.ok_or_else(|| deleted(id))?;
    }
}

fn deleted(id: Uuid) -> RpcError {
    let cause = format!("snapshot {id} was deleted meanwhile");
    RpcError::errno(Errno::EAGAIN, cause)
}

/// The error of the node that failed to take the snapshot. Deletes the snapshot.
async fn failed(running: &Running, id: Uuid, key: &SnapshotKey) -> RpcError {
    if let Err(error) = running.operator.snapshots().delete(id).await {
        debug!(%error, "a snapshot that failed stays listed");
    }
    match &key.why {
        Some(why) if why.code < 0 => RpcError::os(-why.code, why.text.clone()),
        _ => RpcError::errno(Errno::EIO, format!("snapshot {id} was not made")),
    }
}

/// The error of a snapshot that is not made in time. It may still be made later.
async fn late(running: &Running, key: &SnapshotKey) -> RpcError {
    let sources = running.operator.snapshots().sources(key.volume()).await;
    let mut missing = key.cuts.iter().filter(|cut| cut.pool.is_none());
    let why = match (sources, missing.next()) {
        (_, Some(cut)) => {
            let node = running.name_of(NodeId(cut.node));
            format!("node {node} has not cut it")
        }
        (Ok(Some(sources)), None) => match sources.holder {
            CutHolder::Over(node) => format!(
                "the lease under which node {} served the volume is over, and no node has taken the \
                 volume; one does while it is published",
                running.name_of(node)
            ),
            _ if sources.replicas.is_empty() => {
                "no replica in sync is on a node with a lease".to_owned()
            }
            CutHolder::Stands(holder) => format!(
                "node {} serves the volume, and has chosen no replica: they are not attached, \
                 blocks that were being written at a crash are still compared, or the nodes of \
                 the replicas were too slow while writes were held back",
                running.name_of(holder.node)
            ),
            CutHolder::None => "the nodes of the replicas have not begun".to_owned(),
        },
        _ => "etcd does not show the volume".to_owned(),
    };
    let cause = format!("not made within {} s: {why}", MADE.as_secs());
    RpcError::errno(Errno::ETIMEDOUT, cause)
        .remedy("repeat the call with the same uuid, or delete the snapshot")
}

/// All snapshots of the cluster, by id.
pub async fn snapshots(engine: &Engine) -> Result<Vec<VolumeSnapshot>, RpcError> {
    let running = engine.cluster.joined()?;
    let all = running.operator.snapshots().all().await.or_refuse()?;
    let views = all.iter().map(|(id, seen)| view(&running, *id, &seen.key));
    Ok(views.collect())
}

/// The snapshot with this id, or with this name, if no other one has it.
pub async fn find_snapshot(engine: &Engine, text: &str) -> Result<VolumeSnapshot, RpcError> {
    let running = engine.cluster.joined()?;
    if let Ok(id) = Uuid::parse_str(text) {
        let found = running.operator.snapshots().get(id).await.or_refuse()?;
        return Ok(view(&running, id, &found.ok_or_else(|| absent(text))?.key));
    }
    one_of(snapshots(engine).await?, text)
}

/// Deletes a snapshot. A node that is away deletes its lvol when it returns.
pub async fn delete_snapshot(engine: &Engine, id: Uuid) -> Result<(), RpcError> {
    let running = engine.cluster.joined()?;
    running.operator.snapshots().delete(id).await.or_refuse()?;
    let end = Instant::now() + DELETED;
    loop {
        let Some(seen) = running.operator.snapshots().get(id).await.or_refuse()? else {
            return Ok(());
        };
        let mut nodes = seen.key.former.iter().map(|cut| NodeId(cut.node));
        if nodes.all(|node| running.inbox.is_node_away(node)) {
            return Ok(());
        }
        if Instant::now() >= end {
            let why = seen.key.why.map(|why| why.text);
            let why = why.unwrap_or_else(|| "its nodes work on it".to_owned());
            let cause = format!("snapshot {id} is not deleted yet: {why}");
            return Err(RpcError::errno(Errno::EAGAIN, cause)
                .remedy("its nodes try it again by themselves; volume_snapshot_list shows it"));
        }
        sleep(LOOK).await;
    }
}

/// The lvols whose clones begin a new volume of so many bytes, at least one. `None`: as large as
/// the snapshot.
pub async fn snapshot_source(
    engine: &Engine,
    text: &str,
    bytes: Option<u64>,
) -> Result<(Vec<CloneSource>, Origin, u64), RpcError> {
    let running = engine.cluster.joined()?;
    must_know_snapshots(&running).await?;
    let found = find_snapshot(engine, text).await?;
    found.must_be_ready()?;
    let bytes = found.size_for(bytes)?;
    let available = found.lvols.iter().filter(|one| one.why.is_none());
    let sources = available.filter_map(|one| {
        Some(CloneSource {
            node: NodeId(one.node?),
            pool: PoolId(one.pool?),
            lvol: one.lvol,
        })
    });
    let sources: Vec<_> = sources.collect();
    if sources.is_empty() {
        let cause = format!("no lvol of snapshot \"{}\" is available", found.name);
        return Err(RpcError::errno(Errno::EAGAIN, cause).field("snapshot"));
    }
    let origin = Origin {
        snapshot: found.id,
        name: found.name,
    };
    Ok((sources, origin, bytes))
}
