//! `nacre bench`: measures TCP, RDMA and local devices side by side, on this machine or between
//! two.
//!
//! ```text
//!   contenders.rs  the targets and devices to compare: the user's, or a private one
//!     target.rs      the daemon that the command starts for itself
//!     facts.rs       the machine, and the path to a target: hardware or emulation
//!   side.rs        one measurement of one of them
//!     usage.rs       processor time during it
//! ```
//!
//! In each round every workload is measured on all contenders, one after another, so that a change
//! of the machine's speed affects all of them. The crate `nacre-engine-bench` computes medians and
//! writes the table and the page.

mod contenders;
mod facts;
mod side;
mod target;
mod usage;

use std::fs::File;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use nacre_engine_bench::{
    Comparison, LineResult, Outcome, SCHEMA, Side, Workload, failed_runs, page, table,
};
use nacre_engine_load::{Job, JobOptions, Limit, Rw, Sizes, Verify};
use nacre_reactor::CoreSet;
use uuid::Uuid;

use self::contenders::Contenders;
use self::side::RunError;
use super::perf::QUEUES;
use super::{Failure, output};
use nacre_engine_values::size::parse_bytes;
use nacre_engine_values::time;

/// How long to wait for I/O in flight at the end of a measurement.
const DRAIN: Duration = Duration::from_secs(5);

#[derive(Debug, Args)]
#[command(
    after_help = "Without a URI it starts a daemon of its own on a device in memory, measures the device \
        alone, over TCP and, where this machine has RDMA, over RDMA, and removes everything. With \
        URIs it measures these targets; blocks that were never written may be read faster than \
        others.\n\nThe load threads poll and never sleep. Processor time of a target on another \
        machine is not known.\n\nExit codes: 0 done, 1 a measurement failed, 2 wrong \
        usage.\n\nExamples:\n  nacre bench --html bench.html\n  nacre bench --volume --line \
        'random read'\n  nacre bench tcp://192.0.2.1/nqn.2026-01.com.example:disk0 \
        rdma://192.0.2.1/nqn.2026-01.com.example:disk0 --json bench.json\n  nacre bench \
        /dev/nvme1n1 tcp://192.0.2.1/nqn.2026-01.com.example:disk0"
)]
pub(crate) struct BenchArgs {
    /// What to compare: tcp://ADDRESS[:PORT]/NQN[?nsid=N], rdma://…, pcie://… (a drive bound to
    /// vfio-pci), or the path of a file or block device
    #[arg(value_name = "URI")]
    uris: Vec<String>,
    /// Serve this file or block device instead of memory. A missing file is created, and removed
    /// at the end
    #[arg(
        long,
        visible_alias = "bdev",
        value_name = "PATH",
        conflicts_with = "uris"
    )]
    file: Option<PathBuf>,
    /// Bytes of the memory, or of a file that is created
    #[arg(long, value_name = "BYTES", default_value = "256MiB", value_parser = parse_bytes)]
    size: u64,
    /// Serve a volume with one replica on the device
    #[arg(long, conflicts_with = "uris")]
    volume: bool,
    /// Write to targets and devices that exist, which destroys their data. Without it lines that
    /// write are left out
    #[arg(long)]
    overwrite: bool,
    /// Measurements of each line and side; the median counts
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Duration of each measurement
    #[arg(long, value_name = "SECONDS", default_value = "2", value_parser = time::above_zero)]
    seconds: Duration,
    /// Time before each measurement
    #[arg(long, value_name = "SECONDS", default_value = "300ms", value_parser = time::parse)]
    warmup: Duration,
    /// Only lines whose name contains this text, such as "4 KiB random read, depth 1" (may be
    /// repeated)
    #[arg(long = "line", value_name = "TEXT")]
    lines: Vec<String>,
    /// I/O queues, each with a connection of its own [default: one per core]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(QUEUES))]
    queues: Option<u16>,
    /// Cores of the load, a thread each [default: one thread, on a core without the target]
    #[arg(long, value_name = "CORES", value_parser = CoreSet::parse)]
    cores: Option<CoreSet>,
    /// Cores of the target that this command starts [default: the first]
    #[arg(long, value_name = "CORES", value_parser = CoreSet::parse, conflicts_with = "uris")]
    target_cores: Option<CoreSet>,
    /// Bytes to use from the start of each namespace [default: all]
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    range: Option<u64>,
    /// Process of the target, if it is on this machine: its processor time is measured
    #[arg(long, value_name = "PID", requires = "uris")]
    target_pid: Option<u32>,
    /// Name of this host [default: that of nvme-cli, else one made from the machine's identity]
    #[arg(short = 'q', long, value_name = "NQN", requires = "uris")]
    hostnqn: Option<String>,
    /// File with the key with which this host authenticates itself (`DHHC-1:…`)
    #[arg(long, value_name = "FILE", requires = "uris")]
    dhchap_key: Option<PathBuf>,
    /// File with the key with which the target must authenticate itself
    #[arg(long, value_name = "FILE", requires = "dhchap_key")]
    dhchap_ctrlr_key: Option<PathBuf>,
    /// Longest time to connect
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = time::above_zero)]
    connect_timeout: Duration,
    /// Write the figures to this file as JSON; "-": print them instead of the table
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write a page with drawings to this file; it opens without a network
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// No progress line
    #[arg(long)]
    quiet: bool,
}

