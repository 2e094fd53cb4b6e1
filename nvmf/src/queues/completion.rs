//! Completes commands: counts them, records failures, and builds the response.

use nacre_bdev::Extents;
use nacre_nvmf_wire::identify::nsid;
use nacre_nvmf_wire::{Cqe, Fuse, Sqe, StatusCode, opcode};
use nacre_reactor::Nanos;

use crate::queues::command::Command;
use crate::queues::decode::{Plan, Transfer};
use crate::queues::queue_pair::{FusedFirst, QueuePair, Stage};
use crate::queues::request::{Request, Step};
use crate::subsystems::association::ErrorRecord;
use crate::subsystems::core_handle::ReqIndex;
use crate::subsystems::stats::Kind;
use crate::transport::{ReqTag, Response};

/// The operation of a completed command, for statistics and the error log.
#[derive(Clone, Copy)]
pub(super) struct Done {
    pub kind: Kind,
    pub bytes: u32,
    /// The start LBA of an I/O command.
    pub lba: u64,
    pub started: Nanos,
}

impl Command<'_> {
    /// Completes a command with this completion, and frees its place in the table.
    pub(crate) fn complete(&mut self, cqe: Cqe) {
        let (qp, index) = (&mut *self.queue, self.index);
        let request = &mut qp.requests[index];
        let (mut data, mut zero_copy) = (Extents::new(), None);
        let to_host = matches!(request.plan.transfer(&request.sqe), Transfer::ToHost(_));
        if to_host && cqe.status().is_success() {
            data.extend(request.data.take());
            zero_copy = request.zero_copy.take();
        }
        let sqe = request.sqe;
        let done = Done {
            kind: request.plan.kind(),
            bytes: request.plan.bytes(),
            lba: match request.plan {
                Plan::Single { lba, .. } => lba,
                _ => 0,
            },
            started: request.started,
        };
        let tag = qp.tag(index);
        if let Some(cqe) = qp.conclude(&sqe, done, cqe, self.now) {
            let response = Response {
                tag,
                cqe,
                data,
                sgl: sqe.sgl_descriptor(),
                zero_copy,
            };
            self.core.ports.respond(qp, response);
        }
        if sqe.fuse() != Fuse::Normal {
            self.fused_half_ends();
        }
        self.queue.requests.end(index);
    }

    pub(crate) fn finish(&mut self, status: StatusCode) {
        let cid = self.sqe().cid();
        self.complete(Cqe::new(cid, status));
    }

    /// Fails a command. One that waits for a buffer or for data from the host completes after that
    /// wait.
    pub(super) fn fail(&mut self, status: StatusCode) {
        let request = self.request();
        if matches!(request.step, Step::Fetching | Step::Buffer) {
            request.status = status;
        } else {
            self.finish(status);
        }
    }

    /// Completes both commands of the pair whose second command this is.
    pub(crate) fn end_pair(&mut self, (first, status): (ReqIndex, StatusCode), second: StatusCode) {
        self.queue.requests.unpair(self.index);
        self.other(first).finish(status);
        self.finish(second);
    }

    /// Handles a command of a pair that failed alone: damaged data, refused or aborted. The other
    /// command fails as well, even if it arrives later.
    #[cold]
    fn fused_half_ends(&mut self) {
        let (qp, index) = (&mut *self.queue, self.index);
        if qp.fused == Some(FusedFirst::Waiting(index)) {
            qp.fused = Some(FusedFirst::Failed);
        } else if let Some(other) = qp.requests.unpair(index) {
            self.other(other).fail(StatusCode::ABORTED_FAILED_FUSED);
        }
    }
}

/// The response to a command that got no place in the table.
pub(super) fn refusal(qp: &mut QueuePair, sqe: &Sqe, status: StatusCode) -> Response {
    Response {
        tag: ReqTag {
            cid: sqe.cid(),
            index: 0,
        },
        cqe: qp.seal(Cqe::new(sqe.cid(), status)),
        data: Extents::new(),
        sgl: sqe.sgl_descriptor(),
        zero_copy: None,
    }
}

