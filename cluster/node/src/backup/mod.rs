//! Backups of a cluster: all keys that outlive its nodes, at one revision of etcd, as a file.
//!
//! ```text
//!   etcd ─▶ save ─▶ Backup ─▶ encode ─▶ file ─▶ parse ─▶ Backup ─▶ restore ─▶ an empty etcd
//! ```
//!
//! Keys that concern running nodes or this etcd are left out: leases, requests of operators, the
//! log of ended leases, reports for a rebuild, the brake, the owner, and marks of restores and of
//! deleted publications. A restored volume has no holder, and its record may be older than the
//! labels of its replicas. Its record has the field `restored`, which makes the next holder read
//! the labels of all replicas.

mod file;
mod restore;
mod writer;

use nacre_cluster_core::NodeId;
use nacre_cluster_etcd::{Client, Prefix};
use serde_json::{Value, json};
use uuid::Uuid;

use crate::error::{Error, damaged};
use crate::keys::{Cluster, FORMAT, NodeKey, later_format};
use crate::record::Unread;

pub(crate) use file::crc;
pub use file::{Age, LARGEST, SavedKey};
pub(crate) use restore::write_rebuilt;
pub use restore::{RestoreOptions, Restored, restore};
pub(crate) use writer::{Mark, Source, Writer};

/// Kinds of keys that a backup leaves out. This version writes none of `paths` and `obs`.
const TRANSIENT: [&str; 6] = ["lease/", "op/", "log/", "paths/", "obs/", "found/"];
/// Single keys that it leaves out.
const TRANSIENT_KEYS: [&str; 4] = ["steward", "owner", "restoring", "unpublished"];

/// The keys of a cluster at one revision, without those of running nodes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Backup {
    /// Id and name of the cluster.
    pub id: Uuid,
    pub name: String,
    /// The revision of etcd.
    pub revision: i64,
    /// Seconds since 1970.
    pub created: u64,
    /// Volumes last, in order of their creation.
    pub keys: Vec<SavedKey>,
}

/// A node that never returns, or one of its devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lost {
    pub node: NodeId,
    /// The device's name on the node; `None`: all of its devices.
    pub device: Option<String>,
}

impl Lost {
    fn has(&self, replica: &Value) -> bool {
        let is_text = |field: &str, text: &str| replica[field] == *text;
        let device = self.device.as_ref();
        is_text("node", &self.node.0.to_string())
            && device.is_none_or(|device| is_text("node_device", device))
    }
}

/// The reason why a backup was not made, read or restored.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BackupError {
    #[error("it is no backup of a cluster: {why}. Name the right file")]
    Foreign { why: String },
    #[error("it has format {found}, and this program knows {known}. Use the newer program")]
    Newer { found: u64, known: u64 },
    #[error("it was cut off after {keys} keys. Use another backup")]
    Cut { keys: usize },
    #[error("line {line} is damaged: {why}. Use another backup")]
    Damaged { line: usize, why: String },
    #[error("its checksum is {found}, and its last line says {expected}. Use another backup")]
    Checksum { found: String, expected: String },
    #[error("it has {bytes} bytes, and {most} are the most", most = LARGEST)]
    TooLarge { bytes: u64 },
    #[error("key \"{key}\" of the backup: {why}. Use another backup")]
    Unusable { key: String, why: String },
    #[error(
        "key \"{key}\" of the backup has format {found}, and this program knows {known}. Use the newer program"
    )]
    NewerKey { key: String, found: u64, known: u64 },
    #[error("the backup has no node \"{node}\"; it has {known}")]
    NoNode { node: String, known: String },
    #[error("no volume of the backup has a replica on \"{node}:{device}\"; the node has {known}")]
    NoDevice {
        node: String,
        device: String,
        known: String,
    },
    #[error(
        "key \"{key}\" exists: a backup is restored only where no key starts with {prefix}. Use an \
         empty etcd, or delete these keys with `etcdctl del --prefix {prefix}`"
    )]
    NotEmpty { key: String, prefix: String },
    #[error(
        "key \"{key}\": the restore of another file has not ended. Restore that file, or delete the \
         keys with `etcdctl del --prefix {prefix}` first"
    )]
    OtherRestore { key: String, prefix: String },
    #[error(
        "key \"{key}\": `rebuild-store` has not ended. Run it again, or delete the keys with \
         `etcdctl del --prefix {prefix}` first"
    )]
    Rebuilding { key: String, prefix: String },
    #[error("key \"{key}\": another restore has begun meanwhile. Wait for its end")]
    Overtaken { key: String },
    #[error("{0}")]
    Cluster(#[from] Error),
}

