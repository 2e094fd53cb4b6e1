//! An NVMe/TCP target in the test's process: one thread that serves a subsystem on a loopback
//! address.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use nacre_bdev::layer::Layer;
use nacre_bdev::{Bdev, malloc};
use nacre_hugepages::{Arena, ArenaOptions, ClassSpec, Pool};
use nacre_nvmf::queues::{GroupConfig, QueueGroup};
use nacre_nvmf::subsystems::{
    Backing, ListenOptions, NamespaceConfig, NamespaceIds, SubsystemConfig, Target, TargetConfig,
    TargetPsks,
};
use nacre_nvmf::transport::{
    Address, ListenerOptions, Plug, Pools, TlsCounts, TlsPolicy, TransportType,
};
use nacre_nvmf_wire::Nqn;
use nacre_reactor::Clock;
use nacre_transport_tcp::{TcpConfig, TcpPlug};

pub const SUBNQN: &str = "nqn.2025-01.io.nacre:test";

/// A running target with one subsystem that admits any host.
pub struct TestTarget {
    pub target: Arc<Target>,
    pub address: SocketAddr,
    tcp: Arc<TcpPlug>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl TestTarget {
    /// Starts on any free port.
    pub fn start() -> Self {
        Self::start_on("127.0.0.1:0".parse().expect("an address"))
    }

    /// Starts on a given address, for a target that returns after a restart.
    pub fn start_on(address: SocketAddr) -> Self {
        Self::start_with(address, |_| Vec::new())
    }

    /// Like `start_on`, with further plugs, which are created with the target's memory.
    pub fn start_with(
        address: SocketAddr,
        plugs: impl FnOnce(Vec<Arena>) -> Vec<Arc<dyn Plug>>,
    ) -> Self {
        let target = Target::new(TargetConfig::default(), 1);
        let psks = Arc::new(TargetPsks::new(&target));
        let tcp = TcpPlug::with_psks(TcpConfig::default(), psks);
        let tcp = Arc::new(tcp.expect("the TCP plug starts"));
        target
            .add_plug(Arc::clone(&tcp) as _)
            .expect("the first plug");
        let bytes = Pool::bytes_for(&IO) + Pool::bytes_for(&ADMIN);
        let arena = Arena::allocate(ArenaOptions::new(bytes as u64)).expect("memory");
        for plug in plugs(vec![arena.clone()]) {
            target.add_plug(plug).expect("of another kind");
        }
        let stop = Arc::new(AtomicBool::new(false));
        let (theirs, stopped) = (Arc::clone(&target), Arc::clone(&stop));
        // Wait for the core: connections before it opened the plug are refused.
        let (ready, is_ready) = std::sync::mpsc::channel();
        let thread = std::thread::Builder::new()
            .name("target".into())
            .spawn(move || serve(theirs, &arena, &stopped, &ready))
            .expect("a thread");
        is_ready.recv().expect("the core starts");
        let mut config = SubsystemConfig::new(nqn(SUBNQN));
        config.allow_any_host = true;
        config.ana_reporting = true;
        target.create_subsystem(config).expect("a new name");
        let listened = target
            .add_listener(&nqn(SUBNQN), TransportType::Tcp, &Address::Ip(address))
            .expect("the address is free");
        let Address::Ip(address) = listened else {
            panic!("TCP listens on {listened}")
        };
        Self {
            target,
            address,
            tcp,
            stop,
            thread: Some(thread),
        }
    }

    /// Adds a listener on any free port that takes connections in clear and over TLS.
    pub fn listen_with_tls(&self) -> SocketAddr {
        let options = ListenOptions {
            listener: ListenerOptions {
                tls: Some(TlsPolicy::Allow),
                ..ListenerOptions::default()
            },
            ..ListenOptions::default()
        };
        let any = Address::Ip("127.0.0.1:0".parse().expect("an address"));
        let listened =
            self.target
                .add_listener_with(&nqn(SUBNQN), TransportType::Tcp, &any, options);
        match listened.expect("a free port") {
            Address::Ip(address) => address,
            other => panic!("TCP listens on {other}"),
        }
    }

    pub fn tls_counts(&self) -> Option<TlsCounts> {
        self.tcp.counts().tls
    }

    /// Adds a namespace on `bdev`, wrapped in the layer.
    pub fn add_namespace(&self, bdev: Arc<dyn Bdev>) -> u32 {
        let layer: Arc<dyn Bdev> = Layer::new(bdev);
        let opened = Arc::clone(&layer);
        let config = NamespaceConfig {
            nsid: None,
            bdev_name: layer.name().to_string(),
            ids: NamespaceIds::from_uuid(layer.uuid()),
            backing: Backing::new(
                layer,
                Arc::new(move |pool: &Pool| Arc::clone(&opened).open(pool)),
            ),
            ana_group: None,
            auto_visible: true,
            reservations: Default::default(),
        };
        self.target
            .add_namespace(&nqn(SUBNQN), config)
            .expect("room for a namespace")
    }

    pub fn uri(&self) -> String {
        format!("tcp://{}/{SUBNQN}", self.address)
    }
}

impl Drop for TestTarget {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(
                ended.is_ok() || std::thread::panicking(),
                "the target panicked"
            );
        }
    }
}

const IO: [ClassSpec; 2] = [
    ClassSpec {
        size: 4096,
        count: 1024,
    },
    ClassSpec {
        size: 128 << 10,
        count: 256,
    },
];
const ADMIN: [ClassSpec; 1] = [ClassSpec {
    size: 8192,
    count: 64,
}];

fn serve(
    target: Arc<Target>,
    arena: &Arena,
    stop: &AtomicBool,
    ready: &std::sync::mpsc::Sender<()>,
) {
    let pools = Pools {
        io: Pool::on_arena(arena, &IO).expect("room in the arena"),
        admin: Pool::on_arena(arena, &ADMIN).expect("room in the arena"),
    };
    let clock = Clock::real();
    let config = GroupConfig::default();
    let mut group = QueueGroup::new(target, 0, pools, Arc::new(|| {}), config).expect("a group");
    group.turn(clock.now());
    ready.send(()).expect("the starting thread waits");
    while !stop.load(Ordering::Acquire) {
        if group.turn(clock.now()) == 0 {
            std::thread::sleep(Duration::from_micros(20));
        }
    }
}

pub fn nqn(text: &str) -> Nqn {
    Nqn::new(text).expect("a right name")
}

/// A RAM disk of `bytes` in blocks of `block_size`.
pub fn ram(name: &str, block_size: u32, bytes: u64) -> Arc<dyn Bdev> {
    malloc::create(malloc::Config {
        name: name.into(),
        block_size,
        num_blocks: bytes / u64::from(block_size),
        physical_block_size: None,
        uuid: None,
        optimal_io_boundary: None,
        numa_id: None,
    })
    .expect("memory for a RAM disk")
}
