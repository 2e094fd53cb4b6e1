//! Goal: a disk that does not answer holds nothing else up, and names stay unique. Method: pools
//! on delay devices whose latency changes.

use std::time::Duration;

use serde_json::{Value, json};

use super::{POOL, disk, names, pause, start, until};
use crate::methods::testing::TestDaemon;
use crate::store::{Change, Edit, Record};

const OTHER: &str = "10000000-0000-4000-8000-000000000002";
const TIMED_OUT: &str = "Connection timed out";

fn file(path: &std::path::Path) {
    let file = std::fs::File::create(path).unwrap();
    file.set_len(128 << 20).unwrap();
}

fn patience(daemon: &TestDaemon, milliseconds: u64) {
    let patience = Duration::from_millis(milliseconds);
    daemon.engine.devices.pools.patience.set(patience);
}

/// A delay device "slow" on the disk, quick at first.
fn slow(daemon: &TestDaemon) {
    let params = json!({
        "name": "slow", "base_bdev_name": "disk", "avg_read_latency": 1, "p99_read_latency": 1,
        "avg_write_latency": 1, "p99_write_latency": 1,
    });
    daemon.call("bdev_delay_create", params);
}

fn latency(daemon: &TestDaemon, op: &str, milliseconds: u64) {
    for kind in ["avg", "p99"] {
        let params = json!({
            "delay_bdev_name": "slow", "latency_type": format!("{kind}_{op}"),
            "latency_us": milliseconds * 1000,
        });
        daemon.call("bdev_delay_update_latency", params);
    }
}

/// A daemon with "pool0" on a delay device, and its volume "v1".
fn with_slow_pool(dir: &std::path::Path) -> TestDaemon {
    let path = dir.join("disk");
    file(&path);
    let daemon = start(&dir.join("state"));
    disk(&daemon, &path);
    slow(&daemon);
    let create = json!({ "name": "pool0", "disk": "slow", "uuid": POOL });
    daemon.call("pool_create", create);
    let volume = json!({ "pool": "pool0", "name": "v1", "size": "8MiB" });
    daemon.call("lvol_create", volume);
    daemon
}

/// A rename waits for its disk only so long. Other pools change meanwhile, but none gets the new
/// name. Names and aliases follow when the disk answers.
#[test]
fn a_late_rename_holds_no_other_pool_up() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = with_slow_pool(dir.path());
    let ram = json!({ "name": "ram", "num_blocks": 16384, "block_size": 4096 });
    daemon.call("bdev_malloc_create", ram);
    daemon.call("pool_create", json!({ "name": "pool1", "disk": "ram" }));
    patience(&daemon, 1000);
    latency(&daemon, "write", 4000);
    let rename = |pool: &str, new: &str| json!({ "pool": pool, "new_name": new });
    for _ in 0..2 {
        let late = daemon.refused("pool_rename", rename("pool0", "late"));
        assert_eq!(late.message, TIMED_OUT, "{late}");
        let taken = daemon.refused("pool_rename", rename("pool1", "late"));
        assert_eq!(taken.message, "File exists", "{taken}");
    }
    daemon.call("pool_rename", rename("pool1", "pool2"));
    assert_eq!(names(&daemon), ["pool0/v1"]);
    latency(&daemon, "write", 0);
    let device = || daemon.try_call("lvol_get", json!({ "lvol": "late/v1" }));
    until(&daemon, || device().is_ok());
    assert_eq!(names(&daemon), ["late/v1"]);
}

/// An opening that is late is given up, and the disk is free when it answers.
#[test]
fn a_late_import_gives_its_disk_back() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = with_slow_pool(dir.path());
    daemon.call("pool_export", json!({ "pool": "pool0" }));
    patience(&daemon, 50);
    latency(&daemon, "read", 1000);
    let import = json!({ "disk": "slow" });
    let late = daemon.refused("pool_import", import.clone());
    assert_eq!(late.message, TIMED_OUT, "{late}");
    assert_eq!(daemon.call("pool_list", Value::Null), json!([]));
    latency(&daemon, "read", 0);
    patience(&daemon, 10_000);
    until(&daemon, || {
        daemon.try_call("pool_import", import.clone()).is_ok()
    });
    assert_eq!(names(&daemon), ["pool0/v1"]);
}

/// An export waits for a dying disk, which then goes. The pool goes with it, and returns with it:
/// it was not exported.
#[test]
fn a_lost_disk_ends_an_export() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = with_slow_pool(dir.path());
    patience(&daemon, 300);
    latency(&daemon, "write", 3000);
    let export = json!({ "pool": "pool0" });
    for _ in 0..2 {
        let late = daemon.refused("pool_export", export.clone());
        assert_eq!(late.message, TIMED_OUT, "{late}");
    }
    daemon.call("bdev_delay_delete", json!({ "name": "slow" }));
    until(&daemon, || {
        daemon.call("pool_list", Value::Null) == json!([])
    });
    // Whatever was late has ended.
    daemon.run(async { tokio::time::sleep(Duration::from_secs(4)).await });
    assert_eq!(names(&daemon), [""; 0]);
    patience(&daemon, 10_000);
    slow(&daemon);
    until(&daemon, || !names(&daemon).is_empty());
    assert_eq!(names(&daemon), ["pool0/v1"]);
    daemon.call("pool_export", export);
}

/// Makes "pool0" on a file.
fn pool_on(daemon: &TestDaemon, name: &str, path: &std::path::Path, id: &str) {
    file(path);
    let aio = json!({ "name": name, "filename": path, "block_size": 4096 });
    daemon.call("bdev_aio_create", aio);
    let create = json!({ "name": "pool0", "disk": name, "uuid": id });
    daemon.call("pool_create", create);
}

