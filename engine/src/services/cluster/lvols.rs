//! The lvols that this node makes and deletes for replicas, as the keys of its exports demand
//! ([`super::exports`]).
//!
//! ```text
//!   want there, with a place   lvol missing: create it ▸ too small: enlarge it ▸ device exported
//!   want gone                  namespace removed ▸ lvol deleted ▸ the export's key deleted
//! ```
//!
//! The UUID of an lvol is derived from that of the replica. So a node that crashed in between finds
//! the lvol again, and never deletes an lvol that it did not make for the replica. A pool's disk
//! may not answer: each step is a task, and nothing waits for it.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use nacre_bdev::Bdev;
use nacre_bdev_pool::{Command, PoolError};
use nacre_cluster_core::ExportId;
use nacre_cluster_core::placement::lvol_of;
use nacre_cluster_node::{Export, PoolChoice};
use tokio::time::Instant;
use tracing::{info, warn};
use uuid::Uuid;

use super::Running;
use crate::refusal::OrRefuse;
use crate::rpc::RpcError;
use crate::rpc::error::Errno;
use crate::services::Engine;
use crate::services::pools;

/// The progress of creating or deleting a replica's lvol.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum LvolProgress {
    Done,
    Working,
    Failed(String),
}

/// The kind of a task. The result of one kind says nothing about the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Task {
    Make,
    Delete,
}

#[derive(Default)]
pub(super) struct Lvols {
    /// The last task of each replica, while it runs or after it has ended.
    tasks: RefCell<BTreeMap<ExportId, (Task, LvolProgress)>>,
    /// Since when the pools of replicas are not open.
    away: RefCell<BTreeMap<ExportId, Instant>>,
}

/// Time after which a pool that is not open counts as missing: the daemon may have just started.
pub(super) const OPENED: Duration = Duration::from_secs(60);

impl Lvols {
    /// Makes sure that the lvol exists and has the size of `place`. Returns the progress at once.
    pub(super) fn make(
        &self,
        engine: &Rc<Engine>,
        running: &Rc<Running>,
        id: ExportId,
        export: &Export,
        place: &PoolChoice,
    ) -> LvolProgress {
        let plane = engine.plane().ok();
        let device = plane.and_then(|plane| plane.bdevs.lookup(&export.device));
        if device.is_some_and(|device| device.geometry().bytes() >= place.bytes) {
            self.tasks.borrow_mut().remove(&id);
            self.away.borrow_mut().remove(&id);
            return LvolProgress::Done;
        }
        let pool = engine.devices.pools.find(&place.pool.to_string());
        if pool.is_err() && engine.journal.find(&pools::key(place.pool)).is_some() {
            // The daemon has just started, and opens its pools; or the disk is away.
            let now = Instant::now();
            let since = *self.away.borrow_mut().entry(id).or_insert(now);
            if now - since < OPENED {
                return LvolProgress::Working;
            }
            return LvolProgress::Failed(format!("the disk of pool {} is away", place.pool));
        }
        self.away.borrow_mut().remove(&id);
        if self.tasks.borrow().get(&id) == Some(&(Task::Make, LvolProgress::Done)) {
            self.tasks.borrow_mut().remove(&id);
            let why = format!("lvol {} has no device of its size yet", export.device);
            return LvolProgress::Failed(why);
        }
        let (engine, place, was_there) = (Rc::clone(engine), place.clone(), export.bytes > 0);
        self.run(running, id, Task::Make, async move {
            make_one(&engine, id, &place, was_there).await
        })
    }

    /// Makes sure that the lvol does not exist. Returns the progress at once.
    pub(super) fn delete(
        &self,
        engine: &Rc<Engine>,
        running: &Rc<Running>,
        id: ExportId,
        place: &PoolChoice,
    ) -> LvolProgress {
        let (engine, pool) = (Rc::clone(engine), place.pool);
        self.run(running, id, Task::Delete, async move {
            delete_one(&engine, id, pool).await
        })
    }

    /// Drops the state of exports that have ended.
    pub(super) fn retain(&self, exists: impl Fn(ExportId) -> bool) {
        self.tasks
            .borrow_mut()
            .retain(|id, (_, progress)| exists(*id) || *progress == LvolProgress::Working);
        self.away.borrow_mut().retain(|id, _| exists(*id));
    }

