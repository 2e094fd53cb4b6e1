//! `cluster_get_status`, `cluster_get_nodes`: an overview of the cluster.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use nacre_cluster_core::{Incarnation, NodeId};
use nacre_cluster_etcd::Member;
use nacre_cluster_node::{
    Brake, Cluster, NodeState, NodeStatus, Operator, PendingRemoval, Status, VolumeCounts,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::removals::ClusterRemovals;
use super::{name_of, read, read_status};
use crate::rpc::{Class, Method, NoParams, Order, Registry, RpcError};
use crate::services::Engine;

pub fn register(registry: &mut Registry<Engine>) {
    registry.add::<GetClusterStatus>().add::<GetNodes>();
}

/// The cluster, as this node sees it.
#[derive(Debug, Serialize, JsonSchema)]
pub struct ClusterStatus {
    this_node: ThisNode,
    /// Why the cluster cannot be read from etcd. All fields but `this_node` are empty then.
    problem: Option<String>,
    cluster: Option<ClusterIdentity>,
    /// The etcd servers that `[store]` names.
    etcd: Vec<EtcdMember>,
    nodes: Vec<ClusterNode>,
    volumes: Option<ClusterVolumes>,
    /// Requests to move a volume to another node that have not ended.
    operations: Option<usize>,
    /// Many nodes lost their leases at once: no lost replica is replaced until they are back, or an
    /// operator calls cluster_repair.
    brake: Option<ClusterBrake>,
    /// Removals of hosts and devices that wait for a node; null: etcd has not answered.
    removals: Option<ClusterRemovals>,
    /// All nodes support snapshots of volumes; null: etcd has not answered.
    has_snapshots: Option<bool>,
}

/// The nodes that lost their leases, when the brake was set.
#[derive(Debug, Serialize, JsonSchema)]
pub struct ClusterBrake {
    /// The zone of these nodes; null: nodes of the whole cluster are counted.
    zone: Option<String>,
    /// The ids of these nodes.
    #[schemars(with = "Vec<String>")]
    gone: Vec<Uuid>,
    /// Number of all nodes of the zone, or of the cluster.
    of: usize,
}

impl From<Brake> for ClusterBrake {
    fn from(brake: Brake) -> Self {
        Self {
            zone: brake.zone,
            gone: brake.gone,
            of: brake.of,
        }
    }
}

/// The state of this node in the cluster.
#[derive(Debug, Serialize, JsonSchema)]
pub struct ThisNode {
    state: ThisState,
    /// The node renews its lease in time. If false, it serves its volumes only as long as all
    /// their replicas confirm it, and takes none.
    lease_is_good: bool,
    /// The number of its lease; null: it has no lease.
    incarnation: Option<u64>,
    /// Why the node is not in the cluster; absent if it is, or if there is no error.
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ThisState {
    /// The node has no lease yet, or lost it.
    Joining,
    /// The node has a lease.
    Joined,
    /// The node stays out until an operator acts and the daemon starts again.
    Out,
    /// The daemon does not take part in the cluster: it has left, or has not begun to join.
    Left,
}

impl From<NodeState> for ThisNode {
    fn from(state: NodeState) -> Self {
        let out = |state, why: Option<nacre_cluster_node::Error>| Self {
            state,
            lease_is_good: false,
            incarnation: None,
            why: why.map(|why| why.to_string()),
        };
        match state {
            NodeState::Joining { obstacle } => out(ThisState::Joining, obstacle),
            NodeState::In {
                incarnation,
                is_good,
                ..
            } => Self {
                state: ThisState::Joined,
                lease_is_good: is_good,
                incarnation: Some(incarnation.0),
                why: None,
            },
            NodeState::Out { why } => out(ThisState::Out, Some(why)),
            NodeState::Left => out(ThisState::Left, None),
        }
    }
}

/// The cluster's name, id and lease duration.
#[derive(Debug, Serialize, JsonSchema)]
pub struct ClusterIdentity {
    name: String,
    #[schemars(with = "String")]
    id: Uuid,
    /// Duration of a lease. A node that has not renewed its lease for this long may be fenced.
    lease_ms: u64,
}

impl From<Cluster> for ClusterIdentity {
    fn from(cluster: Cluster) -> Self {
        Self {
            name: cluster.name,
            id: cluster.id,
            lease_ms: cluster.lease_ms,
        }
    }
}

/// One etcd server.
#[derive(Debug, Serialize, JsonSchema)]
pub struct EtcdMember {
    endpoint: String,
    /// Time until its answer, or until the error.
    latency_us: u64,
    /// Why the member does not answer. The fields below are empty or false then.
    error: Option<String>,
    version: Option<String>,
    is_leader: bool,
    /// False: the member has no majority.
    has_leader: bool,
    /// Size of the database, and the part of it that is in use.
    size_bytes: Option<u64>,
    in_use_bytes: Option<u64>,
    /// Largest size of the database. Members before etcd 3.6 do not report it.
    quota_bytes: Option<u64>,
    /// The alarms that the member reports, for example `NOSPACE`.
    alarms: Vec<String>,
}

impl From<Member> for EtcdMember {
    fn from(member: Member) -> Self {
        let (status, error) = match member.status {
            Ok(status) => (Some(status), None),
            Err(error) => (None, Some(error)),
        };
        let of = status.as_ref();
        Self {
            endpoint: member.endpoint,
            latency_us: micros(member.took),
            error,
            is_leader: of.is_some_and(|status| status.is_leader),
            has_leader: of.is_some_and(|status| status.has_leader),
            size_bytes: of.map(|status| status.size),
            in_use_bytes: of.map(|status| status.in_use),
            quota_bytes: of.and_then(|status| status.quota),
            version: of.map(|status| status.version.clone()),
            alarms: status.map_or_else(Vec::new, |status| status.errors),
        }
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// The state of a node's lease, by the time since its last renewal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LeaseState {
    /// The node has renewed its lease in time, or the answering node has seen no renewal yet.
    Good,
    /// The last renewal is longer ago than the duration of a lease: the node is fenced soon.
    Late,
    /// The node has no lease.
    None,
}

/// A node of the cluster.
#[derive(Debug, Serialize, JsonSchema)]
pub struct ClusterNode {
    #[schemars(with = "String")]
    id: Uuid,
    /// `None`: the node has not written its description yet.
    name: Option<String>,
    /// This is the node that answers the call.
    this_node: bool,
    lease: LeaseState,
    /// The number of its lease; null: it has no lease.
    incarnation: Option<u64>,
    /// Time since the last renewal of its lease that the answering node saw; null: it saw none.
    lease_age_ms: Option<u64>,
    /// The node gets no new replicas, and takes a volume only if no other node can.
    cordon: bool,
    /// Other nodes take the volumes of the node.
    drain: bool,
    /// The replicas of the node are moved to other nodes.
    evict: bool,
    /// Volumes that the node serves.
    held: usize,
    /// Replicas of volumes on the node, and those of them that are in sync.
    replicas: usize,
    in_sync: usize,
    version: Option<String>,
    labels: BTreeMap<String, String>,
}

impl ClusterNode {
    fn of(node: &NodeStatus, lease: Duration, me: Option<Incarnation>) -> Self {
        let stands = node.lease.map(|lease| lease.incarnation);
        let age = node.lease.and_then(|lease| lease.age);
        let key = node.key.as_ref();
        Self {
            id: node.id.0,
            name: name_of(node).map(str::to_owned),
            this_node: me.is_some() && stands == me,
            lease: match (stands, age) {
                (None, _) => LeaseState::None,
                (_, Some(age)) if age > lease => LeaseState::Late,
                _ => LeaseState::Good,
            },
            incarnation: stands.map(|incarnation| incarnation.0),
            lease_age_ms: age.map(|age| micros(age) / 1000),
            cordon: key.is_some_and(|key| key.cordon),
            drain: key.is_some_and(|key| key.drain),
            evict: key.is_some_and(|key| key.evict),
            held: node.held,
            replicas: node.replicas,
            in_sync: node.in_sync,
            version: key.map(|key| key.description.version.clone()),
            labels: key.map_or_else(BTreeMap::new, |key| key.description.labels.clone()),
        }
    }

    fn all(status: &Status, me: Option<&NodeState>) -> Vec<Self> {
        let me = match me {
            Some(NodeState::In { incarnation, .. }) => Some(*incarnation),
            _ => None,
        };
        let lease = Duration::from_millis(status.cluster.lease_ms);
        let nodes = status.nodes.iter();
        nodes.map(|node| Self::of(node, lease, me)).collect()
    }
}

/// The number of volumes in each state.
#[derive(Debug, Serialize, JsonSchema)]
pub struct ClusterVolumes {
    /// Volumes that a node serves, with all replicas in sync.
    healthy: usize,
    /// Volumes that a node serves, with a replica that is not in sync.
    degraded: usize,
    /// Volumes that no node with a lease serves.
    without_holder: usize,
    /// Volumes whose record is damaged, or of a later version.
    unreadable: usize,
}

impl From<VolumeCounts> for ClusterVolumes {
    fn from(counts: VolumeCounts) -> Self {
        Self {
            healthy: counts.healthy,
            degraded: counts.degraded,
            without_holder: counts.without_holder,
            unreadable: counts.unreadable,
        }
    }
}

pub struct GetClusterStatus;

impl Method<Engine> for GetClusterStatus {
    const NAME: &'static str = "cluster_get_status";
    const ABOUT: &'static str = "Returns the cluster on one page: this node, the members of etcd, \
         all nodes with their leases, and the number of volumes in each state. It works also while \
         etcd is silent.";
    const CLASS: Class = Class::Read;
    const ORDER: Order = Order::Free;
    type Params = NoParams;
    type Reply = ClusterStatus;

    async fn apply(_: NoParams, engine: Rc<Engine>) -> Result<ClusterStatus, RpcError> {
        let cluster = &engine.cluster;
        let operator = cluster.operator()?;
        Ok(ClusterStatus::of(look(&operator).await, cluster.state()))
    }
}

/// The state of the cluster; the removals that wait for a node; and whether all nodes support
/// snapshots. `None`: that could not be read.
pub(super) type Found = (Status, Option<Vec<PendingRemoval>>, Option<bool>);

pub(super) async fn look(operator: &Operator) -> Result<Found, RpcError> {
    let operator = operator.clone();
    let work = move || async move {
        let status = operator.status().await?;
        let removals = PendingRemoval::all(&operator).await.ok();
        let without = operator.snapshots().nodes_without().await;
        Ok((status, removals, without.ok().map(|all| all.is_empty())))
    };
    read(work).await
}

impl ClusterStatus {
    pub(super) fn of(found: Result<Found, RpcError>, state: Option<NodeState>) -> Self {
        let this_node = state.clone().unwrap_or(NodeState::Left).into();
        match found {
            Err(error) => Self {
                this_node,
                problem: Some(match error.data {
                    Some(facts) => facts.to_string(),
                    None => error.message,
                }),
                cluster: None,
                etcd: Vec::new(),
                nodes: Vec::new(),
                volumes: None,
                operations: None,
                brake: None,
                removals: None,
                has_snapshots: None,
            },
            Ok((status, removals, has_snapshots)) => Self {
                this_node,
                problem: None,
                has_snapshots,
                removals: removals.map(|all| ClusterRemovals::of(&all, &names(&status))),
                nodes: ClusterNode::all(&status, state.as_ref()),
                cluster: Some(status.cluster.into()),
                etcd: status.etcd.into_iter().map(Into::into).collect(),
                volumes: Some(status.volumes.into()),
                operations: Some(status.operations),
                brake: status.brake.map(Into::into),
            },
        }
    }
}

fn names(status: &Status) -> BTreeMap<NodeId, String> {
    let nodes = status.nodes.iter();
    let names = nodes.filter_map(|node| Some((node.id, name_of(node)?.to_owned())));
    names.collect()
}

pub struct GetNodes;

impl Method<Engine> for GetNodes {
    const NAME: &'static str = "cluster_get_nodes";
    const ABOUT: &'static str =
        "Lists the nodes of the cluster with their leases, volumes and replicas.";
    const CLASS: Class = Class::Read;
    const ORDER: Order = Order::Free;
    type Params = NoParams;
    type Reply = Vec<ClusterNode>;

    async fn apply(_: NoParams, engine: Rc<Engine>) -> Result<Vec<ClusterNode>, RpcError> {
        let cluster = &engine.cluster;
        let status = read_status(&cluster.operator()?).await?;
        Ok(ClusterNode::all(&status, cluster.state().as_ref()))
    }
}

#[cfg(test)]
mod tests {
    use nacre_cluster_etcd::MemberStatus;
    use nacre_cluster_node::{Error, LeaseStatus};

    use super::*;

    fn node(lease: Option<LeaseStatus>) -> NodeStatus {
        NodeStatus {
            id: NodeId(Uuid::from_u128(7)),
            key: None,
            lease,
            held: 2,
            replicas: 3,
            in_sync: 1,
        }
    }

    fn lease(age_ms: Option<u64>) -> LeaseStatus {
        LeaseStatus {
            incarnation: Incarnation(40),
            renewals: 9,
            age: age_ms.map(Duration::from_millis),
        }
    }

    /// A lease that this node has not seen renewed yet is not called late.
    #[test]
    fn the_state_of_a_lease_follows_its_age() {
        let cases = [
            (None, LeaseState::None),
            (Some(lease(None)), LeaseState::Good),
            (Some(lease(Some(2000))), LeaseState::Good),
            (Some(lease(Some(2001))), LeaseState::Late),
        ];
        for (found, expected) in cases {
            let shown = ClusterNode::of(&node(found), Duration::from_secs(2), None);
            assert_eq!(shown.lease, expected, "{found:?}");
            assert!(!shown.this_node, "no incarnation is not this one");
        }
    }

    #[test]
    fn this_node_is_the_one_with_its_incarnation() {
        for (mine, expected) in [(40, true), (41, false)] {
            let found = node(Some(lease(None)));
            let me = Some(Incarnation(mine));
            let shown = ClusterNode::of(&found, Duration::from_secs(2), me);
            assert_eq!(shown.this_node, expected, "{mine}");
        }
    }

    #[test]
    fn a_silent_member_has_its_reason() {
        let member = |status| Member {
            endpoint: "http://h:1".to_owned(),
            took: Duration::from_micros(700),
            status,
        };
        let silent = EtcdMember::from(member(Err("refused".to_owned())));
        assert_eq!(silent.error.as_deref(), Some("refused"));
        assert!(!silent.has_leader && silent.size_bytes.is_none());
        let leader = EtcdMember::from(member(Ok(MemberStatus {
            version: "3.5.28".to_owned(),
            has_leader: true,
            is_leader: true,
            size: 2,
            in_use: 1,
            quota: None,
            errors: vec!["NOSPACE".to_owned()],
        })));
        assert!(leader.is_leader && leader.error.is_none());
        assert_eq!((leader.size_bytes, leader.latency_us), (Some(2), 700));
        assert_eq!(leader.alarms, ["NOSPACE"]);
    }

    #[test]
    fn a_node_outside_the_cluster_has_the_reason() {
        let key = "/nacre/lab/meta".to_owned();
        let why = Error::NoCluster { key };
        let this = ThisNode::from(NodeState::Out { why });
        assert_eq!(this.state, ThisState::Out);
        assert!(this.why.is_some_and(|why| why.contains("no cluster")));
    }
}
