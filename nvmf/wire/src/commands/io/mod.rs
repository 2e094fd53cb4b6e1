//! Typed views of the I/O commands of the NVM command set (NVM 3.2).

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::reservation::{Acquire, Register, Release, Report};
use super::{CommandError, bit, bits};
use crate::opcode::io;
use crate::sqe::Sqe;

/// An I/O command, by its opcode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IoCommand {
    Flush,
    Read(ReadWrite),
    Write(ReadWrite),
    Compare(ReadWrite),
    Verify(ReadWrite),
    WriteZeroes(WriteZeroes),
    WriteUncorrectable(WriteUncorrectable),
    DatasetManagement(DatasetManagement),
    Copy(CopyCommand),
    ReservationRegister(Register),
    ReservationReport(Report),
    ReservationAcquire(Acquire),
    ReservationRelease(Release),
}

impl IoCommand {
    pub fn parse(sqe: &Sqe) -> Result<Self, CommandError> {
        Ok(match sqe.opcode {
            io::FLUSH => Self::Flush,
            io::READ => Self::Read(ReadWrite::parse(sqe)),
            io::WRITE => Self::Write(ReadWrite::parse(sqe)),
            io::COMPARE => Self::Compare(ReadWrite::parse(sqe)),
            io::VERIFY => Self::Verify(ReadWrite::parse(sqe)),
            io::WRITE_ZEROES => Self::WriteZeroes(WriteZeroes::parse(sqe)),
            io::WRITE_UNCORRECTABLE => Self::WriteUncorrectable(WriteUncorrectable::parse(sqe)),
            io::DATASET_MANAGEMENT => Self::DatasetManagement(DatasetManagement::parse(sqe)),
            io::COPY => Self::Copy(CopyCommand::parse(sqe)?),
            io::RESERVATION_REGISTER => Self::ReservationRegister(Register::parse(sqe)?),
            io::RESERVATION_REPORT => Self::ReservationReport(Report::parse(sqe)),
            io::RESERVATION_ACQUIRE => Self::ReservationAcquire(Acquire::parse(sqe)?),
            io::RESERVATION_RELEASE => Self::ReservationRelease(Release::parse(sqe)?),
            opcode => return Err(CommandError::Opcode { opcode }),
        })
    }
}

/// Read, Write, Compare and Verify: a range of blocks, and the options of the access.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ReadWrite {
    pub slba: u64,
    /// A count, 1 to 65536 (NLB + 1).
    pub blocks: u32,
    /// Force unit access.
    pub fua: bool,
    /// Limited retry.
    pub lr: bool,
    pub protection: Protection,
    /// Dataset management hints (access frequency, latency, ...).
    pub dsm: u8,
    pub directive: Directive,
}

impl ReadWrite {
    pub fn new(slba: u64, blocks: u32) -> Self {
        Self {
            slba,
            blocks,
            ..Self::default()
        }
    }

    pub fn parse(sqe: &Sqe) -> Self {
        let cdw12 = sqe.cdw12.get();
        let cdw13 = sqe.cdw13.get();
        Self {
            slba: sqe.cdw10_11(),
            blocks: bits(cdw12, 0, 16) + 1,
            fua: bit(cdw12, 30),
            lr: bit(cdw12, 31),
            protection: Protection::parse(sqe),
            dsm: bits(cdw13, 0, 8) as u8,
            directive: Directive {
                dtype: bits(cdw12, 20, 4) as u8,
                dspec: bits(cdw13, 16, 16) as u16,
            },
        }
    }

    /// Encodes the command with opcode Read, Write, Compare or Verify.
    pub fn to_sqe(&self, opcode: u8, cid: u16, nsid: u32) -> Sqe {
        let mut sqe = Sqe::for_namespace(opcode, cid, nsid);
        sqe.set_cdw10_11(self.slba);
        sqe.cdw12 = U32::new(
            nlb(self.blocks)
                | u32::from(self.directive.dtype & 0xf) << 20
                | u32::from(self.fua) << 30
                | u32::from(self.lr) << 31,
        );
        sqe.cdw13 = U32::new(u32::from(self.dsm) | u32::from(self.directive.dspec) << 16);
        self.protection.write(&mut sqe);
        sqe
    }

