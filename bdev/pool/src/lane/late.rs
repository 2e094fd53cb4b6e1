//! Reads that an external device does not answer within the limit of [`crate::overdue`].

use std::collections::VecDeque;

use nacre_bdev::{Bdev, Extents, Io, Queue, Status, Token};
use nacre_reactor::Nanos;

use super::external::EXTERNAL_DISK;
use super::{Base, Lane, Owner};
use crate::overdue::MOST;

#[derive(Clone, Copy)]
pub(super) struct ExternalRead {
    /// The number of its queue.
    queue: u32,
    /// The tick at which it began.
    begun: u32,
}

impl Base {
    fn take_waiting(&mut self, token: Token) -> Option<Io> {
        let at = self.waiting.iter().position(|io| io.token == token)?;
        self.waiting.remove(at)
    }
}

impl Lane {
    /// `None` for a disk of the pool, whose I/O has no limit.
    pub(super) fn new_external_read(&self, disk: usize) -> Option<ExternalRead> {
        let base = self.base(disk).filter(|_| disk == EXTERNAL_DISK)?;
        Some(ExternalRead {
            queue: base.number,
            begun: self.ticks.now(),
        })
    }

    /// Ends overdue reads of external devices for their submitters. The device keeps the buffers.
    pub(super) fn find_overdue(&mut self, now: Nanos) {
        if !self.ticks.advance(now, self.external_reads > 0) {
            return;
        }
        let ticks = &self.ticks;
        let overdue = self.children.iter().filter_map(|(key, child)| {
            let read = child.external?;
            ticks.is_overdue(read.begun).then_some((key, read.queue))
        });
        let overdue: Vec<(usize, u32)> = overdue.collect();
        for (key, queue) in overdue {
            self.give_up(key, queue);
        }
    }

    fn give_up(&mut self, key: usize, queue: u32) {
        let mut bases = self.externals.iter_mut();
        let Some(base) = bases.find(|base| base.number == queue) else {
            return;
        };
        if base.overdue.is_empty() {
            tracing::warn!(
                bdev = base.claim.layer().name(),
                "a device that lvols show does not answer: reads of it fail"
            );
        }
        if let Some(io) = base.take_waiting(key as Token) {
            return self.child_ended(io.complete(Status::Gone));
        }
        base.overdue.push(key);
        // The outcome comes earlier if the device can abort the read.
        base.queue.abort(key as Token);
        let child = &mut self.children[key];
        let owner = std::mem::replace(&mut child.owner, Owner::Overdue);
        child.external = None;
        self.external_reads -= 1;
        self.owned_ended(owner, Status::Gone, Extents::new());
    }

    /// Fails the waiting reads of a queue with too many overdue ones. Returns their number.
    pub(super) fn refuse_waiting(&mut self, at: usize) -> usize {
        let base = &mut self.externals[at];
        if base.overdue.len() < MOST || base.waiting.is_empty() {
            return 0;
        }
        let refused: VecDeque<Io> = std::mem::take(&mut base.waiting);
        let count = refused.len();
        for io in refused {
            self.child_ended(io.complete(Status::Gone));
        }
        count
    }

    /// Notes the end of a read, if it was overdue.
    pub(super) fn overdue_ended(&mut self, at: usize, token: Token) {
        let base = &mut self.externals[at];
        let known = base.overdue.iter().position(|key| *key as Token == token);
        let Some(known) = known else { return };
        base.overdue.swap_remove(known);
        if base.overdue.is_empty() {
            tracing::info!(
                bdev = base.claim.layer().name(),
                "a device that lvols show has answered late"
            );
        }
    }
}
