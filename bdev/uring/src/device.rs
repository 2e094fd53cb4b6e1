//! The device as the control plane sees it, and the state that its queues share.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use nacre_bdev::{Bdev, Geometry, Limits, Op, OpenError, Queue, Size, Support};
use nacre_hugepages::Pool;
use parking_lot::Mutex;
use serde_json::json;
use uuid::Uuid;

use crate::channel::Channel;
use crate::error::CreateError;
use crate::identity::Identity;
use crate::probe::{self, BlockFacts, Direct};
use crate::ring::Facts;
use crate::{Config, Product};

/// The largest transfer asked of the kernel at once; it is one request slot either way, and the
/// kernel splits it for the device.
const MAX_TRANSFER: u32 = 16 << 20;
/// The largest range deallocated or zeroed at once: bounds how long one such call keeps a kernel
/// worker from others of the same file.
const MAX_RANGE: u64 = 4 << 30;

/// A file or block device, opened by [`crate::create`].
#[derive(Debug)]
pub struct UringBdev {
    config: Config,
    path: std::path::PathBuf,
    pub(crate) file: Arc<File>,
    pub(crate) block: Option<BlockFacts>,
    pub(crate) direct: Result<Direct, String>,
    pub(crate) block_shift: u32,
    physical_block_size: u32,
    uuid: Uuid,
    identity: Identity,
    inode: Option<(u64, u64)>,
    size: Size,
    /// Whether the file turned out to take FALLOC_FL_ZERO_RANGE; assumed until it refuses.
    pub(crate) zero_range: AtomicBool,
    /// The same of punching holes.
    pub(crate) punch: AtomicBool,
    /// The page cache lost data: FLUSH and FUA fail until an operator rescans the device.
    lost: AtomicBool,
    /// Through buffers that are aligned for direct I/O, by all queues.
    pub(crate) copied: AtomicU64,
    /// The facts of the ring that was opened last.
    ring: Mutex<Option<Facts>>,
}

/// The size in blocks before and after a [`UringBdev::rescan`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rescan {
    pub before: u64,
    pub after: u64,
}

impl UringBdev {
    pub(crate) fn create(config: Config) -> Result<UringBdev, CreateError> {
        let opened = probe::open(&config)?;
        tracing::info!(
            bdev = config.name,
            path = %opened.path.display(),
            bytes = opened.size,
            block_size = opened.block_size,
            direct = opened.direct.is_ok(),
            uuid = %opened.uuid,
            "opened"
        );
        Ok(UringBdev {
            path: opened.path,
            file: Arc::new(opened.file),
            block: opened.block,
            direct: opened.direct,
            block_shift: opened.block_size.trailing_zeros(),
            physical_block_size: opened.physical_block_size,
            uuid: opened.uuid,
            identity: opened.identity,
            inode: opened.inode,
            size: Size::new(opened.size / u64::from(opened.block_size)),
            zero_range: AtomicBool::new(true),
            punch: AtomicBool::new(opened.punch),
            lost: AtomicBool::new(false),
            copied: AtomicU64::new(0),
            ring: Mutex::new(None),
            config,
        })
    }

    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The file without links and relative parts.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Which file or disk it is.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Adopts the present size of the file or device, at most `most` bytes, rounded down to whole
    /// blocks. Also trusts the page cache again if it had lost data.
    pub fn rescan(&self, most: Option<u64>) -> Result<Rescan, CreateError> {
        let size = probe::size_of(&self.file).map_err(|source| CreateError::Io {
            path: self.path.clone(),
            what: "lseek(SEEK_END)".to_owned(),
            source,
        })?;
        self.lost.store(false, Ordering::Relaxed);
        Ok(self.take_size(size.min(most.unwrap_or(size))))
    }

    /// Notices that the file became smaller before an I/O meets that. A write beyond the end of a
    /// file does not fail: it makes the file longer again, with a hole of zeroes in place of the
    /// lost data. Returns how often it became smaller.
    pub fn look(&self) -> u64 {
        self.still_has(0);
        self.size.cuts()
    }

    pub(crate) fn blocks(&self) -> u64 {
        self.size.blocks()
    }

    pub(crate) fn read_only(&self) -> bool {
        self.config.readonly
    }

    /// Whether unmap and write zeroes are offered at all.
    pub(crate) fn offers_ranges(&self) -> bool {
        self.config.fallocate.unwrap_or(true)
    }

    /// An I/O met the end: looks where it is now. Whether the range is inside.
    pub(crate) fn still_has(&self, end_byte: u64) -> bool {
        // Keep the known size if the system cannot report it.
        let Ok(size) = probe::size_of(&self.file) else {
            return true;
        };
        // Only ever down: that a device may grow under a host is for `rescan` to decide.
        if size >> self.block_shift < self.blocks() {
            self.take_size(size);
        }
        end_byte <= size
    }

    /// A flush failed while data was in the page cache.
    pub(crate) fn note_lost(&self) {
        if self.direct.is_err() && !self.lost.swap(true, Ordering::Relaxed) {
            tracing::error!(
                bdev = self.config.name,
                "written data was lost on its way from the page cache to the media; \
                 FLUSH and FUA fail until the bdev is rescanned"
            );
        }
    }

    pub(crate) fn has_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    pub(crate) fn has_write_cache(&self) -> bool {
        match &self.block {
            Some(block) if self.direct.is_ok() => block.write_cache,
            _ => true,
        }
    }

