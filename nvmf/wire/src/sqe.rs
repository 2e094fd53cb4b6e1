//! The submission queue entry (Base 3.3.3.1) and the SGL descriptor in it (Base 4.1.2).

use core::fmt;

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::opcode;
use crate::status::StatusCode;

/// One command: 64 bytes on every transport. The opcode defines the meaning of dwords 10 to 15;
/// [`crate::commands`] and [`crate::fabrics`] give them names.
#[derive(Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Sqe {
    pub opcode: u8,
    /// Bits 1:0 fused operation, bits 7:6 PRP or SGL for data transfer.
    pub flags: u8,
    pub cid: U16,
    /// Namespace identifier. In a Fabrics command the low byte is the command type instead; see
    /// [`Sqe::fctype`].
    pub nsid: U32,
    pub cdw2: U32,
    pub cdw3: U32,
    pub mptr: U64,
    /// Data pointer: one SGL descriptor, or two PRP entries.
    pub dptr: [u8; 16],
    pub cdw10: U32,
    pub cdw11: U32,
    pub cdw12: U32,
    pub cdw13: U32,
    pub cdw14: U32,
    pub cdw15: U32,
}

const _: () = assert!(size_of::<Sqe>() == Sqe::SIZE);

impl Sqe {
    pub const SIZE: usize = 64;

    /// An entry of zeroes, except for the opcode, the identifier and PSDT, which selects SGLs as
    /// every command over fabrics must (Base 4.1.2).
    pub fn new(opcode: u8, cid: u16) -> Self {
        let mut sqe = Self::zeroed();
        sqe.opcode = opcode;
        sqe.flags = Psdt::Sgl.bits();
        sqe.cid = U16::new(cid);
        sqe
    }

    /// A command on a namespace.
    pub fn for_namespace(opcode: u8, cid: u16, nsid: u32) -> Self {
        let mut sqe = Self::new(opcode, cid);
        sqe.nsid = U32::new(nsid);
        sqe
    }

    /// All 64 bytes zero.
    pub fn zeroed() -> Self {
        <Self as zerocopy::FromZeros>::new_zeroed()
    }

    pub fn with_sgl(mut self, sgl: Sgl) -> Self {
        self.set_sgl(sgl);
        self
    }

    pub fn cid(&self) -> u16 {
        self.cid.get()
    }

    pub fn nsid(&self) -> u32 {
        self.nsid.get()
    }

    pub fn is_fabrics(&self) -> bool {
        self.opcode == opcode::FABRICS
    }

    /// The command type of a fabrics command (byte 4).
    pub fn fctype(&self) -> u8 {
        self.nsid.get() as u8
    }

    pub fn set_fctype(&mut self, fctype: u8) {
        self.nsid = U32::new(u32::from(fctype));
    }

    pub fn fuse(&self) -> Fuse {
        Fuse::from_flags(self.flags)
    }

    pub fn set_fuse(&mut self, fuse: Fuse) {
        self.flags = (self.flags & !0b11) | fuse.bits();
    }

    pub fn psdt(&self) -> Psdt {
        Psdt::from_flags(self.flags)
    }

    pub fn set_psdt(&mut self, psdt: Psdt) {
        self.flags = (self.flags & !0b1100_0000) | psdt.bits();
    }

    /// The data pointer as an unchecked SGL descriptor.
    pub fn sgl_descriptor(&self) -> SglDescriptor {
        SglDescriptor(self.dptr)
    }

    /// The data pointer as a typed SGL.
    pub fn sgl(&self) -> Result<Sgl, SglError> {
        self.sgl_descriptor().parse()
    }

    pub fn set_sgl(&mut self, sgl: Sgl) {
        self.dptr = SglDescriptor::from(sgl).0;
    }

    /// Dwords 10 and 11 as one number: the starting LBA of most I/O commands.
    pub fn cdw10_11(&self) -> u64 {
        u64::from(self.cdw10.get()) | u64::from(self.cdw11.get()) << 32
    }

    pub fn set_cdw10_11(&mut self, value: u64) {
        self.cdw10 = U32::new(value as u32);
        self.cdw11 = U32::new((value >> 32) as u32);
    }

