//! Tests of the choice of a replica for a read, and of reads that fail or are late.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use nacre_bdev::{Bdev, Done, Io, Layer, Limits, Op, Queue, Status};

use super::rig::*;
use crate::lane::replicas::choice::READ_STRIPE;
use crate::model::ReadPolicy;
use crate::shared::{Failure, Repair};
use crate::volume::Volume;

/// The address of the buffer of a device's last I/O.
fn memory(name: &str) -> *const u8 {
    tray(name, |tray| {
        tray.has.last().expect("something").1.data[0].as_ptr()
    })
}

/// A hanging replica does not block a read, and its device keeps the buffer that it may still write
/// to.
#[test]
fn a_late_read_goes_to_another_replica() {
    let mut r = rig(2);
    let read = r.read(0);
    assert_eq!(r.count("A"), 1);
    r.pass(DEADLINE + Duration::from_millis(200));
    assert_eq!((r.count("B"), tray("A", |tray| tray.aborted)), (1, 1));
    assert_eq!(r.news().reports.len(), 1);
    assert_eq!(r.news().reports[0].why, Failure::Deadline);
    let kept = memory("A");
    assert_ne!(memory("B"), kept);
    r.answer("B", Status::Ok);
    assert_eq!(r.take(), [(read, Status::Ok)]);
    assert_eq!(r.shared.outstanding(0), 1, "it must not return yet");
    assert!(!r.lanes[0].is_settled() && r.lanes[0].inflight() == 0);
    let all: Vec<_> = std::iter::from_fn(|| r.pool.acquire(4096)).collect();
    assert!(all.iter().all(|buf| buf.as_ptr() != kept));
    drop(all);
    r.answer("A", Status::Aborted);
    assert_eq!(r.news().reports.len(), 1, "reported once");
    r.clean();
    // The same with a replica that leaves meanwhile.
    let read = r.read(0);
    let kept = memory("A");
    r.retire(0);
    r.turn();
    assert_eq!(r.count("B"), 1);
    assert_ne!(memory("B"), kept);
    r.answer("A", Status::Ok);
    r.turn();
    r.none();
    r.answer("B", Status::Ok);
    assert_eq!(
        r.take(),
        [(read, Status::Ok)],
        "what A read is not believed"
    );
    r.clean();
}

/// Each read is counted once, for the replica that had it, whatever happened to it meanwhile.
#[test]
fn reads_are_counted_for_the_replica_that_ran_them() {
    let mut r = rig(2);
    let counted = |r: &Rig| {
        [0, 1].map(|slot| {
            let stats = r.layers[slot].stats().snapshot();
            (stats.op(Op::Read).ops, stats.op(Op::Read).errors)
        })
    };
    let read = r.read(0);
    r.answer("A", Status::Ok);
    assert_eq!(r.take(), [(read, Status::Ok)]);
    assert_eq!(counted(&r), [(1, 0), (0, 0)]);
    // The replica's queue was not polled for a while, and the view changes before the read ends.
    r.pass(Duration::from_secs(2));
    let read = r.read(0);
    r.publish(|_| {});
    r.turn();
    r.answer("A", Status::Ok);
    assert_eq!(r.take(), [(read, Status::Ok)]);
    assert_eq!(counted(&r), [(2, 0), (0, 0)]);
    let latency = r.layers[0].stats().snapshot().op(Op::Read).latency_max_ns;
    assert!(latency < 1_000_000_000, "{latency} ns");
    // The first cannot read it.
    let read = r.read(0);
    r.answer("A", Status::ReadError);
    r.answer("B", Status::Ok);
    assert_eq!(r.take(), [(read, Status::Ok)]);
    assert_eq!(counted(&r), [(2, 1), (1, 0)]);
    r.clean();
    // It completes after another has.
    let read = r.read(0);
    r.pass(DEADLINE + Duration::from_millis(200));
    r.answer("B", Status::Ok);
    assert_eq!(r.take(), [(read, Status::Ok)]);
    assert_eq!(counted(&r), [(2, 1), (2, 0)]);
    r.answer("A", Status::Aborted);
    assert_eq!(counted(&r), [(2, 2), (2, 0)]);
    r.clean();
}

/// Without another buffer, a late read waits for one, or for the buffer that the late replica has.
#[test]
fn a_late_read_without_another_buffer() {
    for back in [false, true] {
        let mut r = rig(2);
        let read = r.read(0);
        let kept = memory("A");
        let all: Vec<_> = std::iter::from_fn(|| r.pool.acquire(4096)).collect();
        r.pass(DEADLINE + Duration::from_millis(500));
        assert_eq!(r.count("B"), 0);
        if !back {
            drop(all)
        } else {
            r.answer("A", Status::Aborted)
        }
        r.pass(Duration::from_millis(50));
        assert_eq!((r.count("B"), memory("B") == kept), (1, back));
        r.answer("B", Status::Ok);
        assert_eq!(r.take(), [(read, Status::Ok)]);
        r.answer_all("A", Status::Ok);
        r.clean();
    }
}

