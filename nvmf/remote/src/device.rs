//! [`RemoteBdev`]: a namespace of a remote controller as a block device.

use std::sync::Arc;

use nacre_bdev::{Bdev, Geometry, Limits, Op, OpenError, Queue, Support};
use nacre_hugepages::Pool;
use nacre_nvmf::host::{IoQueue, LinkState, NamespaceInfo};
use nacre_nvmf_wire::log::ana::AnaState;
use nacre_reactor::Nanos;
use serde_json::{Value, json};
use uuid::Uuid;

use crate::channel::RemoteQueue;
use crate::namespace::Namespace;
use crate::shared::Shared;

/// The error of opening a queue when all granted I/O queues are in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the target grants {granted} I/O queues to this host, and all of them are open: attach it with more (num_io_queues), \
     let the target grant more, or serve on fewer cores"
)]
pub struct NoQueue {
    pub granted: u16,
}

/// A remote namespace.
pub struct RemoteBdev {
    shared: Arc<Shared>,
    name: String,
    uuid: Uuid,
    namespace: Arc<Namespace>,
}

impl RemoteBdev {
    pub(crate) fn new(
        shared: Arc<Shared>,
        name: String,
        namespace: NamespaceInfo,
        link: &LinkState,
    ) -> RemoteBdev {
        RemoteBdev {
            uuid: uuid_of(&namespace),
            name,
            namespace: Arc::new(Namespace::new(Arc::clone(&shared), namespace, link)),
            shared,
        }
    }

    pub fn nsid(&self) -> u32 {
        self.namespace.attached.nsid
    }

    /// The reason why the namespace is no longer used although it exists.
    pub fn refusal(&self) -> Option<String> {
        self.namespace.refusal()
    }

    /// Adopts the namespace's present size, or returns the reason why it cannot be used any more.
    pub(crate) fn take_over(&self, found: &NamespaceInfo, link: &LinkState) -> Option<String> {
        self.namespace.take_over(found, link)
    }

    fn fail(&self, source: std::io::Error) -> OpenError {
        OpenError {
            bdev: self.name.clone(),
            what: "open an I/O queue".to_owned(),
            source,
        }
    }
}

/// A namespace without a UUID gets one derived from its other identifiers.
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
        &self.name
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
        let granted = self.shared.status().io_queues;
        let none = || {
            let kind = match granted {
                0 => std::io::ErrorKind::NotConnected,
                _ => std::io::ErrorKind::ResourceBusy,
            };
            self.fail(std::io::Error::new(kind, NoQueue { granted }))
        };
        let qid = self.shared.qids.take(granted).ok_or_else(none)?;
        let ids = (qid.value, self.namespace.attached.nsid);
        let (options, link) = (
            self.shared.config.options.clone(),
            Arc::clone(&self.shared.link),
        );
        let dial = self.shared.connector.dialer();
        // The queue's poller passes the time later.
        let queue = IoQueue::new(options, link, dial, pool.clone(), ids, Nanos::ZERO);
        let queue = queue.map_err(|error| self.fail(error))?;
        let queue = queue.expecting(NamespaceInfo {
            blocks: self.namespace.size.blocks(),
            ..self.namespace.attached.clone()
        });
        let namespace = Arc::clone(&self.namespace);
        Ok(Box::new(RemoteQueue::new(queue, qid, namespace)))
    }

    /// Counts the ends of the association and of its I/O queues, and each shrink of the namespace.
    fn losses(&self) -> u64 {
        self.shared.link.losses() + self.namespace.size.cuts()
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
        let (config, status) = (&self.shared.config, self.shared.status());
        let link = self.shared.link.state();
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
            "nvme": [{
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
            }],
            "mp_policy": "active_passive",
            "controller": config.name,
            "state": status.state.word(),
            "losses": self.losses(),
            "refused": self.refusal(),
        })
    }
}
