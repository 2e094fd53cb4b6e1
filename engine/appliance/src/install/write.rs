//! Writes the system from the boot disk (the source) to a disk of the machine (the target). After a
//! power failure at any moment, the target has its former primary partition table, none, or a
//! complete system.
//!
//! ```text
//!   erase both tables, then ends │ copy boot, root, verity │ read back │ new table, read back
//!                     sync each ┘                    sync ┘      sync ┘
//! ```

use std::collections::BTreeMap;
use std::io::{self, Read, SeekFrom, Write};

use gpt::GptConfig;
use gpt::disk::LogicalBlockSize;
use gpt::mbr::ProtectiveMBR;
use gpt::partition::Partition;
use uuid::Uuid;

use super::boot::{self, BootError, BootFile};
use super::inventory::Disk;
use super::source::{Source, SourcePartition};
use super::{ALIGNMENT, Device, InstallError, Open, Window, aligned};
use crate::digest::{self, Sha256};

/// Bytes to erase at each end of the target: partition tables, and the labels of volumes, pools and
/// file systems, whose data is overwritten.
const ENDS: u64 = 8 << 20;
/// Bytes of the entries of a GUID partition table: 128 entries of 128 bytes.
const ENTRIES: u64 = 128 * 128;
/// Bytes between two reports of progress.
const CHUNK: u64 = 16 << 20;
/// Bytes of one read and write of a copy.
const PIECE: usize = 256 * 1024;

/// Names of the parts in errors.
const ENDS_OF_DISK: &str = "its former partition table";
const BOOT: &str = "boot partition";
const ROOT: &str = "root file system";
const VERITY: &str = "verity data";
const TABLE: &str = "partition table";

/// The steps of an installation, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Checks the source before the target changes.
    Check,
    Erase,
    Copy,
    Verify,
    Finish,
}

impl Step {
    pub fn text(self) -> &'static str {
        match self {
            Self::Check => "checking the boot disk",
            Self::Erase => "erasing the former partition table",
            Self::Copy => "copying",
            Self::Verify => "reading back",
            Self::Finish => "writing the partition table",
        }
    }
}

/// The progress of the present step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    pub step: Step,
    /// Bytes done, of `total`.
    pub done: u64,
    /// Bytes of the step; 0 if the step reports no progress.
    pub total: u64,
}

impl Progress {
    pub(super) fn start(step: Step) -> Self {
        Self {
            step,
            done: 0,
            total: 0,
        }
    }

    /// Percentage of the step that is done; `None` if the step reports no progress.
    pub fn percent(&self) -> Option<u64> {
        (self.done * 100).checked_div(self.total)
    }
}

/// A partition that was copied: its position on the target in bytes, and the digest of its source.
struct Copied {
    name: &'static str,
    offset: u64,
    bytes: u64,
    digest: Sha256,
}

struct Target<'a, D> {
    disk: &'a Disk,
    device: D,
}

