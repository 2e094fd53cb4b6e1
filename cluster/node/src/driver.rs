//! The driver of one node: a loop on the thread `nacre-cluster` that feeds the machines of
//! `nacre-cluster-core` with answers of etcd, watch events and reports of the engine, and performs
//! their decisions. Nothing in the loop waits: requests to etcd are tasks, the engine answers later.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use nacre_cluster_core::join::{Found, InUse, JoinStep};
use nacre_cluster_core::lease::Word;
use nacre_cluster_core::volume::State;
use nacre_cluster_core::{
    BootTime, Effect, Incarnation, Join, Lease, NodeId, Record, Revision, Timing, Transaction,
    VolumeId,
};
use nacre_cluster_etcd::{Client, Error as Said, KeyValue, LeaseKey, NodeLeases, Outcome, Prefix};
use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::sleep;
use uuid::Uuid;

use crate::clock;
use crate::error::Error;
use crate::events::{Decision, Events};
use crate::follow::{Change, Kind, follow};
use crate::keys::{self, Description, NodeKey};
use crate::nodes::{Nodes, Step};
use crate::operations::{self, Operation, Progress};
use crate::serving::{Report, Serving};
use crate::upkeep;
use crate::volumes::{Commit, Volumes};

/// The turn of the clock: a rank waits 150 ms, and no machine has a shorter time.
const TURN: Duration = Duration::from_millis(50);
/// Watch events that may wait for the loop.
const NEWS: usize = 1024;
/// Events and reports of one round.
const ROUND: usize = 256;
/// Time for the hand-over of all volumes, when the node ends.
const LEAVE: Duration = Duration::from_secs(6);
/// Time until a failed request of the start is made again.
const AGAIN: Duration = Duration::from_millis(400);

/// This node.
#[derive(Debug, Clone)]
pub struct Me {
    pub id: NodeId,
    /// Derived from the machine's id. `None`: a lease found at the start is watched for two leases,
    /// because it may be another machine's.
    pub machine: Option<Uuid>,
    /// Unique for each start. The guardian knows it, and so which lease to give back.
    pub process: Uuid,
    /// The id of the cluster that this node joined before.
    pub cluster: Option<Uuid>,
    pub description: Description,
}

/// The state of this node.
#[derive(Debug, Clone, PartialEq)]
pub enum NodeState {
    /// It has no lease yet, or lost its incarnation: the last obstacle, if there is one.
    Joining {
        obstacle: Option<Error>,
    },
    /// It has a lease. Without a good one it serves by assent, and takes nothing.
    In {
        cluster: Uuid,
        incarnation: Incarnation,
        is_good: bool,
    },
    /// It stays out, until an operator acts and the daemon starts again.
    Out {
        why: Error,
    },
    Left,
}

/// The parts of the driver that other threads read.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) word: Arc<Word>,
    pub(crate) events: Events,
    pub(crate) state: watch::Sender<NodeState>,
    /// The last renewal of each node that this one saw.
    pub(crate) seen: Mutex<BTreeMap<NodeId, BootTime>>,
    pub(crate) volumes: Mutex<Vec<(VolumeId, State)>>,
}

/// The result of a request to etcd.
enum Done {
    Cluster(Result<keys::Cluster, Error>),
    Found(Result<Option<LeaseKey>, Said>),
    Created(Result<Outcome, Said>),
    Replaced(Result<Outcome, Said>),
    Renewed(Incarnation, u64, Result<Outcome, Said>),
    Looked(Result<Vec<LeaseKey>, Error>),
    Fenced(NodeId, Duration, Result<Outcome, Said>),
    Committed(Incarnation, Commit, Result<Outcome, Said>),
    Released,
    /// A task whose result shows elsewhere.
    Nothing,
}

enum Phase {
    /// The cluster's key is not known yet.
    Looking {
        not_before: BootTime,
        is_asked: bool,
    },
    Joining(Join),
    In(Lease),
    /// The lease is being given back.
    Releasing,
    Out,
}

