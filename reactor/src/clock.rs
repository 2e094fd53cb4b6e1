//! The monotonic clock of reactors, in nanoseconds since its first use in the process. A reactor
//! reads it once per turn.

use std::ops::{Add, Sub};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// A time of the monotonic clock, in nanoseconds since the clock's epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Nanos(pub u64);

impl Nanos {
    pub const ZERO: Self = Self(0);
    pub const MAX: Self = Self(u64::MAX);

    /// The time from `earlier` to this time; zero if `earlier` is later.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Nanos {
    type Output = Self;

    fn add(self, by: Duration) -> Self {
        Self(
            self.0
                .saturating_add(u64::try_from(by.as_nanos()).unwrap_or(u64::MAX)),
        )
    }
}

impl Sub<Duration> for Nanos {
    type Output = Self;

    fn sub(self, by: Duration) -> Self {
        Self(
            self.0
                .saturating_sub(u64::try_from(by.as_nanos()).unwrap_or(u64::MAX)),
        )
    }
}

/// The source of [`Nanos`]: `CLOCK_MONOTONIC`, or a [`VirtualClock`] that a test advances.
///
/// A reactor reads it once per turn; code on a reactor is given `now` and does not read it.
#[derive(Debug, Clone)]
pub struct Clock(Source);

#[derive(Debug, Clone)]
enum Source {
    Monotonic { epoch_ns: u64 },
    Virtual(Arc<AtomicU64>),
}

impl Clock {
    /// The real clock. All real clocks of a process share one epoch: the first call of this
    /// function.
    pub fn real() -> Self {
        static EPOCH_NS: OnceLock<u64> = OnceLock::new();
        Self(Source::Monotonic {
            epoch_ns: *EPOCH_NS.get_or_init(monotonic_ns),
        })
    }

    /// The present time. Reading the real clock takes about 20 ns (vDSO, no system call).
    pub fn now(&self) -> Nanos {
        match &self.0 {
            Source::Monotonic { epoch_ns } => Nanos(monotonic_ns().saturating_sub(*epoch_ns)),
            Source::Virtual(ns) => Nanos(ns.load(Ordering::Acquire)),
        }
    }

    pub fn is_virtual(&self) -> bool {
        matches!(self.0, Source::Virtual(_))
    }
}

/// A clock for tests, which changes only by [`VirtualClock::advance`] and [`VirtualClock::set`].
/// Clones are the same clock.
#[derive(Debug, Clone, Default)]
pub struct VirtualClock(Arc<AtomicU64>);

impl VirtualClock {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn clock(&self) -> Clock {
        Clock(Source::Virtual(Arc::clone(&self.0)))
    }

    pub fn now(&self) -> Nanos {
        Nanos(self.0.load(Ordering::Acquire))
    }

    pub fn advance(&self, by: Duration) {
        self.set(self.now() + by);
    }

    /// Sets the clock to `now`. Does nothing if the clock is later.
    pub fn set(&self, now: Nanos) {
        self.0.fetch_max(now.0, Ordering::AcqRel);
    }
}

fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}
