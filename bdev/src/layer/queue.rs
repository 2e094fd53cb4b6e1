//! One core's queue to a device through the layer: executes what `plan` and `job` decide.

mod throttle;

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use nacre_hugepages::{MemoryView, Pool};
use nacre_reactor::{Idle, Nanos};
use slab::Slab;

use self::throttle::Throttle;
use super::Layer;
use super::gate::{Gate, GateQueue};
use super::job::{Job, Stage, Step};
use super::memory::Memory;
use super::opens::{ModuleQueue, Open};
use super::plan::{Plan, Recipe};
use crate::device::Bdev;
use crate::io::{Completion, Io, Op, Status, Token};
use crate::pending::Pending;
use crate::queue::{Busy, Done, Queue};
use crate::reservation::Reserve;
use crate::stats::StatWriter;

/// Most concurrent jobs of one queue. A job is large; sixteen with eight pieces each keep 128
/// requests in flight, which is enough for a device.
const MAX_JOBS: usize = 16;

/// One core's queue to a device through the layer.
pub struct LayerQueue {
    // First field, so dropped first: afterwards the device touches no buffer, and the gate may
    // open.
    inner: Box<dyn Queue>,
    gate: Option<GateQueue>,
    pub(super) depth: usize,
    /// Every accepted and not yet completed I/O, except `passthrough`.
    slots: Slab<Slot>,
    /// Reads in the module whose submitter keeps the statistics: [`LayerQueue::pass_read`].
    passthrough: usize,
    jobs: Slab<Job>,
    /// Jobs whose next request found the module busy, in order.
    waiting: VecDeque<usize>,
    /// Jobs that wait for their range or for memory.
    parked: VecDeque<usize>,
    /// Completions that did not involve the module, or found no space in the caller's list.
    ready: VecDeque<Completion>,
    generation: u32,
    pub(super) now: Nanos,
    /// Time of the first turn after the last sleep.
    woken: Nanos,
    /// The reactor may have slept since `now`.
    pub(super) stale: bool,
    throttle: Throttle,
    /// Arrival time of the I/O that is being started, if it arrived earlier.
    pub(super) arrived: Option<Nanos>,
    pub(super) stats: StatWriter,
    memory: Memory,
    pool: Pool,
    pub(super) layer: Arc<Layer>,
    // Last field, so dropped last: code that waits for the queue's closing finds the other fields
    // gone.
    _open: Open,
}

struct Slot {
    pending: Pending,
    generation: u32,
    op: Op,
    /// The gate counts the I/O as an untracked write.
    counted: bool,
    blocks: u32,
    /// The slot's job, or [`NO_JOB`].
    job: u32,
    /// `None`: submitted before the turn at `woken`, when the time was unknown.
    start: Option<Nanos>,
}

const NO_JOB: u32 = u32::MAX;

impl LayerQueue {
    pub(super) fn new(
        layer: &Arc<Layer>,
        module: ModuleQueue,
        memory: Memory,
        pool: &Pool,
    ) -> Self {
        let (inner, open) = module.into_parts();
        Self {
            inner,
            gate: layer.gate.as_ref().map(Gate::join),
            depth: (layer.bdev.limits().queue_depth as usize).max(1),
            slots: Slab::with_capacity(16),
            passthrough: 0,
            jobs: Slab::new(),
            waiting: VecDeque::new(),
            parked: VecDeque::new(),
            ready: VecDeque::with_capacity(16),
            generation: 0,
            now: Nanos::ZERO,
            woken: Nanos::ZERO,
            stale: true,
            throttle: Throttle::new(&layer.limits, layer.shape.block_size),
            arrived: None,
            stats: layer.stats.writer(),
            memory,
            pool: pool.clone(),
            layer: Arc::clone(layer),
            _open: open,
        }
    }

    /// The device of this queue.
    pub fn layer(&self) -> &Arc<Layer> {
        &self.layer
    }

