//! Tests of the methods `keyring_*`: SPDK's replies, and that no reply contains a secret.

mod stored;

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use nacre_nvmf::subsystems::SecretKind;
use serde_json::{Value, json};

use crate::config::Settings;
use crate::config::host_keys::HostKeyNames;
use crate::config::settings::{Host, Key, Nvmf, Subsystem};
use crate::methods::testing::{TestDaemon, test_daemon};
use crate::services::keyring::rotation;
use crate::store::Store;

pub(super) const TEXT: &str = "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";
/// A part of it that nothing else contains.
pub(super) const MARK: &str = "ODxAREhMUFRYX";
pub(super) const NQN: &str = "nqn.2016-06.io.spdk:cnode1";
pub(super) const HOST: &str = "nqn.2016-06.io.spdk:host1";

pub(super) fn key_file(folder: &Path, name: &str) -> String {
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
            expires: None,
        }],
        nvmf: Nvmf {
            subsystem: vec![Subsystem {
                nqn: NQN.into(),
                host: vec![Host {
                    nqn: HOST.into(),
                    keys: HostKeyNames {
                        dhchap_key: Some("web1".into()),
                        dhchap_ctrlr_key: Some("web1".into()),
                        ..HostKeyNames::default()
                    },
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

/// The daemon of a rotation: keys `old`, `new` and `target` for authentication, and a host with the
/// first.
fn rotating(folder: &Path, state: &Path) -> TestDaemon {
    let daemon = TestDaemon::with(Settings::default(), Some(Store::open(state).unwrap()));
    if daemon.call("keyring_get_keys", Value::Null) == json!([]) {
        for name in ["old", "new", "target"] {
            let key = json!({ "name": name, "path": key_file(folder, name) });
            daemon.call("keyring_file_add_key", key);
        }
        daemon.call("nvmf_create_subsystem", json!({ "nqn": NQN }));
        let host = json!({ "nqn": NQN, "host": HOST, "dhchap_key": "old" });
        daemon.call("nvmf_subsystem_add_host", host);
    }
    daemon
}

fn rotate(more: Value) -> Value {
    let mut params = json!({ "nqn": NQN, "host": HOST });
    let all = params.as_object_mut().unwrap();
    all.extend(more.as_object().unwrap().clone());
    params
}

fn status(daemon: &TestDaemon) -> Value {
    daemon.call("host_auth_status", json!({ "host": HOST }))[0].clone()
}

/// Goal: a rotation survives a restart, its time ends it, and the end survives a restart. Method:
/// a daemon on one state, three times; the clock of its keys moves.
#[test]
fn rotation() {
    let folder = tempfile::tempdir().unwrap();
    let state = folder.path().join("state");
    let daemon = rotating(folder.path(), &state);
    let unknown = daemon.refused("host_rotate", rotate(json!({ "key": "none" })));
    assert_eq!(unknown.data.unwrap().field.as_deref(), Some("key"));
    let tls = rotate(json!({ "key": "new", "kind": "tls" }));
    let none = daemon.refused("host_rotate", tls).data.unwrap();
    assert!(none.cause.contains("no TLS key"), "{}", none.cause);
    let params = json!({ "key": "new", "dhchap_ctrlr_key": "target", "overlap_s": 3600 });
    daemon.call("host_rotate", rotate(params));
    let both = |status: &Value| {
        assert_eq!(status["dhchap_key"], "new");
        assert_eq!(status["dhchap_ctrlr_key"], "target");
        assert_eq!(status["rotations"][0]["former_key"], "old");
        assert_eq!(status["rotations"][0]["kind"], "dhchap");
    };
    both(&status(&daemon));
    let may_end_early = |daemon: &TestDaemon| {
        let place = (
            NQN.parse().unwrap(),
            HOST.parse().unwrap(),
            SecretKind::Keys,
        );
        let rotation = daemon.engine.keyring.rotations.find(&place);
        rotation.expect("a rotation").may_end_early
    };
    assert!(may_end_early(&daemon));
    drop(daemon);
    let daemon = rotating(folder.path(), &state);
    both(&status(&daemon));
    assert!(!may_end_early(&daemon));
    let keys_in_force = |daemon: &TestDaemon| {
        let plane = daemon.engine.plane().unwrap();
        let subsystem = plane.target.subsystem(&NQN.parse().unwrap()).unwrap();
        subsystem.keys_of(&HOST.parse().unwrap()).len()
    };
    assert_eq!(keys_in_force(&daemon), 2);
    let listed = daemon.call("key_list", Value::Null);
    let used: Vec<bool> = listed
        .as_array()
        .unwrap()
        .iter()
        .map(|key| key["used_by"] != json!([]))
        .collect();
    assert_eq!(used, [true, true, true], "{listed}");
    let clock = daemon.engine.keyring.clock.clone();
    let follow = || daemon.run(rotation::end_rotations(&daemon.engine));
    follow();
    both(&status(&daemon));
    clock.advance(Duration::from_secs(3600));
    follow();
    let ended = |status: &Value| {
        assert_eq!(status["dhchap_key"], "new");
        assert_eq!(status["dhchap_ctrlr_key"], "target");
        assert_eq!(status.get("rotations"), None);
    };
    ended(&status(&daemon));
    assert_eq!(keys_in_force(&daemon), 1);
    let events = daemon.call("events_get", Value::Null).to_string();
    assert!(events.contains("host_key_rotated"), "{events}");
    drop(daemon);
    let daemon = rotating(folder.path(), &state);
    ended(&status(&daemon));
    // Other keys end a rotation.
    daemon.call("host_rotate", rotate(json!({ "key": "old" })));
    assert_eq!(keys_in_force(&daemon), 2);
    daemon.call(
        "nvmf_subsystem_set_keys",
        rotate(json!({ "dhchap_key": "new" })),
    );
    assert_eq!(keys_in_force(&daemon), 1);
    drop(daemon);
    let daemon = rotating(folder.path(), &state);
    assert_eq!(status(&daemon)["dhchap_key"], "new");
    assert_eq!(keys_in_force(&daemon), 1);
}

/// Goal: an expired key is refused where it is used, reported once, and listed; a new date survives
/// a restart.
#[test]
fn expiry() {
    let folder = tempfile::tempdir().unwrap();
    let state = folder.path().join("state");
    let daemon = rotating(folder.path(), &state);
    let wrong = json!({ "name": "old", "expires": "soon" });
    assert_eq!(daemon.refused("key_expire", wrong).code, -32602);
    let missing = json!({ "name": "none" });
    assert_eq!(daemon.refused("key_expire", missing).code, -126);
    daemon.call(
        "key_expire",
        json!({ "name": "old", "expires": "2000-01-01" }),
    );
    for _ in 0..2 {
        rotation::report_expired(&daemon.engine);
    }
    let events = daemon.call("events_get", Value::Null).to_string();
    assert_eq!(events.matches("\"key_expired\"").count(), 1, "{events}");
    let row = |daemon: &TestDaemon| {
        let keys = daemon.call("key_list", Value::Null);
        keys.as_array()
            .unwrap()
            .iter()
            .find(|key| key["name"] == "old")
            .unwrap()
            .clone()
    };
    assert_eq!(row(&daemon)["state"], "expired");
    assert_eq!(row(&daemon)["expires"], "2000-01-01T00:00:00Z");
    assert_eq!(row(&daemon)["kind"], "dhchap");
    let set = rotate(json!({ "dhchap_key": "old" }));
    let refused = daemon.refused("nvmf_subsystem_set_keys", set);
    assert!(refused.to_string().contains("expired"), "{refused}");
    drop(daemon);
    let daemon = rotating(folder.path(), &state);
    assert_eq!(row(&daemon)["state"], "expired");
    daemon.call("key_expire", json!({ "name": "old" }));
    assert_eq!(row(&daemon)["state"], "ok");
}
