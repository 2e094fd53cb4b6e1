//! Snapshots of volumes, as lists show them, and those of a daemon that is in no cluster.
//!
//! ```text
//!   create   record "making" ▸ writes held back ▸ a snapshot of each lvol ▸ writes go on ▸ "ready"
//!   delete   record "deleting" ▸ lvols ▸ record removed
//! ```
//!
//! The record in the journal names the lvols of the snapshot. If a start finds "making" or
//! "deleting", it deletes them: writes may have gone on between two of these.

use std::rc::Rc;
use std::time::Duration;

use futures_util::future::join_all;
use nacre_bdev::Bdev;
use nacre_bdev_pool::{Command as PoolCommand, PoolError};
use nacre_bdev_replica::handle::{Command, VolumeError, VolumeStatus};
use nacre_bdev_replica::model::ReplicaState;
use nacre_cluster_node::clock::seconds;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tracing::{info, warn};
use uuid::Uuid;

use super::OpenedVolume;
use super::lvols::PoolLvol;
use crate::journal;
use crate::refusal::OrRefuse;
use crate::rpc::RpcError;
use crate::rpc::error::Errno;
use crate::services::Engine;
use crate::services::pools::{self, OpenPool};
use crate::store::Change;

/// Longest time for which writes wait in the first attempt. Each further attempt doubles it, up to
/// [`MOST`].
const HOLD: Duration = Duration::from_millis(500);
const MOST: Duration = Duration::from_secs(4);
/// Most attempts. Hosts wait for 11.5 s in all, with pauses of the same lengths.
pub(in crate::services) const HOLDS: u32 = 5;
/// Time limit for pools to delete lvols.
const DELETED: Duration = Duration::from_secs(10);

/// Most snapshots of a daemon that is in no cluster.
const MAX_SNAPSHOTS: usize = 4096;
/// Most snapshots of one volume.
const MAX_OF_VOLUME: usize = 256;

/// The method of the journal's records.
pub const RECORD: &str = "volume_snapshot_record";

const PREFIX: &str = "volume/snapshots/";

/// A snapshot of a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VolumeSnapshot {
    pub id: Uuid,
    pub name: String,
    pub volume: Uuid,
    /// Size of the volume in bytes.
    pub bytes: u64,
    /// Unix time in seconds; `None`: the snapshot is not made yet.
    pub created: Option<u64>,
    pub state: VolumeSnapshotState,
    /// The reason of the state.
    pub why: Option<String>,
    /// Its lvols, one for each replica; while it is being deleted, those that are left.
    pub lvols: Vec<SnapshotLvol>,
}

/// An lvol of a snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotLvol {
    /// `None`: the daemon is in no cluster.
    pub node: Option<Uuid>,
    /// `None`: it is not made yet.
    pub pool: Option<Uuid>,
    pub lvol: Uuid,
    /// The reason why it is not available.
    pub why: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VolumeSnapshotState {
    Making,
    Ready,
    /// It was made, and the nodes or pools of all its lvols are away, or have lost them.
    Unavailable,
    Failed,
    Deleting,
}

impl VolumeSnapshot {
    /// Refuses a snapshot with which no volume can begin.
    pub fn must_be_ready(&self) -> Result<(), RpcError> {
        let state = match self.state {
            VolumeSnapshotState::Ready => return Ok(()),
            VolumeSnapshotState::Making => "is not made yet",
            VolumeSnapshotState::Failed => "was not made",
            VolumeSnapshotState::Deleting => "is being deleted",
            VolumeSnapshotState::Unavailable => "is not available",
        };
        let why = self.why.as_ref().map(|why| format!(": {why}"));
        let cause = format!(
            "snapshot \"{}\" {state}{}",
            self.name,
            why.unwrap_or_default()
        );
        Err(RpcError::errno(Errno::EAGAIN, cause).field("snapshot"))
    }

