//! Decodes I/O commands (NVM 3.2, Base 7): from a submission queue entry to a [`Plan`] of device
//! I/Os, or to a status. Pure functions of the command, the namespace and the limits.

use nacre_bdev::{Flags, Geometry, Op, Status, Support};
use nacre_nvmf_wire::commands::io::{
    CopyCommand, CopyFormat, CopyRange0, DatasetManagement, DsmRange, ReadWrite, WriteZeroes,
};
use nacre_nvmf_wire::commands::reservation::{
    Acquire, AcquireData, Register, RegisterData, Release, Report,
};
use nacre_nvmf_wire::opcode::{DataTransfer, io as opcode};
use nacre_nvmf_wire::tcp::ADMIN_IN_CAPSULE_BYTES;
use nacre_nvmf_wire::{Fuse, Sgl, Sqe, StatusCode};
use zerocopy::FromBytes;

use crate::subsystems::config::IoLimits;
use crate::subsystems::namespace::{Namespace, View};
use crate::subsystems::stats::Kind;

/// The device I/Os of a command. Block counts are plain counts, not 0's based.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Plan {
    None,
    /// Read, Write, Compare, Write Zeroes, Verify: one device I/O.
    Single {
        op: Op,
        flags: Flags,
        lba: u64,
        blocks: u32,
        bytes: u32,
    },
    /// Flush of one namespace, or of all namespaces of the controller.
    Flush {
        all: bool,
    },
    /// Dataset Management, deallocate: one unmap per range of the command's data.
    Deallocate {
        ranges: u32,
    },
    /// Dataset Management with hints only: the data is fetched and ignored.
    Hints {
        ranges: u32,
    },
    /// Copy: one device copy per source range of the command's data.
    Copy {
        destination: u64,
        ranges: u32,
        flags: Flags,
    },
    Reservation(ReservationCommand),
    /// An admin or fabrics command.
    Admin {
        bytes: u32,
    },
}

/// A reservation command without its data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReservationCommand {
    Register(Register),
    Acquire(Acquire),
    Release(Release),
    Report { bytes: u32, extended: bool },
}

/// Most bytes of data that a host may send with Connect or an admin command: the size of a buffer
/// for admin commands.
pub(super) const STRUCTURE_MOST: u32 = ADMIN_IN_CAPSULE_BYTES;

/// Bytes of a Reservation Release: the current key.
const RELEASE_DATA_BYTES: usize = 8;

impl Plan {
    /// The direction and size of the command's data transfer.
    pub(crate) fn transfer(&self, sqe: &Sqe) -> Transfer {
        match *self {
            Self::Admin { bytes: 0 } => Transfer::None,
            Self::Admin { bytes } => match sqe.data_transfer() {
                DataTransfer::HostToController => Transfer::FromHost(sent(sqe, bytes)),
                _ => Transfer::ToHost(bytes),
            },
            Self::Single {
                op: Op::Read,
                bytes,
                ..
            } => Transfer::ToHost(bytes),
            Self::Single {
                op: Op::Write | Op::Compare,
                bytes,
                ..
            } => Transfer::FromHost(bytes),
            Self::Deallocate { ranges } | Self::Hints { ranges } => {
                Transfer::FromHost(sent(sqe, ranges * DsmRange::SIZE as u32))
            }
            Self::Copy { ranges, .. } => {
                Transfer::FromHost(sent(sqe, ranges * CopyRange0::SIZE as u32))
            }
            Self::Reservation(ask) => match ask.transfer() {
                Transfer::FromHost(bytes) => Transfer::FromHost(sent(sqe, bytes)),
                other => other,
            },
            _ => Transfer::None,
        }
    }

    pub(crate) fn kind(&self) -> Kind {
        match self {
            Self::Single { op: Op::Read, .. } => Kind::Read,
            Self::Single {
                op: Op::Write | Op::WriteZeroes,
                ..
            } => Kind::Write,
            _ => Kind::Other,
        }
    }

    pub(crate) fn bytes(&self) -> u32 {
        match *self {
            Self::Single { bytes, .. } => bytes,
            _ => 0,
        }
    }
}

