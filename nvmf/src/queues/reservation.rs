//! Executes reservation commands (Base 7.2 to 7.5) on a core, and checks other commands for
//! reservation conflicts.
//!
//! ```text
//! decide ─▶ store (if it persists) ─▶ install ─▶ notify ─▶ wait for aborted commands ─▶ complete
//!   ▲            │ another command's outcome is being stored
//!   └── wait ◀───┘
//! ```
//!
//! A pending command is an [`Op`] in its core's list, which is checked each turn. The core or store
//! that it waits for wakes its core. It is executed to the end even if its queue pair is removed.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use nacre_bdev::Op as DeviceOp;
use nacre_nvmf_wire::StatusCode;
use nacre_nvmf_wire::commands::reservation::{AcquireData, RegisterData};
use zerocopy::FromBytes;
use zerocopy::little_endian::U64;

use crate::queues::command::Command;
use crate::queues::decode::{Plan, ReservationCommand};
use crate::queues::queue_pair::{QueuePair, Stage};
use crate::queues::queue_pairs::QueuePairs;
use crate::queues::request::Step;
use crate::subsystems::core_handle::{GroupHandle, ReqRef};
use crate::subsystems::reservation::report::report;
use crate::subsystems::reservation::state::{Change, Effect, HostId, Rights};
use crate::subsystems::reservation::{
    Decision, FAILED, Fence, OPEN, Reservation, STORED, Several, StoreAnswer, Ticket,
};
use crate::subsystems::subsystem::Subsystem;

const PREEMPTED: StatusCode = StatusCode::ABORTED_PREEMPT_AND_ABORT;

/// The pending work of a core.
#[derive(Default)]
pub(crate) struct Reserving {
    ops: VecDeque<Op>,
    drains: Vec<Drain>,
}

/// The change of a host's command, for one namespace or (Set Features) for several in turn.
pub(crate) struct ReservationChange {
    pub subsystem: Arc<Subsystem>,
    pub host: HostId,
    pub change: Change,
    pub todo: Several,
}

/// A command in progress.
struct Op {
    request: ReqRef,
    errand: ReservationChange,
    waits: WaitsFor,
}

enum WaitsFor {
    /// Waits for another command of the same namespace.
    Turn,
    /// Waits until the next state is stored persistently.
    Storing(Arc<StoreAnswer>, Effect),
    Fence(Arc<Fence>),
}

/// Commands of this core that a fence waits for.
struct Drain {
    fence: Arc<Fence>,
    requests: Vec<ReqRef>,
}

impl Reserving {
    pub(crate) fn is_idle(&self) -> bool {
        self.ops.is_empty() && self.drains.is_empty()
    }

    /// Number of pending commands.
    pub(crate) fn waiting(&self) -> usize {
        self.ops.len()
    }

    /// Continues the oldest pending command, and moves it to the end of the list if it must wait.
    /// Returns its status if it is complete.
    pub(crate) fn continue_next(&mut self, handle: &GroupHandle) -> Option<(ReqRef, StatusCode)> {
        let op = self.ops.pop_front()?;
        let request = op.request;
        let status = self.note(op.resume(handle))?;
        Some((request, status))
    }

    /// Records the progress of a command. `Some`: it is complete.
    fn note(&mut self, progress: ReservationProgress) -> Option<StatusCode> {
        match progress {
            ReservationProgress::Waits(op) => {
                self.ops.push_back(op);
                None
            }
            ReservationProgress::Done(status) => Some(status),
        }
    }

    /// Records the commands of this core that a fence waits for, because a device still has them.
    pub(crate) fn drain(&mut self, fence: Arc<Fence>, requests: Vec<ReqRef>) {
        self.drains.push(Drain { fence, requests });
    }

    /// Reports to the fences whose commands on this core have ended.
    pub(crate) fn settle_drains(&mut self, queues: &QueuePairs) -> u32 {
        let there = |r: &ReqRef| {
            queues
                .get(r.queue)
                .is_some_and(|qp| qp.id.generation == r.generation && qp.requests[r.request].fenced)
        };
        let before = self.drains.len();
        self.drains.retain(|drain| {
            let left = drain.requests.iter().any(there);
            if !left && drain.fence.cores.fetch_sub(1, Ordering::AcqRel) == 1 {
                drain.fence.owner.wake();
            }
            left
        });
        (before - self.drains.len()) as u32
    }
}

enum ReservationProgress {
    Waits(Op),
    Done(StatusCode),
}

