//! Tests of replicas that several hosts can access: the holder excludes the other hosts, and a
//! previous holder stops.

use std::time::Duration;

use nacre_bdev::reservation::{ActiveReservation, ReservationRequest};
use nacre_bdev::{Op, Status};
use uuid::Uuid;

use super::rig::{REGION, World};
use super::shared_device::InjectedFailure;
use crate::control::fence::key;
use crate::handle::{Command, Fencing, NewVolume, VolumeError, VolumeEventKind, VolumeState};
use crate::model::{ReplicaState, Settings};
use crate::store::{MemoryStore, Outcome, Plan};

const ME: u8 = 1;
const RIVAL: u8 = 2;

/// A volume of `disks` disks with reservations.
fn shared(disks: usize) -> World {
    let mut world = World::shared(disks, ME);
    world.create(disks, Settings::default()).unwrap();
    world.open().unwrap();
    world
}

/// Checks that the write does not complete within twice the hold time, except with a path error.
fn must_not_be_acknowledged(world: &mut World, token: u64) {
    world.pass(Duration::from_secs(60));
    if let Some(done) = world.ended(token) {
        assert_eq!(done.status, Status::Gone);
    }
}

/// While a volume is open, its replicas are reserved for its holder, under a key of the epoch. When
/// it is closed they are free. A device without reservations is protected by its label. The status
/// shows which of the two protects a replica.
#[test]
fn held_while_open() {
    let mut world = shared(2);
    world.write(0, 8, 1);
    for disk in ["d0", "d1"] {
        let known = world.shelf.reservations(disk);
        let known = known.lock();
        assert_eq!(known.keys.keys().collect::<Vec<_>>(), [&ME]);
        assert_eq!(known.held, ActiveReservation::AllRegistrants);
    }
    let fencing = |world: &World| {
        world
            .status()
            .replicas
            .iter()
            .map(|m| m.fencing)
            .collect::<Vec<_>>()
    };
    assert_eq!(fencing(&world), [Some(Fencing::Reservation); 2]);
    let first = world.shelf.key("d0", ME).unwrap();
    world.close();
    assert_eq!(world.shelf.key("d0", ME), None);
    assert_eq!(
        world.shelf.reservations("d1").lock().held,
        ActiveReservation::NotReserved
    );
    world.open().unwrap();
    assert!(world.shelf.key("d0", ME).unwrap() > first, "a later epoch");

    let plain = World::with(2);
    assert_eq!(fencing(&plain), [Some(Fencing::Label); 2]);
}

/// Another holder opens the volume with a copy of the store. From then on the previous holder
/// acknowledges nothing, whichever replicas it can reach. No replica is marked bad for that.
#[test]
fn the_older_holder_is_fenced() {
    let mut world = shared(2);
    world.write(0, 8, 1);
    let mut rival = world.rival(RIVAL);
    rival.open().unwrap();
    assert_eq!(rival.read(0), 1);
    rival.write(8, 8, 2);
    assert_eq!(world.shelf.key("d0", ME), None, "preempted");

    let token = world.begin_write(16, 8, 3);
    world.until(|world| world.state() == VolumeState::Fenced);
    must_not_be_acknowledged(&mut world, token);
    assert!(world.has_event(|e| matches!(e, VolumeEventKind::Fenced { .. })));
    assert!(!world.has_event(|e| matches!(e, VolumeEventKind::ReplicaOut { .. })));
    assert_eq!(world.replica_state("d0"), ReplicaState::InSync);
    assert_ne!(rival.read(16), 3, "no data of the fenced write");
    rival.write(24, 8, 4);
    rival.until_healthy();
    rival.all_equal(&["d0", "d1"]);
}

/// A host chose a replica of a closed volume, and stopped while it had that replica reserved. An
/// operator can choose the replica again on another host.
#[test]
fn an_abandoned_choice_of_a_replica() {
    let mut world = shared(2);
    world.write(0, 8, 1);
    let record = world.record();
    world.crash();
    let key = key(record.id, record.epoch + 1, Uuid::nil());
    let known = world.shelf.reservations("d1");
    known.lock().keys = [(ME, key)].into();
    let mut rival = world.rival(RIVAL);
    rival.force_in_sync("d1", "vol").unwrap();
    assert_eq!(world.shelf.key("d1", ME), None);
    rival.open().unwrap();
    assert_eq!(rival.read(0), 1);
}

