//! The management core of a node: drives the state machines of `nacre-cluster-core` and the model
//! of the control, and performs their intents.

use std::collections::BTreeSet;

use nacre_cluster_core::gate::Key;
use nacre_cluster_core::join::JoinStep;
use nacre_cluster_core::lease::Word;
use nacre_cluster_core::observer::{Observer, ObserverRole};
use nacre_cluster_core::volume::{HoldingState, Intent, View};
use nacre_cluster_core::{
    BootTime, Effect, Incarnation, Join, Lease, NodeId, ReplicaId, Volume, ranks,
};

use crate::control::{self, Control, ControlAct};
use crate::copying;
use crate::events::{Core, Event, Message};
use crate::lane::Lane;
use crate::names::{
    MICRO, MILLI, SECOND, TURN, VOLUME, index_of, node_id, replica_id, replica_index,
};
use crate::node::{Ask, Request, Target};
use crate::requests::Purpose;
use crate::world::World;

/// Time without an answer after which a replica goes out of sync while its node has a lease.
const PATIENCE: u64 = 2 * SECOND;
/// The same, when its node has no lease.
const OWED: u64 = 500 * MILLI;
/// Time for a merge or a copy.
const COPY: u64 = 2 * SECOND;

impl World {
    pub(crate) fn start_node(&mut self, node: usize) {
        let timing = self.timing;
        let replicas = self.replicas.len();
        let place = &mut self.nodes[node];
        if place.up || self.lost.contains(&node) {
            return;
        }
        place.up = true;
        place.life += 1;
        place.stalled = [0; 3];
        place.join = Some(Join::new(node_id(node), timing));
        place.lease = None;
        place.word = Word::default();
        place.observers.clear();
        place.standing.clear();
        place.volume = Volume::new(VOLUME, node_id(node));
        place.control = Control::new(0);
        place.lane = Lane::default();
        place.filled.clear();
        place.copy = None;
        place.asked_gates.clear();
        place.requests.clear();
        place.watched = 0;
        for session in &mut place.sessions[..replicas] {
            *session += 1;
        }
        place.connections += 1;
        self.note(|| format!("node {node} starts"));
        self.send(MICRO, node, Core::Management, Message::Turn);
        self.send(MICRO, node, Core::Lanes, Message::LaneTurn);
        let upto = self.store.log.len();
        self.send(MILLI, node, Core::Management, Message::Watch(upto));
    }

    pub(crate) fn manage(&mut self, node: usize, message: Message) {
        match message {
            Message::Turn => self.send(TURN, node, Core::Management, Message::Turn),
            Message::Store(id, answer) => {
                let now = self.nodes[node].clock(self.now);
                if !self.nodes[node].store_answer(id, answer, now) {
                    self.failure = Some(format!("node {node} found its id in use"));
                }
            }
            Message::Watch(upto) => {
                let now = self.nodes[node].clock(self.now);
                let log = &self.store.log[..upto];
                self.nodes[node].watch(node_id(node), log, self.timing, now);
            }
            Message::Granted {
                replica,
                key,
                session,
            } => {
                let place = &mut self.nodes[node];
                if place.sessions[replica] == session {
                    place.asked_gates.remove(&replica);
                    place.control.granted(replica_id(replica), key);
                }
            }
            Message::GateRefused {
                replica,
                key,
                session,
                current,
            } => {
                let place = &mut self.nodes[node];
                if current.is_some_and(|current| current.epoch > key.epoch) {
                    place.control.gate_refused(key);
                } else if place.sessions[replica] == session {
                    self.lose_session(node, replica);
                }
            }
            Message::Drained { number } => self.nodes[node].control.lanes_are_idle(number),
            Message::IoDone { id, result } => copying::copied(self, node, id, result),
            _ => unreachable!("not a message of management"),
        }
        self.turn(node);
    }

    fn turn(&mut self, node: usize) {
        let now = self.nodes[node].clock(self.now);
        self.expire_requests(node);
        if let Some(join) = &mut self.nodes[node].join {
            match join.poll(now) {
                Some(JoinStep::Look) => {
                    self.ask(node, Purpose::Look, Ask::Read(node_id(node)));
                }
                Some(JoinStep::Create(what)) => {
                    self.ask(node, Purpose::Create, Ask::Transaction(what));
                }
                Some(JoinStep::Replace(what)) => {
                    self.ask(node, Purpose::Replace, Ask::Transaction(what));
                }
                None => {}
            }
        }
        let Some(lease) = &mut self.nodes[node].lease else {
            return;
        };
        if let Some(renewal) = lease.poll(now)
            && let Effect::Renew { number, .. } = renewal.effect
        {
            let purpose = Purpose::Renew(lease.holder().incarnation, number);
            self.ask(node, purpose, Ask::Transaction(renewal));
        }
        self.observe(node, now);
        self.poll_volume(node, now);
        self.poll_control(node, now);
        // The control may have answered.
        self.poll_volume(node, now);
        self.upkeep(node);
        let place = &mut self.nodes[node];
        let until = place
            .lease
            .as_ref()
            .map_or_else(BootTime::default, Lease::until);
        place.word.set(until);
        if place.lease.as_ref().is_some_and(Lease::has_ended) {
            self.rejoin(node);
        }
    }

