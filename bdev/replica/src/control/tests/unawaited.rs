//! Tests of replicas whose devices are known not to answer, because the lease of their node is
//! over.

use std::sync::atomic::Ordering;
use std::time::Duration;

use nacre_bdev::Status;
use nacre_bdev::fault::{Action, Fault};

use super::rig::{REGION, TestDisks, World};
use crate::handle::VolumeState;
use crate::model::{ReplicaState, Settings};

impl TestDisks {
    pub(super) fn await_device(&self, name: &str, awaited: bool) {
        let mut unawaited = self.unawaited.lock();
        if awaited {
            unawaited.remove(name)
        } else {
            unawaited.insert(name.into())
        };
    }
}

/// Two remote disks.
fn remote() -> World {
    let mut world = World::empty(2);
    world.shelf.remote.store(true, Ordering::Relaxed);
    world.create(2, Settings::default()).unwrap();
    world
}

fn seconds(world: &mut World, what: impl FnOnce(&mut World)) -> f64 {
    let began = world.clock.now();
    what(world);
    world.clock.now().since(began).as_secs_f64()
}

/// An absent replica delays the opening only if it is awaited, and by the patience at most.
#[test]
fn opening() {
    for (awaited, patience, least, most) in [
        (true, None, 5.0, 6.0),
        (true, Some(2), 2.0, 3.0),
        (true, Some(15), 5.0, 6.0),
        (false, None, 0.0, 0.5),
    ] {
        let mut world = remote();
        *world.shelf.patience.lock() = patience.map(Duration::from_secs);
        world.shelf.take("d1");
        world.shelf.await_device("d1", awaited);
        let taken = seconds(&mut world, |world| world.open().unwrap());
        assert!((least..most).contains(&taken), "{awaited}: {taken}");
        assert!(matches!(
            world.replica_state("d1"),
            ReplicaState::Out { .. }
        ));
        world.shelf.bring("d1");
        world.until_healthy();
    }
}

/// A replica that owes an answer is out after half a second if it is not awaited, whether a lane or
/// the dirty-region log waits for it. Otherwise it is out after the deadline of eight seconds.
#[test]
fn a_silent_replica() {
    for logged in [true, false] {
        for (awaited, least, most) in [(true, 7.0, 20.0), (false, 0.4, 1.5)] {
            let mut world = remote();
            world.open().unwrap();
            world.write(0, 8, 1);
            let hangs = world.shelf.fault("d1");
            hangs.inject(Fault::new(Action::Hang)).unwrap();
            world.shelf.await_device("d1", awaited);
            let lba = if logged { 8 } else { 2 * REGION };
            let taken = seconds(&mut world, |world| world.write(lba, 8, 2));
            assert!(
                (least..most).contains(&taken),
                "{awaited} {logged}: {taken}"
            );
            assert!(matches!(
                world.replica_state("d1"),
                ReplicaState::Out { .. }
            ));
            world.shelf.fault("d1").clear();
            world.until_healthy();
        }
    }
}

/// Goal: replicas whose nodes have leases and cannot be reached delay a write by little more than
/// the patience, one or two of three. Method: their devices hang; the deadline of eight seconds
/// would count once for each, because the decision about one writes to the other.
#[test]
fn silent_replicas_of_nodes_with_leases() {
    for silent in [&["d1"][..], &["d1", "d2"]] {
        for (patience, least, most) in [(Some(2), 1.9, 4.0), (None, 7.0, 40.0)] {
            let mut world = World::empty(3);
            world.shelf.remote.store(true, Ordering::Relaxed);
            world.create(3, Settings::default()).unwrap();
            *world.shelf.patience.lock() = patience.map(Duration::from_secs);
            world.open().unwrap();
            world.write(0, 8, 1);
            for name in silent {
                let hangs = world.shelf.fault(name);
                hangs.inject(Fault::new(Action::Hang)).unwrap();
            }
            let taken = seconds(&mut world, |world| world.write(2 * REGION, 8, 2));
            assert!(
                (least..most).contains(&taken),
                "{silent:?} {patience:?}: {taken}"
            );
            for name in silent {
                assert!(matches!(
                    world.replica_state(name),
                    ReplicaState::Out { .. }
                ));
                world.shelf.fault(name).clear();
            }
            world.until_healthy();
        }
    }
}

