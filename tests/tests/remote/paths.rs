//! Tests of several paths to one namespace: paths are lost and return under verified I/O, ANA
//! states change, and namespaces differ.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nacre_bdev::conformance::Suite;
use nacre_bdev::fault::{self, Action, Fault};
use nacre_bdev::injection::Injection;
use nacre_bdev::{Bdev, Op, Registry, Status};
use nacre_nvmf::host::InjectionQueues;
use nacre_nvmf::transport::{Address, TransportType};
use nacre_nvmf_remote::{Path, Policy, Selector, State};
use nacre_nvmf_wire::log::ana::AnaState;
use nacre_nvmf_wire::opcode::io as opcode;
use nacre_tests::target::{SUBNQN, TestTarget, nqn};

use super::lifecycle::disk;
use super::rig::{AttachedRemote, PATIENCE, User, config, options, tcp};

const BLOCKS: u64 = 8192;
/// Blocks per I/O of the rig's user.
const UNIT: u64 = 8;

/// A target with one disk and a second listener, attached over both.
struct World {
    target: TestTarget,
    second: SocketAddr,
    attached: AttachedRemote,
    other: Path,
}

fn listen(target: &TestTarget, address: SocketAddr) -> SocketAddr {
    let added = target
        .target
        .add_listener(&nqn(SUBNQN), TransportType::Tcp, &Address::Ip(address));
    match added.expect("the address is free") {
        Address::Ip(address) => address,
        other => panic!("TCP listens on {other}"),
    }
}

fn any() -> SocketAddr {
    "127.0.0.1:0".parse().expect("an address")
}

fn world(uuid: u128) -> World {
    world_of(disk("ram", uuid, BLOCKS))
}

fn world_of(disk: Arc<dyn Bdev>) -> World {
    let target = TestTarget::start();
    target.add_namespace(disk);
    let second = listen(&target, any());
    let mut attached = AttachedRemote::to(config(options()), tcp(target.address));
    let other = attached.add_path(config(options()), tcp(second));
    World {
        target,
        second,
        attached,
        other,
    }
}

impl World {
    fn set(&self, address: SocketAddr, state: AnaState) {
        let (nqn, address) = (nqn(SUBNQN), Address::Ip(address));
        let target = &self.target.target;
        let changed = target.set_ana_state(&nqn, TransportType::Tcp, &address, None, state);
        assert!(changed.expect("it listens there"), "a new state");
    }

    /// Takes a listener away, and with it its connections.
    fn cut(&self, address: SocketAddr) {
        let (nqn, address) = (nqn(SUBNQN), Address::Ip(address));
        let removed = self
            .target
            .target
            .remove_listener(&nqn, TransportType::Tcp, &address);
        removed.expect("it listened there");
    }

    /// Reads and writes on each path.
    fn ios(&self) -> Vec<u64> {
        // The queues publish their counters every 100 ms.
        std::thread::sleep(Duration::from_millis(120));
        let paths = self.attached.attachment.devices()[0].paths();
        paths
            .iter()
            .map(|path| path.io.reads + path.io.writes)
            .collect()
    }

    /// Waits until I/O uses the path alone. Until its queue is connected, which takes longer on a
    /// busy machine, the other one serves.
    fn until_alone(&self, path: usize, load: &mut Load) {
        let until = Instant::now() + PATIENCE;
        let mut before = self.ios();
        loop {
            load.run(SHORT);
            let after = self.ios();
            if after[path] > before[path] && after[1 - path] == before[1 - path] {
                return;
            }
            assert!(Instant::now() < until, "{before:?} {after:?}");
            before = after;
        }
    }

    fn access(&self) -> Vec<Option<AnaState>> {
        let paths = self.attached.attachment.devices()[0].paths();
        paths.iter().map(|path| path.access).collect()
    }
}

