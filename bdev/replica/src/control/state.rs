//! The control's state, and the views for lanes and operators derived from it.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeSet, VecDeque};
use std::rc::Rc;
use std::time::Duration;

use nacre_bdev::Bdev;
use nacre_reactor::Nanos;
use uuid::Uuid;

use super::disk::Disk;
use super::truncation::Cut;
use crate::format::LabelCopy;
use crate::handle::{
    Fencing, LastResync, ReplicaDevice, ReplicaStatus, ResyncKind, ResyncStatus, VerifyStatus,
    VolumeState, VolumeStatus,
};
use crate::model::{MAX_REPLICAS, ReplicaState, Stamp, VolumeRecord};
use crate::shared::{Repair, Report, Shared};
use crate::view::{Mode, ReplicaView, Role, View};

pub(super) struct State {
    /// The volume's record in the store.
    pub record: VolumeRecord,
    /// The replicas that are in sync after a change that was attempted since the last successful
    /// one. The store may have that change, or may get it until the next successful one.
    pub attempted: BTreeSet<Uuid>,
    /// Attached replicas, by slot.
    pub live: [Option<Rc<Live>>; MAX_REPLICAS],
    /// Detached replicas that are still in sync in the store: lanes keep them until the store
    /// changes.
    pub leaving: [Option<ReplicaView>; MAX_REPLICAS],
    /// The last device of each slot: lanes may have I/O in flight there.
    pub former: [Option<String>; MAX_REPLICAS],
    /// Number of failures that lanes reported, by slot. `decided` is the number already decided
    /// upon.
    pub reported: [u64; MAX_REPLICAS],
    pub decided: [u64; MAX_REPLICAS],
    pub reports: Vec<Report>,
    /// The last value of [`Shared::unequal`].
    pub unequal: u64,
    pub wanted: Vec<u64>,
    pub repairs: VecDeque<Repair>,
    /// Regions to reconcile before all others, in the order of the lanes' requests.
    pub urgent: VecDeque<u64>,
    /// Next probe of each absent replica and the delay after it, indexed by slot.
    pub retries: [Retry; MAX_REPLICAS],
    pub last_resync: [Option<LastResync>; MAX_REPLICAS],
    /// Labels and dirty log of the current epoch are on every replica: the volume may serve hosts.
    pub serving: bool,
    pub fenced: Option<String>,
    pub store_lost: Option<String>,
    /// A shared store has not replied for the time of a lease.
    pub store_lease_expired: bool,
    pub closed: bool,
    /// The observer was notified that the volume is frozen.
    pub frozen: bool,
    pub verify: Option<VerifyStatus>,
    pub stop_verify: bool,
}

/// An attached replica.
pub(super) struct Live {
    pub device: ReplicaDevice,
    pub disk: Rc<Disk>,
    pub incarnation: u64,
    /// [`nacre_bdev::Bdev::losses`] of the device when the replica was attached.
    pub losses: u64,
    /// Stamp, sequence number and position of the last written label.
    pub stamp: Cell<Stamp>,
    pub sequence: Cell<u64>,
    pub place: Cell<LabelCopy>,
    /// Key of the reservation; 0: the device is not reserved.
    pub key: Cell<u64>,
    /// When the label was last read and found to be this holder's.
    pub looked: Cell<Nanos>,
    /// Lanes write to the replica.
    pub joined: Cell<bool>,
    /// Hosts' flushes, and writes to its missing regions, reach the replica before it is in sync.
    pub flushed: Cell<bool>,
    /// Times of read errors within the last hour.
    pub read_errors: RefCell<VecDeque<Nanos>>,
    pub resync: RefCell<Option<Resync>>,
}

/// A running resync.
#[derive(Debug, Clone)]
pub(super) struct Resync {
    pub kind: ResyncKind,
    pub source: Option<Uuid>,
    pub total_regions: u64,
    pub began: Nanos,
    /// Bytes copied so far, and samples of time and bytes for the rate.
    pub copied: u64,
    pub marks: VecDeque<(Nanos, u64)>,
    /// The watermark stored in the record.
    pub kept: u64,
    pub kept_at: Nanos,
}

/// When to probe an absent replica. The delay resets when the replica is in sync, not when it is
/// attached. Otherwise a disk that fails during each resync would be retried without a pause.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Retry {
    pub at: Nanos,
    pub delay: Duration,
    silences: u32,
    silent_at: Nanos,
}

