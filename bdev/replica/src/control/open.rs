//! Opens a volume: raises the epoch, excludes replicas whose labels are invalid or old, and marks
//! the regions to reconcile after an unclean stop. I/O is served afterwards.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeSet, VecDeque};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nacre_bdev::{Bdev, Limits, Status};
use nacre_hugepages::Pool;
use nacre_reactor::CoreHandle;
use parking_lot::Mutex;
use tokio::sync::mpsc;
use uuid::Uuid;

use super::Control;
use super::attach::{LabelCredit, label_credit};
use super::context::{Context, Signals};
use super::disk::Disks;
use super::failures::FailureHandler;
use super::lease::TAKE_OVER;
use super::log::LogWriter;
use super::media::{Media, Reserve};
use super::membership::Membership;
use super::reasons::describe;
use super::state::{Live, Resync, State};
use super::truncation::{Checked, Cut};
use crate::answers::Holder;
use crate::format::Label;
use crate::handle::{
    COMMANDS, Devices, Observer, ResyncKind, VolumeError, VolumeEventKind, VolumeHandle,
    VolumeStatus,
};
use crate::model::{KeptLimits, ReplicaRecord, ReplicaState, Stamp, VolumeRecord};
use crate::prepared::{Prepared, keeps};
use crate::shared::{Failure, Shared};
use crate::store::VolumeStore;
use crate::volume::{Volume, weakest};

/// How long to wait for absent in-sync replicas once one of them is present. For devices of other
/// nodes, it is [`crate::handle::Devices::patience`] if that is shorter: a holder would put such a
/// replica out after this time, too. No write is lost either way, because the replica is out in
/// the store before the volume serves, and gets the missed regions when it answers.
const GRACE: Duration = Duration::from_secs(5);
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// A trusted in-sync replica.
struct Found {
    slot: usize,
    live: Rc<Live>,
    label: Label,
}

/// The replicas found at opening.
#[derive(Default)]
struct FoundReplicas {
    /// Trusted replicas in the order of their slots.
    found: Vec<Found>,
    /// Slots of present in-sync replicas that are not trusted.
    stale: Vec<usize>,
    /// Replicas that were cut, in sync or not.
    cut: Vec<(usize, Cut, Checked)>,
}

impl FoundReplicas {
    fn has_result(&self, slot: usize) -> bool {
        self.stale.contains(&slot)
            || self.found.iter().any(|f| f.slot == slot)
            || self.cut.iter().any(|(cut, ..)| *cut == slot)
    }
}

/// Result of checking a replica's device.
enum DeviceCheck {
    Good(Box<Found>),
    Stale,
    Cut(Cut, Checked),
}

/// Opens the volume `id` for `holder` on this reactor, until [`crate::handle::Command::Close`]. The
/// caller registers the returned device; it serves from the first I/O on.
pub async fn open(
    core: &CoreHandle,
    pool: Pool,
    store: Arc<dyn VolumeStore>,
    devices: Arc<dyn Devices>,
    observer: Arc<dyn Observer>,
    id: Uuid,
    holder: impl Into<Holder>,
) -> Result<VolumeHandle, VolumeError> {
    let prepared = Prepared::new(&store.load(id).await?);
    open_prepared(core, pool, store, devices, observer, holder, &prepared).await
}

/// Opens a volume like [`open`], even one whose device may be in use already. Waiting I/O continues
/// if the replicas keep the promised limits ([`Prepared::is_served_by`]). If opening fails, the
/// device is as before, and opening can be retried.
pub async fn open_prepared(
    core: &CoreHandle,
    pool: Pool,
    store: Arc<dyn VolumeStore>,
    devices: Arc<dyn Devices>,
    observer: Arc<dyn Observer>,
    holder: impl Into<Holder>,
    prepared: &Prepared,
) -> Result<VolumeHandle, VolumeError> {
    let opening = Opening {
        core,
        pool,
        store,
        devices,
        observer,
        holder: holder.into(),
    };
    let opened = opening.run(prepared).await;
    opened.inspect_err(|why| prepared.not_opened(why))
}

