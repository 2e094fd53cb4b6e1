//! The layer that every user of a block device works through: it makes any module's queue complete.
//!
//! ```text
//!   nvmf namespace, volume, perf tool
//!        │ submit(Io) / poll            ranges and buffers checked, statistics, latencies
//!   LayerQueue ── plan ──> Direct ──────────────────────────────┐   one slot, a few adds
//!        │            └──> Job: pieces, emulation, FUA ──> child │   bounded, never an error
//!        │                  └─ Gate: compare-and-write           │
//!   the module's queue <────────────────────────────────────────┘
//! ```
//!
//! What it does: refuses what lies outside the device; splits what is larger than the module takes or
//! crosses its boundaries; emulates compare, compare-and-write, write zeroes, copy, and FUA by a
//! flush; holds children back while the module is busy. What it does not do: unmap in the place of a
//! module that cannot (a host asks for it to release space; writing zeroes would do the opposite), and
//! retry (only the user above knows whether another path is better).

mod gate;
mod job;
mod plan;
#[cfg(test)]
mod poor;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nacre_hugepages::Pool;
use nacre_reactor::{Idle, Nanos};
use slab::Slab;
use uuid::Uuid;

use self::gate::{Gate, GateQueue};
use self::job::{Job, Memory, Stage, Step};
use self::plan::{Plan, Recipe, Shape};
use crate::device::{Bdev, Geometry, Limits, OpenError, Support};
use crate::io::{Completion, Io, Op, Status, Token};
use crate::pending::Pending;
use crate::queue::{Busy, Done, Queue};
use crate::stats::{DeviceStats, StatWriter};

/// I/Os of one queue that may be jobs at once. A job is large in itself; sixteen with eight pieces
/// each are more than the queue depth of any device.
const MAX_JOBS: usize = 16;
/// Bytes of a bounce buffer: large enough that an emulated copy is bound by the device, small enough
/// that two per queue and device do not matter.
const BOUNCE: usize = 64 * 1024;

/// A module's device with the layer on top: one per device, itself a device.
pub struct Layer {
    bdev: Arc<dyn Bdev>,
    shape: Shape,
    /// The size by which ranges are checked; see [`Layer::refresh`].
    blocks: AtomicU64,
    gone: AtomicBool,
    stats: Arc<DeviceStats>,
    /// Where compare-and-write is emulated.
    gate: Option<Arc<Gate>>,
    opens: Arc<Opens>,
}

impl Layer {
    pub fn new(bdev: Arc<dyn Bdev>) -> Arc<Layer> {
        let shape = Shape::of(&*bdev);
        let swaps = shape.support(Op::CompareAndWrite) == Support::Emulated && !shape.read_only;
        Arc::new(Layer {
            blocks: AtomicU64::new(bdev.geometry().blocks),
            gone: AtomicBool::new(false),
            stats: Arc::default(),
            opens: Arc::default(),
            gate: swaps.then(Arc::default),
            shape,
            bdev,
        })
    }

    /// The device below.
    pub fn module(&self) -> &Arc<dyn Bdev> {
        &self.bdev
    }

    pub fn stats(&self) -> &Arc<DeviceStats> {
        &self.stats
    }

    /// Takes over the module's size. Answers it if it was another before.
    pub fn refresh(&self) -> Option<u64> {
        let now = self.bdev.geometry().blocks;
        (self.blocks.swap(now, Ordering::Relaxed) != now).then_some(now)
    }

    /// From now on everything is answered [`Status::Gone`]; what the module has taken ends as it
    /// ends there.
    pub fn set_gone(&self) {
        self.gone.store(true, Ordering::Relaxed);
    }

