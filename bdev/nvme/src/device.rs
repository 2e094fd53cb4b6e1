//! [`NvmeBdev`]: a namespace of a drive as a block device, with its size, limits and supported
//! operations.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU32, AtomicU64, Ordering};

use nacre_bdev::{Bdev, Geometry, Limits, Op, OpenError, Queue, Size, Support};
use nacre_hugepages::Pool;
use parking_lot::Mutex;
use serde_json::json;
use uuid::Uuid;

use crate::channel::Channel;
use crate::controller::Controller;
use crate::table;

/// A namespace of an attached drive.
pub struct NvmeBdev {
    name: String,
    controller: Arc<Controller>,
    nsid: u32,
    uuid: Uuid,
    block_shift: u32,
    protected: bool,
    size: Size,
    read_only: AtomicBool,
    gone: AtomicBool,
    /// Limits that I/O is checked against, copied from `facts`.
    max_blocks: AtomicU32,
    max_range_blocks: AtomicU64,
    max_verify_blocks: AtomicU32,
    copy_range_blocks: AtomicU32,
    /// Supported operations: one bit each, at [`Op::index`].
    ops: AtomicU16,
    facts: Mutex<Arc<Facts>>,
}

const _: () = assert!(Op::COUNT <= u16::BITS as usize);

/// The properties of a namespace other than its size. If the identity, block size or protection
/// information changes, the driver treats it as another namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Facts {
    pub nsid: u32,
    pub uuid: Uuid,
    pub block_shift: u32,
    pub physical_block_size: u32,
    pub limits: Limits,
    /// Supported operations, indexed by [`Op::index`].
    pub ops: [bool; Op::COUNT],
    /// Most blocks in one source range of a Copy (MSSRL).
    pub copy_range_blocks: u32,
    pub nguid: [u8; 16],
    pub eui64: [u8; 8],
    /// Bytes of metadata per block, inserted and stripped by the controller.
    pub metadata_bytes: u16,
    /// The metadata is protection information.
    pub protected: bool,
}

impl Facts {
    /// Describes the limits that differ in `now`.
    fn changes(&self, now: &Facts) -> Vec<String> {
        let mut changes = Vec::new();
        let mut compare = |what: &str, before: u64, now: u64| {
            if before != now {
                changes.push(format!("{what} {now} (before: {before})"));
            }
        };
        let (old, new) = (&self.limits, &now.limits);
        compare("max_blocks", old.max_blocks.into(), new.max_blocks.into());
        compare(
            "max_unmap_blocks",
            old.max_unmap_blocks,
            new.max_unmap_blocks,
        );
        compare(
            "max_verify_blocks",
            old.max_verify_blocks.into(),
            new.max_verify_blocks.into(),
        );
        compare(
            "atomic_blocks",
            old.atomic_blocks.into(),
            new.atomic_blocks.into(),
        );
        compare(
            "compare_and_write_blocks",
            old.compare_and_write_blocks.into(),
            new.compare_and_write_blocks.into(),
        );
        compare(
            "volatile_cache",
            old.volatile_cache.into(),
            new.volatile_cache.into(),
        );
        for op in Op::ALL {
            let (before, now) = (self.ops[op.index()], now.ops[op.index()]);
            compare(op.name(), before.into(), now.into());
        }
        changes
    }
}

impl NvmeBdev {
    pub(crate) fn new(
        controller: Arc<Controller>,
        facts: Facts,
        blocks: u64,
        read_only: bool,
    ) -> NvmeBdev {
        let bdev = NvmeBdev {
            name: format!("{}n{}", controller.name(), facts.nsid),
            controller,
            nsid: facts.nsid,
            uuid: facts.uuid,
            block_shift: facts.block_shift,
            protected: facts.protected,
            size: Size::new(blocks),
            read_only: AtomicBool::new(read_only),
            gone: AtomicBool::new(false),
            max_blocks: AtomicU32::default(),
            max_range_blocks: AtomicU64::default(),
            max_verify_blocks: AtomicU32::default(),
            copy_range_blocks: AtomicU32::default(),
            ops: AtomicU16::default(),
            facts: Mutex::new(Arc::new(facts)),
        };
        bdev.apply(&bdev.facts());
        bdev
    }

    fn apply(&self, facts: &Facts) {
        let limits = &facts.limits;
        self.max_blocks.store(limits.max_blocks, Ordering::Relaxed);
        self.max_range_blocks
            .store(limits.max_unmap_blocks, Ordering::Relaxed);
        self.max_verify_blocks
            .store(limits.max_verify_blocks, Ordering::Relaxed);
        self.copy_range_blocks
            .store(facts.copy_range_blocks.max(1), Ordering::Relaxed);
        let bits = facts.ops.iter().enumerate();
        let ops = bits.fold(0, |ops, (at, has)| ops | u16::from(*has) << at);
        self.ops.store(ops, Ordering::Relaxed);
    }

