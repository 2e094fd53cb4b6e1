//! The state machine of one volume on one node: when this node takes, opens, closes and releases
//! the volume.
//!
//! ```text
//!             turn of this node         opened
//!   Standby ───────────────────▶ Taking ──────▶ Holding ──▶ Leaving ─┐ drained
//!      ▲  ▲                      │ ▲  not opened   │           │     │
//!      │  └──────── released ────┘ └─── 5 s ───────│───────────┘     │
//!      │                Fenced ◀── another holder ─┤                 │
//!      └── new lease ──────┘                       ▼                 │
//!      ▲───────────────────────────────────── released ──────────────┘
//! ```
//!
//! The machine decides which node opens the volume, and the holder's control does the rest: it
//! fences other holders at the replicas, and changes the record while the volume is open. So the
//! machine writes the record only while the volume is closed here: to claim it, and to release it.
//! An unanswered change is sent again until its outcome is known. It compares a revision, so it is
//! executed once. `Fenced` also follows when the node's own lease ended.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::ids::{Incarnation, NodeId, ReplicaId, Revision, VolumeId};
use crate::lease::Lease;
use crate::mutation::Mutation;
use crate::ranks;
use crate::record::{Holder, Record};
use crate::time::BootTime;
use crate::transaction::Transaction;

pub use crate::intent::{Ana, HoldingState, Intent};

