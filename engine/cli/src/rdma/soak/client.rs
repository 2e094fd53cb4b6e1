//! The client of a soak test: runs the flows of each phase on threads, and takes a sample of
//! counters every second.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use clap::Args;
use nacre_transport_rdma_link::{Fabric, Roots};
use nacre_transport_rdma_perf::{
    Bursts, ClientOptions, Length, Measure, Op, PerfError, Report, Test, measure,
};
use nacre_transport_rdma_verbs::Provider;
use parking_lot::Mutex;

use super::super::counters::{CounterPort, CounterSample, chosen};
use super::super::perf::{interrupt, parse_message, parse_server, provider};
use super::super::perf_show::gid_of;
use super::plan::{LoadKind, Phase, SoakFlow, plan};
use super::verdict::{Change, CounterKind, FlowReport, Second, Soak, SoakLimits, second};
use crate::{Failure, output};
use nacre_engine_doctor::System;
use nacre_engine_values::{size, time};

// `ClientArgs` of `nacre rdma perf` has options of the same names, with other rules: a soak has
// several peers, one size and both directions, and its defaults suit hours of load.
#[derive(Debug, Args)]
pub(crate) struct SoakClientArgs {
    /// Machines where `nacre rdma soak server` runs: ADDRESS[:PORT],…
    #[arg(long, value_name = "PEER,…", value_delimiter = ',', required = true, value_parser = parse_server)]
    peers: Vec<SocketAddr>,
    /// Duration of the load, without the time of each peer alone
    #[arg(long = "for", value_name = "TIME", default_value = "10m", value_parser = time::above_zero)]
    time: Duration,
    /// Bytes of a message
    #[arg(short, long, value_name = "SIZE", default_value = "64k", value_parser = parse_message)]
    size: u32,
    /// Messages in flight on each queue pair
    #[arg(short, long, value_name = "N", default_value_t = 16)]
    depth: u16,
    /// Queue pairs of each peer and direction
    #[arg(short, long, value_name = "N", default_value_t = 1)]
    queue_pairs: u16,
    /// Compare no bytes: faster
    #[arg(long)]
    no_verify: bool,
    /// Length of a burst
    #[arg(long, value_name = "TIME", default_value = "10ms", value_parser = time::above_zero)]
    burst: Duration,
    /// Pause between two bursts
    #[arg(long, value_name = "TIME", default_value = "40ms", value_parser = time::parse)]
    pause: Duration,
    /// The network promises to lose no packets: losses fail the test instead of a warning
    #[arg(long)]
    lossless: bool,
    /// Largest p99 in the incast that passes without a warning, in multiples of the p99 of a peer
    /// alone
    #[arg(long, value_name = "N", default_value_t = 20.0)]
    p99_factor: f64,
    /// Most pause frames per second on one counter without a warning
    #[arg(long, value_name = "N", default_value_t = 1000)]
    max_pauses: u64,
    /// Longest time without a message of a peer
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = time::above_zero)]
    silence: Duration,
    /// Smallest share of a peer in the incast without a warning, in percent of the mean
    #[arg(long, value_name = "PERCENT", default_value_t = 25, value_parser = clap::value_parser!(u64).range(0..=100))]
    min_share: u64,
    /// For address, route and connect of a connection together
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = time::parse)]
    cm_timeout: Duration,
    /// Time without a message from a peer before its flow fails
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = time::above_zero)]
    peer_timeout: Duration,
    /// Most memory of one flow on this machine
    #[arg(long, value_name = "SIZE", default_value = "512MiB", value_parser = size::parse_bytes)]
    memory: u64,
    /// Type of service of the packets: DSCP times 4
    #[arg(long, value_name = "TOS", default_value_t = 0)]
    tos: u8,
    /// Also write the report to this file
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// Print JSON for programs instead of the report for people
    #[arg(long)]
    json: bool,
    /// No line for each second
    #[arg(long)]
    quiet: bool,
}

pub(super) fn run(args: &SoakClientArgs) -> Result<(), Failure> {
    let distinct: BTreeSet<_> = args.peers.iter().collect();
    if distinct.len() < args.peers.len() {
        return Err(Failure::Usage("--peers: a peer is named twice".into()));
    }
    args.test(Op::Read, Duration::from_secs(1))
        .check()
        .map_err(|error| Failure::Usage(error.to_string()))?;
    // A report that cannot be written is found now, not after hours.
    if let Some(path) = &args.report {
        std::fs::write(path, "")
            .map_err(|error| Failure::Usage(format!("--report: {}: {error}", path.display())))?;
    }
    let provider = provider()?;
    let bursts = Bursts {
        on: args.burst,
        off: args.pause,
    };
    let phases = plan(&args.peers, args.time, bursts);
    let stop = interrupt();
    let mut soak = Runner::new(args, &*provider, &stop).run(&phases)?;
    soak.evaluate();
    if let Some(path) = &args.report {
        let text = soak.text() + "\n";
        std::fs::write(path, text)
            .map_err(|error| anyhow::anyhow!("--report: {}: {error}", path.display()))?;
    }
    if args.json {
        output::json(&serde_json::to_value(&soak).expect("a report serialises"))?;
    } else {
        output::line(&soak.text())?;
    }
    match &soak.failures[..] {
        [] => Ok(()),
        failures => Err(Failure::Failed(anyhow::anyhow!(
            "the soak test failed: {}",
            failures.join("; ")
        ))),
    }
}

