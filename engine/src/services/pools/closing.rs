//! Closes pools: by command, when a disk is removed, and at the end of the daemon.

use std::rc::Rc;

use futures_util::future::join_all;
use nacre_bdev::registry::Removal;
use nacre_bdev_pool::{Command, Outcome, PoolError};
use tracing::{info, warn};
use uuid::Uuid;

use super::{Late, OpenPool, Pools, external, key, lvols_of, register_all};
use crate::refusal::Refusal;
use crate::rpc::RpcError;
use crate::rpc::error::Errno;
use crate::services::Engine;
use crate::services::lifecycle::Phase;
use crate::services::subsystems::remove_namespaces_on;
use crate::store::Change;

/// A pool that was closed because of a disk.
#[derive(Debug)]
pub(super) struct Gone {
    /// Name of the pool.
    pub pool: String,
    pub disk: String,
    pub why: GoneWhy,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum GoneWhy {
    /// The disk was removed.
    Removed,
    /// The disk may have lost writes: the daemon imports the pool again by itself.
    Interrupted,
}

impl Gone {
    fn refusal(&self) -> RpcError {
        let Self { pool, disk, why } = self;
        let (why, first) = match why {
            GoneWhy::Removed => ("went away", "attach the disk again"),
            GoneWhy::Interrupted => ("lost its connection", "make the disk reachable"),
        };
        let remedy =
            format!("{first}, and the daemon imports the pool; or forget the pool: pool_export");
        let cause = format!("pool \"{pool}\" is closed: its disk \"{disk}\" {why}");
        RpcError::errno(Errno::ENODEV, cause)
            .field("pool")
            .remedy(remedy)
    }
}

impl Pools {
    /// The UUID of a pool by its name, if it was closed because a disk was removed.
    fn gone_id(&self, name: &str) -> Option<Uuid> {
        let gone = self.gone.borrow();
        let found = gone.iter().find(|(_, gone)| gone.pool == name);
        found.map(|(id, _)| *id)
    }

