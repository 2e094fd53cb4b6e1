//! Converts an I/O to a submission queue entry: checks the I/O, prepares the data pointer, and
//! builds the entry.

use arrayvec::ArrayVec;
use nacre_bdev::{Completion, Flags, Io, Op, Status};
use nacre_hugepages::{Buf, Pool};
use nacre_nvmf_wire::commands::io::{CopyRange0, DsmRange};
use zerocopy::IntoBytes;

use super::slot::{Half, NO_SLOT, Slot, Stage};
use super::{Pair, inject};
use crate::command::{self, CommandFields};
use crate::data::{self, Part, Pointer};
use crate::link::Grant;
use crate::namespace::Namespace;

/// Result of [`Pair::place`].
pub(crate) enum Placed {
    Sent,
    Ended(Completion),
    /// No slot or bounce buffer is free.
    Later(Io),
}

/// Why a data pointer cannot be built.
enum PointerError {
    NoBuffer,
    /// No bounce buffer is large enough.
    Impossible,
}

impl Pair {
    /// Sends a read or write that is [`simple`], from a free slot. Returns the slot for the I/O.
    #[inline]
    pub(super) fn send_simple(
        &mut self,
        at: usize,
        index: u16,
        simple: &SimpleTransfer,
    ) -> &mut Option<Io> {
        let slot = &mut self.slots[usize::from(index)];
        slot.take_for(at as u32);
        slot.cid = self.cids.next(slot.cid);
        slot.stage = Stage::Sent;
        slot.age = 0;
        slot.due = Slot::LATE;
        let sqe = command::transfer(&simple.ask, simple.nsid, slot.cid, &simple.pointer);
        self.tail.push(&self.grant.rings.sq, &sqe);
        self.sent += 1;
        self.link.activity.submitted.add(1);
        &mut slot.io
    }

    /// Sends any I/O, if a slot and buffers are free.
    pub(super) fn place(&mut self, at: usize, io: Io) -> Placed {
        let lane = self.lanes.get_mut(at);
        if let Some(status) = admit(&lane.namespace, &io) {
            return Placed::Ended(io.complete(status));
        }
        let Err(io) = inject::hold(self, at, io) else {
            return Placed::Sent;
        };
        let fused = io.op == Op::CompareAndWrite;
        if self.free.len() < 1 + usize::from(fused) {
            return Placed::Later(io);
        }
        let Some(index) = self.free.pop() else {
            return Placed::Later(io);
        };
        let slot = &mut self.slots[usize::from(index)];
        slot.take_for(at as u32);
        slot.io = Some(io);
        let sent = if !fused {
            self.send(index)
        } else {
            self.send_fused(index)
        };
        let status = match sent {
            Ok(()) => {
                self.lanes.get_mut(at).placed += 1;
                return Placed::Sent;
            }
            Err(PointerError::NoBuffer) => None,
            Err(PointerError::Impossible) => Some(Status::DeviceError),
        };
        let slot = &mut self.slots[usize::from(index)];
        slot.stage = Stage::Free;
        slot.bounce = None;
        self.free.push(index);
        match (slot.io.take(), status) {
            (Some(io), None) => Placed::Later(io),
            (Some(io), Some(status)) => Placed::Ended(io.complete(status)),
            (None, _) => unreachable!("the slot was filled just now"),
        }
    }

