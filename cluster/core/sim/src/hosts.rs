//! Simulated hosts. Each has a path to every node, and one operation (a read or write of a block)
//! at a time. It sends the operation to a node whose ANA state is optimized. After a timeout or a
//! path error it retries on another path; the first copy may still arrive and be executed.

use nacre_cluster_core::volume::Ana;

use crate::client::{Command, Operation};
use crate::events::{Core, Event, Message};
use crate::names::{BLOCKS, MICRO, MILLI, SECOND};
use crate::world::World;

/// The hosts, over the state of the run.
pub(crate) struct Hosts<'a>(pub &'a mut World);

impl Hosts<'_> {
    /// Has every host read all blocks once, then stop.
    pub(crate) fn finish_clients(&mut self) {
        for client in &mut self.0.clients {
            client.ends = true;
            client.last_reads = (0..BLOCKS).collect();
        }
        for client in 0..self.0.clients.len() {
            if self.0.clients[client].operation.is_none() {
                let attempt = self.0.clients[client].last_attempt;
                self.0.after(MILLI, Event::HostTimer { client, attempt });
            }
        }
    }

    fn start_operation(&mut self, client: usize) {
        let (block, write) = if self.0.clients[client].ends {
            let Some(block) = self.0.clients[client].last_reads.pop() else {
                return;
            };
            (block, None)
        } else {
            // A host writes a block again only after its last write was acknowledged: a retry may
            // execute a write twice. So one client writes each block.
            let is_write = client < BLOCKS && self.0.random.percent(60);
            let block = if is_write {
                client
            } else {
                self.0.random.index(BLOCKS)
            };
            self.0.next_value += u64::from(is_write);
            (block, is_write.then_some(self.0.next_value))
        };
        let number = self.0.checker.start(block, write, self.0.now);
        self.0.clients[client].operation = Some(Operation {
            number,
            block,
            write,
            sent: None,
            patient_until: 0,
        });
        self.attempt(client);
    }

    /// Sends the operation to a node whose ANA state is optimized, as that node sees it. If there
    /// is none, tries again later.
    fn attempt(&mut self, client: usize) {
        let claims = |node: &usize| {
            let place = &self.0.nodes[*node];
            place.up && place.volume.ana(place.clock(self.0.now)) == Ana::Optimized
        };
        let current = self.0.clients[client].path;
        let sent = self.0.clients[client].operation.and_then(|o| o.sent);
        let is_retry = sent.is_some();
        let others: Vec<usize> = (0..self.0.nodes.len())
            .filter(|node| claims(node) && sent != Some((*node, self.0.nodes[*node].life)))
            .collect();
        let path = if !is_retry && claims(&current) {
            current
        } else if others.is_empty() {
            // No other path: an attempt under way goes on.
            let attempt = self.0.clients[client].last_attempt;
            return self
                .0
                .after(50 * MILLI, Event::HostTimer { client, attempt });
        } else {
            *self.0.random.pick(&others)
        };
        self.0.report.retries += u64::from(is_retry);
        let patience = *self.0.random.pick(&[300, 1000, 3000, 10_000]) * MILLI;
        let node = &self.0.nodes[path];
        let (life, connection) = (node.life, node.connections);
        let Some(operation) = &mut self.0.clients[client].operation else {
            return;
        };
        operation.sent = Some((path, life));
        operation.patient_until = self.0.now + patience;
        let (block, write) = (operation.block, operation.write);
        self.0.clients[client].path = path;
        self.0.clients[client].last_attempt += 1;
        let attempt = self.0.clients[client].last_attempt;
        let command = Command {
            client,
            attempt,
            connection,
            block,
            write,
        };
        let delay = self.0.random.within(30, 300) * MICRO;
        self.0
            .send(delay, path, Core::Lanes, Message::Command(command));
        self.0
            .after(patience.min(SECOND), Event::HostTimer { client, attempt });
    }

    /// Starts the next operation of a host, or retries one that has timed out.
    pub(crate) fn timer(&mut self, client: usize, attempt: u64) {
        if self.0.clients[client].last_attempt != attempt {
            return;
        }
        let Some(operation) = self.0.clients[client].operation else {
            if self.0.clients[client].ends || self.0.lively {
                self.start_operation(client);
            }
            return;
        };
        let is_broken = operation
            .sent
            .is_none_or(|(node, life)| !self.0.nodes[node].up || self.0.nodes[node].life != life);
        if is_broken || self.0.now >= operation.patient_until {
            self.attempt(client);
        } else {
            self.0
                .after(50 * MILLI, Event::HostTimer { client, attempt });
        }
    }

    /// Handles the response to an attempt. `value` is the value read or written; `None`: a path
    /// error.
    pub(crate) fn answer(&mut self, client: usize, attempt: u64, value: Option<u64>) {
        if self.0.clients[client].last_attempt != attempt {
            return;
        }
        let Some(operation) = self.0.clients[client].operation else {
            return;
        };
        let Some(value) = value else {
            if let Some(operation) = &mut self.0.clients[client].operation {
                operation.sent = None;
                operation.patient_until = 0;
            }
            return self
                .0
                .after(20 * MILLI, Event::HostTimer { client, attempt });
        };
        self.0.checker.end(operation.number, value, self.0.now);
        match operation.write {
            Some(_) => self.0.report.writes += 1,
            None => self.0.report.reads += 1,
        }
        self.0.clients[client].operation = None;
        let pause = match self.0.random.below(4) {
            // A host that was quiet during a failover may still use its old path.
            0 | 1 if client >= BLOCKS => self.0.random.within(1000, 5000) * MILLI,
            0 => self.0.random.within(1, 400) * MILLI,
            _ => self.0.random.within(1, 40) * MILLI,
        };
        self.0.after(pause, Event::HostTimer { client, attempt });
    }
}
