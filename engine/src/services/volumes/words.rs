//! Names for the states of volumes and replicas, in replies, events and metrics.

use nacre_bdev_replica::handle::{ReplicaStatus, ResyncKind, VolumeState};
use nacre_bdev_replica::model::ReplicaState;

pub fn state_word(state: VolumeState) -> &'static str {
    match state {
        VolumeState::Healthy => "healthy",
        VolumeState::Degraded => "degraded",
        VolumeState::Frozen => "frozen",
        VolumeState::WritesHeld => "writes_held",
        VolumeState::Failing => "failing",
        VolumeState::Fenced => "fenced",
        VolumeState::StoreLost => "store_lost",
        VolumeState::Closed => "closed",
        VolumeState::Standby => "standby",
    }
}

/// State of a volume that is not open yet and has no bdev.
pub const OPENING: &str = "opening";

/// All volume states, for metrics.
pub const STATES: [&str; 10] = [
    "healthy",
    "degraded",
    "frozen",
    "writes_held",
    "failing",
    "fenced",
    "store_lost",
    "closed",
    "standby",
    OPENING,
];

pub fn replica_word(replica: &ReplicaStatus) -> &'static str {
    let kind = replica.resync.as_ref().map(|r| r.kind);
    match (replica.state, kind) {
        (ReplicaState::InSync, Some(ResyncKind::Reconcile)) => "reconciling",
        (ReplicaState::InSync, _) => "in_sync",
        (_, Some(_)) => "syncing",
        (ReplicaState::Out { .. }, None) => "out",
        (ReplicaState::Filling { .. }, None) => "filling",
    }
}

/// All replica states, for metrics.
pub const REPLICA_STATES: [&str; 5] = ["in_sync", "syncing", "reconciling", "out", "filling"];

pub fn kind_word(kind: ResyncKind) -> &'static str {
    match kind {
        ResyncKind::Partial => "partial",
        ResyncKind::Full => "full",
        ResyncKind::Reconcile => "reconcile",
    }
}