    /// The first block after the range; `None` if it exceeds 64 bits.
    pub fn end(&self) -> Option<u64> {
        self.slba.checked_add(u64::from(self.blocks))
    }
}

/// NLB of a count of blocks.
fn nlb(blocks: u32) -> u32 {
    debug_assert!(
        (1..=1 << 16).contains(&blocks),
        "a command covers 1 to 65536 blocks"
    );
    blocks.wrapping_sub(1) & 0xffff
}

/// End-to-end protection: what to check, and the expected tags.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Protection {
    /// PRACT: the controller inserts or strips the information.
    pub action: bool,
    /// PRCHK: bit 0 reference tag, bit 1 application tag, bit 2 guard.
    pub check: u8,
    /// STC: check the storage tag.
    pub storage_tag: bool,
    pub reference_tag: u32,
    pub application_tag: u16,
    pub application_tag_mask: u16,
}

impl Protection {
    fn parse(sqe: &Sqe) -> Self {
        let cdw12 = sqe.cdw12.get();
        Self {
            action: bit(cdw12, 29),
            check: bits(cdw12, 26, 3) as u8,
            storage_tag: bit(cdw12, 24),
            reference_tag: sqe.cdw14.get(),
            application_tag: bits(sqe.cdw15.get(), 0, 16) as u16,
            application_tag_mask: bits(sqe.cdw15.get(), 16, 16) as u16,
        }
    }

    fn write(&self, sqe: &mut Sqe) {
        let cdw12 = u32::from(self.storage_tag) << 24
            | u32::from(self.check & 0b111) << 26
            | u32::from(self.action) << 29;
        sqe.cdw12 = U32::new(sqe.cdw12.get() | cdw12);
        sqe.cdw14 = U32::new(self.reference_tag);
        let mask = u32::from(self.application_tag_mask) << 16;
        sqe.cdw15 = U32::new(u32::from(self.application_tag) | mask);
    }
}

/// A directive of a write (streams, data placement).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Directive {
    pub dtype: u8,
    pub dspec: u16,
}

/// Write Zeroes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WriteZeroes {
    pub slba: u64,
    pub blocks: u32,
    /// DEAC: the controller should deallocate the blocks.
    pub deallocate: bool,
    /// NSZ: the whole namespace.
    pub namespace_zeroes: bool,
    pub fua: bool,
    pub lr: bool,
    pub protection: Protection,
}

impl WriteZeroes {
    pub fn parse(sqe: &Sqe) -> Self {
        let cdw12 = sqe.cdw12.get();
        Self {
            slba: sqe.cdw10_11(),
            blocks: bits(cdw12, 0, 16) + 1,
            deallocate: bit(cdw12, 25),
            namespace_zeroes: bit(cdw12, 23),
            fua: bit(cdw12, 30),
            lr: bit(cdw12, 31),
            protection: Protection::parse(sqe),
        }
    }

    pub fn to_sqe(&self, cid: u16, nsid: u32) -> Sqe {
        let mut sqe = Sqe::for_namespace(io::WRITE_ZEROES, cid, nsid);
        sqe.set_cdw10_11(self.slba);
        sqe.cdw12 = U32::new(
            nlb(self.blocks)
                | u32::from(self.namespace_zeroes) << 23
                | u32::from(self.deallocate) << 25
                | u32::from(self.fua) << 30
                | u32::from(self.lr) << 31,
        );
        self.protection.write(&mut sqe);
        sqe
    }
}

/// Write Uncorrectable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WriteUncorrectable {
    pub slba: u64,
    pub blocks: u32,
}

