//! Requests of lanes that the core has, and the I/O in flight that lanes do on its order.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use nacre_bdev_pool_core::ids::Token;

use crate::port::{LanePort, Shared, ToLane};

#[derive(Default)]
pub(super) struct Lanes {
    pub ports: HashMap<u32, Arc<LanePort>>,
    pub requests: HashMap<Token, LaneRequest>,
}

/// The I/O of a lane for its request, with the epoch of the order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LaneRequest {
    Waits,
    Writes {
        epoch: u64,
    },
    Reads {
        epoch: u64,
    },
    /// It reads an external device, whose data nothing frees or changes.
    ReadsExternal,
}

#[derive(Default)]
pub(super) struct Grace {
    /// The core's number of the period in progress, and the epoch that must end.
    pub awaited: Option<(u64, u64)>,
    /// I/O that lanes and fills do by the core's order, by epoch modulo 3.
    pub ordered: [u64; 3],
}

impl Grace {
    pub(super) fn begin(&mut self, epoch: u64) {
        self.ordered[(epoch % 3) as usize] += 1;
    }

    pub(super) fn end(&mut self, epoch: u64) {
        self.ordered[(epoch % 3) as usize] -= 1;
    }
}

impl LaneRequest {
    fn epoch(self) -> Option<u64> {
        match self {
            Self::Writes { epoch } | Self::Reads { epoch } => Some(epoch),
            Self::Waits | Self::ReadsExternal => None,
        }
    }
}

impl Lanes {
    /// The data of a request is written. Returns false if that was not awaited.
    pub(super) fn end_write(&mut self, token: Token, grace: &mut Grace) -> bool {
        let is_write = |state| matches!(state, LaneRequest::Writes { .. });
        self.end(token, grace, is_write)
    }

    /// The sources of a request are read. Returns false if that was not awaited.
    pub(super) fn end_read(&mut self, token: Token, grace: &mut Grace) -> bool {
        let reads = |state| {
            let held = matches!(state, LaneRequest::Reads { .. });
            held || state == LaneRequest::ReadsExternal
        };
        self.end(token, grace, reads)
    }

    fn end(
        &mut self,
        token: Token,
        grace: &mut Grace,
        is_it: impl Fn(LaneRequest) -> bool,
    ) -> bool {
        let Some(state) = self.requests.get_mut(&token).filter(|state| is_it(**state)) else {
            return false;
        };
        let before = std::mem::replace(state, LaneRequest::Waits);
        before
            .epoch()
            .into_iter()
            .for_each(|epoch| grace.end(epoch));
        true
    }

    /// A request is answered. A pool that is held answers while the lane still writes.
    pub(super) fn remove(&mut self, token: Token, grace: &mut Grace) {
        let state = self.requests.remove(&token);
        let epoch = state.and_then(LaneRequest::epoch);
        epoch.into_iter().for_each(|epoch| grace.end(epoch));
    }

    pub(super) fn requests_of(&self, lane: u32) -> Vec<Token> {
        let requests = self.requests.keys().copied();
        requests
            .filter(|token| token >> 32 == u64::from(lane))
            .collect()
    }

    /// Sends a message. Returns false if the lane is gone.
    pub(super) fn send(&mut self, shared: &Shared, lane: u32, message: ToLane) -> bool {
        self.port(shared, lane)
            .is_some_and(|port| port.inbox.send([message]))
    }

    fn port(&mut self, shared: &Shared, lane: u32) -> Option<&mut Arc<LanePort>> {
        match self.ports.entry(lane) {
            Entry::Occupied(known) => Some(known.into_mut()),
            Entry::Vacant(vacant) => {
                let lanes = shared.lanes.lock();
                let port = lanes.iter().find(|port| port.id == lane)?;
                Some(vacant.insert(Arc::clone(port)))
            }
        }
    }
}
