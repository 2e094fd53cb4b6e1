//! Goal: controllers are attached, stored and listed as requested; impossible requests are refused
//! with the reason. Method: a daemon on the test's thread, and a target on another thread.

mod commands;
mod declared;
mod discovery;
pub(crate) mod drive;
mod paths;
mod tls;

use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use serde_json::{Value, json};

use crate::config::Settings;
use crate::methods::testing::{TestDaemon, test_daemon};
use crate::store::Store;

pub(super) const NQN: &str = "nqn.2025-01.io.nacre:far";

/// Serves a RAM disk of `mib` MiB over TCP. Returns the address.
fn serve(daemon: &TestDaemon, name: &str, mib: u64) -> SocketAddr {
    daemon.call("nvmf_create_transport", json!({ "trtype": "TCP" }));
    let disk = json!({ "name": name, "block_size": 512, "num_blocks": mib << 11 });
    daemon.call("bdev_malloc_create", disk);
    let subsystem = json!({ "nqn": NQN, "allow_any_host": true });
    daemon.call("nvmf_create_subsystem", subsystem);
    let namespace = json!({ "nqn": NQN, "namespace": { "bdev_name": name } });
    daemon.call("nvmf_subsystem_add_ns", namespace);
    let at = json!({ "trtype": "TCP", "traddr": "127.0.0.1", "trsvcid": "0" });
    daemon.call(
        "nvmf_subsystem_add_listener",
        json!({ "nqn": NQN, "listen_address": at }),
    );
    let listeners = daemon.call("nvmf_subsystem_get_listeners", json!({ "nqn": NQN }));
    let port = listeners[0]["address"]["trsvcid"].as_str().unwrap();
    format!("127.0.0.1:{port}").parse().unwrap()
}

/// Starts a daemon that serves a RAM disk over TCP. Returns it and its address.
pub(super) fn target() -> (TestDaemon, SocketAddr) {
    let settings = Settings {
        nvmf: crate::config::settings::Nvmf {
            discovery_port: 0,
            ..Default::default()
        },
        ..Settings::default()
    };
    let far = TestDaemon::with(settings, None);
    let address = serve(&far, "ram", 4);
    (far, address)
}

/// Starts a daemon whose state and keys are in `folder`.
pub(super) fn start(folder: &Path) -> TestDaemon {
    let store = Store::open(&folder.join("state")).unwrap();
    TestDaemon::with(Settings::default(), Some(store))
}

/// Writes each secret (name and text) to a file in `folder`, and adds it as a key to both daemons.
pub(super) fn add_keys(folder: &Path, secrets: &[(&str, &str)], daemons: [&TestDaemon; 2]) {
    for (name, text) in secrets {
        let path = folder.join(name);
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
        for daemon in daemons {
            let key = json!({ "name": name, "path": path });
            daemon.call("keyring_file_add_key", key);
        }
    }
}

/// The parameters of an attach call for the target at `address`.
pub(super) fn params(address: SocketAddr) -> Value {
    json!({
        "name": "there", "trtype": "TCP", "traddr": address.ip().to_string(),
        "trsvcid": address.port().to_string(), "subnqn": NQN,
        "hostnqn": "nqn.2025-01.io.nacre:near",
    })
}

