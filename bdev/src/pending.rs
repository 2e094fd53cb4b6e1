//! A token that must come back: losing a request is a loud bug, giving one up is spelled `abandon`.
//!
//! A module keeps a [`Pending`] with each I/O it has taken. The only ways to be rid of it are
//! [`Pending::complete`], which makes the completion, and [`Pending::abandon`], for a queue that is
//! closed with I/O in flight. Dropping it any other way panics in a debug build; in a release
//! build it is logged and counted, because an engine that runs on with one hung request is worth
//! more to its hosts than one that stops.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::io::{Completion, Extents, Status, Token};

/// Requests lost by a bug in this process, ever; exported as a metric that should read 0.
static LOST: AtomicU64 = AtomicU64::new(0);

/// How many requests were lost by a bug in this process.
pub fn lost_requests() -> u64 {
    LOST.load(Ordering::Relaxed)
}

/// The duty to answer one I/O.
#[derive(Debug)]
#[must_use = "a request must be completed or abandoned"]
pub struct Pending {
    token: Token,
}

impl Pending {
    pub fn new(token: Token) -> Pending {
        Pending { token }
    }

    pub fn token(&self) -> Token {
        self.token
    }

    /// Answers the I/O.
    pub fn complete(self, status: Status, data: Extents) -> Completion {
        Completion {
            token: self.abandon(),
            status,
            data,
            lent: None,
        }
    }

    /// Gives the I/O up, or hands the duty to another owner: this handle does not complete it.
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
