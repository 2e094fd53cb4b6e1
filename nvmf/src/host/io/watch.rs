//! The descriptor that wakes a core for a queue's connection.

use std::os::fd::{AsRawFd, RawFd};

use nacre_reactor::EventSet;

/// Has one descriptor for every connection that the queue ever has.
pub(super) struct Watch {
    set: EventSet,
    connection: Option<RawFd>,
}

impl Watch {
    pub fn new() -> std::io::Result<Watch> {
        Ok(Watch {
            set: EventSet::new()?,
            connection: None,
        })
    }

    /// Watches a new connection. `None`: its transport has no descriptor.
    pub fn start(&mut self, connection: Option<RawFd>) {
        self.connection = connection;
        if let Some(fd) = connection
            && let Err(error) = self.set.add_raw(fd, 0)
        {
            tracing::error!(%error, "cannot watch a connection");
            self.connection = None;
        }
    }

    /// The connection ends.
    pub fn stop(&mut self) {
        if let Some(fd) = self.connection.take() {
            // The transport may have closed it already, which took it out of the set.
            let _ = self.set.delete_raw(fd);
        }
    }

    pub fn fd(&self) -> RawFd {
        self.set.as_raw_fd()
    }
}
