//! `nacre rdma perf server` and `client`: bandwidth and latency of SEND, WRITE and READ between two
//! machines.

use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroU16;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use clap::{Args, Subcommand};
use nacre_nvmf::address::{Grammar, Scheme};
use nacre_transport_rdma_perf::{
    ClientOptions, DEFAULT_PORT, Length, MAX_MESSAGE, Measure, Op, PerfError, Server,
    ServerOptions, Test, measure,
};
use nacre_transport_rdma_verbs::{Provider, VerbsError, VerbsProvider};

use super::perf_show;
use crate::Failure;
use nacre_engine_doctor::{self as doctor, System};
use nacre_engine_values::address::{AddressError, socket_of};
use nacre_engine_values::size;

#[derive(Debug, Subcommand)]
pub(super) enum PerfCommand {
    /// Wait for clients, one after another
    #[command(
        after_help = "Exit codes: 0 stopped, or --once and its client succeeded; 1 failed; 2 \
            wrong usage.\n\nExamples:\n  nacre rdma perf server\n  nacre rdma perf server \
            --listen 192.0.2.1 --once\n  nacre rdma perf server --listen rdma:mlx5_0/1"
    )]
    Server(ServerArgs),
    /// Measure against a server
    #[command(
        after_help = "Exit codes: 0 done, 1 a request failed or data was wrong, 2 wrong usage, 3 cannot connect.\n\nExamples:\n  nacre rdma perf client 192.0.2.1 --op write -n 10000\n  nacre rdma perf client 192.0.2.1 --op read --lat --sweep 64-1m\n  nacre rdma perf client 192.0.2.1 --verify --duration 30s --queue-pairs 4"
    )]
    Client(Box<ClientArgs>),
}

#[derive(Debug, Args)]
pub(super) struct ServerArgs {
    /// An address of this machine, or name:eth0, rdma:mlx5_0/1, mac:…, subnet:…, with a port after
    /// a comma unless it is 18515: determines the device, port and GID. May be repeated [default:
    /// all addresses]
    #[arg(long, value_name = "WHERE")]
    listen: Vec<String>,
    /// End after one client, with its result
    #[arg(long)]
    once: bool,
    /// Most memory for a client's test
    #[arg(long, value_name = "SIZE", default_value = "512MiB", value_parser = size::parse_bytes)]
    memory: u64,
    /// Queue pairs of one client
    #[arg(long, value_name = "N")]
    max_queue_pairs: Option<NonZeroU16>,
    /// Requests in flight on one queue pair
    #[arg(long, value_name = "N")]
    max_depth: Option<NonZeroU16>,
    /// Type of service of the packets: DSCP times 4
    #[arg(long, value_name = "TOS", default_value_t = 0)]
    tos: u8,
    /// How long to poll for completions before sleeping
    #[arg(long, value_name = "TIME", default_value = "1ms", value_parser = nacre_engine_values::time::parse)]
    busy_poll: Duration,
    /// Print a line of JSON for each event
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
pub(super) struct ClientArgs {
    /// The server: ADDRESS[:PORT]
    #[arg(value_name = "SERVER", value_parser = parse_server)]
    server: SocketAddr,
    /// send, write or read
    #[arg(long, default_value = "send")]
    op: Op,
    /// As many messages in flight as the depth allows [default]
    #[arg(long, conflicts_with = "lat")]
    bw: bool,
    /// One message in flight on each queue pair
    #[arg(long)]
    lat: bool,
    /// Bytes of a message, or several sizes: 4k,64k,1m [default: 64k, and 64 with --lat]
    #[arg(short, long, value_name = "SIZE,…", value_delimiter = ',', value_parser = parse_message)]
    size: Vec<u32>,
    /// All powers of two from MIN to MAX
    #[arg(long, value_name = "MIN-MAX", conflicts_with = "size", value_parser = parse_sweep)]
    sweep: Option<Sweep>,
    /// Messages of each size, of all queue pairs together [default: 1000]
    #[arg(short = 'n', long, value_name = "N", visible_alias = "messages", value_parser = clap::value_parser!(u64).range(1..))]
    iterations: Option<u64>,
    /// Duration of each size's measurement, in place of a number of messages
    #[arg(short = 'D', long, value_name = "TIME", conflicts_with = "iterations", value_parser = nacre_engine_values::time::above_zero)]
    duration: Option<Duration>,
    /// Messages before each measurement
    #[arg(long, value_name = "N", default_value_t = 16)]
    warmup: u64,
    /// Messages in flight on each queue pair
    #[arg(short, long, value_name = "N", default_value_t = 32)]
    depth: u16,
    /// Queue pairs, each with a connection of its own
    #[arg(short, long, value_name = "N", default_value_t = 1)]
    queue_pairs: u16,
    /// Compare every byte: slower
    #[arg(long)]
    verify: bool,
    /// Source: an address of this machine, or name:eth0, rdma:mlx5_0/1, …; determines the device,
    /// port and GID [default: by the route]
    #[arg(long, value_name = "WHERE")]
    source: Option<String>,
    /// For address, route and connect of a connection together
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = nacre_engine_values::time::parse)]
    cm_timeout: Duration,
    /// Time without a message from the other end, or without a completed one, before the client
    /// gives up
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = nacre_engine_values::time::above_zero)]
    peer_timeout: Duration,
    /// How long to retry a server that is busy with another client
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = nacre_engine_values::time::parse)]
    wait: Duration,
    /// Most memory for the test on this machine
    #[arg(long, value_name = "SIZE", default_value = "1GiB", value_parser = size::parse_bytes)]
    memory: u64,
    /// Type of service of the packets: DSCP times 4
    #[arg(long, value_name = "TOS", default_value_t = 0)]
    tos: u8,
    /// How long to poll for completions before sleeping
    #[arg(long, value_name = "TIME", default_value = "1ms", value_parser = nacre_engine_values::time::parse)]
    busy_poll: Duration,
    /// Print JSON for programs instead of a table for people
    #[arg(long)]
    json: bool,
}

