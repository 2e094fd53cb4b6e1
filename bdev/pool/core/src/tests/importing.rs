//! Imports of a pool from simulated disks.

use super::disk::Disk;
use super::rig::{EDGE, HOLDER, Rig, limits};
use crate::disks::Location;
use crate::geometry::PAGE;
use crate::import::{Holder, Import, ImportError, ImportIntent, ImportReport};
use crate::interface::IoFailed;

pub(crate) fn import(disk: Disk) -> Result<(Rig, ImportReport), ImportError> {
    import_by(disk, HOLDER)
}

/// Opens the pool on a disk. `stop_after`: the import is given up after this many I/Os.
pub(crate) fn import_by(disk: Disk, holder: Holder) -> Result<(Rig, ImportReport), ImportError> {
    // The devices of a pool come in any order.
    let count = disk.parts.len();
    let devices: Vec<usize> = (0..count)
        .map(|at| (at + disk.history as usize) % count)
        .collect();
    let bytes: Vec<u64> = devices.iter().map(|part| disk.bytes_of(*part)).collect();
    let is_volatile = disk.is_volatile;
    let mut disk = disk;
    let mut import = Import::new(&bytes, EDGE, limits(is_volatile), holder);
    loop {
        while let Some(intent) = import.poll() {
            match intent {
                ImportIntent::Read { io, at, len } => {
                    let part = devices[at.disk];
                    let first = disk.block(Location { disk: part, ..at });
                    let blocks = first..first + len / PAGE;
                    let blocks = blocks.map(|block| disk.read(block).map(<[u8; PAGE]>::as_slice));
                    let blocks: Option<Vec<&[u8]>> = blocks.collect();
                    let data = blocks.map(|blocks| blocks.concat());
                    import.read(io, data.as_deref().ok_or(IoFailed));
                }
                ImportIntent::Flush { io, disk: device } => {
                    let complete = disk.completed_on(devices[device]);
                    disk.flush(&complete);
                    import.flushed(io, Ok(()));
                }
            }
        }
        match import.outcome() {
            Some(Ok((pool, report))) => {
                // Disks that are not of the pool come last: they can be added.
                let order = import.order().iter().map(|device| devices[*device]);
                let mut order: Vec<usize> = order.collect();
                assert!(order.is_sorted(), "{order:?}");
                let others = (0..count).filter(|part| !order.contains(part));
                order.extend(others.collect::<Vec<usize>>());
                disk.parts = order.iter().map(|part| disk.parts[*part].clone()).collect();
                return Ok((Rig::on(pool, disk), report));
            }
            Some(Err(error)) => return Err(error),
            None => assert!(import.poll().is_some(), "the import is stuck"),
        }
    }
}
