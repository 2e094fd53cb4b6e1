//! The value of the key `steward` in etcd, as JSON: the brake. While it is set, the cluster
//! replaces no lost replica, because many nodes lost their leases at once.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use uuid::Uuid;

/// The value of the key `steward`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BrakeKey {
    pub(crate) v: u64,
    /// The brake; `None`: lost replicas are replaced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub brake: Option<Brake>,
    /// The nodes that were absent when an operator released the brake. Until they return, they set
    /// no other brake.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub excused: Vec<Uuid>,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

/// The cause of a brake.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Brake {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    /// The zone that lost nodes; `None`: the whole cluster.
    pub zone: Option<String>,
    /// The nodes without a lease when the brake was set.
    pub gone: Vec<Uuid>,
    /// All nodes of the zone or cluster.
    pub of: usize,
}
