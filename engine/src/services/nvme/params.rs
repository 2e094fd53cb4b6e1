//! Parameters of `bdev_nvme_attach_controller`: SPDK's, and a few Nacre extensions.

use std::net::IpAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nacre_nvmf::address::{Fallback, Select, TransportChoice, adrfam};
use nacre_nvmf::auth::KeySource;
use nacre_nvmf::host::ControllerId;
use nacre_nvmf::subsystems::MAX_CNTLID;
use nacre_nvmf::tls::PskKey;
use nacre_nvmf_wire::Nqn;
use nacre_nvmf_wire::fabrics::ConnectData;
use nacre_nvmf_wire::tcp::Digests;
use nacre_reactor::Helper;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::options::{Options, timeouts};
use crate::rpc::RpcError;
use crate::rpc::error::Errno;
use crate::services::engine::Engine;
use crate::services::keyring::{self, RemoteKeys};
use crate::services::remotes::{self, Authentication, Remote, Wanted};

/// Default number of I/O queues to request from a controller.
const IO_QUEUES: u16 = 128;
/// Default limit of devices per controller, as in SPDK.
const MAX_DEVICES: u32 = 128;

#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AttachParams {
    /// Name of the controller; its devices are named with `n` and the namespace id appended.
    pub name: String,
    /// `TCP`, `RDMA`, `PCIe` (a local drive), or Nacre's own `AUTO`, which follows `[replication]`.
    pub trtype: String,
    /// An IP address or a host name; for a drive its PCI address, such as 0000:5e:00.0.
    pub traddr: String,
    /// `IPv4` or `IPv6`; default: derived from the address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adrfam: Option<String>,
    /// The port; default 4420.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trsvcid: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority: Option<String>,
    /// Required: a discovery service has no namespaces.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub subnqn: Option<String>,
    /// Default: this host's NQN.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hostnqn: Option<String>,
    /// The source address of connections.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hostaddr: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hostsvcid: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prchk_reftag: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prchk_guard: Option<bool>,
    /// CRC32C of headers and of data, over TCP.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hdgst: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ddgst: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fabrics_connect_timeout_us: Option<u64>,
    /// Only `disable`: a controller has one path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub multipath: Option<Multipath>,
    /// I/O queues to request; the target may grant fewer. Each core uses one per device. Default
    /// 128.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub num_io_queues: Option<u16>,
    /// How long to try to reconnect; -1: no limit; 0: never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ctrlr_loss_timeout_sec: Option<i64>,
    /// Delay between two attempts; 0: starts short and grows with each failure.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reconnect_delay_sec: Option<u64>,
    /// How long I/O waits for a disconnected controller; 0: until the last attempt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fast_io_fail_timeout_sec: Option<u64>,
    /// Name of the pre-shared key with which this host uses TLS 1.3, with `trtype` TCP only; see
    /// `keyring_file_add_key`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub psk: Option<String>,
    /// Maximum number of devices; default 128.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_bdevs: Option<u32>,
    /// Name of the key with which this host authenticates itself (DH-HMAC-CHAP); see
    /// `keyring_file_add_key`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dhchap_key: Option<String>,
    /// Name of the key with which the target must authenticate itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dhchap_ctrlr_key: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allow_unrecognized_csi: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub multipath_opts: Option<serde_json::Value>,
    /// Default true: a read can then complete without a separate response capsule.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disable_sq_flow_control: Option<bool>,
    /// Nacre extension: use only this namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nsid: Option<u32>,
    /// Nacre extension: use only the namespace with this UUID or NGUID.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub uuid: Option<Uuid>,
    /// Nacre extension: transport to use while RDMA fails. Default `none` with `RDMA`; with `AUTO`
    /// as `[replication]` says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fallback: Option<Fallback>,
    /// Nacre extension: overrides `keep_alive_timeout_ms` of `bdev_nvme_set_options` for this
    /// controller; 0: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep_alive_timeout_ms: Option<u32>,
    /// Nacre extension: id of the static controller to connect to; 65534: any static one. Default
    /// 65535: a dynamic controller.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cntlid: Option<u16>,
}

/// Modes of SPDK for a second path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Multipath {
    Failover,
    #[serde(rename = "multipath")]
    Active,
    Disable,
}

impl AttachParams {
    /// True for a drive of this machine, false for a remote controller.
    pub fn is_drive(&self) -> bool {
        self.trtype.eq_ignore_ascii_case("pcie")
    }

