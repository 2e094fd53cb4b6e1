//! The state of one run, and the queue of its events.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use arrayvec::ArrayVec;
use nacre_cluster_core::slots::Slots;
use nacre_cluster_core::{Record, Replica, ReplicaState, Timing};
use nacre_random::Random;

use crate::checker::Checker;
use crate::client::Client;
use crate::events::{Core, Event, Message, Scheduled};
use crate::names::{ALL_CORES, MICRO, MILLI, node_id, replica_id};
use crate::node::SimNode;
use crate::replica::SimReplica;
use crate::report::{Options, Report};
use crate::store::Store;

/// The store's availability.
#[derive(Debug, Default)]
pub(crate) struct StoreHealth {
    pub away_since: Option<u64>,
    pub is_full: bool,
    /// The last absence: its start and its end.
    pub last_absence: Option<(u64, u64)>,
}

pub(crate) struct World {
    pub options: Options,
    pub random: Random,
    pub now: u64,
    pub queue: BinaryHeap<Reverse<Scheduled>>,
    scheduled: u64,
    pub timing: Timing,
    pub nodes: Vec<SimNode>,
    pub replicas: Vec<SimReplica>,
    pub store: Store,
    pub health: StoreHealth,
    /// `cut[a][b]`: messages from a to b are lost.
    pub cut: Vec<Vec<bool>>,
    pub clients: Vec<Client>,
    pub slots: Slots,
    /// Controllers that hosts keep: node, slot, and the time of their end.
    pub controllers: Vec<(usize, u8, u64)>,
    pub checker: Checker,
    pub report: Report,
    /// No trouble begins before this time.
    pub quiet_until: u64,
    /// Nodes that died and do not start again.
    pub lost: Vec<usize>,
    /// False after the last trouble.
    pub lively: bool,
    pub next_value: u64,
    pub last_id: u64,
    pub failure: Option<String>,
    pub log: VecDeque<String>,
}

impl World {
    pub(crate) fn new(seed: u64, options: Options) -> Self {
        let mut random = Random::new(seed);
        let count = 3 + random.index(3);
        let replicas = *random.pick(&[1, 2, 2, 2, 3, 3]);
        let mut places: Vec<usize> = (0..count).collect();
        random.shuffle(&mut places);
        let replicas: Vec<SimReplica> = places[..replicas]
            .iter()
            .map(|n| SimReplica::new(*n))
            .collect();
        let of_record = replicas.iter().enumerate().map(|(index, replica)| Replica {
            id: replica_id(index),
            node: node_id(replica.node),
            state: ReplicaState::InSync,
        });
        let record = Record {
            epoch: 0,
            serving: 0,
            holder: None,
            next: None,
            replicas: ArrayVec::from_iter(of_record),
        };
        let nodes = (0..count).map(|_| SimNode::new(&mut random)).collect();
        let clients = (0..7).map(|_| Client::default()).collect();
        Self {
            options,
            now: 0,
            queue: BinaryHeap::new(),
            scheduled: 0,
            timing: Timing::default(),
            nodes,
            replicas,
            store: Store::new(record),
            health: StoreHealth::default(),
            cut: vec![vec![false; count]; count],
            clients,
            slots: Slots::default(),
            controllers: Vec::new(),
            checker: Checker::default(),
            report: Report::default(),
            quiet_until: 0,
            lost: Vec::new(),
            lively: true,
            next_value: 0,
            last_id: 0,
            failure: None,
            log: VecDeque::new(),
            random,
        }
    }

    pub(crate) fn after(&mut self, delay: u64, event: Event) {
        self.scheduled += 1;
        let (at, number) = (self.now + delay, self.scheduled);
        self.queue.push(Reverse(Scheduled { at, number, event }));
    }

    /// Sends a message to a core of the node's present life.
    pub(crate) fn send(&mut self, delay: u64, node: usize, core: Core, message: Message) {
        let life = self.nodes[node].life;
        self.send_to(delay, node, life, core, message);
    }

    pub(crate) fn send_to(
        &mut self,
        delay: u64,
        node: usize,
        life: u64,
        core: Core,
        message: Message,
    ) {
        self.after(
            delay,
            Event::Node {
                node,
                life,
                core,
                message,
            },
        );
    }

    /// Sends a message over the network; it is lost if the link is cut.
    pub(crate) fn transmit(
        &mut self,
        from: usize,
        to: usize,
        life: u64,
        core: Core,
        message: Message,
    ) {
        if self.cut[from][to] {
            return;
        }
        let delay = self.latency(from == to);
        self.send_to(delay, to, life, core, message);
    }

    fn latency(&mut self, is_local: bool) -> u64 {
        match self.random.below(64) {
            _ if is_local => self.random.within(1, 10) * MICRO,
            0 => self.random.within(1, 20) * MILLI,
            _ => self.random.within(30, 300) * MICRO,
        }
    }

    pub(crate) fn note(&mut self, line: impl FnOnce() -> String) {
        let line = format!("{:>10.3} ms {}", self.now as f64 / 1e6, line());
        if self.options.trace {
            println!("{line}");
        }
        if self.log.len() >= 60 {
            self.log.pop_front();
        }
        self.log.push_back(line);
    }

    pub(crate) fn new_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    /// Cores of a node stop for a while: one of them, or (`which` from [`ALL_CORES`]) all.
    pub(crate) fn stall(&mut self, node: usize, which: u64, ms: u64) {
        let until = self.now + ms * MILLI;
        self.report.stalls += 1;
        for core in 0..3 {
            if which >= ALL_CORES || which == core {
                // The cores go on in any order.
                let stalled = &mut self.nodes[node].stalled[core as usize];
                *stalled = (*stalled).max(until + self.random.below(20 * MILLI));
            }
        }
        self.note(|| format!("node {node} stalls for {ms} ms (core {which})"));
    }

    /// Sends the changes of the store to the node's watch.
    pub(crate) fn notify(&mut self, node: usize) {
        let place = &self.nodes[node];
        if place.up && !place.link.is_cut && !place.link.is_watch_stalled {
            let delay = if place.link.is_slow {
                self.random.within(300, 950) * MILLI
            } else {
                self.random.within(300, 3000) * MICRO
            };
            let upto = self.store.log.len();
            self.send(delay, node, Core::Management, Message::Watch(upto));
        }
    }
}
