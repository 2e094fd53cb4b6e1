//! Hosts that keep each other from a remote namespace.

use std::sync::Arc;
use std::time::{Duration, Instant};

use nacre_bdev::reservation::{Ask, Held, Standing};
use nacre_bdev::{Io, Op, Queue, Status};
use nacre_bdev_remote::State;
use nacre_tests::target::{TestTarget, nqn, ram};

use super::rig::{Attached, User, config, options, tcp};

const KEY: u64 = 0xa1;
const OTHER: u64 = 0xb2;
const REFUSED: Status = Status::RESERVATION_CONFLICT;

/// A host of its own.
fn attach(target: &TestTarget, id: u8) -> Attached {
    let mut options = options();
    options.hostid = [id; 16];
    options.hostnqn = nqn(&format!("nqn.2025-01.io.nacre:host{id}"));
    Attached::to(config(options), tcp(target.address))
}

fn register(user: &mut User, current: Option<u64>, key: u64) -> Result<Standing, Status> {
    user.reserve(Ask::Register { current, key })
}

/// Everything that a holder of a volume asks for, over a real connection: who is registered, who may write, and
/// that one who is preempted does not, nor registers again by mistake.
#[test]
fn one_after_another() {
    let target = TestTarget::start();
    target.add_namespace(ram("ram", 512, 4 << 20));
    let hosts = [attach(&target, 1), attach(&target, 2)];
    let [mut one, mut two] = hosts.each_ref().map(|host| host.user(1));
    assert!(one.device.reserves(), "the target says so");
    let free = Ok(Standing::default());
    assert_eq!(one.reserve(Ask::Report), free);
    let acquire = one.reserve(Ask::Acquire { key: KEY });
    assert_eq!(acquire, Err(REFUSED), "it is not registered");
    register(&mut one, None, KEY).expect("registered");
    one.reserve(Ask::Acquire { key: KEY }).expect("acquired");
    let seen_by = |user: &mut User| user.reserve(Ask::Report).expect("a report");
    let own = Standing {
        own: Some(KEY),
        others: vec![],
        held: Held::ByRegistrants,
    };
    assert_eq!(seen_by(&mut one), own);
    assert_eq!((one.write(0, 1), two.write(0, 2)), (Status::Ok, REFUSED));
    assert_eq!(two.read(0), Ok(1), "reads are not excluded");

    register(&mut two, None, OTHER).expect("registered");
    assert_eq!(seen_by(&mut two).others, [KEY]);
    two.reserve(Ask::Preempt { key: OTHER }).expect("preempted");
    let own = Standing {
        own: Some(OTHER),
        ..own
    };
    assert_eq!(seen_by(&mut two), own);
    assert_eq!((one.write(0, 3), two.write(8, 4)), (REFUSED, Status::Ok));
    assert_eq!(register(&mut one, Some(KEY), KEY + 1), Err(REFUSED));
    let gone = one.reserve(Ask::Unregister { key: KEY });
    assert_eq!(gone, Err(REFUSED));

    register(&mut two, Some(OTHER), OTHER + 1).expect("another key");
    two.reserve(Ask::Unregister { key: OTHER + 1 })
        .expect("given up");
    assert_eq!(one.reserve(Ask::Report), free);
    assert_eq!(one.write(0, 5), Status::Ok);
}

/// A connection that is lost costs no registration; what was asked while it was away is answered when it is
/// back, or ends with it: never carried out twice.
#[test]
fn through_losses() {
    let target = TestTarget::start();
    target.add_namespace(ram("ram", 512, 4 << 20));
    let (host, rival) = (attach(&target, 1), attach(&target, 2));
    let mut user = host.user(1);
    register(&mut user, None, KEY).expect("registered");
    user.reserve(Ask::Acquire { key: KEY }).expect("acquired");
    for round in 0..20u8 {
        host.attachment.reset();
        // At once, when it is noticed, or later: whatever it meets, the next report is right.
        match user.reserve(Ask::Report) {
            Ok(standing) => assert_eq!(standing.own, Some(KEY)),
            Err(status) => assert_eq!(status, Status::Gone),
        }
        host.until("live", |h| h.attachment.status().state == State::Live);
        assert_eq!(user.write(0, round), Status::Ok);
    }
    assert_eq!(rival.user(1).write(0, 1), REFUSED);
    assert_eq!(user.reserve(Ask::Report).map(|s| s.own), Ok(Some(KEY)));
}

/// Whatever a host has under way when it is preempted is over before the answer: what comes after it stays.
#[test]
fn preempted_under_load() {
    let target = TestTarget::start();
    target.add_namespace(ram("ram", 512, 4 << 20));
    let hosts = [attach(&target, 1), attach(&target, 2)];
    let [mut one, mut two] = hosts.each_ref().map(|host| host.user(1));
    register(&mut one, None, KEY).expect("registered");
    one.reserve(Ask::Acquire { key: KEY }).expect("acquired");
    let under_way: Vec<u64> = (0..32).map(|at| one.submit(Op::Write, at * 8, 1)).collect();
    one.turn();
    register(&mut two, None, OTHER).expect("registered");
    two.reserve(Ask::Preempt { key: OTHER }).expect("preempted");
    for at in 0..32 {
        assert_eq!(two.write(at * 8, 2), Status::Ok);
    }
    let until = Instant::now() + Duration::from_millis(300);
    while Instant::now() < until {
        one.turn();
    }
    for token in under_way {
        // Done before, or refused; either way it does not come after what is there now.
        one.wait(token);
    }
    for at in 0..32 {
        assert_eq!(two.read(at * 8), Ok(2));
    }
}

/// One at a time, and none where the device has no such thing.
#[test]
fn not_taken() {
    let target = TestTarget::start();
    let ram = ram("ram", 512, 4 << 20);
    target.add_namespace(Arc::clone(&ram));
    assert!(!ram.reserves());
    let request = || nacre_bdev::reservation::Reserve {
        ask: Ask::Report,
        answer: Box::new(|_| ()),
    };
    let pool = nacre_hugepages::Pool::heap(&[nacre_hugepages::ClassSpec {
        size: 64 << 10,
        count: 8,
    }]);
    let layer = nacre_bdev::Layer::new(ram);
    let mut local = layer.open_queue(&pool).expect("a queue");
    assert!(local.reserve(request()).is_err());

    let host = attach(&target, 1);
    let mut queue = host.registry.open("theren1", &pool).expect("a queue");
    assert!(queue.reserve(request()).is_ok());
    assert!(queue.reserve(request()).is_err(), "another is under way");
    // An I/O beside it is nobody's business.
    let io = Io::new(1, Op::Flush, 0, 0);
    assert!(queue.submit(io).is_ok());
}
