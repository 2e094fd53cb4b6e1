//! Replaces lost replicas of the volumes that this node serves, and moves replicas away from
//! evicted nodes.
//!
//! ```text
//!   core: repair    which replica, when            core: storm   many leases lost at once
//!     ▼                                              ▼
//!   place a successor, one transaction ◀─ compares ─ the brake
//!     ▼
//!   Command::Replace: the former replica is removed when the new one is in sync
//! ```
//!
//! The node that serves a volume decides for it and acts. Only this node knows the states of the
//! replicas, and no other node can change them. The transaction compares facts that concern several
//! volumes: the space and the resyncs of a pool, and the brake.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::mem::{Discriminant, discriminant};
use std::rc::Rc;
use std::time::Duration;

use nacre_bdev_replica::handle::{Command, ReplicaStatus};
use nacre_bdev_replica::model::{ReplicaRecord, ReplicaState};
use nacre_cluster_core::repair::{Absences, Cause, FailedPools, RepairAct, ServedReplica, Why};
use nacre_cluster_core::storm::Storm;
use nacre_cluster_core::{ExportId, NodeId, PoolId, ReplicaId};
use nacre_cluster_node::{
    Brake, BrakeKey, Error, Export, Looked, NodeKey, NodeState, Resync, Unmet, clock,
};
use serde_json::json;
use tokio::sync::Semaphore;
use tracing::{debug, info, warn};
use uuid::Uuid;

use super::Running;
use super::placed::{NotReplaced, Successor, places, with_successor};
use crate::refusal::OrRefuse;
use crate::rpc::RpcError;
use crate::rpc::error::Errno;
use crate::services::Engine;
use crate::services::volumes::{Listed, OpenState, OpenedVolume};

const LOOK: Duration = Duration::from_secs(1);
/// Pause after an action that was refused, for example because no pool has room.
const REFUSED: Duration = Duration::from_secs(10);
/// Interval at which the brake is read for the metric.
const BRAKE: Duration = Duration::from_secs(10);

/// Most volumes that are checked or repaired at the same time.
const AT_ONCE: usize = 8;

/// The repairs of all volumes that this node serves.
struct Repairs {
    volumes: RefCell<BTreeMap<Uuid, VolumeRepair>>,
    failed_pools: RefCell<FailedPools>,
    at_once: Semaphore,
}

impl Default for Repairs {
    fn default() -> Self {
        Self {
            volumes: RefCell::default(),
            failed_pools: RefCell::default(),
            at_once: Semaphore::new(AT_ONCE),
        }
    }
}

/// The repair of one volume that this node serves.
#[derive(Default)]
struct VolumeRepair {
    absences: Absences,
    /// The last refusal that was reported, and the time of the next attempt.
    refused: Option<(RefusalKind, tokio::time::Instant)>,
    /// No export of the volume is marked as being resynced. A former holder may have left such a
    /// mark.
    has_no_resync: bool,
    /// A task checks the volume.
    is_busy: bool,
}

/// The kind of a refusal, without its figures. A refusal of the same kind is not reported again.
#[derive(Debug, PartialEq, Eq)]
enum RefusalKind {
    /// Too few nodes or pools meet a demand.
    Demand(Unmet),
    Cluster(Discriminant<Error>),
    /// The code and the field of the call.
    Call(i32, Option<String>),
}

impl RefusalKind {
    fn of(error: &NotReplaced) -> Self {
        match error {
            NotReplaced::Cluster(Error::NotPlaced { demand, .. }) => Self::Demand(*demand),
            NotReplaced::Cluster(other) => Self::Cluster(discriminant(other)),
            NotReplaced::Call(error) => {
                let facts = error.data.as_ref();
                Self::Call(error.code, facts.and_then(|facts| facts.field.clone()))
            }
        }
    }
}

/// A volume that this node serves, with its replicas.
struct Served {
    opened: Rc<OpenedVolume>,
    id: Uuid,
    name: String,
    replicas: Vec<(ServedReplica, ReplicaStatus)>,
    exports: Vec<(NodeId, ExportId, Export)>,
}

