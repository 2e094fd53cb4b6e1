//! The volumes of the cluster on this node: a task per volume opens it, closes it, and publishes it
//! to hosts in a subsystem.
//!
//! ```text
//!   wanted ─▶ record    the entry of `volumes`; a volume that is not open here has a placeholder
//!          ─▶ drop      hosts are disconnected, the volume is closed
//!          ─▶ take      opened by its control ▸ Opened, or NotOpened
//!          ─▶ close     closed by its control ▸ Drained
//!          ─▶ show      subsystem, namespace, hosts, ANA state
//! ```

use std::rc::Rc;
use std::sync::{Arc, Weak};
use std::time::Duration;

use arrayvec::ArrayVec;
use nacre_bdev_replica::handle::VolumeState;
use nacre_bdev_replica::model::VolumeRecord;
use nacre_cluster_core::slots::controller_ids;
use nacre_cluster_core::volume::Ana;
use nacre_cluster_core::{NodeId, ReplicaId, VolumeId};
use nacre_cluster_node::serving::Full;
use nacre_cluster_node::{Answer, Publication, VolumeRole};
use nacre_nvmf::subsystems::reservation::Reservation;
use nacre_nvmf::subsystems::{ExpectedSubsystems, Subsystem};
use nacre_nvmf_wire::Nqn;
use nacre_nvmf_wire::log::ana::AnaState;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::Notify;
use tracing::{debug, info, warn};

use super::hosts::Hosts;
use super::inbox::{Action, Exported, WantedVolume};
use super::last_errors::LastErrors;
use super::lease::OfIncarnation;
use super::{Running, expect_subsystems, reservation};
use crate::rpc::RpcError;
use crate::rpc::error::Errno;
use crate::services::Engine;
use crate::services::subsystems::{ADD_NAMESPACE, CREATE_SUBSYSTEM};
use crate::services::volumes::in_cluster;

/// Time limit for reading the reservation from etcd: the volume's task waits for it.
const RESERVATION: Duration = Duration::from_secs(1);
/// Interval at which an open volume is checked: it may close by itself, for example when fenced.
const LOOK: Duration = Duration::from_millis(500);

/// The subsystem with which a volume of the cluster is shown to hosts on this node.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::services) struct Shown {
    pub nqn: String,
    /// See [`Publication::created`].
    published: u64,
    slot: u8,
    has_namespace: bool,
    /// True once the subsystem also has its hosts and listeners.
    is_complete: bool,
    hosts: Vec<String>,
    ana: Ana,
}

impl Shown {
    /// True if the subsystem has its namespace.
    pub(super) fn is_ready(&self) -> bool {
        self.has_namespace
    }

    /// True if the subsystem has its namespace, hosts and listeners.
    pub(super) fn is_complete(&self) -> bool {
        self.is_complete
    }

    /// Sets the ANA state of all listeners of the subsystem.
    pub(super) fn show_state(&self, engine: &Engine) {
        let state = match self.ana {
            Ana::Optimized => AnaState::Optimized,
            Ana::Change => AnaState::Change,
            Ana::Inaccessible => AnaState::Inaccessible,
        };
        let (Ok(nqn), Ok(plane)) = (Nqn::new(&self.nqn), engine.plane()) else {
            return;
        };
        let Ok(subsystem) = plane.target.subsystem(&nqn) else {
            return;
        };
        for listener in subsystem.listeners() {
            if let Err(error) = subsystem.set_ana_state(listener.id, None, state) {
                debug!(%error, "a listener went before its state was set");
            }
        }
    }
}

/// The state that the volume's task has reached.
#[derive(Default)]
struct Done {
    action: Action,
    drops: u64,
    /// The lease under which the volume is open.
    open: Option<Taken>,
    /// The reservation of hosts that was loaded, while the volume is open.
    reservation: Option<Arc<Reservation>>,
    /// The volume's record that was last given to its entry in `volumes`.
    record: Option<Arc<Value>>,
    not_shown: LastErrors<()>,
    not_withdrawn: LastErrors<()>,
    /// True if the deletion of the subsystem failed and must be repeated.
    is_left: bool,
    /// The error of the last attempt to put the publication into effect.
    obstacle: Option<String>,
    not_reserved: LastErrors<()>,
    /// While the subsystem is replaced by another one: makes hosts retry instead of giving up.
    shown_anew: Option<ExpectedSubsystems>,
    /// The subsystem of the volume, and deleted ones while hosts may have commands in flight.
    subsystems: Vec<Weak<Subsystem>>,
}

