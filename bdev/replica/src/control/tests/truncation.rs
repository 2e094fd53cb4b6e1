//! Tests of replicas whose devices are truncated: they are not trusted afterwards, even if enlarged
//! again.

use std::sync::Arc;
use std::time::Duration;

use nacre_bdev::{Size, Status};

use super::rig::{DISK_BLOCKS, REGION, World};
use crate::handle::{Command, VolumeError, VolumeEventKind, VolumeState};
use crate::model::ReplicaState;

/// A block in the truncated part, and one in the remaining part.
const LOST: u64 = 6 * REGION + 3;
const KEPT: u64 = REGION + 3;
/// Blocks of a truncated disk: the reserved area and four regions.
const LEFT: u64 = 5 * 2048;

const EMPTY: fn(ReplicaState) -> bool =
    |state| matches!(state, ReplicaState::Filling { watermark: 0, .. });

fn world(disks: usize) -> World {
    let mut world = World::cuttable(disks);
    world.write(LOST, 2, 7);
    world.write(KEPT, 2, 8);
    world.until(|world| world.status().dirty_regions == 0);
    world
}

fn changed(world: &mut World, device: &str) {
    let device = device.into();
    world.run(Command::DevicesChanged { device }).unwrap();
}

/// Every written block reads correctly, whichever replica serves the read.
fn all_is_there(world: &mut World) {
    for _ in 0..8 {
        assert_eq!((world.read(LOST), world.read(KEPT)), (7, 8));
    }
}

/// When the resize event returns, the volume has recorded the cut; it is not healthy at any moment
/// in between. Once the device is large enough again, the replica is filled completely.
#[test]
fn truncated_by_command() {
    let mut world = world(2);
    world.cut("d1", LEFT);
    assert_ne!(
        world.fresh_state(),
        VolumeState::Healthy,
        "recorded before the event returns"
    );
    changed(&mut world, "d1");
    assert!(
        EMPTY(world.replica_state("d1")),
        "{:?}",
        world.replica_state("d1")
    );
    all_is_there(&mut world);
    world.pass(Duration::from_secs(30));
    assert_eq!(world.state(), VolumeState::Degraded);
    let why = world.why("d1");
    assert!(why.contains("5242880 bytes"), "{why}");
    world.enlarge("d1");
    changed(&mut world, "d1");
    world.until_healthy();
    all_is_there(&mut world);
    world.all_equal(&["d0", "d1"]);
}

/// The device was small for a moment only, and no event was sent.
#[test]
fn truncated_and_enlarged() {
    for notified in [true, false] {
        let mut world = world(2);
        world.cut("d1", LEFT);
        world.enlarge("d1");
        if notified {
            changed(&mut world, "d1")
        } else {
            let token = world.begin_write(KEPT + 8, 1, 9);
            while !world.ended.contains_key(&token) {
                world.step();
            }
            assert_eq!(world.ended(token).unwrap().status, Status::Ok);
        }
        assert!(
            EMPTY(world.replica_state("d1")),
            "{:?}",
            world.replica_state("d1")
        );
        world.until_healthy();
        all_is_there(&mut world);
        world.all_equal(&["d0", "d1"]);
    }
}

/// The cut is recorded durably: the next opening does not trust the replica either, although its
/// device has the original size again.
#[test]
fn truncation_survives_a_restart() {
    for clean in [true, false] {
        let mut world = world(2);
        world.cut("d1", LEFT);
        if clean {
            world.close()
        } else {
            changed(&mut world, "d1");
            world.crash();
        }
        world.enlarge("d1");
        world.reopen("d1");
        world.open().unwrap();
        world.until_healthy();
        all_is_there(&mut world);
        world.all_equal(&["d0", "d1"]);
    }
}

