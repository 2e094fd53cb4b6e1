//! Members that fail, are late, forget, or return.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use nacre_bdev::{Bdev, Done, Io, Layer, Limits, Op, Queue, Status};

use super::rig::*;
use crate::shared::{Failure, Repair};
use crate::view::{MemberView, Mode, Role};
use crate::volume::Volume;

#[test]
fn a_failure_is_judged_before_the_write_is_done() {
    let mut r = rig(2).all_dirty();
    let write = r.write(0);
    r.answer("B", Status::Gone);
    r.answer("A", Status::Ok);
    r.none();
    let report = r.news().reports[0];
    assert_eq!((report.slot, report.lba, report.op), (1, 0, Op::Write));
    assert_eq!(report.why, Failure::Status(Status::Gone));
    r.publish(|_| {});
    r.turn();
    r.none();
    let behind = r.write(4);
    r.turn();
    assert_eq!(r.count("A"), 0, "it keeps its stripes");
    r.retire(1);
    r.turn();
    assert_eq!(r.take(), [(write, Status::Ok)]);
    r.turn();
    assert_eq!((r.count("A"), r.count("B")), (1, 0));
    r.answer("A", Status::Ok);
    assert_eq!(r.take(), [(behind, Status::Ok)]);
    r.clean();
}

/// A member that stays although it failed and others did not must have the write all the same.
#[test]
fn who_stays_gets_it_again() {
    for role in [Role::InSync, Role::Syncing] {
        let mut r = rig(2).all_dirty();
        r.publish(|view| view.members[1].as_mut().expect("there").role = role);
        let write = r.write(0);
        r.answer("B", Status::WriteError);
        r.answer("A", Status::Ok);
        r.judge();
        r.turn();
        r.none();
        r.pass(Duration::from_millis(20));
        assert_eq!(r.count("B"), 1, "{role:?}");
        r.answer("B", Status::Ok);
        assert_eq!(r.take(), [(write, Status::Ok)]);
        r.clean();
    }
}

#[test]
fn a_syncing_member_that_fails_is_judged_too() {
    let mut r = rig(2).all_dirty();
    r.publish(|view| view.members[1].as_mut().expect("there").role = Role::Syncing);
    let write = r.write(0);
    r.answer("A", Status::Ok);
    r.answer("B", Status::DeviceError);
    r.none();
    r.retire(1);
    r.turn();
    assert_eq!(r.take(), [(write, Status::Ok)]);
    r.clean();
}

#[test]
fn the_last_one_fails_on_the_medium() {
    let mut r = rig(2).all_dirty();
    r.publish(|view| view.members[1].as_mut().expect("there").role = Role::Syncing);
    let write = r.write(0);
    r.answer("B", Status::Ok);
    r.answer("A", Status::WriteError);
    r.none();
    r.judge();
    r.turn();
    assert_eq!(r.take(), [(write, Status::WriteError)]);
    assert!(
        r.shared.needs[1].contains(0),
        "it has what A has not: copied again"
    );
    let read = r.read(64);
    r.answer("A", Status::ReadError);
    r.none();
    r.judge();
    r.turn();
    assert_eq!(r.take(), [(read, Status::ReadError)]);
    r.clean();
}

#[test]
fn the_last_one_cannot_be_reached() {
    let mut r = rig(1).all_dirty();
    let (write, read) = (r.write(0), r.read(64));
    r.answer("A", Status::Gone);
    r.answer("A", Status::Gone);
    r.publish(|view| view.mode = Mode::Frozen);
    r.judge();
    r.pass(Duration::from_millis(100));
    r.none();
    assert!(r.shared.stripes.all_free(), "nobody is kept out meanwhile");
    r.publish(|view| view.mode = Mode::Serving);
    r.turn();
    assert_eq!(r.count("A"), 2);
    r.answer_all("A", Status::Ok);
    assert_eq!(r.take(), [(write, Status::Ok), (read, Status::Ok)]);
    r.clean();
}

/// Without a change of mode it is tried again now and then, and not for ever.
#[test]
fn the_last_one_fails_again_and_again() {
    let mut r = rig(1).all_dirty();
    let write = r.write(0);
    let since = r.now;
    let mut tries = 0;
    while r.ended.is_empty() {
        tries += r.count("A");
        r.answer_all("A", Status::Gone);
        r.judge();
        r.pass(Duration::from_millis(10));
    }
    assert_eq!(r.take(), [(write, Status::Gone)]);
    assert!(
        (10..=HOLD.as_millis() as usize / 20).contains(&tries),
        "{tries}"
    );
    assert!(r.now.since(since) >= HOLD);
    r.answer_all("A", Status::Gone);
    r.judge();
    r.clean();
}

#[test]
fn retry_is_not_a_failure() {
    let mut r = rig(2).all_dirty();
    let (write, read) = (r.write(0), r.read(64));
    for _ in 0..3 {
        r.answer_all("A", Status::Retry);
        assert_eq!(r.count("A"), 0, "not at once");
        r.pass(Duration::from_millis(10));
        assert!(r.count("A") > 0);
    }
    r.answer_all("A", Status::Ok);
    r.answer_all("B", Status::Ok);
    assert_eq!(r.take(), [(read, Status::Ok), (write, Status::Ok)]);
    assert!(r.news().reports.is_empty());
    r.clean();
}