impl Op {
    fn resume(mut self, handle: &GroupHandle) -> ReservationProgress {
        match self.waits {
            WaitsFor::Turn => self.decide(handle),
            WaitsFor::Fence(ref fence) if fence.cores.load(Ordering::Acquire) > 0 => {
                ReservationProgress::Waits(self)
            }
            WaitsFor::Fence(_) => {
                self.errand.todo.pop();
                self.decide(handle)
            }
            WaitsFor::Storing(ref answer, ref mut outcome) => {
                let (_, reservation) = self.errand.todo.last().expect("the one that is kept");
                match answer.outcome.load(Ordering::Acquire) {
                    OPEN => ReservationProgress::Waits(self),
                    STORED => {
                        let outcome = std::mem::replace(outcome, nothing());
                        self.install(outcome, handle)
                    }
                    FAILED => {
                        reservation.give_up();
                        // Trying again may help: here, or where the namespace is served now.
                        ReservationProgress::Done(if reservation.may_answer() {
                            StatusCode::INTERNAL_ERROR
                        } else {
                            StatusCode::ANA_TRANSITION
                        })
                    }
                    _ => unreachable!("three outcomes"),
                }
            }
        }
    }

    /// Decides about the last remaining namespace, unless another command is changing it.
    fn decide(mut self, handle: &GroupHandle) -> ReservationProgress {
        let Some((_, reservation)) = self.errand.todo.last() else {
            return ReservationProgress::Done(StatusCode::SUCCESS);
        };
        let ReservationChange { host, change, .. } = &self.errand;
        match reservation.decide(host, change, handle) {
            Decision::Wait => {
                self.waits = WaitsFor::Turn;
                ReservationProgress::Waits(self)
            }
            Decision::Refused(status) => ReservationProgress::Done(status),
            Decision::Accepted(outcome, Some(store)) => {
                let (ticket, answer) = Ticket::new(handle.clone());
                let is_kept = outcome.next.ptpl || store.stores_all();
                store.store(is_kept.then_some(&outcome.next), ticket);
                self.waits = WaitsFor::Storing(answer, outcome);
                ReservationProgress::Waits(self)
            }
            Decision::Accepted(outcome, None) => self.install(outcome, handle),
        }
    }

    /// Installs the outcome.
    fn install(mut self, outcome: Effect, handle: &GroupHandle) -> ReservationProgress {
        let (nsid, reservation) = self.errand.todo.last().expect("the one that was decided");
        let nsid = *nsid;
        reservation.install(outcome.next);
        let subsystem = &self.errand.subsystem;
        for (host, notice) in outcome.notices {
            subsystem.notify_reservation(&host, nsid, notice);
        }
        if let Some(fence) = raise_fence(handle, subsystem, nsid, outcome.aborted) {
            self.waits = WaitsFor::Fence(fence);
            return ReservationProgress::Waits(self);
        }
        self.errand.todo.pop();
        self.decide(handle)
    }
}

/// Executes a reservation command that has its data.
pub(super) fn run(command: &mut Command, ask: ReservationCommand) {
    let (qp, index) = (&mut *command.queue, command.index);
    let association = Arc::clone(qp.association.as_ref().expect("live queue"));
    let nsid = qp.requests[index].sqe.nsid();
    let Some(namespace) = qp.namespace_of(index) else {
        let status = StatusCode::INVALID_NAMESPACE_OR_FORMAT.with_dnr();
        return command.finish(status);
    };
    let reservation = Arc::clone(&namespace.reservation);
    let request = &mut qp.requests[index];
    let change = match ask {
        ReservationCommand::Report { extended, .. } => {
            let Some(state) = reservation.state() else {
                return command.finish(StatusCode::ANA_TRANSITION);
            };
            let page = report(&state, extended);
            if let Some(data) = request.data.as_mut().and_then(|d| d.bytes_mut()) {
                // The former contents of a buffer must not leak.
                data.fill(0);
                let length = page.len().min(data.len());
                data[..length].copy_from_slice(&page[..length]);
            }
            return command.finish(StatusCode::SUCCESS);
        }
        ReservationCommand::Register(_)
        | ReservationCommand::Acquire(_)
        | ReservationCommand::Release(_) => {
            let data = request.data.take();
            match with_data(ask, data.as_deref().unwrap_or_default()) {
                Some(change) => change,
                None => {
                    let status = StatusCode::DATA_SGL_LENGTH_INVALID.with_dnr();
                    return command.finish(status);
                }
            }
        }
    };
    if association.hostid == HostId::default() {
        let status = StatusCode::HOST_ID_NOT_INITIALIZED.with_dnr();
        return command.finish(status);
    }
    let errand = ReservationChange {
        subsystem: Arc::clone(&association.subsystem),
        host: association.hostid,
        change,
        todo: vec![(nsid, reservation)],
    };
    start(command, errand);
}

/// Starts a command's changes. The request completes after all of them.
pub(super) fn start(command: &mut Command, errand: ReservationChange) {
    command.request().step = Step::Deferred;
    let op = Op {
        request: command.queue.name_of(command.index),
        errand,
        waits: WaitsFor::Turn,
    };
    let progress = op.decide(&command.core.handle);
    if let Some(status) = command.core.reserving.note(progress) {
        command.finish(status);
    }
}

