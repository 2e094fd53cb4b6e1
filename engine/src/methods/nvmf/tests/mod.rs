//! Goal: a target set up with SPDK's calls answers as SPDK does, and is the same after a restart.

mod ana;
mod connected;
mod declared;
mod failover;
mod names;
mod rdma;
mod refusals;
mod reservations;

use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

use super::super::testing::{TestDaemon, test_daemon};
use crate::config::Settings;
use crate::store::Store;

const NQN: &str = "nqn.2016-06.io.spdk:cnode1";
const HOST: &str = "nqn.2014-08.org.nvmexpress:uuid:5b2f9b3e-5d0f-4a8a-8a40-0d1f0c0a7d55";
const DISCOVERY: &str = "nqn.2014-08.org.nvmexpress.discovery";
const UUID: &str = "7b1d3f6e-52ab-4a0c-9a0e-0d9e6c1f2b3a";

/// Exactly the parameters that rpc.py sends for `nvmf_create_transport -t tcp`.
fn transport_of_rpc_py() -> Value {
    json!({
        "trtype": "tcp", "no_srq": false, "c2h_success": true, "zcopy": false,
        "dif_insert_or_strip": false, "no_wr_batching": false, "disable_mappable_bar0": false,
        "disable_adaptive_irq": false, "disable_shadow_doorbells": false,
        "disable_command_passthru": false,
    })
}

fn malloc(daemon: &TestDaemon, name: &str, uuid: Option<&str>) {
    let mut params = json!({ "name": name, "num_blocks": 2048, "block_size": 512 });
    if let Some(uuid) = uuid {
        params["uuid"] = uuid.into();
    }
    daemon.call("bdev_malloc_create", params);
}

fn subsystem(daemon: &TestDaemon, nqn: &str) {
    daemon.call(
        "nvmf_create_subsystem",
        json!({ "nqn": nqn, "allow_any_host": true }),
    );
}

/// Sends the parameters of rpc.py's `nvmf_subsystem_add_ns` and returns the NSID.
fn namespace(daemon: &TestDaemon, nqn: &str, bdev: &str) -> u64 {
    let namespace = json!({ "bdev_name": bdev, "no_auto_visible": false, "hide_metadata": false });
    let nsid = daemon.call(
        "nvmf_subsystem_add_ns",
        json!({ "nqn": nqn, "namespace": namespace }),
    );
    nsid.as_u64().unwrap()
}

fn address(port: &str) -> Value {
    json!({ "trtype": "tcp", "traddr": "127.0.0.1", "trsvcid": port })
}

/// Adds a listener on any free port and returns the port.
fn listen(daemon: &TestDaemon, nqn: &str) -> u16 {
    let before = ports(daemon, nqn);
    let params = json!({ "nqn": nqn, "secure_channel": false, "listen_address": address("0") });
    daemon.call("nvmf_subsystem_add_listener", params);
    let new = ports(daemon, nqn)
        .into_iter()
        .find(|p| !before.contains(p))
        .unwrap();
    new.parse().unwrap()
}

fn ports(daemon: &TestDaemon, nqn: &str) -> Vec<String> {
    let listeners = daemon.call("nvmf_subsystem_get_listeners", json!({ "nqn": nqn }));
    let port = |l: &Value| l["address"]["trsvcid"].as_str().unwrap().to_owned();
    listeners.as_array().unwrap().iter().map(port).collect()
}

/// Masks the port, which differs in each run.
fn masked(answer: Value, port: u16) -> Value {
    let text = answer
        .to_string()
        .replace(&format!("\"{port}\""), "\"[port]\"");
    serde_json::from_str(&text).unwrap()
}

fn get(daemon: &TestDaemon, nqn: &str) -> Value {
    daemon.call("nvmf_get_subsystems", json!({ "nqn": nqn }))[0].clone()
}

fn events(daemon: &TestDaemon, kind: &str) -> Vec<String> {
    let all = daemon.call("notify_get_notifications", json!(null));
    let of = all.as_array().unwrap().iter().filter(|e| e["type"] == kind);
    of.map(|e| e["ctx"].as_str().unwrap().to_owned()).collect()
}

