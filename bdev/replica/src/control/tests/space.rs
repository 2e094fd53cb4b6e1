//! Goal: replicas whose devices are full stay in sync as long as none of them takes the write, and
//! are equal again when one has space. Method: disks that refuse writes with `NoSpace`.

use std::time::Duration;

use nacre_bdev::fault::{Action, Fault};
use nacre_bdev::{Op, Status};

use super::rig::{DISK_BLOCKS, REGION, World};
use crate::handle::VolumeEventKind;
use crate::model::ReplicaState;

fn fill_both(world: &World, first: u64) {
    fill(world, "d0", first);
    fill(world, "d1", first);
}

fn empty_both(world: &World) {
    world.shelf.fault("d0").clear();
    world.shelf.fault("d1").clear();
}

/// From now on the disk has no space for blocks from `first` on.
fn fill(world: &World, name: &str, first: u64) {
    let full = Fault {
        range: Some((first, DISK_BLOCKS - first)),
        ..Fault::new(Action::Fail(Status::NoSpace)).on(&[Op::Write, Op::WriteZeroes, Op::Unmap])
    };
    world.shelf.fault(name).inject(full).unwrap();
}

fn are_in_sync(world: &World) -> bool {
    let is_out = |event: &VolumeEventKind| matches!(event, VolumeEventKind::ReplicaOut { .. });
    let states = ["d0", "d1"].map(|name| world.replica_state(name));
    states == [ReplicaState::InSync, ReplicaState::InSync] && !world.has_event(is_out)
}

#[test]
fn full_replicas_stay_and_become_equal() {
    let mut world = World::with(2);
    world.write(0, 64, 1);
    fill_both(&world, REGION);
    // As if a part of the next write was executed there.
    world.scribble("d1", 3, 9);
    for fill in 2..6 {
        let token = world.begin_write(0, 64, fill);
        assert_eq!(world.wait(token).status, Status::NoSpace);
    }
    world.pass(Duration::from_secs(30));
    assert!(are_in_sync(&world));
    assert!(
        (0..20).all(|_| world.read(3) == 1),
        "the copies differ here"
    );
    assert_eq!(world.medium("d1")[3], 9);
    empty_both(&world);
    world.until(|world| world.status().replicas.iter().all(|of| !of.is_unequal));
    world.all_equal(&["d0", "d1"]);
    world.write(0, 64, 7);
    assert!(are_in_sync(&world));

    // One of them has space.
    fill(&world, "d1", REGION);
    world.write(0, 64, 8);
    assert!(matches!(
        world.replica_state("d1"),
        ReplicaState::Out { .. }
    ));
    world.shelf.fault("d1").clear();
    world.until_healthy();
    world.all_equal(&["d0", "d1"]);
}

/// Nothing has to be copied where full replicas are equal.
#[test]
fn equal_replicas_need_no_space() {
    let mut world = World::with(2);
    world.write(0, 64, 1);
    fill_both(&world, REGION);
    let token = world.begin_write(0, 64, 2);
    assert_eq!(world.wait(token).status, Status::NoSpace);
    world.until(|world| world.status().replicas.iter().all(|of| !of.is_unequal));
    assert!(are_in_sync(&world));
    world.all_equal(&["d0", "d1"]);
}

/// The log of dirty regions finds no space, either: the write waits, and no replica leaves.
#[test]
fn a_full_log_puts_out_no_replica() {
    let mut world = World::with(2);
    world.write(0, 64, 1);
    fill_both(&world, 0);
    let token = world.begin_write(3 * REGION, 64, 2);
    world.pass(Duration::from_secs(5));
    assert!(are_in_sync(&world));
    empty_both(&world);
    assert_eq!(world.wait(token).status, Status::Ok);
    assert!(are_in_sync(&world));
    world.all_equal(&["d0", "d1"]);
}
