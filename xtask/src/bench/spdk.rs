//! `cargo xtask bench spdk`: Nacre's target against SPDK's, over TCP on loopback. Both targets use
//! the same core, and the load runs on another core: SPDK's initiator, then `nacre perf`.
//!
//! Both daemons run for the whole benchmark and get the same configuration by the same calls.
//! SIGSTOP pauses the daemon that is not measured, because SPDK's reactor never sleeps.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;

use super::target::{ADDRESS, Disk, HOST_CORE_MASK, LimitTarget, NQN, Target, WARM_UP, number};
use super::tcp::build;
use super::{Line, print_table};
use crate::process;

#[derive(Args)]
pub(crate) struct Options {
    /// The folder of an SPDK build, with build/bin/nvmf_tgt and build/bin/spdk_nvme_perf.
    #[arg(long)]
    peer: PathBuf,
    /// Interleaved rounds; the median counts.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Seconds per measurement.
    #[arg(long, default_value_t = 2)]
    seconds: u32,
    /// Size of the malloc bdev in MiB. The default exceeds the last-level cache, like most RAM
    /// disks.
    #[arg(long, default_value_t = 256)]
    disk_mib: u64,
    /// Measure only lines whose name contains this.
    #[arg(long)]
    filter: Option<String>,
    /// Measure only with this load.
    #[arg(long)]
    load: Option<Load>,
    /// Also measure a target that only counts bytes: no target can be faster under these loads.
    #[arg(long)]
    limit: bool,
    /// Measure this `nacre` instead of building one.
    #[arg(long)]
    nacre: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Load {
    Spdk,
    Nacre,
}

impl Load {
    const ALL: [Self; 2] = [Self::Spdk, Self::Nacre];

    fn name(self) -> &'static str {
        match self {
            Self::Spdk => "spdk_nvme_perf",
            Self::Nacre => "nacre perf",
        }
    }

    /// The goal for the geometric mean of the lines. From depth 32 on, the core of SPDK's initiator
    /// is the bottleneck.
    fn goal(self) -> f64 {
        match self {
            Self::Spdk => 1.25,
            Self::Nacre => 1.7,
        }
    }
}

/// No line may be slower than the peer.
const LINE_GOAL: f64 = 1.0;

pub(super) struct Case {
    pub name: &'static str,
    pub rw: &'static str,
    pub size: u32,
    /// Per queue.
    pub depth: u32,
    pub queues: u32,
}

pub(super) const fn case(name: &'static str, rw: &'static str, size: u32, depth: u32) -> Case {
    Case {
        name,
        rw,
        size,
        depth,
        queues: 1,
    }
}

const CASES: &[Case] = &[
    case("4 KiB read, depth 1", "randread", 4096, 1),
    case("4 KiB read, depth 32", "randread", 4096, 32),
    case("4 KiB read, depth 128", "randread", 4096, 128),
    case("4 KiB write, depth 1", "randwrite", 4096, 1),
    case("4 KiB write, depth 128", "randwrite", 4096, 128),
    case("4 KiB 70/30, depth 64", "randrw", 4096, 64),
    case("128 KiB read, depth 16", "randread", 131072, 16),
    case("128 KiB write, depth 16", "randwrite", 131072, 16),
    Case {
        queues: 16,
        ..case("4 KiB read, 16 x 8", "randread", 4096, 8)
    },
    case("512 B read, depth 128", "randread", 512, 128),
];

/// Percentage of reads in `randrw`.
const MIX: &str = "70";

