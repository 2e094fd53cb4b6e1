//! Tests of controllers that the configuration file declares.

use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{NQN, target};
use crate::config::{Settings, load_text};
use crate::methods::testing::TestDaemon;
use crate::store::Store;

/// Goal: a declared controller waits for its target, authenticates itself by the name of a declared
/// key, and is not stored; objects declared on its device follow. Method: the target listens only
/// after the start of the daemon.
#[test]
fn a_declared_controller_waits_for_its_target() {
    const HOST: &str = "nqn.2025-01.io.nacre:near";
    const KEY: &str = "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";
    let folder = tempfile::tempdir().unwrap();
    let key = folder.path().join("key");
    std::fs::write(&key, KEY).unwrap();
    std::fs::set_permissions(&key, PermissionsExt::from_mode(0o600)).unwrap();
    let state = folder.path().join("state");
    let open = || Some(Store::open(&state).unwrap());
    let text = |port: u16| {
        format!(
            "[[key]]\nname = \"own\"\npath = {key:?}\n\
             [[remote]]\nname = \"there\"\naddress = \"tcp://127.0.0.1:{port}/{NQN}?hostnqn={HOST}\"\n\
             dhchap_key = \"own\"\nreconnect_delay_sec = 1\n\
             [[nvmf.subsystem]]\nnqn = \"nqn.2025-01.io.nacre:here\"\nnamespace = [{{ bdev = \"theren1\" }}]\n"
        )
    };
    let load = |text: &str| {
        let loaded = load_text(Some(("n.toml", text)), [], &[]).unwrap();
        loaded.settings
    };
    let namespaces = |daemon: &TestDaemon| {
        let all = daemon.call("nvmf_get_subsystems", Value::Null);
        let all = all.as_array().unwrap().iter();
        let mut ours = all.filter(|one| one["nqn"] == "nqn.2025-01.io.nacre:here");
        ours.next().unwrap()["namespaces"].clone()
    };
    // What `live` of the daemon does when a device appears.
    let served = |daemon: &TestDaemon| {
        let until = Instant::now() + Duration::from_secs(20);
        while daemon.call("bdev_get_bdevs", Value::Null) == json!([]) {
            assert!(Instant::now() < until, "the device does not appear");
            daemon.run(async { tokio::time::sleep(Duration::from_millis(20)).await });
        }
        daemon.run(daemon.engine.declared.make(&daemon.engine));
        assert_eq!(namespaces(daemon)[0]["bdev_name"], "theren1");
    };
    let (far, address) = target();
    far.call(
        "keyring_file_add_key",
        json!({ "name": "own", "path": key }),
    );
    let host = json!({ "nqn": NQN, "host": HOST, "dhchap_key": "own" });
    far.call("nvmf_subsystem_add_host", host);
    let at =
        json!({ "trtype": "TCP", "traddr": "127.0.0.1", "trsvcid": address.port().to_string() });
    let listener = json!({ "nqn": NQN, "listen_address": at });
    far.call("nvmf_subsystem_remove_listener", listener.clone());
    {
        let daemon = TestDaemon::with(load(&text(address.port())), open());
        assert_eq!(daemon.call("bdev_get_bdevs", Value::Null), json!([]));
        assert_eq!(namespaces(&daemon), json!([]));
        let missing = daemon.engine.declared.missing();
        let missing: Vec<&str> = missing.iter().map(|(call, _)| call.method).collect();
        assert_eq!(
            missing,
            ["nvmf_subsystem_add_ns"],
            "only the namespace waits"
        );

        far.call("nvmf_subsystem_add_listener", listener);
        served(&daemon);
        let objects = daemon.call("state_get", Value::Null)["objects"].clone();
        let kept = objects.as_array().unwrap().iter();
        assert!(kept.clone().count() > 2);
        for object in kept {
            assert_eq!(object["kept_in"], "config", "{object}");
        }
    }
    let daemon = TestDaemon::with(load(&text(address.port())), open());
    served(&daemon);
    drop(daemon);
    let daemon = TestDaemon::with(Settings::default(), open());
    let objects = daemon.call("state_get", Value::Null)["objects"].clone();
    assert_eq!(objects, json!([]), "nothing of it was stored");
}
