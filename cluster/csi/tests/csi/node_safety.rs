//! `csi.v1.Node` where a wrong step would lose data: devices in use, copies of a volume, formats
//! that did not end, and access for reading.

use std::fs;
use std::path::Path;
use std::sync::{Arc, mpsc};
use std::time::Instant;

use nacre_cluster_csi::messages::node::{NodePublishVolumeRequest, NodeUnpublishVolumeRequest};
use nacre_cluster_csi::messages::{Mode, Nothing};
use nacre_cluster_csi::node::{Host, Reconnector};
use parking_lot::Mutex;
use tonic::Code;

use crate::client::{block, mount};
use crate::machine::Claims;
use crate::node::{PUBLISH, STAGE, UNPUBLISH, UNSTAGE, VOLUME, World, of_type, writer};

/// NodeUnstageVolume: a device in use, or with data that is not written, stays connected, for a
/// block volume and for a file system.
#[test]
fn a_used_device_stays_connected() {
    for capability in [block(Mode::SingleNodeWriter), writer()] {
        let world = World::new();
        world.stage(capability);
        world.machine.set_claims(Claims::Busy);
        let why = world.refused(UNSTAGE, world.unstaged(), Code::FailedPrecondition);
        assert!(why.contains("in use"), "{why}");
        let (answer, silence) = mpsc::channel();
        let silence = Arc::new(Mutex::new(silence));
        world.machine.set_claims(Claims::Silent(silence));
        for _ in 0..2 {
            world.refused(UNSTAGE, world.unstaged(), Code::DeadlineExceeded);
        }
        assert_eq!(world.machine.controllers().len(), 2);
        world.machine.set_claims(Claims::Free);
        drop(answer);
        let end = Instant::now() + std::time::Duration::from_secs(20);
        while world.call::<_, Nothing>(UNSTAGE, world.unstaged()).is_err() {
            assert!(Instant::now() < end, "the device answers");
        }
        assert!(world.machine.controllers().is_empty());
    }
}

/// NodeStageVolume: a mount at the staging path whose device lives is not detached. File systems
/// without a block device (tmpfs, btrfs) live, too.
#[test]
fn a_live_mount_is_not_replaced() {
    for number in ["8:1", "0:45"] {
        let world = World::new();
        world
            .machine
            .mount_other(number, Path::new(&world.staging()));
        world.refused(STAGE, world.staged(writer()), Code::FailedPrecondition);
        assert_eq!(world.machine.mount_count(), 1);
        assert_eq!(world.machine.runs("umount"), 0);
        assert_eq!(world.machine.runs("mkfs"), 0);
    }
}

/// Goal: NodeUnstageVolume and NodeUnpublishVolume end mounts of the volume only. Method: a mount
/// of another device covers the staging path, or the target, of both access types.
#[test]
fn a_foreign_mount_is_not_ended() {
    for number in ["8:1", "0:45"] {
        for capability in [writer(), block(Mode::SingleNodeWriter)] {
            let world = World::new();
            world.stage(capability.clone());
            world.publish(capability);
            let end = |path: &str| world.machine.run("umount", &[path]).expect("it ran");
            let is_named = |why: &str, path: &str| why.contains(path) && why.contains(number);

            let target = world.target();
            world.machine.mount_other(number, Path::new(&target));
            let count = world.machine.mount_count();
            let asked = || NodeUnpublishVolumeRequest {
                volume_id: VOLUME.to_string(),
                target_path: world.target(),
            };
            let why = world.refused(UNPUBLISH, asked(), Code::FailedPrecondition);
            assert!(is_named(&why, &target), "{why}");
            assert_eq!(world.machine.runs("umount"), 0);
            assert_eq!(world.machine.mount_count(), count);
            assert!(end(&target).is_success());
            world.unpublish();

            let staging = world.staging();
            world.machine.mount_other(number, Path::new(&staging));
            let (runs, count) = (world.machine.runs("umount"), world.machine.mount_count());
            let why = world.refused(UNSTAGE, world.unstaged(), Code::FailedPrecondition);
            assert!(is_named(&why, &staging), "{why}");
            assert_eq!(world.machine.runs("umount"), runs);
            assert_eq!(world.machine.mount_count(), count);
            assert_eq!(world.machine.controllers().len(), 2);
            assert!(end(&staging).is_success());
            world.unstage();
            assert_eq!(world.machine.mount_count(), 0);
            assert!(world.machine.controllers().is_empty());
        }
    }
}

/// Goal: mounts of a volume end also after its device has gone. Method: the kernel gives up all
/// paths of a published volume.
#[test]
fn dead_mounts_of_a_volume_end() {
    for capability in [writer(), block(Mode::SingleNodeWriter)] {
        let world = World::new();
        world.stage(capability.clone());
        world.publish(capability);
        world.machine.lose_all_paths();
        world.unpublish();
        world.unstage();
        assert_eq!(world.machine.mount_count(), 0);
    }
}

