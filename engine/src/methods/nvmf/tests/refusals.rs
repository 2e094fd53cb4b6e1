//! Goal: impossible requests are refused with SPDK's code and message; `data` names field and
//! cause.

use serde_json::{Value, json};

use super::super::super::testing::{TestDaemon, test_daemon};
use super::{DISCOVERY, HOST, NQN, address, listen, malloc, namespace, subsystem};

/// Checks code, message and field of a refusal, and that it has a cause.
#[track_caller]
fn check(daemon: &TestDaemon, method: &str, params: Value, code: i32, message: &str, field: &str) {
    let error = daemon.refused(method, params.clone());
    let facts = error
        .data
        .unwrap_or_else(|| panic!("{method} {params}: no facts"));
    assert_eq!(
        (
            error.code,
            error.message.as_str(),
            facts.field.as_deref().unwrap_or_default()
        ),
        (code, message, field),
        "{method} {params}: {facts}"
    );
    assert!(!facts.cause.is_empty(), "{method} {params}");
}

const INVALID: &str = "Invalid parameters";
const UNSUPPORTED: &str = "Operation not supported";

#[test]
fn transports() {
    let daemon = TestDaemon::nvmf_tgt();
    let with = |field: &str, value: Value| {
        let mut params = json!({ "trtype": "TCP" });
        params[field] = value;
        params
    };
    let make = "nvmf_create_transport";
    for kind in ["VFIOUSER", "FC", "pcie"] {
        let message = format!("Invalid transport type '{kind}'");
        check(
            &daemon,
            make,
            json!({ "trtype": kind }),
            -32602,
            &message,
            "trtype",
        );
    }
    for (field, value) in [
        ("max_queue_depth", json!(1)),
        ("max_queue_depth", json!(5000)),
        ("max_io_qpairs_per_ctrlr", json!(0)),
        ("max_aq_depth", json!(31)),
        ("max_io_size", json!(5000)),
        ("max_io_size", json!(64 << 20)),
        ("in_capsule_data_size", json!(100)),
        ("kas", json!(0)),
        ("trtype", json!(null)),
    ] {
        check(&daemon, make, with(field, value), -32602, INVALID, field);
    }
    for (field, value) in [
        ("dif_insert_or_strip", json!(true)),
        ("sock_priority", json!(3)),
        ("masked_oncs", json!(["nvmcmps"])),
        ("masked_fuses", json!(["all"])),
    ] {
        check(&daemon, make, with(field, value), -95, UNSUPPORTED, field);
    }
    let rdma = |field: &str, value: Value| {
        let mut params = json!({ "trtype": "rdma" });
        params[field] = value;
        params
    };
    for (field, value) in [
        ("in_capsule_data_size", json!(100)),
        ("max_io_size", json!(5000)),
        ("acceptor_backlog", json!(0)),
        ("num_cqe", json!(0)),
        ("max_srq_depth", json!("many")),
    ] {
        check(&daemon, make, rdma(field, value), -32602, INVALID, field);
    }
    let single = rdma("no_wr_batching", json!(true));
    check(&daemon, make, single, -95, UNSUPPORTED, "no_wr_batching");
    let elsewhere = "Unable to find a target.";
    check(
        &daemon,
        make,
        with("tgt_name", json!("other")),
        -32603,
        elsewhere,
        "tgt_name",
    );
    check(
        &daemon,
        "nvmf_get_transports",
        json!({ "trtype": "TCP" }),
        -19,
        "No such device",
        "trtype",
    );
    subsystem(&daemon, NQN);
    let listener = json!({ "nqn": NQN, "listen_address": address("0") });
    check(
        &daemon,
        "nvmf_subsystem_add_listener",
        listener,
        -32602,
        INVALID,
        "listen_address.trtype",
    );
    assert_eq!(daemon.call("nvmf_get_transports", json!(null)), json!([]));
}

