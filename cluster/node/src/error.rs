//! Errors of operators' requests and of a node's start. A message names the key, the cause, and the
//! remedy.

use std::time::Duration;

use nacre_cluster_core::time::InvalidLease;
use nacre_cluster_core::{NodeId, VolumeId};
use uuid::Uuid;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("key \"{key}\": {said}. {}", remedy(said))]
    Store {
        key: String,
        said: Box<nacre_cluster_etcd::Error>,
    },
    #[error("key \"{key}\" is absent: etcd has no cluster of this name. Create it with `init`")]
    NoCluster { key: String },
    #[error(
        "key \"{key}\": the cluster exists already, with id {id}. Choose another name, or join it"
    )]
    ClusterExists { key: String, id: Uuid },
    #[error(
        "key \"{key}\": a daemon uses this prefix alone. Choose another name for the cluster, or \
         remove `[store]` of that daemon and its key"
    )]
    Owned { key: String },
    #[error(
        "key \"{key}\": a restore of a backup, or a rebuild of the store, has not ended. Repeat it, or \
         choose another name"
    )]
    Restoring { key: String },
    #[error(
        "key \"{key}\" has the id {found}, and this node joined {expected}: etcd has another \
         cluster, or has lost its data. Correct the endpoints, or restore a backup"
    )]
    OtherCluster {
        key: String,
        expected: Uuid,
        found: Uuid,
    },
    #[error(
        "key \"{key}\" is absent, and this node joined the cluster {expected}: etcd has lost its \
         data, or is another etcd. Correct the endpoints, or return the keys with `restore` or \
         `rebuild-store`"
    )]
    LostCluster { key: String, expected: Uuid },
    #[error("key \"{key}\": {machine} renews the lease of this node's id ({node}). \
             Give one of them a data directory of its own", node = node.0)]
    InUse {
        key: String,
        node: NodeId,
        /// The other machine, or the other process of this machine.
        machine: String,
    },
    #[error(
        "key \"{key}\": the cluster has {most} nodes, and can have no more. Remove one that never \
         returns with `nacre cluster remove`, or join another cluster, and start this daemon again"
    )]
    TooManyNodes { key: String, most: usize },
    #[error("{0}")]
    Lease(#[from] InvalidLease),
    #[error("key \"{key}\" is absent: the cluster has no node {node}. `status` lists its nodes",
            node = node.0)]
    NoNode { key: String, node: NodeId },
    #[error("key \"{key}\" is absent: node {node} has no lease, so nothing is left to fence",
            node = node.0)]
    NoLease { key: String, node: NodeId },
    #[error("key \"{key}\": node {node} has a lease. Stop its daemon, or fence it first",
            node = node.0)]
    Lives { key: String, node: NodeId },
    #[error("key \"{key}\": node {node} has a replica of volume {volume}. Move the replica first",
            node = node.0, volume = volume.0)]
    HasReplica {
        key: String,
        node: NodeId,
        volume: VolumeId,
    },
    #[error("key \"{key}\" is absent: the cluster has no volume {volume}", volume = volume.0)]
    NoVolume { key: String, volume: VolumeId },
    #[error("key \"{key}\": node {node} does not hold volume {volume} any more. \
             Use a path to the node that holds it", node = node.0, volume = volume.0)]
    NotHolder {
        key: String,
        volume: VolumeId,
        node: NodeId,
    },
    #[error("key \"{key}\": the volume was not moved: {why}. Correct the cause and try again")]
    NotMoved { key: String, why: String },
    #[error("{field}: {why}")]
    Invalid { field: &'static str, why: String },
    #[error(
        "key \"{key}\": device \"{device}\" is exported under this id. End that export first, or \
         choose another id"
    )]
    ExportExists { key: String, device: String },
    #[error("key \"{key}\" is absent: the node has no such export. Create it first")]
    NoExport { key: String },
    #[error(
        "key \"{key}\": a snapshot of this id is being deleted. Wait for its node, or choose another id"
    )]
    SnapshotGoes { key: String },
    #[error("key \"{key}\": a {of} has at most {most} snapshots. Delete some first")]
    TooManySnapshots {
        key: String,
        most: usize,
        of: &'static str,
    },
    #[error("{why}. {}", demand.remedy())]
    NotPlaced {
        key: String,
        why: String,
        demand: Unmet,
    },
    #[error(
        "key \"{key}\": many nodes lost their leases at once, so no lost replica is replaced. Bring \
         them back, or release the brake with `nacre cluster repair --go`"
    )]
    Braked { key: String },
    #[error("key \"{key}\" changes all the time. Try again")]
    Contended { key: String },
    #[error("key \"{key}\": not done within {waited:?}. `status` shows the progress")]
    Late { key: String, waited: Duration },
    #[error("the thread of the cluster: {why}. Restart the daemon")]
    Thread { why: String },
}

