//! Goal: a failover test takes a listener out of use only while hosts have another, stores nothing,
//! and ends by itself, by call, or by a state that an operator sets.

use serde_json::{Value, json};

use super::super::super::testing::{TestDaemon, test_daemon};
use super::{NQN, address, durable, events, listen, malloc, namespace, turn_until};

const TEST: &str = "nvmf_subsystem_test_failover";
const SET: &str = "nvmf_subsystem_listener_set_ana_state";

fn reporting(daemon: &TestDaemon) {
    daemon.call(
        "nvmf_create_subsystem",
        json!({ "nqn": NQN, "allow_any_host": true, "ana_reporting": true, "max_namespaces": 2 }),
    );
}

fn at(port: u16) -> Value {
    address(&port.to_string())
}

fn test(port: u16, seconds: u32) -> Value {
    json!({ "nqn": NQN, "listen_address": at(port), "seconds": seconds })
}

fn set(daemon: &TestDaemon, port: u16, state: &str, group: Option<u32>) {
    let mut params = json!({ "nqn": NQN, "listen_address": at(port), "ana_state": state });
    if let Some(group) = group {
        params["anagrpid"] = group.into();
    }
    daemon.call(SET, params);
}

fn states(daemon: &TestDaemon, port: u16) -> Vec<String> {
    let all = daemon.call("nvmf_subsystem_get_listeners", json!({ "nqn": NQN }));
    let port = port.to_string();
    let here = |l: &&Value| l["address"]["trsvcid"] == port.as_str();
    let listener = all.as_array().unwrap().iter().find(here).unwrap();
    let word = |s: &Value| s["ana_state"].as_str().unwrap().to_owned();
    listener["ana_states"]
        .as_array()
        .unwrap()
        .iter()
        .map(word)
        .collect()
}

/// Goal: states of single groups return after the time, and a longer test replaces the timer.
#[test]
fn states_return_by_themselves() {
    let daemon = test_daemon();
    reporting(&daemon);
    let (first, second) = (listen(&daemon, NQN), listen(&daemon, NQN));
    set(&daemon, first, "non_optimized", Some(2));
    let before = states(&daemon, first);
    assert_eq!(before, ["optimized", "non_optimized"]);
    let changes = events(&daemon, "nvmf_ana_change").len();
    let reply = daemon.call(TEST, test(first, 1));
    assert_eq!(reply["hosts_without_path"], json!([]));
    assert_eq!(reply["accessible"][0]["trsvcid"], second.to_string());
    daemon.call(TEST, test(first, 2));
    assert_eq!(states(&daemon, first), ["inaccessible"; 2]);
    assert_eq!(states(&daemon, second), ["optimized"; 2]);
    daemon.run(async { tokio::time::sleep(std::time::Duration::from_millis(1300)).await });
    assert_eq!(
        states(&daemon, first),
        ["inaccessible"; 2],
        "the first timer does not count"
    );
    turn_until(&daemon, "the states return", || {
        states(&daemon, first) == before
    });
    assert_eq!(events(&daemon, "nvmf_ana_change").len(), changes + 3);
    // Ended by a call, and again without a test.
    daemon.call(TEST, test(first, 60));
    daemon.call(TEST, test(first, 0));
    daemon.call(TEST, test(first, 0));
    assert_eq!(states(&daemon, first), before);
}

/// Goal: a state that is set during a test stays after it.
#[test]
fn a_state_that_is_set_stays() {
    let daemon = test_daemon();
    reporting(&daemon);
    let (first, _) = (listen(&daemon, NQN), listen(&daemon, NQN));
    daemon.call(TEST, test(first, 1));
    set(&daemon, first, "non_optimized", None);
    daemon.run(async { tokio::time::sleep(std::time::Duration::from_millis(1300)).await });
    assert_eq!(states(&daemon, first), ["non_optimized"; 2]);
}

