//! Executes the commands of an open volume ([`crate::handle::Command`]): adds, removes and replaces
//! replicas, resyncs, grows, thaws and closes.

use std::rc::Rc;
use std::time::Duration;

use nacre_bdev::{Bdev, Flags, Status};
use tokio::sync::mpsc;
use uuid::Uuid;

use super::Control;
use super::create::{OfflineDisks, check_name};
use super::state::{Live, Resync, Retry};
use super::truncation::{Cut, must_fit};
use crate::format::REGIONS_PER_PAGE;
use crate::handle::{Command, CommandRequest, VolumeError, VolumeEventKind};
use crate::model::{MAX_REPLICAS, ReplicaRecord, ReplicaState, Settings, Stamp, VolumeRecord};
use crate::shared::Failure;

/// How long closing waits for I/O in flight.
const DRAIN: Duration = Duration::from_secs(10);

impl Control {
    /// Executes commands, one at a time.
    pub(super) async fn obey(self: Rc<Self>, mut requests: mpsc::Receiver<CommandRequest>) {
        while let Some(CommandRequest { command, answer }) = requests.recv().await {
            if let Command::HoldWrites { id, limit } = command {
                // It waits for writes in flight, which another command may end.
                let hold = Rc::clone(&self.hold);
                let held = async move {
                    let _ = answer.send(hold.begin(id, limit).await);
                };
                self.context.spawn(held);
                continue;
            }
            let closes = matches!(command, Command::Close);
            let outcome = self.carry_out(command).await;
            let closed = closes && outcome.is_ok();
            self.context.refresh_status();
            if closed {
                requests.close();
                // The volume must be completely closed when the caller gets the reply.
                self.stop();
            }
            // The caller may have stopped waiting.
            let _ = answer.send(outcome);
            if closed {
                return;
            }
        }
    }

    async fn carry_out(self: &Rc<Self>, command: Command) -> Result<(), VolumeError> {
        match command {
            Command::Add { device, force } => self.add(&device, force, None).await,
            Command::Remove { replica, force } => self.remove(&replica, force).await,
            Command::Offline { replica, force } => self.offline(&replica, force).await,
            Command::Online { replica } => self.online(&replica).await,
            Command::Replace {
                replica,
                device,
                force,
            } => {
                let slot = self.context.find_slot(&replica)?;
                self.add(&device, force, Some(self.context.replica_id(slot)))
                    .await
            }
            Command::GiveUp { replica } => self.give_up(&replica).await,
            Command::Resync { replica, full } => self.resync(replica, full).await,
            Command::Verify { repair } => self.verify.begin_verify(repair),
            Command::StopVerify => {
                self.context.state.borrow_mut().stop_verify = true;
                Ok(())
            }
            Command::Grow { blocks } => self.grow(blocks).await,
            Command::Rename { name } => self.rename(&name).await,
            Command::Set { settings } => self.set(*settings).await,
            Command::Thaw { replica, force } => self.thaw(replica, force).await,
            Command::FailIo => {
                self.context.shared.set_failing(true);
                self.context.publish();
                Ok(())
            }
            Command::DevicesChanged { device } => {
                self.devices_changed(&device).await;
                Ok(())
            }
            Command::HoldWrites { id, limit } => self.hold.begin(id, limit).await,
            Command::ReleaseWrites { id } => self.hold.release(id),
            Command::Close => self.close().await,
        }
    }