    /// Whether unmap is a real discard (of undefined contents) rather than a hole of zeroes.
    fn unmap_discards(&self) -> bool {
        let facts = self.ring.lock();
        self.block.is_some() && facts.as_ref().is_none_or(|f| f.discard)
    }

    fn take_size(&self, size: u64) -> Rescan {
        let after = size >> self.block_shift;
        let before = self.size.set(after);
        if after < before {
            tracing::warn!(
                bdev = self.config.name,
                path = %self.path.display(),
                before,
                after,
                "became smaller (blocks): I/O past the end fails"
            );
        } else if after > before {
            tracing::info!(
                bdev = self.config.name,
                before,
                after,
                "became larger (blocks)"
            );
        }
        Rescan { before, after }
    }

    fn in_blocks(&self, bytes: u64) -> u32 {
        u32::try_from(bytes >> self.block_shift).unwrap_or(u32::MAX)
    }

    pub(crate) fn count_copied(&self, bytes: usize) {
        if bytes > 0 {
            self.copied.fetch_add(bytes as u64, Ordering::Relaxed);
        }
    }
}

impl Bdev for UringBdev {
    fn name(&self) -> &str {
        &self.config.name
    }

    fn product_name(&self) -> &'static str {
        self.config.product.name()
    }

    fn uuid(&self) -> Uuid {
        self.uuid
    }

    fn geometry(&self) -> Geometry {
        Geometry {
            block_size: 1 << self.block_shift,
            blocks: self.blocks(),
            physical_block_size: self.physical_block_size,
        }
    }

    fn limits(&self) -> Limits {
        let granularity = match &self.block {
            Some(block) => self.in_blocks(block.discard_granularity),
            // A hole smaller than a file system block is zeroed, not deallocated.
            None => self.in_blocks(u64::from(self.physical_block_size)),
        };
        let boundary = self
            .block
            .map_or(0, |b| self.in_blocks(b.chunk_sectors * 512));
        Limits {
            max_blocks: MAX_TRANSFER >> self.block_shift,
            max_unmap_blocks: MAX_RANGE >> self.block_shift,
            optimal_boundary_blocks: boundary,
            unmap_granularity_blocks: granularity,
            unmap_alignment_blocks: granularity,
            volatile_cache: self.has_write_cache(),
            unmap_zeroes: !self.unmap_discards(),
            read_only: self.read_only(),
            ..Limits::unlimited(self.config.ring.depth)
        }
    }

    fn supports(&self, op: Op) -> Support {
        let writable = !self.read_only() && self.offers_ranges();
        let native = match op {
            Op::Read | Op::Flush => true,
            Op::Write => !self.read_only(),
            Op::Unmap => match &self.block {
                Some(block) => writable && block.max_discard > 0,
                None => writable && self.punch.load(Ordering::Relaxed),
            },
            // A block device zeroes by itself or has the kernel write the zeroes.
            Op::WriteZeroes => {
                writable && (self.block.is_some() || self.punch.load(Ordering::Relaxed))
            }
            Op::Compare | Op::CompareAndWrite | Op::Copy | Op::Verify => false,
        };
        if native { Support::Native } else { Support::No }
    }

    fn native_fua(&self) -> bool {
        true
    }

    fn losses(&self) -> u64 {
        self.size.cuts()
    }

    fn least_blocks(&self) -> u64 {
        self.size.least()
    }

    fn forget_least(&self) -> u64 {
        self.size.forget_least()
    }

    fn copied_bytes(&self) -> u64 {
        self.copied.load(Ordering::Relaxed)
    }

    fn open(self: Arc<Self>, pool: &Pool) -> Result<Box<dyn Queue>, OpenError> {
        let channel =
            Channel::open(Arc::clone(&self), pool).map_err(|(what, source)| OpenError {
                bdev: self.config.name.clone(),
                what,
                source,
            })?;
        let mut facts = self.ring.lock();
        *facts = Some(channel.facts().clone());
        Ok(Box::new(channel))
    }

    fn driver_specific(&self) -> serde_json::Value {
        let facts = self.ring.lock().clone();
        let mut ours = json!({
            "direct": self.direct.is_ok(),
            "queue_depth": self.config.ring.depth,
            "write_cache": self.has_write_cache(),
            "data_lost": self.has_lost(),
        });
        if let Some((device, inode)) = self.inode {
            ours["file"] = json!({ "device": device, "inode": inode });
        }
        match &self.direct {
            Ok(direct) => {
                ours["direct_memory_alignment"] = direct.memory.into();
                ours["direct_offset_alignment"] = direct.offset.into();
            }
            Err(why) => ours["buffered_because"] = why.as_str().into(),
        }
        if let Some(facts) = facts {
            ours["ring"] = facts.mode.into();
            if self.block.is_some() {
                ours["discard"] = facts.discard.into();
            }
            ours["registered_file"] = facts.fixed_file.into();
            ours["registered_buffers"] = facts.fixed_buffers.is_ok().into();
            if let Err(why) = facts.fixed_buffers {
                ours["unregistered_because"] = why.into();
            }
        }
        let filename = self.config.filename.to_string_lossy();
        match self.config.product {
            Product::Aio => json!({
                "aio": {
                    "filename": filename,
                    "block_size_override": self.config.block_size.is_some(),
                    "readonly": self.config.readonly,
                    "fallocate": self.config.fallocate.unwrap_or(true),
                    // io_uring does not block anyway.
                    "nowait": false,
                },
                "nacre": ours,
            }),
            Product::Uring => json!({ "uring": { "filename": filename }, "nacre": ours }),
        }
    }
}
