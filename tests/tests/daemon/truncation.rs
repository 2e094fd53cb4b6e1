//! Replicas on devices that are truncated, by command or behind the daemon's back, across restarts
//! and while it runs. The volume is never healthy with a truncated replica, and never serves its
//! data in place of the lost data.

use std::net::SocketAddr;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use nacre_bdev::Status;
use nacre_tests::daemon::{Daemon, Place};
use nacre_tests::host::{Host, pattern};
use serde_json::{Value, json};

use crate::ledger::BLOCK;
use crate::volumes::{events, healthy, patient, publish, replica, until, verify_bytes, volume};

const MIB: u64 = 1 << 20;
/// Size of each file, and of a truncated one.
const SIZE: u64 = 32 * MIB;
const LEFT: u64 = 16 * MIB;
/// Blocks of the volume that are written: two in the part that remains, two in the part that is cut
/// off.
const BLOCKS: [u64; 4] = [3, 900, 20 * MIB / BLOCK as u64, 30 * MIB / BLOCK as u64];

fn serve(place: &Place) -> (Daemon, SocketAddr) {
    let mut daemon = place.start();
    for name in ["a", "b"] {
        daemon.create_file(name, BLOCK as u32, SIZE);
    }
    let settings = json!({ "read_policy": "round-robin", "settle_ms": 50 });
    daemon.call(
        "volume_create",
        json!({ "name": "v", "devices": ["a", "b"], "settings": settings }),
    );
    healthy(&mut daemon);
    let address = publish(&mut daemon);
    let mut host = Host::connected(address, patient(), &[1]);
    for lba in BLOCKS {
        assert_eq!(host.write(0, lba, 1, &pattern(BLOCK, lba)), Status::Ok);
    }
    assert_eq!(host.flush(0), Status::Ok);
    (daemon, address)
}

/// Reads all written blocks back, from any replica.
fn read_all(address: SocketAddr, when: &str) {
    let mut host = Host::connected(address, patient(), &[1]);
    for lba in BLOCKS.repeat(4) {
        let found = host.read(0, lba, 1, BLOCK);
        assert!(found == pattern(BLOCK, lba), "block {lba} {when}");
    }
}

fn set_len(place: &Place, name: &str, bytes: u64) {
    let file = std::fs::File::options();
    let file = file.clone().write(true).open(place.path(name));
    let file = file.expect("its file");
    file.set_len(bytes).expect("another size");
}

fn length(place: &Place, name: &str) -> u64 {
    place.path(name).metadata().expect("its file").len()
}

/// True if the replica left the volume and gets a full resync.
fn filling(volume: &Value) -> bool {
    let state = &replica(volume, "b")["state"];
    assert!(
        volume["state"] != "healthy" || state == "in_sync",
        "{volume:#}"
    );
    volume["state"] == "degraded" && state == "filling"
}

/// Waits for the full resync of the replica, and compares the replicas.
fn full_resync_completes(daemon: &mut Daemon, address: SocketAddr, when: &str) {
    healthy(daemon);
    let end = Instant::now() + Duration::from_secs(10);
    while !has_filled(daemon) {
        assert!(Instant::now() < end, "{when}: {:#}", volume(daemon));
        std::thread::sleep(Duration::from_millis(10));
    }
    read_all(address, when);
    verify_bytes(daemon, SIZE - MIB);
}

/// Goal: a replica that was once found too small is not trusted when its device is large again.
/// Method: the file is truncated between two starts, and extended again before the next start or
/// while the daemon runs.
#[test]
fn a_replica_truncated_between_starts() {
    for (killed, rescanned) in [(false, false), (true, false), (false, true)] {
        let place = Place::new();
        let (daemon, address) = serve(&place);
        let end = |daemon: Daemon| if killed { daemon.kill() } else { daemon.stop() };
        end(daemon);
        set_len(&place, "b.img", LEFT);
        let mut daemon = place.start();
        let now = until(&mut daemon, "it is known to be too small", filling);
        let why = replica(&now, "b")["why"]
            .as_str()
            .expect("a reason")
            .to_owned();
        assert!(why.contains(&format!("{LEFT} bytes")), "{why}");
        read_all(address, "without it");
        if rescanned {
            set_len(&place, "b.img", SIZE);
            daemon.call("bdev_uring_rescan", json!({ "name": "b" }));
        } else {
            end(daemon);
            set_len(&place, "b.img", SIZE);
            daemon = place.start();
        }
        full_resync_completes(&mut daemon, address, &format!("{killed} {rescanned}"));
        daemon.stop();
    }
}

