//! Opening a volume whose record comes from a backup.
//!
//! ```text
//!   labels of all replicas ─▶ the last one that a replica in sync wrote ─▶ later than the record?
//!                               no: the record stands      yes: which replicas are in sync, by it
//! ```
//!
//! A membership change is in the labels of the present replicas before the I/O that depends on it
//! is acknowledged. So the last label of a replica in sync knows which replicas have every
//! acknowledged write. Which label is the last one is known only when all are read: an absent
//! replica refuses the opening, unless the operator named it lost at the restore.

use uuid::Uuid;

use super::open::{Opener, failed};
use crate::format::{Label, LabelError, LabelState};
use crate::handle::VolumeError;
use crate::model::{ReplicaRecord, ReplicaState, Restored, VolumeRecord};

/// Epochs that the lost store may have given since the last label.
pub(super) const EPOCHS: u64 = 1000;

impl Opener {
    /// The record to open, by the labels of the replicas.
    pub(super) async fn after_restore(
        &self,
        record: &VolumeRecord,
        restored: &Restored,
    ) -> Result<VolumeRecord, VolumeError> {
        let refused = |replica: &ReplicaRecord, why: String| VolumeError::Restored {
            name: record.name.clone(),
            device: replica.device.clone(),
            why,
        };
        let mut labels = Vec::new();
        let is_lost = |replica: &ReplicaRecord| restored.lost.contains(&replica.id);
        for replica in record.replicas.iter().filter(|one| !is_lost(one)) {
            let read = self.label_of_replica(record, replica).await;
            let label = read.map_err(|why| refused(replica, why.to_string()))?;
            if let Some(label) = &label
                && label.region_shift != record.region_shift
            {
                let why = "its regions have another size than those of the backup";
                return Err(refused(replica, why.to_owned()));
            }
            labels.extend(label);
        }
        let next = brought_forward(record, restored, &labels);
        next.map_err(|(replica, why)| refused(replica, why.to_owned()))
    }

    /// `None`: its device has no label of this replica. A label that cannot be read may be the last
    /// one.
    async fn label_of_replica(
        &self,
        record: &VolumeRecord,
        replica: &ReplicaRecord,
    ) -> Result<Option<Label>, VolumeError> {
        let (device, disk) = self.media.claim_of_any_size(record, &replica.device)?;
        let read = self.media.read_label(&disk).await;
        self.media.disks.forget(&disk);
        drop(device);
        let label = match read.map_err(|why| failed(&replica.device, why))? {
            Ok((label, _)) => label,
            Err(LabelError::NotALabel | LabelError::Foreign) => return Ok(None),
            Err(error) => {
                return Err(VolumeError::Io {
                    device: replica.device.clone(),
                    what: error.to_string(),
                });
            }
        };
        let is_its = (label.volume, label.replica) == (record.id, replica.id);
        Ok(is_its.then_some(label))
    }
}

/// The record after the last label. An error: the replicas have changed since the backup, so that
/// others than those of the record may have later labels.
fn brought_forward<'a>(
    record: &'a VolumeRecord,
    restored: &Restored,
    labels: &[Label],
) -> Result<VolumeRecord, (&'a ReplicaRecord, &'static str)> {
    let Restored { at, lost } = restored;
    let mut next = record.clone();
    next.restored = None;
    let all = labels.iter().map(|label| label.stamp);
    let last = all.max().unwrap_or_default();
    next.epoch = record.epoch.max(last.epoch) + EPOCHS;
    next.revision = record.revision.max(last.revision);
    let own = |label: &Label| state(label, label.replica);
    let in_sync = |label: &&Label| own(label) == Some(LabelState::InSync);
    let by_age = |label: &&Label| (label.stamp, label.sequence);
    let known = labels.iter().filter(in_sync).max_by_key(by_age);
    let is_lost = |replica: &ReplicaRecord| lost.contains(&replica.id);
    if let Some(known) = known.filter(|known| known.stamp > *at) {
        next.serving = known.stamp.epoch;
        // The volume may have grown.
        next.blocks = record.blocks.max(known.blocks);
        for replica in next.replicas.iter_mut().filter(|one| !is_lost(one)) {
            follow(replica, state(known, replica.id));
        }
        let is_known = |id| record.replicas.iter().any(|one| one.id == id);
        let mut added = known.replicas.iter().filter(|one| !is_known(one.id));
        if added.any(|one| one.state == LabelState::InSync)
            && let Some(replica) = record.replicas.iter().find(|one| one.id == known.replica)
        {
            return Err((
                replica,
                "it names a replica that was added after the backup",
            ));
        }
    } else {
        // Replicas in sync were lost since: the others say so of themselves.
        let mut later = labels.iter().filter(|label| label.stamp > *at);
        for replica in next.replicas.iter_mut().filter(|one| !is_lost(one)) {
            if let Some(label) = later.clone().find(|label| label.replica == replica.id) {
                follow(replica, own(label));
            }
        }
        if next.in_sync().next().is_none()
            && let Some(label) = later.next()
            && let Some(replica) = record.replicas.iter().find(|one| one.id == label.replica)
        {
            return Err((replica, "it was not in sync any more after the backup"));
        }
    }
    // A replica in sync has a label. If it was removed, and its device is used otherwise, others
    // have gone on without it.
    let is_labelled = |id| labels.iter().any(|label| label.replica == id);
    let mut in_sync = next.in_sync();
    let unlabelled = in_sync.find(|one| !is_lost(one) && !is_labelled(one.id));
    let unlabelled = unlabelled.map(|one| one.id);
    drop(in_sync);
    match record
        .replicas
        .iter()
        .find(|one| Some(one.id) == unlabelled)
    {
        Some(replica) => Err((replica, "its device has no label of this replica")),
        None => Ok(next),
    }
}

