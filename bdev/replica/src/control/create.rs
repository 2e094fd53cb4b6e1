//! Creates and deletes volumes: checks the devices, writes labels and logs, and changes the store.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nacre_bdev::{Bdev, Flags, Io, Op, Status, Support};
use nacre_hugepages::Pool;
use nacre_reactor::CoreHandle;
use uuid::Uuid;

use super::disk::{Disk, Disks};
use super::fence;
use super::labels::label_of;
use super::reasons::{describe, unopened, words};
use super::truncation::must_fit;
use crate::format::{
    BLOCK, Label, LabelCopy, LabelError, LabelState, encode_page, label_offset, newest,
    page_offset, pages_for, region_shift_for,
};
use crate::handle::{Devices, NewVolume, ReplicaDevice, VolumeError};
use crate::model::{MAX_REPLICAS, RESERVED, ReplicaRecord, ReplicaState, Stamp, VolumeRecord};
use crate::shared::Failure;
use crate::store::{StoreError, VolumeStore};

/// The size of a volume is a multiple of this number of bytes.
const GRAIN: u64 = 1 << 20;
/// Bytes checked for existing data at the start of a device, where partition tables and file
/// systems begin, and at its end; further blocks are checked in between.
const HEAD: u64 = 2 << 20;
const TAIL: u64 = 1 << 20;
const BETWEEN: u64 = 64;
const MAX_NAME: usize = 255;
/// Time limit for a block or a reservation request of a device, and for a wait for a buffer.
const PATIENCE: Duration = Duration::from_secs(10);

/// Access to devices without an open volume.
pub(super) struct OfflineDisks {
    core: CoreHandle,
    pool: Pool,
    /// Time limit of a device for one block.
    patience: Duration,
    disks: Rc<Disks>,
    poller: nacre_reactor::PollerId,
}

/// A replica of a closed volume.
struct OfflineReplica {
    disk: Rc<Disk>,
    device: ReplicaDevice,
    label: Result<(Label, LabelCopy), LabelError>,
}

impl Drop for OfflineDisks {
    fn drop(&mut self) {
        self.disks.close();
        self.core.remove_poller(self.poller);
    }
}

impl OfflineDisks {
    pub(super) fn new(
        core: &CoreHandle,
        pool: Pool,
        patience: Duration,
    ) -> Result<Self, VolumeError> {
        let os = |what: String| VolumeError::Io {
            device: "the volume's control".into(),
            what,
        };
        let disks = Disks::new().map_err(|e| os(e.to_string()))?;
        let poller = core
            .add_poller(disks.poller())
            .map_err(|e| os(e.to_string()))?;
        Ok(Self {
            core: core.clone(),
            pool,
            patience,
            disks,
            poller,
        })
    }

    pub(super) fn open(&self, name: &str, device: &ReplicaDevice) -> Result<Rc<Disk>, VolumeError> {
        let open = self.disks.open(name, &device.layer, &self.pool);
        open.map_err(|error| unopened(name, &error))
    }

    async fn run(
        &self,
        disk: &Disk,
        what: &str,
        io: Io,
    ) -> Result<Option<nacre_hugepages::Buf>, VolumeError> {
        let (status, mut data) = disk.run(io).await;
        match status {
            Status::Ok => Ok(data.pop()),
            status if status.is_reservation_conflict() => Err(VolumeError::Reserved {
                device: disk.name.clone(),
            }),
            status => Err(VolumeError::Io {
                device: disk.name.clone(),
                what: format!("{what}: {}", words(status)),
            }),
        }
    }

    /// Reads or writes one block, within the time limit.
    async fn block(
        &self,
        disk: &Disk,
        what: &str,
        io: Io,
    ) -> Result<Option<nacre_hugepages::Buf>, VolumeError> {
        let limit = self.patience;
        let ended = self.core.timeout(limit, self.run(disk, what, io)).await;
        ended.unwrap_or_else(|_| {
            Err(VolumeError::Io {
                device: disk.name.clone(),
                what: format!("{what}: no completion within {limit:?}"),
            })
        })
    }

    async fn buffer(&self, disk: &Disk) -> Result<nacre_hugepages::Buf, VolumeError> {
        let patience = self.core.now() + PATIENCE;
        loop {
            if let Some(buf) = self.pool.acquire(BLOCK) {
                return Ok(buf);
            }
            if self.core.now() >= patience {
                return Err(VolumeError::Short {
                    device: disk.name.clone(),
                    what: format!("no buffer became free within {PATIENCE:?}"),
                });
            }
            self.core.after(super::MOMENT).await;
        }
    }

