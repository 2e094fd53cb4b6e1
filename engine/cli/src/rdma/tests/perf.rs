//! Tests of the options, addresses and output of `nacre rdma perf`.

use std::net::SocketAddr;

use clap::Parser;
use nacre_transport_rdma_link::testing;
use nacre_transport_rdma_perf::wire::{Refusal, Reject, SessionParameters};
use nacre_transport_rdma_perf::{
    Latency, LatencyOf, Measure, Op, PerfError, Report, SCHEMA, Served, ServerEvent, SizeReport,
};

use super::super::perf::{Sweep, addresses, failure, parse_server, parse_sweep, source};
use super::super::perf_show::{described, event, head, rows, sentence};
use super::super::{RdmaArgs, RdmaCommand};
use crate::Failure;
use nacre_engine_doctor::System;
use nacre_engine_doctor::testing::{ScriptedProbe, system};

#[derive(Debug, Parser)]
struct Line {
    #[command(flatten)]
    rdma: RdmaArgs,
}

fn parse(words: &str) -> Result<RdmaCommand, clap::Error> {
    let words = ["rdma", "perf"].into_iter().chain(words.split_whitespace());
    Line::try_parse_from(words).map(|line| line.rdma.command)
}

fn machine() -> System {
    let tree = testing::rxe_on_eth();
    let mut machine = system(
        &tree,
        &[
            ("eth0", "10.0.0.4"),
            ("eth0", "fd00::4"),
            ("lo", "127.0.0.1"),
        ],
        ScriptedProbe::default(),
    );
    // The process's permissions are not simulated here.
    machine.environment.rdma_cm = nacre_transport_rdma_link::Access::Granted;
    machine
}

#[test]
fn flags() {
    for good in [
        "server",
        "server --listen 10.0.0.4 --listen rdma:rxe0/1,4791 --once --json",
        "client 10.0.0.1 --op read --lat -n 10000",
        "client 10.0.0.1 --op write --bw --size 4k,64KiB -D 10 -d 64 -q 4 --verify",
        "client [fd00::1]:9 --sweep 1-1m --duration 500ms --source name:eth0",
    ] {
        parse(good).unwrap();
    }
    for (bad, said) in [
        ("client", "<SERVER>"),
        (
            "client 10.0.0.1 --op reed",
            "\"reed\" is not one of send, write, read",
        ),
        ("client 10.0.0.1 --bw --lat", "cannot be used with"),
        (
            "client 10.0.0.1 --size 512MiB",
            "512MiB is not a message size: use 1 byte to 256 MiB",
        ),
        ("client 10.0.0.1 --size 4k,0", "0 is not a message size"),
        ("client 10.0.0.1 --sweep 4k", "\"4k\" is not a range"),
        ("client 10.0.0.1 --sweep 4k-1k", "is not a range"),
        ("client 10.0.0.1 -n 0", "0 is not in 1.."),
        ("client 10.0.0.1 -n 5 -D 3", "cannot be used with"),
        ("client 10.0.0.1:x", "\"x\" is not a port"),
        ("server --max-depth 0", "--max-depth"),
    ] {
        let error = parse(bad).unwrap_err().to_string();
        assert!(error.contains(said), "{bad}: {error}");
    }
}

#[test]
fn servers_and_sweeps() {
    let at = |text: &str| parse_server(text).unwrap().to_string();
    assert_eq!(at("10.0.0.1"), "10.0.0.1:18515");
    assert_eq!(at("10.0.0.1:7"), "10.0.0.1:7");
    assert_eq!(at("fd00::1"), "[fd00::1]:18515");
    assert_eq!(at("[fd00::1]"), "[fd00::1]:18515");
    assert_eq!(at("[fd00::1]:7"), "[fd00::1]:7");
    let sweep = |text| parse_sweep(text).unwrap();
    assert_eq!(sweep("1-8"), Sweep(vec![1, 2, 4, 8]));
    assert_eq!(sweep("3-9"), Sweep(vec![3, 4, 8, 9]));
    assert_eq!(sweep("5-5"), Sweep(vec![5]));
    assert_eq!(
        sweep("64m-256m"),
        Sweep(vec![64 << 20, 128 << 20, 256 << 20])
    );
}

#[test]
fn addresses_that_are_chosen() {
    let machine = machine();
    let found = |selector: &str| -> Vec<String> {
        addresses(&machine, selector)
            .unwrap()
            .iter()
            .map(ToString::to_string)
            .collect()
    };
    assert_eq!(found("10.9.9.9"), ["10.9.9.9"]);
    assert_eq!(found("name:eth0"), ["10.0.0.4", "fd00::4"]);
    assert_eq!(found("rdma:rxe0"), ["10.0.0.4", "fd00::4"]);
    assert_eq!(found("rdma:rxe0/1"), ["10.0.0.4", "fd00::4"]);
    assert_eq!(found("subnet:10.0.0.0/24"), ["10.0.0.4"]);
    let said = |selector: &str| addresses(&machine, selector).unwrap_err().to_string();
    assert!(
        said("rdma:rxe0/2")
            .starts_with("no interface matches \"rdma:rxe0/2\"; have: eth0 10.0.0.4, ")
    );
    assert!(
        said("name:lo").starts_with("no RDMA by \"name:lo\": 127.0.0.1: no_rdma_dev: "),
        "{}",
        said("name:lo")
    );
    let from = |selector: &str, server: &str| source(&machine, selector, server.parse().unwrap());
    assert_eq!(from("name:eth0", "fd00::1").unwrap().to_string(), "fd00::4");
    assert_eq!(
        from("name:eth0", "10.0.0.1").unwrap().to_string(),
        "10.0.0.4"
    );
    assert_eq!(
        from("subnet:10.0.0.0/24", "fd00::1")
            .unwrap_err()
            .to_string(),
        "\"subnet:10.0.0.0/24\" has no address that reaches fd00::1; have: 10.0.0.4"
    );
}

