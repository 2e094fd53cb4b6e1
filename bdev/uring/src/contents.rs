//! Detects that a file changed while no daemon had it open, from its size and modification time.
//!
//! ```text
//!   stop   sync the file, then store Left { size, modification time }
//!   start  equal: the contents are unchanged; different: Changed, no block is trusted
//! ```
//!
//! A file that was truncated and extended again has the same size and identity; only its
//! modification time differs. After a crash nothing was stored, so nothing is compared.

use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;

use serde::{Deserialize, Serialize};

/// The stored description of a closed file's contents.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Contents {
    /// The file was closed after a sync.
    Left {
        bytes: u64,
        /// Modification time: seconds and nanoseconds.
        modified: (i64, i64),
    },
    /// The file changed while it was closed, and its user (a volume) has not accepted that yet.
    Changed,
}

impl Contents {
    /// Syncs a file and describes its contents. `None`: the file system's modification times are
    /// not reliable.
    pub(crate) fn of_synced(file: &File) -> io::Result<Option<Self>> {
        if !has_lasting_times(file) {
            return Ok(None);
        }
        file.sync_all()?;
        Ok(Some(Self::of(&file.metadata()?)))
    }

    fn of(metadata: &Metadata) -> Self {
        Self::Left {
            bytes: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
        }
    }

    /// True if the opened file has other contents.
    pub(crate) fn are_gone(self, metadata: &Metadata) -> bool {
        metadata.is_file() && self != Self::of(metadata)
    }
}

/// True for local file systems, which change the modification time with every change of the
/// contents and preserve it over a restart. A file server may change it for other reasons.
fn has_lasting_times(file: &File) -> bool {
    const EXT: u64 = 0xef53;
    const XFS: u64 = 0x5846_5342;
    const BTRFS: u64 = 0x9123_683e;
    const F2FS: u64 = 0xf2f5_2010;
    const ZFS: u64 = 0x2fc1_2fc1;
    const BCACHEFS: u64 = 0xca45_1a4e;
    const TMPFS: u64 = 0x0102_1994;
    const OVERLAY: u64 = 0x794c_7630;
    rustix::fs::fstatfs(file).is_ok_and(|fs| {
        [EXT, XFS, BTRFS, F2FS, ZFS, BCACHEFS, TMPFS, OVERLAY]
            .contains(&(fs.f_type as u64 & 0xffff_ffff))
    })
}
