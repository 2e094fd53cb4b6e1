//! All volumes of a cluster, on one node. Each has a state machine
//! ([`nacre_cluster_core::Volume`]), which decides whether this node serves it. This module passes
//! events and the time to these machines, and executes their intents. The module returns changes of
//! records to the caller, and passes all else to the engine through [`Serving`].

mod balance;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use nacre_cluster_core::volume::{HoldingState, Intent, View};
use nacre_cluster_core::{
    BootTime, Lease, NodeId, Record, Revision, Transaction, Volume, VolumeId, ranks,
};
use serde_json::Value;

use self::balance::Balance;
use crate::events::{Decision, Events};
use crate::nodes::Nodes;
use crate::publication::Publication;
use crate::record::{decode, encode, read_at_opening};
use crate::serving::{Answer, Report, Serving, VolumeRole};

/// Most handovers in progress when a node is drained or ends.
const LEAVING: usize = 8;
/// Time from a failed handover of a volume to the next attempt.
const BACKOFF: Duration = Duration::from_secs(10);
/// Most intents of one machine per call, in case a defect makes it return intents without end.
const INTENTS: usize = 64;

/// A change of a volume's record to send to the store, with the value that it writes.
pub(crate) struct Commit {
    pub(crate) volume: VolumeId,
    pub(crate) number: u64,
    pub(crate) transaction: Transaction,
    pub(crate) value: Value,
}

struct NodeVolume {
    machine: Volume,
    /// The stored value, with its revision.
    stored: (Revision, Arc<Value>),
    role: Option<VolumeRole>,
    /// The state that was reported last.
    noted: HoldingState,
    /// The start of the take, and the former holder.
    taking: Option<(BootTime, Option<NodeId>)>,
    leaving_to: Option<NodeId>,
    no_handover_before: BootTime,
    is_without_holder: bool,
    /// The last attempt to open it failed.
    does_not_open: bool,
    /// The nodes of the replicas that a restored volume lacks.
    missing: Vec<NodeId>,
}

pub(crate) struct Volumes {
    me: NodeId,
    places: BTreeMap<VolumeId, NodeVolume>,
    /// The volumes with events since the last poll.
    awake: BTreeSet<VolumeId>,
    /// The volumes whose machines depend on the time: this node is not a standby, or no live node
    /// holds the volume and this node may take it.
    busy: BTreeSet<VolumeId>,
    /// A state has changed since the last call of [`Volumes::new_states`].
    has_new_states: bool,
    /// The nodes that show a volume, by its publication.
    published: BTreeMap<VolumeId, Vec<NodeId>>,
    serving: Box<dyn Serving>,
    /// The node is ending: it takes no more volumes.
    pub(crate) is_leaving: bool,
    /// `None`: its volumes move only when an operator asks, or in a drain.
    balance: Option<Balance>,
}

impl Volumes {
    pub(crate) fn new(me: NodeId, serving: Box<dyn Serving>) -> Self {
        Self {
            me,
            places: BTreeMap::new(),
            awake: BTreeSet::new(),
            busy: BTreeSet::new(),
            has_new_states: false,
            published: BTreeMap::new(),
            serving,
            is_leaving: false,
            balance: None,
        }
    }

    /// If `is_balanced`, volumes move from the node that holds the most.
    pub(crate) fn with_balance(mut self, is_balanced: bool) -> Self {
        self.balance = is_balanced.then(Balance::default);
        self
    }

    /// Passes a record from the store to the volume's machine. Fails if the record cannot be
    /// parsed.
    pub(crate) fn update(
        &mut self,
        id: VolumeId,
        revision: Revision,
        bytes: &[u8],
    ) -> Result<(), String> {
        let (value, record) = decode(bytes).map_err(|why| why.to_string())?;
        self.apply_record(id, revision, value, record);
        Ok(())
    }

    fn apply_record(&mut self, id: VolumeId, revision: Revision, value: Value, record: Record) {
        let me = self.me;
        self.has_new_states |= !self.places.contains_key(&id);
        let place = self.places.entry(id).or_insert_with(|| NodeVolume {
            machine: Volume::new(id, me),
            stored: (Revision(0), Arc::default()),
            role: None,
            noted: HoldingState::Standby,
            taking: None,
            leaving_to: None,
            no_handover_before: BootTime::default(),
            is_without_holder: false,
            does_not_open: false,
            missing: Vec::new(),
        });
        self.awake.insert(id);
        if place.stored.0 < revision {
            place.stored = (revision, Arc::new(value));
        }
        place.machine.update(revision, record);
    }

    /// The record was deleted, or was absent at `revision`.
    pub(crate) fn deleted(&mut self, id: VolumeId, revision: Revision) {
        let known = self.places.get(&id).map(|place| place.stored.0);
        if known.is_some_and(|known| known <= revision) {
            self.places.remove(&id);
            self.awake.remove(&id);
            self.busy.remove(&id);
            self.has_new_states = true;
            self.serving.drop_all(id);
            self.serving.forget(id);
        }
    }

