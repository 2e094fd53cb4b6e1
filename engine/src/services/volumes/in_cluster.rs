//! Volumes of a cluster: [`crate::services::cluster`] says when this node opens and closes them.
//! While a volume is not open here, hosts see its placeholder, and its listeners are inaccessible.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nacre_bdev::registry::{DeleteTicket, Removal};
use nacre_bdev_replica::model::VolumeRecord;
use nacre_bdev_replica::store::VolumeStore;
use nacre_nvmf_wire::Nqn;
use tracing::warn;
use uuid::Uuid;

use super::lifecycle::{end_control, replay_waiting, shut, stopping, try_open, wait_for_queues};
use super::{Entry, Opened, Volumes, events, frozen};
use crate::plane::Plane;
use crate::rpc::RpcError;
use crate::services::engine::Engine;
use crate::services::subsystems::bdev_gone;

/// Time for the commands in flight before a volume closes, and between two looks at them.
const SETTLE: Duration = Duration::from_secs(2);
const MOMENT: Duration = Duration::from_millis(5);

impl Volumes {
    /// The store of the cluster, and the id of this node.
    pub(in crate::services) fn join(&self, store: Arc<dyn VolumeStore>, node: Uuid) {
        self.store.replace(Some(store));
        self.holder.set(node);
        self.untried.borrow_mut().insert(Uuid::nil());
    }

    fn set_standby(&self, id: Uuid, is_standby: bool) {
        if let Some(entry) = self.entries.borrow_mut().get_mut(&id) {
            entry.is_standby = is_standby;
        }
    }

    /// The volumes that this node shows have their subsystems: hosts may connect. A host that
    /// connects earlier would be refused for good.
    pub(in crate::services) fn are_shown(&self) {
        self.untried.borrow_mut().clear();
        self.tried.notify_waiters();
    }
}

/// Gives the volume the stored record. An open volume is the record's author.
pub(in crate::services) async fn know(engine: &Rc<Engine>, record: VolumeRecord) {
    let id = record.id;
    let is_other = {
        let mut entries = engine.volumes.entries.borrow_mut();
        let entry = entries
            .entry(id)
            .or_insert_with(|| Entry::new(record.clone()));
        let shape = |record: &VolumeRecord| (record.blocks, record.limits, record.name.clone());
        let is_other = entry.open.is_none() && shape(&entry.record) != shape(&record);
        entry.record = record;
        entry.is_standby = entry.open.is_none();
        is_other
    };
    let Ok(plane) = engine.plane() else { return };
    if is_other && let Err(error) = frozen::withdraw(engine, &plane, id, Removal::Hot).await {
        warn!(volume = %id, %error, "its placeholder is still in use");
    }
    frozen::show(engine, id).await;
}

/// Shows the placeholder of a volume that is not open, unless it is shown.
pub(in crate::services) async fn show(engine: &Rc<Engine>, id: Uuid) {
    frozen::show(engine, id).await;
}

/// Opens the volume, of which this node is the holder.
pub(in crate::services) async fn open(engine: &Rc<Engine>, id: Uuid) -> Result<(), RpcError> {
    engine.volumes.set_standby(id, false);
    let outcome = try_open(engine, id).await;
    let is_open = engine.volumes.opened(&id.to_string()).is_ok();
    engine.volumes.set_standby(id, !is_open);
    match outcome {
        Some(Ok(_)) => {
            replay_waiting(engine).await;
            Ok(())
        }
        Some(Err(refused)) => {
            frozen::show(engine, id).await;
            Err(refused)
        }
        None if is_open => Ok(()),
        None => Err(stopping()),
    }
}

/// Closes the volume in order, so that another node can open it without a copy.
pub(in crate::services) async fn close(engine: &Rc<Engine>, id: Uuid) -> Result<(), RpcError> {
    close_as(engine, id, async |plane, opened| {
        settle(plane, &opened.bdev).await;
        let ticket = take_away(engine, plane, opened);
        shut(opened, ticket).await
    })
    .await
}

