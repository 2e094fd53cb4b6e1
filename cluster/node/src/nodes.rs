//! The other nodes: their leases, and the fences of silent nodes.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use nacre_cluster_core::observer::ObserverRole;
use nacre_cluster_core::{
    BootTime, Incarnation, Lease, NodeId, Observer, Revision, Timing, Transaction, ranks,
};
use nacre_cluster_etcd::LeaseKey;

use crate::events::{Decision, Events};
use crate::keys::NodeKey;

/// The nodes of the cluster, as watches and reads have shown them.
///
/// Each node sees the ends of all leases, and the renewals of the nodes that it observes. A lease
/// that is created shows in a read: its node writes its description after that.
pub(crate) struct Nodes {
    me: NodeId,
    timing: Timing,
    /// The nodes that have a lease, and their incarnations.
    pub(crate) standing: BTreeMap<NodeId, Incarnation>,
    /// The nodes whose description is in etcd.
    pub(crate) described: BTreeMap<NodeId, NodeKey>,
    /// Those of `described` that are cordoned, drained or evicted.
    pub(crate) avoided: Vec<NodeId>,
    observers: BTreeMap<NodeId, Observer>,
    /// The last renewal of each node that this one saw, and the time of that.
    seen: BTreeMap<NodeId, (Revision, BootTime)>,
    /// The revision of the last end of each described node's lease. Watches and reads overtake each
    /// other: an older lease must not come back.
    ended: BTreeMap<NodeId, i64>,
    next_look: BootTime,
    /// The first list of leases has arrived.
    pub(crate) is_listed: bool,
    /// The engine does not know the present nodes yet.
    has_news: bool,
    /// The set of live nodes has changed since the last call of [`Nodes::watched`].
    has_other_watches: bool,
}

/// All leases, as a read shows them.
pub(crate) struct Leases {
    pub(crate) revision: i64,
    /// The nodes that have a lease. That of a later format is not among the keys.
    pub(crate) present: BTreeSet<NodeId>,
    pub(crate) keys: Vec<LeaseKey>,
}

/// The next step of observation.
pub(crate) enum ObservationStep {
    /// Read all leases, and call [`Nodes::looked`].
    Look,
    /// Send the transaction, which fences the node. The node has been silent for this time.
    Fence(NodeId, Transaction, Duration),
}

impl Nodes {
    pub(crate) fn new(me: NodeId, timing: Timing) -> Self {
        Self {
            me,
            timing,
            standing: BTreeMap::new(),
            described: BTreeMap::new(),
            avoided: Vec::new(),
            observers: BTreeMap::new(),
            seen: BTreeMap::new(),
            ended: BTreeMap::new(),
            next_look: BootTime::default(),
            is_listed: false,
            has_news: false,
            has_other_watches: false,
        }
    }

    /// Sets the cluster's timing. Nodes are observed anew: earlier observations had another one.
    pub(crate) fn set_timing(&mut self, timing: Timing, now: BootTime) {
        self.timing = timing;
        self.observers.clear();
        self.assign(now);
    }

    /// Forgets all: the store is another one, whose revisions and incarnations begin anew.
    pub(crate) fn begin_anew(&mut self) {
        *self = Self {
            has_news: true,
            has_other_watches: true,
            ..Self::new(self.me, self.timing)
        };
    }

    pub(crate) fn is_avoided(&self, node: NodeId) -> bool {
        self.avoided.contains(&node)
    }

    /// True if descriptions or leases have changed since the last call.
    pub(crate) fn take_news(&mut self) -> bool {
        std::mem::take(&mut self.has_news)
    }

    /// A description was written or removed.
    pub(crate) fn describe(&mut self, node: NodeId, key: Option<NodeKey>) {
        match key {
            Some(key) => {
                self.described.insert(node, key);
                if !self.standing.contains_key(&node) {
                    self.next_look = BootTime::default();
                }
            }
            None => {
                self.described.remove(&node);
                self.ended.remove(&node);
            }
        }
        self.has_news = true;
        let avoided = self.described.iter().filter(|(_, key)| key.is_avoided());
        self.avoided = avoided.map(|(node, _)| *node).collect();
    }

    /// The lease was written: created or renewed. True if another incarnation ended with that: the
    /// news of its end was lost, or comes later.
    pub(crate) fn put(&mut self, key: &LeaseKey, now: BootTime, events: &Events) -> bool {
        let of = key.node;
        let known = self.standing.get(&of).copied();
        let ended = self.ended.get(&of).copied().unwrap_or(0);
        let is_over = (key.incarnation.0 as i64) < ended;
        if is_over || known.is_some_and(|known| known > key.incarnation) {
            return false;
        }
        if self
            .seen
            .get(&of)
            .is_none_or(|(seen, _)| *seen < key.revision)
        {
            self.seen.insert(of, (key.revision, now));
        }
        if known != Some(key.incarnation) {
            self.standing.insert(of, key.incarnation);
            self.has_news = true;
            self.has_other_watches = true;
            self.observers.remove(&of);
            self.assign(now);
            if of != self.me && self.is_listed {
                events.note(Decision::NodeBack { node: of });
            }
        }
        // The cluster's rule: only observers count from the watch.
        if self.is_observer(of)
            && let Some(observer) = self.observers.get_mut(&of)
        {
            observer.observe(key.revision, now);
        }
        known.is_some_and(|known| known != key.incarnation)
    }

