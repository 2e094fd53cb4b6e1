//! Brings an I/O queue from the transport connection to the live state: Connect, and
//! authentication.

use nacre_nvmf_wire::Cqe;
use nacre_nvmf_wire::fabrics::ConnectResponse;
use nacre_reactor::Nanos;

use super::attempts::Attempts;
use super::{CONNECT, IoQueue, QueuePhase, TIMEOUT_CHECK};
use crate::host::error::HostError;
use crate::host::injection::InjectionQueues;
use crate::host::step::connect;

impl IoQueue {
    pub(super) fn send_connect(&mut self, now: Nanos) {
        let link = self.link.state();
        let entries = link.queue_entries.min(self.options.queue_entries);
        let command = connect(&self.options, &self.pool, self.qid, entries, link.cntlid);
        let (Some((sqe, data)), Some(queue)) = (command, &mut self.queue) else {
            return;
        };
        queue.submit(sqe, Some(data), None, CONNECT, now);
        self.phase = QueuePhase::Connecting { since: now };
    }

    pub(super) fn connected(&mut self, cqe: &Cqe, now: Nanos) {
        let status = cqe.status();
        if !status.is_success() {
            let status = status.of_fabrics();
            tracing::warn!(qid = self.qid, %status, "an I/O queue was refused");
            self.disconnect(now);
            return self.not_connected(status.to_string(), true);
        }
        let required = ConnectResponse::from_cqe(cqe).auth;
        let Some(queue) = &mut self.queue else { return };
        match queue.begin_authentication(&self.options, required, self.qid) {
            Ok(false) => self.live(now),
            Ok(true) => self.phase = QueuePhase::Authenticating { since: now },
            Err(error) => self.not_authenticated(&error, now),
        }
    }

    /// Drives the authentication.
    pub(super) fn authenticate(&mut self, now: Nanos) {
        let Some(queue) = &mut self.queue else { return };
        match queue.authenticate(&self.pool, now) {
            None => {}
            Some(Ok(_)) => self.live(now),
            Some(Err(error)) => self.not_authenticated(&error, now),
        }
    }

    fn not_authenticated(&mut self, error: &HostError, now: Nanos) {
        tracing::warn!(qid = self.qid, %error, "an I/O queue was refused");
        self.disconnect(now);
        self.not_connected(error.to_string(), error.is_final());
    }

    fn live(&mut self, now: Nanos) {
        self.phase = QueuePhase::Live;
        if let Some(queue) = &mut self.queue {
            queue.take_injections(InjectionQueues::Io, &self.link);
        }
        self.attempts = Attempts::default();
        self.waits.away_since = None;
        self.waits.no_access_until = None;
        self.path.gave_up = false;
        self.stats.connections += 1;
        self.check_at = now + TIMEOUT_CHECK;
    }
}
