//! The snapshots of volumes in etcd (`snap/S`): the steps that this node takes.
//!
//! ```text
//!   asked    the holder, or without one the node of the first replica in sync, names the replicas
//!   chosen   each replica's node takes a snapshot of its lvol ▸ there, if the volume's record is
//!            the same; the chooser asks again if one of the nodes has no lease any more
//!   there    an lvol's node reports when the lvol is missing
//!   former   an lvol's node deletes the lvol ▸ the key is deleted with the last one
//! ```
//!
//! A holder of several replicas does its part in one task ([`held`]). It holds writes back,
//! chooses, waits for the other nodes, and lets the writes go on.
//!
//! Each step is one transaction that compares what the step saw, so two nodes that act at once do
//! no harm. A pool's disk may not answer: each step is a task, and nothing waits for it.

mod calls;
mod held;
#[cfg(test)]
mod tests;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::rc::Rc;
use std::time::Duration;

use nacre_bdev::Bdev;
use nacre_bdev_pool::Command;
use nacre_bdev_replica::format::{Label, LabelState};
use nacre_bdev_replica::handle::{ReplicaStatus, ResyncKind};
use nacre_bdev_replica::model::ReplicaState;
use nacre_cluster_core::{Holder, VolumeId};
use nacre_cluster_node::clock::seconds;
use nacre_cluster_node::export::Want;
use nacre_cluster_node::{
    Cut, CutHolder, CutProblem, CutSource, CutState, HeldBy, NodeState, SeenSnapshot,
    SnapshotChange, SnapshotKey,
};
use tokio::time::{Instant, sleep};
use tracing::{info, warn};
use uuid::Uuid;

use super::last_errors::LastErrors;
use super::lvols::OPENED;
use super::rebuild::label;
use super::{LOOK, Node, Running};
use crate::refusal::OrRefuse;
use crate::rpc::RpcError;
use crate::rpc::error::Errno;
use crate::services::Engine;
use crate::services::pools::{self, OpenPool};
use crate::services::volumes::snapshots::{hold_time, lvol_name};

pub use self::calls::{
    create_snapshot, delete_snapshot, find_snapshot, snapshot_source, snapshots,
};

/// Pause before a retry while a label does not show the volume's record yet, or a pool is not open.
const AGAIN: Duration = Duration::from_millis(200);
/// Most snapshots with a task at a time; the others wait for the next round. A task older than
/// [`HANGS`] waits for a pool that does not answer, and does not count.
const AT_ONCE: usize = 16;
const HANGS: Duration = Duration::from_secs(10);
/// Most volumes whose writes this node holds back at a time.
const MAX_HELD: usize = 4;
/// Attempts of one snapshot after which an error that does not pass ends it.
const CUTS: u32 = 3;

#[derive(Default)]
pub(super) struct Snapshots {
    /// Snapshots with a task, the start of the task, and whether it takes a snapshot of an lvol.
    busy: RefCell<BTreeMap<Uuid, (Instant, bool)>>,
    /// Volumes whose writes are held back for a snapshot, or were: until then no further hold
    /// begins.
    held: RefCell<BTreeMap<VolumeId, Instant>>,
    /// The snapshot whose task was started last. The next round begins after it, so that steps that
    /// fail again and again do not delay the others.
    last: Cell<Uuid>,
    /// Since when lvols of snapshots are missing, by the lvol.
    away: RefCell<BTreeMap<Uuid, Instant>>,
    not_done: LastErrors<Uuid>,
}

/// A step for this node.
#[derive(Debug, Clone, PartialEq, Eq)]
enum CutStep {
    Choose,
    Cut(Cut),
    /// A node that was chosen has no lease any more, or the holder that holds writes back has
    /// ended: choose again.
    AskAgain,
    /// Report that this lvol is missing, or (`None`) present again.
    Note(Uuid, Option<CutProblem>),
    Remove(Cut),
}

