//! Members whose devices have, or had, fewer blocks than the volume needs.
//!
//! A device that is cut and made large again reads as zeroes where there was data, and the label at
//! its start is as it was. So devices count the fewest blocks that they had
//! ([`Bdev::least_blocks`]), until this control starts to fill the member from the start.
//!
//! | the member is | then |
//! |---|---|
//! | in sync or out, another in sync is there | filled from the start, durably, before any answer |
//! | in sync or out, none is there | marked `cut`, durably: not served from until it is thawed |
//! | being filled | filled from the start, durably |
//!
//! A device that does not carry the member's label is none of its business, however small it is.

use std::fmt;

use nacre_bdev::{Bdev, Layer, Status};

use super::Control;
use super::disk::Disk;
use super::state::Live;
use crate::format::BLOCK;
use crate::handle::{Happened, VolumeError};
use crate::model::{MemberRecord, MemberState, RESERVED, Stamp, VolumeRecord};
use crate::mutation::Mutation;
use crate::shared::Failure;

/// In bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Cut {
    /// The fewest that the device had; `None`: it says that it has enough, and its end cannot be
    /// read.
    pub least: Option<u64>,
    pub needed: u64,
}

impl fmt::Display for Cut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let needed = self.needed;
        match self.least {
            Some(least) => write!(
                f,
                "its device had {least} bytes, and the volume needs {needed}"
            ),
            None => write!(f, "its device ends before the {needed} bytes of the volume"),
        }
    }
}

impl Cut {
    /// Whether a device has, or had, fewer blocks than the volume needs.
    pub fn of(record: &VolumeRecord, layer: &Layer) -> Option<Cut> {
        Cut::of_least(record, layer.least_blocks())
    }

    /// The same of one that had so many blocks at least.
    pub fn of_least(record: &VolumeRecord, blocks: u64) -> Option<Cut> {
        let least = blocks * u64::from(record.block_size);
        let needed = record.needed_bytes();
        let is_cut = least < needed && !Mutation::IgnoreSize.is_active();
        is_cut.then_some(Cut {
            least: Some(least),
            needed,
        })
    }

    /// The same of a member whose I/O failed. A lane asks for nothing beyond the volume's end.
    pub fn of_failed(record: &VolumeRecord, live: &Live, why: Failure) -> Option<Cut> {
        let ends = why.is_beyond_end() && !Mutation::IgnoreSize.is_active();
        Cut::of(record, &live.device.layer).or(ends.then_some(Cut {
            least: None,
            needed: record.needed_bytes(),
        }))
    }
}

impl VolumeRecord {
    /// Bytes that a member's device needs.
    pub(super) fn needed_bytes(&self) -> u64 {
        RESERVED + self.blocks * u64::from(self.block_size)
    }
}

impl MemberRecord {
    /// None of its contents count from now on.
    pub(super) fn fill_anew(&mut self, why: String) {
        self.state = MemberState::Filling {
            watermark: 0,
            last_label: Stamp::default(),
        };
        self.cut = false;
        self.why = Some(why);
    }

    /// True if none of its contents count already.
    pub(super) fn is_empty(&self) -> bool {
        matches!(self.state, MemberState::Filling { watermark: 0, .. })
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
    match has < needed && !Mutation::IgnoreSize.is_active() {
        true => Err(VolumeError::TooSmall {
            device: name.to_owned(),
            has,
            needed,
        }),
        false => Ok(()),
    }
}

impl Control {
    /// Checks whether a remote device that reports enough blocks ends before the volume does: a
    /// target may announce more than the device behind it has.
    pub(super) async fn ends_early(&self, disk: &Disk, record: &VolumeRecord) -> Option<Cut> {
        let needed = record.needed_bytes();
        let read = self.read_block(disk, needed - BLOCK as u64).await;
        let ends = matches!(read, Err(why) if why.is_beyond_end());
        (ends && !Mutation::IgnoreSize.is_active()).then_some(Cut {
            least: None,
            needed,
        })
    }

    /// Records, under `membership`, that a member that is not used was cut. An error: there is none
    /// to fill it from, or the volume is another holder's.
    pub(super) async fn record_cut(&self, slot: usize, cut: Cut) -> Result<(), VolumeError> {
        let Some(member) = self.state.borrow().record.member(slot).cloned() else {
            return Ok(());
        };
        if member.is_empty() && !member.cut {
            return Ok(());
        }
        let why = cut.to_string();
        let is_partial = matches!(member.state, MemberState::Filling { .. });
        if !is_partial && self.state.borrow().in_sync().next().is_none() {
            self.mark_cut(slot, cut).await?;
            return Err(VolumeError::Cut {
                name: self.name(),
                device: member.device,
                what: why,
            });
        }
        self.commit(|record| {
            if let Some(member) = record.member_mut(slot) {
                member.fill_anew(why.clone());
            }
        })
        .await?;
        self.say(Happened::MemberOut {
            member: member.id,
            device: member.device,
            why,
        });
        Ok(())
    }

    /// A member that lanes know no more was cut, and there is none to fill it from.
    pub(super) async fn mark_cut(&self, slot: usize, cut: Cut) -> Result<(), VolumeError> {
        let marked = self
            .state
            .borrow()
            .record
            .member(slot)
            .is_some_and(|m| m.cut);
        if marked {
            return Ok(());
        }
        self.commit(|record| {
            if let Some(member) = record.member_mut(slot) {
                member.cut = true;
                member.why = Some(cut.to_string());
            }
        })
        .await
    }

    /// Records the cut replicas of a volume that cannot be opened. That fences a holder that has it
    /// open. So another holder keeps the volume, unless no replica is left to serve.
    pub(super) async fn record_cut_unopened(&self, record: &VolumeRecord, cut: &[(usize, Cut)]) {
        let mut next = record.clone();
        for (slot, cut) in cut {
            match next.member_mut(*slot) {
                Some(member) if matches!(member.state, MemberState::Filling { .. }) => {
                    member.fill_anew(cut.to_string());
                }
                Some(member) if !member.cut => {
                    member.cut = true;
                    member.why = Some(cut.to_string());
                }
                _ => {}
            }
        }
        let mine = record.holder.is_none_or(|holder| holder == self.holder);
        let is_cut = |member: &MemberRecord| next.in_sync().any(|m| m.id == member.id && m.cut);
        let all_cut = record.in_sync().all(is_cut);
        if next.members == record.members || !(mine || all_cut) {
            return;
        }
        next.revision += 1;
        if let Err(error) = self.store.swap(record.version(), next).await {
            // The next attempt to open it finds the same.
            tracing::warn!(volume = record.name, %error, "cannot record that a replica was cut");
        }
    }
}

impl Failure {
    /// The device ends before the blocks that were asked for.
    pub(crate) fn is_beyond_end(self) -> bool {
        self == Failure::Status(Status::OutOfRange)
    }
}
