//! Tests of discovery services: listed subsystems are attached, followed, restored and detached.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::{Duration, Instant};

use futures_util::future::join;
use serde_json::value::to_raw_value;
use serde_json::{Value, json};

use super::super::discovery::attached;
use super::paths::listen;
use super::{NQN, add_keys, params, start, target};
use crate::methods::testing::TestDaemon;
use crate::services::nvme;
use crate::services::remotes::discovery::{DiscoveredPath, Discovery, SubsystemAddress};

const START: &str = "bdev_nvme_start_discovery";
const STOP: &str = "bdev_nvme_stop_discovery";
const INFO: &str = "bdev_nvme_get_discovery_info";

const ATTACH: &str = "bdev_nvme_attach_controller";
const DETACH: &str = "bdev_nvme_detach_controller";

/// The call that follows the service at `port`, and waits.
fn service(name: &str, port: u16) -> Value {
    json!({
        "name": name, "trtype": "tcp", "traddr": "127.0.0.1", "trsvcid": port.to_string(),
        "hostnqn": "nqn.2025-01.io.nacre:near", "wait_for_attach": true,
    })
}

/// Runs the daemon for a time.
fn pass(daemon: &TestDaemon, time: Duration) {
    daemon.run(async { tokio::time::sleep(time).await });
}

/// Adds a subsystem with a namespace of its own to the far daemon. Returns its listener.
fn another_subsystem(far: &TestDaemon, nqn: &str) -> Value {
    let disk = json!({ "name": "other", "block_size": 512, "num_blocks": 8192 });
    far.call("bdev_malloc_create", disk);
    let subsystem = json!({ "nqn": nqn, "allow_any_host": true });
    far.call("nvmf_create_subsystem", subsystem);
    let namespace = json!({ "nqn": nqn, "namespace": { "bdev_name": "other" } });
    far.call("nvmf_subsystem_add_ns", namespace);
    let port = listen(far, nqn).to_string();
    let at = json!({ "trtype": "TCP", "traddr": "127.0.0.1", "trsvcid": port });
    json!({ "nqn": nqn, "listen_address": at })
}

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

