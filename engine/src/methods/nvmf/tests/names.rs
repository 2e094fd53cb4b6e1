//! Goal: the unique name of the discovery subsystem and the ids of static controllers. Both are set
//! by RPC and by the configuration file, and are the same after a restart.

use std::path::Path;

use nacre_nvmf::host::{ControllerId, HostOptions};
use nacre_nvmf_wire::Nqn;
use serde_json::{Value, json};

use super::super::super::testing::{TestDaemon, test_daemon};
use super::connected::connect_as;
use super::{DISCOVERY, HOST, NQN, durable, get, listen, subsystem};
use crate::config::{Settings, load_text};
use crate::store::Store;

const NAMED: &str = "nqn.2026-01.org.example:discovery";

fn settings(text: &str) -> Settings {
    load_text(Some(("nacre.toml", text)), [], &[])
        .unwrap_or_else(|e| panic!("{e}"))
        .settings
}

fn configured(dir: &Path, name: &str) -> TestDaemon {
    let text = format!("[nvmf]\ndiscovery_nqn = \"{name}\"\n");
    TestDaemon::with(settings(&text), Some(Store::open(dir).unwrap()))
}

fn unique(daemon: &TestDaemon) -> Value {
    let discovery = get(daemon, DISCOVERY);
    assert_eq!(discovery["nqn"], DISCOVERY, "the well-known name");
    discovery["unique_nqn"].clone()
}

fn set(daemon: &TestDaemon, params: Value) {
    assert_eq!(daemon.call("nvmf_discovery_set_nqn", params), true);
}

