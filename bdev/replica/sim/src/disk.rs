//! A simulated disk, optionally behind a network. It can be slow, fail, hang, disappear and return,
//! but never returns wrong data.
//!
//! A command takes effect at some time between submission and completion. A holder reaches the disk
//! through a `Device`. In runs with leases the disk has reservations. In others, a holder that
//! claims the disk excludes other holders: their commands in flight execute or not, and none
//! executes afterwards.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use nacre_bdev::reservation::ReservationRequest;
use nacre_bdev::{Flags, Limits, Op, Status};
use nacre_random::Random;
use nacre_reactor::Nanos;
use parking_lot::Mutex;

use crate::gate::Gate;
use crate::media::{Format, Loss, Media};

pub(crate) struct SimDisk {
    pub name: String,
    pub(crate) inner: Mutex<Inner>,
}

/// The device's limits and operations, which differ from disk to disk.
#[derive(Debug, Clone)]
pub(crate) struct Traits {
    pub limits: Limits,
    pub native_fua: bool,
    pub unmaps: bool,
    pub writes_zeroes: bool,
    pub local: bool,
}

/// Rates of failures, in chances per thousand commands (reads, writes or flushes).
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct FaultRates {
    pub read_error: u64,
    pub write_error: u64,
    pub retry: u64,
    pub flush_error: u64,
    /// Chance of an additional delay of 20 ms to 3 s.
    pub hang: u64,
    /// Typical time of a command, which takes half to twice as long, and one in 20 ten times that.
    pub latency: Duration,
}

pub(crate) struct Inner {
    pub media: Media,
    pub traits: Traits,
    pub fault_rates: FaultRates,
    random: Random,
    now: Nanos,
    commands: BTreeMap<(Nanos, u64), Command>,
    numbers: u64,
    /// Completions, by queue.
    answers: BTreeMap<u64, Vec<Answer>>,
    /// Every command completes as "gone".
    gone: bool,
    /// No command completes before this time.
    silent_until: Nanos,
    silent_since: Nanos,
    /// Holders that cannot reach the disk.
    cut_off: Vec<u64>,
    owner: Option<u64>,
    losses: u64,
    /// The smallest size in blocks since each holder opened the disk, or last took this number
    /// (`forget_least`).
    least: BTreeMap<u64, u64>,
    /// Since when the disk's node has a lease, or has none; the last changes. Holders learn of it
    /// with a delay.
    node_lease: Vec<(Nanos, bool)>,
    /// The reservations, in runs with leases. Otherwise a claim excludes other holders.
    gate: Option<Gate>,
    /// Blocks that are unreadable until they are written.
    bad: BTreeSet<u64>,
    name: String,
    /// Prints every command to this block of the disk.
    pub watched: Option<u64>,
}

struct Command {
    queue: u64,
    holder: u64,
    op: Op,
    flags: Flags,
    lba: u64,
    blocks: u64,
    contents: Vec<u64>,
    status: Status,
    /// The command's queue is closed.
    orphan: bool,
}

/// The completion of a command; for a read, with its data.
pub(crate) struct Answer {
    pub number: u64,
    pub status: Status,
    pub contents: Vec<u64>,
}

/// A command without its buffers.
pub(crate) struct Order {
    pub queue: u64,
    pub holder: u64,
    pub op: Op,
    pub flags: Flags,
    pub lba: u64,
    pub blocks: u64,
    pub contents: Vec<u64>,
}

impl Order {
    fn command(self, status: Status) -> Command {
        Command {
            queue: self.queue,
            holder: self.holder,
            op: self.op,
            flags: self.flags,
            lba: self.lba,
            blocks: self.blocks,
            contents: self.contents,
            status,
            orphan: false,
        }
    }
}

impl SimDisk {
    pub(crate) fn new(
        name: String,
        format: Format,
        blocks: u64,
        traits: Traits,
        random: Random,
    ) -> Arc<Self> {
        Arc::new(Self {
            name: name.clone(),
            inner: Mutex::new(Inner {
                media: Media::new(format, blocks),
                traits,
                fault_rates: FaultRates::default(),
                random,
                now: Nanos::ZERO,
                commands: BTreeMap::new(),
                numbers: 0,
                answers: BTreeMap::new(),
                gone: false,
                silent_until: Nanos::ZERO,
                silent_since: Nanos::ZERO,
                cut_off: Vec::new(),
                owner: None,
                losses: 0,
                least: BTreeMap::new(),
                node_lease: Vec::new(),
                gate: None,
                bad: BTreeSet::new(),
                name,
                watched: None,
            }),
        })
    }