impl ReservationCommand {
    /// The data that the command needs.
    fn transfer(&self) -> Transfer {
        match *self {
            Self::Register(_) => Transfer::FromHost(RegisterData::SIZE as u32),
            Self::Acquire(_) => Transfer::FromHost(AcquireData::SIZE as u32),
            Self::Release(_) => Transfer::FromHost(RELEASE_DATA_BYTES as u32),
            Self::Report { bytes, .. } => Transfer::ToHost(bytes),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Transfer {
    None,
    FromHost(u32),
    ToHost(u32),
}

/// Decodes an I/O command.
pub(crate) fn decode(sqe: &Sqe, view: &View, limits: &IoLimits) -> Result<Plan, StatusCode> {
    let fuse = sqe.fuse();
    let fusable = matches!(
        (fuse, sqe.opcode),
        (Fuse::Normal, _) | (Fuse::First, opcode::COMPARE) | (Fuse::Second, opcode::WRITE)
    );
    if !fusable {
        return Err(StatusCode::INVALID_FIELD.with_dnr());
    }
    if sqe.opcode == opcode::FLUSH && sqe.nsid() == u32::MAX {
        return match view.refusal_of_all() {
            None => Ok(Plan::Flush { all: true }),
            Some(status) => Err(status),
        };
    }
    let namespace = view.for_command(sqe.nsid())?;
    let geometry = namespace.geometry();
    match sqe.opcode {
        opcode::READ | opcode::WRITE | opcode::COMPARE => {
            let op = match sqe.opcode {
                opcode::READ => Op::Read,
                opcode::WRITE => Op::Write,
                _ => Op::Compare,
            };
            let plan = single(sqe, op, &geometry, limits)?;
            if fuse != Fuse::Normal {
                check_unit(&plan, namespace)?;
            }
            Ok(plan)
        }
        opcode::FLUSH => Ok(Plan::Flush { all: false }),
        opcode::WRITE_ZEROES => write_zeroes(sqe, &geometry, limits),
        opcode::DATASET_MANAGEMENT => dataset_management(sqe, namespace, limits),
        opcode::VERIFY => verify(sqe, &geometry, limits),
        opcode::COPY => copy(sqe, namespace, limits),
        opcode::RESERVATION_REGISTER
        | opcode::RESERVATION_ACQUIRE
        | opcode::RESERVATION_RELEASE
        | opcode::RESERVATION_REPORT => reservation(sqe, limits),
        _ => Err(StatusCode::INVALID_OPCODE.with_dnr()),
    }
}

/// Decodes Read, Write and Compare. Checks the range, the size limit, and the SGL's length, which
/// must equal the data's.
#[inline(always)]
pub(super) fn single(
    sqe: &Sqe,
    op: Op,
    geometry: &Geometry,
    limits: &IoLimits,
) -> Result<Plan, StatusCode> {
    let command = ReadWrite::parse(sqe);
    let (lba, blocks) = (command.slba, command.blocks);
    check_range(lba, blocks, geometry)?;
    let bytes = bytes_of(blocks, geometry);
    if bytes > u64::from(limits.max_transfer_bytes) {
        return Err(StatusCode::INVALID_FIELD.with_dnr());
    }
    let bytes = bytes as u32;
    check_sgl(sqe, (bytes, bytes), op != Op::Read, limits)?;
    let flags = if op == Op::Write && command.fua {
        Flags::FUA
    } else {
        Flags::empty()
    };
    Ok(Plan::Single {
        op,
        flags,
        lba,
        blocks,
        bytes,
    })
}

/// Checks the size of a fused Compare and Write against NACWU. A device without the operation
/// refuses it later.
fn check_unit(plan: &Plan, namespace: &Namespace) -> Result<(), StatusCode> {
    let most = namespace.limits().compare_and_write_blocks;
    match *plan {
        Plan::Single { blocks, .. } if most > 0 && blocks > most => {
            Err(StatusCode::ATOMIC_WRITE_UNIT_EXCEEDED.with_dnr())
        }
        _ => Ok(()),
    }
}

fn write_zeroes(sqe: &Sqe, geometry: &Geometry, limits: &IoLimits) -> Result<Plan, StatusCode> {
    let command = WriteZeroes::parse(sqe);
    let (lba, blocks) = (command.slba, command.blocks);
    check_range(lba, blocks, geometry)?;
    if command.namespace_zeroes || bytes_of(blocks, geometry) > limits.write_zeroes_bytes {
        return Err(StatusCode::INVALID_FIELD.with_dnr());
    }
    let mut flags = Flags::empty();
    flags.set(Flags::FUA, command.fua);
    flags.set(Flags::DEALLOCATE, command.deallocate);
    Ok(Plan::Single {
        op: Op::WriteZeroes,
        flags,
        lba,
        blocks,
        bytes: 0,
    })
}

fn dataset_management(
    sqe: &Sqe,
    namespace: &Namespace,
    limits: &IoLimits,
) -> Result<Plan, StatusCode> {
    let command = DatasetManagement::parse(sqe);
    let ranges = u32::from(command.ranges);
    if ranges > limits.dsm_ranges {
        return Err(StatusCode::COMMAND_SIZE_LIMIT_EXCEEDED.with_dnr());
    }
    check_list(sqe, command.data_bytes() as u32, limits)?;
    // Deallocation is advisory (NVM 3.2.3): a device without unmap ignores it.
    let can = namespace.backing.bdev.supports(Op::Unmap) != Support::No;
    let real = command.deallocate && can;
    Ok(if real {
        Plan::Deallocate { ranges }
    } else {
        Plan::Hints { ranges }
    })
}

fn verify(sqe: &Sqe, geometry: &Geometry, limits: &IoLimits) -> Result<Plan, StatusCode> {
    let command = ReadWrite::parse(sqe);
    let (lba, blocks) = (command.slba, command.blocks);
    check_range(lba, blocks, geometry)?;
    if bytes_of(blocks, geometry) > limits.verify_bytes {
        return Err(StatusCode::INVALID_FIELD.with_dnr());
    }
    Ok(Plan::Single {
        op: Op::Verify,
        flags: Flags::empty(),
        lba,
        blocks,
        bytes: 0,
    })
}

fn copy(sqe: &Sqe, namespace: &Namespace, limits: &IoLimits) -> Result<Plan, StatusCode> {
    let command = CopyCommand::parse(sqe).map_err(|e| e.status().with_dnr())?;
    if command.format != CopyFormat::Format0 {
        return Err(StatusCode::INVALID_FIELD.with_dnr());
    }
    let ranges = u32::from(command.ranges);
    if ranges > limits.copy_ranges {
        return Err(StatusCode::COMMAND_SIZE_LIMIT_EXCEEDED.with_dnr());
    }
    check_list(sqe, command.data_bytes() as u32, limits)?;
    if command.sdlba >= namespace.geometry().blocks {
        return Err(StatusCode::LBA_OUT_OF_RANGE.with_dnr());
    }
    let flags = if command.fua {
        Flags::FUA
    } else {
        Flags::empty()
    };
    Ok(Plan::Copy {
        destination: command.sdlba,
        ranges,
        flags,
    })
}

fn reservation(sqe: &Sqe, limits: &IoLimits) -> Result<Plan, StatusCode> {
    let refused = |e: nacre_nvmf_wire::commands::CommandError| e.status().with_dnr();
    let ask = match sqe.opcode {
        opcode::RESERVATION_REGISTER => {
            ReservationCommand::Register(Register::parse(sqe).map_err(refused)?)
        }
        opcode::RESERVATION_ACQUIRE => {
            ReservationCommand::Acquire(Acquire::parse(sqe).map_err(refused)?)
        }
        opcode::RESERVATION_RELEASE => {
            ReservationCommand::Release(Release::parse(sqe).map_err(refused)?)
        }
        _ => {
            let Report { bytes, extended } = Report::parse(sqe);
            // Fabrics hosts have 128-bit identifiers, which need the extended data structure (EDS).
            if !extended {
                return Err(StatusCode::HOST_ID_INCONSISTENT_FORMAT.with_dnr());
            }
            let bytes = u32::try_from(bytes)
                .ok()
                .filter(|bytes| *bytes <= limits.max_transfer_bytes)
                .ok_or(StatusCode::INVALID_FIELD.with_dnr())?;
            ReservationCommand::Report { bytes, extended }
        }
    };
    match ask.transfer() {
        Transfer::ToHost(bytes) => check_sgl(sqe, (bytes, u32::MAX), false, limits)?,
        Transfer::FromHost(bytes) => check_list(sqe, bytes, limits)?,
        Transfer::None => {}
    }
    Ok(Plan::Reservation(ask))
}

/// Checks that the range is inside the namespace. PRINFO and the tags of a command are ignored:
/// they concern namespaces with protection information, and no namespace has any. Linux's target
/// and the compliance tests of NVMe (`protInfoIgnoreBare`) agree.
fn check_range(lba: u64, blocks: u32, geometry: &Geometry) -> Result<(), StatusCode> {
    if !geometry.holds(lba, u64::from(blocks)) {
        return Err(StatusCode::LBA_OUT_OF_RANGE.with_dnr());
    }
    Ok(())
}

fn bytes_of(blocks: u32, geometry: &Geometry) -> u64 {
    u64::from(blocks) * u64::from(geometry.block_size)
}

/// Bytes to fetch for a structure of `bytes`: the length in the data pointer.
///
/// A host may round the length up, and the rest is ignored. Fetch it nevertheless: Linux's TCP host
/// accesses a freed request if the R2Ts ask for less than the whole payload.
fn sent(sqe: &Sqe, bytes: u32) -> u32 {
    match sqe.sgl() {
        // With several descriptors, the transport fetches only the needed bytes.
        Ok(Sgl::InCapsuleDescriptors { .. }) | Err(_) => bytes,
        Ok(sgl) => sgl.length().max(bytes),
    }
}

/// Checks that the data pointer describes at least `bytes`. It may describe more: Linux sends 256
/// ranges with each Dataset Management, and 16 bytes with Reservation Release.
fn check_list(sqe: &Sqe, bytes: u32, limits: &IoLimits) -> Result<(), StatusCode> {
    check_sgl(sqe, (bytes, limits.max_transfer_bytes), true, limits)
}

/// Checks that the data pointer describes between `least` and `most` bytes, with an SGL type that
/// is valid for this direction and transport.
#[inline]
pub(crate) fn check_sgl(
    sqe: &Sqe,
    (least, most): (u32, u32),
    from_host: bool,
    limits: &IoLimits,
) -> Result<(), StatusCode> {
    if !sqe.psdt().is_sgl() {
        return Err(StatusCode::INVALID_FIELD.with_dnr());
    }
    let sgl = sqe.sgl().map_err(|e| e.status().with_dnr())?;
    match sgl {
        Sgl::InCapsule { .. } if !from_host => {
            return Err(StatusCode::SGL_DESCRIPTOR_TYPE_INVALID.with_dnr());
        }
        Sgl::Keyed { .. } | Sgl::InCapsuleDescriptors { .. } if !limits.keyed_sgl => {
            return Err(StatusCode::SGL_DESCRIPTOR_TYPE_INVALID.with_dnr());
        }
        Sgl::DataBlock { .. } => return Err(StatusCode::SGL_DESCRIPTOR_TYPE_INVALID.with_dnr()),
        // With several descriptors, the transport checks the sum of their lengths.
        Sgl::InCapsuleDescriptors { .. } => return Ok(()),
        _ => {}
    }
    if (least..=most).contains(&sgl.length()) {
        Ok(())
    } else {
        Err(StatusCode::DATA_SGL_LENGTH_INVALID.with_dnr())
    }
}

/// One range of a Dataset Management command: start and number of blocks.
pub(crate) fn dsm_range(data: &[u8], index: usize) -> (u64, u32) {
    let range = &DsmRange::list(data)[index];
    (range.slba.get(), range.nlb.get())
}

/// The first `ranges` source ranges of a Copy command: start and number of blocks.
pub(crate) fn copy_ranges(data: &[u8], ranges: u32) -> impl Iterator<Item = (u64, u32)> + '_ {
    // `decode` allows only descriptor format 0h.
    let descriptors = data.chunks_exact(CopyRange0::SIZE).take(ranges as usize);
    descriptors.map(|bytes| {
        let (range, _) = CopyRange0::ref_from_prefix(bytes).expect("a chunk is a descriptor long");
        (range.slba.get(), u32::from(range.nlb.get()) + 1)
    })
}

/// Checks the ranges of a Dataset Management or Copy command in its data. The data may contain more
/// ranges than the command counts.
pub(crate) fn check_ranges(
    plan: &Plan,
    data: &[u8],
    geometry: &Geometry,
    limits: &IoLimits,
) -> Result<(), StatusCode> {
    let inside = |start: u64, blocks: u32| geometry.holds(start, u64::from(blocks));
    match *plan {
        Plan::Deallocate { ranges } => {
            let bad = DsmRange::list(data)
                .iter()
                .take(ranges as usize)
                .any(|r| !inside(r.slba.get(), r.nlb.get()));
            if bad {
                Err(StatusCode::LBA_OUT_OF_RANGE.with_dnr())
            } else {
                Ok(())
            }
        }
        Plan::Copy {
            destination,
            ranges,
            ..
        } => {
            let mut total = 0u64;
            for (start, blocks) in copy_ranges(data, ranges) {
                total += u64::from(blocks);
                if blocks > limits.copy_blocks || total > u64::from(limits.copy_blocks) {
                    return Err(StatusCode::COMMAND_SIZE_LIMIT_EXCEEDED.with_dnr());
                }
                if !inside(start, blocks) {
                    return Err(StatusCode::LBA_OUT_OF_RANGE.with_dnr());
                }
            }
            if !geometry.holds(destination, total) {
                return Err(StatusCode::LBA_OUT_OF_RANGE.with_dnr());
            }
            let overlaps = |(start, blocks): (u64, u32)| {
                start < destination + total && destination < start + u64::from(blocks)
            };
            if copy_ranges(data, ranges).any(overlaps) {
                return Err(StatusCode::OVERLAPPING_IO_RANGE.with_dnr());
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

/// Converts a device's status to the NVMe status for the host; no other code does. Sets DNR only if
/// a retry cannot help on any path. `retry_delays`: the host supports Command Interrupted and retry
/// delays (ACRE).
pub(crate) fn status_code(status: Status, retry_delays: bool) -> StatusCode {
    match status {
        Status::Ok => StatusCode::SUCCESS,
        Status::ReadError => StatusCode::UNRECOVERED_READ_ERROR,
        Status::WriteError => StatusCode::WRITE_FAULT,
        Status::Miscompare => StatusCode::COMPARE_FAILURE.with_dnr(),
        Status::OutOfRange => StatusCode::LBA_OUT_OF_RANGE.with_dnr(),
        Status::NoSpace => StatusCode::CAPACITY_EXCEEDED.with_dnr(),
        Status::WriteProtected => StatusCode::NAMESPACE_IS_WRITE_PROTECTED.with_dnr(),
        Status::Unsupported => StatusCode::INVALID_OPCODE.with_dnr(),
        Status::Aborted => StatusCode::ABORT_REQUESTED,
        Status::Gone => StatusCode::INTERNAL_PATH_ERROR,
        Status::Retry if retry_delays => StatusCode::COMMAND_INTERRUPTED.with_crd(1),
        Status::Retry => StatusCode::NAMESPACE_NOT_READY,
        Status::DeviceError => StatusCode::INTERNAL_ERROR,
        Status::Integrity => StatusCode::GUARD_CHECK_ERROR,
        Status::Nvme { sct, sc, dnr } => {
            let code = StatusCode::new(sct, sc);
            if dnr { code.with_dnr() } else { code }
        }
    }
}
