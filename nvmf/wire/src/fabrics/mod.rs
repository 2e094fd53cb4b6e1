//! Fabrics commands (Base 6): Connect and its data, properties, authentication, Disconnect.

mod nqn;

use core::fmt;

use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

pub use nqn::{DISCOVERY_NQN, Nqn, NqnError};

use crate::cqe::Cqe;
use crate::opcode::{self, fabrics as fctype};
use crate::sqe::{Sgl, Sqe};
use crate::status::StatusCode;

/// A fabrics command, by its command type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FabricsCommand {
    PropertySet(PropertySet),
    Connect(Connect),
    PropertyGet(PropertyGet),
    AuthenticationSend(Authentication),
    AuthenticationReceive(Authentication),
    Disconnect,
}

impl FabricsCommand {
    /// Parses an entry whose opcode is 7Fh.
    pub fn parse(sqe: &Sqe) -> Result<Self, FabricsError> {
        debug_assert!(sqe.is_fabrics());
        // A fabrics command without an SGL is refused before its type is looked at (Base 4.1.2).
        if !sqe.psdt().is_sgl() {
            return Err(FabricsError::PrpUsed);
        }
        match sqe.fctype() {
            fctype::CONNECT => Connect::parse(sqe).map(FabricsCommand::Connect),
            fctype::PROPERTY_GET => PropertyGet::parse(sqe).map(FabricsCommand::PropertyGet),
            fctype::PROPERTY_SET => PropertySet::parse(sqe).map(FabricsCommand::PropertySet),
            fctype::AUTHENTICATION_SEND => Ok(Self::AuthenticationSend(Authentication::parse(sqe))),
            fctype::AUTHENTICATION_RECEIVE => {
                Ok(Self::AuthenticationReceive(Authentication::parse(sqe)))
            }
            fctype::DISCONNECT => parse_disconnect(sqe),
            fctype => Err(FabricsError::CommandType { fctype }),
        }
    }
}

/// Why a fabrics command was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FabricsError {
    #[error("a fabrics command must describe its data with an SGL, not with PRPs")]
    PrpUsed,
    #[error("fabrics command type {fctype:#04x} is not known")]
    CommandType { fctype: u8 },
    #[error("record format {recfmt} is not supported: only 0 is defined")]
    RecordFormat { recfmt: u16 },
    #[error("property size code {size} is neither 0 (4 bytes) nor 1 (8 bytes)")]
    PropertySize { size: u8 },
}

impl FabricsError {
    pub const fn status(self) -> StatusCode {
        match self {
            Self::PrpUsed | Self::PropertySize { .. } => StatusCode::INVALID_FIELD,
            Self::CommandType { .. } => StatusCode::INVALID_OPCODE,
            Self::RecordFormat { .. } => StatusCode::CONNECT_INCOMPATIBLE_FORMAT,
        }
    }
}

impl From<FabricsError> for StatusCode {
    fn from(error: FabricsError) -> Self {
        error.status()
    }
}

fn new_sqe(fctype: u8, cid: u16) -> Sqe {
    let mut sqe = Sqe::new(opcode::FABRICS, cid);
    sqe.set_fctype(fctype);
    sqe
}

// ---------------------------------------------------------------------------------------------
// Connect

bitflags::bitflags! {
    /// Connect attributes (byte 46), without the priority class in bits 1:0.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct ConnectAttributes: u8 {
        /// The host disables SQ flow control: SQHD is not used, and responses may be omitted where
        /// the transport has another signal of success.
        const DISABLE_SQ_FLOW_CONTROL = 1 << 2;
        /// The host supports the deletion of one I/O queue with Disconnect.
        const INDIVIDUAL_QUEUE_DELETION = 1 << 3;
    }
}

/// Connect (Base 6.3): creates one queue pair of a controller; queue 0 creates the controller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Connect {
    pub qid: u16,
    /// Entries of the submission queue, 0's based; see [`Connect::queue_entries`].
    pub sqsize: u16,
    pub attributes: ConnectAttributes,
    pub priority_class: u8,
    /// Keep-alive timeout in milliseconds; 0: none. Used for queue 0 only.
    pub kato_ms: u32,
}

