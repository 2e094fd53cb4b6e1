//! One I/O between submission and completion: builds its NVMe command (two for a fused Compare and
//! Write), and its completion. [`super::io::IoQueue`] has a table of them.

use nacre_bdev::{Completion, Extents, Flags, Io, Op, Status, Token};
use nacre_hugepages::{Buf, Pool};
use nacre_nvmf_wire::commands::io::{
    CopyCommand, CopyFormat, CopyRange0, DatasetManagement, DsmRange, ReadWrite, WriteZeroes,
};
use nacre_nvmf_wire::opcode::io as opcode;
use nacre_nvmf_wire::{Fuse, Sqe, StatusCode};
use nacre_reactor::Nanos;
use zerocopy::IntoBytes;

use super::queue::{CommandQueue, Finished};
use super::stats::IoStats;

/// The state of an I/O.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PendingStage {
    Waiting,
    /// The target has its commands: two for a compare-and-write.
    Sent {
        outstanding: u8,
    },
}

/// An accepted I/O that is not completed.
pub(super) struct Pending {
    /// The I/O with its buffers. While the target has a read, the transport has its buffer.
    io: Io,
    /// The contiguous buffer of the command, if the I/O has several buffers or none.
    own: Option<Buf>,
    stage: PendingStage,
    status: StatusCode,
    /// It was sent on a connection that was lost, so the target may have executed it.
    repeated: bool,
    pub resends: u8,
    /// Sequence number in the order of submission.
    pub order: u64,
}

impl Pending {
    /// `own`: the result of [`own_data`].
    #[inline]
    pub(super) fn new(io: Io, own: Option<Buf>, order: u64) -> Self {
        Self {
            io,
            own,
            stage: PendingStage::Waiting,
            status: StatusCode::SUCCESS,
            repeated: false,
            resends: 0,
            order,
        }
    }

    pub(super) fn token(&self) -> Token {
        self.io.token
    }

    pub(super) fn is_sent(&self) -> bool {
        self.stage != PendingStage::Waiting
    }

    /// Number of its commands: 1, or 2 for a compare-and-write.
    #[inline]
    pub(super) fn commands(&self) -> usize {
        match self.io.op {
            Op::CompareAndWrite => 2,
            _ => 1,
        }
    }

    /// The status with which it must fail instead of being sent, for example because a repetition
    /// could give another result.
    #[inline]
    pub(super) fn refusal(&self) -> Option<Status> {
        let io = &self.io;
        match io.op {
            // The caller's buffer was lost with the connection.
            Op::Read if io.data.is_empty() && self.own.is_none() => Some(Status::DeviceError),
            // A copy onto an overlapping range gives another result when executed twice.
            Op::Copy if self.repeated => {
                let apart = io.lba.abs_diff(io.source_lba) >= u64::from(io.blocks);
                (!apart).then_some(Status::DeviceError)
            }
            _ => None,
        }
    }

    /// Submits its commands. The queue must have enough free entries.
    #[inline]
    pub(super) fn send(&mut self, queue: &mut CommandQueue, token: u64, nsid: u32, now: Nanos) {
        let io = &mut self.io;
        let sqe = command(io, nsid);
        let (write, read) = match io.op {
            Op::Read => (None, self.own.take().or_else(|| io.data.pop())),
            Op::Write | Op::Compare if self.own.is_none() => (io.data.first().cloned(), None),
            Op::CompareAndWrite => (io.data.first().cloned(), None),
            _ => (self.own.clone(), None),
        };
        queue.submit(sqe, write, read, token, now);
        let mut outstanding = 1;
        if io.op == Op::CompareAndWrite {
            let mut second = sqe;
            second.opcode = opcode::WRITE;
            second.set_fuse(Fuse::Second);
            queue.submit(second, io.data.get(1).cloned(), None, token, now);
            outstanding = 2;
        }
        self.stage = PendingStage::Sent { outstanding };
        self.status = StatusCode::SUCCESS;
    }

    /// Takes the buffer of a read back from the transport.
    #[inline]
    pub(super) fn returned(&mut self, buf: Buf) {
        if self.io.data.is_empty() {
            self.io.data.push(buf)
        } else {
            self.own = Some(buf)
        }
    }

    /// Marks it as waiting after its connection was lost or its data were damaged.
    pub(super) fn lost(&mut self) {
        self.repeated = true;
        self.stage = PendingStage::Waiting;
    }

