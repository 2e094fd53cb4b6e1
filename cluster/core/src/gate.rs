//! The gate of one replica: the check on the replica's node that all I/O to the replica passes,
//! local or remote. It admits the I/O of one holder of the volume only.
//!
//! ```text
//!   acquire ─▶ older I/O refused ─▶ older I/O in flight ends, key stored ─▶ granted
//! ```
//!
//! The key is stored before it is granted, so a restart forgets no fence.

use crate::mutation::Mutation;
use crate::record::Holder;

/// The key that a holder presents with its I/O. The key with the higher epoch excludes the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Key {
    pub epoch: u64,
    pub holder: Holder,
}

/// The refusal of a gate, with the key that it admits; `None`: it admits none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the gate has the key of epoch {:?}", current.map(|key| key.epoch))]
pub struct GateRefusal {
    pub current: Option<Key>,
}

/// An I/O that passed the gate. Return it to [`Gate::ended`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Admission {
    generation: u64,
}

/// The next action of the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GateStep {
    /// Store the key durably, then call [`Gate::stored`].
    Store(Key),
    /// Answer the acquirer: only this key, in this session, passes from here on.
    Grant { key: Key, session: u64 },
}

#[derive(Debug, Default)]
pub struct Gate {
    key: Option<Key>,
    /// The holder's connection; `None` from a restart until a holder acquires the gate. A later
    /// connection ends the earlier one's I/O.
    session: Option<u64>,
    /// Incremented by each key and session.
    generation: u64,
    /// I/O of the present generation in flight.
    in_flight: u32,
    /// I/O of earlier generations in flight.
    older_in_flight: u32,
    stored: Option<Key>,
    storing: bool,
    granted: bool,
}

impl Gate {
    /// The gate of a node that starts, with the key that was stored. No I/O passes until a holder
    /// acquires the gate again.
    pub fn restore(stored: Option<Key>) -> Self {
        let stored = stored.filter(|_| !Mutation::GateForgets.is_active());
        Self {
            key: stored,
            stored,
            granted: true,
            ..Self::default()
        }
    }

    /// A holder registers its key over the connection `session` (later ones have higher numbers).
    /// I/O of other keys and sessions is refused from now on. [`GateStep::Grant`] answers. Refused
    /// if the gate has a later epoch, another holder of this epoch, or a later session of this key.
    pub fn acquire(&mut self, key: Key, session: u64) -> Result<(), GateRefusal> {
        if let Some(current) = self.key {
            let is_older = key.epoch < current.epoch;
            let is_other = key.epoch == current.epoch && key.holder != current.holder;
            let is_late = key == current && self.session.is_some_and(|last| session < last);
            if is_older || is_other || is_late {
                return Err(GateRefusal {
                    current: Some(current),
                });
            }
        }
        if self.key != Some(key) || self.session != Some(session) {
            self.older_in_flight += self.in_flight;
            self.in_flight = 0;
            self.generation += 1;
            self.key = Some(key);
            self.session = Some(session);
        }
        self.granted = false;
        Ok(())
    }

    /// Lets an I/O pass, if this key was granted to this session. The caller performs it, and
    /// reports its end.
    pub fn admit(&mut self, key: Key, session: u64) -> Result<Admission, GateRefusal> {
        if self.key == Some(key) && self.session == Some(session) && self.granted {
            self.in_flight += 1;
            let generation = self.generation;
            Ok(Admission { generation })
        } else {
            Err(GateRefusal { current: self.key })
        }
    }

    /// The I/O has ended.
    pub fn ended(&mut self, admission: Admission) {
        if admission.generation == self.generation {
            self.in_flight -= 1;
        } else {
            self.older_in_flight -= 1;
        }
    }

    /// The key is durable.
    pub fn stored(&mut self, key: Key) {
        self.storing = false;
        self.stored = Some(key);
    }

    /// The next action; call it after each other call, until it returns `None`.
    pub fn poll(&mut self) -> Option<GateStep> {
        let key = self.key?;
        if self.stored != Some(key) {
            if self.storing {
                return None;
            }
            self.storing = true;
            return Some(GateStep::Store(key));
        }
        let is_quiet = self.older_in_flight == 0 || Mutation::GateBeforeEnd.is_active();
        if self.granted || !is_quiet {
            return None;
        }
        let session = self.session?;
        self.granted = true;
        Some(GateStep::Grant { key, session })
    }

    /// The registered key: the answer to a holder that asks for confirmation.
    pub fn key(&self) -> Option<Key> {
        self.key
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;
    use crate::ids::{Incarnation, NodeId};

    fn key(epoch: u64, number: u128) -> Key {
        Key {
            epoch,
            holder: Holder {
                node: NodeId(Uuid::from_u128(10 + number)),
                incarnation: Incarnation(100 + number as u64),
            },
        }
    }

    #[test]
    fn a_gate_answers_after_older_io_and_the_disk() {
        let mut gate = Gate::default();
        let acquire = |gate: &mut Gate, key, session| {
            gate.acquire(key, session).unwrap();
            if let Some(GateStep::Store(key)) = gate.poll() {
                assert_eq!(gate.poll(), None, "not stored yet");
                gate.stored(key);
            }
        };
        acquire(&mut gate, key(1, 0), 1);
        assert!(gate.admit(key(1, 0), 1).is_err(), "not granted yet");
        assert!(matches!(gate.poll(), Some(GateStep::Grant { .. })));
        let old = gate.admit(key(1, 0), 1).unwrap();
        acquire(&mut gate, key(2, 1), 1);
        assert_eq!(gate.poll(), None, "older I/O is in flight");
        let refused = gate.admit(key(1, 0), 1).unwrap_err();
        assert_eq!(refused.current, Some(key(2, 1)));
        gate.ended(old);
        assert!(matches!(gate.poll(), Some(GateStep::Grant { .. })));
        assert!(gate.acquire(key(1, 0), 9).is_err(), "a lower key");
        // A restart keeps the key, and a new session of the same holder.
        let mut gate = Gate::restore(Some(key(2, 1)));
        assert!(gate.admit(key(2, 1), 0).is_err(), "not acquired again");
        assert!(gate.acquire(key(1, 0), 9).is_err());
        acquire(&mut gate, key(2, 1), 2);
        assert!(gate.acquire(key(2, 1), 1).is_err(), "an older session");
    }
}
