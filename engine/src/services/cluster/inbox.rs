//! The inbox between the cluster's thread, which decides, and the management thread, which acts.
//! The calls of the cluster's thread ([`Serving`]) set wanted states here; there is no message
//! queue. The number of volumes, nodes and exports bounds its size, and a later call replaces an
//! earlier one.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use arrayvec::ArrayVec;
use nacre_cluster_core::ids::MAX_REPLICAS;
use nacre_cluster_core::{ExportId, Holder, Incarnation, NodeId, ReplicaId, VolumeId};
use nacre_cluster_etcd::BehindCause;
use nacre_cluster_node::clock::seconds;
use nacre_cluster_node::serving::{Serving, VolumeRole};
use nacre_cluster_node::{Export, NodeKey, Publication, SeenSnapshot};
use parking_lot::Mutex;
use tokio::sync::Notify;
use uuid::Uuid;

use crate::services::volumes::AbsentDevices;

/// The state that the cluster's thread wants for one volume.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct WantedVolume {
    /// `None`: etcd has not sent the volume's record yet, or it was deleted.
    pub role: Option<VolumeRole>,
    pub publication: Option<Publication>,
    /// Number of the call that set `publication`; counts over all volumes.
    pub published: u64,
    pub action: Action,
    /// Number of calls of [`Serving::drop_all`] for this volume.
    pub drops: u64,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Action {
    #[default]
    None,
    Take {
        number: u64,
    },
    Close {
        number: u64,
    },
}

#[derive(Debug, Default)]
struct InboxState {
    volumes: BTreeMap<VolumeId, WantedVolume>,
    /// Volumes whose wanted state has changed.
    changed: BTreeSet<VolumeId>,
    /// Volumes whose last published or withdrawn publication is not in effect on this node yet.
    behind: BTreeMap<VolumeId, Behind>,
    /// Number of calls of [`Serving::publish`] so far.
    publications: u64,
    nodes: BTreeMap<NodeId, NodeKey>,
    standing: BTreeMap<NodeId, Incarnation>,
    exports: BTreeMap<ExportId, Export>,
    /// The snapshots of all volumes, by snapshot id.
    snapshots: BTreeMap<Uuid, SeenSnapshot>,
    others_changed: bool,
    /// True once the node has read all lists of the cluster's keys from etcd.
    is_listed: bool,
    /// The replicas of each volume whose devices this node can use.
    reached: BTreeMap<VolumeId, ArrayVec<ReplicaId, MAX_REPLICAS>>,
    /// The devices of each volume's replicas, as its record says.
    devices: BTreeMap<VolumeId, Vec<Exported>>,
    /// Devices that a replica is being made on; no record names them yet.
    noted: Vec<Exported>,
    /// Duration of the cluster's leases, once the node has read it.
    lease: Option<Duration>,
}

/// A publication that is not in effect yet, with the reason.
#[derive(Debug)]
struct Behind {
    /// The number of the last call.
    published: u64,
    cause: BehindCause,
}

/// The device of a replica, which `node` exports over NVMe-oF. `device` is its name on all nodes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Exported {
    pub device: String,
    pub node: NodeId,
    /// The device's name on `node`. `None`: the record was written by a version that did not store
    /// it.
    pub node_device: Option<String>,
}

/// Lower bound of [`AbsentDevices::patience`], for clusters with shorter leases.
const LEAST_PATIENCE: Duration = Duration::from_secs(2);

/// Shared by the cluster's thread, the management thread and the reactors.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    /// This node.
    me: Option<NodeId>,
    state: Mutex<InboxState>,
    news: Notify,
    /// The snapshots have changed.
    snapshots_changed: Notify,
}

/// The changes since the last call of [`Inbox::news`].
#[derive(Debug, Default)]
pub(super) struct News {
    pub volumes: BTreeSet<VolumeId>,
    /// Nodes or exports have changed.
    pub others: bool,
}

impl Inbox {
    /// The inbox of the node `me`.
    pub(super) fn of(me: NodeId) -> Self {
        Self {
            me: Some(me),
            ..Self::default()
        }
    }

    /// Waits for a change of the snapshots since the last call.
    pub(super) async fn snapshots_changed(&self) {
        self.snapshots_changed.notified().await;
    }

