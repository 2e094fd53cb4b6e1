//! Tests of the commands of an open volume ([`crate::Command`]).

use std::sync::Arc;
use std::time::Duration;

use nacre_bdev::Op;
use nacre_bdev::fault::{Action, Fault};

use super::rig::{DISK_BLOCKS, REGION, World};
use crate::handle::{Command, NewVolume, ResyncKind, VolumeError, VolumeEventKind, VolumeState};
use crate::model::{ReplicaState, Settings};
use crate::store::{Plan, StoreRequest};

fn new_volume(name: &str, devices: &[&str], force: bool) -> NewVolume {
    NewVolume {
        name: name.into(),
        id: None,
        bytes: None,
        devices: devices.iter().map(|d| d.to_string()).collect(),
        settings: Settings::default(),
        force,
        copied_from: None,
    }
}

/// Creation refuses devices with data, and names bad parameters.
#[test]
fn creation_refuses_used_devices() {
    let mut world = World::empty(3);
    world.scribble("d1", 70, 1);
    let refused = world.create(2, Settings::default()).unwrap_err();
    assert!(
        refused.to_string().contains("holds data at byte"),
        "{refused}"
    );
    for (new, what) in [
        (new_volume("", &["d0"], false), "name"),
        (new_volume("a b", &["d0"], false), "name"),
        (new_volume("v", &[], false), "devices"),
        (new_volume("v", &["d0", "d0"], false), "d0"),
        (new_volume("v", &["nix"], false), "nix"),
        (
            NewVolume {
                bytes: Some(1 << 40),
                ..new_volume("v", &["d0"], false)
            },
            "size",
        ),
    ] {
        let refused = world.create_new(new).unwrap_err().to_string();
        assert!(refused.contains(what), "{refused}");
    }
    world
        .create_new(new_volume("vol", &["d0", "d1"], true))
        .unwrap();
    let again = world.create_new(new_volume("vol", &["d2"], false));
    assert!(again.unwrap_err().to_string().contains("exists"));
    let replica = world
        .create_new(new_volume("other", &["d0"], false))
        .unwrap_err();
    assert!(
        replica
            .to_string()
            .contains("is a replica of volume \"vol\""),
        "{replica}"
    );
    world.open().unwrap();
    assert_eq!(world.state(), VolumeState::Healthy);
    assert_eq!(world.read(70), 0, "forgotten");
}

/// A new replica is filled while hosts write. Then the replica that it replaces is removed.
#[test]
fn a_replica_is_replaced_under_load() {
    let mut world = World::with(2);
    world.add_disk("new", DISK_BLOCKS);
    for at in 0..64 {
        world.write(at * 200, 8, at as u8 + 1);
    }
    world
        .run(Command::Replace {
            replica: "d0".into(),
            device: "new".into(),
            force: false,
        })
        .unwrap();
    let mut fill = 0u8;
    while world.record().replicas.iter().any(|m| m.device == "d0") {
        fill = fill.wrapping_add(1);
        world.write(u64::from(fill) * 61, 4, fill);
    }
    world.until_healthy();
    world.all_equal(&["d1", "new"]);
    assert_eq!(world.record().replicas.len(), 2);
    assert!(world.has_event(|e| matches!(
        e,
        VolumeEventKind::ResyncEnded {
            kind: ResyncKind::Full,
            ..
        }
    )));
    world.until(|world| world.has_event(|e| matches!(e, VolumeEventKind::ReplicaRemoved { .. })));
    // The removed replica's label is gone, so its device can be reused.
    world
        .create_new(new_volume("other", &["d0"], true))
        .unwrap();
}

/// Removing the last good replica requires typing the volume's name.
#[test]
fn removing_the_last_copy_needs_the_volume_name() {
    let mut world = World::with(2);
    world.write(0, 1, 1);
    let offline = |replica: &str, force: Option<&str>| Command::Offline {
        replica: replica.into(),
        force: force.map(Into::into),
    };
    world.run(offline("d0", None)).unwrap();
    assert_eq!(world.state(), VolumeState::Degraded);
    let refused = world.run(offline("d1", None)).unwrap_err();
    assert!(matches!(refused, VolumeError::LastCopy { .. }));
    let refused = world.run(offline("d1", Some("vo"))).unwrap_err();
    assert!(refused.to_string().contains("is not the volume's"));
    let refused = world.run(Command::Remove {
        replica: "d1".into(),
        force: None,
    });
    assert!(matches!(refused, Err(VolumeError::LastCopy { .. })));
    world.write(0, 1, 2);
    world.pass(Duration::from_secs(10));
    assert!(matches!(
        world.replica_state("d0"),
        ReplicaState::Out { .. }
    ));
    world
        .run(Command::Online {
            replica: "d0".into(),
        })
        .unwrap();
    world.until_healthy();
    world.all_equal(&["d0", "d1"]);
}

