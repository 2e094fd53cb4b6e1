//! `NodeGetVolumeStats`: used and free bytes and inodes of a volume's file system, or the size of
//! its block device. `NodeExpandVolume`: grows the file system to the size of its volume.

use std::path::Path;
use std::time::{Duration, Instant};

use tonic::Status;
use uuid::Uuid;

use super::Node;
use super::fabrics::{self, Device};
use super::{format, mounts};
use crate::capability::{Capability, Sizes, required_path, volume_id};
use crate::messages::node::{
    NodeExpandVolumeRequest, NodeExpandVolumeResponse, NodeGetVolumeStatsRequest,
    NodeGetVolumeStatsResponse, Unit, VolumeUsage,
};

/// Time for `statvfs`, whose numbers the kernel has in memory.
const STATISTICS: Duration = Duration::from_secs(10);
/// Time for the kernel to see the new size of a volume.
const SEEN: Duration = Duration::from_secs(10);
const LOOK: Duration = Duration::from_millis(50);

impl Node {
    /// The volume's device, which must be mounted or published at this path, and whether the volume
    /// is a block volume there. `NOT_FOUND` otherwise.
    fn at_path(&self, id: Option<Uuid>, text: &str, path: &Path) -> Result<(Device, bool), Status> {
        let absent = || Status::not_found(format!("volume {text} is not at {}", path.display()));
        let host = &*self.host;
        let id = id.ok_or_else(absent)?;
        let device = fabrics::device(host, id)?.ok_or_else(absent)?;
        let mounted = mounts::at(host, path)?;
        let root = Path::new("/").join(&device.name);
        let is_block = mounted.as_ref().is_some_and(|mount| mount.root == root);
        let is_mounted = mounted.is_some_and(|mount| mount.number == device.number);
        let staged = self.staged(id)?;
        let is_staged_block = staged
            .is_some_and(|staged| staged.fs_type.is_none() && path.starts_with(staged.staging));
        if is_mounted || is_block || is_staged_block {
            Ok((device, !is_mounted))
        } else {
            Err(absent())
        }
    }

    pub(crate) fn stats(
        &self,
        asked: &NodeGetVolumeStatsRequest,
    ) -> Result<NodeGetVolumeStatsResponse, Status> {
        let id = volume_id(&asked.volume_id)?;
        let path = Path::new(required_path("volume_path", &asked.volume_path)?);
        let (device, is_block) = self.at_path(id, &asked.volume_id, path)?;
        if is_block {
            let total = signed(device.bytes);
            return Ok(NodeGetVolumeStatsResponse {
                usage: vec![VolumeUsage {
                    total,
                    unit: Unit::Bytes.into(),
                    ..Default::default()
                }],
            });
        }
        let at = path.to_owned();
        let look = move || Ok(rustix::fs::statvfs(&at)?);
        let found = self
            .devices
            .run(&path.to_owned(), STATISTICS, look)
            .map_err(|error| Status::unavailable(format!("{}: {error}", path.display())))?;
        let bytes = |blocks: u64| signed(blocks.saturating_mul(found.f_frsize));
        let usage = |available: i64, total: i64, free: i64, unit: Unit| VolumeUsage {
            available,
            total,
            used: total.saturating_sub(free).max(0),
            unit: unit.into(),
        };
        Ok(NodeGetVolumeStatsResponse {
            usage: vec![
                usage(
                    bytes(found.f_bavail),
                    bytes(found.f_blocks),
                    bytes(found.f_bfree),
                    Unit::Bytes,
                ),
                usage(
                    signed(found.f_favail),
                    signed(found.f_files),
                    signed(found.f_ffree),
                    Unit::Inodes,
                ),
            ],
        })
    }

    pub(crate) fn expand(
        &self,
        asked: &NodeExpandVolumeRequest,
    ) -> Result<NodeExpandVolumeResponse, Status> {
        let id = volume_id(&asked.volume_id)?;
        let path = Path::new(required_path("volume_path", &asked.volume_path)?);
        if asked.volume_capability.is_some() {
            Capability::read(asked.volume_capability.as_ref()).map_err(|unfit| unfit.invalid())?;
        }
        let sizes = Sizes::read(asked.capacity_range.as_ref())?;
        let _one = self.pending.start(&asked.volume_id)?;
        let end = Instant::now() + SEEN;
        let (device, is_block) = loop {
            let found = self.at_path(id, &asked.volume_id, path)?;
            if found.0.bytes >= sizes.least {
                break found;
            }
            if Instant::now() >= end {
                return Err(Status::unavailable(format!(
                    "{} still has {} bytes: the volume is smaller, or its paths are down",
                    found.0.name, found.0.bytes
                )));
            }
            std::thread::sleep(LOOK);
        };
        if !is_block {
            format::grow(&*self.host, &self.devices, &device, path)?;
        }
        Ok(NodeExpandVolumeResponse {
            capacity_bytes: signed(device.bytes),
        })
    }
}

fn signed(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}
