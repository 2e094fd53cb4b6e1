//! The requests to a pool, its answers, and its intents: the I/O that the caller does for it.

use std::sync::Arc;

use uuid::Uuid;

use crate::disks::Location;
use crate::format::Page;
use crate::format::record::Identity;
use crate::ids::{Generation, IoId, Token, VersionId};
use crate::report::CheckReport;
use crate::space::Allocation;

/// The limits of an open pool, and its settings.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Most requests in the pool; more are refused with [`Busy`](crate::pool::Busy).
    pub requests: usize,
    /// Most writes of log pages in flight.
    pub log_window: usize,
    /// Most writes of metadata pages in flight.
    pub page_window: usize,
    /// Most writes that wait for space; more of them fail at once.
    pub full_writes: usize,
    /// Most records that a recovery would have to verify. Writes that would add more wait.
    pub unsettled: usize,
    /// The number of changed nodes of maps from which a checkpoint begins.
    pub changed_nodes: usize,
    /// Free space is discarded in aligned blocks of this many units. 0: the disk takes no discards.
    pub discard_units: u64,
    /// Most units of one discard; one is in flight at a time.
    pub discard_most_units: u64,
    /// True if a disk loses completed writes when its power fails before a flush.
    pub has_volatile_cache: bool,
    pub allocation: Allocation,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            requests: 4096,
            log_window: 32,
            page_window: 32,
            full_writes: 0,
            unsettled: 16_384,
            changed_nodes: 16_384,
            discard_units: 0,
            discard_most_units: 1024,
            has_volatile_cache: true,
            allocation: Allocation::Next,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request {
    Write(Write),
    /// Makes granules read as zeroes. They are in the places of one leaf.
    Unmap {
        version: VersionId,
        /// Counted in granules from the start of the volume.
        first: u64,
        granules: u64,
    },
    /// Makes durable every request that was answered before.
    Flush,
    Create {
        identity: Identity,
        units: u64,
        thick: bool,
    },
    /// Makes snapshots of all these volumes at one moment, with these names.
    Snapshot(Vec<(VersionId, Identity)>),
    Clone {
        source: VersionId,
        identity: Identity,
        thick: bool,
    },
    /// Makes a thin volume with the size and the contents of an external device: a clone of it.
    CloneExternal {
        device: External,
        identity: Identity,
    },
    /// Makes a thin volume a clone of an external device, with its own granules on top. No host may
    /// use the volume.
    SetExternal {
        version: VersionId,
        device: External,
    },
    /// A smaller size unmaps the places beyond it first.
    Resize {
        version: VersionId,
        units: u64,
    },
    Rename {
        version: VersionId,
        name: String,
    },
    /// Gives a volume the contents and the size of a snapshot. No host may use the volume.
    Restore {
        version: VersionId,
        source: VersionId,
    },
    /// Copies all units that the volume shares, and separates it from its parent.
    Inflate {
        version: VersionId,
    },
    /// Copies the units that the volume shares with its nearest visible ancestor, and separates it
    /// from that ancestor: the ancestor's parent becomes the volume's parent.
    Decouple {
        version: VersionId,
    },
    /// Makes a thin volume a clone of a snapshot of its size, with its own granules on top.
    /// No host may use the volume.
    SetParent {
        version: VersionId,
        source: VersionId,
    },
    /// Makes the volume read-only for good. It can be cloned from then on.
    ReadOnly {
        version: VersionId,
    },
    /// A step of [`Request::SetParent`], from the pool itself. It copies granules of one place from
    /// the volume `from` to the hidden version whose contents `from` will adopt. It copies those of
    /// units above a generation.
    Copy {
        version: VersionId,
        from: VersionId,
        above: Generation,
        place: u64,
    },
    /// A step of [`Request::Inflate`] and [`Request::Decouple`], from the pool itself: copies the
    /// shared units of one place.
    Fill {
        version: VersionId,
        place: u64,
    },
    /// Adds the new space of a disk that has grown to this size. Does nothing if the pool has it
    /// already.
    Grow {
        disk: usize,
        disk_bytes: u64,
    },
    /// Adds a disk, whose contents are lost. Its number is the count of disks before it.
    AddDisk {
        id: Uuid,
        disk_bytes: u64,
    },
    /// Begins to move all units of a disk to the other disks. After that the disk leaves the pool:
    /// [`Intent::Left`] reports it. The answer comes when a crash can no longer undo the beginning.
    RemoveDisk {
        disk: usize,
    },
    /// Ends the removal of a disk, which stays in the pool. Units that have moved stay where they
    /// are.
    KeepDisk {
        disk: usize,
    },
    RenamePool {
        name: String,
    },
    /// Reads all metadata in both copies, repairs bad ones, and compares the used units with the
    /// maps, while the pool serves. The answer is a report.
    Check,
    /// Closes the pool: another machine may import it.
    Export,
    Delete {
        version: VersionId,
    },
    /// Empties all places whose map entries are in the unreadable node that covers `place`. Reads
    /// of them fail until then.
    Clear {
        version: VersionId,
        place: u64,
    },
}

/// A block device outside of the pool, whose contents volumes show. Nothing may write to it
/// meanwhile.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct External {
    /// The id and the name of the device.
    pub identity: Identity,
    /// Its size in whole units.
    pub units: u64,
}

