//! The state of one simulation run of a replicated volume: holders (incarnations of daemons that
//! open the volume), disks, hosts, faults, and virtual time.
//!
//! A run is a sequence of rounds. In each, every lane and control task is polled or not, in random
//! order; due events happen; then the clock advances or stays.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use nacre_bdev::{Queue, Status};
use nacre_bdev_replica::handle::{VolumeError, VolumeState};
use nacre_bdev_replica::model::{MAX_REPLICAS, ReplicaRecord, ReplicaState, VolumeRecord};
use nacre_bdev_replica::store::MemoryStore;
use nacre_hugepages::Buf;
use nacre_random::Random;
use nacre_reactor::{Idle, Nanos, SleepAttempt, VirtualClock};
use parking_lot::Mutex;
use uuid::Uuid;

use crate::agenda::{Agenda, Event};
use crate::checker::Checker;
use crate::disk::{SimDisk, is_silent};
use crate::faults::{Faults, StoreFaults};
use crate::holder::Holder;
use crate::leases::{Leases, node_of};
use crate::load::{Hosts, Numbers};
use crate::media::Format;
use crate::report::{Options, Report};

/// Most rounds of one run. A run that needs more fails: it makes no progress.
const MAX_ROUNDS: u64 = 3_000_000;

pub(crate) struct World {
    pub options: Options,
    pub random: Random,
    /// The format of all disks.
    pub format: Format,
    pub clock: VirtualClock,
    pub store: MemoryStore,
    pub store_faults: Arc<Mutex<StoreFaults>>,
    pub disks: Vec<Arc<SimDisk>>,
    pub(crate) queues: Arc<AtomicU64>,
    pub holders: Vec<Holder>,
    pub(crate) lives: u64,
    pub id: Uuid,
    pub checker: Checker,
    /// The largest size that the volume may grow to.
    pub most_blocks: u64,
    pub numbers: Numbers,
    pub(crate) hosts: Hosts,
    pub faults: Faults,
    pub agenda: Agenda,
    /// `None`: the holders of this run have no leases.
    pub leases: Option<Leases>,
    /// True while load and faults continue.
    pub lively: bool,
    pub(crate) carried_out: u64,
    /// The record as last read.
    pub record: VolumeRecord,
    pub report: Report,
    pub(crate) log: VecDeque<String>,
    /// Buffers taken out of a holder's pool, so that it runs short of them.
    pub(crate) hoard: Vec<Buf>,
}

impl World {
    /// The counters of a run, or the description of its failure.
    pub(crate) fn report(mut self, outcome: Result<(), String>) -> Result<Report, String> {
        self.report.ios = self.numbers.ios;
        self.report.reads = self.checker.reads;
        self.report.writes = self.checker.writes;
        self.report.virtual_ms = self.clock.now().0 / 1_000_000;
        match outcome {
            Ok(()) => Ok(self.report),
            Err(what) => {
                let mut text = what;
                for line in &self.log {
                    text.push_str("\n  ");
                    text.push_str(line);
                }
                Err(text)
            }
        }
    }

    /// Runs load and faults until the wanted number of I/Os, or for 120 s of virtual time.
    pub(crate) fn live(&mut self) -> Result<(), String> {
        let mut rounds = 0;
        while self.numbers.ios < self.options.ios && self.clock.now() < Nanos(120_000_000_000) {
            self.round()?;
            rounds += 1;
            if rounds > MAX_ROUNDS {
                return Err("no end of it".to_owned());
            }
        }
        Ok(())
    }

    /// Like [`World::round`], without taking the replies of commands, for which the caller waits.
    pub(crate) fn round_without_commands(&mut self) {
        self.look_at_store();
        self.look_after_leases();
        self.pass_time(false);
    }

    /// Runs one round. Fails on an impossible result.
    pub(crate) fn round(&mut self) -> Result<(), String> {
        let mut worked = false;
        let mut actors: Vec<(usize, Option<usize>)> = Vec::new();
        let goes = |holder: &&Holder| !self.is_stopped(holder.number);
        let going = self.holders.iter().enumerate();
        for (index, holder) in going.filter(|(_, holder)| goes(holder)) {
            actors.push((index, None));
            actors.extend((0..holder.lanes.len()).map(|lane| (index, Some(lane))));
        }
        self.random.shuffle(&mut actors);
        for (index, lane) in actors {
            if self.random.one_in(8) {
                worked = true;
                continue;
            }
            worked |= match lane {
                None => {
                    let worked = self.holders[index].core.turn();
                    self.look_at_store();
                    worked
                }
                Some(lane) => self.poll(index, lane)?,
            };
        }
        worked |= self.look_after_holders()?;
        worked |= self.look_after_leases();
        worked |= self.happen();
        self.pass_time(worked);
        Ok(())
    }

