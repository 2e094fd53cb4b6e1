//! Thaws a frozen volume: one whose I/O waits, and then fails, because it has no usable in-sync
//! replica. An operator may choose a replica that missed writes; the volume then serves its data.

use std::sync::Arc;
use std::time::Duration;

use nacre_bdev::{Bdev, Layer};

use super::Control;
use super::attach::label_credit;
use super::reasons::describe;
use super::state::Retry;
use crate::handle::VolumeError;
use crate::model::{ReplicaRecord, ReplicaState, Stamp};

/// How long to retry a device that has another claim. This volume itself may hold the claim for a
/// moment, because it probes devices at intervals.
const CLAIM: Duration = Duration::from_secs(2);
/// How long the command waits until a chosen replica is attached. The volume may still attach the
/// replica later.
const ENTRY: Duration = Duration::from_secs(5);
const LOOK_AGAIN: Duration = Duration::from_millis(50);

impl Control {
    /// Ends `FailIo`. If no replica is in sync and `force` is the volume's name, serves from
    /// `replica`, or else from the best attached replica. Refuses `replica` if one is in sync.
    pub(super) async fn thaw(
        &self,
        replica: Option<String>,
        force: Option<String>,
    ) -> Result<(), VolumeError> {
        let named = replica
            .as_deref()
            .map(|m| self.context.find_slot(m))
            .transpose()?;
        if named.is_some() && self.serves() {
            return Err(invalid("the volume serves from replicas that are in sync"));
        }
        {
            let _one = self.replicas.turn.lock().await;
            self.context.shared.set_failing(false);
            if self.serves() {
                self.context.thawed();
            }
            self.context.publish();
            if self.serves() {
                return Ok(());
            }
        }
        let joined = |slot: usize| {
            let state = self.context.state.borrow();
            state.live[slot].as_ref().is_some_and(|l| l.joined.get())
        };
        match named {
            Some(slot) if !joined(slot) => self.thaw_absent(slot, force).await,
            _ => self.thaw_present(named, force).await,
        }
    }

    fn serves(&self) -> bool {
        self.context.state.borrow().in_sync().next().is_some()
    }

    /// Serves from an attached replica that missed writes.
    async fn thaw_present(
        &self,
        named: Option<usize>,
        force: Option<String>,
    ) -> Result<(), VolumeError> {
        let _one = self.replicas.turn.lock().await;
        // The replica that left last missed the fewest writes.
        let best = {
            let state = self.context.state.borrow();
            let there = state.present().into_iter().filter(|(slot, live)| {
                live.joined.get() && named.is_none_or(|named| named == *slot)
            });
            let left = |(slot, _): &(usize, _)| match state.record.replica(*slot).map(|m| m.state) {
                Some(ReplicaState::Out { last_label }) => Some(last_label),
                _ => None,
            };
            there
                .filter(|replica| left(replica).is_some())
                .max_by_key(left)
                .map(|(slot, _)| slot)
        };
        let Some(best) = best else {
            return Err(match named {
                Some(_) => invalid("it was never in sync: its data is incomplete"),
                None => VolumeError::NothingInSync {
                    name: self.context.name(),
                    why: self.why_none(),
                },
            });
        };
        self.must_be_meant(force.as_deref())?;
        self.choose(best, None).await?;
        if let Some(live) = &self.context.state.borrow().live[best] {
            *live.resync.borrow_mut() = None;
        }
        self.context.thawed();
        self.context.publish();
        Ok(())
    }

    /// The reason why no replica can be chosen.
    fn why_none(&self) -> String {
        let state = self.context.state.borrow();
        match state.record.replicas.iter().find(|m| m.cut) {
            Some(replica) => format!(
                "\"{}\" may have lost data: name it (`--replica {}`) to continue with its data",
                replica.device, replica.device
            ),
            None => "no replica that ever was in sync can be reached".into(),
        }
    }

