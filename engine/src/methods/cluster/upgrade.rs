//! `cluster_next_upgrade`: the node to upgrade next in a rolling upgrade.

use std::rc::Rc;

use nacre_cluster_node::{NodeStatus, Status, VolumeState, VolumeStatus};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::{name_of, read as read_etcd};
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

/// The reason that no node may be upgraded now.
#[derive(Debug, PartialEq, Eq)]
enum Obstacle {
    Braked,
    Away {
        node: String,
    },
    Degraded {
        volume: String,
    },
    NotServed {
        volume: String,
    },
    Unreadable {
        volume: Uuid,
    },
    /// It has the version already.
    Drained {
        node: String,
        is_evicted: bool,
    },
}

impl Obstacle {
    fn refusal(&self) -> RpcError {
        let (cause, remedy) = match self {
            Self::Braked => (
                "many nodes of the cluster lost their leases at once".to_owned(),
                "bring them back, or: nacre cluster repair --go".to_owned(),
            ),
            Self::Away { node } => (
                format!("node {node} has no lease"),
                "start its daemon, or remove the node: nacre cluster remove".to_owned(),
            ),
            Self::Degraded { volume } => (
                format!("not all replicas of volume \"{volume}\" are in sync"),
                "wait until they are: nacre cluster volumes shows it".to_owned(),
            ),
            Self::NotServed { volume } => (
                format!("no node serves volume \"{volume}\""),
                "see why: nacre cluster volumes, nacre volume show".to_owned(),
            ),
            Self::Unreadable { volume } => (
                format!("the record of volume {volume} cannot be read"),
                "restore a backup, or ask a node of a later version".to_owned(),
            ),
            Self::Drained { node, is_evicted } => (
                format!("node {node} has the version, and serves nothing yet"),
                if *is_evicted {
                    format!("nacre cluster evict --undo {node}")
                } else {
                    format!("nacre cluster undrain {node}")
                },
            ),
        };
        RpcError::errno(Errno::EBUSY, cause).remedy(remedy)
    }
}