impl Connect {
    pub const RECORD_FORMAT: u16 = 0;

    pub fn parse(sqe: &Sqe) -> Result<Self, FabricsError> {
        let recfmt = sqe.cdw10.get() as u16;
        if recfmt != Self::RECORD_FORMAT {
            return Err(FabricsError::RecordFormat { recfmt });
        }
        let cattr = (sqe.cdw11.get() >> 16) as u8;
        Ok(Self {
            qid: (sqe.cdw10.get() >> 16) as u16,
            sqsize: sqe.cdw11.get() as u16,
            attributes: ConnectAttributes::from_bits_truncate(cattr),
            priority_class: cattr & 0b11,
            kato_ms: sqe.cdw12.get(),
        })
    }

    /// The command, with `sgl` describing the 1024 bytes of [`ConnectData`].
    pub fn to_sqe(&self, cid: u16, sgl: Sgl) -> Sqe {
        let mut sqe = new_sqe(fctype::CONNECT, cid).with_sgl(sgl);
        let cattr = self.attributes.bits() | self.priority_class & 0b11;
        sqe.cdw10 = U32::new(u32::from(self.qid) << 16 | u32::from(Self::RECORD_FORMAT));
        sqe.cdw11 = U32::new(u32::from(cattr) << 16 | u32::from(self.sqsize));
        sqe.cdw12 = U32::new(self.kato_ms);
        sqe
    }

    /// Entries of the submission queue. A size of one entry (SQSIZE 0) is not allowed.
    pub fn queue_entries(&self) -> u32 {
        u32::from(self.sqsize) + 1
    }

    pub fn is_admin(&self) -> bool {
        self.qid == 0
    }

    pub fn sq_flow_control(&self) -> bool {
        !self
            .attributes
            .contains(ConnectAttributes::DISABLE_SQ_FLOW_CONTROL)
    }
}

/// The data of a Connect (Base figure 391): the host and the subsystem.
#[derive(Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct ConnectData {
    pub hostid: [u8; 16],
    pub cntlid: U16,
    pub reserved18: [u8; 238],
    /// NUL-terminated, as is the next; [`ConnectData::subsystem_nqn`] has it as text.
    pub subnqn: [u8; 256],
    pub hostnqn: [u8; 256],
    pub reserved768: [u8; 256],
}

const _: () = assert!(size_of::<ConnectData>() == ConnectData::SIZE);

impl ConnectData {
    pub const SIZE: usize = 1024;
    /// CNTLID of the Connect of an admin queue under the dynamic controller model.
    pub const CNTLID_DYNAMIC: u16 = 0xffff;
    /// CNTLID that requests any controller under the static controller model.
    pub const CNTLID_STATIC_ANY: u16 = 0xfffe;

    pub fn new(hostid: [u8; 16], cntlid: u16, subnqn: &Nqn, hostnqn: &Nqn) -> Self {
        Self {
            hostid,
            cntlid: U16::new(cntlid),
            reserved18: [0; 238],
            subnqn: subnqn.to_field(),
            hostnqn: hostnqn.to_field(),
            reserved768: [0; 256],
        }
    }

    pub fn subsystem_nqn(&self) -> Result<Nqn, NqnError> {
        Nqn::from_field(&self.subnqn)
    }

    pub fn host_nqn(&self) -> Result<Nqn, NqnError> {
        Nqn::from_field(&self.hostnqn)
    }
}

impl fmt::Debug for ConnectData {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConnectData")
            .field("hostid", &uuid::Uuid::from_bytes(self.hostid))
            .field("cntlid", &format_args!("{:#06x}", self.cntlid.get()))
            .field("subnqn", &self.subsystem_nqn())
            .field("hostnqn", &self.host_nqn())
            .finish()
    }
}

