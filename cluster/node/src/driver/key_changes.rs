//! Passes changes of keys, which the watches of etcd show, to the parts of the driver.

use std::collections::BTreeSet;

use nacre_cluster_core::{BootTime, ExportId, NodeId, Revision, VolumeId};
use nacre_cluster_etcd::{KeyValue, Prefix};
use uuid::Uuid;

use super::in_effect::SeenPublications;
use super::{Driver, Phase};
use crate::clock;
use crate::events::Decision;
use crate::export::Export;
use crate::follow::{KeyChange, Kind};
use crate::keys::NodeKey;
use crate::operations::{OperationKey, Progress};
use crate::publication::Publication;
use crate::snapshot::SeenSnapshot;

impl Driver {
    pub(super) fn deleted_lease(&mut self, of: NodeId, revision: i64, now: BootTime) {
        if self.nodes.deleted(of, revision, now, &self.shared.events) {
            self.volumes.wake_all();
        }
        if let Phase::In(lease) = &mut self.phase
            && of == self.me.id
            && (lease.holder().incarnation.0 as i64) < revision
        {
            let of = lease.holder().incarnation;
            lease.end(of);
            self.shared.word.set(lease.until());
        }
    }

    pub(super) fn ignored(&self, key: &[u8], why: Option<String>) {
        if let Some(why) = why {
            let key = String::from_utf8_lossy(key).into_owned();
            self.shared.events.note(Decision::KeyIgnored { key, why });
        }
    }

    pub(super) fn news(&mut self, kind: Kind, change: KeyChange) {
        let revision = SeenPublications::revision_of(kind, &change);
        let is_list = matches!(change, KeyChange::All { .. });
        let is_other_store = self.is_other_store;
        match change {
            KeyChange::All { .. } if self.is_other_store => {}
            KeyChange::All { keys, revision } => {
                let ids: BTreeSet<Uuid> = {
                    let prefix = self.prefix_of(kind);
                    let ids = keys.iter().map(|kv| Prefix::id_after(&prefix, &kv.key));
                    ids.flatten().collect()
                };
                for kv in &keys {
                    self.put(kind, kv);
                }
                for id in self.known(kind) {
                    if !ids.contains(&id) {
                        self.shared.seen_keys.not_listed(kind, id, revision);
                        self.deleted(kind, id, revision);
                    }
                }
                match kind {
                    Kind::Leases => self.nodes.is_listed = true,
                    // The engine learns that there is none.
                    Kind::Exports => self.exports.listed(),
                    Kind::Snapshots => self.snapshots.listed(),
                    _ => {}
                }
                self.shared.seen_keys.listed(kind);
                self.listed(kind);
            }
            KeyChange::OtherStore => self.other_store(clock::now()),
            // The former store's, or of one whose restore has not ended.
            KeyChange::Put(_) | KeyChange::Deleted { .. } if self.is_other_store => {}
            KeyChange::Put(kv) => self.put(kind, &kv),
            KeyChange::Deleted { key, revision } => {
                let id = Prefix::id_after(&self.prefix_of(kind), &key);
                if let Some(id) = id {
                    self.deleted(kind, id, revision);
                }
            }
        }
        if let Some(revision) = revision.filter(|_| !is_other_store) {
            self.publications.shown(revision, is_list);
        }
    }

    /// Calls [`crate::Serving::listed`] after the last of the first lists.
    fn listed(&mut self, kind: Kind) {
        if self.awaited.remove(&kind) && self.awaited.is_empty() {
            self.show_news();
            self.volumes.show_new(clock::now());
            self.volumes.serving().listed();
        }
    }

    pub(super) fn prefix_of(&self, kind: Kind) -> String {
        match kind {
            Kind::Leases | Kind::Renewals => self.prefix.leases(),
            Kind::Nodes => self.prefix.nodes(),
            Kind::Volumes => self.prefix.volumes(),
            Kind::Publications => self.prefix.publications(),
            Kind::Operations => self.prefix.operations(),
            Kind::Exports => self.prefix.exports(self.me.id),
            Kind::Snapshots => self.prefix.snapshots(),
        }
    }

