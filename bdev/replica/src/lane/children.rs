//! The parts of one request at its replicas.

use super::request::{Slots, bit, slots};
use crate::model::MAX_REPLICAS;

/// Sets of slots. A slot that left the view is only in `orphans` and `passed`.
#[derive(Default)]
pub(super) struct Children {
    /// Its device has the child.
    pub with: Slots,
    /// The child waits for room in the device's queue, or for a delay.
    pub queued: Slots,
    /// Completed without an error.
    pub ok: Slots,
    /// Reported to the control; the ticket is in the trouble. With `with`: it is late. With `ok`:
    /// it was late.
    pub failed: Slots,
    /// Tried for reading, without success.
    pub tried: Slots,
    /// Could not read the blocks.
    pub unread: Slots,
    /// The device has the child, and no request waits for it.
    pub orphans: Slots,
    /// The child was passed through the replica's layer, which has no state of it.
    pub passed: Slots,

    /// How often the replica of a read lacked resources.
    pub shorts: u8,
    /// Age of each child in upkeeps.
    pub ages: [u8; MAX_REPLICAS],
}

impl Children {
    /// Every slot whose replica got a child.
    pub fn all(&self) -> Slots {
        self.with | self.queued | self.ok | self.failed | self.orphans
    }

    /// Children that are not completed, or whose failure is not judged.
    pub fn unfinished(&self) -> Slots {
        self.with | self.queued | self.failed
    }

    /// Children that devices have.
    pub fn at_devices(&self) -> Slots {
        self.with | self.orphans
    }

    /// All children that are still awaited.
    pub fn awaited(&self) -> Slots {
        (self.with | self.queued) & !self.failed
    }

    /// Children that their devices have, and that did not fail.
    pub fn at_work(&self) -> Slots {
        self.with & !self.failed
    }

    /// Late children: their devices have them, and no request has to wait for them.
    pub fn late(&self) -> Slots {
        self.with & self.failed
    }

    /// Forgets the children that late replicas still have: no request waits for them any longer.
    #[cold]
    pub fn leave_late(&mut self) {
        let late = self.late();
        self.with &= !late;
        self.orphans |= late;
    }

    /// Forgets the results: the request starts again.
    pub fn restart(&mut self) {
        (self.ok, self.failed, self.tried) = (0, 0, 0);
    }

    /// Forgets the replicas of these slots, which left; orphans stay.
    pub fn forget(&mut self, slots: Slots) {
        for set in [
            &mut self.with,
            &mut self.queued,
            &mut self.ok,
            &mut self.failed,
            &mut self.tried,
            &mut self.unread,
        ] {
            *set &= !slots;
        }
    }

    /// One upkeep passed. Returns the slots whose children are older than `limit` and not reported.
    pub fn age(&mut self, limit: u8) -> Slots {
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
