//! Identify Namespace (CNS 00h), its NVM command set part (CNS 05h), and the part that is the same
//! for every command set (CNS 08h).

use zerocopy::little_endian::{U16, U32, U64};

use crate::layout::wire;

wire! {
    /// Identify Namespace (NVM figure 97).
    4096 bytes: pub struct IdentifyNamespace {
        /// Size, capacity and use, in blocks.
        0 nsze: U64,
        8 ncap: U64,
        16 nuse: U64,
        /// See [`Nsfeat`].
        24 nsfeat: u8,
        /// LBA formats, less one.
        25 nlbaf: u8,
        /// Format in use: bits 3:0, and bits 6:5 for those above 15; bit 4 extended metadata.
        26 flbas: u8,
        27 mc: u8,
        28 dpc: u8,
        29 dps: u8,
        /// Bit 0: may be attached to more than one controller.
        30 nmic: u8,
        /// See [`Rescap`].
        31 rescap: u8,
        32 fpi: u8,
        /// See [`dlfeat`].
        33 dlfeat: u8,
        /// Atomicity of this namespace, in blocks less one, and its boundaries.
        34 nawun: U16,
        36 nawupf: U16,
        38 nacwu: U16,
        40 nabsn: U16,
        42 nabo: U16,
        44 nabspf: U16,
        /// Optimal I/O boundary, in blocks.
        46 noiob: U16,
        /// NVM capacity in bytes.
        48 nvmcap: [U64; 2],
        /// Preferred write granularity and alignment, deallocate granularity and alignment, optimal
        /// write size: in blocks less one.
        64 npwg: U16,
        66 npwa: U16,
        68 npdg: U16,
        70 npda: U16,
        72 nows: U16,
        /// Copy: blocks per range, blocks in all, ranges less one.
        74 mssrl: U16,
        76 mcl: U32,
        80 msrc: u8,
        81 kpios: u8,
        82 nulbaf: u8,
        83 reserved83: u8,
        84 kpiodaag: U32,
        88 reserved88: [u8; 4],
        92 anagrpid: U32,
        96 reserved96: [u8; 3],
        /// Bit 0: write protected.
        99 nsattr: u8,
        100 nvmsetid: U16,
        102 endgid: U16,
        104 nguid: [u8; 16],
        120 eui64: [u8; 8],
        128 lbaf: [LbaFormat; 64],
        384 vendor: [u8; 3712],
    }
}

wire! {
    /// An LBA format.
    4 bytes: pub struct LbaFormat {
        /// Metadata bytes per block.
        0 ms: U16,
        /// Block size as a power of two; 0 for a format that is not there.
        2 lbads: u8,
        /// Relative performance, 0 the best.
        3 rp: u8,
    }
}

impl LbaFormat {
    /// `block_bytes` is a power of two, at least 512.
    pub fn new(block_bytes: u32, metadata_bytes: u16) -> Self {
        debug_assert!(block_bytes.is_power_of_two() && block_bytes >= 512);
        Self {
            ms: U16::new(metadata_bytes),
            lbads: block_bytes.ilog2() as u8,
            rp: 0,
        }
    }
}

impl IdentifyNamespace {
    /// Index of the format in use.
    pub fn format_index(&self) -> usize {
        usize::from(self.flbas & 0xf | (self.flbas >> 5 & 0b11) << 4)
    }

    /// Bytes of a block in the current LBA format; `None` if its LBADS is invalid.
    pub fn block_bytes(&self) -> Option<u32> {
        match self.lbaf[self.format_index()].lbads {
            lbads @ 9..=31 => Some(1 << lbads),
            _ => None,
        }
    }

    /// Blocks of the largest fused compare-and-write that is atomic at any LBA: NACWU, or else the
    /// controller's `acwu`, plus one as both are 0's based. 1 if the namespace has atomic
    /// boundaries (NABSN): the command is not atomic across one.
    pub fn compare_and_write_blocks(&self, acwu: u16) -> u32 {
        let atomicity = Nsfeat::from_bits_retain(self.nsfeat).contains(Nsfeat::ATOMICITY);
        let unit = match self.nacwu.get() {
            nacwu if atomicity && nacwu > 0 => nacwu,
            _ => acwu,
        };
        match self.nabsn.get() {
            0 => u32::from(unit) + 1,
            _ => 1,
        }
    }
}

/// What reading a deallocated block returns (bits 2:0), and whether Write Zeroes deallocates.
pub mod dlfeat {
    pub const READ_NOT_REPORTED: u8 = 0;
    pub const READ_ZEROES: u8 = 1;
    pub const READ_ONES: u8 = 2;
    pub const WRITE_ZEROES_DEALLOCATES: u8 = 1 << 3;
    /// The guard field of a deallocated block is the CRC of the data that is read, not FFFFh.
    pub const GUARD_OF_DATA: u8 = 1 << 4;
}

/// NMIC: shared by several controllers.
pub const NMIC_SHARED: u8 = 1;
/// NSATTR: write protected.
pub const NSATTR_WRITE_PROTECTED: u8 = 1;

