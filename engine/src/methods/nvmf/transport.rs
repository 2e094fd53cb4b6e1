//! `nvmf_create_transport`, `nvmf_get_transports`. The journal record of a transport holds its
//! options in the form in which SPDK lists them.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nacre_nvmf::subsystems::{QueueLimits, TargetConfig, TargetError, TargetPsks};
use nacre_nvmf::transport::{Plug, QUEUE_DEPTHS, TransportType};
use nacre_transport_rdma::{RdmaConfig, RdmaPlug};
use nacre_transport_tcp::{ConfigError, TcpConfig, TcpPlug};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tracing::warn;

use super::{PATIENCE, check_target, key, refusal, wait_until};
use crate::config::Personality;
use crate::plane::Plane;
use crate::refusal::{OrRefuse, Refusal};
use crate::rpc::error::Errno;
use crate::rpc::{Class, Method, Order, Registry, RpcError};
use crate::services::Engine;
use crate::services::rdma::Rdma;
use crate::store::Change;

pub(super) fn register(registry: &mut Registry<Engine>) {
    registry.add::<CreateTransport>().add::<GetTransports>();
}

pub struct CreateTransport;

/// As in SPDK, unknown members are accepted: each transport picks its own.
#[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
pub struct CreateTransportParams {
    /// `TCP` or `RDMA`, in any case.
    pub trtype: String,
    /// The NVMe-oF target: `nvmf_tgt`, the only one. Default: that one.
    pub tgt_name: Option<String>,
    /// Entries of an I/O queue, 2 to 4096.
    pub max_queue_depth: Option<u16>,
    /// I/O queues of one controller.
    pub max_io_qpairs_per_ctrlr: Option<u16>,
    /// Bytes of in-capsule data that a host may send per command.
    pub in_capsule_data_size: Option<u32>,
    /// Size of the largest transfer in bytes.
    pub max_io_size: Option<u32>,
    /// Entries of an admin queue, 32 to 4096.
    pub max_aq_depth: Option<u32>,
    /// Accepted: buffers are per reactor, see iobuf_set_options. Default: those of a reactor.
    pub iobuf_small_cache_size: Option<u32>,
    /// Accepted, as iobuf_small_cache_size.
    pub iobuf_large_cache_size: Option<u32>,
    /// Accepted, like the next two: SPDK no longer uses them.
    pub io_unit_size: Option<u32>,
    /// Accepted: SPDK no longer uses it.
    pub num_shared_buffers: Option<u32>,
    /// Accepted: SPDK no longer uses it.
    pub buf_cache_size: Option<u32>,
    /// Accepted: each connection has one buffer for control messages.
    pub control_msg_num: Option<u32>,
    /// Accepted: the kernel reports new connections.
    pub acceptor_poll_rate: Option<u32>,
    /// Accepted, like the next two: for vfio-user only.
    pub disable_mappable_bar0: Option<bool>,
    /// Accepted: for vfio-user only.
    pub disable_adaptive_irq: Option<bool>,
    /// Accepted: for vfio-user only.
    pub disable_shadow_doorbells: Option<bool>,
    /// Accepted: data is never copied if the device can use the buffer as is.
    pub zcopy: Option<bool>,
    /// Accepted: used whenever the host allows it.
    pub c2h_success: Option<bool>,
    /// Must be false: devices have no protection information here.
    pub dif_insert_or_strip: Option<bool>,
    /// Must be 0.
    pub sock_priority: Option<u32>,
    /// Accepted: an Abort completes at once, whatever the state of the command.
    pub abort_timeout_sec: Option<u32>,
    /// TCP: milliseconds until a connection without acknowledgements is closed; 0: 30 seconds.
    /// RDMA: local ACK timeout as an exponent (4.096 us * 2^n), at most 31; 0: the connection
    /// manager's value.
    pub ack_timeout: Option<u32>,
    /// Accepted: work requests come from per-queue-pair rings.
    pub data_wr_pool_size: Option<u32>,
    /// RDMA: receive buffers per reactor and device, shared by its queue pairs.
    pub max_srq_depth: Option<u32>,
    /// RDMA: each queue pair has its own receive buffers.
    pub no_srq: Option<bool>,
    /// RDMA: initial number of completion queue entries per reactor and device.
    pub num_cqe: Option<u32>,
    /// RDMA: maximum number of pending connection requests.
    pub acceptor_backlog: Option<i32>,
    /// RDMA: must be false: work requests are posted in batches.
    pub no_wr_batching: Option<bool>,
    /// Accepted: commands are never passed through.
    pub disable_command_passthru: Option<bool>,
    /// Keep-alive granularity in units of 100 ms.
    pub kas: Option<u16>,
    /// Shortest keep-alive timeout in milliseconds.
    pub min_kato: Option<u32>,
    /// Must be empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub masked_oncs: Vec<String>,
    /// Must be empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub masked_fuses: Vec<String>,
}

