//! Goal: a volume makes lvols for its replicas and takes them along, and an interruption leaves
//! none behind. Method: daemons without sockets on files.

use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};
use uuid::Uuid;

use super::super::super::testing::TestDaemon;
use super::{ID, pause, until};
use crate::config::Settings;
use crate::services::volumes::lvols::{self, NewLvol};
use crate::store::Store;

const MIB: u64 = 1 << 20;

pub(super) fn disk(daemon: &TestDaemon, dir: &Path, name: &str) {
    let path = dir.join(name);
    if !path.exists() {
        let file = std::fs::File::create(&path).unwrap();
        file.set_len(128 * MIB).unwrap();
    }
    let params = json!({ "name": name, "filename": path, "block_size": 4096 });
    daemon.call("bdev_aio_create", params);
}

pub(super) fn start(dir: &Path) -> TestDaemon {
    let store = Store::open(&dir.join("state")).unwrap();
    TestDaemon::with(Settings::default(), Some(store))
}

/// A daemon with "pool0" and "pool1".
pub(super) fn with_pools(dir: &Path) -> TestDaemon {
    let daemon = start(dir);
    for number in 0..2 {
        let (name, disk_name) = (format!("pool{number}"), format!("disk{number}"));
        disk(&daemon, dir, &disk_name);
        daemon.call("pool_create", json!({ "name": name, "disk": disk_name }));
    }
    daemon
}

/// Names and sizes of all lvols.
pub(super) fn lvols(daemon: &TestDaemon) -> Vec<(String, u64)> {
    let list = daemon.call("lvol_list", json!({}));
    let list = list.as_array().unwrap().iter();
    let all = list.map(|lvol| {
        let alias = lvol["alias"].as_str().unwrap().to_owned();
        (alias, lvol["size_bytes"].as_u64().unwrap())
    });
    let mut all: Vec<_> = all.collect();
    all.sort();
    all
}

fn both(bytes: u64) -> Vec<(String, u64)> {
    ["pool0/v", "pool1/v"]
        .map(|name| (name.to_owned(), bytes))
        .into()
}

pub(super) fn notes(daemon: &TestDaemon) -> usize {
    daemon.engine.journal.below("volume/lvols/").len()
}

pub(super) fn create(size_mb: u64, thin: bool) -> Value {
    let replicas = ["pool0", "pool1"].map(|pool| json!({ "pool": pool, "thin": thin }));
    json!({ "name": "v", "uuid": ID, "replicas": replicas, "size_mb": size_mb })
}

fn states(volume: &Value) -> Vec<(Value, Value, Value)> {
    let replicas = volume["replicas"].as_array().unwrap().iter();
    let all = replicas.map(|r| (r["pool"].clone(), r["lvol"].clone(), r["state"].clone()));
    all.collect()
}

fn in_sync() -> Vec<(Value, Value, Value)> {
    let of = |pool| (json!(pool), json!(format!("{pool}/v")), json!("in_sync"));
    ["pool0", "pool1"].map(of).into()
}

/// The replicas are in sync without copying, grow with the volume, return after a restart, and go
/// with the volume.
#[test]
fn a_volume_takes_its_lvols_along() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = with_pools(dir.path());
    let volume = daemon.call("volume_create", create(32, true));
    assert_eq!(states(&volume), in_sync());
    assert_eq!(volume["num_blocks"].as_u64().unwrap() * 4096, 32 * MIB);
    assert_eq!((lvols(&daemon), notes(&daemon)), (both(33 * MIB), 0));
    let used = daemon.call("lvol_get", json!({ "lvol": "pool1/v" }))["used_bytes"].clone();
    assert!(used.as_u64().unwrap() <= MIB, "{used}");
    // The same call again makes nothing.
    daemon.call("volume_create", create(32, true));
    drop(daemon);

    let daemon = start(dir.path());
    let volume = until(&daemon, "healthy", |volume| volume["state"] == "healthy");
    assert_eq!(states(&volume), in_sync());
    let grown = daemon.call("volume_grow", json!({ "name": "v", "size_mb": 64 }));
    assert_eq!(grown["num_blocks"].as_u64().unwrap() * 4096, 64 * MIB);
    assert_eq!(lvols(&daemon), both(65 * MIB));
    let used = daemon.refused("lvol_delete", json!({ "lvol": "pool0/v" }));
    assert_eq!(used.message, "Operation not permitted");
    daemon.call("volume_delete", json!({ "name": "v" }));
    assert_eq!((lvols(&daemon), notes(&daemon)), (vec![], 0));
    for pool in ["pool0", "pool1"] {
        daemon.call("pool_delete", json!({ "pool": pool }));
    }
}

