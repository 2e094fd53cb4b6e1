//! The state machine by which a node gets its lease in the store, when it starts or after it was
//! fenced: it reads the lease key with its id, deletes a leftover one, and creates its own. A
//! leftover key that another machine wrote is deleted only after two lease durations without a
//! renewal.

use crate::ids::{Incarnation, NodeId, Revision};
use crate::lease::Lease;
use crate::record::Holder;
use crate::time::{BootTime, Timing};
use crate::transaction::Transaction;

/// The lease key that the store has for this node's id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Found {
    /// The revision of its last write.
    pub revision: Revision,
    /// True if this machine wrote it. The caller holds the lock of the data directory, so the
    /// process that wrote it is dead.
    pub is_ours: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum JoinStep {
    /// Read the lease key, and call [`Join::found`].
    Look,
    /// Execute the transaction, which creates the lease key. Call [`Join::created`] if it was
    /// executed, [`Join::again`] in any other case.
    Create(Transaction),
    /// Execute the transaction, which deletes the leftover key. Then call [`Join::again`], whatever
    /// the outcome.
    Replace(Transaction),
}

/// Another machine renews the lease of this node's id: a copied data directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "another machine runs with the id of this node: give one of them a data directory of its own"
)]
pub struct InUse;

#[derive(Debug)]
pub struct Join {
    node: NodeId,
    timing: Timing,
    step: JoinState,
    /// A lease key of another machine, and the time when it was first read.
    foreign: Option<(Revision, BootTime)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum JoinState {
    Look { not_before: BootTime },
    Create,
    Replace(Revision),
    Wait { sent: BootTime },
}

impl Join {
    pub fn new(node: NodeId, timing: Timing) -> Self {
        Self {
            node,
            timing,
            step: JoinState::Look {
                not_before: BootTime::default(),
            },
            foreign: None,
        }
    }

    /// The next step; `None` while the outcome of the last one is missing, or before the next read
    /// is due.
    pub fn poll(&mut self, now: BootTime) -> Option<JoinStep> {
        let intent = match self.step {
            JoinState::Look { not_before } if now >= not_before => JoinStep::Look,
            JoinState::Create => JoinStep::Create(Transaction::create(self.node)),
            JoinState::Replace(revision) => {
                JoinStep::Replace(Transaction::replace(self.node, revision))
            }
            JoinState::Look { .. } | JoinState::Wait { .. } => return None,
        };
        self.step = JoinState::Wait { sent: now };
        Some(intent)
    }

    /// The result of the read; `None`: there is no lease key. Fails if a key of another machine was
    /// written between two reads.
    pub fn found(&mut self, key: Option<Found>, now: BootTime) -> Result<(), InUse> {
        let Some(key) = key else {
            self.step = JoinState::Create;
            return Ok(());
        };
        if key.is_ours {
            self.step = JoinState::Replace(key.revision);
            return Ok(());
        }
        let wait = self.timing.silence_of_observers();
        self.step = match self.foreign {
            None => {
                self.foreign = Some((key.revision, now));
                JoinState::Look {
                    not_before: now + wait,
                }
            }
            Some((first, _)) if first != key.revision => return Err(InUse),
            Some((_, seen)) if now.since(seen) >= wait => JoinState::Replace(key.revision),
            Some((_, seen)) => JoinState::Look {
                not_before: seen + wait,
            },
        };
        Ok(())
    }

    /// The lease key was created at revision `incarnation`. Returns the lease, which counts from
    /// the time at which the transaction was sent; `None` if no transaction was sent.
    pub fn created(&self, incarnation: Incarnation, now: BootTime) -> Option<Lease> {
        let JoinState::Wait { sent } = self.step else {
            return None;
        };
        let me = Holder {
            node: self.node,
            incarnation,
        };
        Some(Lease::new(me, self.timing, sent, now))
    }

    /// Reads the lease key again, one renewal interval later.
    pub fn again(&mut self, now: BootTime) {
        self.step = JoinState::Look {
            not_before: now + self.timing.renewal(),
        };
    }
}