    pub(crate) fn ids(&self) -> Vec<VolumeId> {
        self.places.keys().copied().collect()
    }

    /// Sets the volume's publication: the nodes that show it. `None`: it is not published.
    pub(crate) fn publish(&mut self, id: VolumeId, publication: Option<&Publication>) {
        match publication {
            Some(publication) => self.published.insert(id, publication.nodes()),
            None => self.published.remove(&id),
        };
        self.serving.publish(id, publication);
        self.wake(id);
    }

    pub(crate) fn published(&self) -> Vec<VolumeId> {
        self.published.keys().copied().collect()
    }

    /// Reports new volumes to the engine.
    pub(crate) fn show_new(&mut self, now: BootTime) {
        for (id, place) in &mut self.places {
            if place.role.is_none() {
                show(*id, place, now, self.serving.as_mut());
            }
        }
    }

    pub(crate) fn serving(&mut self) -> &mut dyn Serving {
        self.serving.as_mut()
    }

    /// Has the next poll include this volume.
    pub(crate) fn wake(&mut self, id: VolumeId) {
        if self.places.contains_key(&id) {
            self.awake.insert(id);
        }
    }

    pub(crate) fn wake_all(&mut self) {
        self.awake = self.places.keys().copied().collect();
    }

    /// The store executed the change.
    pub(crate) fn committed(&mut self, id: VolumeId, number: u64, at: Revision, value: Value) {
        if let Some(place) = self.places.get_mut(&id) {
            self.awake.insert(id);
            if place.stored.0 < at {
                place.stored = (at, Arc::new(value));
            }
            place.machine.committed(number, at);
        }
    }

    /// The store refused the change: a condition did not hold. `bytes` is the present record.
    pub(crate) fn refused(
        &mut self,
        id: VolumeId,
        number: u64,
        revision: Revision,
        bytes: &[u8],
    ) -> Result<(), String> {
        let (value, record) = decode(bytes).map_err(|why| why.to_string())?;
        self.apply_record(id, revision, value, record.clone());
        if let Some(place) = self.places.get_mut(&id) {
            place.machine.refused(number, revision, record);
        }
        Ok(())
    }

    /// The store did not answer: the outcome of the change is unknown.
    pub(crate) fn unanswered(&mut self, id: VolumeId, number: u64) {
        if let Some(place) = self.places.get_mut(&id) {
            self.awake.insert(id);
            place.machine.unanswered(number);
        }
    }

    /// Passes a report of the engine to the volume's machine.
    pub(crate) fn report(&mut self, report: Report) {
        let Some(place) = self.places.get_mut(&report.volume) else {
            return;
        };
        let machine = &mut place.machine;
        match report.answer {
            Answer::Opened { number } => machine.opened(number),
            Answer::NotOpened { number } => machine.not_opened(number),
            Answer::Drained { number } => machine.drained(number),
        }
        self.awake.insert(report.volume);
    }

    /// The node's incarnation has ended: stops serving all volumes, without any change of records.
    pub(crate) fn restart(&mut self, events: &Events) {
        self.has_new_states = true;
        for (id, place) in &mut self.places {
            let state = place.machine.state();
            if state != HoldingState::Standby {
                self.serving.drop_all(*id);
            }
            if !matches!(state, HoldingState::Standby | HoldingState::Fenced) {
                let epoch = place.machine.record().map_or(0, |record| record.epoch);
                events.note(Decision::VolumeFenced { volume: *id, epoch });
            }
            place.machine.restart();
            place.taking = None;
            place.leaving_to = None;
            place.noted = HoldingState::Standby;
            self.awake.insert(*id);
            show(*id, place, BootTime::default(), self.serving.as_mut());
        }
    }

    /// The store was replaced: accepts records of any revision from now on. Call
    /// [`Volumes::restart`] first. The engine keeps showing the volumes until the lists of the new
    /// store have arrived.
    pub(crate) fn begin_anew(&mut self) {
        for (id, place) in &mut self.places {
            place.machine = Volume::new(*id, self.me);
            place.stored.0 = Revision(0);
            place.noted = HoldingState::Standby;
        }
        self.busy.clear();
        self.has_new_states = true;
    }

    /// True if a poll has followed the last event.
    #[cfg(test)]
    pub(crate) fn are_polled(&self) -> bool {
        self.awake.is_empty()
    }