    fn is_full(&self) -> bool {
        self.slots.len() + self.passthrough + self.ready.len() >= self.depth || self.is_blocked()
    }

    /// True while I/O must wait behind a job that found the module busy: otherwise the job would
    /// starve.
    pub(super) fn is_blocked(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Submits a read directly to the module. Hands back an I/O that the module cannot execute
    /// unchanged now. Reasons: not a valid read without splitting, a rate limit, a full queue, a
    /// removed device. For a submitter that keeps the same statistics of each I/O. Bits 63 and 31
    /// of the token must be 0. After `poll` returned the read, the submitter calls
    /// [`LayerQueue::count_read`].
    #[inline]
    #[allow(clippy::result_large_err)]
    pub fn pass_read(&mut self, mut io: Io) -> Result<(), Io> {
        debug_assert_eq!(io.token & (CHILD | PASSED), 0, "a token with marks of ours");
        let total = self.layer.blocks.load(Ordering::Relaxed);
        let plain = io.op == Op::Read && self.layer.shape.is_plain(&io, total);
        if !plain || self.is_full() || self.throttle.is_active() || self.layer.is_gone() {
            return Err(io);
        }
        io.token |= PASSED;
        match self.inner.submit(io) {
            Ok(()) => {
                self.passthrough += 1;
                Ok(())
            }
            Err((Busy, mut io)) => {
                io.token &= !PASSED;
                Err(io)
            }
        }
    }

    /// Counts a completed read of [`LayerQueue::pass_read`]. `start` is its start time, if known.
    #[inline]
    pub fn count_read(&mut self, blocks: u32, status: Status, start: Option<Nanos>) {
        let bytes = self.layer.shape.bytes(blocks) as u64;
        let latency = self.now.0.saturating_sub(start.unwrap_or(self.woken).0);
        self.stats.completed(Op::Read, bytes, status, latency);
    }

    /// Call this before using a queue that was not polled for a while: the time of its last turn is
    /// stale.
    #[inline]
    pub fn rested(&mut self) {
        self.stale = true;
    }

    /// Starts an I/O that no limit delays.
    #[inline]
    #[allow(clippy::result_large_err)]
    pub(super) fn start(&mut self, io: Io) -> Result<(), (Busy, Io)> {
        let plan = if self.layer.is_gone() {
            Plan::Now(Status::Gone)
        } else {
            self.layer
                .shape
                .plan(&io, self.layer.blocks.load(Ordering::Relaxed))
        };
        match plan {
            Plan::Direct => self.direct(io),
            Plan::Now(status) => {
                self.answer(io, status);
                Ok(())
            }
            Plan::Job(recipe) => self.start_job(io, self.layer.recipe(recipe)),
        }
    }

    /// Completes an I/O without the module.
    pub(super) fn answer(&mut self, io: Io, status: Status) {
        let (slot, _) = self.take_slot(&io, NO_JOB, false);
        let pending = self.close_slot(slot, status);
        self.ready.push_back(pending.complete(status, io.data));
    }

    #[inline]
    #[allow(clippy::result_large_err)]
    fn direct(&mut self, mut io: Io) -> Result<(), (Busy, Io)> {
        let mut counted = false;
        if let Some(gate) = &mut self.gate
            && io.op.is_write()
        {
            counted = gate.begin_untracked();
            if !counted {
                let recipe = Recipe::Pieces(io.op);
                return self.start_job(io, recipe);
            }
        }
        let token = io.token;
        let (slot, generation) = self.take_slot(&io, NO_JOB, counted);
        io.token = direct_token(slot, generation);
        match self.inner.submit(io) {
            Ok(()) => Ok(()),
            Err((busy, mut io)) => {
                self.slots.remove(slot).pending.abandon();
                self.uncount(counted);
                self.stats.busy();
                io.token = token;
                Err((busy, io))
            }
        }
    }

    #[allow(clippy::result_large_err)]
    fn start_job(&mut self, io: Io, recipe: Recipe) -> Result<(), (Busy, Io)> {
        if self.jobs.len() >= MAX_JOBS {
            self.stats.busy();
            return Err((Busy, io));
        }
        let swap = recipe == Recipe::Swap;
        let mut tracked = false;
        let mut counted = false;
        if let Some(gate) = &mut self.gate
            && io.op.is_write()
        {
            counted = !swap && gate.begin_untracked();
            tracked = !counted;
        }
        let index = self.jobs.vacant_key();
        let (slot, _) = self.take_slot(&io, index as u32, counted);
        let mut job = Job::new(slot, io, recipe, &self.layer.shape);
        if tracked && let Some(gate) = &mut self.gate {
            let (lba, blocks) = job.range();
            job.ticket = Some(gate.enter(lba, blocks, swap, self.now));
            job.stage = Stage::Gate;
        }
        self.jobs.insert(job);
        self.advance(index);
        Ok(())
    }

    #[inline]
    fn take_slot(&mut self, io: &Io, job: u32, counted: bool) -> (usize, u32) {
        self.generation = self.generation.wrapping_add(1) & GENERATION_MASK;
        let slot = self.slots.insert(Slot {
            pending: Pending::new(io.token),
            generation: self.generation,
            op: io.op,
            counted,
            blocks: io.blocks,
            job,
            start: self.arrived.or_else(|| (!self.stale).then_some(self.now)),
        });
        (slot, self.generation)
    }

    fn uncount(&mut self, counted: bool) {
        if counted && let Some(gate) = &mut self.gate {
            gate.end_untracked();
        }
    }

    /// Counts an I/O as completed, and returns the submitter's token.
    #[inline]
    fn close_slot(&mut self, index: usize, status: Status) -> Pending {
        let slot = self.slots.remove(index);
        self.uncount(slot.counted);
        let bytes = self.layer.shape.bytes(slot.blocks) as u64;
        let latency = self
            .now
            .0
            .saturating_sub(slot.start.unwrap_or(self.woken).0);
        self.stats.completed(slot.op, bytes, status, latency);
        slot.pending
    }

    /// Advances a job until it has to wait.
    fn advance(&mut self, index: usize) {
        loop {
            let job = &mut self.jobs[index];
            if job.held.is_some() {
                return;
            }
            if job.stage == Stage::Gate {
                let granted = match (&job.ticket, &self.gate) {
                    (Some(ticket), Some(gate)) => gate.granted(ticket),
                    _ => true,
                };
                if !granted && !job.is_over() {
                    self.parked.push_back(index);
                    return;
                }
                job.stage = Stage::Work;
            }
            match job.step(&self.layer.shape, &mut self.memory, &self.pool) {
                Step::Submit(mut io) => {
                    let generation = self.slots[job.slot].generation;
                    io.token = child_token(index, io.token as u8, generation);
                    if let Err((Busy, io)) = self.inner.submit(io) {
                        job.held = Some(io);
                        self.waiting.push_back(index);
                        return;
                    }
                }
                Step::Park => {
                    self.parked.push_back(index);
                    return;
                }
                Step::Wait => return,
                Step::Finished(status) => {
                    self.finish(index, status);
                    return;
                }
            }
        }
    }

    fn finish(&mut self, index: usize, status: Status) {
        let mut job = self.jobs.remove(index);
        if let (Some(ticket), Some(gate)) = (job.ticket.take(), &mut self.gate) {
            gate.leave(ticket, self.now);
        }
        let pending = self.close_slot(job.slot, status);
        let data = job.into_data(&mut self.memory);
        self.ready.push_back(pending.complete(status, data));
    }

    fn child_done(&mut self, ended: Completion) {
        let (index, ordinal, generation) = split_child_token(ended.token);
        let known = self.jobs.get_mut(index).filter(|job| {
            self.slots
                .get(job.slot)
                .is_some_and(|slot| slot.generation == generation)
        });
        let Some(job) = known else {
            return self.stray(ended.token);
        };
        job.child_done(
            ordinal,
            ended,
            &self.layer.shape,
            &mut self.memory,
            &self.pool,
        );
        if job.is_refused() {
            self.layer.note_refusal();
        }
        self.advance(index);
    }

    #[cold]
    fn stray(&self, token: Token) {
        debug_assert!(false, "the module answered {token:#x}, which is no request");
        let bdev = self.layer.name();
        tracing::error!(
            bdev,
            token,
            "the module answered an unknown request, or one request twice"
        );
    }

    /// Continues jobs that waited for the module, a range or memory. Returns true if any did.
    fn resume(&mut self) -> bool {
        let gone = self.layer.is_gone();
        let any = !self.waiting.is_empty() || !self.parked.is_empty();
        while let Some(&index) = self.waiting.front() {
            if gone {
                self.jobs[index].fail(Status::Gone);
            }
            if let Some(io) = self.jobs[index].held.take()
                && let Err((Busy, io)) = self.inner.submit(io)
            {
                self.jobs[index].held = Some(io);
                break;
            }
            self.waiting.pop_front();
            self.advance(index);
        }
        for _ in 0..self.parked.len() {
            let Some(index) = self.parked.pop_front() else {
                break;
            };
            if gone {
                self.jobs[index].fail(Status::Gone);
            }
            self.advance(index);
        }
        any
    }

    fn hand_over(&mut self, done: &mut Done) {
        while done.has_room()
            && let Some(completion) = self.ready.pop_front()
        {
            done.push(completion);
        }
    }

    /// Lets the module write into the caller's list, then translates tokens in place.
    fn collect(&mut self, done: &mut Done) {
        let mut at = done.len();
        self.inner.poll(self.now, done);
        while let Some(completion) = done.get_mut(at) {
            let token = completion.token;
            if is_child(token) {
                let ended = done.swap_remove(at);
                self.child_done(ended);
                continue;
            }
            if token & PASSED != 0 {
                completion.token = token & !PASSED;
                self.passthrough -= 1;
                at += 1;
                continue;
            }
            let (index, generation) = split_direct_token(token);
            match self.slots.get(index) {
                Some(slot) if slot.generation == generation && slot.job == NO_JOB => {
                    let status = completion.status;
                    completion.token = self.close_slot(index, status).abandon();
                    at += 1;
                }
                _ => {
                    done.swap_remove(at);
                    self.stray(token);
                }
            }
        }
    }

    fn turn(&mut self, now: Nanos) {
        self.now = now;
        if self.stale {
            (self.stale, self.woken) = (false, now);
            self.throttle.woken(now);
        }
        self.stats.turn(self.slots.len() + self.passthrough);
        if let Some(gate) = &mut self.gate {
            gate.turn(now);
        }
    }
}

impl Queue for LayerQueue {
    #[inline]
    fn submit(&mut self, io: Io) -> Result<(), (Busy, Io)> {
        if self.is_full() {
            self.stats.busy();
            return Err((Busy, io));
        }
        if self.throttle.is_active() {
            return self.submit_limited(io);
        }
        self.start(io)
    }

