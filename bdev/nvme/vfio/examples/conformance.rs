//! The bdev conformance suite over a real drive: the driver, VFIO, and the drive in the slot. For
//! the virtual machine's tests. It overwrites the namespaces.
//!
//!    conformance BDF NSID…

#![forbid(unsafe_code)]

use std::error::Error;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use nacre_bdev::Bdev;
use nacre_bdev::conformance::Suite;
use nacre_bdev_nvme::{Controller, Function, Options};
use nacre_bdev_nvme_vfio::Vfio;
use nacre_hugepages::{Arena, ArenaOptions, ClassSpec, HugepagePolicy, Pool};
use nacre_reactor::{CoreHandle, Mode, ReactorConfig, ReactorHandle, spawn};

/// An emulated machine is slow, and a busy one slower. Longer than the suite waits for an I/O.
const PATIENCE: Duration = Duration::from_secs(120);

type Outcome = Result<(), Box<dyn Error>>;

fn main() -> Outcome {
    let mut words = std::env::args().skip(1);
    let address = words.next().ok_or("no drive was named")?;
    let wanted: Vec<u32> = words.map(|word| word.parse()).collect::<Result<_, _>>()?;
    // Memory is registered as the suite makes it.
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
    let options = Options {
        timeout: PATIENCE,
        admin_timeout: PATIENCE,
        ..Options::new("drive")
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
    // Nothing went wrong that was put right. The suite itself aborts.
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
        Err("the drive had to be put right".into())
    }
}

/// The suite wants a device whose contents may be anything: the same one again will do.
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
            .expect("the drive has it mapped");
        Pool::on_arena(&arena, classes).expect("just as much")
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

/// Runs a future on the home reactor, and waits for it here.
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
    result.expect("the home reactor does it")
}
