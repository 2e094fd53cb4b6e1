//! Time-driven work: children that are late, requests that waited long enough.
//!
//! A child's age is the number of upkeeps since its submission, eight per deadline. So time during
//! which this core did not run (it slept, or the process was stopped) does not count against a
//! replica.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use nacre_bdev::{Queue, Status};
use nacre_reactor::{Idle, Nanos};

use super::Lane;
use super::request::{Stage, Why, bit, child_token, slots};
use crate::model::MAX_MEMBERS;
use crate::shared::Failure;

/// Upkeeps per deadline.
const AGES: u8 = 8;

impl Lane {
    pub(super) fn set_pace(&mut self) {
        let least = self.view.deadline.min(self.view.frozen_hold);
        let pace = least / u32::from(AGES);
        self.pace = pace.clamp(Duration::from_millis(1), Duration::from_secs(1));
        self.upkeep_at = self.upkeep_at.min(self.now + self.pace);
    }

    /// The view is new: requests that waited for a judgement may have it.
    #[cold]
    pub(super) fn review(&mut self) {
        self.adopted = false;
        self.viewed = true;
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
        self.find_swift();
        self.requests.settle();
        if self.requests.is_empty() {
            return;
        }
        let deadline_ages = self.view.deadline.as_nanos().div_ceil(self.pace.as_nanos());
        let deadline_ages = deadline_ages.min(u128::from(u8::MAX - 1)) as u8;
        for index in 0..self.requests.end() {
            if self.requests.contains(index) {
                self.age(index, deadline_ages);
            }
            if self.requests.contains(index) {
                self.look_at_hold(index);
            }
        }
        if std::mem::take(&mut self.short) {
            self.review();
        }
    }

    fn age(&mut self, index: usize, deadline_ages: u8) {
        let request = &mut self.requests[index];
        let generation = request.generation;
        let mut late = 0;
        for slot in slots(request.with & !request.failed) {
            request.ages[slot] = request.ages[slot].saturating_add(1);
            if request.ages[slot] > deadline_ages {
                late |= bit(slot);
            }
        }
        for slot in slots(late) {
            if let Some(queue) = &mut self.queues[slot] {
                queue.queue.abort(child_token(index, slot, generation));
            }
            self.fail(index, slot, Failure::Deadline);
        }
    }

    /// Limits the time that hosts wait for replicas.
    fn look_at_hold(&mut self, index: usize) {
        let now = self.now;
        let request = &mut self.requests[index];
        let waits = match request.stage {
            // Also on behalf of others: those may wait for the replicas.
            Stage::Parked(_) => true,
            // No device has any part of it: its children are resubmitted repeatedly, and never
            // accepted.
            Stage::Flying if request.awaited() != 0 => request.with & !request.failed == 0,
            Stage::Flying => request.held,
            _ => false,
        };
        if request.pending.is_none() || !waits {
            return;
        }
        let since = *request.since.get_or_insert(now);
        if now.since(since) < self.view.frozen_hold {
            return;
        }
        match request.stage {
            Stage::Parked(_) => {
                self.parked.retain(|parked| *parked as usize != index);
                self.finish(index, Status::Gone);
            }
            // It keeps its locks until its replicas are judged.
            _ if !request.is_read() && request.data_home() => {
                self.answer_early(index, Status::Gone);
                self.judge(index);
            }
            _ if request.is_read() => {
                self.drop_waiting(index);
                self.leave_late(index);
                self.finish(index, Status::Gone);
            }
            _ => return,
        }
        self.turn.frozen_answers += 1;
        self.turn.any = true;
    }

    /// How long the lane may sleep, if nothing else wakes it.
    pub(super) fn next_moment(&self) -> Idle {
        if self.requests.is_empty() {
            return Idle::Quiet;
        }
        let mut idle = Idle::Until(self.upkeep_at);
        for index in &self.parked {
            if let Stage::Parked(Why::Later(at) | Why::Stripe { at, .. }) =
                self.requests[*index as usize].stage
            {
                idle = idle.and(Idle::Until(at));
            }
        }
        for queue in slots(self.waiting).filter_map(|slot| self.queues[slot].as_ref()) {
            idle = idle.and(match queue.waiting.front() {
                Some(first) if first.after > self.now => Idle::Until(first.after),
                // The queue was full: its I/O will end, and wake the lane.
                Some(first) if first.after == Nanos::ZERO && queue.inflight > 0 => Idle::Quiet,
                Some(_) => Idle::Busy,
                None => Idle::Quiet,
            });
        }
        idle
    }
}

impl Lane {
    pub(super) fn publish_counts(&mut self) {
        let totals = &self.shared.totals;
        let add = |to: &AtomicU64, count: &mut u64| {
            if *count > 0 {
                to.fetch_add(std::mem::take(count), Ordering::Relaxed);
            }
        };
        let turn = &mut self.turn;
        turn.any = false;
        for slot in 0..MAX_MEMBERS {
            add(&totals.reads[slot], &mut turn.reads[slot]);
            add(&totals.writes[slot], &mut turn.writes[slot]);
            if self.local[slot] > 1 {
                self.state.outstanding[slot].store(self.local[slot], Ordering::Relaxed);
            }
        }
        add(&totals.reads_moved, &mut turn.reads_moved);
        add(&totals.log_waits, &mut turn.log_waits);
        add(&totals.overlap_waits, &mut turn.overlap_waits);
        add(&totals.frozen_answers, &mut turn.frozen_answers);
        let latency = turn.latency_ns;
        self.state.latency_ns.store(latency, Ordering::Relaxed);
    }
}
