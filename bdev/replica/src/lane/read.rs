//! Reads: from one replica after the other, until one succeeds.
//!
//! If a replica does not complete in time, its device may still write to the buffers. So the read
//! continues at another replica with new buffers. The child at the first replica becomes an orphan,
//! which owns the old buffers until the device completes it.

use nacre_bdev::{Completion, Io, Status};
use nacre_reactor::Nanos;

use super::Lane;
use super::request::{Stage, Wait, child_token};
use super::slots::{bit, slots};
use super::verdict::{self, ReadVerdict};
use super::waiting::PAUSE;
use crate::shared::{Failure, Repair};

/// Attempts of a read at a replica that lacks resources, one per millisecond, before the read tries
/// another replica.
const SHORTS: u8 = 50;

impl Lane {
    /// The fast path: if no in-sync replica lacks any block, passes the read to one of them
    /// unchanged. Other reads become ordinary requests.
    #[inline]
    pub(super) fn read_direct(&mut self, io: Io, start: Nanos) {
        let Some(slot) = self.replicas.direct_slot(io.lba) else {
            return self.take(io, start);
        };
        self.replicas.enter(slot);
        // Checked after the slot was entered, as in `start_read`.
        let current = self.replicas.is_current();
        let Some(queue) = self.replicas.queue(slot).filter(|_| current) else {
            self.replicas.leave(slot);
            return self.take(io, start);
        };
        let generation = self.generation;
        let index = self.requests.insert_direct(&io, slot, generation, start);
        if let Err(io) = queue.pass(io, child_token(index, slot, generation)) {
            self.requests.remove_direct(index).0.abandon();
            self.replicas.leave(slot);
            self.take(io, start);
        }
    }

    /// Completes a direct read. Returns false if the read failed or may not be completed now; the
    /// caller then makes it an ordinary request.
    #[inline]
    pub(super) fn complete_direct(
        &mut self,
        index: usize,
        slot: usize,
        completion: &mut Completion,
    ) -> bool {
        if !completion.status.is_ok() || !self.replicas.may_answer(slot) {
            return false;
        }
        let (pending, start, blocks) = self.requests.remove_direct(index);
        completion.token = pending.abandon();
        self.replicas.direct_ended(slot, blocks, start);
        self.counters.read(slot);
        self.completions.answered();
        true
    }

    #[inline]
    pub(super) fn start_read(&mut self, index: usize) {
        loop {
            if !self.replicas.sync.serves {
                if !self.replicas.is_current() {
                    self.adopt();
                    continue;
                }
                return match self.replicas.refusal(self.requests[index].op) {
                    Some(status) => self.finish(index, status),
                    None => self.admission.park(&mut self.requests, index, Wait::View),
                };
            }
            let request = &mut self.requests[index];
            let Some(slot) = self.replicas.choose(request) else {
                request.stage = Stage::InFlight;
                return self.check_read(index);
            };
            let bare = request.data.is_empty() && request.first != 0;
            if bare && !request.find_buffers(&self.pool, self.block_size)
                || self.replicas.is_short(bit(slot))
            {
                return self.admission.park(
                    &mut self.requests,
                    index,
                    Wait::Later(self.now + PAUSE),
                );
            }
            self.replicas.enter(slot);
            if self.replicas.is_current() {
                request.stage = Stage::InFlight;
                return self.submit_child(index, slot, true);
            }
            self.replicas.leave(slot);
            self.adopt();
        }
    }

    /// Handles a replica's completion of a read. Returns true if it completes the request.
    #[inline]
    pub(super) fn read_ended(
        &mut self,
        index: usize,
        slot: usize,
        completion: &mut Completion,
    ) -> bool {
        if completion.status.is_ok() && self.replicas.may_answer(slot) {
            self.counters.read(slot);
            if self.requests[index].children.unread != 0 {
                self.want_repairs(index);
            }
            let pending = self.completions.close(&mut self.requests, index);
            let Some(pending) = pending else {
                return false;
            };
            completion.token = pending.abandon();
            return true;
        }
        let request = &mut self.requests[index];
        std::mem::swap(&mut request.data, &mut completion.data);
        let late = request.children.failed & bit(slot) != 0;
        match completion.status {
            Status::Ok if !self.replicas.has_lost(slot) => self.read_held(index),
            Status::Ok if !late => self.fail(index, slot, Failure::Loss),
            Status::Retry if !late => self.read_short(index, slot),
            Status::Aborted if request.aborted => self.finish(index, Status::Aborted),
            status if !late => self.fail(index, slot, Failure::Status(status)),
            _ => self.try_next(index, slot),
        }
        false
    }