/// Goal: a shrink command truncates a replica only after the volume has recorded it, and never the
/// last copy. Method: the command line, first without force, then with force, then with no other
/// replica in sync.
#[test]
fn a_replica_truncated_by_command() {
    let place = Place::new();
    let (mut daemon, address) = serve(&place);
    let resize = |more: &[&str]| {
        let command = [&["bdev", "resize", "b"], more].concat();
        let output = place.client(&command);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.success(), text)
    };
    let (done, text) = resize(&["16MiB", "--shrink"]);
    assert!(!done && text.contains("nothing was changed"), "{text}");
    assert!(!text.contains("I/O past the present end fails"), "{text}");
    assert_eq!(length(&place, "b.img"), SIZE);
    assert_eq!(volume(&mut daemon)["state"], "healthy");

    let (done, text) = resize(&["16MiB", "--shrink", "--force"]);
    assert!(done, "{text}");
    assert!(filling(&volume(&mut daemon)), "{:#}", volume(&mut daemon));
    assert_eq!(length(&place, "b.img"), LEFT);
    read_all(address, "without it");
    let (done, text) = resize(&["32MiB"]);
    assert!(done, "{text}");
    full_resync_completes(&mut daemon, address, "by command");

    let offline = json!({ "name": "v", "replica": "a" });
    daemon.call("volume_offline_replica", offline);
    let (done, text) = resize(&["16MiB", "--shrink", "--force"]);
    assert!(!done && text.contains("last good replica"), "{text}");
    assert_eq!(length(&place, "b.img"), SIZE);
    read_all(address, "from the last one");
    daemon.stop();
}

/// Goal: a file truncated while the daemon runs costs the volume that replica, even if no host
/// reads the lost part. Method: the file is truncated, and extended again once the daemon noticed.
#[test]
fn a_replica_truncated_while_the_daemon_runs() {
    let place = Place::new();
    let (mut daemon, address) = serve(&place);
    set_len(&place, "b.img", LEFT);
    until(&mut daemon, "that is noticed", filling);
    read_all(address, "without it");
    set_len(&place, "b.img", SIZE);
    daemon.call("bdev_uring_rescan", json!({ "name": "b" }));
    full_resync_completes(&mut daemon, address, "behind its back");
    daemon.stop();
}

/// Goal: a file that changed while no daemon ran costs the volume that replica, although it has its
/// size and label. Method: it is cut and made as large again, or written to, after a stop in order;
/// the daemon is killed before it is filled. A file that did not change is trusted.
#[test]
fn a_replica_that_changed_while_no_daemon_ran() {
    type Change = fn(&Place);
    let cut: Change = |place| {
        set_len(place, "b.img", LEFT);
        set_len(place, "b.img", SIZE);
    };
    let written: Change = |place| {
        let file = std::fs::File::options()
            .write(true)
            .open(place.path("b.img"));
        let file = file.expect("its file");
        file.write_all_at(&[7; BLOCK], LEFT)
            .expect("other contents");
    };
    for change in [cut, written] {
        let place = Place::new();
        let (daemon, address) = serve(&place);
        daemon.stop();
        let mut daemon = place.start();
        healthy(&mut daemon);
        read_all(address, "unchanged");
        assert_eq!(
            events(&mut daemon, "replica_resync_begin"),
            [] as [Value; 0]
        );
        daemon.stop();
        change(&place);
        let mut daemon = place.start();
        let now = until(&mut daemon, "it is known to have changed", |v| {
            filling(v) || v["state"] == "healthy"
        });
        assert!(filling(&now) || has_filled(&mut daemon), "{now:#}");
        daemon.kill();
        let mut daemon = place.start();
        full_resync_completes(&mut daemon, address, "it changed");
        daemon.stop();
        let mut daemon = place.start();
        healthy(&mut daemon);
        assert!(!has_filled(&mut daemon), "it is trusted again");
        daemon.stop();
    }
}

