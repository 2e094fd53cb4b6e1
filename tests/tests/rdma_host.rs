//! Tests of `nacre perf`'s library over simulated RDMA devices and real TCP: one target that serves
//! both, and a host that prefers RDMA. Every written block is read back correctly, whatever happens
//! to the devices.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nacre_engine_load::{
    self as load, Job, JobOptions, Limit, PerfError, Progress, Report, Rw, Sizes, Verify,
};
use nacre_nvmf::host::{Connector, HostOptions, PathOptions};
use nacre_nvmf::transport::{Address, Plug, TransportType};
use nacre_nvmf_wire::tcp::Digests;
use nacre_tests::target::{SUBNQN, TestTarget, nqn, ram};
use nacre_transport_connect::{
    PathConnector, Rdma, RdmaTuning, Session, SessionError, TcpConnector,
};
use nacre_transport_rdma::{RdmaConfig, RdmaPlug};
use nacre_transport_rdma_verbs::sim::{ConnectFault, Fabric, attributes};
use nacre_transport_rdma_verbs::{DeviceId, VerbsError};

/// The target's IP address: TCP listens on it and the simulated device has it.
const TARGET: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
const HOST: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2));

struct World {
    target: TestTarget,
    fabric: Fabric,
    device: DeviceId,
    plug: Arc<RdmaPlug>,
}

impl World {
    fn new() -> Self {
        let fabric = Fabric::new();
        fabric.add_device(attributes("sim_host"), &[HOST]).unwrap();
        let device = fabric
            .add_device(attributes("sim_target"), &[TARGET])
            .unwrap();
        let config = RdmaConfig {
            max_qpairs: 32,
            srq_size: 512,
            ..RdmaConfig::default()
        };
        let mut plug = None;
        let listen = SocketAddr::new(TARGET, 0);
        let target = TestTarget::start_with(listen, |arenas| {
            let made = RdmaPlug::new(config, fabric.provider(), arenas).unwrap();
            vec![Arc::clone(plug.insert(Arc::new(made))) as Arc<dyn Plug>]
        });
        target.add_namespace(ram("ram", 512, 16 << 20));
        let listen = Address::Ip(target.address);
        target
            .target
            .add_listener(&nqn(SUBNQN), TransportType::Rdma, &listen)
            .unwrap();
        Self {
            target,
            fabric,
            device,
            plug: plug.expect("just made"),
        }
    }

    fn connector(&self, fallback: bool) -> Arc<dyn Connector> {
        let tuning = RdmaTuning {
            entries: 64,
            cm_timeout: Duration::from_secs(5),
        };
        let absence = || VerbsError::Unavailable {
            what: "No RDMA devices found: none is simulated".into(),
            remedy: "add one".into(),
        };
        let rdma = Rdma::over(self.fabric.provider(), Box::new(absence), tuning);
        let tcp = TcpConnector::new(self.target.address, Digests::NONE, 33);
        let fallback = fallback.then_some(tcp);
        Arc::new(PathConnector::new(Arc::new(rdma), self.address(), fallback))
    }

    fn address(&self) -> SocketAddr {
        SocketAddr::new(TARGET, self.target.address.port())
    }

    fn options(&self, fallback: bool) -> HostOptions {
        let mut options = HostOptions::new(
            nqn("nqn.2025-01.io.nacre:host"),
            *b"0123456789abcdef",
            nqn(SUBNQN),
        );
        options.io_queues = 2;
        options.queue_entries = 33;
        options.connect_timeout = Duration::from_secs(20);
        options.paths = Some(PathOptions {
            retry_delay: Duration::from_millis(20),
            reprobe: Duration::from_millis(100),
            reprobe_max: Duration::from_millis(200),
            stable_after: Duration::from_millis(100),
            ..PathOptions::new(TransportType::Rdma, fallback.then_some(TransportType::Tcp))
        });
        options
    }

    fn run(&self, fallback: bool, limit: Limit, watch: impl FnMut(&Progress) -> bool) -> Report {
        let (connector, options) = (self.connector(fallback), self.options(fallback));
        let mut session = Session::connect("here", options, &connector).unwrap();
        let mut watch = watch;
        let report = load::run(
            &job(limit),
            &mut session,
            &connector,
            ("here", None),
            &mut watch,
        );
        session.disconnect();
        report.unwrap()
    }
}

fn job(limit: Limit) -> Job {
    Job {
        options: JobOptions {
            rw: Rw::RandRw,
            mix: 50,
            depth: 32,
            range: Some(8 << 20),
            offset: 0,
            rate: None,
            warmup: Duration::ZERO,
            keep_going: false,
        },
        sizes: Sizes {
            min: 512,
            max: 64 << 10,
        },
        queues: 2,
        cores: Vec::new(),
        limit,
        verify: Verify::On,
        seed: 42,
        drain: Duration::from_secs(30),
    }
}

/// Goal: without failures all queues use RDMA and none TCP.
#[test]
fn verified_io() {
    let world = World::new();
    for fallback in [false, true] {
        let report = world.run(fallback, Limit::Ios(2000), |_| true);
        assert!(report.is_good(), "{report:?}");
        let paths = report.paths.as_ref().unwrap();
        assert_eq!((paths.transport.as_str(), paths.fallbacks), ("rdma", 0));
        assert_eq!(report.losses.connections_lost, 0);
    }
    assert_eq!(world.plug.counts().accepted, 6, "queues by RDMA");
    let stats = world.plug.total();
    assert!(stats.read_ops > 0 && stats.write_ops > 0, "{stats:?}");
}

