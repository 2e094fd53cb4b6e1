//! The addition of a disk to an open pool.
//!
//! ```text
//!   AddDisk ──▶ probe ──▶ lanes open queues ──▶ core: superblocks, roots ──▶ answer
//!               empty?    on the disk            └ failed ─▶ lanes close them
//! ```
//!
//! Every lane has a queue on the disk before the core hands out a unit of it: an I/O never finds a
//! disk that its core cannot reach.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use nacre_bdev::Claim;
use nacre_bdev_pool_core::format::superblock::Superblock;
use nacre_bdev_pool_core::geometry::PAGE;
use nacre_bdev_pool_core::interface::{Refusal, Request};
use nacre_bdev_pool_core::pool::Pool;
use nacre_reactor::{Idle, Nanos};
use uuid::Uuid;

use super::disk::{Disk, Ended};
use super::disks::Disks;
use super::opening::{contents, probe};
use crate::fit::size_of;
use crate::model::{Answer, PoolError};

/// How long lanes may take to open their queues on a new disk. A caller waits longer.
const LANES: Duration = if cfg!(test) {
    Duration::from_millis(500)
} else {
    Duration::from_secs(5)
};
/// How often the reads of a new disk are looked at.
const PROBE_LOOK: Duration = Duration::from_millis(1);

/// One disk at a time joins the pool.
#[derive(Default)]
pub(super) struct Additions {
    present: Option<Addition>,
}

struct Addition {
    claim: Arc<Claim>,
    id: Uuid,
    disk_bytes: u64,
    force: bool,
    answer: Answer,
    step: AdditionStep,
}

enum AdditionStep {
    Probe(Box<Probe>),
    /// Lanes that have no queue on the disk yet.
    Lanes {
        left: HashSet<u32>,
        deadline: Option<Nanos>,
    },
}

/// The reads that show whether the disk is empty.
struct Probe {
    disk: Disk,
    /// Reads in flight.
    left: usize,
    /// Data of others, or an error.
    found: Option<PoolError>,
    /// The disk is of the pool already, or cannot be read: force changes nothing.
    refused: Option<PoolError>,
    ended: Vec<Ended>,
}

impl Additions {
    pub(super) fn begin(
        &mut self,
        pool: &Pool,
        disks: &Disks,
        claim: Arc<Claim>,
        force: bool,
        answer: Answer,
    ) {
        if pool.is_held() {
            return answer.fail(PoolError::Refused(Refusal::Held));
        }
        if self.present.is_some() {
            return answer.fail(PoolError::Busy);
        }
        let (disk_bytes, probe) = match Probe::begin(pool, disks, &claim) {
            Ok(begun) => begun,
            Err(error) => return answer.fail(error),
        };
        self.present = Some(Addition {
            claim,
            id: Uuid::new_v4(),
            disk_bytes,
            force,
            answer,
            step: AdditionStep::Probe(Box::new(probe)),
        });
    }

    /// Returns the amount of work, and the core's request once every lane has the disk.
    pub(super) fn advance(
        &mut self,
        now: Nanos,
        pool: &Pool,
        disks: &mut Disks,
    ) -> (u32, Option<(Request, Answer)>) {
        let Some(addition) = &mut self.present else {
            return (0, None);
        };
        match &mut addition.step {
            AdditionStep::Probe(probe) => {
                let count = probe.poll(now, pool);
                if probe.left > 0 {
                    return (count, None);
                }
                let found = probe.found.take().filter(|_| !addition.force);
                if let Some(error) = probe.refused.take().or(found) {
                    self.fail(error);
                    return (count + 1, None);
                }
                addition.give_to_lanes(disks);
                (count + 1, None)
            }
            AdditionStep::Lanes { left, deadline } => {
                let deadline = *deadline.get_or_insert(now + LANES);
                if left.is_empty() {
                    return (1, self.present.take().map(Addition::request));
                }
                if deadline > now {
                    return (0, None);
                }
                disks.pop();
                self.fail(PoolError::Io {
                    what: "a core did not open a queue on it in time".to_owned(),
                });
                (1, None)
            }
        }
    }

    /// When the addition needs a look.
    pub(super) fn due(&self, now: Nanos) -> Idle {
        match self.present.as_ref().map(|addition| &addition.step) {
            None => Idle::Quiet,
            Some(AdditionStep::Lanes { left, deadline }) if !left.is_empty() => {
                deadline.map_or(Idle::Busy, Idle::Until)
            }
            Some(AdditionStep::Probe(probe)) if probe.left > 0 => Idle::Until(now + PROBE_LOOK),
            Some(_) => Idle::Busy,
        }
    }

