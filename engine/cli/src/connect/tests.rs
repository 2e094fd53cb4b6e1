//! Goal: paths and transports are tried in the right order with a bounded number of attempts, and
//! the final error contains the reason.

use std::time::Duration;

use clap::Parser;

use super::drive::{Attempt, Cause, HostCommands, command, discovery, drive, purpose, words};
use super::host::sentence;
use super::log::Path;
use super::*;

#[derive(Debug, Parser)]
struct Line {
    #[command(flatten)]
    connect: ConnectArgs,
}

fn args(more: &str) -> ConnectArgs {
    args_at("192.0.2.1", more)
}

fn args_at(address: &str, more: &str) -> ConnectArgs {
    let line = format!("connect {address} -n nqn.2025-01.io.nacre:v {more}");
    Line::try_parse_from(line.split_whitespace())
        .expect("it parses")
        .connect
}

/// Commands end as scripted, in order; the last result repeats.
struct ScriptedRunner {
    endings: Vec<Result<(), Cause>>,
    /// The discovery log; none: the target refuses it with `no_log`.
    log: Option<String>,
    no_log: Cause,
    fabrics: bool,
    ran: Vec<String>,
    said: Vec<String>,
    paused: Duration,
}

impl ScriptedRunner {
    fn new(endings: &[Result<(), Cause>]) -> Self {
        Self {
            endings: endings.to_vec(),
            log: None,
            no_log: refused(),
            fabrics: true,
            ran: Vec::new(),
            said: Vec::new(),
            paused: Duration::ZERO,
        }
    }
}

impl HostCommands for ScriptedRunner {
    fn run(&mut self, command: &[String]) -> Result<String, Cause> {
        self.ran.push(words(command));
        if command[0] == "modprobe" {
            return Ok(String::new());
        }
        if command[1] == "discover" {
            return self.log.clone().ok_or_else(|| self.no_log.clone());
        }
        let ending = match self.endings.len() {
            1 => self.endings[0].clone(),
            _ => self.endings.remove(0),
        };
        ending.map(|()| String::new())
    }
    fn has_fabrics(&self) -> bool {
        self.fabrics
    }
    fn pause(&mut self, time: Duration) {
        self.paused += time;
    }
    fn print(&mut self, text: &str) {
        self.said.push(text.to_owned());
    }
}

fn refused() -> Cause {
    Cause::Refused {
        said: "Failed to write to /dev/nvme-fabrics: Connection refused".into(),
        kernel: Vec::new(),
    }
}

fn plan(args: &ConnectArgs, rdma: Result<(), String>) -> Plan {
    Plan::of(args.choice().unwrap(), args.fallback, rdma)
}

/// An address has the same format as in every other command that connects: alone, or in a URI.
#[test]
fn the_target_in_every_form() {
    let read = |line: &str| {
        let words = ["connect"].into_iter().chain(line.split_whitespace());
        let args = Line::try_parse_from(words).map_err(|error| error.to_string())?;
        let args = args.connect;
        let said = |failure: Failure| failure.to_string();
        let choice = args.choice().map_err(said)?;
        let subsystem = args.subsystem().map_err(said)?;
        Ok::<_, String>((args.address.to_string(), choice, subsystem))
    };
    let nqn = "nqn.2025-01.io.nacre:v";
    for (line, address, choice) in [
        (
            format!("192.0.2.1 -n {nqn}"),
            "192.0.2.1:4420",
            TransportChoice::Auto,
        ),
        (
            format!("[::1]:1 -n {nqn} -t tcp"),
            "[::1]:1",
            TransportChoice::Tcp,
        ),
        (
            format!("tcp://192.0.2.1 -n {nqn}"),
            "192.0.2.1:4420",
            TransportChoice::Tcp,
        ),
        (
            format!("rdma://192.0.2.1:7/{nqn}"),
            "192.0.2.1:7",
            TransportChoice::Rdma,
        ),
        (
            format!("auto://[::1]/{nqn} -n {nqn}"),
            "[::1]:4420",
            TransportChoice::Auto,
        ),
        (
            format!("192.0.2.1/{nqn}"),
            "192.0.2.1:4420",
            TransportChoice::Auto,
        ),
    ] {
        assert_eq!(
            read(&line),
            Ok((address.into(), choice, nqn.into())),
            "{line}"
        );
    }
    for (line, said) in [
        ("192.0.2.1".to_owned(), "name the subsystem"),
        (
            format!("tcp://192.0.2.1/{nqn} -t rdma"),
            "name two transports",
        ),
        (format!("192.0.2.1/{nqn} -n {nqn}x"), "the URI names nqn"),
        (
            format!("fc://192.0.2.1/{nqn}"),
            "write tcp, rdma, rdma+tcp or auto",
        ),
    ] {
        let error = read(&line).unwrap_err();
        assert!(error.contains(said), "{line}: {error}");
    }
}

