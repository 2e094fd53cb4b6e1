//! Running I/O commands on devices: children, fused pairs, aborts.
//!
//! A command is one or several device I/Os, its children; a few of them are under way at once. A
//! command whose child finds the device full waits in the device's list and goes on from there.

use std::sync::Arc;

use nacre_bdev::{Completion, Io, Op};
use nacre_nvmf_wire::{Cqe, Fuse, Sqe, StatusCode};
use nacre_reactor::Nanos;

use crate::queues::decode::{self, Plan};
use crate::queues::device;
use crate::queues::group::Group;
use crate::queues::queue_pair::{FusedFirst, Stage};
use crate::queues::request::Step;
use crate::queues::waiting::current;
use crate::subsystems::association::Association;
use crate::subsystems::core_handle::ReqIndex;
use crate::subsystems::core_handle::ReqRef;
use crate::subsystems::core_handle::{AbortReply, GroupMessage};

/// Children of one command in flight at once: bounds the load that a single Dataset Management or
/// Copy command can put on a device.
const PARALLEL_CHILDREN: u32 = 8;

impl Group {
    /// An I/O command that is no half of a pair has its buffer and its data.
    #[inline]
    pub(crate) fn run_io(&mut self, q: u32, index: ReqIndex, now: Nanos) {
        if !self.run_at_once(q, index) {
            self.run_children(q, index, now);
        }
    }

    /// What nearly every command is: one I/O of a device that is open and has room. `false`: it is
    /// not, and nothing was done.
    #[inline]
    fn run_at_once(&mut self, q: u32, index: ReqIndex) -> bool {
        let qp = self.queues[q as usize].as_mut().expect("queue pair");
        let request = &mut qp.requests[index];
        let Plan::Single {
            op,
            flags,
            lba,
            blocks,
            ..
        } = request.plan
        else {
            return false;
        };
        let namespace = match qp.view.get(request.sqe.nsid()) {
            Some(namespace) if namespace.serial == request.namespace => namespace,
            _ => return false,
        };
        let association = qp.association.as_deref();
        if !qp.rights.may(namespace, association, op) {
            return false;
        }
        let Some(slot) = namespace.slot(self.handle.core) else {
            return false;
        };
        if self.devices.waiting(slot) > 0 {
            return false;
        }
        let mut io = Io::new(device::token(q, index, 0), op, lba, blocks).flags(flags);
        io.data.extend(request.data.take());
        if let Err((_, mut io)) = self.devices.submit(slot, io) {
            request.data = io.data.pop();
            return false;
        }
        (request.children, request.next_child, request.inflight) = (1, 1, 1);
        qp.inflight += 1;
        true
    }

    pub(crate) fn run_children(&mut self, q: u32, index: ReqIndex, now: Nanos) {
        if self.conflicts(q, index) {
            return self.refuse_conflict(q, index, now);
        }
        let qp = self.queue(q);
        let request = &qp.requests[index];
        let children = match request.plan {
            Plan::Single { .. } | Plan::Flush { all: false } => 1,
            // As many as there turn out to be: some may come and go meanwhile.
            Plan::Flush { all: true } => u32::MAX,
            Plan::Deallocate { ranges } | Plan::Copy { ranges, .. } => ranges,
            Plan::Hints { .. } | Plan::None | Plan::Admin { .. } | Plan::Reservation(_) => 0,
        };
        if let Plan::Deallocate { .. } | Plan::Copy { .. } = request.plan
            && let Some(data) = &request.data
            && let Some(namespace) = qp.namespace_of(index)
            && let Err(status) =
                decode::check_ranges(&request.plan, data, &namespace.geometry(), &qp.limits)
        {
            return self.finish(q, index, status, now);
        }
        qp.requests[index].children = children;
        self.advance(q, index, None, now);
    }