/// The lease under which this node opened the volume.
struct Taken {
    number: u64,
    /// The lease of the incarnation that opened it, or of an earlier one.
    lease: Arc<OfIncarnation>,
}

impl Done {
    /// Adds the volume's present subsystem to `subsystems`, before it is deleted.
    fn note_subsystem(&mut self, engine: &Engine, running: &Running, id: VolumeId) {
        let nqn = (running.shown.borrow().get(&id)).and_then(|shown| Nqn::new(&shown.nqn).ok());
        let plane = engine.plane().ok();
        let found = plane
            .zip(nqn)
            .map(|(plane, nqn)| plane.target.subsystem(&nqn));
        let Some(Ok(found)) = found else { return };
        let found = Arc::downgrade(&found);
        if !self.subsystems.iter().any(|one| one.ptr_eq(&found)) {
            self.subsystems.push(found);
        }
    }

    /// True if only the hosts of this publication are allowed and connected.
    fn is_in_effect(&mut self, engine: &Engine, here: Option<&Publication>) -> bool {
        let Ok(plane) = engine.plane() else {
            return false;
        };
        let may = |host: &str| {
            here.is_some_and(|one| one.any_host || one.hosts.iter().any(|known| known == host))
        };
        let any_host = here.is_some_and(|one| one.any_host);
        let mut is_in_effect = true;
        let mut connected = None;
        self.subsystems.retain(|subsystem| {
            let Some(subsystem) = subsystem.upgrade() else {
                return false;
            };
            let controllers = subsystem.controllers();
            let mut surplus = controllers.iter().filter(|one| !may(one.hostnqn.as_str()));
            if let Some(one) = surplus.next() {
                is_in_effect = false;
                connected = Some(one.hostnqn.to_string());
            }
            let present = plane.target.subsystem(subsystem.nqn());
            let is_present = present.is_ok_and(|present| Arc::ptr_eq(&present, &subsystem));
            if is_present {
                is_in_effect &= (any_host || !subsystem.allows_any_host())
                    && subsystem.hosts().iter().all(|host| may(host.as_str()));
            }
            // A deleted one takes no new host.
            is_present || !controllers.is_empty()
        });
        if let Some(host) = connected {
            let is_connected = || format!("host {host} is still connected");
            self.obstacle.get_or_insert_with(is_connected);
        }
        is_in_effect
    }

    /// Forgets the loaded reservation: another node may hold the volume soon, and change it.
    fn leave_reservation(&mut self) {
        if let Some(reservation) = self.reservation.take() {
            reservation.leave();
        }
    }
}

/// Brings the volume to the wanted state, until it is deleted or the daemon ends.
pub(super) async fn follow(
    engine: Rc<Engine>,
    running: Rc<Running>,
    id: VolumeId,
    changed: Rc<Notify>,
) {
    let mut done = Done::default();
    loop {
        if engine.plane().is_err() {
            return;
        }
        done.note_subsystem(&engine, &running, id);
        let Some(wanted) = running.inbox.wanted(id) else {
            withdraw(&engine, &running, id, &mut done).await;
            if done.is_left && done.open.take().is_some() {
                // The volume is deleted, whatever is left of its subsystem: its devices are free.
                if let Err(error) = in_cluster::close(&engine, id.0).await {
                    warn!(volume = %id.0, %error, "deleted, and not closed in order");
                }
            }
            if done.is_left || !done.is_in_effect(&engine, None) {
                running.inbox.set_behind_cause(id, done.obstacle.take());
                let _ = tokio::time::timeout(LOOK, changed.notified()).await;
                continue;
            }
            running.inbox.set_in_effect(id, None);
            in_cluster::forget(&engine, id.0).await;
            running.tasks.borrow_mut().remove(&id);
            return;
        };
        step(&engine, &running, id, &wanted, &mut done).await;
        done.note_subsystem(&engine, &running, id);
        let here = wanted.publication.as_ref();
        let here = here.filter(|one| one.slots.of(running.me).is_some());
        let is_in_effect = !done.is_left && done.is_in_effect(&engine, here);
        if is_in_effect {
            let published = wanted.published;
            running.inbox.set_in_effect(id, Some(published));
        } else {
            running.inbox.set_behind_cause(id, done.obstacle.take());
        }
        if done.open.is_some() || !is_in_effect {
            let _ = tokio::time::timeout(LOOK, changed.notified()).await;
        } else {
            changed.notified().await;
        }
    }
}

