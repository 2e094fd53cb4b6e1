//! The load of a simulation run: submits the I/O of simulated hosts to holders of the volume, in
//! bursts with pauses. Some I/O is aborted, and some hosts disconnect with I/O in flight.

use std::time::Duration;

use nacre_bdev::{Flags, Op, Queue};
use nacre_bdev_replica::handle::VolumeState;
use nacre_reactor::Nanos;

use crate::agenda::Event;
use crate::device::LINGER;
use crate::holder::Holder;
use crate::world::World;

struct Offers<'a> {
    world: &'a mut World,
}

impl World {
    /// Submits the next I/O to a random holder, or begins a pause. Returns false if no holder
    /// accepts it.
    pub(crate) fn offer_io(&mut self, now: Nanos) -> bool {
        Offers { world: self }.next(now)
    }

    /// Submits up to six I/Os to the holder with this number, as many as it accepts.
    pub(crate) fn offer_burst(&mut self, number: u64) {
        Offers { world: self }.burst(number);
    }
}

impl Offers<'_> {
    fn next(&mut self, now: Nanos) -> bool {
        if self.world.hosts.burst == 0 {
            self.world.hosts.burst = self.world.random.within(1, 24);
            let pause = match self.world.random.below(4) {
                0 => self.world.random.within(1_000, 600_000),
                _ => self.world.random.within(20, 4000),
            };
            self.world.hosts.next_io = now + Duration::from_micros(pause * self.world.hosts.pace);
            return true;
        }
        self.world.hosts.burst -= 1;
        let candidates = self.candidates();
        if candidates.is_empty() {
            self.world.hosts.next_io = now + Duration::from_millis(5);
            return false;
        }
        let index = *self.world.random.pick(&candidates);
        self.offer_to(index, now)
    }

    fn burst(&mut self, number: u64) {
        let Some(index) = self.world.holders.iter().position(|h| h.number == number) else {
            return;
        };
        let now = self.world.clock.now();
        let ios = self.world.random.within(0, 6);
        for _ in 0..ios {
            if self.world.holders[index].lanes.is_empty() || !self.offer_to(index, now) {
                return;
            }
        }
    }

    fn offer_to(&mut self, index: usize, now: Nanos) -> bool {
        let lane = self
            .world
            .random
            .index(self.world.holders[index].lanes.len());
        let blocks = self.world.holders[index].blocks();
        let mut wish = self.world.hosts.hot.wish(&mut self.world.random, blocks);
        if self.world.only_reads(self.world.holders[index].number) && wish.op.is_write() {
            (wish.op, wish.flags) = (Op::Read, Flags::empty());
        }
        let World {
            holders,
            numbers,
            checker,
            ..
        } = &mut *self.world;
        let Holder { lanes, pool, .. } = &mut holders[index];
        if lanes[lane].is_full() || !lanes[lane].submit(wish, pool, numbers, checker) {
            self.world.hosts.next_io = now + Duration::from_millis(5);
            return false;
        }
        let number = self.world.numbers.ios;
        if self.world.options.trace {
            let holder = self.world.holders[index].number;
            println!(
                "{:>12} {number} holder {holder} lane {lane}: {wish:?}",
                now.0
            );
        }
        self.give_up(index, lane);
        self.leave(index);
        true
    }

    /// The indexes of the holders that hosts use: not stopped, and, in runs with leases, not fenced
    /// if there is one that is not.
    fn candidates(&self) -> Vec<usize> {
        let all = self.world.holders.iter().enumerate();
        let usable = all.filter(|(_, holder)| {
            !holder.lanes.is_empty() && !self.world.is_stopped(holder.number)
        });
        let serves = |holder: &Holder| {
            let handle = holder.handle.as_ref();
            handle.is_some_and(|handle| handle.status().state != VolumeState::Fenced)
        };
        let (serving, others): (Vec<_>, Vec<_>) = usable.partition(|(_, holder)| serves(holder));
        let chosen = match self.world.leases {
            Some(_) if !serving.is_empty() => serving,
            _ => serving.into_iter().chain(others).collect(),
        };
        let mut indexes: Vec<usize> = chosen.into_iter().map(|(index, _)| index).collect();
        indexes.sort_unstable();
        indexes
    }

    /// Sometimes a host disconnects with all its I/O in flight: its queue is closed, and another
    /// one opened.
    fn leave(&mut self, holder: usize) {
        let Some(random) = self
            .world
            .hosts
            .leaves
            .as_mut()
            .filter(|_| self.world.hoard.is_empty())
        else {
            return;
        };
        if !random.one_in(30) {
            return;
        }
        let lanes = &mut self.world.holders[holder].lanes;
        let lane = lanes.swap_remove(random.index(lanes.len()));
        self.world.report.left += 1;
        for (number, ongoing) in &lane.ongoing {
            if ongoing.op.is_write() {
                let over = Event::Over(*number, ongoing.lba, ongoing.blocks);
                self.world.schedule(LINGER * 2, over);
            }
        }
        drop(lane);
        self.world.holders[holder].add_lane();
        let number = self.world.holders[holder].number;
        self.world
            .log_line(|| format!("a host of holder {number} goes, and another one comes"));
    }

    /// Sometimes a host aborts one of its I/Os in flight.
    fn give_up(&mut self, holder: usize, lane: usize) {
        let Some(random) = self.world.hosts.aborts.as_mut() else {
            return;
        };
        if !random.one_in(8) {
            return;
        }
        let lane = &mut self.world.holders[holder].lanes[lane];
        let numbers: Vec<u64> = lane.ongoing.keys().copied().collect();
        let number = *random.pick(&numbers);
        let accepted = lane.queue.abort(number);
        self.world.report.aborts += u64::from(accepted);
        if self.world.options.trace {
            println!(
                "{:>12} {number} is given up: {accepted}",
                self.world.clock.now().0
            );
        }
    }
}