impl SoakClientArgs {
    fn test(&self, op: Op, time: Duration) -> Test {
        Test {
            op,
            measure: Measure::Bandwidth,
            sizes: vec![self.size],
            length: Length::Time(time),
            warmup: 0,
            queue_pairs: self.queue_pairs,
            depth: self.depth,
            verify: !self.no_verify,
            seed: uuid::Uuid::new_v4().as_fields().0,
        }
    }

    fn options(&self, flow: SoakFlow, phase: &Phase) -> ClientOptions {
        ClientOptions {
            cm_timeout: self.cm_timeout,
            // The session of the previous phase may not have ended there yet.
            wait: self.peer_timeout,
            peer_timeout: self.peer_timeout,
            memory: self.memory,
            tos: self.tos,
            bursts: phase.bursts,
            ..ClientOptions::new(flow.server(), self.test(flow.op, phase.time))
        }
    }
}

/// The progress of a flow, written by its thread.
#[derive(Default)]
struct Live {
    messages: AtomicU64,
    p99_ns: AtomicU64,
    ended: AtomicBool,
}

/// Sets a flag when it is dropped, also by a panic.
struct SetAtEnd<'a>(&'a AtomicBool);

impl Drop for SetAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

struct Runner<'a> {
    args: &'a SoakClientArgs,
    provider: &'a dyn Provider,
    stop: &'a AtomicBool,
    roots: Roots,
    ports: Vec<CounterPort>,
    names: Vec<String>,
    begin: Instant,
    software: bool,
    seconds: Vec<Second>,
    flows: Vec<FlowReport>,
}

/// The RDMA ports with the routes to the peers.
fn ports(
    system: &System,
    fabric: &Fabric,
    peers: &[SocketAddr],
) -> (Vec<CounterPort>, Vec<String>) {
    let port = |peer: &SocketAddr| {
        let local = system.probe.source_for(*peer).ok()?;
        Some(gid_of(system, local)?.0)
    };
    let names: BTreeSet<String> = peers.iter().filter_map(port).collect();
    let found = names
        .iter()
        .filter_map(|name| chosen(fabric, Some(name)).ok());
    (found.flatten().collect(), names.into_iter().collect())
}

impl<'a> Runner<'a> {
    fn new(args: &'a SoakClientArgs, provider: &'a dyn Provider, stop: &'a AtomicBool) -> Self {
        let system = System::real();
        let roots = Roots::real();
        let (ports, names) = ports(&system, &Fabric::read(&roots.sys), &args.peers);
        Runner {
            args,
            provider,
            stop,
            roots,
            ports,
            names,
            begin: Instant::now(),
            software: false,
            seconds: Vec::new(),
            flows: Vec::new(),
        }
    }

    fn run(mut self, phases: &[Phase]) -> Result<Soak, Failure> {
        let first = CounterSample::take(&self.roots, &self.ports);
        let mut before = CounterSample::take(&self.roots, &self.ports);
        for phase in phases {
            if self.stop.load(Ordering::Relaxed) {
                break;
            }
            before = self.phase(phase, before)?;
        }
        let counters = changes(&CounterSample::take(&self.roots, &self.ports), &first);
        let args = self.args;
        Ok(Soak {
            schema: Soak::SCHEMA,
            ports: self.names,
            software: self.software,
            peers: args.peers.iter().map(SocketAddr::to_string).collect(),
            message_bytes: args.size,
            verify: !args.no_verify,
            limits: SoakLimits {
                lossless: args.lossless,
                p99_factor: args.p99_factor,
                pauses: args.max_pauses,
                silent_seconds: args.silence.as_secs(),
                share_percent: args.min_share,
            },
            flows: self.flows,
            seconds: self.seconds,
            counters,
            interrupted: self.stop.load(Ordering::Relaxed),
            failures: Vec::new(),
            warnings: Vec::new(),
        })
    }

