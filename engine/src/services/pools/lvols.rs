//! Lvols of open pools: their bdevs, sizes, parents and deletion.

use std::rc::Rc;
use std::sync::Arc;

use nacre_bdev::registry::Shrink;
use nacre_bdev::{Bdev, Registry as BdevRegistry};
use nacre_bdev_pool::{Command, Lvol, LvolInfo};
use tracing::warn;
use uuid::Uuid;

use super::{OpenPool, external, withdraw};
use crate::refusal::{OrRefuse, Refusal};
use crate::rpc::RpcError;
use crate::rpc::error::Errno;
use crate::services::Engine;
use crate::services::device_records;
use crate::store::Change;

/// Registers the bdev of an lvol under its UUID, with the alias `pool/name`. The caller holds
/// [`OpenPool::names`].
pub async fn register(
    engine: &Rc<Engine>,
    pool: &OpenPool,
    info: &LvolInfo,
) -> Result<(), RpcError> {
    let plane = engine.plane()?;
    let lvol = pool.handle.lvol(info.id).await.or_refuse()?;
    lvol.update(info.clone());
    let layer = plane.bdevs.register(lvol as Arc<dyn Bdev>).or_refuse()?;
    let alias = alias(&pool.name(), &info.name);
    if let Err(error) = plane.bdevs.add_alias(layer.name(), &alias) {
        warn!(alias, %error, "a volume has no alias");
    }
    Ok(())
}

pub fn alias(pool: &str, lvol: &str) -> String {
    format!("{pool}/{lvol}")
}

/// Checks the name of a pool or lvol: 1 to 63 bytes, without `/`.
pub fn check_name(field: &str, name: &str) -> Result<(), RpcError> {
    let why = if name.contains('/') {
        "a name has no \"/\": it separates the pool from the volume"
    } else if name.is_empty() || name.len() > 63 {
        "a name has 1 to 63 bytes"
    } else {
        return nacre_bdev::registry::check_name(name)
            .map_err(|error| error.refusal().field(field));
    };
    Err(RpcError::errno(Errno::EINVAL, why).field(field))
}

/// An lvol, by UUID or as `pool/name`, with its pool.
pub fn find_lvol(
    engine: &Engine,
    field: &str,
    name: &str,
) -> Result<(Rc<OpenPool>, Arc<Lvol>), RpcError> {
    let lvol = device_records::find::<Lvol>(engine, name).ok_or_else(|| {
        let cause = format!("there is no volume or snapshot \"{name}\"");
        RpcError::errno(Errno::ENODEV, cause)
            .field(field)
            .remedy("lvol_list lists them: name one by UUID, or as pool/name")
    })?;
    let pool = engine.devices.pools.of(lvol.pool())?;
    Ok((pool, lvol))
}

/// Refuses a snapshot of another pool.
pub fn check_same_pool(
    field: &str,
    pool: &Rc<OpenPool>,
    of_snapshot: &Rc<OpenPool>,
) -> Result<(), RpcError> {
    if Rc::ptr_eq(pool, of_snapshot) {
        return Ok(());
    }
    let cause = "the snapshot is in another pool";
    Err(RpcError::errno(Errno::EINVAL, cause).field(field))
}

/// Refuses an alias that is a name of a bdev already. Called before a rename.
pub fn check_alias(bdevs: &BdevRegistry, field: &str, alias: &str) -> Result<(), RpcError> {
    let Some(user) = bdevs.lookup(alias) else {
        return Ok(());
    };
    let cause = format!("\"{alias}\" is already a name of bdev \"{}\"", user.name());
    Err(RpcError::errno(Errno::EEXIST, cause).field(field))
}

