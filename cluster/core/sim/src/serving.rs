//! A model of the data path of a volume's holder: the reads and writes of hosts.
//!
//! A command locks its block. A read goes to one in-sync replica, a write to all that may be in
//! sync, and to those that are being filled, which it does not wait for. Then the command is
//! *collected*: at the end of the turn, the holder checks whether its node's lease is good. If it
//! is, the response leaves. If not, the response is *held* until the lease is good again, or until
//! every replica that may be in sync has confirmed that it still has the holder's key. A write that
//! all these replicas executed needs no more confirmations.

use std::collections::{BTreeSet, VecDeque};

use nacre_cluster_core::BootTime;
use nacre_cluster_core::confirmation::ReplicaIds;
use nacre_cluster_core::gate::Key;
use nacre_cluster_core::mutation::Mutation;

use crate::client::Command;
use crate::events::{Core, Event, Message};
use crate::lane::{Outstanding, Running};
use crate::names::{ALL_CORES, MICRO, MILLI, SECOND, TURN, replica_id, replica_index};
use crate::replica::{Io, IoResult};
use crate::world::World;

/// Timeout of a round of confirmations; the next round then begins.
const ROUND: u64 = 500 * MILLI;

impl World {
    /// Handles a message to the core with the node's data path.
    pub(crate) fn lane_message(&mut self, node: usize, message: Message) {
        match message {
            Message::Command(command) => {
                let place = &mut self.nodes[node];
                if place.lane.open && command.connection == place.connections {
                    place.lane.waiting.push_back(command);
                    self.admit(node);
                } else {
                    self.answer(command, None);
                }
            }
            Message::IoDone { id, result } => self.io_done(node, id, result),
            Message::Hand { clock } => self.hand(node, clock),
            Message::LaneTurn => {
                self.send(TURN, node, Core::Lanes, Message::LaneTurn);
                self.lane_turn(node);
            }
            Message::Close { number } => {
                let place = &mut self.nodes[node];
                // A lane that was stalled may see this after the volume was dropped.
                if place.control.closing() != Some(number) {
                    return;
                }
                let lane = &mut place.lane;
                lane.open = false;
                lane.closing = Some(number);
                for command in std::mem::take(&mut lane.waiting) {
                    self.answer(command, None);
                }
                self.report_drained(node);
            }
            Message::Confirmation {
                round,
                replica,
                key,
            } => self.confirmed(node, round, replica, key),
            _ => unreachable!("not a message of lanes"),
        }
    }

    /// Begins to accept commands: the node serves the volume.
    pub(crate) fn open_lanes(&mut self, node: usize) {
        let lane = &mut self.nodes[node].lane;
        lane.open = true;
        lane.closing = None;
    }

    /// Drops all commands and answers, and ends the hosts' connections: a command that waits in a
    /// socket must not be executed after this node has taken the volume again.
    pub(crate) fn drop_lanes(&mut self, node: usize) {
        let place = &mut self.nodes[node];
        place.connections += 1;
        let lane = std::mem::take(&mut place.lane);
        let running = lane.running.into_values().map(|o| o.command);
        for command in running.chain(lane.waiting) {
            self.answer(command, None);
        }
    }

    fn answer(&mut self, command: Command, value: Option<u64>) {
        let delay = self.random.within(30, 300) * MICRO;
        let Command {
            client, attempt, ..
        } = command;
        self.after(
            delay,
            Event::Host {
                client,
                attempt,
                value,
            },
        );
    }

    /// Starts the waiting commands whose blocks are not locked, in order per block.
    pub(crate) fn admit(&mut self, node: usize) {
        let lane = &mut self.nodes[node].lane;
        let mut still = VecDeque::new();
        let mut started = Vec::new();
        for command in std::mem::take(&mut lane.waiting) {
            let is_before = still.iter().any(|c: &Command| c.block == command.block);
            if lane.frozen || is_before || lane.is_locked(command.block) {
                still.push_back(command);
                continue;
            }
            self.last_id += 1;
            started.push(self.last_id);
            let operation = Running {
                command,
                done: BTreeSet::new(),
                value: command.write,
                is_collected: false,
            };
            lane.running.insert(self.last_id, operation);
        }
        lane.waiting = still;
        started.into_iter().for_each(|id| self.pump(node, id));
    }

