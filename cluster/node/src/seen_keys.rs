//! The values of the keys that a node follows in etcd. The node writes them to a file
//! ([`crate::rebuild::Copy`]), from which the keys can be made again after a loss of etcd.
//!
//! Most changes of a volume's record name another holder, or other replicas that are in sync. The
//! labels of the replicas have these facts too, so such a change does not write the file.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use nacre_cluster_etcd::KeyValue;
use parking_lot::Mutex;
use serde_json::Value;
use tokio::sync::Notify;
use uuid::Uuid;

use crate::follow::Kind;

/// The kinds of keys in a copy.
const COPIED: [Kind; 5] = [
    Kind::Nodes,
    Kind::Volumes,
    Kind::Publications,
    Kind::Exports,
    Kind::Snapshots,
];
/// Fields of a record, and of its replicas, whose change makes no new copy.
const OF_RECORD: [&str; 8] = [
    "epoch",
    "serving",
    "revision",
    "holder",
    "incarnation",
    "next",
    "closed",
    "op",
];
const OF_REPLICA: [&str; 2] = ["state", "why"];

/// Most volumes for which the revision of the publication's deletion is kept.
const MAX_UNPUBLISHED: usize = 1024;

/// A value, and the revision at which its key was created.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct SeenKey {
    pub(crate) value: Arc<Value>,
    pub(crate) created: i64,
    /// Hash of the part whose change makes a new copy.
    hash: u64,
}

/// The keys of each kind by the id at the end of their names.
#[derive(Debug, Clone, Default)]
pub(crate) struct Keys {
    pub(crate) of_kind: BTreeMap<Kind, BTreeMap<Uuid, SeenKey>>,
    /// The last revision of a change.
    pub(crate) revision: i64,
    /// The etcd that the keys are of: [`crate::keys::Cluster::store`].
    pub(crate) store: Option<Uuid>,
    /// The kinds whose list has arrived.
    listed: BTreeSet<Kind>,
    /// How often etcd was found to have other data.
    changes: u64,
    /// The last deletions of publications.
    unpublished: Unpublished,
}

/// The revisions of the last deletions of publications, by volume.
#[derive(Debug, Clone, Default)]
struct Unpublished {
    last: BTreeMap<Uuid, i64>,
    /// The latest revision of the deletions that were dropped from `last`.
    others: i64,
}

/// The knowledge of this node about the deletion of a publication that etcd does not have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SeenDeletion {
    /// The publication exists, as far as this node has seen.
    NotYet,
    /// The deletion, if there was one, is of this revision or an earlier one.
    Until(i64),
}

impl Unpublished {
    fn note(&mut self, id: Uuid, revision: i64) {
        self.last.insert(id, revision);
        if self.last.len() > MAX_UNPUBLISHED
            && let Some((oldest, at)) = self.last.iter().min_by_key(|(_, at)| **at)
        {
            let (oldest, at) = (*oldest, *at);
            self.last.remove(&oldest);
            self.others = self.others.max(at);
        }
    }
}

/// Identifies the contents of etcd in which a node has found its cluster. They are other ones after
/// a restore.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoreView {
    pub(crate) store: Uuid,
    pub(crate) changes: u64,
}

/// Shared by the cluster's thread, which sees the keys, and the task that writes the copy.
#[derive(Debug, Default)]
pub(crate) struct SeenKeys {
    keys: Mutex<Keys>,
    /// Notified by each change that belongs into a copy.
    news: Notify,
}

impl SeenKeys {
    pub(crate) fn put(&self, kind: Kind, id: Uuid, kv: &KeyValue) {
        if !COPIED.contains(&kind) {
            return;
        }
        // The caller has decoded it.
        let Ok(value) = serde_json::from_slice::<Value>(&kv.value) else {
            return;
        };
        let seen = SeenKey {
            hash: hash(kind, &value),
            value: Arc::new(value),
            created: kv.create_revision,
        };
        let mut keys = self.keys.lock();
        keys.revision = keys.revision.max(kv.mod_revision);
        let of_kind = keys.of_kind.entry(kind).or_default();
        let is_new = of_kind
            .get(&id)
            .is_none_or(|former| former.hash != seen.hash);
        of_kind.insert(id, seen);
        drop(keys);
        if is_new {
            self.news.notify_one();
        }
    }

