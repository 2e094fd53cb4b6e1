//! Goal: a volume without any replica at the start still has its block device. Every method works
//! on it or refuses with the reason, and it serves as soon as a replica appears.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nacre_bdev_replica::model::{KeptLimits, VolumeRecord};
use nacre_bdev_replica::store::{
    Call, EmbeddedStore, MemoryStore, Plan, StoreRequest, VolumeStore,
};
use nacre_reactor::Nanos;
use serde_json::{Value, json};

use super::super::super::testing::TestDaemon;
use super::{ID, facts, file, pause, ram, until};
use crate::config::Settings;
use crate::store::Store;

const NQN: &str = "nqn.2026-01.x:s";
const REPLICAS: [&str; 2] = ["a", "b"];

fn start(dir: &Path) -> TestDaemon {
    let store = Store::open(&dir.join("state")).unwrap();
    TestDaemon::with(Settings::default(), Some(store))
}

/// Leaves a published volume "v" on two files, with the daemon stopped.
fn prepare(dir: &Path) {
    let daemon = start(dir);
    REPLICAS.iter().for_each(|name| file(&daemon, dir, name, 8));
    let new = json!({ "name": "v", "devices": REPLICAS, "uuid": ID });
    daemon.call("volume_create", new);
    let params = json!({ "name": "v", "nqn": NQN, "allow_any_host": true,
        "listeners": [{ "trtype": "TCP", "traddr": "127.0.0.1", "trsvcid": "0" }] });
    daemon.call("volume_publish", params);
    until(&daemon, "in sync", |v| v["state"] == "healthy");
}

fn hide(dir: &Path, hidden: bool) {
    for name in REPLICAS {
        let (here, away) = (dir.join(name), dir.join(format!("{name}.away")));
        if hidden {
            std::fs::rename(here, away).unwrap()
        } else {
            std::fs::rename(away, here).unwrap()
        }
    }
}

/// Changes the volume's record while no daemon uses it.
fn edit(dir: &Path, change: impl FnOnce(&mut VolumeRecord)) -> VolumeRecord {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let store = EmbeddedStore::open(&dir.join("state")).unwrap();
        let mut record = store.list().await.unwrap().remove(0);
        let version = record.version();
        record.revision += 1;
        change(&mut record);
        store.swap(version, record.clone()).await.unwrap();
        record
    })
}

fn sent(daemon: &TestDaemon, kind: &str) -> usize {
    let events = daemon.call("events_get", json!({ "categories": ["volume"] }));
    let events = events["events"].as_array().unwrap().clone();
    events.iter().filter(|e| e["type"] == kind).count()
}

fn frozen(daemon: &TestDaemon) -> Value {
    until(daemon, "frozen, with its namespace", |v| {
        v["state"] == "frozen" && v["subsystems"] == json!([NQN])
    })
}

fn device(daemon: &TestDaemon) -> Value {
    daemon.call("bdev_get_bdevs", json!({ "name": "v" }))[0].take()
}

