//! Replaces lost replicas of the volumes that this node serves, and moves those of evicted nodes.
//!
//! ```text
//!   core: repair    which replica, when            core: storm   many nodes gone at once
//!     ▼                                              ▼
//!   place a successor, one transaction ◀─ compares ─ steward (the brake)
//!     ▼
//!   Command::Replace: the former replica goes when the new one is in sync
//! ```
//!
//! The node that serves a volume decides for it and acts: it alone knows the states of replicas,
//! and no other node can change them. What concerns several volumes, the space and the rebuilds of
//! a pool and the brake, is compared by the transaction.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use nacre_bdev_replica::handle::{Command, ReplicaStatus};
use nacre_bdev_replica::model::ReplicaState;
use nacre_cluster_core::repair::{Act, Cause, Patience, Replica, Shunned, Why};
use nacre_cluster_core::storm::Storm;
use nacre_cluster_core::{MemberId, NodeId, PoolId};
use nacre_cluster_node::{Brake, Export, Looked, NodeState, Rebuild, clock};
use serde_json::json;
use tracing::{debug, info, warn};
use uuid::Uuid;

use super::Running;
use super::placed::{Successor, places, with_successor};
use crate::refusal::OrRefuse;
use crate::rpc::RpcError;
use crate::rpc::error::Errno;
use crate::services::engine::Engine;
use crate::services::volumes::{Listed, OpenState, Opened};

const LOOK: Duration = Duration::from_secs(1);
/// Pause after an act that was refused, for example because no pool has room.
const REFUSED: Duration = Duration::from_secs(10);
/// Time between two looks at the brake, for the metric.
const BRAKE: Duration = Duration::from_secs(10);

#[derive(Default)]
struct Steward {
    volumes: BTreeMap<Uuid, Care>,
    shunned: Shunned,
}

/// The care for one volume that this node serves.
#[derive(Default)]
struct Care {
    patience: Patience,
    /// The last refusal that was reported, and the time of the next attempt.
    refused: Option<(String, tokio::time::Instant)>,
    /// No export of the volume counts as being filled. A former holder may have left one.
    is_calm: bool,
}

/// A volume that this node serves, with its replicas.
struct Served {
    opened: Rc<Opened>,
    id: Uuid,
    name: String,
    replicas: Vec<(Replica, ReplicaStatus)>,
    exports: Vec<(NodeId, MemberId, Export)>,
}

/// Cares for volumes until the daemon ends.
pub(super) async fn care(engine: Rc<Engine>, running: Rc<Running>) {
    let mut steward = Steward::default();
    while !running.is_ending.get() && engine.plane().is_ok() {
        tokio::time::sleep(LOOK).await;
        if has_good_lease(&running) {
            steward.turn(&engine, &running).await;
        }
    }
}

fn has_good_lease(running: &Running) -> bool {
    let state = running.node.borrow().as_ref().map(super::Node::state);
    matches!(state, Some(NodeState::In { is_good: true, .. })) && running.inbox.is_listed()
}

/// Sets the brake when many nodes are gone at once, until the daemon ends.
pub(super) async fn watch(engine: Rc<Engine>, running: Rc<Running>) {
    let mut storm = Storm::default();
    let mut next_look = tokio::time::Instant::now();
    while !running.is_ending.get() && engine.plane().is_ok() {
        tokio::time::sleep(LOOK).await;
        if !has_good_lease(&running) {
            continue;
        }
        let (nodes, standing) = (running.inbox.nodes(), running.inbox.standing());
        let looked = running.operator.watch_for_storms(
            running.me,
            &mut storm,
            &nodes,
            &standing,
            clock::now(),
        );
        match looked.await {
            Ok(Looked::Nothing) => {}
            Ok(Looked::Braked(brake)) => report_brake(&engine, &brake),
            Err(error) => debug!(%error, "the brake on replacements is not known"),
        }
        let now = tokio::time::Instant::now();
        if now >= next_look
            && let Ok((steward, _)) = running.operator.steward().await
        {
            running.is_braked.set(steward.brake.is_some());
            next_look = now + BRAKE;
        }
    }
}

impl Steward {
    async fn turn(&mut self, engine: &Rc<Engine>, running: &Rc<Running>) {
        let open: Vec<(Listed, Rc<Opened>)> = engine
            .volumes
            .list()
            .into_iter()
            .filter_map(|listed| match &listed.open_state {
                OpenState::Open(opened) => {
                    let opened = Rc::clone(opened);
                    Some((listed, opened))
                }
                _ => None,
            })
            .collect();
        self.volumes
            .retain(|id, _| open.iter().any(|(listed, _)| listed.id() == *id));
        for (listed, opened) in open {
            let care = self.volumes.entry(listed.id()).or_default();
            if !needs_care(running, &listed, &opened) && care.is_calm {
                care.patience = Patience::default();
                care.refused = None;
                continue;
            }
            match served(running, &listed, opened).await {
                Ok(served) => self.look_at(engine, running, served).await,
                Err(error) => debug!(%error, "the exports of a volume are not known"),
            }
        }
    }

