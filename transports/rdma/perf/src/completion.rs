//! Selects the error to report for a session: one failure causes several error completions and
//! events, of which one is the cause.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use nacre_transport_rdma_verbs::{WcStatus, WorkCompletion};

use crate::error::{Failed, PerfError};

/// How long to wait for an error that explains the failure better.
const GRACE: Duration = Duration::from_millis(300);

/// How well an error explains the end; better ones first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Rank {
    /// An error of this end (an error completion, wrong data, a removed device), or one reported by
    /// the other end. Later errors here are its consequences.
    Seen,
    /// The connection ended, for an unknown reason.
    Ended,
    /// A request was flushed: an earlier failure ended the queue pair.
    Flushed,
}

/// The causes known so far.
#[derive(Default)]
pub(crate) struct Causes {
    best: Option<(Rank, PerfError)>,
    since: Option<Instant>,
}

impl Causes {
    pub(crate) fn add(&mut self, rank: Rank, error: PerfError, now: Instant) {
        if self.best.as_ref().is_none_or(|(best, _)| rank < *best) {
            self.best = Some((rank, error));
        }
        self.since.get_or_insert(now);
    }

    pub(crate) fn failed(&mut self, failed: Failed, now: Instant) {
        let rank = match failed.status {
            WcStatus::WorkRequestFlushed => Rank::Flushed,
            _ => Rank::Seen,
        };
        self.add(rank, PerfError::Completion(failed), now);
    }

    pub(crate) fn any(&self) -> bool {
        self.best.is_some()
    }

    /// The best explanation, once `GRACE` is over or no better one is possible.
    pub(crate) fn due(&mut self, now: Instant) -> Option<PerfError> {
        let (rank, _) = self.best.as_ref()?;
        let waited = self.since.is_some_and(|since| now >= since + GRACE);
        if *rank == Rank::Seen || waited {
            self.best.take().map(|(_, error)| error)
        } else {
            None
        }
    }
}

pub(crate) fn failed(wc: &WorkCompletion, opcode: &'static str, peer: SocketAddr) -> Failed {
    Failed {
        status: wc.status,
        vendor_error: wc.vendor_error,
        opcode,
        qp: wc.qp,
        peer,
    }
}
