//! Tests of successful runs: every operation and measure, message sizes, queue pairs, several
//! clients, and stopping the server.

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use nacre_transport_rdma_verbs::sim::attributes;

use super::rig::{CLIENT, Rig, SERVER, endless};
use crate::*;

/// Goal: each operation is measured for latency and bandwidth, with and without verification, and
/// both ends count the same. Method: sizes around every limit of the implementation (one byte, a
/// head, a head and a byte, more).
#[test]
fn every_operation_and_measure() {
    let rig = Rig::new();
    for op in Op::ALL {
        for measure in [Measure::Bandwidth, Measure::Latency] {
            for verify in [false, true] {
                let test = Test {
                    op,
                    measure,
                    sizes: vec![1, 63, 64, 65, 4096, 10_000],
                    length: Length::Messages(50),
                    warmup: 3,
                    queue_pairs: 2,
                    depth: 4,
                    verify,
                    seed: 7,
                };
                let report = rig.run(test).unwrap();
                let sizes: Vec<u32> = report.results.iter().map(|r| r.size).collect();
                assert_eq!(sizes, [1, 63, 64, 65, 4096, 10_000]);
                for result in &report.results {
                    assert_eq!(result.messages, 50, "{op} {measure}");
                    assert_eq!(result.bytes, 50 * u64::from(result.size));
                    assert!(result.messages_per_second > 0.0 && result.seconds > 0.0);
                    let latency = result.latency_ns;
                    assert!(0 < latency.min && latency.min <= latency.median);
                    assert!(latency.median <= latency.p99 && latency.p99 <= latency.p999);
                    assert!(latency.p999 <= latency.max);
                }
                let depth = if measure == Measure::Latency { 1 } else { 4 };
                assert_eq!(report.depth, depth);
                assert_eq!((report.device.as_str(), report.port), ("sim_client", 1));
                assert_eq!(report.local, CLIENT.to_string());
                let served = rig.ended().unwrap();
                assert_eq!(served.messages, 6 * 53);
            }
        }
    }
    rig.stop().unwrap();
}

/// Goal: the report of a latency names the measured event.
#[test]
fn latencies_are_named() {
    let rig = Rig::new();
    for (op, of) in [
        (Op::Send, LatencyOf::HalfRoundTrip),
        (Op::Write, LatencyOf::PostToCompletion),
        (Op::Read, LatencyOf::PostToCompletion),
    ] {
        let test = Test {
            op,
            measure: Measure::Latency,
            ..Test::default()
        };
        assert_eq!(rig.run(test).unwrap().results[0].latency_of, of);
    }
    rig.stop().unwrap();
}

/// Goal: a timed run lasts for its time and counts its messages.
#[test]
fn by_time() {
    let rig = Rig::new();
    let wanted = Duration::from_millis(150);
    let test = Test {
        length: Length::Time(wanted),
        sizes: vec![256],
        ..Test::default()
    };
    let began = Instant::now();
    let report = rig.run(test).unwrap();
    assert!(began.elapsed() >= wanted);
    assert!(report.results[0].messages >= 1);
    assert!(!report.interrupted);
    rig.stop().unwrap();
}

/// Goal: READs in flight never exceed the server's depth, which is an error on real devices.
/// Method: a server's device with a depth of three, and a depth of 32 over two queue pairs.
#[test]
fn reads_stay_within_the_negotiated_depth() {
    let mut server = attributes("sim_server");
    server.max_responder_resources = 3;
    let rig = Rig::on(server, attributes("sim_client"), |_| ());
    let test = Test {
        op: Op::Read,
        verify: true,
        queue_pairs: 2,
        depth: 32,
        ..Test::default()
    };
    let report = rig.run(test).unwrap();
    assert_eq!(report.depth, 3);
    assert_eq!(report.results[0].messages, 1000);
    rig.stop().unwrap();

    let mut server = attributes("sim_server");
    server.max_responder_resources = 0;
    let rig = Rig::on(server, attributes("sim_client"), |_| ());
    let error = rig
        .run(Test {
            op: Op::Read,
            ..Test::default()
        })
        .unwrap_err();
    assert!(matches!(error, PerfError::NoReads { .. }), "{error}");
    rig.stop().unwrap();
}

