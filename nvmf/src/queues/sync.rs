//! The fast path: Read and Write commands to a bdev that executes I/O synchronously
//! ([`nacre_bdev::Queue::run_sync`]).
//!
//! ```text
//!   capsule ─▶ decode ─▶ Queue::run_sync ─▶ respond
//! ```
//!
//! A command on the fast path completes immediately, so it needs no place in the request table, and
//! no Abort can find it. All other commands are returned unchanged and take the usual path.

use nacre_bdev::{Extents, Io, Op};
use nacre_hugepages::Buf;
use nacre_nvmf_wire::opcode::io as opcode;
use nacre_nvmf_wire::{Cqe, Fuse, Sqe};
use nacre_reactor::Nanos;

use crate::queues::completion::Done;
use crate::queues::decode::{self, Plan};
use crate::queues::queue_pair::{QueuePair, Stage};
use crate::queues::resources::Resources;
use crate::subsystems::association::Phase;
use crate::subsystems::stats::Kind;
use crate::transport::{ReqTag, Response};

impl Resources {
    /// Executes a new command and sends its response. `Err` returns the in-capsule data: the
    /// command is untouched and must take the usual path.
    #[inline]
    pub(super) fn run_sync(
        &mut self,
        qp: &mut QueuePair,
        sqe: &Sqe,
        data: Option<Buf>,
        now: Nanos,
    ) -> Result<(), Option<Buf>> {
        // A write needs all its data in the capsule. A read needs a buffer, so it must not overtake
        // commands that wait for one.
        let has_all = match sqe.opcode {
            opcode::READ => self.buffers.waiting.is_empty(),
            opcode::WRITE => data.is_some(),
            _ => false,
        };
        if !has_all || !qp.is_plain(sqe) {
            return Err(data);
        }
        let namespace = match qp.view.for_command(sqe.nsid()) {
            Ok(namespace) if namespace.is_sync => namespace,
            _ => return Err(data),
        };
        let slot = match namespace.slot(self.handle.core) {
            Some(slot) if self.devices.waiting(slot) == 0 => slot,
            _ => return Err(data),
        };
        let op = match sqe.opcode {
            opcode::READ => Op::Read,
            _ => Op::Write,
        };
        let Ok(Plan::Single {
            flags,
            lba,
            blocks,
            bytes,
            ..
        }) = decode::single(sqe, op, &namespace.geometry(), &qp.limits)
        else {
            return Err(data);
        };
        let is_zero_copy = qp.takes_zero_copy && blocks <= namespace.zero_copy_blocks;
        let association = qp.association.as_deref();
        let host = || association.map_or([0; 16], |a| a.hostid);
        let (nsid, reservation) = (namespace.nsid, &namespace.reservation);
        let allowed = qp.rights.may(nsid, reservation, host, op);
        if !allowed {
            return Err(data);
        }
        let mut io = Io::new(0, op, lba, blocks).flags(flags);
        if op == Op::Read && !is_zero_copy {
            let Some(into) = self.buffers.pools.io.acquire(bytes as usize) else {
                return Err(None);
            };
            io.data.push(into);
        } else {
            io.data.extend(data);
        }
        let mut zero_copy = None;
        let Some(status) = self.devices.run_sync(slot, &mut io, &mut zero_copy) else {
            // Free the buffer of a read; the usual path allocates another one.
            return Err(io.data.pop().filter(|_| op == Op::Write));
        };
        let mut retry_delays = false;
        if let Some(association) = &qp.association {
            association.touch();
            retry_delays = association.retry_delays();
        }
        let status = decode::status_code(status, retry_delays);
        let done = Done {
            kind: match op {
                Op::Read => Kind::Read,
                _ => Kind::Write,
            },
            bytes,
            lba,
            started: now,
        };
        let cid = sqe.cid();
        let to_host = op == Op::Read && status.is_success();
        let data = if to_host { io.data } else { Extents::new() };
        if let Some(cqe) = qp.conclude(sqe, done, Cqe::new(cid, status), now) {
            let response = Response {
                tag: ReqTag { cid, index: 0 },
                cqe,
                data,
                sgl: sqe.sgl_descriptor(),
                zero_copy: zero_copy.filter(|_| to_host),
            };
            self.ports.respond(qp, response);
        }
        Ok(())
    }
}

impl QueuePair {
    /// True if the command affects no other command, its queue's view of the subsystem is
    /// current, and the request table would accept it.
    #[inline]
    fn is_plain(&self, sqe: &Sqe) -> bool {
        let ready = self.association.as_deref().is_some_and(|association| {
            association.phase() == Phase::Ready && association.view_version() == self.view_version
        });
        ready
            && self.stage == Stage::Live
            && !self.is_admin()
            && sqe.fuse() == Fuse::Normal
            && self.fused.is_none()
            && self.requests.would_take(sqe.cid())
    }
}
