//! Tests with several namespaces, which are added, changed and removed while the drive is in use.

use std::sync::Arc;
use std::time::Duration;

use nacre_bdev::{Bdev, Op, Status, Support};
use nacre_bdev_nvme::{DriveOptions, Event};
use nacre_bdev_nvme_sim::{Action, CacheSurvival, Config, Format, NamespaceConfig, Rule, Target};
use nacre_nvmf_wire::identify::controller::Oncs;
use uuid::Uuid;

use super::rig::Rig;

/// Longer than the handling of an event takes.
const A_WHILE: Duration = Duration::from_secs(3);

fn three() -> Config {
    let mut second = NamespaceConfig::new(2, 4096, 512);
    second.uuid = Some(Uuid::from_u128(0xfeed));
    let mut ninth = NamespaceConfig::new(9, 512, 2048);
    ninth.nguid = [0; 16];
    Config {
        namespaces: vec![NamespaceConfig::new(1, 512, 1024), second, ninth],
        ..Config::default()
    }
}

/// Goal: each namespace is a separate bdev, with its own size, identity and contents, on one queue
/// pair.
#[test]
fn several_namespaces() {
    let mut rig = Rig::new(three());
    let controller = rig.attach();
    let bdevs = controller.namespaces();
    let names: Vec<&str> = bdevs.iter().map(|bdev| bdev.name()).collect();
    assert_eq!(names, ["nvme0n1", "nvme0n2", "nvme0n9"]);
    let sizes: Vec<(u32, u64)> = bdevs
        .iter()
        .map(|bdev| (bdev.geometry().block_size, bdev.geometry().blocks))
        .collect();
    assert_eq!(sizes, [(512, 1024), (4096, 512), (512, 2048)]);
    let mut uuids: Vec<Uuid> = bdevs.iter().map(|bdev| bdev.uuid()).collect();
    assert_eq!(uuids[1], Uuid::from_u128(0xfeed));
    uuids.dedup();
    assert_eq!(uuids.len(), 3);
    let mut queues: Vec<_> = bdevs.iter().map(|bdev| rig.open(bdev)).collect();
    for (queue, value) in queues.iter_mut().zip(1..) {
        let size = queue_block(&bdevs[value as usize - 1]);
        let buf = rig.buf(size, value);
        let io = rig.io(Op::Write, 7, 1).with(buf);
        assert_eq!(rig.status(&mut **queue, io), Status::Ok);
    }
    let stored = [(1, 1), (2, 2), (9, 3)].map(|(nsid, value)| {
        let stored = rig.drive.stored(nsid, 7, 1).unwrap();
        stored.iter().all(|byte| *byte == value)
    });
    assert_eq!(stored, [true; 3]);
    assert_eq!(rig.drive.io_queues(), 1, "one core, one queue pair");
    // Polling one namespace also finds completions of another.
    let tokens: Vec<_> = (0..3)
        .map(|at| {
            let size = queue_block(&bdevs[at]);
            let buf = rig.buf(size, 0);
            let io = rig.io(Op::Read, 7, 1).with(buf);
            rig.submit(&mut *queues[at], io)
        })
        .collect();
    rig.pass(&mut *queues[0], Duration::from_millis(10));
    assert_eq!(rig.ended.len(), 1);
    for (queue, token) in queues.iter_mut().zip(tokens) {
        assert_eq!(rig.wait(&mut **queue, token).status, Status::Ok);
    }
    queues.truncate(1);
    let last = queues.pop().expect("one is left");
    rig.end(&controller, last);
}

fn queue_block(bdev: &nacre_bdev_nvme::NvmeBdev) -> usize {
    bdev.geometry().block_size as usize
}

/// Goal: unusable namespaces are listed with their reason, and do not affect the others.
#[test]
fn namespaces_that_cannot_be_used() {
    let mut config = three();
    let formatted = |nsid, block_size, metadata, protection| {
        let mut namespace = NamespaceConfig::new(nsid, 512, 64);
        namespace.formats = vec![Format {
            block_size,
            metadata,
        }];
        namespace.protection = protection;
        namespace
    };
    config.namespaces.extend([
        formatted(20, 512, 16, 0),
        formatted(21, 256, 0, 0),
        formatted(22, 128 << 10, 0, 0),
        formatted(23, 512, 8, 1),
    ]);
    let mut rig = Rig::new(config);
    let controller = rig.attach();
    let nsids: Vec<u32> = controller.namespaces().iter().map(|ns| ns.nsid()).collect();
    assert_eq!(nsids, [1, 2, 9, 23]);
    let unusable = controller.info().unusable;
    let listed: Vec<u32> = unusable.iter().map(|unusable| unusable.nsid).collect();
    assert_eq!(listed, [20, 21, 22]);
    assert!(unusable.iter().all(|unusable| !unusable.reason.is_empty()));
    // Protection information that the controller inserts and strips.
    let protected = controller.namespaces().pop().expect("the last one");
    let mut queue = rig.open(&protected);
    let write = rig.write(3, 1, 5);
    assert_eq!(rig.status(&mut *queue, write), Status::Ok);
    assert_eq!(rig.values(&mut *queue, 3, 2), [5, 0]);
    rig.end(&controller, queue);
}