    /// The error for a pool that is not open.
    pub(super) fn not_open(&self, name: &str) -> RpcError {
        let id = Uuid::parse_str(name).ok().or_else(|| self.gone_id(name));
        let gone = self.gone.borrow();
        if let Some(gone) = id.and_then(|id| gone.get(&id)) {
            return gone.refusal();
        }
        RpcError::errno(Errno::ENODEV, format!("there is no open pool \"{name}\""))
            .field("pool")
            .remedy("pool_list lists them; pool_import opens one")
    }
}

/// Removes the bdev of an lvol that nothing uses, and waits until its queues are closed.
pub async fn withdraw(engine: &Engine, name: &str) -> Result<(), RpcError> {
    let ticket = engine.plane()?.bdevs.remove(name, Removal::IfUnused);
    let ticket = ticket.map_err(|error| {
        error
            .refusal()
            .remedy("remove its namespaces and the devices on it first")
    })?;
    let late = |_| {
        let cause = format!("queues of \"{name}\" are still open");
        RpcError::errno(Errno::ETIMEDOUT, cause).remedy("try again a little later")
    };
    let patience = engine.devices.pools.patience.get();
    tokio::time::timeout(patience, ticket).await.map_err(late)
}

/// Closes a pool of which no lvol is in use, and removes its journal record. A pool that is not
/// open is only removed from the journal.
pub async fn close(engine: &Rc<Engine>, name: &str, end: Command) -> Result<(), RpcError> {
    let pools = &engine.devices.pools;
    let _one = pools.changing.lock().await;
    let Ok(pool) = pools.find(name) else {
        // An import that failed is forgotten, and a pool whose disk went away.
        let id = Uuid::parse_str(name).ok().or_else(|| pools.gone_id(name));
        pools.lost.borrow_mut().retain(|_, lost| Some(*lost) != id);
        pools.gone.borrow_mut().retain(|gone, _| Some(*gone) != id);
        let record = id.map(key);
        let record = record.filter(|key| engine.journal.find(key).is_some());
        let Some(key) = record else {
            return pools.find(name).map(drop);
        };
        return engine.journal.commit(Change::remove(key)).await;
    };
    if pool.is_closing.get() {
        return Err(late(&pool));
    }
    let plane = engine.plane()?;
    for lvol in lvols_of(&plane, pool.handle.id()) {
        let info = lvol.info();
        if let Ok(listed) = plane.bdevs.get(&info.id.to_string())
            && let Some((holder, _)) = listed.claims.first()
        {
            let cause = format!("\"{}\" is used by {holder}", info.name);
            return Err(RpcError::errno(Errno::EBUSY, cause)
                .field("pool")
                .remedy("remove the namespaces and devices on its volumes first"));
        }
    }
    let closed = close_one(engine, &pool, end).await;
    if closed.is_err() && !pool.is_deleted.get() {
        return closed;
    }
    let change = Change::remove(key(pool.handle.id()));
    engine.journal.commit(change).await?;
    closed
}

/// Removes the bdevs of a pool and ends its keeper by the command `end`. `ETIMEDOUT` if the keeper
/// does not end in time; the close goes on then.
pub(super) async fn close_one(
    engine: &Rc<Engine>,
    pool: &Rc<OpenPool>,
    end: Command,
) -> Result<(), RpcError> {
    let (plane, patience) = (engine.plane()?, engine.devices.pools.patience.get());
    let id = pool.handle.id();
    let mut tickets = Vec::new();
    for lvol in lvols_of(&plane, id) {
        let name = lvol.info().id.to_string();
        drop(lvol);
        for subsystem in plane.target.subsystems() {
            if engine.lifecycle.phase() == Phase::Stopping {
                subsystem.bdev_removed(&name);
            } else {
                // They return with the pool.
                remove_namespaces_on(engine, &subsystem, &name);
            }
        }
        tickets.extend(plane.bdevs.remove(&name, Removal::Hot).ok());
    }
    if tokio::time::timeout(patience, join_all(tickets))
        .await
        .is_err()
    {
        warn!(pool = pool.name(), "queues on its volumes are still open");
    }
    let forgets = is_export(&end);
    let handle = pool.handle.clone();
    let mut closing = Box::pin(async move { handle.run(end).await });
    if let Ok(closed) = tokio::time::timeout(patience, &mut closing).await {
        return close_ended(engine, pool, closed, forgets).await;
    }
    pool.is_closing.set(true);
    let refusal = late(pool);
    let (engine, pool) = (Rc::clone(engine), Rc::clone(pool));
    tokio::task::spawn_local(async move {
        let closed = closing.await;
        let _one = engine.devices.pools.changing.lock().await;
        pool.is_closing.set(false);
        let ended = close_ended(&engine, &pool, closed, forgets).await;
        let is_gone = ended.is_ok() || pool.is_deleted.get();
        if let Err(error) = ended {
            warn!(pool = pool.name(), %error, "the pool was not closed as asked");
        }
        if forgets
            && is_gone
            && let Err(error) = engine.journal.commit(Change::remove(key(id))).await
        {
            warn!(%id, %error, "the next start imports a closed pool");
        }
    });
    Err(refusal)
}

/// The error of a close that waits for disks.
fn late(pool: &OpenPool) -> RpcError {
    let disks = pool.handle.late_disks();
    let refusal = Late::Close.refusal();
    if disks.is_empty() {
        return refusal;
    }
    let disks = disks.join("\", \"");
    refusal.cause(format!(
        "the pool's keeper does not end: no answer from \"{disks}\""
    ))
}

fn is_export(end: &Command) -> bool {
    matches!(end, Command::Close { export: true } | Command::Destroy)
}

/// Handles the result of a closing command: the pool is gone, or open again.
async fn close_ended(
    engine: &Rc<Engine>,
    pool: &Rc<OpenPool>,
    closed: Result<Outcome, PoolError>,
    exports: bool,
) -> Result<(), RpcError> {
    match closed {
        Err(left @ PoolError::NotErased { .. }) => {
            pool.is_deleted.set(true);
            forget(engine, pool);
            warn!(pool = pool.name(), error = %left, "a deleted pool");
            Err(left.refusal())
        }
        Ok(_) | Err(PoolError::Closed) => {
            forget(engine, pool);
            if exports && closed.is_err() {
                let cause = "the pool was closed, but not exported: its disk went away";
                return Err(RpcError::errno(Errno::ENODEV, cause)
                    .field("pool")
                    .remedy("import it when the disk is back, then export it"));
            }
            Ok(())
        }
        Err(refused) => {
            // The pool is open without devices: they come back.
            register_all(engine, pool).await?;
            Err(refused.refusal())
        }
    }
}

/// Removes a closed pool from the list.
fn forget(engine: &Engine, pool: &Rc<OpenPool>) {
    // The pool may be open a second time: its disk returned meanwhile.
    let mut open = engine.devices.pools.open.borrow_mut();
    let id = pool.handle.id();
    if open.get(&id).is_some_and(|other| Rc::ptr_eq(other, pool)) {
        open.remove(&id);
    }
}

/// A disk of a pool was removed: closes the pool, and notes it as lost.
pub fn disk_gone(engine: &Rc<Engine>, disk: &str) {
    let pools = engine.devices.pools.list();
    let is_on = |pool: &Rc<OpenPool>| pool.handle.bases().iter().any(|base| base == disk);
    let Some(pool) = pools.into_iter().find(is_on) else {
        return;
    };
    let (engine, disk) = (Rc::clone(engine), disk.to_owned());
    tokio::task::spawn_local(async move {
        let pools = &engine.devices.pools;
        let _one = pools.changing.lock().await;
        let (name, id) = (pool.name(), pool.handle.id());
        warn!(pool = name, disk, "the disk went away: the pool is closed");
        let text = format!("pool \"{name}\": its disk {disk} went away");
        let facts = serde_json::json!({ "id": id, "disk": disk });
        engine.notes.report("pool_lost", name.clone(), text, facts);
        // This also ends an export that still waits for the disk.
        if let Err(error) = close_one(&engine, &pool, Command::Close { export: false }).await {
            warn!(disk, %error, "a pool without its disk is not closed yet");
        }
        let gone = Gone {
            pool: name,
            disk,
            why: GoneWhy::Removed,
        };
        note_gone(&engine, id, gone);
    });
}

/// Notes a pool that is closed, and is imported again when its disk appears. Returns false if the
/// journal does not have the pool.
pub(super) fn note_gone(engine: &Engine, id: Uuid, gone: Gone) -> bool {
    if engine.journal.find(&key(id)).is_none() {
        return false;
    }
    let pools = &engine.devices.pools;
    engine.journal.restored(&key(id), Err(gone.refusal()));
    pools.lost.borrow_mut().insert(gone.disk.clone(), id);
    pools.gone.borrow_mut().insert(id, gone);
    true
}

/// Closes all pools, after the hosts have disconnected.
pub async fn close_all(engine: &Rc<Engine>) {
    external::detach_all(engine).await;
    for pool in engine.devices.pools.list() {
        let name = pool.name();
        match close_one(engine, &pool, Command::Close { export: false }).await {
            Ok(()) => info!(pool = name, "closed"),
            Err(error) => {
                warn!(pool = name, %error, "not closed in order: the next import replays its log")
            }
        }
    }
}
