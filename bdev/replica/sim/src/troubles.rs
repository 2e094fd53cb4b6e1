//! The troubles of holders with leases. Holders are stopped at any step, and lose the store.
//! Another holder takes the volume when the lease of the former one is over. The former holder goes
//! on: its control and its lanes continue where they were stopped. Meanwhile its commands at the
//! disks proceed.
//!
//! The node of a disk may have no lease, whatever the disk does: that is only a hint for holders.

use std::time::Duration;

use crate::agenda::Event;
use crate::holder::Holder;
use crate::leases::node_of;
use crate::world::World;

/// The troubles of holders with leases.
#[derive(Debug, Clone, Copy)]
enum Trouble {
    /// The holder's process is stopped, with its disk or without.
    Stop { with_disk: bool },
    /// The holder does not reach the store.
    NoStore,
    /// The holder's renewals are executed, and it gets no reply.
    NoReply,
    /// The store is away for all.
    StoreAway,
    /// The node of a disk has no lease: the disk is silent, gone, or well.
    NoLease,
}

impl World {
    /// Renews leases, and makes the next trouble. Returns true if it did anything.
    pub(crate) fn look_after_leases(&mut self) -> bool {
        Troubles { world: self }.look_after()
    }

    /// Another holder takes the volume, if the lease of `holder` is over. Otherwise it tries again
    /// while the trouble of `holder` continues.
    pub(crate) fn take_over(&mut self, holder: u64) {
        Troubles { world: self }.take_over(holder);
    }

    /// A stopped holder goes on.
    pub(crate) fn go_on(&mut self, holder: u64) {
        Troubles { world: self }.go_on(holder);
    }

    /// The last holder has closed the volume. Often former holders go on just then.
    pub(crate) fn closed_in_order(&mut self) {
        Troubles { world: self }.closed_in_order();
    }

    pub(crate) fn is_stopped(&self, holder: u64) -> bool {
        let leases = self.leases.as_ref();
        leases.is_some_and(|leases| leases.stopped.contains(&holder))
    }

    /// True if the lease of the holder is not good: its answers need confirmation.
    pub(crate) fn needs_confirmation(&self, holder: u64) -> bool {
        let leases = self.leases.as_ref();
        leases.is_some_and(|leases| !leases.book.is_good(holder))
    }

    /// True if the holder has leases and is not the last one.
    pub(crate) fn is_former(&self, holder: u64) -> bool {
        self.leases.is_some() && holder != self.lives
    }

    /// True if hosts only read through this holder.
    pub(crate) fn only_reads(&self, holder: u64) -> bool {
        let leases = self.leases.as_ref();
        self.is_former(holder) && leases.is_some_and(|leases| leases.only_reads)
    }
}

/// Acts on the holders and the disks of a run with leases.
struct Troubles<'a> {
    world: &'a mut World,
}

