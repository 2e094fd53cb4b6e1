//! The decision about one volume: its record, and the exports of its replicas.

use serde_json::{Value, json};
use uuid::Uuid;

use super::copy::CopiedRecord;
use super::error::{Note, Problem};
use super::facts::{LabelFacts, ReplicaFact};
use super::reports::{Labelled, NodeReports, id};
use crate::export::Export;

/// Epochs that the lost store may have given since the last label.
const EPOCHS: u64 = 1000;

/// The keys of one volume.
pub(super) struct Made {
    pub(super) record: Value,
    /// By node: the export's id, and its value.
    pub(super) exports: Vec<(Uuid, (String, Value))>,
    /// Replicas whose node has not found the device.
    pub(super) absent: usize,
    pub(super) notes: Vec<Note>,
}

/// A replica before its state is known.
struct FoundReplica<'a> {
    id: Uuid,
    slot: u8,
    /// Its fields in the copied record.
    base: Option<&'a Value>,
    place: Option<Labelled<'a>>,
    is_lost: bool,
}

pub(super) fn rebuild(
    reports: &NodeReports<'_>,
    volume: Uuid,
    name: &str,
    base: Option<&CopiedRecord>,
) -> Result<Made, Problem> {
    let all = reports.places.get(&volume).map_or(&[][..], Vec::as_slice);
    let is_named = |place: &Labelled<'_>| {
        let named = &reports.lost.devices;
        let mut named = named.iter().filter(|(node, _)| *node == place.found.node);
        named.any(|(_, device)| place.device.is(device))
            || reports.lost.replicas.contains(&place.label.replica)
    };
    let mut trusted: Vec<Labelled<'_>> = all.iter().copied().filter(|one| !is_named(one)).collect();
    let mut notes = Vec::new();
    // A clone of a replica has its label. The device that the cluster exports is the replica.
    let exported: Vec<Uuid> = trusted
        .iter()
        .filter(|place| place.found.exports(place.device, volume))
        .map(|place| place.label.replica)
        .collect();
    trusted.retain(|place| {
        let is_replica =
            place.found.exports(place.device, volume) || !exported.contains(&place.label.replica);
        if !is_replica {
            notes.push(Note::Clone {
                volume: name.to_owned(),
                device: reports.device_text(place.found.node, &place.device.name),
            });
        }
        is_replica
    });
    let known = last(trusted.iter().map(|place| place.label));
    let restored = base.map(|base| &base.value["restored"]);
    let version = base.and_then(version);
    // As after a restore: a record that is as new as the labels stands.
    let by_label = known.filter(|label| version.is_none_or(|version| label.stamp() > version));
    let mut made = Made {
        record: base.map_or_else(|| json!({}), |base| base.value.clone()),
        exports: Vec::new(),
        absent: 0,
        notes,
    };
    let base = base.filter(|_| version.is_some());
    let (epoch, revision) = match (by_label, version) {
        (Some(label), _) => label.stamp(),
        (None, Some(version)) => version,
        (None, None) => {
            let (volume, id) = (name.to_owned(), volume);
            return Err(Problem::NoFacts { volume, id });
        }
    };
    let mut stored = Vec::new();
    let mut lost: Vec<Value> = Vec::new();
    if by_label.is_none()
        && let Some(former) = restored.and_then(|restored| restored["lost"].as_array())
    {
        lost.clone_from(former);
    }
    for replica in replicas(reports, &trusted, all, by_label, base, name)? {
        let Some(mut fields) = replica.fields(reports, volume, name, &mut made)? else {
            continue;
        };
        replica.decide(by_label, &mut fields);
        let id = json!(replica.id);
        if replica.is_lost && !lost.contains(&id) {
            lost.push(id);
        }
        stored.push(fields);
    }
    if !stored.iter().any(|one| one["state"]["state"] == "in_sync") {
        let volume = name.to_owned();
        made.notes.push(Note::Frozen { volume });
    }
    let record = &mut made.record;
    if let Some(label) = by_label {
        record["serving"] = label.epoch.into();
        record["block_size"] = label.block_size.into();
        record["blocks"] = label.blocks.into();
        record["region_shift"] = label.region_shift.into();
    }
    let last_epoch = record["epoch"].as_u64().unwrap_or_default().max(epoch);
    let last_revision = record["revision"]
        .as_u64()
        .unwrap_or_default()
        .max(revision);
    record["v"] = 1.into();
    record["id"] = json!(volume);
    record["epoch"] = (last_epoch + EPOCHS).into();
    record["revision"] = last_revision.into();
    record["holder"] = Value::Null;
    record["members"] = stored.into();
    record["restored"] = json!({ "epoch": epoch, "revision": revision });
    if !lost.is_empty() {
        record["restored"]["lost"] = lost.into();
    }
    Ok(made)
}

