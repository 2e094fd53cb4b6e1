//! Volumes whose store is a real etcd: Debian's, or `NACRE_TEST_ETCD` names it. Without it, these
//! tests are skipped aloud.

use std::time::{Duration, Instant};

use nacre_cluster_etcd_members::{Members, program};
use nacre_random::Random;
use nacre_tests::daemon::{Daemon, Place};
use nacre_tests::seed;
use serde_json::json;

use crate::ledger::BLOCK;
use crate::load::Load;
use crate::volumes::{HOLD_MS, events, healthy, patient, publish, replica, until, verify_bytes};

const MIB: u64 = 1 << 20;
const SIZE: u64 = 48 * MIB;
const REPLICAS: [&str; 3] = ["a", "b", "c"];

/// One member of etcd. `None`: there is no etcd, as the output says.
fn etcd(test: &str) -> Option<Members> {
    Some(Members::start(program(test)?, 1, &[]))
}

fn stored(etcd: &Members, prefix: &str) -> Place {
    Place::new()
        .on_cores(2)
        .with("NACRE_STORE_ENDPOINTS", &etcd.endpoints().urls[0])
        .with("NACRE_STORE_PREFIX", prefix)
}

/// Makes volume "v" on three files.
fn create(daemon: &mut Daemon) {
    for name in REPLICAS {
        daemon.create_file(name, BLOCK as u32, SIZE);
    }
    let settings = json!({
        "read_policy": "round-robin",
        "settle_ms": 50,
        "frozen_hold_ms": HOLD_MS,
        "deadline_ms": HOLD_MS,
    });
    daemon.call(
        "volume_create",
        json!({ "name": "v", "devices": REPLICAS, "settings": settings }),
    );
    healthy(daemon);
}

fn loaded(place: &Place, rng: &mut Random) -> (Daemon, Load) {
    let mut daemon = place.start();
    create(&mut daemon);
    let address = publish(&mut daemon);
    (daemon, Load::start(address, patient(), 1, rng))
}

fn until_logged(daemon: &Daemon, text: &str) {
    let end = Instant::now() + Duration::from_secs(60);
    while !daemon.log().contains(text) {
        assert!(Instant::now() < end, "never \"{text}\":\n{}", daemon.log());
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Runs a daemon that must end by itself, and returns what it says.
fn refused(place: &Place) -> String {
    let mut command = place.serve_command(&place.socket(), &place.path("data"));
    let output = command.output().expect("nacre runs");
    assert!(!output.status.success());
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    text(&output.stdout) + &text(&output.stderr)
}

/// Goal: no acknowledged write is lost, whether daemon or etcd is killed. Method: verified load
/// through kill -9 of the daemon; a start while etcd is away, which waits; etcd killed, without and
/// with the loss of a replica.
#[test]
fn a_volume_in_etcd_survives_kill_9() {
    const NAME: &str = "a_volume_in_etcd_survives_kill_9";
    let Some(mut etcd) = etcd(NAME) else {
        return;
    };
    let mut rng = seed::announced(NAME);
    // So that the daemon notices in time that etcd is away.
    let place = stored(&etcd, "lab").with("NACRE_STORE_DEADLINE_MS", "1000");
    let (mut daemon, mut load) = loaded(&place, &mut rng);
    assert!(!place.path("data/volumes.redb").exists());
    load.run(300);
    for etcd_is_away in [false, true] {
        daemon = load.run_during(|| {
            std::thread::sleep(Duration::from_micros(rng.below(50_000)));
            daemon.kill();
            if !etcd_is_away {
                return place.start();
            }
            etcd.kill(0);
            let starting = place.spawn();
            until_logged(&starting, "the start waits for the volume store");
            // A signal ends a start that waits.
            starting.stop();
            let starting = place.spawn();
            etcd.run_all();
            let mut daemon = starting;
            let mut client = daemon.connect();
            let ready = client.call_by_name("framework_wait_init", serde_json::Value::Null);
            ready.unwrap_or_else(|error| panic!("{error}\n{}", daemon.log()));
            daemon
        });
        load.until_connected();
        load.run(200);
        healthy(&mut daemon);
    }

    // No state changes: I/O goes on without etcd.
    etcd.kill(0);
    load.run(300);
    // A replica is lost: its volume waits, and loses nothing. The deletion of the device waits,
    // too.
    load.run_during(|| {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_secs(6));
                etcd.run_all();
            });
            daemon.call("bdev_uring_delete", json!({ "name": "b" }));
        });
        until(&mut daemon, "b is out", |v| {
            replica(v, "b")["state"] == "out"
        });
    });
    assert!(!events(&mut daemon, "volume_store_lost").is_empty());
    load.run(200);
    load.run_during(|| {
        daemon.create_file("b", BLOCK as u32, SIZE);
        healthy(&mut daemon);
    });
    load.drain();
    load.check_all("after all");
    verify_bytes(&mut daemon, SIZE - MIB);
    // An orderly end does not wait for etcd. The record lacks it, so the volume is reconciled.
    etcd.kill(0);
    let began = Instant::now();
    daemon.stop();
    let took = began.elapsed();
    assert!(took < Duration::from_secs(30), "{took:?}");
    etcd.run_all();
    let mut daemon = place.start();
    healthy(&mut daemon);
    let opened = events(&mut daemon, "volume_open");
    assert_eq!(opened[0]["facts"]["clean"], false, "{opened:?}");
    daemon.stop();
    let mut daemon = place.start();
    healthy(&mut daemon);
    let opened = events(&mut daemon, "volume_open");
    assert_eq!(opened[0]["facts"]["clean"], true, "{opened:?}");
    daemon.stop();
}

