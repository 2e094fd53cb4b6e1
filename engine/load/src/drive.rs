//! Runs a load on an NVMe drive of this machine through the user-space driver (`nacre perf` with a
//! PCI address).

use std::sync::Arc;
use std::time::Duration;

use nacre_bdev::{Bdev, Busy, Done, Io, Queue, Token};
use nacre_bdev_nvme::{Controller, NvmeBdev, Options};
use nacre_bdev_nvme_vfio::Vfio;
use nacre_hugepages::{Arena, ArenaOptions, ClassSpec, Pool};
use nacre_reactor::{Nanos, ReactorConfig, ReactorHandle};

use super::error::{DriveError, Owner, PerfError};
use super::job::{Job, JobError};
use super::lane::{Load, Namespace};
use super::report::Report;
use super::run::{Stage, Watch, memory, progress, run_id, run_on};

/// Limit for the initialisation of a drive: CAP.TO is up to two minutes.
const PATIENCE: Duration = Duration::from_secs(150);

/// A queue of the drive.
struct DriveQueue {
    queue: Box<dyn Queue>,
    qid: u16,
}

impl Queue for DriveQueue {
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

impl Load for DriveQueue {
    fn qid(&self) -> u16 {
        self.qid
    }
}

struct Drive {
    device: Arc<NvmeBdev>,
    arena: Arena,
}

impl Stage for Drive {
    type Queue = DriveQueue;

    fn memory(&self, classes: &[ClassSpec]) -> Result<Pool, PerfError> {
        let slice = self.arena.carve(Pool::bytes_for(classes));
        let pool = slice.and_then(|slice| Pool::on_slice(slice, classes));
        Ok(pool.map_err(DriveError::from)?)
    }

    fn open(&self, lane: u16, pool: &Pool, _now: Nanos) -> Result<DriveQueue, PerfError> {
        let queue = Arc::clone(&self.device)
            .open(pool)
            .map_err(DriveError::from)?;
        let qid = lane + 1;
        Ok(DriveQueue { queue, qid })
    }

    fn patience(&self) -> Duration {
        PATIENCE
    }
}

/// Runs `job` on a namespace of the drive, which must be bound to vfio-pci. The drive is released
/// at the end.
pub fn run_drive(
    job: &Job,
    address: &str,
    nsid: Option<u32>,
    watch: &mut dyn Watch,
) -> Result<Report, PerfError> {
    let arena = Arena::allocate(ArenaOptions::new(memory(job) as u64)).map_err(DriveError::from)?;
    let function = Vfio::new(std::slice::from_ref(&arena))
        .open(address)
        .map_err(DriveError::from)?;
    let home = nacre_reactor::spawn(ReactorConfig::default(), |_| {}).map_err(DriveError::from)?;
    let outcome = bring_up(&home, function).and_then(|controller| {
        let report = on_drive(job, &controller, arena, (address, nsid), watch);
        // An orderly shutdown makes the drive write its cache to the media.
        block_on(controller.detach());
        report
    });
    home.stop();
    let _ = home.join();
    outcome
}

fn bring_up(
    home: &ReactorHandle,
    function: Arc<nacre_bdev_nvme_vfio::VfioFunction>,
) -> Result<Arc<Controller>, PerfError> {
    let options = Options {
        // Workers poll and never sleep: interrupts would only cost them CPU time.
        interrupts: false,
        ..Options::new("perf")
    };
    let attached = home.run_future(move |core| {
        let core = core.clone();
        async move { Controller::attach(&core, function, options, Arc::new(())).await }
    });
    let limited = async { tokio::time::timeout(PATIENCE, attached).await };
    let attached = block_on(limited).map_err(|_| DriveError::Late(PATIENCE))?;
    Ok(attached
        .map_err(DriveError::from)?
        .map_err(DriveError::from)?)
}

fn block_on<F: Future>(future: F) -> F::Output {
    tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .expect("a runtime without threads")
        .block_on(future)
}

fn on_drive(
    job: &Job,
    controller: &Controller,
    arena: Arena,
    (address, nsid): (&str, Option<u32>),
    watch: &mut dyn Watch,
) -> Result<Report, PerfError> {
    let namespaces = controller.namespaces();
    let there: Vec<u32> = namespaces.iter().map(|device| device.nsid()).collect();
    let owner = Owner::Drive;
    let nsid = match (nsid, there.as_slice()) {
        (Some(nsid), _) => nsid,
        (None, [only]) => *only,
        (None, []) => return Err(PerfError::Empty { owner }),
        (None, _) => return Err(PerfError::Which { owner, there }),
    };
    let device = namespaces.into_iter().find(|device| device.nsid() == nsid);
    let device = device.ok_or(PerfError::NoNamespace { owner, nsid, there })?;
    let granted = controller.info().io_queues;
    if granted < job.queues {
        let asked = job.queues;
        return Err(PerfError::Queues { asked, granted });
    }
    let (geometry, limits) = (device.geometry(), device.limits());
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
    let stage = Drive { device, arena };
    let (sum, interrupted) = run_on(job, &stage, area, namespace, &mut |crew| {
        watch.tick(&progress(job, crew, None))
    })?;
    let target = format!("pcie://{address}");
    Ok(sum.report(job, &target, nsid, interrupted))
}
