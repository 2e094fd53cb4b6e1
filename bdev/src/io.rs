//! One I/O: an operation on a range of logical blocks, its buffers, and the token that identifies
//! its completion.

use arrayvec::ArrayVec;
use nacre_hugepages::{Buf, MemoryView};
use serde::{Deserialize, Serialize};

/// The buffers of an I/O in order. Each is contiguous; two suffice for everything a host can ask
/// for (a compare-and-write carries the expected and the new data).
pub type Extents = ArrayVec<Buf, 2>;

/// Identifies an I/O to its submitter; all 64 bits return in the completion. A queue that submits
/// to a queue below may use tokens of its own there.
pub type Token = u64;

/// Operation on the blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum Op {
    /// Fills the extents. A zero-copy read has no extents, and completes with a view of the
    /// device's memory (see [`crate::Limits::zero_copy_blocks`]).
    Read,
    Write,
    /// When it completes, every write that completed before its submission is on stable media.
    Flush,
    /// Deallocates the blocks: their contents are no longer needed.
    Unmap,
    WriteZeroes,
    /// Compares the blocks with the extents; [`Status::Miscompare`] if they differ.
    Compare,
    /// Compares the blocks with extent 0 and, if equal, writes extent 1; [`Status::Miscompare`] if
    /// they differ. Atomic with respect to every other write to the device, not to reads.
    CompareAndWrite,
    /// Copies `blocks` from `Io::source_lba` on the same device. The ranges may overlap.
    Copy,
    /// Verifies that the blocks can be read; transfers no data.
    Verify,
}

impl Op {
    pub const ALL: [Self; 9] = [
        Self::Read,
        Self::Write,
        Self::Flush,
        Self::Unmap,
        Self::WriteZeroes,
        Self::Compare,
        Self::CompareAndWrite,
        Self::Copy,
        Self::Verify,
    ];

    /// Number of operations, for tables indexed by operation.
    pub const COUNT: usize = Self::ALL.len();

    /// Index of the operation in such tables.
    pub fn index(self) -> usize {
        self as usize
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Flush => "flush",
            Self::Unmap => "unmap",
            Self::WriteZeroes => "write_zeroes",
            Self::Compare => "compare",
            Self::CompareAndWrite => "compare_and_write",
            Self::Copy => "copy",
            Self::Verify => "verify",
        }
    }

    /// Bytes of the buffers of this operation on `bytes` bytes of blocks. A zero-copy read has no
    /// buffers.
    pub fn data_len(self, bytes: u64) -> u64 {
        match self {
            Self::Read | Self::Write | Self::Compare => bytes,
            Self::CompareAndWrite => 2 * bytes,
            Self::Flush | Self::Unmap | Self::WriteZeroes | Self::Copy | Self::Verify => 0,
        }
    }

    /// True if the operation changes the blocks.
    pub fn is_write(self) -> bool {
        matches!(
            self,
            Self::Write | Self::Unmap | Self::WriteZeroes | Self::CompareAndWrite | Self::Copy
        )
    }
}

bitflags::bitflags! {
    /// Modifiers of one I/O.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct Flags: u8 {
        /// Force unit access: on stable media before it completes.
        const FUA = 1;
        /// Write zeroes: the blocks may be deallocated (NVMe DEAC).
        const DEALLOCATE = 2;
    }
}

/// One I/O, passed down from the submitter to the device.
#[derive(Debug)]
pub struct Io {
    pub token: Token,
    pub op: Op,
    pub flags: Flags,
    pub lba: u64,
    pub blocks: u32,
    /// First source block of a [`Op::Copy`].
    pub source_lba: u64,
    pub data: Extents,
}

impl Io {
    pub fn new(token: Token, op: Op, lba: u64, blocks: u32) -> Self {
        Self {
            token,
            op,
            flags: Flags::empty(),
            lba,
            blocks,
            source_lba: 0,
            data: Extents::new(),
        }
    }

    pub fn with(mut self, buf: Buf) -> Self {
        self.data.push(buf);
        self
    }

    pub fn flags(mut self, flags: Flags) -> Self {
        self.flags = flags;
        self
    }

    /// Sets the first block to copy from, for [`Op::Copy`].
    pub fn source(mut self, source_lba: u64) -> Self {
        self.source_lba = source_lba;
        self
    }

    /// Bytes in all extents.
    pub fn data_len(&self) -> usize {
        self.data.iter().map(Buf::len).sum()
    }

    /// Completes the I/O without executing it.
    pub fn complete(self, status: Status) -> Completion {
        Completion {
            token: self.token,
            status,
            data: self.data,
            zero_copy: None,
        }
    }
}

/// Result of an I/O in the device's terms. It is translated to an NVMe status in one place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    Ok,
    /// The medium could not be read.
    ReadError,
    /// The medium could not be written.
    WriteError,
    Miscompare,
    /// The range is not inside the device (any more).
    OutOfRange,
    /// No space left behind a thin device or a sparse file.
    NoSpace,
    WriteProtected,
    Unsupported,
    /// Aborted on request ([`crate::Queue::abort`]), or not repeated after the device lost it.
    Aborted,
    /// The device was removed; a retry on another path may help.
    Gone,
    /// A resource was temporarily short; a retry helps.
    Retry,
    /// The device failed; the state of the blocks is unknown.
    DeviceError,
    /// A check of protection information or of media integrity failed.
    Integrity,
    /// Another NVMe status: Status Code Type, Status Code, Do Not Retry.
    Nvme {
        sct: u8,
        sc: u8,
        dnr: bool,
    },
}

impl Status {
    #[inline]
    pub fn is_ok(self) -> bool {
        self == Self::Ok
    }

    /// Number of status kinds, for tables indexed by kind.
    pub const KINDS: usize = 14;

    /// Index of the kind in such tables.
    pub fn kind(self) -> usize {
        match self {
            Self::Ok => 0,
            Self::ReadError => 1,
            Self::WriteError => 2,
            Self::Miscompare => 3,
            Self::OutOfRange => 4,
            Self::NoSpace => 5,
            Self::WriteProtected => 6,
            Self::Unsupported => 7,
            Self::Aborted => 8,
            Self::Gone => 9,
            Self::Retry => 10,
            Self::DeviceError => 11,
            Self::Integrity => 12,
            Self::Nvme { .. } => 13,
        }
    }

    /// The names of the kinds, in the order of [`Status::kind`].
    pub const KIND_NAMES: [&'static str; Self::KINDS] = [
        "ok",
        "read_error",
        "write_error",
        "miscompare",
        "out_of_range",
        "no_space",
        "write_protected",
        "unsupported",
        "aborted",
        "gone",
        "retry",
        "device_error",
        "integrity",
        "nvme",
    ];

    /// The status for a medium failure of an operation: a read error, a write error, or, for flush
    /// and unmap, a device error.
    pub fn medium_error(op: Op) -> Self {
        match op {
            Op::Read | Op::Compare | Op::Verify => Self::ReadError,
            Op::Write | Op::WriteZeroes | Op::CompareAndWrite | Op::Copy => Self::WriteError,
            Op::Flush | Op::Unmap => Self::DeviceError,
        }
    }
}

/// The completion of an I/O: its token, result and buffers (filled, for a read).
#[derive(Debug)]
pub struct Completion {
    pub token: Token,
    pub status: Status,
    pub data: Extents,
    /// The data of a read without extents: a view of the device's memory. Send it soon: a later
    /// write may be visible through it.
    pub zero_copy: Option<MemoryView>,
}
