//! `cargo xtask bench volume`: replicated volumes against the RAM disk below them, through the same
//! target and host. Also compares the resync of a replica that missed one region in a hundred with
//! a full resync.

use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::target::{NQN, Target, WARM_UP, number};
use super::tcp::build;
use super::{Line, LoopbackOptions, print_table};

/// Loads per side and round; each takes half of the measuring time. They run in the order bare,
/// volume, volume, bare, and so on. So other load on the machine, and a connection's batch size,
/// affect both sides equally.
const LOADS: usize = 4;
/// Regions of the resynced volume, 1 MiB each.
const REGIONS: u64 = 1000;
/// One in a hundred.
const MISSED: u64 = REGIONS / 100;
const BLOCK: u64 = 4096;
const MIB: u64 = 1 << 20;
const HEALTHY_LIMIT: Duration = Duration::from_secs(120);

struct Case {
    name: &'static str,
    volume: &'static str,
    rw: &'static str,
    goal: f64,
}

const fn case(name: &'static str, volume: &'static str, rw: &'static str, goal: f64) -> Case {
    Case {
        name,
        volume,
        rw,
        goal,
    }
}

const CASES: &[Case] = &[
    case("1 replica, 4 KiB read", "one", "randread", 0.95),
    case("1 replica, 4 KiB write", "one", "randwrite", 0.90),
    case("2 replicas, 4 KiB read", "two", "randread", 0.95),
    case("2 replicas, 4 KiB write", "two", "randwrite", 0.60),
];

pub(super) fn run(root: &Path, options: &LoopbackOptions) -> Result<ExitCode> {
    let nacre = match &options.nacre {
        Some(path) => path.clone(),
        None => build(root, "nacre-engine-cli", "nacre")?,
    };
    let target = Target::start(&nacre)?;
    // As large as the bare disk, so that the CPU's caches hold the same part of it.
    let bytes = number(
        &target.json("bdev_get_bdevs", json!({ "name": "m" }))?[0],
        &["num_blocks"],
    )? as u64
        * BLOCK;
    make(&target, "one", 1, bytes)?;
    make(&target, "two", 2, bytes)?;

    let wanted = |name: &str| {
        options
            .filter
            .as_deref()
            .is_none_or(|part| name.contains(part))
    };
    let mut lines: Vec<(&Case, Line)> = CASES
        .iter()
        .filter(|case| wanted(case.name))
        .map(|case| {
            let line = Line {
                name: case.name.into(),
                goal: case.goal,
                rounds: Vec::new(),
            };
            (case, line)
        })
        .collect();
    // Also writes every region of the volumes, so that later writes find their regions in the
    // dirty-region log.
    for bdev in ["m", "one", "two"] {
        target.fill(&nsid(&target, bdev)?.to_string())?;
    }
    let before = log_waits(&target)?;
    for round in 1..=options.rounds {
        println!("round {round} of {}", options.rounds);
        for (case, line) in &mut lines {
            let (mut bare, mut ours) = (0.0, 0.0);
            for at in 0..2 * LOADS {
                let volume = matches!(at % 4, 1 | 2);
                let (bdev, sum) = if volume {
                    (case.volume, &mut ours)
                } else {
                    ("m", &mut bare)
                };
                *sum += load(&target, bdev, case.rw, options.seconds / 2.0)? / LOADS as f64;
            }
            line.rounds.push((ours, bare));
        }
    }
    let waits = log_waits(&target)? - before;
    let resync = if wanted("resync") {
        Some(resync(&target, options.rounds)?)
    } else {
        None
    };
    target.stop()?;

    let lines: Vec<Line> = lines.into_iter().map(|(_, line)| line).collect();
    print_table("nacre", "bare disk", &lines);
    let mut missed = lines.iter().filter(|line| !line.reached()).count();
    println!(
        "\nwrites that waited for the log of a region: {waits} (regions that are idle are cleared)"
    );
    if let Some((partial, full)) = resync {
        let share = partial / full;
        println!(
            "resync of {MISSED} of {REGIONS} regions: {:.1} ms, of all {:.1} ms: {:.2} % (at most 3 %)",
            partial * 1e3,
            full * 1e3,
            share * 100.0
        );
        missed += usize::from(share > 0.03);
    }
    println!("{missed} goals missed");
    Ok(match missed {
        0 => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    })
}

