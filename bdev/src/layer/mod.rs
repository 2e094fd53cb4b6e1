//! The layer between a module's device and its users (namespaces, volumes). It checks and splits
//! I/O, emulates operations that the module lacks, applies rate limits, and counts statistics.
//!
//! ```text
//!   nvmf namespace, volume, perf tool
//!        │ submit(Io) / poll            ranges and buffers checked, statistics, latencies
//!   LayerQueue ── plan ──> Direct ──────────────────────────────┐   one slot, a few adds
//!        │            └──> Job: pieces, emulation, FUA ──> child │   bounded; Busy when full
//!        │                  └─ Gate: compare-and-write           │
//!   the module's queue <────────────────────────────────────────┘
//! ```
//!
//! The layer holds back I/O that the device's limits do not admit yet. It refuses ranges outside
//! the device. It splits requests that are larger than the module's limits or cross its boundaries.
//! It emulates compare, compare-and-write, write zeroes, copy, verify, and FUA (by a flush). It
//! completes a flush itself if the module has neither a flush nor a volatile cache. It holds
//! children (the requests of a job) back while the module is busy. The layer does not emulate
//! unmap: a host unmaps to release space, and writing zeroes would do the opposite. It does not
//! retry: only the user above knows whether another path is better.

mod gate;
mod job;
mod memory;
mod opens;
mod plan;
mod queue;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use nacre_hugepages::Pool;
use uuid::Uuid;

pub use self::opens::ModuleQueue;
pub use self::queue::LayerQueue;

use self::gate::Gate;
use self::memory::Memory;
use self::opens::Opens;
use self::plan::{Recipe, Shape};
use crate::device::{Bdev, Geometry, Limits, OpenError, Support};
use crate::io::Op;
use crate::listing::{ListAnswer, ListQuery};
use crate::qos::{Chain, Qos};
use crate::queue::Queue;
use crate::stats::DeviceStats;

/// Bytes of a bounce buffer: large enough that an emulated copy is bound by the device.
const BOUNCE: usize = 64 * 1024;

/// A module's device with the layer on top: one per device, itself a device.
pub struct Layer {
    bdev: Arc<dyn Bdev>,
    shape: Shape,
    /// Geometry at creation; only the size changes later, see `blocks`.
    geometry: Geometry,
    /// The size that ranges are checked against and that hosts see; see [`Layer::refresh`]. The
    /// module may have fewer blocks, and refuses I/O beyond its end.
    blocks: AtomicU64,
    gone: AtomicBool,
    /// The module refused to write zeroes although it announced that: it gets no further request.
    zeroes_refused: AtomicBool,
    stats: Arc<DeviceStats>,
    /// Gate of the emulated compare-and-write; `None`: the layer does not emulate it.
    gate: Option<Arc<Gate>>,
    opens: Arc<Opens>,
    qos: Arc<Qos>,
    /// The device's limits, and those of the devices below it.
    limits: Chain,
}

impl Layer {
    pub fn new(bdev: Arc<dyn Bdev>) -> Arc<Self> {
        Self::stacked(bdev, &[])
    }

    /// Creates a layer like [`Layer::new`], for a device on top of the devices `below`. Their
    /// limits apply to it too.
    pub fn stacked(bdev: Arc<dyn Bdev>, below: &[Arc<Self>]) -> Arc<Self> {
        let qos = Arc::new(Qos::default());
        let limits = Chain::new(&qos, below.iter().map(|layer| layer.limits.clone()));
        let shape = Shape::of(&*bdev);
        let swaps = shape.support(Op::CompareAndWrite) == Support::Emulated && !shape.read_only;
        let geometry = bdev.geometry();
        Arc::new(Self {
            blocks: AtomicU64::new(geometry.blocks),
            gone: AtomicBool::new(false),
            zeroes_refused: AtomicBool::new(false),
            stats: Arc::default(),
            opens: Arc::default(),
            gate: swaps.then(Arc::default),
            qos,
            limits,
            shape,
            geometry,
            bdev,
        })
    }

    /// The module's device.
    pub fn module(&self) -> &Arc<dyn Bdev> {
        &self.bdev
    }

    pub fn stats(&self) -> &Arc<DeviceStats> {
        &self.stats
    }

    /// The rate limits of the device; they can change at any time.
    pub fn qos(&self) -> &Arc<Qos> {
        &self.qos
    }

    /// Announces this number of blocks, even if the module has fewer: hosts that saw it before see
    /// the same size.
    pub(crate) fn announce(&self, blocks: u64) {
        self.blocks.fetch_max(blocks, Ordering::Relaxed);
    }

    /// Adopts the module's size, whether or not a user relies on the old one: call
    /// [`crate::Registry::take_size`] instead. Returns the size if it changed.
    pub fn refresh(&self) -> Option<u64> {
        let now = self.bdev.geometry().blocks;
        (self.blocks.swap(now, Ordering::Relaxed) != now).then_some(now)
    }

    /// Completes every I/O from now on with [`crate::Status::Gone`]. I/O that is already in the
    /// module completes there.
    pub fn set_gone(&self) {
        self.gone.store(true, Ordering::Relaxed);
    }