#[test]
fn subsystems_and_hosts() {
    let daemon = test_daemon();
    subsystem(&daemon, NQN);
    let make = "nvmf_create_subsystem";
    let exists = format!("Unable to create subsystem {NQN}");
    check(&daemon, make, json!({ "nqn": NQN }), -32603, &exists, "nqn");
    let discovery = format!("Unable to create subsystem {DISCOVERY}");
    check(
        &daemon,
        make,
        json!({ "nqn": DISCOVERY }),
        -32603,
        &discovery,
        "nqn",
    );
    check(
        &daemon,
        make,
        json!({ "nqn": "cnode1" }),
        -32603,
        "Unable to create subsystem cnode1",
        "nqn",
    );
    let other = |field: &str, value: Value| {
        let mut params = json!({ "nqn": "nqn.2016-06.io.spdk:other" });
        params[field] = value;
        params
    };
    let range = "Invalid cntlid range [9-65535]";
    let cntlids =
        json!({ "nqn": "nqn.2016-06.io.spdk:other", "min_cntlid": 9, "max_cntlid": 65535 });
    check(&daemon, make, cntlids, -32602, range, "min_cntlid");
    for (field, value) in [
        ("serial_number", json!("123456789012345678901")),
        ("model_number", json!("käse")),
        ("max_namespaces", json!(65_537)),
        ("allow_anyhost", json!(true)),
    ] {
        check(&daemon, make, other(field, value), -32602, INVALID, field);
    }
    for (field, value) in [
        ("admin_label", json!("rack 7")),
        ("passthrough", json!(true)),
        ("enable_nssr", json!(true)),
        ("dmrsl", json!(8)),
        ("wzsl", json!(1)),
    ] {
        check(&daemon, make, other(field, value), -95, UNSUPPORTED, field);
    }
    let missing = "Subsystem with NQN 'nqn.2016-06.io.spdk:x' not found";
    let nqn = json!({ "nqn": "nqn.2016-06.io.spdk:x" });
    for method in [
        "nvmf_delete_subsystem",
        "nvmf_get_subsystems",
        "nvmf_subsystem_get_listeners",
        "nvmf_subsystem_get_controllers",
        "nvmf_subsystem_get_qpairs",
    ] {
        check(&daemon, method, nqn.clone(), -32602, missing, "nqn");
    }
    check(
        &daemon,
        "nvmf_delete_subsystem",
        json!({ "nqn": DISCOVERY }),
        -95,
        UNSUPPORTED,
        "nqn",
    );

    let add = "nvmf_subsystem_add_host";
    let host = |host: &str| json!({ "nqn": NQN, "host": host });
    daemon.call(add, host(HOST));
    check(&daemon, add, host(HOST), -32603, "Internal error", "host");
    // Some hosts use such names. They are refused only where a name is required.
    for name in [
        "me",
        "/var/lib/mount",
        "nqn.2014-08.org.nvmexpress:uuid:07e4a0a641d54bff96b28a173dcfb6b5",
    ] {
        assert_eq!(daemon.call(add, host(name)), true);
        assert_eq!(daemon.call("nvmf_subsystem_remove_host", host(name)), true);
    }
    for name in ["", "a\nb", &"x".repeat(224)] {
        check(&daemon, add, host(name), -32603, "Internal error", "host");
    }
    for (key, code, message) in [
        ("psk", -32603, "Internal error"),
        ("dhchap_key", -32602, "Invalid parameters"),
        ("dhchap_ctrlr_key", -32602, "Invalid parameters"),
    ] {
        let mut params = host("nqn.2016-06.io.spdk:h");
        params[key] = "key0".into();
        check(&daemon, add, params, code, message, key);
    }
    let stranger = host("nqn.2016-06.io.spdk:h");
    check(
        &daemon,
        "nvmf_subsystem_remove_host",
        stranger.clone(),
        -32603,
        "Internal error",
        "host",
    );
    check(
        &daemon,
        "nvmf_subsystem_set_keys",
        stranger,
        -22,
        "Invalid argument",
        "host",
    );
    assert_eq!(daemon.call("nvmf_subsystem_set_keys", host(HOST)), true);
    let any = json!({ "nqn": DISCOVERY, "allow_any_host": false });
    check(
        &daemon,
        "nvmf_subsystem_allow_any_host",
        any,
        -95,
        UNSUPPORTED,
        "nqn",
    );
}

