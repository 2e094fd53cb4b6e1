//! The record of a volume in the store: its replicas with their states, and its settings.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

pub use crate::settings::{ReadPolicy, Settings, SettingsPatch, TransportPolicy};

/// Most replicas of one volume.
pub const MAX_REPLICAS: usize = 5;
/// Bytes at the start of each replica's device that belong to the volume: labels and the
/// dirty-region log. The volume's first block follows.
pub const RESERVED: u64 = 1 << 20;

/// The record of one volume. The store has the authoritative copy; every change is a
/// compare-and-swap on [`VolumeRecord::version`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeRecord {
    pub id: Uuid,
    pub name: String,
    /// Bytes per logical block, equal on all replicas' devices.
    pub block_size: u32,
    /// Size of the volume in blocks.
    pub blocks: u64,
    /// log2 of the bytes of a region of the dirty-region log.
    pub region_shift: u8,
    /// Incremented by each opening: a holder with a lower epoch is fenced.
    pub epoch: u64,
    /// The last epoch in which every in-sync replica was labelled before anything was served. A
    /// replica with an older label is not in sync, whatever its recorded state. Decreases only when
    /// an operator chooses an older replica.
    pub serving: u64,
    /// Incremented with every change.
    pub revision: u64,
    /// The holder that has the volume open, or had it when it stopped uncleanly. `None`: never
    /// opened, or closed.
    pub holder: Option<Uuid>,
    /// Stored as `members`, the name of the first versions of the store.
    #[serde(rename = "members", alias = "replicas")]
    pub replicas: Vec<ReplicaRecord>,
    #[serde(default)]
    pub settings: Settings,
    /// The limits at the last opening. `None`: never opened, or by a version that did not store
    /// them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<KeptLimits>,
    /// The record comes from a backup. The labels of the replicas may be later: the next opening
    /// reads them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restored: Option<Restored>,
    /// The contents with which the volume began; it never changes. `None`: none, or a version that
    /// did not store it made the volume.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<Origin>,
}

/// The snapshot of an lvol that had the first contents of a volume. It may be deleted since.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Origin {
    /// The UUID of the snapshot.
    #[schemars(with = "String")]
    pub snapshot: Uuid,
    /// Its name when the volume was made.
    pub name: String,
}

/// The origin of a record that was restored from a backup.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Restored {
    /// The version that the record had in the backup.
    #[serde(flatten)]
    pub at: Stamp,
    /// The replicas that the operator named lost. Their labels are not waited for, and they are not
    /// in sync, whatever other labels say.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lost: Vec<Uuid>,
}

/// The limits shown for a volume before its replicas are present. Whether they have a cache is not
/// stored: a replica that cannot be inspected may have one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptLimits {
    pub max_blocks: u32,
    pub max_unmap_blocks: u64,
    pub atomic_blocks: u32,
    #[serde(rename = "lend_blocks")]
    pub zero_copy_blocks: u32,
    pub read_only: bool,
}

/// One replica of a volume, in its record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplicaRecord {
    pub id: Uuid,
    /// Its index in the volume's tables, below [`MAX_REPLICAS`]; no two replicas share one.
    pub slot: u8,
    /// The block device's name.
    pub device: String,
    /// The node that has the device. `None`: this machine, or a device of no node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<Uuid>,
    /// The name that the device has on that node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_device: Option<String>,
    pub state: ReplicaState,
    /// The replica to remove as soon as this one is in sync.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replaces: Option<Uuid>,
    /// The operator took the replica out of service. It does not return automatically.
    #[serde(default)]
    pub offline: bool,
    /// Its device was truncated, without another replica as a source. The data beyond the end is
    /// lost, and the replica is not used until an operator allows it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub cut: bool,
    /// The reason why it is not in sync, as text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// Which blocks of a replica are valid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum ReplicaState {
    /// It has every acknowledged write.
    InSync,
    /// It has every write acknowledged before it left; the dirty-region log has the regions of
    /// later writes.
    Out {
        /// The stamp of its label when it left. With an older label its contents are not trusted.
        last_label: Stamp,
    },
    /// It was never in sync, or its contents are not trusted. Regions below the watermark have been
    /// copied, except those in the dirty-region log.
    Filling {
        watermark: u64,
        /// The stamp of its label, as in [`ReplicaState::Out`].
        #[serde(default)]
        last_label: Stamp,
    },
}

/// The logical time of a label write. Compared by epoch, then by revision.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize)]
pub struct Stamp {
    pub epoch: u64,
    pub revision: u64,
}

/// The JSON of a stored record, with the names that callers know: `replicas` for `members`.
pub fn shown(mut record: serde_json::Value) -> serde_json::Value {
    if let Some(object) = record.as_object_mut()
        && let Some(replicas) = object.remove("members")
    {
        object.insert("replicas".into(), replicas);
    }
    record
}

impl VolumeRecord {
    /// The version that a compare-and-swap compares.
    pub fn version(&self) -> Stamp {
        Stamp {
            epoch: self.epoch,
            revision: self.revision,
        }
    }

    pub fn replica(&self, slot: usize) -> Option<&ReplicaRecord> {
        self.replicas.iter().find(|m| usize::from(m.slot) == slot)
    }

    pub fn replica_mut(&mut self, slot: usize) -> Option<&mut ReplicaRecord> {
        self.replicas
            .iter_mut()
            .find(|m| usize::from(m.slot) == slot)
    }

    /// Blocks of a region of the dirty-region log.
    pub fn region_blocks(&self) -> u64 {
        (1u64 << self.region_shift) / u64::from(self.block_size)
    }

    pub fn regions(&self) -> u64 {
        self.blocks.div_ceil(self.region_blocks())
    }

    pub fn in_sync(&self) -> impl Iterator<Item = &ReplicaRecord> {
        self.replicas
            .iter()
            .filter(|m| m.state == ReplicaState::InSync)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Goal: daemons of any version read each other's records, and callers see `replicas`. Method:
    /// a record as an earlier version stored it.
    #[test]
    fn the_store_keeps_the_name_members() {
        let id = Uuid::from_u128(1);
        let stored = json!({
            "id": id, "name": "v", "block_size": 512, "blocks": 8, "region_shift": 20, "epoch": 1,
            "serving": 1, "revision": 2, "holder": null, "settings": Settings::default(),
            "members": [{
                "id": id, "slot": 0, "device": "a", "state": { "state": "in_sync" },
                "offline": false,
            }],
        });
        let record: VolumeRecord = serde_json::from_value(stored.clone()).unwrap();
        assert_eq!(record.replicas[0].device, "a");
        assert_eq!(serde_json::to_value(&record).unwrap(), stored);
        let shown = shown(stored.clone());
        assert_eq!(shown["replicas"], stored["members"]);
        assert_eq!(shown.get("members"), None);
        let again: VolumeRecord = serde_json::from_value(shown).unwrap();
        assert_eq!(again, record);
    }
}