    /// Sets the time to `now`: due commands execute.
    pub(crate) fn advance(&self, now: Nanos) {
        let mut inner = self.inner.lock();
        inner.now = now;
        while let Some(entry) = inner.commands.first_entry()
            && entry.key().0 <= now
        {
            let number = entry.key().1;
            let command = entry.remove();
            inner.finish(number, command);
        }
        inner.execute_asks();
    }

    pub(crate) fn next_due(&self) -> Option<Nanos> {
        let inner = self.inner.lock();
        let command = inner.commands.first_key_value().map(|((due, _), _)| *due);
        let gate = inner
            .gate
            .as_ref()
            .and_then(|gate| gate.next_due(inner.now));
        command.into_iter().chain(gate).min()
    }

    /// Gives the disk reservations.
    pub(crate) fn add_gate(&self, random: Random) {
        self.inner.lock().gate = Some(Gate::new(random));
    }

    /// The disk's node has a lease from now on, or has none.
    pub(crate) fn set_node_lease(&self, has: bool) {
        /// More changes than happen within any holder's delay.
        const KEPT: usize = 8;
        let mut inner = self.inner.lock();
        let now = inner.now;
        inner.node_lease.push((now, has));
        if inner.node_lease.len() > KEPT {
            inner.node_lease.remove(0);
        }
    }

    /// True unless the holder knows that the disk's node has no lease.
    pub(crate) fn is_awaited_by(&self, holder: u64) -> bool {
        let inner = self.inner.lock();
        let lag = Duration::from_millis(holder * 7 % 40);
        let mut known = inner.node_lease.iter().rev();
        known
            .find(|(at, _)| *at + lag <= inner.now)
            .is_none_or(|(_, has)| *has)
    }

    /// `holder`, which has not started yet, does not reach the disk.
    pub(crate) fn hide_from(&self, holder: u64) {
        self.inner.lock().cut_off.push(holder);
    }

    /// Makes the disk unreachable for every holder.
    pub(crate) fn disappear(&self) {
        let mut inner = self.inner.lock();
        inner.gone = true;
        inner.losses += 1;
        inner.sweep(|_| true);
    }

    /// Fails the power: the disk disappears, commands in flight may or may not have reached the
    /// cache, and the cache loses what `loss` says.
    pub(crate) fn lose_power(&self, loss: Loss) {
        self.disappear();
        let mut inner = self.inner.lock();
        let inner = &mut *inner;
        inner.silent_until = inner.now;
        inner.media.lose_power(&mut inner.random, loss);
    }

    /// Truncates the disk while it is in use.
    pub(crate) fn cut(&self, blocks: u64) {
        let mut inner = self.inner.lock();
        inner.media.cut(blocks);
        inner.losses += 1;
        for least in inner.least.values_mut() {
            *least = blocks.min(*least);
        }
    }

    /// Restores the size of the disk; the restored part reads as zeroes.
    pub(crate) fn enlarge(&self) {
        self.inner.lock().media.enlarge();
    }

    pub(crate) fn is_cut(&self) -> bool {
        let inner = self.inner.lock();
        inner.media.blocks() < inner.media.full()
    }

    pub(crate) fn reappear(&self) {
        self.inner.lock().gone = false;
    }

    /// Delays all completions until `until`, including those of commands in flight.
    pub(crate) fn fall_silent(&self, until: Nanos) {
        let mut inner = self.inner.lock();
        if inner.silent_until <= inner.now {
            inner.silent_since = inner.now;
        }
        inner.silent_until = until;
        let held = std::mem::take(&mut inner.commands);
        for ((due, number), command) in held {
            // Data of a closed queue is not needed.
            let due = if command.orphan {
                due
            } else {
                due.max(until + Duration::from_nanos(number % 1000))
            };
            inner.commands.insert((due, number), command);
        }
    }

    /// Makes these blocks of the volume unreadable until they are written.
    pub(crate) fn spoil(&self, lba: u64, blocks: u64) {
        let mut inner = self.inner.lock();
        let first = inner.media.format.reserved() + lba;
        inner.bad.extend(first..first + blocks);
    }

    /// Disconnects or reconnects `holder`.
    pub(crate) fn cut_off(&self, holder: u64, off: bool) {
        let mut inner = self.inner.lock();
        inner.cut_off.retain(|other| *other != holder);
        if off {
            inner.cut_off.push(holder);
            inner.losses += 1;
            inner.sweep(|command| command.holder == holder);
        }
    }

