//! Disks that left the pool, and were not erased before the daemon ended.

use super::Import;
use crate::disks::PoolDisk;
use crate::format::superblock::Superblock;

impl Import {
    /// Devices of disks that left the pool and were not erased since, by the caller's number.
    pub fn leftovers(&self) -> Vec<(usize, PoolDisk)> {
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
            let found: Vec<&Superblock> = found.map(|(_, of)| of).collect();
            let is_ours = found.iter().all(|of| of.pool == root.pool);
            let disk = found.into_iter().find_map(left).filter(|_| is_ours)?;
            Some((device, disk))
        });
        devices.collect()
    }
}