/// Goal: the device disappears during the run and TCP takes over; it returns and RDMA takes over;
/// twice. No I/O fails, and every byte is right.
#[test]
fn falls_back_and_returns() {
    let mut world = World::new();
    let (fabric, mut device) = (world.fabric.clone(), world.device);
    let (plug, mut rounds) = (Arc::clone(&world.plug), 0);
    let mut there = true;
    let mut since = Instant::now();
    let started = Instant::now();
    let watch = |progress: &Progress| {
        assert!(
            started.elapsed() < Duration::from_secs(120),
            "{rounds} rounds, {there}, {progress:?}"
        );
        if progress.reconnecting.is_some() || progress.phase != "running" {
            since = Instant::now();
            return true;
        }
        // Long enough for a connection to count as stable.
        if since.elapsed() < Duration::from_millis(300) {
            return true;
        }
        let by_rdma = plug.connections();
        match (there, by_rdma) {
            (true, 3) => {
                if rounds == 2 {
                    return false;
                }
                fabric.remove_device(device);
                (there, since) = (false, Instant::now());
            }
            (false, 0) => {
                let back = fabric.add_device(attributes("sim_target"), &[TARGET]);
                (device, there, since) = (back.unwrap(), true, Instant::now());
                rounds += 1;
            }
            _ => {}
        }
        true
    };
    let report = world.run(true, Limit::Time(Duration::from_secs(600)), watch);
    world.device = device;
    let v = report.verification.as_ref().unwrap();
    assert_eq!(v.blocks_wrong, 0, "{report:?}");
    assert!(
        report.errors.is_empty() && report.unfinished == 0,
        "{report:?}"
    );
    let paths = report.paths.as_ref().unwrap();
    assert_eq!(paths.transport, "rdma");
    assert_eq!((paths.fallbacks, paths.returns), (2, 2), "{paths:?}");
    assert_eq!(paths.moves, 4, "two queues, twice");
    assert!(paths.fallback_cause.is_some());
}

/// Goal: without a device the error has the exact text; with a fallback the text is the fallback's
/// cause.
#[test]
fn without_a_device() {
    let world = World::new();
    for (_, id) in [("target", world.device), ("host", DeviceId(1))] {
        world.fabric.remove_device(id);
    }
    let connector = world.connector(false);
    let mut failures = Vec::new();
    let session =
        Session::connect_reporting("here", world.options(false), &connector, |text: &str| {
            failures.push(text.to_owned());
        });
    let error = session.err().expect("no RDMA");
    assert!(matches!(error, SessionError::Exhausted { attempts: 3, .. }));
    let text = error.to_string();
    assert!(
        text.contains("No RDMA devices found: none is simulated; add one"),
        "{text}"
    );
    assert!(text.contains("--fallback tcp"), "{text}");
    assert_eq!(failures.len(), 3, "{failures:?}");

    let report = world.run(true, Limit::Ios(500), |_| true);
    assert!(report.is_good());
    let paths = report.paths.unwrap();
    assert_eq!((paths.transport.as_str(), paths.fallbacks), ("tcp", 1));
    assert!(
        paths
            .fallback_cause
            .unwrap()
            .contains("No RDMA devices found")
    );
}

/// Goal: the errors of a target unreachable by RDMA and of one that admits no host, and how soon
/// they come.
#[test]
fn unreachable_targets_are_reported() {
    let world = World::new();
    world
        .fabric
        .fault_connects(TARGET, Some(ConnectFault::Unreachable));
    let connector = world.connector(false);
    let refused = |options| {
        let session = Session::connect("here", options, &connector);
        session.err().expect("no session").to_string()
    };
    let text = refused(world.options(false));
    assert!(text.contains("cannot connect to 127.0.0.1"), "{text}");
    assert!(text.contains("ping, firewall, GID"), "{text}");

    world.fabric.fault_connects(TARGET, None);
    let mut options = world.options(false);
    options.subnqn = nqn("nqn.2025-01.io.nacre:another");
    let text = refused(options.clone());
    assert!(
        text.contains("1 attempt failed"),
        "refused for good: {text}"
    );
    assert!(text.contains("nacre discover"), "{text}");
    // Both transports are tried, once each.
    let connector = world.connector(true);
    options.paths = world.options(true).paths;
    let session = Session::connect("here", options, &connector);
    let text = session.err().expect("no session").to_string();
    assert!(text.contains("RDMA: ") && text.contains("TCP: "), "{text}");
    assert!(text.contains("2 attempts failed"), "{text}");
}

/// Goal: if the target grants fewer queues over RDMA than requested, TCP carries them.
#[test]
fn queues_beyond_the_rdma_limit_use_tcp() {
    let world = World::new();
    // The admin queue connects; the device refuses further queues.
    let connector = world.connector(true);
    let mut session = Session::connect("here", world.options(true), &connector).unwrap();
    world
        .fabric
        .fault_connects(TARGET, Some(ConnectFault::ConnectError));
    let mut watch = |_: &Progress| true;
    let report = load::run(
        &job(Limit::Ios(200)),
        &mut session,
        &connector,
        ("here", None),
        &mut watch,
    );
    let report = report.unwrap_or_else(|error: PerfError| panic!("{error}"));
    assert!(report.is_good());
    let paths = report.paths.unwrap();
    assert_eq!(paths.transport, "tcp", "{:?}", paths.fallback_cause);
    session.disconnect();
}
