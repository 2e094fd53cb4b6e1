//! Tests of synchronous I/O: it needs no request, and is used only if no other state matters.

use std::sync::atomic::Ordering;

use nacre_bdev::{Op, Queue, Status};
use nacre_reactor::{Idle, Nanos};

use super::rig::{REGION, Rig, replica, rig, tray};
use crate::stripes::{Acquired, CONTROL};
use crate::view::{Mode, Role};

/// Every replica completes synchronously.
fn prompt(replicas: usize) -> Rig {
    let r = rig(replicas).all_dirty();
    for name in &["A", "B", "C"][..replicas] {
        tray(name, |tray| tray.prompt = Some(Status::Ok));
    }
    r
}

impl Rig {
    fn run_sync_on(&mut self, lane: usize, op: Op, lba: u64) -> Option<Status> {
        let mut io = self.io(op, lba, 8);
        let before = io.lba;
        let status = self.lanes[lane].run_sync(&mut io, &mut None);
        assert_eq!((io.lba, io.data.len()), (before, 1), "it is as it was");
        status
    }

    fn run_sync(&mut self, op: Op, lba: u64) -> Option<Status> {
        self.run_sync_on(0, op, lba)
    }

    /// Neither a read nor a write happens, and no replica is asked.
    fn no_sync_io(&mut self, why: &str) {
        self.no_sync_write(why);
        assert_eq!(self.run_sync(Op::Read, 0), None, "{why}");
        assert_eq!(did("A"), [], "{why}");
    }

    fn no_sync_write(&mut self, why: &str) {
        assert_eq!(self.run_sync(Op::Write, 0), None, "{why}");
        assert_eq!(did("A"), [], "{why}");
    }
}

fn did(name: &str) -> Vec<(Op, u64)> {
    tray(name, |tray| std::mem::take(&mut tray.did))
}

/// Every replica gets a write, one of them a read; both are counted, and nothing remains of them.
#[test]
fn reads_and_writes() {
    let mut r = prompt(3);
    assert_eq!(r.run_sync(Op::Write, 16), Some(Status::Ok));
    for name in ["A", "B", "C"] {
        assert_eq!(did(name), [(Op::Write, 16)]);
    }
    assert_eq!(r.run_sync(Op::Read, 16), Some(Status::Ok));
    assert_eq!(did("A"), [(Op::Read, 16)]);
    assert!(did("B").is_empty() && did("C").is_empty());
    assert_eq!((r.lanes[0].inflight(), r.lanes[0].requests.end()), (0, 0));
    let polled = || ["A", "B", "C"].map(|name| tray(name, |tray| tray.polled));
    let before = polled();
    (0..3).for_each(|_| r.turn());
    assert_eq!(polled(), before.map(|n| n + 1), "it was used");
    let totals = &r.shared.totals;
    let count = |of: &[std::sync::atomic::AtomicU64]| -> Vec<u64> {
        of[..3].iter().map(|n| n.load(Ordering::Relaxed)).collect()
    };
    assert_eq!(count(&totals.writes), [1, 1, 1]);
    assert_eq!(count(&totals.reads), [1, 0, 0]);
    // No ranges beyond the end, and no operations except reads and writes.
    let end = r.volume.blocks();
    assert_eq!(r.run_sync(Op::Write, end - 7), None);
    assert!(r.run_sync(Op::Write, end - 8).is_some());
    let mut flush = r.io(Op::Flush, 0, 0);
    assert!(r.lanes[0].run_sync(&mut flush, &mut None).is_none());
    r.clean();
}

/// Code that waits until a replica's slot is unused waits for the next turn, and that turn leaves
/// the slot.
#[test]
fn slots_are_left_with_the_next_turn() {
    let mut r = prompt(2);
    let outstanding = |r: &Rig| [0, 1].map(|slot| r.shared.outstanding(slot));
    assert!(r.run_sync(Op::Read, 0).is_some() && r.run_sync(Op::Read, 8).is_some());
    assert_eq!(outstanding(&r), [1, 0]);
    assert!(r.run_sync(Op::Write, 0).is_some());
    assert_eq!(outstanding(&r), [1, 1]);
    assert!(!r.lanes[0].is_settled());
    assert_eq!(r.lanes[0].arm(Nanos(1)), Idle::Busy);
    r.lanes[0].disarm();
    // The replica leaves meanwhile: later I/O does not reach it, although its slot was entered.
    did("A");
    did("B");
    r.publish(|view| view.replicas[1] = None);
    r.no_sync_write("another view");
    assert_eq!(outstanding(&r), [1, 1]);
    r.turn();
    assert_eq!(outstanding(&r), [0, 0]);
    assert!(r.lanes[0].is_settled());
    assert!(r.run_sync(Op::Write, 0).is_some());
    assert_eq!((outstanding(&r), did("B").len()), ([1, 0], 0));
    // A dropped lane leaves nothing behind.
    r.lanes.clear();
    assert_eq!(outstanding(&r), [0, 0]);
}

/// No replica is written to before the log has the region. The synchronous attempt notified the
/// control, and does not wait for the region itself.
#[test]
fn the_log_precedes_a_write_to_a_clean_region() {
    let mut r = rig(2);
    for name in ["A", "B"] {
        tray(name, |tray| tray.prompt = Some(Status::Ok));
    }
    r.no_sync_write("a clean region");
    assert_eq!(r.news().wanted, [0]);
    let write = r.write(0);
    r.turn();
    assert_eq!((r.count("A"), r.news().wanted.len()), (0, 1));
    assert_eq!(r.run_sync(Op::Write, REGION), None);
    r.shared.regions.set_dirty(0);
    r.shared.ring_all();
    r.turn();
    r.answer("A", Status::Ok);
    r.answer("B", Status::Ok);
    assert_eq!(r.take(), [(write, Status::Ok)]);
    assert_eq!(r.run_sync(Op::Write, 0), Some(Status::Ok));
    r.clean();
}

