//! Commands of a pool, their outcomes, and its state.

use std::sync::Arc;

use nacre_bdev::{Claim, Status};
use nacre_bdev_pool_core::check::CheckReport;
use nacre_bdev_pool_core::import::ImportError;
use nacre_bdev_pool_core::interface::Refusal;
use serde::Serialize;
use tokio::sync::oneshot;
use uuid::Uuid;

use crate::map::LvolMap;

/// A request to the keeper. Versions are named by their UUID.
#[derive(Debug, Clone)]
pub enum Command {
    Create {
        id: Uuid,
        name: String,
        bytes: u64,
        thick: bool,
    },
    /// Takes snapshots of all these volumes at one moment: volume, id and name of its snapshot.
    Snapshot {
        cuts: Vec<(Uuid, Uuid, String)>,
    },
    Clone {
        source: Uuid,
        id: Uuid,
        name: String,
        thick: bool,
    },
    /// Sizes are rounded up to whole units.
    Resize {
        lvol: Uuid,
        bytes: u64,
    },
    Rename {
        lvol: Uuid,
        name: String,
    },
    /// No queue of the volume may be open.
    Restore {
        lvol: Uuid,
        snapshot: Uuid,
    },
    Inflate {
        lvol: Uuid,
    },
    /// Copies the units that the volume shares with its parent; the grandparent becomes its parent.
    Decouple {
        lvol: Uuid,
    },
    /// Makes a thin volume a clone of a snapshot of its size, with its own units on top. No queue
    /// of the volume may be open.
    SetParent {
        lvol: Uuid,
        snapshot: Uuid,
    },
    /// Makes a volume read-only for good; it can be cloned then.
    ReadOnly {
        lvol: Uuid,
    },
    /// No queue of the version may be open.
    Delete {
        lvol: Uuid,
    },
    /// Volumes and snapshots, with their space.
    List,
    /// One volume or snapshot, with its space.
    Count {
        lvol: Uuid,
    },
    /// All volumes and snapshots, without counting: the numbers of bytes in use are zero.
    Names,
    /// Some places of an lvol, from `from` on, with data that its parent does not have. The answer
    /// is [`Outcome::Places`].
    Own {
        lvol: Uuid,
        from: u64,
    },
    /// Some places of an lvol, from `from` on, that have data. The answer is [`Outcome::Places`].
    Mapped {
        lvol: Uuid,
        from: u64,
    },
    /// Takes the new space of one disk that has grown; does nothing if none has.
    Grow,
    /// Begins to empty a disk, which then leaves the pool. The answer comes when that is durable;
    /// the status has the progress, and [`PoolHandle::take_departed`] the end.
    ///
    /// [`PoolHandle::take_departed`]: crate::PoolHandle::take_departed
    RemoveDisk {
        disk: Uuid,
    },
    /// Cancels [`Command::RemoveDisk`].
    KeepDisk {
        disk: Uuid,
    },
    RenamePool {
        name: String,
    },
    /// Reads all metadata in both copies, repairs bad ones, and compares the use of every unit with
    /// the maps.
    Check,
    /// Ends the keeper, and all other commands with [`PoolError::Closed`]. `export`: after a last
    /// root, so that another machine may import the pool. Otherwise the next import replays the
    /// log, and an export that waits for the disk ends with [`PoolError::Closed`].
    Close {
        export: bool,
    },
    /// Like an export; then the superblocks are overwritten. The data is lost.
    Destroy,
}

#[derive(Debug)]
pub enum Outcome {
    Done,
    /// New versions, in the order of the command.
    Created(Vec<Uuid>),
    List(Vec<LvolInfo>),
    /// Places of a volume, numbers of units from its start. `next`: where the next call continues;
    /// `None`: these are the last.
    Places {
        places: Vec<u64>,
        next: Option<u64>,
    },
    Checked(Box<CheckReport>),
}