/// A pool without room, or with an lvol of the name, refuses the volume: no lvol is left, and
/// others stay. A volume that cannot grow has lvols of the former size.
#[test]
fn a_refused_volume_leaves_no_lvol() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = with_pools(dir.path());
    let other = json!({ "pool": "pool1", "name": "other", "size": "80MiB", "thick": true });
    daemon.call("lvol_create", other);
    let others = || vec![("pool1/other".to_owned(), 80 * MIB)];
    let full = daemon.refused("volume_create", create(64, false));
    let field = full.data.clone().unwrap().field;
    assert_eq!(full.message, "No space left on device");
    assert_eq!(field.as_deref(), Some("replicas[1]"));
    assert_eq!((lvols(&daemon), notes(&daemon)), (others(), 0));
    assert_eq!(daemon.call("volume_list", Value::Null), json!([]));

    let same_name = json!({ "pool": "pool1", "name": "v", "size": "1MiB" });
    daemon.call("lvol_create", same_name);
    let taken = daemon.refused("volume_create", create(8, false));
    assert_eq!(taken.message, "File exists");
    let mut all = others();
    all.push(("pool1/v".to_owned(), MIB));
    assert_eq!((lvols(&daemon), notes(&daemon)), (all, 0));
    daemon.call("lvol_delete", json!({ "lvol": "pool1/v" }));

    // The lvols are made, and the volume is refused.
    let mut bad = create(8, false);
    bad["settings"] = json!({ "min_in_sync": 3 });
    daemon.refused("volume_create", bad);
    assert_eq!((lvols(&daemon), notes(&daemon)), (others(), 0));

    for (params, field) in [
        (
            json!({ "name": "v", "replicas": [{ "pool": "none" }], "size_mb": 8 }),
            "replicas[0].pool",
        ),
        (
            json!({ "name": "v", "replicas": [{ "pool": "pool0" }] }),
            "replicas[0].size",
        ),
        (
            json!({ "name": "v", "replicas": [{ "pool": "pool0" }, { "pool": "pool0" }], "size_mb": 8 }),
            "replicas[1].pool",
        ),
        (
            json!({ "name": "a/b", "replicas": [{ "pool": "pool0" }], "size_mb": 8 }),
            "name",
        ),
        (json!({ "name": "v" }), "devices"),
    ] {
        let refused = daemon.refused("volume_create", params);
        assert_eq!(refused.data.unwrap().field.as_deref(), Some(field));
    }
    assert_eq!((lvols(&daemon), notes(&daemon)), (others(), 0));

    daemon.call("volume_create", create(8, false));
    let full = daemon.refused("volume_grow", json!({ "name": "v", "size_mb": 64 }));
    assert_eq!(full.message, "No space left on device");
    let mut all = both(9 * MIB);
    all.insert(1, ("pool1/other".to_owned(), 80 * MIB));
    assert_eq!(lvols(&daemon), all);
    daemon.call("volume_delete", json!({ "name": "v" }));
    assert_eq!(lvols(&daemon), others());
}

/// Goal: a volume begins with the contents of another one's snapshot: in sync at once on its pool,
/// filled on the others. A snapshot of anything else is refused, and leaves no lvol.
#[test]
fn a_volume_begins_with_a_snapshot() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = with_pools(dir.path());
    daemon.call("volume_create", create(8, true));
    let plain = json!({ "pool": "pool0", "name": "plain", "size": "16MiB" });
    daemon.call("lvol_create", plain);
    for (lvol, name) in [("pool0/v", "s"), ("pool0/plain", "p")] {
        let one = json!([{ "lvol": lvol, "name": name }]);
        daemon.call("lvol_snapshot", json!({ "snapshots": one }));
    }
    let before = lvols(&daemon);
    let new = |snapshot: &str, pools: &[&str], size_mb: u64| {
        let on = |pool: &&str| json!({ "pool": pool, "thin": true });
        let replicas: Vec<Value> = pools.iter().map(on).collect();
        json!({ "name": "w", "snapshot": snapshot, "replicas": replicas, "size_mb": size_mb })
    };
    for (params, field) in [
        (new("pool0/none", &["pool0"], 8), "snapshot"),
        (new("pool0/v", &["pool0"], 8), "snapshot"),
        (new("pool0/s", &["pool1"], 8), "replicas[0].pool"),
        (new("pool0/s", &["pool1", "pool0"], 8), "replicas[0].pool"),
        (new("pool0/s", &["pool0"], 4), "size"),
        // It has no label: its data would be elsewhere.
        (new("pool0/p", &["pool0"], 16), "snapshot"),
        (
            json!({ "name": "w", "snapshot": "pool0/s", "devices": ["pool0/plain"] }),
            "devices",
        ),
    ] {
        let refused = daemon.refused("volume_create", params);
        let found = refused.data.clone().and_then(|data| data.field);
        assert_eq!(found.as_deref(), Some(field), "{refused}");
    }
    assert_eq!((lvols(&daemon), notes(&daemon)), (before, 0));

    let made = daemon.call("volume_create", new("pool0/s", &["pool0", "pool1"], 16));
    assert_eq!(made["num_blocks"].as_u64().unwrap() * 4096, 16 * MIB);
    let first = daemon.call("lvol_get", json!({ "lvol": "pool0/w" }));
    let snapshot = daemon.call("lvol_get", json!({ "lvol": "pool0/s" }));
    assert_eq!(first["parent"], snapshot["uuid"]);
    let name = made["uuid"].as_str().unwrap().to_owned();
    let healthy = || daemon.call("volume_get", json!({ "name": name }))["state"] == "healthy";
    while !healthy() {
        pause(&daemon, Duration::from_millis(10));
    }
    daemon.call("volume_delete", json!({ "name": "w" }));
    daemon.call("lvol_delete", json!({ "lvol": "pool0/s" }));
    daemon.call("volume_delete", json!({ "name": "v" }));
}

