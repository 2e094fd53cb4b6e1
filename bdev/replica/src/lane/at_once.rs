//! The synchronous path: reads and writes on replicas that complete an I/O during submission (RAM
//! disks).
//!
//! Such an I/O is never visibly in flight, so it is not a request. It still needs everything that a
//! request needs, in the same order: a write its regions and stripes, both operations their
//! replicas' slots and a current view. An I/O that cannot complete here takes the usual path, from
//! the start.
//!
//! The first I/O enters a replica's slot and the next turn leaves it, because entering costs as
//! much as the whole remaining read. So the control, which waits for slots to be left, waits one
//! turn longer.

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
        // Waiting requests came earlier, and writes to a replica that is copied to depend on the
        // copying.
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

    /// Enters the slots that were not entered since the last turn. Check the version after this.
    #[inline]
    fn use_slots(&mut self, members: Slots) {
        let new = members & !self.used;
        if new != 0 {
            self.used |= new;
            slots(new).for_each(|slot| self.enter_slot(slot));
        }
    }

    /// Leaves the slots that were entered since the last turn; returns their replicas.
    pub(super) fn leave_used(&mut self) -> Slots {
        let used = std::mem::take(&mut self.used);
        slots(used).for_each(|slot| self.leave_slot(slot));
        used
    }

    /// `None`: some replica does not have it.
    #[inline]
    fn write_to_all(&mut self, io: &mut Io, members: Slots) -> Option<Status> {
        let (mut begun, mut last) = (false, None);
        for slot in slots(members) {
            let queue = self.queues[slot].as_mut();
            // A write never completes with a loan.
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
