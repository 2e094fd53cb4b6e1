//! The harness of the tests: a target that can disappear and return, and hosts connected to it by
//! the loopback transport.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nacre_bdev::layer::Layer;
use nacre_bdev::{Bdev, Completion, Done, Flags, Io, Op, Queue, Status};
use nacre_hugepages::{Buf, ClassSpec, Pool};
use nacre_nvmf::host::{ControllerState, Dial, HostController, HostOptions, IoQueue};
use nacre_nvmf::queues::{GroupConfig, QueueGroup};
use nacre_nvmf::subsystems::{
    Authentication, Backing, NamespaceConfig, NamespaceIds, SubsystemConfig, Target, TargetConfig,
};
use nacre_nvmf::transport::{Address, HostTransport, Pools, TransportType};
use nacre_nvmf_wire::Nqn;
use nacre_reactor::{Helper, Nanos};
use nacre_tests::target::{SUBNQN, nqn};
use nacre_transport_loopback::{Faults, LoopbackConfig, LoopbackPlug};

use super::tap::Tap;

pub(crate) const HOSTNQN: &str =
    "nqn.2014-08.org.nvmexpress:uuid:f81d4fae-7dec-11d0-a765-00a0c91e6bf6";
pub(crate) const BLOCK: u32 = 512;
pub(crate) const BLOCKS: u64 = 4096;
const LISTENER: &str = "here";

/// The running target and its group.
pub(crate) struct RunningTarget {
    pub target: Arc<Target>,
    group: QueueGroup,
}

/// The network: the plug of the target, while there is one.
#[derive(Default)]
pub(crate) struct Net {
    plug: Option<Arc<LoopbackPlug>>,
    /// Dialled queues, with the time.
    pub dials: Vec<(u16, Nanos)>,
    faults: Vec<(u16, Faults)>,
    pub now: Nanos,
}

pub(crate) struct World {
    pub now: Nanos,
    pub net: Rc<RefCell<Net>>,
    pub alive: Option<RunningTarget>,
    pub pools: Pools,
    pub memory: Pool,
    pub tap: Arc<Tap>,
    layers: Vec<Arc<Layer>>,
    pub controller: Option<HostController>,
    pub queues: Vec<IoQueue>,
    pub completions: BTreeMap<u64, Completion>,
    /// Tokens in the order of their completion.
    pub order: Vec<u64>,
    done: Done,
    next_token: u64,
}

pub(crate) fn options(io_queues: u16) -> HostOptions {
    let mut options = HostOptions::new(nqn(HOSTNQN), [7; 16], nqn(SUBNQN));
    options.io_queues = io_queues;
    options.queue_entries = 17;
    options
}

/// A memory pool for the host, whose buffers are counted.
fn memory() -> Pool {
    Pool::heap(&[
        ClassSpec {
            size: 4096,
            count: 64,
        },
        ClassSpec {
            size: 128 << 10,
            count: 8,
        },
    ])
}

impl World {
    /// A target with namespace 1, without hosts.
    pub(crate) fn new() -> Self {
        let mut world = Self {
            now: Nanos(1_000_000),
            net: Rc::default(),
            alive: None,
            pools: Pools {
                io: memory(),
                admin: memory(),
            },
            memory: memory(),
            tap: Tap::new("tap", BLOCK, BLOCKS),
            layers: Vec::new(),
            controller: None,
            queues: Vec::new(),
            completions: BTreeMap::new(),
            order: Vec::new(),
            done: Done::with_capacity(8),
            next_token: 1,
        };
        world.start_target();
        let tap: Arc<dyn Bdev> = world.tap.clone();
        world.add_namespace(tap);
        world
    }

    /// Like `new`, with a live controller and `queues` live I/O queues on namespace 1.
    pub(crate) fn connected(queues: u16) -> Self {
        Self::connected_with(options(queues))
    }

    pub(crate) fn connected_with(options: HostOptions) -> Self {
        let queues = options.io_queues;
        let mut world = Self::new();
        world.connect(options);
        world.until("live", |w| w.controller().is_live());
        for qid in 1..=queues {
            world.open_queue(qid, 1);
        }
        world.until("queues live", |w| w.queues.iter().all(IoQueue::is_live));
        world
    }

    // The target.

