//! Chooses the faults of a run from its seed, and applies each at its time.

use std::sync::atomic::Ordering;
use std::time::Duration;

use nacre_bdev_replica::handle::{Command, VolumeState};
use nacre_bdev_replica::model::ReplicaState;
use uuid::Uuid;

use crate::agenda::Event;
use crate::disk::FaultRates;
use crate::faults::Kind;
use crate::holder::Holder;
use crate::leases::node_of;
use crate::media::Loss;
use crate::world::World;

#[cfg(feature = "mutations")]
fn ignores_size() -> bool {
    crate::Mutation::IgnoreSize.is_active()
}

#[cfg(not(feature = "mutations"))]
fn ignores_size() -> bool {
    false
}

impl World {
    pub(crate) fn inject_fault(&mut self) {
        let Some(kind) = self.faults.profile.draw(&mut self.random) else {
            return;
        };
        let disk = self.random.index(self.disks.len());
        let numbers: Vec<u64> = self.holders.iter().map(|h| h.number).collect();
        let holder = if numbers.is_empty() {
            0
        } else {
            *self.random.pick(&numbers)
        };
        self.log_line(|| format!("fault: {kind:?} disk{disk} holder {holder}"));
        match kind {
            Kind::DiskFaults => self.change_disk_faults(disk),
            Kind::Silence => {
                let ms = *self.random.pick(&[20, 200, 1500]);
                let until = self.clock.now() + Duration::from_millis(self.random.within(1, ms));
                self.disks[disk].fall_silent(until);
            }
            Kind::Removal => {
                self.disks[disk].disappear();
                self.disconnected(disk);
                self.come_back(disk);
            }
            Kind::PowerLoss => self.lose_power(disk),
            Kind::Blackout => {
                for disk in 0..self.disks.len() {
                    if !self.random.one_in(6) {
                        self.lose_power(disk);
                    }
                }
                if self.random.one_in(2) {
                    self.crash(holder);
                }
            }
            Kind::Unreachable if holder != 0 => {
                self.disks[disk].cut_off(holder, true);
                self.disconnected(disk);
                let after = self.random.within(1, 4000);
                self.schedule(Duration::from_millis(after), Event::Reconnect(disk, holder));
            }
            Kind::Crash => self.crash(holder),
            // With leases, `troubles.rs` decides.
            Kind::TakeOver if self.holders.len() == 1 && self.leases.is_none() => {
                let node = self.random.within(0xa0, 0xa2);
                self.start_holder(Uuid::from_u128(u128::from(node)));
                let life = self.random.within(100, 15_000);
                self.schedule(Duration::from_millis(life), Event::Crash(holder));
            }
            Kind::StoreOutage => {
                let until = self
                    .random
                    .within(1, *self.random.clone().pick(&[100, 2000, 9000]));
                let until = self.clock.now() + Duration::from_millis(until);
                let all = self.random.one_in(2);
                let mut store_faults = self.store_faults.lock();
                store_faults.out_until = until;
                store_faults.out_for = (!all).then_some(holder);
            }
            Kind::StoreFaults => {
                let values = [0, 0, 5, 30].map(|most| self.random.below(most + 1));
                let mut store_faults = self.store_faults.lock();
                let random = &mut self.random;
                store_faults.refuses = *random.pick(&values);
                store_faults.loses = *random.pick(&values);
                store_faults.slow = *random.pick(&values);
            }
            Kind::Operator => self.operate(holder),
            Kind::Close => self.close(holder),
            Kind::BadBlocks => {
                let (lba, blocks) = self.hosts.hot.somewhere(&mut self.random);
                self.disks[disk].spoil(lba, blocks.min(4));
            }
            Kind::Shortage => {
                self.hoard();
                if !self.faults.buffers_only {
                    let lacks = self.holders.iter().map(|holder| &holder.lacks);
                    lacks.for_each(|lacks| lacks.store(true, Ordering::Relaxed));
                }
                let most = *self.random.pick(&[10, 200, 2000]);
                let after = Duration::from_millis(self.random.within(1, most));
                self.schedule(after, Event::Plenty);
            }
            Kind::Unreachable | Kind::TakeOver => {}
        }
    }

    fn is_opening(&self, number: u64) -> bool {
        let opens = |holder: &Holder| holder.number == number && holder.handle.is_none();
        self.holders.iter().any(opens)
    }

    fn close(&mut self, number: u64) {
        let stopped = self.is_stopped(number);
        if self.leases.is_some() && self.is_opening(number) {
            return self.schedule(Duration::from_millis(20), Event::Close(number));
        }
        if let Some(holder) = self.holders.iter_mut().find(|h| h.number == number)
            && holder.handle.is_some()
            && !stopped
        {
            // Queues must be closed before the volume.
            let lanes = std::mem::take(&mut holder.lanes);
            lanes.iter().for_each(|lane| lane.orphan(&mut self.checker));
            drop(lanes);
            holder.command(Command::Close);
            self.schedule(Duration::from_secs(10), Event::Crash(number));
        }
    }