fn is_transient(key: &str) -> bool {
    TRANSIENT.iter().any(|kind| key.starts_with(kind)) || TRANSIENT_KEYS.contains(&key)
}

impl Backup {
    /// Reads all keys at one revision. `created`: the time of day, in seconds since 1970.
    pub async fn save(client: &Client, prefix: &Prefix, created: u64) -> Result<Self, BackupError> {
        let all = prefix.to_string();
        let page = client.list(&all).await.map_err(Error::at(&all))?;
        let mut keys = Vec::new();
        for kv in page.keys {
            let full = String::from_utf8_lossy(&kv.key).into_owned();
            let key = full.strip_prefix(&all).unwrap_or(&full).to_owned();
            if is_transient(&key) {
                continue;
            }
            let value = String::from_utf8(kv.value);
            let value = value.map_err(|_| damaged(&full, &"its value is no text"))?;
            let order = if key.starts_with("vol/") {
                kv.create_revision
            } else {
                0
            };
            keys.push((order, SavedKey { key, value }));
        }
        keys.sort_by_key(|(order, _)| *order);
        let keys: Vec<SavedKey> = keys.into_iter().map(|(_, key)| key).collect();
        let meta = keys.iter().find(|saved| saved.key == "meta");
        let Some(meta) = meta else {
            return Err(Error::NoCluster { key: prefix.meta() }.into());
        };
        let meta: Cluster = decode(meta)?;
        Ok(Self {
            id: meta.id,
            name: meta.name,
            revision: page.revision,
            created,
            keys,
        })
    }

    /// The cluster's own key.
    fn meta(&self) -> Result<Cluster, BackupError> {
        let meta = self.keys.iter().find(|saved| saved.key == "meta");
        let missing = || BackupError::Unusable {
            key: "meta".to_owned(),
            why: "it is missing".to_owned(),
        };
        decode(meta.ok_or_else(missing)?)
    }

    pub fn volumes(&self) -> usize {
        self.records().count()
    }

    /// The node with this name or id in the backup.
    pub fn node(&self, text: &str) -> Result<NodeId, BackupError> {
        let mut known = Vec::new();
        for saved in &self.keys {
            let Some(id) = Prefix::id_after("node/", saved.key.as_bytes()) else {
                continue;
            };
            let key: NodeKey = decode(saved)?;
            if key.description.name == text || id.to_string() == text {
                return Ok(NodeId(id));
            }
            known.push(key.description.name);
        }
        Err(BackupError::NoNode {
            node: text.to_owned(),
            known: known.join(", "),
        })
    }

    /// Parses `NODE` or `NODE:DEVICE`: the node's name or id, and the name of a device on it that
    /// has a replica.
    pub fn lost(&self, text: &str) -> Result<Lost, BackupError> {
        let Some((name, device)) = text.split_once(':') else {
            let node = self.node(text)?;
            return Ok(Lost { node, device: None });
        };
        let node = self.node(name)?;
        let lost = Lost {
            node,
            device: Some(device.to_owned()),
        };
        let whole = Lost { node, device: None };
        let mut known = Vec::new();
        for saved in self.records() {
            let (record, _) = crate::record::decode(saved.value.as_bytes())
                .map_err(|why| unread(&saved.key, why))?;
            let replicas = record["members"].as_array().into_iter().flatten();
            for replica in replicas.filter(|replica| whole.has(replica)) {
                if lost.has(replica) {
                    return Ok(lost);
                }
                known.extend(replica["node_device"].as_str().map(str::to_owned));
            }
        }
        known.sort();
        known.dedup();
        Err(BackupError::NoDevice {
            node: name.to_owned(),
            device: device.to_owned(),
            known: if known.is_empty() {
                "none".to_owned()
            } else {
                known.join(", ")
            },
        })
    }

