//! Random operations of several hosts on one pool, with I/O that ends in any order, and crashes.
//!
//! A run is determined by its seed. After each crash the pool is imported, sometimes twice, and
//! every granule of every version is compared with the model.

mod external;
mod parents;
mod removals;

use std::collections::HashMap;

use nacre_random::Random;
use uuid::Uuid;

use super::content::{Value, value};
use super::disk::{ALL_SECTORS, Crash, Disk};
use super::model::{History, Kind, Model, ModelVersion, Number};
use super::op::{Op, Report};
use super::rig::{self, Pending, Rig, identity};
use crate::ids::{Token, VersionId};
use crate::interface::{Answer, Refusal, Request};
use removals::Removal;

const UNITS: u64 = 192;
const RESERVE: u64 = 130;
const VOLUME_UNITS: u64 = 6;
const GRANULES: u64 = VOLUME_UNITS * 4;

pub(super) struct World {
    rig: Rig,
    model: Model,
    random: Random,
    ops: HashMap<Token, Op>,
    next_number: Number,
    next_value: u64,
    seen: usize,
    pub report: Report,
    fails_data: bool,
    slow: Option<Slow>,
    /// Many requests of this run change parents.
    prefers_parents: bool,
    /// Volumes of this run show external devices.
    has_external: bool,
    /// The disks whose state is sure.
    removals: HashMap<Uuid, Removal>,
}

/// I/O that stays in flight while units are freed, or shared, and written again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Slow {
    Reads,
    Data,
}

/// Runs a seed on so many disks. An error describes the fault.
pub(super) fn run(seed: u64, steps: u64, disks: u64) -> Result<Report, String> {
    run_with(seed, steps, disks, false)
}

/// The same, with external devices.
pub(super) fn run_external(seed: u64, steps: u64, disks: u64) -> Result<Report, String> {
    run_with(seed, steps, disks, true)
}

fn run_with(seed: u64, steps: u64, disks: u64, has_external: bool) -> Result<Report, String> {
    let mut random = Random::new(seed);
    let is_volatile = !random.one_in(4);
    let fails_data = random.one_in(3);
    let slow = match random.below(8) {
        0 | 1 => Some(Slow::Reads),
        2 => Some(Slow::Data),
        _ => None,
    };
    let more = random.below(3) * 20;
    let further: Vec<u64> = (1..disks).map(|_| random.within(9, 40)).collect();
    // Some pools are full from the start, and some have a small reserve.
    let (units, reserve) = match seed % 4 {
        1 if has_external => (320, RESERVE),
        2 if has_external => (150, RESERVE),
        3 if has_external => (140, 110),
        _ => (UNITS, RESERVE),
    };
    let mut rig = Rig::create_beside(units, more, reserve, is_volatile, &further);
    while disks > 1
        && random.one_in(2)
        && let Some(addition) = rig.addition()
    {
        let added = rig.run(addition);
        added.map_err(|refusal| format!("adding a disk: {refusal}"))?;
    }
    let mut world = World {
        rig,
        model: Model::new(),
        random,
        ops: HashMap::new(),
        next_number: 1,
        next_value: 1,
        seen: 0,
        report: Report::default(),
        fails_data,
        slow,
        prefers_parents: seed.is_multiple_of(3),
        has_external,
        removals: HashMap::new(),
    };
    for _ in 0..steps {
        world.step()?;
    }
    world.end()?;
    world.report.history = world.rig.disk.history;
    Ok(world.report)
}

impl World {
    fn step(&mut self) -> Result<(), String> {
        match self.random.below(1000) {
            _ if self.is_adopting() && self.random.one_in(24) => self.crash()?,
            0..2 => self.crash()?,
            2..8 if !self.prefers_parents => self.crash()?,
            8..14 => self.rig.pool.checkpoint(),
            14..24 => self.rig.pool.settle(),
            24..26 => self.rig.pool.reclaim(),
            26..320 if self.ops.len() < 10 => self.submit(),
            320..400 => self.begin_read(),
            _ => self.end_one()?,
        }
        if self.rig.pool.leaving().is_some() {
            self.rig.moves = self.random.below(4);
        }
        self.rig.pump();
        self.report.full += u64::from(self.rig.pool.full_writes() > 0);
        self.take_answers()
    }

