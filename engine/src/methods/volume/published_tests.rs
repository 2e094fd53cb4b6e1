//! Goal: the paths of a published volume follow its policy and its ANA states, whichever call made
//! them, and after a restart. Method: a daemon with one TCP port and one simulated RDMA device.

use std::net::IpAddr;
use std::path::Path;

use nacre_rdma_verbs::sim::attributes;
use serde_json::{Value, json};

use super::super::testing::Bench;
use super::publish::PUBLISH;
use super::tests::{facts, file, until};
use crate::config::Settings;
use crate::store::{Change, Edit, Store};

const NQN: &str = "nqn.2025-01.io.nacre:v";
const FAR: &str = "192.0.2.10";

fn with(dir: &Path, settings: Settings) -> Bench {
    let store = Store::open(&dir.join("state")).unwrap();
    let bench = Bench::with(settings, Some(store));
    let far: IpAddr = FAR.parse().unwrap();
    bench.fabric.add_device(attributes("sim0"), &[far]).unwrap();
    bench
}

fn start(dir: &Path) -> Bench {
    let bench = with(dir, Settings::default());
    file(&bench, dir, "a", 8);
    bench.call("volume_create", json!({ "name": "v", "devices": ["a"] }));
    bench
}

fn tcp(port: u16) -> Value {
    json!({ "trtype": "TCP", "traddr": "127.0.0.1", "trsvcid": port.to_string() })
}

fn rdma() -> Value {
    json!({ "trtype": "RDMA", "traddr": FAR, "trsvcid": "4420" })
}

fn free_port() -> u16 {
    let probe = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    probe.local_addr().unwrap().port()
}

/// `TCP non_optimized withheld` for each present listener.
fn paths(bench: &Bench) -> Vec<String> {
    let all = bench.call("nvmf_subsystem_get_listeners", json!({ "nqn": NQN }));
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
    let port = free_port();
    {
        let bench = start(dir.path());
        let params =
            json!({ "name": "v", "allow_any_host": true, "listeners": [tcp(port), rdma()] });
        bench.call(PUBLISH, params);
        let subsystem = &bench.call("nvmf_get_subsystems", json!({ "nqn": NQN }))[0];
        assert_eq!(subsystem["namespaces"][0]["anagrpid"], 1, "{subsystem}");
        assert_eq!(paths(&bench), ["RDMA optimized", "TCP non_optimized"]);
        // Listeners added later get the same default state.
        let add = |more: Value| {
            let mut params = json!({ "nqn": NQN, "listen_address": tcp(free_port()) });
            params
                .as_object_mut()
                .unwrap()
                .extend(more.as_object().unwrap().clone());
            bench.call("nvmf_subsystem_add_listener", params);
        };
        add(json!({}));
        add(json!({ "ana_state": "optimized" }));
        let four = [
            "RDMA optimized",
            "TCP non_optimized",
            "TCP non_optimized",
            "TCP optimized",
        ];
        assert_eq!(paths(&bench), four);
        let set = json!({ "nqn": NQN, "listen_address": rdma(), "ana_state": "inaccessible" });
        bench.call("nvmf_subsystem_listener_set_ana_state", set);
    }
    let bench = with(dir.path(), Settings::default());
    for record in bench.engine.journal.waiting() {
        bench.run(bench.engine.replay(&record));
    }
    until(&bench, "open", |v| v["state"] == "healthy");
    let four = [
        "RDMA inaccessible",
        "TCP non_optimized",
        "TCP non_optimized",
        "TCP optimized",
    ];
    assert_eq!(paths(&bench), four);
}

#[test]
fn the_publisher_chooses_the_states() {
    let dir = tempfile::tempdir().unwrap();
    let bench = start(dir.path());
    let refused = json!({ "name": "v", "ana_reporting": false, "ana": { "tcp": "optimized" } });
    assert_eq!(facts(&bench.refused(PUBLISH, refused)), (-22, Some("ana")));
    let params = json!({ "name": "v", "listeners": [tcp(0), rdma()],
        "ana": { "tcp": "optimized", "rdma": "non_optimized" } });
    bench.call(PUBLISH, params);
    assert_eq!(paths(&bench), ["RDMA non_optimized", "TCP optimized"]);
    bench.call("volume_unpublish", json!({ "name": "v" }));
    let params = json!({ "name": "v", "listeners": [tcp(0), rdma()], "ana_reporting": false });
    bench.call(PUBLISH, params);
    assert_eq!(paths(&bench), ["RDMA -", "TCP -"]);
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
        let port = free_port();
        let text = format!("[[nvmf.listener]]\nname = \"lo\"\nport = {port}\n{ana}\n");
        let loaded = crate::config::load_text(Some(("nacre.toml", &text)), [], &[]).unwrap();
        let bench = with(dir.path(), loaded.settings);
        file(&bench, dir.path(), "a", 8);
        bench.call("volume_create", json!({ "name": "v", "devices": ["a"] }));
        bench.call(PUBLISH, json!({ "name": "v" }));
        assert_eq!(paths(&bench), [format!("TCP {state}")], "{ana}");
    }
}