    /// Executes an operation that the module supports synchronously and that no limit delays. Its
    /// time is not measured.
    fn run_sync(&mut self, io: &mut Io, zero_copy: &mut Option<MemoryView>) -> Option<Status> {
        if self.is_full() || self.throttle.is_active() || self.layer.is_gone() {
            return None;
        }
        let total = self.layer.blocks.load(Ordering::Relaxed);
        let shape = &self.layer.shape;
        if !shape.is_plain(io, total) && shape.plan(io, total) != Plan::Direct {
            return None;
        }
        let mut counted = false;
        if let Some(gate) = &mut self.gate
            && io.op.is_write()
        {
            counted = gate.begin_untracked();
            if !counted {
                return None;
            }
        }
        let status = self.inner.run_sync(io, zero_copy);
        self.uncount(counted);
        let status = status?;
        let bytes = self.layer.shape.bytes(io.blocks) as u64;
        if status.is_ok() {
            self.stats.ran_sync(io.op, bytes)
        } else {
            self.stats.completed(io.op, bytes, status, 0)
        }
        Some(status)
    }

    fn poll(&mut self, now: Nanos, done: &mut Done) -> usize {
        let before = done.len();
        self.turn(now);
        if self.throttle.holds() {
            self.release_held();
        }
        self.hand_over(done);
        self.collect(done);
        if self.resume() {
            // I/O that can continue now must reach the device in this turn.
            self.collect(done);
        }
        self.hand_over(done);
        done.len() - before
    }

