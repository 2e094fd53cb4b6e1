//! `bdev_*`: block devices.
//!
//! Each bdev is one journal record, `bdev/<name>`: the create call with its identity filled in. Its
//! limits are a second record, `qos/<name>`. Deleting a bdev also deletes the bdevs stacked on it,
//! in one commit, as SPDK's hot removal does.

pub mod accept;
mod examine;
pub mod file;
pub mod histogram;
pub mod iostat;
pub mod list;
pub mod modules;
pub mod null;
pub mod nvme;
pub mod qos;
mod sampling;
pub mod stacked;

use std::sync::Arc;
use std::time::Duration;

use nacre_bdev::registry::Usage;
use nacre_bdev::{Bdev, Holder, RegistryError, Removal};
use nacre_bdev_replica::handle::ReplicaStatus;
use nacre_bdev_replica::model::ReplicaState;
use nacre_bdev_uring::UringBdev;
use serde_json::Value;
use tracing::warn;

use crate::bdev_modules;
use crate::journal::{self, EntryState};
use crate::methods::replies::{no_device, refuse_nil};
use crate::plane::Plane;
use crate::refusal::{OrRefuse, Refusal};
use crate::rpc::error::Errno;
use crate::rpc::{Registry, RpcError};
use crate::services::Engine;
use crate::services::device_records::{forget_uses_of, key};
use crate::services::devices::known_files;
use crate::services::volumes::is_claimed;
use crate::store::{Change, Edit, Record};

pub fn register(registry: &mut Registry<Engine>) {
    list::register(registry);
    examine::register(registry);
    iostat::register(registry);
    histogram::register(registry);
    nvme::register(registry);
    accept::register(registry);
    qos::register(registry);
    sampling::register(registry);
    stacked::register(registry);
    modules::register(registry);
    file::register(registry);
    null::register(registry);
}

/// Time limit for pending I/O to end, and for a file to open.
const PATIENCE: Duration = Duration::from_secs(20);

/// Field in the record of a file bdev: the size in bytes that hosts know.
pub const ANNOUNCED: &str = "announced_size";

/// Refuses a name that is in use. Call it before the file or base is opened: the existing bdev uses
/// that, and the error would name the wrong cause.
fn refuse_taken(engine: &Engine, name: &str) -> Result<(), RpcError> {
    match engine.plane()?.bdevs.lookup(name) {
        None => Ok(()),
        Some(bdev) => Err(RegistryError::Exists {
            name: name.into(),
            bdev: bdev.name().into(),
        }
        .refusal()),
    }
}

/// Registers the new bdevs of one call and stores their record. Removes them again if one of them,
/// or the record, is refused. Returns their names.
async fn create(
    engine: &Engine,
    devices: Vec<Arc<dyn Bdev>>,
    method: &str,
    mut params: Value,
) -> Result<Vec<String>, RpcError> {
    let mut names = Vec::new();
    let made = async {
        let is_restored = journal::is_replaying() || journal::is_declaring();
        let mut seen = None;
        for bdev in devices {
            refuse_nil(Some(bdev.uuid()))?;
            let file = bdev_modules::device::<UringBdev>(&bdev);
            seen = file.as_ref().map(|file| known_files::opened(file));
            if let Some(edit) = seen.take_if(|_| is_restored) {
                // Before the first write to the file.
                known_files::record(engine, vec![edit]).await;
            }
            names.push(register_one(engine, bdev, file.is_some(), &mut params)?);
        }
        let first = names.first().cloned().unwrap_or_default();
        let params = with_lasting_name(engine, method, params);
        let mut change = Change::put(key(&first), method, params);
        change.0.extend(seen);
        engine.journal.commit(change).await
    };
    if let Err(refused) = made.await {
        for name in &names {
            if let Err(error) = remove(engine, name).await {
                warn!(name, %error, "not made, and not taken away yet");
            }
        }
        return Err(refused);
    }
    Ok(names)
}

