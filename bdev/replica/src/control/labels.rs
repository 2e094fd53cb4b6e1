//! The reserved areas of members: labels, and reading and writing in blocks of 4 KiB.

use std::rc::Rc;
use std::time::Duration;

use nacre_bdev::{Flags, Io, Op, Status};
use nacre_hugepages::Buf;

use super::Control;
use super::disk::Disk;
use super::state::Live;
use crate::format::{
    BLOCK, Label, LabelError, LabelMember, Place, label_offset, newest, next_place,
};
use crate::model::{Stamp, VolumeRecord};
use crate::shared::Failure;

/// Between two attempts of an I/O that found the device short of something.
const LONGEST_PAUSE: Duration = Duration::from_millis(50);

impl Control {
    /// One I/O at a byte of a device, within the volume's deadline.
    pub(super) async fn io(
        &self,
        disk: &Disk,
        op: Op,
        flags: Flags,
        offset: u64,
        bytes: u64,
        data: Option<Buf>,
    ) -> Result<Option<Buf>, Failure> {
        let block = u64::from(disk.block_size);
        let mut io = Io::new(0, op, offset / block, (bytes / block) as u32).flags(flags);
        io.data.extend(data);
        // A shortage passes, and is no reason to give a replica up: retry for much longer than its
        // deadline.
        let patience = self.core.now() + self.deadline() * 4;
        let mut pause = super::MOMENT;
        loop {
            let fresh = Io {
                token: 0,
                op,
                flags,
                lba: io.lba,
                blocks: io.blocks,
                source_lba: 0,
                data: std::mem::take(&mut io.data),
            };
            let ended = self.core.timeout(self.deadline(), disk.run(fresh)).await;
            match ended {
                Err(_) => return Err(Failure::Deadline),
                Ok((Status::Ok, mut data)) => return Ok(data.pop()),
                Ok((Status::Retry, data)) if self.core.now() < patience => {
                    io.data = data;
                    self.core.after(pause).await;
                    pause = (pause * 2).min(LONGEST_PAUSE);
                }
                Ok((status, _)) => return Err(Failure::Status(status)),
            }
        }
    }

    pub(super) async fn read_block(&self, disk: &Disk, offset: u64) -> Result<Buf, Failure> {
        let buf = self.block().await;
        let read = self.io(
            disk,
            Op::Read,
            Flags::empty(),
            offset,
            BLOCK as u64,
            Some(buf),
        );
        read.await?.ok_or(Failure::Status(Status::DeviceError))
    }

    pub(super) async fn write_block(
        &self,
        disk: &Disk,
        offset: u64,
        flags: Flags,
        bytes: &[u8; BLOCK],
    ) -> Result<(), Failure> {
        let mut buf = self.block().await;
        if let Some(to) = buf.bytes_mut() {
            to.copy_from_slice(bytes);
        }
        let written = self.io(disk, Op::Write, flags, offset, BLOCK as u64, Some(buf));
        self.keep(written.await?);
        Ok(())
    }

    pub(super) async fn flush(&self, disk: &Disk) -> Result<(), Failure> {
        let flushed = self.io(disk, Op::Flush, Flags::empty(), 0, 0, None);
        flushed.await.map(drop)
    }

    /// The label that counts on a device.
    pub(super) async fn read_label(
        &self,
        disk: &Disk,
    ) -> Result<Result<(Label, Place), LabelError>, Failure> {
        let a = self.read_block(disk, label_offset(Place::A)).await?;
        let b = self.read_block(disk, label_offset(Place::B)).await?;
        Ok(newest(&a, &b))
    }

    /// Both, so that no earlier label of the device counts.
    pub(super) async fn erase_labels(&self, disk: &Disk) -> Result<(), Failure> {
        for place in [Place::A, Place::B] {
            let at = label_offset(place);
            self.write_block(disk, at, Flags::FUA, &[0; BLOCK]).await?;
        }
        Ok(())
    }

    /// Writes the label of the member in `slot` as `record` says, over the older one of its two.
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
        // One that does not take part yet was looked at just now, and may well have been another.
        if live.joined.get() && Control::is_by_label(live) {
            self.is_still_ours(slot, &live.disk, record).await?;
        }
        let mut bytes = [0; BLOCK];
        label.encode(&mut bytes);
        let place = next_place(live.place.get());
        self.write_block(&live.disk, label_offset(place), Flags::FUA, &bytes)
            .await?;
        live.place.set(place);
        live.sequence.set(label.sequence);
        live.stamp.set(label.stamp);
        live.looked.set(self.core.now());
        self.bells.fence.notify_one();
        Ok(())
    }
}

/// The contents of a replica's label, as of `record`. `None`: there is no such replica.
pub(super) fn label_of(
    record: &VolumeRecord,
    slot: usize,
    sequence: u64,
    clean: bool,
) -> Option<Label> {
    let own = record.member(slot)?;
    let members = record.members.iter().map(|member| LabelMember {
        slot: member.slot,
        id: member.id,
        state: member.state.into(),
    });
    Some(Label {
        volume: record.id,
        name: record.name.clone(),
        member: own.id,
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
        members: members.collect(),
    })
}
