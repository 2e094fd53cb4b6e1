//! The queue on the external device that the volume shows. It opens with the first read of it.
//!
//! Such a read holds no epoch: nothing frees or changes what it reads.

use std::sync::Arc;

use nacre_bdev::{Claim, Done, Queue};
use nacre_bdev_pool_core::disks::Location;
use nacre_bdev_pool_core::geometry::{Geometry, PAGE};
use nacre_reactor::Nanos;

use super::{Base, Lane};

/// The number of the external device, beside those of the pool's disks.
pub(super) const EXTERNAL_DISK: usize = usize::MAX;

/// The place of a granule of the volume on the external device.
pub(super) fn locate_external(geometry: &Geometry, place: u64, granule: u32) -> Location {
    let first = place * u64::from(geometry.granules_per_unit);
    Location {
        disk: EXTERNAL_DISK,
        offset: (first + u64::from(granule)) * PAGE as u64,
    }
}

impl Base {
    /// True when all I/O has ended, but for overdue reads. They do not keep a queue open.
    fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.queue.inflight() <= self.overdue.len()
    }
}

impl Lane {
    pub(super) fn base(&self, disk: usize) -> Option<&Base> {
        match disk {
            EXTERNAL_DISK => self.externals.last(),
            disk => self.bases.get(disk).and_then(Option::as_ref),
        }
    }

    pub(super) fn base_mut(&mut self, disk: usize) -> Option<&mut Base> {
        match disk {
            EXTERNAL_DISK => self.externals.last_mut(),
            disk => self.bases.get_mut(disk).and_then(Option::as_mut),
        }
    }

    pub(super) fn queues(&self) -> impl Iterator<Item = &Base> {
        self.bases.iter().flatten().chain(&self.externals)
    }

    pub(super) fn queues_mut(&mut self) -> impl Iterator<Item = &mut Base> {
        let disks = self.bases.iter_mut().flatten();
        disks.chain(&mut self.externals)
    }

    /// Makes the queue on a device the present one. Returns false if it cannot be opened.
    pub(super) fn open_external(&mut self, claim: &Arc<Claim>) -> bool {
        let last = self.externals.last();
        if last.is_some_and(|base| Arc::ptr_eq(&base.claim, claim)) {
            return true;
        }
        let number = last.map_or(0, |base| base.number.wrapping_add(1));
        match self.open_disk(claim) {
            Ok(base) => {
                self.externals.push(Base { number, ..base });
                true
            }
            Err(error) => {
                tracing::warn!(%error, "the external device of a volume is not open");
                false
            }
        }
    }

    /// Completions of external devices.
    pub(super) fn collect_external(&mut self, now: Nanos, done: &mut Done) -> usize {
        let mut count = 0;
        for at in 0..self.externals.len() {
            count += self.refuse_waiting(at);
            let base = &mut self.externals[at];
            base.submit_waiting();
            count += base.queue.poll(now, done);
            for ended in done.drain() {
                self.overdue_ended(at, ended.token);
                self.child_ended(ended);
            }
        }
        count
    }

    /// Closes idle queues on devices that the volume does not show any more.
    pub(super) fn close_externals(&mut self) {
        if self.externals.is_empty() {
            return;
        }
        let present = self.map.external();
        let is_present = |base: &Base| {
            let claim = present.as_ref();
            claim.is_some_and(|claim| Arc::ptr_eq(claim, &base.claim))
        };
        let children = &mut self.children;
        self.externals.retain(|base| {
            let stays = is_present(base) || !base.is_idle();
            if !stays {
                // No completion of an abandoned read follows.
                base.overdue.iter().for_each(|child| {
                    children.try_remove(*child);
                });
            }
            stays
        });
    }
}