/// Writes and reads back in turn, with several I/Os in flight, and verifies each read.
struct Load {
    user: User,
    /// Last value written to each place.
    values: Vec<u8>,
    next: usize,
    rounds: u64,
}

const PLACES: usize = 16;

impl Load {
    fn new(user: User) -> Self {
        Self {
            user,
            values: vec![0; PLACES],
            next: 0,
            rounds: 0,
        }
    }

    /// Writes all places, then reads all.
    fn round(&mut self) {
        self.next += 1;
        self.rounds += 1;
        let places = 0..PLACES as u64;
        let value = |place: u64| (self.next as u64 * 31 + place) as u8;
        let writes: Vec<u64> = places
            .clone()
            .map(|place| {
                self.values[place as usize] = value(place);
                self.user.submit(Op::Write, place * UNIT, value(place))
            })
            .collect();
        for token in writes {
            assert_eq!(self.user.wait(token).status, Status::Ok);
        }
        let reads: Vec<u64> = places
            .clone()
            .map(|place| self.user.submit(Op::Read, place * UNIT, 0xEE))
            .collect();
        for (place, token) in places.zip(reads) {
            let read = self.user.wait(token);
            assert_eq!(read.status, Status::Ok);
            let expected = self.values[place as usize];
            assert!(
                read.data[0].iter().all(|byte| *byte == expected),
                "block {place} is not {expected}"
            );
        }
    }

    fn run(&mut self, time: Duration) {
        let until = Instant::now() + time;
        while Instant::now() < until {
            self.round();
        }
        // The counters of the paths are published while the queue is polled.
        let until = Instant::now() + Duration::from_millis(120);
        while Instant::now() < until {
            self.user.turn();
        }
    }

    fn until(&mut self, what: &str, mut done: impl FnMut() -> bool) {
        let until = Instant::now() + PATIENCE;
        while !done() {
            assert!(Instant::now() < until, "never: {what}");
            self.round();
        }
    }
}

const SHORT: Duration = Duration::from_millis(100);

/// Goal: listeners are removed and added under verified I/O; no I/O fails, and I/O returns to the
/// first path.
#[test]
fn a_listener_dies_under_io() {
    let world = world(1);
    let mut load = Load::new(world.attached.user(1));
    for (address, other) in [(world.target.address, world.second); 2] {
        world.until_alone(0, &mut load);
        let before = world.ios();
        world.cut(address);
        load.until("the second path works", || world.ios()[1] > before[1]);
        assert_eq!(listen(&world.target, address), address);
        load.until("returned", || {
            world.attached.sync();
            world.attached.attachment.status().state == State::Live
        });
        load.run(SHORT);
        world.cut(other);
        load.run(SHORT);
        assert_eq!(listen(&world.target, other), other);
        load.until("returned", || world.other.status().state == State::Live);
    }
    world.until_alone(0, &mut load);
    let lost = world.attached.attachment.devices()[0].losses();
    assert!(lost >= 4, "each end of a connection is counted: {lost}");
}

/// Goal: I/O follows the ANA states: optimized before non-optimized, and nothing where the
/// namespace is inaccessible. Without an accessible path I/O waits.
#[test]
fn io_follows_the_ana_states() {
    let world = world(2);
    let (first, second) = (world.target.address, world.second);
    let mut load = Load::new(world.attached.user(1));
    load.run(SHORT);
    world.set(first, AnaState::Inaccessible);
    load.until("noticed", || {
        world.access()[0] == Some(AnaState::Inaccessible)
    });
    world.until_alone(1, &mut load);
    world.set(first, AnaState::NonOptimized);
    load.until("noticed", || {
        world.access()[0] == Some(AnaState::NonOptimized)
    });
    // An optimized path works.
    let before = world.ios();
    load.run(SHORT);
    world.until_alone(1, &mut load);
    assert_eq!(world.ios()[0], before[0]);
    world.set(second, AnaState::Inaccessible);
    load.until("the first path works", || world.ios()[0] > before[0]);

    world.set(first, AnaState::Change);
    std::thread::sleep(SHORT);
    let token = load.user.submit(Op::Write, 0, 9);
    let until = Instant::now() + Duration::from_millis(300);
    while Instant::now() < until {
        load.user.turn();
    }
    assert!(!load.user.has_ended(token), "it waits");
    world.set(second, AnaState::NonOptimized);
    assert_eq!(load.user.wait(token).status, Status::Ok);
    assert_eq!(load.user.read(0), Ok(9));
}