    fn known(&self, kind: Kind) -> Vec<Uuid> {
        let volumes = |ids: Vec<VolumeId>| ids.into_iter().map(|id| id.0).collect();
        match kind {
            // A list of one key says nothing about the others.
            Kind::Renewals => Vec::new(),
            Kind::Leases => self.nodes.standing.keys().map(|node| node.0).collect(),
            Kind::Nodes => self.nodes.described.keys().map(|node| node.0).collect(),
            Kind::Volumes => volumes(self.volumes.ids()),
            Kind::Publications => volumes(self.volumes.published()),
            Kind::Operations => volumes(self.operations.keys().copied().collect()),
            Kind::Exports => self.exports.all.keys().map(|export| export.0).collect(),
            Kind::Snapshots => self.snapshots.all.keys().copied().collect(),
        }
    }

    fn put(&mut self, kind: Kind, kv: &KeyValue) {
        let Some(id) = Prefix::id_after(&self.prefix_of(kind), &kv.key) else {
            return self.ignored(&kv.key, Some("its name ends without an id".to_owned()));
        };
        let refused = match kind {
            Kind::Leases | Kind::Renewals => self.put_lease(kv).err(),
            Kind::Nodes => match NodeKey::decode(kv) {
                Ok(key) => {
                    self.nodes.describe(NodeId(id), Some(key));
                    self.volumes.wake_all();
                    None
                }
                Err(error) => Some(error.to_string()),
            },
            Kind::Volumes => {
                let revision = Revision(kv.mod_revision as u64);
                self.volumes.update(VolumeId(id), revision, &kv.value).err()
            }
            Kind::Publications => match Publication::decode(kv) {
                Ok(publication) => {
                    self.volumes.publish(VolumeId(id), Some(&publication));
                    self.publications.set_read(VolumeId(id), true);
                    None
                }
                Err(error) => {
                    self.publications.set_read(VolumeId(id), false);
                    Some(error.to_string())
                }
            },
            Kind::Exports => match Export::decode(kv) {
                Ok(export) => {
                    self.exports.put(ExportId(id), export);
                    None
                }
                Err(error) => Some(error.to_string()),
            },
            Kind::Snapshots => match SeenSnapshot::read(kv) {
                Ok(snapshot) => {
                    self.snapshots.put(id, snapshot);
                    None
                }
                Err(error) => {
                    // One of a later version: this node carries nothing out for it.
                    self.snapshots.deleted(&id);
                    Some(error.to_string())
                }
            },
            Kind::Operations => match OperationKey::decode(kv) {
                Ok(operation) => {
                    let progress = Progress::new(operation, kv.mod_revision);
                    self.operations.insert(VolumeId(id), progress);
                    None
                }
                Err(error) => Some(error.to_string()),
            },
        };
        // Also a record of a later version: without it, its volume would seem to be deleted.
        self.shared.seen_keys.put(kind, id, kv);
        self.ignored(&kv.key, refused);
    }

    fn put_lease(&mut self, kv: &KeyValue) -> Result<(), String> {
        let key = self.leases.decode(kv).map_err(|error| error.to_string())?;
        let now = clock::now();
        if self.nodes.put(&key, now, &self.shared.events) {
            self.volumes.wake_all();
        }
        if let Phase::In(lease) = &mut self.phase
            && key.node == self.me.id
        {
            // A renewal whose answer is missing.
            lease.renewed(key.incarnation, key.number, now);
            self.shared.word.set(lease.until());
        }
        Ok(())
    }

    fn deleted(&mut self, kind: Kind, id: Uuid, revision: i64) {
        self.shared.seen_keys.deleted(kind, id, revision);
        match kind {
            Kind::Leases | Kind::Renewals => self.deleted_lease(NodeId(id), revision, clock::now()),
            Kind::Nodes => self.nodes.describe(NodeId(id), None),
            Kind::Volumes => {
                let revision = Revision(revision as u64);
                self.volumes.deleted(VolumeId(id), revision);
            }
            Kind::Publications => {
                self.volumes.publish(VolumeId(id), None);
                self.publications.set_read(VolumeId(id), true);
            }
            Kind::Operations => drop(self.operations.remove(&VolumeId(id))),
            Kind::Exports => self.exports.deleted(&ExportId(id)),
            Kind::Snapshots => self.snapshots.deleted(&id),
        }
    }
}
