//! Goal: volumes are created, listed, changed and deleted as the methods specify, every refusal
//! names the cause, and volumes return after a restart.

mod description;
mod frozen;
mod full;
mod half;
mod of_volumes;
mod on_pools;
mod published;
mod racing;
mod renamed;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nacre_bdev_replica::store::{Call, MemoryStore, Outcome, Plan, StoreRequest};
use serde_json::{Value, json};

use super::super::testing::{TestDaemon, test_daemon};
use crate::config::Settings;
use crate::store::Store;

pub(super) const ID: &str = "7b1d3f6e-52ab-4a0c-9a0e-0d9e6c1f2b3a";

pub(super) fn ram(daemon: &TestDaemon, name: &str, mib: u64) {
    let params = json!({ "name": name, "num_blocks": mib << 11, "block_size": 512 });
    daemon.call("bdev_malloc_create", params);
}

pub(super) fn file(daemon: &TestDaemon, dir: &Path, name: &str, mib: u64) {
    let path = dir.join(name);
    if !path.exists() {
        std::fs::File::create(&path)
            .and_then(|f| f.set_len(mib << 20))
            .unwrap();
    }
    let params = json!({ "name": name, "filename": path, "block_size": 512 });
    daemon.call("bdev_uring_create", params);
}

/// Creates a volume "v" on two RAM disks.
fn mirror(daemon: &TestDaemon) -> Value {
    ram(daemon, "a", 8);
    ram(daemon, "b", 8);
    let params = json!({ "name": "v", "devices": ["a", "b"], "uuid": ID });
    daemon.call("volume_create", params)
}

pub(super) fn pause(daemon: &TestDaemon, time: Duration) {
    daemon.run(async { tokio::time::sleep(time).await });
}

#[track_caller]
pub(super) fn until(daemon: &TestDaemon, what: &str, done: impl Fn(&Value) -> bool) -> Value {
    let end = Instant::now() + Duration::from_secs(30);
    loop {
        let volume = daemon.call("volume_get", json!({ "name": "v" }));
        if done(&volume) {
            return volume;
        }
        assert!(Instant::now() < end, "{what}: {volume:#}");
        pause(daemon, Duration::from_millis(10));
    }
}

/// Masks fields that differ per run.
fn masked(mut volume: Value) -> Value {
    for key in ["queues", "dirty_regions", "reactor"] {
        volume[key] = json!("…");
    }
    for replica in volume["replicas"].as_array_mut().unwrap() {
        for key in ["id", "read_latency_us", "write_latency_us"] {
            replica[key] = json!("…");
        }
    }
    volume
}

fn states(volume: &Value) -> Vec<&str> {
    let replicas = volume["replicas"].as_array().unwrap();
    replicas
        .iter()
        .map(|r| r["state"].as_str().unwrap())
        .collect()
}

pub(super) fn facts(refused: &crate::rpc::RpcError) -> (i32, Option<&str>) {
    let field = refused.data.as_ref().and_then(|d| d.field.as_deref());
    (refused.code, field)
}

/// Goal: a volume is not deleted while the store does not respond. It serves again once the store
/// responds, and can be deleted then.
#[test]
fn a_volume_that_cannot_be_deleted_serves_again() {
    let memory = MemoryStore::alone();
    let daemon = TestDaemon::with_volumes(None, Arc::new(memory.clone()));
    mirror(&daemon);
    memory.plan(Some(Box::new(|call: &Call| match call.request {
        StoreRequest::Swap => Plan::outcome(Outcome::Refuse),
        _ => Plan::default(),
    })));
    let refused = daemon.refused("volume_delete", json!({ "name": "v" }));
    assert_eq!(facts(&refused), (-110, None), "{refused}");
    memory.plan(None);
    until(&daemon, "open again", |v| v["state"] == "healthy");
    let found = daemon.call("bdev_get_bdevs", json!({ "name": "v" }));
    assert_eq!(found[0]["uuid"], ID);
    daemon.call("volume_delete", json!({ "name": "v" }));
    assert_eq!(daemon.call("volume_get_volumes", json!(null)), json!([]));
}

