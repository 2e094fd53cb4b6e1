//! Tests of replicas that are added, fail, leave and return.

use std::sync::Arc;
use std::time::Duration;

use nacre_bdev::fault::{Action, Fault};
use nacre_bdev::{Io, Op, Status};

use super::rig::{REGION, World};
use crate::handle::{Command, ResyncKind, VolumeEventKind, VolumeState};
use crate::model::{ReplicaState, Settings};
use crate::store::{Call, Outcome, Plan, StoreRequest};

/// A write reaches every replica, and each region costs one log write.
#[test]
fn writes_reach_every_replica() {
    let mut world = World::with(3);
    assert_eq!(world.state(), VolumeState::Healthy);
    for lba in [0, 1, 2, REGION, 7 * REGION + 5] {
        world.write(lba, 3, lba as u8 + 1);
    }
    assert_eq!(
        world.read(7 * REGION + 5),
        7u64.wrapping_mul(REGION).wrapping_add(6) as u8
    );
    assert_eq!(world.status().dirty_regions, 3);
    assert_eq!(world.status().log_waits, 3);
    world.all_equal(&["d0", "d1", "d2"]);
    // Idle regions become clean, and their next write costs a log write again.
    world.until(|world| world.status().dirty_regions == 0);
    world.write(0, 1, 9);
    assert_eq!(world.status().log_waits, 4);
}

/// A replica that fails a write is out, durably, before the write is acknowledged. When it returns
/// it gets the writes that it missed and nothing else.
#[test]
fn a_replica_fails_and_returns() {
    let mut world = World::with(3);
    world.write(0, 8, 1);
    world.write(5 * REGION, 8, 2);
    world.until(|world| world.status().dirty_regions == 0);
    world.shelf.take("d1");
    let token = world.begin_write(8, 8, 3);
    while !world.ended.contains_key(&token) {
        world.step();
    }
    assert!(matches!(
        world.replica_state("d1"),
        ReplicaState::Out { .. }
    ));
    assert_eq!(world.ended(token).unwrap().status, Status::Ok);
    assert_eq!(world.state(), VolumeState::Degraded);
    for at in 0..20 {
        world.write(3 * REGION + at * 8, 8, 4);
    }
    world.pass(Duration::from_secs(20));
    assert_eq!(
        world.status().dirty_regions,
        2,
        "dirty regions stay while a replica is out"
    );
    world.shelf.bring("d1");
    world.until_healthy();
    let bytes = |kind| {
        let mut all = world.recorded.all();
        all.retain(|e| matches!(e, VolumeEventKind::ResyncEnded { kind: k, .. } if *k == kind));
        all
    };
    let ended = bytes(ResyncKind::Partial);
    assert!(
        matches!(ended[..], [VolumeEventKind::ResyncEnded { bytes, .. }] if bytes == 2 << 20),
        "two regions of eight: {ended:?}"
    );
    world.all_equal(&["d0", "d1", "d2"]);
}

/// The store does not reply: I/O that depends on a decision waits, other I/O continues, and no
/// write is acknowledged without the decision.
#[test]
fn no_acknowledgement_before_the_store_replies() {
    let mut world = World::with(2);
    world.write(0, 8, 1);
    world
        .store
        .plan(Some(Box::new(|call: &Call| match call.request {
            StoreRequest::Swap => Plan::outcome(Outcome::Refuse),
            _ => Plan::default(),
        })));
    world.shelf.take("d1");
    let token = world.begin_write(8, 8, 2);
    world.pass(Duration::from_secs(15));
    let early = world.ended(token).map(|done| done.status);
    assert_eq!(early, None, "it must wait for the store");
    assert_eq!(world.state(), VolumeState::StoreLost);
    assert_eq!(world.read(0), 1, "reads continue");
    world.store.plan(None);
    assert_eq!(world.wait(token).status, Status::Ok);
    assert!(matches!(
        world.replica_state("d1"),
        ReplicaState::Out { .. }
    ));
    // After a lost reply the control reads the record to learn the result.
    world.shelf.bring("d1");
    world.until_healthy();
    world.store.plan_next([Plan::outcome(Outcome::Lose)]);
    world.shelf.take("d0");
    world.write(16, 8, 3);
    assert!(matches!(
        world.replica_state("d0"),
        ReplicaState::Out { .. }
    ));
}

