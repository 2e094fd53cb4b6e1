//! `cargo xtask cluster`: demonstrates a volume that outlives the node that serves it.
//!
//! Starts three members of etcd and three daemons in network namespaces, each pair a machine, and
//! a fourth daemon as the host with a path to each node. Then something happens to the node that
//! serves the volume, under verified load, and the longest I/O is printed.
//!
//! ```text
//!   a            b            c            host
//!   etcd         etcd         etcd         nacre serve (3 paths) ◀── nacre perf
//!   nacre serve  nacre serve  nacre serve
//!   ├────────────┼────────────┤            │      bridge etcd   10.77.0.0/24
//!   ├────────────┼────────────┤            │      bridge data   10.77.1.0/24: replicas
//!   └────────────┴────────────┴────────────┘      bridge hosts  10.77.2.0/24
//! ```
//!
//! The command restarts itself in network, mount and process namespaces of its own, so that nothing
//! of the machine's network changes and nothing stays. Without root these are in a user namespace.

mod demo;
mod partitions;
mod scale;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};

use self::demo::{Demo, call, make_network};
use crate::process;
use crate::run::Scratch;
use crate::setup::{self, need};
use crate::tally::Tally;

const BUILD_LIMIT: Duration = Duration::from_secs(1800);

/// The name of the suite, for filters.
const NAME: &str = "cluster-network";
const SUITE_LIMIT: Duration = Duration::from_secs(300);
/// Longest I/O of the suite, in milliseconds: the lease, the time until the host gives up the
/// silent path, and room for a busy machine.
const SUITE_BAR_MS: &str = "10000";
/// All nodes without etcd; and one node that has only its link to the others' replicas, which have
/// lost theirs.
const SUITE_PARTITIONS: &str = "8,17";

#[derive(Args)]
pub(crate) struct Options {
    /// What happens to the node that serves the volume, one after the other [default: kill]
    #[arg(long, value_enum, value_delimiter = ',')]
    act: Vec<Act>,
    /// Cut links of nodes for 10 s each time, and heal them: nothing stale, nothing lost, one
    /// holder at a time, healthy after 30 s. Partitions are the 31 ways to split the parties a, b,
    /// c, etcd, data, hosts into two sides; a node keeps its link to each network on its side. Add
    /// 1 for a, 2 for b, 4 for c, 8 for etcd, 16 for data on the other side than hosts. Give
    /// numbers as in 1,4,16-20; none: all, in about 12 minutes
    #[arg(long, value_name = "LIST", num_args = 0..=1, default_missing_value = "all", value_parser = partitions::checked)]
    partitions: Option<String>,
    /// Time without a renewal after which other nodes take a node's volumes, in seconds.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=30))]
    lease: u64,
    /// I/Os per second of the load.
    #[arg(long, default_value_t = 1000)]
    rate: u64,
    /// Fail if an I/O takes longer than this, in milliseconds.
    #[arg(long)]
    bar: Option<u64>,
    /// Serve until interrupted, so that commands can be tried.
    #[arg(long)]
    stay: bool,
    /// Use this `nacre` instead of building one.
    #[arg(long)]
    nacre: Option<PathBuf>,
    /// Use this `etcd` instead of Debian's.
    #[arg(long)]
    etcd: Option<PathBuf>,
    /// Instead: many nodes and volumes on one member of etcd, without daemons. Prints leases,
    /// fail-over and load beside their bars, and fails above one.
    #[arg(
        long,
        value_name = "NODES,VOLUMES",
        num_args = 0..=1,
        default_missing_value = "100,10000",
        value_parser = scale::nodes_and_volumes,
        conflicts_with_all = ["act", "partitions", "bar", "stay", "nacre"]
    )]
    scale: Option<String>,
    /// Set by the command itself, when it restarts in its namespaces: the folder for all files.
    #[arg(long, hide = true)]
    inside: Option<PathBuf>,
    /// Set by the command itself: read and write the volume with this NQN on each node.
    #[arg(long, hide = true)]
    history: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Act {
    /// The daemon is killed (SIGKILL). Its replica is back when it starts again.
    Kill,
    /// The machine is cut off from the network, with its member of etcd.
    Silence,
    /// The daemon stops in order (SIGTERM).
    Stop,
    /// An operator moves the volume to another node.
    Move,
}

