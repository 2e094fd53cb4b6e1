//! Tests of RDMA with and without a fallback path, in virtual time. I/O is always in flight, and
//! all written data is read back at the end.

use std::time::Duration;

use nacre_bdev::{Op, Queue, Status};
use nacre_nvmf::host::{PathCounts, PathOptions};
use nacre_nvmf::transport::{Plug, TransportType};
use nacre_transport_rdma_verbs::sim::{ConnectFault, Target, attributes};
use nacre_transport_rdma_verbs::{PortState, WcStatus};

use super::rig::{HOST, TARGET};
use super::stack::{Setup, Stack};

const RDMA: TransportType = TransportType::Rdma;
const TCP: TransportType = TransportType::Tcp;
const SETTLED: Duration = Duration::from_secs(2);
/// Time per turn: longer than any real turn, and short compared with the waits of these tests.
const STEP: Duration = Duration::from_millis(10);
/// Number of writes in flight.
const DEPTH: usize = 8;

fn paths(fallback: Option<TransportType>) -> PathOptions {
    PathOptions {
        retry_delay: Duration::from_millis(200),
        reprobe: Duration::from_secs(4),
        reprobe_max: Duration::from_secs(16),
        stable_after: SETTLED,
        ..PathOptions::new(RDMA, fallback)
    }
}

/// A host that writes continuously.
struct Load {
    stack: Stack,
    next: u64,
    /// The byte last written to each slot: 512 slots of 8 blocks.
    written: Vec<Option<u8>>,
    under_way: Vec<u64>,
}

const PLACES: u64 = 512;

fn fill(token: u64) -> u8 {
    (token % 251) as u8
}

impl Load {
    fn new(setup: Setup) -> Self {
        let mut stack = Stack::new(setup);
        stack.connect();
        Self {
            stack,
            next: 0,
            written: vec![None; PLACES as usize],
            under_way: Vec::new(),
        }
    }

    fn turn(&mut self) {
        self.stack.step(STEP);
        let ended = &mut self.stack.completions;
        for token in std::mem::take(&mut self.under_way) {
            match ended.remove(&token) {
                None => self.under_way.push(token),
                Some(completion) => {
                    assert_eq!(completion.status, Status::Ok, "write {token}");
                    self.written[(token % PLACES) as usize] = Some(fill(token));
                }
            }
        }
        while self.under_way.len() < DEPTH {
            let token = self.next;
            self.next += 1;
            self.stack
                .submit(token, Op::Write, token % PLACES * 8, 8, fill(token));
            self.under_way.push(token);
        }
    }

    fn pass(&mut self, time: Duration) {
        let end = self.stack.now + time;
        while self.stack.now < end {
            self.turn();
        }
    }

    /// Runs until `done`, for at most `seconds`, and checks that writes complete afterwards.
    fn until(&mut self, what: &str, seconds: u32, mut done: impl FnMut(&Stack) -> bool) {
        let end = self.stack.now + Duration::from_secs(1) * seconds;
        while !done(&self.stack) {
            assert!(
                self.stack.now < end,
                "never: {what}; {:?} {:?}",
                self.stack.controller.state(),
                self.counts()
            );
            self.turn();
        }
        let before = self.next;
        while self.next < before + 4 * DEPTH as u64 {
            assert!(self.stack.now < end, "no write completes after: {what}");
            self.turn();
        }
    }

    fn on(&mut self, kind: TransportType, seconds: u32) {
        self.until(&format!("{kind}"), seconds, |stack| {
            let live = stack.controller.is_live()
                && stack.queue.as_ref().is_some_and(|queue| queue.is_live())
                && stack.idle.as_ref().is_none_or(|queue| queue.is_live());
            live && stack.controller.link().state().transport == Some(kind)
        });
        let by_rdma = self.stack.plug.connections();
        match kind {
            RDMA => {
                let queues = 2 + usize::from(self.stack.idle.is_some());
                assert_eq!(by_rdma, queues, "admin queue and I/O queues");
            }
            _ => assert_eq!(by_rdma, 0),
        }
    }

    fn counts(&self) -> PathCounts {
        let paths = self.stack.controller.paths();
        paths.expect("there are paths").counts().clone()
    }

    fn return_device(&mut self) {
        let device = self
            .stack
            .fabric
            .add_device(attributes("sim_target"), &[TARGET]);
        self.stack.device = device.unwrap();
    }