/// Repairs volumes until the daemon ends.
pub(super) async fn repair(engine: Rc<Engine>, running: Rc<Running>) {
    let repairs = Rc::new(Repairs::default());
    while !running.is_ending.get() && engine.plane().is_ok() {
        tokio::time::sleep(LOOK).await;
        if has_good_lease(&running) {
            repairs.turn(&engine, &running);
        }
    }
}

fn has_good_lease(running: &Running) -> bool {
    let state = running.node.borrow().as_ref().map(super::Node::state);
    matches!(state, Some(NodeState::In { is_good: true, .. })) && running.inbox.is_listed()
}

/// Sets the brake when many nodes lose their leases at once, until the daemon ends.
pub(super) async fn watch(engine: Rc<Engine>, running: Rc<Running>) {
    let mut storm = Storm::default();
    let mut next_look = tokio::time::Instant::now();
    while !running.is_ending.get() && engine.plane().is_ok() {
        tokio::time::sleep(LOOK).await;
        if !has_good_lease(&running) {
            continue;
        }
        let (nodes, standing) = (running.inbox.nodes(), running.inbox.standing());
        let looked = BrakeKey::watch(
            &running.operator,
            running.me,
            &mut storm,
            &nodes,
            &standing,
            clock::now(),
        );
        match looked.await {
            Ok(Looked::Nothing) => {}
            Ok(Looked::Braked(brake)) => report_brake(&engine, &brake),
            Ok(Looked::Released(_)) => report_release(&engine, "all nodes are back, or removed"),
            Err(error) => debug!(%error, "the brake on replacements is not known"),
        }
        let now = tokio::time::Instant::now();
        if now >= next_look
            && let Ok((stored, _)) = BrakeKey::read(&running.operator).await
        {
            running.is_braked.set(stored.brake.is_some());
            next_look = now + BRAKE;
        }
    }
}

impl Repairs {
    /// Starts a task for each volume that needs a check. A disk that does not answer delays only
    /// its volume.
    fn turn(self: &Rc<Self>, engine: &Rc<Engine>, running: &Rc<Running>) {
        let all: Vec<(Listed, Rc<OpenedVolume>)> =
            engine.volumes.list().into_iter().filter_map(open).collect();
        let nodes = running.inbox.nodes();
        let mut volumes = self.volumes.borrow_mut();
        volumes.retain(|id, repair| repair.is_busy || all.iter().any(|(one, _)| one.id() == *id));
        for (listed, opened) in all {
            let repair = volumes.entry(listed.id()).or_default();
            if repair.is_busy {
                continue;
            }
            if !needs_repair(&nodes, &listed, &opened) && repair.has_no_resync {
                repair.absences = Absences::default();
                repair.refused = None;
                continue;
            }
            repair.is_busy = true;
            let (this, engine, running) = (Rc::clone(self), Rc::clone(engine), Rc::clone(running));
            let id = listed.id();
            tokio::task::spawn_local(async move {
                // Waiting volumes take their turns in order.
                let permit = this.at_once.acquire().await;
                // The facts from before the wait may be old.
                if permit.is_ok()
                    && let Ok(listed) = engine.volumes.find(&id.to_string())
                    && let Some((listed, opened)) = open(listed)
                {
                    let nodes = running.inbox.nodes();
                    match served(&running, &nodes, &listed, opened).await {
                        Ok(Some(served)) => this.look_at(&engine, &running, served).await,
                        Ok(None) => {}
                        Err(error) => debug!(%error, "the exports of a volume are not known"),
                    }
                }
                this.of(id, |repair| repair.is_busy = false);
            });
        }
    }

    /// Gives access to the repair state of a volume.
    fn of<T>(&self, id: Uuid, work: impl FnOnce(&mut VolumeRepair) -> T) -> T {
        work(self.volumes.borrow_mut().entry(id).or_default())
    }

