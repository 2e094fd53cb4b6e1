//! `[rdma]`: the RDMA transport, for all of its listeners.

use std::time::Duration;

use nacre_rdma::RdmaConfig;
use serde::{Deserialize, Serialize};

use crate::values::read;

/// What a device cannot do is clamped to what it can.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Rdma {
    /// For listeners that do not say it themselves. None, these three: what belongs to the address.
    pub device: Option<String>,
    pub port: Option<u8>,
    pub gid_index: Option<u16>,
    /// False: soft-RoCE and soft-iWARP are never used.
    pub allow_software: bool,
    /// Interfaces that get a soft-RoCE device at start, unless they have a device.
    pub rxe: Vec<String>,
    /// Queue pairs of the whole transport; each core takes memory for as many.
    pub max_qpairs: u32,
    /// Bytes that a write may carry in its command capsule, a multiple of 16.
    #[serde(deserialize_with = "read::bytes")]
    pub in_capsule_data_size: u32,
    /// Receive buffers per core and device, shared by its queue pairs; 0: each has its own.
    pub srq_size: u32,
    /// Completions per core and device to begin with.
    pub cq_size: u32,
    /// Descriptors of one command (MSDBD).
    pub max_sge: u8,
    /// Bytes that are sent inline; a response has 16.
    #[serde(deserialize_with = "read::bytes")]
    pub max_inline_data: u32,
    /// RDMA READs that one queue pair has outstanding.
    pub read_depth: u8,
    /// Bytes that one memory region covers at most.
    #[serde(deserialize_with = "read::bytes")]
    pub max_mr_size: u64,
    /// Completions taken in one poll.
    pub poll_batch: u32,
    /// Connection requests that wait to be looked at.
    pub backlog: u16,
    /// From a connection to its accepted Connect command.
    #[serde(deserialize_with = "read::millis")]
    pub connect_timeout_ms: u64,
    /// DSCP << 2.
    pub tos: u8,
    /// Local ACK timeout, 4.096 us * 2^n; none: the connection manager's.
    pub ack_timeout: Option<u8>,
}

impl Default for Rdma {
    fn default() -> Rdma {
        let own = RdmaConfig::default();
        Rdma {
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
    /// As the transport takes it; the queue depth and the transfer size are the target's, and what listeners want
    /// of their own is in [`super::Settings::rdma_transport`].
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

    /// Keys that cannot be as they are, and why.
    pub fn problems(&self) -> Vec<(&'static str, String)> {
        let mut problems = Vec::new();
        for nacre_rdma::ConfigError::OutOfRange {
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