#[test]
fn a_volume_is_created_listed_and_deleted() {
    let daemon = test_daemon();
    let made = mirror(&daemon);
    insta::assert_json_snapshot!(masked(made));
    assert_eq!(
        daemon.call("volume_get_volumes", json!(null))[0]["uuid"],
        ID
    );
    // It is a block device, and claims its devices exclusively.
    let bdev = &daemon.call("bdev_get_bdevs", json!({ "name": "v" }))[0];
    assert_eq!(
        (&bdev["uuid"], &bdev["num_blocks"], &bdev["product_name"]),
        (&json!(ID), &json!(7 << 11), &json!("Replicated volume"))
    );
    let claimed = &daemon.call("bdev_get_bdevs", json!({ "name": "a" }))[0];
    assert_eq!(
        (&claimed["claimed"], &claimed["claim_type"]),
        (&json!(true), &json!("exclusive_write"))
    );
    let records = daemon.call("volume_get_records", json!(null));
    assert_eq!(
        (&records["file"], &records["volumes"][0]["name"]),
        (&Value::Null, &json!("v"))
    );
    assert_eq!(records["volumes"][0]["replicas"][1]["device"], "b");
    // A saved configuration's create call returns the existing volume.
    let config = daemon.call("framework_get_config", json!({ "name": "bdev" }));
    let calls = config.as_array().unwrap();
    let create = calls.iter().find(|c| c["method"] == "volume_create");
    let params = create.unwrap()["params"].clone();
    assert_eq!(
        (&params["force"], &params["devices"]),
        (&Value::Null, &json!(["a", "b"]))
    );
    assert_eq!(daemon.call("volume_create", params)["uuid"], ID);
    assert_eq!(daemon.call("volume_delete", json!({ "name": "v" })), true);
    assert_eq!(daemon.call("volume_list", json!(null)), json!([]));
    let free = &daemon.call("bdev_get_bdevs", json!({ "name": "a" }))[0];
    assert_eq!(free["claimed"], false);
    let events = daemon.call("events_get", json!({ "categories": ["volume"] }));
    let kinds: Vec<&str> = events["events"]
        .as_array()
        .unwrap()
        .iter()
        .map(|e| e["type"].as_str().unwrap())
        .collect();
    assert!(
        ["volume_create", "volume_open", "volume_delete"]
            .iter()
            .all(|k| kinds.contains(k)),
        "{kinds:?}"
    );
}

#[test]
fn errors_name_the_cause() {
    let daemon = test_daemon();
    mirror(&daemon);
    ram(&daemon, "c", 8);
    ram(&daemon, "tiny", 1);
    daemon.call("nvmf_create_subsystem", json!({ "nqn": "nqn.2026-01.x:s" }));
    for (method, params, code, field) in [
        (
            "volume_create",
            json!({ "name": "w", "devices": ["x"] }),
            -19,
            Some("devices[0]"),
        ),
        (
            "volume_create",
            json!({ "name": "w", "devices": ["c", "c"] }),
            -22,
            Some("devices[1]"),
        ),
        (
            "volume_create",
            json!({ "name": "w", "devices": [] }),
            -22,
            Some("devices"),
        ),
        (
            "volume_create",
            json!({ "name": "w", "devices": ["iscsi://192.0.2.1/nqn.2026-01.x:s"] }),
            -32602,
            Some("devices[0]"),
        ),
        (
            "volume_create",
            json!({ "name": "v", "devices": ["c"] }),
            -17,
            Some("name"),
        ),
        (
            "volume_create",
            json!({ "name": "w", "devices": ["tiny"] }),
            -22,
            Some("devices"),
        ),
        (
            "volume_create",
            json!({ "name": "w", "devices": ["c"], "size_mb": 100 }),
            -22,
            Some("size"),
        ),
        (
            "volume_create",
            json!({ "name": "w", "devices": ["c"], "size_mb": 1, "num_blocks": 2048 }),
            -22,
            Some("size_mb"),
        ),
        (
            "volume_create",
            json!({ "name": "w", "devices": ["c"], "settings": { "min_in_sync": 2 } }),
            -22,
            Some("min_in_sync"),
        ),
        (
            "volume_create",
            json!({ "name": "w", "devices": ["c"], "settings": { "read_polcy": "x" } }),
            -32602,
            Some("settings.read_polcy"),
        ),
        // The device is a replica of another volume.
        (
            "volume_create",
            json!({ "name": "w", "devices": ["a"] }),
            -19,
            Some("device"),
        ),
        ("volume_get", json!({ "name": "w" }), -19, Some("name")),
        ("volume_delete", json!({ "name": "w" }), -19, Some("name")),
        (
            "volume_remove_replica",
            json!({ "name": "v", "replica": "c" }),
            -19,
            Some("replica"),
        ),
        (
            "volume_add_replica",
            json!({ "name": "v", "device": "x" }),
            -19,
            Some("device"),
        ),
        (
            "volume_add_replica",
            json!({ "name": "v", "device": "a" }),
            -22,
            Some("device"),
        ),
        (
            "volume_resync",
            json!({ "name": "v", "full": true }),
            -22,
            Some("replica"),
        ),
        (
            "volume_verify",
            json!({ "name": "v", "stop": true, "repair": true }),
            -22,
            Some("repair"),
        ),
        (
            "volume_set",
            json!({ "name": "v", "settings": { "min_in_sync": 3 } }),
            -22,
            Some("min_in_sync"),
        ),
        (
            "volume_grow",
            json!({ "name": "v", "size_mb": 100 }),
            -22,
            Some("blocks"),
        ),
        (
            "volume_rename",
            json!({ "name": "v", "new_name": "a" }),
            -17,
            Some("new_name"),
        ),
        (
            "volume_thaw",
            json!({ "name": "v", "replica": "a" }),
            -22,
            Some("replica"),
        ),
        ("volume_unpublish", json!({ "name": "v" }), -2, Some("name")),
        (
            "volume_publish",
            json!({ "name": "v", "nqn": "x" }),
            -32602,
            Some("nqn"),
        ),
        // The volume's devices cannot be used by namespaces.
        (
            "nvmf_subsystem_add_ns",
            json!({ "nqn": "nqn.2026-01.x:s", "namespace": { "bdev_name": "a" } }),
            -32602,
            Some("namespace.bdev_name"),
        ),
        (
            "bdev_delay_create",
            json!({ "name": "d", "base_bdev_name": "a", "avg_read_latency": 1, "p99_read_latency": 1,
                "avg_write_latency": 1, "p99_write_latency": 1 }),
            -1,
            Some("name"),
        ),
    ] {
        let refused = daemon.refused(method, params.clone());
        assert_eq!(
            facts(&refused),
            (code, field),
            "{method} {params}: {refused}"
        );
    }
    let error = daemon.refused("volume_get", json!({ "name": "vv" }));
    assert_eq!(
        error.data.unwrap().remedy.as_deref(),
        Some("did you mean \"v\"?")
    );
    // Refused calls changed nothing.
    assert_eq!(
        daemon
            .call("volume_list", json!(null))
            .as_array()
            .unwrap()
            .len(),
        1
    );
    let c = &daemon.call("bdev_get_bdevs", json!({ "name": "c" }))[0];
    assert_eq!(c["claimed"], false);
}

