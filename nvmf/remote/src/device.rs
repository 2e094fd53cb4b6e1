//! [`RemoteBdev`]: a namespace of a remote controller as a block device.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use nacre_bdev::{Bdev, Geometry, Limits, Op, OpenError, Queue, Support};
use nacre_hugepages::Pool;
use nacre_nvmf::host::NamespaceInfo;
use nacre_nvmf_wire::log::ana::AnaState;
use serde_json::{Value, json};
use uuid::Uuid;

use crate::channel::RemoteQueue;
use crate::namespace::{LivePath, Namespace};
use crate::path::Path;
use crate::path_queues::PathQueues;
use crate::paths::{PathIo, PathQueue};
use crate::select::Policy;
use crate::shared::Shared;
use crate::status::Status;

/// A remote namespace as a bdev.
pub struct RemoteBdev {
    uuid: Uuid,
    namespace: Arc<Namespace>,
}

/// A path of a device, for management.
#[derive(Debug, Clone)]
pub struct PathInfo {
    pub path: Path,
    /// See [`crate::Config::address`].
    pub address: (String, String),
    pub subnqn: String,
    pub status: Status,
    /// The ANA state of the namespace; `None`: not connected, or the path lacks the namespace.
    pub access: Option<AnaState>,
    pub is_preferred: bool,
    pub refusal: Option<String>,
    pub io: PathIo,
    /// The open queues on this path.
    pub queues: Vec<PathQueue>,
}

impl PathInfo {
    /// SPDK's word for the ANA state.
    pub fn access_word(&self) -> &'static str {
        self.access.map_or("unknown", ana_word)
    }

    /// True if I/O can use the path.
    pub fn is_accessible(&self) -> bool {
        self.refusal.is_none() && self.access.is_some_and(AnaState::is_accessible)
    }
}

impl RemoteBdev {
    pub(crate) fn new(namespace: Namespace) -> Self {
        Self {
            uuid: uuid_of(&namespace.attached),
            namespace: Arc::new(namespace),
        }
    }

    pub fn nsid(&self) -> u32 {
        self.namespace.attached.nsid
    }

    /// The reason why no path of the namespace is used although it exists; `None`: a path is used.
    pub fn refusal(&self) -> Option<String> {
        self.namespace.refusal()
    }

    pub(crate) fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// Adopts the namespace's present size, and the paths that show it.
    pub(crate) fn take_over(&self, live: &[LivePath]) {
        self.namespace.take_over(live);
    }

    /// Its paths, in the order of their attachment.
    pub fn paths(&self) -> Vec<PathInfo> {
        let list = self.namespace.paths.list();
        let info = |path: &Arc<crate::paths::DevicePath>| {
            let (config, link) = (&path.shared.config, path.shared.link.state());
            let found = link.namespaces.get(&self.nsid());
            let is_connected = path.shared.link.generation().is_some();
            PathInfo {
                path: Path(Arc::clone(&path.shared)),
                address: config.address.clone(),
                subnqn: config.options.subnqn.to_string(),
                status: path.shared.status(),
                access: found
                    .filter(|_| is_connected)
                    .map(|found| link.access(found)),
                is_preferred: path.is_preferred(),
                refusal: path.refusal(),
                io: path.io(),
                queues: path.queues(),
            }
        };
        list.iter().map(info).collect()
    }

    /// True if the path is among [`RemoteBdev::paths`]: it has shown the namespace.
    pub fn has_path(&self, path: &Path) -> bool {
        self.namespace.paths.find(&path.0).is_some()
    }

    /// The policy by which I/O is divided among the paths.
    pub fn policy(&self) -> Policy {
        self.namespace.paths.policy()
    }

    pub fn set_policy(&self, policy: Policy) {
        self.namespace.paths.set_policy(policy);
    }

    /// Prefers the path to controller `cntlid` under the active-passive policy. Returns false if no
    /// path is connected to it.
    pub fn prefer(&self, cntlid: u16) -> bool {
        let list = self.namespace.paths.list();
        let found = list.iter().find(|path| {
            path.shared.link.generation().is_some() && path.shared.status().info.cntlid == cntlid
        });
        if let Some(path) = found {
            self.namespace.paths.prefer(Some(&path.shared));
        }
        found.is_some()
    }
}

/// The UUID of a namespace; without one, its NGUID, or a UUID derived from its EUI-64.
fn uuid_of(namespace: &NamespaceInfo) -> Uuid {
    match namespace.uuid {
        Some(uuid) => uuid,
        None if namespace.nguid != [0; 16] => Uuid::from_bytes(namespace.nguid),
        None => Uuid::new_v5(&Uuid::NAMESPACE_OID, &namespace.eui64),
    }
}

