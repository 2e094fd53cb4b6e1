//! How long an idle adaptive reactor polls before sleeping.

use std::time::Duration;

use crate::clock::Nanos;

/// A yield that takes this long gave the core to another busy thread, for a slice of the
/// scheduler's. The kernel's workers, for which a reactor yields, are done sooner.
const SLICE: Duration = Duration::from_millis(1);
/// How much time a reactor may lose by such yields before it takes its core for shared: a few of
/// the scheduler's slices. A hypervisor that takes the core once in a while stays below.
const MOST_LOST: Duration = Duration::from_millis(10);
/// The time that a reactor has lost is forgotten at this fraction of the time that passes.
const FORGOTTEN: u32 = 8;
/// How long a reactor takes its core for shared. It then loses [`MOST_LOST`] again to find out.
const SHARED_FOR: Duration = Duration::from_secs(1);

/// Largest patience as a multiple of the least patience, which `busy_poll_us` sets.
const MOST: u32 = 8;

/// How long an idle reactor polls before it sleeps: from the configured minimum to [`MOST`] times
/// that.
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
/// come to 250 round trips a second. Several long yields within a short time show such a core, with
/// short ones between them or not. One alone does not: in a virtual machine some yields are long
/// because the hypervisor runs something else. To sleep then would cost time for nothing.
#[derive(Debug)]
pub(crate) struct Patience {
    times: u32,
    yielded_at: Option<Nanos>,
    /// Time lost by long yields, as of `lost_at`.
    lost: Duration,
    lost_at: Nanos,
    shared_until: Nanos,
}

impl Patience {
    pub(crate) fn new() -> Patience {
        Patience {
            times: 1,
            yielded_at: None,
            lost: Duration::ZERO,
            lost_at: Nanos::ZERO,
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
        let Some(since) = self.yielded_at.take() else {
            return false;
        };
        let took = now.since(since);
        if took >= SLICE {
            self.lost(now, took);
        }
        took >= SLICE
    }

    /// A yield took as long as another thread's slice.
    #[cold]
    fn lost(&mut self, now: Nanos, took: Duration) {
        let forgotten = now.since(self.lost_at) / FORGOTTEN;
        self.lost = self.lost.saturating_sub(forgotten) + took;
        self.lost_at = now;
        if self.lost >= MOST_LOST {
            self.shared_until = now + SHARED_FOR;
        }
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
    fn grows_when_work_arrives_soon() {
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

    /// A yield of `took` that begins `pause` after the last one ended. Returns whether another
    /// thread took the core, and whether the core is shared.
    fn yields(
        patience: &mut Patience,
        now: &mut Nanos,
        pause: Duration,
        took: Duration,
    ) -> (bool, bool) {
        *now = *now + pause;
        patience.yields(*now);
        *now = *now + took;
        (patience.runs(*now), patience.shares_core(*now))
    }

    const SLICE_OF_4: Duration = Duration::from_millis(4);

    /// Goal: several long yields within a short time mean a shared core for a while, with short
    /// ones between them too.
    #[test]
    fn a_core_that_another_thread_takes_is_shared() {
        let (mut patience, mut now) = (Patience::new(), Nanos(9_000_000_000));
        assert!(!patience.runs(now), "it never yielded");
        let mut after = |micros, took| {
            let pause = Duration::from_micros(micros);
            yields(&mut patience, &mut now, pause, took)
        };
        let short = Duration::from_micros(999);
        assert_eq!(after(20, short), (false, false));
        assert_eq!(after(20, SLICE_OF_4), (true, false));
        assert_eq!(after(20, short), (false, false));
        assert_eq!(after(20, SLICE_OF_4), (true, false));
        assert_eq!(after(20, short), (false, false));
        assert_eq!(after(20, SLICE_OF_4), (true, true));
        // Work for longer than a slice is no yield.
        now = now + Duration::from_millis(500);
        assert!(!patience.runs(now));
        assert!(patience.shares_core(now));
        now = now + Duration::from_millis(500);
        assert!(!patience.shares_core(now));
    }

    /// Goal: a core that something else takes now and then is the reactor's own.
    #[test]
    fn rare_long_yields_are_forgotten() {
        let (mut patience, mut now) = (Patience::new(), Nanos(9_000_000_000));
        let pause = Duration::from_millis(100);
        for _ in 0..100 {
            let taken = yields(&mut patience, &mut now, pause, SLICE_OF_4);
            assert_eq!(taken, (true, false));
        }
    }

    /// Goal: a reactor configured not to poll does not poll, however soon work arrives.
    #[test]
    fn zero_patience_stays_zero() {
        let mut patience = Patience::new();
        patience.slept(Duration::ZERO, Duration::ZERO, true);
        assert_eq!(patience.with_least(Duration::ZERO), Duration::ZERO);
    }
}
