//! The management interface of an open volume: [`VolumeHandle`] for other threads, the commands,
//! the status and the events.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use nacre_bdev::{Bdev, Layer};
use parking_lot::Mutex;
use schemars::JsonSchema;
use serde::Serialize;
use tokio::sync::{mpsc, oneshot};
use uuid::Uuid;

use crate::model::{Origin, RESERVED, ReplicaState, Settings, VolumeRecord};
use crate::settings::InvalidSetting;
use crate::shared::Shared;
use crate::store::StoreError;

/// Most commands that may wait for one volume.
pub(crate) const COMMANDS: usize = 64;

/// The source of the replicas' devices.
pub trait Devices: Send + Sync + 'static {
    /// Claims the device `name` for one replica of `volume`, until the claim is dropped.
    fn claim(&self, name: &str, volume: &str) -> Result<ReplicaDevice, NoDevice>;

    /// False if the device is known not to answer, because the lease of its node is over. A volume
    /// does not wait for such a replica, neither when it opens nor for I/O in flight. Called often,
    /// so it must not block.
    fn is_awaited(&self, _name: &str) -> bool {
        true
    }

    /// How long a replica on this device of another node may complete nothing while it has I/O in
    /// flight, although it is awaited. After that it goes out of sync, if it does not answer a read
    /// of its label and another replica does. `None`: only the volume's deadline applies.
    fn patience(&self, _name: &str) -> Option<Duration> {
        None
    }
}

/// The device of a replica.
pub struct ReplicaDevice {
    pub layer: Arc<Layer>,
    /// The device is on this machine.
    pub local: bool,
    /// The claim on the device; it ends when dropped.
    pub claim: Box<dyn Any + Send + Sync>,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("device \"{name}\": {why}")]
pub struct NoDevice {
    pub name: String,
    pub why: String,
}

/// Receives the events of volumes, on any thread. The call must return quickly.
pub trait Observer: Send + Sync + 'static {
    fn event(&self, event: VolumeEvent);
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct VolumeEvent {
    pub volume: Uuid,
    pub name: String,
    #[serde(flatten)]
    pub what: VolumeEventKind,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum VolumeEventKind {
    Opened {
        epoch: u64,
        degraded: bool,
        clean: bool,
    },
    Closed,
    /// A replica is out of sync, durably.
    ReplicaOut {
        replica: Uuid,
        device: String,
        why: String,
    },
    /// A replica returned, or is new, and its resync started.
    ResyncStarted {
        replica: Uuid,
        device: String,
        kind: ResyncKind,
        bytes: u64,
    },
    ResyncEnded {
        replica: Uuid,
        device: String,
        kind: ResyncKind,
        bytes: u64,
    },
    ResyncStopped {
        replica: Uuid,
        device: String,
        why: String,
    },
    SourceChanged {
        from: Uuid,
        to: Uuid,
    },
    ReplicaAdded {
        replica: Uuid,
        device: String,
    },
    ReplicaRemoved {
        replica: Uuid,
        device: String,
    },
    ReadRepaired {
        replica: Uuid,
        lba: u64,
        blocks: u32,
    },
    /// The reconcile source could not read these blocks, so the data of `from` replaces them, and
    /// may differ. Sent before any host can read them.
    Salvaged {
        replica: Uuid,
        from: Uuid,
        lba: u64,
        blocks: u32,
    },
    Frozen {
        why: String,
    },
    Thawed,
    /// Another holder owns the volume.
    Fenced {
        why: String,
    },
    StoreLost {
        why: String,
    },
    StoreBack,
    VerifyStarted {
        repair: bool,
    },
    VerifyEnded {
        compared_bytes: u64,
        different_blocks: u64,
        repaired_blocks: u64,
    },
    Grown {
        blocks: u64,
    },
}

/// The kind of a resync.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ResyncKind {
    /// The resync copies only the regions that the replica missed.
    Partial,
    /// The resync copies everything from the stored watermark on, and the dirty regions below it.
    Full,
    /// The resync makes in-sync replicas equal. It covers the regions with writes in flight when
    /// the volume stopped uncleanly, and the new part of a grown volume.
    Reconcile,
}

