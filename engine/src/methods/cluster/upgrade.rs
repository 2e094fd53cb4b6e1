//! `cluster_next_upgrade`: the node to upgrade next in a rolling upgrade.

use std::rc::Rc;

use nacre_cluster_node::UpgradeStep;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::read as read_etcd;
use crate::rpc::error::Errno;
use crate::rpc::{Class, Method, Order, Registry, RpcError};
use crate::services::Engine;

pub fn register(registry: &mut Registry<Engine>) {
    registry.add::<NextUpgrade>();
}

pub struct NextUpgrade;

#[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NextUpgradeParams {
    /// The version that all nodes shall have. Default: that of the daemon that is called.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
}

#[derive(Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct NextUpgradeReply {
    /// The version that all nodes shall have.
    version: String,
    /// Nodes of another version.
    left: usize,
    /// The node to upgrade now. `None`: all nodes have the version.
    node: Option<UpgradeNode>,
}

#[derive(Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct UpgradeNode {
    #[schemars(with = "String")]
    id: Uuid,
    name: String,
    version: String,
    /// It is drained: stop its daemon, and start the new one.
    is_drained: bool,
    /// Volumes that it serves.
    held: usize,
}

impl NextUpgradeReply {
    fn new(step: UpgradeStep, version: String) -> Self {
        Self {
            version,
            left: step.left,
            node: step.node.map(|node| UpgradeNode {
                id: node.id.0,
                name: node.name,
                version: node.version,
                is_drained: node.is_drained,
                held: node.held,
            }),
        }
    }
}

impl Method<Engine> for NextUpgrade {
    const NAME: &'static str = "cluster_next_upgrade";
    const ABOUT: &'static str = "Returns the node to upgrade next. Refuses while a node is away, a \
         volume is degraded, or an upgraded node is still drained.";
    const CLASS: Class = Class::Read;
    const ORDER: Order = Order::Free;
    type Params = NextUpgradeParams;
    type Reply = NextUpgradeReply;

    async fn apply(
        params: NextUpgradeParams,
        engine: Rc<Engine>,
    ) -> Result<NextUpgradeReply, RpcError> {
        let operator = engine.cluster.operator()?;
        let version = params.version;
        let version = version.unwrap_or_else(|| env!("CARGO_PKG_VERSION").to_owned());
        let of = version.clone();
        let step = read_etcd(move || async move { operator.next_upgrade(&of).await }).await?;
        match step {
            Ok(step) => Ok(NextUpgradeReply::new(step, version)),
            Err(obstacle) => {
                let refusal = RpcError::errno(Errno::EBUSY, obstacle.to_string());
                Err(refusal.remedy(obstacle.remedy()))
            }
        }
    }
}