/// A transport as listed, in SPDK's field order.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Transport {
    trtype: String,
    max_queue_depth: u16,
    max_io_qpairs_per_ctrlr: u16,
    in_capsule_data_size: u32,
    max_io_size: u32,
    max_aq_depth: u32,
    /// Buffers of a reactor, unless the call set a size.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "requested_size"
    )]
    iobuf_small_cache_size: Option<u32>,
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "requested_size"
    )]
    iobuf_large_cache_size: Option<u32>,
    dif_insert_or_strip: bool,
    zcopy: bool,
    #[serde(flatten)]
    own: Own,
    abort_timeout_sec: u32,
    ack_timeout: u32,
    data_wr_pool_size: u32,
    disable_command_passthru: bool,
    kas: u16,
    min_kato: u32,
}

/// SPDK's value for a size that the call left out.
const UNSET_SIZE: u32 = u32::MAX;

fn requested_size<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Option<u32>, D::Error> {
    let size = Option::<u32>::deserialize(from)?;
    Ok(size.filter(|size| *size != UNSET_SIZE))
}

/// Fields of one transport type.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
enum Own {
    Tcp {
        c2h_success: bool,
        sock_priority: u32,
    },
    Rdma {
        max_srq_depth: u32,
        no_srq: bool,
        num_cqe: u32,
        acceptor_backlog: i32,
        no_wr_batching: bool,
    },
}

impl Own {
    fn defaults(engine: &Engine, kind: TransportType) -> Self {
        let rdma = &engine.settings.rdma;
        match kind {
            TransportType::Rdma => Self::Rdma {
                max_srq_depth: rdma.srq_size,
                no_srq: rdma.srq_size == 0,
                num_cqe: rdma.cq_size,
                acceptor_backlog: rdma.backlog.into(),
                no_wr_batching: false,
            },
            _ => Self::Tcp {
                c2h_success: true,
                sock_priority: 0,
            },
        }
    }

    fn asked(self, params: &CreateTransportParams) -> Self {
        match self {
            Self::Tcp {
                c2h_success,
                sock_priority,
            } => Self::Tcp {
                c2h_success: params.c2h_success.unwrap_or(c2h_success),
                sock_priority: params.sock_priority.unwrap_or(sock_priority),
            },
            Self::Rdma {
                max_srq_depth,
                no_srq,
                num_cqe,
                acceptor_backlog,
                no_wr_batching,
            } => Self::Rdma {
                max_srq_depth: params.max_srq_depth.unwrap_or(max_srq_depth),
                no_srq: params.no_srq.unwrap_or(no_srq),
                num_cqe: params.num_cqe.unwrap_or(num_cqe),
                acceptor_backlog: params.acceptor_backlog.unwrap_or(acceptor_backlog),
                no_wr_batching: params.no_wr_batching.unwrap_or(no_wr_batching),
            },
        }
    }
}

impl Transport {
    /// Default options: Nacre's configuration values, or SPDK's where there is none.
    fn defaults(engine: &Engine, plane: &Plane, kind: TransportType) -> Self {
        let (nvmf, limits) = (&engine.settings.nvmf, plane.target.config.queue_limits());
        let own = Self {
            trtype: kind.to_string(),
            max_queue_depth: nvmf.max_queue_depth,
            max_io_qpairs_per_ctrlr: nvmf.max_io_qpairs_per_ctrlr,
            in_capsule_data_size: match kind {
                TransportType::Rdma => engine.settings.rdma.in_capsule_data_size,
                _ => nvmf.in_capsule_data_size,
            },
            max_io_size: nvmf.max_io_size,
            max_aq_depth: limits.max_admin_entries.into(),
            iobuf_small_cache_size: None,
            iobuf_large_cache_size: None,
            dif_insert_or_strip: false,
            zcopy: false,
            own: Own::defaults(engine, kind),
            abort_timeout_sec: 1,
            ack_timeout: match kind {
                TransportType::Rdma => engine.settings.rdma.ack_timeout.unwrap_or(0).into(),
                _ => 0,
            },
            data_wr_pool_size: 0,
            disable_command_passthru: false,
            kas: limits.keep_alive_granularity,
            min_kato: limits.min_keep_alive_ms,
        };
        match engine.personality {
            Personality::Nacre => own,
            Personality::NvmfTgt => Self {
                max_queue_depth: 128,
                max_io_qpairs_per_ctrlr: 127,
                in_capsule_data_size: 4096,
                max_io_size: 128 << 10,
                max_aq_depth: 128,
                kas: 100,
                min_kato: 10_000,
                ..own
            },
        }
    }

