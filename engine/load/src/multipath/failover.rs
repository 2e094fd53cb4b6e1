//! Verified random I/O over several paths, selected by ANA state as a multipath host does.

use std::collections::VecDeque;
use std::time::Duration;

use nacre_bdev::{Op, Status};
use nacre_nvmf_wire::StatusCode;
use nacre_random::Random;
use nacre_reactor::Nanos;

use super::choice::{Candidate, choose};
use super::compare::{Compare, KeepGoing, one};
use super::contents::Contents;
use super::mount::{Ended, Mount};
use super::pass::PassReport;
use super::record::{Record, TestPhase};
use crate::report::describe;

/// How long a path that refused I/O is not used.
const AVOID: Duration = Duration::from_millis(100);
/// Refusals of one I/O before it counts as failed.
const MOST_REFUSALS: u32 = 300;
/// Attempts to find a unit without an I/O in flight.
const TRIES: u32 = 16;

/// The parameters of the I/O.
#[derive(Debug, Clone, Copy)]
pub struct FailoverJob {
    /// True: overwrite the range with patterns. False: only read.
    pub writes: bool,
    /// Most I/Os in flight, over all paths.
    pub depth: u16,
    /// Most I/Os started per second, over all paths.
    pub rate: u64,
    pub seed: u64,
}

/// The load. The caller repeats [`FailoverLoad::turn`] to run it. An I/O that a path refuses
/// because of its ANA state, or that a lost connection returns, is started again on the best path.
pub struct FailoverLoad {
    mount: Mount,
    job: FailoverJob,
    contents: Contents,
    record: Record,
    random: Random,
    /// I/Os that a path refused: op, unit and refusals.
    refused: VecDeque<(Op, u64, u32)>,
    /// Refusals of I/Os in flight.
    refusals: Vec<(u64, u32)>,
    avoid: Vec<Nanos>,
    began: Nanos,
    started: u64,
    ended: Vec<Ended>,
}

impl FailoverLoad {
    pub fn new(mount: Mount, job: FailoverJob) -> Self {
        let (namespace, range) = mount.geometry();
        let now = mount.now();
        let run = (now.0 ^ job.seed).max(1);
        let paths = mount.names().len();
        Self {
            contents: Contents::new(namespace, range, job.writes, run),
            record: Record::new(paths, now),
            random: Random::new(job.seed),
            refused: VecDeque::new(),
            refusals: Vec::new(),
            avoid: vec![Nanos::ZERO; paths],
            began: now,
            started: 0,
            ended: Vec::new(),
            mount,
            job,
        }
    }

    pub fn mount(&mut self) -> &mut Mount {
        &mut self.mount
    }

    pub fn contents(&self) -> &Contents {
        &self.contents
    }

    pub fn record(&self) -> &Record {
        &self.record
    }

    /// Begins a phase of the record.
    pub fn enter(&mut self, phase: TestPhase) {
        self.record.enter(phase, self.mount.now());
    }

