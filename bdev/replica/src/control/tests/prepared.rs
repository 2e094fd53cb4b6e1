//! Tests of prepared volumes, which are shown to hosts before they are open.

use std::time::Duration;

use nacre_bdev::fault::{Action, Fault};
use nacre_bdev::{Io, Op, Status};

use super::rig::{DISK_BLOCKS, REGION, World};
use crate::format::{BLOCK, LabelCopy, label_offset, page_offset};
use crate::handle::{Command, VolumeError, VolumeState};
use crate::model::{KeptLimits, ReplicaState, Settings, VolumeRecord};
use crate::prepared::Prepared;
use crate::store::{Outcome, Plan, VolumeStore};

/// A volume with data whose process died.
fn left(disks: usize) -> World {
    let mut world = World::with(disks);
    let settings = Box::new(Settings {
        frozen_hold_ms: 8_000,
        ..Settings::default()
    });
    world.run(Command::Set { settings }).unwrap();
    world.write(0, 8, 1);
    world.write(3 * REGION, 8, 2);
    world.crash();
    world
}

/// A volume whose only replica is absent, and a write that waits for it.
fn awaited() -> (World, Prepared, u64) {
    let mut world = left(1);
    world.shelf.take("d0");
    let record = world.record();
    let prepared = world.prepare(&record);
    let waits = world.begin_write(0, 8, 3);
    world.pass(Duration::from_millis(100));
    (world, prepared, waits)
}

fn read(world: &mut World, lba: u64) -> u64 {
    let data = world.buf(1, 0xee);
    world.submit(Io::new(0, Op::Read, lba, 1).with(data))
}

fn state(prepared: &Prepared, world: &World, why: Option<&VolumeError>) -> VolumeState {
    prepared.status(&world.record(), why).state
}

/// Goal: I/O to a volume without present replicas waits, gets a path error after the hold time, and
/// continues when a replica returns. Method: attempts to open with the disks absent, then with one
/// of them.
#[test]
fn io_waits_for_the_volume_to_be_opened() {
    let mut world = left(2);
    for disk in ["d0", "d1"] {
        world.shelf.take(disk);
    }
    let record = world.record();
    let prepared = world.prepare(&record);
    let volume = prepared.volume().unwrap();
    assert_eq!(
        (volume.name(), volume.geometry().blocks),
        ("vol", record.blocks)
    );
    assert!(
        volume.limits().volatile_cache,
        "unknown before opening, so assumed"
    );
    assert_eq!(state(&prepared, &world, None), VolumeState::Frozen);
    let early = world.begin_write(8, 8, 7);
    for _ in 0..3 {
        let refused = world.open_prepared(&prepared).unwrap_err();
        assert!(matches!(refused, VolumeError::NothingInSync { .. }));
        assert_eq!(
            state(&prepared, &world, Some(&refused)),
            VolumeState::Frozen
        );
        world.pass(Duration::from_millis(100));
        assert!(world.ended(early).is_none());
    }
    world.pass(Duration::from_secs(9));
    let answer = world.ended(early).expect("a completion after the hold");
    assert_eq!(answer.status, Status::Gone);
    let status = prepared.status(&world.record(), None);
    assert_eq!((status.frozen_answers, status.lanes), (1, 1));

    let (write, found) = (world.begin_write(16, 8, 8), read(&mut world, 0));
    let flush = world.submit(Io::new(0, Op::Flush, 0, 0));
    world.shelf.bring("d1");
    world.open_prepared(&prepared).unwrap();
    assert!(prepared.is_served_by(world.handle.as_ref().unwrap()));
    let found = world.wait(found);
    assert_eq!((found.status, found.data[0][0]), (Status::Ok, 1));
    assert_eq!(world.wait(write).status, Status::Ok);
    assert_eq!(world.wait(flush).status, Status::Ok);
    assert_eq!((world.read(16), world.read(3 * REGION)), (8, 2));
    assert_eq!(world.read(8), 0, "the failed write was not executed");
    world.shelf.bring("d0");
    world.until_healthy();
    world.all_equal(&["d0", "d1"]);
    world.close();
}

