//! The reservation commands of a core that are not complete yet.
//!
//! ```text
//! decide ─▶ store (if it persists) ─▶ install ─▶ notify ─▶ wait for aborted commands ─▶ complete
//!   ▲            │ another command's outcome is being stored
//!   └── wait ◀───┘
//! ```
//!
//! A pending command is an [`Op`] in its core's list, which is checked each turn. The core or store
//! that it waits for wakes its core. A command that has begun is executed to the end even if its
//! queue pair is removed.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use nacre_nvmf_wire::StatusCode;

use crate::queues::queue_pairs::QueuePairs;
use crate::subsystems::core_handle::{Fence, GroupHandle, ReqRef};
use crate::subsystems::reservation::state::{Change, Effect, HostId};
use crate::subsystems::reservation::{
    Decision, FAILED, OPEN, STORED, Several, StoreAnswer, Ticket,
};
use crate::subsystems::subsystem::Subsystem;

/// The pending work of a core.
#[derive(Default)]
pub(crate) struct ReservationWork {
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

/// A pending command.
struct Op {
    request: ReqRef,
    errand: ReservationChange,
    waits: WaitsFor,
}

enum WaitsFor {
    /// Another command of the same namespace is pending.
    Turn,
    /// The next state is being stored.
    Storing(Arc<StoreAnswer>, Effect),
    Fence(Arc<Fence>),
}

/// Commands of this core that a fence waits for.
struct Drain {
    fence: Arc<Fence>,
    requests: Vec<ReqRef>,
}

impl ReservationWork {
    pub(crate) fn is_idle(&self) -> bool {
        self.ops.is_empty() && self.drains.is_empty()
    }

    /// Starts the changes of the command `request`. Returns its status if it is complete.
    pub(crate) fn start(
        &mut self,
        request: ReqRef,
        errand: ReservationChange,
        handle: &GroupHandle,
    ) -> Option<StatusCode> {
        let op = Op {
            request,
            errand,
            waits: WaitsFor::Turn,
        };
        self.note(op.decide(handle))
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

    /// Stores a command that must wait. `Some`: the command is complete.
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

    /// Informs the fences whose commands on this core have ended. Returns their number.
    pub(crate) fn report_drained(&mut self, queues: &QueuePairs) -> u32 {
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

/// Raises a fence on every core with I/O queues of these hosts, which then abort their commands for
/// the namespace. `None`: there is no such core.
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
        subsystem: subsystem.id,
        nsid,
        hosts,
        cores: AtomicUsize::new(groups.len()),
        owner: handle.clone(),
    });
    // This core, too, in its next turn: it may be in the middle of a list of requests.
    groups.iter().for_each(|g| g.raise(Arc::clone(&fence)));
    (!groups.is_empty()).then_some(fence)
}

fn nothing() -> Effect {
    Effect {
        next: Default::default(),
        notices: Vec::new(),
        aborted: Vec::new(),
    }
}
