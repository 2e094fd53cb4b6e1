//! Tests of a holder that crashes, and of the next opening of the volume.

use std::sync::Arc;
use std::time::Duration;

use nacre_bdev::fault::{Action, Fault};
use nacre_bdev::{Io, Op, Status};
use uuid::Uuid;

use super::rig::{BLOCK, REGION, World};
use crate::handle::{Command, NewVolume, ResyncKind, VolumeError, VolumeEventKind, VolumeState};
use crate::model::{ReplicaState, Settings};
use crate::store::{Plan, VolumeStore};

/// Writes that reached only some replicas: after a crash all have the same data, with all
/// acknowledged writes.
#[test]
fn the_write_hole_is_closed() {
    let mut world = World::with(3);
    for lba in 0..32 {
        world.write(lba * 8, 8, 1);
    }
    for name in ["d1", "d2"] {
        let hang = Fault::new(Action::Hang).on(&[Op::Write]);
        world.shelf.fault(name).inject(hang).unwrap();
    }
    let _never = world.begin_write(64, 8, 2);
    world.pass(Duration::from_millis(10));
    assert_eq!(world.medium("d0")[64], 2, "one of them has it");
    assert_eq!(world.medium("d1")[64], 1);
    world.crash();
    for name in ["d1", "d2"] {
        world.shelf.fault(name).clear();
    }
    world.open().unwrap();
    let unequal = |world: &World| {
        let status = world.status();
        status.replicas.iter().filter(|one| one.is_unequal).count()
    };
    assert_eq!(unequal(&world), 2, "to the first one");
    let first = world.read(64);
    world.until_healthy();
    assert_eq!(unequal(&world), 0);
    assert_eq!(world.read(64), first);
    assert_eq!(world.read(0), 1);
    world.all_equal(&["d0", "d1", "d2"]);
    assert!(world.has_event(|e| matches!(
        e,
        VolumeEventKind::ResyncEnded { kind: ResyncKind::Reconcile, bytes, .. } if *bytes == 1 << 20
    )));
}

/// Writes that a device may still have from a former holder, or from a closed lane, are left to
/// end before anything is copied: they could reach the source after the copy.
#[test]
fn unacknowledged_writes_end_before_copying() {
    let settings = Settings {
        settle_ms: 5_000,
        ..Settings::default()
    };
    let before = Duration::from_millis(4_800);
    let mut world = World::empty(2);
    world.create(2, settings).unwrap();
    world.open().unwrap();
    world.write(0, 8, 1);
    world.pass(Duration::from_secs(6));
    for crash in [false, true, false] {
        let hang = Fault::new(Action::Hang).on(&[Op::Write]);
        world.shelf.fault("d1").inject(hang).unwrap();
        let _never = world.begin_write(0, 8, 2);
        world.pass(Duration::from_millis(10));
        if crash {
            world.crash();
            world.shelf.fault("d1").clear();
            world.open().unwrap();
        } else {
            world.lane = None;
            world.shelf.fault("d1").clear();
            let volume = Arc::clone(world.handle.as_ref().unwrap().volume());
            world.lane = Some(volume.open(&world.pool).unwrap());
        }
        let began = world.clock.now();
        world.until(|world| world.state() == VolumeState::Degraded);
        world.write(8, 8, 3);
        world.pass(before - world.clock.now().since(began));
        assert_eq!(world.state(), VolumeState::Degraded, "crash: {crash}");
        world.until_healthy();
        world.all_equal(&["d0", "d1"]);
    }
}

/// While replicas are made equal one of them is read. For blocks that it cannot read, another one's
/// contents are right from then on for all: two answers to one question do not differ, and another
/// crash changes nothing.
#[test]
fn unreadable_blocks_of_the_pinned_replica() {
    let mut world = World::with(3);
    world.write(0, 8, 1);
    world.write(REGION, 256, 1);
    for name in ["d1", "d2"] {
        let hang = Fault::new(Action::Hang).on(&[Op::Write]);
        world.shelf.fault(name).inject(hang).unwrap();
    }
    let _never = world.begin_write(REGION + 64, 8, 2);
    world.pass(Duration::from_millis(10));
    world.crash();
    for name in ["d1", "d2"] {
        world.shelf.fault(name).clear();
    }
    // Of two regions one is copied, and for the other there is no time.
    let mut record = world.record();
    let version = record.version();
    record.revision += 1;
    record.settings.resync_bytes_per_s = 1;
    let swapped = world.store.swap(version, record);
    world.core.block_on(swapped).unwrap();
    world.open().unwrap();
    assert_eq!(
        world.read(REGION + 65),
        2,
        "of d0, which the others are to get"
    );
    let unreadable = Fault {
        range: Some((2048 + REGION + 64, 1)),
        ..Fault::new(Action::FailMedium).on(&[Op::Read])
    };
    let unreadable = world.shelf.fault("d0").inject(unreadable).unwrap();
    assert_eq!(
        world.read(REGION + 64),
        1,
        "of another one: this one cannot"
    );
    assert!(world.has_event(|e| matches!(
        e,
        VolumeEventKind::Salvaged {
            lba: 2112,
            blocks: 1,
            ..
        }
    )));
    assert!(world.shelf.fault("d0").remove(unreadable));
    for _ in 0..20 {
        assert_eq!(world.read(REGION + 64), 1, "the answer has been given");
        assert_eq!(world.read(REGION + 65), 2, "as before: it could be read");
    }
    world.all_equal(&["d0", "d1", "d2"]);
    world.crash();
    world.open().unwrap();
    assert_eq!((world.read(REGION + 64), world.read(REGION + 65)), (1, 2));
}