    /// Stops all failures; a truncated disk keeps its size.
    pub(crate) fn heal(&self) {
        let mut inner = self.inner.lock();
        inner.gone = false;
        inner.node_lease.clear();
        if let Some(gate) = &mut inner.gate {
            gate.slow = false;
        }
        inner.cut_off.clear();
        inner.bad.clear();
        inner.fault_rates = FaultRates {
            latency: inner.fault_rates.latency,
            ..FaultRates::default()
        };
        inner.silent_until = inner.now;
        // Hanging commands continue.
        let soon = inner.now + Duration::from_millis(1);
        for ((due, number), command) in std::mem::take(&mut inner.commands) {
            inner.commands.insert((due.min(soon), number), command);
        }
    }

    /// Gives `holder` the exclusive use of the disk, unless the disk has reservations. Returns
    /// false if the disk is unreachable.
    pub(crate) fn claim(&self, holder: u64) -> bool {
        let mut inner = self.inner.lock();
        if inner.gone || inner.cut_off.contains(&holder) {
            return false;
        }
        if inner.gate.is_none() && inner.owner != Some(holder) {
            inner.owner = Some(holder);
            inner.sweep(|command| command.holder != holder);
        }
        true
    }
}

/// A block of the volume in which two disks differ, with its value on each.
pub(crate) struct Difference {
    pub block: usize,
    pub of: [(usize, u64); 2],
}

/// The first block of the volume, of this number of blocks, in which reads of the chosen disks
/// return different data.
pub(crate) fn first_difference(
    disks: &[Arc<SimDisk>],
    chosen: &[usize],
    blocks: u64,
) -> Option<Difference> {
    let (first, others) = chosen.split_first()?;
    let first_disk = disks[*first].inner.lock();
    let blocks = blocks as usize;
    let own = &first_disk.media.volume()[..blocks];
    others.iter().find_map(|other| {
        let other_disk = disks[*other].inner.lock();
        let its = &other_disk.media.volume()[..blocks];
        let block = own.iter().zip(its).position(|(a, b)| a != b)?;
        Some(Difference {
            block,
            of: [(*first, own[block]), (*other, its[block])],
        })
    })
}

/// True if the disk is silent, for less than the deadline, and the holder awaits it.
pub(crate) fn is_silent(disks: &[Arc<SimDisk>], name: &str, holder: u64, deadline_ms: u64) -> bool {
    let disk = disks.iter().find(|disk| disk.name == name);
    disk.is_some_and(|disk| {
        let inner = disk.inner.lock();
        let since = inner.now.since(inner.silent_since);
        let is_silent = inner.silent_until > inner.now;
        drop(inner);
        is_silent && since < Duration::from_millis(deadline_ms) && disk.is_awaited_by(holder)
    })
}

impl Inner {
    pub(crate) fn losses(&self) -> u64 {
        self.losses
    }

    /// Records that the holder opened the disk in its present state.
    pub(crate) fn opened_by(&mut self, holder: u64) {
        self.least.insert(holder, self.media.blocks());
    }

    pub(crate) fn least(&self, holder: u64) -> u64 {
        let blocks = self.media.blocks();
        self.least.get(&holder).copied().unwrap_or(blocks)
    }

    /// True when `holder` can open a queue.
    pub(crate) fn reaches(&self, holder: u64) -> bool {
        !self.gone && !self.cut_off.contains(&holder)
    }

    /// Accepts a command. Returns its number, which the completion contains.
    pub(crate) fn submit(&mut self, order: Order) -> u64 {
        self.numbers += 1;
        let number = self.numbers;
        let refused = if !self.reaches(order.holder) {
            Some(Status::Gone)
        } else if self.admits(&order) {
            None
        } else if self.gate.is_some() {
            Some(Status::RESERVATION_CONFLICT)
        } else {
            // A reservation conflict, or a connection that the target ended.
            Some(if self.random.one_in(2) {
                Status::Gone
            } else {
                Status::Nvme {
                    sct: 0,
                    sc: 0x83,
                    dnr: true,
                }
            })
        };
        let latency = self.latency();
        let (status, due) = match refused {
            Some(status) => (status, self.now + Duration::from_micros(1)),
            None => {
                let (status, extra) = self.plan(order.op);
                let due = self.now + latency + extra;
                (status, due.max(self.silent_until))
            }
        };
        self.commands.insert((due, number), order.command(status));
        number
    }