/// A second device with the volume's UUID: no call guesses which one is the volume.
#[test]
fn a_copy_of_the_volume_is_not_taken_for_it() {
    for nqn in ["nqn.2025-01.io.nacre:v", "nqn.2025-01.io.example:copy"] {
        let world = World::new();
        world.machine.add_copy("nvme7n1", nqn);
        world.refused(STAGE, world.staged(writer()), Code::FailedPrecondition);
        world.machine.remove_device("nvme7n1");
        world.stage(writer());
        world.machine.add_copy("nvme7n1", nqn);
        world.refused(PUBLISH, world.published(writer()), Code::FailedPrecondition);
        world.refused(STAGE, world.staged(writer()), Code::FailedPrecondition);
        assert_eq!(world.machine.mount_count(), 1);
        world.machine.remove_device("nvme7n1");
        world.unstage();
    }
    // The only device is of another subsystem, or of other addresses.
    let world = World::new();
    world.stage(writer());
    let nqn = "device/subsysnqn";
    world.machine.set_block(nqn, "nqn.2025-01.io.example:copy");
    world.refused(PUBLISH, world.published(writer()), Code::FailedPrecondition);
    world.refused(UNSTAGE, world.unstaged(), Code::FailedPrecondition);
    assert_eq!(world.machine.controllers().len(), 2);
    world.machine.set_block(nqn, crate::machine::NQN);
    world.stage(writer());
    world.machine.set_addresses("192.0.2.9");
    world.refused(UNSTAGE, world.unstaged(), Code::FailedPrecondition);
    assert_eq!(world.machine.controllers().len(), 2);
    world.machine.set_addresses("192.0.2.1");
    world.unstage();
    assert!(world.machine.controllers().is_empty());
}

/// A volume whose addresses changed since it was staged keeps its paths, and is unstaged by them.
#[test]
fn addresses_of_earlier_requests_count() {
    let world = World::new();
    world.stage(writer());
    let mut moved = world.staged(writer());
    let new = "tcp://192.0.2.3:4420".to_owned();
    moved.publish_context.insert("addresses".to_owned(), new);
    world.machine.set_down("192.0.2.3", true);
    let _: Nothing = world.call(STAGE, moved).expect("it has paths");
    assert_eq!(world.machine.controllers().len(), 2);
    world.unstage();
    assert!(world.machine.controllers().is_empty());
}

/// A record ends with the start of the machine: the reconnector connects nothing of an earlier one.
/// The mark of a format does not count, because another node may have used the volume.
#[test]
fn a_record_ends_with_the_machine() {
    let mut world = World::new();
    world.stage(writer());
    world.machine.reboot();
    world.restart();
    let mut reconnector = Reconnector::default();
    assert_eq!(reconnector.connect_missing(&world.node, Instant::now()), 0);
    assert!(world.machine.controllers().is_empty());
    let records = fs::read_dir(world.machine.path("state")).expect("a directory");
    assert_eq!(records.count(), 0);
    world.stage(writer());
    world.unstage();

    let mut world = World::new();
    world.machine.break_program(Some("mkfs.ext4"));
    world.refused(STAGE, world.staged(writer()), Code::DeadlineExceeded);
    world.machine.break_program(None);
    world.machine.reboot();
    world.restart();
    world.refused(STAGE, world.staged(writer()), Code::FailedPrecondition);
    assert_eq!(world.machine.runs("mkfs"), 1);
}

/// NodeStageVolume: an XFS whose making did not end has a signature. It is made again by the mark
/// of this node only. No format discards the device.
#[test]
fn a_half_made_xfs_is_made_again_by_its_mark() {
    for has_mark in [true, false] {
        let mut world = World::new();
        world.machine.break_program(Some("mkfs.xfs"));
        let asked = || world.staged(of_type("xfs", &[]));
        world.refused(STAGE, asked(), Code::DeadlineExceeded);
        world.machine.break_program(None);
        if !has_mark {
            fs::remove_dir_all(world.machine.path("state")).expect("its records are lost");
        }
        world.restart();
        if has_mark {
            world.stage(of_type("xfs", &[]));
            assert_eq!(world.machine.runs("mkfs.xfs"), 2);
            assert!(world.machine.has_run("mkfs.xfs -q -f -K "));
            continue;
        }
        let asked = world.staged(of_type("xfs", &[]));
        let why = world.refused(STAGE, asked, Code::FailedPrecondition);
        assert!(why.contains("did not end"), "{why}");
        assert_eq!(world.machine.runs("mkfs.xfs"), 1);
    }
    let world = World::new();
    world.stage(writer());
    assert!(world.machine.has_run("-E nodiscard"));
}

