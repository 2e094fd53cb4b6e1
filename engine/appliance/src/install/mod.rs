//! The installer: writes the system of a USB disk to a disk of the machine, which the operator
//! names by its serial number.
//!
//! ```text
//!   inventory   lsblk, first bytes ─▶ disks, each with its refusal      parse, decide
//!   source      partition table of the boot disk ─▶ its parts                         parse
//!   write       erase, copy, sync, read back, partition table last                    perform
//!   boot        files of the boot partition, without the installer's own              perform
//! ```
//!
//! The target has no valid partition table until each part is on its medium and compared. After a
//! power failure it is not bootable, or whole; a repeat starts from the beginning. The first boot
//! of the target adds the second slot and the partition for state, as for a written image.
//!
//! Crates `gpt` and `fatfs` write the target, not systemd-repart: repart wants a block device with
//! partitions that udev knows, fixes its own order of writes, and cannot leave files out. Both
//! crates work on any bytes, so tests cut the power between two writes of a sparse file.

mod boot;
mod inventory;
mod source;
#[cfg(test)]
mod tests;
mod write;

use std::fmt::Debug;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Advice, OFlags, fadvise};

use self::inventory::Inventory;
pub use self::inventory::{Disk, Refusal};
use self::source::Source;
pub use self::write::{Progress, Step};
use crate::lock::{Lock, LockError};
use crate::place::{Places, small_text};
use crate::run::{Run, RunError};
use crate::status::{self, StatusError};
use crate::version::Version;

/// The word of the kernel's command line that makes a start one of the installer.
const WORD: &str = "nacre.install";
/// Bytes for state that the first boot needs, as in `40-state.conf` of the image.
const STATE: u64 = 512 << 20;
/// Partitions begin at multiples of this.
const ALIGNMENT: u64 = 1 << 20;

