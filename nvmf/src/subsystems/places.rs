//! The number of queues that hosts may have connected, over all transports.
//!
//! The transports bound connections before their Connect. A queue takes its place with its Connect,
//! so that a host beyond the limit learns of it from the status.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Any host may use the discovery service: of all connections it has at most one in so many.
const DISCOVERY_PART: usize = 4;

pub(crate) struct Places {
    max: usize,
    open: AtomicUsize,
    discoveries: AtomicUsize,
}

/// The place of one queue; dropping it makes room.
pub(crate) struct Place {
    places: Arc<Places>,
    discovery: bool,
}

/// Why a queue cannot be connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NoPlace {
    #[error("{max} queues are connected, as many as [nvmf] max_connections allows")]
    All { max: usize },
    #[error(
        "{most} discovery controllers are connected, as many as a quarter of [nvmf] max_connections allows"
    )]
    Discovery { most: usize },
}

impl Places {
    pub fn new(max: usize) -> Arc<Places> {
        Arc::new(Places {
            max,
            open: AtomicUsize::new(0),
            discoveries: AtomicUsize::new(0),
        })
    }

    pub fn open(&self) -> usize {
        self.open.load(Ordering::Acquire)
    }

    pub fn take(self: &Arc<Places>, discovery: bool) -> Result<Place, NoPlace> {
        let taken = |count: &AtomicUsize, max: usize| {
            let more = |open: usize| (open < max).then_some(open + 1);
            let update = count.fetch_update(Ordering::AcqRel, Ordering::Relaxed, more);
            update.is_ok()
        };
        let most = self.max.div_ceil(DISCOVERY_PART);
        if discovery && !taken(&self.discoveries, most) {
            return Err(NoPlace::Discovery { most });
        }
        if !taken(&self.open, self.max) {
            if discovery {
                self.discoveries.fetch_sub(1, Ordering::AcqRel);
            }
            return Err(NoPlace::All { max: self.max });
        }
        let places = Arc::clone(self);
        Ok(Place { places, discovery })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.places.open.fetch_sub(1, Ordering::AcqRel);
        if self.discovery {
            self.places.discoveries.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: hosts that may only discover leave room for those that may connect.
    #[test]
    fn discovery_has_a_part_of_the_connections() {
        let places = Places::new(8);
        let discoveries: Vec<Place> = (0..2).filter_map(|_| places.take(true).ok()).collect();
        assert_eq!(discoveries.len(), 2);
        assert_eq!(
            places.take(true).err(),
            Some(NoPlace::Discovery { most: 2 })
        );
        let hosts: Vec<Place> = (0..6).filter_map(|_| places.take(false).ok()).collect();
        assert_eq!(hosts.len(), 6);
        let refused = places.take(false).err();
        assert_eq!(refused, Some(NoPlace::All { max: 8 }));
        drop(discoveries);
        assert_eq!(places.open(), 6);
        drop(hosts);
        assert_eq!(
            (places.open(), places.discoveries.load(Ordering::Acquire)),
            (0, 0)
        );
    }
}