pub(crate) fn run(args: BenchArgs) -> Result<(), Failure> {
    let mut wanted = workloads(&args.lines)?;
    let is_stdout = args.json.as_deref() == Some(Path::new("-"));
    // Before a long run, not after it.
    let json = args.json.as_deref().filter(|_| !is_stdout);
    let json = json.map(Output::create).transpose()?;
    let html = args.html.as_deref().map(Output::create).transpose()?;
    let stop = interrupt()?;
    let started = SystemTime::now().duration_since(UNIX_EPOCH);
    let mut contenders = Contenders::new(&args)?;
    let mut comparison = Comparison {
        schema: SCHEMA,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        started: started.map_or(0, |time| time.as_secs()),
        machine: facts::machine(),
        rounds: args.rounds,
        seconds: args.seconds.as_secs_f64(),
        warmup_seconds: args.warmup.as_secs_f64(),
        queues: contenders.queues,
        cores: contenders.cores.clone(),
        target_cores: contenders.target_cores.clone(),
        notes: std::mem::take(&mut contenders.notes),
        sides: contenders.descriptions(),
        lines: Vec::new(),
    };
    if !contenders.may_write && wanted.iter().any(Workload::writes) {
        wanted.retain(|workload| !workload.writes());
        let note = "only lines that read: --overwrite adds those that write, which destroys data";
        comparison.notes.push(note.into());
    }
    if wanted.is_empty() {
        let hint = "--line chooses only lines that write: --overwrite allows them, and destroys \
            the data of the targets";
        return Err(Failure::Usage(hint.into()));
    }
    let quiet = args.quiet || !std::io::stderr().is_terminal();
    let bar = progress(
        quiet,
        wanted.len() * args.rounds as usize * comparison.sides.len(),
    );
    contenders.fill(&job(&args, &contenders, &Workload::ALL[0]), &stop)?;
    let figures = measure(&args, &mut contenders, &wanted, &stop, &bar);
    bar.finish_and_clear();
    drop(contenders);
    comparison.lines = lines(&wanted, &comparison.sides, figures);
    if stop.load(Ordering::Relaxed) {
        comparison.notes.push("interrupted before the end".into());
    }
    let value = serde_json::to_value(&comparison).expect("a comparison serialises");
    if let Some(file) = json {
        let text = serde_json::to_string_pretty(&value).expect("a JSON value serialises");
        file.write(&(text + "\n"))?;
    }
    if let Some(file) = html {
        file.write(&page(&comparison))?;
    }
    if is_stdout {
        output::json(&value)?;
    } else {
        output::line(&table(&comparison))?;
    }
    let failed = match failed_runs(&comparison) {
        _ if stop.load(Ordering::Relaxed) => "interrupted".to_owned(),
        0 => return Ok(()),
        failed => format!("{} failed", output::count(failed as u64, "measurement")),
    };
    Err(Failure::Failed(anyhow::anyhow!(failed)))
}

/// The outcomes of each workload, by side and round.
type Rounds = Vec<Vec<Vec<Outcome>>>;

/// Runs all rounds, or as many as there are before an interrupt.
fn measure(
    args: &BenchArgs,
    contenders: &mut Contenders,
    wanted: &[Workload],
    stop: &AtomicBool,
    bar: &ProgressBar,
) -> Rounds {
    let count = contenders.measured.len();
    let mut figures: Rounds = vec![vec![Vec::new(); count]; wanted.len()];
    for _ in 0..args.rounds {
        for (workload, line) in wanted.iter().zip(&mut figures) {
            let job = job(args, contenders, workload);
            for (at, rounds) in line.iter_mut().enumerate() {
                if stop.load(Ordering::Relaxed) {
                    return figures;
                }
                bar.set_message(format!("{}, {}", workload.name(), contenders.name(at)));
                match contenders.measure(at, &job, stop) {
                    Ok(measurement) => rounds.push(Outcome::Measured(measurement)),
                    Err(RunError::Interrupted) => return figures,
                    Err(error) => rounds.push(Outcome::Failed(error.to_string())),
                }
                bar.inc(1);
            }
        }
    }
    figures
}

