//! Goal: the paths of a published volume follow its policy and its ANA states, whichever call made
//! them, and after a restart. Method: a daemon with one TCP port and one simulated RDMA device.

use std::net::IpAddr;
use std::path::Path;

use nacre_random_ports::local_port;
use nacre_transport_rdma_verbs::sim::attributes;
use serde_json::{Value, json};

use super::super::super::testing::TestDaemon;
use super::{facts, file, until};
use crate::config::Settings;
use crate::services::volumes::published::PUBLISH;
use crate::store::{Change, Edit, Store};

const NQN: &str = "nqn.2025-01.io.nacre:v";
const FAR: &str = "192.0.2.10";

fn with(dir: &Path, settings: Settings) -> TestDaemon {
    let store = Store::open(&dir.join("state")).unwrap();
    let daemon = TestDaemon::with(settings, Some(store));
    let far: IpAddr = FAR.parse().unwrap();
    daemon
        .fabric
        .add_device(attributes("sim0"), &[far])
        .unwrap();
    daemon
}

fn start(dir: &Path) -> TestDaemon {
    let daemon = with(dir, Settings::default());
    file(&daemon, dir, "a", 8);
    daemon.call("volume_create", json!({ "name": "v", "devices": ["a"] }));
    daemon
}

fn tcp(port: u16) -> Value {
    json!({ "trtype": "TCP", "traddr": "127.0.0.1", "trsvcid": port.to_string() })
}

fn rdma() -> Value {
    json!({ "trtype": "RDMA", "traddr": FAR, "trsvcid": "4420" })
}

/// `TCP non_optimized withheld` for each present listener.
fn paths(daemon: &TestDaemon) -> Vec<String> {
    let all = daemon.call("nvmf_subsystem_get_listeners", json!({ "nqn": NQN }));
    let describe = |listener: &Value| {
        let word = |value: &Value| value.as_str().unwrap_or("-").to_owned();
        let mut text = word(&listener["address"]["trtype"]);
        text += &format!(" {}", word(&listener["ana_states"][0]["ana_state"]));
        if listener["withheld"] == true {
            text += &format!(" withheld {}", word(&listener["withheld_reason"]));
        }
        text
    };
    let mut paths: Vec<String> = all.as_array().unwrap().iter().map(describe).collect();
    paths.sort();
    paths
}

fn policy(word: &str) -> Value {
    json!({ "name": "v", "settings": { "transport_policy": word } })
}

/// Goal: hosts see ANA states, RDMA before TCP; a state set by the administrator is kept.
#[test]
fn a_published_volume_reports_ana_states() {
    let dir = tempfile::tempdir().unwrap();
    let port = local_port();
    {
        let daemon = start(dir.path());
        let params =
            json!({ "name": "v", "allow_any_host": true, "listeners": [tcp(port), rdma()] });
        daemon.call(PUBLISH, params);
        let subsystem = &daemon.call("nvmf_get_subsystems", json!({ "nqn": NQN }))[0];
        assert_eq!(subsystem["namespaces"][0]["anagrpid"], 1, "{subsystem}");
        assert_eq!(paths(&daemon), ["RDMA optimized", "TCP non_optimized"]);
        // Listeners added later get the same default state.
        let add = |more: Value| {
            let mut params = json!({ "nqn": NQN, "listen_address": tcp(local_port()) });
            params
                .as_object_mut()
                .unwrap()
                .extend(more.as_object().unwrap().clone());
            daemon.call("nvmf_subsystem_add_listener", params);
        };
        add(json!({}));
        add(json!({ "ana_state": "optimized" }));
        let four = [
            "RDMA optimized",
            "TCP non_optimized",
            "TCP non_optimized",
            "TCP optimized",
        ];
        assert_eq!(paths(&daemon), four);
        let set = json!({ "nqn": NQN, "listen_address": rdma(), "ana_state": "inaccessible" });
        daemon.call("nvmf_subsystem_listener_set_ana_state", set);
    }
    let daemon = with(dir.path(), Settings::default());
    for record in daemon.engine.journal.waiting() {
        daemon.run(daemon.engine.replay(&record));
    }
    until(&daemon, "open", |v| v["state"] == "healthy");
    let four = [
        "RDMA inaccessible",
        "TCP non_optimized",
        "TCP non_optimized",
        "TCP optimized",
    ];
    assert_eq!(paths(&daemon), four);
}

