//! The end of a run: no more failures, every replica becomes in sync, and all data is compared.

use std::time::Duration;

use nacre_bdev::{Flags, Op};
use nacre_bdev_replica::handle::{Command, VolumeState};
use nacre_reactor::Nanos;
use uuid::Uuid;

use crate::holder::Holder;
use crate::load::Wish;
use crate::trouble::Event;
use crate::world::World;

/// Virtual time in which a volume without troubles must have healed.
const PATIENCE: Duration = Duration::from_secs(600);
/// Bytes of the last reads.
const STEP: usize = 256 << 10;

impl World {
    pub(crate) fn end(&mut self) -> Result<(), String> {
        self.heal();
        // Earlier failures may still have consequences.
        let end = self.clock.now() + PATIENCE;
        loop {
            self.wait_for_health()?;
            self.touch()?;
            self.drain()?;
            self.rest()?;
            if matches!(self.status(), Some((_, VolumeState::Healthy))) {
                break;
            }
            if self.clock.now() > end {
                return Err(format!("it does not stay healthy: {}", self.replicas()));
            }
        }
        self.checker.calm = true;
        self.replacements_are_over()?;
        let index = self.serving()?;
        self.holders[index].add_lane();
        let lane = self.holders[index].lanes.len() - 1;
        let blocks = self.holders[index].blocks();
        let step = (STEP / self.format.block) as u64;
        for lba in (0..blocks).step_by(step as usize) {
            let wish = Wish {
                op: Op::Read,
                flags: Flags::empty(),
                lba,
                blocks: step.min(blocks - lba),
            };
            self.must(index, lane, wish)?;
        }
        let flush = Wish {
            op: Op::Flush,
            flags: Flags::empty(),
            lba: 0,
            blocks: 0,
        };
        self.must(index, lane, flush)?;
        self.compare()?;
        self.verify(index, 0)?;
        let disks = self.in_sync();
        if let [_, .., last] = disks[..] {
            // Verification finds differences made behind its back, and nothing else.
            let block = self.random.below(self.record.blocks);
            let cell = self.format.cells(self.format.reserved() + block).start;
            self.disks[last].lock().media.write(cell, u64::MAX, true);
            self.verify(index, 1)?;
            self.compare()?;
        }
        self.close(index)
    }

    /// No failures from here on.
    fn heal(&mut self) {
        self.lively = false;
        self.tell(|| "all is healed".to_owned());
        self.agenda.retain(|_, event| {
            matches!(
                event,
                Event::Start(_) | Event::TryAgain(_) | Event::Over(..) | Event::Enlarge(_)
            )
        });
        self.plenty();
        self.disks.iter().for_each(|disk| disk.heal());
        self.mood.lock().heal();
        // Of several holders the last is the one that may serve.
        while self.holders.len() > 1 {
            let number = self.holders[0].number;
            self.stop_holder(number);
        }
    }

    fn wait_for_health(&mut self) -> Result<(), String> {
        let end = self.clock.now() + PATIENCE;
        let mut asked = Nanos::ZERO;
        loop {
            self.round()?;
            let state = self.status();
            if let Some((_, VolumeState::Healthy)) = state {
                return Ok(());
            }
            let now = self.clock.now();
            if now > end {
                let last = self.holders.first().map(|h| h.number);
                return Err(format!(
                    "not healed after {PATIENCE:?}: holder {last:?} {state:?}; {}",
                    self.replicas()
                ));
            }
            if now.since(asked) < Duration::from_secs(1) {
                continue;
            }
            asked = now;
            match state {
                Some((index, VolumeState::Fenced | VolumeState::Closed)) => {
                    let number = self.holders[index].number;
                    self.stop_holder(number);
                    self.start_holder(Uuid::from_u128(0xaf));
                }
                Some((index, VolumeState::Failing)) => {
                    self.holders[index].command(Command::Thaw {
                        replica: None,
                        force: None,
                    });
                }
                Some((index, _)) => self.encourage(index),
                None if self.holders.is_empty() && self.agenda.is_empty() => {
                    self.start_holder(Uuid::from_u128(0xaf));
                }
                None => {}
            }
        }
    }

