//! Attaches the exports of all nodes, including this one, as remote controllers.
//!
//! The controller of a node has the name `node.ID`. Its paths are the addresses in the node's
//! description. It reconnects by itself while the node has a description.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use nacre_cluster_core::NodeId;
use nacre_cluster_node::{NodeKey, Portal, node_nqn};
use nacre_nvmf_remote::State;
use serde_json::json;
use tracing::{info, warn};
use uuid::Uuid;

use super::Running;
use crate::attach::ReconnectTimes;
use crate::config::cluster::ClusterSettings;
use crate::rpc::RpcError;
use crate::rpc::error::Errno;
use crate::services::Engine;
use crate::services::nvme::{self, AttachParams};

/// Most addresses of one node that are used.
const MAX_PORTALS: usize = 8;

/// Prefix of the names of the nodes' controllers.
const CONTROLLER: &str = "node.";

/// The host NQN with which a node connects to the exports. It is derived from the node's id,
/// because two nodes on one machine must not share a reservation registration.
pub(super) fn host_nqn(node: NodeId) -> String {
    format!("nqn.2014-08.org.nvmexpress:uuid:{}", node.0)
}

fn controller(node: NodeId) -> String {
    format!("{CONTROLLER}{}", node.0)
}

/// Refuses new keys for the controller of a node: the exports of nodes have no keys, so that the
/// node would not be reached any more.
pub fn refuse_keys_by_hand(cluster: &ClusterSettings, name: &str) -> Result<(), RpcError> {
    let of_node = name.strip_prefix(CONTROLLER);
    let is_node = of_node.is_some_and(|id| id.parse::<Uuid>().is_ok());
    if !is_node || !cluster.is_node() {
        return Ok(());
    }
    let cause = format!(
        "\"{name}\" is a node of the cluster, and nodes connect to each other without keys: with \
         keys, its replicas would be out of reach"
    );
    let refused = RpcError::errno(Errno::EPERM, cause).field("name");
    Err(refused.remedy("leave it as it is, and give the nodes a network of their own"))
}

#[derive(Default)]
pub(super) struct Peers {
    /// The attached addresses of each node.
    attached: RefCell<BTreeMap<NodeId, Vec<Portal>>>,
    /// Nodes whose last error was logged.
    reported: RefCell<BTreeSet<NodeId>>,
}

impl Peers {
    /// Attaches the nodes that have a description. Detaches nodes without one, or with other
    /// addresses.
    pub(super) async fn attach(&self, engine: &Rc<Engine>, running: &Running) {
        let nodes = running.inbox.nodes();
        let gone: Vec<NodeId> = {
            let attached = self.attached.borrow();
            let is_other = |(node, portals): &(&NodeId, &Vec<Portal>)| {
                nodes
                    .get(*node)
                    .is_none_or(|key| portals_of(key) != **portals)
            };
            attached
                .iter()
                .filter(is_other)
                .map(|(node, _)| *node)
                .collect()
        };
        for node in gone {
            self.attached.borrow_mut().remove(&node);
            self.reported.borrow_mut().remove(&node);
            detach(engine, node).await;
        }
        for (node, key) in &nodes {
            let portals = portals_of(key);
            if portals.is_empty() || self.attached.borrow().contains_key(node) {
                continue;
            }
            match attach(engine, running.me, *node, &portals).await {
                Ok(()) => {
                    info!(node = %node.0, name = key.description.name, "a node is attached");
                    self.attached.borrow_mut().insert(*node, portals);
                }
                Err(error) => {
                    if self.reported.borrow_mut().insert(*node) {
                        warn!(node = %node.0, %error, "a node is not attached; it is tried again");
                    }
                    detach(engine, *node).await;
                }
            }
        }
    }

    /// Reconnects at once to nodes that have a lease and no connection. A volume that is taken
    /// waits for the replica of a node that has returned.
    pub(super) fn hurry(&self, engine: &Engine, running: &Running) {
        for node in self.attached.borrow().keys() {
            if running.inbox.is_node_away(*node) || self.is_connected(engine, *node) {
                continue;
            }
            let remote = engine.remotes.find(&controller(*node));
            for path in remote.iter().flat_map(|remote| remote.paths()) {
                path.path.reset();
            }
        }
    }

    /// True if a path to the node is live.
    pub(super) fn is_connected(&self, engine: &Engine, node: NodeId) -> bool {
        let remote = engine.remotes.find(&controller(node));
        remote.is_some_and(|remote| {
            let paths = remote.paths();
            paths
                .iter()
                .any(|path| path.path.status().state == State::Live)
        })
    }
}

fn portals_of(key: &NodeKey) -> Vec<Portal> {
    let portals = key.description.replica_portals.iter();
    portals.take(MAX_PORTALS).cloned().collect()
}

async fn attach(
    engine: &Rc<Engine>,
    me: NodeId,
    node: NodeId,
    portals: &[Portal],
) -> Result<(), RpcError> {
    for portal in portals {
        let params = AttachParams {
            name: controller(node),
            trtype: portal.trtype.clone(),
            traddr: portal.traddr.clone(),
            trsvcid: Some(portal.trsvcid.clone()),
            subnqn: Some(node_nqn(node)),
            hostnqn: Some(host_nqn(me)),
            times: ReconnectTimes {
                ctrlr_loss_timeout_sec: Some(-1),
                ..ReconnectTimes::default()
            },
            ..AttachParams::default()
        };
        nvme::begin(engine, params).await?;
    }
    Ok(())
}

/// Detaches the controller of a node, with its devices.
async fn detach(engine: &Rc<Engine>, node: NodeId) {
    let name = controller(node);
    if engine.remotes.find(&name).is_none() {
        return;
    }
    let params = json!({ "name": name });
    if let Err(error) = engine
        .declared_call("bdev_nvme_detach_controller", &params)
        .await
    {
        warn!(node = %node.0, %error, "a node is not detached");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the controller of a node gets no keys by a call, because the node's export has none. A
    /// daemon outside of a cluster may give such a name to any controller.
    #[test]
    fn controllers_of_nodes_get_no_keys() {
        let alone = ClusterSettings::default();
        let node = ClusterSettings {
            name: Some("lab".to_owned()),
            ..ClusterSettings::default()
        };
        let name = controller(NodeId(Uuid::from_u128(7)));
        let facts = refuse_keys_by_hand(&node, &name).expect_err("a node").data;
        let facts = facts.expect("facts");
        assert_eq!(facts.field.as_deref(), Some("name"));
        assert!(
            facts.cause.contains("is a node of the cluster"),
            "{facts:?}"
        );
        for other in ["far", "node.far", "node."] {
            assert!(refuse_keys_by_hand(&node, other).is_ok(), "{other}");
        }
        assert!(refuse_keys_by_hand(&alone, &name).is_ok());
    }
}