/// The version of the record that counts: of a restored volume that was not opened, the one that
/// was restored.
fn version(base: &CopiedRecord) -> Option<(u64, u64)> {
    let restored = &base.value["restored"];
    let of = |field: &str| restored[field].as_u64();
    let restored = of("epoch").zip(of("revision"));
    restored.or_else(|| base.stamp())
}

/// The last label that a replica in sync wrote. If none did, the last one.
fn last<'a>(labels: impl Iterator<Item = &'a LabelFacts> + Clone) -> Option<&'a LabelFacts> {
    let is_in_sync =
        |label: &&LabelFacts| label.state_of(label.replica) == Some(ReplicaFact::InSync);
    let age = |label: &&LabelFacts| (label.stamp(), label.sequence);
    let in_sync = labels.clone().filter(is_in_sync).max_by_key(age);
    in_sync.or_else(|| labels.max_by_key(age))
}

/// The replicas of the label that counts, or those of the record.
fn replicas<'a>(
    reports: &NodeReports<'_>,
    trusted: &[Labelled<'a>],
    all: &[Labelled<'a>],
    by_label: Option<&LabelFacts>,
    base: Option<&'a CopiedRecord>,
    name: &str,
) -> Result<Vec<FoundReplica<'a>>, Problem> {
    let copied = |wanted: Uuid| {
        let mut replicas = base.into_iter().flat_map(CopiedRecord::replicas);
        replicas.find(|replica| id(&replica["id"]) == Some(wanted))
    };
    let wanted: Vec<(Uuid, u8)> = match by_label {
        Some(label) => label
            .replicas
            .iter()
            .map(|one| (one.id, one.slot))
            .collect(),
        None => {
            let replicas = base.into_iter().flat_map(CopiedRecord::replicas);
            let slot = |replica: &Value| u8::try_from(replica["slot"].as_u64()?).ok();
            replicas
                .filter_map(|replica| Some((id(&replica["id"])?, slot(replica)?)))
                .collect()
        }
    };
    let mut replicas = Vec::new();
    for (id, slot) in wanted {
        let base = copied(id);
        let mut places = trusted.iter().filter(|place| place.label.replica == id);
        let (first, second) = (places.next(), places.next());
        if let (Some(first), Some(second)) = (first, second) {
            let text =
                |place: &Labelled<'_>| reports.device_text(place.found.node, &place.device.name);
            return Err(Problem::TwoDevices {
                volume: name.to_owned(),
                replica: id,
                first: text(first),
                second: text(second),
            });
        }
        let named = all.iter().find(|place| place.label.replica == id);
        let is_lost = first.is_none()
            && (named.is_some()
                || reports.lost.replicas.contains(&id)
                || base.is_some_and(|base| is_named(reports, base)));
        replicas.push(FoundReplica {
            id,
            slot,
            base,
            place: first.or(named).copied(),
            is_lost,
        });
    }
    Ok(replicas)
}

/// True if the operator named the node or the device of this replica lost.
fn is_named(reports: &NodeReports<'_>, replica: &Value) -> bool {
    let lost = &reports.lost;
    let node = id(&replica["node"]);
    let device = replica["node_device"].as_str();
    node.is_some_and(|node| {
        lost.nodes.contains(&node)
            || device.is_some_and(|device| lost.devices.contains(&(node, device.to_owned())))
    })
}

