//! Devices outside of a pool that its lvols show: claims, and devices that come late or go.
//!
//! ```text
//!   clone, set parent ──▶ read-only claim ──▶ the pool   until no lvol shows the device
//!   import, device appears ──▶ the same, for lvols that show it already
//!   device goes ──▶ the pool gives the claim back        lvols are degraded
//! ```
//!
//! The pool records the UUID of the device, so the device may come back under another name.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nacre_bdev::registry::Usage;
use nacre_bdev::{Bdev, Claim, Holder, Layer};
use nacre_bdev_pool::{Lvol, Outcome, PoolError};
use tracing::{info, warn};
use uuid::Uuid;

use super::OpenPool;
use crate::bdev_modules;
use crate::plane::Plane;
use crate::refusal::Refusal;
use crate::rpc::RpcError;
use crate::rpc::error::Errno;
use crate::services::Engine;

/// The first wait before a device is claimed again, and the longest.
const FIRST_RETRY: Duration = Duration::from_millis(if cfg!(test) { 20 } else { 1000 });
const LAST_RETRY: Duration = Duration::from_secs(30);

/// Devices that have no claim yet, each with the pool that needs it.
#[derive(Debug, Default)]
pub(super) struct Pending {
    /// A claim that failed is tried again.
    retried: RefCell<BTreeSet<(Uuid, Uuid)>>,
    /// A command is about to make the pool depend on the device.
    commands: RefCell<Vec<(Uuid, Uuid)>>,
    /// Devices that are about to become disks of the pool, by name.
    additions: RefCell<Vec<(Uuid, String)>>,
}

/// The addition of a disk to a pool, in progress.
pub(crate) struct Addition {
    engine: Rc<Engine>,
    key: (Uuid, String),
}

impl Addition {
    /// Begins it, before the check for a circle: a command that makes a circle together with it
    /// sees it.
    pub(crate) fn begin(engine: &Rc<Engine>, pool: Uuid, disk: &str) -> Self {
        let key = (pool, disk.to_owned());
        let additions = &engine.devices.pools.external.additions;
        additions.borrow_mut().push(key.clone());
        let engine = Rc::clone(engine);
        Self { engine, key }
    }
}

impl Drop for Addition {
    fn drop(&mut self) {
        let mut additions = self.engine.devices.pools.external.additions.borrow_mut();
        if let Some(at) = additions.iter().position(|key| *key == self.key) {
            additions.swap_remove(at);
        }
    }
}

/// A device that a command is about to use.
pub(super) struct Use {
    engine: Rc<Engine>,
    key: (Uuid, Uuid),
    layer: Arc<Layer>,
    claim: Option<Claim>,
}

impl Drop for Use {
    fn drop(&mut self) {
        let mut commands = self.engine.devices.pools.external.commands.borrow_mut();
        if let Some(at) = commands.iter().position(|key| *key == self.key) {
            commands.swap_remove(at);
        }
    }
}

impl Use {
    /// Passes the claim to a command, and waits for its end. A device that was removed before the
    /// pool had it is given back.
    pub(super) async fn of<Work>(
        mut self,
        pool: &OpenPool,
        work: impl FnOnce(Claim) -> Work,
    ) -> Result<Outcome, PoolError>
    where
        Work: Future<Output = Result<Outcome, PoolError>>,
    {
        let claim = self.claim.take().ok_or(PoolError::Closed)?;
        let done = work(claim).await;
        if self.layer.is_gone() {
            let _ = pool.handle.detach_gone(self.layer.uuid()).await;
        }
        done
    }
}

/// Makes a volume that shows a device.
pub async fn clone_bdev(
    engine: &Rc<Engine>,
    pool: &OpenPool,
    (field, bdev): (&str, &str),
    id: Uuid,
    name: String,
) -> Result<(), RpcError> {
    let device = claim(engine, pool, (field, bdev))?;
    let made = device.of(pool, |claim| pool.handle.clone_external(claim, id, name));
    let made = made.await;
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
    engine: &Rc<Engine>,
    pool: &OpenPool,
    (field, bdev): (&str, &str),
) -> Result<Use, RpcError> {
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
    let claim = claimed.map_err(|error| error.refusal().field(field))?;
    let key = (pool.handle.id(), layer.uuid());
    let commands = &engine.devices.pools.external.commands;
    commands.borrow_mut().push(key);
    Ok(Use {
        engine: Rc::clone(engine),
        key,
        layer,
        claim: Some(claim),
    })
}

fn holder(pool: &OpenPool) -> Holder {
    Holder::User(format!("lvols of pool \"{}\" that show it", pool.name()))
}

/// True for a device that an lvol of a pool is below: as a disk, or as a device that lvols show.
pub(super) fn is_on_pool(engine: &Engine, plane: &Plane, layer: &Layer, pool: Uuid) -> bool {
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
                    let additions = engine.devices.pools.external.additions.borrow();
                    let additions = additions.iter().filter(|(of, _)| *of == lvol.pool());
                    left.extend(additions.map(|(_, disk)| disk.clone()));
                    left.extend(shown(engine, lvol.pool()).map(|device| device.to_string()));
                }
                None => left.extend(layer.module().bases()),
            }
        }
        seen.push(name);
    }
    false
}

