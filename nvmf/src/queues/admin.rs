//! Commands of an admin queue: plans their data transfer, passes them to the controller, and
//! completes them.

use std::sync::Arc;

use nacre_nvmf_wire::opcode::{DataTransfer, fabrics as fctype};
use nacre_nvmf_wire::{Sqe, StatusCode};
use nacre_reactor::Nanos;

use crate::controller::Outcome;
use crate::queues::command::Command;
use crate::queues::decode::{self, Plan, STRUCTURE_MOST};
use crate::queues::listing;
use crate::queues::queue_pair::{QueuePair, Stage};
use crate::queues::request::Step;
use crate::queues::reservation;
use crate::queues::reserving::ReservationChange;
use crate::queues::resources::{Abort, Resources};
use crate::subsystems::reservation::Change;
use crate::transport::CloseWhy;

/// The plan of a new command of an admin queue, except authentication commands.
pub(super) fn plan(qp: &QueuePair, sqe: &Sqe) -> Result<Plan, StatusCode> {
    if sqe.is_fabrics() && sqe.fctype() == fctype::CONNECT {
        return Err(StatusCode::COMMAND_SEQUENCE_ERROR.with_dnr());
    }
    let controller = qp.controller.as_ref().expect("admin queue");
    let bytes = controller.data_bytes(sqe)?;
    let from_host = sqe.data_transfer() == DataTransfer::HostToController;
    if bytes > qp.limits.max_transfer_bytes {
        return Err(StatusCode::INVALID_FIELD.with_dnr());
    }
    let most = if from_host { STRUCTURE_MOST } else { u32::MAX };
    if bytes > 0 {
        decode::check_sgl(sqe, (bytes, most), from_host, &qp.limits)?;
    }
    Ok(Plan::Admin { bytes })
}

/// Executes an admin command that has its buffer and data.
pub(super) fn run(command: &mut Command) {
    let sqe = *command.sqe();
    let request = command.request();
    let mut data = request.data.take();
    let to_host = sqe.data_transfer() == DataTransfer::ControllerToHost;
    let bytes = data.as_mut().and_then(|d| d.bytes_mut());
    // Clear the buffer, so that its former contents do not leak to the host.
    let bytes = match bytes {
        Some(bytes) => {
            if to_host {
                bytes.fill(0);
            }
            bytes
        }
        None => &mut [],
    };
    let controller = command.queue.controller.as_mut().expect("admin queue");
    let outcome: Outcome = controller.execute(&sqe, bytes, command.now);
    command.request().data = data;
    carry_out(command, outcome);
    if command.queue.stage == Stage::Live {
        deliver_events(command.core, command.queue, command.now);
    }
}

/// Executes the part of an admin command that the controller leaves to its queue.
fn carry_out(command: &mut Command, outcome: Outcome) {
    match outcome {
        Outcome::Done(cqe) => command.complete(cqe),
        Outcome::Deferred => command.request().step = Step::Deferred,
        Outcome::Abort { sqid, cid } => {
            command.request().step = Step::Deferred;
            let admin = command.queue.name_of(command.index);
            command.core.aborts.push_back(Abort { admin, sqid, cid });
        }
        Outcome::Persist { on, namespaces } => {
            let association = command.queue.association.as_ref().expect("admin queue");
            let subsystem = command.queue.subsystem.as_ref().expect("admin queue");
            let errand = ReservationChange {
                subsystem: Arc::clone(subsystem),
                host: association.hostid,
                change: Change::Persist(on),
                todo: namespaces,
            };
            reservation::start(command, errand);
        }
        Outcome::ListAllocated { bdev, query } => listing::start(command, &bdev, query),
    }
}

/// The periodic work of an admin queue: the controller's timers and events.
pub(super) fn upkeep(core: &mut Resources, qp: &mut QueuePair, now: Nanos) {
    let controller = qp.controller.as_mut().expect("admin queue");
    if let Some(why) = controller.expired(now) {
        let association = qp.association.as_ref().expect("admin queue");
        let (host, cntlid, peer) = (&association.hostnqn, association.cntlid, &qp.ends.peer);
        tracing::warn!(
            subsystem = %association.subnqn, %host, cntlid, %peer,
            "closing the host's connections: {}", why.text()
        );
        association.tear_down(why);
        return core.close(qp, CloseWhy::Now);
    }
    deliver_events(core, qp, now);
}

/// Completes outstanding event requests with recorded events.
fn deliver_events(core: &mut Resources, qp: &mut QueuePair, now: Nanos) {
    while let Some(cqe) = qp.controller.as_mut().and_then(|c| c.next_event()) {
        match qp.requests.find(cqe.cid()) {
            Some(index) => core.command(qp, index, now).complete(cqe),
            None => debug_assert!(false, "an event request that is not in the table"),
        }
    }
}