pub(crate) struct Driver {
    me: Me,
    client: Arc<Client>,
    prefix: Prefix,
    leases: Arc<NodeLeases>,
    shared: Arc<Shared>,
    phase: Phase,
    cluster: Uuid,
    timing: Timing,
    /// A lease of this machine is that of an earlier process. False once it was replaced.
    has_earlier: bool,
    nodes: Nodes,
    volumes: Volumes,
    operations: BTreeMap<VolumeId, Progress>,
    jobs: JoinSet<Done>,
    next_turn: BootTime,
    /// Since when the store has been away.
    away: Option<BootTime>,
    /// Until when the node hands its volumes over, once it ends.
    leave_by: Option<BootTime>,
}

impl Driver {
    pub(crate) fn new(
        me: Me,
        client: Arc<Client>,
        prefix: Prefix,
        shared: Arc<Shared>,
        serving: Box<dyn Serving>,
    ) -> Self {
        let leases =
            NodeLeases::of_process(Arc::clone(&client), prefix.clone(), me.process, me.machine);
        let timing = Timing::default();
        Self {
            nodes: Nodes::new(me.id, timing),
            volumes: Volumes::new(me.id, serving),
            me,
            client,
            prefix,
            leases: Arc::new(leases),
            shared,
            phase: Phase::Looking {
                not_before: BootTime::default(),
                is_asked: false,
            },
            cluster: Uuid::nil(),
            timing,
            has_earlier: true,
            operations: BTreeMap::new(),
            jobs: JoinSet::new(),
            next_turn: BootTime::default(),
            away: None,
            leave_by: None,
        }
    }

    /// Runs until `end` is dropped or reports, and the node has left.
    pub(crate) async fn run(
        mut self,
        mut reports: mpsc::Receiver<Report>,
        mut end: tokio::sync::oneshot::Receiver<()>,
    ) {
        let (sender, mut news) = mpsc::channel(NEWS);
        let followed = [
            (Kind::Leases, self.prefix.leases()),
            (Kind::Nodes, self.prefix.nodes()),
            (Kind::Volumes, self.prefix.volumes()),
            (Kind::Publications, self.prefix.publications()),
            (Kind::Operations, self.prefix.operations()),
        ];
        for (kind, prefix) in followed {
            tokio::spawn(follow(
                Arc::clone(&self.client),
                kind,
                prefix,
                sender.clone(),
            ));
        }
        let client = Arc::clone(&self.client);
        tokio::spawn(upkeep::compact(client, self.prefix.clone(), self.me.id));
        loop {
            self.turn(clock::now());
            if matches!(self.phase, Phase::Releasing) && self.jobs.is_empty() {
                break;
            }
            let wait = self.wake(clock::now());
            let is_ending = self.leave_by.is_some();
            tokio::select! {
                Some(done) = self.jobs.join_next() => {
                    if let Ok(done) = done {
                        self.done(done, clock::now());
                    }
                }
                Some((kind, change)) = news.recv() => {
                    self.news(kind, change);
                    for _ in 1..ROUND {
                        let Ok((kind, change)) = news.try_recv() else { break };
                        self.news(kind, change);
                    }
                }
                Some(report) = reports.recv() => {
                    self.volumes.report(report);
                    for _ in 1..ROUND {
                        let Ok(report) = reports.try_recv() else { break };
                        self.volumes.report(report);
                    }
                }
                _ = &mut end, if !is_ending => self.leave_by = Some(clock::now() + LEAVE),
                () = sleep(wait) => {}
            }
        }
        self.shared.state.send_replace(NodeState::Left);
    }

    /// The time until the next turn.
    fn wake(&self, now: BootTime) -> Duration {
        let mut at = self.next_turn;
        if let Phase::In(lease) = &self.phase {
            at = at.min(lease.due());
            at = at.min(self.nodes.due(now, lease).unwrap_or(at));
        }
        at.since(now)
    }

