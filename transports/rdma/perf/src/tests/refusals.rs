//! Tests of failures before a measurement: addresses, routes, devices, limits, other programs,
//! other versions.

use std::net::SocketAddr;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use nacre_transport_rdma_verbs::sim::{ConnectFault, attributes};

use super::rig::{CLIENT, PATIENCE, Rig, SERVER, network};
use crate::wire::Refusal;
use crate::*;

/// Goal: each way in which connecting fails has its text with stage and peer; a silent network is
/// given up in time.
#[test]
fn connection_failures_name_stage_and_peer() {
    let rig = Rig::new();
    let address = rig.address;
    for (fault, text) in [
        (
            ConnectFault::AddressError,
            format!(
                "cannot connect to {address} by RDMA: RDMA_CM_EVENT_ADDR_ERROR, status -19 (No such device (os error 19)) (ADDR_RESOLVE); the way there leads over an interface without an RDMA device or GID: `nacre rdma gids`, or choose with --source"
            ),
        ),
        (
            ConnectFault::RouteError,
            format!(
                "cannot connect to {address} by RDMA: RDMA_CM_EVENT_ROUTE_ERROR, status -113 (No route to host (os error 113)) (ROUTE_RESOLVE)"
            ),
        ),
        (
            ConnectFault::Unreachable,
            format!(
                "cannot connect to {address} by RDMA: RDMA_CM_EVENT_UNREACHABLE, status -110 (Connection timed out (os error 110)) (CONNECT); is UDP 4791 (RoCE v2) admitted by the packet filters of both machines?"
            ),
        ),
        (
            ConnectFault::ConnectError,
            format!(
                "cannot connect to {address} by RDMA: RDMA_CM_EVENT_CONNECT_ERROR, status -5 (Input/output error (os error 5)) (CONNECT)"
            ),
        ),
    ] {
        rig.fabric.fault_connects(SERVER, Some(fault));
        assert_eq!(rig.run(Test::default()).unwrap_err().to_string(), text);
    }
    rig.fabric
        .fault_connects(SERVER, Some(ConnectFault::Silent));
    let options = ClientOptions {
        cm_timeout: Duration::from_millis(300),
        ..rig.options(Test::default())
    };
    let began = Instant::now();
    let text = rig.run_with(&options).unwrap_err().to_string();
    assert!(began.elapsed() >= Duration::from_millis(300) && began.elapsed() < PATIENCE);
    let begins =
        format!("RDMA connection timeout after 300ms in ADDR_RESOLVE to {address}; is it there");
    assert!(text.starts_with(&begins), "{text}");
    rig.fabric.fault_connects(SERVER, None);
    rig.run(Test::default()).unwrap();
    rig.stop().unwrap();
}

/// Goal: a machine without a server is distinguished from an absent one.
#[test]
fn no_server_listens() {
    let rig = Rig::new();
    let other = SocketAddr::new(SERVER, 9);
    let options = ClientOptions {
        source: Some(CLIENT),
        ..ClientOptions::new(other, Test::default())
    };
    let text = rig.run_with(&options).unwrap_err().to_string();
    assert_eq!(
        text,
        "10.0.0.1:9 refused the connection (reason 8): no `nacre rdma perf server` listens there"
    );
    rig.stop().unwrap();
}

/// Goal: a test that makes no sense is refused before anything is done.
#[test]
fn invalid_tests_are_refused() {
    let rig = Rig::new();
    for (test, wanted) in [
        (
            Test {
                sizes: vec![],
                ..Test::default()
            },
            Invalid::NoSize,
        ),
        (
            Test {
                sizes: vec![4, 0],
                ..Test::default()
            },
            Invalid::Size { size: 0 },
        ),
        (
            Test {
                sizes: vec![MAX_MESSAGE + 1],
                ..Test::default()
            },
            Invalid::Size {
                size: MAX_MESSAGE + 1,
            },
        ),
        (
            Test {
                queue_pairs: 0,
                ..Test::default()
            },
            Invalid::QueuePairs { asked: 0 },
        ),
        (
            Test {
                queue_pairs: 257,
                ..Test::default()
            },
            Invalid::QueuePairs { asked: 257 },
        ),
        (
            Test {
                depth: 0,
                ..Test::default()
            },
            Invalid::Depth { asked: 0 },
        ),
        (
            Test {
                depth: 4097,
                ..Test::default()
            },
            Invalid::Depth { asked: 4097 },
        ),
        (
            Test {
                op: Op::Write,
                verify: true,
                sizes: vec![1, 128 << 20],
                depth: 5,
                ..Test::default()
            },
            Invalid::Exposed { needed: 640 << 20 },
        ),
        (
            Test {
                length: Length::Messages(0),
                ..Test::default()
            },
            Invalid::Length,
        ),
        (
            Test {
                length: Length::Time(Duration::ZERO),
                ..Test::default()
            },
            Invalid::Length,
        ),
    ] {
        match rig.run(test).unwrap_err() {
            PerfError::Invalid(invalid) => assert_eq!(invalid, wanted),
            error => panic!("{error}"),
        }
    }
    rig.stop().unwrap();
}

