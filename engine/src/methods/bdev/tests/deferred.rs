//! Goal: a device may be created before its base exists, as in SPDK, and appears with the base.
//! Method: calls in the order in which SPDK saves them.

use serde_json::{Value, json};

use super::super::super::testing::{TestDaemon, test_daemon};
use crate::config::Settings;
use crate::store::Store;

fn delay(name: &str, base: &str) -> Value {
    json!({ "name": name, "base_bdev_name": base, "avg_read_latency": 1, "p99_read_latency": 1,
        "avg_write_latency": 1, "p99_write_latency": 1 })
}

fn malloc(name: &str) -> Value {
    json!({ "name": name, "num_blocks": 16384, "block_size": 512 })
}

fn names(daemon: &TestDaemon) -> Vec<String> {
    let all = daemon.call("bdev_get_bdevs", json!(null));
    let name = |bdev: &Value| bdev["name"].as_str().unwrap().to_owned();
    all.as_array().unwrap().iter().map(name).collect()
}

fn keys(daemon: &TestDaemon) -> Vec<String> {
    let all = daemon.engine.journal.entries().into_iter();
    all.map(|entry| entry.record.key).collect()
}

/// Goal: each device exists when the call that creates its last base returns.
#[test]
fn stacked_devices_appear_with_their_bases() {
    let daemon = test_daemon();
    assert_eq!(daemon.call("bdev_delay_create", delay("d1", "d0")), "d1");
    assert_eq!(daemon.call("bdev_delay_create", delay("d0", "m0")), "d0");
    let passthru = json!({ "name": "p", "base_bdev_name": "r" });
    assert_eq!(daemon.call("bdev_passthru_create", passthru), "p");
    let mirror = json!({ "name": "r", "raid_level": "raid1", "base_bdevs": ["m1", "m2"] });
    assert_eq!(daemon.call("bdev_raid_create", mirror), true);
    assert_eq!(
        daemon.call("bdev_error_create", json!({ "base_name": "m0x" })),
        true
    );
    assert!(names(&daemon).is_empty());
    daemon.call("bdev_malloc_create", malloc("m0"));
    assert_eq!(names(&daemon), ["m0", "d0", "d1"]);
    daemon.call("bdev_malloc_create", malloc("m1"));
    let raids = daemon.call("bdev_raid_get_bdevs", json!({ "category": "configuring" }));
    assert_eq!(
        (&raids[0]["name"], &raids[0]["num_base_bdevs_discovered"]),
        (&json!("r"), &json!(1))
    );
    daemon.call("bdev_malloc_create", malloc("m2"));
    assert_eq!(names(&daemon), ["m0", "d0", "d1", "m1", "m2", "r", "p"]);
    daemon.call("bdev_malloc_create", malloc("m0x"));
    assert!(names(&daemon).contains(&"EE_m0x".to_owned()));
    let waiting = keys(&daemon)
        .into_iter()
        .filter(|key| key.starts_with("deferred/"));
    assert_eq!(waiting.count(), 0);
    // A base named by its UUID.
    let uuid = "33333333-2222-3333-4444-555555555555";
    daemon.call("bdev_delay_create", delay("u", uuid));
    let mut base = malloc("m3");
    base["uuid"] = uuid.into();
    daemon.call("bdev_malloc_create", base);
    assert!(names(&daemon).contains(&"u".to_owned()));
}

/// Goal: a waiting device is stored, exported, deleted by name, and reserves its name.
#[test]
fn waiting_devices_are_stored_and_can_be_deleted() {
    let dir = tempfile::tempdir().unwrap();
    let start = || TestDaemon::with(Settings::default(), Some(Store::open(dir.path()).unwrap()));
    let mirror = json!({ "name": "r", "raid_level": "raid1", "base_bdevs": ["m", "n"] });
    {
        let daemon = start();
        daemon.call("bdev_delay_create", delay("d", "m"));
        daemon.call("bdev_delay_create", delay("e", "m2"));
        daemon.call("bdev_raid_create", mirror.clone());
        for (method, params) in [
            ("bdev_delay_create", delay("d", "x")),
            (
                "bdev_passthru_create",
                json!({ "name": "d", "base_bdev_name": "x" }),
            ),
            ("bdev_raid_create", mirror.clone()),
        ] {
            assert_eq!(daemon.refused(method, params).code, -17, "{method}");
        }
        assert_eq!(
            daemon.refused("bdev_delay_create", delay("", "x")).code,
            -22
        );
        let saved = daemon.call("framework_get_config", json!({ "name": "bdev" }));
        let saved = saved.to_string();
        assert!(saved.contains("bdev_delay_create") && saved.contains("bdev_raid_create"));
    }
    let daemon = start();
    let state = daemon.call("state_get", json!(null));
    assert_eq!(
        (
            &state["objects"][0]["key"],
            &state["objects"][0]["state"],
            &state["objects"][0]["error"]
        ),
        (
            &json!("deferred/d"),
            &json!("waiting"),
            &json!("there is no bdev \"m\" yet")
        )
    );
    daemon.call("bdev_raid_delete", json!({ "name": "r" }));
    daemon.call("bdev_delay_delete", json!({ "name": "e" }));
    daemon.call("bdev_malloc_create", malloc("m"));
    assert_eq!(names(&daemon), ["m", "d"]);
    assert_eq!(keys(&daemon), ["bdev/m", "bdev/d"]);
    drop(daemon);
    assert_eq!(names(&start()), ["m", "d"], "bases come first");
}