/// Goal: with both paths gone I/O waits. It is executed once one returns, and fails only after the
/// fast-fail time.
#[test]
fn both_paths_go_and_one_returns() {
    let world = world(3);
    let mut load = Load::new(world.attached.user(1));
    load.run(SHORT);
    world.cut(world.target.address);
    world.cut(world.second);
    let write = load.user.submit(Op::Write, 0, 7);
    let read = load.user.submit(Op::Read, UNIT, 0);
    let until = Instant::now() + Duration::from_millis(300);
    while Instant::now() < until {
        load.user.turn();
    }
    assert!(!load.user.has_ended(write) && !load.user.has_ended(read));
    listen(&world.target, world.second);
    assert_eq!(load.user.wait(write).status, Status::Ok);
    assert_eq!(load.user.wait(read).status, Status::Ok);
    assert_eq!(load.user.read(0), Ok(7));
}

/// Goal: a path that has failed for good does not fail I/O while the other one may return; both
/// failed do.
#[test]
fn io_fails_when_no_path_may_return() {
    let target = TestTarget::start();
    target.add_namespace(disk("ram", 4, BLOCKS));
    let second = listen(&target, any());
    let mut short = options();
    short.loss_timeout = Some(Duration::from_millis(50));
    let mut long = options();
    long.loss_timeout = Some(Duration::from_millis(1500));
    let mut attached = AttachedRemote::to(config(short), tcp(target.address));
    let other = attached.add_path(config(long), tcp(second));
    let mut user = attached.user(1);
    assert_eq!(user.write(0, 1), Status::Ok);
    drop(target);
    let token = user.submit(Op::Write, 0, 2);
    attached.until("given up", |a| {
        user.turn();
        matches!(a.attachment.status().state, State::Failed(_))
    });
    assert!(!matches!(other.status().state, State::Failed(_)));
    assert!(!user.has_ended(token), "it waits for the other path");
    assert_eq!(user.wait(token).status, Status::Gone);
    attached.until("both given up", |_| {
        matches!(other.status().state, State::Failed(_))
    });
    assert_eq!(user.write(0, 2), Status::Gone);
}

/// Goal: I/O waits for any path at most for the fast-fail time.
#[test]
fn io_fails_after_the_fast_fail_time() {
    let target = TestTarget::start();
    target.add_namespace(disk("ram", 5, BLOCKS));
    let second = listen(&target, any());
    let address = target.address;
    let mut limited = options();
    limited.fast_io_fail = Some(Duration::from_millis(300));
    let mut attached = AttachedRemote::to(config(limited.clone()), tcp(address));
    attached.add_path(config(limited), tcp(second));
    let mut user = attached.user(1);
    assert_eq!(user.write(0, 1), Status::Ok);
    drop(target);
    let start = Instant::now();
    assert_eq!(user.write(0, 2), Status::Gone);
    assert!(
        start.elapsed() >= Duration::from_millis(250),
        "{:?}",
        start.elapsed()
    );
    let target = TestTarget::start_on(address);
    target.add_namespace(disk("ram", 5, BLOCKS));
    let until = Instant::now() + PATIENCE;
    while user.write(0, 3) != Status::Ok {
        assert!(Instant::now() < until, "not served again");
    }
}

