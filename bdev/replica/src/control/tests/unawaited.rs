//! Tests of replicas whose devices are known not to answer, because the lease of their node is
//! over.

use std::sync::atomic::Ordering;
use std::time::Duration;

use nacre_bdev::fault::{Action, Fault};

use super::rig::{REGION, World};
use crate::handle::VolumeState;
use crate::model::{ReplicaState, Settings};

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

/// An absent replica delays the opening only if it is awaited.
#[test]
fn opening() {
    for (awaited, least, most) in [(true, 5.0, 6.0), (false, 0.0, 0.5)] {
        let mut world = remote();
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
