//! Identify Controller (CNS 01h), and its NVM command set part (CNS 06h).

use zerocopy::little_endian::{U16, U32, U64};

use crate::layout::wire;

wire! {
    /// Identify Controller (Base figure 276, with the fields of 2.1).
    4096 bytes: pub struct IdentifyController {
        /// PCI vendor and subsystem vendor.
        0 vid: U16,
        2 ssvid: U16,
        /// Serial number, model number, firmware revision: ASCII, see [`super::write_ascii`].
        4 sn: [u8; 20],
        24 mn: [u8; 40],
        64 fr: [u8; 8],
        72 rab: u8,
        73 ieee: [u8; 3],
        /// See [`Cmic`].
        76 cmic: u8,
        /// Maximum data transfer: 2^MDTS pages of CAP.MPSMIN; 0 for no limit.
        77 mdts: u8,
        78 cntlid: U16,
        /// See [`crate::registers::Version`].
        80 ver: U32,
        84 rtd3r: U32,
        88 rtd3e: U32,
        /// See [`crate::features::AsyncEvents`].
        92 oaes: U32,
        /// See [`Ctratt`].
        96 ctratt: U32,
        100 rrls: U16,
        102 bpcap: u8,
        103 reserved103: u8,
        104 nssl: U32,
        108 reserved108: [u8; 2],
        110 plsi: u8,
        /// See [`cntrltype`].
        111 cntrltype: u8,
        112 fguid: [u8; 16],
        /// Command retry delays, in units of 100 ms; a status's CRD chooses one.
        128 crdt1: U16,
        130 crdt2: U16,
        132 crdt3: U16,
        134 reserved134: [u8; 119],
        253 nvmsr: u8,
        254 vwci: u8,
        255 mec: u8,
        /// See [`Oacs`].
        256 oacs: U16,
        /// Abort and Asynchronous Event Request commands outstanding at a time, 0's based.
        258 acl: u8,
        259 aerl: u8,
        260 frmw: u8,
        /// See [`Lpa`].
        261 lpa: u8,
        /// Entries of the error log, 0's based.
        262 elpe: u8,
        /// Number of power states, 0's based.
        263 npss: u8,
        264 avscc: u8,
        265 apsta: u8,
        /// Warning and critical composite temperature thresholds, in kelvins.
        266 wctemp: U16,
        268 cctemp: U16,
        270 mtfa: U16,
        272 hmpre: U32,
        276 hmmin: U32,
        280 tnvmcap: [U64; 2],
        296 unvmcap: [U64; 2],
        312 rpmbs: U32,
        316 edstt: U16,
        318 dsto: u8,
        319 fwug: u8,
        /// Granularity of the keep alive timer, in units of 100 ms; 0 for no keep alive.
        320 kas: U16,
        322 hctma: U16,
        324 mntmt: U16,
        326 mxtmt: U16,
        328 sanicap: U32,
        332 hmminds: U32,
        336 hmmaxd: U16,
        338 nsetidmax: U16,
        340 endgidmax: U16,
        /// Longest ANA transition, in seconds.
        342 anatt: u8,
        /// See [`Anacap`].
        343 anacap: u8,
        344 anagrpmax: U32,
        348 nanagrpid: U32,
        352 pels: U32,
        356 domainid: U16,
        358 kpioc: u8,
        359 reserved359: u8,
        360 mptfawr: U16,
        362 reserved362: [u8; 6],
        368 megcap: [U64; 2],
        384 tmpthha: u8,
        385 reserved385: u8,
        386 cqt: U16,
        388 reserved388: [u8; 124],
        /// Queue entry sizes as powers of two: bits 3:0 required, bits 7:4 largest.
        512 sqes: u8,
        513 cqes: u8,
        /// Commands outstanding on a queue; mandatory over fabrics.
        514 maxcmd: U16,
        /// Largest namespace identifier.
        516 nn: U32,
        /// See [`Oncs`].
        520 oncs: U16,
        /// Bit 0: compare and write.
        522 fuses: U16,
        524 fna: u8,
        /// See [`vwc`].
        525 vwc: u8,
        /// Atomic write units, in blocks, 0's based: normal, and across a power failure.
        526 awun: U16,
        528 awupf: U16,
        530 nvscc: u8,
        531 nwpc: u8,
        /// Atomic compare and write unit, in blocks, 0's based.
        532 acwu: U16,
        /// Copy descriptor formats: bit n is set if format n is supported.
        534 ocfs: U16,
        /// See [`Sgls`].
        536 sgls: U32,
        /// Most namespaces at a time; 0 for NN.
        540 mnan: U32,
        544 maxdna: [U64; 2],
        560 maxcna: U32,
        564 oaqd: U32,
        568 reserved568: [u8; 200],
        /// NUL-terminated; see [`crate::fabrics::Nqn::to_field`].
        768 subnqn: [u8; 256],
        1024 reserved1024: [u8; 768],
        /// Fabrics: size of a command capsule and of a response capsule, in units of 16 bytes.
        1792 ioccsz: U32,
        1796 iorcsz: U32,
        /// Offset of in-capsule data from the end of the submission queue entry, in units of 16
        /// bytes.
        1800 icdoff: U16,
        /// See [`FCATT_STATIC`].
        1802 fcatt: u8,
        /// SGL data block descriptors per command; 0 for no limit.
        1803 msdbd: u8,
        /// Bit 0: Disconnect is supported.
        1804 ofcs: U16,
        /// Discovery controller type.
        1806 dctype: u8,
        1807 reserved1807: [u8; 241],
        2048 psd: [PowerState; 32],
        3072 vendor: [u8; 1024],
    }
}