    /// Checks the parameters without connecting; resolves a host name.
    pub async fn check(&self, engine: &Rc<Engine>) -> Result<Wanted, RpcError> {
        self.refuse_unsupported()?;
        self.check_name()?;
        let wrong =
            |field: &'static str, cause: String| RpcError::invalid_params(cause).field(field);
        let transport: TransportChoice = self.trtype.parse().map_err(|_| {
            let cause = format!("\"{}\" is not a transport type known here", self.trtype);
            RpcError::errno(Errno::ENODEV, cause)
                .field("trtype")
                .remedy("use TCP, RDMA, AUTO or PCIe")
        })?;
        if self.fallback == Some(Fallback::Tcp) && transport == TransportChoice::Tcp {
            return Err(wrong(
                "fallback",
                "TCP has nothing to fall back to".to_owned(),
            ));
        }
        let port = match self.trsvcid.as_deref().unwrap_or("4420").parse::<u16>() {
            Ok(port) if port > 0 => port,
            _ => {
                let given = self.trsvcid.as_deref().unwrap_or_default();
                return Err(wrong(
                    "trsvcid",
                    format!("\"{given}\" is not a port: a number from 1 to 65535"),
                ));
            }
        };
        let Some(subnqn) = self.subnqn.as_deref().filter(|nqn| !nqn.is_empty()) else {
            let cause =
                "no subsystem is named, and a discovery service has no namespaces".to_owned();
            return Err(
                wrong("subnqn", cause).remedy("`nacre discover` lists the subsystems of a target")
            );
        };
        let nqn = |field, text: &str| {
            Nqn::foreign(text).map_err(|e| wrong(field, format!("\"{text}\": {e}")))
        };
        let host = self.traddr.trim_matches(['[', ']']).to_owned();
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
        let hostaddr = self.hostaddr.as_deref().filter(|text| !text.is_empty());
        let hostaddr = hostaddr.map(|text| match text.parse::<IpAddr>() {
            Ok(ip) if ip.is_ipv4() == address.is_ipv4() => Ok(ip),
            Ok(_) => Err(wrong(
                "hostaddr",
                format!("\"{text}\" is not an {family} address, as the target's is"),
            )),
            Err(_) => Err(wrong(
                "hostaddr",
                format!("\"{text}\" is not an IP address"),
            )),
        });
        let select = match (self.nsid, self.uuid) {
            (None, None) => Select::All,
            (Some(nsid), None) if (1..u32::MAX).contains(&nsid) => Select::Nsid(nsid),
            (Some(nsid), None) => {
                return Err(wrong(
                    "nsid",
                    format!("{nsid} is not a namespace identifier"),
                ));
            }
            (None, Some(uuid)) => Select::Uuid(uuid),
            (Some(_), Some(_)) => {
                return Err(wrong(
                    "uuid",
                    "nsid and uuid both name the namespace: give one of them".to_owned(),
                ));
            }
        };
        let controller = match self.cntlid {
            None | Some(ConnectData::CNTLID_DYNAMIC) => ControllerId::Dynamic,
            Some(ConnectData::CNTLID_STATIC_ANY) => ControllerId::AnyStatic,
            Some(id) if id <= MAX_CNTLID => ControllerId::Static(id),
            Some(id) => {
                let cause =
                    format!("{id} is not a controller id: 0 to {MAX_CNTLID}, 65534 or 65535");
                return Err(wrong("cntlid", cause));
            }
        };
        let io_queues = self.num_io_queues.filter(|n| *n > 0).unwrap_or(IO_QUEUES);
        let max_devices = self.max_bdevs.filter(|n| *n > 0).unwrap_or(MAX_DEVICES);
        let options = Options::of(engine);
        let timeouts = timeouts(
            self.ctrlr_loss_timeout_sec
                .or(options.ctrlr_loss_timeout_sec),
            self.reconnect_delay_sec.or(options.reconnect_delay_sec),
            self.fast_io_fail_timeout_sec
                .or(options.fast_io_fail_timeout_sec),
            &engine.settings.replication,
        )?;
        let keep_alive = self.keep_alive_timeout_ms.or(options.keep_alive_timeout_ms);
        let keep_alive = keep_alive.unwrap_or(engine.settings.replication.keep_alive_ms);
        let micros = |given: Option<u64>| given.filter(|us| *us > 0).map(Duration::from_micros);
        let millis = |given: Option<u64>| given.filter(|ms| *ms > 0).map(Duration::from_millis);
        Ok(Wanted {
            name: self.name.clone(),
            transport,
            fallback: self.fallback,
            address,
            subnqn: nqn("subnqn", subnqn)?,
            controller,
            hostnqn: match self.hostnqn.as_deref().filter(|text| !text.is_empty()) {
                Some(text) => Some(nqn("hostnqn", text)?),
                None => None,
            },
            hostaddr: hostaddr.transpose()?,
            digests: Digests {
                header: self.hdgst.unwrap_or(false),
                data: self.ddgst.unwrap_or(false),
            },
            select,
            max_devices: max_devices as usize,
            io_queues,
            queue_entries: options.queue_entries().unwrap_or(128),
            connect_timeout: micros(self.fabrics_connect_timeout_us)
                .or(millis(options.tcp_connect_timeout_ms))
                .unwrap_or(Duration::from_secs(5)),
            io_timeout: micros(options.timeout_us).unwrap_or(Duration::from_secs(30)),
            admin_timeout: micros(options.timeout_admin_us).unwrap_or(Duration::from_secs(30)),
            keep_alive: Duration::from_millis(keep_alive.into()),
            timeouts,
            failback: !options.disable_auto_failback.unwrap_or(false),
            tos: options.transport_tos.unwrap_or(0),
            disable_sq_flow_control: self.disable_sq_flow_control.unwrap_or(true),
            authentication: self.authentication(engine, &options)?,
            psk: self.psk(engine, transport)?,
            host,
        })
    }