impl WriteUncorrectable {
    pub fn parse(sqe: &Sqe) -> Self {
        Self {
            slba: sqe.cdw10_11(),
            blocks: bits(sqe.cdw12.get(), 0, 16) + 1,
        }
    }

    pub fn to_sqe(&self, cid: u16, nsid: u32) -> Sqe {
        let mut sqe = Sqe::for_namespace(io::WRITE_UNCORRECTABLE, cid, nsid);
        sqe.set_cdw10_11(self.slba);
        sqe.cdw12 = U32::new(nlb(self.blocks));
        sqe
    }
}

/// Dataset Management: its data is `ranges` times [`DsmRange`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DatasetManagement {
    /// A count, 1 to 256.
    pub ranges: u16,
    /// AD: the contents of the blocks are no longer needed.
    pub deallocate: bool,
    /// IDW and IDR: an integral dataset, for write and for read.
    pub integral_write: bool,
    pub integral_read: bool,
}

impl DatasetManagement {
    pub fn parse(sqe: &Sqe) -> Self {
        let cdw11 = sqe.cdw11.get();
        Self {
            ranges: bits(sqe.cdw10.get(), 0, 8) as u16 + 1,
            integral_read: bit(cdw11, 0),
            integral_write: bit(cdw11, 1),
            deallocate: bit(cdw11, 2),
        }
    }

    pub fn to_sqe(&self, cid: u16, nsid: u32) -> Sqe {
        let mut sqe = Sqe::for_namespace(io::DATASET_MANAGEMENT, cid, nsid);
        sqe.cdw10 = U32::new(u32::from(self.ranges.wrapping_sub(1)) & 0xff);
        sqe.cdw11 = U32::new(
            u32::from(self.integral_read)
                | u32::from(self.integral_write) << 1
                | u32::from(self.deallocate) << 2,
        );
        sqe
    }

    /// Bytes of the range list.
    pub fn data_bytes(&self) -> usize {
        usize::from(self.ranges) * DsmRange::SIZE
    }
}

/// One range of a Dataset Management command.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct DsmRange {
    /// Context attributes: hints.
    pub cattr: U32,
    /// Number of blocks, not 0's based; 0: none.
    pub nlb: U32,
    pub slba: U64,
}

const _: () = assert!(size_of::<DsmRange>() == DsmRange::SIZE);

impl DsmRange {
    pub const SIZE: usize = 16;

    pub fn new(slba: u64, blocks: u32) -> Self {
        Self {
            cattr: U32::ZERO,
            nlb: U32::new(blocks),
            slba: U64::new(slba),
        }
    }

    /// The complete ranges in `data`; a shorter rest is ignored.
    pub fn list(data: &[u8]) -> &[Self] {
        whole_elements(data)
    }
}

/// The complete elements at the beginning of `data`.
fn whole_elements<T: FromBytes + KnownLayout + Immutable + Unaligned>(data: &[u8]) -> &[T] {
    let count = data.len() / size_of::<T>();
    // The prefix is long enough for `count` by construction; nothing else can fail.
    <[T]>::ref_from_prefix_with_elems(data, count)
        .map(|(list, _)| list)
        .unwrap_or(&[])
}

/// Copy: its data is `ranges` source ranges in the descriptor format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyCommand {
    /// The first destination block.
    pub sdlba: u64,
    /// A count, 1 to 256.
    pub ranges: u16,
    pub format: CopyFormat,
    pub fua: bool,
    pub lr: bool,
    /// PRINFOR: protection information fields of the reads, as PRACT and PRCHK in four bits.
    pub read_protection: u8,
    /// PRINFOW and the tags, of the writes.
    pub protection: Protection,
    pub directive: Directive,
}

/// The format of the source range descriptors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CopyFormat {
    /// [`CopyRange0`]: 32-byte descriptors.
    Format0,
    /// [`CopyRange1`]: 40-byte descriptors, for wide guards.
    Format1,
}

