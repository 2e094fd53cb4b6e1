//! Tests of commands that hold writes back for a moment in which the replicas have the same
//! contents.

use std::time::Duration;

use nacre_bdev::Op;
use nacre_bdev::fault::{Action, Fault};
use uuid::Uuid;

use super::rig::{REGION, World};
use crate::handle::{Command, CopiedFrom, NewVolume, VolumeError};
use crate::model::{Origin, ReplicaState, Settings};

const ID: Uuid = Uuid::from_u128(1);

fn hold(milliseconds: u64) -> Command {
    Command::HoldWrites {
        id: ID,
        limit: Duration::from_millis(milliseconds),
    }
}

fn release() -> Command {
    Command::ReleaseWrites { id: ID }
}

fn is_not_held(outcome: Result<(), VolumeError>) -> bool {
    use VolumeError::{NotEqual, NotHeld};
    matches!(outcome, Err(NotHeld { .. } | NotEqual { .. }))
}

/// Goal: nothing is written during a hold, reads go on, and the writes that waited are executed
/// after it.
#[test]
fn writes_wait_until_the_release() {
    let mut world = World::with(3);
    world.write(0, 8, 1);
    world.run(hold(5000)).unwrap();
    let tokens = [
        world.begin_write(0, 8, 2),
        world.begin_write(7 * REGION, 8, 3),
    ];
    world.pass(Duration::from_millis(300));
    assert!(tokens.iter().all(|token| world.ended(*token).is_none()));
    assert_eq!(world.read(0), 1);
    world.all_equal(&["d0", "d1", "d2"]);
    world.run(release()).unwrap();
    for token in tokens {
        assert!(world.wait(token).status.is_ok());
    }
    assert_eq!((world.read(0), world.read(7 * REGION)), (2, 3));
    assert!(is_not_held(world.run(release())));
}

/// A hold waits for a write that one replica executes late.
#[test]
fn a_hold_waits_for_writes_in_flight() {
    let mut world = World::with(2);
    world.write(0, 8, 1);
    let slow = Action::Delay { latency_us: 50_000 };
    let slow = Fault::new(slow).on(&[Op::Write]);
    world.shelf.fault("d1").inject(slow).unwrap();
    let token = world.begin_write(0, 8, 2);
    world.run(hold(5000)).unwrap();
    assert!(world.ended(token).is_some(), "it was in flight");
    world.all_equal(&["d0", "d1"]);
    world.run(release()).unwrap();
}

/// A replica does not answer: the hold is given up at its limit, and other writes go on.
#[test]
fn a_hold_that_does_not_come_about_is_given_up() {
    let mut world = World::with(2);
    world.write(0, 8, 1);
    world.write(4 * REGION, 8, 1);
    let hangs = Fault::new(Action::Hang).on(&[Op::Write]).times(1);
    world.shelf.fault("d1").inject(hangs).unwrap();
    let token = world.begin_write(0, 8, 2);
    world.pass(Duration::from_millis(10));
    let before = world.clock.now();
    assert!(is_not_held(world.run(hold(100))));
    assert!(world.clock.now().since(before) < Duration::from_millis(200));
    world.write(4 * REGION, 8, 3);
    world.shelf.fault("d1").resume_pending();
    assert!(world.wait(token).status.is_ok());
    world.run(hold(100)).unwrap();
    world.run(release()).unwrap();
}

/// A hold that is not released ends by itself, and its release says so.
#[test]
fn a_hold_has_an_end() {
    let mut world = World::with(2);
    world.write(0, 8, 1);
    world.run(hold(100)).unwrap();
    assert!(matches!(
        world.run(hold(100)),
        Err(VolumeError::Running { .. })
    ));
    let token = world.begin_write(0, 8, 2);
    world.pass(Duration::from_millis(150));
    assert!(world.wait(token).status.is_ok());
    assert!(is_not_held(world.run(release())));
    // The end of the first one does not end the next one.
    world.run(hold(100)).unwrap();
    world.run(release()).unwrap();
    world.pass(Duration::from_millis(60));
    world.run(hold(100)).unwrap();
    world.pass(Duration::from_millis(60));
    world.run(release()).unwrap();
    for wrong in [0, 10_001] {
        let refused = world.run(hold(wrong));
        assert!(matches!(refused, Err(VolumeError::Invalid { .. })));
    }
}

