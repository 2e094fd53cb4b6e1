//! The replicas of a volume as one core's data path (the lane) uses them: a queue to each replica's
//! device, and the I/O in flight there.
//!
//! The volume's control publishes a *view*: the replicas, the state of each, and whether the volume
//! serves. A replica has a *slot*, its index in the view. A *child* is the I/O of one request at
//! one replica. A queue is opened when a view adds a replica, and closed when the replica has left
//! the view and all its I/O has completed.

pub(super) mod choice;
mod queue;
mod sync;

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use nacre_bdev::{Bdev, Op, Queue, Status, Support};
use nacre_hugepages::Pool;
use nacre_reactor::{EventSet, Idle, Interest, Nanos};

use self::choice::{Choice, Loads};
use self::queue::ReplicaQueue;
use crate::lane::request::{Request, child_token};
use crate::lane::requests::Requests;
use crate::lane::slots::{Slots, bit, slots};
use crate::model::{MAX_REPLICAS, RESERVED};
use crate::mutation::Mutation;
use crate::shared::{Failure, LaneState, Shared};
use crate::shortage::is_shortage;
use crate::view::{Mode, ReplicaView, Role, View};

/// Delay before a replica that lacked resources is retried.
const RETRY: Duration = Duration::from_millis(1);

/// The queues of a lane, and the view that they follow.
pub(super) struct Replicas {
    /// Queues of the replicas, indexed by slot. Dropped first: afterwards no device touches a
    /// buffer.
    queues: [Option<Box<ReplicaQueue>>; MAX_REPLICAS],
    /// Queues of replicas that left the view, while they have I/O in flight.
    old: [Option<Box<ReplicaQueue>>; MAX_REPLICAS],
    /// Slots with a queue in `old`.
    olds: Slots,
    /// Slots whose queue has waiting children.
    waiting: Slots,
    pub view: Arc<View>,
    pub sync: Sync,
    /// Replicas that may receive a read directly, unless some replica lacks blocks.
    direct: Slots,
    /// Replicas that executed I/O synchronously since the last turn: they count as having I/O in
    /// flight ([`Replicas::enter`]), and must be polled.
    used: Slots,
    /// Replicas whose queues lack resources, which has been reported.
    reported_short: Slots,
    /// Number of children of each slot, in flight or waiting.
    loads: Loads,
    choice: Choice,
    block_size: u32,
    shared: Arc<Shared>,
    state: Arc<LaneState>,
    pool: Pool,
    /// Descriptors of the lane's bell, and of the replicas' completions.
    sleepers: EventSet,
}

/// The parts of the view that each I/O needs, as sets of slots.
#[derive(Default)]
pub(super) struct Sync {
    pub in_sync: Slots,
    /// Replicas under resync.
    pub syncing: Slots,
    pub flushed: Slots,
    local: Slots,
    /// Reads and writes may start.
    pub serves: bool,
    /// Enough replicas are in sync for writes.
    pub enough: bool,
    /// Completions may be returned to hosts.
    pub answers: bool,
}

impl Sync {
    fn of(view: &View) -> Self {
        let set = |want: fn(&ReplicaView) -> bool| {
            let replicas = view.replicas.iter().enumerate();
            let wanted = replicas.filter(|(_, m)| m.as_ref().is_some_and(want));
            wanted.fold(0, |set, (slot, _)| set | bit(slot))
        };
        let in_sync = set(|m| m.role == Role::InSync);
        Self {
            in_sync,
            syncing: set(|m| m.role == Role::Syncing),
            flushed: set(|m| m.flushed),
            local: set(|m| m.local),
            serves: view.mode == Mode::Serving && in_sync != 0,
            enough: in_sync.count_ones() as usize >= view.min_in_sync,
            answers: !matches!(view.mode, Mode::Suspended | Mode::Closed),
        }
    }

    /// True when a request with these successful children may be completed without an error.
    #[inline]
    pub(super) fn may_acknowledge(&self, request: &Request) -> bool {
        self.answers
            && request.children.ok & self.in_sync != 0
            && (self.enough || !request.writes())
    }
}

