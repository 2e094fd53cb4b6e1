//! A worker: a thread, pinned if the job names cores, that polls its lanes. It does not sleep
//! during a phase of the run; it does while its queues connect and while it waits for other
//! workers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use nacre_bdev::Done;
use nacre_reactor::{Clock, Nanos};
use rustix::thread::{CpuSet, sched_setaffinity};
use rustix::time::{ClockId, clock_gettime};

use super::job::{Job, Limit, Verify};
use super::lane::{Lane, Load, Phase};
use super::report::Tally;

/// Interval of the progress updates.
const SHOW_EVERY: Duration = Duration::from_millis(10);

/// Progress of a running worker, read by the main thread.
#[derive(Debug, Default)]
pub(crate) struct Shown {
    /// Completed I/Os of the phase.
    pub ios: AtomicU64,
    /// Bytes of the measured I/Os.
    pub bytes: AtomicU64,
    /// Failed I/Os and wrong blocks of all phases.
    pub errors: AtomicU64,
    /// The index of the [`Phase`] in [`phases`].
    pub phase: AtomicUsize,
    /// Progress of the phase, in thousandths.
    pub permille: AtomicU64,
    /// True during the measured part of the run.
    pub measuring: AtomicBool,
}

/// The state shared by all workers of a run.
pub(crate) struct RunState {
    /// Ends the run early: set by the user, or by a worker after a failure.
    pub stop: AtomicBool,
    /// A worker ended early: the others must not wait for it.
    pub broken: AtomicBool,
    arrived: AtomicUsize,
    members: usize,
    pub shown: Box<[Shown]>,
}

impl RunState {
    pub(crate) fn new(members: usize) -> Arc<Self> {
        Arc::new(Self {
            stop: AtomicBool::new(false),
            broken: AtomicBool::new(false),
            arrived: AtomicUsize::new(0),
            members,
            shown: (0..members).map(|_| Shown::default()).collect(),
        })
    }

    /// A barrier: waits until every worker has called it for the `round`-th time, and calls `idle`
    /// meanwhile. Returns false if a worker has failed.
    fn meet(&self, round: usize, mut idle: impl FnMut()) -> bool {
        self.arrived.fetch_add(1, Ordering::AcqRel);
        while self.arrived.load(Ordering::Acquire) < self.members * round {
            if self.broken.load(Ordering::Acquire) {
                return false;
            }
            idle();
            std::thread::sleep(Duration::from_micros(50));
        }
        !self.broken.load(Ordering::Acquire)
    }

    fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

/// Guards the thread of a worker. Dropped before `finished` is set (an error or a panic), it stops
/// the run and releases the other workers from the barrier.
pub(crate) struct Member<'a> {
    pub crew: &'a RunState,
    pub finished: bool,
}

impl Drop for Member<'_> {
    fn drop(&mut self) {
        if !self.finished {
            self.crew.broken.store(true, Ordering::Release);
            self.crew.stop.store(true, Ordering::Release);
        }
    }
}

/// The error of a worker.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WorkerError {
    #[error("cannot run on core {core}: {why}")]
    Pin { core: usize, why: String },
    #[error("I/O queue {qid} could not be connected within {limit:?}{}", after(.why))]
    Connect {
        qid: u16,
        limit: Duration,
        why: Option<String>,
    },
    #[error(
        "I/O queue {qid} was refused by the target: {why}; ask for fewer with --queues, or raise the target's limit of \
         connections"
    )]
    Refused { qid: u16, why: String },
    #[error("the run was stopped before I/O queue {qid} was connected")]
    Stopped { qid: u16 },
}

fn after(why: &Option<String>) -> String {
    why.as_ref().map_or(String::new(), |why| format!(": {why}"))
}

/// Pins the calling thread to `core`.
pub(crate) fn pin(core: usize) -> Result<(), WorkerError> {
    let refuse = |why: String| WorkerError::Pin { core, why };
    if core >= CpuSet::MAX_CPU {
        return Err(refuse(format!("the largest is {}", CpuSet::MAX_CPU - 1)));
    }
    let mut set = CpuSet::new();
    set.set(core);
    sched_setaffinity(None, &set).map_err(|errno| refuse(errno.to_string()))
}

/// The phases of a run.
pub(crate) fn phases(job: &Job) -> &'static [Phase] {
    match job.verify {
        Verify::Off => &[Phase::Run],
        Verify::Only => &[Phase::Scan],
        // Runs with reads fill first, so that the contents are known before they are read.
        Verify::On if job.read_percent() > 0 => &[Phase::Fill, Phase::Run, Phase::ReadBack],
        Verify::On => &[Phase::Run, Phase::ReadBack],
    }
}

