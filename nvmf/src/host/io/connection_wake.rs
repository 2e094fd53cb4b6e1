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

    /// Uses a set of the queue's owner from the next connection on.
    pub(super) fn join(&mut self, set: EventSet) {
        self.set = set;
    }

    /// Watches a new connection.
    pub(super) fn start(&self, connection: &mut dyn HostTransport) {
        if let Err(error) = connection.watch_in(&self.set) {
            tracing::error!(%error, "cannot watch a connection");
        }
    }

    /// The connection ends.
    pub(super) fn stop(&self, connection: &mut dyn HostTransport) {
        connection.leave(&self.set);
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.set.as_fd()
    }
}
