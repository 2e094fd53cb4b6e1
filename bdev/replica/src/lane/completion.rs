//! The ends of requests: completed, refused, aborted, or dropped with their lane.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;

use nacre_bdev::{Completion, Done, Pending, Status};
use nacre_reactor::Nanos;

use super::Lane;
use super::request::{Stage, slots};
use super::waiting::Recheck;

/// The I/Os that hosts wait for.
pub(super) struct Completions {
    ready: VecDeque<Completion>,
    /// Accepted and not yet completed, except those in `ready`.
    open: usize,
}

impl Completions {
    pub fn with_capacity(capacity: usize) -> Completions {
        Completions {
            ready: VecDeque::with_capacity(capacity),
            open: 0,
        }
    }

    /// I/Os that were accepted and not returned.
    #[inline]
    pub fn count(&self) -> usize {
        self.open + self.ready.len()
    }

    pub fn has_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    /// Counts an accepted I/O; returns the time of its arrival, or zero if the time is unknown:
    /// without open requests the lane may not have been polled.
    #[inline]
    pub fn open(&mut self, now: Nanos) -> Nanos {
        self.open += 1;
        if self.open == 1 { Nanos::ZERO } else { now }
    }

    /// An open I/O is completed, and its completion returned to the caller of `poll` directly.
    #[inline]
    pub fn close(&mut self) {
        self.open -= 1;
    }

    /// Returns a completion with the next poll.
    pub fn push(&mut self, completion: Completion) {
        self.ready.push_back(completion);
    }

    pub fn hand_over(&mut self, done: &mut Done) {
        while done.has_room()
            && let Some(completion) = self.ready.pop_front()
        {
            done.push(completion);
        }
    }
}

impl Lane {
    /// Releases the regions and stripes of a write.
    #[inline]
    pub(super) fn unlock(&mut self, index: usize) {
        if self.locks.unlock(&mut self.requests, index) {
            self.waiting.note(Recheck::WriteEnded);
        }
    }

    /// Ends a request that awaits no child. Parts that devices still hold become orphans.
    pub(super) fn finish(&mut self, index: usize, status: Status) {
        self.unlock(index);
        self.waiting.note(Recheck::WriteEnded);
        let data = std::mem::take(&mut self.requests[index].data);
        if let Some(pending) = self.close(index) {
            self.completions.push(pending.complete(status, data));
        }
    }

    /// Removes a request from the table, for the caller to complete it. `None`: it was completed
    /// before.
    #[inline]
    pub(super) fn close(&mut self, index: usize) -> Option<Pending> {
        let (pending, start) = self.requests.close(index)?;
        self.answered(start);
        Some(pending)
    }

    /// Counts the completion of a request that came at `start`.
    #[inline]
    pub(super) fn answered(&mut self, start: Nanos) {
        self.completions.close();
        if start != Nanos::ZERO {
            self.counters.latency(self.now.0.saturating_sub(start.0));
        }
    }

    /// Completes a request that keeps its locks, because its replicas are not finished.
    #[cold]
    pub(super) fn answer_early(&mut self, index: usize, status: Status) {
        let request = &mut self.requests[index];
        let data = request.data.clone();
        if let Some(pending) = request.pending.take() {
            self.completions.close();
            self.completions.push(pending.complete(status, data));
        }
    }

    /// A host aborts. A request that did not start ends; one that a single replica has is aborted
    /// there. A write that several replicas have is not aborted, so that they stay equal: it ends
    /// there, or here if it must wait.
    #[cold]
    pub(super) fn abort_request(&mut self, index: usize) -> bool {
        self.requests[index].aborted = true;
        if matches!(self.requests[index].stage, Stage::Parked(_)) {
            self.waiting.remove(index);
            self.waiting.note(Recheck::WriteEnded);
            self.finish(index, Status::Aborted);
            return true;
        }
        let request = &mut self.requests[index];
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
            request.leave_late();
        }
        request.given_up |= request.queued != 0;
        self.replicas.drop_waiting(request, index);
        let mut asked = false;
        for slot in slots(request.with) {
            asked |= self.replicas.abort(request, index, slot);
        }
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

    /// Some replicas have the blocks, others may not, and the write ends without being done.
    #[cold]
    pub(super) fn leave_unequal(&mut self, index: usize) {
        let request = &self.requests[index];
        if request.writes() && request.locked {
            self.replicas
                .leave_unequal(request.lba, u64::from(request.blocks));
        }
    }
}

impl Drop for Lane {
    /// Completes no request. Writes that some replicas have and others may not leave their regions
    /// in `needs` of all in-sync replicas but the first, as an unclean stop would. Writes that a
    /// device still has are counted, so that copying does not start before they end.
    fn drop(&mut self) {
        self.requests.settle();
        self.replicas.close_all();
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
        self.replicas.clear_loads();
        self.state.gone.store(true, Ordering::SeqCst);
        self.shared.remove_lane(&self.state);
    }
}