/// The daemon ends between the steps of a creation or deletion: the next start deletes the lvols,
/// unless the volume exists.
#[test]
fn an_interruption_leaves_no_lvol() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = with_pools(dir.path());
    let id: Uuid = ID.parse().unwrap();
    let on = |pool: &str| NewLvol {
        pool: daemon.engine.devices.pools.find(pool).unwrap(),
        bytes: 8 * MIB,
        is_thick: false,
    };
    let wanted = [on("pool0"), on("pool1")];
    daemon
        .run(lvols::make(&daemon.engine, id, "v", &wanted, &[]))
        .unwrap();
    assert_eq!((lvols(&daemon), notes(&daemon)), (both(9 * MIB), 1));
    drop(wanted);
    drop(daemon);

    let daemon = start(dir.path());
    assert_eq!((lvols(&daemon), notes(&daemon)), (vec![], 0));
    daemon.call("volume_create", create(8, true));
    // A deletion that did not reach the volume.
    let volume = daemon.engine.volumes.find("v").unwrap();
    daemon
        .run(lvols::begin_deletion(&daemon.engine, &volume))
        .unwrap();
    drop(volume);
    assert_eq!(notes(&daemon), 1);
    drop(daemon);

    let daemon = start(dir.path());
    assert_eq!((lvols(&daemon), notes(&daemon)), (both(9 * MIB), 0));
    let volume = until(&daemon, "healthy", |volume| volume["state"] == "healthy");
    assert_eq!(states(&volume), in_sync());
}

/// A volume is deleted by force while a pool is away: its lvol goes when the pool is back.
#[test]
fn an_lvol_of_a_lost_pool_goes_later() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = with_pools(dir.path());
    daemon.call("volume_create", create(8, true));
    daemon.call("bdev_aio_delete", json!({ "name": "disk0" }));
    let pools = || {
        daemon
            .call("pool_list", Value::Null)
            .as_array()
            .unwrap()
            .len()
    };
    let wait = |done: &dyn Fn() -> bool| {
        let end = std::time::Instant::now() + Duration::from_secs(30);
        while !done() {
            assert!(std::time::Instant::now() < end, "never");
            pause(&daemon, Duration::from_millis(50));
        }
    };
    wait(&|| pools() == 1);
    daemon.refused("volume_delete", json!({ "name": "v" }));
    assert_eq!(lvols(&daemon), both(9 * MIB)[1..]);
    daemon.call("volume_delete", json!({ "name": "v", "force": "v" }));
    assert_eq!((lvols(&daemon), notes(&daemon)), (vec![], 1));
    let objects = daemon.call("state_get", Value::Null)["objects"].clone();
    let failed = objects.as_array().unwrap().iter();
    let is_lvols = |one: &&Value| one["method"] == "volume_drop_lvols" && one["state"] == "failed";
    let failed: Vec<_> = failed.filter(is_lvols).collect();
    assert_eq!(failed.len(), 1, "{failed:?}");
    let error = failed[0]["error"].as_str().unwrap();
    assert!(error.contains("pool is not open"), "{error}");
    disk(&daemon, dir.path(), "disk0");
    wait(&|| pools() == 2);
    wait(&|| {
        daemon.call("state_retry", Value::Null);
        notes(&daemon) == 0
    });
    assert_eq!(lvols(&daemon), []);
}
