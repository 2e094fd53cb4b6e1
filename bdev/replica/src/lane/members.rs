//! The lane's queues to its replicas: opened when a view adds a replica, closed when it left and
//! has completed everything.

use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::sync::atomic::Ordering;
use std::time::Duration;

use nacre_bdev::{Bdev, Busy, Flags, Io, LayerQueue, Op, Queue, Status, Support, Token};
use nacre_hugepages::Lent;
use nacre_reactor::Nanos;

use super::Lane;
use super::request::{Request, Slots, Stage, bit, child_token, slots};
use crate::model::{MAX_MEMBERS, RESERVED};
use crate::mutation::Mutation;
use crate::shared::Failure;
use crate::shortage::is_shortage;
use crate::view::{MemberView, Role, View};

/// Time before a replica that lacked resources is asked again.
pub(super) const RETRY: Duration = Duration::from_millis(1);

pub(super) struct MemberQueue {
    pub queue: LayerQueue,
    /// Children that the device has.
    pub inflight: u32,
    /// Children that the device has not accepted yet, oldest first.
    pub waiting: VecDeque<Waiting>,
    watched: Option<RawFd>,
    /// Unmapped blocks read as undefined data: write zeroes instead, so that all replicas are
    /// equal.
    zeroes_for_unmap: bool,
    /// Device blocks before the volume's first.
    first: u64,
}

#[derive(Clone, Copy)]
pub(super) struct Waiting {
    pub index: u32,
    pub generation: u32,
    pub after: Nanos,
}

/// The parts of the view that each I/O needs, as sets of slots.
#[derive(Default)]
pub(super) struct Sync {
    pub in_sync: Slots,
    pub syncing: Slots,
    pub flushed: Slots,
    pub local: Slots,
    /// Reads and writes may start.
    pub serves: bool,
    /// Enough replicas are in sync for writes.
    pub enough: bool,
    /// Completions may be returned to hosts.
    pub answers: bool,
}

impl Sync {
    pub fn of(view: &View) -> Sync {
        use crate::view::Mode;
        let set = |want: fn(&MemberView) -> bool| {
            let members = view.members.iter().enumerate();
            let wanted = members.filter(|(_, m)| m.as_ref().is_some_and(want));
            wanted.fold(0, |set, (slot, _)| set | bit(slot))
        };
        let in_sync = set(|m| m.role == Role::InSync);
        Sync {
            in_sync,
            syncing: set(|m| m.role == Role::Syncing),
            flushed: set(|m| m.flushed),
            local: set(|m| m.local),
            serves: view.mode == Mode::Serving && in_sync != 0,
            enough: in_sync.count_ones() as usize >= view.min_in_sync,
            answers: !matches!(view.mode, Mode::Suspended | Mode::Closed),
        }
    }
}

impl Lane {
    /// Takes over the current view. The next turn checks the requests.
    #[cold]
    pub(super) fn adopt(&mut self) {
        self.requests.settle();
        let view = self.shared.view();
        let before = std::mem::replace(&mut self.view, view);
        self.sync = Sync::of(&self.view);
        self.adopted = true;
        self.set_pace();
        let incarnation =
            |view: &View, slot: usize| view.members[slot].as_ref().map(|m| m.incarnation);
        for slot in 0..MAX_MEMBERS {
            let now = incarnation(&self.view, slot);
            if incarnation(&before, slot) != now {
                self.leave_member(slot);
            }
            if now.is_some() && self.queues[slot].is_none() {
                // A queue that cannot be opened now is retried, and reported, by the request that
                // needs it.
                let _ = self.open_member(slot);
            }
        }
        self.find_swift();
    }

    /// Finds the replicas that reads may use without further checks: all that are in sync, if each
    /// has a queue.
    #[cold]
    pub(super) fn find_swift(&mut self) {
        let all = self.sync.in_sync;
        let whole = self.sync.serves && self.sync.answers && !Mutation::ReadStale.is_active();
        let open = slots(all).all(|slot| self.queues[slot].is_some());
        self.swift = if whole && open { all } else { 0 };
    }

    /// The replica of `slot` changed: no request waits for its completions any longer.
    fn leave_member(&mut self, slot: usize) {
        let Some(mut queue) = self.queues[slot].take() else {
            return;
        };
        queue.waiting.clear();
        let set = bit(slot);
        for (index, request) in self.requests.iter_mut() {
            if request.queued & set != 0 {
                self.local[slot] -= 1;
            }
            if request.with & set != 0 {
                request.orphans |= set;
                queue
                    .queue
                    .abort(child_token(index, slot, request.generation));
            }
            for state in [
                &mut request.with,
                &mut request.queued,
                &mut request.ok,
                &mut request.failed,
                &mut request.tried,
                &mut request.unread,
            ] {
                *state &= !set;
            }
        }
        self.publish_outstanding(slot);
        if queue.inflight == 0 {
            return self.close_member(*queue);
        }
        if let Some(older) = self.old[slot].replace(queue) {
            // The control admits no replica before its previous incarnation ends.
            debug_assert!(false, "two earlier incarnations of slot {slot} at once");
            tracing::error!(
                slot,
                "a member returned while I/O of its earlier incarnation was in flight"
            );
            self.give_up(slot, *older);
        }
        self.olds |= set;
    }

