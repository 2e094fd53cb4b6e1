//! Records I/Os per second and path, and finds the longest pause without a completion in each
//! phase.

use std::collections::BTreeMap;
use std::time::Duration;

use nacre_reactor::Nanos;
use serde::Serialize;

/// A part of a failover test.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TestPhase {
    /// The ANA states are as before the test.
    Before,
    /// One listener is set to ANA Inaccessible.
    Withdrawn,
    /// The ANA states are restored.
    After,
}

impl TestPhase {
    pub const ALL: [Self; 3] = [Self::Before, Self::Withdrawn, Self::After];

    pub fn name(self) -> &'static str {
        match self {
            Self::Before => "before",
            Self::Withdrawn => "withdrawn",
            Self::After => "after",
        }
    }
}

/// One second of a test; longer if [`Record::tick`] was not called in time.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Second {
    /// Seconds since the start.
    pub second: u64,
    pub phase: TestPhase,
    /// Completed I/Os of each path.
    pub ios: Vec<u64>,
    /// Refusals of I/Os by a path, after which the I/Os were started again.
    pub moved: u64,
    pub errors: u64,
    pub longest_pause_ms: f64,
    pub longest_latency_ms: f64,
    /// ANA state of each path at the end of the second: see [`access_name`](super::access_name).
    pub access: Vec<&'static str>,
}

/// Counters of one path in one phase.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct PathTotals {
    pub ios: u64,
    /// First and last completion, in milliseconds since the start of the phase.
    pub first_ms: Option<f64>,
    pub last_ms: Option<f64>,
}

/// Counters of one phase.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PhaseReport {
    pub phase: TestPhase,
    pub seconds: f64,
    pub paths: Vec<PathTotals>,
    /// Refused I/Os that were started again.
    pub moved: u64,
    /// Failed I/Os.
    pub errors: u64,
    /// Longest time without a completion on any path.
    pub longest_pause_ms: f64,
}

/// The I/Os, pauses and errors of a test, by second, phase and path.
#[derive(Debug)]
pub struct Record {
    begin: Nanos,
    phase_begin: Nanos,
    /// The previous completion, or the time from which I/O was wanted.
    last: Nanos,
    now: Second,
    seconds: Vec<Second>,
    phases: Vec<PhaseReport>,
    /// Failed I/Os by status.
    pub errors: BTreeMap<String, u64>,
}

fn millis(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}

impl Record {
    /// Begins with [`TestPhase::Before`]. `paths` is the number of paths.
    pub fn new(paths: usize, now: Nanos) -> Self {
        let phase = TestPhase::Before;
        Self {
            begin: now,
            phase_begin: now,
            last: now,
            now: Self::second(0, phase, paths),
            seconds: Vec::new(),
            phases: vec![Self::phase(phase, paths)],
            errors: BTreeMap::new(),
        }
    }

    fn second(second: u64, phase: TestPhase, paths: usize) -> Second {
        Second {
            second,
            phase,
            ios: vec![0; paths],
            moved: 0,
            errors: 0,
            longest_pause_ms: 0.0,
            longest_latency_ms: 0.0,
            access: Vec::new(),
        }
    }

    fn phase(phase: TestPhase, paths: usize) -> PhaseReport {
        PhaseReport {
            phase,
            seconds: 0.0,
            paths: vec![PathTotals::default(); paths],
            moved: 0,
            errors: 0,
            longest_pause_ms: 0.0,
        }
    }

    fn current(&mut self) -> &mut PhaseReport {
        self.phases.last_mut().expect("there is a first one")
    }

    /// Ends the current phase and begins `phase`.
    pub fn enter(&mut self, phase: TestPhase, now: Nanos) {
        self.pause(now);
        let paths = self.now.ios.len();
        self.current().seconds = now.since(self.phase_begin).as_secs_f64();
        self.phases.push(Self::phase(phase, paths));
        self.phase_begin = now;
        self.now.phase = phase;
    }

    /// Counts a successful I/O over `path` with the latency `took`.
    pub fn completed(&mut self, path: usize, now: Nanos, took: Duration) {
        self.pause(now);
        self.last = now;
        self.now.ios[path] += 1;
        self.now.longest_latency_ms = self.now.longest_latency_ms.max(millis(took));
        let at = millis(now.since(self.phase_begin));
        let totals = &mut self.current().paths[path];
        totals.ios += 1;
        totals.first_ms.get_or_insert(at);
        totals.last_ms = Some(at);
    }

