//! Goal: in steady state an I/O allocates no heap memory, from the host's submit to the device and
//! back, over each transport. Method: both ends in one thread under a counting allocator.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nacre_bdev::layer::Layer;
use nacre_bdev::{Bdev, Done, Io, Op, Queue};
use nacre_hugepages::{Arena, ArenaOptions, Buf, ClassSpec, Pool};
use nacre_nvmf::host::{Dial, HostController, HostOptions, IoQueue};
use nacre_nvmf::queues::{GroupConfig, QueueGroup};
use nacre_nvmf::subsystems::{
    Backing, NamespaceConfig, NamespaceIds, SubsystemConfig, Target, TargetConfig,
};
use nacre_nvmf::tcp::HostConfig;
use nacre_nvmf::transport::{Address, HostTransport, Plug, Pools, TransportType};
use nacre_nvmf_wire::tcp::Digests;
use nacre_reactor::Nanos;
use nacre_tests::target::{SUBNQN, nqn, ram};
use nacre_transport_loopback::{LoopbackConfig, LoopbackPlug};
use nacre_transport_rdma::{RdmaConfig, RdmaHostOptions, RdmaHosts, RdmaPlug};
use nacre_transport_rdma_verbs::sim::{Fabric, attributes};
use nacre_transport_tcp::{TcpConfig, TcpHostOptions, TcpPlug, connect_host};

const DEPTH: usize = 32;
const BLOCK: u32 = 4096;
const DISK_BYTES: u64 = 32 << 20;

const CLASSES: [ClassSpec; 2] = [
    ClassSpec {
        size: 4096,
        count: 256,
    },
    ClassSpec {
        size: 128 << 10,
        count: 2 * DEPTH + 8,
    },
];

fn memory() -> Pool {
    Pool::heap(&CLASSES)
}

/// Host and target.
struct Pair {
    group: QueueGroup,
    controller: HostController,
    queue: IoQueue,
    memory: Pool,
    done: Done,
    now: Nanos,
    /// Drives connection management until the connections are up.
    manage: Box<dyn Fn()>,
}

/// Memory of target and host, and the hook that drives connection management.
struct Testbed {
    pools: Pools,
    memory: Pool,
    manage: Box<dyn Fn()>,
}

impl Default for Testbed {
    fn default() -> Self {
        Self {
            pools: Pools {
                io: memory(),
                admin: memory(),
            },
            memory: memory(),
            manage: Box::new(|| ()),
        }
    }
}

impl Pair {
    fn new(
        plug: Arc<dyn Plug>,
        listen: &Address,
        dial: impl Fn(&Address) -> Box<dyn Dial>,
        ground: Testbed,
    ) -> Self {
        let Testbed {
            pools,
            memory,
            manage,
        } = ground;
        let target = Target::new(TargetConfig::default(), 1);
        let kind = plug.kind();
        target.add_plug(plug).unwrap();
        let (config, wake) = (GroupConfig::default(), Arc::new(|| {}));
        let mut group = QueueGroup::new(Arc::clone(&target), 0, pools, wake, config).unwrap();
        let mut now = Nanos(1);
        group.turn(now);
        let mut config = SubsystemConfig::new(nqn(SUBNQN));
        config.allow_any_host = true;
        target.create_subsystem(config).unwrap();
        let address = target.add_listener(&nqn(SUBNQN), kind, listen).unwrap();
        add_namespace(&target);

        let mut options = HostOptions::new(nqn("nqn.2025-01.io.nacre:host"), [3; 16], nqn(SUBNQN));
        options.queue_entries = DEPTH as u16 + 1;
        let mut controller =
            HostController::new(options.clone(), dial(&address), memory.clone(), now);
        let mut turn = |controller: &mut HostController| {
            now = now + Duration::from_micros(1);
            manage();
            group.turn(now);
            controller.poll(now);
            now
        };
        while !controller.is_live() {
            turn(&mut controller);
        }
        let link = Arc::clone(controller.link());
        let ids = (1, 1);
        let mut queue = IoQueue::new(options, link, dial(&address), memory.clone(), ids, Nanos(1));
        let queue_ref = queue.as_mut().expect("an epoll");
        while !queue_ref.is_live() {
            let now = turn(&mut controller);
            queue_ref.poll(now, &mut Done::with_capacity(1));
        }
        let queue = queue.expect("it was there");
        Self {
            group,
            controller,
            queue,
            memory,
            done: Done::with_capacity(DEPTH),
            now,
            manage,
        }
    }

    /// Runs this many I/Os of `blocks` blocks, alternately reads and writes, at full queue depth.
    fn run(&mut self, ios: usize, blocks: u32, bufs: &mut Vec<Buf>) {
        let (mut started, mut ended) = (0, 0);
        let area = DISK_BYTES / u64::from(BLOCK) - u64::from(blocks);
        while ended < ios {
            self.now = self.now + Duration::from_micros(1);
            self.queue.poll(self.now, &mut self.done);
            for mut completion in self.done.drain() {
                assert!(completion.status.is_ok(), "{:?}", completion.status);
                bufs.extend(completion.data.pop());
                ended += 1;
            }
            while started < ios
                && let Some(buf) = bufs.pop()
            {
                let op = if started % 2 == 0 {
                    Op::Write
                } else {
                    Op::Read
                };
                let lba = started as u64 * 7919 % area;
                let io = Io::new(started as u64, op, lba, blocks).with(buf);
                assert!(self.queue.submit(io).is_ok());
                started += 1;
            }
            self.group.turn(self.now);
            self.controller.poll(self.now);
        }
    }

