//! The end of an association: cleans up, and schedules the next attempt or fails the controller.

use nacre_reactor::Nanos;

use super::{ControllerState, EVENT, HostController};
use crate::host::error::HostError;

impl HostController {
    /// Handles a lost connection: drops it, and waits for the next attempt or fails the controller.
    pub(super) fn lost(&mut self, error: HostError, now: Nanos) {
        if self.step.is_shutting_down() {
            return self.finish(ControllerState::Closed, error);
        }
        self.drop_connection(&error);
        let since = *self.lost_since.get_or_insert(now);
        let limit = self.options.loss_timeout;
        // A requested reset reconnects even with `loss_timeout` zero.
        let asked = error == HostError::Reset;
        let over = !asked && limit.is_some_and(|limit| now.since(since) >= limit);
        let for_good = error.is_final();
        let delay = match &mut self.paths {
            Some(paths) => paths.failed(&error.to_string(), for_good, now),
            None => {
                let delay =
                    self.options.reconnect_delay * 2u32.saturating_pow(self.attempts.min(16));
                (!for_good).then(|| delay.min(self.options.reconnect_delay_max))
            }
        };
        let Some(delay) = delay.filter(|_| !over) else {
            tracing::warn!(subsystem = %self.options.subnqn, %error, "giving up");
            return self.finish(ControllerState::Failed(error.clone()), error);
        };
        let mut until = now + delay;
        if let Some(limit) = limit {
            // Make the last attempt exactly at the time limit.
            until = until.min(since + limit);
        }
        self.attempts += 1;
        let attempt = self.attempts;
        let delay = until.since(now);
        tracing::warn!(subsystem = %self.options.subnqn, %error, attempt, ?delay, "reconnecting");
        self.state = ControllerState::Waiting {
            attempt,
            until,
            error,
        };
    }

    pub(super) fn drop_connection(&mut self, error: &HostError) {
        // Count the loss before the next association can complete an I/O.
        if self.link.generation().is_some() || std::mem::take(&mut self.in_transit) {
            self.link.count_loss();
        }
        self.link.set_up(false);
        self.better = None;
        self.options.lost(error);
        if let Some(queue) = self.queue.take() {
            for ticket in queue.tokens().filter(|t| *t < EVENT) {
                self.user.answer(ticket, Err(error.clone()));
            }
        }
        self.events.connection_lost();
        self.keep_alive.connection_lost();
        self.scan.access_only = false;
        self.scan.forget_namespaces();
    }

    pub(super) fn finish(&mut self, state: ControllerState, error: HostError) {
        self.drop_connection(&error);
        self.user.fail_waiting(&error);
        self.link.fail();
        self.state = state;
    }
}
