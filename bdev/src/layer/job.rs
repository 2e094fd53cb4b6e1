//! A job: one I/O of a host that the layer executes as several requests to the module. The job
//! decides, the queue executes.
//!
//! ```text
//!   [Gate] ──granted──> Work ──all pieces back──> [Flush] ──> finished
//!                        │ a piece failed, or the I/O was aborted: no new pieces, wait
//!                        └──> finished with the first error
//! ```
//!
//! Up to [`WINDOW`] pieces of a native operation are in flight, each with its own part of the
//! buffers; the parts are joined again in order. Reads of an emulation (compare, copy, the first
//! half of a compare-and-write, verify) use a bounce buffer, one piece at a time.
//!
//! A module may announce write zeroes and then refuse it (a target on a file system without it, a
//! drive with faulty firmware). The job then starts again with a buffer of zeroes.

use arrayvec::ArrayVec;
use nacre_hugepages::{Buf, Pool};

use super::gate::Ticket;
use super::memory::Memory;
use super::plan::{Recipe, Shape};
use crate::io::{Completion, Extents, Flags, Io, Op, Status};

/// Most pieces of one I/O in flight. Eight of a device's largest requests keep it busy.
const WINDOW: usize = 8;

/// The queue's next step for a job.
#[derive(Debug)]
pub(super) enum Step {
    /// Submit this I/O; its token is the child's ordinal.
    Submit(Io),
    /// A resource (a bounce buffer) is short: call again in the next turn.
    Park,
    /// The job has no step until a child completes.
    Wait,
    Finished(Status),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// The job waits for its range in the gate's table.
    Gate,
    Work,
    Flush,
}

#[derive(Debug)]
pub(super) struct Job {
    /// The slot of the job's I/O.
    pub slot: usize,
    pub stage: Stage,
    pub ticket: Option<Ticket>,
    /// A child that found the module busy.
    pub held: Option<Io>,
    recipe: Recipe,
    flags: Flags,
    lba: u64,
    blocks: u32,
    source_lba: u64,
    flush_after: bool,
    /// Buffers that no child uses.
    data: Extents,
    /// Parts of the buffers that children returned, joined.
    back: Extents,
    first_len: usize,
    total_len: usize,
    /// Blocks of the current half that are covered by children.
    next: u32,
    children: ArrayVec<Child, WINDOW>,
    ordinal: u8,
    status: Status,
    aborted: bool,
    /// Compare-and-write: the comparison was equal, the write is running.
    writing: bool,
    /// Write zeroes: the module refused the operation.
    refused: bool,
    bounce: Bounce,
}

/// The bounce buffer of a job that reads first.
#[derive(Debug, Default)]
struct Bounce {
    /// The part of the buffer after the next piece.
    rest: Option<Buf>,
    /// Data that was read and is to be written.
    filled: Option<Buf>,
    /// Blocks of the last piece.
    blocks: u32,
}

#[derive(Debug)]
struct Child {
    ordinal: u8,
    blocks: u32,
    part: BufferUse,
    done: bool,
    data: Extents,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BufferUse {
    /// Uses a part of the I/O's buffers, or needs none.
    Piece,
    /// Reads into the bounce buffer, for a comparison.
    ReadToCompare,
    /// Reads into the bounce buffer, for a write.
    ReadToWrite,
    /// Reads into the bounce buffer, and discards the data.
    ReadToDrop,
    /// Writes from the bounce buffer.
    WriteBounce,
    /// Has shared handles that are not returned to the submitter.
    Shared,
}

impl Job {
    pub(super) fn new(slot: usize, io: Io, recipe: Recipe, shape: &Shape) -> Self {
        let first_len = io.data.first().map_or(0, Buf::len);
        let total_len = io.data_len();
        Self {
            slot,
            stage: Stage::Work,
            ticket: None,
            held: None,
            recipe,
            flags: io.flags,
            lba: io.lba,
            blocks: io.blocks,
            source_lba: io.source_lba,
            flush_after: shape.flush_after(io.op, io.flags),
            data: io.data,
            back: Extents::new(),
            first_len,
            total_len,
            next: 0,
            children: ArrayVec::new(),
            ordinal: 0,
            status: Status::Ok,
            aborted: false,
            writing: false,
            refused: false,
            bounce: Bounce::default(),
        }
    }

