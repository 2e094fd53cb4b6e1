//! Tests of every failure at every stage: it ends its connection and no other, and all resources of
//! the connection are released.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use nacre_bdev::Extents;
use nacre_hugepages::{ClassSpec, Pool};
use nacre_nvmf::transport::conformance::Rig;
use nacre_nvmf::transport::{
    CloseWhy, Closed, ConnId, Event, Events, HostCommand, HostEvent, HostTransport, ListenerCounts,
    ListenerId, Plug, Pools, QueueParams, ReqTag, Response,
};
use nacre_nvmf_wire::opcode::io;
use nacre_nvmf_wire::{Cqe, Sgl, Sqe};
use nacre_reactor::Idle;
use nacre_transport_rdma_verbs::sim::{ConnectFault, Target};
use nacre_transport_rdma_verbs::{AsyncEvent, CmEventKind, ConnParams, PortState, WcStatus};

use super::rig::{ENTRIES, Options, TARGET, TestRig};
use crate::{RdmaConfig, RdmaHost, RdmaHostOptions};

const CLASSES: [ClassSpec; 2] = [
    ClassSpec {
        size: 4096,
        count: 32,
    },
    ClassSpec {
        size: 64 << 10,
        count: 16,
    },
];

/// A target that completes every command, and one host at a time.
pub(super) struct World {
    host: Option<RdmaHost>,
    pub rig: TestRig,
    pools: Pools,
    memory: Pool,
    events: Events,
    conn: Option<ConnId>,
    fetching: HashMap<u16, Sqe>,
    closed: Vec<Closed>,
    ready: bool,
    host_closed: Option<Closed>,
    completed: Vec<(u16, Cqe)>,
    answer: bool,
}

impl World {
    pub(super) fn new(options: Options) -> Self {
        let mut rig = TestRig::new(options);
        let pools = Pools {
            io: rig.pool(&CLASSES),
            admin: rig.pool(&CLASSES),
        };
        let memory = rig.pool(&CLASSES);
        Self {
            host: None,
            rig,
            pools,
            memory,
            events: Events::with_capacity(64),
            conn: None,
            fetching: HashMap::new(),
            closed: Vec::new(),
            ready: false,
            host_closed: None,
            completed: Vec::new(),
            answer: true,
        }
    }

    fn turn(&mut self) {
        let now = self.rig.now();
        self.rig.transport.poll(now, &self.pools, &mut self.events);
        let events: Vec<Event> = self.events.drain().collect();
        for event in events {
            self.handle(event);
        }
        self.rig.transport.flush(now);
        let mut events = Vec::new();
        if let Some(host) = &mut self.host {
            host.poll(now, &mut events, 64);
        }
        for event in events {
            match event {
                HostEvent::Ready => self.ready = true,
                HostEvent::Completion { cqe, .. } => self.completed.push((cqe.cid(), cqe)),
                HostEvent::Closed(why) => {
                    assert!(self.host_closed.is_none(), "closed once");
                    self.host_closed = Some(why);
                }
            }
        }
    }

