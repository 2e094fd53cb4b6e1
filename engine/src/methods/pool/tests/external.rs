//! Goal: lvols show a bdev outside of their pool, by SPDK's calls, over restarts and without the
//! bdev. Method: as in `tests`; an inflated lvol's shallow copy has the data.

use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use nacre_bdev::{Holder, Removal, Usage, malloc};
use nacre_bdev_pool::Command;
use serde_json::{Value, json};

use super::{POOL, disk, start, until};
use crate::methods::testing::TestDaemon;
use crate::plane::Plane;
use crate::services::pools;

const MIB: usize = 1 << 20;

/// A pool "lvs" beside the bdev "gold" on a file of 4 MiB.
fn with_gold(dir: &Path) -> TestDaemon {
    let file = std::fs::File::create(dir.join("disk")).unwrap();
    file.set_len(128 << 20).unwrap();
    std::fs::write(dir.join("gold"), contents()).unwrap();
    let daemon = start(&dir.join("state"));
    disk(&daemon, &dir.join("disk"));
    let create = json!({ "name": "lvs", "disk": "disk", "uuid": POOL });
    daemon.call("pool_create", create);
    file_bdev(&daemon, dir, "gold");
    daemon
}

fn contents() -> Vec<u8> {
    let bytes = (0..4 * MIB).map(|at| (at / 512 % 251) as u8 + 1);
    bytes.collect()
}

fn file_bdev(daemon: &TestDaemon, dir: &Path, name: &str) {
    let aio = json!({ "name": name, "filename": dir.join(name), "block_size": 512 });
    daemon.call("bdev_aio_create", aio);
}

fn clone_of(bdev: &str, name: &str) -> Value {
    json!({ "bdev": bdev, "lvs_name": "lvs", "clone_name": name })
}

/// What SPDK's list has of an lvol: clone, clone of a bdev, degraded.
fn kind(daemon: &TestDaemon, name: &str) -> [bool; 3] {
    let list = daemon.call("bdev_lvol_get_lvols", json!({ "lvs_name": "lvs" }));
    let mut list = list.as_array().unwrap().iter();
    let lvol = list.find(|lvol| lvol["name"] == name).unwrap();
    ["is_clone", "is_esnap_clone", "is_degraded"].map(|field| lvol[field] == true)
}

/// The contents of a snapshot that shares nothing with a parent.
fn copied(daemon: &TestDaemon, dir: &Path, snapshot: &str) -> Vec<u8> {
    let file = std::fs::File::create(dir.join("copy")).unwrap();
    file.set_len(4 << 20).unwrap();
    file_bdev(daemon, dir, "copy");
    let copy = json!({ "src_lvol_name": snapshot, "dst_bdev_name": "copy" });
    let operation = daemon.call("bdev_lvol_start_shallow_copy", copy);
    until(daemon, || {
        let state = daemon.call("bdev_lvol_check_shallow_copy", operation.clone());
        assert_ne!(state["state"], "error", "{state}");
        state["state"] == "complete"
    });
    daemon.call("bdev_aio_delete", json!({ "name": "copy" }));
    std::fs::read(dir.join("copy")).unwrap()
}

