//! How long an idle adaptive reactor polls before sleeping.

use std::time::Duration;

/// Of the least patience, which is what `busy_poll_us` says.
const MOST: u32 = 8;

/// Between the configured minimum and [`MOST`] times that.
///
/// Sleeping and waking cost more than polling a little longer would have. So patience doubles when
/// work arrived within the time that the maximum patience would have waited, and drops to the
/// minimum when it did not. A reactor then polls through the round trips of a host with one
/// outstanding command, and a reactor without load soon sleeps.
#[derive(Debug)]
pub(crate) struct Patience {
    times: u32,
}

impl Patience {
    pub(crate) fn new() -> Patience {
        Patience { times: 1 }
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

    /// Goal: a reactor configured not to poll does not poll, however soon work arrives.
    #[test]
    fn none_stays_none() {
        let mut patience = Patience::new();
        patience.slept(Duration::ZERO, Duration::ZERO, true);
        assert_eq!(patience.with_least(Duration::ZERO), Duration::ZERO);
    }
}
