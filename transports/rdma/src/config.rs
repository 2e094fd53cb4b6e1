//! The settings of the RDMA transport, with their defaults and ranges. Each one is declared once,
//! in the list of `settings!`.

use std::ops::RangeInclusive;
use std::time::Duration;

use nacre_hugepages::{GRAIN, REGION_MAX};
pub use nacre_nvmf::transport::ConfigError;
use nacre_nvmf::transport::{
    MAX_IN_CAPSULE_DATA, QUEUE_DEPTHS, TransportCaps, TransportType, is_in_capsule_size, words,
};
use nacre_units::read;
use serde::{Deserialize, Serialize};

/// The largest `srq_size`: more shared receives than adapters support.
pub const MAX_SRQ_SIZE: u32 = 262_144;

/// The range of [`RdmaConfig::max_io_size`], in bytes.
pub const IO_SIZES: RangeInclusive<u32> = 4096..=1 << 23;
/// The range of `poll_batch`.
pub const POLL_BATCHES: RangeInclusive<u32> = 1..=1024;
/// The range of `max_sge`.
pub const SGL_DESCRIPTORS: RangeInclusive<u8> = 1..=64;
/// The smallest `max_mr_size`, in bytes.
pub const MIN_MR_SIZE: u64 = GRAIN as u64;

