//! The counters for grace periods, as in RCU: a grace period ends when all I/O that read the old
//! state of an lvol's map has ended. The map translates addresses of the lvol to units of the pool.
//!
//! A lane counts its I/O in one of three counters, by the epoch in which it read the map. The
//! keeper begins the next epoch after it changed the map; the period ends when no lane has I/O of
//! the epoch before. One period at a time, so three counters suffice:
//!
//! ```text
//!   epoch   0        1        2        3         counter of epoch e: e mod 3
//!   lane    ├─ I/O ─┤
//!                 ├─ I/O ──┤
//!   keeper       begin 1 … ended      begin 2 … ended
//! ```
//!
//! A lane counts before it reads the map: it adds to the counter, then checks that the epoch has
//! not changed; otherwise it subtracts and starts again. All accesses are sequentially consistent,
//! so either the keeper sees the count, or the lane sees the new epoch, and with it every change of
//! the map before.

use std::sync::atomic::{AtomicU64, Ordering};

/// I/O of one lane, by epoch modulo 3.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct Counts([AtomicU64; 3]);

impl Counts {
    /// Counts `many` I/Os in the present epoch, which is returned. Read the map after this.
    pub(crate) fn enter(&self, epoch: &AtomicU64, many: u64) -> u64 {
        loop {
            let now = epoch.load(Ordering::SeqCst);
            let counter = &self.0[(now % 3) as usize];
            counter.fetch_add(many, Ordering::SeqCst);
            if epoch.load(Ordering::SeqCst) == now {
                return now;
            }
            counter.fetch_sub(many, Ordering::SeqCst);
        }
    }

    /// Counts one more I/O in an epoch in which the lane has some.
    pub(crate) fn join(&self, epoch: u64) {
        self.0[(epoch % 3) as usize].fetch_add(1, Ordering::SeqCst);
    }

    /// Counts one I/O less: it ended.
    pub(crate) fn leave(&self, epoch: u64) {
        self.0[(epoch % 3) as usize].fetch_sub(1, Ordering::SeqCst);
    }

    /// True when the lane has I/O in flight.
    pub(crate) fn are_any(&self) -> bool {
        self.0.iter().any(|count| count.load(Ordering::SeqCst) > 0)
    }

    /// The number of I/Os in flight that were counted in `epoch`.
    pub(crate) fn of(&self, epoch: u64) -> u64 {
        self.0[(epoch % 3) as usize].load(Ordering::SeqCst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// I/O of an epoch is counted until it leaves, whatever epochs begin meanwhile.
    #[test]
    fn an_epoch_ends_with_its_last_io() {
        let (epoch, counts) = (AtomicU64::new(0), Counts::default());
        let first = counts.enter(&epoch, 1);
        counts.join(first);
        epoch.store(1, Ordering::SeqCst);
        let second = counts.enter(&epoch, 1);
        assert_eq!((counts.of(0), counts.of(1)), (2, 1));
        counts.leave(first);
        counts.leave(first);
        assert_eq!((counts.of(0), counts.of(1)), (0, 1));
        counts.leave(second);
        assert_eq!([0, 1, 2].map(|epoch| counts.of(epoch)), [0; 3]);
    }
}
