//! A run from the connection to the report.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use nacre_hugepages::{ClassSpec, Pool};
use nacre_nvmf::host::{HostOptions, IoQueue, Link, NamespaceInfo};
use nacre_reactor::Clock;

use super::job::{Area, Job, JobError};
use super::lane::{Lane, Namespace, Phase};
use super::report::{PathReport, Report, Tally};
use super::worker::{Crew, Member, Worker, WorkerError, phases, pin};
use crate::initiator::{Connector, Session};

/// How often the main thread looks after the controller.
const TICK: Duration = Duration::from_millis(10);

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
pub enum PerfError {
    #[error(transparent)]
    Job(#[from] JobError),
    #[error("the subsystem has no namespace {nsid} for this host{}", names(.there))]
    NoNamespace { nsid: u32, there: Vec<u32> },
    #[error("the subsystem has no namespace for this host")]
    Empty,
    #[error("the subsystem has {} namespaces: choose one with --nsid{}", .there.len(), names(.there))]
    Which { there: Vec<u32> },
    #[error("the controller grants {granted} I/O queues, of {asked} asked for: fewer --queues")]
    Queues { asked: u16, granted: u16 },
    #[error(transparent)]
    Worker(#[from] WorkerError),
    #[error("cannot make an I/O queue: {0}")]
    Queue(#[from] std::io::Error),
    #[error("no memory for I/O: {0}")]
    Memory(std::io::Error),
    #[error("a worker panicked")]
    Panicked,
}

fn names(nsids: &[u32]) -> String {
    let shown: Vec<String> = nsids.iter().take(16).map(u32::to_string).collect();
    match shown.len() {
        0 => String::new(),
        n if n < nsids.len() => format!(" (there are {}, …)", shown.join(", ")),
        _ => format!(" (there are {})", shown.join(", ")),
    }
}

/// How far a run is.
#[derive(Debug, Clone, Default)]
pub struct Progress {
    pub phase: &'static str,
    pub permille: u64,
    pub ios: u64,
    pub bytes: u64,
    pub errors: u64,
    /// The controller was lost and is being connected again.
    pub reconnecting: Option<u32>,
}

/// Looks on. Called about a hundred times a second; `false` ends the run.
pub trait Watch {
    fn tick(&mut self, progress: &Progress) -> bool;
}

impl<F: FnMut(&Progress) -> bool> Watch for F {
    fn tick(&mut self, progress: &Progress) -> bool {
        self(progress)
    }
}

/// Runs `job` on namespace `nsid`, or on the only one there is.
pub fn run(
    job: &Job,
    session: &mut Session,
    connector: &Arc<dyn Connector>,
    (target, nsid): (&str, Option<u32>),
    watch: &mut dyn Watch,
) -> Result<Report, PerfError> {
    let link = Arc::clone(session.controller().link());
    let options = session.controller().options().clone();
    let info = choose(&link, nsid)?;
    let granted = link.state().io_queues;
    if granted < job.queues {
        let asked = job.queues;
        return Err(PerfError::Queues { asked, granted });
    }
    let max_io = link.state().max_transfer_bytes;
    let area = job.area(info.block_size, info.blocks, max_io)?;
    if job.writes() && info.read_only {
        return Err(JobError::ReadOnly.into());
    }
    let run = Clock::real().now().0 ^ u64::from(std::process::id()) << 32 ^ job.seed;
    let namespace = Namespace {
        nsid: info.nsid,
        block_size: info.block_size,
        run: run.max(1),
    };
    let members = job.cores.len().max(1).min(usize::from(job.queues));
    let crew = Crew::new(members);
    let mut interrupted = false;
    let tallies = thread::scope(|scope| {
        let mut threads = Vec::with_capacity(members);
        for index in 0..members {
            let plan = Plan {
                job,
                area,
                namespace,
                link: &link,
                options: &options,
                connector,
                crew: &crew,
                index,
            };
            let named = thread::Builder::new().name(format!("perf{index}"));
            threads.push(named.spawn_scoped(scope, move || plan.work())?);
        }
        while threads.iter().any(|thread| !thread.is_finished()) {
            session.poll();
            if !watch.tick(&progress(job, &crew, session)) {
                interrupted = true;
                crew.stop.store(true, Ordering::Relaxed);
            }
            thread::sleep(TICK);
        }
        let joined = threads.into_iter().map(thread::ScopedJoinHandle::join);
        Ok::<_, PerfError>(joined.collect::<Vec<_>>())
    })?;
    let mut sum = Tally::new();
    for tally in tallies {
        sum.add(tally.map_err(|_| PerfError::Panicked)??);
    }
    let moves = sum.moves;
    let mut report = sum.report(job, target, info.nsid, interrupted);
    let paths = session.controller().paths();
    report.paths = paths.map(|paths| PathReport::new(paths, moves));
    Ok(report)
}

/// Bytes of [`Connector::memory`] that a run needs.
pub fn memory(job: &Job) -> usize {
    let members = job.cores.len().max(1).min(usize::from(job.queues));
    let classes = classes(job, usize::from(job.queues));
    Pool::bytes_for(&classes) + members * PER_POOL
}

/// What several pools need more than one.
const PER_POOL: usize = 64 << 10;

/// Buffers for every I/O of so many queues that can be under way, and for Connect.
fn classes(job: &Job, lanes: usize) -> [ClassSpec; 2] {
    let size = (job.sizes.max as usize).next_multiple_of(4096);
    let count = lanes * (usize::from(job.depth) + super::lane::sources(job));
    [
        ClassSpec {
            size: 1024,
            count: lanes + 1,
        },
        ClassSpec { size, count },
    ]
}

fn choose(link: &Link, nsid: Option<u32>) -> Result<NamespaceInfo, PerfError> {
    let mut namespaces = link.state().namespaces;
    let there: Vec<u32> = namespaces.keys().copied().collect();
    let nsid = match (nsid, there.as_slice()) {
        (Some(nsid), _) => nsid,
        (None, [only]) => *only,
        (None, []) => return Err(PerfError::Empty),
        (None, _) => return Err(PerfError::Which { there }),
    };
    namespaces
        .remove(&nsid)
        .ok_or(PerfError::NoNamespace { nsid, there })
}

fn progress(job: &Job, crew: &Crew, session: &Session) -> Progress {
    use nacre_nvmf::host::ControllerState as State;
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
        reconnecting: match session.controller().state() {
            State::Waiting { attempt, .. } => Some(*attempt),
            State::Connecting => Some(0),
            _ => None,
        },
    }
}

/// What one worker is made from, on its own thread: queues and buffers belong to the thread that
/// made them.
struct Plan<'a> {
    job: &'a Job,
    area: Area,
    namespace: Namespace,
    link: &'a Arc<Link>,
    options: &'a HostOptions,
    connector: &'a Arc<dyn Connector>,
    crew: &'a Arc<Crew>,
    index: usize,
}

impl Plan<'_> {
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
        // Each attempt has this long, and the first may meet a target that is busy; where there are
        // transports to choose from, each has its attempts.
        let tries = match &self.options.paths {
            Some(paths) => 2 * (paths.connection_retries + 1),
            None => 2,
        };
        let tally = worker.run(self.options.connect_timeout * tries)?;
        member.finished = true;
        Ok(tally)
    }

    fn lanes(&self, clock: &Clock) -> Result<Vec<Lane>, PerfError> {
        let (job, members) = (self.job, self.crew.shown.len());
        let mine: Vec<u64> = (0..u64::from(job.queues))
            .filter(|lane| *lane as usize % members == self.index)
            .collect();
        let pool = self.pool(mine.len())?;
        let unit = job.unit_blocks(self.namespace.block_size);
        mine.into_iter()
            .map(|lane| {
                let area = match job.is_split() {
                    true => self.area.part(lane, job.queues.into(), unit),
                    false => self.area,
                };
                let queue = IoQueue::new(
                    self.options.clone(),
                    Arc::clone(self.link),
                    self.connector.dialer(),
                    pool.clone(),
                    (lane as u16 + 1, self.namespace.nsid),
                    clock.now(),
                )?;
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

    /// Buffers for every I/O that can be under way, filled with something that does not compress.
    fn pool(&self, lanes: usize) -> Result<Pool, PerfError> {
        let classes = classes(self.job, lanes);
        let pool = self.connector.memory(&classes);
        let pool = pool.map_err(PerfError::Memory)?;
        let size = classes[1].size;
        let mut random = super::access::Random::new(self.job.seed);
        let mut all: Vec<_> = std::iter::from_fn(|| pool.acquire(size)).collect();
        for buf in &mut all {
            for word in buf.bytes_mut().expect("just acquired").chunks_exact_mut(8) {
                word.copy_from_slice(&random.next().to_le_bytes());
            }
        }
        Ok(pool)
    }
}