/// Makes a snapshot of the lvol `source` without a bdev. A caller that waits no longer does not
/// stop it: [`OpenPool::cuts_have_ended`] says when it is there, or never will be.
pub async fn snapshot_lvol(
    pool: &Rc<OpenPool>,
    source: Uuid,
    (id, name): (Uuid, String),
) -> Result<(), RpcError> {
    let in_progress = Arc::clone(&pool.cuts).read_owned().await;
    let pool = Rc::clone(pool);
    let cut = tokio::task::spawn_local(async move {
        let cuts = vec![(source, id, name)];
        let made = pool.run(Command::Snapshot { cuts }).await;
        drop(in_progress);
        made.map(drop)
    });
    let failed = |error: tokio::task::JoinError| Err(RpcError::internal(error.to_string()));
    cut.await.unwrap_or_else(failed)
}

/// Registers the bdev of a new lvol.
pub async fn register_new(engine: &Rc<Engine>, pool: &OpenPool, id: Uuid) -> Result<(), RpcError> {
    let _names = pool.names.lock().await;
    let info = pool.handle.lvol(id).await.or_refuse()?.info();
    register(engine, pool, &info).await
}

/// Changes the size of a volume.
pub async fn resize(
    engine: &Rc<Engine>,
    pool: &OpenPool,
    lvol: &Arc<Lvol>,
    bytes: u64,
) -> Result<(), RpcError> {
    let bdevs = &engine.plane()?.bdevs;
    bdevs.may_shrink(lvol.name(), bytes).or_refuse()?;
    let lvol_id = lvol.uuid();
    pool.run(Command::Resize {
        lvol: lvol_id,
        bytes,
    })
    .await?;
    bdevs.notify_resize(lvol.name()).or_refuse()?;
    Ok(())
}

/// Gives an lvol its former size back, even if it is in use. Only for a growth whose new space was
/// never used.
pub async fn undo_growth(
    engine: &Rc<Engine>,
    pool: &OpenPool,
    lvol: &Arc<Lvol>,
    bytes: u64,
) -> Result<(), RpcError> {
    let bdevs = &engine.plane()?.bdevs;
    let id = lvol.uuid();
    pool.run(Command::Resize { lvol: id, bytes }).await?;
    let announced = bdevs.take_size(lvol.name(), Shrink::Forced);
    announced.map(drop).or_refuse()
}

/// Makes an lvol that is not in use a clone of a snapshot. The units that it has stay in place.
pub async fn set_parent(
    engine: &Rc<Engine>,
    pool: &OpenPool,
    lvol: Arc<Lvol>,
    snapshot: Uuid,
) -> Result<(), RpcError> {
    let id = lvol.uuid();
    drop(lvol);
    withdraw(engine, &id.to_string()).await?;
    let lvol = id;
    let changed = pool.run(Command::SetParent { lvol, snapshot }).await;
    // Changed or not, the volume is a device again.
    register_new(engine, pool, id).await?;
    changed.map(drop)
}

/// Makes a bdev the external parent of an lvol that is not in use. The units that it has stay in
/// place.
pub async fn set_parent_bdev(
    engine: &Rc<Engine>,
    pool: &OpenPool,
    lvol: Arc<Lvol>,
    (field, bdev): (&str, &str),
) -> Result<(), RpcError> {
    let id = lvol.uuid();
    drop(lvol);
    let device = external::claim(engine, pool, (field, bdev))?;
    withdraw(engine, &id.to_string()).await?;
    let changed = device
        .of(pool, |claim| pool.handle.set_external_parent(claim, id))
        .await;
    // Changed or not, the volume is a device again.
    register_new(engine, pool, id).await?;
    changed
        .map(drop)
        .map_err(|error| external::refused(error, field))
}

/// Deletes an lvol that is not in use.
pub async fn delete(engine: &Rc<Engine>, pool: &OpenPool, lvol: Arc<Lvol>) -> Result<(), RpcError> {
    let id = lvol.uuid();
    let names = vec![id.to_string(), alias(&pool.name(), &lvol.info().name)];
    drop(lvol);
    withdraw(engine, &id.to_string()).await?;
    if let Err(refused) = pool.run(Command::Delete { lvol: id }).await {
        register_new(engine, pool, id).await?;
        return Err(refused);
    }
    let edits = device_records::forget_uses_of(engine, &names);
    engine.journal.commit(Change(edits)).await
}
