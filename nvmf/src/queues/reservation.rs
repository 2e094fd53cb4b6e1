//! Reservation commands on a core, and the check of every other command.
//!
//! ```text
//! decide ─▶ store (if it persists) ─▶ install ─▶ notify ─▶ wait for aborted commands ─▶ complete
//!   ▲            │ another command's outcome is being stored
//!   └── wait ◀───┘
//! ```
//!
//! A command that waits is an [`Op`] in its core's list, checked each turn; the core or keeper that
//! it waits for wakes its core. It is executed to the end even if its queue pair is gone.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use nacre_bdev::Op as DeviceOp;
use nacre_nvmf_wire::commands::reservation::{AcquireData, RegisterData};
use nacre_nvmf_wire::{Cqe, StatusCode};
use nacre_reactor::Nanos;
use zerocopy::FromBytes;
use zerocopy::little_endian::U64;

use crate::queues::decode::{Ask, Plan};
use crate::queues::group::Group;
use crate::queues::queue_pair::{QueuePair, Stage};
use crate::queues::request::Step;
use crate::subsystems::core_handle::ReqIndex;
use crate::subsystems::core_handle::ReqRef;
use crate::subsystems::reservation::report::report;
use crate::subsystems::reservation::state::{Command, HostId, Outcome, Rights};
use crate::subsystems::reservation::{
    Answer, Decision, FAILED, Fence, KEPT, OPEN, Reservation, Several, Ticket,
};
use crate::subsystems::subsystem::Subsystem;

const PREEMPTED: StatusCode = StatusCode::ABORTED_PREEMPT_AND_ABORT;

/// The pending work of a core.
#[derive(Default)]
pub(crate) struct Reserving {
    ops: Vec<Op>,
    drains: Vec<Drain>,
}

impl Reserving {
    pub fn is_idle(&self) -> bool {
        self.ops.is_empty() && self.drains.is_empty()
    }
}

/// A command of a host, for one namespace or (Set Features) for several in turn.
pub(crate) struct Errand {
    pub subsystem: Arc<Subsystem>,
    pub host: HostId,
    pub command: Command,
    pub todo: Several,
}

/// An errand that has not been answered.
struct Op {
    request: ReqRef,
    errand: Errand,
    waits: Waits,
}

enum Waits {
    /// For another command of the same namespace.
    Turn,
    /// Until the next state is kept.
    Keeping(Arc<Answer>, Outcome),
    Fence(Arc<Fence>),
}

/// Commands of this core that a fence waits for.
struct Drain {
    fence: Arc<Fence>,
    requests: Vec<ReqRef>,
}

impl Group {
    /// A reservation command has its data.
    pub(crate) fn run_reservation(&mut self, q: u32, index: ReqIndex, ask: Ask, now: Nanos) {
        let qp = self.queue(q);
        let association = Arc::clone(qp.association.as_ref().expect("live queue"));
        let nsid = qp.requests[index].sqe.nsid();
        let Some(namespace) = qp.namespace_of(index) else {
            let status = StatusCode::INVALID_NAMESPACE_OR_FORMAT.with_dnr();
            return self.finish(q, index, status, now);
        };
        let reservation = Arc::clone(&namespace.reservation);
        let request = &mut qp.requests[index];
        let command = match ask {
            Ask::Report { extended, .. } => {
                let page = report(&reservation.state(), extended);
                if let Some(data) = request.data.as_mut().and_then(|d| d.bytes_mut()) {
                    // The former contents of a buffer must not leak.
                    data.fill(0);
                    let length = page.len().min(data.len());
                    data[..length].copy_from_slice(&page[..length]);
                }
                return self.finish(q, index, StatusCode::SUCCESS, now);
            }
            Ask::Register(_) | Ask::Acquire(_) | Ask::Release(_) => {
                let data = request.data.take();
                match with_data(ask, data.as_deref().unwrap_or_default()) {
                    Some(command) => command,
                    None => {
                        let status = StatusCode::DATA_SGL_LENGTH_INVALID.with_dnr();
                        return self.finish(q, index, status, now);
                    }
                }
            }
        };
        if association.hostid == HostId::default() {
            let status = StatusCode::HOST_ID_NOT_INITIALIZED.with_dnr();
            return self.finish(q, index, status, now);
        }
        let errand = Errand {
            subsystem: Arc::clone(&association.subsystem),
            host: association.hostid,
            command,
            todo: vec![(nsid, reservation)],
        };
        self.reserve(q, index, errand, now);
    }

