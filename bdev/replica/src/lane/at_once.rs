//! The synchronous path: reads and writes on replicas that complete an I/O during submission (RAM
//! disks).
//!
//! Such an I/O is never in flight, so it needs no entry in the table of requests. It needs the same
//! locks as a request, in the same order: a write needs its regions and stripes, and every I/O
//! needs its replicas' slots and a current view. An I/O that cannot complete here is submitted
//! normally.
//!
//! The first I/O of a turn enters a replica's slot, and the next turn leaves it, because entering
//! costs as much as the rest of a read. The control, which waits for empty slots, waits at most one
//! turn longer.

use nacre_bdev::{Io, Op, Status};
use nacre_hugepages::Lent;

use super::Lane;
use super::request::slots;

impl Lane {
    /// Executes the I/O, without a check of the holder's lease.
    #[inline]
    pub(super) fn at_once_unchecked(
        &mut self,
        io: &mut Io,
        lent: &mut Option<Lent>,
    ) -> Option<Status> {
        if !self.replicas.allow_direct() || self.shared.check(io).is_some() {
            return None;
        }
        match io.op {
            Op::Read => self.read_at_once(io, lent),
            Op::Write => self.write_at_once(io),
            _ => None,
        }
    }

    #[inline]
    pub(super) fn read_at_once(&mut self, io: &mut Io, lent: &mut Option<Lent>) -> Option<Status> {
        let slot = self.replicas.read_at_once(io, lent)?;
        self.counters.read(slot);
        Some(Status::Ok)
    }

    #[inline]
    pub(super) fn write_at_once(&mut self, io: &mut Io) -> Option<Status> {
        // Not while earlier requests wait, nor while a resync runs, whose state decides which
        // replicas get a write.
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