#[test]
fn the_order_of_transports() {
    use IpTransport::{Rdma, Tcp};
    let no = || Err("no_rdma_dev: no RDMA device belongs to interface eth0".to_owned());
    for (line, rdma, order, remark) in [
        ("", Ok(()), &[Rdma, Tcp][..], false),
        ("", no(), &[Tcp], true),
        ("--fallback none", Ok(()), &[Rdma], false),
        ("--fallback none", no(), &[Rdma], true),
        ("--transport rdma", Ok(()), &[Rdma], false),
        ("--transport rdma", no(), &[Rdma], true),
        ("--transport rdma --fallback tcp", no(), &[Rdma, Tcp], true),
        ("--transport tcp", Ok(()), &[Tcp], false),
        ("--transport tcp", no(), &[Tcp], false),
    ] {
        let plan = plan(&args(line), rdma);
        assert_eq!(
            (&plan.order[..], plan.remark.is_some()),
            (order, remark),
            "{line}"
        );
    }
}

#[test]
fn commands_are_nvme_clis() {
    let args = args(
        "--hostnqn nqn.2014-08.org.nvmexpress:uuid:1 --nr-io-queues 4 --queue-size 64 --ctrl-loss-tmo -1 --tos 104",
    );
    assert_eq!(
        words(&command(&args, &path(IpTransport::Rdma, "192.0.2.1"))),
        "nvme connect -t rdma -a 192.0.2.1 -s 4420 -n nqn.2025-01.io.nacre:v --hostnqn \
         nqn.2014-08.org.nvmexpress:uuid:1 --nr-io-queues 4 --queue-size 64 --ctrl-loss-tmo=-1 --tos=104"
    );
    assert_eq!(
        words(&discovery(&args, &path(IpTransport::Tcp, "192.0.2.1"))),
        "nvme discover -t tcp -a 192.0.2.1 -s 4420 --hostnqn nqn.2014-08.org.nvmexpress:uuid:1 -o json"
    );
    assert_eq!(words(&["a b".into(), "it's".into()]), r"'a b' 'it'\''s'");
}

/// Goal: nvme-cli gets the secrets, and the output of the command has none.
#[test]
fn secrets_are_passed_on_and_not_shown() {
    let mut args = args("");
    let secret = |text: &str| Some(Zeroizing::new(text.to_owned()));
    args.secrets.own = secret("DHHC-1:00:own:");
    args.secrets.target = secret("DHHC-1:00:other:");
    let command = command(&args, &path(IpTransport::Tcp, "192.0.2.1"));
    assert!(command.ends_with(&[
        "--dhchap-secret".to_owned(),
        "DHHC-1:00:own:".to_owned(),
        "--dhchap-ctrl-secret".to_owned(),
        "DHHC-1:00:other:".to_owned(),
    ]));
    let shown = words(&command);
    assert!(
        shown.ends_with("--dhchap-secret *** --dhchap-ctrl-secret ***"),
        "{shown}"
    );
    assert!(!format!("{args:?}").contains("DHHC"));
}

fn path(transport: IpTransport, address: &str) -> Path {
    Path {
        transport,
        address: address.into(),
        port: 4420,
    }
}

fn connect(transport: &str) -> String {
    format!("nvme connect -t {transport} -a 192.0.2.1 -s 4420 -n nqn.2025-01.io.nacre:v")
}

fn way(_: std::net::IpAddr) -> Result<(), String> {
    Ok(())
}

