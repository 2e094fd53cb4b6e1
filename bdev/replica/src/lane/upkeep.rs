//! Time-driven work: children that are late, requests that waited long enough.
//!
//! A child's age is the number of upkeeps since its submission, eight per deadline. So time during
//! which this core did not run (it slept, or the process was stopped) does not count against a
//! replica.

use std::time::Duration;

use nacre_bdev::Status;
use nacre_reactor::Idle;

use super::request::{Stage, Why, slots};
use super::waiting::Recheck;
use super::{Lane, Review};
use crate::shared::Failure;

/// Upkeeps per deadline.
const AGES: u8 = 8;

impl Lane {
    pub(super) fn set_pace(&mut self) {
        let view = &self.replicas.view;
        let least = view.deadline.min(view.frozen_hold);
        let pace = least / u32::from(AGES);
        self.pace = pace.clamp(Duration::from_millis(1), Duration::from_secs(1));
        self.upkeep_at = self.upkeep_at.min(self.now + self.pace);
    }

    /// The view is new: requests that waited for a judgement may have it.
    #[cold]
    pub(super) fn review(&mut self) {
        self.review = Review::NotDue;
        self.waiting.note(Recheck::View);
        self.pushed = true;
        self.requests.settle();
        for index in 0..self.requests.end() {
            if self.requests.contains(index) {
                self.judge(index);
            }
        }
    }

    #[cold]
    pub(super) fn upkeep(&mut self) {
        self.upkeep_at = self.now + self.pace;
        self.replicas.find_swift();
        self.requests.settle();
        if self.requests.is_empty() {
            return;
        }
        let deadline = self.replicas.view.deadline.as_nanos();
        let deadline_ages = deadline.div_ceil(self.pace.as_nanos());
        let deadline_ages = deadline_ages.min(u128::from(u8::MAX - 1)) as u8;
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
        let late = self.requests[index].age(deadline_ages);
        for slot in slots(late) {
            self.replicas.abort(&self.requests[index], index, slot);
            self.fail(index, slot, Failure::Deadline);
        }
    }

    /// Limits the time that hosts wait for replicas.
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
            Stage::Parked(_) => {
                self.waiting.remove(index);
                self.finish(index, Status::Gone);
            }
            // It keeps its locks until its replicas are judged.
            _ if !request.is_read() && request.data_home() => {
                self.answer_early(index, Status::Gone);
                self.judge(index);
            }
            _ if request.is_read() => {
                self.replicas.drop_waiting(request, index);
                request.leave_late();
                self.finish(index, Status::Gone);
            }
            _ => return,
        }
        self.counters.frozen_answer();
    }

    pub(super) fn park(&mut self, index: usize, why: Why) {
        self.requests[index].stage = Stage::Parked(why);
        self.waiting.push(index);
    }

    /// Starts the waiting requests that may start now, in order; the rest keeps its order.
    pub(super) fn retry_waiting(&mut self) {
        let events = self.waiting.take_noted();
        for later in (0..self.waiting.len()).rev() {
            let Some(index) = self.waiting.next(later) else {
                break;
            };
            let Stage::Parked(why) = self.requests[index].stage else {
                continue;
            };
            if self.may_start(index, why, events) {
                self.pushed = true;
                self.start(index);
            } else {
                self.waiting.push(index);
            }
        }
        self.waiting.end_retry();
    }

    fn may_start(&self, index: usize, why: Why, events: Recheck) -> bool {
        match why {
            Why::Log(region) => events == Recheck::View || self.shared.regions.is_dirty(region),
            Why::Stripe { at, .. } => self.now >= at,
            Why::Overlap => events >= Recheck::WriteEnded,
            Why::View => events == Recheck::View,
            Why::Later(moment) => self.now >= moment,
            Why::Equal(ticket) => {
                self.shared.tried() >= ticket
                    || !self.replicas.sync.serves
                    || self.replicas.may_read(&self.requests[index]) != 0
            }
        }
    }

    /// True when another poll would start a waiting request.
    pub(super) fn waiting_may_start(&self) -> bool {
        let events = self.waiting.noted();
        let mut waiting = self.waiting.iter();
        waiting.any(|index| match self.requests[index].stage {
            Stage::Parked(why) => self.may_start(index, why, events),
            _ => false,
        })
    }

    /// How long the lane may sleep, if nothing else wakes it.
    pub(super) fn next_moment(&self) -> Idle {
        if self.requests.is_empty() {
            return Idle::Quiet;
        }
        Idle::Until(self.upkeep_at)
            .and(self.waiting.next_moment(&self.requests))
            .and(self.replicas.next_moment(self.now))
    }
}