/// An lvol on a bdev, its snapshot and its end: what the lists say, who may use the bdev meanwhile,
/// and the data.
#[test]
fn an_lvol_shows_a_bdev() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = with_gold(dir.path());
    let gold = daemon.call("bdev_get_bdevs", json!({ "name": "gold" }))[0]["uuid"].clone();
    let uuid = daemon.call("bdev_lvol_clone_bdev", clone_of("gold", "e"));
    let device = daemon.call("bdev_get_bdevs", json!({ "name": "lvs/e" }))[0].clone();
    assert_eq!(
        (&device["name"], &device["num_blocks"]),
        (&uuid, &json!(1024))
    );
    let lvol = &device["driver_specific"]["lvol"];
    assert_eq!(lvol["esnap_clone"], true);
    assert_eq!(
        (&lvol["clone"], &lvol["external_snapshot_name"]),
        (&json!(false), &gold)
    );
    assert_eq!(kind(&daemon, "e"), [false, true, false]);
    let found = daemon.call("lvol_get", json!({ "lvol": "lvs/e" }));
    let parent = json!({ "uuid": gold, "name": "gold" });
    assert_eq!(
        (&found["external_parent"], &found["parent"]),
        (&parent, &Value::Null)
    );
    assert_eq!(
        (&found["used_bytes"], &found["degraded"]),
        (&json!(0), &json!(false))
    );

    let of_gold = daemon.call("bdev_get_bdevs", json!({ "name": "gold" }));
    assert_eq!(of_gold[0]["claim_type"], "read_many_write_none");
    let deleted = daemon.refused("bdev_aio_delete", json!({ "name": "gold" }));
    assert!(
        deleted.to_string().contains("lvols of pool \"lvs\""),
        "{deleted}"
    );
    let nqn = "nqn.2016-06.io.spdk:x";
    daemon.call("nvmf_create_subsystem", json!({ "nqn": nqn }));
    let namespace = json!({ "nqn": nqn, "namespace": { "bdev_name": "gold" } });
    daemon.refused("nvmf_subsystem_add_ns", namespace);

    let snapshot = json!({ "lvol_name": "lvs/e", "snapshot_name": "s" });
    daemon.call("bdev_lvol_snapshot", snapshot);
    assert_eq!(kind(&daemon, "e"), [true, false, false]);
    assert_eq!(kind(&daemon, "s"), [false, true, false]);
    daemon.call("bdev_lvol_inflate", json!({ "name": "lvs/e" }));
    assert_eq!(kind(&daemon, "e"), [false, false, false]);
    let snapshot = json!({ "lvol_name": "lvs/e", "snapshot_name": "whole" });
    daemon.call("bdev_lvol_snapshot", snapshot);
    assert!(copied(&daemon, dir.path(), "lvs/whole") == contents());
    daemon.call("bdev_lvol_delete", json!({ "name": "lvs/s" }));
    until(&daemon, || {
        daemon.call("bdev_get_bdevs", json!({ "name": "gold" }))[0]["claimed"] == false
    });
    daemon.call("bdev_aio_delete", json!({ "name": "gold" }));
    assert!(std::fs::read(dir.path().join("gold")).unwrap() == contents());
}

/// Goal: a bdev that is missing after a restart degrades its lvols; they are whole when it is back,
/// and once more when it was pulled out.
#[test]
fn a_bdev_that_is_missing() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = with_gold(dir.path());
    daemon.call("bdev_lvol_clone_bdev", clone_of("gold", "e"));
    let snapshot = json!({ "lvol_name": "lvs/e", "snapshot_name": "s" });
    daemon.call("bdev_lvol_snapshot", snapshot);
    drop(daemon);

    let daemon = start(&dir.path().join("state"));
    until(&daemon, || kind(&daemon, "e") == [true, false, false]);
    drop(daemon);
    std::fs::rename(dir.path().join("gold"), dir.path().join("away")).unwrap();
    let daemon = start(&dir.path().join("state"));
    assert_eq!(kind(&daemon, "e"), [true, false, true]);
    assert_eq!(kind(&daemon, "s"), [false, true, true]);
    let found = daemon.call("lvol_get", json!({ "lvol": "lvs/s" }));
    assert_eq!(found["degraded"], true);
    let refused = daemon.refused("bdev_lvol_inflate", json!({ "name": "lvs/e" }));
    assert!(refused.to_string().contains("gold"), "{refused}");
    daemon.call(
        "bdev_lvol_clone",
        json!({ "snapshot_name": "lvs/s", "clone_name": "c" }),
    );
    daemon.call("bdev_lvol_delete", json!({ "name": "lvs/c" }));

    std::fs::rename(dir.path().join("away"), dir.path().join("gold")).unwrap();
    let present = daemon
        .call("bdev_get_bdevs", json!({}))
        .as_array()
        .unwrap()
        .clone();
    if !present.iter().any(|bdev| bdev["name"] == "gold") {
        file_bdev(&daemon, dir.path(), "gold");
    }
    until(&daemon, || kind(&daemon, "e") == [true, false, false]);
    daemon.call("bdev_lvol_inflate", json!({ "name": "lvs/e" }));
    let snapshot = json!({ "lvol_name": "lvs/e", "snapshot_name": "whole" });
    daemon.call("bdev_lvol_snapshot", snapshot);
    assert!(copied(&daemon, dir.path(), "lvs/whole") == contents());
}