pub(super) fn run(command: PerfCommand) -> Result<(), Failure> {
    match command {
        PerfCommand::Server(args) => server(args),
        PerfCommand::Client(args) => client(&args),
    }
}

fn server(args: ServerArgs) -> Result<(), Failure> {
    let system = System::real();
    let provider = provider()?;
    let listen = listen_addresses(&system, &args.listen)?;
    let defaults = ServerOptions::new(listen);
    let options = ServerOptions {
        once: args.once,
        memory: args.memory,
        max_queue_pairs: args
            .max_queue_pairs
            .map_or(defaults.max_queue_pairs, NonZeroU16::get),
        max_depth: args.max_depth.map_or(defaults.max_depth, NonZeroU16::get),
        tos: args.tos,
        spin: args.busy_poll,
        ..defaults
    };
    let addresses = options.listen.clone();
    let mut server = Server::bind(provider, options).map_err(|error| {
        failure(
            error,
            explained(&system, addresses.iter().map(SocketAddr::ip)),
        )
    })?;
    let stop = interrupt();
    perf_show::listening(&system, &server.addresses(), args.json)?;
    let mut printed = Ok(());
    let served = server.serve(&stop, &mut |happened| {
        if printed.is_ok() {
            printed = perf_show::happened(&happened, args.json);
        }
        if printed.is_err() {
            stop.store(true, Ordering::Relaxed);
        }
    });
    printed?;
    served.map_err(|error| failure(error, None))
}

fn client(args: &ClientArgs) -> Result<(), Failure> {
    let test = args.test();
    test.check()
        .map_err(|error| Failure::Usage(error.to_string()))?;
    let system = System::real();
    let source = match &args.source {
        Some(selector) => Some(source(&system, selector, args.server.ip())?),
        None => None,
    };
    let provider = provider()?;
    let options = ClientOptions {
        source,
        cm_timeout: args.cm_timeout,
        wait: args.wait,
        peer_timeout: args.peer_timeout,
        memory: args.memory,
        tos: args.tos,
        spin: args.busy_poll,
        ..ClientOptions::new(args.server, test)
    };
    let line = perf_show::ProgressLine::new(args.json);
    let outcome = measure(&*provider, &options, &interrupt(), &mut |at| line.show(&at));
    line.clear();
    let report = outcome.map_err(|error| {
        let from = source.or_else(|| system.probe.source_for(args.server).ok());
        failure(error, explained(&system, from))
    })?;
    perf_show::report(&system, &report, args.json)
}

