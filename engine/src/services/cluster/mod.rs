//! This daemon as a node of a cluster, `[cluster]`.
//!
//! ```text
//!   nacre-cluster (thread) ──── Inbox, wanted states ───▶ follow ─┬─ exports   devices of replicas
//!         ▲                                                     ├─ peers     the other nodes
//!         │                                                     └─ volumes   a task per volume
//!         └───────────── Reports: opened, not opened, drained ──────────────────┘
//! ```
//!
//! Every node exports the devices of its replicas by NVMe-oF, and reaches all replicas that way,
//! its own ones too: the reservation of the exported namespace is the gate that no former holder
//! passes. The device of a replica has the same name on all nodes, the UUID of its namespace.

mod backups;
mod copy;
mod create;
mod discovery;
mod exports;
mod hosts;
mod inbox;
mod joined;
mod last_errors;
mod lease;
mod lvols;
mod nsids;
mod peers;
mod placed;
mod pools;
mod rebuild;
mod replacement;
mod replicas;
mod report;
pub(super) mod reservation;
mod snapshots;
mod store;
#[cfg(test)]
mod tests;
mod volumes;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use nacre_bdev_replica::answers::Holder;
use nacre_bdev_replica::model::VolumeRecord;
use nacre_bdev_replica::store::VolumeStore;
use nacre_cluster_core::{NodeId, VolumeId};
use nacre_cluster_etcd::{EtcdStore, Prefix};
use nacre_cluster_node::{
    Description, Link, Me, Node, NodeState, Operator, Portal, SNAPSHOTS, Unmet, is_node_nqn,
};
use nacre_nvmf::address::IpTransport;
use nacre_nvmf::subsystems::ExpectedSubsystems;
use nacre_nvmf_wire::Nqn;
use tokio::sync::Notify;
use tokio::time::MissedTickBehavior;
use tracing::{info, warn};
use uuid::Uuid;

use self::discovery::{ListedVolumes, tls_text};
use self::exports::Exports;
use self::inbox::{Inbox, News, Sender};
use self::last_errors::LastErrors;
use self::lease::OfIncarnation;
use self::nsids::Nsids;
use self::peers::Peers;
use self::snapshots::Snapshots;
use self::store::NodesOfReplicas;
use super::volumes::{AbsentDevices, Membership, etcd, holder};
use crate::refusal::Refusal;
use crate::rpc::RpcError;
use crate::rpc::error::Errno;
use crate::services::Engine;
use crate::services::machine::host_name;
use crate::values::host_identity;

pub(crate) use self::backups::{must_be_replaceable, read_backup, seconds, write_backup};
pub use self::create::{addresses, create, delete, end_exports_of_former, publish, unpublish};
pub use self::hosts::refuse_by_hand;
pub use self::peers::refuse_keys_by_hand;
pub use self::placed::{PlacedReplicas, create_placed, grow_lvols};
pub(crate) use self::replacement::report_release;
pub use self::replicas::{NewReplica, change_replicas};
pub use self::report::store_for_doctor;
pub use self::snapshots::{
    create_snapshot, delete_snapshot, find_snapshot, snapshot_source, snapshots,
};
pub(super) use self::volumes::Shown;

/// Time limit for the handover of all volumes when the daemon ends; the node's thread takes 6 s of
/// it at most.
const LEAVE: Duration = Duration::from_secs(8);
/// Longest wait, after the join, for the subsystems of published volumes. Then the start goes on,
/// and hosts that look for a missing subsystem get a status after which they retry.
const SHOWN: Duration = Duration::from_secs(2);
const MOMENT: Duration = Duration::from_millis(20);
/// Interval at which devices and listeners are compared with the wanted state: they change without
/// a message of the cluster's thread.
const LOOK: Duration = Duration::from_secs(1);

/// Empty in a daemon without `[cluster]`.
#[derive(Default)]
pub struct Cluster {
    running: RefCell<Option<Rc<Running>>>,
}