    pub fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Relaxed)
    }

    /// As [`Bdev::open`], but of the type itself, for calls without indirection.
    pub fn open_queue(self: &Arc<Layer>, pool: &Pool) -> Result<LayerQueue, OpenError> {
        let memory = self.memory(pool)?;
        let ModuleQueue { inner, open } = self.open_module(pool)?;
        Ok(LayerQueue {
            inner,
            gate: self.gate.as_ref().map(Gate::join),
            depth: (self.bdev.limits().queue_depth as usize).max(1),
            slots: Slab::with_capacity(16),
            jobs: Slab::new(),
            waiting: VecDeque::new(),
            parked: VecDeque::new(),
            ready: VecDeque::with_capacity(16),
            generation: 0,
            now: Nanos::ZERO,
            woken: Nanos::ZERO,
            stale: true,
            stats: self.stats.writer(),
            memory,
            pool: pool.clone(),
            layer: Arc::clone(self),
            _open: open,
        })
    }

    /// The module's own queue, for a device stacked on this one.
    pub fn open_module(&self, pool: &Pool) -> Result<ModuleQueue, OpenError> {
        // Counted before looking: a removal either sees this queue, or is seen here.
        let open = self.opens.open();
        if self.is_gone() {
            return Err(OpenError {
                bdev: self.name().to_owned(),
                what: "open a queue of a device that is being removed".to_owned(),
                source: std::io::ErrorKind::NotFound.into(),
            });
        }
        let inner = Arc::clone(&self.bdev).open(pool)?;
        Ok(ModuleQueue { inner, open })
    }

    /// How many queues are open now, on all cores.
    pub fn open_queues(&self) -> usize {
        self.opens.lock().count
    }

    /// Calls `call` as soon as no queue is open.
    pub fn when_closed(&self, call: Box<dyn FnOnce() + Send>) {
        let mut state = self.opens.lock();
        if state.count > 0 {
            state.calls.push(call);
            return;
        }
        drop(state);
        call();
    }

    fn memory(&self, pool: &Pool) -> Result<Memory, OpenError> {
        if !self.shape.bounces() {
            return Ok(Memory::none());
        }
        let block = self.shape.block_size as usize;
        let len = BOUNCE.max(block).min(pool.max_len()) / block * block;
        let reserved = if len > 0 {
            Memory::reserve(pool, len)
        } else {
            None
        };
        reserved.ok_or_else(|| OpenError {
            bdev: self.bdev.name().to_owned(),
            what: format!(
                "reserve 2 buffers of {} bytes to emulate what the module lacks (give the core a larger pool)",
                len.max(block)
            ),
            source: std::io::ErrorKind::OutOfMemory.into(),
        })
    }
}

impl Bdev for Layer {
    fn name(&self) -> &str {
        self.bdev.name()
    }

    fn product_name(&self) -> &'static str {
        self.bdev.product_name()
    }

    fn uuid(&self) -> Uuid {
        self.bdev.uuid()
    }

    fn geometry(&self) -> Geometry {
        Geometry {
            blocks: self.blocks.load(Ordering::Relaxed),
            ..self.bdev.geometry()
        }
    }

    /// The module's, but for what the layer splits.
    fn limits(&self) -> Limits {
        let limits = self.bdev.limits();
        Limits {
            max_blocks: u32::MAX,
            max_unmap_blocks: u64::MAX,
            ..limits
        }
    }

    fn supports(&self, op: Op) -> Support {
        self.shape.support(op)
    }

    /// Natively or by a flush.
    fn native_fua(&self) -> bool {
        true
    }

    fn open(self: Arc<Self>, pool: &Pool) -> Result<Box<dyn Queue>, OpenError> {
        Ok(Box::new(self.open_queue(pool)?))
    }

    fn bases(&self) -> Vec<String> {
        self.bdev.bases()
    }

    fn driver_specific(&self) -> serde_json::Value {
        self.bdev.driver_specific()
    }
}

/// Counts the queues of a device.
#[derive(Default)]
struct Opens {
    state: Mutex<OpensState>,
}

#[derive(Default)]
struct OpensState {
    count: usize,
    calls: Vec<Box<dyn FnOnce() + Send>>,
}

impl Opens {
    fn open(self: &Arc<Opens>) -> Open {
        self.lock().count += 1;
        Open {
            opens: Arc::clone(self),
        }
    }

    fn lock(&self) -> MutexGuard<'_, OpensState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A queue is open.
struct Open {
    opens: Arc<Opens>,
}

impl Drop for Open {
    fn drop(&mut self) {
        let mut state = self.opens.lock();
        state.count -= 1;
        if state.count == 0 {
            let calls = std::mem::take(&mut state.calls);
            drop(state);
            calls.into_iter().for_each(|call| call());
        }
    }
}

/// A module's own queue, counted as open.
pub struct ModuleQueue {
    // In this order: closed first, then counted as closed.
    inner: Box<dyn Queue>,
    open: Open,
}

impl Queue for ModuleQueue {
    fn submit(&mut self, io: Io) -> Result<(), (Busy, Io)> {
        self.inner.submit(io)
    }

    fn poll(&mut self, now: Nanos, done: &mut Done) -> usize {
        self.inner.poll(now, done)
    }

    fn abort(&mut self, token: Token) -> bool {
        self.inner.abort(token)
    }

    fn inflight(&self) -> usize {
        self.inner.inflight()
    }

    fn arm(&mut self, now: Nanos) -> Idle {
        self.inner.arm(now)
    }

    fn disarm(&mut self) {
        self.inner.disarm();
    }

