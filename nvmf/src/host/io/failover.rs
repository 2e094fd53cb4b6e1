//! Moves I/O between the queues of several paths to one namespace.
//!
//! A queue that fails over does not fail I/O because of its own path. It stores the I/O until the
//! caller takes it back and gives it to the queue of another path. I/O that was sent can be taken
//! back only after the end of its association. Until then the target could execute it after its
//! repetition on the other path.

use nacre_bdev::{Busy, Completion, Io, Status, Token};
use nacre_nvmf_wire::StatusCode;
use nacre_nvmf_wire::log::ana::AnaState;

use super::waiting::ACCESS_RETRY;
use super::{IoQueue, MAX_RESENDS, QueuePhase};
use crate::host::pending::{Pending, own_data};

/// A path as its queue sees it.
pub(super) struct PathState {
    /// The last [`Link::version`] that the queue has processed.
    ///
    /// [`Link::version`]: crate::host::Link::version
    pub version: u64,
    /// The ANA state of the namespace.
    pub access: AnaState,
    /// The caller has other paths: I/O that this path cannot execute goes back to it.
    pub fails_over: bool,
    /// I/O fails at once, until the next connection or a change of the namespaces.
    pub gave_up: bool,
}

impl Default for PathState {
    fn default() -> Self {
        Self {
            version: 0,
            access: AnaState::Optimized,
            fails_over: false,
            gave_up: false,
        }
    }
}

/// The usability of a path for new I/O.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// I/O is sent at once.
    Usable,
    /// The queue is connecting, or the namespace is inaccessible on the path.
    Waiting,
    /// Without failover, I/O fails at once: the controller failed, I/O has waited for too long, the
    /// namespace is missing, or it has other identifiers.
    GaveUp,
}

/// An I/O that a queue returned, for another path.
pub struct Returned(Pending);

impl Returned {
    pub fn token(&self) -> Token {
        self.0.token()
    }

    /// Completes the I/O with `status`, because no path can execute it.
    pub fn end(mut self, status: Status) -> Completion {
        self.0.end(status)
    }
}

impl IoQueue {
    /// Sets whether I/O that this path cannot execute waits for [`IoQueue::take_back`].
    pub fn set_fails_over(&mut self, fails_over: bool) {
        self.path.fails_over = fails_over;
    }

    #[inline]
    pub fn standing(&self) -> Standing {
        if self.path.gave_up || self.link.has_failed() {
            Standing::GaveUp
        } else if self.phase == QueuePhase::Live
            && self.waits.no_access_until.is_none()
            && self.path.access.is_accessible()
        {
            Standing::Usable
        } else {
            Standing::Waiting
        }
    }

    /// The ANA state of the namespace on this path.
    #[inline]
    pub fn access(&self) -> AnaState {
        self.path.access
    }

    /// True if the queue accepts another I/O.
    #[inline]
    pub fn has_room(&self) -> bool {
        self.pending.len() + self.completed.len() < self.depth
    }

    /// Removes and returns the oldest I/O that this path has not sent, or that was sent in an
    /// association that has ended. `None`: there is none, or the target may still execute the sent
    /// ones.
    pub fn take_back(&mut self) -> Option<Returned> {
        if self.spent.is_some() && self.link.generation() == self.spent {
            return None;
        }
        let index = self.unsent.pop_front()?;
        Some(Returned(self.pending.remove(index)))
    }

    /// Prepares an I/O for any path without sending it. `Ok(None)`: it failed or has no blocks, and
    /// this queue's next poll completes it.
    // The error carries the I/O back by value, as that of `submit` does.
    #[allow(clippy::result_large_err)]
    pub fn hold(&mut self, io: Io) -> Result<Option<Returned>, (Busy, Io)> {
        if !self.has_room() {
            return Err((Busy, io));
        }
        match own_data(&io, &self.pool) {
            Ok(own) => {
                self.stats.activity.queued += 1;
                Ok(Some(Returned(Pending::new(io, own, 0))))
            }
            Err(Status::Retry) => Err((Busy, io)),
            Err(status) => {
                self.completed.push_back(io.complete(status));
                Ok(None)
            }
        }
    }

    /// Accepts an I/O that another path returned. Check [`IoQueue::has_room`] first.
    pub fn accept(&mut self, Returned(mut pending): Returned) {
        pending.order = self.next_order;
        self.next_order += 1;
        let index = self.pending.insert(pending);
        self.unsent.push_back(index);
    }

    /// Stores an I/O with a path-related status (SCT 3h) for another path. Returns false if it must
    /// fail: DNR is set, or it was retried too often.
    #[inline]
    pub(super) fn goes_back(&mut self, index: usize, status: StatusCode) -> bool {
        self.path.fails_over && status.is_path_related() && self.keep(index, status)
    }

    #[cold]
    fn keep(&mut self, index: usize, status: StatusCode) -> bool {
        if status.dnr() {
            return false;
        }
        let pending = &mut self.pending[index];
        match status.code() {
            // The target did not execute it. The time limit bounds these retries.
            StatusCode::ANA_PERSISTENT_LOSS
            | StatusCode::ANA_INACCESSIBLE
            | StatusCode::ANA_TRANSITION => pending.refused(),
            _ if pending.resends >= MAX_RESENDS => return false,
            _ => {
                pending.resends += 1;
                pending.lost();
            }
        }
        self.stats.resent += 1;
        self.unsent.push_back(index);
        self.sort_unsent();
        // Avoid this path for a while, or until the ANA log shows a change.
        self.waits.no_access_until = Some(self.now + ACCESS_RETRY);
        self.waits.away_since.get_or_insert(self.now);
        self.path.gave_up |= !self.may_wait();
        true
    }
}