/// A pool with the name of an open one is refused, unless it gets another name. It is not touched
/// before that.
#[test]
fn an_import_keeps_names_unique() {
    let dir = tempfile::tempdir().unwrap();
    let [first, second] = ["first", "second"].map(|name| dir.path().join(name));
    let state = dir.path().join("state");
    let daemon = start(&state);
    for (name, path, id) in [("first", &first, OTHER), ("second", &second, POOL)] {
        pool_on(&daemon, name, path, id);
        let volume = json!({ "pool": "pool0", "name": name, "size": "1MiB" });
        daemon.call("lvol_create", volume);
        if name == "first" {
            daemon.call("pool_export", json!({ "pool": "pool0" }));
        }
    }
    let import = |new: Option<&str>| json!({ "disk": "first", "new_name": new });
    for (params, field) in [
        (json!({ "disk": "first" }), "disk"),
        (import(Some("pool0")), "new_name"),
        (import(Some("a/b")), "new_name"),
    ] {
        let refused = daemon.refused("pool_import", params);
        assert_eq!(refused.data.unwrap().field.as_deref(), Some(field));
    }
    let refused = daemon.refused("pool_import", json!({ "disk": "first" }));
    assert_eq!(refused.message, "File exists");
    assert!(refused.to_string().contains("--name"), "{refused}");
    assert_eq!(names(&daemon), ["pool0/second"]);
    daemon.call("pool_import", import(Some("pool1")));
    // In the order of their UUIDs.
    assert_eq!(names(&daemon), ["pool0/second", "pool1/first"]);
    let open = json!({ "disk": "first", "uuid": OTHER, "new_name": "pool2" });
    assert_eq!(daemon.refused("pool_import", open).message, "File exists");
    drop(daemon);

    let daemon = start(&state);
    assert_eq!(names(&daemon), ["pool0/second", "pool1/first"]);
}

/// Two pools of one name in the journal: the second one fails at the start, with a remedy.
#[test]
fn a_start_keeps_names_unique() {
    let dir = tempfile::tempdir().unwrap();
    let [first, second] = ["first", "second"].map(|name| dir.path().join(name));
    let state = dir.path().join("state");
    let daemon = start(&state);
    for (name, path, id) in [("first", &first, OTHER), ("second", &second, POOL)] {
        pool_on(&daemon, name, path, id);
        if name == "first" {
            daemon.call("pool_export", json!({ "pool": "pool0" }));
            let record = Record {
                key: format!("pool/{id}"),
                method: "pool_import".into(),
                params: json!({ "disk": name, "uuid": id }),
            };
            let change = Change(vec![Edit::Put(record)]);
            daemon.run(daemon.engine.journal.commit(change)).unwrap();
        }
    }
    drop(daemon);

    let daemon = start(&state);
    let object = |daemon: &TestDaemon| {
        let objects = daemon.call("state_get", Value::Null)["objects"].clone();
        let key = format!("pool/{POOL}");
        let mut objects = objects.as_array().unwrap().iter();
        objects.find(|one| one["key"] == key).unwrap().clone()
    };
    let pools = |daemon: &TestDaemon| {
        let pools = daemon.call("pool_list", Value::Null);
        let pools = pools.as_array().unwrap().iter();
        let all = pools.map(|pool| (pool["name"].clone(), pool["disk"].clone()));
        all.collect::<Vec<_>>()
    };
    let failed = object(&daemon);
    assert_eq!(failed["state"], "failed");
    let error = failed["error"].as_str().unwrap();
    assert!(
        error.contains("\"pool0\"") && error.contains("--name"),
        "{error}"
    );
    assert_eq!(pools(&daemon), [(json!("pool0"), json!("first"))]);
    let import = json!({ "disk": "second", "new_name": "pool1" });
    daemon.call("pool_import", import);
    assert_eq!(object(&daemon)["state"], "live");
    drop(daemon);

    let daemon = start(&state);
    let expected = [("pool1", "second"), ("pool0", "first")];
    assert_eq!(pools(&daemon), expected.map(|(a, b)| (json!(a), json!(b))));
}

/// An import that fails leaves the stored one alone: the pool returns with its own disk.
#[test]
fn a_failed_import_changes_no_record() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk");
    file(&path);
    let daemon = start(&dir.path().join("state"));
    disk(&daemon, &path);
    let create = json!({ "name": "pool0", "disk": "disk", "uuid": POOL });
    daemon.call("pool_create", create);
    let volume = json!({ "pool": "pool0", "name": "v1", "size": "8MiB", "uuid": OTHER });
    daemon.call("lvol_create", volume);
    let record = || {
        let entry = daemon.engine.journal.find(&format!("pool/{POOL}")).unwrap();
        entry.record
    };
    let before = record();
    daemon.call("bdev_aio_delete", json!({ "name": "disk" }));
    until(&daemon, || {
        daemon.call("pool_list", Value::Null) == json!([])
    });
    pause(&daemon);
    // A device has the name of the volume.
    let ram = json!({ "name": OTHER, "num_blocks": 8, "block_size": 512 });
    daemon.call("bdev_malloc_create", ram);
    let other = json!({ "name": "other", "filename": path, "block_size": 4096 });
    daemon.call("bdev_aio_create", other);
    let refused = daemon.refused("pool_import", json!({ "disk": "other" }));
    assert_eq!(refused.message, "File exists", "{refused}");
    assert_eq!(record(), before);
    assert_eq!(daemon.call("pool_list", Value::Null), json!([]));
    daemon.call("bdev_malloc_delete", json!({ "name": OTHER }));
    daemon.call("bdev_aio_delete", json!({ "name": "other" }));
    disk(&daemon, &path);
    until(&daemon, || !names(&daemon).is_empty());
    assert_eq!(names(&daemon), ["pool0/v1"]);
}
