//! Removes a disk from a pool: its contents move to the other disks while hosts use the pool.

use std::rc::Rc;

use nacre_bdev_pool::{Command, Departed, DiskStatus, PoolError, Refusal as Refused};
use nacre_engine_values::size::bytes;
use serde_json::json;
use tracing::warn;

use super::{Late, OpenPool, key, store_import};
use crate::refusal::OrRefuse;
use crate::rpc::RpcError;
use crate::rpc::error::Errno;
use crate::services::Engine;

/// Begins to move the contents of a disk to the other disks of the pool.
pub async fn remove_disk(
    engine: &Rc<Engine>,
    pool: &Rc<OpenPool>,
    disk: &str,
) -> Result<(), RpcError> {
    let known = find(engine, pool, disk)?;
    let is_leaving = known.leaving.is_some();
    run(engine, pool, Command::RemoveDisk { disk: known.id }).await?;
    if !is_leaving {
        let text = format!(
            "disk {} begins to leave pool \"{}\"",
            known.name,
            pool.name()
        );
        let facts = json!({ "id": pool.handle.id(), "disk": known.name });
        engine
            .notes
            .report("pool_disk_leaving", pool.name(), text, facts);
    }
    Ok(())
}

/// Cancels the removal of a disk.
pub async fn keep_disk(
    engine: &Rc<Engine>,
    pool: &Rc<OpenPool>,
    disk: &str,
) -> Result<(), RpcError> {
    let known = find(engine, pool, disk)?;
    run(engine, pool, Command::KeepDisk { disk: known.id }).await
}

/// Runs a command, which goes on if the caller stops waiting.
async fn run(engine: &Rc<Engine>, pool: &Rc<OpenPool>, command: Command) -> Result<(), RpcError> {
    let unit = pool.handle.status().unit_bytes;
    let of = Rc::clone(pool);
    let running = tokio::task::spawn_local(async move { of.handle.run(command).await });
    let pools = &engine.devices.pools;
    let ended = pools.in_time(Late::RemoveDisk, running).await?;
    let ended = ended.map_err(|error| RpcError::internal(error.to_string()))?;
    match ended {
        Err(PoolError::Refused(Refused::NoRoom { missing })) => Err(no_room(missing * unit)),
        other => other.or_refuse().map(drop),
    }
    .map_err(|error| error.field("disk"))
}

/// The error about missing space on the other disks. `missing`: bytes.
fn no_room(missing: u64) -> RpcError {
    let cause = format!(
        "the other disks have {} too little free space for the contents of the disk",
        bytes(missing)
    );
    RpcError::errno(Errno::ENOSPC, cause)
        .remedy("trim, delete snapshots, or add a disk first: pool_add_disk")
}

/// The disk of a pool by the name, the alias or the UUID of its device, or by its id in the pool.
fn find(engine: &Engine, pool: &OpenPool, disk: &str) -> Result<DiskStatus, RpcError> {
    let layer = engine.plane()?.bdevs.lookup(disk);
    let name = layer.map_or_else(
        || disk.to_owned(),
        |layer| nacre_bdev::Bdev::name(&*layer).to_owned(),
    );
    let mut disks = pool.handle.status().disks.into_iter();
    let found = disks.find(|known| known.name == name || known.id.to_string() == disk);
    found.ok_or_else(|| {
        let cause = format!("\"{disk}\" is no disk of pool \"{}\"", pool.name());
        RpcError::errno(Errno::ENODEV, cause)
            .field("disk")
            .remedy("nacre pool show lists the disks of a pool")
    })
}

/// Reports removals that have ended, and stores the remaining disks.
pub(super) async fn report_departed(engine: &Rc<Engine>, pool: &Rc<OpenPool>) {
    for departed in pool.handle.take_departed() {
        report(engine, pool, departed).await;
    }
}

async fn report(engine: &Rc<Engine>, pool: &Rc<OpenPool>, departed: Departed) {
    let Departed { disk, name, result } = departed;
    let mut facts = json!({ "id": pool.handle.id(), "disk": name });
    let status = pool.handle.status();
    let is_in = status.disks.iter().any(|known| known.id == disk);
    let (kind, text) = match &result {
        Ok(()) => (
            "pool_remove_disk",
            format!("disk {name} has left pool \"{}\", and is free", status.name),
        ),
        Err(error) => {
            let cause = match error {
                PoolError::Refused(Refused::NoRoom { missing }) => {
                    no_room(missing * status.unit_bytes).to_string()
                }
                other => other.to_string(),
            };
            facts["cause"] = json!(cause);
            let what = if is_in { "stays in" } else { "has left" };
            warn!(
                pool = status.name,
                disk = name,
                cause,
                "a disk {what} its pool"
            );
            let kind = if is_in {
                "pool_disk_stays"
            } else {
                "pool_remove_disk"
            };
            (
                kind,
                format!("disk {name} {what} pool \"{}\": {cause}", status.name),
            )
        }
    };
    engine.notes.report(kind, status.name, text, facts);
    // The pool may have been exported meanwhile.
    if is_in || engine.journal.find(&key(pool.handle.id())).is_none() {
        return;
    }
    if let Err(error) = store_import(engine, pool).await {
        warn!(pool = pool.name(), %error, "the journal keeps a disk that has left");
    }
}