    /// True when a volume has another parent, and the answer is due.
    fn is_adopting(&self) -> bool {
        let versions = &self.rig.pool.state().versions;
        self.ops.values().any(|op| match op {
            Op::SetParent {
                number, generation, ..
            } => {
                let id = self.rig.find(*number);
                id.is_some_and(|id| versions[&id].generation != *generation)
            }
            _ => false,
        })
    }

    /// Ends an I/O, more often a young one than an old one.
    fn end_one(&mut self) -> Result<(), String> {
        let mut ready = self.rig.ready();
        let is_slow = |at: &usize| match self.rig.pending[*at] {
            Pending::Read { .. } | Pending::Page { .. } | Pending::External { .. } => {
                self.slow == Some(Slow::Reads)
            }
            Pending::Data { .. } => self.slow == Some(Slow::Data),
            _ => false,
        };
        let spares = self.slow.is_some() && !self.random.one_in(100);
        if spares && !ready.iter().all(is_slow) {
            ready.retain(|at| !is_slow(at));
        }
        if ready.is_empty() {
            return Ok(());
        }
        let at = if self.random.one_in(3) {
            *self.random.pick(&ready)
        } else {
            ready[self.random.index(ready.len().min(3))]
        };
        let may_fail = matches!(
            self.rig.pending[at],
            Pending::Data { .. } | Pending::Discard { .. }
        );
        let fails = self.fails_data && may_fail && self.random.one_in(20);
        let Some((tag, found)) = self.rig.end_with(at, fails) else {
            return Ok(());
        };
        let (number, granule) = (tag >> 32, tag & 0xffff_ffff);
        if self.model.versions.contains_key(&number) {
            self.check_read(number, granule, found)
        } else {
            Ok(())
        }
    }

    /// A read may find any value of the time that it took. Reads are long here, so it may find any
    /// value that is not forgotten; only foreign data is certainly wrong.
    fn check_read(&self, number: Number, granule: u64, found: Option<Value>) -> Result<(), String> {
        let family = self.model.versions[&number].family;
        match found {
            Some(value) if super::content::is_of(value, family, granule) => Ok(()),
            // In place, a read beside a write.
            None if self.model.versions[&number].granules[granule as usize].in_flight() => Ok(()),
            found => Err(format!(
                "a read of v{number} granule {granule} found {found:x?}"
            )),
        }
    }

    fn begin_read(&mut self) {
        let Some((number, id)) = self.pick(|_| true) else {
            return;
        };
        let granule = self.random.below(GRANULES);
        self.rig.begin_read(id, granule, number << 32 | granule);
    }

    /// A version that is created and not being deleted.
    fn pick(&mut self, kind: impl Fn(Kind) -> bool) -> Option<(Number, VersionId)> {
        self.pick_among(|version| kind(version.kind))
    }

    fn pick_among(&mut self, fits: impl Fn(&ModelVersion) -> bool) -> Option<(Number, VersionId)> {
        let versions = self.model.versions.iter();
        let versions = versions.filter(|(_, v)| v.is_created && !v.is_deleting && fits(v));
        let numbers: Vec<Number> = versions.map(|(number, _)| *number).collect();
        if numbers.is_empty() {
            return None;
        }
        let number = *self.random.pick(&numbers);
        Some((number, self.rig.find(number).expect("it is created")))
    }

    fn number(&mut self) -> Number {
        self.next_number += 1;
        self.next_number
    }

