//! One I/O: an operation on a range of logical blocks, its buffers, and the token that must come
//! back.

use arrayvec::ArrayVec;
use nacre_hugepages::{Buf, Lent};
use serde::{Deserialize, Serialize};

/// The buffers of an I/O in order. Each is contiguous; two suffice for everything a host can ask
/// for (a compare-and-write carries the expected and the new data).
pub type Extents = ArrayVec<Buf, 2>;

/// Names an I/O to its submitter. Each layer translates: it submits with tokens of its own (a slab
/// index and a child number) and completes with the token of its own submitter.
pub type Token = u64;

/// What to do with the blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum Op {
    /// Fills the extents. A device that lends its memory may be given no extents and then answers
    /// with its own (see [`crate::Limits::lend_blocks`]).
    Read,
    Write,
    /// Everything completed before this was submitted is on stable media when it completes.
    Flush,
    /// The blocks' contents are no longer needed.
    Unmap,
    WriteZeroes,
    /// Compares the blocks with the extents; [`Status::Miscompare`] when they differ.
    Compare,
    /// Extent 0 is the expected data, extent 1 the new: compares and, if equal, writes, atomically
    /// against every other I/O to the device.
    CompareAndWrite,
    /// Copies `blocks` from `Io::source_lba` on the same device.
    Copy,
    /// Reads the blocks in place, or proves by other means that they can be read; transfers no
    /// data.
    Verify,
}

impl Op {
    pub const ALL: [Op; 9] = [
        Op::Read,
        Op::Write,
        Op::Flush,
        Op::Unmap,
        Op::WriteZeroes,
        Op::Compare,
        Op::CompareAndWrite,
        Op::Copy,
        Op::Verify,
    ];

    /// How many operations there are, for tables by operation.
    pub const COUNT: usize = Op::ALL.len();

    /// Its place in tables by operation.
    pub fn index(self) -> usize {
        self as usize
    }

    pub fn name(self) -> &'static str {
        match self {
            Op::Read => "read",
            Op::Write => "write",
            Op::Flush => "flush",
            Op::Unmap => "unmap",
            Op::WriteZeroes => "write_zeroes",
            Op::Compare => "compare",
            Op::CompareAndWrite => "compare_and_write",
            Op::Copy => "copy",
            Op::Verify => "verify",
        }
    }

    /// How many bytes of buffers it carries, given the bytes that its blocks hold.
    pub fn data_len(self, bytes: u64) -> u64 {
        match self {
            Op::Read | Op::Write | Op::Compare => bytes,
            Op::CompareAndWrite => 2 * bytes,
            Op::Flush | Op::Unmap | Op::WriteZeroes | Op::Copy | Op::Verify => 0,
        }
    }

    /// True if the operation changes the blocks it names.
    pub fn is_write(self) -> bool {
        matches!(
            self,
            Op::Write | Op::Unmap | Op::WriteZeroes | Op::CompareAndWrite | Op::Copy
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

/// One I/O on its way down.
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
    pub fn new(token: Token, op: Op, lba: u64, blocks: u32) -> Io {
        Io {
            token,
            op,
            flags: Flags::empty(),
            lba,
            blocks,
            source_lba: 0,
            data: Extents::new(),
        }
    }

    pub fn with(mut self, buf: Buf) -> Io {
        self.data.push(buf);
        self
    }

    pub fn flags(mut self, flags: Flags) -> Io {
        self.flags = flags;
        self
    }

    /// Sets the first block to copy from, for [`Op::Copy`].
    pub fn source(mut self, source_lba: u64) -> Io {
        self.source_lba = source_lba;
        self
    }

    /// Bytes in all extents.
    pub fn data_len(&self) -> usize {
        self.data.iter().map(Buf::len).sum()
    }

    /// Ends it without doing it.
    pub fn complete(self, status: Status) -> Completion {
        Completion {
            token: self.token,
            status,
            data: self.data,
            lent: None,
        }
    }
}

/// How an I/O ended. The device's answer, not a transport's: translated to an NVMe status once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    Ok,
    /// The medium could not be read.
    ReadError,
    /// The medium could not be written.
    WriteError,
    Miscompare,
    /// The range is not, or no longer, inside the device.
    OutOfRange,
    /// No space left behind a thin device or a sparse file.
    NoSpace,
    WriteProtected,
    Unsupported,
    /// Given up on request, or because the queue was closed.
    Aborted,
    /// The device is gone; trying again on another path may help.
    Gone,
    /// A resource was short for the moment; trying again helps.
    Retry,
    /// The device failed in a way that says nothing about the blocks.
    DeviceError,
    /// Protection or media integrity check failed.
    Integrity,
    /// A specific NVMe status that a fault injector or an NVMe device asked for.
    Nvme {
        sct: u8,
        sc: u8,
        dnr: bool,
    },
}

impl Status {
    #[inline]
    pub fn is_ok(self) -> bool {
        self == Status::Ok
    }

    /// How many kinds of status there are, for tables by kind.
    pub const KINDS: usize = 14;

    /// Its place in tables by kind.
    pub fn kind(self) -> usize {
        match self {
            Status::Ok => 0,
            Status::ReadError => 1,
            Status::WriteError => 2,
            Status::Miscompare => 3,
            Status::OutOfRange => 4,
            Status::NoSpace => 5,
            Status::WriteProtected => 6,
            Status::Unsupported => 7,
            Status::Aborted => 8,
            Status::Gone => 9,
            Status::Retry => 10,
            Status::DeviceError => 11,
            Status::Integrity => 12,
            Status::Nvme { .. } => 13,
        }
    }

    /// The names of the kinds, in the order of [`Status::kind`].
    pub const KIND_NAMES: [&'static str; Status::KINDS] = [
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

    /// What to call a failure of the device in an operation of this sort.
    pub fn medium_error(op: Op) -> Status {
        match op {
            Op::Read | Op::Compare | Op::Verify => Status::ReadError,
            Op::Write | Op::WriteZeroes | Op::CompareAndWrite | Op::Copy => Status::WriteError,
            Op::Flush | Op::Unmap => Status::DeviceError,
        }
    }
}

/// One I/O on its way up: its token, how it ended, and its buffers (for a read, now filled).
#[derive(Debug)]
pub struct Completion {
    pub token: Token,
    pub status: Status,
    pub data: Extents,
    /// The data of a read without extents: a view of the device's memory, to be sent from there
    /// soon. A write after this completion may be visible through it.
    pub lent: Option<Lent>,
}
