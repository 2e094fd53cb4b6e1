//! Computes how long an idle adaptive reactor polls before it sleeps.

use std::time::Duration;

use crate::clock::Nanos;

/// A yield of this length means that another busy thread used the core for a scheduler slice. The
/// kernel workers for which a reactor yields finish sooner.
const SLICE: Duration = Duration::from_millis(1);
/// Time lost by such yields after which the core counts as shared: a few scheduler slices. A
/// hypervisor that takes the core occasionally stays below this value.
const MOST_LOST: Duration = Duration::from_millis(10);
/// Lost time decays by the elapsed time divided by this number.
const FORGOTTEN: u32 = 8;
/// Time for which the core then counts as shared. Afterwards the reactor has to lose [`MOST_LOST`]
/// again.
const SHARED_FOR: Duration = Duration::from_secs(1);

/// Maximum patience as a multiple of the minimum, which `busy_poll_us` sets.
const MOST: u32 = 8;

/// How long an idle reactor polls before it sleeps: between the configured minimum and [`MOST`]
/// times that.
///
/// Sleeping and waking cost more than polling a little longer would have. So patience doubles when
/// work arrived within the time that the maximum patience would have waited, and drops to the
/// minimum when it did not. A reactor then polls through the round trips of a host with one
/// outstanding command, and a reactor without load soon sleeps.
///
/// A reactor that shares its core with another busy thread sleeps instead of yielding. Each yield
/// costs a slice of several milliseconds, and work that arrives meanwhile waits that long. The
/// scheduler prefers a thread that wakes up to one that runs, but not a thread that was ready all
/// the time. Two reactors of one process may wait for each other, with a load on one of their
/// cores. With yields, they would reach only 250 round trips a second. Several long yields within a
/// short time show such a core, whether or not short ones lie between them. A single long yield
/// does not: in a virtual machine it can mean that the hypervisor ran something else. Sleeping then
/// would only cost time.
#[derive(Debug)]
pub(crate) struct Patience {
    times: u32,
    yielded_at: Option<Nanos>,
    /// Time lost by long yields, at the time `lost_at`.
    lost: Duration,
    lost_at: Nanos,
    shared_until: Nanos,
}

impl Patience {
    pub(crate) fn new() -> Self {
        Self {
            times: 1,
            yielded_at: None,
            lost: Duration::ZERO,
            lost_at: Nanos::ZERO,
            shared_until: Nanos::ZERO,
        }
    }

    /// Call this when the reactor yields its core.
    pub(crate) fn yields(&mut self, now: Nanos) {
        self.yielded_at = Some(now);
    }

    /// Call this in every turn. Returns true if another thread used the core during the last yield.
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

    /// Adds a yield that took as long as a slice of another thread.
    #[cold]
    fn lost(&mut self, now: Nanos, took: Duration) {
        let forgotten = now.since(self.lost_at) / FORGOTTEN;
        self.lost = self.lost.saturating_sub(forgotten) + took;
        self.lost_at = now;
        if self.lost >= MOST_LOST {
            self.shared_until = now + SHARED_FOR;
        }
    }

    /// True while another busy thread shares the core: the reactor should sleep instead of polling.
    pub(crate) fn shares_core(&self, now: Nanos) -> bool {
        now < self.shared_until
    }

    /// The patience, for a configured minimum of `least`.
    pub(crate) fn with_least(&self, least: Duration) -> Duration {
        least.saturating_mul(self.times)
    }

    /// Adjusts the patience after a sleep; `idle` is the time since work was last found. `woken` is
    /// true when a wake source ended the sleep, and false for a deadline, which does not raise the
    /// patience.
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

    /// Goal: patience grows to its maximum only with work that the maximum would have waited for.
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

    /// A yield of `took`, beginning `pause` after the last one ended. Returns whether another
    /// thread used the core, and whether the core counts as shared.
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

    /// Goal: several long yields within a short time make the core count as shared for a while,
    /// also with short yields between them.
    #[test]
    fn a_core_that_another_thread_takes_is_shared() {
        let (mut patience, mut now) = (Patience::new(), Nanos(9_000_000_000));
        assert!(!patience.runs(now), "no yield happened yet");
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
        // A long turn is not a yield.
        now = now + Duration::from_millis(500);
        assert!(!patience.runs(now));
        assert!(patience.shares_core(now));
        now = now + Duration::from_millis(500);
        assert!(!patience.shares_core(now));
    }

    /// Goal: a core with rare long yields does not count as shared.
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
