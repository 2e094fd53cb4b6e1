//! NVMe/TCP PDUs (TCP 3.6): their layout, functions that build them, and the rules by which
//! received ones are checked.
//!
//! ```text
//!   0     1      2     3    4      8            HLEN      HLEN+4    PDO              PLEN-4   PLEN
//!   type  flags  HLEN  PDO  PLEN   per type ... | (HDGST) | padding | data ...       | (DDGST) |
//!   `------ common header ------'
//! ```
//!
//! [`Frame::parse`] checks the common header as soon as its eight bytes have arrived. It returns
//! the number of header bytes still missing and the place of the data. [`Pdu::parse`] checks the
//! rest of the header, and [`parse_header`] does both. Neither checks digests, which the connection
//! computes, nor anything that depends on the commands in flight.

mod build;
mod parse;

use core::fmt;

use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

pub use build::TermPdu;
pub use parse::{Field, Frame, Parsed, Pdu, PduError, Reason, Rules, parse_header};

use crate::cqe::Cqe;
use crate::layout::sized;
use crate::sqe::Sqe;

/// Port of discovery controllers (IANA).
pub const DISCOVERY_PORT: u16 = 8009;
pub const IO_PORT: u16 = 4420;
/// Bytes of a header or data digest (CRC32C).
pub const DIGEST_BYTES: u32 = 4;
/// In-capsule data that every controller accepts with an admin or fabrics command (TCP 3.3.1).
pub const ADMIN_IN_CAPSULE_BYTES: u32 = 8192;
/// Smallest MAXH2CDATA that a controller may announce.
pub const MIN_MAXH2CDATA: u32 = 4096;
/// Most of an offending header that a termination request may quote.
pub const MAX_TERM_DATA_BYTES: u32 = 128;

/// The first eight bytes of every PDU.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct CommonHeader {
    pub pdu_type: u8,
    pub flags: u8,
    pub hlen: u8,
    pub pdo: u8,
    pub plen: U32,
}

impl CommonHeader {
    pub const SIZE: usize = 8;
}

/// PDU types.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum PduType {
    IcReq = 0x00,
    IcResp = 0x01,
    H2cTermReq = 0x02,
    C2hTermReq = 0x03,
    CapsuleCmd = 0x04,
    CapsuleResp = 0x05,
    H2cData = 0x06,
    C2hData = 0x07,
    R2t = 0x09,
}

impl PduType {
    pub const ALL: [Self; 9] = [
        Self::IcReq,
        Self::IcResp,
        Self::H2cTermReq,
        Self::C2hTermReq,
        Self::CapsuleCmd,
        Self::CapsuleResp,
        Self::H2cData,
        Self::C2hData,
        Self::R2t,
    ];

    pub const fn from_u8(value: u8) -> Option<Self> {
        Some(match value {
            0x00 => Self::IcReq,
            0x01 => Self::IcResp,
            0x02 => Self::H2cTermReq,
            0x03 => Self::C2hTermReq,
            0x04 => Self::CapsuleCmd,
            0x05 => Self::CapsuleResp,
            0x06 => Self::H2cData,
            0x07 => Self::C2hData,
            0x09 => Self::R2t,
            _ => return None,
        })
    }

    /// The specification's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::IcReq => "ICReq",
            Self::IcResp => "ICResp",
            Self::H2cTermReq => "H2CTermReq",
            Self::C2hTermReq => "C2HTermReq",
            Self::CapsuleCmd => "CapsuleCmd",
            Self::CapsuleResp => "CapsuleResp",
            Self::H2cData => "H2CData",
            Self::C2hData => "C2HData",
            Self::R2t => "R2T",
        }
    }

    /// The only header length that the type may have.
    pub const fn hlen(self) -> u8 {
        match self {
            Self::IcReq => size_of::<IcReq>() as u8,
            Self::IcResp => size_of::<IcResp>() as u8,
            Self::H2cTermReq | Self::C2hTermReq => size_of::<TermReq>() as u8,
            Self::CapsuleCmd => size_of::<CapsuleCmd>() as u8,
            Self::CapsuleResp => size_of::<CapsuleResp>() as u8,
            Self::H2cData | Self::C2hData => size_of::<DataPdu>() as u8,
            Self::R2t => size_of::<R2t>() as u8,
        }
    }

    /// The end that may receive a PDU of this type.
    pub const fn receiver(self) -> Side {
        match self {
            Self::IcReq | Self::H2cTermReq | Self::CapsuleCmd | Self::H2cData => Side::Controller,
            Self::IcResp | Self::C2hTermReq | Self::CapsuleResp | Self::C2hData | Self::R2t => {
                Side::Host
            }
        }
    }

    pub const fn is_term_req(self) -> bool {
        matches!(self, Self::H2cTermReq | Self::C2hTermReq)
    }

    /// True if PDUs of this type have digests when these are negotiated: all types but those of
    /// connection initialization and termination.
    pub const fn may_have_digests(self) -> bool {
        !matches!(
            self,
            Self::IcReq | Self::IcResp | Self::H2cTermReq | Self::C2hTermReq
        )
    }

    /// The flags that this PDU type defines; the others are reserved.
    pub const fn flags(self) -> PduFlags {
        match self {
            Self::IcReq | Self::IcResp | Self::H2cTermReq | Self::C2hTermReq => PduFlags::empty(),
            Self::CapsuleCmd => PduFlags::HDGSTF.union(PduFlags::DDGSTF),
            Self::CapsuleResp | Self::R2t => PduFlags::HDGSTF,
            Self::H2cData => PduFlags::HDGSTF
                .union(PduFlags::DDGSTF)
                .union(PduFlags::LAST_PDU),
            Self::C2hData => PduFlags::all(),
        }
    }
}

