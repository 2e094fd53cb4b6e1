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

/// A poller's answer when its reactor wants to sleep.
///
/// Any answer but `Busy` is a promise about work that arrives from now on. The work makes one of
/// the poller's registered file descriptors readable, or wakes the reactor's mailbox, or can wait
/// until the time in `Until`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Idle {
    /// The poller has work, or its work cannot wake the reactor: poll again instead of sleeping.
    Busy,
    /// The poller has no work until a registered source wakes the reactor.
    Quiet,
    /// Like `Quiet`, but the reactor must poll at this time at the latest.
    Until(Nanos),
}

impl Idle {
    /// Combines two answers: the one with the shorter sleep.
    pub fn and(self, other: Idle) -> Idle {
        match (self, other) {
            (Idle::Busy, _) | (_, Idle::Busy) => Idle::Busy,
            (Idle::Until(a), Idle::Until(b)) => Idle::Until(a.min(b)),
            (Idle::Until(t), Idle::Quiet) | (Idle::Quiet, Idle::Until(t)) => Idle::Until(t),
            (Idle::Quiet, Idle::Quiet) => Idle::Quiet,
        }
    }
}

/// Work that a reactor does turn after turn.
pub trait Poller {
    /// A short name for statistics and for the watchdog.
    fn name(&self) -> &str;

    /// Does at most about `budget` items of work and returns their number. Never blocks.
    fn poll(&mut self, now: Nanos, budget: u32) -> Work;

    /// Arms every wake source, because the reactor wants to sleep. The reactor polls once more
    /// after arming all its pollers, and sleeps only if no poller finds work. So no wake-up is
    /// lost.
    fn arm(&mut self, now: Nanos) -> Idle;

    /// Disarms the wake sources: the reactor is awake and polls again.
    fn disarm(&mut self) {}

    /// Duplicates of the file descriptors that are readable when this poller has work, usually one
    /// (of an epoll or an eventfd). The reactor calls this when the poller is added, and again on
    /// the poller's request. It closes the duplicates when it stops watching them.
    fn wake_fds(&self) -> std::io::Result<Vec<OwnedFd>> {
        Ok(Vec::new())
    }
}