    /// Serves from a replica that is not attached: its label is older than the served data, or it
    /// is offline, or the next probe is not due yet. From here on the store's record accepts the
    /// age of its label. The attach later writes the new label.
    async fn thaw_absent(&self, slot: usize, force: Option<String>) -> Result<(), VolumeError> {
        let replica = self.context.state.borrow().record.replica(slot).cloned();
        let Some(replica) = replica else {
            return Err(changed());
        };
        if matches!(replica.state, ReplicaState::Filling { .. }) {
            return Err(invalid("it was never in sync: its data is incomplete"));
        }
        self.must_be_meant(force.as_deref())?;
        let (epoch, layer) = self.epoch_of(&replica).await?;
        {
            let _one = self.replicas.turn.lock().await;
            let same = self.context.state.borrow().record.replica(slot) == Some(&replica);
            if !same || self.context.state.borrow().live[slot].is_some() || self.serves() {
                return Err(changed());
            }
            self.choose(slot, Some(epoch)).await?;
            // The operator gives up the data that the replica lost.
            layer.forget_least();
            drop(layer);
            self.context.publish();
        }
        self.context.signals.probe.notify_one();
        let late = self.context.core.now() + ENTRY;
        while !self.serves() && self.context.core.now() < late {
            self.context.core.after(LOOK_AGAIN).await;
        }
        Ok(())
    }

    /// Reads the label of a replica that is not attached. Returns the label's epoch and the
    /// device.
    async fn epoch_of(&self, replica: &ReplicaRecord) -> Result<(u64, Arc<Layer>), VolumeError> {
        let record = self.context.state.borrow().record.clone();
        let late = self.context.core.now() + CLAIM;
        let (device, disk) = loop {
            match self.media.claim(&record, &replica.device).await {
                Err(VolumeError::Device(_)) if self.context.core.now() < late => {
                    self.context.core.after(LOOK_AGAIN).await;
                }
                claimed => break claimed?,
            }
        };
        let read = self.media.read_label(&disk).await;
        self.media.disks.forget(&disk);
        let layer = Arc::clone(&device.layer);
        drop((device, disk));
        let read = read.map_err(|why| VolumeError::Io {
            device: replica.device.clone(),
            what: describe(why),
        })?;
        // A label that a later holder wrote is refused.
        label_credit(&record, replica, &read)?;
        let (label, _) = read.map_err(|error| invalid(&error.to_string()))?;
        if (label.volume, label.replica) != (record.id, replica.id) {
            return Err(invalid("its label is another replica's"));
        }
        Ok((label.stamp.epoch, layer))
    }

    fn must_be_meant(&self, force: Option<&str>) -> Result<(), VolumeError> {
        let name = self.context.name();
        if force == Some(name.as_str()) {
            Ok(())
        } else {
            Err(VolumeError::LastCopy {
                name,
                hint: ": writes that the replica missed would be lost; type the volume's name to \
                confirm",
            })
        }
    }

    /// Records one replica as in sync, by the operator's decision, and gives up the data of all
    /// others. Every other replica gets a full resync from the chosen one, even if its data is
    /// newer. That includes attached replicas with an unfinished resync, which may have more data
    /// than the chosen one. `label` is the epoch of the chosen replica's label; the record
    /// accepts it from now on.
    async fn choose(&self, chosen: usize, label: Option<u64>) -> Result<(), VolumeError> {
        let others: Vec<usize> = {
            let present = self.context.state.borrow().present().into_iter();
            let slots = present.map(|(slot, _)| slot);
            slots.filter(|slot| *slot != chosen).collect()
        };
        for slot in others {
            self.replicas.detach(slot);
            self.context.state.borrow_mut().retries[slot] = Retry::default();
        }
        self.replicas
            .commit(|record| {
                record.serving = record.serving.min(label.unwrap_or(record.serving));
                for replica in &mut record.replicas {
                    replica.cut = false;
                    if usize::from(replica.slot) == chosen {
                        replica.state = ReplicaState::InSync;
                        replica.offline = false;
                        replica.why = None;
                    } else {
                        replica.state = ReplicaState::Filling {
                            watermark: 0,
                            last_label: Stamp::default(),
                        };
                        replica.why = Some("the volume was thawed without it".into());
                    }
                }
            })
            .await?;
        self.context.shared.missing[chosen].assign(|_| false);
        self.context.state.borrow_mut().retries[chosen] = Retry::default();
        Ok(())
    }
}

fn invalid(why: &str) -> VolumeError {
    VolumeError::Invalid {
        what: "replica",
        why: why.into(),
    }
}

fn changed() -> VolumeError {
    VolumeError::Running {
        what: "another change of the replica",
    }
}
