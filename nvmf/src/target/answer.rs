//! The end of every command: counted, noted if it failed, answered.

use nacre_bdev::Extents;
use nacre_hugepages::{Buf, Lent};
use nacre_nvmf_wire::{Cqe, Sqe, StatusCode};
use nacre_reactor::Nanos;

use super::association::ErrorRecord;
use super::group::Group;
use super::io::{Plan, Transfer};
use super::qpair::{QueuePair, Stage};
use super::request::ReqIndex;
use crate::transport::{ReqTag, Response};

/// What there is to say of a command that ends.
pub(super) struct Answer<'a> {
    pub sqe: &'a Sqe,
    pub plan: &'a Plan,
    /// Its place in the table, if it had one.
    pub index: ReqIndex,
    pub started: Nanos,
    pub cqe: Cqe,
    /// Controller-to-host data, of one sort or the other.
    pub data: Option<Buf>,
    pub lent: Option<Lent>,
}

impl Group {
    /// A command of the table ends here, whatever it was and however it ended.
    pub(crate) fn complete(&mut self, q: u32, index: ReqIndex, cqe: Cqe, now: Nanos) {
        let qp = self.queues[q as usize].as_mut().expect("queue pair");
        let request = &mut qp.requests[index];
        let (mut data, mut lent) = (None, None);
        let to_host = matches!(request.plan.transfer(&request.sqe), Transfer::ToHost(_));
        if to_host && cqe.status().is_success() {
            (data, lent) = (request.data.take(), request.lent.take());
        }
        let (sqe, plan, started) = (request.sqe, request.plan, request.started);
        let answer = Answer {
            sqe: &sqe,
            plan: &plan,
            index,
            started,
            cqe,
            data,
            lent,
        };
        self.conclude(q, answer, now);
        self.queue(q).requests.end(index);
    }

    pub(crate) fn finish(&mut self, q: u32, index: ReqIndex, status: StatusCode, now: Nanos) {
        let cid = self.queue(q).requests[index].sqe.cid();
        self.complete(q, index, Cqe::new(cid, status), now);
    }

    /// Every command ends here, but for those that were never taken.
    #[inline]
    pub(super) fn conclude(&mut self, q: u32, answer: Answer<'_>, now: Nanos) {
        let qp = self.queues[q as usize].as_mut().expect("queue pair");
        let Answer {
            sqe,
            plan,
            index,
            started,
            cqe,
            data,
            lent,
        } = answer;
        let status = cqe.status();
        let took = now.since(started);
        let bytes = u64::from(plan.bytes());
        qp.stats
            .finished(plan.kind(), bytes, status.is_success(), took);
        if !status.is_success() && qp.stage == Stage::Live {
            note_error(qp, sqe, plan, status);
        }
        if qp.stage == Stage::Ending {
            return;
        }
        let cid = sqe.cid();
        let mut extents = Extents::new();
        if let Some(data) = data {
            extents.push(data);
        }
        let response = Response {
            tag: ReqTag { cid, index },
            cqe: qp.seal(cqe),
            data: extents,
            sgl: sqe.sgl_descriptor(),
            lent,
        };
        self.ports[qp.transport].io.respond(qp.conn, response);
    }

    /// Answers a command that never got into the table.
    pub(super) fn refuse(&mut self, q: u32, sqe: Sqe, status: StatusCode) {
        let qp = self.queues[q as usize].as_mut().expect("queue pair");
        let tag = ReqTag {
            cid: sqe.cid(),
            index: 0,
        };
        let cqe = qp.seal(Cqe::new(sqe.cid(), status));
        let response = Response {
            tag,
            cqe,
            data: Extents::new(),
            sgl: sqe.sgl_descriptor(),
            lent: None,
        };
        self.ports[qp.transport].io.respond(qp.conn, response);
    }
}

/// Keeps what went wrong for the error information log (Base 5.1.12.1.2).
#[cold]
fn note_error(qp: &QueuePair, sqe: &Sqe, plan: &Plan, status: StatusCode) {
    let Some(association) = &qp.association else {
        return;
    };
    let lba = match *plan {
        Plan::Single { lba, .. } => lba,
        _ => 0,
    };
    association.record_error(ErrorRecord {
        number: 0,
        sqid: qp.qid,
        cid: sqe.cid(),
        status,
        lba,
        nsid: sqe.nsid(),
        opcode: sqe.opcode,
    });
}