    fn abort(&mut self, token: Token) -> bool {
        let found = self
            .slots
            .iter()
            .find(|(_, slot)| slot.pending.token() == token);
        let Some((index, slot)) = found else {
            return if self.passthrough > 0
                && token & (CHILD | PASSED) == 0
                && self.inner.abort(token | PASSED)
            {
                true
            } else {
                self.abort_held(token)
            };
        };
        if slot.job == NO_JOB {
            return self.inner.abort(direct_token(index, slot.generation));
        }
        let (job_index, generation) = (slot.job as usize, slot.generation);
        let job = &mut self.jobs[job_index];
        if !job.abort() {
            return false;
        }
        for ordinal in job.under_way() {
            self.inner
                .abort(child_token(job_index, ordinal, generation));
        }
        self.waiting.retain(|index| *index != job_index);
        self.parked.retain(|index| *index != job_index);
        self.advance(job_index);
        true
    }

    fn inflight(&self) -> usize {
        self.slots.len() + self.passthrough + self.ready.len() + self.throttle.len()
    }

    fn is_settled(&self) -> bool {
        self.inflight() == 0 && self.inner.is_settled()
    }

    fn reserve(&mut self, request: Reserve) -> Result<(), Reserve> {
        self.inner.reserve(request)
    }

    fn arm(&mut self, now: Nanos) -> Idle {
        self.stats.turn(self.slots.len() + self.passthrough);
        if !self.ready.is_empty() || !self.parked.is_empty() {
            return Idle::Busy;
        }
        if !self.waiting.is_empty() && self.inner.inflight() == 0 {
            // No completion of the module will wake this core, and the module has space again.
            return Idle::Busy;
        }
        self.stale = true;
        let held = self.throttle.arm(now, self.inner.inflight() > 0);
        held.and(self.inner.arm(now))
    }

