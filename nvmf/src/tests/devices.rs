//! Tests of devices that need polls while no command is in flight.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use nacre_bdev::{Bdev, OpenError};
use nacre_hugepages::Pool;
use nacre_nvmf_wire::StatusCode;
use nacre_nvmf_wire::commands::io::ReadWrite;
use nacre_nvmf_wire::fabrics;
use nacre_nvmf_wire::opcode::io as opcode;
use nacre_nvmf_wire::{Sgl, Sqe};
use nacre_reactor::{EventSet, Idle, Nanos, Poller};

use super::rig::*;
use super::scripted::{ScriptedBdev, rig_scripted};
use crate::queues::device::Devices;
use crate::subsystems::reservation::Reservation;
use crate::subsystems::{Backing, Namespace, NamespaceConfig, NamespaceIds, TargetConfig};
use crate::transport::CloseWhy;

fn read(cid: u16) -> Sqe {
    let bytes = Sgl::Transport { length: BLOCK };
    ReadWrite::new(0, 1)
        .to_sqe(opcode::READ, cid, 1)
        .with_sgl(bytes)
}

fn left(scripted: &ScriptedBdev) -> u32 {
    scripted.state.lock().leftovers
}

fn polls(scripted: &ScriptedBdev) -> u32 {
    scripted.state.lock().polls
}

/// An idle device is polled until the cleanup after a change is complete, and not after that: as
/// soon as the core is notified, with its next upkeep, or before it sleeps.
#[test]
fn idle_devices_clear_away() {
    let (mut rig, scripted) = rig_scripted();
    let io = rig.io();
    assert_eq!(rig.status(io, read(1), &[]), StatusCode::SUCCESS);
    (0..5).for_each(|_| rig.turn());
    let idle = polls(&scripted);
    scripted.script(|state| state.leftovers = 3);
    rig.turn();
    assert_eq!(polls(&scripted), idle, "no poll came");
    rig.target.wake_groups();
    (0..8).for_each(|_| rig.turn());
    assert_eq!((left(&scripted), polls(&scripted)), (0, idle + 3));

    scripted.script(|state| state.leftovers = 2);
    assert_eq!(
        rig.group.arm(rig.now),
        Idle::Busy,
        "it does not sleep over it"
    );
    (0..8).for_each(|_| rig.turn());
    assert_eq!((left(&scripted), polls(&scripted)), (0, idle + 5));
    assert_ne!(rig.group.arm(rig.now), Idle::Busy);

    scripted.script(|state| state.leftovers = 2);
    rig.pass(Duration::from_millis(100));
    (0..8).for_each(|_| rig.turn());
    assert_eq!((left(&scripted), polls(&scripted)), (0, idle + 7));
    assert_eq!(rig.status(io, read(2), &[]), StatusCode::SUCCESS);
}

/// Goal: a connection is served though it has the place in its transport of an ended one whose I/O
/// is still in a slow device. Method: the I/O ends when the new connection is in use.
#[test]
fn a_connection_in_the_place_of_one_with_io_left() {
    let (mut rig, scripted) = rig_scripted();
    let (admin, cntlid) = rig.admin();
    let before = rig.io_queue(cntlid, 1);
    scripted.script(|state| state.held = true);
    rig.send(before, read(1), None);
    rig.turn();
    rig.hang_up(before);
    rig.reuse(before);
    let after = rig.io_queue(cntlid, 2);
    assert_eq!(before.index, after.index);
    assert_eq!(rig.group.queue_pairs(), 3);
    scripted.script(|state| state.held = false);
    (0..3).for_each(|_| rig.turn());
    assert_eq!(rig.group.queue_pairs(), 2, "the I/O has ended");
    assert_eq!(rig.status(after, read(2), &[]), StatusCode::SUCCESS);
    rig.hang_up(after);
    rig.hang_up(admin);
    rig.assert_clean();
}

