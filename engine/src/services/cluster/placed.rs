//! Replicas on pools that the cluster chooses.
//!
//! ```text
//!   place    pools chosen, space promised, exports wanted: one transaction
//!   export   the nodes make the lvols ([`super::lvols`]) ▸ this node reaches them
//!   work     the control writes labels and the record
//!   settle   made: the exports end with their replicas; not made: they end now, with the lvols
//! ```

use std::rc::Rc;
use std::time::Duration;

use nacre_bdev::Bdev;
use nacre_bdev_replica::handle::NewVolume;
use nacre_bdev_replica::model::{RESERVED, Settings};
use nacre_cluster_core::placement::Wish;
use nacre_cluster_core::{MemberId, NodeId, PoolId, VolumeId};
use nacre_cluster_node::export::Want;
use nacre_cluster_node::{Error, Export, Place, Placed, Placing, Rebuild};
use tracing::warn;
use uuid::Uuid;

use super::Running;
use super::replicas::with_devices;
use crate::refusal::OrRefuse;
use crate::rpc::RpcError;
use crate::rpc::error::Errno;
use crate::services::engine::Engine;
use crate::services::volumes::lifecycle;

/// Time for all nodes to enlarge their lvols, and for this node to notice it.
const GROWN: Duration = Duration::from_secs(30);
const LOOK: Duration = Duration::from_millis(100);
/// Pause after a failure to end exports.
const AGAIN: Duration = Duration::from_secs(1);

/// Replicas of a new volume, as an operator wishes for them.
#[derive(Debug, Clone, Default)]
pub struct PlacedReplicas {
    pub count: usize,
    pub thin: bool,
    pub class: Option<String>,
    pub spread: Vec<String>,
    pub strict: bool,
    /// Nodes by name or id: each of them gets a replica.
    pub nodes: Vec<String>,
}

/// A replica that is put in the place of another one.
pub(super) struct Successor<'a> {
    pub volume: Uuid,
    /// The place of the former replica.
    pub place: &'a Place,
    /// The nodes of the replicas that stay.
    pub kept: Vec<NodeId>,
    pub rebuild: Rebuild,
    pub shunned: Vec<PoolId>,
}

/// Creates a volume of `bytes` on pools. It is not published, and no node holds it.
pub async fn create_placed(
    engine: &Rc<Engine>,
    name: String,
    id: Uuid,
    bytes: u64,
    replicas: PlacedReplicas,
    settings: Settings,
) -> Result<(), RpcError> {
    let running = engine.volumes.cluster.member()?;
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
        is_rebuild: false,
    };
    let placing = Placing {
        volume: VolumeId(id),
        members: new_members(wish.count),
        wish,
        kept: Vec::new(),
        rebuild: None,
        shunned: Vec::new(),
        by: running.myself()?,
    };
    let make = async |devices| {
        let new = NewVolume {
            name,
            id: Some(id),
            bytes: Some(bytes),
            devices,
            settings,
            force: false,
        };
        lifecycle::create_record(engine, new).await.map(drop)
    };
    with_placed(engine, &running, &placing, |_| {}, make).await
}

/// Places a successor, and runs `work` with its device. `chosen` learns the pool before that.
pub(super) async fn with_successor<T, Work>(
    engine: &Rc<Engine>,
    running: &Rc<Running>,
    successor: Successor<'_>,
    chosen: impl FnOnce(PoolId),
    work: impl FnOnce(String) -> Work,
) -> Result<T, RpcError>
where
    Work: Future<Output = Result<T, RpcError>>,
{
    let Successor {
        volume,
        place,
        kept,
        rebuild,
        shunned,
    } = successor;
    let placing = Placing {
        volume: VolumeId(volume),
        members: new_members(1),
        wish: Wish {
            count: 1,
            bytes: place.bytes,
            thin: place.thin,
            class: place.class.clone(),
            spread: place.spread.clone(),
            strict: place.strict,
            nodes: Vec::new(),
            is_rebuild: true,
        },
        kept,
        rebuild: Some(rebuild),
        shunned,
        by: running.myself()?,
    };
    let of_one = async |mut names: Vec<String>| work(names.remove(0)).await;
    let first = |placed: &[Placed]| {
        let place = placed.first().and_then(|one| one.export.place.as_ref());
        chosen(
            place
                .map(|place| PoolId(place.pool))
                .unwrap_or(PoolId(Uuid::nil())),
        );
    };
    with_placed(engine, running, &placing, first, of_one).await
}