    /// Closes a queue with I/O in flight.
    fn give_up(&mut self, slot: usize, queue: MemberQueue) {
        self.local[slot] -= queue.inflight;
        self.publish_outstanding(slot);
        self.close_member(queue);
        for (_, request) in self.requests.iter_mut() {
            request.orphans &= !bit(slot);
        }
        let over = |r: &Request| r.stage == Stage::Orphaned && r.orphans == 0;
        for index in 0..self.requests.end() {
            if over(&self.requests[index]) {
                self.requests.remove(index);
            }
        }
    }

    pub(super) fn close_member(&mut self, queue: MemberQueue) {
        if let Some(fd) = queue.watched
            && let Err(error) = self.sleepers.delete_raw(fd)
        {
            tracing::warn!(%error, "cannot stop watching a replica's completions");
        }
    }

    /// Closes queues of replicas that left and have completed everything.
    pub(super) fn close_old(&mut self) {
        for slot in slots(self.olds) {
            if let Some(old) = self.old[slot].take_if(|old| old.inflight == 0) {
                self.olds &= !bit(slot);
                self.close_member(*old);
            }
        }
    }

    fn open_member(&mut self, slot: usize) -> Result<(), Failure> {
        let Some(member) = &self.view.members[slot] else {
            return Err(Failure::Open);
        };
        let device = &member.device;
        let told = &mut self.told_short;
        let short = |told: &mut Slots, error: &dyn std::fmt::Display| {
            // Retried often, and reported once.
            if *told & bit(slot) == 0 {
                *told |= bit(slot);
                tracing::warn!(device = device.name(), %error, "no resources for a queue to a \
                    replica: I/O waits");
            }
            Failure::Shortage
        };
        let queue = device.open_queue(&self.pool);
        let queue = queue.map_err(|error| {
            if is_shortage(&error.source) {
                short(told, &error)
            } else {
                tracing::warn!(device = device.name(), %error, "cannot open a queue to a replica");
                Failure::Open
            }
        })?;
        let watched = queue.wake_fd();
        if let Some(fd) = watched {
            // A limit of the system or of this process: the device is not involved.
            let added = self.sleepers.add_raw(fd, 1);
            added.map_err(|error| short(told, &error))?;
        }
        *told &= !bit(slot);
        let limits = device.limits();
        let unmaps = device.supports(Op::Unmap) == Support::Native
            && limits.unmap_zeroes
            && limits.unmap_granularity_blocks <= 1;
        self.queues[slot] = Some(Box::new(MemberQueue {
            inflight: 0,
            waiting: VecDeque::with_capacity(16),
            watched,
            zeroes_for_unmap: !unmaps,
            first: RESERVED / u64::from(self.block_size),
            queue,
        }));
        Ok(())
    }

    /// True when a queue to one of the replicas cannot be opened for lack of memory here. Other
    /// faults of the replica appear when it receives I/O.
    #[inline]
    pub(super) fn is_short(&mut self, of: Slots) -> bool {
        let closed = |slot: &usize| self.queues[*slot].is_none();
        let Some(first) = slots(of).find(closed) else {
            return false;
        };
        self.cannot_open(first, of)
    }

    #[cold]
    fn cannot_open(&mut self, first: usize, of: Slots) -> bool {
        let mut closed = slots(of).filter(|slot| *slot >= first);
        closed.any(|slot| {
            self.queues[slot].is_none() && self.open_member(slot) == Err(Failure::Shortage)
        })
    }

    /// Counts one more I/O to a slot. The control must see it before the caller checks the version
    /// again.
    #[inline]
    pub(super) fn enter_slot(&mut self, slot: usize) {
        self.local[slot] += 1;
        if self.local[slot] == 1 {
            // The control waits for zero only; the exact count follows once per turn.
            self.state.outstanding[slot].store(1, Ordering::SeqCst);
        }
    }

    #[inline]
    pub(super) fn leave_slot(&mut self, slot: usize) {
        self.local[slot] -= 1;
        if self.local[slot] == 0 {
            self.state.outstanding[slot].store(0, Ordering::SeqCst);
        }
    }

    pub(super) fn publish_outstanding(&mut self, slot: usize) {
        self.state.outstanding[slot].store(self.local[slot], Ordering::SeqCst);
    }