/// Goal: replicas are added, removed and moved; the last good replica cannot be removed.
#[test]
fn replicas_are_added_removed_and_moved() {
    let daemon = test_daemon();
    mirror(&daemon);
    ram(&daemon, "c", 8);
    ram(&daemon, "d", 8);
    let added = daemon.call("volume_add_replica", json!({ "name": "v", "device": "c" }));
    assert_eq!(added["replicas"].as_array().unwrap().len(), 3);
    until(&daemon, "the third replica is in sync", |v| {
        states(v) == ["in_sync"; 3] && v["state"] == "healthy"
    });
    let off = json!({ "name": "v", "member": "c" });
    let now = daemon.call("volume_offline_replica", off.clone());
    assert_eq!(
        (&now["replicas"][2]["state"], &now["replicas"][2]["offline"]),
        (&json!("out"), &json!(true))
    );
    assert_eq!(now["state"], "degraded");
    assert!(now["replicas"][2]["why"].is_string(), "{now:#}");
    daemon.call("volume_online_replica", off);
    until(&daemon, "in sync again", |v| v["state"] == "healthy");
    let moved = json!({ "name": "v", "replica": "c", "device": "d" });
    daemon.call("volume_move_replica", moved);
    let now = until(&daemon, "the replica has moved", |v| {
        v["replicas"].as_array().unwrap().len() == 3 && v["state"] == "healthy"
    });
    let devices = now["replicas"].as_array().unwrap();
    let mut devices: Vec<&str> = devices
        .iter()
        .map(|r| r["device"].as_str().unwrap())
        .collect();
    devices.sort_unstable();
    assert_eq!(devices, ["a", "b", "d"]);
    for replica in ["d", "b"] {
        let gone = json!({ "name": "v", "replica": replica });
        daemon.call("volume_remove_replica", gone);
    }
    let last = json!({ "name": "v", "replica": "a" });
    let refused = daemon.refused("volume_offline_replica", last);
    assert_eq!(facts(&refused), (-1, Some("force")));
    let refused = daemon.refused("bdev_malloc_delete", json!({ "name": "a" }));
    assert_eq!(facts(&refused), (-16, Some("name")), "{refused}");
    // Removing a replica also clears its label.
    let mut new = json!({ "name": "w", "devices": ["d"] });
    let refused = daemon.refused("volume_create", new.clone()).to_string();
    assert!(
        refused.contains("holds data") && !refused.contains("replica of"),
        "{refused}"
    );
    new["force"] = true.into();
    assert_eq!(daemon.call("volume_create", new)["state"], "healthy");
}