wire! {
    /// A power state.
    32 bytes: pub struct PowerState {
        /// Maximum power, in hundredths of a watt (ten-thousandths with MXPS).
        0 mp: U16,
        2 reserved2: u8,
        /// Bit 0 MXPS, bit 1 non-operational.
        3 flags: u8,
        /// Entry and exit latency, in microseconds.
        4 enlat: U32,
        8 exlat: U32,
        /// Relative read throughput and latency, write throughput and latency.
        12 rrt: u8,
        13 rrl: u8,
        14 rwt: u8,
        15 rwl: u8,
        16 idlp: U16,
        18 ips: u8,
        19 reserved19: u8,
        20 actp: U16,
        22 apws: u8,
        23 reserved23: [u8; 9],
    }
}

impl IdentifyController {
    /// MDTS for a limit of `bytes`, rounded down to a power of two, with pages of `page_bytes`.
    /// MDTS cannot express a limit of one page (0 means no limit), so the result is at least two
    /// pages.
    pub fn mdts_for(bytes: u64, page_bytes: u64) -> u8 {
        let pages = (bytes / page_bytes).max(2);
        pages.ilog2() as u8
    }

    /// The largest transfer of one command in bytes, `None` for no limit.
    pub fn max_transfer_bytes(&self, page_bytes: u64) -> Option<u64> {
        match self.mdts {
            0 => None,
            mdts => page_bytes
                .checked_shl(mdts.into())
                .filter(|bytes| *bytes >= page_bytes),
        }
    }

    /// In-capsule data of an I/O command, in bytes.
    pub fn in_capsule_bytes(&self) -> u64 {
        (u64::from(self.ioccsz.get()) * 16).saturating_sub(crate::Sqe::SIZE as u64)
    }

    /// Sets IOCCSZ and IORCSZ for `bytes` of in-capsule data, a multiple of 16.
    pub fn set_in_capsule_bytes(&mut self, bytes: u32) {
        self.ioccsz = U32::new((bytes + crate::Sqe::SIZE as u32) / 16);
        self.iorcsz = U32::new(crate::Cqe::SIZE as u32 / 16);
    }
}