    /// Polls the machines with new events and, if `is_turn`, those that depend on the time. Returns
    /// the changes to send to the store.
    pub(crate) fn poll(
        &mut self,
        now: BootTime,
        lease: &Lease,
        nodes: &Nodes,
        events: &Events,
        is_turn: bool,
    ) -> Vec<Commit> {
        let mut commits = Vec::new();
        if is_turn {
            self.awake.extend(&self.busy);
        }
        for id in std::mem::take(&mut self.awake) {
            let Some(place) = self.places.get_mut(&id) else {
                continue;
            };
            if self.is_leaving && place.machine.state() == HoldingState::Standby {
                continue;
            }
            if place.role.is_none() {
                // The engine learns the replicas here. Before, it cannot say which it reaches.
                show(id, place, now, self.serving.as_mut());
            }
            // The rank of a node without a lease would only delay the others.
            let shown = self.published.get(&id).map_or(&[][..], Vec::as_slice);
            let candidates: Vec<NodeId> = shown
                .iter()
                .filter(|node| nodes.standing.contains_key(node))
                .copied()
                .collect();
            let mut reached = self.serving.reached(id);
            let awaited = read_at_opening(&place.stored.1).into_iter();
            let missing = awaited.filter(|(replica, _)| !reached.contains(replica));
            place.missing = missing.map(|(_, node)| node).collect();
            if !place.missing.is_empty() {
                // Its opening would be refused, and each attempt takes an epoch.
                reached.clear();
            }
            let view = View {
                now,
                lease,
                standing: &nodes.standing,
                reached: &reached,
                candidates: &candidates,
                cordoned: &nodes.avoided,
            };
            for _ in 0..INTENTS {
                let Some(intent) = place.machine.poll(&view) else {
                    break;
                };
                let commit = perform(id, place, intent, now, self.serving.as_mut(), events);
                commits.extend(commit);
            }
            self.has_new_states |= place.noted != place.machine.state();
            let holder = place.machine.record().and_then(|record| record.holder);
            let is_held = holder.is_some_and(|holder| {
                nodes.standing.get(&holder.node) == Some(&holder.incarnation)
            });
            if is_held {
                place.is_without_holder = false;
            }
            note(id, place, now, events);
            show(id, place, now, self.serving.as_mut());
            // A standby sleeps while the holder's lease stands, and while others are to take it.
            let is_standby = place.machine.state() == HoldingState::Standby;
            if !is_standby || (!is_held && shown.contains(&self.me)) {
                self.busy.insert(id);
            } else {
                self.busy.remove(&id);
            }
        }
        commits
    }

    /// Begins to hand the volume over to node `to`. Returns false if that is not possible now.
    pub(crate) fn handover(&mut self, id: VolumeId, to: NodeId, now: BootTime) -> bool {
        let Some(place) = self.places.get_mut(&id) else {
            return false;
        };
        if now < place.no_handover_before || !place.machine.handover(to, now) {
            return false;
        }
        place.leaving_to = Some(to);
        self.awake.insert(id);
        true
    }

    /// Begins handovers of this node's volumes, because it is drained or ends: at most [`LEAVING`]
    /// at a time, and only of volumes that another node can take.
    pub(crate) fn drain(&mut self, now: BootTime, nodes: &Nodes) {
        let leaving = self.in_state(HoldingState::Leaving).len();
        let held = self.in_state(HoldingState::Holding);
        let mut free = LEAVING.saturating_sub(leaving);
        for id in held {
            if free == 0 {
                return;
            }
            if let Some(to) = self.successor(id, nodes)
                && self.handover(id, to, now)
            {
                free -= 1;
            }
        }
    }

    /// The next node to take the volume, among live nodes without a cordon or drain.
    pub(crate) fn successor(&self, id: VolumeId, nodes: &Nodes) -> Option<NodeId> {
        self.successors(id, nodes)?.first().copied()
    }

    /// All nodes that may take it from this one, in their order.
    fn successors(&self, id: VolumeId, nodes: &Nodes) -> Option<Vec<NodeId>> {
        let record = self.places.get(&id)?.machine.record()?;
        let mut order = self.published.get(&id)?.clone();
        order.retain(|node| {
            let lives = nodes.standing.contains_key(node);
            *node != self.me && lives && !nodes.is_avoided(*node)
        });
        ranks::order(id, record, &mut order, &[]);
        Some(order)
    }

    /// True if the volume's publication names the node.
    pub(crate) fn is_shown_by(&self, id: VolumeId, node: NodeId) -> bool {
        let nodes = self.published.get(&id);
        nodes.is_some_and(|nodes| nodes.contains(&node))
    }

    pub(crate) fn state(&self, id: VolumeId) -> Option<HoldingState> {
        self.places.get(&id).map(|place| place.machine.state())
    }

    #[cfg(test)]
    pub(crate) fn record_epoch(&self, id: VolumeId) -> Option<u64> {
        self.places
            .get(&id)?
            .machine
            .record()
            .map(|record| record.epoch)
    }

