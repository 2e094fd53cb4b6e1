//! Opens, closes, creates and deletes volumes.

use std::path::Path;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use futures_util::future::join_all;
use nacre_bdev::registry::{DeleteTicket, Removal};
use nacre_bdev_replica::control;
use nacre_bdev_replica::handle::{Command, NewVolume, VolumeError};
use nacre_bdev_replica::model::VolumeRecord;
use nacre_bdev_replica::store::{EmbeddedStore, MemoryStore, StoreError, VolumeStore};
use nacre_hugepages::Pool;
use nacre_reactor::{CoreHandle, ReactorHandle};
use serde_json::json;
use tracing::{error, info, warn};
use uuid::Uuid;

use super::frozen::PATIENCE;
use super::replica_devices::VolumeDevices;
use super::{OpenState, OpenedVolume, VolumeEntry, etcd, events, frozen, holder, note};
use crate::plane::{Plane, pool_here};
use crate::refusal::{OrRefuse, Refusal};
use crate::rpc::RpcError;
use crate::rpc::error::Errno;
use crate::services::Engine;
use crate::services::deferred::replay_waiting;
use crate::services::device_records;
use crate::store::{Change, Edit};

/// Pause after the first attempt to open a volume, and the longest pause.
const PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// Time limit of the first attempt, after which the volume is shown as frozen. It is longer than
/// the wait for missing replicas, and shorter than the time during which hosts are held at the
/// start.
const FIRST: Duration = Duration::from_secs(7);
/// Remedy for a volume in use that cannot be deleted.
const UNUSED: &str = "unpublish it, or delete the devices on it, first";

/// Opens the volume store and reads its records.
pub async fn begin(engine: &Rc<Engine>) -> anyhow::Result<()> {
    let volumes = &engine.volumes;
    let given = volumes.store.take();
    let settings = &engine.settings.store;
    if engine.settings.cluster.is_node() {
        // The node gives the store and the records.
        return begin_events(engine);
    }
    let (store, holder, records): (Arc<dyn VolumeStore>, Uuid, _) =
        match (given, engine.journal.store_path()) {
            (None, Some(dir)) if settings.is_etcd() => {
                let opened = etcd::open(settings, dir).await?;
                let records = etcd::load_records(&opened.store).await;
                tokio::task::spawn_local(etcd::follow(Rc::clone(engine), opened.health.clone()));
                volumes.of_store.replace(Some(opened.health));
                (opened.store, opened.holder, records)
            }
            (None, None) if settings.is_etcd() => {
                anyhow::bail!("[store] needs a data directory: name one with --data-dir");
            }
            (given, dir) => {
                let (store, holder) = match (given, dir) {
                    (Some(given), _) => (given, Uuid::new_v4()),
                    (None, None) => (Arc::new(MemoryStore::alone()) as _, Uuid::new_v4()),
                    (None, Some(dir)) => embedded(dir).await?,
                };
                let records = load_records(&*store).await;
                (store, holder, records)
            }
        };
    let records = records.context("reading the volume store")?;
    if !records.is_empty() {
        info!(volumes = records.len(), "opening");
    }
    volumes
        .untried
        .replace(records.iter().map(|r| r.id).collect());
    let entries = records.into_iter().map(|r| (r.id, VolumeEntry::new(r)));
    *volumes.entries.borrow_mut() = entries.collect();
    volumes.store.replace(Some(store));
    volumes.holder.set(holder);
    begin_events(engine)
}

fn begin_events(engine: &Rc<Engine>) -> anyhow::Result<()> {
    let (sender, receiver) = events::EventSender::new();
    engine.volumes.observer.replace(Some(Arc::new(sender)));
    tokio::task::spawn_local(events::follow(Rc::clone(engine), receiver));
    Ok(())
}

