//! Tests of the preconditions of a write, and of the choice of the replicas that get it.

use std::time::Duration;

use nacre_bdev::{Flags, Io, Op, Queue, Status};
use nacre_reactor::Idle;

use super::rig::*;
use crate::stripes::{Acquired, CONTROL};
use crate::view::{Mode, Role};

#[test]
fn a_write_waits_for_the_log_and_goes_to_all() {
    let mut r = rig(2);
    let a = r.write(0);
    let b = r.submit_on(0, Op::WriteZeroes, REGION - 8, 3 * REGION as u32);
    let again = r.write(16);
    r.turn();
    assert_eq!((r.count("A"), r.count("B")), (0, 0));
    assert_eq!(r.news().wanted, [0, 1, 2, 3], "each region is wanted once");
    r.shared.regions.set_dirty(0);
    r.turn();
    assert_eq!(
        r.has("A"),
        [
            (Op::Write, Flags::empty(), 0),
            (Op::Write, Flags::empty(), 16)
        ]
    );
    assert_eq!(r.has("A"), r.has("B"));
    (1..4).for_each(|region| r.shared.regions.set_dirty(region));
    r.turn();
    assert_eq!(r.count("B"), 3);
    r.answer_all("A", Status::Ok);
    r.none();
    r.answer_all("B", Status::Ok);
    assert_eq!(
        r.take(),
        [(a, Status::Ok), (again, Status::Ok), (b, Status::Ok)]
    );
    let waits = &r.shared.totals.log_waits;
    assert_eq!(waits.load(std::sync::atomic::Ordering::Relaxed), 3);
    r.clean();
}

#[test]
fn overlapping_writes_run_one_after_the_other() {
    let mut r = rig(2).all_dirty();
    let first = r.write(0);
    let second = r.write(4);
    let third = r.write(10);
    let beside = r.write(32);
    assert_eq!(r.has("A").iter().map(|h| h.2).collect::<Vec<_>>(), [0, 32]);
    r.answer("A", Status::Ok);
    r.answer("B", Status::Ok);
    assert_eq!(r.take(), [(first, Status::Ok)]);
    // Not the third: it overlaps the second, which came before.
    assert_eq!(r.has("B").iter().map(|h| h.2).collect::<Vec<_>>(), [32, 4]);
    for _ in 0..2 {
        r.answer("A", Status::Ok);
        r.answer("B", Status::Ok);
    }
    assert_eq!(r.take(), [(beside, Status::Ok), (second, Status::Ok)]);
    r.answer("A", Status::Ok);
    r.answer("B", Status::Ok);
    assert_eq!(r.take(), [(third, Status::Ok)]);
    r.clean();
}

#[test]
fn lanes_and_the_control_take_turns_in_a_stripe() {
    let mut r = rig(1).all_dirty();
    r.add_lane();
    let one = r.write_on(0, 0);
    let two = r.write_on(1, 64);
    r.turn();
    assert_eq!(r.count("A"), 1, "the same stripe, if not the same blocks");
    assert_eq!(r.lanes[1].arm(r.now), Idle::Busy, "nothing would wake it");
    r.answer("A", Status::Ok);
    r.turn();
    assert_eq!(r.take(), [(one, Status::Ok)]);
    assert_eq!(r.count("A"), 1);
    assert_eq!(r.shared.stripes.acquire(CONTROL, 0, 128), Acquired::No);
    r.answer("A", Status::Ok);
    assert_eq!(r.take(), [(two, Status::Ok)]);
    assert_eq!(r.shared.stripes.acquire(CONTROL, 0, 128), Acquired::Fresh);
    let held_up = r.write(0);
    r.turn();
    assert_eq!(r.count("A"), 0);
    r.shared.stripes.release(0, 128);
    r.turn();
    r.answer("A", Status::Ok);
    assert_eq!(r.take(), [(held_up, Status::Ok)]);
    r.clean();
}