    /// Sends the replica I/O that the operation still needs. If all of it is done, collects the
    /// operation.
    fn pump(&mut self, node: usize, id: u64) {
        let place = &self.nodes[node];
        let Some(operation) = place.lane.running.get(&id).filter(|o| !o.is_collected) else {
            return;
        };
        let required: Vec<usize> = place
            .control
            .may_be_in_sync()
            .unwrap_or_default()
            .iter()
            .map(|replica| replica_index(*replica))
            .collect();
        let is_under_way = |replica: usize| {
            let mut all = place.lane.outstanding.values();
            all.any(|o| o.operation == id && o.replica == replica)
        };
        let block = operation.command.block;
        let mut sends = Vec::new();
        match operation.command.write {
            Some(value) => {
                if !required.is_empty() && required.iter().all(|m| operation.done.contains(m)) {
                    return self.collect(node, id);
                }
                let targets = required.iter().chain(&place.filled);
                for replica in targets.copied().collect::<BTreeSet<_>>() {
                    if !operation.done.contains(&replica) && !is_under_way(replica) {
                        sends.push((replica, Io::Write { block, value }));
                    }
                }
            }
            None => {
                let any = place.lane.outstanding.values().any(|o| o.operation == id);
                let record = place.control.record();
                let replicas: Vec<usize> = record
                    .into_iter()
                    .flat_map(|record| record.in_sync())
                    .filter(|replica| place.control.has_gate(replica.id))
                    .map(|replica| replica_index(replica.id))
                    .collect();
                if !any && !replicas.is_empty() {
                    sends.push((*self.random.pick(&replicas), Io::Read { block }));
                }
            }
        }
        let client = operation.command.client;
        for (replica, io) in sends {
            if matches!(io, Io::Read { .. }) && self.lively && self.random.one_in(60) {
                self.stall_at_read(node, client);
            }
            if self.nodes[node].control.has_gate(replica_id(replica)) {
                let io_id = self.send_io(node, Core::Lanes, replica, io);
                let sent = self.now;
                let outstanding = Outstanding {
                    operation: id,
                    replica,
                    sent,
                };
                self.nodes[node].lane.outstanding.insert(io_id, outstanding);
            }
        }
    }

    /// Stalls the node with a read in flight, for so long that another node becomes the holder. The
    /// replica may execute the read afterwards, with data that is stale by then.
    fn stall_at_read(&mut self, node: usize, client: usize) {
        let ms = self.random.within(2500, 5000);
        self.stall(node, ALL_CORES, ms);
        self.quiet_until = self.now + ms * MILLI;
        self.clients[client].be_patient(self.now + 10 * SECOND);
    }

    /// Sends an I/O to a replica, under the holder's key; returns its id.
    pub(crate) fn send_io(&mut self, node: usize, core: Core, replica: usize, io: Io) -> u64 {
        let id = self.new_id();
        let place = &self.nodes[node];
        let Some(key) = place.control.key() else {
            return id;
        };
        let (session, life) = (place.sessions[replica], place.life);
        let to = self.replicas[replica].node;
        let message = Message::Io {
            from: node,
            life,
            core,
            id,
            replica,
            io,
            key,
            session,
        };
        self.transmit(node, to, self.nodes[to].life, Core::Gates, message);
        id
    }

    fn io_done(&mut self, node: usize, id: u64, result: IoResult) {
        let Some(Outstanding {
            operation, replica, ..
        }) = self.nodes[node].lane.outstanding.remove(&id)
        else {
            return;
        };
        match result {
            IoResult::Refused(current) => {
                self.gate_said_no(node, replica, current);
            }
            IoResult::Done(value) => {
                let place = &mut self.nodes[node];
                let in_sync = place.control.record();
                let in_sync = in_sync.is_some_and(|r| r.is_in_sync(replica_id(replica)));
                if let Some(found) = place.lane.running.get_mut(&operation) {
                    if found.command.write.is_some() {
                        found.done.insert(replica);
                    } else if in_sync {
                        found.value = Some(value);
                        return self.collect(node, operation);
                    }
                }
                self.pump(node, operation);
            }
            IoResult::All(..) => {}
        }
    }

    /// All replica I/O of the operation is done. The lease is checked at the end of this turn, and
    /// the response leaves or is held.
    fn collect(&mut self, node: usize, id: u64) {
        let place = &mut self.nodes[node];
        let Some(operation) = place.lane.running.get_mut(&id) else {
            return;
        };
        operation.is_collected = true;
        let is_first = place.lane.collected.is_empty();
        place.lane.collected.push(id);
        let clock = place.turn_clock.0;
        if is_first {
            self.send(10 * MICRO, node, Core::Lanes, Message::Hand { clock });
        }
    }

