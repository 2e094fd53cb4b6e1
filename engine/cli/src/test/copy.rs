//! `nacre test copy`: reads, and on request writes, a range over every path to a namespace,
//! compares the data, and reports pass or fail for each path.

use std::collections::{BTreeMap, BTreeSet};

use clap::Args;
use nacre_engine_load::multipath::{CopyReport, Mount, PassReport, Shape, copy};
use serde::Serialize;
use serde_json::{Value, json};

use super::super::perf::Interrupt;
use super::super::remote::{OwnHost, usage};
use super::super::reply::{items, subsystems};
use super::super::top::rates::Iostat;
use super::super::{Connection, Failure, address, output};
use super::paths::{self, Place, TestedListener, usage_or_failed};
use nacre_engine::methods::bdev::iostat::{GetIostat, GetIostatParams};
use nacre_engine::methods::nvmf::connected::{GetQpairs, SubsystemParams};
use nacre_engine_rpc::client::Client;
use nacre_engine_values::size::parse_bytes;

pub(super) const HELP: &str = "Every path alone, then all paths at once. Without --overwrite the test only \
    reads: all paths must return the same data. With it, each path writes the range, and every path \
    reads it back; the data in the range is lost. The daemon's counters must confirm each path.\n\n\
    Exit codes: 0 every path is good, 1 not, 2 wrong usage, 3 no daemon, 4 the daemon refused.\n\n\
    Examples:\n  nacre test copy vol0\n  nacre test copy nqn.2025-01.io.nacre:vol0 --overwrite \
    --offset 1GiB --range 256MiB";

// `Place` and `OwnHost` have the options that `nacre test failover` shares. Range, size and depth
// are other options here: the test measures no latency, so its I/O is larger, on each path.
#[derive(Debug, Args)]
pub(super) struct CopyArgs {
    /// NQN of the subsystem, or name of the published volume or device
    subsystem: String,
    #[command(flatten)]
    place: Place,
    /// Bytes to use [default: at most 256MiB]
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    range: Option<u64>,
    /// Bytes per I/O
    #[arg(long, value_name = "BYTES", default_value = "64k", value_parser = paths::io_bytes)]
    size: u64,
    /// I/Os in flight on each path
    #[arg(short, long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u16).range(paths::IN_FLIGHT))]
    depth: u16,
    /// No line for each pass
    #[arg(long)]
    quiet: bool,
    #[command(flatten)]
    own: OwnHost,
}

/// Bytes of the range unless given.
const RANGE: u64 = 256 << 20;

pub(super) fn run(connection: &Connection, args: &CopyArgs) -> Result<(), Failure> {
    let mut client = connection.open()?;
    let nqn = paths::subsystem(&mut client, Some(&args.subsystem), None)?;
    let listeners = paths::listeners(&mut client, &nqn)?;
    let shape = Shape {
        depth: args.depth,
        io_bytes: u32::try_from(args.size).map_err(usage)?,
    };
    let mut open = Vec::new();
    let mut judged = Vec::new();
    for listener in &listeners {
        judged.push(Judged::new(listener));
        if !listener.is_accessible() {
            continue;
        }
        match paths::open(listener, &nqn, args.place.nsid, shape, &args.own) {
            Ok(path) => open.push(path),
            Err(usage @ Failure::Usage(_)) => return Err(usage),
            Err(error) => {
                if let Some(judged) = judged.last_mut() {
                    judged.failures.push(error.to_string());
                }
            }
        }
    }
    let mut report = None;
    let mut device = None;
    if !open.is_empty() {
        let mut mount =
            Mount::new(open, (args.place.offset, args.range, RANGE)).map_err(usage_or_failed)?;
        if args.place.overwrite && mount.is_read_only() {
            let cause = "--overwrite: the namespace is write protected";
            return Err(Failure::Usage(cause.into()));
        }
        let own = mount.paths().iter().map(|path| path.cntlid().into());
        let own: Vec<u64> = own.collect();
        let nsid = mount.geometry().0.0;
        let before = DaemonCounters::read(&mut client, &nqn, nsid)?;
        let quiet = args.quiet || connection.json;
        let interrupt = Interrupt::listen();
        let seed = uuid::Uuid::new_v4().as_u64_pair().0;
        let copied = copy(
            &mut mount,
            (args.place.overwrite, args.depth, seed),
            &mut |pass| {
                if !quiet {
                    eprintln!("{pass}");
                }
            },
            &mut || !interrupt.seen(),
        );
        let after = DaemonCounters::read(&mut client, &nqn, nsid)?;
        mount.disconnect();
        evaluate(&mut judged, &copied, &own, (&before, &after));
        device = device_failure(&copied, before.device, after.device);
        report = Some(copied);
    }
    let mut failures = all_failures(&judged, report.as_ref());
    failures.extend(device);
    if connection.json {
        output::json(&json!({
            "schema": "nacre-test-copy/1",
            "subsystem": nqn,
            "writes": args.place.overwrite,
            "paths": judged,
            "report": report,
            "failures": failures,
        }))?;
    } else {
        show(&judged, report.as_ref())?;
    }
    match &failures[..] {
        [] => Ok(()),
        failures => Err(Failure::Failed(anyhow::anyhow!(
            "the copy test failed: {}",
            failures.join("; ")
        ))),
    }
}

