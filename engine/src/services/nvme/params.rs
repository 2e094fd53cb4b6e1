//! Checks [`AttachParams`] on this machine: resolves addresses, looks up keys, fills in options.

use std::net::IpAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nacre_nvmf::address::{TransportChoice, adrfam};
use nacre_nvmf::auth::KeySource;
use nacre_nvmf_wire::tcp::Digests;
use nacre_reactor::Helper;

use super::options::{Options, timeouts};
use crate::attach::{AttachParams, Parsed};
use crate::config::replication::LegTls;
use crate::rpc::RpcError;
use crate::rpc::error::Errno;
use crate::services::Engine;
use crate::services::keyring::{self, RemoteKeys};
use crate::services::remotes::{self, Authentication, RemotePath, RemoteTls, WantedController};
use crate::values::address::{canonical_host, canonical_port};

/// Number of I/O queues to request from a controller, unless the call names one.
const IO_QUEUES: u16 = 128;
/// Most bdevs of a controller, unless the call names a number; as in SPDK.
const MAX_DEVICES: u32 = 128;

impl AttachParams {
    /// Validates the parameters without connecting. May query DNS for a host name.
    pub async fn check(&self, engine: &Rc<Engine>) -> Result<WantedController, RpcError> {
        let Parsed {
            transport,
            port,
            subnqn,
            hostnqn,
            hostaddr,
            select,
            controller,
        } = self.parsed()?;
        let host = canonical_host(&self.traddr);
        let name = host.clone();
        let lookup = tokio::task::spawn_blocking(move || remotes::resolve(&name, port));
        let address = tokio::time::timeout(Duration::from_secs(3), lookup).await;
        let late = |_| {
            RpcError::errno(
                Errno::ETIMEDOUT,
                format!("\"{host}\" could not be looked up in time"),
            )
            .field("traddr")
        };
        let address = address
            .map_err(late)?
            .map_err(|e| RpcError::internal(e.to_string()))??;
        let family = adrfam(address.ip());
        if self
            .adrfam
            .as_ref()
            .is_some_and(|given| !given.eq_ignore_ascii_case(family))
        {
            let cause = format!("{} is an {family} address", address.ip());
            return Err(RpcError::errno(Errno::EINVAL, cause).field("adrfam"));
        }
        if let Some(ip) = hostaddr.filter(|ip| ip.is_ipv4() != address.is_ipv4()) {
            let cause = format!("\"{ip}\" is not an {family} address, as the target's is");
            return Err(RpcError::invalid_params(cause).field("hostaddr"));
        }
        let tls = self.tls(engine, transport)?;
        let transport = match engine.settings.replication.tls {
            LegTls::Require => encrypted(transport, &tls)?,
            LegTls::Prefer => transport,
        };
        let io_queues = self.num_io_queues.filter(|n| *n > 0).unwrap_or(IO_QUEUES);
        let max_devices = self.max_bdevs.filter(|n| *n > 0).unwrap_or(MAX_DEVICES);
        let options = Options::of(engine);
        let times = self.times.or(options.times);
        let timeouts = timeouts(times, &engine.settings.replication)?;
        let keep_alive = self.keep_alive_timeout_ms.or(options.keep_alive_timeout_ms);
        let keep_alive = keep_alive.unwrap_or(engine.settings.replication.keep_alive_ms);
        let micros = |given: Option<u64>| given.filter(|us| *us > 0).map(Duration::from_micros);
        let millis = |given: Option<u64>| given.filter(|ms| *ms > 0).map(Duration::from_millis);
        Ok(WantedController {
            name: self.name.clone(),
            transport,
            fallback: self.fallback,
            address,
            subnqn,
            controller,
            hostnqn,
            hostaddr,
            digests: Digests {
                header: self.hdgst.unwrap_or(false),
                data: self.ddgst.unwrap_or(false),
            },
            select,
            max_devices: max_devices as usize,
            io_queues,
            queue_entries: options.queue_entries().unwrap_or(128),
            connect_timeout: micros(self.fabrics_connect_timeout_us)
                .or_else(|| millis(options.tcp_connect_timeout_ms))
                .unwrap_or(Duration::from_secs(5)),
            io_timeout: micros(options.timeout_us).unwrap_or(Duration::from_secs(30)),
            admin_timeout: micros(options.timeout_admin_us).unwrap_or(Duration::from_secs(30)),
            keep_alive: Duration::from_millis(keep_alive.into()),
            timeouts,
            failback: !options.disable_auto_failback.unwrap_or(false),
            tos: options.transport_tos.unwrap_or(0),
            disable_sq_flow_control: self.disable_sq_flow_control.unwrap_or(true),
            authentication: self.authentication(engine, &options)?,
            tls,
            host,
        })
    }

