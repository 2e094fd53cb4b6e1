//! Tests of several paths to one subsystem: attached, shown, divided among, disabled, detached, and
//! restored after a restart.

use serde_json::{Value, json};

use super::{params, start, target};
use crate::config::load_text;
use crate::methods::testing::TestDaemon;
use crate::store::Store;

const ATTACH: &str = "bdev_nvme_attach_controller";
const NQN: &str = "nqn.2025-01.io.nacre:far";

/// A second listener of the far daemon's subsystem.
pub(super) fn listen(far: &TestDaemon, nqn: &str) -> u16 {
    let at = json!({ "trtype": "TCP", "traddr": "127.0.0.1", "trsvcid": "0" });
    let listener = json!({ "nqn": nqn, "listen_address": at });
    far.call("nvmf_subsystem_add_listener", listener);
    let listeners = far.call("nvmf_subsystem_get_listeners", json!({ "nqn": nqn }));
    let last = listeners.as_array().unwrap().last().unwrap();
    let port = last["address"]["trsvcid"].as_str().unwrap();
    port.parse().unwrap()
}

fn ports(daemon: &TestDaemon) -> Vec<String> {
    let shown = daemon.call("bdev_nvme_get_controllers", json!({ "name": "there" }));
    let all = shown[0]["ctrlrs"].as_array().unwrap();
    all.iter()
        .map(|one| one["trid"]["trsvcid"].as_str().unwrap().to_owned())
        .collect()
}