    pub(super) fn turns(&mut self, count: usize) {
        (0..count).for_each(|_| self.turn());
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Opened { conn, .. } => {
                assert!(self.conn.replace(conn).is_none());
                let params = QueueParams {
                    qid: 1,
                    entries: ENTRIES,
                    flow_control_off: false,
                };
                self.rig.transport.established(conn, params);
            }
            Event::Closed { conn, why } => {
                assert_eq!(self.conn.take(), Some(conn));
                self.closed.push(why);
                self.fetching.clear();
            }
            Event::Capsule { conn, sqe, data } => {
                assert_eq!(
                    self.conn,
                    Some(conn),
                    "a capsule of a connection that is there"
                );
                if !self.answer {
                    return;
                }
                let tag = ReqTag {
                    cid: sqe.cid(),
                    index: sqe.cid(),
                };
                let length = sqe.sgl().map_or(0, Sgl::length) as usize;
                if sqe.opcode == io::WRITE && data.is_none() {
                    self.fetching.insert(sqe.cid(), sqe);
                    let into = self.pools.io.acquire(length).unwrap();
                    return self.rig.transport.fetch(conn, tag, &sqe, into);
                }
                let mut data = Extents::new();
                if sqe.opcode == io::READ {
                    data.push(self.pools.io.acquire(length).unwrap());
                }
                self.respond(conn, tag, &sqe, data);
            }
            Event::Fetched { conn, tag, .. } => {
                let sqe = self
                    .fetching
                    .remove(&tag.cid)
                    .expect("the requested data was fetched");
                self.respond(conn, tag, &sqe, Extents::new());
            }
            other => panic!("{other:?}"),
        }
    }

    fn respond(&mut self, conn: ConnId, tag: ReqTag, sqe: &Sqe, data: Extents) {
        let response = Response {
            tag,
            cqe: Cqe::success(tag.cid),
            data,
            sgl: sqe.sgl_descriptor(),
            zero_copy: None,
        };
        self.rig.transport.respond(conn, response);
    }

    pub(super) fn dial(&mut self, options: RdmaHostOptions) {
        assert!(self.host.is_none());
        (self.ready, self.host_closed, self.answer) = (false, None, true);
        self.completed.clear();
        let mut host = self.rig.dial(options);
        host.set_in_capsule_bytes(4096);
        self.host = Some(host);
    }

    pub(super) fn connect(&mut self) {
        self.dial(TestRig::host_options());
        self.turns(10);
        assert!(self.ready && self.conn.is_some(), "{:?}", self.host_closed);
    }

    /// Submits one command of each kind: data in the capsule, data fetched by READ, data to the
    /// host.
    pub(super) fn submit(&mut self) {
        let host = self.host.as_mut().expect("a host");
        for (cid, opcode, len) in [
            (0, io::WRITE, 4096),
            (1, io::WRITE, 60_000),
            (2, io::READ, 60_000),
            (3, io::WRITE, 60_000),
            (4, io::READ, 4096),
            (5, io::WRITE, 512),
        ] {
            let buf = self.memory.acquire(len);
            let (write, read) = if opcode == io::READ {
                (None, buf)
            } else {
                (buf, None)
            };
            let sqe = Sqe::for_namespace(opcode, cid, 1);
            host.submit(HostCommand { sqe, write, read });
        }
    }

    /// The host sends its queued requests and disconnects before the target's core polls again.
    pub(super) fn host_leaves(&mut self) {
        let now = self.rig.now();
        let host = self.host.as_mut().expect("a host");
        host.poll(now, &mut Vec::new(), 64);
        host.close();
        (0..4).for_each(|_| self.rig.manage());
    }

    /// The host disconnects. Checks that the connection is gone and all resources are free again.
    pub(super) fn disconnect_and_check(&mut self, what: &str) {
        if let Some(mut host) = self.host.take() {
            host.close();
            while host.reclaim().is_some() {}
        }
        for _ in 0..4 {
            self.turns(6);
            // Longer than the time limits for flushing a queue pair and for connecting.
            self.rig.clock.advance(Duration::from_secs(21));
        }
        self.turns(6);
        assert_eq!(self.rig.transport.connections(), 0, "{what}");
        assert_eq!(self.rig.plug.connections(), 0, "{what}");
        assert_eq!(self.conn, None, "{what}: Closed was reported");
        assert_eq!(self.rig.fabric.queue_pairs(), [] as [u32; 0], "{what}");
        for pool in [&self.pools.io, &self.pools.admin, &self.memory] {
            for class in pool.stats() {
                assert_eq!(
                    class.free, class.count,
                    "{what}: buffers of {} bytes",
                    class.size
                );
            }
        }
        self.closed.clear();
    }

    /// Queue pair numbers of target and host.
    pub(super) fn qps(&self) -> (u32, u32) {
        let host = self
            .host
            .as_ref()
            .and_then(RdmaHost::qp)
            .expect("connected");
        (self.rig.fabric.peer_of(host).expect("connected"), host)
    }
}