    fn compared(&mut self) -> Compare<'_> {
        Compare {
            mount: &mut self.mount,
            contents: &mut self.contents,
            depth: self.job.depth,
        }
    }

    /// In a test that writes, writes each unit once over the best path. Then compares the paths as
    /// [`FailoverLoad::compare`], and begins a new record. Returns the passes with failures.
    pub fn prepare(&mut self, watch: KeepGoing) -> Vec<PassReport> {
        let mut bad = Vec::new();
        if self.job.writes
            && let Some(path) = self.choice()
        {
            let plan = [one(path, 0..self.mount.units())];
            bad.extend(self.compared().write(&plan, watch));
        }
        bad.extend(self.compare(watch));
        let now = self.mount.now();
        self.record = Record::new(self.avoid.len(), now);
        self.began = now;
        bad.retain(|pass| !pass.is_good());
        bad
    }

    /// Reads each unit over each accessible path. Wrong and unequal units are counted in
    /// [`FailoverLoad::contents`]. Returns the passes with failures.
    pub fn compare(&mut self, watch: KeepGoing) -> Vec<PassReport> {
        let mut bad = Vec::new();
        let mut unequal = Vec::new();
        let paths: Vec<usize> = (0..self.avoid.len())
            .filter(|path| self.mount.paths()[*path].is_accessible())
            .collect();
        let units = self.mount.units();
        for path in &paths {
            let plan = [one(*path, 0..units)];
            let reference = paths.first().copied();
            let (passes, _) = self.compared().read(&plan, reference, &mut unequal, watch);
            bad.extend(passes);
        }
        self.compared().recheck(unequal, &paths, watch);
        self.record.resume(self.mount.now());
        bad.retain(|pass| !pass.is_good());
        bad
    }

    fn candidates(&mut self) -> Vec<Candidate> {
        let avoid = &self.avoid;
        let paths = self.mount.paths().iter_mut().zip(avoid);
        paths
            .map(|(path, avoid_until)| Candidate {
                access: path.access(),
                avoid_until: *avoid_until,
            })
            .collect()
    }

    fn choice(&mut self) -> Option<usize> {
        let now = self.mount.now();
        choose(&self.candidates(), now)
    }

    /// Completes I/Os and starts those that are due; sleeps 50 µs if none completed.
    pub fn turn(&mut self) {
        self.step(true);
    }

    /// Waits for the I/O in flight, and for refused I/Os, which it starts again. Returns the number
    /// of those that did not complete within `limit`.
    pub fn drain(&mut self, limit: Duration) -> usize {
        let begin = self.mount.now();
        while (self.mount.inflight() > 0 || !self.refused.is_empty())
            && self.mount.now().since(begin) < limit
        {
            self.step(false);
        }
        self.mount.inflight() + self.refused.len()
    }

    fn step(&mut self, more: bool) {
        let mut ended = std::mem::take(&mut self.ended);
        self.mount.poll(&mut ended);
        let idle = ended.is_empty();
        let now = self.mount.now();
        for one in ended.drain(..) {
            self.completed(one, now);
        }
        self.ended = ended;
        let (mount, record) = (&mut self.mount, &mut self.record);
        record.tick(now, || mount.access_names());
        if let Some(path) = self.choice() {
            while let Some((op, unit, refusals)) = self.refused.pop_front() {
                if !self.submit(path, op, unit, refusals) {
                    self.refused.push_front((op, unit, refusals));
                    break;
                }
            }
            while more && self.refused.is_empty() && self.is_due(now) {
                let Some((op, unit)) = self.next() else { break };
                if !self.submit(path, op, unit, 0) {
                    self.contents.release(unit);
                    break;
                }
                self.started += 1;
            }
        }
        if idle {
            self.mount.idle_pause();
        }
    }

    fn is_due(&mut self, now: Nanos) -> bool {
        if self.mount.inflight() + self.refused.len() >= usize::from(self.job.depth) {
            return false;
        }
        let rate = u128::from(self.job.rate);
        let due = (now.since(self.began).as_nanos() * rate / 1_000_000_000) as u64 + 1;
        // After a pause the rate goes on; it does not catch up.
        let depth = u64::from(self.job.depth);
        self.started = self.started.max(due.saturating_sub(depth));
        self.started < due
    }

    /// Chooses the next operation, and a unit without an I/O in flight.
    fn next(&mut self) -> Option<(Op, u64)> {
        let op = if self.job.writes && self.random.draw() & 1 == 0 {
            Op::Write
        } else {
            Op::Read
        };
        for _ in 0..TRIES {
            let unit = self.random.below(self.contents.units());
            if self.contents.take(unit) {
                return Some((op, unit));
            }
        }
        None
    }

    fn submit(&mut self, path: usize, op: Op, unit: u64, refusals: u32) -> bool {
        let contents = &self.contents;
        let started = self
            .mount
            .start(path, op, unit, |data| contents.fill(unit, data));
        if started && refusals > 0 {
            self.refusals.push((unit, refusals));
        }
        started
    }

    fn completed(&mut self, one: Ended, now: Nanos) {
        // The preparation left it in flight.
        if one.since < self.began {
            return;
        }
        let earlier = self.refusals.iter().position(|(unit, _)| *unit == one.unit);
        let refusals = earlier.map_or(0, |at| self.refusals.swap_remove(at).1);
        if is_refused(one.status) && refusals < MOST_REFUSALS {
            self.avoid[one.path] = now + AVOID;
            self.record.moved();
            self.refused.push_back((one.op, one.unit, refusals + 1));
            return;
        }
        if one.status.is_ok() {
            self.record.completed(one.path, now, one.took);
            match (one.op, &one.data) {
                (Op::Write, _) => self.contents.wrote(one.unit),
                (_, Some(data)) => self.contents.read(one.unit, data),
                (_, None) => {}
            }
        } else {
            self.record.failed(describe(one.status));
            if one.op == Op::Write {
                self.contents.write_failed(one.unit);
            }
        }
        self.contents.release(one.unit);
    }

    pub fn now(&self) -> Nanos {
        self.mount.now()
    }

    /// Disconnects all paths.
    pub fn finish(self) {
        self.mount.disconnect();
    }
}

/// True if the I/O is to be started again, perhaps on another path. The path may have executed it
/// all the same, as when the connection was lost: a write of the same pattern does no harm then.
fn is_refused(status: Status) -> bool {
    match status {
        Status::Gone | Status::Retry | Status::Aborted => true,
        Status::Nvme { sct, sc, .. } => {
            let code = StatusCode::new(sct, sc);
            [
                StatusCode::ANA_INACCESSIBLE,
                StatusCode::ANA_TRANSITION,
                StatusCode::ANA_PERSISTENT_LOSS,
            ]
            .contains(&code.code())
        }
        _ => false,
    }
}
