//! Tests of the volume's modes, of waiting and aborted requests, of sleep, and of closing a lane.

use std::sync::atomic::Ordering;
use std::time::Duration;

use nacre_bdev::{Op, Queue, Status};
use nacre_reactor::Idle;
use rustix::event::{PollFd, PollFlags, poll};

use super::rig::*;
use crate::view::Mode;

#[test]
fn frozen_until_thawed_or_until_the_hold_time() {
    let mut r = rig(1).all_dirty();
    r.publish(|view| view.mode = Mode::Frozen);
    let (write, read, flush) = (r.write(0), r.read(0), r.flush());
    r.pass(Duration::from_millis(500));
    r.none();
    r.publish(|view| view.mode = Mode::Serving);
    r.turn();
    r.answer_all("A", Status::Ok);
    assert_eq!(
        r.take(),
        [write, read, flush].map(|token| (token, Status::Ok))
    );
    r.publish(|view| {
        view.mode = Mode::Frozen;
        view.replicas[0] = None;
    });
    let (write, read) = (r.write(0), r.read(0));
    r.pass(HOLD - Duration::from_millis(100));
    r.none();
    r.pass(Duration::from_millis(500));
    assert_eq!(
        r.take_sorted(),
        [write, read].map(|token| (token, Status::Gone))
    );
    assert_eq!(r.shared.totals.frozen_answers.load(Ordering::Relaxed), 2);
    r.clean();
}

#[test]
fn suspended_acknowledges_nothing() {
    let mut r = rig(2).all_dirty();
    let (write, read, failed) = (r.write(0), r.read(64), r.write(128));
    r.publish(|view| view.mode = Mode::Suspended);
    r.answer("A", Status::Ok);
    r.answer("A", Status::Ok);
    r.answer("A", Status::Ok);
    r.answer("B", Status::Ok);
    r.answer("B", Status::Gone);
    let parked = r.write(256);
    r.pass(Duration::from_millis(500));
    r.none();
    r.publish(|view| view.mode = Mode::Serving);
    r.turn();
    assert_eq!(r.take(), [(write, Status::Ok)]);
    r.retire(1);
    r.turn();
    assert_eq!(r.take(), [(failed, Status::Ok)]);
    r.answer_all("A", Status::Ok);
    assert_eq!(
        r.take(),
        [(read, Status::Ok), (parked, Status::Ok)],
        "read again"
    );
    // For good: not forever.
    r.answer("B", Status::Aborted);
    let back = r.layers[1].clone();
    r.publish(|view| view.replicas[1] = Some(replica(&back, crate::view::Role::InSync)));
    let write = r.write(0);
    r.publish(|view| view.mode = Mode::Suspended);
    r.answer("A", Status::Ok);
    r.answer("B", Status::Ok);
    r.pass(HOLD + Duration::from_millis(300));
    assert_eq!(r.take(), [(write, Status::Gone)]);
    r.clean();
}

/// A write that waits for a judgement is completed in the end, as the store may be unavailable for
/// long. So is every request that waits for that write, on this core and on others.
#[test]
fn requests_behind_a_waiting_write_end_in_time() {
    let mut r = rig(2).all_dirty();
    r.add_lane();
    let write = r.write(0);
    r.answer("A", Status::Ok);
    r.answer("B", Status::Gone);
    let (same, other) = (r.write(4), r.write_on(1, 0));
    r.pass(HOLD - Duration::from_millis(100));
    r.none();
    r.pass(Duration::from_millis(600));
    assert_eq!(
        r.take_sorted(),
        [write, same, other].map(|token| (token, Status::Gone))
    );
    let again = r.write(0);
    r.pass(HOLD + Duration::from_millis(500));
    assert_eq!(r.take(), [(again, Status::Gone)]);
    assert_eq!(r.count("A"), 0, "it never began");
    r.retire(1);
    r.clean();
}

#[test]
fn writes_that_wait_for_the_log_end_in_time() {
    let mut r = rig(2);
    let write = r.write(0);
    r.pass(HOLD + Duration::from_millis(500));
    assert_eq!(r.take(), [(write, Status::Gone)]);
    r.clean();
}