/// The node, once its thread runs.
pub(super) struct Running {
    me: NodeId,
    /// Host identifier of this process for its connections to the nodes' exports.
    process: Uuid,
    node: RefCell<Option<Node>>,
    operator: Operator,
    inbox: Arc<Inbox>,
    link: Link,
    /// Wakes the task of each volume.
    tasks: RefCell<BTreeMap<VolumeId, Rc<Notify>>>,
    /// The volumes with a subsystem on this node.
    shown: RefCell<BTreeMap<VolumeId, Shown>>,
    exports: Exports,
    peers: Peers,
    snapshots: Snapshots,
    discovery: ListedVolumes,
    /// The brake was set at the last check: no lost replica is replaced.
    is_braked: Cell<bool>,
    /// The last error of noting the cluster in the data directory.
    not_noted: LastErrors<()>,
    /// The last error of writing the copy of the cluster's keys.
    not_copied: LastErrors<()>,
    not_reported: LastErrors<()>,
    is_ending: Cell<bool>,
}

impl Cluster {
    fn running(&self) -> Option<Rc<Running>> {
        self.running.borrow().clone()
    }

    fn joined(&self) -> Result<Rc<Running>, RpcError> {
        self.running().ok_or_else(|| {
            RpcError::errno(Errno::ENOTSUP, "this daemon is in no cluster")
                .remedy("name one with [cluster] in the configuration, and start again")
        })
    }

    /// The state of this node; `None`: the daemon is in no cluster.
    pub fn state(&self) -> Option<NodeState> {
        let running = self.running()?;
        let node = running.node.borrow();
        Some(node.as_ref().map_or(NodeState::Left, Node::state))
    }

    /// The id of this node; `None`: the daemon is in no cluster.
    pub fn node(&self) -> Option<NodeId> {
        Some(self.running()?.me)
    }

    /// The operators' access to the cluster; `ENOTSUP` in a daemon without `[cluster]`.
    pub fn operator(&self) -> Result<Operator, RpcError> {
        Ok(self.joined()?.operator.clone())
    }

    /// The host identifier for the connections to this subsystem, if it has the exports of a node.
    /// Each process is a host of its own. Late commands of a killed daemon must not pass the
    /// reservations of the next one.
    pub(super) fn host_id(&self, subsystem: &Nqn) -> Option<Uuid> {
        let running = self.running()?;
        is_node_nqn(subsystem.as_str()).then_some(running.process)
    }

    /// This node; `None`: the daemon is in no cluster.
    pub fn this_node(&self) -> Option<Uuid> {
        Some(self.running()?.me.0)
    }

    /// The name of a node, or its id; `None`: the daemon is in no cluster.
    pub fn name_of(&self, node: Uuid) -> Option<String> {
        Some(self.running()?.name_of(NodeId(node)))
    }

    /// The device of the volume's replica that is `NODE:DEVICE`.
    pub fn device_of(&self, volume: Uuid, text: &str) -> Option<String> {
        let running = self.running()?;
        let wanted = NewReplica::parse(text).ok()?;
        let node = running.find(&wanted.node).ok()?;
        let devices = running.inbox.devices(VolumeId(volume));
        let mut found = devices
            .into_iter()
            .filter(|one| one.node == node && one.node_device.as_ref() == Some(&wanted.device));
        // After a replacement by the same device, the last one is meant.
        found.next_back().map(|one| one.device)
    }

    /// The subsystem of this node's exports, once it exists.
    pub(super) fn exports(&self) -> Option<String> {
        self.running()?.exports.nqn()
    }

    /// True if `[cluster]` is set and the node has not started.
    pub(super) fn is_coming(&self, engine: &Engine) -> bool {
        engine.settings.cluster.is_node() && self.running().is_none()
    }

    /// True if this is the subsystem of a volume of the cluster.
    pub(super) fn shows(&self, nqn: &str) -> bool {
        let running = self.running();
        running.is_some_and(|running| running.shown.borrow().values().any(|one| one.nqn == nqn))
    }

    /// The subsystems of volumes on this node that have their namespace, each with its volume.
    /// Their listeners are inaccessible until [`show_states`].
    pub(super) fn shown(&self) -> Vec<(String, Uuid)> {
        let Some(running) = self.running() else {
            return Vec::new();
        };
        let shown = running.shown.borrow();
        let ready = shown.iter().filter(|(_, shown)| shown.is_ready());
        ready.map(|(id, shown)| (shown.nqn.clone(), id.0)).collect()
    }
}

/// Sets the ANA states of the volumes' listeners.
fn show_states(engine: &Engine) {
    if let Some(running) = engine.cluster.running() {
        for shown in running.shown.borrow().values() {
            shown.show_state(engine);
        }
    }
}