    /// The key of TLS.
    fn psk(
        &self,
        engine: &Engine,
        transport: TransportChoice,
    ) -> Result<Option<Arc<dyn PskKey>>, RpcError> {
        let name = self.psk.as_deref().filter(|name| !name.is_empty());
        if name.is_some() && transport != TransportChoice::Tcp {
            let cause = "TLS is for TCP, and this controller may be reached over RDMA";
            return Err(RpcError::errno(Errno::EINVAL, cause)
                .field("psk")
                .remedy("give trtype TCP"));
        }
        keyring::host_psk(engine, name)
    }

    /// The keys of this host and of the target.
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

    /// The keys that the parameters name; the thread that uses keys runs if there are any.
    pub fn keys(
        &self,
        engine: &Engine,
        helper: &Helper,
    ) -> Result<Option<Arc<dyn KeySource>>, RpcError> {
        let given = |name: &Option<String>| name.clone().filter(|name| !name.is_empty());
        let (own, other) = (given(&self.dhchap_key), given(&self.dhchap_ctrlr_key));
        let keys = keyring::host_keys(engine, own.as_deref(), other.as_deref())?;
        if keys.is_some() {
            let started = helper.start();
            started.map_err(|error| RpcError::io("the thread for authentication", &error))?;
        }
        Ok(keys)
    }

    /// True if the path matches that of an attached controller.
    pub fn is_at(&self, remote: &Remote) -> bool {
        let wanted = &remote.wanted;
        let port = self.trsvcid.as_deref().unwrap_or("4420");
        let named = self.traddr.trim_matches(['[', ']']) == wanted.host
            && self.subnqn.as_deref() == Some(wanted.subnqn.as_str());
        named && port == wanted.address.port().to_string()
    }

    /// Refuses a controller name that is empty, too long or has control characters.
    pub fn check_name(&self) -> Result<(), RpcError> {
        let is_one =
            (1..=200).contains(&self.name.len()) && !self.name.chars().any(char::is_control);
        if is_one {
            Ok(())
        } else {
            Err(RpcError::invalid_params(
                "a name of 1 to 200 characters, none of them a control character, is needed",
            )
            .field("name"))
        }
    }

    /// Refuses SPDK features that Nacre lacks. Absent parameters, and values that match Nacre's
    /// behaviour, are accepted.
    pub fn refuse_unsupported(&self) -> Result<(), RpcError> {
        let given = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
        let yes = |flag: Option<bool>| flag == Some(true);
        let protection = "devices here have no metadata, so nothing is protected by it";
        let multipath = self
            .multipath
            .is_some_and(|mode| mode != Multipath::Disable);
        let unsupported = [
            (yes(self.prchk_reftag), "prchk_reftag", protection),
            (yes(self.prchk_guard), "prchk_guard", protection),
            (
                yes(self.allow_unrecognized_csi),
                "allow_unrecognized_csi",
                "only the NVM command set is known here",
            ),
            (
                multipath,
                "multipath",
                "a controller has one path here; with AUTO that is by RDMA or by TCP, whichever works",
            ),
            (
                self.multipath_opts.as_ref().is_some_and(|o| !o.is_null()),
                "multipath_opts",
                "a controller has one path here",
            ),
            (
                given(&self.hostsvcid),
                "hostsvcid",
                "the kernel chooses the port that a connection begins at",
            ),
            (
                given(&self.priority) && self.priority.as_deref() != Some("0"),
                "priority",
                "the kernel chooses the priority of its packets; transport_tos of bdev_nvme_set_options marks them",
            ),
        ];
        match unsupported.into_iter().find(|(requested, ..)| *requested) {
            Some((_, field, why)) => Err(RpcError::errno(Errno::ENOTSUP, why)
                .field(field)
                .remedy("leave it out")),
            None => Ok(()),
        }
    }
}