/// Views, and the queues that follow from them.
impl Replicas {
    /// Creates the replicas of a lane without a view and without queues: see [`Replicas::adopt`].
    pub(super) fn new(
        block_size: u32,
        shared: Arc<Shared>,
        state: Arc<LaneState>,
        pool: &Pool,
        sleepers: EventSet,
    ) -> Self {
        Self {
            queues: Default::default(),
            old: Default::default(),
            olds: 0,
            waiting: 0,
            view: Arc::new(View::closed(&Default::default())),
            sync: Sync::default(),
            direct: 0,
            used: 0,
            reported_short: 0,
            loads: [0; MAX_REPLICAS],
            choice: Choice::new(block_size),
            block_size,
            shared,
            state,
            pool: pool.clone(),
            sleepers,
        }
    }

    /// True when no newer view was published.
    #[inline]
    pub(super) fn is_current(&self) -> bool {
        self.shared.version() == self.view.version
    }

    /// Adopts the current view. `requests` are the ordinary ones (`Requests::make_ordinary`).
    pub(super) fn adopt(&mut self, requests: &mut Requests) {
        let view = self.shared.view();
        let before = std::mem::replace(&mut self.view, view);
        self.sync = Sync::of(&self.view);
        let incarnation =
            |view: &View, slot: usize| view.replicas[slot].as_ref().map(|m| m.incarnation);
        for slot in 0..MAX_REPLICAS {
            let now = incarnation(&self.view, slot);
            if incarnation(&before, slot) != now {
                self.replica_left(slot, requests);
            }
            if now.is_some() && self.queues[slot].is_none() {
                // A failure to open the queue is retried, and reported, by the request that needs
                // it.
                let _ = self.open(slot);
            }
        }
        self.find_direct();
    }

    /// Finds the replicas that reads may use without further checks: all that are in sync, if each
    /// has a queue.
    #[cold]
    pub(super) fn find_direct(&mut self) {
        let all = self.sync.in_sync;
        let whole = self.sync.serves && self.sync.answers && !Mutation::ReadStale.is_active();
        let open = slots(all).all(|slot| self.queues[slot].is_some());
        self.direct = if whole && open { all } else { 0 };
    }

    /// Handles a replica that left `slot`: no request waits for its completions any longer.
    fn replica_left(&mut self, slot: usize, requests: &mut Requests) {
        let Some(mut queue) = self.queues[slot].take() else {
            return;
        };
        queue.waiting.clear();
        let set = bit(slot);
        for (index, request) in requests.iter_mut() {
            if request.children.queued & set != 0 {
                self.loads[slot] -= 1;
            }
            if request.children.with & set != 0 {
                request.children.orphans |= set;
                queue
                    .queue
                    .abort(child_token(index, slot, request.generation));
            }
            request.children.forget(set);
        }
        self.publish_load(slot);
        if queue.inflight == 0 {
            return self.close(*queue);
        }
        if let Some(older) = self.old[slot].replace(queue) {
            // The control admits no replica before its previous incarnation ends.
            debug_assert!(false, "two earlier incarnations of slot {slot} at once");
            tracing::error!(
                slot,
                "a replica returned while I/O of its earlier incarnation was in flight"
            );
            self.give_up(slot, *older, requests);
        }
        self.olds |= set;
    }

    /// Abandons a queue with I/O in flight.
    fn give_up(&mut self, slot: usize, queue: ReplicaQueue, requests: &mut Requests) {
        self.loads[slot] -= queue.inflight;
        self.publish_load(slot);
        self.close(queue);
        requests.give_up_orphans(slot);
    }

    fn close(&mut self, queue: ReplicaQueue) {
        if let Some(fd) = queue.queue.wake_fd()
            && let Err(error) = self.sleepers.delete(fd)
        {
            tracing::warn!(%error, "cannot stop watching a replica's completions");
        }
    }