/// Goal: the server refuses a forbidden request with the numbers, and continues.
#[test]
fn limits_of_the_server() {
    let rig = Rig::with(|options| {
        options.memory = 1 << 20;
        options.max_queue_pairs = 2;
        options.max_depth = 8;
    });
    let small = Test {
        sizes: vec![512],
        depth: 4,
        length: Length::Messages(10),
        ..Test::default()
    };
    for (test, refusal) in [
        (
            Test {
                queue_pairs: 3,
                ..small.clone()
            },
            Refusal::QueuePairs,
        ),
        (
            Test {
                depth: 9,
                ..small.clone()
            },
            Refusal::Depth,
        ),
        (
            Test {
                sizes: vec![4 << 20],
                ..small.clone()
            },
            Refusal::Memory,
        ),
        (
            Test {
                sizes: vec![512, 2 << 20],
                op: Op::Write,
                verify: true,
                ..small.clone()
            },
            Refusal::Memory,
        ),
    ] {
        let error = rig.run(test).unwrap_err();
        let PerfError::Refused { reject, .. } = &error else {
            panic!("{error}")
        };
        assert_eq!(reject.refusal, refusal);
        assert!(
            reject.needed > reject.limit && reject.limit > 0,
            "{reject:?}"
        );
        assert!(error.to_string().contains(" allowed)"), "{error}");
        assert_eq!(rig.refused().0, *reject);
    }
    rig.run(small).unwrap();
    rig.stop().unwrap();
}

/// Goal: a client does not take more memory than it may either, and says what to change.
#[test]
fn memory_of_the_client() {
    let rig = Rig::new();
    let test = Test {
        sizes: vec![MAX_MESSAGE],
        op: Op::Read,
        ..Test::default()
    };
    let text = rig.run(test).unwrap_err().to_string();
    assert!(
        text.contains(" bytes of memory here, 1073741824 are allowed (--memory); use smaller"),
        "{text}"
    );
    rig.stop().unwrap();
}

/// Goal: a device's limits are named with the flag that asks for less, at the end that has the
/// device. Method: devices with low limits.
#[test]
fn limits_of_devices() {
    type Change = fn(&mut nacre_transport_rdma_verbs::DeviceAttributes);
    let cases: [(Change, &str); 4] = [
        (
            |a| a.max_qp = 1,
            "this needs 2 queue pairs, the RDMA device small has 1; use fewer --queue-pairs",
        ),
        (
            |a| a.max_qp_wr = 16,
            "requests per queue pair, the RDMA device small has 16; use less --depth",
        ),
        (
            |a| a.max_cqe = 20,
            "completion queue entries, the RDMA device small has 20; use less --depth or fewer --queue-pairs",
        ),
        (|a| a.max_mr_size = 4096, "a memory region is "),
    ];
    for (change, text) in cases {
        let mut small = attributes("small");
        change(&mut small);
        let rig = Rig::on(attributes("sim_server"), small.clone(), |_| ());
        let error = rig.run(Test::default()).unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
        rig.stop().unwrap();

        let rig = Rig::on(small, attributes("sim_client"), |_| ());
        let error = rig.run(Test::default()).unwrap_err();
        let PerfError::Refused { reject, .. } = error else {
            panic!("{error}")
        };
        assert_eq!(reject.refusal, Refusal::Resources);
        let (_, why) = rig.refused();
        let why = why.expect("a reason from the server").to_string();
        assert!(why.contains(text), "{why}");
        rig.stop().unwrap();
    }
}

/// Goal: a client that is stopped while it connects stops.
#[test]
fn stopped_while_connecting() {
    let rig = Rig::new();
    rig.fabric
        .fault_connects(SERVER, Some(ConnectFault::Silent));
    let options = ClientOptions {
        cm_timeout: PATIENCE,
        ..rig.options(Test::default())
    };
    let stop = AtomicBool::new(true);
    let error = measure(&*rig.fabric.provider(), &options, &stop, &mut |_| ()).unwrap_err();
    assert!(matches!(error, PerfError::Interrupted), "{error}");
    rig.fabric.fault_connects(SERVER, None);
    rig.stop().unwrap();
}

/// Goal: a server cannot be bound to an address that no device has, or that is taken.
#[test]
fn addresses_that_cannot_be_listened_on() {
    let (fabric, _) = network(attributes("sim_server"), attributes("sim_client"));
    let bind = |address: &str| {
        Server::bind(
            fabric.provider(),
            ServerOptions::new(vec![address.parse().unwrap()]),
        )
    };
    let error = bind("192.0.2.9:1").err().unwrap().to_string();
    assert_eq!(error, "rdma_bind_addr failed: No such device (os error 19)");
    let _first = bind("10.0.0.1:1").unwrap();
    let error = bind("10.0.0.1:1").err().unwrap().to_string();
    assert_eq!(
        error,
        "rdma_bind_addr failed: Address already in use (os error 98)"
    );
}
