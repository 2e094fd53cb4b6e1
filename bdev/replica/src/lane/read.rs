//! Reads: one member at a time, until one could.

use nacre_bdev::{Completion, Status};

use super::Lane;
use super::request::{Slots, Stage, Why, bit, slots};
use crate::model::ReadPolicy;
use crate::mutation::Mutation;
use crate::shared::{Failure, Repair};

impl Lane {
    #[inline]
    pub(super) fn start_read(&mut self, index: usize) {
        loop {
            if !self.sync.serves {
                if self.shared.version() != self.view.version {
                    self.adopt();
                    continue;
                }
                return match self.refusal(self.requests[index].op) {
                    Some(status) => self.finish(index, status),
                    None => self.park(index, Why::View),
                };
            }
            let Some(slot) = self.choose(index) else {
                self.requests[index].stage = Stage::Flying;
                return self.judge_read(index);
            };
            self.enter_slot(slot);
            if self.shared.version() == self.view.version {
                self.requests[index].stage = Stage::Flying;
                return self.submit_child(index, slot, true);
            }
            self.leave_slot(slot);
            self.adopt();
        }
    }

    /// The member to read from, of those not yet tried.
    #[inline]
    fn choose(&mut self, index: usize) -> Option<usize> {
        let mut left = self.sync.in_sync;
        if Mutation::ReadStale.is_active() {
            left |= self.sync.syncing;
        }
        left &= !self.requests[index].tried;
        if left & left.wrapping_sub(1) == 0 {
            return slots(left).next();
        }
        Some(self.choose_of(index, left))
    }

    fn choose_of(&mut self, index: usize, left: Slots) -> usize {
        let request = &self.requests[index];
        let regions = self
            .shared
            .regions_of(request.lba, u64::from(request.blocks));
        let lacks = |slot: &usize| {
            self.shared.needs[*slot].contains_any(regions.clone())
                && !Mutation::ReadStale.is_active()
        };
        let whole = slots(left).filter(|slot| !lacks(slot));
        let whole = whole.fold(0, |set, slot| set | bit(slot));
        if whole == 0 {
            // Each lacks something of it: always the same one, so that reads agree.
            return left.trailing_zeros() as usize;
        }
        let local = whole & self.sync.local;
        let among = match self.view.read_policy {
            ReadPolicy::LocalFirst if local != 0 => local,
            ReadPolicy::LocalFirst | ReadPolicy::LeastOutstanding => whole,
            ReadPolicy::RoundRobin => {
                let behind = slots(whole).find(|slot| *slot >= self.next_reader);
                let slot = behind.unwrap_or(whole.trailing_zeros() as usize);
                self.next_reader = slot + 1;
                return slot;
            }
        };
        let load = |slot: &usize| self.local[*slot];
        slots(among).min_by_key(load).unwrap_or_default()
    }

    /// A member answered. `true`: the completion is the request's.
    #[inline]
    pub(super) fn read_ended(
        &mut self,
        index: usize,
        slot: usize,
        completion: &mut Completion,
    ) -> bool {
        if completion.status.is_ok() && self.sync.answers && !self.has_lost(slot) {
            self.turn.reads[slot] += 1;
            self.turn.any = true;
            if self.requests[index].unread != 0 {
                self.want_repairs(index);
            }
            let Some(answer) = self.close(index, Status::Ok, Default::default()) else {
                return false;
            };
            completion.token = answer.token;
            return true;
        }
        std::mem::swap(&mut self.requests[index].data, &mut completion.data);
        let request = &self.requests[index];
        let late = request.failed & bit(slot) != 0;
        match completion.status {
            Status::Ok if !self.has_lost(slot) => self.read_held(index),
            Status::Ok if !late => self.fail(index, slot, Failure::Loss),
            Status::Retry if !late => self.queue_again(index, slot),
            Status::Aborted if request.aborted => self.finish(index, Status::Aborted),
            status if !late => self.fail(index, slot, Failure::Status(status)),
            _ => self.try_next(index, slot),
        }
        false
    }

    /// It was read while nothing may be said to be right: it is read again when it may.
    #[cold]
    fn read_held(&mut self, index: usize) {
        match self.refusal(self.requests[index].op) {
            Some(status) => self.finish(index, status),
            None => self.park(index, Why::View),
        }
    }

    #[cold]
    pub(super) fn read_failed(&mut self, index: usize, slot: usize, why: Failure) {
        let request = &mut self.requests[index];
        if matches!(why, Failure::Status(Status::ReadError | Status::Integrity)) {
            request.unread |= bit(slot);
        }
        // A late one has the buffer: the next is asked when it is back.
        if request.with & bit(slot) == 0 {
            self.try_next(index, slot);
        }
    }

    fn try_next(&mut self, index: usize, slot: usize) {
        let request = &mut self.requests[index];
        request.tried |= bit(slot);
        if request.aborted {
            return self.finish(index, Status::Aborted);
        }
        if self.sync.in_sync & !request.tried != 0 {
            self.turn.reads_moved += 1;
            self.turn.any = true;
            self.start_read(index);
        } else {
            self.judge_read(index);
        }
    }

    /// What becomes of a read that no member is asked for now.
    #[cold]
    pub(super) fn judge_read(&mut self, index: usize) {
        let request = &self.requests[index];
        let busy = request.with | request.queued | request.orphans;
        if request.stage != Stage::Flying || busy != 0 {
            return;
        }
        if let Some(status) = self.refusal(request.op) {
            return self.finish(index, status);
        }
        if self.sync.in_sync & !request.tried != 0 {
            // There is one more by now.
            return self.start_read(index);
        }
        let mut verdict = None;
        for slot in slots(request.failed) {
            let Some(member) = &self.view.members[slot] else {
                continue;
            };
            let trouble = &self.troubles[request.trouble as usize];
            if member.judged < trouble.tickets[slot] {
                self.requests[index].held = true;
                return;
            }
            if let Failure::Status(status) = trouble.why[slot]
                && !trouble.why[slot].is_path()
            {
                verdict = verdict.or(Some(status));
            }
        }
        match verdict {
            Some(status) => self.finish(index, status),
            None => self.wait_for_members(index),
        }
    }

    /// Has the control write what could be read to those that could not read it.
    #[cold]
    fn want_repairs(&mut self, index: usize) {
        let request = &self.requests[index];
        for slot in slots(request.unread) {
            if let Some(member) = &self.view.members[slot] {
                self.shared.want_repair(Repair {
                    slot,
                    incarnation: member.incarnation,
                    lba: request.lba,
                    blocks: request.blocks,
                });
            }
        }
    }
}
