//! Turns attach parameters and the machine's state into a controller that can be connected.

use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nacre_nvmf::address::{Fallback, Select, TransportChoice, adrfam};
use nacre_nvmf::auth::{KeyError, KeySource, Offer};
use nacre_nvmf::host::{Connector, GeneratedPsk};
use nacre_nvmf::host::{ControllerId, HostAuth, HostOptions, PathOptions};
use nacre_nvmf::tls::{Derivation, PskKey};
use nacre_nvmf::transport::TransportType;
use nacre_nvmf_remote::Config;
use nacre_nvmf_wire::Nqn;
use nacre_nvmf_wire::tcp::Digests;
use nacre_reactor::Helper;
use nacre_transport_connect::{Concatenated, HostTls, PathConnector, Source, TcpConnector};
use nacre_transport_rdma_link::qos::Class;
use nacre_transport_tcp::Marking;

use crate::config::replication::Replication;
use crate::doctor::{System, check_rdma_route, select};
use crate::rpc::RpcError;
use crate::services::Engine;
use crate::services::keyring::RemoteKeys;
use crate::services::rdma::{Rdma, Verbs};
use crate::values::address::{self, AddressError, is_link_local};
use crate::values::host_identity::{Identity, IdentityError, Names};

/// Minimum number of entries of a queue pair.
pub(super) const ENTRIES: u16 = 32;

/// Validated attach parameters, with global options filled in. [`HostOptions`] repeats nine fields
/// because nvmf serves other hosts too, such as tools: `options` computes them from these, from
/// this host's identity and from `[replication]`.
#[derive(Debug, Clone)]
pub struct WantedController {
    pub name: String,
    pub transport: TransportChoice,
    /// `None`: no fallback with `RDMA`; decided by `[replication]` with `AUTO`.
    pub fallback: Option<Fallback>,
    /// The address or host name, in the spelling of [`address::canonical_host`].
    pub host: String,
    /// The resolved address.
    pub address: SocketAddr,
    pub subnqn: Nqn,
    pub controller: ControllerId,
    pub hostnqn: Option<Nqn>,
    pub hostaddr: Option<IpAddr>,
    pub digests: Digests,
    pub select: Select,
    pub max_devices: usize,
    pub io_queues: u16,
    pub queue_entries: u16,
    pub connect_timeout: Duration,
    pub io_timeout: Duration,
    pub admin_timeout: Duration,
    pub keep_alive: Duration,
    pub timeouts: Timeouts,
    pub failback: bool,
    pub tos: u8,
    pub disable_sq_flow_control: bool,
    pub authentication: Authentication,
    pub tls: RemoteTls,
}

/// The TLS of a controller's connections.
#[derive(Debug, Clone, Default)]
pub enum RemoteTls {
    #[default]
    Off,
    /// With this key.
    Psk(Arc<dyn PskKey>),
    /// Authentication makes the key (secure channel concatenation).
    Concatenated,
}

/// When to give a controller up, how often to reconnect, and how long I/O waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timeouts {
    /// `None`: no limit.
    pub loss: Option<Duration>,
    /// `None`: grows with each failure.
    pub reconnect: Option<Duration>,
    pub fast_fail: Option<Duration>,
}

/// How this host authenticates itself, if it has keys.
#[derive(Debug, Clone)]
pub struct Authentication {
    pub keys: Arc<RemoteKeys>,
    pub offer: Offer,
    pub helper: Arc<Helper>,
}

impl From<&Authentication> for HostAuth {
    fn from(from: &Authentication) -> Self {
        Self {
            keys: Arc::clone(&from.keys) as Arc<dyn KeySource>,
            offer: from.offer.clone(),
            helper: Arc::clone(&from.helper),
        }
    }
}

/// Everything needed to connect.
pub struct RemotePlan {
    pub config: Config,
    pub connector: Arc<dyn Connector>,
    pub source: Source,
    pub wanted: WantedController,
}