    /// Handles a replica without resources: retries it [`SHORTS`] times, then tries another one.
    #[cold]
    fn read_short(&mut self, index: usize, slot: usize) {
        let request = &mut self.requests[index];
        request.children.shorts = request.children.shorts.saturating_add(1);
        if request.children.shorts < SHORTS {
            return self.submit_later(index, slot);
        }
        request.children.tried |= bit(slot);
        if self.replicas.may_read(request) != 0 {
            request.children.shorts = 0;
            return self.read_elsewhere(index);
        }
        // No other replica is left. Retry this one, but not those that failed.
        request.children.tried &= !bit(slot);
        self.submit_later(index, slot);
    }

    fn read_elsewhere(&mut self, index: usize) {
        self.counters.read_moved();
        self.requests[index].children.leave_late();
        self.start_read(index);
    }

    /// Handles data that arrived while completions may not be returned to hosts: the read is
    /// repeated when they may.
    #[cold]
    fn read_held(&mut self, index: usize) {
        match self.replicas.refusal(self.requests[index].op) {
            Some(status) => self.finish(index, status),
            None => self.admission.park(&mut self.requests, index, Wait::View),
        }
    }

    #[cold]
    pub(super) fn read_failed(&mut self, index: usize, slot: usize, why: Failure) {
        if matches!(why, Failure::Status(Status::ReadError | Status::Integrity)) {
            self.requests[index].children.unread |= bit(slot);
        }
        self.try_next(index, slot);
    }

    fn try_next(&mut self, index: usize, slot: usize) {
        let request = &mut self.requests[index];
        request.children.tried |= bit(slot);
        if request.aborted {
            request.children.leave_late();
            return self.finish(index, Status::Aborted);
        }
        if self.replicas.may_read(request) != 0 {
            self.read_elsewhere(index);
        } else {
            self.check_read(index);
        }
    }

    /// Decides about a read that is at no replica.
    #[cold]
    pub(super) fn check_read(&mut self, index: usize) {
        let request = &mut self.requests[index];
        if request.stage != Stage::InFlight || request.children.awaited() != 0 {
            return;
        }
        if let Some(status) = self.replicas.refusal(request.op) {
            request.children.leave_late();
            return self.finish(index, status);
        }
        if self.replicas.may_read(request) != 0 {
            // Another replica is available now.
            request.children.leave_late();
            return self.start_read(index);
        }
        if request.children.with != 0 {
            // The child is late, and no other replica is available: wait for its status.
            request.held = true;
            return;
        }
        let (request, failures) = self.requests.with_failures(index);
        let ReadVerdict::Decided(verdict) =
            verdict::of_read(request, failures, &self.replicas.view)
        else {
            request.held = true;
            return;
        };
        // The remaining replicas lack part of the range.
        let others = self.replicas.sync.in_sync & !request.children.tried != 0;
        match verdict {
            Some(_) if others && !request.equalled => self.wait_for_equal(index),
            Some(status) => self.finish(index, status),
            None => self.wait_for_replicas(index),
        }
    }

    /// Handles a read whose blocks no replica that has them can read: the read continues after a
    /// repair has copied the readable blocks to the other replicas.
    #[cold]
    fn wait_for_equal(&mut self, index: usize) {
        let request = &mut self.requests[index];
        let Some(ticket) = self.replicas.want_equal(request) else {
            return self.wait_for_replicas(index);
        };
        request.equalled = true;
        self.admission
            .park(&mut self.requests, index, Wait::Equal(ticket));
    }

    /// Requests repairs from the control: writes of the data to the replicas that could not read
    /// it.
    #[cold]
    fn want_repairs(&mut self, index: usize) {
        let request = &self.requests[index];
        for slot in slots(request.children.unread) {
            if let Some(replica) = &self.replicas.view.replicas[slot] {
                self.shared.want_repair(Repair {
                    slot,
                    incarnation: replica.incarnation,
                    lba: request.lba,
                    blocks: request.blocks,
                });
            }
        }
    }
}