    /// Another node has ended the incarnation: drops the volume, and joins with a new one.
    fn rejoin(&mut self, node: usize) {
        self.drop_volume(node);
        let place = &mut self.nodes[node];
        place.lease = None;
        place.volume.restart();
        place.join = Some(Join::new(node_id(node), self.timing));
        self.note(|| format!("node {node} was fenced"));
    }

    fn observe(&mut self, node: usize, now: BootTime) {
        let place = &mut self.nodes[node];
        let live: Vec<NodeId> = place.standing.keys().copied().collect();
        let me = node_id(node);
        let mut looks = Vec::new();
        let mut fences = Vec::new();
        let is_time = now >= place.next_look;
        let Some(lease) = &place.lease else { return };
        for of in live.iter().filter(|of| **of != me) {
            let rank = ranks::observers(*of, &live).iter().position(|n| *n == me);
            let role = rank.map_or(ObserverRole::Other, |rank| {
                ObserverRole::Observer(rank as u8)
            });
            let observer = place
                .observers
                .entry(*of)
                .or_insert_with(|| Observer::new(*of, role, self.timing));
            observer.set_role(role, now);
            if observer.must_read() && is_time {
                looks.push(*of);
            }
            if let Some(fence) = observer.poll(now, lease) {
                fences.push((index_of(*of), fence));
            }
        }
        if is_time {
            place.next_look = now + self.timing.lease() / 2;
        }
        for of in looks {
            self.ask(node, Purpose::Observe(index_of(of)), Ask::Read(of));
        }
        for (of, fence) in fences {
            self.note(|| format!("node {node} fences node {of}"));
            self.ask(node, Purpose::Fence(of), Ask::Transaction(fence));
        }
    }

    fn poll_volume(&mut self, node: usize, now: BootTime) {
        let reached = self.reached(node);
        let candidates: Vec<NodeId> = (0..self.nodes.len()).map(node_id).collect();
        for _ in 0..64 {
            let place = &mut self.nodes[node];
            let Some(lease) = &place.lease else { return };
            let view = View {
                now,
                lease,
                standing: &place.standing,
                reached: &reached,
                candidates: &candidates,
                cordoned: &[],
            };
            let before = place.volume.state();
            let Some(intent) = place.volume.poll(&view) else {
                return;
            };
            self.perform(node, before, intent);
        }
    }

    fn perform(&mut self, node: usize, before: HoldingState, intent: Intent) {
        match intent {
            Intent::Commit {
                number,
                transaction,
            } => {
                if before == HoldingState::Standby {
                    self.note(|| format!("node {node} takes"));
                }
                let holder = self.nodes[node].holder();
                let of = holder.map_or(Incarnation(0), |holder| holder.incarnation);
                let purpose = Purpose::Commit(of, number);
                self.ask(node, purpose, Ask::Transaction(transaction));
            }
            Intent::Take { number } => {
                let place = &mut self.nodes[node];
                let seen = place.volume.seen().cloned();
                if let (Some(own), Some(seen)) = (place.holder(), seen) {
                    place.filled.clear();
                    place.control.open(number, own, seen);
                }
            }
            Intent::Close { number } => {
                self.nodes[node].control.close(number);
                self.send(MICRO, node, Core::Lanes, Message::Close { number });
            }
            Intent::Drop => self.drop_volume(node),
            Intent::Abort | Intent::NoHolder => {}
        }
    }

    fn drop_volume(&mut self, node: usize) {
        self.drop_lanes(node);
        let place = &mut self.nodes[node];
        place.control.drop_all();
        place.copy = None;
        place.filled.clear();
    }

    fn poll_control(&mut self, node: usize, now: BootTime) {
        let reached = self.reached(node);
        for _ in 0..64 {
            let place = &mut self.nodes[node];
            let view = control::ControlView {
                now,
                standing: &place.standing,
                reached: &reached,
            };
            let Some(act) = place.control.poll(&view) else {
                return;
            };
            self.act(node, act);
        }
    }

    fn act(&mut self, node: usize, act: ControlAct) {
        match act {
            ControlAct::Commit {
                number,
                transaction,
            } => {
                let holder = self.nodes[node].holder();
                let of = holder.map_or(Incarnation(0), |holder| holder.incarnation);
                let purpose = Purpose::Change(of, number);
                self.ask(node, purpose, Ask::Transaction(transaction));
            }
            ControlAct::Acquire { replica, key } => {
                let replica = replica_index(replica);
                let (life, to) = (self.nodes[node].life, self.replicas[replica].node);
                let session = self.nodes[node].sessions[replica];
                self.nodes[node].asked_gates.insert(replica, self.now);
                let message = Message::Acquire {
                    from: node,
                    life,
                    replica,
                    key,
                    session,
                };
                self.transmit(node, to, self.nodes[to].life, Core::Gates, message);
            }
            ControlAct::Merge { number } => copying::start_copy(self, node, Target::Merge(number)),
            ControlAct::Drained { number } => self.nodes[node].volume.drained(number),
            ControlAct::Ended { opening, close } => {
                self.drop_volume(node);
                let volume = &mut self.nodes[node].volume;
                volume.not_opened(opening);
                if let Some(close) = close {
                    volume.drained(close);
                }
            }
        }
    }