/// Registers a bdev. A file bdev gets the size that hosts know, which its parameters store.
fn register_one(
    engine: &Engine,
    bdev: Arc<dyn Bdev>,
    is_file: bool,
    params: &mut Value,
) -> Result<String, RpcError> {
    let name = bdev.name().to_owned();
    let has = bdev.geometry();
    let stored_size = params.get(ANNOUNCED).and_then(Value::as_u64).unwrap_or(0);
    let announced = stored_size / u64::from(has.block_size);
    let layer = engine
        .plane()?
        .bdevs
        .register_announced(bdev, announced)
        .or_refuse()?;
    if is_file {
        let announced = layer.geometry().bytes();
        params[ANNOUNCED] = announced.into();
        if has.bytes() < announced {
            warn!(
                bdev = name,
                announced,
                now = has.bytes(),
                "the device is smaller, in bytes, than announced to hosts: it keeps that size, and I/O past the present \
                 end fails; enlarge it again, or have it rescanned while no host is connected"
            );
        }
    }
    Ok(name)
}

/// Replaces the parameters in a device's record.
async fn update(engine: &Engine, name: &str, params: Value) -> Result<(), RpcError> {
    match engine.journal.find(&key(name)) {
        Some(entry) => {
            let method = entry.record.method;
            let params = with_lasting_name(engine, &method, params);
            engine
                .journal
                .commit(Change::put(key(name), method, params))
                .await
        }
        None => Ok(()),
    }
}

/// Replaces the base's name in the parameters by the name that it has after the next start.
fn with_lasting_name(engine: &Engine, method: &str, mut params: Value) -> Value {
    if let Some(Value::String(base)) = bdev_modules::base_mut(method, &mut params) {
        *base = engine.volumes.lasting_name(base);
    }
    params
}

/// Deletes a bdev of this product name, the bdevs that the same call created, and everything
/// stacked on them.
async fn delete(engine: &Engine, name: &str, product: &str) -> Result<bool, RpcError> {
    let plane = engine.plane()?;
    let Ok(listed) = plane.bdevs.get(name) else {
        // A device that could not be restored can be deleted.
        let deferred = crate::services::deferred::key(name);
        let stored = [key(name), deferred]
            .iter()
            .any(|key| engine.journal.find(key).is_some());
        if !stored {
            return Err(no_device(name));
        }
        let edits = forget(engine, &with_stored_dependents(engine, name));
        engine.journal.commit(Change(edits)).await?;
        return Ok(true);
    };
    let name = listed.layer.name().to_owned();
    let is_of_product = listed.layer.product_name() == product;
    drop(listed);
    if !is_of_product {
        return Err(no_device(&name)
            .cause(format!("\"{name}\" is a device of another kind"))
            .remedy("delete it with the method of its kind"));
    }
    let created = created_with(&plane, &name);
    let mut going = Vec::new();
    for name in &created {
        going.extend(with_dependents(&plane, name));
    }
    refuse_last_copies(engine, &going)?;
    refuse_shown(&plane, &going)?;
    // Remove the record first: after a crash in between, the devices must not return.
    engine
        .journal
        .commit(Change(forget(engine, &going)))
        .await?;
    let mut removed = Ok(());
    for name in &created {
        removed = removed.and(remove(engine, name).await);
    }
    removed.map(|()| true)
}

/// Refuses to delete the bdev of a volume's last replica in sync, even if the bdev is not in use
/// now. Allowed if another replica in sync is in use.
fn refuse_last_copies(engine: &Engine, going: &[String]) -> Result<(), RpcError> {
    let plane = engine.plane()?;
    let last = |volume: &crate::services::volumes::Listed| {
        let status = volume.status()?;
        let in_sync = status.replicas.iter();
        let mut in_sync = in_sync.filter(|m| m.state == ReplicaState::InSync);
        let stays = |m: &ReplicaStatus| !going.contains(&m.device) && is_claimed(&plane.bdevs, m);
        if in_sync.clone().any(stays) {
            return None;
        }
        let device = in_sync.find(|m| going.contains(&m.device))?.device.clone();
        Some((device, status.name))
    };
    match engine.volumes.list().iter().find_map(last) {
        None => Ok(()),
        Some((device, volume)) => Err(RpcError::errno(
            Errno::EBUSY,
            format!("\"{device}\" has the last good replica of volume \"{volume}\""),
        )
        .field("name")
        .remedy("bring another replica in sync first, or delete the volume")),
    }
}

