//! The locks of a lane's writes: dirty regions, which the resync respects, and stripes, which
//! exclude overlapping writes of other lanes.

use std::sync::Arc;

use super::request::Request;
use super::requests::Requests;
use crate::regions::Entered;
use crate::shared::Shared;
use crate::stripes::{Acquired, Owner};

pub(super) struct Locks {
    /// The ranges of this lane's writes with locks. Overlapping writes wait.
    writes: Vec<Span>,
    owner: Owner,
    shared: Arc<Shared>,
}

/// The blocks of a write in flight.
#[derive(Clone, Copy)]
struct Span {
    lba: u64,
    end: u64,
    index: u32,
}

/// The reason why a write cannot have its locks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Blocked {
    /// This region is not dirty yet: the control must write the log first.
    Log(u64),
    /// An overlapping write of this lane.
    Overlap,
    /// Another lane, or the resync, has locked a stripe.
    Stripe,
}

impl Locks {
    pub(super) fn with_capacity(capacity: usize, owner: Owner, shared: Arc<Shared>) -> Self {
        Self {
            writes: Vec::with_capacity(capacity),
            owner,
            shared,
        }
    }

    #[cfg(test)]
    pub(super) fn count(&self) -> usize {
        self.writes.len()
    }

    /// Enters the regions and locks the stripes of these blocks: all of them, or none.
    #[inline]
    pub(super) fn enter(&self, lba: u64, blocks: u64) -> Result<(), Blocked> {
        let regions = self.shared.regions_of(lba, blocks);
        for region in regions.clone() {
            let entered = self.shared.regions.enter(region);
            if entered != Entered::Inside {
                (regions.start..region).for_each(|inside| self.shared.regions.leave(inside));
                self.want_regions(region, regions.end, entered);
                return Err(Blocked::Log(region));
            }
        }
        let end = lba + blocks;
        let taken = self.shared.stripes.acquire(self.owner, lba, blocks);
        let overlaps =
            taken == Acquired::Again && self.writes.iter().any(|w| w.lba < end && lba < w.end);
        if taken == Acquired::No || overlaps {
            if overlaps {
                self.shared.stripes.release(lba, blocks);
            }
            regions.for_each(|inside| self.shared.regions.leave(inside));
            return Err(if overlaps {
                Blocked::Overlap
            } else {
                Blocked::Stripe
            });
        }
        Ok(())
    }

    /// Releases the locks of [`Locks::enter`].
    #[inline]
    pub(super) fn leave(&self, lba: u64, blocks: u64) {
        self.shared.stripes.release(lba, blocks);
        for region in self.shared.regions_of(lba, blocks) {
            self.shared.regions.leave(region);
        }
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

    /// Like [`Locks::enter`], for a request that has the locks until [`Locks::unlock`].
    #[inline]
    pub(super) fn lock(&mut self, request: &mut Request, index: usize) -> Result<(), Blocked> {
        self.enter(request.lba, u64::from(request.blocks))?;
        request.locked = Some(self.writes.len() as u32);
        self.writes.push(Span {
            lba: request.lba,
            end: request.end(),
            index: index as u32,
        });
        Ok(())
    }

    /// Releases the locks of [`Locks::lock`]. Returns false if the request has none.
    #[inline]
    pub(super) fn unlock(&mut self, requests: &mut Requests, index: usize) -> bool {
        let request = &mut requests[index];
        let Some(place) = request.locked.take() else {
            return false;
        };
        let (lba, blocks) = (request.lba, u64::from(request.blocks));
        self.writes.swap_remove(place as usize);
        if let Some(moved) = self.writes.get(place as usize) {
            requests[moved.index as usize].locked = Some(place);
        }
        self.leave(lba, blocks);
        true
    }
}