/// Why the controller cannot be connected from this machine.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    #[error(transparent)]
    Resolve(#[from] AddressError),
    #[error(
        "connections are to begin at {selectors}, and no interface that this selects has an {family} address"
    )]
    NoSource {
        selectors: String,
        family: &'static str,
    },
    #[error("no RDMA on this machine: {0}; use TCP, or allow it as the fallback")]
    Rdma(String),
    #[error("digests are of TCP: over RDMA the network has checksums of its own")]
    Digests,
    #[error("TLS: {0}")]
    Psk(#[from] KeyError),
    #[error(transparent)]
    Identity(#[from] IdentityError),
}

/// Parameters of an attachment.
const NAMES: Names = Names {
    nqn: "hostnqn",
    id: "hostid",
};

/// The machine's state.
struct MachineFacts {
    identity: Identity,
    source: Option<IpAddr>,
    /// Why the route to the target has no RDMA.
    no_way: Option<String>,
    verbs: Option<Result<Arc<dyn nacre_transport_rdma_verbs::Provider>, String>>,
}

/// Resolves `host`; queries the network for a name.
pub fn resolve(host: &str, port: u16) -> Result<SocketAddr, PlanError> {
    Ok(address::resolve(host, port)?)
}

/// The address of a selected interface, in the address family of `target`.
pub(super) fn source(selectors: &[String], target: IpAddr) -> Result<Option<IpAddr>, PlanError> {
    if selectors.is_empty() {
        return Ok(None);
    }
    let system = System::real();
    let found = selectors
        .iter()
        .flat_map(|selector| select(&system, selector));
    let mut fitting = found
        .map(|selected| selected.ip)
        .filter(|ip| ip.is_ipv4() == target.is_ipv4())
        .filter(|ip| is_link_local(*ip) == is_link_local(target));
    match fitting.next() {
        Some(ip) => Ok(Some(ip)),
        None => Err(PlanError::NoSource {
            selectors: selectors.join(", "),
            family: adrfam(target),
        }),
    }
}

/// Reads the machine's state. Blocks: reads files, and may load libraries.
fn read_machine(
    wanted: &WantedController,
    replication: &Replication,
    verbs: &Verbs,
) -> Result<MachineFacts, PlanError> {
    let hostnqn = wanted.hostnqn.as_ref().map(Nqn::to_string);
    let identity = Identity::find(NAMES, hostnqn.as_deref(), None)?;
    let target = wanted.address.ip();
    let source = match wanted.hostaddr {
        Some(address) => Some(address),
        None => source(&replication.iface, target)?,
    };
    let auto = wanted.transport == TransportChoice::Auto;
    let by_rdma = match wanted.transport {
        TransportChoice::Tcp => false,
        TransportChoice::Rdma => true,
        TransportChoice::Auto => replication.transport != TransportChoice::Tcp,
    };
    let no_way = (by_rdma && auto && replication.transport == TransportChoice::Auto)
        .then(|| check_rdma_route(&System::real(), target).err())
        .flatten();
    let open = || {
        verbs
            .open()
            .map_err(|absence| absence.into_error().to_string())
    };
    Ok(MachineFacts {
        identity,
        source,
        no_way,
        verbs: by_rdma.then(open),
    })
}

impl RemotePlan {
    pub async fn of(wanted: WantedController, engine: &Rc<Engine>) -> Result<Self, RpcError> {
        let replication = engine.settings.replication.clone();
        let class = engine.settings.qos.replication;
        let (verbs, theirs) = (engine.rdma.verbs.clone(), wanted.clone());
        let (patience, looked) = (Duration::from_secs(5), {
            let replication = replication.clone();
            tokio::task::spawn_blocking(move || read_machine(&theirs, &replication, &verbs))
        });
        let late = |_| {
            RpcError::internal(format!(
                "looking at this machine took longer than {patience:?}"
            ))
        };
        let looked = tokio::time::timeout(patience, looked).await.map_err(late)?;
        let mut machine = looked.map_err(|e| RpcError::internal(e.to_string()))??;
        // Each daemon is a separate host to its targets, regardless of its NQN: a reservation then
        // excludes other daemons, even on this machine.
        let holder = engine.volumes.holder();
        let host_id = engine.cluster.host_id(&wanted.subnqn);
        let host_id = host_id.unwrap_or(holder);
        if !host_id.is_nil() {
            machine.identity.id = host_id.into_bytes();
        }
        let plane = engine.plane()?;
        let rdma = match machine.verbs {
            None => None,
            Some(Ok(provider)) => {
                let rdma = engine.remotes.rdma(provider, &plane, &replication);
                let theirs = Arc::clone(&rdma);
                let prepared = tokio::task::spawn_blocking(move || theirs.prepare());
                let _ = tokio::time::timeout(patience, prepared).await;
                // Releases the device when it is removed.
                Rdma::watch_for_removal(engine);
                Some(Ok(rdma))
            }
            Some(Err(why)) => Some(Err(why)),
        };
        Ok(Self::made(
            wanted,
            &replication,
            class,
            machine.identity,
            machine.source,
            machine.no_way,
            rdma,
        )?)
    }

    fn made(
        wanted: WantedController,
        replication: &Replication,
        class: Class,
        identity: Identity,
        source: Option<IpAddr>,
        no_way: Option<String>,
        rdma: Option<Result<Arc<nacre_transport_connect::Rdma>, String>>,
    ) -> Result<Self, PlanError> {
        let from = Source::default();
        from.set(source);
        // The controller's own marking wins over the class's.
        let marking = match wanted.tos {
            0 => Marking {
                tos: class.tos().unwrap_or(0),
                priority: class.prio,
            },
            tos => Marking {
                tos,
                priority: None,
            },
        };
        let generated = match wanted.tls {
            RemoteTls::Concatenated => Some(Arc::<GeneratedPsk>::default()),
            RemoteTls::Off | RemoteTls::Psk(_) => None,
        };
        let concatenated = generated.clone().map(|psk| Concatenated {
            psk,
            host: identity.nqn.clone(),
            subsystem: wanted.subnqn.clone(),
            helper: Some(Arc::clone(&wanted.authentication.helper)),
        });
        let tcp = TcpConnector::new(wanted.address, wanted.digests, wanted.queue_entries)
            .marked(marking)
            .within(wanted.connect_timeout)
            .from(from.clone())
            .secured(tls(&wanted, &identity)?)
            .concatenated(concatenated);
        let fallback = wanted.fallback.unwrap_or(match wanted.transport {
            TransportChoice::Auto => replication.fallback,
            TransportChoice::Tcp | TransportChoice::Rdma => Fallback::None,
        });
        let fallback = fallback == Fallback::Tcp;
        let insists = wanted.transport == TransportChoice::Rdma
            || replication.transport == TransportChoice::Rdma;
        let mut paths = None;
        let connector: Arc<dyn Connector> = match rdma {
            None => Arc::new(tcp),
            Some(Err(why)) if insists && !fallback => return Err(PlanError::Rdma(why)),
            Some(Err(_)) => Arc::new(tcp),
            // RDMA cannot work, and without a fallback there is nothing to return from.
            Some(Ok(_)) if no_way.is_some() && !fallback => Arc::new(tcp),
            Some(Ok(_)) if !fallback && wanted.digests != Digests::NONE => {
                return Err(PlanError::Digests);
            }
            Some(Ok(rdma)) => {
                let other = fallback.then_some(TransportType::Tcp);
                let mut choice = PathOptions::new(TransportType::Rdma, other);
                choice.connection_retries = replication.connection_retries;
                choice.retry_delay = Duration::from_millis(replication.retry_delay_ms);
                choice.reprobe = if wanted.failback {
                    Duration::from_secs(replication.rdma_reprobe_s)
                } else {
                    Duration::ZERO
                };
                choice.reprobe_max = choice.reprobe * 10;
                choice.unusable = no_way;
                paths = Some(choice);
                let by_tcp = fallback.then_some(tcp);
                let connector = PathConnector::new(rdma, wanted.address, by_tcp);
                Arc::new(connector.from(from.clone()).marked(marking.tos))
            }
        };
        let mut options = options(&wanted, identity, paths, replication);
        options.concatenation = generated;
        let config = Config {
            name: wanted.name.clone(),
            address: (wanted.host.clone(), wanted.address.port().to_string()),
            select: wanted.select,
            max_devices: wanted.max_devices,
            transport: TransportType::Tcp,
            options,
        };
        Ok(Self {
            config,
            connector,
            source: from,
            wanted,
        })
    }
}

/// The key of TLS for the connections of this host. Its file is read here, on the thread of
/// management, and not for each queue.
fn tls(wanted: &WantedController, identity: &Identity) -> Result<Option<HostTls>, PlanError> {
    let RemoteTls::Psk(key) = &wanted.tls else {
        return Ok(None);
    };
    let psk = key.psk()?;
    Ok(Some(HostTls {
        identity: psk.offer(&identity.nqn, &wanted.subnqn),
        psk,
        derivation: Derivation::Standard,
        helper: Some(Arc::clone(&wanted.authentication.helper)),
    }))
}

fn options(
    wanted: &WantedController,
    identity: Identity,
    paths: Option<PathOptions>,
    replication: &Replication,
) -> HostOptions {
    let mut options = HostOptions::new(identity.nqn, identity.id, wanted.subnqn.clone());
    options.controller = wanted.controller;
    options.queue_entries = wanted.queue_entries;
    options.io_queues = wanted.io_queues;
    options.keep_alive = wanted.keep_alive;
    options.disable_sq_flow_control = wanted.disable_sq_flow_control;
    options.connect_timeout = match paths {
        // Time for enabling and identifying a connected controller comes on top.
        Some(_) => wanted
            .connect_timeout
            .max(replication.cm_timeout() + Duration::from_secs(5)),
        None => wanted.connect_timeout,
    };
    options.io_timeout = wanted.io_timeout;
    options.admin_timeout = wanted.admin_timeout;
    match wanted.timeouts.reconnect {
        Some(delay) => (options.reconnect_delay, options.reconnect_delay_max) = (delay, delay),
        None => options.reconnect_delay_max = Duration::from_secs(5),
    }
    options.loss_timeout = wanted.timeouts.loss;
    options.fast_io_fail = wanted.timeouts.fast_fail;
    options.wait_for_access = true;
    options.paths = paths;
    options.authentication = Some(HostAuth::from(&wanted.authentication));
    options
}
