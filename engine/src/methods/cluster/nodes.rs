//! `cluster_set_cordon`, `cluster_drain`, `cluster_fence`, `cluster_remove_node`: operations on
//! nodes.

use std::rc::Rc;
use std::time::Duration;

use nacre_cluster_node::Operator;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::{LIMIT, follow, node, read_status, refuse_long_wait, within};
use crate::rpc::{Class, Method, Order, Registry, RpcError};
use crate::services::Engine;
use crate::values::read;

pub fn register(registry: &mut Registry<Engine>) {
    registry
        .add::<SetCordon>()
        .add::<Drain>()
        .add::<Fence>()
        .add::<RemoveNode>();
}

pub struct SetCordon;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SetCordonParams {
    /// Name or id of the node.
    pub node: String,
    /// True: cordon the node; false: end that.
    pub cordon: bool,
}

impl Method<Engine> for SetCordon {
    const NAME: &'static str = "cluster_set_cordon";
    const ABOUT: &'static str = "Cordons a node: it gets no new replicas, and takes a volume only \
         if no other node can. Or ends that.";
    const CLASS: Class = Class::Operate;
    const ORDER: Order = Order::Free;
    type Params = SetCordonParams;
    type Reply = bool;

    async fn apply(params: SetCordonParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        let operator = engine.cluster.operator()?;
        let node = node(&operator, &params.node).await?;
        within(LIMIT, operator.set_cordon(node, params.cordon)).await?;
        Ok(true)
    }
}

pub struct Drain;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DrainParams {
    /// Name or id of the node.
    pub node: String,
    /// False: the node may take volumes again. Absent: nothing changes, and the reply shows the
    /// progress.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drain: Option<bool>,
    /// How long to wait for the end of the drain, in seconds: at most 600. Default: 0.
    #[serde(default, deserialize_with = "read::seconds")]
    pub wait_s: u64,
}

#[derive(Debug, Serialize, JsonSchema)]
pub struct DrainReply {
    #[schemars(with = "String")]
    node: Uuid,
    /// False: no operator wants it, or it was ended.
    drain: bool,
    /// Volumes that the node still serves.
    held: usize,
}

impl Method<Engine> for Drain {
    const NAME: &'static str = "cluster_drain";
    const ABOUT: &'static str = "Drains a node: other nodes take its volumes, and its replicas \
         stay. Or ends that. The reply has the number of volumes that the node still serves.";
    const CLASS: Class = Class::Operate;
    const ORDER: Order = Order::Free;
    type Params = DrainParams;
    type Reply = DrainReply;

    async fn apply(params: DrainParams, engine: Rc<Engine>) -> Result<DrainReply, RpcError> {
        let wait = refuse_long_wait(params.wait_s)?;
        if params.drain == Some(false) && !wait.is_zero() {
            let cause = "the end of a drain has nothing to wait for";
            return Err(RpcError::invalid_params(cause).field("wait_s"));
        }
        let operator = engine.cluster.operator()?;
        drain(&operator, &params, wait).await
    }
}

pub(super) async fn drain(
    operator: &Operator,
    params: &DrainParams,
    wait: Duration,
) -> Result<DrainReply, RpcError> {
    let node = node(operator, &params.node).await?;
    if let Some(drain) = params.drain {
        within(LIMIT, operator.set_drain(node, drain)).await?;
    }
    let look = async || {
        let status = read_status(operator).await?;
        let found = status.nodes.iter().find(|found| found.id == node);
        let held = found.map_or(0, |found| found.held);
        let key = found.and_then(|found| found.key.as_ref());
        let drain = key.is_some_and(|key| key.drain);
        let node = node.0;
        Ok((DrainReply { node, drain, held }, held == 0 || !drain))
    };
    follow(wait, look).await
}

pub struct Fence;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FenceParams {
    /// Name or id of the node.
    pub node: String,
    /// True: the caller vouches that the node is off. A node that runs could still answer reads
    /// with former data.
    #[serde(default)]
    pub off: bool,
}

#[derive(Debug, Serialize, JsonSchema)]
pub struct FenceReply {
    #[schemars(with = "String")]
    node: Uuid,
    /// The incarnation that ended.
    incarnation: u64,
}

impl Method<Engine> for Fence {
    const NAME: &'static str = "cluster_fence";
    const ABOUT: &'static str = "Ends the lease of a node that is off, so that other nodes take \
         its volumes at once.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = FenceParams;
    type Reply = FenceReply;

    async fn apply(params: FenceParams, engine: Rc<Engine>) -> Result<FenceReply, RpcError> {
        let operator = engine.cluster.operator()?;
        if !params.off {
            let cause = "a node that still runs could answer reads with former data";
            let remedy = "switch the node off, and vouch for it with off = true; the other nodes \
                          fence a silent node by themselves after its lease";
            return Err(RpcError::invalid_params(cause).field("off").remedy(remedy));
        }
        let node = node(&operator, &params.node).await?;
        let incarnation = within(LIMIT, operator.fence_off(node)).await?;
        Ok(FenceReply {
            node: node.0,
            incarnation: incarnation.0,
        })
    }
}

pub struct RemoveNode;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RemoveNodeParams {
    /// Name or id of the node.
    pub node: String,
}

impl Method<Engine> for RemoveNode {
    const NAME: &'static str = "cluster_remove_node";
    const ABOUT: &'static str = "Removes a node that never returns: it must have no lease, and no \
         replica of a volume.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = RemoveNodeParams;
    type Reply = bool;

    async fn apply(params: RemoveNodeParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        let operator = engine.cluster.operator()?;
        let node = node(&operator, &params.node).await?;
        within(LIMIT, operator.remove(node)).await?;
        Ok(true)
    }
}
