//! The parameters of `bdev_nvme_attach_controller`, SPDK's and a few Nacre extensions, with the
//! checks that need neither this machine nor other objects. They are also the keys of a
//! `[[remote]]` in the configuration file.

use std::net::IpAddr;

use nacre_nvmf::address::{Endpoint, Fallback, Select, TransportChoice};
use nacre_nvmf::host::ControllerId;
use nacre_nvmf::subsystems::MAX_CNTLID;
use nacre_nvmf_remote::{Policy, Selector};
use nacre_nvmf_wire::Nqn;
use nacre_nvmf_wire::fabrics::ConnectData;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::rpc::RpcError;
use crate::rpc::error::Errno;
use crate::values::flattened;

#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, remote = "Self")]
#[schemars(!remote)]
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
    /// Must be empty or 0; `transport_tos` of bdev_nvme_set_options marks packets.
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
    /// Must be empty: the kernel chooses the source port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hostsvcid: Option<String>,
    /// Must be false: there is no protection information.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prchk_reftag: Option<bool>,
    /// Must be false: there is no protection information.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prchk_guard: Option<bool>,
    /// CRC32C of headers and of data, over TCP.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hdgst: Option<bool>,
    /// CRC32C of data, over TCP; default false.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ddgst: Option<bool>,
    /// Limit of a connection attempt in microseconds. Default: tcp_connect_timeout_ms of
    /// bdev_nvme_set_options, or 5 s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fabrics_connect_timeout_us: Option<u64>,
    /// What to do if a controller of this name is attached: `multipath` (the default) adds a path
    /// to it, `failover` adds one that carries I/O only while others cannot, and that I/O leaves
    /// only when it fails in turn; `disable` refuses the call.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub multipath: Option<Multipath>,
    /// I/O queues to request; the target may grant fewer. Each core uses one per device. Default
    /// 128.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub num_io_queues: Option<u16>,
    #[serde(skip)]
    #[schemars(!skip, flatten)]
    pub times: ReconnectTimes,
    /// Name of the pre-shared key with which this host uses TLS 1.3, with `trtype` TCP only; see
    /// `keyring_file_add_key`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub psk: Option<String>,
    /// Authentication makes the key of TLS (secure channel concatenation), with `trtype` TCP only.
    /// The host authenticates itself in clear, and then uses TLS for all queues. Needs
    /// `dhchap_key`, no `psk`, and a listener of the target that takes both.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub concat: Option<bool>,
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
    /// Must be false: only the NVM command set is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allow_unrecognized_csi: Option<bool>,
    /// How the devices divide their I/O among the paths; see `bdev_nvme_set_multipath_policy`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub multipath_opts: Option<MultipathOptions>,
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
    /// Nacre extension, for a local drive: refuse one with another serial number. The daemon stores
    /// the number that it found: a start does not take another drive that has the address by then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serial: Option<String>,
}

flattened!(AttachParams, times, without nulls);

/// SPDK's three times for a controller that is lost; `None`: the default.
///
/// The only declaration of these parameters: those of bdev_nvme_attach_controller,
/// bdev_nvme_start_discovery and bdev_nvme_set_options have these names, rules and descriptions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ReconnectTimes {
    /// How long to try to reconnect a controller; -1: no limit; 0: never.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ctrlr_loss_timeout_sec: Option<i64>,
    /// Delay between two attempts; 0: starts short and grows with each failure.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reconnect_delay_sec: Option<u64>,
    /// How long I/O waits for a disconnected controller; 0: until the last attempt.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fast_io_fail_timeout_sec: Option<u64>,
}

/// The parameters that are part of an address such as `rdma://192.0.2.7/NQN`.
pub const OF_ADDRESS: [&str; 9] = [
    "trtype", "traddr", "adrfam", "trsvcid", "subnqn", "hostnqn", "nsid", "uuid", "fallback",
];

/// The parameters, parsed.
#[derive(Debug)]
pub struct Parsed {
    pub transport: TransportChoice,
    pub port: u16,
    pub subnqn: Nqn,
    pub hostnqn: Option<Nqn>,
    pub hostaddr: Option<IpAddr>,
    pub select: Select,
    pub controller: ControllerId,
}

fn given(text: &Option<String>) -> bool {
    text.as_ref().is_some_and(|text| !text.is_empty())
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

/// How the I/O of a device is divided among its paths.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum PolicyName {
    #[default]
    ActivePassive,
    ActiveActive,
}

/// How `active_active` chooses a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum SelectorName {
    #[default]
    RoundRobin,
    QueueDepth,
}

