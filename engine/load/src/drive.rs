//! Runs a load on an NVMe drive of this machine through the user-space driver (`nacre perf` with a
//! PCI address).

use std::sync::Arc;
use std::time::Duration;

use nacre_bdev_nvme::{Controller, DriveOptions};
use nacre_bdev_nvme_vfio::Vfio;
use nacre_hugepages::{Arena, ArenaOptions};
use nacre_reactor::{ReactorConfig, ReactorHandle};

use super::error::{DriveError, Owner, PerfError};
use super::job::Job;
use super::local::{Local, on_device};
use super::report::Report;
use super::run::{Watch, memory};

/// Time limit for the initialisation of a drive. CAP.TO is up to 127.5 s.
const PATIENCE: Duration = Duration::from_secs(150);

/// Runs `job` on namespace `nsid` of the drive at PCI address `address`, which must be bound to
/// vfio-pci. Without `nsid`, uses the only namespace. Shuts the drive down and releases it at the
/// end.
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
    let options = DriveOptions {
        // Workers poll and never sleep: interrupts would only cost them CPU time.
        interrupts: false,
        ..DriveOptions::new("perf")
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
        (None, _) => return Err(PerfError::SeveralNamespaces { owner, there }),
    };
    let device = namespaces.into_iter().find(|device| device.nsid() == nsid);
    let device = device.ok_or(PerfError::NoNamespace { owner, nsid, there })?;
    let granted = controller.info().io_queues;
    if granted < job.queues {
        let asked = job.queues;
        return Err(PerfError::Queues { asked, granted });
    }
    let local = Local { device, arena };
    on_device(job, &local, nsid, &format!("pcie://{address}"), watch)
}
