//! The report of an RDMA measurement: bandwidth and latency for each message size, in a fixed JSON
//! schema. It also has the histogram that the latencies come from.

use std::time::Duration;

use hdrhistogram::Histogram;
use serde::Serialize;

use crate::params::{Measure, Op};

/// The name and version of the schema of [`Report`]. The number rises when a field changes its
/// meaning or is removed.
pub const SCHEMA: &str = "nacre-rdma-perf/1";

/// The report of one run of the client: all message sizes.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    pub schema: &'static str,
    pub server: String,
    /// The local address of the test; its GID was used.
    pub local: String,
    pub device: String,
    pub port: u8,
    /// The device is emulated by the kernel, or simulated: the results are not those of hardware.
    pub software: bool,
    pub op: Op,
    pub measure: Measure,
    pub queue_pairs: u16,
    /// Most requests in flight on each queue pair. For READs the device may allow fewer than the
    /// test requested.
    pub depth: u16,
    pub verify: bool,
    /// The user ended the run early.
    pub interrupted: bool,
    pub results: Vec<SizeReport>,
}

/// The results of one message size.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SizeReport {
    /// Bytes of a message.
    pub size: u32,
    pub messages: u64,
    pub bytes: u64,
    pub seconds: f64,
    /// GB, 10^9 bytes.
    pub gigabytes_per_second: f64,
    pub messages_per_second: f64,
    pub latency_of: LatencyOf,
    pub latency_ns: Latency,
}

/// The interval that a latency measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LatencyOf {
    /// Time from posting a request to its completion. The data of a READ has then arrived. On
    /// InfiniBand and RoCE the peer's device has acknowledged a SEND or WRITE; on iWARP they may
    /// complete earlier, when TCP has the data.
    PostToCompletion,
    /// Time from posting a message to the arrival of its echo, divided by two.
    HalfRoundTrip,
}

impl LatencyOf {
    pub fn of(op: Op, measure: Measure) -> Self {
        match (op, measure) {
            (Op::Send, Measure::Latency) => Self::HalfRoundTrip,
            _ => Self::PostToCompletion,
        }
    }
}

/// A summary of latencies, in nanoseconds. All values are 0 if none was recorded.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct Latency {
    pub min: u64,
    pub mean: f64,
    pub median: u64,
    pub p99: u64,
    pub p999: u64,
    pub max: u64,
}

/// Longest latency in the histogram.
const LONGEST: Duration = Duration::from_secs(600);

/// A histogram of latencies: precise to 0.1 %, longer ones than 600 s count as 600 s.
pub struct Latencies(Histogram<u64>);

impl Default for Latencies {
    fn default() -> Self {
        let longest = LONGEST.as_nanos() as u64;
        // Three digits: 0.1 %.
        Self(Histogram::new_with_bounds(1, longest, 3).expect("bounds that make sense"))
    }
}

impl Latencies {
    pub fn record(&mut self, time: Duration) {
        self.0.saturating_record(time.as_nanos() as u64);
    }

    pub fn clear(&mut self) {
        self.0.reset();
    }

    pub fn summary(&self) -> Latency {
        if self.0.is_empty() {
            return Latency::default();
        }
        Latency {
            min: self.0.min(),
            mean: self.0.mean(),
            median: self.0.value_at_quantile(0.5),
            p99: self.0.value_at_quantile(0.99),
            p999: self.0.value_at_quantile(0.999),
            max: self.0.max(),
        }
    }
}

impl SizeReport {
    pub fn new(
        size: u32,
        messages: u64,
        time: Duration,
        latency_of: LatencyOf,
        latencies: &Latencies,
    ) -> Self {
        let bytes = messages.saturating_mul(size.into());
        let seconds = time.as_secs_f64();
        let per_second = |count: f64| if seconds > 0.0 { count / seconds } else { 0.0 };
        Self {
            size,
            messages,
            bytes,
            seconds,
            gigabytes_per_second: per_second(bytes as f64 / 1e9),
            messages_per_second: per_second(messages as f64),
            latency_of,
            latency_ns: latencies.summary(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the figures match their names. Method: a run with known values.
    #[test]
    fn figures() {
        let mut latencies = Latencies::default();
        for micros in 1..=1000 {
            latencies.record(Duration::from_micros(micros));
        }
        let of = LatencyOf::of(Op::Read, Measure::Bandwidth);
        let report = SizeReport::new(1 << 20, 1000, Duration::from_millis(500), of, &latencies);
        assert_eq!(report.bytes, 1000 << 20);
        assert!((report.messages_per_second - 2000.0).abs() < 0.01);
        assert!((report.gigabytes_per_second - 2.097_152).abs() < 0.000_001);
        let near = |is: u64, micros: u64| {
            let off = is.abs_diff(micros * 1000);
            assert!(off <= micros, "{is} ns for {micros} us");
        };
        near(report.latency_ns.min, 1);
        near(report.latency_ns.median, 500);
        near(report.latency_ns.p99, 990);
        near(report.latency_ns.p999, 999);
        near(report.latency_ns.max, 1000);
        assert!((report.latency_ns.mean - 500_500.0).abs() < 500.0);
    }

    #[test]
    fn nothing_measured() {
        let report = SizeReport::new(
            64,
            0,
            Duration::ZERO,
            LatencyOf::HalfRoundTrip,
            &Latencies::default(),
        );
        assert_eq!(report.messages_per_second, 0.0);
        assert_eq!(report.latency_ns, Latency::default());
    }
}
