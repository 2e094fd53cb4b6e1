//! A channel for one reply, from the store's thread to the task that waits for it.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;

use super::StoreError;

type Answer<T> = Result<T, StoreError>;

/// The two ends of a channel for one reply.
pub fn reply<T>() -> (Sender<T>, Receiver<T>) {
    let place = Arc::new(Mutex::new(ReplySlot {
        answer: None,
        waker: None,
    }));
    (Sender(Some(Arc::clone(&place))), Receiver(place))
}

struct ReplySlot<T> {
    answer: Option<Answer<T>>,
    waker: Option<Waker>,
}

/// The sending end. If it is dropped without a reply, the receiver gets the error that the outcome
/// of the request is unknown.
pub struct Sender<T>(Option<Arc<Mutex<ReplySlot<T>>>>);

/// The receiving end: a future of the reply.
pub struct Receiver<T>(Arc<Mutex<ReplySlot<T>>>);

impl<T> Sender<T> {
    pub fn answer(mut self, answer: Answer<T>) {
        self.put(answer);
    }

    fn put(&mut self, answer: Answer<T>) {
        let Some(place) = self.0.take() else { return };
        let mut guard = place.lock();
        guard.answer = Some(answer);
        let waker = guard.waker.take();
        // The woken task may check at once.
        drop(guard);
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        self.put(Err(StoreError::Unavailable {
            why: "it ended before it replied".to_owned(),
        }));
    }
}

impl<T> Future for Receiver<T> {
    type Output = Answer<T>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Answer<T>> {
        let mut place = self.0.lock();
        match place.answer.take() {
            Some(answer) => Poll::Ready(answer),
            None => {
                place.waker = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }
}
