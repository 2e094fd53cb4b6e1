//! Jobs that end early: cancelled, on a full pool, in a daemon that ends, beside another daemon.

use std::net::TcpListener;
use std::path::PathBuf;
use std::time::Duration;

use uuid::Uuid;

use super::*;

/// A snapshot with two objects, and its backup.
fn with_backup(dir: &Path) -> (TestDaemon, Value) {
    let daemon = start(dir);
    let mut expected = vec![0; SIZE];
    write(&daemon, &mut expected, 0, &data(1, UNIT));
    write(&daemon, &mut expected, 5 * MIB, &data(1, UNIT));
    snapshot(&daemon, "p/v1", "v1@mon");
    let backup = back_up(&daemon, dir, "p/v1@mon")["result"].clone();
    (daemon, backup)
}

fn volume_dir(dir: &Path, backup: &Value) -> PathBuf {
    let volume = backup["volume_uuid"].as_str().unwrap();
    dir.join("backups/nacre-backup").join(volume)
}

/// Begins a restore that never ends: its second object is a pipe that nothing opens. Returns the
/// job when the new volume exists.
fn endless_restore(daemon: &TestDaemon, dir: &Path, backup: &Value) -> Value {
    let objects = volume_dir(dir, backup).join("objects");
    let object = objects.join(backup["backup"].as_str().unwrap());
    let object = object.join("00000001");
    std::fs::remove_file(&object).unwrap();
    let mode = rustix::fs::Mode::RUSR;
    rustix::fs::mkfifoat(rustix::fs::CWD, &object, mode).unwrap();
    let params = json!({
        "backup": backup["backup"], "store": store(dir), "pool": "p", "name": "r1",
    });
    let job = daemon.call("backup_restore", params);
    for _ in 0..3000 {
        if leftover(daemon).is_some() {
            return job;
        }
        pause(daemon);
    }
    panic!("no volume appears");
}

/// The name of an unfinished volume.
fn leftover(daemon: &TestDaemon) -> Option<String> {
    let lvols = lvols(daemon).into_iter();
    lvols.rev().find(|name| name.starts_with("restore-"))
}

fn cancelled(daemon: &TestDaemon, job: &Value) {
    daemon.call("backup_cancel", json!({ "job": job["job"] }));
    assert_eq!(ended(daemon, job)["state"], "cancelled");
}

/// A creation keeps its snapshot and pool until it ends. At most four jobs run.
#[test]
fn a_running_backup_keeps_its_snapshot() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let daemon = start(dir);
    snapshot(&daemon, "p/v1", "v1@mon");
    // A server that never answers.
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let key = dir.join("key");
    let text = "aws_access_key_id = key\naws_secret_access_key = secret\n";
    std::fs::write(&key, text).unwrap();
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o600)).unwrap();
    let endpoint = format!("http://{}", server.local_addr().unwrap());
    let store = json!({ "location": "s3://b", "endpoint": endpoint, "credentials_file": key });
    let params = json!({ "snapshot": "p/v1@mon", "store": store });
    let jobs: Vec<_> = (0..4)
        .map(|_| daemon.call("backup_create", params.clone()))
        .collect();
    let refused = daemon.refused("backup_create", params);
    assert_eq!(refused.data.unwrap().cause, "4 jobs run");
    for (method, params, message) in [
        (
            "lvol_delete",
            json!({ "lvol": "p/v1@mon" }),
            "Operation not permitted",
        ),
        (
            "pool_delete",
            json!({ "pool": "p" }),
            "Device or resource busy",
        ),
        (
            "pool_export",
            json!({ "pool": "p" }),
            "Device or resource busy",
        ),
    ] {
        let refused = daemon.refused(method, params);
        assert_eq!(refused.message, message, "{method}");
    }
    for job in &jobs {
        cancelled(&daemon, job);
    }
    daemon.call("lvol_delete", json!({ "lvol": "p/v1@mon" }));
}