    /// Sends a slot's command, also as a retry. The slot is unchanged if no buffer is free.
    fn send(&mut self, index: u16) -> Result<(), PointerError> {
        let at = usize::from(index);
        let slot = &mut self.slots[at];
        let lane = self.lanes.get_mut(slot.lane as usize);
        let Some(io) = &slot.io else {
            return Err(PointerError::Impossible);
        };
        let mut ask = CommandFields {
            op: io.op,
            flags: if io.flags.contains(Flags::DEALLOCATE) && !lane.namespace.deallocates_zeroes() {
                io.flags - Flags::DEALLOCATE
            } else {
                io.flags
            },
            lba: io.lba,
            blocks: io.blocks,
            ranges: 0,
            protected: lane.namespace.is_protected(),
        };
        let grant = &*self.grant;
        let pointer = match io.op {
            Op::Read | Op::Write | Op::Compare => {
                let bytes = (io.blocks as usize) << lane.namespace.block_shift();
                let fill = io.op != Op::Read;
                let list = &mut self.scratch[..];
                let bounce = &mut slot.bounce;
                point(grant, at, &io.data, bytes, fill, bounce, &lane.pool, list)?
            }
            Op::Flush | Op::WriteZeroes | Op::CompareAndWrite | Op::Verify => Pointer::NONE,
            Op::Unmap => unmap_range(grant, at, io),
            Op::Copy => {
                let (from, to, piece) =
                    command::copy_piece(io.source_lba, io.lba, io.blocks, slot.done);
                slot.piece = piece;
                ask.lba = to;
                let most = lane.namespace.copy_range_blocks();
                ask.ranges = piece.div_ceil(most) as u16;
                copy_ranges(grant, at, from, piece, most)
            }
        };
        slot.cid = self.cids.next(slot.cid);
        slot.stage = Stage::Sent;
        slot.age = 0;
        slot.due = Slot::LATE;
        let sqe = command::sqe(&ask, lane.namespace.nsid(), slot.cid, &pointer);
        self.tail.push(&grant.rings.sq, &sqe);
        self.sent += 1;
        self.link.activity.submitted.add(1);
        Ok(())
    }

    /// Sends a slot's compare-and-write as two consecutive commands.
    fn send_fused(&mut self, index: u16) -> Result<(), PointerError> {
        let Some(second) = self.free.pop() else {
            return Err(PointerError::NoBuffer);
        };
        let sent = self.send_halves(index, second);
        if sent.is_err() {
            let slot = &mut self.slots[usize::from(second)];
            slot.bounce = None;
            self.free.push(second);
        }
        sent
    }

    fn send_halves(&mut self, index: u16, second: u16) -> Result<(), PointerError> {
        let [slot, other] = self
            .slots
            .get_disjoint_mut([usize::from(index), usize::from(second)])
            .map_err(|_| PointerError::Impossible)?;
        let lane = self.lanes.get_mut(slot.lane as usize);
        let Some(io) = &slot.io else {
            return Err(PointerError::Impossible);
        };
        let bytes = (io.blocks as usize) << lane.namespace.block_shift();
        let [expected, new] = &io.data[..] else {
            return Err(PointerError::Impossible);
        };
        let ask = CommandFields {
            op: io.op,
            flags: io.flags,
            lba: io.lba,
            blocks: io.blocks,
            ranges: 0,
            protected: false,
        };
        let grant = &*self.grant;
        let list = &mut self.scratch[..];
        let mut pointer = |at: u16, buf: &Buf, bounce: &mut Option<Buf>| {
            let buf = std::slice::from_ref(buf);
            let (at, pool) = (usize::from(at), &lane.pool);
            point(grant, at, buf, bytes, true, bounce, pool, list)
        };
        let first = pointer(index, expected, &mut slot.bounce)?;
        let then = pointer(second, new, &mut other.bounce)?;
        let nsid = lane.namespace.nsid();
        for (slot, half, partner) in [(slot, Half::First, second), (other, Half::Second, index)] {
            slot.cid = self.cids.next(slot.cid);
            slot.stage = Stage::Sent;
            slot.half = half;
            slot.partner = partner;
            slot.answer = None;
            slot.age = 0;
            slot.due = Slot::LATE;
            let sqe = match half {
                Half::Second => command::write_of(&ask, nsid, slot.cid, &then),
                _ => command::sqe(&ask, nsid, slot.cid, &first),
            };
            self.tail.push(&grant.rings.sq, &sqe);
            self.sent += 1;
            self.link.activity.submitted.add(1);
        }
        Ok(())
    }

    /// Sends the retries that are due.
    #[cold]
    pub(super) fn send_again(&mut self) {
        if !self.live {
            return;
        }
        let mut at = 0;
        while at < self.again.len() {
            let (when, index) = self.again[at];
            let due = when <= self.now && self.slots[usize::from(index)].stage == Stage::Again;
            match due.then(|| self.send(index)) {
                None if when > self.now => at += 1,
                // The I/O has ended meanwhile.
                None | Some(Ok(())) => drop(self.again.swap_remove(at)),
                Some(Err(PointerError::NoBuffer)) => at += 1,
                Some(Err(PointerError::Impossible)) => {
                    self.again.swap_remove(at);
                    self.end(index, Status::DeviceError);
                }
            }
        }
    }

