//! Handles replicas whose devices were truncated ("cut"): those that have, or had, fewer blocks
//! than the volume needs.
//!
//! A device that was truncated and enlarged again reads as zeroes where it had data, but its label
//! is unchanged. So a device records its smallest number of blocks ([`Bdev::least_blocks`]), until
//! this module starts a full resync of the replica.
//!
//! | the replica is | then |
//! |---|---|
//! | in sync or out, with another in-sync replica | full resync, stored before any completion |
//! | in sync or out, without another one | marked `cut` in the store; not used until thawed |
//! | under resync | full resync, stored |
//!
//! A file that was changed while it was closed counts as having had no blocks.
//!
//! A device without the replica's label is ignored, whatever its size.
//!
//! Each machine has its own record of its devices, but an operator may thaw the volume on another
//! machine. So a machine clears its record once the cut is in the store; the store then decides.

use std::fmt;
use std::sync::Arc;

use nacre_bdev::{Bdev, Layer, Status};

use crate::handle::VolumeError;
use crate::model::{RESERVED, ReplicaRecord, ReplicaState, Stamp, VolumeRecord};
use crate::mutation::Mutation;
use crate::shared::Failure;

/// A device that has, or had, fewer bytes than the volume needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Cut {
    /// Bytes that the volume needs.
    pub needed: u64,
    pub evidence: Evidence,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Evidence {
    /// The smallest size that the device had, in bytes.
    Least(u64),
    /// The device reports enough blocks, and its end cannot be read.
    Unreadable,
    /// The volume's record has the cut, with this reason.
    Record(Option<String>),
}

impl fmt::Display for Cut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let needed = self.needed;
        match &self.evidence {
            Evidence::Least(0) => {
                f.write_str("its file was emptied, or changed while it was closed")
            }
            Evidence::Least(least) => write!(
                f,
                "its device had {least} bytes, and the volume needs {needed}"
            ),
            Evidence::Unreadable => {
                write!(f, "its device ends before the {needed} bytes of the volume")
            }
            Evidence::Record(Some(why)) => f.write_str(why),
            Evidence::Record(None) => write!(
                f,
                "its device had fewer than the {needed} bytes of the volume"
            ),
        }
    }
}

/// The device's count of shrinks at the time of its check.
pub(super) struct Checked {
    layer: Arc<Layer>,
    losses: u64,
}

impl Checked {
    /// Reads the count. Call this before the device is checked.
    pub(super) fn before(layer: &Arc<Layer>) -> Self {
        Self {
            layer: Arc::clone(layer),
            losses: layer.losses(),
        }
    }

    /// Clears the device's record, after the store has the cut. Does nothing if the device has
    /// shrunk since.
    pub(super) fn forget(&self) {
        if self.layer.losses() == self.losses {
            self.layer.forget_least();
        }
    }
}

impl Cut {
    /// The device's end cannot be read.
    pub(super) fn unreadable(record: &VolumeRecord) -> Self {
        Self {
            needed: record.needed_bytes(),
            evidence: Evidence::Unreadable,
        }
    }

    /// The record says that the replica was cut, and its device has enough blocks now.
    pub(super) fn recorded(record: &VolumeRecord, replica: &ReplicaRecord) -> Self {
        Self {
            needed: record.needed_bytes(),
            evidence: Evidence::Record(replica.why.clone()),
        }
    }

    /// Returns the cut if a device has, or had, fewer blocks than the volume needs.
    pub(super) fn of(record: &VolumeRecord, layer: &Layer) -> Option<Self> {
        // The present size says more than that the contents were replaced.
        let too_small = Self::of_least(record, layer.present_blocks());
        too_small
            .filter(|_| layer.least_blocks() == 0)
            .or_else(|| Self::of_least(record, layer.least_blocks()))
    }

    /// Returns the cut if a device that had at least `blocks` had fewer than the volume needs.
    pub(super) fn of_least(record: &VolumeRecord, blocks: u64) -> Option<Self> {
        let least = blocks * u64::from(record.block_size);
        let needed = record.needed_bytes();
        let is_cut = least < needed && !Mutation::IgnoreSize.is_active();
        is_cut.then_some(Self {
            needed,
            evidence: Evidence::Least(least),
        })
    }

    /// Returns the cut of a replica whose I/O failed. A lane asks for nothing beyond the volume's
    /// end.
    pub(super) fn of_failed(record: &VolumeRecord, layer: &Layer, why: Failure) -> Option<Self> {
        let ends = why.is_beyond_end() && !Mutation::IgnoreSize.is_active();
        Self::of(record, layer).or_else(|| ends.then(|| Self::unreadable(record)))
    }
}

impl VolumeRecord {
    /// Bytes that a replica's device needs.
    pub(super) fn needed_bytes(&self) -> u64 {
        RESERVED + self.blocks * u64::from(self.block_size)
    }
}

impl ReplicaRecord {
    /// Marks all contents as invalid.
    pub(super) fn fill_anew(&mut self, why: String) {
        self.state = ReplicaState::Filling {
            watermark: 0,
            last_label: Stamp::default(),
        };
        self.cut = false;
        self.why = Some(why);
    }

    /// True if all contents are marked as invalid.
    pub(super) fn is_empty(&self) -> bool {
        matches!(self.state, ReplicaState::Filling { watermark: 0, .. })
    }
}

/// Refuses a device that has too few bytes now.
pub(super) fn must_fit(
    record: &VolumeRecord,
    name: &str,
    layer: &Layer,
) -> Result<(), VolumeError> {
    let (has, needed) = (
        layer.present_blocks() * u64::from(record.block_size),
        record.needed_bytes(),
    );
    if has < needed && !Mutation::IgnoreSize.is_active() {
        Err(VolumeError::TooSmall {
            device: name.to_owned(),
            has,
            needed,
        })
    } else {
        Ok(())
    }
}

impl Failure {
    /// True if the failure means that the device ends before the requested blocks.
    pub(crate) fn is_beyond_end(self) -> bool {
        self == Self::Status(Status::OutOfRange)
    }
}