/// Goal: a new namespace is reported and usable; a removed one completes each I/O with Gone, once;
/// one that grows or shrinks reports it. Method: events of the drive while I/O is in flight.
#[test]
fn namespaces_are_added_removed_and_resized() {
    let mut rig = Rig::new(three());
    let (controller, first, mut queue) = rig.one(DriveOptions::new("nvme0"));
    rig.events.take();
    rig.drive.add_namespace(NamespaceConfig::new(3, 512, 256));
    rig.pass(&mut *queue, A_WHILE);
    let added = rig.events.take().into_iter().find_map(|event| match event {
        Event::NamespaceAdded(added) => Some(added),
        _ => None,
    });
    let added = added.expect("an event for the added namespace");
    assert_eq!((added.nsid(), added.geometry().blocks), (3, 256));
    assert_eq!(controller.namespaces().len(), 4);
    let mut third = rig.open(&added);
    let write = rig.write(0, 1, 9);
    assert_eq!(rig.status(&mut *third, write), Status::Ok);

    rig.drive.resize_namespace(3, 512);
    rig.pass(&mut *queue, A_WHILE);
    assert_eq!(added.geometry().blocks, 512);
    let resized = |event: &Event| matches!(event, Event::NamespaceResized(ns) if ns.nsid() == 3);
    assert!(rig.events.take().iter().any(resized));
    let write = rig.write(500, 1, 4);
    assert_eq!(rig.status(&mut *third, write), Status::Ok);
    rig.drive.resize_namespace(3, 128);
    // The drive has removed the namespace, and the driver does not know yet.
    let write = rig.write(500, 1, 4);
    assert_eq!(rig.status(&mut *third, write), Status::OutOfRange);
    rig.pass(&mut *queue, A_WHILE);
    assert_eq!(added.geometry().blocks, 128);

    rig.drive.remove_namespace(3);
    let read = rig.read(0, 1);
    let token = rig.submit(&mut *third, read);
    let status = rig.wait(&mut *third, token).status;
    assert!(!status.is_ok(), "{status:?}");
    rig.pass(&mut *queue, A_WHILE);
    let removed = |event: &Event| matches!(event, Event::NamespaceRemoved(ns) if ns.nsid() == 3);
    assert!(rig.events.take().iter().any(removed));
    let read = rig.read(0, 1);
    assert_eq!(rig.status(&mut *third, read), Status::Gone);
    assert!(added.clone().open(&rig.memory.pool).is_err());
    // The others are unaffected.
    let write = rig.write(1, 1, 1);
    assert_eq!(rig.status(&mut *queue, write), Status::Ok);
    assert_eq!(controller.status().resets, 0);
    assert_eq!(first.geometry().blocks, 1024);
    drop(third);
    rig.end(&controller, queue);
}

/// Goal: a reused identifier names another namespace: open queues complete with Gone, and do not
/// write to the new one.
#[test]
fn another_namespace_under_the_same_number() {
    let mut rig = Rig::new(three());
    let (controller, first, mut queue) = rig.one(DriveOptions::new("nvme0"));
    rig.drive.remove_namespace(1);
    let mut other = NamespaceConfig::new(1, 512, 1024);
    other.nguid = [0x77; 16];
    rig.drive.add_namespace(other);
    rig.pass(&mut *queue, A_WHILE);
    let write = rig.write(0, 1, 9);
    assert_eq!(rig.status(&mut *queue, write), Status::Gone);
    assert_eq!(rig.drive.stored(1, 0, 1).unwrap(), [0; 512]);
    let now = controller.namespaces().remove(0);
    assert_eq!(now.nsid(), 1);
    assert_ne!(now.uuid(), first.uuid());
    rig.end(&controller, queue);
}

/// Goal: the driver follows changes of the write protection.
#[test]
fn write_protection() {
    let mut rig = Rig::new(Config::default());
    let (controller, bdev, mut queue) = rig.one(DriveOptions::new("nvme0"));
    rig.drive
        .change_namespace(1, |ns| ns.write_protected = true);
    let write = rig.write(0, 1, 9);
    assert_eq!(rig.status(&mut *queue, write), Status::WriteProtected);
    rig.pass(&mut *queue, A_WHILE);
    assert!(bdev.limits().read_only);
    rig.drive
        .change_namespace(1, |ns| ns.write_protected = false);
    rig.pass(&mut *queue, A_WHILE);
    assert!(!bdev.limits().read_only);
    let write = rig.write(0, 1, 9);
    assert_eq!(rig.status(&mut *queue, write), Status::Ok);
    rig.end(&controller, queue);
}

