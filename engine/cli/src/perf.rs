//! `nacre perf`: runs a load on a remote namespace or a local drive, measures it, and verifies the
//! data on request.

use std::io::IsTerminal;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use nacre_reactor::CoreSet;

use super::remote::{Needs, RemoteArgs, usage};
use super::{Failure, output};
use nacre_engine::services::drives::DriveUri;
use nacre_engine_load::{
    self as load, Direction, Job, JobOptions, Limit, Mismatch, PathReport, PerfError, Progress,
    Report, Sizes, Verify,
};
use nacre_engine_values::size::parse_bytes;
use nacre_engine_values::time;
use nacre_nvmf::address::NVME_PORT;

/// The range of the number of I/O queues.
pub(crate) const QUEUES: RangeInclusive<i64> = 1..=1024;

#[derive(Debug, Args)]
#[command(
    after_help = "Sizes: 4096, 4k or 4KiB (1024), 4KB (1000). Writes destroy the data on the \
        namespace. A drive of this machine must be bound to vfio-pci (nacre nvme bind), and not \
        be in use by the daemon.\n\nExit codes: 0 done, 1 an I/O failed or data was wrong, 2 \
        wrong usage, 3 cannot connect.\n\nExamples:\n  nacre perf \
        tcp://192.0.2.1/nqn.2025-01.io.example:v --rw randread --depth 128 --seconds 30\n  nacre \
        perf -a 192.0.2.1 -n nqn.2025-01.io.example:v --rw randrw --mix 70 --verify\n  nacre perf \
        'pcie://0000:5e:00.0?nsid=1' --depth 32 --cores 2"
)]
pub(crate) struct PerfArgs {
    #[command(flatten)]
    remote: RemoteArgs,
    #[command(flatten)]
    options: JobOptions,
    /// Bytes per I/O
    #[arg(long, value_name = "BYTES", default_value = "4k", value_parser = parse_bytes)]
    size: u64,
    /// I/Os of every size from MIN to MAX instead
    #[arg(long, value_name = "MIN-MAX", value_parser = parse_range, conflicts_with = "size")]
    io_size_range: Option<Sizes>,
    /// I/O queues, each with a connection of its own [default: one per core]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(QUEUES))]
    queues: Option<u16>,
    /// Cores to run on, a thread each: 0-3,8 or 0xf [default: one thread, anywhere]
    #[arg(long, value_name = "CORES", value_parser = CoreSet::parse)]
    cores: Option<CoreSet>,
    /// Duration [default: 10, unless --ios is given]
    #[arg(long, value_name = "SECONDS", conflicts_with = "ios", value_parser = time::parse)]
    seconds: Option<Duration>,
    /// Number of I/Os
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    ios: Option<u64>,
    /// Write patterns, read them back, compare every byte
    #[arg(long)]
    verify: bool,
    /// Write nothing: compare everything in the range with the patterns of an earlier --verify
    #[arg(long, conflicts_with = "verify")]
    verify_only: bool,
    /// Seed of the offsets and sizes: the same seed repeats them [default: a new one each time]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// How long to retry a lost connection
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = time::parse)]
    loss_timeout: Duration,
    /// Longest time of one I/O before its connection is dropped
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = time::parse)]
    io_timeout: Duration,
    /// After a fallback to TCP: time until RDMA is retried; doubles each time; 0s: never
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = time::parse)]
    reprobe: Duration,
    /// Upper limit of that time
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = time::parse)]
    reprobe_max: Duration,
    /// Print JSON for programs instead of a table for people
    #[arg(long)]
    json: bool,
    /// No progress line
    #[arg(long)]
    quiet: bool,
}