    /// Submits children until all are, or enough are under way, or the device is full; ends the
    /// command when nothing is left to do. `from`: it comes from the head of that device's list.
    /// Answers whether it is there again.
    fn advance(&mut self, q: u32, index: ReqIndex, from: Option<usize>, now: Nanos) -> bool {
        loop {
            let request = &self.queue(q).requests[index];
            let stop = request.abort || !request.status.is_success();
            if request.next_child >= request.children || stop {
                if request.inflight == 0 {
                    self.end_io(q, index, now);
                }
                return false;
            }
            if request.inflight >= PARALLEL_CHILDREN {
                return false;
            }
            let (slot, nsid) = match self.device_of(q, index, now) {
                Ok(Some(device)) => device,
                Ok(None) => {
                    let request = &mut self.queue(q).requests[index];
                    request.children = request.next_child;
                    continue;
                }
                Err(status) => {
                    self.queue(q).requests[index].status = status;
                    continue;
                }
            };
            let first = from == Some(slot);
            let behind = !first && self.devices.waiting(slot) > 0;
            if behind || !self.submit_child(q, index, slot, nsid) {
                self.queue(q).requests[index].waiting = true;
                let waiting = self.name_of(q, index);
                let queues = &self.queues;
                let waits = |known: &ReqRef| current(queues, known).is_some_and(|r| r.waiting);
                self.devices.wait(slot, waiting, first, waits);
                return first;
            }
        }
    }

    /// The place of this core's queue on the device of the next child, opened on demand, and that
    /// child's namespace. `None`: all namespaces have been flushed.
    fn device_of(
        &mut self,
        q: u32,
        index: ReqIndex,
        now: Nanos,
    ) -> Result<Option<(usize, u32)>, StatusCode> {
        let qp = self.queue_ref(q);
        let request = &qp.requests[index];
        let namespace = match request.plan {
            // In the order of their ids, not of their places: those move as namespaces come and go.
            Plan::Flush { all: true } => match qp.view.after(request.flushed) {
                None => return Ok(None),
                next => next,
            },
            _ => qp.namespace_of(index),
        };
        let namespace = namespace.ok_or(StatusCode::INVALID_NAMESPACE_OR_FORMAT.with_dnr())?;
        let nsid = namespace.nsid;
        // Without a clone: its count is one that all cores share.
        if let Some(slot) = namespace.slot(self.handle.core) {
            return Ok(Some((slot, nsid)));
        }
        let namespace = Arc::clone(namespace);
        match self.open_device(&namespace, now) {
            Some(slot) => Ok(Some((slot, nsid))),
            None => Err(StatusCode::INTERNAL_PATH_ERROR),
        }
    }

    /// `false`: the device is full; nothing changed.
    fn submit_child(&mut self, q: u32, index: ReqIndex, slot: usize, nsid: u32) -> bool {
        let qp = self.queues[q as usize].as_mut().expect("queue pair");
        let fused = (qp.requests[index].sqe.fuse() == Fuse::Second)
            .then(|| qp.requests[index].partner)
            .flatten();
        let request = &mut qp.requests[index];
        let child = request.next_child;
        let token = device::token(q, index, child);
        let mut io = match request.plan {
            Plan::Single {
                op,
                flags,
                lba,
                blocks,
                ..
            } => Io::new(token, op, lba, blocks).flags(flags),
            Plan::Flush { .. } => Io::new(token, Op::Flush, 0, 0),
            Plan::Deallocate { .. } => {
                let (start, blocks) =
                    decode::dsm_range(request.data.as_ref().expect("ranges"), child as usize);
                Io::new(token, Op::Unmap, start, blocks)
            }
            Plan::Copy {
                destination,
                flags,
                ranges,
            } => {
                let data = request.data.as_ref().expect("ranges");
                let mut ranges = decode::copy_ranges(data, ranges);
                let before: u64 = ranges
                    .by_ref()
                    .take(child as usize)
                    .map(|(_, n)| u64::from(n))
                    .sum();
                let (source, blocks) = ranges.next().expect("as many ranges as children");
                Io::new(token, Op::Copy, destination + before, blocks)
                    .flags(flags)
                    .source(source)
            }
            Plan::Hints { .. } | Plan::None | Plan::Admin { .. } | Plan::Reservation(_) => {
                unreachable!("a command without children")
            }
        };
        if let Plan::Single { .. } = request.plan {
            io.data.extend(request.data.take());
        }
        if let Some(first) = fused {
            // Compare data first, then what to write.
            io.op = Op::CompareAndWrite;
            let write = io.data.pop();
            io.data.extend(qp.requests[first].data.take());
            io.data.extend(write);
        }
        match self.devices.submit(slot, io) {
            Ok(()) => {
                let request = &mut qp.requests[index];
                request.next_child += 1;
                request.flushed = nsid;
                request.inflight += 1;
                qp.inflight += 1;
                true
            }
            Err((_, mut io)) => {
                if matches!(qp.requests[index].plan, Plan::Single { .. }) {
                    qp.requests[index].data = io.data.pop();
                }
                if let Some(first) = fused {
                    qp.requests[first].data = io.data.pop();
                }
                false
            }
        }
    }

