//! The error paths of a queue pair: commands that time out or are retried, a recreated queue, a
//! removed drive.

use std::time::Duration;

use nacre_bdev::{Done, Op, Status, Token};
use nacre_nvmf_wire::StatusCode;

use super::slot::{Half, Slot, Stage};
use super::{NO_LANE, Pair, inject};
use crate::command::{self, Verdict};
use crate::link::{Request, count};
use crate::phase::{self, QueueState};
use crate::ring::{Head, Tail};

impl Pair {
    /// Acts on a phase that the control has changed.
    #[cold]
    pub(super) fn follow(&mut self) {
        self.link.clear_bell();
        let word = self.link.phase.word();
        // Completions that arrived before the change are valid.
        self.live = false;
        match phase::decode(word) {
            QueueState::Waiting | QueueState::Quiescing => {}
            QueueState::Live(_) => {
                self.drain();
                self.begin();
                self.live = true;
            }
            QueueState::Gone => {
                self.drain();
                self.end_all();
            }
        }
        self.word = word;
        inject::set_usual(self);
    }

    /// Processes completions that the controller wrote before the change.
    fn drain(&mut self) {
        if self.sent > 0 {
            self.reap_unseen();
        }
    }

    /// Begins with a new, empty queue: retries or ends the commands that the old one interrupted.
    fn begin(&mut self) {
        self.grant = self.link.grant();
        let rings = &self.grant.rings;
        rings.cq.zero(0, rings.cq.len());
        self.tail = Tail::new(rings.entries);
        self.head = Head::new(rings.entries);
        self.sent = 0;
        self.still = None;
        self.end_switching();
        // The new queue may have shadow doorbells where the old one had none.
        self.next_scan = self.now;
        for index in 0..self.slots.len() as u16 {
            let slot = &self.slots[usize::from(index)];
            let sent = slot.stage == Stage::Sent || slot.half == Half::First;
            if sent && slot.io.is_some() {
                self.interrupted(index);
            }
        }
    }

    /// Handles a command that the old queue never completes: retries it, or ends a fused pair.
    fn interrupted(&mut self, index: u16) {
        let slot = &self.slots[usize::from(index)];
        if slot.half == Half::First {
            self.leave_fused(index);
            return self.end(index, Status::Aborted);
        }
        self.retry(index, Duration::ZERO);
    }

    /// Frees the slot of the second half, if it still belongs to this command.
    fn leave_fused(&mut self, index: u16) {
        let slot = &mut self.slots[usize::from(index)];
        slot.half = Half::No;
        let second = slot.partner;
        if let Some(other) = self.slots.get(usize::from(second))
            && other.half == Half::Second
            && other.partner == index
        {
            self.free_partner(index);
        }
    }

    /// Sends the command again after `delay`. Ends it if no retry is left or allowed.
    fn retry(&mut self, index: u16, delay: Duration) {
        let limit = self.controller.options.retry_limit;
        let slot = &mut self.slots[usize::from(index)];
        let Some(io) = &slot.io else {
            return;
        };
        let op = io.op;
        let wanted = slot.lane != NO_LANE;
        // The namespace may have been replaced by one with another block size.
        let lane = self.lanes.find(slot.lane as usize);
        let is_gone = lane.is_some_and(|lane| lane.namespace.is_gone());
        let status = match () {
            () if is_gone => Status::Gone,
            () if slot.aborting || !wanted => Status::Aborted,
            () if !command::is_repeatable(op) => Status::Aborted,
            () if slot.tries >= limit => Status::DeviceError,
            () => {
                slot.tries += 1;
                slot.stage = Stage::Again;
                count(&self.controller.counters.resubmitted);
                self.again.push((self.now + delay, index));
                return;
            }
        };
        self.end(index, status);
    }

    /// Handles a completion that does not end its I/O.
    #[cold]
    pub(super) fn unfinished(&mut self, index: u16, verdict: Verdict, at: u32, done: &mut Done) {
        match verdict {
            Verdict::Done(Status::Ok) => self.copied(index, at, done),
            Verdict::Done(status) => self.finish(index, status, at, done),
            Verdict::Aborted => self.retry(index, Duration::ZERO),
            Verdict::Again { crd } => {
                let delay = self.grant.delays[usize::from(crd & 3)];
                self.retry(index, delay);
            }
        }
    }

    /// One piece of a copy is complete: starts the next, if any.
    fn copied(&mut self, index: u16, at: u32, done: &mut Done) {
        let slot = &mut self.slots[usize::from(index)];
        slot.done += slot.piece;
        let left = slot.io.as_ref().is_some_and(|io| slot.done < io.blocks);
        if !left {
            return self.finish(index, Status::Ok, at, done);
        }
        if slot.aborting || slot.lane == NO_LANE {
            return self.finish(index, Status::Aborted, at, done);
        }
        slot.stage = Stage::Again;
        self.again.push((self.now, index));
    }

