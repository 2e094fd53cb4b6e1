//! The times of a lane's periodic work.

use std::time::Duration;

use nacre_reactor::Nanos;

use crate::view::View;

/// Upkeeps per deadline.
const AGES: u8 = 8;
/// Interval between checks of replicas without I/O in flight.
const ATTEND: Duration = Duration::from_millis(10);

pub(super) struct Schedule {
    /// Time of the next check of children's ages and hold times.
    upkeep_at: Nanos,
    pace: Duration,
    /// Time of the next check of replicas without I/O in flight.
    attend_at: Nanos,
}

impl Schedule {
    /// Everything is due. The pace follows from the first view: see [`Schedule::adopt`].
    pub fn new() -> Schedule {
        Schedule {
            upkeep_at: Nanos::ZERO,
            pace: Duration::from_secs(1),
            attend_at: Nanos::ZERO,
        }
    }

    /// Takes over the deadlines of a view.
    pub fn adopt(&mut self, view: &View, now: Nanos) {
        let least = view.deadline.min(view.frozen_hold);
        let pace = least / u32::from(AGES);
        self.pace = pace.clamp(Duration::from_millis(1), Duration::from_secs(1));
        self.upkeep_at = self.upkeep_at.min(now + self.pace);
    }

    pub fn upkeep_at(&self) -> Nanos {
        self.upkeep_at
    }

    pub fn upkeep_begins(&mut self, now: Nanos) {
        self.upkeep_at = now + self.pace;
    }

    /// The age in upkeeps above which a child is late.
    pub fn deadline_ages(&self, view: &View) -> u8 {
        let ages = view.deadline.as_nanos().div_ceil(self.pace.as_nanos());
        ages.min(u128::from(u8::MAX - 1)) as u8
    }

    #[inline]
    pub fn attend_at(&self) -> Nanos {
        self.attend_at
    }

    pub fn attend_begins(&mut self, now: Nanos) {
        self.attend_at = now + ATTEND;
    }
}