/// Runs the management plane until `done`.
#[track_caller]
fn turn_until(daemon: &TestDaemon, what: &str, mut done: impl FnMut() -> bool) {
    for _ in 0..2000 {
        if done() {
            return;
        }
        daemon.run(async { tokio::time::sleep(Duration::from_millis(5)).await });
    }
    panic!("{what}: not within 10 seconds");
}

/// A daemon that stores its state in `dir`.
fn durable(dir: &Path) -> TestDaemon {
    TestDaemon::with(Settings::default(), Some(Store::open(dir).unwrap()))
}

#[test]
fn a_target_set_up_by_rpc_py_answers_as_spdk() {
    let daemon = TestDaemon::nvmf_tgt();
    assert_eq!(
        daemon.call("nvmf_create_transport", transport_of_rpc_py()),
        true
    );
    insta::assert_json_snapshot!(
        "transports",
        daemon.call("nvmf_get_transports", json!({ "trtype": "TCP" }))
    );
    malloc(&daemon, "Malloc0", Some(UUID));
    let made = json!({
        "nqn": NQN, "serial_number": "SPDK00000000000001", "allow_any_host": false, "ana_reporting": false,
        "max_namespaces": 8, "min_cntlid": 1, "max_cntlid": 65519, "passthrough": false, "enable_nssr": false,
    });
    assert_eq!(daemon.call("nvmf_create_subsystem", made), true);
    assert_eq!(namespace(&daemon, NQN, "Malloc0"), 1);
    let host = json!({ "nqn": NQN, "host": HOST });
    assert_eq!(daemon.call("nvmf_subsystem_add_host", host), true);
    let port = listen(&daemon, NQN);
    insta::assert_json_snapshot!(
        "subsystems",
        masked(daemon.call("nvmf_get_subsystems", json!(null)), port)
    );
    assert_eq!(
        daemon.call("nvmf_subsystem_get_listeners", json!({ "nqn": NQN })),
        json!([{ "address": {
            "trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": port.to_string(),
        }}])
    );
    insta::assert_json_snapshot!(
        "config",
        masked(
            daemon.call("framework_get_config", json!({ "name": "nvmf" })),
            port
        )
    );
    assert_eq!(
        daemon.call("nvmf_get_targets", json!(null)),
        json!(["nvmf_tgt"])
    );
}

#[test]
fn adding_a_listener_creates_its_transport() {
    let daemon = test_daemon();
    subsystem(&daemon, NQN);
    listen(&daemon, NQN);
    let transports = daemon.call("nvmf_get_transports", json!(null));
    assert_eq!(
        transports[0]["max_io_size"],
        daemon.engine.settings.nvmf.max_io_size
    );
    let again = daemon.refused("nvmf_create_transport", json!({ "trtype": "TCP" }));
    assert_eq!(
        (again.code, again.message.as_str()),
        (-32603, "Transport type 'TCP' already exists")
    );
    let serial = get(&daemon, NQN)["serial_number"].clone();
    assert_eq!(serial, super::derived_serial_number(NQN));
    assert_ne!(
        serial,
        super::derived_serial_number("nqn.2016-06.io.spdk:cnode2")
    );
}

/// Goal: a saved configuration creates its transports, even if the file's listeners of the loading
/// daemon already did.
#[test]
fn a_saved_configuration_accepts_a_transport_of_the_file() {
    let daemon = test_daemon();
    let make = "nvmf_create_transport";
    let tcp = json!({ "trtype": "TCP" });
    daemon.run(daemon.engine.declared_call(make, &tcp)).unwrap();
    let saved = daemon.call("nvmf_get_transports", json!(null))[0].take();
    assert_eq!(daemon.call(make, saved.clone()), true);
    assert_eq!(
        daemon.call("state_get", json!(null))["objects"][0]["kept_in"],
        "config"
    );
    let mut other = saved.clone();
    other["max_queue_depth"] = json!(64);
    let refused = daemon.refused(make, other);
    assert_eq!(refused.message, "Transport type 'TCP' already exists");
    let cause = refused.data.unwrap().cause;
    assert!(cause.ends_with("max_queue_depth is 128, not 64"), "{cause}");
}

