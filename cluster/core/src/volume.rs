//! The states of one volume on one node.
//!
//! ```text
//!             turn of this node            gates, commit, merge
//!   Standby ─────────────────────▶ Taking ─────────────────────▶ Holding ◀─┐ 5 s
//!      ▲  ▲                          │ no member, or conflict      │  └─▶ Leaving
//!      │  └──────────────────────────┘                             │        │ released
//!      │                Fenced ◀── incarnation or epoch is gone ───┤        │
//!      └── new lease ──────┘                                       ▼        │
//!      ▲────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! The machine writes the record through one transaction at a time. An unanswered one is sent again
//! until its outcome is known: it compares a revision, so it is made once.

use std::collections::BTreeMap;
use std::time::Duration;

use arrayvec::ArrayVec;

use crate::assent::Members;
use crate::gate::Key;
use crate::ids::{Incarnation, MAX_MEMBERS, MemberId, NodeId, Revision, VolumeId};
use crate::lease::Lease;
use crate::mutation::Mutation;
use crate::ranks;
use crate::record::{Holder, Member, MemberState, Record};
use crate::time::BootTime;
use crate::transaction::Transaction;
use crate::ungated::Ungated;

pub use crate::intent::{Ana, Intent, State};

/// How long a taking node waits for the gates of members whose nodes live.
const GATE_PATIENCE: Duration = Duration::from_secs(2);
/// Time between two attempts of a node that cannot take.
const RETRY: Duration = Duration::from_secs(1);
/// Time after which a leaving node aborts the I/O in flight.
const ABORT: Duration = Duration::from_secs(2);
/// Time after which a leaving node serves again.
const LEAVE: Duration = Duration::from_secs(5);
/// How long hosts may see the state "change": below ANATT of 10 s.
const CHANGE: Duration = Duration::from_secs(8);

/// The node's view of the cluster, at the time of a call.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    pub now: BootTime,
    pub lease: &'a Lease,
    /// The incarnations that stand, as far as the watch has shown them.
    pub standing: &'a BTreeMap<NodeId, Incarnation>,
    /// The members that this node can reach now.
    pub reached: &'a [MemberId],
    /// The nodes that show the volume.
    pub candidates: &'a [NodeId],
    pub cordoned: &'a [NodeId],
}

impl View<'_> {
    fn stands(&self, holder: Holder) -> bool {
        self.standing.get(&holder.node) == Some(&holder.incarnation)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Standby {
        /// The time at which this node saw that the volume has no holder.
        alone: Option<BootTime>,
        not_before: BootTime,
    },
    /// The transaction of the take is under way.
    Claim {
        since: BootTime,
    },
    /// The members' gates are being acquired.
    Gates {
        since: BootTime,
        from: BootTime,
    },
    /// The members without a granted gate leave the record, and the epoch becomes a served one.
    Serve {
        since: BootTime,
    },
    /// The members are being made equal.
    Merge {
        since: BootTime,
        /// The number of the merge; `None` before it starts.
        number: Option<u64>,
    },
    Holding,
    Leaving {
        since: BootTime,
        drained: bool,
        aborted: bool,
    },
    /// The holder is being removed from the record, by a hand-over or after a take in vain.
    Release,
    Fenced {
        dropped: bool,
    },
}

/// A change of the record that is sent, or about to be sent again.
#[derive(Debug)]
struct Pending {
    number: u64,
    transaction: Transaction,
    record: Record,
    send: bool,
}

impl Pending {
    fn intent(&self) -> Intent {
        Intent::Commit {
            number: self.number,
            transaction: self.transaction.clone(),
        }
    }
}

#[derive(Debug)]
pub struct Volume {
    id: VolumeId,
    me: NodeId,
    record: Option<(Revision, Record)>,
    step: Step,
    pending: Option<Pending>,
    last_number: u64,
    /// Members whose gates have this node's key.
    granted: ArrayVec<MemberId, MAX_MEMBERS>,
    asked: ArrayVec<MemberId, MAX_MEMBERS>,
    ungated: Ungated,
    /// Changes of members that are wanted while holding.
    wanted: ArrayVec<(MemberId, MemberState), MAX_MEMBERS>,
    /// The node that a hand-over goes to.
    successor: Option<NodeId>,
    /// Intents decided by a call.
    decided: ArrayVec<Intent, 4>,
}