    /// Goal: after warm-up runs, which grow all buffers, I/O allocates nothing.
    fn assert_allocates_nothing(&mut self, what: &str) {
        (self.manage)();
        for (size, ios) in [(4096, 4000), (128 << 10, 400)] {
            let blocks = size / BLOCK;
            let acquire = |_| self.memory.acquire(size as usize).expect("memory enough");
            let mut bufs: Vec<Buf> = (0..DEPTH).map(acquire).collect();
            self.run(ios, blocks, &mut bufs);
            let counted = allocation_counter::measure(|| self.run(ios, blocks, &mut bufs));
            assert_eq!(
                counted.count_total, 0,
                "{what}: {} bytes allocated by {ios} I/Os of {size} bytes",
                counted.bytes_total
            );
        }
    }
}

fn add_namespace(target: &Arc<Target>) {
    let layer: Arc<dyn Bdev> = Layer::new(ram("ram", BLOCK, DISK_BYTES));
    let opened = Arc::clone(&layer);
    let open = Arc::new(move |pool: &Pool| Arc::clone(&opened).open(pool));
    let config = NamespaceConfig {
        nsid: None,
        bdev_name: "ram".into(),
        ids: NamespaceIds::from_uuid(layer.uuid()),
        backing: Backing::new(layer, open),
        ana_group: None,
        auto_visible: true,
        reservations: Default::default(),
    };
    target.add_namespace(&nqn(SUBNQN), config).unwrap();
}

/// Goal: the allocation counter counts the allocations of this thread.
#[test]
fn the_allocation_counter_counts() {
    let counted = allocation_counter::measure(|| {
        let map: HashMap<u64, u64> = (0..100).map(|n| (n, n)).collect();
        assert_eq!(map.len(), 100);
    });
    assert!(counted.count_total > 0);
}

#[test]
fn over_loopback() {
    let plug = Arc::new(LoopbackPlug::new(LoopbackConfig::default()));
    let listen = Address::Loopback("here".into());
    let dialled = Arc::clone(&plug);
    let dial = move |_: &Address| -> Box<dyn Dial> {
        let plug = Arc::clone(&dialled);
        Box::new(move |_qid: u16| {
            let host = plug.connect_host("here").map_err(std::io::Error::other)?;
            Ok(Box::new(host) as Box<dyn HostTransport>)
        })
    };
    Pair::new(plug, &listen, dial, Testbed::default()).assert_allocates_nothing("loopback");
}

#[test]
fn over_tcp() {
    for digests in [Digests::NONE, Digests::BOTH] {
        let plug = Arc::new(TcpPlug::new(TcpConfig::default()).unwrap());
        assert_eq!(plug.kind(), TransportType::Tcp);
        let listen = Address::Ip("127.0.0.1:0".parse().unwrap());
        let dial = move |address: &Address| -> Box<dyn Dial> {
            let Address::Ip(address) = *address else {
                panic!("TCP listens on {address}")
            };
            let machine = HostConfig {
                digests,
                entries: DEPTH + 1,
                ..HostConfig::default()
            };
            Box::new(move |_qid: u16| {
                let machine = machine.clone();
                let options = TcpHostOptions {
                    machine,
                    ..TcpHostOptions::default()
                };
                let host = connect_host(address, options)?;
                Ok(Box::new(host) as Box<dyn HostTransport>)
            })
        };
        Pair::new(plug, &listen, dial, Testbed::default()).assert_allocates_nothing("TCP");
    }
}

/// Simulated devices, whose memory is the only memory that the data passes through.
#[test]
fn over_rdma() {
    let (at, from) = ("10.0.0.1".parse().unwrap(), "10.0.0.2".parse().unwrap());
    let fabric = Fabric::new();
    fabric.add_device(attributes("sim_target"), &[at]).unwrap();
    fabric.add_device(attributes("sim_host"), &[from]).unwrap();
    let bytes = 4 * Pool::bytes_for(&CLASSES) as u64;
    let arena = Arena::allocate(ArenaOptions::new(bytes)).unwrap();
    let pool = || Pool::on_arena(&arena, &CLASSES).unwrap();
    let (pools, memory) = (
        Pools {
            io: pool(),
            admin: pool(),
        },
        pool(),
    );
    let arenas = vec![arena.clone()];
    let plug =
        RdmaPlug::without_thread(RdmaConfig::default(), fabric.provider(), arenas.clone()).unwrap();
    let plug = Arc::new(plug);
    let hosts = Rc::new(RdmaHosts::without_thread(fabric.provider(), arenas).unwrap());
    let dialled = Rc::clone(&hosts);
    let dial = move |address: &Address| -> Box<dyn Dial> {
        let Address::Ip(address) = *address else {
            panic!("RDMA listens on {address}")
        };
        let dialer = dialled.dialer(2, DEPTH as u16 + 1).unwrap();
        Box::new(move |qid: u16| {
            let entries = if qid == 0 { 32 } else { DEPTH as u16 + 1 };
            let options = RdmaHostOptions {
                source: Some(from),
                ..RdmaHostOptions::new(qid, entries)
            };
            let host = dialer.connect(address, options)?;
            Ok(Box::new(host) as Box<dyn HostTransport>)
        })
    };
    let managed = Arc::clone(&plug);
    let ground = Testbed {
        pools,
        memory,
        manage: Box::new(move || {
            managed.turn();
            hosts.turn(Instant::now());
        }),
    };
    let listen = Address::Ip(SocketAddr::new(at, 4420));
    let counts = Arc::clone(&plug);
    let mut pair = Pair::new(plug, &listen, dial, ground);
    pair.assert_allocates_nothing("RDMA");
    let counts = counts.counts();
    assert!(counts.bytes_received > 2 * 4000 * 4096, "{counts:?}");
}
