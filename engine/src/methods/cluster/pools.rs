//! `cluster_get_pools`: the pools of all nodes, as they report them.

use std::rc::Rc;

use nacre_cluster_core::PoolId;
use nacre_cluster_node::{PoolKey, PoolState};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::read as read_etcd;
use crate::rpc::{Class, Method, NoParams, Order, Registry, RpcError};
use crate::services::Engine;

pub fn register(registry: &mut Registry<Engine>) {
    registry.add::<GetPools>();
}

/// A pool of a node.
#[derive(Debug, Serialize, JsonSchema)]
pub struct ClusterPool {
    #[schemars(with = "String")]
    id: Uuid,
    name: String,
    #[schemars(with = "String")]
    node: Uuid,
    /// `None`: the node has no description.
    node_name: Option<String>,
    class: Option<String>,
    state: ClusterPoolState,
    total_bytes: u64,
    free_bytes: u64,
    /// Free bytes that metadata and thick volumes keep.
    reserved_bytes: u64,
    /// The sizes of all volumes.
    provisioned_bytes: u64,
    /// Space for replicas that their node has not made yet.
    promised_bytes: u64,
    /// The largest replica for which the cluster uses the pool.
    room_bytes: u64,
    thin_room_bytes: u64,
}

/// The state of a pool for operators. A node reports [`PoolState`]; this one also considers the
/// lease of the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ClusterPoolState {
    Online,
    /// It takes no new volumes: its log cannot be written.
    Held,
    /// Its disk or its node is away.
    Away,
}

impl ClusterPool {
    fn of(id: PoolId, key: PoolKey, name: Option<String>, is_live: bool) -> Self {
        let promised = key.promised(true).saturating_add(key.promised(false));
        let (node, room) = (key.node(), |thin| key.room(thin));
        let (room_bytes, thin_room_bytes) = (room(false), room(true));
        let report = key.report;
        Self {
            id: id.0,
            name: report.name,
            node: node.0,
            node_name: name,
            class: report.class,
            state: match report.state {
                _ if !is_live => ClusterPoolState::Away,
                PoolState::Online => ClusterPoolState::Online,
                PoolState::Held => ClusterPoolState::Held,
                PoolState::Away => ClusterPoolState::Away,
            },
            total_bytes: report.total,
            free_bytes: report.free,
            reserved_bytes: report.reserved,
            provisioned_bytes: report.provisioned,
            promised_bytes: promised,
            room_bytes,
            thin_room_bytes,
        }
    }
}

pub struct GetPools;

impl Method<Engine> for GetPools {
    const NAME: &'static str = "cluster_get_pools";
    const ABOUT: &'static str = "Lists the pools of all nodes, with the space that is promised to \
         replicas.";
    const CLASS: Class = Class::Read;
    const ORDER: Order = Order::Free;
    type Params = NoParams;
    type Reply = Vec<ClusterPool>;

    async fn apply(_: NoParams, engine: Rc<Engine>) -> Result<Vec<ClusterPool>, RpcError> {
        let operator = engine.cluster.operator()?;
        let read =
            read_etcd(
                move || async move { Ok((operator.pools().await?, operator.described().await?)) },
            );
        let (pools, nodes) = read.await?;
        let pools = pools.into_iter().map(|(id, key)| {
            let node = nodes.iter().find(|(node, ..)| *node == key.node());
            let name = node.map(|(_, key, _)| key.description.name.clone());
            let is_live = node.is_some_and(|(_, _, has_lease)| *has_lease);
            ClusterPool::of(id, key, name, is_live)
        });
        Ok(pools.collect())
    }
}
