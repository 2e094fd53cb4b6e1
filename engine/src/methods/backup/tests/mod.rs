//! Goal: a restored volume is equal to the snapshot, and a failed job leaves nothing. Method: a
//! pool on a file, a directory as the store; the restored volume is copied to a file and compared.

mod failures;

use std::path::Path;

use nacre_bdev::Holder;
use nacre_bdev::registry::Usage;
use serde_json::{Value, json};

use crate::config::Settings;
use crate::methods::testing::TestDaemon;
use crate::services::backup::device::ClaimedDevice;
use crate::services::pools::least_loaded;
use crate::store::Store;

const MIB: usize = 1 << 20;
const SIZE: usize = 14 * MIB;
const UNIT: usize = 64 << 10;

/// A pool with the volume "v1", and a directory for backups.
fn start(dir: &Path) -> TestDaemon {
    let path = dir.join("disk");
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(256 << 20).unwrap();
    std::fs::create_dir(dir.join("backups")).unwrap();
    let store = Store::open(&dir.join("state")).unwrap();
    let daemon = TestDaemon::with(Settings::default(), Some(store));
    let disk = json!({ "name": "disk", "filename": path, "block_size": 4096 });
    daemon.call("bdev_aio_create", disk);
    daemon.call("pool_create", json!({ "name": "p", "disk": "disk" }));
    let lvol = json!({ "pool": "p", "name": "v1", "size": SIZE });
    daemon.call("lvol_create", lvol);
    daemon
}

fn store(dir: &Path) -> Value {
    json!({ "location": format!("file://{}", dir.join("backups").display()) })
}

/// Writes to the volume, and to its expected contents.
fn write(daemon: &TestDaemon, expected: &mut [u8], offset: usize, data: &[u8]) {
    expected[offset..offset + data.len()].copy_from_slice(data);
    let data = data.to_vec();
    daemon.run(async {
        let plane = daemon.engine.plane().unwrap();
        let holder = Holder::User("a test".into());
        let claim = plane.bdevs.claim("p/v1", holder, Usage::Exclusive);
        let reactor = least_loaded(&daemon.engine, &plane).unwrap();
        let device = ClaimedDevice::new(claim.unwrap(), reactor);
        device.write(offset as u64, data).await.unwrap();
        device.flush().await.unwrap();
    });
}

fn snapshot(daemon: &TestDaemon, lvol: &str, name: &str) {
    let cut = json!({ "snapshots": [{ "lvol": lvol, "name": name }] });
    daemon.call("lvol_snapshot", cut);
}

fn pause(daemon: &TestDaemon) {
    let pause = std::time::Duration::from_millis(10);
    daemon.run(async { tokio::time::sleep(pause).await });
}

/// Waits for the end of a job. Returns its last state.
fn ended(daemon: &TestDaemon, job: &Value) -> Value {
    until(daemon, job, |job| job["state"] != "running")
}

fn until(daemon: &TestDaemon, job: &Value, is_it: impl Fn(&Value) -> bool) -> Value {
    for _ in 0..3000 {
        let jobs = daemon.call("backup_jobs", Value::Null);
        let mut jobs = jobs.as_array().unwrap().iter();
        let found = jobs.rfind(|one| one["job"] == job["job"]).unwrap().clone();
        if is_it(&found) {
            return found;
        }
        pause(daemon);
    }
    panic!("{job} takes too long");
}

fn back_up(daemon: &TestDaemon, dir: &Path, snapshot: &str) -> Value {
    let params = json!({ "snapshot": snapshot, "store": store(dir) });
    ended(daemon, &daemon.call("backup_create", params))
}

fn restore(daemon: &TestDaemon, dir: &Path, backup: &Value, name: &str) -> Value {
    let params = json!({ "backup": backup, "store": store(dir), "pool": "p", "name": name });
    ended(daemon, &daemon.call("backup_restore", params))
}

/// The contents of a volume without a parent, by a copy to a file.
fn contents(daemon: &TestDaemon, dir: &Path, name: &str) -> Vec<u8> {
    snapshot(daemon, &format!("p/{name}"), &format!("{name}@copy"));
    let path = dir.join(name);
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(SIZE as u64).unwrap();
    let aio = json!({ "name": name, "filename": path, "block_size": 4096 });
    daemon.call("bdev_aio_create", aio);
    let copy = json!({ "src_lvol_name": format!("p/{name}@copy"), "dst_bdev_name": name });
    let operation = daemon.call("bdev_lvol_start_shallow_copy", copy);
    for _ in 0..3000 {
        let state = daemon.call("bdev_lvol_check_shallow_copy", operation.clone());
        if state["state"] != "in progress" {
            assert_eq!(state["state"], "complete");
            return std::fs::read(&path).unwrap();
        }
        pause(daemon);
    }
    panic!("the copy runs for too long");
}

