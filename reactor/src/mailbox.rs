//! The mailbox of a reactor: a bounded, lock-free queue of messages from other threads.

use std::panic::Location;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};

use crossbeam_queue::ArrayQueue;

use crate::bell::Bell;

/// The error of a full mailbox: the reactor is overloaded or stuck. The message was not queued.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("mailbox of reactor \"{reactor}\" is full ({capacity} messages); try again")]
pub struct MailboxFull {
    pub reactor: String,
    pub capacity: usize,
}

/// The error of sending a message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    #[error(transparent)]
    Full(#[from] MailboxFull),
    #[error("reactor \"{reactor}\" has stopped")]
    Stopped { reactor: String },
}

/// A message with the source location of its sender, for the watchdog.
pub(crate) struct Envelope<M> {
    pub(crate) message: M,
    pub(crate) from: &'static Location<'static>,
}

pub(crate) struct Mailbox<M> {
    queue: ArrayQueue<Envelope<M>>,
    closed: AtomicBool,
    bell: Arc<Bell>,
}

pub(crate) enum Refused {
    Full,
    Closed,
}

impl<M> Mailbox<M> {
    pub(crate) fn new(capacity: usize, bell: Arc<Bell>) -> Self {
        Self {
            queue: ArrayQueue::new(capacity.max(1)),
            closed: AtomicBool::new(false),
            bell,
        }
    }

    pub(crate) fn push(&self, envelope: Envelope<M>) -> Result<(), Refused> {
        if self.closed.load(Ordering::Relaxed) {
            return Err(Refused::Closed);
        }
        if self.queue.push(envelope).is_err() {
            return Err(Refused::Full);
        }
        // `close` stores, fences and empties; here it is push, fence and load. One of the two sees
        // the other, so no message stays behind in a closed mailbox and no caller waits forever.
        fence(Ordering::SeqCst);
        if self.closed.load(Ordering::Relaxed) {
            self.discard();
            return Ok(());
        }
        self.bell.ring();
        Ok(())
    }

    pub(crate) fn pop(&self) -> Option<Envelope<M>> {
        self.queue.pop()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    pub(crate) fn capacity(&self) -> usize {
        self.queue.capacity()
    }

    pub(crate) fn len(&self) -> usize {
        self.queue.len()
    }

    /// Closes the mailbox and drops undelivered messages. Callers that wait for one of them get the
    /// error that the reactor stopped.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.discard();
    }

    fn discard(&self) {
        while self.queue.pop().is_some() {}
    }
}
