//! A disk that has left: lanes close their queues on it, it is erased, and its claim ends.
//!
//! ```text
//!   Intent::Left ──▶ lanes close queues ──▶ the keeper's queue is idle ──▶ superblocks erased
//!                                                                         ──▶ claim ends ──▶ news
//!   import of a pool that lost its process in between ────────────────────▶ the same
//! ```
//!
//! The pool needs the disk no more, so a failure of it costs nothing but its old superblocks.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use nacre_bdev::{Bdev, Claim, Status};
use nacre_bdev_pool_core::geometry::{PAGE, superblock_offsets};
use nacre_bdev_pool_core::import::leftovers::Leftover;
use nacre_bdev_pool_core::interface::Refusal;
use nacre_bdev_pool_core::pool::Pool;
use nacre_reactor::{Idle, Nanos};
use uuid::Uuid;

use super::disk::{Disk, Ended};
use super::disks::Disks;
use crate::EDGE;
use crate::model::{Departed, DiskStatus, LeavingDisk, PoolError};
use crate::port::Shared;

/// How often the progress is looked at.
pub(super) const LOOK: Duration = Duration::from_millis(1);

pub(super) struct Departures {
    shared: Arc<Shared>,
    list: Vec<Departure>,
    /// Disks that are free, or could not be erased: not announced yet.
    ended: Vec<Departed>,
}

struct Departure {
    id: Uuid,
    /// Bytes that the pool has used, of a disk that left just now: they give the places of the
    /// superblocks.
    bytes: u64,
    step: DepartureStep,
    /// The last field: the device is free when its queues are gone.
    claim: Arc<Claim>,
}

enum DepartureStep {
    /// Lanes that may have a queue on it.
    Lanes {
        number: usize,
        left: HashSet<u32>,
    },
    Erasing(Box<Erasing>),
}

/// The erasure of one disk's superblocks: all are overwritten, then a flush.
pub(super) struct Erasing {
    disk: Disk,
    /// I/O in flight.
    left: usize,
    is_flushed: bool,
    failure: Option<Status>,
    ended: Vec<Ended>,
}

impl Departures {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self {
            shared,
            list: Vec::new(),
            ended: Vec::new(),
        }
    }

    /// Erases a disk that had left before the pool was opened. The pool has a root without it: only
    /// such a root was imported.
    pub(super) fn erase_leftover(&mut self, known: &Leftover, disk: Disk, claim: Arc<Claim>) {
        let step = DepartureStep::Erasing(Box::new(Erasing::begin(disk, &known.superblocks)));
        self.list.push(Departure {
            id: known.id,
            bytes: 0,
            step,
            claim,
        });
    }

    /// True when no disk that has left is in the keeper.
    pub(super) fn is_idle(&self) -> bool {
        self.list.is_empty()
    }

    /// A lane has no queue on a disk that has left, or it is gone.
    pub(super) fn lane_answered(&mut self, lane: u32) {
        for of in &mut self.list {
            if let DepartureStep::Lanes { left, .. } = &mut of.step {
                left.remove(&lane);
            }
        }
    }

    /// Disks that the pool needs no more, and that are not free yet.
    pub(super) fn statuses(&self) -> impl Iterator<Item = DiskStatus> {
        self.list.iter().map(|of| DiskStatus {
            id: of.id,
            name: of.claim.layer().name().to_owned(),
            total_bytes: 0,
            free_bytes: 0,
            leaving: Some(LeavingDisk {
                left_bytes: 0,
                begun_bytes: 0,
                seconds_left: None,
            }),
        })
    }

    /// Returns the amount of work.
    pub(super) fn advance(&mut self, now: Nanos, disks: &mut Disks) -> u32 {
        let mut count = 0;
        for mut of in std::mem::take(&mut self.list) {
            if let DepartureStep::Lanes { number, left } = &of.step
                && left.is_empty()
                && let Some(disk) = disks.take_idle(*number)
            {
                of.step = DepartureStep::Erasing(Box::new(Erasing::begin(
                    disk,
                    &superblock_offsets(of.bytes, EDGE),
                )));
                count += 1;
            }
            let outcome = match &mut of.step {
                DepartureStep::Lanes { .. } => None,
                DepartureStep::Erasing(erasing) => erasing.advance(now),
            };
            match outcome {
                None => self.list.push(of),
                Some(outcome) => {
                    count += 1;
                    self.end(of, outcome);
                }
            }
        }
        count
    }

    fn end(&mut self, of: Departure, outcome: Result<(), Status>) {
        let Departure {
            id, step, claim, ..
        } = of;
        let name = claim.layer().name().to_owned();
        // The device is free before the news.
        drop(step);
        drop(claim);
        let result = outcome.map_err(|status| PoolError::Io {
            what: format!("its superblocks could not be erased: {status:?}"),
        });
        self.ended.push(Departed {
            disk: id,
            name,
            result,
        });
    }

    /// Announces departures that have ended: no status has their disks any more.
    pub(super) fn announce_ended(&mut self) {
        for departed in std::mem::take(&mut self.ended) {
            self.tell(departed);
        }
    }

    fn tell(&self, departed: Departed) {
        self.shared.departed.lock().push(departed);
        self.shared.news.notify_one();
    }

    pub(super) fn due(&self, now: Nanos) -> Idle {
        if self.list.is_empty() {
            Idle::Quiet
        } else {
            Idle::Until(now + LOOK)
        }
    }
}

impl Erasing {
    pub(super) fn begin(mut disk: Disk, offsets: &[u64]) -> Self {
        for (tag, offset) in (0..).zip(offsets) {
            disk.write(tag, *offset, Arc::new([0; PAGE]));
        }
        Self {
            disk,
            left: offsets.len(),
            is_flushed: false,
            failure: None,
            ended: Vec::new(),
        }
    }

    /// Returns the outcome once the superblocks are erased, durably.
    pub(super) fn advance(&mut self, now: Nanos) -> Option<Result<(), Status>> {
        self.disk.poll(now, &mut self.ended);
        for ended in self.ended.drain(..) {
            let (Ended::Written(_, status)
            | Ended::Flushed(_, status)
            | Ended::Discarded(_, status)) = ended
            else {
                continue;
            };
            self.left -= 1;
            if !status.is_ok() {
                self.failure.get_or_insert(status);
            }
        }
        if self.left > 0 {
            return None;
        }
        if let Some(status) = self.failure {
            return Some(Err(status));
        }
        if !std::mem::replace(&mut self.is_flushed, true) {
            self.left = 1;
            self.disk.flush(0);
            return None;
        }
        Some(Ok(()))
    }
}

impl Departures {
    /// The core needs a disk no more, or keeps it.
    pub(super) fn begin(
        &mut self,
        pool: &Pool,
        disks: &mut Disks,
        disk: usize,
        result: Result<(), Refusal>,
    ) {
        let known = pool.superblock().disks.disks()[disk];
        let claims = self.shared.claims.load();
        let name = claims.get(disk).and_then(|claim| claim.as_ref());
        let name = name.map_or_else(String::new, |claim| claim.layer().name().to_owned());
        drop(claims);
        if let Err(refusal) = result {
            self.tell(Departed {
                disk: known.id,
                name,
                result: Err(refusal.into()),
            });
        } else if let Some((claim, left)) = disks.withdraw(disk) {
            let number = disk;
            self.list.push(Departure {
                id: known.id,
                bytes: known.bytes,
                step: DepartureStep::Lanes { number, left },
                claim,
            });
        }
    }
}