    /// A fresh target without namespaces, which admits any host.
    pub(crate) fn start_target(&mut self) {
        let plug = Arc::new(LoopbackPlug::new(LoopbackConfig::default()));
        let authentication = Authentication::with_helper(Arc::new(Helper::at_once()));
        let target = Target::with_authentication(TargetConfig::default(), 1, authentication);
        target.add_plug(plug.clone()).unwrap();
        let (pools, config) = (self.pools.clone(), GroupConfig::default());
        let mut group =
            QueueGroup::new(Arc::clone(&target), 0, pools, Arc::new(|| {}), config).unwrap();
        group.turn(self.now);
        let mut config = SubsystemConfig::new(nqn(SUBNQN));
        config.allow_any_host = true;
        config.max_namespaces = 2000;
        config.ana_reporting = true;
        target.create_subsystem(config).unwrap();
        let address = Address::Loopback(LISTENER.into());
        target
            .add_listener(&nqn(SUBNQN), TransportType::Loopback, &address)
            .unwrap();
        self.net.borrow_mut().plug = Some(plug);
        self.alive = Some(RunningTarget { target, group });
    }

    /// Drops the target process with its connections.
    pub(crate) fn kill_target(&mut self) {
        let mut net = self.net.borrow_mut();
        net.plug = None;
        for (_, faults) in net.faults.drain(..) {
            faults.break_now();
        }
        drop(net);
        self.alive = None;
    }

    /// Restarts the target with the same namespace 1.
    pub(crate) fn revive_target(&mut self) {
        self.start_target();
        let tap: Arc<dyn Bdev> = self.tap.clone();
        self.add_namespace(tap);
    }

    pub(crate) fn target(&self) -> &Arc<Target> {
        &self.alive.as_ref().expect("a target").target
    }

    /// Announces a new size of the tap to all layers.
    pub(crate) fn resized(&self) {
        for layer in &self.layers {
            layer.refresh();
        }
        self.target().bdev_resized(self.tap.name());
    }

    pub(crate) fn add_namespace(&mut self, bdev: Arc<dyn Bdev>) -> u32 {
        let layer = Layer::new(bdev);
        self.layers.push(Arc::clone(&layer));
        let layer: Arc<dyn Bdev> = layer;
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
        self.target().add_namespace(&nqn(SUBNQN), config).unwrap()
    }

    pub(crate) fn remove_namespace(&self, nsid: u32) {
        let subsystem = self.target().subsystem(&nqn(SUBNQN)).unwrap();
        subsystem.remove_namespace(nsid).unwrap();
    }

    // The host.

    pub(crate) fn dial(&self) -> Box<dyn Dial> {
        let net = Rc::clone(&self.net);
        Box::new(move |qid: u16| {
            let mut net = net.borrow_mut();
            let now = net.now;
            net.dials.push((qid, now));
            let refused = || std::io::Error::from(std::io::ErrorKind::ConnectionRefused);
            let plug = net.plug.clone().ok_or_else(refused)?;
            let host = plug.connect_host(LISTENER).map_err(std::io::Error::other)?;
            net.faults.push((qid, host.faults()));
            Ok(Box::new(host) as Box<dyn HostTransport>)
        })
    }

    pub(crate) fn connect(&mut self, options: HostOptions) {
        let (dial, memory) = (self.dial(), self.memory.clone());
        self.net.borrow_mut().now = self.now;
        self.controller = Some(HostController::new(options, dial, memory, self.now));
    }

    pub(crate) fn connect_to(&mut self, subnqn: Nqn) {
        let mut options = options(1);
        options.subnqn = subnqn;
        self.connect(options);
    }

    pub(crate) fn open_queue(&mut self, qid: u16, nsid: u32) {
        let (options, link) = (
            self.controller().options().clone(),
            self.controller().link(),
        );
        let (link, memory) = (Arc::clone(link), self.memory.clone());
        let queue = IoQueue::new(options, link, self.dial(), memory, (qid, nsid), self.now);
        self.queues.push(queue.unwrap());
    }

    pub(crate) fn controller(&self) -> &HostController {
        self.controller.as_ref().expect("a controller")
    }

    pub(crate) fn controller_mut(&mut self) -> &mut HostController {
        self.controller.as_mut().expect("a controller")
    }

    pub(crate) fn failure(&self) -> String {
        match self.controller().state() {
            ControllerState::Failed(error) | ControllerState::Waiting { error, .. } => {
                error.to_string()
            }
            state => panic!("no failure: {state:?}"),
        }
    }

    /// The latest connection of queue `qid`.
    pub(crate) fn faults(&self, qid: u16) -> Faults {
        let net = self.net.borrow();
        let found = net.faults.iter().rev().find(|(q, _)| *q == qid);
        found.expect("the queue was dialled").1.clone()
    }

