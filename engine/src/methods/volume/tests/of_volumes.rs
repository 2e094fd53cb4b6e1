//! Goal: a snapshot of a volume outside of a cluster is on each pool of its replicas or on none,
//! also when the daemon ends in between, and volumes begin with it. Method: daemons without sockets
//! on files.

use std::time::Duration;

use nacre_bdev_replica::handle::Command;
use serde_json::{Value, json};
use uuid::Uuid;

use super::super::super::testing::TestDaemon;
use super::on_pools::{create, disk, lvols, notes, start, with_pools};
use super::{ID, pause, until};
use crate::services::pools;
use crate::services::volumes::lvols::PoolLvol;
use crate::services::volumes::snapshots::{RecordState, SnapshotRecord};
use crate::store::Change;

const OTHER: &str = "5f0c1c3e-8b3a-4c55-9d0b-6b3f3f1c0c12";

fn snapshot(daemon: &TestDaemon, name: &str) -> Value {
    daemon.call(
        "volume_snapshot_create",
        json!({ "volume": "v", "name": name }),
    )
}

fn listed(daemon: &TestDaemon) -> Vec<Value> {
    let all = daemon.call("volume_snapshot_list", json!({}));
    all.as_array().unwrap().clone()
}

fn count(daemon: &TestDaemon) -> usize {
    lvols(daemon).len()
}

fn field(refused: &crate::rpc::RpcError) -> Option<&str> {
    refused.data.as_ref().and_then(|data| data.field.as_deref())
}

/// The snapshot returns after a restart, and outlives its volume. Volumes that begin with it are in
/// sync at once where it is, and are filled elsewhere. They keep their contents without it.
#[test]
fn a_snapshot_is_on_all_pools_and_begins_volumes() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = with_pools(dir.path());
    daemon.call("volume_create", create(8, true));
    let made = snapshot(&daemon, "monday");
    assert_eq!(
        (&made["state"], &made["why"]),
        (&json!("ready"), &Value::Null)
    );
    assert_eq!(made["size_bytes"], 8 << 20);
    let pools: Vec<_> = made["lvols"].as_array().unwrap().iter().collect();
    let names: Vec<_> = pools
        .iter()
        .map(|one| (&one["pool_name"], &one["node"]))
        .collect();
    assert_eq!(
        names,
        [
            (&json!("pool0"), &Value::Null),
            (&json!("pool1"), &Value::Null)
        ]
    );
    assert_eq!(count(&daemon), 4);
    // The same call again makes nothing, and one for another volume is refused.
    let again = json!({ "volume": ID, "name": "monday", "uuid": made["uuid"] });
    assert_eq!(daemon.call("volume_snapshot_create", again), made);
    let other = json!({ "volume": OTHER, "name": "monday", "uuid": made["uuid"] });
    assert_eq!(
        field(&daemon.refused("volume_snapshot_create", other)),
        Some("uuid")
    );
    drop(daemon);

    let daemon = start(dir.path());
    until(&daemon, "healthy", |volume| volume["state"] == "healthy");
    assert_eq!(listed(&daemon), std::slice::from_ref(&made));
    // Without pools: on those of the snapshot.
    let w = daemon.call(
        "volume_create",
        json!({ "name": "w", "snapshot": "monday" }),
    );
    assert_eq!(
        (&w["state"], &w["num_blocks"]),
        (&json!("healthy"), &json!(2048))
    );
    let states: Vec<_> = w["replicas"]
        .as_array()
        .unwrap()
        .iter()
        .map(|r| &r["state"])
        .collect();
    assert_eq!(states, ["in_sync", "in_sync"]);
    assert_eq!(w["origin"]["name"], "monday");
    daemon.call("volume_delete", json!({ "name": "v" }));
    let left = listed(&daemon);
    assert_eq!(
        (&left[0]["volume_name"], &left[0]["state"]),
        (&Value::Null, &json!("ready"))
    );
    daemon.call("volume_snapshot_delete", json!({ "snapshot": "monday" }));
    assert_eq!((listed(&daemon), count(&daemon)), (vec![], 2));
    let w = daemon.call("volume_get", json!({ "name": "w" }));
    assert_eq!(w["state"], "healthy");
    daemon.call("volume_delete", json!({ "name": "w" }));
    assert_eq!((lvols(&daemon), notes(&daemon)), (vec![], 0));
}