    fn turn(&mut self, now: BootTime) {
        let is_turn = now >= self.next_turn;
        if is_turn {
            self.next_turn = now + TURN;
            *self.shared.seen.lock() = self.nodes.seen().clone();
            *self.shared.volumes.lock() = self.volumes.states();
        }
        match &mut self.phase {
            Phase::Looking { .. } | Phase::Joining(_) | Phase::Out if self.leave_by.is_some() => {
                self.jobs.abort_all();
                self.phase = Phase::Releasing;
            }
            Phase::Looking {
                not_before,
                is_asked,
            } => {
                if !*is_asked && now >= *not_before {
                    *is_asked = true;
                    self.look_for_cluster();
                }
            }
            Phase::Joining(join) => {
                if let Some(step) = join.poll(now) {
                    self.join_step(step);
                }
            }
            Phase::In(_) => self.turn_in(now, is_turn),
            Phase::Releasing | Phase::Out => {}
        }
    }

    fn look_for_cluster(&mut self) {
        let (client, prefix) = (Arc::clone(&self.client), self.prefix.clone());
        self.jobs.spawn(async move {
            let checked = client.check_version().await;
            if let Err(said) = checked.map_err(Error::at(&prefix.meta())) {
                return Done::Cluster(Err(said));
            }
            Done::Cluster(keys::Cluster::read(&client, &prefix).await)
        });
    }

    fn join_step(&mut self, step: JoinStep) {
        let (leases, node) = (Arc::clone(&self.leases), self.me.id);
        match step {
            JoinStep::Look => {
                self.jobs
                    .spawn(async move { Done::Found(leases.read(node).await) });
            }
            JoinStep::Create(create) => {
                let answer = async move { leases.execute(&create, no_record).await };
                self.jobs.spawn(async move { Done::Created(answer.await) });
            }
            JoinStep::Replace(replace) => {
                let answer = async move { leases.execute(&replace, no_record).await };
                self.jobs.spawn(async move { Done::Replaced(answer.await) });
            }
        }
    }

    /// The work of a node with an incarnation.
    fn turn_in(&mut self, now: BootTime, is_turn: bool) {
        let Phase::In(lease) = &mut self.phase else {
            return;
        };
        if lease.has_ended() {
            return self.lost(now);
        }
        let of = lease.holder().incarnation;
        if let Some(renewal) = lease.poll(now)
            && let Effect::Renew { number, .. } = renewal.effect
        {
            let leases = Arc::clone(&self.leases);
            self.jobs.spawn(async move {
                let answer = leases.execute(&renewal, no_record).await;
                Done::Renewed(of, number, answer)
            });
        }
        let is_good = lease.is_good(now);
        match (self.away, is_good) {
            (None, false) => {
                self.away = Some(now);
                let why = "no renewal succeeds".to_owned();
                self.shared.events.note(Decision::StoreAway { why });
                self.show_lease(of, false);
            }
            (Some(since), true) => {
                self.away = None;
                let away = now.since(since);
                self.shared.events.note(Decision::StoreBack { away });
                self.show_lease(of, true);
            }
            _ => {}
        }
        // Who holds what is known only once the leases have been listed.
        if !self.nodes.is_listed {
            return;
        }
        let Phase::In(lease) = &self.phase else {
            return;
        };
        for step in self.nodes.poll(now, lease) {
            match step {
                Step::Look => {
                    let (client, leases) = (Arc::clone(&self.client), Arc::clone(&self.leases));
                    let prefix = self.prefix.leases();
                    self.jobs.spawn(async move {
                        let page = client.list(&prefix).await.map_err(Error::at(&prefix));
                        let keys = page.map(|page| {
                            let keys = page.keys.iter();
                            keys.filter_map(|kv| leases.decode(kv).ok()).collect()
                        });
                        Done::Looked(keys)
                    });
                }
                Step::Fence(node, fence, silent) => {
                    let leases = Arc::clone(&self.leases);
                    self.jobs.spawn(async move {
                        Done::Fenced(node, silent, leases.execute(&fence, no_record).await)
                    });
                }
            }
        }
        if is_turn {
            self.hand_over(now);
        }
        let Phase::In(lease) = &self.phase else {
            return;
        };
        let events = &self.shared.events;
        for commit in self.volumes.poll(now, lease, &self.nodes, events, is_turn) {
            self.commit(of, commit);
        }
        if self.leave_by.is_some() {
            self.end(now);
        }
    }

