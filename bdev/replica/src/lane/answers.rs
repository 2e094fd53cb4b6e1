//! The check of the holder's lease where answers leave the lane: see [`crate::answers`].
//!
//! ```text
//!   replicas ─▶ collected ─▶ lease good now? ── yes ─────────────────────▶ caller
//!                                │ no                                        ▲
//!                                ▼                                           │
//!                               held ── good later, or a later round of confirmation
//!                                └───── abort, hold time, end of the lease ──▶ error
//! ```
//!
//! All successes of a poll are checked at once, after they were collected. A stop of the process
//! between the check and the caller is harmless: each answer was right at the check, which is
//! between its command and its completion. So is a delay of any length in the list of held answers.
//! Reads, writes and flushes are treated alike: although all replicas executed a write, one of them
//! may be out in the store of a later holder.
//!
//! Errors leave at any time: they carry no data, and promise nothing about a write.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use nacre_bdev::{Completion, Done, Io, Status, Token};
use nacre_hugepages::MemoryView;
use nacre_reactor::{Idle, Nanos};

use super::Lane;
use crate::answers::AnswerLease;
use crate::mutation::Mutation;
use crate::shared::Shared;
use crate::view::Mode;

/// How long a lane with held answers sleeps at most: a renewed lease wakes no lane.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

pub(super) struct Answers {
    lease: Option<Arc<dyn AnswerLease>>,
    /// Successes that may not leave yet, oldest first. The lane counts them as open, so there are
    /// at most [`super::DEPTH`].
    held: VecDeque<Held>,
    /// The lease was not good at the last check.
    lapsed: bool,
    shared: Arc<Shared>,
}

struct Held {
    completion: Completion,
    since: Nanos,
    /// The last round of confirmation that had begun when the answer was collected.
    begun: u64,
}

impl Answers {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self {
            lease: None,
            held: VecDeque::new(),
            lapsed: false,
            shared,
        }
    }

    #[inline]
    pub(super) fn need_lease(&self) -> bool {
        self.lease.is_some()
    }

    /// Adopts the lease of a view. Returns true if the held answers must not leave any more,
    /// because their lease was another one.
    fn adopt(&mut self, lease: Option<&Arc<dyn AnswerLease>>) -> bool {
        let address = |lease: &Arc<dyn AnswerLease>| Arc::as_ptr(lease).cast::<()>();
        if self.lease.as_ref().map(address) == lease.map(address) {
            return false;
        }
        self.lease = lease.cloned();
        self.lapsed = false;
        true
    }

    /// Reads the clock: call this after the answers were collected.
    fn is_lease_good(&mut self) -> bool {
        let good = if Mutation::CheckEarly.is_active() {
            !self.lapsed
        } else {
            self.lease.as_ref().is_none_or(|lease| lease.is_good())
        };
        self.lapsed = !good;
        good || Mutation::AnswerUnchecked.is_active()
    }

    /// For [`Mutation::CheckEarly`]: the check that the next poll relies on.
    pub(super) fn check_early(&mut self) {
        self.lapsed = self.lease.as_ref().is_some_and(|lease| !lease.is_good());
    }

    fn hold(&mut self, completion: Completion, begun: u64, now: Nanos) {
        if self.held.is_empty() {
            self.shared.confirmations.hold(true);
            self.shared.wake_control();
        }
        self.held.push_back(Held {
            completion,
            since: now,
            begun,
        });
    }

    fn pop(&mut self) -> Option<Completion> {
        let first = self.held.pop_front()?;
        if self.held.is_empty() {
            self.shared.confirmations.hold(false);
        }
        Some(first.completion)
    }

    fn remove(&mut self, token: Token) -> Option<Completion> {
        let at = self
            .held
            .iter()
            .position(|held| held.completion.token == token)?;
        let removed = self.held.remove(at)?;
        if self.held.is_empty() {
            self.shared.confirmations.hold(false);
        }
        Some(removed.completion)
    }

    /// The time until which the lane may sleep.
    pub(super) fn next_moment(&self, now: Nanos) -> Idle {
        if self.held.is_empty() {
            Idle::Quiet
        } else {
            Idle::Until(now + LOOK_AGAIN)
        }
    }

    /// The lane ends: its callers have given up their I/O.
    pub(super) fn close(&mut self) {
        while self.pop().is_some() {}
    }
}

/// Adopts the lease of the present view.
pub(super) fn adopt_lease(lane: &mut Lane) {
    if lane.answers.adopt(lane.replicas.view.lease.as_ref()) {
        while let Some(completion) = lane.answers.pop() {
            end_held(lane, completion, Status::Gone);
        }
    }
}

/// Checks the answers in `done` from index `from` on, and the held answers. The caller has
/// collected all answers of this poll.
pub(super) fn check_answers(lane: &mut Lane, done: &mut Done, from: usize) {
    let collected = done.len() > from;
    if !collected && lane.answers.held.is_empty() {
        return;
    }
    let good = lane.answers.is_lease_good();
    if !good && collected {
        hold_answers(lane, done, from);
    }
    if !lane.answers.held.is_empty() {
        release_answers(lane, good, done);
    }
}

#[cold]
fn hold_answers(lane: &mut Lane, done: &mut Done, from: usize) {
    let begun = lane.shared.confirmations.begun();
    let mut at = from;
    while let Some(completion) = done.get_mut(at) {
        if completion.status.is_ok() {
            let completion = done.swap_remove(at);
            lane.completions.reopen();
            lane.answers.hold(completion, begun, lane.now);
        } else {
            at += 1;
        }
    }
}

/// Hands over the held answers that may leave, and ends the answers that waited too long.
#[cold]
fn release_answers(lane: &mut Lane, good: bool, done: &mut Done) {
    let view = &lane.replicas.view;
    let (answers, hold) = (lane.replicas.sync.answers, view.frozen_hold);
    let refused = matches!(view.mode, Mode::Closed | Mode::FailIo);
    while done.has_room()
        && let Some(first) = lane.answers.held.front()
    {
        let leaves = answers && !refused && (good || lane.shared.confirmations.covers(first.begun));
        if !leaves && !refused && lane.now.since(first.since) < hold {
            return;
        }
        let Some(completion) = lane.answers.pop() else {
            return;
        };
        if leaves {
            lane.completions.close_held();
            done.push(completion);
        } else {
            end_held(lane, completion, Status::Gone);
            lane.counters.frozen_answer();
        }
    }
}

/// Ends a held answer with an error, which the next poll returns.
fn end_held(lane: &mut Lane, mut completion: Completion, status: Status) {
    completion.status = status;
    completion.zero_copy = None;
    lane.completions.close_held();
    lane.completions.push(completion);
}

/// Aborts an I/O whose answer is held. Returns false if there is none with this token.
#[cold]
pub(super) fn abort_held(lane: &mut Lane, token: Token) -> bool {
    let Some(completion) = lane.answers.remove(token) else {
        return false;
    };
    end_held(lane, completion, Status::Aborted);
    true
}

/// The synchronous path of a volume with a lease: checked after each I/O. Without a good lease
/// the I/O is submitted normally, so that its answer can be held.
#[inline(never)]
pub(super) fn run_sync_by_lease(
    lane: &mut Lane,
    io: &mut Io,
    zero_copy: &mut Option<MemoryView>,
) -> Option<Status> {
    if lane.answers.lapsed {
        return None;
    }
    let status = super::sync::run_sync_unchecked(lane, io, zero_copy)?;
    if !lane.answers.is_lease_good() {
        *zero_copy = None;
        return None;
    }
    Some(status)
}