fn lvols(daemon: &TestDaemon) -> Vec<String> {
    let list = daemon.call("lvol_list", json!({}));
    let list = list.as_array().unwrap().iter();
    list.map(|lvol| lvol["name"].as_str().unwrap().to_owned())
        .collect()
}

fn data(seed: usize, bytes: usize) -> Vec<u8> {
    (0..bytes)
        .map(|at| (at * 7 + at / 251 + seed) as u8 | 1)
        .collect()
}

#[test]
fn a_backup_of_a_snapshot_is_restored() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let daemon = start(dir);
    let mut first = vec![0; SIZE];
    write(&daemon, &mut first, 0, &data(1, MIB));
    write(&daemon, &mut first, 5 * MIB, &data(2, UNIT));
    // A granule across the border of two objects, in the last and smaller object.
    write(&daemon, &mut first, 12 * MIB - 4096, &data(3, 8192));
    snapshot(&daemon, "p/v1", "v1@mon");
    let job = back_up(&daemon, dir, "p/v1@mon");
    assert_eq!(
        (&job["state"], &job["error"]),
        (&json!("complete"), &Value::Null)
    );
    assert_eq!(
        (&job["done_objects"], &job["total_objects"]),
        (&json!(4), &json!(4))
    );
    let monday = job["result"].clone();
    assert_eq!(
        (&monday["volume"], &monday["snapshot"]),
        (&json!("p/v1"), &json!("p/v1@mon"))
    );

    let mut second = first.clone();
    write(&daemon, &mut second, 5 * MIB + 4096, &data(9, 4096));
    write(&daemon, &mut second, 0, &vec![0; UNIT]);
    snapshot(&daemon, "p/v1", "v1@tue");
    // The volume goes on; the snapshot does not.
    write(&daemon, &mut second.clone(), 0, &data(5, UNIT));
    let tuesday = back_up(&daemon, dir, "p/v1@tue")["result"].clone();
    assert_eq!(tuesday["base"], monday["backup"]);
    let bytes = |reply: &Value, key: &str| reply[key].as_u64().unwrap();
    assert!(bytes(&tuesday, "new_bytes") < bytes(&tuesday, "stored_bytes"));
    let listed = daemon.call("backup_list", json!({ "store": store(dir) }));
    assert_eq!(listed, json!({ "backups": [monday, tuesday], "bad": [] }));

    for (backup, name, expected) in [(&monday, "r1", &first), (&tuesday, "r2", &second)] {
        let job = restore(&daemon, dir, &backup["backup"], name);
        assert_eq!(
            (&job["state"], &job["error"]),
            (&json!("complete"), &Value::Null)
        );
        let lvol = daemon.call("lvol_get", json!({ "lvol": format!("p/{name}") }));
        let used = expected.chunks(UNIT);
        let used = used
            .filter(|unit| unit.iter().any(|byte| *byte != 0))
            .count();
        assert_eq!(lvol["used_bytes"], used * UNIT, "zeroes take no space");
        assert!(contents(&daemon, dir, name) == *expected, "{name} differs");
    }
    let taken =
        json!({ "backup": monday["backup"], "store": store(dir), "pool": "p", "name": "r1" });
    assert_eq!(
        daemon.refused("backup_restore", taken).message,
        "File exists"
    );

    let on = |backup: &Value| json!({ "backup": backup["backup"], "store": store(dir) });
    let verified = ended(&daemon, &daemon.call("backup_verify", on(&tuesday)));
    assert_eq!(
        (&verified["state"], &verified["damaged"]),
        (&json!("complete"), &json!([]))
    );
    let deleted = ended(&daemon, &daemon.call("backup_delete", on(&monday)));
    assert_eq!(deleted["state"], "complete");
    let verified = ended(&daemon, &daemon.call("backup_verify", on(&tuesday)));
    assert_eq!(
        (&verified["state"], &verified["damaged"]),
        (&json!("complete"), &json!([]))
    );
    let gone = ended(&daemon, &daemon.call("backup_verify", on(&monday)));
    assert_eq!(gone["state"], "failed");
    let deleted = ended(&daemon, &daemon.call("backup_delete", on(&tuesday)));
    assert_eq!(deleted["state"], "complete");
    assert_eq!(std::fs::read_dir(dir.join("backups")).unwrap().count(), 0);
    // Nothing uses the snapshots any more.
    for name in ["v1@mon", "v1@tue"] {
        daemon.call("lvol_delete", json!({ "lvol": format!("p/{name}") }));
    }
}

