//! The configuration of a simulated NVMe drive: its identity, limits, namespaces and latencies.
//!
//! Fields have the names of the specification: Identify Controller (Base 2.0, 5.17), Identify
//! Namespace (NVM Command Set 1.0, 4.1.5) and the CAP property (Base 3.1.3.1). Counts are plain
//! counts here, not 0's based.

use std::sync::Arc;
use std::time::Duration;

use nacre_nvmf_wire::identify::controller::{Oncs, Sgls};
use nacre_nvmf_wire::registers::Version;
use uuid::Uuid;

use crate::memory::Iommu;

/// The configuration of a drive.
#[derive(Clone)]
pub struct Config {
    /// The PCI address.
    pub address: String,
    pub identity: Identity,
    pub numa_node: Option<u32>,
    /// The device's slot in the tables of DMA addresses that `nacre_hugepages` has per region.
    pub slot: usize,
    pub iommu: Arc<Iommu>,
    /// Seed of the drive's random choices.
    pub seed: u64,

    /// CAP.MQES plus 1: most entries of an I/O queue.
    pub queue_entries: u32,
    /// CAP.DSTRD: doorbells are 2^(2+n) bytes apart.
    pub doorbell_stride: u8,
    /// CAP.TO: the longest time to become ready, reported in units of 500 ms, rounded up.
    pub ready_timeout: Duration,
    /// CAP.MPSMIN and CAP.MPSMAX: memory pages of 2^(12+n) bytes.
    pub pages: (u8, u8),
    /// True if CAP.CSS reports the NVM command set; false: only the admin command set.
    pub nvm_command_set: bool,
    /// I/O queue pairs of the drive: the most that Set Features, Number of Queues grants.
    pub io_queues: u16,
    /// MSI-X vectors.
    pub vectors: u16,
    /// MDTS: 2^n pages of CAP.MPSMIN; 0: no limit.
    pub mdts: u8,
    pub sgls: Sgls,
    pub oncs: Oncs,
    /// FUSES bit 0: fused Compare and Write.
    pub fused_compare_and_write: bool,
    pub shadow_doorbells: bool,
    pub volatile_cache: bool,
    pub limits: Limits,
    pub namespaces: Vec<NamespaceConfig>,

    pub pace: Pace,
    /// True if Delete I/O Submission Queue posts completions for the commands that it aborts;
    /// false if the abort is implicit.
    pub deletion_completes: bool,
    /// True: the drive checks every doorbell write. False: a doorbell write costs the driver
    /// almost no time, for measurements; the next turn checks the last one to each doorbell. With
    /// `shadow_doorbells`, every write is checked.
    pub strict_doorbells: bool,
}

/// SN, MN, FR and VER of Identify Controller.
#[derive(Debug, Clone)]
pub struct Identity {
    pub serial: String,
    pub model: String,
    pub firmware: String,
    pub version: Version,
}

impl Default for Identity {
    fn default() -> Self {
        Self {
            serial: "SIM0001".to_owned(),
            model: "Nacre Simulated Drive".to_owned(),
            firmware: "1.0".to_owned(),
            version: Version::V2_0,
        }
    }
}

/// The limits of commands (Identify Controller, CNS 01h and CNS 06h).
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// AWUN, AWUPF and ACWU, in blocks, 1 or more.
    pub awun: u16,
    pub awupf: u16,
    pub acwu: u16,
    /// ACL and AERL as counts, 1 or more.
    pub aborts: u8,
    pub async_events: u8,
    /// FWUG, in units of 4 KiB (0 and 255: 4 bytes), if the drive has the commands that update its
    /// firmware (OACS bit 2). Images start with [`crate::IMAGE_MARK`] and 8 bytes of revision.
    pub firmware_updates: Option<u8>,
    /// Verify: 2^n pages of CAP.MPSMIN; 0: no limit.
    pub vsl: u8,
    /// Write Zeroes: 2^n pages of CAP.MPSMIN; 0: no limit.
    pub wzsl: u8,
    /// Dataset Management: ranges; 0: no limit.
    pub dmrl: u8,
    /// Dataset Management: blocks of a range; 0: no limit.
    pub dmrsl: u32,
    /// Dataset Management: blocks in total; 0: no limit.
    pub dmsl: u64,
    /// RTD3E: microseconds that a shutdown takes at most.
    pub rtd3e: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            awun: 8,
            awupf: 8,
            acwu: 8,
            aborts: 4,
            async_events: 4,
            firmware_updates: None,
            vsl: 0,
            wzsl: 0,
            dmrl: 0,
            dmrsl: 0,
            dmsl: 0,
            rtd3e: 1_000_000,
        }
    }
}

