//! The state shared by the lanes and the control of a volume: atomics that are read without a lock,
//! and the view, which a lane locks only when its version has changed.
//!
//! | word | written by | read by |
//! |---|---|---|
//! | `version`, view | control | lanes, once per turn and per write |
//! | regions | both | both |
//! | stripes | both | both |
//! | missing regions | control; lanes, after a write that some replicas lack | lanes, per I/O |
//! | copying | control | lanes, per write |
//! | outstanding (one line per lane) | the lane | control, before a replica returns |
//! | reported | lanes | control |
//! | confirmations | control; lanes, when they hold answers | lanes with held answers, control |

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use nacre_bdev::{Io, Op, Status};
use parking_lot::Mutex;

use crate::answers::Confirmations;
use crate::format::layout::MAX_REGIONS;
use crate::missing_regions::MissingRegions;
use crate::model::{MAX_REPLICAS, VolumeRecord};
use crate::regions::Regions;
use crate::stripes::{Owner, Stripes};
use crate::view::{Mode, View};

/// Most lanes of one volume.
pub const MAX_LANES: usize = 128;
/// Most failure reports kept for the control; later ones are only counted.
const REPORTS: usize = 256;
/// Most waiting read repairs.
pub(crate) const REPAIRS: usize = 64;
/// Most regions that wait for priority repair.
const URGENT: u64 = 64;
/// Factor by which a volume can grow while it is open.
const ROOM: u64 = 4;
/// No region is being copied.
pub const NO_REGION: u64 = u64::MAX;

pub struct Shared {
    /// log2 of the blocks of a region.
    region_shift: u32,
    block_size: u32,
    /// Size of the volume; it only grows.
    blocks: AtomicU64,
    pub regions: Regions,
    pub stripes: Stripes,
    /// Missing regions of each replica, by slot.
    pub missing: [MissingRegions; MAX_REPLICAS],
    /// The region that is being copied, or [`NO_REGION`].
    copying: AtomicU64,
    /// Incremented whenever a lane adds missing regions.
    unequal: AtomicU64,
    /// Writes that were in flight at devices when their lane was closed.
    abandoned: AtomicU64,
    /// Number of regions for which lanes requested an immediate repair, and number of those that
    /// were tried. The control processes them in the order of the requests.
    urgent: AtomicU64,
    tried: AtomicU64,
    version: AtomicU64,
    shown: Mutex<PublishedView>,
    /// Number of incarnations of replicas so far; it makes incarnation numbers unique.
    incarnations: AtomicU64,
    /// Failures reported, by slot.
    reported: [AtomicU64; MAX_REPLICAS],
    news: Mutex<LaneMessages>,
    lanes: Mutex<Vec<Arc<LaneState>>>,
    control: Mutex<Option<Box<dyn Fn() + Send + Sync>>>,
    /// For answers without a good lease.
    pub confirmations: Confirmations,
    pub totals: Totals,
}

/// The view, and overrides that the control does not change.
struct PublishedView {
    view: Arc<View>,
    /// The mode as the control published it, without overrides.
    mode: Mode,
    /// The operator requested that I/O fails.
    failing: bool,
    /// The volume will not be opened any more.
    shut: bool,
}

