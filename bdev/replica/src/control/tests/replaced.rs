//! Tests of replacements that are interrupted between the promotion of the new replica and the
//! removal of the old one.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use nacre_bdev::Op;
use nacre_bdev::fault::{Action, Fault};

use super::rig::{DISK_BLOCKS, World};
use crate::handle::{Command, NewVolume, VolumeEventKind, VolumeState};
use crate::model::{ReplicaState, Settings};
use crate::store::{Call, Plan, StoreRequest};

const SLOW: Duration = Duration::from_secs(5);

/// Delays each change of the record by `before`, and its reply by `after`.
fn slow_store(world: &World, before: Duration, after: Duration) {
    let plan = move |call: &Call| match call.request {
        StoreRequest::Swap => Plan {
            before,
            after,
            ..Plan::default()
        },
        _ => Plan::default(),
    };
    world.store.plan(Some(Box::new(plan)));
}

/// A volume of `disks` disks, of which `d0` is to be replaced, and a slow store. The log is empty:
/// a replica that is reconciled after a crash would be promoted once more.
fn begun(disks: usize, settings: Settings, before: Duration, after: Duration) -> World {
    let mut world = World::empty(disks);
    world.create(disks, settings).unwrap();
    world.open().unwrap();
    world.add_disk("new", DISK_BLOCKS);
    for at in 0..16 {
        world.write(at * 900, 8, at as u8 + 1);
    }
    world.until(|world| world.status().dirty_regions == 0);
    slow_store(&world, before, after);
    let replace = Command::Replace {
        replica: "d0".into(),
        device: "new".into(),
        force: false,
    };
    world.run(replace).unwrap();
    world
}

fn has(world: &World, device: &str) -> bool {
    let record = world.record();
    record.replicas.iter().any(|m| m.device == device)
}

fn is_promoted(world: &World) -> bool {
    has(world, "new") && world.replica_state("new") == ReplicaState::InSync
}

/// Waits until the store has the request to promote the new replica, but has not executed it.
fn until_promoting(world: &mut World, slot: usize) {
    let filled = |world: &World| {
        let shared = &world.handle.as_ref().unwrap().shared;
        world.status().replicas[slot].attached && shared.missing[slot].is_empty()
    };
    world.until(filled);
    world.pass(Duration::from_secs(1));
    assert!(!is_promoted(world));
}

/// Checks that the replacement is complete, and the old replica's label gone.
fn is_finished(world: &mut World) {
    let record = world.record();
    assert!(record.replicas.iter().all(|m| m.replaces.is_none()));
    world.until(|world| world.has_event(|e| matches!(e, VolumeEventKind::ReplicaRemoved { .. })));
    world
        .create_new(NewVolume {
            name: "other".into(),
            id: None,
            bytes: None,
            devices: vec!["d0".into()],
            settings: Settings::default(),
            force: true,
            copied_from: None,
        })
        .unwrap();
}

/// The holder dies when the store has the new replica in sync, and the old one not removed yet. The
/// next holder completes the removal, whichever replicas are present; if the new one is absent, it
/// waits for it.
#[test]
fn a_crash_between_promotion_and_removal() {
    for away in [None, Some("d0"), Some("new")] {
        let mut world = begun(2, Settings::default(), SLOW, Duration::ZERO);
        world.until(is_promoted);
        world.crash();
        world.store.plan(None);
        assert!(has(&world, "d0"), "the holder died before the removal");
        if let Some(away) = away {
            world.shelf.take(away);
        }
        world.open().unwrap();
        if away == Some("new") {
            world.pass(Duration::from_secs(30));
            assert_eq!(world.replica_state("d0"), ReplicaState::InSync);
            world.write(0, 8, 77);
            world.shelf.bring("new");
        }
        world.until(|world| world.status().replicas.len() == 2);
        assert!(!has(&world, "d0"), "away: {away:?}");
        world.until_healthy();
        let read = world.read(0);
        assert_eq!(read, if away == Some("new") { 77 } else { 1 });
        world.all_equal(&["d1", "new"]);
        if away != Some("d0") {
            is_finished(&mut world);
        }
    }
}

/// The holder dies after the store has removed the old replica, and before it gets the reply: no
/// work is left.
#[test]
fn a_crash_after_removal() {
    let mut world = begun(2, Settings::default(), Duration::ZERO, SLOW);
    world.until(|world| !has(world, "d0"));
    world.crash();
    world.store.plan(None);
    let before = world.record();
    world.open().unwrap();
    world.until_healthy();
    world.pass(Duration::from_secs(10));
    assert!(!world.has_event(|e| matches!(e, VolumeEventKind::ReplicaRemoved { .. })));
    let ids = |record: &crate::model::VolumeRecord| -> Vec<_> {
        record.replicas.iter().map(|m| m.id).collect()
    };
    assert_eq!(ids(&world.record()), ids(&before));
    assert!(world.record().replicas.iter().all(|m| m.replaces.is_none()));
    world.all_equal(&["d1", "new"]);
}