    /// Runs an errand; the request is answered when all is done.
    pub(crate) fn reserve(&mut self, q: u32, index: ReqIndex, errand: Errand, now: Nanos) {
        self.queue(q).requests[index].step = Step::Held;
        let op = Op {
            request: self.name_of(q, index),
            errand,
            waits: Waits::Turn,
        };
        if let Some(op) = self.decide(op, now) {
            self.reserving.ops.push(op);
        }
    }

    /// Continues waiting commands. Returns the amount of work.
    pub(crate) fn reservation_turn(&mut self, now: Nanos) -> u32 {
        let mut did = self.settle_drains();
        for op in std::mem::take(&mut self.reserving.ops) {
            let before = self.reserving.ops.len();
            if let Some(op) = self.resume(op, now) {
                self.reserving.ops.push(op);
            }
            did += u32::from(self.reserving.ops.len() == before);
        }
        did
    }

    /// `None`: it is answered.
    fn resume(&mut self, mut op: Op, now: Nanos) -> Option<Op> {
        match op.waits {
            Waits::Turn => self.decide(op, now),
            Waits::Fence(ref fence) if fence.cores.load(Ordering::Acquire) > 0 => Some(op),
            Waits::Fence(_) => {
                op.errand.todo.pop();
                self.decide(op, now)
            }
            Waits::Keeping(ref answer, ref mut outcome) => {
                let (_, reservation) = op.errand.todo.last().expect("the one that is kept");
                match answer.outcome.load(Ordering::Acquire) {
                    OPEN => Some(op),
                    KEPT => {
                        let outcome = std::mem::replace(outcome, nothing());
                        self.install(op, outcome, now)
                    }
                    FAILED => {
                        reservation.give_up();
                        // Trying again may help.
                        self.answer(&op, StatusCode::INTERNAL_ERROR, now);
                        None
                    }
                    _ => unreachable!("three outcomes"),
                }
            }
        }
    }

    /// Works on the last of the namespaces that are left, if it is not in another command's hands.
    fn decide(&mut self, mut op: Op, now: Nanos) -> Option<Op> {
        let Some((_, reservation)) = op.errand.todo.last() else {
            self.answer(&op, StatusCode::SUCCESS, now);
            return None;
        };
        let Errand { host, command, .. } = &op.errand;
        match reservation.decide(host, command, &self.handle) {
            Decision::Wait => {
                op.waits = Waits::Turn;
                Some(op)
            }
            Decision::Refused(status) => {
                self.answer(&op, status, now);
                None
            }
            Decision::Taken(outcome, Some(keeper)) => {
                let (ticket, answer) = Ticket::new(self.handle.clone());
                keeper.keep(outcome.next.ptpl.then_some(&outcome.next), ticket);
                op.waits = Waits::Keeping(answer, outcome);
                Some(op)
            }
            Decision::Taken(outcome, None) => self.install(op, outcome, now),
        }
    }

    /// Installs the outcome.
    fn install(&mut self, mut op: Op, outcome: Outcome, now: Nanos) -> Option<Op> {
        let (nsid, reservation) = op.errand.todo.last().expect("the one that was decided");
        let nsid = *nsid;
        reservation.install(outcome.next);
        for (host, notice) in outcome.notices {
            op.errand.subsystem.tell_reservation(&host, nsid, notice);
        }
        if let Some(fence) = self.raise_fence(&op.errand.subsystem, nsid, outcome.aborted) {
            op.waits = Waits::Fence(fence);
            return Some(op);
        }
        op.errand.todo.pop();
        self.decide(op, now)
    }

    fn answer(&mut self, op: &Op, status: StatusCode, now: Nanos) {
        let ReqRef { queue, request, .. } = op.request;
        if self.is_current(op.request) && self.queue(queue).requests[request].step == Step::Held {
            let cid = self.queue(queue).requests[request].sqe.cid();
            self.complete(queue, request, Cqe::new(cid, status), now);
        }
    }