/// Goal: the statistics of transports count the I/O of a remote device on its reactor. Method: a
/// volume on a device of another daemon, whose creation reads and writes labels.
#[test]
fn transport_statistics() {
    let folder = tempfile::tempdir().unwrap();
    let (_far, address) = target();
    let daemon = start(folder.path());
    let statistics = || daemon.call("bdev_nvme_get_transport_statistics", Value::Null);
    assert_eq!(statistics(), json!({ "poll_groups": [] }));
    daemon.call(ATTACH, params(address));
    let volume = json!({ "name": "v", "devices": ["theren1"] });
    daemon.call("volume_create", volume);
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
    loop {
        let all = statistics();
        let tcp = all.pointer("/poll_groups/0/transports/0");
        let count = |name: &str| tcp.and_then(|tcp| tcp[name].as_u64()).unwrap_or(0);
        if count("nvme_completions") > 1 {
            assert_eq!(tcp.unwrap()["trname"], "TCP");
            assert!(
                count("submitted_requests") >= count("nvme_completions"),
                "{all}"
            );
            assert!(
                count("polls") >= count("idle_polls") + count("socket_completions"),
                "{all}"
            );
            assert!(count("socket_completions") > 0, "{all}");
            break;
        }
        assert!(std::time::Instant::now() < deadline, "{all}");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}

/// Goal: a second path is attached, used by a policy, disabled and enabled, restored, and detached
/// alone; paths that SPDK refuses are refused.
#[test]
fn two_paths() {
    let folder = tempfile::tempdir().unwrap();
    let (far, address) = target();
    let daemon = start(folder.path());
    let first = params(address);
    let nqn = first["subnqn"].as_str().unwrap().to_owned();
    let mut second = params(address);
    second["trsvcid"] = json!(listen(&far, &nqn).to_string());
    daemon.call(ATTACH, first.clone());
    assert_eq!(daemon.refused(ATTACH, first.clone()).code, -114);

    let with = |field: &str, value: Value| {
        let mut params = second.clone();
        params[field] = value;
        params
    };
    for (field, value, code) in [
        ("multipath", json!("disable"), -114),
        ("subnqn", json!(format!("{NQN}:other")), -22),
        ("hostnqn", json!("nqn.2025-01.io.nacre:somebody"), -22),
        (
            "multipath_opts",
            json!({ "policy": "active_passive", "min_io": 3 }),
            -22,
        ),
        ("trsvcid", json!("1"), -5),
    ] {
        let refused = daemon.refused(ATTACH, with(field, value));
        assert_eq!(refused.code, code, "{field}: {refused}");
    }
    assert_eq!(ports(&daemon).len(), 1, "nothing stays of a refused path");
    let attached = daemon.call(ATTACH, with("multipath", json!("multipath")));
    assert_eq!(attached, json!(["theren1"]));
    assert_eq!(ports(&daemon).len(), 2);

    let policy = "bdev_nvme_set_multipath_policy";
    let set = json!({ "name": "theren1", "policy": "active_active", "selector": "queue_depth" });
    daemon.call(policy, set.clone());
    let mut wrong = set.clone();
    wrong["rr_min_io"] = json!(2);
    assert_eq!(daemon.refused(policy, wrong).code, -22);
    let stat = daemon.call("bdev_nvme_get_path_iostat", json!({ "name": "theren1" }));
    assert_eq!(stat["stats"].as_array().unwrap().len(), 2);
    let paths = daemon.call("remote_get_paths", json!({ "name": "theren1" }));
    let shown = |field: &str| [0, 1].map(|at| paths[at][field].clone());
    assert_eq!(shown("state"), ["enabled", "enabled"]);
    assert_eq!(shown("ana_state"), ["optimized", "optimized"]);
    assert_eq!(shown("controller"), ["there", "there"]);
    assert_eq!(paths[1]["trid"]["trsvcid"], second["trsvcid"]);
    let other = json!({ "name": "elsewhere" });
    assert_eq!(daemon.refused("remote_get_paths", other).code, -19);
    let metrics = daemon.call("metrics_get", Value::Null).to_string();
    assert!(metrics.contains("nacre_remote_path_state"), "{metrics}");
    let prefer = "bdev_nvme_set_preferred_path";
    let none = json!({ "name": "theren1", "cntlid": 4711 });
    assert_eq!(daemon.refused(prefer, none).code, -19);

    let shown = daemon.call("bdev_nvme_get_controllers", json!({ "name": "there" }));
    let cntlid = &shown[0]["ctrlrs"][1]["cntlid"];
    let one = json!({ "name": "there", "cntlid": cntlid });
    daemon.call(prefer, json!({ "name": "theren1", "cntlid": cntlid }));
    daemon.call("bdev_nvme_disable_controller", one.clone());
    let shown = daemon.call("bdev_nvme_get_controllers", json!({ "name": "there" }));
    let states = [0, 1].map(|at| shown[0]["ctrlrs"][at]["state"].clone());
    assert_eq!(states, ["enabled", "disabled"]);
    assert_eq!(
        daemon
            .refused("bdev_nvme_disable_controller", one.clone())
            .code,
        -114
    );
    daemon.call("bdev_nvme_enable_controller", one);

    drop(daemon);
    let daemon = start(folder.path());
    assert_eq!(ports(&daemon).len(), 2, "restored");
    let bdevs = daemon.call("bdev_get_bdevs", json!({ "name": "theren1" }));
    let specific = &bdevs[0]["driver_specific"];
    assert_eq!(specific["mp_policy"], "active_active");
    assert_eq!(specific["nvme"].as_array().unwrap().len(), 2);

    let port = address.port().to_string();
    let detach = json!({ "name": "there", "trsvcid": port });
    daemon.call("bdev_nvme_detach_controller", detach);
    let left = ports(&daemon);
    assert_eq!(left, [second["trsvcid"].as_str().unwrap()]);
    daemon.call("bdev_get_bdevs", json!({ "name": "theren1" }));
    drop(daemon);
    let daemon = start(folder.path());
    assert_eq!(ports(&daemon), left);
    daemon.call("bdev_nvme_detach_controller", json!({ "name": "there" }));
    assert_eq!(daemon.call("bdev_get_bdevs", Value::Null), json!([]));
}

/// Goal: a `[[remote]]` with two addresses has two paths from the start, divided as it says, and
/// nothing of it is stored. A controller without a policy of its own gets that of the options.
#[test]
fn declared_paths() {
    let folder = tempfile::tempdir().unwrap();
    let open = || Some(Store::open(&folder.path().join("state")).unwrap());
    let (far, address) = target();
    let subsystem = params(address)["subnqn"].as_str().unwrap().to_owned();
    let second = listen(&far, &subsystem);
    let policy = |daemon: &TestDaemon| {
        let bdevs = daemon.call("bdev_get_bdevs", json!({ "name": "theren1" }));
        let specific = &bdevs[0]["driver_specific"];
        ["mp_policy", "selector", "rr_min_io"].map(|field| specific[field].clone())
    };
    let load = |keys: &str| {
        let first = format!("tcp://{address}/{subsystem}?hostnqn=nqn.2025-01.io.nacre:near");
        let second = format!("tcp://127.0.0.1:{second}/{subsystem}");
        let text =
            format!("[[remote]]\nname = \"there\"\naddress = [\"{first}\", \"{second}\"]\n{keys}");
        load_text(Some(("n.toml", &text)), [], &[])
            .unwrap()
            .settings
    };
    let divided = "policy = \"active_active\"\nmin_io = 4\n";
    let daemon = TestDaemon::with(load(divided), open());
    assert_eq!(
        ports(&daemon),
        [address.port().to_string(), second.to_string()]
    );
    assert_eq!(
        policy(&daemon),
        [json!("active_active"), json!("round_robin"), json!(4)]
    );
    let objects = daemon.call("state_get", Value::Null)["objects"].clone();
    for object in objects.as_array().unwrap() {
        assert_eq!(object["kept_in"], "config", "{object}");
    }
    assert!(daemon.engine.declared.missing().is_empty());
    let options = json!({ "policy": "active_active", "selector": "queue_depth" });
    daemon.call(
        "bdev_nvme_set_options",
        json!({ "multipath_opts": options }),
    );
    drop(daemon);
    let daemon = TestDaemon::with(load(""), open());
    assert_eq!(ports(&daemon).len(), 2);
    assert_eq!(
        policy(&daemon),
        [json!("active_active"), json!("queue_depth"), Value::Null]
    );
}
