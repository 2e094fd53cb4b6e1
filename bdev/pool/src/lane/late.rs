//! Failures below a lane: reads that an external device does not answer within the limit of
//! [`crate::overdue`], devices that lost their end, disks that may have lost writes, and refusals.

use std::collections::VecDeque;

use nacre_bdev::{Bdev, Extents, Io, Op, Queue, Status, Token};
use nacre_bdev_pool_core::interface::Refusal;
use nacre_reactor::Nanos;
use slab::Slab;

use super::external::Externals;
use super::{Base, Child, Lane, Owner};
use crate::overdue::MOST;

#[derive(Clone, Copy)]
pub(super) struct ExternalRead {
    /// The number of its queue.
    queue: u32,
    /// The tick at which it began.
    begun: u32,
}

impl Child {
    /// Translates the status of a device that lost its end: the host's range is right.
    pub(super) fn status_for_host(&self, status: Status) -> Status {
        let is_external = self.external.is_some();
        match (status, self.owner) {
            (Status::OutOfRange, _) if is_external => Status::Gone,
            (Status::OutOfRange, Owner::Write { .. } | Owner::Data { .. }) => Status::WriteError,
            (Status::OutOfRange, _) => Status::ReadError,
            (status, _) => status,
        }
    }
}

impl Base {
    fn take_waiting(&mut self, token: Token) -> Option<Io> {
        let at = self.waiting.iter().position(|io| io.token == token)?;
        self.waiting.remove(at)
    }

    /// Notes the end of a read, if it was overdue.
    pub(super) fn overdue_ended(&mut self, token: Token) {
        let known = self.overdue.iter().position(|key| *key as Token == token);
        let Some(known) = known else { return };
        self.overdue.swap_remove(known);
        if self.overdue.is_empty() {
            tracing::info!(
                bdev = self.claim.layer().name(),
                "a device that lvols show has answered late"
            );
        }
    }

    /// Takes the waiting reads, which fail, if the device has too many overdue ones.
    pub(super) fn take_refused(&mut self) -> VecDeque<Io> {
        if self.overdue.len() < MOST {
            return VecDeque::new();
        }
        std::mem::take(&mut self.waiting)
    }
}

impl Externals {
    /// A read of the present device begins.
    pub(super) fn begin(&mut self) -> Option<ExternalRead> {
        let base = self.queues.last()?;
        self.reads += 1;
        Some(ExternalRead {
            queue: base.number,
            begun: self.ticks.now(),
        })
    }

    /// The overdue reads, once per tick.
    fn find_overdue(&mut self, now: Nanos, children: &Slab<Child>) -> Vec<usize> {
        if !self.ticks.advance(now, self.reads > 0) {
            return Vec::new();
        }
        let is_overdue = |child: &Child| {
            let read = child.external;
            read.is_some_and(|read| self.ticks.is_overdue(read.begun))
        };
        let overdue = children.iter().filter(|(_, child)| is_overdue(child));
        overdue.map(|(key, _)| key).collect()
    }

    /// Marks a read as overdue. Returns it if the device does not have it yet.
    fn give_up(&mut self, key: usize, read: ExternalRead) -> Option<Io> {
        let mut queues = self.queues.iter_mut();
        let base = queues.find(|base| base.number == read.queue)?;
        if base.overdue.is_empty() {
            tracing::warn!(
                bdev = base.claim.layer().name(),
                "a device that lvols show does not answer: reads of it fail"
            );
        }
        let waiting = base.take_waiting(key as Token);
        if waiting.is_none() {
            base.overdue.push(key);
            // The outcome comes earlier if the device can abort the read.
            base.queue.abort(key as Token);
        }
        waiting
    }
}

impl Lane {
    /// Ends overdue reads of external devices for their submitters. The device keeps the buffers.
    pub(super) fn end_overdue(&mut self, now: Nanos) {
        for key in self.externals.find_overdue(now, &self.children) {
            let child = &mut self.children[key];
            let Some(read) = child.external else { continue };
            if let Some(io) = self.externals.give_up(key, read) {
                self.child_ended(io.complete(Status::Gone));
                continue;
            }
            let owner = std::mem::replace(&mut child.owner, Owner::Overdue);
            child.external = None;
            self.externals.reads -= 1;
            self.owned_ended(owner, Status::Gone, Extents::new());
        }
    }
}

/// The status of I/O of a pool whose disk may have lost writes. Hosts repeat I/O that ends with
/// `Gone`. The pool that is imported again would confirm a repeated flush, although writes before
/// it may be gone.
pub(super) fn interrupted(op: Op) -> Status {
    match op {
        Op::Flush => Status::WriteError,
        _ => Status::Gone,
    }
}

pub(super) fn status_of(refusal: Refusal, op: Op) -> Status {
    match refusal {
        Refusal::NoSpace { returning: true } => Status::Retry,
        Refusal::NoSpace { returning: false } => Status::NoSpace,
        Refusal::OutOfRange => Status::OutOfRange,
        Refusal::UnknownVersion | Refusal::Exported => Status::Gone,
        Refusal::WrongKind => Status::WriteProtected,
        Refusal::Medium | Refusal::Damaged => Status::medium_error(op),
        Refusal::Held
        | Refusal::Exists
        | Refusal::Changing
        | Refusal::TooMany
        | Refusal::DiskUnfit
        | Refusal::FirstDisk
        | Refusal::LastDisk
        | Refusal::NoRoom { .. }
        | Refusal::DiskLeaving
        | Refusal::NotLeaving
        | Refusal::TooLate
        | Refusal::Cancelled
        | Refusal::NoParent
        | Refusal::SameParent
        | Refusal::OtherSize => Status::DeviceError,
    }
}
