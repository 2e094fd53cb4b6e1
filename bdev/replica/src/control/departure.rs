//! Takes a replica out of use: detaches it temporarily, marks it out of sync, or removes it from
//! the volume.

use uuid::Uuid;

use super::membership::Membership;
use super::state::Live;
use crate::handle::{VolumeError, VolumeEventKind};

impl Membership {
    /// True if an in-sync replica lacks nothing, and has lost nothing.
    pub(super) fn is_good_copy(&self, slot: usize, live: &Live) -> bool {
        self.context.shared.missing[slot].is_empty() && live.is_whole()
    }

    /// Removes the replica in `slot` from the volume. The caller holds `Membership::turn`.
    pub(super) async fn remove_slot(&self, slot: usize) -> Result<(), VolumeError> {
        let Some(replica) = self.context.state.borrow().record.replica(slot).cloned() else {
            return Ok(());
        };
        // Remove it from the view first, so that no more writes reach it; release it when its label
        // is wiped.
        self.keep_in_view(slot);
        let live = self.context.state.borrow_mut().live[slot].take();
        let gone = self.commit(|record| {
            record.replicas.retain(|m| usize::from(m.slot) != slot);
            for other in &mut record.replicas {
                other.replaces = other.replaces.filter(|replaced| *replaced != replica.id);
            }
            let count = record.replicas.len() as u8;
            let least = &mut record.settings.min_in_sync;
            *least = (*least).min(count);
        });
        let gone = gone.await;
        if gone.is_ok() {
            self.has_left(slot, replica.id)
        } else {
            self.context.publish()
        }
        if let Some(live) = live {
            if gone.is_ok() {
                self.media.wipe_labels(&live.disk).await;
            }
            self.let_others_in(&live).await;
            self.media.disks.forget(&live.disk);
        }
        gone?;
        self.context.emit(VolumeEventKind::ReplicaRemoved {
            replica: replica.id,
            device: replica.device,
        });
        Ok(())
    }

    /// A replica to be removed now, because its replacement is a good copy.
    pub(super) fn replaced(&self) -> Option<usize> {
        let state = self.context.state.borrow();
        if !state.serving || state.closed || state.fenced.is_some() {
            return None;
        }
        let good = state
            .in_sync()
            .filter(|(slot, live)| self.is_good_copy(*slot, live));
        let mut replaced = good.filter_map(|(slot, _)| state.record.replica(slot)?.replaces);
        let old = replaced.find_map(|id| state.record.replicas.iter().find(|m| m.id == id))?;
        Some(usize::from(old.slot))
    }

    /// Detaches the replica in `slot`. Lanes keep it as a replica until all consequences are
    /// complete, whatever view is published meanwhile.
    pub(super) fn let_go_of(&self, slot: usize) {
        self.keep_in_view(slot);
        self.detach(slot);
    }

    /// Prepares to detach an in-sync replica: lanes keep their view of it until `leaving` is
    /// cleared.
    pub(super) fn keep_in_view(&self, slot: usize) {
        let known = self.context.shared.view().replicas[slot].clone();
        if self.context.state.borrow().is_in_sync(slot) {
            self.context.state.borrow_mut().leaving[slot] = known;
        }
    }

    /// Notifies lanes that an in-sync replica is out, or removed, in the store, before any other
    /// event. With the old view, a later event would make them treat it, or its successor in the
    /// slot, as lacking regions, and two reads of the same data could differ.
    pub(super) fn has_left(&self, slot: usize, replica: Uuid) {
        self.context.state.borrow_mut().leaving[slot] = None;
        self.context.publish();
        self.repin(replica);
        self.context.shared.missing[slot].assign(|_| false);
        self.context.refresh_status();
    }

    /// Stops using the replica's device, until it is attached again.
    pub(super) fn detach(&self, slot: usize) {
        let Some(live) = self.context.state.borrow_mut().live[slot].take() else {
            return;
        };
        self.media.disks.forget(&live.disk);
        let now = self.context.core.now();
        self.context.state.borrow_mut().retries[slot].failed(now);
        self.context.signals.probe.notify_one();
        self.context.signals.resync.notify_one();
    }

    /// Changes the source after `lost` is out or removed. If the others were to be reconciled from
    /// `lost`, they are reconciled from the first of them from now on. The caller holds `turn`.
    pub(super) fn repin(&self, lost: Uuid) {
        if let Some(first) = self.believe_first() {
            self.context.emit(VolumeEventKind::SourceChanged {
                from: lost,
                to: self.context.replica_id(first),
            });
        }
    }

    /// Makes the first in-sync replica the source of the regions that every in-sync replica lacks.
    /// Their differences were never acknowledged, so any of them may be the source, but only one.
    /// Returns the slot of the source; `None`: no such region.
    pub(super) fn believe_first(&self) -> Option<usize> {
        let state = self.context.state.borrow();
        let slots: Vec<usize> = state.in_sync().map(|(slot, _)| slot).collect();
        let (first, others) = slots.split_first()?;
        let missing = &self.context.shared.missing;
        let (mut region, mut found) = (0, None);
        while let Some(lacked) = missing[*first].next(region) {
            if others.iter().all(|slot| missing[*slot].contains(lacked)) {
                missing[*first].remove(lacked);
                found = Some(*first);
            }
            region = lacked + 1;
        }
        if let (Some(first), Some(live)) = (found, &state.live[*first])
            && missing[first].is_empty()
        {
            *live.resync.borrow_mut() = None;
        }
        found
    }
}
