//! Tests of a replica on a full file system.

use std::path::{Path, PathBuf};
use std::process::Command;

use nacre_tests::daemon::Place;
use nacre_tests::seed;
use nacre_tests::skip;
use serde_json::json;

use crate::ledger::BLOCK;
use crate::load::Load;
use crate::volumes::{HOLD_MS, healthy, patient, publish, replica, until, verify_bytes};

const MIB: u64 = 1 << 20;
/// Size of each replica; the load uses the first four MiB.
const SIZE: u64 = 24 * MIB;

/// A tmpfs, unmounted on drop.
struct SmallTmpfs(PathBuf);

impl SmallTmpfs {
    /// `None`: this user may not mount.
    fn new(at: PathBuf, size: &str) -> Option<Self> {
        std::fs::create_dir(&at).expect("a folder");
        let size = format!("size={size}");
        mount(&["-t", "tmpfs", "-o", &size, "tmpfs"], &at).then(|| Self(at))
    }

    fn has_room(&self, size: &str) {
        let size = format!("remount,size={size}");
        assert!(mount(&["-o", &size], &self.0));
    }
}

impl Drop for SmallTmpfs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).output();
    }
}

fn mount(words: &[&str], at: &Path) -> bool {
    let output = Command::new("mount").args(words).arg(at).output();
    output.is_ok_and(|output| output.status.success())
}

/// Goal: a full disk costs its volume that replica until there is space; hosts notice nothing.
/// Method: a sparse file on a tmpfs of 1 MiB, under a load that writes 4 MiB, some of it zeroes;
/// then the tmpfs grows.
#[test]
fn a_replica_on_a_full_disk_leaves_and_returns() {
    const TEST: &str = "a_replica_on_a_full_disk_leaves_and_returns";
    let place = Place::new();
    let Some(small) = SmallTmpfs::new(place.path("small"), "1m") else {
        return skip(TEST, "it takes root to mount a tmpfs");
    };
    let mut rng = seed::announced(TEST);
    let mut daemon = place.start();
    daemon.create_file("roomy", BLOCK as u32, SIZE);
    let full = small.0.join("full.img");
    daemon.call(
        "bdev_uring_create",
        json!({ "name": "full", "filename": full, "block_size": BLOCK, "size": SIZE }),
    );
    let settings = json!({ "settle_ms": 50, "frozen_hold_ms": HOLD_MS, "deadline_ms": HOLD_MS });
    daemon.call(
        "volume_create",
        json!({ "name": "v", "devices": ["roomy", "full"], "settings": settings }),
    );
    healthy(&mut daemon);
    let address = publish(&mut daemon);

    let mut load = Load::start(address, patient(), 1, &mut rng);
    let without = load.run_during(|| {
        until(&mut daemon, "the full one is out", |v| {
            replica(v, "full")["state"] == "out"
        })
    });
    let why = replica(&without, "full")["why"].to_string();
    assert!(why.contains("no space is left"), "{why}");
    load.run(500);
    load.run_during(|| {
        small.has_room("64m");
        daemon.call("volume_resync", json!({ "name": "v" }));
        healthy(&mut daemon);
    });
    load.run(200);
    load.drain();
    load.check_all("after its return");
    verify_bytes(&mut daemon, SIZE - MIB);
    daemon.stop();
}
