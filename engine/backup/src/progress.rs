//! Progress and cancellation of one backup operation: a creation, restore, verification or
//! deletion. The operation counts; other threads read the counters or cancel.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use tokio::sync::Notify;

use crate::Failure;

/// Counters of one operation, and its cancellation. An *object* has 4 MiB of the volume.
#[derive(Debug, Default)]
pub struct Progress {
    total: AtomicU64,
    done: AtomicU64,
    stored: AtomicU64,
    cancelled: AtomicBool,
    notify: Notify,
}

impl Progress {
    /// Number of objects that the operation will process; 0 while that is unknown.
    pub fn total(&self) -> u64 {
        self.total.load(Ordering::Relaxed)
    }

    /// Number of objects processed so far.
    pub fn done(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    /// Bytes written to the backup store or read from it so far, as they are stored.
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

    /// Requests the end of the operation, which then fails with [`Failure::Cancelled`]. If it is
    /// about to complete, it may still succeed.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Release);
        self.notify.notify_waiters();
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Acquire)
    }

    /// Runs `work`, and drops it with [`Failure::Cancelled`] when the operation is cancelled. If
    /// the operation is cancelled already, `work` does not start.
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

    /// Completes when the operation is cancelled.
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
