//! Restores a backup into a new lvol, which gets its name when it is complete.

use std::rc::Rc;
use std::time::Duration;

use nacre_bdev::registry::Usage;
use nacre_bdev::{Bdev, Holder};
use nacre_bdev_pool::Command;
use nacre_engine_backup::{Failure, Header};
use tracing::warn;
use uuid::Uuid;

use super::device::ClaimedDevice;
use super::jobs::{self, Ended, Job, Operation};
use super::work::{self, BackupPlace};
use crate::rpc::RpcError;
use crate::services::Engine;
use crate::services::pools::{
    self, OpenPool, alias, check_alias, check_name, find_lvol, least_loaded,
};

/// Most attempts to delete the lvol of a failed restore, and the pause between them.
const DELETIONS: u32 = 30;
const PAUSE: Duration = Duration::from_millis(100);

/// The parameters of a restore.
pub struct RestoreRequest {
    pub place: BackupPlace,
    pub backup: Uuid,
    pub pool: Rc<OpenPool>,
    pub name: String,
    pub id: Uuid,
}

/// Starts the job of a restore.
pub fn restore(engine: &Rc<Engine>, request: RestoreRequest) -> Result<Rc<Job>, RpcError> {
    check_name("name", &request.name)?;
    let subject = alias(&request.pool.name(), &request.name);
    check_alias(&engine.plane()?.bdevs, "name", &subject)?;
    let backups = &engine.devices.backups;
    let (place, backup) = (&request.place, request.backup);
    let job = backups.add(Operation::Restore, place, backup, subject)?;
    let (engine, ended) = (Rc::clone(engine), Rc::clone(&job));
    tokio::task::spawn_local(async move {
        let restored = run(&engine, &request, &ended).await;
        jobs::end(&engine, &ended, restored.map(Ended::Restored));
    });
    Ok(job)
}

async fn run(engine: &Rc<Engine>, request: &RestoreRequest, job: &Job) -> Result<Header, Failure> {
    let (place, backup) = (request.place.clone(), request.backup);
    let found = work::on_thread(job.thread(), place, move |store| async move {
        let volume = store.volume_of(backup).await?;
        store.describe(volume, backup).await
    });
    let header = found.await?;
    let (pool, id) = (&request.pool, request.id);
    let refused = |error: RpcError| Failure::Target(error.to_string());
    let unit = pool.handle.status().unit_bytes;
    if !header.size_bytes.is_multiple_of(unit)
        || header.size_bytes > pool.handle.status().max_lvol_bytes
    {
        let size = header.size_bytes;
        let cause = format!("the pool cannot have a volume of {size} bytes");
        return Err(Failure::Target(cause));
    }
    let create = Command::Create {
        id,
        name: format!("restore-{}", id.simple()),
        bytes: header.size_bytes,
        thick: false,
    };
    pool.run(create).await.map_err(refused)?;
    let restored = async {
        pools::register_new(engine, pool, id)
            .await
            .map_err(refused)?;
        fill(engine, request, &header, job).await?;
        let rename = serde_json::json!({ "lvol": id, "new_name": request.name });
        let rename = serde_json::value::to_raw_value(&rename);
        let rename = rename.map_err(|error| Failure::Target(error.to_string()))?;
        let renamed = engine.call("lvol_rename", Some(&rename)).await;
        renamed.map(drop).map_err(refused)
    };
    match restored.await {
        Ok(()) => Ok(header),
        Err(failure) => {
            delete_unfinished(engine, id).await;
            Err(failure)
        }
    }
}

/// Deletes the lvol of a failed restore. Retries, because a reactor may still close the bdev's
/// queue.
async fn delete_unfinished(engine: &Rc<Engine>, id: Uuid) {
    for attempt in 1.. {
        let Ok((pool, lvol)) = find_lvol(engine, "lvol", &id.to_string()) else {
            return;
        };
        match pools::delete(engine, &pool, lvol).await {
            Ok(()) => return,
            Err(_) if attempt < DELETIONS => tokio::time::sleep(PAUSE).await,
            Err(error) => {
                warn!(lvol = %id, %error, "cannot delete an unfinished restore");
                return;
            }
        }
    }
}

/// Writes the data of the backup. An exclusive claim keeps other users off the lvol.
async fn fill(
    engine: &Rc<Engine>,
    request: &RestoreRequest,
    header: &Header,
    job: &Job,
) -> Result<(), Failure> {
    let refused = |error: String| Failure::Target(error);
    let plane = engine.plane().map_err(|error| refused(error.to_string()))?;
    let reactor = least_loaded(engine, &plane);
    let reactor = reactor.ok_or_else(|| refused("there is no reactor".into()))?;
    let holder = Holder::User(format!("restore of backup {}", request.backup));
    let name = request.id.to_string();
    let claim = plane.bdevs.claim(&name, holder, Usage::Exclusive);
    let claim = claim.map_err(|error| refused(error.to_string()))?;
    if claim.layer().geometry().bytes() != header.size_bytes {
        return Err(refused("the new volume has another size".into()));
    }
    let device = ClaimedDevice::new(claim, reactor);
    let (volume, backup) = (header.volume.id, header.id);
    let progress = job.progress();
    let (thread, place) = (job.thread(), request.place.clone());
    let written = work::on_thread(thread, place, move |store| async move {
        let mut target = work::Volume(device);
        nacre_engine_backup::restore(&store, volume, backup, &mut target, &progress).await
    });
    written.await.map(drop)
}
