//! The holds of a run: their times, their state, and their counters. In a hold, a holder keeps back
//! all writes of hosts, as for a snapshot of each replica. `holding.rs` begins, checks and releases
//! holds.

use std::time::Duration;

use nacre_random::Random;
use nacre_reactor::{Nanos, VirtualClock};
use uuid::Uuid;

/// Time before the first hold.
const CALM: Duration = Duration::from_millis(10);

/// Draws the times and the lengths of holds.
pub(crate) struct Holds {
    pub random: Random,
    /// Time of the next hold.
    pub next: Nanos,
}

/// A hold of one holder.
pub(crate) struct Hold {
    pub id: Uuid,
    /// The hold ends by itself after this time.
    pub limit: Duration,
    /// The disks of the replicas that were in sync and attached when the writes were held.
    pub disks: Vec<usize>,
    /// Number of times that the disks were compared.
    pub compared: u64,
    /// The first difference found.
    pub difference: Option<String>,
}

/// The counters of holds in a run.
#[derive(Debug, Clone, Copy, Default)]
pub struct HoldCounts {
    /// Holds that holders were asked for.
    pub wanted: u64,
    /// Times that writes were held.
    pub held: u64,
    /// Holds whose release succeeded, after two comparisons of at least two replicas.
    pub compared: u64,
}

impl std::ops::Add for HoldCounts {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            wanted: self.wanted + other.wanted,
            held: self.held + other.held,
            compared: self.compared + other.compared,
        }
    }
}

impl Holds {
    /// Some runs have holds. Their choice leaves the other runs, among them those that find the
    /// planted faults of `tests/mutations.rs`, as they are without holds.
    pub(crate) fn new(seed: u64, clock: &VirtualClock) -> Option<Self> {
        matches!(seed % 11, 4 | 6).then(|| Self {
            random: Random::new(seed.rotate_left(24)),
            next: clock.now() + CALM,
        })
    }
}