#[test]
fn namespaces() {
    let daemon = test_daemon();
    subsystem(&daemon, NQN);
    malloc(&daemon, "m0", None);
    malloc(&daemon, "m1", None);
    assert_eq!(namespace(&daemon, NQN, "m0"), 1);
    let add = "nvmf_subsystem_add_ns";
    let on = |bdev: &str, field: &str, value: Value| {
        let mut namespace = json!({ "bdev_name": bdev });
        namespace[field] = value;
        json!({ "nqn": NQN, "namespace": namespace })
    };
    for (params, message, field) in [
        (on("x", "nsid", json!(0)), INVALID, "namespace.bdev_name"),
        (on("m0", "nsid", json!(2)), INVALID, "namespace.uuid"),
        (on("m1", "nsid", json!(1)), INVALID, "namespace.nsid"),
        (on("m1", "nsid", json!(33)), INVALID, "namespace.nsid"),
        (
            on("m1", "nguid", json!("00")),
            "Invalid nguid",
            "namespace.nguid",
        ),
        (
            on("m1", "eui64", json!("x")),
            "Invalid eui64",
            "namespace.eui64",
        ),
        (
            on("m1", "uuid", json!("00000000-0000-0000-0000-000000000000")),
            "Invalid uuid",
            "namespace.uuid",
        ),
        (on("m1", "uid", json!("00")), INVALID, "namespace.uid"),
    ] {
        check(&daemon, add, params, -32602, message, field);
    }
    check(
        &daemon,
        add,
        on("m1", "ptpl_file", json!("/")),
        -22,
        "Invalid argument",
        "namespace.ptpl_file",
    );
    // The same device under another UUID is another namespace.
    let again = on("m0", "uuid", json!("7b1d3f6e-52ab-4a0c-9a0e-0d9e6c1f2b3a"));
    assert_eq!(daemon.call(add, again), 2);

    let ns = |nsid: u32| json!({ "nqn": NQN, "nsid": nsid });
    check(
        &daemon,
        "nvmf_subsystem_remove_ns",
        ns(9),
        -32602,
        INVALID,
        "nsid",
    );
    let host = |nsid: u32| json!({ "nqn": NQN, "nsid": nsid, "host": HOST });
    for method in ["nvmf_ns_add_host", "nvmf_ns_remove_host"] {
        check(&daemon, method, host(1), -32602, INVALID, "nsid");
        check(&daemon, method, host(9), -32602, INVALID, "nsid");
    }
    let group = |anagrpid: u32| json!({ "nqn": NQN, "nsid": 1, "anagrpid": anagrpid });
    assert_eq!(
        daemon.call("nvmf_subsystem_set_ns_ana_group", group(1)),
        true
    );
    for (nsid, anagrpid, field) in [(1, 0, "anagrpid"), (1, 5000, "anagrpid"), (9, 1, "nsid")] {
        check(
            &daemon,
            "nvmf_subsystem_set_ns_ana_group",
            json!({ "nqn": NQN, "nsid": nsid, "anagrpid": anagrpid }),
            -32602,
            INVALID,
            field,
        );
    }
}