/// Goal: a queue id whose I/O is still in a slow device is not given away, nor refused permanently:
/// the Connect waits for it, and gets a retry status if that takes long.
#[test]
fn a_queue_id_with_io_in_the_device_is_not_reused() {
    let (mut rig, scripted) = rig_scripted();
    let (_, cntlid) = rig.admin();
    let before = rig.io_queue(cntlid, 1);
    scripted.script(|state| state.held = true);
    rig.send(before, read(1), None);
    rig.turn();
    rig.hang_up(before);
    let after = rig.open();
    rig.start_connect(after, 1, cntlid);
    rig.pass(Duration::from_millis(500));
    assert!(rig.wire.borrow().responses.is_empty(), "it waits");
    scripted.script(|state| state.held = false);
    rig.pass(Duration::from_millis(200));
    rig.pass(Duration::from_millis(200));
    assert_eq!(rig.answer().cqe.status(), StatusCode::SUCCESS);
    assert_eq!(rig.status(after, read(2), &[]), StatusCode::SUCCESS);

    scripted.script(|state| state.held = true);
    rig.send(after, read(3), None);
    rig.turn();
    rig.hang_up(after);
    let late = rig.open();
    rig.start_connect(late, 1, cntlid);
    (0..8).for_each(|_| rig.pass(Duration::from_millis(500)));
    let busy = StatusCode::CONNECT_CONTROLLER_BUSY;
    assert_eq!(rig.answer().cqe.status(), busy, "without DNR");
}

/// Goal: the response to Disconnect means that no I/O of the queue is in a device any longer.
#[test]
fn disconnect_waits_for_the_devices() {
    let (mut rig, scripted) = rig_scripted();
    let (admin, cntlid) = rig.admin();
    for (aborts, closing) in [(false, false), (true, false), (false, true)] {
        let io = rig.io_queue(cntlid, 1);
        scripted.script(|state| (state.held, state.aborts) = (true, aborts));
        rig.send(io, read(1), None);
        rig.turn();
        rig.send(io, fabrics::disconnect(2), None);
        rig.send(io, read(3), None);
        rig.turn();
        if closing {
            rig.hang_up(io);
        } else if !aborts {
            rig.pass(Duration::from_secs(1));
        }
        if !aborts {
            assert!(rig.wire.borrow().responses.is_empty(), "it waits");
            scripted.script(|state| state.held = false);
        }
        (0..3).for_each(|_| rig.turn());
        let answers = rig.statuses();
        if closing {
            assert_eq!(answers, [])
        } else {
            assert_eq!(answers, [(2, StatusCode::SUCCESS)])
        }
        assert_eq!(rig.group.queue_pairs(), 1);
    }
    // A controller that goes takes the queue with it.
    let io = rig.io_queue(cntlid, 1);
    scripted.script(|state| (state.held, state.aborts) = (true, false));
    rig.send(io, read(1), None);
    rig.turn();
    rig.send(io, fabrics::disconnect(2), None);
    rig.turn();
    rig.hang_up(admin);
    rig.pass(Duration::from_millis(200));
    assert!(rig.wire.borrow().closes.contains(&(io, CloseWhy::Now)));
    scripted.script(|state| state.held = false);
    (0..3).for_each(|_| rig.turn());
    rig.assert_clean();
}

/// The commands in flight on a queue are reported for observers, as of the last upkeep.
#[test]
fn commands_in_flight_are_reported() {
    let (mut rig, scripted) = rig_scripted();
    let (_, cntlid) = rig.admin();
    let io = rig.io_queue(cntlid, 1);
    let upkeep = Duration::from_millis(200);
    let under_way = |rig: &Rig| {
        let subsystem = rig.target.subsystem(&nqn(SUBNQN)).unwrap();
        let queues = subsystem.controller(cntlid).unwrap().queues();
        let queue = queues.iter().find(|queue| queue.qid == 1).unwrap();
        queue.stats.inflight.load(Ordering::Relaxed)
    };
    scripted.script(|state| state.held = true);
    for cid in 1..=2 {
        rig.send(io, read(cid), None);
    }
    rig.pass(upkeep);
    assert_eq!(under_way(&rig), 2);
    scripted.script(|state| state.held = false);
    rig.pass(upkeep);
    rig.pass(upkeep);
    assert_eq!(under_way(&rig), 0);
}