    fn poll(&mut self, holder: usize, lane: usize) -> Result<bool, String> {
        let Self {
            holders,
            numbers,
            checker,
            ..
        } = self;
        let may_answer = holders[holder].may_answer();
        let mut successes = 0;
        let lane = &mut holders[holder].lanes[lane];
        let trace = self.options.trace;
        let now = self.clock.now();
        let mut early = None;
        let on_completion = |number, io: &_, status: Status| {
            if trace {
                println!("{:>12} {number} {io:?}: {status:?}", now.0);
            }
            successes += u64::from(status.is_ok());
            if status.is_ok() && !may_answer {
                early = Some(number);
            }
        };
        let answered = lane.poll(now, numbers, checker, on_completion)?;
        if self.needs_confirmation(self.holders[holder].number) {
            self.report.leases.confirmed += successes;
        }
        match early {
            Some(number) => Err(format!("{number} is done, and the volume is not open")),
            None => {
                self.report.waited += if may_answer { 0 } else { answered as u64 };
                Ok(answered > 0)
            }
        }
    }

    /// Handles volume events, and results of openings and commands. True if there were any. The
    /// error: replicas differed while the writes were held.
    fn look_after_holders(&mut self) -> Result<bool, String> {
        let mut worked = false;
        for index in 0..self.holders.len() {
            if self.is_stopped(self.holders[index].number) {
                continue;
            }
            let holder = &mut self.holders[index];
            let mut reconciled = false;
            for event in holder.events.take() {
                use nacre_bdev_replica::handle::VolumeEventKind;
                self.report.count(&event.what);
                match event.what {
                    VolumeEventKind::ReplicaOut { ref device, .. } => {
                        let number = self.holders[index].number;
                        let deadline = self.record.settings.deadline_ms;
                        let is_early = is_silent(&self.disks, device, number, deadline);
                        self.report.silent += u64::from(is_early);
                    }
                    VolumeEventKind::ResyncEnded { .. } => reconciled = true,
                    VolumeEventKind::Salvaged { lba, blocks, .. } => {
                        self.checker.salvaged(lba, blocks.into());
                    }
                    // Until this event reads used it, although the store already listed it as out.
                    // So the last values read may exist nowhere else, too.
                    VolumeEventKind::SourceChanged { .. } => self.checker.unsettle(),
                    VolumeEventKind::Grown { .. } => self.holders[index].refresh(),
                    _ => {}
                }
                let number = self.holders[index].number;
                self.log_line(|| format!("holder {number}: {:?}", event.what));
            }
            let holder = &mut self.holders[index];
            if reconciled && !holder.reconciles() {
                self.checker.reconciled();
            }
            let number = holder.number;
            let answered = holder.answered();
            if let Some(outcome) = holder.opened(&mut self.checker) {
                worked = true;
                if outcome.is_ok() {
                    self.report.opens += 1;
                    self.report.taken_over += u64::from(!holder.lanes.is_empty());
                    // Otherwise the daemon would not get its queue, which another test covers.
                    self.hoard.clear();
                    for _ in 0..self.random.within(1, 3) {
                        self.holders[index].add_lane();
                    }
                }
                self.log_line(|| format!("holder {number} opened: {outcome:?}"));
                if matches!(outcome, Err(VolumeError::NothingInSync { .. })) {
                    match self.cut_replica().filter(|_| !self.lively) {
                        Some(replica) => self.holders[index].force_in_sync(&self.record, replica),
                        None => self.despair(index),
                    }
                }
                if outcome.is_err() {
                    let wait = Duration::from_millis(self.random.within(10, 1000));
                    self.schedule(wait, Event::TryAgain(number));
                }
            }
            for (command, outcome) in answered {
                worked = true;
                self.log_line(|| format!("holder {number} {command}: {outcome:?}"));
                self.hold_answered(index, &command, &outcome)?;
                if command == "Close" && outcome.is_ok() && self.lively {
                    if !self.is_former(number) {
                        self.closed_in_order();
                    }
                    self.schedule(Duration::from_millis(1), Event::Crash(number));
                }
            }
        }
        Ok(worked)
    }