    /// A key of a former list is missing in a later one, of `revision`. The key was deleted at an
    /// earlier revision, which is not known, so no revision of a deletion is kept.
    pub(crate) fn not_listed(&self, kind: Kind, id: Uuid, revision: i64) {
        self.removed(kind, id, revision, false);
    }

    pub(crate) fn deleted(&self, kind: Kind, id: Uuid, revision: i64) {
        self.removed(kind, id, revision, true);
    }

    fn removed(&self, kind: Kind, id: Uuid, revision: i64, is_exact: bool) {
        let mut keys = self.keys.lock();
        let Some(of_kind) = keys.of_kind.get_mut(&kind) else {
            return;
        };
        if of_kind.remove(&id).is_some() {
            if kind == Kind::Publications && is_exact {
                keys.unpublished.note(id, revision);
            }
            keys.revision = keys.revision.max(revision);
            self.news.notify_one();
        }
    }

    pub(crate) fn listed(&self, kind: Kind) {
        self.keys.lock().listed.insert(kind);
        self.news.notify_one();
    }

    /// etcd has other data: forgets all keys.
    pub(crate) fn begin_anew(&self) {
        let mut keys = self.keys.lock();
        *keys = Keys {
            changes: keys.changes + 1,
            ..Keys::default()
        };
    }

    /// The node has found its cluster in the etcd with this id ([`crate::keys::Cluster::store`]).
    pub(crate) fn found(&self, store: Uuid) {
        self.keys.lock().store = Some(store);
    }

    /// The ids of this node's exports, with the etcd that has them. `None`: their list has not
    /// arrived from the etcd in which the node has found the cluster.
    pub(crate) fn exports(&self) -> Option<(StoreView, BTreeSet<Uuid>)> {
        let keys = self.keys.lock();
        let store = keys
            .store
            .filter(|_| keys.listed.contains(&Kind::Exports))?;
        let view = StoreView {
            store,
            changes: keys.changes,
        };
        let exports = keys.of_kind.get(&Kind::Exports);
        let ids = exports.into_iter().flat_map(BTreeMap::keys).copied();
        Some((view, ids.collect()))
    }

    /// The deletion of the volume's publication, which etcd does not have.
    pub(crate) fn unpublished(&self, volume: Uuid) -> SeenDeletion {
        let keys = self.keys.lock();
        let of_kind = keys.of_kind.get(&Kind::Publications);
        if of_kind.is_some_and(|published| published.contains_key(&volume)) {
            return SeenDeletion::NotYet;
        }
        let Unpublished { last, others } = &keys.unpublished;
        SeenDeletion::Until(last.get(&volume).copied().unwrap_or(*others))
    }

    /// All keys; `None`: not all lists have arrived.
    pub(crate) fn all(&self) -> Option<Keys> {
        let keys = self.keys.lock();
        let is_complete = COPIED.iter().all(|kind| keys.listed.contains(kind));
        is_complete.then(|| keys.clone())
    }

    /// Waits for a change that belongs into a copy.
    pub(crate) async fn news(&self) {
        self.news.notified().await;
    }
}

/// The hash of the value without the fields whose change makes no new copy.
fn hash(kind: Kind, value: &Value) -> u64 {
    let mut hasher = DefaultHasher::new();
    let mut value = value.clone();
    if kind == Kind::Volumes {
        remove(&mut value, &OF_RECORD);
        let replicas = value["members"].as_array_mut();
        for replica in replicas.into_iter().flatten() {
            remove(replica, &OF_REPLICA);
        }
    }
    value.to_string().hash(&mut hasher);
    hasher.finish()
}

