//! Tests of `nacre subsystem`, `nacre listener` and `nacre host`.

use serde_json::{Value, json};

use super::fake::{Fake, cells, no_such_device};

const NQN: &str = "nqn.2026-01.io.nacre:disk";

fn address(port: &str) -> Value {
    json!({ "trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": port })
}

/// A daemon with its discovery subsystem and one more, to which one host is connected.
fn daemon() -> Fake {
    let discovery = json!({
        "nqn": "nqn.2014-08.org.nvmexpress.discovery", "subtype": "Discovery", "listen_addresses": [],
        "allow_any_host": true, "hosts": [],
    });
    let disk = json!({
        "nqn": NQN, "subtype": "NVMe", "listen_addresses": [address("4420"), address("4421")],
        "allow_any_host": false, "hosts": [{ "nqn": "nqn.host-a" }, { "nqn": "nqn.host-b", "dhchap_key": "k" }],
        "serial_number": "NACRE1", "model_number": "Nacre", "max_namespaces": 32,
        "namespaces": [{ "nsid": 1, "bdev_name": "ram0", "name": "ram0" }],
    });
    Fake::play(move |method, params| match method {
        "nvmf_get_subsystems" => match params["nqn"].as_str() {
            None => Ok(json!([discovery, disk])),
            Some(NQN) => Ok(json!([disk])),
            Some(_) => Err(no_such_device()),
        },
        "nvmf_subsystem_add_ns" if params["namespace"]["bdev_name"] == "missing" => Err(json!({
            "code": -32602, "message": "Invalid parameters",
            "data": { "field": "namespace.bdev_name", "cause": "there is no bdev \"missing\"", "remedy": "bdev_get_bdevs lists them" },
        })),
        "nvmf_subsystem_add_ns" => Ok(json!(1)),
        "nvmf_get_transports" => Ok(json!([{ "trtype": "TCP" }])),
        "nvmf_subsystem_get_listeners" => {
            if params["nqn"] == NQN {
                Ok(
                    json!([{ "address": address("4420"), "ana_states": [{ "ana_group": 1, "ana_state": "optimized" }] }]),
                )
            } else {
                Ok(json!([]))
            }
        }
        "nvmf_get_listeners" => Ok(json!({
            "listeners": [
                { "listener": "data", "iface": "lo", "address": address("4420"), "wanted": "listen", "actual": "listening", "subsystems": [NQN] },
                { "listener": "data", "iface": "eth1", "address": address("4423"), "wanted": "prefer", "actual": "absent",
                  "reason": "no_rdma_dev", "evidence": "seen", "remedy": "do this", "subsystems": [] },
            ],
            "unmatched": ["listener \"x\": no interface matches \"name:eth9\"; have: lo 127.0.0.1"],
        })),
        "nvmf_subsystem_get_controllers" => Ok(
            json!([{ "cntlid": 1, "cntrltype": "IO", "hostnqn": "nqn.host-a", "hostid": "x", "num_io_qpairs": 2 }]),
        ),
        "nvmf_subsystem_get_qpairs" => Ok(json!([
            { "cntlid": 1, "qid": 0, "state": "enabled", "thread": "reactor_1", "listen_address": address("4420"), "peer_address": address("5") },
            { "cntlid": 1, "qid": 1, "state": "enabled", "thread": "reactor_1", "listen_address": address("4420"), "peer_address": address("6") },
        ])),
        _ => Ok(json!(true)),
    })
}

#[test]
fn subsystems_are_listed_and_shown() {
    let daemon = daemon();
    let list = daemon.nacre("subsystem list").printed();
    assert_eq!(
        cells(&list),
        [
            vec!["nqn.2014-08.org.nvmexpress.discovery", "any"],
            vec![
                NQN,
                "1",
                "2",
                "NACRE1",
                "tcp://127.0.0.1:4420",
                "tcp://127.0.0.1:4421"
            ],
        ]
    );
    assert_eq!(daemon.nacre("subsystem list --json").json()[1]["nqn"], NQN);
    let shown = daemon.nacre(&format!("subsystem show {NQN}")).printed();
    assert!(
        cells(&shown).contains(&vec!["namespaces.0.bdev_name", "ram0"]),
        "{shown}"
    );
    assert_eq!(
        daemon.nacre("subsystem show nqn.x").failed(4),
        "error: nvmf_get_subsystems: No such device (code -19)"
    );

    let connections = daemon.nacre("subsystem connections").printed();
    assert_eq!(
        cells(&connections),
        [[
            NQN,
            "1",
            "nqn.host-a",
            "1",
            "enabled",
            "127.0.0.1",
            "tcp://127.0.0.1:4420",
            "reactor_1"
        ]]
    );
    let connections = daemon
        .nacre(&format!("subsystem connections {NQN} --json"))
        .json();
    assert_eq!(connections[0]["qpairs"][1]["qid"], 1);
}

