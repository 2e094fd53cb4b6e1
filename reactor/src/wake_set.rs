//! The wake sources of a sleeping reactor: one epoll that holds its bell and its pollers'
//! descriptors.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::buffer::spare_capacity;
use rustix::event::Timespec;
use rustix::event::epoll as rx;

use crate::bell::Bell;
use crate::stats::PollerId;

/// A poller's wake descriptor could not be watched.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot watch descriptor {fd} of poller \"{poller}\": {source} \
     (EBADF: it is closed; EPERM: it is a plain file; ENOSPC: raise fs.epoll.max_user_watches)"
)]
pub struct WakeFdError {
    pub poller: String,
    pub fd: RawFd,
    pub source: std::io::Error,
}

const BELL: u64 = u64::MAX;
const EVENTS_PER_WAIT: usize = 16;

pub(crate) struct WakeSet {
    epoll: OwnedFd,
    bell: Arc<Bell>,
    events: Vec<rx::Event>,
    /// The pollers that registered each descriptor. The kernel forgets a descriptor when it is
    /// closed, and another file may have its number by then, so a number alone must never remove a
    /// registration.
    owners: HashMap<RawFd, Vec<PollerId>>,
}

impl WakeSet {
    pub(crate) fn new(bell: Arc<Bell>) -> std::io::Result<WakeSet> {
        let epoll = rx::create(rx::CreateFlags::CLOEXEC)?;
        rx::add(
            &epoll,
            &*bell,
            rx::EventData::new_u64(BELL),
            rx::EventFlags::IN,
        )?;
        let events = Vec::with_capacity(EVENTS_PER_WAIT);
        Ok(WakeSet {
            epoll,
            bell,
            events,
            owners: HashMap::new(),
        })
    }

    /// Watches exactly `fds` for poller `id`. On an error nothing of `id` is watched.
    pub(crate) fn watch(
        &mut self,
        id: PollerId,
        poller: &str,
        fds: &[RawFd],
    ) -> Result<(), WakeFdError> {
        self.forget(id);
        for &fd in fds {
            if let Err(source) = self.add(id, fd) {
                self.forget(id);
                return Err(WakeFdError {
                    poller: poller.to_owned(),
                    fd,
                    source,
                });
            }
        }
        Ok(())
    }

    /// Stops watching what only poller `id` asked for.
    pub(crate) fn forget(&mut self, id: PollerId) {
        let epoll = self.epoll.as_raw_fd();
        self.owners.retain(|&fd, owners| {
            owners.retain(|owner| *owner != id);
            if owners.is_empty() {
                // A descriptor that was closed meanwhile is gone already.
                let _ = ctl(epoll, epoll::ControlOptions::EPOLL_CTL_DEL, fd);
            }
            !owners.is_empty()
        });
    }

    fn add(&mut self, id: PollerId, fd: RawFd) -> std::io::Result<()> {
        let owners = self.owners.entry(fd).or_default();
        match ctl(
            self.epoll.as_raw_fd(),
            epoll::ControlOptions::EPOLL_CTL_ADD,
            fd,
        ) {
            // Newly watched: any other poller that claims this number registered a file that is now
            // closed.
            Ok(()) => owners.clear(),
            Err(error) if error.raw_os_error() == Some(EEXIST) => {}
            Err(error) => {
                if owners.is_empty() {
                    self.owners.remove(&fd);
                }
                return Err(error);
            }
        }
        if !owners.contains(&id) {
            owners.push(id);
        }
        Ok(())
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

const EEXIST: i32 = rustix::io::Errno::EXIST.raw_os_error();

/// Pollers name their descriptors by number, since some belong to queues several layers down.
/// rustix wants a borrowed descriptor, which safe code cannot make from a number; a stale number
/// here is an EBADF, never a memory fault.
pub(crate) fn ctl(epoll: RawFd, op: epoll::ControlOptions, fd: RawFd) -> std::io::Result<()> {
    epoll::ctl(
        epoll,
        op,
        fd,
        epoll::Event::new(epoll::Events::EPOLLIN, fd as u64),
    )
}
