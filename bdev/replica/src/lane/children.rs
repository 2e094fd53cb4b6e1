//! The children of a request, and their states. A child is the I/O that a request submits to one
//! replica.
//!
//! ```text
//!   queued ─▶ with ─▶ ok                       completed by the device
//!               │  ├▶ short                    the replica has no space for the write
//!               │  └▶ failed                   failed: the control decides about the replica
//!               └───▶ with and failed          late: reported like a failure
//!                        ├▶ ok and failed      completed by the device, but late
//!                        └▶ orphans            the request ended before the child
//! ```
//!
//! A replica without space is at fault only if another one took the write: see [`super::space`].
//!
//! A request that tries another replica or ends leaves its late children behind as orphans. An
//! orphan keeps its buffers until the device completes it.

use super::slots::{Slots, bit, slots};
use crate::model::MAX_REPLICAS;

/// The states of a request's children, as sets of slots. A slot whose replica has left the view is
/// only in `orphans` and `passed`.
#[derive(Default)]
pub(super) struct Children {
    /// The device has the child and has not completed it.
    pub with: Slots,
    /// The child waits for room in the device's queue, or for a delay.
    pub queued: Slots,
    /// The child completed without an error.
    pub ok: Slots,
    /// The child failed or is late. This was reported to the control, which has not decided yet. In
    /// `with` as well: the child is late. In `ok` as well: it was late, and then completed.
    pub failed: Slots,
    /// The replica has no space for the write. Not reported to the control.
    pub short: Slots,
    /// The replica could not serve the read, for any reason.
    pub tried: Slots,
    /// The replica's medium cannot read the blocks.
    pub unread: Slots,
    /// The device still has the child, but the request does not wait for it.
    pub orphans: Slots,
    /// The child bypassed the replica's layer, which keeps no state of it.
    pub passed: Slots,

    /// How often the replica of a read lacked resources.
    pub shorts: u8,
    /// Age of each child in upkeeps.
    pub ages: [u8; MAX_REPLICAS],
}

impl Children {
    /// Slots whose replicas got a child, completed or not.
    pub(super) fn all(&self) -> Slots {
        self.with | self.queued | self.ok | self.failed | self.short | self.orphans
    }

    /// Children that the request waits for, failed ones that the control has not decided about, and
    /// those that found no space.
    pub(super) fn unfinished(&self) -> Slots {
        self.with | self.queued | self.failed | self.short
    }

    /// Children that devices have, including orphans.
    pub(super) fn at_devices(&self) -> Slots {
        self.with | self.orphans
    }

    /// Children that may still complete in time: queued, or at a device and not late.
    pub(super) fn awaited(&self) -> Slots {
        (self.with | self.queued) & !self.failed
    }

    /// Children at a device that are not late.
    pub(super) fn at_work(&self) -> Slots {
        self.with & !self.failed
    }

    /// Late children: reported as failures while their devices still have them.
    pub(super) fn late(&self) -> Slots {
        self.with & self.failed
    }

    /// Turns late children into orphans.
    #[cold]
    pub(super) fn leave_late(&mut self) {
        let late = self.late();
        self.with &= !late;
        self.orphans |= late;
    }

    /// Clears the results, so that the request can start again.
    pub(super) fn restart(&mut self) {
        (self.ok, self.failed, self.short, self.tried) = (0, 0, 0, 0);
    }

    /// Clears the state of replicas that left the view, except their orphans.
    pub(super) fn forget(&mut self, slots: Slots) {
        for set in [
            &mut self.with,
            &mut self.queued,
            &mut self.ok,
            &mut self.failed,
            &mut self.short,
            &mut self.tried,
            &mut self.unread,
        ] {
            *set &= !slots;
        }
    }

    /// Increments the ages of the children. Returns the slots whose children are older than `limit`
    /// upkeeps and were not reported yet.
    pub(super) fn age(&mut self, limit: u8) -> Slots {
        let mut late = 0;
        for slot in slots(self.at_work()) {
            self.ages[slot] = self.ages[slot].saturating_add(1);
            if self.ages[slot] > limit {
                late |= bit(slot);
            }
        }
        late
    }
}