    /// Waits for changes since the last call, and returns them.
    pub(super) async fn news(&self) -> News {
        loop {
            {
                let mut state = self.state.lock();
                if state.others_changed || !state.changed.is_empty() {
                    return News {
                        volumes: std::mem::take(&mut state.changed),
                        others: std::mem::take(&mut state.others_changed),
                    };
                }
            }
            self.news.notified().await;
        }
    }

    /// The wanted state of a volume. `None`: it has neither a record nor a publication.
    pub(super) fn wanted(&self, volume: VolumeId) -> Option<WantedVolume> {
        self.state.lock().volumes.get(&volume).cloned()
    }

    /// Marks the publication of call number `published` as in effect; `None`: the volume's removal.
    /// Has no effect after a later call of [`Serving::publish`].
    pub(super) fn set_in_effect(&self, volume: VolumeId, published: Option<u64>) {
        let mut state = self.state.lock();
        let is_last = match published {
            Some(published) => {
                (state.behind.get(&volume)).is_some_and(|behind| behind.published == published)
            }
            None => !state.volumes.contains_key(&volume),
        };
        if is_last {
            state.behind.remove(&volume);
        }
    }

    /// Sets the error of the last attempt to put the volume's publication into effect. `None`: the
    /// attempt is still in progress.
    pub(super) fn set_behind_cause(&self, volume: VolumeId, why: Option<String>) {
        if let Some(behind) = self.state.lock().behind.get_mut(&volume) {
            behind.cause.why = why;
        }
    }

    pub(super) fn volumes(&self) -> BTreeSet<VolumeId> {
        self.state.lock().volumes.keys().copied().collect()
    }

    /// The volumes that the node shows by their publications.
    pub(super) fn published_on(&self, node: NodeId) -> Vec<VolumeId> {
        let state = self.state.lock();
        let of_node = |wanted: &WantedVolume| {
            let publication = wanted.publication.as_ref();
            publication.is_some_and(|publication| publication.slots.of(node).is_some())
        };
        let volumes = state.volumes.iter();
        volumes
            .filter(|(_, wanted)| of_node(wanted))
            .map(|(id, _)| *id)
            .collect()
    }

    /// The volume that this node shows under the NQN, with its publication.
    pub(super) fn published_as(&self, nqn: &str) -> Option<(VolumeId, Publication)> {
        let state = self.state.lock();
        let mut published = state.volumes.iter().filter_map(|(id, wanted)| {
            let publication = wanted.publication.as_ref()?;
            publication.slots.of(self.me?)?;
            (publication.nqn == nqn).then_some((*id, publication))
        });
        published
            .next()
            .map(|(id, publication)| (id, publication.clone()))
    }

    pub(super) fn nodes(&self) -> BTreeMap<NodeId, NodeKey> {
        self.state.lock().nodes.clone()
    }

    /// The name of a described node.
    pub(super) fn name_of(&self, node: NodeId) -> Option<String> {
        let state = self.state.lock();
        let key = state.nodes.get(&node)?;
        Some(key.description.name.clone())
    }

    pub(super) fn exports(&self) -> BTreeMap<ExportId, Export> {
        self.state.lock().exports.clone()
    }

    pub(super) fn snapshot(&self, id: Uuid) -> Option<SeenSnapshot> {
        self.state.lock().snapshots.get(&id).cloned()
    }

    pub(super) fn snapshots(&self) -> BTreeMap<Uuid, SeenSnapshot> {
        self.state.lock().snapshots.clone()
    }

    pub(super) fn set_reached(&self, volume: VolumeId, reached: ArrayVec<ReplicaId, MAX_REPLICAS>) {
        self.state.lock().reached.insert(volume, reached);
    }

    /// Notes the devices of a volume's replicas, by its record.
    pub(super) fn set_devices(&self, volume: VolumeId, devices: Vec<Exported>) {
        let mut state = self.state.lock();
        state
            .noted
            .retain(|noted| !devices.iter().any(|one| one.device == noted.device));
        state.devices.insert(volume, devices);
    }

    /// Notes a device before a record names it.
    pub(super) fn note(&self, exported: Exported) {
        self.state.lock().noted.push(exported);
    }

    /// Forgets a device that no record will name.
    pub(super) fn forget_noted(&self, device: &str) {
        self.state.lock().noted.retain(|one| one.device != device);
    }

