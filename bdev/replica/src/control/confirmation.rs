//! Confirmation: lets the answers of a holder leave while its node has no good lease, because the
//! store is unreachable or the holder was stopped.
//!
//! ```text
//!   lanes hold answers ─▶ round begins ─▶ report of every replica that may be in sync ─┐
//!        ▲                                                                             │
//!        └── earlier answers leave ◀── confirmed ◀── each: own key, held, no other ◀───┘
//! ```
//!
//! A later holder takes over with at least one replica that is in sync in the store, and before its
//! first answer it preempts all other keys there. If each of those replicas still had this holder's
//! key when it was asked, no later holder had answered before the round began. So the answers
//! collected before the round are valid.
//!
//! The replicas that may be in sync: those of the record, and those of changes whose result is
//! unknown. No other change can have happened: only the holder changes the record, one change at a
//! time, and its change fails after one of another holder.
//!
//! One round runs at a time. Answers collected meanwhile wait for the next. Without an answer from
//! one of the replicas, I/O waits: only a change of the store can take that replica out of sync.

use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use futures_util::future::join_all;
use nacre_bdev::reservation::ReservationRequest;
use uuid::Uuid;

use super::context::Context;
use super::fence::{Next, ask, key, next};
use super::state::{Live, State};
use crate::mutation::Mutation;
use crate::shared::Failure;

/// How long a round waits for the report of a replica.
const PATIENCE: Duration = Duration::from_secs(1);
/// Delay after a round that was not confirmed, and between looks at the lease.
const AGAIN: Duration = Duration::from_millis(10);

pub(super) struct HolderConfirmation {
    pub context: Rc<Context>,
    pub holder: Uuid,
}

impl HolderConfirmation {
    /// Runs rounds while lanes hold answers and the lease is not good.
    pub(super) async fn run_rounds(self: Rc<Self>) {
        let Some(lease) = self.context.lease.clone() else {
            return;
        };
        loop {
            if !self.context.shared.confirmations.is_holding() {
                self.context.signals.confirmation.notified().await;
                continue;
            }
            if self.context.is_fenced() {
                return;
            }
            // With a good lease the lanes release the answers themselves, soon.
            if lease.is_good() || !self.round().await {
                self.context.core.after(AGAIN).await;
            }
        }
    }

    /// One round. Returns true if it is confirmed.
    async fn round(&self) -> bool {
        let confirmations = &self.context.shared.confirmations;
        // The replicas are determined, and asked, after the round began.
        let round = confirmations.begin();
        let Some(replicas) = self.replicas() else {
            return false;
        };
        let patience = PATIENCE.min(self.context.deadline());
        let (core, report) = (&self.context.core, ReservationRequest::Report);
        let asked = replicas.iter().map(|(live, key)| async move {
            let report = ask(core, &live.disk, report, patience).await;
            report.map(|report| next(&report, *key))
        });
        let answers = join_all(asked).await;
        if answers.contains(&Ok(Next::Outranked)) {
            self.context.fence_if_superseded(Failure::Fenced);
            return false;
        }
        let confirmed = answers.iter().all(|answer| *answer == Ok(Next::Done));
        if confirmed {
            confirmations.confirm(round);
            self.context.shared.ring_all();
        }
        confirmed
    }

    /// The replicas to ask, with the key that each must have. `None`: one of them is not attached,
    /// or is not reserved at present.
    fn replicas(&self) -> Option<Vec<(Rc<Live>, u64)>> {
        let state = self.context.state.borrow();
        let record = &state.record;
        let own = key(record.id, record.epoch, self.holder);
        let mut ids = may_be_in_sync(&state);
        if Mutation::ConfirmedByFewer.is_active() && ids.len() > 1 {
            ids.pop_last();
        }
        let replica = |id: &Uuid| {
            let replica = record.replicas.iter().find(|m| m.id == *id)?;
            let live = state.live[usize::from(replica.slot)].as_ref()?;
            (live.key.get() == own).then(|| (Rc::clone(live), own))
        };
        let all: Option<Vec<_>> = ids.iter().map(replica).collect();
        all.filter(|all| !all.is_empty())
    }
}

/// The replicas that are in sync in the store, or may be.
fn may_be_in_sync(state: &State) -> BTreeSet<Uuid> {
    let known = state.record.in_sync().map(|replica| replica.id);
    known.chain(state.attempted.iter().copied()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lane::tests::rig::record;
    use crate::model::ReplicaState;

    /// Goal: the replicas of the record and those of attempted changes must confirm. Method: a
    /// promotion whose result is unknown, and the removal of a replica.
    #[test]
    fn replicas_that_may_be_in_sync() {
        let mut before = record(2048, 3);
        before.replicas[2].state = ReplicaState::Filling {
            watermark: 0,
            last_label: Default::default(),
        };
        let ids: Vec<Uuid> = before.replicas.iter().map(|m| m.id).collect();
        let mut state = State::new(before);
        assert_eq!(may_be_in_sync(&state), ids[..2].iter().copied().collect());
        state.attempted = [ids[1], ids[2]].into();
        assert_eq!(may_be_in_sync(&state), ids.iter().copied().collect());
    }
}