    /// Adopts new properties of the same namespace; returns the names of the changed limits. I/O
    /// that exceeds new limits ends with [`nacre_bdev::Status::Unsupported`].
    pub(crate) fn update(&self, facts: Facts) -> Vec<String> {
        let before = self.facts();
        if *before == facts {
            return Vec::new();
        }
        self.apply(&facts);
        let changes = before.changes(&facts);
        *self.facts.lock() = Arc::new(facts);
        changes
    }

    #[inline]
    pub fn nsid(&self) -> u32 {
        self.nsid
    }

    pub fn controller(&self) -> &Arc<Controller> {
        &self.controller
    }

    pub(crate) fn facts(&self) -> Arc<Facts> {
        Arc::clone(&self.facts.lock())
    }

    /// Adopts a new size and write protection. Returns true if the size changed.
    pub(crate) fn refresh(&self, blocks: u64, read_only: bool) -> bool {
        self.read_only.store(read_only, Ordering::Relaxed);
        self.size.set(blocks) != blocks
    }

    /// Marks the namespace as removed.
    pub(crate) fn set_gone(&self) {
        self.gone.store(true, Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Relaxed)
    }

    #[inline]
    pub(crate) fn blocks(&self) -> u64 {
        self.size.blocks()
    }

    #[inline]
    pub(crate) fn block_shift(&self) -> u32 {
        self.block_shift
    }

    #[inline]
    pub(crate) fn max_blocks(&self) -> u32 {
        self.max_blocks.load(Ordering::Relaxed)
    }

    pub(crate) fn max_range_blocks(&self) -> u64 {
        self.max_range_blocks.load(Ordering::Relaxed)
    }

    #[inline]
    pub(crate) fn is_read_only(&self) -> bool {
        self.read_only.load(Ordering::Relaxed)
    }

    pub(crate) fn max_verify_blocks(&self) -> u32 {
        self.max_verify_blocks.load(Ordering::Relaxed)
    }

    pub(crate) fn has(&self, op: Op) -> bool {
        self.ops.load(Ordering::Relaxed) >> op.index() & 1 != 0
    }

    /// Returns the most blocks in one source range of a Copy; at least 1.
    pub(crate) fn copy_range_blocks(&self) -> u32 {
        self.copy_range_blocks.load(Ordering::Relaxed)
    }

    #[inline]
    pub(crate) fn is_protected(&self) -> bool {
        self.protected
    }

    /// True if Write Zeroes may deallocate (DLFEAT bit 3).
    pub(crate) fn deallocates_zeroes(&self) -> bool {
        self.facts().limits.zeroes_deallocate
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
        self.uuid
    }

    fn geometry(&self) -> Geometry {
        Geometry {
            block_size: 1 << self.block_shift,
            blocks: self.blocks(),
            physical_block_size: self.facts().physical_block_size,
        }
    }

    fn limits(&self) -> Limits {
        Limits {
            read_only: self.is_read_only(),
            ..self.facts().limits
        }
    }

    fn supports(&self, op: Op) -> Support {
        let writable = !(op.is_write() && self.is_read_only());
        if self.has(op) && writable {
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
        if self.is_gone() {
            let what = "open a queue of a namespace that is gone".to_owned();
            return Err(failed(what, std::io::ErrorKind::NotFound.into()));
        }
        let key = self.controller.memory_slot();
        let probe = pool.acquire((1 << self.block_shift).min(pool.max_len()));
        if probe.is_some_and(|buf| buf.key(key).is_none()) {
            let what = "use the core's buffers, which are not registered with the drive (it must be attached before \
                        the core opens it, and the memory registered with it)";
            let source = std::io::ErrorKind::Unsupported.into();
            return Err(failed(what.to_owned(), source));
        }
        let pair = table::pair(&self.controller)
            .map_err(|error| failed(error.to_string(), error.cause()))?;
        let channel = Channel::open(pair, self, pool).map_err(|source| OpenError {
            bdev: name.clone(),
            what: "make an epoll for the queue's interrupts".to_owned(),
            source,
        })?;
        Ok(Box::new(channel))
    }

    fn losses(&self) -> u64 {
        self.controller.counters().losses.load(Ordering::Acquire) + self.size.cuts()
    }

    fn least_blocks(&self) -> u64 {
        self.size.least()
    }

    fn forget_least(&self) -> u64 {
        self.size.forget_least()
    }

    fn driver_specific(&self) -> serde_json::Value {
        let (info, facts) = (self.controller.info(), self.facts());
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
                    "id": self.nsid,
                    "nguid": hex(&facts.nguid),
                    "eui64": hex(&facts.eui64),
                    "metadata_bytes": facts.metadata_bytes,
                },
            }],
            "nacre": { "controller": self.controller.name() },
        })
    }
}
