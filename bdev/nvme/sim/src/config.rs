//! The configuration of a simulated drive: its limits, its namespaces, its pace.

use std::sync::Arc;
use std::time::Duration;

use nacre_nvmf_wire::identify::controller::{Oncs, Sgls};
use nacre_nvmf_wire::registers::Version;
use uuid::Uuid;

use crate::memory::Iommu;

#[derive(Clone)]
pub struct Config {
    pub address: String,
    pub identity: Identity,
    pub numa_node: Option<u32>,
    /// The device slot under which memory notes the addresses.
    pub slot: usize,
    pub iommu: Arc<Iommu>,
    /// Chooses whatever is left to chance.
    pub seed: u64,

    /// CAP: entries of an I/O queue (a count), doorbell stride, worst time to become ready.
    pub queue_entries: u32,
    pub doorbell_stride: u8,
    pub ready_timeout: Duration,
    /// CAP.MPSMIN and MPSMAX.
    pub pages: (u8, u8),
    /// CAP.CSS says that the NVM command set is supported.
    pub nvm_command_set: bool,
    /// I/O queue pairs that it has, and grants at most.
    pub io_queues: u16,
    pub vectors: u16,
    pub mdts: u8,
    pub sgls: Sgls,
    pub oncs: Oncs,
    /// Bit 0 of FUSES.
    pub fused_compare_and_write: bool,
    pub shadow_doorbells: bool,
    pub volatile_cache: bool,
    pub limits: Limits,
    pub namespaces: Vec<NamespaceConfig>,

    pub pace: Pace,
    /// True if Delete I/O Submission Queue completes the aborted commands, false if it leaves that
    /// implicit.
    pub deletion_completes: bool,
    /// Whether every doorbell is judged. Off, it costs the writer next to nothing: for measuring.
    pub strict_doorbells: bool,
}

/// The drive's description of itself.
#[derive(Debug, Clone)]
pub struct Identity {
    pub serial: String,
    pub model: String,
    pub firmware: String,
    pub version: Version,
}

impl Default for Identity {
    fn default() -> Identity {
        Identity {
            serial: "SIM0001".to_owned(),
            model: "Nacre Simulated Drive".to_owned(),
            firmware: "1.0".to_owned(),
            version: Version::V2_0,
        }
    }
}

/// The limits of commands, as Identify Controller has them.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// In blocks; one less on the wire.
    pub awun: u16,
    pub awupf: u16,
    pub acwu: u16,
    /// Counts; one less on the wire.
    pub aborts: u8,
    pub async_events: u8,
    /// 2^n pages, 0 for no limit: verify, write zeroes; DSM: ranges, blocks of one range, blocks in
    /// all.
    pub vsl: u8,
    pub wzsl: u8,
    pub dmrl: u8,
    pub dmrsl: u32,
    pub dmsl: u64,
    /// RTD3E: microseconds that a shutdown takes at most.
    pub rtd3e: u32,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            awun: 8,
            awupf: 8,
            acwu: 8,
            aborts: 4,
            async_events: 4,
            vsl: 0,
            wzsl: 0,
            dmrl: 0,
            dmrsl: 0,
            dmsl: 0,
            rtd3e: 1_000_000,
        }
    }
}

/// The times that the drive takes.
#[derive(Debug, Clone, Copy, Default)]
pub struct Pace {
    /// How long it takes to become ready, not ready, and shut down.
    pub ready_after: Duration,
    pub disabled_after: Duration,
    pub shutdown_after: Duration,
    /// How long a command takes: anything between these, and so out of order unless they are equal.
    pub latency: (Duration, Duration),
}

impl Default for Config {
    /// A capable drive that does everything at once, with one namespace of 4 MiB.
    fn default() -> Config {
        Config {
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

/// One LBA format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Format {
    pub block_size: u32,
    pub metadata: u16,
}

#[derive(Debug, Clone)]
pub struct NamespaceConfig {
    pub nsid: u32,
    pub blocks: u64,
    /// All that it knows, and which of them it has.
    pub formats: Vec<Format>,
    pub format: usize,
    /// Metadata at the end of each block, not in a buffer of its own.
    pub extended: bool,
    /// DPS: type of the protection information, 0 for none.
    pub protection: u8,
    pub nguid: [u8; 16],
    pub eui64: [u8; 8],
    /// In the list of descriptors only.
    pub uuid: Option<Uuid>,
    /// In blocks, 0 for none.
    pub noiob: u16,
    /// The namespace's own limits, in blocks: NAWUPF (and NAWUN, NACWU), the boundary NABSPF and
    /// its offset NABO.
    pub nawupf: Option<u16>,
    pub nabspf: u16,
    pub nabo: u16,
    /// Copy: blocks of one range, blocks in all, ranges.
    pub mssrl: u16,
    pub mcl: u32,
    pub msrc: u16,
    /// Preferred granularity and alignment: of writes, of deallocation; 0 for none.
    pub npwg: u16,
    pub npdg: u16,
    /// Deallocated blocks read as zeroes (DLFEAT 1), or as anything.
    pub deallocated_zeroes: bool,
    /// Dataset Management deallocates nothing, whatever DLFEAT says of deallocated blocks: it is
    /// advice.
    pub ignores_advice: bool,
    /// Write Zeroes with DEAC deallocates.
    pub deac: bool,
    pub write_protected: bool,
    /// What every byte is at first.
    pub contents: u8,
}

impl NamespaceConfig {
    pub fn new(nsid: u32, block_size: u32, blocks: u64) -> NamespaceConfig {
        let mut nguid = [0x5a; 16];
        nguid[12..].copy_from_slice(&nsid.to_be_bytes());
        NamespaceConfig {
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
