//! Why a file cannot be a bdev: the facts, the attempt and the remedy.

use std::io;
use std::path::{Path, PathBuf};

use nacre_bdev::OpenError;

use crate::RingOptions;

#[derive(Debug, thiserror::Error)]
pub enum CreateError {
    #[error("block size {given} is not a power of two from 512 to 65536")]
    BlockSize { given: u32 },
    #[error("ring depth {given} is not from 1 to {}", RingOptions::MAX_DEPTH)]
    Depth { given: u32 },
    #[error("{}: no such file (give a `size` to create it)", path.display())]
    NotFound { path: PathBuf },
    #[error("{}: a directory, not a file or block device", path.display())]
    IsDirectory { path: PathBuf },
    #[error("{}: {kind}, not a file or block device", path.display())]
    WrongKind { path: PathBuf, kind: &'static str },
    #[error(
        "{}: permission denied by {what}; give user {uid} access to it{}",
        path.display(),
        if *readonly { "" } else { ", or open it read-only" }
    )]
    Permission {
        path: PathBuf,
        what: String,
        uid: u32,
        readonly: bool,
    },
    #[error("{}: read-only medium or file system; open it read-only (`readonly`)", path.display())]
    ReadOnlyMedium { path: PathBuf },
    #[error("{}: in use by {by}{remedy}", path.display())]
    InUse {
        path: PathBuf,
        by: String,
        remedy: &'static str,
    },
    #[error("{}: empty; give it a size (`truncate -s 1G {}`)", path.display(), path.display())]
    Empty { path: PathBuf },
    #[error(
        "{}: {size} bytes are not a multiple of the block size {block_size}; choose another \
         `block_size` or make it {} bytes (`truncate -s {} {}`)",
        path.display(),
        size.next_multiple_of(u64::from(*block_size)),
        size.next_multiple_of(u64::from(*block_size)),
        path.display()
    )]
    PartialBlock {
        path: PathBuf,
        size: u64,
        block_size: u32,
    },
    #[error(
        "{}: block size {block_size} is smaller than the device's sectors of {sector} bytes",
        path.display()
    )]
    BelowSector {
        path: PathBuf,
        block_size: u32,
        sector: u32,
    },
    #[error(
        "{}: size {given} is not a positive multiple of the block size {block_size}",
        path.display()
    )]
    CreateSize {
        path: PathBuf,
        given: u64,
        block_size: u32,
    },
    #[error("{}: no room for {size} bytes on that file system", path.display())]
    NoSpace { path: PathBuf, size: u64 },
    #[error("{}: O_DIRECT is required but {why}", path.display())]
    NoDirect { path: PathBuf, why: String },
    #[error("{}: {what}: {source}", path.display())]
    Io {
        path: PathBuf,
        what: String,
        source: io::Error,
    },
}

impl CreateError {
    /// The error number that says it best, for a protocol that has only those.
    pub fn errno(&self) -> i32 {
        use CreateError::*;
        match self {
            BlockSize { .. } | Depth { .. } | PartialBlock { .. } | Empty { .. } => libc::EINVAL,
            BelowSector { .. } | CreateSize { .. } | NoDirect { .. } => libc::EINVAL,
            NotFound { .. } => libc::ENOENT,
            IsDirectory { .. } => libc::EISDIR,
            WrongKind { .. } => libc::ENOTBLK,
            Permission { .. } => libc::EACCES,
            ReadOnlyMedium { .. } => libc::EROFS,
            InUse { .. } => libc::EBUSY,
            NoSpace { .. } => libc::ENOSPC,
            Io { source, .. } => source.raw_os_error().unwrap_or(libc::EIO),
        }
    }

    /// As the error that every bdev's opening shares; the message keeps the facts.
    pub fn for_bdev(self, bdev: &str) -> OpenError {
        OpenError {
            bdev: bdev.to_owned(),
            what: self.to_string(),
            source: io::Error::from_raw_os_error(self.errno()),
        }
    }

    /// Maps the system's error for `path` to a typed one.
    pub(crate) fn from_io(path: &Path, what: &str, readonly: bool, source: io::Error) -> Self {
        let path = path.to_owned();
        match source.raw_os_error() {
            Some(libc::ENOENT) => CreateError::NotFound { path },
            Some(libc::EISDIR) => CreateError::IsDirectory { path },
            Some(libc::EACCES | libc::EPERM) => {
                let uid = rustix::process::geteuid().as_raw();
                CreateError::Permission {
                    path,
                    what: what.to_owned(),
                    uid,
                    readonly,
                }
            }
            Some(libc::EROFS) => CreateError::ReadOnlyMedium { path },
            _ => CreateError::Io {
                path,
                what: what.to_owned(),
                source,
            },
        }
    }
}
