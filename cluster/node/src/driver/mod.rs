//! The driver of one node: a loop on the thread `nacre-cluster`. It passes answers of etcd, watch
//! events and reports of the engine to the state machines of `nacre-cluster-core`, and performs
//! their decisions. Nothing in the loop waits: requests to etcd are tasks, and the engine answers
//! later.

mod commits;
mod followed;
mod in_effect;
mod jobs;
mod joining;
mod key_changes;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use nacre_cluster_core::lease::Word;
use nacre_cluster_core::volume::HoldingState;
use nacre_cluster_core::{
    BootTime, Effect, ExportId, Incarnation, Join, Lease, NodeId, Record, Timing, Transaction,
    VolumeId,
};
use nacre_cluster_etcd::{Client, Error as Said, LeaseKey, NodeLeases, Outcome, Prefix};
use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};
use tokio::task::AbortHandle;
use tokio::time::sleep;
use uuid::Uuid;

use crate::clock;
use crate::error::Error;
use crate::events::{Decision, Events};
use crate::export::Export;
use crate::follow::{KeyChange, Kind, follow};
use crate::keys::{self, Description, NodeKey};
use crate::nodes::{Leases, Nodes, ObservationStep};
use crate::operations::{self, Progress};
use crate::seen_keys::SeenKeys;
use crate::serving::{Report, Serving};
use crate::snapshot::SeenSnapshot;
use crate::upkeep;
use crate::volumes::{Commit, Volumes};

use self::followed::Followed;
use self::in_effect::SeenPublications;
use self::jobs::Jobs;

/// Interval of the periodic work. Renewals and observations of leases wake the loop by themselves.
const TURN: Duration = Duration::from_millis(50);
/// Most watch events in the channel to the loop.
const NEWS: usize = 1024;
/// Most watch events, or reports, that one round of the loop takes.
const ROUND: usize = 256;
/// Time limit for the handovers of all volumes, when the node ends.
const LEAVE: Duration = Duration::from_secs(6);
/// Time before the retry of a failed request, while the node joins.
const AGAIN: Duration = Duration::from_millis(400);

/// The identity and description of this node.
#[derive(Debug, Clone)]
pub struct Me {
    pub id: NodeId,
    /// Derived from the machine's id. `None`: a lease key found at the start may be another
    /// machine's, so it is replaced only after two lease durations without a renewal.
    pub machine: Option<Uuid>,
    /// A new id for each start of the daemon.
    pub process: Uuid,
    /// The id of the cluster that this node joined before. `None`: it has joined none.
    pub cluster: Option<Uuid>,
    pub description: Description,
    /// True: this node hands volumes over while it serves many more than other nodes do.
    pub is_balanced: bool,
}

/// The state of this node.
#[derive(Debug, Clone, PartialEq)]
pub enum NodeState {
    /// The node has no lease yet, or lost its incarnation.
    Joining {
        /// The last error, if there is one.
        obstacle: Option<Error>,
    },
    /// The node has an incarnation. While its lease is not good, it takes no volume, and its
    /// responses to hosts wait until the replicas confirm it.
    In {
        cluster: Uuid,
        incarnation: Incarnation,
        /// True: etcd confirmed a renewal, and the lease has not run out since.
        is_good: bool,
    },
    /// The node stays out of the cluster until an operator acts and the daemon starts again.
    Out {
        why: Error,
    },
    Left,
}

/// The parts of the driver that other threads read.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) word: Arc<Word>,
    /// The incarnation of this node; 0: it has none.
    pub(crate) incarnation: Arc<AtomicI64>,
    pub(crate) events: Events,
    /// Renewals that etcd has confirmed.
    pub(crate) renewals: AtomicU64,
    pub(crate) state: watch::Sender<NodeState>,
    /// The time at which this node last saw a renewal of each node's lease.
    pub(crate) seen: Mutex<BTreeMap<NodeId, BootTime>>,
    pub(crate) volumes: Mutex<Vec<(VolumeId, HoldingState)>>,
    /// The keys of the cluster that this node follows, for its copy (`rebuild-store`).
    pub(crate) seen_keys: SeenKeys,
    /// The cluster that this node has joined, in this run or before. Empty: it has joined none.
    pub(crate) cluster: OnceLock<Uuid>,
}

/// The kinds of keys whose lists the engine needs before it admits hosts.
const AWAITED: [Kind; 6] = [
    Kind::Leases,
    Kind::Nodes,
    Kind::Volumes,
    Kind::Publications,
    Kind::Exports,
    Kind::Snapshots,
];

type Sender = mpsc::Sender<(Kind, KeyChange)>;