/// Goal: a failed attempt leaves no state behind, however far it came. Method: the only disk
/// accepts no label (after its log was read), or the store stops replying; the next attempt
/// succeeds.
#[test]
fn a_failed_attempt_leaves_nothing() {
    let mut world = left(1);
    let record = world.record();
    let prepared = world.prepare(&record);
    let write = world.begin_write(0, 8, 3);
    let at = |offset: u64| Some((offset / 512, BLOCK as u64 / 512));
    let (a, b) = (label_offset(LabelCopy::A), label_offset(LabelCopy::B));
    // Each attempt writes the label in the other slot; after a failure the same slot is used again.
    for (attempt, offset) in [a, page_offset(0), b, page_offset(0)]
        .into_iter()
        .enumerate()
    {
        let full = Fault {
            range: at(offset),
            ..Fault::new(Action::Fail(Status::Gone)).on(&[Op::Write])
        };
        let full = world.shelf.fault("d0").inject(full).unwrap();
        let refused = world.open_prepared(&prepared).unwrap_err();
        assert!(
            matches!(refused, VolumeError::NothingInSync { .. }),
            "{attempt}: {refused}"
        );
        world.shelf.fault("d0").remove(full);
        let status = prepared.status(&world.record(), Some(&refused));
        assert_eq!(status.dirty_regions, 0);
        assert_eq!(status.epoch, record.epoch + attempt as u64 + 1);
        let volume = prepared.volume().unwrap();
        assert!(volume.bases().is_empty());
        assert_eq!(volume.driver_specific()["volume"]["mode"], "frozen");
        assert!(world.ended(write).is_none());
    }
    world.open_prepared(&prepared).unwrap();
    world.until(|world| world.state() == VolumeState::Healthy);
    assert_eq!(world.wait(write).status, Status::Ok);
    assert_eq!((world.read(0), world.read(3 * REGION)), (3, 2));
    assert_eq!(world.replica_state("d0"), ReplicaState::InSync);
}

/// While the store is unreachable hosts wait, and the status shows the reason.
#[test]
fn without_the_store_hosts_wait() {
    let mut world = left(2);
    let record = world.record();
    let prepared = world.prepare(&record);
    let waits = read(&mut world, 0);
    world.store.plan_next([Plan::outcome(Outcome::Refuse)]);
    let refused = world.open_prepared(&prepared).unwrap_err();
    assert_eq!(
        state(&prepared, &world, Some(&refused)),
        VolumeState::StoreLost
    );
    world.pass(Duration::from_millis(500));
    assert!(world.ended(waits).is_none());
    world.open_prepared(&prepared).unwrap();
    assert_eq!(world.wait(waits).data[0][0], 1);
}

/// The label shows that another holder has the volume: hosts do not wait here, because it is served
/// elsewhere.
#[test]
fn hosts_do_not_wait_for_another_holders_volume() {
    let mut world = left(2);
    let mut rival = world.rival(2);
    let record = world.record();
    let prepared = world.prepare(&record);
    rival.open().unwrap();
    rival.write(0, 8, 9);
    world.shelf.forget_claims();
    let waits = read(&mut world, 0);
    world.pass(Duration::from_millis(100));
    assert!(world.ended(waits).is_none());
    let refused = world.open_prepared(&prepared).unwrap_err();
    assert!(matches!(refused, VolumeError::Newer { .. }), "{refused}");
    let began = world.clock.now();
    assert_eq!(world.wait(waits).status, Status::Gone);
    for _ in 0..3 {
        let late = read(&mut world, 0);
        assert_eq!(world.wait(late).status, Status::Gone);
    }
    assert!(world.clock.now().since(began) < Duration::from_millis(500));
    assert_eq!(
        state(&prepared, &world, Some(&refused)),
        VolumeState::Fenced
    );
    // The volume was deleted from the store.
    let gone = world.store.delete(world.id, world.record().version());
    world.core.block_on(gone).unwrap();
    let refused = world.open_prepared(&prepared).unwrap_err();
    assert_eq!(
        prepared.status(&record, Some(&refused)).state,
        VolumeState::Closed
    );
    let late = read(&mut world, 0);
    assert_eq!(world.wait(late).status, Status::Gone);
}

/// The operator configures that hosts do not wait: this applies during attempts to open, and in the
/// open volume.
#[test]
fn io_fails_before_the_volume_is_open() {
    let (mut world, prepared, waits) = awaited();
    prepared.set_failing(true);
    assert_eq!(world.wait(waits).status, Status::WriteError);
    world.open_prepared(&prepared).unwrap_err();
    assert_eq!(state(&prepared, &world, None), VolumeState::Failing);
    let late = read(&mut world, 0);
    assert_eq!(world.wait(late).status, Status::ReadError);
    prepared.set_failing(false);
    let waits = read(&mut world, 0);
    world.pass(Duration::from_millis(100));
    assert!(world.ended(waits).is_none());
    prepared.set_failing(true);
    assert_eq!(world.wait(waits).status, Status::ReadError);
    world.shelf.bring("d0");
    world.open_prepared(&prepared).unwrap();
    assert_eq!(world.state(), VolumeState::Failing);
    let late = read(&mut world, 0);
    assert_eq!(world.wait(late).status, Status::ReadError);
    let (replica, force) = (None, None);
    world.run(Command::Thaw { replica, force }).unwrap();
    assert_eq!((world.state(), world.read(0)), (VolumeState::Healthy, 1));
}