/// Runs the steps of snapshots until the daemon ends. Changes of keys other than `snap/` take
/// effect at the next interval.
pub(super) async fn follow(engine: Rc<Engine>, running: Rc<Running>) {
    loop {
        let changed = running.inbox.snapshots_changed();
        let _ = tokio::time::timeout(LOOK, changed).await;
        if running.is_ending.get() || engine.plane().is_err() {
            return;
        }
        running.snapshots.look(&engine, &running);
    }
}

impl Snapshots {
    /// Starts the steps for this node. A step that fails is repeated in the next round.
    pub(super) fn look(&self, engine: &Rc<Engine>, running: &Rc<Running>) {
        let state = running.node.borrow().as_ref().map(Node::state);
        let Some(NodeState::In { incarnation, .. }) = state else {
            return;
        };
        if !running.inbox.is_listed() {
            return;
        }
        let by = Holder {
            node: running.me,
            incarnation,
        };
        let all = running.inbox.snapshots();
        let cuts = all.values().flat_map(|seen| &seen.key.cuts);
        let lvols: BTreeSet<Uuid> = cuts.map(|cut| cut.lvol).collect();
        self.away
            .borrow_mut()
            .retain(|lvol, _| lvols.contains(lvol));
        self.not_done.retain(|id| all.contains_key(id));
        for (id, seen) in in_turn(&all, self.last.get()) {
            let (id, seen) = (*id, seen.clone());
            if self.busy.borrow().contains_key(&id) {
                continue;
            }
            let Some(step) = self.step(engine, running, by, &seen.key) else {
                continue;
            };
            // Another node may hold writes back until this one has cut, so cuts have a limit of
            // their own.
            let is_urgent = matches!(step, CutStep::Cut(_));
            let now = Instant::now();
            let counts = |(begun, of): &&(Instant, bool)| *of == is_urgent && now - *begun < HANGS;
            if self.busy.borrow().values().filter(counts).count() >= AT_ONCE {
                continue;
            }
            self.busy.borrow_mut().insert(id, (now, is_urgent));
            self.last.set(id);
            let (engine, running) = (Rc::clone(engine), Rc::clone(running));
            tokio::task::spawn_local(async move {
                let done = take(&engine, &running, by, id, &seen, step).await;
                let this = &running.snapshots;
                match done {
                    Ok(()) => this.not_done.clear(&id),
                    Err(error) if this.not_done.is_new(&id, &error.to_string()) => {
                        let snapshot = &seen.key.name;
                        warn!(%id, snapshot, %error, "a step of a snapshot failed; it is tried again");
                    }
                    Err(_) => {}
                }
                this.busy.borrow_mut().remove(&id);
            });
        }
    }

    fn step(
        &self,
        engine: &Engine,
        running: &Running,
        by: Holder,
        key: &SnapshotKey,
    ) -> Option<CutStep> {
        // A replica that could not be cut does not keep others from being cut.
        let is_asked = key.want != Want::Gone && key.is == CutState::Asked;
        if is_asked && may_choose(running, key) {
            return Some(CutStep::Choose);
        }
        if key.want != Want::Gone {
            if let Some(step) = self.step_of_cuts(engine, running, by, key) {
                return Some(step);
            }
            if matches!(key.is, CutState::Asked | CutState::Chosen) {
                // Former lvols are deleted when the attempts are over, which would wait otherwise.
                return None;
            }
        }
        let mut former = key.former.iter();
        let cut = former.find(|cut| cut.node == by.node.0);
        cut.cloned().map(CutStep::Remove)
    }

    /// The step for the present lvols.
    fn step_of_cuts(
        &self,
        engine: &Engine,
        running: &Running,
        by: Holder,
        key: &SnapshotKey,
    ) -> Option<CutStep> {
        let mut own = key.cuts.iter().filter(|cut| cut.node == by.node.0);
        match key.is {
            CutState::Chosen => {
                // The task of the holder that holds writes back would be running.
                if key.held_by.is_some_and(|held_by| held_by == by.into()) || is_over(running, key)
                {
                    return may_choose(running, key).then_some(CutStep::AskAgain);
                }
                let cut = own.find(|cut| cut.pool.is_none());
                cut.cloned().map(CutStep::Cut)
            }
            CutState::There => own.find_map(|cut| {
                // Earlier versions wrote the reason there.
                let known = cut.why.as_ref().or(key.why.as_ref());
                let problem = self.problem(engine, cut, known);
                (problem.as_ref() != known).then_some(CutStep::Note(cut.lvol, problem))
            }),
            CutState::Asked | CutState::Failed => None,
        }
    }

