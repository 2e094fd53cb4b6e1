//! The end of a simulation run: no further faults are injected, every replica must become in sync,
//! and all data is compared.

use std::time::Duration;

use nacre_bdev::{Flags, Op};
use nacre_bdev_replica::handle::{Command, VolumeState};
use nacre_reactor::Nanos;
use uuid::Uuid;

use crate::agenda::Event;
use crate::disk::first_difference;
use crate::holder::Holder;
use crate::load::NewRequest;
use crate::world::World;

/// Virtual time in which a volume without troubles must have healed.
const PATIENCE: Duration = Duration::from_secs(600);
/// Bytes of the last reads.
const STEP: usize = 256 << 10;

/// The last phase of a run.
pub(crate) struct Ending<'a> {
    world: &'a mut World,
}

impl Ending<'_> {
    pub(crate) fn new(world: &mut World) -> Ending<'_> {
        Ending { world }
    }

    pub(crate) fn run(mut self) -> Result<(), String> {
        self.heal();
        // Earlier failures may still have consequences.
        let end = self.world.clock.now() + PATIENCE;
        loop {
            self.wait_for_health()?;
            self.touch()?;
            self.drain()?;
            self.rest()?;
            if matches!(self.world.status(), Some((_, VolumeState::Healthy))) {
                break;
            }
            if self.world.clock.now() > end {
                return Err(format!(
                    "it does not stay healthy: {}",
                    self.world.replicas()
                ));
            }
        }
        self.world.checker.calm = true;
        self.replacements_are_over()?;
        let index = self.serving()?;
        self.world.holders[index].add_lane();
        let lane = self.world.holders[index].lanes.len() - 1;
        let blocks = self.world.holders[index].blocks();
        let step = (STEP / self.world.format.block) as u64;
        for lba in (0..blocks).step_by(step as usize) {
            let wish = NewRequest {
                op: Op::Read,
                flags: Flags::empty(),
                lba,
                blocks: step.min(blocks - lba),
            };
            self.must(index, lane, wish)?;
        }
        let flush = NewRequest {
            op: Op::Flush,
            flags: Flags::empty(),
            lba: 0,
            blocks: 0,
        };
        self.must(index, lane, flush)?;
        self.compare()?;
        self.verify(index, 0)?;
        let disks = self.world.in_sync();
        if let [_, .., last] = disks[..] {
            // Verification finds differences made behind its back, and nothing else.
            let block = self.world.random.below(self.world.record.blocks);
            let cell = self
                .world
                .format
                .cells(self.world.format.reserved() + block)
                .start;
            self.world.disks[last]
                .inner
                .lock()
                .media
                .write(cell, u64::MAX, true);
            self.verify(index, 1)?;
            self.compare()?;
        }
        self.close(index)
    }

    /// No failures from here on.
    fn heal(&mut self) {
        self.world.lively = false;
        self.world.log_line(|| "all is healed".to_owned());
        self.world.agenda.retain(|event| {
            matches!(
                event,
                Event::Start(_) | Event::TryAgain(_) | Event::Over(..) | Event::Enlarge(_)
            )
        });
        self.world.plenty();
        self.world.disks.iter().for_each(|disk| disk.heal());
        self.world.store_faults.lock().heal();
        if let Some(leases) = &mut self.world.leases {
            leases.heal();
        }
        // Of several holders the last is the one that may serve.
        let others = |world: &World| {
            let first = world.holders.first().map(|holder| holder.number);
            first.filter(|first| world.holders.len() > 1 || world.is_former(*first))
        };
        while let Some(number) = others(self.world) {
            self.world.stop_holder(number);
        }
    }

    fn wait_for_health(&mut self) -> Result<(), String> {
        let end = self.world.clock.now() + PATIENCE;
        let mut last_attempt = Nanos::ZERO;
        loop {
            self.world.round()?;
            let state = self.world.status();
            if let Some((_, VolumeState::Healthy)) = state {
                return Ok(());
            }
            let now = self.world.clock.now();
            if now > end {
                let last = self.world.holders.first().map(|h| h.number);
                return Err(format!(
                    "not healed after {PATIENCE:?}: holder {last:?} {state:?}; {}",
                    self.world.replicas()
                ));
            }
            if now.since(last_attempt) < Duration::from_secs(1) {
                continue;
            }
            last_attempt = now;
            match state {
                Some((index, VolumeState::Fenced | VolumeState::Closed)) => {
                    let number = self.world.holders[index].number;
                    self.world.stop_holder(number);
                    self.world.start_last_holder();
                }
                Some((index, VolumeState::Failing)) => {
                    self.world.holders[index].command(Command::Thaw {
                        replica: None,
                        force: None,
                    });
                }
                Some((index, _)) => self.encourage(index),
                None if self.world.holders.is_empty() && self.world.agenda.is_empty() => {
                    self.world.start_last_holder();
                }
                None => {}
            }
        }
    }

    /// Returns everything that the operator took away.
    fn encourage(&mut self, index: usize) {
        let offline: Vec<String> = self
            .world
            .record
            .replicas
            .iter()
            .filter(|replica| replica.offline)
            .map(|replica| replica.device.clone())
            .collect();
        for replica in offline {
            self.world.holders[index].command(Command::Online { replica });
        }
        if let Some(replica) = self.world.cut_replica() {
            let force = Some(self.world.record.name.clone());
            self.world.holders[index].command(Command::Thaw {
                replica: Some(replica),
                force,
            });
        }
    }

    /// A write reaches every in-sync replica, and so finds one that a former holder took away and
    /// that was not used since.
    fn touch(&mut self) -> Result<(), String> {
        let index = self.serving()?;
        let World {
            holders,
            numbers,
            checker,
            ..
        } = &mut *self.world;
        let holder = &mut holders[index];
        if holder.lanes.is_empty() {
            holder.add_lane();
        }
        let wish = NewRequest {
            op: Op::Write,
            flags: Flags::empty(),
            lba: 0,
            blocks: 1,
        };
        let Holder { lanes, pool, .. } = holder;
        // No room for it: then other requests do the same.
        lanes[0].submit(wish, pool, numbers, checker);
        Ok(())
    }

    fn serving(&self) -> Result<usize, String> {
        let found = self.world.status();
        found
            .map(|(index, _)| index)
            .ok_or_else(|| "no holder serves".to_owned())
    }

    /// Runs the simulation until no I/O is in flight, for at most `PATIENCE`.
    fn drain(&mut self) -> Result<(), String> {
        let end = self.world.clock.now() + PATIENCE;
        let under_way =
            |holder: &Holder| holder.lanes.iter().map(|l| l.ongoing.len()).sum::<usize>();
        while self.world.holders.iter().map(under_way).sum::<usize>() > 0 {
            self.world.round()?;
            if self.world.clock.now() > end {
                let lanes = self.world.holders.iter().flat_map(|h| &h.lanes);
                let left: Vec<String> = lanes.map(|lane| format!("{:?}", lane.ongoing)).collect();
                return Err(format!(
                    "not answered after {PATIENCE:?}: {}",
                    left.join(", ")
                ));
            }
        }
        Ok(())
    }

    fn rest(&mut self) -> Result<(), String> {
        let end = self.world.clock.now() + Duration::from_secs(2);
        while self.world.clock.now() < end {
            self.world.round()?;
        }
        Ok(())
    }

    /// Executes one I/O, which has no reason to fail.
    fn must(&mut self, index: usize, lane: usize, wish: NewRequest) -> Result<(), String> {
        let (reads, flushes) = (self.world.checker.reads, self.world.checker.flushes);
        let World {
            holders,
            numbers,
            checker,
            ..
        } = &mut *self.world;
        let Holder { lanes, pool, .. } = &mut holders[index];
        if !lanes[lane].submit(wish, pool, numbers, checker) {
            return Err(format!("{wish:?} is not taken by an idle volume"));
        }
        self.drain()?;
        if self.world.checker.reads + self.world.checker.flushes == reads + flushes {
            return Err(format!("{wish:?} failed on a healthy volume"));
        }
        Ok(())
    }

    /// Has the volume compare its replicas, and repair the given number of different blocks.
    fn verify(&mut self, index: usize, expected: u64) -> Result<(), String> {
        self.world.holders[index].command(Command::Verify { repair: true });
        let end = self.world.clock.now() + PATIENCE;
        let verified = loop {
            self.world.round()?;
            let handle = self.world.holders[index].handle.as_ref();
            let status = handle.and_then(|handle| handle.status().verify);
            let idle = self.world.holders[index].commands.is_empty();
            match status {
                Some(verify) if idle && !verify.running => break verify,
                _ if self.world.clock.now() > end => return Err("it is never verified".to_owned()),
                _ => {}
            }
        };
        let bytes = self.world.record.blocks * self.world.format.block as u64;
        let found = (verified.compared_bytes, verified.different_blocks);
        if found != (bytes, expected) || verified.repaired_blocks != expected {
            return Err(format!(
                "{expected} blocks differ, and verification says {verified:?}"
            ));
        }
        Ok(())
    }

    /// When all are in sync, no replica with a replacement may remain.
    fn replacements_are_over(&self) -> Result<(), String> {
        let replicas = &self.world.record.replicas;
        let replaced = |id: Uuid| replicas.iter().any(|m| m.id == id);
        match replicas.iter().find(|m| m.replaces.is_some_and(replaced)) {
            None => Ok(()),
            Some(new) => Err(format!(
                "what {} replaces is still there: {}",
                new.device,
                self.world.replicas()
            )),
        }
    }

    /// Replicas in sync hold the same data.
    fn compare(&mut self) -> Result<(), String> {
        let disks = self.world.in_sync();
        if disks.len() != self.world.record.replicas.len() {
            return Err(format!("healthy, but {}", self.world.replicas()));
        }
        if disks.is_empty() {
            return Err("no replica is in sync".to_owned());
        }
        if let Some(found) = first_difference(&self.world.disks, &disks, self.world.record.blocks) {
            let [(first, its), (other, others)] = found.of;
            return Err(format!(
                "block {} differs: {its} on disk{first}, {others} on disk{other}",
                found.block
            ));
        }
        Ok(())
    }

    fn close(&mut self, index: usize) -> Result<(), String> {
        let holder = &mut self.world.holders[index];
        holder.lanes.clear();
        holder.command(Command::Close);
        let end = self.world.clock.now() + PATIENCE;
        loop {
            self.world.holders[index].core.turn();
            let answered = self.world.holders[index].answered();
            if let Some((_, outcome)) = answered.into_iter().find(|(name, _)| name == "Close") {
                return outcome.map_err(|error| format!("it does not close: {error}"));
            }
            self.world.round_without_commands();
            if self.world.clock.now() > end {
                return Err(format!("not closed after {PATIENCE:?}"));
            }
        }
    }
}
