//! What operators ask for.

use std::rc::Rc;
use std::time::Duration;

use nacre_bdev::{Bdev, Flags, Status};
use tokio::sync::mpsc;
use uuid::Uuid;

use super::Control;
use super::create::{Bench, check_name, check_settings};
use super::cut::{Cut, must_fit};
use super::disk::Disk;
use super::state::{Live, Retry};
use crate::format::REGIONS_PER_PAGE;
use crate::handle::{Asked, Command, Happened, VolumeError};
use crate::model::{MAX_MEMBERS, MemberRecord, MemberState, Settings, Stamp, VolumeRecord};
use crate::shared::Failure;

/// How long closing waits for I/O that is under way.
const DRAIN: Duration = Duration::from_secs(10);

impl Control {
    /// One command at a time.
    pub(super) async fn obey(self: Rc<Control>, mut asked: mpsc::Receiver<Asked>) {
        while let Some(Asked { command, answer }) = asked.recv().await {
            let closes = matches!(command, Command::Close);
            let outcome = self.carry_out(command).await;
            let closed = closes && outcome.is_ok();
            self.refresh_status();
            if closed {
                asked.close();
                // The volume must be completely closed when the answer arrives.
                self.stop();
            }
            // The caller may have gone.
            let _ = answer.send(outcome);
            if closed {
                return;
            }
        }
    }

    async fn carry_out(self: &Rc<Control>, command: Command) -> Result<(), VolumeError> {
        match command {
            Command::Add { device, force } => self.add(&device, force, None).await,
            Command::Remove { member, force } => self.remove(&member, force).await,
            Command::Offline { member, force } => self.offline(&member, force).await,
            Command::Online { member } => self.online(&member).await,
            Command::Replace {
                member,
                device,
                force,
            } => {
                let slot = self.find_slot(&member)?;
                self.add(&device, force, Some(self.member_id(slot))).await
            }
            Command::Resync { member, full } => self.resync(member, full).await,
            Command::Verify { repair } => self.begin_verify(repair),
            Command::StopVerify => {
                self.state.borrow_mut().stop_verify = true;
                Ok(())
            }
            Command::Grow { blocks } => self.grow(blocks).await,
            Command::Rename { name } => self.rename(&name).await,
            Command::Set { settings } => self.set(*settings).await,
            Command::Thaw { member, force } => self.thaw(member, force).await,
            Command::FailIo => {
                self.shared.set_failing(true);
                self.publish();
                Ok(())
            }
            Command::DevicesChanged { device } => {
                self.devices_changed(&device).await;
                Ok(())
            }
            Command::Close => self.close().await,
        }
    }

    pub(super) fn name(&self) -> String {
        self.state.borrow().record.name.clone()
    }

    pub(super) fn find_slot(&self, member: &str) -> Result<usize, VolumeError> {
        let found = self.state.borrow().slot_of(member);
        found.ok_or_else(|| VolumeError::NoMember {
            name: self.name(),
            member: member.to_owned(),
        })
    }

    /// Whether a member that is in sync lacks nothing, and has lost nothing.
    fn is_good_copy(&self, slot: usize, live: &Live) -> bool {
        self.shared.needs[slot].is_empty() && live.is_whole()
    }

    /// Checks that the volume has a good copy without this replica, or that the operator typed its
    /// name.
    fn must_keep_a_copy(&self, slot: usize, force: Option<&str>) -> Result<(), VolumeError> {
        let good =
            |(other, live): (usize, &Rc<Live>)| other != slot && self.is_good_copy(other, live);
        let others = self.state.borrow().in_sync().any(good);
        let name = self.name();
        if others || !self.state.borrow().is_in_sync(slot) || force == Some(name.as_str()) {
            return Ok(());
        }
        Err(VolumeError::LastCopy {
            name,
            hint: match force {
                Some(_) => ": the name typed is not the volume's",
                None => ": type the volume's name to confirm",
            },
        })
    }

