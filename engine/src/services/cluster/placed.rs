//! Replicas on pools that the cluster chooses.
//!
//! ```text
//!   place    choose pools, promise space, create the exports' keys: one transaction
//!   export   the nodes make the lvols ([`super::lvols`]) ▸ this node reaches their devices
//!   work     the control writes labels and the record
//!   conclude on success, the exports end with their replicas; else they end now, with the lvols
//! ```

use std::rc::Rc;
use std::time::Duration;

use nacre_bdev::Bdev;
use nacre_bdev_replica::handle::{CopiedFrom, NewVolume};
use nacre_bdev_replica::model::{Origin, RESERVED, ReplicaRecord, Settings};
use nacre_cluster_core::placement::Wish;
use nacre_cluster_core::{ExportId, NodeId, PoolId, VolumeId};
use nacre_cluster_node::export::Want;
use nacre_cluster_node::{CloneSource, Error, Export, Placed, Placing, PoolChoice, Resync};
use tracing::warn;
use uuid::Uuid;

use super::Running;
use super::last_errors::LastErrors;
use super::replicas::with_devices;
use crate::refusal::OrRefuse;
use crate::rpc::RpcError;
use crate::rpc::error::Errno;
use crate::services::Engine;
use crate::services::volumes::lifecycle;

/// Time limit for all nodes to enlarge their lvols, and for this node to notice the new sizes.
const GROWN: Duration = Duration::from_secs(30);
const LOOK: Duration = Duration::from_millis(100);
/// Pause between two attempts to end exports.
const AGAIN: Duration = Duration::from_secs(1);
/// Longest time after which etcd may still execute a request that was not answered.
const ON_ITS_WAY: Duration = Duration::from_secs(10);

/// An operator's demands for the replicas of a new volume.
#[derive(Debug, Clone, Default)]
pub struct PlacedReplicas {
    pub count: usize,
    pub thin: bool,
    pub class: Option<String>,
    pub spread: Vec<String>,
    pub strict: bool,
    /// Nodes by name or id: each of them gets a replica.
    pub nodes: Vec<String>,
    /// The lvols of a snapshot, of which the first replicas are clones, as many as can be. The
    /// other replicas are filled from those.
    pub source: Option<(Vec<CloneSource>, Origin)>,
}

/// A replica that takes the place of another one.
pub(super) struct Successor<'a> {
    pub volume: Uuid,
    /// The pool choice of the former replica: its size and its demands hold for the successor.
    pub place: &'a PoolChoice,
    /// The nodes of the replicas that stay.
    pub other_nodes: Vec<NodeId>,
    pub resync: Resync,
    pub left_out: Vec<PoolId>,
}

/// Creates a volume of `bytes` on pools that the cluster chooses. The volume is not published, and
/// no node holds it.
pub async fn create_placed(
    engine: &Rc<Engine>,
    name: String,
    id: Uuid,
    bytes: u64,
    replicas: PlacedReplicas,
    settings: Settings,
) -> Result<(), RpcError> {
    let running = engine.cluster.joined()?;
    if engine.volumes.find(&name).is_ok() {
        let cause = format!("there is a volume \"{name}\" already");
        return Err(RpcError::errno(Errno::EEXIST, cause).field("name"));
    }
    let nodes = replicas.nodes.iter().enumerate().map(|(at, node)| {
        let found = running.find(node);
        found.map_err(|error| error.field(format!("nodes[{at}]")))
    });
    let wish = Wish {
        count: replicas.count,
        bytes: bytes.saturating_add(RESERVED),
        thin: replicas.thin,
        class: replicas.class,
        spread: replicas.spread,
        strict: replicas.strict,
        nodes: nodes.collect::<Result<_, _>>()?,
        is_resync: false,
    };
    let (sources, origin) = replicas.source.unzip();
    let sources = sources.unwrap_or_default();
    let placing = Placing {
        volume: VolumeId(id),
        export_ids: new_exports(wish.count),
        wish,
        other_nodes: Vec::new(),
        resync: None,
        left_out: Vec::new(),
        clone_of: sources,
        by: running.myself()?,
    };
    let placed = place_all(&running, &placing).await.or_refuse()?;
    let place = |one: &Placed| one.export.place.as_ref()?.source;
    let clones = placed.iter().take_while(|one| place(one).is_some());
    let devices = clones.count();
    let copied_from = origin.map(|origin| CopiedFrom { origin, devices });
    let make = async |devices| {
        let new = NewVolume {
            name,
            id: Some(id),
            bytes: Some(bytes),
            devices,
            settings,
            force: false,
            copied_from,
        };
        lifecycle::create_record(engine, new).await.map(drop)
    };
    with_placed(engine, &running, placing.volume, placed, make).await
}