/// The device of a new replica does not answer: decisions about other replicas do not wait for it.
#[test]
fn a_new_device_that_hangs() {
    let mut world = World::with(2);
    world.add_disk("d2", DISK_BLOCKS);
    let hang = Fault::new(Action::Hang).on(&[Op::Write]);
    world.shelf.fault("d2").inject(hang).unwrap();
    let add = || Command::Add {
        device: "d2".into(),
        force: true,
    };
    let handle = world.handle.clone().unwrap();
    let adding = world.core.core();
    let adding = adding.spawn_local(async move { handle.run(add()).await });
    world.pass(Duration::from_millis(100));
    assert!(!adding.is_finished());
    world.shelf.take("d1");
    world.write(0, 8, 1);
    world.until(|_| adding.is_finished());
    let refused = world.core.block_on(adding).unwrap().unwrap_err();
    assert!(matches!(refused, VolumeError::Io { .. }), "{refused}");
    assert_eq!(world.record().replicas.len(), 2);
    world.shelf.bring("d1");
    world.until_healthy();
    world.shelf.fault("d2").clear();
    world.run(add()).unwrap();
    world.until_healthy();
    world.all_equal(&["d0", "d1", "d2"]);
}

/// The source of a reconcile is removed by force: another replica becomes the source at once.
#[test]
fn the_resync_source_is_removed() {
    let force = || Some("vol".to_owned());
    let replica = || "d0".to_owned();
    let remove: &dyn Fn() -> Command = &|| Command::Remove {
        replica: replica(),
        force: force(),
    };
    let offline: &dyn Fn() -> Command = &|| Command::Offline {
        replica: replica(),
        force: force(),
    };
    for (take, disks) in [(remove, 2), (remove, 3), (offline, 2), (offline, 3)] {
        let mut world = World::empty(disks);
        let settings = Settings {
            resync_bytes_per_s: 64 << 10,
            ..Settings::default()
        };
        world.create(disks, settings.clone()).unwrap();
        world.open().unwrap();
        for region in 0..8 {
            world.write(region * REGION, 8, region as u8 + 1);
        }
        world.crash();
        for region in 0..8 {
            world.scribble("d1", region * REGION + 8, 9);
        }
        world.open().unwrap();
        let lacked = |world: &World, slot: usize| {
            let shared = &world.handle.as_ref().unwrap().shared;
            shared.missing[slot].count()
        };
        world.pass(Duration::from_secs(1));
        assert!(lacked(&world, 1) > 1, "{disks} disks");
        let shared = Arc::clone(&world.handle.as_ref().unwrap().shared);
        let is_read = move || shared.view().replicas[0].is_some();
        world.recorded.on(move |event| {
            let changed = matches!(event, VolumeEventKind::SourceChanged { .. });
            assert!(
                !changed || !is_read(),
                "both replicas are read although they differ"
            );
        });
        world.run(take()).unwrap();
        assert_eq!(lacked(&world, 1), 0, "{:?}, {disks} disks", take());
        let left = disks as u64 - 2;
        assert!(lacked(&world, 2.min(disks - 1)) >= left);
        assert!(world.has_event(|e| matches!(e, VolumeEventKind::SourceChanged { .. })));
        let alone = disks == 2 && world.record().replicas.len() == 1;
        assert_eq!(world.state() == VolumeState::Healthy, alone);
        let status = world.status();
        let resyncs = status.replicas.iter().filter(|m| m.resync.is_some());
        assert_eq!(resyncs.count() as u64, left, "{status:#?}");
        let settings = Box::new(Settings {
            resync_bytes_per_s: 0,
            ..settings
        });
        world.run(Command::Set { settings }).unwrap();
        for region in 0..8 {
            assert_eq!(world.read(region * REGION), region as u8 + 1);
        }
        assert_eq!(world.read(7 * REGION + 8), 9, "what d1 has");
        if world.record().replicas.iter().any(|m| m.offline) {
            let replica = replica();
            world.run(Command::Online { replica }).unwrap();
        }
        world.until_healthy();
        assert_eq!(world.read(7 * REGION + 8), 9);
        let record = world.record();
        let left: Vec<&str> = record.replicas.iter().map(|m| &*m.device).collect();
        world.all_equal(&left);
    }
}