/// SPDK's codes and messages, and the cases that only Nacre refuses.
#[test]
fn parents_and_refusals() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = with_gold(dir.path());
    std::fs::write(dir.path().join("odd"), vec![0; MIB + 4096]).unwrap();
    file_bdev(&daemon, dir.path(), "odd");
    let create = |name: &str, thick: bool| {
        let lvol = json!({ "pool": "lvs", "name": name, "size": "4MiB", "thick": thick });
        daemon.call("lvol_create", lvol);
    };
    create("v", false);
    create("thick", true);
    let set = |lvol: &str, bdev: &str| json!({ "lvol_name": lvol, "parent_name": bdev });
    let (clone, parent) = ("bdev_lvol_clone_bdev", "bdev_lvol_set_parent_bdev");
    assert_eq!(daemon.call(parent, set("lvs/v", "gold")), true);
    assert_eq!(kind(&daemon, "v"), [false, true, false]);
    let mut no_store = clone_of("gold", "e");
    no_store["lvs_name"] = json!("other");
    let (invalid, no_device) = ("Invalid argument", "No such device");
    let refusals = [
        (clone, no_store, -32602, "lvs does not exist"),
        (clone, clone_of("x", "e"), -32602, "bdev does not exist"),
        (clone, clone_of("lvs/v", "e"), -32602, invalid),
        (clone, clone_of("odd", "e"), -32602, invalid),
        (clone, clone_of("gold", "v"), -32602, "File exists"),
        (
            clone,
            clone_of("disk", "e"),
            -32602,
            "Operation not permitted",
        ),
        (
            clone,
            json!({ "bdev": "gold" }),
            -32603,
            "Invalid parameters",
        ),
        (parent, set("lvs/x", "gold"), -19, no_device),
        (parent, set("lvs/v", "x"), -32602, no_device),
        (parent, set("lvs/v", "gold"), -32602, "File exists"),
        (parent, set("lvs/v", "odd"), -32602, invalid),
        (parent, set("lvs/thick", "gold"), -32602, invalid),
        (parent, set("lvs/v", "lvs/thick"), -32602, invalid),
    ];
    for (call, params, code, message) in refusals {
        let refused = daemon.refused(call, params.clone());
        let found = (refused.code, &*refused.message);
        assert_eq!(found, (code, message), "{call} {params}: {refused}");
    }
    let odd = daemon.call("bdev_get_bdevs", json!({ "name": "odd" }));
    assert_eq!(odd[0]["claimed"], false, "a refused bdev is free");
    // A snapshot of another pool is a device like any other, and keeps its pool open.
    let file = std::fs::File::create(dir.path().join("second")).unwrap();
    file.set_len(128 << 20).unwrap();
    file_bdev(&daemon, dir.path(), "second");
    daemon.call("pool_create", json!({ "name": "other", "disk": "second" }));
    let lvol = json!({ "pool": "other", "name": "v", "size": "4MiB" });
    daemon.call("lvol_create", lvol);
    let snapshot = json!({ "lvol_name": "other/v", "snapshot_name": "s" });
    daemon.call("bdev_lvol_snapshot", snapshot);
    daemon.call(clone, clone_of("other/s", "e"));
    let refused = daemon.refused("pool_export", json!({ "pool": "other" }));
    assert!(
        refused.to_string().contains("lvols of pool \"lvs\""),
        "{refused}"
    );
    let mut back = clone_of("lvs/e", "f");
    back["lvs_name"] = json!("other");
    let refused = daemon.refused(clone, back);
    assert_eq!((refused.code, &*refused.message), (-32602, invalid));
    daemon.call("bdev_lvol_delete", json!({ "name": "lvs/e" }));
    until(&daemon, || {
        daemon.call("bdev_get_bdevs", json!({ "name": "other/s" }))[0]["claimed"] == false
    });
    daemon.call("pool_export", json!({ "pool": "other" }));
}