    /// Starts the work, unless a task of the export runs. Returns the result of the last task of
    /// this kind.
    fn run(
        &self,
        running: &Rc<Running>,
        id: ExportId,
        task: Task,
        work: impl Future<Output = Result<(), RpcError>> + 'static,
    ) -> LvolProgress {
        let last = match self.tasks.borrow().get(&id) {
            Some((_, LvolProgress::Working)) => return LvolProgress::Working,
            Some((of, last)) if *of == task => Some(last.clone()),
            _ => None,
        };
        if last == Some(LvolProgress::Done) {
            return LvolProgress::Done;
        }
        self.tasks
            .borrow_mut()
            .insert(id, (task, LvolProgress::Working));
        let running = Rc::clone(running);
        tokio::task::spawn_local(async move {
            let progress = match work.await {
                Ok(()) => LvolProgress::Done,
                Err(error) => LvolProgress::Failed(error.to_string()),
            };
            let is_done = progress == LvolProgress::Done;
            running
                .exports
                .lvols
                .tasks
                .borrow_mut()
                .insert(id, (task, progress));
            // What failed is tried again at the next look.
            if is_done {
                running.inbox.look_again();
            }
        });
        match last {
            Some(failed @ LvolProgress::Failed(_)) => failed,
            _ => LvolProgress::Working,
        }
    }
}

async fn make_one(
    engine: &Rc<Engine>,
    id: ExportId,
    place: &PoolChoice,
    was_there: bool,
) -> Result<(), RpcError> {
    let lvol = lvol_of(id.0);
    let pool = engine.devices.pools.find(&place.pool.to_string())?;
    let names = pool.list_names().await?;
    let Some(found) = names.iter().find(|one| one.id == lvol) else {
        if was_there {
            // An empty one in its place would look like a replica that has lost its data.
            let cause = format!("lvol {lvol} is gone from pool \"{}\"", pool.name());
            return Err(RpcError::errno(Errno::ENODEV, cause)
                .remedy("replace the replica: volume_replace_replica"));
        }
        let (name, thick) = (format!("replica-{}", id.0), !place.thin);
        pool.run(match place.source {
            None => Command::Create {
                id: lvol,
                name,
                bytes: place.bytes,
                thick,
            },
            Some(source) => Command::Clone {
                source,
                id: lvol,
                name,
                thick,
            },
        })
        .await?;
        if let Some(source) = names.iter().find(|one| Some(one.id) == place.source)
            && source.bytes < place.bytes
        {
            let bytes = place.bytes;
            pool.run(Command::Resize { lvol, bytes }).await?;
        }
        pools::register_new(engine, &pool, lvol).await?;
        info!(%lvol, pool = pool.name(), "made for a replica of a volume of the cluster");
        return Ok(());
    };
    let size = found.bytes;
    if engine.plane()?.bdevs.lookup(&lvol.to_string()).is_none() {
        pools::register_new(engine, &pool, lvol).await?;
    }
    if size < place.bytes {
        let (pool, lvol) = pools::find_lvol(engine, "lvol", &lvol.to_string())?;
        pools::resize(engine, &pool, &lvol, place.bytes).await?;
    }
    Ok(())
}

async fn delete_one(engine: &Rc<Engine>, id: ExportId, pool: Uuid) -> Result<(), RpcError> {
    let lvol = lvol_of(id.0);
    if let Ok((pool, found)) = pools::find_lvol(engine, "lvol", &lvol.to_string()) {
        pools::delete(engine, &pool, found).await?;
        info!(%lvol, pool = pool.name(), "deleted: its replica is no more");
        return Ok(());
    }
    match engine.devices.pools.find(&pool.to_string()) {
        // The lvol has no device, or was never made.
        Ok(pool) => match pool.handle.run(Command::Delete { lvol }).await {
            Ok(_) | Err(PoolError::Unknown { .. }) => Ok(()),
            Err(refused) => Err(refused).or_refuse(),
        },
        Err(refused) if engine.journal.find(&pools::key(pool)).is_some() => Err(refused),
        // The pool is this daemon's no more.
        Err(_) => {
            warn!(%lvol, %pool, "the pool of a former replica is gone, and the lvol with it");
            Ok(())
        }
    }
}
