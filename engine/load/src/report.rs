//! The results of a run: the report that `nacre perf` prints as text or as JSON ([`SCHEMA`]), and
//! the counters that it is computed from.

use std::collections::BTreeMap;
use std::time::Duration;

use hdrhistogram::Histogram;
use nacre_bdev::{Op, Status};
use nacre_nvmf::host::Paths;
use serde::Serialize;

use super::job::{Job, Rw, Sizes, Verify};
use super::pattern::{Stamp, Wrong};

/// Version of the JSON output; incremented when a field changes its meaning or is removed.
pub(crate) const SCHEMA: &str = "nacre-perf/1";

/// Largest latency in the histogram.
const LONGEST: Duration = Duration::from_secs(600);

/// The results of a whole run.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    pub schema: &'static str,
    pub target: String,
    pub nsid: u32,
    pub rw: Rw,
    pub mix: u8,
    pub size: Sizes,
    pub depth: u16,
    pub queues: u16,
    pub cores: Vec<usize>,
    pub verify: Verify,
    pub seed: u64,
    /// Duration of the measured part.
    pub seconds: f64,
    /// Processor time of the load threads in the measured part.
    pub cpu_seconds: f64,
    pub iops: f64,
    pub bytes_per_second: f64,
    pub read: Direction,
    pub write: Direction,
    /// Failed I/Os in all phases, by the kind of their status.
    pub errors: BTreeMap<String, u64>,
    pub first_error: Option<IoFailure>,
    /// `None` with [`Verify::Off`].
    pub verification: Option<VerifyReport>,
    #[serde(flatten)]
    pub losses: Losses,
    /// I/Os without a completion at the end.
    pub unfinished: u64,
    /// True if the user ended the run early.
    pub interrupted: bool,
    /// The changes of the transport, if the run had a choice of RDMA and TCP.
    pub paths: Option<PathReport>,
}

/// Losses of connections, and their effect, of all I/O queues.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Losses {
    pub connections_lost: u64,
    /// I/Os sent again.
    pub resent: u64,
}

/// The changes between the transports of an association: RDMA, and TCP as the fallback.
#[derive(Debug, Clone, Serialize)]
pub struct PathReport {
    /// The final transport: `rdma` or `tcp`.
    pub transport: String,
    /// Changes to the fallback.
    pub fallbacks: u64,
    /// Cause of the latest fallback.
    pub fallback_cause: Option<String>,
    /// Changes back to the preferred transport.
    pub returns: u64,
    /// Failed attempts to connect, with connections that ended soon after.
    pub failed_attempts: u64,
    /// Failed probes of the preferred transport.
    pub failed_probes: u64,
    /// Moves of an I/O queue to another transport with no I/O in flight.
    pub moves: u64,
}

impl PathReport {
    pub fn new(paths: &Paths, moves: u64) -> Self {
        let counts = paths.counts();
        Self {
            transport: paths.current().to_string().to_lowercase(),
            fallbacks: counts.fallbacks,
            fallback_cause: counts.fallback_cause.clone(),
            returns: counts.returns,
            failed_attempts: counts.failed_attempts,
            failed_probes: counts.failed_probes,
            moves,
        }
    }
}

/// Results of reads, or of writes.
#[derive(Debug, Clone, Serialize)]
pub struct Direction {
    pub ios: u64,
    pub bytes: u64,
    pub iops: f64,
    pub bytes_per_second: f64,
    pub latency_ns: Latency,
}

/// Latencies in nanoseconds, with three significant digits and at most 600 s; all zero if no I/O
/// was measured.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Latency {
    pub min: u64,
    pub mean: f64,
    pub p50: u64,
    pub p90: u64,
    pub p99: u64,
    #[serde(rename = "p99.9")]
    pub p99_9: u64,
    #[serde(rename = "p99.99")]
    pub p99_99: u64,
    pub max: u64,
}

/// A failed I/O.
#[derive(Debug, Clone, Serialize)]
pub struct IoFailure {
    pub op: Op,
    pub lba: u64,
    pub blocks: u32,
    pub status: String,
}