/// A stopping daemon keeps no host waiting for a volume that it will not open.
#[test]
fn a_stopping_daemon_keeps_no_host_waiting() {
    let (mut world, prepared, waits) = awaited();
    prepared.shut();
    assert_eq!(world.wait(waits).status, Status::Gone);
    world.open_prepared(&prepared).unwrap_err();
    let late = read(&mut world, 0);
    assert_eq!(world.wait(late).status, Status::Gone);
    assert!(world.lane.as_ref().unwrap().is_settled());
}

/// Replicas with lower limits than announced do not serve a host that read the announced limits:
/// those hosts wait for other replicas.
#[test]
fn announced_limits_are_kept() {
    let mut world = left(2);
    let kept = world.record().limits.expect("it was open");
    let promises = [
        (kept, true),
        (
            KeptLimits {
                atomic_blocks: kept.atomic_blocks + 1,
                ..kept
            },
            false,
        ),
        (
            KeptLimits {
                zero_copy_blocks: 0,
                max_blocks: 8,
                ..kept
            },
            true,
        ),
        (
            KeptLimits {
                read_only: true,
                ..kept
            },
            false,
        ),
    ];
    for (at, (promise, kept_now)) in promises.into_iter().enumerate() {
        let record = VolumeRecord {
            limits: Some(promise),
            ..world.record()
        };
        let prepared = world.prepare(&record);
        let fill = at as u8 + 10;
        let waits = read(&mut world, 0);
        world.open_prepared(&prepared).unwrap();
        let handle = world.handle.clone().unwrap();
        assert_eq!(prepared.is_served_by(&handle), kept_now, "{promise:?}");
        world.pass(Duration::from_millis(200));
        if kept_now {
            assert_eq!(world.wait(waits).status, Status::Ok)
        } else {
            assert!(world.ended(waits).is_none(), "{promise:?}");
            prepared.shut();
            assert_eq!(world.wait(waits).status, Status::Gone);
            world.opened(handle);
        }
        world.write(64, 1, fill);
        assert_eq!(world.read(64), fill);
        assert_eq!(
            world.record().limits,
            Some(kept),
            "the stored limits are unchanged"
        );
        world.close();
    }
}

/// A volume that another holder enlarged meanwhile has its new size.
#[test]
fn a_volume_may_have_grown() {
    let mut world = World::empty(0);
    for disk in ["d0", "d1"] {
        world.add_disk(disk, DISK_BLOCKS + 4 * REGION);
    }
    let new = crate::handle::NewVolume {
        name: "vol".into(),
        id: None,
        bytes: Some(8 * REGION * 512),
        devices: vec!["d0".into(), "d1".into()],
        settings: Settings::default(),
        force: false,
        copied_from: None,
    };
    world.create_new(new).unwrap();
    world.open().unwrap();
    let before = world.record();
    let blocks = 10 * REGION;
    world.run(Command::Grow { blocks }).unwrap();
    world.write(blocks - 1, 1, 6);
    world.close();
    let prepared = world.prepare(&before);
    let volume = prepared.volume().unwrap();
    assert_eq!(volume.geometry().blocks, 8 * REGION);
    world.open_prepared(&prepared).unwrap();
    assert!(prepared.is_served_by(world.handle.as_ref().unwrap()));
    assert_eq!(volume.geometry().blocks, blocks);
    assert_eq!(world.read(blocks - 1), 6);
}

/// A record from before limits were stored is valid. There is only no device before the volume is
/// open.
#[test]
fn a_record_without_limits() {
    let mut world = left(1);
    let mut json = serde_json::to_value(world.record()).unwrap();
    assert_eq!(
        serde_json::from_value::<VolumeRecord>(json.clone()).unwrap(),
        world.record()
    );
    json.as_object_mut().unwrap().remove("limits").unwrap();
    let old: VolumeRecord = serde_json::from_value(json).unwrap();
    assert_eq!(old.limits, None);
    let prepared = Prepared::new(&old);
    assert!(prepared.volume().is_none());
    let next = VolumeRecord {
        revision: old.revision + 1,
        ..old
    };
    let swapped = world.store.swap(world.record().version(), next);
    world.core.block_on(swapped).unwrap();
    world.open_prepared(&prepared).unwrap();
    let handle = world.handle.clone().unwrap();
    world.opened(handle);
    assert_eq!(world.read(0), 1);
    assert!(
        world.record().limits.is_some(),
        "the limits are stored from now on"
    );
}