/// A cancelled restore leaves no volume, even if another user of the volume is slow to let it go.
#[test]
fn a_cancelled_restore_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let (daemon, backup) = with_backup(dir);
    let job = endless_restore(&daemon, dir, &backup);
    let refused = daemon.refused("pool_delete", json!({ "pool": "p" }));
    assert_eq!(refused.message, "Device or resource busy");
    let name = format!("p/{}", leftover(&daemon).unwrap());
    daemon.call("backup_cancel", json!({ "job": job["job"] }));
    // Takes the volume before the job deletes it, unless the job is faster.
    let claim = loop {
        let holder = Holder::User("a test".into());
        let claim = daemon.run(async {
            let plane = daemon.engine.plane().unwrap();
            plane.bdevs.claim(&name, holder, Usage::Exclusive)
        });
        if claim.is_ok() || leftover(&daemon).is_none() {
            break claim.ok();
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    daemon.run(async { tokio::time::sleep(Duration::from_millis(150)).await });
    drop(claim);
    assert_eq!(ended(&daemon, &job)["state"], "cancelled");
    assert_eq!(lvols(&daemon), ["v1", "v1@mon"]);
}

/// The end of a daemon cancels its jobs. A daemon that is killed leaves a volume that can be
/// deleted, and its snapshots as they were.
#[test]
fn a_daemon_that_ends_during_a_restore() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let (daemon, backup) = with_backup(dir);
    let job = endless_restore(&daemon, dir, &backup);
    let name = leftover(&daemon).unwrap();
    // The disk and the state between the two objects. A copy of a disk that changes would be none
    // of one moment.
    until(&daemon, &job, |job| job["done_objects"] == 1);
    let (disk, killed) = (dir.join("disk"), dir.join("killed"));
    std::fs::copy(&disk, &killed).unwrap();
    drop(daemon);
    let again = || {
        let store = Store::open(&dir.join("state")).unwrap();
        TestDaemon::with(Settings::default(), Some(store))
    };
    let daemon = again();
    assert_eq!(lvols(&daemon), ["v1", "v1@mon"]);
    drop(daemon);
    std::fs::copy(&killed, &disk).unwrap();
    let daemon = again();
    assert_eq!(lvols(&daemon).len(), 3);
    daemon.call("lvol_delete", json!({ "lvol": format!("p/{name}") }));
    assert_eq!(lvols(&daemon), ["v1", "v1@mon"]);
}

/// A restore that fills the pool fails, and gives its space back.
#[test]
fn a_restore_to_a_full_pool_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let (daemon, backup) = with_backup(dir);
    let free = || {
        let pool = daemon.call("pool_get", json!({ "pool": "p" }));
        pool["free_bytes"].as_u64().unwrap()
    };
    // Thick volumes reserve the space: the first one all but some MiB, the second one the units.
    let reserve = |name: &str, sizes: Vec<usize>| {
        sizes.into_iter().any(|size| {
            let rest = json!({ "pool": "p", "name": name, "size": size, "thick": true });
            daemon.try_call("lvol_create", rest).is_ok()
        })
    };
    let all = free() as usize;
    assert!(reserve(
        "rest",
        (0..64).map(|less| all - less * MIB).collect()
    ));
    reserve("units", (1..=16).rev().map(|units| units * UNIT).collect());
    let before = free();
    let job = restore(&daemon, dir, &backup["backup"], "r1");
    assert_eq!(job["state"], "failed");
    assert_eq!(job["error"], "cannot write the volume: the pool is full");
    assert_eq!(leftover(&daemon), None);
    assert_eq!(free(), before);
}

/// Another daemon backs up the volume: a deletion leaves the objects, and says so.
#[test]
fn a_deletion_beside_another_daemon() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let (daemon, first) = with_backup(dir);
    snapshot(&daemon, "p/v1", "v1@tue");
    let second = back_up(&daemon, dir, "p/v1@tue")["result"].clone();
    let marks = volume_dir(dir, &first).join("running");
    std::fs::create_dir_all(&marks).unwrap();
    let mark = marks.join(format!("{}_{}", Uuid::from_u128(7), Uuid::from_u128(8)));
    std::fs::write(&mark, "{}\n").unwrap();
    let deleted = |backup: &Value| {
        let params = json!({ "backup": backup["backup"], "store": store(dir) });
        ended(&daemon, &daemon.call("backup_delete", params))
    };
    let job = deleted(&first);
    assert_eq!(
        (&job["state"], &job["deferred"]),
        (&json!("complete"), &json!(true))
    );
    assert_eq!(
        restore(&daemon, dir, &second["backup"], "r1")["state"],
        "complete"
    );
    std::fs::remove_dir_all(&marks).unwrap();
    assert_eq!(deleted(&second)["deferred"], false);
    assert_eq!(std::fs::read_dir(dir.join("backups")).unwrap().count(), 0);
}

/// Goal: a deletion succeeds beside another backup with a bad manifest, and names the manifest.
#[test]
fn a_deletion_beside_a_bad_manifest() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let (daemon, first) = with_backup(dir);
    snapshot(&daemon, "p/v1", "v1@tue");
    let second = back_up(&daemon, dir, "p/v1@tue")["result"].clone();
    let id = second["backup"].as_str().unwrap();
    let name = format!("{id}.json");
    let manifest = volume_dir(dir, &second).join("manifests").join(&name);
    let mut bad = std::fs::read(&manifest).unwrap();
    let last = bad.len() - 10;
    bad[last] ^= 1;
    std::fs::write(&manifest, bad).unwrap();
    let deleted = |backup: &Value| {
        let params = json!({ "backup": backup["backup"], "store": store(dir) });
        ended(&daemon, &daemon.call("backup_delete", params))
    };
    let job = deleted(&first);
    assert_eq!(
        (&job["state"], &job["error"]),
        (&json!("complete"), &Value::Null)
    );
    let left = job["left"].as_array().unwrap();
    assert!(
        left.len() == 1 && left[0].as_str().unwrap().contains(&name),
        "{job}"
    );
    assert_eq!(deleted(&second)["left"], json!([]));
    assert_eq!(std::fs::read_dir(dir.join("backups")).unwrap().count(), 0);
}
