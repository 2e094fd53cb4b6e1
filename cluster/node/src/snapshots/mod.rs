//! The transactions by which nodes and operators change snapshots of volumes in etcd.
//! [`crate::snapshot`] describes the key.

use std::collections::BTreeMap;

use nacre_cluster_core::{ExportId, Holder, Incarnation, NodeId, VolumeId};
use nacre_cluster_etcd::{Prefix, Txn};
use uuid::Uuid;

use crate::error::{Error, damaged};
use crate::export::{Is, Want};
use crate::keys::{NodeKey, bytes};
use crate::operator::{ATTEMPTS, Operator};
use crate::record;
use crate::snapshot::{
    CutHolder, CutSource, CutSources, CutState, MAX_FORMER, MAX_NAME, MAX_OF_VOLUME, MAX_SNAPSHOTS,
    SNAPSHOTS, SeenSnapshot, SnapshotKey,
};

/// Requests about the snapshots of a cluster.
#[derive(Debug, Clone, Copy)]
pub struct Snapshots<'a>(&'a Operator);

impl Operator {
    pub fn snapshots(&self) -> Snapshots<'_> {
        Snapshots(self)
    }
}

/// The change of a snapshot's key, by a node whose incarnation has not ended.
#[derive(Debug, Clone)]
pub struct SnapshotChange<'a> {
    pub id: Uuid,
    pub seen: &'a SeenSnapshot,
    /// `None`: the key is deleted.
    pub next: Option<SnapshotKey>,
    pub by: Holder,
    /// The revision that `vol/V` must have; `None`: any.
    pub record: Option<i64>,
}

/// The nodes of a cluster that have a description, and those that have a lease with its features.
struct CutNodes {
    keys: BTreeMap<NodeId, NodeKey>,
    leases: BTreeMap<NodeId, (Incarnation, Vec<String>)>,
}

