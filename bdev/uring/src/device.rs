//! The file bdev: its identity, geometry, limits and rescan. Control plane only; the data path is
//! in [`crate::channel`].

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use nacre_bdev::{Bdev, Geometry, Limits, Op, OpenError, Queue, Size, Support};
use nacre_hugepages::Pool;
use parking_lot::Mutex;
use serde_json::json;
use uuid::Uuid;

use crate::channel::Channel;
use crate::contents::Contents;
use crate::error::CreateError;
use crate::file::{OpenFile, Rescan};
use crate::identity::Identity;
use crate::probe;
use crate::ring::Facts;
use crate::{Config, Product};

/// Most bytes per read or write. The kernel splits it for the device.
const MAX_TRANSFER: u32 = 16 << 20;
/// Most bytes per deallocation or zeroing. This limits how long one call occupies a kernel worker.
const MAX_RANGE: u64 = 4 << 30;

/// A file or block device, opened by [`crate::create`].
#[derive(Debug)]
pub struct UringBdev {
    pub(crate) file: Arc<OpenFile>,
    physical_block_size: u32,
    uuid: Uuid,
    identity: Identity,
    inode: Option<(u64, u64)>,
    /// The features of the ring that was opened last.
    ring: Mutex<Option<Facts>>,
}

impl UringBdev {
    pub(crate) fn create(config: Config) -> Result<Self, CreateError> {
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
        let size = Size::new(opened.size / u64::from(opened.block_size));
        if opened.changed {
            tracing::warn!(
                bdev = config.name,
                path = %opened.path.display(),
                "the file changed while no daemon had it open; if a replica is on it, that is filled anew"
            );
            size.note(0);
        }
        Ok(Self {
            physical_block_size: opened.physical_block_size,
            uuid: opened.uuid,
            identity: opened.identity,
            inode: opened.inode,
            ring: Mutex::new(None),
            file: Arc::new(OpenFile {
                path: opened.path,
                file: Arc::new(opened.file),
                block: opened.block,
                direct: opened.direct,
                block_shift: opened.block_size.trailing_zeros(),
                size,
                zero_range: AtomicBool::new(true),
                punch: AtomicBool::new(opened.punch),
                lost: AtomicBool::new(false),
                copied: AtomicU64::new(0),
                config,
            }),
        })
    }

    pub fn config(&self) -> &Config {
        &self.file.config
    }

    /// The canonical path: no symbolic links and no relative parts.
    pub fn path(&self) -> &Path {
        &self.file.path
    }

    /// The identity of the file or disk.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// The contents to store while the file is open: [`Contents::Changed`] if the file changed
    /// while it was closed, or was emptied since, and its user has not accepted that; otherwise
    /// `None`.
    pub fn contents(&self) -> Option<Contents> {
        (self.file.size.least() == 0).then_some(Contents::Changed)
    }

    /// Syncs the file after its last I/O, and returns the contents to store. `None`: a block
    /// device, a read-only file, or a file system with unreliable modification times.
    pub fn leave(&self) -> io::Result<Option<Contents>> {
        if self.file.block.is_some() || self.file.read_only() {
            return Ok(None);
        }
        match self.contents() {
            Some(changed) => Ok(Some(changed)),
            None => Contents::of_synced(&self.file.file),
        }
    }

    /// Adopts the present size of the file or device, at most `most` bytes, rounded down to whole
    /// blocks. Also clears the error state after a failed write-back.
    pub fn rescan(&self, most: Option<u64>) -> Result<Rescan, CreateError> {
        self.file.rescan(most)
    }

    /// Checks whether the file became smaller. Call this periodically: a write beyond the end of a
    /// file does not fail, but extends the file with a hole of zeroes in place of the lost data.
    /// Returns how often the file became smaller since it was opened.
    pub fn check_size(&self) -> u64 {
        self.file.check_size()
    }

    /// True if unmap is a discard, after which the contents are undefined; false if it punches a
    /// hole of zeroes.
    fn unmap_discards(&self) -> bool {
        let facts = self.ring.lock();
        self.file.block.is_some() && facts.as_ref().is_none_or(|f| f.discard)
    }

    fn in_blocks(&self, bytes: u64) -> u32 {
        u32::try_from(bytes >> self.file.block_shift).unwrap_or(u32::MAX)
    }
}

impl Bdev for UringBdev {
    fn name(&self) -> &str {
        &self.file.config.name
    }

