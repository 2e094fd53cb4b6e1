//! `cluster_get_volumes`, `cluster_move_volume`: the volumes, and the nodes that serve them.

use std::collections::BTreeMap;
use std::rc::Rc;

use nacre_cluster_core::{NodeId, VolumeId};
use nacre_cluster_node::{Operator, PendingRemoval, Publication, VolumeState, VolumeStatus};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use uuid::Uuid;

use super::removals::{ClusterRemoval, MAX_REMOVALS};
use super::{LIMIT, named, node, read as read_etcd, refuse_long_wait, within};
use crate::rpc::{Class, Method, NoParams, Order, Registry, RpcError};
use crate::services::Engine;
use crate::services::cluster;
use crate::values::read;

/// Default of `wait_s`, in seconds: a handover takes less than one, and is given up after 5.
const WAIT_S: u64 = 10;

pub fn register(registry: &mut Registry<Engine>) {
    registry.add::<GetVolumes>().add::<MoveVolume>();
}

/// A volume of the cluster.
#[derive(Debug, Serialize, JsonSchema)]
pub struct ClusterVolume {
    #[schemars(with = "String")]
    id: Uuid,
    /// `None`: the record of the volume cannot be read.
    name: Option<String>,
    state: ClusterVolumeState,
    /// The node that took the volume last. `None`: the last one handed it over.
    holder: Option<ClusterVolumeNode>,
    /// The lease of the holder stands: it serves the volume.
    lease_stands: bool,
    /// Replicas of the volume, and those of them that are in sync.
    replicas: usize,
    in_sync: usize,
    /// The nodes that show the volume to hosts.
    nodes: Vec<ClusterVolumeNode>,
    /// `None`: no host may use the volume.
    publication: Option<ClusterPublication>,
    /// Removals of hosts and devices that wait for a node, at most 32.
    removals: Vec<ClusterRemoval>,
}

/// The hosts that may use a volume, and where they find it.
#[derive(Debug, Serialize, JsonSchema)]
pub struct ClusterPublication {
    nqn: String,
    /// NQNs of the hosts.
    hosts: Vec<String>,
    any_host: bool,
    /// Addresses of the nodes that show it.
    listen_addresses: Vec<Value>,
}