/// A replica fails a write while the store is unreachable. Before the failure is decided, the other
/// replica is removed: the first one, which has all data, remains.
#[test]
fn a_decision_is_overtaken() {
    // Without any reply it is unknown whether the store applied the last attempt.
    for (flush, deaf) in [(true, false), (false, false), (true, true), (false, true)] {
        let mut world = World::with(2);
        world.write(0, 8, 1);
        let refuse = move |call: &Call| match call.request {
            StoreRequest::Swap => Plan::outcome(Outcome::Refuse),
            _ if deaf => Plan::outcome(Outcome::Refuse),
            _ => Plan::default(),
        };
        world.store.plan(Some(Box::new(refuse)));
        let op = if flush { Op::Flush } else { Op::Write };
        let bad = Fault::new(Action::Fail(Status::DeviceError)).on(&[op]);
        let bad = world.shelf.fault("d1").inject(bad).unwrap();
        let failed = if flush {
            world.submit(Io::new(0, Op::Flush, 0, 0))
        } else {
            world.begin_write(8, 8, 2)
        };
        world.pass(Duration::from_secs(2));
        assert_eq!(world.state(), VolumeState::StoreLost);
        world.shelf.fault("d1").remove(bad);
        world.shelf.remove("d0");
        world.pass(Duration::from_secs(2));
        assert!(world.ended(failed).is_none(), "no decision is stored");
        world.store.plan(None);
        world.until(|world| matches!(world.replica_state("d0"), ReplicaState::Out { .. }));
        assert_eq!(world.replica_state("d1"), ReplicaState::InSync);
        world.wait(failed);
        world.write(16, 8, 3);
        assert_eq!((world.read(0), world.read(16)), (1, 3));
    }
}

/// The last in-sync replica is never marked bad. If unreachable it freezes the volume; a bad medium
/// is reported to the host.
#[test]
fn the_last_replica_stays() {
    let mut world = World::with(2);
    world.write(0, 8, 1);
    world.shelf.take("d1");
    world.write(0, 8, 2);
    let bad = Fault::new(Action::FailMedium).on(&[Op::Write]);
    let bad = world.shelf.fault("d0").inject(bad).unwrap();
    let token = world.begin_write(8, 1, 9);
    assert_eq!(world.wait(token).status, Status::WriteError);
    assert_eq!(world.replica_state("d0"), ReplicaState::InSync);
    world.shelf.fault("d0").remove(bad);
    world.write(8, 1, 9);
    world.shelf.take("d0");
    let token = world.begin_write(16, 1, 7);
    world.until(|world| world.state() == VolumeState::Frozen);
    assert_eq!(world.replica_state("d0"), ReplicaState::InSync);
    // The stale replica returns: it must not serve.
    world.shelf.bring("d1");
    world.pass(Duration::from_secs(5));
    assert_eq!(world.state(), VolumeState::Frozen);
    assert!(world.ended(token).is_none(), "hosts wait");
    world.shelf.bring("d0");
    assert_eq!(world.wait(token).status, Status::Ok);
    world.until_healthy();
    assert_eq!((world.read(0), world.read(8), world.read(16)), (2, 9, 7));
    world.all_equal(&["d0", "d1"]);
}

/// I/O that waits longer than the hold time gets a path error, and hosts retry.
#[test]
fn hosts_of_a_frozen_volume_get_a_path_error() {
    let mut world = World::with(1);
    world.write(0, 1, 1);
    world.shelf.take("d0");
    let token = world.begin_write(0, 1, 2);
    assert_eq!(world.wait(token).status, Status::Gone);
    assert!(world.status().frozen_answers > 0);
    world.shelf.bring("d0");
    world.until_healthy();
    world.write(0, 1, 3);
    assert_eq!(world.read(0), 3);
}

/// A hanging replica is out after the deadline.
#[test]
fn a_replica_hangs() {
    let mut world = World::with(2);
    world.write(0, 8, 1);
    let hang = Fault::new(Action::Hang).on(&[Op::Write]);
    let hang = world.shelf.fault("d1").inject(hang).unwrap();
    let began = world.clock.now();
    world.write(0, 8, 2);
    let took = world.clock.now().since(began);
    assert!(
        took >= Duration::from_secs(8) && took < Duration::from_secs(12),
        "{took:?}"
    );
    world.write(8, 8, 3);
    world.shelf.fault("d1").remove(hang);
    world.shelf.fault("d1").resume_pending();
    world.until_healthy();
    assert_eq!((world.read(0), world.read(8)), (2, 3));
    world.all_equal(&["d0", "d1"]);
}