fn lines(wanted: &[Workload], sides: &[Side], figures: Rounds) -> Vec<LineResult> {
    let is_measured = |rounds: &Vec<Vec<Outcome>>| rounds.iter().any(|side| !side.is_empty());
    let lines = wanted.iter().zip(figures);
    lines
        .filter(|(_, rounds)| is_measured(rounds))
        .map(|(workload, rounds)| LineResult::new(*workload, sides, rounds))
        .collect()
}

fn workloads(texts: &[String]) -> Result<Vec<Workload>, Failure> {
    let is_wanted = |workload: &Workload| {
        let name = workload.name();
        texts.is_empty() || texts.iter().any(|text| has(&name, text))
    };
    let wanted: Vec<Workload> = Workload::ALL.into_iter().filter(is_wanted).collect();
    if wanted.is_empty() {
        let names = Workload::ALL.map(|workload| workload.name());
        let names = names.join("; ");
        return Err(Failure::Usage(format!(
            "--line chooses no line; there are: {names}"
        )));
    }
    Ok(wanted)
}

/// True if the name contains the text; "depth 1" is not part of "depth 128".
fn has(name: &str, text: &str) -> bool {
    let digit = |c: char| c.is_ascii_digit();
    name.match_indices(text).any(|(at, found)| {
        let (before, rest) = (&name[..at], &name[at + found.len()..]);
        let is_part = before.ends_with(digit) && found.starts_with(digit);
        !(is_part || found.ends_with(digit) && rest.starts_with(digit))
    })
}

fn job(args: &BenchArgs, contenders: &Contenders, workload: &Workload) -> Job {
    Job {
        options: JobOptions {
            rw: match (workload.random, workload.read_percent) {
                (true, 100) => Rw::RandRead,
                (true, 0) => Rw::RandWrite,
                (true, _) => Rw::RandRw,
                (false, 100) => Rw::Read,
                (false, 0) => Rw::Write,
                (false, _) => Rw::Rw,
            },
            mix: workload.read_percent,
            depth: workload.depth,
            range: args.range,
            offset: 0,
            rate: None,
            warmup: args.warmup,
            keep_going: false,
        },
        sizes: Sizes {
            min: workload.size_bytes,
            max: workload.size_bytes,
        },
        queues: contenders.queues,
        cores: contenders.cores.clone(),
        limit: Limit::Time(args.seconds),
        verify: Verify::Off,
        seed: Uuid::new_v4().as_u64_pair().0,
        drain: DRAIN,
    }
}

/// Set by Ctrl-C, a request to end and the end of the terminal: the run ends, its figures so far
/// are shown, and the daemon is stopped.
fn interrupt() -> Result<Arc<AtomicBool>, Failure> {
    let stop = Arc::new(AtomicBool::new(false));
    use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
    for signal in [SIGHUP, SIGINT, SIGQUIT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&stop))?;
    }
    Ok(stop)
}

fn progress(hidden: bool, runs: usize) -> ProgressBar {
    if hidden {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new(runs as u64);
    let style = ProgressStyle::with_template("{bar:24} {pos}/{len} {msg}");
    bar.set_style(style.expect("the template is right"));
    bar
}

/// A file of the user's choice, created before the run.
struct Output {
    path: PathBuf,
    file: File,
}

impl Output {
    fn create(path: &Path) -> Result<Self, Failure> {
        let file = File::create(path).with_context(|| path.display().to_string())?;
        Ok(Self {
            path: path.to_owned(),
            file,
        })
    }

    fn write(mut self, text: &str) -> Result<(), Failure> {
        let written = self.file.write_all(text.as_bytes());
        written.with_context(|| self.path.display().to_string())?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_chosen_by_their_names() {
        let chosen = |texts: &[&str]| {
            let texts: Vec<String> = texts.iter().map(|text| (*text).to_owned()).collect();
            workloads(&texts).map(|lines| lines.len())
        };
        assert_eq!(chosen(&[]).unwrap(), Workload::ALL.len());
        assert_eq!(chosen(&["128 KiB"]).unwrap(), 2);
        assert_eq!(chosen(&["128 KiB", "depth 1"]).unwrap(), 4);
        assert_eq!(chosen(&["sequential", "70/30"]).unwrap(), 2);
        let refusal = chosen(&["8 KiB"]).unwrap_err();
        assert_eq!(refusal.exit_code(), 2);
        assert!(refusal.to_string().contains("4 KiB random read, depth 1;"));
    }
}