impl ClientArgs {
    fn test(&self) -> Test {
        let sizes = match &self.sweep {
            Some(sweep) => sweep.0.clone(),
            None if self.size.is_empty() => vec![if self.lat { 64 } else { 64 << 10 }],
            None => self.size.clone(),
        };
        Test {
            op: self.op,
            measure: if self.lat {
                Measure::Latency
            } else {
                Measure::Bandwidth
            },
            sizes,
            length: match self.duration {
                Some(time) => Length::Time(time),
                None => Length::Messages(self.iterations.unwrap_or(1000)),
            },
            warmup: self.warmup,
            queue_pairs: self.queue_pairs,
            depth: self.depth,
            verify: self.verify,
            seed: uuid::Uuid::new_v4().as_fields().0,
        }
    }
}

/// The libraries, and at least one device; or an error that names the missing part and its remedy.
pub(super) fn provider() -> Result<Arc<dyn Provider>, Failure> {
    let said = |error: VerbsError| Failure::Failed(anyhow::anyhow!("{error}"));
    let provider = VerbsProvider::open().map_err(said)?;
    if provider.devices().map_err(said)?.is_empty() {
        return Err(said(provider.absence().into_error()));
    }
    Ok(Arc::new(provider))
}

/// The addresses of `--listen`; all if it is not given.
pub(super) fn listen_addresses(
    system: &System,
    selectors: &[String],
) -> Result<Vec<SocketAddr>, Failure> {
    let mut listen = Vec::new();
    for text in selectors {
        let (selector, port) = match text.rsplit_once(',') {
            Some((selector, port)) => (selector, parse_port(port)?),
            None => (&text[..], DEFAULT_PORT),
        };
        let found = addresses(system, selector)?;
        listen.extend(found.into_iter().map(|ip| SocketAddr::new(ip, port)));
    }
    if listen.is_empty() {
        listen = everywhere();
    }
    Ok(listen)
}

/// The addresses of a selector that support RDMA.
pub(super) fn addresses(system: &System, selector: &str) -> Result<Vec<IpAddr>, Failure> {
    if let Ok(ip) = selector.trim_matches(['[', ']']).parse() {
        return Ok(vec![ip]);
    }
    let found = doctor::select(system, selector);
    let (mut able, mut reasons) = (Vec::new(), Vec::new());
    for selected in found.iter().filter(|selected| !is_link_local(selected.ip)) {
        match doctor::reason_without_rdma(system, selected.ip) {
            None => able.push(selected.ip),
            Some(reason) => reasons.push(format!("{}: {reason}", selected.ip)),
        }
    }
    match (able.is_empty(), reasons.is_empty()) {
        (false, _) => Ok(able),
        (true, true) => Err(anyhow::anyhow!(doctor::no_interface(system, selector)).into()),
        (true, false) => {
            let reasons = reasons.join("; ");
            Err(anyhow::anyhow!("no RDMA by \"{selector}\": {reasons}").into())
        }
    }
}

/// The first of them that can reach the server: of the same family.
pub(super) fn source(system: &System, selector: &str, server: IpAddr) -> Result<IpAddr, Failure> {
    let found = addresses(system, selector)?;
    let same = found.iter().find(|ip| ip.is_ipv4() == server.is_ipv4());
    same.copied().ok_or_else(|| {
        let have: Vec<String> = found.iter().map(IpAddr::to_string).collect();
        let have = have.join(", ");
        anyhow::anyhow!("\"{selector}\" has no address that reaches {server}; have: {have}").into()
    })
}

/// True for link-local addresses, which a peer on another link cannot use.
fn is_link_local(ip: IpAddr) -> bool {
    matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local())
}

/// Why none of these addresses can be used over RDMA, according to the kernel.
pub(super) fn explained(
    system: &System,
    addresses: impl IntoIterator<Item = IpAddr>,
) -> Option<String> {
    let reasons = addresses.into_iter().filter_map(|ip| {
        Some(format!(
            "{ip}: {}",
            doctor::reason_without_rdma(system, ip)?
        ))
    });
    let reasons: Vec<String> = reasons.collect();
    (!reasons.is_empty()).then(|| reasons.join("; "))
}

