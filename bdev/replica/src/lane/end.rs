//! How requests end: done, refused, aborted, or with their lane.

use std::sync::atomic::Ordering;

use nacre_bdev::{Pending, Queue, Status};
use nacre_reactor::Nanos;

use super::Lane;
use super::request::{NO_TROUBLE, Stage, bit, child_token, slots};
use crate::model::MAX_MEMBERS;

impl Lane {
    /// The end of a request of which no child is awaited. What devices still have of it is an orphan.
    pub(super) fn finish(&mut self, index: usize, status: Status) {
        self.unlock(index);
        self.freed = true;
        let data = std::mem::take(&mut self.requests[index].data);
        if let Some(pending) = self.close(index) {
            self.ready.push_back(pending.complete(status, data));
        }
    }

    /// Takes a request off the books, for the caller to answer it. `None`: it was answered before.
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

    /// One that came at `start` is being answered.
    #[inline]
    pub(super) fn answered(&mut self, start: Nanos) {
        self.open -= 1;
        if start != Nanos::ZERO {
            let latency = self.now.0.saturating_sub(start.0);
            let smooth = self.turn.latency_ns;
            self.turn.latency_ns = smooth - smooth / 16 + latency / 16;
        }
    }

    /// Answers a request that keeps its locks, because it is not over for its members.
    #[cold]
    pub(super) fn answer_early(&mut self, index: usize, status: Status) {
        let request = &mut self.requests[index];
        let data = request.data.clone();
        if let Some(pending) = request.pending.take() {
            self.open -= 1;
            self.ready.push_back(pending.complete(status, data));
        }
    }

    /// A host gives up. What did not start yet ends; what one member has is aborted there. What several
    /// members have is not, so that they stay alike: it ends as it ends there, or here if it must wait.
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

    /// Some members have the blocks, others may not, and the write ends without having been done: those
    /// that follow are copied to again from the one that leads.
    #[cold]
    pub(super) fn leave_unequal(&mut self, index: usize) {
        let request = &self.requests[index];
        if request.writes() && request.locked {
            self.leave_unequal_at(request.lba, u64::from(request.blocks));
        }
    }

    /// Such a write to these blocks, whose stripes this lane has.
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
    /// Nobody is answered any more. Writes that some members have and others may not leave their regions
    /// in `needs` of all but the first in-sync member, as an unclean stop would; those that a device still has
    /// are counted, so that nothing is copied before they are over.
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
