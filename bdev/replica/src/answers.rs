//! When a holder may return a successful completion (an *answer*) to a host. It may while the lease
//! of its node is good, or after the replicas confirmed that they still belong to this holder.
//!
//! A holder that was stopped, or cut off, may have data that a later holder has overwritten. Such a
//! later holder acts only after the lease of the former one is over. So an answer is right if the
//! lease was good at any time after the answer was collected from the replicas.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};

use uuid::Uuid;

use crate::mutation::Mutation;

/// The lease of a holder's node, bound to one incarnation of that node.
///
/// Lanes call this once per poll that has answers, on any core: it must be quick and not block.
pub trait AnswerLease: Send + Sync {
    /// True if the lease is good at the time of this call, by a clock that is read in this call and
    /// that counts the time in which the machine or the process is stopped (`CLOCK_BOOTTIME`).
    ///
    /// When this returns true, no other holder may have acted on the volume before the call. When
    /// another holder can have acted, because the incarnation has ended, this never returns true
    /// again: not even when the node has a new lease. A lapsed lease may be good again after a
    /// renewal, as long as its incarnation has not ended.
    fn is_good(&self) -> bool;
}

/// The holder that opens a volume.
#[derive(Clone)]
pub struct Holder {
    pub id: Uuid,
    /// The lease that answers need. `None`: answers are returned without a check. With a lease, the
    /// device of every replica must support reservations.
    pub lease: Option<Arc<dyn AnswerLease>>,
}

impl From<Uuid> for Holder {
    /// A holder without a lease.
    fn from(id: Uuid) -> Self {
        Self { id, lease: None }
    }
}

/// The rounds of confirmation: the control asks all replicas that may be in sync whether this
/// holder still holds them. A later holder takes one of them before its first answer. So an answer
/// that was collected before a round began is right once the round is confirmed.
#[derive(Default)]
pub struct Confirmations {
    /// The last round that began, and the last that was confirmed.
    begun: AtomicU64,
    confirmed: AtomicU64,
    /// Lanes with held answers.
    holding: AtomicUsize,
}

impl Confirmations {
    /// The last round that began. The round may not cover answers collected before this call:
    /// these answers need a later round.
    pub fn begun(&self) -> u64 {
        // The answers are collected before this load.
        fence(Ordering::SeqCst);
        self.begun.load(Ordering::SeqCst)
    }

    /// Begins a round. The control calls this before it asks the first replica.
    pub fn begin(&self) -> u64 {
        let round = self.begun.fetch_add(1, Ordering::SeqCst) + 1;
        fence(Ordering::SeqCst);
        round
    }

    pub fn confirm(&self, round: u64) {
        self.confirmed.fetch_max(round, Ordering::SeqCst);
    }

    /// True when a round that began after `begun` is confirmed: see [`Confirmations::begun`].
    pub fn covers(&self, begun: u64) -> bool {
        let confirmed = self.confirmed.load(Ordering::SeqCst);
        confirmed > begun || (Mutation::ConfirmedLate.is_active() && confirmed == begun)
    }

    /// A lane begins, or ends, to hold answers.
    pub(crate) fn hold(&self, holds: bool) {
        if holds {
            self.holding.fetch_add(1, Ordering::SeqCst);
        } else {
            self.holding.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// True while a lane holds answers.
    pub fn is_holding(&self) -> bool {
        self.holding.load(Ordering::SeqCst) != 0
    }
}
