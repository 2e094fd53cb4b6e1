//! Decides the new state of a replica that failed an I/O: out of sync, detached, or unchanged.
//!
//! | the replica is | and | then |
//! |---|---|---|
//! | in sync | another in-sync replica is there | out, durably; only then are writes acknowledged |
//! | in sync, silent again | another in-sync replica answers | out; returns after a longer pause |
//! | in sync | it has no space, and no other took the write | stays: see [`crate::lane::space`] |
//! | in sync, the last one there | its medium failed | stays: the host gets the error |
//! | in sync, the last one there | it is unreachable | in sync, detached; the volume freezes |
//! | any | its device was truncated | see [`super::truncation`] |
//! | being copied to | | detached; retried later |
//! | any | it is reserved by another holder | stays: the volume is fenced |
//!
//! A read error alone does not put a replica out: the blocks are written back from another replica.
//! After too many read errors within an hour the replica is out.

use std::rc::Rc;
use std::time::Duration;

use nacre_bdev::{Bdev, Status};

use super::context::Context;
use super::membership::Membership;
use super::reasons::describe;
use super::state::Live;
use super::truncation::{Checked, Cut};
use crate::handle::VolumeEventKind;
use crate::model::{MAX_REPLICAS, ReplicaState};
use crate::mutation::Mutation;
use crate::shared::{Failure, Report};

const READ_ERROR_WINDOW: Duration = Duration::from_secs(3600);
/// Interval of checks whether remote devices have lost data, and whether devices are gone.
const WATCH: Duration = Duration::from_millis(250);

pub(super) struct FailureHandler {
    pub context: Rc<Context>,
    pub replicas: Rc<Membership>,
}

impl FailureHandler {
    pub(super) async fn handle_failures(self: Rc<Self>) {
        loop {
            self.context.signals.failures.notified().await;
            loop {
                let (reports, reported) = {
                    let mut state = self.context.state.borrow_mut();
                    (std::mem::take(&mut state.reports), state.reported)
                };
                if reported == self.context.state.borrow().decided {
                    break;
                }
                for slot in 0..MAX_REPLICAS {
                    if let Some(worst) = self.worst(slot, &reports) {
                        self.decide(slot, worst.incarnation, worst.why).await;
                    }
                }
                self.context.state.borrow_mut().decided = reported;
                self.context.publish();
            }
        }
    }

    /// Returns the report that decides about a slot: of its present incarnation, a write's before a
    /// read's. A failure whose report did not fit in the list counts like the others, or as a
    /// failed write.
    fn worst(&self, slot: usize, reports: &[Report]) -> Option<Report> {
        let state = self.context.state.borrow();
        let live = state.live[slot].as_ref()?;
        let of_now = |r: &&Report| r.slot == slot && r.incarnation == live.incarnation;
        let mut fatal = None;
        for report in reports.iter().filter(of_now) {
            match report.weight() {
                2.. => return Some(*report),
                0 if !self.too_many_read_errors(live) => {}
                _ => fatal = Some(*report),
            }
        }
        fatal
    }

    fn too_many_read_errors(&self, live: &Live) -> bool {
        let limit = self
            .context
            .state
            .borrow()
            .record
            .settings
            .read_errors
            .max(1) as usize;
        let now = self.context.core.now();
        let mut errors = live.read_errors.borrow_mut();
        errors.push_back(now);
        while errors
            .front()
            .is_some_and(|at| now.since(*at) > READ_ERROR_WINDOW)
        {
            errors.pop_front();
        }
        if errors.len() > limit {
            errors.truncate(limit);
        }
        errors.len() >= limit
    }

    /// Decides about a failed replica. Does nothing if that incarnation has ended.
    ///
    /// Other replicas that have lost their connection by now, and possibly unflushed data, are
    /// decided first. Otherwise one of them could be the last one left, although this one was only
    /// slow and has all data. That can also happen while the store is unreachable.
    pub(super) async fn decide(&self, slot: usize, incarnation: u64, why: Failure) {
        let _one = self.replicas.turn.lock().await;
        // Each time this decision is overtaken, another replica is decided first.
        for _ in 0..=MAX_REPLICAS {
            // The lost data of a cut replica does not return: prefer a frozen volume to this
            // replica.
            let record = self.context.state.borrow().record.clone();
            for (other, live) in self.others_in_sync(slot) {
                if Cut::of(&record, &live.device.layer).is_some() {
                    self.judge_one(other, live.incarnation, Failure::Loss).await;
                }
            }
            if self.knows_more(slot) {
                for (other, live) in self.others_in_sync(slot) {
                    if let Some(why) = lost(&live) {
                        self.judge_one(other, live.incarnation, why).await;
                    }
                }
            }
            if self.judge_one(slot, incarnation, why).await {
                return;
            }
        }
    }

    fn others_in_sync(&self, slot: usize) -> Vec<(usize, Rc<Live>)> {
        let state = self.context.state.borrow();
        let others = state.in_sync().filter(|(other, _)| *other != slot);
        others.map(|(slot, live)| (slot, Rc::clone(live))).collect()
    }