    /// Checks that every slot has the last written data.
    fn verify(mut self) {
        let mut turns = 0;
        while !self.under_way.is_empty() {
            self.stack.step(STEP);
            for token in std::mem::take(&mut self.under_way) {
                match self.stack.completions.remove(&token) {
                    None => self.under_way.push(token),
                    Some(_) => self.written[(token % PLACES) as usize] = Some(fill(token)),
                }
            }
            turns += 1;
            assert!(turns < 100_000, "writes do not complete");
        }
        for place in 0..PLACES {
            let Some(fill) = self.written[place as usize] else {
                continue;
            };
            let token = u64::MAX / 2 + place;
            self.stack.submit(token, Op::Read, place * 8, 8, 0);
            let read = self.stack.finish(token);
            assert_eq!(read.status, Status::Ok);
            assert!(read.data[0][..] == [fill; 4096], "place {place}");
        }
        let stats = self.stack.memory.stats();
        let missing: usize = stats.iter().map(|class| class.count - class.free).sum();
        assert_eq!(missing, 0, "the host lost buffers");
    }
}

fn setup(fallback: Option<TransportType>) -> Setup {
    Setup {
        paths: Some(paths(fallback)),
        cm_timeout: Duration::from_secs(1),
        ..Setup::default()
    }
}

/// The target's device is removed with I/O in flight: TCP takes over. The device returns, and RDMA
/// takes over again without retries. A queue without I/O changes the transport too.
#[test]
fn the_targets_device_is_removed_and_returns() {
    let mut load = Load::new(setup(Some(TCP)));
    load.stack.connect_idle();
    load.on(RDMA, 1);
    for round in 1..=3 {
        load.pass(SETTLED);
        let device = load.stack.device;
        load.stack.fabric.remove_device(device);
        load.on(TCP, 10);
        let counts = load.counts();
        assert_eq!((counts.fallbacks, counts.returns), (round, round - 1));
        assert!(counts.fallback_cause.is_some());
        load.return_device();
        let before = load.stack.queue.as_ref().unwrap().stats();
        let losses = load.stack.controller.link().losses();
        assert!(losses >= round, "the removed device closed a connection");
        load.on(RDMA, 30);
        let after = load.stack.queue.as_ref().unwrap().stats();
        assert_eq!((after.resent, after.losses), (before.resent, before.losses));
        assert_eq!(
            load.stack.controller.link().losses(),
            losses,
            "the return to RDMA was clean: the target forgot no command"
        );
        assert_eq!(after.moves, before.moves + 1);
        assert_eq!(load.counts().returns, round);
        load.pass(SETTLED);
        let idle = load.stack.idle.as_ref().unwrap();
        assert!(idle.is_live() && idle.is_settled());
        assert_eq!(idle.stats().moves, round);
    }
    load.verify();
}

/// The same for a removal of the host's own device.
#[test]
fn the_hosts_device_is_removed_and_returns() {
    let mut load = Load::new(setup(Some(TCP)));
    load.pass(SETTLED);
    for _ in 0..20 {
        let device = load.stack.host_device;
        load.stack.fabric.remove_device(device);
        load.on(TCP, 10);
        let device = load
            .stack
            .fabric
            .add_device(attributes("sim_host"), &[HOST]);
        load.stack.host_device = device.unwrap();
        load.on(RDMA, 90);
        load.pass(SETTLED);
    }
    // A removed device keeps no key slots; there are only a few of them.
    load.verify();
}

/// Whatever fails while connecting, the fallback follows after the configured attempts, within
/// their time limit. When RDMA works again, the host returns to it.
#[test]
fn faults_while_connecting() {
    for fault in [
        ConnectFault::AddressError,
        ConnectFault::RouteError,
        ConnectFault::Unreachable,
        ConnectFault::ConnectError,
        ConnectFault::Silent,
    ] {
        let mut load = Load::new(setup(Some(TCP)));
        load.pass(SETTLED);
        let device = load.stack.device;
        load.stack
            .fabric
            .fault_connects(TARGET, Some(fault.clone()));
        load.stack.fabric.remove_device(device);
        load.return_device();
        load.on(TCP, 30);
        let counts = load.counts();
        assert_eq!(
            (counts.fallbacks, counts.failed_attempts),
            (1, 3),
            "{fault:?}"
        );
        let cause = counts.fallback_cause.unwrap();
        if fault == ConnectFault::Silent {
            let text = "RDMA connection timeout after 1000ms (ADDR_RESOLVE)";
            assert!(cause.contains(text), "{cause}");
        }
        // Later probes fail at growing intervals, and do not disturb I/O.
        let losses = load.stack.queue.as_ref().unwrap().stats().losses;
        load.pass(Duration::from_secs(14));
        assert_eq!(load.counts().failed_probes, 2, "{fault:?}");
        assert_eq!(load.stack.queue.as_ref().unwrap().stats().losses, losses);
        load.stack.fabric.fault_connects(TARGET, None);
        load.on(RDMA, 90);
        assert_eq!(load.counts().returns, 1, "{fault:?}");
        load.verify();
    }
}

