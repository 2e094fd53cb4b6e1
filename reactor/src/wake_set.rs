//! The wake sources of a sleeping reactor: one epoll set with its bell and its pollers'
//! descriptors.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::buffer::spare_capacity;
use rustix::event::Timespec;
use rustix::event::epoll as rx;

use crate::bell::Bell;
use crate::poller::Poller;
use crate::stats::PollerId;

/// The error of watching a poller's wake descriptor.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot watch a descriptor of poller \"{poller}\": {source} \
     (EMFILE: raise the limit of open files; EPERM: it is a plain file; ENOSPC: raise \
     fs.epoll.max_user_watches)"
)]
pub struct WakeFdError {
    pub poller: String,
    pub source: std::io::Error,
}

const BELL: u64 = u64::MAX;
const POLLER: u64 = 0;
const EVENTS_PER_WAIT: usize = 16;

pub(crate) struct WakeSet {
    epoll: OwnedFd,
    bell: Arc<Bell>,
    events: Vec<rx::Event>,
    /// The watched descriptors of each poller. They are duplicates: the kernel registers a file
    /// under a number, and no other file gets the number of an open duplicate.
    watched: HashMap<PollerId, Vec<OwnedFd>>,
}

impl WakeSet {
    pub(crate) fn new(bell: Arc<Bell>) -> std::io::Result<Self> {
        let epoll = rx::create(rx::CreateFlags::CLOEXEC)?;
        rx::add(
            &epoll,
            &*bell,
            rx::EventData::new_u64(BELL),
            rx::EventFlags::IN,
        )?;
        let events = Vec::with_capacity(EVENTS_PER_WAIT);
        Ok(Self {
            epoll,
            bell,
            events,
            watched: HashMap::new(),
        })
    }

    /// Watches exactly the present descriptors of `poller`. On an error none of them is watched.
    pub(crate) fn watch(&mut self, id: PollerId, poller: &dyn Poller) -> Result<(), WakeFdError> {
        self.forget(id);
        let watched = poller.wake_fds().and_then(|fds| self.add(id, fds));
        watched.map_err(|source| {
            self.forget(id);
            WakeFdError {
                poller: poller.name().to_owned(),
                source,
            }
        })
    }

    fn add(&mut self, id: PollerId, fds: Vec<OwnedFd>) -> std::io::Result<()> {
        let watched = self.watched.entry(id).or_default();
        for fd in fds {
            let data = rx::EventData::new_u64(POLLER);
            rx::add(&self.epoll, &fd, data, rx::EventFlags::IN)?;
            watched.push(fd);
        }
        Ok(())
    }

    /// Stops watching the descriptors of poller `id`.
    pub(crate) fn forget(&mut self, id: PollerId) {
        for fd in self.watched.remove(&id).into_iter().flatten() {
            // Closing the duplicate is not enough: the poller has the file open as well.
            if let Err(error) = rx::delete(&self.epoll, &fd) {
                tracing::error!(%error, "cannot stop watching a poller's descriptor");
            }
        }
    }

    /// Blocks until a source is readable or the time is over.
    pub(crate) fn wait(&mut self, timeout: Option<Duration>) -> std::io::Result<()> {
        let timeout = timeout.and_then(|d| Timespec::try_from(d).ok());
        self.events.clear();
        match rx::wait(
            &self.epoll,
            spare_capacity(&mut self.events),
            timeout.as_ref(),
        ) {
            Ok(_) => {}
            // A signal: for the reactor a wake-up like any other.
            Err(rustix::io::Errno::INTR) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
        if self.events.iter().any(|event| event.data.u64() == BELL) {
            self.bell.clear();
        }
        Ok(())
    }
}