/// Opens the file of the data directory.
async fn embedded(dir: &Path) -> anyhow::Result<(Arc<dyn VolumeStore>, Uuid)> {
    let (dir, shown) = (dir.to_owned(), dir.display().to_string());
    let open = move || -> anyhow::Result<(EmbeddedStore, Uuid)> {
        note::must_be_absent(&dir)?;
        let holder = holder::id(&dir)?;
        Ok((EmbeddedStore::open(&dir)?, holder))
    };
    let (store, holder) = tokio::task::spawn_blocking(open)
        .await
        .context("the thread that opens the volume store failed")?
        .with_context(|| format!("the volumes in {shown}"))?;
    Ok((Arc::new(store), holder))
}

/// Reads all records, without a time limit: they determine which namespaces exist, and hosts that
/// are admitted without them would treat their namespaces as removed.
async fn load_records(store: &dyn VolumeStore) -> Result<Vec<VolumeRecord>, StoreError> {
    let mut list = store.list();
    loop {
        match tokio::time::timeout(LONGEST_PAUSE, &mut list).await {
            Ok(records) => return records,
            Err(_) => warn!("the volume store does not answer; the start waits for it"),
        }
    }
}

/// Starts a task that opens each volume, and returns at once.
pub fn open_all(engine: &Rc<Engine>) {
    let ids: Vec<Uuid> = engine.volumes.entries.borrow().keys().copied().collect();
    for id in ids {
        tokio::task::spawn_local(keep_opening(Rc::clone(engine), id));
    }
}

/// Resolves when the opening of each volume of the start was tried once.
pub async fn wait_until_tried(engine: &Engine) {
    loop {
        let tried = engine.volumes.tried.notified();
        if !engine.volumes.are_opening() {
            return;
        }
        tried.await;
    }
}

