//! The lease of this node, as reactors check it before each answer to a host.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use nacre_bdev_replica::answers::AnswerLease;
use nacre_cluster_core::lease::Word;
use nacre_cluster_node::clock;
use nacre_cluster_node::serving::Link;
use nacre_nvmf::subsystems::reservation::StateLease;

/// The lease during one incarnation of the node. Volumes that an earlier incarnation opened never
/// answer again, even if the node has a lease.
pub(super) struct OfIncarnation {
    word: Arc<Word>,
    current: Arc<AtomicI64>,
    incarnation: i64,
}

impl OfIncarnation {
    /// The lease in the present incarnation.
    pub(super) fn now(link: &Link) -> Self {
        Self {
            word: Arc::clone(&link.word),
            current: Arc::clone(&link.incarnation),
            incarnation: link.incarnation.load(Ordering::Acquire),
        }
    }

    fn is_good(&self) -> bool {
        // The word first: if it is of a later incarnation, the comparison shows that.
        let is_good = self.word.is_good(clock::now());
        is_good && self.incarnation != 0 && self.current.load(Ordering::Acquire) == self.incarnation
    }
}

impl AnswerLease for OfIncarnation {
    fn is_good(&self) -> bool {
        Self::is_good(self)
    }
}

impl StateLease for OfIncarnation {
    fn is_good(&self) -> bool {
        Self::is_good(self)
    }
}

#[cfg(test)]
mod tests {
    use nacre_cluster_core::BootTime;

    use super::*;

    /// Goal: neither a lease that is over, nor one of a later incarnation, lets an answer leave.
    #[test]
    fn a_lease_holds_for_its_incarnation() {
        let (word, current) = (Arc::new(Word::default()), Arc::new(AtomicI64::new(7)));
        let lease = OfIncarnation {
            word: Arc::clone(&word),
            current: Arc::clone(&current),
            incarnation: 7,
        };
        assert!(!lease.is_good());
        word.set(BootTime(u64::MAX));
        assert!(lease.is_good());
        word.set(BootTime(1));
        assert!(!lease.is_good());
        word.set(BootTime(u64::MAX));
        assert!(lease.is_good());
        for later in [0, 8] {
            current.store(later, Ordering::Release);
            assert!(!lease.is_good());
        }
    }
}
