//! Synchronous I/O on the queues of the replicas, for [`super::super::sync`].

use nacre_bdev::Io;
use nacre_hugepages::MemoryView;

use super::Replicas;
use crate::lane::slots::{Slots, bit, slots};

impl Replicas {
    /// Executes a read synchronously at one replica, and returns its slot. `None`: no replica can.
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

    /// Executes a write synchronously at every in-sync replica, and returns their slots. `None`: at
    /// least one replica does not have the write.
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

    /// Enters the slots that were not entered since the last turn. Check the version after this.
    #[inline]
    fn use_slots(&mut self, replicas: Slots) {
        let new = replicas & !self.used;
        if new != 0 {
            self.used |= new;
            slots(new).for_each(|slot| self.enter(slot));
        }
    }

    /// Leaves the slots that were entered since the last turn; returns their replicas.
    pub(crate) fn leave_used(&mut self) -> Slots {
        let used = std::mem::take(&mut self.used);
        slots(used).for_each(|slot| self.leave(slot));
        used
    }
}