impl fmt::Display for PduType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// An end of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Side {
    Host,
    Controller,
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Host => "host",
            Self::Controller => "controller",
        })
    }
}

bitflags::bitflags! {
    /// Flags of the common header.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct PduFlags: u8 {
        /// A header digest follows the header.
        const HDGSTF = 1 << 0;
        /// A data digest follows the data.
        const DDGSTF = 1 << 1;
        /// The last data PDU of a transfer (of an R2T, or of a command).
        const LAST_PDU = 1 << 2;
        /// The command succeeded and no CapsuleResp follows (C2HData only, with LAST_PDU).
        const SUCCESS = 1 << 3;
    }
}

/// The digests of a connection; also the DGST field of ICReq and ICResp (bits 0 and 1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Digests {
    pub header: bool,
    pub data: bool,
}

impl Digests {
    pub const NONE: Self = Self {
        header: false,
        data: false,
    };
    pub const BOTH: Self = Self {
        header: true,
        data: true,
    };

    /// Decodes a DGST field whose reserved bits were checked.
    pub const fn from_bits(bits: u8) -> Self {
        Self {
            header: bits & 1 != 0,
            data: bits & 2 != 0,
        }
    }

    pub const fn bits(self) -> u8 {
        self.header as u8 | (self.data as u8) << 1
    }

    /// The digests of both: one is used if the host requests it and the controller agrees.
    pub const fn and(self, other: Self) -> Self {
        Self {
            header: self.header && other.header,
            data: self.data && other.data,
        }
    }

    pub const fn header_bytes(self) -> u32 {
        if self.header { DIGEST_BYTES } else { 0 }
    }

    pub const fn data_bytes(self) -> u32 {
        if self.data { DIGEST_BYTES } else { 0 }
    }
}

/// HPDA or CPDA: the alignment of PDU data that the receiver requests, in dwords, 0's based.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct DataAlignment(u8);

impl DataAlignment {
    /// Alignment to one dword: the value of an end that requests no larger one.
    pub const DWORD: Self = Self(0);
    pub const MAX: Self = Self(31);

    /// Decodes an HPDA or CPDA field. Returns `None` above 31, which is reserved.
    pub const fn from_field(field: u8) -> Option<Self> {
        if field <= Self::MAX.0 {
            Some(Self(field))
        } else {
            None
        }
    }

    pub const fn field(self) -> u8 {
        self.0
    }

    pub const fn bytes(self) -> u32 {
        (self.0 as u32 + 1) * 4
    }

    /// The first aligned offset at or after `offset`.
    pub const fn align(self, offset: u32) -> u32 {
        match self {
            // The usual alignment. The division would take longer than the rest of a header.
            Self(0) => offset.next_multiple_of(4),
            _ => offset.next_multiple_of(self.bytes()),
        }
    }
}

/// The reason of a termination request (FES, TCP 3.6.2.3).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum FatalErrorStatus {
    InvalidHeaderField = 0x01,
    SequenceError = 0x02,
    HeaderDigestError = 0x03,
    DataOutOfRange = 0x04,
    /// More R2Ts than MAXR2T, or more data than MAXH2CDATA, according to the direction.
    LimitExceeded = 0x05,
    UnsupportedParameter = 0x06,
}

impl FatalErrorStatus {
    pub const fn from_u16(value: u16) -> Option<Self> {
        Some(match value {
            0x01 => Self::InvalidHeaderField,
            0x02 => Self::SequenceError,
            0x03 => Self::HeaderDigestError,
            0x04 => Self::DataOutOfRange,
            0x05 => Self::LimitExceeded,
            0x06 => Self::UnsupportedParameter,
            _ => return None,
        })
    }