    fn asked(params: CreateTransportParams, defaults: Self) -> Self {
        let own = defaults.own.asked(&params);
        Self {
            own,
            trtype: defaults.trtype,
            max_queue_depth: params.max_queue_depth.unwrap_or(defaults.max_queue_depth),
            max_io_qpairs_per_ctrlr: params
                .max_io_qpairs_per_ctrlr
                .unwrap_or(defaults.max_io_qpairs_per_ctrlr),
            in_capsule_data_size: params
                .in_capsule_data_size
                .unwrap_or(defaults.in_capsule_data_size),
            max_io_size: params.max_io_size.unwrap_or(defaults.max_io_size),
            max_aq_depth: params.max_aq_depth.unwrap_or(defaults.max_aq_depth),
            iobuf_small_cache_size: params
                .iobuf_small_cache_size
                .filter(|size| *size != UNSET_SIZE),
            iobuf_large_cache_size: params
                .iobuf_large_cache_size
                .filter(|size| *size != UNSET_SIZE),
            dif_insert_or_strip: params
                .dif_insert_or_strip
                .unwrap_or(defaults.dif_insert_or_strip),
            zcopy: params.zcopy.unwrap_or(defaults.zcopy),
            abort_timeout_sec: params
                .abort_timeout_sec
                .unwrap_or(defaults.abort_timeout_sec),
            ack_timeout: params.ack_timeout.unwrap_or(defaults.ack_timeout),
            data_wr_pool_size: params
                .data_wr_pool_size
                .unwrap_or(defaults.data_wr_pool_size),
            disable_command_passthru: params
                .disable_command_passthru
                .unwrap_or(defaults.disable_command_passthru),
            kas: params.kas.unwrap_or(defaults.kas),
            min_kato: params.min_kato.unwrap_or(defaults.min_kato),
        }
    }

    /// Refuses values that cannot be enforced: hosts see these limits.
    fn check(&self, engine: &Engine) -> Result<(), RpcError> {
        let buffer = engine.settings.nvmf.max_io_size;
        let [low, high] = [*QUEUE_DEPTHS.start(), *QUEUE_DEPTHS.end()].map(u32::from);
        for (field, value, least, most) in [
            ("max_queue_depth", self.max_queue_depth.into(), low, high),
            (
                "max_io_qpairs_per_ctrlr",
                self.max_io_qpairs_per_ctrlr.into(),
                (*TargetConfig::IO_QUEUES.start()).into(),
                (*TargetConfig::IO_QUEUES.end()).into(),
            ),
            // Base figure 294: hosts rely on 32 entries.
            ("max_aq_depth", self.max_aq_depth, 32, 4096),
            ("kas", self.kas.into(), 1, u16::MAX.into()),
            ("min_kato", self.min_kato, 0, 24 * 60 * 60 * 1000),
        ] {
            if value < least || value > most {
                let cause = format!("{value} is not in {least}..={most}");
                return Err(RpcError::invalid_params(cause).field(field));
            }
        }
        for (field, value) in [
            ("max_io_size", self.max_io_size),
            ("in_capsule_data_size", self.in_capsule_data_size),
        ] {
            if value > buffer {
                return Err(RpcError::invalid_params(format!(
                    "{value} bytes do not fit the largest buffer, {buffer} bytes"
                ))
                .field(field)
                .remedy("raise nvmf.max_io_size in the configuration"));
            }
        }
        let (priority, single) = match self.own {
            Own::Tcp { sock_priority, .. } => (sock_priority != 0, false),
            Own::Rdma { no_wr_batching, .. } => (false, no_wr_batching),
        };
        for (field, asked, why) in [
            (
                "dif_insert_or_strip",
                self.dif_insert_or_strip,
                "devices here have no protection information",
            ),
            (
                "sock_priority",
                priority,
                "sockets have the kernel's priority",
            ),
            (
                "no_wr_batching",
                single,
                "work requests are posted in batches",
            ),
        ] {
            if asked {
                return Err(RpcError::errno(Errno::ENOTSUP, why)
                    .field(field)
                    .remedy("leave it out"));
            }
        }
        Ok(())
    }