/// Goal: a controller is attached with keys, and gets others while it is attached, also after a
/// restart. Method: the target changes what it demands, and each demand has to be met.
#[test]
fn keys() {
    const HOST: &str = "nqn.2025-01.io.nacre:near";
    const TEXTS: [(&str, &str); 2] = [
        (
            "own",
            "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:",
        ),
        (
            "other",
            "DHHC-1:00:ICEiIyQlJicoKSorLC0uLzAxMjM0NTY3ODk6Ozw9Pj/jBqb2:",
        ),
    ];
    let folder = tempfile::tempdir().unwrap();
    let (far, address) = target();
    let daemon = start(folder.path());
    add_keys(folder.path(), &TEXTS, [&far, &daemon]);
    let both = |own: Option<&str>, other: Option<&str>| {
        let all = [("dhchap_key", own), ("dhchap_ctrlr_key", other)];
        let given = all.into_iter().filter_map(|(k, v)| Some((k, v?)));
        given
            .map(|(k, v)| (k.to_owned(), json!(v)))
            .collect::<serde_json::Map<_, _>>()
    };
    let with = |mut params: Value, keys| {
        params.as_object_mut().unwrap().extend(keys);
        params
    };
    let host = json!({ "nqn": NQN, "host": HOST });
    let demand = |keys| far.call("nvmf_subsystem_set_keys", with(host.clone(), keys));
    far.call("nvmf_subsystem_add_host", host.clone());
    demand(both(Some("own"), Some("other")));
    let attach = "bdev_nvme_attach_controller";
    let refused = daemon.refused(attach, params(address));
    assert!(refused.to_string().contains("key"), "{refused}");
    daemon.call(
        attach,
        with(params(address), both(Some("own"), Some("other"))),
    );
    let set = "bdev_nvme_set_keys";
    let there = json!({ "name": "there" });
    // The target's demand is another one now.
    demand(both(Some("other"), None));
    let wrong = daemon.refused(set, with(there.clone(), both(Some("own"), None)));
    assert_eq!(wrong.code, -5);
    assert!(
        wrong.to_string().contains("authentication failed"),
        "{wrong}"
    );
    daemon.call(set, with(there.clone(), both(Some("other"), None)));
    let code = |keys| daemon.refused(set, with(there.clone(), keys)).code;
    assert_eq!(code(both(Some("none"), None)), -126);
    assert_eq!(code(both(None, Some("own"))), -22);
    let strange = daemon.refused(set, json!({ "name": "elsewhere" }));
    assert_eq!(strange.code, -19);
    let proved = || daemon.call("remote_get_paths", Value::Null)[0]["dhchap_key"].take();
    assert_eq!(proved(), "other");
    let metrics = far.call("metrics_get", json!({ "format": "text" }));
    let failed = "nacre_nvmf_authentication_failures_total{reason=\"wrong_key\"} 0";
    assert!(!metrics.as_str().unwrap().contains(failed), "{metrics}");
    // The target asks for nothing, and this host does not ask either, with a key and without.
    demand(both(None, None));
    daemon.call(set, with(there.clone(), both(Some("own"), None)));
    assert_eq!(proved(), Value::Null, "no proof of it");
    daemon.call(set, there.clone());
    demand(both(Some("own"), None));
    daemon.call(set, with(there.clone(), both(Some("own"), None)));
    assert_eq!(proved(), "own");
    drop(daemon);
    let daemon = start(folder.path());
    let until = std::time::Instant::now() + std::time::Duration::from_secs(20);
    while daemon.call("bdev_nvme_get_controllers", there.clone())[0]["ctrlrs"][0]["state"]
        != "enabled"
    {
        assert!(std::time::Instant::now() < until, "not attached again");
        daemon.run(tokio::time::sleep(std::time::Duration::from_millis(20)));
    }
    let config = daemon.call("framework_get_config", json!({ "name": "bdev" }));
    let calls = config.as_array().unwrap();
    let stored = calls.iter().find(|call| call["method"] == attach).unwrap();
    assert_eq!(stored["params"]["dhchap_key"], "own");
}

