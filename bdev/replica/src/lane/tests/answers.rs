//! Tests of the lease check where answers leave a lane.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use nacre_bdev::{Op, Queue, Status};
use nacre_reactor::Idle;

use super::rig::{HOLD, Rig, TestLease, rig, tray};
use crate::lane::DEPTH;
use crate::view::Mode;

fn leased(replicas: usize) -> (Rig, Arc<TestLease>) {
    let mut r = rig(replicas).all_dirty();
    let lease = TestLease::new();
    r.publish(|view| view.lease = Some(Arc::clone(&lease) as _));
    r.turn();
    (r, lease)
}

impl Rig {
    /// Reads at `lba`; the replica completes the read at once.
    fn answered_read(&mut self, lba: u64) -> u64 {
        let read = self.read(lba);
        self.answer("A", Status::Ok);
        read
    }
}

/// The lease is checked once per poll with answers, after the devices were polled, and not at all
/// in other polls.
#[test]
fn one_check_per_poll_after_the_collection() {
    let (mut r, lease) = leased(1);
    let (first, second) = (r.read(0), r.read(8));
    r.turn();
    assert_eq!(lease.asked(), 0);
    let polled = tray("A", |tray| tray.polled);
    let later = polled + 1;
    *lease.good.lock() = Box::new(move || tray("A", |tray| tray.polled) == later);
    tray("A", |tray| {
        let all = std::mem::take(&mut tray.has).into_iter();
        tray.answers
            .extend(all.map(|(id, io)| (id, io.complete(Status::Ok))));
    });
    r.turn();
    assert_eq!(r.take(), [(first, Status::Ok), (second, Status::Ok)]);
    assert_eq!(lease.asked(), 1);
    r.clean();
}

/// Successes of reads, writes and flushes wait for the lease and count as in flight; errors leave.
#[test]
fn successes_wait_for_the_lease() {
    let (mut r, lease) = leased(1);
    lease.set(false);
    let read = r.answered_read(0);
    let write = r.write(0);
    r.answer("A", Status::Ok);
    let flush = r.flush();
    r.answer("A", Status::Ok);
    r.none();
    assert_eq!(r.lanes[0].inflight(), 3);
    assert!(!r.lanes[0].is_settled() && r.shared.confirmations.is_holding());
    let failed = r.write(16);
    r.answer("A", Status::WriteError);
    r.decide_failures();
    r.turn();
    assert_eq!(r.take(), [(failed, Status::WriteError)]);
    assert!(matches!(r.lanes[0].arm(r.now), Idle::Until(_)));
    r.lanes[0].disarm();
    r.turn();
    r.none();
    lease.set(true);
    r.turn();
    let all = [read, write, flush].map(|token| (token, Status::Ok));
    assert_eq!(r.take_sorted(), all);
    assert!(!r.shared.confirmations.is_holding());
    r.clean();
}

/// Only a round of confirmation that began after an answer was collected lets it leave. The control
/// is woken when a lane begins to hold answers.
#[test]
fn confirmations_cover_earlier_answers() {
    let (mut r, lease) = leased(1);
    let woken = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&woken);
    r.shared.on_news(Some(Box::new(move || {
        count.fetch_add(1, Ordering::Relaxed);
    })));
    lease.set(false);
    let first = r.answered_read(0);
    assert_eq!(woken.load(Ordering::Relaxed), 1);
    let round = r.shared.confirmations.begin();
    let second = r.answered_read(8);
    assert_eq!(woken.load(Ordering::Relaxed), 1, "it has answers already");
    r.turn();
    r.none();
    r.shared.confirmations.confirm(round);
    r.turn();
    assert_eq!(r.take(), [(first, Status::Ok)]);
    assert!(r.shared.confirmations.is_holding());
    // A failed round: only a later one counts.
    r.shared.confirmations.begin();
    r.turn();
    r.none();
    let round = r.shared.confirmations.begin();
    r.shared.confirmations.confirm(round);
    r.turn();
    assert_eq!(r.take(), [(second, Status::Ok)]);
    // That round is over: it says nothing about later answers.
    let third = r.answered_read(0);
    r.none();
    lease.set(true);
    r.turn();
    assert_eq!(r.take(), [(third, Status::Ok)]);
    r.shared.on_news(None);
    r.clean();
}