    fn show_lease(&self, incarnation: Incarnation, is_good: bool) {
        self.shared.state.send_replace(NodeState::In {
            cluster: self.cluster,
            incarnation,
            is_good,
        });
    }

    fn commit(&mut self, of: Incarnation, commit: Commit) {
        let leases = Arc::clone(&self.leases);
        self.jobs.spawn(async move {
            let bytes = commit.value.to_string().into_bytes();
            let encode = |_: &Record| bytes.clone();
            let answer = leases.execute(&commit.transaction, encode).await;
            Done::Committed(of, commit, answer)
        });
    }

    /// Hand-overs that operators ask for, of a drain, and of the node's end.
    fn hand_over(&mut self, now: BootTime) {
        let is_drained = self
            .nodes
            .described
            .get(&self.me.id)
            .is_some_and(|key| key.drain);
        if is_drained || self.leave_by.is_some() {
            self.volumes.drain(now, &self.nodes);
        }
        for (id, progress) in &mut self.operations {
            let Some(change) = operations::step(
                self.me.id,
                *id,
                progress,
                &mut self.volumes,
                &self.nodes,
                now,
            ) else {
                continue;
            };
            let (client, prefix, id) = (Arc::clone(&self.client), self.prefix.clone(), *id);
            self.jobs.spawn(async move {
                operations::finish(&client, &prefix, id, change).await;
                Done::Nothing
            });
        }
    }

    /// The end of the node: volumes first, then the lease.
    fn end(&mut self, now: BootTime) {
        self.volumes.is_leaving = true;
        let held = self.volumes.in_state(State::Holding);
        let mut held = held.into_iter();
        let can_leave = held.any(|id| self.volumes.successor(id, &self.nodes).is_some());
        let is_leaving = !self.volumes.in_state(State::Leaving).is_empty();
        let is_late = self.leave_by.is_some_and(|by| now >= by);
        if (can_leave || is_leaving) && !is_late {
            return;
        }
        let Phase::In(lease) = &self.phase else {
            return;
        };
        let release = Transaction::release(lease.holder());
        // From here on no answer leaves.
        self.shared.word.set(BootTime::default());
        self.volumes.end();
        self.phase = Phase::Releasing;
        // The store refuses those that come after the release.
        self.jobs.abort_all();
        let leases = Arc::clone(&self.leases);
        self.jobs.spawn(async move {
            let _ = leases.execute(&release, no_record).await;
            Done::Released
        });
    }

    /// The incarnation is gone: all serving ends, and the node joins again.
    fn lost(&mut self, now: BootTime) {
        let Phase::In(lease) = &self.phase else {
            return;
        };
        self.shared.word.set(BootTime::default());
        let incarnation = lease.holder().incarnation;
        self.shared.events.note(Decision::NodeLost { incarnation });
        self.volumes.restart(&self.shared.events);
        self.away = None;
        self.phase = Phase::Joining(Join::new(self.me.id, self.timing));
        let obstacle = None;
        self.shared
            .state
            .send_replace(NodeState::Joining { obstacle });
        self.turn(now);
    }