/// Every completion status, at every stage of a request, at either end. The next connection works.
#[test]
fn every_status_at_every_stage() {
    let mut world = World::new(Options::default());
    for &status in &WcStatus::ALL[1..] {
        for target in [Target::Send, Target::Write, Target::Read, Target::Recv] {
            for (at_target, skip) in [(true, 0), (true, 1), (false, 0), (false, 3)] {
                let what = format!("{status} at {target:?}, {at_target}, after {skip}");
                world.connect();
                let (ours, theirs) = world.qps();
                let qp = if at_target { ours } else { theirs };
                world.rig.fabric.inject_status(qp, target, skip, status);
                world.submit();
                world.turns(20);
                // Hosts post no RDMA WRITE or READ, so those cannot fail there.
                if at_target || matches!(target, Target::Send | Target::Recv) {
                    assert!(world.completed.len() < 6, "{what}");
                } else {
                    assert_eq!(world.completed.len(), 6, "{what}");
                }
                world.disconnect_and_check(&what);
            }
        }
    }
    world.connect();
    world.submit();
    world.turns(20);
    assert_eq!(world.completed.len(), 6);
    assert_eq!(
        world.rig.fabric.posted_receives(),
        256,
        "every receive is posted again"
    );
    let stats = world.rig.plug.total();
    for (name, count) in stats.completion_errors() {
        assert!(count > 0, "{name}");
    }
    assert!(stats.retry_exceeded() > 0);
}

/// Every event of the connection manager, in every state of a connection, at either end.
#[test]
fn every_event_in_every_state() {
    let events = [
        CmEventKind::RouteResolved,
        CmEventKind::AddressError { status: -1 },
        CmEventKind::RouteError { status: -1 },
        CmEventKind::ConnectError { status: -1 },
        CmEventKind::Unreachable { status: -110 },
        CmEventKind::Rejected {
            status: 28,
            private_data: Default::default(),
        },
        CmEventKind::Established {
            params: ConnParams::default(),
        },
        CmEventKind::Disconnected,
        CmEventKind::DeviceRemoval,
        CmEventKind::AddressChange,
        CmEventKind::TimewaitExit,
        CmEventKind::Other {
            event: 99,
            status: 0,
        },
    ];
    let mut world = World::new(Options::default());
    let listener = world.rig.fabric.ids();
    for event in events {
        // Number of turns before the event, and whether commands are in flight.
        for (turns, busy) in [(1, false), (2, false), (3, false), (10, false), (10, true)] {
            for which in 0..2 {
                let what = format!("{event:?} after {turns}, busy {busy}, connection {which}");
                world.dial(TestRig::host_options());
                world.turns(turns);
                if busy {
                    world.answer = false;
                    world.submit();
                    world.turns(1);
                }
                let ids = world.rig.fabric.ids();
                let mut conns = ids.iter().filter(|id| !listener.contains(id));
                if let Some(id) = conns.nth(which) {
                    world.rig.fabric.inject_event(*id, event.clone());
                }
                world.turns(10);
                world.disconnect_and_check(&what);
            }
        }
    }
    let seen = world.rig.plug.control_counts().events;
    for name in [
        "RDMA_CM_EVENT_CONNECT_REQUEST",
        "RDMA_CM_EVENT_ESTABLISHED",
        "RDMA_CM_EVENT_DISCONNECTED",
        "RDMA_CM_EVENT_REJECTED",
        "RDMA_CM_EVENT_DEVICE_REMOVAL",
        "RDMA_CM_EVENT_ADDR_CHANGE",
        "RDMA_CM_EVENT_TIMEWAIT_EXIT",
    ] {
        assert!(
            seen.get(name).is_some_and(|count| *count > 0),
            "{name} in {seen:?}"
        );
    }
}

/// A removed device closes its connections and listeners. When it returns, listeners are up and
/// hosts connect.
#[test]
fn removal_and_return() {
    let mut world = World::new(Options::default());
    world.connect();
    world.submit();
    world.turns(1);
    world.rig.fabric.remove_device(world.rig.device);
    world.turns(10);
    assert_eq!(world.rig.plug.listening(), (0, 1));
    assert!(matches!(&world.closed[..], [Closed::Broken(why)] if why.contains("removed")));
    world.disconnect_and_check("removal");
    assert!(
        world.rig.plug.domains().is_empty(),
        "no memory is registered with the removed device"
    );
    // The driver waits for the last completion queue before it releases the device.
    assert_eq!(world.rig.fabric.completion_queues(), 0);
    let attributes = nacre_transport_rdma_verbs::sim::attributes("sim_target");
    world.rig.fabric.add_device(attributes, &[TARGET]).unwrap();
    world.turns(2);
    assert_eq!(world.rig.plug.listening(), (1, 1));
    world.connect();
    world.submit();
    world.turns(20);
    assert_eq!(world.completed.len(), 6);
    world.disconnect_and_check("return");
}

