//! `cargo xtask bench tcp`: Nacre over TCP on loopback, one reactor on one core and `nacre perf` on
//! another, against the limit program (`benches/src/limit.rs`). The limit program moves the same
//! bytes per request between the same two cores with bare sockets.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use serde_json::Value;

use super::target::{
    ADDRESS, HOST_CORE, LimitTarget, NQN, PORT, TARGET_CORE, Target, WARM_UP, number,
};
use super::{Line, LoopbackOptions, idle, instructions, print_table};
use crate::process;
use crate::setup;

#[derive(Args)]
pub(crate) struct Options {
    #[command(flatten)]
    loopback: LoopbackOptions,
    /// Also measure a target that only counts bytes: the most that any target reaches under
    /// `nacre perf`, beside bare sockets.
    #[arg(long)]
    limit: bool,
}

const BUILD_LIMIT: Duration = Duration::from_secs(1800);

struct Case {
    name: &'static str,
    rw: &'static str,
    size: u32,
    depth: u32,
    connections: u32,
    /// The part of the disk that is read or written.
    range: &'static str,
    goal: f64,
}

/// The size of the limit program's buffers, which stay in the CPU's private cache. With this range
/// Nacre's data does too, so the ratio compares the data paths and not main memory.
const CACHED: &str = "512k";
/// The whole disk. Whether it stays in the shared cache depends on the load of other cores.
const WHOLE: &str = "16m";

const fn case(name: &'static str, rw: &'static str, size: u32, depth: u32, goal: f64) -> Case {
    Case {
        name,
        rw,
        size,
        depth,
        connections: 1,
        range: CACHED,
        goal,
    }
}

const CASES: &[Case] = &[
    case("4 KiB read, depth 1", "randread", 4096, 1, 0.85),
    case("4 KiB read, depth 128", "randread", 4096, 128, 0.75),
    case("4 KiB write, depth 128", "randwrite", 4096, 128, 0.80),
    case("128 KiB read, depth 16", "randread", 131072, 16, 0.95),
    case("128 KiB write, depth 16", "randwrite", 131072, 16, 0.95),
];

/// Data from memory. No goals, because the limit program does not access memory.
const MEMORY: &[Case] = &[
    Case {
        range: WHOLE,
        ..case("4 KiB read, 128, all over", "randread", 4096, 128, 0.0)
    },
    Case {
        range: WHOLE,
        ..case("4 KiB write, 128, all over", "randwrite", 4096, 128, 0.0)
    },
];

/// One connection with 256 requests in flight, and 64 connections with 4 each.
const ONE: Case = case("4 KiB read, 1 x 256", "randread", 4096, 256, 0.0);
const MANY: Case = Case {
    connections: 64,
    depth: 4,
    ..case("4 KiB read, 64 x 4", "randread", 4096, 4, 0.85)
};