/// In nvme-cli 2.3's format.
fn log(records: &[(&str, &str, &str)]) -> String {
    let record = |(transport, address, nqn): &(&str, &str, &str)| {
        json!({
            "trtype": transport, "adrfam": "ipv4", "subtype": "nvme subsystem",
            "treq": "not specified, sq flow control disable supported", "portid": 1,
            "trsvcid": "4420", "subnqn": nqn, "traddr": address, "eflags": "none", "sectype": "none",
        })
    };
    let mut all: Vec<Value> = records.iter().map(record).collect();
    all.push(json!({
        "trtype": "tcp", "subtype": "current discovery subsystem", "traddr": "192.0.2.1",
        "trsvcid": "4420", "subnqn": "nqn.2014-08.org.nvmexpress.discovery",
    }));
    json!({ "genctr": 2, "records": all }).to_string()
}

const V: &str = "nqn.2025-01.io.nacre:v";

/// A target announces link-local addresses without an interface: this host's names are its own.
/// They are on the link over which they were announced.
#[test]
fn link_local_paths_are_on_the_link_of_the_discovery() {
    let log = log(&[("tcp", "fe80::9", V), ("tcp", "2001:db8::9", V)]);
    let connected = |address: &str| {
        let args = args_at(address, "--transport tcp");
        let mut runner = ScriptedRunner::new(&[Ok(())]);
        runner.log = Some(log.clone());
        let attempts = drive(&args, &plan(&args, Ok(())), &mut runner, &way).unwrap();
        let paths: Vec<String> = attempts.into_iter().map(|one| one.path.address).collect();
        (paths, runner.said)
    };
    let (paths, said) = connected("[fe80::1%lo]:4420");
    assert_eq!(paths, ["fe80::9%lo", "2001:db8::9"]);
    assert_eq!(said, [""; 0]);
    let (paths, said) = connected("[2001:db8::1]:4420");
    assert_eq!(paths, ["2001:db8::9"]);
    assert!(said[0].contains("it is a link-local address"), "{said:?}");
}

/// Every path of the log is connected, RDMA first; a path that this machine cannot reach by RDMA is
/// left out, with the reason.
#[test]
fn every_path_of_the_discovery_log() {
    let args = args("");
    let mut runner = ScriptedRunner::new(&[Ok(())]);
    runner.log = Some(log(&[
        ("tcp", "192.0.2.1", V),
        ("rdma", "192.0.2.1", V),
        ("rdma", "198.51.100.1", V),
        ("rdma", "192.0.2.1", V),
        ("tcp", "192.0.2.1", "nqn.2025-01.io.nacre:other"),
    ]));
    let one_way = |ip: std::net::IpAddr| {
        if ip.to_string() == "192.0.2.1" {
            Ok(())
        } else {
            Err("no_rdma_dev".to_owned())
        }
    };
    let attempts = drive(&args, &plan(&args, Ok(())), &mut runner, &one_way).unwrap();
    let of = |transport| Attempt {
        path: path(transport, "192.0.2.1"),
        failures: 0,
        outcome: Ok(false),
    };
    assert_eq!(attempts, [of(IpTransport::Rdma), of(IpTransport::Tcp)]);
    assert_eq!(
        runner.ran,
        [
            "modprobe nvme-rdma",
            "modprobe nvme-tcp",
            "nvme discover -t rdma -a 192.0.2.1 -s 4420 -o json",
            &connect("rdma"),
            &connect("tcp"),
        ]
    );
    assert_eq!(
        runner.said,
        ["not connecting rdma://198.51.100.1:4420: no_rdma_dev"]
    );
    let answer = answer(&attempts);
    assert_eq!(
        (
            &answer["transport"],
            answer["paths"].as_array().unwrap().len()
        ),
        (&json!("rdma"), 2)
    );
}

/// A failed path does not affect the others, and is reported with its cause.
#[test]
fn one_path_is_enough() {
    let args = args("--retries 2");
    let mut runner = ScriptedRunner::new(&[Err(refused()), Err(refused()), Ok(())]);
    runner.log = Some(log(&[("rdma", "192.0.2.1", V), ("tcp", "192.0.2.1", V)]));
    let attempts = drive(&args, &plan(&args, Ok(())), &mut runner, &way).unwrap();
    assert_eq!(
        (attempts[0].failures, &attempts[1].outcome),
        (2, &Ok(false))
    );
    assert!(attempts[0].outcome.is_err());
    assert!(
        runner.said[1].starts_with("attempt 2 of 2 over rdma failed: Failed to write"),
        "{:?}",
        runner.said
    );
}

