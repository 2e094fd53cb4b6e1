//! Executes reservation commands (Base 7.2 to 7.5) on a core, and checks other commands for
//! reservation conflicts.
//!
//! `reserving.rs` decides about their changes and has the list of pending commands.

use std::sync::Arc;

use nacre_bdev::Op as DeviceOp;
use nacre_nvmf_wire::StatusCode;
use nacre_nvmf_wire::commands::reservation::{AcquireData, RegisterData};
use zerocopy::FromBytes;
use zerocopy::little_endian::U64;

use crate::queues::command::Command;
use crate::queues::decode::{Plan, ReservationCommand};
use crate::queues::queue_pair::{QueuePair, Stage};
use crate::queues::request::Step;
use crate::queues::reserving::ReservationChange;
use crate::subsystems::core_handle::Fence;
use crate::subsystems::reservation::Reservation;
use crate::subsystems::reservation::report::report;
use crate::subsystems::reservation::state::{Change, HostId, Rights};

const PREEMPTED: StatusCode = StatusCode::ABORTED_PREEMPT_AND_ABORT;

/// Executes a reservation command that has its data.
pub(super) fn run(command: &mut Command, ask: ReservationCommand) {
    let (qp, index) = (&mut *command.queue, command.index);
    let association = Arc::clone(qp.association.as_ref().expect("live queue"));
    let subsystem = Arc::clone(qp.subsystem.as_ref().expect("live queue"));
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
        subsystem,
        host: association.hostid,
        change,
        todo: vec![(nsid, reservation)],
    };
    start(command, errand);
}

/// Starts a command's changes. The request completes after all of them.
pub(super) fn start(command: &mut Command, errand: ReservationChange) {
    command.request().step = Step::Deferred;
    let request = command.queue.name_of(command.index);
    let (reserving, handle) = (&mut command.core.reserving, &command.core.handle);
    if let Some(status) = reserving.start(request, errand, handle) {
        command.finish(status);
    }
}

/// The reservation that forbids an I/O command that is about to execute, or that is unknown.
pub(super) fn conflict(command: &mut Command) -> Option<Arc<Reservation>> {
    let (qp, index) = (&mut *command.queue, command.index);
    let request = &qp.requests[index];
    let required = required_rights(&request.plan)?;
    if let Plan::Flush { all: true } = request.plan {
        let view = Arc::clone(&qp.view);
        let mut all = view.iter();
        let forbids =
            all.find(|namespace| !qp.may(namespace.nsid, &namespace.reservation, required));
        return forbids.map(|namespace| Arc::clone(&namespace.reservation));
    }
    let namespace = qp.namespace_of(index)?;
    if namespace.reservation.gate() == 0 {
        return None;
    }
    let (nsid, reservation) = (namespace.nsid, Arc::clone(&namespace.reservation));
    (!qp.may(nsid, &reservation, required)).then_some(reservation)
}

/// Completes a command that a reservation forbids, or whose reservation is unknown, and the other
/// command of its fused pair.
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

/// Aborts a command if it is for the namespace. Returns true if a device still has it.
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

/// The rights that an I/O command requires (Base figure "Command Behavior in the Presence of a
/// Reservation"). Admin commands that depend on a reservation (Format, Sanitize, Namespace
/// Management and Attachment, Security) are not supported.
fn required_rights(plan: &Plan) -> Option<Rights> {
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
    /// True if its host has the right `required`.
    #[inline]
    pub(crate) fn may(&mut self, nsid: u32, reservation: &Reservation, required: Rights) -> bool {
        let gate = reservation.gate();
        let association = &self.association;
        let host = || {
            association
                .as_ref()
                .map_or_else(HostId::default, |a| a.hostid)
        };
        gate == 0 || self.rights.allows(gate, nsid, reservation, host, required)
    }
}

impl Fence {
    pub(super) fn is_about(&self, qp: &QueuePair) -> bool {
        !qp.is_admin()
            && qp.stage != Stage::Fresh
            && qp
                .subsystem
                .as_ref()
                .is_some_and(|s| s.id == self.subsystem)
            && qp
                .association
                .as_ref()
                .is_some_and(|a| self.hosts.contains(&a.hostid))
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
