//! From the connection to the live queue: Connect and authentication.

use nacre_nvmf_wire::Cqe;
use nacre_nvmf_wire::fabrics::ConnectResponse;
use nacre_reactor::Nanos;

use super::attempts::Attempts;
use super::{CONNECT, IoQueue, Phase, TIMEOUT_CHECK};
use crate::host::authentication;
use crate::host::options::HostError;
use crate::host::queue::Finished;
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
        self.phase = Phase::Connecting { since: now };
    }

    /// The Connect came back, or a command of the transaction.
    pub(super) fn own_finished(&mut self, one: &Finished, now: Nanos) {
        let Some(transaction) = &mut self.transaction else {
            return self.connected(&one.cqe, now);
        };
        match transaction.finished(one) {
            Ok(()) => self.authenticate(now),
            Err(error) => self.not_authenticated(&error, now),
        }
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
        match authentication::after_connect(&self.options, required, self.qid) {
            Ok(None) => self.live(now),
            Ok(Some(transaction)) => {
                self.transaction = Some(Box::new(transaction));
                self.phase = Phase::Authenticating { since: now };
                self.authenticate(now);
            }
            Err(error) => self.not_authenticated(&error, now),
        }
    }

    /// Goes on with the transaction.
    pub(super) fn authenticate(&mut self, now: Nanos) {
        let (Some(transaction), Some(queue)) = (&mut self.transaction, &mut self.queue) else {
            return;
        };
        match transaction.drive(queue, &self.pool, CONNECT, now) {
            None => {}
            Some(Ok(())) => {
                self.transaction = None;
                self.live(now);
            }
            Some(Err(error)) => self.not_authenticated(&error, now),
        }
    }

    pub(super) fn not_authenticated(&mut self, error: &HostError, now: Nanos) {
        tracing::warn!(qid = self.qid, %error, "an I/O queue was refused");
        self.disconnect(now);
        self.not_connected(error.to_string(), error.is_final());
    }

    pub(super) fn live(&mut self, now: Nanos) {
        self.phase = Phase::Live;
        self.attempts = Attempts::default();
        self.waits.away_since = None;
        self.waits.no_access_until = None;
        self.stats.connections += 1;
        self.check_at = now + TIMEOUT_CHECK;
    }
}
