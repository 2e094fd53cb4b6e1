//! A block device as the control plane sees it: identity, size, limits, and a way to open queues.

use std::any::Any;
use std::sync::Arc;

use nacre_hugepages::Pool;
use uuid::Uuid;

use crate::io::Op;
use crate::queue::Queue;

/// Size and shape, as of now; a resize changes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Bytes per logical block: a power of two, at least 512.
    pub block_size: u32,
    pub blocks: u64,
    /// Bytes per physical block: the size of a write without a read-modify-write.
    pub physical_block_size: u32,
}

/// How an operation is carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Support {
    Native,
    /// The layer above the module performs the operation with other operations.
    Emulated,
    No,
}

/// The promises of a device and the limits of its requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Largest read, write or compare, in blocks. The layer splits larger ones.
    pub max_blocks: u32,
    /// Largest unmap or write zeroes, in blocks.
    pub max_unmap_blocks: u64,
    /// Largest verify, in blocks.
    pub max_verify_blocks: u32,
    /// I/Os that one queue takes before it is `Busy`.
    pub queue_depth: u32,
    /// Blocks written atomically even through a power failure; at least 1.
    pub atomic_blocks: u32,
    /// Largest compare-and-write, in blocks; at least 1 where the device has that operation.
    pub compare_and_write_blocks: u32,
    /// I/Os should not cross multiples of this many blocks; 0: no such boundary.
    pub optimal_boundary_blocks: u32,
    /// Preferred granularity and alignment of unmaps, in blocks; 0: none.
    pub unmap_granularity_blocks: u32,
    pub unmap_alignment_blocks: u32,
    /// A write may complete before it is on stable media (so FLUSH and FUA matter).
    pub volatile_cache: bool,
    /// Unmapped blocks read as zeroes: all of them, for sure.
    pub unmap_zeroes: bool,
    /// Writing zeroes with [`crate::Flags::DEALLOCATE`] frees blocks as an unmap does, and costs as
    /// little.
    pub zeroes_deallocate: bool,
    /// Writes are refused.
    pub read_only: bool,
    /// A read of at most so many blocks that has no extents is answered with the device's own
    /// memory ([`crate::Completion::lent`]); 0: it lends nothing.
    pub lend_blocks: u32,
    /// Every I/O is finished when its submission returns, except I/O that a rate limit holds back:
    /// its buffers are free again with the next poll.
    pub immediate: bool,
    /// [`crate::Queue::at_once`] carries most reads and writes out: it is worth trying first.
    pub at_once: bool,
}

impl Limits {
    /// A device that accepts every request, completes only stored data, and has no preferences: the
    /// starting point of a module.
    pub fn unlimited(queue_depth: u32) -> Limits {
        Limits {
            max_blocks: u32::MAX,
            max_unmap_blocks: u64::MAX,
            max_verify_blocks: u32::MAX,
            queue_depth,
            atomic_blocks: 1,
            compare_and_write_blocks: u32::MAX,
            optimal_boundary_blocks: 0,
            unmap_granularity_blocks: 0,
            unmap_alignment_blocks: 0,
            volatile_cache: false,
            unmap_zeroes: false,
            zeroes_deallocate: false,
            read_only: false,
            lend_blocks: 0,
            immediate: false,
            at_once: false,
        }
    }
}

impl Geometry {
    /// Bytes in all.
    pub fn bytes(&self) -> u64 {
        self.blocks * u64::from(self.block_size)
    }

    /// Whether `blocks` from `lba` lie inside the device.
    pub fn holds(&self, lba: u64, blocks: u64) -> bool {
        lba.checked_add(blocks)
            .is_some_and(|end| end <= self.blocks)
    }
}

/// Why a queue could not be opened, or a device not be made.
#[derive(Debug, thiserror::Error)]
#[error("bdev \"{bdev}\": {what}: {source}")]
pub struct OpenError {
    pub bdev: String,
    /// The failed call, e.g. `open("/x", O_DIRECT)`.
    pub what: String,
    pub source: std::io::Error,
}

/// A block device. Shared by all cores and the control plane; I/O goes through per-core queues.
///
/// [`Any`] gives management the module's own type back, for operations that only it has.
pub trait Bdev: Any + Send + Sync {
    fn name(&self) -> &str;

    /// What kind of device it is, for people: "Malloc disk", "URING bdev", ….
    fn product_name(&self) -> &'static str;

    fn uuid(&self) -> Uuid;

    fn geometry(&self) -> Geometry;

    fn limits(&self) -> Limits;

    /// How `op` is carried out by the module itself (`Native` or `No`); the layer answers for the
    /// emulation.
    fn supports(&self, op: Op) -> Support;

    /// Whether the module honours [`crate::Flags::FUA`] itself. If not, and its cache is volatile,
    /// the layer above follows such a write with a flush.
    fn native_fua(&self) -> bool {
        false
    }

    /// Opens a queue for the calling core, which keeps it. `pool` is that core's DMA memory.
    fn open(self: Arc<Self>, pool: &Pool) -> Result<Box<dyn Queue>, OpenError>;

    /// The devices below this one, by name.
    fn bases(&self) -> Vec<String> {
        Vec::new()
    }

    /// Grows whenever the device may have lost acknowledged data. That is each end of a connection
    /// to a remote target (unflushed data), and each decrease of the size (data past the new end).
    /// It grows before any later I/O completes. So if the number is unchanged after an I/O
    /// completed, nothing was lost before that I/O.
    fn losses(&self) -> u64 {
        0
    }

    /// The blocks that exist now: fewer than [`Bdev::geometry`] has, where a layer keeps the size
    /// that it announced to hosts.
    fn present_blocks(&self) -> u64 {
        self.geometry().blocks
    }

    /// The fewest blocks that were behind it since it was made, or since [`Bdev::forget_least`].
    /// 0: its contents were replaced while nothing had it open.
    fn least_blocks(&self) -> u64 {
        self.present_blocks()
    }

    /// The user needs no data from beyond the fewest blocks. Returns the fewest blocks.
    fn forget_least(&self) -> u64 {
        self.present_blocks()
    }

    /// Bytes that were copied because the device could not use the buffers of an I/O directly.
    /// Copies by a device in memory do not count: they are its I/O.
    fn copied_bytes(&self) -> u64 {
        0
    }

    /// True if hosts that share the device can exclude each other by reservations, as of now: its
    /// queues accept [`Queue::reserve`].
    fn reserves(&self) -> bool {
        false
    }

    /// Module-specific facts for `bdev_get_bdevs`.
    fn driver_specific(&self) -> serde_json::Value {
        serde_json::json!({})
    }
}
