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

use super::membership::Membership;
use super::state::Live;
use crate::handle::{VolumeError, VolumeEventKind};
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
    fn forget(&self) {
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
    pub(super) fn of_failed(record: &VolumeRecord, live: &Live, why: Failure) -> Option<Self> {
        let ends = why.is_beyond_end() && !Mutation::IgnoreSize.is_active();
        Self::of(record, &live.device.layer).or_else(|| ends.then(|| Self::unreadable(record)))
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

impl Membership {
    /// Records, under `turn`, that a replica that is not used was cut. An error: there is none to
    /// fill it from, or the volume is another holder's.
    pub(super) async fn record_cut(
        &self,
        slot: usize,
        cut: &Cut,
        checked: &Checked,
    ) -> Result<(), VolumeError> {
        let Some(replica) = self.context.state.borrow().record.replica(slot).cloned() else {
            return Ok(());
        };
        if replica.is_empty() && !replica.cut {
            return Ok(());
        }
        let why = cut.to_string();
        let is_partial = matches!(replica.state, ReplicaState::Filling { .. });
        if !is_partial && self.context.state.borrow().in_sync().next().is_none() {
            self.mark_cut(slot, cut, checked).await?;
            return Err(VolumeError::Cut {
                name: self.context.name(),
                device: replica.device,
                what: why,
            });
        }
        self.commit(|record| {
            if let Some(replica) = record.replica_mut(slot) {
                replica.fill_anew(why.clone());
            }
        })
        .await?;
        self.context.emit(VolumeEventKind::ReplicaOut {
            replica: replica.id,
            device: replica.device,
            why,
        });
        Ok(())
    }

    /// Records the cut of a replica that lanes do not use any more, without a source for a resync.
    pub(super) async fn mark_cut(
        &self,
        slot: usize,
        cut: &Cut,
        checked: &Checked,
    ) -> Result<(), VolumeError> {
        let marked = self
            .context
            .state
            .borrow()
            .record
            .replica(slot)
            .is_some_and(|m| m.cut);
        if marked {
            return Ok(());
        }
        self.commit(|record| {
            if let Some(replica) = record.replica_mut(slot) {
                replica.cut = true;
                replica.why = Some(cut.to_string());
            }
        })
        .await?;
        checked.forget();
        Ok(())
    }

    /// Records the cut replicas of a volume that cannot be opened. That fences a holder that has it
    /// open. So another holder keeps the volume, unless no replica is left to serve.
    pub(super) async fn record_cut_unopened(
        &self,
        record: &VolumeRecord,
        cut: &[(usize, Cut, Checked)],
    ) {
        let mut next = record.clone();
        for (slot, cut, _) in cut {
            match next.replica_mut(*slot) {
                Some(replica) if matches!(replica.state, ReplicaState::Filling { .. }) => {
                    replica.fill_anew(cut.to_string());
                }
                Some(replica) if !replica.cut => {
                    replica.cut = true;
                    replica.why = Some(cut.to_string());
                }
                _ => {}
            }
        }
        let mine = record.holder.is_none_or(|holder| holder == self.holder);
        let is_cut = |replica: &ReplicaRecord| next.in_sync().any(|m| m.id == replica.id && m.cut);
        let all_cut = record.in_sync().all(is_cut);
        let stored = if next.replicas == record.replicas {
            // Unless the operator thawed the volume meanwhile, the record holds all of it.
            let found = self.store.load(self.context.id).await;
            found.is_ok_and(|found| found.version() == record.version())
        } else if mine || all_cut {
            next.revision += 1;
            let swapped = self.store.swap(record.version(), next).await;
            if let Err(error) = &swapped {
                // The next attempt to open it finds the same.
                tracing::warn!(
                    volume = record.name,
                    %error,
                    "cannot record that a replica was cut"
                );
            }
            swapped.is_ok()
        } else {
            false
        };
        if stored {
            cut.iter().for_each(|(_, _, checked)| checked.forget());
        }
    }
}

impl Failure {
    /// True if the failure means that the device ends before the requested blocks.
    pub(crate) fn is_beyond_end(self) -> bool {
        self == Self::Status(Status::OutOfRange)
    }
}
