//! What runs on a reactor: a poller does a bounded piece of work per turn and can be put to sleep.

use std::os::fd::RawFd;

use crate::Nanos;

/// What one call of [`Poller::poll`] found to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// Nothing was there.
    None,
    /// This many items (completions, PDUs, messages) were handled.
    Did(u32),
}

/// A poller's answer when its reactor wants to sleep.
///
/// Any answer but `Busy` is a promise. Whatever arrives from now on either makes one of the
/// poller's registered file descriptors readable, wakes the reactor's mailbox, or is not needed
/// before `until`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Idle {
    /// Work is waiting, or cannot announce itself: poll again instead of sleeping.
    Busy,
    /// Nothing until a registered source wakes the reactor.
    Quiet,
    /// As `Quiet`, but to be polled at this moment at the latest.
    Until(Nanos),
}

impl Idle {
    /// The more restless of two answers.
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

    /// Does at most about `budget` items of work and says how many it did. Never blocks.
    fn poll(&mut self, now: Nanos, budget: u32) -> Work;

    /// The reactor would like to sleep: arm every wake source. The reactor polls once more after
    /// arming all its pollers, and sleeps only if that found nothing (no lost wake-up).
    fn arm(&mut self, now: Nanos) -> Idle;

    /// The reactor is awake and polling again.
    fn disarm(&mut self) {}

    /// File descriptors whose readability means work for this poller. Asked when the poller is
    /// added and whenever it calls for it; usually one descriptor (an epoll or an eventfd).
    fn wake_fds(&self) -> Vec<RawFd> {
        Vec::new()
    }
}