fn remove(value: &mut Value, fields: &[&str]) {
    if let Some(object) = value.as_object_mut() {
        for field in fields {
            object.remove(*field);
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;
    use serde_json::json;

    use super::*;

    fn kv(revision: i64, value: &Value) -> KeyValue {
        KeyValue {
            value: value.to_string().into_bytes(),
            create_revision: 3,
            mod_revision: revision,
            ..KeyValue::default()
        }
    }

    fn has_news(seen: &SeenKeys) -> bool {
        seen.news().now_or_never().is_some()
    }

    /// Goal: a copy is written for each change that labels do not have, and for no other. Method:
    /// changes of a record, a list, and a deletion.
    #[test]
    fn changes_that_labels_have_make_no_copy() {
        let (seen, id) = (SeenKeys::default(), Uuid::from_u128(1));
        let record = json!({
            "name": "v", "epoch": 1, "revision": 1, "settings": {},
            "members": [{ "id": id, "state": { "state": "in_sync" } }],
        });
        seen.put(Kind::Volumes, id, &kv(5, &record));
        assert!(has_news(&seen));
        let mut later = record.clone();
        later["epoch"] = 2.into();
        later["holder"] = json!(id);
        later["members"][0]["state"] = json!({ "state": "filling" });
        seen.put(Kind::Volumes, id, &kv(6, &later));
        assert!(!has_news(&seen));
        later["name"] = "w".into();
        seen.put(Kind::Volumes, id, &kv(7, &later));
        assert!(has_news(&seen));
        seen.put(Kind::Leases, id, &kv(8, &json!({})));
        assert!(!has_news(&seen));

        assert!(seen.all().is_none());
        for kind in COPIED {
            assert!(seen.all().is_none());
            seen.listed(kind);
        }
        let keys = seen.all().expect("complete");
        assert_eq!(*keys.of_kind[&Kind::Volumes][&id].value, later);
        assert_eq!(keys.revision, 7);
        assert!(has_news(&seen));

        seen.deleted(Kind::Publications, id, 9);
        assert!(!has_news(&seen));
        seen.deleted(Kind::Volumes, id, 9);
        assert!(has_news(&seen));
        assert_eq!(seen.all().map(|keys| keys.revision), Some(9));
        seen.found(id);
        assert_eq!(seen.all().and_then(|keys| keys.store), Some(id));
        seen.begin_anew();
        assert!(seen.all().is_none());
    }

    /// Goal: the deletion of a publication is known from when this node sees it, also without a
    /// note in etcd. Method: more deletions than are known one by one, and another etcd.
    #[test]
    fn deletions_of_publications() {
        let (seen, volume) = (SeenKeys::default(), Uuid::from_u128(1));
        assert_eq!(seen.unpublished(volume), SeenDeletion::Until(0));
        let publish = |id, revision| seen.put(Kind::Publications, id, &kv(revision, &json!({})));
        publish(volume, 5);
        assert_eq!(seen.unpublished(volume), SeenDeletion::NotYet);
        seen.deleted(Kind::Publications, volume, 6);
        assert_eq!(seen.unpublished(volume), SeenDeletion::Until(6));
        publish(volume, 7);
        assert_eq!(seen.unpublished(volume), SeenDeletion::NotYet);
        seen.deleted(Kind::Publications, volume, 8);
        for number in 0..MAX_UNPUBLISHED as i64 {
            let id = Uuid::from_u128(100 + number as u128);
            publish(id, 9);
            seen.deleted(Kind::Publications, id, 10 + number);
        }
        // The oldest one is known no longer by itself, and is covered.
        assert_eq!(seen.unpublished(volume), SeenDeletion::Until(8));
        assert_eq!(seen.keys.lock().unpublished.last.len(), MAX_UNPUBLISHED);
        assert_eq!(
            seen.unpublished(Uuid::from_u128(101)),
            SeenDeletion::Until(11)
        );
        seen.begin_anew();
        assert_eq!(seen.unpublished(volume), SeenDeletion::Until(0));
        // Other nodes may have seen it long before this list, and confirm no later revision.
        publish(volume, 20);
        seen.not_listed(Kind::Publications, volume, 100);
        assert_eq!(seen.unpublished(volume), SeenDeletion::Until(0));
    }

    /// Goal: an export that is absent counts only against a list of the same etcd. Method: an
    /// export is seen and deleted, then etcd is restored twice from one snapshot.
    #[test]
    fn exports_are_those_of_one_etcd() {
        let (seen, id) = (SeenKeys::default(), Uuid::from_u128(1));
        seen.put(Kind::Exports, id, &kv(5, &json!({})));
        seen.found(id);
        assert_eq!(seen.exports(), None, "no list");
        seen.listed(Kind::Exports);
        let (first, ids) = seen.exports().expect("a list");
        assert_eq!(ids, BTreeSet::from([id]));
        seen.deleted(Kind::Exports, id, 6);
        assert_eq!(seen.exports(), Some((first, BTreeSet::new())));
        seen.begin_anew();
        assert_eq!(seen.exports(), None);
        seen.found(id);
        assert_eq!(seen.exports(), None, "no list of this etcd");
        seen.listed(Kind::Exports);
        let (second, ids) = seen.exports().expect("a list");
        assert!(ids.is_empty() && second != first);
    }
}