#[test]
fn a_late_member_is_aborted_and_reported() {
    let mut r = rig(2).all_dirty();
    let write = r.write(0);
    r.answer("A", Status::Ok);
    r.pass(DEADLINE - Duration::from_millis(50));
    assert!(r.news().reports.is_empty());
    r.pass(Duration::from_millis(250));
    assert_eq!(r.news().reports.len(), 1);
    assert_eq!(r.news().reports[0].why, Failure::Deadline);
    assert_eq!(tray("B", |tray| tray.aborted), 1);
    r.none();
    r.retire(1);
    r.turn();
    assert_eq!(r.take(), [(write, Status::Ok)], "without it");
    assert_eq!(r.shared.outstanding(1), 1, "it must not return yet");
    assert!(!r.lanes[0].is_settled() && r.lanes[0].inflight() == 0);
    let next = r.write(0);
    r.answer("A", Status::Ok);
    assert_eq!(r.take(), [(next, Status::Ok)]);
    r.answer("B", Status::Ok);
    r.clean();
    assert_eq!(tray("B", |tray| tray.open), 0);
}

/// It answers after it was reported and before it was judged: what it says counts if it may stay.
#[test]
fn late_but_done() {
    let mut r = rig(1).all_dirty();
    let write = r.write(0);
    r.pass(DEADLINE + Duration::from_millis(200));
    r.judge();
    r.turn();
    r.none();
    r.answer("A", Status::Ok);
    assert_eq!(r.take(), [(write, Status::Ok)]);
    let write = r.write(0);
    r.pass(DEADLINE + Duration::from_millis(200));
    r.answer("A", Status::Ok);
    r.none();
    r.judge();
    r.turn();
    assert_eq!(r.take(), [(write, Status::Ok)]);
    r.clean();
}

/// Where what a device has at last is in memory.
fn memory(name: &str) -> *const u8 {
    tray(name, |tray| {
        tray.has.last().expect("something").1.data[0].as_ptr()
    })
}

