//! The boot partition (EFI system partition) of the disk that the installer writes: a new FAT with
//! the files that this disk needs.

use std::io::{self, Read, Write};

use fatfs::{
    Date, DateTime, Dir, FileSystem, FormatVolumeOptions, FsOptions, Time, TimeProvider,
    format_volume,
};

use super::{Device, Window};
use crate::digest::{self, Sha256};
use crate::slots::{BootEntry, Tries};
use crate::version::Version;

/// Files that are not copied: the installer's own, and the random seed, which no other disk may
/// have.
const LEFT_OUT: [&str; 3] = [
    "efi/nacre-install",
    "loader/entries/nacre-install.conf",
    "loader/random-seed",
];
const ENTRIES: &str = "efi/linux/";
/// The folder of the file that firmware starts without a boot variable; the file has the name of
/// the architecture.
const FALLBACK: &str = "efi/boot/";
const VOLUME_LABEL: [u8; 11] = *b"NACRE-ESP  ";
const MOST_FILES: usize = 1024;
const MOST_DEPTH: usize = 8;

/// A file of the target's boot partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct BootFile {
    pub(super) path: String,
    pub(super) bytes: u64,
    pub(super) digest: Sha256,
}

#[derive(Debug)]
pub(super) enum BootError {
    Source(String),
    Target(io::Error),
}

type FatDir<'a, 'w, D> = Dir<'a, Window<'w, D>>;

struct Copier<'a> {
    version: &'a Version,
    files: Vec<BootFile>,
}

/// Makes a file system in `target`, and copies the files of `source` to it, except those of the
/// installer and of other versions. The boot entry of `version` gets three tries. `sector`: bytes
/// of a sector of the target. Returns the copied files. Fails if one of those that start the
/// machine is missing.
pub(super) fn copy<D: Device>(
    source: Window<'_, D>,
    mut target: Window<'_, D>,
    sector: u64,
    version: &Version,
) -> Result<Vec<BootFile>, BootError> {
    let from = mount(source).map_err(|error| BootError::Source(error.to_string()))?;
    let bytes =
        u16::try_from(sector).map_err(|_| BootError::Target(io::ErrorKind::InvalidInput.into()))?;
    let sectors = u32::try_from(target.length / sector);
    let sectors = sectors.map_err(|_| BootError::Target(io::ErrorKind::InvalidInput.into()))?;
    let options = FormatVolumeOptions::new()
        .bytes_per_sector(bytes)
        .total_sectors(sectors)
        .volume_id(uuid::Uuid::new_v4().as_fields().0)
        .volume_label(VOLUME_LABEL);
    format_volume(&mut target, options).map_err(BootError::Target)?;
    target.at = 0;
    let to = mount(target).map_err(BootError::Target)?;
    let mut copier = Copier {
        version,
        files: Vec::new(),
    };
    copier.folder(&from.root_dir(), &to.root_dir(), "", 0)?;
    to.unmount().map_err(BootError::Target)?;
    let has = |folder: &str| {
        let mut paths = copier.files.iter().map(|file| file.path.to_lowercase());
        paths.any(|path| path.starts_with(folder))
    };
    for folder in [ENTRIES, FALLBACK] {
        if !has(folder) {
            let cause = format!("its boot partition has no file of version {version} in {folder}");
            return Err(BootError::Source(cause));
        }
    }
    Ok(copier.files)
}

/// Reads `files` from a boot partition, and returns them with their present sizes and digests.
pub(super) fn read_back<D: Device>(
    target: Window<'_, D>,
    files: &[BootFile],
) -> io::Result<Vec<BootFile>> {
    let mounted = mount(target)?;
    let root = mounted.root_dir();
    let read = |file: &BootFile| {
        let (bytes, digest) = digest::copy(root.open_file(&file.path)?, &mut io::sink())?;
        let path = file.path.clone();
        Ok(BootFile {
            path,
            bytes,
            digest,
        })
    };
    files.iter().map(read).collect()
}

