//! The keeper's queues on the disks of its pool.

use std::collections::HashSet;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use nacre_bdev::{Bdev, Claim};
use nacre_bdev_pool_core::disks::Location;
use nacre_bdev_pool_core::format::Page;
use nacre_bdev_pool_core::pool::Pool;
use nacre_hugepages::Pool as Memory;
use nacre_reactor::{Idle, Nanos};

use super::disk::{Disk, Ended, Tag};
use crate::fit::check_disk;
use crate::model::{DiskStatus, PoolError};
use crate::port::{Shared, ToLane, disk_bytes};

/// Queues on all disks, in the pool's order.
pub(crate) struct Disks {
    list: Vec<Disk>,
    /// The first number of each disk that is kept.
    order: Vec<usize>,
    /// Number of the last change of the list: an answer to an earlier one says nothing.
    round: u64,
    /// The reactor does not know the present queues' descriptors.
    has_new_fds: bool,
    shared: Arc<Shared>,
    memory: Memory,
}

impl Disks {
    /// A queue on each claimed disk.
    pub(crate) fn open(shared: &Arc<Shared>, memory: Memory) -> Result<Self, PoolError> {
        let mut disks = Self {
            list: Vec::new(),
            order: Vec::new(),
            round: 0,
            has_new_fds: false,
            shared: Arc::clone(shared),
            memory,
        };
        for claim in shared.claims.load().iter() {
            let disk = disks.queue(claim)?;
            disks.list.push(disk);
        }
        disks.order = (0..disks.list.len()).collect();
        Ok(disks)
    }

    pub(super) fn queue(&self, claim: &Claim) -> Result<Disk, PoolError> {
        let queue = claim.open(&self.memory).map_err(|error| PoolError::Io {
            what: error.to_string(),
        })?;
        Ok(Disk::new(queue, &**claim.layer(), self.memory.clone()))
    }

    /// Checks that a device can join the disks.
    pub(super) fn check(&self, claim: &Claim, pool: &Pool) -> Result<(), PoolError> {
        let claims = self.shared.claims.load();
        check_disk(claim, claims.iter().map(|claim| &**claim), pool)
    }

    /// Keeps these disks, in this order.
    pub(super) fn reorder(&mut self, order: &[usize]) {
        let mut before: Vec<Option<Disk>> = self.list.drain(..).map(Some).collect();
        let kept = order.iter().filter_map(|at| before[*at].take());
        self.list.extend(kept);
        self.order = order.to_vec();
        self.has_new_fds = true;
    }

    /// Adds a disk. Returns the lanes that will answer; a later one finds the disk when it opens.
    pub(super) fn push(&mut self, disk: Disk, claim: &Arc<Claim>) -> HashSet<u32> {
        self.list.push(disk);
        self.change(|claims| claims.push(Arc::clone(claim)))
    }

    /// Removes the last disk.
    pub(super) fn pop(&mut self) {
        self.list.pop();
        self.change(|claims| drop(claims.pop()));
    }

    /// Changes the claims, and asks all lanes for queues on exactly these disks.
    fn change(&mut self, change: impl FnOnce(&mut Vec<Arc<Claim>>)) -> HashSet<u32> {
        let mut claims: Vec<Arc<Claim>> = self.shared.claims.load().iter().cloned().collect();
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

    /// The first number of each disk that is kept, in the pool's order.
    pub(super) fn order(&self) -> &[usize] {
        &self.order
    }

    pub(super) fn write(&mut self, tag: Tag, at: Location, bytes: Arc<Page>) {
        self.list[at.disk].write(tag, at.offset, bytes);
    }

    pub(super) fn flush(&mut self, tag: Tag, disk: usize) {
        self.list[disk].flush(tag);
    }

    pub(super) fn discard(&mut self, tag: Tag, at: Location, len: u64) {
        self.list[at.disk].discard(tag, at.offset, len);
    }

    pub(super) fn read(&mut self, tag: Tag, at: Location, len: usize) {
        self.list[at.disk].read(tag, at.offset, len);
    }

    pub(super) fn first(&mut self) -> &mut Disk {
        &mut self.list[0]
    }

    /// True for the last change of the list.
    pub(super) fn is_round(&self, round: u64) -> bool {
        self.round == round
    }

    pub(super) fn is_idle(&self) -> bool {
        self.list.iter().all(Disk::is_idle)
    }

    pub(super) fn poll(&mut self, now: Nanos, ended: &mut Vec<Ended>) {
        self.list.iter_mut().for_each(|disk| disk.poll(now, ended));
    }

    pub(super) fn arm(&mut self, now: Nanos) -> Idle {
        let mut disks = self.list.iter_mut();
        let first = disks.next().map_or(Idle::Quiet, |disk| disk.arm(now));
        disks.fold(first, |idle, disk| idle.and(disk.arm(now)))
    }

    pub(super) fn disarm(&mut self) {
        self.list.iter_mut().for_each(Disk::disarm);
    }

    /// True once after each change of the queues.
    pub(super) fn take_new_fds(&mut self) -> bool {
        std::mem::take(&mut self.has_new_fds)
    }

    pub(super) fn wake_fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.list.iter().filter_map(Disk::wake_fd)
    }
}

/// The disks of a pool with their use.
pub(super) fn statuses(shared: &Shared, pool: &Pool) -> Vec<DiskStatus> {
    let claims = shared.claims.load();
    let table = &pool.superblock().disks;
    let unit = pool.superblock().geometry.unit_bytes();
    let disks = table.disks().iter().zip(claims.iter()).enumerate();
    disks
        .map(|(at, (disk, claim))| DiskStatus {
            id: disk.id,
            name: claim.layer().name().to_owned(),
            total_bytes: table.units_of(at) * unit,
            free_bytes: pool.free_units_of(at) * unit,
        })
        .collect()
}

/// The first disk that has grown, and its size; without one the first disk.
pub(super) fn grown(pool: &Pool, shared: &Shared) -> Result<(usize, u64), PoolError> {
    let claims = shared.claims.load();
    let table = &pool.superblock().disks;
    let mut first = None;
    for (at, (disk, claim)) in table.disks().iter().zip(claims.iter()).enumerate() {
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