    /// Returns the next step. Call again after `Submit`. `Finished` is returned only when no child
    /// is in flight.
    pub(super) fn step(&mut self, shape: &Shape, memory: &mut Memory, pool: &Pool) -> Step {
        if self.is_over() {
            return self.wind_down();
        }
        if self.refused {
            if !self.children.is_empty() {
                return Step::Wait;
            }
            (self.recipe, self.refused, self.next) = (Recipe::WriteZeroBuffer, false, 0);
        }
        if self.stage == Stage::Flush {
            return if self.children.is_empty() {
                Step::Finished(Status::Ok)
            } else {
                Step::Wait
            };
        }
        if self.next < self.blocks {
            return match self.recipe {
                Recipe::Pieces(op) => self.next_piece(op, shape),
                Recipe::WriteZeroBuffer => self.next_zeroes(shape, memory, pool),
                Recipe::ReadAndCompare => {
                    self.next_read(BufferUse::ReadToCompare, shape, memory, pool)
                }
                Recipe::ReadAndWrite => self.next_read(BufferUse::ReadToWrite, shape, memory, pool),
                Recipe::ReadAndDrop => self.next_read(BufferUse::ReadToDrop, shape, memory, pool),
                Recipe::Swap if self.writing => self.next_new_data(shape),
                Recipe::Swap if shape.native(Op::Compare) => self.next_expected(shape),
                Recipe::Swap => self.next_read(BufferUse::ReadToCompare, shape, memory, pool),
            };
        }
        if let Some(step) = self.write_back() {
            return step;
        }
        if !self.children.is_empty() {
            return Step::Wait;
        }
        if self.recipe == Recipe::Swap && !self.writing {
            (self.writing, self.next) = (true, 0);
            return self.step(shape, memory, pool);
        }
        if self.flush_after {
            self.stage = Stage::Flush;
            return self.child(Io::new(0, Op::Flush, 0, 0), BufferUse::Shared);
        }
        Step::Finished(Status::Ok)
    }

    /// Handles the completion of a child.
    pub(super) fn child_done(
        &mut self,
        ordinal: u8,
        ended: Completion,
        shape: &Shape,
        memory: &mut Memory,
        pool: &Pool,
    ) {
        let Some(at) = self
            .children
            .iter()
            .position(|c| c.ordinal == ordinal && !c.done)
        else {
            debug_assert!(false, "a child of a job ended twice");
            return;
        };
        let mut status = ended.status;
        let part = self.children[at].part;
        let mut data = ended.data;
        match part {
            BufferUse::Piece => self.children[at].data = data,
            BufferUse::Shared => {}
            BufferUse::ReadToCompare => {
                let from = shape.bytes(self.next - self.children[at].blocks);
                let read = data.pop();
                if status.is_ok() && !read.as_deref().is_some_and(|read| self.expects(from, read)) {
                    status = Status::Miscompare;
                }
                self.give_back(read, memory);
            }
            BufferUse::ReadToWrite => {
                if status.is_ok() {
                    self.bounce.filled = data.pop()
                } else {
                    self.give_back(data.pop(), memory)
                }
            }
            BufferUse::ReadToDrop | BufferUse::WriteBounce => self.give_back(data.pop(), memory),
        }
        if status == Status::Unsupported && self.recipe == Recipe::Pieces(Op::WriteZeroes) {
            self.refused = true;
        } else if self.status.is_ok() {
            self.status = status;
        }
        self.children[at].done = true;
        while self.children.first().is_some_and(|child| child.done) {
            let child = self.children.remove(0);
            let joined = join(&mut self.back, child.data, self.first_len, Some(pool));
            if !joined && self.status.is_ok() {
                self.status = Status::Retry;
            }
        }
    }