#[test]
fn discovery_has_a_unique_name_if_it_can_be_stored() {
    assert_eq!(unique(&test_daemon()), Value::Null);
    assert_eq!(unique(&TestDaemon::nvmf_tgt()), Value::Null, "as in SPDK");

    let (one, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let kept = unique(&durable(one.path()));
    // SPDK hosts recognise a discovery subsystem by this prefix.
    assert!(kept.as_str().unwrap().starts_with(DISCOVERY), "{kept}");
    assert_eq!(unique(&durable(one.path())), kept, "after a restart");
    assert_ne!(unique(&durable(other.path())), kept);

    assert_eq!(unique(&configured(one.path(), "well-known")), Value::Null);
    assert_eq!(unique(&configured(one.path(), DISCOVERY)), Value::Null);
    assert_eq!(unique(&configured(one.path(), NAMED)), NAMED);
    assert_eq!(unique(&configured(one.path(), "auto")), kept);

    std::fs::write(one.path().join("discoverynqn"), "nonsense\n").unwrap();
    let daemon = durable(one.path());
    assert_eq!(unique(&daemon), Value::Null, "logged; the start continues");
}

#[test]
fn the_unique_name_can_be_set_and_removed() {
    let dir = tempfile::tempdir().unwrap();
    let kept = {
        let daemon = durable(dir.path());
        let kept = unique(&daemon);
        subsystem(&daemon, NQN);
        let nvmf = json!({ "name": "nvmf" });
        let config = daemon.call("framework_get_config", nvmf.clone());
        set(&daemon, json!({ "nqn": NAMED }));
        assert_eq!(unique(&daemon), NAMED);
        assert_eq!(get(&daemon, NAMED), get(&daemon, DISCOVERY));
        let saved = daemon.call("framework_get_config", nvmf.clone());
        let call = json!({ "method": "nvmf_discovery_set_nqn", "params": { "nqn": NAMED } });
        assert!(saved.as_array().unwrap().contains(&call), "{saved}");

        let create = json!({ "nqn": NAMED });
        let refused = daemon.refused("nvmf_create_subsystem", create);
        assert_eq!(
            refused.message,
            format!("Unable to create subsystem {NAMED}")
        );
        for (nqn, why) in [(NQN, "exists"), ("nqn", "nqn")] {
            let refused = daemon.refused("nvmf_discovery_set_nqn", json!({ "nqn": nqn }));
            let data = refused.data.unwrap();
            assert_eq!((refused.code, data.field.as_deref()), (-32602, Some("nqn")));
            assert!(data.cause.contains(why), "{}", data.cause);
        }
        assert_eq!(unique(&daemon), NAMED);
        set(&daemon, json!(null));
        assert_eq!(
            daemon.call("framework_get_config", nvmf),
            config,
            "unchanged"
        );
        assert_eq!(unique(&daemon), kept);
        set(&daemon, json!({ "nqn": NAMED }));
        kept
    };
    // A name set by RPC overrides the file.
    let daemon = configured(dir.path(), "well-known");
    assert_eq!(unique(&daemon), NAMED);
    set(&daemon, json!({ "nqn": DISCOVERY }));
    assert_eq!(unique(&daemon), Value::Null);
    drop(daemon);
    let daemon = durable(dir.path());
    assert_eq!(unique(&daemon), Value::Null);
    set(&daemon, json!(null));
    assert_eq!(unique(&daemon), kept);
}

#[test]
fn invalid_names_in_the_file_are_refused() {
    for (text, expected) in [
        (
            "[nvmf]\ndiscovery_nqn = \"unique\"\n".to_owned(),
            "write \"auto\", \"well-known\" or an NQN",
        ),
        (
            format!("[nvmf]\ndiscovery_nqn = \"{NQN}\"\n[[nvmf.subsystem]]\nnqn = \"{NQN}\"\n"),
            "is the name of the discovery service",
        ),
        (
            format!("[[nvmf.subsystem]]\nnqn = \"{NQN}\"\nmin_cntlid = 9\nmax_cntlid = 8\n"),
            "9 is more than max_cntlid (8)",
        ),
    ] {
        let refused = load_text(Some(("nacre.toml", &text)), [], &[]).unwrap_err();
        assert!(refused.to_string().contains(expected), "{text}: {refused}");
    }
}

/// Goal: a referral by the unique name of a discovery subsystem is listed as type discovery.
#[test]
fn a_referral_by_unique_name_is_a_discovery_referral() {
    let dir = tempfile::tempdir().unwrap();
    let address = json!({ "trtype": "tcp", "traddr": "192.0.2.9", "trsvcid": "8009" });
    let listed = {
        let daemon = durable(dir.path());
        let add = |nqn: &str, discovery: bool| {
            let params = json!({ "address": address, "subnqn": nqn, "discovery": discovery });
            daemon.call("nvmf_discovery_add_referral", params);
        };
        add(NAMED, true);
        add(NQN, false);
        add(DISCOVERY, true);
        daemon.call("nvmf_discovery_get_referrals", json!(null))
    };
    let flags: Vec<Value> = (0..3).map(|n| listed[n]["discovery"].clone()).collect();
    assert_eq!(flags, [json!(true), Value::Null, Value::Null]);
    let daemon = durable(dir.path());
    let after = daemon.call("nvmf_discovery_get_referrals", json!(null));
    assert_eq!(after, listed);
}

fn asking(controller: ControllerId) -> HostOptions {
    HostOptions {
        controller,
        ..HostOptions::new(Nqn::new(HOST).unwrap(), [7; 16], Nqn::new(NQN).unwrap())
    }
}

/// Goal: a host gets exactly the static controller that it asks for, before and after a restart.
#[test]
fn hosts_get_the_static_controller_they_ask_for() {
    let dir = tempfile::tempdir().unwrap();
    let check = |daemon: &TestDaemon, port: u16| {
        let shown = get(daemon, NQN);
        let ids = (&shown["min_cntlid"], &shown["max_cntlid"]);
        assert_eq!(ids, (&json!(3), &json!(5)));
        assert_eq!(shown["controller_model"], "static");
        let session = connect_as(port, asking(ControllerId::Static(4))).unwrap();
        assert_eq!(session.controller().link().state().cntlid, 4);
        let listed = daemon.call("nvmf_subsystem_get_controllers", json!({ "nqn": NQN }));
        assert_eq!(listed[0]["cntlid"], 4);
        for controller in [ControllerId::Dynamic, ControllerId::Static(6)] {
            let refused = connect_as(port, asking(controller)).err().unwrap();
            let message = refused.to_string();
            assert!(
                message.contains("invalid cntlid") && message.contains("--cntlid any"),
                "{message}"
            );
        }
        session.disconnect();
    };
    let port = {
        let daemon = durable(dir.path());
        let create = json!({
            "nqn": NQN, "allow_any_host": true, "controller_model": "static", "min_cntlid": 3, "max_cntlid": 5,
        });
        daemon.call("nvmf_create_subsystem", create);
        let port = listen(&daemon, NQN);
        check(&daemon, port);
        port
    };
    check(&durable(dir.path()), port);

    let refused = test_daemon().refused(
        "nvmf_create_subsystem",
        json!({ "nqn": NQN, "controller_model": "fixed" }),
    );
    assert_eq!(refused.code, -32602);
}

/// Goal: a subsystem with default controllers is described exactly as in SPDK.
#[test]
fn the_default_controller_model_is_not_listed() {
    let daemon = test_daemon();
    subsystem(&daemon, NQN);
    assert_eq!(get(&daemon, NQN).get("controller_model"), None);
    let saved = daemon.call("framework_get_config", json!({ "name": "nvmf" }));
    assert!(!saved.to_string().contains("controller_model"), "{saved}");
}

#[test]
fn the_file_declares_static_controllers() {
    let text = format!(
        "[[nvmf.subsystem]]\nnqn = \"{NQN}\"\ncontroller_model = \"static\"\nmin_cntlid = 7\nmax_cntlid = 9\n"
    );
    let daemon = TestDaemon::with(settings(&text), None);
    let shown = get(&daemon, NQN);
    assert_eq!(shown["controller_model"], "static");
    assert_eq!(
        (&shown["min_cntlid"], &shown["max_cntlid"]),
        (&json!(7), &json!(9))
    );
}