#[test]
fn io_fails_by_operator_command() {
    let mut r = rig(2).all_dirty();
    r.publish(|view| view.mode = Mode::Frozen);
    let parked = r.write(0);
    r.publish(|view| view.mode = Mode::FailIo);
    let (write, read) = (r.write(0), r.read(0));
    r.turn();
    let ended = r.take_sorted();
    let errors = [
        (parked, Status::WriteError),
        (write, Status::WriteError),
        (read, Status::ReadError),
    ];
    assert_eq!(ended, errors);
    r.publish(|view| view.mode = Mode::Serving);
    let write = r.write(0);
    r.answer("A", Status::Ok);
    r.answer("B", Status::Gone);
    r.publish(|view| view.mode = Mode::FailIo);
    r.turn();
    assert_eq!(
        r.take(),
        [(write, Status::WriteError)],
        "without a judgement"
    );
    assert!(
        !r.shared.stripes.all_free(),
        "B may differ until it is decided"
    );
    r.retire(1);
    r.clean();
}

#[test]
fn closed() {
    let mut r = rig(2).all_dirty();
    let (write, read, held) = (r.write(0), r.read(64), r.write(128));
    r.answer_all("B", Status::Ok);
    r.publish(|view| view.mode = Mode::Closed);
    r.answer_all("A", Status::Ok);
    assert_eq!(
        r.take(),
        [write, read, held].map(|token| (token, Status::Gone))
    );
    r.clean();
}

#[test]
fn too_few_in_sync() {
    let mut r = rig(2).all_dirty();
    let held = r.write(0);
    r.answer("A", Status::Ok);
    r.publish(|view| view.min_in_sync = 2);
    r.retire(1);
    let (parked, read) = (r.write(64), r.read(0));
    r.turn();
    assert_eq!(r.count("A"), 1, "reads go on");
    r.answer("A", Status::Ok);
    assert_eq!(r.take(), [(read, Status::Ok)]);
    r.publish(|view| view.min_in_sync = 1);
    r.turn();
    assert_eq!(r.take(), [(held, Status::Ok)]);
    r.answer("A", Status::Ok);
    assert_eq!(r.take(), [(parked, Status::Ok)]);
    r.answer("B", Status::Ok);
    r.clean();
}

#[test]
fn aborts_before_the_start() {
    let mut r = rig(2);
    let log = r.write(0);
    r.shared.regions.set_dirty(1);
    let one = r.write(REGION);
    let overlap = r.write(REGION + 4);
    let behind = r.write(REGION + 10);
    r.publish(|view| view.mode = Mode::Frozen);
    let frozen = r.read(0);
    for token in [log, overlap, frozen] {
        assert!(r.lanes[0].abort(token), "{token}");
        assert!(!r.lanes[0].abort(token), "once");
    }
    r.publish(|view| view.mode = Mode::Serving);
    r.turn();
    assert_eq!(
        r.take(),
        [log, overlap, frozen].map(|token| (token, Status::Aborted))
    );
    assert_eq!(r.count("A"), 2, "nothing is ahead of the last any more");
    r.answer_all("A", Status::Ok);
    r.answer_all("B", Status::Ok);
    assert_eq!(r.take(), [(one, Status::Ok), (behind, Status::Ok)]);
    assert!(!r.lanes[0].abort(one), "it is over");
    r.clean();
}

#[test]
fn aborts_of_requests_at_one_replica() {
    for op in [Op::Read, Op::Write, Op::Flush] {
        for accepts in [true, false] {
            let mut r = rig(1).all_dirty();
            tray("A", |tray| tray.aborts = accepts);
            let token = r.submit_on(0, op, 0, 8);
            assert_eq!(r.lanes[0].abort(token), accepts, "{op:?}");
            if !accepts {
                r.answer("A", Status::Ok);
            }
            r.turn();
            let expected = if accepts { Status::Aborted } else { Status::Ok };
            assert_eq!(r.take(), [(token, expected)]);
            assert!(r.news().reports.is_empty());
            // While the replica is busy.
            tray("A", |tray| tray.busy = true);
            let token = r.submit_on(0, op, 0, 8);
            assert!(r.lanes[0].abort(token));
            r.turn();
            assert_eq!(r.take(), [(token, Status::Aborted)]);
            r.clean();
        }
    }
}

/// Replicas stay equal: none of several aborts a write, but the host does not wait for a judgement.
#[test]
fn aborts_of_requests_at_several_replicas() {
    let mut r = rig(2).all_dirty();
    tray("A", |tray| tray.aborts = true);
    let write = r.write(0);
    assert!(!r.lanes[0].abort(write));
    r.answer("A", Status::Ok);
    r.answer("B", Status::Ok);
    assert_eq!(r.take(), [(write, Status::Ok)]);
    for before in [true, false] {
        let write = r.write(0);
        r.answer("A", Status::Ok);
        if before {
            assert!(!r.lanes[0].abort(write));
        }
        r.answer("B", Status::Gone);
        if !before {
            r.none();
            assert!(r.lanes[0].abort(write));
        }
        r.turn();
        assert_eq!(r.take(), [(write, Status::Aborted)]);
        assert_eq!(r.lanes[0].inflight(), 0);
        let behind = r.write(0);
        r.turn();
        assert_eq!(r.count("A"), 0, "it keeps its stripes until B is decided");
        let back = r.view.replicas[1].clone();
        r.retire(1);
        r.pass(Duration::from_millis(10));
        r.answer("A", Status::Ok);
        assert_eq!(r.take(), [(behind, Status::Ok)]);
        r.clean();
        r.publish(|view| view.replicas[1] = back);
        r.decide_failures();
        r.turn();
    }
}