    fn records(&self) -> impl Iterator<Item = &SavedKey> {
        let keys = self.keys.iter();
        keys.filter(|saved| saved.key.starts_with("vol/"))
    }
}

fn decode<T: for<'a> serde::Deserialize<'a>>(saved: &SavedKey) -> Result<T, BackupError> {
    let damaged = |error| unusable(&saved.key, &error);
    serde_json::from_value(parse(saved)?).map_err(damaged)
}

/// The JSON, if it is of a known format.
fn parse(saved: &SavedKey) -> Result<Value, BackupError> {
    let value = serde_json::from_str(&saved.value);
    let value = value.map_err(|error| unusable(&saved.key, &error))?;
    match later_format(&value) {
        None => Ok(value),
        Some(found) => Err(newer(&saved.key, found)),
    }
}

fn newer(key: &str, found: u64) -> BackupError {
    BackupError::NewerKey {
        key: key.to_owned(),
        found,
        known: FORMAT,
    }
}

fn unread(key: &str, why: Unread) -> BackupError {
    match why {
        Unread::Newer { found } => newer(key, found),
        Unread::Damaged(why) => unusable(key, &why),
    }
}

fn unusable(key: &str, why: &impl ToString) -> BackupError {
    BackupError::Unusable {
        key: key.to_owned(),
        why: why.to_string(),
    }
}

/// The record of a volume for the restored cluster: without a holder, whose lease was another
/// etcd's. The lost replicas are empty, and their labels are not waited for.
fn restored_record(saved: &SavedKey, without: &[Lost]) -> Result<Vec<u8>, BackupError> {
    let (mut value, record) =
        crate::record::decode(saved.value.as_bytes()).map_err(|why| unread(&saved.key, why))?;
    let revision = value["revision"].as_u64();
    let revision = revision.ok_or_else(|| unusable(&saved.key, &"it has no revision"))?;
    // A second restore of the same record: the first version counts.
    if value.get("restored").is_none_or(Value::is_null) {
        value["restored"] = json!({ "epoch": record.epoch, "revision": revision });
    }
    value["holder"] = Value::Null;
    if let Some(fields) = value.as_object_mut() {
        for field in ["incarnation", "next", "closed", "op"] {
            fields.remove(field);
        }
    }
    let is_lost = |replica: &Value| without.iter().any(|lost| lost.has(replica));
    let mut lost: Vec<Value> = value["restored"]["lost"]
        .as_array()
        .cloned()
        .unwrap_or_default();
    for replica in value["members"].as_array_mut().into_iter().flatten() {
        if is_lost(replica) {
            replica["state"] = json!({ "state": "filling", "watermark": 0 });
            replica["why"] = "it was lost when the cluster was restored".into();
            if !lost.contains(&replica["id"]) {
                lost.push(replica["id"].clone());
            }
        }
    }
    if !lost.is_empty() {
        value["restored"]["lost"] = lost.into();
    }
    Ok(value.to_string().into_bytes())
}

/// The publication without hosts. True: it had some.
fn without_hosts(saved: &SavedKey) -> Result<(Vec<u8>, bool), BackupError> {
    let mut value = parse(saved)?;
    let hosts = value["hosts"].as_array();
    let has_hosts = hosts.is_some_and(|hosts| !hosts.is_empty()) || value["any_host"] == true;
    value["hosts"] = json!([]);
    value["any_host"] = false.into();
    Ok((value.to_string().into_bytes(), has_hosts))
}
