//! A volume's record in etcd, as the machines see it.
//!
//! The JSON is that of `VolumeRecord`, with three more fields: `incarnation` (of the holder),
//! `next`, and `node` of each member. A change keeps all other fields, and counts `revision` up. It
//! ends `closed`, by which `EtcdStore` notes the last change of the holder's control.

use std::collections::BTreeSet;

use nacre_cluster_core::ids::MAX_MEMBERS;
use nacre_cluster_core::{Holder, Incarnation, Member, MemberId, MemberState, NodeId, Record};
use serde::Deserialize;
use serde_json::{Value, json};
use uuid::Uuid;

#[derive(Deserialize)]
struct Fields {
    epoch: u64,
    serving: u64,
    holder: Option<Uuid>,
    #[serde(default)]
    incarnation: Option<u64>,
    #[serde(default)]
    next: Option<Uuid>,
    members: Vec<Element>,
}

#[derive(Deserialize)]
struct Element {
    id: Uuid,
    #[serde(default)]
    node: Option<Uuid>,
    state: Value,
}

/// The error has the reason.
pub(crate) fn decode(bytes: &[u8]) -> Result<(Value, Record), String> {
    let value: Value = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    let fields = Fields::deserialize(&value).map_err(|error| error.to_string())?;
    if fields.members.len() > MAX_MEMBERS {
        return Err(format!("{} members", fields.members.len()));
    }
    let members = fields.members.iter().map(|element| Member {
        id: MemberId(element.id),
        // A device of no node.
        node: NodeId(element.node.unwrap_or_default()),
        state: if element.state["state"] == "in_sync" {
            MemberState::InSync
        } else {
            MemberState::Out
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
        members: members.collect(),
    };
    Ok((value, record))
}

/// The devices of the record's replicas. The error has the reason.
pub(crate) fn devices(bytes: &[u8]) -> Result<BTreeSet<String>, String> {
    let value: Value = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    let members = value["members"].as_array().ok_or("no members")?;
    let devices = members
        .iter()
        .filter_map(|member| member["device"].as_str());
    Ok(devices.map(str::to_owned).collect())
}

/// True if a replica of the record is on this device. The error has the reason.
pub(crate) fn names_device(bytes: &[u8], device: &str) -> Result<bool, String> {
    Ok(devices(bytes)?.contains(device))
}

/// The JSON of `record`, based on the value of the revision that the change compares. The members
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
            let why = decode(text.as_bytes()).expect_err("damaged");
            assert!(why.contains(part), "{why}");
        }
    }
}
