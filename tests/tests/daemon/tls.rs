//! Tests of daemons that reach the namespace of another daemon over TLS: over two paths, and with a
//! key that authentication makes.

use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use nacre_tests::daemon::{Daemon, Place, free_address};
use nacre_tests::host::options;
use nacre_tests::seed;
use serde_json::{Value, json};

use crate::ledger::BLOCK;
use crate::load::{BLOCKS, Load};

const FAR: &str = "nqn.2025-01.io.nacre:far";
const NEAR: &str = "nqn.2025-01.io.nacre:near";
const HOST: &str = "nqn.2025-01.io.nacre:host";
const PSK: &str = "NVMeTLSkey-1:01:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";
const PATIENCE: Duration = Duration::from_secs(60);

/// Gives the daemon the key `psk`.
fn add_key(daemon: &mut Daemon, file: &Path) {
    add_key_of(daemon, ("psk", PSK), file);
}

fn add_key_of(daemon: &mut Daemon, (name, text): (&str, &str), file: &Path) {
    let mut new = std::fs::File::options();
    let new = new.write(true).create(true).truncate(true).mode(0o600);
    let mut new = new.open(file).expect("a key file");
    std::io::Write::write_all(&mut new, text.as_bytes()).expect("a key");
    let key = json!({ "name": name, "path": file });
    daemon.call("keyring_file_add_key", key);
}

fn listen_address(address: SocketAddr) -> Value {
    json!({
        "trtype": "TCP", "traddr": address.ip().to_string(), "trsvcid": address.port().to_string(),
    })
}

/// Adds a listener that takes connections over TLS only.
fn listen(far: &mut Daemon, address: SocketAddr) {
    let at = listen_address(address);
    let params = json!({ "nqn": FAR, "listen_address": at, "secure_channel": true });
    far.call("nvmf_subsystem_add_listener", params);
}

/// The ports with a connected path.
fn connected(near: &mut Daemon) -> Vec<u16> {
    let paths = near.call("remote_get_paths", json!({ "name": "farn1" }));
    let paths = paths.as_array().expect("a list").iter();
    let live = paths.filter(|path| path["state"] == "enabled");
    let port = |path: &Value| path["trid"]["trsvcid"].as_str()?.parse().ok();
    let mut ports: Vec<u16> = live.map(|path| port(path).expect("a port")).collect();
    ports.sort_unstable();
    ports
}