    fn wake_fd(&self) -> Option<RawFd> {
        self.inner.wake_fd()
    }
}

/// One core's way to a device through the layer.
pub struct LayerQueue {
    // First, so dropped first: after this the device touches no buffer, and the gate may open.
    inner: Box<dyn Queue>,
    gate: Option<GateQueue>,
    depth: usize,
    /// Every I/O that was taken and not yet answered.
    slots: Slab<Slot>,
    jobs: Slab<Job>,
    /// Jobs with a child that the module was too busy for, in order.
    waiting: VecDeque<usize>,
    /// Jobs that wait for their range or for memory.
    parked: VecDeque<usize>,
    /// Answers that the module has no part in, or that found no room.
    ready: VecDeque<Completion>,
    generation: u32,
    now: Nanos,
    /// The first turn after the last sleep.
    woken: Nanos,
    /// The reactor may have slept since `now`.
    stale: bool,
    stats: StatWriter,
    memory: Memory,
    pool: Pool,
    layer: Arc<Layer>,
    // Last, so dropped last: whoever waits for the queues to be closed finds nothing left of them.
    _open: Open,
}

struct Slot {
    pending: Pending,
    generation: u32,
    op: Op,
    /// In the gate as an untracked write.
    counted: bool,
    blocks: u32,
    /// The slot's job, or [`NO_JOB`].
    job: u32,
    /// `None`: submitted while the time was unknown, that is before the turn at `woken`.
    start: Option<Nanos>,
}

const NO_JOB: u32 = u32::MAX;

impl LayerQueue {
    /// The device that this is a queue of.
    pub fn layer(&self) -> &Arc<Layer> {
        &self.layer
    }

    fn is_full(&self) -> bool {
        // Behind a job that the module had no place for, everybody queues up: it would starve.
        self.slots.len() + self.ready.len() >= self.depth || !self.waiting.is_empty()
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

    fn take_slot(&mut self, io: &Io, job: u32, counted: bool) -> (usize, u32) {
        self.generation = self.generation.wrapping_add(1) & GENERATION_MASK;
        let slot = self.slots.insert(Slot {
            pending: Pending::new(io.token),
            generation: self.generation,
            op: io.op,
            counted,
            blocks: io.blocks,
            job,
            start: (!self.stale).then_some(self.now),
        });
        (slot, self.generation)
    }

    fn uncount(&mut self, counted: bool) {
        if counted && let Some(gate) = &mut self.gate {
            gate.end_untracked();
        }
    }

    /// Counts an I/O as done and says what its submitter called it.
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

    /// Takes a job as far as it goes now.
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
        job.child_done(ordinal, ended, &self.layer.shape, &mut self.memory);
        self.advance(index);
    }

    #[cold]
    fn stray(&self, token: Token) {
        debug_assert!(false, "the module answered {token:#x}, which nobody asked");
        let bdev = self.layer.name();
        tracing::error!(
            bdev,
            token,
            "the module answered a request that nobody made, or twice"
        );
    }

    /// Lets jobs go on that the module, a range or memory held up. Says whether any was there.
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

    /// Has the module write into the caller's list, then translates it in place.
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
        }
        self.stats.turn(self.slots.len());
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
        let plan = match self.layer.is_gone() {
            true => Plan::Now(Status::Gone),
            false => self
                .layer
                .shape
                .plan(&io, self.layer.blocks.load(Ordering::Relaxed)),
        };
        match plan {
            Plan::Direct => self.direct(io),
            Plan::Now(status) => {
                let (slot, _) = self.take_slot(&io, NO_JOB, false);
                let pending = self.close_slot(slot, status);
                self.ready.push_back(pending.complete(status, io.data));
                Ok(())
            }
            Plan::Job(recipe) => self.start_job(io, recipe),
        }
    }

    fn poll(&mut self, now: Nanos, done: &mut Done) -> usize {
        let before = done.len();
        self.turn(now);
        self.hand_over(done);
        self.collect(done);
        if self.resume() {
            // What could go on now shall reach the device in this turn.
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
            return false;
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
        self.slots.len() + self.ready.len()
    }

    fn arm(&mut self, now: Nanos) -> Idle {
        self.stats.turn(self.slots.len());
        if !self.ready.is_empty() || !self.parked.is_empty() {
            return Idle::Busy;
        }
        self.stale = true;
        self.inner.arm(now)
    }

    fn disarm(&mut self) {
        self.inner.disarm();
    }

    fn wake_fd(&self) -> Option<RawFd> {
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

// Tokens towards the module. Bit 63 tells a child of a job from a whole I/O; the generation tells an
// answer that came twice from the answer to the next I/O in the same slot.
//
//   direct   0 | generation:31 | slot:32
//   child    1 | generation:31 | ordinal:8 | job:24

const CHILD: u64 = 1 << 63;
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
