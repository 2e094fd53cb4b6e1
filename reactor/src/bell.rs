//! Wakes a sleeping reactor: the doorbell's flag in memory, and the eventfd that ends the sleep.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::event::{EventfdFlags, eventfd};

use crate::doorbell::Doorbell;

pub(crate) struct Bell {
    doorbell: Doorbell,
    eventfd: OwnedFd,
}

impl Bell {
    pub(crate) fn new() -> std::io::Result<Self> {
        let eventfd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self {
            doorbell: Doorbell::new(),
            eventfd,
        })
    }

    /// Wakes the reactor. Costs a fence and a relaxed load while the reactor is awake, and one
    /// write to the eventfd if it sleeps.
    pub(crate) fn ring(&self) {
        self.doorbell.ring(|| {
            // The write can only fail when the counter is at its maximum. The descriptor is
            // readable then.
            let _ = rustix::io::write(&self.eventfd, &1u64.to_ne_bytes());
        });
    }

    pub(crate) fn doorbell(&self) -> &Doorbell {
        &self.doorbell
    }

    /// Resets the eventfd after a wake-up.
    pub(crate) fn clear(&self) {
        let _ = rustix::io::read(&self.eventfd, &mut [0u8; 8]);
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.eventfd.as_fd()
    }
}

/// Wakes a reactor from any thread, so that it calls its pollers again.
///
/// Write the data for the pollers first, then wake. Waking an awake reactor makes no system call,
/// and many wakes of a sleeping reactor make one.
#[derive(Clone)]
pub struct ReactorWaker(pub(crate) Arc<Bell>);

impl ReactorWaker {
    pub fn wake(&self) {
        self.0.ring();
    }
}

impl std::task::Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.ring();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.ring();
    }
}

impl From<ReactorWaker> for std::task::Waker {
    fn from(waker: ReactorWaker) -> Self {
        waker.0.into()
    }
}

impl std::fmt::Debug for ReactorWaker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ReactorWaker")
    }
}
