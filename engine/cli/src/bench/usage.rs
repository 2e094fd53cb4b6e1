//! Measures the processor time of a process and of this machine during a measurement.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use nacre_engine_bench::{machine_ticks, process_ticks};

/// Pause between two samples. The kernel counts in steps of about 10 ms.
const EVERY: Duration = Duration::from_millis(50);

/// The first and the last sample of a measurement.
pub(super) struct Usage {
    process: Option<PathBuf>,
    samples: Option<(UsageSample, UsageSample)>,
}

#[derive(Clone, Copy)]
struct UsageSample {
    at: Instant,
    process: Option<u64>,
    machine: Option<u64>,
}

impl Usage {
    /// `pid`: the process of the target, if it is on this machine.
    pub(super) fn of(pid: Option<u32>) -> Self {
        Self {
            process: pid.map(|pid| PathBuf::from(format!("/proc/{pid}/stat"))),
            samples: None,
        }
    }

    /// Takes a sample, unless the last one is younger than [`EVERY`].
    pub(super) fn sample(&mut self) {
        let at = Instant::now();
        if let Some((_, last)) = &self.samples
            && at.duration_since(last.at) < EVERY
        {
            return;
        }
        let process = self.process.as_ref();
        let sample = UsageSample {
            at,
            process: process.and_then(|path| process_ticks(&fs::read_to_string(path).ok()?)),
            machine: fs::read_to_string("/proc/stat")
                .ok()
                .and_then(|stat| machine_ticks(&stat)),
        };
        let first = self.samples.map_or(sample, |(first, _)| first);
        self.samples = Some((first, sample));
    }

    /// Processor seconds per second of the process; `None` if not known.
    pub(super) fn process_cores(&self) -> Option<f64> {
        self.cores(|sample| sample.process)
    }

    /// Processor seconds per second of the whole machine.
    pub(super) fn machine_cores(&self) -> Option<f64> {
        self.cores(|sample| sample.machine)
    }

    fn cores(&self, of: fn(&UsageSample) -> Option<u64>) -> Option<f64> {
        let (first, last) = self.samples.as_ref()?;
        let elapsed = last.at.duration_since(first.at).as_secs_f64();
        let ticks = of(last)?.checked_sub(of(first)?)? as f64;
        let per_second = rustix::param::clock_ticks_per_second() as f64;
        (elapsed > 0.0).then(|| ticks / per_second / elapsed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a busy process has about one core; an unknown process has no figure.
    #[test]
    fn a_busy_process() {
        let mut usage = Usage::of(Some(std::process::id()));
        let mut unknown = Usage::of(None);
        let until = Instant::now() + Duration::from_millis(300);
        while Instant::now() < until {
            usage.sample();
            unknown.sample();
        }
        assert!(usage.process_cores().unwrap() > 0.1);
        assert!(usage.machine_cores().unwrap() > 0.1);
        assert_eq!(unknown.process_cores(), None);
    }
}