/// The lanes of one thread, and the parameters that they share. `index` counts the threads from 0.
pub(crate) struct Worker<'a, Q> {
    pub index: usize,
    pub job: &'a Job,
    pub crew: &'a RunState,
    pub clock: Clock,
    pub lanes: Vec<Lane<Q>>,
}

impl<Q: Load> Worker<'_, Q> {
    /// Connects the lanes, then runs the phases, each together with the other workers.
    pub(crate) fn run(mut self, limit: Duration) -> Result<Tally, WorkerError> {
        let mut done = Done::with_capacity(usize::from(self.job.options.depth).max(64));
        let mut tally = Tally::new();
        self.connect(limit, &mut done, &mut tally)?;
        for (place, phase) in phases(self.job).iter().enumerate() {
            // Poll the queues while waiting, so that their connections stay alive.
            let (lanes, clock) = (&mut self.lanes, &self.clock);
            let together = self.crew.meet(place + 1, || {
                let now = clock.now();
                for lane in &mut *lanes {
                    lane.poll(now, &mut done, &mut tally, false);
                }
            });
            if !together {
                break;
            }
            let shown = &self.crew.shown[self.index];
            shown.phase.store(place, Ordering::Relaxed);
            self.phase(*phase, &mut done, &mut tally);
        }
        for lane in &self.lanes {
            tally.unfinished += lane.inflight() as u64;
            let connection_counts = lane.queue().connection_counts();
            tally.connections_lost += connection_counts.losses;
            tally.resent += connection_counts.resent;
            tally.moves += connection_counts.moves;
        }
        Ok(tally)
    }

    fn connect(
        &mut self,
        limit: Duration,
        done: &mut Done,
        tally: &mut Tally,
    ) -> Result<(), WorkerError> {
        let start = self.clock.now();
        loop {
            let now = self.clock.now();
            let mut missing = None;
            for lane in &mut self.lanes {
                lane.poll(now, done, tally, false);
                let queue = lane.queue();
                let qid = queue.qid();
                if let Some(why) = queue.refusal() {
                    let why = why.to_owned();
                    return Err(WorkerError::Refused { qid, why });
                }
                if !queue.is_live() {
                    missing = missing.or_else(|| Some((qid, queue.failure())));
                }
            }
            let Some((qid, why)) = missing else {
                return Ok(());
            };
            if self.crew.stopped() {
                return Err(WorkerError::Stopped { qid });
            }
            if now.since(start) > limit {
                let why = why.map(str::to_owned);
                return Err(WorkerError::Connect { qid, limit, why });
            }
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    fn phase(&mut self, phase: Phase, done: &mut Done, tally: &mut Tally) {
        let begin = self.clock.now();
        let mut pace = Pace::new(self.job, self.index, self.crew.members, phase, begin);
        let mut warming = phase == Phase::Run && !self.job.options.warmup.is_zero();
        let warm_at = begin + self.job.options.warmup;
        let mut measured_from = begin;
        let mut cpu_from = cpu_time();
        let measured_phase = matches!(phase, Phase::Run | Phase::Scan);
        let mut show_at = begin;
        let shown = &self.crew.shown[self.index];
        let is_measuring = |on| shown.measuring.store(on, Ordering::Relaxed);
        is_measuring(measured_phase && !warming);
        let (mut ios, mut over) = (0u64, false);
        let mut last_back = begin;
        self.lanes.iter_mut().for_each(Lane::begin);
        while !over {
            let now = self.clock.now();
            if warming && now >= warm_at {
                warming = false;
                tally.restart();
                measured_from = now;
                cpu_from = cpu_time();
                is_measuring(measured_phase);
            }
            over = pace.is_over(now) || self.crew.stopped();
            let mut more = false;
            let mut under_way = 0;
            for lane in &mut self.lanes {
                let back = lane.poll(now, done, tally, measured_phase && !warming);
                if back > 0 {
                    last_back = now;
                    ios += back as u64;
                }
                if !over {
                    let budget = pace.budget(now);
                    let (started, goes_on) = lane.submit(phase, now, budget);
                    pace.spent(started);
                    more |= goes_on;
                    under_way += lane.inflight();
                }
            }
            // A phase that visits all units ends when all I/Os have completed.
            over |= !more && under_way == 0;
            if pace.is_used_up() && under_way == 0 {
                over = true;
            }
            if now >= show_at || over {
                show_at = now + SHOW_EVERY;
                self.show(shown, tally, ios, &pace, now);
                if self.must_stop(tally) {
                    self.crew.stop.store(true, Ordering::Relaxed);
                    over = true;
                }
            }
        }
        if measured_phase {
            // Measure until the last completion if the number of I/Os is fixed, otherwise until the
            // time is up.
            let end = match self.job.limit {
                Limit::Time(_) if phase == Phase::Run => self.clock.now(),
                _ => last_back,
            };
            tally.measured = end.since(measured_from);
            tally.cpu = cpu_time().saturating_sub(cpu_from);
            is_measuring(false);
        }
        self.drain(done, tally);
    }

    /// Waits for I/O in flight, at most for `drain`.
    fn drain(&mut self, done: &mut Done, tally: &mut Tally) {
        let begin = self.clock.now();
        self.lanes.iter_mut().for_each(Lane::drop_held);
        while self.lanes.iter().any(|lane| lane.inflight() > 0) {
            let now = self.clock.now();
            if now.since(begin) > self.job.drain {
                return;
            }
            for lane in &mut self.lanes {
                lane.poll(now, done, tally, false);
            }
        }
    }

    fn must_stop(&self, tally: &Tally) -> bool {
        !self.job.options.keep_going && (!tally.errors.is_empty() || tally.verify.blocks_wrong > 0)
    }

    #[inline]
    fn show(&self, shown: &Shown, tally: &Tally, ios: u64, pace: &Pace, now: Nanos) {
        shown.ios.store(ios, Ordering::Relaxed);
        let bytes = tally.read.bytes + tally.write.bytes;
        shown.bytes.store(bytes, Ordering::Relaxed);
        let errors = tally.errors.values().sum::<u64>() + tally.verify.blocks_wrong;
        shown.errors.store(errors, Ordering::Relaxed);
        let permille = pace.permille(now).unwrap_or_else(|| {
            let (units, gone) = self.lanes.iter().fold((0, 0), |sum, lane| {
                let (units, gone) = lane.position();
                (sum.0 + units, sum.1 + gone)
            });
            gone * 1000 / units.max(1)
        });
        shown.permille.store(permille.min(1000), Ordering::Relaxed);
    }
}

/// Processor time of the calling thread so far.
fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    let (seconds, nanos) = (time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs());
    Duration::from_secs(seconds) + Duration::from_nanos(nanos)
}