/// One command makes a whole subsystem and says how to connect; or nothing of it stays.
#[test]
fn subsystems_are_made_whole_or_not_at_all() {
    let daemon = daemon();
    let words = format!(
        "subsystem create {NQN} --serial S1 --host nqn.h --namespace ram0 --listen 127.0.0.1"
    );
    let printed = daemon.nacre(&words).printed();
    assert_eq!(
        printed,
        format!("{NQN}\nnvme connect -t tcp -a 127.0.0.1 -s 4420 -n {NQN}\n")
    );
    let call = |method: &str, params: Value| (method.to_owned(), params);
    assert_eq!(
        daemon.asked(),
        [
            call(
                "nvmf_create_subsystem",
                json!({ "nqn": NQN, "serial_number": "S1", "allow_any_host": false })
            ),
            call(
                "nvmf_subsystem_add_ns",
                json!({ "nqn": NQN, "namespace": { "bdev_name": "ram0" } })
            ),
            call(
                "nvmf_subsystem_add_host",
                json!({ "nqn": NQN, "host": "nqn.h" })
            ),
            call("nvmf_get_transports", Value::Null),
            call(
                "nvmf_subsystem_add_listener",
                json!({ "nqn": NQN, "listen_address": address("4420") })
            ),
        ]
    );

    let error = daemon
        .nacre(&format!("subsystem create {NQN} --namespace missing"))
        .failed(4);
    assert_eq!(
        error,
        "error: namespace.bdev_name: there is no bdev \"missing\"; `nacre bdev list` lists them"
    );
    assert_eq!(
        daemon.asked().last().unwrap(),
        &call("nvmf_delete_subsystem", json!({ "nqn": NQN }))
    );

    // Without a name there is a new one each time, and a serial number of its own.
    let made = daemon.nacre("subsystem create -a --json").json();
    let nqn = made["nqn"].as_str().unwrap();
    assert!(nqn.starts_with("nqn.2014-08.org.nvmexpress:uuid:"), "{nqn}");
    let params = &daemon.asked()[0].1;
    assert_eq!(
        (&params["nqn"], &params["allow_any_host"]),
        (&json!(nqn), &json!(true))
    );
    assert_eq!(params["serial_number"].as_str().unwrap().len(), 20);
}

#[test]
fn namespaces_come_and_go() {
    let daemon = daemon();
    assert_eq!(
        daemon
            .nacre(&format!("subsystem add-namespace {NQN} ram0"))
            .printed(),
        "1\n"
    );
    let words = format!("subsystem add-namespace {NQN} ram0 --nsid 7 --not-visible --json");
    assert_eq!(
        daemon.nacre(&words).json(),
        json!({ "nqn": NQN, "nsid": 1 })
    );
    assert_eq!(
        daemon.asked()[1].1,
        json!({ "nqn": NQN, "namespace": { "bdev_name": "ram0", "nsid": 7, "no_auto_visible": true } })
    );
    assert_eq!(
        daemon
            .nacre(&format!(
                "subsystem add-namespace {NQN} ram0 --nsid 4294967295"
            ))
            .code,
        2
    );
    daemon
        .nacre(&format!("subsystem remove-namespace {NQN} 7"))
        .printed();
    assert_eq!(
        daemon.asked(),
        [(
            "nvmf_subsystem_remove_ns".into(),
            json!({ "nqn": NQN, "nsid": 7 })
        )]
    );
    daemon.nacre(&format!("subsystem delete {NQN}")).printed();
    assert_eq!(
        daemon.asked(),
        [("nvmf_delete_subsystem".into(), json!({ "nqn": NQN }))]
    );
}

#[test]
fn listeners_come_and_go() {
    let daemon = daemon();
    let list = daemon.nacre("listener list").printed();
    for line in [
        &[
            NQN,
            "tcp://127.0.0.1:4420",
            "lo",
            "optimized",
            "listen",
            "listening",
        ][..],
        &[
            "tcp://127.0.0.1:4423",
            "eth1",
            "prefer",
            "absent",
            "no_rdma_dev",
        ],
    ] {
        let words = |l: &str| l.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        assert!(list.lines().any(|l| words(l) == line), "{line:?} in {list}");
    }
    assert!(
        list.contains("tcp://127.0.0.1:4423: seen; do this\n"),
        "{list}"
    );
    assert!(
        list.contains("no interface matches \"name:eth9\""),
        "{list}"
    );
    assert_eq!(daemon.nacre("listener list --json").json()[0]["nqn"], NQN);
    daemon.asked();

    let words = format!("listener add {NQN} tcp://[::1]:4421 --ana-state non-optimized");
    assert_eq!(
        daemon.nacre(&words).printed(),
        format!("nvme connect -t tcp -a ::1 -s 4421 -n {NQN}\n")
    );
    let there = json!({ "trtype": "TCP", "adrfam": "IPv6", "traddr": "::1", "trsvcid": "4421" });
    assert_eq!(
        daemon.asked()[1],
        (
            "nvmf_subsystem_add_listener".into(),
            json!({ "nqn": NQN, "listen_address": there, "ana_state": "non_optimized" })
        )
    );
    let words = format!(
        "listener add {NQN} tcp://[::1]:4421 --max-queue-depth 64 --fabric roce --idle-timeout-s 60"
    );
    daemon.nacre(&words).printed();
    assert_eq!(
        daemon.asked()[1].1["options"],
        json!({ "max_queue_depth": 64, "idle_timeout_s": 60, "fabric": "roce" })
    );
    let error = daemon.nacre(&format!("listener add {NQN} 127.0.0.1 --tos 256"));
    assert!(
        error.code == 2 && error.err.contains("256 is not in 0..=255"),
        "{error:?}"
    );
    daemon
        .nacre(&format!(
            "listener set-ana {NQN} tcp://[::1]:4421 persistent-loss --group 7"
        ))
        .printed();
    assert_eq!(
        daemon.asked(),
        [(
            "nvmf_subsystem_listener_set_ana_state".into(),
            json!({ "nqn": NQN, "listen_address": there, "ana_state": "persistent_loss", "anagrpid": 7 })
        )]
    );
    daemon
        .nacre(&format!("listener remove {NQN} tcp://[::1]:4421"))
        .printed();
    assert_eq!(
        daemon.asked(),
        [(
            "nvmf_subsystem_remove_listener".into(),
            json!({ "nqn": NQN, "listen_address": there })
        )]
    );
    let error = daemon.nacre(&format!("listener add {NQN} fc://1"));
    assert!(
        error.code == 2 && error.err.contains("\"fc\" is not a transport"),
        "{error:?}"
    );
    assert_eq!(daemon.asked(), []);
}

