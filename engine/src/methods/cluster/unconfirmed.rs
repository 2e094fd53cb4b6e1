//! `cluster_get_unconfirmed`: nodes that have not confirmed that a host without permission lost its
//! access to a volume.

use std::collections::BTreeMap;
use std::rc::Rc;

use nacre_cluster_core::NodeId;
use nacre_cluster_node::{Doubt, Unconfirmed};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::removals::moment_of;
use super::{read as read_etcd, volumes};
use crate::rpc::{Class, Method, Order, Registry, RpcError};
use crate::services::Engine;

pub fn register(registry: &mut Registry<Engine>) {
    registry.add::<GetUnconfirmed>();
}

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GetUnconfirmedParams {
    /// Name or id of the volume. An id may be that of a deleted volume.
    pub volume: String,
}

/// A node on which a host that lost its permission may still use the volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct UnconfirmedNode {
    #[schemars(with = "String")]
    id: Uuid,
    /// `None`: the node has no description.
    name: Option<String>,
    reason: UnconfirmedReason,
    /// The node's own cause of `not_in_effect`.
    why: Option<String>,
    /// Since when the node knows the publication and has not put it into effect.
    since: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum UnconfirmedReason {
    /// The node has a lease, and has not said that the publication is in effect: a host is still
    /// connected there, or the node is silent and is fenced soon.
    NotInEffect,
    /// The node does not say which publications are in effect: it has just started, or runs an
    /// earlier version.
    NotKnown,
    /// The node serves the volume without a lease, as long as its replicas confirm it.
    ServesWithoutLease,
    /// The volume was taken by this node, or from one with a replica there, and not opened since:
    /// the former node may still serve it.
    NotOpened,
}

impl UnconfirmedNode {
    fn of(found: Unconfirmed, names: &BTreeMap<NodeId, String>) -> Self {
        let cause = found.cause.as_ref();
        Self {
            why: cause.and_then(|cause| cause.why.clone()),
            since: cause.and_then(|cause| moment_of(cause.since)),
            id: found.node.0,
            name: names.get(&found.node).cloned(),
            reason: match found.doubt {
                Doubt::NotInEffect => UnconfirmedReason::NotInEffect,
                Doubt::NotKnown => UnconfirmedReason::NotKnown,
                Doubt::ServesWithoutLease => UnconfirmedReason::ServesWithoutLease,
                Doubt::NotOpened => UnconfirmedReason::NotOpened,
            },
        }
    }
}

pub struct GetUnconfirmed;

impl Method<Engine> for GetUnconfirmed {
    const NAME: &'static str = "cluster_get_unconfirmed";
    const ABOUT: &'static str = "Lists the nodes that have not confirmed who may use a volume. An \
         empty list: no other host has a connection to the volume on any node, nor a command in \
         flight.";
    const CLASS: Class = Class::Read;
    const ORDER: Order = Order::Free;
    type Params = GetUnconfirmedParams;
    type Reply = Vec<UnconfirmedNode>;

    async fn apply(
        params: GetUnconfirmedParams,
        engine: Rc<Engine>,
    ) -> Result<Vec<UnconfirmedNode>, RpcError> {
        let operator = engine.cluster.operator()?;
        let volume = volumes::volume(&operator, &params.volume).await?;
        let read = read_etcd(move || async move {
            Ok((
                Unconfirmed::all(&operator, volume).await?,
                operator.node_names().await?,
            ))
        });
        let (found, names) = read.await?;
        let found = found.into_iter();
        Ok(found.map(|one| UnconfirmedNode::of(one, &names)).collect())
    }
}
