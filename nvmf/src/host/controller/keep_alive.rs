//! Keep Alive (Base 3.9): when the next command is due, and when the controller last answered one.

use std::time::Duration;

use nacre_reactor::Nanos;

pub(super) struct KeepAliveClock {
    /// Last start of the controller's timer: when it was enabled, or received a Keep Alive. Other
    /// commands do not count, because only some controllers restart the timer for them.
    timer_from: Nanos,
    /// A Keep Alive is in flight.
    is_sent: bool,
    sent_at: Nanos,
    /// The submission time of the latest completed Keep Alive: the target was alive then.
    answered: Nanos,
}

impl KeepAliveClock {
    pub(super) fn new(now: Nanos) -> Self {
        Self {
            timer_from: now,
            is_sent: false,
            sent_at: Nanos::ZERO,
            answered: Nanos::ZERO,
        }
    }

    /// Records that the controller is being enabled, which starts its timer.
    pub(super) fn controller_enabled(&mut self, now: Nanos) {
        self.timer_from = now;
    }

    pub(super) fn is_sent(&self) -> bool {
        self.is_sent
    }

    pub(super) fn is_due(&self, period: Duration, now: Nanos) -> bool {
        !period.is_zero() && now.since(self.timer_from) >= period
    }

    pub(super) fn due_at(&self, period: Duration) -> Nanos {
        self.timer_from + period
    }

    pub(super) fn sent(&mut self, now: Nanos) {
        self.is_sent = true;
        self.timer_from = now;
        self.sent_at = now;
    }

    pub(super) fn completed(&mut self) {
        self.is_sent = false;
        self.answered = self.sent_at;
    }

    pub(super) fn connection_lost(&mut self) {
        self.is_sent = false;
    }

    /// True if a Keep Alive that was sent at `since` or later has completed.
    pub(super) fn is_answered_since(&self, since: Nanos) -> bool {
        self.answered >= since
    }
}
