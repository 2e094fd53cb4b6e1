//! Goal: volumes get other parents and become read-only by RPC, and the daemon reports the use of
//! a pool's space. Method: as in `tests`.

use serde_json::{Value, json};

use super::{POOL, disk, start};
use crate::methods::testing::TestDaemon;

fn with_pool(dir: &std::path::Path) -> TestDaemon {
    let path = dir.join("disk");
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(128 << 20).unwrap();
    let daemon = start(&dir.join("state"));
    disk(&daemon, &path);
    let create = json!({ "name": "pool0", "disk": "disk", "uuid": POOL });
    daemon.call("pool_create", create);
    daemon
}

fn snapshot(daemon: &TestDaemon, lvol: &str, name: &str) -> Value {
    let cut = json!({ "snapshots": [{ "lvol": lvol, "name": name }] });
    daemon.call("lvol_snapshot", cut)[0]["uuid"].clone()
}

/// A volume is separated from one snapshot after the other, is put on another one, and ends as a
/// read-only device; all of that is there after a restart. A volume in use keeps its parent.
#[test]
fn a_volume_gets_other_parents() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = with_pool(dir.path());
    for name in ["v", "w"] {
        let create = json!({ "pool": "pool0", "name": name, "size": "8MiB" });
        daemon.call("lvol_create", create);
    }
    let oldest = snapshot(&daemon, "pool0/v", "a");
    snapshot(&daemon, "pool0/v", "b");
    let v = json!({ "lvol": "pool0/v" });
    let decoupled = daemon.call("lvol_decouple", v.clone());
    assert_eq!(decoupled["parent"], oldest);
    assert_eq!(
        daemon.call("lvol_decouple", v.clone())["parent"],
        json!(null)
    );
    let alone = daemon.refused("lvol_decouple", v);
    assert_eq!(alone.message, "Invalid argument");

    let w_on_a = json!({ "lvol": "pool0/w", "snapshot": "pool0/a" });
    assert_eq!(
        daemon.call("lvol_set_parent", w_on_a.clone())["parent"],
        oldest
    );
    let again = daemon.refused("lvol_set_parent", w_on_a.clone());
    assert_eq!(again.message, "File exists");
    let nqn = "nqn.2016-06.io.spdk:x";
    daemon.call("nvmf_create_subsystem", json!({ "nqn": nqn }));
    let namespace = json!({ "nqn": nqn, "namespace": { "bdev_name": "pool0/w" } });
    daemon.call("nvmf_subsystem_add_ns", namespace);
    let w_on_b = json!({ "lvol": "pool0/w", "snapshot": "pool0/b" });
    let used = daemon.refused("lvol_set_parent", w_on_b);
    assert_eq!(used.message, "Operation not permitted");

    let w = json!({ "lvol": "pool0/w" });
    assert_eq!(daemon.call("lvol_get", w.clone())["read_only"], false);
    assert_eq!(
        daemon.call("lvol_set_read_only", w.clone())["read_only"],
        true
    );
    let resize = json!({ "lvol": "pool0/w", "size": "16MiB" });
    let refused = daemon.refused("lvol_resize", resize);
    assert_eq!(refused.message, "Invalid argument");
    let clone = json!({ "snapshot": "pool0/w", "name": "c" });
    assert_eq!(daemon.call("lvol_clone", clone)["read_only"], false);
    drop(daemon);

    let daemon = start(&dir.path().join("state"));
    let found = daemon.call("lvol_get", w);
    assert_eq!(
        (&found["read_only"], &found["parent"]),
        (&json!(true), &oldest)
    );
    let check = daemon.call("pool_check", json!({ "pool": "pool0" }));
    assert_eq!(check["findings"], json!([]));
}