/// Starts the node. It joins when etcd answers; until then this daemon serves no volume.
pub async fn start(engine: &Rc<Engine>) -> anyhow::Result<()> {
    let settings = &engine.settings;
    let dir = engine.journal.store_path().context(
        "[cluster] needs a data directory, which has the node's id: name one with --data-dir",
    )?;
    let name = settings.cluster.name.as_deref().unwrap_or_default();
    let prefix = Prefix::new(name).context("cluster.name is invalid")?;
    joined::must_have_no_volumes(dir).await?;
    let (me, joined_before, nsids) = {
        let (dir, name) = (dir.to_owned(), name.to_owned());
        let read = move || {
            let (me, joined_before) = (holder::id(&dir)?, joined::known(&dir, &name)?);
            anyhow::Ok((me, joined_before, Nsids::of(&dir)))
        };
        tokio::task::spawn_blocking(read).await??
    };
    let me = NodeId(me);
    let endpoints = {
        let store = settings.store.clone();
        tokio::task::spawn_blocking(move || etcd::endpoints(&store)).await??
    };
    let process = Uuid::new_v4();
    let node = Me {
        id: me,
        machine: host_identity::machine(),
        process,
        cluster: joined_before,
        description: describe(engine, me),
        is_balanced: settings.cluster.balance,
    };
    let inbox = Arc::new(Inbox::of(me));
    let mut link = None;
    let node = Node::start(&endpoints, prefix.clone(), node, |given| {
        link = Some(given);
        Box::new(Sender(Arc::clone(&inbox)))
    })?;
    let link = link.context("the node gave no link")?;
    let store = {
        let (prefix, incarnation) = (prefix.clone(), Arc::clone(&link.incarnation));
        // Here, because a failure drops a runtime, which may block.
        let open = move || EtcdStore::of_node(&endpoints, prefix, me, incarnation);
        tokio::task::spawn_blocking(open).await??
    };
    let store: Arc<dyn VolumeStore> =
        Arc::new(NodesOfReplicas::new(Arc::new(store), Arc::clone(&inbox)));
    let running = Rc::new(Running {
        me,
        process,
        operator: node.operator(),
        node: RefCell::new(Some(node)),
        inbox,
        link,
        tasks: RefCell::default(),
        shown: RefCell::default(),
        exports: Exports::new(me, nsids),
        peers: Peers::default(),
        snapshots: Snapshots::default(),
        discovery: ListedVolumes::default(),
        is_braked: Cell::new(false),
        not_noted: LastErrors::default(),
        not_copied: LastErrors::default(),
        not_reported: LastErrors::default(),
        is_ending: Cell::new(false),
    });
    engine.cluster.running.replace(Some(Rc::clone(&running)));
    engine.volumes.join(store, me.0, Rc::clone(&running) as _);
    engine.listeners.after_reconcile(show_states);
    let expected = expect_subsystems(engine);
    info!(cluster = name, node = %me.0, "a node of a cluster");
    tokio::task::spawn_local(pools::report(Rc::clone(engine), Rc::clone(&running)));
    tokio::task::spawn_local(replacement::repair(Rc::clone(engine), Rc::clone(&running)));
    tokio::task::spawn_local(replacement::watch(Rc::clone(engine), Rc::clone(&running)));
    tokio::task::spawn_local(admit_hosts(
        Rc::clone(engine),
        Rc::clone(&running),
        expected,
    ));
    tokio::task::spawn_local(backups::keep(Rc::clone(engine), Rc::clone(&running)));
    tokio::task::spawn_local(rebuild::keep_copy(Rc::clone(engine), Rc::clone(&running)));
    tokio::task::spawn_local(rebuild::report(Rc::clone(engine), Rc::clone(&running)));
    tokio::task::spawn_local(snapshots::follow(Rc::clone(engine), Rc::clone(&running)));
    tokio::task::spawn_local(follow(Rc::clone(engine), running));
    Ok(())
}

