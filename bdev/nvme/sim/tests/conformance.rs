//! The bdev conformance suite on the driver, with simulated drives of every kind. Each drive has
//! its own thread, a reactor manages the controller, and the queues belong to the suite's threads.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use nacre_bdev::Bdev;
use nacre_bdev::conformance::Suite;
use nacre_bdev_nvme::{Controller, DriveOptions, Function};
use nacre_bdev_nvme_sim::{Config, Drive, Iommu, Limits, NamespaceConfig, Pace, Running};
use nacre_hugepages::{Arena, ArenaOptions, ClassSpec, HugepagePolicy, Pool};
use nacre_nvmf_wire::identify::controller::{Oncs, Sgls};
use nacre_reactor::{CoreHandle, Mode, ReactorConfig, ReactorHandle, spawn};
use parking_lot::Mutex;

/// No step takes this long.
const PATIENCE: Duration = Duration::from_secs(60);

/// Creates one drive after the other, and checks each before the next is created.
struct Fleet {
    home: ReactorHandle,
    iommu: Arc<Iommu>,
    config: Config,
    options: DriveOptions,
    last: Mutex<Option<(Arc<Controller>, Drive, Running)>>,
}

impl Fleet {
    fn new(config: Config, options: DriveOptions) -> Self {
        let reactor = ReactorConfig {
            name: "home".to_owned(),
            mode: Mode::Interrupt,
            ..ReactorConfig::default()
        };
        Self {
            home: spawn(reactor, |_| ()).expect("a reactor"),
            iommu: Arc::clone(&config.iommu),
            config,
            options,
            last: Mutex::new(None),
        }
    }

    /// Runs a future on the home reactor, and waits for it on this thread.
    fn at_home<R, Fut>(&self, f: impl FnOnce(CoreHandle) -> Fut + Send + 'static) -> R
    where
        R: Send + 'static,
        Fut: Future<Output = R> + 'static,
    {
        let (sender, receiver) = channel();
        let sent = self.home.run_future(move |core| async move {
            let _ = sender.send(f(core).await);
        });
        let result = receiver.recv_timeout(PATIENCE);
        drop(sent);
        result.expect("the home reactor does it")
    }

    fn next(&self) -> Arc<dyn Bdev> {
        self.end();
        let drive = Drive::new(self.config.clone());
        let running = drive.spawn();
        let function: Arc<dyn Function> = drive.plug();
        let options = self.options.clone();
        let attached = self.at_home(move |core| async move {
            Controller::attach(&core, function, options, Arc::new(())).await
        });
        let controller = attached.expect("the drive is attached");
        let bdev: Arc<dyn Bdev> = controller.namespaces().remove(0);
        *self.last.lock() = Some((controller, drive, running));
        bdev
    }

    /// Detaches and checks the last drive.
    fn end(&self) {
        let last = self.last.lock().take();
        if let Some((controller, drive, running)) = last {
            let status = controller.status();
            self.at_home(move |_| async move { controller.detach().await });
            drop(running);
            drive.check();
            assert_eq!(
                (status.resets, status.timeouts, status.protocol_errors),
                (0, 0, 0)
            );
        }
    }

    fn run(self) {
        let (slot, iommu) = (self.config.slot, Arc::clone(&self.iommu));
        let memory = move |classes: &[ClassSpec]| {
            let arena = Arena::allocate(ArenaOptions {
                hugepages: HugepagePolicy::Off,
                ..ArenaOptions::new(Pool::bytes_for(classes) as u64)
            })
            .expect("memory for buffers");
            arena.register(slot, iommu.clone()).expect("a new slot");
            Pool::on_arena(&arena, classes).expect("just as much")
        };
        Suite::new(|| self.next()).memory(memory).run();
        self.end();
        assert_eq!(self.iommu.outside(), 0);
        self.home.stop();
        self.home.join().expect("the home reactor ends");
    }
}

fn options() -> DriveOptions {
    DriveOptions {
        io_queue_depth: 64,
        ..DriveOptions::new("nvme0")
    }
}

fn namespace(block_size: u32) -> NamespaceConfig {
    NamespaceConfig::new(1, block_size, 4096)
}

fn config(namespace: NamespaceConfig) -> Config {
    Config {
        namespaces: vec![namespace],
        ..Config::default()
    }
}

#[test]
fn blocks_of_512_with_sgls() {
    Fleet::new(config(namespace(512)), options()).run();
}

#[test]
fn blocks_of_4096_with_prps_only() {
    let config = Config {
        sgls: Sgls::empty(),
        pace: Pace {
            latency: (Duration::ZERO, Duration::from_micros(30)),
            ..Pace::default()
        },
        ..config(namespace(4096))
    };
    Fleet::new(config, options()).run();
}

#[test]
fn prps_by_configuration() {
    let options = DriveOptions {
        sgl: false,
        ..options()
    };
    Fleet::new(config(namespace(512)), options).run();
}

#[test]
fn shadow_doorbells() {
    let config = Config {
        shadow_doorbells: true,
        sgls: Sgls::SUPPORTED_DWORD,
        ..config(namespace(512))
    };
    Fleet::new(config, options()).run();
}

#[test]
fn small_transfers_and_a_boundary() {
    let mut namespace = namespace(512);
    namespace.noiob = 24;
    namespace.npwg = 8;
    namespace.ignores_advice = true;
    let config = Config {
        mdts: 2,
        limits: Limits {
            wzsl: 1,
            dmrsl: 64,
            dmrl: 1,
            ..Limits::default()
        },
        doorbell_stride: 3,
        ..config(namespace)
    };
    Fleet::new(config, options()).run();
}

#[test]
fn the_shortest_queue_and_no_interrupts() {
    let config = Config {
        queue_entries: 4,
        vectors: 0,
        pace: Pace {
            latency: (Duration::ZERO, Duration::from_micros(20)),
            ..Pace::default()
        },
        ..config(namespace(512))
    };
    Fleet::new(config, options()).run();
}

/// Operations that the drive lacks are emulated by the layer, or refused by the module.
#[test]
fn no_optional_command() {
    let mut namespace = namespace(4096);
    namespace.deallocated_zeroes = false;
    namespace.deac = false;
    let config = Config {
        oncs: Oncs::empty(),
        fused_compare_and_write: false,
        volatile_cache: false,
        limits: Limits {
            awun: 1,
            awupf: 1,
            acwu: 1,
            ..Limits::default()
        },
        ..config(namespace)
    };
    Fleet::new(config, options()).run();
}

/// Zeroes are written by Write Zeroes; the deallocate bit is used only on a drive that supports it.
#[test]
fn zeroes_without_deallocation() {
    let mut namespace = namespace(4096);
    namespace.deac = false;
    Fleet::new(config(namespace), options()).run();
}
