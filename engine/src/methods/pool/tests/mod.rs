//! Goal: pools and their volumes work by RPC, and return after a restart. Method: daemons without
//! sockets on one file and one store.

mod copy;
mod disks;
mod external;
mod interrupted;
mod late;
mod parents;

use nacre_bdev_pool::Command;
use serde_json::{Value, json};

use crate::config::Settings;
use crate::methods::testing::TestDaemon;
use crate::store::Store;

pub(super) const POOL: &str = "10000000-0000-4000-8000-000000000001";

pub(super) fn disk(daemon: &TestDaemon, path: &std::path::Path) {
    let params = json!({ "name": "disk", "filename": path, "block_size": 4096 });
    daemon.call("bdev_aio_create", params);
}

pub(super) fn start(dir: &std::path::Path) -> TestDaemon {
    TestDaemon::with(Settings::default(), Some(Store::open(dir).unwrap()))
}

pub(super) fn names(daemon: &TestDaemon) -> Vec<String> {
    let list = daemon.call("lvol_list", json!({}));
    let list = list.as_array().unwrap().iter();
    list.map(|lvol| lvol["alias"].as_str().unwrap().to_owned())
        .collect()
}

#[test]
fn a_pool_returns_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk");
    std::fs::File::create(&path)
        .unwrap()
        .set_len(128 << 20)
        .unwrap();
    let state = dir.path().join("state");
    let daemon = start(&state);
    disk(&daemon, &path);
    let create = json!({ "name": "pool0", "disk": "disk", "uuid": POOL });
    let pool = daemon.call("pool_create", create.clone());
    assert_eq!(pool["state"], "online");
    let again = daemon.refused("pool_create", create);
    assert_eq!(again.message, "File exists");
    let other = json!({ "name": "other", "disk": "disk" });
    assert_eq!(
        daemon.refused("pool_create", other).message,
        "Operation not permitted"
    );
    let size = json!({ "pool": "pool0", "name": "v1", "size": "1GiB" });
    let volume = daemon.call("lvol_create", size);
    assert_eq!(volume["size_bytes"], 1u64 << 30);
    let cut = json!({ "snapshots": [{ "lvol": "pool0/v1", "name": "v1@mon" }] });
    daemon.call("lvol_snapshot", cut);
    let clone = json!({ "snapshot": "pool0/v1@mon", "name": "v2" });
    daemon.call("lvol_clone", clone);
    daemon.call(
        "lvol_rename",
        json!({ "lvol": "pool0/v2", "new_name": "v3" }),
    );
    let small = daemon.call(
        "lvol_resize",
        json!({ "lvol": "pool0/v3", "size": 1 << 20 }),
    );
    assert_eq!(small["size_bytes"], 1 << 20);
    daemon.call(
        "nvmf_create_subsystem",
        json!({ "nqn": "nqn.2016-06.io.spdk:x" }),
    );
    let namespace =
        json!({ "nqn": "nqn.2016-06.io.spdk:x", "namespace": { "bdev_name": "pool0/v1" } });
    daemon.call("nvmf_subsystem_add_ns", namespace);
    let used = daemon.refused("lvol_delete", json!({ "lvol": "pool0/v1" }));
    assert_eq!(used.message, "Operation not permitted");
    let used = daemon.refused("pool_export", json!({ "pool": "pool0" }));
    assert_eq!(used.message, "Device or resource busy");
    assert_eq!(names(&daemon), ["pool0/v1", "pool0/v1@mon", "pool0/v3"]);
    drop(daemon);

    let daemon = start(&state);
    assert_eq!(names(&daemon), ["pool0/v1", "pool0/v1@mon", "pool0/v3"]);
    let subsystems = daemon.call("nvmf_get_subsystems", json!({}));
    let of = |one: &&Value| one["nqn"] == "nqn.2016-06.io.spdk:x";
    let subsystem = subsystems.as_array().unwrap().iter().find(of).unwrap();
    assert_eq!(subsystem["namespaces"][0]["nsid"], 1);
    let remove = json!({ "nqn": "nqn.2016-06.io.spdk:x", "nsid": 1 });
    daemon.call("nvmf_subsystem_remove_ns", remove);
    let restore = json!({ "lvol": "pool0/v3", "snapshot": "pool0/v1@mon" });
    assert_eq!(
        daemon.call("lvol_restore", restore)["size_bytes"],
        1u64 << 30
    );
    daemon.call("lvol_inflate", json!({ "lvol": "pool0/v3" }));
    let check = daemon.call("pool_check", json!({ "pool": "pool0" }));
    assert_eq!(check["findings"], json!([]));
    for lvol in ["pool0/v1@mon", "pool0/v1", "pool0/v3"] {
        daemon.call("lvol_delete", json!({ "lvol": lvol }));
    }
    daemon.call("pool_export", json!({ "pool": "pool0" }));
    assert_eq!(daemon.call("pool_list", Value::Null), json!([]));
    daemon.call("pool_import", json!({ "disk": "disk" }));
    daemon.call("pool_delete", json!({ "pool": POOL }));
    let gone = daemon.refused("pool_import", json!({ "disk": "disk" }));
    assert_eq!(gone.message, "No such file or directory");
    drop(daemon);

    let daemon = start(&state);
    assert_eq!(daemon.call("pool_list", Value::Null), json!([]));
}

