//! The due times of a lane's periodic work: the check for late children and expired hold times, and
//! the poll of replicas without I/O in flight.

use std::time::Duration;

use nacre_reactor::Nanos;

use crate::view::View;

/// Upkeeps per deadline.
const AGES: u8 = 8;
/// Interval between checks of replicas without I/O in flight.
const IDLE_POLL: Duration = Duration::from_millis(10);

pub(super) struct Schedule {
    /// Time of the next check of children's ages and hold times.
    upkeep_at: Nanos,
    pace: Duration,
    /// Time of the next check of replicas without I/O in flight.
    idle_poll_at: Nanos,
}

impl Schedule {
    /// All work is due immediately. The interval is set by the first view: see [`Schedule::adopt`].
    pub(super) fn new() -> Self {
        Self {
            upkeep_at: Nanos::ZERO,
            pace: Duration::from_secs(1),
            idle_poll_at: Nanos::ZERO,
        }
    }

    /// Adopts the deadline of a view.
    pub(super) fn adopt(&mut self, view: &View, now: Nanos) {
        let least = view.deadline.min(view.frozen_hold);
        let pace = least / u32::from(AGES);
        self.pace = pace.clamp(Duration::from_millis(1), Duration::from_secs(1));
        self.upkeep_at = self.upkeep_at.min(now + self.pace);
    }

    pub(super) fn upkeep_at(&self) -> Nanos {
        self.upkeep_at
    }

    pub(super) fn upkeep_begins(&mut self, now: Nanos) {
        self.upkeep_at = now + self.pace;
    }

    /// The age in upkeeps above which a child is late.
    pub(super) fn deadline_ages(&self, view: &View) -> u8 {
        let ages = view.deadline.as_nanos().div_ceil(self.pace.as_nanos());
        ages.min(u128::from(u8::MAX - 1)) as u8
    }

    #[inline]
    pub(super) fn idle_poll_at(&self) -> Nanos {
        self.idle_poll_at
    }

    pub(super) fn idle_poll_begins(&mut self, now: Nanos) {
        self.idle_poll_at = now + IDLE_POLL;
    }
}