impl Volume {
    pub fn new(id: VolumeId, me: NodeId) -> Self {
        Self {
            id,
            me,
            record: None,
            step: Step::Standby {
                alone: None,
                not_before: BootTime::default(),
            },
            pending: None,
            last_number: 0,
            granted: ArrayVec::new(),
            asked: ArrayVec::new(),
            ungated: Ungated::default(),
            wanted: ArrayVec::new(),
            successor: None,
            decided: ArrayVec::new(),
        }
    }

    pub fn state(&self) -> State {
        match self.step {
            Step::Standby { .. } => State::Standby,
            Step::Claim { .. } | Step::Gates { .. } | Step::Serve { .. } | Step::Merge { .. } => {
                State::Taking
            }
            Step::Holding => State::Holding,
            Step::Leaving { .. } | Step::Release => State::Leaving,
            Step::Fenced { .. } => State::Fenced,
        }
    }

    pub fn ana(&self, now: BootTime) -> Ana {
        match self.step {
            Step::Holding => Ana::Optimized,
            Step::Gates { since, .. }
            | Step::Serve { since }
            | Step::Merge { since, .. }
            | Step::Leaving { since, .. }
                if now.since(since) < CHANGE =>
            {
                Ana::Change
            }
            _ => Ana::Inaccessible,
        }
    }

    pub fn record(&self) -> Option<&Record> {
        self.record.as_ref().map(|(_, record)| record)
    }

    /// The key of this node at the members' gates, while it is the holder.
    pub fn key(&self) -> Option<Key> {
        let record = self.record()?;
        let holder = record.holder.filter(|holder| holder.node == self.me)?;
        let epoch = record.epoch;
        Some(Key { epoch, holder })
    }

    pub fn has_gate(&self, member: MemberId) -> bool {
        self.granted.contains(&member)
    }

    /// The members that may be in sync in the store: those of the record, of a change whose answer
    /// is missing, and of a promotion that waits to be sent. Each write waits for all of them, and
    /// assent needs all of them. `None` once the node is fenced: no answer may leave, although its
    /// lanes may go on until they are dropped.
    pub fn may_be_in_sync(&self) -> Option<Members> {
        let is_over = matches!(self.step, Step::Standby { .. } | Step::Fenced { .. });
        if is_over && !Mutation::FencedForgets.is_active() {
            return None;
        }
        let mut found = Members::new();
        let by_record = Mutation::AssentByRecord.is_active();
        let pending = self.pending.as_ref().map(|pending| &pending.record);
        let pending = pending.filter(|_| !by_record);
        let is_wanted = |member: &&Member| {
            !by_record && self.wanted.contains(&(member.id, MemberState::InSync))
        };
        let members = self.record().into_iter().flat_map(|record| &record.members);
        let promoted = members.filter(is_wanted);
        let records = self.record().into_iter().chain(pending);
        for member in records.flat_map(Record::in_sync).chain(promoted) {
            if !found.contains(&member.id) {
                found.push(member.id);
            }
        }
        Some(found)
    }

    /// The record as a watch event or an answer of the store shows it. Old news is ignored.
    pub fn saw(&mut self, revision: Revision, record: Record) {
        if self
            .record
            .as_ref()
            .is_some_and(|(known, _)| *known >= revision)
        {
            return;
        }
        let is_ours = self.pending.as_ref().is_some_and(|p| p.record == record);
        self.record = Some((revision, record));
        if is_ours {
            self.pending = None;
            self.advance();
        } else {
            self.outdated();
        }
    }

    /// The store made the change. The answer may be old: the watch was faster.
    pub fn committed(&mut self, number: u64, revision: Revision) {
        if let Some(pending) = self.pending.as_ref().filter(|p| p.number == number) {
            let record = pending.record.clone();
            self.saw(revision, record);
        }
    }

    /// A condition did not hold; the answer shows the record. A change found as our own was made.
    pub fn refused(&mut self, number: u64, revision: Revision, record: Record) {
        self.saw(revision, record);
        if self.pending.take_if(|p| p.number == number).is_some() {
            self.refused_step();
        }
    }

    /// The outcome is unknown: the change is sent again.
    pub fn unanswered(&mut self, number: u64) {
        if let Some(pending) = self.pending.as_mut().filter(|p| p.number == number) {
            pending.send = true;
        }
    }

    /// The member's gate was granted to this node's key.
    pub fn granted(&mut self, member: MemberId, key: Key) {
        let is_known = self.granted.contains(&member);
        if self.key() == Some(key) && !is_known && !self.granted.is_full() {
            self.granted.push(member);
        }
    }