impl FoundReplica<'_> {
    /// The replica's fields and its export, without its state. `None`: it is lost, and its device
    /// is unknown.
    fn fields(
        &self,
        reports: &NodeReports<'_>,
        volume: Uuid,
        name: &str,
        made: &mut Made,
    ) -> Result<Option<Value>, Problem> {
        let fresh = || json!({ "id": self.id, "slot": self.slot, "offline": false });
        let mut fields = self.base.map_or_else(fresh, Value::clone);
        let Some(place) = &self.place else {
            let (Some(base), Some(node)) = (self.base, id(&fields["node"])) else {
                return if self.is_lost {
                    Ok(None)
                } else {
                    let (volume, replica) = (name.to_owned(), self.id);
                    Err(Problem::NoPlace { volume, replica })
                };
            };
            let (export, device) = (base["device"].as_str(), base["node_device"].as_str());
            if let (Some(export), Some(device)) = (export, device) {
                let value = export_value(reports, node, export);
                let value = value.unwrap_or_else(|| new_export(volume, device));
                made.exports.push((node, (export.to_owned(), value)));
            }
            if !self.is_lost {
                made.absent += usize::from(reports.has_reported(node));
                let device = reports.device_text(node, device.unwrap_or("unknown"));
                let volume = name.to_owned();
                made.notes.push(Note::Absent { volume, device });
            }
            return Ok(Some(fields));
        };
        let node = place.found.node;
        let exported = place.found.export_of(place.device, volume);
        let is_same = id(&fields["node"]) == Some(node)
            && fields["node_device"]
                .as_str()
                .is_some_and(|one| place.device.is(one));
        let former = id(&fields["device"]).filter(|_| is_same);
        // The id of the replica is unique, too.
        let export = exported.or(former).unwrap_or(self.id).to_string();
        let value = export_value(reports, node, &export);
        let value = value.unwrap_or_else(|| new_export(volume, &place.device.name));
        fields["device"] = export.clone().into();
        fields["node"] = json!(node);
        fields["node_device"] = value["device"].clone();
        made.exports.push((node, (export, value)));
        Ok(Some(fields))
    }

    /// The state of the replica, by the label that counts.
    fn decide(&self, by_label: Option<&LabelFacts>, fields: &mut Value) {
        let mut fill = |why: &str| {
            fields["state"] = json!({ "state": "filling", "watermark": 0 });
            fields["why"] = why.into();
        };
        if self.is_lost {
            return fill("it was lost when the store was rebuilt");
        }
        let Some(label) = by_label else { return };
        let own = self.place.map(|place| place.label.epoch);
        match label.state_of(self.id) {
            Some(ReplicaFact::InSync) if own.is_some_and(|own| own < label.epoch) => {
                fill("its label is older than those of other replicas");
            }
            Some(ReplicaFact::InSync) => {
                fields["state"] = json!({ "state": "in_sync" });
                fields["offline"] = false.into();
                if let Some(object) = fields.as_object_mut() {
                    object.remove("why");
                }
            }
            _ => fill("it was not in sync when the store was lost"),
        }
    }
}

/// The export of this id in the node's copy, as its next daemon finds it.
fn export_value(reports: &NodeReports<'_>, node: Uuid, export: &str) -> Option<Value> {
    let (_, copy) = reports
        .copies
        .iter()
        .find(|(found, _)| found.node == node)?;
    let mut value = copy.exports.get(&export.parse().ok()?)?.clone();
    if let Some(fields) = value.as_object_mut() {
        fields.remove("by");
    }
    value["want"] = "there".into();
    Some(value)
}

/// The export of a replica that no copy has.
fn new_export(volume: Uuid, device: &str) -> Value {
    json!(Export::new(
        nacre_cluster_core::VolumeId(volume),
        device,
        None
    ))
}
