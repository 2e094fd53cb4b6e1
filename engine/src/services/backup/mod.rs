//! Backups of snapshots of pools. Each job runs on a thread of its own.
//!
//! ```text
//!   management   starts a job ▸ a thread ▸ its result: an event, and the job's last state
//!   thread       backup store ◂ compression ◂ data of the snapshot (reversed for a restore)
//!   a reactor    reads and writes the bdev
//! ```
//!
//! Jobs are not stored: after a restart, an unfinished backup does not exist. `nacre-engine-backup`
//! has the format, and the order of writes that ensures this.

pub mod device;
mod jobs;
mod restore;
mod work;

use std::rc::Rc;
use std::time::SystemTime;

use nacre_bdev::Holder;
use nacre_bdev::registry::Usage;
use nacre_bdev_pool::{Lvol, LvolInfo};
use nacre_engine_backup::{Failure, Header, Listed, Request, Volume};
use uuid::Uuid;

use self::device::ClaimedDevice;
use crate::refusal::Refusal;
use crate::rpc::RpcError;
use crate::rpc::error::Errno;
use crate::services::Engine;
use crate::services::pools::{OpenPool, alias, least_loaded};

pub use jobs::{Backups, Ended, Job, JobState, Operation};
pub use restore::{RestoreRequest, restore};
pub use work::BackupPlace;

impl Refusal for Failure {
    fn refusal(self) -> RpcError {
        let errno = match &self {
            Self::Location(_) | Self::Credentials(_) => Errno::EINVAL,
            Self::Unknown(_) | Self::Gone(_) => Errno::ENOENT,
            Self::Late { .. } => Errno::ETIMEDOUT,
            Self::TooMany { .. } | Self::TooLarge { .. } => Errno::EFBIG,
            Self::Store { .. }
            | Self::Damaged { .. }
            | Self::Source(_)
            | Self::Target(_)
            | Self::Cancelled => Errno::EIO,
        };
        let refused = RpcError::errno(errno, self.to_string());
        match self {
            Self::Location(_) => refused.field("store"),
            Self::Credentials(_) => refused
                .field("store.credentials_file")
                .remedy("name a file in the format of ~/.aws/credentials with mode 0600"),
            Self::Unknown(_) => refused.field("backup").remedy("backup_list lists them"),
            _ => refused,
        }
    }
}

/// Lists the backups in a place; `volume`: only those of this volume.
pub async fn list(place: BackupPlace, volume: Option<Uuid>) -> Result<Listed, RpcError> {
    let listed = work::on_thread("backup-list".into(), place, move |store| async move {
        store.list(volume).await
    });
    listed.await.map_err(Refusal::refusal)
}

/// Begins a backup of a snapshot.
pub async fn create(
    engine: &Rc<Engine>,
    place: BackupPlace,
    (pool, snapshot): (Rc<OpenPool>, Rc<LvolInfo>),
    volume: &LvolInfo,
    full: bool,
) -> Result<Rc<Job>, RpcError> {
    let plane = engine.plane()?;
    let reactor = least_loaded(engine, &plane)
        .ok_or_else(|| RpcError::errno(Errno::EAGAIN, "there is no reactor"))?;
    let named = |info: &LvolInfo| Volume {
        id: info.id,
        name: alias(&pool.name(), &info.name),
    };
    let since = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
    let request = Request {
        id: Uuid::new_v4(),
        holder: engine.volumes.holder(),
        created: since.as_secs(),
        volume: named(volume),
        snapshot: named(&snapshot),
        size_bytes: snapshot.bytes,
        full,
    };
    let holder = Holder::User(format!("backup {}", request.id));
    let name = snapshot.id.to_string();
    let claim = plane.bdevs.claim(&name, holder, Usage::Shared);
    let claim = claim.map_err(|error| error.refusal().field("snapshot"))?;
    let subject = request.snapshot.name.clone();
    let backups = &engine.devices.backups;
    let job = backups.add(Operation::Create, &place, request.id, subject)?;
    let (pool, lvol, bytes) = (pool.handle.clone(), snapshot.id, snapshot.bytes);
    let device = ClaimedDevice::new(claim, reactor);
    let (engine, ended) = (Rc::clone(engine), Rc::clone(&job));
    tokio::task::spawn_local(async move {
        let work = async {
            let _writer = engine.devices.backups.writer(request.volume.id).await;
            let progress = ended.progress();
            work::on_thread(ended.thread(), place, move |store| async move {
                let mut source = work::SnapshotSource::new(pool, lvol, device, bytes);
                nacre_engine_backup::create(&store, &request, &mut source, &progress).await
            })
            .await
        };
        let result = work.await.map(|created| {
            for bad in &created.bad {
                tracing::warn!(backup = %created.header.id, "not used as the base: {bad}");
            }
            Ended::Created(created.header)
        });
        jobs::end(&engine, &ended, result);
    });
    Ok(job)
}

