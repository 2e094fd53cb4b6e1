//! Goal: a volume none of whose replicas is there at the start is there for hosts all the same, every method does what is
//! right for it or says why not, and it serves as soon as it can.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nacre_bdev_replica::model::{KeptLimits, VolumeRecord};
use nacre_bdev_replica::store::{Call, EmbeddedStore, MemoryStore, Plan, Request, VolumeStore};
use nacre_reactor::Nanos;
use serde_json::{Value, json};

use super::super::testing::Bench;
use super::tests::{ID, facts, file, pause, ram, until};
use crate::config::Settings;
use crate::store::Store;

const NQN: &str = "nqn.2026-01.x:s";
const REPLICAS: [&str; 2] = ["a", "b"];

fn start(dir: &Path) -> Bench {
    let store = Store::open(&dir.join("state")).unwrap();
    Bench::with(Settings::default(), Some(store))
}

/// A published volume "v" of two files, whose daemon has ended.
fn left(dir: &Path) {
    let bench = start(dir);
    REPLICAS.iter().for_each(|name| file(&bench, dir, name, 8));
    let new = json!({ "name": "v", "devices": REPLICAS, "uuid": ID });
    bench.call("volume_create", new);
    let wish = json!({ "name": "v", "nqn": NQN, "allow_any_host": true,
        "listeners": [{ "trtype": "TCP", "traddr": "127.0.0.1", "trsvcid": "0" }] });
    bench.call("volume_publish", wish);
    until(&bench, "in sync", |v| v["state"] == "healthy");
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

/// Changes the volume's record while no daemon has it.
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

fn told(bench: &Bench, kind: &str) -> usize {
    let events = bench.call("events_get", json!({ "categories": ["volume"] }));
    let events = events["events"].as_array().unwrap().clone();
    events.iter().filter(|e| e["type"] == kind).count()
}

fn frozen(bench: &Bench) -> Value {
    until(bench, "frozen, with its namespace", |v| {
        v["state"] == "frozen" && v["subsystems"] == json!([NQN])
    })
}

fn device(bench: &Bench) -> Value {
    bench.call("bdev_get_bdevs", json!({ "name": "v" }))[0].take()
}

#[test]
fn a_volume_is_there_before_its_replicas_are() {
    let dir = tempfile::tempdir().unwrap();
    left(dir.path());
    hide(dir.path(), true);
    let bench = start(dir.path());
    let now = frozen(&bench);
    assert_eq!(
        (&now["bdev"], &now["replicas"][0]["attached"]),
        (&json!("v"), &json!(false))
    );
    assert!(now["why"].as_str().unwrap().contains("no such bdev"));
    assert_eq!(device(&bench)["uuid"], ID);
    let mirrors = bench.call("bdev_raid_get_bdevs", json!({ "category": "offline" }));
    assert_eq!(mirrors[0]["name"], "v");
    let metrics = bench.run(crate::metrics::Scrape::of(&bench.engine)).text();
    assert!(metrics.contains("nacre_volume_state{volume=\"v\",state=\"frozen\"} 1.0"));
    // Attempts go on, each of them the same.
    pause(&bench, Duration::from_secs(1));
    assert_eq!(told(&bench, "volume_frozen"), 1);
    assert_eq!(told(&bench, "volume_open_failed"), 1);

    // What needs replicas is refused, with the reason.
    ram(&bench, "c", 8);
    for (method, params) in [
        ("volume_set", json!({ "name": "v", "settings": {} })),
        ("volume_rename", json!({ "name": "v", "new_name": "w" })),
        ("volume_grow", json!({ "name": "v" })),
        ("volume_verify", json!({ "name": "v" })),
        ("volume_add_replica", json!({ "name": "v", "device": "c" })),
    ] {
        let refused = bench.refused(method, params);
        assert_eq!(facts(&refused), (-11, Some("name")), "{method}: {refused}");
        assert!(refused.to_string().contains("can be reached"), "{refused}");
    }
    let refused = bench.refused("volume_thaw", json!({ "name": "v" }));
    assert_eq!(facts(&refused), (-11, Some("replica")));
    let choice = json!({ "name": "v", "replica": "a", "force": "v" });
    let refused = bench.refused("volume_thaw", choice);
    assert_eq!(facts(&refused), (-19, Some("device")));
    let options = json!({ "process_max_bandwidth_mb_sec": 3 });
    assert_eq!(bench.call("bdev_raid_set_options", options), true);

    // What concerns hosts is done.
    let failing = bench.call("volume_fail_io", json!({ "name": "v" }));
    assert_eq!(
        (&failing["state"], &failing["bdev"]),
        (&json!("failing"), &json!("v"))
    );
    let thawed = bench.call("volume_thaw", json!({ "name": "v" }));
    assert_eq!(thawed["state"], "frozen");
    let connections = bench.call("volume_get_connections", json!({ "name": "v" }));
    assert_eq!(connections, json!([]));
    assert_eq!(bench.call("volume_unpublish", json!({ "name": "v" })), true);
    let wish = json!({ "name": "v", "nqn": NQN, "allow_any_host": true,
        "listeners": [{ "trtype": "TCP", "traddr": "127.0.0.1", "trsvcid": "0" }] });
    assert_eq!(bench.call("volume_publish", wish)["nqn"], NQN);
    let before = frozen(&bench);
    drop(bench);

    // The same again; and now they come.
    let bench = start(dir.path());
    frozen(&bench);
    hide(dir.path(), false);
    bench.call("state_retry", json!(null));
    let open = until(&bench, "open", |v| v["state"] == "healthy");
    assert_eq!(
        (&open["subsystems"], &open["bdev"]),
        (&before["subsystems"], &json!("v"))
    );
    assert!(open["epoch"].as_u64() > before["epoch"].as_u64());
    assert_eq!(
        (told(&bench, "volume_thaw"), told(&bench, "volume_open")),
        (1, 1)
    );
    bench.call("volume_rename", json!({ "name": "v", "new_name": "w" }));
}

#[test]
fn a_frozen_volume_is_deleted() {
    let dir = tempfile::tempdir().unwrap();
    left(dir.path());
    hide(dir.path(), true);
    let bench = start(dir.path());
    frozen(&bench);
    let refused = bench.refused("volume_delete", json!({ "name": "v" }));
    assert_eq!(facts(&refused), (-1, Some("force")), "replicas are away");
    let force = json!({ "name": "v", "force": "v" });
    let refused = bench.refused("volume_delete", force.clone());
    assert_eq!(refused.code, -1, "it is published: {refused}");
    frozen(&bench);
    bench.call("volume_unpublish", json!({ "name": "v" }));
    assert_eq!(bench.call("volume_delete", force), true);
    assert_eq!(bench.call("volume_list", json!(null)), json!([]));
    bench.refused("bdev_get_bdevs", json!({ "name": "v" }));
    // Its name is free; nobody tries to open it any more.
    ram(&bench, "v", 8);
    pause(&bench, Duration::from_millis(600));
    assert_eq!(device(&bench)["product_name"], "Malloc disk");
}

/// An operator goes on from one replica while the other is away; the volume was never open in this daemon.
#[test]
fn a_frozen_volume_is_told_whom_to_believe() {
    let dir = tempfile::tempdir().unwrap();
    left(dir.path());
    hide(dir.path(), true);
    let backup = dir.path().join("backup");
    std::fs::copy(dir.path().join("a.away"), &backup).unwrap();
    hide(dir.path(), false);
    let bench = start(dir.path());
    until(&bench, "open", |v| v["state"] == "healthy");
    drop(bench);
    hide(dir.path(), true);
    let bench = start(dir.path());
    frozen(&bench);
    bench.call("volume_fail_io", json!({ "name": "v" }));
    std::fs::copy(&backup, dir.path().join("a")).unwrap();
    // It is another file, which the operator answers for.
    bench.call("bdev_accept", json!({ "name": "a" }));
    until(&bench, "it is there, and not believed", |v| {
        v["state"] == "failing"
    });
    let choice = |force: Option<&str>| json!({ "name": "v", "replica": "a", "force": force });
    let refused = bench.refused("volume_thaw", choice(None));
    assert_eq!(facts(&refused), (-1, Some("force")));
    let now = bench.call("volume_thaw", choice(Some("v")));
    assert_eq!(
        (&now["state"], &now["subsystems"]),
        (&json!("degraded"), &json!([NQN]))
    );
}

/// A store that answers nothing keeps neither a start nor a stop of the daemon waiting: hosts find the volume, and wait.
/// When it answers at last, the volume goes on where it is.
#[test]
fn a_store_that_hangs() {
    let dir = tempfile::tempdir().unwrap();
    left(dir.path());
    let memory = MemoryStore::new();
    let record = edit(dir.path(), |_| ());
    tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap()
        .block_on(memory.create(record))
        .unwrap();
    // Which volumes there are it says; time does not pass by itself.
    memory.plan(Some(Box::new(|call: &Call| Plan {
        before: match call.request {
            Request::List => Duration::ZERO,
            _ => Duration::from_secs(1),
        },
        ..Plan::default()
    })));
    let start = || {
        let journal = Store::open(&dir.path().join("state")).unwrap();
        Bench::with_volumes(Some(journal), Arc::new(memory.clone()))
    };
    let began = Instant::now();
    drop(start());
    assert!(
        began.elapsed() < Duration::from_secs(60),
        "it waited itself"
    );

    let bench = start();
    let now = frozen(&bench);
    assert_eq!(now["why"], "it is being opened");
    assert_eq!(device(&bench)["uuid"], ID);
    assert_eq!(
        bench.call("volume_fail_io", json!({ "name": "v" }))["state"],
        "failing"
    );
    bench.call("volume_thaw", json!({ "name": "v" }));
    memory.plan(None);
    memory.advance(Nanos(u64::MAX / 2));
    until(&bench, "open", |v| {
        v["state"] == "healthy" && v["subsystems"] == json!([NQN])
    });
    assert_eq!(told(&bench, "volume_open"), 1);
}

/// A daemon that is stopping has begun to close its volumes: nobody decides otherwise about one meanwhile.
#[test]
fn a_volume_that_is_being_closed_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    left(dir.path());
    hide(dir.path(), true);
    let bench = start(dir.path());
    frozen(&bench);
    bench.call("volume_unpublish", json!({ "name": "v" }));
    let records = || bench.call("volume_get_records", json!(null));
    let before = records();
    crate::volumes::let_go(&bench.engine);
    hide(dir.path(), false);
    for name in REPLICAS {
        file(&bench, dir.path(), name, 8);
    }
    for (method, params) in [
        (
            "volume_thaw",
            json!({ "name": "v", "replica": "a", "force": "v" }),
        ),
        ("volume_delete", json!({ "name": "v", "force": "v" })),
    ] {
        let refused = bench.refused(method, params);
        assert_eq!(facts(&refused), (-11, None), "{method}: {refused}");
    }
    assert_eq!(records(), before);
}

