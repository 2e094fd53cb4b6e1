//! Keys as clients see them, with the answers of SPDK; and that no secret leaves its file.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use serde_json::{Value, json};

use crate::config::Settings;
use crate::config::settings::{Host, Key, Nvmf, Subsystem};
use crate::methods::testing::{TestDaemon, test_daemon};
use crate::store::Store;

const TEXT: &str = "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";
/// A part of it that nothing else contains.
const MARK: &str = "ODxAREhMUFRYX";
const NQN: &str = "nqn.2016-06.io.spdk:cnode1";
const HOST: &str = "nqn.2016-06.io.spdk:host1";

fn key_file(folder: &Path, name: &str) -> String {
    let path = folder.join(name);
    std::fs::write(&path, TEXT).unwrap();
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
    path.to_str().unwrap().to_owned()
}

fn listed(name: &str, path: &str, refcnt: u32) -> Value {
    json!({
        "name": name, "module": "keyring_file", "removed": false, "probed": false,
        "refcnt": refcnt, "path": path,
    })
}

#[test]
fn as_spdk_answers() {
    let daemon = test_daemon();
    let folder = tempfile::tempdir().unwrap();
    let path = key_file(folder.path(), "key0");
    let add = "keyring_file_add_key";
    let key0 = json!({ "name": "key0", "path": path });
    assert_eq!(daemon.call(add, key0.clone()), true);
    let keys = daemon.call("keyring_get_keys", Value::Null);
    assert_eq!(keys, json!([listed("key0", &path, 1)]));
    let code = |method: &str, params: Value| daemon.refused(method, params).code;
    assert_eq!(code(add, key0), -17);
    let other = |path: &str| json!({ "name": "key1", "path": path });
    assert_eq!(code(add, other("relative")), -1);
    assert_eq!(code(add, other("/no/such/file")), -2);
    assert_eq!(code(add, json!({ "name": "", "path": path })), -32602);
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o660)).unwrap();
    assert_eq!(code(add, other(&path)), -1);
    let remove = "keyring_file_remove_key";
    assert_eq!(code(remove, json!({ "name": "key1" })), -126);
    assert_eq!(daemon.call(remove, json!({ "name": "key0" })), true);
    assert_eq!(daemon.call("keyring_get_keys", Value::Null), json!([]));
}

/// Goal: a host has its keys by name, they count as uses, and refusals have SPDK's codes.
#[test]
fn keys_of_hosts() {
    let daemon = test_daemon();
    let folder = tempfile::tempdir().unwrap();
    let (own, other) = (
        key_file(folder.path(), "own"),
        key_file(folder.path(), "other"),
    );
    for (name, path) in [("own", &own), ("other", &other)] {
        daemon.call(
            "keyring_file_add_key",
            json!({ "name": name, "path": path }),
        );
    }
    daemon.call("nvmf_create_subsystem", json!({ "nqn": NQN }));
    let host = |more: Value| {
        let mut params = json!({ "nqn": NQN, "host": HOST });
        let all = params.as_object_mut().unwrap();
        all.extend(more.as_object().unwrap().clone());
        params
    };
    let add = "nvmf_subsystem_add_host";
    let unknown = daemon.refused(add, host(json!({ "dhchap_key": "none" })));
    assert_eq!(unknown.code, -32602);
    assert_eq!(unknown.data.unwrap().field.as_deref(), Some("dhchap_key"));
    let alone = daemon.refused(add, host(json!({ "dhchap_ctrlr_key": "own" })));
    assert_eq!(alone.code, -32603);
    let both = json!({ "dhchap_key": "own", "dhchap_ctrlr_key": "other" });
    daemon.call(add, host(both.clone()));
    let hosts = || {
        let all = daemon.call("nvmf_get_subsystems", json!({ "nqn": NQN }));
        all[0]["hosts"].clone()
    };
    let mut expected = both;
    expected["nqn"] = HOST.into();
    assert_eq!(hosts(), json!([expected]));
    let keys = daemon.call("keyring_get_keys", Value::Null);
    let uses = json!([listed("other", &other, 2), listed("own", &own, 2)]);
    assert_eq!(keys, uses);
    let set = "nvmf_subsystem_set_keys";
    daemon.call(set, host(json!({ "dhchap_key": "other" })));
    assert_eq!(hosts(), json!([{ "nqn": HOST, "dhchap_key": "other" }]));
    daemon.call("keyring_file_remove_key", json!({ "name": "other" }));
    let keys = daemon.call("keyring_get_keys", Value::Null);
    assert_eq!(
        (&keys[1]["name"], &keys[1]["removed"]),
        (&json!("other"), &json!(true))
    );
    daemon.call(set, host(json!({})));
    assert_eq!(hosts(), json!([{ "nqn": HOST }]));
    // A file that is no key is refused where it is used.
    std::fs::write(&own, TEXT.replace("AAEC", "AAED")).unwrap();
    let damaged = daemon.refused(set, host(json!({ "dhchap_key": "own" })));
    assert!(damaged.to_string().contains("checksum"), "{damaged}");
}

