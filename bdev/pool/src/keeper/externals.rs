//! Devices outside of the pool that its volumes show: claims, and the keeper's queues.
//!
//! ```text
//!   attach, clone, set parent ──▶ present ──▶ detached, or shown by no volume ──▶ closing ──▶ free
//! ```
//!
//! A device is free when the keeper's reads of it have ended and every lane has closed its queue. A
//! read that the device does not answer in time ends as failed ([`crate::overdue`]).

use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use nacre_bdev::{Bdev, Claim, Status};
use nacre_bdev_pool_core::format::record::Identity;
use nacre_bdev_pool_core::format::superblock::Feature;
use nacre_bdev_pool_core::geometry::PAGE;
use nacre_bdev_pool_core::ids::VersionId;
use nacre_bdev_pool_core::pool::Pool;
use nacre_reactor::{Idle, Nanos};
use uuid::Uuid;

use super::disk::{Disk, Ended, Tag};
use super::disks::Disks;
use crate::map::LvolMap;
use crate::model::{ExternalParent, ExternalStatus, PoolError};
use crate::overdue::{MOST, Ticks};
use crate::port::Shared;

#[derive(Default)]
pub(super) struct Externals {
    present: HashMap<Uuid, Device>,
    /// Devices with reads in flight that no volume shows any more.
    closing: Vec<Device>,
    /// Reads that ended without a device.
    failed: Vec<Ended>,
    has_new_fds: bool,
    ticks: Ticks,
}

struct Device {
    disk: Disk,
    /// Reads in flight, each with the tick at which it began.
    reads: HashMap<Tag, u32>,
    /// Reads that failed because the device did not answer in time.
    overdue: u64,
    /// Commands in progress that need the device.
    pins: usize,
    /// The last field: the device is free when its queues are gone.
    claim: Arc<Claim>,
}

impl Externals {
    /// Opens a queue on a device, unless there is one. Fails if the device is being removed.
    pub(super) fn open(
        &mut self,
        disks: &Disks,
        shared: &Shared,
        claim: Arc<Claim>,
    ) -> Result<(), PoolError> {
        let device = claim.layer().uuid();
        let known = self.claim(device);
        if known.is_some_and(|known| Arc::ptr_eq(known.layer(), claim.layer())) {
            return Ok(());
        }
        let disk = disks.queue(&claim)?;
        // One that went, and whose end was not noted yet.
        let before = self.present.get(&device);
        let (pins, overdue) = before.map_or((0, 0), |of| (of.pins, of.overdue));
        self.remove(device);
        let layer = Arc::clone(claim.layer());
        let new = Device {
            disk,
            reads: HashMap::new(),
            overdue,
            pins,
            claim,
        };
        self.present.insert(device, new);
        self.has_new_fds = true;
        // A device that goes from here on is seen among the claims, and detached.
        self.publish(shared);
        if layer.is_gone() {
            self.remove(device);
            self.publish(shared);
            let why = "it is being removed".to_owned();
            return Err(PoolError::Unfit { what: "bdev", why });
        }
        Ok(())
    }

    fn publish(&self, shared: &Shared) {
        shared.status.lock().external_claims = self.present.keys().copied().collect();
    }

    /// Reads granules of the device below a version.
    pub(super) fn read(
        &mut self,
        pool: &Pool,
        (version, place): (VersionId, u64),
        ios: Vec<(Tag, u32)>,
    ) {
        let device = device_of(pool, version);
        let device = device.and_then(|device| self.present.get_mut(&device.id));
        let Some(device) = device else {
            let failed = |(tag, _)| Ended::Read(tag, Err(Status::Gone));
            return self.failed.extend(ios.into_iter().map(failed));
        };
        let per_unit = u64::from(pool.superblock().geometry.granules_per_unit);
        for (tag, granule) in ios {
            if device.disk.given_up() >= MOST {
                device.overdue += 1;
                self.failed.push(Ended::Read(tag, Err(Status::Gone)));
                continue;
            }
            let offset = (place * per_unit + u64::from(granule)) * PAGE as u64;
            device.disk.read(tag, offset, PAGE);
            device.reads.insert(tag, self.ticks.now());
        }
    }