    /// One of two fused commands completed: the I/O ends with the second completion.
    #[cold]
    pub(super) fn half_answered(&mut self, index: u16, answer: u16, at: u32, done: &mut Done) {
        let slot = &mut self.slots[usize::from(index)];
        slot.stage = Stage::Free;
        let of_write = slot.half == Half::Second;
        let first = if of_write { slot.partner } else { index };
        let other = self.slots[usize::from(first)].partner;
        let whole = &mut self.slots[usize::from(first)];
        let Some(before) = whole.answer.replace(answer) else {
            // The slot and its identifier stay in use until both commands have completed.
            return;
        };
        debug_assert_eq!(self.slots[usize::from(other)].stage, Stage::Free);
        let compared = if of_write { before } else { answer };
        self.leave_fused(first);
        // Report the cause, not "the other half failed".
        let follows = StatusCode::ABORTED_FAILED_FUSED;
        let is_cause = |field: u16| StatusCode::from_field(field).code() != follows;
        let field = match (before, answer) {
            (0, field) => field,
            (field, _) if is_cause(field) => field,
            (field, 0) => field,
            (_, field) => field,
        };
        match command::verdict(field, Op::CompareAndWrite) {
            Verdict::Done(status) => self.finish(first, status, at, done),
            // Whether the write was executed, in whole or in part, is unknown. Comparing again
            // would compare with the written data.
            Verdict::Aborted => self.end(first, Status::Aborted),
            Verdict::Again { .. } if compared == 0 => self.end(first, Status::Aborted),
            // The command was not executed.
            Verdict::Again { .. } => self.end(first, Status::Retry),
        }
    }

    /// The controller no longer accesses memory: all I/O ends.
    fn end_all(&mut self) {
        self.end_switching();
        self.again.clear();
        self.sent = 0;
        for index in 0..self.slots.len() as u16 {
            let slot = &self.slots[usize::from(index)];
            let taken = slot.io.is_some();
            if taken && slot.half == Half::First {
                self.leave_fused(index);
            }
            if taken {
                self.end(index, Status::Gone);
            }
        }
        self.lanes.refuse_all();
    }

    /// Periodic check for late commands and for missed doorbells.
    #[cold]
    pub(super) fn scan(&mut self) {
        if self.now >= self.next_look {
            self.next_look = self.now + self.tick.unwrap_or(super::LOOK);
            self.look_at_interrupts();
            if self.tick.is_some() && self.live {
                self.look_for_late();
            }
        }
        self.next_scan = self.next_look;
        if self.grant.shadows.is_some() {
            self.next_scan = self.next_scan.min(self.now + super::NUDGE);
            self.look_for_missed_doorbells();
        }
        inject::end_held(self);
    }

    /// A software controller names the doorbell value from which it wants register writes, and then
    /// looks at memory once more. Without a fence in between, both sides may miss each other, and
    /// commands wait for a doorbell that never rings. So a pair with commands and no completions
    /// writes the register.
    fn look_for_missed_doorbells(&mut self) {
        let waits = self.live && self.sent > 0 && self.head.peek(&self.grant.rings.cq).is_none();
        let place = waits.then(|| self.head.place());
        let before = std::mem::replace(&mut self.still, place);
        if place.is_none() || before != place || !self.link.phase.enter(self.word) {
            return;
        }
        let grant = &*self.grant;
        let shadows = grant.shadows.as_deref();
        let (function, activity) = (&*grant.function, &self.link.activity);
        let (_, head) = self.head.ring();
        grant
            .cq
            .insist(function, shadows, head, &activity.completion);
        let (_, tail) = self.tail.ring();
        grant
            .sq
            .insist(function, shadows, tail, &activity.submission);
        self.link.phase.leave();
        count(&self.controller.counters.nudges);
    }

    /// Ends the waiting I/O when the queue is gone and nothing can be sent.
    #[cold]
    pub(super) fn refuse_waiting(&mut self) {
        if phase::decode(self.word) == QueueState::Gone {
            self.lanes.refuse_all();
        }
    }

    fn look_for_late(&mut self) {
        let tick = self.tick.unwrap_or_default();
        for index in 0..self.slots.len() {
            let slot = &mut self.slots[index];
            // The first half of a fused pair is checked until both commands complete.
            if slot.io.is_none() || slot.stage != Stage::Sent && slot.half == Half::No {
                continue;
            }
            slot.age = slot.age.saturating_add(1);
            if slot.age < slot.due {
                continue;
            }
            let want = Request::Late {
                cid: slot.cid,
                opcode: slot.io.as_ref().map_or(0, |io| command::opcode_of(io.op)),
                stage: slot.rung,
                waited: tick * u32::from(slot.age.saturating_sub(1)),
            };
            slot.rung = slot.rung.saturating_add(1);
            slot.due = slot.age.saturating_add(Slot::GRACE);
            if slot.age == u8::MAX {
                slot.age = Slot::LATE;
                slot.due = Slot::LATE + Slot::GRACE;
            }
            self.report(want);
        }
    }

    /// Tries to end an I/O early: see [`nacre_bdev::Queue::abort`].
    pub(crate) fn abort(&mut self, at: usize, token: Token) -> bool {
        if self.lanes.abort(at, token) {
            return true;
        }
        let found = self.slots.iter().position(|slot| {
            let io = slot.io.as_ref();
            slot.lane == at as u32 && io.is_some_and(|io| io.token == token)
        });
        let Some(index) = found else {
            return false;
        };
        let slot = &mut self.slots[index];
        if slot.stage == Stage::Again {
            self.again.retain(|(_, again)| usize::from(*again) != index);
            self.end(index as u16, Status::Aborted);
            return true;
        }
        if !std::mem::replace(&mut slot.aborting, true) {
            let cid = slot.cid;
            self.report(Request::Abort { cid });
        }
        true
    }
}

impl Drop for Pair {
    /// Leaks memory that the controller may still write to, unless the control has shown that it
    /// cannot.
    fn drop(&mut self) {
        let safe = self.link.phase.state() == QueueState::Gone;
        for slot in &mut self.slots {
            let kept = (slot.io.take(), slot.bounce.take());
            if !safe && (slot.stage == Stage::Sent || slot.half != Half::No) {
                std::mem::forget(kept);
            }
        }
    }
}
