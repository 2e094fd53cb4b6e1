//! Events of registered devices, and their subscribers: callbacks, or bounded lists.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

/// A change of a registered device; `name` is the device's name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    Registered {
        name: String,
    },
    /// The announced size changed to `blocks`.
    Resized {
        name: String,
        blocks: u64,
    },
    /// The device has fewer blocks than announced: the data beyond its end is lost.
    Cut {
        name: String,
    },
    /// The removal starts: queues complete I/O with `Gone`, and users must close them.
    Removing {
        name: String,
    },
    /// The removal is complete: the last queue is closed, and the name is free.
    Unregistered {
        name: String,
    },
}

type Call = Arc<dyn Fn(&Event) + Send + Sync>;

#[derive(Default)]
pub(super) struct Bus {
    subscribers: Arc<Subscribers>,
}

#[derive(Default)]
struct Subscribers {
    next: AtomicU64,
    calls: Mutex<Vec<(u64, Call)>>,
}

impl Bus {
    pub(super) fn send(&self, event: &Event) {
        // Call them without the lock: a subscriber may add or end subscriptions.
        let calls: Vec<Call> = self
            .subscribers
            .calls
            .lock()
            .iter()
            .map(|(_, call)| Arc::clone(call))
            .collect();
        calls.iter().for_each(|call| call(event));
    }

    pub(super) fn on_event(&self, call: Call) -> Subscription {
        let id = self.subscribers.next.fetch_add(1, Ordering::Relaxed);
        self.subscribers.calls.lock().push((id, call));
        Subscription {
            id,
            subscribers: Arc::downgrade(&self.subscribers),
        }
    }

    pub(super) fn subscribe(&self, capacity: usize) -> Events {
        let list = Arc::new(List {
            capacity,
            events: Mutex::default(),
            missed: AtomicU64::new(0),
        });
        let into = Arc::clone(&list);
        let subscription = self.on_event(Arc::new(move |event| into.push(event)));
        Events {
            list,
            _subscription: subscription,
        }
    }
}

/// A subscription with a callback. Dropping it ends the calls.
#[must_use = "dropping it ends the subscription"]
pub struct Subscription {
    id: u64,
    subscribers: Weak<Subscribers>,
}

impl Drop for Subscription {
    fn drop(&mut self) {
        if let Some(subscribers) = self.subscribers.upgrade() {
            subscribers.calls.lock().retain(|(id, _)| *id != self.id);
        }
    }
}

/// A subscription with a bounded list of events. A full list drops its oldest event and counts it.
pub struct Events {
    list: Arc<List>,
    _subscription: Subscription,
}

struct List {
    capacity: usize,
    events: Mutex<VecDeque<Event>>,
    missed: AtomicU64,
}

impl Events {
    /// Removes and returns the oldest event.
    pub fn take(&self) -> Option<Event> {
        self.list.events.lock().pop_front()
    }

    /// Number of dropped events since the last call. If it is not zero, read
    /// [`super::Registry::list`] for the present state.
    pub fn missed(&self) -> u64 {
        self.list.missed.swap(0, Ordering::Relaxed)
    }
}

impl List {
    fn push(&self, event: &Event) {
        let mut events = self.events.lock();
        if events.len() >= self.capacity {
            events.pop_front();
            self.missed.fetch_add(1, Ordering::Relaxed);
        }
        if self.capacity > 0 {
            events.push_back(event.clone());
        }
    }
}
