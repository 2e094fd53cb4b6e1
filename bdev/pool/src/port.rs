//! Messages between lanes, commands and the keeper.
//!
//! Each receiver has an inbox and a bell: a sender adds to the inbox, then rings. The bell is
//! silent while the receiver is awake.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use arc_swap::{ArcSwap, ArcSwapOption};
use nacre_bdev::{Bdev, Claim, Layer};
use nacre_bdev_pool_core::disks::DiskTable;
use nacre_bdev_pool_core::geometry::Geometry;
use nacre_bdev_pool_core::ids::VersionId;
use nacre_bdev_pool_core::interface::{Refusal, Write};
use nacre_reactor::doorbell::Doorbell;
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};
use tokio::sync::Notify;

use crate::BLOCK;
use crate::grace::Counts;
use crate::loss::LossWatch;
use crate::map::LvolMap;
use crate::model::{CommandRequest, Departed, PoolStatus};

/// A request's number in its lane.
pub(crate) type RequestId = u32;

#[derive(Debug)]
pub(crate) enum ToKeeper {
    /// Fill the leaf of a place.
    Load {
        request: RequestId,
        map: MapId,
        place: u64,
    },
    Write {
        request: RequestId,
        serial: u64,
        write: Write,
    },
    Unmap {
        request: RequestId,
        map: MapId,
        first: u64,
        granules: u64,
    },
    DataWritten {
        request: RequestId,
        is_ok: bool,
    },
    /// Checksums of the granules that were read; `None`: the read failed.
    SourceRead {
        request: RequestId,
        sums: Option<Vec<u32>>,
    },
    /// The lane has a queue on every disk, or could not open one.
    Disks {
        round: u64,
        outcome: Result<(), String>,
    },
    /// The lane is closed, and no I/O of its requests is in flight.
    Closed,
}

impl ToKeeper {
    /// The request that waits for an answer.
    pub(crate) fn request(&self) -> Option<RequestId> {
        match self {
            Self::Load { request, .. }
            | Self::Write { request, .. }
            | Self::Unmap { request, .. } => Some(*request),
            Self::DataWritten { .. }
            | Self::SourceRead { .. }
            | Self::Disks { .. }
            | Self::Closed => None,
        }
    }
}

/// A version, and the map that the lane has of it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MapId {
    pub version: VersionId,
    pub serial: u64,
}

#[derive(Debug)]
pub(crate) enum ToLane {
    /// The leaf is filled.
    Loaded { request: RequestId },
    /// The disks of the pool changed: open queues on new ones, and answer with the round.
    Disks { round: u64 },
    /// The external device of the map may be another one, or gone: close queues on others.
    External,
    /// Write the request's granules to a unit, with those that were read for it.
    Data {
        request: RequestId,
        unit: u64,
        copy: u16,
    },
    /// Read granules of a unit, or of the external device at the place of the request, and keep
    /// them for `Data`.
    ReadSource {
        request: RequestId,
        unit: u64,
        granules: u16,
    },
    Answer {
        request: RequestId,
        result: Result<(), Refusal>,
    },
}

pub(crate) struct Inbox<T> {
    list: Mutex<Option<Vec<T>>>,
    has_any: AtomicBool,
    doorbell: Doorbell,
    bell: OwnedFd,
}

impl<T> Inbox<T> {
    pub(crate) fn new() -> std::io::Result<Self> {
        Ok(Self {
            list: Mutex::new(Some(Vec::new())),
            has_any: AtomicBool::new(false),
            doorbell: Doorbell::new(),
            bell: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        })
    }

    /// Adds messages. A closed inbox takes none, and returns false.
    pub(crate) fn send(&self, messages: impl IntoIterator<Item = T>) -> bool {
        {
            let mut list = self.list.lock();
            let Some(list) = &mut *list else {
                return false;
            };
            list.extend(messages);
            self.has_any.store(true, Ordering::Release);
        }
        self.ring();
        true
    }

    pub(crate) fn ring(&self) {
        self.doorbell.ring(|| {
            // A full counter is readable, too; a write to an own eventfd has no other error.
            let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
        });
    }

    /// Moves all messages to `into`, which is empty.
    pub(crate) fn take(&self, into: &mut Vec<T>) {
        if !self.has_any.load(Ordering::Acquire) {
            return;
        }
        let mut list = self.list.lock();
        self.has_any.store(false, Ordering::Release);
        if let Some(list) = &mut *list {
            std::mem::swap(list, into);
        }
    }

