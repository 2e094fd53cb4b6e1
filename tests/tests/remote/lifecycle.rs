//! Tests of an attached controller whose connections, target and namespaces are lost and return.

use std::sync::Arc;
use std::time::{Duration, Instant};

use nacre_bdev::{Bdev, Op, Status, Support, malloc};
use nacre_hugepages::{ClassSpec, Pool};
use nacre_nvmf::address::Select;
use nacre_nvmf_remote::{NoQueue, State};
use nacre_tests::target::{SUBNQN, TestTarget, nqn, ram};
use uuid::Uuid;

use super::rig::{AttachedRemote, NAME, User, config, options, tcp};

/// The same disk for every restart of a target.
pub(crate) fn disk(name: &str, uuid: u128, blocks: u64) -> Arc<malloc::Malloc> {
    malloc::create(malloc::Config {
        name: name.into(),
        block_size: 512,
        num_blocks: blocks,
        physical_block_size: None,
        uuid: Some(Uuid::from_u128(uuid)),
        optimal_io_boundary: None,
        numa_id: None,
    })
    .expect("memory for a RAM disk")
}

/// A target with `ram`, attached by a host that has written its first blocks.
fn in_use(ram: &Arc<malloc::Malloc>) -> (TestTarget, AttachedRemote, User) {
    let target = TestTarget::start();
    target.add_namespace(Arc::clone(ram) as Arc<dyn Bdev>);
    let attached = AttachedRemote::to(config(options()), tcp(target.address));
    let mut user = attached.user(1);
    assert_eq!(user.write(0, 1), Status::Ok);
    (target, attached, user)
}

/// Goal: the bdev reports the target's properties.
#[test]
fn the_bdev_reports_the_targets_properties() {
    let target = TestTarget::start();
    let ram = ram("ram", 4096, 4 << 20);
    target.add_namespace(Arc::clone(&ram));
    let attached = AttachedRemote::to(config(options()), tcp(target.address));
    let device = attached.registry.lookup("theren1").expect("registered");
    assert_eq!(
        (device.uuid(), device.geometry()),
        (ram.uuid(), ram.geometry())
    );
    assert_eq!(device.product_name(), "NVMe disk");
    let shown = device.driver_specific();
    let nvme = &shown["nvme"][0];
    assert_eq!(nvme["trid"]["trtype"], "TCP");
    assert_eq!(nvme["trid"]["subnqn"], SUBNQN);
    assert_eq!(nvme["ns_data"]["id"], 1);
    assert_eq!(
        (&shown["state"], &shown["losses"]),
        (&"enabled".into(), &0.into())
    );
    assert_eq!(device.losses(), 0);
    let module = attached.attachment.devices().remove(0);
    let limits = module.limits();
    // Unmap is advice to a target; Write Zeroes guarantees zeroes.
    assert!(!limits.unmap_zeroes && limits.zeroes_deallocate && !limits.read_only);
    assert_eq!(module.supports(Op::Verify), Support::Native);
    assert!(limits.max_verify_blocks > limits.max_blocks);
    assert!(limits.max_blocks > 1 && limits.max_blocks <= 1 << 16);
}

/// Goal: if the target disappears under I/O and returns, I/O waits and is executed, and the loss is
/// counted before that.
#[test]
fn loss_and_return() {
    let ram = disk("ram", 1, 8192);
    let (target, attached, mut user) = in_use(&ram);
    let address = target.address;
    for round in 1..4u8 {
        let losses = user.device.losses();
        // Ends the association from the host side. The target keeps everything, but the host cannot
        // know that.
        attached.attachment.reset();
        attached.until("noticed", |a| a.attachment.status().losses > losses);
        assert_eq!(user.write(8, round), Status::Ok);
        assert!(user.device.losses() > losses);
        attached.until("live", |a| a.attachment.status().state == State::Live);
    }
    let losses = user.device.losses();
    drop(target);
    let write = user.submit(Op::Write, 16, 7);
    let read = user.submit(Op::Read, 0, 0);
    let until = Instant::now() + Duration::from_millis(300);
    while Instant::now() < until {
        user.turn();
    }
    assert!(!user.has_ended(write) && !user.has_ended(read));
    let target = TestTarget::start_on(address);
    target.add_namespace(ram);
    assert_eq!(user.wait(write).status, Status::Ok);
    assert!(user.device.losses() > losses, "counted before the answer");
    assert_eq!(user.wait(read).status, Status::Ok);
    assert_eq!((user.read(0), user.read(16)), (Ok(1), Ok(7)));
    assert!(attached.sync().added.is_empty(), "it is the same device");
}

