//! Snapshots of a replicated volume on two pools of a real daemon, under verified load.

use std::time::Duration;

use nacre_random::Random;
use nacre_tests::at_length;
use nacre_tests::daemon::{Daemon, Place, free_address};
use nacre_tests::host::{Host, options};
use nacre_tests::seed;
use serde_json::{Value, json};

use crate::ledger::{BLOCK, Ledger};
use crate::load::{BLOCKS, Load};
use crate::volumes::{HOLD_MS, healthy, patient, publish};

const MIB: u64 = 1 << 20;
const POOLS: [&str; 2] = ["pool0", "pool1"];

/// A daemon with volume "v" on two pools, and its load.
fn loaded(place: &Place, rng: &mut Random) -> (Daemon, Load) {
    let mut daemon = place.start();
    for pool in POOLS {
        let disk = format!("disk-{pool}");
        daemon.create_file(&disk, BLOCK as u32, 256 * MIB);
        daemon.call("pool_create", json!({ "name": pool, "disk": disk }));
    }
    let replicas = POOLS.map(|pool| json!({ "pool": pool, "thin": true }));
    let settings = json!({ "read_policy": "round-robin", "settle_ms": 50, "deadline_ms": HOLD_MS });
    let volume = json!({ "name": "v", "replicas": replicas, "size_mb": 16, "settings": settings });
    daemon.call("volume_create", volume);
    healthy(&mut daemon);
    let address = publish(&mut daemon);
    let load = Load::start(address, patient(), 1, rng);
    (daemon, load)
}

fn list(daemon: &mut Daemon, method: &str) -> Vec<Value> {
    let all = daemon.call(method, json!({}));
    all.as_array().expect("a list").clone()
}

/// Creates a volume from the snapshot, compares its replicas, and all blocks with the model.
fn check(daemon: &mut Daemon, snapshot: &str, model: &Ledger) {
    let name = format!("from-{snapshot}");
    let made = daemon.call(
        "volume_create",
        json!({ "name": name, "snapshot": snapshot }),
    );
    let replicas = made["replicas"].as_array().expect("a list");
    assert_eq!(replicas.len(), POOLS.len());
    assert!(
        replicas.iter().all(|one| one["state"] == "in_sync"),
        "{made:#}"
    );
    daemon.call("volume_verify", json!({ "name": name }));
    let verified = loop {
        let now = daemon.call("volume_get", json!({ "name": name }));
        if now["verify"]["running"] == false {
            break now;
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    assert_eq!(verified["verify"]["different_blocks"], 0, "{verified:#}");

    let address = free_address("127.0.0.1");
    let listener =
        json!({ "trtype": "TCP", "traddr": "127.0.0.1", "trsvcid": address.port().to_string() });
    let wish = json!({ "name": name, "allow_any_host": true, "listeners": [listener] });
    let published = daemon.call("volume_publish", wish);
    let mut host = Host::new(
        address,
        options(published["nqn"].as_str().expect("text")),
        16,
    );
    host.until("live", |h| h.controller.is_live());
    host.open_queue(1);
    for lba in 0..BLOCKS {
        let block = host.read(0, lba as u64, 1, BLOCK);
        let found = model.check(lba, &block);
        found.unwrap_or_else(|wrong| panic!("snapshot {snapshot}: {wrong}"));
    }
    drop(host);
    daemon.call("volume_unpublish", json!({ "name": name }));
    daemon.call("volume_delete", json!({ "name": name }));
}

/// Goal: a snapshot of a volume under load has the same contents on both pools, with every write
/// that was acknowledged before it and no later one half. Method: verified load that never pauses;
/// volumes from the snapshots are compared replica by replica, and block by block with the model.
#[test]
fn snapshots_under_load_are_equal_and_complete() {
    let mut rng = seed::announced("snapshots_under_load_are_equal_and_complete");
    let place = Place::new().on_cores(2);
    let (mut daemon, mut load) = loaded(&place, &mut rng);
    load.run(500);
    let mut models = Vec::new();
    for number in 0..at_length(3, 20) {
        let before = load.ledger.entries.clone();
        let name = format!("s{number}");
        let wish = json!({ "volume": "v", "name": name });
        let made = load.run_during(|| daemon.call("volume_snapshot_create", wish));
        assert_eq!(made["state"], "ready");
        models.push((name, load.ledger.copied_since(&before)));
        load.run(200);
    }
    for (name, model) in &models {
        load.run_during(|| check(&mut daemon, name, model));
        daemon.call("volume_snapshot_delete", json!({ "snapshot": name }));
    }
    load.drain();
    load.check_all("after the load");
    assert_eq!(list(&mut daemon, "lvol_list").len(), POOLS.len());
    daemon.stop();
}

/// Goal: a daemon that is killed while it makes a snapshot leaves the whole snapshot or nothing,
/// and loses no write. Method: kill -9 at random moments of the call, under load.
#[test]
fn a_killed_daemon_leaves_a_whole_snapshot_or_none() {
    let mut rng = seed::announced("a_killed_daemon_leaves_a_whole_snapshot_or_none");
    let place = Place::new().on_cores(2);
    let (mut daemon, mut load) = loaded(&place, &mut rng);
    load.run(200);
    for number in 0..at_length(4, 40) {
        let before = load.ledger.entries.clone();
        let name = format!("s{number}");
        let after = Duration::from_micros(rng.below(30_000));
        let wish = json!({ "volume": "v", "name": name });
        let mut client = daemon.connect();
        daemon = load.run_during(|| {
            std::thread::scope(|scope| {
                // The answer may not come.
                scope.spawn(move || client.call_by_name("volume_snapshot_create", wish));
                std::thread::sleep(after);
                daemon.kill();
            });
            place.start()
        });
        load.run(100);
        load.until_connected();
        healthy(&mut daemon);
        let found = list(&mut daemon, "volume_snapshot_list");
        let lvols = list(&mut daemon, "lvol_list").len();
        assert_eq!(lvols, POOLS.len() * (1 + found.len()), "{found:#?}");
        if let Some(one) = found.first() {
            assert_eq!(one["state"], "ready");
            let model = load.ledger.copied_since(&before);
            load.run_during(|| check(&mut daemon, &name, &model));
            daemon.call("volume_snapshot_delete", json!({ "snapshot": name }));
        }
    }
    load.drain();
    load.check_all("after the load");
    daemon.stop();
}
