//! Progress of an operation, which other threads read; its cancellation.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use tokio::sync::Notify;

use crate::Failure;

#[derive(Debug, Default)]
pub struct Progress {
    total: AtomicU64,
    done: AtomicU64,
    stored: AtomicU64,
    cancelled: AtomicBool,
    notify: Notify,
}

impl Progress {
    /// Objects to be looked at. Zero while that is unknown.
    pub fn total(&self) -> u64 {
        self.total.load(Ordering::Relaxed)
    }

    /// Objects that are done.
    pub fn done(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    /// Bytes that were sent to the store, or read from it.
    pub fn stored(&self) -> u64 {
        self.stored.load(Ordering::Relaxed)
    }

    pub fn set_total(&self, objects: u64) {
        self.total.store(objects, Ordering::Relaxed);
    }

    pub(crate) fn add(&self, objects: u64, stored: u64) {
        self.done.fetch_add(objects, Ordering::Relaxed);
        self.stored.fetch_add(stored, Ordering::Relaxed);
    }

    /// Ends the operation soon, unless it is about to complete.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Release);
        self.notify.notify_waiters();
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Acquire)
    }

    /// Ends work when the operation is cancelled: before its first step, if that happened already.
    pub(crate) async fn unless_cancelled<T>(
        &self,
        work: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        tokio::select! {
            biased;
            () = self.cancelled() => Err(Failure::Cancelled),
            done = work => done,
        }
    }

    /// Completes when the operation was cancelled.
    async fn cancelled(&self) {
        loop {
            let notified = self.notify.notified();
            tokio::pin!(notified);
            notified.as_mut().enable();
            if self.is_cancelled() {
                return;
            }
            notified.await;
        }
    }
}