/// The holder that opens a volume, and the objects it uses.
struct Opening<'a> {
    core: &'a CoreHandle,
    pool: Pool,
    store: Arc<dyn VolumeStore>,
    devices: Arc<dyn Devices>,
    observer: Arc<dyn Observer>,
    holder: Holder,
}

impl Opening<'_> {
    async fn run(&self, prepared: &Prepared) -> Result<VolumeHandle, VolumeError> {
        let record = self.store.load(prepared.id()).await?;
        if prepared.shared().fits(&record) {
            let (shared, promised) = (Arc::clone(prepared.shared()), prepared.limits());
            if let Some(handle) = self.with(record, shared, promised).await? {
                return Ok(handle);
            }
        }
        // The volume differs from the prepared one: its users must connect again.
        // Once more, if the labels show that it has grown.
        for _ in 0..2 {
            let record = self.store.load(prepared.id()).await?;
            let shared = Shared::new(&record);
            shared.set_failing(prepared.is_failing());
            if let Some(handle) = self.with(record, shared, None).await? {
                return Ok(handle);
            }
        }
        let name = prepared.id().to_string();
        Err(VolumeError::Closed { name })
    }

    /// Returns `None`, without side effects, if the replicas' limits are below the announced ones.
    /// Also if the tables do not fit the size that the labels of a restored volume have: then the
    /// record has it.
    async fn with(
        &self,
        record: VolumeRecord,
        shared: Arc<Shared>,
        promised: Option<Limits>,
    ) -> Result<Option<VolumeHandle>, VolumeError> {
        let os = |error: std::io::Error| VolumeError::Io {
            device: record.name.clone(),
            what: format!("no descriptor for its control: {error}"),
        };
        let disks = Disks::new().map_err(os)?;
        let poller = self
            .core
            .add_poller(disks.poller())
            .map_err(|error| os(std::io::Error::other(error.to_string())))?;
        let context = Rc::new(Context {
            core: self.core.clone(),
            id: record.id,
            status: Arc::new(Mutex::new(VolumeStatus::of(&record))),
            state: RefCell::new(State::new(record)),
            shared,
            observer: Arc::clone(&self.observer),
            lease: self.holder.lease.clone(),
            signals: Signals::default(),
            tasks: RefCell::default(),
        });
        let media = Rc::new(Media {
            context: Rc::clone(&context),
            pool: self.pool.clone(),
            reserve: Reserve::default(),
            disks,
            poller: Cell::new(Some(poller)),
            devices: Arc::clone(&self.devices),
        });
        let control = Control::new(context, media, Arc::clone(&self.store), self.holder.id);
        let begun = control.opener().begin(promised).await;
        let Ok(Some(volume)) = begun else {
            control.replicas.let_others_in_everywhere().await;
            control.stop();
            return begun.map(|_| None);
        };
        let (commands, requests) = mpsc::channel(COMMANDS);
        control.start();
        let context = &control.context;
        context.spawn(Rc::clone(&control).obey(requests));
        // Failures during the opening are still to be decided.
        context.shared.wake_control();
        context.signals.probe.notify_one();
        context.signals.resync.notify_one();
        context.signals.clean.notify_one();
        Ok(Some(VolumeHandle {
            commands,
            shared: Arc::clone(&context.shared),
            volume,
            status: Arc::clone(&context.status),
        }))
    }
}

/// Opens the volume, before its tasks start.
pub(super) struct Opener {
    pub context: Rc<Context>,
    pub media: Rc<Media>,
    pub replicas: Rc<Membership>,
    pub log: Rc<LogWriter>,
    pub failures: Rc<FailureHandler>,
}

