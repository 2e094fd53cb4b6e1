//! Tests of controllers that are attached over TLS.

use std::net::SocketAddr;

use serde_json::{Value, json};

use super::tests::{NQN, add_keys, params, start, target};

/// Goal: a controller is attached over TLS, also after a restart, and only with the key. Method: a
/// target that serves the host in no other way.
#[test]
fn controllers_are_attached_over_tls() {
    const HOST: &str = "nqn.2025-01.io.nacre:near";
    const TEXTS: [(&str, &str); 2] = [
        (
            "psk",
            "NVMeTLSkey-1:01:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:",
        ),
        (
            "wrong",
            "NVMeTLSkey-1:01:BwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwfLJNij:",
        ),
    ];
    let folder = tempfile::tempdir().unwrap();
    let (far, plain) = target();
    let daemon = start(folder.path());
    add_keys(folder.path(), &TEXTS, [&far, &daemon]);
    let at = json!({ "trtype": "TCP", "traddr": "127.0.0.1", "trsvcid": "0" });
    let listener = json!({ "nqn": NQN, "listen_address": at, "secure_channel": true });
    far.call("nvmf_subsystem_add_listener", listener);
    let listeners = far.call("nvmf_subsystem_get_listeners", json!({ "nqn": NQN }));
    let is_secure = |listener: &&Value| listener["options"]["tls"] == "require";
    let secure = listeners.as_array().unwrap().iter().find(is_secure);
    let port = secure.unwrap()["address"]["trsvcid"].as_str().unwrap();
    let secure: SocketAddr = format!("127.0.0.1:{port}").parse().unwrap();
    let host = json!({ "nqn": NQN, "host": HOST, "psk": "psk" });
    far.call("nvmf_subsystem_add_host", host);

    let attach = "bdev_nvme_attach_controller";
    let with = |address: SocketAddr, psk: &str| {
        let mut params = params(address);
        params["psk"] = psk.into();
        params
    };
    for impossible in [
        params(plain),
        params(secure),
        with(secure, "wrong"),
        with(plain, "psk"),
    ] {
        daemon.refused(attach, impossible);
    }
    let mut by_any = with(secure, "psk");
    by_any["trtype"] = "AUTO".into();
    let facts = daemon.refused(attach, by_any).data.unwrap();
    assert_eq!(facts.field.as_deref(), Some("psk"));

    daemon.call(attach, with(secure, "psk"));
    let pairs = far.call("nvmf_subsystem_get_qpairs", json!({ "nqn": NQN }));
    let pairs = pairs.as_array().unwrap();
    assert!(!pairs.is_empty());
    for pair in pairs {
        let identity = format!("NVMe0R01 {HOST} {NQN}");
        let expected = json!({
            "identity": identity, "cipher": "TLS_AES_128_GCM_SHA256", "derivation": "standard",
        });
        assert_eq!(pair["tls"], expected);
    }
    drop(daemon);
    let daemon = start(folder.path());
    let attached = daemon.call("bdev_nvme_get_controllers", Value::Null);
    assert_eq!(attached[0]["name"], "there", "{attached}");
    // No secret is in the state.
    let state = daemon.call("state_get", Value::Null).to_string();
    assert!(!state.contains("AAECAwQF"), "{state}");
}
