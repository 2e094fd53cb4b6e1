//! `cargo xtask bench …`: measurements against a limit or a peer, in the same run.
//!
//! The speed of a machine moves by tens of percent from minute to minute. So the sides of a
//! comparison are measured alternately, each round gives a ratio, and the result is the median of
//! the ratios; absolute figures are for orientation only.

mod idle;
mod instructions;
mod nvme;
mod pool;
mod spdk;
mod target;
mod tcp;
mod tls;
mod vm;
mod volume;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::{Args, Subcommand};
use serde_json::{Value, json};

use crate::process::End;

#[derive(Subcommand)]
pub(crate) enum Benchmark {
    /// Nacre's target and host over loopback, against bare sockets that move the same bytes.
    Tcp(tcp::Options),
    /// Nacre's target against SPDK's on loopback, under SPDK's initiator and under `nacre perf`.
    Spdk(spdk::Options),
    /// Nacre over TLS against Nacre in clear on loopback; with `--peer`, also against SPDK's target
    /// over TLS.
    Tls(tls::Options),
    /// Replicated volumes against the disk below them, over TCP; and partial beside full resync.
    Volume(LoopbackOptions),
    /// Volumes of a pool against the bare device below it, and times of snapshots, import and
    /// deletion; with `--spdk` and `--vm` also against SPDK's lvols and the kernel's dm-thin.
    Pool(pool::Options),
    /// Nacre against the kernel's target, both under the stock kernel's initiator, in the virtual
    /// machine.
    Vm(vm::TcpOptions),
    /// Like `vm`, over RDMA on one soft-RoCE device; also Nacre over RDMA against Nacre over TCP.
    Rdma(VmOptions),
    /// Nacre's NVMe driver against the kernel's, on one emulated drive in the virtual machine; and
    /// its instructions per I/O.
    Nvme(nvme::Options),
}

#[derive(Args)]
pub(crate) struct VmOptions {
    /// Interleaved rounds; the median counts.
    #[arg(long, default_value_t = 5)]
    rounds: u64,
    /// Seconds per measurement.
    #[arg(long, default_value_t = 3)]
    seconds: u64,
    /// Measure this `nacre` instead of building one.
    #[arg(long)]
    nacre: Option<PathBuf>,
}

#[derive(Args)]
pub(crate) struct LoopbackOptions {
    /// Interleaved rounds; the median counts.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Seconds per measurement.
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// Measure only lines whose name contains this.
    #[arg(long)]
    filter: Option<String>,
    /// Measure this `nacre` instead of building one.
    #[arg(long)]
    nacre: Option<PathBuf>,
    /// Write the figures to this file as JSON.
    #[arg(long)]
    json: Option<PathBuf>,
}

pub(crate) fn run(root: &Path, what: &Benchmark) -> Result<ExitCode> {
    match what {
        Benchmark::Tcp(options) => tcp::run(root, options),
        Benchmark::Spdk(options) => spdk::run(root, options),
        Benchmark::Tls(options) => tls::run(root, options),
        Benchmark::Volume(options) => volume::run(root, options),
        Benchmark::Pool(options) => pool::run(root, options),
        Benchmark::Vm(options) => vm::run_tcp(root, options),
        Benchmark::Rdma(options) => vm::run_rdma(root, options),
        Benchmark::Nvme(options) => nvme::run(root, options),
    }
}

/// The median. Of an even number of values it is the lower of the two in the middle, so that it
/// favours no side.
fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted
        .get(sorted.len().saturating_sub(1) / 2)
        .copied()
        .unwrap_or(f64::NAN)
}

/// The figures that a guest's script wrote to the folder. Without its last line, it did not finish.
fn guest_results(out: &Path, end: &End) -> Result<String> {
    let results = std::fs::read_to_string(out.join("results")).unwrap_or_default();
    if !results.lines().any(|line| line == "done") {
        let log = std::fs::read_to_string(out.join("log")).unwrap_or_default();
        bail!(
            "the guest did not finish ({end}); see {}\n{log}",
            out.display()
        );
    }
    Ok(results)
}

/// One line of a comparison: pairs of (ours, the limit's) figures, one pair per round.
struct Line {
    name: String,
    /// The ratio to reach; 0 for lines without a goal.
    goal: f64,
    rounds: Vec<(f64, f64)>,
}

impl Line {
    fn ratio(&self) -> f64 {
        median(
            &self
                .rounds
                .iter()
                .map(|(ours, limit)| ours / limit)
                .collect::<Vec<_>>(),
        )
    }

    fn ours(&self) -> f64 {
        median(
            &self
                .rounds
                .iter()
                .map(|(ours, _)| *ours)
                .collect::<Vec<_>>(),
        )
    }

    fn limit(&self) -> f64 {
        median(
            &self
                .rounds
                .iter()
                .map(|(_, limit)| *limit)
                .collect::<Vec<_>>(),
        )
    }

    fn reached(&self) -> bool {
        self.ratio() >= self.goal
    }

    fn json(&self) -> Value {
        json!({
            "name": self.name, "ratio": self.ratio(), "goal": self.goal,
            "nacre": self.ours(), "limit": self.limit(), "rounds": self.rounds,
        })
    }
}

fn print_table(name: &str, limit_name: &str, lines: &[Line]) {
    println!(
        "\n{:<28} {:>12} {:>12} {:>7} {:>6}   rounds",
        "requests/s", name, limit_name, "ratio", "goal"
    );
    for line in lines {
        let rounds: Vec<String> = line
            .rounds
            .iter()
            .map(|(ours, limit)| format!("{:.2}", ours / limit))
            .collect();
        let goal = match line.goal {
            0.0 => String::new(),
            goal => format!("{goal:.2}"),
        };
        println!(
            "{:<28} {:>12.0} {:>12.0} {:>7.2} {:>6} {} {}",
            line.name,
            line.ours(),
            line.limit(),
            line.ratio(),
            goal,
            if line.reached() { " " } else { "-" },
            rounds.join(" "),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ratio_is_the_median_of_the_rounds_and_not_the_ratio_of_the_medians() {
        let line = Line {
            name: "x".into(),
            goal: 0.8,
            rounds: vec![(50.0, 100.0), (90.0, 100.0), (160.0, 200.0)],
        };
        assert_eq!(line.ratio(), 0.8);
        assert_eq!(line.ours(), 90.0);
        assert!(line.reached());
    }

    #[test]
    fn the_median_of_an_even_number_is_the_lower_one() {
        assert_eq!(median(&[4.0, 1.0, 3.0, 2.0]), 2.0);
        assert!(median(&[]).is_nan());
    }
}
