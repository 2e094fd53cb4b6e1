//! How long I/O waits for a connection, and for access to the namespace (ANA).

use std::time::Duration;

use nacre_nvmf_wire::StatusCode;
use nacre_reactor::Nanos;

use super::{IoQueue, Phase};

/// How long I/O that was refused for lack of access waits, unless the target reports a change.
const ACCESS_RETRY: Duration = Duration::from_millis(200);

/// Since when I/O waits, and for what.
#[derive(Default)]
pub(super) struct Waits {
    /// A live controller does not have the namespace.
    pub missing_since: Option<Nanos>,
    /// There is no connection, or no access.
    pub away_since: Option<Nanos>,
    /// The namespace is inaccessible by this path: send nothing until then, or until that changes.
    pub no_access_until: Option<Nanos>,
}

impl IoQueue {
    /// Something about the namespaces has changed while the queue is connected.
    pub(super) fn look(&mut self, now: Nanos) {
        self.version = self.link.version();
        // Accessible again, perhaps: the next command finds out.
        self.waits.no_access_until = None;
        let found = self.link.namespace(self.nsid);
        if let (Some(known), Some(found)) = (&mut self.namespace, found) {
            match known.difference(&found) {
                None => known.blocks = found.blocks,
                // Not a command more goes there; the next attempt to connect says why.
                Some(_) => {
                    self.disconnect(now);
                    self.fail_all();
                }
            }
        }
    }

    /// Ends I/O that has waited for long enough.
    pub(super) fn check_away(&mut self, now: Nanos) {
        if self.phase == Phase::Live && self.waits.no_access_until.is_some_and(|until| now >= until)
        {
            self.waits.no_access_until = None;
        }
        if self.phase != Phase::Live && self.waits.away_since.is_none() {
            self.waits.away_since = Some(now);
        }
        let Some(limit) = self.options.fast_io_fail else {
            return;
        };
        let over = self
            .waits
            .away_since
            .is_some_and(|since| now.since(since) >= limit);
        if over || self.phase != Phase::Live && self.link.is_away() {
            self.fail_all();
        }
    }

    /// When [`IoQueue::check_away`] will end waiting I/O.
    pub(super) fn away_at(&self) -> Option<Nanos> {
        let (since, limit) = (self.waits.away_since?, self.options.fast_io_fail?);
        (!self.unsent.is_empty()).then(|| since + limit)
    }

    /// Keeps an I/O that the target refused for want of access, if it is to wait.
    #[inline]
    pub(super) fn waits_for_access(&mut self, index: usize, status: StatusCode) -> bool {
        if ![StatusCode::ANA_INACCESSIBLE, StatusCode::ANA_TRANSITION].contains(&status.code()) {
            self.waits.away_since = None;
            return false;
        }
        if !self.options.wait_for_access || !self.may_wait() {
            return false;
        }
        // It was not carried out: as if it had not been sent.
        self.pending[index].refused();
        self.unsent.push_back(index);
        self.sort_unsent();
        self.waits.no_access_until = Some(self.now + ACCESS_RETRY);
        self.waits.away_since.get_or_insert(self.now);
        true
    }

    /// Whether I/O that is refused for want of access is to wait (any longer).
    fn may_wait(&self) -> bool {
        let limit = self.options.fast_io_fail;
        let waited = self.waits.away_since.map(|since| self.now.since(since));
        !matches!((waited, limit), (Some(waited), Some(limit)) if waited >= limit)
    }
}