bitflags::bitflags! {
    /// The authentication that a controller requires after Connect (bits 31:16 of the response's
    /// dword 0).
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct AuthRequirements: u16 {
        /// Authentication transaction required on this queue.
        const AUTHENTICATION = 1 << 1;
        /// Authentication and secure channel required.
        const SECURE_CHANNEL = 1 << 2;
    }
}

/// The response to a successful Connect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectResponse {
    pub cntlid: u16,
    pub auth: AuthRequirements,
}

impl ConnectResponse {
    pub fn from_cqe(cqe: &Cqe) -> Self {
        Self {
            cntlid: cqe.dword0() as u16,
            auth: AuthRequirements::from_bits_truncate((cqe.dword0() >> 16) as u16),
        }
    }

    pub fn to_cqe(self, cid: u16) -> Cqe {
        let dword0 = u32::from(self.auth.bits()) << 16 | u32::from(self.cntlid);
        Cqe::success(cid).with_dword0(dword0)
    }
}

/// The invalid field in a response with Connect Invalid Parameters (Base figure 392).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InvalidParameter {
    /// An offset in the submission queue entry.
    Command { offset: u16 },
    /// An offset in [`ConnectData`].
    Data { offset: u16 },
}

impl InvalidParameter {
    pub const QID: Self = Self::Command { offset: 42 };
    pub const SQSIZE: Self = Self::Command { offset: 44 };
    pub const CATTR: Self = Self::Command { offset: 46 };
    pub const KATO: Self = Self::Command { offset: 48 };
    pub const HOSTID: Self = Self::Data { offset: 0 };
    pub const CNTLID: Self = Self::Data { offset: 16 };
    pub const SUBNQN: Self = Self::Data { offset: 256 };
    pub const HOSTNQN: Self = Self::Data { offset: 512 };

    /// Dword 0 of the response: the offset, and bit 16 for an offset in the data.
    pub const fn dword0(self) -> u32 {
        match self {
            Self::Command { offset } => offset as u32,
            Self::Data { offset } => 1 << 16 | offset as u32,
        }
    }

    pub const fn from_dword0(dword0: u32) -> Self {
        let offset = dword0 as u16;
        if dword0 >> 16 & 1 == 0 {
            Self::Command { offset }
        } else {
            Self::Data { offset }
        }
    }

    /// The completion, with Do Not Retry: the same parameters fail again.
    pub fn to_cqe(self, cid: u16) -> Cqe {
        Cqe::new(cid, StatusCode::CONNECT_INVALID_PARAMETERS.with_dnr()).with_dword0(self.dword0())
    }

    /// The completion without Do Not Retry: the same parameters may succeed later.
    pub fn to_cqe_for_now(self, cid: u16) -> Cqe {
        Cqe::new(cid, StatusCode::CONNECT_INVALID_PARAMETERS).with_dword0(self.dword0())
    }
}

/// `subnqn (data offset 256)`.
impl fmt::Display for InvalidParameter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match *self {
            Self::QID => "qid",
            Self::SQSIZE => "sqsize",
            Self::CATTR => "cattr",
            Self::KATO => "kato",
            Self::HOSTID => "hostid",
            Self::CNTLID => "cntlid",
            Self::SUBNQN => "subnqn",
            Self::HOSTNQN => "hostnqn",
            _ => "field",
        };
        match self {
            Self::Command { offset } => write!(f, "{name} (command offset {offset})"),
            Self::Data { offset } => write!(f, "{name} (data offset {offset})"),
        }
    }
}

// ---------------------------------------------------------------------------------------------
// Properties: the registers of a controller that is not on a PCIe bus

/// The width of a property access.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PropertySize {
    Four,
    Eight,
}

impl PropertySize {
    fn parse(sqe: &Sqe) -> Result<Self, FabricsError> {
        match sqe.cdw10.get() as u8 & 0b111 {
            0 => Ok(Self::Four),
            1 => Ok(Self::Eight),
            size => Err(FabricsError::PropertySize { size }),
        }
    }

    pub const fn bytes(self) -> u32 {
        match self {
            Self::Four => 4,
            Self::Eight => 8,
        }
    }
}