/// The devices that lvols of a pool show, or are about to.
fn shown(engine: &Engine, pool: Uuid) -> impl Iterator<Item = Uuid> {
    let status = engine
        .devices
        .pools
        .of(pool)
        .map(|pool| pool.handle.status());
    let (externals, claims) = status.map_or_else(
        |_| Default::default(),
        |status| (status.externals, status.external_claims),
    );
    let commands = engine.devices.pools.external.commands.borrow();
    let commands = commands.iter().filter(|(of, _)| *of == pool);
    let commands: Vec<Uuid> = commands.map(|(_, device)| *device).collect();
    let externals = externals.into_iter().map(|device| device.parent.id);
    externals.chain(claims).chain(commands)
}

/// Gives an open pool the devices that its lvols show, as far as they are there.
pub async fn attach_present(engine: &Rc<Engine>, pool: &Rc<OpenPool>) {
    for device in pool.handle.status().externals {
        if !device.is_present {
            attach_or_retry(engine, pool, device.parent.id).await;
        }
    }
}

/// The reason that a device is not claimed.
enum NotAttached {
    /// It may be claimed later.
    Now(String),
    Never(String),
}

/// Gives a pool a device that its lvols show. A reason that may pass is not the last word: as long
/// as the device is there, it is claimed again and again.
async fn attach_or_retry(engine: &Rc<Engine>, pool: &Rc<OpenPool>, device: Uuid) -> bool {
    let why = match attach(engine, pool, device).await {
        Ok(()) => return true,
        Err(NotAttached::Never(why)) => {
            warn!(pool = pool.name(), %device, why, "lvols lack a device that they show");
            return false;
        }
        Err(NotAttached::Now(why)) => why,
    };
    warn!(pool = pool.name(), %device, why, "lvols lack a device that they show");
    let key = (pool.handle.id(), device);
    let retried = &engine.devices.pools.external.retried;
    if retried.borrow_mut().insert(key) {
        let (engine, pool) = (Rc::clone(engine), Rc::clone(pool));
        tokio::task::spawn_local(async move {
            retry(&engine, &pool, device).await;
            let retried = &engine.devices.pools.external.retried;
            retried.borrow_mut().remove(&key);
        });
    }
    false
}

/// Claims a device until it has succeeded, or the device, the pool or the need for it has gone.
async fn retry(engine: &Rc<Engine>, pool: &Rc<OpenPool>, device: Uuid) {
    let mut wait = FIRST_RETRY;
    loop {
        tokio::time::sleep(wait).await;
        wait = (2 * wait).min(LAST_RETRY);
        let open = engine.devices.pools.of(pool.handle.id());
        let is_open = open.is_ok_and(|open| Rc::ptr_eq(&open, pool));
        let mut externals = pool.handle.status().externals.into_iter();
        let is_missing = externals.any(|of| of.parent.id == device && !of.is_present);
        if !is_open || !is_missing {
            return;
        }
        match attach(engine, pool, device).await {
            Ok(()) => {
                info!(pool = pool.name(), %device, "lvols show a device again");
                return;
            }
            Err(NotAttached::Now(_)) => {}
            Err(NotAttached::Never(why)) => {
                warn!(pool = pool.name(), %device, why, "lvols lack a device that they show");
                return;
            }
        }
    }
}

async fn attach(engine: &Rc<Engine>, pool: &OpenPool, device: Uuid) -> Result<(), NotAttached> {
    let never = |why: String| NotAttached::Never(why);
    let plane = engine.plane().map_err(|error| never(error.to_string()))?;
    let name = device.to_string();
    // It gets another try when it appears.
    let layer = plane.bdevs.lookup(&name);
    let layer = layer.ok_or_else(|| never(format!("there is no bdev \"{name}\"")))?;
    if is_on_pool(engine, &plane, &layer, pool.handle.id()) {
        return Err(never("it depends on an lvol of the same pool".to_owned()));
    }
    let claim = plane.bdevs.claim(&name, holder(pool), Usage::ReadOnly);
    let claim = claim.map_err(|error| NotAttached::Now(error.to_string()))?;
    let attached = pool.handle.attach(claim).await;
    if layer.is_gone() {
        // It was removed before the pool had it.
        let _ = pool.handle.detach_gone(device).await;
    }
    attached.map_err(|error| match error {
        PoolError::Unfit { .. } | PoolError::Unknown { .. } | PoolError::Closed => {
            never(error.to_string())
        }
        _ => NotAttached::Now(error.to_string()),
    })
}

/// A device appeared, or has another size: lvols that show it get it.
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
        let is_needed = missing.any(|device| device.parent.id == id);
        if is_needed && attach_or_retry(engine, &pool, id).await {
            info!(pool = pool.name(), bdev = name, "lvols show a device again");
        }
    }
}

/// A device goes: its claims end, and lvols that show it are degraded.
pub fn device_gone(engine: &Rc<Engine>, name: &str) {
    for pool in engine.devices.pools.list() {
        let ids = pool.handle.status().external_claims;
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
                let _ = pool.handle.detach_gone(id).await;
            }
        });
    }
}

/// Ends all claims of pools on devices that may be lvols of others: the pools are being closed.
pub async fn detach_all(engine: &Engine) {
    for pool in engine.devices.pools.list() {
        for device in pool.handle.status().external_claims {
            // A pool that is closed already has no claim.
            let _ = pool.handle.detach(device).await;
        }
    }
}
