//! `pub/V`: the nodes that show a volume, and the hosts that may use it. Unknown fields stay through
//! a change.

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

/// `pub/V`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Publication {
    /// The NQN of the volume's subsystem.
    pub nqn: String,
    /// The nodes that show the volume, each with its slot.
    pub slots: Slots,
    /// The nodes in the order in which the operator named them.
    pub order: Vec<NodeId>,
    /// The NQNs of the hosts that may connect.
    pub hosts: Vec<String>,
    pub any_host: bool,
    rest: Map<String, Value>,
}

#[derive(Serialize, Deserialize)]
struct Stored {
    v: u64,
    nqn: String,
    slots: BTreeMap<Uuid, u8>,
    /// The slot after the last one assigned.
    #[serde(default)]
    next_slot: u8,
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
    pub(crate) fn new(volume: VolumeId) -> Self {
        Self {
            nqn: volume_nqn(volume),
            slots: Slots::default(),
            order: Vec::new(),
            hosts: Vec::new(),
            any_host: false,
            rest: Map::new(),
        }
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
        let Some(slots) = Slots::of_assigned(assigned, stored.next_slot) else {
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
            order: self.order.iter().map(|node| node.0).collect(),
            hosts: self.hosts.clone(),
            any_host: self.any_host,
            rest: self.rest.clone(),
        };
        crate::keys::bytes(&stored)
    }
}
