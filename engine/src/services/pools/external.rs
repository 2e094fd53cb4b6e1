//! Devices outside of a pool that its lvols show: claims, and devices that come late or go.
//!
//! ```text
//!   clone, set parent ──▶ read-only claim ──▶ the pool   until no lvol shows the device
//!   import, device appears ──▶ the same, for lvols that show it already
//!   device goes ──▶ the pool gives the claim back        lvols are degraded
//! ```
//!
//! The pool records the UUID of the device, so the device may come back under another name.

use std::rc::Rc;
use std::sync::Arc;

use nacre_bdev::registry::Usage;
use nacre_bdev::{Bdev, Claim, Holder, Layer};
use nacre_bdev_pool::{Lvol, PoolError};
use tracing::{info, warn};
use uuid::Uuid;

use super::OpenPool;
use crate::bdev_modules;
use crate::plane::Plane;
use crate::refusal::{OrRefuse, Refusal};
use crate::rpc::RpcError;
use crate::rpc::error::Errno;
use crate::services::Engine;

/// Makes a volume that shows a device.
pub async fn clone_bdev(
    engine: &Rc<Engine>,
    pool: &OpenPool,
    (field, bdev): (&str, &str),
    id: Uuid,
    name: String,
) -> Result<(), RpcError> {
    let claim = claim(engine, pool, (field, bdev))?;
    let made = pool.handle.clone_external(claim, id, name).await;
    made.map(drop).map_err(|error| refused(error, field))
}

/// A refusal of the pool; `field` names the device.
pub(super) fn refused(error: PoolError, field: &str) -> RpcError {
    match error {
        PoolError::Unfit { why, .. } => RpcError::errno(Errno::EINVAL, why).field(field),
        error => error.refusal(),
    }
}

/// Claims a device for lvols of a pool.
pub(super) fn claim(
    engine: &Engine,
    pool: &OpenPool,
    (field, bdev): (&str, &str),
) -> Result<Claim, RpcError> {
    let plane = engine.plane()?;
    let layer = plane.bdevs.lookup(bdev).ok_or_else(|| {
        let cause = format!("there is no bdev \"{bdev}\"");
        RpcError::errno(Errno::ENODEV, cause).field(field)
    })?;
    if is_on_pool(engine, &plane, &layer, pool.handle.id()) {
        let cause = format!("\"{bdev}\" is an lvol of the same pool, or depends on one");
        return Err(RpcError::errno(Errno::EINVAL, cause)
            .field(field)
            .remedy("make a snapshot of that lvol, and clone the snapshot"));
    }
    let claimed = plane
        .bdevs
        .claim(layer.name(), holder(pool), Usage::ReadOnly);
    claimed.map_err(|error| error.refusal().field(field))
}

fn holder(pool: &OpenPool) -> Holder {
    Holder::User(format!("lvols of pool \"{}\" that show it", pool.name()))
}

/// True for a device that an lvol of a pool is below: as a disk, or as a device that lvols show.
fn is_on_pool(engine: &Engine, plane: &Plane, layer: &Layer, pool: Uuid) -> bool {
    let mut seen = Vec::new();
    let mut left: Vec<String> = vec![layer.name().to_owned()];
    while let Some(name) = left.pop() {
        if seen.contains(&name) {
            continue;
        }
        if let Some(layer) = plane.bdevs.lookup(&name) {
            match bdev_modules::device::<Lvol>(layer.module()) {
                Some(lvol) if lvol.pool() == pool => return true,
                Some(lvol) => {
                    left.extend(lvol.disks());
                    let of = engine.devices.pools.of(lvol.pool());
                    let shown = of.map(|of| of.handle.status().externals);
                    let shown = shown.unwrap_or_default().into_iter();
                    left.extend(shown.map(|device| device.parent.id.to_string()));
                }
                None => left.extend(layer.module().bases()),
            }
        }
        seen.push(name);
    }
    false
}

/// Gives an open pool the devices that its lvols show, as far as they are there.
pub async fn attach_present(engine: &Rc<Engine>, pool: &OpenPool) {
    for device in pool.handle.status().externals {
        if device.is_present {
            continue;
        }
        let (id, name) = (device.parent.id, device.parent.name);
        if let Err(why) = attach(engine, pool, id).await {
            warn!(pool = pool.name(), bdev = name, %id, why, "lvols lack a device that they show");
        }
    }
}

async fn attach(engine: &Rc<Engine>, pool: &OpenPool, device: Uuid) -> Result<(), String> {
    let plane = engine.plane().map_err(|error| error.to_string())?;
    let claim = plane
        .bdevs
        .claim(&device.to_string(), holder(pool), Usage::ReadOnly);
    let claim = claim.map_err(|error| error.to_string())?;
    let layer = Arc::clone(claim.layer());
    let attached = pool.handle.attach(claim).await;
    if layer.is_gone() {
        // It was removed before the pool had it.
        let _ = pool.handle.detach(device).await;
    }
    attached.map_err(|error| error.to_string())
}

/// A device appeared: lvols that show it get it.
pub async fn device_appeared(engine: &Rc<Engine>, name: &str) {
    let Ok(plane) = engine.plane() else { return };
    let Some(layer) = plane.bdevs.lookup(name) else {
        return;
    };
    let id = layer.uuid();
    drop(layer);
    for pool in engine.devices.pools.list() {
        let shown = pool.handle.status().externals;
        let mut missing = shown.iter().filter(|device| !device.is_present);
        if !missing.any(|device| device.parent.id == id) {
            continue;
        }
        match attach(engine, &pool, id).await {
            Ok(()) => info!(pool = pool.name(), bdev = name, "lvols show a device again"),
            Err(why) => {
                warn!(
                    pool = pool.name(),
                    bdev = name,
                    why,
                    "lvols lack a device that they show"
                )
            }
        }
    }
}

/// A device goes: its claims end, and lvols that show it are degraded.
pub fn device_gone(engine: &Rc<Engine>, name: &str) {
    for pool in engine.devices.pools.list() {
        let present = pool.handle.status().externals.into_iter();
        let present = present.filter(|device| device.is_present);
        let ids: Vec<Uuid> = present.map(|device| device.parent.id).collect();
        if ids.is_empty() {
            continue;
        }
        let (engine, name) = (Rc::clone(engine), name.to_owned());
        tokio::task::spawn_local(async move {
            let Ok(plane) = engine.plane() else { return };
            for id in ids {
                // A device that is being removed is not found any more.
                if plane.bdevs.lookup(&id.to_string()).is_some() {
                    continue;
                }
                warn!(
                    pool = pool.name(),
                    bdev = name,
                    "lvols lack a device that they show"
                );
                // A pool that closes has no claim.
                let _ = pool.handle.detach(id).await;
            }
        });
    }
}

/// Ends all claims of pools on devices that may be lvols of others: the pools are being closed.
pub async fn detach_all(engine: &Engine) {
    for pool in engine.devices.pools.list() {
        for device in pool.handle.status().externals {
            let detached = pool.handle.detach(device.parent.id).await;
            if detached.or_refuse().is_err() {
                return;
            }
        }
    }
}
