//! Which transports are tried, in which order, how often, and what is said in the end.

use std::time::Duration;

use clap::Parser;

use super::drive::{Cause, ConnectError, Outcome, Runner, command, drive, purpose, words};
use super::*;

#[derive(Debug, Parser)]
struct Line {
    #[command(flatten)]
    connect: ConnectArgs,
}

fn args(more: &str) -> ConnectArgs {
    let line = format!("connect 192.0.2.1 -n nqn.2025-01.io.nacre:v {more}");
    Line::try_parse_from(line.split_whitespace())
        .expect("it parses")
        .connect
}

/// Commands end as told, in order; the last way of ending holds for the rest.
struct Told {
    endings: Vec<Result<(), Cause>>,
    ran: Vec<String>,
    said: Vec<String>,
    paused: Duration,
}

impl Told {
    fn new(endings: &[Result<(), Cause>]) -> Told {
        Told {
            endings: endings.to_vec(),
            ran: Vec::new(),
            said: Vec::new(),
            paused: Duration::ZERO,
        }
    }
}

impl Runner for Told {
    fn run(&mut self, command: &[String]) -> Result<(), Cause> {
        self.ran.push(words(command));
        if command[0] == "modprobe" {
            return Ok(());
        }
        match self.endings.len() {
            1 => self.endings[0].clone(),
            _ => self.endings.remove(0),
        }
    }
    fn pause(&mut self, time: Duration) {
        self.paused += time;
    }
    fn say(&mut self, text: &str) {
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

/// An address is written as for every other command that connects: alone, or in a URI.
#[test]
fn the_target_in_every_form() {
    let read = |line: &str| {
        let words = ["connect"].into_iter().chain(line.split_whitespace());
        let args = Line::try_parse_from(words).map_err(|error| error.to_string())?;
        let args = args.connect;
        let said = |failure: crate::cli::Failure| failure.to_string();
        let choice = args.choice().map_err(said)?;
        let subsystem = args.subsystem().map_err(said)?;
        Ok::<_, String>((args.address.to_string(), choice, subsystem))
    };
    let nqn = "nqn.2025-01.io.nacre:v";
    for (line, address, choice) in [
        (
            format!("192.0.2.1 -n {nqn}"),
            "192.0.2.1:4420",
            Choice::Auto,
        ),
        (format!("[::1]:1 -n {nqn} -t tcp"), "[::1]:1", Choice::Tcp),
        (
            format!("tcp://192.0.2.1 -n {nqn}"),
            "192.0.2.1:4420",
            Choice::Tcp,
        ),
        (
            format!("rdma://192.0.2.1:7/{nqn}"),
            "192.0.2.1:7",
            Choice::Rdma,
        ),
        (
            format!("auto://[::1]/{nqn} -n {nqn}"),
            "[::1]:4420",
            Choice::Auto,
        ),
        (format!("192.0.2.1/{nqn}"), "192.0.2.1:4420", Choice::Auto),
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
        (format!("fc://192.0.2.1/{nqn}"), "write tcp, rdma or auto"),
    ] {
        let error = read(&line).unwrap_err();
        assert!(error.contains(said), "{line}: {error}");
    }
}

#[test]
fn the_order_of_transports() {
    use Transport::{Rdma, Tcp};
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
        words(&command(&args, Transport::Rdma)),
        "nvme connect -t rdma -a 192.0.2.1 -s 4420 -n nqn.2025-01.io.nacre:v --hostnqn \
         nqn.2014-08.org.nvmexpress:uuid:1 --nr-io-queues 4 --queue-size 64 --ctrl-loss-tmo=-1 --tos=104"
    );
    assert_eq!(words(&["a b".into(), "it's".into()]), r"'a b' 'it'\''s'");
}

#[test]
fn rdma_first_and_then_tcp() {
    let args = args("");
    let mut runner = Told::new(&[Err(refused()), Err(refused()), Err(refused()), Ok(())]);
    let outcome = drive(&args, &plan(&args, Ok(())), &mut runner).unwrap();
    assert_eq!(
        outcome,
        Outcome {
            transport: Transport::Tcp,
            failures: 3,
            already: false
        }
    );
    let connect =
        |t: &str| format!("nvme connect -t {t} -a 192.0.2.1 -s 4420 -n nqn.2025-01.io.nacre:v");
    let (rdma, tcp) = (connect("rdma"), connect("tcp"));
    assert_eq!(
        runner.ran,
        [
            "modprobe nvme-rdma",
            &rdma,
            &rdma,
            &rdma,
            "modprobe nvme-tcp",
            &tcp
        ]
    );
    assert_eq!(runner.said[3], "falling back from rdma to tcp");
    assert!(runner.said[1].starts_with("attempt 2 of 3 over rdma failed: Failed to write"));
    // Between attempts, not after the last.
    assert_eq!(runner.paused, Duration::from_secs(2));
}

#[test]
fn without_fallback_it_says_so() {
    let args = args("--fallback none --retries 2 --retry-delay 10ms");
    let mut runner = Told::new(&[Err(refused())]);
    let error = drive(&args, &plan(&args, Ok(())), &mut runner).unwrap_err();
    assert_eq!(
        error.to_string(),
        "not connected to tcp://192.0.2.1:4420: 2 attempts failed, the last over rdma: Failed to write to \
         /dev/nvme-fabrics: Connection refused; remedy: does the target listen there over this transport? `nacre \
         listener list` on it tells; keep the fallback (`--fallback tcp`), or move what uses the volume to a host \
         with RDMA"
            .replace("tcp://192.0.2.1", &shown(&args))
    );
    assert_eq!(runner.paused, Duration::from_millis(10));
}

fn shown(args: &ConnectArgs) -> String {
    let text = args.address.to_string();
    text.strip_suffix(":4420").unwrap_or(&text).to_owned()
}

#[test]
fn zero_retries_is_for_ever() {
    let args = args("--fallback none --retries 0");
    let mut endings = vec![Err(refused()); 50];
    endings.push(Ok(()));
    let mut runner = Told::new(&endings);
    let outcome = drive(&args, &plan(&args, Ok(())), &mut runner).unwrap();
    assert_eq!(outcome.failures, 50);
    assert!(runner.said[49].starts_with("attempt 50 over rdma failed"));
}

#[test]
fn what_is_connected_already_is_connected() {
    let args = args("");
    for said in [
        "Failed to write to /dev/nvme-fabrics: Operation already in progress",
        "already connected",
    ] {
        let already = Cause::Refused {
            said: said.into(),
            kernel: Vec::new(),
        };
        let mut runner = Told::new(&[Err(already)]);
        let outcome = drive(&args, &plan(&args, Ok(())), &mut runner).unwrap();
        assert!(outcome.already && outcome.transport == Transport::Rdma);
    }
}

#[test]
fn without_nvme_cli_nothing_is_tried_again() {
    let args = args("--retries 0");
    let mut runner = Told::new(&[Err(Cause::NoProgram {
        program: "nvme".into(),
        error: "No such file or directory".into(),
    })]);
    let error = drive(&args, &plan(&args, Ok(())), &mut runner).unwrap_err();
    assert!(matches!(error, ConnectError::Hopeless { .. }));
    assert!(
        error
            .to_string()
            .ends_with("remedy: install the package nvme-cli")
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
        let command = command(&args(""), Transport::Rdma);
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
        what: purpose(&command(&args(""), Transport::Tcp)),
        after: Duration::from_secs(1),
        kernel: Vec::new(),
    };
    assert_eq!(tcp.to_string(), "TCP connection timeout after 1000ms");
}