async fn step(
    engine: &Rc<Engine>,
    running: &Rc<Running>,
    id: VolumeId,
    wanted: &WantedVolume,
    done: &mut Done,
) {
    if let Some(role) = &wanted.role {
        set_record(engine, running, id, role, done).await;
    }
    if wanted.drops > done.drops {
        // Its devices are free after the drop: other nodes take the volume meanwhile.
        running.inbox.set_reached(id, ArrayVec::new());
        drop_open(engine, running, id, done).await;
        info!(volume = %id.0, "dropped: this node holds it no longer");
        done.drops = wanted.drops;
        done.open = None;
    }
    if let Some(role) = &wanted.role {
        note_reached(engine, running, id, role);
    }
    // Before a close, so that hosts move first.
    show(engine, running, id, wanted, done).await;
    if done.action != wanted.action {
        match wanted.action {
            Action::None => {}
            Action::Take { number } => {
                let lease = Arc::new(OfIncarnation::now(&running.link));
                let answer = match in_cluster::open(engine, id.0).await {
                    Ok(()) => {
                        done.open = Some(Taken { number, lease });
                        Answer::Opened { number }
                    }
                    Err(error) => {
                        debug!(volume = %id.0, %error, "not taken");
                        Answer::NotOpened { number }
                    }
                };
                report(running, id, answer).await;
            }
            Action::Close { number } => {
                // The role that says so may arrive after the call.
                set_ana(engine, running, id, Ana::Change);
                done.leave_reservation();
                match in_cluster::close(engine, id.0).await {
                    Ok(()) => {
                        done.open = None;
                        report(running, id, Answer::Drained { number }).await;
                    }
                    Err(error) => warn!(volume = %id.0, %error, "not closed to be handed over"),
                }
            }
        }
        done.action = wanted.action;
        show(engine, running, id, wanted, done).await;
    }
    let is_here = slot_of(running, wanted).is_some();
    let number = done.open.as_ref().map(|taken| taken.number);
    if let Some(number) = number
        && !is_here
    {
        // The node releases the volume.
        done.leave_reservation();
        match in_cluster::close(engine, id.0).await {
            Ok(()) => info!(volume = %id.0, "not published here any more: closed"),
            Err(error) => warn!(volume = %id.0, %error, "not closed in order"),
        }
        done.open = None;
        report(running, id, Answer::NotOpened { number }).await;
    } else if let Some(number) = number
        && is_over(engine, id)
    {
        drop_open(engine, running, id, done).await;
        done.open = None;
        report(running, id, Answer::NotOpened { number }).await;
    }
}

async fn drop_open(engine: &Rc<Engine>, running: &Running, id: VolumeId, done: &mut Done) {
    // First: the namespace is absent until the placeholder has its place. Hosts that connect again
    // meanwhile get the listener's state, not an error.
    set_ana(engine, running, id, Ana::Inaccessible);
    done.leave_reservation();
    let nqn = running
        .shown
        .borrow()
        .get(&id)
        .map(|shown| shown.nqn.clone());
    in_cluster::drop_open(engine, id.0, nqn.as_deref()).await;
}

/// The slot (0 to 15) that the volume's publication gives this node; `None`: the publication does
/// not name this node.
fn slot_of(running: &Running, wanted: &WantedVolume) -> Option<u8> {
    wanted.publication.as_ref()?.slots.of(running.me)
}

/// True if the volume has no status here, is closed, or was fenced.
fn is_over(engine: &Engine, id: VolumeId) -> bool {
    let listed = engine.volumes.find(&id.0.to_string());
    let state = listed
        .ok()
        .and_then(|listed| listed.status())
        .map(|status| status.state);
    state.is_none_or(|state| matches!(state, VolumeState::Fenced | VolumeState::Closed))
}

