//! Reads: from one replica after the other, until one succeeds.
//!
//! A replica that does not complete in time keeps its buffers: its device may still write to them.
//! The read continues with another replica and other buffers. The child at the first replica is an
//! orphan of the lane until that device completes it.

use nacre_bdev::{Completion, Io, Status};
use nacre_reactor::Nanos;

use super::Lane;
use super::request::{Slots, Stage, Why, bit, child_token, slots};
use super::waiting::PAUSE;
use crate::model::ReadPolicy;
use crate::mutation::Mutation;
use crate::shared::{Failure, Repair};

/// log2 of the bytes of a stripe whose reads go to one replica: a stream of several reads at a time
/// uses several replicas.
pub(super) const READ_STRIPE: u32 = 18;
/// Attempts of a read at a replica that lacks resources before another replica is asked: one per
/// millisecond.
const SHORTS: u8 = 50;
/// A replica is relieved when it has this many reads, plus a quarter, more than the least busy one.
const SLACK: u32 = 4;

impl Lane {
    /// The path of nearly every read: all in-sync replicas have everything, and one of them accepts
    /// it unchanged. Other reads take the usual path.
    #[inline]
    pub(super) fn read_swiftly(&mut self, io: Io, start: Nanos) {
        let Some(slot) = self.swift_slot(io.lba) else {
            return self.take(io, start);
        };
        self.enter_slot(slot);
        // Checked after the slot was entered, as in `start_read`.
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

    /// The replica that a read goes to without further checks.
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

    /// `false`: the read failed, or may not be completed; it becomes an ordinary request.
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

    /// The replica to read from, among those not yet tried.
    #[inline]
    fn choose(&mut self, index: usize) -> Option<usize> {
        let left = self.may_read(index);
        if left & left.wrapping_sub(1) == 0 {
            return slots(left).next();
        }
        Some(self.choose_of(self.requests[index].lba, left))
    }

    /// Replicas to read from that were not yet tried. During a reconcile, excludes replicas that
    /// lack part of the range, even if the others fail: reads would return changing data.
    #[inline]
    pub(super) fn may_read(&self, index: usize) -> Slots {
        let in_sync = if Mutation::ReadStale.is_active() {
            self.sync.in_sync | self.sync.syncing
        } else {
            self.sync.in_sync
        };
        let whole = match in_sync & in_sync.wrapping_sub(1) {
            0 => in_sync,
            _ if slots(in_sync).all(|slot| self.shared.needs[slot].is_none()) => in_sync,
            _ => self.whole(index, in_sync),
        };
        let request = &self.requests[index];
        whole & !(request.tried | request.with | request.orphans)
    }

    /// Finds new buffers in place of those that a late replica has; a read that came without
    /// buffers is lent the replica's. `false`: the pool has none now.
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

    /// Forgets the children that late replicas still have: no request waits for them any longer.
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
            // Every replica lacks part of it: always use the replica that the others will be made
            // equal to.
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

    /// Assigns each stripe of the volume to one replica for reads, so that every replica caches
    /// another part of the volume. Takes another replica if that one has clearly more work.
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
        if self.local[chosen] > least + least / 4 + SLACK {
            idlest
        } else {
            chosen
        }
    }

    /// A replica completed a read. `true`: the completion is the request's.
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

    /// The replica lacks resources, which another may have: the read does not wait for this one
    /// alone.
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
        // No replica is left. Do not ask failed ones again: each would fail once more.
        self.requests[index].tried &= !bit(slot);
        self.queue_again(index, slot);
    }

    /// The data was read while no completions may be returned: it is read again when they may.
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

    /// Decides about a read that no replica has now.
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
            // Another replica is available now.
            self.leave_late(index);
            return self.start_read(index);
        }
        let request = &mut self.requests[index];
        if request.with != 0 {
            // Late, and no other replica has it: its final status counts.
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
        // The replicas not asked lack part of it.
        let others = self.sync.in_sync & !request.tried != 0;
        match verdict {
            Some(_) if others && !request.equalled => self.wait_for_equal(index),
            Some(status) => self.finish(index, status),
            None => self.wait_for_members(index),
        }
    }

    /// The replicas with the blocks cannot read them: the read continues when the others have
    /// received all recoverable data.
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
            // They have it now, or too many requests wait for that already.
            return self.wait_for_members(index);
        };
        self.requests[index].equalled = true;
        self.park(index, Why::Equal(ticket));
    }

    /// Asks the control to write the data to the replicas that could not read it.
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

/// The arrival time of an I/O, if known.
#[inline]
pub(super) fn known(start: Nanos) -> Option<Nanos> {
    (start != Nanos::ZERO).then_some(start)
}