    /// Refuses messages from now on. Returns those that were not taken.
    pub(crate) fn close(&self) -> Vec<T> {
        self.list.lock().take().unwrap_or_default()
    }

    /// True when messages wait.
    pub(crate) fn has_any(&self) -> bool {
        self.has_any.load(Ordering::Acquire)
    }

    /// Prepares for sleep: call [`Inbox::take`] or [`Inbox::has_any`] after it.
    pub(crate) fn arm(&self) {
        let _ = rustix::io::read(&self.bell, &mut [0u8; 8]);
        self.doorbell.announce();
    }

    pub(crate) fn disarm(&self) {
        self.doorbell.awake();
    }
}

impl<T> AsFd for Inbox<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}

/// A lane, as the keeper sees it.
pub(crate) struct LanePort {
    /// Never used again by another lane.
    pub id: u32,
    pub inbox: Inbox<ToLane>,
    pub counts: Counts,
    /// The lane is gone, and its I/O has not ended.
    pub is_dead: AtomicBool,
}

pub(crate) enum KeeperMessage {
    Lane(u32, ToKeeper),
    Command(CommandRequest),
}

/// Bytes of the device, in whole blocks of the pool.
pub(crate) fn disk_bytes(claim: &Claim) -> u64 {
    layer_bytes(claim.layer())
}

pub(crate) fn layer_bytes(layer: &Layer) -> u64 {
    let bytes = layer.geometry().bytes();
    bytes / u64::from(BLOCK) * u64::from(BLOCK)
}

/// A disk of the pool, and its losses before it joined. `None`: it has left, with this many.
type Joined = (Option<Arc<Claim>>, u64);

/// The parts of a pool that all cores see.
pub(crate) struct Shared {
    /// The disks, in the pool's order once it is open. `None`: the disk has left.
    pub claims: ArcSwap<Vec<Option<Arc<Claim>>>>,
    /// The disks that the pool has.
    joined: ArcSwap<Vec<Joined>>,
    /// The disks that may lose writes.
    pub losses: LossWatch,
    /// The places of units. A new unit is in it before a lane hears of the unit.
    pub table: ArcSwapOption<DiskTable>,
    /// Set once, when the pool is open.
    pub geometry: std::sync::OnceLock<Geometry>,
    pub inbox: Inbox<KeeperMessage>,
    pub epoch: AtomicU64,
    /// Records up to here are settled.
    pub settled: AtomicU64,
    /// The disks that the keeper's copies of data went to, a bit each.
    pub filled: AtomicU64,
    pub lanes: Mutex<Vec<Arc<LanePort>>>,
    next_lane: AtomicU64,
    pub status: Mutex<PoolStatus>,
    pub news: Arc<Notify>,
    /// Disks that left, or stay after all, which no caller has taken.
    pub departed: Mutex<Vec<Departed>>,
    /// Disks that the end of the keeper waits for, once it has waited for a while.
    pub late: Mutex<Vec<String>>,
    /// Number of updates of the status.
    #[cfg(test)]
    pub statuses: AtomicU64,
}

impl Shared {
    pub(crate) fn new(claims: Vec<Claim>, status: PoolStatus) -> std::io::Result<Self> {
        let losses = LossWatch::default();
        claims.iter().for_each(|claim| losses.add(claim));
        let claims = claims.into_iter().map(|claim| Some(Arc::new(claim)));
        let claims: Vec<Option<Arc<Claim>>> = claims.collect();
        Ok(Self {
            claims: ArcSwap::from_pointee(claims),
            joined: ArcSwap::default(),
            losses,
            table: ArcSwapOption::default(),
            geometry: std::sync::OnceLock::new(),
            inbox: Inbox::new()?,
            epoch: AtomicU64::new(0),
            settled: AtomicU64::new(0),
            filled: AtomicU64::new(0),
            lanes: Mutex::default(),
            next_lane: AtomicU64::new(1),
            status: Mutex::new(status),
            news: Arc::default(),
            departed: Mutex::default(),
            late: Mutex::default(),
            #[cfg(test)]
            statuses: AtomicU64::new(0),
        })
    }

    /// The names of the devices that the pool has.
    pub(crate) fn bases(&self) -> Vec<String> {
        let status = self.status.lock();
        match &status.disks[..] {
            [] => vec![status.disk.clone()],
            disks => disks.iter().map(|disk| disk.name.clone()).collect(),
        }
    }

