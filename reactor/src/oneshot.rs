//! A channel for one value, from a reactor to a caller that awaits it or blocks for it.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use parking_lot::{Condvar, Mutex};

struct OneshotShared<T> {
    state: Mutex<OneshotState<T>>,
    changed: Condvar,
}

enum OneshotState<T> {
    Waiting(Option<Waker>),
    Sent(T),
    /// The sender was dropped, or the value was received.
    Over,
}

pub(crate) fn oneshot<T>() -> (Sender<T>, Receiver<T>) {
    let shared = Arc::new(OneshotShared {
        state: Mutex::new(OneshotState::Waiting(None)),
        changed: Condvar::new(),
    });
    (
        Sender {
            shared: Some(Arc::clone(&shared)),
        },
        Receiver { shared },
    )
}

pub(crate) struct Sender<T> {
    shared: Option<Arc<OneshotShared<T>>>,
}

impl<T> Sender<T> {
    pub(crate) fn send(mut self, value: T) {
        if let Some(shared) = self.shared.take() {
            shared.end(OneshotState::Sent(value));
        }
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        if let Some(shared) = self.shared.take() {
            shared.end(OneshotState::Over);
        }
    }
}

/// Yields `None` when the sender was dropped without sending.
pub(crate) struct Receiver<T> {
    shared: Arc<OneshotShared<T>>,
}

impl<T> Receiver<T> {
    pub(crate) fn wait(self) -> Option<T> {
        let waiting = |state: &mut OneshotState<T>| matches!(state, OneshotState::Waiting(_));
        let mut state = self.shared.state.lock();
        self.shared.changed.wait_while(&mut state, waiting);
        take(&mut state)
    }
}

impl<T> Future for Receiver<T> {
    type Output = Option<T>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<T>> {
        let mut state = self.shared.state.lock();
        if let OneshotState::Waiting(waker) = &mut *state {
            *waker = Some(context.waker().clone());
            return Poll::Pending;
        }
        Poll::Ready(take(&mut state))
    }
}

fn take<T>(state: &mut OneshotState<T>) -> Option<T> {
    match std::mem::replace(state, OneshotState::Over) {
        OneshotState::Sent(value) => Some(value),
        OneshotState::Waiting(_) | OneshotState::Over => None,
    }
}

impl<T> OneshotShared<T> {
    fn end(&self, end: OneshotState<T>) {
        let before = std::mem::replace(&mut *self.state.lock(), end);
        self.changed.notify_all();
        if let OneshotState::Waiting(Some(waker)) = before {
            waker.wake();
        }
    }
}
