//! Goal: two clients that change one volume simultaneously do not undo each other's changes.
//! Method: both calls at once.

use serde_json::{Value, json};

use super::super::super::testing::{TestDaemon, test_daemon};
use super::ram;

/// A daemon with a volume "v".
fn with_volume() -> TestDaemon {
    let daemon = test_daemon();
    ram(&daemon, "a", 8);
    daemon.call("volume_create", json!({ "name": "v", "devices": ["a"] }));
    daemon
}

/// The number of accepted calls among `all`, made at once.
fn accepted(daemon: &TestDaemon, method: &str, all: [Value; 2]) -> usize {
    let raw = all.map(|params| serde_json::value::to_raw_value(&params).unwrap());
    let engine = &daemon.engine;
    let (one, other) = daemon.run(async {
        tokio::join!(
            engine.call(method, Some(&raw[0])),
            engine.call(method, Some(&raw[1]))
        )
    });
    [one, other]
        .iter()
        .filter(|outcome| outcome.is_ok())
        .count()
}

#[test]
fn simultaneous_settings_are_both_kept() {
    let daemon = with_volume();
    let set = |settings: Value| json!({ "name": "v", "settings": settings });
    let all = [
        set(json!({ "verify_hours": 7 })),
        set(json!({ "read_errors": 9 })),
    ];
    assert_eq!(accepted(&daemon, "volume_set", all), 2);
    let settings = daemon.call("volume_get", json!({ "name": "v" }))["settings"].clone();
    assert_eq!(
        (&settings["verify_hours"], &settings["read_errors"]),
        (&json!(7), &json!(9))
    );
}

#[test]
fn simultaneous_publishing_happens_once() {
    let daemon = with_volume();
    let nqn = |of: &str| format!("nqn.2026-01.org.example:{of}");
    let publish = |of: &str| json!({ "name": "v", "nqn": nqn(of), "allow_any_host": true });
    let all = [publish("one"), publish("other")];
    assert_eq!(accepted(&daemon, "volume_publish", all), 1);
    let subsystems = daemon.call("nvmf_get_subsystems", json!(null));
    assert_eq!(
        subsystems.as_array().unwrap().len(),
        2,
        "one subsystem and discovery"
    );
    daemon.call("volume_unpublish", json!({ "name": "v" }));
    let subsystems = daemon.call("nvmf_get_subsystems", json!(null));
    assert_eq!(subsystems.as_array().unwrap().len(), 1);
}

#[test]
fn simultaneous_renames_leave_one_name() {
    let daemon = with_volume();
    let rename = |to: &str| json!({ "name": "v", "new_name": to });
    accepted(&daemon, "volume_rename", [rename("w"), rename("x")]);
    let device = &daemon.call("bdev_get_bdevs", json!({ "name": "v" }))[0];
    let name = daemon.call("volume_list", json!(null))[0]["name"].clone();
    let aliases = device["aliases"].as_array().unwrap();
    assert!(aliases.contains(&name), "{device}");
    let others = ["w", "x"].map(|n| json!(n));
    let aliased = others.iter().filter(|other| aliases.contains(other));
    assert_eq!(aliased.count(), 1, "{device}");
}
