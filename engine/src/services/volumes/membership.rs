//! The cluster as volumes depend on it.

use std::sync::Arc;
use std::time::Duration;

use nacre_bdev_replica::answers::Holder;
use nacre_bdev_replica::model::VolumeRecord;

use crate::rpc::RpcError;

/// The membership of this daemon in a cluster.
pub(in crate::services) trait Membership {
    /// The error for a command on a volume whose record does not name this node as the holder.
    /// Names the holder if that has a lease. `None`: this node is the holder.
    fn not_here(&self, record: &VolumeRecord) -> Option<RpcError>;

    /// The identity with which this node opens volumes: its id and its lease.
    fn holder(&self) -> Holder;

    /// The test for devices of nodes without a lease.
    fn absent_devices(&self) -> Arc<dyn AbsentDevices>;
}

/// The devices for which volumes do not wait, or only for a time.
pub(in crate::services) trait AbsentDevices: Send + Sync {
    fn is_absent(&self, device: &str) -> bool;

    /// Time for which volumes wait for a device of another node that does not answer, while that
    /// node has a lease. `None`: the device is this node's, or its node or the duration of leases
    /// is not known.
    fn patience(&self, device: &str) -> Option<Duration>;
}
