//! Builds the submission queue entries (SQEs) of the ring's operations. `ring.rs` submits them, and
//! guarantees that their pointers are valid.

use io_uring::opcode;
use io_uring::squeue::Entry;
use io_uring::types::{Fd, FsyncFlags};

/// `BLOCK_URING_CMD_DISCARD`, `_IO(0x12, 0)` of linux/blkdev.h (6.12).
const BLOCK_URING_CMD_DISCARD: u32 = 0x1200;

/// One operation on the file, with the buffers of its slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Command {
    /// Reads `len` bytes at file offset `offset` into the buffers, after their first `skip` bytes.
    Read {
        offset: u64,
        skip: usize,
        len: usize,
    },
    Write {
        offset: u64,
        skip: usize,
        len: usize,
        dsync: bool,
    },
    /// `fdatasync` or `fsync`.
    Sync {
        data_only: bool,
    },
    Fallocate {
        mode: i32,
        offset: u64,
        len: u64,
    },
    /// Discards a range of a block device; only if [`crate::ring::Facts::discard`] is true.
    Discard {
        offset: u64,
        len: u64,
    },
}

/// The memory of a read or write.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Parts<'a> {
    /// The iovec array in the slot, where the kernel may read it later.
    pub list: &'a [libc::iovec],
    /// The registered region that a single part lies in.
    pub region: Option<u16>,
}

impl Command {
    pub(crate) fn entry(self, fd: Fd, parts: Parts<'_>) -> Entry {
        match self {
            Self::Read { offset, .. } => read(fd, offset, parts),
            Self::Write { offset, dsync, .. } => write(fd, offset, dsync, parts),
            Self::Sync { data_only } => {
                let how = if data_only {
                    FsyncFlags::DATASYNC
                } else {
                    FsyncFlags::empty()
                };
                opcode::Fsync::new(fd).flags(how).build()
            }
            Self::Fallocate { mode, offset, len } => opcode::Fallocate::new(fd, len)
                .offset(offset)
                .mode(mode)
                .build(),
            Self::Discard { offset, len } => discard(fd, offset, len),
        }
    }
}

fn read(fd: Fd, offset: u64, parts: Parts<'_>) -> Entry {
    let [part] = parts.list else {
        let (list, count) = (parts.list.as_ptr(), parts.list.len() as u32);
        return opcode::Readv::new(fd, list, count).offset(offset).build();
    };
    let (base, len) = (part.iov_base.cast::<u8>(), part.iov_len as u32);
    match parts.region {
        Some(region) => opcode::ReadFixed::new(fd, base, len, region)
            .offset(offset)
            .build(),
        None => opcode::Read::new(fd, base, len).offset(offset).build(),
    }
}

fn write(fd: Fd, offset: u64, dsync: bool, parts: Parts<'_>) -> Entry {
    let flags = if dsync { libc::RWF_DSYNC } else { 0 };
    let [part] = parts.list else {
        let (list, count) = (parts.list.as_ptr(), parts.list.len() as u32);
        return opcode::Writev::new(fd, list, count)
            .offset(offset)
            .rw_flags(flags)
            .build();
    };
    let (base, len) = (part.iov_base.cast::<u8>().cast_const(), part.iov_len as u32);
    match parts.region {
        Some(region) => opcode::WriteFixed::new(fd, base, len, region)
            .offset(offset)
            .rw_flags(flags)
            .build(),
        None => opcode::Write::new(fd, base, len)
            .offset(offset)
            .rw_flags(flags)
            .build(),
    }
}

/// `sqe->addr` is the start, `sqe->addr3` (the first half of the command bytes) the length.
pub(crate) fn discard(fd: Fd, offset: u64, len: u64) -> Entry {
    let mut range = [0; 16];
    range[..8].copy_from_slice(&len.to_ne_bytes());
    opcode::UringCmd16::new(fd, BLOCK_URING_CMD_DISCARD)
        .cmd(range)
        .addr(Some(offset))
        .build()
}