/// A replica is replaced, and a lane leaves its I/O to be copied from that replica: before the
/// store has removed it, and afterwards while the lane's view is older. No later event reports that
/// the copy is complete.
#[test]
fn io_left_to_copy_from_a_replaced_replica() {
    for late in [false, true] {
        let mut world = World::empty(2);
        world.create(1, Settings::default()).unwrap();
        world.open().unwrap();
        world.write(0, 8, 1);
        world.store.plan(Some(Box::new(|call| Plan {
            before: Duration::from_secs(match call.request {
                StoreRequest::Swap => 5,
                _ => 0,
            }),
            ..Plan::default()
        })));
        let replace = Command::Replace {
            replica: "d0".into(),
            device: "d1".into(),
            force: false,
        };
        world.run(replace).unwrap();
        let ended =
            |world: &World| world.has_event(|e| matches!(e, VolumeEventKind::ResyncEnded { .. }));
        world.until(ended);
        let hang = Fault {
            range: Some((2048 + 64, 8)),
            ..Fault::new(Action::Hang).on(&[Op::Write])
        };
        let hang = world.shelf.fault("d1").inject(hang).unwrap();
        let _never = world.begin_write(64, 8, 2);
        world.pass(Duration::from_millis(100));
        assert_eq!(world.medium("d0")[64], 2, "d0 has the write");
        world.shelf.fault("d1").remove(hang);
        let lane = world.lane.take();
        if late {
            world.until(|world| world.record().replicas.len() == 1);
            world.until(|world| {
                world.has_event(|e| matches!(e, VolumeEventKind::ReplicaRemoved { .. }))
            });
            assert_eq!(world.state(), VolumeState::Healthy);
        }
        drop(lane);
        world.pass(Duration::from_millis(100));
        assert_eq!(world.state(), VolumeState::Degraded, "late: {late}");
        world.until_healthy();
        assert_eq!(world.status().replicas.len(), 1);
        // From now on reads return this replica's data.
        let volume = Arc::clone(world.handle.as_ref().unwrap().volume());
        world.lane = Some(volume.open(&world.pool).unwrap());
        let found = world.medium("d1")[64];
        assert_eq!((world.read(0), world.read(64)), (1, found));
    }
}

/// The last good replica is trusted when it returns, whatever commands changed the volume while it
/// was away.
#[test]
fn the_returning_last_copy_is_trusted() {
    let mut world = World::with(2);
    world.write(0, 1, 1);
    let offline = |replica: &str| Command::Offline {
        replica: replica.into(),
        force: Some("vol".into()),
    };
    let online = |replica: &str| Command::Online {
        replica: replica.into(),
    };
    world.run(offline("d0")).unwrap();
    world.write(0, 1, 2);
    world.run(offline("d1")).unwrap();
    assert_eq!(world.state(), VolumeState::Frozen);
    for ms in [100, 200, 300] {
        let settings = Box::new(Settings {
            settle_ms: ms,
            ..Settings::default()
        });
        world.run(Command::Set { settings }).unwrap();
    }
    world.run(online("d0")).unwrap();
    world.pass(Duration::from_secs(2));
    assert_eq!(
        world.state(),
        VolumeState::Frozen,
        "from a copy that misses a write"
    );
    world.run(online("d1")).unwrap();
    world.until_healthy();
    assert_eq!(world.read(0), 2);
    world.all_equal(&["d0", "d1"]);
}