/// Goal: a state of one group that is set during a test stays, and the other groups return.
#[test]
fn a_state_of_one_group_that_is_set_stays() {
    let daemon = test_daemon();
    reporting(&daemon);
    let (first, _) = (listen(&daemon, NQN), listen(&daemon, NQN));
    daemon.call(TEST, test(first, 600));
    set(&daemon, first, "non_optimized", Some(2));
    assert_eq!(states(&daemon, first), ["inaccessible", "non_optimized"]);
    daemon.call(TEST, test(first, 0));
    assert_eq!(states(&daemon, first), ["optimized", "non_optimized"]);
}

/// Goal: a listener that is removed during a test and added again has its own states, also after
/// the test. Method: another subsystem keeps the address open.
#[test]
fn a_listener_that_comes_back_is_under_no_test() {
    let daemon = test_daemon();
    reporting(&daemon);
    let (first, _) = (listen(&daemon, NQN), listen(&daemon, NQN));
    let other = "nqn.2016-06.io.spdk:other";
    daemon.call("nvmf_create_subsystem", json!({ "nqn": other }));
    let place = |nqn: &str| json!({ "nqn": nqn, "listen_address": at(first) });
    daemon.call("nvmf_subsystem_add_listener", place(other));
    daemon.call(TEST, test(first, 600));
    daemon.call("nvmf_subsystem_remove_listener", place(NQN));
    daemon.call("nvmf_subsystem_add_listener", place(NQN));
    set(&daemon, first, "inaccessible", Some(1));
    let own = states(&daemon, first);
    daemon.call(TEST, test(first, 0));
    assert_eq!(states(&daemon, first), own);
}

/// Goal: a daemon that ends during a test serves the stored states afterwards.
#[test]
fn nothing_is_stored() {
    let dir = tempfile::tempdir().unwrap();
    let first = {
        let daemon = durable(dir.path());
        reporting(&daemon);
        let first = listen(&daemon, NQN);
        listen(&daemon, NQN);
        set(&daemon, first, "non_optimized", None);
        daemon.call(TEST, test(first, 600));
        assert_eq!(states(&daemon, first), ["inaccessible"; 2]);
        first
    };
    assert_eq!(states(&durable(dir.path()), first), ["non_optimized"; 2]);
}

/// Goal: a test is refused where I/O would stop: without another accessible listener, without one
/// of the transport, and with a host that has one path; `force` allows the last.
#[test]
fn io_must_have_another_path() {
    let daemon = test_daemon();
    malloc(&daemon, "m0", None);
    reporting(&daemon);
    namespace(&daemon, NQN, "m0");
    let first = listen(&daemon, NQN);
    let field = |params: Value| {
        let refused = daemon.refused(TEST, params);
        let facts = refused.data.unwrap();
        (refused.code, facts.field.unwrap_or_default(), facts.cause)
    };
    let (code, at, cause) = field(test(first, 5));
    assert_eq!((code, at.as_str()), (-16, "listen_address"), "{cause}");
    let second = listen(&daemon, NQN);
    set(&daemon, second, "inaccessible", Some(1));
    assert_eq!(
        field(test(first, 5)).0,
        -16,
        "one group is inaccessible there"
    );
    set(&daemon, second, "optimized", None);
    let to = |kind: &str| {
        let mut params = test(first, 5);
        params["to"] = kind.into();
        params
    };
    assert_eq!(field(to("rdma")).1, "to");
    assert_eq!(field(to("fc")).1, "to");
    assert_eq!(field(test(first, 3601)).1, "seconds");
    let connect = |port| {
        let nqn = |text| nacre_nvmf_wire::Nqn::new(text).unwrap();
        let options = nacre_nvmf::host::HostOptions::new(nqn(super::HOST), [7; 16], nqn(NQN));
        super::connected::connect_as(port, options).unwrap()
    };
    let lonely = connect(first);
    let (_, at, cause) = field(test(first, 5));
    assert_eq!(at, "listen_address");
    assert!(cause.contains(super::HOST), "{cause}");
    let mut forced = test(first, 5);
    forced["force"] = true.into();
    assert_eq!(
        daemon.call(TEST, forced)["hosts_without_path"],
        json!([super::HOST])
    );
    daemon.call(TEST, test(first, 0));
    let other = connect(second);
    assert_eq!(
        daemon.call(TEST, to("TCP"))["hosts_without_path"],
        json!([])
    );
    drop((lonely, other));
}
