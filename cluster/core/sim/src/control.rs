//! A model of the control of a replicated volume on its holder: the steps that `bdev/replica` does
//! there, without I/O. A state machine. An opening has four steps:
//!
//! - Swap: changes the volume's record in the store, to the next epoch.
//! - Gates: acquires the *gate* of each replica. A gate accepts the I/O of one holder, by a key of
//!   epoch and holder; a later key excludes earlier ones.
//! - Serve: changes the record again: replicas without a gate are out of sync.
//! - Merge: makes the in-sync replicas equal, because writes of the former holder may have reached
//!   only some of them.
//!
//! While the volume is open, the control changes the states of replicas in the record. A close ends
//! when no command is in flight.
//!
//! ```text
//!   Closed ─ open ▶ Swap ─ epoch + 1 ▶ Gates ▶ Serve ─ commit ▶ Merge ▶ Open ─ drained ▶ Closed
//!                     └── another holder ──┴─ no replica ─▶ Failed, reported as not opened
//! ```
//!
//! The control gets the record when it opens the volume, and then sees it only in the answers to
//! its own changes.

use std::collections::BTreeMap;
use std::time::Duration;

use arrayvec::ArrayVec;
use nacre_cluster_core::confirmation::ReplicaIds;
use nacre_cluster_core::gate::Key;
use nacre_cluster_core::ids::MAX_REPLICAS;
use nacre_cluster_core::mutation::Mutation;
use nacre_cluster_core::{
    BootTime, Holder, Incarnation, NodeId, Record, Replica, ReplicaId, ReplicaState, Revision,
    Transaction,
};

use crate::names::VOLUME;
use crate::ungated::Ungated;

/// How long an opening waits for the gates of in-sync replicas whose nodes have a lease. An opening
/// that has no gate after this time fails.
const GATE_PATIENCE: Duration = Duration::from_secs(2);

/// The node's view of the cluster, at the time of a call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ControlView<'a> {
    pub now: BootTime,
    /// The nodes with a lease, and their incarnations.
    pub standing: &'a BTreeMap<NodeId, Incarnation>,
    /// The replicas that this node can reach.
    pub reached: &'a [ReplicaId],
}

/// The next action of the node. Answers have the number of the action.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ControlAct {
    /// Send the transaction to the store.
    Commit {
        number: u64,
        transaction: Transaction,
    },
    /// Ask the replica's gate to accept this key.
    Acquire { replica: ReplicaId, key: Key },
    /// Make the in-sync replicas equal, then call [`Control::merged`].
    Merge { number: u64 },
    /// The close with this number has ended.
    Drained { number: u64 },
    /// Drop all commands: the opening with this number failed or has ended, and so has a close.
    Ended { opening: u64, close: Option<u64> },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ControlStep {
    Closed,
    /// The change of the record to the next epoch is in flight.
    Swap,
    /// The replicas' gates are being acquired.
    Gates {
        from: BootTime,
    },
    /// The change that puts replicas without a gate out of sync, and marks the epoch as served, is
    /// in flight.
    Serve,
    Merge {
        /// The number of the merge; `None` before it starts.
        number: Option<u64>,
    },
    Open,
    /// Another node is the holder or has a later key, or this node acquired no gate in time.
    Failed,
}

#[derive(Debug)]
struct PendingChange {
    number: u64,
    transaction: Transaction,
    record: Record,
    send: bool,
}

/// A close that has not ended.
#[derive(Debug, Clone, Copy)]
struct Close {
    number: u64,
    are_lanes_idle: bool,
}

#[derive(Debug)]
/// The control of the volume on one node.
pub(crate) struct Control {
    step: ControlStep,
    /// The number of the opening.
    opening: u64,
    /// This node in its incarnation.
    own: Option<Holder>,
    record: Option<(Revision, Record)>,
    pending: Option<PendingChange>,
    last_number: u64,
    /// Replicas whose gates have this holder's key.
    granted: ArrayVec<ReplicaId, MAX_REPLICAS>,
    /// Replicas whose gates were asked, and did not fail.
    asked: ArrayVec<ReplicaId, MAX_REPLICAS>,
    ungated: Ungated,
    /// Changes of replicas' states that are not sent yet.
    wanted: ArrayVec<(ReplicaId, ReplicaState), MAX_REPLICAS>,
    close: Option<Close>,
    /// The next opening, after the close.
    next: Option<u64>,
}

