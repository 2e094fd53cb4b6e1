//! Requests that cannot start yet, in order of arrival.

use std::collections::VecDeque;
use std::time::Duration;

use nacre_reactor::{Idle, Nanos};

use super::request::{Stage, Why};
use super::requests::Requests;

/// Time before a request that no replica could serve is retried without a change of the replicas.
pub(super) const PAUSE: Duration = Duration::from_millis(20);

/// Number of turns that retry a stripe at once, enough while the stripe's holder makes progress.
const SPINS: u32 = 1024;
/// Later retries wait for pauses that grow by this much up to [`PAUSE`]: a holder that waits for a
/// judgement does not announce the release, and may wait as long as the store is unavailable.
const STEP: Duration = Duration::from_micros(200);

pub(super) struct Waiting {
    /// Oldest first.
    queue: VecDeque<u32>,
    recheck: Recheck,
    /// During a retry: how many at the head came later than the current one.
    later: usize,
}

/// The events since the last retry, besides those that the requests check for themselves. Each
/// includes the one before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Recheck {
    Nothing,
    /// A write ended: waiting requests may not overlap it any longer.
    WriteEnded,
    /// The view is new.
    View,
}

impl Waiting {
    pub fn with_capacity(capacity: usize) -> Waiting {
        Waiting {
            queue: VecDeque::with_capacity(capacity),
            recheck: Recheck::Nothing,
            later: 0,
        }
    }

    #[inline]
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    pub fn len(&self) -> usize {
        self.queue.len()
    }

    pub fn push(&mut self, index: usize) {
        self.queue.push_back(index as u32);
    }

    pub fn remove(&mut self, index: usize) {
        self.queue.retain(|waiting| *waiting as usize != index);
    }

    /// The next retry checks the requests that wait for such an event.
    #[inline]
    pub fn note(&mut self, event: Recheck) {
        self.recheck = self.recheck.max(event);
    }

    pub fn noted(&self) -> Recheck {
        self.recheck
    }

    pub fn take_noted(&mut self) -> Recheck {
        std::mem::replace(&mut self.recheck, Recheck::Nothing)
    }

    /// The next request of a retry, which leaves `later` requests behind it in the queue. The
    /// caller starts it, or pushes it again.
    pub fn next(&mut self, later: usize) -> Option<usize> {
        self.later = later;
        Some(self.queue.pop_front()? as usize)
    }

    pub fn end_retry(&mut self) {
        self.later = 0;
    }

    /// True when a waiting write that came earlier has blocks of this range: it goes first.
    #[cold]
    pub fn overlap_earlier(&self, requests: &Requests, lba: u64, end: u64) -> bool {
        let earlier = self.queue.iter().skip(self.later);
        earlier
            .map(|index| &requests[*index as usize])
            .any(|r| r.writes() && r.lba < end && lba < r.end())
    }

    pub fn iter(&self) -> impl Iterator<Item = usize> {
        self.queue.iter().map(|index| *index as usize)
    }

    /// The next point in time that a waiting request waits for.
    pub fn next_moment(&self, requests: &Requests) -> Idle {
        let mut idle = Idle::Quiet;
        for index in self.iter() {
            if let Stage::Parked(Why::Later(at) | Why::Stripe { at, .. }) = requests[index].stage {
                idle = idle.and(Idle::Until(at));
            }
        }
        idle
    }
}

/// Returns the wait of a request that was about to start, and whose stripes another owner has.
#[cold]
pub(super) fn stripe_wait(stage: Stage, now: Nanos) -> Why {
    let tries = match stage {
        Stage::Parked(Why::Stripe { tries, .. }) => tries.saturating_add(1),
        _ => 0,
    };
    let pause = (STEP * tries.saturating_sub(SPINS).min(1000)).min(PAUSE);
    Why::Stripe {
        tries,
        at: now + pause,
    }
}