/// A pool takes the rest of its disk by command, and gets another name: its volumes have the new
/// alias, also after a restart. SPDK's calls do the same, with SPDK's codes.
#[test]
fn a_pool_grows_and_is_renamed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk");
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(128 << 20).unwrap();
    let state = dir.path().join("state");
    let daemon = start(&state);
    disk(&daemon, &path);
    let before = daemon.call("pool_create", json!({ "name": "pool0", "disk": "disk" }));
    let volume = json!({ "pool": "pool0", "name": "v1", "size": "8MiB" });
    daemon.call("lvol_create", volume);
    let same = daemon.call("pool_grow", json!({ "pool": "pool0" }));
    assert_eq!(same["total_bytes"], before["total_bytes"]);
    file.set_len(256 << 20).unwrap();
    daemon.call("bdev_aio_rescan", json!({ "name": "disk" }));
    let grown = daemon.call("pool_grow", json!({ "pool": "pool0" }));
    let bytes = |pool: &Value| pool["total_bytes"].as_u64().unwrap();
    assert_eq!(bytes(&grown), bytes(&before) + (128 << 20));
    let store = json!({ "lvs_name": "pool0" });
    assert_eq!(daemon.call("bdev_lvol_grow_lvstore", store), true);

    let renamed = json!({ "pool": "pool0", "new_name": "pool1" });
    assert_eq!(daemon.call("pool_rename", renamed)["name"], "pool1");
    assert_eq!(names(&daemon), ["pool1/v1"]);
    let rename = |old: &str, new: &str| json!({ "old_name": old, "new_name": new });
    let call = "bdev_lvol_rename_lvstore";
    assert_eq!(daemon.call(call, rename("pool1", "pool2")), true);
    let unknown = daemon.refused(call, rename("pool1", "pool2"));
    let expected = (-2, "Lvol store pool1 not found");
    assert_eq!((unknown.code, &*unknown.message), expected);
    daemon.call("lvol_get", json!({ "lvol": "pool2/v1" }));
    drop(daemon);

    let daemon = start(&state);
    assert_eq!(names(&daemon), ["pool2/v1"]);
    let pool = daemon.call("pool_get", json!({ "pool": "pool2" }));
    assert_eq!(bytes(&pool), bytes(&grown));
}