    // Preempt and Abort.

    /// Has every core that may have commands of these hosts see to them.
    fn raise_fence(
        &self,
        subsystem: &Arc<Subsystem>,
        nsid: u32,
        hosts: Vec<HostId>,
    ) -> Option<Arc<Fence>> {
        if hosts.is_empty() {
            return None;
        }
        let mut groups = Vec::new();
        for association in subsystem.controllers() {
            if !hosts.contains(&association.hostid) {
                continue;
            }
            for queue in association.queues() {
                let known = |g: &crate::subsystems::GroupHandle| g.core == queue.group.core;
                if queue.qid != 0 && !groups.iter().any(known) {
                    groups.push(queue.group.clone());
                }
            }
        }
        let fence = Arc::new(Fence {
            subsystem: Arc::clone(subsystem),
            nsid,
            hosts,
            cores: AtomicUsize::new(groups.len()),
            owner: self.handle.clone(),
        });
        // This core, too, in its next turn: it may be in the middle of a list of requests.
        groups.iter().for_each(|g| g.raise(Arc::clone(&fence)));
        (!groups.is_empty()).then_some(fence)
    }

    /// Aborts the commands of this core that a fence is about.
    pub(crate) fn take_fence(&mut self, fence: Arc<Fence>, now: Nanos) {
        let mut requests = Vec::new();
        for q in 0..self.queues.len() as u32 {
            let Some(qp) = self.queues[q as usize]
                .as_ref()
                .filter(|qp| fence.is_about(qp))
            else {
                continue;
            };
            let active: Vec<ReqIndex> = qp.requests.active().collect();
            for index in active {
                if self.preempt_command(q, index, fence.nsid, now) {
                    requests.push(self.name_of(q, index));
                }
            }
        }
        self.reserving.drains.push(Drain { fence, requests });
    }

    /// Aborts a command if it is for the namespace. `true`: a device still has it.
    fn preempt_command(&mut self, q: u32, index: ReqIndex, nsid: u32, now: Nanos) -> bool {
        let qp = self.queue(q);
        let request = &mut qp.requests[index];
        let all = request.plan == Plan::Flush { all: true };
        if request.sqe.nsid() != nsid && !all {
            return false;
        }
        match request.step {
            Step::Buffer => {
                qp.unfetched.retain(|waiting| *waiting != index);
                self.finish(q, index, PREEMPTED, now);
                false
            }
            // Ends when its data is here.
            Step::Fetching => {
                request.status = PREEMPTED;
                false
            }
            Step::Executing if request.inflight == 0 && request.partner.is_none() => {
                self.finish(q, index, PREEMPTED, now);
                false
            }
            Step::Executing => {
                // A pair that waits for room in its device ends when it would have got it.
                if request.status.is_success() {
                    request.status = PREEMPTED;
                }
                request.fenced = request.inflight > 0;
                let in_device = request.fenced;
                self.abort_children(q, index);
                in_device
            }
            // Nothing has been done for it: it meets the reservation when it runs.
            Step::Free | Step::Fused | Step::Held => false,
        }
    }

    /// Counts this core off the fences whose commands are gone.
    fn settle_drains(&mut self) -> u32 {
        let queues = &self.queues;
        let there = |r: &ReqRef| {
            let qp = queues[r.queue as usize].as_ref();
            qp.is_some_and(|qp| qp.generation == r.generation && qp.requests[r.request].fenced)
        };
        let before = self.reserving.drains.len();
        self.reserving.drains.retain(|drain| {
            let left = drain.requests.iter().any(there);
            if !left && drain.fence.cores.fetch_sub(1, Ordering::AcqRel) == 1 {
                drain.fence.owner.attend();
            }
            left
        });
        (before - self.reserving.drains.len()) as u32
    }

    // Every other command.

