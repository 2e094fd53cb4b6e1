//! The statistics of a lane in its current turn. At the end of the turn they are added to the
//! volume's totals.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::model::MAX_REPLICAS;
use crate::shared::Totals;

#[derive(Default)]
pub(super) struct Counters {
    /// True when a counter is not zero.
    any: bool,
    reads: [u64; MAX_REPLICAS],
    writes: [u64; MAX_REPLICAS],
    reads_moved: u64,
    log_waits: u64,
    overlap_waits: u64,
    frozen_answers: u64,
}

impl Counters {
    /// Counts a read that the replica in `slot` completed.
    #[inline]
    pub(super) fn read(&mut self, slot: usize) {
        self.reads[slot] += 1;
        self.any = true;
    }

    #[inline]
    pub(super) fn write(&mut self, slot: usize) {
        self.writes[slot] += 1;
        self.any = true;
    }

    /// Counts a read that another replica had to serve.
    pub(super) fn read_moved(&mut self) {
        self.reads_moved += 1;
        self.any = true;
    }

    /// Counts a write that waits for the dirty-region log. `new`: it did not wait for it before.
    pub(super) fn log_wait(&mut self, new: bool) {
        self.log_waits += u64::from(new);
        self.any = true;
    }

    /// Counts a write that waits for an overlapping one. `new`: it did not wait for it before.
    pub(super) fn overlap_wait(&mut self, new: bool) {
        self.overlap_waits += u64::from(new);
        self.any = true;
    }

    /// Counts a request that waited for replicas up to the frozen hold time, and then failed.
    pub(super) fn frozen_answer(&mut self) {
        self.frozen_answers += 1;
        self.any = true;
    }

    /// True when a counter is not zero.
    #[inline]
    pub(super) fn has_news(&self) -> bool {
        self.any
    }

    pub(super) fn publish(&mut self, totals: &Totals) {
        let add = |to: &AtomicU64, count: &mut u64| {
            if *count > 0 {
                to.fetch_add(std::mem::take(count), Ordering::Relaxed);
            }
        };
        self.any = false;
        for slot in 0..MAX_REPLICAS {
            add(&totals.reads[slot], &mut self.reads[slot]);
            add(&totals.writes[slot], &mut self.writes[slot]);
        }
        add(&totals.reads_moved, &mut self.reads_moved);
        add(&totals.log_waits, &mut self.log_waits);
        add(&totals.overlap_waits, &mut self.overlap_waits);
        add(&totals.frozen_answers, &mut self.frozen_answers);
    }
}