/// Creates a volume on `replicas` RAM disks and a namespace on it.
fn make(target: &Target, name: &str, replicas: usize, bytes: u64) -> Result<()> {
    let mut devices = Vec::new();
    for replica in 0..replicas {
        let disk = format!("{name}-{replica}");
        let blocks = (bytes + MIB) / BLOCK;
        let params = json!({ "name": disk, "block_size": BLOCK, "num_blocks": blocks });
        target.json("bdev_malloc_create", params)?;
        devices.push(disk);
    }
    target.json("volume_create", json!({ "name": name, "devices": devices }))?;
    let namespace = json!({ "nqn": NQN, "namespace": { "bdev_name": name } });
    target.json("nvmf_subsystem_add_ns", namespace)?;
    Ok(())
}

fn load(target: &Target, bdev: &str, rw: &str, seconds: f64) -> Result<f64> {
    let seconds_text = seconds.to_string();
    let nsid = nsid(target, bdev)?.to_string();
    let arguments = [
        "--nsid",
        &nsid,
        "--rw",
        rw,
        "--size",
        "4096",
        "--depth",
        "128",
        "--queues",
        "1",
        "--warmup",
        WARM_UP,
        "--seconds",
        &seconds_text,
    ];
    let limit = Duration::from_secs_f64(seconds * 4.0 + 30.0);
    number(&target.load(&arguments, limit)?, &["iops"])
}

fn nsid(target: &Target, bdev: &str) -> Result<u64> {
    let subsystems = target.json("nvmf_get_subsystems", json!({ "nqn": NQN }))?;
    let namespaces = subsystems[0]["namespaces"].as_array();
    let found = namespaces
        .into_iter()
        .flatten()
        .find(|ns| ns["bdev_name"] == bdev);
    let nsid = found.and_then(|ns| ns["nsid"].as_u64());
    nsid.with_context(|| format!("no namespace on {bdev} in {subsystems}"))
}

fn log_waits(target: &Target) -> Result<u64> {
    let mut waits = 0;
    for name in ["one", "two"] {
        let volume = target.json("volume_get", json!({ "name": name }))?;
        waits += number(&volume, &["counters", "log_waits"])? as u64;
    }
    Ok(waits)
}

/// Median seconds of a partial and of a full resync.
fn resync(target: &Target, rounds: usize) -> Result<(f64, f64)> {
    make(target, "large", 2, REGIONS * MIB)?;
    // Resync without throttling: its speed is the measurement.
    target.json(
        "volume_set",
        json!({ "name": "large", "settings": { "settle_ms": 0 } }),
    )?;
    let (mut partial, mut full) = (Vec::new(), Vec::new());
    let replica = |more: Value| {
        let mut params = json!({ "name": "large", "replica": "large-1" });
        for (key, value) in more.as_object().into_iter().flatten() {
            params[key] = value.clone();
        }
        params
    };
    let nsid = nsid(target, "large")?.to_string();
    for _ in 0..rounds {
        settle(target)?;
        target.json("volume_offline_replica", replica(json!({})))?;
        for region in 0..MISSED {
            let offset = (region * REGIONS / MISSED * MIB).to_string();
            let range = BLOCK.to_string();
            let arguments = [
                "--nsid", &nsid, "--rw", "write", "--size", "4096", "--depth", "1", "--queues",
                "1", "--offset", &offset, "--range", &range, "--ios", "1",
            ];
            target.load(&arguments, Duration::from_secs(30))?;
        }
        target.json("volume_online_replica", replica(json!({})))?;
        partial.push(copied(target)?);
        target.json("volume_resync", replica(json!({ "full": true })))?;
        full.push(copied(target)?);
    }
    Ok((super::median(&partial), super::median(&full)))
}

/// Waits until the replica is in sync. Returns the duration of the resync, as reported by the
/// daemon.
fn copied(target: &Target) -> Result<f64> {
    settle(target)?;
    let volume = target.json("volume_get", json!({ "name": "large" }))?;
    let replicas = volume["replicas"].as_array().context("no replicas")?;
    let last = replicas
        .iter()
        .find_map(|m| m["last_resync"]["seconds"].as_f64());
    last.with_context(|| format!("no resync in {volume}"))
}

fn settle(target: &Target) -> Result<()> {
    let start = Instant::now();
    loop {
        let volume = target.json("volume_get", json!({ "name": "large" }))?;
        if volume["state"] == "healthy" {
            return Ok(());
        }
        if start.elapsed() > HEALTHY_LIMIT {
            bail!("the volume does not heal: {volume}");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}