#[test]
fn everything_is_restored_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let (before, config, port) = {
        let daemon = durable(dir.path());
        malloc(&daemon, "m0", None);
        malloc(&daemon, "m1", None);
        subsystem(&daemon, NQN);
        daemon.call(
            "nvmf_subsystem_allow_any_host",
            json!({ "nqn": NQN, "allow_any_host": false }),
        );
        daemon.call(
            "nvmf_subsystem_add_host",
            json!({ "nqn": NQN, "host": HOST }),
        );
        assert_eq!(namespace(&daemon, NQN, "m0"), 1);
        let hidden = json!({ "bdev_name": "m1", "nsid": 7, "eui64": "0011223344556677", "no_auto_visible": true });
        assert_eq!(
            daemon.call(
                "nvmf_subsystem_add_ns",
                json!({ "nqn": NQN, "namespace": hidden })
            ),
            7
        );
        daemon.call(
            "nvmf_ns_add_host",
            json!({ "nqn": NQN, "nsid": 7, "host": HOST }),
        );
        let referral = json!({ "address": { "trtype": "tcp", "traddr": "192.0.2.9", "trsvcid": "8009" }, "secure_channel": false });
        daemon.call("nvmf_discovery_add_referral", referral);
        let port = listen(&daemon, NQN);
        listen(&daemon, DISCOVERY);
        (
            daemon.call("nvmf_get_subsystems", json!(null)),
            daemon.call("framework_get_config", json!({ "name": "nvmf" })),
            port,
        )
    };
    assert_eq!(before[1]["allow_any_host"], false);
    assert_eq!(before[1]["namespaces"][1]["eui64"], "0011223344556677");

    let daemon = durable(dir.path());
    assert_eq!(daemon.call("nvmf_get_subsystems", json!(null)), before);
    assert_eq!(
        daemon.call("framework_get_config", json!({ "name": "nvmf" })),
        config
    );
    assert_eq!(ports(&daemon, NQN), [port.to_string()]);
    let referrals = daemon.call("nvmf_discovery_get_referrals", json!(null));
    assert_eq!(
        referrals,
        json!([{
            "address": { "trtype": "TCP", "adrfam": "IPv4", "traddr": "192.0.2.9", "trsvcid": "8009" },
            "secure_channel": false, "subnqn": DISCOVERY,
        }])
    );
    // Removed objects stay removed.
    daemon.call(
        "nvmf_discovery_remove_referral",
        json!({ "address": { "trtype": "tcp", "traddr": "192.0.2.9", "trsvcid": "8009" } }),
    );
    daemon.call(
        "nvmf_ns_remove_host",
        json!({ "nqn": NQN, "nsid": 7, "host": HOST }),
    );
    daemon.call("nvmf_subsystem_remove_ns", json!({ "nqn": NQN, "nsid": 7 }));
    daemon.call(
        "nvmf_subsystem_remove_host",
        json!({ "nqn": NQN, "host": HOST }),
    );
    daemon.call(
        "nvmf_subsystem_remove_listener",
        json!({ "nqn": NQN, "listen_address": address(&port.to_string()) }),
    );
    drop(daemon);
    let daemon = durable(dir.path());
    let after = get(&daemon, NQN);
    assert_eq!(
        (
            &after["hosts"],
            &after["listen_addresses"],
            after["namespaces"].as_array().unwrap().len()
        ),
        (&json!([]), &json!([]), 1)
    );
    assert_eq!(
        daemon.call("nvmf_discovery_get_referrals", json!(null)),
        json!([])
    );
    daemon.call("nvmf_delete_subsystem", json!({ "nqn": NQN }));
    let left: Vec<Value> = daemon.call("state_get", json!(null))["objects"]
        .as_array()
        .unwrap()
        .clone();
    let of_it = left
        .iter()
        .filter(|o| o["params"]["nqn"] == NQN)
        .collect::<Vec<_>>();
    assert_eq!(of_it, [] as [&Value; 0]);
}

#[test]
fn a_configuration_loads_into_an_empty_daemon() {
    let config = {
        let daemon = test_daemon();
        malloc(&daemon, "m0", None);
        subsystem(&daemon, NQN);
        namespace(&daemon, NQN, "m0");
        listen(&daemon, NQN);
        daemon.call("config_export", json!(null))
    };
    let daemon = TestDaemon::waiting();
    let calls = |daemon: &TestDaemon, startup: bool| {
        for part in config["subsystems"].as_array().unwrap() {
            for call in part["config"].as_array().unwrap() {
                let method = call["method"].as_str().unwrap();
                let early =
                    daemon.engine.registry.find(method).unwrap().when == crate::rpc::When::Startup;
                if early == startup {
                    daemon.call(method, call["params"].clone());
                }
            }
        }
    };
    calls(&daemon, true);
    daemon.call("framework_start_init", json!(null));
    calls(&daemon, false);
    assert_eq!(daemon.call("config_export", json!(null)), config);
}