    /// Reports to the checker the meaning of a change of the volume's record in the store.
    pub(crate) fn look_at_store(&mut self) {
        if self.store.carried_out() == self.carried_out {
            return;
        }
        self.carried_out = self.store.carried_out();
        let Some(now) = self.store.records().into_iter().next() else {
            return;
        };
        if now == self.record {
            return;
        }
        let before = self.in_sync();
        let (served, blocks) = (self.record.serving, self.record.blocks);
        self.report.watermarks += u64::from(is_further(&self.record, &now));
        let replicas = self.record.replicas.iter();
        let cut: Vec<Uuid> = replicas.filter(|m| m.cut).map(|m| m.id).collect();
        self.record = now;
        let after = self.in_sync();
        for disk in 0..self.disks.len() {
            if before.contains(&disk) && !after.contains(&disk) {
                self.checker.unsettle();
            }
            if before.contains(&disk) != after.contains(&disk) {
                self.checker.replaced(disk);
            }
        }
        // The operator chose a replica that lacks data: one that was out, or with a label older
        // than the last epoch served, or that lost its end.
        let was_cut = |m: &&ReplicaRecord| cut.contains(&m.id) && !m.cut;
        if self.record.in_sync().any(|m| was_cut(&m))
            || !after.iter().any(|disk| before.contains(disk))
            || self.record.serving < served
        {
            self.report.forced += 1;
            self.checker.forced();
        }
        if self.record.blocks != blocks {
            let moment = self.numbers.now();
            self.checker.grew(&after, moment);
        }
        if self.record.serving > served {
            self.end_former_writes();
            let moment = self.numbers.now();
            self.checker.serves(&after, true, moment);
        }
        self.log_line(|| "record".to_owned());
        if self.options.trace {
            println!("    {:?}", self.record);
        }
    }

    /// A holder begins to serve: former holders' writes have taken effect now, or never will.
    fn end_former_writes(&mut self) {
        if self.leases.is_none() {
            return;
        }
        let serving = |holder: &&Holder| self.record.holder == Some(holder.node);
        for holder in self.holders.iter().filter(|holder| !serving(holder)) {
            holder
                .lanes
                .iter()
                .for_each(|lane| lane.orphan(&mut self.checker));
        }
    }

    /// The disks of the replicas that are in sync according to the store.
    pub(crate) fn in_sync(&self) -> Vec<usize> {
        let names = self.record.in_sync().map(|replica| &replica.device);
        names
            .filter_map(|name| self.disks.iter().position(|disk| disk.name == *name))
            .collect()
    }

    /// Runs load, faults, and due events.
    fn happen(&mut self) -> bool {
        let now = self.clock.now();
        let mut worked = false;
        while let Some(event) = self.agenda.take_due(now) {
            self.apply(event);
            worked = true;
        }
        if !self.lively {
            return worked;
        }
        if self.faults.next <= now {
            let pause = self.random.within(1, 2 * self.faults.profile.pause_ms);
            self.faults.next = now + Duration::from_millis(pause);
            self.inject_fault();
            worked = true;
        }
        if self.faults.next_cut <= now && self.faults.cuts.is_some() {
            self.cut_a_disk();
            worked = true;
        }
        if self
            .faults
            .holds
            .as_ref()
            .is_some_and(|holds| holds.next <= now)
        {
            self.hold_writes();
            worked = true;
        }
        if self.hosts.next_io <= now {
            worked |= self.offer_io(now);
        }
        worked
    }

    /// Advances the clock: by less than 3 us or not at all after work, else to the next due time.
    fn pass_time(&mut self, worked: bool) {
        let now = self.clock.now();
        let next = if worked {
            if self.random.one_in(2) {
                return;
            }
            now + Duration::from_nanos(self.random.below(3000))
        } else {
            self.next_due()
        };
        self.clock.set(next.max(now));
        self.store_faults.lock().now = next;
        self.store.advance(next);
        self.look_at_store();
        for disk in &self.disks {
            disk.advance(next);
        }
    }

    fn next_due(&mut self) -> Nanos {
        let now = self.clock.now();
        // No part waits longer than this without a visible reason.
        let mut next = now + Duration::from_millis(200);
        let mut soon = |at: Option<Nanos>| next = at.map_or(next, |at| next.min(at));
        self.disks.iter().for_each(|disk| soon(disk.next_due()));
        soon(self.store.next_due());
        soon(self.agenda.next_due());
        if self.lively {
            soon(Some(self.faults.next));
            soon(Some(self.hosts.next_io));
            soon(self.faults.cuts.as_ref().map(|_| self.faults.next_cut));
            soon(self.faults.holds.as_ref().map(|holds| holds.next));
        }
        let lively = self.lively;
        soon(self.leases.as_ref().map(|leases| leases.next_due(lively)));
        let busy = Some(now + Duration::from_micros(20));
        let stopped = self.leases.as_ref().map(|leases| &leases.stopped);
        let goes = |holder: &&mut Holder| !stopped.is_some_and(|s| s.contains(&holder.number));
        for holder in self.holders.iter_mut().filter(goes) {
            soon(match holder.core.try_sleep() {
                SleepAttempt::Refused => busy,
                SleepAttempt::Until(at) => at,
            });
            for lane in &mut holder.lanes {
                soon(match lane.queue.arm(now) {
                    Idle::Busy => busy,
                    Idle::Until(at) => Some(at),
                    Idle::Quiet => None,
                });
                lane.queue.disarm();
            }
        }
        next.max(now + Duration::from_nanos(1))
    }

