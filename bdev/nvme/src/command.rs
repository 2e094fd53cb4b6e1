//! Converts an I/O to a command of the NVM Command Set, and its completion to a bdev status. Pure
//! functions, used by [`crate::queue_pair`].

use nacre_bdev::{Flags, Op, Status};
use nacre_nvmf_wire::commands::io::{CopyCommand, CopyFormat, DatasetManagement, WriteZeroes};
use nacre_nvmf_wire::opcode::io as opcode;
use nacre_nvmf_wire::{Fuse, Sqe, StatusCode};
use zerocopy::little_endian::U32;

use crate::data::Pointer;

/// The fields of an I/O that its command needs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CommandFields {
    pub op: Op,
    pub flags: Flags,
    pub lba: u64,
    pub blocks: u32,
    /// Number of source ranges of a Copy.
    pub ranges: u16,
    /// The controller inserts, checks and strips protection information.
    pub protected: bool,
}

/// PRCHK, of the guard (NVM 3.2.6).
const CHECK_GUARD: u32 = 1 << 28;

/// The command for `ask`. A compare-and-write has two commands: this is the first, [`write_of`]
/// returns the second.
#[inline]
pub(crate) fn sqe(ask: &CommandFields, nsid: u32, cid: u16, pointer: &Pointer) -> Sqe {
    let fua = ask.flags.contains(Flags::FUA);
    let mut sqe = match ask.op {
        Op::Read | Op::Write => return transfer(ask, nsid, cid, pointer),
        Op::Compare => range(opcode::COMPARE, ask, nsid, cid, false),
        Op::Verify => verify(ask, nsid, cid),
        Op::CompareAndWrite => {
            let mut sqe = range(opcode::COMPARE, ask, nsid, cid, false);
            sqe.set_fuse(Fuse::First);
            sqe
        }
        Op::Flush => Sqe::for_namespace(opcode::FLUSH, cid, nsid),
        Op::Unmap => {
            let command = DatasetManagement {
                ranges: 1,
                deallocate: true,
                ..DatasetManagement::default()
            };
            command.to_sqe(cid, nsid)
        }
        Op::WriteZeroes => {
            let command = WriteZeroes {
                slba: ask.lba,
                blocks: ask.blocks,
                deallocate: ask.flags.contains(Flags::DEALLOCATE),
                fua,
                ..WriteZeroes::default()
            };
            let mut sqe = command.to_sqe(cid, nsid);
            if ask.protected {
                protect(&mut sqe, ask, false);
            }
            sqe
        }
        Op::Copy => {
            let command = CopyCommand {
                sdlba: ask.lba,
                ranges: ask.ranges,
                format: CopyFormat::Format0,
                fua,
                lr: false,
                read_protection: 0,
                protection: Default::default(),
                directive: Default::default(),
            };
            command.to_sqe(cid, nsid)
        }
    };
    set_pointer(&mut sqe, pointer);
    sqe
}

/// A read or a write.
#[inline]
pub(crate) fn transfer(ask: &CommandFields, nsid: u32, cid: u16, pointer: &Pointer) -> Sqe {
    let opcode = match ask.op {
        Op::Write => opcode::WRITE,
        _ => opcode::READ,
    };
    let fua = ask.flags.contains(Flags::FUA);
    let mut sqe = range(opcode, ask, nsid, cid, fua);
    set_pointer(&mut sqe, pointer);
    sqe
}

/// The second half of a compare-and-write.
pub(crate) fn write_of(ask: &CommandFields, nsid: u32, cid: u16, pointer: &Pointer) -> Sqe {
    let fua = ask.flags.contains(Flags::FUA);
    let mut sqe = range(opcode::WRITE, ask, nsid, cid, fua);
    sqe.set_fuse(Fuse::Second);
    set_pointer(&mut sqe, pointer);
    sqe
}

