//! Times of `CLOCK_BOOTTIME`, and the durations that follow from the duration of a lease.

use std::ops::Add;
use std::time::Duration;

/// Nanoseconds of this machine's `CLOCK_BOOTTIME`. Times of two machines are not comparable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct BootTime(pub u64);

impl BootTime {
    /// The time from `earlier` to this time; zero if `earlier` is later.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for BootTime {
    type Output = Self;

    fn add(self, by: Duration) -> Self {
        let nanos = u64::try_from(by.as_nanos()).unwrap_or(u64::MAX);
        Self(self.0.saturating_add(nanos))
    }
}

/// The duration of a lease, and all durations derived from it.
///
/// Each clock's rate may be wrong by 2.5 %. A lease of duration L, 1 to 30 s, is valid for 0.95 L
/// on its node. An observer waits for L: 0.95 L · 1.025 < L · 0.975.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    lease: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("lease of {lease:?}: choose 1 to 30 seconds")]
pub struct InvalidLease {
    pub lease: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            lease: Duration::from_secs(2),
        }
    }
}

impl Timing {
    pub fn new(lease: Duration) -> Result<Self, InvalidLease> {
        if (Duration::from_secs(1)..=Duration::from_secs(30)).contains(&lease) {
            Ok(Self { lease })
        } else {
            Err(InvalidLease { lease })
        }
    }

    /// L: how long an observer waits after a node's last renewal before it fences the node.
    pub fn lease(self) -> Duration {
        self.lease
    }

    /// 0.95 L: how long a node's lease is good, counted from the time when the node sent the
    /// renewal.
    pub fn validity(self) -> Duration {
        self.lease / 20 * 19
    }

    /// L / 5: the interval between two renewals.
    pub fn renewal(self) -> Duration {
        self.lease / 5
    }

    /// 0.6 L: if two successive answers to a node's renewals are further apart, the store counts as
    /// away in between. After a shorter absence, every node renews its lease before a fence of it
    /// is due.
    pub fn gap(self) -> Duration {
        self.renewal() * 3
    }

    /// 0.8 L: if the last answer to a node's renewal is older, the store may be away now, and the
    /// node fences no other. The last renewal of another node is at most one interval older than
    /// that answer, so no fence is due before.
    pub fn doubt(self) -> Duration {
        self.renewal() * 4
    }

    /// 2 L: how long a node that does not observe another one waits before it fences that node. The
    /// wait begins with the second of two readings that show the same renewal.
    pub fn silence_of_observers(self) -> Duration {
        self.lease * 2
    }
}