/// The holder of a stripe may wait for a judgement, which waits for the store. Requests that wait
/// for the stripe then let their core sleep, and get it within a moment after its release.
#[test]
fn waiting_for_a_stripe_lets_the_core_sleep() {
    let mut r = rig(1).all_dirty();
    assert_eq!(r.shared.stripes.acquire(CONTROL, 0, 8), Acquired::Fresh);
    let write = r.write(0);
    let mut turns = 0;
    let until = loop {
        r.turn();
        turns += 1;
        assert!(turns < 10_000, "it never rests");
        match r.lanes[0].arm(r.now) {
            Idle::Until(at) if at > r.now => break at,
            _ => r.lanes[0].disarm(),
        }
    };
    assert!(
        turns > 500,
        "not for a holder that finishes at once: {turns}"
    );
    assert!(until.since(r.now) <= Duration::from_millis(20));
    assert_eq!(r.count("A"), 0);
    r.shared.stripes.release(0, 8);
    r.now = until;
    r.turn();
    r.answer("A", Status::Ok);
    assert_eq!(r.take(), [(write, Status::Ok)]);
    r.clean();
}

/// A view that changes between the last turn and a submission applies to that submission, for every
/// operation.
#[test]
fn a_new_view_applies_to_the_next_submission() {
    let mut r = rig(3).all_dirty();
    r.publish(|view| view.replicas[1] = None);
    let write = r.write(0);
    assert_eq!((r.count("A"), r.count("B"), r.count("C")), (1, 0, 1));
    r.publish(|view| view.replicas[0] = None);
    let read = r.read(0);
    assert_eq!((r.count("A"), r.count("C")), (1, 2));
    r.answer_all("C", Status::Ok);
    assert_eq!(
        r.take(),
        [(write, Status::Ok), (read, Status::Ok)],
        "A does not count"
    );
    assert_eq!(r.shared.outstanding(0), 1, "but has not answered");
    r.answer("A", Status::Ok);
    r.clean();
    assert_eq!(tray("A", |tray| tray.open), 0, "its queue is closed");
    r.publish(|view| view.mode = Mode::Closed);
    let late = r.write(0);
    r.turn();
    assert_eq!(r.take(), [(late, Status::Gone)]);
}

/// A replica that left while a write waited for the log or for a stripe is not written to.
#[test]
fn a_write_waits_while_the_view_changes() {
    let mut r = rig(2);
    let write = r.write(0);
    r.retire(1);
    r.shared.regions.set_dirty(0);
    r.turn();
    assert_eq!((r.count("A"), r.count("B")), (1, 0));
    r.shared.stripes.acquire(CONTROL, 128, 8);
    let parked = r.write(128);
    let layer = r.layers[1].clone();
    r.publish(|view| {
        view.replicas[1] = Some(crate::view::ReplicaView {
            incarnation: 2,
            ..replica(&layer, Role::InSync)
        })
    });
    r.shared.stripes.release(128, 8);
    r.turn();
    assert_eq!((r.count("A"), r.count("B")), (2, 1));
    r.answer_all("A", Status::Ok);
    r.answer_all("B", Status::Ok);
    assert_eq!(r.take(), [(write, Status::Ok), (parked, Status::Ok)]);
    r.clean();
}

#[test]
fn a_syncing_replica_gets_writes_that_copying_will_miss() {
    let mut r = rig(2).all_dirty();
    let layer = r.layers[1].clone();
    r.publish(|view| view.replicas[1] = Some(replica(&layer, Role::Syncing)));
    r.shared.missing[1].assign(|region| region >= 4);
    r.write(0);
    assert_eq!(r.count("B"), 1, "it has that region");
    r.write(4 * REGION);
    assert_eq!(r.count("B"), 1, "it will be copied later");
    r.shared.set_copying(5);
    r.write(5 * REGION);
    assert_eq!(r.count("B"), 2, "it is being copied");
    r.submit_on(0, Op::Unmap, 3 * REGION, 2 * REGION as u32 - 8);
    assert_eq!(r.count("B"), 2, "overlaps a write in flight");
    r.submit_on(0, Op::Unmap, 3 * REGION, REGION as u32 + 8);
    r.answer_all("A", Status::Ok);
    r.answer_all("B", Status::Ok);
    r.answer_all("A", Status::Ok);
    r.answer_all("B", Status::Ok);
    r.answer_all("A", Status::Ok);
    r.answer_all("B", Status::Ok);
    assert_eq!(r.take().len(), 5);
    let flush = r.flush();
    assert_eq!(
        (r.count("A"), r.count("B")),
        (1, 0),
        "the control flushes it"
    );
    assert_eq!(r.read(0), flush + 1);
    assert_eq!(r.count("B"), 0, "it is not read");
    r.answer_all("A", Status::Ok);
    assert_eq!(r.take().len(), 2);
    r.clean();
}

