//! The options of the RDMA transport, with their defaults and ranges.

use std::ops::RangeInclusive;
use std::time::Duration;

use nacre_hugepages::{GRAIN, REGION_MAX};
pub use nacre_nvmf::transport::ConfigError;
use nacre_nvmf::transport::{
    MAX_IN_CAPSULE_DATA, QUEUE_DEPTHS, TransportCaps, TransportType, is_in_capsule_size, words,
};

/// Most shared receives of one core and device: more than adapters support.
pub const MAX_SRQ_SIZE: u32 = 262_144;

/// Largest transfer of one command, in bytes: a power of two.
pub const IO_SIZES: RangeInclusive<u32> = 4096..=1 << 23;
/// Completions collected in one poll.
pub const POLL_BATCHES: RangeInclusive<usize> = 1..=1024;
/// Descriptors of one command.
pub const SGL_DESCRIPTORS: RangeInclusive<u8> = 1..=64;
/// The shortest limit of a memory region.
pub const MIN_MR_SIZE: u64 = GRAIN as u64;

/// Options of the RDMA transport. Values beyond a device's limits are clamped to them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RdmaConfig {
    /// Largest in-capsule data of a command, in bytes, unless the listener has its own value.
    pub in_capsule_data_size: u32,
    /// The most that a listener with its own size may have: receive buffers, which all listeners
    /// share, are made for it. A value below `in_capsule_data_size` counts as
    /// `in_capsule_data_size`.
    pub listener_in_capsule_data_size: u32,
    /// Largest transfer of one command, in bytes: a power of two, at least 4096.
    pub max_io_size: u32,
    /// Most commands of one queue pair.
    pub max_queue_depth: u16,
    /// Most connections of the whole transport; memory for them is taken on each core.
    pub max_connections: usize,
    pub max_listeners: usize,
    pub backlog: i32,
    /// Receive buffers per core and device, shared by its connections; 0: each connection has as
    /// many as its host may send commands.
    pub srq_size: u32,
    /// Initial completions per core and device; the queue grows with connections.
    pub cq_size: u32,
    /// Descriptors of one command (MSDBD).
    pub max_sgl_descriptors: u8,
    /// Responses of up to this number of bytes are sent inline; a response has 16.
    pub max_inline_data: u32,
    /// Outstanding RDMA READs of one connection.
    pub read_depth: u8,
    /// Completions collected in one poll.
    pub poll_batch: usize,
    /// Time from the connection to an accepted Connect.
    pub connect_timeout: Duration,
    /// Time for the queue pair of an ending connection to flush. Afterwards the transport destroys
    /// the queue pair.
    pub drain_timeout: Duration,
    /// Longest memory region to register with a device, in bytes. A longer arena is registered in
    /// pieces of the largest power of two within both this and the device's own limit.
    pub max_mr_size: u64,
    /// The only device to listen on; `None`: the device that has the address.
    pub device: Option<String>,
    /// Type of service (DSCP << 2).
    pub tos: u8,
    /// Local ACK timeout as an exponent (4.096 us * 2^n).
    pub ack_timeout: Option<u8>,
}

impl Default for RdmaConfig {
    fn default() -> Self {
        Self {
            in_capsule_data_size: 4096,
            listener_in_capsule_data_size: 0,
            max_io_size: 128 << 10,
            max_queue_depth: 128,
            max_connections: 1024,
            max_listeners: 256,
            backlog: 128,
            srq_size: 2048,
            cq_size: 4096,
            max_sgl_descriptors: 16,
            max_inline_data: 64,
            read_depth: 16,
            poll_batch: 64,
            connect_timeout: Duration::from_secs(20),
            drain_timeout: Duration::from_secs(2),
            max_mr_size: REGION_MAX as u64,
            device: None,
            tos: 0,
            ack_timeout: None,
        }
    }
}