    /// The direction of the data, by the opcode or the fabrics command type.
    pub fn data_transfer(&self) -> opcode::DataTransfer {
        opcode::data_transfer(if self.is_fabrics() {
            self.fctype()
        } else {
            self.opcode
        })
    }
}

impl fmt::Debug for Sqe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = f.debug_struct("Sqe");
        out.field("opcode", &format_args!("{:#04x}", self.opcode))
            .field("flags", &format_args!("{:#04x}", self.flags))
            .field("cid", &self.cid.get())
            .field("nsid", &format_args!("{:#x}", self.nsid.get()));
        match self.sgl() {
            Ok(sgl) => out.field("sgl", &sgl),
            Err(_) => out.field("dptr", &self.dptr),
        };
        let cdw = [
            self.cdw10, self.cdw11, self.cdw12, self.cdw13, self.cdw14, self.cdw15,
        ];
        out.field("cdw10_15", &cdw.map(U32::get)).finish()
    }
}

/// The position of a command in a fused pair (bits 1:0 of the flags).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fuse {
    Normal,
    First,
    Second,
    Reserved,
}

impl Fuse {
    pub const fn from_flags(flags: u8) -> Self {
        match flags & 0b11 {
            0 => Self::Normal,
            1 => Self::First,
            2 => Self::Second,
            _ => Self::Reserved,
        }
    }

    pub const fn bits(self) -> u8 {
        self as u8
    }
}

/// PRP or SGL for data transfer (bits 7:6 of the flags).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Psdt {
    Prp,
    /// SGL; the metadata pointer is the address of one buffer. Used by fabrics hosts.
    Sgl,
    /// SGL; the metadata pointer is the address of an SGL segment.
    SglMetadataSgl,
    Reserved,
}

impl Psdt {
    pub const fn from_flags(flags: u8) -> Self {
        match flags >> 6 {
            0 => Self::Prp,
            1 => Self::Sgl,
            2 => Self::SglMetadataSgl,
            _ => Self::Reserved,
        }
    }

    /// The bits at their position in the flags byte.
    pub const fn bits(self) -> u8 {
        (self as u8) << 6
    }

    /// True if the data pointer is an SGL, as in every command over fabrics.
    pub const fn is_sgl(self) -> bool {
        matches!(self, Self::Sgl | Self::SglMetadataSgl)
    }
}

/// The 16 bytes of an SGL descriptor: address and length, a key in keyed descriptors, and the
/// identifier (type and subtype) in the last byte.
#[derive(Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(transparent)]
pub struct SglDescriptor(pub [u8; 16]);

/// Descriptor types (bits 7:4 of the identifier).
mod descriptor_type {
    pub(super) const DATA_BLOCK: u8 = 0x0;
    pub(super) const LAST_SEGMENT: u8 = 0x3;
    pub(super) const KEYED_DATA_BLOCK: u8 = 0x4;
    pub(super) const TRANSPORT_DATA_BLOCK: u8 = 0x5;
}

/// Descriptor subtypes (bits 3:0 of the identifier).
mod subtype {
    pub(super) const ADDRESS: u8 = 0x0;
    pub(super) const OFFSET: u8 = 0x1;
    pub(super) const TRANSPORT: u8 = 0xa;
    pub(super) const INVALIDATE_KEY: u8 = 0xf;
}

/// A parsed SGL descriptor, of the kinds that fabrics commands or a PCIe driver use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Sgl {
    /// Data Block with an address: memory of a PCIe host. Meaningless over fabrics.
    DataBlock { address: u64, length: u32 },
    /// Data Block with an offset: the data is in the capsule, `offset` bytes after the SQE plus
    /// ICDOFF.
    InCapsule { offset: u64, length: u32 },
    /// Last Segment with an offset: the capsule has descriptors, 16 bytes each.
    InCapsuleDescriptors { offset: u64, length: u32 },
    /// Transport Data Block: the transport transfers the data (TCP: in data PDUs).
    Transport { length: u32 },
    /// Keyed Data Block: memory of the host that RDMA reaches with `key`. The length is 24 bits.
    Keyed {
        address: u64,
        length: u32,
        key: u32,
        invalidate: bool,
    },
}