#[inline]
pub(crate) fn set_pointer(sqe: &mut Sqe, pointer: &Pointer) {
    sqe.set_psdt(pointer.psdt);
    sqe.dptr[..8].copy_from_slice(&pointer.dptr[0].to_le_bytes());
    sqe.dptr[8..].copy_from_slice(&pointer.dptr[1].to_le_bytes());
}

#[inline]
fn range(opcode: u8, ask: &CommandFields, nsid: u32, cid: u16, fua: bool) -> Sqe {
    let mut sqe = Sqe::for_namespace(opcode, cid, nsid);
    sqe.set_cdw10_11(ask.lba);
    sqe.cdw12 = U32::new(ask.blocks.wrapping_sub(1) & 0xffff | u32::from(fua) << 30);
    if ask.protected {
        protect(&mut sqe, ask, opcode == opcode::READ);
    }
    sqe
}

/// A Verify command. With protection information it checks the guard; PRACT does not apply.
#[cold]
fn verify(ask: &CommandFields, nsid: u32, cid: u16) -> Sqe {
    let plain = CommandFields {
        protected: false,
        ..*ask
    };
    let mut sqe = range(opcode::VERIFY, &plain, nsid, cid, false);
    if ask.protected {
        sqe.cdw12 = U32::new(sqe.cdw12.get() | CHECK_GUARD);
    }
    sqe
}

/// Sets PRACT, and for reads also the guard check. The initial reference tag is the low 32 bits of
/// the LBA.
#[cold]
fn protect(sqe: &mut Sqe, ask: &CommandFields, check: bool) {
    let guard = if check { CHECK_GUARD } else { 0 };
    sqe.cdw12 = U32::new(sqe.cdw12.get() | 1 << 29 | guard);
    sqe.cdw14 = U32::new(ask.lba as u32);
}

pub(crate) fn opcode_of(op: Op) -> u8 {
    match op {
        Op::Read => opcode::READ,
        Op::Write => opcode::WRITE,
        Op::Flush => opcode::FLUSH,
        Op::Unmap => opcode::DATASET_MANAGEMENT,
        Op::WriteZeroes => opcode::WRITE_ZEROES,
        Op::Compare | Op::CompareAndWrite => opcode::COMPARE,
        Op::Copy => opcode::COPY,
        Op::Verify => opcode::VERIFY,
    }
}

/// True if the operation is idempotent. Other I/O in between does not matter, because no host may
/// rely on the order of I/Os in flight at the same time.
pub(crate) fn is_repeatable(op: Op) -> bool {
    match op {
        // A copy has one piece in flight at a time, and no piece overlaps its source.
        Op::Read | Op::Write | Op::Flush | Op::Unmap | Op::WriteZeroes | Op::Copy | Op::Verify => {
            true
        }
        // A second comparison may have another result.
        Op::Compare | Op::CompareAndWrite => false,
    }
}

/// The next piece of a copy of which `done` blocks are copied: source, destination, and number of
/// blocks. A piece does not overlap its source, and no piece overwrites the source of a later one.
/// So the result is right even if source and destination overlap. A copy of blocks to themselves is
/// one piece.
pub(crate) fn copy_piece(source: u64, lba: u64, blocks: u32, done: u32) -> (u64, u64, u32) {
    let distance = source.abs_diff(lba);
    let left = blocks - done;
    let piece = match distance {
        0 => left,
        distance => u64::from(left).min(distance) as u32,
    };
    let at = if lba > source {
        u64::from(left - piece)
    } else {
        u64::from(done)
    };
    (source + at, lba + at, piece)
}

/// The driver's reaction to a completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    Done(Status),
    /// The driver or the controller aborted the command, which may have been executed in part.
    Aborted,
    /// The controller requests a retry, after the delay of CRD.
    Again {
        crd: u8,
    },
}

#[inline]
pub(crate) fn verdict(field: u16, op: Op) -> Verdict {
    let status = StatusCode::from_field(field);
    if status.is_success() {
        return Verdict::Done(Status::Ok);
    }
    failed(status, op)
}