/// Goal: a replica's device can be pulled; the volume continues without it and reports that.
#[test]
fn a_replica_device_may_be_pulled() {
    let daemon = test_daemon();
    mirror(&daemon);
    daemon.call("bdev_malloc_delete", json!({ "name": "a" }));
    let now = until(&daemon, "the volume continues without it", |v| {
        v["state"] == "degraded"
    });
    assert_eq!(
        (
            &now["replicas"][0]["state"],
            &now["replicas"][0]["attached"]
        ),
        (&json!("out"), &json!(false))
    );
    daemon.call("bdev_get_bdevs", json!({ "name": "v" }));
    let refused = daemon.refused("bdev_malloc_delete", json!({ "name": "b" }));
    assert!(refused.to_string().contains("last good"), "{refused}");
    let refused = daemon.refused("volume_delete", json!({ "name": "v" }));
    assert_eq!(facts(&refused), (-1, Some("force")), "{refused}");
    let forced = json!({ "name": "v", "force": "v" });
    assert_eq!(daemon.call("volume_delete", forced), true);
}

#[test]
fn settings_size_and_name_change_live() {
    let daemon = test_daemon();
    ram(&daemon, "a", 8);
    ram(&daemon, "b", 8);
    let small = json!({ "name": "v", "devices": ["a", "b"], "size_mb": 2, "uuid": ID });
    daemon.call("volume_create", small);
    let set = json!({ "name": "v", "settings": {
        "read_policy": "round-robin", "min_in_sync": 2, "resync_bytes_per_s": 1 << 30,
    }});
    let now = daemon.call("volume_set", set);
    assert_eq!(
        (
            &now["settings"]["read_policy"],
            &now["settings"]["min_in_sync"],
            &now["settings"]["deadline_ms"]
        ),
        (&json!("round-robin"), &json!(2), &json!(8000))
    );
    let size = |daemon: &TestDaemon| {
        daemon.call("bdev_get_bdevs", json!({ "name": ID }))[0]["num_blocks"].clone()
    };
    assert_eq!(size(&daemon), 2 << 11);
    daemon.call("volume_grow", json!({ "name": "v", "size_mb": 3 }));
    daemon.call("volume_grow", json!({ "name": "v" }));
    let end = Instant::now() + Duration::from_secs(10);
    while size(&daemon) != 7 << 11 && Instant::now() < end {
        pause(&daemon, Duration::from_millis(5));
    }
    assert_eq!(size(&daemon), 7 << 11);
    let rename = |new: &str| json!({ "name": ID, "new_name": new });
    daemon.call("volume_rename", rename("w"));
    daemon.call("volume_rename", rename("x"));
    assert_eq!(
        daemon.call("volume_get", json!({ "name": "x" }))["bdev"],
        "v"
    );
    let found = &daemon.call("bdev_get_bdevs", json!({ "name": "x" }))[0];
    assert_eq!(found["aliases"], json!([ID, "x"]));
    daemon.refused("volume_get", json!({ "name": "w" }));
    assert_eq!(
        daemon.call("volume_fail_io", json!({ "name": "x" }))["state"],
        "failing"
    );
    let thawed = daemon.call("volume_thaw", json!({ "name": "x" }));
    // The added space may still be reconciling.
    assert!(
        ["healthy", "degraded"].contains(&thawed["state"].as_str().unwrap()),
        "{thawed}"
    );
    daemon.call("volume_verify", json!({ "name": "x" }));
    let end = Instant::now() + Duration::from_secs(10);
    loop {
        let verify = daemon.call("volume_get", json!({ "name": "x" }))["verify"].clone();
        if verify["running"] == false {
            assert_eq!(
                (&verify["compared_bytes"], &verify["different_blocks"]),
                (&json!(7 << 20), &json!(0))
            );
            break;
        }
        assert!(Instant::now() < end, "{verify}");
        pause(&daemon, Duration::from_millis(5));
    }
}