#[test]
fn deleting_a_device_deletes_its_namespaces_and_records() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = durable(dir.path());
    malloc(&daemon, "m0", None);
    subsystem(&daemon, NQN);
    let hidden = json!({ "bdev_name": "m0", "no_auto_visible": true });
    daemon.call(
        "nvmf_subsystem_add_ns",
        json!({ "nqn": NQN, "namespace": hidden }),
    );
    daemon.call(
        "nvmf_ns_add_host",
        json!({ "nqn": NQN, "nsid": 1, "host": HOST }),
    );
    daemon.call("bdev_malloc_delete", json!({ "name": "m0" }));
    assert_eq!(get(&daemon, NQN)["namespaces"], json!([]));
    let gone = format!("{NQN}/1");
    assert_eq!(
        events(&daemon, "nvmf_namespace_change"),
        [gone.clone(), gone]
    );
    drop(daemon);
    let daemon = durable(dir.path());
    assert_eq!(daemon.engine.journal.waiting(), []);
    assert_eq!(get(&daemon, NQN)["namespaces"], json!([]));
}

/// Goal: a namespace whose device leaves without a removal, as a remote device does, returns with
/// it.
#[test]
fn a_namespace_comes_back_with_its_device() {
    let daemon = test_daemon();
    malloc(&daemon, "m0", Some(UUID));
    subsystem(&daemon, NQN);
    let hidden = json!({ "bdev_name": "m0", "no_auto_visible": true });
    daemon.call(
        "nvmf_subsystem_add_ns",
        json!({ "nqn": NQN, "namespace": hidden }),
    );
    daemon.call(
        "nvmf_ns_add_host",
        json!({ "nqn": NQN, "nsid": 1, "host": HOST }),
    );
    let before = get(&daemon, NQN);
    let hot = nacre_bdev::Removal::Hot;
    drop(
        daemon
            .engine
            .plane()
            .unwrap()
            .bdevs
            .remove("m0", hot)
            .unwrap(),
    );
    turn_until(&daemon, "the namespace is removed", || {
        get(&daemon, NQN)["namespaces"] == json!([])
    });
    assert_eq!(daemon.engine.journal.waiting().len(), 2);

    // Its NSID stays reserved.
    malloc(&daemon, "other", None);
    let named = json!({ "bdev_name": "other", "nsid": 1 });
    let kept = daemon.refused(
        "nvmf_subsystem_add_ns",
        json!({ "nqn": NQN, "namespace": named }),
    );
    assert_eq!(kept.data.unwrap().field.unwrap(), "namespace.nsid");
    assert_eq!(namespace(&daemon, NQN, "other"), 2);
    daemon.call("nvmf_subsystem_remove_ns", json!({ "nqn": NQN, "nsid": 2 }));

    malloc(&daemon, "m0", Some(UUID));
    assert_eq!(
        daemon.call("state_retry", json!(null)),
        json!({ "restored": 2, "failed": 0 })
    );
    assert_eq!(get(&daemon, NQN), before);
    assert_eq!(events(&daemon, "state_restored").len(), 2);
    let host = json!({ "nqn": NQN, "nsid": 1, "host": HOST });
    assert_eq!(
        daemon.call("nvmf_ns_remove_host", host),
        true,
        "the host sees the namespace"
    );
}

