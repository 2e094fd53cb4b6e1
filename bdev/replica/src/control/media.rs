//! The control's own I/O to the replicas' devices (labels, log pages, copies), and the buffers for
//! it.
//!
//! Buffers for decisions (labels, pages of the log) are reserved: hosts' writes wait for a decision
//! with their buffers, so a decision that waited for a buffer would deadlock. Copying, comparing
//! and repairing hold stripes while they wait for a buffer, so they wait only briefly. Then they
//! release the stripes and retry later.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use nacre_bdev::{Bdev, Flags, Io, Op, Status};
use nacre_hugepages::{Buf, Pool};
use nacre_reactor::PollerId;

use super::MOMENT;
use super::context::Context;
use super::disk::{Disk, Disks};
use super::reasons::describe;
use super::reasons::unopened;
use super::state::Live;
use super::truncation::{Cut, must_fit};
use crate::format::{BLOCK, Label, LabelCopy, LabelError, label_offset, newest};
use crate::handle::{Devices, NoDevice, ReplicaDevice, VolumeError};
use crate::model::VolumeRecord;
use crate::mutation::Mutation;
use crate::shared::Failure;

/// Longest delay between two attempts of an I/O that lacked resources.
const LONGEST_PAUSE: Duration = Duration::from_millis(50);
/// How long a task that holds stripes waits for a buffer.
const PATIENCE: Duration = Duration::from_millis(100);
/// Delay before a task is retried that lacked a buffer.
pub(super) const SHORTAGE_OVER: Duration = Duration::from_secs(1);
/// How long a device that is not awaited any more may owe an answer.
pub(super) const UNAWAITED: Duration = Duration::from_millis(500);
/// Number of reserved blocks: a label and a page for each of five replicas, and the same number for
/// those that a hanging device has not returned.
const KEPT: usize = 20;

pub(super) struct Media {
    pub context: Rc<Context>,
    pub pool: Pool,
    pub reserve: Reserve,
    pub disks: Rc<Disks>,
    pub poller: Cell<Option<PollerId>>,
    pub devices: Arc<dyn Devices>,
}

#[derive(Default)]
pub(super) struct Reserve {
    kept: RefCell<Vec<Buf>>,
    /// The shortage of buffers was reported.
    warned: Cell<bool>,
}

impl Media {
    /// Acquires a block for a label or a page of the log. Refills the reserve while the pool has
    /// free blocks.
    pub(super) async fn block(&self) -> Buf {
        loop {
            if let Some(buf) = self.block_now() {
                return buf;
            }
            self.context.core.after(MOMENT).await;
        }
    }

    fn block_now(&self) -> Option<Buf> {
        let mut kept = self.reserve.kept.borrow_mut();
        while kept.len() < KEPT
            && let Some(buf) = self.pool.acquire(BLOCK)
        {
            kept.push(buf);
        }
        self.pool.acquire(BLOCK).or_else(|| kept.pop())
    }

    /// Returns an unneeded block.
    pub(super) fn keep(&self, buf: Option<Buf>) {
        let mut kept = self.reserve.kept.borrow_mut();
        if let Some(buf) = buf.filter(|buf| buf.is_unshared() && kept.len() < KEPT) {
            kept.push(buf);
        }
    }

    /// Acquires a buffer for a part of the volume. Waits only briefly, because the caller holds
    /// stripes.
    pub(super) async fn buffer(&self, len: usize) -> Result<Buf, Failure> {
        let patience = self.context.core.now() + PATIENCE;
        loop {
            if let Some(buf) = self.pool.acquire(len) {
                self.reserve.warned.set(false);
                return Ok(buf);
            }
            if self.context.core.now() >= patience {
                if !self.reserve.warned.replace(true) {
                    let volume = &self.context.state.borrow().record.name;
                    tracing::warn!(
                        volume,
                        len,
                        "no buffer is free: copies, comparisons and repairs of the volume wait"
                    );
                }
                return Err(Failure::Shortage);
            }
            self.context.core.after(MOMENT).await;
        }
    }

    /// Claims a device and checks its size.
    pub(super) async fn claim(
        &self,
        record: &VolumeRecord,
        name: &str,
    ) -> Result<(ReplicaDevice, Rc<Disk>), VolumeError> {
        let (device, disk) = self.claim_of_any_size(record, name)?;
        match must_fit(record, name, &device.layer) {
            Ok(()) => Ok((device, disk)),
            Err(error) => {
                self.disks.forget(&disk);
                Err(error)
            }
        }
    }