/// The error of opening a volume, or of a command.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum VolumeError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Device(#[from] NoDevice),
    #[error("{device}: {what}")]
    Io { device: String, what: String },
    /// `what` is the wrong field.
    #[error("{what}: {why}")]
    Invalid { what: &'static str, why: String },
    #[error("device \"{device}\" {holds}: its contents would be lost; use force to overwrite them")]
    InUse { device: String, holds: String },
    #[error("volume \"{name}\" has no replica \"{replica}\"")]
    NoReplica { name: String, replica: String },
    #[error("that would remove the last good replica of \"{name}\"{hint}")]
    LastCopy { name: String, hint: &'static str },
    #[error(
        "the replica on \"{device}\" belongs to a newer owner ({found}); the store here says \
            {known}"
    )]
    Newer {
        device: String,
        found: String,
        known: String,
    },
    /// The record comes from a backup, and the labels of all replicas decide.
    #[error(
        "\"{name}\" was restored from a backup, and the replica on \"{device}\" does not show its last \
            state: {why}. Bring it back; or, if the writes that only it has may be lost, serve from \
            another one: `nacre volume thaw {name} --replica DEVICE --force {name}`"
    )]
    Restored {
        name: String,
        device: String,
        why: String,
    },
    #[error("none of the in-sync replicas of \"{name}\" can be reached: {why}")]
    NothingInSync { name: String, why: String },
    /// This process lacks memory, a descriptor or a queue for the device. The error says nothing
    /// about the device, and is temporary.
    #[error("no resources for device \"{device}\": {what}; retry when hosts use fewer")]
    Short { device: String, what: String },
    /// The device is present, and holds an older state than the volume served.
    #[error(
        "the store lists the replica on \"{device}\" as in sync, but {found}, and \"{name}\" \
            served in epoch {serving}: its data may be old. Bring back the device that was \
            written last; or thaw the volume with this replica, if the missing writes may be \
            lost"
    )]
    NotBelieved {
        name: String,
        device: String,
        found: String,
        serving: u64,
    },
    /// Sizes in bytes.
    #[error("device \"{device}\" has {has} bytes, and the volume needs {needed}: enlarge it")]
    TooSmall {
        device: String,
        has: u64,
        needed: u64,
    },
    #[error(
        "the replica on \"{device}\" may have lost data: {what}, and no other replica of \"{name}\" is \
            available to fill it from. Bring back a replica that is in sync; or enlarge the device \
            if it is too small, and thaw the volume with this replica, if its data is acceptable"
    )]
    Cut {
        name: String,
        device: String,
        what: String,
    },
    #[error("volume \"{name}\" is fenced: {why}")]
    Fenced { name: String, why: String },
    /// A host that does not hold the volume has reserved the device.
    #[error(
        "device \"{device}\" is reserved by another host: let that host release it, or clear the reservation at the target"
    )]
    Reserved { device: String },
    /// Volumes of a cluster need reservations, against a former holder that goes on.
    #[error(
        "device \"{device}\" does not support reservations, which each replica of a volume in a cluster needs: enable them at its target, or use another device"
    )]
    NoReservations { device: String },
    #[error("volume \"{name}\" is closed")]
    Closed { name: String },
    #[error("{what} is already running")]
    Running { what: &'static str },
    /// Replicas in sync may have different contents, now or since a hold began.
    #[error("the replicas of \"{name}\" may differ: {why}")]
    NotEqual { name: String, why: String },
    /// Writes in flight did not end in time, or went on before the release.
    #[error("the writes to \"{name}\" are not held back: {why}")]
    NotHeld { name: String, why: String },
    #[error("too many commands are waiting for the volume")]
    Busy,
}

/// A replica as commands name it: its id, or its device's name.
pub type ReplicaName = String;

/// Commands of an open volume.
#[derive(Debug)]
pub enum Command {
    /// Adds a replica on `device`. The contents of the device are lost; if it has any, `force` is
    /// required.
    Add {
        device: String,
        force: bool,
    },
    /// `force`: the volume's name, typed by the operator, to remove the last good replica.
    Remove {
        replica: ReplicaName,
        force: Option<String>,
    },
    Offline {
        replica: ReplicaName,
        force: Option<String>,
    },
    Online {
        replica: ReplicaName,
    },
    /// Adds a replica on `device`; removes `replica` as soon as the new one is in sync.
    Replace {
        replica: ReplicaName,
        device: String,
        force: bool,
    },
    /// Removes a replica that was added in the place of another one, unless it is in sync by now.
    GiveUp {
        replica: ReplicaName,
    },
    /// Retries absent replicas (`None`: all) now, regardless of the retry delay. `full`: copies
    /// everything to that replica; needs `replica`, and another replica in sync.
    Resync {
        replica: Option<ReplicaName>,
        full: bool,
    },
    Verify {
        repair: bool,
    },
    StopVerify,
    /// New size in blocks; the devices must have grown before.
    Grow {
        blocks: u64,
    },
    Rename {
        name: String,
    },
    Set {
        settings: Box<Settings>,
    },
    /// Serves again although no replica is in sync: from `replica`, whatever it missed, or from the
    /// attached replica that left last. `force`: the volume's name, typed by the operator.
    Thaw {
        replica: Option<ReplicaName>,
        force: Option<String>,
    },
    /// Fails waiting and new I/O until `Thaw`.
    FailIo,
    /// A device appeared, changed its size or disappeared.
    DevicesChanged {
        device: String,
    },
    /// Ends when no write is in flight and all replicas in sync have the same contents. Later
    /// writes wait until [`Command::ReleaseWrites`] with the same `id`. `limit`: the time from the
    /// start of the command on after which writes go on; at most [`crate::control::MAX_HOLD`].
    HoldWrites {
        id: Uuid,
        limit: Duration,
    },
    /// Lets writes go on. An error: the contents may have changed before.
    ReleaseWrites {
        id: Uuid,
    },
    /// Flushes, cleans the log, writes clean labels. The caller must close the volume's queues
    /// before.
    Close,
}

