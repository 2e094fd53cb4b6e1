//! Tests of volumes whose record comes from a backup.

use super::rig::World;
use crate::handle::{VolumeError, VolumeState};
use crate::model::{ReplicaState, Stamp, VolumeRecord};
use crate::store::suite::block_on;
use crate::store::{MemoryStore, VolumeStore};

/// Gives the world a new store with this record, as a restore writes it.
fn restore(world: &mut World, backup: &VolumeRecord) {
    let record = VolumeRecord {
        holder: None,
        restored: Some(backup.version()),
        ..backup.clone()
    };
    world.store = MemoryStore::new();
    block_on(world.store.create(record)).unwrap();
}

/// A volume of two replicas whose record in the backup has both in sync, and of which d1 missed a
/// write since.
fn overtaken() -> (World, VolumeRecord) {
    let mut world = World::with(2);
    world.write(0, 8, 1);
    let backup = world.record();
    world.shelf.take("d1");
    world.write(0, 8, 2);
    assert!(matches!(
        world.replica_state("d1"),
        ReplicaState::Out { .. }
    ));
    world.crash();
    (world, backup)
}

/// Goal: a replica that is in sync by an old record, and not by the labels, is never read. Method:
/// each replica alone is refused, however often it is tried; with both, the later label decides.
#[test]
fn an_old_record_is_brought_forward_by_all_labels() {
    let (mut world, backup) = overtaken();
    restore(&mut world, &backup);
    for (there, away) in [("d1", "d0"), ("d0", "d1")] {
        world.shelf.bring(there);
        world.shelf.take(away);
        for _ in 0..5 {
            let refused = world.open().unwrap_err();
            let of_away =
                matches!(&refused, VolumeError::Restored { device, .. } if device == away);
            assert!(of_away, "{refused}");
        }
    }
    world.shelf.bring("d1");
    world.open().unwrap();
    assert_eq!(world.read(0), 2);
    assert_eq!(world.record().restored, None);
    world.until_healthy();
    world.all_equal(&["d0", "d1"]);
    // The store goes on as any other.
    world.close();
    world.open().unwrap();
    assert_eq!(world.state(), VolumeState::Healthy);
    assert_eq!(world.read(0), 2);
}

/// Goal: a replica that the operator named lost is not waited for, and gets everything anew.
#[test]
fn a_lost_replica_is_not_waited_for() {
    let (mut world, mut backup) = overtaken();
    let lost = backup.replica_mut(1).unwrap();
    lost.state = ReplicaState::Filling {
        watermark: 0,
        last_label: Stamp::default(),
    };
    restore(&mut world, &backup);
    world.open().unwrap();
    assert_eq!(world.read(0), 2);
    world.shelf.bring("d1");
    world.until_healthy();
    world.all_equal(&["d0", "d1"]);
}

/// Goal: without a later label, the volume opens as it was closed, without a copy.
#[test]
fn a_present_record_stands() {
    let mut world = World::with(2);
    world.write(0, 8, 1);
    world.close();
    let backup = block_on(world.store.load(world.id)).unwrap();
    restore(&mut world, &backup);
    world.open().unwrap();
    assert_eq!(world.state(), VolumeState::Healthy);
    assert_eq!(world.read(0), 1);
    assert!(world.record().epoch > backup.epoch + 999);
}