    /// True if the job starts no further child.
    pub(super) fn is_over(&self) -> bool {
        self.aborted || !self.status.is_ok()
    }

    /// True if the module refused an operation that it announces.
    pub(super) fn is_refused(&self) -> bool {
        self.refused
    }

    /// The blocks that the job changes.
    pub(super) fn range(&self) -> (u64, u64) {
        (self.lba, u64::from(self.blocks))
    }

    /// Aborts the rest of the job. Returns false when it is too late.
    pub(super) fn abort(&mut self) -> bool {
        if self.writing || self.stage == Stage::Flush {
            return false;
        }
        self.aborted = true;
        self.drop_held();
        true
    }

    /// Ends the job with `status` once its children have completed.
    pub(super) fn fail(&mut self, status: Status) {
        if self.status.is_ok() {
            self.status = status;
        }
        self.drop_held();
    }

    /// The ordinals of the children in flight.
    pub(super) fn under_way(&self) -> impl Iterator<Item = u8> + '_ {
        self.children
            .iter()
            .filter(|child| !child.done)
            .map(|child| child.ordinal)
    }

    /// Returns the buffers, after the end.
    pub(super) fn into_data(mut self, memory: &mut Memory) -> Extents {
        let filled = self.bounce.filled.take();
        self.give_back(filled, memory);
        let Self {
            mut back,
            data,
            first_len,
            ..
        } = self;
        join(&mut back, data, first_len, None);
        back
    }

    fn wind_down(&mut self) -> Step {
        match (self.children.is_empty(), self.status) {
            (false, _) => Step::Wait,
            (true, Status::Ok) => Step::Finished(Status::Aborted),
            (true, status) => Step::Finished(status),
        }
    }

    fn drop_held(&mut self) {
        let Some(io) = self.held.take() else { return };
        let ordinal = self.ordinal.wrapping_sub(1);
        // The held child is always the newest.
        if let Some(at) = self
            .children
            .iter()
            .position(|child| child.ordinal == ordinal)
        {
            let mut child = self.children.remove(at);
            match child.part {
                BufferUse::Piece => {
                    // Put its buffers in front of the unused ones. The pieces before them are in
                    // flight or returned, so the first extent is shorter by their length.
                    let rest = std::mem::take(&mut self.data);
                    let here = io.data_len() + rest.iter().map(Buf::len).sum::<usize>();
                    let in_front = self.total_len - here;
                    child.data = io.data;
                    join(
                        &mut child.data,
                        rest,
                        self.first_len.saturating_sub(in_front),
                        None,
                    );
                    self.data = child.data;
                }
                // The bounce buffer returns to the pool, or to the reserve, when the job ends.
                BufferUse::ReadToCompare
                | BufferUse::ReadToWrite
                | BufferUse::ReadToDrop
                | BufferUse::WriteBounce => {
                    self.bounce.filled = io.data.into_iter().next();
                }
                BufferUse::Shared => {}
            }
        }
    }

    fn child(&mut self, io: Io, part: BufferUse) -> Step {
        let ordinal = self.ordinal;
        self.ordinal = ordinal.wrapping_add(1);
        let child = Child {
            ordinal,
            blocks: io.blocks,
            part,
            done: false,
            data: Extents::new(),
        };
        self.children.push(child);
        Step::Submit(Io {
            token: u64::from(ordinal),
            ..io
        })
    }

    /// True if a copy must run from its end, as `memmove` does: the source lies below the target
    /// and overlaps it.
    fn backwards(&self) -> bool {
        self.source_lba < self.lba && self.overlaps()
    }

    fn overlaps(&self) -> bool {
        self.lba.abs_diff(self.source_lba) < u64::from(self.blocks)
    }

