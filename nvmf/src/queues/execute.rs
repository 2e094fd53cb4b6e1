//! Executes I/O commands on devices.
//!
//! A command has one or several device I/Os, its children; at most [`PARALLEL_CHILDREN`] are in
//! flight. If the device is full, the command waits in the device's list and continues from there.

use std::sync::Arc;

use nacre_bdev::{Completion, Io, Op};
use nacre_nvmf_wire::{Cqe, Fuse, StatusCode};

use crate::queues::command::Command;
use crate::queues::decode::{self, Plan};
use crate::queues::device;
use crate::queues::queue_pair::Stage;
use crate::queues::reservation;

/// Children of one command in flight at once: bounds the load that a single Dataset Management or
/// Copy command can put on a device.
const PARALLEL_CHILDREN: u32 = 8;

impl Command<'_> {
    /// Executes an I/O command (not part of a fused pair) that has its buffer and data.
    #[inline]
    pub(crate) fn run_io(&mut self) {
        if !self.run_single() {
            self.run_children();
        }
    }

    /// The fast path: a command with one I/O, on an open device that is not full. Returns false
    /// without side effects in all other cases.
    #[inline]
    fn run_single(&mut self) -> bool {
        let (qp, index) = (&mut *self.queue, self.index);
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
        let host = || association.map_or([0; 16], |a| a.hostid);
        let (nsid, reservation) = (namespace.nsid, &namespace.reservation);
        if !qp.rights.may(nsid, reservation, host, op) {
            return false;
        }
        let Some(slot) = namespace.slot(self.core.handle.core) else {
            return false;
        };
        if self.core.devices.waiting(slot) > 0 {
            return false;
        }
        let mut io = Io::new(device::token(qp.id.index, index, 0), op, lba, blocks).flags(flags);
        io.data.extend(request.data.take());
        if let Err((_, mut io)) = self.core.devices.submit(slot, io) {
            request.data = io.data.pop();
            return false;
        }
        (request.children, request.next_child, request.inflight) = (1, 1, 1);
        qp.inflight += 1;
        true
    }

    pub(crate) fn run_children(&mut self) {
        if let Some(reservation) = reservation::conflict(self) {
            return reservation::refuse_conflict(self, &reservation);
        }
        let (qp, index) = (&mut *self.queue, self.index);
        let request = &qp.requests[index];
        let children = match request.plan {
            Plan::Single { .. } | Plan::Flush { all: false } => 1,
            // The number is unknown: namespaces may be added and removed meanwhile.
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
            return self.finish(status);
        }
        qp.requests[index].children = children;
        self.advance(None);
    }

    /// Submits children up to the limit or until the device is full. Completes the command after
    /// the last child. `from`: the command comes from the head of this device's list. Returns true
    /// if it is there again.
    pub(crate) fn advance(&mut self, from: Option<usize>) -> bool {
        loop {
            let request = self.request();
            let stop = request.abort || !request.status.is_success();
            if request.next_child >= request.children || stop {
                if request.inflight == 0 {
                    self.end_io();
                }
                return false;
            }
            if request.inflight >= PARALLEL_CHILDREN {
                return false;
            }
            let (slot, nsid) = match self.device_of() {
                Ok(Some(device)) => device,
                Ok(None) => {
                    let request = self.request();
                    request.children = request.next_child;
                    continue;
                }
                Err(status) => {
                    self.request().status = status;
                    continue;
                }
            };
            let first = from == Some(slot);
            let behind = !first && self.core.devices.waiting(slot) > 0;
            if behind || !self.submit_child(slot, nsid) {
                self.request().waiting = true;
                let name = self.queue.name_of(self.index);
                self.core.devices.wait(slot, name, first);
                return first;
            }
        }
    }

    /// The slot of the next child's device, opened on demand, and its namespace. `None`: all
    /// namespaces have been flushed.
    fn device_of(&mut self) -> Result<Option<(usize, u32)>, StatusCode> {
        let qp = &*self.queue;
        let request = &qp.requests[self.index];
        let namespace = match request.plan {
            // In the order of NSIDs: indexes change when namespaces are added or removed.
            Plan::Flush { all: true } => match qp.view.after(request.flushed) {
                None => return Ok(None),
                next => next,
            },
            _ => qp.namespace_of(self.index),
        };
        let namespace = namespace.ok_or_else(|| qp.view.absent())?;
        let nsid = namespace.nsid;
        // Without cloning the Arc, whose count all cores share.
        if let Some(slot) = namespace.slot(self.core.handle.core) {
            return Ok(Some((slot, nsid)));
        }
        let namespace = Arc::clone(namespace);
        match self.core.open_device(&namespace, self.now) {
            Some(slot) => Ok(Some((slot, nsid))),
            None => Err(StatusCode::INTERNAL_PATH_ERROR),
        }
    }

    /// Submits the next child. Returns false without side effects if the device is full.
    fn submit_child(&mut self, slot: usize, nsid: u32) -> bool {
        let (qp, index) = (&mut *self.queue, self.index);
        let fused = (qp.requests[index].sqe.fuse() == Fuse::Second)
            .then(|| qp.requests[index].partner)
            .flatten();
        let request = &mut qp.requests[index];
        let child = request.next_child;
        let token = device::token(qp.id.index, index, child);
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
            // The data to compare, followed by the data to write.
            io.op = Op::CompareAndWrite;
            let write = io.data.pop();
            io.data.extend(qp.requests[first].data.take());
            io.data.extend(write);
        }
        match self.core.devices.submit(slot, io) {
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

    /// Handles the completion of a child.
    pub(crate) fn child_done(&mut self, child: u32, mut completion: Completion) {
        let (qp, index) = (&mut *self.queue, self.index);
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
            request.zero_copy = completion.zero_copy;
        }
        if qp.stage == Stage::Ending {
            if qp.requests[index].inflight == 0 {
                qp.requests.end(index);
            }
            return;
        }
        let request = &qp.requests[index];
        if request.inflight == 0 && request.next_child == request.children {
            return self.end_io();
        }
        if !request.waiting {
            self.advance(None);
        }
    }

    /// Completes the command after its last child.
    fn end_io(&mut self) {
        let request = self.request();
        let mut status = request.status;
        if status.is_success() && request.abort && request.next_child < request.children {
            status = StatusCode::ABORT_REQUESTED;
        }
        if let Some(first) = request.partner {
            // Both commands of a fused pair fail; the one that caused it has the status.
            let second = if status.is_success() {
                status
            } else {
                StatusCode::ABORTED_FAILED_FUSED
            };
            return self.end_pair((first, status), second);
        }
        if let Plan::Copy { .. } = request.plan
            && !status.is_success()
        {
            // Completion dword 0: the lowest range that was not copied (NVM 3.2.2).
            let cid = request.sqe.cid();
            let done = request.failed_child.min(request.next_child);
            return self.complete(Cqe::new(cid, status).with_dword0(done));
        }
        self.finish(status);
    }
}