/// Flags are passed on, and an unmap has the same result everywhere.
#[test]
fn replicas_without_unmap_get_write_zeroes() {
    let mut plain = Script::new("B");
    plain.limits.unmap_zeroes = false;
    let mut none = Script::new("C");
    none.unmaps = false;
    let mut coarse = Script::new("D");
    coarse.limits.unmap_granularity_blocks = 8;
    let mut r = Rig::of([Script::new("A"), plain, none, coarse].into_iter()).all_dirty();
    r.submit_on(0, Op::Unmap, 8, 8);
    assert_eq!(r.has("A"), [(Op::Unmap, Flags::empty(), 8)]);
    for name in ["B", "C", "D"] {
        assert_eq!(
            r.has(name),
            [(Op::WriteZeroes, Flags::DEALLOCATE, 8)],
            "{name}"
        );
    }
    let io = r.io(Op::Write, 64, 8).flags(Flags::FUA);
    r.lanes[0].submit(io).expect("room");
    for name in ["A", "B", "C", "D"] {
        assert_eq!(r.has(name)[1], (Op::Write, Flags::FUA, 64), "{name}");
        r.answer_all(name, Status::Ok);
    }
    assert_eq!(r.take().len(), 2);
    r.clean();
}

#[test]
fn a_flush_is_done_when_all_have_flushed() {
    let mut r = rig(3);
    let flush = r.flush();
    for name in ["A", "B"] {
        r.answer(name, Status::Ok);
        r.none();
    }
    r.answer("C", Status::Ok);
    assert_eq!(r.take(), [(flush, Status::Ok)]);
    r.clean();
}

#[test]
fn unsupported_operations() {
    let mut r = rig(1);
    let past = r.submit_on(0, Op::Write, BLOCKS - 4, 8);
    let far = r.submit_on(0, Op::Read, u64::MAX - 2, 8);
    let nothing = Io::new(900, Op::Unmap, 0, 0);
    let other = Io::new(901, Op::Copy, 0, 8);
    r.lanes[0].submit(nothing).expect("room");
    r.lanes[0].submit(other).expect("room");
    r.turn();
    let expected = [
        (past, Status::OutOfRange),
        (far, Status::OutOfRange),
        (900, Status::Ok),
        (901, Status::Unsupported),
    ];
    assert_eq!(r.take(), expected);
    r.clean();
}

/// The lane accepts this many and no more, and none is lost of those that wait for a busy replica.
#[test]
fn full() {
    let mut r = rig(2).all_dirty();
    tray("B", |tray| tray.busy = true);
    let depth = super::super::DEPTH as u64;
    for at in 0..depth {
        r.write(at * 8);
    }
    let one_more = r.io(Op::Write, 0, 8);
    assert!(r.lanes[0].submit(one_more).is_err());
    assert_eq!(
        (r.count("A"), r.count("B")),
        (64, 0),
        "A's queue has its own depth"
    );
    while r.count("A") > 0 {
        r.answer_all("A", Status::Ok);
    }
    r.none();
    tray("B", |tray| tray.busy = false);
    r.turn();
    while r.count("B") > 0 {
        r.answer_all("B", Status::Ok);
    }
    let ended = r.take();
    assert!(ended.iter().all(|(_, status)| status.is_ok()));
    assert_eq!(ended.len() as u64, depth);
    r.clean();
}

/// Replicas that are copied to are not flushed for hosts until they are about to be in sync. From
/// then on no flush is acknowledged without them, whatever they still need.
#[test]
fn replicas_about_to_be_in_sync_are_flushed() {
    let mut r = rig(2).all_dirty();
    let layer = r.layers[1].clone();
    r.publish(|view| view.replicas[1] = Some(replica(&layer, Role::Syncing)));
    let before = r.flush();
    assert_eq!((r.count("A"), r.count("B")), (1, 0));
    r.answer("A", Status::Ok);
    assert_eq!(r.take(), [(before, Status::Ok)]);
    r.shared.missing[1].insert(0);
    r.publish(|view| view.replicas[1].as_mut().expect("there").flushed = true);
    let after = r.flush();
    assert_eq!((r.count("A"), r.count("B")), (1, 1));
    r.answer("A", Status::Ok);
    r.none();
    r.answer("B", Status::Ok);
    assert_eq!(r.take(), [(after, Status::Ok)]);
    r.clean();
}
