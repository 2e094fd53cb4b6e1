//! The data path of a volume on one core: a [`Lane`] sends each read to one replica and each write
//! to all of them. [`crate::volume`] opens a lane for each queue of the volume's block device.
//!
//! ```text
//!   submit ─▶ read ───────────────── choose a replica ─────────────────┐
//!          └▶ write ─ regions ─ stripes ─ outstanding, version ─ fan out ┤
//!                       │          │              │                   ▼
//!                       └──────────┴─ parked ◀────┘            replicas' queues
//!                                      ▲                              │
//!                  view, bell, time ───┘◀── failed, late ─ judgement ◀┤
//!                                                                     ▼
//!   poll  ◀───────────────────────────────────────────── completed ── ok
//! ```
//!
//! The parts of a lane, each with its own state:
//!
//! | part | owns |
//! |---|---|
//! | [`Replicas`] | the view, the queues to replicas, and the children there |
//! | [`Requests`] | the requests, and the reasons of failed children |
//! | [`Admission`] | the locks that writes hold, and the requests that cannot start yet |
//! | [`Completions`] | the number of open requests, and completions to be returned |
//! | [`Answers`] | the holder's lease, and the successes that wait for it |
//! | [`Schedule`] | the times of periodic work |
//! | [`Counters`] | statistics |
//!
//! [`Lane`] coordinates them: [`read`] has the steps of reads, [`write`] those of writes, and
//! [`completion`] the ends of both.
//!
//! Nearly every read is direct ([`request::Stage::Direct`]): one replica accepts and completes it.
//! The other fields of the request are filled in only if that fails.
//!
//! A request stays in the table until it is completed and no device has any part of it. All sizes
//! are bounded: [`DEPTH`] open requests, and [`PLACES`] places in the table. A lane locks a mutex
//! only when the view changed, a replica failed, or a region must become dirty.

mod admission;
mod answers;
mod children;
mod completion;
mod counters;
mod locks;
mod read;
mod replicas;
mod request;
mod requests;
mod schedule;
mod slots;
mod space;
mod sync;
#[cfg(test)]
pub(crate) mod tests;
mod upkeep;
mod verdict;
mod waiting;
mod write;

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use nacre_bdev::{Busy, Completion, Done, Io, Op, Queue, Status, Token};
use nacre_hugepages::{MemoryView, Pool};
use nacre_reactor::{EventSet, Idle, Interest, Nanos};

use self::admission::Admission;
use self::answers::Answers;
use self::completion::Completions;
use self::counters::Counters;
use self::replicas::Replicas;
use self::request::{GENERATIONS, Stage, split_token};
use self::requests::Requests;
use self::schedule::Schedule;
use self::slots::{Slots, bit, slots};
use crate::model::MAX_REPLICAS;
use crate::mutation::Mutation;
use crate::shared::{LaneState, Shared};

/// Most I/Os in flight on one lane.
pub const DEPTH: usize = 256;
/// Places in the table of requests. Completed requests stay until the devices complete their parts.
const PLACES: usize = 4 * DEPTH;

/// The queue of a volume on one core.
pub struct Lane {
    /// Dropped first: afterwards no device accesses a buffer.
    replicas: Replicas,
    requests: Requests,
    admission: Admission,
    completions: Completions,
    answers: Answers,
    counters: Counters,
    block_size: u32,
    shared: Arc<Shared>,
    state: Arc<LaneState>,
    pool: Pool,
    generation: u32,
    now: Nanos,
    schedule: Schedule,
    review: Review,
    /// I/O was submitted to a replica after its queue was polled.
    pushed: bool,
}

/// When to check all requests in flight again, beyond the events of each request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Review {
    /// Not needed.
    NotDue,
    /// At the next upkeep: a write waits for memory for a queue.
    AtUpkeep,
    /// At the next turn: the view is new.
    Due,
}