/// The operator thaws the volume through another machine. The first machine recorded its own count,
/// so it accepts the record from then on. Another cut counts again.
#[test]
fn thawed_through_another_machine() {
    let mut world = world(1);
    world.crash();
    world.cut("d0", LEFT);
    world.enlarge("d0");
    for _ in 0..2 {
        let error = world.open().unwrap_err();
        assert!(
            matches!(&error, VolumeError::NothingInSync { why, .. } if why.contains("5242880 bytes")),
            "{error}"
        );
    }
    let second = Arc::new(Size::new(DISK_BLOCKS));
    let first = world.disk("d0").seen_with(second);
    world.force_in_sync("d0", "vol").unwrap();
    world.open().unwrap();
    assert_eq!(world.state(), VolumeState::Healthy);
    world.close();
    let _ = world.disk("d0").seen_with(first);
    world.open().unwrap();
    assert_eq!(world.state(), VolumeState::Healthy);
    assert_eq!((world.read(LOST), world.read(KEPT)), (0, 8));
    world.close();
    world.cut("d0", LEFT);
    world.enlarge("d0");
    let error = world.open().unwrap_err();
    assert!(
        matches!(error, VolumeError::NothingInSync { .. }),
        "{error}"
    );
}

/// The device is small at one opening, and large again at the next.
#[test]
fn truncated_while_closed() {
    for in_sync in [true, false] {
        let mut world = world(2);
        if !in_sync {
            world.shelf.take("d1");
            world.write(KEPT + 8, 1, 9);
            assert!(matches!(
                world.replica_state("d1"),
                ReplicaState::Out { .. }
            ));
            world.shelf.bring("d1");
        }
        world.crash();
        world.cut("d1", LEFT);
        world.reopen("d1");
        world.open().unwrap();
        world.until(|world| EMPTY(world.replica_state("d1")));
        assert_eq!(world.state(), VolumeState::Degraded);
        world.close();
        world.enlarge("d1");
        world.reopen("d1");
        world.open().unwrap();
        world.until_healthy();
        all_is_there(&mut world);
        world.all_equal(&["d0", "d1"]);
    }
}

/// The last in-sync replica is neither marked bad nor used when it was cut. The volume is frozen,
/// also after a restart, until an operator continues from the remaining data.
#[test]
fn the_last_replica_is_truncated() {
    for small in [true, false] {
        let mut world = world(2);
        world.shelf.take("d0");
        world.write(KEPT, 2, 8);
        assert_eq!(world.state(), VolumeState::Degraded);
        world.cut("d1", LEFT);
        changed(&mut world, "d1");
        assert_eq!(world.state(), VolumeState::Frozen);
        assert_eq!(world.replica_state("d1"), ReplicaState::InSync);
        assert!(world.has_event(|e| matches!(e, VolumeEventKind::Frozen { .. })));
        if !small {
            world.enlarge("d1");
        }
        world.pass(Duration::from_secs(20));
        assert_eq!(
            world.state(),
            VolumeState::Frozen,
            "the volume stays frozen without a command"
        );
        world.crash();
        world.reopen("d1");
        let refused = world.open().unwrap_err();
        assert!(
            matches!(refused, VolumeError::NothingInSync { .. }),
            "{refused}"
        );
        assert!(
            refused.to_string().contains("may have lost data"),
            "{refused}"
        );
        if small {
            let refused = world.force_in_sync("d1", "vol").unwrap_err();
            assert!(matches!(refused, VolumeError::TooSmall { .. }), "{refused}");
            world.enlarge("d1");
            world.reopen("d1");
            assert!(world.open().is_err(), "the store has the cut");
        }
        world.force_in_sync("d1", "vol").unwrap();
        world.open().unwrap();
        assert_eq!(
            (world.read(LOST), world.read(KEPT)),
            (0, 8),
            "the remaining data"
        );
        world.shelf.bring("d0");
        world.until_healthy();
        world.all_equal(&["d0", "d1"]);
    }
}