fn failed(status: StatusCode, op: Op) -> Verdict {
    match status.code() {
        StatusCode::ABORT_REQUESTED
        | StatusCode::ABORTED_SQ_DELETION
        | StatusCode::ABORTED_BY_HOST => Verdict::Aborted,
        StatusCode::NAMESPACE_NOT_READY
        | StatusCode::COMMAND_INTERRUPTED
        | StatusCode::TRANSIENT_TRANSPORT_ERROR
            if !status.dnr() =>
        {
            Verdict::Again { crd: status.crd() }
        }
        _ => Verdict::Done(status_of(status, op)),
    }
}

fn status_of(status: StatusCode, op: Op) -> Status {
    match status.code() {
        StatusCode::UNRECOVERED_READ_ERROR => match op {
            Op::Read | Op::Compare | Op::Copy | Op::Verify => Status::ReadError,
            _ => Status::medium_error(op),
        },
        StatusCode::WRITE_FAULT => Status::WriteError,
        StatusCode::COMPARE_FAILURE => Status::Miscompare,
        StatusCode::LBA_OUT_OF_RANGE => Status::OutOfRange,
        StatusCode::CAPACITY_EXCEEDED => Status::NoSpace,
        StatusCode::NAMESPACE_IS_WRITE_PROTECTED | StatusCode::WRITE_TO_READ_ONLY_RANGE => {
            Status::WriteProtected
        }
        StatusCode::INVALID_OPCODE => Status::Unsupported,
        StatusCode::INVALID_NAMESPACE_OR_FORMAT => Status::Gone,
        StatusCode::INTERNAL_ERROR => Status::DeviceError,
        StatusCode::GUARD_CHECK_ERROR
        | StatusCode::APPLICATION_TAG_CHECK_ERROR
        | StatusCode::REFERENCE_TAG_CHECK_ERROR
        | StatusCode::STORAGE_TAG_CHECK_ERROR => Status::Integrity,
        code => Status::Nvme {
            sct: code.sct(),
            sc: code.sc(),
            dnr: status.dnr(),
        },
    }
}

#[cfg(test)]
mod tests {
    use nacre_nvmf_wire::commands::IoCommand;
    use nacre_nvmf_wire::sqe::Psdt;

    use super::*;

    fn ask(op: Op, flags: Flags) -> CommandFields {
        CommandFields {
            op,
            flags,
            lba: 0x1_2345_6789,
            blocks: 65_536,
            ranges: 3,
            protected: false,
        }
    }

    /// For each operation, the fields that a controller reads.
    #[test]
    fn commands() {
        let pointer = Pointer::prp(0x1000, 0x2000);
        for op in Op::ALL {
            let sqe = sqe(&ask(op, Flags::FUA), 7, 0x123, &pointer);
            assert_eq!((sqe.nsid(), sqe.cid(), sqe.psdt()), (7, 0x123, Psdt::Prp));
            assert_eq!(sqe.opcode, opcode_of(op));
            match (op, IoCommand::parse(&sqe).unwrap()) {
                (Op::Read, IoCommand::Read(range)) | (Op::Write, IoCommand::Write(range)) => {
                    assert_eq!((range.slba, range.blocks), (0x1_2345_6789, 65_536));
                    assert!(range.fua);
                }
                (Op::Compare, IoCommand::Compare(range))
                | (Op::Verify, IoCommand::Verify(range)) => {
                    assert_eq!(range.blocks, 65_536);
                }
                (Op::CompareAndWrite, IoCommand::Compare(_)) => {
                    assert_eq!(sqe.fuse(), Fuse::First);
                }
                (Op::Flush, IoCommand::Flush) => {}
                (Op::Unmap, IoCommand::DatasetManagement(dsm)) => {
                    assert!(dsm.deallocate && dsm.ranges == 1);
                }
                (Op::WriteZeroes, IoCommand::WriteZeroes(zeroes)) => {
                    assert!(zeroes.fua && !zeroes.deallocate);
                }
                (Op::Copy, IoCommand::Copy(copy)) => assert_eq!(copy.ranges, 3),
                (op, command) => panic!("{op:?} became {command:?}"),
            }
        }
        let second = write_of(
            &ask(Op::CompareAndWrite, Flags::empty()),
            7,
            1,
            &Pointer::NONE,
        );
        assert_eq!(
            (second.opcode, second.fuse()),
            (opcode::WRITE, Fuse::Second)
        );
    }