impl Opener {
    async fn begin(&self, promised: Option<Limits>) -> Result<Option<Arc<dyn Bdev>>, VolumeError> {
        let mut former = self.context.state.borrow().record.clone();
        let restored = former.restored.clone();
        if let Some(restored) = &restored {
            former = self.after_restore(&former, restored).await?;
            let shared = &self.context.shared;
            if !shared.covers(former.blocks) || shared.blocks() > former.blocks {
                // The tables are made for the size of the record.
                let blocks = former.blocks;
                self.replicas
                    .commit(|record| record.blocks = blocks)
                    .await?;
                return Ok(None);
            }
        }
        let FoundReplicas {
            found,
            mut stale,
            cut,
        } = self.gather(&former).await?;
        let closed = closed_as(&former, &found);
        let found = self.without_older(closed, found, &mut stale);
        // Done before any I/O is served: no replica is added to those found from here on.
        let layers = found.iter().map(|f| &*f.live.device.layer);
        if promised.is_some_and(|promised| !keeps(&weakest(layers), &promised)) {
            found
                .iter()
                .for_each(|f| self.media.disks.forget(&f.live.disk));
            return Ok(None);
        }
        let clean = found.iter().all(|f| f.label.clean)
            && found.iter().all(|f| f.label.stamp == found[0].label.stamp);
        let present: Vec<usize> = found.iter().map(|f| f.slot).collect();
        for Found { slot, live, .. } in found {
            live.joined.set(true);
            let mut state = self.context.state.borrow_mut();
            state.former[slot] = Some(live.disk.name.clone());
            state.live[slot] = Some(live);
        }
        self.replicas
            .commit(|record| {
                if restored.is_some() {
                    record.clone_from(&former);
                }
                record.epoch += 1;
                for replica in &mut record.replicas {
                    let slot = usize::from(replica.slot);
                    match cut.iter().find(|(of, ..)| *of == slot) {
                        Some((_, cut, _)) if !replica.is_empty() => {
                            replica.fill_anew(cut.to_string())
                        }
                        _ => take_stock(replica, &former, closed, &present, &stale),
                    }
                }
            })
            .await?;
        self.context.must_not_be_fenced()?;
        let epoch = self.context.state.borrow().record.epoch;
        let live = self.context.state.borrow().present();
        if live.iter().any(|(_, live)| !live.is_by_label()) {
            // Write nothing to an unreserved replica before this check: the write could look like
            // that of a later holder.
            self.must_be_stamped(epoch).await?;
        }
        if former
            .holder
            .is_some_and(|other| other != self.replicas.holder)
        {
            self.take_over(epoch, &live).await?;
        }
        // The previous holder writes nothing from now on, so the logs are complete.
        let dirty = self.gather_logs().await;
        for region in &dirty {
            self.context.shared.regions.set_dirty(*region);
        }
        if !clean {
            let there: Vec<usize> = self
                .context
                .state
                .borrow()
                .in_sync()
                .map(|(s, _)| s)
                .collect();
            self.reconcile(&there, &dirty);
        }
        let now = self.context.state.borrow().present();
        for (slot, live) in now {
            if let Err(why) = self.log.write_log_to(slot, &live).await {
                self.failures.decide(slot, live.incarnation, why).await;
            }
        }
        self.must_be_stamped(epoch).await?;
        let limits = {
            let state = self.context.state.borrow();
            let layers = state.live.iter().flatten();
            let mut limits = weakest(layers.map(|live| &*live.device.layer));
            // An absent replica may have a volatile cache.
            limits.volatile_cache |= state.record.replicas.len() > present.len();
            limits
        };
        self.replicas
            .commit(|record| {
                record.serving = epoch;
                record.limits = Some(KeptLimits::of(&limits));
            })
            .await?;
        let record = self.context.state.borrow().record.clone();
        let grown = self.context.shared.grow(record.blocks);
        debug_assert_eq!(grown, Ok(()), "it fits");
        let volume = Volume::new(&record, Arc::clone(&self.context.shared), limits);
        self.context.state.borrow_mut().serving = true;
        self.context.publish();
        self.context.emit(VolumeEventKind::Opened {
            epoch,
            degraded: present.len() < record.replicas.len(),
            clean,
        });
        Ok(Some(volume))
    }