/// Goal: keys and hosts of the configuration file are there, and are not stored. A host whose key
/// file is missing is in the list all the same: it is refused, and not served without a key where
/// any host is allowed.
#[test]
fn declared_keys() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("web1");
    let settings = || Settings {
        key: vec![Key {
            name: "web1".into(),
            path: path.clone(),
        }],
        nvmf: Nvmf {
            subsystem: vec![Subsystem {
                nqn: NQN.into(),
                host: vec![Host {
                    nqn: HOST.into(),
                    dhchap_key: Some("web1".into()),
                    psk: None,
                    dhchap_ctrlr_key: Some("web1".into()),
                }],
                ..Subsystem::default()
            }],
            ..Nvmf::default()
        },
        ..Settings::default()
    };
    let expected = json!([{ "nqn": HOST, "dhchap_key": "web1", "dhchap_ctrlr_key": "web1" }]);
    for there in [false, true] {
        if there {
            key_file(folder.path(), "web1");
        }
        let daemon = TestDaemon::with(settings(), None);
        assert!(daemon.engine.declared.missing().is_empty());
        let hosts = daemon.call("nvmf_get_subsystems", json!({ "nqn": NQN }))[0]["hosts"].clone();
        assert_eq!(hosts, expected);
        let plane = daemon.engine.plane().unwrap();
        let subsystem = plane.target.subsystem(&NQN.parse().unwrap()).unwrap();
        let keys = subsystem
            .host_keys(&HOST.parse().unwrap())
            .expect("its keys");
        assert_eq!(keys.keys().is_ok(), there);
    }
}

/// Goal: keys survive a restart, in either order of their making; and the secret is in no answer
/// and no state. Method: a daemon on a state file, twice; its bytes and every answer are searched.
#[test]
fn secrets_stay_in_their_files() {
    let folder = tempfile::tempdir().unwrap();
    let (early, late) = (
        key_file(folder.path(), "early"),
        key_file(folder.path(), "late"),
    );
    let state = folder.path().join("state");
    let start = || {
        let store = Store::open(&state).unwrap();
        TestDaemon::with(Settings::default(), Some(store))
    };
    let answers = |daemon: &TestDaemon| {
        let mut all = String::new();
        for method in [
            "keyring_get_keys",
            "nvmf_get_subsystems",
            "state_get",
            "events_get",
            "notify_get_notifications",
        ] {
            all += &daemon.call(method, Value::Null).to_string();
        }
        for name in ["keyring", "bdev", "nvmf"] {
            let config = daemon.call("framework_get_config", json!({ "name": name }));
            all += &config.to_string();
        }
        assert!(!all.contains(MARK), "{all}");
        all
    };
    let daemon = start();
    let add = |name: &str, path: &str| {
        daemon.call(
            "keyring_file_add_key",
            json!({ "name": name, "path": path }),
        );
    };
    add("early", &early);
    daemon.call("nvmf_create_subsystem", json!({ "nqn": NQN }));
    let host = json!({ "nqn": NQN, "host": HOST, "dhchap_key": "early" });
    daemon.call("nvmf_subsystem_add_host", host);
    add("late", &late);
    let keys =
        json!({ "nqn": NQN, "host": HOST, "dhchap_key": "late", "dhchap_ctrlr_key": "early" });
    daemon.call("nvmf_subsystem_set_keys", keys.clone());
    let config = daemon.call("framework_get_config", json!({ "name": "keyring" }));
    assert_eq!(config[0]["method"], "keyring_file_add_key");
    assert_eq!(config[1]["params"], json!({ "name": "late", "path": late }));
    answers(&daemon);
    drop(daemon);
    let daemon = start();
    let hosts = daemon.call("nvmf_get_subsystems", json!({ "nqn": NQN }))[0]["hosts"].clone();
    let expected = json!([{ "nqn": HOST, "dhchap_key": "late", "dhchap_ctrlr_key": "early" }]);
    assert_eq!(hosts, expected);
    assert!(answers(&daemon).contains("late"));
    // A removed host takes its keys along.
    let host = json!({ "nqn": NQN, "host": HOST });
    daemon.call("nvmf_subsystem_remove_host", host);
    drop(daemon);
    let daemon = start();
    let hosts = daemon.call("nvmf_get_subsystems", json!({ "nqn": NQN }))[0]["hosts"].clone();
    assert_eq!(hosts, json!([]));
    drop(daemon);
    let mut files = 0;
    for entry in std::fs::read_dir(&state).unwrap() {
        let bytes = std::fs::read(entry.unwrap().path()).unwrap();
        let mut parts = bytes.windows(MARK.len());
        assert!(!parts.any(|part| part == MARK.as_bytes()), "a secret");
        files += 1;
    }
    assert!(files > 0);
}

