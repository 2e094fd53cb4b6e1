//! A request in flight, as the checker of its answer needs it.

use uuid::Uuid;

use super::model::Number;
use crate::ids::{Generation, VersionId};

#[derive(Debug)]
pub(super) enum Op {
    Write {
        number: Number,
        granules: Vec<u64>,
        fua: bool,
    },
    Unmap {
        number: Number,
        granules: Vec<u64>,
    },
    Flush {
        since: u64,
    },
    Create {
        number: Number,
    },
    Snapshot {
        cuts: Vec<(Number, Number)>,
    },
    Clone {
        number: Number,
    },
    Delete {
        number: Number,
    },
    Restore {
        number: Number,
    },
    Inflate {
        number: Number,
    },
    Decouple {
        number: Number,
    },
    SetParent {
        number: Number,
        /// The parent that the volume had: its deletion would make its units the volume's own.
        parent: Option<VersionId>,
        /// The generation of the contents that the volume had.
        generation: Generation,
    },
    ReadOnly {
        number: Number,
    },
    /// `keeps`: a disk that leaves shall stay.
    Removal {
        disk: Uuid,
        keeps: bool,
    },
    Check,
    Other,
}

impl Op {
    /// True when it changes this version, or cuts it.
    pub(super) fn is_about(&self, of: Number) -> bool {
        match self {
            Self::Write { number, .. }
            | Self::Unmap { number, .. }
            | Self::Create { number }
            | Self::Clone { number }
            | Self::Delete { number }
            | Self::Restore { number }
            | Self::Inflate { number }
            | Self::Decouple { number }
            | Self::SetParent { number, .. }
            | Self::ReadOnly { number } => *number == of,
            Self::Snapshot { cuts } => cuts.iter().any(|(volume, _)| *volume == of),
            Self::Flush { .. } | Self::Removal { .. } | Self::Check | Self::Other => false,
        }
    }
}

/// Events that the checker has seen, so that a run without events does not pass for a good one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Report {
    pub writes: u64,
    pub snapshots: u64,
    pub clones: u64,
    pub deletions: u64,
    pub restores: u64,
    pub inflations: u64,
    pub decouplings: u64,
    pub adoptions: u64,
    pub read_only: u64,
    pub crashes: u64,
    pub dropped: u64,
    pub refused: u64,
    /// Steps while writes waited for space.
    pub full: u64,
    pub discarded: u64,
    pub checks: u64,
    /// External devices that the pool knows at its end.
    pub devices: u64,
    /// Disks that the last import found.
    pub disks: u64,
    /// Disks that left, and removals that ended without that.
    pub left: u64,
    pub stayed: u64,
    /// A checksum of all writes to the disk, in their order.
    pub history: u64,
}