/// Goal: the release of a hold that has ended does not end the next one, and does not succeed.
/// Otherwise its caller would believe that no write went on between them.
#[test]
fn holds_have_ids() {
    let mut world = World::with(2);
    world.write(0, 8, 1);
    world.run(hold(100)).unwrap();
    world.pass(Duration::from_millis(150));
    world.write(0, 8, 2);
    let second = Uuid::from_u128(2);
    let limit = Duration::from_secs(5);
    world
        .run(Command::HoldWrites { id: second, limit })
        .unwrap();
    assert!(is_not_held(world.run(release())));
    let token = world.begin_write(0, 8, 3);
    world.pass(Duration::from_millis(300));
    assert!(world.ended(token).is_none(), "the second one goes on");
    world.run(Command::ReleaseWrites { id: second }).unwrap();
    assert!(world.wait(token).status.is_ok());
}

/// Goal: other commands do not wait for a hold that does not come about. Method: a replica that
/// does not answer a write is taken out while the hold waits for it.
#[test]
fn commands_do_not_wait_for_a_hold() {
    let mut world = World::with(2);
    world.write(0, 8, 1);
    let hangs = Fault::new(Action::Hang).on(&[Op::Write]).times(1);
    world.shelf.fault("d1").inject(hangs).unwrap();
    let token = world.begin_write(0, 8, 2);
    world.pass(Duration::from_millis(10));
    let handle = world.handle.clone().unwrap();
    let core = world.core.core().clone();
    let held = core.spawn_local(async move { handle.run(hold(5000)).await });
    world.pass(Duration::from_millis(10));
    let before = world.clock.now();
    let offline = Command::Offline {
        replica: "d1".into(),
        force: None,
    };
    world.run(offline).unwrap();
    assert!(world.clock.now().since(before) < Duration::from_secs(1));
    assert!(world.wait(token).status.is_ok(), "without d1");
    world.until(|_| held.is_finished());
    world.core.block_on(held).unwrap().unwrap();
    world.run(release()).unwrap();
}

/// Replicas that may differ after a crash are not held as equal.
#[test]
fn replicas_that_are_being_reconciled() {
    let mut world = World::with(2);
    world.write(0, 8, 1);
    world.crash();
    world.open().unwrap();
    let is_unequal = world.status().replicas.iter().any(|one| one.is_unequal);
    assert!(is_unequal, "the reconcile has not run yet");
    assert!(is_not_held(world.run(hold(100))));
    world.until(|world| !world.status().replicas.iter().any(|one| one.is_unequal));
    world.until(|world| {
        world
            .status()
            .replicas
            .iter()
            .all(|one| one.resync.is_none())
    });
    world.run(hold(100)).unwrap();
    world.all_equal(&["d0", "d1"]);
    world.run(release()).unwrap();
}

/// A replica that leaves during the hold makes the release fail. One that is out before does not
/// count.
#[test]
fn a_replica_that_leaves() {
    let mut world = World::with(3);
    world.write(0, 8, 1);
    world.run(hold(5000)).unwrap();
    let offline = Command::Offline {
        replica: "d2".into(),
        force: None,
    };
    world.run(offline).unwrap();
    assert!(is_not_held(world.run(release())));
    assert!(matches!(
        world.replica_state("d2"),
        ReplicaState::Out { .. }
    ));
    world.write(0, 8, 2);
    world.run(hold(5000)).unwrap();
    world.all_equal(&["d0", "d1"]);
    world.run(release()).unwrap();
}