/// A write that one replica has and the other has not is not completed: the other is copied to
/// again, whatever the result of the write.
#[test]
fn half_done() {
    for (second, reached) in [(Some(Status::WriteError), 1), (None, 0)] {
        let mut r = prompt(2);
        tray("B", |tray| tray.prompt = second);
        assert_eq!(r.run_sync(Op::Write, REGION - 4), None, "{second:?}");
        assert_eq!((did("A").len(), did("B").len()), (1, reached));
        let misses = |slot: usize| {
            let misses = &r.shared.missing[slot];
            [0, 1, 2].map(|region| misses.contains(region))
        };
        assert_eq!((misses(0), misses(1)), ([false; 3], [true, true, false]));
        assert_eq!(
            r.run_sync(Op::Read, 0),
            None,
            "a check of the replica is due"
        );
        // It takes the usual path.
        r.write(REGION - 4);
        r.answer("A", Status::Ok);
        r.answer("B", Status::Ok);
        assert_eq!(r.take().len(), 1);
        r.clean();
    }
    // The first replica did not begin, so no replica has any part of it; or it failed, and may
    // have.
    for (first, unequal) in [(None, false), (Some(Status::WriteError), true)] {
        let mut r = prompt(2);
        tray("A", |tray| tray.prompt = first);
        assert_eq!(r.run_sync(Op::Write, 0), None);
        assert!(did("B").is_empty());
        assert_eq!(r.shared.missing[1].contains(0), unequal, "{first:?}");
        r.clean();
    }
}

/// A failed read continues on the usual path: another replica may have the data.
#[test]
fn a_read_that_fails() {
    let mut r = prompt(2);
    tray("A", |tray| tray.prompt = Some(Status::ReadError));
    assert_eq!(r.run_sync(Op::Read, 0), None);
    let read = r.read(0);
    r.answer("A", Status::ReadError);
    r.answer("B", Status::Ok);
    assert_eq!(r.take(), [(read, Status::Ok)]);
    r.clean();
}

#[test]
fn earlier_requests_come_first() {
    let mut r = prompt(2);
    r.add_lane();
    // A write of this lane to the same blocks; the same stripe alone does not matter.
    let write = r.write(0);
    r.no_sync_write("an overlapping write");
    assert_eq!(r.run_sync(Op::Write, 8), Some(Status::Ok));
    assert_eq!(
        r.run_sync_on(1, Op::Write, 8),
        None,
        "another lane's stripe"
    );
    did("A");
    // A request that waits for the first: later ones do not overtake it.
    let waits = r.write(0);
    r.turn();
    assert_eq!(r.run_sync(Op::Write, 8), None);
    for _ in 0..2 {
        r.answer("A", Status::Ok);
        r.answer("B", Status::Ok);
    }
    assert_eq!(r.take(), [(write, Status::Ok), (waits, Status::Ok)]);
    assert_eq!(r.run_sync_on(1, Op::Write, 8), Some(Status::Ok));
    did("A");
    // The control copies there.
    let taken = r.shared.stripes.acquire(CONTROL, 0, 8);
    assert_eq!(taken, Acquired::Fresh);
    r.no_sync_write("the control's stripe");
    assert_eq!(r.run_sync(Op::Read, 0), Some(Status::Ok));
    r.shared.stripes.release(0, 8);
    r.clean();
}

#[test]
fn no_sync_io_while_a_replica_is_not_in_sync() {
    let mut r = prompt(2);
    // The lane has not taken over the new view yet.
    r.publish(|_| {});
    r.no_sync_io("another view");
    r.turn();
    assert!(r.run_sync(Op::Write, 0).is_some() && r.run_sync(Op::Read, 0).is_some());
    for mode in [Mode::Frozen, Mode::Suspended, Mode::FailIo] {
        did("A");
        r.publish(|view| view.mode = mode);
        r.turn();
        r.no_sync_io("the mode");
    }
    r.publish(|view| view.mode = Mode::Serving);
    r.turn();
    assert!(r.run_sync(Op::Write, 0).is_some());
    // A replica is not read where it lacks data.
    r.shared.missing[1].insert(3);
    assert_eq!(r.run_sync(Op::Read, 0), None);
    r.shared.missing[1].remove(3);
    did("A");
    r.publish(|view| view.min_in_sync = 3);
    r.turn();
    r.no_sync_write("too few in sync");
    assert!(r.run_sync(Op::Read, 0).is_some());
    did("A");
    let layer = r.layers[1].clone();
    r.publish(|view| {
        view.min_in_sync = 1;
        view.replicas[1] = Some(replica(&layer, Role::Syncing));
    });
    r.turn();
    r.no_sync_write("a resync of one replica");
    r.publish(|view| view.replicas[1] = Some(replica(&layer, Role::InSync)));
    r.turn();
    // The replica may have lost data.
    r.scripts[0].losses.fetch_add(1, Ordering::SeqCst);
    assert_eq!(r.run_sync(Op::Write, 0), None);
    assert_eq!(r.run_sync(Op::Read, 0), None);
    assert!(r.shared.missing[1].contains(0));
    r.clean();
}