pub(super) fn failure(error: PerfError, explained: Option<String>) -> Failure {
    let code = match error {
        PerfError::Invalid(_) => 2,
        PerfError::Timeout { .. } | PerfError::Connect { .. } | PerfError::NobodyListens { .. } => {
            3
        }
        _ => 1,
    };
    // The kernel's state explains missing devices, not later errors.
    let early = match &error {
        PerfError::Verbs(_) | PerfError::Register(_) => true,
        _ => code == 3,
    };
    // Its text has the cause already.
    let error = match explained.filter(|_| early) {
        Some(why) => anyhow::anyhow!("{error}\n{why}"),
        None => anyhow::anyhow!("{error}"),
    };
    Failure::Exit { code, error }
}

/// IPv4 and IPv6 have a listener each.
fn everywhere() -> Vec<SocketAddr> {
    let any: [IpAddr; 2] = [
        std::net::Ipv4Addr::UNSPECIFIED.into(),
        std::net::Ipv6Addr::UNSPECIFIED.into(),
    ];
    any.map(|ip| SocketAddr::new(ip, DEFAULT_PORT)).to_vec()
}

/// Set by the first SIGINT or SIGTERM; the second ends the program.
pub(super) fn interrupt() -> Arc<AtomicBool> {
    use tokio::signal::unix::{SignalKind, signal};
    let seen = Arc::new(AtomicBool::new(false));
    let set = Arc::clone(&seen);
    let (ready, listening) = std::sync::mpsc::channel::<()>();
    let wait = move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        let Ok(runtime) = runtime else { return };
        runtime.block_on(async {
            let signals = (
                signal(SignalKind::interrupt()),
                signal(SignalKind::terminate()),
            );
            let (Ok(mut interrupt), Ok(mut terminate)) = signals else {
                return;
            };
            drop(ready);
            loop {
                tokio::select! {
                    _ = interrupt.recv() => {}
                    _ = terminate.recv() => {}
                }
                if set.swap(true, Ordering::Relaxed) {
                    std::process::exit(130);
                }
            }
        });
    };
    // Without the thread a signal simply ends the program. It starts before anything is announced.
    if std::thread::Builder::new()
        .name("interrupt".into())
        .spawn(wait)
        .is_ok()
    {
        let _ = listening.recv();
    }
    seen
}

fn parse_port(text: &str) -> Result<u16, Failure> {
    text.parse()
        .map_err(|_| Failure::Usage(format!("\"{text}\" is no port")))
}

/// `192.0.2.1:18515`, `192.0.2.1`, `[::1]:18515`, `[::1]`, `::1`, or a name in place of the
/// address.
pub(super) fn parse_server(text: &str) -> Result<SocketAddr, AddressError> {
    const SERVER: Grammar = Grammar {
        form: "ADDRESS[:PORT] or rdma://ADDRESS[:PORT]",
        schemes: &[Scheme::Rdma],
        ..Grammar::LISTENER
    };
    socket_of(&SERVER.parse(text)?, DEFAULT_PORT)
}

pub(super) fn parse_message(text: &str) -> Result<u32, String> {
    let bytes = size::parse_bytes(text)?;
    match u32::try_from(bytes) {
        Ok(bytes) if (1..=MAX_MESSAGE).contains(&bytes) => Ok(bytes),
        _ => Err(format!(
            "{text} is not a message size: use 1 byte to 256 MiB"
        )),
    }
}

/// The sizes of a sweep.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Sweep(pub Vec<u32>);

pub(super) fn parse_sweep(text: &str) -> Result<Sweep, String> {
    let said = || format!("\"{text}\" is not a range: write for example 64-1m");
    let (min, max) = text.split_once('-').ok_or_else(said)?;
    let (min, max) = (parse_message(min)?, parse_message(max)?);
    if min > max {
        return Err(said());
    }
    let mut sizes: Vec<u32> =
        std::iter::successors(Some(min.next_power_of_two()), |size| size.checked_mul(2))
            .take_while(|size| *size <= max)
            .collect();
    // The ends of the range are always included.
    if sizes.first() != Some(&min) {
        sizes.insert(0, min);
    }
    if sizes.last() != Some(&max) {
        sizes.push(max);
    }
    Ok(Sweep(sizes))
}
