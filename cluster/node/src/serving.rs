//! The interface between the driver of a node and the engine, which opens and closes volumes, and
//! shows them to hosts.
//!
//! ```text
//!   driver ── Serving: take, close, drop, show, … ──▶ engine
//!   driver ◀── Reports: opened, not opened, drained ── engine
//! ```
//!
//! Calls come from the cluster's thread and must return at once. The engine answers later, from any
//! thread. Each answer has the number of its call, so that a late one does not count.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicI64;
use std::time::Duration;

use arrayvec::ArrayVec;
use nacre_cluster_core::ids::MAX_REPLICAS;
use nacre_cluster_core::lease::Word;
use nacre_cluster_core::volume::{Ana, HoldingState};
use nacre_cluster_core::{ExportId, Holder, Incarnation, NodeId, Record, ReplicaId, VolumeId};
use nacre_cluster_etcd::BehindCause;
use serde_json::Value;
use tokio::sync::mpsc;
use uuid::Uuid;

use crate::export::Export;
use crate::keys::NodeKey;
use crate::publication::Publication;
use crate::snapshot::SeenSnapshot;

/// Most reports that wait for the cluster's thread.
pub(crate) const WAITING: usize = 16_384;

pub trait Serving: Send {
    /// The replicas of the volume that this node can reach now.
    fn reached(&mut self, volume: VolumeId) -> ArrayVec<ReplicaId, MAX_REPLICAS>;

    /// Opens the volume: answered by [`Answer::Opened`] or [`Answer::NotOpened`]. After a close
    /// that has not ended, the volume opens again once it has.
    fn take(&mut self, volume: VolumeId, number: u64);

    /// Refuses new commands, ends those in flight and closes the volume: answered by
    /// [`Answer::Drained`].
    fn close(&mut self, volume: VolumeId, number: u64);

    /// Aborts the commands in flight of a volume that closes.
    fn abort(&mut self, volume: VolumeId);

    /// Drops all responses and commands, ends the hosts' connections, and closes the volume without
    /// a change of the record: another node may serve it.
    fn drop_all(&mut self, volume: VolumeId);

    /// The volume's role on this node has changed.
    fn show(&mut self, volume: VolumeId, role: &VolumeRole);

    /// The volume was deleted.
    fn forget(&mut self, volume: VolumeId);

    /// The publication of a volume was written; `None`: deleted. The volume's record may arrive
    /// later.
    fn publish(&mut self, volume: VolumeId, publication: Option<&Publication>);

    /// All nodes with a description, and the nodes that have a lease. The first call comes after
    /// both lists have arrived.
    fn nodes(
        &mut self,
        nodes: &BTreeMap<NodeId, NodeKey>,
        standing: &BTreeMap<NodeId, Incarnation>,
    );

    /// All exports of this node.
    fn exports(&mut self, exports: &BTreeMap<ExportId, Export>);

    /// The snapshots of all volumes.
    fn snapshots(&mut self, _snapshots: &BTreeMap<Uuid, SeenSnapshot>) {}

    /// The volumes whose last call of [`Serving::publish`] is not in effect: a host that the
    /// publication does not name may still have a connection, or a command in flight.
    fn behind(&mut self) -> Vec<VolumeId> {
        Vec::new()
    }

    /// The reasons for which volumes of [`Serving::behind`] are in that list, as far as known.
    fn causes(&mut self) -> BTreeMap<VolumeId, BehindCause> {
        BTreeMap::new()
    }

    /// The duration of the cluster's leases, each time the node has read it.
    fn lease(&mut self, _lease: Duration) {}

    /// The nodes, leases, volumes, publications, exports and snapshots of etcd have all been shown
    /// by the calls above: hosts may connect. Called once after the start, with or without a lease
    /// of this node.
    fn listed(&mut self) {}
}

/// A volume on this node, as hosts see it.
#[derive(Debug, Clone, PartialEq)]
pub struct VolumeRole {
    pub state: HoldingState,
    pub ana: Ana,
    /// The holder in the record. Its lease may have ended.
    pub holder: Option<Holder>,
    pub record: Record,
    /// The record's JSON in etcd.
    pub value: Arc<Value>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// The volume of [`Serving::take`] is open to hosts.
    Opened { number: u64 },
    /// The volume of [`Serving::take`] was not opened, or closed later by itself.
    NotOpened { number: u64 },
    /// The volume of [`Serving::close`] is closed, and no command is in flight.
    Drained { number: u64 },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Report {
    pub volume: VolumeId,
    pub answer: Answer,
}

/// The queue of reports is full, or the cluster's thread has ended: send the report again later.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the queue of reports to the cluster's thread is full: report again later")]
pub struct Full;

#[derive(Debug, Clone)]
pub struct Reports(pub(crate) mpsc::Sender<Report>);

impl Reports {
    pub fn send(&self, volume: VolumeId, answer: Answer) -> Result<(), Full> {
        self.0.try_send(Report { volume, answer }).map_err(|_| Full)
    }
}

/// The parts of the driver that the engine needs.
#[derive(Debug, Clone)]
pub struct Link {
    /// The end of the lease. The data path of each core checks it before responses leave, with the
    /// time read after their data was collected.
    pub word: Arc<Word>,
    /// The incarnation of this node, for `EtcdStore::of_node`; 0: it has none.
    pub incarnation: Arc<AtomicI64>,
    pub reports: Reports,
}