/// Goal: a prefix is one daemon's, and a takeover is possible by name. Method: a second daemon with
/// the same prefix while the first one runs; then with the claim that the refusal names.
#[test]
fn a_prefix_in_use_is_refused() {
    let Some(etcd) = etcd("a_prefix_in_use_is_refused") else {
        return;
    };
    let place = stored(&etcd, "lab");
    let mut daemon = place.start();
    create(&mut daemon);
    let second = stored(&etcd, "lab");
    let said = refused(&second);
    assert!(said.contains("belongs to another daemon"), "{said}");
    let (_, claim) = said.split_once("take_over = \"").expect("a remedy");
    let claim = claim.split('"').next().expect("a claim");
    daemon.kill();
    let second = second.with("NACRE_STORE_TAKE_OVER", claim);
    let mut daemon = second.start();
    let volumes = daemon.call("volume_list", json!({}));
    assert!(volumes.to_string().contains("\"v\""), "{volumes}");
    daemon.stop();
    // The claim is used up: the first daemon does not come back by itself.
    let said = refused(&place);
    assert!(said.contains("belongs to another daemon"), "{said}");
    second.start().stop();
}

/// Goal: volumes of the file move to etcd, and no start serves without them. Method: `[store]`
/// appears, changes its prefix, and disappears; etcd is replaced by an empty one.
#[test]
fn volumes_move_to_etcd() {
    let Some(mut etcd) = etcd("volumes_move_to_etcd") else {
        return;
    };
    let place = Place::new().on_cores(2);
    let mut daemon = place.start();
    create(&mut daemon);
    daemon.stop();
    let url = etcd.endpoints().urls.remove(0);
    let configured = |prefix: &str, place: Place| {
        place
            .with("NACRE_STORE_ENDPOINTS", &url)
            .with("NACRE_STORE_PREFIX", prefix)
    };
    let place = configured("lab", place);
    for _ in 0..2 {
        let mut daemon = place.start();
        healthy(&mut daemon);
        daemon.stop();
    }
    assert!(place.path("data/volumes.redb.moved").exists());
    assert!(!place.path("data/volumes.redb").exists());
    let place = configured("lab2", place);
    let said = refused(&place);
    assert!(said.contains("in etcd /nacre/lab/"), "{said}");
    let place = place
        .without("NACRE_STORE_ENDPOINTS")
        .without("NACRE_STORE_PREFIX");
    let said = refused(&place);
    assert!(said.contains("has no [store]"), "{said}");
    let place = configured("lab", place);
    etcd.kill(0);
    std::fs::remove_dir_all(etcd.dir().join("m0")).expect("removed");
    etcd.run_all();
    let said = refused(&place);
    assert!(said.contains("has lost its data"), "{said}");
}
