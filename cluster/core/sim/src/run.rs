//! The loop of a run: takes the next event, and gives it to the part that it concerns.

use std::cmp::Reverse;

use nacre_cluster_core::Replica;
use nacre_cluster_core::volume::HoldingState;

use crate::events::{Core, Event, Scheduled};
use crate::gates::Gates;
use crate::hosts::Hosts;
use crate::names::{BLOCKS, MILLI, SECOND, index_of, node_id};
use crate::node::SimNode;
use crate::report::Report;
use crate::store_side::StoreSide;
use crate::trouble::Troubles;
use crate::world::World;

/// Time after the last trouble within which the volume must have a holder.
const RECOVERY: u64 = 10 * SECOND;
/// Time after [`RECOVERY`] within which the last operations must have ended.
const COMPLETION: u64 = 20 * SECOND;

/// A run of one world.
pub(crate) struct Run(pub World);

impl Run {
    pub(crate) fn run(mut self) -> Result<Report, String> {
        for node in 0..self.0.nodes.len() {
            self.0.slots.assign(node_id(node));
            self.0.after(0, Event::Start { node });
        }
        for client in 0..self.0.clients.len() {
            self.0
                .after(500 * MILLI, Event::HostTimer { client, attempt: 0 });
        }
        self.0.after(2 * SECOND, Event::Trouble);
        let end = self.0.options.seconds * SECOND;
        if self.0.random.one_in(4) {
            let before = self.0.random.within(0, 3000) * MILLI;
            self.0.after(end.saturating_sub(before), Event::LoseTwo);
        }
        let outcome = self.until(end).and_then(|()| {
            Troubles(&mut self.0).calm();
            self.until(end + RECOVERY)?;
            self.check_leases()?;
            let (_, record) = self.0.store.record();
            let lost = |replica: &Replica| self.0.lost.contains(&index_of(replica.node));
            if record.in_sync().all(lost) {
                // The data is on the nodes that are down.
                return self.0.checker.check(BLOCKS);
            }
            if self.holders() != 1 {
                return Err("the volume has no holder 10 s after the last trouble".to_owned());
            }
            Hosts(&mut self.0).finish_clients();
            self.until(end + RECOVERY + COMPLETION)?;
            if let Some(client) = self.0.clients.iter().position(|c| !c.is_done()) {
                return Err(format!("an operation of client {client} has no end"));
            }
            self.0.checker.check(BLOCKS)
        });
        self.0.report.virtual_ms = self.0.now / MILLI;
        outcome.map(|()| self.0.report).map_err(|what| {
            let lines = self.0.log.iter().map(|line| format!("\n  {line}"));
            what + &lines.collect::<String>()
        })
    }

    /// Every node that runs has a lease again, and none that is down has one.
    fn check_leases(&self) -> Result<(), String> {
        for (index, node) in self.0.nodes.iter().enumerate() {
            if node.up && !node.has_good_lease(self.0.now) {
                return Err(format!("node {index} runs without a lease"));
            }
            if !node.up && self.0.store.leases.contains_key(&node_id(index)) {
                return Err(format!("node {index} is down, and no node fenced it"));
            }
        }
        Ok(())
    }

    fn until(&mut self, end: u64) -> Result<(), String> {
        while let Some(Reverse(next)) = self.0.queue.pop() {
            if next.at > end {
                self.0.queue.push(Reverse(next));
                break;
            }
            self.0.now = next.at;
            self.handle(next);
            if self.holders() > 1 {
                return Err("two nodes hold the volume with good leases".to_owned());
            }
            if let Some(failure) = self.0.failure.take() {
                return Err(failure);
            }
        }
        self.0.now = end;
        Ok(())
    }

    /// Nodes that hold the volume, with a lease that is good by their own clock.
    fn holders(&self) -> usize {
        let holds = |node: &&SimNode| {
            node.volume.state() == HoldingState::Holding && node.has_good_lease(self.0.now)
        };
        self.0.nodes.iter().filter(holds).count()
    }

    fn handle(&mut self, next: Scheduled) {
        match next.event {
            Event::Node {
                node,
                life,
                core,
                message,
            } => {
                let place = &self.0.nodes[node];
                if !place.up || place.life != life {
                    return;
                }
                let stalled = place.stalled[core as usize];
                if stalled > self.0.now {
                    // The numbers keep the order of the events that waited.
                    let event = Event::Node {
                        node,
                        life,
                        core,
                        message,
                    };
                    let (at, number) = (stalled, next.number);
                    self.0.queue.push(Reverse(Scheduled { at, number, event }));
                    return;
                }
                match core {
                    Core::Management => self.0.manage(node, message),
                    Core::Lanes => {
                        if self.0.now.saturating_sub(stalled) > 5 * MILLI {
                            self.0.nodes[node].turn_clock = self.0.nodes[node].clock(self.0.now);
                        }
                        self.0.lane_message(node, message);
                    }
                    Core::Gates => Gates(&mut self.0).message(node, message),
                }
            }
            Event::Store { request } => StoreSide(&mut self.0).request(request),
            Event::Host {
                client,
                attempt,
                value,
            } => Hosts(&mut self.0).answer(client, attempt, value),
            Event::HostTimer { client, attempt } => Hosts(&mut self.0).timer(client, attempt),
            Event::Trouble => Troubles(&mut self.0).make(),
            Event::Crash { node, down_ms } => {
                if self.0.lively {
                    Troubles(&mut self.0).crash(node, down_ms);
                }
            }
            Event::LoseTwo => Troubles(&mut self.0).lose_two(),
            Event::Start { node } => self.0.start_node(node),
            Event::FenceOff { dead } => StoreSide(&mut self.0).fence_off(dead),
            Event::Begin(trouble, most_ms) => Troubles(&mut self.0).begin(trouble, most_ms),
            Event::Heal(trouble) => Troubles(&mut self.0).heal(trouble),
        }
    }
}