/// Erases the disk, copies the partitions of the source to it, reads them back and compares them.
/// Writes the partition table last. Returns the number of bytes that were read back.
pub(super) fn write<O: Open>(
    open: &O,
    source: &mut Source<O::Device>,
    disk: &Disk,
    progress: &mut dyn FnMut(Progress),
) -> Result<u64, InstallError> {
    let path = &disk.path;
    let device = open.alone(path).map_err(|source| InstallError::Open {
        path: path.clone(),
        source,
    })?;
    let mut target = Target { disk, device };
    target.check_length()?;
    progress(Progress::start(Step::Erase));
    target.erase().map_err(target.failed(ENDS_OF_DISK))?;

    let boot_at = ALIGNMENT;
    let root_at = aligned(boot_at + source.boot.bytes);
    let verity_at = aligned(root_at + source.root.bytes);
    let total = source.root.bytes + source.verity.bytes;
    progress(Progress::start(Step::Copy));
    let files = target.copy_boot(source, boot_at)?;
    let mut done = 0;
    let mut report = |step, bytes| {
        done += bytes;
        progress(Progress { step, done, total });
    };
    let mut copied = Vec::new();
    let (root, verity) = (source.root.clone(), source.verity.clone());
    for (name, part, offset) in [(ROOT, &root, root_at), (VERITY, &verity, verity_at)] {
        let digest = target.copy(source, name, part, offset, &mut |bytes| {
            report(Step::Copy, bytes);
        })?;
        copied.push(Copied {
            name,
            offset,
            bytes: part.bytes,
            digest,
        });
    }
    target
        .device
        .sync_and_drop_cache()
        .map_err(target.failed(ROOT))?;

    done = 0;
    let mut report = |bytes| {
        done += bytes;
        progress(Progress {
            step: Step::Verify,
            done,
            total,
        });
    };
    target.verify_boot(source.boot.bytes, boot_at, &files)?;
    for part in &copied {
        target.verify(part, &mut report)?;
    }

    progress(Progress::start(Step::Finish));
    let places = [
        (&source.boot, boot_at, Uuid::new_v4()),
        (&root, root_at, root.entry.part_guid),
        (&verity, verity_at, verity.entry.part_guid),
    ];
    target.write_table(&places)?;
    Ok(total + files.iter().map(|file| file.bytes).sum::<u64>())
}

