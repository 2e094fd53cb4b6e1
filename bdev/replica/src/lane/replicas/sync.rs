//! Reads and writes on replicas whose devices finish an I/O during its submission, such as RAM
//! disks (`Queue::run_sync`). [`crate::lane::sync`] calls these functions. It has locked the
//! regions and stripes of a write.
//!
//! A replica that gets such an I/O counts as having one I/O in flight until the next turn
//! ([`Replicas::enter`]). The control, which waits until a replica has none, then waits for that
//! turn.

use nacre_bdev::Io;
use nacre_hugepages::MemoryView;

use super::Replicas;
use crate::lane::slots::{Slots, bit, slots};

impl Replicas {
    /// Reads from one in-sync replica, and returns its slot. `zero_copy`: see `Queue::run_sync`.
    ///
    /// `None`: some replica may lack blocks, a newer view was published, the device cannot read
    /// synchronously, or the read failed. The caller then submits the read as a request, which may
    /// try several replicas.
    #[inline]
    pub(crate) fn read_sync(
        &mut self,
        io: &mut Io,
        zero_copy: &mut Option<MemoryView>,
    ) -> Option<usize> {
        let slot = self.direct_slot(io.lba)?;
        self.use_slots(bit(slot));
        let current = self.is_current();
        let status = match &mut self.queues[slot] {
            Some(queue) if current => queue.run_sync(io, zero_copy),
            _ => None,
        };
        status.filter(|status| status.is_ok() && !self.has_lost(slot))?;
        Some(slot)
    }

    /// Writes to every in-sync replica, and returns their slots.
    ///
    /// `None`: a newer view was published, or some replica did not complete the write. The caller
    /// then submits the write as a request. If a replica may have the data already, the
    /// write's regions are scheduled for a copy from one replica to the others.
    #[inline]
    pub(crate) fn write_sync(&mut self, io: &mut Io) -> Option<Slots> {
        let all = self.direct;
        self.use_slots(all);
        if !self.is_current() {
            return None;
        }
        let mut begun = false;
        for slot in slots(all) {
            let queue = self.queues[slot].as_mut();
            // A write returns no memory.
            let status = queue.and_then(|queue| queue.run_sync(io, &mut None));
            begun |= status.is_some();
            if !status.is_some_and(|status| status.is_ok() && !self.has_lost(slot)) {
                if begun {
                    self.leave_unequal(io.lba, u64::from(io.blocks));
                }
                return None;
            }
        }
        Some(all)
    }

    /// Counts one I/O in flight at each of these replicas, once per turn ([`Replicas::enter`]). The
    /// caller must check [`Replicas::is_current`] afterwards.
    #[inline]
    fn use_slots(&mut self, replicas: Slots) {
        let new = replicas & !self.used;
        if new != 0 {
            self.used |= new;
            slots(new).for_each(|slot| self.enter(slot));
        }
    }

    /// Ends the counts of the last turn. Returns the slots of their replicas, whose queues the
    /// caller polls in this turn.
    pub(crate) fn leave_used(&mut self) -> Slots {
        let used = std::mem::take(&mut self.used);
        slots(used).for_each(|slot| self.leave(slot));
        used
    }
}
