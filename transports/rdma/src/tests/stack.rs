//! Tests of the whole protocol: the host's controller and I/O queues against the target, over
//! simulated devices.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nacre_bdev::layer::Layer;
use nacre_bdev::{Bdev, Completion, Done, Io, Op, Queue, Status, malloc};
use nacre_hugepages::{Arena, ArenaOptions, ClassSpec, Pool};
use nacre_nvmf::host::{Dial, HostController, HostOptions, IoQueue, PathOptions, WantedQueue};
use nacre_nvmf::queues::{GroupConfig, QueueGroup};
use nacre_nvmf::subsystems::{
    Backing, ListenOptions, NamespaceConfig, NamespaceIds, SubsystemConfig, Target, TargetConfig,
};
use nacre_nvmf::transport::{Address, HostTransport, ListenerOptions, Pools, TransportType};
use nacre_nvmf_wire::Nqn;
use nacre_reactor::Nanos;
use nacre_transport_loopback::{LoopbackConfig, LoopbackPlug};
use nacre_transport_rdma_verbs::sim::{Fabric, Target as Faulty, attributes};
use nacre_transport_rdma_verbs::{DeviceAttributes, DeviceId, WcStatus};

use super::rig::{HOST, TARGET};
use crate::{RdmaConfig, RdmaHosts, RdmaPlug, Timed};

const BLOCK: u32 = 512;
const SUBNQN: &str = "nqn.2024-01.io.nacre:rdma";
const HOSTNQN: &str = "nqn.2014-08.org.nvmexpress:uuid:f81d4fae-7dec-11d0-a765-00a0c91e6bf6";
const CLASSES: [ClassSpec; 2] = [
    ClassSpec {
        size: 4096,
        count: 256,
    },
    ClassSpec {
        size: 128 << 10,
        count: 32,
    },
];

/// What differs between the tests.
#[derive(Clone)]
pub(super) struct Setup {
    /// The target's device.
    pub device: DeviceAttributes,
    pub config: RdmaConfig,
    pub listener: ListenerOptions,
    pub paths: Option<PathOptions>,
    /// Keep-alive timeout of the host; zero: none.
    pub keep_alive: Duration,
    /// Time limit for a connection over RDMA.
    pub cm_timeout: Duration,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            device: attributes("sim_target"),
            config: RdmaConfig {
                max_qpairs: 8,
                srq_size: 256,
                ..RdmaConfig::default()
            },
            listener: ListenerOptions::default(),
            paths: None,
            keep_alive: Duration::from_secs(15),
            cm_timeout: Duration::from_secs(5),
        }
    }
}

/// Dials by RDMA, or in memory where TCP is asked for.
#[derive(Clone)]
pub(super) struct Dialer(Rc<dyn Fn(&WantedQueue) -> Dialled>);

type Dialled = std::io::Result<Box<dyn HostTransport>>;

impl Dial for Dialer {
    fn dial(&mut self, qid: u16) -> std::io::Result<Box<dyn HostTransport>> {
        panic!("queue {qid} is dialled without a word on how")
    }

    fn dial_wanted(&mut self, wanted: &WantedQueue) -> std::io::Result<Box<dyn HostTransport>> {
        (self.0)(wanted)
    }
}

pub(super) struct Stack {
    pub queue: Option<IoQueue>,
    /// Runs turns without I/O: the queue is polled only when it requests it, as bdev queues are.
    pub idle: Option<IoQueue>,
    pub controller: HostController,
    group: QueueGroup,
    pub plug: Arc<RdmaPlug>,
    /// The replacement for TCP.
    pub other: Arc<LoopbackPlug>,
    hosts: RdmaHosts,
    pub fabric: Fabric,
    pub device: DeviceId,
    pub host_device: DeviceId,
    pub memory: Pool,
    done: Done,
    pub completions: HashMap<u64, Completion>,
    options: HostOptions,
    dial: Dialer,
    started: Instant,
    pub now: Nanos,
}

pub(super) const OTHER: &str = "other";

fn nqn(name: &str) -> Nqn {
    name.parse().unwrap()
}