pub(super) fn run(root: &Path, options: &Options) -> Result<ExitCode> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    if cores < 2 {
        bail!("this takes two cores, one for each side; this machine has {cores}");
    }
    let spdk = Spdk::find(&options.peer)?;
    let nacre = match &options.nacre {
        Some(path) => path.clone(),
        None => build(root, "nacre-engine-cli", "nacre")?,
    };
    let disk = Disk {
        block_bytes: 512,
        blocks: options.disk_mib * (1 << 20) / 512,
    };
    let targets = [
        Target::start_with(&nacre, disk)?,
        Target::start_spdk(&nacre, &spdk.target, spdk.memory, disk)?,
    ];
    let limit_target = if options.limit {
        let program = build(root, "nacre-benches", "limit-target")?;
        Some(LimitTarget::start(&program, &targets[0])?)
    } else {
        None
    };
    targets.iter().for_each(Target::pause);
    for target in &targets {
        target.resume();
        target.fill("1")?;
        target.pause();
    }
    let cases: Vec<&Case> = (CASES.iter())
        .filter(|case| (options.filter.as_deref()).is_none_or(|part| case.name.contains(part)))
        .collect();
    let mut tables: Vec<Table> = (Load::ALL.into_iter())
        .filter(|load| options.load.is_none_or(|only| only == *load))
        .map(|load| Table::new(load, &cases))
        .collect();
    for round in 1..=options.rounds {
        println!("round {round} of {}", options.rounds);
        for (at, case) in cases.iter().enumerate() {
            for table in &mut tables {
                let measure = |target: &Target, port: &str| match table.load {
                    Load::Spdk => spdk.measure_at(port, "", &[], case, options.seconds),
                    Load::Nacre => measure_at(target, port, &[], case, options.seconds),
                };
                let mut pair = [0.0; 2];
                // Alternate which target is first.
                let order = if round % 2 == 0 { [1, 0] } else { [0, 1] };
                for side in order {
                    let target = &targets[side];
                    target.resume();
                    pair[side] = measure(target, target.port())?;
                    target.pause();
                }
                table.lines[at].rounds.push((pair[0], pair[1]));
                if let Some(limit) = &limit_target {
                    targets[0].resume();
                    let most = measure(&targets[0], limit.port())?;
                    targets[0].pause();
                    table.limits[at].rounds.push((most, pair[1]));
                }
            }
        }
    }

    let mut reached = true;
    for table in &tables {
        reached &= table.print();
    }
    Ok(if reached {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// The figures of one load.
struct Table {
    load: Load,
    /// Nacre beside SPDK.
    lines: Vec<Line>,
    /// The limit target beside SPDK.
    limits: Vec<Line>,
}

impl Table {
    fn new(load: Load, cases: &[&Case]) -> Self {
        let lines = |goal| {
            let line = |case: &&Case| Line {
                name: case.name.into(),
                goal,
                rounds: Vec::new(),
            };
            cases.iter().map(line).collect()
        };
        Self {
            load,
            lines: lines(LINE_GOAL),
            limits: lines(0.0),
        }
    }

    /// Prints the figures. True if all goals are reached.
    fn print(&self) -> bool {
        println!("\nload: {}", self.load.name());
        print_table("nacre", "SPDK's", &self.lines);
        let (mean, goal) = (geometric_mean(&self.lines), self.load.goal());
        let missed = if mean < goal { " -" } else { "" };
        println!("geometric mean {mean:.2}, goal {goal:.2}{missed}");
        if self.limits.iter().any(|line| !line.rounds.is_empty()) {
            print_table("limit", "SPDK's", &self.limits);
            let limit = geometric_mean(&self.limits);
            println!("geometric mean {limit:.2}: no target reaches more under this load");
        }
        self.lines.iter().all(Line::reached) && mean >= goal
    }
}

fn geometric_mean(lines: &[Line]) -> f64 {
    let logs: f64 = lines.iter().map(|line| line.ratio().ln()).sum();
    (logs / lines.len() as f64).exp()
}

/// SPDK's programs.
pub(super) struct Spdk {
    pub target: PathBuf,
    perf: PathBuf,
    /// Memory options, the same for both programs.
    pub memory: &'static [&'static str],
}

impl Spdk {
    pub(super) fn find(folder: &Path) -> Result<Self> {
        let program = |name: &str| {
            let path = folder.join("build/bin").join(name);
            if path.is_file() {
                Ok(path)
            } else {
                bail!(
                    "{} is missing: --peer takes the folder of an SPDK build",
                    path.display()
                )
            }
        };
        let free = free_hugepages_mib();
        let memory: &[&str] = if free >= 2 * HUGE_MIB {
            &["-s", "1024"]
        } else {
            &["--no-huge", "-s", "1024"]
        };
        println!("huge pages: {free} MiB free, so SPDK starts with {memory:?}");
        Ok(Self {
            target: program("nvmf_tgt")?,
            perf: program("spdk_nvme_perf")?,
            memory,
        })
    }

    /// Measures at a port; `host` is the rest of the transport id, `more` are further arguments.
    pub(super) fn measure_at(
        &self,
        port: &str,
        host: &str,
        more: &[&str],
        case: &Case,
        seconds: u32,
    ) -> Result<f64> {
        let mut command = Command::new(&self.perf);
        command
            .args(["-c", HOST_CORE_MASK, "--disable-sq-flow-control"])
            .args(self.memory)
            .arg("-r")
            .arg(format!(
                "trtype:TCP adrfam:IPv4 traddr:{ADDRESS} trsvcid:{port} subnqn:{NQN}{host}"
            ))
            .args(more)
            // spdk_nvme_perf spreads the depth over the queues.
            .args(["-q", &(case.depth * case.queues).to_string()])
            .args(["-P", &case.queues.to_string()])
            .args(["-o", &case.size.to_string()])
            .args(["-w", case.rw, "-t", &seconds.to_string()]);
        if case.rw == "randrw" {
            command.args(["-M", MIX]);
        }
        let out = process::capture(&mut command, limit(seconds))?;
        total(&out).with_context(|| format!("no total in what spdk_nvme_perf printed: {out:?}"))
    }
}

/// Huge pages per SPDK program, in MiB.
const HUGE_MIB: u64 = 1024;

fn free_hugepages_mib() -> u64 {
    let info = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let field = |name: &str| -> u64 {
        let line = info.lines().find_map(|line| line.strip_prefix(name));
        let number = line.and_then(|rest| rest.split_whitespace().next());
        number.and_then(|text| text.parse().ok()).unwrap_or(0)
    };
    field("HugePages_Free:") * field("Hugepagesize:") / 1024
}

/// I/O per second: the first number in the `Total` line of spdk_nvme_perf's output.
fn total(out: &str) -> Option<f64> {
    let line = out.lines().find(|line| line.starts_with("Total"))?;
    let (_, numbers) = line.split_once(':')?;
    numbers.split_whitespace().next()?.parse().ok()
}

/// Measures with `nacre perf` at a port of the target; `more` are further arguments.
pub(super) fn measure_at(
    target: &Target,
    port: &str,
    more: &[&str],
    case: &Case,
    seconds: u32,
) -> Result<f64> {
    let [size, depth, queues] = [case.size, case.depth, case.queues].map(|n| n.to_string());
    let seconds_text = seconds.to_string();
    let load = [
        "--rw",
        case.rw,
        "--mix",
        MIX,
        "--size",
        &size,
        "--depth",
        &depth,
        "--queues",
        &queues,
        "--warmup",
        WARM_UP,
        "--seconds",
        &seconds_text,
    ];
    let answer = target.load_at(port, &[&load, more].concat(), limit(seconds))?;
    number(&answer, &["iops"])
}

fn limit(seconds: u32) -> Duration {
    Duration::from_secs(u64::from(seconds) * 4 + 30)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_total_is_the_first_number_of_its_line() {
        let out = "Device Information : IOPS MiB/s\nTCP (addr:127.0.0.1) NSID 1 from core 1: 7.0 1.0\n\
                   Total                     :  114003.50     445.33       8.71       7.12     312.40\n";
        assert_eq!(total(out), Some(114003.5));
        assert_eq!(total("Initialization complete."), None);
    }

    #[test]
    fn the_geometric_mean_is_of_the_ratios() {
        let line = |ours, limit| Line {
            name: "x".into(),
            goal: 1.0,
            rounds: vec![(ours, limit)],
        };
        let mean = geometric_mean(&[line(1.0, 2.0), line(8.0, 1.0)]);
        assert!((mean - 2.0).abs() < 1e-9);
    }
}