/// A held answer ends with a path error after the hold time, when the volume is closed, and when
/// the volume gets another lease; and as aborted when its caller gives it up.
#[test]
fn ends_of_held_answers() {
    let (mut r, lease) = leased(1);
    lease.set(false);
    let aborted = r.answered_read(8);
    assert!(!r.lanes[0].abort(aborted + 1), "unknown");
    assert!(r.lanes[0].abort(aborted));
    assert!(!r.lanes[0].abort(aborted), "it is aborted already");
    r.turn();
    assert_eq!(r.take(), [(aborted, Status::Aborted)]);

    let late = r.answered_read(0);
    r.pass(HOLD - Duration::from_millis(20));
    r.none();
    r.pass(Duration::from_millis(40));
    assert_eq!(r.take(), [(late, Status::Gone)]);
    r.clean();

    // A fenced volume answers nothing, even with a good lease.
    let fenced = r.answered_read(0);
    r.publish(|view| view.mode = Mode::Suspended);
    lease.set(true);
    r.turn();
    r.none();
    r.publish(|view| view.mode = Mode::Closed);
    r.turn();
    r.turn();
    assert_eq!(r.take(), [(fenced, Status::Gone)]);

    r.publish(|view| view.mode = Mode::Serving);
    lease.set(false);
    r.turn();
    let former = r.answered_read(0);
    r.publish(|view| view.lease = Some(TestLease::new() as _));
    r.turn();
    assert_eq!(r.take(), [(former, Status::Gone)]);
    let own = r.answered_read(0);
    assert_eq!(r.take(), [(own, Status::Ok)]);
    r.clean();
}

/// Held answers are bounded by the depth of the lane, and a closed lane leaves nothing behind.
#[test]
fn held_answers_are_bounded() {
    let (mut r, lease) = leased(1);
    lease.set(false);
    for at in 0..DEPTH as u64 {
        r.answered_read(at % 64 * 8);
    }
    r.none();
    let one_more = r.io(Op::Read, 0, 8);
    assert!(r.lanes[0].submit(one_more).is_err());
    lease.set(true);
    // The caller's list has room for 16 answers.
    r.turn();
    assert_eq!(r.take().len(), 16);
    (0..DEPTH / 16).for_each(|_| r.turn());
    assert_eq!(r.take().len(), DEPTH - 16);
    lease.set(false);
    r.answered_read(0);
    r.lanes.clear();
    assert!(!r.shared.confirmations.is_holding());
    r.free();
}

/// A synchronous I/O is checked after the device executed it. Without a good lease it must be
/// submitted, and further I/O does not reach the device twice.
#[test]
fn synchronous_io() {
    let (mut r, lease) = leased(1);
    tray("A", |tray| tray.prompt = Some(Status::Ok));
    let did = || tray("A", |tray| std::mem::take(&mut tray.did).len());
    let at_once = |r: &mut Rig, op| {
        let mut io = r.io(op, 0, 8);
        r.lanes[0].run_sync(&mut io, &mut None)
    };
    for op in [Op::Read, Op::Write] {
        *lease.good.lock() = Box::new(|| tray("A", |tray| tray.did.len()) == 1);
        assert_eq!(at_once(&mut r, op), Some(Status::Ok));
        assert_eq!((did(), lease.asked()), (1, 1));
    }
    lease.set(false);
    assert_eq!((at_once(&mut r, Op::Write), did()), (None, 1));
    assert_eq!((at_once(&mut r, Op::Write), did()), (None, 0));
    let write = r.write(0);
    r.answer("A", Status::Ok);
    r.none();
    lease.set(true);
    r.turn();
    assert_eq!(r.take(), [(write, Status::Ok)]);
    assert_eq!(at_once(&mut r, Op::Read), Some(Status::Ok));
    r.clean();
}