/// Verification finds differing blocks, and repairs them on request.
#[test]
fn verification_finds_and_repairs() {
    let mut world = World::with(3);
    world.write(0, 64, 1);
    world.scribble("d1", 33, 9);
    world.scribble("d2", 3000, 9);
    for (repair, different) in [(false, 2), (true, 2), (false, 0)] {
        world.run(Command::Verify { repair }).unwrap();
        world.until(|world| world.status().verify.is_some_and(|v| !v.running));
        let verify = world.status().verify.unwrap();
        assert_eq!(verify.different_blocks, different, "{verify:?}");
        assert_eq!(verify.repaired_blocks, if repair { 2 } else { 0 });
    }
    world.all_equal(&["d0", "d1", "d2"]);
    assert_eq!((world.read(33), world.read(3000)), (1, 0));
}

/// The volume grows with its devices; the new part reads the same from all replicas.
#[test]
fn a_volume_grows() {
    let mut world = World::empty(0);
    for name in ["d0", "d1"] {
        world.add_disk(name, 3 * REGION + 2048);
    }
    let new = NewVolume {
        bytes: Some(1 << 20),
        ..new_volume("vol", &["d0", "d1"], false)
    };
    world.create_new(new).unwrap();
    world.open().unwrap();
    world.write(0, 8, 1);
    world.scribble("d1", REGION + 7, 9);
    let refused = world.run(Command::Grow { blocks: 8 * REGION });
    assert!(refused.unwrap_err().to_string().contains("has"));
    world.run(Command::Grow { blocks: 3 * REGION }).unwrap();
    world.until_healthy();
    let run = Command::Verify { repair: false };
    world.run(run).unwrap();
    world.until(|world| world.status().verify.is_some_and(|v| !v.running));
    assert_eq!(world.status().verify.unwrap().different_blocks, 0);
    assert_eq!(
        world.handle.as_ref().unwrap().volume().geometry().blocks,
        3 * REGION
    );
    world.crash();
    world.open().unwrap();
    assert_eq!(world.read(0), 1);
    assert_eq!(world.status().blocks, 3 * REGION);
}

/// No replica is in sync: the operator may fail I/O, or continue from a present replica.
#[test]
fn thawed_by_force() {
    let mut world = World::with(2);
    world.write(0, 1, 1);
    world.shelf.take("d1");
    world.write(0, 1, 2);
    world.shelf.take("d0");
    let token = world.begin_write(1, 1, 3);
    world.until(|world| world.state() == VolumeState::Frozen);
    world.run(Command::FailIo).unwrap();
    assert!(!world.wait(token).status.is_ok());
    assert_eq!(world.state(), VolumeState::Failing);
    let thaw = |force: Option<&str>| Command::Thaw {
        replica: None,
        force: force.map(Into::into),
    };
    assert!(matches!(
        world.run(thaw(None)),
        Err(VolumeError::NothingInSync { .. })
    ));
    world.shelf.bring("d1");
    world.until(|world| world.status().replicas[1].attached);
    assert!(matches!(
        world.run(thaw(None)),
        Err(VolumeError::LastCopy { .. })
    ));
    world.run(thaw(Some("vol"))).unwrap();
    assert_eq!(world.read(0), 1, "the writes that d1 missed are lost");
    world.write(0, 1, 4);
    world.shelf.bring("d0");
    world.until_healthy();
    world.all_equal(&["d0", "d1"]);
    assert_eq!(world.read(0), 4);
}

/// The last good replica is lost during a resync to d2, and the operator continues from d1. d2 has
/// blocks that d1 never had, so it is filled from the start.
#[test]
fn thawed_without_the_newest_replica() {
    let mut world = World::with(3);
    for region in 0..8 {
        world.write(region * REGION, 8, 1);
    }
    world.shelf.take("d2");
    world.write(0, 8, 2);
    world.shelf.take("d1");
    for region in 0..8 {
        world.write(region * REGION, 8, 3);
    }
    let settings = Box::new(Settings {
        resync_bytes_per_s: 1 << 20,
        ..world.status().settings
    });
    world.run(Command::Set { settings }).unwrap();
    world.shelf.bring("d2");
    world.until(|world| world.status().replicas[2].resync.is_some());
    world.pass(Duration::from_secs(4));
    assert_eq!(world.state(), VolumeState::Degraded);
    world.shelf.take("d0");
    let token = world.begin_write(1, 1, 4);
    world.until(|world| world.state() == VolumeState::Frozen);
    // d1 left later than d2, and lacks the data that d2 got since.
    world.shelf.bring("d1");
    world.until(|world| world.status().replicas[1].attached);
    let force = Some("vol".to_owned());
    let replica = None;
    world.run(Command::Thaw { replica, force }).unwrap();
    assert!(world.wait(token).status.is_ok());
    let settings = Box::new(Settings::default());
    world.run(Command::Set { settings }).unwrap();
    world.shelf.bring("d0");
    world.until_healthy();
    world.all_equal(&["d0", "d1", "d2"]);
}