/// Goal: a namespace that was formatted with another block size during a reset gets no I/O of the
/// old one: that I/O ends with Gone, and the new namespace is a new device. Method: the reset
/// detects the change before an event reports it.
#[test]
fn formatted_during_a_reset() {
    let mut rig = Rig::new(Config::default());
    let (controller, first, mut queue) = rig.one(DriveOptions::new("nvme0"));
    let warm = rig.read(0, 1);
    assert_eq!(rig.status(&mut *queue, warm), Status::Ok);
    rig.drive.inject(Rule::always(Target::Io, Action::Hold));
    let tokens: Vec<_> = (0..4)
        .map(|lba| {
            let write = rig.write(lba, 1, 7);
            rig.submit(&mut *queue, write)
        })
        .collect();
    rig.turn(&mut *queue);
    rig.events.take();
    rig.drive.power_cycle(CacheSurvival::All);
    rig.drive.remove_namespace(1);
    rig.drive.add_namespace(NamespaceConfig::new(1, 4096, 1024));
    rig.drive.heal();
    for token in tokens {
        assert_eq!(rig.wait(&mut *queue, token).status, Status::Gone);
    }
    rig.pass(&mut *queue, A_WHILE);
    assert_eq!(rig.drive.stored(1, 0, 4).unwrap(), [0; 4 * 4096]);
    let events = rig.events.take();
    assert!(
        events
            .iter()
            .any(|event| matches!(event, Event::NamespaceRemoved(ns) if Arc::ptr_eq(ns, &first)))
    );
    let now = controller.namespaces().remove(0);
    assert_eq!(
        (now.uuid(), now.geometry().block_size),
        (first.uuid(), 4096)
    );
    let write = rig.write(0, 1, 7);
    assert_eq!(rig.status(&mut *queue, write), Status::Gone);
    drop(queue);
    let mut queue = rig.open(&now);
    let data = rig.buf(4096, 3);
    let write = rig.io(Op::Write, 1, 1).with(data);
    assert_eq!(rig.status(&mut *queue, write), Status::Ok);
    rig.end(&controller, queue);
}

/// Goal: limits that changed during a reset are adopted and reported. I/O that exceeds them ends as
/// unsupported without a command; all other I/O continues.
#[test]
fn other_limits_after_a_reset() {
    let mut rig = Rig::new(Config::default());
    let (controller, bdev, mut queue) = rig.one(DriveOptions::new("nvme0"));
    assert_eq!(bdev.limits().max_blocks, 256);
    assert_eq!(bdev.supports(Op::Verify), Support::Native);
    let write = rig.write(0, 128, 1);
    assert_eq!(rig.status(&mut *queue, write), Status::Ok);
    rig.drive.reconfigure(|config| {
        config.mdts = 2;
        config.oncs.remove(Oncs::VERIFY);
    });
    rig.events.take();
    let handle = controller.clone();
    rig.core
        .block_on(async move { handle.reset().await })
        .unwrap();
    rig.pass(&mut *queue, A_WHILE);
    let changes = rig.events.take().into_iter().find_map(|event| match event {
        Event::NamespaceLimits { nsid: 1, changes } => Some(changes),
        _ => None,
    });
    let changes = changes.expect("an event with the new limits");
    assert!(changes.contains("max_blocks 32 (before: 256)"), "{changes}");
    assert!(changes.contains("verify 0 (before: 1)"), "{changes}");
    assert_eq!(bdev.limits().max_blocks, 32);
    assert_eq!(bdev.supports(Op::Verify), Support::No);
    let before = rig.drive.stats().io;
    let (large, verify) = (rig.write(0, 33, 2), rig.io(Op::Verify, 0, 8));
    assert_eq!(rig.status(&mut *queue, large), Status::Unsupported);
    assert_eq!(rig.status(&mut *queue, verify), Status::Unsupported);
    assert_eq!(rig.drive.stats().io, before);
    let write = rig.write(0, 32, 2);
    assert_eq!(rig.status(&mut *queue, write), Status::Ok);
    // The limits change back: operations that are possible again are used again.
    rig.drive.reconfigure(|config| config.mdts = 5);
    let handle = controller.clone();
    rig.core
        .block_on(async move { handle.reset().await })
        .unwrap();
    rig.pass(&mut *queue, A_WHILE);
    let write = rig.write(0, 128, 3);
    assert_eq!(rig.status(&mut *queue, write), Status::Ok);
    assert_eq!(controller.namespaces().len(), 1);
    rig.end(&controller, queue);
}