/// A replica may have lost its cache, and the control has not found out: writes are not held as
/// equal, and a release fails.
#[test]
fn a_replica_that_lost_data_unnoticed() {
    let mut world = World::shared(2, 1);
    world.create(2, Settings::default()).unwrap();
    world.open().unwrap();
    world.write(0, 8, 1);
    let lose = |world: &World| world.shelf.reservations("d1").lock().losses += 1;
    let is_in_sync = |world: &World| world.replica_state("d1") == ReplicaState::InSync;
    world.run(hold(5000)).unwrap();
    lose(&world);
    assert!(is_not_held(world.run(release())));
    assert!(is_in_sync(&world), "the loss is not known yet");
    assert!(is_not_held(world.run(hold(100))));
    assert!(is_in_sync(&world), "the loss is not known yet");
    // The write finds the loss.
    world.write(0, 8, 2);
    world.until_healthy();
    world.run(hold(5000)).unwrap();
    world.all_equal(&["d0", "d1"]);
    world.run(release()).unwrap();
}

/// A volume that grows during a hold has blocks that may differ, so the release fails.
#[test]
fn a_volume_that_grows() {
    let mut world = World::empty(2);
    let blocks = 2 * REGION;
    let new = NewVolume {
        name: "vol".into(),
        id: None,
        bytes: Some(blocks * 512),
        devices: vec!["d0".into(), "d1".into()],
        settings: Settings::default(),
        force: false,
        copied_from: None,
    };
    world.create_new(new).unwrap();
    world.open().unwrap();
    world.write(0, 8, 1);
    world.scribble("d1", blocks, 1);
    world.run(hold(5000)).unwrap();
    let blocks = blocks + REGION;
    world.run(Command::Grow { blocks }).unwrap();
    assert!(is_not_held(world.run(release())));
    world.until_healthy();
    world.run(hold(5000)).unwrap();
    world.all_equal(&["d0", "d1"]);
    world.run(release()).unwrap();
}

/// A volume that is closed or stopped during a hold opens again and is written.
#[test]
fn a_hold_does_not_outlive_the_volume() {
    for is_closed in [true, false] {
        let mut world = World::with(2);
        world.write(0, 8, 1);
        world.run(hold(5000)).unwrap();
        if is_closed {
            world.close();
        } else {
            world.crash();
        }
        world.open().unwrap();
        world.write(0, 8, 2);
        assert!(is_not_held(world.run(release())));
    }
}

/// Goal: a volume whose first devices are copies of replicas that were held together is in sync on
/// all of these at once. A further one is filled. Copies that are none are refused. Method: the
/// disks themselves, as their snapshots would be, after the hold.
#[test]
fn a_volume_of_several_copies() {
    let mut world = World::with(2);
    world.add_disk("d2", super::rig::DISK_BLOCKS);
    world.write(0, 8, 1);
    world.write(3 * REGION, 8, 2);
    world.run(hold(5000)).unwrap();
    world.run(release()).unwrap();
    // The process ends: the dirty-region log names both regions.
    world.crash();
    let new = |name: &str, devices: usize| NewVolume {
        name: name.into(),
        id: None,
        bytes: None,
        devices: ["d0", "d1", "d2"].map(str::to_owned).to_vec(),
        settings: Settings::default(),
        force: false,
        copied_from: Some(CopiedFrom {
            origin: Origin {
                snapshot: Uuid::from_u128(9),
                name: "monday".into(),
            },
            devices,
        }),
    };
    assert!(world.create_new(new("three", 3)).is_err(), "d2 is empty");
    world.create_new(new("copy", 2)).unwrap();
    world.open().unwrap();
    let status = world.status();
    let states: Vec<_> = status.replicas.iter().map(|one| one.state).collect();
    assert_eq!(states[..2], [ReplicaState::InSync; 2]);
    assert!(matches!(states[2], ReplicaState::Filling { .. }));
    assert!(status.replicas.iter().all(|one| !one.is_unequal));
    assert_eq!((world.read(0), world.read(3 * REGION)), (1, 2));
    world.until_healthy();
    world.all_equal(&["d0", "d1", "d2"]);
}