/// The codes and texts of SPDK, which its clients compare.
#[test]
fn refusals_have_spdks_codes() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk");
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(128 << 20).unwrap();
    let daemon = start(&dir.path().join("state"));
    disk(&daemon, &path);
    let store = json!({ "bdev_name": "disk", "lvs_name": "lvs" });
    daemon.call("bdev_lvol_create_lvstore", store);
    let lvol = |name: &str, size: u64, thin: bool| json!({ "lvs_name": "lvs", "lvol_name": name, "size_in_mib": size, "thin_provision": thin });
    daemon.call("bdev_lvol_create", lvol("a", 8, true));
    let cut = json!({ "lvol_name": "lvs/a", "snapshot_name": "s" });
    daemon.call("bdev_lvol_snapshot", cut.clone());
    for name in ["c", "d"] {
        let clone = json!({ "snapshot_name": "lvs/s", "clone_name": name });
        daemon.call("bdev_lvol_clone", clone);
    }
    let (exists, no_device) = ("File exists", "No such device");
    let refusals = [
        (
            "bdev_lvol_create_lvstore",
            json!({ "bdev_name": "none", "lvs_name": "x" }),
            -19,
            no_device,
        ),
        (
            "bdev_lvol_create_lvstore",
            json!({ "bdev_name": "disk" }),
            -32603,
            "Invalid parameters",
        ),
        ("bdev_lvol_create", lvol("a", 8, true), -17, exists),
        (
            "bdev_lvol_create",
            lvol("e", 4096, false),
            -32602,
            "No space left on device",
        ),
        (
            "bdev_lvol_create",
            json!({ "lvol_name": "e", "size_in_mib": 1 }),
            -22,
            "Invalid argument",
        ),
        ("bdev_lvol_snapshot", cut, -32602, exists),
        (
            "bdev_lvol_snapshot",
            json!({ "lvol_name": "lvs/x", "snapshot_name": "y" }),
            -19,
            no_device,
        ),
        (
            "bdev_lvol_clone",
            json!({ "snapshot_name": "lvs/a", "clone_name": "x" }),
            -32602,
            "Invalid argument",
        ),
        (
            "bdev_lvol_rename",
            json!({ "old_name": "lvs/a", "new_name": "s" }),
            -32602,
            exists,
        ),
        (
            "bdev_lvol_rename",
            json!({ "old_name": "lvs/x", "new_name": "s" }),
            -19,
            no_device,
        ),
        (
            "bdev_lvol_resize",
            json!({ "name": "lvs/s", "size_in_mib": 16 }),
            -32602,
            "Invalid argument",
        ),
        (
            "bdev_lvol_inflate",
            json!({ "name": "lvs/s" }),
            -32602,
            "Invalid argument",
        ),
        (
            "bdev_lvol_delete",
            json!({ "name": "lvs/s" }),
            -32603,
            "Operation not permitted",
        ),
        (
            "bdev_lvol_delete",
            json!({ "name": "lvs/x" }),
            -19,
            no_device,
        ),
        (
            "bdev_lvol_delete_lvstore",
            json!({ "lvs_name": "x" }),
            -19,
            no_device,
        ),
        ("bdev_lvol_grow_lvstore", json!({}), -22, "Invalid argument"),
    ];
    for (call, params, code, message) in refusals {
        let refused = daemon.refused(call, params.clone());
        let found = (refused.code, &*refused.message);
        assert_eq!(found, (code, message), "{call} {params}: {refused}");
    }
}

/// The pool goes with its disk, and returns with it.
#[test]
fn a_pool_follows_its_disk() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk");
    std::fs::File::create(&path)
        .unwrap()
        .set_len(128 << 20)
        .unwrap();
    let daemon = start(&dir.path().join("state"));
    disk(&daemon, &path);
    daemon.call("pool_create", json!({ "name": "pool0", "disk": "disk" }));
    daemon.call(
        "lvol_create",
        json!({ "pool": "pool0", "name": "v1", "size": "8MiB" }),
    );
    // The second time it returns while the pool is being closed.
    for waits in [true, false] {
        daemon.call("bdev_aio_delete", json!({ "name": "disk" }));
        if waits {
            until(&daemon, || {
                daemon.call("pool_list", Value::Null) == json!([])
            });
        }
        disk(&daemon, &path);
        until(&daemon, || !names(&daemon).is_empty());
        assert_eq!(names(&daemon), ["pool0/v1"]);
    }
}

