//! `cargo xtask bench tls`: Nacre over TLS on loopback, against Nacre without TLS in the same run;
//! and, with `--peer`, against SPDK's target with its `ssl` sockets, under SPDK's initiator.
//!
//! One daemon serves the same disk with and without TLS. Target and host run on a core each, and
//! both encrypt and decrypt.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::Args;
use serde_json::Value;

use super::spdk::{Case, Spdk, case, measure_at};
use super::target::{Disk, Target};
use super::tcp::build;
use super::{Line, print_table};

#[derive(Args)]
pub(crate) struct Options {
    /// The folder of an SPDK build, to compare with its target over TLS.
    #[arg(long)]
    peer: Option<PathBuf>,
    /// Interleaved rounds; the median counts.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Seconds per measurement.
    #[arg(long, default_value_t = 2)]
    seconds: u32,
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

/// The parts of the speed in clear to reach. At 4 KiB the cost of a command outweighs that of the
/// cipher; that line has no goal.
const CASES: &[(Case, f64)] = &[
    (case("4 KiB read, depth 128", "randread", 4096, 128), 0.0),
    (case("4 KiB write, depth 128", "randwrite", 4096, 128), 0.0),
    (case("128 KiB read, depth 16", "randread", 131072, 16), 0.5),
    (
        case("128 KiB write, depth 16", "randwrite", 131072, 16),
        0.5,
    ),
];
/// How many times faster than SPDK's target over TLS.
const PEER_GOAL: f64 = 1.3;

/// The disk of the other benchmarks of TCP: the CPU's shared cache may hold it.
const DISK: Disk = Disk {
    block_bytes: 4096,
    blocks: 4096,
};
/// The ports for TLS of Nacre and of SPDK's target.
const PORT: &str = "14422";
const PEER_PORT: &str = "14423";
const HOST: &str = "nqn.2026-01.io.nacre:bench-host";
/// The PSK `00 01 .. 1f`: it protects nothing here.
const PSK: &str = "NVMeTLSkey-1:01:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";

pub(super) fn run(root: &Path, options: &Options) -> Result<ExitCode> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    if cores < 2 {
        bail!("this takes two cores, one for each side; this machine has {cores}");
    }
    let spdk = options.peer.as_deref().map(Spdk::find).transpose()?;
    let nacre = match &options.nacre {
        Some(path) => path.clone(),
        None => build(root, "nacre-engine-cli", "nacre")?,
    };
    let ours = Target::start_with(&nacre, DISK)?;
    let psk = ours.write_key(PSK)?;
    ours.use_tls(PORT, HOST, &psk)?;
    ours.fill("1")?;
    ours.pause();
    let peer = match &spdk {
        None => None,
        Some(spdk) => {
            let target = Target::start_spdk(&nacre, &spdk.target, spdk.memory, DISK)?;
            target.fill("1")?;
            // SPDK refuses TLS where any host is allowed. Its plain port has served its purpose.
            target.refuse_other_hosts()?;
            target.use_tls(PEER_PORT, HOST, &psk)?;
            target.pause();
            Some((spdk, target))
        }
    };

    let cases: Vec<&(Case, f64)> = CASES
        .iter()
        .filter(|(case, _)| (options.filter.as_deref()).is_none_or(|part| case.name.contains(part)))
        .collect();
    let lines = |goal_of: &dyn Fn(f64) -> f64| -> Vec<Line> {
        let line = |(case, goal): &&(Case, f64)| Line {
            name: case.name.into(),
            goal: goal_of(*goal),
            rounds: Vec::new(),
        };
        cases.iter().map(line).collect()
    };
    let mut beside_plain = lines(&|goal| goal);
    let mut beside_peer = lines(&|_| PEER_GOAL);
    let path = psk.to_str().context("the path of the key")?;
    for round in 1..=options.rounds {
        println!("round {round} of {}", options.rounds);
        for (at, (case, _)) in cases.iter().enumerate() {
            let plain = || measure_at(&ours, ours.port(), &[], case, options.seconds);
            let secure = || {
                let more = ["--hostnqn", HOST, "--psk", path];
                measure_at(&ours, PORT, &more, case, options.seconds)
            };
            ours.resume();
            // The sides also take turns in being first.
            let pair = if round % 2 == 0 {
                let secure = secure()?;
                (secure, plain()?)
            } else {
                let plain = plain()?;
                (secure()?, plain)
            };
            ours.pause();
            beside_plain[at].rounds.push(pair);
            if let Some((spdk, theirs)) = &peer {
                let host = format!(" hostnqn:{HOST}");
                let more = ["-S", "ssl", "--psk-path", path];
                let measure = |target: &Target, port| {
                    target.resume();
                    let rate = spdk.measure_at(port, &host, &more, case, options.seconds);
                    target.pause();
                    rate
                };
                let pair = if round % 2 == 0 {
                    let theirs = measure(theirs, PEER_PORT)?;
                    (measure(&ours, PORT)?, theirs)
                } else {
                    (measure(&ours, PORT)?, measure(theirs, PEER_PORT)?)
                };
                beside_peer[at].rounds.push(pair);
            }
        }
    }
    ours.resume();
    ours.stop()?;

    print_table("nacre", "in clear", &beside_plain);
    let mut all = beside_plain;
    if peer.is_some() {
        println!("\nload: spdk_nvme_perf over TLS");
        print_table("nacre", "SPDK's", &beside_peer);
        all.extend(beside_peer);
    }
    if let Some(path) = &options.json {
        let rows: Vec<Value> = all.iter().map(Line::json).collect();
        let text = serde_json::to_string_pretty(&rows)?;
        std::fs::write(path, text + "\n").with_context(|| format!("writing {}", path.display()))?;
    }
    all.retain(|line| line.goal > 0.0);
    let missed = all.iter().filter(|line| !line.reached()).count();
    println!("\n{} of {} goals reached", all.len() - missed, all.len());
    Ok(match missed {
        0 => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    })
}