/// Reports that are kept without looking for duplicates.
const REPORTS: usize = 256;
const FIRST_RETRY: Duration = Duration::from_millis(500);
const LAST_RETRY: Duration = Duration::from_secs(10);
/// Longest pause after the silences of a replica. A silence of 2 s costs writes 3 % of that time.
const LAST_PAUSE: Duration = Duration::from_secs(60);
/// A silence longer ago than that does not count.
const SILENCE_FORGOTTEN: Duration = Duration::from_secs(600);

impl Retry {
    /// The replica is in sync. The count of silences stays.
    pub(super) fn succeeded(&mut self) {
        (self.at, self.delay) = Default::default();
    }

    /// The replica is given up because it is silent. Each silence delays writes, so a replica that
    /// alternates between silence and answers stays away for longer each time: 0.5, 1, 2 … 60 s.
    pub(super) fn fell_silent(&mut self, now: Nanos) {
        if now.since(self.silent_at) > SILENCE_FORGOTTEN {
            self.silences = 0;
        }
        let pause = match self.silences {
            0 => Duration::ZERO,
            n => (FIRST_RETRY * (1 << n.min(16))).min(LAST_PAUSE),
        };
        self.silences = self.silences.saturating_add(1);
        self.silent_at = now;
        self.at = self.at.max(now + pause);
    }

    pub(super) fn failed(&mut self, now: Nanos) {
        self.delay = (self.delay * 2).clamp(FIRST_RETRY, LAST_RETRY);
        self.at = self.at.max(now + self.delay);
    }
}

impl State {
    pub(super) fn new(record: VolumeRecord) -> Self {
        Self {
            record,
            attempted: BTreeSet::new(),
            live: Default::default(),
            leaving: Default::default(),
            former: Default::default(),
            reported: [0; MAX_REPLICAS],
            decided: [0; MAX_REPLICAS],
            reports: Vec::new(),
            unequal: 0,
            wanted: Vec::new(),
            repairs: VecDeque::new(),
            urgent: VecDeque::new(),
            retries: Default::default(),
            last_resync: Default::default(),
            serving: false,
            fenced: None,
            store_lost: None,
            store_lease_expired: false,
            closed: false,
            frozen: false,
            verify: None,
            stop_verify: false,
        }
    }

    /// Stores reports of lanes. A decision may wait for the store, and meanwhile each I/O to a
    /// failing replica adds a report. Only a few equal ones are kept.
    pub(super) fn take_reports(&mut self, reports: Vec<Report>) {
        for report in reports {
            let said = |r: &Report| {
                (r.slot, r.incarnation) == (report.slot, report.incarnation)
                    && r.weight() >= report.weight()
            };
            if self.reports.len() < REPORTS || !self.reports.iter().any(said) {
                self.reports.push(report);
            }
        }
    }

    pub(super) fn is_in_sync(&self, slot: usize) -> bool {
        let replica = self.record.replica(slot);
        replica.is_some_and(|m| m.state == ReplicaState::InSync)
    }

    /// Attached replicas that are in sync, by slot.
    pub(super) fn in_sync(&self) -> impl Iterator<Item = (usize, &Rc<Live>)> {
        let live = self.live.iter().enumerate();
        live.filter_map(|(slot, live)| Some((slot, live.as_ref()?)))
            .filter(|(slot, live)| self.is_in_sync(*slot) && live.joined.get())
    }

    /// Attached replicas that are not in sync: the targets of a resync.
    pub(super) fn syncing(&self) -> impl Iterator<Item = (usize, &Rc<Live>)> {
        let live = self.live.iter().enumerate();
        live.filter_map(|(slot, live)| Some((slot, live.as_ref()?)))
            .filter(|(slot, live)| !self.is_in_sync(*slot) && live.joined.get())
    }

    /// All attached replicas, by slot, whether lanes use them or not.
    pub(super) fn present(&self) -> Vec<(usize, Rc<Live>)> {
        let live = self.live.iter().enumerate();
        live.filter_map(|(slot, live)| Some((slot, Rc::clone(live.as_ref()?))))
            .collect()
    }

    pub(super) fn slot_of(&self, replica: &str) -> Option<usize> {
        let named =
            |m: &&crate::model::ReplicaRecord| m.device == replica || m.id.to_string() == replica;
        let found = self.record.replicas.iter().find(named)?;
        Some(usize::from(found.slot))
    }