    /// Closes queues of replicas that left and have completed everything.
    pub(super) fn close_old(&mut self) {
        for slot in slots(self.olds) {
            if let Some(old) = self.old[slot].take_if(|old| old.inflight == 0) {
                self.olds &= !bit(slot);
                self.close(*old);
            }
        }
    }

    pub(super) fn close_all(&mut self) {
        for slot in 0..MAX_REPLICAS {
            let queues = [self.queues[slot].take(), self.old[slot].take()];
            for queue in queues.into_iter().flatten() {
                self.close(*queue);
            }
        }
    }

    fn open(&mut self, slot: usize) -> Result<(), Failure> {
        let Some(replica) = &self.view.replicas[slot] else {
            return Err(Failure::Open);
        };
        let device = &replica.device;
        let reported = &mut self.reported_short;
        let short = |reported: &mut Slots, error: &dyn std::fmt::Display| {
            // Retried often, and reported once.
            if *reported & bit(slot) == 0 {
                *reported |= bit(slot);
                tracing::warn!(device = device.name(), %error, "no resources for a queue to a \
                    replica: I/O waits");
            }
            Failure::Shortage
        };
        let queue = device.open_queue(&self.pool);
        let queue = queue.map_err(|error| {
            if is_shortage(&error.source) {
                short(reported, &error)
            } else {
                tracing::warn!(device = device.name(), %error, "cannot open a queue to a replica");
                Failure::Open
            }
        })?;
        if let Some(fd) = queue.wake_fd() {
            // The limit belongs to the system or to this process, not to the device.
            let added = self.sleepers.add(fd, 1, Interest::READ);
            added.map_err(|error| short(reported, &error))?;
        }
        *reported &= !bit(slot);
        let limits = device.limits();
        let unmaps = device.supports(Op::Unmap) == Support::Native
            && limits.unmap_zeroes
            && limits.unmap_granularity_blocks <= 1;
        let first = RESERVED / u64::from(self.block_size);
        self.queues[slot] = Some(Box::new(ReplicaQueue::new(queue, !unmaps, first)));
        Ok(())
    }

    /// True when a queue to one of the replicas cannot be opened for lack of memory on this
    /// machine. Other failures appear when the replica receives I/O.
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
        closed.any(|slot| self.queues[slot].is_none() && self.open(slot) == Err(Failure::Shortage))
    }

    #[inline]
    pub(super) fn queue(&mut self, slot: usize) -> Option<&mut ReplicaQueue> {
        self.queues[slot].as_deref_mut()
    }

    /// The queue of a slot: of a replica that left if `old`, else the present one.
    #[inline]
    pub(super) fn queue_of(&mut self, slot: usize, old: bool) -> Option<&mut ReplicaQueue> {
        let queue = if old {
            &mut self.old[slot]
        } else {
            &mut self.queues[slot]
        };
        queue.as_deref_mut()
    }

    /// The status for a request that cannot be served; `None`: the request waits.
    pub(super) fn refusal(&self, op: Op) -> Option<Status> {
        match self.view.mode {
            Mode::Serving | Mode::Frozen | Mode::Suspended => None,
            Mode::FailIo => Some(Status::medium_error(op)),
            Mode::Closed => Some(Status::Gone),
        }
    }

    /// True if the replica's device may have lost blocks since it was attached.
    #[inline]
    pub(super) fn has_lost(&self, slot: usize) -> bool {
        let lost = |replica: &ReplicaView| replica.device.losses() != replica.losses;
        self.view.replicas[slot].as_ref().is_none_or(lost)
    }

    /// True when a read completed by the replica may be returned to the host.
    #[inline]
    pub(super) fn may_answer(&self, slot: usize) -> bool {
        self.sync.answers && !self.has_lost(slot)
    }
}

/// Children.
impl Replicas {
    /// Counts one more I/O to a slot. The control must see the count before the caller checks the
    /// version again.
    #[inline]
    pub(super) fn enter(&mut self, slot: usize) {
        self.loads[slot] += 1;
        if self.loads[slot] == 1 {
            // The control waits for zero only; the exact count is published once per turn.
            self.state.outstanding[slot].store(1, Ordering::SeqCst);
        }
    }

