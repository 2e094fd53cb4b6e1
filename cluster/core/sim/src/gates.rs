//! The gates of the members on a node, driven by messages, and their disks.

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
                member,
                key,
                session,
            } => {
                if let Err(refused) = self.0.members[member].gate.acquire(key, session) {
                    let current = refused.current;
                    let answer = Message::GateRefused {
                        member,
                        key,
                        session,
                        current,
                    };
                    self.0.transmit(node, from, life, Core::Management, answer);
                }
                self.poll_gate(node, member);
            }
            Message::Io {
                from,
                life,
                core,
                id,
                member,
                io,
                key,
                session,
            } => {
                let is_local = from == node;
                let submitted = self.0.members[member].submit(id, io, key, session, is_local);
                match submitted {
                    Ok(()) => {
                        let delay = self.disk_delay();
                        let done = Message::OnDisk {
                            from,
                            life,
                            core,
                            id,
                            member,
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
                member,
            } => {
                if let Some(result) = self.0.members[member].complete(id) {
                    self.0
                        .transmit(node, from, life, core, Message::IoDone { id, result });
                }
                self.poll_gate(node, member);
            }
            Message::KeyStored { member, key } => {
                self.0.members[member].store_key(key);
                self.poll_gate(node, member);
            }
            Message::Report {
                from,
                life,
                round,
                member,
            } => {
                let key = self.0.members[member].gate.key();
                let answer = Message::Assent { round, member, key };
                self.0.transmit(node, from, life, Core::Lanes, answer);
            }
            _ => unreachable!("not a message of gates"),
        }
    }

    fn poll_gate(&mut self, node: usize, member: usize) {
        while let Some(intent) = self.0.members[member].gate.poll() {
            match intent {
                GateStep::Store(key) => {
                    let delay = self.disk_delay();
                    self.0
                        .send(delay, node, Core::Gates, Message::KeyStored { member, key });
                }
                GateStep::Grant { key, session } => {
                    let to = index_of(key.holder.node);
                    let life = self.0.nodes[to].life;
                    let granted = Message::Granted {
                        member,
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
