//! One side of a comparison (a target or device), and one measurement of it.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nacre_bdev::Bdev;
use nacre_bdev_uring::CreateError;
use nacre_engine_bench::{Latency, Measurement, Side};
use nacre_engine_load::{self as load, Direction, Job, PerfError, Progress, Report};
use nacre_engine_rpc::client::ClientError;
use nacre_nvmf::address::NVME_PORT;
use nacre_transport_connect::{Session, SessionError};

use super::super::Failure;
use super::super::remote::{Needs, RemoteArgs};
use super::target::PrivateTarget;
use super::usage::Usage;
use nacre_engine::services::drives::DriveUri;

/// How long a lost connection is retried: a measurement with a loss fails in any case.
const LOSS_TIMEOUT: Duration = Duration::from_secs(1);
/// Longest time of one I/O before its connection is dropped.
const IO_TIMEOUT: Duration = Duration::from_secs(20);

/// Why a measurement has no figures.
#[derive(Debug, thiserror::Error)]
pub(super) enum RunError {
    #[error(transparent)]
    Options(#[from] Failure),
    #[error(transparent)]
    Connect(#[from] SessionError),
    #[error(transparent)]
    Load(#[from] PerfError),
    #[error(transparent)]
    Open(#[from] CreateError),
    #[error("the daemon does not lend its device: {0}")]
    Lend(#[from] ClientError),
    #[error("the connection was lost")]
    Lost,
    #[error("{count} I/O failed; the first: {first}")]
    Io { count: u64, first: String },
    #[error("{0} I/O did not complete")]
    Unfinished(u64),
    #[error("no I/O completed in the measured time: longer --seconds")]
    Nothing,
    #[error("interrupted")]
    Interrupted,
}

/// How to reach the blocks of a side.
pub(super) enum BlockSource {
    Memory(Arc<dyn Bdev>),
    /// A file or block device, opened for each measurement.
    Path {
        path: PathBuf,
        read_only: bool,
    },
    Drive(DriveUri),
    Remote(Box<RemoteArgs>),
}

/// A side, and how to reach it.
pub(super) struct MeasuredSide {
    pub side: Side,
    pub way: BlockSource,
    /// The process of the target, if it is known.
    pub pid: Option<u32>,
}

impl MeasuredSide {
    /// Runs `job`. A private daemon that holds the side's device closes it meanwhile.
    pub(super) fn measure(
        &self,
        job: &Job,
        holder: Option<&mut PrivateTarget>,
        stop: &AtomicBool,
    ) -> Result<Measurement, RunError> {
        match (&self.way, holder) {
            (BlockSource::Path { .. }, Some(holder)) => {
                holder.release()?;
                let outcome = self.run(job, stop);
                holder.hold()?;
                outcome
            }
            _ => self.run(job, stop),
        }
    }

    fn run(&self, job: &Job, stop: &AtomicBool) -> Result<Measurement, RunError> {
        let mut usage = Usage::of(self.pid);
        let mut is_lost = false;
        let mut watch = |progress: &Progress| {
            if progress.measuring {
                usage.sample();
            }
            is_lost |= progress.reconnecting.is_some();
            !is_lost && !stop.load(Ordering::Relaxed)
        };
        let report = match &self.way {
            BlockSource::Memory(device) => load::run_device(job, Arc::clone(device), &mut watch),
            BlockSource::Path { path, read_only } => {
                let device = nacre_bdev_uring::create(nacre_bdev_uring::Config {
                    readonly: *read_only,
                    ..nacre_bdev_uring::Config::new("device", path)
                })?;
                load::run_device(job, device, &mut watch)
            }
            BlockSource::Drive(uri) => load::run_drive(job, &uri.address, uri.nsid, &mut watch),
            BlockSource::Remote(remote) => run_remote(remote, job, &mut watch)?,
        };
        if stop.load(Ordering::Relaxed) {
            return Err(RunError::Interrupted);
        }
        // A loss ends the run early, which would otherwise hide it.
        if is_lost {
            return Err(RunError::Lost);
        }
        measurement(&report?, &usage)
    }
}

/// The outer error: no connection. The inner one: no report.
fn run_remote(
    remote: &RemoteArgs,
    job: &Job,
    watch: &mut dyn load::Watch,
) -> Result<Result<Report, PerfError>, RunError> {
    let mut target = remote.target(Needs {
        subnqn: None,
        port: NVME_PORT,
        entries: job.options.depth + 1,
        memory: load::memory(job),
    })?;
    target.options.io_queues = job.queues;
    target.options.io_timeout = IO_TIMEOUT;
    if target.options.loss_timeout.is_some() {
        target.options.loss_timeout = Some(LOSS_TIMEOUT);
    }
    let name = target.remote.to_string();
    let mut session = Session::connect(&name, target.options.clone(), &target.connector)?;
    let namespace = (name.as_str(), target.nsid);
    let outcome = load::run(job, &mut session, &target.connector, namespace, watch);
    session.disconnect();
    Ok(outcome)
}

fn measurement(report: &Report, usage: &Usage) -> Result<Measurement, RunError> {
    let count: u64 = report.errors.values().sum();
    if let Some(first) = &report.first_error {
        let (op, lba, status) = (first.op.name(), first.lba, &first.status);
        let first = format!("{op} at LBA {lba}: {status}");
        return Err(RunError::Io { count, first });
    }
    if report.losses.connections_lost > 0 {
        return Err(RunError::Lost);
    }
    if report.unfinished > 0 {
        return Err(RunError::Unfinished(report.unfinished));
    }
    if report.iops == 0.0 {
        return Err(RunError::Nothing);
    }
    Ok(Measurement {
        seconds: report.seconds,
        iops: report.iops,
        bytes_per_second: report.bytes_per_second,
        read_latency: latency(&report.read),
        write_latency: latency(&report.write),
        host_cores_used: report.cpu_seconds / report.seconds,
        target_cores_used: usage.process_cores(),
        machine_cores_used: usage.machine_cores(),
    })
}

fn latency(direction: &Direction) -> Option<Latency> {
    let l = &direction.latency_ns;
    let micros = |nanos: u64| nanos as f64 / 1e3;
    (direction.ios > 0).then(|| Latency {
        mean_us: l.mean / 1e3,
        p50_us: micros(l.p50),
        p99_us: micros(l.p99),
        p99_9_us: micros(l.p99_9),
    })
}