/// A holder without writes also learns of the other holder, and serves no more reads.
#[test]
fn an_idle_holder_is_fenced_too() {
    let mut world = shared(1);
    world.write(0, 8, 1);
    let mut rival = world.rival(RIVAL);
    rival.open().unwrap();
    let began = world.clock.now();
    world.until(|world| world.state() == VolumeState::Fenced);
    assert!(world.clock.now().since(began) < Duration::from_secs(2));
    let data = world.buf(1, 0);
    let token = world.submit(nacre_bdev::Io::new(0, Op::Read, 0, 1).with(data));
    must_not_be_acknowledged(&mut world, token);
}

/// Writes in flight during a takeover: each is either on the medium before the new holder's first
/// read, or never acknowledged. Reaching one of two replicas is enough to be fenced.
#[test]
fn taken_over_under_load() {
    let mut world = shared(2);
    let tokens: Vec<u64> = (0..32).map(|at| world.begin_write(at * 8, 8, 7)).collect();
    world.step();
    let mut rival = world.rival(RIVAL);
    rival.open().unwrap();
    let acknowledged: Vec<u64> = (0..32)
        .filter(|at| {
            let done = world.ended(tokens[*at as usize]);
            done.is_some_and(|done| done.status == Status::Ok)
        })
        .collect();
    world.pass(Duration::from_secs(60));
    for (at, token) in (0u64..).zip(&tokens) {
        let late = world.ended(*token);
        assert!(
            late.is_none_or(|done| done.status != Status::Ok),
            "{at} is late"
        );
    }
    for at in acknowledged {
        assert_eq!(rival.read(at * 8), 7);
    }
    assert_eq!(world.state(), VolumeState::Fenced);
}

/// A returning holder, which was cut off, takes no reservation from its successor.
#[test]
fn a_returning_old_holder() {
    let mut world = shared(2);
    world.write(0, 8, 1);
    ["d0", "d1"]
        .iter()
        .for_each(|disk| world.shelf.cut(disk, true));
    let token = world.begin_write(16, 8, 9);
    world.pass(Duration::from_secs(2));
    assert_eq!(world.state(), VolumeState::Frozen);
    let mut rival = world.rival(RIVAL);
    rival.open().unwrap();
    rival.write(0, 8, 2);
    let held = rival.shelf.key("d1", RIVAL);
    ["d0", "d1"]
        .iter()
        .for_each(|disk| world.shelf.cut(disk, false));
    world.until(|world| world.state() == VolumeState::Fenced);
    must_not_be_acknowledged(&mut world, token);
    assert_eq!(
        rival.shelf.key("d1", RIVAL),
        held,
        "the successor keeps its reservation"
    );
    assert_eq!(rival.shelf.key("d1", ME), None);
    // At its close the old holder does not unregister the successor. Its next start finds the later
    // label.
    world.close();
    let error = world.open().unwrap_err();
    assert!(matches!(error, VolumeError::Newer { .. }), "{error}");
    rival.write(8, 8, 3);
    assert_eq!(rival.read(0), 2);
}

/// The target lost its registrations: the holder registers again, unless another holder has the
/// volume.
#[test]
fn a_target_that_forgets() {
    let mut world = shared(1);
    let key = world.shelf.key("d0", ME);
    *world.shelf.reservations("d0").lock() = Default::default();
    world.until(|world| world.shelf.key("d0", ME) == key);
    world.until(|w| w.shelf.reservations("d0").lock().held == ActiveReservation::AllRegistrants);
    world.write(0, 8, 1);
    assert_eq!(world.state(), VolumeState::Healthy);

    // Another holder opened the volume meanwhile, and closed it: its label remains.
    let mut rival = world.rival(RIVAL);
    rival.open().unwrap();
    rival.close();
    world.until(|world| world.state() == VolumeState::Fenced);
    assert_eq!(world.shelf.key("d0", ME), None, "the key is unregistered");
}

