//! Writes, unmaps, zeroes and flushes: what they must have before they start, who gets them, and when
//! they are done.

use nacre_bdev::{Completion, Op, Status};

use super::Lane;
use super::Span;
use super::members::lost;
use super::request::{NO_TROUBLE, Slots, Stage, Trouble, Why, bit, slots};
use crate::regions::Entered;
use crate::shared::{Failure, Report};
use crate::stripes::Acquired;
use crate::view::{Mode, Role};

impl Lane {
    pub(super) fn start_write(&mut self, index: usize) {
        let (writes, op) = {
            let request = &self.requests[index];
            (request.writes(), request.op)
        };
        loop {
            if !self.sync.serves || (writes && !self.sync.enough) {
                if self.shared.version() != self.view.version {
                    self.adopt();
                    continue;
                }
                self.unlock(index);
                return match self.refusal(op) {
                    Some(status) => self.finish(index, status),
                    None => self.park(index, Why::View),
                };
            }
            if writes
                && !self.requests[index].locked
                && let Err(why) = self.lock(index)
            {
                return self.park(index, why);
            }
            let asked = match writes {
                true => self.sync.in_sync | self.sync.syncing,
                false => self.sync.flushed,
            };
            for slot in slots(asked) {
                self.enter_slot(slot);
            }
            let short = self.is_short(asked);
            let later = if writes { self.copied_later(index) } else { 0 };
            // Looked at after everything that depends on the view.
            if !short && self.shared.version() == self.view.version {
                return self.fan_out(index, asked, later);
            }
            for slot in slots(asked) {
                self.leave_slot(slot);
            }
            if short {
                self.unlock(index);
                return self.park(index, Why::Later(self.now + super::park::PAUSE));
            }
            self.adopt();
        }
    }

    #[inline]
    fn fan_out(&mut self, index: usize, asked: Slots, later: Slots) {
        let targets = asked & !later;
        for slot in slots(later) {
            self.leave_slot(slot);
        }
        let request = &mut self.requests[index];
        request.stage = Stage::Flying;
        (request.ok, request.failed, request.held) = (0, 0, false);
        let sole = targets.count_ones() == 1;
        // One that cannot be given it is reported; what that means is known with another view, not now.
        for slot in slots(targets) {
            self.submit_child(index, slot, sole);
        }
    }

    /// Members that lack what is written, so that the copying will come by there, after this write: it has its stripes.
    /// But for those that are about to be in sync: they may be that in the store by now, without what is found to be
    /// lacked meanwhile, and nothing that is acknowledged may be among that.
    #[inline]
    fn copied_later(&self, index: usize) -> Slots {
        let later = |slot: &usize| self.is_copied_later(index, *slot);
        let syncing = slots(self.sync.syncing & !self.sync.flushed);
        syncing.filter(later).fold(0, |set, slot| set | bit(slot))
    }

    fn is_copied_later(&self, index: usize, slot: usize) -> bool {
        let request = &self.requests[index];
        let regions = self
            .shared
            .regions_of(request.lba, u64::from(request.blocks));
        // In this order: a region is taken out of the needs before it is not the copied one any more.
        let copying = self.shared.copying();
        !regions.contains(&copying) && self.shared.needs[slot].contains_all(regions)
    }

    /// Enters the regions of a write and takes its stripes. All or nothing.
    #[inline]
    fn lock(&mut self, index: usize) -> Result<(), Why> {
        let request = &self.requests[index];
        let (lba, end, blocks) = (request.lba, request.end(), u64::from(request.blocks));
        if !self.parked.is_empty() && self.overlaps_parked(lba, end) {
            return Err(self.overlap_wait(index));
        }
        if let Err(why) = self.enter(lba, blocks) {
            return Err(match why {
                Why::Log(region) => self.log_wait(index, region),
                Why::Overlap => self.overlap_wait(index),
                Why::Stripe { .. } => self.stripe_wait(index),
                why => why,
            });
        }
        let request = &mut self.requests[index];
        request.locked = true;
        request.place = self.writes.len() as u32;
        let index = index as u32;
        self.writes.push(Span { lba, end, index });
        Ok(())
    }

