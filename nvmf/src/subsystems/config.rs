//! The configuration of a target, and the limits of queues and commands that follow from it.

use std::ops::RangeInclusive;

use crate::transport::TransportCaps;
use nacre_nvmf_wire::Nqn;
use nacre_nvmf_wire::identify::IdentifyController;

/// The limits and identity of a target. Announced limits equal the enforced ones.
#[derive(Debug, Clone)]
pub struct TargetConfig {
    /// Most subsystems, without the discovery subsystem.
    pub max_subsystems: usize,
    /// Most connected queues over all transports.
    pub max_connections: usize,
    /// The limits of a transport without its own.
    pub queue_limits: QueueLimits,
    /// Command retry delay times 1 to 3, in units of 100 ms.
    pub command_retry_delay: [u16; 3],
    /// Outstanding Asynchronous Event Requests of one controller (AERL + 1).
    pub async_event_requests: u8,
    /// Outstanding Abort commands of one controller (ACL + 1).
    pub aborts: u8,
    /// Entries of the error information log of one controller (ELPE + 1).
    pub error_log_entries: u8,
    /// Ranges of one Dataset Management command (DMRL).
    pub dsm_ranges: u8,
    /// Source ranges of one Copy command (MSRC + 1).
    pub copy_ranges: u8,
    /// Largest Copy, in blocks, in all and per range.
    pub copy_blocks: u16,
    /// Largest Write Zeroes, in bytes; rounded down to 4096 times a power of two (WZSL).
    pub write_zeroes_bytes: u64,
    /// Largest Verify, in bytes; rounded down to 4096 times a power of two (VSL).
    pub verify_bytes: u64,
    /// PCI vendor identifiers shown in Identify Controller.
    pub vendor_id: u16,
    pub firmware_revision: String,
    /// The discovery subsystem's unique NQN; `None`: it has only the well-known one. See
    /// [`super::Target::set_discovery_nqn`].
    pub discovery_nqn: Option<Nqn>,
    /// The first GENCTR of the discovery log. It must be above all values before a restart, or a
    /// host could take a changed log for the same.
    pub discovery_generation: u64,
    /// The port of the discovery service, opened on every address that a subsystem is served on.
    /// `None`: no such port.
    pub discovery_port: Option<u16>,
    /// Discovery log entries name only listeners of the asking connection's transport type.
    pub discovery_same_transport: bool,
    /// Discovery log entries name only listeners on the asking connection's own address.
    pub discovery_same_address: bool,
    /// Discovery log entries name only listeners of the asking connection's own port.
    pub discovery_same_service: bool,
}

/// The limits of the queue pairs of one transport.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueLimits {
    /// Largest I/O queue, in entries: CAP.MQES + 1 and MAXCMD.
    pub max_io_entries: u16,
    /// Largest admin queue, in entries.
    pub max_admin_entries: u16,
    /// Most I/O queues of one controller.
    pub max_io_queues: u16,
    /// Keep-alive granularity in units of 100 ms (KAS).
    pub keep_alive_granularity: u16,
    /// Shortest keep-alive timeout granted; a shorter one is raised to it. 0 (disabled) stays 0.
    pub min_keep_alive_ms: u32,
}

impl TargetConfig {
    /// The range of [`TargetConfig::max_subsystems`].
    pub const SUBSYSTEMS: RangeInclusive<u32> = 1..=65_536;
    /// The range of I/O queues of one controller. FFFFh is no queue: in the error information log
    /// it stands for an error without a command.
    pub const IO_QUEUES: RangeInclusive<u16> = 1..=65_534;
}

impl Default for QueueLimits {
    fn default() -> Self {
        Self {
            max_io_entries: 128,
            max_admin_entries: 128,
            max_io_queues: 127,
            keep_alive_granularity: 10,
            min_keep_alive_ms: 10_000,
        }
    }
}

impl Default for TargetConfig {
    fn default() -> Self {
        Self {
            max_subsystems: 1024,
            max_connections: 10_240,
            queue_limits: QueueLimits::default(),
            command_retry_delay: [1, 10, 50],
            async_event_requests: 4,
            aborts: 4,
            error_log_entries: 64,
            dsm_ranges: 255,
            copy_ranges: 16,
            copy_blocks: u16::MAX,
            write_zeroes_bytes: 1 << 30,
            verify_bytes: 1 << 28,
            vendor_id: 0,
            firmware_revision: env!("CARGO_PKG_VERSION").to_string(),
            discovery_nqn: None,
            discovery_generation: 1,
            discovery_port: None,
            discovery_same_transport: false,
            discovery_same_address: false,
            discovery_same_service: false,
        }
    }
}

/// The limits of the commands of a queue.
#[derive(Debug, Clone, Copy)]
pub(crate) struct IoLimits {
    pub max_transfer_bytes: u32,
    pub dsm_ranges: u32,
    pub copy_ranges: u32,
    pub copy_blocks: u32,
    pub write_zeroes_bytes: u64,
    pub verify_bytes: u64,
    /// Hosts use keyed SGL descriptors, one or several in the capsule (SGLS).
    pub keyed_sgl: bool,
}

impl IoLimits {
    /// Rounds the limits to announceable values: powers of two of at least two pages (MDTS, WZSL,
    /// VSL), and counts of at least one.
    pub(crate) fn new(config: &TargetConfig, caps: &TransportCaps) -> Self {
        let told = |bytes: u64| 4096u64 << IdentifyController::mdts_for(bytes, 4096);
        let max_transfer_bytes = told(u64::from(caps.max_transfer_bytes)) as u32;
        Self {
            max_transfer_bytes,
            dsm_ranges: u32::from(config.dsm_ranges.max(1)),
            copy_ranges: u32::from(config.copy_ranges.max(1)),
            copy_blocks: u32::from(config.copy_blocks.max(1)),
            write_zeroes_bytes: told(config.write_zeroes_bytes),
            verify_bytes: told(config.verify_bytes),
            keyed_sgl: caps.keyed_sgl,
        }
    }
}