/// Results of the verification.
#[derive(Debug, Clone, Default, Serialize)]
pub struct VerifyReport {
    pub blocks_written: u64,
    pub blocks_checked: u64,
    /// Blocks that were read and not checked: never written by this run, or a write of them failed.
    pub blocks_unknown: u64,
    pub blocks_wrong: u64,
    pub first_mismatch: Option<Mismatch>,
}

/// A block with unexpected contents.
#[derive(Debug, Clone, Serialize)]
pub struct Mismatch {
    pub lba: u64,
    pub expected: Stamp,
    pub found: Wrong,
}

/// The counters of one worker.
pub(crate) struct Tally {
    pub read: Counted,
    pub write: Counted,
    pub errors: BTreeMap<&'static str, u64>,
    pub first_error: Option<IoFailure>,
    pub verify: VerifyReport,
    /// Duration of the measured part.
    pub measured: Duration,
    /// Processor time of the thread in the measured part.
    pub cpu: Duration,
    pub connections_lost: u64,
    pub resent: u64,
    pub moves: u64,
    pub unfinished: u64,
}

/// I/Os of one direction.
pub(crate) struct Counted {
    pub ios: u64,
    pub bytes: u64,
    pub latency: Histogram<u64>,
}

impl Counted {
    pub(crate) fn new() -> Self {
        let longest = LONGEST.as_nanos() as u64;
        Self {
            ios: 0,
            bytes: 0,
            latency: Histogram::new_with_max(longest, 3).expect("these bounds are possible"),
        }
    }

    #[inline]
    pub(crate) fn count(&mut self, bytes: u64, latency: Duration) {
        self.ios += 1;
        self.bytes += bytes;
        self.latency.saturating_record(latency.as_nanos() as u64);
    }

    fn clear(&mut self) {
        (self.ios, self.bytes) = (0, 0);
        self.latency.reset();
    }

    fn add(&mut self, other: &Self) {
        self.ios += other.ios;
        self.bytes += other.bytes;
        self.latency
            .add(&other.latency)
            .expect("all have the same bounds");
    }

    pub(crate) fn report(&self, seconds: f64) -> Direction {
        let h = &self.latency;
        let at = |quantile| h.value_at_quantile(quantile);
        let latency_ns = if h.is_empty() {
            Latency::default()
        } else {
            Latency {
                min: h.min(),
                mean: h.mean(),
                p50: at(0.5),
                p90: at(0.9),
                p99: at(0.99),
                p99_9: at(0.999),
                p99_99: at(0.9999),
                max: h.max(),
            }
        };
        Direction {
            ios: self.ios,
            bytes: self.bytes,
            iops: per_second(self.ios, seconds),
            bytes_per_second: per_second(self.bytes, seconds),
            latency_ns,
        }
    }
}

fn per_second(count: u64, seconds: f64) -> f64 {
    if seconds > 0.0 {
        count as f64 / seconds
    } else {
        0.0
    }
}

impl Tally {
    pub(crate) fn new() -> Self {
        Self {
            read: Counted::new(),
            write: Counted::new(),
            errors: BTreeMap::new(),
            first_error: None,
            verify: VerifyReport::default(),
            measured: Duration::ZERO,
            cpu: Duration::ZERO,
            connections_lost: 0,
            resent: 0,
            moves: 0,
            unfinished: 0,
        }
    }

    /// Restarts the measurement after the warm-up.
    pub(crate) fn restart(&mut self) {
        self.read.clear();
        self.write.clear();
    }

    #[cold]
    pub(crate) fn failed(&mut self, op: Op, lba: u64, blocks: u32, status: Status) {
        *self
            .errors
            .entry(Status::KIND_NAMES[status.kind()])
            .or_default() += 1;
        self.first_error.get_or_insert_with(|| IoFailure {
            op,
            lba,
            blocks,
            status: describe(status),
        });
    }

    #[cold]
    pub(crate) fn mismatch(&mut self, lba: u64, expected: Stamp, found: Wrong) {
        self.verify.blocks_wrong += 1;
        self.verify.first_mismatch.get_or_insert(Mismatch {
            lba,
            expected,
            found,
        });
    }

