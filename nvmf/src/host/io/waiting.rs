//! Limits how long I/O waits for a connection, for the namespace, and for access to it (ANA).

use std::time::Duration;

use nacre_nvmf_wire::StatusCode;
use nacre_reactor::Nanos;

use super::{IoQueue, QueuePhase};
use crate::host::injection::InjectionQueues;

/// Delay before a retry of I/O that failed with an ANA status, unless the target reports a change.
pub(super) const ACCESS_RETRY: Duration = Duration::from_millis(200);

/// The start times of the current waits.
#[derive(Default)]
pub(super) struct Waits {
    /// The time since which a live controller lacks the namespace.
    pub missing_since: Option<Nanos>,
    /// The time since which there is no connection or no access.
    pub away_since: Option<Nanos>,
    /// The namespace is inaccessible on this path. Send no I/O until this time or until a change of
    /// the ANA state.
    pub no_access_until: Option<Nanos>,
}

impl IoQueue {
    /// Handles a change of the namespaces, of their ANA states, or of error injections.
    pub(super) fn namespaces_changed(&mut self, now: Nanos) {
        self.path.version = self.link.version();
        if let Some(queue) = &mut self.queue {
            queue.take_injections(InjectionQueues::Io, &self.link);
        }
        // The namespace may be accessible again: try the next command.
        self.waits.no_access_until = None;
        self.path.gave_up = false;
        let (found, access) = self.link.namespace_with_access(self.nsid);
        self.path.access = access;
        if self.path.fails_over && self.phase == QueuePhase::Live && access.is_accessible() {
            self.waits.away_since = None;
        }
        if let (Some(known), Some(found)) = (&mut self.namespace, found) {
            match known.difference(&found) {
                None => known.blocks = found.blocks,
                // Disconnect: the namespace has another identity. The next attempt reports the
                // difference.
                Some(_) => {
                    self.disconnect(now);
                    self.fail_all();
                }
            }
        }
    }

    /// Fails I/O whose wait has reached its limit.
    pub(super) fn check_away(&mut self, now: Nanos) {
        if self.phase == QueuePhase::Live
            && self.waits.no_access_until.is_some_and(|until| now >= until)
        {
            self.waits.no_access_until = None;
            self.path.gave_up = false;
        }
        if self.phase != QueuePhase::Live && self.waits.away_since.is_none() {
            self.waits.away_since = Some(now);
        }
        let Some(limit) = self.options.fast_io_fail else {
            return;
        };
        // With other paths, a refusal of I/O decides about a live one.
        let waits = self.phase != QueuePhase::Live || !self.path.fails_over;
        let over = waits
            && self
                .waits
                .away_since
                .is_some_and(|since| now.since(since) >= limit);
        if over || self.phase != QueuePhase::Live && self.link.is_away() {
            self.fail_all();
        }
    }

    /// The time at which [`IoQueue::check_away`] will fail waiting I/O.
    pub(super) fn away_at(&self) -> Option<Nanos> {
        let (since, limit) = (self.waits.away_since?, self.options.fast_io_fail?);
        (!self.unsent.is_empty()).then(|| since + limit)
    }

    /// Queues an I/O that failed with an ANA status for a retry. Returns false if it must fail.
    #[inline]
    pub(super) fn waits_for_access(&mut self, index: usize, status: StatusCode) -> bool {
        if ![StatusCode::ANA_INACCESSIBLE, StatusCode::ANA_TRANSITION].contains(&status.code()) {
            self.waits.away_since = None;
            return false;
        }
        if self.path.fails_over || !self.options.wait_for_access || !self.may_wait() {
            return false;
        }
        // The target did not execute it, so it counts as not sent.
        self.pending[index].refused();
        self.unsent.push_back(index);
        self.sort_unsent();
        self.waits.no_access_until = Some(self.now + ACCESS_RETRY);
        self.waits.away_since.get_or_insert(self.now);
        true
    }

    /// True if I/O with an ANA status may wait for access.
    pub(super) fn may_wait(&self) -> bool {
        let limit = self.options.fast_io_fail;
        let waited = self.waits.away_since.map(|since| self.now.since(since));
        !matches!((waited, limit), (Some(waited), Some(limit)) if waited >= limit)
    }
}