    pub(super) async fn read(
        &self,
        disk: &Disk,
        offset: u64,
    ) -> Result<nacre_hugepages::Buf, VolumeError> {
        let block = u64::from(disk.block_size);
        let buf = self.buffer(disk).await?;
        let io = Io::new(0, Op::Read, offset / block, (BLOCK as u64 / block) as u32).with(buf);
        let read = self.block(disk, "read", io).await?;
        read.ok_or_else(|| VolumeError::Io {
            device: disk.name.clone(),
            what: "a read without data".into(),
        })
    }

    pub(super) async fn write(
        &self,
        disk: &Disk,
        offset: u64,
        bytes: &[u8; BLOCK],
    ) -> Result<(), VolumeError> {
        let block = u64::from(disk.block_size);
        let mut buf = self.buffer(disk).await?;
        if let Some(to) = buf.bytes_mut() {
            to.copy_from_slice(bytes);
        }
        let io = Io::new(0, Op::Write, offset / block, (BLOCK as u64 / block) as u32);
        let io = io.with(buf).flags(Flags::FUA);
        self.block(disk, "write", io).await.map(drop)
    }

    /// Returns the newer label.
    async fn label(
        &self,
        disk: &Disk,
    ) -> Result<Result<(Label, LabelCopy), LabelError>, VolumeError> {
        let a = self.read(disk, label_offset(LabelCopy::A)).await?;
        let b = self.read(disk, label_offset(LabelCopy::B)).await?;
        Ok(newest(&a, &b))
    }

    /// Executes an irreversible operation on the replica of a closed volume. On a device with
    /// reservations, excludes a holder that has the volume open elsewhere, but not the next holder.
    async fn alone<T>(
        &self,
        replica: &OfflineReplica,
        record: &VolumeRecord,
        work: impl Future<Output = Result<T, VolumeError>>,
    ) -> Result<T, VolumeError> {
        if !replica.device.layer.reserves() {
            return work.await;
        }
        let disk = &replica.disk;
        let key = fence::key(record.id, record.epoch + 1, Uuid::nil());
        let reserved = fence::reserve(&self.core, disk, key, PATIENCE).await;
        reserved.map_err(|why| match why {
            Failure::Fenced | Failure::Reserved => VolumeError::Reserved {
                device: disk.name.clone(),
            },
            why => VolumeError::Io {
                device: disk.name.clone(),
                what: describe(why),
            },
        })?;
        let done = work.await;
        fence::release(&self.core, disk, key, PATIENCE).await;
        done
    }

    /// Finds the device of a closed volume's replica.
    async fn replica(
        &self,
        devices: &Arc<dyn Devices>,
        record: &VolumeRecord,
        name: &str,
    ) -> Result<OfflineReplica, VolumeError> {
        let device = devices.claim(name, &record.name)?;
        let disk = self.open(name, &device)?;
        let label = self.label(&disk).await?;
        Ok(OfflineReplica {
            disk,
            device,
            label,
        })
    }

    /// Clears both labels, so that no earlier label of the device is valid.
    pub(super) async fn wipe(&self, disk: &Disk) -> Result<(), VolumeError> {
        for place in [LabelCopy::A, LabelCopy::B] {
            self.write(disk, label_offset(place), &[0; BLOCK]).await?;
        }
        Ok(())
    }

    /// The size of the volume of which the device holds a copy of a replica that was in sync.
    async fn copied_bytes(&self, disk: &Disk) -> Result<u64, VolumeError> {
        let refused = |why: &str| VolumeError::Invalid {
            what: "snapshot",
            why: format!("\"{}\" {why}", disk.name),
        };
        let Ok((label, _)) = self.label(disk).await? else {
            return Err(refused("is no copy of a volume's replica: it has no label"));
        };
        let own = label.replicas.iter().find(|one| one.id == label.replica);
        if own.is_none_or(|own| own.state != LabelState::InSync) {
            return Err(refused("is a copy of a replica that was not in sync"));
        }
        if label.block_size != disk.block_size {
            return Err(refused("has other blocks than the copied replica"));
        }
        Ok(label.blocks.saturating_mul(u64::from(label.block_size)))
    }

