//! Chooses the replica of a read, and finds the replicas that lack blocks of a request.

use super::Replicas;
use crate::lane::request::Request;
use crate::lane::slots::{Slots, bit, slots};
use crate::model::{MAX_REPLICAS, ReadPolicy};
use crate::mutation::Mutation;

/// log2 of the bytes of a stripe whose reads go to one replica. It is small enough that a
/// sequential stream at queue depth uses several replicas.
pub(in crate::lane) const READ_STRIPE: u32 = 18;
/// Reads move to another replica when the preferred one has this many reads, plus a quarter, more
/// than the least busy one.
const SLACK: u32 = 4;

/// Number of children in flight at each slot.
pub(in crate::lane) type Loads = [u32; MAX_REPLICAS];

/// Chooses one of several replicas for a read.
pub(super) struct Choice {
    /// log2 of the blocks of a stripe whose reads go to one replica.
    stripe_shift: u32,
    /// The slot whose turn it is.
    next: usize,
}

impl Choice {
    pub(super) fn new(block_size: u32) -> Self {
        Self {
            stripe_shift: READ_STRIPE.saturating_sub(block_size.max(1).ilog2()),
            next: 0,
        }
    }

    /// Chooses among `all`, which is not empty; `local`: the replicas on this machine.
    #[inline]
    pub(super) fn of(
        &mut self,
        policy: ReadPolicy,
        lba: u64,
        all: Slots,
        local: Slots,
        loads: &Loads,
    ) -> usize {
        let near = all & local;
        match policy {
            ReadPolicy::LocalFirst if near != 0 => self.nearest(lba, near, loads),
            ReadPolicy::LocalFirst => self.nearest(lba, all, loads),
            ReadPolicy::LeastOutstanding => {
                let load = |slot: &usize| loads[*slot];
                slots(all).min_by_key(load).unwrap_or_default()
            }
            ReadPolicy::RoundRobin => {
                let behind = slots(all).find(|slot| *slot >= self.next);
                let slot = behind.unwrap_or_else(|| all.trailing_zeros() as usize);
                self.next = slot + 1;
                slot
            }
        }
    }

    /// The replica that serves reads of this stripe, so that each replica caches a different part
    /// of the volume; or the least busy one, if the former has clearly more work.
    #[inline]
    fn nearest(&self, lba: u64, among: Slots, loads: &Loads) -> usize {
        let turn = (lba >> self.stripe_shift) as u32 % among.count_ones();
        let (mut chosen, mut least) = (0, u32::MAX);
        let (mut idlest, mut at) = (0, 0);
        for slot in slots(among) {
            if at == turn {
                chosen = slot;
            }
            if loads[slot] < least {
                (idlest, least) = (slot, loads[slot]);
            }
            at += 1;
        }
        if loads[chosen] > least + least / 4 + SLACK {
            idlest
        } else {
            chosen
        }
    }
}

impl Replicas {
    /// The replica that a read goes to without further checks.
    #[inline]
    pub(crate) fn direct_slot(&mut self, lba: u64) -> Option<usize> {
        let of = self.direct;
        match of & of.wrapping_sub(1) {
            0 => (of != 0).then(|| of.trailing_zeros() as usize),
            _ if slots(of).all(|slot| self.shared.missing[slot].is_none()) => {
                Some(self.choose_of(lba, of))
            }
            _ => None,
        }
    }

    /// True when reads may go to a replica without further checks.
    #[inline]
    pub(crate) fn allow_direct(&self) -> bool {
        self.direct != 0
    }

    /// The replica to read from, among those not yet tried.
    #[inline]
    pub(crate) fn choose(&mut self, request: &Request) -> Option<usize> {
        let left = self.may_read(request);
        if left & left.wrapping_sub(1) == 0 {
            return slots(left).next();
        }
        Some(self.choose_of(request.lba, left))
    }

    #[inline]
    fn choose_of(&mut self, lba: u64, left: Slots) -> usize {
        let policy = self.view.read_policy;
        self.choice
            .of(policy, lba, left, self.sync.local, &self.loads)
    }