    /// The lease was deleted at `revision`. True if an incarnation ended.
    pub(crate) fn deleted(
        &mut self,
        of: NodeId,
        revision: i64,
        now: BootTime,
        events: &Events,
    ) -> bool {
        if self.described.contains_key(&of) {
            let ended = self.ended.entry(of).or_default();
            *ended = revision.max(*ended);
        }
        let stood = self.standing.get(&of);
        if stood.is_none_or(|known| known.0 as i64 > revision) {
            return false;
        }
        self.standing.remove(&of);
        self.has_news = true;
        self.has_other_watches = true;
        self.observers.remove(&of);
        self.seen.remove(&of);
        self.assign(now);
        if of != self.me {
            events.note(Decision::NodeGone { node: of });
        }
        true
    }

    fn is_observer(&self, of: NodeId) -> bool {
        let live: Vec<NodeId> = self.standing.keys().copied().collect();
        ranks::observers(of, &live).contains(&self.me)
    }

    /// Gives each observer its role, after the set of live nodes has changed.
    fn assign(&mut self, now: BootTime) {
        let live: Vec<NodeId> = self.standing.keys().copied().collect();
        for of in live.iter().filter(|of| **of != self.me) {
            let rank = ranks::observers(*of, &live)
                .iter()
                .position(|node| *node == self.me);
            let role = rank.map_or(ObserverRole::Other, |rank| {
                ObserverRole::Observer(rank as u8)
            });
            let new = || Observer::new(*of, role, self.timing);
            self.observers
                .entry(*of)
                .or_insert_with(new)
                .set_role(role, now);
        }
    }

    /// The nodes whose renewals this node has to see, if they may have changed: those that it
    /// observes, and itself.
    pub(crate) fn watched(&mut self) -> Option<BTreeSet<NodeId>> {
        if !std::mem::take(&mut self.has_other_watches) {
            return None;
        }
        let live: Vec<NodeId> = self.standing.keys().copied().collect();
        let is_watched =
            |of: &NodeId| *of == self.me || ranks::observers(*of, &live).contains(&self.me);
        Some(live.iter().copied().filter(is_watched).collect())
    }

    /// The leases as a read at `revision` shows them: new ones, and renewals of nodes that are not
    /// watched. A lease that stood before and is not there has ended, also if no watch showed it.
    /// True if an incarnation ended.
    pub(crate) fn looked(&mut self, leases: &Leases, now: BootTime, events: &Events) -> bool {
        let mut has_ended = false;
        let absent = |of: &&NodeId| !leases.present.contains(of);
        let absent: Vec<NodeId> = self.standing.keys().filter(absent).copied().collect();
        for of in absent {
            has_ended |= self.deleted(of, leases.revision, now, events);
        }
        for key in &leases.keys {
            has_ended |= self.put(key, now, events);
            if self.standing.get(&key.node) == Some(&key.incarnation)
                && let Some(observer) = self.observers.get_mut(&key.node)
            {
                observer.observe(key.revision, now);
            }
        }
        has_ended
    }

    /// The steps that are due; `own` is this node's lease.
    pub(crate) fn poll(&mut self, now: BootTime, own: &Lease) -> Vec<ObservationStep> {
        let mut steps = Vec::new();
        if now >= self.next_look {
            let must_read = self.observers.values().any(Observer::must_read);
            let share = if must_read { 2 } else { 1 };
            self.next_look = now + self.timing.lease() / share;
            steps.push(ObservationStep::Look);
        }
        for (of, observer) in &mut self.observers {
            if let Some(fence) = observer.poll(now, own) {
                let silent = self
                    .seen
                    .get(of)
                    .map_or(Duration::ZERO, |(_, at)| now.since(*at));
                steps.push(ObservationStep::Fence(*of, fence, silent));
            }
        }
        steps
    }

    /// The time of the next fence.
    pub(crate) fn due(&self, now: BootTime, own: &Lease) -> Option<BootTime> {
        let dues = self.observers.values().filter_map(|o| o.due(now, own));
        dues.min()
    }

    /// The time of the last renewal of each node that this one saw.
    pub(crate) fn seen(&self) -> BTreeMap<NodeId, BootTime> {
        let seen = self.seen.iter();
        seen.map(|(node, (_, at))| (*node, *at)).collect()
    }
}