/// A write to granules of one unit-sized place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Write {
    pub version: VersionId,
    /// Counted in units from the start of the volume.
    pub place: u64,
    /// The granules of the place: bit n is granule n.
    pub granules: u16,
    /// CRC32C of each granule, in order.
    pub checksums: Vec<u32>,
    /// True: the data is durable before the answer (Force Unit Access).
    pub fua: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    Done,
    /// The new volume, or the new clone.
    Created(VersionId),
    /// The new snapshots, in the order of the request.
    Snapshots(Vec<VersionId>),
    Checked(Box<CheckReport>),
}

/// The reason why a request was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("the version does not exist")]
    UnknownVersion,
    #[error("the range lies outside of the volume or is too large for one request")]
    OutOfRange,
    #[error(
        "the version does not allow this: snapshots and read-only volumes do not change, and only \
         they are cloned"
    )]
    WrongKind,
    #[error("the volume has no parent")]
    NoParent,
    #[error("the snapshot is the parent of the volume already")]
    SameParent,
    #[error("the volume and the snapshot have different sizes")]
    OtherSize,
    #[error("another version has this id or name")]
    Exists,
    #[error("a resize or a copy of the volume or snapshot is in progress; wait for its end")]
    Changing,
    #[error("the pool is exported; import it")]
    Exported,
    /// `returning`: deleted or trimmed space will become free without a request.
    #[error("the pool has no free unit for it; trim or delete, or add space")]
    NoSpace { returning: bool },
    #[error("the pool has as many volumes and snapshots as it can hold")]
    TooMany,
    #[error("the disk does not fit: it is too small, or the pool has as many as it can hold")]
    DiskUnfit,
    #[error("the first disk has the pool's log; it stays as long as the pool")]
    FirstDisk,
    #[error("the disk is the pool's last one; delete or export the pool")]
    LastDisk,
    /// `missing`: in units.
    #[error(
        "the other disks have {missing} units too few for the contents of the disk; trim, delete, \
         or add a disk first"
    )]
    NoRoom { missing: u64 },
    #[error("another disk is leaving the pool; wait for its end, or cancel that")]
    DiskLeaving,
    #[error("the disk is not leaving the pool")]
    NotLeaving,
    #[error("the disk is empty, and the pool gives it up now")]
    TooLate,
    #[error("the removal of the disk was cancelled")]
    Cancelled,
    #[error("the metadata of this range is unreadable; restore it, or clear the range")]
    Damaged,
    /// Data could not be read, written or flushed.
    #[error("the disk failed to write the data; the range has its old contents")]
    Medium,
    #[error("the pool cannot write its log or metadata; import it again")]
    Held,
}

/// An action for the caller. Each I/O ends with one event of the same number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Intent {
    /// Write a page of the log or of metadata. Ends with [`Pool::written`].
    ///
    /// [`Pool::written`]: crate::pool::Pool::written
    Write {
        io: IoId,
        at: Location,
        bytes: Arc<Page>,
    },
    /// Discard (deallocate) these bytes of the disk. Ends with [`Pool::discarded`]. No request
    /// waits for it.
    ///
    /// [`Pool::discarded`]: crate::pool::Pool::discarded
    Discard { io: IoId, at: Location, len: u64 },
    /// Flush a disk. Ends with [`Pool::flushed`].
    ///
    /// [`Pool::flushed`]: crate::pool::Pool::flushed
    Flush { io: IoId, disk: usize },
    /// Write the request's granules to `unit`, and those of `copy`. Ends with
    /// [`Pool::data_written`].
    ///
    /// [`Pool::data_written`]: crate::pool::Pool::data_written
    Data {
        token: Token,
        unit: u64,
        granules: u16,
        /// Granules that the request does not have: those that were read for `ReadSource` or
        /// `ReadExternal`.
        copy: u16,
    },
    /// Read a page of metadata. Ends with [`Pool::page_read`].
    ///
    /// [`Pool::page_read`]: crate::pool::Pool::page_read
    ReadPage { io: IoId, at: Location },
    /// Read granules of a unit, keep them for `Data`, and return their checksums. Ends with
    /// [`Pool::source_read`].
    ///
    /// [`Pool::source_read`]: crate::pool::Pool::source_read
    ReadSource {
        token: Token,
        unit: u64,
        granules: u16,
    },
    /// Read granules of a place of the external device that is an ancestor of a version, keep them
    /// for `Data`, and return their checksums. Ends with [`Pool::source_read`].
    ///
    /// [`Pool::source_read`]: crate::pool::Pool::source_read
    ReadExternal {
        token: Token,
        version: VersionId,
        place: u64,
        granules: u16,
    },
    /// The disk has left the pool: no unit of it is in use, and an import does not need it. With an
    /// error: the removal has ended, and the disk stays.
    Left {
        disk: usize,
        result: Result<(), Refusal>,
    },
    /// A write waits for space. The caller may end its wait with [`Pool::give_up`].
    ///
    /// [`Pool::give_up`]: crate::pool::Pool::give_up
    Full { token: Token },
    /// Call [`Pool::grace_ended`] when every I/O on data that is in flight now has ended.
    ///
    /// [`Pool::grace_ended`]: crate::pool::Pool::grace_ended
    AwaitGrace { epoch: u64 },
    Answer {
        token: Token,
        result: Result<Answer, Refusal>,
    },
}

/// A change of a version in the map, for callers that keep a copy of the map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// The entries of the places `first..end` changed.
    Places {
        version: VersionId,
        first: u64,
        end: u64,
    },
    /// Its size changed, or the generation up to which its units are shared, or it is hidden now.
    Version(VersionId),
    /// Its size and all entries changed.
    Contents(VersionId),
}

/// The I/O failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IoFailed;