/// A flush that one replica aborted is not done, whatever the others return.
#[test]
fn an_aborted_flush_is_not_done() {
    let mut r = rig(2);
    tray("A", |tray| tray.aborts = true);
    let flush = r.flush();
    assert!(r.lanes[0].abort(flush));
    r.turn();
    r.none();
    r.answer("B", Status::Ok);
    assert_eq!(r.take(), [(flush, Status::Aborted)]);
    r.clean();
}

/// No judgement comes (the store is unreachable): hosts do not wait forever, and the replicas'
/// blocks stay locked.
#[test]
fn no_verdict_arrives() {
    let mut r = rig(2).all_dirty();
    let write = r.write(0);
    r.answer("A", Status::Ok);
    r.answer("B", Status::Gone);
    r.pass(HOLD + Duration::from_millis(300));
    assert_eq!(r.take(), [(write, Status::Gone)]);
    assert!(!r.shared.stripes.all_free());
    r.retire(1);
    r.clean();
}

fn is_rung(r: &Rig) -> bool {
    let set = r.lanes[0].replicas.sleepers();
    let mut fds = [PollFd::new(set, PollFlags::IN)];
    let zero = rustix::event::Timespec::default();
    poll(&mut fds, Some(&zero)).expect("polls") == 1
}

/// Every event that lets a request proceed rings, or is seen when the lane is armed.
#[test]
fn sleep() {
    let mut r = rig(1);
    r.turn();
    assert_eq!(r.lanes[0].arm(r.now), Idle::Quiet);
    assert!(!is_rung(&r));
    r.publish(|_| {});
    assert!(is_rung(&r) && !r.lanes[0].is_settled());
    assert_eq!(r.lanes[0].arm(r.now), Idle::Busy);
    r.turn();
    let write = r.write(0);
    r.turn();
    assert!(matches!(r.lanes[0].arm(r.now), Idle::Until(_)), "upkeep");
    assert!(!is_rung(&r));
    r.shared.regions.set_dirty(0);
    assert_eq!(r.lanes[0].arm(r.now), Idle::Busy, "set before, rung later");
    r.shared.ring_all();
    assert!(is_rung(&r));
    r.turn();
    tray("A", |tray| tray.busy = true);
    let second = r.write(64);
    r.answer("A", Status::Retry);
    assert_eq!(
        r.lanes[0].arm(r.now),
        Idle::Busy,
        "no room, and nothing there that would end"
    );
    tray("A", |tray| tray.busy = false);
    r.pass(Duration::from_millis(10));
    r.answer_all("A", Status::Ok);
    assert_eq!(r.take_sorted(), [(write, Status::Ok), (second, Status::Ok)]);
    r.clean();
}

/// An idle lane closes the queue of a replica that left.
#[test]
fn an_idle_lane_closes_its_queue() {
    let mut r = rig(2);
    assert_eq!(tray("B", |tray| tray.open), 1);
    r.retire(1);
    assert!(!r.lanes[0].is_settled());
    r.turn();
    assert_eq!(tray("B", |tray| tray.open), 0);
    r.clean();
}

#[test]
fn dropped_with_everything_in_flight() {
    let mut r = rig(2).all_dirty();
    r.add_lane();
    r.shared.stripes.acquire(crate::stripes::CONTROL, 4096, 8);
    r.write_on(1, 0);
    r.write_on(1, 4);
    r.write_on(1, 4096);
    r.submit_on(1, Op::Read, 0, 8);
    r.submit_on(1, Op::Flush, 0, 0);
    r.answer("A", Status::Ok);
    r.answer("B", Status::Gone);
    drop(r.lanes.pop());
    r.shared.stripes.release(4096, 8);
    assert!(r.shared.missing[1].contains(0), "A has it, B has not");
    assert!(!r.shared.missing[0].contains(0) && r.shared.missing[1].count() == 1);
    assert_eq!(r.shared.lanes().len(), 1);
    assert_eq!((r.count("A"), tray("B", |tray| tray.open)), (0, 1));
    r.clean();
}
