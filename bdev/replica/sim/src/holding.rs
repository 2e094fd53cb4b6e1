//! Holds of writes. In some runs holders hold their writes back at random times, as for a snapshot
//! of each replica. The simulator compares the replicas meanwhile.
//!
//! ```text
//!   HoldWrites ── Ok ──▶ compare ──┬── later ──▶ compare, ReleaseWrites ── Ok ──▶ both were equal?
//!                                  └── nothing more: the limit ends the hold
//! ```
//!
//! The guarantee, if the release succeeds: reads of any block return the same data from all
//! replicas that the holder had in sync. That is so from the answer of the hold until the release.
//! It has these limits:
//!
//! - Without the success of the release nothing is certain. A replica may have lost its cache or
//!   its end, or left, and writes go on after the limit. So a difference is an error of the run
//!   only once the release has succeeded.
//! - It applies while the volume's record names this holder's epoch. A later holder raises the
//!   epoch before it writes, and this holder learns of it with a delay. So a snapshot needs a look
//!   at the record too, and the simulator does not compare once the epoch is a later one. Writes
//!   of *former* holders are no exception: a holder has shut them out of each replica that it has
//!   attached.
//! - It says what reads return, not what survives a loss of power: volatile caches may have the
//!   data. The reserved area with label and log differs between replicas.

use std::time::Duration;

use nacre_bdev_replica::handle::{Command, ReplicaStatus, VolumeError};
use nacre_bdev_replica::model::ReplicaState;
use uuid::Uuid;

use crate::agenda::Event;
use crate::disk::first_difference;
use crate::holder::Holder;
use crate::holds::{Hold, Holds};
use crate::world::World;

impl World {
    /// A holder with the volume open begins a hold, if it has none.
    pub(crate) fn hold_writes(&mut self) {
        Holding { world: self }.begin();
    }

    /// Compares the replicas of a hold, and ends it.
    pub(crate) fn release_writes(&mut self, number: u64) {
        Holding { world: self }.release(number);
    }

    /// Handles the result of a command of a hold. The error: the release succeeded, and replicas
    /// differed.
    pub(crate) fn hold_answered(
        &mut self,
        index: usize,
        command: &str,
        outcome: &Result<(), VolumeError>,
    ) -> Result<(), String> {
        Holding { world: self }.answered(index, command, outcome)
    }
}

/// Acts on the holders of a run with holds.
struct Holding<'a> {
    world: &'a mut World,
}

impl Holding<'_> {
    /// A holder with the volume open begins a hold, if it has none. The hosts often have I/O in
    /// flight then.
    fn begin(&mut self) {
        let now = self.world.clock.now();
        let Some(Holds { random, next }) = &mut self.world.faults.holds else {
            return;
        };
        let pause = *random.pick(&[20, 200, 1000]);
        *next = now + Duration::from_millis(random.within(1, pause));
        let most = *random.pick(&[1, 5, 20, 100, 300]);
        let limit = Duration::from_millis(random.within(1, most));
        let free = |holder: &&Holder| holder.handle.is_some() && holder.hold.is_none();
        let free: Vec<u64> = self
            .world
            .holders
            .iter()
            .filter(free)
            .map(|h| h.number)
            .collect();
        if free.is_empty() {
            return;
        }
        let (number, is_busy) = (*random.pick(&free), random.one_in(2));
        if is_busy && !self.world.is_stopped(number) {
            self.world.offer_burst(number);
        }
        self.world.report.holds.wanted += 1;
        if let Some(holder) = self.world.holders.iter_mut().find(|h| h.number == number) {
            let id = Uuid::from_u128(self.world.report.holds.wanted.into());
            holder.hold = Some(Hold {
                id,
                limit,
                disks: Vec::new(),
                compared: 0,
                difference: None,
            });
            holder.command(Command::HoldWrites { id, limit });
        }
    }

    /// Compares the replicas of a hold, and ends it.
    fn release(&mut self, number: u64) {
        let Some(index) = self.world.holders.iter().position(|h| h.number == number) else {
            return;
        };
        if let Some(id) = self.world.holders[index].hold.as_ref().map(|hold| hold.id) {
            self.compare_held(index);
            self.world.holders[index].command(Command::ReleaseWrites { id });
        }
    }

    /// Handles the result of a command of a hold. The error: the release succeeded, and replicas
    /// differed.
    fn answered(
        &mut self,
        index: usize,
        command: &str,
        outcome: &Result<(), VolumeError>,
    ) -> Result<(), String> {
        let holder = &mut self.world.holders[index];
        if command.starts_with("HoldWrites") {
            match outcome {
                Ok(()) => self.held(index),
                Err(_) => holder.hold = None,
            }
        } else if command.starts_with("ReleaseWrites")
            && let Some(hold) = holder.hold.take()
            && outcome.is_ok()
        {
            let is_compared = hold.compared == 2 && hold.disks.len() > 1;
            self.world.report.holds.compared += u64::from(is_compared);
            return hold.difference.map_or(Ok(()), Err);
        }
        Ok(())
    }

    fn held(&mut self, index: usize) {
        self.world.report.holds.held += 1;
        let holder = &self.world.holders[index];
        let number = holder.number;
        let status = holder.handle.as_ref().map(|handle| handle.status());
        let replicas = status.iter().flat_map(|status| &status.replicas);
        let is_used = |one: &&ReplicaStatus| one.state == ReplicaState::InSync && one.attached;
        let names = replicas.filter(is_used).map(|one| one.device.as_str());
        let disk = |name| self.world.disks.iter().position(|disk| disk.name == name);
        let disks: Vec<usize> = names.filter_map(disk).collect();
        // At the end of the run, the limit ends the hold.
        let random = self
            .world
            .faults
            .holds
            .as_mut()
            .map(|holds| &mut holds.random);
        let (Some(random), true) = (random, self.world.lively) else {
            self.world.holders[index].hold = None;
            return;
        };
        let holder = &mut self.world.holders[index];
        let Some(hold) = holder.hold.as_mut().filter(|_| !random.one_in(4)) else {
            holder.hold = None;
            return;
        };
        hold.disks = disks;
        // Sometimes too late.
        let most = hold.limit.as_micros() as u64 * 5 / 4;
        let after = Duration::from_micros(random.below(most));
        self.compare_held(index);
        self.world.schedule(after, Event::Release(number));
    }

    /// Compares the replicas of a hold, while the record has this holder's epoch.
    fn compare_held(&mut self, index: usize) {
        let holder = &self.world.holders[index];
        let (Some(handle), Some(hold)) = (&holder.handle, &holder.hold) else {
            return;
        };
        let status = handle.status();
        if status.epoch != self.world.record.epoch {
            return;
        }
        let difference =
            first_difference(&self.world.disks, &hold.disks, status.blocks).map(|found| {
                let [(one, its), (other, others)] = found.of;
                let [one, other] = [one, other].map(|disk| &self.world.disks[disk].name);
                format!(
                    "held, and replicas {one} and {other} differ in block {}: {its} and {others}; \
                 holder {}, comparison {}",
                    found.block,
                    holder.number,
                    hold.compared + 1,
                )
            });
        if let Some(hold) = &mut self.world.holders[index].hold {
            hold.compared += 1;
            hold.difference = hold.difference.take().or(difference);
        }
    }
}