    pub const fn name(self) -> &'static str {
        match self {
            Self::InvalidHeaderField => "Invalid PDU Header Field",
            Self::SequenceError => "PDU Sequence Error",
            Self::HeaderDigestError => "Header Digest Error",
            Self::DataOutOfRange => "Data Transfer Out of Range",
            Self::LimitExceeded => "R2T or Data Transfer Limit Exceeded",
            Self::UnsupportedParameter => "Unsupported Parameter",
        }
    }
}

impl fmt::Display for FatalErrorStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

sized! {
    /// Initialize Connection Request: the first PDU of a host.
    128 pub struct IcReq {
        pub ch: CommonHeader,
        /// PDU format version; 0 is the only one.
        pub pfv: U16,
        /// Host PDU data alignment, which applies to C2HData.
        pub hpda: u8,
        pub dgst: u8,
        /// Outstanding R2Ts per command that the host accepts, 0's based.
        pub maxr2t: U32,
        pub reserved16: [u8; 112],
    }
}

sized! {
    /// Initialize Connection Response: the first PDU of a controller.
    128 pub struct IcResp {
        pub ch: CommonHeader,
        pub pfv: U16,
        /// Controller PDU data alignment, which applies to CapsuleCmd and H2CData.
        pub cpda: u8,
        pub dgst: u8,
        /// Most data in one H2CData, in bytes: a multiple of 4, at least 4096.
        pub maxh2cdata: U32,
        pub reserved16: [u8; 112],
    }
}

sized! {
    /// Termination request, either way; up to 128 bytes of the offending header follow it.
    24 pub struct TermReq {
        pub ch: CommonHeader,
        /// See [`TermReq::status`].
        pub fes: U16,
        /// Fatal error information: the offset of the invalid field, or the wrong digest.
        pub fei: U32,
        pub reserved14: [u8; 10],
    }
}

sized! {
    /// A command capsule: the submission queue entry; in-capsule data may follow.
    72 pub struct CapsuleCmd {
        pub ch: CommonHeader,
        pub sqe: Sqe,
    }
}

sized! {
    /// A response capsule: the completion queue entry.
    24 pub struct CapsuleResp {
        pub ch: CommonHeader,
        pub cqe: Cqe,
    }
}

sized! {
    /// Part of a command's data: H2CData and C2HData have the same layout.
    24 pub struct DataPdu {
        pub ch: CommonHeader,
        pub cccid: U16,
        /// Transfer tag of the R2T that H2CData answers; reserved in C2HData.
        pub ttag: U16,
        /// Offset of this part in the command's data.
        pub datao: U32,
        pub datal: U32,
        pub reserved20: [u8; 4],
    }
}

sized! {
    /// Ready to Transfer: the controller requests part of a command's data.
    24 pub struct R2t {
        pub ch: CommonHeader,
        pub cccid: U16,
        /// The tag that the answering H2CData must carry.
        pub ttag: U16,
        pub r2to: U32,
        pub r2tl: U32,
        pub reserved20: [u8; 4],
    }
}

impl IcReq {
    pub const PFV: u16 = 0;

    pub fn digests(&self) -> Digests {
        Digests::from_bits(self.dgst)
    }

    /// Outstanding R2Ts per command; the field holds one less. Saturates at 2^32 - 1.
    pub fn max_r2t(&self) -> u32 {
        self.maxr2t.get().saturating_add(1)
    }

    /// The requested alignment. An invalid HPDA, which no parsed PDU has, gives the largest one.
    pub fn alignment(&self) -> DataAlignment {
        DataAlignment::from_field(self.hpda).unwrap_or(DataAlignment::MAX)
    }
}

impl IcResp {
    pub fn digests(&self) -> Digests {
        Digests::from_bits(self.dgst)
    }

    pub fn alignment(&self) -> DataAlignment {
        DataAlignment::from_field(self.cpda).unwrap_or(DataAlignment::MAX)
    }
}

impl TermReq {
    /// The reason that the request states; `Err`: a number that the specification does not define.
    pub fn status(&self) -> Result<FatalErrorStatus, u16> {
        FatalErrorStatus::from_u16(self.fes.get()).ok_or_else(|| self.fes.get())
    }
}

impl DataPdu {
    pub fn flags(&self) -> PduFlags {
        PduFlags::from_bits_truncate(self.ch.flags)
    }

    pub fn is_last(&self) -> bool {
        self.flags().contains(PduFlags::LAST_PDU)
    }

    /// The command is complete and successful (C2HData).
    pub fn is_success(&self) -> bool {
        self.flags().contains(PduFlags::SUCCESS)
    }
}

#[cfg(test)]
mod tests;
