//! Removals that wait for a node, as `cluster_get_status` and `cluster_get_volumes` show them.

use std::collections::BTreeMap;
use std::time::{Duration, UNIX_EPOCH};

use nacre_cluster_core::NodeId;
use nacre_cluster_node::{Obstacle, PendingRemoval, Removed};
use schemars::JsonSchema;
use serde::Serialize;
use uuid::Uuid;

use crate::values::time::moment;

/// Most removals in one reply.
pub const MAX_REMOVALS: usize = 32;
/// Most characters of the reason that a node gives.
const MAX_WHY: usize = 300;

/// Removals that have not ended, of the whole cluster.
#[derive(Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct ClusterRemovals {
    count: usize,
    /// The first ones, at most 32.
    first: Vec<ClusterRemoval>,
}

impl ClusterRemovals {
    pub(super) fn of(found: &[PendingRemoval], names: &BTreeMap<NodeId, String>) -> Self {
        let first = found.iter().take(MAX_REMOVALS);
        Self {
            count: found.len(),
            first: first.map(|one| ClusterRemoval::of(one, names)).collect(),
        }
    }
}

/// A removal that has not ended, and the node that it waits for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct ClusterRemoval {
    /// The volume; it may be deleted.
    #[schemars(with = "String")]
    volume: Uuid,
    #[schemars(with = "String")]
    node: Uuid,
    /// `None`: the node has no description.
    node_name: Option<String>,
    removed: RemovedPart,
    /// The name of the device on the node.
    device: Option<String>,
    waits_for: RemovalObstacle,
    /// The node's own cause.
    why: Option<String>,
    /// For example `2026-01-31T12:00:00Z`. `None`: not known, as after a removal by an earlier
    /// version.
    since: Option<String>,
    /// All of that in one sentence.
    text: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RemovedPart {
    /// A change of the publication, or its end, is not in effect: a host that lost its permission
    /// may still be connected.
    Hosts,
    /// The device of a former replica: its node exports it to the cluster until then.
    Device,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RemovalObstacle {
    /// The node has no lease. It removes the device when it returns, or cluster_remove_node ends
    /// the wait.
    NodeAway,
    /// The node has not finished.
    NodeWorks,
    /// The node failed for the cause in `why`, and tries again.
    NodeFails,
}

/// A stored Unix time as text; `None` if it is out of range.
pub(super) fn moment_of(seconds: u64) -> Option<String> {
    // The year 10000: texts of later ones have another form.
    let seconds = Some(seconds).filter(|seconds| *seconds < 253_402_300_800)?;
    Some(moment(UNIX_EPOCH + Duration::from_secs(seconds)))
}

impl ClusterRemoval {
    pub(super) fn of(found: &PendingRemoval, names: &BTreeMap<NodeId, String>) -> Self {
        let name = names.get(&found.node);
        let shown = name.cloned().unwrap_or_else(|| found.node.0.to_string());
        let (waits_for, why) = match &found.obstacle {
            Obstacle::NodeAway => (RemovalObstacle::NodeAway, None),
            Obstacle::Working => (RemovalObstacle::NodeWorks, None),
            Obstacle::Failed { why } => {
                let why = why.chars().take(MAX_WHY).collect();
                (RemovalObstacle::NodeFails, Some(why))
            }
        };
        let (removed, device, what) = match &found.removed {
            Removed::Hosts => {
                let what = "change of the hosts that may use it".to_owned();
                (RemovedPart::Hosts, None, what)
            }
            Removed::Device(device) => {
                let what = format!("removal of the former replica's device \"{device}\"");
                (RemovedPart::Device, Some(device.clone()), what)
            }
        };
        let state = match waits_for {
            RemovalObstacle::NodeAway => {
                "has no lease, and does so when it returns (or remove the node)".to_owned()
            }
            RemovalObstacle::NodeWorks => "has not finished".to_owned(),
            RemovalObstacle::NodeFails => {
                format!(
                    "failed, and tries again: {}",
                    why.as_deref().unwrap_or_default()
                )
            }
        };
        Self {
            volume: found.volume.0,
            node: found.node.0,
            node_name: name.cloned(),
            removed,
            device,
            waits_for,
            why,
            since: found.since.and_then(moment_of),
            text: format!("{what}: node {shown} {state}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use nacre_cluster_core::VolumeId;

    use super::*;

    /// Goal: the answer names the node, the cause and the time, and has a bound. Method: removals
    /// of each kind, with a long cause.
    #[test]
    fn a_removal_in_words() {
        let node = |number| NodeId(Uuid::from_u128(number));
        let names = BTreeMap::from([(node(1), "ant".to_owned())]);
        let removal = |number, removed, obstacle, since| PendingRemoval {
            volume: VolumeId(Uuid::from_u128(7)),
            node: node(number),
            removed,
            obstacle,
            since,
        };
        let why = "busy ".repeat(100);
        let all = [
            removal(1, Removed::Hosts, Obstacle::Failed { why }, Some(0)),
            removal(
                2,
                Removed::Device("disk0".to_owned()),
                Obstacle::NodeAway,
                None,
            ),
        ];
        let [hosts, device] = all.each_ref().map(|one| ClusterRemoval::of(one, &names));
        assert_eq!(hosts.since.as_deref(), Some("1970-01-01T00:00:00Z"));
        assert_eq!(hosts.waits_for, RemovalObstacle::NodeFails);
        assert!(
            hosts
                .text
                .contains("node ant failed, and tries again: busy")
        );
        assert!(hosts.text.len() < 400, "{}", hosts.text);
        assert_eq!(device.waits_for, RemovalObstacle::NodeAway);
        let expected = format!(
            "removal of the former replica's device \"disk0\": node {} has no lease, and does so \
             when it returns (or remove the node)",
            node(2).0
        );
        assert_eq!(device.text, expected);
        assert_eq!(moment_of(u64::MAX), None);
        let many = vec![all[1].clone(); 40];
        let found = ClusterRemovals::of(&many, &names);
        assert_eq!((found.count, found.first.len()), (40, MAX_REMOVALS));
    }
}