    fn disarm(&mut self) {
        self.inner.disarm();
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner.wake_fd()
    }
}

impl Drop for LayerQueue {
    fn drop(&mut self) {
        for slot in self.slots.drain() {
            slot.pending.abandon();
        }
    }
}

// Tokens towards the module. Bit 63 separates a child of a job from a whole I/O. The generation
// separates a duplicate completion from the completion of the next I/O in the same slot.
//
//   direct   0 | generation:31 | 0 | slot:31
//   passed   0 | its submitter's:31 | 1 | its submitter's:31
//   child    1 | generation:31 | ordinal:8 | job:24

const CHILD: u64 = 1 << 63;
const PASSED: u64 = 1 << 31;
const GENERATION_MASK: u32 = 0x7FFF_FFFF;

fn direct_token(slot: usize, generation: u32) -> Token {
    u64::from(generation) << 32 | slot as u64
}

fn split_direct_token(token: Token) -> (usize, u32) {
    ((token & 0xFFFF_FFFF) as usize, (token >> 32) as u32)
}

fn child_token(job: usize, ordinal: u8, generation: u32) -> Token {
    CHILD | u64::from(generation) << 32 | u64::from(ordinal) << 24 | job as u64
}

fn is_child(token: Token) -> bool {
    token & CHILD != 0
}

fn split_child_token(token: Token) -> (usize, u8, u32) {
    let generation = (token >> 32) as u32 & GENERATION_MASK;
    (
        (token & 0xFF_FFFF) as usize,
        (token >> 24) as u8,
        generation,
    )
}
