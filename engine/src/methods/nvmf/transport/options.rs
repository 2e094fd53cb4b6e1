//! The options of a transport: those that a call sets, and in full those of each transport, as
//! listed and as in its journal record.

use std::time::Duration;

use nacre_nvmf::subsystems::{QueueLimits, TargetConfig};
use nacre_nvmf::transport::{QUEUE_DEPTHS, TransportType};
use nacre_transport_rdma::RdmaConfig;
use nacre_transport_tcp::TcpConfig;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::config::Personality;
use crate::plane::Plane;
use crate::rpc::RpcError;
use crate::rpc::error::Errno;
use crate::services::Engine;
use crate::values::flatten::present;

/// Options of a transport in SPDK's order; `None`: the default.
///
/// The only declaration of these options: the parameters of the method that creates a transport,
/// the listed ones and the journal record have these names and descriptions.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct TransportOptions {
    /// Entries of an I/O queue, 2 to 4096.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_queue_depth: Option<u16>,
    /// I/O queues of one controller.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_io_qpairs_per_ctrlr: Option<u16>,
    /// Bytes of in-capsule data that a host may send per command.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub in_capsule_data_size: Option<u32>,
    /// Size of the largest transfer in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_io_size: Option<u32>,
    /// Entries of an admin queue, 32 to 4096.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_aq_depth: Option<u32>,
    /// Accepted: buffers are per reactor, see iobuf_set_options. Default: those of a reactor.
    #[serde(
        skip_serializing_if = "Option::is_none",
        deserialize_with = "requested_size"
    )]
    pub iobuf_small_cache_size: Option<u32>,
    /// Accepted, as iobuf_small_cache_size.
    #[serde(
        skip_serializing_if = "Option::is_none",
        deserialize_with = "requested_size"
    )]
    pub iobuf_large_cache_size: Option<u32>,
    /// Must be false: devices have no protection information here.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dif_insert_or_strip: Option<bool>,
    /// Accepted: data is never copied if the device can use the buffer as is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub zcopy: Option<bool>,
    /// Accepted: used whenever the host allows it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub c2h_success: Option<bool>,
    /// Must be 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sock_priority: Option<u32>,
    /// RDMA: receive buffers per reactor and device, shared by its queue pairs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_srq_depth: Option<u32>,
    /// RDMA: each queue pair has its own receive buffers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub no_srq: Option<bool>,
    /// RDMA: initial number of completion queue entries per reactor and device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub num_cqe: Option<u32>,
    /// RDMA: maximum number of pending connection requests.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub acceptor_backlog: Option<i32>,
    /// RDMA: must be false: work requests are posted in batches.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub no_wr_batching: Option<bool>,
    /// Accepted: an Abort completes at once, whatever the state of the command.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub abort_timeout_sec: Option<u32>,
    /// TCP: milliseconds until a connection without acknowledgements is closed; 0: 30 seconds.
    /// RDMA: local ACK timeout as an exponent (4.096 us * 2^n), at most 31; 0: the connection
    /// manager's value.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ack_timeout: Option<u32>,
    /// Accepted: work requests come from per-queue-pair rings.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data_wr_pool_size: Option<u32>,
    /// Accepted: commands are never passed through.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disable_command_passthru: Option<bool>,
    /// Keep-alive granularity in units of 100 ms.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kas: Option<u16>,
    /// Shortest keep-alive timeout in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_kato: Option<u32>,
}

/// SPDK's value for a size that the call left out.
const UNSET_SIZE: u32 = u32::MAX;

fn requested_size<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Option<u32>, D::Error> {
    let size = Option::<u32>::deserialize(from)?;
    Ok(size.filter(|size| *size != UNSET_SIZE))
}

impl TransportOptions {
    /// Allowed range of each number.
    const RANGES: &[(&str, u64, u64)] = &[
        (
            "max_queue_depth",
            *QUEUE_DEPTHS.start() as u64,
            *QUEUE_DEPTHS.end() as u64,
        ),
        (
            "max_io_qpairs_per_ctrlr",
            *TargetConfig::IO_QUEUES.start() as u64,
            *TargetConfig::IO_QUEUES.end() as u64,
        ),
        // Base figure 294: hosts rely on 32 entries.
        ("max_aq_depth", 32, 4096),
        ("kas", 1, u16::MAX as u64),
        ("min_kato", 0, 24 * 60 * 60 * 1000),
    ];

