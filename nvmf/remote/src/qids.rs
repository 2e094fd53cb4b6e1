//! Allocates the queue identifiers of this host's I/O queues at one controller of another target.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;

/// Allocates identifiers from 1: those never used first, then the one returned longest ago, so that
/// the target has time to close its old queue.
#[derive(Debug, Default)]
pub(crate) struct Qids(Mutex<QidState>);

#[derive(Debug, Default)]
struct QidState {
    used: u16,
    returned: VecDeque<u16>,
}

/// An allocated identifier. Dropping it returns the identifier.
#[derive(Debug)]
pub(crate) struct Qid {
    pub value: u16,
    of: Arc<Qids>,
}

impl Qids {
    /// Allocates an identifier from 1 to `granted`, the number of I/O queues that the target
    /// grants; `None`: all are in use.
    pub(crate) fn take(self: &Arc<Self>, granted: u16) -> Option<Qid> {
        let mut state = self.0.lock();
        let value = if state.used < granted {
            state.used += 1;
            state.used
        } else {
            // Skip identifiers above the present grant.
            let at = state.returned.iter().position(|qid| *qid <= granted)?;
            state.returned.remove(at)?
        };
        Some(Qid {
            value,
            of: Arc::clone(self),
        })
    }
}

impl Drop for Qid {
    fn drop(&mut self) {
        self.of.0.lock().returned.push_back(self.value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_queue_id_has_one_user_and_is_reused() {
        let qids = Arc::new(Qids::default());
        let mut held: Vec<Qid> = (0..3).filter_map(|_| qids.take(3)).collect();
        let values: Vec<u16> = held.iter().map(|qid| qid.value).collect();
        assert_eq!(values, [1, 2, 3]);
        assert!(qids.take(3).is_none());
        held.remove(1);
        held.remove(0);
        assert_eq!(
            qids.take(4).map(|qid| qid.value),
            Some(4),
            "a new one first"
        );
        assert_eq!(qids.take(3).map(|qid| qid.value), Some(2), "the oldest");
    }

    /// After a reconnect fewer may be granted.
    #[test]
    fn those_beyond_the_grant_stay() {
        let qids = Arc::new(Qids::default());
        let held: Vec<Qid> = (0..3).filter_map(|_| qids.take(3)).collect();
        drop(held);
        let low: Vec<u16> = (0..4)
            .filter_map(|_| qids.take(2))
            .map(|q| q.value)
            .collect();
        assert_eq!(low.len(), 4, "each came back at once");
        assert!(low.iter().all(|qid| *qid <= 2));
        let kept = [qids.take(1).unwrap()];
        assert!(qids.take(1).is_none(), "{kept:?}");
    }
}