#[test]
fn volumes_from_a_snapshot_are_checked() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = with_pools(dir.path());
    disk(&daemon, dir.path(), "disk2");
    daemon.call("pool_create", json!({ "name": "pool2", "disk": "disk2" }));
    daemon.call("volume_create", create(8, true));
    snapshot(&daemon, "s");
    let new = |pools: &[&str], size: Option<u64>| {
        let replicas: Vec<_> = pools
            .iter()
            .map(|pool| json!({ "pool": pool, "thin": true }))
            .collect();
        json!({ "name": "w", "snapshot": "s", "replicas": replicas, "size_mb": size })
    };
    for (params, wanted) in [
        (new(&["pool2"], None), "replicas[0].pool"),
        (new(&["pool0"], Some(4)), "size"),
        (json!({ "name": "w", "snapshot": "t" }), "snapshot"),
        (json!({ "name": "w", "snapshot": OTHER }), "snapshot"),
    ] {
        let refused = daemon.refused("volume_create", params);
        assert_eq!(field(&refused), Some(wanted), "{refused}");
    }
    assert_eq!(count(&daemon), 4);
    // The clone is the first replica, wherever its pool is named.
    let w = daemon.call("volume_create", new(&["pool2", "pool1"], Some(16)));
    assert_eq!(w["num_blocks"], 4096);
    let replicas: Vec<_> = w["replicas"].as_array().unwrap().iter().collect();
    assert_eq!(
        (&replicas[0]["pool"], &replicas[0]["state"]),
        (&json!("pool1"), &json!("in_sync"))
    );
    let healthy = || daemon.call("volume_get", json!({ "name": "w" }))["state"] == "healthy";
    while !healthy() {
        pause(&daemon, Duration::from_millis(10));
    }
    snapshot(&daemon, "s");
    let several = daemon.refused("volume_create", json!({ "name": "x", "snapshot": "s" }));
    assert!(
        several.to_string().contains("2 snapshots have the name"),
        "{several}"
    );
}

/// A replica on no pool gets no snapshot. Without any on a pool, there is none.
#[test]
fn replicas_on_no_pool_are_left_out() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = with_pools(dir.path());
    let plain = json!({ "pool": "pool0", "name": "plain", "size": "16MiB" });
    daemon.call("lvol_create", plain);
    for name in ["a", "b"] {
        let params = json!({ "name": name, "num_blocks": 4096, "block_size": 4096 });
        daemon.call("bdev_malloc_create", params);
    }
    daemon.call(
        "volume_create",
        json!({ "name": "v", "devices": ["a", "pool0/plain"] }),
    );
    until(&daemon, "healthy", |volume| volume["state"] == "healthy");
    let made = snapshot(&daemon, "s");
    assert_eq!(made["lvols"].as_array().unwrap().len(), 1);
    daemon.call("volume_create", json!({ "name": "w", "devices": ["b"] }));
    let none = json!({ "volume": "w", "name": "s" });
    let refused = daemon.refused("volume_snapshot_create", none);
    assert_eq!(refused.message, "Operation not supported");
    assert_eq!((listed(&daemon).len(), count(&daemon)), (1, 2));
}

/// A pool that is away makes its lvol unavailable, and the deletion waits for it.
#[test]
fn a_pool_is_away() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = with_pools(dir.path());
    daemon.call("volume_create", create(8, true));
    snapshot(&daemon, "s");
    daemon.call("bdev_aio_delete", json!({ "name": "disk0" }));
    let open = || {
        daemon
            .call("pool_list", Value::Null)
            .as_array()
            .unwrap()
            .len()
    };
    while open() > 1 {
        pause(&daemon, Duration::from_millis(10));
    }
    let one = &listed(&daemon)[0];
    assert_eq!(one["state"], "ready");
    let whys: Vec<_> = one["lvols"]
        .as_array()
        .unwrap()
        .iter()
        .map(|lvol| &lvol["why"])
        .collect();
    assert!(
        whys[0].as_str().unwrap().contains("is not open"),
        "{whys:?}"
    );
    assert_eq!(whys[1], &Value::Null);
    let late = daemon.refused("volume_snapshot_delete", json!({ "snapshot": "s" }));
    assert!(late.to_string().contains("is not open"), "{late}");
    assert_eq!(listed(&daemon)[0]["state"], "deleting");
    let used = daemon.refused("volume_create", json!({ "name": "w", "snapshot": "s" }));
    assert!(used.to_string().contains("is being deleted"), "{used}");
    disk(&daemon, dir.path(), "disk0");
    while open() < 2 {
        pause(&daemon, Duration::from_millis(10));
    }
    // The deletion ends by itself.
    while !listed(&daemon).is_empty() {
        pause(&daemon, Duration::from_millis(10));
    }
    assert_eq!(count(&daemon), 2);
}