/// A device that reports its failure closes only its own connections. The listener is up again once
/// it can listen on the device.
#[test]
fn device_failure() {
    let mut world = World::new(Options::default());
    let changes = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&changes);
    world.rig.plug.on_change(move || {
        count.fetch_add(1, Ordering::Relaxed);
    });
    world.connect();
    world.submit();
    world.turns(1);
    let device = world.rig.device;
    world
        .rig
        .fabric
        .inject_async(device, AsyncEvent::DeviceFatal);
    world.turns(10);
    assert!(matches!(&world.closed[..], [Closed::Broken(why)] if why.contains("removed")));
    assert!(changes.load(Ordering::Relaxed) > 0);
    world.disconnect_and_check("failure");
    assert_eq!(world.rig.plug.listening(), (1, 1));
    world.connect();
    world.submit();
    world.turns(20);
    assert_eq!(world.completed.len(), 6);
    let before = changes.load(Ordering::Relaxed);
    let event = AsyncEvent::GidChange { port: 1 };
    world.rig.fabric.inject_async(device, event);
    world.turns(1);
    assert_eq!(changes.load(Ordering::Relaxed), before + 1);
    world.disconnect_and_check("recovery");
}

/// A port that is down for a while delays I/O and closes no connection.
#[test]
fn port_down_and_up() {
    let mut world = World::new(Options::default());
    world.connect();
    world
        .rig
        .fabric
        .set_port(world.rig.host_device, PortState::Down);
    world.submit();
    world.turns(10);
    assert!(world.completed.is_empty() && world.closed.is_empty());
    world
        .rig
        .fabric
        .set_port(world.rig.host_device, PortState::Active);
    world.turns(20);
    assert_eq!(world.completed.len(), 6);
    world.disconnect_and_check("port");
}

/// A failed connect is retried as often as configured, then reported with its stage.
#[test]
fn connecting() {
    let mut world = World::new(Options::default());
    for fault in [
        ConnectFault::AddressError,
        ConnectFault::RouteError,
        ConnectFault::Unreachable,
        ConnectFault::ConnectError,
        ConnectFault::Silent,
    ] {
        let silent = fault == ConnectFault::Silent;
        world.rig.fabric.fault_connects(TARGET, Some(fault.clone()));
        world.dial(RdmaHostOptions {
            connection_retries: 2,
            ..TestRig::host_options()
        });
        for _ in 0..2 {
            world.turns(6);
            assert_eq!(world.host_closed, None, "{fault:?}");
            world
                .rig
                .clock
                .advance(Duration::from_secs(if silent { 7 } else { 1 }));
        }
        for _ in 0..10 {
            world.turns(6);
            world.rig.clock.advance(Duration::from_secs(2));
        }
        let Some(Closed::Broken(why)) = world.host_closed.clone() else {
            panic!("{fault:?}: {:?}", world.host_closed);
        };
        let expected = match fault {
            ConnectFault::AddressError => "RDMA_CM_EVENT_ADDR_ERROR",
            ConnectFault::RouteError => "(ROUTE_RESOLVE)",
            ConnectFault::Silent => {
                "RDMA connection timeout after 5000ms (ADDR_RESOLVE); is it there (`ping 10.0.0.1`), does the packet filter \
                 admit UDP 4791"
            }
            _ => "(CONNECT)",
        };
        assert!(why.contains(expected), "{why}");
        world.disconnect_and_check(&format!("{fault:?}"));
    }
    // An attempt that succeeds after failures.
    world
        .rig
        .fabric
        .fault_connects(TARGET, Some(ConnectFault::Unreachable));
    world.dial(RdmaHostOptions {
        connection_retries: 1,
        ..TestRig::host_options()
    });
    world.turns(6);
    world.rig.fabric.fault_connects(TARGET, None);
    world.rig.clock.advance(Duration::from_secs(1));
    world.turns(10);
    assert!(world.ready);
    world.disconnect_and_check("second attempt");
}