    /// Refuses a device with contents: a label, or non-zero bytes in the checked parts.
    pub(super) async fn must_be_empty(&self, disk: &Disk, bytes: u64) -> Result<(), VolumeError> {
        let holds = |holds: String| VolumeError::InUse {
            device: disk.name.clone(),
            holds,
        };
        if let Ok((label, _)) = self.label(disk).await? {
            return Err(holds(format!(
                "is a replica of volume \"{}\" ({})",
                label.name, label.volume
            )));
        }
        let step = BLOCK as u64;
        let last = bytes / step * step;
        let head = (0..HEAD.min(last)).step_by(BLOCK);
        let tail = (last.saturating_sub(TAIL)..last).step_by(BLOCK);
        let between = (1..BETWEEN).map(|at| last / BETWEEN * at / step * step);
        for offset in head.chain(tail).chain(between) {
            let data = self.read(disk, offset).await?;
            if data.iter().any(|byte| *byte != 0) {
                return Err(holds(format!("holds data at byte {offset}")));
            }
        }
        Ok(())
    }

    /// Makes the whole device read as zeroes if that is cheap. Returns false if it is not.
    async fn discard(&self, disk: &Disk, layer: &nacre_bdev::Layer) -> Result<bool, VolumeError> {
        /// Most blocks of one unmap.
        const MOST: u64 = 1 << 21;
        /// Most commands for the whole device: more would delay other users of the volume.
        const COMMANDS: u64 = 1 << 18;
        let limits = layer.limits();
        let native = |op| layer.supports(op) == Support::Native;
        let (op, flags) = match () {
            () if limits.unmap_zeroes && native(Op::Unmap) => (Op::Unmap, Flags::empty()),
            () if limits.zeroes_deallocate && native(Op::WriteZeroes) => {
                (Op::WriteZeroes, Flags::DEALLOCATE)
            }
            () => return Ok(false),
        };
        let blocks = layer.geometry().blocks;
        if blocks / layer.module().limits().max_unmap_blocks.max(1) > COMMANDS {
            return Ok(false);
        }
        let mut at = 0;
        while at < blocks {
            let count = MOST.min(blocks - at);
            let io = Io::new(0, op, at, count as u32).flags(flags);
            self.run(disk, "unmap", io).await?;
            at += count;
        }
        let flush = Io::new(0, Op::Flush, 0, 0);
        self.run(disk, "flush", flush).await?;
        Ok(true)
    }

    /// Writes the labels and the empty log of a new replica.
    pub(super) async fn format(
        &self,
        disk: &Disk,
        record: &VolumeRecord,
        slot: usize,
        clean: bool,
    ) -> Result<(), VolumeError> {
        self.wipe(disk).await?;
        let mut bytes = [0; BLOCK];
        for page in 0..pages_for(record.regions()) {
            let (id, epoch, regions) = (record.id, record.epoch, record.regions());
            encode_page(id, page, epoch, regions, |_| false, &mut bytes);
            self.write(disk, page_offset(page), &bytes).await?;
        }
        if let Some(label) = label_of(record, slot, 1, clean) {
            label.encode(&mut bytes);
            self.write(disk, label_offset(LabelCopy::A), &bytes).await?;
        }
        Ok(())
    }
}

/// Present size of a device in bytes, whatever size was announced.
fn layer_bytes(layer: &nacre_bdev::Layer) -> u64 {
    layer.present_blocks() * u64::from(layer.geometry().block_size)
}

pub(super) fn check_name(name: &str) -> Result<(), VolumeError> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "-_.:".contains(c);
    let good = !name.is_empty() && name.len() <= MAX_NAME && name.chars().all(allowed);
    if good {
        Ok(())
    } else {
        Err(VolumeError::Invalid {
            what: "name",
            why: format!("\"{name}\" is not 1 to {MAX_NAME} letters, digits, '-', '_', '.' or ':'"),
        })
    }
}