    #[inline]
    /// Undoes one [`Replicas::enter`].
    pub(super) fn leave(&mut self, slot: usize) {
        self.loads[slot] -= 1;
        if self.loads[slot] == 0 {
            self.state.outstanding[slot].store(0, Ordering::SeqCst);
        }
    }

    fn publish_load(&self, slot: usize) {
        self.state.outstanding[slot].store(self.loads[slot], Ordering::SeqCst);
    }

    /// Publishes the exact counts, once per turn.
    pub(super) fn publish_loads(&self) {
        for slot in 0..MAX_REPLICAS {
            if self.loads[slot] > 1 {
                self.state.outstanding[slot].store(self.loads[slot], Ordering::Relaxed);
            }
        }
    }

    /// Clears the counts when the lane ends.
    pub(super) fn clear_loads(&mut self) {
        self.loads = [0; MAX_REPLICAS];
        (0..MAX_REPLICAS).for_each(|slot| self.publish_load(slot));
    }

    /// Submits a request to a replica, or queues it there. Call [`Replicas::enter`] first; an error
    /// undoes that.
    #[inline]
    pub(super) fn submit(
        &mut self,
        request: &mut Request,
        index: usize,
        slot: usize,
        sole: bool,
    ) -> Result<(), Failure> {
        if self.queues[slot].is_none()
            && let Err(why) = self.open(slot)
        {
            self.leave(slot);
            return Err(why);
        }
        let Some(queue) = &mut self.queues[slot] else {
            return Ok(());
        };
        request.children.ages[slot] = 0;
        if !queue.waiting.is_empty() || !queue.hand(request, index, slot, sole) {
            queue.wait(request, index, slot, Nanos::ZERO);
            self.waiting |= bit(slot);
        }
        Ok(())
    }

    /// Schedules a child for a later submission, because the replica lacked resources.
    pub(super) fn submit_later(
        &mut self,
        request: &mut Request,
        index: usize,
        slot: usize,
        now: Nanos,
    ) -> Result<(), Failure> {
        if self.queues[slot].is_none() {
            self.open(slot)?;
        }
        self.enter(slot);
        let Some(queue) = &mut self.queues[slot] else {
            return Ok(());
        };
        queue.wait(request, index, slot, now + RETRY);
        self.waiting |= bit(slot);
        Ok(())
    }

    #[inline]
    pub(super) fn has_waiting(&self) -> bool {
        self.waiting != 0
    }

    /// Submits waiting children while their replica accepts them. Returns true if any was
    /// submitted.
    pub(super) fn resume_waiting(&mut self, requests: &mut Requests, now: Nanos) -> bool {
        let mut submitted = false;
        for slot in slots(self.waiting) {
            submitted |= self.resume_slot(slot, requests, now);
        }
        submitted
    }

    fn resume_slot(&mut self, slot: usize, requests: &mut Requests, now: Nanos) -> bool {
        let mut submitted = false;
        while let Some(queue) = &mut self.queues[slot]
            && let Some(first) = queue.waiting.front().copied()
        {
            let (index, set) = (first.index as usize, bit(slot));
            let request = requests
                .get_mut(index)
                .filter(|r| r.generation == first.generation && r.children.queued & set != 0);
            if let Some(request) = request {
                if first.after > now {
                    return submitted;
                }
                if !queue.hand(request, index, slot, false) {
                    queue.waiting[0].after = Nanos::ZERO;
                    return submitted;
                }
                request.children.queued &= !set;
                request.children.ages[slot] = 0;
                submitted = true;
            }
            queue.waiting.pop_front();
        }
        self.waiting &= !bit(slot);
        submitted
    }

    /// Removes a request's waiting children.
    pub(super) fn drop_waiting(&mut self, request: &mut Request, index: usize) {
        for slot in slots(request.children.queued) {
            if let Some(queue) = &mut self.queues[slot] {
                queue.waiting.retain(|child| child.index as usize != index);
            }
            self.leave(slot);
        }
        request.children.queued = 0;
    }

