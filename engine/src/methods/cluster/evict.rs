//! `cluster_evict`, `cluster_repair`: move all replicas away from a node, and release the brake.

use std::rc::Rc;

use nacre_cluster_core::NodeId;
use nacre_cluster_node::{BrakeKey, Eviction, Operator, Stuck, StuckReplica};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::{LIMIT, follow, node, read as read_etcd, refuse_long_wait, within};
use crate::rpc::{Class, Method, Order, Registry, RpcError};
use crate::services::Engine;
use crate::services::cluster::report_release;
use crate::values::read;

pub fn register(registry: &mut Registry<Engine>) {
    registry.add::<Evict>().add::<Repair>();
}

pub struct Evict;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct EvictParams {
    /// Name or id of the node.
    pub node: String,
    /// False: the node may take volumes and replicas again. Moves that have begun go on. Absent:
    /// nothing changes, and the reply shows the progress.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evict: Option<bool>,
    /// How long to wait until nothing is left to move, in seconds: at most 600. Default: 0.
    #[serde(default, deserialize_with = "read::seconds")]
    pub wait_s: u64,
}

#[derive(Debug, Serialize, JsonSchema)]
pub struct EvictReply {
    #[schemars(with = "String")]
    node: Uuid,
    /// False: no operator wants it, or it was ended.
    evict: bool,
    /// Volumes that the node still serves.
    held: usize,
    /// Replicas that are left to move.
    moving: usize,
    /// Replicas that the cluster does not move.
    stuck: Vec<EvictStuck>,
}

#[derive(Debug, Serialize, JsonSchema)]
pub struct EvictStuck {
    #[schemars(with = "String")]
    volume: Uuid,
    name: String,
    why: &'static str,
}

impl From<StuckReplica> for EvictStuck {
    fn from(stuck: StuckReplica) -> Self {
        Self {
            volume: stuck.volume.0,
            name: stuck.name,
            why: match stuck.why {
                Stuck::Named => {
                    "an operator named its device: move it with volume_move_replica, or replace \
                     it with volume_replace_replica"
                }
                Stuck::NotServed => {
                    "no node serves the volume: publish it until its replica is moved"
                }
                Stuck::Full => {
                    "the volume has as many replicas as it can have: remove this one, and add \
                     another with volume_add_replica"
                }
                Stuck::NoSource => {
                    "no replica of the volume is in sync: volume_get_volumes shows the reason"
                }
                Stuck::Unreadable => {
                    "its record cannot be read: upgrade this daemon, or restore a backup"
                }
            },
        }
    }
}

impl Method<Engine> for Evict {
    const NAME: &'static str = "cluster_evict";
    const ABOUT: &'static str = "Evicts a node: other nodes take its volumes, and its replicas on \
         pools that the cluster chose are moved, each kept until its successor is in sync. Or ends \
         that. The reply has the remaining work.";
    const CLASS: Class = Class::Operate;
    const ORDER: Order = Order::Free;
    type Params = EvictParams;
    type Reply = EvictReply;

    async fn apply(params: EvictParams, engine: Rc<Engine>) -> Result<EvictReply, RpcError> {
        let wait = refuse_long_wait(params.wait_s)?;
        if params.evict == Some(false) && !wait.is_zero() {
            let cause = "the end of an eviction has nothing to wait for";
            return Err(RpcError::invalid_params(cause).field("wait_s"));
        }
        let operator = engine.cluster.operator()?;
        let node = node(&operator, &params.node).await?;
        if let Some(evict) = params.evict {
            within(LIMIT, operator.set_evict(node, evict)).await?;
        }
        let look = async || {
            let Eviction {
                is_wanted,
                held,
                moving,
                stuck,
            } = left(&operator, node).await?;
            let reply = EvictReply {
                node: node.0,
                evict: is_wanted,
                held,
                moving,
                stuck: stuck.into_iter().map(Into::into).collect(),
            };
            Ok((reply, held + moving == 0 || !is_wanted))
        };
        follow(wait, look).await
    }
}

async fn left(operator: &Operator, node: NodeId) -> Result<Eviction, RpcError> {
    let operator = operator.clone();
    read_etcd(move || async move { Eviction::of(&operator, node).await }).await
}

pub struct Repair;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RepairParams {
    /// True: replace the replicas of the nodes that are gone.
    pub go: bool,
}

#[derive(Debug, Serialize, JsonSchema)]
pub struct RepairReply {
    /// False: no brake was set.
    released: bool,
    /// The nodes that were gone when the brake was set.
    #[schemars(with = "Vec<String>")]
    gone: Vec<Uuid>,
}

impl Method<Engine> for Repair {
    const NAME: &'static str = "cluster_repair";
    const ABOUT: &'static str = "Releases the brake that is set when many nodes lose their leases at once: lost \
         replicas are replaced again, also those of the nodes that are gone now.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = RepairParams;
    type Reply = RepairReply;

    async fn apply(params: RepairParams, engine: Rc<Engine>) -> Result<RepairReply, RpcError> {
        let operator = engine.cluster.operator()?;
        if !params.go {
            let cause = "the copies may fill the remaining nodes";
            let remedy = "bring the nodes back, or confirm with go = true; cluster_get_status \
                          names them";
            return Err(RpcError::invalid_params(cause).field("go").remedy(remedy));
        }
        let released = within(LIMIT, BrakeKey::release(&operator)).await?;
        if released.is_some() {
            report_release(&engine, "an operator released the brake");
        }
        Ok(RepairReply {
            released: released.is_some(),
            gone: released.map(|brake| brake.gone).unwrap_or_default(),
        })
    }
}
