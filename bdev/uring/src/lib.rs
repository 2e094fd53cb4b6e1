//! The file module: a regular file or a block device as a bdev, with io_uring on the reactor's own
//! core.
//!
//! ```text
//!   device.rs   UringBdev: identity, geometry, limits; rescan          control plane
//!   probe.rs    opening: O_DIRECT and its alignment, locks, sysfs      control plane
//!   identity.rs which file or disk it is                               control plane
//!   channel.rs  Channel: one core's queue; chooses the next command   data path
//!   command.rs  Command: one operation as a submission queue entry     data path
//!   ring.rs     Ring: io_uring and the buffers the kernel works on     data path, all `unsafe`
//!   setup.rs    the ring's flags, by kernel                            control plane
//! ```
//!
//! - **Direct where possible.** O_DIRECT is used when the file supports it at the requested block
//!   size; otherwise I/O goes through the page cache and `bdev_get_bdevs` gives the reason. The two
//!   are never mixed on one file: a page written back late would undo a direct write beside it. A
//!   buffer that is not aligned for direct I/O is copied through one that is.
//! - **FLUSH and FUA reach the media**: `fdatasync` (`fsync` on a block device) and `RWF_DSYNC`.
//!   When the page cache fails to write back, the kernel drops the data and reports it once; this
//!   module keeps failing FLUSH and FUA until [`UringBdev::rescan`].
//! - **The write cache is reported truthfully**: present for files and for buffered I/O, and for a
//!   block device as `queue/write_cache` says.
//! - **One user at a time**: files are locked (`flock`; shared if read-only), block devices opened
//!   `O_EXCL`. A file on a file system without locks is used without one.
//!
//! This module does not emulate operations (compare, copy and the like belong to the layer). It
//! does not watch the file either: [`UringBdev::rescan`] notices a size change, and
//! [`UringBdev::check_size`] or an I/O beyond the end notices a smaller size.

#![deny(unsafe_code)]

use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

mod channel;
mod command;
mod contents;
mod device;
mod error;
mod file;
mod identity;
mod probe;
mod ring;
mod setup;

#[cfg(test)]
mod tests;

pub use contents::Contents;
pub use device::UringBdev;
pub use error::CreateError;
pub use file::Rescan;
pub use identity::Identity;
pub use setup::probe;

/// The parameters of a file bdev.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    pub name: String,
    /// A regular file or a block device.
    pub filename: PathBuf,
    /// Bytes per logical block. Default: the alignment of direct I/O, or without it the sector size
    /// (512 for a file); at least 512.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block_size: Option<u32>,
    #[serde(default)]
    pub readonly: bool,
    /// Creates a missing file, or extends an empty one, to this many bytes. A file with contents
    /// keeps its size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
    /// Allocates the space of a file that `size` creates or extends.
    #[serde(default)]
    pub preallocate: bool,
    /// Supports unmap and write zeroes if the file does. Default: true.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fallocate: Option<bool>,
    /// `true`: require O_DIRECT; `false`: use the page cache; default: O_DIRECT if possible.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub direct: Option<bool>,
    /// The identity of the file or disk at the previous opening. Another file or disk is refused,
    /// and no file is created or extended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity: Option<Identity>,
    /// The contents that were stored when the file was closed. If they differ, no block is trusted
    /// ([`nacre_bdev::Bdev::least_blocks`]).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub contents: Option<Contents>,
    /// UUID of the bdev. Default: derived from the file's path and inode, or from the disk's serial
    /// number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<Uuid>,
    #[serde(default)]
    pub product: Product,
    #[serde(default)]
    pub ring: RingOptions,
}

impl Config {
    pub fn new(name: impl Into<String>, filename: impl Into<PathBuf>) -> Self {
        Self {
            name: name.into(),
            filename: filename.into(),
            block_size: None,
            readonly: false,
            size: None,
            preallocate: false,
            fallocate: None,
            direct: None,
            identity: None,
            contents: None,
            uuid: None,
            product: Product::default(),
            ring: RingOptions::default(),
        }
    }
}

/// The SPDK module (aio or uring) as which SPDK's RPC methods show the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Product {
    Aio,
    #[default]
    Uring,
}

impl Product {
    /// [`nacre_bdev::Bdev::product_name`] of the device.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Aio => "AIO disk",
            Self::Uring => "URING bdev",
        }
    }
}

/// Settings of each core's ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RingOptions {
    /// I/Os in flight per core and bdev, 1 to [`RingOptions::MAX_DEPTH`].
    pub depth: u32,
    /// Registers the core's buffer pool with the kernel, if RLIMIT_MEMLOCK allows it.
    pub registered_buffers: bool,
    /// Uses `IORING_SETUP_DEFER_TASKRUN` if the kernel supports it: completions are processed when
    /// the reactor polls.
    pub defer_taskrun: bool,
}

impl RingOptions {
    /// io_uring takes at most 32768 entries, and a slot needs two.
    pub const MAX_DEPTH: u32 = 16384;
}

impl Default for RingOptions {
    fn default() -> Self {
        Self {
            depth: 512,
            registered_buffers: true,
            defer_taskrun: true,
        }
    }
}

/// Opens the file or block device. Blocks for about a second while another process uses it. Blocks
/// for up to 12 s while the kernel still ends the I/O of a killed process. So call it from the
/// control plane.
pub fn create(config: Config) -> Result<Arc<UringBdev>, CreateError> {
    UringBdev::create(config).map(Arc::new)
}
