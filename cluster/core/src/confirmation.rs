//! Rounds of confirmations, for a holder whose node has no good lease. Its responses to hosts wait
//! until every replica that may be in sync has confirmed that it still has this holder's key, after
//! the data of the response was read or written.
//!
//! A new holder must put its key into the gate of an in-sync replica before its first response (see
//! [`crate::gate`]). So confirmations of all these replicas prove that no other holder had
//! responded before the round began.

use arrayvec::ArrayVec;

use crate::ids::{MAX_REPLICAS, ReplicaId};
use crate::mutation::Mutation;

/// The in-sync replicas of the record, and those of a change of it that is not confirmed yet.
pub type ReplicaIds = ArrayVec<ReplicaId, { 2 * MAX_REPLICAS }>;

/// The rounds, one at a time. Responses that become ready during a round wait for the next one.
#[derive(Debug, Default)]
pub struct Confirmations {
    last_round: u64,
    open: Option<Round>,
}

#[derive(Debug)]
struct Round {
    number: u64,
    /// The number of the last response that the round covers.
    covers: u64,
    missing: ReplicaIds,
    asked: usize,
}

impl Confirmations {
    /// Starts a round for all responses up to number `covers`, and returns the round's number. The
    /// caller asks each of `replicas` for its key, and reports each confirmation with that number.
    /// `None` while a round is open.
    pub fn start(&mut self, covers: u64, replicas: ReplicaIds) -> Option<u64> {
        if self.open.is_some() {
            return None;
        }
        self.last_round += 1;
        self.open = Some(Round {
            number: self.last_round,
            covers,
            asked: replicas.len(),
            missing: replicas,
        });
        Some(self.last_round)
    }

    /// The replica has this node's key. When all replicas have confirmed, returns the number of the
    /// last response that may leave.
    pub fn confirmed(&mut self, number: u64, replica: ReplicaId) -> Option<u64> {
        let round = self.open.as_mut().filter(|round| round.number == number)?;
        round.missing.retain(|other| *other != replica);
        let is_complete = if Mutation::ConfirmedByOne.is_active() {
            round.missing.len() < round.asked
        } else {
            round.missing.is_empty()
        };
        if !is_complete || round.asked == 0 {
            return None;
        }
        self.open.take().map(|round| round.covers)
    }

    /// Ends the round without a result: a replica does not answer, or the replicas have changed.
    pub fn abandon(&mut self) {
        self.open = None;
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    fn replica(number: u128) -> ReplicaId {
        ReplicaId(Uuid::from_u128(number))
    }

    /// Goal: an answer leaves only when every replica has confirmed in a round that began after it
    /// was collected. Method: two rounds, of which the first is abandoned.
    #[test]
    fn confirmation_needs_every_replica_after_the_question() {
        let mut confirmations = Confirmations::default();
        let replicas = ArrayVec::from_iter([0, 1].map(replica));
        let first = confirmations.start(5, replicas.clone()).unwrap();
        assert_eq!(
            confirmations.start(6, replicas.clone()),
            None,
            "one at a time"
        );
        assert_eq!(confirmations.confirmed(first, replica(0)), None);
        assert_eq!(confirmations.confirmed(first, replica(0)), None);
        confirmations.abandon();
        let second = confirmations.start(6, replicas).unwrap();
        assert_eq!(
            confirmations.confirmed(first, replica(1)),
            None,
            "of an old round"
        );
        assert_eq!(confirmations.confirmed(second, replica(1)), None);
        assert_eq!(confirmations.confirmed(second, replica(0)), Some(6));
    }
}
