//! Goal: objects and settings of a volume survive a rename, under the old and the new name. The
//! block device gets the new name only at the next restart.

use serde_json::{Value, json};

use super::super::super::testing::TestDaemon;
use super::{file, until};
use crate::config::Settings;
use crate::store::Store;

const NQN: &str = "nqn.2025-01.io.nacre:v";

fn start(dir: &std::path::Path) -> TestDaemon {
    let store = Store::open(&dir.join("state")).unwrap();
    TestDaemon::with(Settings::default(), Some(store))
}

/// A volume created as "old" and renamed to "v" in the same run of the daemon.
fn renamed(dir: &std::path::Path) -> TestDaemon {
    let daemon = start(dir);
    file(&daemon, dir, "a", 8);
    daemon.call(
        "volume_create",
        json!({ "name": "old", "devices": ["a"], "settings": { "settle_ms": 50 } }),
    );
    limit(&daemon, "old", 5000);
    daemon.call("volume_rename", json!({ "name": "old", "new_name": "v" }));
    until(&daemon, "in sync", |v| v["state"] == "healthy");
    daemon
}

fn limit(daemon: &TestDaemon, name: &str, per_s: u64) {
    let params = json!({ "name": name, "rw_ios_per_sec": per_s });
    daemon.call("bdev_set_qos_limit", params);
}

fn limit_of(daemon: &TestDaemon, name: &str) -> Value {
    let device = daemon.call("bdev_get_bdevs", json!({ "name": name }));
    device[0]["assigned_rate_limits"]["rw_ios_per_sec"].clone()
}

/// The number of stored limit records.
fn stored_limits(daemon: &TestDaemon) -> usize {
    let entries = daemon.engine.journal.entries();
    let limits = entries.iter().filter(|e| e.record.key.starts_with("qos/"));
    limits.count()
}

fn nothing_failed(daemon: &TestDaemon) {
    let state = daemon.call("state_get", json!(null)).to_string();
    assert!(!state.contains("\"failed\""), "{state}");
}

/// Goal: limits belong to the device under any of its names, and are stored in one record.
#[test]
fn limits_stay_with_a_renamed_volume() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = renamed(dir.path());
    assert_eq!(
        (limit_of(&daemon, "v"), limit_of(&daemon, "old")),
        (json!(5000), json!(5000))
    );
    drop(daemon);
    let daemon = start(dir.path());
    until(&daemon, "open", |v| v["state"] == "healthy");
    assert_eq!(limit_of(&daemon, "v"), 5000);
    assert_eq!(stored_limits(&daemon), 1);
    // Changed, then changed again under another name.
    limit(&daemon, "v", 6000);
    daemon.call("volume_rename", json!({ "name": "v", "new_name": "w" }));
    limit(&daemon, "w", 7000);
    assert_eq!(stored_limits(&daemon), 1);
    daemon.call("volume_rename", json!({ "name": "w", "new_name": "v" }));
    assert_eq!(limit_of(&daemon, "v"), 7000);
    drop(daemon);
    let daemon = start(dir.path());
    until(&daemon, "open", |v| v["state"] == "healthy");
    assert_eq!(limit_of(&daemon, "v"), 7000);
    nothing_failed(&daemon);
    // Removed, and still removed after a restart.
    limit(&daemon, "v", 0);
    assert_eq!(stored_limits(&daemon), 0);
    drop(daemon);
    let daemon = start(dir.path());
    until(&daemon, "open", |v| v["state"] == "healthy");
    assert_eq!(limit_of(&daemon, "v"), 0);
}

/// Goal: limits set between the rename and the restart are kept under both names.
#[test]
fn limits_set_after_a_rename_are_kept() {
    for name in ["v", "old"] {
        let dir = tempfile::tempdir().unwrap();
        let daemon = renamed(dir.path());
        limit(&daemon, name, 6000);
        drop(daemon);
        let daemon = start(dir.path());
        until(&daemon, "open", |v| v["state"] == "healthy");
        assert_eq!(limit_of(&daemon, "v"), 6000, "set as \"{name}\"");
        assert_eq!(stored_limits(&daemon), 1);
        nothing_failed(&daemon);
    }
}

/// Goal: namespaces and stacked devices created after a rename survive the restart. Metrics and
/// events use the new name at once.
#[test]
fn objects_made_after_a_rename_survive_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = renamed(dir.path());
    let params = json!({ "name": "v", "allow_any_host": true,
        "listeners": [{ "trtype": "TCP", "traddr": "127.0.0.1", "trsvcid": "0" }] });
    assert_eq!(daemon.call("volume_publish", params)["nqn"], NQN);
    // A second volume, because a volume in use by hosts cannot have a stacked device.
    file(&daemon, dir.path(), "b", 8);
    daemon.call("volume_create", json!({ "name": "base", "devices": ["b"] }));
    let rename = json!({ "name": "base", "new_name": "below" });
    daemon.call("volume_rename", rename);
    let stacked = json!({ "name": "top", "base_bdev_name": "base" });
    daemon.call("bdev_passthru_create", stacked);
    let metrics = daemon
        .run(crate::metrics::Scrape::of(&daemon.engine))
        .text();
    assert!(metrics.contains("nacre_volume_state{volume=\"v\",state=\"healthy\"} 1.0"));
    assert!(!metrics.contains("volume=\"old\""), "{metrics}");
    drop(daemon);

    let daemon = start(dir.path());
    let now = until(&daemon, "open, with its namespace", |v| {
        v["state"] == "healthy" && v["subsystems"] == json!([NQN])
    });
    assert_eq!(now["bdev"], "v");
    let found = &daemon.call("bdev_get_bdevs", json!({ "name": "v" }))[0];
    assert_eq!(
        (&found["name"], &found["aliases"]),
        (&json!("v"), &json!([now["uuid"]]))
    );
    daemon.refused("bdev_get_bdevs", json!({ "name": "old" }));
    // Its volume may open later than the other one.
    until(&daemon, "with the stacked device", |_| {
        daemon
            .try_call("bdev_get_bdevs", json!({ "name": "top" }))
            .is_ok()
    });
    nothing_failed(&daemon);
    assert_eq!(
        daemon.call("volume_unpublish", json!({ "name": "v" })),
        true
    );
}