    /// Whether a reservation forbids an I/O command that is about to run.
    pub(crate) fn conflicts(&mut self, q: u32, index: ReqIndex) -> bool {
        let qp = self.queue(q);
        let request = &qp.requests[index];
        let Some(need) = needs(&request.plan) else {
            return false;
        };
        if let Plan::Flush { all: true } = request.plan {
            let view = Arc::clone(&qp.view);
            return view
                .iter()
                .any(|namespace| !qp.may(namespace.nsid, &namespace.reservation, need));
        }
        let Some(namespace) = qp.namespace_of(index) else {
            return false;
        };
        if namespace.reservation.gate() == 0 {
            return false;
        }
        let (nsid, reservation) = (namespace.nsid, Arc::clone(&namespace.reservation));
        !qp.may(nsid, &reservation, need)
    }

    /// Answers a command that a reservation forbids, and the other half of its pair.
    #[cold]
    pub(crate) fn refuse_conflict(&mut self, q: u32, index: ReqIndex, now: Nanos) {
        const CONFLICT: StatusCode = StatusCode::RESERVATION_CONFLICT.with_dnr();
        let qp = self.queue(q);
        let (partner, nsid) = (qp.requests[index].partner, qp.requests[index].sqe.nsid());
        let reservation = qp.namespace_of(index).map(|n| Arc::clone(&n.reservation));
        if let Some(reservation) = &reservation {
            reservation.count_conflict();
        }
        let Some(first) = partner else {
            return self.finish(q, index, CONFLICT, now);
        };
        // The half that is to blame says why: the Compare, if it may not even read.
        let reads = reservation.is_none_or(|r| self.queue(q).may(nsid, &r, Rights::Read));
        let failed = StatusCode::ABORTED_FAILED_FUSED;
        let (one, two) = if reads {
            (failed, CONFLICT)
        } else {
            (CONFLICT, failed)
        };
        self.end_pair(q, (first, one), (index, two), now);
    }
}

/// What an I/O command needs (Base figure "Command Behavior in the Presence of a Reservation").
/// Admin commands that depend on a reservation (Format, Sanitize, Namespace Management and
/// Attachment, Security) are not supported here.
fn needs(plan: &Plan) -> Option<Rights> {
    match plan {
        Plan::Single {
            op: DeviceOp::Read | DeviceOp::Compare | DeviceOp::Verify,
            ..
        } => Some(Rights::Read),
        // Copy reads, too: a host that may write may also read.
        Plan::Single { .. }
        | Plan::Flush { .. }
        | Plan::Deallocate { .. }
        | Plan::Hints { .. }
        | Plan::Copy { .. } => Some(Rights::ReadWrite),
        Plan::Reservation(_) | Plan::Admin { .. } | Plan::None => None,
    }
}

impl QueuePair {
    /// Whether its host may do what needs `need`.
    #[inline]
    pub(crate) fn may(&mut self, nsid: u32, reservation: &Reservation, need: Rights) -> bool {
        let gate = reservation.gate();
        let association = &self.association;
        let host = || association.as_ref().map_or(HostId::default(), |a| a.hostid);
        gate == 0 || self.rights.allows(gate, nsid, reservation, host, need)
    }
}

impl Fence {
    fn is_about(&self, qp: &QueuePair) -> bool {
        !qp.is_admin()
            && qp.stage != Stage::Fresh
            && qp.association.as_ref().is_some_and(|a| {
                Arc::ptr_eq(&a.subsystem, &self.subsystem) && self.hosts.contains(&a.hostid)
            })
    }
}

/// The command, if its data is long enough.
fn with_data(ask: Ask, data: &[u8]) -> Option<Command> {
    Some(match ask {
        Ask::Register(what) => {
            let (keys, _) = RegisterData::read_from_prefix(data).ok()?;
            Command::Register {
                what,
                current: keys.crkey.get(),
                new: keys.nrkey.get(),
            }
        }
        Ask::Acquire(what) => {
            let (keys, _) = AcquireData::read_from_prefix(data).ok()?;
            Command::Acquire {
                what,
                current: keys.crkey.get(),
                preempt: keys.prkey.get(),
            }
        }
        Ask::Release(what) => {
            let (key, _) = U64::read_from_prefix(data).ok()?;
            Command::Release {
                what,
                current: key.get(),
            }
        }
        Ask::Report { .. } => return None,
    })
}

fn nothing() -> Outcome {
    Outcome {
        next: Default::default(),
        notices: Vec::new(),
        aborted: Vec::new(),
    }
}