/// Goal: after the fast-fail time all I/O fails at once; the bdev stays, and serves again when the
/// target is back.
#[test]
fn io_fails_after_the_fast_fail_time() {
    let ram = disk("ram", 2, 8192);
    let target = TestTarget::start();
    target.add_namespace(ram.clone());
    let address = target.address;
    const FAST_FAIL: Duration = Duration::from_millis(300);
    let mut options = options();
    options.fast_io_fail = Some(FAST_FAIL);
    let attached = AttachedRemote::to(config(options), tcp(address));
    let mut user = attached.user(1);
    assert_eq!(user.write(0, 1), Status::Ok);
    drop(target);
    assert_eq!(user.write(0, 2), Status::Gone);
    attached.until("away", |a| a.attachment.status().away);
    // An I/O that waits takes the fast-fail time. A busy machine delays some, not each of them.
    let shortest = (0..10).map(|_| {
        let start = Instant::now();
        assert_eq!(user.write(0, 2), Status::Gone);
        start.elapsed()
    });
    let shortest = shortest.min().unwrap();
    assert!(shortest < FAST_FAIL, "without waiting: {shortest:?}");
    attached.sync();
    assert!(attached.registry.lookup("theren1").is_some(), "it stays");
    let target = TestTarget::start_on(address);
    target.add_namespace(ram);
    let until = Instant::now() + super::rig::PATIENCE;
    while user.write(0, 3) != Status::Ok {
        assert!(Instant::now() < until, "not served again");
    }
    assert_eq!(user.read(0), Ok(3));
    attached.until("no longer away", |a| !a.attachment.status().away);
}

/// Goal: with another namespace under the NSID, no byte goes there and the bdev reports the reason.
/// It serves again when the right namespace is back.
#[test]
fn another_identity() {
    let ram = disk("ram", 3, 8192);
    let (target, attached, mut user) = in_use(&ram);
    let address = target.address;
    drop(target);
    let under_way = user.submit(Op::Write, 0, 9);
    let target = TestTarget::start_on(address);
    let other = disk("other", 4, 8192);
    target.add_namespace(other.clone());
    assert_eq!(user.wait(under_way).status, Status::Gone);
    attached.until("noticed", |a| !a.sync().refused.is_empty());
    let why = attached.attachment.devices()[0].refusal().expect("refused");
    assert!(
        why.contains("UUID 00000000-0000-0000-0000-000000000004"),
        "{why}"
    );
    assert!(user.device.driver_specific()["refused"].is_string());
    for lba in [0, 8] {
        assert_eq!(user.write(lba, 9), Status::Gone);
        assert_eq!(user.read(lba), Err(Status::Gone));
    }
    let mut check = {
        let theirs = AttachedRemote::to(config(options()), tcp(address));
        let user = theirs.user(1);
        (theirs, user)
    };
    assert_eq!(
        (check.1.read(0), check.1.read(8)),
        (Ok(0), Ok(0)),
        "nothing was written"
    );
    drop(check);

    drop(target);
    let target = TestTarget::start_on(address);
    target.add_namespace(ram);
    attached.until("taken back", |a| {
        a.sync();
        a.attachment.devices()[0].refusal().is_none() && user.read(0) == Ok(1)
    });
}

/// Goal: growth is announced; after a shrink the bdev refuses I/O.
#[test]
fn growth_is_announced_and_shrinking_refused() {
    let target = TestTarget::start();
    target.add_namespace(disk("a", 5, 8192));
    let address = target.address;
    let attached = AttachedRemote::to(config(options()), tcp(address));
    let mut user = attached.user(1);
    assert_eq!(user.device.geometry().blocks, 8192);
    let sized = |blocks: u64| {
        let target = TestTarget::start_on(address);
        target.add_namespace(disk("a", 5, blocks));
        target
    };
    drop(target);
    let target = sized(16384);
    attached.until("resized", |a| {
        a.sync().resized == [("theren1".to_owned(), 16384)]
    });
    assert_eq!(user.device.geometry().blocks, 16384);
    assert_eq!(user.write(16376, 1), Status::Ok);
    drop(target);
    let target = sized(4096);
    attached.until("noticed", |a| !a.sync().refused.is_empty());
    let why = attached.attachment.devices()[0].refusal();
    assert_eq!(
        why.as_deref(),
        Some("it had 16384 blocks, and has 4096 now")
    );
    assert_eq!(user.write(0, 1), Status::Gone);
    drop(target);
}

