//! Runs a load on a block device of this process, without a transport.

use std::sync::Arc;
use std::time::Duration;

use nacre_bdev::{Bdev, Busy, Done, Io, Queue, Token};
use nacre_hugepages::{Arena, ArenaOptions, ClassSpec, Pool};
use nacre_reactor::Nanos;

use super::error::{DriveError, PerfError};
use super::job::{Job, JobError};
use super::lane::{Load, Namespace};
use super::report::Report;
use super::run::{Stage, Watch, memory, progress, run_id, run_on};

/// Namespace id in the report of a device that belongs to no controller.
const NSID: u32 = 1;

/// A queue of the device.
pub(super) struct LocalQueue {
    queue: Box<dyn Queue>,
    qid: u16,
}

impl Queue for LocalQueue {
    #[inline]
    fn submit(&mut self, io: Io) -> Result<(), (Busy, Io)> {
        self.queue.submit(io)
    }

    #[inline]
    fn poll(&mut self, now: Nanos, done: &mut Done) -> usize {
        self.queue.poll(now, done)
    }

    fn abort(&mut self, token: Token) -> bool {
        self.queue.abort(token)
    }

    fn inflight(&self) -> usize {
        self.queue.inflight()
    }
}

impl Load for LocalQueue {
    fn qid(&self) -> u16 {
        self.qid
    }
}

/// A device, and the DMA memory of its I/O.
pub(super) struct Local {
    pub device: Arc<dyn Bdev>,
    pub arena: Arena,
}

impl Stage for Local {
    type Queue = LocalQueue;

    fn memory(&self, classes: &[ClassSpec]) -> Result<Pool, PerfError> {
        let slice = self.arena.carve(Pool::bytes_for(classes));
        let pool = slice.and_then(|slice| Pool::on_slice(slice, classes));
        Ok(pool.map_err(DriveError::from)?)
    }

    fn open(&self, lane: u16, pool: &Pool, _now: Nanos) -> Result<LocalQueue, PerfError> {
        let queue = Arc::clone(&self.device)
            .open(pool)
            .map_err(DriveError::from)?;
        let qid = lane + 1;
        Ok(LocalQueue { queue, qid })
    }

    fn patience(&self) -> Duration {
        // A queue of a device is live as soon as it is open.
        Duration::ZERO
    }
}

/// Runs `job` on a block device of this process. The report has the NSID 1.
pub fn run_device(
    job: &Job,
    device: Arc<dyn Bdev>,
    watch: &mut dyn Watch,
) -> Result<Report, PerfError> {
    let arena = Arena::allocate(ArenaOptions::new(memory(job) as u64)).map_err(DriveError::from)?;
    let target = device.name().to_owned();
    let local = Local { device, arena };
    on_device(job, &local, NSID, &target, watch)
}

pub(super) fn on_device(
    job: &Job,
    local: &Local,
    nsid: u32,
    target: &str,
    watch: &mut dyn Watch,
) -> Result<Report, PerfError> {
    let (geometry, limits) = (local.device.geometry(), local.device.limits());
    let largest = u64::from(limits.max_blocks) * u64::from(geometry.block_size);
    let largest = u32::try_from(largest).unwrap_or(u32::MAX);
    let area = job.area(geometry.block_size, geometry.blocks, largest)?;
    if job.writes() && limits.read_only {
        return Err(JobError::ReadOnly.into());
    }
    let namespace = Namespace {
        nsid,
        block_size: geometry.block_size,
        run: run_id(job),
    };
    let (sum, interrupted) = run_on(job, local, area, namespace, &mut |crew| {
        watch.tick(&progress(job, crew, None))
    })?;
    Ok(sum.report(job, target, nsid, interrupted))
}

#[cfg(test)]
mod tests {
    use nacre_bdev::malloc;

    use super::super::job::{Limit, Rw, Sizes, tests};
    use super::super::run::Progress;
    use super::*;

    /// Goal: a device is measured without a transport; processor time is counted, and the watch
    /// sees the measured part. Method: a RAM disk, for a tenth of a second after a warm-up.
    #[test]
    fn a_device_is_measured() {
        let device = malloc::create(malloc::Config {
            name: "ram".into(),
            block_size: 4096,
            num_blocks: 64,
            physical_block_size: None,
            uuid: None,
            optimal_io_boundary: None,
            numa_id: None,
        });
        let job = Job {
            sizes: Sizes {
                min: 4096,
                max: 4096,
            },
            limit: Limit::Time(Duration::from_millis(100)),
            ..tests::job_with(|options| {
                (options.rw, options.mix) = (Rw::RandRw, 50);
                options.warmup = Duration::from_millis(30);
            })
        };
        let mut measuring = 0;
        let report = run_device(&job, device.unwrap(), &mut |progress: &Progress| {
            measuring += u32::from(progress.measuring);
            true
        });
        let report = report.unwrap();
        assert!(report.is_good() && report.read.ios > 0 && report.write.ios > 0);
        assert!(report.cpu_seconds > 0.0 && report.cpu_seconds <= report.seconds * 1.1);
        assert!(measuring > 0, "{report:?}");
        assert_eq!((report.target.as_str(), report.nsid), ("ram", 1));
    }
}
