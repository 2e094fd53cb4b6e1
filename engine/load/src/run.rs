//! Runs a job: divides it over worker threads, reports progress, and adds up their results.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use nacre_hugepages::{ClassSpec, Pool};
use nacre_reactor::{Clock, Nanos};

use super::error::PerfError;
use super::job::{Area, Job};
use super::lane::{Lane, Load, Namespace, Phase};
use super::report::Tally;
use super::worker::{Member, RunState, Worker, WorkerError, phases, pin};

/// Interval at which the main thread polls the controller.
const TICK: Duration = Duration::from_millis(10);

/// Progress of a run.
#[derive(Debug, Clone, Default)]
pub struct Progress {
    /// The phase of the slowest worker: `filling`, `running`, `reading back` or `verifying`.
    pub phase: &'static str,
    /// Progress of that worker in the phase, in thousandths.
    pub permille: u64,
    /// Completed I/Os of the current phase.
    pub ios: u64,
    /// Bytes of the measured I/Os.
    pub bytes: u64,
    /// Failed I/Os and wrong blocks of all phases.
    pub errors: u64,
    /// True while every load thread is in the measured part.
    pub measuring: bool,
    /// Set while the admin queue is not connected: the number of the next attempt, from 1; 0 while
    /// an attempt runs.
    pub reconnecting: Option<u32>,
}

/// The observer of a run. `tick` is called about a hundred times a second; returning false ends the
/// run.
pub trait Watch {
    fn tick(&mut self, progress: &Progress) -> bool;
}

impl<F: FnMut(&Progress) -> bool> Watch for F {
    fn tick(&mut self, progress: &Progress) -> bool {
        self(progress)
    }
}

/// The device under load: opens queues and provides their memory.
pub(super) trait Stage: Sync {
    type Queue: Load;

    /// Allocates the buffers of one worker.
    fn memory(&self, classes: &[ClassSpec]) -> Result<Pool, PerfError>;

    /// Opens the queue of lane `lane`, on the thread that will use it.
    fn open(&self, lane: u16, pool: &Pool, now: Nanos) -> Result<Self::Queue, PerfError>;

    /// Time limit for connecting all queues of a worker.
    fn patience(&self) -> Duration;
}

/// Runs `job` on an area of a namespace. `look` is called about a hundred times a second; `false`
/// ends the run. Returns the sum of all workers, and true if `look` ended the run.
pub(super) fn run_on<S: Stage>(
    job: &Job,
    stage: &S,
    area: Area,
    namespace: Namespace,
    look: &mut dyn FnMut(&RunState) -> bool,
) -> Result<(Tally, bool), PerfError> {
    let members = job.cores.len().max(1).min(usize::from(job.queues));
    let crew = RunState::new(members);
    let mut interrupted = false;
    let tallies = thread::scope(|scope| {
        let mut threads = Vec::with_capacity(members);
        for index in 0..members {
            let plan = Plan {
                job,
                area,
                namespace,
                stage,
                crew: &crew,
                index,
            };
            let named = thread::Builder::new().name(format!("perf{index}"));
            threads.push(named.spawn_scoped(scope, move || plan.work())?);
        }
        while threads.iter().any(|thread| !thread.is_finished()) {
            if !look(&crew) {
                interrupted = true;
                crew.stop.store(true, Ordering::Relaxed);
            }
            thread::sleep(TICK);
        }
        let joined = threads.into_iter().map(thread::ScopedJoinHandle::join);
        Ok::<_, PerfError>(joined.collect::<Vec<_>>())
    })?;
    let mut sum = Tally::new();
    let mut stopped = None;
    for tally in tallies {
        match tally.map_err(|_| PerfError::Panicked)? {
            // Prefer the error of the worker that caused the stop.
            Err(error @ PerfError::Worker(WorkerError::Stopped { .. })) => stopped = Some(error),
            tally => sum.add(tally?),
        }
    }
    if let Some(error) = stopped {
        return Err(error);
    }
    Ok((sum, interrupted))
}

/// The number of a run, for [`Stamp`](super::pattern::Stamp): of clock, process id and seed, not 0.
pub(super) fn run_id(job: &Job) -> u64 {
    let run = Clock::real().now().0 ^ u64::from(std::process::id()) << 32 ^ job.seed;
    run.max(1)
}