/// While the new replica is promoted, a lane leaves I/O to be copied to it: the replaced one is
/// then the only good copy. It stays until that copy is done. The store gets no request meanwhile,
/// and then the replaced one is removed.
#[test]
fn the_only_good_copy_leaves_after_the_resync() {
    let settings = Settings {
        settle_ms: 8_000,
        ..Settings::default()
    };
    let mut world = begun(1, settings, SLOW, Duration::ZERO);
    until_promoting(&mut world, 1);
    let hang = Fault {
        range: Some((2048 + 64, 8)),
        ..Fault::new(Action::Hang).on(&[Op::Write])
    };
    let hang = world.shelf.fault("new").inject(hang).unwrap();
    let _never = world.begin_write(64, 8, 99);
    world.pass(Duration::from_millis(100));
    assert_eq!(world.medium("d0")[64], 99, "one of them has it");
    world.shelf.fault("new").remove(hang);
    world.lane = None;
    let ended =
        |world: &World| world.has_event(|e| matches!(e, VolumeEventKind::ResyncEnded { .. }));
    world.until(ended);
    let swaps = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&swaps);
    world.store.plan(Some(Box::new(move |call| {
        if call.request == StoreRequest::Swap {
            counted.fetch_add(1, Ordering::Relaxed);
        }
        Plan::default()
    })));
    world.pass(Duration::from_secs(2));
    assert!(has(&world, "d0"), "d0 is the only complete replica");
    assert_eq!(world.state(), VolumeState::Degraded);
    assert_eq!(swaps.load(Ordering::Relaxed), 0);
    world.until(|world| !has(world, "d0"));
    world.until_healthy();
    assert_eq!(swaps.load(Ordering::Relaxed), 1);
    let volume = Arc::clone(world.handle.as_ref().unwrap().volume());
    world.lane = Some(volume.open(&world.pool).unwrap());
    assert_eq!((world.read(0), world.read(64)), (1, 99));
    is_finished(&mut world);
}

/// The new replica is lost between its promotion and the removal, because another task came first:
/// the replaced one stays, although a third replica exists.
#[test]
fn a_replaced_replica_stays_if_its_successor_is_lost() {
    let mut world = begun(2, Settings::default(), SLOW, Duration::ZERO);
    until_promoting(&mut world, 2);
    let handle = world.handle.clone().unwrap();
    let settings = Box::new(Settings::default());
    let set = async move { handle.run(Command::Set { settings }).await };
    let set = world.core.core().spawn_local(set);
    world.until(is_promoted);
    world.pass(Duration::from_secs(1));
    assert!(!set.is_finished(), "the loss precedes the removal");
    world.shelf.remove("new");
    world.until(|world| matches!(world.replica_state("new"), ReplicaState::Out { .. }));
    world.store.plan(None);
    world.pass(Duration::from_secs(30));
    assert_eq!(world.replica_state("d0"), ReplicaState::InSync);
    assert_eq!(world.record().replicas.len(), 3);
    world.all_equal(&["d0", "d1"]);
}

/// Goal: one replica has one successor. Method: a second request while the first copies, and two at
/// once, with a slow store.
#[test]
fn a_second_successor_is_refused() {
    let mut world = begun(2, Settings::default(), SLOW, Duration::ZERO);
    world.add_disk("other", DISK_BLOCKS);
    let second = Command::Replace {
        replica: "d0".into(),
        device: "other".into(),
        force: false,
    };
    let refused = world.run(second).unwrap_err().to_string();
    assert!(
        refused.contains("it is being replaced already"),
        "{refused}"
    );
    assert!(!has(&world, "other"));
    world.until(|world| !has(world, "d0"));
    is_finished(&mut world);
}

/// Goal: no replica that is in sync is removed as a successor that is not needed. Method: the
/// command comes while the copy runs, once the new replica is in sync, and for a replica that
/// replaces none.
#[test]
fn a_successor_is_given_up_only_before_it_is_in_sync() {
    let give_up = |device: &str| Command::GiveUp {
        replica: device.into(),
    };
    let mut world = begun(2, Settings::default(), Duration::ZERO, Duration::ZERO);
    let refused = world.run(give_up("d1")).unwrap_err().to_string();
    assert!(
        refused.contains("it does not replace another one"),
        "{refused}"
    );
    world.run(give_up("new")).unwrap();
    assert!(has(&world, "d0") && !has(&world, "new"));
    assert_eq!(world.record().replicas.len(), 2);

    let mut world = begun(2, Settings::default(), SLOW, Duration::ZERO);
    world.until(is_promoted);
    let refused = world.run(give_up("new")).unwrap_err().to_string();
    assert!(
        refused.contains("it does not replace another one"),
        "{refused}"
    );
    world.until(|world| !has(world, "d0"));
    assert!(has(&world, "new"));
}
