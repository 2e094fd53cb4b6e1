//! The value of the key `pub/V` in etcd, as JSON: a *publication*. A publication has the nodes
//! whose subsystems show volume V to hosts, and the hosts that may use the volume. A change keeps
//! fields that this version does not know.

use std::collections::BTreeMap;

use nacre_cluster_core::slots::Slots;
use nacre_cluster_core::{NodeId, VolumeId};
use nacre_cluster_etcd::KeyValue;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use uuid::Uuid;

use crate::error::{Error, damaged};
use crate::keys::{FORMAT, decode};

/// Most hosts of one publication.
pub const MAX_HOSTS: usize = 256;
/// Most bytes of an NQN.
pub const MAX_NQN: usize = 223;

/// The NQN of a volume's subsystem, equal on all nodes.
pub fn volume_nqn(volume: VolumeId) -> String {
    format!("nqn.2025-01.io.nacre:volume:{}", volume.0)
}

/// The value of `pub/V`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Publication {
    /// The NQN of the volume's subsystem.
    pub nqn: String,
    /// The nodes that show the volume, each with its slot: a number from 0 to 15, which gives the
    /// node its range of controller ids (CNTLID).
    pub slots: Slots,
    /// The nodes in the order in which the operator named them.
    pub order: Vec<NodeId>,
    /// The NQNs of the hosts that may connect.
    pub hosts: Vec<String>,
    /// Any host may connect.
    pub any_host: bool,
    /// The revision at which the key was created; 0: it is not stored yet. A volume that is
    /// unpublished and published again gets another one.
    pub created: u64,
    rest: Map<String, Value>,
}

#[derive(Serialize, Deserialize)]
struct Stored {
    v: u64,
    nqn: String,
    slots: BTreeMap<Uuid, u8>,
    /// The slot after the last one assigned, for earlier versions.
    #[serde(default)]
    next_slot: u8,
    /// The free slots; the first has been free for longest. Earlier versions do not change it.
    #[serde(default)]
    free_slots: Vec<u8>,
    #[serde(default)]
    order: Vec<Uuid>,
    #[serde(default)]
    hosts: Vec<String>,
    #[serde(default)]
    any_host: bool,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

impl Publication {
    pub fn new(volume: VolumeId) -> Self {
        Self {
            nqn: volume_nqn(volume),
            slots: Slots::default(),
            order: Vec::new(),
            hosts: Vec::new(),
            any_host: false,
            created: 0,
            rest: Map::new(),
        }
    }

    /// Sets the nodes that show the volume, at most as many as there are slots. Nodes that showed
    /// it before keep their slots.
    pub(crate) fn show_on(&mut self, nodes: &[NodeId]) {
        for node in self.nodes() {
            if !nodes.contains(&node) {
                self.slots.remove(node);
            }
        }
        for node in nodes {
            self.slots.assign(*node);
        }
        self.order = nodes.to_vec();
    }

    /// The nodes that show the volume.
    pub fn nodes(&self) -> Vec<NodeId> {
        self.slots.iter().map(|(node, _)| node).collect()
    }

    pub(crate) fn decode(kv: &KeyValue) -> Result<Self, Error> {
        let stored: Stored = decode(kv)?;
        let key = || String::from_utf8_lossy(&kv.key).into_owned();
        let assigned = stored
            .slots
            .into_iter()
            .map(|(id, slot)| (NodeId(id), slot));
        let Some(slots) = Slots::of_assigned(assigned, stored.next_slot, &stored.free_slots) else {
            return Err(damaged(
                &key(),
                &"its slots are not different numbers below 16",
            ));
        };
        if stored.hosts.len() > MAX_HOSTS {
            return Err(damaged(&key(), &format!("more than {MAX_HOSTS} hosts")));
        }
        Ok(Self {
            nqn: stored.nqn,
            slots,
            order: stored.order.into_iter().map(NodeId).collect(),
            hosts: stored.hosts,
            any_host: stored.any_host,
            created: kv.create_revision as u64,
            rest: stored.rest,
        })
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let stored = Stored {
            v: FORMAT,
            nqn: self.nqn.clone(),
            slots: self
                .slots
                .iter()
                .map(|(node, slot)| (node.0, slot))
                .collect(),
            next_slot: self.slots.next(),
            free_slots: self.slots.free().to_vec(),
            order: self.order.iter().map(|node| node.0).collect(),
            hosts: self.hosts.clone(),
            any_host: self.any_host,
            rest: self.rest.clone(),
        };
        crate::keys::bytes(&stored)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn node(number: u128) -> NodeId {
        NodeId(Uuid::from_u128(number))
    }

    fn kv(value: &Value) -> KeyValue {
        KeyValue {
            key: b"/nacre/lab/pub/x".to_vec(),
            value: value.to_string().into_bytes(),
            ..KeyValue::default()
        }
    }

    #[test]
    fn slots_and_unknown_fields_stay() {
        let stored = json!({
            "v": 1, "nqn": "nqn.x", "slots": { (Uuid::from_u128(1).to_string()): 4 },
            "next_slot": 5, "later": [1],
        });
        let mut publication = Publication::decode(&kv(&stored)).expect("a publication");
        publication.show_on(&[node(2), node(1)]);
        assert_eq!(publication.slots.of(node(1)), Some(4));
        assert_eq!(publication.slots.of(node(2)), Some(5));
        publication.show_on(&[node(3)]);
        assert_eq!(
            (publication.nodes(), publication.slots.of(node(3))),
            (vec![node(3)], Some(6))
        );
        let value: Value = serde_json::from_slice(&publication.encode()).expect("JSON");
        assert_eq!(
            (&value["later"], &value["next_slot"]),
            (&json!([1]), &json!(7))
        );
        assert_eq!(Publication::decode(&kv(&value)), Ok(publication));
    }

    #[test]
    fn damaged_publications_have_a_reason() {
        let ids = [1, 2].map(|number| Uuid::from_u128(number).to_string());
        let twice = json!({ "v": 1, "nqn": "n", "slots": { (&ids[0]): 3, (&ids[1]): 3 } });
        let newer = json!({ "v": 2, "nqn": "n", "slots": {} });
        for (stored, part) in [
            (twice, "slots"),
            (newer, "format 2"),
            (json!({ "v": 1 }), "nqn"),
        ] {
            let error = Publication::decode(&kv(&stored)).expect_err(part);
            assert!(error.to_string().contains(part), "{error}");
        }
    }
}