fn next(
    status: &Status,
    volumes: &[VolumeStatus],
    version: &str,
) -> Result<NextUpgradeReply, Obstacle> {
    if status.brake.is_some() {
        return Err(Obstacle::Braked);
    }
    let name = |node: &NodeStatus| {
        let name = name_of(node).map(str::to_owned);
        name.unwrap_or_else(|| node.id.0.to_string())
    };
    let mut nodes = status.nodes.iter();
    if let Some(away) = nodes.find(|node| node.lease.is_none() || node.key.is_none()) {
        let node = name(away);
        return Err(Obstacle::Away { node });
    }
    for one in volumes {
        let volume = one.name.clone();
        match one.state {
            VolumeState::Degraded => return Err(Obstacle::Degraded { volume }),
            // A volume that is not published has no holder.
            VolumeState::WithoutHolder if !one.nodes.is_empty() => {
                return Err(Obstacle::NotServed { volume });
            }
            VolumeState::Unreadable => return Err(Obstacle::Unreadable { volume: one.id.0 }),
            VolumeState::Healthy | VolumeState::WithoutHolder => {}
        }
    }
    let keys = status
        .nodes
        .iter()
        .filter_map(|node| Some((node, node.key.as_ref()?)));
    let is_old = |version_of: &str| version_of != version;
    let left_out = keys
        .clone()
        .find(|(_, key)| key.is_left() && !is_old(&key.description.version));
    if let Some((node, key)) = left_out {
        return Err(Obstacle::Drained {
            node: name(node),
            is_evicted: key.evict,
        });
    }
    let mut old: Vec<UpgradeNode> = keys
        .filter(|(_, key)| is_old(&key.description.version))
        .map(|(node, key)| UpgradeNode {
            id: node.id.0,
            name: name(node),
            version: key.description.version.clone(),
            is_drained: key.is_left() && node.held == 0,
            held: node.held,
        })
        .collect();
    let is_begun = |one: &UpgradeNode| {
        let of = status.nodes.iter().find(|node| node.id.0 == one.id);
        of.and_then(|node| node.key.as_ref())
            .is_some_and(nacre_cluster_node::NodeKey::is_left)
    };
    // The node that was drained for it first, then the nodes with the fewest volumes.
    old.sort_by_cached_key(|one| (!is_begun(one), one.held, one.name.clone()));
    Ok(NextUpgradeReply {
        version: version.to_owned(),
        left: old.len(),
        node: old.into_iter().next(),
    })
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
        let read =
            read_etcd(
                move || async move { Ok((operator.status().await?, operator.volumes().await?)) },
            );
        let (status, volumes) = read.await?;
        let version = params.version;
        let version = version.unwrap_or_else(|| env!("CARGO_PKG_VERSION").to_owned());
        next(&status, &volumes, &version).map_err(|obstacle| obstacle.refusal())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use nacre_cluster_core::{Incarnation, NodeId, VolumeId};
    use nacre_cluster_node::{Brake, Cluster, LeaseStatus, NodeKey, VolumeCounts};

    use super::*;

    fn node(id: u128, version: &str) -> NodeStatus {
        let mut key = NodeKey::default();
        key.description.name = format!("n{id}");
        key.description.version = version.to_owned();
        NodeStatus {
            id: NodeId(Uuid::from_u128(id)),
            key: Some(key),
            lease: Some(LeaseStatus {
                incarnation: Incarnation(1),
                renewals: 1,
                age: None,
            }),
            held: 0,
            replicas: 0,
            in_sync: 0,
        }
    }

    fn status(nodes: Vec<NodeStatus>) -> Status {
        Status {
            cluster: Cluster::new("lab", Duration::from_secs(2)).unwrap(),
            etcd: Vec::new(),
            nodes,
            volumes: VolumeCounts::default(),
            operations: 0,
            brake: None,
        }
    }

    fn volume(state: VolumeState, is_published: bool) -> VolumeStatus {
        VolumeStatus {
            id: VolumeId(Uuid::from_u128(9)),
            name: "v".to_owned(),
            holder: None,
            lease_stands: false,
            state,
            replicas: 3,
            in_sync: 3,
            nodes: is_published
                .then_some(NodeId(Uuid::nil()))
                .into_iter()
                .collect(),
            publication: None,
        }
    }

    fn set(node: &mut NodeStatus, change: fn(&mut NodeKey)) {
        node.key.iter_mut().for_each(change);
    }

    /// Goal: an upgrade goes node by node, from the drain to the undrain.
    #[test]
    fn one_node_after_the_other() {
        let mut all = status(vec![node(1, "1"), node(2, "1"), node(3, "1")]);
        all.nodes[0].held = 2;
        let step = |all: &Status| {
            let reply = next(all, &[], "2").map_err(|obstacle| format!("{obstacle:?}"))?;
            let node = reply.node.map(|one| (one.name, one.is_drained));
            Ok::<_, String>((node, reply.left))
        };
        let found = |name: &str, is_drained, left| Ok((Some((name.to_owned(), is_drained)), left));
        assert_eq!(
            step(&all),
            found("n2", false, 3),
            "the first without volumes"
        );
        set(&mut all.nodes[2], |key| key.drain = true);
        assert_eq!(step(&all), found("n3", true, 3), "the one that was begun");
        set(&mut all.nodes[2], |key| {
            key.description.version = "2".to_owned()
        });
        let drained = step(&all).unwrap_err();
        assert!(
            drained.contains("Drained") && drained.contains("n3"),
            "{drained}"
        );
        set(&mut all.nodes[2], |key| key.drain = false);
        assert_eq!(step(&all), found("n2", false, 2));
        for node in &mut all.nodes {
            set(node, |key| key.description.version = "2".to_owned());
        }
        assert_eq!(step(&all), Ok((None, 0)));
    }

    #[test]
    fn nothing_is_upgraded_while_something_is_wrong() {
        let good = status(vec![node(1, "1"), node(2, "1")]);
        let refused = |all: &Status, volumes: &[VolumeStatus]| {
            let obstacle = next(all, volumes, "2").expect_err("an obstacle");
            obstacle.refusal().to_string()
        };
        let mut away = status(vec![node(1, "1"), node(2, "1")]);
        away.nodes[1].lease = None;
        assert!(refused(&away, &[]).contains("node n2 has no lease"));
        let mut braked = status(vec![node(1, "1")]);
        braked.brake = Some(Brake {
            zone: None,
            gone: Vec::new(),
            of: 3,
        });
        assert!(refused(&braked, &[]).contains("at once"));
        for (state, is_published, part) in [
            (VolumeState::Degraded, true, "in sync"),
            (VolumeState::WithoutHolder, true, "no node serves"),
            (VolumeState::Unreadable, false, "cannot be read"),
        ] {
            let text = refused(&good, &[volume(state, is_published)]);
            assert!(text.contains(part), "{text}");
        }
        let closed = volume(VolumeState::WithoutHolder, false);
        assert!(next(&good, &[closed], "2").is_ok(), "it is not published");
    }
}
