//! The faults of a run: their kinds, their rates, and their times.

use std::time::Duration;

use nacre_bdev_replica::store::{Call, Outcome, Plan};
use nacre_random::Random;
use nacre_reactor::Nanos;

/// The faults of a run.
pub struct Faults {
    pub profile: Profile,
    pub(crate) next: Nanos,
    /// A shortage affects buffers only.
    pub(crate) descriptors: bool,
    /// Decides whether disks lose their end, and when.
    pub(crate) cuts: Option<Random>,
    pub(crate) next_cut: Nanos,
}

/// The kinds of faults in a run, and their rates. Runs with few kinds find bugs that many kinds
/// would hide.
pub struct Profile {
    weights: Vec<(Kind, u64)>,
    pub pause_ms: u64,
    pub latency: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Temper,
    Silence,
    Vanish,
    PowerLoss,
    Blackout,
    CutOff,
    Crash,
    TakeOver,
    StoreOutage,
    StoreMood,
    Operator,
    Close,
    BadBlocks,
    Shortage,
}

const KINDS: [Kind; 14] = [
    Kind::Temper,
    Kind::Silence,
    Kind::Vanish,
    Kind::PowerLoss,
    Kind::Blackout,
    Kind::CutOff,
    Kind::Crash,
    Kind::TakeOver,
    Kind::StoreOutage,
    Kind::StoreMood,
    Kind::Operator,
    Kind::Close,
    Kind::BadBlocks,
    Kind::Shortage,
];

impl Profile {
    pub fn new(random: &mut Random) -> Profile {
        let share = *random.pick(&[15, 40, 70]);
        let mut weights: Vec<(Kind, u64)> = Vec::new();
        for kind in KINDS {
            if random.percent(share) {
                weights.push((kind, random.within(1, 8)));
            }
        }
        Profile {
            weights,
            pause_ms: *random.pick(&[20, 150, 600, 2500]),
            latency: Duration::from_micros(*random.pick(&[5, 50, 400])),
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

/// How the store treats its callers.
pub struct StoreMood {
    random: Random,
    /// Percentage of calls.
    pub(crate) refuses: u64,
    pub(crate) loses: u64,
    pub(crate) slow: u64,
    /// End of an outage: calls of the holder `out_for`, or of all holders, get no reply before
    /// it.
    pub(crate) out_until: Nanos,
    pub(crate) out_for: Option<u64>,
    pub now: Nanos,
}

impl StoreMood {
    pub fn new(random: Random) -> StoreMood {
        StoreMood {
            random,
            refuses: 0,
            loses: 0,
            slow: 0,
            out_until: Nanos::ZERO,
            out_for: None,
            now: Nanos::ZERO,
        }
    }

    pub fn plan(&mut self, call: &Call) -> Plan {
        let random = &mut self.random;
        let out = self.out_for.is_none_or(|who| who as u32 == call.client);
        if self.now < self.out_until && out {
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

    /// No failures from now on.
    pub fn heal(&mut self) {
        let random = self.random.fork();
        *self = StoreMood::new(random);
    }
}
