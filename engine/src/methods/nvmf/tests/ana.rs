//! Goal: ANA states are set, shown, stored and restored as SPDK's tools expect, and listeners match
//! the configuration file.

use nacre_random_ports::local_port;
use serde_json::{Value, json};

use super::super::super::testing::{TestDaemon, test_daemon};
use super::{NQN, address, durable, events, listen, malloc, namespace, ports, subsystem};
use crate::config::load_text;

const SET: &str = "nvmf_subsystem_listener_set_ana_state";

fn reporting(daemon: &TestDaemon, nqn: &str) {
    daemon.call(
        "nvmf_create_subsystem",
        json!({ "nqn": nqn, "allow_any_host": true, "ana_reporting": true, "max_namespaces": 3 }),
    );
}

fn states(daemon: &TestDaemon) -> Vec<Vec<String>> {
    let all = daemon.call("nvmf_subsystem_get_listeners", json!({ "nqn": NQN }));
    let word = |s: &Value| s["ana_state"].as_str().unwrap().to_owned();
    let of = |l: &Value| {
        l["ana_states"]
            .as_array()
            .unwrap()
            .iter()
            .map(word)
            .collect()
    };
    all.as_array().unwrap().iter().map(of).collect()
}

fn set(daemon: &TestDaemon, port: u16, state: &str, group: Option<u32>) {
    let mut params =
        json!({ "nqn": NQN, "listen_address": address(&port.to_string()), "ana_state": state });
    if let Some(group) = group {
        params["anagrpid"] = group.into();
    }
    assert_eq!(daemon.call(SET, params), true);
}

/// Goal: a state that was set is shown per group, sent as an event, and restored after a restart,
/// for one group and for all.
#[test]
fn states_are_shown_and_survive() {
    let dir = tempfile::tempdir().unwrap();
    let port = {
        let daemon = durable(dir.path());
        reporting(&daemon, NQN);
        let port = listen(&daemon, NQN);
        assert_eq!(states(&daemon), [["optimized"; 3]]);
        set(&daemon, port, "inaccessible", Some(2));
        set(&daemon, port, "non_optimized", None);
        assert_eq!(
            states(&daemon),
            [["non_optimized"; 3]],
            "one state for all groups"
        );
        set(&daemon, port, "persistent_loss", Some(3));
        set(&daemon, port, "change", Some(1));
        assert_eq!(events(&daemon, "nvmf_ana_change"), [NQN; 4]);
        let other = json!({ "nqn": NQN, "listen_address": address(&port.to_string()), "ana_state": "optimized", "anagrpid": 4 });
        let refused = daemon.refused(SET, other);
        assert_eq!(refused.data.unwrap().field.as_deref(), Some("anagrpid"));
        port
    };
    let daemon = durable(dir.path());
    assert_eq!(
        states(&daemon),
        [["change", "non_optimized", "persistent_loss"]]
    );
    // SPDK's loader needs the listener before the settings of the listener.
    let config = daemon.call("framework_get_config", json!({ "name": "nvmf" }));
    let calls: Vec<&str> = config
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|c| c["method"].as_str())
        .collect();
    let at = |method: &str| calls.iter().position(|c| *c == method).unwrap();
    assert!(at("nvmf_subsystem_add_listener") < at(SET), "{calls:?}");
    assert_eq!(calls.iter().filter(|c| **c == SET).count(), 3);

    let listener = json!({ "nqn": NQN, "listen_address": address(&port.to_string()) });
    daemon.call("nvmf_subsystem_remove_listener", listener.clone());
    daemon.call("nvmf_subsystem_add_listener", listener);
    assert_eq!(
        states(&daemon),
        [["optimized"; 3]],
        "no record of a removed listener remains"
    );
}

/// Goal: a namespace moved to another ANA group is still in it after a restart.
#[test]
fn a_namespace_stays_in_its_new_group_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let group = |daemon: &TestDaemon| {
        let all = daemon.call("nvmf_get_subsystems", json!({ "nqn": NQN }));
        all[0]["namespaces"][0]["anagrpid"].clone()
    };
    {
        let daemon = durable(dir.path());
        reporting(&daemon, NQN);
        malloc(&daemon, "ram", None);
        namespace(&daemon, NQN, "ram");
        assert_eq!(group(&daemon), 1);
        let there = json!({ "nqn": NQN, "nsid": 1, "anagrpid": 3 });
        let method = "nvmf_subsystem_set_ns_ana_group";
        assert_eq!(daemon.call(method, there.clone()), true);
        assert_eq!(daemon.call(method, there), true, "the listener exists");
        assert_eq!(group(&daemon), 3);
        assert_eq!(events(&daemon, "nvmf_ana_change"), [NQN]);
    }
    assert_eq!(group(&durable(dir.path())), 3);
}