    fn tcp(&self, engine: &Engine) -> TcpConfig {
        let (nvmf, sock) = (&engine.settings.nvmf, engine.options.borrow().sock);
        let (defaults, pending) = (TcpConfig::default(), nvmf.max_pending_connections as usize);
        let buffer = |bytes: u32| (bytes > 0).then_some(bytes as usize);
        TcpConfig {
            send_buffer: buffer(sock.send_buf_size),
            receive_buffer: buffer(sock.recv_buf_size),
            in_capsule_data_size: self.in_capsule_data_size,
            max_io_size: self.max_io_size,
            // The target counts established connections itself and reports the limit to the host.
            max_connections: (nvmf.max_connections as usize).saturating_add(pending),
            max_pending_connections: pending,
            tls_key_updates: nvmf.tls_key_updates,
            tos: engine.settings.qos.storage.tos().unwrap_or(0),
            priority: engine.settings.qos.storage.prio,
            reserved_descriptors: crate::descriptors::reserved(&engine.settings),
            ack_timeout: match self.ack_timeout {
                0 => defaults.ack_timeout,
                ms => Duration::from_millis(ms.into()),
            },
            ..defaults
        }
    }

    fn rdma(&self, engine: &Engine) -> RdmaConfig {
        let declared = engine.settings.rdma_transport();
        let Own::Rdma {
            max_srq_depth,
            no_srq,
            num_cqe,
            acceptor_backlog,
            ..
        } = self.own
        else {
            return declared;
        };
        RdmaConfig {
            in_capsule_data_size: self.in_capsule_data_size,
            max_io_size: self.max_io_size,
            max_queue_depth: self.max_queue_depth,
            srq_size: if no_srq { 0 } else { max_srq_depth },
            cq_size: num_cqe,
            backlog: acceptor_backlog.clamp(0, u16::MAX.into()) as u16,
            // A five-bit exponent; 0 keeps the default.
            ack_timeout: Some(self.ack_timeout.min(31) as u8).filter(|n| *n > 0),
            ..declared
        }
    }

    fn queue_limits(&self) -> QueueLimits {
        QueueLimits {
            max_io_entries: self.max_queue_depth,
            max_admin_entries: self.max_aq_depth as u16,
            max_io_queues: self.max_io_qpairs_per_ctrlr,
            keep_alive_granularity: self.kas,
            min_keep_alive_ms: self.min_kato,
        }
    }
}

/// Creates the transport if none of its type exists: Nacre does not require a separate call.
pub(super) async fn ensure(
    engine: &Rc<Engine>,
    plane: &Plane,
    kind: TransportType,
) -> Result<(), RpcError> {
    match plane.target.plug(kind) {
        Ok(_) => Ok(()),
        Err(_) => {
            create(
                engine,
                plane,
                kind,
                Transport::defaults(engine, plane, kind),
            )
            .await
        }
    }
}

/// A transport not yet added to the target.
enum Made {
    Tcp(Arc<TcpPlug>),
    Rdma(Arc<RdmaPlug>),
}

impl Made {
    fn plug(&self) -> Arc<dyn Plug> {
        match self {
            Self::Tcp(plug) => Arc::clone(plug) as Arc<dyn Plug>,
            Self::Rdma(plug) => Arc::clone(plug) as Arc<dyn Plug>,
        }
    }

    /// Number of reactors that serve it.
    fn open(&self) -> usize {
        match self {
            Self::Tcp(plug) => plug.stats().len(),
            Self::Rdma(plug) => plug.open_cores(),
        }
    }
}

