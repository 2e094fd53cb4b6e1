//! Tests of volumes whose record comes from a backup.

use nacre_bdev::Op;
use nacre_bdev::fault::{Action, Fault};

use super::rig::{BLOCK, DISK_BLOCKS, REGION, World};
use crate::handle::{Command, NewVolume, VolumeError, VolumeState};
use crate::model::{ReplicaState, Restored, Settings, Stamp, VolumeRecord};
use crate::store::suite::block_on;
use crate::store::{MemoryStore, VolumeStore};

/// Gives the world a new store with this record, as a restore writes it.
fn restore(world: &mut World, backup: &VolumeRecord) {
    restore_without(world, backup, &[]);
}

/// The same, with lost replicas.
fn restore_without(world: &mut World, backup: &VolumeRecord, lost: &[usize]) {
    let lost = lost.iter().map(|slot| backup.replica(*slot).unwrap().id);
    let restored = Restored {
        at: backup.version(),
        lost: lost.collect(),
    };
    let record = VolumeRecord {
        holder: None,
        restored: Some(restored),
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
    // Only empty, it is waited for: it may have been filled since.
    restore(&mut world, &backup);
    world.open().unwrap_err();
    restore_without(&mut world, &backup, &[1]);
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

/// Goal: a replica that was out at the time of the backup, and the only one in sync later, is the
/// one that is read.
#[test]
fn a_replica_that_was_out_at_the_backup() {
    let mut world = World::with(2);
    world.write(0, 8, 1);
    world.shelf.take("d1");
    world.write(0, 8, 2);
    let backup = world.record();
    world.shelf.bring("d1");
    world.until_healthy();
    world.shelf.take("d0");
    world.write(0, 8, 3);
    world.crash();
    world.shelf.bring("d0");
    restore(&mut world, &backup);
    world.open().unwrap();
    assert_eq!(world.read(0), 3);
    world.until_healthy();
    world.all_equal(&["d0", "d1"]);
}

/// Goal: an operator who gives up the last replica serves from another one, also where its label is
/// of a later epoch than the backup.
#[test]
fn a_restored_volume_is_thawed() {
    let (mut world, backup) = overtaken();
    for _ in 0..3 {
        world.open().unwrap();
        world.write(8, 8, 4);
        world.crash();
    }
    let label_epoch = world.record().epoch;
    restore(&mut world, &backup);
    world.open().unwrap_err();
    assert!(backup.epoch < label_epoch);
    world.force_in_sync("d0", "vol").unwrap();
    let record = block_on(world.store.load(world.id)).unwrap();
    assert!(record.restored.is_none() && record.epoch > label_epoch);
    world.open().unwrap();
    assert_eq!(world.read(0), 2);
    assert_eq!(world.read(8), 4);
    world.shelf.bring("d1");
    world.until_healthy();
    world.all_equal(&["d0", "d1"]);
}

/// Goal: a volume that grew beyond the tables of its size at the backup is opened, with all of it.
#[test]
fn a_volume_that_grew_much() {
    let blocks = |regions: u64| regions * REGION;
    let mut world = World::empty(0);
    world.add_disk("d0", blocks(1200) + DISK_BLOCKS);
    let small = NewVolume {
        name: "vol".into(),
        id: None,
        bytes: Some(blocks(8) * u64::from(BLOCK)),
        devices: vec!["d0".into()],
        settings: Settings::default(),
        force: false,
        copied_from: None,
    };
    world.create_new(small).unwrap();
    world.open().unwrap();
    world.write(0, 8, 1);
    let backup = world.record();
    for regions in [1000, 1100] {
        world
            .run(Command::Grow {
                blocks: blocks(regions),
            })
            .unwrap();
        world.close();
        world.open().unwrap();
    }
    world.write(blocks(1100) - 8, 8, 2);
    world.crash();
    restore(&mut world, &backup);
    world.open().unwrap();
    assert_eq!(world.record().blocks, blocks(1100));
    assert_eq!(world.read(blocks(1100) - 8), 2);
    world.close();

    // A host that knows a larger size than the backup keeps it.
    let before = block_on(world.store.load(world.id)).unwrap();
    let prepared = world.prepare(&before);
    restore(&mut world, &backup);
    world.open_prepared(&prepared).unwrap();
    assert_eq!(world.record().blocks, blocks(1100));
}

/// Goal: a restored volume serves from no replica whose label has not got its epoch. Method: the
/// labels of one replica cannot be written, then those of both.
#[test]
fn labels_that_cannot_be_written() {
    for failing in [&["d1"][..], &["d0", "d1"]] {
        let mut world = World::with(2);
        world.write(0, 8, 1);
        let backup = world.record();
        world.crash();
        restore(&mut world, &backup);
        for disk in failing {
            let fails = Fault::new(Action::FailMedium).on(&[Op::Write]);
            world.shelf.fault(disk).inject(fails).unwrap();
        }
        let opened = world.open();
        if failing.len() == 2 {
            let refused = opened.unwrap_err();
            assert!(
                matches!(refused, VolumeError::NothingInSync { .. }),
                "{refused}"
            );
            continue;
        }
        opened.unwrap();
        assert_ne!(world.replica_state("d1"), ReplicaState::InSync);
        assert_eq!(world.read(0), 1);
    }
}
