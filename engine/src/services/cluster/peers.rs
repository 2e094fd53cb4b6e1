//! The other nodes, and this one: their exports are attached as remote controllers.
//!
//! A controller has the name `node.` and the node's id. Its paths are the addresses that the node
//! describes. It reconnects by itself for as long as the node is described.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use nacre_cluster_core::NodeId;
use nacre_cluster_node::{NodeKey, Portal, node_nqn};
use nacre_nvmf_remote::State;
use serde_json::json;
use tracing::{info, warn};

use super::Running;
use crate::attach::ReconnectTimes;
use crate::rpc::RpcError;
use crate::services::Engine;
use crate::services::nvme::{self, AttachParams};

/// Most addresses of one node.
const MAX_PORTALS: usize = 8;

/// The name with which a node connects to the others. It is derived from the node's id: several
/// nodes of one machine must not share a registration.
pub(super) fn host_nqn(node: NodeId) -> String {
    format!("nqn.2014-08.org.nvmexpress:uuid:{}", node.0)
}

fn controller(node: NodeId) -> String {
    format!("node.{}", node.0)
}

#[derive(Default)]
pub(super) struct Peers {
    /// The attached addresses of each node.
    attached: RefCell<BTreeMap<NodeId, Vec<Portal>>>,
    /// Nodes with an error that was logged.
    reported: RefCell<BTreeSet<NodeId>>,
}

impl Peers {
    /// Attaches described nodes, and detaches nodes that are described no longer or have moved.
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

    /// Connects now to nodes that have a lease and no connection. A node that has come back must
    /// not wait for the rest of a delay: a volume that is taken waits for its replica.
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

    /// True if a path to the node is connected.
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

/// Ends the connections of a node that is described no longer, and its devices.
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