    fn done(&mut self, done: Done, now: BootTime) {
        match done {
            Done::Cluster(answer) => self.found_cluster(answer, now),
            Done::Found(answer) => self.found_lease(answer, now),
            Done::Created(answer) => self.created(answer, now),
            Done::Replaced(answer) => {
                match answer {
                    Ok(Outcome::Made(_)) => self.has_earlier = false,
                    Ok(Outcome::Refused { .. }) => {}
                    Err(said) => {
                        self.obstructed(Error::at(&self.prefix.lease(self.me.id))(said));
                    }
                }
                if let Phase::Joining(join) = &mut self.phase {
                    join.again(now);
                }
            }
            Done::Renewed(of, number, answer) => {
                if let Phase::In(lease) = &mut self.phase {
                    match answer {
                        Ok(Outcome::Made(_)) => lease.renewed(of, number, now),
                        Ok(Outcome::Refused { .. }) => lease.end(of),
                        // The watch, or a later answer, shows whether it was made.
                        Err(_) => {}
                    }
                    self.shared.word.set(lease.until());
                }
            }
            Done::Looked(keys) => {
                if let Ok(keys) = keys {
                    self.nodes.looked(&keys, now);
                }
            }
            Done::Fenced(node, silent, answer) => {
                if let Ok(Outcome::Made(at)) = answer {
                    self.shared
                        .events
                        .note(Decision::NodeFenced { node, silent });
                    self.deleted_lease(node, at.0 as i64, now);
                    self.prune_log();
                }
            }
            Done::Committed(of, commit, answer) => self.committed(of, commit, answer),
            Done::Released | Done::Nothing => {}
        }
    }

    fn obstructed(&self, error: Error) {
        let obstacle = Some(error);
        self.shared
            .state
            .send_replace(NodeState::Joining { obstacle });
    }

    fn found_cluster(&mut self, answer: Result<keys::Cluster, Error>, now: BootTime) {
        let Phase::Looking { .. } = self.phase else {
            return;
        };
        let found = answer.and_then(|cluster| Ok((cluster.timing()?, cluster.id)));
        match found {
            Ok((_, found)) if self.me.cluster.is_some_and(|expected| expected != found) => {
                let expected = self.me.cluster.unwrap_or_default();
                let key = self.prefix.meta();
                self.exclude(Error::OtherCluster {
                    key,
                    expected,
                    found,
                });
            }
            Ok((timing, id)) => {
                self.timing = timing;
                self.cluster = id;
                self.nodes.set_timing(timing, now);
                self.phase = Phase::Joining(Join::new(self.me.id, timing));
            }
            Err(error) if error.is_passing() => {
                self.phase = Phase::Looking {
                    not_before: now + AGAIN,
                    is_asked: false,
                };
                self.obstructed(error);
            }
            Err(error) => self.exclude(error),
        }
    }

    fn exclude(&mut self, why: Error) {
        let text = why.to_string();
        self.shared
            .events
            .note(Decision::NodeExcluded { why: text });
        self.phase = Phase::Out;
        self.shared.state.send_replace(NodeState::Out { why });
    }

    fn found_lease(&mut self, answer: Result<Option<LeaseKey>, Said>, now: BootTime) {
        let key = self.prefix.lease(self.me.id);
        let found = match answer {
            Ok(found) => found,
            Err(said) => {
                self.obstructed(Error::at(&key)(said));
                if let Phase::Joining(join) = &mut self.phase {
                    join.again(now);
                }
                return;
            }
        };
        let Phase::Joining(join) = &mut self.phase else {
            return;
        };
        let is_ours = |key: &LeaseKey| {
            // The lock of the data directory proves that an earlier process of this machine is
            // dead. A process that lives beside this one has a copy of the directory.
            let is_machine = self.me.machine.is_some() && key.machine == self.me.machine;
            key.process == self.me.process || (self.has_earlier && is_machine)
        };
        let answer = found.as_ref().map(|key| Found {
            revision: key.revision,
            is_ours: is_ours(key),
        });
        if let Err(InUse) = join.found(answer, now) {
            let machine = found.and_then(|key| key.machine);
            let machine = match machine {
                machine if machine == self.me.machine => {
                    "another process with this machine's id".to_owned()
                }
                Some(machine) => format!("machine {machine}"),
                None => "a machine without an id".to_owned(),
            };
            let node = self.me.id;
            self.exclude(Error::InUse { key, node, machine });
        }
    }