impl Sgl {
    /// Bytes of data that it describes (for [`Sgl::InCapsuleDescriptors`], of descriptors).
    pub const fn length(self) -> u32 {
        match self {
            Self::DataBlock { length, .. }
            | Self::InCapsule { length, .. }
            | Self::InCapsuleDescriptors { length, .. }
            | Self::Transport { length }
            | Self::Keyed { length, .. } => length,
        }
    }
}

/// The error of an SGL descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SglError {
    #[error("SGL descriptor type {descriptor_type:#x} subtype {subtype:#x} is not supported here")]
    Type { descriptor_type: u8, subtype: u8 },
    #[error(
        "an SGL of in-capsule descriptors is {length} bytes long, which is not a positive multiple of 16"
    )]
    DescriptorsLength { length: u32 },
}

impl SglError {
    /// The status for the command.
    pub const fn status(self) -> StatusCode {
        match self {
            Self::Type { .. } => StatusCode::SGL_DESCRIPTOR_TYPE_INVALID,
            Self::DescriptorsLength { .. } => StatusCode::INVALID_SGL_SEGMENT_DESCRIPTOR,
        }
    }
}

impl From<SglError> for StatusCode {
    fn from(error: SglError) -> Self {
        error.status()
    }
}

impl SglDescriptor {
    pub const SIZE: usize = 16;

    pub const fn descriptor_type(&self) -> u8 {
        self.0[15] >> 4
    }

    pub const fn subtype(&self) -> u8 {
        self.0[15] & 0xf
    }

    /// Parses the descriptor. The parser ignores reserved bytes. Linux's RDMA host writes an
    /// in-capsule descriptor over the keyed one of the previous command, and leaves bytes of the
    /// old key in them.
    pub fn parse(&self) -> Result<Sgl, SglError> {
        use descriptor_type::*;
        let b = &self.0;
        let address = u64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]]);
        let length = u32::from_le_bytes([b[8], b[9], b[10], b[11]]);
        let sgl = match (self.descriptor_type(), self.subtype()) {
            (DATA_BLOCK, subtype::ADDRESS) => Sgl::DataBlock { address, length },
            (DATA_BLOCK, subtype::OFFSET) => Sgl::InCapsule {
                offset: address,
                length,
            },
            (LAST_SEGMENT, subtype::OFFSET) => {
                if length == 0 || !length.is_multiple_of(16) {
                    return Err(SglError::DescriptorsLength { length });
                }
                Sgl::InCapsuleDescriptors {
                    offset: address,
                    length,
                }
            }
            (TRANSPORT_DATA_BLOCK, subtype::TRANSPORT) => Sgl::Transport { length },
            (KEYED_DATA_BLOCK, subtype @ (subtype::ADDRESS | subtype::INVALIDATE_KEY)) => {
                return Ok(Sgl::Keyed {
                    address,
                    length: length & 0x00ff_ffff,
                    key: u32::from_le_bytes([b[11], b[12], b[13], b[14]]),
                    invalidate: subtype == subtype::INVALIDATE_KEY,
                });
            }
            (descriptor_type, subtype) => {
                return Err(SglError::Type {
                    descriptor_type,
                    subtype,
                });
            }
        };
        Ok(sgl)
    }
}