    /// Submits a request to a replica, or queues it there. The slot was entered.
    #[inline]
    pub(super) fn submit_child(&mut self, index: usize, slot: usize, sole: bool) {
        if self.queues[slot].is_none()
            && let Err(why) = self.open_member(slot)
        {
            self.leave_slot(slot);
            return self.fail(index, slot, why);
        }
        let (Some(queue), request) = (&mut self.queues[slot], &mut self.requests[index]) else {
            return;
        };
        request.ages[slot] = 0;
        if !queue.waiting.is_empty() || !queue.hand(request, index, slot, sole) {
            request.queued |= bit(slot);
            let waiting = Waiting {
                index: index as u32,
                generation: request.generation,
                after: Nanos::ZERO,
            };
            queue.waiting.push_back(waiting);
            self.waiting |= bit(slot);
        }
    }

    /// Schedules a child for another submission: the replica lacked resources.
    pub(super) fn queue_again(&mut self, index: usize, slot: usize) {
        if self.queues[slot].is_none()
            && let Err(why) = self.open_member(slot)
        {
            return self.fail(index, slot, why);
        }
        self.enter_slot(slot);
        let request = &mut self.requests[index];
        let Some(queue) = &mut self.queues[slot] else {
            return;
        };
        request.queued |= bit(slot);
        queue.waiting.push_back(Waiting {
            index: index as u32,
            generation: request.generation,
            after: self.now + RETRY,
        });
        self.waiting |= bit(slot);
    }

    /// Submits queued children while their replica accepts them.
    pub(super) fn resume_waiting(&mut self) {
        for slot in slots(self.waiting) {
            self.resume_slot(slot);
        }
    }

    fn resume_slot(&mut self, slot: usize) {
        while let Some(queue) = &mut self.queues[slot]
            && let Some(first) = queue.waiting.front().copied()
        {
            let (index, set) = (first.index as usize, bit(slot));
            let request = self
                .requests
                .get_mut(index)
                .filter(|r| r.generation == first.generation && r.queued & set != 0);
            if let Some(request) = request {
                if first.after > self.now {
                    return;
                }
                if !queue.hand(request, index, slot, false) {
                    queue.waiting[0].after = Nanos::ZERO;
                    return;
                }
                request.queued &= !set;
                request.ages[slot] = 0;
                self.pushed = true;
            }
            queue.waiting.pop_front();
        }
        self.waiting &= !bit(slot);
    }

    /// Removes a child from its replica's queue of waiting children.
    pub(super) fn drop_waiting(&mut self, index: usize) {
        for slot in slots(self.requests[index].queued) {
            if let Some(queue) = &mut self.queues[slot] {
                queue.waiting.retain(|w| w.index as usize != index);
            }
            self.leave_slot(slot);
        }
        self.requests[index].queued = 0;
    }
}

impl MemberQueue {
    /// Passes a read to the device unchanged, or hands it back.
    #[inline]
    #[allow(clippy::result_large_err)]
    pub fn pass(&mut self, mut io: Io, token: Token) -> Result<(), Io> {
        if !self.waiting.is_empty() {
            return Err(io);
        }
        if self.inflight == 0 {
            self.queue.rested();
        }
        let own = std::mem::replace(&mut io.token, token);
        io.lba += self.first;
        match self.queue.pass_read(io) {
            Ok(()) => {
                self.inflight += 1;
                Ok(())
            }
            Err(mut io) => {
                io.token = own;
                io.lba -= self.first;
                Err(io)
            }
        }
    }

    /// See [`Queue::at_once`].
    #[inline]
    pub fn at_once(&mut self, io: &mut Io, lent: &mut Option<Lent>) -> Option<Status> {
        if !self.waiting.is_empty() {
            return None;
        }
        io.lba += self.first;
        let status = self.queue.at_once(io, lent);
        io.lba -= self.first;
        status
    }

    /// `false`: the queue is full. `sole`: no other replica gets the request, so the child needs no
    /// handle of its own.
    #[inline]
    fn hand(&mut self, request: &mut Request, index: usize, slot: usize, sole: bool) -> bool {
        if self.inflight == 0 {
            self.queue.rested();
        }
        let (mut op, mut flags) = (request.op, request.flags);
        if op == Op::Unmap && self.zeroes_for_unmap {
            (op, flags) = (Op::WriteZeroes, flags | Flags::DEALLOCATE);
        }
        let moved = sole || request.is_read();
        let data = if moved {
            std::mem::take(&mut request.data)
        } else {
            request.data.clone()
        };
        let io = Io {
            token: child_token(index, slot, request.generation),
            op,
            flags,
            lba: match op {
                Op::Flush => 0,
                _ => request.lba + self.first,
            },
            blocks: request.blocks,
            source_lba: 0,
            data,
        };
        match self.queue.submit(io) {
            Ok(()) => {
                request.with |= bit(slot);
                self.inflight += 1;
                true
            }
            Err((Busy, io)) => {
                if moved {
                    request.data = io.data;
                }
                false
            }
        }
    }
}

/// The device may have lost data since it was attached.
pub(super) fn lost(member: &MemberView) -> bool {
    member.device.losses() != member.losses
}