impl Lane {
    pub(crate) fn new(shared: Arc<Shared>, block_size: u32, pool: &Pool) -> std::io::Result<Self> {
        let sleepers = EventSet::new()?;
        let state = shared.add_lane()?;
        if let Err(error) = sleepers.add(state.bell(), 0, Interest::READ) {
            shared.remove_lane(&state);
            return Err(error);
        }
        let replicas = Replicas::new(
            block_size,
            Arc::clone(&shared),
            Arc::clone(&state),
            pool,
            sleepers,
        );
        let mut lane = Self {
            replicas,
            requests: Requests::with_capacity(DEPTH),
            admission: Admission::with_capacity(DEPTH, state.owner, Arc::clone(&shared)),
            completions: Completions::with_capacity(DEPTH),
            answers: Answers::new(Arc::clone(&shared)),
            counters: Counters::default(),
            pool: pool.clone(),
            generation: 0,
            now: Nanos::ZERO,
            schedule: Schedule::new(),
            review: Review::NotDue,
            pushed: false,
            block_size,
            shared,
            state,
        };
        lane.adopt();
        lane.review = Review::NotDue;
        Ok(lane)
    }

    /// Adopts the current view. The next turn checks the requests.
    #[cold]
    fn adopt(&mut self) {
        self.requests.make_ordinary();
        self.replicas.adopt(&mut self.requests);
        answers::adopt_lease(self);
        self.review = Review::Due;
        self.schedule.adopt(&self.replicas.view, self.now);
    }

    /// Creates a request for an I/O, and starts it.
    fn take(&mut self, io: Io, start: Nanos) {
        let index = self.requests.insert(io, self.generation, start);
        self.start(index);
    }

    /// Starts a request, or starts it again.
    #[inline]
    fn start(&mut self, index: usize) {
        match self.requests[index].op {
            Op::Read => self.start_read(index),
            _ => self.start_write(index),
        }
    }

    /// Handles a replica's completion of a child. Returns true if it completes the request:
    /// `completion` is then the request's completion. Otherwise the caller drops it.
    #[inline]
    fn child_ended(&mut self, old: bool, completion: &mut Completion) -> bool {
        let (index, slot, generation) = split_token(completion.token);
        if self.requests.is_direct(index, generation) {
            if self.complete_direct(index, slot, completion) {
                return true;
            }
            self.requests.make_ordinary();
        }
        let known = self.requests.get_mut(index);
        let Some(request) = known.filter(|r| r.generation == generation) else {
            debug_assert!(false, "a replica completed an I/O that it was not given");
            tracing::error!(
                slot,
                "a replica completed an unknown request, or one request twice"
            );
            return false;
        };
        let is_read = request.is_read();
        let orphan = self
            .replicas
            .child_ended(request, slot, old, completion.status);
        if (orphan || !is_read) && request.data.is_empty() {
            // Return the data to the request, which may need it for another replica. If the request
            // has its own handle, this one is dropped.
            std::mem::swap(&mut request.data, &mut completion.data);
        }
        if orphan {
            self.orphan_ended(index);
            false
        } else if is_read {
            self.read_ended(index, slot, completion)
        } else {
            self.write_ended(index, slot, completion)
        }
    }

    #[cold]
    fn orphan_ended(&mut self, index: usize) {
        let request = &self.requests[index];
        match request.stage {
            Stage::Orphaned if request.children.orphans == 0 => self.requests.remove(index),
            Stage::InFlight => self.check(index),
            _ => {}
        }
    }

    /// Checks a request in flight again, after an event that it may wait for.
    fn check(&mut self, index: usize) {
        if self.requests[index].is_read() {
            self.check_read(index)
        } else {
            self.check_write(index)
        }
    }

    /// Polls a replica's queue into the caller's list, and replaces the children's completions in
    /// the list by those of the requests.
    #[inline]
    fn collect(&mut self, slot: usize, old: bool, done: &mut Done) {
        let mut at = done.len();
        let Some(queue) = self.replicas.queue_of(slot, old) else {
            return;
        };
        queue.queue.poll(self.now, done);
        while let Some(completion) = done.get_mut(at) {
            if self.child_ended(old, completion) {
                at += 1
            } else {
                drop(done.swap_remove(at))
            }
        }
    }

