//! Tests of discovery services: listed subsystems are attached, followed, restored and detached.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::paths_tests::listen;
use super::tests::{params, start, target};
use crate::methods::testing::TestDaemon;

const START: &str = "bdev_nvme_start_discovery";
const STOP: &str = "bdev_nvme_stop_discovery";
const INFO: &str = "bdev_nvme_get_discovery_info";

/// Runs the daemon until `done`.
fn wait(daemon: &TestDaemon, what: &str, done: impl Fn() -> bool) {
    let until = Instant::now() + Duration::from_secs(20);
    while !done() {
        let info = daemon.call(INFO, Value::Null);
        assert!(Instant::now() < until, "{what}: {info}");
        daemon.run(async { tokio::time::sleep(Duration::from_millis(20)).await });
    }
}

/// The ports of the paths of the first service, with the name of their controller.
fn paths(daemon: &TestDaemon) -> Vec<(String, String)> {
    let info = daemon.call(INFO, Value::Null);
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let path = |path: &Value| (text(&path["controller"]), text(&path["trid"]["trsvcid"]));
    let listed = info[0]["paths"].as_array().cloned().unwrap_or_default();
    listed.iter().map(path).collect()
}

fn bdevs(daemon: &TestDaemon) -> Vec<String> {
    let all = daemon.call("bdev_get_bdevs", Value::Null);
    let all = all.as_array().unwrap().iter();
    all.map(|bdev| bdev["name"].as_str().unwrap().to_owned())
        .collect()
}

/// Goal: a service's subsystem is attached over all of its paths; a path that comes or goes is
/// followed; the service and the names of its controllers are restored after a restart; the end of
/// the service detaches the controllers.
#[test]
fn a_service_is_followed() {
    let folder = tempfile::tempdir().unwrap();
    let (far, address) = target();
    let daemon = start(folder.path());
    let nqn = params(address)["subnqn"].as_str().unwrap().to_owned();
    let port = address.port().to_string();
    let service = json!({
        "name": "found", "trtype": "tcp", "traddr": "127.0.0.1", "adrfam": "ipv4", "trsvcid": port,
        "hostnqn": "nqn.2025-01.io.nacre:near", "wait_for_attach": true,
    });
    assert_eq!(daemon.call(START, service.clone()), json!(true));
    assert_eq!(bdevs(&daemon), ["found0n1"]);
    let first = ("found0".to_owned(), port.clone());
    assert_eq!(paths(&daemon), std::slice::from_ref(&first));
    let info = daemon.call(INFO, Value::Null);
    assert_eq!(info[0]["trid"]["trsvcid"], json!(port));
    assert_eq!(
        info[0]["trid"]["subnqn"],
        "nqn.2014-08.org.nvmexpress.discovery"
    );
    assert_eq!(info[0]["state"], "enabled");

    let with = |name: &str, trsvcid: &str, trtype: &str| {
        let mut other = service.clone();
        other["name"] = json!(name);
        other["trsvcid"] = json!(trsvcid);
        other["trtype"] = json!(trtype);
        other
    };
    for (other, code) in [
        (with("found", "1", "tcp"), -17),
        (with("other", &port, "tcp"), -17),
        (with("other", "1", "pcie"), -22),
        (with("other", "1", "fc"), -22),
    ] {
        assert_eq!(daemon.refused(START, other.clone()).code, code, "{other}");
    }
    assert_eq!(daemon.refused(STOP, json!({ "name": "other" })).code, -2);

    let second = listen(&far, &nqn);
    wait(&daemon, "a second path", || paths(&daemon).len() == 2);
    assert_eq!(paths(&daemon)[1], ("found0".to_owned(), second.to_string()));
    let connected = || {
        let shown = daemon.call("bdev_nvme_get_controllers", json!({ "name": "found0" }));
        let all = shown[0]["ctrlrs"].as_array().unwrap().clone();
        let live = all.iter().filter(|one| one["state"] == "enabled").count();
        (all.len(), live)
    };
    wait(&daemon, "both connected", || connected() == (2, 2));
    let at = json!({ "trtype": "TCP", "traddr": "127.0.0.1", "trsvcid": second.to_string() });
    far.call(
        "nvmf_subsystem_remove_listener",
        json!({ "nqn": nqn, "listen_address": at }),
    );
    wait(&daemon, "the path is gone", || connected() == (1, 1));
    assert_eq!(bdevs(&daemon), ["found0n1"]);

    drop(daemon);
    let daemon = start(folder.path());
    wait(&daemon, "restored", || bdevs(&daemon) == ["found0n1"]);
    assert_eq!(paths(&daemon), [first]);
    let config = daemon.call("framework_get_config", json!({ "name": "bdev" }));
    let calls = config.as_array().unwrap().iter();
    let calls: Vec<&str> = calls.map(|call| call["method"].as_str().unwrap()).collect();
    assert!(calls.contains(&START), "{calls:?}");
    assert!(!calls.contains(&"bdev_nvme_attach_controller"), "{calls:?}");
    assert_eq!(daemon.call(STOP, json!({ "name": "found" })), json!(true));
    assert_eq!(bdevs(&daemon), Vec::<String>::new());
    assert_eq!(daemon.call(INFO, Value::Null), json!([]));
    drop(daemon);
    let daemon = start(folder.path());
    assert_eq!(daemon.call(INFO, Value::Null), json!([]));
}

/// Goal: a call that waits gives up in time and leaves nothing; one that does not wait goes on
/// until the service is there.
#[test]
fn a_service_that_is_away() {
    let folder = tempfile::tempdir().unwrap();
    let (far, address) = target();
    let nqn = params(address)["subnqn"].as_str().unwrap().to_owned();
    let port = address.port().to_string();
    let at = json!({ "trtype": "TCP", "traddr": "127.0.0.1", "trsvcid": port });
    let listener = json!({ "nqn": nqn, "listen_address": at });
    far.call("nvmf_subsystem_remove_listener", listener.clone());
    let daemon = start(folder.path());
    let mut service = json!({
        "name": "found", "trtype": "TCP", "traddr": "127.0.0.1", "trsvcid": port,
        "hostnqn": "nqn.2025-01.io.nacre:near", "attach_timeout_ms": 200,
    });
    let refused = daemon.refused(START, service.clone());
    assert_eq!(refused.code, -110, "{refused}");
    assert_eq!(daemon.call(INFO, Value::Null), json!([]));

    service.as_object_mut().unwrap().remove("attach_timeout_ms");
    assert_eq!(daemon.call(START, service), json!(true));
    assert_eq!(daemon.call(INFO, Value::Null)[0]["paths"], json!([]));
    far.call("nvmf_subsystem_add_listener", listener);
    wait(&daemon, "attached at last", || {
        bdevs(&daemon) == ["found0n1"]
    });
}