/// Goal: a device that cannot be opened is not tried with every command for it, which a host may
/// send at full speed; it is served soon after it can be opened.
#[test]
fn a_device_that_cannot_be_opened() {
    let mut rig = Rig::new(TargetConfig::default());
    let scripted = ScriptedBdev::new();
    let tries = Arc::new(AtomicU32::new(0));
    let (opened, tried) = (Arc::clone(&scripted), Arc::clone(&tries));
    let open = move |pool: &Pool| {
        if tried.fetch_add(1, Ordering::Relaxed) < 3 {
            return Err(OpenError {
                bdev: "told".to_string(),
                what: "open".to_string(),
                source: std::io::ErrorKind::NotFound.into(),
            });
        }
        (Arc::clone(&opened) as Arc<dyn Bdev>).open(pool)
    };
    let config = NamespaceConfig {
        nsid: None,
        bdev_name: "told".to_string(),
        ids: NamespaceIds::from_uuid(scripted.uuid()),
        backing: Backing::new(Arc::clone(&scripted) as Arc<dyn Bdev>, Arc::new(open)),
        ana_group: None,
        auto_visible: true,
        reservations: Default::default(),
    };
    rig.target.add_namespace(&nqn(SUBNQN), config).unwrap();
    let io = rig.io();
    let path_error = StatusCode::INTERNAL_PATH_ERROR;
    for round in 1..=3 {
        for cid in 0..100 {
            assert_eq!(rig.status(io, read(cid), &[]), path_error);
        }
        assert_eq!(tries.load(Ordering::Relaxed), round);
        rig.pass(Duration::from_millis(100));
    }
    assert_eq!(rig.status(io, read(1), &[]), StatusCode::SUCCESS);
    assert_eq!(tries.load(Ordering::Relaxed), 4);
}

/// Goal: the cost of finding the used devices does not grow with devices times queue pairs, however
/// often the search runs: a broken network takes thousands of connections along, and each end is a
/// reason to search.
#[test]
fn the_search_for_used_devices_is_cheap() {
    const DEVICES: u32 = 50;
    const QUEUES: u32 = 1000;
    let pool = Pool::heap(&[]);
    let sleepers = EventSet::new().unwrap();
    let mut devices = Devices::new(0);
    for nsid in 1..=DEVICES {
        let scripted = ScriptedBdev::new();
        let ids = NamespaceIds::from_uuid(scripted.uuid());
        let bdev = Arc::clone(&scripted) as Arc<dyn Bdev>;
        let opened = Arc::clone(&bdev);
        let open = move |pool: &Pool| Arc::clone(&opened).open(pool);
        let backing = Backing::new(bdev, Arc::new(open));
        let reservation = Arc::new(Reservation::new(Default::default()));
        let namespace = Arc::new(Namespace::new(nsid, ids, 1, backing, reservation, 1));
        let slot = devices.slot_of(&namespace, &pool, &sleepers, Nanos(1));
        assert!(slot.is_some());
    }
    // Each is seen by two queue pairs, of which the first may go.
    let looks = |devices: &mut Devices, gone: u32| {
        let mut looks = 0;
        let sees = |q: u32, namespace: &Namespace| {
            looks += 1;
            q % (QUEUES / 2) == QUEUES / 2 - namespace.nsid && q >= gone
        };
        assert!(devices.release(QUEUES, sees, &sleepers));
        looks
    };
    looks(&mut devices, 0);
    assert_eq!(looks(&mut devices, 0), DEVICES, "one look for each");
    // As they go one by one, those of one device are looked for at a time.
    for gone in 1..QUEUES / 2 {
        assert!(looks(&mut devices, gone) <= DEVICES + QUEUES);
        assert_eq!(looks(&mut devices, gone), DEVICES);
    }
    assert_eq!(devices.open(), DEVICES as usize);
    looks(&mut devices, QUEUES);
    assert_eq!(devices.open(), 0);
}
