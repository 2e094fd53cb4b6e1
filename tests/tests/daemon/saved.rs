//! Tests that an empty daemon loads a saved configuration with volumes.

use nacre_bdev::Status;
use nacre_tests::daemon::{Daemon, Place, free_address};
use nacre_tests::host::{Host, pattern};
use serde_json::{Value, json};

use crate::ledger::BLOCK;
use crate::volumes::{healthy, patient, volume};

const SIZE: u64 = 4 << 20;
const NAMED: &str = "nqn.2025-01.io.nacre:v";
const LOOKED_UP: &str = "nqn.2025-01.io.nacre:w";

/// All calls of a saved configuration, in order.
fn calls(saved: &Value) -> Vec<(String, Value)> {
    let parts = saved["subsystems"].as_array().expect("a list").iter();
    let calls = parts.flat_map(|part| part["config"].as_array().expect("a list"));
    let call = |call: &Value| {
        let method = call["method"].as_str().expect("a name");
        (method.to_owned(), call["params"].clone())
    };
    calls.map(call).collect()
}

/// Like rpc.py's load_config: every call that the daemon accepts in its present state.
fn load(daemon: &mut Daemon, saved: &Value) {
    let known = daemon.call("rpc_get_methods", json!({ "current": true }));
    let known = known.as_array().expect("a list");
    let now = calls(saved).into_iter();
    let now = now.filter(|(method, _)| known.contains(&json!(method)));
    for (method, params) in now {
        daemon.call(&method, params);
    }
}

/// Both volumes as hosts see them.
fn seen(daemon: &mut Daemon) -> [Value; 2] {
    [NAMED, LOOKED_UP].map(|nqn| {
        let mut seen = daemon.subsystem(nqn);
        // Local device names are not visible to hosts.
        let namespace = seen["namespaces"][0].as_object_mut().expect("one");
        namespace.retain(|key, _| !["name", "bdev_name"].contains(&key.as_str()));
        seen
    })
}

/// Goal: a saved configuration restores published volumes on an empty daemon with new disks, with
/// or without listeners in its configuration file. Hosts find the same subsystems at the same
/// addresses. The listeners belong to the volumes: they follow the volume's policy, and disappear
/// when the volume is unpublished. Method: one volume is published on an address and renamed later,
/// one wherever the configuration file says. The data directory and the disks are deleted, the
/// second time also that file.
#[test]
fn published_volumes_are_published_again() {
    let (named, declared) = (free_address("127.0.0.1"), free_address("127.0.0.1"));
    let place = Place::new();
    let toml = place.path("nacre.toml");
    let text = format!(
        "[[nvmf.listener]]\nname = \"lo\"\niface = [\"ip:127.0.0.1\"]\nport = {}\n",
        declared.port()
    );
    std::fs::write(&toml, &text).expect("a file");
    let place = place.with("NACRE_CONFIG", toml.display());
    let mut daemon = place.start();
    for name in ["a", "b", "c"] {
        daemon.create_file(name, BLOCK as u32, SIZE);
    }
    for (name, devices) in [("u", json!(["a", "b"])), ("w", json!(["c"]))] {
        let settings = json!({ "settle_ms": 50 });
        let new = json!({ "name": name, "devices": devices, "settings": settings });
        daemon.call("volume_create", new);
    }
    daemon.call("volume_rename", json!({ "name": "u", "new_name": "v" }));
    healthy(&mut daemon);
    let limit = json!({ "name": "v", "rw_ios_per_sec": 100_000 });
    daemon.call("bdev_set_qos_limit", limit);
    let listener =
        json!({ "trtype": "TCP", "traddr": "127.0.0.1", "trsvcid": named.port().to_string() });
    let hosts = [patient().hostnqn.to_string()];
    let wish = json!({ "name": "v", "hosts": hosts, "listeners": [listener] });
    assert_eq!(daemon.call("volume_publish", wish)["nqn"], NAMED);
    let wish = json!({ "name": "w", "allow_any_host": true });
    assert_eq!(daemon.call("volume_publish", wish)["nqn"], LOOKED_UP);
    let before = seen(&mut daemon);
    assert_eq!(daemon.listeners(NAMED), [named]);
    assert_eq!(daemon.listeners(LOOKED_UP), [declared]);
    let saved = daemon.call("config_export", Value::Null);
    daemon.stop();

    let forget = |text: &str| {
        std::fs::remove_dir_all(place.path("data")).expect("its own");
        std::fs::write(&toml, text).expect("its own");
        for name in ["a", "b", "c"] {
            // A configuration does not create files: a missing disk would be mistaken for a new
            // one.
            let disk = std::fs::File::create(place.path(&format!("{name}.img"))).expect("its own");
            disk.set_len(SIZE).expect("its own");
        }
    };
    forget(&text);
    let mut daemon = place.start();
    load(&mut daemon, &saved);
    assert_eq!(seen(&mut daemon), before);
    daemon.stop();

    forget("");
    let mut daemon = place.start();
    assert_eq!(daemon.call("volume_list", Value::Null), json!([]));
    load(&mut daemon, &saved);
    assert_eq!(seen(&mut daemon), before);
    let now = healthy(&mut daemon);
    assert_eq!(now["subsystems"], json!([NAMED]));
    let device = daemon.call("bdev_get_bdevs", json!({ "name": "v" }));
    let limits = &device[0]["assigned_rate_limits"];
    assert_eq!(limits["rw_ios_per_sec"], 100_000);
    let mut host = Host::connected(named, patient(), &[1]);
    let data = pattern(BLOCK, 1);
    assert_eq!(host.write(0, 7, 1, &data), Status::Ok);
    assert_eq!(host.read(0, 7, 1, BLOCK), data);
    host.disconnect();

    // Saving again gives the same result.
    let again = daemon.call("config_export", Value::Null);
    let published = |saved: &Value| {
        let ours = calls(saved).into_iter();
        let ours = ours.filter(|(method, _)| method == "volume_publish");
        let mut ours: Vec<Value> = ours.map(|(_, params)| params).collect();
        ours.sort_by_key(|params| params["nqn"].to_string());
        ours
    };
    assert_eq!(published(&again).len(), 2);
    assert_eq!(published(&again), published(&saved));
    // Publishing again keeps an existing publication and creates no other.
    for params in published(&saved) {
        daemon.call("volume_publish", params);
    }
    assert_eq!(seen(&mut daemon), before);

    // The listeners belong to the volumes.
    for (name, nqn) in [("v", NAMED), ("w", LOOKED_UP)] {
        let policy = json!({ "name": name, "settings": { "transport_policy": "rdma-only" } });
        let refused = daemon.try_call("volume_set", policy);
        assert!(
            refused.is_err_and(|e| e.to_string().contains("use TCP")),
            "its listeners count"
        );
        assert_eq!(
            daemon.call("volume_unpublish", json!({ "name": name })),
            true
        );
        let gone = daemon.try_call("nvmf_get_subsystems", json!({ "nqn": nqn }));
        assert!(gone.is_err(), "{gone:?}");
    }
    let adopt = json!({ "name": "v", "nqn": NAMED, "adopt": true });
    assert!(daemon.try_call("volume_publish", adopt).is_err());
    assert_eq!(volume(&mut daemon)["subsystems"], json!([]));
    daemon.stop();
}
