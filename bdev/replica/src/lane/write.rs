//! The steps of writes, unmaps, zeroes and flushes: locks, the choice of replicas, and the decision
//! to complete.

use nacre_bdev::{Completion, Op, Status};

use super::request::{Stage, Wait};
use super::slots::{Slots, bit, slots};
use super::verdict::{self, WriteVerdict};
use super::waiting::PAUSE;
use super::{Lane, Review};
use crate::shared::{Failure, Report};
use crate::view::Mode;

impl Lane {
    pub(super) fn start_write(&mut self, index: usize) {
        let (writes, op) = {
            let request = &self.requests[index];
            (request.writes(), request.op)
        };
        loop {
            let sync = &self.replicas.sync;
            if !sync.serves || (writes && !sync.enough) {
                if !self.replicas.is_current() {
                    self.adopt();
                    continue;
                }
                self.admission.unlock(&mut self.requests, index);
                return match self.replicas.refusal(op) {
                    Some(status) => self.finish(index, status),
                    None => self.admission.park(&mut self.requests, index, Wait::View),
                };
            }
            if writes && self.requests[index].locked.is_none() {
                let requests = &mut self.requests;
                let counters = &mut self.counters;
                if let Err(why) = self.admission.lock(requests, index, self.now, counters) {
                    return self.admission.park(requests, index, why);
                }
            }
            let sync = &self.replicas.sync;
            let candidates = if writes {
                sync.in_sync | sync.syncing
            } else {
                sync.flushed
            };
            for slot in slots(candidates) {
                self.replicas.enter(slot);
            }
            let short = self.replicas.is_short(candidates);
            let later = if writes {
                self.replicas.copied_later(&self.requests[index])
            } else {
                0
            };
            // Checked after everything that depends on the view.
            if !short && self.replicas.is_current() {
                return self.fan_out(index, candidates, later);
            }
            for slot in slots(candidates) {
                self.replicas.leave(slot);
            }
            if short {
                self.admission.unlock(&mut self.requests, index);
                return self.admission.park(
                    &mut self.requests,
                    index,
                    Wait::Later(self.now + PAUSE),
                );
            }
            self.adopt();
        }
    }

    #[inline]
    fn fan_out(&mut self, index: usize, candidates: Slots, later: Slots) {
        let targets = candidates & !later;
        for slot in slots(later) {
            self.replicas.leave(slot);
        }
        let request = &mut self.requests[index];
        request.stage = Stage::InFlight;
        (request.children.ok, request.children.failed, request.held) = (0, 0, false);
        request.children.short = 0;
        let sole = targets.count_ones() == 1;
        // A failed submission is reported to the control, and takes effect with the next view.
        for slot in slots(targets) {
            self.submit_child(index, slot, sole);
        }
    }

    /// Submits a child to a replica whose slot was entered, or queues it there.
    #[inline]
    pub(super) fn submit_child(&mut self, index: usize, slot: usize, sole: bool) {
        let request = &mut self.requests[index];
        if let Err(why) = self.replicas.submit(request, index, slot, sole) {
            self.fail(index, slot, why);
        }
    }

    /// Schedules another submission of a child to a replica that lacked resources.
    pub(super) fn submit_later(&mut self, index: usize, slot: usize) {
        let request = &mut self.requests[index];
        let scheduled = self.replicas.submit_later(request, index, slot, self.now);
        if let Err(why) = scheduled {
            self.fail(index, slot, why);
        }
    }

    /// Handles a replica's completion of a write. Returns true if it completes the request.
    #[inline]
    pub(super) fn write_ended(
        &mut self,
        index: usize,
        slot: usize,
        completion: &mut Completion,
    ) -> bool {
        let lost = completion.status.is_ok() && self.replicas.has_lost(slot);
        let request = &mut self.requests[index];
        if completion.status.is_ok() && !lost {
            self.counters.write(slot);
            request.children.ok |= bit(slot);
            let all = request.children.unfinished() == 0;
            if !all || request.given_up || !self.replicas.sync.may_acknowledge(request) {
                self.check_write(index);
                return false;
            }
            self.admission.unlock(&mut self.requests, index);
            let data = std::mem::take(&mut self.requests[index].data);
            let pending = self.completions.close(&mut self.requests, index);
            let Some(pending) = pending else {
                return false;
            };
            *completion = pending.complete(Status::Ok, data);
            return true;
        }
        let late = request.children.failed & bit(slot) != 0;
        match completion.status {
            // The device may have lost acknowledged data, so a flush did not cover it either.
            Status::Ok if !late => self.fail(index, slot, Failure::Loss),
            // A late completion was already reported.
            _ if late => self.check_write(index),
            Status::Retry => self.submit_later(index, slot),
            Status::NoSpace if request.writes() => {
                request.children.short |= bit(slot);
                self.check_write(index);
            }
            Status::Aborted if request.aborted => {
                request.given_up = true;
                self.abort_ended(index);
            }
            status => self.fail(index, slot, Failure::Status(status)),
        }
        false
    }