/// The target refuses queue pairs: the one of the admin queue, then only those of I/O queues.
#[test]
fn refused_queue_pairs() {
    for (connections, cause) in [(0, "no resources"), (1, "no I/O queue comes up")] {
        let mut setup = setup(Some(TCP));
        setup.config.max_qpairs = connections;
        if connections == 0 {
            setup.device.max_cqe = 16;
            setup.config.max_qpairs = 8;
        }
        let mut load = Load::new(setup);
        load.on(TCP, 60);
        let found = load.counts().fallback_cause.unwrap();
        assert!(found.contains(cause), "{found}");
        load.verify();
    }
}

/// Connections succeed, and each of their requests fails: the host does not use such a path.
#[test]
fn a_path_that_carries_only_handshakes() {
    let mut load = Load::new(setup(Some(TCP)));
    let end = load.stack.now + Duration::from_secs(60);
    while load.stack.controller.link().state().transport == Some(RDMA) {
        assert!(load.stack.now < end, "{:?}", load.counts());
        load.turn();
        for qp in load.stack.fabric.queue_pairs() {
            let status = WcStatus::RetryExceeded;
            load.stack.fabric.inject_status(qp, Target::Read, 0, status);
            load.stack
                .fabric
                .inject_status(qp, Target::Write, 0, status);
            if load.stack.controller.is_live() {
                load.stack.fabric.inject_status(qp, Target::Send, 4, status);
            }
        }
    }
    load.on(TCP, 5);
    assert_eq!(load.counts().fallbacks, 1);
    load.verify();
}

/// Without a fallback the host uses no other transport, however long RDMA is down, and counts every
/// attempt.
#[test]
fn without_a_fallback() {
    let mut load = Load::new(setup(None));
    load.pass(SETTLED);
    let device = load.stack.device;
    load.stack.fabric.remove_device(device);
    load.pass(Duration::from_secs(20));
    assert!(!load.stack.controller.is_live());
    let counts = load.counts();
    assert!(counts.failed_attempts >= 50, "{counts:?}");
    assert_eq!(counts.fallbacks, 0);
    assert_eq!(load.stack.other.counts().accepted, 0);
    load.return_device();
    load.on(RDMA, 5);
    load.verify();
}

/// Pending I/O that does not complete in time keeps the association on its transport; it changes
/// later.
#[test]
fn a_transport_change_waits_for_pending_io() {
    let mut load = Load::new(setup(Some(TCP)));
    load.pass(SETTLED);
    let device = load.stack.device;
    load.stack.fabric.remove_device(device);
    load.on(TCP, 10);
    load.return_device();
    // The queue is not polled: its I/O stays in flight.
    let queue = load.stack.queue.take();
    let end = load.stack.now + Duration::from_secs(15);
    let mut moving = false;
    while load.stack.now < end && load.counts().failed_probes == 0 {
        load.stack.step(STEP);
        moving |= load.stack.controller.link().is_moving();
        assert!(load.stack.controller.is_live(), "the association stays");
    }
    assert!(moving);
    assert_eq!(load.counts().failed_probes, 1);
    assert!(!load.stack.controller.link().is_moving());
    load.stack.queue = queue;
    load.on(TCP, 2);
    load.on(RDMA, 60);
    let stats = load.stack.queue.as_ref().unwrap().stats();
    assert_eq!(load.counts().returns, 1);
    assert_eq!(stats.moves, 1);
    load.verify();
}

/// A port that is down for longer than the command timeout has the same effect as a removed device.
#[test]
fn a_port_that_stays_down() {
    let mut load = Load::new(setup(Some(TCP)));
    load.pass(SETTLED);
    let device = load.stack.device;
    load.stack.fabric.set_port(device, PortState::Down);
    load.on(TCP, 90);
    assert_eq!(load.counts().fallbacks, 1);
    load.stack.fabric.set_port(device, PortState::Active);
    load.on(RDMA, 90);
    load.verify();
}
