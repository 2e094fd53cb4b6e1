//! External parents of lvols: bdevs outside of the pool that its lvols read through ("show").
//! Claims them, also when they appear late, and gives the claims back when they go.
//!
//! ```text
//!   clone, set parent ──▶ read-only claim ──▶ the pool   until no lvol shows the bdev
//!   import, bdev appears ──▶ the same, for lvols that show it already
//!   bdev removed or cut ──▶ the pool gives the claim back       lvols are degraded
//! ```
//!
//! The pool records the UUID of the bdev, so it may come back under another name.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nacre_bdev::registry::Usage;
use nacre_bdev::{Bdev, Claim, Holder, Layer};
use nacre_bdev_pool::{Lvol, Outcome, PoolError};
use tracing::warn;
use uuid::Uuid;

use super::report::{report_back, report_lost};
use super::{OpenPool, cut};
use crate::bdev_modules;
use crate::plane::Plane;
use crate::refusal::Refusal;
use crate::rpc::RpcError;
use crate::rpc::error::Errno;
use crate::services::Engine;

/// Pause before the first retry of a claim, and the longest pause.
const FIRST_RETRY: Duration = Duration::from_millis(if cfg!(test) { 20 } else { 1000 });
const LAST_RETRY: Duration = Duration::from_secs(30);

/// Pairs of a pool and a bdev that are not settled yet.
#[derive(Debug, Default)]
pub(super) struct Pending {
    /// The claim failed, and a task retries it.
    retried: RefCell<BTreeSet<(Uuid, Uuid)>>,
    /// A command is about to make lvols of the pool depend on the bdev.
    commands: RefCell<Vec<(Uuid, Uuid)>>,
    /// The bdev, by name, is about to become a disk of the pool.
    additions: RefCell<Vec<(Uuid, String)>>,
}

/// Marks a bdev as about to become a disk of a pool, until it is dropped.
pub(crate) struct Addition {
    engine: Rc<Engine>,
    key: (Uuid, String),
}

impl Addition {
    /// Sets the mark. Call it before [`is_on_pool`], so that a command that would close a circle of
    /// dependencies meanwhile sees it.
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

/// The claim of a bdev for a command that is about to use it.
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
    /// Passes the claim to a command and waits for its end. If the bdev was removed meanwhile, the
    /// pool gives the claim back.
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

/// Makes an lvol whose external parent is the bdev.
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

/// The RPC error for an error of the pool; `field` is the parameter that names the bdev.
pub(super) fn refused(error: PoolError, field: &str) -> RpcError {
    match error {
        PoolError::Unfit { why, .. } => RpcError::errno(Errno::EINVAL, why).field(field),
        error => error.refusal(),
    }
}

/// Claims a bdev read-only for lvols of a pool. Refuses a bdev that depends on the same pool.
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
    if engine.devices.pools.cut.has(&layer) {
        let cause = format!("\"{bdev}\" has lost blocks that lvols show");
        return Err(RpcError::errno(Errno::EINVAL, cause)
            .field(field)
            .remedy(cut::REMEDY));
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

/// True if the bdev is an lvol of the pool, or depends on one through disks or external parents.
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

/// The UUIDs of the bdevs that lvols of a pool show, or are about to.
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

/// Claims the present bdevs that lvols of an open pool show.
pub async fn attach_present(engine: &Rc<Engine>, pool: &Rc<OpenPool>) {
    for device in pool.handle.status().externals {
        if !device.is_present {
            attach_or_retry(engine, pool, device.parent.id).await;
        }
    }
}

/// The reason that a bdev was not claimed.
enum NotAttached {
    /// A reason that may pass.
    Now(String),
    Never(String),
}

/// Claims a bdev for the lvols that show it. After a failure that may pass, starts a task that
/// retries. True if it was claimed now.
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

/// Retries the claim until it succeeds, fails for good, or is not needed any more.
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
                report_back(engine, pool, device);
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
    if engine.devices.pools.cut.has(&layer) {
        let remedy = cut::REMEDY;
        return Err(never(format!(
            "it has lost blocks that lvols show: {remedy}"
        )));
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

/// A bdev appeared, or has another size: claims it for lvols that show it.
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
            report_back(engine, &pool, id);
        }
    }
}

/// A bdev was removed: pools give their claims back, and lvols that show it are degraded.
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
                // Another removal may have reported it.
                if !pool.handle.status().external_claims.contains(&id) {
                    continue;
                }
                report_lost(&engine, &pool, &name, id, "was removed");
                // A pool that closes has no claim.
                let _ = pool.handle.detach_gone(id).await;
            }
        });
    }
}

/// Ends the claims of all pools on external parents, before the pools are closed: the bdevs may be
/// lvols of other pools.
pub async fn detach_all(engine: &Engine) {
    for pool in engine.devices.pools.list() {
        for device in pool.handle.status().external_claims {
            // A pool that is closed already has no claim.
            let _ = pool.handle.detach(device).await;
        }
    }
}