/// The reservation that forbids an I/O command that is about to execute, or that is unknown.
pub(super) fn conflict(command: &mut Command) -> Option<Arc<Reservation>> {
    let (qp, index) = (&mut *command.queue, command.index);
    let request = &qp.requests[index];
    let need = needs(&request.plan)?;
    if let Plan::Flush { all: true } = request.plan {
        let view = Arc::clone(&qp.view);
        let mut all = view.iter();
        let forbids = all.find(|namespace| !qp.may(namespace.nsid, &namespace.reservation, need));
        return forbids.map(|namespace| Arc::clone(&namespace.reservation));
    }
    let namespace = qp.namespace_of(index)?;
    if namespace.reservation.gate() == 0 {
        return None;
    }
    let (nsid, reservation) = (namespace.nsid, Arc::clone(&namespace.reservation));
    (!qp.may(nsid, &reservation, need)).then_some(reservation)
}

/// Answers a command that a reservation forbids, or whose reservation is unknown, and the other
/// half of its pair.
#[cold]
pub(super) fn refuse_conflict(command: &mut Command, reservation: &Reservation) {
    let (qp, index) = (&mut *command.queue, command.index);
    let refusal = qp.rights.refusal(reservation);
    let (partner, nsid) = (qp.requests[index].partner, qp.requests[index].sqe.nsid());
    if refusal.dnr() {
        reservation.count_conflict();
    }
    let Some(first) = partner else {
        return command.finish(refusal);
    };
    // The half that is to blame says why: the Compare, if it may not even read.
    let reads = qp.may(nsid, reservation, Rights::Read);
    let failed = StatusCode::ABORTED_FAILED_FUSED;
    let (one, two) = if reads {
        (failed, refusal)
    } else {
        (refusal, failed)
    };
    command.end_pair((first, one), two);
}

// Preempt and Abort.

/// Has every core that may have commands of these hosts see to them.
fn raise_fence(
    handle: &GroupHandle,
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
            let known = |g: &GroupHandle| g.core == queue.group.core;
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
        owner: handle.clone(),
    });
    // This core, too, in its next turn: it may be in the middle of a list of requests.
    groups.iter().for_each(|g| g.raise(Arc::clone(&fence)));
    (!groups.is_empty()).then_some(fence)
}

/// Aborts a command if it is for the namespace. `true`: a device still has it.
pub(super) fn preempt(command: &mut Command, nsid: u32) -> bool {
    let (qp, index) = (&mut *command.queue, command.index);
    let request = &mut qp.requests[index];
    let all = request.plan == Plan::Flush { all: true };
    if request.sqe.nsid() != nsid && !all {
        return false;
    }
    match request.step {
        Step::Buffer => {
            qp.fetches.waiting.retain(|waiting| *waiting != index);
            command.finish(PREEMPTED);
            false
        }
        // Ends when its data is here.
        Step::Fetching => {
            request.status = PREEMPTED;
            false
        }
        Step::Executing if request.inflight == 0 && request.partner.is_none() => {
            command.finish(PREEMPTED);
            false
        }
        Step::Executing => {
            // A pair that waits for room in its device ends when it would have got it.
            if request.status.is_success() {
                request.status = PREEMPTED;
            }
            request.fenced = request.inflight > 0;
            let in_device = request.fenced;
            command.core.devices.abort_children(qp, index);
            in_device
        }
        // Nothing has been done for it: it meets the reservation when it runs.
        Step::Free | Step::Fused | Step::Deferred => false,
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
        let host = || {
            association
                .as_ref()
                .map_or_else(HostId::default, |a| a.hostid)
        };
        gate == 0 || self.rights.allows(gate, nsid, reservation, host, need)
    }
}

impl Fence {
    pub(super) fn is_about(&self, qp: &QueuePair) -> bool {
        !qp.is_admin()
            && qp.stage != Stage::Fresh
            && qp.association.as_ref().is_some_and(|a| {
                Arc::ptr_eq(&a.subsystem, &self.subsystem) && self.hosts.contains(&a.hostid)
            })
    }
}

/// The command, if its data is long enough.
fn with_data(ask: ReservationCommand, data: &[u8]) -> Option<Change> {
    Some(match ask {
        ReservationCommand::Register(what) => {
            let (keys, _) = RegisterData::read_from_prefix(data).ok()?;
            Change::Register {
                what,
                current: keys.crkey.get(),
                new: keys.nrkey.get(),
            }
        }
        ReservationCommand::Acquire(what) => {
            let (keys, _) = AcquireData::read_from_prefix(data).ok()?;
            Change::Acquire {
                what,
                current: keys.crkey.get(),
                preempt: keys.prkey.get(),
            }
        }
        ReservationCommand::Release(what) => {
            let (key, _) = U64::read_from_prefix(data).ok()?;
            Change::Release {
                what,
                current: key.get(),
            }
        }
        ReservationCommand::Report { .. } => return None,
    })
}

fn nothing() -> Effect {
    Effect {
        next: Default::default(),
        notices: Vec::new(),
        aborted: Vec::new(),
    }
}