    fn hand(&mut self, node: usize, clock: u64) {
        let place = &mut self.nodes[node];
        let now = if Mutation::ClockOfTurn.is_active() {
            BootTime(clock)
        } else {
            place.clock(self.now)
        };
        let is_good = place.word.is_good(now);
        for id in std::mem::take(&mut self.nodes[node].lane.collected) {
            if is_good || self.has_own_confirmations(node, id) {
                self.leave(node, id);
                continue;
            }
            self.report.held += 1;
            let lane = &mut self.nodes[node].lane;
            lane.last_ticket += 1;
            lane.held.insert(lane.last_ticket, id);
        }
    }

    /// True for a write that all replicas that may be in sync have executed: its completions are
    /// their confirmations.
    fn has_own_confirmations(&self, node: usize, id: u64) -> bool {
        let place = &self.nodes[node];
        let Some(operation) = place.lane.running.get(&id) else {
            return false;
        };
        let has = |replica: &_| operation.done.contains(&replica_index(*replica));
        let replicas = place.control.may_be_in_sync();
        operation.command.write.is_some() && replicas.is_some_and(|m| m.iter().all(has))
    }

    /// Sends the response to the host, and unlocks the block.
    fn leave(&mut self, node: usize, id: u64) {
        let lane = &mut self.nodes[node].lane;
        if let Some(operation) = lane.running.remove(&id) {
            lane.outstanding.retain(|_, o| o.operation != id);
            self.answer(operation.command, operation.value);
        }
        self.admit(node);
        self.report_drained(node);
    }

    fn report_drained(&mut self, node: usize) {
        let lane = &self.nodes[node].lane;
        if let Some(number) = lane.closing
            && lane.is_idle()
        {
            let drained = Message::Drained { number };
            self.send(MICRO, node, Core::Management, drained);
        }
    }

    fn lane_turn(&mut self, node: usize) {
        self.admit(node);
        let ids: Vec<u64> = self.nodes[node].lane.running.keys().copied().collect();
        ids.into_iter().for_each(|id| self.pump(node, id));
        let place = &self.nodes[node];
        if place.lane.held.is_empty() {
            return;
        }
        if place.word.is_good(place.clock(self.now)) {
            return self.release_held(node, u64::MAX);
        }
        if !place.control.is_open() {
            return;
        }
        let Some(replicas) = place.control.may_be_in_sync() else {
            return;
        };
        let lane = &mut self.nodes[node].lane;
        let is_over =
            |(began, of): &(u64, ReplicaIds)| self.now - began >= ROUND || *of != replicas;
        if lane.round.as_ref().is_some_and(is_over) {
            lane.confirmations.abandon();
            lane.round = None;
        }
        let Some(round) = lane.confirmations.start(lane.last_ticket, replicas.clone()) else {
            return;
        };
        lane.round = Some((self.now, replicas.clone()));
        let life = self.nodes[node].life;
        for replica in replicas {
            let replica = replica_index(replica);
            let to = self.replicas[replica].node;
            let message = Message::Report {
                from: node,
                life,
                round,
                replica,
            };
            self.transmit(node, to, self.nodes[to].life, Core::Gates, message);
        }
    }

    fn confirmed(&mut self, node: usize, round: u64, replica: usize, key: Option<Key>) {
        let place = &mut self.nodes[node];
        let own = place.control.key();
        if own.is_none() || key != own {
            return self.gate_said_no(node, replica, key);
        }
        let replicas = place.control.may_be_in_sync();
        let of = place.lane.round.as_ref().map(|(_, of)| of.clone());
        if of.is_none() || of != replicas {
            return;
        }
        if let Some(covers) = place
            .lane
            .confirmations
            .confirmed(round, replica_id(replica))
        {
            place.lane.round = None;
            self.report.confirmations += 1;
            self.release_held(node, covers);
        }
    }

    fn release_held(&mut self, node: usize, covers: u64) {
        let held = &mut self.nodes[node].lane.held;
        let later = held.split_off(&covers.saturating_add(1));
        let ready = std::mem::replace(held, later);
        ready.into_values().for_each(|id| self.leave(node, id));
    }

    /// Forgets I/O in flight at a replica, whose connection was lost. The holder sends it again
    /// when the replica has accepted its key.
    pub(crate) fn forget_replica(&mut self, node: usize, replica: usize) {
        let lane = &mut self.nodes[node].lane;
        lane.outstanding.retain(|_, o| o.replica != replica);
    }

    /// The replica and the send time of each I/O in flight.
    pub(crate) fn owed(&self, node: usize) -> Vec<(usize, u64)> {
        let outstanding = self.nodes[node].lane.outstanding.values();
        outstanding.map(|o| (o.replica, o.sent)).collect()
    }
}