/// Blocks that no replica can read cause an error for hosts, in time, and cost no replica.
#[test]
fn blocks_that_no_replica_can_read() {
    let mut world = World::with(2);
    world.write(0, 8, 1);
    world.crash();
    let mut faults = Vec::new();
    for name in ["d0", "d1"] {
        let unreadable = Fault {
            range: Some((2048 + 3, 1)),
            ..Fault::new(Action::FailMedium).on(&[Op::Read])
        };
        faults.push(world.shelf.fault(name).inject(unreadable).unwrap());
    }
    world.open().unwrap();
    let began = world.clock.now();
    let data = world.buf(1, 0);
    let token = world.submit(Io::new(0, Op::Read, 3, 1).with(data));
    assert_eq!(world.wait(token).status, Status::ReadError);
    assert!(world.clock.now().since(began) < Duration::from_secs(3));
    assert_eq!(world.record().in_sync().count(), 2);
    // A write makes it good.
    for (name, fault) in ["d0", "d1"].into_iter().zip(faults) {
        world.shelf.fault(name).remove(fault);
    }
    world.write(3, 1, 4);
    world.until_healthy();
    assert_eq!(world.read(3), 4);
    world.all_equal(&["d0", "d1"]);
}

/// Closed in order, there is nothing to do when it is opened again.
#[test]
fn a_clean_stop_leaves_nothing_to_do() {
    let mut world = World::with(2);
    world.write(0, 8, 1);
    world.close();
    world.open().unwrap();
    assert!(world.has_event(|e| matches!(
        e,
        VolumeEventKind::Opened {
            epoch: 2,
            clean: true,
            ..
        }
    )));
    assert_eq!(world.status().dirty_regions, 0);
    assert_eq!(world.read(0), 1);
    assert!(!world.has_event(|e| matches!(e, VolumeEventKind::ResyncStarted { .. })));
}

/// A replica that is absent when the volume is opened, and one whose disk was restored from a
/// backup, are not read.
#[test]
fn stale_replicas_are_not_read() {
    let mut world = World::with(2);
    world.write(0, 8, 1);
    world.shelf.take("d0");
    world.write(0, 8, 2);
    world.crash();
    // Only the stale one is there: it must not be taken for good.
    world.shelf.bring("d0");
    world.shelf.take("d1");
    let refused = world.open().unwrap_err();
    assert!(
        matches!(refused, VolumeError::NothingInSync { .. }),
        "{refused}"
    );
    world.crash();
    world.shelf.bring("d1");
    world.open().unwrap();
    assert_eq!(world.read(0), 2);
    world.until_healthy();
    world.all_equal(&["d0", "d1"]);
}

/// The log survives: after a crash a replica gets exactly the writes that it missed before.
#[test]
fn missed_regions_survive_a_crash() {
    let mut world = World::with(2);
    world.write(0, 8, 1);
    world.until(|world| world.status().dirty_regions == 0);
    world.shelf.take("d1");
    world.write(4 * REGION, 8, 2);
    world.crash();
    world.open().unwrap();
    world.write(6 * REGION, 8, 3);
    world.shelf.bring("d1");
    world.until_healthy();
    world.all_equal(&["d0", "d1"]);
    assert!(world.has_event(|e| matches!(
        e,
        VolumeEventKind::ResyncEnded { kind: ResyncKind::Partial, bytes, .. } if *bytes == 2 << 20
    )));
}