/// Resync keeps to its rate limit.
#[test]
fn resync_is_throttled() {
    let mut world = World::empty(2);
    let settings = Settings {
        resync_bytes_per_s: 1 << 20,
        ..Settings::default()
    };
    world.create(2, settings).unwrap();
    world.open().unwrap();
    for region in 0..6 {
        world.write(region * REGION, 8, 1);
    }
    world
        .run(Command::Resync {
            replica: Some("d1".into()),
            full: true,
        })
        .unwrap();
    let began = world.clock.now();
    world.until_healthy();
    let took = world.clock.now().since(began);
    assert!((6..=12).contains(&took.as_secs()), "8 MiB in {took:?}");
}

/// A volume is verified at its configured interval, counted from the time of the setting.
/// Differences are reported and not repaired.
#[test]
fn periodic_verification() {
    let mut world = World::with(2);
    let ended = |world: &World| {
        let all = world.recorded.all().into_iter();
        all.filter(|e| matches!(e, VolumeEventKind::VerifyEnded { .. }))
            .count()
    };
    let minutes = |world: &mut World, count: u32| {
        for _ in 0..count * 2 {
            world.clock.advance(Duration::from_secs(30));
            (0..8).for_each(|_| world.step());
        }
    };
    let every = |world: &mut World, verify_hours: u32| {
        let settings = Box::new(Settings {
            verify_hours,
            ..world.status().settings
        });
        world.run(Command::Set { settings }).unwrap();
    };
    world.write(0, 8, 1);
    minutes(&mut world, 5 * 60);
    assert_eq!(ended(&world), 0, "no verification without a setting");

    every(&mut world, 2);
    world.scribble("d1", 5, 9);
    minutes(&mut world, 119);
    assert_eq!(
        (ended(&world), world.status().verify),
        (0, None),
        "too early"
    );
    minutes(&mut world, 3);
    world.until(|world| ended(world) == 1);
    let found = world.status().verify.unwrap();
    assert_eq!((found.repair, found.examples), (false, vec![5]));
    assert_eq!(world.medium("d1")[5], 9, "no repair was requested");
    minutes(&mut world, 115);
    assert_eq!(ended(&world), 1);
    minutes(&mut world, 8);
    world.until(|world| ended(world) == 2);

    // A shorter interval from now on, then no verification.
    every(&mut world, 1);
    minutes(&mut world, 62);
    world.until(|world| ended(world) == 3);
    every(&mut world, 0);
    minutes(&mut world, 5 * 60);
    assert_eq!(ended(&world), 3);
}