    /// Claims a device like [`Media::claim`], even if it may have become too small. Its label shows
    /// whether it is the replica.
    pub(super) fn claim_of_any_size(
        &self,
        record: &VolumeRecord,
        name: &str,
    ) -> Result<(ReplicaDevice, Rc<Disk>), VolumeError> {
        let device = self.devices.claim(name, &record.name)?;
        let refuse = |why: String| NoDevice {
            name: name.to_owned(),
            why,
        };
        let geometry = device.layer.geometry();
        if geometry.block_size != record.block_size {
            let why = format!(
                "it has blocks of {} bytes, the volume of {}",
                geometry.block_size, record.block_size
            );
            return Err(refuse(why).into());
        }
        let disk = self.disks.open(name, &device.layer, &self.pool);
        let disk = disk.map_err(|error| unopened(name, &error))?;
        Ok((device, disk))
    }

    /// Flushes replicas; reports failed ones to the failure handler.
    pub(super) async fn flush_all(&self, replicas: &[(usize, Rc<Live>)]) -> bool {
        let flushes = replicas.iter().map(|(slot, live)| async move {
            let outcome = self.flush(&live.disk).await;
            if let Err(why) = outcome {
                self.context.suspect(*slot, live.incarnation, why);
            }
            outcome.is_ok()
        });
        join_all(flushes).await.into_iter().all(|ok| ok)
    }

    /// Wipes labels that would only show that the device was a replica once.
    pub(super) async fn wipe_labels(&self, disk: &Disk) {
        if let Err(why) = self.erase_labels(disk).await {
            let (device, why) = (&disk.name, describe(why));
            tracing::warn!(device, why, "the label of a removed replica stays");
        }
    }

    /// Checks whether a remote device that reports enough blocks ends before the volume does: a
    /// target may announce more blocks than its device has.
    pub(super) async fn ends_early(&self, disk: &Disk, record: &VolumeRecord) -> Option<Cut> {
        let needed = record.needed_bytes();
        let read = self.read_block(disk, needed - BLOCK as u64).await;
        let ends = matches!(read, Err(why) if why.is_beyond_end());
        (ends && !Mutation::IgnoreSize.is_active()).then(|| Cut::unreadable(record))
    }

    /// How long to wait for an I/O of the control: the volume's deadline, or less if the device is
    /// known not to answer, or has been silent for too long.
    fn patience(&self, disk: &Disk) -> Duration {
        let deadline = self.context.deadline();
        if self.devices.is_awaited(&disk.device) && !disk.is_silent() {
            deadline
        } else {
            deadline.min(UNAWAITED)
        }
    }

    /// Executes one I/O at a byte offset of a device, within [`Media::patience`].
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
        // A shortage is temporary and no failure of the replica: retry for several deadlines.
        let patience = self.context.core.now() + self.context.deadline() * 4;
        let mut pause = MOMENT;
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
            let ended = self
                .context
                .core
                .timeout(self.patience(disk), disk.run(fresh))
                .await;
            match ended {
                Err(_) => return Err(Failure::Deadline),
                Ok((Status::Ok, mut data)) => return Ok(data.pop()),
                Ok((Status::Retry, data)) if self.context.core.now() < patience => {
                    io.data = data;
                    self.context.core.after(pause).await;
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

    /// Reads the newer label of a device.
    pub(super) async fn read_label(
        &self,
        disk: &Disk,
    ) -> Result<Result<(Label, LabelCopy), LabelError>, Failure> {
        let a = self.read_block(disk, label_offset(LabelCopy::A)).await?;
        let b = self.read_block(disk, label_offset(LabelCopy::B)).await?;
        Ok(newest(&a, &b))
    }

    /// Erases both labels, so that no earlier label of the device is valid.
    pub(super) async fn erase_labels(&self, disk: &Disk) -> Result<(), Failure> {
        for place in [LabelCopy::A, LabelCopy::B] {
            let at = label_offset(place);
            self.write_block(disk, at, Flags::FUA, &[0; BLOCK]).await?;
        }
        Ok(())
    }
}