    pub(crate) fn add(&mut self, other: Self) {
        self.read.add(&other.read);
        self.write.add(&other.write);
        for (name, count) in other.errors {
            *self.errors.entry(name).or_default() += count;
        }
        self.first_error = self.first_error.take().or(other.first_error);
        let (sum, one) = (&mut self.verify, other.verify);
        sum.blocks_written += one.blocks_written;
        sum.blocks_checked += one.blocks_checked;
        sum.blocks_unknown += one.blocks_unknown;
        sum.blocks_wrong += one.blocks_wrong;
        sum.first_mismatch = sum.first_mismatch.take().or(one.first_mismatch);
        self.measured = self.measured.max(other.measured);
        self.cpu += other.cpu;
        self.connections_lost += other.connections_lost;
        self.resent += other.resent;
        self.moves += other.moves;
        self.unfinished += other.unfinished;
    }

    pub(crate) fn report(self, job: &Job, target: &str, nsid: u32, interrupted: bool) -> Report {
        let seconds = self.measured.as_secs_f64();
        let (read, write) = (self.read.report(seconds), self.write.report(seconds));
        Report {
            schema: SCHEMA,
            target: target.to_owned(),
            nsid,
            rw: job.options.rw,
            mix: job.read_percent(),
            size: job.sizes,
            depth: job.options.depth,
            queues: job.queues,
            cores: job.cores.clone(),
            verify: job.verify,
            seed: job.seed,
            seconds,
            cpu_seconds: self.cpu.as_secs_f64(),
            iops: read.iops + write.iops,
            bytes_per_second: read.bytes_per_second + write.bytes_per_second,
            read,
            write,
            errors: self
                .errors
                .into_iter()
                .map(|(name, count)| (name.to_owned(), count))
                .collect(),
            first_error: self.first_error,
            verification: (job.verify != Verify::Off).then_some(self.verify),
            losses: Losses {
                connections_lost: self.connections_lost,
                resent: self.resent,
            },
            unfinished: self.unfinished,
            interrupted,
            paths: None,
        }
    }
}

impl Report {
    /// True if all I/Os completed without an error, and verification found no wrong block.
    pub fn is_good(&self) -> bool {
        let right = |v: &VerifyReport| v.blocks_wrong == 0;
        self.errors.is_empty()
            && self.unfinished == 0
            && self.verification.as_ref().is_none_or(right)
    }
}

pub(crate) fn describe(status: Status) -> String {
    match status {
        Status::Nvme { sct, sc, dnr } => {
            let code = nacre_nvmf_wire::StatusCode::new(sct, sc);
            if dnr {
                code.with_dnr().to_string()
            } else {
                code.to_string()
            }
        }
        other => Status::KIND_NAMES[other.kind()].replace('_', " "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the counters of several workers add up, and their first failures are kept.
    #[test]
    fn tallies_add_up() {
        let mut sum = Tally::new();
        for (at, micros) in [10u64, 20, 30].into_iter().enumerate() {
            let mut one = Tally::new();
            one.read.count(4096, Duration::from_micros(micros));
            one.write.count(512, Duration::from_micros(micros * 10));
            one.measured = Duration::from_secs(at as u64);
            one.cpu = Duration::from_secs(1);
            one.failed(Op::Write, at as u64, 1, Status::NoSpace);
            sum.add(one);
        }
        assert_eq!((sum.read.ios, sum.read.bytes), (3, 12_288));
        assert_eq!(sum.measured, Duration::from_secs(2));
        assert_eq!(sum.cpu, Duration::from_secs(3));
        assert_eq!(sum.errors["no_space"], 3);
        assert_eq!(sum.first_error.as_ref().unwrap().lba, 0);
        let read = sum.read.report(2.0);
        assert_eq!((read.iops, read.bytes_per_second), (1.5, 6144.0));
        let close = |value: u64, to: u64| value.abs_diff(to) * 1000 <= to;
        assert!(close(read.latency_ns.p50, 20_000) && close(read.latency_ns.max, 30_000));
        sum.restart();
        assert_eq!(sum.read.report(1.0).latency_ns.max, 0);
    }
}
