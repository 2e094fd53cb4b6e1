//! The short way: reads and writes on members that are done with an I/O when they were asked for it (RAM disks).
//!
//! Such an I/O is never under way for anybody else to see, so it is no request. It has what a request has to have, in
//! the same order: a write its regions and its stripes, both its members' slots and a view that still counts. What
//! does not go straight through goes the usual way, and is begun anew there.
//!
//! A member's slot is entered by the first I/O and left with the next turn, not by each: to enter costs as much as all
//! the rest of a read here. The control, which waits for slots to be left, waits a turn longer.

use nacre_bdev::{Io, Status};
use nacre_hugepages::Lent;

use super::Lane;
use super::request::{Slots, bit, slots};

impl Lane {
    #[inline]
    pub(super) fn read_at_once(&mut self, io: &mut Io, lent: &mut Option<Lent>) -> Option<Status> {
        let slot = self.swift_slot(io.lba)?;
        self.use_slots(bit(slot));
        let status = match &mut self.queues[slot] {
            Some(queue) if self.shared.version() == self.view.version => queue.at_once(io, lent),
            _ => None,
        };
        let status = status.filter(|status| status.is_ok() && !self.has_lost(slot))?;
        self.turn.reads[slot] += 1;
        self.turn.any = true;
        Some(status)
    }

    #[inline]
    pub(super) fn write_at_once(&mut self, io: &mut Io) -> Option<Status> {
        // What waits came earlier, and what a member that is copied to gets depends on the copying.
        let members = self.swift;
        let plain = self.sync.enough && self.sync.syncing == 0 && self.parked.is_empty();
        if !plain || self.enter(io.lba, u64::from(io.blocks)).is_err() {
            return None;
        }
        self.use_slots(members);
        let mut status = None;
        if self.shared.version() == self.view.version {
            status = self.write_to_all(io, members);
        }
        self.leave(io.lba, u64::from(io.blocks));
        status
    }

    /// Enters those of the slots that were not yet since the last turn. The version is to be looked at after this.
    #[inline]
    fn use_slots(&mut self, members: Slots) {
        let new = members & !self.used;
        if new != 0 {
            self.used |= new;
            slots(new).for_each(|slot| self.enter_slot(slot));
        }
    }

    /// Leaves what was entered since the last turn; answers which members were.
    pub(super) fn leave_used(&mut self) -> Slots {
        let used = std::mem::take(&mut self.used);
        slots(used).for_each(|slot| self.leave_slot(slot));
        used
    }

    /// `None`: not every member has it.
    #[inline]
    fn write_to_all(&mut self, io: &mut Io, members: Slots) -> Option<Status> {
        let (mut begun, mut last) = (false, None);
        for slot in slots(members) {
            let queue = self.queues[slot].as_mut();
            // No write is answered with a loan.
            let status = queue.and_then(|queue| queue.at_once(io, &mut None));
            begun |= status.is_some();
            last = status.filter(|status| status.is_ok() && !self.has_lost(slot));
            if last.is_none() {
                if begun {
                    self.leave_unequal_at(io.lba, u64::from(io.blocks));
                }
                return None;
            }
        }
        for slot in slots(members) {
            self.turn.writes[slot] += 1;
        }
        self.turn.any = true;
        last
    }
}
