//! Polls the labels of replicas without reservations, to detect that another holder has taken the
//! volume.
//!
//! ```text
//! previous holder     poll ──1 s──▶ poll ──1 s──▶ poll: a later epoch, fenced
//! next holder               label ├──────── deadline and 2 s ────────┤ reads the log, serves
//! ```
//!
//! A poll in flight while the later label is written ends within the volume's deadline, and the
//! next poll reads that label. So if two holders reach the medium, the later one serves only after
//! the earlier one has stopped.
//!
//! A holder without shared media does not poll while idle: replicas on this machine are polled
//! while regions are dirty, and before a region becomes dirty. No other holder on this machine
//! opens them.

use std::rc::Rc;

use futures_util::future::{join, join_all};
use nacre_bdev::reservation::ReservationRequest;

use super::context::Context;
use super::fence::{Next, WATCH, ask, next};
use super::membership::Membership;
use super::state::Live;
use crate::shared::Failure;

pub(super) struct LabelPoll {
    pub context: Rc<Context>,
    pub replicas: Rc<Membership>,
}

impl LabelPoll {
    /// Replicas whose labels need polling.
    pub(super) fn exposed(&self) -> Vec<(usize, Rc<Live>)> {
        let state = self.context.state.borrow();
        let calm = state.fenced.is_some() || self.context.shared.regions.dirty_count() == 0;
        let exposed = |live: &Live| live.is_by_label() && !(live.device.local && calm);
        let present = state.present().into_iter();
        present.filter(|(_, live)| exposed(live)).collect()
    }

    /// Polls labels before the first write of an idle volume, if the last poll is older than
    /// `WATCH`.
    pub(super) async fn look_before_writing(&self, replicas: &[(usize, Rc<Live>)]) {
        let late = |live: &Live| self.context.core.now().since(live.looked.get()) >= WATCH;
        let due = replicas
            .iter()
            .filter(|(_, live)| live.is_by_label() && late(live));
        join_all(due.map(|(slot, live)| self.look_at_label(*slot, live))).await;
    }

    pub(super) async fn look_at_label(&self, slot: usize, live: &Rc<Live>) {
        let record = self.context.state.borrow().record.clone();
        match self.replicas.is_still_ours(slot, &live.disk, &record).await {
            Ok(()) => live.looked.set(self.context.core.now()),
            // Another holder owns the volume, so the state of this replica no longer matters.
            Err(Failure::Fenced) => self.context.fence_if_superseded(Failure::Fenced),
            Err(Failure::OtherReplica) => {
                self.context
                    .suspect(slot, live.incarnation, Failure::OtherReplica)
            }
            // The code that monitors the replica's I/O and connection handles other errors.
            Err(_) => {}
        }
    }

    /// Checks at intervals that replicas still belong to this holder: that the reservation exists,
    /// which a target may have forgotten, and that no label is another holder's.
    pub(super) async fn stay_holder(self: Rc<Self>) {
        let reserved = || -> Vec<(usize, Rc<Live>)> {
            let present = self.context.state.borrow().present().into_iter();
            present.filter(|(_, live)| live.key.get() != 0).collect()
        };
        loop {
            if reserved().is_empty() && self.exposed().is_empty() {
                self.context.signals.fence.notified().await;
                continue;
            }
            self.context.core.after(WATCH).await;
            // Drop these handles before the pause: a replica removed meanwhile releases its device.
            let (reserved, exposed) = (reserved(), self.exposed());
            let polls = reserved
                .iter()
                .map(|(slot, live)| self.poll_reservation(*slot, live));
            let labels = exposed
                .iter()
                .map(|(slot, live)| self.look_at_label(*slot, live));
            join(join_all(polls), join_all(labels)).await;
        }
    }

    async fn poll_reservation(&self, slot: usize, live: &Rc<Live>) {
        let key = live.key.get();
        let found = ask(
            &self.context.core,
            &live.disk,
            ReservationRequest::Report,
            self.context.deadline(),
        )
        .await;
        let Ok(report) = found else {
            // The code that monitors the replica's I/O and connection handles other errors.
            return;
        };
        if next(&report, key) == Next::Done || live.key.get() != key {
            return;
        }
        let record = self.context.state.borrow().record.clone();
        live.key.set(0);
        if let Err(why) = self.replicas.keep_others_out(live, &record).await {
            self.context.suspect(slot, live.incarnation, why);
        }
    }
}
