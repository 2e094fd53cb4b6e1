//! The scheduled events of a simulation run, ordered by time.

use std::collections::BTreeMap;

use nacre_reactor::Nanos;
use uuid::Uuid;

/// A scheduled event.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Event {
    /// The disk's error rates become 0.
    Calm(usize),
    Reappear(usize),
    /// The holder can reach the disk again.
    Reconnect(usize, u64),
    /// The holder with that number stops.
    Crash(u64),
    /// A holder that could not open the volume tries again.
    TryAgain(u64),
    Start(Uuid),
    /// A stopped holder goes on.
    GoOn(u64),
    /// Another holder takes the volume, once the lease of this one is over.
    Take(u64),
    /// The holder closes the volume.
    Close(u64),
    /// The node of the disk has a lease from now on, or has none.
    NodeLease(usize, bool),
    /// The operator allows I/O again.
    Thaw(u64),
    /// The holder releases the writes that it holds.
    Release(u64),
    /// Buffers and descriptors are available again.
    Plenty,
    /// A truncated disk gets its size back.
    Enlarge(usize),
    /// A write, by its number and its blocks, is no longer in flight: its queue was closed.
    Over(u64, u64, u64),
}

/// Events by their time, in the order in which they were scheduled.
#[derive(Default)]
pub(crate) struct Agenda {
    events: BTreeMap<(Nanos, u64), Event>,
    scheduled: u64,
}

impl Agenda {
    pub(crate) fn schedule(&mut self, at: Nanos, event: Event) {
        self.scheduled += 1;
        self.events.insert((at, self.scheduled), event);
    }

    /// Takes an event that is due.
    pub(crate) fn take_due(&mut self, now: Nanos) -> Option<Event> {
        let first = self.events.first_entry()?;
        (first.key().0 <= now).then(|| first.remove())
    }

    pub(crate) fn next_due(&self) -> Option<Nanos> {
        self.events.first_key_value().map(|((at, _), _)| *at)
    }

    pub(crate) fn retain(&mut self, stays: impl Fn(&Event) -> bool) {
        self.events.retain(|_, event| stays(event));
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.events.is_empty()
    }
}
