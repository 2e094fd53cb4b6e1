//! Attaches the devices of replicas to an open volume: reads their labels, and decides by label and
//! store how much of their data is valid.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

use nacre_bdev::Bdev;

use super::context::Context;
use super::disk::Disk;
use super::log::LogWriter;
use super::media::Media;
use super::membership::Membership;
use super::reasons::describe;
use super::state::{Live, Resync};
use super::truncation::{Checked, Cut, must_fit};
use crate::format::{Label, LabelCopy, LabelError};
use crate::handle::{ReplicaDevice, ResyncKind, VolumeError, VolumeEventKind};
use crate::model::{MAX_REPLICAS, ReplicaRecord, ReplicaState, Stamp, VolumeRecord};
use crate::shared::Failure;

pub(super) struct Attacher {
    pub context: Rc<Context>,
    pub media: Rc<Media>,
    pub replicas: Rc<Membership>,
    pub log: Rc<LogWriter>,
}

impl Attacher {
    /// Probes absent replicas, each after a delay that grows while it is absent.
    pub(super) async fn take_back(self: Rc<Self>) {
        loop {
            let now = self.context.core.now();
            let absent = self.absent();
            let due = absent
                .iter()
                .copied()
                .find(|slot| self.context.state.borrow().retries[*slot].at <= now);
            if let Some(slot) = due {
                let outcome = self.attach(slot).await;
                self.attached(slot, outcome);
                continue;
            }
            let next = absent
                .iter()
                .map(|slot| self.context.state.borrow().retries[*slot].at)
                .min();
            match next {
                None => self.context.signals.probe.notified().await,
                Some(at) => {
                    let rung = self.context.signals.probe.notified();
                    let _ = self.context.core.timeout(at.since(now), rung).await;
                }
            }
        }
    }

    fn absent(&self) -> Vec<usize> {
        let state = self.context.state.borrow();
        let absent = |slot: &usize| {
            let replica = state.record.replica(*slot);
            replica.is_some_and(|m| !m.offline) && state.live[*slot].is_none()
        };
        let none = state.fenced.is_some() || state.closed;
        (0..MAX_REPLICAS).filter(|s| !none && absent(s)).collect()
    }

    fn attached(&self, slot: usize, outcome: Result<(), VolumeError>) {
        let now = self.context.core.now();
        let mut state = self.context.state.borrow_mut();
        match outcome {
            // A replica under resync may fail again at the same block: see `promote`.
            Ok(()) if !state.is_in_sync(slot) => {}
            Ok(()) => state.retries[slot].succeeded(),
            Err(error) => {
                tracing::debug!(slot, %error, "a replica is not there yet");
                state.retries[slot].failed(now);
                // Informs the operator only; the next change of the record stores it.
                if let Some(replica) = state.record.replica_mut(slot) {
                    replica.why = Some(error.to_string());
                }
            }
        }
        drop(state);
        self.context.refresh_status();
    }

    /// Attaches an absent replica: in sync if its state is in sync and no holder could have written
    /// without it, otherwise as a target of a resync.
    async fn attach(&self, slot: usize) -> Result<(), VolumeError> {
        let record = self.context.state.borrow().record.clone();
        let Some(replica) = record.replica(slot).cloned() else {
            return Ok(());
        };
        let (device, disk) = self.media.claim_of_any_size(&record, &replica.device)?;
        if let Err(error) = self.context.must_reserve(&device) {
            self.media.disks.forget(&disk);
            return Err(error);
        }
        let former = self.left_under_way(slot, &disk.name);
        let outcome = match former {
            0 => {
                self.attach_disk(slot, &record, &replica, device, &disk)
                    .await
            }
            _ => Err(VolumeError::Io {
                device: replica.device,
                what: format!("{former} I/Os of its earlier incarnation are still in flight"),
            }),
        };
        if outcome.is_err() {
            self.media.disks.forget(&disk);
        }
        outcome
    }

    /// Number of I/Os of earlier incarnations that the device may still execute: of lanes, in any
    /// slot, and of the control. A late write among them would overwrite newer data.
    fn left_under_way(&self, slot: usize, device: &str) -> usize {
        let state = self.context.state.borrow();
        let was_there = |s: &usize| state.former[*s].as_deref() == Some(device);
        let slots = (0..MAX_REPLICAS).filter(|s| state.live[*s].is_none());
        let lanes = slots.filter(|s| *s == slot || was_there(s));
        let lanes: u32 = lanes.map(|s| self.context.shared.outstanding(s)).sum();
        lanes as usize + self.media.disks.left_under_way(device)
    }