/// Refuses to delete a bdev that is the external parent of lvols of a pool.
fn refuse_shown(plane: &Plane, going: &[String]) -> Result<(), RpcError> {
    for name in going {
        let claims = plane.bdevs.get(name).map(|listed| listed.claims);
        let claims = claims.unwrap_or_default();
        let shown = claims.iter().find(|(_, usage)| *usage == Usage::ReadOnly);
        if let Some((holder, _)) = shown {
            let cause = format!("\"{name}\" is used by {holder}");
            return Err(RpcError::errno(Errno::EBUSY, cause)
                .field("name")
                .remedy("inflate or delete these lvols first"));
        }
    }
    Ok(())
}

/// Edits that remove devices from the journal, with their limits and namespaces.
fn forget(engine: &Engine, names: &[String]) -> Vec<Edit> {
    let keys = |name: &String| [key(name), crate::services::deferred::key(name)];
    let mut edits: Vec<Edit> = names.iter().flat_map(keys).map(Edit::Remove).collect();
    edits.extend(
        names
            .iter()
            .filter_map(|name| accept::forget_file(engine, name)),
    );
    edits.extend(forget_uses_of(engine, names));
    edits
}

/// Removes a bdev and waits until its queues are closed. `ETIMEDOUT` after [`patience`]: I/O may
/// never end, and other changes wait.
async fn remove(engine: &Engine, name: &str) -> Result<(), RpcError> {
    let ticket = engine
        .plane()?
        .bdevs
        .remove(name, Removal::Hot)
        .or_refuse()?;
    match tokio::time::timeout(patience(engine), ticket).await {
        Ok(()) => Ok(()),
        Err(_) => Err(RpcError::errno(
            Errno::ETIMEDOUT,
            format!("\"{name}\" is deleted, but I/O that is under way on it has not ended"),
        )
        .field("name")
        .remedy("its name is free when it has")),
    }
}

/// Time limit of a change that waits for bdevs, because other changes wait meanwhile.
fn patience(engine: &Engine) -> Duration {
    PATIENCE.min(engine.deadline() / 2)
}

/// The bdev, and the others that the same call created on the same base.
fn created_with(plane: &Plane, name: &str) -> Vec<String> {
    let bases = plane
        .bdevs
        .lookup(name)
        .map_or(Vec::new(), |layer| layer.bases());
    let claims = bases
        .iter()
        .filter_map(|base| plane.bdevs.get(base).ok())
        .flat_map(|listed| listed.claims);
    let holds = |holder: &Holder| holder.bdevs().iter().any(|upper| upper == name);
    let mut holders = claims.map(|(holder, _)| holder);
    let Some(holder) = holders.find(holds) else {
        return vec![name.to_owned()];
    };
    let exists = |name: &&String| plane.bdevs.lookup(name).is_some();
    holder.bdevs().iter().filter(exists).cloned().collect()
}

/// The device and all devices stacked on it, directly or not.
fn with_dependents(plane: &Plane, name: &str) -> Vec<String> {
    let mut all = vec![name.to_owned()];
    let mut at = 0;
    while at < all.len() {
        if let Ok(listed) = plane.bdevs.get(&all[at]) {
            for (holder, _) in &listed.claims {
                for upper in holder.bdevs() {
                    if !all.contains(upper) {
                        all.push(upper.clone());
                    }
                }
            }
        }
        at += 1;
    }
    all
}

/// Edits that remove a missing bdev and everything stacked on it from the journal. `None` if `key`
/// is not that of a bdev.
pub fn forget_lost(engine: &Engine, key: &str) -> Option<Vec<Edit>> {
    let name = device_of(key)?;
    Some(forget(engine, &with_stored_dependents(engine, name)))
}

