//! Goal: a pool of two disks returns after a restart, and waits for a missing disk, which it names.
//! Method: daemons without sockets on two files and one store.

use std::path::Path;

use serde_json::{Value, json};

use super::{POOL, names, start};
use crate::methods::testing::TestDaemon;

fn file(dir: &Path, name: &str, mebibytes: u64) {
    let file = std::fs::File::create(dir.join(name)).unwrap();
    file.set_len(mebibytes << 20).unwrap();
}

fn attach(daemon: &TestDaemon, dir: &Path, name: &str) {
    let params = json!({ "name": name, "filename": dir.join(name), "block_size": 4096 });
    daemon.call("bdev_aio_create", params);
}

fn disks(pool: &Value) -> Vec<&str> {
    let disks = pool["disks"].as_array().unwrap().iter();
    disks.map(|disk| disk["name"].as_str().unwrap()).collect()
}

/// Waits for a pool that a device event brings back.
fn wait_for_pool(daemon: &TestDaemon) -> Value {
    for _ in 0..500 {
        let list = daemon.call("pool_list", Value::Null);
        if let [pool] = &list.as_array().unwrap()[..] {
            return pool.clone();
        }
        // A sleep begins inside the daemon's runtime.
        daemon.run(async { tokio::time::sleep(std::time::Duration::from_millis(10)).await });
    }
    panic!("the pool is not imported");
}

#[test]
fn a_pool_of_two_disks_returns() {
    let dir = tempfile::tempdir().unwrap();
    let (dir, state) = (dir.path(), dir.path().join("state"));
    file(dir, "first", 128);
    file(dir, "second", 64);
    std::fs::write(dir.join("used"), vec![7; 64 << 20]).unwrap();
    let daemon = start(&state);
    for disk in ["first", "second", "used"] {
        attach(&daemon, dir, disk);
    }
    let create = json!({ "name": "pool0", "disk": "first", "uuid": POOL });
    let one = daemon.call("pool_create", create);
    assert_eq!(disks(&one), ["first"]);
    let add = |disk: &str| json!({ "pool": "pool0", "disk": disk });
    let used = daemon.refused("pool_add_disk", add("used"));
    assert_eq!(used.message, "Operation not permitted");
    let none = daemon.refused("pool_add_disk", add("none"));
    assert_eq!(none.message, "No such device");
    let two = daemon.call("pool_add_disk", add("second"));
    assert_eq!(disks(&two), ["first", "second"]);
    let total = |pool: &Value| pool["total_bytes"].as_u64().unwrap();
    assert_eq!(total(&two), total(&one) + (62 << 20));
    // A repeated call finds its work done.
    assert_eq!(
        total(&daemon.call("pool_add_disk", add("second"))),
        total(&two)
    );
    let size = json!({ "pool": "pool0", "name": "v1", "size": "1GiB" });
    daemon.call("lvol_create", size);
    drop(daemon);

    // Both disks are there.
    let daemon = start(&state);
    let pool = daemon.call("pool_get", json!({ "pool": "pool0" }));
    assert_eq!(
        (disks(&pool), total(&pool)),
        (vec!["first", "second"], total(&two))
    );
    let id = pool["disks"][1]["uuid"].as_str().unwrap().to_owned();
    assert_eq!(names(&daemon), ["pool0/v1"]);
    drop(daemon);

    // The second disk is away: the pool waits, and its error names the disk.
    std::fs::rename(dir.join("second"), dir.join("away")).unwrap();
    let daemon = start(&state);
    assert_eq!(daemon.call("pool_list", Value::Null), json!([]));
    let known = json!([{ "uuid": id, "name": "second", "serial": "S1" }]);
    let import = json!({ "disk": "first", "uuid": POOL, "known_disks": known });
    let refused = daemon.refused("pool_import", import).to_string();
    assert!(
        refused.contains(&id) && refused.contains("\"second\", serial S1"),
        "{refused}"
    );
    std::fs::rename(dir.join("away"), dir.join("second")).unwrap();
    attach(&daemon, dir, "second");
    let pool = wait_for_pool(&daemon);
    assert_eq!(disks(&pool), ["first", "second"]);
    assert_eq!(names(&daemon), ["pool0/v1"]);
    let check = daemon.call("pool_check", json!({ "pool": "pool0" }));
    assert_eq!(check["findings"], json!([]));
    // A device above a volume of the pool cannot be its disk.
    let part = json!({ "base_bdev": "pool0/v1", "split_count": 2 });
    let parts = daemon.call("bdev_split_create", part);
    let above = add(parts[0].as_str().unwrap());
    let refused = daemon.refused("pool_add_disk", above).to_string();
    assert!(refused.contains("or depends on one"), "{refused}");
    daemon.call("bdev_split_delete", json!({ "base_bdev": "pool0/v1" }));
    // A copy of a disk.
    std::fs::copy(dir.join("second"), dir.join("copy")).unwrap();
    attach(&daemon, dir, "copy");
    let force = json!({ "pool": "pool0", "disk": "copy", "force": true });
    let refused = daemon.refused("pool_add_disk", force).to_string();
    assert!(refused.contains("or a copy of one"), "{refused}");
    let create = json!({ "name": "pool1", "disk": "copy", "force": true });
    let refused = daemon.refused("pool_create", create).to_string();
    assert!(refused.contains("or a copy of one"), "{refused}");
    daemon.call("bdev_aio_delete", json!({ "name": "copy" }));
    // An export and an import by the further disk.
    daemon.call("pool_export", json!({ "pool": "pool0" }));
    let pool = daemon.call("pool_import", json!({ "disk": "second" }));
    assert_eq!(disks(&pool), ["first", "second"]);
    daemon.call("lvol_delete", json!({ "lvol": "pool0/v1" }));
    daemon.call("pool_delete", json!({ "pool": "pool0" }));
    let gone = daemon.refused("pool_import", json!({ "disk": "second" }));
    assert_eq!(gone.message, "No such file or directory");
}