#[test]
fn listeners_and_discovery() {
    let daemon = test_daemon();
    subsystem(&daemon, NQN);
    let port = listen(&daemon, NQN);
    let add = "nvmf_subsystem_add_listener";
    let at = |field: &str, value: Value| {
        let mut params = json!({ "nqn": NQN, "listen_address": address("0") });
        match field.strip_prefix("listen_address.") {
            Some(inner) => params["listen_address"][inner] = value,
            None => params[field] = value,
        }
        params
    };
    for (params, field) in [
        (
            at("listen_address.trsvcid", json!(port.to_string())),
            "listen_address",
        ),
        (
            // No RDMA device has the address.
            at("listen_address.trtype", json!("rdma")),
            "listen_address",
        ),
        (
            at("listen_address.traddr", json!("localhost")),
            "listen_address.traddr",
        ),
        (
            at("listen_address.adrfam", json!("ipv6")),
            "listen_address.adrfam",
        ),
        // An address that no interface has (TEST-NET-1).
        (
            at("listen_address.traddr", json!("192.0.2.77")),
            "listen_address",
        ),
        (at("ana_state", json!("lost")), "ana_state"),
        // The subsystem does not report ANA states.
        (at("ana_state", json!("inaccessible")), "ana_state"),
        (
            at("options", json!({ "max_queue_depth": 1 })),
            "options.max_queue_depth",
        ),
        (
            at("options", json!({ "idle_timeout_s": 86_401 })),
            "options.idle_timeout_s",
        ),
        (
            at("options", json!({ "in_capsule_data_size": 7 })),
            "options.in_capsule_data_size",
        ),
    ] {
        check(&daemon, add, params, -32602, INVALID, field);
    }
    check(
        &daemon,
        add,
        at("sock_impl", json!("x")),
        -95,
        UNSUPPORTED,
        "sock_impl",
    );
    // The address is open without TLS, for another subsystem.
    let second = "nqn.2025-01.io.nacre:second";
    subsystem(&daemon, second);
    let shared = |field: &str, value: Value| {
        let mut params = json!({ "nqn": second, "listen_address": address(&port.to_string()) });
        params[field] = value;
        params
    };
    let refused_as = |params: Value, field: &str| {
        check(&daemon, add, params, -32602, INVALID, field);
    };
    refused_as(shared("sock_impl", json!("ssl")), "secure_channel");
    refused_as(shared("secure_channel", json!(true)), "secure_channel");
    let mut both = shared("secure_channel", json!(true));
    both["options"] = json!({ "tls": "allow" });
    refused_as(both, "options.tls");
    let other = json!({ "nqn": NQN, "listen_address": address("1") });
    check(
        &daemon,
        "nvmf_subsystem_remove_listener",
        other,
        -32602,
        INVALID,
        "listen_address",
    );
    let ana = |state: &str| json!({ "nqn": NQN, "listen_address": address(&port.to_string()), "ana_state": state });
    let set = "nvmf_subsystem_listener_set_ana_state";
    assert_eq!(daemon.call(set, ana("optimized")), true);
    check(
        &daemon,
        set,
        ana("non_optimized"),
        -32603,
        "error setting ANA state: -22",
        "ana_state",
    );

    let referral =
        json!({ "address": { "trtype": "tcp", "traddr": "192.0.2.9", "trsvcid": "8009" } });
    daemon.call("nvmf_discovery_add_referral", referral.clone());
    // Idempotent as in SPDK: configurations are loaded more than once.
    let add = "nvmf_discovery_add_referral";
    assert_eq!(daemon.call(add, referral.clone()), true);
    let all = daemon.call("nvmf_discovery_get_referrals", json!(null));
    assert_eq!(all.as_array().unwrap().len(), 1);
    let mut secure = referral.clone();
    secure["secure_channel"] = true.into();
    check(&daemon, add, secure, -17, "File exists", "secure_channel");
    let mut named = referral;
    named["subnqn"] = NQN.into();
    let unable = "Unable to remove a referral.";
    check(
        &daemon,
        "nvmf_discovery_remove_referral",
        named.clone(),
        -32603,
        unable,
        "address",
    );
    named["subnqn"] = "a\nb".into();
    check(
        &daemon,
        "nvmf_discovery_add_referral",
        named,
        -32602,
        "Invalid subsystem NQN",
        "subnqn",
    );
    for method in ["nvmf_publish_mdns_prr", "nvmf_stop_mdns_prr"] {
        check(&daemon, method, json!({}), -95, UNSUPPORTED, "");
    }
}

#[test]
fn targets() {
    let daemon = test_daemon();
    let make = |name: &str| json!({ "name": name, "max_subsystems": 4 });
    check(
        &daemon,
        "nvmf_create_target",
        make("nvmf_tgt"),
        -32602,
        "Target already exists.",
        "name",
    );
    let unable = "Unable to create the requested target.";
    check(
        &daemon,
        "nvmf_create_target",
        make("two"),
        -32603,
        unable,
        "name",
    );
    let none = "The specified target doesn't exist, cannot delete it.";
    check(
        &daemon,
        "nvmf_delete_target",
        json!({ "name": "two" }),
        -32602,
        none,
        "name",
    );
    check(
        &daemon,
        "nvmf_delete_target",
        json!({ "name": "nvmf_tgt" }),
        -95,
        UNSUPPORTED,
        "name",
    );
}

