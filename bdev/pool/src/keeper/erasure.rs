//! Erases the superblocks of a deleted pool's disks: one disk after the other, unless one is slow.
//!
//! A disk that fails or does not answer does not prevent the erasure of the others. The answer to
//! the deletion names such disks.

use std::collections::VecDeque;
use std::time::Duration;

use nacre_bdev::Bdev;
use nacre_bdev_pool_core::pool::Pool;
use nacre_reactor::{Idle, Nanos};

use super::departure::{Erasing, LOOK};
use super::disks::Disks;
use crate::model::NotErased;
use crate::port::Shared;

/// How long a disk may take before the erasure of the next disk begins as well.
const PATIENCE: Duration = if cfg!(test) {
    Duration::from_millis(200)
} else {
    Duration::from_secs(2)
};
/// How long the caller waits for an answer. The erasure continues after it.
const ANSWER: Duration = if cfg!(test) {
    Duration::from_millis(600)
} else {
    Duration::from_secs(6)
};

pub(super) struct Erasure {
    waiting: VecDeque<Target>,
    begun: Vec<(Target, Erasing)>,
    failed: Vec<NotErased>,
    next_at: Option<Nanos>,
    answer_at: Option<Nanos>,
}

struct Target {
    name: String,
    number: usize,
    superblocks: [u64; 4],
}

impl Erasure {
    /// Begins the erasure. The first disk comes last, because its superblocks name the others; only
    /// disks with I/O in flight are put off behind it.
    pub(super) fn of(pool: &Pool, shared: &Shared) -> Self {
        let (root, claims) = (pool.superblock(), shared.claims.load());
        let targets = root.disks.present().map(|number| {
            let claim = claims.get(number).and_then(|claim| claim.as_ref());
            let places = root.disks.superblocks(number, &root.geometry);
            Target {
                name: claim.map_or_else(String::new, |claim| claim.layer().name().to_owned()),
                number,
                superblocks: places.map(|at| at.offset),
            }
        });
        let mut waiting: VecDeque<Target> = targets.collect();
        waiting.make_contiguous().reverse();
        Self {
            waiting,
            begun: Vec::new(),
            failed: Vec::new(),
            next_at: None,
            answer_at: None,
        }
    }

    /// Continues the erasure. Returns the amount of work done.
    pub(super) fn advance(&mut self, now: Nanos, disks: &mut Disks) -> u32 {
        let mut count = 0;
        self.answer_at.get_or_insert(now + ANSWER);
        for (target, mut erasing) in std::mem::take(&mut self.begun) {
            match erasing.advance(now) {
                None => self.begun.push((target, erasing)),
                Some(outcome) => {
                    count += 1;
                    self.failed.extend(outcome.err().map(|status| NotErased {
                        disk: target.name,
                        status: Some(status),
                    }));
                }
            }
        }
        let may_begin = self.begun.is_empty() || self.next_at.is_some_and(|at| at <= now);
        if may_begin && let Some(target) = self.waiting.pop_front() {
            match disks.take_idle(target.number) {
                Some(disk) => {
                    let erasing = Erasing::begin(disk, &target.superblocks);
                    self.begun.push((target, erasing));
                    self.next_at = Some(now + PATIENCE);
                    count += 1;
                }
                None => self.waiting.push_back(target),
            }
        }
        count
    }

    pub(super) fn is_done(&self) -> bool {
        self.waiting.is_empty() && self.begun.is_empty()
    }

    /// True when the caller has waited long enough.
    pub(super) fn is_late(&self, now: Nanos) -> bool {
        !self.is_done() && self.answer_at.is_some_and(|at| at <= now)
    }

    /// The disks whose superblocks are not erased, with the reason of each.
    pub(super) fn not_erased(&self) -> Vec<NotErased> {
        let begun = self.begun.iter().map(|(target, _)| target);
        let late = begun.chain(&self.waiting).map(|target| NotErased {
            disk: target.name.clone(),
            status: None,
        });
        self.failed.iter().cloned().chain(late).collect()
    }

    pub(super) fn due(&self, now: Nanos) -> Idle {
        if self.is_done() {
            Idle::Quiet
        } else {
            Idle::Until(now + LOOK)
        }
    }
}