    /// The reason that the lvol of a snapshot is missing; `None`: it is present. `known` is the
    /// reason in etcd, which stays for the first 60 s.
    fn problem(
        &self,
        engine: &Engine,
        cut: &Cut,
        known: Option<&CutProblem>,
    ) -> Option<CutProblem> {
        let Ok(plane) = engine.plane() else {
            return known.cloned();
        };
        if plane.bdevs.lookup(&cut.lvol.to_string()).is_some() {
            self.away.borrow_mut().remove(&cut.lvol);
            return None;
        }
        // The daemon has just started, and opens its pools.
        let now = Instant::now();
        let since = *self.away.borrow_mut().entry(cut.lvol).or_insert(now);
        if now - since < OPENED {
            return known.cloned();
        }
        let pool = cut.pool.unwrap_or_default();
        let is_open = engine.devices.pools.find(&pool.to_string()).is_ok();
        let (code, text) = if is_open {
            let text = format!("lvol {} is gone from its pool", cut.lvol);
            (Errno::ENODEV, text)
        } else {
            (Errno::EAGAIN, format!("the disk of pool {pool} is away"))
        };
        let code = -(code as i32);
        Some(CutProblem { code, text })
    }
}

impl Snapshots {
    /// Reserves the volume for one hold of its writes. False: another snapshot of it, or
    /// [`MAX_HELD`] others, are being made, or hosts have waited a moment ago.
    fn begin_hold(&self, key: &SnapshotKey, now: Instant) -> bool {
        let mut held = self.held.borrow_mut();
        held.retain(|_, until| *until > now);
        // A hold and its end take some seconds at most; the mark of a task that hangs passes.
        let is_full = held.values().filter(|until| **until > now + HANGS).count() >= MAX_HELD;
        if is_full || held.contains_key(&key.volume()) {
            return false;
        }
        held.insert(key.volume(), now + 2 * HANGS);
        true
    }

    /// Lets hosts write for as long as they may have waited.
    fn end_hold(&self, key: &SnapshotKey, now: Instant) {
        let pause = hold_time(key.attempts);
        self.held.borrow_mut().insert(key.volume(), now + pause);
    }
}

/// All entries, beginning after `last`.
fn in_turn<Key>(all: &BTreeMap<Uuid, Key>, last: Uuid) -> impl Iterator<Item = (&Uuid, &Key)> {
    let behind = all.range((Bound::Excluded(last), Bound::Unbounded));
    behind.chain(all.range(..=last))
}

/// True if this node holds the volume, or no node does and this node has a replica of it. [`take`]
/// compares with etcd again.
fn may_choose(running: &Running, key: &SnapshotKey) -> bool {
    let wanted = running.inbox.wanted(key.volume());
    let Some(role) = wanted.and_then(|wanted| wanted.role) else {
        // Its volume was deleted: the first node with a lease says so.
        return running.inbox.standing().keys().next() == Some(&running.me);
    };
    match role.holder {
        Some(holder) => holder.node == running.me,
        None => {
            let mut replicas = role.record.replicas.iter();
            replicas.any(|replica| replica.node == running.me)
        }
    }
}

/// True if the choice is not followed any more. One of its nodes has no lease, or the process that
/// holds writes back does not hold the volume.
fn is_over(running: &Running, key: &SnapshotKey) -> bool {
    let is_away = key.nodes().any(|node| running.inbox.is_node_away(node));
    let role = running.inbox.wanted(key.volume());
    let holder = role.and_then(|wanted| wanted.role?.holder);
    let is_held = key
        .held_by
        .is_none_or(|held_by| holder.is_some_and(|holder| held_by == HeldBy::from(holder)));
    is_away || !is_held
}