const PSK: &str = "NVMeTLSkey-1:01:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";

/// Goal: a host has its TLS key by name, and an address has one TLS policy.
#[test]
fn tls_keys_of_hosts() {
    let daemon = test_daemon();
    let folder = tempfile::tempdir().unwrap();
    let path = key_file(folder.path(), "tls");
    std::fs::write(&path, PSK).unwrap();
    for (name, path) in [("tls", path), ("chap", key_file(folder.path(), "chap"))] {
        let key = json!({ "name": name, "path": path });
        daemon.call("keyring_file_add_key", key);
    }
    daemon.call("nvmf_create_subsystem", json!({ "nqn": NQN }));
    let add = "nvmf_subsystem_add_host";
    let host = |psk: &str| json!({ "nqn": NQN, "host": HOST, "psk": psk });
    for name in ["none", "chap"] {
        let refused = daemon.refused(add, host(name));
        assert_eq!(
            (refused.code, &refused.message[..]),
            (-32603, "Internal error")
        );
        assert_eq!(refused.data.unwrap().field.as_deref(), Some("psk"));
    }
    daemon.call(add, host("tls"));
    let subsystems = daemon.call("nvmf_get_subsystems", json!({ "nqn": NQN }));
    assert_eq!(
        subsystems[0]["hosts"],
        json!([{ "nqn": HOST, "psk": "tls" }])
    );
    let keys = daemon.call("keyring_get_keys", Value::Null);
    assert_eq!(
        (&keys[1]["name"], &keys[1]["refcnt"]),
        (&json!("tls"), &json!(2))
    );

    let address = |port: &str| json!({ "trtype": "tcp", "traddr": "127.0.0.1", "trsvcid": port });
    let secure = json!({ "nqn": NQN, "listen_address": address("0"), "secure_channel": true });
    daemon.call("nvmf_subsystem_add_listener", secure);
    let listeners = daemon.call("nvmf_subsystem_get_listeners", json!({ "nqn": NQN }));
    assert_eq!(listeners[0]["options"], json!({ "tls": "require" }));
    let port = listeners[0]["address"]["trsvcid"].as_str().unwrap();
    let other = "nqn.2016-06.io.spdk:cnode2";
    daemon.call("nvmf_create_subsystem", json!({ "nqn": other }));
    let plain = json!({ "nqn": other, "listen_address": address(port) });
    let refused = daemon.refused("nvmf_subsystem_add_listener", plain);
    assert_eq!(refused.code, -32602);
    let facts = refused.data.unwrap();
    assert_eq!(facts.field.as_deref(), Some("secure_channel"));
    assert!(facts.cause.contains("Require"), "{}", facts.cause);
}