/// A disk returns without its pool, and later with it: the pool is imported the second time. A
/// pool that was exported while its disk was away stays out.
#[test]
fn a_lost_pool_waits_for_its_disk() {
    let dir = tempfile::tempdir().unwrap();
    let [path, other] = ["disk", "other"].map(|name| {
        let path = dir.path().join(name);
        let file = std::fs::File::create(&path).unwrap();
        file.set_len(128 << 20).unwrap();
        path
    });
    let daemon = start(&dir.path().join("state"));
    disk(&daemon, &path);
    let create = json!({ "name": "pool0", "disk": "disk", "uuid": POOL });
    daemon.call("pool_create", create);
    let pools = || daemon.call("pool_list", Value::Null);
    let remove = || {
        daemon.call("bdev_aio_delete", json!({ "name": "disk" }));
        until(&daemon, || pools() == json!([]));
        pause(&daemon);
    };
    remove();
    disk(&daemon, &other);
    pause(&daemon);
    assert_eq!(pools(), json!([]));
    remove();
    disk(&daemon, &path);
    until(&daemon, || pools() != json!([]));

    remove();
    daemon.call("pool_export", json!({ "pool": POOL }));
    disk(&daemon, &path);
    pause(&daemon);
    assert_eq!(pools(), json!([]));
    daemon.call("pool_import", json!({ "disk": "disk" }));
}

/// A pool whose keeper has ended is not in use: it can be imported again.
#[test]
fn an_import_opens_a_closed_pool() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk");
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(128 << 20).unwrap();
    let daemon = start(&dir.path().join("state"));
    disk(&daemon, &path);
    let create = json!({ "name": "pool0", "disk": "disk", "uuid": POOL });
    daemon.call("pool_create", create);
    let pool = daemon.engine.devices.pools.find("pool0").unwrap();
    let close = Command::Close { export: false };
    daemon.run(pool.handle.run(close)).unwrap();
    drop(pool);
    assert_eq!(daemon.call("pool_list", Value::Null), json!([]));
    let import = json!({ "disk": "disk", "uuid": POOL });
    assert_eq!(daemon.call("pool_import", import)["state"], "online");
}

/// Names of pools and volumes change at the same time, and the aliases follow. A name that another
/// device has is refused before anything changes.
#[test]
fn names_change_together() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk");
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(128 << 20).unwrap();
    let daemon = start(&dir.path().join("state"));
    disk(&daemon, &path);
    daemon.call("pool_create", json!({ "name": "pool0", "disk": "disk" }));
    let volume = json!({ "pool": "pool0", "name": "v0", "size": "8MiB" });
    let id = daemon.call("lvol_create", volume)["uuid"].clone();
    let aliases = || daemon.call("bdev_get_bdevs", json!({ "name": id }))[0]["aliases"].clone();
    let call = |method: &'static str, params: Value| {
        let engine = std::rc::Rc::clone(&daemon.engine);
        async move {
            let params = serde_json::value::to_raw_value(&params).unwrap();
            engine.call(method, Some(&params)).await.unwrap();
        }
    };
    for (at, pool_is_first) in [true, false, true, false].into_iter().enumerate() {
        let new = at + 1;
        let pool = json!({ "pool": format!("pool{at}"), "new_name": format!("pool{new}") });
        let lvol = json!({ "lvol": id, "new_name": format!("v{new}") });
        let (pool, lvol) = (call("pool_rename", pool), call("lvol_rename", lvol));
        daemon.run(async {
            if pool_is_first {
                tokio::join!(pool, lvol);
            } else {
                tokio::join!(lvol, pool);
            }
        });
        let expected = json!([format!("pool{new}/v{new}")]);
        assert_eq!(aliases(), expected);
    }

    for name in ["pool5/v4", "pool4/v5"] {
        let malloc = json!({ "name": name, "num_blocks": 8, "block_size": 512 });
        daemon.call("bdev_malloc_create", malloc);
    }
    let pool = json!({ "pool": "pool4", "new_name": "pool5" });
    let lvol = json!({ "lvol": "pool4/v4", "new_name": "v5" });
    for (method, params) in [("pool_rename", pool), ("lvol_rename", lvol)] {
        assert_eq!(daemon.refused(method, params).message, "File exists");
        assert_eq!(names(&daemon), ["pool4/v4"]);
        assert_eq!(aliases(), json!(["pool4/v4"]));
    }
}

