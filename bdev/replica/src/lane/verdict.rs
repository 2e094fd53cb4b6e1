//! What becomes of a request once it awaits only children of failed replicas: decided from the
//! request, the failures, and the view, without a side effect.

use nacre_bdev::Status;

use super::replicas::Sync;
use super::request::{Request, Slots, Trouble, bit, slots};
use crate::shared::Failure;
use crate::view::{Role, View};

/// The control's judgement on the failed replicas of a read.
pub(super) enum ReadVerdict {
    /// One of them is not judged yet.
    Pending,
    /// All of them are; the status of a medium that cannot read the blocks, if any.
    Judged(Option<Status>),
}

/// `trouble`: the request's, if a child failed.
pub(super) fn of_read(request: &Request, trouble: Option<&Trouble>, view: &View) -> ReadVerdict {
    let mut verdict = None;
    for slot in slots(request.children.failed) {
        let (Some(replica), Some(trouble)) = (&view.replicas[slot], trouble) else {
            continue;
        };
        if replica.judged < trouble.tickets[slot] {
            return ReadVerdict::Pending;
        }
        if let Failure::Status(status) = trouble.why[slot]
            && !trouble.why[slot].is_path()
        {
            verdict = verdict.or(Some(status));
        }
    }
    ReadVerdict::Judged(verdict)
}

/// The control's judgement on the failed replicas of a write.
pub(super) enum WriteVerdict {
    /// One of them is not judged yet, or its device still has the child.
    Pending,
    /// The last replica in sync failed. [`Status::Gone`]: it cannot be reached.
    Failed(Status),
    /// All of them are judged. These are still replicas, without the write.
    Judged(Slots),
}

/// `trouble`: the request's, if a child failed.
pub(super) fn of_write(
    request: &Request,
    trouble: Option<&Trouble>,
    view: &View,
    sync: &Sync,
) -> WriteVerdict {
    let mut again: Slots = 0;
    let mut verdict = None;
    for slot in slots(request.children.failed) {
        let (Some(replica), Some(trouble)) = (&view.replicas[slot], trouble) else {
            continue;
        };
        if replica.judged < trouble.tickets[slot] || request.children.with & bit(slot) != 0 {
            return WriteVerdict::Pending;
        }
        // Judged, and still a replica.
        let last = replica.role == Role::InSync && sync.in_sync == bit(slot);
        match trouble.why[slot] {
            // It was late, but it succeeded.
            _ if request.children.ok & bit(slot) != 0 => {}
            _ if !last => again |= bit(slot),
            Failure::Status(status) if !trouble.why[slot].is_path() => verdict = Some(status),
            _ => verdict = Some(Status::Gone),
        }
    }
    match verdict {
        Some(status) => WriteVerdict::Failed(status),
        None => WriteVerdict::Judged(again),
    }
}
