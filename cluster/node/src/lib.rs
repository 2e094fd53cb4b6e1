//! One node of a cluster: runs the state machines of `nacre-cluster-core` against etcd, on a thread
//! of its own. It also has the requests of operators, which any process can make.
//!
//! ```text
//!   etcd ◀─ requests, watches ─▶ Driver ── Serving ──▶ engine: volumes, hosts
//!                                  │   ◀── Reports ───
//!                                  └─▶ Word            end of the lease, read before each response
//!   Operator ─▶ node/N, op/V, …    status, cordon, drain, fence, remove, move, publish, export
//! ```
//!
//! The state machines decide, and etcd executes their transactions or refuses them. This crate only
//! passes messages between the two: a lost or late message costs time, never safety.

#![forbid(unsafe_code)]

pub mod backup;
mod brake;
mod braking;
pub mod clock;
mod connection;
mod driver;
mod error;
pub mod events;
mod evicting;
pub mod export;
mod follow;
mod keys;
mod node;
mod nodes;
mod operations;
mod operator;
mod own_exports;
mod placing;
mod pools;
pub mod publication;
mod publishing;
pub mod rebuild;
mod record;
mod refused;
mod removal;
mod reservation;
mod seen_keys;
pub mod serving;
mod snapshot;
mod snapshots;
#[cfg(test)]
mod testing;
mod unconfirmed;
mod upgrade;
mod upkeep;
mod volumes;

#[cfg(test)]
mod tests;

pub use backup::{Backup, BackupError};
pub use brake::{Brake, BrakeKey};
pub use braking::{Looked, ZONE};
pub use driver::{Me, NodeState};
pub use error::{Error, Unmet};
pub use evicting::{Eviction, Stuck, StuckReplica};
pub use export::{Export, ExportState, PoolChoice, Resync};
pub use keys::{Cluster, Description, NodeKey, Portal, is_node_nqn, node_nqn};
pub use node::Node;
pub use operator::{
    LeaseStatus, NodeStatus, Operator, Status, VolumeCounts, VolumeState, VolumeStatus,
};
pub use own_exports::OwnExports;
pub use placing::{CloneSource, Placed, Placing};
pub use pools::{MAX_POOLS, PoolKey, PoolReport, PoolState};
pub use publication::{Publication, volume_nqn};
pub use publishing::PublishRequest;
pub use removal::{Obstacle, PendingRemoval, Removed};
pub use seen_keys::StoreView;
pub use serving::{Answer, Link, Serving, VolumeRole};
pub use snapshot::{
    Cut, CutHolder, CutProblem, CutSource, CutSources, CutState, HeldBy, MAX_CUTS, MAX_OF_VOLUME,
    MAX_SNAPSHOTS, SNAPSHOTS, SeenSnapshot, SnapshotKey,
};
pub use snapshots::{SnapshotChange, Snapshots};
pub use unconfirmed::{Doubt, Unconfirmed};
pub use upgrade::{OldNode, UpgradeObstacle, UpgradeStep};