impl RdmaConfig {
    /// The first of [`RdmaConfig::problems`].
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.problems().into_iter().next().map_or(Ok(()), Err)
    }

    /// Invalid options.
    pub fn problems(&self) -> Vec<ConfigError> {
        let mut problems = Vec::new();
        let mut check = |ok: bool, option, actual: u64, allowed: String| {
            if !ok {
                problems.push(ConfigError::OutOfRange {
                    option,
                    actual,
                    allowed,
                });
            }
        };
        for (option, size) in [
            ("in_capsule_data_size", self.in_capsule_data_size),
            (
                "listener_in_capsule_data_size",
                self.listener_in_capsule_data_size,
            ),
        ] {
            let allowed = format!("a multiple of 16, at most {MAX_IN_CAPSULE_DATA}");
            check(is_in_capsule_size(size), option, size.into(), allowed);
        }
        let size = self.max_io_size;
        check(
            size.is_power_of_two() && IO_SIZES.contains(&size),
            "max_io_size",
            size.into(),
            format!("a power of two {}", words(&IO_SIZES)),
        );
        let depth = self.max_queue_depth;
        check(
            QUEUE_DEPTHS.contains(&depth),
            "max_queue_depth",
            depth.into(),
            words(&QUEUE_DEPTHS),
        );
        let at_least_1 = || "at least 1".to_owned();
        check(self.max_connections > 0, "max_connections", 0, at_least_1());
        check(
            self.max_mr_size >= MIN_MR_SIZE,
            "max_mr_size",
            self.max_mr_size,
            format!("at least {MIN_MR_SIZE}"),
        );
        check(self.backlog > 0, "backlog", 0, at_least_1());
        check(
            self.srq_size <= MAX_SRQ_SIZE,
            "srq_size",
            self.srq_size.into(),
            format!("at most {MAX_SRQ_SIZE}"),
        );
        check(self.cq_size > 0, "cq_size", 0, at_least_1());
        check(self.read_depth > 0, "read_depth", 0, at_least_1());
        check(
            POLL_BATCHES.contains(&self.poll_batch),
            "poll_batch",
            self.poll_batch as u64,
            words(&POLL_BATCHES),
        );
        let descriptors = self.max_sgl_descriptors;
        check(
            SGL_DESCRIPTORS.contains(&descriptors),
            "max_sgl_descriptors",
            descriptors.into(),
            words(&SGL_DESCRIPTORS),
        );
        problems
    }

    /// Data that fits into a receive buffer, in bytes.
    pub(crate) fn receive_data_size(&self) -> u32 {
        self.in_capsule_data_size
            .max(self.listener_in_capsule_data_size)
    }

    /// In-capsule data of the I/O queues of one listener, which may have its own size: at most the
    /// size of the receive buffers.
    pub(crate) fn listener_data_size(&self, wanted: Option<u32>) -> u32 {
        wanted.map_or(self.in_capsule_data_size, |bytes| {
            bytes.min(self.receive_data_size())
        })
    }

    /// `in_capsule`: of the listener.
    pub(crate) fn caps(&self, in_capsule: u32) -> TransportCaps {
        // More descriptors than fit into a capsule cannot arrive; one is in the command itself.
        let fit = (in_capsule / 16).max(1);
        TransportCaps {
            kind: TransportType::Rdma,
            in_capsule_bytes: in_capsule,
            admin_in_capsule_bytes: self.in_capsule_data_size,
            max_transfer_bytes: self.max_io_size,
            max_sgl_descriptors: fit.min(self.max_sgl_descriptors.into()) as u8,
            keyed_sgl: true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_receives_are_bounded() {
        let of = |srq_size| RdmaConfig {
            srq_size,
            ..RdmaConfig::default()
        };
        for srq_size in [0, 1, 2048, MAX_SRQ_SIZE] {
            of(srq_size).validate().unwrap();
        }
        let error = of(MAX_SRQ_SIZE + 1).validate().unwrap_err().to_string();
        assert!(error.contains("srq_size"), "{error}");
        assert!(error.contains("262144"), "{error}");
    }
}
