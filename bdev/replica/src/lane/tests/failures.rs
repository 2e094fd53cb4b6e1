//! Tests of replicas that fail, are late, lose data, or return.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use nacre_bdev::{Bdev, Done, Io, Layer, Op, Queue, Status};

use super::rig::*;
use crate::shared::Failure;
use crate::view::{Mode, ReplicaView, Role};

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

/// A replica that stays although it failed and others did not must still get the write.
#[test]
fn a_failed_replica_that_stays_gets_the_write_again() {
    for role in [Role::InSync, Role::Syncing] {
        let mut r = rig(2).all_dirty();
        r.publish(|view| view.replicas[1].as_mut().expect("there").role = role);
        let write = r.write(0);
        r.answer("B", Status::WriteError);
        r.answer("A", Status::Ok);
        r.decide_failures();
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
fn a_syncing_replica_that_fails_is_judged_too() {
    let mut r = rig(2).all_dirty();
    r.publish(|view| view.replicas[1].as_mut().expect("there").role = Role::Syncing);
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
    r.publish(|view| view.replicas[1].as_mut().expect("there").role = Role::Syncing);
    let write = r.write(0);
    r.answer("B", Status::Ok);
    r.answer("A", Status::WriteError);
    r.none();
    r.decide_failures();
    r.turn();
    assert_eq!(r.take(), [(write, Status::WriteError)]);
    assert!(
        r.shared.missing[1].contains(0),
        "it has what A has not: copied again"
    );
    let read = r.read(64);
    r.answer("A", Status::ReadError);
    r.none();
    r.decide_failures();
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
    r.decide_failures();
    r.pass(Duration::from_millis(100));
    r.none();
    assert!(
        r.shared.stripes.all_free(),
        "no other lane is blocked meanwhile"
    );
    r.publish(|view| view.mode = Mode::Serving);
    r.turn();
    assert_eq!(r.count("A"), 2);
    r.answer_all("A", Status::Ok);
    assert_eq!(r.take(), [(write, Status::Ok), (read, Status::Ok)]);
    r.clean();
}

/// Without a change of mode it is retried now and then, and not forever.
#[test]
fn the_last_one_fails_again_and_again() {
    let mut r = rig(1).all_dirty();
    let write = r.write(0);
    let since = r.now;
    let mut tries = 0;
    while r.ended.is_empty() {
        tries += r.count("A");
        r.answer_all("A", Status::Gone);
        r.decide_failures();
        r.pass(Duration::from_millis(10));
    }
    assert_eq!(r.take(), [(write, Status::Gone)]);
    assert!(
        (10..=HOLD.as_millis() as usize / 20).contains(&tries),
        "{tries}"
    );
    assert!(r.now.since(since) >= HOLD);
    r.answer_all("A", Status::Gone);
    r.decide_failures();
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

/// `Retry` without end: the replica is not given up, and no request waits forever. Reads go to
/// another replica, writes end with a path error, and succeed as soon as the replica accepts them.
#[test]
fn retry_without_end() {
    let mut r = rig(2).all_dirty();
    let (write, read, flush) = (r.write(0), r.read(64), r.flush());
    let mut ended = Vec::new();
    for _ in 0..HOLD.as_millis() / 10 + 50 {
        r.answer_all("A", Status::Retry);
        r.answer_all("B", Status::Ok);
        r.pass(Duration::from_millis(10));
        ended.extend(r.take());
    }
    assert_eq!(ended.remove(0), (read, Status::Ok));
    ended.sort_unstable_by_key(|(token, _)| *token);
    assert_eq!(ended, [(write, Status::Gone), (flush, Status::Gone)]);
    assert!(r.news().reports.is_empty());
    // Alone it keeps reads, too, for that long.
    r.retire(1);
    let read = r.read(64);
    for _ in 0..HOLD.as_millis() / 10 + 50 {
        r.answer_all("A", Status::Retry);
        r.pass(Duration::from_millis(10));
    }
    assert_eq!(r.take(), [(read, Status::Gone)]);
    assert!(r.news().reports.is_empty());
    r.answer_all("A", Status::Ok);
    r.pass(Duration::from_millis(10));
    r.answer_all("A", Status::Ok);
    r.clean();
}

#[test]
fn a_late_replica_is_aborted_and_reported() {
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

/// It completes after the report and before the judgement: its status counts if it may stay.
#[test]
fn late_but_done() {
    let mut r = rig(1).all_dirty();
    let write = r.write(0);
    r.pass(DEADLINE + Duration::from_millis(200));
    r.decide_failures();
    r.turn();
    r.none();
    r.answer("A", Status::Ok);
    assert_eq!(r.take(), [(write, Status::Ok)]);
    let write = r.write(0);
    r.pass(DEADLINE + Duration::from_millis(200));
    r.answer("A", Status::Ok);
    r.none();
    r.decide_failures();
    r.turn();
    assert_eq!(r.take(), [(write, Status::Ok)]);
    r.clean();
}

#[test]
fn a_replica_that_lost_data_is_not_trusted() {
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
    r.decide_failures();
    r.turn();
    assert_eq!(
        r.news().reports.len(),
        2,
        "it stays, so it must have it: tried again"
    );
    r.scripts[1].shut.store(false, Ordering::SeqCst);
    r.decide_failures();
    r.pass(Duration::from_millis(20));
    r.answer("B", Status::Ok);
    assert_eq!(r.take(), [(write, Status::Ok)]);
    r.clean();
}

/// A replica is not given up because this core has no memory for a queue to it: I/O waits for
/// memory.
#[test]
fn no_memory_for_a_queue_is_no_failure() {
    let script = Script::new("B");
    script.short.store(true, Ordering::SeqCst);
    let mut r = Rig::of([Script::new("A"), script].into_iter()).all_dirty();
    r.publish(|view| view.replicas[0].as_mut().expect("there").local = false);
    let (wrote, was_read) = (r.write(0), r.read(64));
    r.pass(Duration::from_millis(200));
    assert_eq!((r.count("A"), r.count("B")), (0, 0));
    assert!(r.news().reports.is_empty());
    assert!(
        r.shared.stripes.all_free(),
        "no other lane is blocked meanwhile"
    );
    r.scripts[1].short.store(false, Ordering::SeqCst);
    r.pass(Duration::from_millis(50));
    assert_eq!((r.count("A"), r.count("B")), (1, 2));
    r.answer_all("A", Status::Ok);
    r.answer_all("B", Status::Ok);
    assert_eq!(
        r.take_sorted(),
        [(wrote, Status::Ok), (was_read, Status::Ok)]
    );
    r.clean();
}

/// Nor for lack of a descriptor, or because other cores have all queues that the device grants.
#[test]
fn no_descriptor_for_a_queue_is_no_failure() {
    use rustix::io::Errno;
    for errno in [Errno::MFILE, Errno::NFILE, Errno::BUSY] {
        let mut scripts = [Script::new("A"), Script::new("B")];
        for script in &mut scripts {
            script.errno.store(errno.raw_os_error(), Ordering::SeqCst);
        }
        let mut r = Rig::of(scripts.into_iter()).all_dirty();
        let (wrote, was_read) = (r.write(0), r.read(64));
        r.pass(HOLD / 2);
        r.none();
        assert!(r.news().reports.is_empty(), "{errno}");
        assert!(
            r.shared.stripes.all_free(),
            "no other lane is blocked meanwhile"
        );
        for script in &r.scripts {
            script.errno.store(0, Ordering::SeqCst);
        }
        r.pass(Duration::from_millis(50));
        r.answer_all("A", Status::Ok);
        r.answer_all("B", Status::Ok);
        assert_eq!(
            r.take_sorted(),
            [(wrote, Status::Ok), (was_read, Status::Ok)]
        );
        r.clean();
    }
}

/// Nor when the queue could not be opened for another reason, the replica stays, and then memory is
/// short.
#[test]
fn no_memory_when_a_replica_is_tried_again() {
    let script = Script::new("B");
    script.shut.store(true, Ordering::SeqCst);
    let mut r = Rig::of([Script::new("A"), script].into_iter()).all_dirty();
    let write = r.write(0);
    r.answer("A", Status::Ok);
    assert_eq!(r.news().reports[0].why, Failure::Open);
    r.scripts[1].shut.store(false, Ordering::SeqCst);
    r.scripts[1].short.store(true, Ordering::SeqCst);
    r.decide_failures();
    r.pass(HOLD / 2);
    assert_eq!(r.news().reports.len(), 1, "no memory is no failure");
    assert_eq!(r.count("B"), 0);
    r.none();
    assert!(!r.shared.stripes.all_free(), "A has it, and B has not");
    r.scripts[1].short.store(false, Ordering::SeqCst);
    r.pass(DEADLINE);
    r.answer("B", Status::Ok);
    assert_eq!(r.take(), [(write, Status::Ok)]);
    r.clean();
}

/// All replicas of a write have left, and others are in sync: it starts over there.
#[test]
fn a_write_restarts_when_all_its_replicas_left() {
    let mut r = rig(2).all_dirty();
    let layer = r.layers[1].clone();
    r.publish(|view| view.replicas[1] = None);
    let write = r.write(0);
    r.publish(|view| {
        view.replicas[0] = None;
        view.replicas[1] = Some(ReplicaView {
            incarnation: 2,
            ..replica(&layer, Role::InSync)
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

/// The layer above copies through a buffer that is reserved for it. A replica that left still has
/// that buffer when the next copy begins: the copy takes another.
#[test]
fn copies_continue_while_a_former_replica_has_their_buffer() {
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