    /// The size of a volume that begins with this snapshot. `bytes`: the wanted size, if any.
    pub fn size_for(&self, bytes: Option<u64>) -> Result<u64, RpcError> {
        let bytes = bytes.unwrap_or(self.bytes);
        if bytes >= self.bytes {
            return Ok(bytes);
        }
        let least = self.bytes;
        let cause = format!("{bytes} bytes are less than the {least} of the snapshot");
        Err(RpcError::errno(Errno::EINVAL, cause).field("size"))
    }
}

/// A snapshot in the journal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SnapshotRecord {
    /// UUID of the snapshot.
    #[schemars(with = "String")]
    pub uuid: Uuid,
    /// Its name; others may have the same.
    pub name: String,
    /// UUID of the volume.
    #[schemars(with = "String")]
    pub volume: Uuid,
    /// Size of the volume in bytes.
    pub size_bytes: u64,
    /// Seconds since 1970.
    pub created_s: u64,
    pub state: RecordState,
    /// Its lvols, each with its pool.
    pub lvols: Vec<PoolLvol>,
}

/// The state of a snapshot, by which a start keeps or deletes its lvols.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RecordState {
    /// Their contents may differ: they are deleted.
    Making,
    /// They have the same contents.
    Ready,
    /// They are deleted.
    Deleting,
}

impl SnapshotRecord {
    fn key(&self) -> String {
        key(self.uuid)
    }

    fn put(&self) -> Change {
        Change::put(self.key(), RECORD, json!(self))
    }
}

fn key(id: Uuid) -> String {
    format!("{PREFIX}{id}")
}

/// Name of an lvol of the snapshot `id`.
pub(in crate::services) fn lvol_name(id: Uuid, lvol: Uuid) -> String {
    let part = &lvol.simple().to_string()[..8];
    format!("snapshot-{}-{part}", id.simple())
}

/// Longest time for which writes wait after so many attempts, and the pause after it.
pub(in crate::services) fn hold_time(attempts: u32) -> Duration {
    (HOLD * 2_u32.pow(attempts.min(8))).min(MOST)
}

fn records(engine: &Engine) -> Vec<SnapshotRecord> {
    let entries = engine.journal.below(PREFIX).into_iter();
    let read = entries.filter_map(|entry| serde_json::from_value(entry.record.params).ok());
    read.collect()
}

fn view(engine: &Engine, record: &SnapshotRecord) -> VolumeSnapshot {
    let mut lvols: Vec<_> = record.lvols.iter().map(|one| lvol(engine, one)).collect();
    if record.state == RecordState::Making {
        for lvol in &mut lvols {
            (lvol.pool, lvol.why) = (None, None);
        }
    }
    let absent = lvols.iter().find_map(|lvol| lvol.why.clone());
    let is_available = lvols.iter().any(|lvol| lvol.why.is_none());
    let (state, why) = match record.state {
        RecordState::Making => (VolumeSnapshotState::Making, None),
        RecordState::Ready if is_available => (VolumeSnapshotState::Ready, None),
        RecordState::Ready => (VolumeSnapshotState::Unavailable, absent),
        RecordState::Deleting => (VolumeSnapshotState::Deleting, absent),
    };
    VolumeSnapshot {
        id: record.uuid,
        name: record.name.clone(),
        volume: record.volume,
        bytes: record.size_bytes,
        created: (record.state != RecordState::Making).then_some(record.created_s),
        state,
        why,
        lvols,
    }
}

fn lvol(engine: &Engine, one: &PoolLvol) -> SnapshotLvol {
    let pool = engine.devices.pools.find(&one.pool.to_string());
    let why = match pool {
        Err(_) => Some(format!("pool {} is not open", one.pool)),
        Ok(pool) => {
            let found = pools::find_lvol(engine, "lvol", &one.lvol.to_string());
            let lost = || format!("pool \"{}\" does not have it any more", pool.name());
            found.is_err().then(lost)
        }
    };
    SnapshotLvol {
        node: None,
        pool: Some(one.pool),
        lvol: one.lvol,
        why,
    }
}