    async fn look_at(&mut self, engine: &Rc<Engine>, running: &Rc<Running>, served: Served) {
        for (node, member, _) in served.filled() {
            match running.operator.rebuild_is_done(node, member).await {
                Ok(()) => {
                    if let Some(pool) = served.pool_of(member) {
                        self.shunned.succeeded(pool);
                    }
                }
                Err(error) => debug!(%error, "a rebuild that has ended is still counted"),
            }
        }
        let after = engine.settings.cluster.replace_after.time();
        let care = self.volumes.entry(served.id).or_default();
        care.is_calm = served
            .exports
            .iter()
            .all(|(_, _, export)| export.rebuild.is_none());
        let replicas: Vec<Replica> = served.replicas.iter().map(|(one, _)| *one).collect();
        let Some(act) = care.patience.decide(clock::now(), after, &replicas) else {
            return;
        };
        let is_early = |at: &tokio::time::Instant| tokio::time::Instant::now() < *at;
        if care.refused.as_ref().is_some_and(|(_, at)| is_early(at)) {
            return;
        }
        care.is_calm = false;
        let done = match act {
            Act::Replace { replica, cause } => {
                replace(engine, running, &served, &mut self.shunned, replica, cause).await
            }
            Act::Drop { replica, why } => {
                give_up(engine, &served, &mut self.shunned, replica, why).await
            }
        };
        care.refused = done.err().map(|error| {
            let text = error.to_string();
            let is_known = care
                .refused
                .as_ref()
                .is_some_and(|(known, _)| *known == text);
            if !is_known {
                warn!(volume = served.name, %error, "a replica is not replaced; it is tried again");
            }
            (text, tokio::time::Instant::now() + REFUSED)
        });
    }
}

/// True if a replica is not in sync, its node is evicted, or a replacement runs.
fn needs_care(running: &Running, listed: &Listed, opened: &Opened) -> bool {
    let status = opened.handle.status();
    let is_out = |one: &ReplicaStatus| one.state != ReplicaState::InSync;
    let nodes = running.inbox.nodes();
    let is_evicted = |node: &Uuid| nodes.get(&NodeId(*node)).is_some_and(|key| key.evict);
    let record = &listed.record.replicas;
    status.replicas.iter().any(is_out)
        || record.iter().any(|one| one.replaces.is_some())
        || record
            .iter()
            .any(|one| one.node.as_ref().is_some_and(is_evicted))
}

async fn served(
    running: &Running,
    listed: &Listed,
    opened: Rc<Opened>,
) -> Result<Served, nacre_cluster_node::Error> {
    let exports = places(running, listed.id()).await?;
    let nodes = running.inbox.nodes();
    let status = opened.handle.status();
    let replica = |status: ReplicaStatus| {
        let stored = listed
            .record
            .replicas
            .iter()
            .find(|one| one.id == status.id)?;
        let node = NodeId(stored.node?);
        let key = nodes.get(&node);
        let export = exports
            .iter()
            .find(|(_, member, _)| member.0.to_string() == status.device);
        let rebuild = export.and_then(|(_, _, export)| export.rebuild);
        let one = Replica {
            id: MemberId(status.id),
            node,
            is_placed: export.is_some(),
            is_in_sync: status.state == ReplicaState::InSync,
            is_attached: status.attached && !running.inbox.is_node_away(node),
            is_offline: status.offline,
            is_evicted: key.is_some_and(|key| key.evict),
            is_drained: key.is_some_and(|key| key.drain && !key.evict),
            replaces: stored.replaces.map(MemberId),
            is_repair: rebuild == Some(Rebuild::Lost),
        };
        Some((one, status))
    };
    Ok(Served {
        id: listed.id(),
        name: status.name.clone(),
        replicas: status.replicas.into_iter().filter_map(replica).collect(),
        opened,
        exports,
    })
}

impl Served {
    fn replica(&self, id: MemberId) -> Option<&(Replica, ReplicaStatus)> {
        self.replicas.iter().find(|(one, _)| one.id == id)
    }

    /// The export of a replica that the cluster placed.
    fn export_of(&self, status: &ReplicaStatus) -> Option<&(NodeId, MemberId, Export)> {
        let mut exports = self.exports.iter();
        exports.find(|(_, member, _)| member.0.to_string() == status.device)
    }

    fn pool_of(&self, member: MemberId) -> Option<PoolId> {
        let (.., export) = self.exports.iter().find(|(_, id, _)| *id == member)?;
        Some(PoolId(export.place.as_ref()?.pool))
    }

