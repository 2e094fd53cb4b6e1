//! Replicas that only their label protects: the holder checks the label at intervals for another
//! holder's.
//!
//! ```text
//! previous holder     look ──1 s──▶ look ──1 s──▶ look: a later epoch, fenced
//! next holder               label ├──────── deadline and 2 s ────────┤ reads the log, serves
//! ```
//!
//! A look in flight while the later label is written ends within the volume's deadline, and the
//! next look sees that label. So if two holders reach the medium, the later one serves after the
//! earlier one has stopped.
//!
//! A holder that shares no medium stays asleep when idle: replicas on this machine are checked
//! while regions are dirty, and before one is made dirty. No other holder on the machine opens them
//! anyway.

use std::rc::Rc;
use std::time::Duration;

use futures_util::future::join_all;
use nacre_bdev::Bdev;

use super::Control;
use super::disk::Disk;
use super::fence::WATCH;
use super::state::Live;
use crate::format::LabelError;
use crate::model::VolumeRecord;
use crate::shared::Failure;

impl Control {
    /// The wait of a holder that takes a volume over from one that learns of it by a label: until
    /// that one has looked.
    pub(super) fn until_seen(&self) -> Duration {
        self.deadline() + WATCH * 2
    }

    /// Whether it is the label alone that says whose the member is.
    pub(super) fn is_by_label(live: &Live) -> bool {
        !live.device.layer.reserves()
    }

    /// Members whose labels are to be looked at.
    pub(super) fn exposed(&self) -> Vec<(usize, Rc<Live>)> {
        let state = self.state.borrow();
        let calm = state.fenced.is_some() || self.shared.regions.dirty_count() == 0;
        let exposed = |live: &Live| Control::is_by_label(live) && !(live.device.local && calm);
        let present = state.present().into_iter();
        present.filter(|(_, live)| exposed(live)).collect()
    }

    /// Before the first write of an idle volume: checks the replicas that were not checked for a
    /// while.
    pub(super) async fn look_before_writing(&self, members: &[(usize, Rc<Live>)]) {
        let late = |live: &Live| self.core.now().since(live.looked.get()) >= WATCH;
        let due = members
            .iter()
            .filter(|(_, live)| Control::is_by_label(live) && late(live));
        join_all(due.map(|(slot, live)| self.look_at_label(*slot, live))).await;
    }

    pub(super) async fn look_at_label(&self, slot: usize, live: &Rc<Live>) {
        let record = self.state.borrow().record.clone();
        match self.is_still_ours(slot, &live.disk, &record).await {
            Ok(()) => live.looked.set(self.core.now()),
            // Another holder is another holder, whatever has become of the member here.
            Err(Failure::Fenced) => self.heed(Failure::Fenced),
            Err(Failure::Taken) => self.suspect(slot, live.incarnation, Failure::Taken),
            // The code that watches its I/O and its connection handles that.
            Err(_) => {}
        }
    }

    /// True unless a replica's label belongs to a later holder, or to another volume. An unreadable
    /// label proves nothing: it may be about to be written.
    pub(super) async fn is_still_ours(
        &self,
        slot: usize,
        disk: &Disk,
        record: &VolumeRecord,
    ) -> Result<(), Failure> {
        let Some(member) = record.member(slot).map(|member| member.id) else {
            return Ok(());
        };
        let (volume, found, epoch) = match self.read_label(disk).await? {
            Ok((label, _)) => (label.volume, label.member, label.stamp.epoch),
            Err(LabelError::TwoOwners) => return Err(Failure::Taken),
            Err(_) => return Ok(()),
        };
        if (volume, found) != (record.id, member) {
            let device = &disk.name;
            tracing::warn!(device, %volume, "a replica has become another one");
            return Err(Failure::Taken);
        }
        if epoch > record.epoch {
            let (device, own) = (&disk.name, record.epoch);
            tracing::warn!(
                device,
                epoch,
                own,
                "the label of a replica belongs to a newer owner"
            );
            Err(Failure::Fenced)
        } else {
            Ok(())
        }
    }
}
