//! The errors of creating or rescanning a file bdev, with the facts and the remedy in their text.

use std::io;
use std::path::{Path, PathBuf};

use nacre_bdev::{BLOCK_SIZES, OpenError};

use crate::{Config, RingOptions};

#[derive(Debug, thiserror::Error)]
pub enum CreateError {
    #[error(
        "block size {given} is not a power of two from {} to {}",
        BLOCK_SIZES.start(), BLOCK_SIZES.end()
    )]
    BlockSize { given: u32 },
    #[error("ring depth {given} is not from 1 to {}", RingOptions::MAX_DEPTH)]
    Depth { given: u32 },
    #[error("{}: no such file (give a `size` to create it)", path.display())]
    NotFound { path: PathBuf },
    #[error(
        "{}: no such file, but \"{bdev}\" was on it: bring it back{}",
        path.display(),
        if *can_be_made { format!(", or have an empty one made with `nacre bdev accept {bdev}`") } else { String::new() }
    )]
    Gone {
        path: PathBuf,
        bdev: String,
        can_be_made: bool,
    },
    #[error(
        "{}: {found}: put back what \"{bdev}\" was on, or take this one with `nacre bdev accept {bdev}` if it \
         has the same data",
        path.display()
    )]
    Other {
        path: PathBuf,
        bdev: String,
        found: String,
    },
    #[error(
        "{}: there is no directory {}; make the directory, or mount its file system",
        path.display(), folder.display()
    )]
    NoFolder { path: PathBuf, folder: PathBuf },
    #[error("{}: a link to {}, which is not there", path.display(), to.display())]
    Dangling { path: PathBuf, to: PathBuf },
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
    #[error(
        "{}: empty; {}",
        path.display(),
        if *is_block { "put a medium in".to_owned() } else { format!("give it a size (`truncate -s 1G {}`)", path.display()) }
    )]
    Empty { path: PathBuf, is_block: bool },
    #[error(
        "{}: {size} bytes are not a multiple of the block size {block_size}; {}",
        path.display(),
        whole_blocks(path, *size, *block_size, *is_block)
    )]
    PartialBlock {
        path: PathBuf,
        size: u64,
        block_size: u32,
        is_block: bool,
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
    /// The closest errno, for SPDK's RPC protocol.
    pub fn errno(&self) -> i32 {
        use CreateError::*;
        match self {
            BlockSize { .. } | Depth { .. } | PartialBlock { .. } | Empty { .. } => libc::EINVAL,
            Gone { .. } | NoFolder { .. } | Dangling { .. } => libc::ENOENT,
            Other { .. } => libc::ESTALE,
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

    /// Converts to the error of opening a bdev, with the same text.
    pub fn for_bdev(self, bdev: &str) -> OpenError {
        OpenError {
            bdev: bdev.to_owned(),
            what: self.to_string(),
            source: io::Error::from_raw_os_error(self.errno()),
        }
    }

    /// The error for a path without a file: the file, its folder, or the target of a link is
    /// missing.
    pub(crate) fn missing(config: &Config) -> Self {
        let path = config.filename.clone();
        let folder = path.parent().filter(|p| !p.as_os_str().is_empty());
        if let Some(folder) = folder.filter(|folder| !folder.is_dir()) {
            let folder = folder.to_owned();
            return Self::NoFolder { path, folder };
        }
        if let Ok(to) = std::fs::read_link(&path) {
            return Self::Dangling { path, to };
        }
        match config.identity {
            None => Self::NotFound { path },
            Some(_) => Self::Gone {
                path,
                bdev: config.name.clone(),
                can_be_made: config.size.is_some() && !config.readonly,
            },
        }
    }

    /// Converts the system's error for `path`.
    pub(crate) fn from_io(path: &Path, what: &str, readonly: bool, source: io::Error) -> Self {
        let path = path.to_owned();
        match source.raw_os_error() {
            Some(libc::ENOENT) => Self::NotFound { path },
            Some(libc::EISDIR) => Self::IsDirectory { path },
            Some(libc::EACCES | libc::EPERM) => {
                let uid = rustix::process::geteuid().as_raw();
                Self::Permission {
                    path,
                    what: what.to_owned(),
                    uid,
                    readonly,
                }
            }
            Some(libc::EROFS) => Self::ReadOnlyMedium { path },
            _ => Self::Io {
                path,
                what: what.to_owned(),
                source,
            },
        }
    }
}

/// The remedy for a size that is not a multiple of the block size. The size of a block device
/// cannot be changed.
fn whole_blocks(path: &Path, size: u64, block_size: u32, is_block: bool) -> String {
    if is_block {
        let fitting = 1u64 << size.trailing_zeros().min(16);
        return format!("choose `block_size` {fitting}");
    }
    let more = size.next_multiple_of(u64::from(block_size));
    let path = path.display();
    format!("choose another `block_size` or make it {more} bytes (`truncate -s {more} {path}`)")
}