fn mount<D: Device>(window: Window<'_, D>) -> io::Result<FileSystem<Window<'_, D>>> {
    FileSystem::new(window, FsOptions::new().time_provider(&FixedTime))
}

/// One time for all files. Without a clock the crate writes the month zero, and firmware then
/// refuses to rename a file: systemd-boot could not count the tries of a version.
#[derive(Debug)]
struct FixedTime;

impl TimeProvider for FixedTime {
    fn get_current_date(&self) -> Date {
        Date {
            year: 2026,
            month: 1,
            day: 1,
        }
    }

    fn get_current_date_time(&self) -> DateTime {
        DateTime {
            date: self.get_current_date(),
            time: Time {
                hour: 0,
                min: 0,
                sec: 0,
                millis: 0,
            },
        }
    }
}

impl Copier<'_> {
    fn folder<D: Device>(
        &mut self,
        from: &FatDir<'_, '_, D>,
        to: &FatDir<'_, '_, D>,
        path: &str,
        depth: usize,
    ) -> Result<(), BootError> {
        if depth > MOST_DEPTH {
            return Err(BootError::Source(format!("{path}: folders nest too deep")));
        }
        for entry in from.iter() {
            let entry = entry.map_err(|error| BootError::Source(format!("{path}/: {error}")))?;
            let name = entry.file_name();
            if name == "." || name == ".." {
                continue;
            }
            let inner = format!("{path}{name}");
            let Some(target) = self.target(&inner) else {
                continue;
            };
            if entry.is_dir() {
                to.create_dir(&name).map_err(BootError::Target)?;
                let folder = to.open_dir(&name).map_err(BootError::Target)?;
                self.folder(&entry.to_dir(), &folder, &format!("{inner}/"), depth + 1)?;
                continue;
            }
            if self.files.len() >= MOST_FILES {
                let cause = format!("its boot partition has more than {MOST_FILES} files");
                return Err(BootError::Source(cause));
            }
            let name = target.rsplit('/').next().unwrap_or(&target).to_owned();
            let mut created = to.create_file(&name).map_err(BootError::Target)?;
            let file = copy_file(entry.to_file(), &mut created, target)?;
            self.files.push(file);
        }
        Ok(())
    }

    /// The path of a file or folder on the target; `None`: the target does not get it.
    fn target(&self, path: &str) -> Option<String> {
        let lower = path.to_lowercase();
        if LEFT_OUT.contains(&lower.as_str()) {
            return None;
        }
        if !lower.starts_with(ENTRIES) {
            return Some(path.to_owned());
        }
        // The running version only, with new tries. Two names of one version are one entry.
        let (folder, name) = path.rsplit_once('/')?;
        let entry = BootEntry::parse(name)?;
        let tries = Tries { left: 3, failed: 0 };
        let renamed = BootEntry {
            tries: Some(tries),
            ..entry
        };
        let target = format!("{folder}/{}", renamed.name());
        let is_copied = self.files.iter().any(|file| file.path == target);
        (renamed.version == *self.version && !is_copied).then_some(target)
    }
}

/// Copies one file. A failed read and a failed write have different remedies.
fn copy_file(from: impl Read, to: &mut impl Write, path: String) -> Result<BootFile, BootError> {
    struct Marked<R> {
        inner: R,
        failed: bool,
    }
    impl<R: Read> Read for Marked<R> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let read = self.inner.read(buffer);
            self.failed = read.is_err();
            read
        }
    }
    let mut from = Marked {
        inner: from,
        failed: false,
    };
    let copied = digest::copy(&mut from, to).and_then(|copied| {
        to.flush()?;
        Ok(copied)
    });
    match copied {
        Ok((bytes, digest)) => Ok(BootFile {
            path,
            bytes,
            digest,
        }),
        Err(error) if from.failed => Err(BootError::Source(format!("{path}: {error}"))),
        Err(error) => Err(BootError::Target(error)),
    }
}
