//! The time limits of a controller's commands and steps, and the time until which a core may sleep.

use std::os::fd::BorrowedFd;
use std::time::Duration;

use nacre_reactor::{Idle, Nanos};

use super::{ControllerState, EVENT, HostController, KEEP_ALIVE, OWN, moving};
use crate::host::error::HostError;
use crate::host::paths::Paths;

/// Interval at which outstanding commands are checked against their time limits.
const TIMEOUT_CHECK: Duration = Duration::from_millis(100);

impl HostController {
    /// Fails if the connection attempt, the keep-alive command or an admin command is over its
    /// limit.
    pub(super) fn check_time(&mut self, now: Nanos) -> Result<(), HostError> {
        let late = |step, limit| Err(HostError::TimedOut { step, limit });
        let limit = self.options.connect_timeout;
        if !self.is_live() && now.since(self.started) > limit {
            return late(self.step.name(), limit);
        }
        if now < self.check_at {
            return Ok(());
        }
        self.check_at = now + TIMEOUT_CHECK;
        let Some(queue) = &self.queue else {
            return Ok(());
        };
        let over = |since: Option<Nanos>, limit| since.is_some_and(|s| now.since(s) > limit);
        // A target that does not answer within the keep-alive timeout counts as dead, even if the
        // network still acknowledges packets.
        let limit = self.options.keep_alive;
        if over(queue.oldest_of(|token| token == KEEP_ALIVE), limit) {
            return late("keep alive", limit);
        }
        let limit = self.options.admin_timeout;
        let leaving = self.step.is_shutting_down() && now.since(self.started) > limit;
        if leaving || over(queue.oldest_of(|token| token == OWN), limit) {
            return late(self.step.name(), limit);
        }
        if over(queue.oldest_of(|token| token < EVENT), limit) {
            return late("admin command", limit);
        }
        Ok(())
    }

    /// Marks the controller as away once there has been no association for `fast_io_fail`. The I/O
    /// queues then fail waiting and new I/O.
    pub(super) fn check_away(&self, now: Nanos) {
        if self.away_at().is_some_and(|at| now >= at) {
            self.link.set_away(true);
        }
    }

    /// When [`Self::check_away`] will set the mark; `None` if it is set or not needed.
    fn away_at(&self) -> Option<Nanos> {
        let (since, limit) = (self.lost_since?, self.options.fast_io_fail?);
        (!self.is_live() && !self.link.is_away()).then(|| since + limit)
    }

    /// See [`nacre_reactor::Poller::arm`].
    pub fn arm(&mut self, now: Nanos) -> Idle {
        let idle = self.arm_connection(now);
        match self.away_at() {
            Some(at) => idle.and(Idle::Until(at)),
            None => idle,
        }
    }

    fn arm_connection(&mut self, now: Nanos) -> Idle {
        let queue = match (&self.state, &mut self.queue) {
            (ControllerState::Failed(_) | ControllerState::Closed, _) => return Idle::Quiet,
            (ControllerState::Waiting { until, .. }, _) => return Idle::Until(*until),
            (_, None) => return Idle::Busy,
            (_, Some(queue)) => queue,
        };
        if !self.step_sent && self.step.has_command() {
            return match self.step_at {
                // The step waits for a buffer or for a free entry.
                at if at <= now => Idle::Busy,
                at => Idle::Until(at),
            };
        }
        if self.user.is_waiting() && queue.room() > 2 && !self.link.is_moving() {
            return Idle::Busy;
        }
        let waits = queue.oldest_of(|token| token != EVENT).is_some();
        let mut idle = queue.arm(now);
        if waits || !self.is_live() {
            idle = idle.and(Idle::Until(self.check_at.max(now + TIMEOUT_CHECK)));
        }
        let period = self.options.keep_alive / 2;
        if self.is_live() && !period.is_zero() && !self.keep_alive.is_sent() {
            idle = idle.and(Idle::Until(self.keep_alive.due_at(period)));
        }
        match (&self.better, self.paths.as_ref().and_then(Paths::probe_at)) {
            (Some(_), _) => idle.and(Idle::Until(now + moving::LOOK)),
            (None, Some(at)) => idle.and(Idle::Until(at)),
            (None, None) => idle,
        }
    }

    /// The transport's descriptor, to wait on; changes with every connection.
    pub fn wake_fd(&mut self) -> Option<BorrowedFd<'_>> {
        self.queue.as_mut().and_then(|q| q.transport().wake_fd())
    }
}
