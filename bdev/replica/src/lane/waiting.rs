//! Requests that cannot start yet, in order of arrival.

use std::time::Duration;

use super::Lane;
use super::request::{Stage, Why};

/// Time before a request that no replica could serve is retried without a change of the replicas.
pub(super) const PAUSE: Duration = Duration::from_millis(20);

/// Number of turns that retry a stripe at once, enough while the stripe's holder makes progress.
const SPINS: u32 = 1024;
/// Later retries wait for pauses that grow by this much up to [`PAUSE`]: a holder that waits for a
/// judgement does not announce the release, and may wait as long as the store is unavailable.
const STEP: Duration = Duration::from_micros(200);

impl Lane {
    pub(super) fn park(&mut self, index: usize, why: Why) {
        self.requests[index].stage = Stage::Parked(why);
        self.parked.push_back(index as u32);
    }

    /// Another owner has the stripes of a request that was about to start.
    #[cold]
    pub(super) fn stripe_wait(&self, index: usize) -> Why {
        let tries = match self.requests[index].stage {
            Stage::Parked(Why::Stripe { tries, .. }) => tries.saturating_add(1),
            _ => 0,
        };
        let pause = (STEP * tries.saturating_sub(SPINS).min(1000)).min(PAUSE);
        Why::Stripe {
            tries,
            at: self.now + pause,
        }
    }

    /// True when a parked write that came earlier has blocks of this range: it goes first.
    #[cold]
    pub(super) fn overlaps_parked(&self, lba: u64, end: u64) -> bool {
        let earlier = self.parked.iter().skip(self.later);
        earlier
            .map(|index| &self.requests[*index as usize])
            .any(|r| r.writes() && r.lba < end && lba < r.end())
    }

    /// Starts the requests that may start now, in order; the rest keeps its order.
    pub(super) fn retry_parked(&mut self) {
        let freed = std::mem::take(&mut self.freed);
        let viewed = std::mem::take(&mut self.viewed);
        let count = self.parked.len();
        for left in (0..count).rev() {
            let Some(index) = self.parked.pop_front() else {
                break;
            };
            let index = index as usize;
            let may = match self.requests[index].stage {
                Stage::Parked(why) => self.may_start(index, why, freed, viewed),
                _ => continue,
            };
            if may {
                self.later = left;
                self.pushed = true;
                self.start(index);
            } else {
                self.parked.push_back(index as u32);
            }
        }
        self.later = 0;
    }

    fn may_start(&self, index: usize, why: Why, freed: bool, viewed: bool) -> bool {
        match why {
            Why::Log(region) => viewed || self.shared.regions.is_dirty(region),
            Why::Stripe { at, .. } => self.now >= at,
            Why::Overlap => viewed || freed,
            Why::View => viewed,
            Why::Later(moment) => self.now >= moment,
            Why::Equal(ticket) => {
                self.shared.tried() >= ticket || !self.sync.serves || self.may_read(index) != 0
            }
        }
    }

    /// True when another poll would start a request.
    pub(super) fn parked_may_start(&self) -> bool {
        self.parked
            .iter()
            .any(|index| match self.requests[*index as usize].stage {
                Stage::Parked(why) => self.may_start(*index as usize, why, self.freed, self.viewed),
                _ => false,
            })
    }
}
