//! Decides how an I/O is executed: by the module directly, by an immediate result, or by a job.

use nacre_hugepages::Buf;

use crate::device::{Bdev, Support};
use crate::io::{Flags, Io, Op, Status};

/// The properties of a device that the decision depends on. They do not change.
#[derive(Debug, Clone)]
pub(super) struct Shape {
    pub block_size: u32,
    pub max_blocks: u32,
    pub max_unmap_blocks: u64,
    pub max_verify_blocks: u32,
    /// Largest native compare-and-write, in blocks.
    own_swap_blocks: u32,
    /// 0: no boundary.
    pub boundary_blocks: u32,
    pub read_only: bool,
    pub volatile_cache: bool,
    pub native_fua: bool,
    pub unmap_zeroes: bool,
    pub zero_copy_blocks: u32,
    native: [bool; Op::COUNT],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Plan {
    /// The module executes the I/O unchanged.
    Direct,
    /// The layer completes the I/O without the module.
    Now(Status),
    Job(Recipe),
}

/// Blocks of the largest emulated compare-and-write: its range is locked for a read and a write.
pub(super) const EMULATED_SWAP_BLOCKS: u32 = 128;

/// Method of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Recipe {
    /// Sends this operation to the module, in as many pieces as needed.
    Pieces(Op),
    /// Write zeroes: writes a buffer of zeroes repeatedly.
    WriteZeroBuffer,
    /// Compare: reads piece by piece and compares in memory.
    ReadAndCompare,
    /// Compare and write: compares, natively or by reading, then writes, with the range locked.
    Swap,
    /// Copy: reads and writes piece by piece.
    ReadAndWrite,
    /// Verify: reads piece by piece and discards the data.
    ReadAndDrop,
}

impl Shape {
    pub(super) fn of(bdev: &dyn Bdev) -> Self {
        let limits = bdev.limits();
        Self {
            block_size: bdev.geometry().block_size,
            max_blocks: limits.max_blocks.max(1),
            max_unmap_blocks: limits.max_unmap_blocks.max(1),
            max_verify_blocks: limits.max_verify_blocks.max(1),
            own_swap_blocks: limits
                .compare_and_write_blocks
                .clamp(1, limits.max_blocks.max(1)),
            boundary_blocks: limits.optimal_boundary_blocks,
            read_only: limits.read_only,
            volatile_cache: limits.volatile_cache,
            native_fua: bdev.native_fua(),
            unmap_zeroes: limits.unmap_zeroes && limits.unmap_granularity_blocks <= 1,
            // Pieces of device memory cannot be joined, so a read across a boundary needs buffers.
            zero_copy_blocks: match limits.optimal_boundary_blocks {
                0 => limits.zero_copy_blocks.min(limits.max_blocks),
                _ => 0,
            },
            native: Op::ALL.map(|op| bdev.supports(op) == Support::Native),
        }
    }

    pub(super) fn native(&self, op: Op) -> bool {
        self.native[op.index()]
    }

    /// How the layer and the module together support `op`.
    pub(super) fn support(&self, op: Op) -> Support {
        let (read, write) = (self.native(Op::Read), self.native(Op::Write));
        let emulated = match op {
            // The layer cannot emulate these operations.
            Op::Read | Op::Write | Op::Unmap => false,
            // Without a volatile cache every completed write is on the media.
            Op::Flush => !self.volatile_cache,
            Op::WriteZeroes => write,
            Op::Compare | Op::Verify => read,
            Op::CompareAndWrite | Op::Copy => read && write,
        };
        match (self.native(op), emulated) {
            (true, _) => Support::Native,
            (false, true) => Support::Emulated,
            (false, false) => Support::No,
        }
    }

    /// True if an operation needs bounce memory.
    pub(super) fn bounces(&self) -> bool {
        [
            Op::WriteZeroes,
            Op::Compare,
            Op::CompareAndWrite,
            Op::Copy,
            Op::Verify,
        ]
        .iter()
        .any(|op| self.support(*op) == Support::Emulated)
    }

    /// Blocks of the largest compare-and-write; 0: not supported.
    pub(super) fn swap_blocks(&self) -> u32 {
        match self.support(Op::CompareAndWrite) {
            Support::Native => self.own_swap_blocks,
            Support::Emulated => EMULATED_SWAP_BLOCKS,
            Support::No => 0,
        }
    }

    #[inline]
    pub(super) fn bytes(&self, blocks: u32) -> usize {
        blocks as usize * self.block_size as usize
    }

    /// True if a write needs a following flush to reach the media.
    pub(super) fn flush_after(&self, op: Op, flags: Flags) -> bool {
        let writes = op.is_write() && op != Op::Unmap;
        writes && flags.contains(Flags::FUA) && self.volatile_cache && !self.native_fua
    }