/// An unreadable block is served from another replica and written back. After too many of them the
/// replica is out.
#[test]
fn read_errors_are_repaired() {
    let mut world = World::with(2);
    world.write(100, 1, 5);
    for name in ["d0", "d1"] {
        let bad = Fault::new(Action::FailMedium).on(&[Op::Read]).times(1);
        let bad = Fault {
            range: Some((2048 + 100, 1)),
            ..bad
        };
        world.shelf.fault(name).inject(bad).unwrap();
        if name == "d0" {
            for _ in 0..4 {
                assert_eq!(world.read(100), 5);
            }
        }
    }
    world.until(|world| {
        world.has_event(|e| matches!(e, VolumeEventKind::ReadRepaired { lba: 100, .. }))
    });
    assert_eq!(world.state(), VolumeState::Healthy);
    world.shelf.fault("d1").clear();
    let bad = Fault::new(Action::FailMedium).on(&[Op::Read]);
    world.shelf.fault("d0").inject(bad).unwrap();
    for _ in 0..200 {
        assert_eq!(world.read(100), 5);
        world.pass(Duration::from_millis(20));
    }
    assert_eq!(world.state(), VolumeState::Degraded);
}

/// A verification detects an unreadable block that no host reads, and repairs it like a host's read
/// does, even in compare-only mode.
#[test]
fn a_verification_repairs_unreadable_blocks() {
    let mut world = World::with(3);
    world.write(0, 8, 1);
    let bad = Fault {
        range: Some((2048 + 3, 1)),
        ..Fault::new(Action::FailMedium).on(&[Op::Read]).times(1)
    };
    world.shelf.fault("d1").inject(bad).unwrap();
    world.run(Command::Verify { repair: false }).unwrap();
    world.until(|world| world.status().verify.is_some_and(|v| !v.running));
    let replica = world.status().replicas[1].id;
    world.until(|world| {
        world.has_event(|e| match e {
            VolumeEventKind::ReadRepaired {
                replica: of,
                lba,
                blocks,
            } => *of == replica && (*lba..*lba + u64::from(*blocks)).contains(&3),
            _ => false,
        })
    });
    assert_eq!(world.state(), VolumeState::Healthy);
    world.all_equal(&["d0", "d1", "d2"]);
}

/// A shortage of memory or descriptors is not counted as a failure of the replica.
#[test]
fn a_shortage_retires_no_replica() {
    let mut world = World::with(2);
    let short = Fault::new(Action::Fail(Status::Retry)).times(50);
    world.shelf.fault("d1").inject(short).unwrap();
    for lba in 0..20 {
        world.write(lba * 8, 8, 1);
    }
    assert_eq!(world.state(), VolumeState::Healthy);
    world.all_equal(&["d0", "d1"]);
}

/// A disk that fails during each resync is retried at growing intervals.
#[test]
fn a_replica_that_cannot_be_filled_is_left_alone_for_a_while() {
    let mut world = World::with(2);
    world.shelf.take("d1");
    world.write(5 * REGION, 8, 1);
    world.until(|world| world.state() == VolumeState::Degraded);
    world.shelf.bring("d1");
    let bad = Fault {
        range: Some((2048 + 5 * REGION, 1)),
        ..Fault::new(Action::FailMedium).on(&[Op::Write])
    };
    world.shelf.fault("d1").inject(bad).unwrap();
    world.pass(Duration::from_secs(60));
    let all = world.recorded.all();
    let stopped = |e: &&VolumeEventKind| matches!(e, VolumeEventKind::ResyncStopped { .. });
    let stops = all.iter().filter(stopped).count();
    assert!((3..14).contains(&stops), "{stops}");
    world.shelf.fault("d1").clear();
    world.until_healthy();
    world.all_equal(&["d0", "d1"]);
    // The replica was in sync in between, which resets the interval.
    world.shelf.take("d1");
    world.write(5 * REGION, 8, 2);
    world.shelf.bring("d1");
    let began = world.clock.now();
    world.until_healthy();
    let took = world.clock.now().since(began);
    assert!(took < Duration::from_secs(3), "{took:?}");
}

/// With `min_in_sync`, writes wait for a replica to return.
#[test]
fn writes_wait_for_enough_replicas() {
    let mut world = World::empty(2);
    let settings = Settings {
        min_in_sync: 2,
        ..Settings::default()
    };
    world.create(2, settings).unwrap();
    world.open().unwrap();
    world.write(0, 1, 1);
    world.shelf.take("d0");
    let token = world.begin_write(0, 1, 2);
    world.pass(Duration::from_secs(5));
    assert!(world.ended(token).is_none());
    assert_eq!(world.state(), VolumeState::WritesHeld);
    assert_eq!(world.read(8), 0);
    world.shelf.bring("d0");
    assert_eq!(world.wait(token).status, Status::Ok);
    world.all_equal(&["d0", "d1"]);
}