/// Creates a volume on devices and adds it to the store; does not open it. If every device can
/// deallocate its contents cheaply, all replicas are in sync immediately. Otherwise only the first
/// is, or each that is a copy, and the others are filled from those once the volume is open.
pub async fn create(
    core: &CoreHandle,
    pool: Pool,
    store: Arc<dyn VolumeStore>,
    devices: Arc<dyn Devices>,
    new: NewVolume,
) -> Result<Uuid, VolumeError> {
    let kept = new.copied_from.as_ref().map(|from| from.devices);
    if kept == Some(0) {
        return Err(VolumeError::Invalid {
            what: "devices",
            why: "none of them is a copy".into(),
        });
    }
    let kept = kept.unwrap_or(0);
    let is_kept = |slot: usize| slot < kept;
    let invalid = |what, why: String| VolumeError::Invalid { what, why };
    check_name(&new.name)?;
    let count = new.devices.len();
    if !(1..=MAX_REPLICAS).contains(&count) {
        let why = format!("a volume has 1 to {MAX_REPLICAS} replicas, not {count}");
        return Err(invalid("devices", why));
    }
    new.settings.check(count)?;
    if store
        .list()
        .await?
        .iter()
        .any(|known| known.name == new.name)
    {
        return Err(StoreError::Exists { name: new.name }.into());
    }
    let offline = OfflineDisks::new(core, pool, PATIENCE)?;
    let mut replicas = Vec::new();
    for name in &new.devices {
        let device = devices.claim(name, &new.name)?;
        let disk = offline.open(name, &device)?;
        replicas.push((device, disk));
    }
    let block_size = replicas[0].1.block_size;
    let mut bytes = u64::MAX;
    for (device, disk) in &replicas {
        let geometry = device.layer.geometry();
        if geometry.block_size != block_size || geometry.block_size as usize > BLOCK {
            let why = format!(
                "\"{}\" has blocks of {} bytes, \"{}\" of {block_size} (at most {BLOCK} are supported)",
                disk.name, geometry.block_size, replicas[0].1.name
            );
            return Err(invalid("devices", why));
        }
        let has = layer_bytes(&device.layer);
        if has < RESERVED + GRAIN {
            let (name, least) = (&disk.name, RESERVED + GRAIN);
            let why = format!("\"{name}\" has {has} bytes, and a replica needs at least {least}");
            return Err(invalid("devices", why));
        }
        bytes = bytes.min((has - RESERVED) / GRAIN * GRAIN);
    }
    for (slot, (device, disk)) in replicas.iter().enumerate() {
        if !new.force && !is_kept(slot) {
            offline
                .must_be_empty(disk, layer_bytes(&device.layer))
                .await?;
        }
    }
    let mut wanted = new.bytes;
    let mut equal = kept;
    for (_, disk) in replicas.iter().take(kept) {
        let copied = offline.copied_bytes(disk).await?;
        let given = *wanted.get_or_insert(copied);
        if given < copied {
            let why = format!("{given} bytes are less than the {copied} that are copied");
            return Err(invalid("size", why));
        }
        if given > copied {
            // The devices may differ behind the copied bytes.
            equal = 1;
        }
    }
    let is_kept = |slot: usize| slot < equal;
    if let Some(wanted) = wanted {
        if wanted == 0 || wanted > bytes || wanted % u64::from(block_size) != 0 {
            let why = format!(
                "{wanted} bytes are not a whole number of blocks up to the {bytes} that the devices have"
            );
            return Err(invalid("size", why));
        }
        bytes = wanted;
    }
    let mut cheap = true;
    for (slot, (device, disk)) in replicas.iter().enumerate() {
        if is_kept(slot) {
            cheap = false;
            continue;
        }
        // Discards the record of earlier sizes: the earlier contents are not needed.
        device.layer.forget_least();
        cheap = offline.discard(disk, &device.layer).await? && cheap;
    }
    let state = |slot: usize| {
        if cheap || slot == 0 || is_kept(slot) {
            ReplicaState::InSync
        } else {
            ReplicaState::Filling {
                watermark: 0,
                last_label: Stamp::default(),
            }
        }
    };
    let replica = |(slot, device): (usize, &String)| ReplicaRecord {
        id: Uuid::new_v4(),
        slot: slot as u8,
        device: device.clone(),
        node: None,
        node_device: None,
        state: state(slot),
        offline: false,
        cut: false,
        replaces: None,
        why: None,
    };
    let record = VolumeRecord {
        id: new.id.unwrap_or_else(Uuid::new_v4),
        name: new.name,
        block_size,
        blocks: bytes / u64::from(block_size),
        region_shift: region_shift_for(bytes),
        epoch: 0,
        serving: 0,
        revision: 1,
        holder: None,
        replicas: new.devices.iter().enumerate().map(replica).collect(),
        settings: new.settings,
        limits: None,
        restored: None,
        origin: new.copied_from.map(|from| from.origin),
    };
    for (slot, (device, disk)) in replicas.iter().enumerate() {
        offline.format(disk, &record, slot, true).await?;
        must_fit(&record, &disk.name, &device.layer)?;
    }
    let id = record.id;
    store.create(record).await?;
    Ok(id)
}