/// The daemon's counters.
#[derive(Debug, Clone, Default, PartialEq)]
struct DaemonCounters {
    /// Listener and completed I/Os of each controller.
    controllers: BTreeMap<u64, (String, u64)>,
    /// Bytes read from the device and written to it.
    device: (u64, u64),
}

impl DaemonCounters {
    fn read(client: &mut Client, nqn: &str, nsid: u32) -> Result<Self, Failure> {
        let params = SubsystemParams {
            nqn: nqn.to_owned(),
            tgt_name: None,
        };
        let qpairs = client.call_for_json::<GetQpairs, _>(&params)?;
        let subsystems = subsystems(client, Some(nqn))?;
        let namespaces = subsystems.iter().flat_map(|s| items(&s["namespaces"]));
        let name = namespaces
            .filter(|namespace| namespace["nsid"] == nsid)
            .find_map(|namespace| namespace["bdev_name"].as_str());
        let mut device = (0, 0);
        if let Some(name) = name {
            let params = GetIostatParams {
                names: Some(vec![name.to_owned()]),
                ..GetIostatParams::default()
            };
            let iostat = client.call_for_json::<GetIostat, _>(&params)?;
            if let Some(one) = items(&iostat["bdevs"]).first().map(Iostat::read) {
                device = (one.read.bytes, one.write.bytes);
            }
        }
        Ok(Self {
            controllers: controllers(&qpairs),
            device,
        })
    }
}

fn controllers(qpairs: &Value) -> BTreeMap<u64, (String, u64)> {
    let mut all: BTreeMap<u64, (String, u64)> = BTreeMap::new();
    for qpair in items(qpairs) {
        let listener = address::describe(&qpair["listen_address"]);
        let one = all.entry(qpair["cntlid"].as_u64().unwrap_or(0));
        one.or_insert((listener, 0)).1 += qpair["completed_nvme_io"].as_u64().unwrap_or(0);
    }
    all
}

/// A listener, and what the test found there.
#[derive(Debug, Clone, Serialize)]
struct Judged {
    listener: String,
    transport: &'static str,
    ana: String,
    /// I/Os that the daemon counted on this program's connection.
    served_ios: Option<u64>,
    failures: Vec<String>,
    notes: Vec<String>,
}

impl Judged {
    fn new(listener: &TestedListener) -> Self {
        let ana = match (listener.withheld, listener.states.is_empty()) {
            (true, _) => "withheld".to_owned(),
            (false, true) => "not reported".to_owned(),
            (false, false) => listener.states.join(","),
        };
        let notes = if listener.is_accessible() {
            Vec::new()
        } else {
            vec![format!("not tested: {ana}")]
        };
        Self {
            listener: listener.url.to_string(),
            transport: listener.url.transport.word(),
            ana,
            served_ios: None,
            failures: Vec::new(),
            notes,
        }
    }
}

/// Adds the failures of each path. `own` has the controller of each path of the report.
fn evaluate(
    judged: &mut [Judged],
    report: &CopyReport,
    own: &[u64],
    (before, after): (&DaemonCounters, &DaemonCounters),
) {
    let checksums: BTreeSet<&String> = report
        .paths
        .iter()
        .filter_map(|path| path.checksum.as_ref())
        .collect();
    for (path, cntlid) in report.paths.iter().zip(own) {
        let of_path = |one: &&mut Judged| one.listener == path.path;
        let Some(one) = judged.iter_mut().find(of_path) else {
            continue;
        };
        for pass in path.passes().filter(|pass| !pass.is_good()) {
            if let Some(cause) = failed(pass) {
                one.failures.push(cause);
            }
        }
        if let Some(why) = &path.failure {
            one.failures.push(format!("not connected: {why}"));
        }
        if path.connections_lost > 0 {
            let lost = output::count(path.connections_lost, "connection");
            one.failures.push(format!("{lost} lost"));
        }
        let count = |counters: &DaemonCounters| counters.controllers.get(cntlid).cloned();
        match (count(before), count(after)) {
            (Some((_, from)), Some((_, to))) => {
                let served = to.saturating_sub(from);
                one.served_ios = Some(served);
                if served < path.ios {
                    let ios = path.ios;
                    one.failures
                        .push(format!("the daemon counted {served} of {ios} I/Os here"));
                }
            }
            _ => one.failures.push("its controller did not stay".into()),
        }
        if checksums.len() > 1 && report.contents.units_wrong == 0 {
            one.notes.push("data changed during the test".into());
        }
    }
}

