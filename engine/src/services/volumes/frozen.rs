//! Bdevs of volumes that are not open. Hosts see their namespaces, and I/O waits.
//!
//! ```text
//!   show      opening failed, or is slow ▸ the bdev is registered with the limits of the record
//!             ▸ its namespaces are restored; I/O waits
//!   assign    the volume is open ▸ the same bdev serves; another one if its replicas support less
//!   withdraw  the volume is deleted, or the daemon stops
//! ```
//!
//! A volume whose record has no limits has no bdev until it is opened.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use nacre_bdev::registry::Removal;
use nacre_bdev_replica::handle::{VolumeError, VolumeHandle, VolumeState};
use nacre_bdev_replica::prepared::Prepared;
use serde_json::json;
use tracing::{debug, info, warn};
use uuid::Uuid;

use super::{OpenState, Volumes};
use crate::plane::Plane;
use crate::refusal::OrRefuse;
use crate::rpc::RpcError;
use crate::rpc::error::Errno;
use crate::services::Engine;
use crate::services::deferred::replay_waiting;

/// Time limit for reactors to close their queues on a volume, and for its control to close it.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);

impl Volumes {
    /// The unopened volume; made from the record if there is none. `None`: no such volume.
    pub(super) fn prepared(&self, id: Uuid) -> Option<Prepared> {
        let mut entries = self.entries.borrow_mut();
        let entry = entries.get_mut(&id)?;
        let known = entry.prepared.take();
        // The record may have got announced limits since.
        let known = known.filter(|p| p.volume().is_some() || entry.record.limits.is_none());
        let prepared = known.unwrap_or_else(|| Prepared::new(&entry.record));
        Some(entry.prepared.insert(prepared).clone())
    }

    pub(super) fn forget_prepared(&self, id: Uuid) {
        if let Some(entry) = self.entries.borrow_mut().get_mut(&id) {
            entry.prepared = None;
        }
    }

    pub(super) fn set_going(&self, id: Uuid, going: bool) {
        if let Some(entry) = self.entries.borrow_mut().get_mut(&id) {
            entry.going = going;
        }
    }

    /// Saves the I/O limits of a bdev that is removed, for its successor.
    pub(super) fn keep_rates(&self, plane: &Plane, id: Uuid, bdev: &str) {
        let layer = plane.bdevs.lookup(bdev);
        let mut entries = self.entries.borrow_mut();
        if let (Some(layer), Some(entry)) = (layer, entries.get_mut(&id)) {
            entry.rates = layer.qos().limits();
        }
    }

    /// Applies the saved I/O limits to a new bdev.
    fn give_rates(&self, plane: &Plane, id: Uuid, bdev: &str) {
        let entries = self.entries.borrow();
        let rates = entries.get(&id).map(|entry| entry.rates);
        let rates = rates.filter(|rates| !rates.is_none());
        if let (Some(layer), Some(rates)) = (plane.bdevs.lookup(bdev), rates) {
            layer.qos().set(rates);
        }
    }

    fn shown(&self, id: Uuid) -> Option<String> {
        self.entries.borrow().get(&id)?.shown.clone()
    }
}

/// Registers the bdev of a volume that is not open, unless it exists, and restores the namespaces
/// and devices on it.
pub(super) async fn show(engine: &Rc<Engine>, id: Uuid) {
    if register(engine, id) {
        replay_waiting(engine).await;
    }
}

fn register(engine: &Engine, id: Uuid) -> bool {
    let Ok(plane) = engine.plane() else {
        return false;
    };
    let Some(prepared) = engine.volumes.prepared(id) else {
        return false;
    };
    let mut entries = engine.volumes.entries.borrow_mut();
    let Some(entry) = entries.get_mut(&id) else {
        return false;
    };
    let done = entry.open.is_some() || entry.shown.is_some();
    if done || entry.going || engine.volumes.closing.get() {
        return false;
    }
    let Some(volume) = prepared.volume() else {
        return false;
    };
    let bdev = volume.name().to_owned();
    if let Err(error) = plane.bdevs.register(volume) {
        if entry.is_standby {
            debug!(volume = bdev, %error, "not shown yet; it is tried again");
        } else {
            warn!(volume = bdev, %error, "hosts do not find it before it is open");
        }
        return false;
    }
    entry.shown = Some(bdev.clone());
    let news = !entry.is_standby && !std::mem::replace(&mut entry.reported_frozen, true);
    let name = entry.record.name.clone();
    let status = prepared.status(&entry.record, entry.refused.as_ref());
    let is_standby = entry.is_standby;
    drop(entries);
    engine.volumes.give_rates(&plane, id, &bdev);
    let why = status.why.unwrap_or_default();
    if !is_standby {
        info!(volume = name, why, "shown to hosts before it is open");
    }
    if news {
        let (kind, text) = match status.state {
            VolumeState::Fenced => ("volume_fenced", format!("another holder has it: {why}")),
            _ => ("volume_frozen", format!("frozen: {why}; hosts wait")),
        };
        let text = format!("volume \"{name}\": {text}");
        engine
            .notes
            .report(kind, name, text, json!({ "id": id, "why": why }));
    }
    true
}

