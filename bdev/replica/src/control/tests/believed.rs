//! What is believed of a replica, and what an operator may say instead.

use std::time::Duration;

use super::rig::{REGION, World};
use crate::handle::{Command, VolumeError, VolumeState};
use crate::model::{MemberState, Settings};
use crate::store::{Outcome, Plan, StoreError};

fn why(world: &World, member: usize) -> String {
    let status = world.status();
    status.members[member].why.clone().unwrap_or_default()
}

/// The last replica that is in sync comes back with an old label: its device was put back from a backup, say. It is
/// not read, and it stays what it is: were it to be filled, from nothing, no replica would ever be in sync again.
#[test]
fn the_last_in_sync_replica_is_never_filled() {
    let mut world = World::with(2);
    let settings = Box::new(Settings {
        frozen_hold_ms: 600_000,
        ..Settings::default()
    });
    world.run(Command::Set { settings }).unwrap();
    world.write(0, 8, 1);
    let backup = world.reserved("d0");
    world.crash();
    world.open().unwrap();
    world.write(0, 8, 2);
    world.shelf.take("d1");
    world.write(0, 8, 3);
    world.shelf.take("d0");
    let waits = world.begin_write(0, 8, 4);
    world.until(|world| world.state() == VolumeState::Frozen);
    let newest = world.reserved("d0");
    world.put_back("d0", &backup);
    world.shelf.bring("d0");
    world.until(|world| why(world, 0).contains("its label is of epoch 1"));
    for at in 0..20 {
        // Whatever else is there.
        if at == 10 {
            world.shelf.bring("d1");
        }
        world.pass(Duration::from_secs(1));
        assert_eq!(world.state(), VolumeState::Frozen);
        assert_eq!(world.member_state("d0"), MemberState::InSync);
    }
    assert!(world.ended(waits).is_none());
    assert!(why(&world, 0).contains("Bring back the device"));
    // The right one is found by itself.
    world.put_back("d0", &newest);
    assert!(world.wait(waits).status.is_ok());
    world.until_healthy();
    world.all_equal(&["d0", "d1"]);
    assert_eq!(world.read(0), 4);
}

/// Without a label it is believed as little, at opening too; which says of it what it is.
#[test]
fn the_last_in_sync_replica_without_a_label() {
    let mut world = World::empty(1);
    let blank = world.reserved("d0");
    world.create(1, Settings::default()).unwrap();
    world.open().unwrap();
    world.write(0, 8, 1);
    let labelled = world.reserved("d0");
    world.shelf.take("d0");
    let waits = world.begin_write(0, 8, 2);
    world.until(|world| world.state() == VolumeState::Frozen);
    world.put_back("d0", &blank);
    world.shelf.bring("d0");
    world.until(|world| why(world, 0).contains("it has no label"));
    assert_eq!(world.member_state("d0"), MemberState::InSync);
    assert!(world.ended(waits).is_none());
    world.crash();
    let refused = world.open().unwrap_err();
    assert!(
        matches!(&refused, VolumeError::NothingInSync { why, .. } if why.contains("older than what was served")),
        "{refused}"
    );
    world.crash();
    world.put_back("d0", &labelled);
    world.open().unwrap();
    world.until_healthy();
}

/// An operator goes on from a replica that missed something. That is the store's decision and nothing else: a label
/// written for it could arrive when another decision was made long ago, and roll back what a later holder wrote.
#[test]
fn a_forced_replica_is_not_written_to() {
    let mut world = World::with(2);
    world.write(0, 8, 1);
    world.crash();
    world.open().unwrap();
    world.shelf.take("d1");
    world.write(REGION, 8, 2);
    world.crash();
    world.open().unwrap();
    world.write(0, 8, 3);
    world.crash();
    world.shelf.take("d0");
    world.shelf.bring("d1");
    let refused = world.open().unwrap_err();
    assert!(matches!(refused, VolumeError::NothingInSync { .. }));
    world.crash();
    let before = world.reserved("d1");
    let same = |world: &World| {
        let now = world.reserved("d1");
        now.iter()
            .zip(&before)
            .all(|(now, then)| now[..] == then[..])
    };
    // A decision that comes too late.
    let record = world.record();
    world
        .store
        .plan_next([Plan::default(), Plan::outcome(Outcome::Intrude)]);
    let refused = world.force_in_sync("d1", "vol").unwrap_err();
    let conflict = VolumeError::Store(StoreError::Conflict {
        id: record.id,
        expected: record.version(),
        found: world.record().version(),
    });
    assert_eq!(refused.to_string(), conflict.to_string());
    assert!(same(&world));
    assert_eq!(world.record().members, record.members);
    // Without the name it is none.
    let refused = world.force_in_sync("d1", "").unwrap_err();
    assert!(matches!(refused, VolumeError::LastCopy { .. }));

    world.force_in_sync("d1", "vol").unwrap();
    assert!(same(&world), "the device was written to");
    assert_eq!(world.member_state("d1"), MemberState::InSync);
    world.open().unwrap();
    assert_eq!(world.read(REGION), 0, "it missed that");
    world.write(0, 8, 4);
    // It is labelled like any other from now on: an older life of it is not believed.
    world.crash();
    world.put_back("d1", &before);
    let refused = world.open().unwrap_err();
    assert!(matches!(refused, VolumeError::NothingInSync { .. }));
    world.crash();
    world.force_in_sync("d1", "vol").unwrap();
    world.open().unwrap();
    world.shelf.bring("d0");
    world.until_healthy();
    world.all_equal(&["d0", "d1"]);
    assert_eq!((world.read(0), world.read(REGION)), (4, 0));
}

/// Once more while the volume is being opened: who has it open wins, and what was written there counts.
#[test]
fn a_forced_replica_in_an_open_volume() {
    let mut world = World::with(2);
    world.write(0, 8, 1);
    world.shelf.forget_claims();
    world.force_in_sync("d1", "vol").unwrap();
    // Its next decision finds the other one, and nothing is acknowledged after it.
    let settings = Box::new(Settings::default());
    let refused = world.run(Command::Set { settings }).unwrap_err();
    assert!(matches!(
        refused,
        VolumeError::Store(StoreError::Conflict { .. })
    ));
    assert_eq!(world.state(), VolumeState::Fenced);
    world.crash();
    world.shelf.forget_claims();
    world.open().unwrap();
    assert_eq!(world.read(0), 1);
    world.until_healthy();
    world.all_equal(&["d0", "d1"]);
}