/// Goal: a path that shows another namespace, or a smaller one, is not used; one that changes its
/// namespace later is no longer used, and the other paths serve on.
#[test]
fn a_path_with_another_namespace_is_refused() {
    let target = TestTarget::start();
    let ram = disk("ram", 6, BLOCKS);
    target.add_namespace(ram.clone());
    let mut attached = AttachedRemote::to(config(options()), tcp(target.address));
    let mut user = attached.user(1);
    assert_eq!(user.write(0, 1), Status::Ok);
    for (other, why) in [
        (
            disk("other", 7, BLOCKS),
            "UUID 00000000-0000-0000-0000-000000000007",
        ),
        (disk("small", 6, BLOCKS / 2), "has 4096 now"),
    ] {
        let elsewhere = TestTarget::start();
        elsewhere.add_namespace(other.clone());
        let path = attached.add_path(config(options()), tcp(elsewhere.address));
        let refused = attached.attachment.refusals_of(&path);
        assert!(
            refused.len() == 1 && refused[0].1.contains(why),
            "{refused:?}"
        );
        for _ in 0..20 {
            assert_eq!(user.write(0, 1), Status::Ok);
        }
        assert_eq!(attached.attachment.devices()[0].paths().len(), 1);
        assert!(attached.attachment.remove_path(&path));
        path.close();
    }
    assert_eq!(attached.attachment.devices()[0].refusal(), None);

    let elsewhere = TestTarget::start();
    let address = elsewhere.address;
    elsewhere.add_namespace(ram);
    let path = attached.add_path(config(options()), tcp(address));
    assert_eq!(attached.attachment.refusals_of(&path), []);
    drop(elsewhere);
    let elsewhere = TestTarget::start_on(address);
    elsewhere.add_namespace(disk("other", 7, BLOCKS));
    attached.until("refused", |a| {
        a.sync();
        !a.attachment.refusals_of(&path).is_empty()
    });
    assert_eq!(
        attached.attachment.devices()[0].refusal(),
        None,
        "the first path serves"
    );
    for value in 0..20 {
        assert_eq!(user.write(0, value), Status::Ok);
        assert_eq!(user.read(0), Ok(value));
    }
}

/// Goal: active-active policies use both paths; a preferred path gets all I/O; the policy changes
/// under I/O.
#[test]
fn policies() {
    let world = world(8);
    let mut load = Load::new(world.attached.user(1));
    let grown = |load: &mut Load| {
        let before = world.ios();
        load.run(SHORT);
        let after = world.ios();
        [after[0] - before[0], after[1] - before[1]]
    };
    let round_robin = Policy::ActiveActive(Selector::RoundRobin { min_io: 1 });
    let queue_depth = Policy::ActiveActive(Selector::QueueDepth);
    // The paths publish their counters at different times.
    let until = |what: &str, load: &mut Load, wanted: &dyn Fn(u64, u64) -> bool| {
        let end = Instant::now() + PATIENCE;
        loop {
            let [a, b] = grown(load);
            if wanted(a, b) {
                return;
            }
            assert!(Instant::now() < end, "{what}: {a} and {b}");
        }
    };
    for policy in [round_robin, queue_depth] {
        world.attached.attachment.set_policy(policy);
        let near = |a: u64, b: u64| a > 0 && a.abs_diff(b) * 4 <= a + b;
        until(&format!("{policy:?}"), &mut load, &near);
    }
    world.attached.attachment.set_policy(Policy::ActivePassive);
    let device = &world.attached.attachment.devices()[0];
    assert!(!device.prefer(4711), "no path is to that controller");
    assert!(device.prefer(world.other.status().info.cntlid));
    until("the preferred path", &mut load, &|a, b| a == 0 && b > 0);
}