/// Access modes for reading: the mount, or the whole block device, refuses writes. ALREADY_EXISTS
/// for a stage in the other way, FAILED_PRECONDITION for a publication that would write.
#[test]
fn a_reader_cannot_write() {
    let reader = || mount(Mode::SingleNodeReaderOnly);
    let world = World::new();
    world.stage(writer());
    world.refused(STAGE, world.staged(reader()), Code::AlreadyExists);
    world.unstage();
    for _ in 0..2 {
        world.stage(reader());
    }
    let options = world.machine.options_at(Path::new(&world.staging()));
    assert_eq!(options.as_deref(), Some("ro"));
    world.refused(STAGE, world.staged(writer()), Code::AlreadyExists);
    world.refused(PUBLISH, world.published(writer()), Code::FailedPrecondition);
    for _ in 0..2 {
        world.publish(reader());
    }
    // The same by a mount flag.
    world.unpublish();
    world.unstage();
    let reader = || of_type("ext4", &["ro"]);
    for _ in 0..2 {
        world.stage(reader());
        world.publish(reader());
    }

    let reader = || block(Mode::MultiNodeReaderOnly);
    let world = World::new();
    world.machine.break_program(Some("blockdev"));
    world.refused(STAGE, world.staged(reader()), Code::Internal);
    world.machine.break_program(None);
    for _ in 0..2 {
        world.stage(reader());
    }
    assert_eq!(world.machine.runs("blockdev --setro"), 2);
    world.refused(
        STAGE,
        world.staged(block(Mode::SingleNodeWriter)),
        Code::AlreadyExists,
    );
    let write = world.published(block(Mode::MultiNodeMultiWriter));
    world.refused(PUBLISH, write, Code::FailedPrecondition);
    for is_read_only in [false, true] {
        let asked = NodePublishVolumeRequest {
            readonly: is_read_only,
            ..world.published(reader())
        };
        let _: Nothing = world.call(PUBLISH, asked).expect("for reading");
    }
}

/// NodePublishVolume: the driver dies between the mount and the remount for reading. The same call
/// again finishes it. A target that was published for writing stays as it is: ALREADY_EXISTS.
#[test]
fn half_a_publication_for_reading_is_finished() {
    let mut world = World::new();
    world.stage(writer());
    let reading = |world: &World| NodePublishVolumeRequest {
        readonly: true,
        ..world.published(writer())
    };
    let target = world.target();
    let target = Path::new(&target);
    world.machine.break_program(Some("die at the remount"));
    world.refused(PUBLISH, reading(&world), Code::Internal);
    world.machine.break_program(None);
    assert_eq!(world.machine.options_at(target).as_deref(), Some("rw"));
    world.restart();
    // kubelet repeats both calls after a restart.
    world.stage(writer());
    for _ in 0..2 {
        let _: Nothing = world
            .call(PUBLISH, reading(&world))
            .expect("it is finished");
        assert_eq!(world.machine.options_at(target).as_deref(), Some("ro"));
        assert_eq!(world.machine.mount_count(), 2);
    }
    assert_eq!(world.machine.runs("mount --bind"), 1);
    world.refused(PUBLISH, world.published(writer()), Code::AlreadyExists);
    world.unpublish();
    world.publish(writer());
    world.refused(PUBLISH, reading(&world), Code::AlreadyExists);
    assert_eq!(world.machine.options_at(target).as_deref(), Some("rw"));
    // The mount of another device at that path is none of the volume.
    world.unpublish();
    world.machine.break_program(Some("die at the remount"));
    world.refused(PUBLISH, reading(&world), Code::Internal);
    world.machine.break_program(None);
    world.machine.mount_other("0:45", target);
    world.refused(PUBLISH, reading(&world), Code::AlreadyExists);
}

/// NodePublishVolume: a mount that stays writable does not stand in for a read-only one.
#[test]
fn a_mount_that_stays_writable_is_undone() {
    let world = World::new();
    world.stage(writer());
    world.machine.break_program(Some("remount"));
    let asked = NodePublishVolumeRequest {
        readonly: true,
        ..world.published(writer())
    };
    world.refused(PUBLISH, asked, Code::Internal);
    assert_eq!(world.machine.mount_count(), 1);
    assert!(!Path::new(&world.target()).exists());
}

/// Readiness: the kernel's module. A restart of the driver, which a failed probe causes, would not
/// bring it back.
#[test]
fn a_node_stays_ready() {
    let mut world = World::new();
    assert!(world.node.is_ready());
    let fabrics = world.machine.path("dev/nvme-fabrics");
    fs::remove_file(&fabrics).expect("removed");
    assert!(world.node.is_ready());
    world.restart();
    assert!(!world.node.is_ready());
    fs::write(&fabrics, "").expect("made");
    assert!(world.node.is_ready());
}
