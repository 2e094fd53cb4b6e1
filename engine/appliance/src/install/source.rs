//! The parts of the boot disk that an installation copies.

use std::path::{Path, PathBuf};

use gpt::GptConfig;
use gpt::partition::Partition;
use uuid::Uuid;

use super::inventory::Inventory;
use super::{ALIGNMENT, InstallError, Open, STATE, aligned};
use crate::run::Run;
use crate::version::Version;

/// The image's disk has sectors of this size.
const SECTOR: u64 = 512;
/// Space at the end of a disk for the second partition table.
const TABLE: u64 = 1 << 20;

#[derive(Debug)]
pub(super) struct Source<D> {
    pub(super) path: PathBuf,
    pub(super) device: D,
    pub(super) version: Version,
    pub(super) boot: SourcePartition,
    pub(super) root: SourcePartition,
    pub(super) verity: SourcePartition,
    hash: String,
    /// The partitions of root and verity data, for `veritysetup`.
    devices: [PathBuf; 2],
}

#[derive(Debug, Clone)]
pub(super) struct SourcePartition {
    pub(super) entry: Partition,
    pub(super) offset: u64,
    pub(super) bytes: u64,
}

impl<D: super::Device> Source<D> {
    pub(super) fn read<O: Open<Device = D>>(
        open: &O,
        path: &Path,
        inventory: &Inventory,
        version: Version,
        hash: &str,
    ) -> Result<Self, InstallError> {
        let failed = |cause: String| InstallError::Source {
            path: path.to_owned(),
            cause,
        };
        let [root, verity] = halves(hash).ok_or_else(|| {
            failed("the kernel's command line has no roothash of 64 digits".into())
        })?;
        let device = open.read(path).map_err(|error| failed(error.to_string()))?;
        let table = GptConfig::new()
            .open_from_device(device)
            .map_err(|error| failed(format!("partition table: {error}")))?;
        let part = |name: &str, id: Uuid| {
            let mut entries = table.partitions().values();
            let entry = entries.find(|entry| entry.part_guid == id);
            let part = entry.and_then(SourcePartition::of);
            part.ok_or_else(|| failed(format!("its partition {name} ({id}) is missing")))
        };
        let device_of = |name: &str, id: Uuid| {
            let path = inventory.boot_partition(id).map(Path::to_owned);
            path.ok_or_else(|| failed(format!("the kernel does not know its partition {name}")))
        };
        Ok(Self {
            boot: part("for booting", inventory.identifier_of_boot_partition())?,
            root: part("root", root)?,
            verity: part("verity", verity)?,
            devices: [device_of("root", root)?, device_of("verity", verity)?],
            device: table.take_device(),
            path: path.to_owned(),
            version,
            hash: hash.to_owned(),
        })
    }

    /// Bytes of the smallest target: both slots, the boot partition and a state.
    pub(super) fn needed(&self) -> u64 {
        let slot = aligned(self.root.bytes) + aligned(self.verity.bytes);
        ALIGNMENT + aligned(self.boot.bytes) + 2 * slot + STATE + TABLE
    }

    /// Compares the root file system with its hash: a worn USB disk is found before the target is
    /// touched.
    pub(super) fn check(&self, run: &impl Run) -> Result<(), InstallError> {
        let [root, verity] = self.devices.each_ref().map(|path| path.to_string_lossy());
        let arguments = ["verify", &root, &verity, &self.hash];
        let done = run.run("veritysetup", &arguments);
        done.map(drop)
            .map_err(|error| self.failed(error.to_string()))
    }

    pub(super) fn failed(&self, cause: String) -> InstallError {
        InstallError::Source {
            path: self.path.clone(),
            cause,
        }
    }
}

impl SourcePartition {
    fn of(entry: &Partition) -> Option<Self> {
        let sectors = entry
            .last_lba
            .checked_sub(entry.first_lba)?
            .checked_add(1)?;
        Some(Self {
            offset: entry.first_lba.checked_mul(SECTOR)?,
            bytes: sectors.checked_mul(SECTOR)?,
            entry: entry.clone(),
        })
    }
}

/// The identifiers of the partitions root and verity: the halves of the root hash
/// (Discoverable Partitions Specification).
fn halves(hash: &str) -> Option<[Uuid; 2]> {
    if hash.len() != 64 || !hash.is_ascii() {
        return None;
    }
    let (root, verity) = hash.split_at(32);
    Some([root.parse().ok()?, verity.parse().ok()?])
}