/// Goal: a path is detached and another is disabled under I/O, without an error; one path serves
/// afterwards as it would have alone.
#[test]
fn paths_are_disabled_and_detached_under_io() {
    let world = world(9);
    let attachment = &world.attached.attachment;
    attachment.set_policy(Policy::ActiveActive(Selector::RoundRobin { min_io: 1 }));
    let mut load = Load::new(world.attached.user(1));
    load.run(SHORT);
    world.other.set_enabled(false);
    load.until("disabled", || world.other.status().state == State::Disabled);
    load.run(SHORT);
    world.other.set_enabled(true);
    load.until("enabled", || world.other.status().state == State::Live);
    load.run(SHORT);
    let first = attachment.path();
    assert!(attachment.remove_path(&first));
    load.until("unused", || !first.is_in_use());
    first.close();
    load.run(SHORT);
    assert_eq!(attachment.paths().len(), 1);
    assert!(!attachment.remove_path(&world.other), "the last one stays");
    load.run(SHORT);
    let third = listen(&world.target, any());
    assert!(world.ios().len() == 1 && third != world.second);
}

/// Goal: error injection on one path under verified I/O. Path-related statuses, and commands that
/// are not sent, move I/O to the other path without an error; I/O returns after the injection.
/// Other statuses are errors of the I/O.
#[test]
fn injected_errors_on_a_path() {
    let world = world(12);
    let mut load = Load::new(world.attached.user(1));
    let first = world.attached.attachment.path();
    let set = |opcode, rule| first.inject(InjectionQueues::Io, opcode, rule);
    let internal = Injection {
        sct: 3,
        sc: 0,
        count: u32::MAX,
        unsent: None,
    };
    for unsent in [None, Some(Duration::from_millis(1))] {
        for opcode in [opcode::READ, opcode::WRITE] {
            world.until_alone(0, &mut load);
            let before = world.ios();
            set(opcode, Some(Injection { unsent, ..internal }));
            load.until("the second path works", || world.ios()[1] > before[1]);
            set(opcode, None);
        }
    }
    world.until_alone(0, &mut load);
    let failing = Injection {
        sct: 2,
        sc: 0x81,
        count: 1,
        ..internal
    };
    set(opcode::READ, Some(failing));
    let user = &mut load.user;
    user.turn();
    assert_eq!(user.read(0), Err(Status::ReadError));
    assert!(user.read(0).is_ok(), "one error");
}

/// Goal: a path-related status without DNR is retried, a few times; one with DNR is not.
#[test]
fn path_related_statuses() {
    let registry = Registry::new();
    registry
        .register(disk("ram", 10, BLOCKS))
        .expect("a new name");
    let faulty = fault::create(
        fault::Config {
            base_name: "ram".into(),
            uuid: None,
        },
        &registry,
    )
    .expect("a device");
    let world = world_of(Arc::clone(&faulty) as Arc<dyn Bdev>);
    let mut user = world.attached.user(1);
    assert_eq!(user.write(0, 1), Status::Ok);
    let status = |dnr| Status::Nvme {
        sct: 3,
        sc: 0x60,
        dnr,
    };
    let fail = |dnr, times| {
        faulty.clear();
        let fault = Fault::new(Action::Fail(status(dnr))).on(&[Op::Write]);
        faulty.inject(fault.times(times)).expect("room");
    };
    fail(false, 2);
    assert_eq!(user.write(0, 2), Status::Ok);
    fail(true, 1);
    assert_eq!(user.write(0, 3), Status::Gone);
    assert_eq!(user.read(0), Ok(2));
    fail(false, 1000);
    assert_eq!(user.write(0, 4), Status::Gone, "after the last retry");
    faulty.clear();
    assert_eq!(user.write(0, 5), Status::Ok);
}

/// Goal: a device with two paths behaves as every other device does.
#[test]
fn conformance() {
    let world = world(11);
    let round_robin = Policy::ActiveActive(Selector::RoundRobin { min_io: 1 });
    world.attached.attachment.set_policy(round_robin);
    Suite::new(|| {
        let device = world.attached.attachment.devices().remove(0);
        device as Arc<dyn Bdev>
    })
    .run();
}