pub(crate) struct CommandRequest {
    pub command: Command,
    pub answer: oneshot::Sender<Result<(), VolumeError>>,
}

/// An open volume, usable from any thread. Dropping all handles does not close it.
#[derive(Clone)]
pub struct VolumeHandle {
    pub(crate) commands: mpsc::Sender<CommandRequest>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) volume: Arc<dyn Bdev>,
    pub(crate) status: Arc<Mutex<VolumeStatus>>,
}

impl VolumeHandle {
    /// The block device to register.
    pub fn volume(&self) -> &Arc<dyn Bdev> {
        &self.volume
    }

    /// The present state. Frequently changing values are read now; others date from their last
    /// change.
    pub fn status(&self) -> VolumeStatus {
        let mut status = self.status.lock().clone();
        status.count(&self.shared);
        if status.state == VolumeState::Healthy
            && let Some(device) = self.cut_replica(&status)
        {
            status.state = VolumeState::Degraded;
            status.why = Some(format!(
                "the device \"{device}\" has, or had, fewer bytes than the volume needs: it will \
                    go out of sync"
            ));
        }
        status
    }

    /// The largest size to which the volume can grow while it is open, in blocks.
    pub fn most_blocks(&self) -> u64 {
        let (regions, status) = (self.shared.regions.len(), self.status.lock());
        regions * (status.region_bytes / u64::from(status.block_size.max(1)))
    }

    /// A truncated replica that the control has not detected yet.
    fn cut_replica(&self, status: &VolumeStatus) -> Option<String> {
        let needed = RESERVED / u64::from(status.block_size.max(1)) + status.blocks;
        let view = self.shared.view();
        let mut replicas = view.replicas.iter().flatten();
        let cut = replicas.find(|m| m.device.least_blocks() < needed)?;
        Some(cut.device.name().to_owned())
    }

    /// Completes when the command is done, durably; resyncs and verifications continue after it. A
    /// command that returned an error has no further effect. Dropping the future does not cancel
    /// the command.
    pub async fn run(&self, command: Command) -> Result<(), VolumeError> {
        let (answer, outcome) = oneshot::channel();
        let request = CommandRequest { command, answer };
        let closed = || VolumeError::Closed {
            name: self.status().name,
        };
        self.commands
            .try_send(request)
            .map_err(|error| match error {
                mpsc::error::TrySendError::Full(_) => VolumeError::Busy,
                mpsc::error::TrySendError::Closed(_) => closed(),
            })?;
        outcome.await.unwrap_or_else(|_| Err(closed()))
    }
}