impl<D: Device> Target<'_, D> {
    fn failed(&self, part: &'static str) -> impl Fn(io::Error) -> InstallError + use<D> {
        let path = self.disk.path.clone();
        move |source| InstallError::Target {
            path: path.clone(),
            part,
            source,
        }
    }

    fn differs(&self, part: &'static str) -> InstallError {
        InstallError::Differs {
            path: self.disk.path.clone(),
            part,
        }
    }

    fn check_length(&mut self) -> Result<(), InstallError> {
        let (path, promised) = (self.disk.path.clone(), self.disk.bytes);
        match self.device.seek(SeekFrom::End(0)) {
            Ok(found) if found >= promised => Ok(()),
            Ok(found) => Err(InstallError::Short {
                path,
                promised,
                found,
            }),
            Err(source) => Err(InstallError::Open { path, source }),
        }
    }

    /// Erases the backup partition table, then the primary one, then both ends. Firmware uses the
    /// backup table if the primary one is damaged. So the former system boots until the primary
    /// table is erased, and nothing boots afterwards.
    fn erase(&mut self) -> io::Result<()> {
        let (end, sector) = (self.disk.bytes, self.disk.sector_bytes);
        let second = sector + ENTRIES;
        // In front of the first table's header is a sector for firmware without UEFI.
        let first = sector + second;
        for (start, bytes) in [
            (end - second, second),
            (0, first),
            (0, ENDS),
            (end - ENDS, ENDS),
        ] {
            let mut window = Window::new(&mut self.device, start, bytes);
            io::copy(&mut io::repeat(0).take(bytes), &mut window)?;
            self.device.sync_and_drop_cache()?;
        }
        Ok(())
    }

    fn copy_boot(
        &mut self,
        source: &mut Source<D>,
        at: u64,
    ) -> Result<Vec<BootFile>, InstallError> {
        let SourcePartition { offset, bytes, .. } = source.boot;
        let from = Window::new(&mut source.device, offset, bytes);
        let to = Window::new(&mut self.device, at, bytes);
        let copied = boot::copy(from, to, self.disk.sector_bytes, &source.version);
        copied.map_err(|error| match error {
            BootError::Source(cause) => source.failed(cause),
            BootError::Target(error) => self.failed(BOOT)(error),
        })
    }

    fn copy(
        &mut self,
        source: &mut Source<D>,
        name: &'static str,
        part: &SourcePartition,
        offset: u64,
        report: &mut dyn FnMut(u64),
    ) -> Result<Sha256, InstallError> {
        let failed = self.failed(name);
        let mut to = Window::new(&mut self.device, offset, part.bytes);
        let mut digest = digest::Counter::default();
        let mut buffer = vec![0; PIECE];
        let mut from = Window::new(&mut source.device, part.offset, part.bytes);
        let mut unreported = 0;
        loop {
            let count = match from.read(&mut buffer) {
                Ok(0) => break,
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(source.failed(format!("{name}: {error}"))),
            };
            digest.update(&buffer[..count]);
            to.write_all(&buffer[..count]).map_err(&failed)?;
            unreported += count as u64;
            if unreported >= CHUNK {
                report(std::mem::take(&mut unreported));
            }
        }
        if from.at < part.bytes {
            return Err(source.failed(format!("{name}: the disk ends before it does")));
        }
        report(unreported);
        Ok(digest.end())
    }

    fn verify(&mut self, part: &Copied, report: &mut dyn FnMut(u64)) -> Result<(), InstallError> {
        let failed = self.failed(part.name);
        let mut counter = digest::Counter::default();
        let mut at = 0;
        let mut from = Window::new(&mut self.device, part.offset, part.bytes);
        let mut buffer = vec![0; PIECE];
        while at < part.bytes {
            let wanted = (part.bytes - at).min(PIECE as u64);
            let buffer = &mut buffer[..usize::try_from(wanted).unwrap_or(PIECE)];
            from.read_exact(buffer).map_err(&failed)?;
            counter.update(buffer);
            at += wanted;
            if at.is_multiple_of(CHUNK) || at == part.bytes {
                let before = (at - 1) / CHUNK * CHUNK;
                report(at - before);
            }
        }
        if counter.end() != part.digest {
            return Err(self.differs(part.name));
        }
        Ok(())
    }

    fn verify_boot(&mut self, bytes: u64, at: u64, files: &[BootFile]) -> Result<(), InstallError> {
        let failed = self.failed(BOOT);
        let found = boot::read_back(Window::new(&mut self.device, at, bytes), files);
        if found.map_err(failed)? != files {
            return Err(self.differs(BOOT));
        }
        Ok(())
    }

    fn write_table(&mut self, parts: &[(&SourcePartition, u64, Uuid)]) -> Result<(), InstallError> {
        let sector = self.disk.sector_bytes;
        let failed = self.failed(TABLE);
        let wanted: BTreeMap<u32, Partition> = (1..)
            .zip(parts)
            .map(|(number, (part, offset, id))| {
                let entry = Partition {
                    part_guid: *id,
                    first_lba: offset / sector,
                    last_lba: (offset + part.bytes) / sector - 1,
                    ..part.entry.clone()
                };
                (number, entry)
            })
            .collect();
        let size = LogicalBlockSize::try_from(sector).map_err(&failed)?;
        let sectors = u32::try_from(self.disk.bytes / sector - 1).unwrap_or(u32::MAX);
        let table = |error: gpt::GptError| failed(io::Error::other(error));
        let mut written = GptConfig::new()
            .writable(true)
            .logical_block_size(size)
            .create_from_device(&mut self.device, None)
            .map_err(table)?;
        written.update_partitions(wanted.clone()).map_err(table)?;
        written.write().map_err(table)?;
        self.device.sync_and_drop_cache().map_err(&failed)?;
        // Last: without it, firmware sees no table. The second table alone may start the boot
        // loader, whose kernel would not find its root.
        ProtectiveMBR::with_lb_size(sectors)
            .overwrite_lba0(&mut self.device)
            .map_err(|error| failed(io::Error::other(error)))?;
        self.device.sync_and_drop_cache().map_err(&failed)?;
        let read = GptConfig::new()
            .logical_block_size(size)
            .only_valid_headers(true)
            .open_from_device(&mut self.device)
            .map_err(table)?;
        if *read.partitions() != wanted {
            return Err(self.differs(TABLE));
        }
        Ok(())
    }
}
