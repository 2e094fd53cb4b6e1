//! A simulated node: its clock, its link to the store, and the state machines of
//! `nacre-cluster-core`.

use std::collections::{BTreeMap, BTreeSet};

use nacre_cluster_core::join::Found;
use nacre_cluster_core::lease::Word;
use nacre_cluster_core::observer::{Observer, ObserverRole};
use nacre_cluster_core::{
    BootTime, Holder, Incarnation, Join, Lease, NodeId, Timing, Transaction, Volume, ranks,
};
use nacre_random::Random;

use crate::control::Control;
use crate::lane::Lane;
use crate::names::{BLOCKS, SECOND, VOLUME, node_id};
use crate::requests::{Purpose, Requests};
use crate::store::{LeaseKey, Outcome, StoreChange};

/// A request of node `from` to the store, sent at time `sent` in the node's life `life`.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    pub id: u64,
    /// The index of the node that sent it.
    pub from: usize,
    /// [`SimNode::life`] of the sender: a later life gets no answer.
    pub life: u64,
    pub sent: u64,
    pub what: Ask,
}

#[derive(Debug, Clone)]
pub(crate) enum Ask {
    Transaction(Transaction),
    Read(NodeId),
}

#[derive(Debug, Clone)]
pub(crate) enum Answer {
    Transaction(Outcome),
    Read(Option<LeaseKey>),
}

/// A reconcile (*merge*) of the in-sync replicas, or a copy to a replica that returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Target {
    /// The number of the merge.
    Merge(u64),
    /// The replica's index.
    Replica(usize),
}

/// A copy in progress: reads of the sources first, then writes to the targets.
#[derive(Debug)]
pub(crate) struct Copying {
    pub target: Target,
    pub began: u64,
    /// I/O in flight: id and replica.
    pub missing: BTreeMap<u64, usize>,
    /// The contents to write: those of the source whose read completed first.
    pub source: Option<[u64; BLOCKS]>,
    /// The blocks to write: all of a returning replica, or those dirty in any source's log.
    pub dirty: [bool; BLOCKS],
    /// True once the reads are complete, and the writes are in flight.
    pub writes: bool,
}

/// The faults of the node's link to the store.
#[derive(Debug, Default)]
pub(crate) struct StoreLink {
    pub is_cut: bool,
    pub is_watch_stalled: bool,
    pub is_slow: bool,
    /// The next commit of the node takes effect in the store, and then isolates the node from the
    /// store and all other nodes.
    pub is_cut_by_commit: bool,
}

/// One node of the simulated cluster, and its parts of the one volume.
pub(crate) struct SimNode {
    pub up: bool,
    /// Incremented by each start and each crash. Events of an earlier life are dropped.
    pub life: u64,
    /// The end of each core's stall, in the order of [`Core`](crate::events::Core).
    pub stalled: [u64; 3],
    /// The node's clock at the start of the lanes' present turn. After a stall within a turn, the
    /// lanes still use this older time.
    pub turn_clock: BootTime,
    /// The rate of the node's clock, in millionths of true time.
    pub rate: u64,
    /// The clock at true time 0, in nanoseconds.
    pub offset: u64,
    pub join: Option<Join>,
    pub lease: Option<Lease>,
    pub word: Word,
    /// The observers of other nodes' leases.
    pub observers: BTreeMap<NodeId, Observer>,
    /// The earliest time at which observers read leases from the store again.
    pub next_look: BootTime,
    /// The nodes with a lease, as far as the watch has shown it.
    pub standing: BTreeMap<NodeId, Incarnation>,
    pub volume: Volume,
    pub control: Control,
    pub lane: Lane,
    /// The number of the present connection to each replica.
    pub sessions: [u64; 8],
    /// Replicas to which a copy is complete: they get every write, and are not in sync yet.
    pub filled: BTreeSet<usize>,
    pub copy: Option<Copying>,
    /// Replicas whose answer to Acquire is pending, with the time of the request.
    pub asked_gates: BTreeMap<usize, u64>,
    /// Incremented when all connections of hosts end.
    pub connections: u64,
    /// The requests to the store that wait for an answer.
    pub requests: Requests,
    /// The number of store changes that the node's watch has delivered.
    pub watched: usize,
    pub link: StoreLink,
    /// Incarnations that this machine created.
    pub created: BTreeSet<Incarnation>,
}

impl SimNode {
    pub(crate) fn new(random: &mut Random) -> Self {
        Self {
            up: false,
            life: 0,
            stalled: [0; 3],
            turn_clock: BootTime::default(),
            rate: random.within(976_000, 1_024_000),
            offset: random.below(SECOND * 1000),
            join: None,
            lease: None,
            word: Word::default(),
            observers: BTreeMap::new(),
            next_look: BootTime::default(),
            standing: BTreeMap::new(),
            volume: Volume::new(VOLUME, node_id(0)),
            control: Control::new(0),
            lane: Lane::default(),
            sessions: [0; 8],
            filled: BTreeSet::new(),
            copy: None,
            asked_gates: BTreeMap::new(),
            connections: 0,
            requests: Requests::default(),
            watched: 0,
            link: StoreLink::default(),
            created: BTreeSet::new(),
        }
    }