/// Deletes a closed volume: its record goes first, then the labels of the present replicas. Their
/// copies of the volume's data stay unchanged.
pub async fn delete(
    core: &CoreHandle,
    pool: Pool,
    store: Arc<dyn VolumeStore>,
    devices: Arc<dyn Devices>,
    id: Uuid,
) -> Result<(), VolumeError> {
    let record = store.load(id).await?;
    let offline = OfflineDisks::new(core, pool, PATIENCE)?;
    store.delete(id, record.version()).await?;
    let left = RefCell::new(Vec::new());
    for replica in &record.replicas {
        let wipe = async {
            let found = offline.replica(&devices, &record, &replica.device).await?;
            match &found.label {
                Ok((label, _)) if label.volume == id => {
                    let wiped = offline.wipe(&found.disk);
                    offline.alone(&found, &record, wiped).await
                }
                _ => Ok(()),
            }
        };
        if let Err(error) = wipe.await {
            left.borrow_mut().push(error.to_string());
        }
    }
    for why in left.into_inner() {
        tracing::warn!(volume = record.name, why, "the label of a replica stays");
    }
    Ok(())
}

/// Declares a replica of a closed volume in sync, whatever writes it missed: for volumes whose
/// better replicas are lost. The others are filled from it when the volume is open. `force` is the
/// volume's name, typed by the operator.
///
/// `seen` is the record's version when the volume was found closed, with no replica to open it
/// from. The call is refused if the version has changed: a later holder may have acknowledged
/// writes that `replica` lacks.
#[allow(clippy::too_many_arguments)]
pub async fn force_in_sync(
    core: &CoreHandle,
    pool: Pool,
    store: Arc<dyn VolumeStore>,
    devices: Arc<dyn Devices>,
    id: Uuid,
    seen: Stamp,
    replica: &str,
    force: &str,
) -> Result<(), VolumeError> {
    let record = store.load(id).await?;
    let version = record.version();
    if version != seen {
        return Err(StoreError::Conflict {
            id,
            expected: seen,
            found: version,
        }
        .into());
    }
    let named = |m: &&ReplicaRecord| m.device == replica || m.id.to_string() == replica;
    let Some(chosen) = record.replicas.iter().find(named).cloned() else {
        return Err(VolumeError::NoReplica {
            name: record.name,
            replica: replica.to_owned(),
        });
    };
    if force != record.name {
        return Err(VolumeError::LastCopy {
            name: record.name,
            hint: ": writes that the replica missed would be lost; type the volume's name to \
                confirm",
        });
    }
    let invalid = |why: &str| VolumeError::Invalid {
        what: "replica",
        why: why.into(),
    };
    if matches!(chosen.state, ReplicaState::Filling { .. }) {
        return Err(invalid("it was never in sync: its data is incomplete"));
    }
    let offline = OfflineDisks::new(core, pool, PATIENCE)?;
    let found = offline.replica(&devices, &record, &chosen.device).await?;
    let layer = Arc::clone(&found.device.layer);
    must_fit(&record, &chosen.device, &layer)?;
    let label = found.label.clone();
    let label = label.map_err(|error| invalid(&error.to_string()))?;
    if (label.0.volume, label.0.replica) != (record.id, chosen.id) {
        return Err(invalid("its label is another replica's"));
    }
    let mut next = record.clone();
    next.revision += 1;
    if record.restored.is_some() {
        if super::restored::state(&label.0, chosen.id) == Some(LabelState::Filling) {
            return Err(invalid("it was being filled: its data is incomplete"));
        }
        // The operator decides, and not the other labels, whose epochs may be later.
        next.restored = None;
        next.epoch = next.epoch.max(label.0.stamp.epoch) + super::restored::EPOCHS;
        next.blocks = next.blocks.max(label.0.blocks);
    }
    // Accept its present label, by changing only the store. A new label could reach the device long
    // after another decision, and would then hide a later holder.
    next.serving = next.serving.min(label.0.stamp.epoch);
    for replica in &mut next.replicas {
        let is_it = replica.id == chosen.id;
        replica.state = if is_it {
            ReplicaState::InSync
        } else {
            ReplicaState::Filling {
                watermark: 0,
                last_label: Stamp::default(),
            }
        };
        replica.offline &= !is_it;
        replica.cut = false;
        replica.why = (!is_it).then(|| format!("the operator chose {}", chosen.device));
    }
    let decided = async {
        store.swap(seen, next).await?;
        // The operator has accepted the loss of data.
        layer.forget_least();
        Ok(())
    };
    offline.alone(&found, &record, decided).await
}