    /// Executes a command synchronously, if the disk supports that and can do it now. Refuses half
    /// of those commands at random.
    pub(crate) fn run_sync(&mut self, order: Order) -> Option<Answer> {
        let its_own = self.reaches(order.holder) && self.admits(&order);
        let ready = its_own && self.silent_until <= self.now;
        if !ready || !self.traits.limits.is_sync || self.random.one_in(2) {
            return None;
        }
        let (status, extra) = self.plan(order.op);
        if extra > Duration::ZERO {
            return None;
        }
        self.numbers += 1;
        let (number, queue) = (self.numbers, order.queue);
        self.finish(number, order.command(status));
        let answers = self.answers.get_mut(&queue)?;
        let at = answers.iter().position(|answer| answer.number == number)?;
        Some(answers.remove(at))
    }

    /// A reservation excludes the writes of other holders, and a claim all their commands.
    fn admits(&self, order: &Order) -> bool {
        match &self.gate {
            Some(gate) => !order.op.is_write() || gate.may_write(order.holder),
            None => self.owner == Some(order.holder),
        }
    }

    pub(crate) fn gate(&mut self) -> Option<&mut Gate> {
        self.gate.as_mut()
    }

    pub(crate) fn has_gate(&self) -> bool {
        self.gate.is_some()
    }

    pub(crate) fn now(&self) -> Nanos {
        self.now
    }

    /// Executes the due requests about reservations. Preempted holders' commands end.
    fn execute_asks(&mut self) {
        let now = self.now;
        while let Some((number, ask)) = self.gate.as_mut().and_then(|gate| gate.take_due(now)) {
            let reached = self.reaches(ask.holder) && self.silent_until <= now;
            let Some(gate) = self.gate.as_mut() else {
                return;
            };
            let outcome = if reached {
                gate.execute(ask)
            } else {
                Err(Status::Gone)
            };
            gate.answer(number, outcome.clone(), now);
            if matches!(ask.request, ReservationRequest::Preempt { .. }) && outcome.is_ok() {
                self.sweep(|command| command.holder != ask.holder);
            }
        }
    }

    fn latency(&mut self) -> Duration {
        let typical = (self.fault_rates.latency.as_nanos() as u64).max(2000);
        let tail = if self.random.one_in(20) { 10 } else { 1 };
        Duration::from_nanos(self.random.within(typical / 2, typical * 2) * tail)
    }

    /// Decides a command's status and its delay.
    fn plan(&mut self, op: Op) -> (Status, Duration) {
        let fault_rates = self.fault_rates;
        let mut happens = |chance: u64| chance > 0 && self.random.below(1000) < chance;
        if happens(fault_rates.hang) {
            let ms = self.random.within(20, 3000);
            return (Status::Ok, Duration::from_millis(ms));
        }
        if happens(fault_rates.retry) {
            return (Status::Retry, Duration::ZERO);
        }
        let (chance, failures): (_, &[Status]) = match op {
            Op::Read => (
                fault_rates.read_error,
                &[Status::ReadError, Status::Integrity, Status::DeviceError],
            ),
            Op::Flush => (fault_rates.flush_error, &[Status::DeviceError]),
            _ => (
                fault_rates.write_error,
                &[Status::WriteError, Status::DeviceError, Status::NoSpace],
            ),
        };
        if happens(chance) {
            (*self.random.pick(failures), Duration::ZERO)
        } else {
            (Status::Ok, Duration::ZERO)
        }
    }

    /// Executes a command as far as its status allows, and completes it.
    fn finish(&mut self, number: u64, mut command: Command) {
        let mut found = Vec::new();
        let mut bad = self.bad.range(command.lba..command.lba + command.blocks);
        if command.op == Op::Read && command.status.is_ok() && bad.next().is_some() {
            command.status = Status::ReadError;
        }
        if command.status.is_ok() && !self.media.holds(command.lba, command.blocks) {
            command.status = Status::OutOfRange;
        }
        match command.status {
            Status::Ok => found = self.carry_out(&command, false),
            Status::Gone | Status::Retry | Status::OutOfRange | Status::Nvme { .. } => {}
            // A failed command may have been executed in part.
            _ => drop(self.carry_out(&command, true)),
        }
        self.show(&command, "");
        if !command.orphan {
            let answers = self.answers.entry(command.queue).or_default();
            answers.push(Answer {
                number,
                status: command.status,
                contents: found,
            });
        }
    }

