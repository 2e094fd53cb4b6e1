//! [`Namespace`]: the attributes of a namespace that its queues use: size, limits and supported
//! operations.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU32, AtomicU64, Ordering};

use nacre_bdev::{Limits, Op, Size};
use parking_lot::Mutex;
use uuid::Uuid;

/// A namespace of an attached drive.
pub(crate) struct Namespace {
    nsid: u32,
    uuid: Uuid,
    block_shift: u32,
    protected: bool,
    pub size: Size,
    read_only: AtomicBool,
    gone: AtomicBool,
    /// Limits that I/O is checked against, copied from `properties`.
    max_blocks: AtomicU32,
    max_range_blocks: AtomicU64,
    max_verify_blocks: AtomicU32,
    copy_range_blocks: AtomicU32,
    /// Supported operations: one bit each, at [`Op::index`].
    ops: AtomicU16,
    properties: Mutex<Arc<NamespaceProperties>>,
}

const _: () = assert!(Op::COUNT <= u16::BITS as usize);

/// The properties of a namespace other than its size. If the identity, block size or protection
/// information changes, the driver treats it as another namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NamespaceProperties {
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

impl NamespaceProperties {
    /// Describes the limits that differ in `now`.
    fn changes(&self, now: &Self) -> Vec<String> {
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

impl Namespace {
    pub(crate) fn new(properties: NamespaceProperties, blocks: u64, read_only: bool) -> Self {
        let namespace = Self {
            nsid: properties.nsid,
            uuid: properties.uuid,
            block_shift: properties.block_shift,
            protected: properties.protected,
            size: Size::new(blocks),
            read_only: AtomicBool::new(read_only),
            gone: AtomicBool::new(false),
            max_blocks: AtomicU32::default(),
            max_range_blocks: AtomicU64::default(),
            max_verify_blocks: AtomicU32::default(),
            copy_range_blocks: AtomicU32::default(),
            ops: AtomicU16::default(),
            properties: Mutex::new(Arc::new(properties)),
        };
        namespace.apply(&namespace.properties());
        namespace
    }

    fn apply(&self, properties: &NamespaceProperties) {
        let limits = &properties.limits;
        self.max_blocks.store(limits.max_blocks, Ordering::Relaxed);
        self.max_range_blocks
            .store(limits.max_unmap_blocks, Ordering::Relaxed);
        self.max_verify_blocks
            .store(limits.max_verify_blocks, Ordering::Relaxed);
        self.copy_range_blocks
            .store(properties.copy_range_blocks.max(1), Ordering::Relaxed);
        let bits = properties.ops.iter().enumerate();
        let ops = bits.fold(0, |ops, (at, has)| ops | u16::from(*has) << at);
        self.ops.store(ops, Ordering::Relaxed);
    }

    /// Adopts new properties of the same namespace; describes the changed limits. I/O that exceeds
    /// new limits ends with [`nacre_bdev::Status::Unsupported`].
    pub(crate) fn update(&self, properties: NamespaceProperties) -> Vec<String> {
        let before = self.properties();
        if *before == properties {
            return Vec::new();
        }
        self.apply(&properties);
        let changes = before.changes(&properties);
        *self.properties.lock() = Arc::new(properties);
        changes
    }

    #[inline]
    pub(crate) fn nsid(&self) -> u32 {
        self.nsid
    }

    pub(crate) fn uuid(&self) -> Uuid {
        self.uuid
    }

    pub(crate) fn properties(&self) -> Arc<NamespaceProperties> {
        Arc::clone(&self.properties.lock())
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
        self.properties().limits.zeroes_deallocate
    }
}