/// The result of a request to etcd.
enum Done {
    Cluster(Result<keys::Cluster, Error>),
    Found(Result<Option<LeaseKey>, Said>),
    Created(Result<Outcome, Said>),
    Replaced(Result<Outcome, Said>),
    Renewed(Incarnation, u64, Result<Outcome, Said>),
    Looked(Result<Leases, Error>),
    Fenced(NodeId, Duration, Result<Outcome, Said>),
    Committed(Incarnation, Commit, Result<Outcome, Said>),
    Released,
    /// The cluster has no room for this node, which has a lease.
    NoRoom(Incarnation, Error),
    /// The end of a task that reports its results in other ways, or not at all.
    Nothing,
}

enum Phase {
    /// The node reads the cluster's key.
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

/// The keys to list and watch again.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Again {
    #[default]
    Nothing,
    /// The node has a new lease.
    Publications,
    /// The store is another one.
    All,
}

pub(crate) struct Driver {
    me: Me,
    client: Arc<Client>,
    prefix: Prefix,
    leases: Arc<NodeLeases>,
    shared: Arc<Shared>,
    phase: Phase,
    /// True: a lease of this machine belongs to an earlier process. False after its replacement.
    has_earlier: bool,
    /// The id of the restore that made etcd's data, or else the cluster's. `None`: not found yet.
    store: Option<Uuid>,
    /// etcd has other data than before: all keys are listed again when the cluster is found.
    is_other_store: bool,
    /// The tasks that follow the keys of etcd.
    followers: BTreeMap<Kind, AbortHandle>,
    again: Again,
    /// Those of [`AWAITED`] whose first list has not arrived.
    awaited: BTreeSet<Kind>,
    publications: SeenPublications,
    nodes: Nodes,
    /// The watches of single leases.
    watched: BTreeMap<NodeId, AbortHandle>,
    volumes: Volumes,
    operations: BTreeMap<VolumeId, Progress>,
    /// The exports of this node.
    exports: Followed<ExportId, Export>,
    /// The snapshots of all volumes.
    snapshots: Followed<Uuid, SeenSnapshot>,
    jobs: Jobs,
    next_turn: BootTime,
    /// The start of the time without a good lease. `None`: the lease is good.
    away: Option<BootTime>,
    /// The error of the last renewal that failed.
    last_failure: Option<Said>,
    /// Deadline of the last handovers, once the node ends.
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
        if let Some(cluster) = me.cluster {
            let _ = shared.cluster.set(cluster);
        }
        let leases =
            NodeLeases::of_process(Arc::clone(&client), prefix.clone(), me.process, me.machine)
                .with_features(me.description.features.clone());
        Self {
            nodes: Nodes::new(me.id, Timing::default()),
            volumes: Volumes::new(me.id, serving).with_balance(me.is_balanced),
            me,
            client,
            prefix,
            leases: Arc::new(leases),
            shared,
            phase: Phase::Looking {
                not_before: BootTime::default(),
                is_asked: false,
            },
            has_earlier: true,
            watched: BTreeMap::new(),
            store: None,
            is_other_store: false,
            followers: BTreeMap::new(),
            again: Again::Nothing,
            awaited: BTreeSet::from(AWAITED),
            publications: SeenPublications::default(),
            operations: BTreeMap::new(),
            exports: Followed::default(),
            snapshots: Followed::default(),
            jobs: Jobs::default(),
            next_turn: BootTime::default(),
            away: None,
            last_failure: None,
            leave_by: None,
        }
    }

    /// Runs until `end` is dropped or reports, and the node has left.
    pub(crate) async fn run(
        mut self,
        mut reports: mpsc::Receiver<Report>,
        mut end: tokio::sync::oneshot::Receiver<()>,
    ) {
        let (mut sender, mut news) = self.follow_all();
        let upkeep = upkeep::run(Arc::clone(&self.client), self.prefix.clone(), self.me.id);
        self.jobs.spawn(async move {
            upkeep.await;
            Done::Nothing
        });
        loop {
            self.turn(clock::now());
            match std::mem::take(&mut self.again) {
                Again::Nothing => {}
                Again::Publications => self.follow_again(Kind::Publications, &sender),
                // Changes of the former store that wait in the channel end with it.
                Again::All => (sender, news) = self.follow_all(),
            }
            if matches!(self.phase, Phase::Releasing) {
                if self.jobs.is_empty() {
                    break;
                }
            } else {
                self.watch(&sender);
            }
            let wait = self.wake(clock::now());
            let is_ending = self.leave_by.is_some();
            tokio::select! {
                Some(done) = self.jobs.next() => match done {
                    Ok(done) => self.done(done, clock::now()),
                    // A step would never get the answer of this task.
                    Err(error) if error.is_panic() => resume_unwind(error.into_panic()),
                    Err(_) => {}
                },
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

    /// Lists and watches all keys, and nothing else any more.
    fn follow_all(&mut self) -> (Sender, mpsc::Receiver<(Kind, KeyChange)>) {
        let (sender, news) = mpsc::channel(NEWS);
        for kind in [
            Kind::Leases,
            Kind::Nodes,
            Kind::Volumes,
            Kind::Publications,
            Kind::Operations,
            Kind::Exports,
            Kind::Snapshots,
        ] {
            self.follow_again(kind, &sender);
        }
        (sender, news)
    }

    /// Lists and watches the keys of this kind. Changes of the former task arrive before the list.
    fn follow_again(&mut self, kind: Kind, news: &Sender) {
        if let Some(former) = self.followers.remove(&kind) {
            former.abort();
        }
        let follower = self.follow(kind, self.prefix_of(kind), news);
        self.followers.insert(kind, follower);
    }

    fn follow(&mut self, kind: Kind, prefix: String, news: &Sender) -> AbortHandle {
        let (client, news) = (Arc::clone(&self.client), news.clone());
        self.jobs.spawn(async move {
            follow(client, kind, prefix, news).await;
            Done::Nothing
        })
    }

    /// Watches the renewals of the nodes that this node observes now.
    fn watch(&mut self, news: &Sender) {
        let Some(wanted) = self.nodes.watched() else {
            return;
        };
        self.watched.retain(|node, watch| {
            let is_wanted = wanted.contains(node);
            if !is_wanted {
                watch.abort();
            }
            is_wanted
        });
        for node in wanted {
            if !self.watched.contains_key(&node) {
                let watch = self.follow(Kind::Renewals, self.prefix.lease(node), news);
                self.watched.insert(node, watch);
            }
        }
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
            *self.shared.seen.lock() = self.nodes.seen();
            if let Some(states) = self.volumes.new_states() {
                *self.shared.volumes.lock() = states;
            }
        }
        self.show_news();
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

    /// Shows the engine the changes of nodes and exports. Without the list of leases, every node
    /// would look as if its lease were over.
    fn show_news(&mut self) {
        let serving = self.volumes.serving();
        let is_listed = |kind| !self.awaited.contains(&kind);
        if is_listed(Kind::Leases) && is_listed(Kind::Nodes) && self.nodes.take_news() {
            serving.nodes(&self.nodes.described, &self.nodes.standing);
        }
        if let Some(exports) = self.exports.take_news() {
            serving.exports(exports);
        }
        if let Some(snapshots) = self.snapshots.take_news() {
            serving.snapshots(snapshots);
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
            leases.set_in_effect(self.publications.in_effect(self.volumes.serving()));
            self.jobs.spawn(async move {
                let answer = leases.execute(&renewal, no_record).await;
                Done::Renewed(of, number, answer)
            });
        }
        let is_good = lease.is_good(now);
        match (self.away, is_good) {
            (None, false) => {
                self.away = Some(now);
                let said = self.last_failure.take();
                let why = said.map_or_else(
                    || "the renewals came too late".to_owned(),
                    |said| said.to_string(),
                );
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
        if self.nodes.is_listed {
            self.turn_listed(now, is_turn);
        }
        if self.leave_by.is_some() {
            self.end(now);
        }
    }

    /// The work that needs the list of leases: fences, handovers and takes.
    fn turn_listed(&mut self, now: BootTime, is_turn: bool) {
        let Phase::In(lease) = &self.phase else {
            return;
        };
        for step in self.nodes.poll(now, lease) {
            match step {
                ObservationStep::Look => {
                    let (client, leases) = (Arc::clone(&self.client), Arc::clone(&self.leases));
                    let prefix = self.prefix.clone();
                    self.jobs.spawn(async move {
                        let all = prefix.leases();
                        let page = client.list(&all).await.map_err(Error::at(&all));
                        let leases = page.map(|page| Leases {
                            revision: page.revision,
                            present: page
                                .keys
                                .iter()
                                .filter_map(|kv| prefix.node_of(&kv.key))
                                .collect(),
                            keys: page
                                .keys
                                .iter()
                                .filter_map(|kv| leases.decode(kv).ok())
                                .collect(),
                        });
                        Done::Looked(leases)
                    });
                }
                ObservationStep::Fence(node, fence, silent) => {
                    let leases = Arc::clone(&self.leases);
                    self.jobs.spawn(async move {
                        Done::Fenced(node, silent, leases.execute(&fence, no_record).await)
                    });
                }
            }
        }
        if is_turn {
            self.handover(now);
        }
        let Phase::In(lease) = &self.phase else {
            return;
        };
        let (of, events) = (lease.holder().incarnation, &self.shared.events);
        // A host that lost its permission while this node had no lease counts as cut off.
        if !self.publications.are_listed_since(of.0 as i64) {
            return;
        }
        for commit in self.volumes.poll(now, lease, &self.nodes, events, is_turn) {
            self.commit(of, commit);
        }
    }

    fn show_lease(&self, incarnation: Incarnation, is_good: bool) {
        self.shared.state.send_replace(NodeState::In {
            cluster: self.me.cluster.unwrap_or_default(),
            incarnation,
            is_good,
        });
    }

    /// Handovers that operators ask for, of a drain, for balance, and of the node's end.
    fn handover(&mut self, now: BootTime) {
        // While etcd is away, no node could take a volume.
        if self.away.is_some() && self.leave_by.is_none() {
            return;
        }
        let own = self.nodes.described.get(&self.me.id);
        if own.is_some_and(NodeKey::is_left) || self.leave_by.is_some() {
            self.volumes.drain(now, &self.nodes);
        } else {
            self.volumes.balance(now, &self.nodes);
        }
        for (id, progress) in &mut self.operations {
            let (volumes, nodes) = (&mut self.volumes, &self.nodes);
            let step = operations::step(self.me.id, *id, progress, volumes, nodes, now);
            let Some(change) = step else {
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
        let held = self.volumes.in_state(HoldingState::Holding);
        let mut held = held.into_iter();
        let can_leave = held.any(|id| self.volumes.successor(id, &self.nodes).is_some());
        let is_leaving = !self.volumes.in_state(HoldingState::Leaving).is_empty();
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
        self.shared.incarnation.store(0, Ordering::SeqCst);
        self.volumes.end();
        self.phase = Phase::Releasing;
        // The store refuses changes that arrive after the release.
        self.jobs.abort_all();
        let leases = Arc::clone(&self.leases);
        self.jobs.spawn(async move {
            let _ = leases.execute(&release, no_record).await;
            Done::Released
        });
    }

    /// etcd lost its data, or a backup was restored: former answers are void, and so is the
    /// incarnation. The view of hosts stays as it is until the cluster is found.
    fn other_store(&mut self, now: BootTime) {
        if self.is_other_store {
            return;
        }
        self.is_other_store = true;
        match self.phase {
            Phase::In(_) => self.lost(now),
            Phase::Looking { .. } | Phase::Joining(_) => self.look_again(now),
            Phase::Releasing | Phase::Out => {}
        }
    }

    /// Lists everything again, as revisions of the former store are later than the present ones.
    fn begin_anew(&mut self) {
        self.is_other_store = false;
        self.jobs.begin_anew();
        self.shared.seen_keys.begin_anew();
        self.nodes.begin_anew();
        self.volumes.begin_anew();
        self.operations.clear();
        self.awaited.extend(AWAITED);
        self.publications = SeenPublications::default();
        for (_, watch) in std::mem::take(&mut self.watched) {
            watch.abort();
        }
        self.again = Again::All;
    }

    fn look_again(&mut self, now: BootTime) {
        self.phase = Phase::Looking {
            not_before: now,
            is_asked: false,
        };
        let obstacle = None;
        self.shared
            .state
            .send_replace(NodeState::Joining { obstacle });
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
                        Ok(Outcome::Made(_)) => {
                            lease.renewed(of, number, now);
                            self.shared.renewals.fetch_add(1, Ordering::Relaxed);
                        }
                        Ok(Outcome::Refused { .. }) => lease.end(of),
                        // The watch, or a later answer, shows whether the renewal was made.
                        Err(said) => self.last_failure = Some(said),
                    }
                    self.shared.word.set(lease.until());
                }
            }
            Done::Looked(leases) => {
                if let Ok(leases) = leases
                    && self.nodes.looked(&leases, now, &self.shared.events)
                {
                    self.volumes.wake_all();
                }
            }
            Done::Fenced(node, silent, answer) => {
                if let Ok(Outcome::Made(at)) = answer {
                    self.shared
                        .events
                        .note(Decision::NodeFenced { node, silent });
                    self.deleted_lease(node, at.0 as i64, now);
                }
            }
            Done::Committed(of, commit, answer) => self.committed(of, commit, answer),
            Done::NoRoom(of, why) => self.no_room(of, why),
            Done::Released | Done::Nothing => {}
        }
    }
}

fn no_record(_: &Record) -> Vec<u8> {
    unreachable!("not a commit")
}