    /// Options that must be false or 0, with the reason.
    const REFUSED: &[(&str, &str)] = &[
        (
            "dif_insert_or_strip",
            "devices here have no protection information",
        ),
        ("sock_priority", "sockets have the kernel's priority"),
        ("no_wr_batching", "work requests are posted in batches"),
    ];

    /// Every option of the transport type, unless its size is that of a reactor's buffers. The
    /// values are those of Nacre's configuration, or SPDK's where it has none.
    pub(super) fn defaults(engine: &Engine, plane: &Plane, kind: TransportType) -> Self {
        let (nvmf, limits) = (&engine.settings.nvmf, plane.target.config.queue_limits);
        let rdma = &engine.settings.rdma;
        let common = Self {
            max_queue_depth: Some(nvmf.max_queue_depth),
            max_io_qpairs_per_ctrlr: Some(nvmf.max_io_qpairs_per_ctrlr),
            in_capsule_data_size: Some(nvmf.in_capsule_data_size),
            max_io_size: Some(nvmf.max_io_size),
            max_aq_depth: Some(limits.max_admin_entries.into()),
            dif_insert_or_strip: Some(false),
            zcopy: Some(false),
            abort_timeout_sec: Some(1),
            ack_timeout: Some(0),
            data_wr_pool_size: Some(0),
            disable_command_passthru: Some(false),
            kas: Some(limits.keep_alive_granularity),
            min_kato: Some(limits.min_keep_alive_ms),
            ..Self::default()
        };
        let own = match kind {
            TransportType::Rdma => Self {
                in_capsule_data_size: Some(rdma.in_capsule_data_size),
                max_srq_depth: Some(rdma.srq_size),
                no_srq: Some(rdma.srq_size == 0),
                num_cqe: Some(rdma.cq_size),
                acceptor_backlog: Some(rdma.backlog.into()),
                no_wr_batching: Some(false),
                ack_timeout: Some(rdma.ack_timeout.unwrap_or(0).into()),
                ..common
            },
            _ => Self {
                c2h_success: Some(true),
                sock_priority: Some(0),
                ..common
            },
        };
        match engine.personality {
            Personality::Nacre => own,
            Personality::NvmfTgt => Self {
                max_queue_depth: Some(128),
                max_io_qpairs_per_ctrlr: Some(127),
                in_capsule_data_size: Some(4096),
                max_io_size: Some(128 << 10),
                max_aq_depth: Some(128),
                kas: Some(100),
                min_kato: Some(10_000),
                ..own
            },
        }
    }

    /// These options, and the defaults for the others. Options of other transport types, which the
    /// defaults lack, are left out.
    pub(super) fn or(self, defaults: &Self) -> Self {
        let (given, mut all) = (present(&self), present(defaults));
        for (name, value) in &mut all {
            if let Some(given) = given.get(name) {
                value.clone_from(given);
            }
        }
        let all = serde_json::from_value(Value::Object(all));
        Self {
            iobuf_small_cache_size: self.iobuf_small_cache_size,
            iobuf_large_cache_size: self.iobuf_large_cache_size,
            ..all.expect("each value was read before")
        }
    }