fn plane(daemon: &TestDaemon) -> Rc<Plane> {
    daemon.engine.plane().unwrap()
}

/// A RAM disk in the place of a bdev, with its UUID.
fn stand_in(daemon: &TestDaemon, name: &str, uuid: &Value) {
    let config = json!({ "name": name, "block_size": 512, "num_blocks": 8192, "uuid": uuid });
    let config = serde_json::from_value(config).unwrap();
    let device = malloc::create(config).unwrap();
    plane(daemon).bdevs.register(device).unwrap();
}

/// Goal: a bdev that is pulled out during `bdev_lvol_set_parent_bdev` is free again.
#[test]
fn a_bdev_that_goes_during_a_call() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = with_gold(dir.path());
    let lvol = json!({ "pool": "lvs", "name": "v", "size": "4MiB" });
    daemon.call("lvol_create", lvol);
    let engine = Rc::clone(&daemon.engine);
    let bdevs = plane(&daemon).bdevs.clone();
    daemon.run(async move {
        let (pool, lvol) = pools::find_lvol(&engine, "lvol_name", "lvs/v").unwrap();
        let call = tokio::task::spawn_local({
            let engine = Rc::clone(&engine);
            async move {
                let bdev = ("parent_name", "gold");
                pools::set_parent_bdev(&engine, &pool, lvol, bdev).await
            }
        });
        while bdevs.get("gold").unwrap().claims.is_empty() {
            tokio::task::yield_now().await;
        }
        let ticket = bdevs.remove("gold", Removal::Hot).unwrap();
        let free = tokio::time::timeout(Duration::from_secs(30), ticket);
        free.await.expect("the pool gives the bdev back");
        // The call may have ended before the bdev went.
        let _ = call.await.unwrap();
    });
    assert!(plane(&daemon).bdevs.lookup("gold").is_none());
}

/// Goal: lvols get a bdev that another user has when it appears, as soon as that user has gone.
#[test]
fn a_bdev_that_is_in_use_at_first() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = with_gold(dir.path());
    daemon.call("bdev_lvol_clone_bdev", clone_of("gold", "e"));
    let gold = daemon.call("bdev_get_bdevs", json!({ "name": "gold" }))[0]["uuid"].clone();
    let bdevs = plane(&daemon).bdevs.clone();
    let ticket = bdevs.remove("gold", Removal::Hot).unwrap();
    until(&daemon, || ticket.is_done());
    until(&daemon, || kind(&daemon, "e") == [false, true, true]);
    stand_in(&daemon, "again", &gold);
    let user = Holder::User("a test".to_owned());
    let claim = bdevs.claim("again", user, Usage::Exclusive).unwrap();
    // The event of its appearance passes, and some tries after that.
    let pause = Duration::from_millis(100);
    daemon.run(async move { tokio::time::sleep(pause).await });
    assert_eq!(kind(&daemon, "e"), [false, true, true]);
    drop(claim);
    until(&daemon, || kind(&daemon, "e") == [false, true, false]);
    let claims = bdevs.get("again").unwrap().claims;
    assert!(matches!(claims[..], [(_, Usage::ReadOnly)]), "{claims:?}");
}

/// A second pool, "other", with a snapshot of 4 MiB, "other/s".
fn with_other(daemon: &TestDaemon, dir: &Path) {
    let file = std::fs::File::create(dir.join("second")).unwrap();
    file.set_len(128 << 20).unwrap();
    file_bdev(daemon, dir, "second");
    let uuid = "f0000000-0000-4000-8000-000000000001";
    let create = json!({ "name": "other", "disk": "second", "uuid": uuid });
    daemon.call("pool_create", create);
    let lvol = json!({ "pool": "other", "name": "v", "size": "4MiB" });
    daemon.call("lvol_create", lvol);
    let snapshot = json!({ "lvol_name": "other/v", "snapshot_name": "s" });
    daemon.call("bdev_lvol_snapshot", snapshot);
}

