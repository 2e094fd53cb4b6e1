//! `nvmf_create_transport`, `nvmf_get_transports`. The journal record of a transport holds its
//! options in the form in which SPDK lists them.

mod options;

use std::rc::Rc;
use std::sync::Arc;

use nacre_nvmf::subsystems::{TargetError, TargetPsks};
use nacre_nvmf::transport::{Plug, TransportType};
use nacre_transport_rdma::{RdmaConfig, RdmaPlug};
use nacre_transport_tcp::{ConfigError, TcpConfig, TcpPlug};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tracing::warn;

use super::{PATIENCE, check_target, key, refusal, wait_until};
use crate::plane::Plane;
use crate::refusal::{OrRefuse, Refusal};
use crate::rpc::error::Errno;
use crate::rpc::{Class, Method, Order, Registry, RpcError};
use crate::services::Engine;
use crate::services::rdma::Rdma;
use crate::store::Change;
use crate::values::flattened;

pub use options::TransportOptions;

pub(super) fn register(registry: &mut Registry<Engine>) {
    registry.add::<CreateTransport>().add::<GetTransports>();
}

pub struct CreateTransport;

/// As in SPDK, unknown members are accepted: each transport picks its own.
#[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(remote = "Self")]
#[schemars(!remote)]
pub struct CreateTransportParams {
    /// `TCP` or `RDMA`, in any case.
    pub trtype: String,
    /// The NVMe-oF target: `nvmf_tgt`, the only one. Default: that one.
    pub tgt_name: Option<String>,
    #[serde(skip)]
    #[schemars(!skip, flatten)]
    pub options: TransportOptions,
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
    /// Must be empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub masked_oncs: Vec<String>,
    /// Must be empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub masked_fuses: Vec<String>,
}

flattened!(CreateTransportParams, options);

/// A transport as listed and as in its journal record.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Transport {
    trtype: String,
    /// Without sizes of buffers that the call did not set, in the record.
    #[serde(flatten)]
    options: TransportOptions,
}

/// Creates the transport if there is none of its type: Nacre does not require a separate call.
pub(super) async fn ensure(
    engine: &Rc<Engine>,
    plane: &Plane,
    kind: TransportType,
) -> Result<(), RpcError> {
    match plane.target.plug(kind) {
        Ok(_) => Ok(()),
        Err(_) => {
            let options = TransportOptions::defaults(engine, plane, kind);
            create(engine, plane, kind, options).await
        }
    }
}

/// A transport that was not added to the target yet.
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
    options: TransportOptions,
) -> Result<(), RpcError> {
    options.check(engine)?;
    let (rdma, tcp) = (options.rdma(engine), options.tcp(engine));
    let limits = options.queue_limits(plane.target.config.queue_limits);
    let transport = Transport {
        trtype: kind.to_string(),
        options,
    };
    if plane.target.plug(kind).is_ok() {
        return accept_existing(engine, kind, &transport);
    }
    let made = match kind {
        TransportType::Rdma => Made::Rdma(rdma_plug(engine, plane, rdma).await?),
        _ => Made::Tcp(tcp_plug(plane, tcp)?),
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
    plane.target.set_queue_limits(kind, limits);
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
        let defaults = TransportOptions::defaults(&engine, &plane, kind);
        create(&engine, &plane, kind, params.options.or(&defaults)).await?;
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
            let mut made: Transport = serde_json::from_value(entry.record.params).ok()?;
            made.options.iobuf_small_cache_size.get_or_insert(small);
            made.options.iobuf_large_cache_size.get_or_insert(large);
            Some(made)
        };
        Ok(kinds.into_iter().filter_map(made_with).collect())
    }
}