    fn mode(&self) -> Mode {
        if self.closed {
            Mode::Closed
        } else if self.fenced.is_some() || self.store_lease_expired {
            Mode::Suspended
        } else if !self.serving || self.in_sync().next().is_none() {
            Mode::Frozen
        } else {
            Mode::Serving
        }
    }

    /// The view for lanes. It has replicas only once the volume serves, so a failed opening leaves
    /// no state of them in lanes.
    pub(super) fn view(&self) -> View {
        let mut view = View::closed(&self.record.settings);
        view.mode = self.mode();
        if !self.serving {
            return view;
        }
        view.replicas.clone_from(&self.leaving);
        for (slot, live) in self.present() {
            if !live.joined.get() {
                continue;
            }
            let role = if self.is_in_sync(slot) {
                Role::InSync
            } else {
                Role::Syncing
            };
            view.replicas[slot] = Some(ReplicaView {
                device: std::sync::Arc::clone(&live.device.layer),
                incarnation: live.incarnation,
                role,
                flushed: role == Role::InSync || live.flushed.get(),
                local: live.device.local,
                losses: live.losses,
                decided: self.decided[slot],
            });
        }
        view
    }

    pub(super) fn status(&self, shared: &Shared) -> VolumeStatus {
        let mut status = VolumeStatus::of(&self.record);
        let total = self.record.replicas.len();
        let in_sync = self.in_sync().count();
        let whole = |live: &Rc<Live>| Cut::of(&self.record, &live.device.layer).is_none();
        let held = in_sync < usize::from(self.record.settings.min_in_sync.max(1));
        let healthy = in_sync == total
            && self.in_sync().all(|(slot, live)| {
                shared.missing[slot].is_empty() && live.resync.borrow().is_none() && whole(live)
            });
        (status.state, status.why) = match shared.over(self.mode()) {
            Mode::Closed => (VolumeState::Closed, None),
            Mode::Suspended if self.fenced.is_none() => (
                VolumeState::StoreLost,
                Some("no reply from the store".into()),
            ),
            Mode::Suspended => (VolumeState::Fenced, self.fenced.clone()),
            Mode::FailIo => (VolumeState::Failing, Some("by the operator".into())),
            _ if self.store_lost.is_some() => (VolumeState::StoreLost, self.store_lost.clone()),
            Mode::Frozen => (VolumeState::Frozen, Some(self.why_frozen())),
            Mode::Serving if held => (
                VolumeState::WritesHeld,
                Some(format!(
                    "{in_sync} of at least {} replicas are in sync",
                    self.record.settings.min_in_sync
                )),
            ),
            Mode::Serving if healthy => (VolumeState::Healthy, None),
            Mode::Serving => (VolumeState::Degraded, Some(self.why_degraded(shared))),
        };
        status.verify = self.verify.clone();
        for replica in &mut status.replicas {
            let slot = usize::from(replica.slot);
            replica.last_resync = self.last_resync[slot];
            let Some(live) = &self.live[slot] else {
                continue;
            };
            self.status_of(replica, live, slot, shared);
        }
        status
    }

    fn why_frozen(&self) -> String {
        let cut = self.record.replicas.iter().find(|m| m.cut);
        match cut {
            Some(replica) => format!(
                "the last replica in sync, on \"{}\", may have lost data ({}): enlarge its device if it is too small, and thaw the volume with it",
                replica.device,
                replica.why.as_deref().unwrap_or_default()
            ),
            None => "no replica that is in sync can be reached".into(),
        }
    }

    /// The reasons why the volume is degraded, one per affected replica.
    fn why_degraded(&self, shared: &Shared) -> String {
        let total = self.record.replicas.len();
        let out = total - self.in_sync().count();
        let mut reasons = Vec::new();
        if out > 0 {
            reasons.push(format!("{} of {total} replicas are in sync", total - out));
        }
        let region = 1u64 << self.record.region_shift;
        for (slot, live) in self.in_sync() {
            let device = &live.disk.name;
            if let Some(cut) = Cut::of(&self.record, &live.device.layer) {
                reasons.push(format!("\"{device}\" may have lost data: {cut}"));
            } else if live.resync.borrow().is_some() || !shared.missing[slot].is_empty() {
                let left = shared.missing[slot].count() * region;
                reasons.push(format!(
                    "\"{device}\" is reconciling: {left} bytes that were being written must be \
                        made equal"
                ));
            }
        }
        if reasons.is_empty() {
            "a replica is about to be in sync".into()
        } else {
            reasons.join("; ")
        }
    }