fn failed(pass: &PassReport) -> Option<String> {
    let mut causes: Vec<String> = pass
        .errors
        .iter()
        .map(|(name, count)| {
            format!(
                "{} ended with {name}",
                output::count(*count, pass.op.name())
            )
        })
        .collect();
    if pass.unfinished > 0 {
        causes.push(format!(
            "{} did not complete",
            output::count(pass.unfinished, pass.op.name())
        ));
    }
    (!causes.is_empty()).then(|| causes.join(", "))
}

/// The failures of the paths and of the whole test.
fn all_failures(judged: &[Judged], report: Option<&CopyReport>) -> Vec<String> {
    let of_path = |one: &Judged| {
        let name = one.listener.clone();
        let failures = one.failures.clone();
        failures
            .into_iter()
            .map(move |text| format!("{name}: {text}"))
    };
    let mut failures: Vec<String> = judged.iter().flat_map(of_path).collect();
    match report {
        Some(report) => {
            let contents = &report.contents;
            if contents.units_wrong > 0 {
                let first = contents.first_wrong.as_deref().unwrap_or_default();
                failures.push(format!(
                    "{} wrong; first: {first}",
                    output::count(contents.units_wrong, "place")
                ));
            }
            if report.interrupted {
                failures.push("interrupted".into());
            }
        }
        None if failures.is_empty() => failures.push("no listener is accessible".into()),
        None => {}
    }
    failures
}

/// The device must have done what the paths carried; other hosts may have added to it.
fn device_failure(report: &CopyReport, before: (u64, u64), after: (u64, u64)) -> Option<String> {
    let read: u64 = report.paths.iter().map(|path| path.bytes_read).sum();
    let written: u64 = report.paths.iter().map(|path| path.bytes_written).sum();
    let counted = [
        (after.0.saturating_sub(before.0), read, "read"),
        (after.1.saturating_sub(before.1), written, "written"),
    ];
    let short = counted.iter().find(|(counted, moved, _)| counted < moved)?;
    let (counted, moved) = (output::bytes(short.0), output::bytes(short.1));
    Some(format!(
        "the device counted {counted} {}, the paths {moved}",
        short.2
    ))
}