    pub(crate) fn holder(&self, id: VolumeId) -> Option<NodeId> {
        let record = self.places.get(&id)?.machine.record()?;
        record.holder.map(|holder| holder.node)
    }

    /// The volumes in this state, which is not [`HoldingState::Standby`].
    pub(crate) fn in_state(&self, state: HoldingState) -> Vec<VolumeId> {
        let busy = self.busy.iter().copied();
        busy.filter(|id| self.state(*id) == Some(state)).collect()
    }

    /// The states of all volumes, if one may have changed since the last call.
    pub(crate) fn new_states(&mut self) -> Option<Vec<(VolumeId, HoldingState)>> {
        if !std::mem::take(&mut self.has_new_states) {
            return None;
        }
        let places = self.places.iter();
        let states = places.map(|(id, place)| (*id, place.machine.state()));
        Some(states.collect())
    }

    /// Stops serving all volumes immediately.
    pub(crate) fn end(&mut self) {
        for (id, place) in &self.places {
            if place.machine.state() != HoldingState::Standby {
                self.serving.drop_all(*id);
            }
        }
    }
}

fn perform(
    id: VolumeId,
    place: &mut NodeVolume,
    intent: Intent,
    now: BootTime,
    serving: &mut dyn Serving,
    events: &Events,
) -> Option<Commit> {
    match intent {
        Intent::Commit {
            number,
            transaction,
        } => {
            let nacre_cluster_core::Effect::Commit { record, .. } = &transaction.effect else {
                return None;
            };
            let value = encode(&place.stored.1, record);
            return Some(Commit {
                volume: id,
                number,
                transaction,
                value,
            });
        }
        Intent::Take { number } => {
            // The engine learns of the claim here.
            show(id, place, now, serving);
            serving.take(id, number);
        }
        Intent::Close { number } => serving.close(id, number),
        Intent::Abort => serving.abort(id),
        Intent::Drop => {
            serving.drop_all(id);
            let epoch = place.machine.record().map_or(0, |record| record.epoch);
            events.note(Decision::VolumeFenced { volume: id, epoch });
        }
        Intent::NoHolder => {
            if !place.is_without_holder {
                let missing = place.missing.clone();
                let volume = id;
                events.note(Decision::VolumeWithoutHolder { volume, missing });
            }
            place.is_without_holder = true;
        }
    }
    None
}

/// Notes a change of state.
fn note(id: VolumeId, place: &mut NodeVolume, now: BootTime, events: &Events) {
    let state = place.machine.state();
    let before = std::mem::replace(&mut place.noted, state);
    let epoch = place.machine.record().map_or(0, |record| record.epoch);
    if state == HoldingState::Holding {
        place.does_not_open = false;
    }
    match (before, state) {
        (HoldingState::Standby, HoldingState::Taking) => {
            // The former holder is in the record that the take replaces.
            let former = place.stored.1["holder"].as_str();
            let former = former.and_then(|id| id.parse().ok()).map(NodeId);
            place.taking = Some((now, former));
        }
        // The close took too long.
        (HoldingState::Leaving, HoldingState::Taking) => place.leaving_to = None,
        (before, HoldingState::Holding) if before != HoldingState::Holding => {
            match place.taking.take() {
                Some((began, from)) => events.note(Decision::VolumeTaken {
                    volume: id,
                    epoch,
                    from,
                    took: now.since(began),
                }),
                None => {
                    place.leaving_to = None;
                    place.no_handover_before = now + BACKOFF;
                    events.note(Decision::VolumeKept { volume: id });
                }
            }
        }
        // A failed opening, or a volume that closed by itself, is no handover.
        (_, HoldingState::Leaving) if place.leaving_to.is_none() => {
            if !place.does_not_open {
                events.note(Decision::VolumeNotOpened { volume: id, epoch });
            }
            place.does_not_open = true;
            place.taking = None;
        }
        (HoldingState::Leaving, HoldingState::Standby) => {
            let to = place.leaving_to.take();
            if to.is_some() {
                events.note(Decision::VolumeHandedOver {
                    volume: id,
                    epoch,
                    to,
                });
            }
        }
        (_, HoldingState::Standby | HoldingState::Fenced) => place.taking = None,
        _ => {}
    }
}

/// Reports a change of the node's role for a volume to the engine.
fn show(id: VolumeId, place: &mut NodeVolume, now: BootTime, serving: &mut dyn Serving) {
    let Some(record) = place.machine.record() else {
        return;
    };
    let role = VolumeRole {
        state: place.machine.state(),
        ana: place.machine.ana(now),
        holder: record.holder,
        record: record.clone(),
        value: Arc::clone(&place.stored.1),
    };
    if place.role.as_ref() != Some(&role) {
        serving.show(id, &role);
        place.role = Some(role);
    }
}
