//! Lists removals that a node has not done yet. A host that lost its permission may still have a
//! connection to the node. Or the node still exports the device of a former replica.
//!
//! A volume's *publication*, the key `pub/V`, has the nodes that show the volume and the hosts that
//! may use it. A node's lease has the volumes whose publication is not in effect on the node.
//!
//! ```text
//!   hosts    lease/N names the volume: its last publication is not in effect on node N
//!   device   member/N/R is no longer wanted, or its replica is neither in the volume's record nor
//!            being made by a live daemon
//! ```

use std::collections::BTreeMap;

use nacre_cluster_core::{Incarnation, NodeId, VolumeId};
use nacre_cluster_etcd::{LeaseKey, Prefix};

use crate::error::Error;
use crate::export::{Export, Is, Want};
use crate::operator::Operator;
use crate::record;

/// A removal, and the node that it waits for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PendingRemoval {
    /// The volume, which may be deleted.
    pub volume: VolumeId,
    pub node: NodeId,
    pub removed: Removed,
    pub obstacle: Obstacle,
    /// The time of the removal, in seconds since 1970; `None`: not known.
    pub since: Option<u64>,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Removed {
    /// Hosts that the publication does not name, or all hosts of a volume that is not published.
    Hosts,
    /// The export of a device that is not, or no longer, a replica of the volume; its name on the
    /// node.
    Device(String),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Obstacle {
    /// The node has no lease. It removes the device when it returns.
    NodeAway,
    /// The node has not finished.
    Working,
    /// The node failed, and tries again.
    Failed { why: String },
}

impl Obstacle {
    fn of(why: Option<String>) -> Self {
        why.map_or(Self::Working, |why| Self::Failed { why })
    }
}

impl PendingRemoval {
    /// All pending removals of the cluster, in order of volume and node. Leases and exports that
    /// this version cannot parse are left out.
    pub async fn all(operator: &Operator) -> Result<Vec<Self>, Error> {
        let prefix = &operator.prefix;
        let keys = operator.list(&prefix.leases()).await?;
        let standing = keys.iter().filter_map(|kv| {
            let incarnation = Incarnation(kv.create_revision as u64);
            Some((prefix.node_of(&kv.key)?, incarnation))
        });
        // A lease of a later version stands, and says nothing that this one could show.
        let leases = operator.leases();
        let leases = keys.iter().filter_map(|kv| leases.decode(kv).ok());
        let leases: Vec<LeaseKey> = leases.collect();
        // The exports before the records: an export that gets its record in between is named.
        let exports = operator.list(&prefix.all_exports()).await?;
        let volumes = prefix.volumes();
        let records = operator.list(&volumes).await?;
        let records = records.iter().filter_map(|kv| {
            let id = VolumeId(Prefix::id_after(&volumes, &kv.key)?);
            Some((id, &*kv.value))
        });
        let exports = exports.iter().filter_map(|kv| {
            let (node, id) = prefix.export_of(&kv.key)?;
            Some((node, id.0.to_string(), Export::decode(kv).ok()?))
        });
        Ok(pending(
            &leases,
            &standing.collect(),
            exports,
            &records.collect(),
        ))
    }
}

/// `standing`: the incarnation of each node that has a lease.
fn pending(
    leases: &[LeaseKey],
    standing: &BTreeMap<NodeId, Incarnation>,
    exports: impl Iterator<Item = (NodeId, String, Export)>,
    records: &BTreeMap<VolumeId, &[u8]>,
) -> Vec<PendingRemoval> {
    let mut found = Vec::new();
    for lease in leases {
        let Some(known) = &lease.in_effect else {
            continue;
        };
        for volume in &known.behind {
            let cause = known.causes.get(volume);
            found.push(PendingRemoval {
                volume: VolumeId(*volume),
                node: lease.node,
                removed: Removed::Hosts,
                obstacle: Obstacle::of(cause.and_then(|cause| cause.why.clone())),
                since: cause.map(|cause| cause.since),
            });
        }
    }
    for (node, name, export) in exports {
        let is_named = match records.get(&export.volume()) {
            Some(record) => record::names_device(record, &name),
            None => Ok(false),
        };
        let is_made = export
            .by()
            .is_none_or(|by| standing.get(&by.node) != Some(&by.incarnation));
        // A record that cannot be read may name it.
        let is_left = is_made && matches!(is_named, Ok(false));
        if export.want == Want::There && !is_left {
            continue;
        }
        let failed = export.why.clone().filter(|_| export.is == Is::Failed);
        found.push(PendingRemoval {
            volume: export.volume(),
            node,
            obstacle: match standing.get(&node) {
                None => Obstacle::NodeAway,
                // Before the node knows the wish, its report is one about the export.
                Some(_) if export.want == Want::There => Obstacle::Working,
                Some(_) => Obstacle::of(failed),
            },
            since: export.gone_since(),
            removed: Removed::Device(export.device),
        });
    }
    found.sort_by(|a, b| {
        let key = |one: &PendingRemoval| (one.volume, one.node, one.removed.clone());
        key(a).cmp(&key(b))
    });
    found
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use nacre_cluster_core::Holder;
    use nacre_cluster_etcd::{BehindCause, InEffect};
    use serde_json::json;
    use uuid::Uuid;

    use super::*;
    use crate::testing;

    const VOLUME: Uuid = Uuid::from_u128(7);

    fn lease(number: u128, behind: Option<BehindCause>) -> LeaseKey {
        let in_effect = behind.map(|cause| InEffect {
            revision: 50,
            behind: vec![VOLUME],
            causes: BTreeMap::from([(VOLUME, cause)]),
        });
        testing::lease(number, in_effect)
    }

    fn standing(leases: &[LeaseKey]) -> BTreeMap<NodeId, Incarnation> {
        let all = leases.iter().map(|lease| (lease.node, lease.incarnation));
        all.collect()
    }

    fn short(found: &[PendingRemoval]) -> Vec<(u128, Removed, Obstacle, Option<u64>)> {
        let short = found.iter().map(|one| {
            let node = one.node.0.as_u128();
            (node, one.removed.clone(), one.obstacle.clone(), one.since)
        });
        short.collect()
    }

    /// Goal: a removal has its node, its cause and its time. Method: exports that are to go, of
    /// nodes with and without a lease, beside exports that stay.
    #[test]
    fn devices_of_former_replicas() {
        let record = json!({ "v": 1, "members": [{ "device": "named" }] }).to_string();
        let records = BTreeMap::from([(VolumeId(VOLUME), record.as_bytes())]);
        let export = |node: u128, name: &str, device: &str, change: &dyn Fn(&mut Export)| {
            let mut export = Export::new(VolumeId(VOLUME), device, None);
            change(&mut export);
            (NodeId(Uuid::from_u128(node)), name.to_owned(), export)
        };
        let by = |incarnation| Holder {
            node: NodeId(Uuid::from_u128(1)),
            incarnation: Incarnation(incarnation),
        };
        let made_by = |incarnation| Export::new(VolumeId(VOLUME), "made", Some(by(incarnation)));
        let gone = |export: &mut Export| export.unwanted(1000);
        let failed = |export: &mut Export| {
            export.unwanted(1000);
            export.is = Is::Failed;
            export.why = Some("in use".to_owned());
        };
        let exports = [
            export(1, "named", "stays", &|_| {}),
            export(1, "left", "left", &|export| export.is = Is::There),
            export(1, "made", "", &|export| *export = made_by(1)),
            export(1, "dead", "", &|export| *export = made_by(0)),
            export(2, "named", "away", &gone),
            export(3, "other", "failed", &failed),
            export(4, "later", "later", &gone),
        ];
        let leases = [lease(1, None), lease(3, None)];
        let mut standing = standing(&leases);
        // Its lease is one of a later version.
        standing.insert(NodeId(Uuid::from_u128(4)), Incarnation(4));
        let found = pending(&leases, &standing, exports.into_iter(), &records);
        let device = |name: &str| Removed::Device(name.to_owned());
        let why = "in use".to_owned();
        let expected = [
            (1, device("left"), Obstacle::Working, None),
            (1, device("made"), Obstacle::Working, None),
            (2, device("away"), Obstacle::NodeAway, Some(1000)),
            (3, device("failed"), Obstacle::Failed { why }, Some(1000)),
            (4, device("later"), Obstacle::Working, Some(1000)),
        ];
        assert_eq!(short(&found), expected);
        // A record of a later version may name the device.
        let later = BTreeMap::from([(VolumeId(VOLUME), &b"{\"v\":99}"[..])]);
        let exports = [export(1, "left", "left", &|_| {})];
        let found = pending(&leases, &standing, exports.into_iter(), &later);
        assert_eq!(found, []);
    }

    /// Goal: the node whose hosts still use a volume is named, with the cause.
    #[test]
    fn hosts_that_lost_their_permission() {
        let why = Some("I/O is in flight".to_owned());
        let cause = |why| BehindCause { since: 900, why };
        let leases = [
            lease(1, Some(cause(why.clone()))),
            lease(2, Some(cause(None))),
        ];
        let exports = std::iter::empty();
        let found = pending(&leases, &standing(&leases), exports, &BTreeMap::new());
        let expected = [
            (1, Removed::Hosts, Obstacle::of(why), Some(900)),
            (2, Removed::Hosts, Obstacle::Working, Some(900)),
        ];
        assert_eq!(short(&found), expected);
        assert!(found.iter().all(|one| one.volume == VolumeId(VOLUME)));
    }
}