impl CopyFormat {
    pub const fn descriptor_bytes(self) -> usize {
        match self {
            Self::Format0 => CopyRange0::SIZE,
            Self::Format1 => CopyRange1::SIZE,
        }
    }
}

impl CopyCommand {
    pub fn parse(sqe: &Sqe) -> Result<Self, CommandError> {
        let cdw12 = sqe.cdw12.get();
        let format = match bits(cdw12, 8, 4) {
            0 => CopyFormat::Format0,
            1 => CopyFormat::Format1,
            format => {
                return Err(CommandError::CopyFormat {
                    format: format as u8,
                });
            }
        };
        Ok(Self {
            sdlba: sqe.cdw10_11(),
            ranges: bits(cdw12, 0, 8) as u16 + 1,
            format,
            fua: bit(cdw12, 30),
            lr: bit(cdw12, 31),
            read_protection: bits(cdw12, 12, 4) as u8,
            protection: Protection::parse(sqe),
            directive: Directive {
                dtype: bits(cdw12, 20, 4) as u8,
                dspec: bits(sqe.cdw13.get(), 16, 16) as u16,
            },
        })
    }

    pub fn to_sqe(&self, cid: u16, nsid: u32) -> Sqe {
        let mut sqe = Sqe::for_namespace(io::COPY, cid, nsid);
        sqe.set_cdw10_11(self.sdlba);
        sqe.cdw12 = U32::new(
            u32::from(self.ranges.wrapping_sub(1)) & 0xff
                | (self.format as u32) << 8
                | u32::from(self.read_protection & 0xf) << 12
                | u32::from(self.directive.dtype & 0xf) << 20
                | u32::from(self.fua) << 30
                | u32::from(self.lr) << 31,
        );
        sqe.cdw13 = U32::new(u32::from(self.directive.dspec) << 16);
        self.protection.write(&mut sqe);
        sqe
    }

    /// Bytes of the source range list.
    pub fn data_bytes(&self) -> usize {
        usize::from(self.ranges) * self.format.descriptor_bytes()
    }

    /// The source ranges in `data`, as (first block, count), in order.
    pub fn sources<'a>(&self, data: &'a [u8]) -> impl ExactSizeIterator<Item = (u64, u32)> + 'a {
        let descriptor = self.format.descriptor_bytes();
        let data = &data[..data.len().min(self.data_bytes())];
        // SLBA and NLB are at the same place in both formats.
        data.chunks_exact(descriptor).map(|bytes| {
            let (range, _) =
                CopyRange0::ref_from_prefix(bytes).expect("a descriptor has at least 32 bytes");
            (range.slba.get(), u32::from(range.nlb.get()) + 1)
        })
    }
}

/// A source range of a Copy, format 0h.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct CopyRange0 {
    pub reserved0: [u8; 8],
    pub slba: U64,
    /// Zero-based.
    pub nlb: U16,
    pub reserved18: [u8; 6],
    pub elbt: U32,
    pub elbat: U16,
    pub elbatm: U16,
}

const _: () = assert!(size_of::<CopyRange0>() == CopyRange0::SIZE);

impl CopyRange0 {
    pub const SIZE: usize = 32;

    pub fn new(slba: u64, blocks: u32) -> Self {
        Self {
            reserved0: [0; 8],
            slba: U64::new(slba),
            nlb: U16::new(nlb(blocks) as u16),
            reserved18: [0; 6],
            elbt: U32::ZERO,
            elbat: U16::ZERO,
            elbatm: U16::ZERO,
        }
    }
}

/// A source range of a Copy, format 1h.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct CopyRange1 {
    pub reserved0: [u8; 8],
    pub slba: U64,
    pub nlb: U16,
    pub reserved18: [u8; 8],
    pub elbt: [u8; 10],
    pub elbat: U16,
    pub elbatm: U16,
}

const _: () = assert!(size_of::<CopyRange1>() == CopyRange1::SIZE);

impl CopyRange1 {
    pub const SIZE: usize = 40;
}

#[cfg(test)]
mod tests;
