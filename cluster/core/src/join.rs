//! How a node gets its lease when it starts, or after it was fenced.

use crate::ids::{Incarnation, NodeId, Revision};
use crate::lease::Lease;
use crate::record::Holder;
use crate::time::{BootTime, Timing};
use crate::transaction::Transaction;

/// The lease key as it stands in the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Found {
    pub revision: Revision,
    /// True if this machine wrote it. The caller holds the lock of the data directory, so the
    /// process that wrote it is dead.
    pub is_ours: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum JoinStep {
    /// Read the lease key, and call [`Join::found`].
    Look,
    /// Call [`Join::created`] if the transaction was made, [`Join::again`] in any other case.
    Create(Transaction),
    /// Call [`Join::again`] whatever the outcome.
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
    /// A lease of another machine, and the time of the first look at it.
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

    /// The key was created: the lease counts from the time at which the transaction was sent.
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

    /// Looks again, a renewal's time later.
    pub fn again(&mut self, now: BootTime) {
        self.step = JoinState::Look {
            not_before: now + self.timing.renewal(),
        };
    }
}
