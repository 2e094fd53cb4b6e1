//! Writes, unmaps, zeroes and flushes: their preconditions, the replicas that get them, and when
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
            let asked = if writes {
                self.sync.in_sync | self.sync.syncing
            } else {
                self.sync.flushed
            };
            for slot in slots(asked) {
                self.enter_slot(slot);
            }
            let short = self.is_short(asked);
            let later = if writes { self.copied_later(index) } else { 0 };
            // Checked after everything that depends on the view.
            if !short && self.shared.version() == self.view.version {
                return self.fan_out(index, asked, later);
            }
            for slot in slots(asked) {
                self.leave_slot(slot);
            }
            if short {
                self.unlock(index);
                return self.park(index, Why::Later(self.now + super::waiting::PAUSE));
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
        // A failed submission is reported; the next view shows the consequence, not this one.
        for slot in slots(targets) {
            self.submit_child(index, slot, sole);
        }
    }

    /// Replicas whose resync will copy this range after the write, because the write holds its
    /// stripe locks. Excludes replicas about to be promoted: the store may already list them in
    /// sync without regions found missing meanwhile, and an acknowledged write must not be missing
    /// there.
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
        // In this order: a region leaves the needs before it stops being the copied one.
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

    /// Takes the regions and stripes for a write to these blocks. All or nothing.
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
            return Err(if overlaps {
                Why::Overlap
            } else {
                Why::Stripe {
                    tries: 0,
                    at: self.now,
                }
            });
        }
        Ok(())
    }

    /// Releases everything that [`Lane::enter`] took.
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

    /// Asks the control to make the regions from `first` on dirty, all of them at once.
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

    /// Releases everything that [`Lane::lock`] took.
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

    /// A replica completed a write. `true`: the completion is the request's.
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
            // A flush, too, then covered less than it seems.
            Status::Ok if !late => self.fail(index, slot, Failure::Loss),
            // A late completion was already reported.
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

    /// True when enough counted replicas have it, and the volume may acknowledge it.
    #[inline]
    fn may_be_done(&self, index: usize) -> bool {
        let request = &self.requests[index];
        self.sync.answers
            && request.ok & self.sync.in_sync != 0
            && (self.sync.enough || !request.writes())
    }

    /// Reports a replica's failure to the control. The request waits for the judgement.
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
        if request.is_read() {
            self.read_failed(index, slot, why)
        } else {
            self.judge_write(index)
        }
    }

    /// Decides about a write, once it awaits only children of failed replicas.
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
            // Whatever the judgement: nothing is acknowledged, and nothing is sent again.
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
            // Judged, and still a replica.
            let last = member.role == Role::InSync && self.sync.in_sync == bit(slot);
            match trouble.why[slot] {
                // It was late, but it succeeded.
                _ if ok & bit(slot) != 0 => {}
                _ if !last => again |= bit(slot),
                Failure::Status(status) if !trouble.why[slot].is_path() => verdict = Some(status),
                _ => verdict = Some(Status::Gone),
            }
        }
        if verdict.is_none() && self.is_short(again) {
            // Says nothing about the replica: wait as for a judgement.
            self.short = true;
            return self.hold(index);
        }
        let request = &mut self.requests[index];
        request.failed = 0;
        if verdict.is_none() && again != 0 {
            // It stays although others are in sync: then it must get the write too.
            for slot in slots(again) {
                self.queue_again(index, slot);
            }
            return;
        }
        match verdict {
            None if ok & self.sync.in_sync == 0 => self.start_over(index),
            None if !self.may_be_done(index) => {
                // Missing replicas are copied to before they count: copying must not wait for this
                // write.
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

    /// None of the replicas with the write counts any longer: the write goes to those that do.
    fn start_over(&mut self, index: usize) {
        let request = &self.requests[index];
        if !request.data_home() {
            // A device has the only handle; the request continues with its completion.
            return self.hold(index);
        }
        self.leave_unequal(index);
        self.wait_for_members(index);
    }

    /// No replica could execute it, for a reason that says nothing about the blocks: it starts
    /// again with the next view, or after a delay.
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
        self.park(index, Why::Later(self.now + super::waiting::PAUSE));
    }

    /// It waits for a judgement, or until the volume may acknowledge it.
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
            // It was completed before, and its replicas agree.
            return self.finish(index, Status::Aborted);
        }
        if request.aborted && request.data_home() {
            self.answer_early(index, Status::Aborted);
        }
    }

    /// The replica's device may have lost blocks.
    #[inline]
    pub(super) fn has_lost(&self, slot: usize) -> bool {
        self.view.members[slot].as_ref().is_none_or(lost)
    }
}

const _: () = assert!(
    Op::COUNT == 9,
    "a new operation: decide whether it fans out"
);