impl Control {
    /// A closed control. Its changes get numbers above `last_number`, so that numbers are unique
    /// from the start of a node to its end.
    pub(crate) fn new(last_number: u64) -> Self {
        Self {
            step: ControlStep::Closed,
            opening: 0,
            own: None,
            record: None,
            pending: None,
            last_number,
            granted: ArrayVec::new(),
            asked: ArrayVec::new(),
            ungated: Ungated::default(),
            wanted: ArrayVec::new(),
            close: None,
            next: None,
        }
    }

    /// Closes immediately, without a change of the record. The store may still execute a change in
    /// flight.
    pub(crate) fn drop_all(&mut self) {
        *self = Self::new(self.last_number);
    }

    /// Opens the volume, with the record that the node has seen last. If an earlier close has not
    /// ended, the opening begins after it.
    pub(crate) fn open(&mut self, number: u64, own: Holder, seen: (Revision, Record)) {
        if self.close.is_some() {
            self.next = Some(number);
            return;
        }
        *self = Self::new(self.last_number);
        self.opening = number;
        self.own = Some(own);
        self.record = Some(seen);
        self.step = ControlStep::Swap;
    }

    pub(crate) fn close(&mut self, number: u64) {
        let are_lanes_idle = false;
        self.close = Some(Close {
            number,
            are_lanes_idle,
        });
    }

    /// The number of the close that has not ended.
    pub(crate) fn closing(&self) -> Option<u64> {
        self.close.map(|close| close.number)
    }

    /// The data path reports that no command is in flight, for the close with this number.
    pub(crate) fn lanes_are_idle(&mut self, number: u64) {
        if let Some(close) = self.close.as_mut().filter(|close| close.number == number) {
            close.are_lanes_idle = true;
        }
    }

    pub(crate) fn is_open(&self) -> bool {
        self.step == ControlStep::Open
    }

    pub(crate) fn record(&self) -> Option<&Record> {
        self.record.as_ref().map(|(_, record)| record)
    }

    /// The key of this holder at the replicas' gates.
    pub(crate) fn key(&self) -> Option<Key> {
        let record = self.record()?;
        let holder = record.holder.filter(|holder| Some(*holder) == self.own)?;
        if matches!(self.step, ControlStep::Closed | ControlStep::Swap) {
            return None;
        }
        let epoch = record.epoch;
        Some(Key { epoch, holder })
    }

    pub(crate) fn has_gate(&self, replica: ReplicaId) -> bool {
        self.granted.contains(&replica)
    }

    /// The replicas that may be in sync in the store: those of the record, of a change whose answer
    /// is missing, and of a promotion that waits to be sent. Each write waits for all of them, and
    /// all of them must confirm the holder. `None` once the control has failed: no response may
    /// leave, although the data path may continue until it is dropped.
    pub(crate) fn may_be_in_sync(&self) -> Option<ReplicaIds> {
        let is_over = matches!(self.step, ControlStep::Closed | ControlStep::Failed);
        if is_over && !Mutation::FencedForgets.is_active() {
            return None;
        }
        let mut found = ReplicaIds::new();
        let by_record = Mutation::ConfirmedByRecord.is_active();
        let pending = self.pending.as_ref().map(|pending| &pending.record);
        let pending = pending.filter(|_| !by_record);
        let is_wanted = |replica: &&Replica| {
            !by_record && self.wanted.contains(&(replica.id, ReplicaState::InSync))
        };
        let replicas = self
            .record()
            .into_iter()
            .flat_map(|record| &record.replicas);
        let promoted = replicas.filter(is_wanted);
        let records = self.record().into_iter().chain(pending);
        for replica in records.flat_map(Record::in_sync).chain(promoted) {
            if !found.contains(&replica.id) {
                found.push(replica.id);
            }
        }
        Some(found)
    }

    /// The store executed the change.
    pub(crate) fn committed(&mut self, number: u64, revision: Revision, now: BootTime) {
        let Some(pending) = self.pending.take_if(|p| p.number == number) else {
            return;
        };
        self.record = Some((revision, pending.record));
        match self.step {
            ControlStep::Swap => self.step = ControlStep::Gates { from: now },
            ControlStep::Serve => self.step = ControlStep::Merge { number: None },
            _ => {}
        }
    }

    /// The store refused the change, and returned the record. If that is the record of the change,
    /// an earlier copy of the same transaction was executed.
    pub(crate) fn refused(
        &mut self,
        number: u64,
        revision: Revision,
        record: Record,
        now: BootTime,
    ) {
        let Some(pending) = self.pending.as_ref().filter(|p| p.number == number) else {
            return;
        };
        if pending.record == record {
            return self.committed(number, revision, now);
        }
        self.pending = None;
        // Before the epoch is this control's own, the node may have seen an old record.
        if self.step == ControlStep::Swap && record.holder == self.own {
            self.record = Some((revision, record));
        } else {
            self.failed();
        }
    }

