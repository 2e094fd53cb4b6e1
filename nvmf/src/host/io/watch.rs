//! One descriptor that stays the same over all connections of a queue, to wake a sleeping core.

use std::os::fd::{AsFd, BorrowedFd};

use nacre_reactor::{EventSet, Interest};

/// An epoll set with the descriptor of the current connection.
pub(super) struct Watch {
    set: EventSet,
    /// The connection's descriptor is in `set`.
    is_watching: bool,
}

impl Watch {
    pub(super) fn new() -> std::io::Result<Self> {
        Ok(Self {
            set: EventSet::new()?,
            is_watching: false,
        })
    }

    /// Uses a set of the queue's owner from the next connection on.
    pub(super) fn join(&mut self, set: EventSet) {
        self.set = set;
    }

    /// Watches a new connection. `None`: its transport has no descriptor.
    pub(super) fn start(&mut self, connection: Option<BorrowedFd<'_>>) {
        self.is_watching = false;
        let Some(fd) = connection else { return };
        match self.set.add(fd, 0, Interest::READ) {
            Ok(()) => self.is_watching = true,
            Err(error) => tracing::error!(%error, "cannot watch a connection"),
        }
    }

    /// The connection ends.
    pub(super) fn stop(&mut self, connection: Option<BorrowedFd<'_>>) {
        if std::mem::take(&mut self.is_watching)
            && let Some(fd) = connection
        {
            // The transport may have closed the first one already, which took it out of the set.
            let _ = self.set.delete(fd);
        }
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.set.as_fd()
    }
}
