//! The report of one node to a rebuild of the store: its copy of the keys, and the labels on its
//! devices.

use nacre_cluster_core::NodeId;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::copy::Copy;
use crate::keys::Description;

/// The report of one node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Found {
    pub v: u64,
    pub node: Uuid,
    pub description: Description,
    /// The cluster that the data directory belongs to. `None`: the node has joined none.
    pub joined: Option<Uuid>,
    /// The part of the node's copy that concerns the node. `None`: it has none.
    pub copy: Option<Copy>,
    /// The reason why the copy could not be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copy_error: Option<String>,
    /// The volumes of the whole copy.
    pub volumes: Vec<Uuid>,
    /// The devices that have a label, even an unreadable one.
    pub devices: Vec<Device>,
}

/// A local block device of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    pub name: String,
    /// Its aliases and its UUID.
    #[serde(default)]
    pub aliases: Vec<String>,
    pub label: LabelRead,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LabelRead {
    Label(LabelFacts),
    /// With the reason.
    Unreadable(String),
}

/// The newer one of the two labels of a device; `replica` is the replica on the device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LabelFacts {
    pub volume: Uuid,
    pub name: String,
    pub replica: Uuid,
    pub epoch: u64,
    pub revision: u64,
    pub sequence: u64,
    pub block_size: u32,
    pub blocks: u64,
    pub region_shift: u8,
    pub replicas: Vec<LabelReplicaFacts>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LabelReplicaFacts {
    pub id: Uuid,
    pub slot: u8,
    pub state: ReplicaFact,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReplicaFact {
    InSync,
    Out,
    /// It was never in sync, or its contents are not trusted: a full resync copies the volume to
    /// it.
    Filling,
}

impl LabelFacts {
    /// The version of the volume's record when the label was written: epoch and revision.
    pub fn stamp(&self) -> (u64, u64) {
        (self.epoch, self.revision)
    }

    /// The state that the label gives a replica.
    pub(super) fn state_of(&self, replica: Uuid) -> Option<ReplicaFact> {
        let mut replicas = self.replicas.iter();
        let found = replicas.find(|one| one.id == replica);
        found.map(|one| one.state)
    }
}

impl Device {
    pub(super) fn is(&self, name: &str) -> bool {
        self.name == name || self.aliases.iter().any(|alias| alias == name)
    }

    pub(super) fn label(&self) -> Option<&LabelFacts> {
        match &self.label {
            LabelRead::Label(label) => Some(label),
            LabelRead::Unreadable(_) => None,
        }
    }
}

impl Found {
    /// The report, with the part of `copy` that concerns the node: its replicas, the volumes that
    /// it shows, and the volumes of labels.
    pub fn new(
        node: NodeId,
        description: Description,
        joined: Option<Uuid>,
        copy: Result<Option<Copy>, String>,
        devices: Vec<Device>,
    ) -> Self {
        let (mut copy, copy_error) = match copy {
            Ok(copy) => (copy, None),
            Err(why) => (None, Some(why)),
        };
        let mut volumes = Vec::new();
        if let Some(copy) = &mut copy {
            volumes = copy.volumes.keys().copied().collect();
            let labelled: Vec<Uuid> = devices
                .iter()
                .filter_map(|device| Some(device.label()?.volume))
                .collect();
            copy.keep_of(node, &labelled);
        }
        Self {
            v: crate::keys::FORMAT,
            node: node.0,
            description,
            joined,
            copy,
            copy_error,
            volumes,
            devices,
        }
    }

    /// True if the device is an export of this volume, by the copy.
    pub(super) fn exports(&self, device: &Device, volume: Uuid) -> bool {
        self.export_of(device, volume).is_some()
    }

    /// The id of the device's export for a volume.
    pub(super) fn export_of(&self, device: &Device, volume: Uuid) -> Option<Uuid> {
        let exports = &self.copy.as_ref()?.exports;
        let is_it = |value: &serde_json::Value| {
            let name = value["device"].as_str();
            let is_wanted = value["want"] != "gone";
            let is_of_volume = value["volume"] == *volume.to_string();
            is_wanted && is_of_volume && name.is_some_and(|name| device.is(name))
        };
        let found = exports.iter().find(|(_, value)| is_it(value));
        found.map(|(id, _)| *id)
    }
}