impl ClusterPublication {
    fn of(publication: &Publication, listen_addresses: Vec<Value>) -> Self {
        Self {
            nqn: publication.nqn.clone(),
            hosts: publication.hosts.clone(),
            any_host: publication.any_host,
            listen_addresses,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct ClusterVolumeNode {
    #[schemars(with = "String")]
    id: Uuid,
    /// `None`: the node has no description.
    name: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ClusterVolumeState {
    /// A node serves the volume, and all replicas are in sync.
    Healthy,
    /// A node serves the volume, and a replica is not in sync.
    Degraded,
    /// No node serves the volume.
    WithoutHolder,
    /// The record of the volume is damaged, or of a later version.
    Unreadable,
}

impl From<VolumeState> for ClusterVolumeState {
    fn from(state: VolumeState) -> Self {
        match state {
            VolumeState::Healthy => Self::Healthy,
            VolumeState::Degraded => Self::Degraded,
            VolumeState::WithoutHolder => Self::WithoutHolder,
            VolumeState::Unreadable => Self::Unreadable,
        }
    }
}

impl ClusterVolume {
    fn of(
        volume: VolumeStatus,
        names: &BTreeMap<NodeId, String>,
        removals: &[PendingRemoval],
        addresses: &dyn Fn(&Publication) -> Vec<Value>,
    ) -> Self {
        let node = |id: NodeId| ClusterVolumeNode {
            id: id.0,
            name: names.get(&id).cloned(),
        };
        let its = removals.iter().filter(|one| one.volume == volume.id);
        let its = its.take(MAX_REMOVALS);
        Self {
            id: volume.id.0,
            removals: its.map(|one| ClusterRemoval::of(one, names)).collect(),
            name: Some(volume.name).filter(|_| volume.state != VolumeState::Unreadable),
            state: volume.state.into(),
            holder: volume.holder.map(|holder| node(holder.node)),
            lease_stands: volume.lease_stands,
            replicas: volume.replicas,
            in_sync: volume.in_sync,
            publication: (volume.publication.as_ref())
                .map(|publication| ClusterPublication::of(publication, addresses(publication))),
            nodes: volume.nodes.into_iter().map(node).collect(),
        }
    }
}

pub struct GetVolumes;

impl Method<Engine> for GetVolumes {
    const NAME: &'static str = "cluster_get_volumes";
    const ABOUT: &'static str = "Lists the volumes of the cluster with the nodes that serve and \
         show them, and their replicas.";
    const CLASS: Class = Class::Read;
    const ORDER: Order = Order::Free;
    type Params = NoParams;
    type Reply = Vec<ClusterVolume>;

    async fn apply(_: NoParams, engine: Rc<Engine>) -> Result<Vec<ClusterVolume>, RpcError> {
        let operator = engine.cluster.operator()?;
        let addresses = |publication: &Publication| cluster::addresses(&engine, publication);
        volumes(&operator, &addresses).await
    }
}

pub(super) async fn volumes(
    operator: &Operator,
    addresses: &dyn Fn(&Publication) -> Vec<Value>,
) -> Result<Vec<ClusterVolume>, RpcError> {
    let operator = operator.clone();
    let read = read_etcd(move || async move {
        Ok((
            operator.volumes().await?,
            operator.node_names().await?,
            PendingRemoval::all(&operator).await?,
        ))
    });
    let (volumes, names, removals) = read.await?;
    let volumes = volumes.into_iter();
    Ok(volumes
        .map(|volume| ClusterVolume::of(volume, &names, &removals, addresses))
        .collect())
}

/// The volume with this id or name. An id is not looked up in etcd.
pub(super) async fn volume(operator: &Operator, text: &str) -> Result<VolumeId, RpcError> {
    if let Ok(id) = text.parse::<Uuid>() {
        return Ok(VolumeId(id));
    }
    let operator = operator.clone();
    let volumes = read_etcd(move || async move { operator.volumes().await }).await?;
    let readable = volumes
        .iter()
        .filter(|volume| volume.state != VolumeState::Unreadable);
    let known: Vec<(Uuid, &str)> = readable
        .map(|volume| (volume.id.0, volume.name.as_str()))
        .collect();
    let found = named("volume", text, &known);
    found.map(VolumeId).map_err(|error| error.field("volume"))
}

pub struct MoveVolume;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MoveVolumeParams {
    /// Name or id of the volume.
    pub volume: String,
    /// Name or id of the node that shall serve the volume.
    pub node: String,
    /// How long to wait for the end of the move, in seconds: at most 600. Default: 10.
    #[serde(default = "wait_s", deserialize_with = "read::seconds")]
    pub wait_s: u64,
}

fn wait_s() -> u64 {
    WAIT_S
}

#[derive(Debug, Serialize, JsonSchema)]
pub struct MoveVolumeReply {
    #[schemars(with = "String")]
    volume: Uuid,
    #[schemars(with = "String")]
    node: Uuid,
}

impl Method<Engine> for MoveVolume {
    const NAME: &'static str = "cluster_move_volume";
    const ABOUT: &'static str = "Asks the node that serves a volume to hand it over to another \
         node, and waits until that is done. Hosts see no error.";
    const CLASS: Class = Class::Operate;
    const ORDER: Order = Order::Free;
    type Params = MoveVolumeParams;
    type Reply = MoveVolumeReply;

    async fn apply(
        params: MoveVolumeParams,
        engine: Rc<Engine>,
    ) -> Result<MoveVolumeReply, RpcError> {
        let wait = refuse_long_wait(params.wait_s)?;
        let operator = engine.cluster.operator()?;
        let volume = volume(&operator, &params.volume).await?;
        let node = node(&operator, &params.node).await?;
        let moved = operator.move_volume(volume, node, wait);
        within(wait + LIMIT, moved).await?;
        Ok(MoveVolumeReply {
            volume: volume.0,
            node: node.0,
        })
    }
}
