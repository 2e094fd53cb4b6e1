//! Holds of writes: in some runs holders hold their writes back at random times, as for a snapshot
//! of each replica, and the simulator compares the replicas.
//!
//! ```text
//!   HoldWrites ── Ok ──▶ compare ──┬── later ──▶ compare, ReleaseWrites ── Ok ──▶ both were equal?
//!                                  └── nothing more: the limit ends the hold
//! ```
//!
//! The guarantee: if the release succeeds, then from the answer of the hold until the release the
//! replicas that the holder had in sync and attached returned the same data for every block of the
//! volume. It has these limits:
//!
//! - Without the success of the release nothing is certain: a replica may have lost its cache or
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
use nacre_random::Random;
use nacre_reactor::{Nanos, VirtualClock};

use crate::agenda::Event;
use crate::holder::Holder;
use crate::world::World;

/// Time before the first hold.
const CALM: Duration = Duration::from_millis(10);

/// Draws the times and the lengths of holds.
pub(crate) struct Holds {
    random: Random,
    pub next: Nanos,
}

/// A hold of one holder.
pub(crate) struct Hold {
    limit: Duration,
    /// The disks of the replicas that were in sync and attached when the writes were held.
    disks: Vec<usize>,
    /// Number of times that the disks were compared.
    compared: u64,
    /// The first difference found.
    difference: Option<String>,
}

/// The counters of holds in a run.
#[derive(Debug, Clone, Copy, Default)]
pub struct HoldCounts {
    /// Holds that holders were asked for.
    pub wanted: u64,
    /// Times that writes were held.
    pub held: u64,
    /// Holds whose release succeeded, after two comparisons of at least two replicas.
    pub compared: u64,
}

impl std::ops::Add for HoldCounts {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            wanted: self.wanted + other.wanted,
            held: self.held + other.held,
            compared: self.compared + other.compared,
        }
    }
}

impl Holds {
    /// Some runs have holds. Their choice leaves the other runs, among them those that find the
    /// planted faults of `tests/mutations.rs`, as they are without holds.
    pub(crate) fn new(seed: u64, clock: &VirtualClock) -> Option<Self> {
        matches!(seed % 11, 4 | 6).then(|| Self {
            random: Random::new(seed.rotate_left(24)),
            next: clock.now() + CALM,
        })
    }
}

impl World {
    /// A holder with the volume open begins a hold, if it has none. The hosts often have I/O in
    /// flight then.
    pub(crate) fn hold_writes(&mut self) {
        let now = self.clock.now();
        let Some(Holds { random, next }) = &mut self.faults.holds else {
            return;
        };
        let pause = *random.pick(&[20, 200, 1000]);
        *next = now + Duration::from_millis(random.within(1, pause));
        let most = *random.pick(&[1, 5, 20, 100, 300]);
        let limit = Duration::from_millis(random.within(1, most));
        let free = |holder: &&Holder| holder.handle.is_some() && holder.hold.is_none();
        let free: Vec<u64> = self.holders.iter().filter(free).map(|h| h.number).collect();
        if free.is_empty() {
            return;
        }
        let (number, is_busy) = (*random.pick(&free), random.one_in(2));
        if is_busy && !self.is_stopped(number) {
            self.offer_burst(number);
        }
        self.report.holds.wanted += 1;
        if let Some(holder) = self.holders.iter_mut().find(|h| h.number == number) {
            holder.hold = Some(Hold {
                limit,
                disks: Vec::new(),
                compared: 0,
                difference: None,
            });
            holder.command(Command::HoldWrites { limit });
        }
    }

    /// Compares the replicas of a hold, and ends it.
    pub(crate) fn release_writes(&mut self, number: u64) {
        let Some(index) = self.holders.iter().position(|h| h.number == number) else {
            return;
        };
        if self.holders[index].hold.is_some() {
            self.compare_held(index);
            self.holders[index].command(Command::ReleaseWrites);
        }
    }

    /// Handles the result of a command of a hold. The error: the release succeeded, and replicas
    /// differed.
    pub(crate) fn hold_answered(
        &mut self,
        index: usize,
        command: &str,
        outcome: &Result<(), VolumeError>,
    ) -> Result<(), String> {
        let holder = &mut self.holders[index];
        if command.starts_with("HoldWrites") {
            match outcome {
                Ok(()) => self.held(index),
                Err(_) => holder.hold = None,
            }
        } else if command == "ReleaseWrites"
            && let Some(hold) = holder.hold.take()
            && outcome.is_ok()
        {
            let is_compared = hold.compared == 2 && hold.disks.len() > 1;
            self.report.holds.compared += u64::from(is_compared);
            return hold.difference.map_or(Ok(()), Err);
        }
        Ok(())
    }

    fn held(&mut self, index: usize) {
        self.report.holds.held += 1;
        let holder = &self.holders[index];
        let number = holder.number;
        let status = holder.handle.as_ref().map(|handle| handle.status());
        let replicas = status.iter().flat_map(|status| &status.replicas);
        let is_used = |one: &&ReplicaStatus| one.state == ReplicaState::InSync && one.attached;
        let names = replicas.filter(is_used).map(|one| one.device.as_str());
        let disk = |name| self.disks.iter().position(|disk| disk.name == name);
        let disks: Vec<usize> = names.filter_map(disk).collect();
        // At the end of the run, the limit ends the hold.
        let random = self.faults.holds.as_mut().map(|holds| &mut holds.random);
        let (Some(random), true) = (random, self.lively) else {
            self.holders[index].hold = None;
            return;
        };
        let holder = &mut self.holders[index];
        let Some(hold) = holder.hold.as_mut().filter(|_| !random.one_in(4)) else {
            holder.hold = None;
            return;
        };
        hold.disks = disks;
        // Sometimes too late.
        let most = hold.limit.as_micros() as u64 * 5 / 4;
        let after = Duration::from_micros(random.below(most));
        self.compare_held(index);
        self.schedule(after, Event::Release(number));
    }

    /// Compares the replicas of a hold, while the record has this holder's epoch.
    fn compare_held(&mut self, index: usize) {
        let holder = &self.holders[index];
        let (Some(handle), Some(hold)) = (&holder.handle, &holder.hold) else {
            return;
        };
        let status = handle.status();
        if status.epoch != self.record.epoch {
            return;
        }
        let difference = self
            .first_difference(&hold.disks, status.blocks)
            .map(|found| {
                let [(one, its), (other, others)] = found.of;
                let [one, other] = [one, other].map(|disk| &self.disks[disk].name);
                format!(
                    "held, and replicas {one} and {other} differ in block {}: {its} and {others}; \
                 holder {}, comparison {}",
                    found.block,
                    holder.number,
                    hold.compared + 1,
                )
            });
        if let Some(hold) = &mut self.holders[index].hold {
            hold.compared += 1;
            hold.difference = hold.difference.take().or(difference);
        }
    }
}