/// Goal: new namespaces become bdevs; bdevs of namespaces that stay absent are removed, with
/// everything on them.
#[test]
fn namespaces() {
    let target = TestTarget::start();
    target.add_namespace(ram("a", 512, 4 << 20));
    let mut wanted = config(options());
    wanted.max_devices = 2;
    let attached = AttachedRemote::to(wanted, tcp(target.address));
    let second = target.add_namespace(ram("b", 512, 4 << 20));
    attached.until("added", |a| a.sync().added == ["theren2"]);
    target.add_namespace(ram("c", 512, 4 << 20));
    attached.until("refused", |a| {
        let refused = a.sync().refused;
        refused
            .iter()
            .any(|(name, why)| name == "theren3" && why.contains("2 devices"))
    });
    assert!(attached.sync().refused.is_empty(), "said once");

    let mut user = attached.user(second);
    assert_eq!(user.write(0, 1), Status::Ok);
    let subsystem = target.target.subsystem(&nqn(SUBNQN)).expect("there");
    subsystem.remove_namespace(second).expect("there");
    attached.until("missed", |a| a.sync().again.is_some());
    assert!(attached.registry.lookup("theren2").is_some(), "not at once");
    let later = Instant::now() + Duration::from_secs(6);
    let changes = attached.attachment.sync(&attached.registry, later);
    assert_eq!(changes.removed.len(), 1);
    assert_eq!(user.write(0, 1), Status::Gone);
    assert!(attached.registry.lookup("theren2").is_none());
    assert!(!changes.removed[0].1.is_done(), "a queue is still open");
    drop(user);
    attached.until("gone", |_| changes.removed[0].1.is_done());
    assert_eq!(changes.added, ["theren3"], "there is room now");
}

/// Goal: a namespace that returns while its bdev is being removed becomes a bdev again as soon as
/// possible, without another event of the controller.
#[test]
fn a_namespace_returns_during_its_removal() {
    let target = TestTarget::start();
    target.add_namespace(disk("a", 8, 8192));
    let attached = AttachedRemote::to(config(options()), tcp(target.address));
    let mut user = attached.user(1);
    assert_eq!(user.write(0, 1), Status::Ok);
    let subsystem = target.target.subsystem(&nqn(SUBNQN)).expect("there");
    subsystem.remove_namespace(1).expect("there");
    attached.until("missed", |a| a.sync().again.is_some());
    let later = Instant::now() + Duration::from_secs(6);
    let changes = attached.attachment.sync(&attached.registry, later);
    assert_eq!(changes.removed.len(), 1);
    assert_eq!(target.add_namespace(disk("a", 8, 8192)), 1);
    attached.until("refused", |a| {
        let refused = a.sync().refused;
        refused.iter().any(|(_, why)| why.contains("being removed"))
    });
    assert!(attached.sync().again.is_some(), "it is tried again");
    drop(user);
    attached.until("added", |a| a.sync().added == ["theren1"]);
    assert_eq!(attached.sync().again, None);
    assert_eq!(attached.user(1).write(0, 2), Status::Ok);
}

/// Goal: one of several namespaces can be selected.
#[test]
fn one_namespace_can_be_selected() {
    let target = TestTarget::start();
    target.add_namespace(disk("a", 6, 8192));
    target.add_namespace(disk("b", 7, 8192));
    for (select, expected) in [
        (Select::All, &["theren1", "theren2"][..]),
        (Select::Nsid(2), &["theren2"]),
        (Select::Uuid(Uuid::from_u128(6)), &["theren1"]),
        (Select::Uuid(Uuid::from_u128(8)), &[]),
    ] {
        let mut wanted = config(options());
        wanted.select = select;
        let attached = AttachedRemote::to(wanted, tcp(target.address));
        let names: Vec<String> = attached
            .attachment
            .devices()
            .iter()
            .map(|device| device.name().to_owned())
            .collect();
        assert_eq!(names, expected, "{select:?}");
    }
}

/// Goal: with more cores than granted queues, the next open is refused with the number, and
/// succeeds once another queue is closed.
#[test]
fn more_cores_than_queues() {
    let target = TestTarget::start();
    target.add_namespace(ram("a", 512, 4 << 20));
    let mut two = options();
    two.io_queues = 2;
    let attached = AttachedRemote::to(config(two), tcp(target.address));
    let mut users = [attached.user(1), attached.user(1)];
    let pool = Pool::heap(&[ClassSpec {
        size: 4096,
        count: 8,
    }]);
    let device = attached.attachment.devices().remove(0);
    let refused = Arc::clone(&device).open(&pool).err().expect("none is left");
    let source = refused
        .source
        .get_ref()
        .and_then(|e| e.downcast_ref::<NoQueue>());
    assert_eq!(source, Some(&NoQueue { granted: 2 }));
    assert!(
        refused.to_string().contains("grants 2 I/O queues"),
        "{refused}"
    );
    for user in &mut users {
        assert_eq!(user.write(0, 1), Status::Ok);
    }
    let [first, _second] = users;
    drop(first);
    let mut third = attached.user(1);
    assert_eq!(third.write(0, 2), Status::Ok);
}

