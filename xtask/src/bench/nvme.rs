//! `cargo xtask bench nvme`: Nacre's NVMe driver against the kernel's, on one emulated drive of the
//! virtual machine.
//!
//! The load is 4 KiB random reads by one job on one core; fio with io_uring and `nacre perf`
//! alternate (`tests/vm/bench-nvme.sh`). The drive returns zeroes and has no backing file, so that
//! the measurement compares the drivers and not the emulator's threads. A second part counts the
//! driver's instructions per I/O on a simulated drive, outside the virtual machine.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;

use super::{Line, VmOptions, guest_results, instructions, print_table};
use crate::vm::{self, Machine, Vm};
use crate::{process, setup};

#[derive(Args)]
pub(crate) struct Options {
    #[command(flatten)]
    vm: VmOptions,
    /// Only count instructions; skip the virtual machine, which takes minutes.
    #[arg(long)]
    no_vm: bool,
}

/// Goals by queue depth, as multiples of the kernel's rate. SPDK's driver reaches 1.55 and 1.86 in
/// the same measurement.
const GOALS: [(u32, f64); 2] = [(1, 1.6), (32, 1.9)];

const BOOT_ALLOWANCE: Duration = Duration::from_secs(300);
/// Seconds of a measurement beyond its load: one second of warm-up, and in an emulated machine the
/// start of the program and the binding of the drive to the other driver.
const MORE_SECONDS: u64 = 1 + 14;

pub(super) fn run(root: &Path, options: &Options) -> Result<ExitCode> {
    let rounds = options.vm.rounds;
    ensure!(rounds > 0, "without a round there is nothing to compare");
    count(root)?;
    if options.no_vm {
        return Ok(ExitCode::SUCCESS);
    }
    let nacre = vm::fast_nacre(root, options.vm.nacre.as_deref())?;
    let vm = Vm::prepare()?.with_parallel_cpus();
    let out = vm::scratch(root, "bench")?;
    println!("virtual machine: {}; {rounds} rounds", vm.describe());
    let line = format!(
        "NACRE={} bash {} {} {rounds} {} >{} 2>&1",
        vm::quoted(&nacre),
        vm::quoted(&root.join("tests/vm/bench-nvme.sh")),
        vm::quoted(&out),
        options.vm.seconds,
        vm::quoted(&out.join("log")),
    );
    let measurements = rounds * 2 * GOALS.len() as u64;
    let limit =
        BOOT_ALLOWANCE + Duration::from_secs(measurements * (options.vm.seconds + MORE_SECONDS));
    if let Some(load) = busy() {
        println!(
            "note: this machine is busy (load {load:.1}), which takes more from a driver that polls than from one that \
             sleeps: measure again when it is not"
        );
    }
    let end = vm
        .start(root, &line, &out, &out, Machine::EmptyDrives)?
        .wait(limit);
    vm::clean_drives(&out);
    let results = guest_results(&out, &end?)?;
    let (lines, means) = read(&results)?;
    print_table("nacre", "kernel", &lines);
    println!(
        "\n{:<28} {:>12} {:>12}",
        "mean microseconds", "nacre", "kernel"
    );
    for (line, mean) in lines.iter().zip(&means) {
        println!(
            "{:<28} {:>12.1} {:>12.1}",
            line.name,
            mean.ours(),
            mean.limit()
        );
    }
    let missed = lines.iter().filter(|line| !line.reached()).count();
    println!(
        "\n{} of {} goals reached",
        lines.len() - missed,
        lines.len()
    );
    Ok(match missed {
        0 => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    })
}

/// The load average of the last minute, if it is higher than this program's own build explains.
fn busy() -> Option<f64> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let text = std::fs::read_to_string("/proc/loadavg").ok()?;
    let load: f64 = text.split_whitespace().next()?.parse().ok()?;
    (load > 1.5 * cores as f64).then_some(load)
}

/// Reads lines of `figure kernel|nacre DEPTH ROUND IOPS MICROSECONDS`. Returns one line per depth
/// of I/O per second, and one of latencies.
fn read(results: &str) -> Result<(Vec<Line>, Vec<Line>)> {
    let mut figures = BTreeMap::new();
    for text in results.lines().filter(|line| *line != "done") {
        let words: Vec<&str> = text.split_whitespace().collect();
        let [
            "figure",
            side @ ("kernel" | "nacre"),
            depth,
            round,
            iops,
            mean,
        ] = *words
        else {
            bail!("no figure: {text:?}");
        };
        let number = |text: &str| {
            let number = text
                .parse::<f64>()
                .ok()
                .filter(|n| n.is_finite() && *n > 0.0);
            number.with_context(|| format!("no number: {text:?}"))
        };
        let depth: u32 = depth
            .parse()
            .with_context(|| format!("no depth: {text:?}"))?;
        let round: u32 = round
            .parse()
            .with_context(|| format!("no round: {text:?}"))?;
        let figure = (number(iops)?, number(mean)?);
        if figures
            .insert((depth, round, side == "nacre"), figure)
            .is_some()
        {
            bail!("measured twice: {text:?}");
        }
    }
    let (mut rates, mut means) = (Vec::new(), Vec::new());
    for (depth, goal) in GOALS {
        let line = || Line {
            name: format!("4 KiB random read, depth {depth}"),
            goal,
            rounds: Vec::new(),
        };
        let (mut rate, mut mean) = (line(), line());
        let mine = figures.range((depth, 0, false)..(depth + 1, 0, false));
        let mine: Vec<_> = mine.collect();
        for pair in mine.chunks(2) {
            let [(at, kernel), (with, nacre)] = pair else {
                bail!("a figure without its pair at depth {depth}");
            };
            ensure!(
                at.1 == with.1 && !at.2 && with.2,
                "a figure without its pair at depth {depth}, round {}",
                at.1
            );
            rate.rounds.push((nacre.0, kernel.0));
            mean.rounds.push((nacre.1, kernel.1));
        }
        ensure!(!rate.rounds.is_empty(), "depth {depth} was not measured");
        rates.push(rate);
        means.push(mean);
    }
    Ok((rates, means))
}