    fn submit(&mut self) {
        if self.rig.disk.parts.len() > 1 && self.random.one_in(20) {
            return self.remove();
        }
        let versions = self.model.versions.len();
        let volume = self.pick(|kind| kind == Kind::Volume);
        let roll = if self.prefers_parents && self.random.one_in(4) {
            98
        } else {
            self.random.below(100)
        };
        let (token, op) = match (roll, volume) {
            (0..55, Some(volume)) => match self.write(volume) {
                Some(begun) => begun,
                None => return,
            },
            (60..70, Some(volume)) => match self.unmap(volume) {
                Some(begun) => begun,
                None => return,
            },
            (73..76, Some((number, version))) if self.rig.disk.parts.len() > 1 => {
                let since = self.model.tick();
                self.rig.flush_of_host(version);
                self.model.flushed_of(number, since);
                return;
            }
            (70..76, _) => {
                let since = self.model.tick();
                (self.rig.submit(Request::Flush), Op::Flush { since })
            }
            (76..84, Some(volume)) if versions < 9 => self.snapshot(volume),
            (84..88, _) if versions < 9 => {
                let Some((source, id)) = self.pick(|kind| kind == Kind::Snapshot) else {
                    return;
                };
                let number = self.number();
                let family = self.model.versions[&source].family;
                self.model
                    .add(number, family, Kind::Volume, GRANULES as usize);
                let from = self.model.versions[&source].granules.clone();
                self.model.versions.get_mut(&number).unwrap().granules = from;
                let request = Request::Clone {
                    source: id,
                    identity: identity(number),
                    thick: false,
                };
                (self.rig.submit(request), Op::Clone { number })
            }
            (88..97, _) if versions > 2 => {
                let Some((number, version)) = self.pick(|_| true) else {
                    return;
                };
                let is_parent = |op: &Op| matches!(op, Op::SetParent { parent, .. } if *parent == Some(version));
                if self.ops.values().any(is_parent) {
                    return;
                }
                self.model.versions.get_mut(&number).unwrap().is_deleting = true;
                let request = Request::Delete { version };
                (self.rig.submit(request), Op::Delete { number })
            }
            (97, Some((number, version))) if self.random.one_in(2) => {
                let inflate = Request::Inflate { version };
                (self.rig.submit(inflate), Op::Inflate { number })
            }
            (97..99, Some((number, version))) => match self.change_of_parent(number, version) {
                Some(begun) => begun,
                None => return,
            },
            (56..60, Some(volume)) => match self.restore(volume) {
                Some(begun) => begun,
                None => return,
            },
            (99, _) if self.random.one_in(4) => {
                // One disk joins at a time: the keeper takes care of that.
                let is_quiet = !self.ops.values().any(|op| matches!(op, Op::Other));
                let addition = self.rig.addition().filter(|_| is_quiet);
                let growth = addition.unwrap_or_else(|| self.rig.growth());
                (self.rig.submit(growth), Op::Other)
            }
            (55, _) => (self.rig.submit(Request::Check), Op::Check),
            (99, Some((_, version))) => {
                let units = VOLUME_UNITS + self.random.below(3);
                let request = Request::Resize { version, units };
                (self.rig.submit(request), Op::Other)
            }
            _ if versions < 3 && self.has_external => self.create_beside_devices(),
            _ if versions < 3 => {
                let number = self.number();
                self.model
                    .add(number, number & 0xfff, Kind::Volume, GRANULES as usize);
                let request = Request::Create {
                    identity: identity(number),
                    units: VOLUME_UNITS,
                    thick: self.random.one_in(3),
                };
                (self.rig.submit(request), Op::Create { number })
            }
            _ => return,
        };
        self.ops.insert(token, op);
    }