/// The name of the device that a record creates.
fn device_of(key: &str) -> Option<&str> {
    key.strip_prefix("bdev/")
        .or_else(|| key.strip_prefix(journal::DEFERRED))
}

/// As [`with_dependents`], from the journal records, for bdevs that do not exist now.
fn with_stored_dependents(engine: &Engine, name: &str) -> Vec<String> {
    let stored: Vec<(String, Vec<String>)> = engine
        .journal
        .select(|entry| entry.state != EntryState::Live)
        .into_iter()
        .filter_map(|entry| {
            let Record {
                key,
                method,
                params,
            } = entry.record;
            let base = bdev_modules::base(&method, &params)?.to_owned();
            let mut uppers = vec![device_of(&key)?.to_owned()];
            uppers.extend(bdev_modules::names(&method, &params));
            Some((base, uppers))
        })
        .collect();
    let mut all = vec![name.to_owned()];
    let mut at = 0;
    while at < all.len() {
        let base = all[at].clone();
        let above = stored.iter().filter(|(of, _)| *of == base);
        for upper in above.flat_map(|(_, uppers)| uppers) {
            if !all.contains(upper) {
                all.push(upper.clone());
            }
        }
        at += 1;
    }
    all
}

/// The error for a device of another kind, or for a missing one.
fn no_device_of_kind(engine: &Engine, name: &str, kind: &str, maker: &str) -> RpcError {
    let there = engine.plane().ok().and_then(|p| p.bdevs.lookup(name));
    let Some(layer) = there else {
        return no_device(name);
    };
    let what = layer.product_name();
    RpcError::errno(
        Errno::ENODEV,
        format!("\"{name}\" is not {kind}: it is a device of the kind \"{what}\""),
    )
    .field("name")
    .remedy(format!("make one of it with {maker}, and name that"))
}

impl Refusal for RegistryError {
    fn refusal(self) -> RpcError {
        let cause = self.to_string();
        let refused = match &self {
            Self::NotFound { .. } => RpcError::errno(Errno::ENODEV, cause),
            Self::Exists { .. } => RpcError::errno(Errno::EEXIST, cause),
            Self::BadName { .. } => RpcError::errno(Errno::EINVAL, cause),
            Self::Removing { .. } | Self::Open { .. } => {
                RpcError::errno(Errno::EBUSY, cause)
            }
            Self::Claimed { .. } => RpcError::errno(Errno::EPERM, cause),
            Self::WouldShrink { .. } => RpcError::errno(Errno::EBUSY, cause)
                .remedy("disconnect its hosts first, or give up the data past the new end (`force`)"),
            Self::Shrinks { .. } => RpcError::errno(Errno::EBUSY, cause).remedy(
                "make it as large again, or disconnect its hosts and rescan it, or give up the data past the new end (`force`)",
            ),
            Self::NoSuchAlias { .. } => RpcError::errno(Errno::ENOENT, cause),
            Self::Queue(open) => RpcError::os(
                open.source.raw_os_error().unwrap_or(Errno::EIO as i32),
                cause,
            ),
        };
        match self {
            Self::Queue(_) => refused,
            _ => refused.field("name"),
        }
    }
}

impl Refusal for nacre_bdev::ConfigError {
    fn refusal(self) -> RpcError {
        use nacre_bdev::ConfigError::*;
        let cause = self.to_string();
        match self {
            BlockSize { .. } => RpcError::errno(Errno::EINVAL, cause).field("block_size"),
            PhysicalBlockSize { .. } => {
                RpcError::errno(Errno::EINVAL, cause).field("physical_block_size")
            }
            NoBlocks | TooLarge { .. } => RpcError::errno(Errno::EINVAL, cause).field("num_blocks"),
            Boundary { .. } => RpcError::errno(Errno::EINVAL, cause).field("optimal_io_boundary"),
            Memory { source, .. } => {
                RpcError::errno(Errno::ENOMEM, format!("{cause}: {source}")).field("num_blocks")
            }
        }
    }
}

#[cfg(test)]
mod tests;