    /// The member's gate has a later key than `key`.
    pub fn gate_refused(&mut self, key: Key) {
        if self.key() == Some(key) {
            self.fenced();
        }
    }

    /// The member's gate was asked without success, or its session ended: it is asked again. The
    /// member may lack writes from here on, so a promotion that waits to be sent is forgotten.
    pub fn lost_gate(&mut self, member: MemberId) {
        self.granted.retain(|other| *other != member);
        self.asked.retain(|other| *other != member);
        let promotion = (member, MemberState::InSync);
        self.wanted.retain(|wanted| *wanted != promotion);
        if let Step::Merge { since, .. } = self.step {
            self.step = Step::Serve { since };
        }
    }

    /// The node is no longer the holder: its incarnation is gone, or a gate has a later key.
    pub fn fenced(&mut self) {
        if !matches!(self.step, Step::Standby { .. } | Step::Fenced { .. }) {
            self.pending = None;
            self.step = Step::Fenced { dropped: false };
        }
    }

    /// The node has a new incarnation: whatever an earlier one did is over.
    pub fn restart(&mut self) {
        self.pending = None;
        self.stand_by(BootTime::default());
    }

    /// The merge with this number made the members equal.
    pub fn merged(&mut self, number: u64) {
        match self.step {
            Step::Merge { number: of, .. } if of == Some(number) && self.has_all_gates() => {
                self.step = Step::Holding;
                self.decided.push(Intent::Open);
            }
            _ => {}
        }
    }

    /// True if the gate of every in-sync member has this node's key.
    fn has_all_gates(&self) -> bool {
        let mut in_sync = self.record().into_iter().flat_map(Record::in_sync);
        in_sync.all(|member| self.has_gate(member.id))
    }

    /// A member does not answer, or answers with errors: it leaves the record. A write is
    /// acknowledged without it only when [`Volume::may_be_in_sync`] no longer has it.
    pub fn put_out(&mut self, member: MemberId) {
        self.lost_gate(member);
        match self.step {
            Step::Holding | Step::Leaving { .. } => self.want(member, MemberState::Out),
            _ => {}
        }
    }

    /// The member has everything, and gets every write: it becomes in sync.
    pub fn promote(&mut self, member: MemberId) {
        if self.step == Step::Holding && self.has_gate(member) {
            self.want(member, MemberState::InSync);
        }
    }

    /// True while a change of the member is wanted or under way.
    pub fn is_changing(&self, member: MemberId) -> bool {
        self.wanted.iter().any(|(of, _)| *of == member) || self.pending.is_some()
    }

    fn want(&mut self, member: MemberId, state: MemberState) {
        self.wanted.retain(|(of, _)| *of != member);
        if !self.wanted.is_full() {
            self.wanted.push((member, state));
        }
    }

    /// Hands the volume over to `to`, after its I/O in flight has ended. False if the node cannot
    /// leave now.
    pub fn hand_over(&mut self, to: NodeId, now: BootTime) -> bool {
        if self.step != Step::Holding || self.pending.is_some() || to == self.me {
            return false;
        }
        self.successor = Some(to);
        self.decided.push(Intent::Close);
        self.step = Step::Leaving {
            since: now,
            drained: Mutation::LeaveWithoutDrain.is_active(),
            aborted: false,
        };
        true
    }

    pub fn drained(&mut self) {
        if let Step::Leaving { drained, .. } = &mut self.step {
            *drained = true;
        }
    }

    /// The next intent; call it until it returns `None`.
    pub fn poll(&mut self, view: &View) -> Option<Intent> {
        if !self.decided.is_empty() {
            return Some(self.decided.remove(0));
        }
        if view.lease.has_ended() {
            self.fenced();
        }
        if let Some(pending) = &mut self.pending {
            let send = std::mem::take(&mut pending.send);
            return if send {
                Some(pending.intent())
            } else {
                self.leave_in_time(view.now)
            };
        }
        match self.step {
            Step::Standby { alone, not_before } => self.poll_standby(view, alone, not_before),
            // Their transactions are pending.
            Step::Claim { .. } | Step::Release => None,
            Step::Gates { since, from } => self.poll_gates(view, since, from),
            Step::Serve { since } => self.serve(view, since),
            Step::Merge { since, .. } if !self.has_all_gates() => {
                self.step = Step::Serve { since };
                self.serve(view, since)
            }
            Step::Merge {
                number: Some(_), ..
            } => None,
            Step::Merge {
                since,
                number: None,
            } => {
                self.last_number += 1;
                let number = self.last_number;
                self.step = Step::Merge {
                    since,
                    number: Some(number),
                };
                Some(Intent::Merge { number })
            }
            Step::Holding => self.poll_holding(view),
            Step::Leaving { drained, .. } => self.poll_leaving(view, drained),
            Step::Fenced { dropped: false } => {
                self.step = Step::Fenced { dropped: true };
                Some(Intent::Drop)
            }
            Step::Fenced { dropped: true } => {
                // The incarnation may stand: a gate with a later key was the first to report.
                if !view.lease.has_ended() && self.key().is_none() {
                    self.stand_by(view.now + RETRY);
                }
                None
            }
        }
    }