    async fn add(
        self: &Rc<Control>,
        name: &str,
        force: bool,
        replaces: Option<Uuid>,
    ) -> Result<(), VolumeError> {
        let record = self.state.borrow().record.clone();
        if record.members.iter().any(|m| m.device == name) {
            return Err(VolumeError::Invalid {
                what: "device",
                why: format!("\"{name}\" is a replica of the volume already"),
            });
        }
        // Prefer a slot without I/O of a former replica in flight, if there is one: others have to
        // wait for it.
        let free = (0..MAX_MEMBERS).filter(|slot| record.member(*slot).is_none());
        let free = free.min_by_key(|slot| self.shared.outstanding(*slot) > 0);
        let slot = free.ok_or_else(|| VolumeError::Invalid {
            what: "device",
            why: format!("a volume has at most {MAX_MEMBERS} replicas"),
        })?;
        let (device, disk) = self.claim(&record, name).await?;
        self.disks.forget(&disk);
        if self.disks.left_under_way(&disk.name) > 0 {
            // A label that is written late would stand beside the new one.
            return Err(VolumeError::Running {
                what: "an I/O of the device's earlier incarnation",
            });
        }
        let bench = Bench::new(&self.core, self.pool.clone(), self.deadline())?;
        let disk = bench.open(name, &device)?;
        if !force {
            let bytes = device.layer.geometry().bytes();
            bench.must_be_empty(&disk, bytes).await?;
        }
        let id = Uuid::new_v4();
        let member = MemberRecord {
            id,
            slot: slot as u8,
            device: name.to_owned(),
            state: MemberState::Filling {
                watermark: 0,
                last_label: Stamp::default(),
            },
            offline: false,
            cut: false,
            replaces,
            why: Some("it is new".into()),
        };
        let _one = self.membership.lock().await;
        self.must_hold().await?;
        // Label the device before the store knows it: a device that is in the store without a label
        // of the volume would be taken for a foreign one.
        let mut next = self.state.borrow().record.clone();
        next.members.push(member.clone());
        bench.format(&disk, &next, slot, false).await?;
        drop((disk, bench, device));
        self.commit(|record| record.members.push(member)).await?;
        self.state.borrow_mut().retries[slot] = Retry::default();
        self.publish();
        self.say(Happened::MemberAdded {
            member: id,
            device: name.to_owned(),
        });
        self.bells.probe.notify_one();
        Ok(())
    }

    async fn remove(&self, member: &str, force: Option<String>) -> Result<(), VolumeError> {
        let slot = self.find_slot(member)?;
        if self.state.borrow().record.members.len() == 1 {
            return Err(VolumeError::Invalid {
                what: "replica",
                why: "it is the only one: delete the volume instead".into(),
            });
        }
        self.must_keep_a_copy(slot, force.as_deref())?;
        let _one = self.membership.lock().await;
        self.must_keep_a_copy(slot, force.as_deref())?;
        self.remove_slot(slot).await
    }

    /// Under `membership`.
    async fn remove_slot(&self, slot: usize) -> Result<(), VolumeError> {
        let Some(member) = self.state.borrow().record.member(slot).cloned() else {
            return Ok(());
        };
        // Out of the table at once, so that no more writes reach it; released when its label is
        // wiped.
        self.keep_in_view(slot);
        let live = self.state.borrow_mut().live[slot].take();
        let gone = self.commit(|record| {
            record.members.retain(|m| usize::from(m.slot) != slot);
            for other in &mut record.members {
                other.replaces = other.replaces.filter(|replaced| *replaced != member.id);
            }
            let count = record.members.len() as u8;
            let least = &mut record.settings.min_in_sync;
            *least = (*least).min(count);
        });
        let gone = gone.await;
        if gone.is_ok() {
            self.has_left(slot, member.id)
        } else {
            self.publish()
        }
        if let Some(live) = live {
            if gone.is_ok() {
                self.wipe_labels(&live.disk).await;
            }
            self.let_others_in(&live).await;
            self.disks.forget(&live.disk);
        }
        gone?;
        self.say(Happened::MemberRemoved {
            member: member.id,
            device: member.device,
        });
        Ok(())
    }