/// In the order of names: subsystems are attached at the same time, in any order.
fn bdevs(daemon: &TestDaemon) -> Vec<String> {
    let all = daemon.call("bdev_get_bdevs", Value::Null);
    let all = all.as_array().unwrap().iter();
    let names = all.map(|bdev| bdev["name"].as_str().unwrap().to_owned());
    let mut names: Vec<String> = names.collect();
    names.sort_unstable();
    names
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

/// Goal: a service that uses the names of another one keeps them after the other one was stopped
/// and the daemon was restarted.
#[test]
fn borrowed_names_are_stored() {
    let folder = tempfile::tempdir().unwrap();
    let (far, address) = target();
    let second = listen(&far, NQN);
    let daemon = start(folder.path());
    daemon.call(START, service("one", address.port()));
    daemon.call(START, service("two", second));
    assert_eq!(bdevs(&daemon), ["one0n1"]);
    daemon.call(STOP, json!({ "name": "one" }));
    assert_eq!(bdevs(&daemon), ["one0n1"], "the other service lists it");
    drop(daemon);
    let daemon = start(folder.path());
    wait(&daemon, "restored", || paths(&daemon).len() == 2);
    assert!(paths(&daemon).iter().all(|(name, _)| name == "one0"));
    // The name is not free for another subsystem.
    another_subsystem(&far, "nqn.2025-01.io.nacre:another");
    daemon.call(START, service("one", address.port()));
    let found = bdevs(&daemon);
    assert!(found.contains(&"one0n1".to_owned()), "{found:?}");
    assert_eq!(found.len(), 2, "{found:?}");
}

/// Goal: devices outlive a brief absence of their path from the log, and a long one removes them.
#[test]
fn a_path_has_grace() {
    let folder = tempfile::tempdir().unwrap();
    let (far, address) = target();
    let listener = another_subsystem(&far, "nqn.2025-01.io.nacre:another");
    let daemon = start(folder.path());
    daemon.call(START, service("found", address.port()));
    let both = ["found0n1", "found1n1"];
    assert_eq!(bdevs(&daemon), both);
    far.call("nvmf_subsystem_remove_listener", listener.clone());
    let removed = Instant::now();
    while removed.elapsed() < Duration::from_secs(2) {
        assert_eq!(bdevs(&daemon), both);
        pass(&daemon, Duration::from_millis(100));
    }
    far.call("nvmf_subsystem_add_listener", listener.clone());
    pass(&daemon, Duration::from_secs(5));
    assert_eq!(bdevs(&daemon), both, "the path is listed again");
    far.call("nvmf_subsystem_remove_listener", listener);
    wait(&daemon, "detached", || bdevs(&daemon).len() == 1);
}

/// Goal: a path that could not be attached is shown, and attached when the cause is gone.
#[test]
fn a_refused_path_is_tried_again() {
    let folder = tempfile::tempdir().unwrap();
    let (far, address) = target();
    let another = "nqn.2025-01.io.nacre:another";
    let listener = another_subsystem(&far, another);
    let daemon = start(folder.path());
    let mut other = params(address);
    other["subnqn"] = json!(another);
    other["trsvcid"] = listener["listen_address"]["trsvcid"].clone();
    daemon.call(ATTACH, other);
    let mut service = service("found", address.port());
    service["controllers"] = json!({ NQN: "there" });
    let refused = daemon.refused(START, service.clone());
    assert_eq!(refused.code, -5, "{refused}");
    service["wait_for_attach"] = json!(false);
    daemon.call(START, service);
    let refused = || daemon.call(INFO, Value::Null)[0]["refused"].clone();
    wait(&daemon, "refused", || refused() != json!([]));
    let why = refused()[0]["why"].to_string();
    assert!(why.contains("another subsystem"), "{why}");
    daemon.call(DETACH, json!({ "name": "there" }));
    wait(&daemon, "attached", || {
        bdevs(&daemon).contains(&"theren1".to_owned())
    });
    assert_eq!(refused(), json!([]));
}

/// Goal: a wait ends when each subsystem has a connection, and its devices are there then. Method:
/// the runtime stands still while a reactor connects, so that no other task makes the devices.
#[test]
fn a_wait_ends_with_the_devices() {
    let folder = tempfile::tempdir().unwrap();
    let (_far, address) = target();
    let daemon = start(folder.path());
    let place = |port: u16| SubsystemAddress {
        trtype: "TCP",
        adrfam: "IPv4",
        traddr: "127.0.0.1".into(),
        trsvcid: port.to_string(),
        subnqn: NQN.into(),
    };
    let discovery = Rc::new(Discovery::new("d".into(), place(1), BTreeMap::new()));
    let engine = &daemon.engine;
    daemon.run(async {
        for port in [1, address.port()] {
            let mut params = params(address);
            params["trsvcid"] = json!(port.to_string());
            let params = serde_json::from_value(params).unwrap();
            nvme::begin(engine, params).await.unwrap();
            let path = DiscoveredPath {
                name: "there".into(),
                place: place(port),
                missing_since: None,
            };
            discovery.listed.borrow_mut().push(path);
        }
        let remote = engine.remotes.find("there").unwrap();
        let until = Instant::now() + Duration::from_secs(10);
        let live = || remote.paths()[1].path.status().state == nacre_nvmf_remote::State::Live;
        while !live() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        discovery.is_complete.set(true);
        assert!(remote.attachment.devices().is_empty());
        let patience = Duration::from_secs(2);
        attached(engine, &discovery, patience).await.unwrap();
        assert_eq!(remote.attachment.devices().len(), 1);
    });
}

/// Goal: one of two calls that stop a service does, and a call that waits for it ends.
#[test]
fn a_service_is_stopped_once() {
    let folder = tempfile::tempdir().unwrap();
    let (_far, address) = target();
    let daemon = start(folder.path());
    daemon.call(START, service("found", address.port()));
    let name = to_raw_value(&json!({ "name": "found" })).unwrap();
    let stop = || daemon.engine.call(STOP, Some(&name));
    let (one, two) = daemon.run(join(stop(), stop()));
    let codes = [one, two].map(|ended| ended.map_or_else(|error| error.code, |_| 0));
    assert!(codes == [0, -114] || codes == [-114, 0], "{codes:?}");
    assert_eq!(bdevs(&daemon), Vec::<String>::new());

    let away = to_raw_value(&service("found", 1)).unwrap();
    let start = daemon.engine.call(START, Some(&away));
    // The lock of changes lets the call that begins first go first.
    let stop = daemon.engine.call(STOP, Some(&name));
    let begun = Instant::now();
    let (started, stopped) = daemon.run(join(start, stop));
    assert_eq!(started.unwrap_err().code, -19);
    stopped.unwrap();
    assert!(begun.elapsed() < Duration::from_secs(10));
    assert_eq!(daemon.call(INFO, Value::Null), json!([]));
}

/// Goal: the end of a service does not take the last copy of a volume, and leaves no record of its
/// devices.
#[test]
fn the_last_copy_stays() {
    let folder = tempfile::tempdir().unwrap();
    let (_far, address) = target();
    let daemon = start(folder.path());
    daemon.call(START, service("found", address.port()));
    let policy = json!({ "name": "found0n1", "policy": "active_active" });
    daemon.call("bdev_nvme_set_multipath_policy", policy);
    let ram = json!({ "name": "ram", "block_size": 512, "num_blocks": 8192 });
    daemon.call("bdev_malloc_create", ram);
    let volume = json!({ "name": "v", "devices": ["found0n1", "ram"], "force": true });
    daemon.call("volume_create", volume);
    daemon.call("bdev_malloc_delete", json!({ "name": "ram" }));
    let stop = json!({ "name": "found" });
    let refused = daemon.refused(STOP, stop.clone());
    assert_eq!(refused.code, -16, "{refused}");
    assert_eq!(daemon.call(INFO, Value::Null)[0]["state"], "enabled");
    daemon.call("volume_delete", json!({ "name": "v", "force": "v" }));
    daemon.call(STOP, stop);
    let state = daemon.call("state_get", Value::Null).to_string();
    assert!(!state.contains("found0n1"), "{state}");
}

/// Goal: the absence of a path from the log does not take the last copy of a volume either. The
/// path is detached when the volume has another copy, or is gone.
#[test]
fn the_last_copy_stays_without_its_path() {
    let folder = tempfile::tempdir().unwrap();
    let (far, address) = target();
    let listener = another_subsystem(&far, "nqn.2025-01.io.nacre:another");
    let daemon = start(folder.path());
    daemon.call(START, service("found", address.port()));
    // The services may list their subsystems in any order.
    let device_of = |nqn: &str| {
        let info = daemon.call(INFO, Value::Null);
        let paths = info[0]["paths"].as_array().unwrap().clone();
        let path = paths.iter().find(|path| path["trid"]["subnqn"] == nqn);
        format!("{}n1", path.unwrap()["controller"].as_str().unwrap())
    };
    let (stays, kept) = (device_of(NQN), device_of("nqn.2025-01.io.nacre:another"));
    let ram = json!({ "name": "ram", "block_size": 512, "num_blocks": 8192 });
    daemon.call("bdev_malloc_create", ram);
    let volume = json!({ "name": "v", "devices": [kept, "ram"], "force": true });
    daemon.call("volume_create", volume);
    daemon.call("bdev_malloc_delete", json!({ "name": "ram" }));
    far.call("nvmf_subsystem_remove_listener", listener);
    let refused = || daemon.call(INFO, Value::Null)[0]["refused"].clone();
    wait(&daemon, "kept", || refused() != json!([]));
    let why = refused()[0]["why"].to_string();
    assert!(why.contains("last good replica of volume"), "{why}");
    assert!(bdevs(&daemon).contains(&kept));
    daemon.call("volume_delete", json!({ "name": "v", "force": "v" }));
    wait(&daemon, "detached", || bdevs(&daemon) == [stays.clone()]);
    assert_eq!(refused(), json!([]));
}

/// Goal: a service does not take over a controller that a call attached, and its end leaves the
/// controller. Method: the service is told to use the name of the controller.
#[test]
fn a_controller_of_a_call_stays() {
    let folder = tempfile::tempdir().unwrap();
    let (far, address) = target();
    let daemon = start(folder.path());
    daemon.call(ATTACH, params(address));
    let second = listen(&far, NQN);
    let mut service = service("found", address.port());
    service["controllers"] = json!({ NQN: "there" });
    daemon.call(START, service);
    let paths_of = |daemon: &TestDaemon| {
        let shown = daemon.call("bdev_nvme_get_controllers", json!({ "name": "there" }));
        shown[0]["ctrlrs"].as_array().unwrap().len()
    };
    assert_eq!((paths(&daemon).len(), paths_of(&daemon)), (2, 2));
    assert!(
        paths(&daemon)
            .iter()
            .any(|(_, port)| *port == second.to_string())
    );
    daemon.call(STOP, json!({ "name": "found" }));
    assert_eq!(bdevs(&daemon), ["theren1"]);
    assert_eq!(paths_of(&daemon), 1);
}

/// Goal: another subsystem at the address of a path does not count as that path.
#[test]
fn two_subsystems_at_one_address() {
    let folder = tempfile::tempdir().unwrap();
    let (far, address) = target();
    let another = "nqn.2025-01.io.nacre:another";
    another_subsystem(&far, another);
    let at =
        json!({ "trtype": "TCP", "traddr": "127.0.0.1", "trsvcid": address.port().to_string() });
    let listener = json!({ "nqn": another, "listen_address": at });
    far.call("nvmf_subsystem_add_listener", listener);
    let daemon = start(folder.path());
    daemon.call(ATTACH, params(address));
    let mut service = service("found", address.port());
    service["controllers"] = json!({ another: "there" });
    service["wait_for_attach"] = json!(false);
    daemon.call(START, service);
    let info = || daemon.call(INFO, Value::Null)[0].clone();
    wait(&daemon, "refused", || info()["refused"] != json!([]));
    for refused in info()["refused"].as_array().unwrap() {
        assert_eq!(refused["trid"]["subnqn"], another, "{refused}");
    }
    for path in info()["paths"].as_array().unwrap() {
        assert_eq!(path["trid"]["subnqn"], NQN, "{path}");
    }
}

/// Goal: a controller that was detached by hand stays detached while the service tries to attach
/// another one again.
#[test]
fn a_detached_controller_stays_detached() {
    let folder = tempfile::tempdir().unwrap();
    let (far, address) = target();
    let another = "nqn.2025-01.io.nacre:another";
    let listener = another_subsystem(&far, another);
    let daemon = start(folder.path());
    let mut other = params(address);
    other["name"] = json!("taken");
    other["subnqn"] = json!(another);
    other["trsvcid"] = listener["listen_address"]["trsvcid"].clone();
    other["hostnqn"] = json!("nqn.2025-01.io.nacre:another-host");
    daemon.call(ATTACH, other);
    let mut service = service("found", address.port());
    service["controllers"] = json!({ NQN: "found0", another: "taken" });
    service["wait_for_attach"] = json!(false);
    daemon.call(START, service);
    wait(&daemon, "attached", || {
        bdevs(&daemon).contains(&"found0n1".to_owned())
    });
    let info = || daemon.call(INFO, Value::Null)[0].clone();
    wait(&daemon, "refused", || info()["refused"] != json!([]));
    daemon.call(DETACH, json!({ "name": "found0" }));
    pass(&daemon, Duration::from_secs(7));
    assert_eq!(bdevs(&daemon), ["takenn1"]);
    listen(&far, NQN);
    wait(&daemon, "attached again", || {
        bdevs(&daemon).contains(&"found0n1".to_owned())
    });
}

/// Goal: an idle service does not wake its thread. Method: the voluntary context switches of the
/// thread in two seconds, with and without a service.
#[test]
fn an_idle_service_sleeps() {
    let folder = tempfile::tempdir().unwrap();
    let (_far, address) = target();
    let daemon = start(folder.path());
    let switches = || {
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let line = status.lines().find(|line| line.starts_with("voluntary_"));
        let count = line.unwrap().split_whitespace().last().unwrap();
        count.parse::<u64>().unwrap()
    };
    let in_two_seconds = || {
        let before = switches();
        pass(&daemon, Duration::from_secs(2));
        switches() - before
    };
    let without = in_two_seconds();
    daemon.call(START, service("found", address.port()));
    pass(&daemon, Duration::from_secs(1));
    let with = in_two_seconds();
    assert!(with < without + 40, "{with} wake-ups instead of {without}");
}

/// Goal: a service is reached by TLS with a key of its own. Method: a target that has no listener
/// in clear; the listed controllers have no key.
#[test]
fn a_service_has_keys_of_its_own() {
    const TEXTS: [(&str, &str); 1] = [(
        "psk",
        "NVMeTLSkey-1:01:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:",
    )];
    let folder = tempfile::tempdir().unwrap();
    let (far, _plain) = target();
    let daemon = start(folder.path());
    add_keys(folder.path(), &TEXTS, [&far, &daemon]);
    let at = json!({ "trtype": "TCP", "traddr": "127.0.0.1", "trsvcid": "0" });
    let listener = json!({ "nqn": NQN, "listen_address": at, "secure_channel": true });
    far.call("nvmf_subsystem_add_listener", listener);
    let listeners = far.call("nvmf_subsystem_get_listeners", json!({ "nqn": NQN }));
    let is_secure = |listener: &&Value| listener["options"]["tls"] == "require";
    let secure = listeners.as_array().unwrap().iter().find(is_secure);
    let port = secure.unwrap()["address"]["trsvcid"].as_str().unwrap();
    let host = json!({ "nqn": NQN, "host": "nqn.2025-01.io.nacre:near", "psk": "psk" });
    far.call("nvmf_subsystem_add_host", host);
    let mut service = service("found", port.parse().unwrap());
    service["wait_for_attach"] = json!(false);
    daemon.call(START, service.clone());
    pass(&daemon, Duration::from_secs(2));
    let state = || daemon.call(INFO, Value::Null)[0]["state"].clone();
    assert_ne!(state(), "enabled");
    daemon.call(STOP, json!({ "name": "found" }));
    service["psk"] = json!("psk");
    daemon.call(START, service.clone());
    wait(&daemon, "connected", || state() == "enabled");
    let config = daemon.call("framework_get_config", json!({ "name": "bdev" }));
    assert!(config.to_string().contains("\"psk\":\"psk\""), "{config}");
}

/// Goal: each spelling of an address names the same path.
#[test]
fn spellings_of_an_address() {
    let folder = tempfile::tempdir().unwrap();
    let (_far, address) = target();
    let daemon = start(folder.path());
    let mut spelled = params(address);
    spelled["traddr"] = json!("::FFFF:127.0.0.1");
    spelled["trsvcid"] = json!(format!("0{}", address.port()));
    daemon.call(ATTACH, spelled.clone());
    assert_eq!(daemon.refused(ATTACH, params(address)).code, -114);
    let mut service = service("found", address.port());
    service["controllers"] = json!({ NQN: "there" });
    daemon.call(START, service.clone());
    assert_eq!(paths(&daemon).len(), 1);
    service["name"] = json!("again");
    service["traddr"] = json!("[::ffff:127.0.0.1]");
    assert_eq!(daemon.refused(START, service).code, -17);
    daemon.call(STOP, json!({ "name": "found" }));
    let detach = json!({ "name": "there", "traddr": "127.0.0.1", "trsvcid": spelled["trsvcid"] });
    daemon.call(DETACH, detach);
    assert_eq!(bdevs(&daemon), Vec::<String>::new());
}

/// Goal: a path that was detached by hand is not shown, and is attached again when the log changes
/// for its subsystem; keys of a discovered controller are refused with the reason.
#[test]
fn a_discovered_controller_and_other_calls() {
    let folder = tempfile::tempdir().unwrap();
    let (far, address) = target();
    let daemon = start(folder.path());
    daemon.call(START, service("found", address.port()));
    let keys = json!({ "name": "found0", "dhchap_key": "k" });
    let refused = daemon.refused("bdev_nvme_set_keys", keys);
    let cause = refused.to_string();
    assert!(cause.contains("discovery service \"found\""), "{cause}");
    daemon.call(DETACH, json!({ "name": "found0" }));
    assert_eq!(paths(&daemon), []);
    listen(&far, NQN);
    wait(&daemon, "attached again", || paths(&daemon).len() == 2);
    wait(&daemon, "a device", || bdevs(&daemon) == ["found0n1"]);
}