/// The state of an open volume.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct VolumeStatus {
    pub id: Uuid,
    pub name: String,
    pub block_size: u32,
    pub blocks: u64,
    pub state: VolumeState,
    /// The reason for that state, when the volume does not serve with all replicas in sync.
    pub why: Option<String>,
    pub epoch: u64,
    pub revision: u64,
    pub region_bytes: u64,
    pub regions: u64,
    pub dirty_regions: u64,
    pub settings: Settings,
    pub replicas: Vec<ReplicaStatus>,
    pub verify: Option<VerifyStatus>,
    /// Open queues.
    pub lanes: usize,
    pub log_waits: u64,
    pub overlap_waits: u64,
    pub reads_moved: u64,
    pub frozen_answers: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum VolumeState {
    /// Every replica is in sync.
    Healthy,
    /// Serving; a replica is out or under resync.
    Degraded,
    /// No replica is in sync: hosts wait.
    Frozen,
    /// Writes wait: fewer replicas are in sync than `min_in_sync`.
    WritesHeld,
    /// The operator requested that I/O fails.
    Failing,
    Fenced,
    StoreLost,
    Closed,
    /// Another node of the cluster serves it, or none does yet.
    Standby,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ReplicaStatus {
    pub id: Uuid,
    pub slot: u8,
    pub device: String,
    pub state: ReplicaState,
    /// The replica's device is present and in use.
    pub attached: bool,
    pub offline: bool,
    pub local: bool,
    /// `None` while the device is not in use.
    pub fencing: Option<Fencing>,
    pub why: Option<String>,
    pub resync: Option<ResyncStatus>,
    /// The replica is in sync, but blocks of it may differ from those of other in-sync replicas,
    /// because a write failed or was interrupted. A resync is making them equal.
    pub is_unequal: bool,
    /// The last resync that ended since the volume was opened.
    pub last_resync: Option<LastResync>,
    pub reads: u64,
    pub writes: u64,
    pub errors: u64,
}

/// How a former holder of the volume is kept away from a replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Fencing {
    /// By the label's epoch, which the former holder reads.
    Label,
    /// By the label, and a reservation of the namespace: its target refuses the former holder's
    /// writes.
    Reservation,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ResyncStatus {
    pub kind: ResyncKind,
    pub source: Option<Uuid>,
    pub total_bytes: u64,
    pub left_bytes: u64,
    pub bytes_per_s: u64,
    /// Seconds, at the recent rate; `None`: unknown.
    pub left_s: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct LastResync {
    pub kind: ResyncKind,
    pub bytes: u64,
    /// Time from the attachment of the replica until it was in sync.
    pub seconds: f64,
}

/// The progress of a verification, also as RPC replies show it.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct VerifyStatus {
    pub repair: bool,
    pub running: bool,
    pub total_bytes: u64,
    pub compared_bytes: u64,
    pub different_blocks: u64,
    pub repaired_blocks: u64,
    /// LBAs of the first differing blocks, at most 16.
    pub examples: Vec<u64>,
}

/// The parameters of a new volume.
#[derive(Debug, Clone)]
pub struct NewVolume {
    pub name: String,
    pub id: Option<Uuid>,
    /// Bytes; `None`: as large as the devices allow.
    pub bytes: Option<u64>,
    pub devices: Vec<String>,
    pub settings: Settings,
    /// Accept devices that are not empty.
    pub force: bool,
    /// Without it, the volume begins with zeroes.
    pub copied_from: Option<CopiedFrom>,
}

/// The contents of a new volume, which its first devices have.
#[derive(Debug, Clone)]
pub struct CopiedFrom {
    pub origin: Origin,
    /// Number of devices, at least 1, that are copies of another volume's replicas that were in
    /// sync, and have the same contents. The other replicas are filled from them once the volume
    /// is open.
    pub devices: usize,
}

impl VolumeStatus {
    /// Sets the frequently changing values.
    pub(crate) fn count(&mut self, shared: &Shared) {
        let count = |n: &AtomicU64| n.load(Ordering::Relaxed);
        let totals = &shared.totals;
        self.dirty_regions = shared.regions.dirty_count();
        self.lanes = shared.lanes().len();
        self.log_waits = count(&totals.log_waits);
        self.overlap_waits = count(&totals.overlap_waits);
        self.reads_moved = count(&totals.reads_moved);
        self.frozen_answers = count(&totals.frozen_answers);
        for replica in &mut self.replicas {
            let slot = usize::from(replica.slot);
            replica.reads = count(&totals.reads[slot]);
            replica.writes = count(&totals.writes[slot]);
            replica.errors = count(&totals.errors[slot]);
        }
    }

    pub(crate) fn of(record: &VolumeRecord) -> Self {
        let replica = |m: &crate::model::ReplicaRecord| ReplicaStatus {
            id: m.id,
            slot: m.slot,
            device: m.device.clone(),
            state: m.state,
            attached: false,
            offline: m.offline,
            local: true,
            fencing: None,
            why: m.why.clone(),
            resync: None,
            is_unequal: false,
            last_resync: None,
            reads: 0,
            writes: 0,
            errors: 0,
        };
        Self {
            id: record.id,
            name: record.name.clone(),
            block_size: record.block_size,
            blocks: record.blocks,
            state: VolumeState::Closed,
            why: None,
            epoch: record.epoch,
            revision: record.revision,
            region_bytes: 1 << record.region_shift,
            regions: record.regions(),
            dirty_regions: 0,
            settings: record.settings.clone(),
            replicas: record.replicas.iter().map(replica).collect(),
            verify: None,
            lanes: 0,
            log_waits: 0,
            overlap_waits: 0,
            reads_moved: 0,
            frozen_answers: 0,
        }
    }
}

impl From<InvalidSetting> for VolumeError {
    fn from(invalid: InvalidSetting) -> Self {
        Self::Invalid {
            what: invalid.what,
            why: invalid.why.into(),
        }
    }
}