/// All snapshots, in the order in which they were made.
pub fn list(engine: &Engine) -> Vec<VolumeSnapshot> {
    let all = records(engine);
    all.iter().map(|record| view(engine, record)).collect()
}

/// The snapshot with this id, or with this name, if no other one has it.
pub fn find(engine: &Engine, text: &str) -> Result<VolumeSnapshot, RpcError> {
    one_of(list(engine), text)
}

/// The one of these with this id, or with this name, if no other one has it.
pub(in crate::services) fn one_of(
    mut all: Vec<VolumeSnapshot>,
    text: &str,
) -> Result<VolumeSnapshot, RpcError> {
    let id = Uuid::parse_str(text).ok();
    all.retain(|one| id.map_or(one.name == text, |id| one.id == id));
    match all.len() {
        0 => Err(absent(text)),
        1 => Ok(all.remove(0)),
        several => {
            let cause = format!("{several} snapshots have the name \"{text}\"");
            Err(RpcError::errno(Errno::EINVAL, cause)
                .field("snapshot")
                .remedy("use the UUID; volume_snapshot_list lists them"))
        }
    }
}

pub fn absent(text: &str) -> RpcError {
    let cause = format!("there is no snapshot \"{text}\" of a volume");
    RpcError::errno(Errno::ENODEV, cause)
        .field("snapshot")
        .remedy("volume_snapshot_list lists them")
}

/// Makes a snapshot of the volume with this id, or finds the one of an earlier call. It contains
/// every write that was acknowledged before the first call, and each of its lvols has the same
/// contents.
pub async fn create(
    engine: &Rc<Engine>,
    volume: Uuid,
    id: Uuid,
    name: &str,
) -> Result<VolumeSnapshot, RpcError> {
    let _one = engine.volumes.snapshots.lock().await;
    let all = records(engine);
    if let Some(record) = all.iter().find(|record| record.uuid == id) {
        return known(engine, record, volume);
    }
    must_have_room(&all, volume)?;
    let opened = engine.volumes.opened(&volume.to_string())?;
    let mut record = SnapshotRecord {
        uuid: id,
        name: name.to_owned(),
        volume,
        size_bytes: 0,
        created_s: 0,
        state: RecordState::Making,
        lvols: Vec::new(),
    };
    for attempts in 0..HOLDS {
        let made = attempt(engine, &opened, &mut record, hold_time(attempts)).await;
        match made {
            Ok(true) => return Ok(view(engine, &record)),
            Ok(false) => {}
            Err(error) => {
                drop_record(engine, &mut record).await?;
                return Err(error);
            }
        }
        drop_record(engine, &mut record).await?;
        if attempts + 1 < HOLDS {
            sleep(hold_time(attempts)).await;
        }
    }
    let cause = "its replicas are too slow: writes of hosts would wait too long";
    Err(RpcError::errno(Errno::EAGAIN, cause))
}

fn must_have_room(all: &[SnapshotRecord], volume: Uuid) -> Result<(), RpcError> {
    let of_volume = all.iter().filter(|record| record.volume == volume);
    let cause = if all.len() >= MAX_SNAPSHOTS {
        format!("there are {MAX_SNAPSHOTS} snapshots of volumes, the most of a daemon")
    } else if of_volume.count() >= MAX_OF_VOLUME {
        format!("the volume has {MAX_OF_VOLUME} snapshots, the most of a volume")
    } else {
        return Ok(());
    };
    Err(RpcError::errno(Errno::ENOSPC, cause).remedy("delete one"))
}