    /// Replicas to read from that were not yet tried. During a reconcile, excludes replicas that
    /// lack part of the range, even if the others fail: reads would return changing data.
    #[inline]
    pub(crate) fn may_read(&self, request: &Request) -> Slots {
        let in_sync = if Mutation::ReadStale.is_active() {
            self.sync.in_sync | self.sync.syncing
        } else {
            self.sync.in_sync
        };
        let whole = match in_sync & in_sync.wrapping_sub(1) {
            0 => in_sync,
            _ if slots(in_sync).all(|slot| self.shared.missing[slot].is_none()) => in_sync,
            _ => self.whole(request, in_sync),
        };
        whole & !(request.children.tried | request.children.at_devices())
    }

    #[cold]
    fn whole(&self, request: &Request, of: Slots) -> Slots {
        if Mutation::ReadStale.is_active() {
            return of;
        }
        let regions = self.regions_of(request);
        let lacks = |slot: &usize| self.shared.missing[*slot].contains_any(regions.clone());
        let whole = slots(of).filter(|slot| !lacks(slot));
        match whole.fold(0, |set, slot| set | bit(slot)) {
            // Every replica lacks part of the range: use the source of the reconcile.
            0 => bit(of.trailing_zeros() as usize),
            whole => whole,
        }
    }

    fn regions_of(&self, request: &Request) -> std::ops::Range<u64> {
        self.shared
            .regions_of(request.lba, u64::from(request.blocks))
    }

    /// Asks the control to repair the regions of a read that an in-sync replica lacks. Returns the
    /// number to wait for. `None`: no replica lacks them now, or too many repairs are pending.
    pub(crate) fn want_equal(&self, request: &Request) -> Option<u64> {
        let lacked = |region: &u64| {
            let mut replicas = slots(self.sync.in_sync);
            replicas.any(|slot| self.shared.missing[slot].contains(*region))
        };
        let regions = self.regions_of(request).filter(lacked);
        let requests = regions.map(|region| self.shared.want_equal(region));
        requests.reduce(|a, b| Some(a?.max(b?))).flatten()
    }

    /// Replicas whose resync will copy this range after the write, because the write holds its
    /// stripe locks. Excludes replicas about to be promoted: the store may already list them in
    /// sync without regions found missing meanwhile, and an acknowledged write must not be missing
    /// there.
    #[inline]
    pub(crate) fn copied_later(&self, request: &Request) -> Slots {
        let later = |slot: &usize| self.is_copied_later(request, *slot);
        let syncing = slots(self.sync.syncing & !self.sync.flushed);
        syncing.filter(later).fold(0, |set, slot| set | bit(slot))
    }

    fn is_copied_later(&self, request: &Request, slot: usize) -> bool {
        let regions = self.regions_of(request);
        // In this order: a region leaves the needs before it stops being the copied one.
        let copying = self.shared.copying();
        !regions.contains(&copying) && self.shared.missing[slot].contains_all(regions)
    }

    /// Handles a request that ends without success. A write with locks may be on some replicas
    /// only.
    #[cold]
    pub(crate) fn leave_request_unequal(&self, request: &Request) {
        if request.writes() && request.locked.is_some() {
            self.leave_unequal(request.lba, u64::from(request.blocks));
        }
    }

    /// Handles a failed write that some replicas have and others may not: schedules its regions for
    /// a copy from the first in-sync replica to the others. The caller has the stripes locked.
    #[cold]
    pub(crate) fn leave_unequal(&self, lba: u64, blocks: u64) {
        let replicas = self.sync.in_sync | self.sync.syncing;
        for region in self.shared.regions_of(lba, blocks) {
            let has = |slot: &usize| !self.shared.missing[*slot].contains(region);
            let Some(leads) = slots(self.sync.in_sync).find(has) else {
                continue;
            };
            for slot in slots(replicas & !bit(leads)) {
                self.shared.add_needs(slot, region..region + 1);
            }
        }
    }
}