    /// A child came back from the device.
    pub(crate) fn child_done(
        &mut self,
        q: u32,
        index: ReqIndex,
        child: u32,
        mut completion: Completion,
        now: Nanos,
    ) {
        let qp = self.queue(q);
        qp.inflight -= 1;
        let request = &mut qp.requests[index];
        request.inflight -= 1;
        if !completion.status.is_ok() {
            request.failed_child = request.failed_child.min(child);
            if request.status.is_success() {
                let retry_delays = qp.association.as_ref().is_some_and(|a| a.retry_delays());
                request.status = decode::status_code(completion.status, retry_delays);
            }
        }
        if matches!(request.plan, Plan::Single { op: Op::Read, .. }) {
            request.data = completion.data.pop();
            request.lent = completion.lent;
        }
        if qp.stage == Stage::Ending {
            if qp.requests[index].inflight == 0 {
                qp.requests.end(index);
            }
            return self.reap(q, now);
        }
        let request = &qp.requests[index];
        if request.inflight == 0 && request.next_child == request.children {
            return self.end_io(q, index, now);
        }
        if !request.waiting {
            self.advance(q, index, None, now);
        }
    }

    /// All children are done, or no more will be submitted.
    fn end_io(&mut self, q: u32, index: ReqIndex, now: Nanos) {
        let request = &self.queue(q).requests[index];
        let mut status = request.status;
        if status.is_success() && request.abort && request.next_child < request.children {
            status = StatusCode::ABORT_REQUESTED;
        }
        if let Some(first) = request.partner {
            // The halves of a fused pair fail together, the one that is to blame says why.
            let second = if status.is_success() {
                status
            } else {
                StatusCode::ABORTED_FAILED_FUSED
            };
            return self.end_pair(q, (first, status), (index, second), now);
        }
        if let Plan::Copy { .. } = request.plan
            && !status.is_success()
        {
            // Dword 0 names the lowest range that was not copied (NVM 3.2.2).
            let cid = request.sqe.cid();
            let done = request.failed_child.min(request.next_child);
            return self.complete(q, index, Cqe::new(cid, status).with_dword0(done), now);
        }
        self.finish(q, index, status, now);
    }

    /// Requests that found a device full, in order, while it takes them.
    pub(crate) fn resubmit(&mut self, slot: usize, now: Nanos) -> u32 {
        let mut did = 0;
        while self.devices.waiting(slot) > 0 {
            let Some(waiting) = self.devices.device(slot).waiting.pop_front() else {
                break;
            };
            if !current(&self.queues, &waiting).is_some_and(|request| request.waiting) {
                continue;
            }
            self.queue(waiting.queue).requests[waiting.request].waiting = false;
            if self.advance(waiting.queue, waiting.request, Some(slot), now) {
                break;
            }
            did += 1;
        }
        did
    }

    // Fused pairs (Base 3.4.4): a Compare and the Write that follows it directly.

