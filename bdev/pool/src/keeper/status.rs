//! Publishes the status of a pool for other threads: state, free space, disks, number of volumes
//! and snapshots, and the progress of a disk's removal.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use nacre_bdev_pool_core::ids::Lsn;
use nacre_bdev_pool_core::pool::Pool;
use nacre_reactor::Nanos;

use super::departure::Departures;
use super::{disks, full};
use crate::model::{LeavingDisk, PoolState};
use crate::port::Shared;

/// Most age of the published status while the pool changes. An update counts all volumes and
/// snapshots, so it is not made with each change.
const AGE: Duration = Duration::from_millis(100);

pub(super) struct StatusUpdates {
    shared: Arc<Shared>,
    /// When a status that is out of date is updated.
    due: Option<Nanos>,
    /// The pool had deleted volumes or snapshots whose space is not free yet, at the last update.
    has_hidden: bool,
    /// The disk that is being removed, the units left on it at the first update, and that time.
    leaving: Option<(usize, u64, Instant)>,
}

impl StatusUpdates {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self {
            shared,
            due: None,
            has_hidden: false,
            leaving: None,
        }
    }

    pub(super) fn due(&self) -> Option<Nanos> {
        self.due
    }

    pub(super) fn has_hidden(&self) -> bool {
        self.has_hidden
    }

    /// Updates the status if it is due. `is_busy`: the pool may have changed, so an update is due
    /// within [`AGE`].
    pub(super) fn check_due(
        &mut self,
        now: Nanos,
        is_busy: bool,
        pool: &Pool,
        departures: &Departures,
        last_lsn: Lsn,
    ) {
        let due = match (self.due, is_busy) {
            (None, false) => return,
            (None, true) => *self.due.insert(now + AGE),
            (Some(due), _) => due,
        };
        if due <= now || pool.is_held() && self.shared.status.lock().state != PoolState::Held {
            self.update(pool, departures, last_lsn);
        }
    }

    /// Updates the status now.
    pub(super) fn update(&mut self, pool: &Pool, departures: &Departures, last_lsn: Lsn) {
        self.due = None;
        #[cfg(test)]
        self.shared.statuses.fetch_add(1, Ordering::SeqCst);
        let geometry = &pool.superblock().geometry;
        let unit = geometry.unit_bytes();
        let (units, (free, kept)) = (pool.total_units(), pool.free_units());
        let leaving = self.leaving(pool, unit);
        let mut status = self.shared.status.lock();
        if pool.is_held() && status.state != PoolState::Held {
            tracing::error!(
                pool = status.name,
                disk = status.disk,
                "the log or metadata cannot be written: first writes fail until the pool is \
                 imported again"
            );
        }
        status.state = if pool.is_held() {
            PoolState::Held
        } else {
            PoolState::Online
        };
        if status.name != pool.superblock().name {
            status.name.clone_from(&pool.superblock().name);
        }
        status.total_bytes = units * unit;
        status.disks = disks::statuses(&self.shared, pool, leaving);
        status.disks.extend(departures.statuses());
        self.shared
            .note_joined(pool.superblock().disks.disks().len());
        status.free_bytes = free * unit;
        status.reserved_bytes = kept.min(free) * unit;
        if full::note_use(&mut status, pool) {
            self.shared.news.notify_one();
        }
        let settled = self.shared.settled.load(Ordering::SeqCst);
        status.unsettled_records = last_lsn.saturating_sub(settled);
        let versions = &pool.state().versions;
        let hidden = versions.values().filter(|version| version.is_hidden);
        self.has_hidden = hidden.count() > 0;
        let visible = versions.values().filter(|version| version.is_visible());
        status.versions = visible.count() as u64;
    }

    /// The index of the disk that is being removed, and its progress.
    fn leaving(&mut self, pool: &Pool, unit_bytes: u64) -> Option<(usize, LeavingDisk)> {
        let Some(now) = pool.leaving().filter(|leaving| !leaving.is_staying) else {
            self.leaving = None;
            return None;
        };
        if self.leaving.is_none_or(|(disk, ..)| disk != now.disk) {
            self.leaving = Some((now.disk, now.left, Instant::now()));
        }
        let (_, left_before, since) = self.leaving?;
        let moved = left_before.saturating_sub(now.left);
        let seconds = since.elapsed().as_secs_f64() * now.left as f64;
        let progress = LeavingDisk {
            left_bytes: now.left * unit_bytes,
            begun_bytes: now.total * unit_bytes,
            seconds_left: (moved > 0).then(|| (seconds / moved as f64).ceil() as u64),
        };
        Some((now.disk, progress))
    }
}
