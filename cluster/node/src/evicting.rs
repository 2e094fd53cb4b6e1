//! The progress of an eviction: volumes and replicas that are still on the node, and replicas that
//! the cluster cannot move.

use std::collections::BTreeSet;

use nacre_cluster_core::ids::MAX_REPLICAS;
use nacre_cluster_core::{Incarnation, NodeId, VolumeId};
use nacre_cluster_etcd::Prefix;
use serde_json::Value;

use crate::error::Error;
use crate::keys::NodeKey;
use crate::operator::Operator;
use crate::record;

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Eviction {
    /// True while the node has the mark of an eviction.
    pub is_wanted: bool,
    /// Volumes that the node serves.
    pub held: usize,
    /// Replicas on it that are being moved or wait for their turn.
    pub moving: usize,
    pub stuck: Vec<StuckReplica>,
}

/// A replica that the cluster does not move.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StuckReplica {
    pub volume: VolumeId,
    /// Empty if the record cannot be read.
    pub name: String,
    pub why: Stuck,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stuck {
    /// An operator chose the device.
    Named,
    /// No node serves the volume, so nothing copies it.
    NotServed,
    /// The volume has as many replicas as it can have, so that no successor fits.
    Full,
    /// No replica of the volume is in sync.
    NoSource,
    /// The record cannot be read: the volume may have a replica on the node.
    Unreadable,
}

impl Eviction {
    /// Reads the progress for `node`.
    pub async fn of(operator: &Operator, node: NodeId) -> Result<Self, Error> {
        let leases = operator.list(&operator.prefix.leases()).await?;
        let standing: BTreeSet<(NodeId, Incarnation)> = leases
            .iter()
            .filter_map(|kv| {
                let of = operator.prefix.node_of(&kv.key)?;
                Some((of, Incarnation(kv.create_revision as u64)))
            })
            .collect();
        let placed: BTreeSet<VolumeId> = operator
            .exports(None)
            .await?
            .into_iter()
            .filter(|(of, _, export)| *of == node && export.place.is_some())
            .map(|(_, _, export)| export.volume())
            .collect();
        let key = operator.get(&operator.prefix.node(node)).await?;
        let key = key.as_ref().map(NodeKey::decode).transpose()?;
        let mut eviction = Self {
            is_wanted: key.is_some_and(|key| key.evict),
            ..Self::default()
        };
        let prefix = operator.prefix.volumes();
        for kv in operator.list(&prefix).await? {
            let Some(volume) = Prefix::id_after(&prefix, &kv.key).map(VolumeId) else {
                continue;
            };
            let mut stuck = |name: &str, why| {
                let name = name.to_owned();
                eviction.stuck.push(StuckReplica { volume, name, why });
            };
            let Ok((value, record)) = record::decode(&kv.value) else {
                stuck("", Stuck::Unreadable);
                continue;
            };
            let name = value["name"].as_str().unwrap_or_default();
            let holder = record.holder;
            let stands = |holder: &nacre_cluster_core::Holder| {
                standing.contains(&(holder.node, holder.incarnation))
            };
            let is_served = holder.as_ref().is_some_and(stands);
            if record.replicas.iter().any(|replica| replica.node == node) {
                let is_copied = is_replaced(&value);
                if !placed.contains(&volume) {
                    stuck(name, Stuck::Named);
                } else if !is_served {
                    stuck(name, Stuck::NotServed);
                } else if record.replicas.len() == MAX_REPLICAS && !is_copied {
                    stuck(name, Stuck::Full);
                } else if record.in_sync().next().is_none() {
                    stuck(name, Stuck::NoSource);
                } else {
                    eviction.moving += 1;
                }
            }
            if is_served && holder.is_some_and(|holder| holder.node == node) {
                eviction.held += 1;
            }
        }
        Ok(eviction)
    }
}

/// True if a replica of the volume has a successor that is being filled.
fn is_replaced(record: &Value) -> bool {
    let replicas = record["members"].as_array();
    let mut replicas = replicas.into_iter().flatten();
    replicas.any(|replica| !replica["replaces"].is_null())
}