/// The latencies of the drive.
#[derive(Debug, Clone, Copy, Default)]
pub struct Pace {
    /// Time from CC.EN 1 to CSTS.RDY 1.
    pub ready_after: Duration,
    /// Time from CC.EN 0 to CSTS.RDY 0.
    pub disabled_after: Duration,
    /// Time of a shutdown (CC.SHN).
    pub shutdown_after: Duration,
    /// Shortest and longest time of a command; each command takes a random time in between. So
    /// commands complete out of order unless both are equal.
    pub latency: (Duration, Duration),
}

impl Default for Config {
    /// A drive with most optional commands and no latency. It has one namespace of 4 MiB.
    fn default() -> Self {
        Self {
            address: "0000:5e:00.0".to_owned(),
            identity: Identity::default(),
            numa_node: None,
            slot: 4,
            iommu: Arc::new(Iommu::new()),
            seed: 1,
            queue_entries: 1024,
            doorbell_stride: 0,
            ready_timeout: Duration::from_secs(5),
            pages: (0, 4),
            nvm_command_set: true,
            io_queues: 16,
            vectors: 17,
            mdts: 5,
            sgls: Sgls::SUPPORTED,
            oncs: Oncs::COMPARE
                | Oncs::DATASET_MANAGEMENT
                | Oncs::WRITE_ZEROES
                | Oncs::SAVE_SELECT
                | Oncs::TIMESTAMP
                | Oncs::VERIFY
                | Oncs::COPY,
            fused_compare_and_write: true,
            shadow_doorbells: false,
            volatile_cache: true,
            limits: Limits::default(),
            namespaces: vec![NamespaceConfig::new(1, 512, 8192)],
            pace: Pace::default(),
            deletion_completes: true,
            strict_doorbells: true,
        }
    }
}

/// One LBA format: bytes of data and bytes of metadata per block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Format {
    pub block_size: u32,
    pub metadata: u16,
}

#[derive(Debug, Clone)]
pub struct NamespaceConfig {
    pub nsid: u32,
    pub blocks: u64,
    /// The supported LBA formats.
    pub formats: Vec<Format>,
    /// FLBAS: the index of the current format.
    pub format: usize,
    /// FLBAS bit 4: metadata follows each block's data; false: metadata has a separate buffer.
    pub extended: bool,
    /// DPS: type of the protection information, 0 for none.
    pub protection: u8,
    pub nguid: [u8; 16],
    pub eui64: [u8; 8],
    /// Reported in the Namespace Identification Descriptor list only (CNS 03h).
    pub uuid: Option<Uuid>,
    /// NOIOB, in blocks; 0: not reported.
    pub noiob: u16,
    /// Atomic limits of this namespace, in blocks: NAWUPF (also for NAWUN and NACWU), the
    /// boundary size NABSPF (0: none) and its offset NABO. `None`: the controller's limits apply.
    pub nawupf: Option<u16>,
    pub nabspf: u16,
    pub nabo: u16,
    /// Copy: blocks of a source range.
    pub mssrl: u16,
    /// Copy: blocks in total.
    pub mcl: u32,
    /// Copy: source ranges.
    pub msrc: u16,
    /// Preferred granularity and alignment of writes (NPWG, NPWA), in blocks; 0: none.
    pub npwg: u16,
    /// Preferred granularity and alignment of deallocation (NPDG, NPDA), in blocks; 0: none.
    pub npdg: u16,
    /// True: deallocated blocks read as zeroes (DLFEAT 1). False: as other bytes (DLFEAT 0).
    pub deallocated_zeroes: bool,
    /// True: Dataset Management deallocates nothing, regardless of DLFEAT. The command is
    /// advisory.
    pub ignores_advice: bool,
    /// DLFEAT bit 3: Write Zeroes accepts DEAC. Without it, the command fails with Invalid Field.
    pub deac: bool,
    pub write_protected: bool,
    /// The initial value of every byte of data.
    pub contents: u8,
}

impl NamespaceConfig {
    pub fn new(nsid: u32, block_size: u32, blocks: u64) -> Self {
        let mut nguid = [0x5a; 16];
        nguid[12..].copy_from_slice(&nsid.to_be_bytes());
        Self {
            nsid,
            blocks,
            formats: vec![Format {
                block_size,
                metadata: 0,
            }],
            format: 0,
            extended: false,
            protection: 0,
            nguid,
            eui64: [0; 8],
            uuid: None,
            noiob: 0,
            nawupf: None,
            nabspf: 0,
            nabo: 0,
            mssrl: 128,
            mcl: 256,
            msrc: 8,
            npwg: 0,
            npdg: 0,
            deallocated_zeroes: true,
            ignores_advice: false,
            deac: true,
            write_protected: false,
            contents: 0,
        }
    }

    pub(crate) fn current(&self) -> Format {
        self.formats[self.format]
    }
}