/// Controller types.
pub mod cntrltype {
    pub const IO: u8 = 1;
    pub const DISCOVERY: u8 = 2;
    pub const ADMINISTRATIVE: u8 = 3;
}

/// Volatile write cache.
pub mod vwc {
    pub const PRESENT: u8 = 1 << 0;
    /// Bits 2:1: Flush with NSID FFFFFFFFh is refused, or flushes every namespace.
    pub const FLUSH_BROADCAST_NO: u8 = 0b10 << 1;
    pub const FLUSH_BROADCAST_YES: u8 = 0b11 << 1;
}

bitflags::bitflags! {
    /// Multi-path I/O and namespace sharing.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct Cmic: u8 {
        const MULTIPLE_PORTS = 1 << 0;
        const MULTIPLE_CONTROLLERS = 1 << 1;
        const SR_IOV = 1 << 2;
        const ANA_REPORTING = 1 << 3;
    }

    /// Controller attributes.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct Ctratt: u32 {
        const HOST_ID_128 = 1 << 0;
        const NON_OPERATIONAL_PERMISSIVE = 1 << 1;
        const NVM_SETS = 1 << 2;
        const READ_RECOVERY_LEVELS = 1 << 3;
        const ENDURANCE_GROUPS = 1 << 4;
        const PREDICTABLE_LATENCY = 1 << 5;
        /// Traffic based keep alive: any command counts as one.
        const TRAFFIC_BASED_KEEP_ALIVE = 1 << 6;
        const NAMESPACE_GRANULARITY = 1 << 7;
        const SQ_ASSOCIATIONS = 1 << 8;
        const UUID_LIST = 1 << 9;
        const MULTI_DOMAIN = 1 << 10;
        const EXTENDED_LBA_FORMATS = 1 << 15;
        const MDTS_EXCLUDES_METADATA = 1 << 16;
        const FLEXIBLE_DATA_PLACEMENT = 1 << 19;
    }

    /// Optional admin commands.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct Oacs: u16 {
        const SECURITY = 1 << 0;
        const FORMAT_NVM = 1 << 1;
        const FIRMWARE = 1 << 2;
        const NAMESPACE_MANAGEMENT = 1 << 3;
        const SELF_TEST = 1 << 4;
        const DIRECTIVES = 1 << 5;
        const MANAGEMENT_INTERFACE = 1 << 6;
        const VIRTUALIZATION = 1 << 7;
        const DOORBELL_BUFFER = 1 << 8;
        const LBA_STATUS = 1 << 9;
        const LOCKDOWN = 1 << 10;
    }

    /// Optional admin commands of the NVM command set ([`NvmController::aocs`]).
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct Aocs: u16 {
        /// RALBAS: Get LBA Status with action type 02h.
        const ALLOCATED_BLOCKS = 1 << 0;
    }

    /// Log page attributes.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct Lpa: u8 {
        const SMART_PER_NAMESPACE = 1 << 0;
        const COMMAND_EFFECTS = 1 << 1;
        /// LPO and the 32-bit NUMD.
        const EXTENDED_DATA = 1 << 2;
        const TELEMETRY = 1 << 3;
        const PERSISTENT_EVENT = 1 << 4;
        /// Log pages 00h, 12h and 13h list the supported pages, commands and features.
        const SUPPORTED_PAGES = 1 << 5;
        const TELEMETRY_AREA4 = 1 << 6;
    }

    /// ANA capabilities.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct Anacap: u8 {
        const OPTIMIZED = 1 << 0;
        const NON_OPTIMIZED = 1 << 1;
        const INACCESSIBLE = 1 << 2;
        const PERSISTENT_LOSS = 1 << 3;
        const CHANGE = 1 << 4;
        /// A namespace's group does not change while it is attached.
        const GROUP_IS_FIXED = 1 << 6;
        /// Namespace Management takes a group.
        const GROUP_IN_MANAGEMENT = 1 << 7;
    }

    /// Optional NVM commands.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct Oncs: u16 {
        const COMPARE = 1 << 0;
        const WRITE_UNCORRECTABLE = 1 << 1;
        const DATASET_MANAGEMENT = 1 << 2;
        const WRITE_ZEROES = 1 << 3;
        /// SAVE of Set Features and SELECT of Get Features.
        const SAVE_SELECT = 1 << 4;
        const RESERVATIONS = 1 << 5;
        const TIMESTAMP = 1 << 6;
        const VERIFY = 1 << 7;
        const COPY = 1 << 8;
    }

    /// SGL support, without the two-bit level in bits 1:0 (see [`Sgls::SUPPORTED`]).
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct Sgls: u32 {
        /// Supported, without alignment or granularity requirement.
        const SUPPORTED = 0b01;
        /// Supported, with dword alignment and granularity.
        const SUPPORTED_DWORD = 0b10;
        const KEYED_DATA_BLOCK = 1 << 2;
        const BIT_BUCKET = 1 << 16;
        const METADATA_BYTE_ALIGNED = 1 << 17;
        const LONGER_THAN_DATA = 1 << 18;
        const METADATA_SGL = 1 << 19;
        /// Data block with an offset: in-capsule data.
        const OFFSET = 1 << 20;
        const TRANSPORT_DATA_BLOCK = 1 << 21;
    }
}

