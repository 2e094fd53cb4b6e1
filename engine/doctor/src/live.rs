//! The checks of `nacre doctor` that contact another machine over RDMA, or transfer data through a
//! device.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use nacre_nvmf::transport::QUEUE_DEPTHS;
use nacre_transport_rdma::{QueueNeed, RdmaConfig, shared_receives};
use nacre_transport_rdma_link::{CounterGroup, counters};
use nacre_transport_rdma_perf::wire::Refusal;
use nacre_transport_rdma_perf::{
    Answer, ClientOptions, DEFAULT_PORT, Length, Measure, Op, PerfError, Report, Test, around,
    measure, probe,
};
use nacre_transport_rdma_verbs::{Provider, VerbsError};

use super::rdma::{reason_without_rdma, with_devices};
use super::select::select_all;
use super::{Finding, Scope, System};
use nacre_engine_values::size::bytes;

/// Time limit for a connection, and for a reply of the peer.
const PATIENCE: Duration = Duration::from_secs(5);
/// Time limit without progress: soft-RoCE on a busy machine is slow.
const DATA_PATIENCE: Duration = Duration::from_secs(60);
/// Messages of a ping-pong, and the size of each data transfer.
const PINGS: u64 = 100;
const MESSAGE: u32 = 64 << 10;

/// Opens a reliable connection to the peer. A `nacre rdma perf server` there answers a ping-pong;
/// other servers only answer the request.
pub(crate) fn peer(system: &System, scope: &Scope, target: SocketAddr, source: IpAddr) -> Finding {
    const ID: &str = "net.peer";
    if let Some(reason) = no_rdma(system, source) {
        let evidence = format!("no RDMA connection was tried from {source}: {reason}");
        return if scope.rdma {
            Finding::fail(ID, evidence, "see rdma.capable; or name another --peer")
        } else {
            Finding::skip(ID, evidence)
        };
    }
    let provider = match system.probe.rdma() {
        Ok(provider) => provider,
        Err(error) => return Finding::skip(ID, error.to_string()),
    };
    let test = Test {
        measure: Measure::Latency,
        sizes: vec![64],
        length: Length::Messages(PINGS),
        verify: true,
        ..Test::default()
    };
    let mut server = target;
    server.set_port(DEFAULT_PORT);
    let outcome = run(&provider, server, source, test, PATIENCE);
    let error = match outcome {
        Ok(report) => return Finding::pass(ID, ping_pong(&report)),
        Err(PerfError::NobodyListens { .. }) => None,
        Err(PerfError::Refused { reject, .. }) if reject.refusal == Refusal::Busy => None,
        Err(error) => Some(error),
    };
    let port = target.port();
    let error = match error {
        Some(error) => error,
        None => match probe(&*provider, target, Some(source), PATIENCE) {
            Ok(Answer::Accepted) => {
                let evidence = format!(
                    "a reliable connection to port {port} from {source} was accepted over RDMA"
                );
                return Finding::pass(ID, evidence);
            }
            Ok(Answer::Refused) => {
                let evidence = format!(
                    "a target answers over RDMA on port {port} (and refuses a connection that says nothing), from {source}"
                );
                return Finding::pass(ID, evidence);
            }
            Err(PerfError::NobodyListens { .. }) => {
                return Finding::warn(
                    ID,
                    format!(
                        "its connection manager answers {source} over RDMA; nothing listens on port {port} or {DEFAULT_PORT}"
                    ),
                    "start a target there, or `nacre rdma perf server`, and run this again",
                );
            }
            Err(error) => error,
        },
    };
    let evidence = format!("RDMA from {source}: {error}");
    let remedy = "`nacre rdma gids` on both machines, UDP 4791 in their packet filters, the same MTU on the way";
    if scope.rdma {
        Finding::fail(ID, evidence, remedy)
    } else {
        Finding::warn(ID, evidence, remedy)
    }
}

fn ping_pong(report: &Report) -> String {
    let latency = report
        .results
        .first()
        .map(|result| result.latency_ns)
        .unwrap_or_default();
    let micros = |nanos: u64| nanos as f64 / 1000.0;
    format!(
        "a reliable connection by {}/{} from {}: {PINGS} messages there and back, compared; half a round trip {:.1} us, p99 \
         {:.1} us",
        report.device,
        report.port,
        report.local,
        micros(latency.median),
        micros(latency.p99)
    )
}

