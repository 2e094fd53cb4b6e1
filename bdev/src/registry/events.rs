//! Events of devices, sent to subscribers.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::{Mutex, MutexGuard};

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    Registered {
        name: String,
    },
    Resized {
        name: String,
        blocks: u64,
    },
    /// The device has fewer blocks than announced: the data beyond is lost.
    Cut {
        name: String,
    },
    /// Its queues answer `Gone` from now on: close them.
    Removing {
        name: String,
    },
    /// Its last queue is closed and the name is free.
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
    pub fn send(&self, event: &Event) {
        // Called outside the lock: a subscriber may subscribe others, or leave.
        let calls: Vec<Call> = self
            .subscribers
            .lock()
            .iter()
            .map(|(_, call)| Arc::clone(call))
            .collect();
        calls.iter().for_each(|call| call(event));
    }

    pub fn on_event(&self, call: Call) -> Subscription {
        let id = self.subscribers.next.fetch_add(1, Ordering::Relaxed);
        self.subscribers.lock().push((id, call));
        Subscription {
            id,
            subscribers: Arc::downgrade(&self.subscribers),
        }
    }

    pub fn subscribe(&self, capacity: usize) -> Events {
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

impl Subscribers {
    fn lock(&self) -> MutexGuard<'_, Vec<(u64, Call)>> {
        self.calls.lock()
    }
}

/// Ends the calls when dropped.
#[must_use = "dropping it ends the subscription"]
pub struct Subscription {
    id: u64,
    subscribers: Weak<Subscribers>,
}

impl Drop for Subscription {
    fn drop(&mut self) {
        if let Some(subscribers) = self.subscribers.upgrade() {
            subscribers.lock().retain(|(id, _)| *id != self.id);
        }
    }
}

/// Events that wait to be taken. When too many wait, the oldest go, and are counted.
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
    pub fn take(&self) -> Option<Event> {
        self.list.lock().pop_front()
    }

    /// How many went unseen since the last call: if any, look at [`super::Registry::list`] instead.
    pub fn missed(&self) -> u64 {
        self.list.missed.swap(0, Ordering::Relaxed)
    }
}

impl List {
    fn push(&self, event: &Event) {
        let mut events = self.lock();
        if events.len() >= self.capacity {
            events.pop_front();
            self.missed.fetch_add(1, Ordering::Relaxed);
        }
        if self.capacity > 0 {
            events.push_back(event.clone());
        }
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Event>> {
        self.events.lock()
    }
}