async fn create(
    engine: &Rc<Engine>,
    plane: &Plane,
    kind: TransportType,
    transport: Transport,
) -> Result<(), RpcError> {
    transport.check(engine)?;
    if plane.target.plug(kind).is_ok() {
        return accept_existing(engine, kind, &transport);
    }
    let made = match kind {
        TransportType::Rdma => Made::Rdma(rdma_plug(engine, plane, transport.rdma(engine)).await?),
        _ => Made::Tcp(tcp_plug(plane, transport.tcp(engine))?),
    };
    // Store first, then add: a transport cannot be removed again.
    let params = json!(transport);
    engine
        .journal
        .commit(Change::put(
            key::transport(kind),
            CreateTransport::NAME,
            params,
        ))
        .await?;
    plane
        .target
        .set_queue_limits(kind, transport.queue_limits());
    plane.target.add_plug(made.plug()).or_refuse()?;
    if let Made::Rdma(plug) = &made {
        Rdma::made(engine, Arc::clone(plug));
    }
    // Reactors open the transport asynchronously; an earlier host would be refused.
    let cores = plane.target.cores();
    if !wait_until(PATIENCE, || made.open() >= cores).await {
        warn!(
            open = made.open(),
            cores, "not every reactor serves {kind} yet"
        );
    }
    Ok(())
}

/// Accepts a request for a transport that the configuration file's listeners already created with
/// the same options. This lets a saved configuration load on a daemon with such a file. A transport
/// created by a call is refused as existing, as in SPDK.
fn accept_existing(
    engine: &Engine,
    kind: TransportType,
    asked: &Transport,
) -> Result<(), RpcError> {
    let exists = TargetError::TransportExists { kind }.refusal();
    let made = engine.journal.find(&key::transport(kind));
    let Some(made) = made.filter(|entry| !entry.durable) else {
        return Err(exists);
    };
    let (asked, made) = (json!(asked), made.record.params);
    let differs = |(option, value): (&String, &Value)| {
        let is = &made[option];
        let matters = !option.starts_with("iobuf_");
        (matters && is != value).then(|| format!("{option} is {is}, not {value}"))
    };
    let options = asked.as_object().into_iter().flatten();
    let differences: Vec<String> = options.filter_map(differs).collect();
    if differences.is_empty() {
        Ok(())
    } else {
        Err(exists
            .cause(format!(
                "listeners of the configuration file made it, with other options: {}",
                differences.join(", ")
            ))
            .remedy("have the file say the same, or leave this call out"))
    }
}

fn not_made(kind: TransportType, cause: impl ToString) -> RpcError {
    refusal::failed(
        format!("Transport type '{kind}' create failed"),
        cause.to_string(),
    )
}

fn tcp_plug(plane: &Plane, config: TcpConfig) -> Result<Arc<TcpPlug>, RpcError> {
    config.validate().map_err(|error| {
        let ConfigError::OutOfRange { option, .. } = error;
        RpcError::invalid_params(error.to_string()).field(option)
    })?;
    let made = TcpPlug::with_psks(config, Arc::new(TargetPsks::new(&plane.target)));
    let plug = made.map_err(|error| not_made(TransportType::Tcp, error))?;
    Ok(Arc::new(plug))
}

async fn rdma_plug(
    engine: &Engine,
    plane: &Plane,
    config: RdmaConfig,
) -> Result<Arc<RdmaPlug>, RpcError> {
    const KIND: TransportType = TransportType::Rdma;
    config.validate().map_err(|error| {
        let ConfigError::OutOfRange { option, .. } = error;
        let field = match option {
            "srq_size" => "max_srq_depth",
            "cq_size" => "num_cqe",
            "backlog" => "acceptor_backlog",
            same => same,
        };
        RpcError::invalid_params(error.to_string()).field(field)
    })?;
    let (verbs, arenas, cores) = (
        engine.rdma.verbs.clone(),
        plane.arenas.clone(),
        plane.target.cores(),
    );
    // Loading libraries and locking memory are slow; keep them off the management thread.
    let made = tokio::task::spawn_blocking(move || {
        let provider = verbs.open().map_err(|absence| {
            let error = not_made(KIND, &absence);
            error.remedy(absence.remedy())
        })?;
        let plug = RdmaPlug::new(config, provider, arenas);
        let plug = plug.map_err(|error| not_made(KIND, error))?;
        plug.prepare(cores).map_err(|error| {
            not_made(KIND, error)
                .remedy("raise the limit on locked memory, or lower rdma.max_qpairs, rdma.srq_size and the largest in_capsule_data_size in the configuration")
        })?;
        Ok(Arc::new(plug))
    });
    made.await
        .unwrap_or_else(|error| Err(not_made(KIND, error)))
}