    /// The device of this name, of the volume's record or noted.
    pub(super) fn exported(&self, volume: VolumeId, device: &str) -> Option<Exported> {
        let state = self.state.lock();
        let of_record = state.devices.get(&volume).into_iter().flatten();
        let mut all = of_record.chain(&state.noted);
        all.find(|one| one.device == device).cloned()
    }

    /// The devices of the volume's replicas, as its record says.
    pub(super) fn devices(&self, volume: VolumeId) -> Vec<Exported> {
        let state = self.state.lock();
        state.devices.get(&volume).cloned().unwrap_or_default()
    }

    /// True if the volume's record names the device.
    pub(super) fn is_named(&self, volume: VolumeId, device: &str) -> bool {
        let state = self.state.lock();
        let devices = state.devices.get(&volume);
        devices.is_some_and(|devices| devices.iter().any(|one| one.device == device))
    }

    /// True once the node has read all lists of the cluster's keys from etcd.
    pub(super) fn is_listed(&self) -> bool {
        self.state.lock().is_listed
    }

    /// True if this incarnation of a node has a lease.
    pub(super) fn stands(&self, node: Holder) -> bool {
        self.state.lock().standing.get(&node.node) == Some(&node.incarnation)
    }

    /// True if the node has no lease; false before the list of nodes was read.
    pub(super) fn is_node_away(&self, node: NodeId) -> bool {
        let state = self.state.lock();
        // Without the list of nodes, none is known to be away.
        !state.nodes.is_empty() && !state.standing.contains_key(&node)
    }

    /// Makes [`Inbox::news`] return with `others`: a device of this node has changed.
    pub(super) fn look_again(&self) {
        self.change_others(|_| {});
    }

    /// The nodes that have a lease.
    pub(super) fn standing(&self) -> BTreeMap<NodeId, Incarnation> {
        self.state.lock().standing.clone()
    }

    fn change(&self, volume: VolumeId, change: impl FnOnce(&mut WantedVolume)) {
        let mut state = self.state.lock();
        let wanted = state.volumes.entry(volume).or_default();
        change(wanted);
        // Without record and publication, nothing is left to do.
        if wanted.role.is_none() && wanted.publication.is_none() {
            state.volumes.remove(&volume);
            state.reached.remove(&volume);
            state.devices.remove(&volume);
        }
        state.changed.insert(volume);
        drop(state);
        self.news.notify_one();
    }

    fn change_others(&self, change: impl FnOnce(&mut InboxState)) {
        let mut state = self.state.lock();
        change(&mut state);
        state.others_changed = true;
        drop(state);
        self.news.notify_one();
    }
}

/// The end of the inbox that the cluster's thread calls.
pub(super) struct Sender(pub(super) Arc<Inbox>);

impl Serving for Sender {
    fn reached(&mut self, volume: VolumeId) -> ArrayVec<ReplicaId, MAX_REPLICAS> {
        let state = self.0.state.lock();
        state.reached.get(&volume).cloned().unwrap_or_default()
    }

    fn take(&mut self, volume: VolumeId, number: u64) {
        self.0
            .change(volume, |wanted| wanted.action = Action::Take { number });
    }

    fn close(&mut self, volume: VolumeId, number: u64) {
        self.0
            .change(volume, |wanted| wanted.action = Action::Close { number });
    }

    /// No action: [`Serving::close`] itself ends the commands in flight after 2 s.
    fn abort(&mut self, _: VolumeId) {}

    fn drop_all(&mut self, volume: VolumeId) {
        self.0.change(volume, |wanted| {
            wanted.action = Action::None;
            wanted.drops += 1;
        });
    }

    fn show(&mut self, volume: VolumeId, role: &VolumeRole) {
        self.0
            .change(volume, |wanted| wanted.role = Some(role.clone()));
    }

    fn forget(&mut self, volume: VolumeId) {
        self.0.change(volume, |wanted| {
            wanted.role = None;
            wanted.action = Action::None;
        });
    }

    fn publish(&mut self, volume: VolumeId, publication: Option<&Publication>) {
        let published = {
            let mut state = self.0.state.lock();
            state.publications += 1;
            let published = state.publications;
            // A removal that waited before waits on.
            let cause = state.behind.remove(&volume).map(|behind| behind.cause);
            let new = || BehindCause {
                since: seconds(),
                why: None,
            };
            let cause = cause.unwrap_or_else(new);
            state.behind.insert(volume, Behind { published, cause });
            published
        };
        self.0.change(volume, |wanted| {
            wanted.publication = publication.cloned();
            wanted.published = published;
        });
    }

