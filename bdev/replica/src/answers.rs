//! When the answers of a holder may leave: while the lease of its node is good, or by the assent of
//! the replicas.
//!
//! A holder that was stopped, or cut off, may have data that a later holder has overwritten. Such a
//! later holder acts only after the lease of the former one is over. So an answer is right if the
//! lease was good at any time after the answer was collected from the replicas.

use std::sync::Arc;

use uuid::Uuid;

/// The lease of a holder's node, bound to one incarnation of that node.
///
/// Lanes call this once per poll that has answers, on any core: it must be quick and not block.
pub trait AnswerLease: Send + Sync {
    /// True if the lease is good at the time of this call, by a clock that is read in this call and
    /// that counts the time in which the machine or the process is stopped (`CLOCK_BOOTTIME`).
    ///
    /// When this returns true, no other holder may have acted on the volume before the call. When
    /// another holder can have acted, because the incarnation has ended, this never returns true
    /// again: not even when the node has a new lease. A lease that lapsed and was renewed, before
    /// anybody ended it, may be good again.
    fn is_good(&self) -> bool;
}

/// The holder that opens a volume.
#[derive(Clone)]
pub struct Holder {
    pub id: Uuid,
    /// The lease without which answers do not leave. `None`: answers leave without a check. With a
    /// lease, the device of every replica must support reservations.
    pub lease: Option<Arc<dyn AnswerLease>>,
}

impl From<Uuid> for Holder {
    /// A holder without a lease.
    fn from(id: Uuid) -> Self {
        Self { id, lease: None }
    }
}
