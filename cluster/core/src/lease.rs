//! A node's own lease: a key in the store that the node renews. The data path of every core checks
//! before each response to a host that the lease is good.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use arrayvec::ArrayVec;

use crate::ids::Incarnation;
use crate::mutation::Mutation;
use crate::record::Holder;
use crate::time::{BootTime, Timing};
use crate::transaction::Transaction;

/// Renewals without an answer that are remembered; older ones can no longer extend the lease.
const MAX_ATTEMPTS: usize = 8;

/// The time until which the lease is good, shared between threads: one writer, many readers.
///
/// A lane reads the clock after it has collected data from the replicas. It hands the data to hosts
/// only if the lease is good at that time. A pause after the check is harmless: the data was
/// current at a time between command and answer.
#[derive(Debug, Default)]
pub struct Word(AtomicU64);

impl Word {
    pub fn is_good(&self, now: BootTime) -> bool {
        Mutation::AnswerWithoutClock.is_active() || now.0 < self.0.load(Ordering::Acquire)
    }

    /// The time that is left; zero once the lease is not good.
    pub fn left(&self, now: BootTime) -> Duration {
        let until = self.0.load(Ordering::Acquire);
        Duration::from_nanos(until.saturating_sub(now.0))
    }

    pub fn set(&self, until: BootTime) {
        self.0.store(until.0, Ordering::Release);
    }
}

/// The lease of this node in one incarnation.
///
/// The order of calls: [`Lease::poll`] at [`Lease::due`] and after, [`Lease::renewed`] for each
/// answer, [`Lease::end`] when the store no longer has the incarnation. Answers may be late, so
/// both name the incarnation that sent the renewal.
#[derive(Debug)]
pub struct Lease {
    me: Holder,
    timing: Timing,
    /// Renewals without an answer, oldest first.
    attempts: ArrayVec<Attempt, MAX_ATTEMPTS>,
    last_number: u64,
    due: BootTime,
    /// The time of the last answer to a renewal. The time of its sending shows nothing: a store
    /// that stops for a while executes the renewal only afterwards.
    heard: BootTime,
    /// The start of the current period without a gap between answers.
    since: BootTime,
    until: BootTime,
    ended: bool,
}

#[derive(Debug, Clone, Copy)]
struct Attempt {
    number: u64,
    sent: BootTime,
}

impl Lease {
    /// The lease of a key that this node created with a transaction sent at `sent`.
    pub fn new(me: Holder, timing: Timing, sent: BootTime, now: BootTime) -> Self {
        Self {
            me,
            timing,
            attempts: ArrayVec::new(),
            last_number: 0,
            due: sent + timing.renewal(),
            heard: now,
            since: now,
            until: sent + timing.validity(),
            ended: false,
        }
    }

    pub fn holder(&self) -> Holder {
        self.me
    }

    /// The next renewal, if it is due. A renewal without an answer does not delay the next one.
    pub fn poll(&mut self, now: BootTime) -> Option<Transaction> {
        if self.ended || now < self.due {
            return None;
        }
        self.due = now + self.timing.renewal();
        self.last_number += 1;
        if self.attempts.is_full() {
            self.attempts.remove(0);
        }
        let number = self.last_number;
        self.attempts.push(Attempt { number, sent: now });
        Some(Transaction::renew(self.me, number))
    }

    /// The time of the next renewal.
    pub fn due(&self) -> BootTime {
        self.due
    }

    /// The answer to renewal `number`: the store executed it. A renewal after the lease ran out
    /// revives the lease: the write proves that no fence came before it.
    pub fn renewed(&mut self, of: Incarnation, number: u64, now: BootTime) {
        if of != self.me.incarnation {
            return;
        }
        let Some(at) = self.attempts.iter().position(|a| a.number == number) else {
            return;
        };
        let sent = self.attempts[at].sent;
        self.attempts.drain(..=at);
        if self.ended {
            return;
        }
        if now >= self.until || now > self.heard + self.timing.gap() {
            self.since = now;
        }
        self.heard = now;
        let from = if Mutation::LeaseFromAnswer.is_active() {
            now
        } else {
            sent
        };
        self.until = self.until.max(from + self.timing.validity());
    }

    /// The store no longer has the incarnation.
    pub fn end(&mut self, of: Incarnation) {
        if of != self.me.incarnation {
            return;
        }
        self.ended = true;
        self.until = BootTime::default();
    }

    pub fn has_ended(&self) -> bool {
        self.ended
    }

    /// The value for [`Word::set`].
    pub fn until(&self) -> BootTime {
        self.until
    }

    pub fn is_good(&self, now: BootTime) -> bool {
        now < self.until
    }

    /// The time since which the store has answered without a gap; `None`: it may be away now.
    ///
    /// The silence of another node counts only then. While the store is away, the lease of this
    /// node may be good for a moment longer than that of the other: its fence would be the first
    /// change that the store makes afterwards, before the other node's next renewal.
    pub fn good_since(&self, now: BootTime) -> Option<BootTime> {
        let may_be_away = now >= self.heard + self.timing.doubt();
        (self.is_good(now) && !may_be_away).then_some(self.since)
    }
}