    /// The remaining labels would only show that the device was a replica once.
    async fn wipe_labels(&self, disk: &Disk) {
        if let Err(why) = self.erase_labels(disk).await {
            let (device, why) = (&disk.name, super::failures::describe(why));
            tracing::warn!(device, why, "the label of a removed replica stays");
        }
    }

    async fn offline(&self, member: &str, force: Option<String>) -> Result<(), VolumeError> {
        let slot = self.find_slot(member)?;
        let _one = self.membership.lock().await;
        self.must_keep_a_copy(slot, force.as_deref())?;
        let live = self.state.borrow().live[slot].clone();
        let others = self
            .state
            .borrow()
            .in_sync()
            .any(|(other, _)| other != slot);
        self.keep_in_view(slot);
        self.let_go(slot);
        self.commit(|record| {
            let Some(member) = record.member_mut(slot) else {
                return;
            };
            member.offline = true;
            member.why = Some("taken out by the operator".into());
            // The last one keeps its state: no holder writes without it.
            if let (MemberState::InSync, true, Some(live)) = (member.state, others, &live) {
                member.state = MemberState::Out {
                    last_label: live.stamp.get(),
                };
            }
        })
        .await?;
        if !others {
            self.freeze("the operator took the last replica out");
        }
        self.has_left(slot, self.member_id(slot));
        self.say(Happened::MemberOut {
            member: self.member_id(slot),
            device: member.to_owned(),
            why: "taken out by the operator".into(),
        });
        Ok(())
    }

    async fn online(&self, member: &str) -> Result<(), VolumeError> {
        let slot = self.find_slot(member)?;
        let _one = self.membership.lock().await;
        self.commit(|record| {
            if let Some(member) = record.member_mut(slot) {
                member.offline = false;
            }
        })
        .await?;
        self.state.borrow_mut().retries[slot] = Retry::default();
        self.bells.probe.notify_one();
        Ok(())
    }

    async fn resync(&self, member: Option<String>, full: bool) -> Result<(), VolumeError> {
        let slots: Vec<usize> = match &member {
            Some(member) => vec![self.find_slot(member)?],
            None => (0..MAX_MEMBERS).collect(),
        };
        let _one = self.membership.lock().await;
        for slot in slots {
            if full {
                self.must_keep_a_copy(slot, None)?;
                let others = self
                    .state
                    .borrow()
                    .in_sync()
                    .any(|(other, _)| other != slot);
                if member.is_none() || !others {
                    return Err(VolumeError::Invalid {
                        what: "full",
                        why: "needs the name of a replica, and another one that is in sync".into(),
                    });
                }
                self.keep_in_view(slot);
                self.let_go(slot);
                self.commit(|record| {
                    if let Some(member) = record.member_mut(slot) {
                        member.state = MemberState::Filling {
                            watermark: 0,
                            last_label: Stamp::default(),
                        };
                        member.why = Some("the operator asked for a full copy".into());
                    }
                })
                .await?;
                self.has_left(slot, self.member_id(slot));
            }
            self.state.borrow_mut().retries[slot] = Retry::default();
        }
        self.bells.probe.notify_one();
        self.bells.resync.notify_one();
        Ok(())
    }