    /// Sees to the pairing of a command that just arrived; `valid`: it was decoded. Answers whether
    /// the command goes on.
    pub(crate) fn pair_fused(&mut self, q: u32, index: ReqIndex, valid: bool, now: Nanos) -> bool {
        let fuse = self.queue(q).requests[index].sqe.fuse();
        let first = self.queue(q).fused.take();
        match (first, fuse) {
            (Some(FusedFirst::Waiting(first)), Fuse::Second) if valid => {
                let requests = &mut self.queue(q).requests;
                let (a, b) = (&requests[first], &requests[index]);
                let same = a.sqe.nsid == b.sqe.nsid
                    && a.namespace == b.namespace
                    && span(&a.plan) == span(&b.plan);
                if !same {
                    self.fail(q, first, StatusCode::INVALID_FIELD.with_dnr(), now);
                    self.finish(q, index, StatusCode::INVALID_FIELD.with_dnr(), now);
                    return false;
                }
                requests[index].partner = Some(first);
                true
            }
            (Some(FusedFirst::Waiting(first)), Fuse::Second) => {
                self.fail(q, first, StatusCode::ABORTED_FAILED_FUSED, now);
                true
            }
            (Some(FusedFirst::Failed), Fuse::Second) => {
                self.finish(q, index, StatusCode::ABORTED_FAILED_FUSED, now);
                false
            }
            (None, Fuse::Second) => {
                self.finish(q, index, StatusCode::ABORTED_MISSING_FUSED, now);
                false
            }
            (first, fuse) => {
                if let Some(FusedFirst::Waiting(first)) = first {
                    self.fail(q, first, StatusCode::ABORTED_MISSING_FUSED, now);
                }
                if fuse == Fuse::First {
                    let half = if valid {
                        FusedFirst::Waiting(index)
                    } else {
                        FusedFirst::Failed
                    };
                    self.queue(q).fused = Some(half);
                }
                true
            }
        }
    }

    /// Ends a command that may be waiting for its data from the host: then when that is here.
    fn fail(&mut self, q: u32, index: ReqIndex, status: StatusCode, now: Nanos) {
        let request = &mut self.queue(q).requests[index];
        if matches!(request.step, Step::Fetching | Step::Buffer) {
            request.status = status;
        } else {
            self.finish(q, index, status, now);
        }
    }

    /// One half of a fused pair has its data; runs the pair when both have.
    pub(crate) fn run_fused(&mut self, q: u32, index: ReqIndex, now: Nanos) {
        let requests = &mut self.queue(q).requests;
        requests[index].step = Step::Fused;
        let second = match requests[index].sqe.fuse() {
            Fuse::Second => Some(index),
            _ => requests.second_of(index),
        };
        let Some(second) = second else { return };
        let Some(first) = requests[second].partner else {
            return;
        };
        if requests[first].step != Step::Fused || requests[second].step != Step::Fused {
            return;
        }
        requests[first].step = Step::Held;
        requests[second].step = Step::Executing;
        self.run_children(q, second, now);
    }

    /// Ends both halves of a pair.
    pub(crate) fn end_pair(
        &mut self,
        q: u32,
        (first, one): (ReqIndex, StatusCode),
        (second, two): (ReqIndex, StatusCode),
        now: Nanos,
    ) {
        self.queue(q).requests.unpair(second);
        self.finish(q, first, one, now);
        self.finish(q, second, two, now);
    }

    /// Half of a pair ends alone: its data was damaged, it was refused or aborted. The other half
    /// fails with it, whether it is here already or still has to come.
    #[cold]
    pub(super) fn fused_half_ends(&mut self, q: u32, index: ReqIndex, now: Nanos) {
        let qp = self.queue(q);
        if qp.fused == Some(FusedFirst::Waiting(index)) {
            qp.fused = Some(FusedFirst::Failed);
        } else if let Some(other) = qp.requests.unpair(index) {
            self.fail(q, other, StatusCode::ABORTED_FAILED_FUSED, now);
        }
    }

    /// A command was refused before it got into the table. The other half of its pair, or a first
    /// half before it without a second, stops waiting.
    #[cold]
    pub(super) fn fused_half_refused(&mut self, q: u32, sqe: &Sqe, now: Nanos) {
        let qp = self.queue(q);
        if qp.is_admin() || qp.stage != Stage::Live {
            return;
        }
        let first = qp.fused.take();
        if sqe.fuse() == Fuse::First {
            qp.fused = Some(FusedFirst::Failed);
        }
        if let Some(FusedFirst::Waiting(first)) = first {
            let status = match sqe.fuse() {
                Fuse::Second => StatusCode::ABORTED_FAILED_FUSED,
                _ => StatusCode::ABORTED_MISSING_FUSED,
            };
            self.fail(q, first, status, now);
        }
    }