/// Closes the volume, which another node may hold by now: hosts are disconnected first. A command
/// that waits in a socket must not be executed if this node opens the volume again.
pub(in crate::services) async fn drop_open(engine: &Rc<Engine>, id: Uuid, nqn: Option<&str>) {
    let dropped = close_as(engine, id, async |plane, opened| {
        disconnect(plane, nqn);
        // The control before the queues: it ends the answers that wait for the lease. The first
        // attempt may end with the store's news that another node has the volume.
        let mut ended = end_control(opened).await;
        if ended.is_err() {
            ended = end_control(opened).await;
        }
        let ticket = take_away(engine, plane, opened);
        wait_for_queues(opened, ticket).await;
        ended
    });
    if let Err(error) = dropped.await {
        warn!(volume = %id, %error, "dropped, and its control has not ended in order");
    }
}

/// Closes the volume by `work`, if it is open, and shows its placeholder.
async fn close_as(
    engine: &Rc<Engine>,
    id: Uuid,
    work: impl AsyncFnOnce(&Plane, &Opened) -> Result<(), RpcError>,
) -> Result<(), RpcError> {
    let lock = {
        let entries = engine.volumes.entries.borrow();
        entries.get(&id).map(|entry| Rc::clone(&entry.lock))
    };
    let Some(lock) = lock else { return Ok(()) };
    let closed = {
        let _one = lock.lock().await;
        let opened = {
            let entries = engine.volumes.entries.borrow();
            entries.get(&id).and_then(|entry| entry.open.clone())
        };
        let Some(opened) = opened else { return Ok(()) };
        let closed = work(&*engine.plane()?, &opened).await;
        if let Some(entry) = engine.volumes.entries.borrow_mut().get_mut(&id) {
            entry.open = None;
            entry.prepared = None;
            entry.is_standby = true;
        }
        closed
    };
    frozen::show(engine, id).await;
    closed
}

/// Removes the volume's bdev, and its namespaces.
fn take_away(engine: &Engine, plane: &Plane, opened: &Opened) -> Option<DeleteTicket> {
    let ticket = plane.bdevs.remove(&opened.bdev, Removal::Hot).ok();
    // Now, not when the event is handled: the placeholder gets the name.
    bdev_gone(engine, plane, &opened.bdev);
    events::poll_queues(plane);
    ticket
}

/// Waits for the commands in flight. The listeners refuse new ones by their ANA state.
async fn settle(plane: &Plane, bdev: &str) {
    let Some(stats) = plane.bdevs.stats(bdev) else {
        return;
    };
    let end = tokio::time::Instant::now() + SETTLE;
    let mut quiet_looks = 0;
    while quiet_looks < 3 && tokio::time::Instant::now() < end {
        tokio::time::sleep(MOMENT).await;
        quiet_looks = if stats.inflight() == 0 {
            quiet_looks + 1
        } else {
            0
        };
    }
}

fn disconnect(plane: &Plane, nqn: Option<&str>) {
    let nqn = nqn.and_then(|nqn| Nqn::new(nqn).ok());
    if let Some(subsystem) = nqn.and_then(|nqn| plane.target.subsystem(&nqn).ok()) {
        subsystem.disconnect_hosts();
    }
}

/// The volume was deleted.
pub(in crate::services) async fn forget(engine: &Rc<Engine>, id: Uuid) {
    if let Err(error) = close(engine, id).await {
        warn!(volume = %id, %error, "deleted, and not closed in order");
    }
    let Ok(plane) = engine.plane() else { return };
    engine.volumes.set_going(id, true);
    if let Err(error) = frozen::withdraw(engine, &plane, id, Removal::Hot).await {
        warn!(volume = %id, %error, "its placeholder is still in use");
    }
    engine.volumes.entries.borrow_mut().remove(&id);
}