    /// The node's clock at the true time `now`, in nanoseconds.
    pub(crate) fn clock(&self, now: u64) -> BootTime {
        let passed = u128::from(now) * u128::from(self.rate) / 1_000_000;
        BootTime(self.offset + passed as u64)
    }

    pub(crate) fn has_good_lease(&self, now: u64) -> bool {
        let lease = self.lease.as_ref();
        self.up && lease.is_some_and(|lease| lease.is_good(self.clock(now)))
    }

    pub(crate) fn holder(&self) -> Option<Holder> {
        self.lease.as_ref().map(Lease::holder)
    }

    /// Handles the store's answer to request `id`. Returns false if another machine uses the id of
    /// this node.
    pub(crate) fn store_answer(&mut self, id: u64, answer: Answer, now: BootTime) -> bool {
        let Some(purpose) = self.requests.answered(id) else {
            return true;
        };
        match (purpose, answer) {
            (Purpose::Look, Answer::Read(key)) => {
                let found = key.map(|key| Found {
                    revision: key.modified,
                    is_ours: self.created.contains(&key.created),
                });
                if let Some(join) = &mut self.join
                    && join.found(found, now).is_err()
                {
                    return false;
                }
            }
            (Purpose::Create, Answer::Transaction(Outcome::Made(at))) => {
                let incarnation = Incarnation(at.0);
                let Some(join) = self.join.take() else {
                    return true;
                };
                self.lease = join.created(incarnation, now);
                self.volume.restart();
            }
            (Purpose::Create | Purpose::Replace, _) => {
                if let Some(join) = &mut self.join {
                    join.again(now);
                }
            }
            (Purpose::Renew(of, number), Answer::Transaction(outcome)) => {
                if let Some(lease) = &mut self.lease {
                    match outcome {
                        Outcome::Made(_) => lease.renewed(of, number, now),
                        Outcome::Refused { .. } => lease.end(of),
                    }
                }
            }
            (Purpose::Commit(_, number), Answer::Transaction(Outcome::Made(at))) => {
                self.volume.committed(number, at);
            }
            (
                Purpose::Commit(of, number),
                Answer::Transaction(Outcome::Refused { is_gone, found }),
            ) => {
                if let Some(lease) = self.lease.as_mut().filter(|_| is_gone) {
                    lease.end(of);
                }
                self.volume.refused(number, found.0, found.1);
            }
            (Purpose::Change(_, number), Answer::Transaction(Outcome::Made(at))) => {
                self.control.committed(number, at, now);
            }
            (
                Purpose::Change(of, number),
                Answer::Transaction(Outcome::Refused { is_gone, found }),
            ) => {
                if let Some(lease) = self.lease.as_mut().filter(|_| is_gone) {
                    lease.end(of);
                }
                self.control.refused(number, found.0, found.1, now);
            }
            (Purpose::Observe(of), Answer::Read(Some(key))) => {
                if let Some(observer) = self.observers.get_mut(&node_id(of)) {
                    observer.observe(key.modified, now);
                }
            }
            _ => {}
        }
        true
    }

    /// Handles the changes of the store that the node has not seen yet.
    pub(crate) fn watch(&mut self, me: NodeId, log: &[StoreChange], timing: Timing, now: BootTime) {
        while let Some(change) = log.get(self.watched).cloned() {
            self.watched += 1;
            match change {
                StoreChange::Lease {
                    node: of,
                    key,
                    number,
                } => {
                    let known = self.standing.insert(of, key.created);
                    if known != Some(key.created) {
                        self.observers.remove(&of);
                    }
                    if of == me {
                        if let Some(lease) = &mut self.lease {
                            lease.renewed(key.created, number, now);
                        }
                        continue;
                    }
                    // Puts are seen by observers only.
                    let live: Vec<NodeId> = self.standing.keys().copied().collect();
                    let rank = ranks::observers(of, &live).iter().position(|n| *n == me);
                    if let Some(rank) = rank {
                        let role = ObserverRole::Observer(rank as u8);
                        let observer = self
                            .observers
                            .entry(of)
                            .or_insert_with(|| Observer::new(of, role, timing));
                        observer.set_role(role, now);
                        observer.observe(key.modified, now);
                    }
                }
                StoreChange::LeaseEnd {
                    node: of,
                    incarnation,
                    at,
                } => {
                    if self.standing.get(&of) == Some(&incarnation) {
                        self.standing.remove(&of);
                    }
                    if let Some(observer) = self.observers.get_mut(&of) {
                        observer.saw_end(at);
                    }
                    if of == me
                        && let Some(lease) = &mut self.lease
                    {
                        lease.end(incarnation);
                    }
                }
                StoreChange::Record(revision, record) => self.volume.update(revision, *record),
            }
        }
    }
}