    /// Marks it as waiting and not executed, after the target refused it with an ANA status.
    pub(super) fn refused(&mut self) {
        self.stage = PendingStage::Waiting;
    }

    /// Handles the completion of one of its commands. Returns the status of the I/O; `None`: the
    /// other command is outstanding.
    #[inline]
    pub(super) fn finished(&mut self, one: Finished) -> Option<StatusCode> {
        let PendingStage::Sent { outstanding } = &mut self.stage else {
            return None;
        };
        *outstanding -= 1;
        let last = *outstanding == 0;
        let mut status = one.cqe.status();
        if let Some(buf) = one.read {
            if status.is_success() && one.transferred as usize != buf.len() {
                tracing::error!(
                    wanted = buf.len(),
                    got = one.transferred,
                    lba = self.io.lba,
                    "the target answered a read with too little data"
                );
                status = StatusCode::DATA_TRANSFER_ERROR;
            }
            self.returned(buf);
        }
        // Of a fused pair, use the status of the command that failed first.
        let says_why = self.status.is_success()
            || self.status.code() == StatusCode::ABORTED_FAILED_FUSED && !status.is_success();
        if says_why {
            self.status = status;
        }
        last.then_some(self.status)
    }

    /// Bytes copied between its buffers and the command's buffer.
    #[inline]
    pub(super) fn copied(&self) -> u64 {
        match (self.io.op, &self.own) {
            (Op::Read | Op::Write | Op::Compare, Some(own)) => own.len() as u64,
            _ => 0,
        }
    }

    /// Counts its end in the statistics of its queue.
    #[inline]
    pub(super) fn count(&self, status: StatusCode, stats: &mut IoStats) {
        let bytes = self.io.data_len() as u64;
        match self.io.op {
            _ if !status.is_success() => stats.failed += 1,
            Op::Read => {
                stats.reads += 1;
                stats.read_bytes += bytes;
            }
            Op::Write => {
                stats.writes += 1;
                stats.write_bytes += bytes;
            }
            _ => {}
        }
    }

    /// Builds the completion after all commands have completed, and returns the caller's buffers.
    #[inline]
    pub(super) fn complete(&mut self, status: StatusCode) -> Completion {
        let mut status = bdev_status(status);
        if self.io.op == Op::CompareAndWrite && self.repeated && status == Status::Miscompare {
            // The first attempt may have written the blocks, so the mismatch proves nothing.
            status = Status::DeviceError;
        }
        if self.io.op == Op::Read
            && let Some(own) = self.own.take()
            && status.is_ok()
            && !scatter(&own, &mut self.io.data)
        {
            status = Status::DeviceError;
        }
        self.end(status)
    }

    #[inline]
    pub(super) fn end(&mut self, status: Status) -> Completion {
        Completion {
            token: self.io.token,
            status,
            data: std::mem::take(&mut self.io.data),
            zero_copy: None,
        }
    }
}

/// Allocates the command's buffer for an I/O whose data are not in exactly one buffer. `Ok(None)`:
/// not needed. `Err` with [`Status::Retry`]: no buffer is free. Any other status ends the I/O
/// without a command.
#[inline]
pub(super) fn own_data(io: &Io, pool: &Pool) -> Result<Option<Buf>, Status> {
    let small = |bytes: &[u8]| {
        let mut buf = pool.acquire(bytes.len()).ok_or(Status::Retry)?;
        buf.bytes_mut().ok_or(Status::Retry)?.copy_from_slice(bytes);
        Ok(Some(buf))
    };
    match io.op {
        // A command cannot have zero blocks: NLB is 0's based.
        op if io.blocks == 0 && op != Op::Flush => Err(Status::Ok),
        // This queue has no zero-copy reads.
        Op::Read if io.data.is_empty() => Err(Status::Unsupported),
        Op::Read if io.data.len() > 1 => pool.acquire(io.data_len()).ok_or(Status::Retry).map(Some),
        Op::Write | Op::Compare if io.data.len() > 1 => {
            gather(&io.data, pool).ok_or(Status::Retry).map(Some)
        }
        Op::Unmap => small(DsmRange::new(io.lba, io.blocks).as_bytes()),
        Op::Copy if io.blocks > COPY_BLOCKS => Err(Status::Unsupported),
        Op::Copy => small(CopyRange0::new(io.source_lba, io.blocks).as_bytes()),
        _ => Ok(None),
    }
}

