//! Tests of the probes: connections that only check for a listener, and a device that is tested
//! with itself.

use std::net::SocketAddr;
use std::time::Duration;

use nacre_transport_rdma_verbs::sim::{ConnectFault, attributes};

use super::rig::{CLIENT, PATIENCE, Rig, SERVER, network};
use crate::*;

/// Goal: a listening program, a machine without a listener, and a machine that does not answer are
/// distinguished. The probe leaves nothing behind.
#[test]
fn listening_refusing_and_silent_addresses() {
    let rig = Rig::new();
    let within = |port, time| {
        let peer = SocketAddr::new(SERVER, port);
        probe(&*rig.fabric.provider(), peer, Some(CLIENT), time)
    };
    let ask = |port| within(port, PATIENCE);
    assert_eq!(ask(DEFAULT_PORT).unwrap(), Answer::Refused);
    assert_eq!(rig.refused().0.refusal, wire::Refusal::Malformed);
    assert!(matches!(
        ask(9),
        Err(PerfError::NobodyListens { status: 8, .. })
    ));
    rig.fabric
        .fault_connects(SERVER, Some(ConnectFault::Unreachable));
    assert!(matches!(
        ask(9),
        Err(PerfError::Connect {
            stage: "CONNECT",
            ..
        })
    ));
    rig.fabric
        .fault_connects(SERVER, Some(ConnectFault::Silent));
    let given_up = within(9, Duration::from_millis(300));
    assert!(matches!(
        given_up,
        Err(PerfError::Timeout {
            stage: "ADDR_RESOLVE",
            ..
        })
    ));
    rig.fabric.fault_connects(SERVER, None);
    rig.stop().unwrap();
}

/// Goal: a device is tested with itself, and an address that no device has is an error, not a wait.
#[test]
fn a_device_with_itself() {
    let (fabric, _) = network(attributes("sim_server"), attributes("sim_client"));
    let provider = fabric.provider();
    let test = Test {
        verify: true,
        op: Op::Write,
        ..Test::default()
    };
    let report = around(&provider, SERVER, test.clone(), PATIENCE).unwrap();
    assert_eq!(
        (report.device.as_str(), report.results[0].messages),
        ("sim_server", 1000)
    );
    let error = around(&provider, "192.0.2.1".parse().unwrap(), test, PATIENCE).unwrap_err();
    assert!(matches!(error, PerfError::Verbs(_)), "{error}");
    assert_eq!((fabric.ids(), fabric.queue_pairs()), (vec![], vec![]));
}
