//! Limits the number of connected queues, over all transports together.
//!
//! Transports limit the connections that have not sent Connect. A queue counts from its Connect on,
//! so a host beyond the limit gets a status code of the specification.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

/// The discovery service may use this fraction (one in N) of all places, because any host may
/// connect to it.
const DISCOVERY_PART: usize = 4;
/// Queues that are not authenticated yet may use this fraction (one in N) of all places, and one
/// origin this fraction of those, because any peer may claim the NQN of a host.
const UNPROVEN_PART: usize = 4;

pub(crate) struct Places {
    max: usize,
    open: AtomicUsize,
    discoveries: AtomicUsize,
    unproven: Mutex<Unproven>,
}

/// The places of queues that must be authenticated and are not yet.
#[derive(Default)]
struct Unproven {
    all: usize,
    by_origin: BTreeMap<String, usize>,
}

/// The place of one unauthenticated queue. Dropping it frees the place.
pub(crate) struct UnprovenPlace {
    places: Arc<Places>,
    origin: String,
}

/// The place of one queue. Dropping it frees the place.
pub(crate) struct Place {
    places: Arc<Places>,
    discovery: bool,
}

/// The limit that refuses a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NoPlace {
    #[error("{max} queues are connected, as many as [nvmf] max_connections allows")]
    All { max: usize },
    #[error(
        "{most} discovery controllers are connected, as many as a quarter of [nvmf] max_connections allows"
    )]
    Discovery { most: usize },
    #[error(
        "{most} queues wait for the authentication of their hosts, as many as a quarter of [nvmf] max_connections allows"
    )]
    Unproven { most: usize },
    #[error(
        "{most} queues from this address wait for the authentication of their hosts, as many as a sixteenth of [nvmf] max_connections allows"
    )]
    UnprovenOfAddress { most: usize },
}

impl Places {
    pub(crate) fn new(max: usize) -> Arc<Self> {
        Arc::new(Self {
            max,
            open: AtomicUsize::new(0),
            discoveries: AtomicUsize::new(0),
            unproven: Mutex::default(),
        })
    }

    pub(crate) fn open(&self) -> usize {
        self.open.load(Ordering::Acquire)
    }

    /// Number of queues that must be authenticated and are not yet.
    pub(crate) fn unproven(&self) -> usize {
        self.unproven.lock().all
    }

    pub(crate) fn take(self: &Arc<Self>, discovery: bool) -> Result<Place, NoPlace> {
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

    /// Takes a place for an unauthenticated queue. `origin`: the address to which the limit
    /// applies.
    pub(crate) fn take_unproven(
        self: &Arc<Self>,
        origin: String,
    ) -> Result<UnprovenPlace, NoPlace> {
        let most = self.max.div_ceil(UNPROVEN_PART);
        let most_of_address = most.div_ceil(UNPROVEN_PART);
        let mut unproven = self.unproven.lock();
        if unproven.all >= most {
            return Err(NoPlace::Unproven { most });
        }
        let of_address = unproven.by_origin.entry(origin.clone()).or_default();
        if *of_address >= most_of_address {
            let most = most_of_address;
            return Err(NoPlace::UnprovenOfAddress { most });
        }
        *of_address += 1;
        unproven.all += 1;
        let places = Arc::clone(self);
        Ok(UnprovenPlace { places, origin })
    }
}

impl Drop for UnprovenPlace {
    fn drop(&mut self) {
        let mut unproven = self.places.unproven.lock();
        unproven.all -= 1;
        if let Some(count) = unproven.by_origin.get_mut(&self.origin) {
            *count -= 1;
            if *count == 0 {
                unproven.by_origin.remove(&self.origin);
            }
        }
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

    /// Goal: hosts that claim a name leave room for those that prove it, and one address leaves
    /// room for others.
    #[test]
    fn unproven_hosts_have_a_part_of_the_connections() {
        let places = Places::new(32);
        let take = |address: &str| places.take_unproven(address.to_owned());
        let mut taken: Vec<UnprovenPlace> = Vec::new();
        for address in ["a", "b", "c", "d"] {
            taken.extend((0..2).filter_map(|_| take(address).ok()));
            if address != "d" {
                let refused = take(address).err();
                assert_eq!(refused, Some(NoPlace::UnprovenOfAddress { most: 2 }));
            }
        }
        assert_eq!(taken.len(), 8);
        assert_eq!(take("e").err(), Some(NoPlace::Unproven { most: 8 }));
        taken.remove(0);
        taken.push(take("e").unwrap());
        drop(taken);
        let unproven = places.unproven.lock();
        assert_eq!((unproven.all, unproven.by_origin.len()), (0, 0));
    }
}