    /// Frees the second half of a fused pair.
    pub(super) fn free_partner(&mut self, index: u16) {
        let second = std::mem::replace(&mut self.slots[usize::from(index)].partner, NO_SLOT);
        let slot = &mut self.slots[usize::from(second)];
        slot.stage = Stage::Free;
        slot.half = Half::No;
        slot.partner = NO_SLOT;
        slot.bounce = None;
        self.free.push(second);
    }
}

/// The command fields of a read or write of one buffer that needs neither a list nor a copy.
pub(super) struct SimpleTransfer {
    ask: CommandFields,
    nsid: u32,
    pointer: Pointer,
}

/// Returns the fields for nearly all I/Os. `None` only means that [`Pair::place`] must check the
/// I/O.
#[inline]
pub(super) fn simple(namespace: &Namespace, grant: &Grant, io: &Io) -> Option<SimpleTransfer> {
    match io.op {
        Op::Read => {}
        Op::Write if !namespace.is_read_only() => {}
        _ => return None,
    }
    if namespace.is_gone() || io.blocks == 0 || io.blocks > namespace.max_blocks() {
        return None;
    }
    let end = io.lba.checked_add(u64::from(io.blocks))?;
    if end > namespace.blocks() {
        return None;
    }
    let [buf] = &io.data[..] else {
        return None;
    };
    let bytes = (io.blocks as usize) << namespace.block_shift();
    if buf.len() < bytes {
        return None;
    }
    let address = buf.address(grant.key)?;
    let len = bytes as u32;
    let pointer = data::describe_short(Part { address, len })?;
    let ask = CommandFields {
        op: io.op,
        flags: io.flags,
        lba: io.lba,
        blocks: io.blocks,
        ranges: 0,
        protected: namespace.is_protected(),
    };
    let nsid = namespace.nsid();
    Some(SimpleTransfer { ask, nsid, pointer })
}

/// The status of an I/O that needs no command, if it has one already.
fn admit(namespace: &Namespace, io: &Io) -> Option<Status> {
    if namespace.is_gone() {
        return Some(Status::Gone);
    }
    if io.op == Op::Flush {
        return None;
    }
    let blocks = namespace.blocks();
    let inside = |lba: u64| {
        lba.checked_add(u64::from(io.blocks))
            .is_some_and(|end| end <= blocks)
    };
    if !inside(io.lba) {
        return Some(Status::OutOfRange);
    }
    if io.blocks == 0 {
        return Some(Status::Ok);
    }
    match io.op {
        Op::Read | Op::Write if io.blocks <= namespace.max_blocks() => {
            if io.op == Op::Write && namespace.is_read_only() {
                return Some(Status::WriteProtected);
            }
            let bytes = (io.blocks as usize) << namespace.block_shift();
            // The buffers are too short, an error of the layer above; the blocks are not affected.
            (io.data_len() < bytes).then_some(Status::DeviceError)
        }
        _ => admit_others(namespace, io, inside(io.source_lba)),
    }
}

fn admit_others(namespace: &Namespace, io: &Io, source_inside: bool) -> Option<Status> {
    if io.op.is_write() && namespace.is_read_only() {
        return Some(Status::WriteProtected);
    }
    if !namespace.has(io.op) {
        return Some(Status::Unsupported);
    }
    if io.op == Op::Copy && !source_inside {
        return Some(Status::OutOfRange);
    }
    let most = match io.op {
        Op::Unmap | Op::WriteZeroes => namespace.max_range_blocks(),
        Op::Verify => namespace.max_verify_blocks().into(),
        _ => u64::from(namespace.max_blocks()),
    };
    if u64::from(io.blocks) > most {
        return Some(Status::Unsupported);
    }
    let bytes = (io.blocks as usize) << namespace.block_shift();
    let enough = match io.op {
        Op::CompareAndWrite => io.data.len() == 2 && io.data.iter().all(|buf| buf.len() >= bytes),
        op => io.data_len() as u64 >= op.data_len(bytes as u64),
    };
    (!enough).then_some(Status::DeviceError)
}

