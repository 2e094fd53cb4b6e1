//! Key files: regular files that no other user can read.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::time::SystemTime;

use nacre_nvmf::auth::Secret;
use zeroize::Zeroizing;

use crate::config::names::RELATIVE_KEY;

/// Why a file cannot be a key.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum FileError {
    #[error("{}", RELATIVE_KEY)]
    Relative,
    #[error("it does not exist")]
    Missing,
    #[error("it is not a regular file")]
    NotAFile,
    #[error("other users may read or write it (mode {mode:04o}); `chmod 600` it")]
    Mode { mode: u32 },
    #[error("it belongs to user {uid}, and the daemon is user {own}")]
    Owner { uid: u32, own: u32 },
    #[error("{0}")]
    Io(String),
    #[error("it has more than {most} bytes")]
    Large { most: usize },
}

/// Checks what SPDK checks when a key is added: the path, the mode and the owner.
pub fn check(path: &Path) -> Result<(), FileError> {
    if !path.is_absolute() {
        return Err(FileError::Relative);
    }
    check_metadata(&std::fs::metadata(path).map_err(of_io)?)
}

/// Reads a key file.
pub fn read(path: &Path) -> Result<Zeroizing<String>, FileError> {
    read_with_time(path).map(|(text, _)| text)
}

/// Reads a credential of the service manager, which owns the file and decides who reads it; of at
/// most `most` bytes.
pub fn read_credential(path: &Path, most: usize) -> Result<Zeroizing<String>, FileError> {
    let (file, metadata) = open(path)?;
    if !metadata.is_file() {
        return Err(FileError::NotAFile);
    }
    text_of(file, most)
}

/// Reads a key file, and when it was changed last.
pub fn read_with_time(path: &Path) -> Result<(Zeroizing<String>, Option<SystemTime>), FileError> {
    read_at_most(path, Secret::MAX_TEXT)
}

/// As [`read_with_time`], for other secrets: of at most `most` bytes.
pub fn read_at_most(
    path: &Path,
    most: usize,
) -> Result<(Zeroizing<String>, Option<SystemTime>), FileError> {
    let (file, metadata) = open(path)?;
    check_metadata(&metadata)?;
    Ok((text_of(file, most)?, metadata.modified().ok()))
}

/// Reads a file that other users may read: a regular file of at most `most` bytes.
pub fn read_public(path: &Path, most: usize) -> Result<Vec<u8>, FileError> {
    let (file, metadata) = open(path)?;
    if !metadata.is_file() {
        return Err(FileError::NotAFile);
    }
    let mut bytes = Vec::new();
    let mut first = file.take(most as u64 + 1);
    first.read_to_end(&mut bytes).map_err(of_io)?;
    if bytes.len() > most {
        return Err(FileError::Large { most });
    }
    Ok(bytes)
}

fn open(path: &Path) -> Result<(File, Metadata), FileError> {
    // Without NONBLOCK the open of a pipe would wait for a writer.
    let flags = rustix::fs::OFlags::NONBLOCK.bits() as i32;
    let mut options = OpenOptions::new();
    let opened = options.read(true).custom_flags(flags).open(path);
    let file = opened.map_err(of_io)?;
    let metadata = file.metadata().map_err(of_io)?;
    Ok((file, metadata))
}

fn text_of(file: File, most: usize) -> Result<Zeroizing<String>, FileError> {
    // No reallocation: that would leave a copy of the secret in freed memory.
    let mut text = Zeroizing::new(String::with_capacity(most + 1));
    file.take(most as u64 + 1)
        .read_to_string(&mut text)
        .map_err(of_io)?;
    if text.len() > most {
        return Err(FileError::Large { most });
    }
    Ok(text)
}

fn check_metadata(metadata: &Metadata) -> Result<(), FileError> {
    if !metadata.is_file() {
        return Err(FileError::NotAFile);
    }
    let mode = metadata.permissions().mode() & 0o7777;
    if mode & 0o077 != 0 {
        return Err(FileError::Mode { mode });
    }
    let (uid, own) = (metadata.uid(), rustix::process::getuid().as_raw());
    if uid != own {
        return Err(FileError::Owner { uid, own });
    }
    Ok(())
}

fn of_io(error: std::io::Error) -> FileError {
    match error.kind() {
        ErrorKind::NotFound => FileError::Missing,
        _ => FileError::Io(error.to_string()),
    }
}