/// The log does not list the subsystem, or the target refuses the host: one attempt shows why, and
/// the cause is reported once.
#[test]
fn permanent_refusals_are_tried_once() {
    let unknown = Cause::Refused {
        said:
            "Failed to write to /dev/nvme-fabrics: Invalid argument; could not add new controller"
                .into(),
        kernel: vec![format!(
            "nvme nvme0: Connect Invalid Data Parameter, subsysnqn \"{V}\""
        )],
    };
    for listed in [
        None,
        Some(log(&[("tcp", "192.0.2.1", "nqn.2025-01.io.nacre:other")])),
    ] {
        let args = args("");
        let mut runner = ScriptedRunner::new(&[Err(unknown.clone())]);
        runner.log = listed;
        let error = drive(&args, &plan(&args, Ok(())), &mut runner, &way).unwrap_err();
        let said = error.to_string();
        assert!(
            said.starts_with("not connected to rdma://192.0.2.1:4420: Failed"),
            "{said}"
        );
        assert!(
            said.contains("remedy: `nacre discover 192.0.2.1:4420`"),
            "{said}"
        );
        let connects = runner.ran.iter().filter(|c| c.starts_with("nvme connect"));
        assert_eq!(connects.count(), 1, "{:?}", runner.ran);
        assert!(
            !runner.said.iter().any(|s| s.contains("attempt")),
            "{:?}",
            runner.said
        );
    }
    let forbidden = Cause::Refused {
        said: "failed".into(),
        kernel: vec![format!(
            "nvme nvme0: Connect for subsystem {V} is not allowed, hostnqn: x"
        )],
    };
    let args = args("-t tcp");
    let mut runner = ScriptedRunner::new(&[Err(forbidden)]);
    runner.log = Some(log(&[]));
    let error = drive(&args, &plan(&args, Ok(())), &mut runner, &way).unwrap_err();
    assert!(error.to_string().contains("nacre host add"), "{error}");
    assert_eq!(runner.paused, Duration::ZERO);
}

/// Without /dev/nvme-fabrics nothing can connect, so nothing is tried.
#[test]
fn a_kernel_without_the_host_is_seen_first() {
    let args = args("--retries 0");
    let mut runner = ScriptedRunner::new(&[Ok(())]);
    runner.fabrics = false;
    let error = drive(&args, &plan(&args, Ok(())), &mut runner, &way).unwrap_err();
    let said = error.to_string();
    assert!(
        said.contains("no /dev/nvme-fabrics") && said.contains("initiator check"),
        "{said}"
    );
    assert_eq!(runner.ran, ["modprobe nvme-rdma", "modprobe nvme-tcp"]);
}

/// A target without a log: RDMA, and TCP only if that fails.
#[test]
fn rdma_first_and_then_tcp() {
    let args = args("");
    let mut runner = ScriptedRunner::new(&[Err(refused()), Err(refused()), Err(refused()), Ok(())]);
    let attempts = drive(&args, &plan(&args, Ok(())), &mut runner, &way).unwrap();
    assert_eq!(
        (attempts[0].failures, &attempts[1].outcome),
        (3, &Ok(false))
    );
    let (rdma, tcp) = (connect("rdma"), connect("tcp"));
    assert_eq!(runner.ran[4..], [rdma.clone(), rdma.clone(), rdma, tcp]);
    let falls = "falling back from rdma to tcp";
    assert_eq!(runner.said.last().unwrap(), falls);
    assert!(runner.said[2].starts_with("attempt 2 of 3 over rdma failed: Failed to write"));
    // Between attempts, not after the last.
    assert_eq!(runner.paused, Duration::from_secs(2));
}