impl From<Sgl> for SglDescriptor {
    fn from(sgl: Sgl) -> Self {
        use descriptor_type::*;
        let (address, identifier) = match sgl {
            Sgl::DataBlock { address, .. } => (address, DATA_BLOCK << 4 | subtype::ADDRESS),
            Sgl::InCapsule { offset, .. } => (offset, DATA_BLOCK << 4 | subtype::OFFSET),
            Sgl::InCapsuleDescriptors { offset, .. } => {
                (offset, LAST_SEGMENT << 4 | subtype::OFFSET)
            }
            Sgl::Transport { .. } => (0, TRANSPORT_DATA_BLOCK << 4 | subtype::TRANSPORT),
            Sgl::Keyed {
                address,
                invalidate,
                ..
            } => {
                let subtype = if invalidate {
                    subtype::INVALIDATE_KEY
                } else {
                    subtype::ADDRESS
                };
                (address, KEYED_DATA_BLOCK << 4 | subtype)
            }
        };
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&address.to_le_bytes());
        bytes[8..12].copy_from_slice(&sgl.length().to_le_bytes());
        if let Sgl::Keyed { length, key, .. } = sgl {
            debug_assert!(length < 1 << 24, "a keyed data block has a 24-bit length");
            bytes[11..15].copy_from_slice(&key.to_le_bytes());
        }
        bytes[15] = identifier;
        Self(bytes)
    }
}

impl fmt::Debug for SglDescriptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.parse() {
            Ok(sgl) => sgl.fmt(f),
            Err(_) => f.debug_tuple("SglDescriptor").field(&self.0).finish(),
        }
    }
}

#[cfg(test)]
mod tests {
    use core::mem::offset_of;

    use hex_literal::hex;
    use proptest::prelude::*;

    use super::*;

    /// Each field is where Base figure 87 puts it.
    #[test]
    fn layout() {
        assert_eq!(offset_of!(Sqe, flags), 1);
        assert_eq!(offset_of!(Sqe, cid), 2);
        assert_eq!(offset_of!(Sqe, nsid), 4);
        assert_eq!(offset_of!(Sqe, cdw2), 8);
        assert_eq!(offset_of!(Sqe, cdw3), 12);
        assert_eq!(offset_of!(Sqe, mptr), 16);
        assert_eq!(offset_of!(Sqe, dptr), 24);
        assert_eq!(offset_of!(Sqe, cdw10), 40);
        assert_eq!(offset_of!(Sqe, cdw11), 44);
        assert_eq!(offset_of!(Sqe, cdw12), 48);
        assert_eq!(offset_of!(Sqe, cdw13), 52);
        assert_eq!(offset_of!(Sqe, cdw14), 56);
        assert_eq!(offset_of!(Sqe, cdw15), 60);
    }

    /// A Read as a Linux host sends it over TCP: 8 blocks at LBA 0x1122334455, namespace 1.
    #[test]
    fn a_read_capsule() {
        let bytes = hex!(
            "02400a00 01000000 00000000 00000000 0000000000000000"
            "0000000000000000 00100000 0000005a"
            "55443322 11000000 07000000 00000000 00000000 00000000"
        );
        let sqe = Sqe::read_from_bytes(&bytes).unwrap();
        assert_eq!(sqe.opcode, opcode::io::READ);
        assert_eq!(sqe.cid(), 10);
        assert_eq!(sqe.nsid(), 1);
        assert_eq!(sqe.fuse(), Fuse::Normal);
        assert_eq!(sqe.psdt(), Psdt::Sgl);
        assert_eq!(sqe.sgl(), Ok(Sgl::Transport { length: 4096 }));
        assert_eq!(sqe.cdw10_11(), 0x11_2233_4455);
        assert_eq!(sqe.as_bytes(), bytes);
    }

