//! All settings with their defaults. `nacre.sample.toml` explains each key; a test compares the
//! two.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::LazyLock;

use nacre_hugepages::HugepagePolicy;
use nacre_nvmf::address::{DISCOVERY_PORT, IpTransport};
use nacre_nvmf::auth::Offer;
use nacre_nvmf::subsystems::{ControllerModel, MAX_CNTLID, SubsystemOptions, TargetConfig};
use nacre_nvmf_wire::{Nqn, NqnError};
use nacre_reactor::{Mode, ReactorConfig};
use nacre_transport_rdma::{RdmaConfig, RdmaSettings};
use nacre_transport_rdma_link::qos::Qos;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::alert::AlertSettings;
use super::host_keys::HostKeyNames;
use super::listener::AnaSetting;
use crate::bdev_modules::{MODULES, ModuleEntry, current_kind};
use crate::values::{flattened, read};

pub use super::cluster::ClusterSettings;
pub use super::listener::{Listener, RdmaSetting};
pub use super::remote::RemoteTarget;
pub use super::replication::Replication;
pub use super::security::Security;
pub use super::tls::{MetricsTls, RpcTls};
pub use super::volume_store::VolumeStoreSettings;
pub use super::web::WebSettings;

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    pub reactor: Reactor,
    pub memory: Memory,
    pub rpc: Rpc,
    pub security: Security,
    pub log: Log,
    pub metrics: Metrics,
    pub data: Data,
    /// Where the records of volumes are stored.
    pub store: VolumeStoreSettings,
    /// The cluster that this daemon is a node of.
    pub cluster: ClusterSettings,
    pub nvmf: Nvmf,
    pub rdma: RdmaSettings,
    pub replication: Replication,
    pub qos: Qos,
    pub web: WebSettings,
    /// Receivers of messages about events.
    pub alert: AlertSettings,
    /// Key files that hosts and controllers authenticate themselves with.
    pub key: Vec<Key>,
    /// Controllers of other targets to attach at start.
    pub remote: Vec<RemoteTarget>,
    /// Block devices to create at start.
    pub bdev: Vec<Bdev>,
}

impl Settings {
    /// The RDMA transport, with receive buffers large enough for all RDMA listeners of the file.
    pub fn rdma_transport(&self) -> RdmaConfig {
        let all = self.nvmf.listeners();
        let over_rdma = all.iter().filter(|listener| listener.wants_rdma());
        let sizes = over_rdma.filter_map(|listener| listener.options.in_capsule_data_size);
        RdmaConfig {
            listener_in_capsule_data_size: sizes.max().unwrap_or(0),
            max_queue_depth: self.nvmf.max_queue_depth,
            max_io_size: self.nvmf.max_io_size,
            tos: match self.rdma.tos {
                0 => self.qos.storage.tos().unwrap_or(0),
                tos => tos,
            },
            ..self.rdma.transport()
        }
    }