fn ana_word(state: AnaState) -> &'static str {
    match state {
        AnaState::Optimized => "optimized",
        AnaState::NonOptimized => "non_optimized",
        AnaState::Inaccessible => "inaccessible",
        AnaState::PersistentLoss => "persistent_loss",
        AnaState::Change => "change",
    }
}

impl Bdev for RemoteBdev {
    fn name(&self) -> &str {
        &self.namespace.name
    }

    fn product_name(&self) -> &'static str {
        "NVMe disk"
    }

    fn uuid(&self) -> Uuid {
        self.uuid
    }

    fn geometry(&self) -> Geometry {
        Geometry {
            block_size: self.namespace.attached.block_size,
            blocks: self.namespace.size.blocks(),
            physical_block_size: self.namespace.attached.block_size,
        }
    }

    fn limits(&self) -> Limits {
        self.namespace.promise.limits
    }

    fn supports(&self, op: Op) -> Support {
        if self.namespace.does(op) {
            Support::Native
        } else {
            Support::No
        }
    }

    fn native_fua(&self) -> bool {
        true
    }

    fn open(self: Arc<Self>, pool: &Pool) -> Result<Box<dyn Queue>, OpenError> {
        let queues = PathQueues::open(Arc::clone(&self.namespace), pool)?;
        let namespace = Arc::clone(&self.namespace);
        Ok(Box::new(RemoteQueue::new(queues, namespace)))
    }

    fn cuts(&self) -> u64 {
        self.namespace.size.cuts()
    }

    /// Counts the ends of the associations of all paths and of their I/O queues, and each shrink
    /// of the namespace.
    fn losses(&self) -> u64 {
        self.namespace.losses.load(Ordering::Acquire) + self.namespace.size.cuts()
    }

    fn least_blocks(&self) -> u64 {
        self.namespace.size.least()
    }

    fn forget_least(&self) -> u64 {
        self.namespace.size.forget_least()
    }

    /// True if the target supports reservations now; this may change when it restarts.
    fn reserves(&self) -> bool {
        self.namespace.reserves()
    }

    /// Returns the fields that SPDK shows, and the state of the connection.
    fn driver_specific(&self) -> Value {
        let list = self.namespace.paths.list();
        let nvme: Vec<Value> = list
            .iter()
            .map(|path| self.path_data(&path.shared))
            .collect();
        let (controller, state) = match list.first() {
            Some(first) => (
                first.shared.config.name.clone(),
                first.shared.status().state.word(),
            ),
            None => (String::new(), "deleting"),
        };
        let policy = self.policy();
        let mut data = json!({
            "nvme": nvme,
            "mp_policy": policy.word(),
            "controller": controller,
            "state": state,
            "losses": self.losses(),
            "refused": self.refusal(),
        });
        if let Some(word) = policy.selector_word() {
            data["selector"] = word.into();
        }
        if let Some(min_io) = policy.min_io() {
            data["rr_min_io"] = min_io.into();
        }
        data
    }
}

impl RemoteBdev {
    /// The fields that SPDK shows for each path.
    fn path_data(&self, shared: &Shared) -> Value {
        let (config, status) = (&shared.config, shared.status());
        let link = shared.link.state();
        let found = link.namespaces.get(&self.namespace.attached.nsid);
        let ana = found.map(|found| ana_word(link.access(found)));
        let info = &status.info;
        let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02X}")).collect::<String>();
        let (major, minor, tertiary) = info.version;
        let mut ns_data = json!({
            "id": self.namespace.attached.nsid,
            "can_share": info.multi_controller,
            "nguid": hex(&self.namespace.attached.nguid),
            "eui64": hex(&self.namespace.attached.eui64),
        });
        if let Some(ana) = ana.filter(|_| info.ana_reporting) {
            ns_data["ana_state"] = ana.into();
        }
        json!({
                "trid": {
                    "trtype": status.transport.to_string(),
                    "adrfam": if config.address.0.contains(':') { "IPv6" } else { "IPv4" },
                    "traddr": config.address.0,
                    "trsvcid": config.address.1,
                    "subnqn": config.options.subnqn.to_string(),
                },
                "ctrlr_data": {
                    "cntlid": info.cntlid,
                    "vendor_id": format!("0x{:04x}", info.vendor_id),
                    "model_number": info.model,
                    "serial_number": info.serial,
                    "firmware_revision": info.firmware,
                    "subnqn": config.options.subnqn.to_string(),
                    "oacs": {
                        "security": info.oacs & 1,
                        "format": info.oacs >> 1 & 1,
                        "firmware": info.oacs >> 2 & 1,
                        "ns_manage": info.oacs >> 3 & 1,
                    },
                    "multi_ctrlr": info.multi_controller,
                    "ana_reporting": info.ana_reporting,
                },
                "vs": { "nvme_version": match tertiary {
                    0 => format!("{major}.{minor}"),
                    _ => format!("{major}.{minor}.{tertiary}"),
                } },
                "ns_data": ns_data,
        })
    }
}