    /// The outcome is unknown: the change is sent again.
    pub(crate) fn unanswered(&mut self, number: u64) {
        if let Some(pending) = self.pending.as_mut().filter(|p| p.number == number) {
            pending.send = true;
        }
    }

    /// The replica's gate was granted to this holder's key.
    pub(crate) fn granted(&mut self, replica: ReplicaId, key: Key) {
        let is_known = self.granted.contains(&replica);
        if self.key() == Some(key) && !is_known && !self.granted.is_full() {
            self.granted.push(replica);
        }
    }

    /// The replica's gate has a later key than `key`.
    pub(crate) fn gate_refused(&mut self, key: Key) {
        if self.key() == Some(key) {
            self.failed();
        }
    }

    /// The replica's gate did not answer, or the connection to it ended: it is asked again. The
    /// replica may lack writes from now on, so a promotion that was not sent yet is forgotten.
    pub(crate) fn lost_gate(&mut self, replica: ReplicaId) {
        self.granted.retain(|other| *other != replica);
        self.asked.retain(|other| *other != replica);
        let promotion = (replica, ReplicaState::InSync);
        self.wanted.retain(|wanted| *wanted != promotion);
        if let ControlStep::Merge { .. } = self.step {
            self.step = ControlStep::Serve;
        }
    }

    fn failed(&mut self) {
        self.pending = None;
        self.step = ControlStep::Failed;
    }

    /// The merge with this number made the replicas equal. Returns true if the volume is open now:
    /// the merge was the current one, and every in-sync replica's gate has this holder's key.
    pub(crate) fn merged(&mut self, number: u64) -> bool {
        let is_due = self.step
            == ControlStep::Merge {
                number: Some(number),
            }
            && self.has_all_gates();
        if is_due {
            self.step = ControlStep::Open;
        }
        is_due
    }

    /// The number of the opening.
    pub(crate) fn opening(&self) -> u64 {
        self.opening
    }

    /// True if the gate of every in-sync replica has this holder's key.
    fn has_all_gates(&self) -> bool {
        let mut in_sync = self.record().into_iter().flat_map(Record::in_sync);
        in_sync.all(|replica| self.has_gate(replica.id))
    }

    /// Puts a replica that does not answer, or answers with errors, out of sync in the record. It
    /// does so while the volume is open, unless the replica is the last one in sync. A write is
    /// acknowledged without it only when [`Control::may_be_in_sync`] no longer has it.
    pub(crate) fn put_out(&mut self, replica: ReplicaId) {
        self.lost_gate(replica);
        if self.step == ControlStep::Open {
            self.want(replica, ReplicaState::Out);
        }
    }

    /// Puts a replica in sync in the record: a resync has copied all data to it, and it gets every
    /// write.
    pub(crate) fn promote(&mut self, replica: ReplicaId) {
        if self.step == ControlStep::Open && self.close.is_none() && self.has_gate(replica) {
            self.want(replica, ReplicaState::InSync);
        }
    }

    /// True while a change of the replica waits to be sent, or any change of the record is in
    /// flight.
    pub(crate) fn is_changing(&self, replica: ReplicaId) -> bool {
        self.wanted.iter().any(|(of, _)| *of == replica) || self.pending.is_some()
    }

    fn want(&mut self, replica: ReplicaId, state: ReplicaState) {
        self.wanted.retain(|(of, _)| *of != replica);
        if !self.wanted.is_full() {
            self.wanted.push((replica, state));
        }
    }

    /// The next action; call it until it returns `None`.
    pub(crate) fn poll(&mut self, view: &ControlView) -> Option<ControlAct> {
        if let Some(pending) = &mut self.pending {
            let (number, transaction) = (pending.number, pending.transaction.clone());
            let act = ControlAct::Commit {
                number,
                transaction,
            };
            return std::mem::take(&mut pending.send).then_some(act);
        }
        match self.step {
            ControlStep::Closed => None,
            ControlStep::Swap => self.swap(),
            ControlStep::Gates { from } => self.poll_gates(view, from),
            ControlStep::Serve => self.serve(view),
            ControlStep::Merge { .. } if !self.has_all_gates() => self.serve(view),
            ControlStep::Merge { number: Some(_) } => None,
            ControlStep::Merge { number: None } => {
                self.last_number += 1;
                let number = self.last_number;
                self.step = ControlStep::Merge {
                    number: Some(number),
                };
                Some(ControlAct::Merge { number })
            }
            ControlStep::Open => self.poll_open(view),
            ControlStep::Failed => {
                let opening = self.next.unwrap_or(self.opening);
                let close = self.closing();
                self.drop_all();
                Some(ControlAct::Ended { opening, close })
            }
        }
    }

