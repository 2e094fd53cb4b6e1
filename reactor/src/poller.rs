//! The pollers of a reactor. A poller does a bounded amount of work per turn and lets its reactor
//! sleep when it has none.

use std::os::fd::OwnedFd;

use crate::Nanos;

/// The work that one call of [`Poller::poll`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// The poller had no work.
    None,
    /// The poller handled this many items (completions, PDUs, messages).
    Did(u32),
}

/// The result of [`Poller::arm`]: whether the reactor may sleep.
///
/// Any value but `Busy` guarantees that work that arrives from now on makes one of the poller's
/// file descriptors readable, wakes the reactor's mailbox, or can wait until the time in `Until`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Idle {
    /// The poller has work, or its work cannot wake the reactor. The reactor must not sleep.
    Busy,
    /// The poller has no work until a registered source wakes the reactor.
    Quiet,
    /// Like `Quiet`, but the reactor must poll at this time at the latest.
    Until(Nanos),
}

impl Idle {
    /// Combines two results: the one with the shorter sleep.
    pub fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::Busy, _) | (_, Self::Busy) => Self::Busy,
            (Self::Until(a), Self::Until(b)) => Self::Until(a.min(b)),
            (Self::Until(t), Self::Quiet) | (Self::Quiet, Self::Until(t)) => Self::Until(t),
            (Self::Quiet, Self::Quiet) => Self::Quiet,
        }
    }
}

/// Code that a reactor calls in every turn, for example the queues of a transport.
pub trait Poller {
    /// A short name for statistics and for the watchdog.
    fn name(&self) -> &str;

    /// Does at most about `budget` items of work and returns their number. Never blocks.
    fn poll(&mut self, now: Nanos, budget: u32) -> Work;

    /// Arms the wake sources before a sleep. After arming all pollers, the reactor polls once more,
    /// and sleeps only if no poller finds work. So no wake-up is lost.
    fn arm(&mut self, now: Nanos) -> Idle;

    /// Disarms the wake sources after a sleep, or if the reactor does not sleep after all.
    fn disarm(&mut self) {}

    /// Duplicates of the file descriptors that are readable when this poller has work, usually one
    /// (of an epoll or an eventfd). The reactor calls this when the poller is added, and again on
    /// the poller's request. It closes the duplicates when it stops watching them.
    fn wake_fds(&self) -> std::io::Result<Vec<OwnedFd>> {
        Ok(Vec::new())
    }
}
