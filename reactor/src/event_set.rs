//! An epoll set: watches the many descriptors of one poller. Its own descriptor is the poller's
//! wake descriptor.
//!
//! ```text
//! fn poll(&mut self, ..) -> Work {
//!     self.set.wait(&mut self.events, Duration::ZERO)?;
//!     for event in self.events.iter() { self.connections[event.token]... }
//! }
//! fn wake_fds(&self) -> io::Result<Vec<OwnedFd>> { Ok(vec![self.set.wake_fd()?]) }
//! ```

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::buffer::spare_capacity;
use rustix::event::Timespec;
use rustix::event::epoll as rx;

bitflags::bitflags! {
    /// The events to report for a descriptor. Errors and hang-ups are always reported.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct Interest: u8 {
        const READ = 1;
        const WRITE = 2;
        /// Report a change once, not as long as it lasts (EPOLLET).
        const EDGE = 4;
    }
}

/// A set of watched descriptors, each under a token of the owner's choice.
#[derive(Debug)]
pub struct EventSet {
    epoll: OwnedFd,
}

impl EventSet {
    pub fn new() -> std::io::Result<Self> {
        Ok(Self {
            epoll: rx::create(rx::CreateFlags::CLOEXEC)?,
        })
    }

    /// Another handle to the same set.
    pub fn share(&self) -> std::io::Result<Self> {
        Ok(Self {
            epoll: self.epoll.try_clone()?,
        })
    }

    /// Watches a descriptor until [`EventSet::delete`], or until its last duplicate is closed.
    ///
    /// Linux refuses sets in sets that are more than five deep, the reactor's own included (ELOOP).
    pub fn add(&self, fd: impl AsFd, token: u64, interest: Interest) -> std::io::Result<()> {
        Ok(rx::add(
            &self.epoll,
            fd,
            rx::EventData::new_u64(token),
            flags(interest),
        )?)
    }

    pub fn modify(&self, fd: impl AsFd, token: u64, interest: Interest) -> std::io::Result<()> {
        Ok(rx::modify(
            &self.epoll,
            fd,
            rx::EventData::new_u64(token),
            flags(interest),
        )?)
    }

    pub fn delete(&self, fd: impl AsFd) -> std::io::Result<()> {
        Ok(rx::delete(&self.epoll, fd)?)
    }

    /// A duplicate of the set's own descriptor, which is readable while any of its descriptors is
    /// ready: for [`crate::Poller::wake_fds`].
    pub fn wake_fd(&self) -> std::io::Result<OwnedFd> {
        self.epoll.try_clone()
    }

    /// Replaces the contents of `events` with the descriptors that are ready, at most its capacity.
    /// Waits up to `timeout`, which must be zero on a reactor; a signal ends the wait early.
    /// Returns the number of events.
    pub fn wait(&self, events: &mut Events, timeout: Duration) -> std::io::Result<usize> {
        let timeout = Timespec::try_from(timeout).ok();
        events.list.clear();
        match rx::wait(
            &self.epoll,
            spare_capacity(&mut events.list),
            timeout.as_ref(),
        ) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(events.list.len()),
            Err(error) => Err(error.into()),
        }
    }
}

impl AsFd for EventSet {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

/// A buffer for the events of [`EventSet::wait`], allocated once and reused every turn.
pub struct Events {
    list: Vec<rx::Event>,
}

impl Events {
    /// # Panics
    /// When `capacity` is zero, which epoll does not allow.
    pub fn with_capacity(capacity: usize) -> Self {
        assert!(capacity > 0, "room for no event");
        Self {
            list: Vec::with_capacity(capacity),
        }
    }

    pub fn len(&self) -> usize {
        self.list.len()
    }

    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    pub fn iter(&self) -> impl Iterator<Item = Event> + '_ {
        (0..self.list.len()).map(|at| self.at(at))
    }

    /// Returns an event by index, for an owner that must borrow itself mutably between two
    /// events.
    ///
    /// # Panics
    /// When `at` is not below [`Events::len`].
    pub fn at(&self, at: usize) -> Event {
        let rx::Event { flags, data } = self.list[at];
        let is = |any| flags.intersects(any);
        Event {
            token: data.u64(),
            readable: is(rx::EventFlags::IN | rx::EventFlags::RDHUP),
            writable: is(rx::EventFlags::OUT),
            peer_closed: is(rx::EventFlags::RDHUP | rx::EventFlags::HUP),
            failed: is(rx::EventFlags::ERR),
        }
    }
}

/// The state of one watched descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event {
    pub token: u64,
    pub readable: bool,
    pub writable: bool,
    /// The peer has closed its side. Earlier data may still be readable.
    pub peer_closed: bool,
    /// The descriptor has an error (`SO_ERROR`).
    pub failed: bool,
}

fn flags(interest: Interest) -> rx::EventFlags {
    let mut flags = rx::EventFlags::RDHUP;
    flags.set(rx::EventFlags::IN, interest.contains(Interest::READ));
    flags.set(rx::EventFlags::OUT, interest.contains(Interest::WRITE));
    flags.set(rx::EventFlags::ET, interest.contains(Interest::EDGE));
    flags
}
