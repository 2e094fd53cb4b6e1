//! One core's path to a volume: the data path.
//!
//! ```text
//!   submit ─▶ read ───────────────── choose a member ─────────────────┐
//!          └▶ write ─ regions ─ stripes ─ outstanding, version ─ fan out ┤
//!                       │          │              │                   ▼
//!                       └──────────┴─ parked ◀────┘            members' queues
//!                                      ▲                              │
//!                  view, bell, time ───┘◀── failed, late ─ judgement ◀┤
//!                                                                     ▼
//!   poll  ◀───────────────────────────────────────────── completed ── ok
//! ```
//!
//! Nearly every read is a swift one ([`request::Stage::Swift`]): one replica accepts and completes
//! it. The other fields of the request are filled in only if that fails.
//!
//! A request keeps its place until it is completed and no device has any part of it. Everything has
//! a bound: [`DEPTH`] requests, as many parked or waiting for a replica, and [`PLACES`]. A lane
//! takes a lock only when the view changed, a replica failed, or a region must become dirty.

mod at_once;
mod completion;
mod members;
mod read;
mod request;
mod requests;
#[cfg(test)]
pub(crate) mod tests;
mod upkeep;
mod waiting;
mod write;

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use nacre_bdev::{Busy, Completion, Done, Io, Op, Queue, Status, Token};
use nacre_hugepages::{Lent, Pool};
use nacre_reactor::{EventSet, Idle, Interest, Nanos};
use slab::Slab;

use self::members::{MemberQueue, Sync};
use self::read::READ_STRIPE;
use self::request::{GENERATIONS, Request, Slots, Stage, Trouble, bit, slots, split_token};
use self::requests::Requests;
use crate::model::MAX_MEMBERS;
use crate::shared::{LaneState, Shared};
use crate::view::{Mode, View};
use crate::volume::Volume;

/// Most I/Os of one lane at once.
pub const DEPTH: usize = 256;
/// Interval between checks of replicas without I/O in flight.
const ATTEND: Duration = Duration::from_millis(10);
/// Most requests kept: completed ones stay until the devices are done with them.
const PLACES: usize = 4 * DEPTH;

pub struct Lane {
    /// By slot. Dropped first: after this no device touches a buffer.
    queues: [Option<Box<MemberQueue>>; MAX_MEMBERS],
    /// Queues of replicas that left, with I/O in flight.
    old: [Option<Box<MemberQueue>>; MAX_MEMBERS],
    olds: Slots,
    /// Slots whose queue has children waiting.
    waiting: Slots,
    volume: Arc<Volume>,
    shared: Arc<Shared>,
    state: Arc<LaneState>,
    view: Arc<View>,
    sync: Sync,
    /// Replicas that may receive a read directly, unless some replica lacks blocks.
    swift: Slots,
    /// Replicas that executed I/O synchronously since the last turn: their slots are entered, and
    /// they must be polled.
    used: Slots,
    /// Children that each slot's device has or waits for.
    local: [u32; MAX_MEMBERS],
    requests: Requests,
    troubles: Slab<Trouble>,
    /// Writes that hold stripes: overlapping writes wait.
    writes: Vec<Span>,
    /// Requests that cannot start yet, oldest first.
    parked: VecDeque<u32>,
    ready: VecDeque<Completion>,
    /// Accepted and not yet completed, except those in `ready`.
    open: usize,
    generation: u32,
    block_size: u32,
    /// log2 of the blocks of a stripe whose reads go to one replica.
    read_shift: u32,
    now: Nanos,
    /// Time of the next check of children's ages and hold times.
    upkeep_at: Nanos,
    pace: Duration,
    /// Time of the next check of replicas without I/O in flight.
    attend_at: Nanos,
    /// The view is new, and the requests were not checked yet.
    adopted: bool,
    /// A write waits for memory for a queue: the next upkeep checks judged requests again.
    short: bool,
    /// Replicas whose queues lacked resources, and for which that was reported.
    told_short: Slots,
    /// A write ended: parked requests may not overlap it any longer.
    freed: bool,
    /// The view is new, and the parked requests were not checked yet.
    viewed: bool,
    /// During a retry of parked requests: how many at the head came later than the current one.
    later: usize,
    /// I/O was submitted to a replica after its queue was polled.
    pushed: bool,
    turn: Counts,
    next_reader: usize,
    pool: Pool,
    sleepers: EventSet,
}

/// The blocks of a write in flight.
#[derive(Clone, Copy)]
struct Span {
    lba: u64,
    end: u64,
    index: u32,
}

/// Counted since the last turn.
#[derive(Default)]
struct Counts {
    any: bool,
    reads: [u64; MAX_MEMBERS],
    writes: [u64; MAX_MEMBERS],
    reads_moved: u64,
    log_waits: u64,
    overlap_waits: u64,
    frozen_answers: u64,
    latency_ns: u64,
}