/// The reason that a replica is not replaced.
#[derive(Debug, thiserror::Error)]
pub(super) enum NotReplaced {
    /// The cluster refused, for example because no pool has room.
    #[error("{0}")]
    Cluster(#[from] Error),
    #[error("{0}")]
    Call(#[from] RpcError),
}

/// Places a successor, and runs `work` with the name of its device. Returns the chosen pool and the
/// result of `work`.
pub(super) async fn with_successor<T, Work>(
    engine: &Rc<Engine>,
    running: &Rc<Running>,
    successor: Successor<'_>,
    work: impl FnOnce(String) -> Work,
) -> Result<(PoolId, Result<T, RpcError>), NotReplaced>
where
    Work: Future<Output = Result<T, RpcError>>,
{
    let Successor {
        volume,
        place,
        other_nodes,
        resync,
        left_out,
    } = successor;
    let placing = Placing {
        volume: VolumeId(volume),
        export_ids: new_exports(1),
        wish: Wish {
            count: 1,
            bytes: place.bytes,
            thin: place.thin,
            class: place.class.clone(),
            spread: place.spread.clone(),
            strict: place.strict,
            nodes: Vec::new(),
            is_resync: true,
        },
        other_nodes,
        resync: Some(resync),
        left_out,
        clone_of: Vec::new(),
        by: running.myself()?,
    };
    let placed = place_all(running, &placing).await?;
    let pool = placed.first().and_then(|one| one.export.place.as_ref());
    let pool = PoolId(pool.map(|place| place.pool).unwrap_or_default());
    let of_one = async |mut names: Vec<String>| work(names.remove(0)).await;
    let done = with_placed(engine, running, placing.volume, placed, of_one).await;
    Ok((pool, done))
}

/// Chooses the pools and creates the exports' keys.
async fn place_all(running: &Rc<Running>, placing: &Placing) -> Result<Vec<Placed>, Error> {
    let placed = running.operator.place(placing).await;
    if let Err(Error::Store { .. }) = &placed {
        // etcd may have made the transaction all the same.
        let (volume, export_ids) = (placing.volume, placing.export_ids.clone());
        tokio::task::spawn_local(end_unused(Rc::clone(running), volume, export_ids));
    }
    placed
}

async fn with_placed<T, Work>(
    engine: &Rc<Engine>,
    running: &Rc<Running>,
    volume: VolumeId,
    placed: Vec<Placed>,
    work: impl FnOnce(Vec<String>) -> Work,
) -> Result<T, RpcError>
where
    Work: Future<Output = Result<T, RpcError>>,
{
    for one in &placed {
        running.note(one.export_id, one.node, &one.export.device);
    }
    let made: Vec<(ExportId, NodeId)> =
        placed.iter().map(|one| (one.export_id, one.node)).collect();
    let field = |_| None;
    let exported = async { Ok(()) };
    with_devices(engine, running, volume, &made, field, exported, work).await
}

fn new_exports(count: usize) -> Vec<ExportId> {
    (0..count).map(|_| ExportId(Uuid::new_v4())).collect()
}

/// Ends the exports of a request that etcd has not answered and may still execute. They also end
/// with the incarnation of this node.
async fn end_unused(running: Rc<Running>, volume: VolumeId, export_ids: Vec<ExportId>) {
    let begin = tokio::time::Instant::now();
    let not_ended = LastErrors::default();
    while !running.is_ending.get() {
        tokio::time::sleep(AGAIN).await;
        let ended = async {
            for (node, export_id, _) in running.operator.exports(Some(volume)).await? {
                if export_ids.contains(&export_id) {
                    running
                        .operator
                        .unexport_unused(node, export_id, true)
                        .await?;
                }
            }
            Ok::<(), Error>(())
        };
        match ended.await {
            Ok(()) if begin.elapsed() >= ON_ITS_WAY => return,
            Ok(()) => {}
            Err(error) if not_ended.is_new(&volume, &error.to_string()) => {
                warn!(%error, "exports of a volume are not ended yet");
            }
            Err(_) => {}
        }
    }
}

/// The exports of the replicas in `replicas` whose pools the cluster chose.
pub(super) async fn places(
    running: &Running,
    replicas: &[ReplicaRecord],
) -> Result<Vec<(NodeId, ExportId, Export)>, Error> {
    let named = replicas.iter().filter_map(|replica| {
        let export = Uuid::parse_str(&replica.device).ok()?;
        Some((NodeId(replica.node?), ExportId(export)))
    });
    let named: Vec<_> = named.collect();
    let mut exports = running.operator.exports_of(&named).await?;
    exports.retain(|(_, _, export)| export.place.is_some() && export.want == Want::There);
    Ok(exports)
}

/// Enlarges the lvols that the cluster made for a volume's replicas, for `bytes` of data. Waits
/// until this node sees the new sizes.
pub async fn grow_lvols(engine: &Rc<Engine>, volume: Uuid, bytes: u64) -> Result<(), RpcError> {
    let running = engine.cluster.joined()?;
    let bytes = bytes.saturating_add(RESERVED);
    let replicas = engine.volumes.find(&volume.to_string())?.record.replicas;
    let placed = places(&running, &replicas).await.or_refuse()?;
    must_fit_others(engine, &replicas, &placed, bytes)?;
    for (node, ..) in placed {
        if running.inbox.is_node_away(node) {
            let name = engine.cluster.name_of(node.0).unwrap_or_default();
            let cause = format!("node {name} has a replica of the volume, and no lease");
            return Err(RpcError::errno(Errno::EAGAIN, cause)
                .field("name")
                .remedy("bring the node back, or wait until its replica is replaced"));
        }
    }
    let grown = running.operator.grow_places(VolumeId(volume), bytes).await;
    grown.or_refuse()?;
    let end = tokio::time::Instant::now() + GROWN;
    loop {
        let plane = engine.plane()?;
        let mut waits_for = None;
        for (node, export_id, export) in places(&running, &replicas).await.or_refuse()? {
            let name = || engine.cluster.name_of(node.0).unwrap_or_default();
            if export.bytes < bytes {
                if let Some(why) = export.why {
                    let cause = format!("the lvol on node {} does not grow: {why}", name());
                    return Err(RpcError::errno(Errno::EAGAIN, cause).field("name"));
                }
                waits_for = Some(name());
                continue;
            }
            let layer = plane.bdevs.lookup(&export_id.0.to_string());
            if layer.is_none_or(|layer| layer.geometry().bytes() < bytes) {
                waits_for = Some(name());
            }
        }
        let Some(name) = waits_for else {
            return Ok(());
        };
        if tokio::time::Instant::now() >= end {
            let cause = format!("the lvol on node {name} has not grown within {GROWN:?}");
            return Err(RpcError::errno(Errno::ETIMEDOUT, cause)
                .field("name")
                .remedy("try again: space that was promised stays promised"));
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// Refuses to grow if a replica on a device that an operator named has fewer than `bytes`: the
/// other lvols would grow in vain.
fn must_fit_others(
    engine: &Engine,
    replicas: &[ReplicaRecord],
    placed: &[(NodeId, ExportId, Export)],
    bytes: u64,
) -> Result<(), RpcError> {
    let plane = engine.plane()?;
    let is_placed = |device: &str| placed.iter().any(|(_, id, _)| id.0.to_string() == device);
    for replica in replicas.iter().filter(|one| !is_placed(&one.device)) {
        let layer = plane.bdevs.lookup(&replica.device);
        let size = layer.map(|layer| layer.geometry().bytes());
        if size.is_none_or(|size| size < bytes) {
            let device = replica.node_device.as_ref().unwrap_or(&replica.device);
            let node = replica.node.and_then(|id| engine.cluster.name_of(id));
            let node = node.unwrap_or_default();
            let Some(size) = size else {
                let cause = format!("device {node}:{device} of a replica is not reached");
                return Err(RpcError::errno(Errno::EAGAIN, cause)
                    .field("name")
                    .remedy("bring the device back, or replace the replica"));
            };
            let cause = format!("device {node}:{device} has {size} bytes, and {bytes} are needed");
            return Err(RpcError::errno(Errno::EINVAL, cause)
                .field("name")
                .remedy("enlarge the device first"));
        }
    }
    Ok(())
}
