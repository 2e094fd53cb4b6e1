//! The value of the key `pool/P` in etcd, as JSON: a storage pool as its node reports it. The value
//! also has the *promises*: space for replicas that the node has not made yet. A change keeps
//! fields that this version does not know.
//!
//! ```text
//!   placing   member/N/R and the promise, one transaction that compares pool/P
//!   node N    makes the lvol ▸ reports the pool with it, without the promise
//! ```

use std::collections::BTreeMap;

use nacre_cluster_core::placement::{PoolFacts, lvol_of};
use nacre_cluster_core::{ExportId, Incarnation, NodeId, PoolId};
use nacre_cluster_etcd::{KeyValue, Prefix, Txn};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use uuid::Uuid;

use crate::error::Error;
use crate::export::Export;
use crate::keys::{FORMAT, bytes, decode};
use crate::operator::{ATTEMPTS, Operator};

/// Most pools that a node reports.
pub const MAX_POOLS: usize = 64;

/// A pool, as its node sees it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolReport {
    pub name: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub class: Option<String>,
    pub total: u64,
    pub free: u64,
    /// Free bytes that metadata and thick lvols keep.
    pub reserved: u64,
    /// The sizes of all volumes of the pool, thin and thick.
    pub provisioned: u64,
    pub state: PoolState,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PoolState {
    Online,
    /// It takes no new lvols: its log cannot be written.
    Held,
    /// A disk of it is absent.
    #[default]
    Away,
}

/// The value of `pool/P`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolKey {
    v: u64,
    node: Uuid,
    #[serde(flatten)]
    pub report: PoolReport,
    /// Space for replicas that are not made yet, or grow.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    promises: BTreeMap<Uuid, Promise>,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Promise {
    bytes: u64,
    #[serde(default)]
    thin: bool,
}

impl PoolKey {
    fn new(node: NodeId, report: PoolReport) -> Self {
        Self {
            v: FORMAT,
            node: node.0,
            report,
            promises: BTreeMap::new(),
            rest: Map::new(),
        }
    }

    pub(crate) fn decode(kv: &KeyValue) -> Result<Self, Error> {
        decode(kv)
    }

    pub fn node(&self) -> NodeId {
        NodeId(self.node)
    }

    /// The bytes that are promised to thin replicas, or to thick ones.
    pub fn promised(&self, thin: bool) -> u64 {
        let promises = self.promises.values().filter(|one| one.thin == thin);
        promises.fold(0, |sum, one| sum.saturating_add(one.bytes))
    }

    /// The size in bytes of the largest replica that the cluster places on the pool.
    pub fn room(&self, thin: bool) -> u64 {
        self.facts(PoolId(Uuid::nil()), 0).room(thin)
    }

    pub(crate) fn promise(&mut self, export_id: ExportId, bytes: u64, thin: bool) {
        let promise = self.promises.entry(export_id.0);
        let promise = promise.or_insert(Promise { bytes: 0, thin });
        promise.bytes = promise.bytes.saturating_add(bytes);
    }

    pub(crate) fn facts(&self, id: PoolId, resyncs: u32) -> PoolFacts {
        PoolFacts {
            id,
            node: self.node(),
            class: self.report.class.clone(),
            is_online: self.report.state == PoolState::Online,
            total: self.report.total,
            free: self.report.free,
            reserved: self.report.reserved,
            provisioned: self.report.provisioned,
            promised_thin: self.promised(true),
            promised_thick: self.promised(false),
            resyncs,
            is_left_out: false,
        }
    }
}

impl Operator {
    /// The pools of all nodes, without those whose keys cannot be read.
    pub async fn pools(&self) -> Result<Vec<(PoolId, PoolKey)>, Error> {
        let prefix = self.prefix.pools();
        let keys = self.list(&prefix).await?;
        let pools = keys.iter().filter_map(|kv| {
            let pool = PoolId(Prefix::id_after(&prefix, &kv.key)?);
            Some((pool, PoolKey::decode(kv).ok()?))
        });
        Ok(pools.collect())
    }

