//! The leases of holders, in one of eight runs: a holder without a good lease must not answer hosts
//! without the confirmation of the replicas.
//!
//! ```text
//!   renewal sent ──▶ committed ──▶ reply at the holder     good until: sent + 0.95 lease
//!                        └───────▶ seen by an observer     may be ended at: seen + lease
//! ```
//!
//! Each step takes a time of its own, and a reply may be lost. Clocks have equal rates here. A
//! stopped holder sends no renewal and processes no reply. `troubles.rs` stops holders, and ends
//! their leases.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use nacre_bdev_replica::answers::AnswerLease;
use nacre_random::Random;
use nacre_reactor::{Nanos, VirtualClock};
use parking_lot::Mutex;
use uuid::Uuid;

/// Observers learn of a renewal, and holders of a node without a lease, after this time at the
/// latest.
const LAG: Duration = Duration::from_millis(40);

/// One in this many seeds has leases.
pub const LEASES_EVERY: u64 = 8;

/// True for the seeds whose holders have leases.
pub fn has_leases(seed: u64) -> bool {
    seed % LEASES_EVERY == 5
}

/// The node of a holder. Each holder has its own, so that the record names the holder.
pub(crate) fn node_of(holder: u64) -> Uuid {
    Uuid::from_u128(u128::from(0x1_0000 + holder))
}

/// The leases of a run, and the holders with troubles.
pub(crate) struct Leases {
    pub book: Arc<LeaseBook>,
    pub random: Random,
    pub length: Duration,
    next_renewal: Nanos,
    pub next_trouble: Nanos,
    /// Renewals that the store has yet to execute, by the time at which it does.
    sent: BTreeMap<(Nanos, u64), Nanos>,
    /// Replies to renewals, by the time at which they arrive.
    replies: BTreeMap<(Nanos, u64), Nanos>,
    /// Stopped holders: they do nothing until they go on.
    pub stopped: BTreeSet<u64>,
    /// Holders whose renewals do not reach the store, until these times.
    pub silent: BTreeMap<u64, Nanos>,
    /// Holders that get no reply to their renewals, until these times.
    pub deaf: BTreeMap<u64, Nanos>,
    /// Hosts only read through former holders: a refused write would fence those at once.
    pub only_reads: bool,
    /// No renewal takes long any more.
    healed: bool,
}

/// The leases by holder.
pub(crate) struct LeaseBook {
    clock: VirtualClock,
    /// Answers of this run leave only by confirmation: the clocks of its nodes cannot be trusted.
    by_confirmation: bool,
    leases: Mutex<BTreeMap<u64, Lease>>,
}

#[derive(Clone, Copy)]
struct Lease {
    /// The holder's own knowledge.
    until: Nanos,
    /// When an observer saw the last renewal.
    seen: Nanos,
    ended: bool,
}

impl LeaseBook {
    /// True if another holder may act: the incarnation of `holder` has ended.
    pub(crate) fn has_ended(&self, holder: u64) -> bool {
        self.leases.lock().get(&holder).is_some_and(|l| l.ended)
    }

    pub(crate) fn is_good(&self, holder: u64) -> bool {
        let lease = self.leases.lock().get(&holder).copied();
        let good = lease.is_some_and(|lease| !lease.ended && self.clock.now() < lease.until);
        good && !self.by_confirmation
    }

    /// Ends an incarnation: of a process that is known to be dead.
    pub(crate) fn end(&self, holder: u64) {
        if let Some(lease) = self.leases.lock().get_mut(&holder) {
            lease.ended = true;
        }
    }

    /// Ends an incarnation, if no renewal was seen for the length of a lease.
    pub(crate) fn end_unrenewed(&self, holder: u64, length: Duration) -> bool {
        let mut leases = self.leases.lock();
        let Some(lease) = leases.get_mut(&holder) else {
            return false;
        };
        lease.ended |= self.clock.now() >= lease.seen + length;
        lease.ended
    }
}

/// The lease of one holder.
pub(crate) struct SimLease {
    pub book: Arc<LeaseBook>,
    pub holder: u64,
}