/// Time between two attempts of a node that cannot take.
pub const RETRY: Duration = Duration::from_secs(1);
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
    /// The incarnations of nodes that have not ended, as far as the watch has shown.
    pub standing: &'a BTreeMap<NodeId, Incarnation>,
    /// The replicas that this node can reach now.
    pub reached: &'a [ReplicaId],
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
    /// The transaction of the take is in flight.
    Claim {
        since: BootTime,
    },
    /// The control opens the volume.
    Opening {
        since: BootTime,
        /// The number of the request to the control; `None` before the request.
        asked: Option<u64>,
    },
    Holding {
        /// The number of the request that the control answered.
        opened: u64,
    },
    Leaving {
        since: BootTime,
        /// The number of the close.
        close: u64,
        drained: bool,
        aborted: bool,
    },
    /// The holder is removed from the record, after a close or a failed opening.
    Release {
        /// Time for which this node does not take the volume again.
        pause: Duration,
        not_before: BootTime,
    },
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
    /// Counts changes of the record, openings and closes.
    last_number: u64,
    /// This node in the incarnation that claimed the volume.
    own: Option<Holder>,
    /// The node that a handover goes to.
    successor: Option<NodeId>,
    /// An intent decided by a call.
    decided: Option<Intent>,
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
            own: None,
            successor: None,
            decided: None,
        }
    }

    pub fn state(&self) -> HoldingState {
        match self.step {
            Step::Standby { .. } => HoldingState::Standby,
            Step::Claim { .. } | Step::Opening { .. } => HoldingState::Taking,
            Step::Holding { .. } => HoldingState::Holding,
            Step::Leaving { .. } | Step::Release { .. } => HoldingState::Leaving,
            Step::Fenced { .. } => HoldingState::Fenced,
        }
    }

    pub fn ana(&self, now: BootTime) -> Ana {
        match self.step {
            Step::Holding { .. } => Ana::Optimized,
            Step::Opening { since, .. } | Step::Leaving { since, .. }
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

    /// The record with its revision in the store.
    pub fn seen(&self) -> Option<&(Revision, Record)> {
        self.record.as_ref()
    }

    /// The record at `revision`, from a watch event or an answer of the store. A revision that is
    /// not newer than the known one is ignored. A record with another holder fences this node, if
    /// it opens, holds or leaves the volume.
    pub fn update(&mut self, revision: Revision, record: Record) {
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

    /// The store executed the transaction of [`Intent::Commit`], and wrote the record at
    /// `revision`. A watch event may have shown a later record before.
    pub fn committed(&mut self, number: u64, revision: Revision) {
        let Some(pending) = self.pending.take_if(|p| p.number == number) else {
            return;
        };
        let known = self.record.as_ref().map(|(known, _)| *known);
        if known < Some(revision) {
            self.record = Some((revision, pending.record));
        }
        self.advance();
        // The record may be a later one.
        self.outdated();
    }

    /// A condition of the transaction did not hold; `record` is the present one. If it equals the
    /// record of the transaction, the store had executed an earlier copy.
    pub fn refused(&mut self, number: u64, revision: Revision, record: Record) {
        self.update(revision, record);
        if self.pending.take_if(|p| p.number == number).is_none() {
            return;
        }
        match self.step {
            Step::Claim { since } => self.stand_by(since + RETRY),
            // The control's last change came in between: the release is made from that.
            Step::Release { .. } if self.is_own() => {}
            Step::Release { not_before, .. } => self.stand_by(not_before),
            _ => {}
        }
    }

    /// The outcome is unknown: the change is sent again.
    pub fn unanswered(&mut self, number: u64) {
        if let Some(pending) = self.pending.as_mut().filter(|p| p.number == number) {
            pending.send = true;
        }
    }

    /// The control opened the volume on the request with this number.
    pub fn opened(&mut self, number: u64) {
        if let Step::Opening { asked, .. } = self.step
            && asked == Some(number)
        {
            self.step = Step::Holding { opened: number };
        }
    }

    /// The control did not open the volume on the request with this number, or closed it later by
    /// itself. The volume is released, and this node waits [`RETRY`] before it takes again.
    pub fn not_opened(&mut self, number: u64) {
        let asked = match self.step {
            Step::Opening { asked, .. } => asked,
            Step::Holding { opened } => Some(opened),
            _ => None,
        };
        if asked == Some(number) {
            self.step = Step::Release {
                pause: RETRY,
                not_before: BootTime::default(),
            };
        }
    }

    /// The close with this number has ended: no command is in flight.
    pub fn drained(&mut self, number: u64) {
        if let Step::Leaving { close, drained, .. } = &mut self.step
            && *close == number
        {
            *drained = true;
        }
    }

    /// The node has a new incarnation: the volume is in standby, and pending changes are forgotten.
    pub fn restart(&mut self) {
        self.pending = None;
        self.stand_by(BootTime::default());
    }

    /// Starts to hand the volume over to `to`: it is closed, then released. I/O in flight after 2 s
    /// is aborted. If the close lasts 5 s, this node opens the volume again. False if this node
    /// does not hold the volume, or is `to`.
    pub fn handover(&mut self, to: NodeId, now: BootTime) -> bool {
        if !matches!(self.step, Step::Holding { .. }) || to == self.me {
            return false;
        }
        self.successor = Some(to);
        let close = self.next_number();
        let drained = Mutation::LeaveWithoutDrain.is_active();
        self.decided = (!drained).then_some(Intent::Close { number: close });
        self.step = Step::Leaving {
            since: now,
            close,
            drained,
            aborted: false,
        };
        true
    }

    /// The next intent; call it until it returns `None`.
    pub fn poll(&mut self, view: &View) -> Option<Intent> {
        if view.lease.has_ended() {
            self.fenced();
        }
        if let Some(intent) = self.decided.take() {
            return Some(intent);
        }
        if let Some(pending) = &mut self.pending {
            let send = std::mem::take(&mut pending.send);
            return send.then(|| pending.intent());
        }
        match self.step {
            Step::Standby { alone, not_before } => self.poll_standby(view, alone, not_before),
            // Its transaction is pending.
            Step::Claim { .. } => None,
            Step::Opening { since, asked: None } => {
                let number = self.next_number();
                let asked = Some(number);
                self.step = Step::Opening { since, asked };
                Some(Intent::Take { number })
            }
            Step::Opening { .. } | Step::Holding { .. } => None,
            Step::Leaving { drained: true, .. } => self.release(view, Duration::ZERO),
            Step::Leaving { .. } => self.leave_in_time(view.now),
            Step::Release { pause, .. } => self.release(view, pause),
            Step::Fenced { dropped: false } => {
                self.step = Step::Fenced { dropped: true };
                Some(Intent::Drop)
            }
            Step::Fenced { dropped: true } => {
                // The incarnation may stand: the record's other holder was the first to show.
                if !view.lease.has_ended() && !self.is_own() {
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
        let me = view.lease.holder();
        if record.holder == Some(me) {
            // A copy of an earlier take arrived late, and was made.
            self.own = Some(me);
            self.step = Step::Opening {
                since: view.now,
                asked: None,
            };
            return self.poll(view);
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
        let is_reached = |id: &ReplicaId| view.reached.contains(id);
        if !record.in_sync().any(|replica| is_reached(&replica.id)) {
            self.step = Step::Standby {
                alone: Some(since),
                not_before: view.now + RETRY,
            };
            return (view.now.since(since) >= RETRY).then_some(Intent::NoHolder);
        }
        Some(self.claim(view))
    }

    fn claim(&mut self, view: &View) -> Intent {
        let (revision, former, mut record) = match &self.record {
            Some((revision, record)) => (*revision, record.holder, record.clone()),
            None => unreachable!("a node without a record takes nothing"),
        };
        let me = view.lease.holder();
        record.epoch += 1;
        record.holder = Some(me);
        record.next = None;
        self.own = Some(me);
        self.step = Step::Claim { since: view.now };
        let take = Transaction::take(me, self.id, revision, former, record.clone());
        self.submit(take, record)
    }

    /// Removes this node as the holder.
    fn release(&mut self, view: &View, pause: Duration) -> Option<Intent> {
        let (revision, record) = self.record.as_ref()?;
        let (revision, mut record) = (*revision, record.clone());
        record.holder = None;
        record.next = self.successor;
        let not_before = if pause.is_zero() {
            BootTime::default()
        } else {
            view.now + pause
        };
        self.step = Step::Release { pause, not_before };
        let me = view.lease.holder();
        let release = Transaction::commit(me, self.id, revision, record.clone());
        Some(self.submit(release, record))
    }

    fn submit(&mut self, transaction: Transaction, record: Record) -> Intent {
        let number = self.next_number();
        let pending = self.pending.insert(Pending {
            number,
            transaction,
            record,
            send: false,
        });
        pending.intent()
    }

    fn next_number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    /// Ends a handover that takes too long: the control opens the volume again.
    fn leave_in_time(&mut self, now: BootTime) -> Option<Intent> {
        let Step::Leaving { since, aborted, .. } = &mut self.step else {
            return None;
        };
        let since = *since;
        if now.since(since) >= LEAVE {
            self.successor = None;
            let number = self.next_number();
            let asked = Some(number);
            self.step = Step::Opening { since, asked };
            return Some(Intent::Take { number });
        }
        let is_due = now.since(since) >= ABORT && !*aborted;
        *aborted |= is_due;
        is_due.then_some(Intent::Abort)
    }

    /// The pending change was made.
    fn advance(&mut self) {
        match self.step {
            Step::Claim { since } => self.step = Step::Opening { since, asked: None },
            Step::Release { not_before, .. } => self.stand_by(not_before),
            _ => {}
        }
    }

    /// The record has changed without this machine.
    fn outdated(&mut self) {
        match self.step {
            Step::Opening { .. } | Step::Holding { .. } | Step::Leaving { .. }
                if !self.is_own() =>
            {
                self.fenced();
            }
            // The release was made, and another node was faster than its answer.
            Step::Release { not_before, .. } if !self.is_own() => {
                self.pending = None;
                self.stand_by(not_before);
            }
            _ => {}
        }
    }

    fn is_own(&self) -> bool {
        let holder = self.record().and_then(|record| record.holder);
        holder.is_some() && holder == self.own
    }

    /// The node is no longer the holder: its incarnation is gone, or the record has another one.
    fn fenced(&mut self) {
        if !matches!(self.step, Step::Standby { .. } | Step::Fenced { .. }) {
            self.pending = None;
            self.decided = None;
            self.step = Step::Fenced { dropped: false };
        }
    }

    fn stand_by(&mut self, not_before: BootTime) {
        self.own = None;
        self.successor = None;
        self.decided = None;
        self.step = Step::Standby {
            alone: None,
            not_before,
        };
    }
}
