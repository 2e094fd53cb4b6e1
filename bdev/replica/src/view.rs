//! The view: an immutable snapshot of the replicas and settings, which the control publishes to the
//! lanes.

use std::sync::Arc;
use std::time::Duration;

use nacre_bdev::Layer;

use crate::answers::AnswerLease;
use crate::model::{MAX_REPLICAS, ReadPolicy, Settings};

/// How hosts' I/O is handled now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    Serving,
    /// No replica is in sync: I/O waits, and ends with a path-related status.
    Frozen,
    /// Another holder has the volume, or the store is unreachable: nothing is acknowledged.
    Suspended,
    /// The operator has requested that I/O fails.
    FailIo,
    Closed,
}

/// The role of a replica in the view. A replica that is out of sync is not in the view.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Gets all writes; reads use it unless it lacks the region.
    InSync,
    /// Under resync: gets writes except to regions that are still to be copied; not read.
    Syncing,
}

#[derive(Clone)]
pub struct ReplicaView {
    pub device: Arc<Layer>,
    /// Unique number of this attachment of the replica. A new number makes lanes reopen their
    /// queues.
    pub incarnation: u64,
    pub role: Role,
    /// Gets flushes and every write, because it is in sync or about to be.
    pub flushed: bool,
    /// The device is on this machine.
    pub local: bool,
    /// [`nacre_bdev::Bdev::losses`] of the device when it was attached.
    pub losses: u64,
    /// Reported failures of this slot up to this number are decided.
    pub decided: u64,
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
    /// The lease that the answers of this view need.
    pub lease: Option<Arc<dyn AnswerLease>>,
}

impl View {
    /// The view of a volume that is not open: without replicas.
    pub fn closed(settings: &Settings) -> Self {
        Self {
            version: 0,
            mode: Mode::Closed,
            replicas: Default::default(),
            read_policy: settings.read_policy,
            min_in_sync: usize::from(settings.min_in_sync.max(1)),
            deadline: Duration::from_millis(settings.deadline_ms),
            frozen_hold: Duration::from_millis(settings.frozen_hold_ms),
            lease: None,
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