/// Gives the replica the state that the last label has for it. A replica in sync also has a label
/// of the last epoch itself, as after each opening.
fn follow(replica: &mut ReplicaRecord, state: Option<LabelState>) {
    match state {
        Some(LabelState::InSync) => {
            replica.state = ReplicaState::InSync;
            replica.offline = false;
            replica.why = None;
        }
        Some(LabelState::Out | LabelState::Filling) => {
            replica.fill_anew("it was not in sync when the store was lost".into());
        }
        None => {
            // Its device may have another use since.
            replica.fill_anew("it was no replica any more when the store was lost".into());
            replica.offline = true;
        }
    }
}

pub(super) fn state(label: &Label, replica: Uuid) -> Option<LabelState> {
    let found = label.replicas.iter().find(|one| one.id == replica);
    found.map(|one| one.state)
}

#[cfg(test)]
mod tests {
    use super::super::labels::label_of;
    use super::*;
    use crate::store::suite;

    /// The record of a volume whose replicas are all in sync, and its origin.
    fn backup() -> (VolumeRecord, Restored) {
        let mut record = suite::record("ant");
        for replica in &mut record.replicas {
            replica.state = ReplicaState::InSync;
            replica.offline = false;
        }
        let (at, lost) = (record.version(), Vec::new());
        let restored = Restored { at, lost };
        record.restored = Some(restored.clone());
        (record, restored)
    }

    fn labels(record: &VolumeRecord, slots: &[usize]) -> Vec<Label> {
        let label = |slot: &usize| label_of(record, *slot, 1, false).expect("a replica");
        slots.iter().map(label).collect()
    }

    fn states(record: &VolumeRecord) -> Vec<(bool, bool)> {
        let replicas = record.replicas.iter();
        let state = |one: &ReplicaRecord| (one.state == ReplicaState::InSync, one.offline);
        replicas.map(state).collect()
    }

    const IN: (bool, bool) = (true, false);
    const EMPTY: (bool, bool) = (false, false);
    const OFFLINE: (bool, bool) = (false, true);

    /// Goal: the last label of a replica in sync decides, whatever others say; and a replica that
    /// it does not know is not overwritten.
    #[test]
    fn the_last_label_of_a_replica_in_sync_decides() {
        let (record, restored) = backup();
        let mut later = record.clone();
        (later.epoch, later.revision) = (restored.at.epoch + 3, restored.at.revision + 9);
        later.replicas[1].fill_anew(String::new());
        // Replicas 0 and 2 wrote labels without replica 1, whose label is older.
        let mut all = labels(&later, &[0, 2]);
        all.extend(labels(&record, &[1]));
        let next = brought_forward(&record, &restored, &all).expect("known");
        assert_eq!(states(&next), [IN, EMPTY, IN]);
        assert_eq!(next.serving, later.epoch);
        assert_eq!(next.restored, None);
        assert!(next.version() > later.version());

        // Then replica 1 was filled, and had the last label of all: it is not in sync by it.
        let mut filling = later.clone();
        filling.revision += 1;
        let mut last = all.clone();
        last[2] = labels(&filling, &[1]).remove(0);
        let next = brought_forward(&record, &restored, &last).expect("known");
        assert_eq!(states(&next), [IN, EMPTY, IN]);

        // Replica 2 was replaced after the backup, and the volume grew.
        let mut replaced = later.clone();
        replaced.revision += 2;
        replaced.blocks += 8;
        replaced.replicas.remove(2);
        let next = brought_forward(&record, &restored, &labels(&replaced, &[0])).expect("known");
        assert_eq!(states(&next), [IN, EMPTY, OFFLINE]);
        assert_eq!(next.blocks, replaced.blocks);
    }

