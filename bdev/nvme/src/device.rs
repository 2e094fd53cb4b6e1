//! [`NvmeBdev`]: a namespace of a drive as a block device.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use nacre_bdev::{Bdev, Geometry, Limits, Op, OpenError, Queue, Support};
use nacre_hugepages::Pool;
use serde_json::json;
use uuid::Uuid;

use crate::channel::Channel;
use crate::namespace::Namespace;
use crate::shared::Shared;
use crate::table;

/// A namespace of an attached drive.
pub struct NvmeBdev {
    name: String,
    controller: Arc<Shared>,
    namespace: Arc<Namespace>,
}

impl NvmeBdev {
    pub(crate) fn new(controller: Arc<Shared>, namespace: Namespace) -> Self {
        Self {
            name: format!("{}n{}", controller.name(), namespace.nsid()),
            controller,
            namespace: Arc::new(namespace),
        }
    }

    pub fn nsid(&self) -> u32 {
        self.namespace.nsid()
    }

    pub(crate) fn namespace(&self) -> &Namespace {
        &self.namespace
    }
}

impl Bdev for NvmeBdev {
    fn name(&self) -> &str {
        &self.name
    }

    fn product_name(&self) -> &'static str {
        "NVMe disk"
    }

    fn uuid(&self) -> Uuid {
        self.namespace.uuid()
    }

    fn geometry(&self) -> Geometry {
        Geometry {
            block_size: 1 << self.namespace.block_shift(),
            blocks: self.namespace.blocks(),
            physical_block_size: self.namespace.properties().physical_block_size,
        }
    }

    fn limits(&self) -> Limits {
        Limits {
            read_only: self.namespace.is_read_only(),
            ..self.namespace.properties().limits
        }
    }

    fn supports(&self, op: Op) -> Support {
        let writable = !(op.is_write() && self.namespace.is_read_only());
        if self.namespace.has(op) && writable {
            Support::Native
        } else {
            Support::No
        }
    }

    fn native_fua(&self) -> bool {
        true
    }

    fn open(self: Arc<Self>, pool: &Pool) -> Result<Box<dyn Queue>, OpenError> {
        let name = self.name.clone();
        let failed = |what: String, source: std::io::Error| OpenError {
            bdev: name.clone(),
            what,
            source,
        };
        if self.namespace.is_gone() {
            let what = "open a queue of a namespace that is gone".to_owned();
            return Err(failed(what, std::io::ErrorKind::NotFound.into()));
        }
        let key = self.controller.memory_slot();
        let probe = pool.acquire((1 << self.namespace.block_shift()).min(pool.max_len()));
        if probe.is_some_and(|buf| buf.key(key).is_none()) {
            let what = "use the core's buffers, which are not registered with the drive (it must be attached before \
                        the core opens it, and the memory registered with it)";
            let source = std::io::ErrorKind::Unsupported.into();
            return Err(failed(what.to_owned(), source));
        }
        let pair = table::pair(&self.controller)
            .map_err(|error| failed(error.to_string(), error.cause()))?;
        let channel =
            Channel::open(pair, Arc::clone(&self.namespace), pool).map_err(|source| OpenError {
                bdev: name.clone(),
                what: "make an epoll for the queue's interrupts".to_owned(),
                source,
            })?;
        Ok(Box::new(channel))
    }

    fn losses(&self) -> u64 {
        self.controller.counters.losses.load(Ordering::Acquire) + self.namespace.size.cuts()
    }

    fn cuts(&self) -> u64 {
        self.namespace.size.cuts()
    }

    fn least_blocks(&self) -> u64 {
        self.namespace.size.least()
    }

    fn forget_least(&self) -> u64 {
        self.namespace.size.forget_least()
    }

    fn driver_specific(&self) -> serde_json::Value {
        let (info, properties) = (self.controller.info(), self.namespace.properties());
        let hex = |bytes: &[u8]| -> String { bytes.iter().map(|b| format!("{b:02x}")).collect() };
        json!({
            "nvme": [{
                "pci_address": info.address,
                "trid": { "trtype": "PCIe", "traddr": info.address },
                "ctrlr_data": {
                    "cntlid": info.cntlid,
                    "vendor_id": format!("0x{:04x}", info.drive.vid),
                    "model_number": info.drive.model,
                    "serial_number": info.drive.serial,
                    "firmware_revision": info.drive.firmware,
                    "subnqn": info.drive.subnqn,
                    "oacs": info.oacs,
                    "oncs": info.oncs,
                },
                "vs": { "nvme_version": info.version },
                "ns_data": {
                    "id": self.nsid(),
                    "nguid": hex(&properties.nguid),
                    "eui64": hex(&properties.eui64),
                    "metadata_bytes": properties.metadata_bytes,
                },
            }],
            "nacre": { "controller": self.controller.name() },
        })
    }
}
