//! Decides when a request may start. Owns the locks of the lane's writes and the list of waiting
//! requests.
//!
//! A write needs the *regions* of the dirty-region log and the *stripes* (64 KiB) that it touches.
//! Regions are dirty before the write starts; stripes exclude overlapping writes of other lanes and
//! the resync. A request can also wait for a new *view*: the replicas and settings as the control
//! publishes them to the lanes.

use std::sync::Arc;

use nacre_reactor::{Idle, Nanos};

use super::counters::Counters;
use super::locks::{Blocked, Locks};
use super::replicas::Replicas;
use super::request::{Request, Stage, Wait};
use super::requests::Requests;
use super::waiting::{Recheck, Waiting, stripe_wait};
use crate::shared::Shared;
use crate::stripes::Owner;

/// The locks and waiting requests of one lane.
pub(super) struct Admission {
    locks: Locks,
    waiting: Waiting,
    shared: Arc<Shared>,
}

/// One pass over the waiting requests, which starts those that may start.
pub(super) struct AdmissionRetry {
    /// Number of requests still to be checked in this pass.
    left: usize,
    events: Recheck,
}

impl Admission {
    pub(super) fn with_capacity(capacity: usize, owner: Owner, shared: Arc<Shared>) -> Self {
        Self {
            locks: Locks::with_capacity(capacity, owner, Arc::clone(&shared)),
            waiting: Waiting::with_capacity(capacity),
            shared,
        }
    }

    /// Enters the regions and locks the stripes of a write: all of them, or none. The error is the
    /// event to wait for.
    #[inline]
    pub(super) fn lock(
        &mut self,
        requests: &mut Requests,
        index: usize,
        now: Nanos,
        counters: &mut Counters,
    ) -> Result<(), Wait> {
        let request = &requests[index];
        let (lba, end) = (request.lba, request.end());
        let overlaps = !self.waiting.is_empty() && self.waiting.overlap_earlier(requests, lba, end);
        let request = &mut requests[index];
        let locked = if overlaps {
            Err(Blocked::Overlap)
        } else {
            self.locks.lock(request, index)
        };
        locked.map_err(|blocked| why_blocked(request, blocked, now, counters))
    }

    /// Leaves the regions and unlocks the stripes of a write.
    #[inline]
    pub(super) fn unlock(&mut self, requests: &mut Requests, index: usize) {
        if self.locks.unlock(requests, index) {
            self.waiting.note(Recheck::WriteEnded);
        }
    }

    /// Locks regions and stripes for a write that completes during its submission (on RAM disks).
    /// Returns false if it cannot, or if another request waits.
    #[inline]
    pub(super) fn enter(&self, lba: u64, blocks: u64) -> bool {
        self.waiting.is_empty() && self.locks.enter(lba, blocks).is_ok()
    }

    /// Releases the locks of [`Admission::enter`].
    #[inline]
    pub(super) fn leave(&self, lba: u64, blocks: u64) {
        self.locks.leave(lba, blocks);
    }

    /// Adds a request to the waiting ones; `why` is the event that it waits for.
    pub(super) fn park(&mut self, requests: &mut Requests, index: usize, why: Wait) {
        requests[index].stage = Stage::Waiting(why);
        self.waiting.push(index);
    }

    /// Removes a parked request that ends without a start.
    pub(super) fn unpark(&mut self, index: usize) {
        self.waiting.remove(index);
    }

    /// Releases the locks of a request that ends, and lets the next pass check requests that
    /// overlap with it.
    pub(super) fn request_ended(&mut self, requests: &mut Requests, index: usize) {
        self.unlock(requests, index);
        self.waiting.note(Recheck::WriteEnded);
    }

    /// Lets the next pass check the requests that wait for a new view.
    pub(super) fn view_changed(&mut self) {
        self.waiting.note(Recheck::View);
    }

    #[inline]
    pub(super) fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    pub(super) fn begin_retry(&mut self) -> AdmissionRetry {
        AdmissionRetry {
            left: self.waiting.len(),
            events: self.waiting.take_noted(),
        }
    }

    /// Removes and returns the next waiting request that may start now, in order of arrival. The
    /// others stay in their order. `None`: the pass is complete.
    pub(super) fn next_admitted(
        &mut self,
        retry: &mut AdmissionRetry,
        requests: &Requests,
        replicas: &Replicas,
        now: Nanos,
    ) -> Option<usize> {
        while retry.left > 0
            && let Some(index) = self.waiting.next(retry.left - 1)
        {
            retry.left -= 1;
            let request = &requests[index];
            let Stage::Waiting(why) = request.stage else {
                continue;
            };
            if self.may_start(request, why, retry.events, replicas, now) {
                return Some(index);
            }
            self.waiting.push(index);
        }
        self.waiting.end_retry();
        None
    }

    fn may_start(
        &self,
        request: &Request,
        why: Wait,
        events: Recheck,
        replicas: &Replicas,
        now: Nanos,
    ) -> bool {
        match why {
            Wait::Log(region) => events == Recheck::View || self.shared.regions.is_dirty(region),
            Wait::Stripe { at, .. } => now >= at,
            Wait::Overlap => events >= Recheck::WriteEnded,
            Wait::View => events == Recheck::View,
            Wait::Later(moment) => now >= moment,
            Wait::Equal(ticket) => {
                self.shared.tried() >= ticket
                    || !replicas.sync.serves
                    || replicas.may_read(request) != 0
            }
        }
    }

    /// True when another pass would return a request from [`Admission::next_admitted`].
    pub(super) fn may_start_any(
        &self,
        requests: &Requests,
        replicas: &Replicas,
        now: Nanos,
    ) -> bool {
        let events = self.waiting.noted();
        let mut waiting = self.waiting.iter().map(|index| &requests[index]);
        waiting.any(|request| match request.stage {
            Stage::Waiting(why) => self.may_start(request, why, events, replicas, now),
            _ => false,
        })
    }

    /// The earliest time that a waiting request waits for.
    pub(super) fn next_moment(&self, requests: &Requests) -> Idle {
        self.waiting.next_moment(requests)
    }

    /// The number of writes with locks, and the number of waiting requests.
    #[cfg(test)]
    pub(super) fn counts(&self) -> (usize, usize) {
        (self.locks.count(), self.waiting.len())
    }
}

#[cold]
fn why_blocked(
    request: &mut Request,
    blocked: Blocked,
    now: Nanos,
    counters: &mut Counters,
) -> Wait {
    match blocked {
        Blocked::Overlap => {
            let counted = std::mem::replace(&mut request.waited_overlap, true);
            counters.overlap_wait(!counted);
            Wait::Overlap
        }
        Blocked::Log(region) => {
            let counted = std::mem::replace(&mut request.waited_log, true);
            counters.log_wait(!counted);
            Wait::Log(region)
        }
        Blocked::Stripe => stripe_wait(request.stage, now),
    }
}