impl Troubles<'_> {
    fn look_after(&mut self) -> bool {
        let now = self.world.clock.now();
        let Some(leases) = &mut self.world.leases else {
            return false;
        };
        let store_faults = self.world.store_faults.lock();
        let reaches = |holder| !store_faults.is_out(holder, now);
        let holders = self.world.holders.iter().map(|holder| holder.number);
        let worked = leases.renew(holders, reaches, now);
        drop(store_faults);
        if !self.world.lively || leases.next_trouble > now {
            return worked;
        }
        self.trouble_a_holder();
        true
    }

    fn trouble_a_holder(&mut self) {
        let (now, last) = (self.world.clock.now(), self.world.lives);
        let Some(leases) = &mut self.world.leases else {
            return;
        };
        let random = &mut leases.random;
        leases.next_trouble = now + Duration::from_millis(random.within(1, 1500));
        if self.world.holders.is_empty() {
            return;
        }
        let any = self.world.holders[random.index(self.world.holders.len())].number;
        let is_there = self
            .world
            .holders
            .iter()
            .any(|holder| holder.number == last);
        // Most holders come as far as to serve.
        let opens = |h: &Holder| h.number == last && h.handle.is_none();
        if self.world.holders.iter().any(opens) && !random.one_in(4) {
            return;
        }
        let holder = if is_there && !random.one_in(4) {
            last
        } else {
            any
        };
        let disk = random.index(self.world.disks.len());
        let length = Duration::from_millis(*random.pick(&[1, 100, 1000, 3000]));
        let length = length + Duration::from_micros(random.below(1000));
        let trouble = match random.below(8) {
            0..3 => Trouble::Stop {
                with_disk: random.one_in(2),
            },
            3..5 => Trouble::NoStore,
            5 => Trouble::NoReply,
            6 => Trouble::StoreAway,
            _ => Trouble::NoLease,
        };
        let taken = !random.one_in(4);
        let disk_is = random.below(3);
        let lease = leases.length;
        match trouble {
            Trouble::Stop { .. } => {
                self.stop(holder);
                self.world.schedule(length, Event::GoOn(holder));
            }
            Trouble::NoStore => drop(leases.silent.insert(holder, now + length)),
            Trouble::NoReply => drop(leases.deaf.insert(holder, now + length)),
            Trouble::StoreAway | Trouble::NoLease => {}
        }
        match trouble {
            Trouble::Stop { with_disk: true } => {
                self.world.disks[disk].fall_silent(now + length);
                self.world.schedule(lease, Event::NodeLease(disk, false));
                self.world
                    .schedule(length.max(lease), Event::NodeLease(disk, true));
            }
            Trouble::NoStore | Trouble::StoreAway => {
                let mut store_faults = self.world.store_faults.lock();
                store_faults.out_until = now + length;
                store_faults.out_for = matches!(trouble, Trouble::NoStore).then_some(holder);
            }
            Trouble::NoLease => {
                match disk_is {
                    0 => self.world.disks[disk].fall_silent(now + length),
                    1 => {
                        self.world.disks[disk].disappear();
                        self.world.disconnected(disk);
                        self.world.schedule(length, Event::Reappear(disk));
                    }
                    _ => {}
                }
                self.world
                    .schedule(Duration::ZERO, Event::NodeLease(disk, false));
                self.world.schedule(length, Event::NodeLease(disk, true));
            }
            Trouble::Stop { with_disk: false } | Trouble::NoReply => {}
        }
        if taken && matches!(trouble, Trouble::Stop { .. } | Trouble::NoStore) {
            self.world
                .schedule(Duration::from_millis(1), Event::Take(holder));
        }
        self.world
            .log_line(|| format!("holder {holder}, disk{disk}: {trouble:?} for {length:?}"));
    }

    /// Stops a holder, often just after it accepted commands.
    fn stop(&mut self, holder: u64) {
        if !self.world.is_stopped(holder) {
            self.world.offer_burst(holder);
        }
        if let Some(leases) = &mut self.world.leases {
            leases.stopped.insert(holder);
        }
    }

    fn go_on(&mut self, holder: u64) {
        let stopped = self.world.leases.as_mut().map(|leases| &mut leases.stopped);
        if stopped.is_some_and(|stopped| stopped.remove(&holder)) {
            self.world.log_line(|| format!("holder {holder} goes on"));
            self.world.report.leases.outlived += u64::from(self.is_succeeded(holder));
            // They arrived meanwhile.
            self.world.offer_burst(holder);
        }
    }

    /// True if a successor of the holder, which has the volume open, serves or has served.
    fn is_succeeded(&self, holder: u64) -> bool {
        let has_it_open = |h: &&Holder| h.number == holder && h.handle.is_some();
        let open = self.world.holders.iter().find(has_it_open);
        let epoch = |holder: &Holder| {
            let handle = holder.handle.as_ref();
            handle.map(|handle| handle.status().epoch)
        };
        open.and_then(epoch)
            .is_some_and(|epoch| epoch < self.world.record.serving)
    }

    fn take_over(&mut self, holder: u64) {
        let last = self.world.lives;
        let Some(leases) = &mut self.world.leases else {
            return;
        };
        if holder != last || !self.world.holders.iter().any(|h| h.number == holder) {
            return;
        }
        if !leases.book.end_unrenewed(holder, leases.length) {
            if leases.stopped.contains(&holder) || leases.silent.contains_key(&holder) {
                self.world
                    .schedule(Duration::from_millis(5), Event::Take(holder));
            }
            return;
        }
        let random = &mut leases.random;
        let life = Duration::from_millis(random.within(100, 6000));
        let back = Duration::from_millis(random.within(1, 4000));
        let (closes, close) = (random.one_in(3), random.within(1, 600));
        // In most cases one disk that the former holder reaches, by a node that is cut off.
        let one = random.index(self.world.disks.len());
        let (only, chance) = *random.pick(&[(true, 1), (true, 1), (false, 3)]);
        let mut hidden: Vec<(usize, bool)> = Vec::new();
        for disk in 0..self.world.disks.len() {
            if (!only || disk == one) && random.one_in(chance) {
                hidden.push((disk, random.one_in(4)));
            }
        }
        self.world
            .log_line(|| format!("the lease of holder {holder} is ended"));
        // The new holder does not reach each disk that the former one reaches.
        let next = last + 1;
        for (disk, awaited) in hidden {
            self.world.disks[disk].hide_from(next);
            if !awaited {
                self.world
                    .schedule(Duration::ZERO, Event::NodeLease(disk, false));
                self.world.schedule(back, Event::NodeLease(disk, true));
            }
            self.world.schedule(back, Event::Reconnect(disk, next));
        }
        self.world.start_holder(node_of(next));
        if closes {
            self.world
                .schedule(Duration::from_millis(close), Event::Close(next));
        }
        self.world.schedule(life, Event::Crash(holder));
        self.world.report.leases.ended += 1;
    }

    fn closed_in_order(&mut self) {
        let Some(leases) = &mut self.world.leases else {
            return;
        };
        if leases.random.one_in(3) {
            return;
        }
        let stopped: Vec<u64> = leases.stopped.iter().copied().collect();
        let after = Duration::from_micros(leases.random.within(1, 3000));
        for holder in stopped {
            self.world.schedule(after, Event::GoOn(holder));
        }
    }
}