/// Tries to open the volume until it is open, deleted, or the daemon stops.
async fn keep_opening(engine: Rc<Engine>, id: Uuid) {
    let volumes = &engine.volumes;
    let mut pause = PAUSE;
    let mut first = true;
    loop {
        let again = volumes.again.notified();
        let mut attempt = pin!(try_open(&engine, id));
        let early = if first {
            tokio::time::timeout(FIRST, &mut attempt).await.ok()
        } else {
            None
        };
        if early.is_none() && std::mem::take(&mut first) {
            frozen::show(&engine, id).await;
            tried(&engine, id).await;
        }
        let outcome = match early {
            Some(outcome) => outcome,
            None => attempt.await,
        };
        match &outcome {
            Some(Ok(_)) => replay_waiting(&engine).await,
            Some(Err(_)) => frozen::show(&engine, id).await,
            None => {}
        }
        if std::mem::take(&mut first) {
            tried(&engine, id).await;
        }
        if !matches!(outcome, Some(Err(_))) {
            return;
        }
        // A device appeared, or the pause ended.
        let _ = tokio::time::timeout(pause, again).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// Removes a volume from the untried ones. Idempotent.
async fn tried(engine: &Rc<Engine>, id: Uuid) {
    let volumes = &engine.volumes;
    volumes.untried.borrow_mut().remove(&id);
    if !volumes.are_opening() {
        // Objects that do not depend on volumes have already been tried.
        replay_waiting(engine).await;
    }
    volumes.tried.notify_waiters();
}

/// Tries to open a volume. `None`: it does not exist, is open, or must not be opened now.
pub(super) async fn try_open(
    engine: &Rc<Engine>,
    id: Uuid,
) -> Option<Result<Rc<OpenedVolume>, RpcError>> {
    let volumes = &engine.volumes;
    let lock = volumes
        .entries
        .borrow()
        .get(&id)
        .map(|e| Rc::clone(&e.lock))?;
    let _one = lock.lock().await;
    let open_already = volumes.entries.borrow().get(&id)?.open.is_some();
    if open_already || volumes.closing.get() {
        return None;
    }
    let outcome = open_once(engine, id).await;
    // A volume that is not open is listed as its record in the store says.
    let store = volumes.store.borrow().clone();
    let record = match (&outcome, store) {
        (Err(_), Some(store)) => store.load(id).await.ok(),
        _ => None,
    };
    let mut entries = volumes.entries.borrow_mut();
    let entry = entries.get_mut(&id)?;
    entry.attempts += 1;
    if let Some(record) = record {
        entry.record = record;
    }
    match &outcome {
        Ok(opened) => {
            entry.refused = None;
            entry.open = Some(Rc::clone(opened));
            entry.prepared = None;
            entry.shown = None;
            if std::mem::take(&mut entry.reported_frozen) {
                let name = opened.handle.status().name;
                let text = format!("volume \"{name}\": serves again");
                engine
                    .notes
                    .report("volume_thaw", name, text, json!({ "id": id }));
            }
        }
        Err(error) => {
            // Report the same error only once.
            if entry.refused.as_ref() != Some(error) {
                let name = entry.record.name.clone();
                warn!(volume = name, %error, "not opened; it is tried again");
                let text = format!("volume \"{name}\" could not be opened: {error}");
                engine.notes.report(
                    "volume_open_failed",
                    name,
                    text,
                    json!({ "why": error.to_string() }),
                );
            }
            entry.refused = Some(error.clone());
        }
    }
    Some(outcome.map_err(Refusal::refusal))
}

async fn open_once(engine: &Rc<Engine>, id: Uuid) -> Result<Rc<OpenedVolume>, VolumeError> {
    let gone = || VolumeError::Closed {
        name: id.to_string(),
    };
    let plane = engine.plane().map_err(|_| gone())?;
    let (store, observer) = (
        engine.volumes.store.borrow().clone().ok_or_else(gone)?,
        engine.volumes.observer.borrow().clone().ok_or_else(gone)?,
    );
    let (holder, replicas) = (engine.volumes.opener(), VolumeDevices::of(engine, &plane));
    let reactor = least_loaded(engine, &plane).ok_or_else(gone)?;
    let name = reactor.name().to_owned();
    let prepared = engine.volumes.prepared(id).ok_or_else(gone)?;
    let is = prepared.clone();
    let handle = on_reactor(reactor, move |core, pool| async move {
        let replicas = Arc::new(replicas);
        control::open_prepared(&core, pool, store, replicas, observer, holder, &prepared).await
    })
    .await?;
    let registered = if engine.volumes.closing.get() {
        Err(gone())
    } else {
        frozen::assign_bdev(engine, &plane, id, &is, &handle).await
    };
    match registered {
        Ok(bdev) => Ok(Rc::new(OpenedVolume {
            handle,
            bdev,
            reactor: name,
        })),
        Err(refused) => {
            // Without a bdev the volume must not stay open, and a placeholder that has served
            // cannot be reused.
            if let Err(error) = frozen::withdraw(engine, &plane, id, Removal::Hot).await {
                warn!(volume = %id, %error, "still in use");
            }
            engine.volumes.forget_prepared(id);
            if let Err(error) = handle.run(Command::Close).await {
                warn!(volume = %id, %error, "not closed in order");
            }
            Err(refused)
        }
    }
}

/// Runs `work` on a reactor, with its memory.
async fn on_reactor<T, Work>(
    reactor: ReactorHandle,
    work: impl FnOnce(CoreHandle, Pool) -> Work + Send + 'static,
) -> Result<T, VolumeError>
where
    T: Send + 'static,
    Work: Future<Output = Result<T, VolumeError>> + 'static,
{
    let name = reactor.name().to_owned();
    let failed = |what: String| VolumeError::Io {
        device: format!("reactor {name}"),
        what,
    };
    let answer = reactor.run_future(move |core| async move {
        match pool_here() {
            Some(pool) => Some(work(core, pool).await),
            None => None,
        }
    });
    match answer.await {
        Ok(Some(outcome)) => outcome,
        Ok(None) => Err(failed("it has no buffers".into())),
        Err(error) => Err(failed(error.to_string())),
    }
}

/// The reactor with the fewest controls; among equals the least busy one.
fn least_loaded(engine: &Engine, plane: &Plane) -> Option<ReactorHandle> {
    let controls = |name: &str| {
        let all = engine.volumes.list();
        let here =
            |l: &super::Listed| matches!(&l.open_state, OpenState::Open(o) if o.reactor == name);
        all.iter().filter(|l| here(l)).count()
    };
    let load = |reactor: &&ReactorHandle| (controls(reactor.name()), reactor.stats().busy_ns);
    plane.reactors.iter().min_by_key(load).cloned()
}

/// Creates a volume's record, and the labels of its replicas. Does not open the volume.
pub(in crate::services) async fn create_record(
    engine: &Engine,
    new: NewVolume,
) -> Result<VolumeRecord, RpcError> {
    let plane = engine.plane()?;
    let store = engine.volumes.store()?;
    if plane.bdevs.lookup(&new.name).is_some() {
        return Err(RpcError::errno(
            Errno::EEXIST,
            format!("\"{}\" is the name of a bdev already", new.name),
        )
        .field("name"));
    }
    let reactor = least_loaded(engine, &plane)
        .ok_or_else(|| RpcError::errno(Errno::EAGAIN, "there is no reactor"))?;
    let (on_store, replicas) = (Arc::clone(&store), VolumeDevices::of(engine, &plane));
    let id = on_reactor(reactor, move |core, pool| async move {
        let replicas = Arc::new(replicas);
        control::create(&core, pool, on_store, replicas, new).await
    })
    .await
    .or_refuse()?;
    let record = store.load(id).await.map_err(VolumeError::from);
    record.or_refuse()
}

/// Creates a volume and opens it. A volume that cannot be opened is deleted again.
pub async fn create(engine: &Rc<Engine>, new: NewVolume) -> Result<Rc<OpenedVolume>, RpcError> {
    let volumes = &engine.volumes;
    let _one = volumes.changing.lock().await;
    let record = create_record(engine, new).await?;
    let id = record.id;
    let name = record.name.clone();
    volumes
        .entries
        .borrow_mut()
        .insert(id, VolumeEntry::new(record));
    match try_open(engine, id).await {
        Some(Ok(opened)) => {
            let text = format!("volume \"{name}\" was made");
            engine
                .notes
                .report("volume_create", name, text, json!({ "id": id }));
            Ok(opened)
        }
        refused => {
            // A volume that cannot be opened is deleted again.
            volumes.entries.borrow_mut().remove(&id);
            if let Err(error) = delete_record_and_labels(engine, id).await {
                error!(volume = name, %error, "made, not opened, and not deleted again");
            }
            Err(match refused {
                Some(Err(refused)) => refused,
                _ => stopping(),
            })
        }
    }
}

pub(super) fn stopping() -> RpcError {
    RpcError::errno(Errno::EAGAIN, "the daemon is stopping")
}

/// Removes the record from the store, and the labels from the replicas.
async fn delete_record_and_labels(engine: &Rc<Engine>, id: Uuid) -> Result<(), RpcError> {
    let plane = engine.plane()?;
    let (store, replicas) = (engine.volumes.store()?, VolumeDevices::of(engine, &plane));
    let reactor = least_loaded(engine, &plane)
        .ok_or_else(|| RpcError::errno(Errno::EAGAIN, "there is no reactor"))?;
    let wiped = on_reactor(reactor, move |core, pool| async move {
        control::delete(&core, pool, store, Arc::new(replicas), id).await
    });
    wiped.await.or_refuse()
}

/// Declares a replica in sync although it may lack writes. For volumes that cannot be opened;
/// `EBUSY` for open ones.
pub async fn force_in_sync(
    engine: &Rc<Engine>,
    name: &str,
    replica: String,
    force: String,
) -> Result<(), RpcError> {
    let plane = engine.plane()?;
    let listed = engine.volumes.find(name)?;
    let id = listed.id();
    let lock = {
        let entries = engine.volumes.entries.borrow();
        entries.get(&id).map(|e| Rc::clone(&e.lock))
    };
    {
        let _alone = match &lock {
            Some(lock) => Some(lock.lock().await),
            None => None,
        };
        let listed = engine.volumes.find(name)?;
        if let OpenState::Open(_) = &listed.open_state {
            return Err(RpcError::errno(
                Errno::EBUSY,
                "the volume was opened meanwhile: look at it again",
            ));
        }
        // The volume's control may still be closing it.
        if engine.volumes.closing.get() {
            return Err(stopping());
        }
        if let OpenState::Frozen { prepared, .. } = &listed.open_state {
            prepared.set_failing(false);
        }
        let seen = listed.record.version();
        let (store, replicas) = (engine.volumes.store()?, VolumeDevices::of(engine, &plane));
        let reactor = least_loaded(engine, &plane)
            .ok_or_else(|| RpcError::errno(Errno::EAGAIN, "there is no reactor"))?;
        on_reactor(reactor, move |core, pool| async move {
            let replicas = Arc::new(replicas);
            control::force_in_sync(&core, pool, store, replicas, id, seen, &replica, &force).await
        })
        .await
        .or_refuse()?;
    }
    if engine.volumes.is_in_cluster() {
        // A node that reaches the replica takes the volume.
        return Ok(());
    }
    // Open at once, without waiting for the next retry.
    if let Some(Err(refused)) = try_open(engine, id).await {
        return Err(refused);
    }
    replay_waiting(engine).await;
    Ok(())
}

/// Deletes a volume that is not in use.
pub(in crate::services) async fn delete(
    engine: &Rc<Engine>,
    name: &str,
    force: Option<String>,
) -> Result<(), RpcError> {
    let volumes = &engine.volumes;
    let _one = volumes.changing.lock().await;
    let plane = engine.plane()?;
    let id = volumes.find(name)?.id();
    let lock = volumes
        .entries
        .borrow()
        .get(&id)
        .map(|e| Rc::clone(&e.lock));
    let _alone = match &lock {
        Some(lock) => Some(lock.lock().await),
        None => None,
    };
    // The volume's control may still be closing it.
    if volumes.closing.get() {
        return Err(stopping());
    }
    // The state now that the lock is held.
    let listed = volumes.find(&id.to_string())?;
    let (name, bdev) = (listed.name(), listed.bdev().map(str::to_owned));
    let replicas: Vec<String> = match listed.status() {
        Some(status) => status.replicas.into_iter().map(|m| m.device).collect(),
        None => {
            let replicas = listed.record.replicas.iter();
            replicas.map(|m| m.device.clone()).collect()
        }
    };
    let away = replicas.iter().find(|m| plane.bdevs.lookup(m).is_none());
    if let Some(away) = away.filter(|_| force.as_deref() != Some(name.as_str())) {
        return Err(RpcError::errno(
            Errno::EPERM,
            format!("the replica on \"{away}\" cannot be reached: it would go on saying that it is one of \"{name}\""),
        )
        .field("force")
        .remedy("bring its device back, or force with the volume's name"));
    }
    let was_open = matches!(listed.open_state, OpenState::Open(_));
    if let OpenState::Frozen { .. } = &listed.open_state {
        volumes.set_going(id, true);
        let withdrawn = frozen::withdraw(engine, &plane, id, Removal::IfUnused).await;
        withdrawn.map_err(|error| {
            volumes.set_going(id, false);
            error.remedy(UNUSED)
        })?;
    }
    if let OpenState::Open(opened) = &listed.open_state {
        let ticket = plane.bdevs.remove(&opened.bdev, Removal::IfUnused);
        let ticket = ticket.map_err(|error| error.refusal().remedy(UNUSED))?;
        if let Err(refused) = shut(opened, Some(ticket)).await {
            // The control keeps closing the volume; reopen it afterwards.
            let again = open_when_closed(Rc::clone(engine), id, Rc::clone(opened));
            tokio::task::spawn_local(again);
            return Err(refused);
        }
        if let Some(entry) = volumes.entries.borrow_mut().get_mut(&id) {
            entry.open = None;
        }
    }
    drop(listed);
    volumes.set_going(id, true);
    let deleted = delete_record_and_labels(engine, id).await;
    volumes.set_going(id, false);
    drop(_alone);
    if let Err(refused) = deleted {
        if was_open {
            drop(tokio::task::spawn_local(keep_opening(
                Rc::clone(engine),
                id,
            )))
        } else {
            volumes.again.notify_waiters()
        }
        return Err(refused);
    }
    volumes.entries.borrow_mut().remove(&id);
    // Journal records about the volume could never be restored.
    let names = [
        vec![id.to_string(), name.clone()],
        bdev.into_iter().collect(),
    ]
    .concat();
    let mut edits = device_records::forget_uses_of(engine, &names);
    edits.push(Edit::Remove(super::published::published_key(id)));
    engine.journal.commit(Change(edits)).await?;
    let text = format!("volume \"{name}\" was deleted");
    engine
        .notes
        .report("volume_delete", name, text, json!({ "id": id }));
    Ok(())
}

/// Waits for the queues of a removed bdev, then closes the volume. Each step takes at most
/// [`PATIENCE`].
pub(super) async fn shut(
    opened: &OpenedVolume,
    ticket: Option<DeleteTicket>,
) -> Result<(), RpcError> {
    wait_for_queues(opened, ticket).await;
    end_control(opened).await
}

pub(super) async fn wait_for_queues(opened: &OpenedVolume, ticket: Option<DeleteTicket>) {
    if let Some(ticket) = ticket
        && tokio::time::timeout(PATIENCE, ticket).await.is_err()
    {
        warn!(volume = opened.bdev, "queues are still open");
    }
}

pub(super) async fn end_control(opened: &OpenedVolume) -> Result<(), RpcError> {
    let closed = tokio::time::timeout(PATIENCE, opened.handle.run(Command::Close)).await;
    match closed {
        Ok(Ok(()) | Err(VolumeError::Closed { .. })) => Ok(()),
        Ok(Err(error)) => Err(error.refusal()),
        Err(_) => {
            let cause = "its control does not close it";
            Err(RpcError::errno(Errno::ETIMEDOUT, cause))
        }
    }
}

/// Opens a volume again whose deletion failed, after its control has closed it.
async fn open_when_closed(engine: Rc<Engine>, id: Uuid, opened: Rc<OpenedVolume>) {
    // The control handles commands in order: this waits for the earlier close.
    while let Err(error) = opened.handle.run(Command::Close).await {
        if matches!(error, VolumeError::Closed { .. }) {
            break;
        }
        tokio::time::sleep(PAUSE).await;
    }
    if let Some(entry) = engine.volumes.entries.borrow_mut().get_mut(&id) {
        entry.open.take_if(|open| Rc::ptr_eq(open, &opened));
    }
    drop(opened);
    keep_opening(engine, id).await;
}

/// Closes all volumes, after the hosts were disconnected. Clean labels make a reconcile unnecessary
/// at the next opening.
pub async fn close_all(engine: &Rc<Engine>, plane: &Plane) {
    engine.volumes.closing.set(true);
    let open: Vec<Rc<OpenedVolume>> = {
        let mut entries = engine.volumes.entries.borrow_mut();
        entries.values_mut().filter_map(|e| e.open.take()).collect()
    };
    let close = async |opened: &Rc<OpenedVolume>| {
        // Every core releases the namespaces on it.
        for subsystem in plane.target.subsystems() {
            subsystem.bdev_removed(&opened.bdev);
        }
        let ticket = plane.bdevs.remove(&opened.bdev, Removal::Hot).ok();
        match shut(opened, ticket).await {
            Ok(()) => info!(volume = opened.bdev, "closed"),
            Err(error) => {
                warn!(volume = opened.bdev, %error, "not closed in order: it is reconciled when it is opened")
            }
        }
    };
    join_all(open.iter().map(close)).await;
    frozen::close_all(engine, plane).await;
}

/// Releases the store after the reactors have ended.
pub fn end(engine: &Engine) {
    engine.volumes.entries.borrow_mut().clear();
    engine.volumes.observer.replace(None);
    engine.volumes.of_store.replace(None);
    engine.volumes.store.replace(None);
}