bitflags::bitflags! {
    /// Namespace features.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct Nsfeat: u8 {
        /// NCAP may be less than NSZE.
        const THIN_PROVISIONING = 1 << 0;
        /// NAWUN, NAWUPF and NACWU are valid and replace the controller's values.
        const ATOMICITY = 1 << 1;
        const DEALLOCATED_ERROR = 1 << 2;
        /// NGUID and EUI64 are never used again.
        const UID_NEVER_REUSED = 1 << 3;
        /// NPWG, NPWA, NPDG, NPDA and NOWS are valid (OPTPERF: now bits 5:4).
        const OPTIMAL_PERFORMANCE = 1 << 4;
    }

    /// Reservation capabilities.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct Rescap: u8 {
        const PERSIST_THROUGH_POWER_LOSS = 1 << 0;
        const WRITE_EXCLUSIVE = 1 << 1;
        const EXCLUSIVE_ACCESS = 1 << 2;
        const WRITE_EXCLUSIVE_REGISTRANTS = 1 << 3;
        const EXCLUSIVE_ACCESS_REGISTRANTS = 1 << 4;
        const WRITE_EXCLUSIVE_ALL = 1 << 5;
        const EXCLUSIVE_ACCESS_ALL = 1 << 6;
        /// IEKEY as of NVMe 1.3: valid in Register, refused in Acquire and Release.
        const IEKEY_1_3 = 1 << 7;
    }
}

wire! {
    /// Identify Namespace for the NVM command set (CNS 05h, CSI 0).
    4096 bytes: pub struct NvmNamespace {
        0 lbstm: U64,
        8 pic: u8,
        9 pifa: u8,
        10 reserved10: [u8; 2],
        /// Extended LBA formats: bits 6:0 storage tag size, bits 8:7 protection information format.
        12 elbaf: [U32; 64],
        /// In blocks: NPDG as 32 bits, read granularity and alignment, optimal read size, and NPDA
        /// as 32 bits.
        268 npdgl: U32,
        272 nprg: U32,
        276 npra: U32,
        280 nors: U32,
        284 npdal: U32,
        288 lbapss: U32,
        292 tlbaag: U32,
        296 reserved296: [u8; 3800],
    }
}

wire! {
    /// I/O Command Set Independent Identify Namespace (CNS 08h).
    4096 bytes: pub struct IndependentNamespace {
        /// Bit 3 UIDs never reused, bit 4 rotational, bit 5 volatile write cache not present.
        0 nsfeat: u8,
        1 nmic: u8,
        2 rescap: u8,
        3 fpi: u8,
        4 anagrpid: U32,
        8 nsattr: u8,
        9 reserved9: u8,
        10 nvmsetid: U16,
        12 endgid: U16,
        /// Bit 0: ready.
        14 nstat: u8,
        15 kpios: u8,
        16 maxkt: U16,
        18 reserved18: [u8; 2],
        20 rgrpid: U32,
        24 reserved24: [u8; 4072],
    }
}

/// NSTAT: ready.
pub const NSTAT_READY: u8 = 1;

#[cfg(test)]
mod tests {
    use super::*;

    /// NACWU counts where it is said to, ACWU otherwise, and neither across boundaries.
    #[test]
    fn compare_and_write_units() {
        let atomicity = Nsfeat::ATOMICITY.bits();
        for (nsfeat, nacwu, acwu, nabsn, blocks) in [
            (0, 0, 0, 0, 1),
            (0, 0, 7, 0, 8),
            (0, 15, 7, 0, 8),
            (atomicity, 15, 7, 0, 16),
            (atomicity, 0, 7, 0, 8),
            (atomicity, 0xffff, 0, 0, 0x1_0000),
            (atomicity, 15, 7, 63, 1),
        ] {
            let mut namespace = IdentifyNamespace::zeroed();
            namespace.nsfeat = nsfeat;
            (namespace.nacwu, namespace.nabsn) = (nacwu.into(), nabsn.into());
            let found = namespace.compare_and_write_blocks(acwu);
            assert_eq!(found, blocks, "{nsfeat} {nacwu} {acwu} {nabsn}");
        }
    }

    /// The format in use has its index in two places.
    #[test]
    fn formats() {
        let mut namespace = IdentifyNamespace::zeroed();
        assert_eq!(namespace.block_bytes(), None);
        namespace.lbaf[0] = LbaFormat::new(512, 0);
        namespace.lbaf[17] = LbaFormat::new(4096, 8);
        assert_eq!(namespace.block_bytes(), Some(512));
        namespace.flbas = 0b0010_0001;
        assert_eq!(namespace.format_index(), 17);
        assert_eq!(namespace.block_bytes(), Some(4096));
        namespace.lbaf[17].lbads = 32;
        assert_eq!(namespace.block_bytes(), None);
        namespace.flbas = 0xff;
        assert_eq!(namespace.format_index(), 63);
    }
}