    /// Brings maps, claims and the status up to date. `changed`: versions that may be of another
    /// family now; `None`: devices have come or gone.
    pub(super) fn refresh(
        &mut self,
        pool: &Pool,
        (maps, shared): (&HashMap<VersionId, Arc<LvolMap>>, &Shared),
        changed: Option<&[VersionId]>,
    ) {
        let is_used = pool.superblock().required & Feature::ExternalParents as u64 != 0;
        if !is_used && self.present.is_empty() {
            return;
        }
        let mut is_new = changed.is_none();
        for (version, map) in maps {
            if changed.is_none_or(|changed| changed.contains(version)) {
                let device = device_of(pool, *version);
                let claim = device.and_then(|device| self.claim(device.id));
                is_new |= map.set_external(claim);
            }
        }
        let unit = pool.superblock().geometry.unit_bytes();
        let shown = pool.state().externals().map(|(_, version)| ExternalStatus {
            parent: parent_of(&version.identity),
            bytes: version.units * unit,
            is_present: self.claim(version.identity.id).is_some(),
        });
        let statuses: Vec<ExternalStatus> = shown.collect();
        let is_shown = |device: &Uuid| statuses.iter().any(|of| of.parent.id == *device);
        let present = self.present.iter();
        let unused = present.filter(|(device, known)| known.pins == 0 && !is_shown(device));
        let unused: Vec<Uuid> = unused.map(|(device, _)| *device).collect();
        for device in unused {
            is_new |= self.remove(device);
        }
        shared.status.lock().externals = statuses;
        self.publish(shared);
        if is_new {
            shared.announce_external();
        }
    }

    /// True when the device that the pool has is being removed. A UUID may come back with another
    /// device.
    pub(super) fn is_gone(&self, device: Uuid) -> bool {
        self.claim(device)
            .is_some_and(|claim| claim.layer().is_gone())
    }

    /// Number of reads of the device that it did not answer in time.
    pub(super) fn overdue(&self, device: Uuid) -> u64 {
        self.present.get(&device).map_or(0, |known| known.overdue)
    }

    /// True when the pool does not have the device, or has one that is being removed.
    pub(super) fn is_missing(&self, device: Uuid) -> bool {
        let claim = self.claim(device);
        claim.is_none_or(|claim| claim.layer().is_gone())
    }

    fn claim(&self, device: Uuid) -> Option<&Arc<Claim>> {
        self.present.get(&device).map(|device| &device.claim)
    }

    pub(super) fn remove(&mut self, device: Uuid) -> bool {
        let removed = self.present.remove(&device);
        self.has_new_fds |= removed.is_some();
        let is_known = removed.is_some();
        self.closing.extend(removed);
        is_known
    }

    /// A command needs a device.
    pub(super) fn pin(&mut self, device: Uuid) {
        if let Some(known) = self.present.get_mut(&device) {
            known.pins += 1;
        }
    }