    async fn grow(&self, blocks: u64) -> Result<(), VolumeError> {
        let one = self.membership.lock().await;
        let record = self.state.borrow().record.clone();
        let invalid = |why: String| VolumeError::Invalid {
            what: "blocks",
            why,
        };
        if blocks <= record.blocks {
            return Err(invalid(format!("the volume has {} already", record.blocks)));
        }
        let most = self.shared.regions.len() * record.region_blocks();
        if blocks > most {
            return Err(invalid(format!(
                "regions of this size allow {most} blocks; make a new volume"
            )));
        }
        let present = self.state.borrow().present();
        if present.len() < record.members.len() {
            return Err(invalid("every replica must be present".into()));
        }
        let larger = VolumeRecord {
            blocks,
            ..record.clone()
        };
        for (slot, live) in &present {
            let (layer, incarnation) = (&live.device.layer, live.incarnation);
            // The new part of the volume had no data before, so an earlier loss there does not
            // count.
            if let Some(cut) = Cut::of_least(&record, layer.forget_least()) {
                let refused = format!("\"{}\": {cut}", live.disk.name);
                drop(one);
                let why = Failure::Status(Status::OutOfRange);
                self.judge(*slot, incarnation, why).await;
                return Err(invalid(refused));
            }
            must_fit(&larger, &live.disk.name, layer)
                .map_err(|error| invalid(error.to_string()))?;
        }
        // The devices' contents differ there: they are made equal before a host may see them, as
        // after an unclean stop. That includes the region in which the volume ended.
        let old = record.regions();
        let new = blocks.div_ceil(record.region_blocks());
        let first = self.shared.region_of(record.blocks - 1);
        let fresh: Vec<u64> = (first..new).collect();
        // Put it in the log before it is in the store: a holder that opens the volume with its new
        // size reads it there. No region is cleared meanwhile.
        let log = self.log.lock().await;
        let mut pages: Vec<u64> = fresh.iter().map(|r| r / REGIONS_PER_PAGE).collect();
        pages.dedup();
        let also = |region| fresh.contains(&region);
        let failed = self.write_pages(&present, &pages, Flags::FUA, also);
        let failed = failed.await;
        if !failed.is_empty() {
            drop((log, one));
            for (slot, incarnation, why) in failed {
                self.judge(slot, incarnation, why).await;
            }
            return Err(invalid("a replica failed".into()));
        }
        fresh.iter().for_each(|r| self.shared.regions.set_dirty(*r));
        self.commit(|record| record.blocks = blocks).await?;
        let mut slots = self
            .state
            .borrow()
            .in_sync()
            .map(|(slot, _)| slot)
            .collect::<Vec<_>>();
        // The others get it from one that has the region in which the volume ended; one always has.
        let has = |slot: &usize| !self.shared.needs[*slot].contains(first);
        slots.remove(slots.iter().position(has).unwrap_or(0));
        for (slot, live) in &present {
            let in_sync = slots.contains(slot);
            if in_sync || live.resync.borrow().is_some() {
                // The last region may be copied just now, up to where the volume ended.
                self.shared.add_needs(*slot, first..new);
            }
            if in_sync && live.resync.borrow().is_none() {
                let kind = crate::handle::ResyncKind::Reconcile;
                let total = new - old;
                let resync = super::state::Resync::new(kind, total, 0, self.core.now());
                *live.resync.borrow_mut() = Some(resync);
            }
        }
        drop((log, one));
        self.bells.clean.notify_one();
        let grown = self.shared.grow(blocks);
        grown.map_err(|error| invalid(error.to_string()))?;
        self.publish();
        self.bells.resync.notify_one();
        self.say(Happened::Grown { blocks });
        Ok(())
    }

    async fn rename(&self, name: &str) -> Result<(), VolumeError> {
        check_name(name)?;
        let taken = self.store.list().await?;
        if taken
            .iter()
            .any(|other| other.name == name && other.id != self.id)
        {
            return Err(crate::store::StoreError::Exists { name: name.into() }.into());
        }
        let _one = self.membership.lock().await;
        self.commit(|record| record.name = name.to_owned()).await
    }

    async fn set(&self, settings: Settings) -> Result<(), VolumeError> {
        check_settings(&settings, self.state.borrow().record.members.len())?;
        let _one = self.membership.lock().await;
        self.commit(|record| record.settings = settings).await?;
        self.publish();
        self.bells.verify.notify_one();
        Ok(())
    }

    /// The caller that changed the device may rely on the answer: by then a cut replica is recorded
    /// as such.
    async fn devices_changed(&self, device: &str) {
        self.look_at_devices();
        self.judge_cut().await;
        let slot = self.state.borrow().slot_of(device);
        if let Some(slot) = slot {
            self.state.borrow_mut().retries[slot] = Retry::default();
            self.bells.probe.notify_one();
        }
    }

