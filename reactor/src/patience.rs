//! How long an idle adaptive reactor polls before sleeping.

use std::time::Duration;

use crate::clock::Nanos;

/// A yield that takes this long gave the core to another busy thread, for a slice of the
/// scheduler's. The kernel's workers, for which a reactor yields, are done sooner.
const SLICE: Duration = Duration::from_millis(1);
/// How long a reactor then takes its core for shared.
const SHARED_FOR: Duration = Duration::from_secs(1);

/// Of the least patience, which is what `busy_poll_us` says.
const MOST: u32 = 8;

/// Between the configured minimum and [`MOST`] times that.
///
/// Sleeping and waking cost more than polling a little longer would have. So patience doubles when
/// work arrived within the time that the maximum patience would have waited, and drops to the
/// minimum when it did not. A reactor then polls through the round trips of a host with one
/// outstanding command, and a reactor without load soon sleeps.
///
/// A reactor that shares its core with another busy thread has no patience. Each yield costs it a
/// slice, several milliseconds, and work that arrives meanwhile waits that long: the scheduler
/// prefers a thread that wakes up to one that runs, but not a thread that was ready all the time.
/// Two reactors of one process that wait for each other, and a load on one of their cores, would
/// come to 250 round trips a second.
#[derive(Debug)]
pub(crate) struct Patience {
    times: u32,
    yielded_at: Option<Nanos>,
    shared_until: Nanos,
}

impl Patience {
    pub(crate) fn new() -> Patience {
        Patience {
            times: 1,
            yielded_at: None,
            shared_until: Nanos::ZERO,
        }
    }

    /// The reactor yields its core now.
    pub(crate) fn yields(&mut self, now: Nanos) {
        self.yielded_at = Some(now);
    }

    /// The reactor runs. To be called in every turn. True if another thread took the core at the
    /// last yield.
    #[inline]
    pub(crate) fn runs(&mut self, now: Nanos) -> bool {
        let taken = (self.yielded_at.take()).is_some_and(|since| now.since(since) >= SLICE);
        if taken {
            self.shared_until = now + SHARED_FOR;
        }
        taken
    }

    /// True while the core belongs to another busy thread as well: sleep instead of polling on.
    pub(crate) fn shares_core(&self, now: Nanos) -> bool {
        now < self.shared_until
    }

    pub(crate) fn with_least(&self, least: Duration) -> Duration {
        least.saturating_mul(self.times)
    }

    /// Adjusts the patience after a sleep; `idle` is the time since work was last found. `woken`:
    /// by a wake source, not by a deadline, which is no reason to stay awake.
    pub(crate) fn slept(&mut self, least: Duration, idle: Duration, woken: bool) {
        if idle > least.saturating_mul(MOST) {
            self.times = 1;
        } else if woken {
            self.times = (self.times * 2).min(MOST);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEAST: Duration = Duration::from_micros(100);
    const SHORT: Duration = Duration::from_micros(800);
    const LONG: Duration = Duration::from_micros(801);

    /// Goal: patience grows to its bound with work that it would have waited for, and no other.
    #[test]
    fn grows_with_work_that_comes_soon() {
        let mut patience = Patience::new();
        let mut after = |idle, woken| {
            patience.slept(LEAST, idle, woken);
            patience.with_least(LEAST).as_micros()
        };
        assert_eq!(after(LONG, true), 100);
        assert_eq!(after(SHORT, false), 100);
        assert_eq!(after(SHORT, true), 200);
        assert_eq!(after(SHORT, false), 200);
        assert_eq!(after(SHORT, true), 400);
        assert_eq!(after(SHORT, true), 800);
        assert_eq!(after(SHORT, true), 800);
        assert_eq!(after(LONG, false), 100);
    }

    /// Goal: a long yield means a shared core for a while, a short one does not.
    #[test]
    fn a_core_that_another_thread_takes_is_shared() {
        let at = |micros: u64| Nanos(micros * 1000);
        let mut patience = Patience::new();
        assert!(!patience.runs(at(9_000)), "it never yielded");
        patience.yields(at(10_000));
        assert!(!patience.runs(at(10_999)));
        assert!(!patience.shares_core(at(10_999)));
        patience.yields(at(11_000));
        assert!(patience.runs(at(12_000)));
        assert!(patience.shares_core(at(12_000)));
        // Work for longer than a slice is no yield.
        assert!(!patience.runs(at(20_000)));
        assert!(patience.shares_core(at(1_011_999)));
        assert!(!patience.shares_core(at(1_012_000)));
    }

    /// Goal: a reactor configured not to poll does not poll, however soon work arrives.
    #[test]
    fn none_stays_none() {
        let mut patience = Patience::new();
        patience.slept(Duration::ZERO, Duration::ZERO, true);
        assert_eq!(patience.with_least(Duration::ZERO), Duration::ZERO);
    }
}