#[test]
fn a_failure_without_fallback_names_the_option() {
    let args = args("--fallback none --retries 2 --retry-delay 10ms");
    let mut runner = ScriptedRunner::new(&[Err(refused())]);
    let error = drive(&args, &plan(&args, Ok(())), &mut runner, &way).unwrap_err();
    assert_eq!(
        error.to_string(),
        "not connected to rdma://192.0.2.1:4420: Failed to write to /dev/nvme-fabrics: Connection refused, 2 attempts \
         failed; remedy: does the target listen there over this transport? `nacre listener list` on it shows its \
         listeners; keep the fallback (`--fallback tcp`), or move the users of the volume to a host with RDMA"
    );
    // The cause of the last attempt is in the error, and nowhere else.
    let attempts = runner.said.iter().filter(|s| s.starts_with("attempt"));
    assert_eq!(attempts.count(), 1);
    assert_eq!(runner.paused, Duration::from_millis(10));
}

#[test]
fn zero_retries_means_without_limit() {
    let args = args("--fallback none --retries 0");
    let mut endings = vec![Err(refused()); 50];
    endings.push(Ok(()));
    let mut runner = ScriptedRunner::new(&endings);
    let attempts = drive(&args, &plan(&args, Ok(())), &mut runner, &way).unwrap();
    assert_eq!(attempts[0].failures, 50);
    assert!(runner.said[50].starts_with("attempt 50 over rdma failed"));
}

#[test]
fn an_existing_connection_is_a_success() {
    let args = args("");
    for said in [
        "Failed to write to /dev/nvme-fabrics: Operation already in progress",
        "already connected",
    ] {
        let already = Cause::Refused {
            said: said.into(),
            kernel: Vec::new(),
        };
        let mut runner = ScriptedRunner::new(&[Err(already)]);
        let attempts = drive(&args, &plan(&args, Ok(())), &mut runner, &way).unwrap();
        assert_eq!(
            (
                attempts.len(),
                &attempts[0].outcome,
                attempts[0].path.transport
            ),
            (1, &Ok(true), IpTransport::Rdma)
        );
    }
}

#[test]
fn without_nvme_cli_nothing_is_tried_again() {
    let args = args("--retries 0");
    let missing = Cause::NoProgram {
        program: "nvme".into(),
        error: "No such file or directory".into(),
    };
    let mut runner = ScriptedRunner::new(&[Ok(())]);
    runner.no_log = missing;
    let error = drive(&args, &plan(&args, Ok(())), &mut runner, &way).unwrap_err();
    let said = error.to_string();
    assert!(
        said.contains("remedy: install the package nvme-cli"),
        "{said}"
    );
    assert!(!runner.ran.iter().any(|c| c.starts_with("nvme connect")));
}

/// nvme-cli prints several lines; a reader sees where each ends.
#[test]
fn lines_of_nvme_cli_are_separated() {
    let said = "Failed to write to /dev/nvme-fabrics: Invalid argument\ncould not add new controller: invalid \
                arguments/configuration\n";
    assert_eq!(
        sentence(said),
        "Failed to write to /dev/nvme-fabrics: Invalid argument; could not add new controller: invalid \
         arguments/configuration"
    );
}

#[test]
fn timeouts_name_their_stage() {
    for (kernel, stage) in [
        (
            "nvme nvme0: rdma_resolve_addr failed (-110)",
            "ADDR_RESOLVE",
        ),
        (
            "nvme nvme0: rdma_resolve_route failed (-110)",
            "ROUTE_RESOLVE",
        ),
        (
            "nvme nvme0: rdma connection establishment failed (-104)",
            "CONNECT",
        ),
    ] {
        let command = command(&args(""), &path(IpTransport::Rdma, "192.0.2.1"));
        let cause = Cause::TimedOut {
            what: purpose(&command),
            after: Duration::from_secs(5),
            kernel: vec![kernel.into()],
        };
        assert_eq!(
            cause.to_string(),
            format!("RDMA connection timeout after 5000ms in {stage} (kernel: {kernel})")
        );
    }
    let tcp = Cause::TimedOut {
        what: purpose(&command(&args(""), &path(IpTransport::Tcp, "192.0.2.1"))),
        after: Duration::from_secs(1),
        kernel: Vec::new(),
    };
    assert_eq!(tcp.to_string(), "TCP connection timeout after 1000ms");
}
