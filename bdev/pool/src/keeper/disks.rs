//! The bdev queues of the keeper (the owner of a pool's metadata) to the disks of the pool, and the
//! changes of the set of disks, which every lane must follow with its own queues.

use std::collections::HashSet;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use nacre_bdev::{Bdev, Claim};
use nacre_bdev_pool_core::disks::{DiskState, Location};
use nacre_bdev_pool_core::format::Page;
use nacre_bdev_pool_core::import::leftovers::Leftover;
use nacre_bdev_pool_core::pool::Pool;
use nacre_hugepages::Pool as Memory;
use nacre_reactor::{Idle, Nanos};

use super::disk::{Disk, Ended, Tag};
use crate::fit::check_disk;
use crate::model::{DiskStatus, LeavingDisk, PoolError};
use crate::port::{Shared, ToLane, disk_bytes};

/// The queues to all disks, by the disk's number in the pool.
pub(crate) struct Disks {
    /// `None`: the disk has left.
    list: Vec<Option<Disk>>,
    /// For each disk, its index among the disks that the import was given.
    order: Vec<usize>,
    /// Number of the last change of the set of disks. Answers of lanes to earlier changes are
    /// ignored.
    round: u64,
    /// The queues have changed since the reactor got their descriptors.
    has_new_fds: bool,
    shared: Arc<Shared>,
    memory: Memory,
}

impl Disks {
    /// Opens a queue to each claimed disk.
    pub(crate) fn open(shared: &Arc<Shared>, memory: Memory) -> Result<Self, PoolError> {
        let mut disks = Self {
            list: Vec::new(),
            order: Vec::new(),
            round: 0,
            has_new_fds: false,
            shared: Arc::clone(shared),
            memory,
        };
        for claim in shared.claims.load().iter().flatten() {
            let disk = disks.queue(claim)?;
            disks.list.push(Some(disk));
        }
        disks.order = (0..disks.list.len()).collect();
        Ok(disks)
    }

    /// Opens a queue to one disk.
    pub(super) fn queue(&self, claim: &Claim) -> Result<Disk, PoolError> {
        let queue = claim.open(&self.memory).map_err(|error| PoolError::Io {
            what: error.to_string(),
        })?;
        Ok(Disk::new(queue, &**claim.layer(), self.memory.clone()))
    }

    /// Fails if a device cannot become a disk of the pool.
    pub(super) fn check(&self, claim: &Claim, pool: &Pool) -> Result<(), PoolError> {
        let claims = self.shared.claims.load();
        check_disk(claim, claims.iter().flatten().map(|claim| &**claim), pool)
    }

    /// Keeps the disks with the numbers in `order`, and numbers them in that order. Removes the
    /// queues of `others`, and returns them.
    pub(super) fn reorder(
        &mut self,
        order: &[usize],
        others: Vec<(usize, Leftover)>,
    ) -> Vec<(usize, Leftover, Disk)> {
        let mut before: Vec<Option<Disk>> = self.list.drain(..).collect();
        let kept = order.iter().map(|at| before[*at].take());
        self.list.extend(kept);
        self.order = order.to_vec();
        self.has_new_fds = true;
        let others = others.into_iter();
        others
            .filter_map(|(at, known)| Some((at, known, before[at].take()?)))
            .collect()
    }

    /// Takes the queue of a disk that has left the pool, unless it has I/O in flight.
    pub(super) fn take_idle(&mut self, disk: usize) -> Option<Disk> {
        let taken = self.list.get_mut(disk)?.take_if(|disk| disk.is_idle());
        self.has_new_fds |= taken.is_some();
        taken
    }

    /// Asks all lanes to close their queues to a disk that has left the pool. Returns the claim of
    /// the disk, and the lanes that will answer.
    pub(super) fn withdraw(&mut self, disk: usize) -> Option<(Arc<Claim>, HashSet<u32>)> {
        let claim = self.shared.take_claim(disk)?;
        Some((claim, self.change(|_| {})))
    }

    /// Adds a disk, and asks all lanes to open queues to it. Returns the lanes that will answer.
    /// Lanes that open later have the disk from the start.
    pub(super) fn push(&mut self, disk: Disk, claim: &Arc<Claim>) -> HashSet<u32> {
        self.list.push(Some(disk));
        self.shared.losses.add(claim);
        self.change(|claims| claims.push(Some(Arc::clone(claim))))
    }

    /// Removes the last disk.
    pub(super) fn pop(&mut self) {
        self.list.pop();
        let shared = Arc::clone(&self.shared);
        self.change(|claims| {
            if let Some(claim) = claims.pop().flatten() {
                shared.losses.remove(&claim);
            }
        });
    }

    /// Changes the claims, and asks all lanes to have queues to exactly these disks. Returns the
    /// lanes that will answer.
    fn change(&mut self, change: impl FnOnce(&mut Vec<Option<Arc<Claim>>>)) -> HashSet<u32> {
        let mut claims: Vec<Option<Arc<Claim>>> =
            self.shared.claims.load().iter().cloned().collect();
        change(&mut claims);
        self.shared.claims.store(Arc::new(claims));
        self.has_new_fds = true;
        self.round += 1;
        let round = self.round;
        let lanes = self.shared.lanes.lock();
        let live = lanes
            .iter()
            .filter(|lane| !lane.is_dead.load(Ordering::Acquire));
        let open = live.filter(|lane| lane.inbox.send([ToLane::Disks { round }]));
        open.map(|lane| lane.id).collect()
    }