/// A volume or snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LvolInfo {
    pub id: Uuid,
    pub name: String,
    pub bytes: u64,
    pub is_snapshot: bool,
    /// A volume that takes no writes.
    pub is_read_only: bool,
    pub is_thick: bool,
    /// The snapshot below it.
    pub parent: Option<Uuid>,
    /// The block device outside of the pool that is its parent.
    pub external_parent: Option<ExternalParent>,
    /// A device that it, or a snapshot below it, shows is missing.
    pub is_degraded: bool,
    /// Bytes of units that it refers to, and of those that no other version refers to.
    pub used_bytes: u64,
    pub exclusive_bytes: u64,
}

/// A block device outside of the pool, as the pool has recorded it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ExternalParent {
    pub id: Uuid,
    /// The name that it had when it became a parent.
    pub name: String,
}

/// A block device outside of the pool that volumes or snapshots show.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExternalStatus {
    pub parent: ExternalParent,
    /// Bytes that the pool needs of it.
    pub bytes: u64,
    /// The pool has a claim on it.
    pub is_present: bool,
}

/// The error of opening a pool, or of a command.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PoolError {
    #[error(transparent)]
    Import(#[from] ImportError),
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// A disk that the importing daemon has seen before.
    #[error("disk {disk}, number {number} of {of}, is missing; it was last {last}")]
    DiskAway {
        disk: Uuid,
        number: usize,
        of: usize,
        last: String,
    },
    #[error("there is no volume or snapshot {id} in the pool")]
    Unknown { id: Uuid },
    #[error("the disk has {what}; force overwrites it")]
    NotEmpty { what: String },
    #[error("the disk has pool {found}, not {expected}")]
    OtherPool { expected: Uuid, found: Uuid },
    #[error("the disk has pool {id}, which is open: it is that disk, or a copy of it")]
    AlreadyOpen { id: Uuid },
    #[error("the disk has pool {id}, and its name \"{name}\" is that of an open pool")]
    NameTaken { id: Uuid, name: String },
    /// `what` is the wrong property.
    #[error("{what}: {why}")]
    Unfit { what: &'static str, why: String },
    #[error(
        "the external device {} (\"{}\") is missing: its data cannot be copied",
        .0.id, .0.name
    )]
    Degraded(ExternalParent),
    /// The device did not answer a read in time.
    #[error(
        "the external device {} (\"{}\") does not answer: its data cannot be copied",
        .0.id, .0.name
    )]
    Silent(ExternalParent),
    #[error("the disk failed: {what}")]
    Io { what: String },
    /// The pool is deleted, and no import opens the disks that keep superblocks.
    #[error("the pool is deleted, but its superblocks are left on {}", list(.disks))]
    NotErased { disks: Vec<NotErased> },
    #[error("the pool is closed")]
    Closed,
    #[error("too many commands are waiting for the pool; try again later")]
    Busy,
}

/// A disk of a deleted pool that still has its superblocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotErased {
    /// Name of its device.
    pub disk: String,
    /// `None`: the disk has not answered. The erasure goes on.
    pub status: Option<Status>,
}

fn list(disks: &[NotErased]) -> String {
    let disks = disks.iter().map(|of| match of.status {
        Some(status) => format!("\"{}\" (a write ended with {status:?})", of.disk),
        None => format!("\"{}\" (it does not answer)", of.disk),
    });
    disks.collect::<Vec<_>>().join(", ")
}

/// The state of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PoolState {
    Opening,
    Online,
    /// The log or metadata cannot be written: reads and writes in place go on, the rest fails.
    Held,
    /// A disk may have lost writes that were not flushed: nothing is confirmed, and the pool must
    /// be closed and imported again.
    Interrupted,
    Closed,
}

/// A disk of a pool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DiskStatus {
    pub id: Uuid,
    /// Name of its device.
    pub name: String,
    pub total_bytes: u64,
    pub free_bytes: u64,
    /// The disk is being emptied.
    pub leaving: Option<LeavingDisk>,
}