fn run(
    provider: &Arc<dyn Provider>,
    server: SocketAddr,
    source: IpAddr,
    test: Test,
    patience: Duration,
) -> Result<Report, PerfError> {
    let options = ClientOptions {
        source: Some(source),
        cm_timeout: PATIENCE,
        peer_timeout: patience,
        wait: Duration::ZERO,
        ..ClientOptions::new(server, test)
    };
    measure(&**provider, &options, &AtomicBool::new(false), &mut |_| ())
}

/// Why RDMA from this address is impossible, in short.
fn no_rdma(system: &System, source: IpAddr) -> Option<String> {
    match system.interface_of(source) {
        Some(_) => reason_without_rdma(system, source),
        None => Some(format!("{source} is on no interface that is known")),
    }
}

/// Moves data through each address's device, and checks that the counters of the right port moved.
pub(crate) fn traffic(system: &System, scope: &Scope, findings: &mut Vec<Finding>) {
    const ID: &str = "rdma.traffic";
    let Some(amount) = scope.traffic else {
        findings.push(Finding::skip(
            ID,
            "nothing was moved: `--traffic` moves 64 MiB",
        ));
        return;
    };
    let provider = match system.probe.rdma() {
        Ok(provider) => provider,
        Err(error) => return findings.push(Finding::skip(ID, error.to_string())),
    };
    let selected = if scope.listeners.is_empty() {
        with_devices(system)
    } else {
        select_all(system, scope)
    };
    // To a peer, use only the address that the route selects.
    let from = scope
        .peer_at(DEFAULT_PORT)
        .and_then(|peer| system.probe.source_for(peer.ok()?).ok());
    let mut any = false;
    for selected in selected {
        let link_local = matches!(selected.ip, IpAddr::V6(ip) if ip.is_unicast_link_local());
        let elsewhere = from.is_some_and(|from| from != selected.ip);
        if link_local || elsewhere || no_rdma(system, selected.ip).is_some() {
            continue;
        }
        any = true;
        let subject = format!("{} {}", selected.netdev, selected.ip);
        let finding = moved(
            system,
            scope,
            &provider,
            &selected.netdev,
            selected.ip,
            amount,
        );
        findings.push(finding.of(subject));
    }
    if !any {
        findings.push(Finding::skip(ID, "no address that RDMA can be had on"));
    }
}

fn moved(
    system: &System,
    scope: &Scope,
    provider: &Arc<dyn Provider>,
    netdev: &str,
    ip: IpAddr,
    amount: u64,
) -> Finding {
    const ID: &str = "rdma.traffic";
    let test = Test {
        op: Op::Write,
        sizes: vec![MESSAGE],
        length: Length::Messages(amount.div_ceil(MESSAGE.into()).max(1)),
        warmup: 0,
        depth: 16,
        verify: true,
        ..Test::default()
    };
    let before = activity(system);
    let outcome = match scope.peer_at(DEFAULT_PORT) {
        Some(Ok(server)) => run(provider, server, ip, test, DATA_PATIENCE),
        Some(Err(error)) => return Finding::skip(ID, error.to_string()),
        None => around(provider, ip, test, DATA_PATIENCE),
    };
    let report = match outcome {
        Ok(report) => report,
        Err(error @ (PerfError::NobodyListens { .. } | PerfError::Refused { .. })) => {
            return Finding::skip(
                ID,
                format!("{error}; `nacre rdma perf server` there answers this check"),
            );
        }
        Err(error) => {
            return Finding::fail(
                ID,
                error.to_string(),
                "`nacre rdma perf` measures the path; `nacre rdma counters --watch 1` shows where packets go",
            );
        }
    };
    let changed = changes(&before, &activity(system));
    let port = format!("{}/{}", report.device, report.port);
    let result = report.results.first();
    let (seconds, rate) = result.map_or((0.0, 0.0), |r| (r.seconds, r.gigabytes_per_second));
    let what = format!(
        "{} compared in {seconds:.1} s ({rate:.3} GB/s)",
        bytes(amount)
    );
    counter_finding(&what, &port, netdev, &changed, scope.peer.is_some())
}

/// Counters of data and packets, by port.
pub(super) type Activity = BTreeMap<String, BTreeMap<String, u64>>;

