//! Fault injection of the replication simulator: which kinds of faults a run has, how often they
//! occur, and how the record store fails its callers. `inject.rs` applies the faults.

use std::sync::Arc;
use std::time::Duration;

use nacre_bdev_replica::store::{Call, Outcome, Plan, StoreRequest};
use nacre_random::Random;
use nacre_reactor::Nanos;

use crate::holds::Holds;
use crate::leases::LeaseBook;

/// The faults of a run, and the times of the next ones.
pub(crate) struct Faults {
    pub profile: Profile,
    pub(crate) next: Nanos,
    /// True if a shortage affects only buffers, not the opening of queues.
    pub(crate) buffers_only: bool,
    /// Draws the times at which a disk is truncated; `None`: disks are not truncated.
    pub(crate) cuts: Option<Random>,
    pub(crate) next_cut: Nanos,
    /// `None`: no holder holds its writes.
    pub(crate) holds: Option<Holds>,
}

/// The kinds of faults in a run, and their rates. Runs with few kinds find bugs that many kinds
/// would hide.
pub(crate) struct Profile {
    weights: Vec<(Kind, u64)>,
    /// Average time between two faults, in milliseconds.
    pub pause_ms: u64,
    /// Latency of the disks.
    pub latency: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A disk changes its latencies and error rates.
    DiskFaults,
    /// A disk completes no I/O for a time.
    Silence,
    /// A disk is removed, and returns later.
    Removal,
    /// A disk loses its volatile write cache.
    PowerLoss,
    /// Most disks lose power, and possibly a holder crashes.
    Blackout,
    /// A holder cannot reach a disk for a time.
    Unreachable,
    /// A holder's process ends.
    Crash,
    /// A second holder starts while the first one still runs; only in runs without leases.
    TakeOver,
    /// The record store refuses the calls of one holder, or of all, for a time.
    StoreOutage,
    /// The record store changes its latencies and error rates.
    StoreFaults,
    /// An administrator's call: changes, resyncs or verifies replicas, grows or renames the volume,
    /// or fails or allows I/O.
    Operator,
    /// A holder closes the volume.
    Close,
    /// A range of a disk becomes unreadable.
    BadBlocks,
    /// Buffers run out, and possibly descriptors.
    Shortage,
}

const KINDS: [Kind; 14] = [
    Kind::DiskFaults,
    Kind::Silence,
    Kind::Removal,
    Kind::PowerLoss,
    Kind::Blackout,
    Kind::Unreachable,
    Kind::Crash,
    Kind::TakeOver,
    Kind::StoreOutage,
    Kind::StoreFaults,
    Kind::Operator,
    Kind::Close,
    Kind::BadBlocks,
    Kind::Shortage,
];

impl Profile {
    pub(crate) fn new(random: &mut Random) -> Self {
        let share = *random.pick(&[15, 40, 70]);
        let mut weights: Vec<(Kind, u64)> = Vec::new();
        for kind in KINDS {
            if random.percent(share) {
                weights.push((kind, random.within(1, 8)));
            }
        }
        Self {
            weights,
            pause_ms: *random.pick(&[20, 150, 600, 2500]),
            latency: Duration::from_micros(*random.pick(&[5, 50, 400])),
        }
    }

    /// The other faults of a run with leases: few, so that holders serve often.
    pub(crate) fn of_leases(random: &mut Random) -> Self {
        Self {
            pause_ms: *random.pick(&[600, 2500, 10_000]),
            ..Self::new(random)
        }
    }

    pub(crate) fn has(&self, kind: Kind) -> bool {
        self.weights.iter().any(|(other, _)| *other == kind)
    }

    pub(crate) fn draw(&self, random: &mut Random) -> Option<Kind> {
        let sum: u64 = self.weights.iter().map(|(_, weight)| weight).sum();
        let mut at = random.below(sum.max(1));
        self.weights.iter().find_map(|(kind, weight)| {
            let found = at < *weight;
            at = at.wrapping_sub(*weight);
            found.then_some(*kind)
        })
    }
}

/// The faults of the record store.
pub(crate) struct StoreFaults {
    random: Random,
    /// Percentage of calls that the store refuses.
    pub(crate) refuses: u64,
    /// Percentage of calls that are executed and answered as unavailable.
    pub(crate) loses: u64,
    /// Percentage of calls that take up to 1.5 s to arrive, and of replies that take as long.
    pub(crate) slow: u64,
    /// End of an outage: calls of the holder `out_for`, or of all holders, are refused until then.
    pub(crate) out_until: Nanos,
    pub(crate) out_for: Option<u64>,
    /// The store refuses the changes of holders whose lease has ended.
    pub(crate) book: Option<Arc<LeaseBook>>,
    pub now: Nanos,
}

impl StoreFaults {
    pub(crate) fn new(random: Random) -> Self {
        Self {
            random,
            refuses: 0,
            loses: 0,
            slow: 0,
            out_until: Nanos::ZERO,
            out_for: None,
            book: None,
            now: Nanos::ZERO,
        }
    }

    pub(crate) fn plan(&mut self, call: &Call) -> Plan {
        let holder = u64::from(call.client);
        let has_ended = |book: &Arc<LeaseBook>| book.has_ended(holder);
        if call.request == StoreRequest::Swap && self.book.as_ref().is_some_and(has_ended) {
            return Plan::outcome(Outcome::Own);
        }
        let out = self.is_out(holder, self.now);
        let random = &mut self.random;
        if out {
            return Plan {
                before: Duration::from_millis(random.within(1, 40)),
                ..Plan::outcome(Outcome::Refuse)
            };
        }
        let slow = |random: &mut Random| {
            if random.percent(self.slow) {
                Duration::from_millis(random.within(1, 1500))
            } else {
                Duration::from_micros(random.within(1, 400))
            }
        };
        let (before, after) = (slow(random), slow(random));
        let chance = random.below(100);
        let outcome = if chance < self.refuses {
            Outcome::Refuse
        } else if chance < self.refuses + self.loses {
            Outcome::Lose
        } else {
            Outcome::Do
        };
        Plan {
            before,
            outcome,
            after,
        }
    }

    /// True during an outage for this holder.
    pub(crate) fn is_out(&self, holder: u64, now: Nanos) -> bool {
        now < self.out_until && self.out_for.is_none_or(|who| who == holder)
    }

    /// Ends all faults of the store.
    pub(crate) fn heal(&mut self) {
        let random = self.random.fork();
        *self = Self {
            book: self.book.take(),
            ..Self::new(random)
        };
    }
}