impl Snapshots<'_> {
    /// The nodes whose version does not know snapshots, by name, or by id if they have no
    /// description. For a node with a lease, the version of the process that renews it counts.
    pub async fn nodes_without(&self) -> Result<Vec<String>, Error> {
        let CutNodes { keys, leases } = self.nodes().await?;
        let known = |features: &[String]| features.iter().any(|one| one == SNAPSHOTS);
        let mut without = Vec::new();
        for (node, key) in &keys {
            let features = match leases.get(node) {
                Some((_, features)) => features,
                None => &key.description.features,
            };
            if !known(features) {
                without.push(key.description.name.clone());
            }
        }
        let undescribed = leases.iter().filter(|(node, _)| !keys.contains_key(node));
        let undescribed = undescribed.filter(|(_, (_, features))| !known(features));
        without.extend(undescribed.map(|(node, _)| node.0.to_string()));
        Ok(without)
    }

    async fn nodes(&self) -> Result<CutNodes, Error> {
        let (reader, prefix) = (self.0.leases(), self.0.prefix.leases());
        let mut leases = BTreeMap::new();
        for kv in self.0.list(&prefix).await? {
            let lease = reader.decode(&kv).map_err(Error::at(&prefix))?;
            leases.insert(lease.node, (lease.incarnation, lease.features));
        }
        let prefix = self.0.prefix.nodes();
        let mut keys = BTreeMap::new();
        for kv in self.0.list(&prefix).await? {
            if let Some(node) = Prefix::id_after(&prefix, &kv.key).map(NodeId) {
                keys.insert(node, NodeKey::decode(&kv)?);
            }
        }
        Ok(CutNodes { keys, leases })
    }

    /// All snapshots of the cluster, by id, without those whose keys cannot be read.
    pub async fn all(&self) -> Result<BTreeMap<Uuid, SeenSnapshot>, Error> {
        let prefix = self.0.prefix.snapshots();
        let keys = self.0.list(&prefix).await?;
        let snapshots = keys.iter().filter_map(|kv| {
            let id = Prefix::id_after(&prefix, &kv.key)?;
            Some((id, SeenSnapshot::read(kv).ok()?))
        });
        Ok(snapshots.collect())
    }

    pub async fn get(&self, id: Uuid) -> Result<Option<SeenSnapshot>, Error> {
        let found = self.0.get(&self.0.prefix.snapshot(id)).await?;
        found.as_ref().map(SeenSnapshot::read).transpose()
    }

    /// Requests a snapshot of the volume with this id and a name of 1 to 63 bytes. A failed
    /// snapshot is requested again. Any other one with this id is returned unchanged, even if it is
    /// one of another volume.
    pub async fn ask(&self, id: Uuid, volume: VolumeId, name: &str) -> Result<SeenSnapshot, Error> {
        if !(1..=MAX_NAME).contains(&name.len()) {
            let why = format!("a name has 1 to {MAX_NAME} bytes");
            return Err(Error::Invalid { field: "name", why });
        }
        let (key, record) = (
            self.0.prefix.snapshot(id),
            self.0.prefix.core_volume(volume),
        );
        for _ in 0..ATTEMPTS {
            let found = self.get(id).await?;
            let next = match &found {
                None => {
                    self.must_have_room(&key, volume).await?;
                    SnapshotKey::new(volume, name)
                }
                Some(found) if found.key.want == Want::Gone => {
                    return Err(Error::SnapshotGoes { key });
                }
                Some(found)
                    if found.key.is == CutState::Failed
                        && found.key.volume() == volume
                        && found.key.former.len() < MAX_FORMER =>
                {
                    found.key.asked_again()
                }
                Some(found) => return Ok(found.clone()),
            };
            let txn = Txn::default()
                .if_modified(&key, found.map_or(0, |found| found.revision))
                .if_not_created(&record, 0)
                .put(&key, bytes(&next))
                .read_on_failure(&record);
            let answer = self.0.transact(&key, txn).await?;
            if answer.is_made {
                let revision = answer.revision;
                return Ok(SeenSnapshot {
                    key: next,
                    revision,
                });
            }
            if answer.found.into_iter().next().flatten().is_none() {
                let key = record;
                return Err(Error::NoVolume { key, volume });
            }
        }
        Err(Error::Contended { key })
    }

    async fn must_have_room(&self, key: &str, volume: VolumeId) -> Result<(), Error> {
        let all = self.all().await?;
        let of_volume = all.values().filter(|one| one.key.volume() == volume);
        let (most, of) = if of_volume.count() >= MAX_OF_VOLUME {
            (MAX_OF_VOLUME, "volume")
        } else if all.len() >= MAX_SNAPSHOTS {
            (MAX_SNAPSHOTS, "cluster")
        } else {
            return Ok(());
        };
        Err(Error::TooManySnapshots {
            key: key.to_owned(),
            most,
            of,
        })
    }

    /// The replicas of which a snapshot can be cut now. `None`: there is no such volume. A volume
    /// restored from a backup has no such replica before it was opened: the backup may name the
    /// wrong ones as in sync.
    pub async fn sources(&self, volume: VolumeId) -> Result<Option<CutSources>, Error> {
        let key = self.0.prefix.core_volume(volume);
        let Some(kv) = self.0.get(&key).await? else {
            return Ok(None);
        };
        let (value, record) = record::decode(&kv.value).map_err(|why| why.at(&key))?;
        let number = |field: &str| {
            let found = value[field].as_u64();
            found.ok_or_else(|| damaged(&key, &format!("it has no {field}")))
        };
        let CutNodes { leases, .. } = self.nodes().await?;
        let stands = |holder: &Holder| {
            let lease = leases.get(&holder.node);
            lease.is_some_and(|(incarnation, _)| *incarnation == holder.incarnation)
        };
        let mut sources = CutSources {
            revision: kv.mod_revision,
            bytes: number("blocks")?.saturating_mul(number("block_size")?),
            holder: match record.holder {
                None => CutHolder::None,
                Some(holder) if stands(&holder) => CutHolder::Stands(holder),
                Some(holder) => CutHolder::Over(holder.node),
            },
            replicas: Vec::new(),
        };
        if !record::read_at_opening(&value).is_empty() {
            return Ok(Some(sources));
        }
        let replicas = value["members"].as_array().into_iter().flatten();
        let in_sync = replicas.filter(|replica| replica["state"]["state"] == "in_sync");
        let named: Vec<(NodeId, ExportId)> = in_sync
            .filter_map(|replica| {
                let id = |field: &str| replica[field].as_str()?.parse::<Uuid>().ok();
                Some((NodeId(id("node")?), ExportId(id("device")?)))
            })
            .collect();
        for (node, export_id, export) in self.0.exports_of(&named).await? {
            let features = leases.get(&node).map_or(&[][..], |(_, features)| features);
            let is_able = features.iter().any(|one| one == SNAPSHOTS);
            if is_able && export.want == Want::There && export.is == Is::There {
                sources.replicas.push(CutSource {
                    node,
                    export_id,
                    device: export.device,
                });
            }
        }
        Ok(Some(sources))
    }

    /// Executes the change. False: the key, the record or the node's lease has changed since.
    pub async fn change(&self, change: &SnapshotChange<'_>) -> Result<bool, Error> {
        let SnapshotChange { id, seen, by, .. } = change;
        let key = self.0.prefix.snapshot(*id);
        let mut txn = Txn::default()
            .if_modified(&key, seen.revision)
            .if_not_created(&self.0.prefix.meta(), 0)
            .if_created(&self.0.prefix.lease(by.node), by.incarnation.0 as i64)
            .read_on_failure(&key);
        if let Some(revision) = change.record {
            let record = self.0.prefix.core_volume(seen.key.volume());
            txn = txn.if_modified(&record, revision);
        }
        let txn = match &change.next {
            Some(next) => txn.put(&key, bytes(next)),
            None => txn.delete(&key),
        };
        let answer = self.0.transact(&key, txn).await?;
        if answer.is_made {
            return Ok(true);
        }
        // An earlier copy of the transaction was made.
        let found = answer.found.into_iter().next().flatten();
        Ok(match (&change.next, found) {
            (Some(next), Some(kv)) => SnapshotKey::decode(&kv).is_ok_and(|found| found == *next),
            (None, found) => found.is_none(),
            (Some(_), None) => false,
        })
    }

    /// Requests the deletion of the snapshot. Its nodes delete the lvols, perhaps once they return.
    /// Lvols on nodes without a lease that are removed or evicted are given up. False: there is no
    /// such snapshot.
    pub async fn delete(&self, id: Uuid) -> Result<bool, Error> {
        let key = self.0.prefix.snapshot(id);
        let mut was_there = false;
        for _ in 0..ATTEMPTS {
            let Some(seen) = self.get(id).await? else {
                return Ok(was_there);
            };
            was_there = true;
            let CutNodes { keys, leases } = self.nodes().await?;
            let mut next = seen.key.unwanted();
            let mut txn = Txn::default().if_modified(&key, seen.revision);
            for node in next.former.iter().map(|cut| NodeId(cut.node)) {
                if keys.get(&node).is_none_or(|key| key.evict) && !leases.contains_key(&node) {
                    txn = txn.if_created(&self.0.prefix.lease(node), 0);
                }
            }
            next.former.retain(|cut| {
                let node = NodeId(cut.node);
                leases.contains_key(&node) || keys.get(&node).is_some_and(|key| !key.evict)
            });
            if next.former.is_empty() {
                txn = txn.delete(&key);
            } else if next == seen.key {
                return Ok(true);
            } else {
                next.why = None;
                txn = txn.put(&key, bytes(&next));
            }
            if self.0.transact(&key, txn).await?.is_made {
                return Ok(true);
            }
        }
        Err(Error::Contended { key })
    }

    /// Gives up the lvols of a node that is removed. A snapshot there stays listed, as one that is
    /// not available, until it is deleted.
    pub(crate) async fn end_of(&self, node: NodeId) -> Result<(), Error> {
        let lease = self.0.prefix.lease(node);
        for (id, seen) in self.all().await? {
            let next = seen.key.without_node(node);
            if next == seen.key {
                continue;
            }
            let key = self.0.prefix.snapshot(id);
            let txn = Txn::default()
                .if_created(&lease, 0)
                .if_modified(&key, seen.revision);
            let is_over = next.want == Want::Gone && next.former.is_empty();
            let txn = if is_over {
                txn.delete(&key)
            } else {
                txn.put(&key, bytes(&next))
            };
            self.0.transact(&key, txn).await?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