/// The snapshot of an earlier call.
fn known(
    engine: &Engine,
    record: &SnapshotRecord,
    volume: Uuid,
) -> Result<VolumeSnapshot, RpcError> {
    let id = record.uuid;
    if record.volume != volume {
        let cause = format!(
            "snapshot {id} exists, and is one of volume {}",
            record.volume
        );
        return Err(RpcError::errno(Errno::EEXIST, cause).field("uuid"));
    }
    if record.state == RecordState::Ready {
        return Ok(view(engine, record));
    }
    let cause = format!("snapshot {id} is being deleted");
    Err(RpcError::errno(Errno::EAGAIN, cause)
        .field("uuid")
        .remedy("see its pools in volume_snapshot_list, or use another uuid"))
}

/// The lvols of the replicas that are in sync and attached, with their pools.
fn sources(engine: &Engine, status: &VolumeStatus) -> Vec<(Rc<OpenPool>, Uuid)> {
    let replicas = status.replicas.iter();
    let in_sync = replicas.filter(|one| one.attached && one.state == ReplicaState::InSync);
    let on_pools = in_sync.filter_map(|one| pools::find_lvol(engine, "device", &one.device).ok());
    on_pools.map(|(pool, lvol)| (pool, lvol.uuid())).collect()
}

/// Takes a snapshot of each lvol while writes wait for at most `limit`. False: that was too short.
/// The record names what there may be after any result.
async fn attempt(
    engine: &Rc<Engine>,
    opened: &OpenedVolume,
    record: &mut SnapshotRecord,
    limit: Duration,
) -> Result<bool, RpcError> {
    let before = sources(engine, &opened.handle.status());
    if before.is_empty() {
        let cause = "no replica in sync is an lvol of a pool of this daemon";
        return Err(RpcError::errno(Errno::ENOTSUP, cause)
            .remedy("snapshots need replicas on pools: nacre volume create --pool"));
    }
    let lvol = |(pool, _): &(Rc<OpenPool>, Uuid)| PoolLvol {
        pool: pool.handle.id(),
        lvol: Uuid::new_v4(),
    };
    record.state = RecordState::Making;
    record.lvols = before.iter().map(lvol).collect();
    engine.journal.commit(record.put()).await?;
    let hold = Uuid::new_v4();
    let begun = opened.handle.run(Command::HoldWrites { id: hold, limit });
    match begun.await {
        Ok(_) => {}
        Err(VolumeError::NotHeld { .. }) => return Ok(false),
        Err(error) => return Err(error).or_refuse(),
    }
    let held = Instant::now();
    let status = opened.handle.status();
    record.size_bytes = status.blocks * u64::from(status.block_size);
    let now = sources(engine, &status);
    let are_same = now
        .iter()
        .map(|one| one.1)
        .eq(before.iter().map(|one| one.1));
    let cuts = before.iter().zip(&record.lvols);
    let cuts = cuts.map(|((pool, source), new)| {
        let name = lvol_name(record.uuid, new.lvol);
        pools::snapshot_lvol(pool, *source, (new.lvol, name))
    });
    let made = if are_same {
        timeout_at(held + limit, join_all(cuts)).await.ok()
    } else {
        None
    };
    let released = opened.handle.run(Command::ReleaseWrites { id: hold }).await;
    let held = held.elapsed();
    info!(id = %record.uuid, ?held, is_ok = released.is_ok(), "writes were held back for a snapshot");
    let Some(made) = made else { return Ok(false) };
    for one in made {
        one?;
    }
    if released.is_err() {
        return Ok(false);
    }
    for ((pool, _), new) in before.iter().zip(&record.lvols) {
        pools::register_new(engine, pool, new.lvol).await?;
    }
    record.state = RecordState::Ready;
    record.created_s = seconds();
    engine.journal.commit(record.put()).await?;
    Ok(true)
}