    // Time.

    pub(crate) fn turn(&mut self) {
        self.step(Duration::from_micros(10));
    }

    pub(crate) fn step(&mut self, by: Duration) {
        self.now = self.now + by;
        self.net.borrow_mut().now = self.now;
        if let Some(alive) = &mut self.alive {
            alive.group.turn(self.now);
        }
        if let Some(controller) = &mut self.controller {
            controller.poll(self.now);
        }
        for queue in &mut self.queues {
            queue.poll(self.now, &mut self.done);
            for completion in self.done.drain() {
                let token = completion.token;
                self.order.push(token);
                let before = self.completions.insert(token, completion);
                assert!(before.is_none(), "I/O {token} completed twice");
            }
        }
    }

    pub(crate) fn pass(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end {
            self.step(Duration::from_millis(20));
        }
    }

    /// Turns for up to ten minutes of virtual time, first in small steps and then in larger ones.
    pub(crate) fn until(&mut self, what: &str, mut done: impl FnMut(&mut Self) -> bool) {
        for turn in 0..40_000u64 {
            if done(self) {
                return;
            }
            self.step(match turn {
                0..10_000 => Duration::from_micros(10),
                _ => Duration::from_millis(20),
            });
        }
        let state = self.controller.as_ref().map(HostController::state);
        panic!("never happens: {what}; controller {state:?}");
    }

    // I/O.

    pub(crate) fn buf(&self, blocks: u32, seed: u8) -> Buf {
        let len = (blocks * BLOCK) as usize;
        let mut buf = self.memory.acquire(len).expect("memory enough");
        buf.bytes_mut()
            .unwrap()
            .copy_from_slice(&bytes(blocks, seed));
        buf
    }

    pub(crate) fn io(&mut self, op: Op, lba: u64, blocks: u32) -> Io {
        self.next_token += 1;
        Io::new(self.next_token, op, lba, blocks)
    }

    pub(crate) fn submit(&mut self, queue: usize, io: Io) -> u64 {
        let token = io.token;
        assert!(self.queues[queue].submit(io).is_ok(), "the queue is full");
        token
    }

    pub(crate) fn wait(&mut self, token: u64) -> Completion {
        self.until("a completion", |w| w.completions.contains_key(&token));
        self.completions.remove(&token).unwrap()
    }

    pub(crate) fn run(&mut self, queue: usize, io: Io) -> Status {
        let token = self.submit(queue, io);
        self.wait(token).status
    }

    pub(crate) fn write(&mut self, queue: usize, lba: u64, blocks: u32, seed: u8) -> Status {
        let buf = self.buf(blocks, seed);
        let io = self.io(Op::Write, lba, blocks).with(buf);
        self.run(queue, io)
    }

    pub(crate) fn submit_write(&mut self, queue: usize, lba: u64, blocks: u32, seed: u8) -> u64 {
        let buf = self.buf(blocks, seed);
        let io = self.io(Op::Write, lba, blocks).with(buf);
        self.submit(queue, io)
    }

    pub(crate) fn submit_read(&mut self, queue: usize, lba: u64, blocks: u32) -> u64 {
        let buf = self.buf(blocks, 0xee);
        let io = self.io(Op::Read, lba, blocks).with(buf);
        self.submit(queue, io)
    }

    pub(crate) fn read(&mut self, queue: usize, lba: u64, blocks: u32) -> Vec<u8> {
        let token = self.submit_read(queue, lba, blocks);
        let completion = self.wait(token);
        assert_eq!(completion.status, Status::Ok);
        completion.data.iter().flat_map(|b| b.to_vec()).collect()
    }

    pub(crate) fn flags(&mut self, op: Op, lba: u64, blocks: u32, flags: Flags) -> Io {
        self.io(op, lba, blocks).flags(flags)
    }

    /// Checks that all host buffers except `kept` are back in the pool.
    pub(crate) fn assert_buffers_back(&mut self, kept: usize) {
        self.completions.clear();
        let missing: usize = self.memory.stats().iter().map(|c| c.count - c.free).sum();
        assert_eq!(missing, kept, "buffers of the host are missing");
    }
}

/// Bytes that differ by block and by `seed`.
pub(crate) fn bytes(blocks: u32, seed: u8) -> Vec<u8> {
    let byte = |at: u32| (at / BLOCK) as u8 ^ seed.wrapping_mul(31) ^ (at % 251) as u8;
    (0..blocks * BLOCK).map(byte).collect()
}