    /// Commands for a controller that inserts and strips protection information.
    #[test]
    fn protected() {
        for op in [Op::Read, Op::Write, Op::WriteZeroes] {
            let protected = CommandFields {
                protected: true,
                ..ask(op, Flags::empty())
            };
            let sqe = sqe(&protected, 7, 1, &Pointer::NONE);
            let check = u32::from(op == Op::Read) << 28;
            assert_eq!(sqe.cdw12.get() & 0x3c00_0000, 1 << 29 | check);
            assert_eq!(sqe.cdw14.get(), 0x2345_6789);
        }
        let protected = CommandFields {
            protected: true,
            ..ask(Op::Verify, Flags::empty())
        };
        let sqe = sqe(&protected, 7, 1, &Pointer::NONE);
        assert_eq!(sqe.cdw12.get() & 0x3c00_0000, CHECK_GUARD);
    }

    /// Statuses that are repeated, and those that end the I/O, each with its result.
    #[test]
    fn statuses_decide_the_next_step() {
        let of = |status: StatusCode, op| verdict(status.field(), op);
        assert_eq!(of(StatusCode::SUCCESS, Op::Read), Verdict::Done(Status::Ok));
        assert_eq!(
            of(StatusCode::NAMESPACE_NOT_READY.with_crd(2), Op::Read),
            Verdict::Again { crd: 2 }
        );
        let never = StatusCode::NAMESPACE_NOT_READY.with_dnr();
        assert!(matches!(
            of(never, Op::Read),
            Verdict::Done(Status::Nvme { dnr: true, .. })
        ));
        assert_eq!(of(StatusCode::ABORT_REQUESTED, Op::Write), Verdict::Aborted);
        for (status, op, expected) in [
            (
                StatusCode::UNRECOVERED_READ_ERROR,
                Op::Read,
                Status::ReadError,
            ),
            (StatusCode::WRITE_FAULT, Op::Write, Status::WriteError),
            (StatusCode::COMPARE_FAILURE, Op::Compare, Status::Miscompare),
            (StatusCode::LBA_OUT_OF_RANGE, Op::Read, Status::OutOfRange),
            (StatusCode::CAPACITY_EXCEEDED, Op::Write, Status::NoSpace),
            (
                StatusCode::INVALID_NAMESPACE_OR_FORMAT,
                Op::Write,
                Status::Gone,
            ),
        ] {
            assert_eq!(of(status.with_dnr(), op), Verdict::Done(expected));
        }
    }

    /// The operations that a reset may repeat.
    #[test]
    fn only_idempotent_commands_are_repeatable() {
        assert!(is_repeatable(Op::Write) && is_repeatable(Op::Copy));
        assert!(!is_repeatable(Op::Compare) && !is_repeatable(Op::CompareAndWrite));
    }

    /// Goal: the pieces in sequence have the effect of the whole. Method: every overlap of a short
    /// copy.
    #[test]
    fn copies_in_pieces() {
        for source in 0..12u64 {
            for lba in 0..12u64 {
                let mut disk: Vec<u64> = (0..24).collect();
                let mut expected = disk.clone();
                expected.copy_within(source as usize..source as usize + 10, lba as usize);
                let mut done = 0;
                while done < 10 {
                    let (from, to, blocks) = copy_piece(source, lba, 10, done);
                    assert!(blocks > 0 && (from == to || from.abs_diff(to) >= u64::from(blocks)));
                    let from = from as usize;
                    disk.copy_within(from..from + blocks as usize, to as usize);
                    done += blocks;
                }
                assert_eq!((disk, done), (expected, 10), "{source} to {lba}");
            }
        }
    }
}