fn has_filled(daemon: &mut Daemon) -> bool {
    let full = |e: &Value| e["facts"]["kind"] == "full" && e["facts"]["device"] == "b";
    events(daemon, "replica_resync_end").iter().any(full)
}

/// Goal: the only replica is not served from after its file changed while no daemon ran, until an
/// operator decides.
#[test]
fn the_only_replica_changed_while_no_daemon_ran() {
    let place = Place::new();
    let (mut daemon, address) = serve(&place);
    let of_b = json!({ "name": "v", "replica": "b" });
    daemon.call("volume_remove_replica", of_b);
    daemon.stop();
    set_len(&place, "a.img", LEFT);
    set_len(&place, "a.img", SIZE);
    for killed in [true, false] {
        let mut daemon = place.start();
        until(&mut daemon, "frozen", |v| v["state"] == "frozen");
        if killed {
            daemon.kill();
            continue;
        }
        let thaw = json!({ "name": "v", "replica": "a", "force": "v" });
        daemon.call("volume_thaw", thaw);
        healthy(&mut daemon);
        // The daemon looks at its files every second.
        std::thread::sleep(Duration::from_millis(2500));
        daemon.kill();
    }
    let mut daemon = place.start();
    healthy(&mut daemon);
    let mut host = Host::connected(address, patient(), &[1]);
    let kept = BLOCKS[0];
    assert!(host.read(0, kept, 1, BLOCK) == pattern(BLOCK, kept));
    drop(host);
    daemon.stop();
}

/// Goal: the last replica in sync is neither marked as bad nor served from after a truncation, also
/// across a restart; an operator may continue with the rest.
#[test]
fn the_last_replica_is_truncated() {
    let place = Place::new();
    let (mut daemon, address) = serve(&place);
    daemon.call(
        "volume_remove_replica",
        json!({ "name": "v", "replica": "b" }),
    );
    set_len(&place, "a.img", LEFT);
    let frozen = |v: &Value| {
        v["state"] == "frozen"
            && v["why"]
                .as_str()
                .is_some_and(|w| w.contains("may have lost data"))
    };
    until(&mut daemon, "frozen, with the reason", frozen);
    daemon.stop();
    set_len(&place, "a.img", SIZE);
    let mut daemon = place.start();
    until(&mut daemon, "it is known over a start", frozen);
    let thaw = json!({ "name": "v", "replica": "a", "force": "v" });
    daemon.call("volume_thaw", thaw);
    healthy(&mut daemon);
    let mut host = Host::connected(address, patient(), &[1]);
    let kept = BLOCKS[0];
    assert!(host.read(0, kept, 1, BLOCK) == pattern(BLOCK, kept));
    drop(host);
    daemon.stop();
}

/// Goal: a device that is too small for a replica is refused with its size, however small it is.
#[test]
fn too_small_for_a_replica() {
    let place = Place::new();
    let mut daemon = place.start();
    for (name, bytes) in [("tiny", 8 * 512), ("small", MIB + 512)] {
        daemon.create_ram(name, 512, bytes);
        let wish = json!({ "name": "v", "devices": [name] });
        let refused = daemon.try_call("volume_create", wish).unwrap_err();
        let text = format!("{refused:?} {refused}");
        assert!(text.contains("-22") && text.contains("2097152"), "{text}");
        assert!(text.contains(&format!("{bytes} bytes")), "{text}");
    }
    daemon.stop();
}