    fn poll_standby(
        &mut self,
        view: &View,
        alone: Option<BootTime>,
        not_before: BootTime,
    ) -> Option<Intent> {
        let (_, record) = self.record.as_ref()?;
        if record.holder == Some(view.lease.holder()) {
            // A copy of an earlier take arrived late, and was made.
            let since = view.now;
            self.step = Step::Gates { since, from: since };
            return None;
        }
        let is_held = record.holder.is_some_and(|holder| view.stands(holder));
        if is_held && !Mutation::TakeWithoutFence.is_active() {
            // A pause after an earlier attempt concerned the holder before this one.
            self.step = Step::Standby {
                alone: None,
                not_before: BootTime::default(),
            };
            return None;
        }
        let since = alone.unwrap_or(view.now);
        self.step = Step::Standby {
            alone: Some(since),
            not_before,
        };
        let mut order: Vec<NodeId> = view.candidates.to_vec();
        ranks::order(self.id, record, &mut order, view.cordoned);
        let rank = order.iter().position(|node| *node == self.me)?;
        let turn = (since + ranks::turn(rank)).max(not_before);
        if view.now < turn || !view.lease.is_good(view.now) {
            return None;
        }
        let is_reached = |id: &MemberId| view.reached.contains(id);
        if !record.in_sync().any(|member| is_reached(&member.id)) {
            self.step = Step::Standby {
                alone: Some(since),
                not_before: view.now + RETRY,
            };
            return (view.now.since(since) >= RETRY).then_some(Intent::NoHolder);
        }
        Some(self.take(view))
    }

    fn take(&mut self, view: &View) -> Intent {
        let (revision, former, mut record) = match &self.record {
            Some((revision, record)) => (*revision, record.holder, record.clone()),
            None => unreachable!("a node without a record takes nothing"),
        };
        record.epoch += 1;
        record.holder = Some(view.lease.holder());
        record.next = None;
        self.granted.clear();
        self.asked.clear();
        self.wanted.clear();
        self.step = Step::Claim { since: view.now };
        let me = view.lease.holder();
        let take = Transaction::take(me, self.id, revision, former, record.clone());
        self.submit(take, record)
    }

    fn submit(&mut self, transaction: Transaction, record: Record) -> Intent {
        self.last_number += 1;
        let pending = self.pending.insert(Pending {
            number: self.last_number,
            transaction,
            record,
            send: false,
        });
        pending.intent()
    }

    fn poll_gates(&mut self, view: &View, since: BootTime, from: BootTime) -> Option<Intent> {
        let record = self.record()?;
        let missing: ArrayVec<_, MAX_MEMBERS> = record
            .in_sync()
            .filter(|member| !self.granted.contains(&member.id))
            .map(|member| (member.id, view.standing.contains_key(&member.node)))
            .collect();
        if let Some(intent) = self.acquire(view, missing.iter().map(|(id, _)| *id)) {
            return Some(intent);
        }
        let is_over = view.now.since(from) >= GATE_PATIENCE;
        let is_awaited = missing.iter().any(|(_, lives)| *lives);
        if !missing.is_empty() && is_awaited && !is_over {
            return None;
        }
        if self.granted.is_empty() {
            // Another node may reach a member that this one does not.
            return if is_over { self.release(view) } else { None };
        }
        self.step = Step::Serve { since };
        self.serve(view, since)
    }

    /// Asks for the first gate that was not asked for yet.
    fn acquire(
        &mut self,
        view: &View,
        mut members: impl Iterator<Item = MemberId>,
    ) -> Option<Intent> {
        let key = self.key()?;
        let member = members.find(|id| view.reached.contains(id) && !self.asked.contains(id))?;
        self.asked.try_push(member).ok()?;
        Some(Intent::Acquire { member, key })
    }

