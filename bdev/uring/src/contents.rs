//! Notices that a file changed while no daemon had it open.
//!
//! ```text
//!   stop   sync, then keep Left { size, modification time }
//!   start  equal: its contents are those that were left; else Changed: no block of it counts
//! ```
//!
//! A file that is cut and made as large again has the same size and identity. Only its modification
//! time shows it. After a crash nothing was kept, and nothing is compared.

use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;

use serde::{Deserialize, Serialize};

/// The contents of a closed file, as kept until it is opened again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Contents {
    /// Closed in order.
    Left {
        bytes: u64,
        /// Modification time: seconds and nanoseconds.
        modified: (i64, i64),
    },
    /// Changed while it was closed, and its user still counts on its former contents.
    Changed,
}

impl Contents {
    /// Writes a file's data and times to its disk, and returns its contents then; `None` where the
    /// file system's times are no proof.
    pub(crate) fn of_synced(file: &File) -> io::Result<Option<Contents>> {
        if !has_lasting_times(file) {
            return Ok(None);
        }
        file.sync_all()?;
        Ok(Some(Contents::of(&file.metadata()?)))
    }

    fn of(metadata: &Metadata) -> Contents {
        Contents::Left {
            bytes: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
        }
    }

    /// True if an opened file does not have these contents any more.
    pub(crate) fn are_gone(self, metadata: &Metadata) -> bool {
        metadata.is_file() && self != Contents::of(metadata)
    }
}

/// True for file systems of this machine, which change a file's modification time with its contents
/// and keep it through a restart. A server's clock or cache may change it by itself.
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