    /// Returns everything that the operator took away.
    fn encourage(&mut self, index: usize) {
        let offline: Vec<String> = self
            .record
            .replicas
            .iter()
            .filter(|replica| replica.offline)
            .map(|replica| replica.device.clone())
            .collect();
        for replica in offline {
            self.holders[index].command(Command::Online { replica });
        }
        if let Some(replica) = self.cut_replica() {
            let force = Some(self.record.name.clone());
            self.holders[index].command(Command::Thaw {
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
        } = self;
        let holder = &mut holders[index];
        if holder.lanes.is_empty() {
            holder.add_lane();
        }
        let wish = Wish {
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
        let found = self.status();
        found
            .map(|(index, _)| index)
            .ok_or_else(|| "no holder serves".to_owned())
    }

    /// Until no I/O is in flight.
    fn drain(&mut self) -> Result<(), String> {
        let end = self.clock.now() + PATIENCE;
        let under_way =
            |holder: &Holder| holder.lanes.iter().map(|l| l.ongoing.len()).sum::<usize>();
        while self.holders.iter().map(under_way).sum::<usize>() > 0 {
            self.round()?;
            if self.clock.now() > end {
                let lanes = self.holders.iter().flat_map(|h| &h.lanes);
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
        let end = self.clock.now() + Duration::from_secs(2);
        while self.clock.now() < end {
            self.round()?;
        }
        Ok(())
    }

    /// Executes one I/O, which has no reason to fail.
    fn must(&mut self, index: usize, lane: usize, wish: Wish) -> Result<(), String> {
        let (reads, flushes) = (self.checker.reads, self.checker.flushes);
        let World {
            holders,
            numbers,
            checker,
            ..
        } = self;
        let Holder { lanes, pool, .. } = &mut holders[index];
        if !lanes[lane].submit(wish, pool, numbers, checker) {
            return Err(format!("{wish:?} is not taken by an idle volume"));
        }
        self.drain()?;
        if self.checker.reads + self.checker.flushes == reads + flushes {
            return Err(format!("{wish:?} failed on a healthy volume"));
        }
        Ok(())
    }

    /// Has the volume compare its replicas, and repair the given number of different blocks.
    fn verify(&mut self, index: usize, expected: u64) -> Result<(), String> {
        self.holders[index].command(Command::Verify { repair: true });
        let end = self.clock.now() + PATIENCE;
        let verified = loop {
            self.round()?;
            let handle = self.holders[index].handle.as_ref();
            let status = handle.and_then(|handle| handle.status().verify);
            let idle = self.holders[index].commands.is_empty();
            match status {
                Some(verify) if idle && !verify.running => break verify,
                _ if self.clock.now() > end => return Err("it is never verified".to_owned()),
                _ => {}
            }
        };
        let bytes = self.record.blocks * self.format.block as u64;
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
        let replicas = &self.record.replicas;
        let replaced = |id: Uuid| replicas.iter().any(|m| m.id == id);
        match replicas.iter().find(|m| m.replaces.is_some_and(replaced)) {
            None => Ok(()),
            Some(new) => Err(format!(
                "what {} replaces is still there: {}",
                new.device,
                self.replicas()
            )),
        }
    }

    /// Replicas in sync hold the same data.
    fn compare(&mut self) -> Result<(), String> {
        let disks = self.in_sync();
        if disks.len() != self.record.replicas.len() {
            return Err(format!("healthy, but {}", self.replicas()));
        }
        let (first, others) = disks.split_first().ok_or("no replica is in sync")?;
        let first_disk = self.disks[*first].lock();
        for other in others {
            let other_disk = self.disks[*other].lock();
            let pairs = first_disk
                .media
                .volume()
                .iter()
                .zip(other_disk.media.volume());
            let blocks = self.record.blocks as usize;
            let differs = pairs.take(blocks).position(|(a, b)| a != b);
            if let Some(block) = differs {
                return Err(format!(
                    "block {block} differs: {} on disk{first}, {} on disk{other}",
                    first_disk.media.volume()[block],
                    other_disk.media.volume()[block],
                ));
            }
        }
        Ok(())
    }

    fn close(&mut self, index: usize) -> Result<(), String> {
        let holder = &mut self.holders[index];
        holder.lanes.clear();
        holder.command(Command::Close);
        let end = self.clock.now() + PATIENCE;
        loop {
            self.holders[index].core.turn();
            let answered = self.holders[index].answered();
            if let Some((_, outcome)) = answered.into_iter().find(|(name, _)| name == "Close") {
                return outcome.map_err(|error| format!("it does not close: {error}"));
            }
            self.round_without_commands();
            if self.clock.now() > end {
                return Err(format!("not closed after {PATIENCE:?}"));
            }
        }
    }
}
