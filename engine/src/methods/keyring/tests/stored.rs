//! Tests of the keys that the daemon stores, and of their store key.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::{HOST, MARK, NQN, TEXT, key_file};
use crate::config::Settings;
use crate::methods::testing::TestDaemon;
use crate::services::calls::for_viewer;
use crate::store::{Change, RedbStore, StateStore, Store};

/// A daemon on a state, with two sealed keys: `chap` for authentication, in use by the host, and
/// `tls`. Returns the secrets, too.
fn sealing(state: &Path) -> (TestDaemon, Vec<String>) {
    let daemon = on(state);
    let made = ["dhchap", "tls"].map(|kind| {
        let params = json!({ "name": kind, "kind": kind, "reveal": true });
        daemon.call("key_generate", params)
    });
    daemon.call("nvmf_create_subsystem", json!({ "nqn": NQN }));
    let host = json!({ "nqn": NQN, "host": HOST, "dhchap_key": "dhchap", "psk": "tls" });
    daemon.call("nvmf_subsystem_add_host", host);
    let texts = made.map(|made| made["text"].as_str().expect("a text").to_owned());
    (daemon, texts.to_vec())
}

fn on(state: &Path) -> TestDaemon {
    TestDaemon::with(Settings::default(), Some(Store::open(state).unwrap()))
}

/// Everything that a daemon says about its keys.
fn said(daemon: &TestDaemon) -> String {
    let methods = [
        "key_list",
        "keyring_get_keys",
        "nvmf_get_subsystems",
        "state_get",
        "events_get",
        "host_auth_status",
    ];
    let answers = methods.map(|method| daemon.call(method, Value::Null).to_string());
    let config = daemon.call("framework_get_config", json!({ "name": "keyring" }));
    let keys = format!("{:?}", daemon.engine.keyring);
    format!("{}{config}{keys}", answers.concat())
}

/// The states of the keys, which must be those of the secrets of the host.
fn states(daemon: &TestDaemon) -> Vec<String> {
    let listed = daemon.call("key_list", Value::Null);
    let listed = listed.as_array().unwrap();
    let states: Vec<String> = listed
        .iter()
        .map(|key| {
            assert_eq!(key["source"], "sealed", "{key}");
            key["state"].as_str().unwrap().to_owned()
        })
        .collect();
    let plane = daemon.engine.plane().unwrap();
    let subsystem = plane.target.subsystem(&NQN.parse().unwrap()).unwrap();
    let host = HOST.parse().unwrap();
    let secrets = [
        subsystem.host_keys(&host).expect("keys").keys().is_ok(),
        subsystem.host_psk(&host).expect("a psk").psk().is_ok(),
    ];
    assert_eq!(secrets, [states[0] == "ok", states[1] == "ok"]);
    states
}

fn doctor(daemon: &TestDaemon) -> Value {
    let report = daemon.call("doctor_run", json!({}));
    let findings = report["findings"].as_array().expect("findings");
    let found = findings
        .iter()
        .find(|finding| finding["id"] == "keys.store");
    found.cloned().unwrap_or(Value::Null)
}