impl Lane {
    pub(crate) fn new(volume: Arc<Volume>, pool: &Pool) -> std::io::Result<Lane> {
        let shared = Arc::clone(volume.shared());
        let sleepers = EventSet::new()?;
        let state = shared.add_lane()?;
        if let Err(error) = sleepers.add(state.bell(), 0, Interest::READ) {
            shared.remove_lane(&state);
            return Err(error);
        }
        let mut lane = Lane {
            queues: Default::default(),
            old: Default::default(),
            olds: 0,
            waiting: 0,
            view: Arc::new(View::closed(&Default::default())),
            sync: Sync::default(),
            swift: 0,
            used: 0,
            local: [0; MAX_MEMBERS],
            requests: Requests::with_capacity(DEPTH),
            troubles: Slab::new(),
            writes: Vec::with_capacity(DEPTH),
            parked: VecDeque::with_capacity(DEPTH),
            ready: VecDeque::with_capacity(DEPTH),
            open: 0,
            generation: 0,
            block_size: volume.block_size(),
            read_shift: READ_STRIPE.saturating_sub(volume.block_size().max(1).ilog2()),
            now: Nanos::ZERO,
            upkeep_at: Nanos::ZERO,
            pace: Duration::from_secs(1),
            attend_at: Nanos::ZERO,
            adopted: false,
            short: false,
            told_short: 0,
            freed: false,
            viewed: false,
            later: 0,
            pushed: false,
            turn: Counts::default(),
            next_reader: 0,
            pool: pool.clone(),
            sleepers,
            volume,
            shared,
            state,
        };
        lane.adopt();
        lane.adopted = false;
        Ok(lane)
    }

    /// Makes an I/O a request, and starts it.
    fn take(&mut self, io: Io, start: Nanos) {
        let index = self.requests.insert(io, self.generation, start);
        self.start(index);
    }

    /// Starts a request, or its remaining part.
    #[inline]
    fn start(&mut self, index: usize) {
        match self.requests[index].op {
            Op::Read => self.start_read(index),
            _ => self.start_write(index),
        }
    }

    /// A replica completed a child. `true`: the request is complete, and `completion` is its
    /// completion. Otherwise the completion is not needed.
    #[inline]
    fn child_ended(&mut self, old: bool, completion: &mut Completion) -> bool {
        let (index, slot, generation) = split_token(completion.token);
        if self.requests.is_swift(index, generation) {
            if self.answer_swift(index, slot, completion) {
                return true;
            }
            self.requests.settle();
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
        let queue = if old {
            &mut self.old[slot]
        } else {
            &mut self.queues[slot]
        };
        if let Some(queue) = queue {
            queue.inflight -= 1;
            if request.passed & bit(slot) != 0 {
                request.passed &= !bit(slot);
                let start = read::known(request.start);
                queue
                    .queue
                    .count_read(request.blocks, completion.status, start);
            }
        }
        let is_read = request.is_read();
        let old = old || request.with & bit(slot) == 0;
        if (old || !is_read) && request.data.is_empty() {
            // It was moved; or it is a spare handle, which is not needed.
            std::mem::swap(&mut request.data, &mut completion.data);
        }
        if old {
            request.orphans &= !bit(slot);
            self.leave_slot(slot);
            self.orphan_ended(index);
            return false;
        }
        request.with &= !bit(slot);
        self.leave_slot(slot);
        if is_read {
            self.read_ended(index, slot, completion)
        } else {
            self.write_ended(index, slot, completion)
        }
    }

    #[cold]
    fn orphan_ended(&mut self, index: usize) {
        let request = &self.requests[index];
        match request.stage {
            Stage::Orphaned if request.orphans == 0 => self.requests.remove(index),
            Stage::Flying => self.judge(index),
            _ => {}
        }
    }

    /// Checks a request in flight again: an event that it may have waited for has happened.
    fn judge(&mut self, index: usize) {
        if self.requests[index].is_read() {
            self.judge_read(index)
        } else {
            self.judge_write(index)
        }
    }

    /// Lets a replica write into the caller's list, and translates the entries in place.
    #[inline]
    fn collect(&mut self, slot: usize, old: bool, done: &mut Done) {
        let queue = if old {
            &mut self.old[slot]
        } else {
            &mut self.queues[slot]
        };
        let Some(queue) = queue else { return };
        let mut at = done.len();
        queue.queue.poll(self.now, done);
        while let Some(completion) = done.get_mut(at) {
            if self.child_ended(old, completion) {
                at += 1
            } else {
                drop(done.swap_remove(at))
            }
        }
    }

    /// Of replicas without I/O in flight, polls only those in `used`.
    fn collect_all(&mut self, used: Slots, done: &mut Done) {
        for slot in 0..MAX_MEMBERS {
            let queue = self.queues[slot].as_ref();
            if queue.is_some_and(|q| q.inflight > 0 || used & bit(slot) != 0) {
                self.collect(slot, false, done);
            }
        }
        if self.olds != 0 {
            for slot in slots(self.olds) {
                self.collect(slot, true, done);
            }
            self.close_old();
        }
    }

    /// Polls queues without I/O in flight that have work of their own: a connection that moves
    /// waits for all of them.
    #[cold]
    fn attend_idle(&mut self, done: &mut Done) {
        self.attend_at = self.now + ATTEND;
        for slot in 0..MAX_MEMBERS {
            let queue = self.queues[slot].as_ref();
            if queue.is_some_and(|q| q.inflight == 0 && !q.queue.is_settled()) {
                self.collect(slot, false, done);
            }
        }
    }

    fn hand_over(&mut self, done: &mut Done) {
        while done.has_room()
            && let Some(completion) = self.ready.pop_front()
        {
            done.push(completion);
        }
    }

    /// The status for a request that cannot be served now; `None`: it waits.
    fn refusal(&self, op: Op) -> Option<Status> {
        match self.view.mode {
            Mode::Serving | Mode::Frozen | Mode::Suspended => None,
            Mode::FailIo => Some(Status::medium_error(op)),
            Mode::Closed => Some(Status::Gone),
        }
    }

    fn is_full(&self) -> bool {
        self.open + self.ready.len() >= DEPTH || self.requests.len() >= PLACES
    }

    /// The status for an unsupported operation or an invalid range.
    fn check(&self, io: &Io) -> Option<Status> {
        match io.op {
            Op::Flush => return None,
            Op::Read | Op::Write | Op::Unmap | Op::WriteZeroes => {}
            Op::Compare | Op::CompareAndWrite | Op::Copy | Op::Verify => {
                return Some(Status::Unsupported);
            }
        }
        let end = io.lba.checked_add(u64::from(io.blocks));
        if end.is_none_or(|end| end > self.volume.blocks()) {
            return Some(Status::OutOfRange);
        }
        (io.blocks == 0).then_some(Status::Ok)
    }
}

impl Queue for Lane {
    #[inline]
    fn submit(&mut self, io: Io) -> Result<(), (Busy, Io)> {
        if self.is_full() {
            return Err((Busy, io));
        }
        if let Some(status) = self.check(&io) {
            self.ready.push_back(io.complete(status));
            return Ok(());
        }
        self.generation = self.generation.wrapping_add(1) & GENERATIONS;
        // Without open requests the lane may not have been polled, so the time is unknown.
        let start = match self.open {
            0 => Nanos::ZERO,
            _ => self.now,
        };
        self.open += 1;
        match io.op {
            Op::Read if self.swift != 0 => self.read_swiftly(io, start),
            _ => self.take(io, start),
        }
        Ok(())
    }