/// Goal: a listener has its ANA state from the start, and options that its transport lacks.
#[test]
fn a_listener_starts_with_its_state_and_options() {
    let daemon = test_daemon();
    reporting(&daemon, NQN);
    malloc(&daemon, "ram", None);
    namespace(&daemon, NQN, "ram");
    let params = json!({
        "nqn": NQN, "listen_address": address("0"), "ana_state": "inaccessible",
        "options": { "in_capsule_data_size": 16384, "max_queue_depth": 32, "tos": 104 },
    });
    daemon.call("nvmf_subsystem_add_listener", params);
    assert_eq!(states(&daemon), [["inaccessible"; 3]]);
    let config = daemon.call("framework_get_config", json!({ "name": "nvmf" }));
    let added = config
        .as_array()
        .unwrap()
        .iter()
        .find(|c| c["method"] == "nvmf_subsystem_add_listener")
        .unwrap();
    assert_eq!(added["params"]["ana_state"], "inaccessible");
    assert_eq!(added["params"]["options"]["tos"], 104);
    let shown = daemon.call("nvmf_subsystem_get_listeners", json!({ "nqn": NQN }));
    assert_eq!(shown[0]["options"], added["params"]["options"]);
    let all = daemon.call("nvmf_get_listeners", json!(null));
    assert_eq!(all["listeners"][0]["actual"], "listening");
    assert_eq!(all["listeners"][0]["subsystems"], json!([NQN]));
    assert_eq!(all["listeners"][0]["listener"], Value::Null);
}

fn declared(text: &str) -> crate::config::Settings {
    load_text(Some(("nacre.toml", text)), [], &[])
        .unwrap_or_else(|e| panic!("{e}"))
        .settings
}

/// Goal: a listener of the file reports missing RDMA with the reason; TCP is the fallback or
/// withheld. Settings that RPC makes about it survive a restart.
#[test]
fn listeners_of_the_file_report_their_state() {
    let dir = tempfile::tempdir().unwrap();
    let port = local_port();
    let text = format!(
        "[[nvmf.listener]]\nname = \"data\"\niface = [\"name:lo\", \"ip:127.0.0.1\"]\nport = {port}\nrdma = \"prefer\"\n\
         [[nvmf.subsystem]]\nnqn = \"{NQN}\"\nallow_any_host = true\n"
    );
    let open = || Some(crate::store::Store::open(dir.path()).unwrap());
    {
        let daemon = TestDaemon::with(declared(&text), open());
        let all = daemon.call("nvmf_get_listeners", json!(null));
        let of = |trtype: &str| {
            let listeners = all["listeners"].as_array().unwrap();
            let is = |l: &&Value| {
                l["address"]["trtype"] == trtype && l["address"]["traddr"] == "127.0.0.1"
            };
            listeners.iter().find(is).unwrap().clone()
        };
        let (tcp, rdma) = (of("TCP"), of("RDMA"));
        assert_eq!(
            (&tcp["wanted"], &tcp["actual"], &tcp["iface"]),
            (&json!("listen"), &json!("listening"), &json!("lo")),
            "{tcp}"
        );
        assert_eq!(
            (&rdma["wanted"], &rdma["actual"], &rdma["reason"]),
            (&json!("prefer"), &json!("absent"), &json!("no_rdma_dev")),
            "{rdma}"
        );
        // Matches the doctor's result for this machine.
        match nacre_transport_rdma_link::NoDevice::of(&nacre_transport_rdma_link::Roots::real()) {
            Some(missing) => assert_eq!(rdma["remedy"], missing.remedy()),
            None => assert!(rdma["remedy"].is_string(), "{rdma}"),
        }
        let sent = events(&daemon, "transport_downgraded");
        assert!(
            sent.iter()
                .any(|t| t.contains("127.0.0.1") && t.ends_with("RDMA: no_rdma_dev")),
            "{sent:?}"
        );
        assert!(ports(&daemon, NQN).contains(&port.to_string()));
        assert_eq!(states(&daemon)[0][0], "non_optimized");
        set(&daemon, port, "inaccessible", None);
        let metrics = daemon.call("metrics_get", json!(null)).to_string();
        assert!(metrics.contains("no_rdma_dev"), "{metrics}");
    }
    let daemon = TestDaemon::with(declared(&text), open());
    assert_eq!(
        states(&daemon)[0][0],
        "inaccessible",
        "state set by RPC on the file's listener"
    );
    drop(daemon);
    let withheld = text.replace(
        "rdma = \"prefer\"",
        "rdma = \"prefer\"\ntcp_fallback = false",
    );
    let daemon = TestDaemon::with(declared(&withheld), None);
    let listeners = daemon.call("nvmf_subsystem_get_listeners", json!({ "nqn": NQN }));
    assert_eq!(listeners[0]["withheld"], true);
}

/// Goal: invalid listener settings are refused before the target serves anything.
#[test]
fn invalid_listeners_of_the_file_are_refused_at_start() {
    let port = local_port();
    for (listener, said) in [
        (
            "iface = [\"name:eth99\"]",
            "listener \"default\": no interface matches \"name:eth99\"; have: ",
        ),
        (
            "iface = [\"name:lo\"]\nrdma = \"require\"",
            "listener \"default\": rdma = \"require\", and lo 127.0.0.1 cannot be listened on over RDMA: no_rdma_dev",
        ),
    ] {
        let text = format!("[[nvmf.listener]]\nport = {port}\n{listener}\n");
        let daemon = TestDaemon::waiting_with(declared(&text));
        let error = daemon.run(crate::daemon::init(&daemon.engine)).unwrap_err();
        assert!(error.to_string().contains(said), "{error}");
    }
    // None of this affects subsystems created by RPC.
    let daemon = test_daemon();
    subsystem(&daemon, NQN);
    assert_eq!(ports(&daemon, NQN), [] as [String; 0]);
}