/// Unmap and write zeroes leave the replicas equal.
#[test]
fn deallocation_keeps_replicas_equal() {
    let mut world = World::with(2);
    world.write(0, 64, 1);
    for (op, lba) in [(Op::Unmap, 5), (Op::WriteZeroes, 30)] {
        let token = world.submit(Io::new(0, op, lba, 3));
        assert_eq!(world.wait(token).status, Status::Ok);
        assert_eq!((world.read(lba), world.read(lba + 3)), (0, 1));
    }
    world.all_equal(&["d0", "d1"]);
}

/// Hosts flush between a replica's own flush and its promotion: their data must be on every replica
/// that is in sync afterwards. In this test the store delays the promotion, and the replica accepts
/// no further flush.
#[test]
fn a_flush_during_promotion() {
    let mut world = World::with(2);
    world.write(0, 8, 1);
    world.shelf.take("d1");
    world.write(0, 8, 2);
    world.store.plan(Some(Box::new(|call: &Call| Plan {
        before: match call.request {
            StoreRequest::Swap => Duration::from_millis(300),
            _ => Duration::ZERO,
        },
        ..Plan::default()
    })));
    world.shelf.bring("d1");
    world.until(|world| world.has_event(|e| matches!(e, VolumeEventKind::ResyncStarted { .. })));
    world.pass(Duration::from_millis(100));
    assert!(matches!(
        world.replica_state("d1"),
        ReplicaState::Out { .. }
    ));
    let fail = Fault::new(Action::Fail(Status::DeviceError)).on(&[Op::Flush]);
    world.shelf.fault("d1").inject(fail).unwrap();
    let flush = world.submit(Io::new(0, Op::Flush, 0, 0));
    assert_eq!(world.wait(flush).status, Status::Ok);
    world.pass(Duration::from_millis(700));
    let state = world.replica_state("d1");
    assert_ne!(
        state,
        ReplicaState::InSync,
        "the replica lacks the flushed data"
    );
    world.shelf.fault("d1").clear();
    world.store.plan(None);
    world.until_healthy();
}

/// The last check before a replica's promotion finds writes missing. They must not have been
/// acknowledged, because the replica may soon be the only one. In this test a host leaves with a
/// write in flight, and another host writes to the same blocks.
#[test]
fn a_write_during_promotion() {
    let mut world = World::with(2);
    world.write(0, 8, 1);
    world.shelf.take("d1");
    world.write(0, 8, 2);
    world.store.plan(Some(Box::new(|call: &Call| Plan {
        before: match call.request {
            StoreRequest::Swap => Duration::from_millis(300),
            _ => Duration::ZERO,
        },
        ..Plan::default()
    })));
    world.shelf.bring("d1");
    world.until(|world| world.has_event(|e| matches!(e, VolumeEventKind::ResyncStarted { .. })));
    world.pass(Duration::from_millis(100));
    assert!(matches!(
        world.replica_state("d1"),
        ReplicaState::Out { .. }
    ));
    let hang = Fault::new(Action::Hang).on(&[Op::Write]).times(1);
    world.shelf.fault("d1").inject(hang).unwrap();
    let _never = world.begin_write(64, 8, 3);
    world.pass(Duration::from_millis(1));
    let volume = Arc::clone(world.handle.as_ref().unwrap().volume());
    world.lane = Some(volume.open(&world.pool).unwrap());
    world.ended.clear();
    world.write(0, 8, 4);
    assert!(matches!(
        world.replica_state("d1"),
        ReplicaState::Out { .. }
    ));
    world.until(|world| world.replica_state("d1") == ReplicaState::InSync);
    world.store.plan(None);
    world.shelf.take("d0");
    world.until(|world| world.replica_state("d0") != ReplicaState::InSync);
    assert_eq!(world.read(0), 4);
}