impl Stack {
    pub(super) fn new(setup: Setup) -> Self {
        let fabric = Fabric::new();
        let device = fabric.add_device(setup.device, &[TARGET]).unwrap();
        let host_device = fabric.add_device(attributes("sim_host"), &[HOST]).unwrap();
        let arena = |count| {
            let bytes = Pool::bytes_for(&CLASSES) as u64 * count;
            Arena::allocate(ArenaOptions::new(bytes)).unwrap()
        };
        let (ours, theirs) = (arena(2), arena(1));
        let plug =
            RdmaPlug::without_thread(setup.config, fabric.provider(), vec![ours.clone()]).unwrap();
        let plug = Arc::new(plug);
        let hosts = RdmaHosts::without_thread(fabric.provider(), vec![theirs.clone()]).unwrap();
        let target = Target::new(TargetConfig::default(), 1);
        target.add_plug(plug.clone()).unwrap();
        let other = Arc::new(LoopbackPlug::new(LoopbackConfig::default()));
        target.add_plug(other.clone()).unwrap();
        let pool = || Pool::on_arena(&ours, &CLASSES).unwrap();
        let pools = Pools {
            io: pool(),
            admin: pool(),
        };
        let now = Nanos(1_000_000);
        let (shared, config) = (Arc::clone(&target), GroupConfig::default());
        let mut group = QueueGroup::new(shared, 0, pools, Arc::new(|| {}), config).unwrap();
        group.turn(now);
        let mut config = SubsystemConfig::new(nqn(SUBNQN));
        config.allow_any_host = true;
        target.create_subsystem(config).unwrap();
        let at = SocketAddr::new(TARGET, 4420);
        let (kind, own) = (TransportType::Rdma, setup.listener);
        let options = ListenOptions {
            listener: own,
            ..ListenOptions::default()
        };
        target
            .add_listener_with(&nqn(SUBNQN), kind, &Address::Ip(at), options)
            .unwrap();
        let here = Address::Loopback(OTHER.into());
        target
            .add_listener(&nqn(SUBNQN), TransportType::Loopback, &here)
            .unwrap();
        let disk = malloc::create(malloc::Config {
            name: "disk".into(),
            block_size: BLOCK,
            num_blocks: 4096,
            physical_block_size: None,
            uuid: None,
            optimal_io_boundary: None,
            numa_id: None,
        });
        let layer: Arc<dyn Bdev> = Layer::new(disk.unwrap());
        let opened = Arc::clone(&layer);
        let namespace = NamespaceConfig {
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
        target.add_namespace(&nqn(SUBNQN), namespace).unwrap();

        let dialer = hosts.dialer(8, 128).unwrap();
        let (elsewhere, cm_timeout) = (Arc::clone(&other), setup.cm_timeout);
        let dial = Dialer(Rc::new(move |wanted| {
            if wanted.transport == Some(TransportType::Tcp) {
                let host = elsewhere.connect_host(OTHER);
                return Ok(Box::new(host.map_err(std::io::Error::other)?));
            }
            let options = crate::RdmaHostOptions {
                source: Some(HOST),
                connection_retries: 0,
                cntlid: wanted.cntlid,
                cm_timeout,
                ..crate::RdmaHostOptions::new(wanted.qid, wanted.entries)
            };
            Ok(Box::new(dialer.connect(at, options)?))
        }));
        let mut options = HostOptions::new(nqn(HOSTNQN), [7; 16], nqn(SUBNQN));
        options.paths = setup.paths;
        options.keep_alive = setup.keep_alive;
        options.io_queues = 2;
        // Longer than an attempt, and all else as much longer as it is.
        options.connect_timeout = setup.cm_timeout * 2;
        (options.io_timeout, options.admin_timeout) = (setup.cm_timeout * 6, setup.cm_timeout * 6);
        let memory = Pool::on_arena(&theirs, &CLASSES).unwrap();
        let admin = Box::new(dial.clone());
        Self {
            queue: None,
            idle: None,
            controller: HostController::new(options.clone(), admin, memory.clone(), now),
            group,
            plug,
            other,
            hosts,
            fabric,
            device,
            host_device,
            memory,
            done: Done::with_capacity(8),
            completions: HashMap::new(),
            options,
            dial,
            started: Instant::now(),
            now,
        }
    }

    pub(super) fn step(&mut self, by: Duration) {
        self.now = self.now + by;
        self.plug.turn();
        self.hosts.turn(self.started + self.now.since(Nanos::ZERO));
        self.group.turn(self.now);
        self.controller.poll(self.now);
        if let Some(idle) = self.idle.as_mut().filter(|idle| !idle.is_settled()) {
            assert_eq!(idle.poll(self.now, &mut self.done), 0);
        }
        if let Some(queue) = &mut self.queue {
            queue.poll(self.now, &mut self.done);
            for completion in self.done.drain() {
                assert!(
                    self.completions
                        .insert(completion.token, completion)
                        .is_none()
                );
            }
        }
    }

    /// Within ten minutes of virtual time.
    pub(super) fn until(&mut self, what: &str, mut done: impl FnMut(&Self) -> bool) {
        for turn in 0..35_000u64 {
            if done(self) {
                return;
            }
            // In small steps first, then in larger ones.
            let step = if turn < 5000 { 10 } else { 20_000 };
            self.step(Duration::from_micros(step));
        }
        panic!(
            "never happens: {what}; controller {:?}",
            self.controller.state()
        );
    }

    pub(super) fn connect(&mut self) {
        self.until("a live controller", |stack| stack.controller.is_live());
        self.queue = Some(self.io_queue(1));
        self.until("a live queue", |stack| {
            stack.queue.as_ref().unwrap().is_live()
        });
    }

    pub(super) fn connect_idle(&mut self) {
        self.idle = Some(self.io_queue(2));
        self.until("a live queue", |stack| {
            stack.idle.as_ref().unwrap().is_live()
        });
    }

    fn io_queue(&self, qid: u16) -> IoQueue {
        let dial = Box::new(self.dial.clone());
        let (link, memory) = (Arc::clone(self.controller.link()), self.memory.clone());
        IoQueue::new(self.options.clone(), link, dial, memory, (qid, 1), self.now).unwrap()
    }

    pub(super) fn submit(&mut self, token: u64, op: Op, lba: u64, blocks: u32, fill: u8) {
        let mut buf = self.memory.acquire((blocks * BLOCK) as usize).unwrap();
        buf.bytes_mut().unwrap().fill(fill);
        let mut io = Io::new(token, op, lba, blocks);
        io.data.push(buf);
        let taken = self.queue.as_mut().unwrap().submit(io);
        assert!(taken.is_ok(), "room in the queue");
    }

    pub(super) fn finish(&mut self, token: u64) -> Completion {
        self.until("a completion", |stack| {
            stack.completions.contains_key(&token)
        });
        self.completions.remove(&token).unwrap()
    }

    pub(super) fn write_and_read(&mut self) {
        for (at, blocks) in [1, 8, 9, 64, 256].into_iter().enumerate() {
            let (token, lba, fill) = (at as u64 * 2, at as u64 * 300, 10 + at as u8);
            self.submit(token, Op::Write, lba, blocks, fill);
            assert_eq!(self.finish(token).status, Status::Ok);
            self.submit(token + 1, Op::Read, lba, blocks, 0);
            let read = self.finish(token + 1);
            assert_eq!(read.status, Status::Ok);
            let bytes = (blocks * BLOCK) as usize;
            assert!(read.data[0][..] == vec![fill; bytes][..], "{blocks} blocks");
        }
    }
}

/// A host finds the values for RDMA in Identify, writes, and reads its data back.
#[test]
fn host_and_target() {
    let mut stack = Stack::new(Setup::default());
    stack.connect();
    let id = stack.controller.identify().unwrap();
    assert_eq!(
        (id.icdoff.get(), id.in_capsule_bytes(), id.msdbd),
        (0, 4096, 16)
    );
    assert_eq!(id.sgls.get() & 1 << 2, 1 << 2, "keyed SGLs");
    let domains = stack.plug.domains();
    let before: u64 = domains
        .iter()
        .map(|domain| domain.registrations().registered_total)
        .sum();
    stack.write_and_read();
    let after: u64 = domains
        .iter()
        .map(|domain| domain.registrations().registered_total)
        .sum();
    assert_eq!(before, after, "nothing is registered under load");
    let stats = stack.plug.total();
    assert!(stats.read_ops >= 3 && stats.write_ops >= 5, "{stats:?}");
}

/// Goal: the idle timeout of a listener applies over RDMA. A host with Keep Alive stays connected;
/// without it, a silent host is disconnected.
#[test]
fn silent_hosts_are_disconnected() {
    for keep_alive in [Duration::from_secs(10), Duration::ZERO] {
        let mut stack = Stack::new(Setup {
            listener: ListenerOptions {
                idle_timeout_s: Some(20),
                ..ListenerOptions::default()
            },
            keep_alive,
            ..Setup::default()
        });
        stack.connect();
        stack.write_and_read();
        assert_eq!(stack.group.queue_pairs(), 2);
        let end = stack.now + Duration::from_secs(60);
        let mut closed = false;
        while stack.now < end && !closed {
            stack.step(Duration::from_millis(20));
            closed = stack.group.queue_pairs() < 2;
        }
        assert_eq!(closed, keep_alive.is_zero(), "{keep_alive:?}");
    }
}

/// Requests are timed from their post to their completion, and a WRITE until the response after it
/// has completed. Method: virtual time in steps of 10 us, one of which every request takes.
#[test]
fn latencies() {
    let mut stack = Stack::new(Setup::default());
    stack.connect();
    stack.write_and_read();
    let stats = stack.plug.total();
    let count = |of| stats.latency(of).count();
    assert_eq!(count(Timed::Read), stats.read_ops, "each READ");
    // Write commands need no completion of their responses; reads hold buffers until theirs.
    assert!(count(Timed::Write) >= 5 && count(Timed::Write) <= stats.write_ops);
    assert!(count(Timed::Send) >= count(Timed::Write) && count(Timed::Send) < stats.send_ops);
    for of in Timed::ALL {
        let latency = stats.latency(of);
        assert_eq!(latency.sum_ns, latency.count() * 10_000, "{of:?}");
        assert_eq!(latency.quantile_us(0.5), Some(16), "{of:?}");
        assert_eq!(latency.quantile_us(1.0), Some(16), "{of:?}");
    }
    // One that fails has no latency, but an error.
    let qp = stack.plug.queue_pairs().last().unwrap().number;
    stack
        .fabric
        .inject_status(qp, Faulty::Read, 0, WcStatus::RemoteAccess);
    stack.submit(900, Op::Write, 0, 64, 1);
    assert_eq!(stack.finish(900).status, Status::Ok, "sent again");
    let after = stack.plug.total();
    let failed = after
        .completion_errors()
        .map(|(_, count)| count)
        .sum::<u64>();
    assert_eq!(failed, 1);
    assert_eq!(after.latency(Timed::Read).count(), after.read_ops - 1);
}

/// The host copies no data, by a counter of the copies that an I/O in several buffers costs.
#[test]
fn the_host_copies_nothing() {
    let mut stack = Stack::new(Setup::default());
    stack.connect();
    stack.write_and_read();
    let copied = |stack: &Stack| stack.queue.as_ref().unwrap().stats().copied_bytes;
    assert_eq!(copied(&stack), 0);
    let mut expected = 0;
    for (token, op) in [(1000, Op::Write), (1001, Op::Read), (1002, Op::Compare)] {
        let mut io = Io::new(token, op, 64, 24);
        for len in [4096, 8192] {
            let mut buf = stack.memory.acquire(len).unwrap();
            buf.bytes_mut().unwrap().fill(7);
            io.data.push(buf);
        }
        assert!(stack.queue.as_mut().unwrap().submit(io).is_ok());
        let done = stack.finish(token);
        assert_eq!(done.status, Status::Ok, "{op:?}");
        assert!(
            done.data
                .iter()
                .all(|buf| buf.iter().all(|byte| *byte == 7))
        );
        expected += 12_288;
        assert_eq!(copied(&stack), expected, "{op:?}");
    }
}

/// The device goes with I/O under way, and comes back: the I/O is done, none is lost.
#[test]
fn io_survives_a_device_removal() {
    let mut stack = Stack::new(Setup::default());
    stack.connect();
    for token in 100..110 {
        stack.submit(token, Op::Write, token * 8, 8, token as u8);
    }
    stack.fabric.remove_device(stack.device);
    stack.until("an association lost", |stack| !stack.controller.is_live());
    stack
        .fabric
        .add_device(attributes("sim_target"), &[TARGET])
        .unwrap();
    for token in 100..110 {
        assert_eq!(stack.finish(token).status, Status::Ok);
    }
    for token in 100..110 {
        stack.submit(token, Op::Read, token * 8, 8, 0);
        let read = stack.finish(token);
        assert!(read.data[0][..] == [token as u8; 4096], "block {token}");
    }
    stack.write_and_read();
}
