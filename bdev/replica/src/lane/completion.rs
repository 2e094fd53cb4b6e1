//! The end of requests: completes, fails and aborts them, also when the lane is closed.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;

use nacre_bdev::{Completion, Done, Pending, Status};
use nacre_reactor::Nanos;

use super::Lane;
use super::request::{Request, Stage};
use super::requests::Requests;
use super::slots::slots;

/// The open I/Os of the lane's caller: their number, and completions.
pub(super) struct Completions {
    ready: VecDeque<Completion>,
    /// Number of accepted I/Os that are neither completed nor in `ready`.
    open: usize,
}

impl Completions {
    pub(super) fn with_capacity(capacity: usize) -> Self {
        Self {
            ready: VecDeque::with_capacity(capacity),
            open: 0,
        }
    }

    /// Number of accepted I/Os whose completion was not returned yet.
    #[inline]
    pub(super) fn count(&self) -> usize {
        self.open + self.ready.len()
    }

    pub(super) fn has_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    /// Counts an accepted I/O; returns the time of its arrival, or zero if the time is unknown:
    /// without open requests the lane may not have been polled.
    #[inline]
    pub(super) fn open(&mut self, now: Nanos) -> Nanos {
        self.open += 1;
        if self.open == 1 { Nanos::ZERO } else { now }
    }

    /// Counts a completion.
    #[inline]
    pub(super) fn answered(&mut self) {
        self.open -= 1;
    }

    /// Takes the pending I/O out of a request, for the caller to complete. `None`: the I/O was
    /// completed already.
    #[inline]
    pub(super) fn close(&mut self, requests: &mut Requests, index: usize) -> Option<Pending> {
        let pending = requests.close(index)?;
        self.answered();
        Some(pending)
    }

    /// Completes the I/O of a request whose replicas are still writing. The request keeps its
    /// locks.
    #[cold]
    pub(super) fn answer_early(&mut self, request: &mut Request, status: Status) {
        let data = request.data.clone();
        if let Some(pending) = request.pending.take() {
            self.open -= 1;
            self.push(pending.complete(status, data));
        }
    }

    /// Counts an I/O as open again whose completion may not leave yet.
    pub(super) fn reopen(&mut self) {
        self.open += 1;
    }

    /// Counts an I/O of [`Completions::reopen`] as completed.
    pub(super) fn close_held(&mut self) {
        self.open -= 1;
    }

    /// Adds a completion, which the next poll returns.
    pub(super) fn push(&mut self, completion: Completion) {
        self.ready.push_back(completion);
    }

    pub(super) fn hand_over(&mut self, done: &mut Done) {
        while done.has_room()
            && let Some(completion) = self.ready.pop_front()
        {
            done.push(completion);
        }
    }
}

impl Lane {
    /// Ends a request that waits for no child. Late children become orphans.
    pub(super) fn finish(&mut self, index: usize, status: Status) {
        self.admission.request_ended(&mut self.requests, index);
        let data = std::mem::take(&mut self.requests[index].data);
        let pending = self.completions.close(&mut self.requests, index);
        if let Some(pending) = pending {
            self.completions.push(pending.complete(status, data));
        }
    }

    /// Aborts a request for its caller. A request that has not started ends. A request with one
    /// child is aborted at that replica. A write to several replicas is not aborted there, so that
    /// they stay equal; it ends when it would wait for something else.
    #[cold]
    pub(super) fn abort_request(&mut self, index: usize) -> bool {
        self.requests[index].aborted = true;
        if matches!(self.requests[index].stage, Stage::Waiting(_)) {
            self.admission.unpark(index);
            self.finish(index, Status::Aborted);
            return true;
        }
        let request = &mut self.requests[index];
        let alone = request.children.all().count_ones() == 1;
        if request.writes() && !alone {
            let held = request.children.awaited() == 0 && request.held && request.data_home();
            if held {
                self.hold(index);
            }
            return held;
        }
        if request.is_read() {
            request.children.leave_late();
        }
        request.given_up |= request.children.queued != 0;
        self.replicas.drop_waiting(request, index);
        let mut accepted = false;
        for slot in slots(request.children.with) {
            accepted |= self.replicas.abort(request, index, slot);
        }
        if request.children.at_devices() != 0
            && !(request.children.with == 0 && request.data_home())
        {
            return accepted;
        }
        self.abort_ended(index);
        true
    }

    /// Ends an aborted request once it waits for no child.
    pub(super) fn abort_ended(&mut self, index: usize) {
        let request = &self.requests[index];
        if request.children.with | request.children.queued == 0 {
            self.replicas.leave_request_unequal(request);
            self.finish(index, Status::Aborted);
        }
    }
}

impl Drop for Lane {
    /// Completes no request. The regions of an unfinished write are added to the missing regions of
    /// all in-sync replicas but the first, as after an unclean stop. Writes that a device still has
    /// are counted, so that no resync starts before they end.
    fn drop(&mut self) {
        self.requests.make_ordinary();
        self.replicas.close_all();
        for index in 0..self.requests.end() {
            if !self.requests.contains(index) {
                continue;
            }
            let request = &self.requests[index];
            if request.writes() && request.children.at_devices() != 0 {
                self.shared.abandon();
            }
            if request.locked.is_some() {
                self.replicas.leave_request_unequal(request);
                self.admission.unlock(&mut self.requests, index);
            }
            if let Some(pending) = self.requests[index].pending.take() {
                pending.abandon();
            }
        }
        self.answers.close();
        self.replicas.clear_loads();
        self.state.gone.store(true, Ordering::SeqCst);
        self.shared.remove_lane(&self.state);
    }
}