/// The parameters of a multipath policy, as an object, as in SPDK.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MultipathOptions {
    /// `active_passive`: one path carries all I/O; `active_active`: all usable paths do. Default
    /// `active_passive`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<PolicyName>,
    /// With `active_active`: how the path of an I/O is chosen. Default `round_robin`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub selector: Option<SelectorName>,
    /// I/Os in a row on a path with `round_robin`; default 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_io: Option<u32>,
}

/// The policy of these parameters. `min_io`: the name of that parameter, and its value.
pub fn policy(
    policy: PolicyName,
    selector: Option<SelectorName>,
    (field, min_io): (&str, Option<u32>),
) -> Result<Policy, RpcError> {
    let refuse = |field: &str, cause: &str| {
        Err(RpcError::errno(Errno::EINVAL, cause.to_owned()).field(field))
    };
    match (policy, selector.unwrap_or_default()) {
        (PolicyName::ActivePassive, _) if selector.is_some() => {
            refuse("selector", "only active_active has a selector")
        }
        (PolicyName::ActivePassive, _) if min_io.is_some() => {
            refuse(field, "only the selector round_robin counts I/Os")
        }
        (PolicyName::ActivePassive, _) => Ok(Policy::ActivePassive),
        (_, SelectorName::QueueDepth) if min_io.is_some() => {
            refuse(field, "only the selector round_robin counts I/Os")
        }
        (_, SelectorName::QueueDepth) => Ok(Policy::ActiveActive(Selector::QueueDepth)),
        (_, SelectorName::RoundRobin) => match min_io.unwrap_or(1) {
            0 => refuse(field, "a path gets at least one I/O"),
            min_io => Ok(Policy::ActiveActive(Selector::RoundRobin { min_io })),
        },
    }
}

impl MultipathOptions {
    /// The policy; active-passive unless set.
    pub fn policy(&self) -> Result<Policy, RpcError> {
        let name = self.policy.unwrap_or_default();
        policy(name, self.selector, ("min_io", self.min_io)).map_err(|error| {
            match error.data.as_ref().and_then(|d| d.field.clone()) {
                Some(field) => error.field(format!("multipath_opts.{field}")),
                None => error,
            }
        })
    }
}

impl AttachParams {
    /// True for a drive of this machine, false for a remote controller.
    pub fn is_drive(&self) -> bool {
        self.trtype.eq_ignore_ascii_case("pcie")
    }

    /// Checks the parameters by themselves, without this machine or other objects.
    pub fn check_alone(&self) -> Result<(), RpcError> {
        self.parsed()?;
        self.times.check().map(drop)
    }