    /// Checks that the volume has a good copy without this replica, or that the operator typed its
    /// name.
    fn must_keep_a_copy(&self, slot: usize, force: Option<&str>) -> Result<(), VolumeError> {
        let good = |(other, live): (usize, &Rc<Live>)| {
            other != slot && self.replicas.is_good_copy(other, live)
        };
        let others = self.context.state.borrow().in_sync().any(good);
        let name = self.context.name();
        if others || !self.context.state.borrow().is_in_sync(slot) || force == Some(name.as_str()) {
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
        self: &Rc<Self>,
        name: &str,
        force: bool,
        replaces: Option<Uuid>,
    ) -> Result<(), VolumeError> {
        let record = self.context.state.borrow().record.clone();
        must_be_first(&record, replaces)?;
        if record.replicas.iter().any(|m| m.device == name) {
            return Err(VolumeError::Invalid {
                what: "device",
                why: format!("\"{name}\" is a replica of the volume already"),
            });
        }
        // Prefer a slot without I/O of a former replica in flight: others have to wait for that
        // I/O.
        let free = (0..MAX_REPLICAS).filter(|slot| record.replica(*slot).is_none());
        let free = free.min_by_key(|slot| self.context.shared.outstanding(*slot) > 0);
        let slot = free.ok_or_else(|| VolumeError::Invalid {
            what: "device",
            why: format!("a volume has at most {MAX_REPLICAS} replicas"),
        })?;
        let (device, disk) = self.media.claim(&record, name).await?;
        self.media.disks.forget(&disk);
        self.context.must_reserve(&device)?;
        if self.media.disks.left_under_way(&disk.name) > 0 {
            // A late label write would leave two labels.
            return Err(VolumeError::Running {
                what: "an I/O of the device's earlier incarnation",
            });
        }
        let offline = OfflineDisks::new(
            &self.context.core,
            self.media.pool.clone(),
            self.context.deadline(),
        )?;
        let disk = offline.open(name, &device)?;
        if !force {
            let bytes = device.layer.geometry().bytes();
            offline.must_be_empty(&disk, bytes).await?;
        }
        let id = Uuid::new_v4();
        let replica = ReplicaRecord {
            id,
            slot: slot as u8,
            device: name.to_owned(),
            node: None,
            node_device: None,
            state: ReplicaState::Filling {
                watermark: 0,
                last_label: Stamp::default(),
            },
            offline: false,
            cut: false,
            replaces,
            why: Some("it is new".into()),
        };
        let _one = self.replicas.turn.lock().await;
        self.replicas.must_hold().await?;
        // Write the label before the store has the device: an in-store device without a label of
        // the volume would be treated as foreign.
        let mut next = self.context.state.borrow().record.clone();
        must_be_first(&next, replaces)?;
        next.replicas.push(replica.clone());
        offline.format(&disk, &next, slot, false).await?;
        drop((disk, offline, device));
        self.replicas
            .commit(|record| record.replicas.push(replica))
            .await?;
        self.context.state.borrow_mut().retries[slot] = Retry::default();
        self.context.publish();
        self.context.emit(VolumeEventKind::ReplicaAdded {
            replica: id,
            device: name.to_owned(),
        });
        self.context.signals.probe.notify_one();
        Ok(())
    }

    async fn remove(&self, replica: &str, force: Option<String>) -> Result<(), VolumeError> {
        let slot = self.context.find_slot(replica)?;
        if self.context.state.borrow().record.replicas.len() == 1 {
            return Err(VolumeError::Invalid {
                what: "replica",
                why: "it is the only one: delete the volume instead".into(),
            });
        }
        self.must_keep_a_copy(slot, force.as_deref())?;
        let _one = self.replicas.turn.lock().await;
        self.must_keep_a_copy(slot, force.as_deref())?;
        self.replicas.remove_slot(slot).await
    }

    async fn give_up(&self, replica: &str) -> Result<(), VolumeError> {
        let _one = self.replicas.turn.lock().await;
        let slot = self.context.find_slot(replica)?;
        let is_successor = {
            let state = self.context.state.borrow();
            let found = state.record.replica(slot);
            found.is_some_and(|one| one.replaces.is_some()) && !state.is_in_sync(slot)
        };
        if !is_successor {
            return Err(VolumeError::Invalid {
                what: "replica",
                why: "it does not replace another one any more".into(),
            });
        }
        self.replicas.remove_slot(slot).await
    }

    async fn offline(&self, replica: &str, force: Option<String>) -> Result<(), VolumeError> {
        let slot = self.context.find_slot(replica)?;
        let _one = self.replicas.turn.lock().await;
        self.must_keep_a_copy(slot, force.as_deref())?;
        let live = self.context.state.borrow().live[slot].clone();
        let others = self
            .context
            .state
            .borrow()
            .in_sync()
            .any(|(other, _)| other != slot);
        self.replicas.keep_in_view(slot);
        self.replicas.detach(slot);
        self.replicas
            .commit(|record| {
                let Some(replica) = record.replica_mut(slot) else {
                    return;
                };
                replica.offline = true;
                replica.why = Some("taken out by the operator".into());
                // The last in-sync replica keeps its state: no holder writes without it.
                if let (ReplicaState::InSync, true, Some(live)) = (replica.state, others, &live) {
                    replica.state = ReplicaState::Out {
                        last_label: live.stamp.get(),
                    };
                }
            })
            .await?;
        if !others {
            self.context
                .freeze("the operator took the last replica out");
        }
        self.replicas.has_left(slot, self.context.replica_id(slot));
        self.context.emit(VolumeEventKind::ReplicaOut {
            replica: self.context.replica_id(slot),
            device: replica.to_owned(),
            why: "taken out by the operator".into(),
        });
        Ok(())
    }

    async fn online(&self, replica: &str) -> Result<(), VolumeError> {
        let slot = self.context.find_slot(replica)?;
        let _one = self.replicas.turn.lock().await;
        self.replicas
            .commit(|record| {
                if let Some(replica) = record.replica_mut(slot) {
                    replica.offline = false;
                }
            })
            .await?;
        self.context.state.borrow_mut().retries[slot] = Retry::default();
        self.context.signals.probe.notify_one();
        Ok(())
    }

    async fn resync(&self, replica: Option<String>, full: bool) -> Result<(), VolumeError> {
        let slots: Vec<usize> = match &replica {
            Some(replica) => vec![self.context.find_slot(replica)?],
            None => (0..MAX_REPLICAS).collect(),
        };
        let _one = self.replicas.turn.lock().await;
        for slot in slots {
            if full {
                self.must_keep_a_copy(slot, None)?;
                let others = self
                    .context
                    .state
                    .borrow()
                    .in_sync()
                    .any(|(other, _)| other != slot);
                if replica.is_none() || !others {
                    return Err(VolumeError::Invalid {
                        what: "full",
                        why: "needs the name of a replica, and another one that is in sync".into(),
                    });
                }
                self.replicas.keep_in_view(slot);
                self.replicas.detach(slot);
                self.replicas
                    .commit(|record| {
                        if let Some(replica) = record.replica_mut(slot) {
                            replica.state = ReplicaState::Filling {
                                watermark: 0,
                                last_label: Stamp::default(),
                            };
                            replica.why = Some("the operator asked for a full copy".into());
                        }
                    })
                    .await?;
                self.replicas.has_left(slot, self.context.replica_id(slot));
            }
            self.context.state.borrow_mut().retries[slot] = Retry::default();
        }
        self.context.signals.probe.notify_one();
        self.context.signals.resync.notify_one();
        Ok(())
    }

    async fn grow(&self, blocks: u64) -> Result<(), VolumeError> {
        let one = self.replicas.turn.lock().await;
        let record = self.context.state.borrow().record.clone();
        let invalid = |why: String| VolumeError::Invalid {
            what: "blocks",
            why,
        };
        if blocks <= record.blocks {
            return Err(invalid(format!("the volume has {} already", record.blocks)));
        }
        let most = self.context.shared.regions.len() * record.region_blocks();
        if blocks > most {
            return Err(invalid(format!(
                "regions of this size allow {most} blocks; make a new volume"
            )));
        }
        let present = self.context.state.borrow().present();
        if present.len() < record.replicas.len() {
            return Err(invalid("every replica must be present".into()));
        }
        let larger = VolumeRecord {
            blocks,
            ..record.clone()
        };
        for (slot, live) in &present {
            let (layer, incarnation) = (&live.device.layer, live.incarnation);
            // The new part of the volume had no data before, so an earlier cut there does not
            // count.
            if let Some(cut) = Cut::of_least(&record, layer.forget_least()) {
                let refused = format!("\"{}\": {cut}", live.disk.name);
                drop(one);
                let why = Failure::Status(Status::OutOfRange);
                self.failures.decide(*slot, incarnation, why).await;
                return Err(invalid(refused));
            }
            must_fit(&larger, &live.disk.name, layer)
                .map_err(|error| invalid(error.to_string()))?;
        }
        // The devices' contents differ in the new part: they are reconciled before a host reads
        // them, as after an unclean stop. That includes the former last region.
        let old = record.regions();
        let new = blocks.div_ceil(record.region_blocks());
        let first = self.context.shared.region_of(record.blocks - 1);
        let fresh: Vec<u64> = (first..new).collect();
        // Write the log before the store: a holder that opens the volume with its new size reads it
        // there. No region is cleared meanwhile.
        let log = self.log.turn.lock().await;
        let mut pages: Vec<u64> = fresh.iter().map(|r| r / REGIONS_PER_PAGE).collect();
        pages.dedup();
        let also = |region| fresh.contains(&region);
        let failed = self.log.write_pages(&present, &pages, Flags::FUA, also);
        let failed = failed.await;
        if !failed.is_empty() {
            drop((log, one));
            for (slot, incarnation, why) in failed {
                self.failures.decide(slot, incarnation, why).await;
            }
            return Err(invalid("a replica failed".into()));
        }
        fresh
            .iter()
            .for_each(|r| self.context.shared.regions.set_dirty(*r));
        self.replicas
            .commit(|record| record.blocks = blocks)
            .await?;
        let mut slots = self
            .context
            .state
            .borrow()
            .in_sync()
            .map(|(slot, _)| slot)
            .collect::<Vec<_>>();
        // Copy from a replica that has the former last region; at least one has it.
        let has = |slot: &usize| !self.context.shared.missing[*slot].contains(first);
        slots.remove(slots.iter().position(has).unwrap_or(0));
        for (slot, live) in &present {
            let in_sync = slots.contains(slot);
            if in_sync || live.resync.borrow().is_some() {
                // A copy of the last region may be running, up to the old end.
                self.context.shared.add_needs(*slot, first..new);
            }
            if in_sync && live.resync.borrow().is_none() {
                let kind = crate::handle::ResyncKind::Reconcile;
                let total = new - old;
                let resync = Resync::new(kind, total, 0, self.context.core.now());
                *live.resync.borrow_mut() = Some(resync);
            }
        }
        drop((log, one));
        self.context.signals.clean.notify_one();
        let grown = self.context.shared.grow(blocks);
        grown.map_err(|error| invalid(error.to_string()))?;
        self.context.publish();
        self.context.signals.resync.notify_one();
        self.context.emit(VolumeEventKind::Grown { blocks });
        Ok(())
    }

    async fn rename(&self, name: &str) -> Result<(), VolumeError> {
        check_name(name)?;
        let taken = self.replicas.store.list().await?;
        if taken
            .iter()
            .any(|other| other.name == name && other.id != self.context.id)
        {
            return Err(crate::store::StoreError::Exists { name: name.into() }.into());
        }
        let _one = self.replicas.turn.lock().await;
        self.replicas
            .commit(|record| record.name = name.to_owned())
            .await
    }

    async fn set(&self, settings: Settings) -> Result<(), VolumeError> {
        settings.check(self.context.state.borrow().record.replicas.len())?;
        let _one = self.replicas.turn.lock().await;
        self.replicas
            .commit(|record| record.settings = settings)
            .await?;
        self.context.publish();
        self.context.signals.verify.notify_one();
        Ok(())
    }

    /// Records cuts before it returns, because the caller that changed the device relies on that.
    async fn devices_changed(&self, device: &str) {
        self.failures.look_at_devices();
        self.failures.judge_cut().await;
        let slot = self.context.state.borrow().slot_of(device);
        if let Some(slot) = slot {
            self.context.state.borrow_mut().retries[slot] = Retry::default();
            self.context.signals.probe.notify_one();
        }
    }

    /// Flushes all data and writes labels that record it. The volume's queues are closed by now, or
    /// find it closed.
    async fn close(&self) -> Result<(), VolumeError> {
        self.hold.end();
        self.failures.judge_cut().await;
        let _one = self.replicas.turn.lock().await;
        self.context.state.borrow_mut().closed = true;
        self.context.publish();
        let deadline = self.context.core.now() + DRAIN;
        let under_way = || (0..MAX_REPLICAS).any(|slot| self.context.shared.outstanding(slot) > 0);
        // A fenced holder writes no label, so that nothing depends on the end of its I/O.
        let fenced = || self.context.state.borrow().fenced.is_some();
        while under_way() && !fenced() && self.context.core.now() < deadline {
            self.context.core.after(super::MOMENT).await;
        }
        let replicas: Vec<_> = {
            let state = self.context.state.borrow();
            state.in_sync().map(|(s, l)| (s, Rc::clone(l))).collect()
        };
        let reconciled = replicas
            .iter()
            .all(|(slot, _)| self.context.shared.missing[*slot].is_empty());
        let kept = replicas
            .iter()
            .all(|(_, l)| l.device.layer.losses() == l.losses);
        // If another holder has the volume by now, it also has the log: write nothing there.
        let mine = || {
            let state = self.context.state.borrow();
            state.fenced.is_none() && !state.store_lease_expired
        };
        let clean = !under_way() && reconciled && kept && self.media.flush_all(&replicas).await;
        if clean && mine() && replicas.len() == self.context.state.borrow().record.replicas.len() {
            self.log.clear_log(&replicas).await;
        }
        if self.context.state.borrow().fenced.is_none() {
            self.replicas.sign_off(clean).await?;
        }
        self.replicas.let_others_in_everywhere().await;
        self.context.refresh_status();
        self.context.emit(VolumeEventKind::Closed);
        Ok(())
    }
}

/// Refuses a second successor of one replica: both would stay.
fn must_be_first(record: &VolumeRecord, replaces: Option<Uuid>) -> Result<(), VolumeError> {
    let is_replaced = |one: &ReplicaRecord| one.replaces == replaces;
    if replaces.is_some() && record.replicas.iter().any(is_replaced) {
        return Err(VolumeError::Invalid {
            what: "replica",
            why: "it is being replaced already".into(),
        });
    }
    Ok(())
}
