//! Statistics of a lane since its last turn; each turn adds them to the volume's.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::model::MAX_REPLICAS;
use crate::shared::Totals;

#[derive(Default)]
pub(super) struct Counters {
    /// Something was counted since the last turn.
    any: bool,
    reads: [u64; MAX_REPLICAS],
    writes: [u64; MAX_REPLICAS],
    reads_moved: u64,
    log_waits: u64,
    overlap_waits: u64,
    frozen_answers: u64,
}

impl Counters {
    /// The replica in `slot` completed a read.
    #[inline]
    pub fn read(&mut self, slot: usize) {
        self.reads[slot] += 1;
        self.any = true;
    }

    #[inline]
    pub fn write(&mut self, slot: usize) {
        self.writes[slot] += 1;
        self.any = true;
    }

    /// Another replica had to serve a read.
    pub fn read_moved(&mut self) {
        self.reads_moved += 1;
        self.any = true;
    }

    /// A write waits for the log. `new`: it did not before.
    pub fn log_wait(&mut self, new: bool) {
        self.log_waits += u64::from(new);
        self.any = true;
    }

    /// A write waits for an overlapping one. `new`: it did not before.
    pub fn overlap_wait(&mut self, new: bool) {
        self.overlap_waits += u64::from(new);
        self.any = true;
    }

    /// A request waited for as long as a host waits for replicas.
    pub fn frozen_answer(&mut self) {
        self.frozen_answers += 1;
        self.any = true;
    }

    /// Something was counted since the last turn.
    #[inline]
    pub fn has_news(&self) -> bool {
        self.any
    }

    pub fn publish(&mut self, totals: &Totals) {
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