/// Registers the bdev of an opened volume, unless its frozen bdev serves it. Returns the bdev's
/// name.
pub(super) async fn assign_bdev(
    engine: &Engine,
    plane: &Plane,
    id: Uuid,
    prepared: &Prepared,
    handle: &VolumeHandle,
) -> Result<String, VolumeError> {
    if let Some(bdev) = engine.volumes.shown(id) {
        if prepared.is_served_by(handle) {
            // Another holder may have grown the volume.
            let _ = plane.bdevs.notify_resize(&bdev);
            return Ok(bdev);
        }
        info!(
            volume = bdev,
            "its replicas keep less than was announced to hosts: they find another device"
        );
        if let Err(error) = withdraw(engine, plane, id, Removal::Hot).await {
            warn!(volume = bdev, %error, "still in use");
        }
    }
    let volume = handle.volume();
    let registered = plane.bdevs.register(Arc::clone(volume));
    registered.map_err(|error| VolumeError::Io {
        device: volume.name().to_owned(),
        what: error.to_string(),
    })?;
    engine.volumes.give_rates(plane, id, volume.name());
    Ok(volume.name().to_owned())
}

/// Removes the bdev of a volume that is not open. Waiting I/O completes with a path error.
pub(super) async fn withdraw(
    engine: &Engine,
    plane: &Plane,
    id: Uuid,
    how: Removal,
) -> Result<(), RpcError> {
    let Some(bdev) = engine.volumes.shown(id) else {
        return Ok(());
    };
    engine.volumes.keep_rates(plane, id, &bdev);
    let ticket = plane.bdevs.remove(&bdev, how).or_refuse()?;
    if let Some(entry) = engine.volumes.entries.borrow_mut().get_mut(&id) {
        entry.shown = None;
        if let Some(prepared) = entry.prepared.take() {
            prepared.shut();
        }
    }
    // Now, not when the event is handled: another device may have the name by then.
    crate::services::subsystems::bdev_gone(engine, plane, &bdev);
    match tokio::time::timeout(PATIENCE, ticket).await {
        Ok(()) => Ok(()),
        Err(_) => Err(RpcError::errno(
            Errno::ETIMEDOUT,
            format!("queues on \"{bdev}\" are still open"),
        )),
    }
}

/// Makes I/O fail on a frozen volume, instead of waiting. False: the volume is open, or has no
/// bdev.
pub fn fail_io(engine: &Engine, name: &str) -> Result<bool, RpcError> {
    let OpenState::Frozen { prepared, .. } = engine.volumes.find(name)?.open_state else {
        return Ok(false);
    };
    prepared.set_failing(true);
    Ok(true)
}

/// Ends [`fail_io`], and tries to open all unopened volumes at once. False: I/O was not failing.
pub fn thaw(engine: &Engine, name: &str) -> Result<bool, RpcError> {
    let OpenState::Frozen { prepared, .. } = engine.volumes.find(name)?.open_state else {
        return Ok(false);
    };
    let failed = prepared.is_failing();
    if failed {
        prepared.set_failing(false);
    }
    engine.volumes.again.notify_waiters();
    Ok(failed)
}

/// Stops the opening of volumes, before hosts are disconnected. Waiting I/O is completed.
pub fn stop_opening(engine: &Engine) {
    engine.volumes.closing.set(true);
    let entries = engine.volumes.entries.borrow();
    let not_open = entries.values().filter(|entry| entry.open.is_none());
    let prepared = not_open.filter_map(|entry| entry.prepared.as_ref());
    prepared.for_each(Prepared::shut);
}

/// Removes the bdevs of all volumes that are not open.
pub(super) async fn close_all(engine: &Engine, plane: &Plane) {
    let shown: Vec<(Uuid, String)> = {
        let entries = engine.volumes.entries.borrow();
        let shown = entries
            .iter()
            .filter_map(|(id, entry)| Some((*id, entry.shown.clone()?)));
        shown.collect()
    };
    let close = async |(id, bdev): &(Uuid, String)| {
        if let Err(error) = withdraw(engine, plane, *id, Removal::Hot).await {
            warn!(volume = bdev, %error, "not closed in order");
        }
    };
    join_all(shown.iter().map(close)).await;
}