/// The kind of demand that too few nodes or pools meet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unmet {
    /// The request contradicts itself.
    Request,
    /// Nodes have no lease, are cordoned, drained or evicted, or have a replica of the volume.
    Nodes,
    /// Too few nodes have a pool that is online and of the class, or differ in the labels.
    Pools,
    /// Pools lack space.
    Room,
    /// Pools are busy with other resyncs, or a new replica failed on them in the last minutes.
    Busy,
}

impl Unmet {
    fn remedy(self) -> &'static str {
        match self {
            Self::Request => "Correct the request",
            Self::Nodes => {
                "`nacre cluster nodes` shows the nodes: bring them back, add some, or use fewer \
                 replicas"
            }
            Self::Pools => {
                "`nacre cluster pools` shows the pools, and `nacre cluster nodes` the labels: add \
                 pools, or demand less"
            }
            Self::Room => "`nacre cluster pools` shows the pools: add space, or use less",
            Self::Busy => "Wait until they are done",
        }
    }
}

impl Error {
    /// An error of the store at `key`.
    pub(crate) fn at(key: &str) -> impl FnOnce(nacre_cluster_etcd::Error) -> Self {
        let key = key.to_owned();
        move |said| Self::Store {
            key,
            said: Box::new(said),
        }
    }

    /// The error of a node that has joined `cluster` before: a key that is absent was lost.
    pub(crate) fn of_node(self, cluster: Option<Uuid>) -> Self {
        match (self, cluster) {
            (Self::NoCluster { key }, Some(expected)) => Self::LostCluster { key, expected },
            (error, _) => error,
        }
    }

    /// True if the same call may succeed later without a change of its parameters.
    pub fn is_passing(&self) -> bool {
        match self {
            Self::Store { said, .. } => said.is_passing(),
            Self::Contended { .. }
            | Self::Late { .. }
            | Self::LostCluster { .. }
            | Self::NotPlaced {
                demand: Unmet::Busy,
                ..
            }
            | Self::Braked { .. } => true,
            _ => false,
        }
    }
}

fn remedy(said: &nacre_cluster_etcd::Error) -> &'static str {
    use nacre_cluster_etcd::Error as Said;
    match said {
        Said::Unanswered { .. } => "Check that etcd has a majority of its members and is reachable",
        Said::Full => "Then clear the alarm with `etcdctl alarm disarm`",
        Said::Denied { .. } => "Grant the user or certificate read and write access to this prefix",
        Said::Damaged { .. } => "Restore a backup of etcd, or correct the key",
        Said::Newer { .. } => "Upgrade this daemon",
        Said::Endpoint { .. } | Said::Certificates { .. } => "Correct the configuration",
        _ => "Try again",
    }
}

/// A value in etcd that this program cannot read.
pub(crate) fn damaged(key: &str, what: &impl ToString) -> Error {
    Error::Store {
        key: key.to_owned(),
        said: Box::new(nacre_cluster_etcd::Error::Damaged {
            key: key.to_owned(),
            what: what.to_string(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_has_the_key_the_words_of_etcd_and_the_remedy() {
        let said = nacre_cluster_etcd::Error::Denied {
            why: "permission denied".to_owned(),
        };
        let text = Error::at("/nacre/lab/meta")(said).to_string();
        for part in ["/nacre/lab/meta", "permission denied", "Grant"] {
            assert!(text.contains(part), "{text}");
        }
    }
}