    /// Truncates a disk, with or without notifying the holders.
    pub(crate) fn cut_a_disk(&mut self) {
        let now = self.clock.now();
        let Some(random) = self.faults.cuts.as_mut() else {
            return;
        };
        self.faults.next_cut = now + Duration::from_millis(random.within(20, 4000));
        let disk = random.index(self.disks.len());
        let (reserved, labels) = (self.format.reserved(), 8192 / self.format.block as u64);
        let blocks = if random.one_in(12) {
            random.within(labels, reserved)
        } else {
            reserved + random.below(self.record.blocks)
        };
        let after = Duration::from_millis(random.within(1, 2000));
        let notified = random.one_in(2);
        if self.disks[disk].is_cut() {
            return;
        }
        self.disks[disk].cut(blocks);
        self.report.cut += 1;
        self.disconnected(disk);
        self.log_line(|| format!("disk{disk} is cut to {blocks} blocks"));
        self.schedule(after, Event::Enlarge(disk));
        let device = self.disks[disk].name.clone();
        for holder in self.holders.iter_mut().filter(|_| notified) {
            holder.command(Command::DevicesChanged {
                device: device.clone(),
            });
        }
    }

    /// Restores the size of a truncated disk, once the record has the truncation. Before that, a
    /// holder that has not seen the smaller size could not detect it later.
    fn enlarge(&mut self, disk: usize) {
        let name = &self.disks[disk].name;
        let replica = self.record.replicas.iter().find(|m| m.device == *name);
        let is_known = replica.is_none_or(|replica| {
            replica.cut || matches!(replica.state, ReplicaState::Filling { watermark: 0, .. })
        });
        if !is_known && !ignores_size() {
            return self.schedule(Duration::from_millis(50), Event::Enlarge(disk));
        }
        self.report.cut_replicas += u64::from(replica.is_some());
        self.disks[disk].enlarge();
        self.log_line(|| format!("disk{disk} has its end again"));
    }

    /// The device of a replica that was truncated, is in sync in the record, and has its size back.
    pub(crate) fn cut_replica(&self) -> Option<String> {
        let mut replicas = self.record.replicas.iter();
        let cut = replicas.find(|m| m.cut && m.state == ReplicaState::InSync);
        let device = cut.map(|m| m.device.clone())?;
        let disk = self.disks.iter().find(|d| d.name == device)?;
        (!disk.is_cut()).then_some(device)
    }

    /// Ends all shortages.
    pub(crate) fn plenty(&mut self) {
        self.hoard.clear();
        let lacks = self.holders.iter().map(|holder| &holder.lacks);
        lacks.for_each(|lacks| lacks.store(false, Ordering::Relaxed));
    }

    fn change_disk_faults(&mut self, disk: usize) {
        let random = &mut self.random;
        let mut chance = |most: u64| {
            if random.one_in(2) {
                random.below(most)
            } else {
                0
            }
        };
        let fault_rates = FaultRates {
            read_error: chance(120),
            write_error: chance(60),
            retry: chance(300),
            flush_error: chance(60),
            hang: chance(40),
            latency: self.faults.profile.latency,
        };
        self.disks[disk].inner.lock().fault_rates = fault_rates;
        let after = Duration::from_millis(self.random.within(5, 2000));
        self.schedule(after, Event::Calm(disk));
    }

    fn come_back(&mut self, disk: usize) {
        let most = *self.random.pick(&[10, 300, 4000]);
        let after = Duration::from_millis(self.random.within(1, most));
        self.schedule(after, Event::Reappear(disk));
    }

    fn lose_power(&mut self, disk: usize) {
        let loss = *self
            .random
            .pick(&[Loss::Everything, Loss::Some, Loss::Some, Loss::Nothing]);
        self.report.power_losses += 1;
        self.disks[disk].lose_power(loss);
        let in_sync = self.in_sync();
        let now = self.numbers.now();
        self.checker.lost_power(disk, &in_sync, now);
        self.log_line(|| format!("disk{disk} lost power ({loss:?})"));
        self.come_back(disk);
    }

    pub(crate) fn disconnected(&mut self, disk: usize) {
        let in_sync = self.in_sync();
        let now = self.numbers.now();
        self.checker.lost_connection(disk, &in_sync, now);
    }

    fn crash(&mut self, holder: u64) {
        if self.holders.iter().any(|h| h.number == holder) {
            self.apply(Event::Crash(holder));
        }
    }

