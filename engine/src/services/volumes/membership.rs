//! The cluster of this node, as far as its volumes depend on it.

use std::sync::Arc;
use std::time::Duration;

use nacre_bdev_replica::answers::Holder;
use nacre_bdev_replica::model::VolumeRecord;

use crate::rpc::RpcError;

/// The membership of this daemon in a cluster.
pub(in crate::services) trait Membership {
    /// Refuses a command for a volume that is not open on this node. The refusal names the node
    /// that executes it.
    fn not_here(&self, record: &VolumeRecord) -> Option<RpcError>;

    /// The holder that opens volumes.
    fn holder(&self) -> Holder;

    /// The devices of nodes whose lease is over.
    fn absent_devices(&self) -> Arc<dyn AbsentDevices>;
}

/// The devices that volumes do not wait for, because the leases of their nodes are over.
pub(in crate::services) trait AbsentDevices: Send + Sync {
    fn is_absent(&self, device: &str) -> bool;

    /// Time for which volumes wait for a silent device of another node that has a lease. `None`: no
    /// other node is known to have the device.
    fn patience(&self, device: &str) -> Option<Duration>;
}