/// A device is removed while a lane has I/O in flight there, and is added again. Until that I/O
/// ends, the device is not copied to, whatever its new slot. Other devices do not wait for its old
/// slot.
#[test]
fn io_before_removal_delays_the_resync() {
    let mut world = World::with(3);
    world.add_disk("d3", super::rig::DISK_BLOCKS);
    world.write(0, 64, 1);
    let shared = Arc::clone(&world.handle.as_ref().unwrap().shared);
    let lane = shared.add_lane().unwrap();
    lane.outstanding[1].store(1, std::sync::atomic::Ordering::SeqCst);
    let (replica, force) = ("d1".into(), None);
    world.run(Command::Remove { replica, force }).unwrap();
    for device in ["d1", "d3"] {
        let (device, force) = (device.into(), true);
        world.run(Command::Add { device, force }).unwrap();
    }
    world.until(|world| world.replica_state("d3") == ReplicaState::InSync);
    world.pass(Duration::from_secs(30));
    let started = |e: &VolumeEventKind| matches!(e, VolumeEventKind::ResyncStarted { device, .. } if device.contains("d1"));
    assert!(
        !world.has_event(started),
        "I/O before its removal is still pending"
    );
    lane.outstanding[1].store(0, std::sync::atomic::Ordering::SeqCst);
    world.until_healthy();
    world.all_equal(&["d0", "d1", "d2", "d3"]);
}

/// The same with a hanging label write of the control: written after the new label, it would leave
/// labels of two replicas on the device.
#[test]
fn a_label_write_before_removal_is_waited_for() {
    let mut world = World::shared(2, 1);
    world.create(2, Settings::default()).unwrap();
    world.open().unwrap();
    world.write(0, 64, 1);
    world.shelf.reservations("d1").lock().stubborn = true;
    let hang = Fault {
        range: Some((0, 16)),
        ..Fault::new(Action::Hang).on(&[Op::Write])
    };
    let hang = world.shelf.fault("d1").inject(hang).unwrap();
    let settings = Box::new(Settings::default());
    world.run(Command::Set { settings }).unwrap();
    world.until(|world| matches!(world.replica_state("d1"), ReplicaState::Out { .. }));
    world.shelf.fault("d1").remove(hang);
    let (replica, force) = ("d1".into(), None);
    world.run(Command::Remove { replica, force }).unwrap();
    let add = || Command::Add {
        device: "d1".into(),
        force: true,
    };
    for _ in 0..3 {
        let refused = world.run(add()).unwrap_err();
        assert!(
            refused.to_string().contains("earlier incarnation"),
            "{refused}"
        );
        world.pass(Duration::from_secs(10));
    }
    assert_eq!(world.record().replicas.len(), 1);
    world.shelf.fault("d1").resume_pending();
    world.pass(Duration::from_millis(50));
    world.run(add()).unwrap();
    world.until_healthy();
    world.all_equal(&["d0", "d1"]);
    // The device has the contents of the new replica.
    world.crash();
    world.open().unwrap();
    assert_eq!(world.record().in_sync().count(), 2);
}

/// One replica is slow, the other is removed without an event: the slow one remains, because it has
/// all data, and the other may have lost data when it returns.
#[test]
fn a_slow_replica_outlives_a_removed_one() {
    let mut world = World::with(2);
    world.write(0, 8, 1);
    let hang = Fault::new(Action::Hang).on(&[Op::Write]);
    let hang = world.shelf.fault("d1").inject(hang).unwrap();
    let token = world.begin_write(0, 8, 2);
    world.pass(Duration::from_secs(6));
    world.shelf.remove("d0");
    world.until(|world| world.state() == VolumeState::Frozen);
    assert!(matches!(
        world.replica_state("d0"),
        ReplicaState::Out { .. }
    ));
    assert_eq!(world.replica_state("d1"), ReplicaState::InSync);
    world.shelf.fault("d1").remove(hang);
    world.shelf.fault("d1").resume_pending();
    let status = world.wait(token).status;
    assert!(matches!(status, Status::Ok | Status::Gone), "{status:?}");
    world.until(|world| world.state() == VolumeState::Degraded);
    world.write(8, 8, 3);
    assert_eq!(world.read(8), 3);
}

/// Goal: a holder of a shared store stops when the last reply is a lease old, whatever later calls
/// do. Method: loads that fail at once, and then ones without a reply.
#[test]
fn a_lease_ends_on_time() {
    for quick in 0..6 {
        let mut world = World::with(2);
        world.pass(Duration::from_millis(1500));
        let mut loads = 0;
        let plan = move |call: &Call| match call.request {
            StoreRequest::Load => {
                loads += 1;
                if loads <= quick {
                    Plan::outcome(Outcome::Refuse)
                } else {
                    Plan {
                        before: Duration::from_secs(60),
                        ..Plan::default()
                    }
                }
            }
            _ => Plan::default(),
        };
        world.store.plan(Some(Box::new(plan)));
        world.pass(Duration::from_millis(4050));
        assert_eq!(world.state(), VolumeState::StoreLost, "{quick} refusals");
        world.store.plan(None);
        world.until_healthy();
    }
}