    /// Asks a replica's device to abort a child. Returns true if the device tries.
    pub(super) fn abort(&mut self, request: &Request, index: usize, slot: usize) -> bool {
        let token = child_token(index, slot, request.generation);
        let queue = &mut self.queues[slot];
        queue.as_mut().is_some_and(|queue| queue.queue.abort(token))
    }

    /// Handles the completion of a child of this request. Returns true if no request waits for it.
    #[inline]
    pub(super) fn child_ended(
        &mut self,
        request: &mut Request,
        slot: usize,
        old: bool,
        status: Status,
    ) -> bool {
        if let Some(queue) = self.queue_of(slot, old) {
            queue.inflight -= 1;
            if request.children.passed & bit(slot) != 0 {
                request.children.passed &= !bit(slot);
                queue.passed_ended(request.blocks, status, request.start);
            }
        }
        let orphan = old || request.children.with & bit(slot) == 0;
        if orphan {
            request.children.orphans &= !bit(slot);
        } else {
            request.children.with &= !bit(slot);
        }
        self.leave(slot);
        orphan
    }

    /// Handles the completion of a read that was passed directly.
    #[inline]
    pub(super) fn direct_ended(&mut self, slot: usize, blocks: u32, start: Nanos) {
        if let Some(queue) = &mut self.queues[slot] {
            queue.inflight -= 1;
            queue.passed_ended(blocks, Status::Ok, start);
        }
        self.leave(slot);
    }
}

/// Polling and sleep.
impl Replicas {
    /// True for a replica with I/O in flight.
    #[inline]
    pub(super) fn is_busy(&self, slot: usize) -> bool {
        self.queues[slot].as_ref().is_some_and(|q| q.inflight > 0)
    }

    /// True for a replica without I/O in flight whose queue has work of its own.
    pub(super) fn has_own_work(&self, slot: usize) -> bool {
        let queue = self.queues[slot].as_ref();
        queue.is_some_and(|q| q.inflight == 0 && !q.queue.is_settled())
    }

    /// Slots of replicas that left, with I/O in flight.
    #[inline]
    pub(super) fn left(&self) -> Slots {
        self.olds
    }

    pub(super) fn is_settled(&self) -> bool {
        self.used == 0
            && self.olds == 0
            && self.is_current()
            && self.queues.iter().flatten().all(|q| q.queue.is_settled())
    }

    pub(super) fn arm(&mut self, now: Nanos) -> Idle {
        // A ring from now on wakes the lane; earlier rings are handled in this turn.
        self.state.clear_bell();
        let queues = self.queues.iter_mut().chain(&mut self.old).flatten();
        let idle = queues.fold(Idle::Quiet, |idle, q| idle.and(q.queue.arm(now)));
        if self.used != 0 || !self.is_current() {
            Idle::Busy
        } else {
            idle
        }
    }

    pub(super) fn disarm(&mut self) {
        let queues = self.queues.iter_mut().chain(&mut self.old).flatten();
        queues.for_each(|q| q.queue.disarm());
    }

    pub(super) fn wake_fd(&self) -> BorrowedFd<'_> {
        self.sleepers.as_fd()
    }

    /// The next time at which waiting children must be retried, if no completion comes.
    pub(super) fn next_moment(&self, now: Nanos) -> Idle {
        let mut idle = Idle::Quiet;
        for queue in slots(self.waiting).filter_map(|slot| self.queues[slot].as_ref()) {
            idle = idle.and(match queue.waiting.front() {
                Some(first) if first.after > now => Idle::Until(first.after),
                // The queue was full: a completion will wake the lane.
                Some(first) if first.after == Nanos::ZERO && queue.inflight > 0 => Idle::Quiet,
                Some(_) => Idle::Busy,
                None => Idle::Quiet,
            });
        }
        idle
    }

    #[cfg(test)]
    pub(super) fn sleepers(&self) -> &EventSet {
        &self.sleepers
    }

    #[cfg(test)]
    pub(super) fn loads(&self) -> Loads {
        self.loads
    }
}