/// Replicas that keep less than the volume promised before: hosts find another device.
#[test]
fn a_promise_that_is_not_kept_is_not_made_again() {
    let dir = tempfile::tempdir().unwrap();
    left(dir.path());
    let mut more = None;
    edit(dir.path(), |record| {
        let kept = record.limits.as_mut().unwrap();
        kept.atomic_blocks += 7;
        more = Some(*kept);
    });
    hide(dir.path(), true);
    let bench = start(dir.path());
    frozen(&bench);
    let plane = bench.engine.plane().unwrap();
    let atomic = || {
        use nacre_bdev::Bdev;
        plane.bdevs.lookup("v").unwrap().limits().atomic_blocks
    };
    let KeptLimits { atomic_blocks, .. } = more.unwrap();
    assert_eq!(atomic(), atomic_blocks);
    hide(dir.path(), false);
    bench.call("state_retry", json!(null));
    until(&bench, "open", |v| {
        v["state"] == "healthy" && v["subsystems"] == json!([NQN])
    });
    assert_eq!(atomic(), atomic_blocks - 7);
}

/// A record of an older version, which did not say what the volume promises.
#[test]
fn without_limits_there_is_no_device_before_it_is_open() {
    let dir = tempfile::tempdir().unwrap();
    left(dir.path());
    edit(dir.path(), |record| record.limits = None);
    hide(dir.path(), true);
    let bench = start(dir.path());
    let waiting = until(&bench, "tried", |v| v["why"].is_string());
    assert_eq!(
        (&waiting["state"], &waiting["bdev"]),
        (&json!("opening"), &Value::Null)
    );
    let refused = bench.refused("volume_set", json!({ "name": "v", "settings": {} }));
    assert_eq!(facts(&refused), (-11, Some("name")));
    let refused = bench.refused("volume_fail_io", json!({ "name": "v" }));
    assert_eq!(facts(&refused), (-11, Some("name")));
    let refused = bench.refused("volume_thaw", json!({ "name": "v" }));
    assert_eq!(facts(&refused), (-11, Some("replica")));
    hide(dir.path(), false);
    bench.call("state_retry", json!(null));
    until(&bench, "open", |v| {
        v["state"] == "healthy" && v["subsystems"] == json!([NQN])
    });
    drop(bench);
    hide(dir.path(), true);
    frozen(&start(dir.path()));
}