    /// Number of blocks, at most `left`, for the next piece of a copy, limited by its read and its
    /// write.
    fn copy_piece(&self, left: u32, shape: &Shape) -> u32 {
        let piece = |base: u64| {
            if self.backwards() {
                shape.piece_before(base + u64::from(self.blocks - self.next), left)
            } else {
                shape.piece(Op::Read, base + u64::from(self.next), left)
            }
        };
        piece(self.source_lba).min(piece(self.lba))
    }

    /// Offset of the next piece of a copy, of `blocks` blocks, within the range.
    fn copy_offset(&self, blocks: u32) -> u64 {
        if self.backwards() {
            u64::from(self.blocks - self.next - blocks)
        } else {
            u64::from(self.next)
        }
    }

    fn next_piece(&mut self, op: Op, shape: &Shape) -> Step {
        let window = if op == Op::Copy && self.overlaps() {
            1
        } else {
            WINDOW
        };
        if self.children.len() >= window {
            return Step::Wait;
        }
        let left = self.blocks - self.next;
        let blocks = shape.piece(op, self.lba + u64::from(self.next), left);
        let offset = if op == Op::Copy {
            self.copy_offset(blocks)
        } else {
            u64::from(self.next)
        };
        let mut io = Io::new(0, op, self.lba + offset, blocks).flags(self.flags);
        if op == Op::Unmap {
            io.flags = Flags::empty();
        }
        io.source_lba = self.source_lba + if op == Op::Copy { offset } else { 0 };
        io.data = match op {
            Op::CompareAndWrite => std::mem::take(&mut self.data),
            _ => cut(
                &mut self.data,
                op.data_len(shape.bytes(blocks) as u64) as usize,
            ),
        };
        self.next += blocks;
        self.child(io, BufferUse::Piece)
    }

    fn next_zeroes(&mut self, shape: &Shape, memory: &mut Memory, pool: &Pool) -> Step {
        if memory.len() == 0 {
            return Step::Finished(Status::Unsupported);
        }
        if self.children.is_full() {
            return Step::Wait;
        }
        let Some(zeroes) = memory.zeroes(pool) else {
            return Step::Park;
        };
        let most = (zeroes.len() / shape.block_size as usize) as u32;
        let at = self.lba + u64::from(self.next);
        let blocks = shape
            .piece(Op::Write, at, self.blocks - self.next)
            .min(most);
        let flags = self.flags & Flags::FUA;
        self.next += blocks;
        let part = zeroes.slice(0, shape.bytes(blocks));
        self.child(
            Io::new(0, Op::Write, at, blocks).flags(flags).with(part),
            BufferUse::Shared,
        )
    }

    fn next_read(
        &mut self,
        part: BufferUse,
        shape: &Shape,
        memory: &mut Memory,
        pool: &Pool,
    ) -> Step {
        if let Some(step) = self.write_back() {
            return step;
        }
        if !self.children.is_empty() {
            return Step::Wait;
        }
        let Some(mut bounce) = memory.take(pool) else {
            return Step::Park;
        };
        let most = (bounce.len() / shape.block_size as usize) as u32;
        let left = (self.blocks - self.next).min(most);
        let (lba, blocks) = match part {
            BufferUse::ReadToWrite => {
                let blocks = self.copy_piece(left, shape);
                (self.source_lba + self.copy_offset(blocks), blocks)
            }
            _ => {
                let lba = self.lba + u64::from(self.next);
                (lba, shape.piece(Op::Read, lba, left))
            }
        };
        self.bounce.rest = Some(bounce.split_off(shape.bytes(blocks)));
        self.bounce.blocks = blocks;
        self.next += blocks;
        self.child(Io::new(0, Op::Read, lba, blocks).with(bounce), part)
    }