    /// Exports that count as being filled, and are in sync.
    fn filled(&self) -> Vec<(NodeId, MemberId, Export)> {
        let is_in_sync = |member: &MemberId| {
            self.replicas
                .iter()
                .any(|(one, status)| one.is_in_sync && status.device == member.0.to_string())
        };
        let exports = self.exports.iter();
        exports
            .filter(|(_, member, export)| export.rebuild.is_some() && is_in_sync(member))
            .cloned()
            .collect()
    }
}

async fn replace(
    engine: &Rc<Engine>,
    running: &Rc<Running>,
    served: &Served,
    shunned: &mut Shunned,
    replica: MemberId,
    cause: Cause,
) -> Result<(), RpcError> {
    let gone = || RpcError::errno(Errno::EAGAIN, "the replica was changed meanwhile");
    let (one, status) = served.replica(replica).ok_or_else(gone)?;
    let (.., export) = served.export_of(status).ok_or_else(gone)?;
    let place = export.place.as_ref().ok_or_else(gone)?;
    let now = clock::now();
    let pools = running.operator.pools().await.or_refuse()?;
    shunned.retain(|pool| pools.iter().any(|(id, _)| *id == pool));
    // A device that failed may be on a pool that seems well.
    let of_cluster = pools.iter().map(|(id, _)| *id);
    let is_left_out = |pool: &PoolId| pool.0 == place.pool || shunned.is_shunned(*pool, now);
    let others = served
        .replicas
        .iter()
        .filter(|(other, _)| other.id != one.id);
    let successor = Successor {
        volume: served.id,
        place,
        kept: others.map(|(other, _)| other.node).collect(),
        rebuild: match cause {
            Cause::Lost => Rebuild::Lost,
            Cause::Evicted => Rebuild::Evicted,
        },
        shunned: of_cluster.filter(is_left_out).collect(),
    };
    let chosen = Cell::new(None);
    let work = async |device| {
        let command = Command::Replace {
            replica: status.id.to_string(),
            device,
            force: false,
        };
        served.opened.handle.run(command).await.or_refuse()
    };
    let done = with_successor(
        engine,
        running,
        successor,
        |pool| chosen.set(Some(pool)),
        work,
    );
    let done = done.await;
    if done.is_err() {
        if let Some(pool) = chosen.get() {
            shunned.failed(pool, clock::now());
        }
        return done;
    }
    let node = engine
        .volumes
        .cluster
        .name_of(one.node.0)
        .unwrap_or_default();
    let name = &served.name;
    let why = match cause {
        Cause::Lost => "is lost",
        Cause::Evicted => "is on an evicted node",
    };
    let text =
        format!("the replica of volume \"{name}\" on node {node} {why}: it is being replaced");
    info!("{text}");
    let facts =
        json!({ "volume": served.id, "node": one.node.0, "pool": chosen.get().map(|p| p.0) });
    engine
        .notes
        .report("cluster_replica_replaced", name.clone(), text, facts);
    Ok(())
}

/// Removes a successor that is not in sync. Its lvol goes with its export.
async fn give_up(
    engine: &Rc<Engine>,
    served: &Served,
    shunned: &mut Shunned,
    replica: MemberId,
    why: Why,
) -> Result<(), RpcError> {
    let gone = || RpcError::errno(Errno::EAGAIN, "the replica was changed meanwhile");
    let (one, status) = served.replica(replica).ok_or_else(gone)?;
    let command = Command::Remove {
        replica: status.id.to_string(),
        force: None,
    };
    served.opened.handle.run(command).await.or_refuse()?;
    let pool = served.export_of(status);
    let pool = pool.and_then(|(.., export)| export.place.as_ref());
    let node = engine
        .volumes
        .cluster
        .name_of(one.node.0)
        .unwrap_or_default();
    let name = &served.name;
    let text = match why {
        Why::Returned => format!(
            "the former replica of volume \"{name}\" returned: its successor on node {node} is \
             given up"
        ),
        Why::Lost => {
            if let Some(place) = pool {
                shunned.failed(PoolId(place.pool), clock::now());
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

fn report_brake(engine: &Engine, brake: &Brake) {
    let names = brake.gone.iter().map(|node| {
        let name = engine.volumes.cluster.name_of(*node);
        name.unwrap_or_else(|| node.to_string())
    });
    let names = names.collect::<Vec<_>>().join(", ");
    let of = match &brake.zone {
        Some(zone) => format!("{} of zone {zone}", brake.of),
        None => brake.of.to_string(),
    };
    let text = format!(
        "{} of {of} nodes went at once ({names}): no lost replica is replaced until `nacre cluster \
         repair --go`",
        brake.gone.len()
    );
    warn!("{text}");
    let facts = json!({ "gone": brake.gone, "of": brake.of, "zone": brake.zone });
    let cluster = engine.settings.cluster.name.clone().unwrap_or_default();
    engine.notes.report("cluster_brake", cluster, text, facts);
}