    /// Ends the pools of a node that is removed. One that another node has imported meanwhile
    /// stays.
    pub(crate) async fn end_pools_of(&self, node: NodeId) -> Result<(), Error> {
        let lease = self.prefix.lease(node);
        for kv in self.list(&self.prefix.pools()).await? {
            if PoolKey::decode(&kv).is_ok_and(|pool| pool.node() == node) {
                let key = String::from_utf8_lossy(&kv.key).into_owned();
                let txn = Txn::default()
                    .if_created(&lease, 0)
                    .if_modified(&key, kv.mod_revision)
                    .delete(&key);
                self.transact(&key, txn).await?;
            }
        }
        Ok(())
    }
}

impl PoolKey {
    /// Writes the report of the pool's node, which needs the lease of this incarnation. `sizes` are
    /// the bytes of the pool's lvols by UUID, read before the report: promises that they fulfil are
    /// removed. False: nothing has changed.
    pub async fn report_to(
        operator: &Operator,
        node: NodeId,
        incarnation: Incarnation,
        pool: PoolId,
        report: &PoolReport,
        sizes: &BTreeMap<Uuid, u64>,
    ) -> Result<bool, Error> {
        let (key, lease) = (operator.prefix.pool(pool), operator.prefix.lease(node));
        for _ in 0..ATTEMPTS {
            let found = operator.get(&key).await?;
            let before = found.as_ref().map(Self::decode).transpose()?;
            let new = || Self::new(node, report.clone());
            let mut next = before.clone().unwrap_or_else(new);
            next.node = node.0;
            next.report = report.clone();
            for export_id in before.iter().flat_map(|key| key.promises.keys()) {
                if Self::is_fulfilled(operator, node, ExportId(*export_id), sizes).await? {
                    next.promises.remove(export_id);
                }
            }
            if before.as_ref() == Some(&next) {
                return Ok(false);
            }
            let txn = Txn::default()
                .if_modified(&key, found.map_or(0, |kv| kv.mod_revision))
                .if_created(&lease, incarnation.0 as i64)
                .put(&key, bytes(&next))
                .read_on_failure(&lease);
            let answer = operator.transact(&key, txn).await?;
            if answer.is_made {
                return Ok(true);
            }
            let stands = answer.found.into_iter().next().flatten();
            if stands.is_none_or(|kv| kv.create_revision as u64 != incarnation.0) {
                let key = lease;
                return Err(Error::NoLease { key, node });
            }
        }
        Err(Error::Contended { key })
    }

    /// True if the promise to a replica is kept or void: the lvol has its size, or the export is
    /// gone. The promise and the export were written together, and the promise was read first.
    async fn is_fulfilled(
        operator: &Operator,
        node: NodeId,
        export_id: ExportId,
        sizes: &BTreeMap<Uuid, u64>,
    ) -> Result<bool, Error> {
        let key = operator.prefix.export(node, export_id);
        let Some(kv) = operator.get(&key).await? else {
            return Ok(true);
        };
        let wanted = Export::decode(&kv)?.place.map_or(0, |place| place.bytes);
        let size = sizes.get(&lvol_of(export_id.0));
        Ok(size.is_some_and(|size| *size >= wanted))
    }

    /// Deletes the key of a pool that the node no longer has. Does nothing if another node has
    /// imported the pool.
    pub async fn end(
        operator: &Operator,
        node: NodeId,
        incarnation: Incarnation,
        pool: PoolId,
    ) -> Result<(), Error> {
        let (key, lease) = (operator.prefix.pool(pool), operator.prefix.lease(node));
        let Some(kv) = operator.get(&key).await? else {
            return Ok(());
        };
        // Another node may have imported it meanwhile.
        if Self::decode(&kv)?.node() != node {
            return Ok(());
        }
        let txn = Txn::default()
            .if_modified(&key, kv.mod_revision)
            .if_created(&lease, incarnation.0 as i64)
            .delete(&key);
        if operator.transact(&key, txn).await?.is_made {
            Ok(())
        } else {
            Err(Error::Contended { key })
        }
    }
}