/// A replica that answers stays in sync, although its node has no lease.
#[test]
fn a_replica_that_answers() {
    let mut world = remote();
    world.shelf.await_device("d1", false);
    world.open().unwrap();
    for at in 0..20 {
        world.write(at * 8, 8, 1);
        world.pass(Duration::from_millis(200));
    }
    assert_eq!(world.state(), VolumeState::Healthy);
}

/// A volume of remote disks, in a cluster with leases of 2 s, that has served one write.
fn patient(disks: usize, are_remote: bool) -> World {
    let mut world = World::empty(disks);
    world.shelf.remote.store(are_remote, Ordering::Relaxed);
    world.create(disks, Settings::default()).unwrap();
    *world.shelf.patience.lock() = Some(Duration::from_secs(2));
    world.open().unwrap();
    world.write(0, 8, 1);
    world
}

fn hang(world: &World, name: &str) {
    let hangs = world.shelf.fault(name);
    hangs.inject(Fault::new(Action::Hang)).unwrap();
}

/// The device answers again, also what hung.
fn resume(world: &World, name: &str) {
    let device = world.shelf.fault(name);
    device.clear();
    device.resume_pending();
}

/// Goal: the deadline decides about devices of the holder's own node, whatever the patience.
/// Method: a local device hangs.
#[test]
fn own_replicas() {
    let mut world = patient(2, false);
    hang(&world, "d1");
    let taken = seconds(&mut world, |world| world.write(2 * REGION, 8, 2));
    assert!((7.0..20.0).contains(&taken), "{taken}");
}

/// Goal: the patience takes no replica without which none answers. Method: all others are out, or
/// silent as well; the silence ends after 5 s, before the deadline.
#[test]
fn the_last_replica_that_answers() {
    for others_are_out in [true, false] {
        let mut world = patient(2, true);
        if others_are_out {
            world.shelf.take("d1");
            world.write(0, 8, 2);
            assert!(matches!(
                world.replica_state("d1"),
                ReplicaState::Out { .. }
            ));
        } else {
            hang(&world, "d1");
        }
        hang(&world, "d0");
        let write = world.begin_write(2 * REGION, 8, 3);
        world.pass(Duration::from_secs(5));
        assert_ne!(world.state(), VolumeState::Frozen);
        for name in ["d0", "d1"] {
            resume(&world, name);
        }
        let taken = seconds(&mut world, |world| {
            assert_eq!(world.wait(write).status, Status::Ok)
        });
        assert!(taken < 1.0, "{taken}");
        let state = world.replica_state("d0");
        assert_eq!(state, ReplicaState::InSync);
        let others = world.replica_state("d1");
        assert_eq!(others != ReplicaState::InSync, others_are_out);
    }
}

/// Goal: a replica that alternates between silence and answers stays out for longer, so that it
/// delays few writes. Method: silences of 3 s.
#[test]
fn a_replica_that_is_silent_in_turns() {
    let mut world = patient(2, true);
    let mut returns = Vec::new();
    for at in 0..6 {
        hang(&world, "d1");
        world.write(2 * REGION + at * 8, 8, 2);
        world.pass(Duration::from_secs(1));
        resume(&world, "d1");
        returns.push(seconds(&mut world, World::until_healthy));
    }
    assert!(returns[0] < 2.0, "{returns:?}");
    assert!(returns[5] > 12.0, "{returns:?}");
    world.pass(Duration::from_secs(601));
    hang(&world, "d1");
    world.write(4 * REGION, 8, 2);
    resume(&world, "d1");
    let forgotten = seconds(&mut world, World::until_healthy);
    assert!(forgotten < 2.0, "{forgotten}");
}
