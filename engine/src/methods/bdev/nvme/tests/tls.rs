//! Tests of controllers that are attached over TLS.

use std::net::SocketAddr;

use serde_json::{Value, json};

use super::{NQN, add_keys, params, start, target};
use crate::config::Settings;
use crate::config::replication::{LegTls, Replication};
use crate::methods::testing::TestDaemon;

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
    let metrics = far.call("metrics_get", json!({ "format": "text" }));
    for reason in ["binder", "clear"] {
        let none = format!("nacre_tls_handshake_failures_total{{reason=\"{reason}\"}} 0");
        assert!(!metrics.as_str().unwrap().contains(&none), "{metrics}");
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

/// Goal: a controller is attached with secure channel concatenation: authentication in clear makes
/// the key, and every queue is over TLS with it, also after a loss. Method: a host entry that
/// requires it, and listeners of each kind.
#[test]
fn authentication_makes_the_key_of_tls() {
    const HOST: &str = "nqn.2025-01.io.nacre:near";
    const TEXTS: [(&str, &str); 1] = [(
        "own",
        "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:",
    )];
    let folder = tempfile::tempdir().unwrap();
    let (far, plain) = target();
    let daemon = start(folder.path());
    add_keys(folder.path(), &TEXTS, [&far, &daemon]);
    let listen = |tls: &str| -> SocketAddr {
        let at = json!({ "trtype": "TCP", "traddr": "127.0.0.1", "trsvcid": "0" });
        let listener = json!({ "nqn": NQN, "listen_address": at, "options": { "tls": tls } });
        far.call("nvmf_subsystem_add_listener", listener);
        let listeners = far.call("nvmf_subsystem_get_listeners", json!({ "nqn": NQN }));
        let of_kind = |listener: &&Value| listener["options"]["tls"] == tls;
        let listener = listeners.as_array().unwrap().iter().find(of_kind);
        let port = listener.unwrap()["address"]["trsvcid"].as_str().unwrap();
        format!("127.0.0.1:{port}").parse().unwrap()
    };
    let (both, secure) = (listen("allow"), listen("require"));
    let add_host = "nvmf_subsystem_add_host";
    let host = json!({ "nqn": NQN, "host": HOST, "concat": true });
    let facts = far.refused(add_host, host.clone()).data.unwrap();
    assert_eq!(facts.field.as_deref(), Some("concat"));
    let mut with_key = host;
    with_key["dhchap_key"] = "own".into();
    far.call(add_host, with_key);

    let attach = "bdev_nvme_attach_controller";
    let with = |address: SocketAddr, concat: bool| {
        let mut params = params(address);
        params["dhchap_key"] = "own".into();
        if concat {
            params["concat"] = true.into();
        }
        params
    };
    // Without concatenation; on a listener without TLS; on one that takes nothing in clear.
    for impossible in [with(both, false), with(plain, true), with(secure, true)] {
        daemon.refused(attach, impossible);
    }
    let mut keyless = params(both);
    keyless["concat"] = true.into();
    let facts = daemon.refused(attach, keyless).data.unwrap();
    assert_eq!(facts.field.as_deref(), Some("concat"));

    daemon.call(attach, with(both, true));
    let path = daemon.call("remote_get_paths", Value::Null)[0].clone();
    let secured = [&path["tls"], &path["psk"], &path["dhchap_key"]];
    assert_eq!(
        secured,
        [
            &json!("TLS_AES_128_GCM_SHA256"),
            &Value::Null,
            &json!("own")
        ],
        "the key is generated: {path}"
    );
    let identities = || {
        let pairs = far.call("nvmf_subsystem_get_qpairs", json!({ "nqn": NQN }));
        let pairs = pairs.as_array().unwrap().clone();
        let identities = pairs.iter().map(|pair| pair["tls"]["identity"].clone());
        let mut identities: Vec<_> = identities
            .map(|one| one.as_str().map(str::to_owned))
            .collect();
        identities.dedup();
        identities
    };
    let [Some(first)] = &identities()[..] else {
        panic!("{:?}", identities());
    };
    assert!(
        first.starts_with(&format!("NVMe1G01 {HOST} {NQN} ")),
        "{first}"
    );
    // After a reset it begins in clear again, with another key.
    daemon.call("bdev_nvme_reset_controller", json!({ "name": "there" }));
    let until = std::time::Instant::now() + std::time::Duration::from_secs(20);
    loop {
        match &identities()[..] {
            [Some(next)] if next != first && next.starts_with("NVMe1G01 ") => break,
            other => assert!(std::time::Instant::now() < until, "{other:?}"),
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    drop(daemon);
    let daemon = start(folder.path());
    let attached = daemon.call("bdev_nvme_get_controllers", Value::Null);
    assert_eq!(attached[0]["name"], "there", "{attached}");
}

/// Goal: `[replication]` names the keys of controllers that are attached without; a target changes
/// its host's key while connections go on; an expired key is refused, with its reason. Method: two
/// daemons over TLS and authentication.
#[test]
fn keys_of_replicas_and_their_rotation() {
    const HOST: &str = "nqn.2025-01.io.nacre:near";
    const TEXTS: [(&str, &str); 3] = [
        (
            "psk",
            "NVMeTLSkey-1:01:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:",
        ),
        (
            "new",
            "NVMeTLSkey-1:01:BwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwfLJNij:",
        ),
        (
            "own",
            "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:",
        ),
    ];
    let folder = tempfile::tempdir().unwrap();
    let (far, plain) = target();
    let near = |psk: &str| {
        let settings = Settings {
            replication: Replication {
                psk: Some(psk.into()),
                dhchap_key: Some("own".into()),
                tls: LegTls::Require,
                ..Replication::default()
            },
            ..Settings::default()
        };
        TestDaemon::with(settings, None)
    };
    let daemon = near("psk");
    let attach = "bdev_nvme_attach_controller";
    let early = daemon.refused(attach, params(plain)).data.unwrap();
    assert_eq!(early.field.as_deref(), Some("psk"));
    add_keys(folder.path(), &TEXTS, [&far, &daemon]);
    let at = json!({ "trtype": "TCP", "traddr": "127.0.0.1", "trsvcid": "0" });
    let listener = json!({ "nqn": NQN, "listen_address": at, "secure_channel": true });
    far.call("nvmf_subsystem_add_listener", listener);
    let listeners = far.call("nvmf_subsystem_get_listeners", json!({ "nqn": NQN }));
    let is_secure = |listener: &&Value| listener["options"]["tls"] == "require";
    let secure = listeners.as_array().unwrap().iter().find(is_secure);
    let port = secure.unwrap()["address"]["trsvcid"].as_str().unwrap();
    let secure: SocketAddr = format!("127.0.0.1:{port}").parse().unwrap();
    let host = json!({ "nqn": NQN, "host": HOST, "psk": "psk", "dhchap_key": "own" });
    far.call("nvmf_subsystem_add_host", host);

    let with = |more: Value| {
        let mut params = params(secure);
        let all = params.as_object_mut().unwrap();
        all.extend(more.as_object().unwrap().clone());
        params
    };
    let rdma = daemon.refused(attach, with(json!({ "trtype": "RDMA" })));
    assert_eq!(rdma.data.unwrap().field.as_deref(), Some("trtype"));
    let none = daemon.refused(attach, with(json!({ "psk": "" })));
    assert_eq!(none.data.unwrap().field.as_deref(), Some("psk"));
    daemon.call(attach, with(json!({ "trtype": "AUTO" })));
    let status = || far.call("host_auth_status", json!({ "host": HOST }))[0].clone();
    let proofs = |status: &Value| {
        let queues = status["queues"].as_array().unwrap();
        let of = |queue: &Value| format!("{} {}", queue["psk"], queue["dhchap_key"]);
        queues.iter().map(of).collect::<Vec<_>>()
    };
    assert_eq!(proofs(&status()), ["\"psk\" \"own\""]);
    let path = daemon.call("remote_get_paths", Value::Null)[0].clone();
    assert_eq!(path["state"], "enabled", "{path}");
    let secured = [&path["tls"], &path["psk"], &path["dhchap_key"]];
    assert_eq!(
        secured,
        [
            &json!("TLS_AES_128_GCM_SHA256"),
            &json!("psk"),
            &json!("own")
        ],
        "{path}"
    );
    // The host's connection to a volume, as the other end shows it.
    for name in ["left", "right"] {
        let disk = json!({ "name": name, "block_size": 512, "num_blocks": 16384 });
        far.call("bdev_malloc_create", disk);
    }
    let volume = json!({ "name": "v", "devices": ["left", "right"] });
    far.call("volume_create", volume);
    let namespace = json!({ "nqn": NQN, "namespace": { "bdev_name": "v" } });
    far.call("nvmf_subsystem_add_ns", namespace);
    let host = far.call("volume_get_connections", json!({ "name": "v" }))[0].clone();
    for field in ["tls", "psk", "dhchap_key"] {
        assert_eq!(host[field], path[field], "{field}: {host}");
    }
    assert!(status()["last_success"].is_object());

    let rotate = json!({ "nqn": NQN, "host": HOST, "key": "new", "overlap_s": 60 });
    far.call("host_rotate", rotate.clone());
    assert_eq!(proofs(&status()), ["\"psk\" \"own\""], "connections go on");
    let another = |psk: &str| {
        let daemon = near(psk);
        for (name, _) in TEXTS {
            let key = json!({ "name": name, "path": folder.path().join(name) });
            daemon.call("keyring_file_add_key", key);
        }
        daemon
    };
    let others = [another("psk"), another("new")];
    for other in &others {
        other.call(attach, params(secure));
    }
    assert_eq!(proofs(&status()), ["\"psk\" \"own\"", "\"new\" \"own\""]);
    let mut end = rotate;
    end["overlap_s"] = 0.into();
    far.call("host_rotate", end);
    assert_eq!(status()["controllers"], 3, "connections go on");
    another("psk").refused(attach, params(secure));

    far.call(
        "key_expire",
        json!({ "name": "new", "expires": "2000-01-01" }),
    );
    another("new").refused(attach, params(secure));
    let plane = far.engine.plane().unwrap();
    let failures = plane.target.authentication.take_tls_failures();
    let reasons: Vec<&str> = failures.iter().map(|one| &one.reason[..]).collect();
    let last = reasons.last().expect("refused");
    assert!(
        last.contains("key new expired at 2000-01-01T00:00:00Z"),
        "{reasons:?}"
    );
    assert_eq!(status()["controllers"], 3, "connections go on");
}

/// Goal: a path in clear, to a target that asks for no proof, shows neither cipher nor key.
#[test]
fn a_path_in_clear_shows_no_key() {
    let (_far, plain) = target();
    let folder = tempfile::tempdir().unwrap();
    let daemon = start(folder.path());
    daemon.call("bdev_nvme_attach_controller", params(plain));
    let path = daemon.call("remote_get_paths", Value::Null)[0].clone();
    for field in ["tls", "psk", "dhchap_key"] {
        assert_eq!(path.get(field), Some(&Value::Null), "{field}: {path}");
    }
}