    // Abort.

    /// The Abort command `index` of admin queue `q` names a command of queue `sqid`.
    pub(crate) fn start_abort(&mut self, q: u32, index: ReqIndex, sqid: u16, cid: u16, now: Nanos) {
        let qp = self.queue(q);
        let association = Arc::clone(qp.association.as_ref().expect("admin queue"));
        let reply = AbortReply {
            group: self.handle.clone(),
            request: self.name_of(q, index),
        };
        let Some(info) = association.queue(sqid) else {
            return self.abort_answered(&reply, false, now);
        };
        if info.group.core == self.handle.core {
            let aborted = self.abort_command(&association, sqid, cid, now);
            return self.abort_answered(&reply, aborted, now);
        }
        let message = GroupMessage::Abort {
            association,
            qid: sqid,
            cid,
            reply: reply.clone(),
        };
        if info.group.send(message).is_err() {
            self.abort_answered(&reply, false, now);
        }
    }

    pub(crate) fn abort_answered(&mut self, reply: &AbortReply, aborted: bool, now: Nanos) {
        let admin = reply.request;
        if self.is_current(admin)
            && self.queue(admin.queue).requests[admin.request].step == Step::Held
        {
            let cid = self.queue(admin.queue).requests[admin.request].sqe.cid();
            // Dword 0 bit 0: the command was not aborted (Base 5.1.1).
            let cqe = Cqe::success(cid).with_dword0(u32::from(!aborted));
            if let Some(controller) = &mut self.queue(admin.queue).controller {
                controller.abort_finished();
            }
            self.complete(admin.queue, admin.request, cqe, now);
        }
    }

    /// Aborts a command of a queue of this core. `true`: it ends with Command Abort Requested.
    pub(crate) fn abort_command(
        &mut self,
        association: &Arc<Association>,
        qid: u16,
        cid: u16,
        now: Nanos,
    ) -> bool {
        let is_it = |qp: &crate::queues::queue_pair::QueuePair| {
            qp.qid == qid
                && qp
                    .association
                    .as_ref()
                    .is_some_and(|a| Arc::ptr_eq(a, association))
        };
        let Some(q) = self
            .queues
            .iter()
            .position(|qp| qp.as_ref().is_some_and(|qp| is_it(qp)))
        else {
            return false;
        };
        let q = q as u32;
        let qp = self.queue(q);
        if qp.stage != Stage::Live {
            return false;
        }
        let Some(index) = qp.requests.find(cid) else {
            return false;
        };
        match qp.requests[index].step {
            Step::Buffer => {
                self.queue(q).unfetched.retain(|waiting| *waiting != index);
                self.finish(q, index, StatusCode::ABORT_REQUESTED, now);
                true
            }
            Step::Fetching => {
                qp.requests[index].abort = true;
                true
            }
            Step::Executing | Step::Fused if qp.requests[index].inflight == 0 => {
                self.finish(q, index, StatusCode::ABORT_REQUESTED, now);
                true
            }
            Step::Executing => {
                let aborted = self.abort_children(q, index);
                if aborted {
                    self.queue(q).requests[index].abort = true;
                }
                aborted
            }
            // The first half of a pair that is in its device is one of these.
            Step::Free | Step::Fused | Step::Held => false,
        }
    }

    /// Asks the devices to give up the command's I/Os. `true`: at least one will end early.
    pub(crate) fn abort_children(&mut self, q: u32, index: ReqIndex) -> bool {
        let qp = self.queue_ref(q);
        let request = &qp.requests[index];
        let nsid = match request.plan {
            Plan::Flush { all: true } => None,
            _ => Some(request.sqe.nsid()),
        };
        let children = request.next_child;
        let mut aborted = false;
        for child in 0..children {
            aborted |= self.devices.abort(nsid, device::token(q, index, child));
        }
        aborted
    }
}

fn span(plan: &Plan) -> Option<(u64, u32)> {
    match *plan {
        Plan::Single { lba, blocks, .. } => Some((lba, blocks)),
        _ => None,
    }
}
