//! `[rdma]`: the RDMA transport, for all of its listeners.

use std::time::Duration;

use nacre_transport_rdma::RdmaConfig;
use serde::{Deserialize, Serialize};

use crate::values::read;

/// Settings of the RDMA transport. Values above a device's limits are reduced to them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Rdma {
    /// Defaults of listeners, like the next two. None: derived from the listener's address.
    pub device: Option<String>,
    pub port: Option<u8>,
    pub gid_index: Option<u16>,
    /// False: soft-RoCE and soft-iWARP are never used.
    pub allow_software: bool,
    /// Interfaces that get a soft-RoCE device at start, unless they have a device.
    pub rxe: Vec<String>,
    /// Queue pairs of the whole transport; each core reserves memory for this many.
    pub max_qpairs: u32,
    /// Bytes of in-capsule data per write, a multiple of 16.
    #[serde(deserialize_with = "read::bytes")]
    pub in_capsule_data_size: u32,
    /// Receive buffers per core and device, shared by its queue pairs; 0: separate buffers per
    /// queue pair.
    pub srq_size: u32,
    /// Initial completion queue entries per core and device.
    pub cq_size: u32,
    /// Maximum number of data descriptors per command (MSDBD).
    pub max_sge: u8,
    /// Bytes sent inline; a response has 16.
    #[serde(deserialize_with = "read::bytes")]
    pub max_inline_data: u32,
    /// Outstanding RDMA READs per queue pair.
    pub read_depth: u8,
    /// Maximum bytes per memory region.
    #[serde(deserialize_with = "read::bytes")]
    pub max_mr_size: u64,
    /// Maximum completions per poll.
    pub poll_batch: u32,
    /// Maximum number of pending connection requests.
    pub backlog: u16,
    /// Time limit from the connection to its successful Connect command.
    #[serde(deserialize_with = "read::millis")]
    pub connect_timeout_ms: u64,
    /// DSCP << 2.
    pub tos: u8,
    /// Local ACK timeout, 4.096 us * 2^n; none: the connection manager's value.
    pub ack_timeout: Option<u8>,
}

impl Default for Rdma {
    fn default() -> Self {
        let own = RdmaConfig::default();
        Self {
            device: None,
            port: None,
            gid_index: None,
            allow_software: true,
            rxe: Vec::new(),
            max_qpairs: own.max_connections as u32,
            in_capsule_data_size: own.in_capsule_data_size,
            srq_size: own.srq_size,
            cq_size: own.cq_size,
            max_sge: own.max_sgl_descriptors,
            max_inline_data: own.max_inline_data,
            read_depth: own.read_depth,
            max_mr_size: own.max_mr_size,
            poll_batch: own.poll_batch as u32,
            backlog: own.backlog as u16,
            connect_timeout_ms: own.connect_timeout.as_millis() as u64,
            tos: own.tos,
            ack_timeout: own.ack_timeout,
        }
    }
}

impl Rdma {
    /// The configuration of the transport. Queue depth and transfer size come from the target;
    /// options of listeners are added by [`super::Settings::rdma_transport`].
    pub fn transport(&self) -> RdmaConfig {
        RdmaConfig {
            device: self.device.clone(),
            max_connections: self.max_qpairs as usize,
            in_capsule_data_size: self.in_capsule_data_size,
            srq_size: self.srq_size,
            cq_size: self.cq_size,
            max_sgl_descriptors: self.max_sge,
            max_inline_data: self.max_inline_data,
            read_depth: self.read_depth,
            max_mr_size: self.max_mr_size,
            poll_batch: self.poll_batch as usize,
            backlog: self.backlog.into(),
            connect_timeout: Duration::from_millis(self.connect_timeout_ms),
            tos: self.tos,
            ack_timeout: self.ack_timeout,
            ..RdmaConfig::default()
        }
    }

    /// Keys out of range, with the reason.
    pub fn problems(&self) -> Vec<(&'static str, String)> {
        let mut problems = Vec::new();
        for nacre_transport_rdma::ConfigError::OutOfRange {
            option,
            actual,
            allowed,
        } in self.transport().problems()
        {
            let key = match option {
                "max_connections" => "max_qpairs",
                "max_sgl_descriptors" => "max_sge",
                same => same,
            };
            problems.push((key, format!("{actual} is not {allowed}")));
        }
        if !self.allow_software && !self.rxe.is_empty() {
            let why = "soft-RoCE devices that allow_software = false keeps from being used";
            problems.push(("rxe", why.to_owned()));
        }
        problems
    }
}