/// Most blocks of one Copy source range (NLB: 16 bits, 0's based).
const COPY_BLOCKS: u32 = 1 << 16;

/// Copies `whole` into the buffers. Returns false if another handle shares one of them.
fn scatter(whole: &Buf, parts: &mut Extents) -> bool {
    let mut rest: &[u8] = whole;
    for part in parts {
        let Some(bytes) = part.bytes_mut() else {
            return false;
        };
        let (here, after) = rest.split_at(bytes.len());
        bytes.copy_from_slice(here);
        rest = after;
    }
    true
}

/// The command of an I/O; for a compare-and-write the Compare.
#[inline]
fn command(io: &Io, nsid: u32) -> Sqe {
    let fua = io.flags.contains(Flags::FUA);
    let rw = |opcode, fua| {
        let rw = ReadWrite {
            fua,
            ..ReadWrite::new(io.lba, io.blocks)
        };
        rw.to_sqe(opcode, 0, nsid)
    };
    match io.op {
        Op::Read => rw(opcode::READ, fua),
        Op::Write => rw(opcode::WRITE, fua),
        Op::Compare => rw(opcode::COMPARE, false),
        Op::Verify => rw(opcode::VERIFY, false),
        Op::CompareAndWrite => {
            let mut sqe = rw(opcode::COMPARE, false);
            sqe.set_fuse(Fuse::First);
            sqe
        }
        Op::Flush => Sqe::for_namespace(opcode::FLUSH, 0, nsid),
        Op::WriteZeroes => {
            let command = WriteZeroes {
                slba: io.lba,
                blocks: io.blocks,
                deallocate: io.flags.contains(Flags::DEALLOCATE),
                fua,
                ..WriteZeroes::default()
            };
            command.to_sqe(0, nsid)
        }
        Op::Unmap => {
            let command = DatasetManagement {
                ranges: 1,
                deallocate: true,
                ..Default::default()
            };
            command.to_sqe(0, nsid)
        }
        Op::Copy => {
            let command = CopyCommand {
                sdlba: io.lba,
                ranges: 1,
                format: CopyFormat::Format0,
                fua,
                lr: false,
                read_protection: 0,
                protection: Default::default(),
                directive: Default::default(),
            };
            command.to_sqe(0, nsid)
        }
    }
}

/// Converts an NVMe status to the status of a bdev I/O.
pub(super) fn bdev_status(status: StatusCode) -> Status {
    match status.code() {
        StatusCode::SUCCESS => Status::Ok,
        StatusCode::COMPARE_FAILURE => Status::Miscompare,
        StatusCode::UNRECOVERED_READ_ERROR => Status::ReadError,
        StatusCode::WRITE_FAULT => Status::WriteError,
        StatusCode::LBA_OUT_OF_RANGE => Status::OutOfRange,
        StatusCode::CAPACITY_EXCEEDED => Status::NoSpace,
        StatusCode::NAMESPACE_IS_WRITE_PROTECTED => Status::WriteProtected,
        StatusCode::INVALID_OPCODE => Status::Unsupported,
        StatusCode::ABORT_REQUESTED => Status::Aborted,
        StatusCode::COMMAND_INTERRUPTED | StatusCode::NAMESPACE_NOT_READY => Status::Retry,
        StatusCode::INVALID_NAMESPACE_OR_FORMAT => Status::Gone,
        StatusCode::INTERNAL_ERROR | StatusCode::DATA_TRANSFER_ERROR => Status::DeviceError,
        StatusCode::GUARD_CHECK_ERROR => Status::Integrity,
        _ if status.is_path_related() => Status::Gone,
        _ => Status::Nvme {
            sct: status.sct(),
            sc: status.sc(),
            dnr: status.dnr(),
        },
    }
}

/// Copies the buffers of an I/O into one contiguous buffer. `None`: no buffer is free.
fn gather(parts: &[Buf], pool: &Pool) -> Option<Buf> {
    let mut whole = pool.acquire(parts.iter().map(Buf::len).sum())?;
    let mut rest = whole.bytes_mut()?;
    for part in parts {
        let (here, after) = rest.split_at_mut(part.len());
        here.copy_from_slice(part);
        rest = after;
    }
    Some(whole)
}