async fn take(
    engine: &Rc<Engine>,
    running: &Rc<Running>,
    by: Holder,
    id: Uuid,
    seen: &SeenSnapshot,
    step: CutStep,
) -> Result<(), RpcError> {
    let key = &seen.key;
    let change = async |seen: &SeenSnapshot, next: Option<SnapshotKey>, record: Option<i64>| {
        let change = SnapshotChange {
            id,
            seen,
            next,
            by,
            record,
        };
        running
            .operator
            .snapshots()
            .change(&change)
            .await
            .or_refuse()
    };
    match step {
        CutStep::Choose => {
            let sources = running.operator.snapshots().sources(key.volume()).await;
            let Some(sources) = sources.or_refuse()? else {
                let code = -(Errno::ENODEV as i32);
                let failed = key.failed(code, "the volume was deleted");
                return change(seen, Some(failed), None).await.map(drop);
            };
            let may_be = candidates(engine, by, key, sources.holder, &sources.replicas);
            match (may_be.len(), sources.holder) {
                (0, _) => Ok(()),
                (2.., CutHolder::Stands(_)) => {
                    if !running.snapshots.begin_hold(key, Instant::now()) {
                        return Ok(());
                    }
                    let taken =
                        held::take(engine, running, by, (id, seen), &may_be, &sources).await;
                    running.snapshots.end_hold(key, Instant::now());
                    taken
                }
                _ => {
                    let next = key.chosen(&may_be, &sources, None);
                    change(seen, Some(next), Some(sources.revision))
                        .await
                        .map(drop)
                }
            }
        }
        CutStep::AskAgain => change(seen, Some(key.again()), None).await.map(drop),
        CutStep::Note(lvol, problem) => {
            let next = key.with_missing(lvol, problem.as_ref());
            change(seen, Some(next), None).await.map(drop)
        }
        CutStep::Cut(cut) => {
            let wanted = running.inbox.wanted(key.volume());
            let role = wanted.and_then(|wanted| wanted.role);
            let is_held = role.is_some_and(|role| role.holder.is_some());
            let made = make(engine, id, (key.volume().0, is_held), &cut).await;
            let pool = match after_cut(key, &cut, made) {
                Ok(pool) => pool,
                Err(next) => {
                    if key.held_by.is_none() && next.is == CutState::Asked {
                        sleep(AGAIN).await;
                    }
                    return change(seen, Some(*next), None).await.map(drop);
                }
            };
            let mut seen = seen.clone();
            // Another node may write its cut first. That is no reason to wait: a holder may hold
            // writes back.
            loop {
                let mut next = seen.key.with_cut(cut.lvol, pool);
                // A holder that holds writes back says itself whether they were held.
                if next.is_cut() && next.held_by.is_none() {
                    next = next.made(seconds());
                }
                let is_there = next.is == CutState::There;
                if change(&seen, Some(next), Some(cut.revision)).await? {
                    if is_there {
                        note_made(id, &seen.key);
                    }
                    return Ok(());
                }
                let now = running.operator.snapshots().get(id).await.or_refuse()?;
                let Some(now) = now else {
                    return remove(engine, &cut).await;
                };
                if now.revision == seen.revision {
                    // The volume's record has changed: a replica may have left it before the cut.
                    let again = seen.key.again();
                    return change(&seen, Some(again), None).await.map(drop);
                }
                if now.key.is != CutState::Chosen || !now.key.cuts.contains(&cut) {
                    // The lvol is a former one, or an earlier copy of the transaction wrote it.
                    return Ok(());
                }
                seen = now;
            }
        }
        CutStep::Remove(cut) => {
            if let Err(error) = remove(engine, &cut).await {
                let why = CutProblem {
                    code: error.code,
                    text: error.to_string(),
                };
                if key.want == Want::Gone && key.why.as_ref() != Some(&why) {
                    change(seen, Some(key.with_problem(why)), None).await?;
                }
                return Err(error);
            }
            change(seen, key.without(cut.lvol), None).await.map(drop)
        }
    }
}