    async fn look_at(&self, engine: &Rc<Engine>, running: &Rc<Running>, served: Served) {
        for (node, export_id, _) in served.filled() {
            match running.operator.resync_is_done(node, export_id).await {
                Ok(()) => {
                    if let Some(pool) = served.pool_of(export_id) {
                        self.failed_pools.borrow_mut().succeeded(pool);
                    }
                }
                Err(error) => debug!(%error, "a resync that has ended is still counted"),
            }
        }
        let after = engine.settings.cluster.replace_after.time();
        let replicas: Vec<ServedReplica> = served.replicas.iter().map(|(one, _)| *one).collect();
        let mut exports = served.exports.iter();
        let has_no_resync = exports.all(|(_, _, export)| export.resync.is_none());
        let act = self.of(served.id, |repair| {
            repair.has_no_resync = has_no_resync;
            let act = repair.absences.decide(clock::now(), after, &replicas)?;
            let is_early = |(_, at): &(_, _)| tokio::time::Instant::now() < *at;
            if repair.refused.as_ref().is_some_and(is_early) {
                return None;
            }
            repair.has_no_resync = false;
            Some(act)
        });
        let done = match act {
            None => return,
            Some(RepairAct::Replace { replica, cause }) => {
                replace(engine, running, &served, &self.failed_pools, replica, cause).await
            }
            Some(RepairAct::Drop { replica, why }) => {
                give_up(engine, &served, &self.failed_pools, replica, why).await
            }
        };
        let refused = done.err().map(|error| {
            let refused = RefusalKind::of(&error);
            let is_known = self.of(served.id, |repair| {
                let known = repair.refused.as_ref();
                known.is_some_and(|(known, _)| *known == refused)
            });
            if !is_known {
                warn!(volume = served.name, %error, "a replica is not replaced; it is tried again");
            }
            (refused, tokio::time::Instant::now() + REFUSED)
        });
        self.of(served.id, |repair| repair.refused = refused);
    }
}

fn open(listed: Listed) -> Option<(Listed, Rc<OpenedVolume>)> {
    let OpenState::Open(opened) = &listed.open_state else {
        return None;
    };
    let opened = Rc::clone(opened);
    Some((listed, opened))
}

/// True if a replica is not in sync, its node is evicted, or a replacement runs.
fn needs_repair(nodes: &BTreeMap<NodeId, NodeKey>, listed: &Listed, opened: &OpenedVolume) -> bool {
    let status = opened.handle.status();
    let is_out = |one: &ReplicaStatus| one.state != ReplicaState::InSync;
    let is_evicted = |node: &Uuid| nodes.get(&NodeId(*node)).is_some_and(|key| key.evict);
    let record = &listed.record.replicas;
    status.replicas.iter().any(is_out)
        || record.iter().any(|one| one.replaces.is_some())
        || record
            .iter()
            .any(|one| one.node.as_ref().is_some_and(is_evicted))
}

/// `None`: the replicas of the volume are being changed.
async fn served(
    running: &Running,
    nodes: &BTreeMap<NodeId, NodeKey>,
    listed: &Listed,
    opened: Rc<OpenedVolume>,
) -> Result<Option<Served>, Error> {
    let exports = places(running, &listed.record.replicas).await?;
    let status = opened.handle.status();
    let stored: BTreeMap<Uuid, &ReplicaRecord> = listed
        .record
        .replicas
        .iter()
        .map(|one| (one.id, one))
        .collect();
    // A replica that is missing here would seem to be gone, or to need a successor.
    let is_same = status.replicas.len() == stored.len()
        && status
            .replicas
            .iter()
            .all(|one| stored.contains_key(&one.id));
    if !is_same {
        return Ok(None);
    }
    let replica = |status: ReplicaStatus| {
        let stored = stored.get(&status.id)?;
        let node = NodeId(stored.node?);
        let key = nodes.get(&node);
        let export = exports
            .iter()
            .find(|(_, export_id, _)| export_id.0.to_string() == status.device);
        let resync = export.and_then(|(_, _, export)| export.resync);
        let one = ServedReplica {
            id: ReplicaId(status.id),
            node,
            is_placed: export.is_some(),
            is_in_sync: status.state == ReplicaState::InSync,
            is_attached: status.attached && !running.inbox.is_node_away(node),
            is_offline: status.offline,
            is_evicted: key.is_some_and(|key| key.evict),
            is_drained: key.is_some_and(|key| key.drain && !key.evict),
            replaces: stored.replaces.map(ReplicaId),
            is_repair: resync == Some(Resync::Lost),
        };
        Some((one, status))
    };
    Ok(Some(Served {
        id: listed.id(),
        name: status.name.clone(),
        replicas: status.replicas.into_iter().filter_map(replica).collect(),
        opened,
        exports,
    }))
}

