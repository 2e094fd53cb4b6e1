//! What the cluster's thread wants of this daemon. It is kept as a state, not as a list of
//! messages: the number of volumes, nodes and exports bounds it, and a call that is overtaken has
//! no effect.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use arrayvec::ArrayVec;
use nacre_cluster_core::ids::MAX_MEMBERS;
use nacre_cluster_core::{Incarnation, MemberId, NodeId, VolumeId};
use nacre_cluster_node::serving::{Role, Serving};
use nacre_cluster_node::{Export, NodeKey, Publication};
use parking_lot::Mutex;
use tokio::sync::Notify;

/// What is wanted of one volume.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Wish {
    /// `None`: the record has not arrived, or was deleted.
    pub role: Option<Role>,
    pub publication: Option<Publication>,
    pub action: Action,
    /// Number of drops so far.
    pub drops: u64,
    /// Number of aborts so far.
    pub aborts: u64,
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
struct State {
    volumes: BTreeMap<VolumeId, Wish>,
    /// Volumes whose wish has changed.
    changed: BTreeSet<VolumeId>,
    nodes: BTreeMap<NodeId, NodeKey>,
    standing: BTreeMap<NodeId, Incarnation>,
    exports: BTreeMap<MemberId, Export>,
    others_changed: bool,
    /// The members that this node reaches, of each volume.
    reached: BTreeMap<VolumeId, ArrayVec<MemberId, MAX_MEMBERS>>,
    /// Devices of replicas on nodes whose leases are over.
    away: BTreeSet<String>,
}

/// Shared by the cluster's thread, the management thread and the reactors.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    state: Mutex<State>,
    news: Notify,
}

/// The changes since the last look.
#[derive(Debug, Default)]
pub(super) struct News {
    pub volumes: BTreeSet<VolumeId>,
    /// Nodes or exports have changed.
    pub others: bool,
}

impl Inbox {
    /// Waits for changes.
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

    /// `None`: the volume was deleted.
    pub(super) fn wish(&self, volume: VolumeId) -> Option<Wish> {
        self.state.lock().volumes.get(&volume).cloned()
    }

    pub(super) fn wishes(&self) -> Vec<(VolumeId, Wish)> {
        let state = self.state.lock();
        let all = state.volumes.iter();
        all.map(|(id, wish)| (*id, wish.clone())).collect()
    }

    pub(super) fn nodes(&self) -> BTreeMap<NodeId, NodeKey> {
        self.state.lock().nodes.clone()
    }

    pub(super) fn stands(&self, node: NodeId) -> bool {
        self.state.lock().standing.contains_key(&node)
    }

    pub(super) fn exports(&self) -> BTreeMap<MemberId, Export> {
        self.state.lock().exports.clone()
    }

    pub(super) fn set_reached(&self, volume: VolumeId, reached: ArrayVec<MemberId, MAX_MEMBERS>) {
        self.state.lock().reached.insert(volume, reached);
    }

    /// Sets the devices that are not waited for.
    pub(super) fn set_away(&self, away: BTreeSet<String>) {
        self.state.lock().away = away;
    }

    pub(super) fn is_away(&self, device: &str) -> bool {
        self.state.lock().away.contains(device)
    }

    fn change(&self, volume: VolumeId, change: impl FnOnce(&mut Wish)) {
        let mut state = self.state.lock();
        let wish = state.volumes.entry(volume).or_default();
        change(wish);
        // Without record and publication, nothing is left to do.
        if wish.role.is_none() && wish.publication.is_none() {
            state.volumes.remove(&volume);
            state.reached.remove(&volume);
        }
        state.changed.insert(volume);
        drop(state);
        self.news.notify_one();
    }

    fn change_others(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.state.lock();
        change(&mut state);
        state.others_changed = true;
        drop(state);
        self.news.notify_one();
    }
}

/// The side of the cluster's thread.
pub(super) struct Sender(pub(super) Arc<Inbox>);

impl Serving for Sender {
    fn reached(&mut self, volume: VolumeId) -> ArrayVec<MemberId, MAX_MEMBERS> {
        let state = self.0.state.lock();
        state.reached.get(&volume).cloned().unwrap_or_default()
    }

    fn take(&mut self, volume: VolumeId, number: u64) {
        self.0
            .change(volume, |wish| wish.action = Action::Take { number });
    }

    fn close(&mut self, volume: VolumeId, number: u64) {
        self.0
            .change(volume, |wish| wish.action = Action::Close { number });
    }

    fn abort(&mut self, volume: VolumeId) {
        self.0.change(volume, |wish| wish.aborts += 1);
    }

    fn drop_all(&mut self, volume: VolumeId) {
        self.0.change(volume, |wish| {
            wish.action = Action::None;
            wish.drops += 1;
        });
    }

    fn show(&mut self, volume: VolumeId, role: &Role) {
        self.0.change(volume, |wish| wish.role = Some(role.clone()));
    }

    fn forget(&mut self, volume: VolumeId) {
        self.0.change(volume, |wish| {
            wish.role = None;
            wish.action = Action::None;
        });
    }

    fn publish(&mut self, volume: VolumeId, publication: Option<&Publication>) {
        self.0
            .change(volume, |wish| wish.publication = publication.cloned());
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

    fn exports(&mut self, exports: &BTreeMap<MemberId, Export>) {
        self.0
            .change_others(|state| state.exports.clone_from(exports));
    }
}