/// Goal: sealed keys are used as others are, also after a restart, and no answer, event or file of
/// the state contains a secret.
#[test]
fn sealed_keys() {
    let folder = tempfile::tempdir().unwrap();
    let state = folder.path().join("state");
    let (daemon, mut secrets) = sealing(&state);
    secrets.push(TEXT.to_owned());
    let file = key_file(folder.path(), "plain");
    let hidden = daemon.call("key_generate", json!({ "name": "x", "kind": "tls" }));
    assert_eq!(hidden.get("text"), None);
    daemon.call("keyring_file_remove_key", json!({ "name": "x" }));
    let given = daemon.call("key_import", json!({ "name": "x", "text": TEXT }));
    let read = daemon.call("key_import", json!({ "name": "y", "file": file }));
    assert_eq!(given["fingerprint"], read["fingerprint"]);
    assert_eq!(given["kind"], "dhchap");
    let own = json!({ "name": "z", "path": file });
    daemon.call("keyring_file_add_key", own);
    let expires = json!({ "name": "z", "expires": "2100-01-31" });
    daemon.call("key_expire", expires);
    let sealed = daemon.call("key_seal", json!({ "name": "z" }));
    assert_eq!(sealed["fingerprint"], given["fingerprint"]);
    std::fs::remove_file(&file).unwrap();
    assert_eq!(states(&daemon), ["ok"; 5]);

    for (params, code, field) in [
        (json!({ "name": "x", "text": TEXT }), -17, "name"),
        (
            json!({ "name": "n", "text": "DHHC-1:00:AAAA:" }),
            -22,
            "text",
        ),
        (json!({ "name": "n", "file": file }), -22, "file"),
        (json!({ "name": "n", "credential": "c" }), -22, "name"),
        (
            json!({ "name": "n", "credential": "../c" }),
            -32602,
            "credential",
        ),
        (json!({ "name": "n", "sealed": "v1:" }), -22, "name"),
        (json!({ "name": "n" }), -32602, "text"),
        (
            json!({ "name": "n", "text": TEXT, "file": file }),
            -32602,
            "text",
        ),
    ] {
        let refused = daemon.refused("key_import", params.clone());
        assert_eq!(refused.code, code, "{params} {refused}");
        let facts = refused.data.unwrap();
        assert_eq!(facts.field.as_deref(), Some(field), "{params}");
        assert!(!facts.cause.contains(MARK));
    }
    assert_eq!(daemon.refused("key_seal", json!({ "name": "x" })).code, -22);
    assert_eq!(
        daemon.refused("key_seal", json!({ "name": "n" })).code,
        -126
    );
    let wrong = json!({ "name": "n", "kind": "tls", "hash": "sha256" });
    assert_eq!(daemon.refused("key_generate", wrong).code, -32602);
    let wrong = json!({ "name": "n", "kind": "dhchap", "hash": "md5" });
    assert_eq!(daemon.refused("key_generate", wrong).code, -32602);
    assert_eq!(doctor(&daemon)["status"], "WARN");

    let mut all = said(&daemon);
    let file = state.join("store.key");
    let report = daemon.call("doctor_run", json!({})).to_string();
    let stored = daemon.call("state_get", Value::Null).to_string();
    for answer in [stored, report] {
        let hidden = ["v1:", file.to_str().unwrap()];
        assert!(hidden.iter().any(|part| answer.contains(part)));
        let answer = RawValue::from_string(answer).unwrap();
        let viewed = for_viewer(&daemon.engine, Ok(answer)).unwrap();
        let viewed = viewed.get();
        assert!(!hidden.iter().any(|part| viewed.contains(part)), "{viewed}");
    }
    drop(daemon);
    let daemon = on(&state);
    assert_eq!(states(&daemon), ["ok"; 5]);
    let listed = daemon.call("key_list", Value::Null);
    assert_eq!(listed[4]["expires"], "2100-01-31T00:00:00Z");
    all += &said(&daemon);
    drop(daemon);
    for text in &secrets {
        let secret = text.split(':').nth(2).unwrap();
        let parts = [&secret[..24], &secret[12..36]];
        for part in parts {
            assert!(!all.contains(part), "a secret in an answer");
            for entry in std::fs::read_dir(&state).unwrap() {
                let bytes = std::fs::read(entry.unwrap().path()).unwrap();
                let mut windows = bytes.windows(part.len());
                assert!(
                    !windows.any(|at| at == part.as_bytes()),
                    "a secret in a file"
                );
            }
        }
    }
}

