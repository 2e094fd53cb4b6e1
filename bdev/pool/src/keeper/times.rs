//! The periodic work of a pool: settling records, checkpoints, deletions to be continued, and moves
//! of units from a disk that leaves.

use std::time::Duration;

use nacre_bdev_pool_core::pool::Pool;
use nacre_reactor::Nanos;

/// Everything answered is settled this long after it changed.
const SETTLE: Duration = Duration::from_secs(1);
/// A checkpoint follows a change after this time.
const CHECKPOINT: Duration = Duration::from_secs(5);
/// Hidden versions (deleted ones whose space is not free yet) are visited again in this interval.
const RECLAIM: Duration = Duration::from_secs(30);
/// Units leave a disk in this interval: so many bytes, and fewer while hosts have I/O in flight.
const MOVES: Duration = Duration::from_millis(10);
const IDLE_BYTES: u64 = 4 << 20;
const BUSY_BYTES: u64 = 512 << 10;

#[derive(Default)]
pub(super) struct Times {
    settle: Option<Nanos>,
    checkpoint: Option<Nanos>,
    reclaim: Option<Nanos>,
    /// When units may leave a disk again.
    moves: Option<Nanos>,
    pub(super) last_lsn: u64,
}

impl Times {
    /// Lets units leave a disk that is being emptied. `is_busy`: hosts have I/O in flight.
    pub(super) fn pace_moves(
        &mut self,
        now: Nanos,
        pool: &mut Pool,
        is_busy: impl FnOnce() -> bool,
    ) {
        if pool.leaving().is_none() {
            self.moves = None;
            return;
        }
        if self.moves.is_some_and(|at| at > now) {
            return;
        }
        self.moves = Some(now + MOVES);
        let is_busy = is_busy();
        let bytes = if is_busy { BUSY_BYTES } else { IDLE_BYTES };
        let unit = pool.superblock().geometry.unit_bytes();
        pool.allow_moves((bytes / unit).max(1), is_busy);
    }

    /// Begins upkeep that is due.
    pub(super) fn check_due(&mut self, now: Nanos, pool: &mut Pool, has_hidden: bool) {
        let last = pool.follow().last_lsn();
        if last != self.last_lsn {
            self.last_lsn = last;
            self.settle.get_or_insert(now + SETTLE);
            self.checkpoint.get_or_insert(now + CHECKPOINT);
        }
        if self.settle.is_some_and(|at| at <= now) {
            self.settle = None;
            pool.settle();
        }
        if self.checkpoint.is_some_and(|at| at <= now) {
            self.checkpoint = None;
            pool.checkpoint();
        }
        if !has_hidden {
            self.reclaim = None;
        } else if *self.reclaim.get_or_insert(now + RECLAIM) <= now {
            self.reclaim = Some(now + RECLAIM);
            pool.reclaim();
        }
    }

    /// The next times of upkeep.
    pub(super) fn due(&self) -> impl Iterator<Item = Nanos> {
        let times = [self.settle, self.checkpoint, self.reclaim, self.moves];
        times.into_iter().flatten()
    }
}
