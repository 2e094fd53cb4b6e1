//! Reads and writes a volume's record in etcd (`vol/V`), for the state machines of
//! `nacre-cluster-core`.
//!
//! The JSON is that of `VolumeRecord`, with three more fields: `incarnation` (of the holder),
//! `next`, and `node` of each replica. A change keeps all other fields, and increments `revision`.
//! It removes `closed`, the field by which `EtcdStore` marks the last change of the holder's
//! control.

use std::collections::BTreeSet;

use nacre_cluster_core::ids::MAX_REPLICAS;
use nacre_cluster_core::{Holder, Incarnation, NodeId, Record, Replica, ReplicaId, ReplicaState};
use serde::Deserialize;
use serde_json::{Value, json};
use uuid::Uuid;

use crate::error::{Error, damaged};
use crate::keys;

#[derive(Deserialize)]
struct Fields {
    epoch: u64,
    serving: u64,
    holder: Option<Uuid>,
    #[serde(default)]
    incarnation: Option<u64>,
    #[serde(default)]
    next: Option<Uuid>,
    #[serde(rename = "members")]
    replicas: Vec<Element>,
}

#[derive(Deserialize)]
struct Element {
    id: Uuid,
    #[serde(default)]
    node: Option<Uuid>,
    state: Value,
}

/// The reason why a record cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Unread {
    #[error(
        "it has format {found}, and this program knows {}. Upgrade this daemon",
        keys::FORMAT
    )]
    Newer { found: u64 },
    #[error("{0}")]
    Damaged(String),
}

impl Unread {
    pub(crate) fn at(self, key: &str) -> Error {
        match self {
            Self::Newer { found } => keys::newer(key, found),
            Self::Damaged(why) => damaged(key, &why),
        }
    }
}

/// The JSON, if it is of a known format.
fn parse(bytes: &[u8]) -> Result<Value, Unread> {
    let value: Value = serde_json::from_slice(bytes).map_err(unread)?;
    match keys::later_format(&value) {
        None => Ok(value),
        Some(found) => Err(Unread::Newer { found }),
    }
}

fn unread(error: serde_json::Error) -> Unread {
    Unread::Damaged(error.to_string())
}

pub(crate) fn decode(bytes: &[u8]) -> Result<(Value, Record), Unread> {
    let value = parse(bytes)?;
    let fields = Fields::deserialize(&value).map_err(unread)?;
    if fields.replicas.len() > MAX_REPLICAS {
        let replicas = format!("{} replicas", fields.replicas.len());
        return Err(Unread::Damaged(replicas));
    }
    let replicas = fields.replicas.iter().map(|element| Replica {
        id: ReplicaId(element.id),
        // A device of no node.
        node: NodeId(element.node.unwrap_or_default()),
        state: if element.state["state"] == "in_sync" {
            ReplicaState::InSync
        } else {
            ReplicaState::Out
        },
    });
    let record = Record {
        epoch: fields.epoch,
        serving: fields.serving,
        // A daemon outside of a cluster has no incarnation. No lease has the incarnation 0.
        holder: fields.holder.map(|node| Holder {
            node: NodeId(node),
            incarnation: Incarnation(fields.incarnation.unwrap_or(0)),
        }),
        next: fields.next.map(NodeId),
        replicas: replicas.collect(),
    };
    Ok((value, record))
}

/// The replicas whose labels the opening of a restored volume reads, each with its node. Empty: the
/// record is not from a backup.
pub(crate) fn read_at_opening(value: &Value) -> Vec<(ReplicaId, NodeId)> {
    let Some(restored) = value["restored"].as_object() else {
        return Vec::new();
    };
    let lost = restored.get("lost").and_then(Value::as_array);
    let lost: Vec<&Value> = lost.into_iter().flatten().collect();
    let replicas = value["members"].as_array().into_iter().flatten();
    let id = |value: &Value| value.as_str().and_then(|id| id.parse::<Uuid>().ok());
    replicas
        .filter(|replica| !lost.contains(&&replica["id"]))
        .filter_map(|replica| {
            let node = id(&replica["node"]).unwrap_or_default();
            Some((ReplicaId(id(&replica["id"])?), NodeId(node)))
        })
        .collect()
}

