//! Tests of faults during a measurement. Each ends the session at both ends, in bounded time, with
//! its own error text. The server then serves the next client.

use std::time::{Duration, Instant};

use nacre_transport_rdma_verbs::sim::Target;
use nacre_transport_rdma_verbs::{CmEventKind, PortState, WcStatus};

use super::rig::{CLIENT, PATIENCE, Rig, Running, endless};
use crate::*;

/// Some of the statuses that networks and peers cause.
const SOME: [WcStatus; 3] = [
    WcStatus::RetryExceeded,
    WcStatus::RemoteAccess,
    WcStatus::RnrRetryExceeded,
];

/// Queue pair numbers of the data connection, at both ends.
struct Pairs {
    client: u32,
    server: u32,
}

/// The queue pairs of a run with one data connection. They are created in this order: control of
/// the client, control of the server, data of the client, data of the server.
fn data_pairs(rig: &Rig) -> Pairs {
    let all = rig.fabric.queue_pairs();
    assert_eq!(all.len(), 4, "{all:?}");
    assert_eq!(rig.fabric.peer_of(all[2]), Some(all[3]));
    Pairs {
        client: all[2],
        server: all[3],
    }
}

fn begin(rig: &Rig, op: Op, measure: Measure) -> Running {
    let running = rig.start(rig.options(endless(op, measure)));
    running.under_way();
    running
}

/// Checks that the server serves another client.
fn still_serves(rig: &Rig) {
    let test = Test {
        length: Length::Messages(20),
        ..Test::default()
    };
    assert_eq!(rig.run(test).unwrap().results[0].messages, 20);
    rig.ended().unwrap();
}

fn is_completion(error: &PerfError, status: WcStatus) -> bool {
    matches!(error, PerfError::Completion(failed) if failed.status == status)
}

/// Goal: every error status ends the run at the end that saw it, with the status, its meaning and
/// its remedy; the other end learns the status. Method: each status on RDMA WRITE, some statuses on
/// the other operations.
#[test]
fn every_error_status_at_the_client() {
    let rig = Rig::new();
    for &status in WcStatus::ALL {
        // `flushed_without_another_error` tests the flush status.
        if matches!(status, WcStatus::Success | WcStatus::WorkRequestFlushed) {
            continue;
        }
        let cases = [
            (Op::Send, Target::Send, "SEND"),
            (Op::Write, Target::Write, "RDMA WRITE"),
            (Op::Read, Target::Read, "RDMA READ"),
        ];
        for (op, target, opcode) in cases {
            if op != Op::Write && !SOME.contains(&status) {
                continue;
            }
            let running = begin(&rig, op, Measure::Bandwidth);
            let pair = data_pairs(&rig).client;
            rig.fabric.inject_status(pair, target, 3, status);
            let error = running.outcome().unwrap_err();
            let PerfError::Completion(failed) = &error else {
                panic!("{error}")
            };
            assert_eq!(
                (failed.status, failed.opcode, failed.qp),
                (status, opcode, pair)
            );
            let text = error.to_string();
            let begins = format!(
                "Work completion error: {} of a {opcode} on queue pair {pair} with {} (vendor error 0x5e): {}; {}",
                status.name(),
                rig.address,
                status.meaning(),
                status.remedy()
            );
            assert_eq!(text, begins);
            let served = rig.ended().unwrap_err();
            assert!(
                matches!(&served, PerfError::PeerEnded { status: Some(reported), .. } if *reported == status)
                    || matches!(served, PerfError::Completion(_)),
                "{status}: {served}"
            );
        }
    }
    still_serves(&rig);
    rig.stop().unwrap();
}

/// Goal: the same for the requests of the server (echoes and credits). The client learns the
/// status.
#[test]
fn every_error_status_at_the_server() {
    let rig = Rig::new();
    for &status in WcStatus::ALL {
        if matches!(status, WcStatus::Success | WcStatus::WorkRequestFlushed) {
            continue;
        }
        for measure in [Measure::Latency, Measure::Bandwidth] {
            if measure == Measure::Bandwidth && !SOME.contains(&status) {
                continue;
            }
            let running = begin(&rig, Op::Send, measure);
            rig.fabric
                .inject_status(data_pairs(&rig).server, Target::Send, 1, status);
            let seen = rig.ended().unwrap_err();
            assert!(is_completion(&seen, status), "{status}: {seen}");
            assert!(
                seen.to_string()
                    .starts_with(&format!("Work completion error: {status} of a SEND"))
            );
            let reported = running.outcome().unwrap_err();
            assert!(
                matches!(&reported, PerfError::PeerEnded { status: Some(reported), .. } if *reported == status)
                    || matches!(reported, PerfError::Completion(_)),
                "{status}: {reported}"
            );
        }
    }
    still_serves(&rig);
    rig.stop().unwrap();
}