#[test]
fn attached_listed_and_detached() {
    let (_far, address) = target();
    let daemon = test_daemon();
    let names = daemon.call("bdev_nvme_attach_controller", params(address));
    assert_eq!(names, json!(["theren1"]));
    let device = daemon.call("bdev_get_bdevs", json!({ "name": "theren1" }))[0].take();
    assert_eq!(
        (&device["product_name"], &device["num_blocks"]),
        (&json!("NVMe disk"), &json!(8192))
    );
    let trid = &device["driver_specific"]["nvme"][0]["trid"];
    let port = address.port().to_string();
    let expected = json!({
        "trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": port, "subnqn": NQN,
    });
    assert_eq!(*trid, expected);

    let shown = daemon.call("bdev_nvme_get_controllers", json!({ "name": "there" }));
    let controller = &shown[0]["ctrlrs"][0];
    assert_eq!(
        (&shown[0]["name"], &controller["state"]),
        (&json!("there"), &json!("enabled"))
    );
    assert_eq!(controller["trid"], expected);
    assert_eq!(
        controller["host"],
        json!({ "nqn": "nqn.2025-01.io.nacre:near", "addr": "", "svcid": "", "no_shn_notification": false })
    );
    assert_eq!(controller["bdevs"], json!(["theren1"]));
    assert_eq!(
        (&controller["connects"], &controller["losses"]),
        (&json!(1), &json!(0))
    );
    assert!(controller.get("error").is_none());

    let again = daemon.refused("bdev_nvme_attach_controller", params(address));
    assert_eq!(again.code, -114);
    // The same namespace under another name is the same device.
    let mut other = params(address);
    other["name"] = json!("again");
    let refused = daemon.refused("bdev_nvme_attach_controller", other);
    assert_eq!(refused.code, -17);
    assert!(refused.data.unwrap().cause.contains("theren1"));
    assert_eq!(
        daemon
            .call("bdev_nvme_get_controllers", Value::Null)
            .as_array()
            .unwrap()
            .len(),
        1
    );

    assert_eq!(
        daemon.call("bdev_nvme_reset_controller", json!({ "name": "there" })),
        true
    );
    let shown = daemon.call("bdev_nvme_get_controllers", Value::Null);
    let controller = &shown[0]["ctrlrs"][0];
    assert_eq!(controller["connects"], json!(2));
    assert!(controller["losses"].as_u64().unwrap() >= 1);

    // It is part of the saved configuration, and stacked devices are deleted with it.
    let on = json!({ "name": "PT0", "base_bdev_name": "theren1" });
    daemon.call("bdev_passthru_create", on);
    let config = daemon.call("framework_get_config", json!({ "name": "bdev" }));
    let methods: Vec<&str> = config
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|c| c["method"].as_str())
        .collect();
    let at = |name: &str| methods.iter().position(|method| *method == name);
    assert!(at("bdev_nvme_attach_controller").unwrap() < at("bdev_passthru_create").unwrap());
    let wrong = json!({ "name": "there", "traddr": "192.0.2.1" });
    assert_eq!(
        daemon.refused("bdev_nvme_detach_controller", wrong).code,
        -19
    );
    let right = json!({ "name": "there", "trtype": "tcp", "traddr": "127.0.0.1", "subnqn": NQN });
    assert_eq!(daemon.call("bdev_nvme_detach_controller", right), true);
    assert_eq!(daemon.call("bdev_get_bdevs", Value::Null), json!([]));
    assert_eq!(
        daemon.call("bdev_nvme_get_controllers", Value::Null),
        json!([])
    );
    let gone = json!({ "name": "there" });
    for (method, code) in [
        ("bdev_nvme_detach_controller", -19),
        ("bdev_nvme_reset_controller", -19),
        ("bdev_nvme_get_controllers", -22),
    ] {
        assert_eq!(daemon.refused(method, gone.clone()).code, code, "{method}");
    }
    let notes = daemon.call("notify_get_notifications", Value::Null);
    let kinds: Vec<&str> = notes
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|n| n["type"].as_str())
        .collect();
    assert!(
        kinds.contains(&"remote_connected") && kinds.contains(&"remote_lost"),
        "{kinds:?}"
    );
}