/// A pool gets no disk that depends on one of its lvols, whichever way.
#[test]
fn a_disk_on_a_dependent_lvol() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = with_gold(dir.path());
    with_other(&daemon, dir.path());
    daemon.call("bdev_lvol_clone_bdev", clone_of("other/s", "e"));
    let mut add = json!({ "pool": "other", "disk": "lvs/e" });
    let refused = daemon.refused("pool_add_disk", add.clone());
    assert!(refused.to_string().contains("depends on one"), "{refused}");
    daemon.call("bdev_lvol_inflate", json!({ "name": "lvs/e" }));
    until(&daemon, || {
        daemon.call("bdev_get_bdevs", json!({ "name": "other/s" }))[0]["claimed"] == false
    });
    add["force"] = json!(true);
    daemon.call("pool_add_disk", add);
}

/// A pool that is closed already does not keep the devices of the others from their end.
#[test]
fn a_closed_pool_among_others() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = with_gold(dir.path());
    with_other(&daemon, dir.path());
    daemon.call("bdev_lvol_clone_bdev", clone_of("gold", "e"));
    let mut second = clone_of("gold", "f");
    second["lvs_name"] = json!("other");
    daemon.call("bdev_lvol_clone_bdev", second);
    let bdevs = plane(&daemon).bdevs.clone();
    let claims = || bdevs.get("gold").unwrap().claims.len();
    assert_eq!(claims(), 2);
    let engine = Rc::clone(&daemon.engine);
    daemon.run(async move {
        let pool = engine.devices.pools.find("lvs").unwrap();
        let close = Command::Close { export: false };
        pool.handle.run(close).await.unwrap();
        pools::external::detach_all(&engine).await;
    });
    until(&daemon, || claims() == 0);
}

/// Goal: a bdev that comes back during a call stays with its lvols. Method: the call ends after
/// another device has taken the place of the one that it named.
#[test]
fn a_bdev_that_comes_back_during_a_call() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = with_gold(dir.path());
    daemon.call("bdev_lvol_clone_bdev", clone_of("gold", "e"));
    let gold = daemon.call("bdev_get_bdevs", json!({ "name": "gold" }))[0]["uuid"].clone();
    let id = uuid::Uuid::parse_str(gold.as_str().unwrap()).unwrap();
    let bdevs = plane(&daemon).bdevs.clone();
    let ticket = bdevs.remove("gold", Removal::Hot).unwrap();
    until(&daemon, || ticket.is_done());
    stand_in(&daemon, "again", &gold);
    until(&daemon, || kind(&daemon, "e") == [false, true, false]);
    let engine = Rc::clone(&daemon.engine);
    daemon.run(async move {
        let pool = engine.devices.pools.find("lvs").unwrap();
        pool.handle.detach_gone(id).await.unwrap();
    });
    assert_eq!(kind(&daemon, "e"), [false, true, false]);
    let claims = bdevs.get("again").unwrap().claims;
    assert!(matches!(claims[..], [(_, Usage::ReadOnly)]), "{claims:?}");
}

/// Goal: lvols get a bdev that came back too small, once it has grown.
#[test]
fn a_bdev_that_is_too_small_at_first() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = with_gold(dir.path());
    daemon.call("bdev_lvol_clone_bdev", clone_of("gold", "e"));
    let gold = daemon.call("bdev_get_bdevs", json!({ "name": "gold" }))[0]["uuid"].clone();
    let bdevs = plane(&daemon).bdevs.clone();
    let ticket = bdevs.remove("gold", Removal::Hot).unwrap();
    until(&daemon, || ticket.is_done());
    let small = std::fs::File::create(dir.path().join("small")).unwrap();
    small.set_len(2 << 20).unwrap();
    let path = dir.path().join("small");
    let aio = json!({ "name": "small", "filename": path, "block_size": 512, "uuid": gold });
    daemon.call("bdev_aio_create", aio);
    // The event of its appearance passes.
    let pause = Duration::from_millis(100);
    daemon.run(async move { tokio::time::sleep(pause).await });
    assert_eq!(kind(&daemon, "e"), [false, true, true]);
    small.set_len(4 << 20).unwrap();
    daemon.call("bdev_aio_rescan", json!({ "name": "small" }));
    until(&daemon, || kind(&daemon, "e") == [false, true, false]);
}

