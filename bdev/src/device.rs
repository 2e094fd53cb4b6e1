//! The trait [`Bdev`]: identity, size, limits and supported operations of a block device, and the
//! opening of its per-core queues.

use std::any::Any;
use std::sync::Arc;

use nacre_hugepages::Pool;
use uuid::Uuid;

use crate::io::Op;
use crate::listing::{ListAnswer, ListQuery};
use crate::queue::Queue;

/// The present size and block sizes of a device. A resize changes the size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Bytes per logical block: a power of two, at least 512.
    pub block_size: u32,
    pub blocks: u64,
    /// Bytes per physical block: the size of a write without a read-modify-write.
    pub physical_block_size: u32,
}

/// How a device supports an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Support {
    Native,
    /// The layer emulates it with other operations.
    Emulated,
    No,
}

/// The guarantees of a device, and the limits of its requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Largest read, write, compare or copy, in blocks. The layer splits larger requests of every
    /// kind but compare-and-write.
    pub max_blocks: u32,
    /// Largest unmap or write zeroes, in blocks.
    pub max_unmap_blocks: u64,
    /// Largest verify, in blocks.
    pub max_verify_blocks: u32,
    /// Most I/Os in flight per queue; further ones are refused as `Busy`.
    pub queue_depth: u32,
    /// Number of blocks that are written atomically even in case of a power failure; at least 1.
    pub atomic_blocks: u32,
    /// Largest compare-and-write, in blocks; at least 1 where the device has that operation.
    pub compare_and_write_blocks: u32,
    /// Reads, writes and compares should not cross multiples of this many blocks (NVMe NOIOB): the
    /// layer splits them there. 0: no such boundary.
    pub optimal_boundary_blocks: u32,
    /// Preferred size and alignment of writes (NVMe NOWS), in blocks; 0: that of a physical block,
    /// or the boundary. The layer splits nothing for it.
    pub optimal_write_blocks: u32,
    /// Preferred granularity and alignment of unmaps (NVMe NPDG, NPDA), in blocks; 0: none.
    pub unmap_granularity_blocks: u32,
    pub unmap_alignment_blocks: u32,
    /// A write may complete before it is on stable media (so FLUSH and FUA matter).
    pub volatile_cache: bool,
    /// Guarantees that all unmapped blocks read as zeroes.
    pub unmap_zeroes: bool,
    /// Writing zeroes with [`crate::Flags::DEALLOCATE`] frees blocks as an unmap does, and costs as
    /// little.
    pub zeroes_deallocate: bool,
    /// Writes are refused.
    pub read_only: bool,
    /// The device completes a read of at most this many blocks without extents with its own memory
    /// ([`crate::Completion::zero_copy`]); 0: never.
    pub zero_copy_blocks: u32,
    /// Every I/O has ended when its submission returns, except I/O that a rate limit delays. Its
    /// buffers are free after the next poll.
    pub immediate: bool,
    /// [`crate::Queue::run_sync`] executes most reads and writes, so callers should try it first.
    pub is_sync: bool,
}

impl Limits {
    /// A device that accepts requests of any size, has no volatile cache, and has no preferred
    /// boundary or granularity: the starting point of a module.
    pub fn unlimited(queue_depth: u32) -> Self {
        Self {
            max_blocks: u32::MAX,
            max_unmap_blocks: u64::MAX,
            max_verify_blocks: u32::MAX,
            queue_depth,
            atomic_blocks: 1,
            compare_and_write_blocks: u32::MAX,
            optimal_boundary_blocks: 0,
            optimal_write_blocks: 0,
            unmap_granularity_blocks: 0,
            unmap_alignment_blocks: 0,
            volatile_cache: false,
            unmap_zeroes: false,
            zeroes_deallocate: false,
            read_only: false,
            zero_copy_blocks: 0,
            immediate: false,
            is_sync: false,
        }
    }
}

impl Geometry {
    /// Size in bytes.
    pub fn bytes(&self) -> u64 {
        self.blocks * u64::from(self.block_size)
    }

    /// True if `blocks` blocks from `lba` are inside the device.
    pub fn holds(&self, lba: u64, blocks: u64) -> bool {
        lba.checked_add(blocks)
            .is_some_and(|end| end <= self.blocks)
    }
}

/// The error of opening a queue or creating a device.
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

    /// The kind of device as text, for example "Malloc disk".
    fn product_name(&self) -> &'static str;

    fn uuid(&self) -> Uuid;

    fn geometry(&self) -> Geometry;

    fn limits(&self) -> Limits;

    /// How this device supports `op`. A module returns `Native` or `No`; the layer adds emulation.
    fn supports(&self, op: Op) -> Support;

    /// True if the module implements [`crate::Flags::FUA`]. If not, and its cache is volatile, the
    /// layer sends a flush after such a write.
    fn native_fua(&self) -> bool {
        false
    }

    /// Opens a queue for the calling core. `pool`: that core's DMA memory.
    fn open(self: Arc<Self>, pool: &Pool) -> Result<Box<dyn Queue>, OpenError>;

    /// The devices below this one, by name.
    fn bases(&self) -> Vec<String> {
        Vec::new()
    }

    /// Counts events after which acknowledged data may be lost: each end of a connection to a
    /// remote target and each restart of a drive's controller (unflushed data), and each decrease
    /// of the size (data past the new end). Stacked devices and lvols count those of the devices
    /// below. Incremented before any later I/O completes, so an unchanged number after a completion
    /// proves that nothing was lost before that I/O.
    fn losses(&self) -> u64 {
        0
    }

    /// The part of [`Bdev::losses`] that counts decreases of the size: data before the new end is
    /// unharmed.
    fn cuts(&self) -> u64 {
        0
    }

    /// Number of blocks that exist now. Smaller than [`Bdev::geometry`] if the device has shrunk
    /// and the layer still announces the old size.
    fn present_blocks(&self) -> u64 {
        self.geometry().blocks
    }

    /// The smallest number of blocks that existed since the creation of the device or since
    /// [`Bdev::forget_least`]. 0: the contents were replaced while the device was closed.
    fn least_blocks(&self) -> u64 {
        self.present_blocks()
    }

    /// Resets [`Bdev::least_blocks`], once the user needs no data beyond it. Returns the old value.
    fn forget_least(&self) -> u64 {
        self.present_blocks()
    }

    /// Number of blocks that take space, at most [`Geometry::blocks`]: those written and not
    /// unmapped since, in units of allocation. `None`: unknown, or all blocks have their space
    /// reserved. Identify calls it: it waits for nothing.
    fn allocated_blocks(&self) -> Option<u64> {
        None
    }

    /// Answers with the ranges that have data. A device without [`Bdev::allocated_blocks`] answers
    /// that all blocks have.
    fn list_allocated(&self, query: ListQuery, answer: ListAnswer) {
        answer.give_all(&query);
    }

    /// Bytes that were copied because the device could not use the buffers of an I/O directly.
    /// Copies by a device in memory do not count: they are its I/O.
    fn copied_bytes(&self) -> u64 {
        0
    }

    /// True if the device supports reservations now: its queues accept [`Queue::reserve`].
    fn reserves(&self) -> bool {
        false
    }

    /// Module-specific fields of `bdev_get_bdevs`.
    fn driver_specific(&self) -> serde_json::Value {
        serde_json::json!({})
    }
}