    /// For each disk, its index among the disks that the import was given.
    pub(super) fn order(&self) -> &[usize] {
        &self.order
    }

    /// The queue to a disk, which has not left the pool.
    fn at(&mut self, disk: usize) -> Option<&mut Disk> {
        let known = self.list.get_mut(disk).and_then(Option::as_mut);
        debug_assert!(known.is_some(), "I/O on disk {disk}, which has left");
        known
    }

    pub(super) fn write(&mut self, tag: Tag, at: Location, bytes: Arc<Page>) {
        if let Some(disk) = self.at(at.disk) {
            disk.write(tag, at.offset, bytes);
        }
    }

    pub(super) fn flush(&mut self, tag: Tag, disk: usize) {
        if let Some(disk) = self.at(disk) {
            disk.flush(tag);
        }
    }

    pub(super) fn discard(&mut self, tag: Tag, at: Location, len: u64) {
        if let Some(disk) = self.at(at.disk) {
            disk.discard(tag, at.offset, len);
        }
    }

    pub(super) fn read(&mut self, tag: Tag, at: Location, len: usize) {
        if let Some(disk) = self.at(at.disk) {
            disk.read(tag, at.offset, len);
        }
    }

    pub(super) fn first(&mut self) -> Option<&mut Disk> {
        self.at(0)
    }

    /// True if `round` is the number of the last change.
    pub(super) fn is_round(&self, round: u64) -> bool {
        self.round == round
    }

    pub(super) fn is_idle(&self) -> bool {
        self.list.iter().flatten().all(Disk::is_idle)
    }

    /// Publishes which disks still have I/O in flight, and which `others`, while the end of the
    /// pool waits for it.
    pub(super) fn note_late(&self, others: Vec<String>) {
        let claims = self.shared.claims.load();
        let disks = self.list.iter().zip(claims.iter());
        let late = disks.filter_map(|(disk, claim)| {
            let is_busy = disk.as_ref().is_some_and(|disk| !disk.is_idle());
            is_busy.then(|| Some(claim.as_ref()?.layer().name().to_owned()))?
        });
        *self.shared.late.lock() = late.chain(others).collect();
    }

    pub(super) fn poll(&mut self, now: Nanos, ended: &mut Vec<Ended>) {
        let disks = self.list.iter_mut().flatten();
        disks.for_each(|disk| disk.poll(now, ended));
    }

    pub(super) fn arm(&mut self, now: Nanos) -> Idle {
        let mut disks = self.list.iter_mut().flatten();
        let first = disks.next().map_or(Idle::Quiet, |disk| disk.arm(now));
        disks.fold(first, |idle, disk| idle.and(disk.arm(now)))
    }

    pub(super) fn disarm(&mut self) {
        self.list.iter_mut().flatten().for_each(Disk::disarm);
    }

    /// True once after each change of the queues.
    pub(super) fn take_new_fds(&mut self) -> bool {
        std::mem::take(&mut self.has_new_fds)
    }

    pub(super) fn wake_fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.list.iter().flatten().filter_map(Disk::wake_fd)
    }
}

/// The disks of a pool with their use. `leaving`: the progress of one of them.
pub(super) fn statuses(
    shared: &Shared,
    pool: &Pool,
    leaving: Option<(usize, LeavingDisk)>,
) -> Vec<DiskStatus> {
    let claims = shared.claims.load();
    let table = &pool.superblock().disks;
    let unit = pool.superblock().geometry.unit_bytes();
    let is_leaving = |at: usize| leaving.is_some_and(|(of, _)| of == at);
    let disks = (0..table.disks().len()).filter_map(|at| {
        let claim = claims.get(at)?.as_ref()?;
        // The last roots are being written without a disk that has left.
        if table.disks()[at].state == DiskState::Gone && !is_leaving(at) {
            return None;
        }
        Some(DiskStatus {
            id: table.disks()[at].id,
            name: claim.layer().name().to_owned(),
            total_bytes: table.units_of(at) * unit,
            free_bytes: pool.free_units_of(at) * unit,
            leaving: leaving.filter(|(of, _)| *of == at).map(|(_, disk)| disk),
        })
    });
    disks.collect()
}

/// The first disk that has grown, and its size; without one the first disk.
pub(super) fn grown(pool: &Pool, shared: &Shared) -> Result<(usize, u64), PoolError> {
    let claims = shared.claims.load();
    let table = &pool.superblock().disks;
    let mut first = None;
    for (at, (disk, claim)) in table.disks().iter().zip(claims.iter()).enumerate() {
        let (Some(claim), DiskState::In) = (claim, disk.state) else {
            continue;
        };
        let found = disk_bytes(claim);
        if found < disk.bytes {
            return Err(PoolError::Unfit {
                what: "disk",
                why: format!(
                    "\"{}\" has {found} bytes, fewer than the {} of the pool",
                    claim.layer().name(),
                    disk.bytes
                ),
            });
        }
        let mut geometry = pool.superblock().geometry;
        let mut after = table.clone();
        let gains = after.grow(&mut geometry, at, found).is_ok() && after.units() > table.units();
        if gains {
            return Ok((at, found));
        }
        first.get_or_insert((at, found));
    }
    first.ok_or(PoolError::Closed)
}