    async fn attach_disk(
        &self,
        slot: usize,
        record: &VolumeRecord,
        replica: &ReplicaRecord,
        device: ReplicaDevice,
        disk: &Rc<Disk>,
    ) -> Result<(), VolumeError> {
        let losses = device.layer.losses();
        let checked = Checked::before(&device.layer);
        let failed = |why: Failure| {
            self.context.fence_if_superseded(why);
            VolumeError::Io {
                device: replica.device.clone(),
                what: describe(why),
            }
        };
        // Reservations of a volume's holders do not exclude readers. One that does belongs to an
        // unrelated host, and blocks only this replica.
        let read = match self.media.read_label(disk).await {
            Err(why) if why.is_beyond_end() => {
                // The device is too small even for the labels.
                let cut = Cut::unreadable(record);
                let _one = self.replicas.turn.lock().await;
                self.replicas.record_cut(slot, &cut, &checked).await?;
                must_fit(record, &replica.device, &device.layer)?;
                return Err(failed(why));
            }
            Err(why) if why.is_fenced() => return Err(failed(Failure::Reserved)),
            Err(why) => return Err(failed(why)),
            Ok(read) => read,
        };
        let label_credit = label_credit(record, replica, &read);
        let label_credit = label_credit.inspect_err(|error| {
            if matches!(error, VolumeError::Newer { .. }) {
                self.context.fence(error.to_string());
            }
        })?;
        if replica.state != ReplicaState::InSync {
            let delay = Duration::from_millis(record.settings.settle_ms);
            self.context.core.after(delay).await;
        }
        let _one = self.replicas.turn.lock().await;
        let same = self.context.state.borrow().record.replica(slot) == Some(replica);
        if !same || self.context.state.borrow().live[slot].is_some() {
            return Err(VolumeError::Running {
                what: "another change of the replica",
            });
        }
        let is_own = label_credit == LabelCredit::Trusted;
        let cut = match Cut::of(record, &device.layer).filter(|_| is_own) {
            None if is_own && !device.local => self.media.ends_early(disk, record).await,
            cut => cut,
        };
        if replica.cut || cut.is_some() {
            let cut = cut.unwrap_or_else(|| Cut::recorded(record, replica));
            self.replicas.record_cut(slot, &cut, &checked).await?;
        }
        must_fit(record, &replica.device, &device.layer)?;
        let state = self
            .context
            .state
            .borrow()
            .record
            .replica(slot)
            .map(|m| m.state);
        let in_sync = match (state.unwrap_or(replica.state), label_credit) {
            (ReplicaState::InSync, LabelCredit::Trusted) => true,
            (ReplicaState::Out { .. } | ReplicaState::Filling { .. }, LabelCredit::Trusted) => {
                false
            }
            // No other replica can be the source: filling this one would lose its data, and thus
            // the volume.
            (ReplicaState::InSync, LabelCredit::None)
                if self.context.state.borrow().in_sync().next().is_none() =>
            {
                return Err(not_believed(record, replica, &read));
            }
            (_, LabelCredit::None) => {
                self.replicas
                    .commit(|record| {
                        if let Some(replica) = record.replica_mut(slot) {
                            replica.fill_anew("its data cannot be trusted".into());
                        }
                    })
                    .await?;
                false
            }
        };
        let is_empty = {
            let state = self.context.state.borrow();
            state.record.replica(slot).is_some_and(|m| m.is_empty())
        };
        if is_empty {
            // The whole replica is copied from now on.
            device.layer.forget_least();
        }
        let own = |label: &Label| label.replica == replica.id;
        let (sequence, place) = match &read {
            Ok((label, place)) if own(label) => (label.sequence, *place),
            _ => (0, LabelCopy::B),
        };
        let live = Rc::new(Live {
            device,
            disk: Rc::clone(disk),
            incarnation: self.context.shared.next_incarnation(),
            losses,
            stamp: Cell::default(),
            sequence: Cell::new(sequence),
            place: Cell::new(place),
            key: Cell::new(0),
            looked: Cell::new(self.context.core.now()),
            joined: Cell::new(false),
            flushed: Cell::new(false),
            read_errors: RefCell::new(VecDeque::new()),
            resync: RefCell::default(),
        });
        let record = self.context.state.borrow().record.clone();
        if read.as_ref().is_ok_and(|(label, _)| !own(label)) {
            // A second old label on the device would make it ambiguous which replica it is.
            self.replicas
                .keep_others_out(&live, &record)
                .await
                .map_err(failed)?;
            self.media.erase_labels(disk).await.map_err(failed)?;
        }
        self.replicas
            .write_label(slot, &live, &record, false)
            .await
            .map_err(failed)?;
        if in_sync && record.serving < record.epoch {
            // An operator chose it with a label that was too old. It has a new label now, so the
            // old one is no longer accepted.
            self.replicas
                .commit(|record| record.serving = record.epoch)
                .await?;
        }
        {
            let _log = self.log.turn.lock().await;
            self.log.write_log_to(slot, &live).await.map_err(failed)?;
            // From now on every page of the log is written to this replica too.
            let mut state = self.context.state.borrow_mut();
            state.live[slot] = Some(Rc::clone(&live));
            state.former[slot] = Some(live.disk.name.clone());
        }
        if live.device.layer.losses() != losses || Cut::of(&record, &live.device.layer).is_some() {
            self.context.state.borrow_mut().live[slot] = None;
            return Err(failed(Failure::Loss));
        }
        live.joined.set(true);
        if in_sync {
            // Writes that failed when this replica left are on it, or on replicas under resync,
            // which get them all again.
            let dirty = |region: &u64| self.context.shared.regions.is_dirty(*region);
            for (other, _) in self.context.state.borrow().syncing() {
                let missing = &self.context.shared.missing[other];
                (0..record.regions())
                    .filter(dirty)
                    .for_each(|r| missing.insert(r));
            }
            self.context.thawed();
            self.context.publish();
            // A replica without missing regions may have waited for one that is in sync.
            self.context.signals.resync.notify_one();
            return Ok(());
        }
        self.begin_resync(slot, &live);
        Ok(())
    }