    /// Copy: writes the piece that was read.
    fn write_back(&mut self) -> Option<Step> {
        let filled = self.bounce.filled.take()?;
        let blocks = self.bounce.blocks;
        // The last read piece ends at `next`; counted from the end, it begins there.
        let offset = if self.backwards() {
            u64::from(self.blocks - self.next)
        } else {
            u64::from(self.next - blocks)
        };
        let io = Io::new(0, Op::Write, self.lba + offset, blocks).flags(self.flags & Flags::FUA);
        Some(self.child(io.with(filled), BufferUse::WriteBounce))
    }

    /// Compare-and-write: compares natively with a part of the expected data.
    fn next_expected(&mut self, shape: &Shape) -> Step {
        self.next_of_extent(0, Op::Compare, Flags::empty(), shape)
    }

    /// Compare-and-write: writes a part of the new data.
    fn next_new_data(&mut self, shape: &Shape) -> Step {
        self.next_of_extent(1, Op::Write, self.flags & Flags::FUA, shape)
    }

    fn next_of_extent(&mut self, extent: usize, op: Op, flags: Flags, shape: &Shape) -> Step {
        if self.children.is_full() {
            return Step::Wait;
        }
        let at = self.lba + u64::from(self.next);
        let blocks = shape.piece(op, at, self.blocks - self.next);
        let part = self.data[extent].slice(shape.bytes(self.next), shape.bytes(blocks));
        self.next += blocks;
        self.child(
            Io::new(0, op, at, blocks).flags(flags).with(part),
            BufferUse::Shared,
        )
    }

    /// True if the expected data contains `read` at offset `from`.
    fn expects(&self, mut from: usize, mut read: &[u8]) -> bool {
        for extent in &self.data {
            if from >= extent.len() {
                from -= extent.len();
                continue;
            }
            let len = read.len().min(extent.len() - from);
            let (now, later) = read.split_at(len);
            if now != &extent[from..from + len] {
                return false;
            }
            (read, from) = (later, 0);
            if read.is_empty() {
                return true;
            }
        }
        read.is_empty()
    }

    fn give_back(&mut self, buf: Option<Buf>, memory: &mut Memory) {
        let rest = self.bounce.rest.take();
        let Some(mut buf) = buf else { return };
        if rest.is_none_or(|rest| buf.unsplit(rest).is_ok()) {
            memory.give(buf);
        }
    }
}

/// Removes the first `bytes` from `data` and returns them.
fn cut(data: &mut Extents, mut bytes: usize) -> Extents {
    let mut part = Extents::new();
    while bytes > 0
        && let Some(first) = data.first_mut()
    {
        if first.len() > bytes {
            let rest = first.split_off(bytes);
            part.push(std::mem::replace(first, rest));
            break;
        }
        bytes -= first.len();
        part.push(data.remove(0));
    }
    part
}

/// Appends `part` to `whole` and joins the cut: the first extent had `first_len` bytes. A device
/// that keeps buffers may return a read in other buffers; the parts are then copied to a buffer of
/// `pool`. Returns false if the pool has no free buffer, and a part of the data is lost.
fn join(whole: &mut Extents, part: Extents, first_len: usize, pool: Option<&Pool>) -> bool {
    for mut buf in part {
        let open = whole.len() == 2 || whole.last().is_some_and(|last| last.len() < first_len);
        if open && let Some(last) = whole.last_mut() {
            match last.unsplit(buf) {
                Ok(()) => continue,
                Err(other) => buf = other,
            }
            let Some(both) = pool.and_then(|pool| together(last, &buf, pool)) else {
                return false;
            };
            *last = both;
        } else if whole.try_push(buf).is_err() {
            return false;
        }
    }
    true
}

#[cold]
fn together(a: &Buf, b: &Buf, pool: &Pool) -> Option<Buf> {
    let mut both = pool.acquire(a.len() + b.len())?;
    let (first, second) = both.bytes_mut()?.split_at_mut(a.len());
    first.copy_from_slice(a);
    second.copy_from_slice(b);
    Some(both)
}