fn until_connected(near: &mut Daemon, expected: &[u16]) {
    let end = Instant::now() + PATIENCE;
    loop {
        let found = connected(near);
        if found == expected {
            return;
        }
        assert!(Instant::now() < end, "never {expected:?}: {found:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Goal: a host with two paths over TLS loses one of them and goes on over the other, then the same
/// the other way round. No I/O fails, no write is lost, and no connection is ever in clear. Method:
/// verified load on a daemon that attaches two listeners of another one, which are removed in turn.
#[test]
fn one_of_two_paths_over_tls_is_lost() {
    let mut rng = seed::announced("one_of_two_paths_over_tls_is_lost");
    let (far_place, near_place) = (Place::new(), Place::new().on_cores(2));
    let mut far = far_place.start();
    far.create_file("disk", BLOCK as u32, (BLOCKS * BLOCK) as u64);
    far.call("nvmf_create_subsystem", json!({ "nqn": FAR }));
    far.add_namespace(FAR, "disk");
    add_key(&mut far, &far_place.path("psk"));
    let host = json!({ "nqn": FAR, "host": HOST, "psk": "psk" });
    far.call("nvmf_subsystem_add_host", host);
    let mut addresses = ["127.0.0.1", "127.0.0.2"].map(free_address);
    addresses.sort_by_key(SocketAddr::port);
    let ports = addresses.map(|address| address.port());
    for address in addresses {
        listen(&mut far, address);
    }

    let mut near = near_place.start();
    add_key(&mut near, &near_place.path("psk"));
    for address in addresses {
        let mut params = json!({
            "name": "far", "subnqn": FAR, "hostnqn": HOST, "psk": "psk", "multipath": "multipath",
            "fast_io_fail_timeout_sec": 0, "reconnect_delay_sec": 1,
        });
        let at = listen_address(address);
        let all = params.as_object_mut().expect("an object");
        all.extend(at.as_object().expect("an object").clone());
        near.call("bdev_nvme_attach_controller", params);
    }
    near.create_subsystem(NEAR);
    near.add_namespace(NEAR, "farn1");
    let served = near.listen(NEAR, &free_address("127.0.0.1").to_string());
    until_connected(&mut near, &ports);
    let mut load = Load::start(served, options(NEAR), 1, &mut rng);
    load.run(500);

    for lost in [0, 1, 0] {
        let address = addresses[lost];
        let params = json!({ "nqn": FAR, "listen_address": listen_address(address) });
        load.run_during(|| {
            far.call("nvmf_subsystem_remove_listener", params);
            until_connected(&mut near, &[ports[1 - lost]]);
        });
        load.run(500);
        let pairs = far.call("nvmf_subsystem_get_qpairs", json!({ "nqn": FAR }));
        let pairs = pairs.as_array().expect("a list");
        assert!(!pairs.is_empty());
        for pair in pairs {
            assert_eq!(pair["tls"]["identity"], format!("NVMe0R01 {HOST} {FAR}"));
        }
        load.run_during(|| {
            listen(&mut far, address);
            until_connected(&mut near, &ports);
        });
        load.run(300);
    }
    load.drain();
    load.check_all("after the load");
    near.stop();
    far.stop();
}

const SECRETS: [(&str, &str); 3] = [
    (
        "own",
        "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:",
    ),
    (
        "target",
        "DHHC-1:00:ICEiIyQlJicoKSorLC0uLzAxMjM0NTY3ODk6Ozw9Pj/jBqb2:",
    ),
    (
        "wrong",
        "DHHC-1:00:QEFCQ0RFRkdISUpLTE1OT1BRUlNUVVZXWFlaW1xdXl9YjiZe:",
    ),
];

/// A daemon with the keys [`SECRETS`].
fn with_secrets(place: &Place) -> Daemon {
    let mut daemon = place.start();
    for secret in SECRETS {
        add_key_of(&mut daemon, secret, &place.path(secret.0));
    }
    daemon
}

/// Attaches the namespace of `far` with secure channel concatenation; the error's text if that is
/// refused.
fn attach(near: &mut Daemon, host: &str, address: SocketAddr, target: &str) -> Result<(), String> {
    let mut params = json!({
        "name": "far", "subnqn": FAR, "hostnqn": host, "concat": true, "dhchap_key": "own",
        "dhchap_ctrlr_key": target, "fast_io_fail_timeout_sec": 0,
    });
    let at = listen_address(address);
    let all = params.as_object_mut().expect("an object");
    all.extend(at.as_object().expect("an object").clone());
    let attached = near.try_call("bdev_nvme_attach_controller", params);
    attached.map(drop).map_err(|error| error.to_string())
}

/// The hosts and PSK identities of the target's queues.
fn identities(far: &mut Daemon) -> Vec<String> {
    let pairs = far.call("nvmf_subsystem_get_qpairs", json!({ "nqn": FAR }));
    let pairs = pairs.as_array().expect("a list").iter();
    let identity = |pair: &Value| pair["tls"]["identity"].as_str().map(str::to_owned);
    let mut found: Vec<String> = pairs
        .map(|pair| identity(pair).expect("each queue is over TLS"))
        .collect();
    found.sort_unstable();
    found.dedup();
    found
}

/// Waits for an event about a failed authentication with this reason.
fn until_reported(far: &mut Daemon, host: &str, reason: &str) {
    let end = Instant::now() + PATIENCE;
    loop {
        let events = far.call("events_get", json!({}));
        let list = events["events"].as_array().expect("a list");
        let is_it = |event: &&Value| {
            let facts = &event["facts"];
            event["type"] == "auth_failed" && facts["host"] == host && facts["reason"] == reason
        };
        if let Some(event) = list.iter().find(is_it) {
            assert_eq!(event["facts"]["subsystem"], FAR);
            assert_eq!(event["facts"]["qid"], 0);
            return;
        }
        assert!(Instant::now() < end, "no event {reason:?}: {events}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Goal: authentication in both directions makes the key of TLS. If the host has another key of the
/// target, or the target has none, the host gets the cause, and the target reports the reason. No
/// other connection is affected. Method: a host under verified load beside another one, whose keys
/// are wrong and then right.
#[test]
fn both_ends_prove_themselves_for_the_key_of_tls() {
    const OTHER: &str = "nqn.2025-01.io.nacre:other";
    let mut rng = seed::announced("both_ends_prove_themselves_for_the_key_of_tls");
    let places = [Place::new(), Place::new(), Place::new()];
    let [mut far, mut near, mut other] = [0, 1, 2].map(|at| with_secrets(&places[at]));
    far.create_ram("disk", BLOCK as u32, (BLOCKS * BLOCK) as u64);
    far.call("nvmf_create_subsystem", json!({ "nqn": FAR }));
    far.add_namespace(FAR, "disk");
    for host in [HOST, OTHER] {
        let host = json!({
            "nqn": FAR, "host": host, "concat": true, "dhchap_key": "own",
            "dhchap_ctrlr_key": "target",
        });
        far.call("nvmf_subsystem_add_host", host);
    }
    let address = free_address("127.0.0.1");
    let at = listen_address(address);
    let params = json!({ "nqn": FAR, "listen_address": at, "options": { "tls": "allow" } });
    far.call("nvmf_subsystem_add_listener", params);

    attach(&mut near, HOST, address, "target").expect("the keys are right");
    let first = identities(&mut far);
    assert_eq!(first.len(), 1);
    assert!(first[0].starts_with(&format!("NVMe1G01 {HOST} {FAR} ")));
    near.create_subsystem(NEAR);
    near.add_namespace(NEAR, "farn1");
    let served = near.listen(NEAR, &free_address("127.0.0.1").to_string());
    let mut load = Load::start(served, options(NEAR), 1, &mut rng);
    load.run(300);

    load.run_during(|| {
        let refused = attach(&mut other, OTHER, address, "wrong").expect_err("another key");
        assert!(
            refused.contains("the two ends have different controller keys"),
            "{refused}"
        );
        until_reported(
            &mut far,
            OTHER,
            "the other end gave up: authentication failed",
        );
    });
    assert_eq!(far.controllers(FAR), 1);
    let own_only = json!({ "nqn": FAR, "host": OTHER, "dhchap_key": "own" });
    far.call("nvmf_subsystem_set_keys", own_only);
    load.run_during(|| {
        let refused = attach(&mut other, OTHER, address, "target").expect_err("no key");
        assert!(refused.contains("authentication failed"), "{refused}");
        until_reported(
            &mut far,
            OTHER,
            "the host asks for the controller's proof, and the controller has no key for that",
        );
    });
    let status = far.call("host_auth_status", json!({ "host": OTHER }));
    assert!(status[0]["last_failure"].is_object(), "{status}");
    assert!(status[0]["last_success"].is_null(), "{status}");

    let both = json!({
        "nqn": FAR, "host": OTHER, "dhchap_key": "own", "dhchap_ctrlr_key": "target",
    });
    far.call("nvmf_subsystem_set_keys", both);
    load.run_during(|| {
        attach(&mut other, OTHER, address, "target").expect("the keys are right");
    });
    load.run(300);
    let all = identities(&mut far);
    assert_eq!(all.len(), 2);
    assert_eq!(all[0], first[0], "the first host has lost no connection");
    assert!(all[1].starts_with(&format!("NVMe1G01 {OTHER} {FAR} ")));
    load.drain();
    load.check_all("after the load");
    for daemon in [other, near, far] {
        daemon.stop();
    }
}