    /// Decides about the members in use that were cut.
    async fn judge_cut(&self) {
        let (record, present) = {
            let state = self.state.borrow();
            (state.record.clone(), state.present())
        };
        for (slot, live) in present {
            if Cut::of(&record, &live.device.layer).is_some() {
                self.judge(slot, live.incarnation, Failure::Loss).await;
            }
        }
    }

    /// Removes a replaced replica once its replacement has everything. The condition is checked in
    /// the record, repeatedly, not once after the promotion: the holder may have died since, or the
    /// new replica may have lacked a region then.
    pub(super) async fn finish_replacement(&self) {
        if self.replaced().is_none() {
            return;
        }
        let _one = self.membership.lock().await;
        // The previous task may have changed that.
        let Some(old) = self.replaced() else {
            return;
        };
        if self.remove_slot(old).await.is_ok() {
            // There may be another one, and the remaining replicas may lack nothing any longer.
            self.bells.resync.notify_one();
        }
    }

    /// A member that is to go now. Without it there is a good copy: the one in its place.
    pub(super) fn replaced(&self) -> Option<usize> {
        let state = self.state.borrow();
        if !state.serving || state.closed || state.fenced.is_some() {
            return None;
        }
        let good = state
            .in_sync()
            .filter(|(slot, live)| self.is_good_copy(*slot, live));
        let mut replaced = good.filter_map(|(slot, _)| state.record.member(slot)?.replaces);
        let old = replaced.find_map(|id| state.record.members.iter().find(|m| m.id == id))?;
        Some(usize::from(old.slot))
    }

    /// Flushes everything and writes labels that record it. The queues on the volume are closed by
    /// now, or find it closed.
    async fn close(&self) -> Result<(), VolumeError> {
        self.judge_cut().await;
        let _one = self.membership.lock().await;
        self.state.borrow_mut().closed = true;
        self.publish();
        let deadline = self.core.now() + DRAIN;
        let under_way = || (0..MAX_MEMBERS).any(|slot| self.shared.outstanding(slot) > 0);
        while under_way() && self.core.now() < deadline {
            self.core.after(super::MOMENT).await;
        }
        let members: Vec<_> = {
            let state = self.state.borrow();
            state.in_sync().map(|(s, l)| (s, Rc::clone(l))).collect()
        };
        let reconciled = members
            .iter()
            .all(|(slot, _)| self.shared.needs[*slot].is_empty());
        let kept = members
            .iter()
            .all(|(_, l)| l.device.layer.losses() == l.losses);
        // Another holder that has the volume by now has its log, too: write nothing there any
        // longer.
        let mine = || {
            let state = self.state.borrow();
            state.fenced.is_none() && !state.unheard
        };
        let clean = !under_way() && reconciled && kept && self.flush_all(&members).await;
        if clean && mine() && members.len() == self.state.borrow().record.members.len() {
            self.clear_log(&members).await;
        }
        if self.state.borrow().fenced.is_none() {
            self.sign_off(clean).await?;
        }
        self.let_others_in_everywhere().await;
        self.refresh_status();
        self.say(Happened::Closed);
        Ok(())
    }

    async fn clear_log(&self, members: &[(usize, Rc<Live>)]) {
        let _log = self.log.lock().await;
        let regions = self.state.borrow().record.regions();
        let mut pages = Vec::new();
        for region in (0..regions).filter(|r| self.shared.regions.is_dirty(*r)) {
            self.shared.regions.age(region);
            if self.shared.regions.clear(region) {
                pages.push(region / REGIONS_PER_PAGE);
            }
        }
        pages.dedup();
        let failed = self
            .write_pages(members, &pages, Flags::FUA, |_| false)
            .await;
        for (slot, _, why) in failed {
            // Its label will not say that it is clean either: it is reconciled next time.
            tracing::warn!(slot, why = super::failures::describe(why), "its log stays");
        }
    }
}
