//! Discards (deallocates) space of the disks that became free.
//!
//! An image collects the runs of free units that were freed since they were last discarded; when
//! its root is durable, they are discarded one after the other. A unit is free when nothing that a
//! recovery reads refers to it, so its contents may go. While a run is discarded its units count as
//! used: no write can meet the discard.

use std::collections::VecDeque;
use std::ops::Range;

use super::store::Store;
use super::{Pool, Purpose};
use crate::ids::IoId;
use crate::interface::{Intent, IoFailed};
use crate::mutation::Mutation;

/// Runs that one root discards at most. The others wait for the next root.
const MOST_RUNS: usize = 256;

#[derive(Debug, Default)]
pub(super) struct Discards {
    /// Runs of the image whose root is not durable yet.
    collected: Vec<Range<u64>>,
    queue: VecDeque<Range<u64>>,
    in_flight: Option<Range<u64>>,
    /// Units discarded since the pool was opened.
    done: u64,
}

impl Discards {
    /// An image is taken: notes the free runs.
    pub(super) fn collect(&mut self, store: &mut Store) {
        let most = store.limits.discard_most_units;
        let room = MOST_RUNS.saturating_sub(self.queue.len() + self.collected.len());
        for run in store.space.take_freed(most, room) {
            self.collected.extend(store.superblock.disks.split(run));
        }
        if Mutation::DiscardLimbo.is_active() {
            let limbo: Vec<u64> = store.space.limbo().collect();
            limbo
                .iter()
                .for_each(|unit| issue(store, &(*unit..unit + 1)));
        }
    }

    /// The root of the last image is durable.
    pub(super) fn release(&mut self) {
        self.queue.extend(self.collected.drain(..));
    }

    /// Units that are being discarded: used, though nothing refers to them.
    pub(super) fn units(&self) -> Range<u64> {
        self.in_flight.clone().unwrap_or_default()
    }

    pub(super) fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.in_flight.is_none()
    }

    /// Begins the next discard, if none is in flight.
    pub(super) fn advance(&mut self, store: &mut Store) {
        let was_idle = self.is_idle();
        while self.in_flight.is_none()
            && let Some(run) = self.queue.pop_front()
        {
            // The contents of a disk that leaves do not matter any more, unless the disk stays.
            if store.space.is_barred(run.start) {
                if !store.superblock.disks.is_hole(run.start) {
                    store.space.note_freed(&run);
                }
                continue;
            }
            let len = run.end - run.start;
            let kept = store.superblock.reserve_units + store.state.guaranteed();
            // Writes come first: a discard leaves at least as much space as it holds.
            let has_room = store.space.free() >= kept + 2 * len;
            if !has_room || !store.space.take_run(&run) {
                store.space.note_freed(&run);
                continue;
            }
            if Mutation::AllocateDiscarding.is_active() {
                store.space.give_back_discarded(&run);
            }
            issue(store, &run);
            self.in_flight = Some(run);
        }
        // A request may have waited for discards that did not begin.
        store.has_news |= !was_idle && self.is_idle() && store.state.has_externals();
    }

    fn ended(&mut self, store: &mut Store, result: Result<(), IoFailed>) {
        let Some(run) = self.in_flight.take() else {
            return;
        };
        if !Mutation::AllocateDiscarding.is_active() {
            store.space.give_back_discarded(&run);
        }
        // A disk that refuses is not asked again before the units are used and freed.
        if result.is_ok() {
            self.done += run.end - run.start;
        }
    }
}

fn issue(store: &mut Store, run: &Range<u64>) {
    let io = store.io(Purpose::Discard);
    store.out.push_back(Intent::Discard {
        io,
        at: store.superblock.disks.granule(run.start, 0),
        len: (run.end - run.start) * store.superblock.geometry.unit_bytes(),
    });
}

impl Pool {
    /// A discard has ended. A failed one is not tried again.
    pub fn discarded(&mut self, io: IoId, result: Result<(), IoFailed>) {
        self.store.has_news = true;
        if self.store.ios.remove(&io).is_some() {
            self.discards.ended(&mut self.store, result);
        }
    }

    /// Discards all free space, including space that was free when the pool was opened. The next
    /// checkpoints do it.
    pub fn discard_free(&mut self) {
        self.store.space.note_all_freed();
        self.store.want_root();
    }

    /// Units discarded since the pool was opened.
    pub fn discarded_units(&self) -> u64 {
        self.discards.done
    }
}