    /// Number of blocks, at most `left`, for the next request to the module, starting at `lba`.
    #[inline]
    pub(super) fn piece(&self, op: Op, lba: u64, left: u32) -> u32 {
        let most = match op {
            Op::Unmap | Op::WriteZeroes => {
                return left.min(u32::try_from(self.max_unmap_blocks).unwrap_or(u32::MAX));
            }
            Op::Flush | Op::CompareAndWrite => return left,
            Op::Copy => return left.min(self.max_blocks),
            Op::Verify => return left.min(self.max_verify_blocks),
            Op::Read | Op::Write | Op::Compare => left.min(self.max_blocks),
        };
        match self.boundary_blocks {
            0 => most,
            boundary => {
                let into = (lba % u64::from(boundary)) as u32;
                most.min(boundary - into)
            }
        }
    }

    /// Number of blocks, at most `left`, for one read or write that ends at `end`.
    pub(super) fn piece_before(&self, end: u64, left: u32) -> u32 {
        let most = left.min(self.max_blocks);
        match self.boundary_blocks {
            0 => most,
            boundary => most.min(((end - 1) % u64::from(boundary)) as u32 + 1),
        }
    }

    /// Chooses the method for `io` on a device of currently `total` blocks.
    #[inline]
    pub(super) fn plan(&self, io: &Io, total: u64) -> Plan {
        if io.op == Op::Flush {
            return match self.support(Op::Flush) {
                Support::Native => Plan::Direct,
                Support::Emulated => Plan::Now(Status::Ok),
                Support::No => Plan::Now(Status::Unsupported),
            };
        }
        let inside = |lba: u64| {
            lba.checked_add(u64::from(io.blocks))
                .is_some_and(|end| end <= total)
        };
        if !inside(io.lba) || (io.op == Op::Copy && !inside(io.source_lba)) {
            return Plan::Now(Status::OutOfRange);
        }
        if self.read_only && io.op.is_write() {
            return Plan::Now(Status::WriteProtected);
        }
        if io.blocks == 0 {
            return Plan::Now(Status::Ok);
        }
        if !self.data_fits(io) {
            return Plan::Now(Status::Unsupported);
        }
        if io.op == Op::CompareAndWrite && io.blocks > self.swap_blocks() {
            return Plan::Now(Status::Unsupported);
        }
        if !self.native(io.op) {
            return self.emulation(io);
        }
        let whole = self.piece(io.op, io.lba, io.blocks) == io.blocks;
        // The module may refuse this operation, which then needs a job for the emulation.
        let sure = io.op != Op::WriteZeroes;
        if whole && sure && !self.flush_after(io.op, io.flags) {
            return Plan::Direct;
        }
        Plan::Job(Recipe::Pieces(io.op))
    }

    /// True if `io` is a plain read or write: [`Shape::plan`] sends it straight to the module.
    #[inline]
    pub(super) fn is_plain(&self, io: &Io, total: u64) -> bool {
        let end = io.lba.checked_add(u64::from(io.blocks));
        let simple = match io.op {
            Op::Read => true,
            Op::Write => io.flags.is_empty() && !self.read_only,
            _ => false,
        };
        simple
            && io.blocks != 0
            && end.is_some_and(|end| end <= total)
            && io.blocks <= self.max_blocks
            && self.boundary_blocks == 0
            && self.native(io.op)
            && self.data_fits(io)
    }

    fn emulation(&self, io: &Io) -> Plan {
        if self.support(io.op) == Support::No {
            return Plan::Now(Status::Unsupported);
        }
        Plan::Job(match io.op {
            Op::Compare => Recipe::ReadAndCompare,
            Op::CompareAndWrite => Recipe::Swap,
            Op::Copy => Recipe::ReadAndWrite,
            Op::Verify => Recipe::ReadAndDrop,
            _ => {
                let deallocate =
                    io.flags.contains(Flags::DEALLOCATE) && !io.flags.contains(Flags::FUA);
                if deallocate && self.unmap_zeroes && self.native(Op::Unmap) {
                    Recipe::Pieces(Op::Unmap)
                } else {
                    Recipe::WriteZeroBuffer
                }
            }
        })
    }

    /// True if the buffers have the length of the blocks, or are absent in a zero-copy read.
    #[inline]
    fn data_fits(&self, io: &Io) -> bool {
        let bytes = self.bytes(io.blocks);
        match io.op {
            Op::Read if io.data.is_empty() => io.blocks <= self.zero_copy_blocks,
            Op::Read | Op::Write | Op::Compare => io.data_len() == bytes,
            Op::CompareAndWrite => {
                io.data.len() == 2 && io.data.iter().map(Buf::len).all(|len| len == bytes)
            }
            Op::Flush | Op::Unmap | Op::WriteZeroes | Op::Copy | Op::Verify => true,
        }
    }
}
