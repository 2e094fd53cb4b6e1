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
use crate::format::{Label, LabelState};
use crate::handle::VolumeError;
use crate::model::{ReplicaRecord, ReplicaState, Stamp, VolumeRecord};

/// Epochs that the lost store may have given since the last label.
const EPOCHS: u64 = 1000;

impl Opener {
    /// The record to open, by the labels of the replicas. `at`: its version in the backup.
    pub(super) async fn after_restore(
        &self,
        record: &VolumeRecord,
        at: Stamp,
    ) -> Result<VolumeRecord, VolumeError> {
        let refused = |replica: &ReplicaRecord, why: String| VolumeError::Restored {
            name: record.name.clone(),
            device: replica.device.clone(),
            why,
        };
        let mut labels = Vec::new();
        for replica in record.replicas.iter().filter(|one| is_needed(one)) {
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
        let next = brought_forward(record, at, &labels);
        next.map_err(|(replica, why)| refused(replica, why.to_owned()))
    }

    /// `None`: its device has no label of this replica.
    async fn label_of_replica(
        &self,
        record: &VolumeRecord,
        replica: &ReplicaRecord,
    ) -> Result<Option<Label>, VolumeError> {
        let (device, disk) = self.media.claim_of_any_size(record, &replica.device)?;
        let read = self.media.read_label(&disk).await;
        self.media.disks.forget(&disk);
        drop(device);
        let read = read.map_err(|why| failed(&replica.device, why))?;
        let label = read.ok().map(|(label, _)| label);
        Ok(label.filter(|label| (label.volume, label.replica) == (record.id, replica.id)))
    }
}

/// False: its contents do not count.
fn is_needed(replica: &ReplicaRecord) -> bool {
    !replica.is_empty() && !replica.offline
}

/// The record after the last label. `at`: the version of the record in the backup. An error: the
/// replicas have changed since, so that others than those of the record may have later labels.
fn brought_forward<'a>(
    record: &'a VolumeRecord,
    at: Stamp,
    labels: &[Label],
) -> Result<VolumeRecord, (&'a ReplicaRecord, &'static str)> {
    let mut next = record.clone();
    next.restored = None;
    let all = labels.iter().map(|label| label.stamp);
    let last = all.max().unwrap_or_default();
    next.epoch = record.epoch.max(last.epoch) + EPOCHS;
    next.revision = record.revision.max(last.revision);
    let in_sync = |label: &&Label| state(label, label.replica) == Some(LabelState::InSync);
    let by_age = |label: &&Label| (label.stamp, label.sequence);
    let known = labels.iter().filter(in_sync).max_by_key(by_age);
    if let Some(known) = known.filter(|known| known.stamp > at) {
        next.serving = known.stamp.epoch;
        // The volume may have grown.
        next.blocks = record.blocks.max(known.blocks);
        for replica in &mut next.replicas {
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
    }
    // A replica in sync has a label. If it was removed, and its device is used otherwise, others
    // have gone on without it.
    let is_labelled = |id| labels.iter().any(|label| label.replica == id);
    let mut in_sync = next.in_sync();
    let unlabelled = in_sync.find(|one| is_needed(one) && !is_labelled(one.id));
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

fn state(label: &Label, replica: Uuid) -> Option<LabelState> {
    let found = label.replicas.iter().find(|one| one.id == replica);
    found.map(|one| one.state)
}

#[cfg(test)]
mod tests {
    use super::super::labels::label_of;
    use super::*;
    use crate::store::suite;

    /// The record of a volume whose replicas are all in sync, and their labels.
    fn backup() -> (VolumeRecord, Stamp) {
        let mut record = suite::record("ant");
        for replica in &mut record.replicas {
            replica.state = ReplicaState::InSync;
            replica.offline = false;
        }
        record.restored = Some(record.version());
        let at = record.version();
        (record, at)
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
        let (record, at) = backup();
        let mut later = record.clone();
        (later.epoch, later.revision) = (at.epoch + 3, at.revision + 9);
        later.replicas[1].fill_anew(String::new());
        // Replicas 0 and 2 wrote labels without replica 1, whose label is older.
        let mut all = labels(&later, &[0, 2]);
        all.extend(labels(&record, &[1]));
        let next = brought_forward(&record, at, &all).expect("known");
        assert_eq!(states(&next), [IN, EMPTY, IN]);
        assert_eq!((next.serving, next.restored), (later.epoch, None));
        assert!(next.version() > later.version());

        // Then replica 1 was filled, and had the last label of all: it is not in sync by it.
        let mut filling = later.clone();
        filling.revision += 1;
        let mut last = all.clone();
        last[2] = labels(&filling, &[1]).remove(0);
        let next = brought_forward(&record, at, &last).expect("known");
        assert_eq!(states(&next), [IN, EMPTY, IN]);

        // Replica 2 was replaced after the backup, and the volume grew.
        let mut replaced = later.clone();
        replaced.revision += 2;
        replaced.blocks += 8;
        replaced.replicas.remove(2);
        let next = brought_forward(&record, at, &labels(&replaced, &[0])).expect("known");
        assert_eq!(states(&next), [IN, EMPTY, OFFLINE]);
        assert_eq!(next.blocks, replaced.blocks);
    }

    /// Goal: a record that is as new as the labels stands, and its epoch is above all that the lost
    /// store may have given.
    #[test]
    fn a_record_as_new_as_its_labels_stands() {
        let (mut record, at) = backup();
        let written = labels(&record, &[0, 1, 2]);
        // Openings that did not succeed.
        record.epoch += 7;
        let next = brought_forward(&record, at, &written).expect("known");
        assert_eq!(states(&next), [IN, IN, IN]);
        assert_eq!(next.serving, record.serving);
        assert_eq!(next.epoch, record.epoch + EPOCHS);
    }

    /// Goal: where replicas that the backup does not know may have later writes, the volume is not
    /// served.
    #[test]
    fn replicas_that_the_backup_does_not_know() {
        let (record, at) = backup();
        let refused = |labels: &[Label]| {
            let (replica, why) = brought_forward(&record, at, labels).expect_err("refused");
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
        let next = brought_forward(&record, at, &labels(&later, &[0, 1])).expect("known");
        assert_eq!(states(&next), [IN, IN, OFFLINE]);
    }
}