/// Goal: a call that is refused for its date has sealed nothing: there is no store key.
#[test]
fn a_wrong_date_seals_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let state = folder.path().join("state");
    let daemon = on(&state);
    let file = key_file(folder.path(), "plain");
    for (method, of) in [
        ("key_generate", json!({ "kind": "tls" })),
        ("key_import", json!({ "text": TEXT })),
        ("key_import", json!({ "file": file })),
    ] {
        let mut params = json!({ "name": "n", "expires": "2027-13-01" });
        params
            .as_object_mut()
            .unwrap()
            .extend(of.as_object().unwrap().clone());
        let refused = daemon.refused(method, params).data.unwrap();
        assert_eq!(refused.field.as_deref(), Some("expires"), "{method}");
        assert!(!state.join("store.key").exists(), "{method}");
    }
    assert_eq!(daemon.call("key_list", Value::Null), json!([]));
}

/// Goal: a daemon without its store key, with another one, or with a damaged sealed text starts,
/// refuses the hosts of those keys only, and makes no new store key; all is well once it is back.
#[test]
fn the_store_key_is_lost() {
    let folder = tempfile::tempdir().unwrap();
    let state = folder.path().join("state");
    let (daemon, _) = sealing(&state);
    drop(daemon);
    let file = state.join("store.key");
    let kept = std::fs::read(&file).unwrap();
    for (text, cause) in [
        (None, "there is no store key"),
        (Some("5a".repeat(32)), "and the daemon has"),
        (Some("5a".repeat(31)), "64 hexadecimal digits"),
    ] {
        std::fs::remove_file(&file).unwrap();
        if let Some(text) = &text {
            std::fs::write(&file, text).unwrap();
            std::fs::set_permissions(&file, PermissionsExt::from_mode(0o600)).unwrap();
        }
        let daemon = on(&state);
        assert_eq!(states(&daemon), ["unreadable"; 2]);
        let listed = daemon.call("key_list", Value::Null);
        let why = listed[0]["why"].as_str().unwrap();
        assert!(why.contains(cause), "{why}");
        for (method, params) in [
            ("key_generate", json!({ "name": "more", "kind": "tls" })),
            ("key_import", json!({ "name": "more", "text": TEXT })),
            ("key_store_rotate", Value::Null),
        ] {
            let refused = daemon.refused(method, params).data.unwrap();
            assert!(refused.cause.contains(cause), "{method}: {}", refused.cause);
        }
        assert_eq!(std::fs::read_to_string(&file).ok(), text);
        let keys = doctor(&daemon);
        let is_known = text.as_ref().is_some_and(|text| text.len() == 64);
        assert_eq!(keys["status"], if is_known { "WARN" } else { "FAIL" });
        drop(daemon);
        std::fs::write(&file, &kept).unwrap();
        std::fs::set_permissions(&file, PermissionsExt::from_mode(0o600)).unwrap();
        let daemon = on(&state);
        assert_eq!(states(&daemon), ["ok"; 2]);
    }
    // One damaged record takes nothing from the other key.
    let mut store = RedbStore::open(&state).unwrap();
    let records = store.load().unwrap();
    let record = records.iter().find(|record| record.key == "keyring/tls");
    let mut record = record.unwrap().clone();
    let sealed = record.params["sealed"].as_str().unwrap().to_owned();
    record.params["sealed"] = sealed[..sealed.len() - 8].into();
    let change = Change::put(record.key, record.method, record.params);
    store.commit(&change).unwrap();
    drop(store);
    let daemon = on(&state);
    assert_eq!(states(&daemon), ["ok", "unreadable"]);
    let refused = daemon.refused("key_store_rotate", Value::Null);
    assert!(refused.to_string().contains("damaged"), "{refused}");
    daemon.call("keyring_file_remove_key", json!({ "name": "tls" }));
    daemon.call("key_store_rotate", Value::Null);
}