/// SPDK's calls answer `true`, and refuse with SPDK's codes.
#[test]
fn spdks_calls_change_parents() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = with_pool(dir.path());
    for (name, size) in [("v", 8), ("w", 8), ("big", 16)] {
        let create = json!({
            "lvs_name": "pool0", "lvol_name": name, "size_in_mib": size, "thin_provision": true
        });
        daemon.call("bdev_lvol_create", create);
    }
    let cut = json!({ "lvol_name": "pool0/v", "snapshot_name": "s" });
    let parent = daemon.call("bdev_lvol_snapshot", cut);
    let set = |lvol: &str, parent: &str| json!({ "lvol_name": lvol, "parent_name": parent });
    let name = |lvol: &str| json!({ "name": lvol });
    let call = "bdev_lvol_set_parent";
    assert_eq!(daemon.call(call, set("pool0/w", "pool0/s")), true);
    assert_eq!(
        daemon.call("lvol_get", json!({ "lvol": "pool0/w" }))["parent"],
        parent
    );
    assert_eq!(
        daemon.call("bdev_lvol_decouple_parent", name("pool0/v")),
        true
    );
    assert_eq!(
        daemon.call("bdev_lvol_set_read_only", name("pool0/v")),
        true
    );
    let (invalid, no_device) = ("Invalid argument", "No such device");
    let refusals = [
        (call, set("pool0/x", "pool0/s"), -19, no_device),
        (call, set("pool0/w", "pool0/x"), -19, no_device),
        (call, set("pool0/w", "pool0/s"), -32602, "File exists"),
        (call, set("pool0/w", "pool0/big"), -32602, invalid),
        (call, set("pool0/big", "pool0/s"), -32602, invalid),
        (call, name("pool0/w"), -32603, "Invalid parameters"),
        (
            "bdev_lvol_decouple_parent",
            name("pool0/big"),
            -32602,
            invalid,
        ),
        ("bdev_lvol_decouple_parent", name("pool0/x"), -19, no_device),
        ("bdev_lvol_set_read_only", name("pool0/s"), -32602, invalid),
        ("bdev_lvol_set_read_only", name("pool0/x"), -19, no_device),
    ];
    for (call, params, code, message) in refusals {
        let refused = daemon.refused(call, params.clone());
        let found = (refused.code, &*refused.message);
        assert_eq!(found, (code, message), "{call} {params}: {refused}");
    }
}

/// Each threshold is one event, also where thick volumes take the space; and its return.
#[test]
fn the_use_of_space_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = with_pool(dir.path());
    let events = |kind: &str| {
        let all = daemon.call("events_get", Value::Null);
        let all = all["events"].as_array().unwrap().clone();
        all.into_iter()
            .filter(|event| event["type"] == kind)
            .map(|event| event["facts"]["percent"].clone())
            .collect::<Vec<Value>>()
    };
    for (name, size) in [("v", "88MiB"), ("w", "8MiB")] {
        let create = json!({ "pool": "pool0", "name": name, "size": size, "thick": true });
        daemon.call("lvol_create", create);
        super::until(&daemon, || !events("pool_space_low").is_empty());
    }
    super::until(&daemon, || events("pool_space_low").len() == 2);
    assert_eq!(events("pool_space_low"), [json!(80), json!(90)]);
    assert_eq!(events("pool_space_back"), [] as [Value; 0]);
    daemon.call("lvol_delete", json!({ "lvol": "pool0/v" }));
    super::until(&daemon, || !events("pool_space_back").is_empty());
    assert_eq!(events("pool_space_back"), [json!(0)]);
}

/// Goal: SPDK's clients see parents and clones by name. Method: a snapshot with two clones, as
/// `bdev_get_bdevs` shows them.
#[test]
fn spdk_shows_parents_and_clones_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = with_pool(dir.path());
    daemon.call(
        "lvol_create",
        json!({ "pool": "pool0", "name": "v1", "size": "8MiB" }),
    );
    let cut = json!({ "lvol_name": "pool0/v1", "snapshot_name": "s" });
    daemon.call("bdev_lvol_snapshot", cut);
    let clone = json!({ "snapshot_name": "pool0/s", "clone_name": "c" });
    daemon.call("bdev_lvol_clone", clone);
    let facts = |name: &str| {
        let found = daemon.call("bdev_get_bdevs", json!({ "name": name }));
        found[0]["driver_specific"]["lvol"].clone()
    };
    assert_eq!(facts("pool0/s")["clones"], json!(["c", "v1"]));
    assert_eq!(facts("pool0/c")["base_snapshot"], "s");
    let all = daemon.call("bdev_get_bdevs", json!({}));
    let all = all.as_array().unwrap().iter();
    let snapshot = all.map(|one| &one["driver_specific"]["lvol"]);
    let mut snapshot = snapshot.filter(|lvol| lvol["snapshot"] == true);
    assert_eq!(
        snapshot.next().unwrap()["clones"].as_array().unwrap().len(),
        2
    );
    assert_eq!(facts("pool0/s").get("base_snapshot"), None);
}