pub(crate) fn run(args: PerfArgs) -> Result<(), Failure> {
    let job = job(&args)?;
    if let Some(drive) = args.remote.drive() {
        let uri = drive.map_err(usage)?;
        return on_drive(&args, &job, &uri);
    }
    // One entry of a queue is always free.
    let entries = job.options.depth + 1;
    let mut target = args.remote.target(Needs {
        subnqn: None,
        port: NVME_PORT,
        entries,
        memory: load::memory(&job),
    })?;
    target.options.io_queues = job.queues;
    if target.options.loss_timeout.is_some() {
        target.options.loss_timeout = Some(args.loss_timeout);
    }
    target.options.io_timeout = args.io_timeout;
    if let Some(paths) = &mut target.options.paths {
        (paths.reprobe, paths.reprobe_max) = (args.reprobe, args.reprobe_max);
    }
    let mut session = target.connect()?;
    let granted = session.controller().link().state().queue_entries;
    if granted < entries && !args.quiet && !args.json {
        eprintln!(
            "note: the controller's queues have {granted} entries: {} I/Os of a queue are in \
                flight at a time",
            granted - 1
        );
    }
    let mut line = ProgressLine::new(args.quiet || args.json);
    let interrupt = Interrupt::listen();
    let name = target.remote.to_string();
    let wanted = (name.as_str(), target.nsid);
    let mut watch = |progress: &Progress| {
        line.show(progress);
        !interrupt.seen()
    };
    let outcome = load::run(&job, &mut session, &target.connector, wanted, &mut watch);
    line.clear();
    session.disconnect();
    print_report(&args, &outcome.map_err(failure)?)
}

/// Runs the job on a drive of this machine.
fn on_drive(args: &PerfArgs, job: &Job, uri: &DriveUri) -> Result<(), Failure> {
    let mut line = ProgressLine::new(args.quiet || args.json);
    let interrupt = Interrupt::listen();
    let mut watch = |progress: &Progress| {
        line.show(progress);
        !interrupt.seen()
    };
    let outcome = load::run_drive(job, &uri.address, uri.nsid, &mut watch);
    line.clear();
    print_report(args, &outcome.map_err(failure)?)
}

fn print_report(args: &PerfArgs, report: &Report) -> Result<(), Failure> {
    if args.json {
        output::json(&serde_json::to_value(report).expect("a report serialises"))?;
    } else {
        output::line(&text(report))?;
    }
    if report.is_good() {
        Ok(())
    } else {
        Err(Failure::Exit {
            code: 1,
            error: anyhow::anyhow!(verdict(report)),
        })
    }
}

/// One buffer is no larger than a memory region.
const MAX_IO_BYTES: u32 = 1 << 30;

fn job(args: &PerfArgs) -> Result<Job, Failure> {
    let sizes = match args.io_size_range {
        Some(sizes) => sizes,
        None => {
            let size = u32::try_from(args.size).unwrap_or(u32::MAX);
            Sizes {
                min: size,
                max: size,
            }
        }
    };
    if sizes.max > MAX_IO_BYTES {
        let cause = "--size and --io-size-range: an I/O has at most 1GiB";
        return Err(Failure::Usage(cause.into()));
    }
    if sizes.min == 0 {
        return Err(Failure::Usage("the size of an I/O must not be 0".into()));
    }
    let cores: Vec<usize> = args.cores.iter().flat_map(CoreSet::iter).collect();
    let queues = match args.queues {
        Some(queues) => queues,
        None => u16::try_from(cores.len().max(1)).unwrap_or(u16::MAX),
    };
    let verify = match (args.verify, args.verify_only) {
        (false, false) => Verify::Off,
        (true, _) => Verify::On,
        (_, true) => Verify::Only,
    };
    let limit = match args.ios {
        Some(ios) => Limit::Ios(ios),
        None => Limit::Time(args.seconds.unwrap_or(Duration::from_secs(10))),
    };
    Ok(Job {
        options: args.options.clone(),
        sizes,
        queues,
        cores,
        limit,
        verify,
        seed: args
            .seed
            .unwrap_or_else(|| uuid::Uuid::new_v4().as_u64_pair().0),
        drain: args.io_timeout + Duration::from_secs(1),
    })
}

fn parse_range(text: &str) -> Result<Sizes, String> {
    let (min, max) = text
        .split_once('-')
        .ok_or_else(|| format!("\"{text}\" is not a range: write for example 512-128k"))?;
    let size = |text| {
        let bytes = parse_bytes(text)?;
        u32::try_from(bytes).map_err(|_| format!("{text} is too large for an I/O"))
    };
    Ok(Sizes {
        min: size(min)?,
        max: size(max)?,
    })
}

fn failure(error: PerfError) -> Failure {
    match error {
        PerfError::Worker(
            load::WorkerError::Connect { .. } | load::WorkerError::Refused { .. },
        ) => super::remote::cannot_connect(error),
        PerfError::Job(_)
        | PerfError::SeveralNamespaces { .. }
        | PerfError::NoNamespace { .. }
        | PerfError::Queues { .. } => usage(error),
        error => Failure::Failed(error.into()),
    }
}