/// Declares [`RdmaSettings`] and [`RdmaConfig`] from one list. An entry has the words, the name,
/// the type and the default of a setting. Attributes of its field in the file follow.
macro_rules! settings {
    ($(
        $(#[doc = $words:literal])+
        $name:ident: $type:ty = $default:expr
        $(, $attribute:meta)*;
    )+) => {
        /// `[rdma]` of the configuration file: the RDMA transport, for all of its listeners. Values
        /// above a device's limits are reduced to them.
        #[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct RdmaSettings {
            /// The RDMA device, its port and the GID index of listeners that name none. `None`:
            /// derived from the listener's address.
            pub device: Option<String>,
            pub port: Option<u8>,
            pub gid_index: Option<u16>,
            /// False: soft-RoCE and soft-iWARP are never used.
            pub allow_software: bool,
            /// Interfaces that get a soft-RoCE device at start, unless they have a device.
            pub rxe: Vec<String>,
            $($(#[doc = $words])+ $(#[$attribute])* pub $name: $type,)+
        }

        impl Default for RdmaSettings {
            fn default() -> Self {
                Self {
                    device: None,
                    port: None,
                    gid_index: None,
                    allow_software: true,
                    rxe: Vec::new(),
                    $($name: $default,)+
                }
            }
        }

        impl RdmaSettings {
            /// The configuration of the transport. Queue depth and transfer size come from the
            /// target, and the sizes of single listeners from their options.
            pub fn transport(&self) -> RdmaConfig {
                RdmaConfig {
                    device: self.device.clone(),
                    $($name: self.$name,)+
                    ..RdmaConfig::default()
                }
            }
        }

        /// The configuration of the RDMA transport: its settings, and values of the target.
        #[derive(Debug, Clone, PartialEq, Eq)]
        pub struct RdmaConfig {
            $($(#[doc = $words])+ pub $name: $type,)+
            /// The only device to listen on; `None`: the device that has the address.
            pub device: Option<String>,
            /// Largest in-capsule data of listeners with a size of their own. Receive buffers,
            /// which all listeners share, have room for it. A value below `in_capsule_data_size`
            /// counts as `in_capsule_data_size`.
            pub listener_in_capsule_data_size: u32,
            /// Largest transfer of one command (MDTS), in bytes: a power of two in [`IO_SIZES`].
            pub max_io_size: u32,
            /// Most commands of one queue pair, within `QUEUE_DEPTHS` of `nacre_nvmf::transport`.
            pub max_queue_depth: u16,
            pub max_listeners: usize,
            /// Time for the queue pair of an ending connection to flush. Afterwards the transport
            /// destroys the queue pair.
            pub drain_timeout: Duration,
        }

        impl Default for RdmaConfig {
            fn default() -> Self {
                Self {
                    $($name: $default,)+
                    device: None,
                    listener_in_capsule_data_size: 0,
                    max_io_size: 128 << 10,
                    max_queue_depth: 128,
                    max_listeners: 256,
                    drain_timeout: Duration::from_secs(2),
                }
            }
        }
    };
}

settings! {
    /// Most queue pairs of the whole transport, 1 or more. Each core reserves memory for the
    /// responses of this many.
    max_qpairs: u32 = 1024;
    /// Largest in-capsule data of a command, in bytes: a multiple of 16, at most 1 MiB.
    in_capsule_data_size: u32 = 4096,
        serde(deserialize_with = "read::bytes");
    /// Receive buffers per core and device, shared by its queue pairs: at most 262,144. 0: separate
    /// buffers per queue pair.
    srq_size: u32 = 2048;
    /// Initial completion queue entries per core and device, 1 or more.
    cq_size: u32 = 4096;
    /// Maximum number of data descriptors per command (MSDBD), 1 to 64.
    max_sge: u8 = 16;
    /// Messages of up to this number of bytes are sent inline; a response has 16.
    max_inline_data: u32 = 64,
        serde(deserialize_with = "read::bytes");
    /// Most outstanding RDMA READs per queue pair, 1 or more.
    read_depth: u8 = 16;
    /// Maximum bytes per memory region. A longer arena is registered in pieces of the largest power
    /// of two within both this and the device's own limit.
    max_mr_size: u64 = REGION_MAX as u64,
        serde(deserialize_with = "read::bytes");
    /// Maximum completions per poll, 1 to 1024.
    poll_batch: u32 = 64;
    /// Backlog of each listener: pending connection requests, 1 or more.
    backlog: u16 = 128;
    /// Time limit from the connection to its successful Connect command.
    connect_timeout_ms: u64 = 20_000,
        serde(deserialize_with = "read::millis");
    /// Type of Service byte (DSCP << 2) of sent packets; 0: the system's default.
    tos: u8 = 0;
    /// Local ACK timeout, 4.096 us * 2^n; none: the connection manager's value.
    ack_timeout: Option<u8> = None;
}

impl RdmaSettings {
    /// The keys that are out of range or contradict each other, each with the reason.
    pub fn problems(&self) -> Vec<(&'static str, String)> {
        let mut problems = Vec::new();
        for ConfigError::OutOfRange {
            option,
            actual,
            allowed,
        } in self.transport().problems()
        {
            problems.push((option, format!("{actual} is not {allowed}")));
        }
        if !self.allow_software && !self.rxe.is_empty() {
            let why = "soft-RoCE devices that allow_software = false keeps from being used";
            problems.push(("rxe", why.to_owned()));
        }
        problems
    }
}

impl RdmaConfig {
    /// The first of [`RdmaConfig::problems`].
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.problems().into_iter().next().map_or(Ok(()), Err)
    }

    /// The options that are out of range.
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
        check(self.max_qpairs > 0, "max_qpairs", 0, at_least_1());
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
            self.poll_batch.into(),
            words(&POLL_BATCHES),
        );
        let descriptors = self.max_sge;
        check(
            SGL_DESCRIPTORS.contains(&descriptors),
            "max_sge",
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

    /// The capabilities of a listener with `in_capsule` bytes of in-capsule data.
    pub(crate) fn caps(&self, in_capsule: u32) -> TransportCaps {
        // More descriptors than fit into a capsule cannot arrive; one is in the command itself.
        let fit = (in_capsule / 16).max(1);
        TransportCaps {
            kind: TransportType::Rdma,
            in_capsule_bytes: in_capsule,
            admin_in_capsule_bytes: self.in_capsule_data_size,
            max_transfer_bytes: self.max_io_size,
            max_sgl_descriptors: fit.min(self.max_sge.into()) as u8,
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