/// Goal: on a device with a small registration limit, memory is registered in pieces, and every
/// byte arrives. A request that does not fit into one piece is refused with the reason, at either
/// end. Method: devices with a limit of 20 MiB, tests that need several times that.
#[test]
fn memory_in_pieces() {
    let small = |name| {
        let mut small = attributes(name);
        small.max_mr_size = 20 << 20;
        small
    };
    let test = |op| Test {
        op,
        sizes: vec![1, 64 << 10],
        depth: 64,
        queue_pairs: 6,
        verify: true,
        length: Length::Messages(600),
        ..Test::default()
    };
    let rig = Rig::on(small("sim_server"), small("sim_client"), |_| ());
    for op in Op::ALL {
        let report = rig.run(test(op)).unwrap();
        assert!(
            report.results.iter().all(|result| result.messages == 600),
            "{op}"
        );
    }
    let large = Test {
        sizes: vec![9 << 20],
        depth: 1,
        queue_pairs: 1,
        ..test(Op::Send)
    };
    let error = rig.run(large.clone()).unwrap_err().to_string();
    let why = "bytes in one buffer, the RDMA device sim_client has 8388608; use smaller messages";
    assert!(error.contains(why), "{error}");
    rig.stop().unwrap();

    let rig = Rig::on(small("sim_server"), attributes("sim_client"), |_| ());
    let exposed = Test {
        op: Op::Write,
        ..large
    };
    let PerfError::Refused { reject, .. } = rig.run(exposed).unwrap_err() else {
        panic!("the server refuses")
    };
    assert_eq!(
        (reject.refusal, reject.limit),
        (wire::Refusal::Memory, 8 << 20)
    );
    rig.stop().unwrap();
}

/// Goal: a server serves clients one after another; a client that connects while it is busy waits.
#[test]
fn one_client_after_another() {
    let rig = Rig::new();
    let first = rig.start(rig.options(endless(Op::Write, Measure::Bandwidth)));
    first.under_way();
    let second = rig.start(rig.options(Test::default()));
    assert_eq!(rig.refused().0.refusal, wire::Refusal::Busy);
    first.stop.store(true, Ordering::Relaxed);
    let report = first.outcome().unwrap();
    assert!(report.interrupted && report.results[0].messages > 0);
    assert_eq!(second.outcome().unwrap().results[0].messages, 1000);
    assert!(rig.ended().unwrap().messages > 0);
    assert_eq!(rig.ended().unwrap().messages, 1016);
    rig.stop().unwrap();
}

/// Goal: with `once`, the server ends after its client, whether that succeeded or failed.
#[test]
fn a_server_for_one_client() {
    let mut rig = Rig::with(|options| options.once = true);
    rig.run(Test::default()).unwrap();
    rig.outcome().unwrap();
    assert_eq!(rig.fabric.ids(), []);
}

/// Goal: an idle server ends immediately on request.
#[test]
fn an_idle_server_stops() {
    let rig = Rig::new();
    let began = Instant::now();
    rig.stop().unwrap();
    assert!(began.elapsed() < Duration::from_secs(10));
}

/// Goal: a server that listens on every address serves on each device. Method: a wildcard address,
/// two devices.
#[test]
fn every_address() {
    let any: IpAddr = "0.0.0.0".parse().unwrap();
    let rig = Rig::with(|options| options.listen = vec![SocketAddr::new(any, 7)]);
    for ip in [SERVER, CLIENT] {
        let options = ClientOptions {
            source: Some(ip),
            ..ClientOptions::new(SocketAddr::new(ip, 7), Test::default())
        };
        let report = rig.run_with(&options).unwrap();
        let device = if ip == SERVER {
            "sim_server"
        } else {
            "sim_client"
        };
        assert_eq!(report.device, device);
    }
    rig.stop().unwrap();
}

/// Goal: progress is reported, and increases.
#[test]
fn progress() {
    let rig = Rig::new();
    let running = rig.start(rig.options(endless(Op::Read, Measure::Latency)));
    let first = running.under_way();
    let mut later = running.under_way();
    while later.messages == first.messages {
        later = running.under_way();
    }
    assert!(later.messages > first.messages && later.elapsed > first.elapsed);
    assert_eq!(later.size, 512);
    running.stop.store(true, Ordering::Relaxed);
    running.outcome().unwrap();
    rig.stop().unwrap();
}

/// Goal: memory is registered once per session, whatever is sent. Method: the provider counts.
#[test]
fn a_report_as_json() {
    let rig = Rig::new();
    let test = Test {
        length: Length::Messages(10),
        ..Test::default()
    };
    let report = rig.run(test).unwrap();
    assert_eq!(report.schema, "nacre-rdma-perf/1");
    assert!(report.software);
    assert_eq!(report.server, rig.address.to_string());
    rig.stop().unwrap();
}

/// Goal: bursts send a part of the time, and the run ends with every request answered. Method: a
/// tenth of the time on; a run without bursts for comparison.
#[test]
fn bursts() {
    let rig = Rig::new();
    let test = |verify| Test {
        op: Op::Write,
        sizes: vec![4096],
        length: Length::Time(Duration::from_millis(500)),
        verify,
        ..Test::default()
    };
    let options = ClientOptions {
        bursts: Some(Bursts {
            on: Duration::from_millis(10),
            off: Duration::from_millis(90),
        }),
        ..rig.options(test(false))
    };
    let bursts = rig.run_with(&options).unwrap().results[0].messages;
    let steady = rig.run(test(false)).unwrap().results[0].messages;
    assert!(bursts > 0 && bursts * 2 < steady, "{bursts} of {steady}");
    let verified = ClientOptions {
        test: test(true),
        ..options
    };
    assert!(rig.run_with(&verified).unwrap().results[0].messages > 0);
    rig.stop().unwrap();
}