#[test]
fn the_publisher_chooses_the_states() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = start(dir.path());
    let refused = json!({ "name": "v", "ana_reporting": false, "ana": { "tcp": "optimized" } });
    assert_eq!(facts(&daemon.refused(PUBLISH, refused)), (-22, Some("ana")));
    let params = json!({ "name": "v", "listeners": [tcp(0), rdma()],
        "ana": { "tcp": "optimized", "rdma": "non_optimized" } });
    daemon.call(PUBLISH, params);
    assert_eq!(paths(&daemon), ["RDMA non_optimized", "TCP optimized"]);
    daemon.call("volume_unpublish", json!({ "name": "v" }));
    let params = json!({ "name": "v", "listeners": [tcp(0), rdma()], "ana_reporting": false });
    daemon.call(PUBLISH, params);
    assert_eq!(paths(&daemon), ["RDMA -", "TCP -"]);
}

/// Goal: listeners of the file use the file's ANA states; the default is TCP after RDMA.
#[test]
fn listeners_of_the_file_have_the_states_of_the_file() {
    for (ana, state) in [
        ("", "non_optimized"),
        ("ana = { tcp = \"optimized\" }", "optimized"),
        ("ana = { tcp = \"inaccessible\" }", "inaccessible"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let port = local_port();
        let text = format!("[[nvmf.listener]]\nname = \"lo\"\nport = {port}\n{ana}\n");
        let loaded = crate::config::load_text(Some(("nacre.toml", &text)), [], &[]).unwrap();
        let daemon = with(dir.path(), loaded.settings);
        file(&daemon, dir.path(), "a", 8);
        daemon.call("volume_create", json!({ "name": "v", "devices": ["a"] }));
        daemon.call(PUBLISH, json!({ "name": "v" }));
        assert_eq!(paths(&daemon), [format!("TCP {state}")], "{ana}");
    }
}

/// Goal: a volume published by an earlier version reports ANA states after a restart, and later
/// changes are kept. A volume published with `ana_reporting` false stays without.
#[test]
fn volumes_of_an_earlier_version_report_states_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let (first, second) = (local_port(), local_port());
    {
        let daemon = start(dir.path());
        let listeners = [tcp(first), tcp(second)];
        let params = json!({ "name": "v", "listeners": listeners, "ana_reporting": false });
        daemon.call(PUBLISH, params);
    }
    drop(with(dir.path(), Settings::default()));
    {
        let daemon = with(dir.path(), Settings::default());
        until(&daemon, "open", |v| v["state"] == "healthy");
        assert_eq!(paths(&daemon), ["TCP -", "TCP -"]);
        // The record as version 0.1 stored it.
        let mut old = daemon.engine.journal.select(|e| e.record.method == PUBLISH);
        let mut record = old.remove(0).record;
        record
            .params
            .as_object_mut()
            .unwrap()
            .remove("ana_reporting");
        let change = Change(vec![Edit::Put(record)]);
        daemon.run(daemon.engine.journal.commit(change)).unwrap();
    }
    {
        let daemon = with(dir.path(), Settings::default());
        until(&daemon, "open", |v| v["state"] == "healthy");
        assert_eq!(paths(&daemon), ["TCP non_optimized", "TCP non_optimized"]);
        let set = json!({ "nqn": NQN, "listen_address": tcp(first), "ana_state": "optimized" });
        daemon.call("nvmf_subsystem_listener_set_ana_state", set);
    }
    let daemon = with(dir.path(), Settings::default());
    until(&daemon, "open", |v| v["state"] == "healthy");
    assert_eq!(paths(&daemon), ["TCP non_optimized", "TCP optimized"]);
}

/// Goal: a policy applies to every listener, whichever call added it, and after a restart. A policy
/// that excludes all listeners is refused.
#[test]
fn a_policy_applies_to_all_listeners() {
    let dir = tempfile::tempdir().unwrap();
    {
        let daemon = start(dir.path());
        let port = local_port();
        daemon.call(PUBLISH, json!({ "name": "v", "listeners": [tcp(port)] }));
        let refused = daemon.refused("volume_set", policy("rdma-only"));
        assert_eq!(facts(&refused), (-22, Some("settings.transport_policy")));
        let message = refused.to_string();
        assert!(
            message.contains("admits RDMA only") && message.contains("use TCP"),
            "{message}"
        );
        assert_eq!(paths(&daemon), ["TCP non_optimized"]);
        let add = json!({ "nqn": NQN, "listen_address": rdma() });
        daemon.call("nvmf_subsystem_add_listener", add);
        daemon.call("volume_set", policy("rdma-only"));
        let withheld = "TCP non_optimized withheld transport_policy";
        assert_eq!(paths(&daemon), ["RDMA optimized", withheld]);
        let add = json!({ "nqn": NQN, "listen_address": tcp(local_port()) });
        daemon.call("nvmf_subsystem_add_listener", add);
        assert_eq!(paths(&daemon), ["RDMA optimized", withheld, withheld]);
        let all = daemon.call("nvmf_get_listeners", json!(null));
        assert_eq!(
            all["listeners"].as_array().unwrap().len(),
            3,
            "they stay open: {all}"
        );
    }
    let daemon = with(dir.path(), Settings::default());
    for record in daemon.engine.journal.waiting() {
        daemon.run(daemon.engine.replay(&record));
    }
    until(&daemon, "open", |v| v["state"] == "healthy");
    let withheld = "TCP non_optimized withheld transport_policy";
    assert_eq!(paths(&daemon), ["RDMA optimized", withheld, withheld]);
    daemon.call("volume_set", policy("any"));
    assert_eq!(
        paths(&daemon),
        ["RDMA optimized", "TCP non_optimized", "TCP non_optimized"]
    );
}