    /// Parses the parameters, with the checks that do not depend on this machine.
    pub fn parsed(&self) -> Result<Parsed, RpcError> {
        self.refuse_unsupported()?;
        self.check_name()?;
        if let Some(options) = &self.multipath_opts {
            options.policy()?;
        }
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
        let hostaddr = self.hostaddr.as_deref().filter(|text| !text.is_empty());
        let hostaddr = hostaddr.map(|text| {
            let parsed = text.parse::<IpAddr>();
            parsed.map_err(|_| wrong("hostaddr", format!("\"{text}\" is not an IP address")))
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
        if self.serial.is_some() {
            let cause = "it is for a drive of this machine, with trtype PCIe";
            return Err(wrong("serial", cause.to_owned()));
        }
        if given(&self.psk) && transport != TransportChoice::Tcp {
            let cause = "TLS is for TCP, and this controller may be reached over RDMA";
            return Err(RpcError::errno(Errno::EINVAL, cause)
                .field("psk")
                .remedy("connect by TCP alone"));
        }
        if self.concat == Some(true) {
            let refuse = |cause: &str, remedy: &str| {
                let refused = RpcError::errno(Errno::EINVAL, cause).field("concat");
                Err(refused.remedy(remedy))
            };
            if transport != TransportChoice::Tcp {
                let cause = "TLS is for TCP, and this controller may be reached over RDMA";
                return refuse(cause, "connect by TCP alone");
            }
            if given(&self.psk) {
                let cause = "with a psk, authentication makes no key for TLS";
                return refuse(cause, "leave out psk or concat");
            }
            if !given(&self.dhchap_key) {
                let cause = "this host has no key to authenticate itself with";
                return refuse(cause, "set dhchap_key");
            }
        }
        let hostnqn = self.hostnqn.as_deref().filter(|text| !text.is_empty());
        Ok(Parsed {
            transport,
            port,
            subnqn: nqn("subnqn", subnqn)?,
            hostnqn: hostnqn.map(|text| nqn("hostnqn", text)).transpose()?,
            hostaddr: hostaddr.transpose()?,
            select,
            controller,
        })
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
        let yes = |flag: Option<bool>| flag == Some(true);
        let protection = "devices here have no metadata, so nothing is protected by it";
        let unsupported = [
            (yes(self.prchk_reftag), "prchk_reftag", protection),
            (yes(self.prchk_guard), "prchk_guard", protection),
            (
                yes(self.allow_unrecognized_csi),
                "allow_unrecognized_csi",
                "only the NVM command set is known here",
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

/// Longest time in seconds that is accepted: one year.
const MAX_TIME_S: u64 = 86_400 * 365;

impl ReconnectTimes {
    /// These times, with those of `defaults` in place of missing ones.
    pub fn or(self, defaults: Self) -> Self {
        Self {
            ctrlr_loss_timeout_sec: self
                .ctrlr_loss_timeout_sec
                .or(defaults.ctrlr_loss_timeout_sec),
            reconnect_delay_sec: self.reconnect_delay_sec.or(defaults.reconnect_delay_sec),
            fast_io_fail_timeout_sec: self
                .fast_io_fail_timeout_sec
                .or(defaults.fast_io_fail_timeout_sec),
        }
    }

    /// Checks the times by SPDK's rules. Returns the time limit of reconnecting and the delay
    /// between two attempts, in seconds, if they are set.
    pub fn check(self) -> Result<(Option<u64>, Option<u64>), RpcError> {
        let (delay, fast_fail) = (self.reconnect_delay_sec, self.fast_io_fail_timeout_sec);
        let refuse = |field: &str, why: String| RpcError::errno(Errno::EINVAL, why).field(field);
        let loss = match self.ctrlr_loss_timeout_sec {
            None | Some(-1) => None,
            Some(seconds) => match u64::try_from(seconds) {
                Ok(seconds) if seconds <= MAX_TIME_S => Some(seconds),
                _ => {
                    let why = format!("{seconds} is neither -1 (forever) nor a number of seconds");
                    return Err(refuse("ctrlr_loss_timeout_sec", why));
                }
            },
        };
        let over = |value: Option<u64>, limit: Option<u64>| match (value, limit) {
            (Some(value), Some(limit)) => value > limit,
            _ => false,
        };
        for (field, seconds) in [
            ("reconnect_delay_sec", delay),
            ("fast_io_fail_timeout_sec", fast_fail),
        ] {
            if seconds.is_some_and(|seconds| seconds > MAX_TIME_S) {
                return Err(refuse(field, format!("it is more than {MAX_TIME_S}")));
            }
        }
        let (delay, limit) = (delay.filter(|s| *s > 0), loss.filter(|s| *s > 0));
        if over(delay, limit) {
            let why = "the first attempt would come after ctrlr_loss_timeout_sec".to_owned();
            return Err(refuse("reconnect_delay_sec", why));
        }
        if over(fast_fail.filter(|s| *s > 0), limit) {
            let why =
                "the controller would be given up before, by ctrlr_loss_timeout_sec".to_owned();
            return Err(refuse("fast_io_fail_timeout_sec", why));
        }
        if over(delay, fast_fail.filter(|s| *s > 0)) {
            let why =
                "I/O would fail before the first attempt, by fast_io_fail_timeout_sec".to_owned();
            return Err(refuse("reconnect_delay_sec", why));
        }
        Ok((loss, delay))
    }
}

/// The parameters that attach the namespaces of `endpoint`. The default name is the last part of
/// the subsystem's NQN.
pub fn attach_params(endpoint: &Endpoint, name: Option<String>) -> AttachParams {
    let fields = endpoint.spdk_fields();
    let subnqn = fields.subnqn.unwrap_or_default();
    let (nsid, uuid) = match endpoint.select {
        Select::All => (None, None),
        Select::Nsid(nsid) => (Some(nsid), None),
        Select::Uuid(uuid) => (None, Some(uuid)),
    };
    AttachParams {
        name: name.unwrap_or_else(|| default_name(&subnqn)),
        trtype: fields.trtype.to_owned(),
        traddr: fields.traddr,
        trsvcid: fields.trsvcid,
        subnqn: Some(subnqn),
        hostnqn: endpoint.hostnqn.as_ref().map(ToString::to_string),
        fallback: fields.fallback,
        nsid,
        uuid,
        ..AttachParams::default()
    }
}

/// The part of the NQN after the last colon, which its owner chose.
pub fn default_name(subnqn: &str) -> String {
    let last = subnqn.rsplit(':').next().unwrap_or(subnqn);
    last.chars().take(64).collect()
}