async fn with_placed<T, Work>(
    engine: &Rc<Engine>,
    running: &Rc<Running>,
    placing: &Placing,
    chosen: impl FnOnce(&[Placed]),
    work: impl FnOnce(Vec<String>) -> Work,
) -> Result<T, RpcError>
where
    Work: Future<Output = Result<T, RpcError>>,
{
    let volume = placing.volume;
    let placed = match running.operator.place(placing).await {
        Ok(placed) => placed,
        Err(error) => {
            if error.is_passing() {
                // etcd may have made the transaction all the same.
                let members = placing.members.clone();
                tokio::task::spawn_local(end_unused(Rc::clone(running), volume, members));
            }
            return Err(error).or_refuse();
        }
    };
    chosen(&placed);
    let made: Vec<(MemberId, NodeId)> = placed.iter().map(|one| (one.member, one.node)).collect();
    for one in &placed {
        running.note(one.member, one.node, &one.export.device);
    }
    let field = |_| "size".to_owned();
    let exported = async { Ok(()) };
    with_devices(engine, running, volume, &made, field, exported, work).await
}

fn new_members(count: usize) -> Vec<MemberId> {
    (0..count).map(|_| MemberId(Uuid::new_v4())).collect()
}

/// Ends the exports of an unanswered request. The end of the daemon ends them, too.
async fn end_unused(running: Rc<Running>, volume: VolumeId, members: Vec<MemberId>) {
    while !running.is_ending.get() {
        tokio::time::sleep(AGAIN).await;
        let ended = async {
            for (node, member, _) in running.operator.exports(Some(volume)).await? {
                if members.contains(&member) {
                    running.operator.unexport_unused(node, member, true).await?;
                }
            }
            Ok::<(), Error>(())
        };
        match ended.await {
            Ok(()) => return,
            Err(error) => warn!(%error, "exports of a volume are not ended yet"),
        }
    }
}

/// The replicas of a volume whose pools the cluster chose.
pub(super) async fn places(
    running: &Running,
    volume: Uuid,
) -> Result<Vec<(NodeId, MemberId, Export)>, Error> {
    let mut exports = running.operator.exports(Some(VolumeId(volume))).await?;
    exports.retain(|(_, _, export)| export.place.is_some() && export.want == Want::There);
    Ok(exports)
}

/// Enlarges the lvols of a volume's replicas for `bytes` of data, as far as the cluster made them,
/// and waits until this node has the new sizes.
pub async fn grow_lvols(engine: &Rc<Engine>, volume: Uuid, bytes: u64) -> Result<(), RpcError> {
    let running = engine.volumes.cluster.member()?;
    let bytes = bytes.saturating_add(RESERVED);
    for (node, ..) in places(&running, volume).await.or_refuse()? {
        if running.inbox.is_node_away(node) {
            let name = engine.volumes.cluster.name_of(node.0).unwrap_or_default();
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
        for (node, member, export) in places(&running, volume).await.or_refuse()? {
            let name = || engine.volumes.cluster.name_of(node.0).unwrap_or_default();
            if export.bytes < bytes {
                if let Some(why) = export.why {
                    let cause = format!("the lvol on node {} does not grow: {why}", name());
                    return Err(RpcError::errno(Errno::EAGAIN, cause).field("name"));
                }
                waits_for = Some(name());
                continue;
            }
            let layer = plane.bdevs.lookup(&member.0.to_string());
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