impl AnswerLease for SimLease {
    fn is_good(&self) -> bool {
        self.book.is_good(self.holder)
    }
}

impl Leases {
    pub(crate) fn new(seed: u64, clock: &VirtualClock) -> Self {
        let mut random = Random::new(seed.rotate_left(48));
        let length = Duration::from_millis(*random.pick(&[50, 200, 800]));
        let book = LeaseBook {
            clock: clock.clone(),
            by_confirmation: random.one_in(8),
            leases: Mutex::default(),
        };
        let only_reads = random.one_in(2);
        let leases = Self {
            book: Arc::new(book),
            only_reads,
            random,
            length,
            next_renewal: clock.now(),
            next_trouble: clock.now() + Duration::from_millis(20),
            sent: BTreeMap::new(),
            replies: BTreeMap::new(),
            stopped: BTreeSet::new(),
            silent: BTreeMap::new(),
            deaf: BTreeMap::new(),
            healed: false,
        };
        leases.grant(1);
        leases
    }

    /// The lease of a holder that starts.
    pub(crate) fn grant(&self, holder: u64) {
        let now = self.book.clock.now();
        let lease = Lease {
            until: now + self.length.mul_f64(0.95),
            seen: now,
            ended: false,
        };
        self.book.leases.lock().insert(holder, lease);
    }

    pub(crate) fn next_due(&self, lively: bool) -> Nanos {
        let mut next = self.next_renewal;
        let stopped = |holder: &u64| self.stopped.contains(holder);
        let replies = self.replies.keys().filter(|(_, holder)| !stopped(holder));
        let steps = self.sent.keys().chain(replies).map(|(at, _)| *at);
        next = steps.fold(next, Ord::min);
        if lively {
            next = next.min(self.next_trouble);
        }
        next
    }

    /// Sends, executes and receives renewals. `reaches`: the holder's calls reach the store.
    pub(crate) fn renew(
        &mut self,
        holders: impl Iterator<Item = u64>,
        reaches: impl Fn(u64) -> bool,
        now: Nanos,
    ) -> bool {
        let mut worked = false;
        if self.next_renewal <= now {
            worked = true;
            self.next_renewal = now + self.length / 5;
            self.silent.retain(|_, until| *until > now);
            self.deaf.retain(|_, until| *until > now);
            for holder in holders {
                let silent = self.silent.contains_key(&holder) || !reaches(holder);
                if !self.stopped.contains(&holder) && !silent {
                    let at = now + self.delay();
                    self.sent.insert((at, holder), now);
                }
            }
        }
        while let Some(entry) = self.sent.first_entry().filter(|e| e.key().0 <= now) {
            let ((_, holder), sent) = entry.remove_entry();
            worked = true;
            let seen = now + LAG.mul_f64(self.random.below(100) as f64 / 100.0);
            let reply = now + self.delay();
            let mut leases = self.book.leases.lock();
            let lease = leases.get_mut(&holder).filter(|lease| !lease.ended);
            let Some(lease) = lease else { continue };
            lease.seen = lease.seen.max(seen);
            if !self.deaf.contains_key(&holder) {
                self.replies.insert((reply, holder), sent);
            }
        }
        let mut leases = self.book.leases.lock();
        self.replies.retain(|(at, holder), sent| {
            if *at > now || self.stopped.contains(holder) {
                return true;
            }
            worked = true;
            if let Some(lease) = leases.get_mut(holder) {
                lease.until = lease.until.max(*sent + self.length.mul_f64(0.95));
            }
            false
        });
        worked
    }

    fn delay(&mut self) -> Duration {
        let most = match self.random.below(16) {
            0 if !self.healed => self.length.as_micros() as u64,
            _ => 300,
        };
        Duration::from_micros(self.random.within(1, most))
    }

    /// All holders go on, and reach the store.
    pub(crate) fn heal(&mut self) {
        self.stopped.clear();
        self.silent.clear();
        self.deaf.clear();
        self.healed = true;
    }
}