#[test]
fn a_volume_exists_before_its_replicas_appear() {
    let dir = tempfile::tempdir().unwrap();
    prepare(dir.path());
    hide(dir.path(), true);
    let daemon = start(dir.path());
    let now = frozen(&daemon);
    assert_eq!(
        (&now["bdev"], &now["replicas"][0]["attached"]),
        (&json!("v"), &json!(false))
    );
    assert!(now["why"].as_str().unwrap().contains("no such bdev"));
    assert_eq!(device(&daemon)["uuid"], ID);
    let mirrors = daemon.call("bdev_raid_get_bdevs", json!({ "category": "offline" }));
    assert_eq!(mirrors[0]["name"], "v");
    let metrics = daemon
        .run(crate::metrics::Scrape::of(&daemon.engine))
        .text();
    assert!(metrics.contains("nacre_volume_state{volume=\"v\",state=\"frozen\"} 1.0"));
    // Attempts continue, each with the same outcome.
    pause(&daemon, Duration::from_secs(1));
    assert_eq!(sent(&daemon, "volume_frozen"), 1);
    assert_eq!(sent(&daemon, "volume_open_failed"), 1);

    // Methods that need replicas are refused with the reason.
    ram(&daemon, "c", 8);
    for (method, params) in [
        ("volume_set", json!({ "name": "v", "settings": {} })),
        ("volume_rename", json!({ "name": "v", "new_name": "w" })),
        ("volume_grow", json!({ "name": "v" })),
        ("volume_verify", json!({ "name": "v" })),
        ("volume_add_replica", json!({ "name": "v", "device": "c" })),
    ] {
        let refused = daemon.refused(method, params);
        assert_eq!(facts(&refused), (-11, Some("name")), "{method}: {refused}");
        assert!(refused.to_string().contains("can be reached"), "{refused}");
    }
    let refused = daemon.refused("volume_thaw", json!({ "name": "v" }));
    assert_eq!(facts(&refused), (-11, Some("replica")));
    let choice = json!({ "name": "v", "replica": "a", "force": "v" });
    let refused = daemon.refused("volume_thaw", choice);
    assert_eq!(facts(&refused), (-19, Some("device")));
    let options = json!({ "process_max_bandwidth_mb_sec": 3 });
    assert_eq!(daemon.call("bdev_raid_set_options", options), true);

    // Methods that concern hosts work.
    let failing = daemon.call("volume_fail_io", json!({ "name": "v" }));
    assert_eq!(
        (&failing["state"], &failing["bdev"]),
        (&json!("failing"), &json!("v"))
    );
    let thawed = daemon.call("volume_thaw", json!({ "name": "v" }));
    assert_eq!(thawed["state"], "frozen");
    let connections = daemon.call("volume_get_connections", json!({ "name": "v" }));
    assert_eq!(connections, json!([]));
    assert_eq!(
        daemon.call("volume_unpublish", json!({ "name": "v" })),
        true
    );
    let params = json!({ "name": "v", "nqn": NQN, "allow_any_host": true,
        "listeners": [{ "trtype": "TCP", "traddr": "127.0.0.1", "trsvcid": "0" }] });
    assert_eq!(daemon.call("volume_publish", params)["nqn"], NQN);
    let before = frozen(&daemon);
    drop(daemon);

    // Once more; this time the replicas appear.
    let daemon = start(dir.path());
    frozen(&daemon);
    hide(dir.path(), false);
    daemon.call("state_retry", json!(null));
    let open = until(&daemon, "open", |v| v["state"] == "healthy");
    assert_eq!(
        (&open["subsystems"], &open["bdev"]),
        (&before["subsystems"], &json!("v"))
    );
    assert!(open["epoch"].as_u64() > before["epoch"].as_u64());
    assert_eq!(
        (sent(&daemon, "volume_thaw"), sent(&daemon, "volume_open")),
        (1, 1)
    );
    daemon.call("volume_rename", json!({ "name": "v", "new_name": "w" }));
}

#[test]
fn a_frozen_volume_is_deleted() {
    let dir = tempfile::tempdir().unwrap();
    prepare(dir.path());
    hide(dir.path(), true);
    let daemon = start(dir.path());
    frozen(&daemon);
    let refused = daemon.refused("volume_delete", json!({ "name": "v" }));
    assert_eq!(facts(&refused), (-1, Some("force")), "replicas are away");
    let force = json!({ "name": "v", "force": "v" });
    let refused = daemon.refused("volume_delete", force.clone());
    assert_eq!(refused.code, -1, "it is published: {refused}");
    frozen(&daemon);
    daemon.call("volume_unpublish", json!({ "name": "v" }));
    assert_eq!(daemon.call("volume_delete", force), true);
    assert_eq!(daemon.call("volume_list", json!(null)), json!([]));
    daemon.refused("bdev_get_bdevs", json!({ "name": "v" }));
    // The name is free, and no attempt opens the volume again.
    ram(&daemon, "v", 8);
    pause(&daemon, Duration::from_millis(600));
    assert_eq!(device(&daemon)["product_name"], "Malloc disk");
}

/// Goal: an operator chooses one replica while the other is away, for a volume that this daemon
/// never opened.
#[test]
fn an_operator_chooses_the_replica_of_a_frozen_volume() {
    let dir = tempfile::tempdir().unwrap();
    prepare(dir.path());
    hide(dir.path(), true);
    let backup = dir.path().join("backup");
    std::fs::copy(dir.path().join("a.away"), &backup).unwrap();
    hide(dir.path(), false);
    let daemon = start(dir.path());
    until(&daemon, "open", |v| v["state"] == "healthy");
    drop(daemon);
    hide(dir.path(), true);
    let daemon = start(dir.path());
    frozen(&daemon);
    daemon.call("volume_fail_io", json!({ "name": "v" }));
    std::fs::copy(&backup, dir.path().join("a")).unwrap();
    // It is another file; the operator accepts it.
    daemon.call("bdev_accept", json!({ "name": "a" }));
    until(&daemon, "the device is present, and not in sync", |v| {
        v["state"] == "failing"
    });
    let choice = |force: Option<&str>| json!({ "name": "v", "replica": "a", "force": force });
    let refused = daemon.refused("volume_thaw", choice(None));
    assert_eq!(facts(&refused), (-1, Some("force")));
    let now = daemon.call("volume_thaw", choice(Some("v")));
    assert_eq!(
        (&now["state"], &now["subsystems"]),
        (&json!("degraded"), &json!([NQN]))
    );
}

