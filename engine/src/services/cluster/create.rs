//! Volumes of the cluster: created on devices of its nodes, published on nodes, and deleted.
//!
//! ```text
//!   create    member/N/R of each replica ▸ the nodes export the devices ▸ labels and record
//!   publish   pub/V ▸ the nodes show the volume, and one of them takes it
//!   delete    not published, no holder ▸ record and labels ▸ the exports end
//! ```
//!
//! [`super::replicas`] makes the exports, and ends them if the creation fails.

use std::rc::Rc;
use std::time::Duration;

use nacre_bdev_replica::handle::NewVolume;
use nacre_bdev_replica::model::Settings;
use nacre_cluster_core::{NodeId, VolumeId};
use nacre_cluster_node::export::Want;
use nacre_cluster_node::{Portal, Publication, PublishRequest};
use nacre_nvmf::address::adrfam;
use serde_json::{Value, json};
use tokio::time::timeout;
use tracing::{debug, info};
use uuid::Uuid;

use super::Running;
use super::replicas::{NewReplica, with_exports};
use crate::refusal::OrRefuse;
use crate::rpc::RpcError;
use crate::rpc::error::Errno;
use crate::services::Engine;
use crate::services::volumes::lifecycle;

/// Time limit for the nodes to end the exports of a deleted volume.
const ENDED: Duration = Duration::from_secs(20);
/// Time limit for the holder of an unpublished volume to release it.
const RELEASED: Duration = Duration::from_secs(5);
const LOOK: Duration = Duration::from_millis(100);
/// Time limit for asking etcd to end the export of a removed replica. The replica is already
/// removed, so the caller does not wait long.
const FORMER: Duration = Duration::from_secs(2);

/// Creates a volume on devices of nodes. The volume is not published, and no node holds it.
pub async fn create(
    engine: &Rc<Engine>,
    name: String,
    id: Uuid,
    bytes: Option<u64>,
    replicas: Vec<NewReplica>,
    settings: Settings,
    force: bool,
) -> Result<(), RpcError> {
    let running = engine.cluster.joined()?;
    let field = |at| format!("devices[{at}]");
    let make = async |devices| {
        let new = NewVolume {
            name,
            id: Some(id),
            bytes,
            devices,
            settings,
            force,
            copied_from: None,
        };
        lifecycle::create_record(engine, new).await.map(drop)
    };
    with_exports(engine, &running, VolumeId(id), &replicas, field, make).await
}

/// The addresses of the nodes that a publication names.
fn portals(engine: &Engine, publication: &Publication) -> Vec<Portal> {
    let nodes = engine
        .cluster
        .running()
        .map(|running| running.inbox.nodes());
    let nodes = nodes.unwrap_or_default();
    let shown = publication.nodes();
    let keys = shown.iter().filter_map(|node| nodes.get(node));
    keys.flat_map(|key| key.description.portals.clone())
        .collect()
}

/// As [`portals`], as JSON for replies.
pub fn addresses(engine: &Engine, publication: &Publication) -> Vec<Value> {
    let address = |portal: Portal| {
        let ip = portal.traddr.parse().map(adrfam).unwrap_or_default();
        json!({
            "trtype": portal.trtype, "adrfam": ip, "traddr": portal.traddr,
            "trsvcid": portal.trsvcid,
        })
    };
    let all = portals(engine, publication).into_iter();
    all.map(address).collect()
}

/// Publishes the volume on `nodes`. Without any: on the nodes with replicas and then on others, at
/// most 16.
pub async fn publish(
    engine: &Rc<Engine>,
    id: Uuid,
    hosts: Vec<String>,
    any_host: bool,
    nodes: &[String],
) -> Result<Publication, RpcError> {
    let running = engine.cluster.joined()?;
    let nodes = if nodes.is_empty() {
        nodes_for(engine, &running, id)
    } else {
        let nodes = nodes.iter().enumerate().map(|(at, node)| {
            let found = running.find(node);
            found.map_err(|error| error.field(format!("nodes[{at}]")))
        });
        nodes.collect::<Result<_, _>>()?
    };
    let request = PublishRequest {
        hosts,
        any_host,
        nodes,
    };
    running
        .operator
        .publish(VolumeId(id), &request)
        .await
        .or_refuse()
}