    fn created(&mut self, answer: Result<Outcome, Said>, now: BootTime) {
        let key = self.prefix.lease(self.me.id);
        let Phase::Joining(join) = &mut self.phase else {
            return;
        };
        let incarnation = match answer {
            Ok(Outcome::Made(at)) => Incarnation(at.0),
            other => {
                join.again(now);
                if let Err(said) = other {
                    self.obstructed(Error::at(&key)(said));
                }
                return;
            }
        };
        let Some(lease) = join.created(incarnation, now) else {
            return;
        };
        self.shared.word.set(lease.until());
        self.phase = Phase::In(lease);
        self.has_earlier = false;
        self.volumes.restart(&self.shared.events);
        self.shared
            .events
            .note(Decision::NodeJoined { incarnation });
        self.show_lease(incarnation, true);
        self.describe(incarnation);
    }

    /// Writes `node/N`, until it succeeds or the incarnation is gone.
    fn describe(&mut self, incarnation: Incarnation) {
        let (client, prefix) = (Arc::clone(&self.client), self.prefix.clone());
        let (node, description) = (self.me.id, self.me.description.clone());
        let shared = Arc::clone(&self.shared);
        self.jobs.spawn(async move {
            loop {
                match keys::describe(&client, &prefix, node, incarnation, &description).await {
                    Ok(_) => return Done::Nothing,
                    Err(error) if error.is_passing() => sleep(AGAIN).await,
                    Err(error) => {
                        let (key, why) = (prefix.node(node), error.to_string());
                        shared.events.note(Decision::KeyIgnored { key, why });
                        return Done::Nothing;
                    }
                }
            }
        });
    }

    fn committed(&mut self, of: Incarnation, commit: Commit, answer: Result<Outcome, Said>) {
        let Commit {
            volume,
            number,
            value,
            ..
        } = commit;
        match answer {
            Ok(Outcome::Made(at)) => self.volumes.committed(volume, number, at, value),
            Ok(Outcome::Refused { is_gone, record }) => {
                if let Phase::In(lease) = &mut self.phase
                    && is_gone
                {
                    lease.end(of);
                    self.shared.word.set(lease.until());
                }
                // Without a record, the watch shows the deletion.
                if let Some(kv) = record {
                    let revision = Revision(kv.mod_revision as u64);
                    let refused = self.volumes.refused(volume, number, revision, &kv.value);
                    self.ignored(&kv.key, refused.err());
                }
            }
            Err(_) => self.volumes.unanswered(volume, number),
        }
    }

    fn deleted_lease(&mut self, of: NodeId, revision: i64, now: BootTime) {
        if self.nodes.deleted(of, revision, now, &self.shared.events) {
            self.volumes.wake_all();
        }
        if let Phase::In(lease) = &mut self.phase
            && of == self.me.id
            && (lease.holder().incarnation.0 as i64) < revision
        {
            let of = lease.holder().incarnation;
            lease.end(of);
            self.shared.word.set(lease.until());
        }
    }

    fn ignored(&self, key: &[u8], why: Option<String>) {
        if let Some(why) = why {
            let key = String::from_utf8_lossy(key).into_owned();
            self.shared.events.note(Decision::KeyIgnored { key, why });
        }
    }

    fn news(&mut self, kind: Kind, change: Change) {
        match change {
            Change::All { keys, revision } => {
                let ids: BTreeSet<Uuid> = {
                    let prefix = self.prefix_of(kind);
                    let ids = keys.iter().map(|kv| Prefix::id_after(&prefix, &kv.key));
                    ids.flatten().collect()
                };
                for kv in &keys {
                    self.put(kind, kv);
                }
                for id in self.known(kind) {
                    if !ids.contains(&id) {
                        self.deleted(kind, id, revision);
                    }
                }
                if kind == Kind::Leases {
                    self.nodes.is_listed = true;
                }
            }
            Change::Put(kv) => self.put(kind, &kv),
            Change::Deleted { key, revision } => {
                let id = Prefix::id_after(&self.prefix_of(kind), &key);
                if let Some(id) = id {
                    self.deleted(kind, id, revision);
                }
            }
        }
    }