/// The same for an open volume.
#[test]
fn continues_on_the_truncated_last_replica() {
    let mut world = world(1);
    world.cut("d0", LEFT);
    changed(&mut world, "d0");
    assert_eq!(world.state(), VolumeState::Frozen);
    let waits = world.begin_write(KEPT, 1, 9);
    world.pass(Duration::from_secs(5));
    assert!(world.ended(waits).is_none());
    let thaw = |replica: Option<&str>| Command::Thaw {
        replica: replica.map(Into::into),
        force: Some("vol".into()),
    };
    let refused = world.run(thaw(None)).unwrap_err();
    assert!(refused.to_string().contains("--replica d0"), "{refused}");
    let refused = world.run(thaw(Some("d0"))).unwrap_err();
    assert!(matches!(refused, VolumeError::TooSmall { .. }), "{refused}");
    world.enlarge("d0");
    world.run(thaw(Some("d0"))).unwrap();
    world.until_healthy();
    assert_eq!(world.wait(waits).status, Status::Ok);
    assert_eq!((world.read(LOST), world.read(KEPT)), (0, 9));
}

/// A volume whose replicas are all in sync but not yet reconciled reports that reason.
#[test]
fn reconciling_reports_its_reason() {
    let mut world = World::with(2);
    world.write(KEPT, 2, 8);
    world.crash();
    world.open().unwrap();
    let status = world.status();
    assert_eq!(status.state, VolumeState::Degraded);
    let why = status.why.unwrap();
    assert!(why.contains("reconciling: 1048576 bytes"), "{why}");
    assert!(!why.contains("of 2 replicas"), "{why}");
    world.until_healthy();
    assert_eq!(world.status().why, None);
}

/// A cut replica never remains as the last one, whichever replica leaves first.
#[test]
fn a_truncated_replica_never_remains_last() {
    let mut world = world(3);
    for name in ["d0", "d2"] {
        world.cut(name, LEFT);
        world.enlarge(name);
    }
    changed(&mut world, "d2");
    assert_eq!(world.replica_state("d1"), ReplicaState::InSync);
    world.until_healthy();
    all_is_there(&mut world);
    world.all_equal(&["d0", "d1", "d2"]);
}

/// A small device of another volume, or of none, is not treated as a cut replica.
#[test]
fn a_small_device_of_another_volume() {
    let mut world = world(1);
    world.close();
    let kept = world.reserved("d0");
    world.wipe("d0");
    world.cut("d0", LEFT);
    world.reopen("d0");
    assert!(world.open().is_err());
    assert!(!world.record().replicas[0].cut);
    world.enlarge("d0");
    world.reopen("d0");
    world.put_back("d0", &kept);
    world.open().unwrap();
}

/// A disk with another block size is not accepted as the replica, and is not written.
#[test]
fn a_device_with_another_block_size() {
    let mut world = World::with(2);
    world.write(KEPT, 2, 8);
    world.close();
    world.shelf.exchange("d1", 4096, DISK_BLOCKS / 8);
    world.open().unwrap();
    world.pass(Duration::from_secs(2));
    assert_ne!(world.replica_state("d1"), ReplicaState::InSync);
    let why = world.why("d1");
    assert!(why.contains("it has blocks of 4096 bytes"), "{why}");
    world.write(KEPT, 2, 9);
    assert_eq!(world.read(KEPT), 9);
}

/// A device that loses only blocks beyond the volume's end needs no resync.
#[test]
fn truncation_past_the_volume_end() {
    let mut world = World::cuttable_with(2, Some(4 << 20));
    world.write(KEPT, 2, 8);
    world.until(|world| world.status().dirty_regions == 0);
    world.cut("d1", LEFT);
    changed(&mut world, "d1");
    world.pass(Duration::from_secs(2));
    world.until_healthy();
    let all = world.recorded.all();
    let full = |e: &VolumeEventKind| {
        matches!(
            e,
            VolumeEventKind::ResyncStarted {
                kind: crate::handle::ResyncKind::Full,
                ..
            }
        )
    };
    assert!(!all.iter().any(full), "{all:?}");
    // The volume cannot grow into the lost part until the device has it again.
    let grow = |blocks| Command::Grow { blocks };
    let refused = world.run(grow(6 * 2048)).unwrap_err();
    assert!(
        matches!(refused, VolumeError::Invalid { what: "blocks", .. }),
        "{refused}"
    );
    world.enlarge("d1");
    world.run(grow(DISK_BLOCKS - 2048)).unwrap();
    world.until_healthy();
    world.all_equal(&["d0", "d1"]);
}
