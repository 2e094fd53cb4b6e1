//! Tests of hosts that exclude each other from a remote namespace with reservations.

use std::sync::Arc;
use std::time::{Duration, Instant};

use nacre_bdev::reservation::{ActiveReservation, ReservationReport, ReservationRequest};
use nacre_bdev::{Io, Op, Queue, Status};
use nacre_nvmf_remote::State;
use nacre_tests::target::{TestTarget, nqn, ram};

use super::rig::{AttachedRemote, User, config, options, tcp};

const KEY: u64 = 0xa1;
const OTHER: u64 = 0xb2;
const REFUSED: Status = Status::RESERVATION_CONFLICT;

/// Attaches with a separate host identity.
fn attach(target: &TestTarget, id: u8) -> AttachedRemote {
    let mut options = options();
    options.hostid = [id; 16];
    options.hostnqn = nqn(&format!("nqn.2025-01.io.nacre:host{id}"));
    AttachedRemote::to(config(options), tcp(target.address))
}

fn register(user: &mut User, current: Option<u64>, key: u64) -> Result<ReservationReport, Status> {
    user.reserve(ReservationRequest::Register { current, key })
}

/// Goal: all reservation operations of a volume's holder work over a real connection: report,
/// register, acquire, preempt. A preempted host can neither write nor register again by mistake.
#[test]
fn reservation_operations_work() {
    let target = TestTarget::start();
    target.add_namespace(ram("ram", 512, 4 << 20));
    let hosts = [attach(&target, 1), attach(&target, 2)];
    let [mut one, mut two] = hosts.each_ref().map(|host| host.user(1));
    assert!(one.device.reserves(), "the target says so");
    let free = Ok(ReservationReport::default());
    assert_eq!(one.reserve(ReservationRequest::Report), free);
    let acquire = one.reserve(ReservationRequest::Acquire { key: KEY });
    assert_eq!(acquire, Err(REFUSED), "it is not registered");
    register(&mut one, None, KEY).expect("registered");
    one.reserve(ReservationRequest::Acquire { key: KEY })
        .expect("acquired");
    let seen_by = |user: &mut User| user.reserve(ReservationRequest::Report).expect("a report");
    let own = ReservationReport {
        own: Some(KEY),
        others: vec![],
        held: ActiveReservation::AllRegistrants,
    };
    assert_eq!(seen_by(&mut one), own);
    assert_eq!((one.write(0, 1), two.write(0, 2)), (Status::Ok, REFUSED));
    assert_eq!(two.read(0), Ok(1), "reads are not excluded");

    register(&mut two, None, OTHER).expect("registered");
    assert_eq!(seen_by(&mut two).others, [KEY]);
    two.reserve(ReservationRequest::Preempt { key: OTHER })
        .expect("preempted");
    let own = ReservationReport {
        own: Some(OTHER),
        ..own
    };
    assert_eq!(seen_by(&mut two), own);
    assert_eq!((one.write(0, 3), two.write(8, 4)), (REFUSED, Status::Ok));
    assert_eq!(register(&mut one, Some(KEY), KEY + 1), Err(REFUSED));
    let gone = one.reserve(ReservationRequest::Unregister { key: KEY });
    assert_eq!(gone, Err(REFUSED));

    register(&mut two, Some(OTHER), OTHER + 1).expect("another key");
    two.reserve(ReservationRequest::Unregister { key: OTHER + 1 })
        .expect("the registration ends");
    assert_eq!(one.reserve(ReservationRequest::Report), free);
    assert_eq!(one.write(0, 5), Status::Ok);
}

/// Goal: a lost connection costs no registration. A request in flight is answered after the
/// reconnect, or ends with the connection; it is never executed twice.
#[test]
fn registrations_survive_connection_losses() {
    let target = TestTarget::start();
    target.add_namespace(ram("ram", 512, 4 << 20));
    let (host, rival) = (attach(&target, 1), attach(&target, 2));
    let mut user = host.user(1);
    register(&mut user, None, KEY).expect("registered");
    user.reserve(ReservationRequest::Acquire { key: KEY })
        .expect("acquired");
    for round in 0..20u8 {
        host.attachment.reset();
        // It may fail at once, on detection, or later; the next report is right in all cases.
        match user.reserve(ReservationRequest::Report) {
            Ok(report) => assert_eq!(report.own, Some(KEY)),
            Err(status) => assert_eq!(status, Status::Gone),
        }
        host.until("live", |h| h.attachment.status().state == State::Live);
        assert_eq!(user.write(0, round), Status::Ok);
    }
    assert_eq!(rival.user(1).write(0, 1), REFUSED);
    assert_eq!(
        user.reserve(ReservationRequest::Report).map(|s| s.own),
        Ok(Some(KEY))
    );
}

/// Goal: I/O of a preempted host is complete before the answer to the preempt: later writes of
/// others stay.
#[test]
fn preempted_under_load() {
    let target = TestTarget::start();
    target.add_namespace(ram("ram", 512, 4 << 20));
    let hosts = [attach(&target, 1), attach(&target, 2)];
    let [mut one, mut two] = hosts.each_ref().map(|host| host.user(1));
    register(&mut one, None, KEY).expect("registered");
    one.reserve(ReservationRequest::Acquire { key: KEY })
        .expect("acquired");
    let under_way: Vec<u64> = (0..32).map(|at| one.submit(Op::Write, at * 8, 1)).collect();
    one.turn();
    register(&mut two, None, OTHER).expect("registered");
    two.reserve(ReservationRequest::Preempt { key: OTHER })
        .expect("preempted");
    for at in 0..32 {
        assert_eq!(two.write(at * 8, 2), Status::Ok);
    }
    let until = Instant::now() + Duration::from_millis(300);
    while Instant::now() < until {
        one.turn();
    }
    for token in under_way {
        // Executed before or refused; never applied after the newer data.
        one.wait(token);
    }
    for at in 0..32 {
        assert_eq!(two.read(at * 8), Ok(2));
    }
}

/// Goal: one reservation request at a time, and none on a device without reservations.
#[test]
fn excess_and_unsupported_requests_are_refused() {
    let target = TestTarget::start();
    let ram = ram("ram", 512, 4 << 20);
    target.add_namespace(Arc::clone(&ram));
    assert!(!ram.reserves());
    let request = || nacre_bdev::reservation::Reserve {
        ask: ReservationRequest::Report,
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
    // A concurrent I/O is not affected.
    let io = Io::new(1, Op::Flush, 0, 0);
    assert!(queue.submit(io).is_ok());
}