/// Goal: a store that does not respond delays neither start nor stop of the daemon. Hosts find the
/// volume and wait; it proceeds when the store responds.
#[test]
fn a_hanging_store_delays_neither_start_nor_stop() {
    let dir = tempfile::tempdir().unwrap();
    prepare(dir.path());
    let memory = MemoryStore::new();
    let record = edit(dir.path(), |_| ());
    tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap()
        .block_on(memory.create(record))
        .unwrap();
    // The store lists its volumes at once; other calls take a second of simulated time.
    memory.plan(Some(Box::new(|call: &Call| Plan {
        before: match call.request {
            StoreRequest::List => Duration::ZERO,
            _ => Duration::from_secs(1),
        },
        ..Plan::default()
    })));
    let start = || {
        let journal = Store::open(&dir.path().join("state")).unwrap();
        TestDaemon::with_volumes(Some(journal), Arc::new(memory.clone()))
    };
    let began = Instant::now();
    drop(start());
    assert!(
        began.elapsed() < Duration::from_secs(60),
        "the start or the stop waited for the store"
    );

    let daemon = start();
    let now = frozen(&daemon);
    assert_eq!(now["why"], "it is being opened");
    assert_eq!(device(&daemon)["uuid"], ID);
    assert_eq!(
        daemon.call("volume_fail_io", json!({ "name": "v" }))["state"],
        "failing"
    );
    daemon.call("volume_thaw", json!({ "name": "v" }));
    memory.plan(None);
    memory.advance(Nanos(u64::MAX / 2));
    until(&daemon, "open", |v| {
        v["state"] == "healthy" && v["subsystems"] == json!([NQN])
    });
    assert_eq!(sent(&daemon, "volume_open"), 1);
}

/// Goal: thaw and delete are refused while a stopping daemon closes the volume.
#[test]
fn a_closing_volume_refuses_changes() {
    let dir = tempfile::tempdir().unwrap();
    prepare(dir.path());
    hide(dir.path(), true);
    let daemon = start(dir.path());
    frozen(&daemon);
    daemon.call("volume_unpublish", json!({ "name": "v" }));
    let records = || daemon.call("volume_get_records", json!(null));
    let before = records();
    crate::services::volumes::stop_opening(&daemon.engine);
    hide(dir.path(), false);
    for name in REPLICAS {
        file(&daemon, dir.path(), name, 8);
    }
    for (method, params) in [
        (
            "volume_thaw",
            json!({ "name": "v", "replica": "a", "force": "v" }),
        ),
        ("volume_delete", json!({ "name": "v", "force": "v" })),
    ] {
        let refused = daemon.refused(method, params);
        assert_eq!(facts(&refused), (-11, None), "{method}: {refused}");
    }
    assert_eq!(records(), before);
}

/// Goal: if the replicas support less than the volume announced before, hosts find another device.
#[test]
fn weaker_replicas_make_another_device() {
    let dir = tempfile::tempdir().unwrap();
    prepare(dir.path());
    let mut more = None;
    edit(dir.path(), |record| {
        let kept = record.limits.as_mut().unwrap();
        kept.atomic_blocks += 7;
        more = Some(*kept);
    });
    hide(dir.path(), true);
    let daemon = start(dir.path());
    frozen(&daemon);
    let plane = daemon.engine.plane().unwrap();
    let atomic = || {
        use nacre_bdev::Bdev;
        plane.bdevs.lookup("v").unwrap().limits().atomic_blocks
    };
    let KeptLimits { atomic_blocks, .. } = more.unwrap();
    assert_eq!(atomic(), atomic_blocks);
    hide(dir.path(), false);
    daemon.call("state_retry", json!(null));
    until(&daemon, "open", |v| {
        v["state"] == "healthy" && v["subsystems"] == json!([NQN])
    });
    assert_eq!(atomic(), atomic_blocks - 7);
}

/// Goal: a record of an older version has no announced limits, so the device appears only with the
/// open volume.
#[test]
fn without_stored_limits_the_device_appears_after_opening() {
    let dir = tempfile::tempdir().unwrap();
    prepare(dir.path());
    edit(dir.path(), |record| record.limits = None);
    hide(dir.path(), true);
    let daemon = start(dir.path());
    let waiting = until(&daemon, "tried", |v| v["why"].is_string());
    assert_eq!(
        (&waiting["state"], &waiting["bdev"]),
        (&json!("opening"), &Value::Null)
    );
    let refused = daemon.refused("volume_set", json!({ "name": "v", "settings": {} }));
    assert_eq!(facts(&refused), (-11, Some("name")));
    let refused = daemon.refused("volume_fail_io", json!({ "name": "v" }));
    assert_eq!(facts(&refused), (-11, Some("name")));
    let refused = daemon.refused("volume_thaw", json!({ "name": "v" }));
    assert_eq!(facts(&refused), (-11, Some("replica")));
    hide(dir.path(), false);
    daemon.call("state_retry", json!(null));
    until(&daemon, "open", |v| {
        v["state"] == "healthy" && v["subsystems"] == json!([NQN])
    });
    drop(daemon);
    hide(dir.path(), true);
    frozen(&start(dir.path()));
}
