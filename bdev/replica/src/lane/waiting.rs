//! The list of requests that cannot start yet, in order of arrival. [`super::admission`] uses it.

use std::collections::VecDeque;
use std::time::Duration;

use nacre_reactor::{Idle, Nanos};

use super::request::{Stage, Wait};
use super::requests::Requests;

/// Delay before a request that no replica could serve is retried without a change of the replicas.
pub(super) const PAUSE: Duration = Duration::from_millis(20);

/// Number of turns in which a locked stripe is retried immediately; enough while its owner makes
/// progress.
const SPINS: u32 = 1024;
/// Later retries wait for delays that grow by this amount up to [`PAUSE`]. The owner of a stripe
/// may wait for a decision of the control for as long as the store is unavailable, and it does not
/// announce the release.
const STEP: Duration = Duration::from_micros(200);

pub(super) struct Waiting {
    /// Oldest first.
    queue: VecDeque<u32>,
    recheck: Recheck,
    /// During a retry: the number of requests at the head that arrived after the current one.
    later: usize,
}

/// Events since the last retry (one pass over the list) that requests do not check for themselves.
/// Each variant includes the one before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Recheck {
    Nothing,
    /// A write ended: waiting requests may no longer overlap with it.
    WriteEnded,
    /// A new view was adopted: the replicas and settings as the control publishes them to lanes.
    View,
}

impl Waiting {
    pub(super) fn with_capacity(capacity: usize) -> Self {
        Self {
            queue: VecDeque::with_capacity(capacity),
            recheck: Recheck::Nothing,
            later: 0,
        }
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.queue.len()
    }

    pub(super) fn push(&mut self, index: usize) {
        self.queue.push_back(index as u32);
    }

    pub(super) fn remove(&mut self, index: usize) {
        self.queue.retain(|waiting| *waiting as usize != index);
    }

    /// Makes the next retry check the requests that wait for this event.
    #[inline]
    pub(super) fn note(&mut self, event: Recheck) {
        self.recheck = self.recheck.max(event);
    }

    pub(super) fn noted(&self) -> Recheck {
        self.recheck
    }

    pub(super) fn take_noted(&mut self) -> Recheck {
        std::mem::replace(&mut self.recheck, Recheck::Nothing)
    }

    /// Returns the next request of a retry, with `later` requests behind it in the queue. The
    /// caller starts it, or pushes it again.
    pub(super) fn next(&mut self, later: usize) -> Option<usize> {
        self.later = later;
        Some(self.queue.pop_front()? as usize)
    }

    pub(super) fn end_retry(&mut self) {
        self.later = 0;
    }

    /// True when an earlier waiting write overlaps this range and must run first.
    #[cold]
    pub(super) fn overlap_earlier(&self, requests: &Requests, lba: u64, end: u64) -> bool {
        let earlier = self.queue.iter().skip(self.later);
        earlier
            .map(|index| &requests[*index as usize])
            .any(|r| r.writes() && r.lba < end && lba < r.end())
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = usize> {
        self.queue.iter().map(|index| *index as usize)
    }

    /// The earliest time for which a waiting request waits.
    pub(super) fn next_moment(&self, requests: &Requests) -> Idle {
        let mut idle = Idle::Quiet;
        for index in self.iter() {
            if let Stage::Waiting(Wait::Later(at) | Wait::Stripe { at, .. }) = requests[index].stage
            {
                idle = idle.and(Idle::Until(at));
            }
        }
        idle
    }
}

/// Returns the wait of a request whose stripes are locked by another owner.
#[cold]
pub(super) fn stripe_wait(stage: Stage, now: Nanos) -> Wait {
    let tries = match stage {
        Stage::Waiting(Wait::Stripe { tries, .. }) => tries.saturating_add(1),
        _ => 0,
    };
    let pause = (STEP * tries.saturating_sub(SPINS).min(1000)).min(PAUSE);
    Wait::Stripe {
        tries,
        at: now + pause,
    }
}