/// Property Get (Base 6.5). Dwords 0 and 1 of the response are the value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PropertyGet {
    pub size: PropertySize,
    /// One of [`crate::registers::offset`].
    pub offset: u32,
}

impl PropertyGet {
    pub fn parse(sqe: &Sqe) -> Result<Self, FabricsError> {
        Ok(Self {
            size: PropertySize::parse(sqe)?,
            offset: sqe.cdw11.get(),
        })
    }

    pub fn to_sqe(&self, cid: u16) -> Sqe {
        let mut sqe = new_sqe(fctype::PROPERTY_GET, cid);
        sqe.cdw10 = U32::new(self.size as u32);
        sqe.cdw11 = U32::new(self.offset);
        sqe
    }
}

/// Property Set (Base 6.6).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PropertySet {
    pub size: PropertySize,
    pub offset: u32,
    /// The value. A four-byte access uses its low half and ignores the high half.
    pub value: u64,
}

impl PropertySet {
    pub fn parse(sqe: &Sqe) -> Result<Self, FabricsError> {
        let size = PropertySize::parse(sqe)?;
        let value = match size {
            PropertySize::Four => u64::from(sqe.cdw12.get()),
            PropertySize::Eight => u64::from(sqe.cdw12.get()) | u64::from(sqe.cdw13.get()) << 32,
        };
        Ok(Self {
            size,
            offset: sqe.cdw11.get(),
            value,
        })
    }

    pub fn to_sqe(&self, cid: u16) -> Sqe {
        let mut sqe = new_sqe(fctype::PROPERTY_SET, cid);
        sqe.cdw10 = U32::new(self.size as u32);
        sqe.cdw11 = U32::new(self.offset);
        sqe.cdw12 = U32::new(self.value as u32);
        if self.size == PropertySize::Eight {
            sqe.cdw13 = U32::new((self.value >> 32) as u32);
        }
        sqe
    }
}

// ---------------------------------------------------------------------------------------------
// Authentication and Disconnect

/// Authentication Send and Receive (Base 6.1, 6.2): which protocol, and how much data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Authentication {
    /// Security protocol; E9h for NVMe in-band authentication.
    pub secp: u8,
    /// Protocol specific 0 and 1.
    pub spsp0: u8,
    pub spsp1: u8,
    /// Transfer length of a Send, allocation length of a Receive, in bytes.
    pub length: u32,
}

impl Authentication {
    /// The security protocol that SPC-5 assigns to NVMe.
    pub const SECP_NVME: u8 = 0xe9;

    pub fn parse(sqe: &Sqe) -> Self {
        let [_, spsp0, spsp1, secp] = sqe.cdw10.get().to_le_bytes();
        Self {
            secp,
            spsp0,
            spsp1,
            length: sqe.cdw11.get(),
        }
    }

    fn to_sqe(self, fctype: u8, cid: u16, sgl: Sgl) -> Sqe {
        let mut sqe = new_sqe(fctype, cid).with_sgl(sgl);
        sqe.cdw10 = U32::from_bytes([0, self.spsp0, self.spsp1, self.secp]);
        sqe.cdw11 = U32::new(self.length);
        sqe
    }

    pub fn to_send(self, cid: u16, sgl: Sgl) -> Sqe {
        self.to_sqe(fctype::AUTHENTICATION_SEND, cid, sgl)
    }

    pub fn to_receive(self, cid: u16, sgl: Sgl) -> Sqe {
        self.to_sqe(fctype::AUTHENTICATION_RECEIVE, cid, sgl)
    }
}

/// Disconnect (Base 6.4): deletes the I/O queue that it is sent on.
pub fn disconnect(cid: u16) -> Sqe {
    new_sqe(fctype::DISCONNECT, cid)
}

fn parse_disconnect(sqe: &Sqe) -> Result<FabricsCommand, FabricsError> {
    match sqe.cdw10.get() as u16 {
        0 => Ok(FabricsCommand::Disconnect),
        recfmt => Err(FabricsError::RecordFormat { recfmt }),
    }
}

#[cfg(test)]
mod tests;