    /// Refuses values that cannot be enforced: hosts see these limits.
    pub(super) fn check(&self, engine: &Engine) -> Result<(), RpcError> {
        let given = json!(self);
        let number = |field: &str| given[field].as_u64();
        for (field, least, most) in Self::RANGES {
            let out_of_range = |value: &u64| !(*least..=*most).contains(value);
            if let Some(value) = number(field).filter(out_of_range) {
                let cause = format!("{value} is not in {least}..={most}");
                return Err(RpcError::invalid_params(cause).field(*field));
            }
        }
        let buffer = engine.settings.nvmf.max_io_size;
        for field in ["max_io_size", "in_capsule_data_size"] {
            if let Some(value) = number(field).filter(|value| *value > buffer.into()) {
                return Err(RpcError::invalid_params(format!(
                    "{value} bytes do not fit the largest buffer, {buffer} bytes"
                ))
                .field(field)
                .remedy("raise nvmf.max_io_size in the configuration"));
            }
        }
        for (field, why) in Self::REFUSED {
            if given[field] == true || number(field).is_some_and(|value| value != 0) {
                return Err(RpcError::errno(Errno::ENOTSUP, *why)
                    .field(*field)
                    .remedy("leave it out"));
            }
        }
        Ok(())
    }

    pub(super) fn tcp(&self, engine: &Engine) -> TcpConfig {
        let (nvmf, sock) = (&engine.settings.nvmf, &engine.options.borrow().sock);
        let (defaults, pending) = (TcpConfig::default(), nvmf.max_pending_connections as usize);
        let buffer = |bytes: u32| (bytes > 0).then_some(bytes as usize);
        let in_capsule = self.in_capsule_data_size;
        let ack_timeout = self.ack_timeout.filter(|ms| *ms > 0);
        let ack_timeout = ack_timeout.map(|ms| Duration::from_millis(ms.into()));
        TcpConfig {
            send_buffer: buffer(sock.send_buf_size),
            receive_buffer: buffer(sock.recv_buf_size),
            in_capsule_data_size: in_capsule.unwrap_or(defaults.in_capsule_data_size),
            max_io_size: self.max_io_size.unwrap_or(defaults.max_io_size),
            // The target counts established connections itself and reports the limit to the host.
            max_connections: (nvmf.max_connections as usize).saturating_add(pending),
            max_pending_connections: pending,
            tls_key_updates: nvmf.tls_key_updates,
            tos: engine.settings.qos.storage.tos().unwrap_or(0),
            priority: engine.settings.qos.storage.prio,
            reserved_descriptors: crate::descriptors::reserved(&engine.settings),
            ack_timeout: ack_timeout.unwrap_or(defaults.ack_timeout),
            ..defaults
        }
    }

    pub(super) fn rdma(&self, engine: &Engine) -> RdmaConfig {
        let declared = engine.settings.rdma_transport();
        let in_capsule = self.in_capsule_data_size;
        let srq_size = self.max_srq_depth.unwrap_or(declared.srq_size);
        let backlog = self.acceptor_backlog;
        let backlog = backlog.map(|n| n.clamp(0, u16::MAX.into()) as u16);
        RdmaConfig {
            in_capsule_data_size: in_capsule.unwrap_or(declared.in_capsule_data_size),
            max_io_size: self.max_io_size.unwrap_or(declared.max_io_size),
            max_queue_depth: self.max_queue_depth.unwrap_or(declared.max_queue_depth),
            srq_size: if self.no_srq == Some(true) {
                0
            } else {
                srq_size
            },
            cq_size: self.num_cqe.unwrap_or(declared.cq_size),
            backlog: backlog.unwrap_or(declared.backlog),
            // A five-bit exponent; 0 keeps the default.
            ack_timeout: self.ack_timeout.map(|n| n.min(31) as u8).filter(|n| *n > 0),
            ..declared
        }
    }

    /// The limits of the transport's queue pairs; those of the target where there is none.
    pub(super) fn queue_limits(&self, of_target: QueueLimits) -> QueueLimits {
        let admin_entries = self.max_aq_depth.map(|entries| entries as u16);
        QueueLimits {
            max_io_entries: self.max_queue_depth.unwrap_or(of_target.max_io_entries),
            max_admin_entries: admin_entries.unwrap_or(of_target.max_admin_entries),
            max_io_queues: self
                .max_io_qpairs_per_ctrlr
                .unwrap_or(of_target.max_io_queues),
            keep_alive_granularity: self.kas.unwrap_or(of_target.keep_alive_granularity),
            min_keep_alive_ms: self.min_kato.unwrap_or(of_target.min_keep_alive_ms),
        }
    }
}