/// Goal: a volume is published by address on a listener of the file: the list shows one listener in
/// state `listening`.
#[test]
fn a_shared_listener_is_listed_once() {
    let dir = tempfile::tempdir().unwrap();
    let port = local_port();
    let text = format!("[[nvmf.listener]]\nname = \"lo\"\nport = {port}\n");
    let loaded = crate::config::load_text(Some(("nacre.toml", &text)), [], &[]).unwrap();
    let daemon = with(dir.path(), loaded.settings);
    let listed = || daemon.call("nvmf_get_listeners", json!(null))["listeners"].clone();
    let state_of = |listed: &Value| (listed[0]["actual"].clone(), listed[0]["subsystems"].clone());
    assert_eq!(state_of(&listed()), (json!("idle"), json!([])));
    file(&daemon, dir.path(), "a", 8);
    daemon.call("volume_create", json!({ "name": "v", "devices": ["a"] }));
    daemon.call(PUBLISH, json!({ "name": "v", "listeners": [tcp(port)] }));
    let now = listed();
    assert_eq!(state_of(&now), (json!("listening"), json!([NQN])));
    assert_eq!(
        (now.as_array().unwrap().len(), &now[0]["listener"]),
        (1, &json!("lo"))
    );
    let metrics = daemon.call("metrics_get", json!(null)).to_string();
    assert!(!metrics.contains("no_subsystem"), "{metrics}");
    daemon.call("volume_unpublish", json!({ "name": "v" }));
    assert_eq!(state_of(&listed()), (json!("idle"), json!([])));
}

/// Goal: a listener is withheld while the policy excludes its transport.
#[test]
fn a_policy_withholds_listeners() {
    let dir = tempfile::tempdir().unwrap();
    let port = local_port();
    let text =
        format!("[[nvmf.listener]]\niface = [\"name:lo\"]\nport = {port}\nrdma = \"prefer\"");
    let loaded = crate::config::load_text(Some(("nacre.toml", &text)), [], &[]).unwrap();
    let open = || Some(Store::open(&dir.path().join("state")).unwrap());
    let nqn = "nqn.2025-01.io.nacre:v";
    let withheld = |daemon: &TestDaemon| -> Vec<bool> {
        let all = daemon.call("nvmf_subsystem_get_listeners", json!({ "nqn": nqn }));
        let all = all.as_array().unwrap().clone();
        all.iter().map(|l| l["withheld"] == true).collect()
    };
    {
        let daemon = TestDaemon::with(loaded.settings.clone(), open());
        file(&daemon, dir.path(), "a", 8);
        daemon.call("volume_create", json!({ "name": "v", "devices": ["a"] }));
        let published = daemon.call("volume_publish", json!({ "name": "v" }));
        assert_eq!(
            published["listen_addresses"][0]["trsvcid"],
            port.to_string()
        );
        assert!(withheld(&daemon).iter().all(|w| !w) && !withheld(&daemon).is_empty());
        let policy = |word: &str| json!({ "name": "v", "settings": { "transport_policy": word } });
        daemon.call("volume_set", policy("rdma-only"));
        assert!(withheld(&daemon).iter().all(|w| *w));
        daemon.call("volume_set", policy("tcp-only"));
        assert!(withheld(&daemon).iter().all(|w| !w));
    }
    // Served there again after a restart, until it is unpublished.
    let daemon = TestDaemon::with(loaded.settings.clone(), open());
    until(&daemon, "the volume is open", |v| v["state"] == "healthy");
    assert!(!withheld(&daemon).is_empty());
    daemon.call("volume_unpublish", json!({ "name": "v" }));
    daemon.refused("nvmf_get_subsystems", json!({ "nqn": nqn }));
    drop(daemon);
    let daemon = TestDaemon::with(loaded.settings, open());
    daemon.refused("nvmf_get_subsystems", json!({ "nqn": nqn }));
}
