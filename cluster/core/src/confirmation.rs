//! Answers of a holder without a lease: they may leave when the gate of every member that may be in
//! sync has confirmed, after the data was collected, that this node is still the holder.
//!
//! A taker gates an in-sync member before its first answer. So a confirmation of every such member
//! after the data was read proves that no taker had answered when the data was read.

use arrayvec::ArrayVec;

use crate::ids::{MAX_MEMBERS, MemberId};
use crate::mutation::Mutation;

/// The members of a record, and of a pending change.
pub type Members = ArrayVec<MemberId, { 2 * MAX_MEMBERS }>;

/// Rounds of questions to the gates, one at a time. Answers that are collected during a round wait
/// for the next one.
#[derive(Debug, Default)]
pub struct Assent {
    last_round: u64,
    open: Option<Round>,
}

#[derive(Debug)]
struct Round {
    number: u64,
    /// The last answer that the round covers.
    covers: u64,
    missing: Members,
    asked: usize,
}

impl Assent {
    /// Starts a round for all answers up to `covers`: ask each of `members`, and return its
    /// confirmation with the number. `None` while a round is open.
    pub fn start(&mut self, covers: u64, members: Members) -> Option<u64> {
        if self.open.is_some() {
            return None;
        }
        self.last_round += 1;
        self.open = Some(Round {
            number: self.last_round,
            covers,
            asked: members.len(),
            missing: members,
        });
        Some(self.last_round)
    }

    /// The member's gate has this node's key. Returns the last answer that may leave, when all
    /// members have confirmed.
    pub fn confirmed(&mut self, number: u64, member: MemberId) -> Option<u64> {
        let round = self.open.as_mut().filter(|round| round.number == number)?;
        round.missing.retain(|other| *other != member);
        let is_complete = if Mutation::AssentOfOne.is_active() {
            round.missing.len() < round.asked
        } else {
            round.missing.is_empty()
        };
        if !is_complete || round.asked == 0 {
            return None;
        }
        self.open.take().map(|round| round.covers)
    }

    /// Ends the round without a result: a member does not answer, or the members have changed.
    pub fn abandon(&mut self) {
        self.open = None;
    }
}