impl Act {
    fn name(self) -> String {
        let value = self.to_possible_value();
        value.map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

pub(crate) fn run(root: &Path, options: &Options) -> Result<ExitCode> {
    if let Some(dir) = &options.inside {
        process::catch_interrupts()?;
        let (Some(nacre), Some(etcd)) = (&options.nacre, &options.etcd) else {
            bail!("--inside needs --nacre and --etcd");
        };
        let end = demonstrate(options, dir, nacre, etcd);
        if options.partitions.is_some() && !matches!(end, Ok(true)) {
            partitions::keep_logs(dir, &crate::target_dir(root).join("cluster-logs"))?;
        }
        return end.map(|is_good| ExitCode::from(u8::from(!is_good)));
    }
    if let Some(nqn) = &options.history {
        return partitions::load::run(nqn);
    }
    if let Some(scale) = &options.scale {
        let etcd = options.etcd.clone();
        return scale::measure(root, scale, &etcd.map_or_else(debian_etcd, Ok)?);
    }
    setup::ensure(&[need("ip", "iproute2"), need("unshare", "util-linux")])?;
    let nacre = match &options.nacre {
        Some(path) => path.clone(),
        None => {
            let arguments = ["--release", "--locked", "--package", "nacre-engine-cli"];
            setup::cargo_build(root, &arguments, BUILD_LIMIT)?;
            crate::target_dir(root).join("release/nacre")
        }
    };
    let etcd = match &options.etcd {
        Some(path) => path.clone(),
        None => debian_etcd()?,
    };
    // Removed here, because a time limit kills the other process.
    let scratch = Scratch::create()?;
    let mut again = in_namespaces(&std::env::current_exe().context("finding this program")?)?;
    again.args(["cluster", "--inside"]).arg(&scratch.path);
    for act in &options.act {
        again.args(["--act", &act.name()]);
    }
    if let Some(list) = &options.partitions {
        again.args(["--partitions", list]);
    }
    again.arg("--nacre").arg(nacre).arg("--etcd").arg(etcd);
    again.args(["--lease", &options.lease.to_string()]);
    again.args(["--rate", &options.rate.to_string()]);
    if let Some(bar) = options.bar {
        again.args(["--bar", &bar.to_string()]);
    }
    if options.stay {
        again.arg("--stay");
    }
    // A terminal interrupts both; the inner one cleans up.
    process::catch_interrupts()?;
    let status = again.status().context("running unshare")?;
    Ok(ExitCode::from(u8::from(!status.success())))
}

/// The suite of `cargo xtask test`: a node that is cut off. The test of daemons has the other acts.
pub(crate) fn suite(root: &Path, nacre: Option<&Path>) -> Result<Tally> {
    let mut tally = Tally::default();
    setup::ensure(&[need("ip", "iproute2"), need("unshare", "util-linux")])?;
    if let Err(error) = call(&mut in_namespaces(Path::new("true"))?) {
        tally.skip(format!("{NAME}: no network namespaces here: {error:#}"));
        return Ok(tally);
    }
    let etcd = match debian_etcd() {
        Ok(etcd) => etcd,
        Err(error) => {
            tally.skip(format!(
                "{NAME}: no etcd (Debian's package etcd-server): {error:#}"
            ));
            return Ok(tally);
        }
    };
    let nacre = crate::vm::debug_nacre(root, nacre)?;
    let scratch = Scratch::create()?;
    let mut again = in_namespaces(&std::env::current_exe().context("finding this program")?)?;
    again
        .args([
            "cluster",
            "--act",
            "silence",
            "--bar",
            SUITE_BAR_MS,
            "--partitions",
            SUITE_PARTITIONS,
            "--inside",
        ])
        .arg(&scratch.path);
    again.arg("--nacre").arg(nacre).arg("--etcd").arg(etcd);
    let end = process::stream(&mut again, SUITE_LIMIT, |_| {})?;
    tally.check(&format!("{NAME}: {end}"), end.success());
    Ok(tally)
}

pub(crate) fn matches(filter: &[String]) -> bool {
    filter.is_empty() || filter.iter().any(|part| NAME.contains(part.as_str()))
}

fn debian_etcd() -> Result<PathBuf> {
    let program = "usr/bin/etcd";
    Ok(crate::vm::unpacked("etcd-server", program)?.join(program))
}

/// The program, with namespaces of its own.
fn in_namespaces(program: &Path) -> Result<Command> {
    let mut unshare = Command::new("unshare");
    if !setup::is_root()? {
        unshare.args(["--user", "--map-root-user"]);
    }
    // With a process namespace, daemons cannot outlive this command.
    unshare.args([
        "--net",
        "--mount",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
    ]);
    unshare.arg("--").arg(program);
    Ok(unshare)
}

fn demonstrate(options: &Options, dir: &Path, nacre: &Path, etcd: &Path) -> Result<bool> {
    make_network()?;
    let mut demo = Demo::new(dir, nacre);
    demo.start(etcd, options.lease)?;
    let nqn = demo.publish()?;
    demo.connect(&nqn)?;
    let acts = match (options.act.as_slice(), &options.partitions) {
        ([], None) => &[Act::Kill][..],
        (acts, _) => acts,
    };
    let mut is_good = act_all(&mut demo, acts, options)?;
    if let Some(list) = &options.partitions {
        is_good &= partitions::run(&demo, &nqn, list, options.rate)?;
    }
    if options.stay {
        demo.serve_until_interrupted()?;
    }
    demo.stop()?;
    if !is_good {
        println!("\nfailed");
    }
    Ok(is_good)
}

/// Does one act after the other, and prints the results. False: blocks are wrong, or an I/O took
/// longer than `--bar`.
fn act_all(demo: &mut Demo, acts: &[Act], options: &Options) -> Result<bool> {
    let mut results = Vec::new();
    for act in acts {
        results.push((*act, demo.round(*act, options)?));
    }
    if results.is_empty() {
        return Ok(true);
    }
    println!(
        "\n{:<10}{:>18}{:>14}{:>14}",
        "", "served again", "longest I/O", "wrong blocks"
    );
    for (act, result) in &results {
        let served = seconds(result.served);
        let longest = seconds(result.longest);
        println!(
            "{:<10}{served:>18}{longest:>14}{:>14}",
            act.name(),
            result.wrong
        );
    }
    let bar = Duration::from_millis(options.bar.unwrap_or(u64::MAX));
    let is_good = results
        .iter()
        .all(|(_, result)| result.wrong == 0 && result.longest <= bar);
    if !is_good {
        println!("\nblocks are wrong, or an I/O took longer than --bar");
    }
    Ok(is_good)
}

fn seconds(time: Duration) -> String {
    format!("{:.2} s", time.as_secs_f64())
}