/// FUSES: compare and write.
pub const FUSES_COMPARE_AND_WRITE: u16 = 1;
/// FCATT: the subsystem has static controllers.
pub const FCATT_STATIC: u8 = 1;
/// OFCS: the Disconnect command.
pub const OFCS_DISCONNECT: u16 = 1;

wire! {
    /// Identify Controller for the NVM command set (CNS 06h, CSI 0): size limits of commands that
    /// carry no data, which MDTS does not limit.
    4096 bytes: pub struct NvmController {
        /// Verify, Write Zeroes, Write Uncorrectable: 2^n pages of CAP.MPSMIN; 0 for no limit.
        0 vsl: u8,
        1 wzsl: u8,
        2 wusl: u8,
        /// Dataset Management: ranges, blocks per range, blocks in all; 0 for no limit.
        3 dmrl: u8,
        4 dmrsl: U32,
        8 dmsl: U64,
        16 kpiocap: u8,
        17 wzdsl: u8,
        /// See [`Aocs`].
        18 aocs: U16,
        20 ver: U32,
        24 lbamqf: u8,
        25 reserved25: [u8; 4071],
    }
}

#[cfg(test)]
mod tests {
    use zerocopy::IntoBytes;

    use super::*;

    #[test]
    fn transfer_sizes() {
        let mut controller = IdentifyController::zeroed();
        assert_eq!(controller.max_transfer_bytes(4096), None);
        for (bytes, mdts) in [
            (1 << 20, 8),
            (131_072, 5),
            (8192, 1),
            (4096, 1),
            (200_000, 5),
        ] {
            assert_eq!(IdentifyController::mdts_for(bytes, 4096), mdts, "{bytes}");
        }
        controller.mdts = 8;
        assert_eq!(controller.max_transfer_bytes(4096), Some(1 << 20));
        controller.mdts = 255;
        assert_eq!(controller.max_transfer_bytes(4096), None);
        controller.mdts = 63;
        assert_eq!(
            controller.max_transfer_bytes(4096),
            None,
            "more than 64 bits is no limit"
        );
    }

    #[test]
    fn capsules() {
        let mut controller = IdentifyController::zeroed();
        assert_eq!(controller.in_capsule_bytes(), 0);
        controller.set_in_capsule_bytes(8192);
        assert_eq!(
            controller.as_bytes()[1792..1800],
            [0x04, 2, 0, 0, 1, 0, 0, 0]
        );
        assert_eq!(controller.in_capsule_bytes(), 8192);
    }
}
