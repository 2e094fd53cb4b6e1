//! Reads: one member at a time, until one could.
//!
//! A member that does not answer in time keeps the buffers that it was given: its device may still write
//! to them. The read goes on with another member and other buffers, and what is left of it with the first one is an
//! orphan of the lane until that device lets go.

use nacre_bdev::{Completion, Io, Status};
use nacre_reactor::Nanos;

use super::Lane;
use super::park::PAUSE;
use super::request::{Slots, Stage, Why, bit, child_token, slots};
use crate::model::ReadPolicy;
use crate::mutation::Mutation;
use crate::shared::{Failure, Repair};

/// log2 of the bytes of a stripe whose reads go to one member: streams of several reads at a time get several.
pub(super) const READ_STRIPE: u32 = 18;
/// How often a read is given to a member that is short of something before another one is asked: once a millisecond.
const SHORTS: u8 = 50;
/// Reads that a member may have more than the one with the fewest, and a quarter of those, before it is relieved.
const SLACK: u32 = 4;

impl Lane {
    /// Nearly every read: all members in sync have everything, and one of them takes it as it is. The others are taken as
    /// usual.
    #[inline]
    pub(super) fn read_swiftly(&mut self, io: Io, start: Nanos) {
        let Some(slot) = self.swift_slot(io.lba) else {
            return self.take(io, start);
        };
        self.enter_slot(slot);
        // Looked at after the slot was entered, as in `start_read`.
        let current = self.shared.version() == self.view.version;
        let Some(queue) = self.queues[slot].as_mut().filter(|_| current) else {
            self.leave_slot(slot);
            return self.take(io, start);
        };
        let generation = self.generation;
        let index = self.requests.insert_swift(&io, slot, generation, start);
        if let Err(io) = queue.pass(io, child_token(index, slot, generation)) {
            self.requests.remove_swift(index).0.abandon();
            self.leave_slot(slot);
            self.take(io, start);
        }
    }

    /// The member that a read goes to without a second look.
    #[inline]
    pub(super) fn swift_slot(&mut self, lba: u64) -> Option<usize> {
        let of = self.swift;
        match of & of.wrapping_sub(1) {
            0 => (of != 0).then(|| of.trailing_zeros() as usize),
            _ if slots(of).all(|slot| self.shared.needs[slot].is_none()) => {
                Some(self.choose_of(lba, of))
            }
            _ => None,
        }
    }

