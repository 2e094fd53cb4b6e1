//! The ticket of a device's removal: poll it, set a callback, or await it.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;

/// Completes when the removal is complete ([`super::Event::Unregistered`]). Clones refer to the
/// same removal.
#[derive(Clone)]
pub struct DeleteTicket {
    state: Arc<Mutex<TicketState>>,
}

#[derive(Default)]
struct TicketState {
    done: bool,
    wakers: Vec<Waker>,
    calls: Vec<Box<dyn FnOnce() + Send>>,
}

impl DeleteTicket {
    pub(super) fn new() -> Self {
        Self {
            state: Arc::default(),
        }
    }

    /// True when the removal is complete.
    pub fn is_done(&self) -> bool {
        self.state.lock().done
    }

    /// Calls `call` on completion: on the thread that ends the removal, or immediately if it has
    /// ended.
    pub fn on_done(&self, call: impl FnOnce() + Send + 'static) {
        let mut state = self.state.lock();
        if !state.done {
            state.calls.push(Box::new(call));
            return;
        }
        drop(state);
        call();
    }

    pub(super) fn finish(&self) {
        let (wakers, calls) = {
            let mut state = self.state.lock();
            state.done = true;
            (
                std::mem::take(&mut state.wakers),
                std::mem::take(&mut state.calls),
            )
        };
        wakers.into_iter().for_each(Waker::wake);
        calls.into_iter().for_each(|call| call());
    }
}

impl Future for DeleteTicket {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let mut state = self.state.lock();
        if state.done {
            return Poll::Ready(());
        }
        let waker = context.waker();
        if !state.wakers.iter().any(|known| known.will_wake(waker)) {
            state.wakers.push(waker.clone());
        }
        Poll::Pending
    }
}
