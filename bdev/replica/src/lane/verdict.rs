//! Decides what becomes of an I/O of a host (a *request*) whose I/O to some replicas (its
//! *children*) failed: it waits for the control's decision about these replicas, fails, or
//! continues without them. Pure functions of the request, its failures and the view, which is the
//! control's present state of the replicas.

use nacre_bdev::Status;

use super::replicas::Sync;
use super::request::{Failures, Request};
use super::slots::{Slots, bit, slots};
use crate::shared::Failure;
use crate::view::{Role, View};

/// The control's decisions about the failed replicas of a read.
pub(super) enum ReadVerdict {
    /// At least one is not decided yet.
    Pending,
    /// All are decided; the status of a medium that cannot read the blocks, if any.
    Decided(Option<Status>),
}

/// Decides about a read. `failures`: its failures, if any.
pub(super) fn of_read(request: &Request, failures: Option<&Failures>, view: &View) -> ReadVerdict {
    let mut verdict = None;
    for slot in slots(request.children.failed) {
        let (Some(replica), Some(failures)) = (&view.replicas[slot], failures) else {
            continue;
        };
        if replica.decided < failures.tickets[slot] {
            return ReadVerdict::Pending;
        }
        if let Failure::Status(status) = failures.why[slot]
            && !failures.why[slot].is_path()
        {
            verdict = verdict.or(Some(status));
        }
    }
    ReadVerdict::Decided(verdict)
}

/// The control's decisions about the failed replicas of a write.
pub(super) enum WriteVerdict {
    /// At least one is not decided yet, or its device still has the child.
    Pending,
    /// The last in-sync replica failed, with this status. [`Status::Gone`]: it is unreachable.
    Failed(Status),
    /// All are decided. These slots are still replicas, and do not have the write.
    Judged(Slots),
}

/// Decides about a write. `failures`: its failures, if any.
pub(super) fn of_write(
    request: &Request,
    failures: Option<&Failures>,
    view: &View,
    sync: &Sync,
) -> WriteVerdict {
    let mut again: Slots = 0;
    let mut verdict = None;
    for slot in slots(request.children.failed) {
        let (Some(replica), Some(failures)) = (&view.replicas[slot], failures) else {
            continue;
        };
        if replica.decided < failures.tickets[slot] || request.children.with & bit(slot) != 0 {
            return WriteVerdict::Pending;
        }
        // Decided, and still a replica.
        let last = replica.role == Role::InSync && sync.in_sync == bit(slot);
        match failures.why[slot] {
            // The child was late, but it succeeded.
            _ if request.children.ok & bit(slot) != 0 => {}
            _ if !last => again |= bit(slot),
            Failure::Status(status) if !failures.why[slot].is_path() => verdict = Some(status),
            _ => verdict = Some(Status::Gone),
        }
    }
    match verdict {
        Some(status) => WriteVerdict::Failed(status),
        None => WriteVerdict::Judged(again),
    }
}