    /// The TLS mode. The first choice is the key of the controller. The second is a key that
    /// authentication generates, if `concat` is set. The third is the key of `[replication]`,
    /// unless the transport is RDMA. With any of these keys, starts the helper thread for
    /// cryptography.
    fn tls(&self, engine: &Engine, transport: TransportChoice) -> Result<RemoteTls, RpcError> {
        let concatenates = self.concat == Some(true);
        let of_legs = engine.settings.replication.psk.as_deref();
        let of_legs = of_legs.filter(|_| transport != TransportChoice::Rdma && !concatenates);
        let name = self.psk.as_deref().or(of_legs);
        let name = name.filter(|name| !name.is_empty());
        let tls = match keyring::host_psk(engine, name)? {
            Some(key) => RemoteTls::Psk(key),
            None if concatenates => RemoteTls::Concatenated,
            None => RemoteTls::Off,
        };
        if !matches!(tls, RemoteTls::Off) {
            let helper = Arc::clone(engine.plane()?.target.authentication.helper());
            start(&helper)?;
            // Later handshakes wait for it. One that fails says why.
            let _ = helper.submit("tls", || drop(nacre_transport_tcp::warm_up_tls()));
        }
        Ok(tls)
    }

    /// The keys of this host and of the target, and the offered hash functions and groups.
    fn authentication(
        &self,
        engine: &Engine,
        options: &Options,
    ) -> Result<Authentication, RpcError> {
        let helper = Arc::clone(engine.plane()?.target.authentication.helper());
        let keys = RemoteKeys::default();
        keys.set(self.keys(engine, &helper)?);
        Ok(Authentication {
            keys: Arc::new(keys),
            offer: options.offer(),
            helper,
        })
    }

    /// The DH-HMAC-CHAP keys that the parameters name, else those of `[replication]`. If there are
    /// any, starts the helper thread for authentication.
    pub fn keys(
        &self,
        engine: &Engine,
        helper: &Helper,
    ) -> Result<Option<Arc<dyn KeySource>>, RpcError> {
        let given = |name: &Option<String>| name.clone().filter(|name| !name.is_empty());
        let (mut own, mut other) = (given(&self.dhchap_key), given(&self.dhchap_ctrlr_key));
        if self.dhchap_key.is_none() && self.dhchap_ctrlr_key.is_none() {
            let of_legs = &engine.settings.replication;
            (own, other) = (of_legs.dhchap_key.clone(), of_legs.dhchap_ctrlr_key.clone());
        }
        let keys = keyring::host_keys(engine, own.as_deref(), other.as_deref())?;
        if keys.is_some() {
            start(helper)?;
        }
        Ok(keys)
    }

    /// True if these parameters describe the path: the same subsystem at the same address.
    pub fn is_at(&self, path: &RemotePath) -> bool {
        let wanted = &path.wanted;
        let port = canonical_port(self.trsvcid.as_deref().unwrap_or(super::DEFAULT_PORT));
        let source = self.hostaddr.as_deref().filter(|text| !text.is_empty());
        let source = source.and_then(|text| text.parse::<IpAddr>().ok());
        // With AUTO, the configuration chooses.
        let asked = self.trtype.parse().unwrap_or(TransportChoice::Auto);
        let same_transport = asked == TransportChoice::Auto || asked == wanted.transport;
        self.subnqn.as_deref() == Some(wanted.subnqn.as_str())
            && canonical_host(&self.traddr) == wanted.host
            && port == wanted.address.port().to_string()
            && source == wanted.hostaddr
            && same_transport
    }
}

/// The transport of a controller under `[replication] tls = "require"`: TCP. Refuses RDMA, and a
/// controller without a key for TLS.
fn encrypted(transport: TransportChoice, tls: &RemoteTls) -> Result<TransportChoice, RpcError> {
    let refuse = |field, cause, remedy| {
        let refused = RpcError::errno(Errno::EINVAL, cause);
        Err(refused.field(field).remedy(remedy))
    };
    match transport {
        TransportChoice::Rdma => refuse(
            "trtype",
            "RDMA has no TLS, and [replication] tls requires it",
            "connect by TCP",
        ),
        _ if matches!(tls, RemoteTls::Off) => refuse(
            "psk",
            "[replication] tls requires TLS, and the controller has no key for it",
            "name a key here or in [replication] psk",
        ),
        TransportChoice::Auto | TransportChoice::Tcp => Ok(TransportChoice::Tcp),
    }
}

fn start(helper: &Helper) -> Result<(), RpcError> {
    let started = helper.start();
    started.map_err(|error| RpcError::io("the thread for authentication", &error))
}