/// Limits how many I/Os may start, and decides when the phase is over.
struct Pace {
    begin: Nanos,
    end: Option<Nanos>,
    /// Number of I/Os that may still start.
    left: u64,
    total: u64,
    /// I/Os per second.
    rate: Option<u64>,
    /// Most I/Os to catch up after a delay.
    burst: u64,
    started: u64,
}

impl Pace {
    fn new(job: &Job, index: usize, workers: usize, phase: Phase, begin: Nanos) -> Self {
        // Divide without losing the remainder.
        let share = |total: u64| {
            let (n, i) = (workers as u64, index as u64);
            total / n + u64::from(i < total % n)
        };
        let (end, left) = match (phase, job.limit) {
            (Phase::Run, Limit::Time(time)) => (Some(begin + job.options.warmup + time), u64::MAX),
            (Phase::Run, Limit::Ios(ios)) => (None, share(ios)),
            _ => (None, u64::MAX),
        };
        Self {
            begin,
            end,
            left,
            total: left,
            rate: job.options.rate.map(|rate| share(rate).max(1)),
            burst: u64::from(job.options.depth) * u64::from(job.queues),
            started: 0,
        }
    }

    #[inline]
    fn is_over(&self, now: Nanos) -> bool {
        self.end.is_some_and(|end| now >= end)
    }

    fn is_used_up(&self) -> bool {
        self.left == 0
    }

    #[inline]
    fn budget(&mut self, now: Nanos) -> u64 {
        let Some(rate) = self.rate else {
            return self.left;
        };
        let nanos = now.since(self.begin).as_nanos();
        let due = (nanos * u128::from(rate) / 1_000_000_000) as u64 + 1;
        // Catch up only in part after a delay.
        self.started = self.started.max(due.saturating_sub(self.burst));
        self.left.min(due.saturating_sub(self.started))
    }

    #[inline]
    fn spent(&mut self, started: u64) {
        self.left -= started;
        self.started += started;
    }

    /// `None`: the phase depends neither on time nor on a number.
    fn permille(&self, now: Nanos) -> Option<u64> {
        let part = |gone: u128, all: u128| (gone * 1000 / all.max(1)) as u64;
        match self.end {
            Some(end) => {
                let (gone, all) = (now.since(self.begin), end.since(self.begin));
                Some(part(gone.as_nanos(), all.as_nanos()))
            }
            None if self.total != u64::MAX => {
                let gone = self.total - self.left;
                Some(part(gone.into(), self.total.into()))
            }
            None => None,
        }
    }
}