    /// Waits until the previous holder, if it still runs, has detected the new one.
    async fn take_over(&self, epoch: u64, live: &[(usize, Rc<Live>)]) -> Result<(), VolumeError> {
        // With leases, the former holder's is over before the volume is opened.
        if self.replicas.store.is_shared() && self.context.lease.is_none() {
            self.context.core.after(TAKE_OVER).await;
            return Ok(());
        }
        let by_label = || live.iter().filter(|(_, live)| live.is_by_label());
        if by_label().next().is_none() {
            return Ok(());
        }
        self.must_be_stamped(epoch).await?;
        self.context.core.after(self.replicas.until_seen()).await;
        // A late write of the previous holder may have overwritten the label: write it once more.
        let record = self.context.state.borrow().record.clone();
        for (slot, live) in by_label() {
            if let Err(why) = self.replicas.write_label(*slot, live, &record, false).await {
                self.failures.decide(*slot, live.incarnation, why).await;
            }
        }
        self.context.must_not_be_fenced()
    }

    /// Every in-sync replica has a label of this epoch, or is out: once the epoch serves, older
    /// labels are no longer accepted.
    async fn must_be_stamped(&self, epoch: u64) -> Result<(), VolumeError> {
        let unstamped = |(slot, live): &(usize, Rc<Live>)| {
            self.context.state.borrow().is_in_sync(*slot) && live.stamp.get().epoch < epoch
        };
        let present = self.context.state.borrow().present();
        let mut refused = None;
        for (slot, live) in present.into_iter().filter(unstamped) {
            let record = self.context.state.borrow().record.clone();
            if let Err(why) = self.replicas.write_label(slot, &live, &record, false).await {
                refused = Some((slot, why));
                self.failures.decide(slot, live.incarnation, why).await;
            }
        }
        self.context.must_not_be_fenced()?;
        let state = self.context.state.borrow();
        let stamped = |slot: usize| {
            let live = state.live[slot].as_ref();
            live.is_some_and(|live| live.stamp.get().epoch >= epoch)
        };
        let missing = state
            .record
            .in_sync()
            .find(|m| !stamped(usize::from(m.slot)));
        match missing {
            None => Ok(()),
            Some(replica) => {
                let (name, device) = (state.record.name.clone(), &replica.device);
                let its = refused.filter(|(slot, _)| *slot == usize::from(replica.slot));
                let why = match its {
                    Some((_, why)) => format!("\"{device}\" takes no label: {}", describe(why)),
                    None => format!("\"{device}\" takes no label"),
                };
                Err(VolumeError::NothingInSync { name, why })
            }
        }
    }

    /// The union of the logs of the in-sync replicas. A replica with an unreadable log is out, if
    /// there are others; its log counts as naming every region.
    async fn gather_logs(&self) -> BTreeSet<u64> {
        let mut dirty = BTreeSet::new();
        let present = self.context.state.borrow().present();
        for (slot, live) in present {
            match self.log.read_log(&live.disk).await {
                Ok(named) => dirty.extend(named),
                Err(why) => {
                    dirty.extend(0..self.context.state.borrow().record.regions());
                    self.failures.decide(slot, live.incarnation, why).await;
                }
            }
        }
        dirty
    }