    /// Granules of one place of a volume that have no write in flight.
    fn granules(&mut self, number: Number, whole: bool) -> Option<Vec<u64>> {
        // Often the same places: that is where records meet.
        let place = if self.random.one_in(2) {
            0
        } else {
            self.random.below(VOLUME_UNITS)
        };
        let first = if whole { 0 } else { self.random.below(4) };
        let count = if whole {
            4
        } else {
            self.random.within(1, 4 - first)
        };
        let granules: Vec<u64> = (first..first + count).map(|g| place * 4 + g).collect();
        let version = &self.model.versions[&number];
        let mut busy = granules
            .iter()
            .map(|g| version.granules[*g as usize].in_flight());
        (!busy.any(|busy| busy)).then_some(granules)
    }

    fn write(&mut self, (number, id): (Number, VersionId)) -> Option<(Token, Op)> {
        let granules = self.granules(number, false)?;
        let family = self.model.versions[&number].family;
        let mut values = Vec::new();
        for granule in &granules {
            self.next_value += 1;
            let value = value(family, *granule, self.next_value);
            self.model.begin_write(number, *granule, value);
            values.push(((granule % 4) as u32, value));
        }
        let fua = self.random.one_in(6);
        let token = self.rig.write(id, granules[0] / 4, &values, fua);
        let op = Op::Write {
            number,
            granules,
            fua,
        };
        Some((token, op))
    }

    fn unmap(&mut self, (number, version): (Number, VersionId)) -> Option<(Token, Op)> {
        // A unit without granules is freed.
        let whole = self.random.one_in(2);
        let granules = if self.random.one_in(3) {
            self.granules_to_trim(number)?
        } else {
            self.granules(number, whole)?
        };
        for granule in &granules {
            self.model.begin_write(number, *granule, 0);
        }
        let token = self.rig.submit(Request::Unmap {
            version,
            first: granules[0],
            granules: granules.len() as u64,
        });
        Some((token, Op::Unmap { number, granules }))
    }

    /// Restores a volume without writes in flight to a snapshot of its family.
    fn restore(&mut self, (number, version): (Number, VersionId)) -> Option<(Token, Op)> {
        let volume = &self.model.versions[&number];
        let family = volume.family;
        if volume.granules.iter().any(History::in_flight) {
            return None;
        }
        let (snapshot, source) = self.pick(|kind| kind == Kind::Snapshot)?;
        let snapshot = self.model.versions[&snapshot].clone();
        if snapshot.family != family {
            return None;
        }
        for (granule, history) in snapshot.granules.iter().enumerate() {
            let value = history.last();
            self.model.begin_write(number, granule as u64, value);
        }
        let token = self.rig.submit(Request::Restore { version, source });
        Some((token, Op::Restore { number }))
    }

    fn snapshot(&mut self, volume: (Number, VersionId)) -> (Token, Op) {
        let mut volumes = vec![volume];
        if let Some(other) = self.pick(|kind| kind == Kind::Volume)
            && other != volume
            && self.random.one_in(3)
        {
            volumes.push(other);
        }
        let mut cuts = Vec::new();
        let mut wanted = Vec::new();
        for (of, id) in volumes {
            let number = self.number();
            let family = self.model.versions[&of].family;
            self.model
                .add(number, family, Kind::Snapshot, GRANULES as usize);
            cuts.push((of, number));
            wanted.push((id, identity(number)));
        }
        (
            self.rig.submit(Request::Snapshot(wanted)),
            Op::Snapshot { cuts },
        )
    }

    fn take_answers(&mut self) -> Result<(), String> {
        while self.seen < self.rig.answers.len() {
            let (token, result) = self.rig.answers[self.seen].clone();
            self.seen += 1;
            if let Some(op) = self.ops.remove(&token) {
                self.answered(op, result)?;
            }
        }
        self.take_left()
    }