/// The same where the refusal says so in words only, as this daemon's does.
#[test]
fn a_transport_made_by_another_client_meanwhile_serves() {
    let asked = std::sync::atomic::AtomicUsize::new(0);
    let daemon = Fake::play(move |method, _| match method {
        "nvmf_get_transports" => match asked.fetch_add(1, std::sync::atomic::Ordering::Relaxed) {
            0 => Ok(json!([])),
            _ => Ok(json!([{ "trtype": "TCP" }])),
        },
        "nvmf_create_transport" => {
            Err(json!({ "code": -32603, "message": "Transport type 'TCP' already exists" }))
        }
        _ => Ok(json!(true)),
    });
    let line = format!("listener add {NQN} 127.0.0.1");
    daemon.nacre(&line).printed();
}

/// Goal: a daemon without transports, as SPDK starts, creates the needed one on demand. A transport
/// that another client creates at the same time is not a failure.
#[test]
fn the_transport_is_made_when_it_is_missing() {
    for made in [
        Ok(json!(true)),
        Err(json!({ "code": -17, "message": "File exists" })),
    ] {
        let daemon = Fake::play(move |method, _| match method {
            "nvmf_get_transports" => Ok(json!([])),
            "nvmf_create_transport" => made.clone(),
            _ => Ok(json!(true)),
        });
        daemon
            .nacre(&format!("listener add {NQN} 127.0.0.1"))
            .printed();
        assert_eq!(
            daemon.asked()[1],
            ("nvmf_create_transport".into(), json!({ "trtype": "TCP" }))
        );
    }
    let daemon = Fake::play(move |method, _| match method {
        "nvmf_get_transports" => Ok(json!([])),
        _ => Err(json!({ "code": -95, "message": "Operation not supported" })),
    });
    let error = daemon
        .nacre(&format!("listener add {NQN} rdma://127.0.0.1"))
        .failed(4);
    assert_eq!(
        error,
        "error: nvmf_create_transport: Operation not supported (code -95)"
    );
}

#[test]
fn hosts_are_allowed_and_refused() {
    let daemon = daemon();
    let list = daemon.nacre("host list").printed();
    assert_eq!(
        cells(&list),
        [vec![NQN, "nqn.host-a"], vec![NQN, "nqn.host-b", "dhchap"]]
    );
    assert_eq!(
        daemon.nacre("host list --json").json()[0]["hosts"][0]["nqn"],
        "nqn.host-a"
    );
    daemon.asked();
    for (words, method, params) in [
        (
            "allow S H",
            "nvmf_subsystem_add_host",
            json!({ "nqn": "S", "host": "H" }),
        ),
        (
            "allow S H --dhchap-key k",
            "nvmf_subsystem_add_host",
            json!({ "nqn": "S", "host": "H", "dhchap_key": "k" }),
        ),
        (
            "allow S H --nsid 3",
            "nvmf_ns_add_host",
            json!({ "nqn": "S", "nsid": 3, "host": "H" }),
        ),
        (
            "remove S H",
            "nvmf_subsystem_remove_host",
            json!({ "nqn": "S", "host": "H" }),
        ),
        (
            "remove S H --nsid 3",
            "nvmf_ns_remove_host",
            json!({ "nqn": "S", "nsid": 3, "host": "H" }),
        ),
        (
            "allow-any S",
            "nvmf_subsystem_allow_any_host",
            json!({ "nqn": "S", "allow_any_host": true }),
        ),
        (
            "allow-any S --off",
            "nvmf_subsystem_allow_any_host",
            json!({ "nqn": "S", "allow_any_host": false }),
        ),
    ] {
        assert_eq!(daemon.nacre(&format!("host {words}")).printed(), "");
        assert_eq!(daemon.asked(), [(method.to_owned(), params)], "{words}");
    }
}
