//! Tests of replicas without space: one of them leaves only if another one took the write.

use std::time::Duration;

use nacre_bdev::{Op, Status};

use super::rig::*;
use crate::shared::Failure;
use crate::view::{Mode, Role};

const NO_SPACE: Status = Status::NoSpace;

#[test]
fn no_space_anywhere_is_no_fault() {
    for op in [Op::Write, Op::WriteZeroes, Op::Unmap] {
        let mut r = rig(3).all_dirty();
        let write = r.submit_on(0, op, 0, 8);
        for name in ["B", "A"] {
            r.answer(name, NO_SPACE);
            r.none();
        }
        r.answer("C", NO_SPACE);
        assert_eq!(r.take(), [(write, NO_SPACE)], "{op:?}");
        assert!(r.news().reports.is_empty());
        // It may have been executed in part.
        let lacks = [0, 1, 2].map(|slot| r.shared.missing[slot].contains(0));
        assert_eq!(lacks, [false, true, true]);
        let read = r.read(0);
        r.answer("A", Status::Ok);
        assert_eq!(r.take(), [(read, Status::Ok)]);
        r.clean();
    }
}

#[test]
fn one_replica_without_space_leaves_before_the_answer() {
    for order in [["A", "B"], ["B", "A"]] {
        let mut r = rig(2).all_dirty();
        let write = r.write(0);
        for name in order {
            let status = if name == "A" { Status::Ok } else { NO_SPACE };
            assert!(r.news().reports.is_empty());
            r.answer(name, status);
        }
        r.none();
        let report = r.news().reports[0];
        assert_eq!((report.slot, report.why), (1, Failure::Status(NO_SPACE)));
        r.pass(Duration::from_millis(100));
        r.none();
        r.retire(1);
        r.turn();
        assert_eq!(r.take(), [(write, Status::Ok)]);
        r.clean();
    }
}

/// The one replica that is left after another failure has no space: it stays, and the host learns
/// of the shortage.
#[test]
fn others_that_fail_take_no_write() {
    let mut r = rig(3).all_dirty();
    let write = r.write(0);
    r.answer("A", NO_SPACE);
    r.answer("B", Status::Gone);
    r.answer("C", NO_SPACE);
    r.none();
    let reports = std::mem::take(&mut r.news().reports);
    assert_eq!(reports.len(), 1);
    assert_eq!(reports[0].slot, 1);
    r.retire(1);
    r.turn();
    assert_eq!(r.take(), [(write, NO_SPACE)]);
    assert!(r.news().reports.is_empty());
    assert!(r.shared.missing[2].contains(0));
    r.clean();
}

/// A replica under resync took the write: it is not in sync, so the write is not done.
#[test]
fn a_syncing_replica_does_not_count() {
    let mut r = rig(2).all_dirty();
    r.publish(|view| view.replicas[1].as_mut().expect("there").role = Role::Syncing);
    let write = r.write(0);
    r.answer("B", Status::Ok);
    r.answer("A", NO_SPACE);
    assert_eq!(r.take(), [(write, NO_SPACE)]);
    assert!(r.shared.missing[1].contains(0));
    assert!(r.news().reports.is_empty());
    r.clean();
}

#[test]
fn a_suspended_volume_decides_later() {
    let mut r = rig(2).all_dirty();
    let write = r.write(0);
    r.answer("A", NO_SPACE);
    r.publish(|view| view.mode = Mode::Suspended);
    r.answer("B", NO_SPACE);
    r.none();
    r.publish(|view| view.mode = Mode::Serving);
    r.turn();
    assert_eq!(r.take(), [(write, NO_SPACE)]);
    r.clean();
}
