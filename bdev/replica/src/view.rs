//! The lanes' knowledge of the replicas: built by the control, never changed, replaced as a whole.

use std::sync::Arc;
use std::time::Duration;

use nacre_bdev::Layer;

use crate::model::{MAX_REPLICAS, ReadPolicy, Settings};

/// How hosts' I/O is handled now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    Serving,
    /// No replica is in sync: I/O waits, and ends with a path-related status.
    Frozen,
    /// Another holder has the volume, or the store is unreachable: nothing is acknowledged.
    Suspended,
    /// The operator gave up on it: I/O fails at once.
    FailIo,
    Closed,
}

/// The role of a replica for a lane. One that is out is not in the view.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Written to always, read where it lacks nothing.
    InSync,
    /// Being copied to: gets writes except in regions still to be copied; not read.
    Syncing,
}

#[derive(Clone)]
pub struct ReplicaView {
    pub device: Arc<Layer>,
    /// Differs from that of every earlier incarnation of the replica: its queues are reopened.
    pub incarnation: u64,
    pub role: Role,
    /// Gets flushes and every write: it is in sync, or about to be.
    pub flushed: bool,
    /// The device is on this machine.
    pub local: bool,
    /// [`nacre_bdev::Bdev::losses`] of the device when it was attached.
    pub losses: u64,
    /// Reported failures of this slot up to this number are decided.
    pub judged: u64,
}

#[derive(Clone)]
pub struct View {
    /// Incremented with every view.
    pub version: u64,
    pub mode: Mode,
    pub replicas: [Option<ReplicaView>; MAX_REPLICAS],
    pub read_policy: ReadPolicy,
    pub min_in_sync: usize,
    pub deadline: Duration,
    pub frozen_hold: Duration,
}

impl View {
    /// The view before anything is known about the replicas.
    pub fn closed(settings: &Settings) -> View {
        View {
            version: 0,
            mode: Mode::Closed,
            replicas: Default::default(),
            read_policy: settings.read_policy,
            min_in_sync: usize::from(settings.min_in_sync.max(1)),
            deadline: Duration::from_millis(settings.deadline_ms),
            frozen_hold: Duration::from_millis(settings.frozen_hold_ms),
        }
    }

    pub fn in_sync(&self) -> impl Iterator<Item = (usize, &ReplicaView)> {
        let replicas = self.replicas.iter().enumerate();
        replicas.filter_map(|(slot, m)| {
            let replica = m.as_ref()?;
            (replica.role == Role::InSync).then_some((slot, replica))
        })
    }
}