    /// Regions and stripes of a write that is going to these blocks. All or nothing.
    #[inline]
    pub(super) fn enter(&self, lba: u64, blocks: u64) -> Result<(), Why> {
        let regions = self.shared.regions_of(lba, blocks);
        for region in regions.clone() {
            let entered = self.shared.regions.enter(region);
            if entered != Entered::Inside {
                (regions.start..region).for_each(|inside| self.shared.regions.leave(inside));
                self.want_regions(region, regions.end, entered);
                return Err(Why::Log(region));
            }
        }
        let end = lba + blocks;
        let taken = self.shared.stripes.acquire(self.state.owner, lba, blocks);
        let overlaps =
            taken == Acquired::Again && self.writes.iter().any(|w| w.lba < end && lba < w.end);
        if taken == Acquired::No || overlaps {
            if overlaps {
                self.shared.stripes.release(lba, blocks);
            }
            regions.for_each(|inside| self.shared.regions.leave(inside));
            return Err(match overlaps {
                true => Why::Overlap,
                false => Why::Stripe {
                    tries: 0,
                    at: self.now,
                },
            });
        }
        Ok(())
    }

    /// Gives back what [`Lane::enter`] took.
    #[inline]
    pub(super) fn leave(&self, lba: u64, blocks: u64) {
        self.shared.stripes.release(lba, blocks);
        for region in self.shared.regions_of(lba, blocks) {
            self.shared.regions.leave(region);
        }
    }

    #[cold]
    fn overlap_wait(&mut self, index: usize) -> Why {
        let counted = std::mem::replace(&mut self.requests[index].waited_overlap, true);
        self.turn.overlap_waits += u64::from(!counted);
        self.turn.any = true;
        Why::Overlap
    }

    #[cold]
    fn log_wait(&mut self, index: usize, region: u64) -> Why {
        let counted = std::mem::replace(&mut self.requests[index].waited_log, true);
        self.turn.log_waits += u64::from(!counted);
        self.turn.any = true;
        Why::Log(region)
    }

    /// Has the control make the regions from `first` on dirty, all of them at once.
    #[cold]
    fn want_regions(&self, first: u64, end: u64, entered: Entered) {
        if entered == Entered::First {
            self.shared.want_region(first);
        }
        for region in first + 1..end {
            if self.shared.regions.want(region) {
                self.shared.want_region(region);
            }
        }
    }

    /// Gives back what [`Lane::lock`] took.
    #[inline]
    pub(super) fn unlock(&mut self, index: usize) {
        let request = &mut self.requests[index];
        if !std::mem::replace(&mut request.locked, false) {
            return;
        }
        let (lba, blocks) = (request.lba, u64::from(request.blocks));
        let place = request.place as usize;
        self.writes.swap_remove(place);
        if let Some(moved) = self.writes.get(place) {
            self.requests[moved.index as usize].place = place as u32;
        }
        self.leave(lba, blocks);
        self.freed = true;
    }

    /// A member answered. `true`: the completion is the request's.
    #[inline]
    pub(super) fn write_ended(
        &mut self,
        index: usize,
        slot: usize,
        completion: &mut Completion,
    ) -> bool {
        let lost = completion.status.is_ok() && self.has_lost(slot);
        if completion.status.is_ok() && !lost {
            self.turn.writes[slot] += 1;
            self.turn.any = true;
            let request = &mut self.requests[index];
            request.ok |= bit(slot);
            let all = (request.with | request.queued | request.failed) == 0;
            if !all || request.given_up || !self.may_be_done(index) {
                self.judge_write(index);
                return false;
            }
            self.unlock(index);
            let data = std::mem::take(&mut self.requests[index].data);
            let Some(pending) = self.close(index) else {
                return false;
            };
            *completion = pending.complete(Status::Ok, data);
            return true;
        }
        let request = &self.requests[index];
        let late = request.failed & bit(slot) != 0;
        match completion.status {
            // A flush, too, was then of less than it seems.
            Status::Ok if !late => self.fail(index, slot, Failure::Loss),
            // What it was late with counts as it was reported.
            _ if late => self.judge_write(index),
            Status::Retry => self.queue_again(index, slot),
            Status::Aborted if request.aborted => {
                self.requests[index].given_up = true;
                self.abort_ended(index);
            }
            status => self.fail(index, slot, Failure::Status(status)),
        }
        false
    }

    /// Enough members that count have it, and the volume may say so.
    #[inline]
    fn may_be_done(&self, index: usize) -> bool {
        let request = &self.requests[index];
        self.sync.answers
            && request.ok & self.sync.in_sync != 0
            && (self.sync.enough || !request.writes())
    }

    /// Tells the control of a member's failure. The request waits for the judgement.
    #[cold]
    pub(super) fn fail(&mut self, index: usize, slot: usize, why: Failure) {
        let request = &mut self.requests[index];
        let Some(member) = &self.view.members[slot] else {
            return;
        };
        let ticket = self.shared.report(Report {
            slot,
            incarnation: member.incarnation,
            op: request.op,
            lba: request.lba,
            why,
        });
        if request.trouble == NO_TROUBLE {
            request.trouble = self.troubles.insert(Trouble::new()) as u32;
        }
        let trouble = &mut self.troubles[request.trouble as usize];
        (trouble.tickets[slot], trouble.why[slot]) = (ticket, why);
        request.failed |= bit(slot);
        match request.is_read() {
            true => self.read_failed(index, slot, why),
            false => self.judge_write(index),
        }
    }