impl QueuePair {
    /// Completes a command without data successfully; the caller sends the response.
    pub(super) fn success_of(&mut self, index: ReqIndex, now: Nanos) -> Option<Response> {
        let Request { sqe, started, .. } = self.requests[index];
        let tag = self.tag(index);
        let done = Done {
            kind: Kind::Other,
            bytes: 0,
            lba: 0,
            started,
        };
        let cqe = self.conclude(&sqe, done, Cqe::success(sqe.cid()), now);
        self.requests.end(index);
        cqe.map(|cqe| Response {
            tag,
            cqe,
            data: Extents::new(),
            sgl: sqe.sgl_descriptor(),
            zero_copy: None,
        })
    }

    /// Ends every accepted command: counts it, records a failure, and fills in the completion.
    /// `None`: the connection is closed, so no response is sent.
    #[inline]
    pub(super) fn conclude(&mut self, sqe: &Sqe, done: Done, cqe: Cqe, now: Nanos) -> Option<Cqe> {
        let status = cqe.status();
        let (bytes, took) = (u64::from(done.bytes), now.since(done.started));
        self.stats
            .finished(done.kind, bytes, status.is_success(), took);
        if !status.is_success() && self.stage == Stage::Live {
            self.note_error(sqe, done.lba, status);
        }
        (self.stage != Stage::Ending).then(|| self.seal(cqe))
    }

    /// Adds an entry to the error information log (Base 5.16.1.2).
    #[cold]
    fn note_error(&self, sqe: &Sqe, lba: u64, status: StatusCode) {
        let Some(association) = &self.association else {
            return;
        };
        // Aborted event requests at the end of a controller are not errors.
        let event_request = self.qid == 0 && sqe.opcode == opcode::admin::ASYNC_EVENT_REQUEST;
        if event_request && status == StatusCode::ABORT_REQUESTED {
            return;
        }
        tracing::debug!(
            target: "nacre_nvmf::failed",
            subsystem = %association.subnqn,
            host = %association.hostnqn,
            qid = self.qid,
            "command failed: {}",
            failure(self.qid, sqe, status),
        );
        association.record_error(ErrorRecord {
            number: 0,
            sqid: self.qid,
            cid: sqe.cid(),
            status,
            lba,
            // In fabrics commands, these bytes contain the command type.
            nsid: if sqe.is_fabrics() { 0 } else { sqe.nsid() },
            opcode: sqe.opcode,
        });
    }
}

/// The log text of a failed command: `Read of namespace 1: LBA Out of Range (…)`.
fn failure(qid: u16, sqe: &Sqe, status: StatusCode) -> String {
    if sqe.is_fabrics() {
        let status = status.of_fabrics();
        return match opcode::fabrics::name(sqe.fctype()) {
            Some(name) => format!("{name}: {status}"),
            None => format!("fabrics command {:#04x}: {status}", sqe.fctype()),
        };
    }
    let name = match qid {
        0 => opcode::admin::name(sqe.opcode),
        _ => opcode::io::name(sqe.opcode),
    };
    let name = name.map_or_else(|| format!("opcode {:#04x}", sqe.opcode), str::to_owned);
    match sqe.nsid() {
        0 => format!("{name}: {status}"),
        nsid::BROADCAST => format!("{name} of all namespaces: {status}"),
        nsid => format!("{name} of namespace {nsid}: {status}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_named() {
        let command = |opcode, nsid| Sqe::for_namespace(opcode, 1, nsid);
        let fabrics = |fctype: u8| command(opcode::FABRICS, fctype.into());
        let status = StatusCode::INVALID_FIELD.with_dnr();
        for (qid, sqe, expected) in [
            (1, command(opcode::io::READ, 7), "Read of namespace 7"),
            (0, command(opcode::admin::GET_LOG_PAGE, 0), "Get Log Page"),
            (
                1,
                command(opcode::io::FLUSH, nsid::BROADCAST),
                "Flush of all namespaces",
            ),
            (3, command(0x7e, 1), "opcode 0x7e of namespace 1"),
            (0, fabrics(opcode::fabrics::PROPERTY_GET), "Property Get"),
            (1, fabrics(0x7e), "fabrics command 0x7e"),
        ] {
            let expected =
                format!("{expected}: Invalid Field in Command (sct 0x0, sc 0x02, do not retry)");
            assert_eq!(failure(qid, &sqe, status), expected);
        }
    }
}
