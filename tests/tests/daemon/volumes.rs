//! A replicated volume on files in a real daemon under verified load: the daemon is killed;
//! replicas are removed, returned, stale and failing.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use nacre_bdev::{Completion, Io, Op, Status};
use nacre_nvmf::host::HostOptions;
use nacre_random::Random;
use nacre_tests::at_length;
use nacre_tests::daemon::{Daemon, Place, free_address};
use nacre_tests::host::{Host, options, pattern};
use nacre_tests::seed;
use serde_json::{Value, json};

use crate::ledger::BLOCK;
use crate::load::Load;

pub(crate) const NQN: &str = "nqn.2025-01.io.nacre:v";
const REPLICAS: [&str; 3] = ["a", "b", "c"];
const MIB: u64 = 1 << 20;
/// Size of each file; the load uses the first four MiB.
const SIZE: u64 = 48 * MIB;
/// Limit for a volume to reach a state; its disk may stall for part of that time.
const PATIENCE: Duration = Duration::from_secs(180);
/// How long a volume holds I/O that it cannot answer, in tests where hosts must notice nothing.
/// Longer than any stall of a machine or disk: a decision about replicas flushes the disk, and
/// other processes write to that disk too.
pub(crate) const HOLD_MS: u64 = 600_000;

/// Starts a daemon with volume "v" over `replicas`, which are files or are on files. Returns its
/// address.
fn serve(place: &Place, replicas: &[&str]) -> (Daemon, SocketAddr) {
    let mut daemon = place.start();
    for name in REPLICAS {
        daemon.create_file(name, BLOCK as u32, SIZE);
    }
    for name in replicas.iter().filter_map(|name| name.strip_prefix("EE_")) {
        daemon.call("bdev_error_create", json!({ "base_name": name }));
    }
    // Reads are spread, so that a stale replica would be noticed. No replica is dropped for a
    // stalled disk, because the test removes the others.
    let settings = json!({
        "read_policy": "round-robin",
        "settle_ms": 50,
        "frozen_hold_ms": HOLD_MS,
        "deadline_ms": HOLD_MS,
    });
    daemon.call(
        "volume_create",
        json!({ "name": "v", "devices": replicas, "settings": settings }),
    );
    healthy(&mut daemon);
    let address = publish(&mut daemon);
    (daemon, address)
}

/// Serves the volume to any host.
pub(crate) fn publish(daemon: &mut Daemon) -> SocketAddr {
    let address = free_address("127.0.0.1");
    let listener =
        json!({ "trtype": "TCP", "traddr": "127.0.0.1", "trsvcid": address.port().to_string() });
    let wish = json!({ "name": "v", "allow_any_host": true, "listeners": [listener] });
    assert_eq!(daemon.call("volume_publish", wish)["nqn"], NQN);
    address
}

/// Like [`serve`], with a verifying load on two queues.
fn loaded(place: &Place, replicas: &[&str], rng: &mut Random) -> (Daemon, Load) {
    let (daemon, address) = serve(place, replicas);
    (daemon, Load::start(address, patient(), 1, rng))
}

/// Calls a method on one replica of the volume.
fn on_replica(daemon: &mut Daemon, method: &str, replica: &str) {
    daemon.call(method, json!({ "name": "v", "replica": replica }));
}

/// Submits a write of one block.
fn begin_write(host: &mut Host, lba: u64, data: &[u8]) -> u64 {
    let mut buf = host.buf(BLOCK).expect("memory");
    buf.bytes_mut().expect("its own").copy_from_slice(data);
    let write = host.submit(0, |token| Io::new(token, Op::Write, lba, 1).with(buf));
    write.expect("room")
}

fn begin_read(host: &mut Host, lba: u64) -> u64 {
    let buf = host.buf(BLOCK).expect("memory");
    let read = host.submit(0, |token| Io::new(token, Op::Read, lba, 1).with(buf));
    read.expect("room")
}

/// Checks that no completion arrives for long enough to exclude a slow answer.
fn waits(host: &mut Host, why: &str) {
    host.pass(Duration::from_millis(500));
    assert!(host.take_completion().is_none(), "answered, and {why}");
}

/// Waits for a successful completion.
fn answered(host: &mut Host) -> Completion {
    let mut answer = None;
    host.until("it is answered", |h| {
        answer = h.take_completion();
        answer.is_some()
    });
    let answer = answer.expect("as it said");
    assert_eq!(answer.status, Status::Ok);
    answer
}

pub(crate) fn volume(daemon: &mut Daemon) -> Value {
    daemon.call("volume_get", json!({ "name": "v" }))
}

pub(crate) fn replica<'a>(volume: &'a Value, device: &str) -> &'a Value {
    let replicas = volume["replicas"].as_array().expect("a list");
    let found = replicas.iter().find(|r| r["device"] == device);
    found.unwrap_or_else(|| panic!("no {device} in {volume:#}"))
}