/// Goal: a failed receive is reported at both ends, each by its own device's event.
#[test]
fn a_receive_fails() {
    let rig = Rig::new();
    let running = begin(&rig, Op::Send, Measure::Bandwidth);
    let server = data_pairs(&rig).server;
    rig.fabric
        .inject_status(server, Target::Recv, 0, WcStatus::LocalLength);
    let error = running.outcome().unwrap_err();
    assert!(
        is_completion(&error, WcStatus::RemoteInvalidRequest)
            || is_completion(&error, WcStatus::RemoteOperation),
        "{error}"
    );
    let error = rig.ended().unwrap_err();
    assert!(is_completion(&error, WcStatus::LocalLength), "{error}");
    assert!(
        error.to_string().contains(" of a RECV on queue pair "),
        "{error}"
    );
    still_serves(&rig);
    rig.stop().unwrap();
}

/// Goal: a queue pair that flushes without any other word is still an error, with what to look for.
#[test]
fn flushed_without_another_error() {
    let rig = Rig::new();
    let running = begin(&rig, Op::Write, Measure::Bandwidth);
    let pair = data_pairs(&rig).client;
    rig.fabric
        .inject_status(pair, Target::Write, 0, WcStatus::WorkRequestFlushed);
    let error = running.outcome().unwrap_err();
    assert!(
        is_completion(&error, WcStatus::WorkRequestFlushed),
        "{error}"
    );
    assert!(rig.ended().is_err());
    rig.stop().unwrap();
}

/// Goal: a device that disappears during a run is named, at its end; the other end is not left
/// waiting; a server on the other device continues.
#[test]
fn the_clients_device_is_removed() {
    let rig = Rig::new();
    let running = begin(&rig, Op::Read, Measure::Bandwidth);
    rig.fabric.remove_device(rig.client_device);
    let error = running.outcome().unwrap_err();
    assert_eq!(
        error.to_string(),
        "the RDMA device sim_client was removed (measuring)"
    );
    assert!(rig.ended().is_err());
    rig.stop().unwrap();
}

/// Goal: a server whose only device is gone says so and ends; its client too.
#[test]
fn the_servers_device_is_removed() {
    let mut rig = Rig::new();
    let running = begin(&rig, Op::Send, Measure::Bandwidth);
    rig.fabric.remove_device(rig.server_device);
    let error = rig.ended().unwrap_err();
    assert_eq!(
        error.to_string(),
        "the RDMA device sim_server was removed (measuring)"
    );
    assert!(matches!(rig.outcome(), Err(PerfError::NoListener)));
    let error = running.outcome().unwrap_err();
    let gone = matches!(
        error,
        PerfError::Disconnected { .. } | PerfError::Silent { .. }
    );
    assert!(
        gone || is_completion(&error, WcStatus::RetryExceeded),
        "{error}"
    );
}

/// Goal: the network between is cut: both ends give up, neither before nor long after the agreed
/// time.
#[test]
fn the_network_is_cut() {
    let rig = Rig::new();
    let after = Duration::from_millis(3000);
    for op in Op::ALL {
        let options = ClientOptions {
            peer_timeout: after,
            ..rig.options(endless(op, Measure::Bandwidth))
        };
        let running = rig.start(options);
        running.under_way();
        let cut = Instant::now();
        rig.fabric.set_port(rig.server_device, PortState::Down);
        rig.fabric.set_port(rig.client_device, PortState::Down);
        let error = running.outcome().unwrap_err();
        assert!(
            matches!(error, PerfError::Silent { .. } | PerfError::Stuck { .. }),
            "{op}: {error}"
        );
        assert!(error.to_string().contains("3000ms"), "{error}");
        let error = rig.ended().unwrap_err();
        assert!(
            matches!(
                error,
                PerfError::Silent {
                    during: "measuring",
                    ..
                }
            ),
            "{op}: {error}"
        );
        assert!(cut.elapsed() < PATIENCE);
        rig.fabric.set_port(rig.server_device, PortState::Active);
        rig.fabric.set_port(rig.client_device, PortState::Active);
    }
    still_serves(&rig);
    rig.stop().unwrap();
}