impl Served {
    fn replica(&self, id: ReplicaId) -> Option<&(ServedReplica, ReplicaStatus)> {
        self.replicas.iter().find(|(one, _)| one.id == id)
    }

    /// The export of a replica that the cluster placed.
    fn export_of(&self, status: &ReplicaStatus) -> Option<&(NodeId, ExportId, Export)> {
        let mut exports = self.exports.iter();
        exports.find(|(_, export_id, _)| export_id.0.to_string() == status.device)
    }

    fn pool_of(&self, export_id: ExportId) -> Option<PoolId> {
        let (.., export) = self.exports.iter().find(|(_, id, _)| *id == export_id)?;
        Some(PoolId(export.place.as_ref()?.pool))
    }

    /// Exports that are marked as being resynced although their replicas are in sync.
    fn filled(&self) -> Vec<(NodeId, ExportId, Export)> {
        let is_in_sync = |export_id: &ExportId| {
            self.replicas
                .iter()
                .any(|(one, status)| one.is_in_sync && status.device == export_id.0.to_string())
        };
        let exports = self.exports.iter();
        exports
            .filter(|(_, export_id, export)| export.resync.is_some() && is_in_sync(export_id))
            .cloned()
            .collect()
    }
}

async fn replace(
    engine: &Rc<Engine>,
    running: &Rc<Running>,
    served: &Served,
    failed_pools: &RefCell<FailedPools>,
    replica: ReplicaId,
    cause: Cause,
) -> Result<(), NotReplaced> {
    let gone = || RpcError::errno(Errno::EAGAIN, "the replica was changed meanwhile");
    let (one, status) = served.replica(replica).ok_or_else(gone)?;
    let (.., export) = served.export_of(status).ok_or_else(gone)?;
    let place = export.place.as_ref().ok_or_else(gone)?;
    let now = clock::now();
    let pools = running.operator.pools().await?;
    failed_pools
        .borrow_mut()
        .retain(|pool| pools.iter().any(|(id, _)| *id == pool));
    // A device that failed may be on a pool that seems well.
    let of_cluster = pools.iter().map(|(id, _)| *id);
    let is_left_out =
        |pool: &PoolId| pool.0 == place.pool || failed_pools.borrow().is_left_out(*pool, now);
    let others = served
        .replicas
        .iter()
        .filter(|(other, _)| other.id != one.id);
    let successor = Successor {
        volume: served.id,
        place,
        other_nodes: others.map(|(other, _)| other.node).collect(),
        resync: match cause {
            Cause::Lost => Resync::Lost,
            Cause::Evicted => Resync::Evicted,
        },
        left_out: of_cluster.filter(is_left_out).collect(),
    };
    let work = async |device| {
        let command = Command::Replace {
            replica: status.id.to_string(),
            device,
            force: false,
        };
        served.opened.handle.run(command).await.or_refuse()
    };
    let (pool, done) = with_successor(engine, running, successor, work).await?;
    let is_of_pool = |error: &RpcError| {
        let of_pool = [Errno::ENODEV, Errno::ETIMEDOUT];
        of_pool.iter().any(|errno| error.code == -(*errno as i32))
    };
    if done.as_ref().is_err_and(is_of_pool) {
        // Its node made no lvol, or is not reached. Other errors are none of the pool.
        failed_pools.borrow_mut().failed(pool, clock::now());
    }
    done?;
    let node = name_of(engine, one.node);
    let name = &served.name;
    let why = match cause {
        Cause::Lost => "is lost",
        Cause::Evicted => "is on an evicted node",
    };
    let text =
        format!("the replica of volume \"{name}\" on node {node} {why}: it is being replaced");
    info!("{text}");
    let facts = json!({ "volume": served.id, "node": one.node.0, "pool": pool.0 });
    engine
        .notes
        .report("cluster_replica_replaced", name.clone(), text, facts);
    Ok(())
}