fn describe(engine: &Engine, me: NodeId) -> Description {
    let settings = &engine.settings.cluster;
    let portal = |status: super::listeners::PathStatus| Portal {
        trtype: status.path.transport.trtype().to_owned(),
        traddr: status.path.ip.ip.to_string(),
        trsvcid: status.path.port.to_string(),
        tls: Some(tls_text(engine.listeners.tls_of(&status.path)).to_owned()),
    };
    let statuses = engine.listeners.statuses(engine);
    let usable = statuses.into_iter().filter(|status| {
        status.path.verdict.is_ok() && !status.path.withheld && !is_link_local(status.path.ip.ip)
    });
    let mut portals: Vec<Portal> = usable.map(portal).collect();
    // RDMA first: the other nodes attach the first path at once.
    portals.sort_by_key(|portal| portal.trtype != IpTransport::Rdma.trtype());
    portals.dedup();
    if portals.is_empty() {
        warn!(
            "no listener of the configuration file is usable: the other nodes cannot reach this one"
        );
    }
    Description {
        name: settings.node.clone().unwrap_or_else(host_name),
        labels: settings.labels.clone(),
        machine: host_identity::machine(),
        hostnqn: peers::host_nqn(me),
        replica_portals: portals.iter().map(for_replicas).collect(),
        portals,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        features: vec![SNAPSHOTS.to_owned()],
    }
}

/// The portal with which nodes reach the exports: without the TLS policy, so that a change of TLS
/// does not detach the devices of replicas.
fn for_replicas(portal: &Portal) -> Portal {
    Portal {
        tls: None,
        ..portal.clone()
    }
}

/// True for an address with a zone, which other machines cannot use.
fn is_link_local(ip: IpAddr) -> bool {
    matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local())
}

/// Admits hosts once the volumes published on this node have their subsystems. A host that connects
/// earlier would be refused for good. If etcd has lost its data, the node does not join, and hosts
/// wait.
async fn admit_hosts(
    engine: Rc<Engine>,
    running: Rc<Running>,
    expected: Option<ExpectedSubsystems>,
) {
    let is_ending = || running.is_ending.get() || engine.plane().is_err();
    let has_joined = || running.inbox.is_listed() && running.cluster().is_some();
    while !has_joined() && !is_ending() {
        tokio::time::sleep(MOMENT).await;
    }
    // A host that follows the log detaches paths that are not listed.
    let all = running.inbox.volumes();
    running.discovery.update(&engine, &running, &all, true);
    // A new volume has no block device before its first holder has opened it.
    let end = tokio::time::Instant::now() + SHOWN;
    while !running.are_shown() && !is_ending() && tokio::time::Instant::now() < end {
        tokio::time::sleep(MOMENT).await;
    }
    engine.volumes.are_shown();
    while !running.are_shown() && !is_ending() {
        tokio::time::sleep(LOOK).await;
    }
    drop(expected);
}

/// Follows the wanted states, until the daemon ends.
async fn follow(engine: Rc<Engine>, running: Rc<Running>) {
    let mut looks = tokio::time::interval(LOOK);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let news = tokio::select! {
            news = running.inbox.news() => Some(news),
            _ = looks.tick() => None,
        };
        if running.is_ending.get() || engine.plane().is_err() {
            return;
        }
        let is_look = news.is_none();
        let news = news.unwrap_or_else(|| News {
            volumes: running.inbox.volumes(),
            others: true,
        });
        if !is_look {
            let News { volumes, others } = &news;
            running
                .discovery
                .update(&engine, &running, volumes, *others);
        }
        if news.others {
            running.peers.attach(&engine, &running).await;
            running.peers.hurry(&engine, &running);
            running.exports.make(&engine, &running).await;
        }
        for id in news.volumes {
            running.wake(&engine, id);
        }
        if let Some(cluster) = running.cluster().filter(|_| is_look) {
            note(&engine, &running, cluster).await;
        }
    }
}

/// Makes the target answer connections to unknown subsystems with a status after which hosts retry,
/// until the result is dropped.
fn expect_subsystems(engine: &Engine) -> Option<ExpectedSubsystems> {
    let plane = engine.plane().ok()?;
    Some(plane.target.expect_subsystems())
}

/// Writes the name and the id of the cluster to the data directory.
async fn note(engine: &Engine, running: &Running, cluster: Uuid) {
    let (Some(dir), Some(name)) = (engine.journal.store_path(), &engine.settings.cluster.name)
    else {
        return;
    };
    let (dir, name) = (dir.to_owned(), name.clone());
    let write = move || joined::write(&dir, &name, cluster);
    match tokio::task::spawn_blocking(write).await {
        Ok(Err(error)) if running.not_noted.is_new(&(), &format!("{error:#}")) => {
            warn!("the data directory does not name its cluster yet: {error:#}");
        }
        Ok(Err(_)) | Err(_) => {}
        Ok(Ok(_)) => running.not_noted.clear(&()),
    }
}