    fn operate(&mut self, holder: u64) {
        let names: Vec<String> = self.disks.iter().map(|d| d.name.clone()).collect();
        let random = &mut self.random;
        let replica = random.pick(&names).clone();
        let device = random.pick(&names).clone();
        let force = None;
        let grown = self.record.blocks + random.within(0, 300);
        let grown = grown.min(self.most_blocks);
        let name = self.record.name.clone();
        let state = self.status().map(|(_, state)| state);
        let random = &mut self.random;
        let stuck = matches!(state, Some(VolumeState::Frozen | VolumeState::Failing));
        let command = match random.below(15) {
            _ if stuck && random.one_in(2) => Command::Thaw {
                replica: random.one_in(3).then_some(replica),
                force: random.one_in(2).then_some(name),
            },
            0 => Command::Add {
                device,
                force: true,
            },
            1 => Command::Remove { replica, force },
            2 => Command::Offline { replica, force },
            3..6 => Command::Online { replica },
            6 => Command::Replace {
                replica,
                device,
                force: true,
            },
            7 => Command::Resync {
                replica: Some(replica),
                full: random.one_in(2),
            },
            8 => Command::Resync {
                replica: None,
                full: false,
            },
            9 => Command::Verify {
                repair: random.one_in(2),
            },
            10 => Command::DevicesChanged { device },
            11 | 12 => Command::Grow { blocks: grown },
            13 => {
                let life = Duration::from_millis(random.within(1, 800));
                self.schedule(life, Event::Thaw(holder));
                Command::FailIo
            }
            _ => Command::Rename {
                name: format!("name{}", random.below(3)),
            },
        };
        let fails = self.random.one_in(2);
        if let Some(holder) = self.holders.iter_mut().find(|h| h.number == holder) {
            match &holder.prepared {
                Some(prepared) => prepared.set_failing(fails),
                None => holder.command(command),
            }
        }
    }

    /// Without a reachable in-sync replica and without an open volume, an operator sometimes
    /// continues from any replica.
    pub(crate) fn despair(&mut self, index: usize) {
        let others = self.holders.iter().enumerate();
        let alone = others
            .filter(|(other, _)| *other != index)
            .all(|(_, holder)| holder.handle.is_none() && holder.opening.is_none());
        if !alone || !self.faults.profile.has(Kind::Operator) || !self.random.one_in(3) {
            return;
        }
        let disk = self.random.index(self.disks.len());
        let replica = self.disks[disk].name.clone();
        self.holders[index].force_in_sync(&self.record, replica);
    }

    pub(crate) fn apply(&mut self, event: Event) {
        match event {
            Event::Calm(disk) => {
                let fault_rates = FaultRates {
                    latency: self.faults.profile.latency,
                    ..FaultRates::default()
                };
                self.disks[disk].inner.lock().fault_rates = fault_rates;
            }
            Event::Reappear(disk) => {
                self.disks[disk].reappear();
                self.log_line(|| format!("disk{disk} is back"));
            }
            Event::Reconnect(disk, holder) => self.disks[disk].cut_off(holder, false),
            Event::Crash(number) => {
                if !self.holders.iter().any(|h| h.number == number) {
                    return;
                }
                self.report.crashes += 1;
                let former = self.is_former(number);
                self.stop_holder(number);
                // With leases the last holder has a successor, and no other one has.
                if (self.holders.is_empty() || self.leases.is_some()) && !former {
                    let after = *self.random.pick(&[0, 1, 50, 3000]);
                    let node = match self.leases {
                        Some(_) => node_of(self.lives + 1),
                        None => Uuid::from_u128(u128::from(self.random.within(0xa0, 0xa2))),
                    };
                    self.schedule(Duration::from_millis(after), Event::Start(node));
                }
            }
            // It may not act any more, and has nothing to lose.
            Event::TryAgain(number) if self.is_former(number) => self.crash(number),
            Event::TryAgain(number) => {
                let id = self.id;
                if let Some(holder) = self.holders.iter_mut().find(|h| h.number == number) {
                    holder.open(id);
                }
            }
            Event::GoOn(holder) => self.go_on(holder),
            Event::Take(holder) => self.take_over(holder),
            Event::Close(holder) => self.close(holder),
            Event::NodeLease(disk, has) => self.disks[disk].set_node_lease(has),
            Event::Start(node) => self.start_holder(node),
            Event::Plenty => self.plenty(),
            Event::Enlarge(disk) => self.enlarge(disk),
            Event::Over(write, lba, blocks) => {
                let now = self.numbers.now();
                self.checker
                    .write_ended(write, (lba, blocks), false, false, now);
            }
            Event::Release(number) => self.release_writes(number),
            Event::Thaw(number) => {
                if let Some(holder) = self.holders.iter_mut().find(|h| h.number == number) {
                    holder.command(Command::Thaw {
                        replica: None,
                        force: None,
                    });
                }
            }
        }
    }
}
