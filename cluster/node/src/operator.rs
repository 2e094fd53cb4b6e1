//! Requests of operators to the cluster. A process that is no node can make them too. A change is
//! in etcd when its call returns.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use nacre_cluster_core::{Holder, Incarnation, NodeId, Record, Transaction, VolumeId};
use nacre_cluster_etcd::{
    Client, Copies, KeyValue, LeaseKey, Member, NodeLeases, Outcome, Prefix, Txn,
};
use tokio::time::{Instant, sleep};

use crate::backup::{Backup, BackupError};
use crate::brake::{Brake, BrakeKey};
use crate::clock;
use crate::driver::Shared;
use crate::error::Error;
use crate::events::Event;
use crate::keys::{self, Cluster, NodeKey, bytes};
use crate::operations::OperationKey;
use crate::publication::Publication;
use crate::record;
use crate::seen_keys::SeenKeys;

/// Time between two reads of the progress of a request.
const LOOK: Duration = Duration::from_millis(100);
/// Attempts, if the key changes between the read and the transaction.
pub(crate) const ATTEMPTS: usize = 8;

#[derive(Debug, Clone)]
pub struct Operator {
    pub(crate) client: Arc<Client>,
    pub(crate) prefix: Prefix,
    /// `None`: this process is no node.
    shared: Option<Arc<Shared>>,
}