    /// A lane has a queue on every disk, or has none and could not open it; or it is gone.
    pub(super) fn lane_answered(
        &mut self,
        lane: u32,
        outcome: Result<(), String>,
        disks: &mut Disks,
    ) {
        let Some(addition) = &mut self.present else {
            return;
        };
        let AdditionStep::Lanes { left, .. } = &mut addition.step else {
            return;
        };
        let is_awaited = left.remove(&lane);
        if let Err(what) = outcome
            && is_awaited
        {
            disks.pop();
            self.fail(PoolError::Io { what });
        }
    }

    fn fail(&mut self, error: PoolError) {
        if let Some(addition) = self.present.take() {
            addition.answer.fail(error);
        }
    }

    pub(super) fn close(&mut self) {
        if let Some(addition) = self.present.take() {
            addition.answer.closed();
        }
    }
}

impl Addition {
    /// The queue on the disk joins the others, and every lane opens one.
    fn give_to_lanes(&mut self, disks: &mut Disks) {
        let lanes = AdditionStep::Lanes {
            left: HashSet::new(),
            deadline: None,
        };
        if let AdditionStep::Probe(probe) = std::mem::replace(&mut self.step, lanes)
            && let AdditionStep::Lanes { left, .. } = &mut self.step
        {
            *left = disks.push(probe.disk, &self.claim);
        }
    }

    fn request(self) -> (Request, Answer) {
        let Self { id, disk_bytes, .. } = self;
        (Request::AddDisk { id, disk_bytes }, self.answer)
    }
}

impl Probe {
    /// Begins to read a disk that fits the pool. Returns its size, too.
    fn begin(pool: &Pool, disks: &Disks, claim: &Claim) -> Result<(u64, Self), PoolError> {
        let disk_bytes = size_of(claim)?;
        disks.check(claim, pool)?;
        let mut disk = disks.queue(claim)?;
        let left = probe(&mut disk, disk_bytes);
        let begun = Self {
            disk,
            left,
            found: None,
            refused: None,
            ended: Vec::new(),
        };
        Ok((disk_bytes, begun))
    }

    /// Returns the number of completions.
    fn poll(&mut self, now: Nanos, pool: &Pool) -> u32 {
        self.disk.poll(now, &mut self.ended);
        let count = self.ended.len() as u32;
        for ended in self.ended.drain(..) {
            let Ended::Read(tag, result) = ended else {
                continue;
            };
            self.left -= 1;
            match result {
                Ok(bytes) => match whose(pool, &bytes) {
                    DiskOwner::Pool { number } => {
                        let why = format!("it is disk {number} of the pool, or a copy of it");
                        self.refused = Some(PoolError::Unfit { what: "disk", why });
                    }
                    DiskOwner::Addition => {}
                    DiskOwner::Other => {
                        self.found = self.found.take().or_else(|| contents(tag, &bytes));
                    }
                },
                Err(status) => {
                    self.refused = Some(PoolError::Io {
                        what: format!("a read ended with {status:?}"),
                    });
                }
            }
        }
        count
    }
}

/// The owner of bytes at the place of a superblock.
enum DiskOwner {
    /// A disk of the pool.
    Pool {
        number: usize,
    },
    /// An addition to the pool that a crash ended, and nothing else.
    Addition,
    Other,
}

/// The owner of these bytes. A torn superblock, and one with other bytes behind it, may be data of
/// others. A superblock with a later sequence than the pool's has data of the pool, which was
/// restored to an earlier state.
fn whose(pool: &Pool, bytes: &[u8]) -> DiskOwner {
    let root = pool.superblock();
    let page = bytes.first_chunk();
    let Some(found) = page.and_then(|page| Superblock::decode(page).ok()) else {
        return DiskOwner::Other;
    };
    if found.pool != root.pool {
        return DiskOwner::Other;
    }
    if let Some(at) = root.disks.position(found.disk) {
        return DiskOwner::Pool { number: at + 1 };
    }
    let is_last = found.disks.disks().last().map(|disk| disk.id) == Some(found.disk);
    let is_alone = bytes[PAGE..].iter().all(|byte| *byte == 0);
    if is_last && is_alone && found.sequence <= root.sequence {
        DiskOwner::Addition
    } else {
        DiskOwner::Other
    }
}
