//! The reports of all nodes, and questions about them for the decision of a rebuild.

use std::collections::{BTreeMap, BTreeSet};

use nacre_cluster_core::NodeId;
use serde_json::{Value, json};
use uuid::Uuid;

use super::copy::{CopiedRecord, Copy};
use super::error::{Note, RebuildError};
use super::facts::{Device, Found, LabelFacts, LabelRead};

/// Devices and nodes that the operator named.
#[derive(Debug, Default)]
pub(super) struct NamedLost {
    pub(super) nodes: BTreeSet<Uuid>,
    pub(super) devices: BTreeSet<(Uuid, String)>,
    pub(super) replicas: BTreeSet<Uuid>,
}

/// A device with a label.
#[derive(Debug, Clone, Copy)]
pub(super) struct Labelled<'a> {
    pub(super) found: &'a Found,
    pub(super) device: &'a Device,
    pub(super) label: &'a LabelFacts,
}

/// All reports.
pub(super) struct NodeReports<'a> {
    pub(super) all: &'a BTreeMap<NodeId, Found>,
    /// The newest one first, with its node.
    pub(super) copies: Vec<(&'a Found, &'a Copy)>,
    pub(super) lost: NamedLost,
    pub(super) places: BTreeMap<Uuid, Vec<Labelled<'a>>>,
}

impl<'a> NodeReports<'a> {
    pub(super) fn new(all: &'a BTreeMap<NodeId, Found>) -> Self {
        let copies = all.values();
        let copies = copies.filter_map(|found| Some((found, found.copy.as_ref()?)));
        let mut copies: Vec<_> = copies.collect();
        // Revisions of one store compare. The last copy of each store shows which store is later.
        let mut last: BTreeMap<Option<Uuid>, u64> = BTreeMap::new();
        for (_, copy) in &copies {
            let of_store = last.entry(copy.meta.restored).or_default();
            *of_store = copy.created.max(*of_store);
        }
        let age = |copy: &Copy| (last[&copy.meta.restored], copy.revision, copy.created);
        copies.sort_by_key(|(_, copy)| std::cmp::Reverse(age(copy)));
        let mut places: BTreeMap<Uuid, Vec<Labelled<'_>>> = BTreeMap::new();
        for found in all.values() {
            for device in &found.devices {
                if let Some(label) = device.label() {
                    let of_volume = places.entry(label.volume).or_default();
                    of_volume.push(Labelled {
                        found,
                        device,
                        label,
                    });
                }
            }
        }
        Self {
            all,
            copies,
            lost: NamedLost::default(),
            places,
        }
    }

    /// The one cluster of all nodes. `None`: no node has joined one.
    pub(super) fn cluster(&self) -> Result<Option<Uuid>, RebuildError> {
        let mut found: BTreeMap<Uuid, Vec<String>> = BTreeMap::new();
        for report in self.all.values() {
            let of_copy = report.copy.as_ref().map(|copy| copy.meta.id);
            let ids: BTreeSet<Uuid> = of_copy.into_iter().chain(report.joined).collect();
            for id in ids {
                found.entry(id).or_default().push(self.name_of(report.node));
            }
        }
        match found.len() {
            0 | 1 => Ok(found.into_keys().next()),
            _ => Err(RebuildError::TwoClusters {
                found: found.into_iter().collect(),
            }),
        }
    }

    /// The keys of all nodes.
    pub(super) fn nodes(&self) -> BTreeMap<Uuid, Value> {
        let newest = self.copies.first();
        let mut nodes = newest.map_or_else(BTreeMap::new, |(_, copy)| copy.nodes.clone());
        for found in self.all.values() {
            let value = nodes.entry(found.node).or_insert_with(|| json!({ "v": 1 }));
            if let (Some(node), Value::Object(described)) =
                (value.as_object_mut(), json!(found.description))
            {
                node.extend(described);
            }
        }
        nodes
    }

    /// The name of a node, or its id.
    pub(super) fn name_of(&self, node: Uuid) -> String {
        let reported = self.all.get(&NodeId(node));
        let reported = reported.map(|found| found.description.name.clone());
        let mut copied = self.copies.iter().filter_map(|(_, copy)| {
            let name = copy.nodes.get(&node)?["name"].as_str()?;
            Some(name.to_owned())
        });
        let name = reported.filter(|name| !name.is_empty());
        name.or_else(|| copied.next())
            .unwrap_or_else(|| node.to_string())
    }

    pub(super) fn has_reported(&self, node: Uuid) -> bool {
        self.all.contains_key(&NodeId(node))
    }

    pub(super) fn device_text(&self, node: Uuid, device: &str) -> String {
        format!("{}:{device}", self.name_of(node))
    }

    /// All nodes that a report names.
    fn known_nodes(&self) -> BTreeSet<Uuid> {
        let mut known: BTreeSet<Uuid> = self.all.keys().map(|node| node.0).collect();
        for (_, copy) in &self.copies {
            known.extend(copy.nodes.keys());
            let replicas = copy.volumes.values().flat_map(CopiedRecord::replicas);
            known.extend(replicas.filter_map(|replica| id(&replica["node"])));
        }
        known
    }