    fn serve(&mut self, view: &View, since: BootTime) -> Option<Intent> {
        let (revision, record) = self.record.as_ref()?;
        let (revision, mut record) = (*revision, record.clone());
        let has_source = record.in_sync().any(|m| self.granted.contains(&m.id));
        if !has_source {
            let from = view.now;
            self.step = Step::Gates { since, from };
            return None;
        }
        for member in &mut record.members {
            if !self.granted.contains(&member.id) {
                member.state = MemberState::Out;
            }
        }
        record.serving = record.epoch;
        if Some(&record) == self.record() {
            self.step = Step::Merge {
                since,
                number: None,
            };
            return None;
        }
        let me = view.lease.holder();
        let serve = Transaction::commit(me, self.id, revision, record.clone());
        Some(self.submit(serve, record))
    }

    /// Removes this node as the holder.
    fn release(&mut self, view: &View) -> Option<Intent> {
        let (revision, record) = self.record.as_ref()?;
        let (revision, mut record) = (*revision, record.clone());
        record.holder = None;
        record.next = self.successor.take();
        self.step = Step::Release;
        let me = view.lease.holder();
        let release = Transaction::commit(me, self.id, revision, record.clone());
        Some(self.submit(release, record))
    }

    fn poll_holding(&mut self, view: &View) -> Option<Intent> {
        let (revision, record) = self.record.as_ref()?;
        let (revision, mut record) = (*revision, record.clone());
        let late = self
            .ungated
            .late(&record, &self.granted, view.now, view.standing);
        for member in late {
            self.want(member, MemberState::Out);
        }
        // The last in-sync member stays: without it no data is left to serve.
        for (id, state) in std::mem::take(&mut self.wanted) {
            let is_last = record.in_sync().all(|member| member.id == id);
            if state == MemberState::InSync || !is_last {
                record.set(id, state);
            }
        }
        if Some(&record) != self.record() {
            let me = view.lease.holder();
            let change = Transaction::commit(me, self.id, revision, record.clone());
            return Some(self.submit(change, record));
        }
        let all: ArrayVec<_, MAX_MEMBERS> = record.members.iter().map(|m| m.id).collect();
        let missing = all.into_iter().filter(|id| !self.granted.contains(id));
        let missing: ArrayVec<_, MAX_MEMBERS> = missing.collect();
        self.acquire(view, missing.into_iter())
    }

    fn poll_leaving(&mut self, view: &View, drained: bool) -> Option<Intent> {
        if drained {
            return self.release(view);
        }
        let late = self.leave_in_time(view.now);
        if late.is_none() && !self.wanted.is_empty() {
            // A write in flight waits until a failed member is out.
            return self.poll_holding(view);
        }
        late
    }

    /// Ends a hand-over that takes too long, also while the store does not answer. Only a release
    /// that was sent cannot be taken back: another node may have taken the volume since.
    fn leave_in_time(&mut self, now: BootTime) -> Option<Intent> {
        let Step::Leaving {
            since,
            drained,
            aborted,
        } = self.step
        else {
            return None;
        };
        if now.since(since) >= LEAVE {
            self.step = Step::Holding;
            self.successor = None;
            return Some(Intent::Open);
        }
        if now.since(since) >= ABORT && !aborted && !drained {
            self.step = Step::Leaving {
                since,
                drained,
                aborted: true,
            };
            return Some(Intent::Abort);
        }
        None
    }

    /// The pending change was made.
    fn advance(&mut self) {
        match self.step {
            Step::Claim { since } => self.step = Step::Gates { since, from: since },
            Step::Serve { since } => {
                self.step = Step::Merge {
                    since,
                    number: None,
                }
            }
            Step::Release => self.stand_by(BootTime::default()),
            _ => {}
        }
    }

    /// The pending change was not made, and the record is as it was or another node's.
    fn refused_step(&mut self) {
        match self.step {
            Step::Claim { since } => self.stand_by(since + RETRY),
            Step::Standby { .. } | Step::Fenced { .. } => {}
            _ => self.fenced(),
        }
    }

    /// The record has changed without this node.
    fn outdated(&mut self) {
        let is_claim = matches!(self.step, Step::Claim { .. });
        if !is_claim && self.key().is_none() {
            self.fenced();
        }
    }

    fn stand_by(&mut self, not_before: BootTime) {
        self.granted.clear();
        self.asked.clear();
        self.ungated.clear();
        self.wanted.clear();
        self.successor = None;
        self.decided.clear();
        self.step = Step::Standby {
            alone: None,
            not_before,
        };
    }
}
