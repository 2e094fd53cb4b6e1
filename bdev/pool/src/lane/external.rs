//! The queue on the external device that the volume shows. It opens with the first read of it.
//!
//! Such a read holds no epoch: nothing frees or changes what it reads.

use std::sync::Arc;

use nacre_bdev::{Claim, Done, Queue, Status};
use nacre_bdev_pool_core::disks::Location;
use nacre_bdev_pool_core::geometry::{Geometry, PAGE};
use nacre_reactor::{Idle, Nanos};
use slab::Slab;

use super::{Base, Child, Lane};
use crate::overdue::Ticks;

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

/// The queues on external devices, and the reads in flight there.
#[derive(Default)]
pub(super) struct Externals {
    /// The queue on the present device is the last one.
    pub queues: Vec<Base>,
    /// Reads in flight that are not overdue.
    pub reads: usize,
    pub ticks: Ticks,
}

impl Externals {
    /// True if the present queue is on this device.
    fn has(&self, claim: &Arc<Claim>) -> bool {
        let last = self.queues.last();
        last.is_some_and(|base| Arc::ptr_eq(&base.claim, claim))
    }

    fn add(&mut self, base: Base) {
        let last = self.queues.last();
        let number = last.map_or(0, |base| base.number.wrapping_add(1));
        self.queues.push(Base { number, ..base });
    }

    /// Closes idle queues on devices other than the present one.
    fn close(&mut self, present: Option<&Arc<Claim>>, children: &mut Slab<Child>) {
        let is_present = |base: &Base| present.is_some_and(|claim| Arc::ptr_eq(claim, &base.claim));
        self.queues.retain(|base| {
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

    pub(super) fn due(&self) -> Idle {
        self.ticks.due().map_or(Idle::Quiet, Idle::Until)
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
            EXTERNAL_DISK => self.externals.queues.last(),
            disk => self.bases.get(disk).and_then(Option::as_ref),
        }
    }

    pub(super) fn base_mut(&mut self, disk: usize) -> Option<&mut Base> {
        match disk {
            EXTERNAL_DISK => self.externals.queues.last_mut(),
            disk => self.bases.get_mut(disk).and_then(Option::as_mut),
        }
    }

    pub(super) fn queues(&self) -> impl Iterator<Item = &Base> {
        self.bases.iter().flatten().chain(&self.externals.queues)
    }

    pub(super) fn queues_mut(&mut self) -> impl Iterator<Item = &mut Base> {
        let disks = self.bases.iter_mut().flatten();
        disks.chain(&mut self.externals.queues)
    }

    /// Makes the queue on a device the present one. Returns false if it cannot be opened.
    pub(super) fn open_external(&mut self, claim: &Arc<Claim>) -> bool {
        if self.externals.has(claim) {
            return true;
        }
        let opened = self.open_disk(claim);
        if let Err(error) = &opened {
            tracing::warn!(%error, "the external device of a volume is not open");
        }
        opened.map(|base| self.externals.add(base)).is_ok()
    }

    /// Completions of external devices.
    pub(super) fn collect_external(&mut self, now: Nanos, done: &mut Done) -> usize {
        let mut count = 0;
        for at in 0..self.externals.queues.len() {
            let base = &mut self.externals.queues[at];
            let refused = base.take_refused();
            base.submit_waiting();
            count += refused.len() + base.queue.poll(now, done);
            for io in refused {
                self.child_ended(io.complete(Status::Gone));
            }
            for ended in done.drain() {
                self.externals.queues[at].overdue_ended(ended.token);
                self.child_ended(ended);
            }
        }
        count
    }

    /// Closes idle queues on devices that the volume does not show any more.
    pub(super) fn close_externals(&mut self) {
        if !self.externals.queues.is_empty() {
            let present = self.map.external();
            self.externals.close(present.as_ref(), &mut self.children);
        }
    }
}