/// Without another replica, a late completion still counts, and the host does not wait forever.
#[test]
fn a_late_read_of_the_last_replica() {
    let mut r = rig(1);
    let read = r.read(0);
    r.pass(DEADLINE + Duration::from_millis(200));
    r.none();
    r.answer("A", Status::Ok);
    assert_eq!(r.take(), [(read, Status::Ok)]);
    let read = r.read(0);
    r.pass(DEADLINE + HOLD + Duration::from_millis(500));
    assert_eq!(r.take(), [(read, Status::Gone)]);
    assert_eq!(r.shared.outstanding(0), 1);
    r.answer("A", Status::Ok);
    r.clean();
    // A host that aborts gets its completion at once.
    let read = r.read(0);
    r.pass(DEADLINE + Duration::from_millis(200));
    assert!(r.lanes[0].abort(read));
    r.turn();
    assert_eq!(r.take(), [(read, Status::Aborted)]);
    r.answer("A", Status::Ok);
    r.clean();
}

/// A part of a large read comes back in another buffer than the rest: the host sees one read.
#[test]
fn a_large_read_of_which_a_part_is_late() {
    let mut r = rig(2);
    r.publish(|view| view.read_policy = ReadPolicy::RoundRobin);
    r.lanes.clear();
    let limits = Limits {
        max_blocks: 8,
        ..r.volume.limits()
    };
    let volume = Volume::new(&record(BLOCKS, 2), Arc::clone(&r.shared), limits);
    let mut queue = Layer::new(volume as Arc<dyn Bdev>)
        .open_queue(&r.pool)
        .expect("opens");
    let mut done = Done::with_capacity(4);
    let fill = |byte: u8| {
        tray("B", |tray| {
            let io = &mut tray.has.last_mut().expect("something").1;
            io.data[0].bytes_mut().expect("its own").fill(byte);
        });
    };
    queue
        .submit(Io::new(1, Op::Read, 0, 16).with(r.buf(16)))
        .expect("room");
    assert_eq!((r.has("A")[0].2, r.has("B")[0].2), (0, 8));
    fill(2);
    r.answer("B", Status::Ok);
    for _ in 0..150 {
        r.now = r.now + Duration::from_millis(10);
        queue.poll(r.now, &mut done);
    }
    assert_eq!((done.len(), r.has("B")[0].2), (0, 0));
    fill(1);
    r.answer("B", Status::Ok);
    queue.poll(r.now, &mut done);
    let ended = done.drain().next().expect("it ended");
    assert_eq!((ended.token, ended.status), (1, Status::Ok));
    let data: Vec<u8> = ended
        .data
        .iter()
        .flat_map(|buf| buf.iter().copied())
        .collect();
    assert_eq!((ended.data.len(), data.len()), (1, 8192));
    assert!(data[..4096].iter().all(|b| *b == 1) && data[4096..].iter().all(|b| *b == 2));
    r.answer("A", Status::Ok);
    queue.poll(r.now, &mut done);
    assert_eq!(r.shared.outstanding(0), 0);
}

#[test]
fn a_failed_read_goes_to_another_replica() {
    let mut r = rig(3);
    let read = r.read(0);
    r.answer("A", Status::ReadError);
    r.answer("B", Status::Gone);
    r.answer("C", Status::Ok);
    assert_eq!(r.take(), [(read, Status::Ok)]);
    let repair = Repair {
        slot: 0,
        incarnation: 1,
        lba: 0,
        blocks: 8,
    };
    assert_eq!(r.news().repairs, [repair], "B's blocks may be good");
    assert_eq!(r.news().reports.len(), 2);
    r.turn();
    assert_eq!(r.shared.totals.reads_moved.load(Ordering::Relaxed), 2);
    let read = r.read(0);
    for name in ["A", "B", "C"] {
        r.answer(name, Status::ReadError);
    }
    r.none();
    r.decide_failures();
    r.turn();
    assert_eq!(
        r.take(),
        [(read, Status::ReadError)],
        "no replica can read it"
    );
    r.clean();
}

#[test]
fn reads_are_pinned_while_replicas_are_reconciled() {
    let mut r = rig(3);
    r.shared.missing[0].insert(1);
    r.shared.missing[1].insert(1);
    r.read(REGION);
    r.read(REGION - 4);
    assert_eq!((r.count("A"), r.count("B"), r.count("C")), (0, 0, 2));
    r.read(0);
    assert_eq!(r.count("A"), 1);
    r.retire(2);
    r.turn();
    r.answer_all("C", Status::Aborted);
    r.turn();
    assert_eq!((r.count("A"), r.count("B")), (3, 0), "always the same one");
    r.answer_all("A", Status::Ok);
    assert_eq!(r.take().len(), 3);
    r.clean();
}

