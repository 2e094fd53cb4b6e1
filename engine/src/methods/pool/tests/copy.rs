//! Goal: a shallow copy has the units that a snapshot does not share with its parent, and refusals
//! are SPDK's. Method: the label of a volume is the data.

use serde_json::{Value, json};

use super::{disk, start, until};
use crate::methods::testing::TestDaemon;

const START: &str = "bdev_lvol_start_shallow_copy";
const CHECK: &str = "bdev_lvol_check_shallow_copy";
const UNIT: usize = 64 << 10;

fn params(from: &str, to: &str) -> Value {
    json!({ "src_lvol_name": from, "dst_bdev_name": to })
}

/// Makes a copy. Returns the last answer about it.
fn copied(daemon: &TestDaemon, from: &str, to: &str) -> Value {
    let operation = daemon.call(START, params(from, to));
    let last = std::cell::RefCell::default();
    until(daemon, || {
        let answer = daemon.call(CHECK, operation.clone());
        let has_ended = answer["state"] != "in progress";
        last.replace(answer);
        has_ended
    });
    let unknown = daemon.refused(CHECK, operation);
    assert_eq!((unknown.code, &*unknown.message), (-19, "No such device"));
    last.into_inner()
}

/// A pool with the volume "a", on which nothing is written yet.
fn with_lvol(dir: &std::path::Path) -> TestDaemon {
    let path = dir.join("disk");
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(128 << 20).unwrap();
    let daemon = start(&dir.join("state"));
    disk(&daemon, &path);
    daemon.call("pool_create", json!({ "name": "lvs", "disk": "disk" }));
    let lvol = json!({ "pool": "lvs", "name": "a", "size": "8MiB" });
    daemon.call("lvol_create", lvol);
    daemon
}

/// Writes the label of a volume.
fn write(daemon: &TestDaemon) {
    let volume = json!({ "name": "v", "devices": ["lvs/a"] });
    daemon.call("volume_create", volume);
}

/// The device of a volume shows the space that it uses now.
#[test]
fn a_device_shows_its_present_space() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = with_lvol(dir.path());
    let clusters = || {
        let device = daemon.call("bdev_get_bdevs", json!({ "name": "lvs/a" }));
        device[0]["driver_specific"]["lvol"]["num_allocated_clusters"].clone()
    };
    assert_eq!(clusters(), 0);
    write(&daemon);
    let shown = clusters().as_u64().unwrap();
    let used = daemon.call("lvol_get", json!({ "lvol": "lvs/a" }))["used_bytes"].clone();
    assert!(shown > 0);
    assert_eq!(used, shown * UNIT as u64);
}

#[test]
fn a_shallow_copy_has_the_changed_clusters() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = with_lvol(dir.path());
    write(&daemon);
    for name in ["s1", "s2"] {
        let cut = json!({ "snapshots": [{ "lvol": "lvs/a", "name": name }] });
        daemon.call("lvol_snapshot", cut);
    }
    for (name, mib) in [("first", 8), ("second", 8), ("small", 4)] {
        let path = dir.path().join(name);
        let file = std::fs::File::create(&path).unwrap();
        file.set_len(mib << 20).unwrap();
        let aio = json!({ "name": name, "filename": path, "block_size": 512 });
        daemon.call("bdev_aio_create", aio);
    }
    let units = |name: &str| {
        let bytes = std::fs::read(dir.path().join(name)).unwrap();
        let units = bytes.chunks(UNIT);
        units
            .filter(|unit| unit.iter().any(|byte| *byte != 0))
            .count() as u64
    };
    let first = copied(&daemon, "lvs/s1", "first");
    assert_eq!(first["state"], "complete");
    assert_eq!(first["copied_clusters"], first["total_clusters"]);
    assert!(units("first") > 0);
    assert!(units("first") <= first["total_clusters"].as_u64().unwrap());
    // The copy has the label of the volume.
    let label = daemon.refused(
        "volume_create",
        json!({ "name": "w", "devices": ["first"] }),
    );
    assert_eq!(label.message, "Operation not permitted", "{label}");
    // Nothing was written between the snapshots.
    let second = copied(&daemon, "lvs/s2", "second");
    let expected = json!({ "copied_clusters": 0, "total_clusters": 0, "state": "complete" });
    assert_eq!((second, units("second")), (expected, 0));

    let error = |from, to| copied(&daemon, from, to)["error"].clone();
    assert_eq!(error("lvs/a", "second"), "Operation not permitted");
    assert_eq!(error("lvs/s1", "small"), "Invalid argument");
    for (params, code, message) in [
        (params("lvs/none", "second"), -19, "No such device"),
        (params("lvs/s1", "none"), -32602, "No such device"),
        (params("lvs/s1", "disk"), -32602, "Operation not permitted"),
        (
            json!({ "src_lvol_name": "lvs/s1" }),
            -32603,
            "Invalid parameters",
        ),
    ] {
        let refused = daemon.refused(START, params);
        assert_eq!((refused.code, &*refused.message), (code, message));
    }
}