/// A member that hangs does not keep a read, and what its device may still write to is nobody else's.
#[test]
fn a_late_read_goes_to_another_member() {
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
    // And one whose member leaves meanwhile.
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

/// Without a buffer it waits for one, or for that which the late one has.
#[test]
fn a_late_read_without_another_buffer() {
    for back in [false, true] {
        let mut r = rig(2);
        let read = r.read(0);
        let kept = memory("A");
        let all: Vec<_> = std::iter::from_fn(|| r.pool.acquire(4096)).collect();
        r.pass(DEADLINE + Duration::from_millis(500));
        assert_eq!(r.count("B"), 0);
        match back {
            false => drop(all),
            true => r.answer("A", Status::Aborted),
        }
        r.pass(Duration::from_millis(50));
        assert_eq!((r.count("B"), memory("B") == kept), (1, back));
        r.answer("B", Status::Ok);
        assert_eq!(r.take(), [(read, Status::Ok)]);
        r.answer_all("A", Status::Ok);
        r.clean();
    }
}

/// With nobody else its answer counts, however late; and the host does not wait for ever.
#[test]
fn a_late_read_of_the_last_member() {
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
    // A host that gives up has its answer at once.
    let read = r.read(0);
    r.pass(DEADLINE + Duration::from_millis(200));
    assert!(r.lanes[0].abort(read));
    r.turn();
    assert_eq!(r.take(), [(read, Status::Aborted)]);
    r.answer("A", Status::Ok);
    r.clean();
}

/// A part of a large read comes back in another buffer than the rest: to the host it is one.
#[test]
fn a_large_read_of_which_a_part_is_late() {
    let mut r = rig(2);
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
fn another_member_reads_what_one_cannot() {
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
    r.judge();
    r.turn();
    assert_eq!(r.take(), [(read, Status::ReadError)], "nobody can");
    r.clean();
}

#[test]
fn what_forgot_is_not_believed() {
    let mut r = rig(2);
    let read = r.read(0);
    r.scripts[0].losses.store(1, Ordering::SeqCst);
    r.answer("A", Status::Ok);
    r.none();
    assert_eq!(r.news().reports[0].why, Failure::Loss);
    r.answer("B", Status::Ok);
    assert_eq!(r.take(), [(read, Status::Ok)]);
    let mut r = r.all_dirty();
    let (write, flush) = (r.write(0), r.flush());
    r.answer_all("B", Status::Ok);
    r.answer_all("A", Status::Ok);
    r.none();
    r.retire(0);
    r.turn();
    assert_eq!(r.take_sorted(), [(write, Status::Ok), (flush, Status::Ok)]);
    r.clean();
}

#[test]
fn a_queue_that_cannot_be_opened_is_a_failure() {
    let script = Script::new("B");
    script.shut.store(true, Ordering::SeqCst);
    let mut r = Rig::of([Script::new("A"), script].into_iter()).all_dirty();
    let write = r.write(0);
    assert_eq!(r.news().reports[0].why, Failure::Open);
    r.answer("A", Status::Ok);
    r.none();
    r.judge();
    r.turn();
    assert_eq!(
        r.news().reports.len(),
        2,
        "it stays, so it must have it: tried again"
    );
    r.scripts[1].shut.store(false, Ordering::SeqCst);
    r.judge();
    r.pass(Duration::from_millis(20));
    r.answer("B", Status::Ok);
    assert_eq!(r.take(), [(write, Status::Ok)]);
    r.clean();
}

/// All that a write went to has left, and others are in sync: it starts over there.
#[test]
fn nobody_who_has_it_counts() {
    let mut r = rig(2).all_dirty();
    let layer = r.layers[1].clone();
    r.publish(|view| view.members[1] = None);
    let write = r.write(0);
    r.publish(|view| {
        view.members[0] = None;
        view.members[1] = Some(MemberView {
            incarnation: 2,
            ..member(&layer, Role::InSync)
        });
    });
    r.pass(Duration::from_millis(50));
    r.none();
    assert_eq!(r.count("B"), 0, "A has the data");
    r.answer("A", Status::Ok);
    r.pass(Duration::from_millis(50));
    r.answer("B", Status::Ok);
    assert_eq!(r.take(), [(write, Status::Ok)]);
    r.clean();
}

#[test]
fn reads_are_pinned_while_members_are_reconciled() {
    let mut r = rig(3);
    r.shared.needs[0].insert(1);
    r.shared.needs[1].insert(1);
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

/// What the pinned one cannot read is not read from one that may have something else there: it is made equal
/// first, or nobody can read it.
#[test]
fn a_pinned_member_cannot_read() {
    for readable in [true, false] {
        let mut r = rig(3);
        for slot in [1, 2] {
            r.shared.needs[slot].insert(1);
        }
        let read = r.read(REGION + 8);
        r.answer("A", Status::ReadError);
        assert_eq!((r.count("B"), r.count("C")), (0, 0));
        assert!(r.news().urgent.is_empty(), "not before it is judged");
        r.judge();
        r.turn();
        assert_eq!(r.news().urgent, [1]);
        r.publish(|_| {});
        r.pass(Duration::from_millis(100));
        assert_eq!(r.news().urgent, [1], "once");
        assert_eq!((r.count("A"), r.count("B"), r.count("C")), (0, 0, 0));
        if readable {
            r.shared.needs[1].remove(1);
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

/// One that cannot be reached is judged first, too: then there is another pin. Where nobody answers the host does not
/// wait for ever.
#[test]
fn a_pinned_member_cannot_be_reached() {
    let mut r = rig(2);
    r.shared.needs[1].insert(0);
    let read = r.read(0);
    r.answer("A", Status::Gone);
    r.pass(Duration::from_millis(50));
    assert_eq!(r.count("B"), 0);
    r.shared.needs[1].remove(0);
    r.retire(0);
    r.turn();
    r.answer("B", Status::Ok);
    assert_eq!(r.take(), [(read, Status::Ok)]);
    r.clean();
    drop(r);
    let mut r = rig(2);
    r.shared.needs[1].insert(0);
    let read = r.read(0);
    r.answer("A", Status::ReadError);
    r.judge();
    r.pass(HOLD + Duration::from_millis(500));
    assert_eq!(r.take(), [(read, Status::Gone)]);
    r.clean();
}

#[test]
fn policies() {
    use crate::model::ReadPolicy::*;
    let mut r = rig(3);
    r.publish(|view| view.members[0].as_mut().expect("there").local = false);
    let counts = |r: &Rig| ["A", "B", "C"].map(|name| r.count(name));
    for (policy, expected) in [
        (LocalFirst, [0, 3, 3]),
        (LeastOutstanding, [4, 4, 4]),
        (RoundRobin, [6, 6, 6]),
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

/// The layer above copies through a buffer that is kept for it. A member that left still has that buffer
/// when the next copy begins: it takes another.
#[test]
fn copies_go_on_while_a_member_that_left_has_their_buffer() {
    let mut r = rig(2).all_dirty();
    r.lanes.clear();
    let mut queue = Layer::new(Arc::clone(&r.volume) as Arc<dyn Bdev>)
        .open_queue(&r.pool)
        .expect("opens");
    let mut done = Done::with_capacity(4);
    for token in [1, 2] {
        queue
            .submit(Io::new(token, Op::Copy, 1000, 8).source(0))
            .expect("room");
        tray("A", |tray| {
            assert!(tray.has[0].1.data[0].is_unshared(), "read into what B has");
        });
        r.answer("A", Status::Ok);
        queue.poll(r.now, &mut done);
        r.answer("A", Status::Ok);
        r.retire(1);
        (0..3).for_each(|_| _ = queue.poll(r.now, &mut done));
        let ended: Vec<_> = done.drain().map(|c| (c.token, c.status)).collect();
        assert_eq!(ended, [(token, Status::Ok)]);
        assert_eq!(r.count("B"), 1, "it has not answered");
    }
}