#[derive(Debug, thiserror::Error)]
pub enum InstallError {
    #[error(
        "this machine was not started to install: start it from the USB disk with the boot entry \
         \"Install Nacre\""
    )]
    NotInstaller,
    #[error("the disk of this start is unknown: {cause}; {remedy}")]
    BootDisk { cause: String, remedy: &'static str },
    #[error("list of disks: {0}")]
    List(#[source] RunError),
    #[error("list of disks: {0}; detach disks that the installation does not need")]
    Listing(#[from] serde_json::Error),
    #[error("disk {serial:?}: no disk has this serial number; the disks are {known}")]
    Unknown { serial: String, known: String },
    #[error("disk {serial}: {path}: {refusal}", path = path.display())]
    Refused {
        serial: String,
        path: PathBuf,
        refusal: Refusal,
    },
    #[error(
        "disk {serial}: {path} holds data: {contents}; --force overwrites all of it",
        path = path.display()
    )]
    HoldsData {
        serial: String,
        path: PathBuf,
        contents: String,
    },
    #[error(
        "boot disk {path}: {cause}; write the image to the USB disk again, or use another one",
        path = path.display()
    )]
    Source { path: PathBuf, cause: String },
    #[error("target {path}: {source}; the disk is gone or in use: check its cable and its users", path = path.display())]
    Open { path: PathBuf, source: io::Error },
    #[error(
        "target {path}: it has {found} of the {promised} bytes that it promises; use another disk",
        path = path.display()
    )]
    Short {
        path: PathBuf,
        promised: u64,
        found: u64,
    },
    #[error(
        "target {path}: {part}: {source}; the disk does not boot: check its cable, then repeat, \
         or use another disk",
        path = path.display()
    )]
    Target {
        path: PathBuf,
        part: &'static str,
        source: io::Error,
    },
    #[error(
        "target {path}: {part}: it reads back other bytes than were written; the disk does not \
         boot: use another disk",
        path = path.display()
    )]
    Differs { path: PathBuf, part: &'static str },
    #[error(transparent)]
    Image(#[from] StatusError),
    #[error(transparent)]
    Lock(#[from] LockError),
}

/// A disk as bytes.
pub trait Device: Read + Write + Seek + Debug {
    /// Waits until all bytes are on the medium, and drops cached copies: reads ask the medium.
    fn sync_and_drop_cache(&mut self) -> io::Result<()>;
}

impl Device for File {
    fn sync_and_drop_cache(&mut self) -> io::Result<()> {
        self.sync_all()?;
        Ok(fadvise(&*self, 0, None, Advice::DontNeed)?)
    }
}

/// Opens disks. Tests have disks of their own, which fail on demand.
pub trait Open {
    type Device: Device;

    fn read(&self, path: &Path) -> io::Result<Self::Device>;

    /// For reads and writes, without another user of the disk.
    fn alone(&self, path: &Path) -> io::Result<Self::Device>;
}

/// Disks of the kernel.
#[derive(Debug, Clone, Copy)]
pub struct Kernel;

impl Open for Kernel {
    type Device = File;

    fn read(&self, path: &Path) -> io::Result<File> {
        File::open(path)
    }

    fn alone(&self, path: &Path) -> io::Result<File> {
        // The kernel refuses O_EXCL while a file system or another device holds the disk.
        let flags = OFlags::EXCL.bits().cast_signed();
        let mut options = OpenOptions::new();
        options
            .read(true)
            .write(true)
            .custom_flags(flags)
            .open(path)
    }
}

/// The parts of an installation that do not change while it runs.
#[derive(Debug)]
pub struct Installer<'a, R, O> {
    pub places: &'a Places,
    pub run: &'a R,
    pub open: &'a O,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Installed {
    pub path: PathBuf,
    pub serial: String,
    pub version: Version,
    /// Bytes that were read back.
    pub bytes: u64,
}

/// True if this machine was booted with the installer's boot entry.
pub fn is_requested(places: &Places) -> bool {
    let line = small_text(&places.command_line()).unwrap_or_default();
    line.split_whitespace()
        .any(|word| word.split('=').next() == Some(WORD))
}

impl<R: Run, O: Open> Installer<'_, R, O> {
    /// All disks of the machine, each with its refusal.
    pub fn disks(&self) -> Result<Vec<Disk>, InstallError> {
        let (inventory, source) = self.survey()?;
        Ok(inventory.disks(self.open, source.needed()))
    }

    /// The disk with this serial number, if it may be overwritten. A disk with data on it needs
    /// `overwrite`.
    pub fn choose(&self, serial: &str, overwrite: bool) -> Result<Disk, InstallError> {
        choose(self.disks()?, serial, overwrite)
    }

    /// Writes the system of the boot disk to the disk with this serial number.
    pub fn install(
        &self,
        serial: &str,
        overwrite: bool,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Installed, InstallError> {
        let (inventory, source) = self.survey()?;
        let _lock = Lock::of_system(self.places)?;
        let _ = choose(
            inventory.disks(self.open, source.needed()),
            serial,
            overwrite,
        )?;
        progress(Progress::start(Step::Check));
        source.check(self.run)?;
        // The check takes minutes. A disk that was pulled meanwhile may have given its path away.
        let (inventory, mut source) = self.survey()?;
        let disk = choose(
            inventory.disks(self.open, source.needed()),
            serial,
            overwrite,
        )?;
        let bytes = write::write(self.open, &mut source, &disk, progress)?;
        // For the list of disks only: udev looks again, too.
        let path = disk.path.to_string_lossy();
        let _ = self.run.run("blockdev", &["--rereadpt", &path]);
        Ok(Installed {
            path: disk.path,
            serial: disk.serial,
            version: source.version,
            bytes,
        })
    }

    fn survey(&self) -> Result<(Inventory, Source<O::Device>), InstallError> {
        if !is_requested(self.places) {
            return Err(InstallError::NotInstaller);
        }
        let version = status::image(self.places)?.version;
        let esp = status::boot_partition(self.places).ok_or_else(|| InstallError::BootDisk {
            cause: "the firmware has no variable LoaderDevicePartUUID".into(),
            remedy: "start with UEFI and the image's own boot loader",
        })?;
        let line = small_text(&self.places.command_line()).unwrap_or_default();
        let hash = line
            .split_whitespace()
            .find_map(|word| word.strip_prefix("roothash="))
            .unwrap_or_default();
        let inventory = Inventory::read(self.run, esp)?;
        let path = inventory.boot_disk()?;
        let source = Source::read(self.open, path, &inventory, version, hash)?;
        Ok((inventory, source))
    }
}

fn choose(disks: Vec<Disk>, serial: &str, overwrite: bool) -> Result<Disk, InstallError> {
    let known: Vec<&str> = disks
        .iter()
        .filter(|disk| disk.refusal.is_none())
        .map(|disk| disk.serial.as_str())
        .collect();
    let known = if known.is_empty() {
        "none".to_owned()
    } else {
        known.join(", ")
    };
    let mut named = disks
        .into_iter()
        .filter(|disk| !serial.is_empty() && disk.serial == serial);
    let disk = named.next().ok_or_else(|| InstallError::Unknown {
        serial: serial.to_owned(),
        known,
    })?;
    let (serial, path) = (disk.serial.clone(), disk.path.clone());
    match &disk.refusal {
        Some(refusal) => Err(InstallError::Refused {
            serial,
            path,
            refusal: refusal.clone(),
        }),
        None if !disk.contents.is_empty() && !overwrite => Err(InstallError::HoldsData {
            serial,
            path,
            contents: disk.contents.join(", "),
        }),
        None => Ok(disk),
    }
}

/// The first multiple of [`ALIGNMENT`] from `at` on.
fn aligned(at: u64) -> u64 {
    at.div_ceil(ALIGNMENT).saturating_mul(ALIGNMENT)
}

/// A range of a device as a file of its own.
#[derive(Debug)]
struct Window<'a, D> {
    device: &'a mut D,
    start: u64,
    length: u64,
    at: u64,
}

impl<'a, D: Device> Window<'a, D> {
    fn new(device: &'a mut D, start: u64, length: u64) -> Self {
        Self {
            device,
            start,
            length,
            at: 0,
        }
    }

    /// Seeks the device; returns how many of `wanted` bytes are within the window.
    fn place(&mut self, wanted: usize) -> io::Result<usize> {
        let rest = self.length.saturating_sub(self.at);
        self.device.seek(SeekFrom::Start(self.start + self.at))?;
        Ok(usize::try_from(rest).unwrap_or(usize::MAX).min(wanted))
    }
}

impl<D: Device> Read for Window<'_, D> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.place(buffer.len())?;
        let count = self.device.read(&mut buffer[..count])?;
        self.at += count as u64;
        Ok(count)
    }
}

impl<D: Device> Write for Window<'_, D> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        let count = self.place(buffer.len())?;
        let count = self.device.write(&buffer[..count])?;
        self.at += count as u64;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.device.flush()
    }
}

impl<D> Seek for Window<'_, D> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let at = match to {
            SeekFrom::Start(at) => Some(at),
            SeekFrom::Current(offset) => self.at.checked_add_signed(offset),
            SeekFrom::End(offset) => self.length.checked_add_signed(offset),
        };
        self.at = at.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(self.at)
    }
}