    fn product_name(&self) -> &'static str {
        self.file.config.product.name()
    }

    fn uuid(&self) -> Uuid {
        self.uuid
    }

    fn geometry(&self) -> Geometry {
        Geometry {
            block_size: 1 << self.file.block_shift,
            blocks: self.file.blocks(),
            physical_block_size: self.physical_block_size,
        }
    }

    fn limits(&self) -> Limits {
        let granularity = match &self.file.block {
            Some(block) => self.in_blocks(block.discard_granularity),
            // A hole smaller than a file system block is zeroed, not deallocated.
            None => self.in_blocks(u64::from(self.physical_block_size)),
        };
        let boundary = self
            .file
            .block
            .map_or(0, |b| self.in_blocks(b.chunk_sectors * 512));
        Limits {
            max_blocks: MAX_TRANSFER >> self.file.block_shift,
            max_unmap_blocks: MAX_RANGE >> self.file.block_shift,
            optimal_boundary_blocks: boundary,
            unmap_granularity_blocks: granularity,
            unmap_alignment_blocks: granularity,
            volatile_cache: self.file.has_write_cache(),
            unmap_zeroes: !self.unmap_discards(),
            read_only: self.file.read_only(),
            ..Limits::unlimited(self.file.config.ring.depth)
        }
    }

    fn supports(&self, op: Op) -> Support {
        let writable = !self.file.read_only() && self.file.supports_ranges();
        let native = match op {
            Op::Read | Op::Flush => true,
            Op::Write => !self.file.read_only(),
            Op::Unmap => match &self.file.block {
                Some(block) => writable && block.max_discard > 0,
                None => writable && self.file.punch.load(Ordering::Relaxed),
            },
            // A block device zeroes by itself, or the kernel writes the zeroes.
            Op::WriteZeroes => {
                writable && (self.file.block.is_some() || self.file.punch.load(Ordering::Relaxed))
            }
            Op::Compare | Op::CompareAndWrite | Op::Copy | Op::Verify => false,
        };
        if native { Support::Native } else { Support::No }
    }

    fn native_fua(&self) -> bool {
        true
    }

    fn losses(&self) -> u64 {
        self.file.size.cuts()
    }

    fn cuts(&self) -> u64 {
        self.file.size.cuts()
    }

    fn least_blocks(&self) -> u64 {
        self.file.size.least()
    }

    fn forget_least(&self) -> u64 {
        self.file.size.forget_least()
    }

    fn copied_bytes(&self) -> u64 {
        self.file.copied.load(Ordering::Relaxed)
    }

    fn open(self: Arc<Self>, pool: &Pool) -> Result<Box<dyn Queue>, OpenError> {
        let channel =
            Channel::open(Arc::clone(&self.file), pool).map_err(|(what, source)| OpenError {
                bdev: self.file.config.name.clone(),
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
            "direct": self.file.direct.is_ok(),
            "queue_depth": self.file.config.ring.depth,
            "write_cache": self.file.has_write_cache(),
            "data_lost": self.file.has_lost(),
        });
        if let Some((device, inode)) = self.inode {
            ours["file"] = json!({ "device": device, "inode": inode });
        }
        match &self.file.direct {
            Ok(direct) => {
                ours["direct_memory_alignment"] = direct.memory.into();
                ours["direct_offset_alignment"] = direct.offset.into();
            }
            Err(why) => ours["buffered_because"] = why.as_str().into(),
        }
        if let Some(facts) = facts {
            ours["ring"] = facts.mode.into();
            if self.file.block.is_some() {
                ours["discard"] = facts.discard.into();
            }
            ours["registered_file"] = facts.fixed_file.into();
            ours["registered_buffers"] = facts.fixed_buffers.is_ok().into();
            if let Err(why) = facts.fixed_buffers {
                ours["unregistered_because"] = why.into();
            }
        }
        let filename = self.file.config.filename.to_string_lossy();
        match self.file.config.product {
            Product::Aio => json!({
                "aio": {
                    "filename": filename,
                    "block_size_override": self.file.config.block_size.is_some(),
                    "readonly": self.file.config.readonly,
                    "fallocate": self.file.config.fallocate.unwrap_or(true),
                    // Not needed: io_uring does not block.
                    "nowait": false,
                },
                "nacre": ours,
            }),
            Product::Uring => json!({ "uring": { "filename": filename }, "nacre": ours }),
        }
    }
}
