//! A queue of events for a receiver that may take long to send a message.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;

use tokio::sync::Notify;

use super::{EventDetails, KEPT};

/// The waiting events of a receiver, at most [`KEPT`]. Events are selected when they occur.
///
/// ```text
///   offer ──▶ │ waiting … │ in the message │ ──▶ finish
///              ▲ the oldest of these makes room, and counts as lost
/// ```
pub struct EventQueue {
    wanted: Box<dyn Fn(&EventDetails) -> bool>,
    /// Oldest first.
    events: RefCell<VecDeque<Rc<EventDetails>>>,
    /// Number of events, from the oldest, in the message that is sent now.
    in_message: Cell<usize>,
    lost: Cell<u64>,
    more: Notify,
}

impl EventQueue {
    pub fn new(wanted: impl Fn(&EventDetails) -> bool + 'static) -> Self {
        Self {
            wanted: Box::new(wanted),
            events: RefCell::default(),
            in_message: Cell::new(0),
            lost: Cell::new(0),
            more: Notify::new(),
        }
    }

    pub(super) fn offer(&self, event: &Rc<EventDetails>) {
        if !(self.wanted)(event) {
            return;
        }
        let mut events = self.events.borrow_mut();
        if events.len() == KEPT {
            events.remove(self.in_message.get());
            self.lose(1);
        }
        events.push_back(Rc::clone(event));
        self.more.notify_one();
    }

    /// Takes over the waiting events of a queue that ends, if `wanted` is true for them, and its
    /// number of lost events.
    pub fn inherit(&self, former: &Self, wanted: impl Fn(&EventDetails) -> bool) {
        let mut events = former.events.take();
        events.retain(|event| wanted(event));
        self.events.replace(events);
        self.lost.set(former.lost.take());
        self.more.notify_one();
    }

    /// Resolves when the queue is not empty.
    pub async fn filled(&self) {
        while self.is_empty() {
            self.more.notified().await;
        }
    }

    /// Returns the `most` oldest events, for a message. They stay in the queue.
    pub fn begin(&self, most: usize) -> Vec<Rc<EventDetails>> {
        let events = self.events.borrow();
        let first: Vec<_> = events.iter().take(most).cloned().collect();
        self.in_message.set(first.len());
        first
    }

    /// Removes the events of a delivered message. `reported`: the number of lost events that it
    /// named.
    pub fn finish(&self, reported: u64) {
        self.events.borrow_mut().drain(..self.in_message.take());
        self.lost.set(self.lost.get() - reported);
    }

    /// Removes the events of a message that was given up, and counts them as lost.
    pub fn give_up(&self) {
        self.lose(self.in_message.get() as u64);
        self.finish(0);
    }

    /// Number of lost events that no delivered message has named.
    pub fn lost(&self) -> u64 {
        self.lost.get()
    }

    pub fn len(&self) -> usize {
        self.events.borrow().len()
    }

    pub fn is_empty(&self) -> bool {
        self.events.borrow().is_empty()
    }

    fn lose(&self, count: u64) {
        self.lost.set(self.lost.get() + count);
    }
}

impl std::fmt::Debug for EventQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "EventQueue({} events)", self.len())
    }
}

#[cfg(test)]
mod tests {
    use super::super::Notifications;
    use super::*;

    /// Goal: exactly the wanted events that never reached a message that arrived count as lost.
    #[test]
    fn lost_events_are_counted() {
        let notes = Notifications::default();
        let queue = Rc::new(EventQueue::new(|event| event.kind == "pool_lost"));
        notes.attach(&queue);
        let send = |range: std::ops::Range<usize>| {
            for n in range {
                notes.send("pool_lost", format!("p{n}"));
                notes.send("bdev_register", "not wanted");
            }
        };
        send(0..100);
        let message = queue.begin(100);
        assert_eq!((message.len(), &*message[0].ctx), (100, "p0"));
        // More than can wait, while the message is sent.
        send(100..KEPT + 7);
        assert_eq!((queue.len(), queue.lost()), (KEPT, 7));
        queue.finish(0);
        let message = queue.begin(10);
        assert_eq!((queue.lost(), &*message[0].ctx), (7, "p107"));
        queue.give_up();
        assert_eq!(queue.lost(), 17);
        let message = queue.begin(10);
        assert_eq!(message[0].ctx, "p117");
        queue.finish(17);
        assert_eq!((queue.lost(), queue.len()), (0, KEPT - 120));
        // The queue of changed settings has also the events of an unfinished message.
        queue.begin(10);
        let next = EventQueue::new(|_| true);
        next.inherit(&queue, |event| event.ctx != "p127");
        assert_eq!(next.begin(1)[0].ctx, "p128");
        assert_eq!(next.len(), KEPT - 121);
        drop(queue);
        send(0..1);
        assert!(notes.queues.borrow().is_empty());
    }
}