    /// Goal: a record that is as new as the labels stands, and its epoch is above all that the lost
    /// store may have given.
    #[test]
    fn a_record_as_new_as_its_labels_stands() {
        let (mut record, restored) = backup();
        let written = labels(&record, &[0, 1, 2]);
        // Openings that did not succeed.
        record.epoch += 7;
        let next = brought_forward(&record, &restored, &written).expect("known");
        assert_eq!(states(&next), [IN, IN, IN]);
        assert_eq!(next.serving, record.serving);
        assert_eq!(next.epoch, record.epoch + EPOCHS);
    }

    /// Goal: where replicas that the backup does not know may have later writes, the volume is not
    /// served.
    #[test]
    fn replicas_that_the_backup_does_not_know() {
        let (record, restored) = backup();
        let refused = |labels: &[Label]| {
            let (replica, why) = brought_forward(&record, &restored, labels).expect_err("refused");
            (replica.slot, why)
        };
        // Replica 1 was removed, and its device is used otherwise.
        let unlabelled = refused(&labels(&record, &[0, 2]));
        assert_eq!(unlabelled, (1, "its device has no label of this replica"));
        let mut later = record.clone();
        later.revision += 5;
        let unlabelled = refused(&labels(&later, &[0, 2]));
        assert_eq!(unlabelled.0, 1);
        // Replica 2 was replaced by one that is in sync.
        later.replicas[2].id = Uuid::from_u128(99);
        let added = refused(&labels(&later, &[0, 1]));
        assert_eq!(
            added,
            (1, "it names a replica that was added after the backup")
        );
        // One that is not in sync has no writes that others lack.
        later.replicas[2].fill_anew(String::new());
        let next = brought_forward(&record, &restored, &labels(&later, &[0, 1])).expect("known");
        assert_eq!(states(&next), [IN, IN, OFFLINE]);
    }

    /// Goal: a replica that left before the backup, and returned after it, may be the only one with
    /// the last writes: its label counts, and it is in service again.
    #[test]
    fn a_replica_that_returned_after_the_backup() {
        let (mut record, restored) = backup();
        let there = record.clone();
        record.replicas[1].fill_anew("it was taken out".into());
        record.replicas[1].offline = true;
        let mut later = there.clone();
        later.revision += 5;
        // It was in sync with replica 0, which failed before it.
        let mut last = later.clone();
        last.revision += 1;
        last.replicas[0].fill_anew(String::new());
        last.replicas[2].fill_anew(String::new());
        let mut all = labels(&later, &[0, 2]);
        all.extend(labels(&last, &[1]));
        let next = brought_forward(&record, &restored, &all).expect("known");
        assert_eq!(states(&next), [EMPTY, IN, EMPTY]);
    }

    /// Goal: a lost replica is not in sync, although labels say so, and the volume goes on with the
    /// last of the others.
    #[test]
    fn a_lost_replica_stays_out() {
        let (mut record, mut restored) = backup();
        let mut later = record.clone();
        later.revision += 5;
        restored.lost = vec![record.replicas[1].id];
        record.replicas[1].fill_anew("it is lost".into());
        let next = brought_forward(&record, &restored, &labels(&later, &[0, 2])).expect("known");
        assert_eq!(states(&next), [IN, EMPTY, IN]);
    }

    /// Goal: where only a lost replica was in sync at the end, no other one counts as in sync by
    /// the backup.
    #[test]
    fn only_the_lost_replica_was_in_sync() {
        let (mut record, mut restored) = backup();
        let mut later = record.clone();
        later.revision += 5;
        for slot in [0, 2] {
            later.replicas[slot].fill_anew(String::new());
        }
        restored.lost = vec![record.replicas[1].id];
        record.replicas[1].fill_anew("it is lost".into());
        let said = labels(&later, &[0, 2]);
        let (replica, why) = brought_forward(&record, &restored, &said).expect_err("refused");
        assert_eq!(replica.slot, 0);
        assert_eq!(why, "it was not in sync any more after the backup");
        // One of them has not written a label since: it is as the backup says.
        let mut said = said;
        said[0] = labels(&record, &[0]).remove(0);
        let next = brought_forward(&record, &restored, &said).expect("known");
        assert_eq!(states(&next), [IN, EMPTY, EMPTY]);
    }
}