/// One line on the terminal that shows the progress.
struct ProgressLine {
    bar: ProgressBar,
    last: (Instant, u64, u64),
}

impl ProgressLine {
    fn new(hidden: bool) -> Self {
        let bar = if hidden || !std::io::stderr().is_terminal() {
            ProgressBar::hidden()
        } else {
            ProgressBar::new(1000)
        };
        let style = ProgressStyle::with_template("{prefix:12} {bar:24} {msg}");
        bar.set_style(style.expect("the template is right"));
        Self {
            bar,
            last: (Instant::now(), 0, 0),
        }
    }

    fn show(&mut self, progress: &Progress) {
        let elapsed = self.last.0.elapsed();
        if self.bar.is_hidden() || elapsed < Duration::from_millis(250) {
            return;
        }
        let ios = progress.ios.saturating_sub(self.last.1) as f64 / elapsed.as_secs_f64();
        let rate = progress.bytes.saturating_sub(self.last.2) as f64 / elapsed.as_secs_f64();
        self.last = (Instant::now(), progress.ios, progress.bytes);
        self.bar.set_prefix(progress.phase);
        self.bar.set_position(progress.permille);
        let mut message = format!("{}  {}/s", count(ios), output::bytes(rate as u64));
        if progress.errors > 0 {
            message.push_str(&format!("  {}", output::count(progress.errors, "error")));
        }
        match progress.reconnecting {
            Some(0) => message.push_str("  connecting"),
            Some(attempt) => message.push_str(&format!("  connection lost, attempt {attempt}")),
            None => {}
        }
        self.bar.set_message(message);
    }

    fn clear(&self) {
        self.bar.finish_and_clear();
    }
}

