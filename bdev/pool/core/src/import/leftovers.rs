//! Finds disks that were removed from the pool, and not erased before the daemon ended.

use super::Import;
use uuid::Uuid;

use crate::disks::PoolDisk;
use crate::format::superblock::Superblock;

/// A disk that left the pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Leftover {
    pub id: Uuid,
    /// Byte offsets of its superblocks. Other contents of the device do not belong to the pool.
    pub superblocks: Vec<u64>,
}

impl Import {
    /// Devices of disks that left the pool and were not erased since, by the caller's number.
    pub fn leftovers(&self) -> Vec<(usize, Leftover)> {
        let Some(root) = &self.superblock else {
            return Vec::new();
        };
        let left = |of: &Superblock| {
            let at = of.disks.position(of.disk)?;
            let is_out = of.sequence < root.sequence && root.disks.position(of.disk).is_none();
            (is_out && of.disks.leaving() == Some(at)).then(|| of.disks.disks()[at])
        };
        let devices = (0..self.disk_bytes.len()).filter_map(|device| {
            let found = self.superblocks.iter().filter(|(at, _)| at.disk == device);
            let is_ours = found.clone().all(|(_, of)| of.pool == root.pool);
            let disk: PoolDisk = found.clone().find_map(|(_, of)| left(of))?;
            let superblocks = found.filter(|(_, of)| of.disk == disk.id);
            let leftover = Leftover {
                id: disk.id,
                superblocks: superblocks.map(|(at, _)| at.offset).collect(),
            };
            is_ours.then_some((device, leftover))
        });
        devices.collect()
    }
}