/// Goal: a detach under I/O ends the I/O in flight, and the controller at the target.
#[test]
fn detach_under_io() {
    let target = TestTarget::start();
    target.add_namespace(ram("a", 512, 4 << 20));
    let attached = AttachedRemote::to(config(options()), tcp(target.address));
    let mut user = attached.user(1);
    let tokens: Vec<u64> = (0..32)
        .map(|at| user.submit(Op::Write, at * 8, 1))
        .collect();
    let tickets = attached.attachment.remove_devices(&attached.registry);
    attached.attachment.close();
    for token in tokens {
        let status = user.wait(token).status;
        assert!(matches!(status, Status::Ok | Status::Gone), "{status:?}");
    }
    assert_eq!(user.write(0, 1), Status::Gone);
    drop(user);
    attached.until("closed", |a| a.attachment.status().state == State::Closed);
    attached.until("removed", |_| tickets.iter().all(|t| t.is_done()));
    assert!(attached.registry.list().is_empty());
    attached.until("gone at the target", |_| {
        target.target.controller_count() == 0
    });
}

/// Goal: with `ctrlr_loss_timeout_sec` 0, which SPDK saves, a reset still reconnects; a lost target
/// is given up at once.
#[test]
fn a_reset_reconnects_without_a_loss_timeout() {
    let target = TestTarget::start();
    target.add_namespace(disk("a", 9, 8192));
    let mut impatient = options();
    impatient.loss_timeout = Some(Duration::ZERO);
    let attached = AttachedRemote::to(config(impatient), tcp(target.address));
    assert_eq!(attached.user(1).write(0, 1), Status::Ok);
    for connects in 2..4 {
        attached.attachment.reset();
        attached.until("connected again", |a| {
            let status = a.attachment.status();
            status.connects == connects && status.state == State::Live
        });
    }
    drop(target);
    attached.until("given up", |a| {
        matches!(a.attachment.status().state, State::Failed(_))
    });
    assert_eq!(attached.attachment.status().connects, 3);
}

/// Goal: after a permanent refusal, a controller without a loss timeout keeps retrying; others
/// retry after a reset.
#[test]
fn permanent_refusals() {
    let target = TestTarget::start();
    target.add_namespace(disk("a", 9, 8192));
    let address = target.address;
    let attached = AttachedRemote::to(config(options()), tcp(address));
    let mut limited = options();
    limited.loss_timeout = Some(Duration::from_millis(200));
    let patient = AttachedRemote::to(config(limited), tcp(address));
    let mut users = [
        attached.user(1),
        User::of(&patient.registry, &format!("{NAME}n1")),
    ];
    for user in &mut users {
        assert_eq!(user.write(0, 1), Status::Ok);
    }
    drop(target);
    patient.until("given up", |a| {
        matches!(a.attachment.status().state, State::Failed(_))
    });
    assert_eq!(users[1].write(0, 1), Status::Gone);
    let target = TestTarget::start_on(address);
    target.add_namespace(disk("a", 9, 8192));
    assert_eq!(users[0].write(0, 2), Status::Ok);
    std::thread::sleep(Duration::from_millis(100));
    assert!(matches!(
        patient.attachment.status().state,
        State::Failed(_)
    ));
    assert_eq!(users[1].write(0, 1), Status::Gone);
    patient.attachment.reset();
    patient.until("started again", |a| {
        a.attachment.status().state == State::Live
    });
    let until = Instant::now() + super::rig::PATIENCE;
    while users[1].write(0, 3) != Status::Ok {
        assert!(Instant::now() < until, "not served again");
    }

    // A host whose permission was revoked is refused permanently, and retries all the same.
    let subsystem = target.target.subsystem(&nqn(SUBNQN)).expect("there");
    subsystem.set_allow_any_host(false);
    attached.attachment.reset();
    attached.until("refused", |a| {
        matches!(
            a.attachment.status().state,
            State::Waiting { refused: true, .. }
        )
    });
    subsystem.set_allow_any_host(true);
    attached.until("let in", |a| a.attachment.status().state == State::Live);
    let until = Instant::now() + super::rig::PATIENCE;
    while users[0].write(0, 4) != Status::Ok {
        assert!(Instant::now() < until, "not served again");
    }
}