    /// Counts a refused I/O, which is started again.
    pub fn moved(&mut self) {
        self.now.moved += 1;
        self.current().moved += 1;
    }

    /// Counts a failed I/O. `error` names its status.
    pub fn failed(&mut self, error: String) {
        self.now.errors += 1;
        self.current().errors += 1;
        *self.errors.entry(error).or_default() += 1;
    }

    /// Updates the longest pauses with the time since the last completion.
    fn pause(&mut self, now: Nanos) {
        let pause = millis(now.since(self.last));
        self.now.longest_pause_ms = self.now.longest_pause_ms.max(pause);
        let longest = &mut self.current().longest_pause_ms;
        *longest = longest.max(pause);
    }

    /// Ends the second if it is over; `access` has the state of each path.
    pub fn tick(&mut self, now: Nanos, access: impl FnOnce() -> Vec<&'static str>) {
        let elapsed = now.since(self.begin).as_secs();
        if elapsed > self.now.second {
            self.pause(now);
            let next = Self::second(elapsed, self.now.phase, self.now.ios.len());
            let mut second = std::mem::replace(&mut self.now, next);
            second.access = access();
            self.seconds.push(second);
        }
    }

    /// Restarts the clock of pauses after work that was no I/O of this test.
    pub fn resume(&mut self, now: Nanos) {
        self.last = now;
    }

    /// The ended seconds.
    pub fn seconds(&self) -> &[Second] {
        &self.seconds
    }

    /// The phases; the current one ends at `now`.
    pub fn phases(&self, now: Nanos) -> Vec<PhaseReport> {
        let mut phases = self.phases.clone();
        if let Some(last) = phases.last_mut() {
            last.seconds = now.since(self.phase_begin).as_secs_f64();
        }
        phases
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// Goal: I/Os count for their second, path and phase, and a pause over the end of a second or
    /// of a phase is not lost.
    #[test]
    fn seconds_and_pauses() {
        let at = |ms: u64| Nanos(ms * MS);
        let took = Duration::from_micros(500);
        let mut record = Record::new(2, at(0));
        let access = || vec!["optimized", "non-optimized"];
        for ms in [10, 20, 30] {
            record.completed(0, at(ms), took);
        }
        record.tick(at(999), access);
        assert!(record.seconds().is_empty());
        record.tick(at(1000), access);
        record.enter(TestPhase::Withdrawn, at(1200));
        record.moved();
        record.completed(1, at(1500), took);
        record.tick(at(2001), access);
        record.failed("write_error".into());
        record.enter(TestPhase::After, at(2002));
        record.completed(0, at(2010), took);
        let seconds = record.seconds();
        assert_eq!(
            (seconds[0].ios.clone(), seconds[0].phase),
            (vec![3, 0], TestPhase::Before)
        );
        assert_eq!(seconds[0].longest_pause_ms, 970.0);
        assert_eq!(seconds[1].ios, [0, 1]);
        assert_eq!((seconds[1].moved, seconds[1].longest_pause_ms), (1, 1470.0));
        assert_eq!(seconds[1].access, ["optimized", "non-optimized"]);
        let phases = record.phases(at(3002));
        assert_eq!(phases.len(), 3);
        assert_eq!(phases[0].longest_pause_ms, 1170.0);
        assert_eq!(phases[1].paths[1].first_ms, Some(300.0));
        assert_eq!(phases[1].paths[0], PathTotals::default());
        assert_eq!((phases[1].errors, phases[1].moved), (1, 1));
        assert_eq!((phases[1].seconds, phases[2].seconds), (0.802, 1.0));
        assert_eq!(phases[2].paths[0].last_ms, Some(8.0));
        assert_eq!(record.errors["write_error"], 1);
    }

    /// Goal: seconds without any call of `tick` leave no false entries.
    #[test]
    fn a_long_stop_is_one_second() {
        let mut record = Record::new(1, Nanos(0));
        record.tick(Nanos(5500 * MS), || vec!["optimized"]);
        assert_eq!(record.seconds().len(), 1);
        assert_eq!(record.seconds()[0].longest_pause_ms, 5500.0);
        record.resume(Nanos(5500 * MS));
        record.tick(Nanos(6100 * MS), Vec::new);
        assert_eq!(record.seconds()[1].second, 5);
        assert_eq!(record.seconds()[1].longest_pause_ms, 600.0);
    }
}