    /// Descriptors, each with its meaning or the reason for its refusal.
    #[test]
    fn sgl_descriptors() {
        let refused = |descriptor_type, subtype| {
            Err(SglError::Type {
                descriptor_type,
                subtype,
            })
        };
        for (bytes, expected) in [
            (
                hex!("0000000000000000 00100000 00000001"),
                Ok(Sgl::InCapsule {
                    offset: 0,
                    length: 4096,
                }),
            ),
            (
                hex!("0000000000000000 00000000 0000005a"),
                Ok(Sgl::Transport { length: 0 }),
            ),
            (
                hex!("0010ffff7f000000 002000 78563412 40"),
                Ok(Sgl::Keyed {
                    address: 0x7f_ffff_1000,
                    length: 0x2000,
                    key: 0x1234_5678,
                    invalidate: false,
                }),
            ),
            (
                hex!("0010ffff7f000000 ffffff 78563412 4f"),
                Ok(Sgl::Keyed {
                    address: 0x7f_ffff_1000,
                    length: 0xff_ffff,
                    key: 0x1234_5678,
                    invalidate: true,
                }),
            ),
            (
                hex!("0000000000000000 20000000 00000031"),
                Ok(Sgl::InCapsuleDescriptors {
                    offset: 0,
                    length: 32,
                }),
            ),
            (
                hex!("0000000000000000 21000000 00000031"),
                Err(SglError::DescriptorsLength { length: 33 }),
            ),
            (
                hex!("0000000000000000 00000000 00000031"),
                Err(SglError::DescriptorsLength { length: 0 }),
            ),
            // Leftovers in reserved bytes.
            (
                hex!("0000000000000000 00100000 00010001"),
                Ok(Sgl::InCapsule {
                    offset: 0,
                    length: 4096,
                }),
            ),
            (
                hex!("0000000000000000 00100000 0000ff5a"),
                Ok(Sgl::Transport { length: 4096 }),
            ),
            // Bit bucket, segment, vendor, and a transport block with a data block's subtype.
            (hex!("0000000000000000 00100000 00000010"), refused(1, 0)),
            (hex!("0000000000000000 00100000 00000020"), refused(2, 0)),
            (hex!("0000000000000000 00100000 000000f0"), refused(0xf, 0)),
            (hex!("0000000000000000 00100000 00000051"), refused(5, 1)),
            (hex!("0000000000000000 00100000 00000002"), refused(0, 2)),
        ] {
            assert_eq!(SglDescriptor(bytes).parse(), expected, "{bytes:02x?}");
        }
        assert_eq!(
            SglError::Type {
                descriptor_type: 1,
                subtype: 0
            }
            .status(),
            StatusCode::SGL_DESCRIPTOR_TYPE_INVALID
        );
    }

    fn any_sgl() -> impl Strategy<Value = Sgl> {
        prop_oneof![
            (any::<u64>(), any::<u32>())
                .prop_map(|(address, length)| Sgl::DataBlock { address, length }),
            (any::<u64>(), any::<u32>())
                .prop_map(|(offset, length)| Sgl::InCapsule { offset, length }),
            (any::<u64>(), 1u32..1000).prop_map(|(offset, n)| Sgl::InCapsuleDescriptors {
                offset,
                length: n * 16
            }),
            any::<u32>().prop_map(|length| Sgl::Transport { length }),
            (any::<u64>(), 0u32..1 << 24, any::<u32>(), any::<bool>()).prop_map(
                |(address, length, key, invalidate)| Sgl::Keyed {
                    address,
                    length,
                    key,
                    invalidate
                }
            ),
        ]
    }

    proptest! {
        /// Building and parsing a descriptor are inverse to each other.
        #[test]
        fn sgl_round_trip(sgl in any_sgl()) {
            prop_assert_eq!(SglDescriptor::from(sgl).parse(), Ok(sgl));
        }

        /// A descriptor that is accepted is understood to the last bit: it builds to the same
        /// bytes. (The address of a transport data block means nothing and may hold anything, and
        /// so may reserved bytes.)
        #[test]
        fn sgl_accepts_nothing_it_cannot_say(mut bytes in any::<[u8; 16]>(), id in any::<u8>()) {
            bytes[15] = id;
            if let Ok(sgl) = SglDescriptor(bytes).parse() {
                if matches!(sgl, Sgl::Transport { .. }) {
                    bytes[..8].fill(0);
                }
                if !matches!(sgl, Sgl::Keyed { .. }) {
                    bytes[12..15].fill(0);
                }
                prop_assert_eq!(SglDescriptor::from(sgl).0, bytes);
            }
        }

        /// Flags keep their other bits when one part is set.
        #[test]
        fn flags_parts(flags in any::<u8>()) {
            let mut sqe = Sqe::zeroed();
            sqe.set_fuse(Fuse::from_flags(flags));
            sqe.set_psdt(Psdt::from_flags(flags));
            prop_assert_eq!(sqe.flags, flags & 0b1100_0011);
        }
    }
}