/// A resync locks several ranges at a time; a verification or a repair locks one. They take turns,
/// and neither holds ranges that the other needs while it waits for the other.
///
/// ```text
///   write          holds a part of the first range, and hangs
///   resync         has chosen two ranges, pays ─▶ waits for the first
///   verification   pays ─▶ waits for its turn, and for the first range
/// ```
///
/// If each range were a turn of its own, the verification would come next after the write. It would
/// wait for the first range, which the resync holds, and the resync for its turn.
#[test]
fn copying_and_verifying_take_turns() {
    // At this rate a chunk of 512 KiB is paid for in 8 s, a region in 16 s.
    let settings = Settings {
        resync_bytes_per_s: 64 << 10,
        deadline_ms: 600_000,
        ..Settings::default()
    };
    let mut world = World::empty(2);
    world.create(2, settings.clone()).unwrap();
    world.open().unwrap();
    world.write(0, 8, 1);
    // Two chunks are compared, so the next copies have to wait: the second for 8 s, and another 8
    // s.
    world.run(Command::Verify { repair: false }).unwrap();
    world.until(|world| world.status().verify.unwrap().compared_bytes == 512 << 10);
    world.run(Command::StopVerify).unwrap();
    world.until(|world| !world.status().verify.unwrap().running);
    world.shelf.take("d1");
    world.write(0, 8, 2);
    world.shelf.bring("d1");
    world.until(|world| world.status().replicas[1].resync.is_some());
    world.pass(Duration::from_millis(100));
    // No I/O was in flight when copying began to wait, so it takes the whole region next.
    let hang = Fault {
        range: Some((2048, 8)),
        ..Fault::new(Action::Hang).on(&[Op::Write])
    };
    let hang = world.shelf.fault("d0").inject(hang).unwrap();
    let hangs = world.begin_write(0, 8, 3);
    world.pass(Duration::from_millis(100));
    world.run(Command::Verify { repair: true }).unwrap();
    // Both have paid for their chunks by now.
    world.pass(Duration::from_secs(60));
    assert!(world.ended(hangs).is_none());
    assert_eq!(world.status().verify.unwrap().compared_bytes, 0);
    assert!(world.status().replicas[1].resync.is_some());
    let settings = Box::new(Settings {
        resync_bytes_per_s: 0,
        ..settings
    });
    world.run(Command::Set { settings }).unwrap();
    world.shelf.fault("d0").remove(hang);
    world.shelf.fault("d0").resume_pending();
    assert!(world.wait(hangs).status.is_ok());
    world.until_healthy();
    world.until(|world| !world.status().verify.unwrap().running);
    let verify = world.status().verify.unwrap();
    assert_eq!(
        (verify.compared_bytes, verify.different_blocks),
        (8 << 20, 0)
    );
    world.all_equal(&["d0", "d1"]);
    assert_eq!(world.read(0), 3);
}

/// A volume of two replicas, not open yet, whose last region is partial: it ends at the returned
/// block. Its devices have room to grow.
fn within_a_region() -> (World, u64) {
    let mut world = World::empty(0);
    for disk in ["d0", "d1"] {
        world.add_disk(disk, DISK_BLOCKS + 2 * REGION);
    }
    let end = 2 * REGION - 64;
    let new = NewVolume {
        name: "vol".into(),
        id: None,
        bytes: Some(end * 512),
        devices: vec!["d0".into(), "d1".into()],
        settings: Settings::default(),
        force: false,
        copied_from: None,
    };
    world.create_new(new).unwrap();
    (world, end)
}

/// A volume with a partial last region grows while that region is being copied: the rest of the
/// region is copied too.
#[test]
fn growing_while_the_last_region_is_copied() {
    let (mut world, end) = within_a_region();
    world.scribble("d0", end + 10, 1);
    world.scribble("d1", end + 10, 2);
    world.open().unwrap();
    let resync = Command::Resync {
        replica: Some("d1".into()),
        full: true,
    };
    let slow = Fault {
        range: Some((2048 + REGION, REGION)),
        ..Fault::new(Action::Hang).on(&[Op::Read])
    };
    let slow = world.shelf.fault("d0").inject(slow).unwrap();
    world.run(resync).unwrap();
    let copying = |world: &World| world.handle.as_ref().unwrap().shared.copying();
    world.until(|world| copying(world) == 1);
    world.pass(Duration::from_millis(100));
    let blocks = 2 * REGION;
    world.run(Command::Grow { blocks }).unwrap();
    assert_eq!(copying(&world), 1, "copied up to the old end");
    world.shelf.fault("d0").remove(slow);
    world.shelf.fault("d0").resume_pending();
    world.until_healthy();
    world.all_equal(&["d0", "d1"]);
    assert_eq!(world.read(end + 10), 1);
}

/// A volume with a partial last region grows: the region is copied from whichever replica has it.
#[test]
fn growing_while_the_first_replica_lacks_the_last_region() {
    let (mut world, end) = within_a_region();
    world.scribble("d0", end - 8, 1);
    world.scribble("d1", end - 8, 2);
    world.open().unwrap();
    let shared = &world.handle.as_ref().unwrap().shared;
    let last = shared.region_of(end - 1);
    shared.add_needs(0, last..last + 1);
    let blocks = 2 * REGION;
    world.run(Command::Grow { blocks }).unwrap();
    world.until_healthy();
    world.all_equal(&["d0", "d1"]);
    assert_eq!(world.read(end - 8), 2);
}
