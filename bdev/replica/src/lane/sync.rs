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
use nacre_hugepages::MemoryView;

use super::Lane;
use super::slots::slots;

/// Executes the I/O, without a check of the holder's lease.
#[inline]
pub(super) fn run_sync_unchecked(
    lane: &mut Lane,
    io: &mut Io,
    zero_copy: &mut Option<MemoryView>,
) -> Option<Status> {
    if !lane.replicas.allow_direct() || lane.shared.check(io).is_some() {
        return None;
    }
    match io.op {
        Op::Read => read_sync(lane, io, zero_copy),
        Op::Write => write_sync(lane, io),
        _ => None,
    }
}

#[inline]
pub(super) fn read_sync(
    lane: &mut Lane,
    io: &mut Io,
    zero_copy: &mut Option<MemoryView>,
) -> Option<Status> {
    let slot = lane.replicas.read_sync(io, zero_copy)?;
    lane.counters.read(slot);
    Some(Status::Ok)
}

#[inline]
pub(super) fn write_sync(lane: &mut Lane, io: &mut Io) -> Option<Status> {
    // Not while earlier requests wait, nor while a resync runs, whose state decides which
    // replicas get a write.
    let sync = &lane.replicas.sync;
    let plain = sync.enough && sync.syncing == 0;
    if !plain || !lane.admission.enter(io.lba, u64::from(io.blocks)) {
        return None;
    }
    let written = lane.replicas.write_sync(io);
    lane.admission.leave(io.lba, u64::from(io.blocks));
    for slot in slots(written?) {
        lane.counters.write(slot);
    }
    Some(Status::Ok)
}