fn activity(system: &System) -> Activity {
    let ports = system.fabric.ports().map(|(device, port)| {
        let all = counters(&system.roots.sys, &device.name, port.num, None);
        let data = all.into_iter().filter(|counter| {
            let names = [
                "xmit_data",
                "rcv_data",
                "xmit_packets",
                "rcv_packets",
                "sent_pkts",
                "rcvd_pkts",
            ];
            counter.group != CounterGroup::Netdev
                && names.iter().any(|name| counter.name.contains(name))
        });
        let data = data.map(|counter| (counter.name, counter.value)).collect();
        (format!("{}/{}", device.name, port.num), data)
    });
    ports.collect()
}

/// The counters that increased, by port.
pub(super) fn changes(before: &Activity, after: &Activity) -> Activity {
    let more = |port: &String, name: &String, now: u64| {
        let then = before.get(port).and_then(|counters| counters.get(name));
        now.saturating_sub(then.copied().unwrap_or(0))
    };
    let ports = after.iter().map(|(port, counters)| {
        let grown = counters
            .iter()
            .map(|(name, now)| (name.clone(), more(port, name, *now)));
        (port.clone(), grown.filter(|(_, more)| *more > 0).collect())
    });
    ports
        .filter(|(_, grown): &(String, BTreeMap<String, u64>)| !grown.is_empty())
        .collect()
}

pub(super) fn counter_finding(
    what: &str,
    port: &str,
    netdev: &str,
    changed: &Activity,
    to_peer: bool,
) -> Finding {
    const ID: &str = "rdma.traffic";
    let in_words = |counters: &BTreeMap<String, u64>| {
        let counters: Vec<String> = counters
            .iter()
            .map(|(name, more)| format!("{name} +{more}"))
            .collect();
        counters.join(", ")
    };
    if let Some(counters) = changed.get(port) {
        return Finding::pass(ID, format!("{what}; {port}: {}", in_words(counters)));
    }
    // Other ports may have unrelated traffic; blame one only if traffic to a peer has no other
    // explanation.
    if let Some((other, counters)) = changed.iter().next().filter(|_| to_peer) {
        return Finding::fail(
            ID,
            format!(
                "{what}, but not by {port} of {netdev}; {other}: {}",
                in_words(counters)
            ),
            "two interfaces in one network: see net.arp, or give each a network of its own",
        );
    }
    let why = if to_peer {
        "no counter of the port moved: the driver may have none (rdma.counters)"
    } else {
        "devices often do not count traffic to themselves: --peer ADDRESS moves it over the wire"
    };
    Finding::skip(ID, format!("{what}; {why}"))
}

/// Compares the device's completion queue entries with the needs of one host's queues.
pub(crate) fn completion_queues(system: &System, scope: &Scope, findings: &mut Vec<Finding>) {
    const ID: &str = "rdma.cq";
    if system.fabric.devices.is_empty() {
        return;
    }
    let devices = system.probe.rdma().and_then(|provider| provider.devices());
    let devices = match devices {
        Ok(devices) => devices,
        Err(error) => return findings.push(Finding::skip(ID, error.to_string())),
    };
    let config = RdmaConfig::default();
    let deepest = u32::from(*QUEUE_DEPTHS.end());
    let (queues, depth) = (scope.queues(), scope.depth().min(deepest));
    for device in devices {
        let attributes = device.attributes();
        let completions = |depth: u32| {
            let need = QueueNeed::of(&config, attributes, depth, config.read_depth);
            u64::from(need.completions())
        };
        // The admin queue has 32 entries.
        let needed = u64::from(shared_receives(&config, attributes).unwrap_or(0))
            + queues * completions(depth)
            + completions(32);
        let limit = u64::from(attributes.max_cqe);
        let evidence = format!(
            "a host with {queues} queues of depth {depth} needs {needed} completion entries, the device allows {limit} per queue"
        );
        let finding = if needed <= limit {
            Finding::pass(ID, evidence)
        } else {
            Finding::warn(
                ID,
                evidence,
                "hosts beyond that are refused: use more reactors, or less depth (max_queue_depth); `nacre rdma size` prints \
             how much fits",
            )
        };
        findings.push(finding.of(&attributes.name));
    }
}

/// The libraries of this machine, with at least one device.
pub(crate) fn real_provider() -> Result<Arc<dyn Provider>, VerbsError> {
    let provider = nacre_transport_rdma_verbs::VerbsProvider::open()?;
    if provider.devices()?.is_empty() {
        Err(provider.absence().into_error())
    } else {
        Ok(Arc::new(provider))
    }
}