/// Connection requests that are refused, by the code of the refusal.
#[test]
fn refused() {
    let options = |change: fn(&mut RdmaHostOptions)| {
        let mut options = TestRig::host_options();
        change(&mut options);
        options
    };
    let mut world = World::new(Options::with(|options| options.config.max_queue_depth = 32));
    let mut refusals = 0;
    let mut refused = |world: &mut World, options, text: &str| {
        world.dial(options);
        world.turns(8);
        let why = format!("{:?}", world.host_closed);
        assert!(why.contains(text), "{why}");
        refusals += 1;
        assert_eq!(world.rig.plug.control_counts().rejected_total, refusals);
        let counts = world.rig.plug.listener_counts(ListenerId(3)).unwrap();
        assert_eq!((counts.accepted, counts.refused), (0, refusals));
        world.disconnect_and_check(text);
    };
    let deep = options(|options| options.entries = 33);
    refused(&mut world, deep, "invalid host send queue size (code 04h)");
    let odd = options(|options| (options.qid, options.entries) = (u16::MAX, 32));
    refused(&mut world, odd, "invalid queue identifier (code 03h)");
    let no_reads = options(|options| (options.read_depth, options.entries) = (0, 32));
    refused(&mut world, no_reads, "(code 07h)");
    world.dial(options(|options| options.entries = 32));
    world.turns(8);
    let counts = |id| world.rig.plug.listener_counts(ListenerId(id));
    let expected = ListenerCounts {
        accepted: 1,
        refused: 3,
    };
    assert_eq!((counts(3), counts(4)), (Some(expected), None));
    let mut world = World::new(Options::with(|options| options.device.max_cqe = 300));
    world.dial(TestRig::host_options());
    world.turns(8);
    let why = format!("{:?}", world.host_closed);
    assert!(why.contains("no resources (code 06h)"), "{why}");
    world.disconnect_and_check("a completion queue that would overflow");
}

/// A drained close without queued responses ends as well; with responses it ends after the last one
/// was sent.
#[test]
fn drained_close() {
    let mut world = World::new(Options::default());
    world.connect();
    world.submit();
    world.turns(20);
    let conn = world.conn.unwrap();
    world.rig.transport.close(conn, CloseWhy::Drained);
    world.turns(10);
    assert_eq!(world.closed, [Closed::Local]);
    assert_eq!(world.host_closed, Some(Closed::Peer));
    world.disconnect_and_check("drained");
}

/// Goal: a draining connection whose last response cannot be sent closes within its time limit.
/// Method: its queue pair makes no progress.
#[test]
fn drained_close_that_cannot_be() {
    let mut world = World::new(Options::default());
    world.connect();
    let (ours, _) = world.qps();
    world.rig.fabric.pause(ours, true);
    world.submit();
    world.turns(4);
    let conn = world.conn.unwrap();
    world.rig.transport.close(conn, CloseWhy::Drained);
    world.turns(4);
    let idle = world.rig.transport.arm(world.rig.clock.now());
    assert!(
        matches!(idle, Idle::Until(_)),
        "the drain has a deadline: {idle:?}"
    );
    world.rig.transport.disarm();
    assert_eq!(world.closed, []);
    world.rig.clock.advance(RdmaConfig::default().drain_timeout);
    world.turns(4);
    assert_eq!(world.closed, [Closed::TimedOut]);
    world.disconnect_and_check("drain without progress");
}

/// Connection requests that arrive while the plug is held are accepted after its release.
#[test]
fn held() {
    let mut world = World::new(Options::default());
    world.rig.plug.hold(true);
    world.dial(TestRig::host_options());
    world.turns(10);
    assert!(!world.ready && world.conn.is_none());
    world.rig.plug.hold(false);
    world.turns(10);
    assert!(world.ready && world.conn.is_some());
    world.disconnect_and_check("held");
}