impl Method<Engine> for CreateTransport {
    const NAME: &'static str = "nvmf_create_transport";
    const ABOUT: &'static str = "Makes a transport, for listeners to listen on.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Exclusive;
    type Params = CreateTransportParams;
    type Reply = bool;

    async fn apply(params: CreateTransportParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        check_target(params.tgt_name.as_deref())?;
        let kind = match params.trtype.to_ascii_uppercase().as_str() {
            "TCP" => TransportType::Tcp,
            "RDMA" => TransportType::Rdma,
            _ => return Err(no_such_type(&params.trtype)),
        };
        for (field, masked) in [
            ("masked_oncs", &params.masked_oncs),
            ("masked_fuses", &params.masked_fuses),
        ] {
            if !masked.is_empty() {
                return Err(RpcError::errno(
                    Errno::ENOTSUP,
                    "commands cannot be hidden from hosts",
                )
                .field(field)
                .remedy("leave it out"));
            }
        }
        let plane = engine.plane()?;
        let defaults = Transport::defaults(&engine, &plane, kind);
        create(&engine, &plane, kind, Transport::asked(params, defaults)).await?;
        Ok(true)
    }
}

fn no_such_type(trtype: &str) -> RpcError {
    RpcError::invalid_params_text(format!("Invalid transport type '{trtype}'"))
        .cause("it is not a transport of this program")
        .field("trtype")
        .remedy("use TCP or RDMA")
}

/// Small and large data buffers of the reactor with the fewest.
async fn buffers(engine: &Engine, plane: &Plane) -> (u32, u32) {
    let small = engine.options.borrow().iobuf.small_bufsize.max(16 << 10) as usize;
    let pools = plane.pools().await;
    let fewest = |is_small: bool| {
        let of = |pools: &crate::plane::PoolUse| -> usize {
            let classes = pools.io.iter();
            let fits = classes.filter(|class| (class.size <= small) == is_small);
            fits.map(|class| class.count).sum()
        };
        let fewest = pools.iter().map(of).min().unwrap_or(0);
        u32::try_from(fewest).unwrap_or(u32::MAX - 1)
    };
    (fewest(true), fewest(false))
}

pub struct GetTransports;

#[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GetTransportsParams {
    /// The NVMe-oF target: `nvmf_tgt`, the only one. Default: that one.
    pub tgt_name: Option<String>,
    /// Only this one; all when left out.
    pub trtype: Option<String>,
}

impl Method<Engine> for GetTransports {
    const NAME: &'static str = "nvmf_get_transports";
    const ABOUT: &'static str = "Lists the transports with their options.";
    const CLASS: Class = Class::Read;
    type Params = GetTransportsParams;
    type Reply = Vec<Transport>;

    async fn apply(
        params: GetTransportsParams,
        engine: Rc<Engine>,
    ) -> Result<Vec<Transport>, RpcError> {
        check_target(params.tgt_name.as_deref())?;
        let plane = engine.plane()?;
        let wanted = |kind: &TransportType| match &params.trtype {
            Some(only) => only.eq_ignore_ascii_case(&kind.to_string()),
            None => true,
        };
        let plugs = plane.target.plugs();
        let kinds = plugs.iter().map(|plug| plug.kind());
        let kinds: Vec<_> = kinds.filter(wanted).collect();
        if let (Some(trtype), true) = (&params.trtype, kinds.is_empty()) {
            let cause = format!("there is no {trtype} transport");
            return Err(RpcError::errno(Errno::ENODEV, cause).field("trtype"));
        }
        let (small, large) = buffers(&engine, &plane).await;
        let made_with = |kind| {
            let entry = engine.journal.find(&key::transport(kind))?;
            let made: Transport = serde_json::from_value(entry.record.params).ok()?;
            Some(Transport {
                iobuf_small_cache_size: made.iobuf_small_cache_size.or(Some(small)),
                iobuf_large_cache_size: made.iobuf_large_cache_size.or(Some(large)),
                ..made
            })
        };
        Ok(kinds.into_iter().filter_map(made_with).collect())
    }
}