/// The devices of the record's replicas.
pub(crate) fn devices(bytes: &[u8]) -> Result<BTreeSet<String>, Unread> {
    let value = parse(bytes)?;
    let no_replicas = || Unread::Damaged("no replicas".to_owned());
    let replicas = value["members"].as_array().ok_or_else(no_replicas)?;
    let devices = replicas
        .iter()
        .filter_map(|replica| replica["device"].as_str());
    Ok(devices.map(str::to_owned).collect())
}

/// True if a replica of the record is on this device.
pub(crate) fn names_device(bytes: &[u8], device: &str) -> Result<bool, Unread> {
    Ok(devices(bytes)?.contains(device))
}

/// The JSON of `record`, based on the value of the revision that the change compares. The replicas
/// are those of the base: only the holder's control changes them.
pub(crate) fn encode(base: &Value, record: &Record) -> Value {
    let mut value = base.clone();
    value["epoch"] = record.epoch.into();
    value["serving"] = record.serving.into();
    let holder = record.holder;
    value["holder"] = json!(holder.map(|holder| holder.node.0));
    value["incarnation"] = json!(holder.map(|holder| holder.incarnation.0));
    value["next"] = json!(record.next.map(|node| node.0));
    value["revision"] = (base["revision"].as_u64().unwrap_or(0) + 1).into();
    // `op` names the call of `EtcdStore` that wrote the value. This change is no such call.
    if let Some(fields) = value.as_object_mut() {
        fields.remove("op");
        fields.remove("closed");
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored() -> Value {
        json!({
            "v": 1, "op": "x", "name": "ant", "epoch": 3, "serving": 3, "revision": 9,
            "holder": null, "closed": true, "new": { "later": true },
            "members": [
                { "id": Uuid::from_u128(1), "node": Uuid::from_u128(11), "slot": 0,
                  "state": { "state": "in_sync" } },
                { "id": Uuid::from_u128(2), "node": Uuid::from_u128(12), "slot": 1,
                  "state": { "state": "filling", "watermark": 7 } },
            ],
        })
    }

    #[test]
    fn a_change_keeps_fields_of_other_parts() {
        let (base, mut record) = decode(stored().to_string().as_bytes()).expect("a record");
        assert_eq!(record.in_sync().count(), 1);
        assert_eq!(record.holder, None);
        record.epoch = 4;
        record.holder = Some(Holder {
            node: NodeId(Uuid::from_u128(11)),
            incarnation: Incarnation(77),
        });
        let value = encode(&base, &record);
        assert_eq!(value["new"], stored()["new"]);
        assert_eq!(value["revision"], 10);
        assert_eq!(value["members"], stored()["members"]);
        assert!(value.get("op").is_none() && value.get("closed").is_none());
        let (_, again) = decode(value.to_string().as_bytes()).expect("a record");
        assert_eq!(again, record);
    }

    #[test]
    fn damaged_records_have_a_reason() {
        for (text, part) in [("{", "EOF"), ("{}", "epoch"), (r#"{"epoch":1}"#, "serving")] {
            let why = decode(text.as_bytes()).expect_err("damaged").to_string();
            assert!(why.contains(part), "{why}");
        }
        let mut later = stored();
        later["v"] = 2.into();
        let later = later.to_string();
        let found = 2;
        assert_eq!(decode(later.as_bytes()), Err(Unread::Newer { found }));
        assert_eq!(devices(later.as_bytes()), Err(Unread::Newer { found }));
    }

    /// Goal: a restored volume waits for all replicas but the lost ones, whatever their state.
    #[test]
    fn replicas_of_a_restored_volume() {
        let mut value = stored();
        assert_eq!(read_at_opening(&value), []);
        value["restored"] = json!({ "epoch": 1, "revision": 2 });
        let [one, two] = [1, 2].map(|id| {
            let node = NodeId(Uuid::from_u128(10 + id));
            (ReplicaId(Uuid::from_u128(id)), node)
        });
        assert_eq!(read_at_opening(&value), [one, two]);
        value["restored"]["lost"] = json!([one.0.0]);
        assert_eq!(read_at_opening(&value), [two]);
    }
}