/// Goal: a volume published by an earlier version reports ANA states after a restart, and later
/// changes are kept. A volume published with `ana_reporting` false stays without.
#[test]
fn volumes_of_an_earlier_version_report_states_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let (first, second) = (free_port(), free_port());
    {
        let bench = start(dir.path());
        let listeners = [tcp(first), tcp(second)];
        let params = json!({ "name": "v", "listeners": listeners, "ana_reporting": false });
        bench.call(PUBLISH, params);
    }
    drop(with(dir.path(), Settings::default()));
    {
        let bench = with(dir.path(), Settings::default());
        until(&bench, "open", |v| v["state"] == "healthy");
        assert_eq!(paths(&bench), ["TCP -", "TCP -"]);
        // The record as version 0.1 stored it.
        let mut old = bench.engine.journal.select(|e| e.record.method == PUBLISH);
        let mut record = old.remove(0).record;
        record
            .params
            .as_object_mut()
            .unwrap()
            .remove("ana_reporting");
        let change = Change(vec![Edit::Put(record)]);
        bench.run(bench.engine.journal.commit(change)).unwrap();
    }
    {
        let bench = with(dir.path(), Settings::default());
        until(&bench, "open", |v| v["state"] == "healthy");
        assert_eq!(paths(&bench), ["TCP non_optimized", "TCP non_optimized"]);
        let set = json!({ "nqn": NQN, "listen_address": tcp(first), "ana_state": "optimized" });
        bench.call("nvmf_subsystem_listener_set_ana_state", set);
    }
    let bench = with(dir.path(), Settings::default());
    until(&bench, "open", |v| v["state"] == "healthy");
    assert_eq!(paths(&bench), ["TCP non_optimized", "TCP optimized"]);
}

/// Goal: a policy applies to every listener, whichever call added it, and after a restart. A policy
/// that excludes all listeners is refused.
#[test]
fn a_policy_applies_to_all_listeners() {
    let dir = tempfile::tempdir().unwrap();
    {
        let bench = start(dir.path());
        let port = free_port();
        bench.call(PUBLISH, json!({ "name": "v", "listeners": [tcp(port)] }));
        let refused = bench.refused("volume_set", policy("rdma-only"));
        assert_eq!(facts(&refused), (-22, Some("settings.transport_policy")));
        let message = refused.to_string();
        assert!(
            message.contains("admits RDMA only") && message.contains("use TCP"),
            "{message}"
        );
        assert_eq!(paths(&bench), ["TCP non_optimized"]);
        let add = json!({ "nqn": NQN, "listen_address": rdma() });
        bench.call("nvmf_subsystem_add_listener", add);
        bench.call("volume_set", policy("rdma-only"));
        let withheld = "TCP non_optimized withheld transport_policy";
        assert_eq!(paths(&bench), ["RDMA optimized", withheld]);
        let add = json!({ "nqn": NQN, "listen_address": tcp(free_port()) });
        bench.call("nvmf_subsystem_add_listener", add);
        assert_eq!(paths(&bench), ["RDMA optimized", withheld, withheld]);
        let all = bench.call("nvmf_get_listeners", json!(null));
        assert_eq!(
            all["listeners"].as_array().unwrap().len(),
            3,
            "they stay open: {all}"
        );
    }
    let bench = with(dir.path(), Settings::default());
    for record in bench.engine.journal.waiting() {
        bench.run(bench.engine.replay(&record));
    }
    until(&bench, "open", |v| v["state"] == "healthy");
    let withheld = "TCP non_optimized withheld transport_policy";
    assert_eq!(paths(&bench), ["RDMA optimized", withheld, withheld]);
    bench.call("volume_set", policy("any"));
    assert_eq!(
        paths(&bench),
        ["RDMA optimized", "TCP non_optimized", "TCP non_optimized"]
    );
}

/// Goal: a volume is published by address on a listener of the file: the list shows one listener in
/// state `listening`.
#[test]
fn a_shared_listener_is_listed_once() {
    let dir = tempfile::tempdir().unwrap();
    let port = free_port();
    let text = format!("[[nvmf.listener]]\nname = \"lo\"\nport = {port}\n");
    let loaded = crate::config::load_text(Some(("nacre.toml", &text)), [], &[]).unwrap();
    let bench = with(dir.path(), loaded.settings);
    let listed = || bench.call("nvmf_get_listeners", json!(null))["listeners"].clone();
    let state_of = |listed: &Value| (listed[0]["actual"].clone(), listed[0]["subsystems"].clone());
    assert_eq!(state_of(&listed()), (json!("idle"), json!([])));
    file(&bench, dir.path(), "a", 8);
    bench.call("volume_create", json!({ "name": "v", "devices": ["a"] }));
    bench.call(PUBLISH, json!({ "name": "v", "listeners": [tcp(port)] }));
    let now = listed();
    assert_eq!(state_of(&now), (json!("listening"), json!([NQN])));
    assert_eq!(
        (now.as_array().unwrap().len(), &now[0]["listener"]),
        (1, &json!("lo"))
    );
    let metrics = bench.call("metrics_get", json!(null)).to_string();
    assert!(!metrics.contains("no_subsystem"), "{metrics}");
    bench.call("volume_unpublish", json!({ "name": "v" }));
    assert_eq!(state_of(&listed()), (json!("idle"), json!([])));
}
