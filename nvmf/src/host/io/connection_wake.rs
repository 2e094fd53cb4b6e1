//! One descriptor that stays the same over all connections of a queue, to wake a sleeping core.

use std::os::fd::{AsFd, BorrowedFd};

use nacre_reactor::EventSet;

use crate::transport::HostTransport;

/// An epoll set with the descriptors of the current connection.
pub(super) struct Watch {
    set: EventSet,
}

impl Watch {
    pub(super) fn new() -> std::io::Result<Self> {
        Ok(Self {
            set: EventSet::new()?,
        })
    }

    /// Replaces the set by one of the queue's owner. Call it before the first connection.
    pub(super) fn join(&mut self, set: EventSet) {
        self.set = set;
    }

    /// Watches a new connection.
    pub(super) fn start(&self, connection: &mut dyn HostTransport) {
        if let Err(error) = connection.watch_in(&self.set) {
            tracing::error!(%error, "cannot watch a connection");
        }
    }

    /// Stops watching a connection.
    pub(super) fn stop(&self, connection: &mut dyn HostTransport) {
        connection.leave(&self.set);
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.set.as_fd()
    }
}