    /// Counts losses of the pool's disks, each since it joined. Lanes ask for each I/O.
    pub(crate) fn losses(&self) -> u64 {
        let joined = self.joined.load();
        let losses = joined.iter().map(|(claim, before)| match claim {
            Some(claim) => claim.layer().losses().saturating_sub(*before),
            None => *before,
        });
        losses.sum()
    }

    /// Takes over the disks that the pool has. Those that are new count losses from now on.
    pub(crate) fn note_joined(&self, count: usize) {
        let joined = self.joined.load();
        if joined.len() >= count {
            return;
        }
        let claims = self.claims.load();
        let known = joined.len();
        let is_first = known == 0;
        let new = claims.iter().take(count).skip(known).map(|claim| {
            let before = match claim {
                Some(claim) if !is_first => claim.layer().losses(),
                _ => 0,
            };
            (claim.clone(), before)
        });
        let all: Vec<Joined> = joined.iter().cloned().chain(new).collect();
        self.joined.store(Arc::new(all));
    }

    /// A disk has left: its losses count, and it has no further ones. Returns its claim.
    pub(crate) fn take_claim(&self, disk: usize) -> Option<Arc<Claim>> {
        let mut joined: Vec<Joined> = self.joined.load().iter().cloned().collect();
        if let Some((claim, before)) = joined.get_mut(disk)
            && let Some(claim) = claim.take()
        {
            *before = claim.layer().losses().saturating_sub(*before);
        }
        self.joined.store(Arc::new(joined));
        let mut claims: Vec<_> = self.claims.load().iter().cloned().collect();
        let taken = claims.get_mut(disk).and_then(Option::take);
        if let Some(claim) = &taken {
            self.losses.remove(claim);
        }
        self.claims.store(Arc::new(claims));
        taken
    }

    /// Frees the disks of a pool that has closed, whoever still has a device of it. The count of
    /// losses stays.
    pub(crate) fn release_claims(&self) {
        let joined = self.joined.load();
        let left = joined.iter().map(|(claim, before)| match claim {
            Some(claim) => (None, claim.layer().losses().saturating_sub(*before)),
            None => (None, *before),
        });
        self.joined.store(Arc::new(left.collect()));
        let none = vec![None; self.claims.load().len()];
        self.claims.store(Arc::new(none));
    }

    /// Notes the disk of a copy before it is written. A later record of the same place may need
    /// the copy at the import, so flushes of hosts concern the disk, too.
    pub(crate) fn note_fill(&self, disk: usize) {
        self.filled.fetch_or(1 << disk, Ordering::SeqCst);
    }

    /// The disks that a flush of a volume concerns, a bit each.
    pub(crate) fn flush_set(&self, map: &LvolMap) -> u64 {
        map.disks() | self.filled.load(Ordering::SeqCst)
    }

    /// The disk with the log.
    pub(crate) fn first(&self) -> Option<Arc<Claim>> {
        self.claims.load().first().cloned().flatten()
    }

    /// True when a disk may lose writes before a flush.
    pub(crate) fn has_cache(&self) -> bool {
        let claims = self.claims.load();
        let mut present = claims.iter().flatten();
        present.any(|claim| claim.layer().limits().volatile_cache)
    }

    /// Lets all lanes look for their external device.
    pub(crate) fn announce_external(&self) {
        let lanes = self.lanes.lock();
        let live = lanes
            .iter()
            .filter(|lane| !lane.is_dead.load(Ordering::Acquire));
        live.for_each(|lane| {
            // A lane that closes its inbox closes its queues, too.
            let _ = lane.inbox.send([ToLane::External]);
        });
    }

    pub(crate) fn remove_lane(&self, port: &Arc<LanePort>) {
        let mut lanes = self.lanes.lock();
        lanes.retain(|other| !Arc::ptr_eq(other, port));
    }

    pub(crate) fn add_lane(&self) -> std::io::Result<Arc<LanePort>> {
        let id = self.next_lane.fetch_add(1, Ordering::Relaxed);
        let id = u32::try_from(id).ok().filter(|id| *id < 1 << 30);
        let id = id.ok_or_else(|| std::io::Error::other("the pool had too many queues"))?;
        let port = Arc::new(LanePort {
            id,
            inbox: Inbox::new()?,
            counts: Counts::default(),
            is_dead: AtomicBool::new(false),
        });
        self.lanes.lock().push(Arc::clone(&port));
        Ok(port)
    }
}