    /// Executes a command. With `in_part`, each cell may or may not be written.
    fn carry_out(&mut self, command: &Command, in_part: bool) -> Vec<u64> {
        if !self.media.holds(command.lba, command.blocks) {
            return Vec::new();
        }
        let durable = !self.traits.limits.volatile_cache || command.flags.contains(Flags::FUA);
        match command.op {
            Op::Read => {
                let cells = self.media.format.cells_of(command.lba, command.blocks);
                return self.media.read(cells).to_vec();
            }
            Op::Flush if !in_part => self.media.flush(),
            Op::Flush => {}
            Op::Write | Op::WriteZeroes | Op::Unmap => {
                // The disk decides about the contents of deallocated blocks.
                let keeps = command.op == Op::Unmap && !self.traits.limits.unmap_zeroes;
                if !in_part {
                    let written = command.lba..command.lba + command.blocks;
                    self.bad.retain(|block| !written.contains(block));
                }
                let cells = self.media.format.cells_of(command.lba, command.blocks);
                for (index, cell) in cells.enumerate() {
                    if (in_part || keeps) && self.random.one_in(2) {
                        continue;
                    }
                    let content = command.contents.get(index).copied().unwrap_or(0);
                    self.media.write(cell, content, durable);
                }
            }
            op => unreachable!("{op:?} is not offered"),
        }
        Vec::new()
    }

    /// Ends matching commands in flight: each was executed, executed in part, or not executed, and
    /// completes as "gone".
    fn sweep(&mut self, meant: impl Fn(&Command) -> bool) {
        for (key, mut command) in std::mem::take(&mut self.commands) {
            if !meant(&command) {
                self.commands.insert(key, command);
                continue;
            }
            if command.op.is_write() && command.status.is_ok() {
                match self.random.below(3) {
                    0 => {}
                    1 => drop(self.carry_out(&command, false)),
                    _ => drop(self.carry_out(&command, true)),
                }
            }
            command.status = Status::Gone;
            self.show(&command, ", swept");
            let due = self.now + Duration::from_micros(1 + self.random.below(50));
            if !command.orphan {
                self.commands.insert((due, key.1), command);
            }
        }
    }

    /// Prints a command to the watched block, and every flush, to find the cause of a wrong
    /// block.
    fn show(&self, command: &Command, what: &str) {
        let Some(block) = self.watched else { return };
        let Command {
            op, flags, status, ..
        } = command;
        let inside = (command.lba..command.lba + command.blocks).contains(&block);
        if !inside && *op != Op::Flush {
            return;
        }
        let cell = self.media.format.cells(block).start;
        println!(
            "{:>12} {} of holder {} queue {}: {op:?} {flags:?}: {status:?}{what}; it holds {}",
            self.now.0,
            self.name,
            command.holder,
            command.queue,
            self.media.read(cell..cell + 1)[0],
        );
    }

    pub(crate) fn answers(&mut self, queue: u64) -> Vec<Answer> {
        self.answers.remove(&queue).unwrap_or_default()
    }

    pub(crate) fn next_of(&self, queue: u64) -> Option<Nanos> {
        let mut own = self.commands.iter().filter(|(_, c)| c.queue == queue);
        own.next().map(|((due, _), _)| *due)
    }

    /// Tries to end a command early: it may have been executed, in part or not at all. Returns
    /// false if it is too late.
    pub(crate) fn abort(&mut self, number: u64) -> bool {
        let found = self.commands.keys().find(|key| key.1 == number).copied();
        let Some(key) = found.filter(|_| self.random.one_in(2)) else {
            return false;
        };
        let Some(mut command) = self.commands.remove(&key) else {
            return false;
        };
        if command.op.is_write() && command.status.is_ok() && self.random.one_in(2) {
            self.carry_out(&command, true);
        }
        command.status = Status::Aborted;
        self.finish_aborted(number, command);
        true
    }

    fn finish_aborted(&mut self, number: u64, command: Command) {
        let due = self.now + Duration::from_micros(2);
        let status = Status::Aborted;
        let nothing = Command {
            op: Op::Read,
            status,
            blocks: 1,
            ..command
        };
        self.commands.insert((due, number), nothing);
    }

    /// Closes a queue. Writes in flight may still execute, until `linger` has passed.
    pub(crate) fn close(&mut self, queue: u64, linger: Duration) {
        self.answers.remove(&queue);
        for (key, mut command) in std::mem::take(&mut self.commands) {
            if command.queue != queue {
                self.commands.insert(key, command);
                continue;
            }
            command.orphan = true;
            let latest = self.now + linger;
            if command.op.is_write() && self.random.one_in(2) {
                let due = key.0.min(latest);
                self.commands.insert((due, key.1), command);
            }
        }
    }
}