impl Membership for Running {
    fn not_here(&self, record: &VolumeRecord) -> Option<RpcError> {
        let holder = record.holder.map(NodeId);
        if holder == Some(self.me) {
            return None;
        }
        // A node without a lease serves nothing, and executes nothing.
        let holder = holder.filter(|node| !self.inbox.is_node_away(*node));
        let name = &record.name;
        Some(match holder {
            Some(node) => {
                let node = self.name_of(node);
                let cause = format!("node {node} serves volume \"{name}\"");
                RpcError::errno(Errno::EPERM, cause)
                    .field("name")
                    .remedy(format!("run the command on {node}"))
            }
            None => {
                let cause = format!("no node serves volume \"{name}\"");
                RpcError::errno(Errno::EAGAIN, cause).field("name").remedy(
                    "publish it, then run the command on the node that serves it: \
                     cluster_get_volumes shows that node",
                )
            }
        })
    }

    fn holder(&self) -> Holder {
        Holder {
            id: self.me.0,
            lease: Some(Arc::new(OfIncarnation::now(&self.link))),
        }
    }

    fn absent_devices(&self) -> Arc<dyn AbsentDevices> {
        Arc::clone(&self.inbox) as _
    }
}

impl Running {
    /// The name of a node, or its id.
    fn name_of(&self, node: NodeId) -> String {
        let name = self.inbox.name_of(node);
        name.unwrap_or_else(|| node.0.to_string())
    }

    /// True if the exports of this node are complete, and so are the subsystems of all volumes that
    /// are published on it.
    fn are_shown(&self) -> bool {
        let shown = self.shown.borrow();
        let is_shown = |id: &VolumeId| shown.get(id).is_some_and(Shown::is_complete);
        let published = self.inbox.published_on(self.me);
        self.exports.is_complete() && published.iter().all(is_shown)
    }

    /// The id of the cluster, while the node has a lease.
    fn cluster(&self) -> Option<Uuid> {
        let node = self.node.borrow();
        match node.as_ref()?.state() {
            NodeState::In { cluster, .. } => Some(cluster),
            _ => None,
        }
    }

    /// Wakes the volume's task, or starts it.
    fn wake(self: &Rc<Self>, engine: &Rc<Engine>, id: VolumeId) {
        let mut tasks = self.tasks.borrow_mut();
        if let Some(changed) = tasks.get(&id) {
            changed.notify_one();
        } else if self.inbox.wanted(id).is_some() {
            let changed = Rc::new(Notify::new());
            tasks.insert(id, Rc::clone(&changed));
            let (engine, running) = (Rc::clone(engine), Rc::clone(self));
            tokio::task::spawn_local(volumes::follow(engine, running, id, changed));
        } else {
            // Not shown here, and not to be: no task would say so.
            self.inbox.set_in_effect(id, None);
        }
    }
}

/// Hands all volumes over and gives the lease back. Called before hosts are disconnected.
pub async fn leave(engine: &Engine) {
    let Some(running) = engine.cluster.running() else {
        return;
    };
    let Some(node) = running.node.borrow_mut().take() else {
        return;
    };
    // The node waits for answers of this thread.
    let left = tokio::task::spawn_blocking(move || node.leave());
    if tokio::time::timeout(LEAVE, left).await.is_err() {
        warn!("the node has not left the cluster within {LEAVE:?}");
    }
    running.is_ending.set(true);
}

impl Refusal for nacre_cluster_node::Error {
    fn refusal(self) -> RpcError {
        let errno = match &self {
            Self::NoCluster { .. }
            | Self::NoNode { .. }
            | Self::NoVolume { .. }
            | Self::NoLease { .. } => Errno::ENODEV,
            Self::ClusterExists { .. } => Errno::EEXIST,
            Self::HasReplica { .. } | Self::Lives { .. } | Self::Owned { .. } => Errno::EPERM,
            Self::Invalid { .. } => Errno::EINVAL,
            Self::TooManySnapshots { .. } | Self::TooManyNodes { .. } => Errno::ENOSPC,
            Self::Contended { .. } | Self::Braked { .. } => Errno::EBUSY,
            Self::NotPlaced { demand, .. } => match demand {
                Unmet::Request => Errno::EINVAL,
                Unmet::Busy => Errno::EBUSY,
                Unmet::Nodes | Unmet::Pools | Unmet::Room => Errno::ENOSPC,
            },
            Self::Late { .. } => Errno::ETIMEDOUT,
            _ => Errno::EAGAIN,
        };
        RpcError::errno(errno, self.to_string())
    }
}