#[test]
fn a_volume_is_published_and_unpublished() {
    let daemon = test_daemon();
    mirror(&daemon);
    let listener = json!({ "trtype": "tcp", "traddr": "127.0.0.1", "trsvcid": "0" });
    let params = json!({ "name": "v", "hosts": ["nqn.2026-01.x:h"], "listeners": [listener] });
    let published = daemon.call("volume_publish", params.clone());
    let nqn = "nqn.2025-01.io.nacre:v";
    assert_eq!(
        (
            &published["nqn"],
            &published["uuid"],
            &published["listen_addresses"][0]["trtype"]
        ),
        (&json!(nqn), &json!(ID), &json!("TCP"))
    );
    let subsystem = &daemon.call("nvmf_get_subsystems", json!({ "nqn": nqn }))[0];
    assert_eq!(
        (
            &subsystem["namespaces"][0]["uuid"],
            &subsystem["hosts"][0]["nqn"],
            &subsystem["allow_any_host"]
        ),
        (&json!(ID), &json!("nqn.2026-01.x:h"), &json!(false))
    );
    assert_eq!(
        daemon.call("volume_get", json!({ "name": "v" }))["subsystems"],
        json!([nqn])
    );
    assert_eq!(
        daemon.call("volume_get_connections", json!({ "name": "v" })),
        json!([])
    );
    let refused = daemon.refused("volume_publish", params);
    assert_eq!(facts(&refused), (-17, Some("name")));
    let refused = daemon.refused("volume_delete", json!({ "name": "v" }));
    assert!(
        refused.code == -1 && refused.to_string().contains("unpublish it"),
        "{refused}"
    );
    assert_eq!(
        daemon.call("volume_unpublish", json!({ "name": "v" })),
        true
    );
    daemon.refused("nvmf_get_subsystems", json!({ "nqn": nqn }));
    daemon.refused("volume_unpublish", json!({ "name": "v" }));
    // A policy that excludes all listeners creates nothing.
    let policy = json!({ "name": "v", "settings": { "transport_policy": "rdma-only" } });
    daemon.call("volume_set", policy);
    let listener = json!({ "trtype": "TCP", "traddr": "127.0.0.1", "trsvcid": "0" });
    let params = json!({ "name": "v", "listeners": [listener] });
    let refused = daemon.refused("volume_publish", params);
    assert_eq!(facts(&refused), (-22, Some("listeners")));
    daemon.refused("nvmf_get_subsystems", json!({ "nqn": nqn }));
    // A failure in between leaves nothing behind.
    let params = json!({ "name": "v", "hosts": ["a\nb"] });
    let refused = daemon.refused("volume_publish", params);
    assert_eq!(facts(&refused), (-32603, Some("host")));
    daemon.refused("nvmf_get_subsystems", json!({ "nqn": nqn }));
    assert_eq!(daemon.call("volume_delete", json!({ "name": "v" })), true);
}

/// Goal: volumes are open and clean after a restart, under their new name, with their namespaces. A
/// volume whose devices appear later waits for them.
#[test]
fn volumes_return_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let open = || Some(Store::open(&dir.path().join("state")).unwrap());
    let epoch = {
        let daemon = TestDaemon::with(Settings::default(), open());
        file(&daemon, dir.path(), "a", 8);
        file(&daemon, dir.path(), "b", 8);
        let new = json!({ "name": "old", "devices": ["a", "b"], "uuid": ID });
        daemon.call("volume_create", new);
        let params = json!({ "name": "old", "nqn": "nqn.2026-01.x:s", "allow_any_host": true,
            "listeners": [{ "trtype": "TCP", "traddr": "127.0.0.1", "trsvcid": "0" }] });
        daemon.call("volume_publish", params);
        daemon.call(
            "bdev_set_qos_limit",
            json!({ "name": "old", "rw_ios_per_sec": 5000 }),
        );
        daemon.call("volume_rename", json!({ "name": "old", "new_name": "v" }));
        until(&daemon, "in sync", |v| v["state"] == "healthy")["epoch"].clone()
    };
    let daemon = TestDaemon::with(Settings::default(), open());
    let now = until(&daemon, "open", |v| {
        v["state"] == "healthy" && v["subsystems"] == json!(["nqn.2026-01.x:s"])
    });
    assert_eq!(now["epoch"], epoch.as_u64().unwrap() + 1);
    assert_eq!(now["bdev"], "v");
    let limits =
        daemon.call("bdev_get_bdevs", json!({ "name": "v" }))[0]["assigned_rate_limits"].clone();
    assert_eq!(limits["rw_ios_per_sec"], 5000);
    let text = daemon.call("state_get", json!(null)).to_string();
    assert!(!text.contains("\"failed\""), "{text}");
    let events = daemon
        .call("events_get", json!({ "categories": ["volume"] }))
        .to_string();
    assert!(events.contains("\"clean\":true"), "{events}");
    drop(daemon);

    // Neither device exists at the start: the volume waits and is listed.
    std::fs::rename(dir.path().join("a"), dir.path().join("a.away")).unwrap();
    std::fs::rename(dir.path().join("b"), dir.path().join("b.away")).unwrap();
    let daemon = TestDaemon::with(Settings::default(), open());
    until(&daemon, "tried", |v| v["state"] == "frozen");
    std::fs::rename(dir.path().join("a.away"), dir.path().join("a")).unwrap();
    std::fs::rename(dir.path().join("b.away"), dir.path().join("b")).unwrap();
    daemon.call("state_retry", json!(null));
    until(&daemon, "open at last", |v| {
        v["state"] == "healthy" && v["subsystems"] == json!(["nqn.2026-01.x:s"])
    });
}