/// Goal: a slow reset blocks only its own call; detaching the controller ends the reset.
#[test]
fn a_slow_reset_blocks_only_its_own_call() {
    let (far, address) = target();
    let daemon = test_daemon();
    daemon.call("bdev_nvme_attach_controller", params(address));
    drop(far);
    // A listener that accepts connections and never answers.
    let end = std::time::Instant::now() + std::time::Duration::from_secs(30);
    let _silent = loop {
        match std::net::TcpListener::bind(address) {
            Ok(silent) => break silent,
            // The daemon's threads close the port asynchronously.
            Err(error) => assert!(std::time::Instant::now() < end, "{error}"),
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    };
    let call = async |method: &str, params: Value| {
        let raw = serde_json::value::to_raw_value(&params).unwrap();
        daemon.engine.call(method, Some(&raw)).await
    };
    let there = json!({ "name": "there" });
    let disk = json!({ "name": "M", "block_size": 512, "num_blocks": 64 });
    let (reset, ()) = daemon.run(async {
        let changes = async {
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
            call("bdev_malloc_create", disk).await.unwrap();
            call("bdev_nvme_detach_controller", there.clone())
                .await
                .unwrap();
        };
        tokio::join!(call("bdev_nvme_reset_controller", there.clone()), changes)
    });
    // Ends neither after the full 20 s nor with the error of the connection.
    let refused = reset.unwrap_err();
    assert_eq!(refused.code, -19, "{refused}");
}

#[test]
fn metrics() {
    let (_far, address) = target();
    let daemon = test_daemon();
    daemon.call("bdev_nvme_attach_controller", params(address));
    let all = daemon.call("metrics_get", Value::Null).to_string();
    for part in [
        "nacre_remote_state",
        "nacre_remote_losses",
        "nacre_remote_devices",
    ] {
        assert!(all.contains(part), "{part}");
    }
    daemon.call("bdev_nvme_detach_controller", json!({ "name": "there" }));
}

/// Goal: a controller that cannot be connected leaves nothing behind.
#[test]
fn a_refused_controller_leaves_nothing_behind() {
    let (far, address) = target();
    let daemon = test_daemon();
    let mut unreachable = params(address);
    unreachable["trsvcid"] = json!("1");
    let refused = daemon.refused("bdev_nvme_attach_controller", unreachable);
    assert_eq!(refused.code, -5);
    let facts = refused.data.unwrap();
    assert!(facts.cause.contains("onnection refused"), "{facts}");
    let mut unknown = params(address);
    unknown["subnqn"] = json!("nqn.2025-01.io.nacre:other");
    let facts = daemon
        .refused("bdev_nvme_attach_controller", unknown)
        .data
        .unwrap();
    assert!(
        facts.cause.contains("nqn.2025-01.io.nacre:other"),
        "{facts}"
    );
    far.call(
        "nvmf_subsystem_allow_any_host",
        json!({ "nqn": NQN, "allow_any_host": false }),
    );
    daemon.refused("bdev_nvme_attach_controller", params(address));
    assert_eq!(
        daemon.call("bdev_nvme_get_controllers", Value::Null),
        json!([])
    );
    let state = daemon.call("state_get", Value::Null);
    assert_eq!(state["objects"], json!([]));
}

#[test]
fn impossible_requests_are_refused() {
    let daemon = test_daemon();
    let base = params("127.0.0.1:1".parse().unwrap());
    for (field, value, code, says) in [
        ("trtype", json!("FC"), -19, "not a transport type"),
        ("name", json!(""), -32602, "a name of 1 to 200 characters"),
        ("trsvcid", json!("0"), -32602, "not a port"),
        ("subnqn", json!(""), -32602, "no subsystem is named"),
        ("subnqn", json!("a\nb"), -32602, "control character"),
        ("hostnqn", json!("x".repeat(224)), -32602, "at most 223"),
        ("adrfam", json!("IPv6"), -22, "is an IPv4 address"),
        (
            "hostaddr",
            json!("::1"),
            -32602,
            "is not an IPv4 address, as the target's is",
        ),
        ("hostaddr", json!("eth0"), -32602, "not an IP address"),
        ("nsid", json!(0), -32602, "not a namespace identifier"),
        ("psk", json!("key0"), -126, "no key"),
        ("dhchap_key", json!("key0"), -126, "no key"),
        ("dhchap_ctrlr_key", json!("key0"), -126, "no key"),
        ("prchk_guard", json!(true), -95, "no metadata"),
        (
            "fallback",
            json!("tcp"),
            -32602,
            "TCP has nothing to fall back to",
        ),
        ("ctrlr_loss_timeout_sec", json!(-2), -22, "neither -1"),
        ("reconnect_delay_sec", json!(u64::MAX), -22, "is more than"),
        (
            "fast_io_fail_timeout_sec",
            json!(u64::MAX),
            -22,
            "is more than",
        ),
    ] {
        let mut params = base.clone();
        params[field] = value;
        let refused = daemon.refused("bdev_nvme_attach_controller", params);
        assert_eq!(refused.code, code, "{field}: {refused}");
        let facts = refused.data.unwrap();
        assert_eq!(facts.field.as_deref(), Some(field));
        assert!(facts.cause.contains(says), "{facts}");
    }
    let mut drive = base.clone();
    drive["trtype"] = json!("PCIe");
    let facts = daemon.refused("bdev_nvme_attach_controller", drive).data;
    assert_eq!(facts.unwrap().field.as_deref(), Some("trsvcid"));
    let mut both = base.clone();
    (both["nsid"], both["uuid"]) = (json!(1), json!("8c8f0a5d-7d1e-4c9f-9c53-5d3a3f8f0a11"));
    assert_eq!(
        daemon.refused("bdev_nvme_attach_controller", both).code,
        -32602
    );
    let mut unknown = base;
    unknown["hotplug"] = json!(true);
    assert_eq!(
        daemon.refused("bdev_nvme_attach_controller", unknown).code,
        -32603
    );
}

#[test]
fn options() {
    let daemon = test_daemon();
    let set = |options: Value| daemon.call("bdev_nvme_set_options", options);
    set(
        json!({ "ctrlr_loss_timeout_sec": 30, "reconnect_delay_sec": 2, "fast_io_fail_timeout_sec": 10 }),
    );
    // Options that SPDK's `rpc.py` adds to every call, and defaults that SPDK saves.
    set(json!({
        "delay_cmd_submit": true, "disable_auto_failback": false, "generate_uuids": false, "nvme_error_stat": false,
        "io_path_stat": false, "allow_accel_sequence": false, "enable_flush": false,
    }));
    set(json!({
        "io_queue_requests": 0, "dhchap_digests": ["sha256", "sha384"], "dhchap_dhgroups": ["null", "ffdhe2048"],
        "rdma_cm_event_timeout_ms": 0, "rdma_umr_per_io": false, "multipath_opts": { "policy": "active_passive" },
    }));
    // As in a configuration of SPDK.
    set(
        json!({ "keep_alive_timeout_ms": 10000, "delay_cmd_submit": true, "bdev_retry_count": 3, "action_on_timeout": "none" }),
    );
    let config = daemon.call("framework_get_config", json!({ "name": "bdev" }));
    let stored = config
        .as_array()
        .unwrap()
        .iter()
        .find(|c| c["method"] == "bdev_nvme_set_options");
    let kept = &stored.unwrap()["params"];
    assert_eq!(
        (
            &kept["ctrlr_loss_timeout_sec"],
            &kept["keep_alive_timeout_ms"]
        ),
        (&json!(30), &json!(10000))
    );
    for (options, field, says) in [
        (
            json!({ "reconnect_delay_sec": 31 }),
            "reconnect_delay_sec",
            "after ctrlr_loss_timeout_sec",
        ),
        (
            json!({ "fast_io_fail_timeout_sec": 31 }),
            "fast_io_fail_timeout_sec",
            "given up before",
        ),
        (
            json!({ "reconnect_delay_sec": 11 }),
            "reconnect_delay_sec",
            "before the first attempt",
        ),
        (
            json!({ "action_on_timeout": "none", "timeout_us": 2_000_000 }),
            "action_on_timeout",
            "ends with its connection",
        ),
        (
            json!({ "action_on_timeout": "reset", "timeout_us": 10 }),
            "timeout_us",
            "only slow",
        ),
        (
            json!({ "bdev_retry_count": -1 }),
            "bdev_retry_count",
            "sent again three times",
        ),
        (
            json!({ "arbitration_burst": 3 }),
            "arbitration_burst",
            "not weighed",
        ),
        (
            json!({ "dhchap_digests": "sha256" }),
            "dhchap_digests",
            "a list of sha256",
        ),
        (
            json!({ "dhchap_dhgroups": ["ffdhe1024"] }),
            "dhchap_dhgroups",
            "a list of null",
        ),
        (
            json!({ "enable_flush": "no" }),
            "enable_flush",
            "always reaches the target",
        ),
        (
            json!({ "io_queue_requests": 1 }),
            "io_queue_requests",
            "2..=1024",
        ),
        (
            json!({ "keep_alive_timeout_ms": 10 }),
            "keep_alive_timeout_ms",
            "500 or more",
        ),
        (
            json!({ "multipath_opts": { "policy": "active_active", "min_io": 0 } }),
            "multipath_opts.min_io",
            "at least one I/O",
        ),
        (json!({ "unheard_of": 1 }), "unheard_of", "no option"),
    ] {
        let refused = daemon.refused("bdev_nvme_set_options", options);
        let facts = refused.data.unwrap();
        assert_eq!(facts.field.as_deref(), Some(field), "{facts}");
        assert!(facts.cause.contains(says), "{facts}");
    }
    let (_far, address) = target();
    daemon.call("bdev_nvme_attach_controller", params(address));
    let remote = daemon.engine.remotes.find("there").unwrap();
    let path = remote.attachment.path();
    let used = &path.config().options;
    let seconds = std::time::Duration::from_secs;
    assert_eq!(
        (used.keep_alive, used.loss_timeout),
        (seconds(10), Some(seconds(30)))
    );
    assert_eq!(
        (used.reconnect_delay, used.fast_io_fail),
        (seconds(2), Some(seconds(10)))
    );
    daemon.call("bdev_nvme_detach_controller", json!({ "name": "there" }));
}

/// Goal: `AUTO` without RDMA on this machine uses TCP; RDMA without fallback reports the missing
/// part.
#[test]
fn the_transport_is_chosen_by_trtype() {
    let (_far, address) = target();
    let daemon = test_daemon();
    let mut auto = params(address);
    auto["trtype"] = json!("AUTO");
    assert_eq!(
        daemon.call("bdev_nvme_attach_controller", auto),
        json!(["theren1"])
    );
    daemon.call("bdev_nvme_detach_controller", json!({ "name": "there" }));
    let mut rdma = params(address);
    rdma["trtype"] = json!("RDMA");
    let refused = daemon.refused("bdev_nvme_attach_controller", rdma.clone());
    assert!(refused.data.unwrap().cause.contains("RDMA"));
    rdma["fallback"] = json!("tcp");
    assert_eq!(
        daemon.call("bdev_nvme_attach_controller", rdma),
        json!(["theren1"])
    );
    let shown = daemon.call("bdev_nvme_get_controllers", Value::Null);
    assert_eq!(shown[0]["ctrlrs"][0]["trid"]["trtype"], "TCP");
    daemon.call("bdev_nvme_detach_controller", json!({ "name": "there" }));
}

/// Goal: an RDMA connection attempt has the configured time limit; its error names the limit and
/// the stage.
#[test]
fn an_rdma_attempt_times_out() {
    use nacre_transport_rdma_verbs::sim::{ConnectFault, attributes};
    let mut settings = Settings::default();
    settings.nvmf.discovery_port = 0;
    settings.replication.cm_timeout_ms = 321;
    settings.replication.connection_retries = 2;
    settings.replication.retry_delay_ms = 10;
    let daemon = TestDaemon::with(settings, None);
    let (here, there) = ("192.0.2.10".parse().unwrap(), "192.0.2.99");
    daemon
        .fabric
        .add_device(attributes("sim_host"), &[here])
        .unwrap();
    let silent = Some(ConnectFault::Silent);
    daemon.fabric.fault_connects(there.parse().unwrap(), silent);
    let mut far = params((there.parse::<std::net::IpAddr>().unwrap(), 4420).into());
    far["trtype"] = json!("RDMA");
    far["hostaddr"] = json!("192.0.2.10");
    let refused = daemon.refused("bdev_nvme_attach_controller", far);
    let cause = refused.data.unwrap().cause;
    let timed_out = "RDMA connection timeout after 321ms (ADDR_RESOLVE)";
    assert!(cause.contains(timed_out), "{cause}");
}

/// Goal: source addresses are selected as for listeners; a selector without a match is refused.
#[test]
fn the_source_address_is_selected_by_interface() {
    let (_far, address) = target();
    let attach = |iface: &str| {
        let mut settings = Settings::default();
        settings.replication.iface = vec![iface.to_owned()];
        settings.nvmf.discovery_port = 0;
        let daemon = TestDaemon::with(settings, None);
        let outcome = daemon.try_call("bdev_nvme_attach_controller", params(address));
        if outcome.is_ok() {
            daemon.call("bdev_nvme_detach_controller", json!({ "name": "there" }));
        }
        outcome
    };
    assert_eq!(attach("subnet:127.0.0.0/8").unwrap(), json!(["theren1"]));
    let refused = attach("name:nowhere0").unwrap_err();
    assert_eq!(
        (refused.code, refused.data.clone().unwrap().field.as_deref()),
        (-19, Some("hostaddr"))
    );
    assert!(refused.data.unwrap().cause.contains("name:nowhere0"));
}

/// Goal: a target that accepts the connection and never answers delays only the caller. Other
/// changes proceed, the name stays reserved, and a detach ends the wait.
#[test]
fn a_silent_target_delays_only_the_caller() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let params = params(silent.local_addr().unwrap());
    let daemon = test_daemon();
    let engine = std::rc::Rc::clone(&daemon.engine);
    let call = move |method: &'static str, params: Value| {
        let (raw, engine) = (
            serde_json::value::to_raw_value(&params).unwrap(),
            engine.clone(),
        );
        async move { engine.call(method, Some(&raw)).await }
    };
    let refused = daemon.run(async {
        let attach = "bdev_nvme_attach_controller";
        let waits = tokio::task::spawn_local(call(attach, params.clone()));
        while daemon.engine.remotes.find("there").is_none() {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
        let began = std::time::Instant::now();
        let disk = json!({ "name": "ram", "block_size": 512, "num_blocks": 2048 });
        call("bdev_malloc_create", disk).await.unwrap();
        let taken = call(attach, params.clone()).await.unwrap_err();
        assert_eq!(taken.code, -114);
        let took = began.elapsed();
        assert!(!waits.is_finished(), "after {took:?}");
        assert!(took < super::CONNECT_TIMEOUT / 2, "{took:?}");
        call("bdev_nvme_detach_controller", json!({ "name": "there" }))
            .await
            .unwrap();
        waits.await.unwrap().unwrap_err()
    });
    assert_eq!(refused.code, -19, "{refused}");
    assert!(refused.data.unwrap().cause.contains("was detached before"));
    assert!(daemon.engine.remotes.find("there").is_none());
    assert!(
        daemon
            .engine
            .journal
            .find(&crate::services::nvme::key("there"))
            .is_none()
    );
    let (_far, address) = target();
    let there = self::params(address);
    assert_eq!(
        daemon.call("bdev_nvme_attach_controller", there),
        json!(["theren1"])
    );
    daemon.call("bdev_nvme_detach_controller", json!({ "name": "there" }));
}