/// Whichever step fails, the volume opens with the present replicas or not at all. Registrations
/// left at a target do not prevent the next attempt.
#[test]
fn steps_that_fail() {
    let which: [fn(&ReservationRequest) -> bool; 4] = [
        |ask| matches!(ask, ReservationRequest::Report),
        |ask| matches!(ask, ReservationRequest::Register { .. }),
        |ask| matches!(ask, ReservationRequest::Acquire { .. }),
        |ask| matches!(ask, ReservationRequest::Preempt { .. }),
    ];
    // The reservation of a holder that closed is acquired, that of another is preempted.
    let left = |disks: usize, at: usize| {
        let mut world = shared(disks);
        world.write(0, 8, 1);
        match at {
            2 => world.close(),
            _ => world.crash(),
        }
        world
    };
    for (at, which) in which.into_iter().enumerate() {
        let world = left(2, at);
        let mut rival = world.rival(RIVAL);
        let fail = |rival: &World, name: &str, status, once| {
            let failure = InjectedFailure {
                which,
                status,
                once,
            };
            rival.shelf.reservations(name).lock().failure = Some(failure);
        };
        let mends = |rival: &World, name: &str| {
            rival.shelf.reservations(name).lock().failure = None;
        };
        // The device disappears between two steps.
        fail(&rival, "d1", Status::Gone, false);
        rival.open().unwrap();
        rival.write(8, 8, 2);
        assert!(!rival.status().replicas[1].attached, "step {at}");
        mends(&rival, "d1");
        rival.until_healthy();
        assert_eq!(rival.shelf.key("d1", ME), None, "step {at}");
        rival.all_equal(&["d0", "d1"]);

        // With a single replica the opening fails.
        let world = left(1, at);
        let mut rival = world.rival(RIVAL);
        fail(&rival, "d0", Status::Gone, false);
        let error = rival.open();
        let none = matches!(error, Err(VolumeError::NothingInSync { .. }));
        assert!(none, "step {at}: {error:?}");
        mends(&rival, "d0");
        rival.open().unwrap();
        rival.write(0, 8, 1);

        // A faster host's reservation refuses the step; that host has left since.
        let world = left(1, at);
        let mut rival = world.rival(RIVAL);
        fail(&rival, "d0", Status::RESERVATION_CONFLICT, true);
        match at {
            // A host that may not read registrations does not become the holder.
            0 => assert!(matches!(
                rival.open().unwrap_err(),
                VolumeError::Fenced { .. }
            )),
            _ => rival.open().unwrap(),
        }
    }
}

/// A later holder registers between this holder's label check and its registration: this holder
/// gives up and leaves no registration.
#[test]
fn outranked_while_opening() {
    let mut world = shared(2);
    world.close();
    let later = key(world.id, 99, Uuid::from_u128(9));
    {
        let known = world.shelf.reservations("d1");
        let mut known = known.lock();
        known.keys.insert(RIVAL, later);
        known.held = ActiveReservation::AllRegistrants;
    }
    let error = world.open().unwrap_err();
    assert!(matches!(error, VolumeError::Fenced { .. }), "{error}");
    assert_eq!(world.shelf.key("d0", ME), None);
    assert_eq!(world.shelf.key("d1", RIVAL), Some(later));
}

/// A namespace reserved by an unrelated host is not preempted, and the error names that
/// reservation.
#[test]
fn reserved_by_an_unrelated_host() {
    let mut world = World::shared(2, ME);
    let stranger = |world: &World, held| {
        let known = world.shelf.reservations("d1");
        let mut known = known.lock();
        known.keys.insert(RIVAL, 0xabc);
        known.held = held;
    };
    stranger(&world, ActiveReservation::AllRegistrants);
    let error = world.create(2, Settings::default()).unwrap_err();
    assert!(
        matches!(&error, VolumeError::Reserved { device } if device.contains("d1")),
        "{error}"
    );
    world.shelf.reservations("d1").lock().keys.clear();
    world.shelf.reservations("d1").lock().held = ActiveReservation::NotReserved;
    world.create(2, Settings::default()).unwrap();

    stranger(&world, ActiveReservation::Other(1));
    world.open().unwrap();
    world.write(0, 8, 1);
    world.pass(Duration::from_secs(5));
    assert_eq!(world.state(), VolumeState::Degraded);
    let status = world.status();
    let why = status.replicas[1].why.clone().unwrap_or_default();
    assert!(why.contains("reserved"), "{why}");
    assert_eq!(world.shelf.key("d1", RIVAL), Some(0xabc));
    // The unrelated host releases its reservation, and the device is a replica again.
    *world.shelf.reservations("d1").lock() = Default::default();
    world.until_healthy();
    world.all_equal(&["d0", "d1"]);
}