#[test]
fn objects_that_are_away_can_be_deleted() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = durable(dir.path());
    malloc(&daemon, "m0", None);
    subsystem(&daemon, NQN);
    namespace(&daemon, NQN, "m0");
    let port = listen(&daemon, NQN);
    let record = daemon.engine.journal.find("bdev/m0").unwrap().record;
    drop(daemon);
    // Another program holds the port, and the device does not return.
    let _taken = std::net::TcpListener::bind(("127.0.0.1", port)).unwrap();
    let store = Store::open(dir.path()).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap();
    runtime
        .block_on(store.commit(crate::store::Change::remove(record.key)))
        .unwrap();
    drop(store);
    let daemon = durable(dir.path());
    assert_eq!(daemon.engine.journal.waiting().len(), 2);
    daemon.call("nvmf_subsystem_remove_ns", json!({ "nqn": NQN, "nsid": 1 }));
    let listener = json!({ "nqn": NQN, "listen_address": address(&port.to_string()) });
    daemon.call("nvmf_subsystem_remove_listener", listener.clone());
    assert_eq!(daemon.engine.journal.waiting(), []);
    assert_eq!(
        daemon
            .refused("nvmf_subsystem_remove_listener", listener)
            .code,
        -32602
    );
}

/// Goal: journal keys of names with slashes do not collide.
#[test]
fn names_with_slashes_do_not_collide() {
    let daemon = test_daemon();
    let outer = format!("{NQN}/ns/1");
    subsystem(&daemon, NQN);
    subsystem(&daemon, &outer);
    malloc(&daemon, "m0", None);
    namespace(&daemon, NQN, "m0");
    daemon.call("nvmf_delete_subsystem", json!({ "nqn": NQN }));
    assert_eq!(get(&daemon, &outer)["nqn"], outer);
    let key = "nvmf/subsystem/nqn.2016-06.io.spdk:cnode1%2Fns%2F1";
    assert!(daemon.engine.journal.find(key).is_some());
    assert_eq!(
        daemon
            .engine
            .journal
            .find("nvmf/subsystem/nqn.2016-06.io.spdk:cnode1/ns/1"),
        None
    );
}

#[test]
fn start_up_options_are_applied() {
    let daemon = TestDaemon::waiting();
    let config = json!({
        "admin_cmd_passthru": { "identify_ctrlr": false }, "discovery_filters": ["svcid", "transport"],
        "dhchap_digests": ["sha256"], "dhchap_dhgroups": ["null"], "dup_host_policy": "allow",
    });
    assert_eq!(daemon.call("nvmf_set_config", config), true);
    assert_eq!(
        daemon.call("nvmf_set_max_subsystems", json!({ "max_subsystems": 1 })),
        true
    );
    let twice = daemon.refused("nvmf_set_max_subsystems", json!({ "max_subsystems": 2 }));
    assert_eq!(
        (twice.code, twice.message.as_str()),
        (-32603, "Must not call more than once")
    );
    assert_eq!(
        daemon.call("nvmf_set_crdt", json!({ "crdt1": 3, "crdt3": 9 })),
        true
    );
    for (params, field) in [
        (json!({ "poll_groups_mask": "0x1" }), "poll_groups_mask"),
        (
            json!({ "admin_cmd_passthru": { "nvme_mi": true } }),
            "admin_cmd_passthru.nvme_mi",
        ),
        (
            json!({ "dup_host_policy": "restrict_per_listener" }),
            "dup_host_policy",
        ),
        (
            json!({ "discovery_filter": "match_any,address" }),
            "discovery_filter",
        ),
        (
            json!({ "discovery_filters": ["port"] }),
            "discovery_filters[0]",
        ),
    ] {
        let refused = daemon.refused("nvmf_set_config", params);
        assert_eq!(refused.data.unwrap().field.as_deref(), Some(field));
    }
    daemon.call("framework_start_init", json!(null));
    let target = daemon.engine.plane().unwrap().target.config.clone();
    assert_eq!(
        (
            target.max_subsystems,
            target.command_retry_delay,
            target.discovery_same_transport,
            target.discovery_same_address,
            target.discovery_same_service,
        ),
        (1, [3, 0, 9], true, false, true)
    );
    subsystem(&daemon, NQN);
    let full = daemon.refused("nvmf_create_subsystem", json!({ "nqn": format!("{NQN}2") }));
    assert_eq!(full.code, -32603);
    assert_eq!(
        daemon.refused("nvmf_set_crdt", json!({ "crdt1": 1 })).code,
        -1
    );
    let saved = daemon.call("framework_get_config", json!({ "name": "nvmf" }));
    assert_eq!(
        saved[0]["params"]["discovery_filters"],
        json!(["transport", "svcid"])
    );
    assert_eq!(
        saved[2]["params"],
        json!({ "crdt1": 3, "crdt2": 0, "crdt3": 9 })
    );
}