    /// Polls the queues with I/O in flight, and those in `used`.
    fn collect_all(&mut self, used: Slots, done: &mut Done) {
        for slot in 0..MAX_REPLICAS {
            if self.replicas.is_busy(slot) || used & bit(slot) != 0 {
                self.collect(slot, false, done);
            }
        }
        let left = self.replicas.left();
        if left != 0 {
            for slot in slots(left) {
                self.collect(slot, true, done);
            }
            self.replicas.close_old();
        }
    }

    /// Polls the queues without I/O in flight that have other work. For example, moving a
    /// connection to another core waits for all of its queues.
    #[cold]
    fn poll_idle(&mut self, done: &mut Done) {
        self.schedule.idle_poll_begins(self.now);
        for slot in 0..MAX_REPLICAS {
            if self.replicas.has_own_work(slot) {
                self.collect(slot, false, done);
            }
        }
    }

    fn is_full(&self) -> bool {
        self.completions.count() >= DEPTH || self.requests.len() >= PLACES
    }

    fn publish_counts(&mut self) {
        self.counters.publish(&self.shared.totals);
        self.replicas.publish_loads();
    }
}

impl Queue for Lane {
    #[inline]
    fn submit(&mut self, io: Io) -> Result<(), (Busy, Io)> {
        if self.is_full() {
            return Err((Busy, io));
        }
        if let Some(status) = self.shared.check(&io) {
            self.completions.push(io.complete(status));
            return Ok(());
        }
        self.generation = self.generation.wrapping_add(1) & GENERATIONS;
        let start = self.completions.open(self.now);
        match io.op {
            Op::Read if self.replicas.allow_direct() => self.read_direct(io, start),
            _ => self.take(io, start),
        }
        Ok(())
    }

    #[inline]
    fn run_sync(&mut self, io: &mut Io, zero_copy: &mut Option<MemoryView>) -> Option<Status> {
        if self.answers.need_lease() {
            return answers::run_sync_by_lease(self, io, zero_copy);
        }
        sync::run_sync_unchecked(self, io, zero_copy)
    }

    fn poll(&mut self, now: Nanos, done: &mut Done) -> usize {
        let before = done.len();
        self.now = now;
        let used = self.replicas.leave_used();
        if !self.replicas.is_current() {
            self.adopt();
        }
        self.completions.hand_over(done);
        self.pushed = false;
        self.collect_all(used, done);
        if self.review == Review::Due {
            self.review();
        }
        if now >= self.schedule.idle_poll_at() {
            self.poll_idle(done);
        }
        if now >= self.schedule.upkeep_at() {
            self.upkeep();
        }
        if self.replicas.has_waiting() {
            self.pushed |= self.replicas.resume_waiting(&mut self.requests, now);
        }
        if self.admission.has_waiting() {
            self.retry_waiting();
        }
        if self.pushed {
            // Requests that can proceed now must reach the devices in this turn.
            self.collect_all(0, done);
        }
        self.completions.hand_over(done);
        if self.answers.need_lease() {
            answers::check_answers(self, done, before);
        }
        if Mutation::CheckEarly.is_active() {
            self.answers.check_early();
        }
        if self.counters.has_news() {
            self.publish_counts();
        }
        done.len() - before
    }

    fn abort(&mut self, token: Token) -> bool {
        self.requests.make_ordinary();
        match self.requests.with_token(token) {
            Some(index) => self.abort_request(index),
            None => answers::abort_held(self, token),
        }
    }

    fn inflight(&self) -> usize {
        self.completions.count()
    }

    fn is_settled(&self) -> bool {
        self.completions.count() == 0
            && self.requests.is_empty()
            && self.review != Review::Due
            && self.replicas.is_settled()
    }

    fn arm(&mut self, now: Nanos) -> Idle {
        let mut idle = self.replicas.arm(now);
        if self.completions.has_ready()
            || self.review == Review::Due
            || self
                .admission
                .may_start_any(&self.requests, &self.replicas, self.now)
        {
            idle = Idle::Busy;
        }
        idle.and(self.next_moment())
            .and(self.answers.next_moment(self.now))
    }

    fn disarm(&mut self) {
        self.replicas.disarm()
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.replicas.wake_fd())
    }
}