pub(super) fn run(root: &Path, options: &Options) -> Result<ExitCode> {
    let with_limit_target = options.limit;
    let options = &options.loopback;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    if cores < 2 {
        bail!("this takes two cores, one for each side; this machine has {cores}");
    }
    let limit = build(root, "nacre-benches", "limit")?;
    let nacre = match &options.nacre {
        Some(path) => path.clone(),
        None => build(root, "nacre-engine-cli", "nacre")?,
    };
    let wanted = |name: &str| {
        options
            .filter
            .as_deref()
            .is_none_or(|part| name.contains(part))
    };

    let target = Target::start(&nacre)?;
    target.fill("1")?;
    let limit_target = if with_limit_target {
        let program = build(root, "nacre-benches", "limit-target")?;
        Some(LimitTarget::start(&program, &target)?)
    } else {
        None
    };
    let line = |name: &str, goal| Line {
        name: name.into(),
        goal,
        rounds: Vec::new(),
    };
    let cases: Vec<&Case> = CASES
        .iter()
        .chain(MEMORY)
        .filter(|case| wanted(case.name))
        .collect();
    let mut lines: Vec<Line> = (cases.iter())
        .map(|case| line(case.name, case.goal))
        .collect();
    // Nacre's loopback sockets are not paced. If the system's are, also compare with unpaced bare
    // sockets.
    let mut unpaced: Vec<Line> = cases.iter().map(|case| line(case.name, 0.0)).collect();
    let mut most: Vec<Line> = cases.iter().map(|case| line(case.name, 0.0)).collect();
    let paces = system_paces();
    let mut many = line(MANY.name, MANY.goal);
    // Without goals: the cost of spreading requests over connections, for both sides.
    let mut spread = line("nacre, 64 x 4", 0.0);
    let mut bare_spread = line("bare sockets, 64 x 4", 0.0);
    for round in 1..=options.rounds {
        println!("round {round} of {}", options.rounds);
        for (at, case) in cases.iter().enumerate() {
            let bare = measure_limit(&limit, case, &[], options.seconds)?;
            let ours = measure(&target, target.port(), case, options.seconds)?;
            lines[at].rounds.push((ours, bare));
            if let Some(limit_target) = &limit_target {
                let rate = measure(&target, limit_target.port(), case, options.seconds)?;
                most[at].rounds.push((rate, bare));
            }
            if paces {
                let bare = measure_limit(&limit, case, &["--unpaced"], options.seconds)?;
                unpaced[at].rounds.push((ours, bare));
            }
        }
        if wanted(MANY.name) {
            let one = measure(&target, target.port(), &ONE, options.seconds)?;
            let ours = measure(&target, target.port(), &MANY, options.seconds)?;
            let bare_one = measure_limit(&limit, &ONE, &[], options.seconds)?;
            let bare = measure_limit(&limit, &MANY, &[], options.seconds)?;
            many.rounds.push((ours, bare));
            spread.rounds.push((ours, one));
            bare_spread.rounds.push((bare, bare_one));
        }
    }
    let idle_is_quiet = if wanted("idle") {
        let idle_hosts = build(root, "nacre-benches", "idle-hosts")?;
        idle::measure(&idle_hosts, target.pid(), &format!("{ADDRESS}:{PORT}"), NQN)?
    } else {
        true
    };
    target.stop()?;
    if wanted("instructions") {
        instructions::measure(&nacre)?;
    }

    if !many.rounds.is_empty() {
        lines.push(many);
    }
    print_table("nacre", "bare sockets", &lines);
    if with_limit_target {
        print_table("limit", "bare sockets", &most);
    }
    if paces {
        print_table("nacre", "not paced", &unpaced);
    }
    if !spread.rounds.is_empty() {
        print_table("nacre", "1 x 256", &[spread, bare_spread]);
    }
    let mut all = lines;
    all.retain(|line| line.goal > 0.0);
    if let Some(path) = &options.json {
        write_json(path, &all)?;
    }
    let missed = all.iter().filter(|line| !line.reached()).count();
    println!("\n{} of {} goals reached", all.len() - missed, all.len());
    Ok(if missed == 0 && idle_is_quiet {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

pub(super) fn build(root: &Path, package: &str, binary: &str) -> Result<PathBuf> {
    setup::cargo_build(
        root,
        &[
            "--profile",
            "dist",
            "--locked",
            "--package",
            package,
            "--bin",
            binary,
        ],
        BUILD_LIMIT,
    )?;
    Ok(crate::target_dir(root).join("dist").join(binary))
}

/// True if the system's congestion control paces by a timer.
fn system_paces() -> bool {
    std::fs::read_to_string("/proc/sys/net/ipv4/tcp_congestion_control")
        .is_ok_and(|name| name.starts_with("bbr"))
}

fn measure_limit(limit: &Path, case: &Case, more: &[&str], seconds: f64) -> Result<f64> {
    let rw = case.rw.strip_prefix("rand").unwrap_or(case.rw);
    let mut command = Command::new(limit);
    command
        .args([
            "--rw",
            rw,
            "--size",
            &case.size.to_string(),
            "--depth",
            &case.depth.to_string(),
        ])
        .args([
            "--connections",
            &case.connections.to_string(),
            "--seconds",
            &seconds.to_string(),
        ])
        .args([
            "--server-core",
            TARGET_CORE,
            "--client-core",
            HOST_CORE,
            "--json",
        ])
        .args(more);
    let out = process::capture(&mut command, Duration::from_secs_f64(seconds * 4.0 + 30.0))?;
    let answer = serde_json::from_str(&out).with_context(|| format!("no JSON: {out:?}"))?;
    number(&answer, &["requests_per_second"])
}

fn measure(target: &Target, port: &str, case: &Case, seconds: f64) -> Result<f64> {
    let answer = target.load_at(
        port,
        &[
            "--rw",
            case.rw,
            "--size",
            &case.size.to_string(),
            "--depth",
            &case.depth.to_string(),
            "--queues",
            &case.connections.to_string(),
            "--range",
            case.range,
            "--warmup",
            WARM_UP,
            "--seconds",
            &seconds.to_string(),
        ],
        Duration::from_secs_f64(seconds * 4.0 + 30.0),
    )?;
    number(&answer, &["iops"])
}

fn write_json(path: &Path, lines: &[Line]) -> Result<()> {
    let rows: Vec<Value> = lines.iter().map(Line::json).collect();
    let text = serde_json::to_string_pretty(&rows)?;
    std::fs::write(path, text + "\n").with_context(|| format!("writing {}", path.display()))
}