fn show(judged: &[Judged], report: Option<&CopyReport>) -> Result<(), Failure> {
    let rows = judged.iter().map(|one| {
        let paths = report.map_or(&[][..], |report| &report.paths);
        let path = paths.iter().find(|path| path.path == one.listener);
        let rate = |pass: Option<&PassReport>| match pass {
            Some(pass) => format!("{}/s", output::bytes(pass.bytes_per_second as u64)),
            None => String::new(),
        };
        let p99 = |pass: Option<&PassReport>| match pass {
            Some(pass) => format!("{:.2}", pass.latency_ns.p99 as f64 / 1e6),
            None => String::new(),
        };
        let write = path.and_then(|path| path.write.as_ref());
        let read = path.and_then(|path| path.read.as_ref());
        vec![
            one.listener.clone(),
            one.ana.clone(),
            rate(write),
            p99(write),
            rate(read),
            p99(read),
            rate(path.and_then(|path| path.write_together.as_ref())),
            rate(path.and_then(|path| path.read_together.as_ref())),
            path.and_then(|path| path.checksum.clone())
                .unwrap_or_default(),
            match (one.failures.is_empty(), path) {
                (false, _) => "failed".into(),
                (true, Some(_)) => "good".into(),
                (true, None) => "not tested".into(),
            },
        ]
    });
    output::table(
        &[
            "path",
            "ana",
            "write",
            "p99 ms",
            "read",
            "p99 ms",
            "all write",
            "all read",
            "checksum",
            "verdict",
        ],
        rows,
    )?;
    for one in judged {
        for text in one.failures.iter().chain(&one.notes) {
            output::line(&format!("{}: {text}", one.listener))?;
        }
    }
    if let Some(report) = report {
        let contents = &report.contents;
        output::line(&format!(
            "{} of {}: {} written, {} compared, {} wrong",
            output::count(report.units, "place"),
            output::bytes(report.unit_bytes),
            contents.units_written,
            contents.units_compared,
            contents.units_wrong
        ))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use nacre_engine_load::multipath::{ContentsReport, CopyPath};

    use super::*;

    fn judged(url: &str) -> Judged {
        Judged::new(&TestedListener {
            url: url.parse().unwrap(),
            states: vec!["optimized".into()],
            withheld: false,
        })
    }

    fn path(url: &str, ios: u64, checksum: &str) -> CopyPath {
        CopyPath {
            path: url.into(),
            write: None,
            read: None,
            checksum: Some(checksum.into()),
            cross_reads: Vec::new(),
            write_together: None,
            read_together: None,
            ios,
            bytes_read: ios * 4096,
            bytes_written: 0,
            connections_lost: 0,
            failure: None,
        }
    }

    fn counters(ios: [u64; 2]) -> DaemonCounters {
        let qpair = |cntlid: u64, qid: u64, ios: Option<u64>| json!({ "cntlid": cntlid, "qid": qid, "completed_nvme_io": ios });
        let all = json!([
            qpair(1, 0, None),
            qpair(1, 1, Some(ios[0])),
            qpair(2, 0, None),
            qpair(2, 1, Some(ios[1])),
        ]);
        DaemonCounters {
            controllers: controllers(&all),
            device: (0, 0),
        }
    }

    const RDMA: &str = "rdma://192.0.2.1:4420";
    const TCP: &str = "tcp://192.0.2.1:4420";

    fn report() -> CopyReport {
        CopyReport {
            paths: vec![path(RDMA, 10, "a"), path(TCP, 20, "a")],
            contents: ContentsReport::default(),
            units: 10,
            unit_bytes: 4096,
            interrupted: false,
        }
    }

    fn failures(report: &CopyReport, ios: [u64; 2]) -> (Vec<String>, Vec<Judged>) {
        let mut all = vec![judged(RDMA), judged(TCP)];
        let counters = (&counters([5, 5]), &counters([5 + ios[0], 5 + ios[1]]));
        evaluate(&mut all, report, &[1, 2], counters);
        (all_failures(&all, Some(report)), all)
    }

    /// Goal: each path is judged by its own errors and by the daemon's counters.
    #[test]
    fn paths_are_judged() {
        let (none, all) = failures(&report(), [10, 21]);
        assert_eq!(none, Vec::<String>::new());
        assert_eq!((all[0].served_ios, all[1].served_ios), (Some(10), Some(21)));
        // What the program sent by RDMA arrived by TCP.
        let (found, _) = failures(&report(), [0, 30]);
        assert_eq!(
            found,
            [format!("{RDMA}: the daemon counted 0 of 10 I/Os here")]
        );
        let mut lost = report();
        lost.paths[1].connections_lost = 1;
        lost.paths[1].failure = Some("no answer".into());
        lost.contents.units_wrong = 2;
        lost.contents.first_wrong = Some("LBA 8: zeroes".into());
        let (found, _) = failures(&lost, [10, 20]);
        assert_eq!(
            found,
            [
                format!("{TCP}: not connected: no answer"),
                format!("{TCP}: 1 connection lost"),
                "2 places wrong; first: LBA 8: zeroes".into(),
            ]
        );
        let mut changed = report();
        changed.paths[1].checksum = Some("b".into());
        let (found, all) = failures(&changed, [10, 20]);
        assert!(found.is_empty() && all[0].notes.len() == 1);
    }

    /// Goal: a device that counts less than the paths did is noticed; more is from other hosts.
    #[test]
    fn the_device_confirms() {
        let report = report();
        let bytes = 30 * 4096;
        assert_eq!(device_failure(&report, (7, 7), (7 + bytes, 7)), None);
        assert_eq!(device_failure(&report, (0, 0), (2 * bytes, 5)), None);
        let said = device_failure(&report, (0, 0), (bytes - 1, 0)).unwrap();
        assert!(said.contains("read, the paths 120.0 KiB"), "{said}");
    }

    /// Goal: a test without any path fails, and a listener out of use is no failure.
    #[test]
    fn paths_out_of_use() {
        assert_eq!(all_failures(&[], None), ["no listener is accessible"]);
        let out = Judged::new(&TestedListener {
            url: TCP.parse().unwrap(),
            states: vec!["inaccessible".into()],
            withheld: false,
        });
        assert_eq!(out.notes, ["not tested: inaccessible"]);
        assert!(out.failures.is_empty());
    }
}