/// Sends an answer to the cluster's thread; retries while the queue is full.
async fn report(running: &Running, id: VolumeId, answer: Answer) {
    while let Err(Full) = running.link.reports.send(id, answer) {
        if running.is_ending.get() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Gives the volume's entry the stored record.
async fn set_record(
    engine: &Rc<Engine>,
    running: &Running,
    id: VolumeId,
    role: &VolumeRole,
    done: &mut Done,
) {
    let is_known = |known: &Arc<Value>| Arc::ptr_eq(known, &role.value);
    if done.record.as_ref().is_some_and(is_known) {
        return;
    }
    done.record = Some(Arc::clone(&role.value));
    let record = match VolumeRecord::deserialize(&*role.value) {
        Ok(record) => record,
        Err(error) => return warn!(volume = %id.0, %error, "its record cannot be read"),
    };
    let replicas = record.replicas.iter();
    let devices = replicas.filter_map(|one| {
        Some(Exported {
            device: one.device.clone(),
            node: NodeId(one.node?),
            node_device: one.node_device.clone(),
        })
    });
    running.inbox.set_devices(id, devices.collect());
    in_cluster::set_record(engine, record).await;
}

/// Reports the replicas that this node can use to the inbox: their devices exist, and a path to
/// their nodes is connected.
fn note_reached(engine: &Engine, running: &Running, id: VolumeId, role: &VolumeRole) {
    let Ok(plane) = engine.plane() else { return };
    let mut reached = ArrayVec::new();
    let Ok(listed) = engine.volumes.find(&id.0.to_string()) else {
        return;
    };
    for replica in &role.record.replicas {
        let stored = listed
            .record
            .replicas
            .iter()
            .find(|one| one.id == replica.id.0);
        let is_there = stored.is_some_and(|one| plane.bdevs.lookup(&one.device).is_some());
        if is_there && running.peers.is_connected(engine, replica.node) {
            let _ = reached.try_push(ReplicaId(replica.id.0));
        }
    }
    running.inbox.set_reached(id, reached);
}

fn set_ana(engine: &Engine, running: &Running, id: VolumeId, ana: Ana) {
    let mut shown = running.shown.borrow_mut();
    if let Some(shown) = shown.get_mut(&id)
        && shown.ana != ana
    {
        shown.ana = ana;
        shown.show_state(engine);
    }
}

/// Shows the volume to hosts, by its publication and its role.
async fn show(
    engine: &Rc<Engine>,
    running: &Rc<Running>,
    id: VolumeId,
    wanted: &WantedVolume,
    done: &mut Done,
) {
    done.is_left = false;
    let here = wanted.publication.as_ref().zip(slot_of(running, wanted));
    let Some((publication, slot)) = here else {
        done.shown_anew = None;
        return withdraw(engine, running, id, done).await;
    };
    let known = running.shown.borrow().get(&id).cloned();
    let present = (&publication.nqn, publication.created, slot);
    let is_other = |shown: Shown| (&shown.nqn, shown.published, shown.slot) != present;
    if known.is_some_and(is_other) {
        // Such as after a restore of etcd. Hosts lose the subsystem only for a moment.
        done.shown_anew = expect_subsystems(engine);
        withdraw(engine, running, id, done).await;
        if done.is_left {
            return;
        }
    }
    in_cluster::show(engine, id.0).await;
    let outcome = furnish(engine, running, id, publication, slot).await;
    // A new volume has no block device before its first holder has opened it.
    let is_new = engine.volumes.device(&id.0.to_string()).is_err();
    match outcome {
        Ok(()) => {
            done.not_shown.clear(&());
            done.shown_anew = None;
            done.obstacle = None;
        }
        Err(error) => {
            let text = error.to_string();
            if !is_new && done.not_shown.is_new(&(), &text) {
                warn!(volume = %id.0, %error, "not shown to hosts; it is tried again");
            }
            done.obstacle = Some(text);
        }
    }
    if let Some(role) = &wanted.role {
        // Optimized only once the volume is open here, and its reservation is known.
        let is_open = engine.volumes.opened(&id.0.to_string()).is_ok();
        let is_optimized = role.ana == Ana::Optimized;
        let ana = if is_optimized && !(is_open && is_reserved(engine, running, id, done).await) {
            Ana::Change
        } else {
            role.ana
        };
        set_ana(engine, running, id, ana);
    }
}

fn late() -> RpcError {
    let cause = format!("etcd has not answered within {RESERVATION:?}");
    RpcError::errno(Errno::ETIMEDOUT, cause)
}

/// Loads the reservation of hosts, once for each opening. False if it is not loaded yet.
async fn is_reserved(engine: &Engine, running: &Running, id: VolumeId, done: &mut Done) -> bool {
    let shown = || {
        let reservation = reservation::shown(engine, running, id).ok();
        reservation.filter(|reservation| reservation.is_known())
    };
    done.reservation = shown();
    if done.reservation.is_some() {
        return true;
    }
    let Some(taken) = &done.open else {
        return false;
    };
    let load = reservation::load(engine, running, id, &taken.lease);
    let loaded = tokio::time::timeout(RESERVATION, load).await;
    match loaded.unwrap_or_else(|_| Err(late())) {
        Ok(is_loaded) => {
            done.not_reserved.clear(&());
            done.reservation = shown();
            is_loaded
        }
        Err(error) => {
            if done.not_reserved.is_new(&(), &error.to_string()) {
                warn!(volume = %id.0, %error, "hosts wait: the reservation was not read; it is tried again");
            }
            false
        }
    }
}

async fn furnish(
    engine: &Rc<Engine>,
    running: &Rc<Running>,
    id: VolumeId,
    publication: &Publication,
    slot: u8,
) -> Result<(), RpcError> {
    let nqn = &publication.nqn;
    if !running.shown.borrow().contains_key(&id) {
        let ids = controller_ids(slot);
        let create = json!({
            "nqn": nqn,
            "ana_reporting": true,
            "min_cntlid": ids.start(),
            "max_cntlid": ids.end(),
        });
        engine.declared_call(CREATE_SUBSYSTEM, &create).await?;
        let shown = Shown {
            nqn: nqn.clone(),
            published: publication.created,
            slot,
            has_namespace: false,
            is_complete: false,
            hosts: Vec::new(),
            ana: Ana::Inaccessible,
        };
        running.shown.borrow_mut().insert(id, shown);
    }
    let change = |change: &dyn Fn(&mut Shown)| {
        if let Some(shown) = running.shown.borrow_mut().get_mut(&id) {
            change(shown);
        }
    };
    let shown = running.shown.borrow().get(&id).cloned();
    let Some(shown) = shown else { return Ok(()) };
    if !shown.has_namespace {
        // Without a device, hosts would find an empty subsystem.
        engine.volumes.device(&id.0.to_string())?;
        let namespace = json!({ "nsid": 1, "bdev_name": id.0, "uuid": id.0 });
        let params = json!({ "nqn": nqn, "namespace": namespace });
        engine.declared_call(ADD_NAMESPACE, &params).await?;
        change(&|shown| shown.has_namespace = true);
    }
    let hosts = Hosts::of(engine, nqn)?;
    if hosts.allows_any() != publication.any_host {
        let params = json!({ "nqn": nqn, "allow_any_host": publication.any_host });
        engine
            .declared_call("nvmf_subsystem_allow_any_host", &params)
            .await?;
    }
    for host in &publication.hosts {
        hosts.allow(host).await?;
        change(&|shown| {
            if !shown.hosts.contains(host) {
                shown.hosts.push(host.clone());
            }
        });
    }
    // After the new ones, and each: one that cannot be removed does not keep others waiting.
    let mut left = Ok(());
    for host in &hosts.surplus(&shown.hosts, &publication.hosts) {
        match hosts.remove(host).await {
            Ok(()) if shown.hosts.contains(host) => {}
            Ok(()) => info!(
                host,
                nqn, "removed: the publication does not name this host"
            ),
            Err(error) => {
                left = left.and(Err(error));
                continue;
            }
        }
        change(&|shown| shown.hosts.retain(|one| one != host));
    }
    left?;
    if !shown.is_complete {
        // Listeners last: hosts can connect as soon as one exists.
        engine.listeners.look_again(engine).await;
        super::show_states(engine);
    }
    change(&|shown| shown.is_complete = true);
    Ok(())
}

/// Removes the volume's subsystem from this node. Sets `is_left` if that fails.
async fn withdraw(engine: &Rc<Engine>, running: &Rc<Running>, id: VolumeId, done: &mut Done) {
    (done.is_left, done.obstacle) = (false, None);
    let Some(shown) = running.shown.borrow_mut().remove(&id) else {
        return;
    };
    match delete_subsystem(engine, &shown.nqn).await {
        Ok(()) => done.not_withdrawn.clear(&()),
        Err(error) => {
            let text = error.to_string();
            if done.not_withdrawn.is_new(&(), &text) {
                warn!(volume = %id.0, %error, "hosts still see its subsystem; deleting it again");
            }
            // At once: the look at listeners below may wait for other calls.
            running.inbox.set_behind_cause(id, Some(text.clone()));
            done.obstacle = Some(text);
            done.is_left = true;
            running.shown.borrow_mut().insert(id, shown);
            set_ana(engine, running, id, Ana::Inaccessible);
        }
    }
    engine.listeners.look_again(engine).await;
}

/// Deletes the subsystem. An error after which it is gone counts as success, such as a timeout of
/// its last I/O.
async fn delete_subsystem(engine: &Rc<Engine>, nqn: &str) -> Result<(), RpcError> {
    let delete = json!({ "nqn": nqn });
    let outcome = engine.declared_call("nvmf_delete_subsystem", &delete).await;
    let is_there = || {
        let nqn = Nqn::new(nqn).ok()?;
        engine.plane().ok()?.target.subsystem(&nqn).ok()
    };
    match outcome {
        Err(error) if is_there().is_some() => Err(error),
        _ => Ok(()),
    }
}
