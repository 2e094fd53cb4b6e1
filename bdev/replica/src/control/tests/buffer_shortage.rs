//! Tests of the control's I/O while hosts' I/O occupies all buffers of the pool.

use std::time::Duration;

use nacre_bdev::{Io, Op, Status};
use nacre_hugepages::Buf;

use super::rig::{REGION, World};
use crate::handle::{Command, VolumeError, VolumeEventKind, VolumeState};
use crate::model::{ReplicaState, Settings};

/// Acquires all buffers of at least `len` bytes.
fn all(world: &World, len: usize) -> Vec<Buf> {
    std::iter::from_fn(|| world.pool.acquire(len)).collect()
}

fn outs(world: &World) -> usize {
    let all = world.recorded.all().into_iter();
    all.filter(|e| matches!(e, VolumeEventKind::ReplicaOut { .. }))
        .count()
}

/// A resync waits for a buffer without delaying hosts: it holds no locks while no buffer is free,
/// and no replica is marked bad for that.
#[test]
fn copying_waits_without_delaying_hosts() {
    let mut world = World::empty(2);
    let settings = Settings {
        resync_bytes_per_s: 1 << 20,
        ..Settings::default()
    };
    world.create(2, settings).unwrap();
    world.open().unwrap();
    world.shelf.take("d1");
    for region in 0..4 {
        world.write(region * REGION, 64, 2);
    }
    world.shelf.bring("d1");
    world.until(|world| world.status().replicas[1].resync.is_some());
    // Acquired only now, because attaching a device needs buffers, too.
    let held = all(&world, 1 << 19);
    for fill in 3..60 {
        let began = world.clock.now();
        world.write(u64::from(fill) % 4 * REGION, 8, fill);
        assert!(world.clock.now().since(began) < Duration::from_millis(500));
        world.pass(Duration::from_millis(100));
    }
    assert_eq!((world.state(), outs(&world)), (VolumeState::Degraded, 1));
    assert!(world.status().replicas[1].attached);
    drop(held);
    world.until_healthy();
    world.all_equal(&["d0", "d1"]);
    assert_eq!(outs(&world), 1);
}

/// A verification waits in the same manner, and in the end skips no range.
#[test]
fn verification_waits_without_delaying_hosts() {
    let mut world = World::with(2);
    world.write(0, 64, 1);
    world.scribble("d1", 40, 9);
    let held = all(&world, 1 << 19);
    world.run(Command::Verify { repair: true }).unwrap();
    for fill in 3..30 {
        let began = world.clock.now();
        world.write(0, 8, fill);
        assert!(world.clock.now().since(began) < Duration::from_millis(500));
        world.pass(Duration::from_millis(100));
    }
    assert_eq!(world.status().verify.unwrap().compared_bytes, 0);
    drop(held);
    world.until(|world| world.status().verify.is_some_and(|v| !v.running));
    let verify = world.status().verify.unwrap();
    assert_eq!(
        (verify.compared_bytes, verify.repaired_blocks),
        (8 << 20, 1)
    );
    assert_eq!(outs(&world), 0);
    world.all_equal(&["d0", "d1"]);
}

/// Writes that wait for a decision keep their buffers, so the decision must not need one of them.
#[test]
fn decisions_need_no_free_buffer() {
    let mut world = World::with(3);
    world.write(0, 8, 1);
    let data = [world.buf(1, 2), world.buf(1, 3), world.buf(1, 4)];
    let mut held = all(&world, 1);
    for (at, data) in data.into_iter().enumerate() {
        if at > 0 {
            world.shelf.take(&format!("d{at}"));
        }
        // A region that is not in the log yet.
        let lba = (at as u64 + 1) * REGION;
        let token = world.submit(Io::new(0, Op::Write, lba, 1).with(data));
        let ended = world.wait(token);
        assert_eq!(ended.status, Status::Ok);
        // Keep the buffers, so that none becomes free.
        held.extend(ended.data);
    }
    for name in ["d1", "d2"] {
        assert!(matches!(
            world.replica_state(name),
            ReplicaState::Out { .. }
        ));
    }
    drop(held);
    assert_eq!(world.read(3 * REGION), 4);
    for name in ["d1", "d2"] {
        world.shelf.bring(name);
    }
    world.until_healthy();
    world.all_equal(&["d0", "d1", "d2"]);
}

/// At opening, a replica that cannot be checked for lack of memory does not count as absent,
/// because it has missed no write. If memory stays short, the opening fails with a reason that
/// suggests a retry.
#[test]
fn opening_counts_no_replica_as_absent() {
    let mut world = World::shared(2, 1);
    world.create(2, Settings::default()).unwrap();
    world.open().unwrap();
    world.write(0, 8, 1);
    world.crash();
    let short = |world: &World, names: &[&str], short: bool| {
        for name in names {
            world.shelf.reservations(name).lock().short = short;
        }
    };
    for names in [&["d0"][..], &["d1"], &["d0", "d1"]] {
        short(&world, names, true);
        let record = world.record();
        let began = world.clock.now();
        let refused = world.open().unwrap_err();
        assert!(matches!(refused, VolumeError::Short { .. }), "{refused}");
        let took = world.clock.now().since(began);
        assert!(took < Duration::from_secs(8), "{took:?}");
        assert_eq!(world.record(), record, "nothing was decided");
        world.crash();
        short(&world, names, false);
    }
    // The shortage ends.
    short(&world, &["d1"], true);
    let opening = world.begin_open();
    world.lane = None;
    for _ in 0..100 {
        world.pass(Duration::from_millis(20));
    }
    assert!(!opening.is_finished());
    short(&world, &["d1"], false);
    let handle = world.core.block_on(opening).unwrap().unwrap();
    world.opened(handle);
    world.until_healthy();
    assert_eq!(world.record().in_sync().count(), 2);
    let whole = |e: &VolumeEventKind| {
        matches!(
            e,
            VolumeEventKind::Opened {
                epoch: 2,
                degraded: false,
                ..
            }
        )
    };
    assert!(world.has_event(whole));
    assert_eq!(world.read(0), 1);
}

/// The same for a new replica, and for one that an operator chooses.
#[test]
fn no_memory_to_open_a_new_replica() {
    let mut world = World::shared(2, 1);
    world.create(1, Settings::default()).unwrap();
    world.open().unwrap();
    let short = |world: &World, short: bool| {
        for name in ["d0", "d1"] {
            world.shelf.reservations(name).lock().short = short;
        }
    };
    short(&world, true);
    let add = || Command::Add {
        device: "d1".into(),
        force: true,
    };
    let refused = world.run(add()).unwrap_err();
    assert!(matches!(refused, VolumeError::Short { .. }), "{refused}");
    assert_eq!(world.record().replicas.len(), 1);
    short(&world, false);
    world.run(add()).unwrap();
    world.until_healthy();
    world.crash();
    short(&world, true);
    let refused = world.force_in_sync("d0", "vol").unwrap_err();
    assert!(matches!(refused, VolumeError::Short { .. }), "{refused}");
}
