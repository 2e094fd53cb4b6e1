//! Read repair: writes back blocks that one replica failed to read and another returned.

use std::rc::Rc;

use super::chunk::Copier;
use super::context::Context;
use super::media::SHORTAGE_OVER;
use crate::handle::VolumeEventKind;
use crate::shared::{Failure, Repair};

pub(super) struct ReadRepair {
    pub context: Rc<Context>,
    pub copier: Rc<Copier>,
}

impl ReadRepair {
    /// Writes back blocks that a replica could not read and another could.
    pub(super) async fn repair_reads(self: Rc<Self>) {
        loop {
            self.context.signals.repair.notified().await;
            while let Some(repair) = { self.context.state.borrow_mut().repairs.pop_front() } {
                self.repair_read(repair).await;
            }
        }
    }

    async fn repair_read(&self, repair: Repair) {
        let step = self.copier.chunk_blocks();
        let (mut lba, end) = (repair.lba, repair.lba + u64::from(repair.blocks));
        while lba < end {
            let blocks = step.min(end - lba);
            match self.repair_range(&repair, lba, blocks).await {
                Some(true) => lba += blocks,
                Some(false) => return,
                None => self.context.core.after(SHORTAGE_OVER).await,
            }
        }
        self.context.emit(VolumeEventKind::ReadRepaired {
            replica: self.context.replica_id(repair.slot),
            lba: repair.lba,
            blocks: repair.blocks,
        });
    }

    /// Returns `None` if nothing was done for lack of a buffer.
    async fn repair_range(&self, repair: &Repair, lba: u64, blocks: u64) -> Option<bool> {
        let slot = repair.slot;
        let chunk = self.copier.acquire_chunk(lba, blocks).await;
        let (target, source) = {
            let state = self.context.state.borrow();
            let target = state.live[slot].clone();
            let regions = self.context.shared.regions_of(lba, blocks);
            let good = |s: usize| {
                s != slot && !self.context.shared.missing[s].contains_any(regions.clone())
            };
            let source = state.in_sync().find(|(s, _)| good(*s));
            (target, source.map(|(slot, live)| (slot, Rc::clone(live))))
        };
        let (Some(target), Some((from, source))) = (target, source) else {
            return Some(false);
        };
        if target.incarnation != repair.incarnation {
            return Some(false);
        }
        match self.copier.copy(&chunk, &source, &[&target]).await {
            Ok(failed) => {
                for (_, why) in failed.iter().filter(|(_, why)| !why.is_no_space()) {
                    self.context.suspect(slot, target.incarnation, *why);
                }
                Some(failed.is_empty())
            }
            Err(Failure::Shortage) => None,
            Err(why) => {
                self.context.suspect_read(from, source.incarnation, why);
                Some(false)
            }
        }
    }
}