/// Two holders: the one before acknowledges nothing once the other serves.
#[test]
fn the_former_holder_is_fenced() {
    let mut old = World::with(2);
    old.write(0, 8, 1);
    let mut new = World::empty(0);
    new.shelf = Arc::clone(&old.shelf);
    new.store = old.store.clone();
    new.clock = old.clock.clone();
    new.core = nacre_reactor::TestCore::with_clock(Default::default(), new.clock.clone());
    (new.id, new.holder) = (old.id, Uuid::from_u128(2));
    // Disks can be claimed once only in one machine; another one would not ask.
    new.shelf.forget_claims();
    let core = new.core.core().clone();
    let (store, devices) = (new.store.clone(), Arc::clone(&new.shelf));
    let observer = Arc::clone(&new.recorded);
    let (pool, id, holder) = (new.pool.clone(), new.id, new.holder);
    let opening = core.clone().spawn_local(async move {
        let store = Arc::new(store);
        crate::control::open(&core, pool, store, devices, observer, id, holder).await
    });
    let mut acknowledged_late = 0;
    let mut token = old.begin_write(0, 8, 2);
    let began = old.clock.now();
    while !opening.is_finished() {
        new.core.turn();
        old.step();
        if let Some(done) = old.ended(token) {
            let late = old.clock.now().since(began) > Duration::from_secs(3);
            acknowledged_late += u32::from(late && done.status == Status::Ok);
            token = old.begin_write(0, 8, 2);
        }
        old.clock.advance(Duration::from_millis(1));
    }
    assert_eq!(acknowledged_late, 0);
    assert_eq!(old.state(), VolumeState::Fenced);
    assert!(old.ended(token).is_none());
    let handle = new.core.block_on(opening).unwrap().unwrap();
    new.lane = Some(Arc::clone(handle.volume()).open(&new.pool).unwrap());
    new.handle = Some(handle);
    assert_eq!(new.read(0), 2);
    new.write(0, 8, 3);
    new.until_healthy();
    assert_eq!(new.record().epoch, 2);
    assert!(matches!(new.replica_state("d0"), ReplicaState::InSync));
}

/// A holder that lost the volume and does not know it yet makes no device its own, and wipes none:
/// they may be replicas of the new holder.
#[test]
fn a_former_holder_leaves_devices_alone() {
    let add = |force| Command::Add {
        device: "d2".into(),
        force,
    };
    let remove = || Command::Remove {
        replica: "d0".into(),
        force: None,
    };
    let take: [&dyn Fn() -> Command; 2] = [&|| add(true), &remove];
    for command in take {
        let mut old = World::empty(3);
        old.create(2, Settings::default()).unwrap();
        old.open().unwrap();
        old.write(0, 8, 1);
        let mut new = old.rival(2);
        new.store = old.store.clone();
        new.shelf.forget_claims();
        new.open().unwrap();
        new.run(add(false)).unwrap();
        new.until_healthy();
        let labels = |world: &World| {
            let disks = ["d0", "d1", "d2"].map(|disk| world.reserved(disk));
            disks.map(|disk| disk.iter().map(|buf| buf.to_vec()).collect::<Vec<_>>())
        };
        let before = labels(&new);
        assert_eq!(old.state(), VolumeState::Healthy);
        let refused = old.run(command()).unwrap_err().to_string();
        assert!(refused.contains("the store has epoch 2"), "{refused}");
        assert_eq!(old.state(), VolumeState::Fenced);
        assert!(before == labels(&new), "{:?} wrote something", command());
        let fenced = old.run(command()).unwrap_err();
        assert!(matches!(fenced, VolumeError::Fenced { .. }), "{fenced}");
        assert!(before == labels(&new), "it wrote something after that");
        new.write(8, 8, 2);
        assert_eq!(new.read(0), 1);
    }
}

/// The holder dies when the store knows the new size and the holder does not know that yet: the
/// next one makes the replicas' contents in the new part equal.
#[test]
fn a_crash_while_growing() {
    let mut world = World::empty(2);
    let new = NewVolume {
        name: "vol".into(),
        id: None,
        bytes: Some(4 * REGION * u64::from(BLOCK)),
        devices: vec!["d0".into(), "d1".into()],
        settings: Settings::default(),
        force: false,
        copied_from: None,
    };
    world.create_new(new).unwrap();
    world.open().unwrap();
    world.write(0, 8, 1);
    world.until(|world| world.status().dirty_regions == 0);
    world.scribble("d1", 5 * REGION, 7);
    world.store.plan(Some(Box::new(|_| Plan {
        after: Duration::from_secs(5),
        ..Plan::default()
    })));
    let handle = world.handle.clone().unwrap();
    let grow = Command::Grow { blocks: 8 * REGION };
    let core = world.core.core().clone();
    let task = core.spawn_local(async move { handle.run(grow).await });
    world.until(|world| world.record().blocks == 8 * REGION);
    assert!(!task.is_finished(), "it has no answer from the store");
    drop(task);
    world.crash();
    world.store.plan(None);
    world.open().unwrap();
    world.until_healthy();
    world.all_equal(&["d0", "d1"]);
}