/// The progress of a disk that leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct LeavingDisk {
    /// Bytes in use: now, and when this process began to empty the disk.
    pub left_bytes: u64,
    pub begun_bytes: u64,
    /// An estimate, from the speed so far.
    pub seconds_left: Option<u64>,
}

impl LeavingDisk {
    pub fn percent(&self) -> u64 {
        let done = self.begun_bytes.saturating_sub(self.left_bytes);
        (done * 100).checked_div(self.begun_bytes).unwrap_or(100)
    }
}

/// The end of a removal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Departed {
    pub disk: Uuid,
    /// Name of its device.
    pub name: String,
    /// `Ok`: it is erased and free. `Err`: it stays, or could not be erased.
    pub result: Result<(), PoolError>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PoolStatus {
    pub id: Uuid,
    pub name: String,
    /// Name of the device with the log.
    pub disk: String,
    pub disks: Vec<DiskStatus>,
    pub state: PoolState,
    pub unit_bytes: u64,
    pub total_bytes: u64,
    pub free_bytes: u64,
    /// Free bytes that metadata and thick volumes keep.
    pub reserved_bytes: u64,
    /// Writes that wait for space.
    #[serde(skip)]
    pub waiting_writes: u64,
    /// The threshold that the use of the space has reached, in percent; 0: none.
    #[serde(skip)]
    pub full_percent: u8,
    /// Largest size of a volume.
    pub max_lvol_bytes: u64,
    /// Log records that a recovery would verify.
    pub unsettled_records: u64,
    /// Number of volumes and snapshots.
    pub versions: u64,
    pub imports: u64,
    /// The devices outside of the pool that its volumes show.
    #[serde(skip)]
    pub externals: Vec<ExternalStatus>,
    /// The devices that the pool has claims on for its volumes, and for commands in progress.
    #[serde(skip)]
    pub external_claims: Vec<Uuid>,
}

pub(crate) struct CommandRequest {
    pub command: KeeperCommand,
    pub answer: Answer,
}

pub(crate) enum KeeperCommand {
    Public(Command),
    /// The map that lanes of a version read.
    OpenMap(Uuid),
    /// A further disk. `force`: its data is lost.
    AddDisk {
        claim: Arc<Claim>,
        force: bool,
    },
    /// A device outside of the pool is there, for this work.
    External {
        claim: Arc<Claim>,
        work: ExternalWork,
    },
    /// Such a device goes. `only_gone`: one that came back under its UUID stays.
    Detach {
        device: Uuid,
        only_gone: bool,
    },
}

/// The use of an external device.
pub(crate) enum ExternalWork {
    /// Volumes show it already.
    Attach,
    Clone {
        id: Uuid,
        name: String,
    },
    SetParent {
        lvol: Uuid,
    },
}

pub(crate) enum Answer {
    Outcome(oneshot::Sender<Result<Outcome, PoolError>>),
    Map(oneshot::Sender<Result<(LvolInfo, Arc<LvolMap>), PoolError>>),
    /// Called on the keeper's core.
    Call(Box<dyn FnOnce(Result<Outcome, PoolError>) + Send>),
}

impl Answer {
    pub(crate) fn closed(self) {
        self.fail(PoolError::Closed);
    }

    pub(crate) fn fail(self, error: PoolError) {
        // The caller may no longer wait.
        match self {
            Self::Outcome(answer) => drop(answer.send(Err(error))),
            Self::Map(answer) => drop(answer.send(Err(error))),
            Self::Call(answer) => answer(Err(error)),
        }
    }

    pub(crate) fn send(self, outcome: Outcome) {
        match self {
            Self::Outcome(answer) => drop(answer.send(Ok(outcome))),
            Self::Call(answer) => answer(Ok(outcome)),
            Self::Map(_) => {}
        }
    }
}