/// Goal: a change that cannot be stored is undone.
#[test]
fn a_store_that_fails_undoes_the_change() {
    struct FullStore(bool);
    impl crate::store::StateStore for FullStore {
        fn load(&mut self) -> Result<Vec<crate::store::Record>, crate::store::StoreError> {
            Ok(Vec::new())
        }
        fn commit(
            &mut self,
            change: &crate::store::Change,
        ) -> Result<(), crate::store::StoreError> {
            // The store is full from the first host record on.
            let hosts = |edit: &crate::store::Edit| matches!(edit, crate::store::Edit::Put(r) if r.method == "nvmf_subsystem_add_host");
            self.0 |= change.0.iter().any(hosts);
            if self.0 {
                Err(crate::store::StoreError::Gone)
            } else {
                Ok(())
            }
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let store = crate::store::Store::on(FullStore(false), dir.path());
    let daemon = TestDaemon::with(crate::config::Settings::default(), Some(store));
    malloc(&daemon, "m0", None);
    subsystem(&daemon, NQN);
    let port = listen(&daemon, NQN);
    let before = super::get(&daemon, NQN);
    for (method, params) in [
        (
            "nvmf_subsystem_add_host",
            json!({ "nqn": NQN, "host": HOST }),
        ),
        (
            "nvmf_subsystem_allow_any_host",
            json!({ "nqn": NQN, "allow_any_host": false }),
        ),
        (
            "nvmf_subsystem_add_ns",
            json!({ "nqn": NQN, "namespace": { "bdev_name": "m0" } }),
        ),
        (
            "nvmf_subsystem_add_listener",
            json!({ "nqn": NQN, "listen_address": address("0") }),
        ),
        (
            "nvmf_subsystem_remove_listener",
            json!({ "nqn": NQN, "listen_address": address(&port.to_string()) }),
        ),
        ("nvmf_delete_subsystem", json!({ "nqn": NQN })),
        (
            "nvmf_create_subsystem",
            json!({ "nqn": "nqn.2016-06.io.spdk:other" }),
        ),
    ] {
        assert_eq!(
            daemon.refused(method, params).message,
            "Internal error",
            "{method}"
        );
        assert_eq!(super::get(&daemon, NQN), before, "{method}");
    }
    let all = daemon.call("nvmf_get_subsystems", json!(null));
    assert_eq!(all.as_array().unwrap().len(), 2);
}

/// Goal: every method with a target name refuses another target's name and changes nothing. Method:
/// calls that would change a target that has one object of each kind.
#[test]
fn other_target_names_are_refused() {
    let daemon = TestDaemon::nvmf_tgt();
    daemon.call("nvmf_create_transport", json!({ "trtype": "TCP" }));
    daemon.call(
        "nvmf_create_subsystem",
        json!({ "nqn": NQN, "ana_reporting": true }),
    );
    let port = listen(&daemon, NQN).to_string();
    malloc(&daemon, "m", None);
    let hidden = json!({ "bdev_name": "m", "no_auto_visible": true });
    daemon.call(
        "nvmf_subsystem_add_ns",
        json!({ "nqn": NQN, "namespace": hidden }),
    );
    daemon.call(
        "nvmf_ns_add_host",
        json!({ "nqn": NQN, "nsid": 1, "host": HOST }),
    );
    daemon.call(
        "nvmf_subsystem_add_host",
        json!({ "nqn": NQN, "host": HOST }),
    );
    daemon.call(
        "nvmf_discovery_add_referral",
        json!({ "address": address("8009") }),
    );
    malloc(&daemon, "n", None);
    let good = json!({
        "nqn": NQN, "host": HOST, "nsid": 1, "anagrpid": 2, "ana_state": "inaccessible", "allow_any_host": true, "seconds": 5, "key": "k",
        "listen_address": address(&port), "address": address("8009"), "trtype": "RDMA",
        "namespace": { "bdev_name": "n" },
    });
    let state = || {
        let parts = [
            "config_export",
            "nvmf_get_subsystems",
            "nvmf_get_transports",
        ];
        parts.map(|method| daemon.call(method, json!(null)))
    };
    let before = state();
    let mut seen = 0;
    for entry in daemon.engine.registry.iter() {
        let schema = serde_json::to_value((entry.params_schema)()).unwrap();
        let takes = &schema["properties"];
        if takes.get("tgt_name").is_none() {
            continue;
        }
        seen += 1;
        let mut params = json!({ "tgt_name": "other" });
        for (field, value) in good.as_object().unwrap() {
            let required = schema["required"].as_array().into_iter().flatten();
            if required.clone().any(|name| name == field.as_str()) {
                params[field] = value.clone();
            }
        }
        let refused = daemon.refused(entry.name, params.clone());
        let field = refused.data.clone().and_then(|facts| facts.field);
        assert_eq!(
            field.as_deref(),
            Some("tgt_name"),
            "{} {params}: {refused}",
            entry.name
        );
        assert!(
            [-32602, -32603].contains(&refused.code),
            "{}: {refused}",
            entry.name
        );
        assert_eq!(state(), before, "{}", entry.name);
    }
    assert!(seen >= 25, "{seen} methods take a target's name");
}