/// Damaged data is named, and ends a restore, which leaves nothing.
#[test]
fn damaged_data_is_not_restored() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let daemon = start(dir);
    let mut expected = vec![0; SIZE];
    write(&daemon, &mut expected, 0, &data(1, UNIT));
    write(&daemon, &mut expected, 5 * MIB, &data(1, UNIT));
    snapshot(&daemon, "p/v1", "v1@mon");
    let backup = back_up(&daemon, dir, "p/v1@mon")["result"].clone();
    let word = |key: &str| backup[key].as_str().unwrap();
    let object = format!(
        "nacre-backup/{}/objects/{}/00000001",
        word("volume_uuid"),
        word("backup")
    );
    let path = dir.join("backups").join(&object);
    let mut bytes = std::fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&path, bytes).unwrap();

    let params = json!({ "backup": backup["backup"], "store": store(dir) });
    let verified = ended(&daemon, &daemon.call("backup_verify", params));
    assert_eq!(verified["state"], "complete");
    let damaged = verified["damaged"][0].as_str().unwrap();
    assert!(
        damaged.starts_with(&format!("{object} is damaged: ")),
        "{damaged}"
    );
    let job = restore(&daemon, dir, &backup["backup"], "r1");
    assert_eq!(
        (&job["state"], job["error"].as_str()),
        (&json!("failed"), Some(damaged))
    );
    assert_eq!(lvols(&daemon), ["v1", "v1@mon"]);
    let events = daemon.call("events_get", json!({}));
    let text = events.to_string();
    for kind in ["backup_created", "backup_damaged", "backup_failed"] {
        assert!(text.contains(kind), "{kind}: {text}");
    }
}

/// Refusals name the field; secrets are in no answer.
#[test]
fn refusals_name_the_field() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let daemon = start(dir);
    snapshot(&daemon, "p/v1", "v1@mon");
    let with = |snapshot: &str, store: Value| json!({ "snapshot": snapshot, "store": store });
    let key = dir.join("key");
    let text = "aws_access_key_id = key\naws_secret_access_key = geheim\n";
    std::fs::write(&key, text).unwrap();
    let s3 = |more: Value| {
        let mut store = json!({ "location": "s3://bucket/x", "endpoint": "http://127.0.0.1:1" });
        let more = more.as_object().unwrap().clone();
        store.as_object_mut().unwrap().extend(more);
        store
    };
    let table = [
        (with("p/v1", store(dir)), "snapshot"),
        (with("p/none", store(dir)), "snapshot"),
        (
            with("p/v1@mon", json!({ "location": "/backups" })),
            "store.location",
        ),
        (
            with(
                "p/v1@mon",
                json!({ "location": "file:///x", "region": "x" }),
            ),
            "store.region",
        ),
        (with("p/v1@mon", s3(json!({}))), "store.credentials_file"),
        (
            with("p/v1@mon", s3(json!({ "credentials_file": "key" }))),
            "store.credentials_file",
        ),
    ];
    for (params, field) in table {
        let refused = daemon.refused("backup_create", params);
        let data = refused.data.unwrap();
        assert_eq!(data.field.as_deref(), Some(field), "{}", data.cause);
    }
    let unknown = daemon.refused("backup_cancel", json!({ "job": 77 }));
    assert_eq!(unknown.data.unwrap().field.as_deref(), Some("job"));
    let missing = json!({ "location": "file:///does/not/exist" });
    let job = daemon.call("backup_create", with("p/v1@mon", missing));
    let job = ended(&daemon, &job);
    assert_eq!(job["state"], "failed");

    // Other users can read the file.
    let open = with("p/v1@mon", s3(json!({ "credentials_file": key })));
    let job = ended(&daemon, &daemon.call("backup_create", open.clone()));
    let error = job["error"].as_str().unwrap();
    assert!(error.contains("chmod 600"), "{error}");
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o600)).unwrap();
    // Nothing listens on port 1.
    let job = daemon.call("backup_create", open);
    daemon.call("backup_cancel", json!({ "job": job["job"] }));
    let job = ended(&daemon, &job);
    assert!(
        job["state"] == "cancelled" || job["state"] == "failed",
        "{job}"
    );
    let all = daemon.call("backup_jobs", Value::Null).to_string();
    assert!(!all.contains("geheim"), "{all}");
    daemon.call("lvol_delete", json!({ "lvol": "p/v1@mon" }));
}
