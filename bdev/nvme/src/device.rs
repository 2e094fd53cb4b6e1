//! A namespace as a bdev.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use nacre_bdev::{Bdev, Geometry, Limits, Op, OpenError, Queue, Support};
use nacre_hugepages::Pool;
use serde_json::json;
use uuid::Uuid;

use crate::channel::Channel;
use crate::controller::Controller;
use crate::table;

pub struct NvmeBdev {
    name: String,
    controller: Arc<Controller>,
    facts: Facts,
    blocks: AtomicU64,
    read_only: AtomicBool,
    gone: AtomicBool,
}

/// What of a namespace does not change without it becoming another one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Facts {
    pub nsid: u32,
    pub uuid: Uuid,
    pub block_shift: u32,
    pub physical_block_size: u32,
    pub limits: Limits,
    /// By [`Op::index`].
    pub ops: [bool; Op::COUNT],
    /// Of one source range of a copy.
    pub copy_range_blocks: u32,
    pub nguid: [u8; 16],
    pub eui64: [u8; 8],
    /// Bytes of metadata per block, inserted and stripped by the controller.
    pub metadata_bytes: u16,
    /// That is protection information.
    pub protected: bool,
}

impl NvmeBdev {
    pub(crate) fn new(
        controller: Arc<Controller>,
        facts: Facts,
        blocks: u64,
        read_only: bool,
    ) -> NvmeBdev {
        NvmeBdev {
            name: format!("{}n{}", controller.name(), facts.nsid),
            controller,
            facts,
            blocks: AtomicU64::new(blocks),
            read_only: AtomicBool::new(read_only),
            gone: AtomicBool::new(false),
        }
    }

    #[inline]
    pub fn nsid(&self) -> u32 {
        self.facts.nsid
    }

    pub fn controller(&self) -> &Arc<Controller> {
        &self.controller
    }

    pub(crate) fn facts(&self) -> &Facts {
        &self.facts
    }

    /// Takes over what may change; says whether that was the size.
    pub(crate) fn refresh(&self, blocks: u64, read_only: bool) -> bool {
        self.read_only.store(read_only, Ordering::Relaxed);
        self.blocks.swap(blocks, Ordering::Relaxed) != blocks
    }

    /// It is not there any more, even if the controller is.
    pub(crate) fn set_gone(&self) {
        self.gone.store(true, Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Relaxed)
    }

    #[inline]
    pub(crate) fn blocks(&self) -> u64 {
        self.blocks.load(Ordering::Relaxed)
    }

    #[inline]
    pub(crate) fn block_shift(&self) -> u32 {
        self.facts.block_shift
    }

    #[inline]
    pub(crate) fn max_blocks(&self) -> u32 {
        self.facts.limits.max_blocks
    }

    pub(crate) fn max_range_blocks(&self) -> u64 {
        self.facts.limits.max_unmap_blocks
    }

    #[inline]
    pub(crate) fn is_read_only(&self) -> bool {
        self.read_only.load(Ordering::Relaxed)
    }

    pub(crate) fn max_verify_blocks(&self) -> u32 {
        self.facts.limits.max_verify_blocks
    }

    pub(crate) fn has(&self, op: Op) -> bool {
        self.facts.ops[op.index()]
    }

    pub(crate) fn copy_range_blocks(&self) -> u32 {
        self.facts.copy_range_blocks.max(1)
    }

    /// Source ranges of a copy of so many blocks.
    pub(crate) fn copy_ranges(&self, blocks: u32) -> u16 {
        blocks.div_ceil(self.copy_range_blocks()) as u16
    }

    #[inline]
    pub(crate) fn is_protected(&self) -> bool {
        self.facts.protected
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
        self.facts.uuid
    }

    fn geometry(&self) -> Geometry {
        Geometry {
            block_size: 1 << self.facts.block_shift,
            blocks: self.blocks(),
            physical_block_size: self.facts.physical_block_size,
        }
    }

    fn limits(&self) -> Limits {
        Limits {
            read_only: self.is_read_only(),
            ..self.facts.limits
        }
    }

    fn supports(&self, op: Op) -> Support {
        let writable = !(op.is_write() && self.is_read_only());
        match self.has(op) && writable {
            true => Support::Native,
            false => Support::No,
        }
    }

    fn native_fua(&self) -> bool {
        true
    }

    fn open(self: Arc<Self>, pool: &Pool) -> Result<Box<dyn Queue>, OpenError> {
        let name = self.name.clone();
        let failed = |what: String, kind: std::io::ErrorKind| OpenError {
            bdev: name.clone(),
            what,
            source: kind.into(),
        };
        if self.is_gone() {
            let what = "open a queue of a namespace that is gone".to_owned();
            return Err(failed(what, std::io::ErrorKind::NotFound));
        }
        let key = self.controller.memory_slot();
        let probe = pool.acquire((1 << self.facts.block_shift).min(pool.max_len()));
        if probe.is_some_and(|buf| buf.key(key).is_none()) {
            let what = "use the core's buffers, which the drive was not told of (it must be attached before \
                        the core opens it, and the memory registered with it)";
            return Err(failed(what.to_owned(), std::io::ErrorKind::Unsupported));
        }
        let pair = table::pair(&self.controller)
            .map_err(|error| failed(error.to_string(), error.kind()))?;
        let channel = Channel::open(pair, self, pool).map_err(|source| OpenError {
            bdev: name.clone(),
            what: "make an epoll for the queue's interrupts".to_owned(),
            source,
        })?;
        Ok(Box::new(channel))
    }

    fn losses(&self) -> u64 {
        self.controller.counters().losses.load(Ordering::Acquire)
    }

    fn driver_specific(&self) -> serde_json::Value {
        let info = self.controller.info();
        let hex = |bytes: &[u8]| -> String { bytes.iter().map(|b| format!("{b:02x}")).collect() };
        json!({
            "nvme": [{
                "pci_address": info.address,
                "trid": { "trtype": "PCIe", "traddr": info.address },
                "ctrlr_data": {
                    "cntlid": info.cntlid,
                    "vendor_id": format!("0x{:04x}", info.vid),
                    "model_number": info.model,
                    "serial_number": info.serial,
                    "firmware_revision": info.firmware,
                    "subnqn": info.subnqn,
                    "oacs": info.oacs,
                    "oncs": info.oncs,
                },
                "vs": { "nvme_version": info.version },
                "ns_data": {
                    "id": self.facts.nsid,
                    "nguid": hex(&self.facts.nguid),
                    "eui64": hex(&self.facts.eui64),
                    "metadata_bytes": self.facts.metadata_bytes,
                },
            }],
            "nacre": { "controller": self.controller.name() },
        })
    }
}