/// Goal: another store key takes the place of the present one; a crash between the writes of a
/// rotation costs no key. Method: the files of the data directory are put back as a crash leaves
/// them.
#[test]
fn the_store_key_is_rotated() {
    let folder = tempfile::tempdir().unwrap();
    let state = folder.path().join("state");
    let (file, next) = (state.join("store.key"), state.join("store.key.next"));
    let (daemon, _) = sealing(&state);
    let expires = json!({ "name": "tls", "expires": "2100-01-31" });
    daemon.call("key_expire", expires);
    // A removed key stays with its user.
    daemon.call("keyring_file_remove_key", json!({ "name": "dhchap" }));
    let before = daemon.call("key_list", Value::Null);
    let first = std::fs::read(&file).unwrap();
    let rotated = daemon.call("key_store_rotate", Value::Null);
    assert_eq!(rotated["keys"], 1);
    let second = std::fs::read(&file).unwrap();
    assert!(first != second && !next.exists());
    assert_eq!(daemon.call("key_list", Value::Null), before);
    assert_eq!(states(&daemon), ["ok"; 2]);
    drop(daemon);
    let daemon = on(&state);
    let tls = |daemon: &TestDaemon| daemon.call("key_list", Value::Null)[0].clone();
    let present = tls(&daemon);
    assert_eq!(present["state"], "ok");
    assert_eq!(present["fingerprint"], before[0]["fingerprint"]);
    assert_eq!(present["expires"], "2100-01-31T00:00:00Z");
    drop(daemon);

    // After the file, before the state.
    let put = |path: &Path, text: &[u8]| {
        std::fs::write(path, text).unwrap();
        std::fs::set_permissions(path, PermissionsExt::from_mode(0o600)).unwrap();
    };
    put(&next, "a5".repeat(32).as_bytes());
    put(&state.join("store.key.new"), b"a5a5");
    let daemon = on(&state);
    assert_eq!(tls(&daemon), present);
    daemon.call("key_generate", json!({ "name": "more", "kind": "tls" }));
    assert_eq!(std::fs::read(&file).unwrap(), second);
    daemon.call("keyring_file_remove_key", json!({ "name": "more" }));
    daemon.call("key_store_rotate", Value::Null);
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "a5".repeat(32));
    drop(daemon);

    // After the state, before the rename.
    std::fs::rename(&file, &next).unwrap();
    put(&file, &second);
    let daemon = on(&state);
    assert_eq!(tls(&daemon), present);
    drop(daemon);
    let daemon = on(&state);
    daemon.call("key_generate", json!({ "name": "more", "kind": "tls" }));
    assert!(!next.exists());
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "a5".repeat(32));
    drop(daemon);
    let daemon = on(&state);
    let listed = daemon.call("key_list", Value::Null);
    let of = listed.as_array().unwrap().iter();
    let states: Vec<&Value> = of.map(|key| &key["state"]).collect();
    assert_eq!(states, ["ok", "ok"]);

    // A credential takes its place; the file goes.
    let credentials = folder.path().join("credentials");
    std::fs::create_dir(&credentials).unwrap();
    std::fs::write(credentials.join("nacre-store-key"), "77".repeat(32)).unwrap();
    std::fs::write(credentials.join("web1"), TEXT).unwrap();
    daemon.engine.keyring.use_credentials(Some(credentials));
    daemon.call("key_store_rotate", Value::Null);
    assert!(!file.exists());
    assert_eq!(tls(&daemon)["state"], "ok");
    assert_eq!(doctor(&daemon)["status"], "PASS");
    let done = daemon
        .refused("key_store_rotate", Value::Null)
        .data
        .unwrap();
    assert!(done.remedy.unwrap().contains("nacre-store-key-former"));
    let own = json!({ "name": "web1", "credential": "web1" });
    assert_eq!(daemon.call("key_import", own)["kind"], "dhchap");
    let listed = daemon.call("key_list", Value::Null);
    assert_eq!(listed[2]["source"], "credential");
    assert_eq!(listed[2]["state"], "ok");
}