/// Goal: SPDK's mirror methods create and manage a volume.
#[test]
fn a_mirror_of_spdk_is_a_volume() {
    let daemon = test_daemon();
    for name in ["a", "b", "c"] {
        ram(&daemon, name, 8);
    }
    // Exactly the parameters that rpc.py sends.
    let create = |level: &str| json!({ "name": "v", "strip_size_kb": 0, "raid_level": level, "base_bdevs": ["a", "b"], "superblock": true, "uuid": ID });
    let refused = daemon.refused("bdev_raid_create", create("raid0"));
    assert_eq!(facts(&refused), (-95, Some("raid_level")));
    let refused = daemon.refused("bdev_raid_create", create("raid6"));
    assert_eq!(facts(&refused), (-32700, Some("raid_level")));
    assert_eq!(daemon.call("bdev_raid_create", create("raid1")), true);
    until(&daemon, "in sync", |v| v["state"] == "healthy");
    let mut listed = daemon.call("bdev_raid_get_bdevs", json!({ "category": "online" }));
    for base in listed[0]["base_bdevs_list"].as_array_mut().unwrap() {
        base["uuid"] = json!("…");
    }
    insta::assert_json_snapshot!(listed);
    assert_eq!(
        daemon.call("bdev_raid_get_bdevs", json!({ "category": "offline" })),
        json!([])
    );
    let slow = json!({ "process_window_size_kb": 2048, "process_max_bandwidth_mb_sec": 3 });
    assert_eq!(daemon.call("bdev_raid_set_options", slow), true);
    let now = daemon.call("volume_get", json!({ "name": "v" }));
    assert_eq!(now["settings"]["resync_bytes_per_s"], 3 << 20);
    let add = json!({ "raid_bdev": "v", "base_bdev": "c" });
    assert_eq!(daemon.call("bdev_raid_add_base_bdev", add), true);
    let raid = until_raid(&daemon, |raid| raid["process"].is_object());
    assert_eq!(
        (&raid["process"]["type"], &raid["process"]["target"]),
        (&json!("rebuild"), &json!("c"))
    );
    let fast = json!({ "process_max_bandwidth_mb_sec": 0 });
    daemon.call("bdev_raid_set_options", fast);
    until_raid(&daemon, |raid| raid["num_base_bdevs_operational"] == 3);
    assert_eq!(
        daemon.call("bdev_raid_remove_base_bdev", json!({ "name": "b" })),
        true
    );
    let refused = daemon.refused("bdev_raid_remove_base_bdev", json!({ "name": "b" }));
    assert_eq!(facts(&refused), (-19, Some("name")));
    assert_eq!(
        daemon.call("bdev_raid_delete", json!({ "name": "v", "clear_sb": true })),
        true
    );
    assert_eq!(
        daemon.call("bdev_raid_get_bdevs", json!({ "category": "all" })),
        json!([])
    );
}

#[track_caller]
fn until_raid(daemon: &TestDaemon, done: impl Fn(&Value) -> bool) -> Value {
    let end = Instant::now() + Duration::from_secs(30);
    loop {
        let raid = daemon.call("bdev_raid_get_bdevs", json!({ "category": "all" }))[0].take();
        if done(&raid) {
            return raid;
        }
        assert!(Instant::now() < end, "{raid:#}");
        pause(daemon, Duration::from_millis(5));
    }
}
