//! The synchronous path: reads and writes on replicas that complete an I/O during submission (RAM
//! disks).
//!
//! Such an I/O is never visibly in flight, so it is not a request. It needs the same locks as a
//! request, in the same order: a write its regions and stripes, both operations their replicas'
//! slots and a current view. An I/O that cannot complete here starts again on the usual path.
//!
//! The first I/O enters a replica's slot, and the next turn leaves it, because entering costs as
//! much as the rest of a read. So the control, which waits until slots are left, waits one turn
//! longer.

use nacre_bdev::{Io, Status};
use nacre_hugepages::Lent;

use super::Lane;
use super::request::slots;

impl Lane {
    #[inline]
    pub(super) fn read_at_once(&mut self, io: &mut Io, lent: &mut Option<Lent>) -> Option<Status> {
        let slot = self.replicas.read_at_once(io, lent)?;
        self.counters.read(slot);
        Some(Status::Ok)
    }

    #[inline]
    pub(super) fn write_at_once(&mut self, io: &mut Io) -> Option<Status> {
        // Waiting requests arrived earlier, and writes to a replica under resync depend on the
        // resync.
        let sync = &self.replicas.sync;
        let plain = sync.enough && sync.syncing == 0;
        if !plain || !self.admission.enter(io.lba, u64::from(io.blocks)) {
            return None;
        }
        let written = self.replicas.write_at_once(io);
        self.admission.leave(io.lba, u64::from(io.blocks));
        for slot in slots(written?) {
            self.counters.write(slot);
        }
        Some(Status::Ok)
    }
}
