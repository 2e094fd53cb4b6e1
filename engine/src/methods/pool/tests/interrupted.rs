//! Goal: a pool whose disk may have lost unflushed writes is opened again by itself, and its users
//! return. Method: a pool on a namespace of another daemon, which is reset, and then killed and
//! started again.

use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{POOL, start};
use crate::config::Settings;
use crate::config::settings::Nvmf;
use crate::methods::testing::TestDaemon;

const FAR: &str = "nqn.2026-01.org.example:far";
const NEAR: &str = "nqn.2026-01.org.example:near";
const DISK: &str = "20000000-0000-4000-8000-000000000001";

/// A daemon that serves a file. Returns its address.
fn serve(file: &Path, port: &str) -> (TestDaemon, SocketAddr) {
    let settings = Settings {
        nvmf: Nvmf {
            discovery_port: 0,
            ..Default::default()
        },
        ..Settings::default()
    };
    let far = TestDaemon::with(settings, None);
    far.call("nvmf_create_transport", json!({ "trtype": "TCP" }));
    let disk = json!({ "name": "file", "filename": file, "block_size": 4096, "uuid": DISK });
    far.call("bdev_aio_create", disk);
    let subsystem = json!({ "nqn": FAR, "allow_any_host": true });
    far.call("nvmf_create_subsystem", subsystem);
    let namespace = json!({ "nqn": FAR, "namespace": { "bdev_name": "file" } });
    far.call("nvmf_subsystem_add_ns", namespace);
    let at = json!({ "trtype": "TCP", "traddr": "127.0.0.1", "trsvcid": port });
    let listener = json!({ "nqn": FAR, "listen_address": at });
    far.call("nvmf_subsystem_add_listener", listener);
    let listeners = far.call("nvmf_subsystem_get_listeners", json!({ "nqn": FAR }));
    let port = listeners[0]["address"]["trsvcid"].as_str().unwrap();
    let address = format!("127.0.0.1:{port}").parse().unwrap();
    (far, address)
}

fn count(daemon: &TestDaemon, kind: &str) -> usize {
    let events = daemon.call("events_get", json!({}));
    let events = events["events"].as_array().unwrap().iter();
    events.filter(|event| event["type"] == kind).count()
}

fn wait(daemon: &TestDaemon, missing: impl Fn() -> Vec<(bool, &'static str)>) {
    let end = Instant::now() + Duration::from_secs(60);
    while !missing().is_empty() {
        let state = daemon.call("state_get", Value::Null);
        let events = || daemon.call("events_get", json!({}));
        let is_late = Instant::now() > end;
        assert!(!is_late, "{:?}: {state:#} {:#}", missing(), events());
        daemon.run(async { tokio::time::sleep(Duration::from_millis(20)).await });
    }
}

#[test]
fn a_pool_is_opened_again_when_its_target_was_away() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(128 << 20).unwrap();
    let (far, address) = serve(&path, "0");
    let port = address.port().to_string();
    let daemon = start(&dir.path().join("state"));
    let attach = json!({
        "name": "there", "trtype": "TCP", "traddr": "127.0.0.1", "trsvcid": port,
        "subnqn": FAR, "hostnqn": NEAR,
    });
    daemon.call("bdev_nvme_attach_controller", attach);
    let create = json!({ "name": "pool0", "disk": "theren1", "uuid": POOL });
    daemon.call("pool_create", create);
    for name in ["shown", "under"] {
        let lvol = json!({ "pool": "pool0", "name": name, "size": "16MiB" });
        daemon.call("lvol_create", lvol);
    }
    daemon.call("nvmf_create_subsystem", json!({ "nqn": NEAR }));
    let namespace = json!({ "nqn": NEAR, "namespace": { "bdev_name": "pool0/shown" } });
    daemon.call("nvmf_subsystem_add_ns", namespace);
    let volume = json!({ "name": "v", "devices": ["pool0/under"] });
    daemon.call("volume_create", volume);

    let is_online = || {
        let list = daemon.call("pool_list", Value::Null);
        let pool = list.as_array().unwrap().first();
        pool.is_some_and(|pool| pool["state"] == "online")
    };
    // All that has not returned so often, after a while.
    let missing = |round: usize| {
        let shown = daemon.call("nvmf_get_subsystems", json!({ "nqn": NEAR }));
        let namespaces = shown[0]["namespaces"].as_array().unwrap().len();
        let volume = daemon.call("volume_get", json!({ "name": "v" }));
        let mut missing = vec![
            (is_online(), "pool"),
            (count(&daemon, "pool_import") == round, "import"),
            (namespaces == 1, "namespace"),
            (volume["state"] == "healthy", "volume"),
        ];
        missing.retain(|(is_back, _)| !is_back);
        missing
    };
    // The keeper finds out when the disk completes an I/O.
    let touch = || drop(daemon.try_call("pool_check", json!({ "pool": "pool0" })));
    daemon.call("bdev_nvme_reset_controller", json!({ "name": "there" }));
    touch();
    wait(&daemon, || missing(1));
    assert_eq!(count(&daemon, "pool_interrupted"), 1);

    drop(far);
    let (_far, _) = serve(&path, &port);
    touch();
    wait(&daemon, || missing(2));
    assert_eq!(count(&daemon, "pool_interrupted"), 2);
    let events = daemon.call("events_get", json!({})).to_string();
    assert!(
        events.contains("its disk theren1 lost its connection"),
        "{events}"
    );
    let check = daemon.call("pool_check", json!({ "pool": "pool0" }));
    assert_eq!(check["findings"], json!([]));
    daemon.call(
        "lvol_create",
        json!({ "pool": "pool0", "name": "new", "size": "1MiB" }),
    );
}
