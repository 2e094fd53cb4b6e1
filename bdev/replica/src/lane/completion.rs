//! The ends of requests: completed, refused, aborted, or dropped with their lane.

use std::sync::atomic::Ordering;

use nacre_bdev::{Pending, Queue, Status};
use nacre_reactor::Nanos;

use super::Lane;
use super::request::{NO_TROUBLE, Stage, bit, child_token, slots};
use crate::model::MAX_MEMBERS;

impl Lane {
    /// Ends a request that awaits no child. Parts that devices still hold become orphans.
    pub(super) fn finish(&mut self, index: usize, status: Status) {
        self.unlock(index);
        self.freed = true;
        let data = std::mem::take(&mut self.requests[index].data);
        if let Some(pending) = self.close(index) {
            self.ready.push_back(pending.complete(status, data));
        }
    }

    /// Removes a request from the table, for the caller to complete it. `None`: it was completed
    /// before.
    #[inline]
    pub(super) fn close(&mut self, index: usize) -> Option<Pending> {
        let request = &mut self.requests[index];
        let (pending, start) = (request.pending.take(), request.start);
        if request.trouble != NO_TROUBLE {
            self.troubles.remove(request.trouble as usize);
            request.trouble = NO_TROUBLE;
        }
        if request.orphans == 0 {
            self.requests.remove(index);
        } else {
            request.stage = Stage::Orphaned;
        }
        let pending = pending?;
        self.answered(start);
        Some(pending)
    }

    /// Counts the completion of a request that came at `start`.
    #[inline]
    pub(super) fn answered(&mut self, start: Nanos) {
        self.open -= 1;
        if start != Nanos::ZERO {
            let latency = self.now.0.saturating_sub(start.0);
            let smooth = self.turn.latency_ns;
            self.turn.latency_ns = smooth - smooth / 16 + latency / 16;
        }
    }

    /// Completes a request that keeps its locks, because its replicas are not finished.
    #[cold]
    pub(super) fn answer_early(&mut self, index: usize, status: Status) {
        let request = &mut self.requests[index];
        let data = request.data.clone();
        if let Some(pending) = request.pending.take() {
            self.open -= 1;
            self.ready.push_back(pending.complete(status, data));
        }
    }

    /// A host aborts. A request that did not start ends; one that a single replica has is aborted
    /// there. A write that several replicas have is not aborted, so that they stay equal: it ends
    /// there, or here if it must wait.
    #[cold]
    pub(super) fn abort_request(&mut self, index: usize) -> bool {
        self.requests[index].aborted = true;
        if matches!(self.requests[index].stage, Stage::Parked(_)) {
            self.parked.retain(|parked| *parked as usize != index);
            self.freed = true;
            self.finish(index, Status::Aborted);
            return true;
        }
        let request = &self.requests[index];
        let all = request.with | request.queued | request.ok | request.failed | request.orphans;
        let alone = all.count_ones() == 1;
        if request.writes() && !alone {
            let held = request.awaited() == 0 && request.held && request.data_home();
            if held {
                self.hold(index);
            }
            return held;
        }
        if request.is_read() {
            self.leave_late(index);
        }
        self.requests[index].given_up |= self.requests[index].queued != 0;
        self.drop_waiting(index);
        let request = &self.requests[index];
        let generation = request.generation;
        let mut asked = false;
        for slot in slots(request.with) {
            if let Some(queue) = &mut self.queues[slot] {
                asked |= queue.queue.abort(child_token(index, slot, generation));
            }
        }
        let request = &self.requests[index];
        if request.with | request.orphans != 0 && !(request.with == 0 && request.data_home()) {
            return asked;
        }
        self.abort_ended(index);
        true
    }

    /// A child of an aborted request was given up, or none is left.
    pub(super) fn abort_ended(&mut self, index: usize) {
        let request = &self.requests[index];
        if request.with | request.queued == 0 {
            self.leave_unequal(index);
            self.finish(index, Status::Aborted);
        }
    }

    /// Some replicas have the blocks, others may not, and the write ends without being done. The
    /// other in-sync replicas are copied to again from the first one.
    #[cold]
    pub(super) fn leave_unequal(&mut self, index: usize) {
        let request = &self.requests[index];
        if request.writes() && request.locked {
            self.leave_unequal_at(request.lba, u64::from(request.blocks));
        }
    }

    /// The same for a write to these blocks whose stripes this lane holds.
    #[cold]
    pub(super) fn leave_unequal_at(&self, lba: u64, blocks: u64) {
        let members = self.sync.in_sync | self.sync.syncing;
        for region in self.shared.regions_of(lba, blocks) {
            let has = |slot: &usize| !self.shared.needs[*slot].contains(region);
            let Some(leads) = slots(self.sync.in_sync).find(has) else {
                continue;
            };
            for slot in slots(members & !bit(leads)) {
                self.shared.add_needs(slot, region..region + 1);
            }
        }
    }
}

impl Drop for Lane {
    /// Completes no request. Writes that some replicas have and others may not leave their regions
    /// in `needs` of all in-sync replicas but the first, as an unclean stop would. Writes that a
    /// device still has are counted, so that copying does not start before they end.
    fn drop(&mut self) {
        self.requests.settle();
        for slot in 0..MAX_MEMBERS {
            let queues = [self.queues[slot].take(), self.old[slot].take()];
            for queue in queues.into_iter().flatten() {
                self.close_member(*queue);
            }
        }
        for index in 0..self.requests.end() {
            if !self.requests.contains(index) {
                continue;
            }
            let request = &self.requests[index];
            if request.writes() && request.with | request.orphans != 0 {
                self.shared.abandon();
            }
            if self.requests[index].locked {
                self.leave_unequal(index);
                self.unlock(index);
            }
            if let Some(pending) = self.requests[index].pending.take() {
                pending.abandon();
            }
        }
        self.local = [0; MAX_MEMBERS];
        (0..MAX_MEMBERS).for_each(|slot| self.publish_outstanding(slot));
        self.state.gone.store(true, Ordering::SeqCst);
        self.shared.remove_lane(&self.state);
    }
}