fn note_made(id: Uuid, key: &SnapshotKey) {
    let (volume, name, replicas) = (key.volume().0, &key.name, key.cuts.len());
    info!(%id, name, %volume, replicas, "a snapshot of a volume");
}

/// The pool of a cut that was made. The error is the next key without it: the replica is on no
/// pool, another attempt is needed, or the snapshot fails.
fn after_cut(
    key: &SnapshotKey,
    cut: &Cut,
    made: Result<Made, RpcError>,
) -> Result<Uuid, Box<SnapshotKey>> {
    let error = match made {
        Ok(Made::Counts(pool)) => return Ok(pool.handle.id()),
        Ok(Made::Early) => return Err(Box::new(key.again())),
        Err(error) => error,
    };
    let is_on_pool = error.code != -(Errno::ENOTSUP as i32);
    let next = match key.without_cut(cut.lvol) {
        Some(next) if !is_on_pool => {
            if next.is_cut() && next.held_by.is_none() {
                next.made(seconds())
            } else {
                next
            }
        }
        // The daemon has just started, a disk is away, or a pool is full.
        _ if is_on_pool && (error.code == -(Errno::EAGAIN as i32) || key.attempts < CUTS) => {
            key.again()
        }
        _ => {
            let text = error.data.as_ref().map(|facts| facts.to_string());
            key.failed(error.code, &text.unwrap_or(error.message))
        }
    };
    Err(Box::new(next))
}

/// The replicas that this node may choose, its own first. Empty if another node chooses, or if
/// replicas may differ at this moment.
fn candidates(
    engine: &Engine,
    by: Holder,
    key: &SnapshotKey,
    holder: CutHolder,
    replicas: &[CutSource],
) -> Vec<CutSource> {
    let mut may_be = match holder {
        CutHolder::None => match replicas.first() {
            Some(first) if first.node == by.node => replicas.to_vec(),
            _ => Vec::new(),
        },
        CutHolder::Stands(holder) if holder == by => {
            let opened = engine.volumes.opened(&key.volume().0.to_string());
            let status = opened.map(|opened| opened.handle.status());
            status.map_or_else(|_| Vec::new(), |status| used(&status.replicas, replicas))
        }
        CutHolder::Stands(_) | CutHolder::Over(_) => Vec::new(),
    };
    may_be.sort_by_key(|source| source.node != by.node);
    may_be
}

/// The replicas that the open volume writes to. Empty while blocks of its replicas may differ after
/// a crash or a failed write: a host may have read either contents.
fn used(opened: &[ReplicaStatus], replicas: &[CutSource]) -> Vec<CutSource> {
    let reconciles = may_differ(opened);
    let is_used = |source: &CutSource| {
        let device = source.export_id.0.to_string();
        let mut all = opened.iter();
        all.any(|one| one.device == device && one.attached && one.state == ReplicaState::InSync)
    };
    let used = replicas
        .iter()
        .filter(|source| !reconciles && is_used(source));
    used.cloned().collect()
}

/// True while blocks of replicas in sync may differ.
fn may_differ(opened: &[ReplicaStatus]) -> bool {
    opened.iter().any(|one| {
        let resync = one.resync.as_ref();
        one.is_unequal || resync.is_some_and(|resync| resync.kind == ResyncKind::Reconcile)
    })
}

/// The result of taking the snapshot of an lvol.
enum Made {
    Counts(Rc<OpenPool>),
    /// The label does not show the replica as in sync yet, so no volume could be opened from the
    /// lvol. The volume's record says so first.
    Early,
}