/// The nodes with replicas, then others, up to 16.
fn nodes_for(engine: &Engine, running: &Running, id: Uuid) -> Vec<NodeId> {
    let listed = engine.volumes.find(&id.to_string()).ok();
    let replicas = listed.into_iter().flat_map(|listed| listed.record.replicas);
    let of_replicas = replicas.filter_map(|one| one.node.map(NodeId));
    let mut nodes: Vec<NodeId> = Vec::new();
    for node in of_replicas.chain(running.inbox.nodes().into_keys()) {
        if nodes.len() < nacre_cluster_core::slots::MAX_SLOTS && !nodes.contains(&node) {
            nodes.push(node);
        }
    }
    nodes
}

pub async fn unpublish(engine: &Rc<Engine>, id: Uuid) -> Result<(), RpcError> {
    let running = engine.cluster.joined()?;
    if running.operator.unpublish(VolumeId(id)).await.or_refuse()? {
        return Ok(());
    }
    let cause = format!("volume \"{id}\" is not published");
    Err(RpcError::errno(Errno::ENOENT, cause).field("name"))
}

/// Deletes a volume that is not published, and ends the exports of its devices. Waits for the nodes
/// that have a lease.
pub async fn delete(engine: &Rc<Engine>, id: Uuid, force: Option<String>) -> Result<(), RpcError> {
    let running = engine.cluster.joined()?;
    let volume = VolumeId(id);
    let name = engine.volumes.find(&id.to_string())?.name();
    let publications = running.operator.publications().await.or_refuse()?;
    if publications.contains_key(&volume) {
        let cause = format!("volume \"{name}\" is published");
        return Err(RpcError::errno(Errno::EBUSY, cause)
            .field("name")
            .remedy("unpublish it first: volume_unpublish"));
    }
    released(engine, id).await;
    lifecycle::delete(engine, &id.to_string(), force).await?;
    end_unused(&running, volume).await?;
    let end = tokio::time::Instant::now() + ENDED;
    while tokio::time::Instant::now() < end {
        let exports = running.operator.exports(Some(volume)).await.or_refuse()?;
        let (away, waiting): (Vec<_>, Vec<_>) = (exports.iter())
            .filter(|(_, _, export)| export.want == Want::Gone)
            .partition(|(node, _, _)| running.inbox.is_node_away(*node));
        if waiting.is_empty() {
            for (node, _, export) in away {
                let (node, device) = (running.name_of(*node), &export.device);
                info!(
                    volume = name,
                    node, device, "the device stays until its node returns"
                );
            }
            break;
        }
        tokio::time::sleep(LOOK).await;
    }
    Ok(())
}

/// Ends the exports of the volume that no record names. Those that a daemon is making at the moment
/// stay.
async fn end_unused(running: &Running, volume: VolumeId) -> Result<(), RpcError> {
    let exports = running.operator.exports(Some(volume)).await.or_refuse()?;
    for (node, export_id, _) in exports {
        let ended = running.operator.unexport_unused(node, export_id, false);
        ended.await.or_refuse()?;
    }
    Ok(())
}

/// Asks etcd to end the exports of a removed replica; gives up after [`FORMER`]. The replica's node
/// also ends the export when it sees the volume's record. If that node is away, it finds the
/// request when it returns.
pub async fn end_exports_of_former(engine: &Engine, id: Uuid) {
    let Ok(running) = engine.cluster.joined() else {
        return;
    };
    match timeout(FORMER, end_unused(&running, VolumeId(id))).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => {
            debug!(volume = %id, %error, "the node of the former replica ends its export");
        }
        Err(_) => debug!(volume = %id, "etcd is slow; the former replica's node ends its export"),
    }
}

/// Waits until the volume has no holder, for at most [`RELEASED`].
async fn released(engine: &Engine, id: Uuid) {
    let end = tokio::time::Instant::now() + RELEASED;
    let is_held = || {
        let listed = engine.volumes.find(&id.to_string());
        listed.is_ok_and(|listed| listed.record.holder.is_some())
    };
    while is_held() && tokio::time::Instant::now() < end {
        tokio::time::sleep(LOOK).await;
    }
}