    fn answered(&mut self, op: Op, result: Result<Answer, Refusal>) -> Result<(), String> {
        if result == Err(Refusal::Held) {
            return Err("the pool is held".to_owned());
        }
        let done = result.is_ok();
        self.report.refused += u64::from(!done);
        match op {
            Op::Write {
                number,
                granules,
                fua,
            } => {
                self.report.writes += u64::from(done);
                // A write in place that failed may have reached some granules.
                for granule in granules {
                    self.model.end_write(number, granule, done, done && fua);
                }
            }
            Op::Unmap { number, granules } => {
                for granule in granules {
                    self.model.end_write(number, granule, done, false);
                }
            }
            Op::Flush { since } => self.model.flushed(since),
            Op::Create { number } | Op::Clone { number } => {
                self.report.clones += 1;
                self.created(number, done);
            }
            Op::Snapshot { cuts } => {
                for (of, number) in cuts {
                    self.created(number, done);
                    if !done {
                        continue;
                    }
                    self.report.snapshots += 1;
                    let values = self.contents(number)?;
                    self.model.settle_on(number, &values);
                    if self.model.versions.contains_key(&of) {
                        self.model.check_cut(of, &values)?;
                    }
                }
            }
            Op::Delete { number } => {
                self.report.deletions += u64::from(done);
                if done {
                    drop(self.model.versions.remove(&number))
                } else {
                    self.model.versions.get_mut(&number).unwrap().is_deleting = false
                }
            }
            Op::Restore { number } => {
                self.report.restores += u64::from(done);
                for granule in 0..GRANULES {
                    self.model.end_write(number, granule, done, done);
                }
            }
            Op::SetParent { number, .. } => {
                self.report.adoptions += u64::from(done);
                for granule in 0..GRANULES {
                    self.model.end_write(number, granule, done, done);
                }
            }
            Op::ReadOnly { number } => {
                self.report.read_only += u64::from(done);
                // A deletion that began meanwhile may have hidden it.
                if done && self.rig.find(number).is_some() {
                    let values = self.contents(number)?;
                    for (granule, value) in values.iter().enumerate() {
                        self.model
                            .check(number, granule as u64, Some(*value), false)?;
                    }
                    self.model.fix(number, &values);
                    self.model.versions.get_mut(&number).unwrap().kind = Kind::Snapshot;
                }
            }
            Op::Check => match result {
                Ok(Answer::Checked(report)) => {
                    self.report.checks += 1;
                    if report.repaired > 0 || !report.findings.is_empty() {
                        return Err(format!("a check of a sound pool: {report:?}"));
                    }
                }
                other => return Err(format!("a check: {other:?}")),
            },
            Op::Inflate { .. } => self.report.inflations += u64::from(done),
            Op::Decouple { .. } => self.report.decouplings += u64::from(done),
            Op::Removal { disk, keeps: false } if done => {
                self.removals.insert(disk, Removal::Begun);
            }
            Op::Removal { .. } | Op::Other => {}
        }
        Ok(())
    }

    fn created(&mut self, number: Number, done: bool) {
        if done {
            self.model.versions.get_mut(&number).unwrap().is_created = true
        } else {
            drop(self.model.versions.remove(&number))
        }
    }

    fn contents(&self, number: Number) -> Result<Vec<Value>, String> {
        let id = self
            .rig
            .find(number)
            .ok_or_else(|| format!("v{number} is lost"))?;
        let values = (0..GRANULES).map(|granule| match self.rig.read(id, granule) {
            Ok(Some(value)) => Ok(value),
            found => Err(format!("v{number} granule {granule}: {found:x?}")),
        });
        values.collect()
    }

