//! Pools whose disk may have lost writes that were not flushed, because its connection was lost or
//! the drive was another one for a while: the daemon opens such a pool again, as after a crash.
//!
//! ```text
//!   interrupted ─▶ lvols removed ▸ keeper ended ─▶ import ── failed ─▶ pause, then again
//!                                                     └──▶ lvols and their users return
//! ```

use std::rc::Rc;
use std::time::Duration;

use nacre_bdev_pool::{Command, PoolState};
use tracing::{error, info, warn};
use uuid::Uuid;

use super::closing::{Gone, GoneWhy, close_one, note_gone};
use super::{ImportRequest, OpenPool, disks, import_one, key, replay};
use crate::services::Engine;
use crate::services::lifecycle::Phase;

/// The pause before another attempt: the first one, and the longest.
const PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// Begins to open a pool again if it is interrupted. Returns true if it is.
pub(super) fn look(engine: &Rc<Engine>, pool: &Rc<OpenPool>) -> bool {
    let is_interrupted = pool.handle.status().state == PoolState::Interrupted;
    if is_interrupted {
        let (engine, pool) = (Rc::clone(engine), Rc::clone(pool));
        tokio::task::spawn_local(reopen(engine, pool));
    }
    is_interrupted
}

async fn reopen(engine: Rc<Engine>, pool: Rc<OpenPool>) {
    let disk = pool.handle.interrupted_by().unwrap_or_default();
    let (name, id) = (pool.name(), pool.handle.id());
    {
        let _one = engine.devices.pools.changing.lock().await;
        let cause = "lost its connection, and perhaps writes that were not flushed";
        error!(
            pool = name,
            disk, "the disk {cause}: the pool is opened again"
        );
        let text = format!("pool \"{name}\": its disk {disk} {cause}; the pool is opened again");
        let facts = serde_json::json!({ "id": id, "disk": disk });
        let notes = &engine.notes;
        notes.report("pool_interrupted", name.clone(), text, facts);
        if let Err(error) = close_one(&engine, &pool, Command::Close { export: false }).await {
            warn!(pool = name, %error, "an interrupted pool is not closed yet");
        }
        let why = GoneWhy::Interrupted;
        let gone = Gone {
            pool: name.clone(),
            disk: disk.clone(),
            why,
        };
        if !note_gone(&engine, id, gone) {
            return;
        }
    }
    drop(pool);
    let mut pause = PAUSE;
    while !import_again(&engine, &disk, id).await {
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// Imports the pool. Returns false if that failed, and another attempt makes sense.
async fn import_again(engine: &Rc<Engine>, disk: &str, id: Uuid) -> bool {
    let pools = &engine.devices.pools;
    let _one = pools.changing.lock().await;
    if engine.lifecycle.phase() != Phase::Runtime {
        return true;
    }
    let is_closing = |pool: &Rc<OpenPool>| pool.handle.id() == id && pool.is_closing.get();
    if pools.list().iter().any(is_closing) {
        return false;
    }
    // Forgotten, or imported by a command.
    let is_gone = pools.gone.borrow().contains_key(&id);
    if !is_gone || engine.journal.find(&key(id)).is_none() {
        return true;
    }
    let Ok(plane) = engine.plane() else {
        return true;
    };
    if plane.bdevs.lookup(disk).is_none() {
        // The pool is imported when the disk appears.
        return true;
    }
    let wanted = ImportRequest {
        id: Some(id),
        known: disks::known(engine, id),
        ..ImportRequest::default()
    };
    match import_one(engine, disk, wanted).await {
        Ok(pool) => {
            info!(
                pool = pool.name(),
                disk, "an interrupted pool is open again"
            );
            replay(engine);
            true
        }
        Err(error) => {
            warn!(disk, %error, "an interrupted pool is not imported yet");
            engine.journal.restored(&key(id), Err(error));
            false
        }
    }
}