    /// True if an in-sync replica has lost nothing, while others have.
    fn knows_more(&self, slot: usize) -> bool {
        let has_lost = |live: &Rc<Live>| lost(live).is_some();
        let own = self.context.state.borrow().live[slot]
            .as_ref()
            .is_some_and(has_lost);
        !own && self
            .others_in_sync(slot)
            .iter()
            .any(|(_, live)| has_lost(live))
    }

    /// Decides about the failure of one replica. The caller holds `Membership::turn`. Returns false
    /// if others have lost data that this one has while the store was unreachable.
    async fn judge_one(&self, slot: usize, incarnation: u64, why: Failure) -> bool {
        let is_meant = |live: &&Rc<Live>| live.incarnation == incarnation;
        let Some(live) = self.context.state.borrow().live[slot]
            .as_ref()
            .filter(is_meant)
            .cloned()
        else {
            return true;
        };
        if why.is_fenced() {
            // The replica is unchanged, and this holder no longer has the volume.
            self.context.fence(describe(why));
            return true;
        }
        let checked = Checked::before(&live.device.layer);
        let cut = Cut::of_failed(&self.context.state.borrow().record, &live.device.layer, why);
        let reason = cut
            .as_ref()
            .map_or_else(|| describe(why), ToString::to_string);
        if !self.context.state.borrow().is_in_sync(slot) {
            self.replicas.detach(slot);
            if let Some(cut) = &cut
                && let Err(error) = self.replicas.record_cut(slot, cut, &checked).await
            {
                tracing::debug!(slot, %error, "it stays away");
            }
            self.context.emit(VolumeEventKind::ResyncStopped {
                replica: self.context.replica_id(slot),
                device: live.disk.name.clone(),
                why: reason,
            });
            self.context.publish();
            return true;
        }
        if self.others_in_sync(slot).is_empty() {
            if why.is_path() || cut.is_some() {
                self.replicas.detach(slot);
                if let Some(cut) = &cut
                    && self.replicas.mark_cut(slot, cut, &checked).await.is_err()
                {
                    return true;
                }
                self.context
                    .freeze(&format!("{}: {reason}", live.disk.name));
                self.context.publish();
            }
            return true;
        }
        if Mutation::AcknowledgeEarly.is_active() {
            self.replicas.detach(slot);
            self.context.publish();
        }
        let is_awaited = || self.replicas.media.devices.is_awaited(&live.disk.device);
        if Mutation::UnawaitedInSync.is_active() && !is_awaited()
            || Mutation::SilentInSync.is_active() && live.disk.is_silent() && is_awaited()
        {
            self.replicas.detach(slot);
            self.context.publish();
            return true;
        }
        let last_label = live.stamp.get();
        let out = self.replicas.commit_unless(
            || self.knows_more(slot),
            |record| {
                let Some(replica) = record.replica_mut(slot) else {
                    return;
                };
                match cut {
                    Some(_) => replica.fill_anew(reason.clone()),
                    None => {
                        replica.state = ReplicaState::Out { last_label };
                        replica.why = Some(reason.clone());
                    }
                }
            },
            // Detach it so that no label is written to it.
            || self.replicas.let_go_of(slot),
        );
        match out.await {
            Ok(true) => {}
            Ok(false) => return false,
            Err(_) => {
                // Another holder has the volume; this replica gets no further requests.
                self.replicas.let_go_of(slot);
                return true;
            }
        }
        self.replicas.has_left(slot, self.context.replica_id(slot));
        self.context.emit(VolumeEventKind::ReplicaOut {
            replica: self.context.replica_id(slot),
            device: live.disk.name.clone(),
            why: reason,
        });
        true
    }

    /// Checks whether devices are gone, or have lost acknowledged data. Runs after each decision,
    /// and so also checks whether a replaced replica can be removed.
    pub(super) async fn watch_losses(self: Rc<Self>) {
        loop {
            self.look_at_devices();
            let remote = {
                let state = self.context.state.borrow();
                state.live.iter().flatten().any(|live| !live.device.local)
            };
            if remote {
                self.context.core.after(WATCH).await
            } else {
                self.context.signals.watch.notified().await
            }
        }
    }

    pub(super) fn look_at_devices(&self) {
        let present = self.context.state.borrow().present();
        for (slot, live) in present {
            if let Some(why) = lost(&live) {
                self.context.suspect(slot, live.incarnation, why);
            }
        }
        // The obstacle may have ended without a report.
        if self.replicas.replaced().is_some() {
            self.context.signals.resync.notify_one();
        }
    }

    /// Decides about attached replicas that were cut.
    pub(super) async fn judge_cut(&self) {
        let (record, present) = {
            let state = self.context.state.borrow();
            (state.record.clone(), state.present())
        };
        for (slot, live) in present {
            if Cut::of(&record, &live.device.layer).is_some() {
                self.decide(slot, live.incarnation, Failure::Loss).await;
            }
        }
    }
}

/// Returns the failure if the device is gone, or was gone and may have lost unflushed data.
fn lost(live: &Live) -> Option<Failure> {
    let layer = &live.device.layer;
    if layer.is_gone() {
        Some(Failure::Status(Status::Gone))
    } else {
        (layer.losses() != live.losses).then_some(Failure::Loss)
    }
}