    /// Reports a replica's failure to the control. The request waits for the decision.
    #[cold]
    pub(super) fn fail(&mut self, index: usize, slot: usize, why: Failure) {
        let request = &self.requests[index];
        let is_read = request.is_read();
        let Some(replica) = &self.replicas.view.replicas[slot] else {
            return;
        };
        let ticket = self.shared.report(Report {
            slot,
            incarnation: replica.incarnation,
            op: request.op,
            lba: request.lba,
            why,
        });
        self.requests.note_failure(index, slot, ticket, why);
        if is_read {
            self.read_failed(index, slot, why)
        } else {
            self.check_write(index)
        }
    }

    /// Decides about a write that waits only for children of failed replicas.
    #[cold]
    pub(super) fn check_write(&mut self, index: usize) {
        let (request, failures) = self.requests.with_failures(index);
        if request.stage != Stage::InFlight || request.children.awaited() != 0 {
            return;
        }
        if request.given_up {
            return self.abort_ended(index);
        }
        let is_open = request.children.failed | request.children.short != 0;
        if is_open && self.replicas.view.mode == Mode::Suspended {
            // Nothing may be acknowledged or submitted now, whatever the control decides.
            return self.hold(index);
        }
        let (view, sync) = (&self.replicas.view, &self.replicas.sync);
        match verdict::of_write(request, failures, view, sync) {
            WriteVerdict::Pending => self.hold(index),
            WriteVerdict::Judged(again) if self.replicas.is_short(again) => {
                // This machine lacks memory, which says nothing about the replica: wait.
                if self.review == Review::NotDue {
                    self.review = Review::AtUpkeep;
                }
                self.hold(index)
            }
            WriteVerdict::Judged(again) => {
                request.children.failed = 0;
                if again == 0 {
                    return self.write_judged(index);
                }
                // These replicas stay in sync, so they must get the write too.
                for slot in slots(again) {
                    self.submit_later(index, slot);
                }
            }
            WriteVerdict::Failed(status) => {
                request.children.failed = 0;
                self.replicas.leave_request_unequal(&self.requests[index]);
                match status {
                    Status::Gone => self.wait_for_replicas(index),
                    status => self.finish(index, status),
                }
            }
        }
    }

    /// Completes a write, or starts it over, once no failed replica must get it any more.
    fn write_judged(&mut self, index: usize) {
        if self.requests[index].children.short != 0 {
            return self.judge_short(index);
        }
        let request = &self.requests[index];
        let sync = &self.replicas.sync;
        if request.children.ok & sync.in_sync == 0 {
            self.start_over(index)
        } else if sync.may_acknowledge(request) {
            self.finish(index, Status::Ok)
        } else {
            // Replicas without the write get a resync, which must not wait for this write's locks.
            self.admission.unlock(&mut self.requests, index);
            self.hold(index);
        }
    }

    /// Starts a write again, because no replica that executed it is in sync any more.
    pub(super) fn start_over(&mut self, index: usize) {
        let request = &self.requests[index];
        if !request.data_home() {
            // A device has the only handle to the data: continue when it completes.
            return self.hold(index);
        }
        self.replicas.leave_request_unequal(&self.requests[index]);
        self.wait_for_replicas(index);
    }

    /// Parks a request that no replica could execute, until the next view or a delay.
    pub(super) fn wait_for_replicas(&mut self, index: usize) {
        self.admission.unlock(&mut self.requests, index);
        let request = &mut self.requests[index];
        if request.pending.is_none() || request.aborted {
            return self.finish(index, Status::Aborted);
        }
        request.children.restart();
        request.held = true;
        if let Some(status) = self.replicas.refusal(request.op) {
            return self.finish(index, status);
        }
        self.admission
            .park(&mut self.requests, index, Wait::Later(self.now + PAUSE));
    }

    /// Lets a write wait for the control's decision, or until the volume may acknowledge it.
    pub(super) fn hold(&mut self, index: usize) {
        let request = &mut self.requests[index];
        let children = &request.children;
        let open = children.failed | children.short | children.with != 0;
        if let Some(status) = self.replicas.refusal(request.op) {
            if !open {
                return self.finish(index, status);
            }
            if request.data_home() {
                self.completions.answer_early(request, status);
            }
        }
        let request = &mut self.requests[index];
        request.held = true;
        if request.pending.is_none() && !open {
            // The I/O was completed before, and the replicas are equal.
            return self.finish(index, Status::Aborted);
        }
        if request.aborted && request.data_home() {
            self.completions.answer_early(request, Status::Aborted);
        }
    }
}

const _: () = assert!(
    Op::COUNT == 9,
    "a new operation: decide whether it fans out"
);
