//! Disks that leave the pool of a run, and what an import must find of them.

use super::World;
use crate::disks::DiskState;
use crate::interface::{Refusal, Request};
use crate::tests::op::Op;

/// What an import must find.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Removal {
    /// Leaving, or gone.
    Begun,
    Stays,
    Gone,
}

impl World {
    /// Removes a disk, or keeps the one that leaves.
    pub(super) fn remove(&mut self) {
        if self.ops.values().any(|op| matches!(op, Op::Removal { .. })) {
            return;
        }
        let table = &self.rig.pool.superblock().disks;
        let present: Vec<usize> = table.present().collect();
        let (disk, keeps) = match self.rig.pool.leaving() {
            Some(leaving) if self.random.one_in(3) => (leaving.disk, true),
            _ => (*self.random.pick(&present), false),
        };
        let id = self.rig.pool.superblock().disks.disks()[disk].id;
        let token = self.rig.submit(if keeps {
            Request::KeepDisk { disk }
        } else {
            Request::RemoveDisk { disk }
        });
        self.ops.insert(token, Op::Removal { disk: id, keeps });
    }

    /// Takes note of disks that left, and of those that stay.
    pub(super) fn take_left(&mut self) -> Result<(), String> {
        for (disk, result) in std::mem::take(&mut self.rig.left) {
            match result {
                Ok(()) => self.report.left += 1,
                Err(Refusal::Cancelled | Refusal::Medium | Refusal::NoRoom { .. }) => {
                    self.report.stayed += 1
                }
                Err(other) => return Err(format!("a disk stays: {other}")),
            }
            let is_gone = result.is_ok();
            let state = if is_gone {
                Removal::Gone
            } else {
                Removal::Stays
            };
            self.removals.insert(disk, state);
        }
        Ok(())
    }

    /// The same, and of a disk that stays: a root may have said so, and the message is due.
    pub(super) fn take_left_before_crash(&mut self) -> Result<(), String> {
        self.take_left()?;
        let leaving = self.rig.pool.leaving();
        if let Some(leaving) = leaving.filter(|leaving| leaving.is_staying) {
            let id = self.rig.pool.superblock().disks.disks()[leaving.disk].id;
            self.removals.remove(&id);
        }
        Ok(())
    }

    pub(super) fn check_removals(&mut self) -> Result<(), String> {
        let table = &self.rig.pool.superblock().disks;
        for (disk, state) in &self.removals {
            let found = table.position(*disk).map(|at| table.disks()[at].state);
            let fits = match (state, found) {
                (Removal::Begun, None | Some(DiskState::Leaving)) => true,
                (Removal::Stays, Some(DiskState::In)) | (Removal::Gone, None) => true,
                (Removal::Stays, None | Some(DiskState::Leaving)) => {
                    // Another removal was not answered yet. A disk without data is gone at once.
                    let mut ops = self.ops.values();
                    ops.any(|op| matches!(op, Op::Removal { disk: of, keeps: false } if of == disk))
                }
                _ => false,
            };
            if !fits {
                return Err(format!("disk {disk}: {found:?}, not {state:?}"));
            }
        }
        self.removals.clear();
        Ok(())
    }
}