    /// The daemon dies or the power fails; the pool is imported.
    fn crash(&mut self) -> Result<(), String> {
        self.report.crashes += 1;
        let crash = if self.random.one_in(2) {
            Crash::Daemon
        } else {
            Crash::Power
        };
        self.take_left_before_crash()?;
        let disk = self.crashed(crash);
        let mut lost_power = crash == Crash::Power;
        let import = |disk: Disk| rig::import(disk).map_err(|error| format!("import: {error}"));
        self.report.discarded += self.rig.pool.discarded_units();
        let (mut rig, report) = import(disk)?;
        self.report.dropped += report.dropped;
        self.rig = rig;
        // The import itself may be interrupted, at any of its writes.
        while self.random.one_in(3) {
            self.rig.pump();
            for _ in 0..self.random.below(30) {
                if let Some(at) = self.rig.ready().first().copied() {
                    self.rig.end(at);
                }
            }
            let crash = if self.random.one_in(2) {
                Crash::Daemon
            } else {
                Crash::Power
            };
            lost_power |= crash == Crash::Power;
            self.take_left_before_crash()?;
            let disk = self.crashed(crash);
            (rig, _) = import(disk)?;
            self.rig = rig;
        }
        self.check_removals()?;
        self.report.disks = self.rig.pool.superblock().disks.disks().len() as u64;
        self.ops.clear();
        self.seen = 0;
        self.compare(lost_power)
    }

    fn crashed(&mut self, crash: Crash) -> Disk {
        let count = self.rig.disk.losable(crash);
        let percent = *self.random.pick(&[0, 20, 50, 80, 100]);
        let mut keep: Vec<u8> = Vec::new();
        for _ in 0..count {
            keep.push(
                match (self.random.percent(percent), self.random.one_in(8)) {
                    (_, true) => self.random.draw() as u8,
                    (true, _) => ALL_SECTORS,
                    (false, _) => 0,
                },
            );
        }
        self.rig.crashed(crash, |at| keep[at])
    }

    /// Compares every version with the model, which takes over the values found.
    fn compare(&mut self, lost_power: bool) -> Result<(), String> {
        let numbers: Vec<Number> = self.model.versions.keys().copied().collect();
        for number in numbers {
            let version = &self.model.versions[&number];
            let (is_created, is_deleting) = (version.is_created, version.is_deleting);
            if self.rig.find(number).is_none() {
                if is_created && !is_deleting {
                    return Err(format!("v{number} is lost"));
                }
                self.model.versions.remove(&number);
                continue;
            }
            let values = self.contents(number)?;
            // A version whose creation was not answered may lack data, but has none of others.
            for (granule, value) in values.iter().enumerate() {
                let granule = granule as u64;
                let family = self.model.versions[&number].family;
                if !super::content::is_of(*value, family, granule) {
                    return Err(format!("foreign data in v{number}: {value:#x}"));
                }
                if is_created {
                    self.model
                        .check(number, granule, Some(*value), lost_power)?;
                }
            }
            self.model.settle_on(number, &values);
            let version = self.model.versions.get_mut(&number).unwrap();
            version.is_created = true;
            version.is_deleting = false;
        }
        let findings = self.rig.pool.check();
        if findings.is_empty() {
            Ok(())
        } else {
            Err(format!("after an import: {findings:?}"))
        }
    }

    /// Lets the pool come to rest, and checks everything.
    fn end(&mut self) -> Result<(), String> {
        self.rig.moves = 4;
        let mut idle = 0;
        for _ in 0..20_000 {
            self.rig.pump();
            self.take_answers()?;
            if self.rig.pending.is_empty() {
                idle += 1;
                if idle > 4 || self.rig.pool.leaving().is_none() {
                    break;
                }
                continue;
            }
            idle = 0;
            self.end_one()?;
        }
        if self.rig.pool.leaving().is_some() {
            return Err(format!(
                "a disk does not leave: {:?}",
                self.rig.pool.leaving()
            ));
        }
        self.take_answers()?;
        if !self.rig.pending.is_empty() || !self.ops.is_empty() {
            return Err(format!("stuck: {:?} {:?}", self.rig.pending, self.ops));
        }
        self.check_devices()?;
        let findings = self.rig.pool.check();
        if !findings.is_empty() {
            return Err(format!("at rest: {findings:?}"));
        }
        let numbers: Vec<Number> = self.model.versions.keys().copied().collect();
        for number in numbers {
            for (granule, value) in self.contents(number)?.into_iter().enumerate() {
                self.model
                    .check(number, granule as u64, Some(value), false)?;
            }
        }
        Ok(())
    }
}