    fn behind(&mut self) -> Vec<VolumeId> {
        self.0.state.lock().behind.keys().copied().collect()
    }

    fn causes(&mut self) -> BTreeMap<VolumeId, BehindCause> {
        let state = self.0.state.lock();
        let behind = state.behind.iter();
        behind
            .map(|(volume, behind)| (*volume, behind.cause.clone()))
            .collect()
    }

    fn nodes(
        &mut self,
        nodes: &BTreeMap<NodeId, NodeKey>,
        standing: &BTreeMap<NodeId, Incarnation>,
    ) {
        self.0.change_others(|state| {
            state.nodes.clone_from(nodes);
            state.standing.clone_from(standing);
        });
    }

    fn exports(&mut self, exports: &BTreeMap<ExportId, Export>) {
        self.0
            .change_others(|state| state.exports.clone_from(exports));
    }

    fn snapshots(&mut self, snapshots: &BTreeMap<Uuid, SeenSnapshot>) {
        self.0.state.lock().snapshots.clone_from(snapshots);
        self.0.snapshots_changed.notify_one();
    }

    fn lease(&mut self, lease: Duration) {
        self.0.state.lock().lease = Some(lease);
    }

    fn listed(&mut self) {
        self.0.change_others(|state| state.is_listed = true);
    }
}

impl AbsentDevices for Inbox {
    /// True if the device is of a node that has no lease.
    fn is_absent(&self, device: &str) -> bool {
        let node = self.state.lock().node_of(device);
        node.is_some_and(|node| self.is_node_away(node))
    }

    /// The duration of the cluster's leases, at least 2 s, because devices are slow at times.
    /// `None`: the device is this node's or unknown, or the duration is not known yet.
    fn patience(&self, device: &str) -> Option<Duration> {
        let state = self.state.lock();
        let node = state.node_of(device)?;
        let lease = state.lease.filter(|_| Some(node) != self.me)?;
        Some(lease.max(LEAST_PATIENCE))
    }
}