    fn prefix_of(&self, kind: Kind) -> String {
        match kind {
            Kind::Leases => self.prefix.leases(),
            Kind::Nodes => self.prefix.nodes(),
            Kind::Volumes => self.prefix.volumes(),
            Kind::Publications => self.prefix.publications(),
            Kind::Operations => self.prefix.operations(),
        }
    }

    fn known(&self, kind: Kind) -> Vec<Uuid> {
        let volumes = |ids: Vec<VolumeId>| ids.into_iter().map(|id| id.0).collect();
        match kind {
            Kind::Leases => self.nodes.standing.keys().map(|node| node.0).collect(),
            Kind::Nodes => self.nodes.described.keys().map(|node| node.0).collect(),
            Kind::Volumes => volumes(self.volumes.ids()),
            Kind::Publications => volumes(self.volumes.published()),
            Kind::Operations => volumes(self.operations.keys().copied().collect()),
        }
    }

    fn put(&mut self, kind: Kind, kv: &KeyValue) {
        let Some(id) = Prefix::id_after(&self.prefix_of(kind), &kv.key) else {
            return self.ignored(&kv.key, Some("its name ends without an id".to_owned()));
        };
        let refused = match kind {
            Kind::Leases => self.put_lease(kv).err(),
            Kind::Nodes => match NodeKey::decode(kv) {
                Ok(key) => {
                    self.nodes.describe(NodeId(id), Some(key));
                    self.volumes.wake_all();
                    None
                }
                Err(error) => Some(error.to_string()),
            },
            Kind::Volumes => {
                let revision = Revision(kv.mod_revision as u64);
                self.volumes.saw(VolumeId(id), revision, &kv.value).err()
            }
            Kind::Publications => match operations::slots(kv) {
                Ok(nodes) => {
                    self.volumes.publish(VolumeId(id), Some(nodes));
                    None
                }
                Err(error) => Some(error.to_string()),
            },
            Kind::Operations => match Operation::decode(kv) {
                Ok(operation) => {
                    let progress = Progress::new(operation, kv.mod_revision);
                    self.operations.insert(VolumeId(id), progress);
                    None
                }
                Err(error) => Some(error.to_string()),
            },
        };
        self.ignored(&kv.key, refused);
    }

    fn put_lease(&mut self, kv: &KeyValue) -> Result<(), String> {
        let key = self.leases.decode(kv).map_err(|error| error.to_string())?;
        let now = clock::now();
        self.nodes.put(&key, now, &self.shared.events);
        if let Phase::In(lease) = &mut self.phase
            && key.node == self.me.id
        {
            // A renewal whose answer is missing.
            lease.renewed(key.incarnation, key.number, now);
            self.shared.word.set(lease.until());
        }
        Ok(())
    }

    fn deleted(&mut self, kind: Kind, id: Uuid, revision: i64) {
        match kind {
            Kind::Leases => self.deleted_lease(NodeId(id), revision, clock::now()),
            Kind::Nodes => self.nodes.describe(NodeId(id), None),
            Kind::Volumes => {
                let revision = Revision(revision as u64);
                self.volumes.deleted(VolumeId(id), revision);
            }
            Kind::Publications => self.volumes.publish(VolumeId(id), None),
            Kind::Operations => drop(self.operations.remove(&VolumeId(id))),
        }
    }

    fn prune_log(&mut self) {
        let (client, prefix) = (Arc::clone(&self.client), self.prefix.clone());
        self.jobs.spawn(async move {
            upkeep::prune_log(&client, &prefix).await;
            Done::Nothing
        });
    }
}

fn no_record(_: &Record) -> Vec<u8> {
    unreachable!("not a commit")
}
