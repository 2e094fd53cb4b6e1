//! Decides which node is upgraded next in a rolling upgrade: one at a time, while all volumes have
//! all their replicas.
//!
//! ```text
//!   next ─▶ drain ─▶ stop, start with the version ─▶ all replicas in sync ─▶ undrain ─▶ next …
//! ```

use nacre_cluster_core::{NodeId, VolumeId};

use crate::error::Error;
use crate::operator::{NodeStatus, Operator, Status, VolumeState, VolumeStatus};

/// The next step of a rolling upgrade.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UpgradeStep {
    /// Nodes of another version.
    pub left: usize,
    /// The node to upgrade now. `None`: all nodes have the version.
    pub node: Option<OldNode>,
}

/// A node of another version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OldNode {
    pub id: NodeId,
    pub name: String,
    pub version: String,
    /// It is drained, and serves nothing: stop its daemon, and start the new one.
    pub is_drained: bool,
    /// Volumes that it serves.
    pub held: usize,
}

/// The reason that no node may be upgraded now.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UpgradeObstacle {
    #[error("many nodes of the cluster lost their leases at once")]
    Braked,
    #[error("node {node} has no lease")]
    Away { node: String },
    #[error("not all replicas of volume \"{volume}\" are in sync")]
    Degraded { volume: String },
    #[error("no node serves volume \"{volume}\"")]
    NotServed { volume: String },
    #[error("the record of volume {volume} cannot be read", volume = volume.0)]
    Unreadable { volume: VolumeId },
    /// It has the version already.
    #[error("node {node} has the version, and serves nothing yet")]
    Drained { node: String, is_evicted: bool },
}

impl UpgradeObstacle {
    pub fn remedy(&self) -> String {
        let remedy = match self {
            Self::Braked => "bring them back, or: nacre cluster repair --go",
            Self::Away { .. } => "start its daemon, or remove the node: nacre cluster remove",
            Self::Degraded { .. } => "wait until they are: nacre cluster volumes shows it",
            Self::NotServed { .. } => "see why: nacre cluster volumes, nacre volume show",
            Self::Unreadable { .. } => "restore a backup, or ask a node of a later version",
            Self::Drained { node, is_evicted } if *is_evicted => {
                return format!("nacre cluster evict --undo {node}");
            }
            Self::Drained { node, .. } => return format!("nacre cluster undrain {node}"),
        };
        remedy.to_owned()
    }
}

impl UpgradeStep {
    fn next(
        status: &Status,
        volumes: &[VolumeStatus],
        version: &str,
    ) -> Result<Self, UpgradeObstacle> {
        if status.brake.is_some() {
            return Err(UpgradeObstacle::Braked);
        }
        let name = |node: &NodeStatus| {
            let key = node.key.as_ref();
            let name = key.map(|key| key.description.name.clone());
            name.unwrap_or_else(|| node.id.0.to_string())
        };
        let mut nodes = status.nodes.iter();
        if let Some(away) = nodes.find(|node| node.lease.is_none() || node.key.is_none()) {
            let node = name(away);
            return Err(UpgradeObstacle::Away { node });
        }
        for one in volumes {
            let volume = one.name.clone();
            match one.state {
                VolumeState::Degraded => return Err(UpgradeObstacle::Degraded { volume }),
                // A volume that is not published has no holder.
                VolumeState::WithoutHolder if !one.nodes.is_empty() => {
                    return Err(UpgradeObstacle::NotServed { volume });
                }
                VolumeState::Unreadable => {
                    return Err(UpgradeObstacle::Unreadable { volume: one.id });
                }
                VolumeState::Healthy | VolumeState::WithoutHolder => {}
            }
        }
        let keys = status
            .nodes
            .iter()
            .filter_map(|node| Some((node, node.key.as_ref()?)));
        let (mut old, new): (Vec<_>, Vec<_>) =
            keys.partition(|(_, key)| key.description.version != version);
        if let Some((node, key)) = new.into_iter().find(|(_, key)| key.is_left()) {
            return Err(UpgradeObstacle::Drained {
                node: name(node),
                is_evicted: key.evict,
            });
        }
        // The node that was drained for it first, then the nodes with the fewest volumes.
        old.sort_by_cached_key(|(node, key)| (!key.is_left(), node.held, name(node)));
        let left = old.len();
        let node = old.into_iter().next().map(|(node, key)| OldNode {
            id: node.id,
            name: name(node),
            version: key.description.version.clone(),
            is_drained: key.is_left() && node.held == 0,
            held: node.held,
        });
        Ok(Self { left, node })
    }
}

impl Operator {
    /// The node to upgrade next to `version`. Refuses while a node is away, a volume is degraded,
    /// or an upgraded node is still drained.
    pub async fn next_upgrade(
        &self,
        version: &str,
    ) -> Result<Result<UpgradeStep, UpgradeObstacle>, Error> {
        let (status, volumes) = (self.status().await?, self.volumes().await?);
        Ok(UpgradeStep::next(&status, &volumes, version))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use nacre_cluster_core::Incarnation;
    use uuid::Uuid;

    use super::*;
    use crate::{Brake, Cluster, LeaseStatus, NodeKey, VolumeCounts};

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
            cluster: Cluster::new("lab", Duration::from_secs(2)).expect("a lease"),
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
            let reply =
                UpgradeStep::next(all, &[], "2").map_err(|obstacle| format!("{obstacle:?}"))?;
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
        let drained = step(&all).expect_err("drained");
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
            let obstacle = UpgradeStep::next(all, volumes, "2").expect_err("an obstacle");
            obstacle.to_string()
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
        assert!(
            UpgradeStep::next(&good, &[closed], "2").is_ok(),
            "it is not published"
        );
    }
}