/// Stores a record as the daemon leaves it that ends in the middle.
fn leave(daemon: &TestDaemon, state: RecordState, lvols: Vec<PoolLvol>) {
    let record = SnapshotRecord {
        uuid: Uuid::from_u128(state as u128 + 1),
        name: "s".into(),
        volume: ID.parse().unwrap(),
        size_bytes: 8 << 20,
        created_s: 1,
        state,
        lvols,
    };
    let key = format!("volume/snapshots/{}", record.uuid);
    let put = Change::put(key, "volume_snapshot_record", json!(record));
    daemon.run(daemon.engine.journal.commit(put)).unwrap();
}

/// Takes a snapshot of the replica on a pool, as an attempt does.
fn cut(daemon: &TestDaemon, pool: &str) -> PoolLvol {
    let pool = daemon.engine.devices.pools.find(pool).unwrap();
    let lvol = Uuid::new_v4();
    let (_, source) =
        pools::find_lvol(&daemon.engine, "lvol", &format!("{}/v", pool.name())).unwrap();
    let name = format!("snapshot-{}", lvol.simple());
    let made = pools::snapshot_lvol(&pool, nacre_bdev::Bdev::uuid(&*source), (lvol, name));
    daemon.run(made).unwrap();
    PoolLvol {
        pool: pool.handle.id(),
        lvol,
    }
}

/// The daemon ends after some of the lvols were made, or after some of them were deleted: the next
/// start deletes the others.
#[test]
fn an_interruption_leaves_no_snapshot() {
    for state in [RecordState::Making, RecordState::Deleting] {
        let dir = tempfile::tempdir().unwrap();
        let daemon = with_pools(dir.path());
        daemon.call("volume_create", create(8, true));
        let mut lvols = vec![cut(&daemon, "pool0")];
        let pool = daemon
            .engine
            .devices
            .pools
            .find("pool1")
            .unwrap()
            .handle
            .id();
        lvols.push(PoolLvol {
            pool,
            lvol: Uuid::new_v4(),
        });
        leave(&daemon, state, lvols);
        assert_eq!(count(&daemon), 3);
        drop(daemon);
        let daemon = start(dir.path());
        assert_eq!((listed(&daemon), count(&daemon)), (vec![], 2), "{state:?}");
        // A client cannot write such records.
        let call = json!({ "uuid": OTHER, "name": "s", "volume": ID, "size_bytes": 1, "created_s": 1,
            "state": "deleting", "lvols": [] });
        let refused = daemon.refused("volume_snapshot_record", call);
        assert_eq!(refused.message, "Operation not permitted");
    }
}

/// Writes that are held back for another purpose refuse a snapshot, which leaves nothing behind.
/// Another client's hold stays.
#[test]
fn a_snapshot_does_not_end_another_hold() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = with_pools(dir.path());
    daemon.call("volume_create", create(8, true));
    let volume = daemon.engine.volumes.opened("v").unwrap();
    let id = Uuid::from_u128(9);
    let limit = Duration::from_secs(10);
    daemon
        .run(volume.handle.run(Command::HoldWrites { id, limit }))
        .unwrap();
    let refused = daemon.refused(
        "volume_snapshot_create",
        json!({ "volume": "v", "name": "s" }),
    );
    assert!(refused.to_string().contains("hold"), "{refused}");
    assert_eq!((listed(&daemon), count(&daemon)), (vec![], 2));
    daemon
        .run(volume.handle.run(Command::ReleaseWrites { id }))
        .unwrap();
    snapshot(&daemon, "s");
}

/// A pool answers after the writes went on: its lvol does not count, and is deleted. A later
/// attempt waits longer.
#[test]
fn a_late_pool_gets_more_time() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = start(dir.path());
    for name in ["disk0", "disk1"] {
        disk(&daemon, dir.path(), name);
    }
    let slow = json!({
        "name": "slow", "base_bdev_name": "disk1", "avg_read_latency": 1, "p99_read_latency": 1,
        "avg_write_latency": 1, "p99_write_latency": 1,
    });
    daemon.call("bdev_delay_create", slow);
    for (name, disk) in [("pool0", "disk0"), ("pool1", "slow")] {
        daemon.call("pool_create", json!({ "name": name, "disk": disk }));
    }
    daemon.call("volume_create", create(8, true));
    let latency = |microseconds: u64| {
        for kind in ["avg_write", "p99_write"] {
            let params = json!({ "delay_bdev_name": "slow", "latency_type": kind, "latency_us": microseconds });
            daemon.call("bdev_delay_update_latency", params);
        }
    };
    latency(700_000);
    let made = snapshot(&daemon, "s");
    latency(1);
    assert_eq!(made["state"], "ready");
    assert_eq!(made["lvols"].as_array().unwrap().len(), 2);
    assert_eq!(
        (listed(&daemon).len(), count(&daemon)),
        (1, 4),
        "{:?}",
        lvols(&daemon)
    );
}
