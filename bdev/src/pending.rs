//! [`Pending`]: an accepted I/O that a queue must complete, so that no I/O is lost.
//!
//! A module stores a [`Pending`] with each accepted I/O. It ends with [`Pending::complete`], which
//! creates the completion, or with [`Pending::abandon`], for a queue that is closed with I/O in
//! flight. Dropping it otherwise is a bug, which is logged and counted. A debug build also panics.
//! A release build does not: one hung request is better for hosts than a stopped daemon.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::io::{Completion, Extents, Status, Token};

static LOST: AtomicU64 = AtomicU64::new(0);

/// Number of requests that this process lost by a defect: `nacre_bdev_lost_requests_total`.
pub fn lost_requests() -> u64 {
    LOST.load(Ordering::Relaxed)
}

/// The obligation to complete one I/O.
#[derive(Debug)]
#[must_use = "a request must be completed or abandoned"]
pub struct Pending {
    token: Token,
}

impl Pending {
    pub fn new(token: Token) -> Self {
        Self { token }
    }

    pub fn token(&self) -> Token {
        self.token
    }

    /// Creates the completion of the I/O.
    pub fn complete(self, status: Status, data: Extents) -> Completion {
        Completion {
            token: self.abandon(),
            status,
            data,
            zero_copy: None,
        }
    }

    /// Ends this handle without a completion: the queue is closed, or another owner completes the
    /// I/O.
    pub fn abandon(self) -> Token {
        let token = self.token;
        std::mem::forget(self);
        token
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        LOST.fetch_add(1, Ordering::Relaxed);
        tracing::error!(
            token = self.token,
            "a request was dropped without an answer"
        );
        // A second panic while one unwinds would abort the process and hide the first.
        if cfg!(debug_assertions) && !std::thread::panicking() {
            panic!("request {:#x} was dropped without an answer", self.token);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Both legal ends are silent.
    #[test]
    fn completed_or_abandoned() {
        let done = Pending::new(7).complete(Status::Ok, Extents::new());
        assert_eq!((done.token, done.status), (7, Status::Ok));
        assert_eq!(Pending::new(8).abandon(), 8);
    }

    /// The illegal end is loud and counted.
    #[test]
    fn a_lost_token_is_counted() {
        let before = lost_requests();
        let caught = std::panic::catch_unwind(|| drop(Pending::new(9)));
        assert_eq!(caught.is_err(), cfg!(debug_assertions));
        assert!(lost_requests() > before);
    }
}