/// Bytes of DMA memory that a run needs in total.
pub fn memory(job: &Job) -> usize {
    let members = job.cores.len().max(1).min(usize::from(job.queues));
    let classes = classes(job, usize::from(job.queues));
    Pool::bytes_for(&classes) + members * PER_POOL
}

/// Overhead per pool, if there are several.
const PER_POOL: usize = 64 << 10;

/// The buffers for every I/O that `lanes` queues can have in flight, for shared write data, and for
/// Connect.
fn classes(job: &Job, lanes: usize) -> [ClassSpec; 2] {
    let size = (job.sizes.max as usize).next_multiple_of(4096);
    let count = lanes * (usize::from(job.options.depth) + super::lane::sources(job));
    [
        ClassSpec {
            size: 1024,
            count: lanes + 1,
        },
        ClassSpec { size, count },
    ]
}

pub(super) fn progress(job: &Job, crew: &RunState, reconnecting: Option<u32>) -> Progress {
    let sum = |of: fn(&super::worker::Shown) -> u64| crew.shown.iter().map(of).sum();
    let slowest = crew
        .shown
        .iter()
        .map(|s| {
            (
                s.phase.load(Ordering::Relaxed),
                s.permille.load(Ordering::Relaxed),
            )
        })
        .min()
        .unwrap_or_default();
    Progress {
        phase: match phases(job).get(slowest.0) {
            Some(Phase::Fill) => "filling",
            Some(Phase::Run) | None => "running",
            Some(Phase::ReadBack) => "reading back",
            Some(Phase::Scan) => "verifying",
        },
        permille: slowest.1,
        ios: sum(|s| s.ios.load(Ordering::Relaxed)),
        bytes: sum(|s| s.bytes.load(Ordering::Relaxed)),
        errors: sum(|s| s.errors.load(Ordering::Relaxed)),
        measuring: crew
            .shown
            .iter()
            .all(|s| s.measuring.load(Ordering::Relaxed)),
        reconnecting,
    }
}

/// Parameters of one worker. The worker's own thread creates its queues and buffers, because they
/// belong to the thread that created them.
struct Plan<'a, S> {
    job: &'a Job,
    area: Area,
    namespace: Namespace,
    stage: &'a S,
    crew: &'a Arc<RunState>,
    index: usize,
}

impl<S: Stage> Plan<'_, S> {
    fn work(&self) -> Result<Tally, PerfError> {
        let mut member = Member {
            crew: self.crew,
            finished: false,
        };
        if let Some(core) = self.job.cores.get(self.index) {
            pin(*core)?;
        }
        let clock = Clock::real();
        let worker = Worker {
            index: self.index,
            job: self.job,
            crew: self.crew,
            lanes: self.lanes(&clock)?,
            clock,
        };
        let tally = worker.run(self.stage.patience())?;
        member.finished = true;
        Ok(tally)
    }

    fn lanes(&self, clock: &Clock) -> Result<Vec<Lane<S::Queue>>, PerfError> {
        let (job, members) = (self.job, self.crew.shown.len());
        let mine: Vec<u64> = (0..u64::from(job.queues))
            .filter(|lane| *lane as usize % members == self.index)
            .collect();
        let pool = self.pool(mine.len())?;
        let unit = job.unit_blocks(self.namespace.block_size);
        mine.into_iter()
            .map(|lane| {
                let area = if job.is_split() {
                    self.area.part(lane, job.queues.into(), unit)
                } else {
                    self.area
                };
                let queue = self.stage.open(lane as u16, &pool, clock.now())?;
                Ok(Lane::new(
                    queue,
                    job,
                    area,
                    self.namespace,
                    lane,
                    pool.clone(),
                ))
            })
            .collect()
    }

    /// Buffers for every I/O in flight, filled with incompressible data.
    fn pool(&self, lanes: usize) -> Result<Pool, PerfError> {
        let classes = classes(self.job, lanes);
        let pool = self.stage.memory(&classes)?;
        let size = classes[1].size;
        let mut random = nacre_random::Random::new(self.job.seed);
        let mut all: Vec<_> = std::iter::from_fn(|| pool.acquire(size)).collect();
        for buf in &mut all {
            for word in buf.bytes_mut().expect("just acquired").chunks_exact_mut(8) {
                word.copy_from_slice(&random.draw().to_le_bytes());
            }
        }
        Ok(pool)
    }
}
