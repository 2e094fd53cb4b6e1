//! The open file of a file bdev: its descriptor and state, shared by the device and its queues.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use nacre_bdev::Size;

use crate::Config;
use crate::error::CreateError;
use crate::probe::{self, BlockFacts, Direct};

#[derive(Debug)]
pub(crate) struct OpenFile {
    pub config: Config,
    /// Canonical path: no symbolic links and no relative parts.
    pub path: PathBuf,
    pub file: Arc<File>,
    pub block: Option<BlockFacts>,
    pub direct: Result<Direct, String>,
    pub block_shift: u32,
    pub size: Size,
    /// True until the file refuses FALLOC_FL_ZERO_RANGE.
    pub zero_range: AtomicBool,
    /// True if holes can be punched: the result of the probe, until the file refuses.
    pub punch: AtomicBool,
    /// The page cache lost data: FLUSH and FUA fail until an operator rescans the device.
    pub lost: AtomicBool,
    /// Bytes that all queues copied through buffers aligned for direct I/O.
    pub copied: AtomicU64,
}

/// The size in blocks before and after a [`crate::UringBdev::rescan`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rescan {
    pub before: u64,
    pub after: u64,
}

impl OpenFile {
    /// See [`crate::UringBdev::rescan`].
    pub(crate) fn rescan(&self, most: Option<u64>) -> Result<Rescan, CreateError> {
        let size = probe::size_of(&self.file).map_err(|source| CreateError::Io {
            path: self.path.clone(),
            what: "lseek(SEEK_END)".to_owned(),
            source,
        })?;
        self.lost.store(false, Ordering::Relaxed);
        Ok(self.take_size(size.min(most.unwrap_or(size))))
    }

    /// See [`crate::UringBdev::check_size`].
    pub(crate) fn check_size(&self) -> u64 {
        self.still_has(0);
        self.size.cuts()
    }

    pub(crate) fn blocks(&self) -> u64 {
        self.size.blocks()
    }

    pub(crate) fn read_only(&self) -> bool {
        self.config.readonly
    }

    /// True if the device supports unmap and write zeroes.
    pub(crate) fn supports_ranges(&self) -> bool {
        self.config.fallocate.unwrap_or(true)
    }

    /// Updates the size after an I/O that met the end of the file. Returns true if `end_byte` is
    /// still inside.
    pub(crate) fn still_has(&self, end_byte: u64) -> bool {
        // Keep the known size if the system cannot report it.
        let Ok(size) = probe::size_of(&self.file) else {
            return true;
        };
        // Only reduce the size here. Only `rescan` enlarges a device.
        if size >> self.block_shift < self.blocks() {
            self.take_size(size);
        }
        end_byte <= size
    }

    /// Records a failed flush of the page cache: data were lost.
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

    pub(crate) fn count_copied(&self, bytes: usize) {
        if bytes > 0 {
            self.copied.fetch_add(bytes as u64, Ordering::Relaxed);
        }
    }
}