/// Takes a snapshot of the replica's lvol, or finds the one that this node took before a restart.
/// The found snapshot is valid if the volume's record has not changed since the choice.
async fn make(
    engine: &Rc<Engine>,
    id: Uuid,
    (volume, is_held): (Uuid, bool),
    cut: &Cut,
) -> Result<Made, RpcError> {
    let (plane, device) = (engine.plane()?, &cut.device);
    if plane.bdevs.lookup(device).is_none() {
        let cause = format!("device \"{device}\" of the replica is away");
        return Err(RpcError::errno(Errno::EAGAIN, cause));
    }
    let Ok((pool, lvol)) = pools::find_lvol(engine, "device", device) else {
        let cause = format!("device \"{device}\" of the replica is no lvol of a pool");
        return Err(RpcError::errno(Errno::ENOTSUP, cause)
            .remedy("snapshots need replicas on pools: nacre volume create --replicas"));
    };
    let names = pool.list_names().await?;
    if !names.iter().any(|one| one.id == cut.lvol) {
        let name = lvol_name(id, cut.lvol);
        pools::snapshot_lvol(&pool, lvol.uuid(), (cut.lvol, name)).await?;
    }
    if plane.bdevs.lookup(&cut.lvol.to_string()).is_none() {
        pools::register_new(engine, &pool, cut.lvol).await?;
    }
    let label = label(engine, &plane, &cut.lvol.to_string()).await;
    let label = label.map_err(|why| RpcError::errno(Errno::EIO, why))?;
    // A write may have failed since the choice. Another node with the cut cannot see that.
    let opened = engine.volumes.opened(&volume.to_string());
    let differs = opened.is_ok_and(|opened| may_differ(&opened.handle.status().replicas));
    Ok(if counts(label.as_ref(), volume, is_held)? && !differs {
        Made::Counts(pool)
    } else {
        Made::Early
    })
}

/// True if a volume can be opened from the lvol of this label. Refuses replicas that no holder
/// closed: they may differ until a node serves the volume again.
fn counts(label: Option<&Label>, volume: Uuid, is_held: bool) -> Result<bool, RpcError> {
    let Some(label) = label.filter(|label| label.volume == volume) else {
        return Ok(false);
    };
    let in_sync = label.replicas.iter();
    let in_sync = in_sync.filter(|one| one.state == LabelState::InSync);
    if !is_held && !label.clean && in_sync.count() > 1 {
        let cause = "no node serves the volume, and its last one did not close it: replicas may \
                     differ in blocks that were being written";
        return Err(RpcError::errno(Errno::EBUSY, cause)
            .remedy("publish the volume, and make the snapshot then"));
    }
    let mut all = label.replicas.iter();
    let own = all.find(|one| one.id == label.replica);
    Ok(own.is_some_and(|own| own.state == LabelState::InSync))
}

/// Deletes an lvol of a snapshot that is not needed any more.
async fn remove(engine: &Rc<Engine>, cut: &Cut) -> Result<(), RpcError> {
    let lvol = cut.lvol;
    if let Ok((pool, found)) = pools::find_lvol(engine, "lvol", &lvol.to_string()) {
        pools::delete(engine, &pool, found).await?;
        info!(%lvol, pool = pool.name(), "deleted: its snapshot is no more");
        return Ok(());
    }
    for pool in engine.devices.pools.list() {
        pool.cuts_have_ended().await;
        // It has no device, or was never cut.
        if pool.list_names().await?.iter().any(|one| one.id == lvol) {
            pool.run(Command::Delete { lvol }).await?;
            return Ok(());
        }
    }
    if cut.pool.is_none() && pools::find_lvol(engine, "device", &cut.device).is_ok() {
        // It would be in the pool of its replica, which is open.
        return Ok(());
    }
    let is_open = |id: Uuid| engine.devices.pools.find(&id.to_string()).is_ok();
    let mut imported = super::pools::imported(engine).into_iter();
    match imported.find(|pool| !is_open(pool.0)) {
        Some(pool) if cut.pool.is_none_or(|its| its == pool.0) => {
            let cause = format!("pool {} is not open, and may have lvol {lvol}", pool.0);
            Err(RpcError::errno(Errno::EAGAIN, cause)
                .remedy("attach its disks, or have the daemon forget it with pool_export"))
        }
        _ => Ok(()),
    }
}