    /// Runs the flows of a phase. A flow that fails does not end the others: the verdict needs
    /// them.
    fn phase(
        &mut self,
        phase: &Phase,
        mut before: CounterSample,
    ) -> Result<CounterSample, Failure> {
        let live: Vec<Live> = phase.flows.iter().map(|_| Live::default()).collect();
        let outcomes: Vec<Mutex<Option<Result<Report, PerfError>>>> =
            phase.flows.iter().map(|_| Mutex::new(None)).collect();
        let mut silent = vec![(0u64, 0u64); phase.flows.len()];
        let (provider, stop, args) = (self.provider, self.stop, self.args);
        std::thread::scope(|scope| {
            for ((flow, live), outcome) in phase.flows.iter().zip(&live).zip(&outcomes) {
                let options = args.options(*flow, phase);
                scope.spawn(move || {
                    let _ended = SetAtEnd(&live.ended);
                    let report = measure(provider, &options, stop, &mut |at| {
                        live.messages.store(at.messages, Ordering::Relaxed);
                        live.p99_ns.store(at.recent_p99_ns, Ordering::Relaxed);
                    });
                    *outcome.lock() = Some(report);
                });
            }
            let mut counted = vec![0u64; phase.flows.len()];
            let mut next = Instant::now() + Duration::from_secs(1);
            while !live.iter().all(|live| live.ended.load(Ordering::Acquire)) {
                std::thread::sleep(Duration::from_millis(20));
                if Instant::now() >= next {
                    next += Duration::from_secs(1);
                    let now = CounterSample::take(&self.roots, &self.ports);
                    let second = self.sample(phase, &live, &mut counted, &mut silent);
                    let second = Second {
                        changes: changes(&now, &before),
                        ..second
                    };
                    before = now;
                    // The other threads end first.
                    if let Err(error) = self.show(&second) {
                        stop.store(true, Ordering::Relaxed);
                        return Err(error);
                    }
                    self.seconds.push(second);
                }
            }
            Ok::<(), Failure>(())
        })?;
        for ((flow, outcome), (_, silent)) in phase.flows.iter().zip(outcomes).zip(silent) {
            self.ended(phase.kind, *flow, outcome.into_inner(), silent);
        }
        Ok(before)
    }

    /// The second that just ended, without its counters.
    fn sample(
        &self,
        phase: &Phase,
        live: &[Live],
        counted: &mut [u64],
        silent: &mut [(u64, u64)],
    ) -> Second {
        let mut second = Second {
            second: self.begin.elapsed().as_secs(),
            phase: phase.kind,
            bytes_in: 0,
            bytes_out: 0,
            p99_ns: 0,
            silent_flows: 0,
            changes: Vec::new(),
        };
        for (index, (flow, live)) in phase.flows.iter().zip(live).enumerate() {
            let messages = live.messages.load(Ordering::Relaxed);
            let more = messages.saturating_sub(counted[index]);
            counted[index] = messages;
            if live.ended.load(Ordering::Acquire) {
                continue;
            }
            let (run, longest) = &mut silent[index];
            *run = if more == 0 { *run + 1 } else { 0 };
            *longest = (*longest).max(*run);
            second.silent_flows += usize::from(more == 0);
            let bytes = more * u64::from(self.args.size);
            match flow.op {
                Op::Read => second.bytes_in += bytes,
                _ => second.bytes_out += bytes,
            }
            second.p99_ns = second.p99_ns.max(live.p99_ns.load(Ordering::Relaxed));
        }
        second
    }

    fn show(&self, one: &Second) -> Result<(), Failure> {
        if self.args.json || self.args.quiet {
            return Ok(());
        }
        output::line(&second(one))
    }

    fn ended(
        &mut self,
        phase: LoadKind,
        flow: SoakFlow,
        outcome: Option<Result<Report, PerfError>>,
        silent_seconds: u64,
    ) {
        let mut report = FlowReport {
            phase,
            peer: flow.peer.to_string(),
            op: flow.op,
            bytes: 0,
            gigabytes_per_second: 0.0,
            median_ns: 0,
            p99_ns: 0,
            silent_seconds,
            error: None,
        };
        match outcome {
            Some(Ok(measured)) => {
                self.software |= measured.software;
                if let Some(result) = measured.results.first() {
                    report.bytes = result.bytes;
                    report.gigabytes_per_second = result.gigabytes_per_second;
                    report.median_ns = result.latency_ns.median;
                    report.p99_ns = result.latency_ns.p99;
                }
            }
            Some(Err(PerfError::Interrupted)) => {}
            Some(Err(error)) => report.error = Some(error.to_string()),
            None => report.error = Some("its thread ended without a result".into()),
        }
        self.flows.push(report);
    }
}

/// Counters with a meaning that grew.
fn changes(now: &CounterSample, before: &CounterSample) -> Vec<Change> {
    let change = |(port, counter, by): (String, String, u64)| {
        Some(Change {
            kind: CounterKind::of(&counter)?,
            port,
            counter,
            by,
        })
    };
    now.changes(before).into_iter().filter_map(change).collect()
}