/// Deletes the lvols of a snapshot that is not ready, and the record. After a failure the record
/// stays, and is replayed when a pool is opened.
async fn drop_record(engine: &Rc<Engine>, record: &mut SnapshotRecord) -> Result<(), RpcError> {
    record.state = RecordState::Deleting;
    let dropped = timeout(DELETED, drop_lvols(engine, &record.lvols)).await;
    let late = || {
        let cause = format!(
            "snapshot {} is not deleted: a pool does not answer",
            record.uuid
        );
        Err(RpcError::errno(Errno::EAGAIN, cause)
            .remedy("delete it again; volume_snapshot_list shows it"))
    };
    let Err(error) = dropped.unwrap_or_else(|_| late()) else {
        return engine.journal.commit(Change::remove(record.key())).await;
    };
    engine.journal.commit(record.put()).await?;
    if !journal::is_replaying() {
        engine.journal.restored(&record.key(), Err(error.clone()));
    }
    Err(error)
}

/// Deletes lvols of a snapshot. Those of a pool that the daemon does not know any more are left.
async fn drop_lvols(engine: &Rc<Engine>, lvols: &[PoolLvol]) -> Result<(), RpcError> {
    let mut first = Ok(());
    for one in lvols {
        let dropped = drop_lvol(engine, *one).await;
        first = first.and(dropped);
    }
    first
}

async fn drop_lvol(engine: &Rc<Engine>, one: PoolLvol) -> Result<(), RpcError> {
    let PoolLvol { pool: id, lvol } = one;
    if let Ok((pool, found)) = pools::find_lvol(engine, "lvol", &lvol.to_string()) {
        return pools::delete(engine, &pool, found).await;
    }
    let Ok(pool) = engine.devices.pools.find(&id.to_string()) else {
        if engine.journal.find(&pools::key(id)).is_none() {
            warn!(%lvol, pool = %id, "not deleted with its snapshot: its pool was given up");
            return Ok(());
        }
        let cause = format!("pool {id} is not open, and may have lvol {lvol}");
        return Err(RpcError::errno(Errno::EAGAIN, cause)
            .remedy("attach its disks, or have the daemon forget it with pool_export"));
    };
    pool.cuts_have_ended().await;
    // The lvol may have no device, or was never made.
    match pool.handle.run(PoolCommand::Delete { lvol }).await {
        Ok(_) | Err(PoolError::Unknown { .. }) => Ok(()),
        Err(refused) => Err(refused).or_refuse(),
    }
}

/// Deletes a snapshot. Volumes that began with it keep their contents.
pub async fn delete(engine: &Rc<Engine>, id: Uuid) -> Result<(), RpcError> {
    let _one = engine.volumes.snapshots.lock().await;
    let mut all = records(engine).into_iter();
    let Some(mut record) = all.find(|record| record.uuid == id) else {
        return Ok(());
    };
    record.state = RecordState::Deleting;
    engine.journal.commit(record.put()).await?;
    drop_record(engine, &mut record).await
}

/// The record of the journal at a start.
pub async fn replay(engine: &Rc<Engine>, mut record: SnapshotRecord) -> Result<(), RpcError> {
    if record.state == RecordState::Ready {
        return Ok(());
    }
    let _one = engine.volumes.snapshots.lock().await;
    drop_record(engine, &mut record).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_attempts_hold_longer() {
        let times = [0, 1, 2, 3, 4, 99].map(|attempts| hold_time(attempts).as_millis());
        assert_eq!(times, [500, 1000, 2000, 4000, 4000, 4000]);
    }

    #[test]
    fn snapshots_are_bounded() {
        let of = |volume: u128| SnapshotRecord {
            uuid: Uuid::new_v4(),
            name: "s".into(),
            volume: Uuid::from_u128(volume),
            size_bytes: 1,
            created_s: 1,
            state: RecordState::Ready,
            lvols: Vec::new(),
        };
        let room = |all: &[SnapshotRecord], volume: u128| {
            must_have_room(all, Uuid::from_u128(volume)).is_ok()
        };
        let mut all = vec![of(1); MAX_OF_VOLUME - 1];
        assert!(room(&all, 1));
        all.push(of(1));
        assert!(!room(&all, 1) && room(&all, 2));
        all.resize(MAX_SNAPSHOTS, of(3));
        assert!(!room(&all, 2));
    }
}