/// Goal: a circle that a disk closes is seen while the disk is still being added. Method: the
/// addition has begun, and the pool does not have the disk yet.
#[test]
fn a_circle_with_a_disk_that_is_being_added() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = with_gold(dir.path());
    with_other(&daemon, dir.path());
    // The pool "other" is about to get a disk on an lvol of "lvs".
    let lvol = json!({ "pool": "lvs", "name": "below", "size": "64MiB" });
    daemon.call("lvol_create", lvol);
    let engine = Rc::clone(&daemon.engine);
    let begin = move || {
        let pool = engine.devices.pools.find("other").unwrap();
        pools::external::Addition::begin(&engine, pool.handle.id(), "lvs/below")
    };
    let addition = begin();
    let refused = daemon.refused("bdev_lvol_clone_bdev", clone_of("other/s", "e"));
    assert_eq!(&*refused.message, "Invalid argument", "{refused}");
    drop(addition);
    daemon.call("bdev_lvol_clone_bdev", clone_of("other/s", "e"));
}

/// True if the daemon has sent an event of this type.
fn has_event(daemon: &TestDaemon, kind: &str) -> bool {
    let events = daemon.call("events_get", json!({}));
    let mut events = events["events"].as_array().unwrap().iter();
    events.any(|event| event["type"] == kind)
}

/// Goal: a file that another program truncates under the claim of a pool counts as removed: its
/// lvols are degraded, with an event. They get neither the rest of it nor what comes in the place
/// of the lost blocks, only a bdev that is made anew. A truncated disk of the pool is reported.
#[test]
fn a_bdev_that_is_cut() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = with_gold(dir.path());
    daemon.call("bdev_lvol_clone_bdev", clone_of("gold", "e"));
    let gold = daemon.call("bdev_get_bdevs", json!({ "name": "gold" }))[0]["uuid"].clone();
    let set_len = |name: &str, bytes: u64| {
        let options = std::fs::OpenOptions::new().write(true).clone();
        let file = options.open(dir.path().join(name)).unwrap();
        file.set_len(bytes).unwrap();
        // A claimed device keeps its announced size.
        let _ = daemon.try_call("bdev_aio_rescan", json!({ "name": name }));
    };
    let is_claimed = || {
        let gold = daemon.call("bdev_get_bdevs", json!({ "name": "gold" }));
        gold[0]["claimed"] == true
    };
    assert!(is_claimed());
    set_len("gold", 2 << 20);
    until(&daemon, || kind(&daemon, "e") == [false, true, true]);
    until(&daemon, || !is_claimed());
    assert!(has_event(&daemon, "pool_device_lost"));
    daemon.refused("bdev_lvol_clone_bdev", clone_of("gold", "f"));
    set_len("gold", 4 << 20);
    let refused = daemon.refused("bdev_lvol_clone_bdev", clone_of("gold", "f"));
    assert!(refused.to_string().contains("has lost blocks"), "{refused}");
    assert_eq!(kind(&daemon, "e"), [false, true, true]);
    assert!(!has_event(&daemon, "pool_device_back"));
    daemon.call("bdev_aio_delete", json!({ "name": "gold" }));
    std::fs::write(dir.path().join("gold"), contents()).unwrap();
    let filename = dir.path().join("gold");
    let aio = json!({ "name": "gold", "filename": filename, "block_size": 512, "uuid": gold });
    daemon.call("bdev_aio_create", aio);
    until(&daemon, || kind(&daemon, "e") == [false, true, false]);
    until(&daemon, || has_event(&daemon, "pool_device_back"));

    assert!(!has_event(&daemon, "pool_disk_cut"));
    set_len("disk", 100 << 20);
    until(&daemon, || has_event(&daemon, "pool_disk_cut"));
    set_len("disk", 128 << 20);
}