/// Blocks that the pinned replica cannot read are not read from a replica that may differ: the
/// region is made equal first, or the read fails.
#[test]
fn a_pinned_replica_cannot_read() {
    for readable in [true, false] {
        let mut r = rig(3);
        for slot in [1, 2] {
            r.shared.missing[slot].insert(1);
        }
        let read = r.read(REGION + 8);
        r.answer("A", Status::ReadError);
        assert_eq!((r.count("B"), r.count("C")), (0, 0));
        assert!(r.news().urgent.is_empty(), "not before it is decided");
        r.decide_failures();
        r.turn();
        assert_eq!(r.news().urgent, [1]);
        r.publish(|_| {});
        r.pass(Duration::from_millis(100));
        assert_eq!(r.news().urgent, [1], "once");
        assert_eq!((r.count("A"), r.count("B"), r.count("C")), (0, 0, 0));
        if readable {
            r.shared.missing[1].remove(1);
            r.shared.one_tried();
            r.turn();
            assert_eq!((r.count("A"), r.count("B")), (0, 1));
            r.answer("B", Status::Ok);
            assert_eq!(r.take(), [(read, Status::Ok)]);
        } else {
            r.shared.one_tried();
            r.turn();
            assert_eq!(r.take(), [(read, Status::ReadError)]);
        }
        r.clean();
    }
}

/// An unreachable pinned replica is decided first, too: then another one is pinned. If none
/// completes, the host does not wait forever.
#[test]
fn a_pinned_replica_cannot_be_reached() {
    let mut r = rig(2);
    r.shared.missing[1].insert(0);
    let read = r.read(0);
    r.answer("A", Status::Gone);
    r.pass(Duration::from_millis(50));
    assert_eq!(r.count("B"), 0);
    r.shared.missing[1].remove(0);
    r.retire(0);
    r.turn();
    r.answer("B", Status::Ok);
    assert_eq!(r.take(), [(read, Status::Ok)]);
    r.clean();
    drop(r);
    let mut r = rig(2);
    r.shared.missing[1].insert(0);
    let read = r.read(0);
    r.answer("A", Status::ReadError);
    r.decide_failures();
    r.pass(HOLD + Duration::from_millis(500));
    assert_eq!(r.take(), [(read, Status::Gone)]);
    r.clean();
}

#[test]
fn policies() {
    use ReadPolicy::*;
    let mut r = rig(3);
    r.publish(|view| view.replicas[0].as_mut().expect("there").local = false);
    let counts = |r: &Rig| ["A", "B", "C"].map(|name| r.count(name));
    for (policy, expected) in [
        // It is relieved when it has four more than the other.
        (LocalFirst, [0, 5, 1]),
        (LeastOutstanding, [4, 5, 3]),
        (RoundRobin, [6, 7, 5]),
    ] {
        r.publish(|view| view.read_policy = policy);
        for _ in 0..6 {
            r.read(0);
        }
        assert_eq!(counts(&r), expected, "{policy:?}");
    }
    for name in ["A", "B", "C"] {
        r.answer_all(name, Status::Ok);
    }
    assert_eq!(r.take().len(), 18);
    r.clean();
}

/// Reads of one stripe go to the same replica: the others need not cache it.
#[test]
fn a_stripe_is_read_from_one_replica() {
    let mut r = rig(2);
    let stripe = (1 << READ_STRIPE) / 512;
    for _ in 0..3 {
        for (lba, name) in [
            (0, "A"),
            (stripe - 1, "A"),
            (stripe, "B"),
            (2 * stripe, "A"),
        ] {
            r.read(lba);
            assert_eq!(r.count(name), 1, "block {lba}");
            r.answer(name, Status::Ok);
            assert_eq!(r.take().len(), 1);
        }
    }
    // The remaining one has all of it.
    r.retire(0);
    r.read(0);
    r.answer("B", Status::Ok);
    assert_eq!(r.take().len(), 1);
    r.clean();
}

/// An idle replica is polled when its queue has work of its own, also while another is busy; the
/// lane reports that it needs to be polled.
#[test]
fn an_idle_replica_is_polled() {
    let mut r = rig(2);
    r.turn();
    assert!(r.lanes[0].is_settled());
    for busy in [false, true] {
        let read = busy.then(|| r.read(0));
        let polled = || tray("B", |tray| tray.polled);
        let before = polled();
        r.pass(Duration::from_millis(200));
        assert_eq!(polled(), before, "it is not polled for nothing");
        tray("B", |tray| tray.restless = true);
        assert!(!r.lanes[0].is_settled());
        r.pass(Duration::from_millis(200));
        assert!(polled() > before);
        tray("B", |tray| tray.restless = false);
        if let Some(read) = read {
            r.answer("A", Status::Ok);
            assert_eq!(r.take(), [(read, Status::Ok)]);
        }
        assert!(r.lanes[0].is_settled());
    }
    r.clean();
}
