//! Volumes of a cluster: [`crate::services::cluster`] decides when this node opens and closes them.
//! A volume that is not open here is shown to hosts as a frozen bdev, and its listeners are
//! inaccessible (ANA).

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nacre_bdev::registry::{DeleteTicket, Removal};
use nacre_bdev::{Bdev, Layer};
use nacre_bdev_replica::model::{RESERVED, VolumeRecord};
use nacre_bdev_replica::store::VolumeStore;
use nacre_nvmf_wire::Nqn;
use tracing::warn;
use uuid::Uuid;

use super::lifecycle::{end_control, shut, stopping, try_open, wait_for_queues};
use super::{AbsentDevices, Membership, OpenedVolume, VolumeEntry, Volumes, events, frozen};
use crate::plane::Plane;
use crate::rpc::RpcError;
use crate::services::Engine;
use crate::services::deferred::replay_waiting;
use crate::services::subsystems::bdev_gone;

/// Time limit for the commands in flight before a volume closes, and polling interval meanwhile.
const IO_WAIT: Duration = Duration::from_secs(2);
const MOMENT: Duration = Duration::from_millis(5);
/// Time limit for this machine to notice the new size of a device of another node.
const RESIZED: Duration = Duration::from_secs(3);

impl Volumes {
    /// The test for devices that volumes do not wait for; `None`: the daemon is not in a cluster.
    pub(super) fn absent_devices(&self) -> Option<Arc<dyn AbsentDevices>> {
        let membership = self.membership.borrow();
        Some(membership.as_ref()?.absent_devices())
    }

    /// Sets the store of the cluster, the id of this node, and the membership.
    pub(in crate::services) fn join(
        &self,
        store: Arc<dyn VolumeStore>,
        node: Uuid,
        membership: Rc<dyn Membership>,
    ) {
        self.membership.replace(Some(membership));
        self.store.replace(Some(store));
        self.holder.set(node);
        self.untried.borrow_mut().insert(Uuid::nil());
    }

    fn set_standby(&self, id: Uuid, is_standby: bool) {
        if let Some(entry) = self.entries.borrow_mut().get_mut(&id) {
            entry.is_standby = is_standby;
        }
    }

    /// The record, and the number of blocks before another node enlarged the volume. `None`: no
    /// growth to check.
    fn growth(&self, id: Uuid) -> Option<(VolumeRecord, u64)> {
        let entries = self.entries.borrow();
        let entry = entries.get(&id)?;
        Some((entry.record.clone(), entry.grown_from?))
    }

    /// Marks the devices as checked for the size of the record.
    fn has_grown(&self, id: Uuid) {
        if let Some(entry) = self.entries.borrow_mut().get_mut(&id) {
            entry.grown_from = None;
        }
    }

    /// Ends the wait of the start for untried volumes: the published volumes have their subsystems,
    /// or [`crate::services::cluster`] does not wait for them any longer.
    pub(in crate::services) fn are_shown(&self) {
        self.untried.borrow_mut().clear();
        self.tried.notify_waiters();
    }
}

/// Gives a volume the record of etcd, and shows its frozen bdev if the volume is not open.
pub(in crate::services) async fn set_record(engine: &Rc<Engine>, record: VolumeRecord) {
    let id = record.id;
    let Ok(plane) = engine.plane() else { return };
    let is_other = {
        let mut entries = engine.volumes.entries.borrow_mut();
        let entry = entries
            .entry(id)
            .or_insert_with(|| VolumeEntry::new(record.clone()));
        let former = std::mem::replace(&mut entry.record, record);
        if former.blocks < entry.record.blocks {
            entry.grown_from.get_or_insert(former.blocks);
        }
        entry.is_standby = entry.open.is_none();
        entry.open.is_none() && !follow_record(&plane, entry, &former)
    };
    if is_other && let Err(error) = frozen::withdraw(engine, &plane, id, Removal::Hot).await {
        warn!(volume = %id, %error, "its placeholder is still in use");
    }
    frozen::show(engine, id).await;
}

/// Gives the frozen bdev the size and the name of the record. False if it must be replaced, and
/// hosts lose their namespace.
fn follow_record(plane: &Plane, entry: &VolumeEntry, former: &VolumeRecord) -> bool {
    let record = &entry.record;
    if record.limits != former.limits {
        return false;
    }
    let (Some(bdev), Some(prepared)) = (&entry.shown, &entry.prepared) else {
        return true;
    };
    if record.name != former.name {
        rename(plane, bdev, &former.name, &record.name);
    }
    // The record of a backup may be smaller than the volume is. Its labels have the size.
    let is_of_backup = record.restored.is_some() && record.blocks < former.blocks;
    if record.blocks == former.blocks || is_of_backup {
        return true;
    }
    let is_grown = prepared.grow(record);
    if is_grown && let Err(error) = plane.bdevs.notify_resize(bdev) {
        warn!(volume = record.name, %error, "hosts may not notice its new size");
    }
    is_grown
}

/// Replaces the alias of a bdev. Its registered name stays.
fn rename(plane: &Plane, bdev: &str, from: &str, to: &str) {
    if from != bdev {
        let _ = plane.bdevs.remove_alias(bdev, from);
    }
    if to != bdev
        && let Err(error) = plane.bdevs.add_alias(bdev, to)
    {
        warn!(volume = to, %error, "its new name is in use on this node");
    }
}

/// Registers the frozen bdev of a volume that is not open, unless it is registered.
pub(in crate::services) async fn show(engine: &Rc<Engine>, id: Uuid) {
    frozen::show(engine, id).await;
}