    pub(super) fn unpin(&mut self, device: Uuid) {
        if let Some(known) = self.present.get_mut(&device) {
            known.pins = known.pins.saturating_sub(1);
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.failed.is_empty() && self.all().all(|device| device.disk.is_idle())
    }

    /// The names of devices with reads in flight.
    pub(super) fn busy(&self) -> Vec<String> {
        let busy = self.all().filter(|device| !device.disk.is_idle());
        busy.map(|device| device.claim.layer().name().to_owned())
            .collect()
    }

    fn all(&self) -> impl Iterator<Item = &Device> {
        self.present.values().chain(&self.closing)
    }

    fn all_mut(&mut self) -> impl Iterator<Item = &mut Device> {
        self.present.values_mut().chain(&mut self.closing)
    }

    pub(super) fn poll(&mut self, now: Nanos, ended: &mut Vec<Ended>) {
        ended.append(&mut self.failed);
        let has_reads = self.all().any(|device| !device.reads.is_empty());
        let is_tick = self.ticks.advance(now, has_reads);
        let devices = self.present.values_mut().chain(&mut self.closing);
        for device in devices {
            let known = ended.len();
            device.disk.poll(now, ended);
            for io in &ended[known..] {
                if let Ended::Read(tag, _) = io {
                    device.reads.remove(tag);
                }
            }
            if is_tick {
                device.give_up_overdue(&self.ticks, ended);
            }
        }
        let before = self.closing.len();
        self.closing.retain(|device| !device.disk.is_idle());
        self.has_new_fds |= self.closing.len() < before;
    }

    pub(super) fn arm(&mut self, now: Nanos) -> Idle {
        if !self.failed.is_empty() {
            return Idle::Busy;
        }
        let idles = self.all_mut().map(|device| device.disk.arm(now));
        let idle = idles.fold(Idle::Quiet, Idle::and);
        idle.and(self.ticks.due().map_or(Idle::Quiet, Idle::Until))
    }

    pub(super) fn disarm(&mut self) {
        self.all_mut().for_each(|device| device.disk.disarm());
    }

    /// True once after each change of the queues.
    pub(super) fn take_new_fds(&mut self) -> bool {
        std::mem::take(&mut self.has_new_fds)
    }

    pub(super) fn wake_fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.all().filter_map(|device| device.disk.wake_fd())
    }
}

/// The external device whose data a command copies.
pub(super) struct Source {
    pub device: ExternalParent,
    /// Its overdue reads before the command.
    overdue: u64,
}

impl Source {
    pub(super) fn new(device: ExternalParent, externals: &Externals) -> Self {
        let overdue = externals.overdue(device.id);
        Self { device, overdue }
    }

    /// The error of a command that could not read the device. `None`: the fault is another one.
    pub(super) fn failure(&self, externals: &Externals) -> Option<PoolError> {
        let device = self.device.clone();
        if externals.is_missing(device.id) {
            Some(PoolError::Degraded(device))
        } else if externals.overdue(device.id) > self.overdue {
            Some(PoolError::Silent(device))
        } else {
            None
        }
    }
}

impl Device {
    /// Ends the overdue reads as failed.
    fn give_up_overdue(&mut self, ticks: &Ticks, ended: &mut Vec<Ended>) {
        let overdue = self.reads.iter().filter(|(_, at)| ticks.is_overdue(**at));
        let overdue: Vec<Tag> = overdue.map(|(tag, _)| *tag).collect();
        if overdue.is_empty() {
            return;
        }
        tracing::warn!(
            bdev = self.claim.layer().name(),
            "a device that lvols show does not answer: its data cannot be copied"
        );
        for tag in overdue {
            self.overdue += 1;
            self.reads.remove(&tag);
            self.disk.give_up(tag);
            ended.push(Ended::Read(tag, Err(Status::Gone)));
        }
    }
}

/// The external device of a version's family.
pub(super) fn device_of(pool: &Pool, version: VersionId) -> Option<ExternalParent> {
    // Pools that never had such a device skip the walk to the oldest ancestor.
    if pool.superblock().required & Feature::ExternalParents as u64 == 0 {
        return None;
    }
    let state = pool.state();
    let device = state.external_parent(version)?;
    Some(parent_of(&state.versions[&device].identity))
}

pub(super) fn parent_of(identity: &Identity) -> ExternalParent {
    ExternalParent {
        id: identity.id,
        name: identity.name.clone(),
    }
}

/// The device below a version that is missing.
pub(super) fn missing_of(
    pool: &Pool,
    externals: &Externals,
    version: VersionId,
) -> Option<ExternalParent> {
    device_of(pool, version).filter(|device| externals.is_missing(device.id))
}
