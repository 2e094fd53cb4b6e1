//! The file in which each node keeps a copy of the cluster's keys.
//!
//! ```text
//!   {"v":1,"meta":{…},"nodes":{…},"volumes":{…},…}
//!   CRC-64/NVME of the line before
//! ```
//!
//! It is no backup: it has only the keys that the node follows, such as the exports of this node
//! alone.

use std::collections::BTreeMap;
use std::sync::Arc;

use nacre_cluster_core::NodeId;
use nacre_cluster_etcd::{Client, Prefix};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use uuid::Uuid;

use crate::backup::{LARGEST, crc};
use crate::error::Error;
use crate::follow::Kind;
use crate::keys::{Cluster, FORMAT};
use crate::operator::Operator;
use crate::seen_keys::Keys;
use crate::snapshot::has_cut_on;

/// The keys that a node sees, at one time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Copy {
    pub(super) v: u64,
    pub meta: Cluster,
    /// The last revision of etcd that the node saw. Compare revisions of one store only.
    pub revision: i64,
    /// Seconds since 1970.
    pub created: u64,
    pub(super) nodes: BTreeMap<Uuid, Value>,
    pub(super) volumes: BTreeMap<Uuid, CopiedRecord>,
    pub(super) publications: BTreeMap<Uuid, Value>,
    /// The exports of this node.
    pub(super) exports: BTreeMap<Uuid, Value>,
    #[serde(default)]
    pub(super) snapshots: BTreeMap<Uuid, Value>,
}

/// A volume's record.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct CopiedRecord {
    /// The revision of its creation: volumes are listed in this order.
    pub(super) order: i64,
    pub(super) value: Value,
}

impl CopiedRecord {
    /// Its version; `None`: the record is damaged.
    pub(super) fn stamp(&self) -> Option<(u64, u64)> {
        let of = |field: &str| self.value[field].as_u64();
        Some((of("epoch")?, of("revision")?))
    }

    pub(super) fn replicas(&self) -> impl Iterator<Item = &Value> {
        self.value["members"].as_array().into_iter().flatten()
    }
}

/// The reason why a copy cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CopyError {
    #[error("it has {bytes} bytes, and {most} are the most", most = LARGEST)]
    TooLarge { bytes: u64 },
    #[error("its checksum does not match: it is damaged")]
    Checksum,
    #[error("it has format {found}, and this program knows {FORMAT}. Upgrade this daemon")]
    Newer { found: u64 },
    #[error("{why}")]
    Damaged { why: String },
}

impl Copy {
    /// A copy that has `meta` and no other key.
    pub fn of_cluster(meta: Cluster) -> Self {
        Self::from((meta, Keys::default(), 0))
    }

    pub fn encode(&self) -> Vec<u8> {
        let mut text = crate::keys::bytes(self);
        let sum = crc(&text);
        text.push(b'\n');
        text.extend(sum.into_bytes());
        text.push(b'\n');
        text
    }

    pub fn parse(text: &[u8]) -> Result<Self, CopyError> {
        let bytes = text.len() as u64;
        if bytes > LARGEST {
            return Err(CopyError::TooLarge { bytes });
        }
        let end = text.iter().position(|byte| *byte == b'\n');
        let (line, sum) = text.split_at(end.ok_or(CopyError::Checksum)?);
        if *sum != *format!("\n{}\n", crc(line)).as_bytes() {
            return Err(CopyError::Checksum);
        }
        let damaged = |error: serde_json::Error| CopyError::Damaged {
            why: error.to_string(),
        };
        let value: Value = serde_json::from_slice(line).map_err(damaged)?;
        if let Some(found) = crate::keys::later_format(&value) {
            return Err(CopyError::Newer { found });
        }
        serde_json::from_value(value).map_err(damaged)
    }

    /// Leaves out the volumes and snapshots that do not concern the node.
    pub(super) fn keep_of(&mut self, node: NodeId, labelled: &[Uuid]) {
        let id = node.0.to_string();
        let publications = &self.publications;
        self.volumes.retain(|volume, record| {
            let mut replicas = record.replicas();
            let shown = publications.get(volume);
            labelled.contains(volume)
                || replicas.any(|replica| replica["node"] == *id)
                || shown.is_some_and(|value| value["slots"].get(&id).is_some())
        });
        let volumes = &self.volumes;
        self.publications
            .retain(|volume, _| volumes.contains_key(volume));
        self.snapshots.retain(|_, value| has_cut_on(value, node));
    }
}

impl From<(Cluster, Keys, u64)> for Copy {
    fn from((meta, mut keys, created): (Cluster, Keys, u64)) -> Self {
        let mut of = |kind| keys.of_kind.remove(&kind).unwrap_or_default();
        let volumes = of(Kind::Volumes).into_iter().map(|(id, seen)| {
            let (order, value) = (seen.created, Arc::unwrap_or_clone(seen.value));
            (id, CopiedRecord { order, value })
        });
        let volumes = volumes.collect();
        let mut values = |kind| {
            let seen = of(kind).into_iter();
            seen.map(|(id, seen)| (id, Arc::unwrap_or_clone(seen.value)))
                .collect()
        };
        Self {
            v: FORMAT,
            meta,
            nodes: values(Kind::Nodes),
            volumes,
            publications: values(Kind::Publications),
            exports: values(Kind::Exports),
            snapshots: values(Kind::Snapshots),
            revision: keys.revision,
            created,
        }
    }
}

impl Operator {
    /// Waits until a key changes that a copy contains. Never returns if this process is no node.
    pub async fn copy_news(&self) {
        match self.seen_keys() {
            Some(seen) => seen.news().await,
            None => std::future::pending().await,
        }
    }

    /// The copy of the keys that this node sees. `None`: the lists of keys have not arrived, etcd
    /// has other data than they show, or this process is no node. `created`: seconds since 1970.
    pub async fn copy(&self, cluster: Uuid, created: u64) -> Result<Option<Copy>, Error> {
        let Some(seen) = self.seen_keys() else {
            return Ok(None);
        };
        // Read on both sides of the keys: a store that was lost, or restored, has another `meta`.
        let before = read(&self.client, &self.prefix).await?;
        let Some(keys) = seen.all() else {
            return Ok(None);
        };
        let store = keys.store;
        let meta = read(&self.client, &self.prefix).await?;
        let is_same = before == meta;
        let meta = meta.filter(|meta| is_same && meta.id == cluster);
        // A restore that the node has not noticed yet.
        let meta = meta.filter(|meta| store == Some(meta.store()));
        Ok(meta.map(|meta| Copy::from((meta, keys, created))))
    }
}

async fn read(client: &Client, prefix: &Prefix) -> Result<Option<Cluster>, Error> {
    match Cluster::read(client, prefix).await {
        Ok(meta) => Ok(Some(meta)),
        Err(Error::NoCluster { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}
