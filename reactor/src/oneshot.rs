//! A channel for one value, from a reactor to a caller that awaits it or blocks for it.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use parking_lot::{Condvar, Mutex, MutexGuard};

struct Shared<T> {
    state: Mutex<State<T>>,
    changed: Condvar,
}

enum State<T> {
    Waiting(Option<Waker>),
    Sent(T),
    /// The sender was dropped, or the value was received.
    Over,
}

pub(crate) fn oneshot<T>() -> (Sender<T>, Receiver<T>) {
    let shared = Arc::new(Shared {
        state: Mutex::new(State::Waiting(None)),
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
    shared: Option<Arc<Shared<T>>>,
}

impl<T> Sender<T> {
    pub(crate) fn send(mut self, value: T) {
        if let Some(shared) = self.shared.take() {
            shared.end(State::Sent(value));
        }
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        if let Some(shared) = self.shared.take() {
            shared.end(State::Over);
        }
    }
}

/// Yields `None` when the sender was dropped without sending.
pub(crate) struct Receiver<T> {
    shared: Arc<Shared<T>>,
}

impl<T> Receiver<T> {
    pub(crate) fn wait(self) -> Option<T> {
        let waiting = |state: &mut State<T>| matches!(state, State::Waiting(_));
        let mut state = self.shared.lock();
        self.shared.changed.wait_while(&mut state, waiting);
        take(&mut state)
    }
}

impl<T> Future for Receiver<T> {
    type Output = Option<T>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<T>> {
        let mut state = self.shared.lock();
        if let State::Waiting(waker) = &mut *state {
            *waker = Some(context.waker().clone());
            return Poll::Pending;
        }
        Poll::Ready(take(&mut state))
    }
}

fn take<T>(state: &mut State<T>) -> Option<T> {
    match std::mem::replace(state, State::Over) {
        State::Sent(value) => Some(value),
        State::Waiting(_) | State::Over => None,
    }
}

impl<T> Shared<T> {
    fn end(&self, end: State<T>) {
        let before = std::mem::replace(&mut *self.lock(), end);
        self.changed.notify_all();
        if let State::Waiting(Some(waker)) = before {
            waker.wake();
        }
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock()
    }
}