/// Goal: an end whose device lives and whose program hangs is given up too. Method: one direction
/// of the control connection is held, so that signs of life do not arrive.
#[test]
fn a_hung_program() {
    let rig = Rig::new();
    let after = Duration::from_millis(3000);
    for who in [0, 1] {
        let options = ClientOptions {
            peer_timeout: after,
            ..rig.options(endless(Op::Write, Measure::Bandwidth))
        };
        let running = rig.start(options);
        running.under_way();
        let held = rig.fabric.queue_pairs()[who];
        rig.fabric.pause(held, true);
        let (client, server) = (running.outcome().unwrap_err(), rig.ended().unwrap_err());
        let silent = |error: &PerfError| matches!(error, PerfError::Silent { .. });
        // Without the client's signs the server hears nothing, and then answers nothing.
        assert!(silent(&client) || who == 0, "{client}");
        assert!(silent(&server) || who == 1, "{server}");
    }
    still_serves(&rig);
    rig.stop().unwrap();
}

/// Goal: the wait for requests that never complete, while the other end lives, ends.
#[test]
fn requests_that_never_complete() {
    let rig = Rig::new();
    let options = ClientOptions {
        peer_timeout: Duration::from_millis(3000),
        ..rig.options(endless(Op::Read, Measure::Bandwidth))
    };
    let running = rig.start(options);
    running.under_way();
    rig.fabric.pause(data_pairs(&rig).client, true);
    let error = running.outcome().unwrap_err();
    assert!(matches!(error, PerfError::Stuck { .. }), "{error}");
    assert!(rig.ended().is_err());
    still_serves(&rig);
    rig.stop().unwrap();
}

/// Goal: a peer that ends the connection is reported as that, at both ends. Method: the events of a
/// connection that another party ended.
#[test]
fn disconnected() {
    let rig = Rig::new();
    let running = begin(&rig, Op::Write, Measure::Latency);
    let id = rig.fabric.id_of(data_pairs(&rig).client).unwrap();
    rig.fabric.inject_event(id, CmEventKind::Disconnected);
    let error = running.outcome().unwrap_err();
    assert_eq!(
        error.to_string(),
        format!("{} closed the connection (measuring)", rig.address)
    );
    assert!(rig.ended().is_err());

    let running = begin(&rig, Op::Write, Measure::Latency);
    let id = rig.fabric.id_of(data_pairs(&rig).server).unwrap();
    rig.fabric.inject_event(id, CmEventKind::Disconnected);
    let error = rig.ended().unwrap_err();
    assert!(error.to_string().contains(&CLIENT.to_string()), "{error}");
    assert!(
        matches!(
            error,
            PerfError::Disconnected {
                during: "measuring",
                ..
            }
        ),
        "{error}"
    );
    assert!(running.outcome().is_err());
    still_serves(&rig);
    rig.stop().unwrap();
}

/// Goal: an address that moves ends the run at the end that gets the event; meaningless events are
/// ignored.
#[test]
fn address_change_ends_the_run() {
    let rig = Rig::new();
    for end in [0, 1] {
        let running = begin(&rig, Op::Send, Measure::Latency);
        let pairs = rig.fabric.queue_pairs();
        for pair in &pairs {
            let id = rig.fabric.id_of(*pair).unwrap();
            rig.fabric.inject_event(id, CmEventKind::TimewaitExit);
            rig.fabric.inject_event(
                id,
                CmEventKind::Other {
                    event: 99,
                    status: 0,
                },
            );
        }
        running.under_way();
        let id = rig.fabric.id_of(pairs[end]).unwrap();
        rig.fabric.inject_event(id, CmEventKind::AddressChange);
        let (client, server) = (running.outcome().unwrap_err(), rig.ended().unwrap_err());
        let seen = if end == 0 { client } else { server };
        assert!(matches!(seen, PerfError::AddressMoved { .. }), "{seen}");
    }
    still_serves(&rig);
    rig.stop().unwrap();
}

/// Goal: a server that stops notifies its client, which does not wait.
#[test]
fn the_server_is_stopped() {
    let mut rig = Rig::new();
    let running = begin(&rig, Op::Read, Measure::Bandwidth);
    rig.interrupt();
    let error = running.outcome().unwrap_err();
    assert_eq!(
        error.to_string(),
        format!("{} ended it: it was stopped", rig.address)
    );
    rig.outcome().unwrap();
    assert!(matches!(rig.ended(), Err(PerfError::Interrupted)));
    assert_eq!(rig.fabric.ids(), []);
}

/// Goal: `once` returns the failure of its client to the caller.
#[test]
fn once_returns_the_failure() {
    let mut rig = Rig::with(|options| options.once = true);
    let running = begin(&rig, Op::Write, Measure::Bandwidth);
    let pair = data_pairs(&rig).client;
    rig.fabric
        .inject_status(pair, Target::Write, 0, WcStatus::RetryExceeded);
    assert!(running.outcome().is_err());
    let error = rig.outcome().unwrap_err();
    assert!(matches!(error, PerfError::PeerEnded { .. }), "{error}");
    assert_eq!(rig.fabric.ids(), []);
}
