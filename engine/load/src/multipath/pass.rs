//! A pass: reads or writes each unit (the blocks of one I/O) in order, over chosen paths, and
//! measures each path.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use nacre_bdev::Op;
use serde::Serialize;

use super::mount::Mount;
use crate::report::{Counted, Latency, describe};

/// Time without any completion after which a pass ends, with unfinished I/Os.
const PATIENCE: Duration = Duration::from_secs(40);

/// The units that a pass reads or writes over one path. `path` is an index.
#[derive(Debug, Clone)]
pub(super) struct PassPlan {
    pub path: usize,
    pub units: Range<u64>,
}

/// Results of one path in a pass.
#[derive(Debug, Clone, Serialize)]
pub struct PassReport {
    pub path: String,
    pub op: Op,
    pub ios: u64,
    pub bytes: u64,
    /// Time from the start of the pass to the last completion on this path.
    pub seconds: f64,
    pub bytes_per_second: f64,
    pub latency_ns: Latency,
    /// Failed I/Os by status.
    pub errors: BTreeMap<String, u64>,
    /// I/Os without a completion at the end.
    pub unfinished: u64,
    /// True if the pass ended before all units were started.
    pub interrupted: bool,
}

impl PassReport {
    /// True if the pass covered all its units, and all I/Os completed without an error.
    pub fn is_good(&self) -> bool {
        self.errors.is_empty() && self.unfinished == 0 && !self.interrupted
    }
}

struct PassState {
    plan: PassPlan,
    next: u64,
    inflight: u64,
    counted: Counted,
    errors: BTreeMap<String, u64>,
    seconds: f64,
}

/// Supplies and takes the data of a pass.
pub(super) trait Data {
    /// The data to write to a unit.
    fn fill(&mut self, unit: u64, data: &mut [u8]);
    /// A unit was written.
    fn wrote(&mut self, unit: u64);
    /// A write of a unit failed, or has not completed.
    fn write_failed(&mut self, unit: u64);
    /// A unit was read over a path.
    fn read(&mut self, path: usize, unit: u64, data: &[u8]);
}

impl Mount {
    /// Runs the plans at the same time, with `depth` I/Os in flight each. `watch` is called often;
    /// `false` ends the pass.
    pub(super) fn pass(
        &mut self,
        op: Op,
        plans: &[PassPlan],
        depth: u16,
        data: &mut dyn Data,
        watch: &mut dyn FnMut() -> bool,
    ) -> Vec<PassReport> {
        let course = |plan: &PassPlan| PassState {
            plan: plan.clone(),
            next: plan.units.start,
            inflight: 0,
            counted: Counted::new(),
            errors: BTreeMap::new(),
            seconds: 0.0,
        };
        let mut courses: Vec<PassState> = plans.iter().map(course).collect();
        let bytes = self.unit_bytes();
        let mut ended = Vec::new();
        let begin = self.now();
        let (mut last, mut stopped) = (begin, false);
        loop {
            stopped |= !watch();
            for course in &mut courses {
                while !stopped
                    && course.next < course.plan.units.end
                    && course.inflight < u64::from(depth)
                {
                    let unit = course.next;
                    if !self.start(course.plan.path, op, unit, |to| data.fill(unit, to)) {
                        break;
                    }
                    course.next += 1;
                    course.inflight += 1;
                }
            }
            self.poll(&mut ended);
            let idle = ended.is_empty();
            let now = self.now();
            for one in ended.drain(..) {
                // An I/O that an earlier pass left in flight is not of this one.
                if one.since < begin {
                    continue;
                }
                last = now;
                let of_path = |course: &&mut PassState| course.plan.path == one.path;
                let Some(course) = courses.iter_mut().find(of_path) else {
                    continue;
                };
                course.inflight -= 1;
                course.seconds = now.since(begin).as_secs_f64();
                if !one.status.is_ok() {
                    *course.errors.entry(describe(one.status)).or_default() += 1;
                    if one.op == Op::Write {
                        data.write_failed(one.unit);
                    }
                    continue;
                }
                course.counted.count(bytes, one.took);
                match (one.op, &one.data) {
                    (Op::Write, _) => data.wrote(one.unit),
                    (_, Some(read)) => data.read(one.path, one.unit, read),
                    (_, None) => {}
                }
            }
            let is_over = |course: &PassState| {
                course.inflight == 0 && (stopped || course.next >= course.plan.units.end)
            };
            if courses.iter().all(is_over) || now.since(last) > PATIENCE {
                break;
            }
            if idle {
                self.idle_pause();
            }
        }
        self.writes_in_flight(begin)
            .for_each(|unit| data.write_failed(unit));
        let names = self.names();
        let report = |course: PassState| {
            let direction = course.counted.report(course.seconds);
            PassReport {
                path: names[course.plan.path].clone(),
                op,
                ios: direction.ios,
                bytes: direction.bytes,
                seconds: course.seconds,
                bytes_per_second: direction.bytes_per_second,
                latency_ns: direction.latency_ns,
                errors: course.errors,
                unfinished: course.inflight,
                interrupted: course.next < course.plan.units.end,
            }
        };
        courses.into_iter().map(report).collect()
    }
}