/// Nor is a namespace preempted on which an unrelated host has an all-access reservation, or that
/// is the only replica. An unrelated host blocks that replica and no other. The status shows what
/// I/O waits for, and I/O continues when that host releases it.
#[test]
fn an_unrelated_reservation_blocks_one_replica() {
    const EXCLUSIVE: [ActiveReservation; 2] =
        [ActiveReservation::Other(1), ActiveReservation::Other(2)];
    let reserve = |world: &World, disk: &str, held| {
        let known = world.shelf.reservations(disk);
        let mut known = known.lock();
        known.keys.insert(RIVAL, 0xabc);
        known.held = held;
    };
    for held in EXCLUSIVE {
        let mut world = shared(2);
        world.write(0, 8, 1);
        world.close();
        reserve(&world, "d1", held);
        world.open().unwrap();
        world.write(8, 8, 2);
        world.pass(Duration::from_secs(60));
        assert_eq!(world.state(), VolumeState::Degraded, "{held:?}");
        world.write(16, 8, 3);
        let why = world.status().replicas[1].why.clone().unwrap_or_default();
        assert!(why.contains("reserved"), "{held:?}: {why}");
        *world.shelf.reservations("d1").lock() = Default::default();
        world.until_healthy();
        world.all_equal(&["d0", "d1"]);

        let mut world = shared(1);
        world.write(0, 8, 1);
        world.close();
        reserve(&world, "d0", held);
        let error = world.open().unwrap_err();
        let none = matches!(error, VolumeError::NothingInSync { .. });
        assert!(
            none && error.to_string().contains("reserved"),
            "{held:?}: {error}"
        );
        *world.shelf.reservations("d0").lock() = Default::default();
        world.open().unwrap();
        assert_eq!(world.read(0), 1);
    }
}

/// A replica that leaves the volume is free for other uses; so are the replicas of a deleted volume
/// whose holder crashed.
#[test]
fn a_removed_replica_is_released() {
    let mut world = shared(2);
    world.write(0, 8, 1);
    let replica = "d1".to_owned();
    let force = None;
    world.run(Command::Remove { replica, force }).unwrap();
    assert_eq!(world.shelf.key("d1", ME), None);
    assert_eq!(
        world.shelf.reservations("d1").lock().held,
        ActiveReservation::NotReserved
    );
    assert!(world.shelf.key("d0", ME).is_some());
    world.crash();
    let mut rival = world.rival(RIVAL);
    rival.delete().unwrap();
    let known = world.shelf.reservations("d0");
    assert!(known.lock().keys.is_empty());
    assert_eq!(known.lock().held, ActiveReservation::NotReserved);
    let error = rival.create(1, Settings::default()).unwrap_err();
    assert!(
        matches!(error, VolumeError::InUse { .. }),
        "data, no label: {error}"
    );
}

/// A fenced holder writes nothing to the log at its close: the log belongs to another holder by
/// now, whose entries would be lost.
#[test]
fn a_fenced_holder_leaves_the_log() {
    let mut world = World::with(2);
    world.write(0, 8, 1);
    world.write(5 * REGION, 8, 1);
    world.store.plan_next([Plan::outcome(Outcome::Intrude)]);
    let settings = Box::new(Settings::default());
    world.run(Command::Set { settings }).unwrap_err();
    assert_eq!(world.state(), VolumeState::Fenced);
    let before = [world.reserved("d0"), world.reserved("d1")];
    world.close();
    let after = [world.reserved("d0"), world.reserved("d1")];
    for (now, then) in after.iter().flatten().zip(before.iter().flatten()) {
        assert!(now[..] == then[..], "the fenced holder wrote to a replica");
    }
    world.crash();
    world.open().unwrap();
    assert_eq!(world.status().dirty_regions, 2);
}

/// Another daemon owns the store: the first change that it refuses fences the holder, even after
/// changes without a reply.
#[test]
fn a_store_with_another_owner_fences() {
    for lost in 0..2 {
        let mut world = World::with(2);
        world.write(0, 8, 1);
        let mut plans: Vec<Plan> = (0..lost).map(|_| Plan::outcome(Outcome::Refuse)).collect();
        // A load is answered.
        plans.extend((0..lost).map(|_| Plan::default()));
        plans.push(Plan::outcome(Outcome::Own));
        world.store.plan_next(plans);
        let settings = Box::new(Settings::default());
        let error = world.run(Command::Set { settings }).unwrap_err();
        assert!(error.to_string().contains("belongs to another"), "{error}");
        assert_eq!(world.state(), VolumeState::Fenced);
    }
}

/// A change succeeds and its reply is lost; the store stays unreachable until the change is
/// retried. The conflict is then the holder's own change: no other holder has the volume.
#[test]
fn a_lost_store_reply_does_not_fence() {
    let mut world = World::with(2);
    for lost in 0..6 {
        let mut plans = vec![Plan::outcome(Outcome::Lose)];
        plans.extend((0..lost).map(|_| Plan::outcome(Outcome::Refuse)));
        world.store.plan_next(plans);
        let settings = Settings {
            settle_ms: 10 + lost,
            ..Settings::default()
        };
        let settings = Box::new(settings);
        world.run(Command::Set { settings }).unwrap();
        assert_eq!(world.state(), VolumeState::Healthy);
        assert_eq!(world.record().settings.settle_ms, 10 + lost);
        world.write(0, 8, lost as u8 + 1);
    }
    // A change by another holder is still detected.
    world.store.plan_next([
        Plan::outcome(Outcome::Lose),
        Plan::outcome(Outcome::Refuse),
        Plan::outcome(Outcome::Intrude),
    ]);
    let settings = Box::new(Settings::default());
    world.run(Command::Set { settings }).unwrap_err();
    assert_eq!(world.state(), VolumeState::Fenced);
}