    /// Changes the record to the next epoch. After that, the store refuses changes of earlier
    /// openings.
    fn swap(&mut self) -> Option<ControlAct> {
        let mut record = self.record()?.clone();
        if record.holder != self.own {
            self.failed();
            return None;
        }
        record.epoch += 1;
        self.submit(record)
    }

    fn submit(&mut self, record: Record) -> Option<ControlAct> {
        let (me, revision) = (self.own?, self.record.as_ref()?.0);
        let transaction = Transaction::commit(me, VOLUME, revision, record.clone());
        self.last_number += 1;
        let number = self.last_number;
        self.pending = Some(PendingChange {
            number,
            transaction: transaction.clone(),
            record,
            send: false,
        });
        Some(ControlAct::Commit {
            number,
            transaction,
        })
    }

    fn poll_gates(&mut self, view: &ControlView, from: BootTime) -> Option<ControlAct> {
        let record = self.record()?;
        let missing: ArrayVec<_, MAX_REPLICAS> = record
            .in_sync()
            .filter(|replica| !self.granted.contains(&replica.id))
            .map(|replica| (replica.id, view.standing.contains_key(&replica.node)))
            .collect();
        if let Some(act) = self.acquire(view, missing.iter().map(|(id, _)| *id)) {
            return Some(act);
        }
        let is_over = view.now.since(from) >= GATE_PATIENCE;
        let is_awaited = missing.iter().any(|(_, lives)| *lives);
        if !missing.is_empty() && is_awaited && !is_over {
            return None;
        }
        if self.granted.is_empty() {
            // Another node may reach a replica that this one does not.
            if is_over {
                self.failed();
            }
            return None;
        }
        self.step = ControlStep::Serve;
        self.serve(view)
    }

    /// Asks for the first gate that was not asked for yet.
    fn acquire(
        &mut self,
        view: &ControlView,
        mut replicas: impl Iterator<Item = ReplicaId>,
    ) -> Option<ControlAct> {
        let key = self.key()?;
        let replica = replicas.find(|id| view.reached.contains(id) && !self.asked.contains(id))?;
        self.asked.try_push(replica).ok()?;
        Some(ControlAct::Acquire { replica, key })
    }

    fn serve(&mut self, view: &ControlView) -> Option<ControlAct> {
        self.step = ControlStep::Serve;
        let mut record = self.record()?.clone();
        let has_source = record.in_sync().any(|m| self.granted.contains(&m.id));
        if !has_source {
            self.step = ControlStep::Gates { from: view.now };
            return None;
        }
        for replica in &mut record.replicas {
            if !self.granted.contains(&replica.id) {
                replica.state = ReplicaState::Out;
            }
        }
        record.serving = record.epoch;
        if Some(&record) == self.record() {
            self.step = ControlStep::Merge { number: None };
            return None;
        }
        self.submit(record)
    }

    fn poll_open(&mut self, view: &ControlView) -> Option<ControlAct> {
        let mut record = self.record()?.clone();
        let late = self
            .ungated
            .late(&record, &self.granted, view.now, view.standing);
        for replica in late {
            self.want(replica, ReplicaState::Out);
        }
        // The last in-sync replica stays: without it no data is left to serve.
        for (id, state) in std::mem::take(&mut self.wanted) {
            let is_last = record.in_sync().all(|replica| replica.id == id);
            if state == ReplicaState::InSync || !is_last {
                record.set(id, state);
            }
        }
        if Some(&record) != self.record() {
            return self.submit(record);
        }
        if let Some(close) = self.close.filter(|close| close.are_lanes_idle) {
            let (next, own, known) = (self.next.take(), self.own, self.record.take());
            self.drop_all();
            if let (Some(next), Some(own), Some(known)) = (next, own, known) {
                self.open(next, own, known);
            }
            let number = close.number;
            return Some(ControlAct::Drained { number });
        }
        let all: ArrayVec<_, MAX_REPLICAS> = record.replicas.iter().map(|m| m.id).collect();
        let missing = all.into_iter().filter(|id| !self.granted.contains(id));
        let missing: ArrayVec<_, MAX_REPLICAS> = missing.collect();
        self.acquire(view, missing.into_iter())
    }
}