/// After another node has enlarged the volume: lets devices count as undamaged although they were
/// smaller before. Waits until this machine knows their new sizes, at most [`RESIZED`].
async fn accept_growth(engine: &Rc<Engine>, id: Uuid) {
    let end = tokio::time::Instant::now() + RESIZED;
    loop {
        let Some((record, former)) = engine.volumes.growth(id) else {
            return;
        };
        let Ok(plane) = engine.plane() else { return };
        let layers = record.replicas.iter();
        let layers = layers.filter_map(|one| plane.bdevs.lookup(&one.device));
        let room = RESERVED / u64::from(record.block_size);
        let (former, needed) = (former + room, record.blocks + room);
        let small = layers.filter(|layer| !is_accepted(layer, former, needed));
        if small.count() == 0 || tokio::time::Instant::now() >= end {
            return;
        }
        tokio::time::sleep(MOMENT).await;
    }
}

/// True if nothing is left to wait for: the device is large enough, or it was truncated below the
/// former size. A device that has grown forgets its former size.
fn is_accepted(layer: &Layer, former: u64, needed: u64) -> bool {
    let losses = layer.losses();
    if layer.least_blocks() >= needed || layer.least_blocks() < former {
        return true;
    }
    if layer.present_blocks() < needed {
        return false;
    }
    // A loss since the look counts.
    if layer.losses() == losses {
        layer.forget_least();
    }
    true
}

/// Opens a volume of which this node is the holder.
pub(in crate::services) async fn open(engine: &Rc<Engine>, id: Uuid) -> Result<(), RpcError> {
    engine.volumes.set_standby(id, false);
    accept_growth(engine, id).await;
    let outcome = try_open(engine, id).await;
    let is_open = engine.volumes.opened(&id.to_string()).is_ok();
    engine.volumes.set_standby(id, !is_open);
    match outcome {
        Some(Ok(_)) => {
            engine.volumes.has_grown(id);
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

/// Closes the volume after its I/O in flight, with clean labels, so that another node can open it
/// without a reconcile.
pub(in crate::services) async fn close(engine: &Rc<Engine>, id: Uuid) -> Result<(), RpcError> {
    close_as(engine, id, async |plane, opened| {
        wait_for_io(plane, &opened.bdev).await;
        let ticket = take_away(engine, plane, id, opened);
        shut(opened, ticket).await
    })
    .await
}

/// Closes a volume that another node may hold by now. Disconnects the hosts first: a command that
/// waits in a socket must not be executed if this node opens the volume again.
pub(in crate::services) async fn drop_open(engine: &Rc<Engine>, id: Uuid, nqn: Option<&str>) {
    let dropped = close_as(engine, id, async |plane, opened| {
        disconnect(plane, nqn);
        // The control before the queues: it ends the answers that wait for the lease. The first
        // attempt may end with the store's news that another node has the volume.
        let mut ended = end_control(opened).await;
        if ended.is_err() {
            ended = end_control(opened).await;
        }
        let ticket = take_away(engine, plane, id, opened);
        wait_for_queues(opened, ticket).await;
        ended
    });
    if let Err(error) = dropped.await {
        warn!(volume = %id, %error, "dropped, and its control has not ended in order");
    }
}

/// Closes the volume by `work`, if it is open, and registers its frozen bdev.
async fn close_as(
    engine: &Rc<Engine>,
    id: Uuid,
    work: impl AsyncFnOnce(&Plane, &OpenedVolume) -> Result<(), RpcError>,
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

/// Removes the volume's bdev, with its namespaces.
fn take_away(
    engine: &Engine,
    plane: &Plane,
    id: Uuid,
    opened: &OpenedVolume,
) -> Option<DeleteTicket> {
    engine.volumes.keep_rates(plane, id, &opened.bdev);
    let ticket = plane.bdevs.remove(&opened.bdev, Removal::Hot).ok();
    // Now, not when the event is handled: the placeholder gets the name.
    bdev_gone(engine, plane, &opened.bdev);
    events::poll_queues(plane);
    ticket
}

/// Waits until no command is in flight, at most [`IO_WAIT`]. The ANA states of the listeners refuse
/// new ones.
async fn wait_for_io(plane: &Plane, bdev: &str) {
    let Some(stats) = plane.bdevs.stats(bdev) else {
        return;
    };
    let end = tokio::time::Instant::now() + IO_WAIT;
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

/// Removes a deleted volume from this node.
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

#[cfg(test)]
mod tests {
    use nacre_bdev::null;
    use serde_json::json;

    use super::*;

    /// Goal: after a volume has grown from 100 to 150 blocks elsewhere, a device that always had
    /// room for 100 blocks counts as whole, and one that was truncated does not.
    #[test]
    fn growth_is_no_cut() {
        let device = |blocks: u64| {
            let config = json!({ "name": "n", "block_size": 512, "num_blocks": blocks });
            let config = serde_json::from_value(config).unwrap();
            let device = null::create(config).unwrap();
            let layer = Layer::new(Arc::clone(&device) as Arc<dyn Bdev>);
            (device, layer)
        };
        let (grown, layer) = device(100);
        assert!(!is_accepted(&layer, 100, 150), "its new size is unknown");
        grown.resize(200).unwrap();
        assert!(is_accepted(&layer, 100, 150));
        assert_eq!(layer.least_blocks(), 200, "the former size is forgotten");

        let (cut, layer) = device(100);
        cut.resize(50).unwrap();
        cut.resize(200).unwrap();
        assert!(is_accepted(&layer, 100, 150), "nothing to wait for");
        assert_eq!(layer.least_blocks(), 50, "the opening finds the cut");
    }
}