/// A volume, and another host that reaches its disks, which do not support reservations.
fn by_label(disks: usize) -> (World, World) {
    let mut world = World::empty(disks);
    world.store = MemoryStore::alone();
    world.create(disks, Settings::default()).unwrap();
    world.open().unwrap();
    world.write(0, 8, 1);
    let rival = world.rival(RIVAL);
    (world, rival)
}

/// Where only labels protect, the later holder waits until the earlier one has polled the labels.
/// By the time the later one serves, the earlier one acknowledges and reads nothing. No replica is
/// marked bad for that.
#[test]
fn a_label_fences_the_older_holder() {
    for disks in [1, 2] {
        let (mut world, mut rival) = by_label(disks);
        let began = world.clock.now();
        rival.open_beside(&mut world).unwrap();
        let took = world.clock.now().since(began);
        assert!(took >= Duration::from_secs(8), "a deadline, {took:?}");
        assert_eq!(world.state(), VolumeState::Fenced, "{disks}");
        assert_eq!(rival.read(0), 1);
        rival.write(8, 8, 2);
        let token = world.begin_write(16, 8, 3);
        must_not_be_acknowledged(&mut world, token);
        assert!(!world.has_event(|e| matches!(e, VolumeEventKind::ReplicaOut { .. })));
        assert_ne!(rival.read(16), 3, "no data of the fenced write");
        // Its close leaves the later holder's label and log unchanged.
        world.close();
        rival.until_healthy();
        rival.crash();
        rival.open().unwrap();
        assert_eq!(rival.read(8), 2);
    }
}

/// A volume without writes does not poll labels. It polls them before its next write.
#[test]
fn an_idle_holder_polls_labels_before_a_write() {
    let (mut world, mut rival) = by_label(2);
    world.until(|world| world.status().dirty_regions == 0);
    rival.open_beside(&mut world).unwrap();
    assert_eq!(
        world.state(),
        VolumeState::Healthy,
        "an idle holder has not noticed"
    );
    rival.write(0, 8, 2);
    let token = world.begin_write(0, 8, 3);
    world.until(|world| world.state() == VolumeState::Fenced);
    must_not_be_acknowledged(&mut world, token);
    assert_eq!(rival.read(0), 2);
    rival.all_equal(&["d0", "d1"]);
}

/// A holder polls the labels before any change of the replicas, too: the later holder's label
/// stays.
#[test]
fn a_replica_change_keeps_a_newer_label() {
    let (mut world, mut rival) = by_label(2);
    world.until(|world| world.status().dirty_regions == 0);
    rival.open_beside(&mut world).unwrap();
    let replica = "d1".to_owned();
    let force = None;
    let _ = world.run(Command::Offline { replica, force });
    world.until(|world| world.state() == VolumeState::Fenced);
    rival.crash();
    rival.open().unwrap();
    assert_eq!(rival.status().replicas.len(), 2);
    rival.until_healthy();
    assert_eq!(rival.read(0), 1);
}

/// A holder that restarts its own volume does not wait.
#[test]
fn a_holder_reopens_its_volume_without_waiting() {
    let mut world = World::with(2);
    world.write(0, 8, 1);
    world.crash();
    let began = world.clock.now();
    world.open().unwrap();
    assert!(world.clock.now().since(began) < Duration::from_secs(1));
}

/// A replica's device is reused, by force, for another volume: the device is no longer read, and
/// the other replicas serve.
#[test]
fn a_replica_reused_by_another_volume() {
    let (mut world, mut rival) = by_label(2);
    let settings = Settings::default();
    let new = NewVolume {
        name: "theirs".into(),
        id: None,
        bytes: None,
        devices: vec!["d1".into()],
        settings,
        force: true,
        copied_from: None,
    };
    rival.create_new(new).unwrap();
    world.until(|world| world.state() == VolumeState::Degraded);
    let why = world.status().replicas[1].why.clone().unwrap_or_default();
    assert!(why.contains("another replica"), "{why}");
    world.write(0, 8, 2);
    assert_eq!(world.read(0), 2);
    world.pass(Duration::from_secs(60));
    let why = world.status().replicas[1].why.clone().unwrap_or_default();
    assert!(why.contains("theirs"), "{why}");
    assert_eq!(
        world.state(),
        VolumeState::Degraded,
        "the reused device is not attached again"
    );
}