    /// What becomes of a write, once no child is awaited but of members that failed.
    #[cold]
    pub(super) fn judge_write(&mut self, index: usize) {
        let request = &self.requests[index];
        if request.stage != Stage::Flying || request.awaited() != 0 {
            return;
        }
        if request.given_up {
            return self.abort_ended(index);
        }
        if request.failed != 0 && self.view.mode == Mode::Suspended {
            // Whatever the judgement: nothing is said to be done, and nothing sent to anybody once more.
            return self.hold(index);
        }
        let (failed, ok, with) = (request.failed, request.ok, request.with);
        let mut again: Slots = 0;
        let mut verdict = None;
        for slot in slots(failed) {
            let Some(member) = &self.view.members[slot] else {
                continue;
            };
            let trouble = &self.troubles[request.trouble as usize];
            if member.judged < trouble.tickets[slot] || with & bit(slot) != 0 {
                return self.hold(index);
            }
            // Judged, and still a member.
            let last = member.role == Role::InSync && self.sync.in_sync == bit(slot);
            match trouble.why[slot] {
                // It was late, but it did it.
                _ if ok & bit(slot) != 0 => {}
                _ if !last => again |= bit(slot),
                Failure::Status(status) if !trouble.why[slot].is_path() => verdict = Some(status),
                _ => verdict = Some(Status::Gone),
            }
        }
        if verdict.is_none() && self.is_short(again) {
            // Says nothing of the member: it waits as for a judgement.
            self.short = true;
            return self.hold(index);
        }
        let request = &mut self.requests[index];
        request.failed = 0;
        if verdict.is_none() && again != 0 {
            // It stays although others are in sync: then it must have the write too.
            for slot in slots(again) {
                self.queue_again(index, slot);
            }
            return;
        }
        match verdict {
            None if ok & self.sync.in_sync == 0 => self.start_over(index),
            None if !self.may_be_done(index) => {
                // Those who are missing are copied to before they count: that must not wait for this.
                self.unlock(index);
                self.hold(index);
            }
            None => self.finish(index, Status::Ok),
            Some(verdict) => {
                self.leave_unequal(index);
                match verdict {
                    Status::Gone => self.wait_for_members(index),
                    status => self.finish(index, status),
                }
            }
        }
    }

    /// None of those that have it counts any more: the write goes to those that do.
    fn start_over(&mut self, index: usize) {
        let request = &self.requests[index];
        if !request.data_home() {
            // A device has the only handle; the request goes on with its answer.
            return self.hold(index);
        }
        self.leave_unequal(index);
        self.wait_for_members(index);
    }

    /// Nobody could do it, for a reason that says nothing of the blocks: it starts anew with the next
    /// view, or in a while.
    pub(super) fn wait_for_members(&mut self, index: usize) {
        self.unlock(index);
        let request = &mut self.requests[index];
        if request.pending.is_none() || request.aborted {
            return self.finish(index, Status::Aborted);
        }
        (request.ok, request.failed, request.tried) = (0, 0, 0);
        request.held = true;
        if let Some(status) = self.refusal(self.requests[index].op) {
            return self.finish(index, status);
        }
        self.park(index, Why::Later(self.now + super::park::PAUSE));
    }

    /// It waits for a judgement, or for the volume to be allowed to say that it is done.
    pub(super) fn hold(&mut self, index: usize) {
        let request = &mut self.requests[index];
        let open = request.failed != 0 || request.with != 0;
        if let Some(status) = self.refusal(self.requests[index].op) {
            match open {
                false => return self.finish(index, status),
                true if self.requests[index].data_home() => self.answer_early(index, status),
                true => {}
            }
        }
        let request = &mut self.requests[index];
        request.held = true;
        if request.pending.is_none() && !open {
            // It was answered before, and its members agree.
            return self.finish(index, Status::Aborted);
        }
        if request.aborted && request.data_home() {
            self.answer_early(index, Status::Aborted);
        }
    }

    /// The member's device may have lost blocks.
    #[inline]
    pub(super) fn has_lost(&self, slot: usize) -> bool {
        self.view.members[slot].as_ref().is_none_or(lost)
    }
}

const _: () = assert!(
    Op::COUNT == 9,
    "a new operation: say whether it is fanned out"
);