const BUILD_LIMIT: Duration = Duration::from_secs(1800);
/// Callgrind runs about fifty times slower than native code.
const COUNT_LIMIT: Duration = Duration::from_secs(300);
const FEW: u32 = 3_200;
const MANY: u32 = 19_200;

/// The driver's entry points, as callgrind names them.
const SUBMIT: &str = "<nacre_bdev_nvme::channel::Channel as nacre_bdev::queue::Queue>::submit";
const POLL: &str = "<nacre_bdev_nvme::channel::Channel as nacre_bdev::queue::Queue>::poll";
/// Register accesses execute the simulated drive, so their instructions are subtracted.
const REGISTER: &str =
    "<nacre_bdev_nvme_sim::function::SimFunction as nacre_bdev_nvme::function::Function>::write32";

/// Prints the instructions per I/O in submit and in poll.
fn count(root: &Path) -> Result<()> {
    setup::ensure(instructions::NEEDS)?;
    let program = build(root)?;
    // Fails if the function was renamed: its instructions would no longer be subtracted.
    each(&program, "read", 1, &[REGISTER])?;
    println!(
        "{:<28} {:>8} {:>8} {:>8}",
        "instructions per I/O", "submit", "poll", "both"
    );
    for (rw, depth) in [("read", 1), ("read", 32), ("write", 1), ("write", 32)] {
        let submit = each(&program, rw, depth, &[SUBMIT])?;
        let poll = each(&program, rw, depth, &[POLL, REGISTER])?;
        let name = format!("4 KiB {rw}, depth {depth}");
        println!(
            "{name:<28} {submit:>8.0} {poll:>8.0} {:>8.0}",
            submit + poll
        );
    }
    let idle = each(&program, "read", 0, &[POLL, REGISTER])?;
    println!("instructions of a poll while nothing completes: {idle:.0}");
    Ok(())
}

fn build(root: &Path) -> Result<PathBuf> {
    let package = "nacre-bdev-nvme-sim";
    let arguments = [
        "--profile",
        "dist",
        "--locked",
        "--package",
        package,
        "--example",
        "count",
    ];
    setup::cargo_build(root, &arguments, BUILD_LIMIT)?;
    Ok(crate::target_dir(root).join("dist/examples/count"))
}

/// Instructions per I/O inside the first of `functions`, without those inside the other ones, which
/// the first one calls.
fn each(program: &Path, rw: &str, depth: u32, functions: &[&str]) -> Result<f64> {
    let few = total(program, rw, depth, FEW, functions)?;
    let many = total(program, rw, depth, MANY, functions)?;
    let each = (many - few) / f64::from(MANY - FEW);
    ensure!(
        each > 0.0,
        "nothing was counted in {functions:?}: has it another name?"
    );
    Ok(each)
}

fn total(program: &Path, rw: &str, depth: u32, ios: u32, functions: &[&str]) -> Result<f64> {
    let mut command = Command::new("valgrind");
    // Callgrind toggles collection at entry and exit of each function, which excludes the inner
    // functions.
    let toggles = functions
        .iter()
        .map(|name| format!("--toggle-collect={name}"));
    let out = std::env::temp_dir().join(format!("nacre-callgrind-{}", std::process::id()));
    command
        .args(["--tool=callgrind", "--quiet"])
        .arg(format!("--callgrind-out-file={}", out.display()))
        .args(toggles)
        .arg(program)
        .args([rw, &depth.to_string(), &ios.to_string()]);
    process::capture(&mut command, COUNT_LIMIT)?;
    instructions::total_of(&out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_paired_by_depth_and_round() {
        let text = "figure kernel 1 1 100 10\nfigure kernel 32 1 200 160\nfigure nacre 1 1 170 6\n\
                    figure nacre 32 1 300 100\nfigure kernel 1 2 100 10\nfigure nacre 1 2 150 7\ndone\n";
        let (rates, means) = read(text).unwrap();
        assert_eq!(rates[0].rounds, [(170.0, 100.0), (150.0, 100.0)]);
        assert_eq!(rates[1].rounds, [(300.0, 200.0)]);
        assert_eq!((rates[0].goal, rates[1].goal), (1.6, 1.9));
        assert!(!rates[1].reached());
        assert_eq!(means[0].rounds, [(6.0, 10.0), (7.0, 10.0)]);
    }

    #[test]
    fn missing_or_malformed_figures_are_refused() {
        let whole = "figure kernel 1 1 1 1\nfigure nacre 1 1 1 1\nfigure kernel 32 1 1 1\nfigure nacre 32 1 1 1\n";
        assert!(read(whole).is_ok());
        let lines: Vec<&str> = whole.lines().collect();
        for at in 0..lines.len() {
            let mut fewer = lines.clone();
            fewer.remove(at);
            assert!(read(&fewer.join("\n")).is_err(), "without {}", lines[at]);
            let twice = format!("{whole}{}\n", lines[at]);
            assert!(read(&twice).is_err(), "twice {}", lines[at]);
        }
        for line in [
            "figure kernel 1 1 null 1",
            "figure spdk 1 2 1 1",
            "figure kernel 1 2 0 1",
        ] {
            assert!(read(&format!("{whole}{line}\n")).is_err(), "{line}");
        }
    }
}
