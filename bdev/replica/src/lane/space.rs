//! Replicas that have no space for a write, for example lvols on full pools. A shortage is no fault
//! of a device:
//!
//! | the write is on | then |
//! |---|---|
//! | another in-sync replica | the short ones go out of sync, durably, before the answer |
//! | no in-sync replica | all stay; the host gets the error, and the range is made equal |
//!
//! So a child that finds no space is reported only when all others have ended. A shortage of space
//! never puts out all replicas but one.

use nacre_bdev::Status;

use super::Lane;
use super::slots::{bit, slots};
use crate::shared::Failure;

impl Lane {
    /// Decides about a write of which no child is awaited, and some replicas have no space.
    #[cold]
    pub(super) fn judge_short(&mut self, index: usize) {
        let request = &mut self.requests[index];
        let short = request.children.short;
        let in_sync = self.replicas.sync.in_sync;
        if request.children.ok & in_sync != 0 {
            for slot in slots(short) {
                self.requests[index].children.short &= !bit(slot);
                self.fail(index, slot, Failure::Status(Status::NoSpace));
            }
            return;
        }
        request.children.short = 0;
        if in_sync & !short != 0 || in_sync == 0 {
            // A replica that did not get the write is in sync now.
            return self.start_over(index);
        }
        // A failed write may have been executed in part.
        self.replicas.leave_request_unequal(&self.requests[index]);
        self.finish(index, Status::NoSpace);
    }
}