/// Begins to verify a backup.
pub fn verify(engine: &Rc<Engine>, place: BackupPlace, backup: Uuid) -> Result<Rc<Job>, RpcError> {
    let backups = &engine.devices.backups;
    let job = backups.add(Operation::Verify, &place, backup, String::new())?;
    let (engine, ended) = (Rc::clone(engine), Rc::clone(&job));
    tokio::task::spawn_local(async move {
        let progress = ended.progress();
        let verified = work::on_thread(ended.thread(), place, move |store| async move {
            let volume = store.volume_of(backup).await?;
            nacre_engine_backup::verify(&store, volume, backup, &progress).await
        });
        let result = verified.await.map(Ended::Verified);
        jobs::end(&engine, &ended, result);
    });
    Ok(job)
}

/// Begins to delete a backup.
pub fn delete(engine: &Rc<Engine>, place: BackupPlace, backup: Uuid) -> Result<Rc<Job>, RpcError> {
    let backups = &engine.devices.backups;
    let job = backups.add(Operation::Delete, &place, backup, String::new())?;
    let (engine, ended) = (Rc::clone(engine), Rc::clone(&job));
    tokio::task::spawn_local(async move {
        let holder = engine.volumes.holder();
        let work = async {
            let found = work::on_thread(ended.thread(), place.clone(), move |store| async move {
                store.volume_of(backup).await
            });
            let volume = found.await?;
            let _writer = engine.devices.backups.writer(volume).await;
            let progress = ended.progress();
            work::on_thread(ended.thread(), place, move |store| async move {
                nacre_engine_backup::remove(&store, volume, backup, holder, &progress).await
            })
            .await
        };
        let result = work.await.map(Ended::Deleted);
        jobs::end(&engine, &ended, result);
    });
    Ok(job)
}

/// The volume whose backups a backup of the snapshot joins: `named` if it is given, else the volume
/// that was written after the snapshot. Among several clones, the one whose name the snapshot has;
/// without any, the snapshot itself.
pub async fn volume_of(
    pool: &OpenPool,
    snapshot: &LvolInfo,
    named: Option<&Lvol>,
) -> Result<LvolInfo, RpcError> {
    if let Some(lvol) = named {
        if lvol.pool() == pool.handle.id() {
            return Ok(lvol.info());
        }
        let cause = "the snapshot is in another pool";
        return Err(RpcError::errno(Errno::EINVAL, cause).field("volume"));
    }
    let all = pool.list_names().await?;
    let parent = |id: Uuid| all.iter().find(|info| info.id == id)?.parent;
    let is_of = |info: &&LvolInfo| {
        let chain = std::iter::successors(info.parent, |id| parent(*id));
        !info.is_snapshot && chain.take(all.len()).any(|id| id == snapshot.id)
    };
    let mut volumes: Vec<_> = all.iter().filter(is_of).collect();
    if volumes.len() > 1 {
        let (prefix, _) = snapshot.name.split_once('@').unwrap_or_default();
        volumes.retain(|info| info.name == prefix);
        if volumes.is_empty() {
            let cause = "several volumes grew from the snapshot";
            return Err(RpcError::errno(Errno::EINVAL, cause)
                .field("volume")
                .remedy("name the one to which the backup belongs"));
        }
    }
    Ok(volumes
        .first()
        .map_or_else(|| snapshot.clone(), |info| (*info).clone()))
}

/// The facts of a backup in an event.
fn facts(header: &Header) -> serde_json::Value {
    serde_json::json!({
        "backup": header.id,
        "volume": header.volume.id,
        "snapshot": header.snapshot.id,
        "stored_bytes": header.stored_bytes,
        "new_bytes": header.new_bytes,
    })
}
