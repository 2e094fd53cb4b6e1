//! Writes and checks the labels of the replicas.

use std::rc::Rc;
use std::time::Duration;

use nacre_bdev::Flags;

use super::disk::Disk;
use super::fence::WATCH;
use super::membership::Membership;
use super::state::Live;
use crate::format::{BLOCK, Label, LabelError, LabelReplica, label_offset, next_copy};
use crate::model::{Stamp, VolumeRecord};
use crate::shared::Failure;

impl Membership {
    /// Writes the label of the replica in `slot` according to `record`, over the older of its two
    /// labels.
    pub(super) async fn write_label(
        &self,
        slot: usize,
        live: &Rc<Live>,
        record: &VolumeRecord,
        clean: bool,
    ) -> Result<(), Failure> {
        let Some(label) = label_of(record, slot, live.sequence.get() + 1, clean) else {
            return Ok(());
        };
        self.keep_others_out(live, record).await?;
        // A replica that has not joined yet was checked just now, and may well have been another
        // one.
        if live.joined.get() && live.is_by_label() {
            self.is_still_ours(slot, &live.disk, record).await?;
        }
        let mut bytes = [0; BLOCK];
        label.encode(&mut bytes);
        let place = next_copy(live.place.get());
        self.media
            .write_block(&live.disk, label_offset(place), Flags::FUA, &bytes)
            .await?;
        live.place.set(place);
        live.sequence.set(label.sequence);
        live.stamp.set(label.stamp);
        live.looked.set(self.context.core.now());
        self.context.signals.fence.notify_one();
        Ok(())
    }

    /// How long a new holder waits if the previous one learns of it only by a label: until that one
    /// has polled the label.
    pub(super) fn until_seen(&self) -> Duration {
        self.context.deadline() + WATCH * 2
    }

    /// Fails if a replica's label has a later epoch ([`Failure::Fenced`]), or belongs to another
    /// replica ([`Failure::OtherReplica`]). An invalid label proves nothing: it may be about to be
    /// written.
    pub(super) async fn is_still_ours(
        &self,
        slot: usize,
        disk: &Disk,
        record: &VolumeRecord,
    ) -> Result<(), Failure> {
        let Some(replica) = record.replica(slot).map(|replica| replica.id) else {
            return Ok(());
        };
        let (volume, found, epoch) = match self.media.read_label(disk).await? {
            Ok((label, _)) => (label.volume, label.replica, label.stamp.epoch),
            Err(LabelError::TwoOwners) => return Err(Failure::OtherReplica),
            Err(_) => return Ok(()),
        };
        if (volume, found) != (record.id, replica) {
            let device = &disk.name;
            tracing::warn!(device, %volume, "a replica has become another one");
            return Err(Failure::OtherReplica);
        }
        if epoch > record.epoch {
            let (device, own) = (&disk.name, record.epoch);
            tracing::warn!(
                device,
                epoch,
                own,
                "the label of a replica belongs to a newer owner"
            );
            Err(Failure::Fenced)
        } else {
            Ok(())
        }
    }
}

/// The contents of a replica's label according to `record`. `None`: the record has no such replica.
pub(super) fn label_of(
    record: &VolumeRecord,
    slot: usize,
    sequence: u64,
    clean: bool,
) -> Option<Label> {
    let own = record.replica(slot)?;
    let replicas = record.replicas.iter().map(|replica| LabelReplica {
        slot: replica.slot,
        id: replica.id,
        state: replica.state.into(),
    });
    Some(Label {
        volume: record.id,
        name: record.name.clone(),
        replica: own.id,
        slot: own.slot,
        stamp: Stamp {
            epoch: record.epoch,
            revision: record.revision,
        },
        sequence,
        clean,
        block_size: record.block_size,
        blocks: record.blocks,
        region_shift: record.region_shift,
        replicas: replicas.collect(),
    })
}