/// The state of the cluster: etcd, nodes, and counts of volumes.
#[derive(Debug, Clone, PartialEq)]
pub struct Status {
    pub cluster: Cluster,
    /// The members of etcd, each with its leader, space and latency.
    pub etcd: Vec<Member>,
    pub nodes: Vec<NodeStatus>,
    pub volumes: VolumeCounts,
    /// Requests to holders that have not ended.
    pub operations: usize,
    /// The reason why lost replicas are not replaced; `None`: they are.
    pub brake: Option<Brake>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct NodeStatus {
    pub id: NodeId,
    /// `None`: the node has a lease, and no description yet.
    pub key: Option<NodeKey>,
    pub lease: Option<LeaseStatus>,
    /// Volumes that it holds.
    pub held: usize,
    /// Replicas of volumes that it has, and how many of them are in sync.
    pub replicas: usize,
    pub in_sync: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeaseStatus {
    pub incarnation: Incarnation,
    /// Renewals of this incarnation so far.
    pub renewals: u64,
    /// The time since the last renewal that the node of this process saw; `None`: it saw none, or
    /// this process is no node.
    pub age: Option<Duration>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct VolumeCounts {
    /// A node with a lease holds it, and all replicas are in sync.
    pub healthy: usize,
    /// A node with a lease holds it, and a replica is not in sync.
    pub degraded: usize,
    /// No node holds it, or the lease with which the holder took it has ended.
    pub without_holder: usize,
    /// The record cannot be read.
    pub unreadable: usize,
}

/// A volume of the cluster.
#[derive(Debug, Clone, PartialEq)]
pub struct VolumeStatus {
    pub id: VolumeId,
    /// Empty if the record cannot be read.
    pub name: String,
    /// The holder in the record.
    pub holder: Option<Holder>,
    /// True while the lease with which the holder took the volume has not ended.
    pub lease_stands: bool,
    pub state: VolumeState,
    /// Replicas of the volume, and how many of them are in sync.
    pub replicas: usize,
    pub in_sync: usize,
    /// The nodes that show the volume to hosts.
    pub nodes: Vec<NodeId>,
    /// `None`: the volume is not published.
    pub publication: Option<Publication>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VolumeState {
    /// A node with a lease holds it, and all replicas are in sync.
    Healthy,
    /// A node with a lease holds it, and a replica is not in sync.
    Degraded,
    WithoutHolder,
    /// The record cannot be read.
    Unreadable,
}

/// True if the incarnation of the record's holder is `stands`, the one that its node has now.
fn is_held(record: &Record, stands: Option<Incarnation>) -> bool {
    let holder = record.holder;
    holder.is_some_and(|holder| stands == Some(holder.incarnation))
}

impl VolumeState {
    fn of(record: &Record, is_held: bool) -> Self {
        match record.in_sync().count() == record.replicas.len() {
            _ if !is_held => Self::WithoutHolder,
            true => Self::Healthy,
            false => Self::Degraded,
        }
    }
}

impl Operator {
    pub fn new(client: Arc<Client>, prefix: Prefix) -> Self {
        Self {
            client,
            prefix,
            shared: None,
        }
    }

    pub(crate) fn of_node(client: Arc<Client>, prefix: Prefix, shared: Arc<Shared>) -> Self {
        Self {
            client,
            prefix,
            shared: Some(shared),
        }
    }

    /// The keys as this node's watches show them; `None`: this process is no node.
    pub(crate) fn seen_keys(&self) -> Option<&SeenKeys> {
        Some(&self.shared.as_ref()?.seen_keys)
    }

    pub(crate) async fn list(&self, key: &str) -> Result<Vec<KeyValue>, Error> {
        let page = self.client.list(key).await;
        Ok(page.map_err(Error::at(key))?.keys)
    }

    pub(crate) fn leases(&self) -> NodeLeases {
        NodeLeases::new(Arc::clone(&self.client), self.prefix.clone())
    }

    /// Reads the state of the cluster. The reads are not of one revision.
    pub async fn status(&self) -> Result<Status, Error> {
        let joined = (self.shared.as_ref()).and_then(|shared| shared.cluster.get().copied());
        let cluster = Cluster::read(&self.client, &self.prefix).await;
        let cluster = cluster.map_err(|error| error.of_node(joined))?;
        let etcd = self.client.members().await;
        let mut nodes: BTreeMap<NodeId, NodeStatus> = BTreeMap::new();
        let new = |id| NodeStatus {
            id,
            key: None,
            lease: None,
            held: 0,
            replicas: 0,
            in_sync: 0,
        };
        let prefix = self.prefix.nodes();
        for kv in self.list(&prefix).await? {
            if let Some(id) = Prefix::id_after(&prefix, &kv.key).map(NodeId) {
                let node = nodes.entry(id).or_insert_with(|| new(id));
                node.key = Some(NodeKey::decode(&kv)?);
            }
        }
        let (leases, key) = (self.leases(), self.prefix.leases());
        let seen = self
            .shared
            .as_ref()
            .map(|shared| shared.seen.lock().clone());
        let seen = seen.unwrap_or_default();
        let now = clock::now();
        for kv in self.list(&key).await? {
            let lease = leases.decode(&kv).map_err(Error::at(&key))?;
            let node = nodes.entry(lease.node).or_insert_with(|| new(lease.node));
            node.lease = Some(LeaseStatus {
                incarnation: lease.incarnation,
                renewals: lease.number,
                age: seen.get(&lease.node).map(|at| now.since(*at)),
            });
        }
        let mut volumes = VolumeCounts::default();
        for kv in self.list(&self.prefix.volumes()).await? {
            let Ok((_, record)) = record::decode(&kv.value) else {
                volumes.unreadable += 1;
                continue;
            };
            for replica in &record.replicas {
                if let Some(node) = nodes.get_mut(&replica.node) {
                    node.replicas += 1;
                    node.in_sync += usize::from(record.is_in_sync(replica.id));
                }
            }
            let node = record.holder.and_then(|holder| nodes.get_mut(&holder.node));
            let stands = node.as_ref().and_then(|node| Some(node.lease?.incarnation));
            let state = VolumeState::of(&record, is_held(&record, stands));
            match state {
                VolumeState::Healthy => volumes.healthy += 1,
                VolumeState::Degraded => volumes.degraded += 1,
                VolumeState::WithoutHolder | VolumeState::Unreadable => {
                    volumes.without_holder += 1;
                    continue;
                }
            }
            if let Some(node) = node {
                node.held += 1;
            }
        }
        Ok(Status {
            cluster,
            etcd,
            nodes: nodes.into_values().collect(),
            volumes,
            operations: self.list(&self.prefix.operations()).await?.len(),
            brake: BrakeKey::read(self).await?.0.brake,
        })
    }

    /// All volumes, in order of their creation.
    pub async fn volumes(&self) -> Result<Vec<VolumeStatus>, Error> {
        let leases = self.list(&self.prefix.leases()).await?;
        let stands = |holder: Holder| {
            let of = |kv: &&KeyValue| self.prefix.node_of(&kv.key) == Some(holder.node);
            let lease = leases.iter().find(of);
            lease.map(|kv| Incarnation(kv.create_revision as u64))
        };
        let mut published = BTreeMap::new();
        let prefix = self.prefix.publications();
        for kv in self.list(&prefix).await? {
            // The nodes that read a damaged publication ignore it, too.
            if let Ok(publication) = Publication::decode(&kv) {
                published.insert(Prefix::id_after(&prefix, &kv.key), publication);
            }
        }
        let prefix = self.prefix.volumes();
        let mut keys = self.list(&prefix).await?;
        keys.sort_by_key(|kv| kv.create_revision);
        let mut status = |kv: &KeyValue| {
            let id = Prefix::id_after(&prefix, &kv.key)?;
            let publication = published.remove(&Some(id));
            let unreadable = VolumeStatus {
                id: VolumeId(id),
                name: String::new(),
                holder: None,
                lease_stands: false,
                state: VolumeState::Unreadable,
                replicas: 0,
                in_sync: 0,
                nodes: publication
                    .as_ref()
                    .map(Publication::nodes)
                    .unwrap_or_default(),
                publication,
            };
            let Ok((value, record)) = record::decode(&kv.value) else {
                return Some(unreadable);
            };
            let lease_stands = is_held(&record, record.holder.and_then(stands));
            Some(VolumeStatus {
                name: value["name"].as_str().unwrap_or_default().to_owned(),
                holder: record.holder,
                lease_stands,
                state: VolumeState::of(&record, lease_stands),
                replicas: record.replicas.len(),
                in_sync: record.in_sync().count(),
                ..unreadable
            })
        };
        Ok(keys.iter().filter_map(&mut status).collect())
    }

    /// Reads the keys of a backup of the cluster, at one revision. `created`: the present time, in
    /// seconds since 1970.
    pub async fn backup(&self, created: u64) -> Result<Backup, BackupError> {
        Backup::save(&self.client, &self.prefix, created).await
    }

    /// The names of the nodes that have a readable description (`node/N`).
    pub async fn node_names(&self) -> Result<BTreeMap<NodeId, String>, Error> {
        let prefix = self.prefix.nodes();
        let keys = self.list(&prefix).await?;
        let names = keys.iter().filter_map(|kv| {
            let id = NodeId(Prefix::id_after(&prefix, &kv.key)?);
            Some((id, NodeKey::decode(kv).ok()?.description.name))
        });
        Ok(names.collect())
    }

    /// The nodes that have a readable description (`node/N`); true: the node has a lease.
    pub async fn described(&self) -> Result<Vec<(NodeId, NodeKey, bool)>, Error> {
        let leases = self.list(&self.prefix.leases()).await?;
        let prefix = self.prefix.nodes();
        let keys = self.list(&prefix).await?;
        let described = keys.iter().filter_map(|kv| {
            let id = NodeId(Prefix::id_after(&prefix, &kv.key)?);
            let is_its = |kv: &KeyValue| self.prefix.node_of(&kv.key) == Some(id);
            let key = NodeKey::decode(kv).ok()?;
            Some((id, key, leases.iter().any(is_its)))
        });
        Ok(described.collect())
    }

    /// Sets or removes the cordon: the node gets no new replicas, and takes volumes after all other
    /// nodes.
    pub async fn set_cordon(&self, node: NodeId, cordon: bool) -> Result<(), Error> {
        let change = |key: &mut NodeKey| key.cordon = cordon;
        keys::change(&self.client, &self.prefix, node, change).await
    }

    /// Starts or ends a drain: the node hands its volumes over, and keeps its replicas.
    pub async fn set_drain(&self, node: NodeId, drain: bool) -> Result<(), Error> {
        let change = |key: &mut NodeKey| key.drain = drain;
        keys::change(&self.client, &self.prefix, node, change).await
    }

    /// Starts or ends an eviction: a drain that also moves the replicas to other nodes.
    pub async fn set_evict(&self, node: NodeId, evict: bool) -> Result<(), Error> {
        let change = |key: &mut NodeKey| key.evict = evict;
        keys::change(&self.client, &self.prefix, node, change).await
    }

    /// Waits until the node holds no volume; [`Error::Late`] after `limit`.
    pub async fn wait_drained(&self, node: NodeId, limit: Duration) -> Result<(), Error> {
        let end = Instant::now() + limit;
        while Instant::now() < end {
            let status = self.status().await?;
            let found = status.nodes.iter().find(|found| found.id == node);
            if found.is_none_or(|found| found.held == 0) {
                return Ok(());
            }
            sleep(LOOK).await;
        }
        let key = self.prefix.node(node);
        Err(Error::Late { key, waited: limit })
    }

    /// Ends the lease of a node at once. The operator must have made sure that the node is off.
    /// Returns the incarnation that ended.
    pub async fn fence_off(&self, node: NodeId) -> Result<Incarnation, Error> {
        let key = self.prefix.lease(node);
        let leases = self.leases();
        for _ in 0..ATTEMPTS {
            let found: Option<LeaseKey> = leases.read(node).await.map_err(Error::at(&key))?;
            let Some(LeaseKey { incarnation, .. }) = found else {
                return Err(Error::NoLease { key, node });
            };
            let fence = Transaction::fence_off(Holder { node, incarnation });
            let encode = |_: &_| unreachable!("not a commit");
            let outcome = leases.execute(&fence, encode).await;
            if let Outcome::Made(_) = outcome.map_err(Error::at(&key))? {
                return Ok(incarnation);
            }
        }
        Err(Error::Contended { key })
    }

    /// Removes the keys of a node that never returns. The node must have no lease, and no replica
    /// of a volume.
    pub async fn remove(&self, node: NodeId) -> Result<(), Error> {
        let (key, lease) = (self.prefix.node(node), self.prefix.lease(node));
        for kv in self.list(&self.prefix.volumes()).await? {
            let at = String::from_utf8_lossy(&kv.key).into_owned();
            let decoded = record::decode(&kv.value);
            let (_, record) = decoded.map_err(|why| why.at(&at))?;
            let volume = Prefix::id_after(&self.prefix.volumes(), &kv.key).map(VolumeId);
            if let Some(volume) = volume
                && record.replicas.iter().any(|replica| replica.node == node)
            {
                return Err(Error::HasReplica {
                    key: at,
                    node,
                    volume,
                });
            }
        }
        if self.get(&key).await?.is_none() {
            return Err(Error::NoNode { key, node });
        }
        if self.get(&lease).await?.is_some() {
            return Err(Error::Lives { key: lease, node });
        }
        // Its description goes last: an attempt that is cut off can be repeated.
        self.end_pools_of(node).await?;
        self.snapshots().end_of(node).await?;
        // The exports of former replicas: no other node deletes them.
        for kv in self.list(&self.prefix.exports(node)).await? {
            let key = String::from_utf8_lossy(&kv.key).into_owned();
            let txn = Txn::default().if_created(&lease, 0).delete(&key);
            self.transact(&key, txn).await?;
        }
        let txn = Txn::default().if_created(&lease, 0).delete(&key);
        if self.transact(&key, txn).await?.is_made {
            Ok(())
        } else {
            Err(Error::Lives { key: lease, node })
        }
    }

    /// Asks the holder to hand the volume over, and waits until `to` holds it: [`Error::NotMoved`]
    /// if the holder refuses, [`Error::Late`] after `limit`.
    pub async fn move_volume(
        &self,
        volume: VolumeId,
        to: NodeId,
        limit: Duration,
    ) -> Result<(), Error> {
        let key = self.prefix.operation(volume);
        let record_key = self.prefix.core_volume(volume);
        let operation = OperationKey::handover(to);
        let txn = Txn::default()
            .if_not_created(&record_key, 0)
            .put(&key, bytes(&operation));
        let asked = self.client.transact(txn, Copies::Several).await;
        if !asked.map_err(Error::at(&key))?.is_made {
            let key = record_key;
            return Err(Error::NoVolume { key, volume });
        }
        let end = Instant::now() + limit;
        while Instant::now() < end {
            let found = self.client.get(&key).await.map_err(Error::at(&key))?;
            if let Some(kv) = &found {
                let why = OperationKey::decode(kv)?.why;
                if let Some(why) = why {
                    let txn = Txn::default().if_modified(&key, kv.mod_revision);
                    let txn = txn.delete(&key);
                    let deleted = self.client.transact(txn, Copies::Several).await;
                    deleted.map_err(Error::at(&key))?;
                    return Err(Error::NotMoved { key, why });
                }
            }
            let stored = self.client.get(&record_key).await;
            let Some(kv) = stored.map_err(Error::at(&record_key))? else {
                let key = record_key;
                return Err(Error::NoVolume { key, volume });
            };
            let decoded = record::decode(&kv.value);
            let (_, record) = decoded.map_err(|why| why.at(&record_key))?;
            if found.is_none() && record.holder.is_some_and(|holder| holder.node == to) {
                return Ok(());
            }
            sleep(LOOK).await;
        }
        Err(Error::Late { key, waited: limit })
    }

    /// The events of this node after the one with this number, oldest first; empty if this process
    /// is no node.
    pub fn events_after(&self, number: u64) -> Vec<Event> {
        let shared = self.shared.as_ref();
        shared.map_or_else(Vec::new, |shared| shared.events.after(number))
    }
}