pub(crate) fn until(daemon: &mut Daemon, what: &str, done: impl Fn(&Value) -> bool) -> Value {
    let end = Instant::now() + PATIENCE;
    loop {
        let now = volume(daemon);
        if done(&now) {
            return now;
        }
        assert!(Instant::now() < end, "never: {what}: {now:#}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

pub(crate) fn healthy(daemon: &mut Daemon) -> Value {
    until(daemon, "healthy", |v| v["state"] == "healthy")
}

/// Compares all replicas, which must be equal.
fn verify(daemon: &mut Daemon) {
    verify_bytes(daemon, SIZE - MIB);
}

/// Like [`verify`], for a volume of this many bytes.
pub(crate) fn verify_bytes(daemon: &mut Daemon, bytes: u64) {
    healthy(daemon);
    daemon.call("volume_verify", json!({ "name": "v" }));
    let now = until(daemon, "verified", |v| v["verify"]["running"] == false);
    let (compared, different) = (
        &now["verify"]["compared_bytes"],
        &now["verify"]["different_blocks"],
    );
    assert_eq!((compared, different), (&json!(bytes), &json!(0)), "{now:#}");
}

pub(crate) fn events(daemon: &mut Daemon, kind: &str) -> Vec<Value> {
    let events = daemon.call("events_get", json!({ "categories": ["volume", "replica"] }));
    let events = events["events"].as_array().expect("a list").clone();
    events.into_iter().filter(|e| e["type"] == kind).collect()
}

/// Bytes written to a device so far.
fn written(daemon: &mut Daemon, device: &str) -> u64 {
    let stats = daemon.call("bdev_get_iostat", json!({ "names": [device] }));
    stats["bdevs"][0]["bytes_written"]
        .as_u64()
        .expect("a count")
}

/// Options of a host that waits as long as a volume takes to open without a replica.
pub(crate) fn patient() -> HostOptions {
    let mut patient = options(NQN);
    patient.io_timeout = Duration::from_secs(30);
    patient.connect_timeout = Duration::from_secs(30);
    patient
}

fn file(place: &Place, name: &str) -> PathBuf {
    place.path(&format!("{name}.img"))
}

/// Goal: no acknowledged write to a three-way volume is lost, however often its daemon ends, and
/// its replicas are equal afterwards. Method: verified load over two queues through kill -9 at
/// random moments, and sometimes an orderly stop. Each time the volume returns by itself, and hosts
/// find their namespace. Each start raises the epoch; only after an orderly stop no reconcile is
/// needed.
#[test]
fn a_volume_survives_kill_9() {
    let mut rng = seed::announced("a_volume_survives_kill_9");
    let place = Place::new().on_cores(2);
    let (mut daemon, mut load) = loaded(&place, &REPLICAS, &mut rng);
    let first = volume(&mut daemon)["epoch"].as_u64().unwrap();
    load.run(500);
    // Number of kills and stops.
    let ends: u64 = at_length(4, 8);
    for end in 0..ends {
        let after = Duration::from_micros(rng.below(100_000));
        let in_order = end % 4 == 3;
        daemon = load.run_during(|| {
            std::thread::sleep(after);
            if in_order {
                // Wait for the reconcile after the last kill, or the next opening has to do it as
                // well.
                healthy(&mut daemon);
                daemon.stop();
            } else {
                daemon.kill();
            }
            place.start()
        });
        load.run(200);
        load.until_connected();
        let opened = events(&mut daemon, "volume_open");
        assert_eq!(opened.len(), 1, "{opened:?}");
        assert_eq!(opened[0]["facts"]["clean"], in_order, "{opened:?}");
    }
    load.drain();
    load.check_all("after the load");
    verify(&mut daemon);
    let epoch = volume(&mut daemon)["epoch"].as_u64().unwrap();
    assert_eq!(epoch, first + ends);
    // The namespace follows its volume, without a warning.
    let log = daemon.log();
    assert!(!log.contains("not restored"), "{log}");
    daemon.stop();
}

/// Goal: hosts do not notice a replica removed under load; when it returns it gets only the missed
/// regions. Method: its bdev is hot-deleted, the load goes on and writes to a tenth of the volume,
/// the bdev is created again. The copied bytes and the bytes written to the device are counted.
#[test]
fn a_removed_replica_gets_only_missed_regions() {
    let mut rng = seed::announced("a_removed_replica_gets_only_missed_regions");
    let place = Place::new().on_cores(2);
    let (mut daemon, mut load) = loaded(&place, &REPLICAS, &mut rng);
    load.run(500);
    load.run_during(|| {
        daemon.call("bdev_uring_delete", json!({ "name": "b" }));
    });
    load.run(1000);
    load.drain();
    let without = until(&mut daemon, "b is out", |v| {
        replica(v, "b")["state"] == "out"
    });
    assert_eq!(without["state"], "degraded");
    let missed =
        without["dirty_regions"].as_u64().unwrap() * without["region_size"].as_u64().unwrap();
    assert!((1..=6 * MIB).contains(&missed), "{missed}");
    assert!(!events(&mut daemon, "replica_out").is_empty());

    daemon.create_file("b", BLOCK as u32, SIZE);
    healthy(&mut daemon);
    let ended = events(&mut daemon, "replica_resync_end");
    let facts = &ended.last().expect("it was copied to")["facts"];
    assert_eq!(facts["kind"], "partial", "{facts}");
    assert!(facts["bytes"].as_u64().unwrap() <= missed, "{facts}");
    // In addition to labels and the dirty-region log of 47 regions.
    let written = written(&mut daemon, "b");
    assert!(written <= missed + MIB, "{written} of {missed}");
    load.check_all("after its return");
    verify(&mut daemon);

    // Return under load, the usual case.
    load.run_during(|| {
        daemon.call("bdev_uring_delete", json!({ "name": "c" }));
        daemon.create_file("c", BLOCK as u32, SIZE);
        healthy(&mut daemon);
    });
    load.drain();
    load.check_all("after the second return");
    verify(&mut daemon);
    daemon.stop();
}

/// Goal: stale data of a replica is never read, whatever its label says. Method: the daemon is
/// stopped, a replica's file is copied, more is written, and the old file is put back; reads rotate
/// over all replicas in sync. The same with a file from before the last membership change.
#[test]
fn a_stale_copy_is_never_read() {
    let mut rng = seed::announced("a_stale_copy_is_never_read");
    let place = Place::new();
    let (mut daemon, mut load) = loaded(&place, &REPLICAS, &mut rng);
    load.run(800);
    load.drain();
    daemon = load.run_during(|| {
        daemon.stop();
        std::fs::copy(file(&place, "b"), place.path("old.img")).expect("room");
        place.start()
    });
    load.run(1500);
    load.drain();
    for kill in [false, true] {
        daemon = load.run_during(|| {
            if kill {
                daemon.kill()
            } else {
                daemon.stop()
            }
            std::fs::copy(place.path("old.img"), file(&place, "b")).expect("room");
            place.start()
        });
        load.until_connected();
        load.drain();
        load.check_all("with an old copy among the replicas");
        // A full resync: nothing of it was trusted.
        let filled = |e: &Value| e["facts"]["kind"] == "full" && e["facts"]["device"] == "b";
        let end = Instant::now() + PATIENCE;
        while !events(&mut daemon, "replica_resync_end").iter().any(filled) {
            assert!(Instant::now() < end, "{:#}", volume(&mut daemon));
            std::thread::sleep(Duration::from_millis(10));
        }
        load.check_all("after it was filled");
        verify(&mut daemon);
        load.run(300);
        load.drain();
    }
    daemon.stop();
}

/// Goal: a device that rejects writes costs its volume that replica until it accepts them again;
/// hosts notice nothing. Method: every write to one replica fails under load; then none.
#[test]
fn a_full_replica_leaves_and_returns() {
    let mut rng = seed::announced("a_full_replica_leaves_and_returns");
    let place = Place::new().on_cores(2);
    let (mut daemon, mut load) = loaded(&place, &["a", "b", "EE_c"], &mut rng);
    load.run(300);
    load.run_during(|| {
        let full = json!({ "name": "EE_c", "io_type": "write", "error_type": "failure", "num": 1_000_000 });
        daemon.call("bdev_error_inject_error", full);
        until(&mut daemon, "it is out", |v| {
            replica(v, "EE_c")["state"] != "in_sync"
        });
    });
    let why = replica(&volume(&mut daemon), "EE_c")["why"].clone();
    assert!(why.is_string(), "no reason is given: {why}");
    load.run(500);
    load.run_during(|| {
        let clear = json!({ "name": "EE_c", "io_type": "clear", "error_type": "failure" });
        daemon.call("bdev_error_inject_error", clear);
        // It happens by itself later; the call triggers it now.
        daemon.call("volume_resync", json!({ "name": "v" }));
        healthy(&mut daemon);
    });
    load.drain();
    load.check_all("after its return");
    verify(&mut daemon);
    daemon.stop();
}

/// Goal: with no replica in sync hosts wait, and continue when one is back. An operator can instead
/// have their I/O fail, and revert that. Method: the last replica is removed by force while a write
/// is in flight.
#[test]
fn a_frozen_volume_resumes() {
    let place = Place::new();
    let (mut daemon, address) = serve(&place, &REPLICAS);
    let mut host = Host::connected(address, patient(), &[1]);
    let (old, new) = (pattern(BLOCK, 1), pattern(BLOCK, 2));
    assert_eq!(host.write(0, 7, 1, &old), Status::Ok);
    for replica in ["a", "b"] {
        on_replica(&mut daemon, "volume_offline_replica", replica);
    }
    let last = json!({ "name": "v", "replica": "c" });
    assert!(daemon.try_call("volume_offline_replica", last).is_err());
    let forced = json!({ "name": "v", "replica": "c", "force": "v" });
    daemon.call("volume_offline_replica", forced);
    assert_eq!(volume(&mut daemon)["state"], "frozen");
    assert_eq!(events(&mut daemon, "volume_frozen").len(), 1);

    begin_write(&mut host, 7, &new);
    waits(&mut host, "nothing is in sync");
    on_replica(&mut daemon, "volume_online_replica", "c");
    answered(&mut host);
    assert_eq!(host.read(0, 7, 1, BLOCK), new);
    for replica in ["a", "b"] {
        on_replica(&mut daemon, "volume_online_replica", replica);
    }
    healthy(&mut daemon);

    daemon.call("volume_fail_io", json!({ "name": "v" }));
    assert_ne!(host.write(0, 7, 1, &old), Status::Ok);
    daemon.call("volume_thaw", json!({ "name": "v" }));
    assert_eq!(host.write(0, 7, 1, &old), Status::Ok);
    assert_eq!(host.read(0, 7, 1, BLOCK), old);
    let connections = daemon.call("volume_get_connections", json!({ "name": "v" }));
    assert_eq!(
        (
            &connections[0]["transport"],
            &connections[0]["queues"],
            &connections[0]["admitted"]
        ),
        (&json!("TCP"), &json!(1), &json!(true))
    );
    verify(&mut daemon);
    daemon.stop();
}

/// Goal: a volume with no replica present at start is visible to hosts anyway: they connect, and
/// their I/O waits until a replica is back. A daemon that stops meanwhile does not delay its exit.
/// Method: the daemon is killed and its files are hidden before it starts again; then once more,
/// with a stop.
#[test]
fn hosts_wait_for_a_volume_that_is_not_open() {
    let place = Place::new();
    let (daemon, address) = serve(&place, &REPLICAS);
    let mut host = Host::connected(address, patient(), &[1]);
    let (old, new) = (pattern(BLOCK, 1), pattern(BLOCK, 2));
    assert_eq!(host.write(0, 7, 1, &old), Status::Ok);
    drop(host);
    let hide = |hidden: bool| {
        for name in REPLICAS {
            let (here, away) = (file(&place, name), place.path(&format!("{name}.away")));
            // A directory in its place keeps the daemon from creating the missing file.
            let moved = if hidden {
                std::fs::rename(&here, &away).and_then(|()| std::fs::create_dir(&here))
            } else {
                std::fs::remove_dir(&here).and_then(|()| std::fs::rename(&away, &here))
            };
            moved.expect("in one directory");
        }
    };
    let frozen = |daemon: &mut Daemon| {
        until(daemon, "frozen, with its namespace", |v| {
            v["state"] == "frozen" && v["subsystems"] == json!([NQN])
        })
    };
    const NO_REPLICA: &str = "no replica is present";
    daemon.kill();
    hide(true);
    let mut daemon = place.start();
    frozen(&mut daemon);
    let mut host = Host::connected(address, patient(), &[1]);
    let read = begin_read(&mut host, 7);
    begin_write(&mut host, 8, &new);
    waits(&mut host, NO_REPLICA);
    hide(false);
    daemon.call("state_retry", Value::Null);
    for _ in 0..2 {
        let answer = answered(&mut host);
        if answer.token == read {
            assert_eq!(answer.data[0][..], old[..]);
        }
    }
    assert_eq!(host.read(0, 8, 1, BLOCK), new);
    assert_eq!(host.read(0, 7, 1, BLOCK), old);
    assert_eq!(events(&mut daemon, "volume_frozen").len(), 1);
    verify(&mut daemon);
    drop(host);

    daemon.kill();
    hide(true);
    let mut daemon = place.start();
    frozen(&mut daemon);
    let mut host = Host::connected(address, patient(), &[1]);
    begin_read(&mut host, 7);
    waits(&mut host, NO_REPLICA);
    let began = Instant::now();
    daemon.stop();
    assert!(
        began.elapsed() < Duration::from_secs(15),
        "the daemon waited as well"
    );
    // The host resends to the next daemon.
    hide(false);
    let mut daemon = place.start();
    assert_eq!(answered(&mut host).data[0][..], old[..]);
    verify(&mut daemon);
    daemon.stop();
}