/// Ctrl-C ends the run and shows the results so far; pressed again it ends the program.
pub(super) struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    pub(super) fn listen() -> Self {
        let seen = Arc::new(AtomicBool::new(false));
        let set = Arc::clone(&seen);
        let wait = move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build();
            let Ok(runtime) = runtime else { return };
            runtime.block_on(async {
                while tokio::signal::ctrl_c().await.is_ok() {
                    if set.swap(true, Ordering::Relaxed) {
                        std::process::exit(130);
                    }
                }
            });
        };
        // Without the thread Ctrl-C simply ends the program.
        let _ = std::thread::Builder::new()
            .name("interrupt".into())
            .spawn(wait);
        Self(seen)
    }

    pub(super) fn seen(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// The report for people.
fn text(report: &Report) -> String {
    let mut lines = vec![
        format!("{} namespace {}", report.target, report.nsid),
        format!(
            "{}, {}, {} with {} each, {:.2} s{}",
            report.rw,
            report.size,
            output::count(report.queues.into(), "queue"),
            output::count(report.depth.into(), "I/O"),
            report.seconds,
            if report.interrupted {
                ", interrupted"
            } else {
                ""
            },
        ),
        format!(
            "{:6} {:>10} {:>13} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9}",
            "", "IOPS", "bytes/s", "min", "p50", "p90", "p99", "p99.9", "p99.99", "max"
        ),
    ];
    let rows = [("read", &report.read), ("write", &report.write)];
    lines.extend(
        rows.into_iter()
            .filter(|(_, d)| d.ios > 0)
            .map(|(name, d)| row(name, d)),
    );
    if report.read.ios > 0 && report.write.ios > 0 {
        lines.push(format!(
            "{:6} {:>10} {:>13}",
            "both",
            count(report.iops),
            output::bytes(report.bytes_per_second as u64)
        ));
    }
    if let Some(v) = &report.verification {
        let unknown = match v.blocks_unknown {
            0 => String::new(),
            n => format!(", {n} read whose contents are unknown"),
        };
        lines.push(format!(
            "verified: {} written, {} compared, {} wrong{unknown}",
            output::count(v.blocks_written, "block"),
            v.blocks_checked,
            v.blocks_wrong
        ));
        lines.extend(v.first_mismatch.as_ref().map(mismatch));
    }
    lines.extend(report.paths.as_ref().map(paths));
    if report.losses.connections_lost > 0 {
        lines.push(format!(
            "connections lost: {}, I/Os retried: {}",
            report.losses.connections_lost, report.losses.resent
        ));
    }
    if !report.errors.is_empty() {
        let each = report.errors.iter().map(|(name, n)| format!("{name} {n}"));
        lines.push(format!("errors: {}", each.collect::<Vec<_>>().join(", ")));
    }
    if let Some(e) = &report.first_error {
        lines.push(format!(
            "first error: {} of {} blocks at LBA {}: {}",
            e.op.name(),
            e.blocks,
            e.lba,
            e.status
        ));
    }
    if report.unfinished > 0 {
        lines.push(format!(
            "{} did not complete",
            output::count(report.unfinished, "I/O")
        ));
    }
    lines.join("\n")
}

fn row(name: &str, d: &Direction) -> String {
    let l = &d.latency_ns;
    let mut row = format!(
        "{name:6} {:>10} {:>13}",
        count(d.iops),
        output::bytes(d.bytes_per_second as u64)
    );
    for nanos in [l.min, l.p50, l.p90, l.p99, l.p99_9, l.p99_99, l.max] {
        row.push_str(&format!(" {:>9}", latency(nanos)));
    }
    row
}

fn mismatch(found: &Mismatch) -> String {
    use load::Wrong;
    let e = &found.expected;
    let expected = format!("LBA {}, write {} of run {:x}", e.lba, e.generation, e.run);
    let actual = match found.found {
        Wrong::Zeroes => "nothing but zeroes".to_owned(),
        Wrong::Foreign { first } => {
            format!("no pattern (it begins with {:016x})", first.swap_bytes())
        }
        Wrong::Other { found } => format!(
            "namespace {}, LBA {}, write {} of run {:x}",
            found.nsid, found.lba, found.generation, found.run
        ),
        Wrong::Damaged {
            offset,
            expected,
            actual,
        } => format!(
            "byte {offset}: {:016x} instead of {:016x}",
            actual.swap_bytes(),
            expected.swap_bytes()
        ),
    };
    format!(
        "first mismatch: LBA {}: expected {expected}; found {actual}",
        found.lba
    )
}

fn paths(p: &PathReport) -> String {
    let times = |n: u64| {
        if n == 1 {
            "once".into()
        } else {
            format!("{n} times")
        }
    };
    let mut text = format!("transport at the end: {}", p.transport);
    if p.fallbacks > 0 {
        let cause = p.fallback_cause.as_deref().unwrap_or("no cause is known");
        text.push_str(&format!("; fell back {} ({cause})", times(p.fallbacks)));
        text.push_str(&format!(", returned {}", times(p.returns)));
    }
    if p.failed_attempts + p.failed_probes > 0 {
        let (attempts, probes) = (p.failed_attempts, p.failed_probes);
        text.push_str(&format!(
            "; {} and {} failed",
            output::count(attempts, "attempt"),
            output::count(probes, "probe")
        ));
    }
    text
}

fn verdict(report: &Report) -> String {
    match &report.verification {
        Some(v) if v.blocks_wrong > 0 => {
            format!("wrong: {}", output::count(v.blocks_wrong, "block"))
        }
        _ if report.unfinished > 0 => format!(
            "{} did not complete",
            output::count(report.unfinished, "I/O")
        ),
        _ => format!(
            "{} failed",
            output::count(report.errors.values().sum(), "I/O")
        ),
    }
}

fn count(n: f64) -> String {
    match n {
        n if n >= 10_000_000.0 => format!("{:.1} M", n / 1e6),
        n if n >= 1_000_000.0 => format!("{:.2} M", n / 1e6),
        n if n >= 10_000.0 => format!("{:.1} k", n / 1e3),
        n => format!("{n:.0}"),
    }
}

fn latency(nanos: u64) -> String {
    match nanos {
        n if n >= 10_000_000_000 => format!("{:.1} s", n as f64 / 1e9),
        n if n >= 10_000_000 => format!("{:.1} ms", n as f64 / 1e6),
        n if n >= 1_000_000 => format!("{:.2} ms", n as f64 / 1e6),
        n if n >= 100_000 => format!("{:.0} us", n as f64 / 1e3),
        n => format!("{:.1} us", n as f64 / 1e3),
    }
}