#[test]
fn exit_codes_and_explanations() {
    let peer: SocketAddr = "10.0.0.1:18515".parse().unwrap();
    let code = |error| match failure(error, Some("no_gid_for_ip: why".into())) {
        Failure::Exit { code, error } => (code, error.to_string()),
        other => panic!("{other}"),
    };
    let (exit, text) = code(PerfError::NobodyListens { peer, status: 8 });
    assert_eq!(exit, 3);
    assert!(
        text.ends_with("listens there\nno_gid_for_ip: why"),
        "{text}"
    );
    let (exit, text) = code(PerfError::Disconnected {
        peer,
        during: "measuring",
    });
    assert_eq!(
        (exit, text.as_str()),
        (1, "10.0.0.1:18515 closed the connection (measuring)")
    );
    let invalid = nacre_transport_rdma_perf::Invalid::NoSize;
    assert_eq!(code(PerfError::Invalid(invalid)).0, 2);
}

fn a_report() -> Report {
    let latency = Latency {
        min: 1_234,
        mean: 2e3,
        median: 2_000,
        p99: 3_456_000,
        p999: 4e6 as u64,
        max: 5e6 as u64,
    };
    Report {
        schema: SCHEMA,
        server: "10.0.0.1:18515".into(),
        local: "10.0.0.4".into(),
        device: "rxe0".into(),
        port: 1,
        software: true,
        op: Op::Read,
        measure: Measure::Bandwidth,
        queue_pairs: 2,
        depth: 16,
        verify: true,
        interrupted: true,
        results: vec![SizeReport {
            size: 4096,
            messages: 1000,
            bytes: 4_096_000,
            seconds: 0.5,
            gigabytes_per_second: 0.008_192,
            messages_per_second: 2000.0,
            latency_of: LatencyOf::PostToCompletion,
            latency_ns: latency,
        }],
    }
}

#[test]
fn a_report_in_a_table() {
    let report = a_report();
    assert_eq!(
        rows(&report),
        [[
            "4096", "1000", "0.008", "2000", "1.23", "2.00", "3456.00", "4000.00", "5000.00"
        ]]
    );
    assert_eq!(
        head(&machine(), &report),
        [
            "read, bandwidth: 10.0.0.4 by rxe0/1, GID 1 (RoCE v2) to 10.0.0.1:18515, 2 queue pairs of depth 16, every byte compared",
            "latency: from posting a request to its completion",
            "the kernel emulates this device: the figures do not describe hardware",
            "interrupted: results so far",
        ]
    );
}

#[test]
fn a_report_for_programs() {
    let value = described(&machine(), &a_report());
    for (at, wanted) in [
        ("/schema", serde_json::json!("nacre-rdma-perf/1")),
        ("/op", "read".into()),
        ("/measure", "bandwidth".into()),
        ("/gid_index", 1.into()),
        ("/gid_type", "RoCE v2".into()),
        ("/results/0/latency_of", "post_to_completion".into()),
        ("/results/0/latency_ns/median", 2000.into()),
        ("/results/0/latency_ns/p999", 4_000_000.into()),
    ] {
        assert_eq!(value.pointer(at), Some(&wanted), "{at}");
    }
}

#[test]
fn texts_of_a_server() {
    let peer: SocketAddr = "10.0.0.4:5000".parse().unwrap();
    let terms = SessionParameters {
        op: Op::Send,
        measure: Measure::Latency,
        verify: true,
        queue_pairs: 1,
        depth: 1,
        message_bytes: 64,
        seed: 0,
        peer_timeout_ms: 1,
    };
    let began = ServerEvent::Began { peer, terms };
    assert_eq!(
        sentence(&began),
        "10.0.0.4:5000: send, latency, 1 queue pair of depth 1, messages of at most 64 bytes, every byte compared"
    );
    let served = Served {
        messages: 7,
        bytes: 448,
    };
    let ended = ServerEvent::Ended {
        peer,
        terms,
        outcome: Ok(served),
    };
    assert_eq!(sentence(&ended), "10.0.0.4:5000: done: 7 messages, 448 B");
    assert_eq!(
        (
            event(&ended)["messages"].as_u64(),
            event(&ended)["error"].as_str()
        ),
        (Some(7), None)
    );
    let error = PerfError::Disconnected {
        peer,
        during: "measuring",
    };
    let failed = ServerEvent::Ended {
        peer,
        terms,
        outcome: Err(error),
    };
    assert_eq!(
        sentence(&failed),
        "10.0.0.4:5000: failed: 10.0.0.4:5000 closed the connection (measuring)"
    );
    assert_eq!(
        event(&failed)["error"],
        "10.0.0.4:5000 closed the connection (measuring)"
    );
    let reject = Reject::limit(Refusal::Depth, 9, 8);
    let refused = ServerEvent::Refused {
        peer,
        reject,
        why: None,
    };
    assert_eq!(
        sentence(&refused),
        "10.0.0.4:5000: refused: a greater depth than it allows (9 asked, 8 allowed)"
    );
    assert_eq!(event(&refused)["event"], "refused");
}