    pub(crate) fn schedule(&mut self, after: Duration, event: Event) {
        self.agenda.schedule(self.clock.now() + after, event);
    }

    /// Starts a new holder on a node: it opens the volume.
    pub(crate) fn start_holder(&mut self, node: Uuid) {
        self.lives += 1;
        if let Some(leases) = &self.leases {
            leases.grant(self.lives);
        }
        let mut holder = Holder::new(
            self.lives,
            node,
            &self.clock,
            &self.store,
            &self.disks,
            &self.queues,
            self.leases.as_ref().map(|leases| &leases.book),
        );
        // Often hosts connect before the volume is open.
        if !self.random.one_in(3) {
            let mut record = self.record.clone();
            if let Some(limits) = record.limits.as_mut().filter(|_| self.random.one_in(8)) {
                // More than the volume keeps: hosts that saw these limits must reconnect.
                limits.atomic_blocks += 1;
            }
            holder.prepare(&record);
            if holder.layer.is_some() {
                // As for an open volume.
                self.hoard.clear();
                for _ in 0..self.random.within(1, 3) {
                    holder.add_lane();
                }
            }
        }
        holder.open(self.id);
        let number = self.lives;
        self.log_line(|| format!("holder {number} starts on {node}"));
        self.holders.push(holder);
    }

    /// Starts the last holder, after the end of all faults.
    pub(crate) fn start_last_holder(&mut self) {
        self.start_holder(match self.leases {
            Some(_) => node_of(self.lives + 1),
            None => Uuid::from_u128(0xaf),
        });
    }

    /// Stops a holder at its present step, as `kill -9` does. The disks execute each I/O in flight
    /// or not.
    pub(crate) fn stop_holder(&mut self, number: u64) {
        let Some(index) = self.holders.iter().position(|h| h.number == number) else {
            return;
        };
        let mut holder = self.holders.remove(index);
        if let Some(leases) = &mut self.leases {
            leases.stopped.remove(&number);
            leases.book.end(number);
        }
        for lane in &holder.lanes {
            lane.orphan(&mut self.checker);
        }
        holder.lanes.clear();
        self.log_line(|| format!("holder {number} stops"));
    }

    /// Takes all buffers from the first holder's pool, or only those above 4 KiB or 64 KiB.
    pub(crate) fn hoard(&mut self) {
        let least = *self.random.pick(&[1, 1, 4097, (64 << 10) + 1]);
        let Some(holder) = self.holders.first() else {
            return;
        };
        let taken = std::iter::from_fn(|| holder.pool.acquire(least));
        self.hoard.extend(taken);
    }

    pub(crate) fn log_line(&mut self, what: impl FnOnce() -> String) {
        /// Most lines shown for a failure.
        const KEPT: usize = 60;
        let line = format!("{:>12} {}", self.clock.now().0, what());
        if self.options.trace {
            println!("{line}");
        }
        if self.log.len() == KEPT {
            self.log.pop_front();
        }
        self.log.push_back(line);
    }

    /// The index of the first holder that has opened the volume, and the volume's state.
    pub(crate) fn status(&self) -> Option<(usize, VolumeState)> {
        let with_handle = |(index, holder): (usize, &Holder)| {
            let handle = holder.handle.as_ref()?;
            Some((index, handle.status().state))
        };
        self.holders.iter().enumerate().find_map(with_handle)
    }

    /// Formats each replica and its state, for messages.
    pub(crate) fn replicas(&self) -> String {
        let replica = |m: &ReplicaRecord| {
            let state = match m.state {
                ReplicaState::InSync => "in sync".to_owned(),
                other => format!("{other:?}"),
            };
            format!("{}: {state}, {:?}", m.device, m.why)
        };
        let replicas: Vec<String> = self.record.replicas.iter().map(replica).collect();
        replicas.join("; ")
    }
}

/// True when a replica is known to be filled further than before.
fn is_further(before: &VolumeRecord, now: &VolumeRecord) -> bool {
    let filled = |record: &VolumeRecord, slot: usize| match record.replica(slot).map(|m| m.state) {
        Some(ReplicaState::Filling { watermark, .. }) => Some(watermark),
        _ => None,
    };
    (0..MAX_REPLICAS).any(|slot| match (filled(before, slot), filled(now, slot)) {
        (Some(before), Some(now)) => now > before,
        _ => false,
    })
}