/// Goal: neither a copy of an open pool's disk nor a new pool with its UUID takes its place.
#[test]
fn an_open_pool_keeps_its_place() {
    let dir = tempfile::tempdir().unwrap();
    let [path, copy, empty] = ["disk", "copy", "empty"].map(|name| dir.path().join(name));
    for path in [&path, &empty] {
        let file = std::fs::File::create(path).unwrap();
        file.set_len(128 << 20).unwrap();
    }
    let daemon = start(&dir.path().join("state"));
    disk(&daemon, &path);
    let create = json!({ "name": "pool0", "disk": "disk", "uuid": POOL });
    daemon.call("pool_create", create);
    let size = json!({ "pool": "pool0", "name": "v1", "size": "1MiB" });
    daemon.call("lvol_create", size);
    std::fs::copy(&path, &copy).unwrap();
    for (name, path) in [("copy", &copy), ("empty", &empty)] {
        let params = json!({ "name": name, "filename": path, "block_size": 4096 });
        daemon.call("bdev_aio_create", params);
    }
    let import = |force| json!({ "disk": "copy", "force": force });
    for force in [false, true] {
        let refused = daemon.refused("pool_import", import(force));
        assert_eq!(refused.message, "File exists", "{refused:?}");
    }
    let create = json!({ "name": "pool1", "disk": "empty", "uuid": POOL });
    let refused = daemon.refused("pool_create", create);
    assert_eq!(refused.message, "File exists", "{refused:?}");
    assert_eq!(names(&daemon), ["pool0/v1"]);
    let pools = daemon.call("pool_list", Value::Null);
    let disks: Vec<_> = pools
        .as_array()
        .unwrap()
        .iter()
        .map(|pool| &pool["disk"])
        .collect();
    assert_eq!(disks, ["disk"]);
    daemon.call("pool_export", json!({ "pool": "pool0" }));
    daemon.call("pool_import", import(true));
    assert_eq!(names(&daemon), ["pool0/v1"]);
}

/// Every family of pool metrics has the numbers of `pool_get`.
#[test]
fn pool_metrics_are_complete() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk");
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(128 << 20).unwrap();
    let daemon = start(&dir.path().join("state"));
    disk(&daemon, &path);
    daemon.call("pool_create", json!({ "name": "pool0", "disk": "disk" }));
    let volume = json!({ "pool": "pool0", "name": "v", "size": "8MiB", "thick": true });
    daemon.call("lvol_create", volume);
    let pool = daemon.call("pool_get", json!({ "pool": "pool0" }));
    let scrape = daemon.run(crate::metrics::Scrape::of(&daemon.engine));
    let text = scrape.text();
    let of = |field: &str| pool[field].as_u64().unwrap();
    // The pool has one disk.
    for (family, field) in [("bytes", "total_bytes"), ("free_bytes", "free_bytes")] {
        let labels = "pool=\"pool0\",disk=\"disk\"";
        let expected = format!("nacre_pool_disk_{family}{{{labels}}} {}.0", of(field));
        assert!(text.contains(&expected), "{expected} in {text}");
    }
    assert!(of("reserved_bytes") > 8 << 20);
    for (family, field) in [
        ("bytes", "total_bytes"),
        ("free_bytes", "free_bytes"),
        ("reserved_bytes", "reserved_bytes"),
        ("lvols", "lvols"),
    ] {
        let expected = format!("nacre_pool_{family}{{pool=\"pool0\"}} {}.0", of(field));
        assert!(text.contains(&expected), "{expected} in {text}");
    }
    for expected in [
        "nacre_pool_state{pool=\"pool0\",state=\"online\"} 1.0",
        "nacre_pool_state{pool=\"pool0\",state=\"held\"} 0.0",
        "nacre_pool_unsettled_records{pool=\"pool0\"}",
        "nacre_pool_waiting_writes{pool=\"pool0\"} 0.0",
    ] {
        assert!(text.contains(expected), "{expected} in {text}");
    }
}

pub(super) fn pause(daemon: &TestDaemon) {
    let pause = std::time::Duration::from_millis(200);
    daemon.run(async move { tokio::time::sleep(pause).await });
}

pub(super) fn until(daemon: &TestDaemon, done: impl Fn() -> bool) {
    let end = std::time::Instant::now() + std::time::Duration::from_secs(30);
    while !done() {
        assert!(std::time::Instant::now() < end, "never");
        let pause = std::time::Duration::from_millis(20);
        daemon.run(async move { tokio::time::sleep(pause).await });
    }
}