    fn reached(&self, node: usize) -> Vec<ReplicaId> {
        (0..self.replicas.len())
            .filter(|replica| self.reaches(node, self.replicas[*replica].node))
            .map(replica_id)
            .collect()
    }

    fn reaches(&self, from: usize, to: usize) -> bool {
        self.nodes[to].up && !self.cut[from][to] && !self.cut[to][from]
    }

    /// Puts replicas out of sync that do not answer, and copies to replicas that return.
    fn upkeep(&mut self, node: usize) {
        let place = &self.nodes[node];
        let mut owed = self.owed(node);
        owed.extend(
            place
                .asked_gates
                .iter()
                .map(|(replica, at)| (*replica, *at)),
        );
        for (replica, since) in owed {
            let of = self.replicas[replica].node;
            let stands = self.nodes[node].standing.contains_key(&node_id(of));
            let patience = if stands { PATIENCE } else { OWED };
            if self.now - since >= patience || !self.nodes[of].up {
                self.lose_session(node, replica);
                self.nodes[node].control.put_out(replica_id(replica));
            }
        }
        let place = &mut self.nodes[node];
        if let Some(copy) = &place.copy
            && self.now - copy.began >= COPY
        {
            let late: BTreeSet<usize> = copy.missing.values().copied().collect();
            copying::end_copy(self, node);
            for replica in late {
                self.nodes[node].control.put_out(replica_id(replica));
            }
            return;
        }
        let control = &place.control;
        if place.copy.is_some() || !control.is_open() || !place.lane.open {
            return;
        }
        let Some(record) = control.record() else {
            return;
        };
        let outdated = record.replicas.iter().find(|replica| {
            !record.is_in_sync(replica.id)
                && control.has_gate(replica.id)
                && !control.is_changing(replica.id)
                && !place.filled.contains(&replica_index(replica.id))
        });
        if let Some(replica) = outdated {
            let replica = replica_index(replica.id);
            place.lane.frozen = true;
            if place.lane.is_idle() {
                copying::start_copy(self, node, Target::Replica(replica));
            }
        } else {
            place.lane.frozen = false;
        }
    }

    /// The connection to a replica ends: its I/O is lost, and its gate must be acquired again.
    pub(crate) fn lose_session(&mut self, node: usize, replica: usize) {
        let place = &mut self.nodes[node];
        place.sessions[replica] += 1;
        place.asked_gates.remove(&replica);
        place.filled.remove(&replica);
        place.control.lost_gate(replica_id(replica));
        self.forget_replica(node, replica);
    }

    /// Handles a refusal of a gate, which has the key `current`: a later holder's, or none.
    pub(crate) fn gate_said_no(&mut self, node: usize, replica: usize, current: Option<Key>) {
        let place = &mut self.nodes[node];
        let Some(own) = place.control.key() else {
            return;
        };
        if current.is_some_and(|current| current.epoch > own.epoch) {
            place.control.gate_refused(own);
        } else {
            self.lose_session(node, replica);
        }
    }

    fn ask(&mut self, node: usize, purpose: Purpose, what: Ask) {
        let id = self.new_id();
        let place = &mut self.nodes[node];
        place.requests.sent(id, purpose, self.now);
        let request = Request {
            id,
            from: node,
            life: place.life,
            sent: self.now,
            what,
        };
        // A hedged request goes to two endpoints.
        if self.random.one_in(4) {
            self.send_request(request.clone());
        }
        self.send_request(request);
    }

    fn expire_requests(&mut self, node: usize) {
        let now = self.now;
        let place = &mut self.nodes[node];
        let clock = place.clock(now);
        for purpose in place.requests.late(now) {
            match purpose {
                Purpose::Look | Purpose::Create | Purpose::Replace => {
                    if let Some(join) = &mut place.join {
                        join.again(clock);
                    }
                }
                Purpose::Commit(_, number) => place.volume.unanswered(number),
                Purpose::Change(_, number) => place.control.unanswered(number),
                Purpose::Renew(..) | Purpose::Fence(_) | Purpose::Observe(_) => {}
            }
        }
    }

    pub(crate) fn remember_created(&mut self, node: usize, incarnation: Incarnation) {
        self.nodes[node].created.insert(incarnation);
    }

    pub(crate) fn send_request(&mut self, request: Request) {
        let delay = match self.random.below(200) {
            0 if self.lively => self.random.within(100, 3000) * MILLI,
            1..=6 => self.random.within(5, 100) * MILLI,
            _ => self.random.within(200, 2000) * MICRO,
        };
        if !self.nodes[request.from].link.is_cut {
            self.after(delay, Event::Store { request });
        }
    }
}
