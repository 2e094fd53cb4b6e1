//! The gates of the replicas on a node, driven by messages, and their disks.

use nacre_cluster_core::gate::GateStep;

use crate::events::{Core, Message};
use crate::names::{MICRO, MILLI, index_of};
use crate::world::World;

pub(crate) struct Gates<'a>(pub &'a mut World);

impl Gates<'_> {
    pub(crate) fn message(&mut self, node: usize, message: Message) {
        match message {
            Message::Acquire {
                from,
                life,
                replica,
                key,
                session,
            } => {
                if let Err(refused) = self.0.replicas[replica].gate.acquire(key, session) {
                    let current = refused.current;
                    let answer = Message::GateRefused {
                        replica,
                        key,
                        session,
                        current,
                    };
                    self.0.transmit(node, from, life, Core::Management, answer);
                }
                self.poll_gate(node, replica);
            }
            Message::Io {
                from,
                life,
                core,
                id,
                replica,
                io,
                key,
                session,
            } => {
                let is_local = from == node;
                let submitted = self.0.replicas[replica].submit(id, io, key, session, is_local);
                match submitted {
                    Ok(()) => {
                        let delay = self.disk_delay();
                        let done = Message::OnDisk {
                            from,
                            life,
                            core,
                            id,
                            replica,
                        };
                        self.0.send(delay, node, Core::Gates, done);
                    }
                    Err(result) => {
                        self.0
                            .transmit(node, from, life, core, Message::IoDone { id, result });
                    }
                }
            }
            Message::OnDisk {
                from,
                life,
                core,
                id,
                replica,
            } => {
                if let Some(result) = self.0.replicas[replica].complete(id) {
                    self.0
                        .transmit(node, from, life, core, Message::IoDone { id, result });
                }
                self.poll_gate(node, replica);
            }
            Message::KeyStored { replica, key } => {
                self.0.replicas[replica].store_key(key);
                self.poll_gate(node, replica);
            }
            Message::Report {
                from,
                life,
                round,
                replica,
            } => {
                let key = self.0.replicas[replica].gate.key();
                let answer = Message::Confirmation {
                    round,
                    replica,
                    key,
                };
                self.0.transmit(node, from, life, Core::Lanes, answer);
            }
            _ => unreachable!("not a message of gates"),
        }
    }

    fn poll_gate(&mut self, node: usize, replica: usize) {
        while let Some(intent) = self.0.replicas[replica].gate.poll() {
            match intent {
                GateStep::Store(key) => {
                    let delay = self.disk_delay();
                    self.0.send(
                        delay,
                        node,
                        Core::Gates,
                        Message::KeyStored { replica, key },
                    );
                }
                GateStep::Grant { key, session } => {
                    let to = index_of(key.holder.node);
                    let life = self.0.nodes[to].life;
                    let granted = Message::Granted {
                        replica,
                        key,
                        session,
                    };
                    self.0.transmit(node, to, life, Core::Management, granted);
                }
            }
        }
    }

    fn disk_delay(&mut self) -> u64 {
        match self.0.random.below(400) {
            0 if self.0.lively => self.0.random.within(100, 1800) * MILLI,
            1..=8 => self.0.random.within(1, 30) * MILLI,
            _ => self.0.random.within(50, 400) * MICRO,
        }
    }
}