    /// `false`: it could not be read, or may not be answered: it is to be one like the others.
    #[inline]
    pub(super) fn answer_swift(
        &mut self,
        index: usize,
        slot: usize,
        completion: &mut Completion,
    ) -> bool {
        if !completion.status.is_ok() || !self.sync.answers || self.has_lost(slot) {
            return false;
        }
        let (pending, start, blocks) = self.requests.remove_swift(index);
        completion.token = pending.abandon();
        if let Some(queue) = &mut self.queues[slot] {
            queue.inflight -= 1;
            queue.queue.count_read(blocks, Status::Ok, known(start));
        }
        self.leave_slot(slot);
        self.turn.reads[slot] += 1;
        self.turn.any = true;
        self.answered(start);
        true
    }

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
            let request = &self.requests[index];
            let bare = request.data.is_empty() && request.first != 0;
            if bare && !self.find_buffers(index) || self.is_short(bit(slot)) {
                return self.park(index, Why::Later(self.now + PAUSE));
            }
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
        let left = self.may_read(index);
        if left & left.wrapping_sub(1) == 0 {
            return slots(left).next();
        }
        Some(self.choose_of(self.requests[index].lba, left))
    }

    /// Members to be read that were not yet tried. While members are reconciled those that lack something of it
    /// are none, whatever became of those that have it: reads would find now this and now that.
    #[inline]
    pub(super) fn may_read(&self, index: usize) -> Slots {
        let in_sync = match Mutation::ReadStale.is_active() {
            true => self.sync.in_sync | self.sync.syncing,
            false => self.sync.in_sync,
        };
        let whole = match in_sync & in_sync.wrapping_sub(1) {
            0 => in_sync,
            _ if slots(in_sync).all(|slot| self.shared.needs[slot].is_none()) => in_sync,
            _ => self.whole(index, in_sync),
        };
        let request = &self.requests[index];
        whole & !(request.tried | request.with | request.orphans)
    }

    /// Others for those that a late member has; a read that came without is lent what it finds. `false`: the pool has
    /// none now.
    #[cold]
    fn find_buffers(&mut self, index: usize) -> bool {
        let request = &mut self.requests[index];
        let all = request.blocks as usize * self.block_size as usize;
        let first = request.first as usize;
        for len in [first, all - first] {
            if len == 0 {
                continue;
            }
            let Some(buf) = self.pool.acquire(len) else {
                request.data.clear();
                return false;
            };
            request.data.push(buf);
        }
        true
    }

    /// Nobody waits any more for what late members still have of it.
    #[cold]
    pub(super) fn leave_late(&mut self, index: usize) {
        let request = &mut self.requests[index];
        let late = request.late();
        request.with &= !late;
        request.orphans |= late;
    }

    #[cold]
    fn whole(&self, index: usize, of: Slots) -> Slots {
        if Mutation::ReadStale.is_active() {
            return of;
        }
        let request = &self.requests[index];
        let regions = self
            .shared
            .regions_of(request.lba, u64::from(request.blocks));
        let lacks = |slot: &usize| self.shared.needs[*slot].contains_any(regions.clone());
        let whole = slots(of).filter(|slot| !lacks(slot));
        match whole.fold(0, |set, slot| set | bit(slot)) {
            // Each lacks something of it: always the one that the others will be made equal to.
            0 => bit(of.trailing_zeros() as usize),
            whole => whole,
        }
    }

    #[inline]
    fn choose_of(&mut self, lba: u64, left: Slots) -> usize {
        let local = left & self.sync.local;
        match self.view.read_policy {
            ReadPolicy::LocalFirst if local != 0 => self.nearest(lba, local),
            ReadPolicy::LocalFirst => self.nearest(lba, left),
            ReadPolicy::LeastOutstanding => {
                let load = |slot: &usize| self.local[*slot];
                slots(left).min_by_key(load).unwrap_or_default()
            }
            ReadPolicy::RoundRobin => {
                let behind = slots(left).find(|slot| *slot >= self.next_reader);
                let slot = behind.unwrap_or(left.trailing_zeros() as usize);
                self.next_reader = slot + 1;
                slot
            }
        }
    }

    /// Each stripe of the volume has a member that its reads go to, so that every member's cache has a part of
    /// the volume in place of all of them the same; unless that one has clearly more to do than another.
    #[inline]
    fn nearest(&self, lba: u64, among: Slots) -> usize {
        let turn = (lba >> self.read_shift) as u32 % among.count_ones();
        let (mut chosen, mut least) = (0, u32::MAX);
        let (mut idlest, mut at) = (0, 0);
        for slot in slots(among) {
            if at == turn {
                chosen = slot;
            }
            if self.local[slot] < least {
                (idlest, least) = (slot, self.local[slot]);
            }
            at += 1;
        }
        match self.local[chosen] > least + least / 4 + SLACK {
            true => idlest,
            false => chosen,
        }
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
            let Some(pending) = self.close(index) else {
                return false;
            };
            completion.token = pending.abandon();
            return true;
        }
        std::mem::swap(&mut self.requests[index].data, &mut completion.data);
        let request = &self.requests[index];
        let late = request.failed & bit(slot) != 0;
        match completion.status {
            Status::Ok if !self.has_lost(slot) => self.read_held(index),
            Status::Ok if !late => self.fail(index, slot, Failure::Loss),
            Status::Retry if !late => self.read_short(index, slot),
            Status::Aborted if request.aborted => self.finish(index, Status::Aborted),
            status if !late => self.fail(index, slot, Failure::Status(status)),
            _ => self.try_next(index, slot),
        }
        false
    }

    /// The member is short of something, which another one need not be: the read does not wait for this one alone.
    #[cold]
    fn read_short(&mut self, index: usize, slot: usize) {
        let request = &mut self.requests[index];
        request.shorts = request.shorts.saturating_add(1);
        if request.shorts < SHORTS {
            return self.queue_again(index, slot);
        }
        request.tried |= bit(slot);
        if self.may_read(index) != 0 {
            self.requests[index].shorts = 0;
            self.turn.reads_moved += 1;
            self.turn.any = true;
            self.leave_late(index);
            return self.start_read(index);
        }
        // Nobody is left. Those that failed are not asked again: that would be one more failure.
        self.requests[index].tried &= !bit(slot);
        self.queue_again(index, slot);
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
        self.try_next(index, slot);
    }

    fn try_next(&mut self, index: usize, slot: usize) {
        let request = &mut self.requests[index];
        request.tried |= bit(slot);
        if request.aborted {
            self.leave_late(index);
            return self.finish(index, Status::Aborted);
        }
        if self.may_read(index) != 0 {
            self.turn.reads_moved += 1;
            self.turn.any = true;
            self.leave_late(index);
            self.start_read(index);
        } else {
            self.judge_read(index);
        }
    }

    /// What becomes of a read that no member is asked for now.
    #[cold]
    pub(super) fn judge_read(&mut self, index: usize) {
        let request = &self.requests[index];
        if request.stage != Stage::Flying || request.awaited() != 0 {
            return;
        }
        if let Some(status) = self.refusal(request.op) {
            self.leave_late(index);
            return self.finish(index, status);
        }
        if self.may_read(index) != 0 {
            // There is one more by now.
            self.leave_late(index);
            return self.start_read(index);
        }
        let request = &mut self.requests[index];
        if request.with != 0 {
            // Late, and nobody else has it: what it says in the end counts.
            request.held = true;
            return;
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
        // Those that were not asked lack something of it.
        let others = self.sync.in_sync & !request.tried != 0;
        match verdict {
            Some(_) if others && !request.equalled => self.wait_for_equal(index),
            Some(status) => self.finish(index, status),
            None => self.wait_for_members(index),
        }
    }

    /// Those that have the blocks cannot read them: it goes on when the others have got what can be had.
    #[cold]
    fn wait_for_equal(&mut self, index: usize) {
        let request = &self.requests[index];
        let lacked = |region: &u64| {
            let mut members = slots(self.sync.in_sync);
            members.any(|slot| self.shared.needs[slot].contains(*region))
        };
        let regions = self
            .shared
            .regions_of(request.lba, u64::from(request.blocks));
        let asked = regions.filter(lacked).map(|r| self.shared.want_equal(r));
        let Some(ticket) = asked.reduce(|a, b| Some(a?.max(b?))).flatten() else {
            // They have it by now, or too many wait for that already.
            return self.wait_for_members(index);
        };
        self.requests[index].equalled = true;
        self.park(index, Why::Equal(ticket));
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

/// When an I/O came, if that is known.
#[inline]
pub(super) fn known(start: Nanos) -> Option<Nanos> {
    (start != Nanos::ZERO).then_some(start)
}