/// Builds the data pointer for `bytes` of data, in `bufs` themselves or in a bounce buffer.
#[allow(clippy::too_many_arguments)]
fn point(
    grant: &Grant,
    at: usize,
    bufs: &[Buf],
    bytes: usize,
    fill: bool,
    bounce: &mut Option<Buf>,
    pool: &Pool,
    scratch: &mut [u8],
) -> Result<Pointer, PointerError> {
    let rings = &*grant.rings;
    let (offset, len) = (at * rings.list_bytes, rings.list_bytes);
    let list = &mut scratch[..len];
    let address = rings.lists.address(offset);
    let direct = match bounce {
        None => parts_of(grant, bufs, bytes)
            .and_then(|parts| data::describe(&parts, grant.sgl, address, list)),
        Some(_) => None,
    };
    let pointer = match direct {
        Some(pointer) => pointer,
        None => {
            let parts = bounced(grant, bufs, bytes, fill, bounce, pool)?;
            data::describe(&parts, grant.sgl, address, list).ok_or(PointerError::Impossible)?
        }
    };
    if pointer.list_bytes > 0 {
        rings.lists.write(offset, &list[..pointer.list_bytes]);
    }
    Ok(pointer)
}

type Parts = ArrayVec<Part, 2>;

#[inline]
fn parts_of(grant: &Grant, bufs: &[Buf], bytes: usize) -> Option<Parts> {
    let mut parts = Parts::new();
    let mut left = bytes;
    for buf in bufs {
        let len = buf.len().min(left);
        if len > 0 {
            let address = buf.address(grant.key)?;
            let len = len as u32;
            parts.push(Part { address, len });
        }
        left -= buf.len().min(left);
    }
    Some(parts)
}

#[cold]
fn bounced(
    grant: &Grant,
    bufs: &[Buf],
    bytes: usize,
    fill: bool,
    bounce: &mut Option<Buf>,
    pool: &Pool,
) -> Result<Parts, PointerError> {
    if bounce.is_none() {
        // Data from the drive cannot be copied to a shared buffer. The layer above must not pass
        // one, so refuse before sending a command.
        let shared = !fill && !bufs.iter().all(Buf::is_unshared);
        if shared || bytes > pool.max_len() {
            return Err(PointerError::Impossible);
        }
        let mut copy = pool.acquire(bytes).ok_or(PointerError::NoBuffer)?;
        copy.truncate(bytes);
        let Some(mut room) = copy.bytes_mut().filter(|_| fill) else {
            *bounce = Some(copy);
            return bounced(grant, bufs, bytes, fill, bounce, pool);
        };
        for buf in bufs {
            let len = buf.len().min(room.len());
            let (here, rest) = room.split_at_mut(len);
            here.copy_from_slice(&buf[..len]);
            room = rest;
        }
        *bounce = Some(copy);
    }
    let copy = bounce.as_slice();
    parts_of(grant, copy, bytes).ok_or(PointerError::Impossible)
}

/// Copies the bytes that the controller wrote to the bounce buffer into the I/O's own buffers.
#[cold]
pub(super) fn unbounce(io: &mut Io, bounce: &Buf, status: Status) -> Status {
    if io.op != Op::Read || !status.is_ok() {
        return status;
    }
    let mut from = &bounce[..];
    for buf in &mut io.data {
        let len = buf.len().min(from.len());
        let Some(bytes) = buf.bytes_mut() else {
            return Status::DeviceError;
        };
        bytes[..len].copy_from_slice(&from[..len]);
        from = &from[len..];
    }
    status
}

/// Writes the range of an unmap to the slot's list.
fn unmap_range(grant: &Grant, at: usize, io: &Io) -> Pointer {
    let rings = &*grant.rings;
    let offset = at * rings.list_bytes;
    let range = DsmRange::new(io.lba, io.blocks);
    rings.lists.write(offset, range.as_bytes());
    Pointer::prp(rings.lists.address(offset), 0)
}

/// Writes the source ranges of one piece of a copy to the slot's list.
fn copy_ranges(grant: &Grant, at: usize, source: u64, blocks: u32, most: u32) -> Pointer {
    let rings = &*grant.rings;
    let offset = at * rings.list_bytes;
    let (mut from, mut left, mut place) = (source, blocks, offset);
    while left > 0 {
        let blocks = left.min(most);
        let range = CopyRange0::new(from, blocks);
        rings.lists.write(place, range.as_bytes());
        place += CopyRange0::SIZE;
        from += u64::from(blocks);
        left -= blocks;
    }
    Pointer::prp(rings.lists.address(offset), 0)
}
