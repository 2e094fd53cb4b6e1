//! Tests of the watch of a discovery service: when its log is read, and when it is not.

use std::cell::RefCell;
use std::os::fd::BorrowedFd;
use std::rc::Rc;
use std::time::Duration;

use nacre_hugepages::Pool;
use nacre_nvmf::host::{ControllerState, DiscoveryWatch};
use nacre_nvmf::subsystems::SubsystemConfig;
use nacre_nvmf::transport::{Address, HostCommand, HostEvent, HostTransport, TransportType};
use nacre_nvmf_wire::opcode::admin::GET_LOG_PAGE;
use nacre_nvmf_wire::{Nqn, StatusCode};
use nacre_reactor::{Idle, Nanos};
use nacre_tests::target::nqn;

use super::rig::{World, options};

/// The Get Log Page commands of all connections.
#[derive(Default)]
struct Logs {
    /// Commands that were sent.
    sent: u32,
    /// The next commands of this number fail.
    failing: u32,
    cids: Vec<u16>,
}

/// A connection whose Get Log Page commands are counted, and fail on request.
struct Counted {
    inner: Box<dyn HostTransport>,
    logs: Rc<RefCell<Logs>>,
}

impl HostTransport for Counted {
    fn submit(&mut self, command: HostCommand) {
        if command.sqe.opcode == GET_LOG_PAGE {
            let mut logs = self.logs.borrow_mut();
            logs.sent += 1;
            if logs.failing > 0 {
                logs.failing -= 1;
                logs.cids.push(command.sqe.cid.get());
            }
        }
        self.inner.submit(command);
    }

    fn poll(&mut self, now: Nanos, events: &mut Vec<HostEvent>, limit: usize) {
        let before = events.len();
        self.inner.poll(now, events, limit);
        let mut logs = self.logs.borrow_mut();
        for event in &mut events[before..] {
            if let HostEvent::Completion { cqe, .. } = event
                && let Some(at) = logs.cids.iter().position(|cid| *cid == cqe.cid())
            {
                logs.cids.remove(at);
                cqe.set_status(StatusCode::INTERNAL_ERROR);
            }
        }
    }

    fn set_in_capsule_bytes(&mut self, bytes: u32) {
        self.inner.set_in_capsule_bytes(bytes);
    }

    fn reclaim(&mut self) -> Option<HostCommand> {
        self.inner.reclaim()
    }

    fn close(&mut self) {
        self.inner.close();
    }

    fn arm(&mut self, now: Nanos) -> Idle {
        self.inner.arm(now)
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner.wake_fd()
    }
}

struct Watched {
    world: World,
    watch: DiscoveryWatch,
    logs: Rc<RefCell<Logs>>,
    /// Records of each log that was read; none: an error.
    read: Vec<Option<usize>>,
}

impl Watched {
    fn new(failing: u32) -> Self {
        let world = World::new();
        let logs = Rc::new(RefCell::new(Logs {
            failing,
            ..Logs::default()
        }));
        let (mut dial, counted) = (world.dial(), Rc::clone(&logs));
        let dial = move |qid| {
            let (inner, logs) = (dial.dial(qid)?, Rc::clone(&counted));
            Ok(Box::new(Counted { inner, logs }) as Box<dyn HostTransport>)
        };
        let mut options = options(0);
        options.subnqn = Nqn::discovery();
        let pool = Pool::heap(&DiscoveryWatch::MEMORY);
        Self {
            watch: DiscoveryWatch::new(options, Box::new(dial), pool, world.now),
            world,
            logs,
            read: Vec::new(),
        }
    }

    fn step(&mut self, by: Duration) {
        self.world.step(by);
        if let Some(ended) = self.watch.poll(self.world.now) {
            self.read.push(ended.ok().map(|log| log.records.len()));
        }
    }

    /// Adds a subsystem to the log.
    fn change(&self, at: u32) {
        let another = nqn(&format!("nqn.2026-01.org.example:{at}"));
        let mut config = SubsystemConfig::new(another.clone());
        config.allow_any_host = true;
        let (target, address) = (self.world.target(), Address::Loopback("here".into()));
        target.create_subsystem(config).unwrap();
        let transport = TransportType::Loopback;
        target.add_listener(&another, transport, &address).unwrap();
    }

    fn pass(&mut self, time: Duration) {
        let end = self.world.now + time;
        while self.world.now < end {
            self.step(Duration::from_millis(1));
        }
    }
}

/// Goal: a log is read after the connection and after a change, and at no other time.
#[test]
fn a_log_is_read_after_events_only() {
    let mut watched = Watched::new(0);
    watched.pass(Duration::from_secs(1));
    assert_eq!(watched.read.len(), 1, "{:?}", watched.read);
    let sent = watched.logs.borrow().sent;
    watched.pass(Duration::from_secs(100));
    assert_eq!((watched.read.len(), watched.logs.borrow().sent), (1, sent));
    assert!(!watched.watch.is_active());
    // The next work is the keep-alive.
    let now = watched.world.now;
    match watched.watch.arm(now) {
        Idle::Until(at) => assert!(at.since(now) > Duration::from_secs(1)),
        Idle::Quiet => {}
        Idle::Busy => panic!("an idle watch is busy"),
    }

    watched.change(0);
    watched.pass(Duration::from_secs(1));
    assert!(watched.read.len() > 1, "{:?}", watched.read);
}

/// Goal: a log whose command failed is read again after a pause, without an event.
#[test]
fn a_log_that_was_not_read_is_read_again() {
    let mut watched = Watched::new(2);
    watched.pass(Duration::from_secs(4));
    assert_eq!(watched.read, [None]);
    watched.pass(Duration::from_secs(5));
    assert_eq!(watched.read, [None, None]);
    watched.pass(Duration::from_secs(5));
    assert!(matches!(watched.read[..], [None, None, Some(_)]));
}

/// Goal: a watch whose service is away has no work, also if its log must be read. Method: the
/// service is lost after each of the first steps of the reading, while the log changes.
#[test]
fn a_watch_of_a_lost_service_is_idle() {
    for steps in 0..16 {
        let mut watched = Watched::new(0);
        watched.pass(Duration::from_secs(1));
        for at in 0..steps {
            watched.change(at);
            watched.step(Duration::from_micros(10));
        }
        watched.world.kill_target();
        let mut away = 0;
        for _ in 0..1000 {
            watched.step(Duration::from_millis(1));
            let is_away = matches!(watched.watch.state(), ControllerState::Waiting { .. });
            away += u32::from(is_away);
            assert!(
                !is_away || !watched.watch.is_active(),
                "after {steps} steps"
            );
        }
        assert!(away > 0);
        let before = watched.read.len();
        watched.world.revive_target();
        watched.pass(Duration::from_secs(30));
        assert!(watched.read.len() > before);
    }
}
