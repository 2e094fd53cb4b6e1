//! Runs the bdev conformance suite on a real drive, with the driver and VFIO. Used by the tests in
//! virtual machines. It overwrites the namespaces.
//!
//!    conformance BDF NSID…

#![forbid(unsafe_code)]

use std::error::Error;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use nacre_bdev::Bdev;
use nacre_bdev::conformance::Suite;
use nacre_bdev_nvme::{Controller, DriveOptions, Function};
use nacre_bdev_nvme_vfio::Vfio;
use nacre_hugepages::{Arena, ArenaOptions, ClassSpec, HugepagePolicy, Pool};
use nacre_reactor::{CoreHandle, Mode, ReactorConfig, ReactorHandle, spawn};

/// Longer than the suite waits for an I/O: an emulated machine on a busy host is slow.
const PATIENCE: Duration = Duration::from_secs(120);

type Outcome = Result<(), Box<dyn Error>>;

fn main() -> Outcome {
    let mut words = std::env::args().skip(1);
    let address = words.next().ok_or("the drive's address is missing")?;
    let wanted: Vec<u32> = words.map(|word| word.parse()).collect::<Result<_, _>>()?;
    // The suite's memory is registered when it is created.
    let vfio = Vfio::new(&[]);
    let function = vfio.open(&address)?;
    let home = spawn(
        ReactorConfig {
            name: "home".to_owned(),
            mode: Mode::Interrupt,
            ..ReactorConfig::default()
        },
        |_| (),
    )?;
    let options = DriveOptions {
        timeout: PATIENCE,
        admin_timeout: PATIENCE,
        ..DriveOptions::new("drive")
    };
    let seam: Arc<dyn Function> = Arc::clone(&function) as _;
    let controller = at_home(&home, move |core| async move {
        Controller::attach(&core, seam, options, Arc::new(())).await
    })?;
    println!("{}", serde_json::to_string(&controller.info())?);
    for nsid in wanted {
        let namespaces = controller.namespaces();
        let namespace = namespaces.iter().find(|n| n.nsid() == nsid);
        let namespace = namespace.ok_or_else(|| format!("there is no namespace {nsid}"))?;
        run(&function, namespace);
    }
    let status = controller.status();
    at_home(&home, move |_| async move { controller.detach().await });
    home.stop();
    home.join()?;
    println!("{}", serde_json::to_string(&status)?);
    // Checks that nothing needed recovery. Aborts are not counted, because the suite itself aborts
    // I/O.
    let wrong = [
        status.resets,
        status.function_resets,
        status.queue_resets,
        status.timeouts,
        status.admin_timeouts,
        status.resubmitted,
        status.protocol_errors,
    ];
    if wrong.iter().all(|count| *count == 0) {
        Ok(())
    } else {
        Err("the driver had to recover the drive".into())
    }
}

/// The suite needs a device with arbitrary contents, so every run uses the same one.
fn run(function: &Arc<impl Function + ?Sized>, namespace: &Arc<impl Bdev>) {
    let began = Instant::now();
    let (slot, hook) = (function.slot(), function.hook());
    let memory = move |classes: &[ClassSpec]| {
        let arena = Arena::allocate(ArenaOptions {
            hugepages: HugepagePolicy::Off,
            ..ArenaOptions::new(Pool::bytes_for(classes) as u64)
        })
        .expect("memory for buffers");
        arena
            .register(slot, Arc::clone(&hook))
            .expect("the drive can map the memory");
        Pool::on_arena(&arena, classes).expect("the arena has the size of the pool")
    };
    let make = || -> Arc<dyn Bdev> { Arc::clone(namespace) as _ };
    Suite::new(make).memory(memory).in_haste().run();
    println!(
        "{} conforms: blocks of {} bytes, {} s",
        namespace.name(),
        namespace.geometry().block_size,
        began.elapsed().as_secs()
    );
}

/// Runs a future on the home reactor, and waits for it on this thread.
fn at_home<R, Fut>(home: &ReactorHandle, f: impl FnOnce(CoreHandle) -> Fut + Send + 'static) -> R
where
    R: Send + 'static,
    Fut: Future<Output = R> + 'static,
{
    let (sender, receiver) = channel();
    let sent = home.run_future(move |core| async move {
        let _ = sender.send(f(core).await);
    });
    let result = receiver.recv_timeout(PATIENCE);
    drop(sent);
    result.expect("the home reactor runs the future")
}
