//! Tests of threads that sleep on a completion channel: no event is missed, whenever it arrives.

use std::os::fd::AsFd;
use std::time::Duration;

use nacre_bdev::Extents;
use nacre_hugepages::ClassSpec;
use nacre_nvmf::transport::conformance::Rig;
use nacre_nvmf::transport::{
    ConnId, Event, Events, HostCommand, HostEvent, HostTransport, Pools, ReqTag, Response,
};
use nacre_nvmf_wire::opcode::io;
use nacre_nvmf_wire::{Cqe, Sqe};
use nacre_reactor::{EventSet, Idle, Interest};

use super::rig::{Options, TestRig};
use crate::RdmaHost;

const CLASSES: [ClassSpec; 1] = [ClassSpec {
    size: 4096,
    count: 64,
}];

/// Moments at which an event can reach a thread that goes to sleep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum EventMoment {
    BeforeArming,
    /// Between arming and the last look.
    Armed,
    Asleep,
}

const ALWAYS: [EventMoment; 3] = [
    EventMoment::BeforeArming,
    EventMoment::Armed,
    EventMoment::Asleep,
];

struct World {
    host: RdmaHost,
    rig: TestRig,
    pools: Pools,
    conn: Option<ConnId>,
    ready: bool,
    cid: u16,
}

impl World {
    fn new(options: Options) -> Self {
        let mut rig = TestRig::new(options);
        let pools = Pools {
            io: rig.pool(&CLASSES),
            admin: rig.pool(&CLASSES),
        };
        let mut world = Self {
            host: rig.dial(TestRig::host_options()),
            rig,
            pools,
            conn: None,
            ready: false,
            cid: 0,
        };
        for _ in 0..10 {
            world.target();
            world.host();
        }
        assert!(world.ready && world.conn.is_some());
        world
    }

    /// The target looks. Answers the commands that came.
    fn target(&mut self) -> Vec<u16> {
        let mut events = Events::with_capacity(16);
        let now = self.rig.now();
        self.rig.transport.poll(now, &self.pools, &mut events);
        let mut commands = Vec::new();
        for event in events.drain() {
            match event {
                Event::Opened { conn, .. } => self.conn = Some(conn),
                Event::Capsule { sqe, .. } => commands.push(sqe.cid()),
                other => panic!("{other:?}"),
            }
        }
        self.rig.transport.flush(now);
        commands
    }

    /// The host looks. Answers the completions that came.
    fn host(&mut self) -> Vec<u16> {
        let mut events = Vec::new();
        self.host.poll(self.rig.now(), &mut events, 16);
        let mut completed = Vec::new();
        for event in events {
            match event {
                HostEvent::Ready => self.ready = true,
                HostEvent::Completion { cqe, .. } => completed.push(cqe.cid()),
                other => panic!("{other:?}"),
            }
        }
        completed
    }

    fn send(&mut self) {
        let sqe = Sqe::for_namespace(io::FLUSH, self.cid, 1);
        self.cid += 1;
        self.host.submit(HostCommand {
            sqe,
            write: None,
            read: None,
        });
        assert!(self.host().is_empty());
    }

    fn answer(&mut self, cid: u16) {
        let response = Response {
            tag: ReqTag { cid, index: 0 },
            cqe: Cqe::success(cid),
            data: Extents::new(),
            sgl: Sqe::for_namespace(io::FLUSH, cid, 1).sgl_descriptor(),
            zero_copy: None,
        };
        self.rig.transport.respond(self.conn.unwrap(), response);
        self.rig.transport.flush(self.rig.now());
    }
}

/// Whether a sleeper would be woken now. Nothing here is done by other threads.
fn wakes(fd: impl AsFd) -> bool {
    let outer = EventSet::new().unwrap();
    outer.add(fd, 1, Interest::READ).unwrap();
    let mut list = nacre_reactor::Events::with_capacity(1);
    outer.wait(&mut list, Duration::ZERO).unwrap() == 1
}

/// A command reaches a core at any moment, with a shared receive queue and without. A handled
/// command wakes no thread a second time.
#[test]
fn a_core() {
    let own = |options: &mut Options| options.config.srq_size = 0;
    for options in [Options::default(), Options::with(own)] {
        let mut world = World::new(options);
        let fd = world.rig.transport.wake_fds()[0].try_clone_to_owned();
        let fd = &fd.expect("a duplicate");
        for round in 0..3 {
            for when in ALWAYS {
                let what = format!("{when:?}, round {round}");
                assert!(world.target().is_empty(), "{what}");
                if when == EventMoment::BeforeArming {
                    world.send();
                }
                let now = world.rig.now();
                assert_ne!(world.rig.transport.arm(now), Idle::Busy, "{what}");
                if when == EventMoment::Armed {
                    world.send();
                }
                let mut commands = world.target();
                if when == EventMoment::Asleep {
                    assert!(!wakes(fd), "{what}: it could not sleep");
                    world.send();
                    assert!(wakes(fd), "{what}: it sleeps on");
                }
                world.rig.transport.disarm();
                commands.extend(world.target());
                let [cid] = commands[..] else {
                    panic!("{what}: {commands:?}");
                };
                world.answer(cid);
                assert_eq!(world.host(), [cid]);
                // The answer's own completion may be there as well.
                world.target();
                world.rig.transport.disarm();
                assert!(!wakes(fd), "{what}: woken for nothing");
            }
        }
    }
}

/// The same of a host that sleeps until it is answered.
#[test]
fn a_host() {
    let mut world = World::new(Options::default());
    let fd = world.host.wake_fd().unwrap().try_clone_to_owned();
    let fd = &fd.expect("a duplicate");
    for round in 0..3 {
        for when in ALWAYS {
            let what = format!("{when:?}, round {round}");
            world.send();
            let [cid] = world.target()[..] else {
                panic!("{what}: no command");
            };
            assert!(world.host().is_empty(), "{what}");
            if when == EventMoment::BeforeArming {
                world.answer(cid);
            }
            assert_ne!(world.host.arm(world.rig.now()), Idle::Busy, "{what}");
            if when == EventMoment::Armed {
                world.answer(cid);
            }
            let mut completed = world.host();
            if when == EventMoment::Asleep {
                assert!(!wakes(fd), "{what}: it could not sleep");
                world.answer(cid);
                assert!(wakes(fd), "{what}: it sleeps on");
            }
            completed.extend(world.host());
            assert_eq!(completed, [cid], "{what}");
            // Going to sleep again takes back what woke it.
            assert_ne!(world.host.arm(world.rig.now()), Idle::Busy, "{what}");
            assert!(!wakes(fd), "{what}: woken for nothing");
            world.target();
        }
    }
}