    /// All declared listeners, with defaults from `[rdma]`.
    pub fn listeners(&self) -> Vec<Listener> {
        let mut all = self.nvmf.listeners();
        for listener in &mut all {
            let rdma = &self.rdma;
            listener.rdma_device = listener.rdma_device.take().or_else(|| rdma.device.clone());
            listener.rdma_port = listener.rdma_port.or(rdma.port);
            listener.rdma_gid_index = listener.rdma_gid_index.or(rdma.gid_index);
            listener.allow_software &= rdma.allow_software;
        }
        all
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Reactor {
    /// `auto`, a count (`auto:3`), cores near devices (`auto-numa`, `auto-numa:3`), a mask (`0x3`)
    /// or a list (`0,2-5`, `[0,2-5]`).
    pub cores: String,
    pub mode: Mode,
    /// How long an idle adaptive reactor polls before sleeping, in microseconds. Grows to eight
    /// times this value while work arrives within it.
    #[serde(deserialize_with = "read::micros")]
    pub busy_poll_us: u64,
}

impl Default for Reactor {
    fn default() -> Self {
        let own = ReactorConfig::default();
        Self {
            cores: "auto".into(),
            mode: own.mode,
            busy_poll_us: own.busy_poll_us,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Memory {
    pub hugepages: HugepagePolicy,
    /// DMA memory of all reactors together, in MiB; 0: 64 for each.
    #[serde(deserialize_with = "read::mebibytes")]
    pub size_mb: u64,
    /// DMA memory of the reactors on NUMA node 0, 1, …, in MiB; 0, and nodes beyond the list: their
    /// share of `size_mb`. At most [`Memory::MAX_NODES`].
    pub numa_mb: Vec<u64>,
}

impl Memory {
    pub const MAX_NODES: usize = 64;
}

impl Default for Memory {
    fn default() -> Self {
        Self {
            hugepages: HugepagePolicy::Auto,
            size_mb: 0,
            numa_mb: Vec::new(),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Rpc {
    pub enabled: bool,
    /// A path, or `auto`: see [`crate::config::default_socket`].
    pub socket: String,
    pub max_clients: usize,
    /// Time limit of every call.
    #[serde(deserialize_with = "read::seconds")]
    pub deadline_s: u64,
    /// The only allowed methods; empty: all.
    pub allowed: Vec<String>,
    pub access: Access,
    pub tls: RpcTls,
    pub audit: Audit,
}

impl Default for Rpc {
    fn default() -> Self {
        Self {
            enabled: true,
            socket: "auto".into(),
            max_clients: 64,
            deadline_s: 55,
            allowed: Vec::new(),
            access: Access::default(),
            tls: RpcTls::default(),
            audit: Audit::default(),
        }
    }
}

/// The audit log of the management socket.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Audit {
    /// A path; `auto`: `audit.log` in the data directory; or `none`.
    pub file: String,
    /// Most MiB of one file.
    #[serde(deserialize_with = "read::mebibytes")]
    pub max_size_mb: u64,
    /// Number of files, older ones included.
    pub files: u32,
}

impl Default for Audit {
    fn default() -> Self {
        Self {
            file: "auto".into(),
            max_size_mb: 16,
            files: 8,
        }
    }
}

/// Users and groups with each role: texts of [`crate::rpc::access::Member`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Access {
    pub admin: Vec<String>,
    pub operator: Vec<String>,
    pub viewer: Vec<String>,
    pub methods: AccessMethods,
}

impl Default for Access {
    fn default() -> Self {
        Self {
            admin: vec!["uid:0".into()],
            operator: Vec::new(),
            viewer: Vec::new(),
            methods: AccessMethods::default(),
        }
    }
}

/// Exactly the methods that a role may call; empty: those of its classes.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AccessMethods {
    pub operator: Vec<String>,
    pub viewer: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Log {
    pub level: LogLevel,
    pub format: LogFormat,
    pub timestamps: bool,
    /// None: standard error.
    pub file: Option<PathBuf>,
    /// Parts of the program to log at debug level, regardless of `level`.
    pub flags: Vec<String>,
}

impl Default for Log {
    fn default() -> Self {
        Self {
            level: LogLevel::Notice,
            format: LogFormat::Text,
            timestamps: true,
            file: None,
            flags: Vec::new(),
        }
    }
}

/// SPDK's levels. `notice` is for important events that are not problems.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogLevel {
    Error,
    Warning,
    Notice,
    Info,
    Debug,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    Text,
    Json,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Metrics {
    /// Address of the HTTP endpoint for Prometheus; none: no HTTP.
    #[serde(deserialize_with = "read::endpoint")]
    pub listen: Option<SocketAddr>,
    /// File with the token that clients must send; none: no token.
    pub token_file: Option<PathBuf>,
    pub tls: MetricsTls,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Data {
    /// A path, `auto`: see [`default_data_dir`](crate::values::files::default_data_dir), or `none`:
    /// state is not stored.
    pub dir: String,
    /// Interval between retries of objects that could not be restored at start; 0: never.
    #[serde(deserialize_with = "read::seconds")]
    pub retry_s: u64,
}

impl Default for Data {
    fn default() -> Self {
        Self {
            dir: "auto".into(),
            retry_s: 10,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Nvmf {
    pub max_subsystems: u32,
    /// Maximum number of connected queues, over all listeners and transports. Beyond it, a host's
    /// Connect command fails with a status.
    pub max_connections: u32,
    /// TCP connections before a successful Connect command. Beyond the limit, the oldest is closed
    /// once it is a second old.
    pub max_pending_connections: u32,
    pub max_queue_depth: u16,
    pub max_io_qpairs_per_ctrlr: u16,
    #[serde(deserialize_with = "read::bytes")]
    pub in_capsule_data_size: u32,
    #[serde(deserialize_with = "read::bytes")]
    pub max_io_size: u32,
    /// Port of the discovery service, opened beside every listener; 0: none.
    pub discovery_port: u16,
    /// See [`Nvmf::discovery_name`].
    pub discovery_nqn: String,
    /// Hash functions and Diffie-Hellman groups for authentication, the preferred ones first.
    pub dhchap_digests: Vec<String>,
    pub dhchap_dhgroups: Vec<String>,
    /// Send KeyUpdates of TLS before 2^24.5 records, the limit of AES-GCM for one key, and close
    /// connections of hosts that exceed it. Linux hosts do not take KeyUpdates. False: only with
    /// hosts that send KeyUpdates themselves.
    pub tls_key_updates: bool,
    /// None: each listener decides.
    pub rdma: Option<RdmaSetting>,
    /// Listeners in short form: `tcp://ADDRESS:PORT`, `rdma://ADDRESS:PORT`.
    pub listen: Vec<String>,
    pub listener: Vec<Listener>,
    pub subsystem: Vec<Subsystem>,
}

impl Default for Nvmf {
    fn default() -> Self {
        let (offer, target) = (Offer::default(), TargetConfig::default());
        Self {
            max_subsystems: target.max_subsystems as u32,
            max_connections: 10_000,
            max_pending_connections: 256,
            max_queue_depth: target.queue_limits.max_io_entries,
            max_io_qpairs_per_ctrlr: 128,
            in_capsule_data_size: 8192,
            max_io_size: 1024 * 1024,
            discovery_port: DISCOVERY_PORT,
            discovery_nqn: "auto".into(),
            dhchap_digests: offer.hashes.iter().map(|h| h.name().into()).collect(),
            dhchap_dhgroups: offer.groups.iter().map(|g| g.name().into()).collect(),
            tls_key_updates: false,
            rdma: None,
            listen: Vec::new(),
            listener: Vec::new(),
            subsystem: Vec::new(),
        }
    }
}

/// Unique name of the discovery subsystem, beside the well-known name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DiscoveryName {
    /// A generated name, stored in the data directory; without a data directory no unique name.
    Auto,
    /// No unique name.
    WellKnown,
    Unique(Nqn),
}

impl Nvmf {
    pub fn discovery_name(&self) -> Result<DiscoveryName, NqnError> {
        Ok(match self.discovery_nqn.as_str() {
            "auto" => DiscoveryName::Auto,
            "well-known" => DiscoveryName::WellKnown,
            text => match Nqn::new(text)? {
                nqn if nqn.is_discovery() => DiscoveryName::WellKnown,
                nqn => DiscoveryName::Unique(nqn),
            },
        })
    }

    /// Sizes that every transport would refuse: reported before the start instead of by each
    /// listener.
    pub fn invalid_sizes(&self) -> Vec<(&'static str, String)> {
        let (largest, in_capsule) = (self.max_io_size, self.in_capsule_data_size);
        let mut problems = Vec::new();
        if !largest.is_power_of_two() {
            problems.push(("max_io_size", format!("{largest} is not a power of two")));
        }
        if !in_capsule.is_multiple_of(16) {
            let cause = format!("{in_capsule} is not a multiple of 16");
            problems.push(("in_capsule_data_size", cause));
        }
        if in_capsule > largest {
            let cause = format!("{in_capsule} is more than max_io_size ({largest})");
            problems.push(("in_capsule_data_size", cause));
        }
        problems
    }

    /// All declared listeners, including those of `listen`, with the common `rdma` setting applied.
    pub fn listeners(&self) -> Vec<Listener> {
        let short = self.listen.iter().enumerate();
        let short = short.filter_map(|(at, text)| Listener::short(at + 1, text).ok());
        let mut all: Vec<Listener> = self.listener.iter().cloned().chain(short).collect();
        for listener in &mut all {
            if let Some(setting) = self.rdma {
                listener.rdma = setting;
                if setting != RdmaSetting::Off && !listener.uses(IpTransport::Rdma) {
                    listener.transports.push(IpTransport::Rdma);
                }
            }
        }
        // Hosts prefer RDMA, also if RDMA and TCP have separate listeners.
        if all.iter().any(Listener::wants_rdma) {
            let automatic = all.iter_mut().filter(|l| l.ana.tcp == AnaSetting::Auto);
            automatic.for_each(|l| l.ana.tcp = AnaSetting::NonOptimized);
        }
        all
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, remote = "Self")]
pub struct Subsystem {
    pub nqn: String,
    pub hosts: Vec<String>,
    /// Allowed hosts that authenticate themselves.
    pub host: Vec<Host>,
    /// Names of `[[nvmf.listener]]` entries; empty: all.
    pub listeners: Vec<String>,
    pub namespace: Vec<Namespace>,
    /// Options whose keys are in the same table.
    #[serde(skip)]
    pub options: SubsystemOptions,
}

flattened!(Subsystem, options);

impl Default for Subsystem {
    fn default() -> Self {
        Self {
            nqn: String::new(),
            hosts: Vec::new(),
            host: Vec::new(),
            listeners: Vec::new(),
            namespace: Vec::new(),
            options: SubsystemOptions {
                allow_any_host: Some(false),
                ana_reporting: Some(true),
                controller_model: Some(ControllerModel::default()),
                min_cntlid: Some(1),
                max_cntlid: Some(MAX_CNTLID),
                ..SubsystemOptions::default()
            },
        }
    }
}

/// A host and the names of its keys.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, remote = "Self")]
pub struct Host {
    pub nqn: String,
    #[serde(skip)]
    pub keys: HostKeyNames,
}

flattened!(Host, keys);

impl Default for Host {
    fn default() -> Self {
        Self {
            nqn: String::new(),
            keys: HostKeyNames {
                concat: Some(false),
                ..HostKeyNames::default()
            },
        }
    }
}

/// A key file, its name, and when it expires; None: never.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Key {
    pub name: String,
    pub path: PathBuf,
    pub expires: Option<String>,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Namespace {
    /// 0: the lowest free id.
    pub nsid: u32,
    /// The name of a `[[bdev]]`, or of a device created by RPC.
    pub bdev: String,
    /// None: the device's UUID.
    #[serde(deserialize_with = "read::some_uuid")]
    pub uuid: Option<Uuid>,
}

/// The check of unknown keys is in [`super::lists::known_keys`]: serde's `deny_unknown_fields`
/// cannot be used with `flatten`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Bdev {
    pub name: String,
    #[serde(rename = "type")]
    pub kind: BdevKind,
    /// `file` only.
    pub path: Option<PathBuf>,
    /// `malloc` and `null`: the size; `file`: creates a missing file with this size.
    pub size: Option<Size>,
    /// None: 512 for malloc and null; detected for a file.
    #[serde(deserialize_with = "read::some_bytes")]
    pub block_size: Option<u32>,
    pub read_only: bool,
    /// None: derived from the name, so the same at every start.
    #[serde(deserialize_with = "read::some_uuid")]
    pub uuid: Option<Uuid>,
    /// Parameters of the module's create method, for any other type.
    #[serde(flatten)]
    pub params: serde_json::Map<String, serde_json::Value>,
}

impl Default for Bdev {
    fn default() -> Self {
        Self {
            name: String::new(),
            kind: BdevKind::FILE,
            path: None,
            size: None,
            block_size: None,
            read_only: false,
            uuid: None,
            params: serde_json::Map::new(),
        }
    }
}

/// The type of a declared bdev: `file`, `malloc`, `null`, or the name of a module. The first three
/// have keys of their own. For a module, the keys are its create parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct BdevKind(&'static str);

impl BdevKind {
    /// A file or a block device, through io_uring.
    pub const FILE: Self = Self("file");
    pub const MALLOC: Self = Self("malloc");
    pub const NULL: Self = Self("null");

    fn all() -> &'static [&'static str] {
        static ALL: LazyLock<Vec<&str>> = LazyLock::new(|| {
            let own = [BdevKind::FILE, BdevKind::MALLOC, BdevKind::NULL].map(|kind| kind.0);
            let declared = MODULES.iter().filter(|module| module.declared.is_some());
            own.into_iter().chain(declared.map(|m| m.kind)).collect()
        });
        &ALL
    }

    /// The module, unless the type has keys of its own.
    pub fn module(self) -> Option<&'static ModuleEntry> {
        MODULES
            .iter()
            .find(|module| module.kind == self.0 && module.declared.is_some())
    }
}

impl<'de> Deserialize<'de> for BdevKind {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let named = current_kind(&text);
        let known = Self::all().iter().find(|kind| **kind == named);
        let unknown = || serde::de::Error::unknown_variant(&text, Self::all());
        known.map(|kind| Self(kind)).ok_or_else(unknown)
    }
}

/// Default bytes per block of malloc and null devices.
pub const DEFAULT_BLOCK: u32 = 512;

/// A number of bytes, written as a number or with a unit (`64MiB`, `1GB`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size(pub u64);

impl Serialize for Size {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(self.0)
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        read::bytes(deserializer).map(Size)
    }
}