    #[inline]
    pub fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Relaxed)
    }

    /// Opens a queue like [`Bdev::open`], of the type itself, for calls without indirection.
    pub fn open_queue(self: &Arc<Self>, pool: &Pool) -> Result<LayerQueue, OpenError> {
        let memory = self.memory(pool)?;
        let module = self.open_module(pool)?;
        Ok(LayerQueue::new(self, module, memory, pool))
    }

    /// The module's own queue, for a device stacked on this one.
    pub fn open_module(&self, pool: &Pool) -> Result<ModuleQueue, OpenError> {
        // Count the queue before the check: a removal either sees this queue, or is seen here.
        let open = self.opens.open();
        if self.is_gone() {
            return Err(OpenError {
                bdev: self.name().to_owned(),
                what: "open a queue of a device that is being removed".to_owned(),
                source: std::io::ErrorKind::NotFound.into(),
            });
        }
        let inner = Arc::clone(&self.bdev).open(pool)?;
        Ok(ModuleQueue::new(inner, open))
    }

    /// The recipe of a job after the module's refusals so far.
    fn recipe(&self, planned: Recipe) -> Recipe {
        match planned {
            Recipe::Pieces(Op::WriteZeroes) if self.zeroes_refused.load(Ordering::Relaxed) => {
                Recipe::WriteZeroBuffer
            }
            _ => planned,
        }
    }

    #[cold]
    fn note_refusal(&self) {
        if !self.zeroes_refused.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                bdev = self.name(),
                "the device says that it can write zeroes, and refuses: buffers of zeroes are written instead"
            );
        }
    }

    /// Number of open queues on all cores.
    pub fn open_queues(&self) -> usize {
        self.opens.count()
    }

    /// Calls `call` once no queue is open: now, or on the thread that closes the last one.
    pub fn when_closed(&self, call: Box<dyn FnOnce() + Send>) {
        self.opens.when_none(call);
    }

    fn memory(&self, pool: &Pool) -> Result<Memory, OpenError> {
        let block = self.shape.block_size as usize;
        let len = BOUNCE.max(block).min(pool.max_len()) / block * block;
        if !self.shape.bounces() {
            return Ok(Memory::none(len));
        }
        let reserved = if len > 0 {
            Memory::reserve(pool, len)
        } else {
            None
        };
        reserved.ok_or_else(|| OpenError {
            bdev: self.bdev.name().to_owned(),
            what: format!(
                "reserve 2 buffers of {} bytes to emulate what the module lacks (give the core a larger pool)",
                len.max(block)
            ),
            source: std::io::ErrorKind::OutOfMemory.into(),
        })
    }
}

impl Bdev for Layer {
    fn name(&self) -> &str {
        self.bdev.name()
    }

    fn product_name(&self) -> &'static str {
        self.bdev.product_name()
    }

    fn uuid(&self) -> Uuid {
        self.bdev.uuid()
    }

    fn geometry(&self) -> Geometry {
        Geometry {
            blocks: self.blocks.load(Ordering::Relaxed),
            ..self.geometry
        }
    }

    /// The module's limits, without those that the layer lifts by splitting, and with the atomic
    /// and zero-copy sizes that remain with splitting.
    fn limits(&self) -> Limits {
        let limits = self.bdev.limits();
        Limits {
            max_blocks: u32::MAX,
            max_unmap_blocks: u64::MAX,
            max_verify_blocks: u32::MAX,
            // A write that crosses a boundary is split, so it is not atomic.
            atomic_blocks: match self.shape.boundary_blocks {
                0 => limits.atomic_blocks.min(self.shape.max_blocks),
                _ => 1,
            },
            compare_and_write_blocks: self.shape.swap_blocks(),
            zero_copy_blocks: self.shape.zero_copy_blocks,
            ..limits
        }
    }

    fn supports(&self, op: Op) -> Support {
        self.shape.support(op)
    }

    /// Always true: FUA is native or emulated by a flush.
    fn native_fua(&self) -> bool {
        true
    }

    fn open(self: Arc<Self>, pool: &Pool) -> Result<Box<dyn Queue>, OpenError> {
        Ok(Box::new(self.open_queue(pool)?))
    }

    fn bases(&self) -> Vec<String> {
        self.bdev.bases()
    }

    fn losses(&self) -> u64 {
        self.bdev.losses()
    }

    fn cuts(&self) -> u64 {
        self.bdev.cuts()
    }

    fn present_blocks(&self) -> u64 {
        self.bdev.present_blocks()
    }

    fn least_blocks(&self) -> u64 {
        self.bdev.least_blocks()
    }

    fn forget_least(&self) -> u64 {
        self.bdev.forget_least()
    }

    fn allocated_blocks(&self) -> Option<u64> {
        // The announced size may be that of before a resize.
        let blocks = self.geometry().blocks;
        self.bdev.allocated_blocks().map(|taken| taken.min(blocks))
    }

    fn list_allocated(&self, query: ListQuery, answer: ListAnswer) {
        self.bdev.list_allocated(query, answer);
    }

    fn reserves(&self) -> bool {
        self.bdev.reserves()
    }

    fn driver_specific(&self) -> serde_json::Value {
        self.bdev.driver_specific()
    }
}
