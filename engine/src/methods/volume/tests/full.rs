//! Goal: a volume whose replicas are all out of space loses none of them, and goes on when there is
//! room again. Method: a thin volume on two pools that are smaller, filled to the end.

use std::time::{Duration, Instant};

use nacre_bdev::registry::Usage;
use nacre_bdev::{Holder, Status};
use serde_json::{Value, json};

use super::on_pools::{create, with_pools};
use super::{pause, until};
use crate::methods::testing::TestDaemon;
use crate::services::backup::device::{ClaimedDevice, Range};

const MIB: u64 = 1 << 20;
const POOLS: [&str; 2] = ["pool0", "pool1"];

fn are_in_sync(volume: &Value) -> bool {
    let mut replicas = volume["replicas"].as_array().unwrap().iter();
    replicas.all(|replica| replica["state"] == "in_sync")
}

fn compare(daemon: &TestDaemon) -> Value {
    daemon.call("volume_verify", json!({ "name": "v" }));
    let volume = until(daemon, "compared", |v| v["verify"]["running"] == false);
    assert!(are_in_sync(&volume), "{volume:#}");
    volume["verify"].clone()
}

#[test]
fn full_pools_cost_no_replica() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = with_pools(dir.path());
    let ballast = |pool| json!({ "pool": pool, "name": "b", "size": "16MiB", "thick": true });
    for pool in POOLS {
        daemon.call("lvol_create", ballast(pool));
    }
    daemon.call("volume_create", create(256, true));
    let plane = daemon.engine.plane().unwrap();
    let holder = Holder::User("the test".into());
    let claim = plane.bdevs.claim("v", holder, Usage::Shared).unwrap();
    let reactor = plane.reactors[0].clone();
    let device = ClaimedDevice::new(claim, reactor);
    let write = |mib: u64, byte: u8| {
        let data = vec![byte; MIB as usize];
        daemon.run(device.write(mib * MIB, data))
    };
    let began = Instant::now();
    let full = (0..256).find_map(|mib| Some((mib, write(mib, 1).err()?)));
    let (full, status) = full.expect("the pools are smaller");
    // A host, too, sends again what ends with a path error.
    let mut last = status;
    while last == Status::Gone {
        assert!(began.elapsed() < Duration::from_secs(120), "no end");
        pause(&daemon, Duration::from_millis(50));
        last = write(full, 1).expect_err("the pools are full");
    }
    assert_eq!(last, Status::NoSpace);
    for mib in full + 1..full + 4 {
        assert_eq!(write(mib, 2), Err(Status::NoSpace));
    }
    let volume = daemon.call("volume_get", json!({ "name": "v" }));
    assert!(are_in_sync(&volume), "{volume:#}");
    assert_eq!(compare(&daemon)["different_blocks"], 0);
    let events = daemon.call("events_get", json!({})).to_string();
    assert!(!events.contains("replica_out"), "{events}");

    for pool in POOLS {
        daemon.call("lvol_delete", json!({ "lvol": format!("{pool}/b") }));
    }
    until(&daemon, "room", |_| write(full, 3).is_ok());
    assert_eq!(write(full + 1, 3), Ok(()));
    until(&daemon, "equal", |v| v["state"] == "healthy");
    let verify = compare(&daemon);
    assert_eq!(verify["different_blocks"], 0);
    assert_eq!(verify["compared_bytes"], 256 * MIB);
    let range = Range {
        offset: full * MIB,
        at: 0,
        bytes: MIB as usize,
    };
    let read = daemon.run(device.read(vec![range], vec![0; MIB as usize]));
    assert!(read.unwrap().iter().all(|byte| *byte == 3));
}