    #[inline]
    fn at_once(&mut self, io: &mut Io, lent: &mut Option<Lent>) -> Option<Status> {
        if self.swift == 0 || self.check(io).is_some() {
            return None;
        }
        match io.op {
            Op::Read => self.read_at_once(io, lent),
            Op::Write => self.write_at_once(io),
            _ => None,
        }
    }

    fn poll(&mut self, now: Nanos, done: &mut Done) -> usize {
        let before = done.len();
        self.now = now;
        let used = self.leave_used();
        if self.shared.version() != self.view.version {
            self.adopt();
        }
        self.hand_over(done);
        self.pushed = false;
        self.collect_all(used, done);
        if self.adopted {
            self.review();
        }
        if now >= self.attend_at {
            self.attend_idle(done);
        }
        if now >= self.upkeep_at {
            self.upkeep();
        }
        if self.waiting != 0 {
            self.resume_waiting();
        }
        if !self.parked.is_empty() {
            self.retry_parked();
        }
        if self.pushed {
            // Requests that can proceed now must reach the devices in this turn.
            self.collect_all(0, done);
        }
        self.hand_over(done);
        if self.turn.any {
            self.publish_counts();
        }
        done.len() - before
    }

    fn abort(&mut self, token: Token) -> bool {
        self.requests.settle();
        let asked = |r: &Request| r.pending.as_ref().is_some_and(|p| p.token() == token);
        let found = self.requests.iter().find(|(_, r)| asked(r));
        match found.map(|(index, _)| index) {
            Some(index) => self.abort_request(index),
            None => false,
        }
    }

    fn inflight(&self) -> usize {
        self.open + self.ready.len()
    }

    fn is_settled(&self) -> bool {
        let version = self.shared.version();
        self.inflight() == 0
            && self.used == 0
            && self.requests.is_empty()
            && self.olds == 0
            && !self.adopted
            && version == self.view.version
            && self.queues.iter().flatten().all(|q| q.queue.is_settled())
    }

    fn arm(&mut self, now: Nanos) -> Idle {
        // A ring from here on wakes the lane; earlier rings are handled now.
        self.state.hear();
        let queues = self.queues.iter_mut().chain(&mut self.old).flatten();
        let mut idle = queues.fold(Idle::Quiet, |idle, q| idle.and(q.queue.arm(now)));
        if !self.ready.is_empty()
            || self.used != 0
            || self.adopted
            || self.shared.version() != self.view.version
            || self.parked_may_start()
        {
            idle = Idle::Busy;
        }
        idle.and(self.next_moment())
    }

    fn disarm(&mut self) {
        let queues = self.queues.iter_mut().chain(&mut self.old).flatten();
        queues.for_each(|q| q.queue.disarm());
    }

    fn wake_fd(&self) -> Option<RawFd> {
        Some(self.sleepers.as_raw_fd())
    }
}