/// Goal: after a restart, hosts find their namespaces on a pool whose further disk is newer than
/// they are. Method: the journal has the pool, the namespace, then the disk.
#[test]
fn a_disk_that_is_newer_than_the_namespaces() {
    let dir = tempfile::tempdir().unwrap();
    let (dir, state) = (dir.path(), dir.path().join("state"));
    file(dir, "first", 128);
    file(dir, "second", 64);
    let daemon = start(&state);
    attach(&daemon, dir, "first");
    daemon.call("pool_create", json!({ "name": "pool0", "disk": "first" }));
    let size = json!({ "pool": "pool0", "name": "v1", "size": "1GiB" });
    daemon.call("lvol_create", size);
    let nqn = "nqn.2026-01.org.example:pools";
    daemon.call("nvmf_create_subsystem", json!({ "nqn": nqn }));
    let namespace = json!({ "bdev_name": "pool0/v1", "nsid": 1 });
    let add = json!({ "nqn": nqn, "namespace": namespace });
    daemon.call("nvmf_subsystem_add_ns", add);
    attach(&daemon, dir, "second");
    let add = json!({ "pool": "pool0", "disk": "second" });
    daemon.call("pool_add_disk", add);
    // The import by the disk's arrival may end while the journal is not at its end.
    for number in 0..20 {
        let other = format!("{nqn}:{number}");
        daemon.call("nvmf_create_subsystem", json!({ "nqn": other }));
    }
    drop(daemon);
    let daemon = start(&state);
    let found = daemon.call("nvmf_get_subsystems", json!({ "nqn": nqn }));
    let namespaces = found[0]["namespaces"].as_array().unwrap();
    assert_eq!(namespaces.len(), 1, "{found}");
}

/// Goal: refusals, the state and the doctor name a pool whose further disk went in use, and the
/// disk, until it is back. Method: the disk's device is deleted and made again.
#[test]
fn a_disk_that_goes_is_named_until_it_is_back() {
    let dir = tempfile::tempdir().unwrap();
    let (dir, state) = (dir.path(), dir.path().join("state"));
    file(dir, "first", 128);
    file(dir, "second", 64);
    let daemon = start(&state);
    for disk in ["first", "second"] {
        attach(&daemon, dir, disk);
    }
    let create = json!({ "name": "pool0", "disk": "first", "uuid": POOL });
    daemon.call("pool_create", create);
    let add = json!({ "pool": "pool0", "disk": "second" });
    daemon.call("pool_add_disk", add);
    let volume = json!({ "pool": "pool0", "name": "v1", "size": "8MiB" });
    daemon.call("lvol_create", volume);
    let doctor = || {
        let report = daemon.call("doctor_run", json!({}));
        let findings = report["findings"].as_array().unwrap().clone();
        let mut found = findings.into_iter().filter(|of| of["id"] == "pool.open");
        let one = found.next().unwrap();
        assert_eq!(found.next(), None);
        one
    };
    assert_eq!(doctor()["status"], "PASS");
    daemon.call("bdev_aio_delete", json!({ "name": "second" }));
    let refused = loop {
        daemon.run(async { tokio::time::sleep(std::time::Duration::from_millis(10)).await });
        if daemon.call("pool_list", Value::Null) == json!([]) {
            let refused = daemon.refused("pool_get", json!({ "pool": "pool0" }));
            if refused.to_string().contains("went away") {
                break refused;
            }
        }
    };
    assert_eq!(refused.message, "No such device");
    let cause = "pool \"pool0\" is closed: its disk \"second\" went away";
    assert!(refused.to_string().contains(cause), "{refused}");
    let object = || {
        let state = daemon.call("state_get", Value::Null);
        let objects = state["objects"].as_array().unwrap().clone();
        let mut pools = objects
            .into_iter()
            .filter(|of| of["method"] == "pool_import");
        pools.next().unwrap()
    };
    assert_eq!(object()["state"], "failed");
    assert!(object()["error"].as_str().unwrap().contains(cause));
    let found = doctor();
    assert_eq!(
        (&found["status"], &found["subject"]),
        (&json!("FAIL"), &json!("first"))
    );
    assert!(
        found["evidence"].as_str().unwrap().contains(cause),
        "{found}"
    );
    attach(&daemon, dir, "second");
    wait_for_pool(&daemon);
    // The record follows the import.
    while object()["state"] != "live" {
        daemon.run(async { tokio::time::sleep(std::time::Duration::from_millis(10)).await });
    }
    assert_eq!(doctor()["status"], "PASS");
    // The pool can be forgotten by its name as well.
    daemon.call("bdev_aio_delete", json!({ "name": "first" }));
    while daemon.call("pool_list", Value::Null) != json!([]) || object()["state"] == "live" {
        daemon.run(async { tokio::time::sleep(std::time::Duration::from_millis(10)).await });
    }
    daemon.call("pool_export", json!({ "pool": "pool0" }));
    let unknown = daemon.refused("pool_get", json!({ "pool": "pool0" }));
    assert!(unknown.to_string().contains("no open pool"), "{unknown}");
}