    /// Makes lanes write to a replica under resync. This function has no await: the replica needs
    /// the regions that are dirty when lanes begin to write to it.
    fn begin_resync(&self, slot: usize, live: &Rc<Live>) {
        let missing = &self.context.shared.missing[slot];
        let (state, regions) = {
            let state = self.context.state.borrow();
            let replica = state.record.replica(slot);
            (replica.map(|m| m.state), state.record.regions())
        };
        missing.assign(|region| region < regions);
        self.context.publish();
        let dirty = |region| self.context.shared.regions.is_dirty(region);
        let (kind, kept) = match state {
            Some(ReplicaState::Filling { watermark, .. }) => {
                missing.assign(|region| region < regions && (region >= watermark || dirty(region)));
                (ResyncKind::Full, watermark)
            }
            _ => {
                missing.assign(|region| region < regions && dirty(region));
                (ResyncKind::Partial, 0)
            }
        };
        let total = missing.count();
        *live.resync.borrow_mut() = Some(Resync::new(kind, total, kept, self.context.core.now()));
        self.context.refresh_status();
        self.context.emit(VolumeEventKind::ResyncStarted {
            replica: self.context.replica_id(slot),
            device: live.disk.name.clone(),
            kind,
            bytes: total << self.context.state.borrow().record.region_shift,
        });
        self.context.signals.resync.notify_one();
    }
}

/// How much of a device's contents is trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LabelCredit {
    /// The contents are trusted as far as the record says.
    Trusted,
    /// None of the contents are trusted.
    None,
}

/// Why a replica that is in sync in the store is not trusted.
pub(super) fn not_believed(
    record: &VolumeRecord,
    replica: &ReplicaRecord,
    label: &Result<(Label, LabelCopy), LabelError>,
) -> VolumeError {
    let found = match label {
        Ok((label, _)) if label.replica == replica.id => {
            format!("its label is of epoch {}", label.stamp.epoch)
        }
        Ok(_) => "its label is another replica's".into(),
        Err(error) => format!("it has no label: {error}"),
    };
    VolumeError::NotBelieved {
        name: record.name.clone(),
        device: replica.device.clone(),
        found,
        serving: record.serving,
    }
}

/// Compares a replica's label with the store's record.
pub(super) fn label_credit(
    record: &VolumeRecord,
    replica: &ReplicaRecord,
    label: &Result<(Label, LabelCopy), LabelError>,
) -> Result<LabelCredit, VolumeError> {
    let in_use = |holds: String| VolumeError::InUse {
        device: replica.device.clone(),
        holds,
    };
    let label = match label {
        Ok((label, _)) => label,
        // Wiped, or torn at its first write: no contents can be trusted, and there is no other
        // label.
        Err(LabelError::NotALabel | LabelError::Checksum) => return Ok(LabelCredit::None),
        Err(error) => return Err(in_use(format!("has no label of this volume: {error}"))),
    };
    if label.volume != record.id {
        return Err(in_use(format!(
            "is a replica of volume \"{}\" ({})",
            label.name, label.volume
        )));
    }
    if label.stamp > record.version() {
        let shown = |stamp: Stamp| format!("epoch {} revision {}", stamp.epoch, stamp.revision);
        return Err(VolumeError::Newer {
            device: replica.device.clone(),
            found: shown(label.stamp),
            known: shown(record.version()),
        });
    }
    if label.replica != replica.id {
        // Disks may have been swapped: keep the good data of this one, and do not overwrite it.
        return match record.replicas.iter().find(|m| m.id == label.replica) {
            Some(other) => Err(in_use(format!(
                "is another replica of the volume, which belongs on \"{}\"",
                other.device
            ))),
            None => Ok(LabelCredit::None),
        };
    }
    let believed = match replica.state {
        // Every in-sync replica is labelled before its epoch serves. An older revision proves
        // nothing: an incomplete opening raises the revision without a label, any number of times
        // in a row.
        ReplicaState::InSync => label.stamp.epoch >= record.serving,
        ReplicaState::Out { last_label } | ReplicaState::Filling { last_label, .. } => {
            label.stamp >= last_label
        }
    };
    Ok(if believed {
        LabelCredit::Trusted
    } else {
        LabelCredit::None
    })
}