/// Removes a successor that is not in sync. The end of its export deletes its lvol.
async fn give_up(
    engine: &Rc<Engine>,
    served: &Served,
    failed_pools: &RefCell<FailedPools>,
    replica: ReplicaId,
    why: Why,
) -> Result<(), NotReplaced> {
    let gone = || RpcError::errno(Errno::EAGAIN, "the replica was changed meanwhile");
    let (one, status) = served.replica(replica).ok_or_else(gone)?;
    let command = Command::GiveUp {
        replica: status.id.to_string(),
    };
    served.opened.handle.run(command).await.or_refuse()?;
    let pool = served.export_of(status);
    let pool = pool.and_then(|(.., export)| export.place.as_ref());
    let node = name_of(engine, one.node);
    let name = &served.name;
    let text = match why {
        Why::Returned => format!(
            "the former replica of volume \"{name}\" returned: its successor on node {node} is \
             given up"
        ),
        Why::Lost => {
            if let Some(place) = pool {
                failed_pools
                    .borrow_mut()
                    .failed(PoolId(place.pool), clock::now());
            }
            format!("the new replica of volume \"{name}\" on node {node} is lost: it is given up")
        }
    };
    info!("{text}");
    let facts = json!({ "volume": served.id, "node": one.node.0 });
    engine
        .notes
        .report("cluster_replica_given_up", name.clone(), text, facts);
    Ok(())
}

/// Reports that the brake was released.
pub(crate) fn report_release(engine: &Engine, why: &str) {
    let text = format!("{why}: lost replicas are replaced again");
    info!("{text}");
    let cluster = engine.settings.cluster.name.clone().unwrap_or_default();
    engine
        .notes
        .report("cluster_brake_released", cluster, text, json!({}));
}

fn name_of(engine: &Engine, node: NodeId) -> String {
    let name = engine.cluster.name_of(node.0);
    name.unwrap_or_else(|| node.0.to_string())
}

fn report_brake(engine: &Engine, brake: &Brake) {
    let names = brake.gone.iter().map(|node| name_of(engine, NodeId(*node)));
    let names = names.collect::<Vec<_>>().join(", ");
    let of = match &brake.zone {
        Some(zone) => format!("{} of zone {zone}", brake.of),
        None => brake.of.to_string(),
    };
    let text = format!(
        "{} of {of} nodes lost their leases at once ({names}): no lost replica is replaced until \
         they are back, or `nacre cluster repair --go`",
        brake.gone.len()
    );
    warn!("{text}");
    let facts = json!({ "gone": brake.gone, "of": brake.of, "zone": brake.zone });
    let cluster = engine.settings.cluster.name.clone().unwrap_or_default();
    engine.notes.report("cluster_brake", cluster, text, facts);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn not_placed(why: &str, demand: Unmet) -> NotReplaced {
        let (key, why) = ("/nacre/lab/steward".to_owned(), why.to_owned());
        NotReplaced::Cluster(Error::NotPlaced { key, why, demand })
    }

    /// Goal: a refusal is reported again only when its kind changes, and names with digits stay
    /// apart. Method: the same demand with other figures, other demands, and other calls.
    #[test]
    fn figures_do_not_change_a_refusal() {
        let of = |error: &NotReplaced| RefusalKind::of(error);
        let room = not_placed("no pool has room for 7 bytes", Unmet::Room);
        assert_eq!(
            of(&room),
            of(&not_placed("no pool has room for 8 bytes", Unmet::Room))
        );
        assert_ne!(of(&room), of(&not_placed("pool 1 is busy", Unmet::Busy)));
        let key = "/nacre/lab/steward".to_owned();
        let braked = NotReplaced::Cluster(Error::Braked { key });
        assert_ne!(of(&room), of(&braked));
        let call = |errno, field: &str| {
            let error = RpcError::errno(errno, "device 1 has 2 bytes").field(field);
            NotReplaced::Call(error)
        };
        let absent = call(Errno::ENODEV, "name");
        assert_eq!(of(&absent), of(&call(Errno::ENODEV, "name")));
        assert_ne!(of(&absent), of(&call(Errno::EAGAIN, "name")));
        assert_ne!(of(&absent), of(&call(Errno::ENODEV, "pool1")));
        assert_ne!(
            of(&call(Errno::ENODEV, "pool1")),
            of(&call(Errno::ENODEV, "pool2"))
        );
        assert_ne!(of(&absent), of(&braked));
    }
}