    /// Finds the in-sync replicas: those that can be believed, and those that cannot.
    async fn gather(&self, record: &VolumeRecord) -> Result<FoundReplicas, VolumeError> {
        let start = self.context.core.now();
        let mut all = FoundReplicas::default();
        let mut why = String::from("none is in sync");
        loop {
            let mut missing = false;
            // A replica that cannot be checked for lack of memory may be the best, or the only one:
            // decide nothing without it.
            let mut short = None;
            let mut unreserved = None;
            let mut grace = Duration::ZERO;
            for replica in record.in_sync().filter(|m| !m.offline) {
                let slot = usize::from(replica.slot);
                if all.has_result(slot) {
                    continue;
                }
                match self.find(record, replica).await {
                    Ok(DeviceCheck::Good(one)) => all.found.push(*one),
                    Ok(DeviceCheck::Cut(cut, checked)) => {
                        why = VolumeError::Cut {
                            name: record.name.clone(),
                            device: replica.device.clone(),
                            what: cut.to_string(),
                        }
                        .to_string();
                        all.cut.push((slot, cut, checked));
                    }
                    Ok(DeviceCheck::Stale) => {
                        all.stale.push(slot);
                        why = format!(
                            "\"{}\" is present, and holds an older state than the last one served",
                            replica.device
                        );
                    }
                    Err(error @ VolumeError::Newer { .. }) => return Err(error),
                    Err(error @ VolumeError::Short { .. }) => {
                        (short, grace) = (Some(error), GRACE);
                    }
                    // A configuration that is refused now, and not at the first failure. A target
                    // that restarts may support reservations soon.
                    Err(error @ VolumeError::NoReservations { .. }) => {
                        (unreserved, missing, grace) = (Some(error), true, GRACE);
                    }
                    Err(error) => {
                        why = error.to_string();
                        let devices = &self.media.devices;
                        if devices.is_awaited(&replica.device) {
                            missing = true;
                            let patience = devices.patience(&replica.device);
                            grace = grace.max(patience.unwrap_or(GRACE).min(GRACE));
                        }
                    }
                }
            }
            let patience = if all.found.is_empty() && short.is_none() {
                Duration::ZERO
            } else {
                grace
            };
            let over = self.context.core.now().since(start) >= patience;
            match short.or_else(|| unreserved.filter(|_| over)) {
                Some(error) if over => return Err(error),
                None if over || !missing => break,
                _ => {}
            }
            self.context.core.after(LOOK_AGAIN).await;
        }
        all.found.sort_by_key(|f| f.slot);
        if all.found.is_empty() {
            self.find_cut(record, &mut all.cut).await;
            self.replicas.record_cut_unopened(record, &all.cut).await;
            return Err(VolumeError::NothingInSync {
                name: record.name.clone(),
                why,
            });
        }
        Ok(all)
    }

    /// Cut replicas that are not in sync: no other code checks them while the volume is closed, and
    /// they may be large again when it is open.
    async fn find_cut(&self, record: &VolumeRecord, cut: &mut Vec<(usize, Cut, Checked)>) {
        for replica in &record.replicas {
            if replica.state == ReplicaState::InSync || replica.is_empty() {
                continue;
            }
            let claimed = self.media.devices.claim(&replica.device, &record.name);
            let is_cut = claimed.is_ok_and(|device| Cut::of(record, &device.layer).is_some());
            if is_cut && let Ok(look) = self.find(record, replica).await {
                match look {
                    DeviceCheck::Cut(found, checked) => {
                        cut.push((usize::from(replica.slot), found, checked));
                    }
                    DeviceCheck::Good(one) => self.media.disks.forget(&one.live.disk),
                    DeviceCheck::Stale => {}
                }
            }
        }
    }

    /// A clean close is recorded on each replica. A replica without that record, while another one
    /// has it, is an older copy of the same epoch, or failed at that time. It is not trusted.
    fn without_older(
        &self,
        closed: Option<Stamp>,
        found: Vec<Found>,
        stale: &mut Vec<usize>,
    ) -> Vec<Found> {
        let Some(last) = closed else {
            return found;
        };
        let is_newest = |f: &Found| f.label.clean && f.label.stamp == last;
        let (kept, older): (Vec<_>, Vec<_>) = found.into_iter().partition(is_newest);
        for Found { slot, live, .. } in older {
            let device = &live.disk.name;
            tracing::warn!(
                device,
                "a replica does not know that the volume was closed: it is not trusted"
            );
            self.media.disks.forget(&live.disk);
            stale.push(slot);
        }
        kept
    }