    /// Reads the nodes, devices and replicas that the operator names lost.
    pub(super) fn name_lost(&mut self, without: &[String]) -> Result<(), RebuildError> {
        // Names that do not fit hide none that do.
        let mut first = None;
        let mut refuse = |name: &str, why: String| {
            let name = name.to_owned();
            first.get_or_insert(RebuildError::Without { name, why });
        };
        let known = self.known_nodes();
        // A node with a new data directory may have the name of the lost one.
        let node = |text: &str| {
            let is_it = |node: &Uuid| node.to_string() == text || self.name_of(*node) == text;
            let named = known.iter().copied().filter(is_it);
            named.min_by_key(|node| self.has_reported(*node))
        };
        let names = || {
            let names: Vec<String> = known.iter().map(|node| self.name_of(*node)).collect();
            names.join(", ")
        };
        let mut lost = NamedLost::default();
        for text in without {
            if let Some(found) = node(text) {
                if self.has_reported(found) {
                    let why = "the node has reported, so it is there: leave this option out";
                    refuse(text, why.to_owned());
                    continue;
                }
                lost.nodes.insert(found);
            } else if let Some((name, device)) = text.split_once(':') {
                let Some(found) = node(name) else {
                    refuse(
                        text,
                        format!("there is no such node; there are {}", names()),
                    );
                    continue;
                };
                if !self.has_device(found, device) {
                    let why = "no label and no copy has a replica on this device".to_owned();
                    refuse(text, why);
                    continue;
                }
                lost.devices.insert((found, device.to_owned()));
            } else if let Ok(replica) = text.parse()
                && self.has_replica(replica)
            {
                lost.replicas.insert(replica);
            } else {
                let why = format!(
                    "there is no such node or replica; the nodes are {}",
                    names()
                );
                refuse(text, why);
            }
        }
        self.lost = lost;
        first.map_or(Ok(()), Err)
    }

    fn has_device(&self, node: Uuid, device: &str) -> bool {
        let reported = self.all.get(&NodeId(node));
        let mut devices = reported.into_iter().flat_map(|found| &found.devices);
        let text = node.to_string();
        let mut replicas = self.copied_replicas();
        devices.any(|one| one.is(device))
            || replicas.any(|one| one["node"] == *text && one["node_device"] == *device)
    }

    fn has_replica(&self, replica: Uuid) -> bool {
        let labels = self.places.values().flatten().map(|place| place.label);
        let text = replica.to_string();
        let mut replicas = self.copied_replicas();
        labels
            .into_iter()
            .any(|label| label.state_of(replica).is_some())
            || replicas.any(|one| one["id"] == *text)
    }

    fn copied_replicas(&self) -> impl Iterator<Item = &Value> {
        let volumes = self
            .copies
            .iter()
            .flat_map(|(_, copy)| copy.volumes.values());
        volumes.flat_map(CopiedRecord::replicas)
    }

    pub(super) fn note_devices(&self, notes: &mut Vec<Note>) {
        for found in self.all.values() {
            for device in &found.devices {
                if let LabelRead::Unreadable(why) = &device.label {
                    notes.push(Note::Unreadable {
                        device: self.device_text(found.node, &device.name),
                        why: why.clone(),
                    });
                }
            }
            if let Some(why) = &found.copy_error {
                notes.push(Note::BadCopy {
                    node: self.name_of(found.node),
                    why: why.clone(),
                });
            }
        }
        if self.copies.is_empty() {
            notes.push(Note::NoCopies);
        }
    }

    /// The latest record of a volume in the copies.
    pub(super) fn base(&self, volume: Uuid) -> Option<&'a CopiedRecord> {
        let records = self.copies.iter();
        let records = records.filter_map(|(_, copy)| copy.volumes.get(&volume));
        // Of equal ones, that of the newest copy.
        records.rev().max_by_key(|record| record.stamp())
    }

    /// The newest copy shows which volumes exist.
    pub(super) fn is_of_cluster(&self, volume: Uuid) -> bool {
        match self.copies.first() {
            Some((newest, _)) => newest.volumes.contains(&volume),
            // The labels are all that is left.
            None => true,
        }
    }

    /// True for a volume that the newest copy does not have, although it may exist: a node exports
    /// its device, or only copies of another store have it. Which store is later is a guess by the
    /// clocks of nodes.
    pub(super) fn is_doubtful(&self, volume: Uuid) -> bool {
        let mut places = self.places.get(&volume).into_iter().flatten();
        let newest = self.copies.first().map(|(_, copy)| copy.meta.restored);
        let of_volume = self.copies.iter();
        let mut of_volume = of_volume.filter(|(found, _)| found.volumes.contains(&volume));
        if self.was_known(volume) {
            return of_volume.all(|(_, copy)| Some(copy.meta.restored) != newest);
        }
        places.any(|place| place.found.exports(place.device, volume))
    }

    fn was_known(&self, volume: Uuid) -> bool {
        let mut copies = self.copies.iter();
        copies.any(|(found, _)| found.volumes.contains(&volume))
    }

    pub(super) fn devices_of(&self, volume: Uuid) -> String {
        let places = self.places.get(&volume).into_iter().flatten();
        let devices = places.map(|place| self.device_text(place.found.node, &place.device.name));
        devices.collect::<Vec<_>>().join(", ")
    }

    pub(super) fn left_out(&self, id: Uuid, volume: String) -> Note {
        let devices = self.devices_of(id);
        if self.was_known(id) {
            Note::Deleted {
                volume,
                id,
                devices,
            }
        } else {
            Note::Foreign {
                volume,
                id,
                devices,
            }
        }
    }

    pub(super) fn name_of_volume(&self, id: Uuid, base: Option<&CopiedRecord>) -> String {
        let places = self.places.get(&id).into_iter().flatten();
        let label = places
            .map(|place| place.label)
            .max_by_key(|one| one.stamp());
        let of_base = base.and_then(|base| {
            let name = base.value["name"].as_str()?;
            let is_later = label.is_none_or(|label| base.stamp() >= Some(label.stamp()));
            is_later.then(|| name.to_owned())
        });
        of_base
            .or_else(|| label.map(|label| label.name.clone()))
            .unwrap_or_else(|| id.to_string())
    }
}

pub(super) fn id(value: &Value) -> Option<Uuid> {
    value.as_str()?.parse().ok()
}