impl PublishedView {
    fn over(&self, mode: Mode) -> Mode {
        match mode {
            _ if self.shut => Mode::Closed,
            Mode::Serving | Mode::Frozen if self.failing => Mode::FailIo,
            mode => mode,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ResizeError {
    #[error("a volume of {now} blocks does not shrink to {requested}")]
    Shrinks { now: u64, requested: u64 },
    #[error("{requested} blocks are more than the volume was opened for")]
    NoTables { requested: u64 },
}

/// Messages of the lanes for the control.
#[derive(Default)]
pub struct LaneMessages {
    /// Regions wanted for a first write. Bounded: a region is named once until it is dirty.
    pub wanted: Vec<u64>,
    pub reports: Vec<Report>,
    pub repairs: Vec<Repair>,
    /// Regions with priority for repair.
    pub urgent: Vec<u64>,
}

/// A replica failed an I/O.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Report {
    pub slot: usize,
    pub incarnation: u64,
    pub op: Op,
    pub lba: u64,
    pub why: Failure,
}

impl Report {
    /// Of two reports the one with the larger weight decides: another holder, then a failure of the
    /// replica, then an unreadable block.
    pub(crate) fn weight(&self) -> u8 {
        match self.why {
            why if why.is_fenced() => 2,
            why if self.op == Op::Read && !why.is_path() && !why.is_beyond_end() => 0,
            _ => 1,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failure {
    Status(Status),
    /// The I/O did not complete within the volume's deadline.
    Deadline,
    /// The replica may have lost acknowledged data.
    Loss,
    /// A queue to the replica could not be opened.
    Open,
    /// No buffer was free on this core: the replica got no request.
    Shortage,
    /// Another holder of the volume has reserved the replica.
    Fenced,
    /// A host that is not a holder has reserved the replica.
    Reserved,
    /// The device has the label of another replica.
    OtherReplica,
}

impl Failure {
    /// True if another holder has the volume: no I/O may be acknowledged.
    pub fn is_fenced(self) -> bool {
        match self {
            Self::Fenced => true,
            Self::Status(status) => status.is_reservation_conflict(),
            _ => false,
        }
    }

    /// True if the device has no space for the blocks: no fault of the device.
    pub fn is_no_space(self) -> bool {
        self == Self::Status(Status::NoSpace)
    }

    /// True if the medium cannot return the blocks.
    pub fn is_unreadable(self) -> bool {
        matches!(self, Self::Status(Status::ReadError | Status::Integrity))
    }

    /// True if the replica may be unreachable or slow. False if its device itself refused the I/O:
    /// a medium error, no space, write protection, an invalid or unsupported request, DNR.
    pub fn is_path(self) -> bool {
        !matches!(
            self,
            Self::Status(
                Status::ReadError
                    | Status::WriteError
                    | Status::Integrity
                    | Status::NoSpace
                    | Status::WriteProtected
                    | Status::OutOfRange
                    | Status::Unsupported
                    | Status::Nvme { dnr: true, .. }
            )
        )
    }
}

/// Blocks that one replica could not read and another could.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Repair {
    pub slot: usize,
    pub incarnation: u64,
    pub lba: u64,
    pub blocks: u32,
}

/// The state of one lane for the control and statistics, on its own cache lines.
#[repr(align(128))]
pub struct LaneState {
    pub owner: Owner,
    /// I/Os in flight to the device of each slot, of any incarnation. Above 0 while any is in
    /// flight; the exact number dates from the end of the last turn.
    pub outstanding: [AtomicU32; MAX_REPLICAS],
    pub gone: AtomicBool,
    bell: std::os::fd::OwnedFd,
}

impl LaneState {
    /// Wakes the lane.
    pub fn ring(&self) {
        // A full counter is readable, too; a write to an own eventfd has no other error.
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }

    pub fn bell(&self) -> &std::os::fd::OwnedFd {
        &self.bell
    }

    /// Resets the bell.
    pub fn clear_bell(&self) {
        let _ = rustix::io::read(&self.bell, &mut [0u8; 8]);
    }
}

/// Counters of the data path, by slot where noted.
#[derive(Default)]
pub struct Totals {
    /// Writes that waited for the dirty-region log.
    pub log_waits: AtomicU64,
    /// Writes that waited for an overlapping one.
    pub overlap_waits: AtomicU64,
    /// Reads that another replica had to serve.
    pub reads_moved: AtomicU64,
    /// I/Os completed with a path-related status while frozen.
    pub frozen_answers: AtomicU64,
    pub reads: [AtomicU64; MAX_REPLICAS],
    pub writes: [AtomicU64; MAX_REPLICAS],
    pub errors: [AtomicU64; MAX_REPLICAS],
}

impl Shared {
    pub fn new(record: &VolumeRecord) -> Arc<Self> {
        // Space for a volume that grows while it is open.
        let regions = (record.regions() * ROOM).max(1024);
        let regions = regions.clamp(1, MAX_REGIONS.max(record.regions()));
        Arc::new(Self {
            region_shift: record.region_blocks().ilog2(),
            block_size: record.block_size,
            blocks: AtomicU64::new(record.blocks),
            regions: Regions::new(regions),
            stripes: Stripes::new(record.blocks, record.block_size),
            missing: std::array::from_fn(|_| MissingRegions::new(regions)),
            copying: AtomicU64::new(NO_REGION),
            unequal: AtomicU64::new(0),
            abandoned: AtomicU64::new(0),
            urgent: AtomicU64::new(0),
            tried: AtomicU64::new(0),
            version: AtomicU64::new(0),
            shown: Mutex::new(PublishedView {
                view: Arc::new(View::closed(&record.settings)),
                mode: Mode::Closed,
                failing: false,
                shut: false,
            }),
            incarnations: AtomicU64::new(0),
            reported: Default::default(),
            news: Mutex::default(),
            lanes: Mutex::default(),
            control: Mutex::default(),
            confirmations: Confirmations::default(),
            totals: Totals::default(),
        })
    }

    #[inline]
    pub fn region_of(&self, lba: u64) -> u64 {
        lba >> self.region_shift
    }

    /// The regions that a range touches.
    #[inline]
    pub fn regions_of(&self, lba: u64, blocks: u64) -> std::ops::Range<u64> {
        self.region_of(lba)..self.region_of(lba + blocks.max(1) - 1) + 1
    }

    /// True when the tables are large enough for a volume of `blocks`.
    pub fn covers(&self, blocks: u64) -> bool {
        blocks.div_ceil(1 << self.region_shift) <= self.regions.len()
    }

    #[inline]
    pub fn version(&self) -> u64 {
        self.version.load(Ordering::SeqCst)
    }

    pub fn view(&self) -> Arc<View> {
        Arc::clone(&self.shown.lock().view)
    }

    /// Publishes `view` with a new version, and notifies all lanes.
    pub fn publish(&self, view: View) -> Arc<View> {
        let view = {
            let mut shown = self.shown.lock();
            shown.mode = view.mode;
            self.show(&mut shown, view)
        };
        self.ring_all();
        view
    }

    fn show(&self, shown: &mut PublishedView, mut view: View) -> Arc<View> {
        view.version = shown.view.version + 1;
        view.mode = shown.over(shown.mode);
        shown.view = Arc::new(view);
        self.version.store(shown.view.version, Ordering::SeqCst);
        Arc::clone(&shown.view)
    }

    fn lay_over(&self, change: impl FnOnce(&mut PublishedView)) {
        {
            let mut shown = self.shown.lock();
            change(&mut shown);
            let view = View::clone(&shown.view);
            self.show(&mut shown, view);
        }
        self.ring_all();
    }

    /// Starts or stops failing all I/O that would be served or wait for a replica.
    pub fn set_failing(&self, failing: bool) {
        self.lay_over(|shown| shown.failing = failing);
    }

    pub fn is_failing(&self) -> bool {
        self.shown.lock().failing
    }

    /// Ends all I/O with a path-related status, whatever view is published.
    pub fn shut(&self) {
        self.lay_over(|shown| shown.shut = true);
    }

    /// The effective mode for lanes: `mode` with the overrides.
    pub fn over(&self, mode: Mode) -> Mode {
        self.shown.lock().over(mode)
    }

    /// The number for a replica's next incarnation.
    pub fn next_incarnation(&self) -> u64 {
        self.incarnations.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// Discards the results of a failed opening: lanes see no replicas. No view served since, so no
    /// lane is inside a region, holds a stripe, or has I/O at a device.
    pub fn reset(&self, mode: Mode) {
        let inside = self.regions.clear_all();
        debug_assert_eq!(inside, 0, "a write is inside while it is frozen");
        self.missing
            .iter()
            .for_each(|regions| regions.assign(|_| false));
        self.set_copying(NO_REGION);
        *self.news.lock() = LaneMessages::default();
        let view = View {
            mode,
            replicas: Default::default(),
            ..View::clone(&self.view())
        };
        self.publish(view);
    }

    pub fn blocks(&self) -> u64 {
        self.blocks.load(Ordering::Relaxed)
    }

    /// The status of an I/O that ends without replicas: an unsupported operation, an invalid range,
    /// or success for no blocks. `None`: the replicas execute the I/O.
    #[inline]
    pub(crate) fn check(&self, io: &Io) -> Option<Status> {
        match io.op {
            Op::Flush => return None,
            Op::Read | Op::Write | Op::Unmap | Op::WriteZeroes => {}
            Op::Compare | Op::CompareAndWrite | Op::Copy | Op::Verify => {
                return Some(Status::Unsupported);
            }
        }
        let end = io.lba.checked_add(u64::from(io.blocks));
        if end.is_none_or(|end| end > self.blocks()) {
            return Some(Status::OutOfRange);
        }
        (io.blocks == 0).then_some(Status::Ok)
    }

    /// Enlarges the volume. The control has checked the size of all replicas. The caller of the
    /// command notifies the registry (`Registry::notify_resize`).
    pub fn grow(&self, blocks: u64) -> Result<(), ResizeError> {
        let now = self.blocks();
        if blocks < now {
            return Err(ResizeError::Shrinks {
                now,
                requested: blocks,
            });
        }
        if !self.covers(blocks) {
            return Err(ResizeError::NoTables { requested: blocks });
        }
        self.blocks.store(blocks, Ordering::Relaxed);
        Ok(())
    }

    /// True when the tables fit the volume's present record in the store. Only the labels know the
    /// size of a restored volume: its hosts keep the size that they know until it is opened.
    pub fn fits(&self, record: &VolumeRecord) -> bool {
        self.block_size == record.block_size
            && self.region_shift == record.region_blocks().ilog2()
            && (self.blocks() <= record.blocks || record.restored.is_some())
            && self.covers(record.blocks)
    }

    #[inline]
    pub fn copying(&self) -> u64 {
        self.copying.load(Ordering::SeqCst)
    }

    pub fn set_copying(&self, region: u64) {
        self.copying.store(region, Ordering::SeqCst);
    }

    /// Number of calls of [`Shared::add_needs`].
    pub fn unequal(&self) -> u64 {
        self.unequal.load(Ordering::SeqCst)
    }

    /// Adds regions that the replica in `slot` misses, because a write was not executed everywhere.
    /// Call this while the write still holds its stripes.
    pub fn add_needs(&self, slot: usize, regions: std::ops::Range<u64>) {
        // Increment first: copying code that reads an unchanged number has not removed the regions
        // yet.
        self.unequal.fetch_add(1, Ordering::SeqCst);
        regions.for_each(|region| self.missing[slot].insert(region));
        self.wake_control();
    }

    /// Writes that were in flight at devices when their lane was closed. Each may still execute,
    /// and its completion is not received.
    pub fn abandoned(&self) -> u64 {
        self.abandoned.load(Ordering::SeqCst)
    }

    /// Counts a write that a closing lane leaves to the devices. Call this before adding its
    /// regions, so that code that finds the regions also sees this count.
    pub fn abandon(&self) {
        self.abandoned.fetch_add(1, Ordering::SeqCst);
    }

    /// Reports a failure to the control. The failure is decided once the view's `decided` of the
    /// slot is at least the returned number.
    pub fn report(&self, report: Report) -> u64 {
        let mut news = self.news.lock();
        let ticket = self.reported[report.slot].fetch_add(1, Ordering::SeqCst) + 1;
        self.totals.errors[report.slot].fetch_add(1, Ordering::Relaxed);
        // Keep at least one report of each slot, or its failure cannot be decided.
        let known = |r: &Report| {
            (r.slot, r.incarnation) == (report.slot, report.incarnation)
                && r.weight() >= report.weight()
        };
        if news.reports.len() < REPORTS || !news.reports.iter().any(known) {
            news.reports.push(report);
        }
        drop(news);
        self.wake_control();
        ticket
    }

    /// Number of reported failures of a slot. [`Shared::take_news`] returns it together with the
    /// reports.
    pub fn reported(&self, slot: usize) -> u64 {
        self.reported[slot].load(Ordering::SeqCst)
    }

    pub fn want_repair(&self, repair: Repair) {
        let mut news = self.news.lock();
        if news.repairs.len() < REPAIRS {
            news.repairs.push(repair);
        }
        drop(news);
        self.wake_control();
    }

    /// Requests an immediate repair of a region that one in-sync replica has and cannot read: the
    /// other replicas get its readable blocks. The repair was tried once [`Shared::tried`] is at
    /// least the returned number. `None`: too many requests are pending.
    pub fn want_equal(&self, region: u64) -> Option<u64> {
        let mut news = self.news.lock();
        let requests = self.urgent.load(Ordering::SeqCst);
        if let Some(at) = news.urgent.iter().rposition(|r| *r == region) {
            return Some(requests - (news.urgent.len() - 1 - at) as u64);
        }
        if requests - self.tried() >= URGENT {
            return None;
        }
        news.urgent.push(region);
        self.urgent.store(requests + 1, Ordering::SeqCst);
        drop(news);
        self.wake_control();
        Some(requests + 1)
    }

    pub fn tried(&self) -> u64 {
        self.tried.load(Ordering::SeqCst)
    }

    /// Counts that the next requested region was tried.
    pub fn one_tried(&self) {
        self.tried.fetch_add(1, Ordering::SeqCst);
        self.ring_all();
    }

    pub fn want_region(&self, region: u64) {
        self.news.lock().wanted.push(region);
        self.wake_control();
    }

    /// Returns the pending messages of lanes, and the number of failures of each slot that they
    /// include.
    pub fn take_news(&self) -> (LaneMessages, [u64; MAX_REPLICAS]) {
        let mut news = self.news.lock();
        let counts = std::array::from_fn(|slot| self.reported(slot));
        (std::mem::take(&mut *news), counts)
    }

    /// Sets a function that is called when lanes have messages for the control.
    pub fn on_news(&self, wake: Option<Box<dyn Fn() + Send + Sync>>) {
        *self.control.lock() = wake;
    }

    pub fn wake_control(&self) {
        if let Some(wake) = &*self.control.lock() {
            wake();
        }
    }

    /// Adds a lane. Fails when there are [`MAX_LANES`], or when no descriptor is left.
    pub fn add_lane(&self) -> std::io::Result<Arc<LaneState>> {
        use rustix::event::{EventfdFlags, eventfd};
        let mut lanes = self.lanes.lock();
        let taken = |index: usize| lanes.iter().any(|l| l.owner == Owner::lane(index));
        let free = (0..MAX_LANES).find(|index| !taken(*index));
        let index = free.ok_or_else(|| std::io::Error::other("too many queues on one volume"))?;
        let state = Arc::new(LaneState {
            owner: Owner::lane(index),
            outstanding: Default::default(),
            gone: AtomicBool::new(false),
            bell: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        });
        lanes.push(Arc::clone(&state));
        Ok(state)
    }

    /// Removes a closed lane without I/O.
    pub fn remove_lane(&self, state: &Arc<LaneState>) {
        self.lanes.lock().retain(|lane| !Arc::ptr_eq(lane, state));
        self.wake_control();
    }

    pub fn lanes(&self) -> Vec<Arc<LaneState>> {
        self.lanes.lock().clone()
    }

    pub fn ring_all(&self) {
        self.lanes.lock().iter().for_each(|lane| lane.ring());
    }

    /// Number of I/Os, of all lanes, in flight to a slot's device.
    pub fn outstanding(&self, slot: usize) -> u32 {
        let lanes = self.lanes.lock();
        let of = |lane: &Arc<LaneState>| lane.outstanding[slot].load(Ordering::SeqCst);
        lanes.iter().map(of).sum()
    }
}
