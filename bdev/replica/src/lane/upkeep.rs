//! The periodic work of a lane: finds late children, and ends requests that waited for the hold
//! time.
//!
//! A child's age is the number of upkeeps since its submission, eight per deadline. So time during
//! which this core did not run (it slept, or the process was stopped) does not count against a
//! replica.

use nacre_bdev::Status;
use nacre_reactor::Idle;

use super::request::Stage;
use super::slots::slots;
use super::{Lane, Review};
use crate::shared::Failure;

impl Lane {
    /// Checks all requests in flight against a new view, which may contain the control's decisions.
    #[cold]
    pub(super) fn review(&mut self) {
        self.review = Review::NotDue;
        self.admission.view_changed();
        self.pushed = true;
        self.requests.make_ordinary();
        for index in 0..self.requests.end() {
            if self.requests.contains(index) {
                self.check(index);
            }
        }
    }

    #[cold]
    pub(super) fn upkeep(&mut self) {
        self.schedule.upkeep_begins(self.now);
        self.replicas.find_direct();
        self.requests.make_ordinary();
        if self.requests.is_empty() {
            return;
        }
        let deadline_ages = self.schedule.deadline_ages(&self.replicas.view);
        for index in 0..self.requests.end() {
            if self.requests.contains(index) {
                self.age(index, deadline_ages);
            }
            if self.requests.contains(index) {
                self.look_at_hold(index);
            }
        }
        if self.review != Review::NotDue {
            self.review();
        }
    }

    fn age(&mut self, index: usize, deadline_ages: u8) {
        let late = self.requests[index].children.age(deadline_ages);
        for slot in slots(late) {
            self.replicas.abort(&self.requests[index], index, slot);
            self.fail(index, slot, Failure::Deadline);
        }
    }

    /// Ends a request that has waited for replicas for the volume's hold time.
    fn look_at_hold(&mut self, index: usize) {
        let request = &mut self.requests[index];
        if request.pending.is_none() || !request.is_held_up() {
            return;
        }
        let since = *request.since.get_or_insert(self.now);
        if self.now.since(since) < self.replicas.view.frozen_hold {
            return;
        }
        match request.stage {
            Stage::Waiting(_) => {
                self.admission.unpark(index);
                self.finish(index, Status::Gone);
            }
            // The request keeps its locks until the control has decided about its replicas.
            _ if !request.is_read() && request.data_home() => {
                self.completions.answer_early(request, Status::Gone);
                self.check(index);
            }
            _ if request.is_read() => {
                self.replicas.drop_waiting(request, index);
                request.children.leave_late();
                self.finish(index, Status::Gone);
            }
            _ => return,
        }
        self.counters.frozen_answer();
    }

    /// Starts the waiting requests that may start now.
    pub(super) fn retry_waiting(&mut self) {
        let mut retry = self.admission.begin_retry();
        while let Some(index) =
            self.admission
                .next_admitted(&mut retry, &self.requests, &self.replicas, self.now)
        {
            self.pushed = true;
            self.start(index);
        }
    }

    /// The time until which the lane may sleep if nothing else wakes it.
    pub(super) fn next_moment(&self) -> Idle {
        if self.requests.is_empty() {
            return Idle::Quiet;
        }
        Idle::Until(self.schedule.upkeep_at())
            .and(self.admission.next_moment(&self.requests))
            .and(self.replicas.next_moment(self.now))
    }
}