impl InboxState {
    fn node_of(&self, device: &str) -> Option<NodeId> {
        let mut all = self.devices.values().flatten().chain(&self.noted);
        all.find(|one| one.device == device).map(|one| one.node)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inbox() -> (Sender, Arc<Inbox>, VolumeId) {
        let inbox = Arc::new(Inbox::default());
        (
            Sender(Arc::clone(&inbox)),
            inbox,
            VolumeId(Uuid::from_u128(1)),
        )
    }

    fn exported(device: &str) -> Exported {
        Exported {
            device: device.to_owned(),
            node: NodeId(Uuid::from_u128(9)),
            node_device: Some("disk".to_owned()),
        }
    }

    /// Goal: a device is known from its note until the volume's record names it.
    #[test]
    fn a_noted_device_moves_to_its_record() {
        let (_, inbox, volume) = inbox();
        inbox.note(exported("d"));
        inbox.note(exported("e"));
        assert_eq!(inbox.exported(volume, "d"), Some(exported("d")));
        assert!(!inbox.is_named(volume, "d"));
        inbox.set_devices(volume, vec![exported("d")]);
        assert_eq!(inbox.exported(volume, "d"), Some(exported("d")));
        assert!(inbox.is_named(volume, "d"));
        inbox.forget_noted("e");
        assert!(inbox.state.lock().noted.is_empty());
        // A change of the record without the device is the end of it.
        inbox.set_devices(volume, Vec::new());
        assert_eq!(inbox.exported(volume, "d"), None);
    }

    /// Goal: a call that is overtaken has no effect, and a drop is never overtaken.
    #[tokio::test]
    async fn the_last_action_counts() {
        let (mut sender, inbox, volume) = inbox();
        sender.publish(volume, Some(&Publication::new(volume)));
        sender.take(volume, 1);
        sender.drop_all(volume);
        sender.take(volume, 2);
        let wanted = inbox.wanted(volume).expect("it is published");
        assert_eq!(wanted.action, Action::Take { number: 2 });
        assert_eq!(wanted.drops, 1);
        let news = inbox.news().await;
        assert_eq!(news.volumes, BTreeSet::from([volume]));
        assert!(!news.others);
    }

    /// Goal: a publication counts as in effect only if no later one has arrived.
    #[test]
    fn the_last_publication_counts() {
        let (mut sender, inbox, volume) = inbox();
        let number = || inbox.wanted(volume).expect("it is published").published;
        sender.publish(volume, Some(&Publication::new(volume)));
        let first = number();
        sender.publish(volume, Some(&Publication::new(volume)));
        inbox.set_in_effect(volume, Some(first));
        assert_eq!(sender.behind(), [volume], "of the first one");
        inbox.set_in_effect(volume, None);
        assert_eq!(sender.behind(), [volume], "it is still published");
        inbox.set_in_effect(volume, Some(number()));
        assert_eq!(sender.behind(), []);
        sender.publish(volume, None);
        inbox.set_in_effect(volume, Some(first));
        assert_eq!(sender.behind(), [volume]);
        inbox.set_in_effect(volume, None);
        assert_eq!(sender.behind(), []);
    }

    /// Goal: nothing of a deleted volume stays.
    #[tokio::test]
    async fn a_deleted_volume() {
        let (mut sender, inbox, volume) = inbox();
        sender.publish(volume, Some(&Publication::new(volume)));
        inbox.set_reached(volume, ArrayVec::new());
        inbox.set_devices(volume, vec![exported("d")]);
        sender.forget(volume);
        assert!(inbox.wanted(volume).is_some(), "its publication is there");
        sender.publish(volume, None);
        assert!(inbox.wanted(volume).is_none());
        assert!(inbox.news().await.volumes.contains(&volume));
        let state = inbox.state.lock();
        assert!(state.volumes.is_empty() && state.reached.is_empty() && state.devices.is_empty());
    }

    /// Goal: a device is away when the lease of its node is over, and not before the nodes are
    /// known.
    #[test]
    fn devices_of_dead_nodes_are_away() {
        let (mut sender, inbox, volume) = inbox();
        let node = NodeId(Uuid::from_u128(9));
        inbox.set_devices(volume, vec![exported("d")]);
        assert!(!inbox.is_absent("d"));
        let nodes = BTreeMap::from([(node, NodeKey::default())]);
        sender.nodes(&nodes, &BTreeMap::new());
        assert!(inbox.is_absent("d"));
        assert!(!inbox.is_absent("other"));
        sender.nodes(&nodes, &BTreeMap::from([(node, Incarnation(3))]));
        assert!(!inbox.is_absent("d"));
    }

    /// Goal: a silent device of another node with a lease is waited for as long as a silent node,
    /// and for 2 s at least. Before the node knows its cluster, and for devices of this node, the
    /// volume's deadline decides.
    #[test]
    fn silent_devices_are_waited_for_as_silent_nodes_are() {
        let me = NodeId(Uuid::from_u128(1));
        let inbox = Arc::new(Inbox::of(me));
        let mut sender = Sender(Arc::clone(&inbox));
        let own = Exported {
            node: me,
            ..exported("own")
        };
        inbox.set_devices(VolumeId(Uuid::nil()), vec![exported("d"), own]);
        assert_eq!(inbox.patience("d"), None);
        for (lease, patience) in [(1, 2), (2, 2), (15, 15)] {
            sender.lease(Duration::from_secs(lease));
            assert_eq!(inbox.patience("d"), Some(Duration::from_secs(patience)));
            assert_eq!(inbox.patience("own"), None);
            assert_eq!(inbox.patience("unknown"), None);
        }
    }

    /// Goal: hosts wait for the volumes that have a slot for this node, and for no others.
    #[test]
    fn volumes_that_hosts_wait_for() {
        let (mut sender, inbox, volume) = inbox();
        let (me, other) = (NodeId(Uuid::from_u128(8)), NodeId(Uuid::from_u128(9)));
        let mut publication = Publication::new(volume);
        publication.slots.assign(other);
        sender.publish(volume, Some(&publication));
        assert_eq!(inbox.published_on(other), [volume]);
        assert!(inbox.published_on(me).is_empty());
        assert!(!inbox.is_listed());
        sender.listed();
        assert!(inbox.is_listed());
    }
}
