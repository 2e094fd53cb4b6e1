//! Watches the lease of one other node, and fences that node when its lease has run out.

use std::time::Duration;

use crate::ids::{NodeId, Revision};
use crate::lease::Lease;
use crate::mutation::Mutation;
use crate::time::{BootTime, Timing};
use crate::transaction::Transaction;

/// The delay between the observers of one node, so that usually one of them fences.
const STAGGER: Duration = Duration::from_millis(100);
/// Time from a fence without effect to the next one.
const RETRY: Duration = Duration::from_millis(500);

/// The part of this node in the observation of the other one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ObserverRole {
    /// One of the node's observers, by rank from 0. It sees every renewal in a watch.
    Observer(u8),
    /// Any other node. It reads the key from time to time, and waits twice as long, so that it
    /// fences only if no observer did.
    Other,
}

/// The observation of one node's lease.
#[derive(Debug)]
pub struct Observer {
    node: NodeId,
    timing: Timing,
    role: ObserverRole,
    /// The last renewal, and the time from which its lease is counted. No time: this node is no
    /// observer, and has read the renewal only once.
    last: Option<(Revision, Option<BootTime>)>,
    /// A later renewal may have been missed.
    is_unsure: bool,
    not_before: BootTime,
}

impl Observer {
    pub fn new(node: NodeId, role: ObserverRole, timing: Timing) -> Self {
        Self {
            node,
            timing,
            role,
            last: None,
            is_unsure: false,
            not_before: BootTime::default(),
        }
    }

    /// Changes the role. The last renewal is kept: a dead node sends no other. For a new observer
    /// that has read the renewal only once, the lease counts from `now`.
    pub fn set_role(&mut self, role: ObserverRole, now: BootTime) {
        self.is_unsure |= self.role == ObserverRole::Other;
        self.role = role;
        if let (ObserverRole::Observer(_), Some((_, at))) = (role, &mut self.last) {
            at.get_or_insert(now);
        }
    }

    /// True if the key must be read from time to time: the watch shows it to observers only, and
    /// only from the time at which they became observers. A fence without effect shows that a
    /// renewal was missed.
    pub fn must_read(&self) -> bool {
        self.role == ObserverRole::Other || self.last.is_none() || self.is_unsure
    }

    /// A watch event or a read shows that the key was last written at `revision`. An older revision
    /// than the known one is ignored.
    pub fn observe(&mut self, revision: Revision, now: BootTime) {
        match self.last {
            Some((known, _)) if known > revision => {}
            Some((known, None)) if known == revision => self.last = Some((known, Some(now))),
            Some((known, Some(_))) if known == revision => {}
            _ => {
                let at = (self.role != ObserverRole::Other).then_some(now);
                self.last = Some((revision, at));
                self.is_unsure = false;
            }
        }
    }

    /// The key was deleted at `revision`.
    pub fn saw_end(&mut self, revision: Revision) {
        if self.last.is_some_and(|(known, _)| known < revision) {
            self.last = None;
        }
    }

    /// The fence, if it is due. Time counts only while this node's own lease has been good without
    /// a gap, so no node is fenced right after the store was away.
    pub fn poll(&mut self, now: BootTime, own: &Lease) -> Option<Transaction> {
        let due = self.due(now, own)?;
        if now < due {
            return None;
        }
        let (revision, _) = self.last?;
        self.not_before = now + RETRY;
        self.is_unsure = true;
        Some(Transaction::fence(own.holder(), self.node, revision))
    }

    /// The time of the fence. `None` while no renewal of the other node is known, or while this
    /// node's own lease does not allow a fence ([`Lease::good_since`]).
    pub fn due(&self, now: BootTime, own: &Lease) -> Option<BootTime> {
        let mut from = self.last?.1?;
        if !Mutation::ObserverWithoutLease.is_active() {
            from = from.max(own.good_since(now)?);
        } else if own.has_ended() {
            return None;
        }
        let wait = match self.role {
            ObserverRole::Observer(rank) => self.timing.lease() + STAGGER * u32::from(rank),
            ObserverRole::Other => self.timing.silence_of_observers(),
        };
        Some((from + wait).max(self.not_before))
    }
}