    fn status_of(&self, replica: &mut ReplicaStatus, live: &Live, slot: usize, shared: &Shared) {
        replica.attached = live.joined.get();
        replica.local = live.device.local;
        replica.fencing = Some(match live.key.get() {
            0 => Fencing::Label,
            _ => Fencing::Reservation,
        });
        replica.is_unequal =
            replica.state == ReplicaState::InSync && !shared.missing[slot].is_empty();
        let Some(resync) = &*live.resync.borrow() else {
            return;
        };
        let region = 1u64 << self.record.region_shift;
        let left = shared.missing[slot].count() * region;
        let rate = resync.rate();
        replica.resync = Some(ResyncStatus {
            kind: resync.kind,
            source: resync.source,
            total_bytes: resync.total_regions * region,
            left_bytes: left,
            bytes_per_s: rate,
            left_s: (rate > 0).then(|| left.div_ceil(rate.max(1))),
        });
    }
}

impl Live {
    /// True when only the label, and no reservation, protects the replica.
    pub(super) fn is_by_label(&self) -> bool {
        !self.device.layer.reserves()
    }

    /// True while the replica is attached and its device has lost no data since then.
    pub(super) fn is_whole(&self) -> bool {
        let layer = &self.device.layer;
        self.joined.get() && !layer.is_gone() && layer.losses() == self.losses
    }
}

impl Resync {
    pub(super) fn new(kind: ResyncKind, total_regions: u64, kept: u64, now: Nanos) -> Self {
        Self {
            kind,
            source: None,
            total_regions,
            began: now,
            copied: 0,
            marks: VecDeque::from([(now, 0)]),
            kept,
            kept_at: now,
        }
    }

    pub(super) fn copied(&mut self, bytes: u64, now: Nanos) {
        /// Time over which the resync rate is averaged.
        const WINDOW: Duration = Duration::from_secs(10);
        const STEP: Duration = Duration::from_millis(500);
        self.copied += bytes;
        let last = self.marks.back().map_or(Nanos::ZERO, |(at, _)| *at);
        if now.since(last) >= STEP {
            self.marks.push_back((now, self.copied));
        }
        while self.marks.len() > 2 && now.since(self.marks[0].0) > WINDOW {
            self.marks.pop_front();
        }
    }

    /// Copied bytes per second over the last `WINDOW`.
    fn rate(&self) -> u64 {
        let (Some(first), Some(last)) = (self.marks.front(), self.marks.back()) else {
            return 0;
        };
        let nanos = last.0.since(first.0).as_nanos() as u64;
        match nanos {
            0 => 0,
            nanos => ((last.1 - first.1) as u128 * 1_000_000_000 / u128::from(nanos)) as u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use nacre_bdev::{Op, Status};

    use super::*;
    use crate::shared::Failure;

    /// Goal: reports of a replica that fails while the store is away use bounded memory, and no
    /// deciding report is lost.
    #[test]
    fn many_reports() {
        let mut state = State::new(crate::lane::tests::rig::record(2048, 2));
        let report = |op, why| Report {
            slot: 1,
            incarnation: 7,
            op,
            lba: 0,
            why,
        };
        let unread = report(Op::Read, Failure::Status(Status::ReadError));
        let gone = report(Op::Write, Failure::Status(Status::Gone));
        let fenced = report(Op::Write, Failure::Fenced);
        for _ in 0..10_000 {
            state.take_reports(vec![unread]);
        }
        assert_eq!(state.reports.len(), REPORTS);
        for worse in [gone, fenced] {
            for _ in 0..1000 {
                state.take_reports(vec![unread, worse, unread]);
            }
            assert_eq!(state.reports.last(), Some(&worse));
        }
        assert_eq!(state.reports.len(), REPORTS + 2);
        // A report about another incarnation is not a duplicate.
        let again = Report {
            incarnation: 8,
            ..unread
        };
        state.take_reports(vec![again, again]);
        assert_eq!(state.reports[REPORTS + 2..], [again]);
    }
}