    async fn find(
        &self,
        record: &VolumeRecord,
        replica: &ReplicaRecord,
    ) -> Result<DeviceCheck, VolumeError> {
        let (device, disk) = self.media.claim_of_any_size(record, &replica.device)?;
        if let Err(error) = self.context.must_reserve(&device) {
            self.media.disks.forget(&disk);
            return Err(error);
        }
        let losses = device.layer.losses();
        let checked = Checked::before(&device.layer);
        let read = self.media.read_label(&disk).await;
        let labelled = match &read {
            // The device is too small even for the labels.
            Err(why) => why.is_beyond_end(),
            Ok(read) => matches!(
                label_credit(record, replica, read),
                Ok(LabelCredit::Trusted)
            ),
        };
        if labelled {
            let cut = match Cut::of(record, &device.layer) {
                None if read.is_err() => Some(Cut::unreadable(record)),
                None if replica.cut => Some(Cut::recorded(record, replica)),
                None if !device.local => self.media.ends_early(&disk, record).await,
                cut => cut,
            };
            if let Some(cut) = cut {
                self.media.disks.forget(&disk);
                return Ok(DeviceCheck::Cut(cut, checked));
            }
        }
        let read = read.map_err(|why| failed(&disk.name, why));
        let label_credit = read
            .as_ref()
            .map_err(Clone::clone)
            .and_then(|read| label_credit(record, replica, read));
        match (read, label_credit) {
            (Ok(Ok((label, place))), Ok(LabelCredit::Trusted)) => {
                let live = Live {
                    device,
                    disk,
                    incarnation: self.context.shared.next_incarnation(),
                    losses,
                    stamp: Cell::new(label.stamp),
                    sequence: Cell::new(label.sequence),
                    place: Cell::new(place),
                    key: Cell::new(0),
                    looked: Cell::new(self.context.core.now()),
                    joined: Cell::new(false),
                    flushed: Cell::new(false),
                    read_errors: RefCell::new(VecDeque::new()),
                    resync: RefCell::default(),
                };
                Ok(DeviceCheck::Good(Box::new(Found {
                    slot: usize::from(replica.slot),
                    live: Rc::new(live),
                    label,
                })))
            }
            (_, Ok(_)) => {
                self.media.disks.forget(&disk);
                Ok(DeviceCheck::Stale)
            }
            (_, Err(error)) => {
                self.media.disks.forget(&disk);
                Err(error)
            }
        }
    }

    /// Marks the regions to reconcile: after an unclean stop the replicas may differ where writes
    /// were in flight. Any replica may be the source, because no such write was acknowledged unless
    /// all replicas have it. The others are copied from it.
    fn reconcile(&self, present: &[usize], dirty: &BTreeSet<u64>) {
        let Some((source, others)) = present.split_first() else {
            return;
        };
        let now = self.context.core.now();
        let state = self.context.state.borrow();
        let source = state.record.replica(*source).map(|m| m.id);
        for slot in others {
            self.context.shared.missing[*slot].assign(|region| dirty.contains(&region));
            let total = dirty.len() as u64;
            if let Some(live) = state.live[*slot].as_ref().filter(|_| total > 0) {
                let mut resync = Resync::new(ResyncKind::Reconcile, total, 0, now);
                resync.source = source;
                *live.resync.borrow_mut() = Some(resync);
            }
        }
    }
}

/// The stamp of the labels after a clean close, if a replica has it.
fn closed_as(record: &VolumeRecord, found: &[Found]) -> Option<Stamp> {
    let clean = found.iter().filter(|f| f.label.clean);
    let last = clean.map(|f| f.label.stamp).max();
    last.filter(|_| record.holder.is_none())
}

/// Decides about each replica at opening: absent in-sync replicas miss the following writes, and
/// untrusted ones are filled from the start.
fn take_stock(
    replica: &mut ReplicaRecord,
    former: &VolumeRecord,
    closed: Option<Stamp>,
    present: &[usize],
    stale: &[usize],
) {
    let slot = usize::from(replica.slot);
    if replica.state != ReplicaState::InSync || present.contains(&slot) {
        return;
    }
    if stale.contains(&slot) {
        replica.fill_anew("its label is older than that of a replica that stayed in sync".into());
    } else {
        replica.why = Some("it was not there when the volume was opened".into());
        replica.state = ReplicaState::Out {
            // A crash may come between the store's change and the label's.
            last_label: closed.unwrap_or_else(|| Stamp {
                epoch: former.serving,
                revision: former.revision.saturating_sub(1),
            }),
        };
    }
}

pub(super) fn failed(device: &str, why: Failure) -> VolumeError {
    let (device, what) = (device.to_owned(), describe(why));
    match why {
        Failure::Shortage | Failure::Status(Status::Retry) => VolumeError::Short { device, what },
        _ => VolumeError::Io { device, what },
    }
}
