//! Goal: of two daemons that open the same volume over one remote namespace, the last one is the
//! holder, and the former holder acknowledges, reads and writes nothing.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use nacre_bdev::{Io, Op, Status};
use nacre_nvmf::host::HostOptions;
use nacre_nvmf_wire::StatusCode;
use nacre_nvmf_wire::commands::reservation::{PersistChange, RegisterAction, ReservationType};
use nacre_tests::daemon::{Daemon, Place, free_address};
use nacre_tests::host::{Host, pattern};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::ledger::BLOCK;
use crate::reservations::Host as Stranger;
use crate::volumes::{HOLD_MS, healthy, patient, replica, until, verify_bytes};

const SIZE: u64 = 24 << 20;
const FAR: &str = "nqn.2025-01.io.nacre:far";
/// How long a volume that may not answer holds I/O of its hosts.
const HOLD: Duration = Duration::from_millis(500);
const PATIENCE: Duration = Duration::from_secs(60);
const OK: Option<StatusCode> = Some(StatusCode::SUCCESS);

fn attach(daemon: &mut Daemon, far: SocketAddr) {
    let params = json!({
        "name": "far", "trtype": "TCP", "traddr": far.ip().to_string(),
        "trsvcid": far.port().to_string(), "subnqn": FAR,
        "ctrlr_loss_timeout_sec": -1, "reconnect_delay_sec": 1,
    });
    let devices = daemon.call("bdev_nvme_attach_controller", params);
    assert_eq!(devices, json!(["farn1"]));
}

fn publish(daemon: &mut Daemon) -> SocketAddr {
    let address = free_address("127.0.0.1");
    let listener =
        json!({ "trtype": "TCP", "traddr": "127.0.0.1", "trsvcid": address.port().to_string() });
    let wish = json!({ "name": "v", "allow_any_host": true, "listeners": [listener] });
    daemon.call("volume_publish", wish);
    address
}

fn host(address: SocketAddr) -> Host {
    let options = HostOptions {
        fast_io_fail: Some(Duration::from_secs(20)),
        ..patient()
    };
    Host::connected(address, options, &[1])
}

/// The registrants of the keeper's namespace.
fn registrants(keeper: &mut Daemon) -> Vec<Value> {
    let report = keeper.call("nvmf_ns_get_reservation", json!({ "nqn": FAR, "nsid": 1 }));
    let registrants = report["registrants"].as_array().expect("a list");
    registrants.iter().map(|r| r["hostid"].clone()).collect()
}

/// Starts a daemon that exports a disk. Returns its address.
fn keeper(place: &Place) -> (Daemon, SocketAddr) {
    let mut keeper = place.start();
    keeper.create_file("disk", BLOCK as u32, SIZE);
    keeper.create_subsystem(FAR);
    keeper.add_namespace(FAR, "disk");
    let far = keeper.listen(FAR, "127.0.0.1:0");
    (keeper, far)
}

/// Goal: a foreign host reserves a replica's namespace while the daemon is down. The volume loses
/// only that replica, or waits if it has no other. It reports the reason, and continues by itself
/// when the host releases the namespace. Method: once for each kind of exclusion (Write Exclusive,
/// Exclusive Access). The other replica is a file, which is hidden for the second part.
#[test]
fn a_replica_reserved_by_another_host() {
    let far_place = Place::new();
    let (keeper, far) = keeper(&far_place);
    let place = Place::new();
    let mut daemon = place.start();
    attach(&mut daemon, far);
    daemon.create_file("near", BLOCK as u32, SIZE);
    let settings = json!({ "settle_ms": 50, "frozen_hold_ms": HOLD_MS });
    daemon.call(
        "volume_create",
        json!({ "name": "v", "devices": ["near", "farn1"], "settings": settings }),
    );
    healthy(&mut daemon);
    let address = publish(&mut daemon);
    let says_so = |replica: &Value| {
        let why = replica["why"].as_str();
        why.is_some_and(|why| why.contains("reserved"))
    };
    let keep = PersistChange::Keep;
    let data = |seed| pattern(BLOCK, seed);
    for (seed, kind) in [
        (1, ReservationType::WriteExclusive),
        (2, ReservationType::ExclusiveAccess),
    ] {
        healthy(&mut daemon);
        daemon.stop();
        let mut stranger = Stranger::connect_to(FAR, far, 0xb);
        assert_eq!(stranger.register(RegisterAction::Register, keep, 7), OK);
        assert_eq!(stranger.acquire(kind), StatusCode::SUCCESS);
        daemon = place.start();
        until(&mut daemon, "open without it", |v| {
            v["state"] == "degraded" && says_so(replica(v, "farn1"))
        });
        let mut host = host(address);
        assert_eq!(host.write(0, 0, 1, &data(seed)), Status::Ok);
        assert_eq!(stranger.register(RegisterAction::Unregister, keep, 0), OK);
        healthy(&mut daemon);
        host.disconnect();

        daemon.stop();
        let (here, away) = (place.path("near.img"), place.path("near.away"));
        std::fs::rename(&here, &away).expect("in one directory");
        // A directory in its place keeps the daemon from creating the missing file.
        std::fs::create_dir(&here).expect("room");
        assert_eq!(stranger.register(RegisterAction::Register, keep, 7), OK);
        assert_eq!(stranger.acquire(kind), StatusCode::SUCCESS);
        daemon = place.start();
        until(&mut daemon, "frozen, and says why", |v| {
            v["state"] == "frozen" && says_so(v)
        });
        assert_eq!(stranger.register(RegisterAction::Unregister, keep, 0), OK);
        until(&mut daemon, "open again", |v| v["state"] == "degraded");
        let mut host = self::host(address);
        assert_eq!(host.read(0, 0, 1, BLOCK), data(seed));
        host.disconnect();
        std::fs::remove_dir(&here).expect("empty");
        std::fs::rename(&away, &here).expect("in one directory");
        daemon.call("state_retry", Value::Null);
    }
    verify_bytes(&mut daemon, SIZE - (1 << 20));
    daemon.stop();
    keeper.stop();
}

/// Goal: of two daemons with the same volume the target of their replica fences the older one.
/// Method: the older daemon is stopped (SIGSTOP) with a host's write in flight. The other one gets
/// a copy of its store, opens the volume and writes to it; then the older one continues.
#[test]
fn the_older_of_two_daemons_is_fenced() {
    let far_place = Place::new();
    let (mut keeper, far) = keeper(&far_place);

    let place = Place::new();
    let mut older = place.start();
    attach(&mut older, far);
    let settings = json!({ "settle_ms": 50, "frozen_hold_ms": HOLD.as_millis() as u64 });
    older.call(
        "volume_create",
        json!({ "name": "v", "devices": ["farn1"], "settings": settings }),
    );
    let opened = healthy(&mut older);
    assert_eq!(
        opened["replicas"][0]["fencing"], "reservation",
        "{opened:#}"
    );
    let before = registrants(&mut keeper);
    assert_eq!(before.len(), 1);
    let older_address = publish(&mut older);
    let mut its_host = host(older_address);
    let data = |seed| pattern(BLOCK, seed);
    assert_eq!(its_host.write(0, 0, 1, &data(1)), Status::Ok);

    older.freeze();
    let buf = its_host.buf(BLOCK).map(|mut buf| {
        buf.bytes_mut().expect("its own").copy_from_slice(&data(2));
        buf
    });
    let late = |token| Io::new(token, Op::Write, 0, 1).with(buf.expect("memory"));
    let late = its_host.submit(0, late).expect("room");
    its_host.pass(Duration::from_millis(50));

    let other_place = Place::new();
    std::fs::create_dir(other_place.path("data")).expect("a new place");
    let store = |place: &Place| place.path("data/volumes.redb");
    std::fs::copy(store(&place), store(&other_place)).expect("a copy of the store");
    let mut newer = other_place.start();
    attach(&mut newer, far);
    let now = healthy(&mut newer);
    assert!(now["epoch"].as_u64() > opened["epoch"].as_u64());
    let after = registrants(&mut keeper);
    assert_eq!(after.len(), 1, "the older one has lost its registration");
    assert_ne!(
        before, after,
        "two daemons are two hosts, on one machine too"
    );
    let newer_address = publish(&mut newer);
    let mut new_host = host(newer_address);
    assert_eq!(new_host.read(0, 0, 1, BLOCK), data(1));
    assert_eq!(new_host.write(0, 0, 1, &data(3)), Status::Ok);

    older.signal(Signal::CONT);
    let end = Instant::now() + PATIENCE;
    let fenced = until(&mut older, "fenced", |v| v["state"] == "fenced");
    assert!(
        fenced["why"]
            .as_str()
            .is_some_and(|why| why.contains("reserved")),
        "{fenced:#}"
    );
    assert_eq!(
        fenced["replicas"][0]["state"], "in_sync",
        "the device itself has no failure: {fenced:#}"
    );
    let ended = loop {
        its_host.turn_or_nap();
        if let Some(ended) = its_host.take_completion() {
            break ended;
        }
        assert!(Instant::now() < end, "the late write never ends");
    };
    assert_eq!(ended.token, late);
    assert_ne!(ended.status, Status::Ok);
    assert_ne!(its_host.write(0, 8, 1, &data(4)), Status::Ok);
    let read = its_host.buf(BLOCK).expect("memory");
    let read = its_host.run(0, |token| Io::new(token, Op::Read, 0, 1).with(read));
    assert_ne!(read.status, Status::Ok, "reads neither");
    assert_eq!(new_host.read(0, 0, 1, BLOCK), data(3));
    assert_eq!(new_host.write(0, 8, 1, &data(5)), Status::Ok);

    // After a restart it finds the newer owner's label, and leaves the volume alone.
    older.kill();
    let mut older = place.start();
    let refused = until(&mut older, "refused", |v| {
        v["state"] == "fenced"
            && v["why"]
                .as_str()
                .is_some_and(|why| why.contains("newer owner"))
    });
    assert_eq!(refused["replicas"][0]["fencing"], Value::Null);
    assert_eq!(registrants(&mut keeper), after);
    assert_eq!(new_host.write(0, 0, 1, &data(6)), Status::Ok);
    assert_eq!(new_host.read(0, 0, 1, BLOCK), data(6));
    older.stop();

    // A restarted target keeps its reservation, and the holder continues.
    keeper.kill();
    let mut keeper = far_place.start();
    healthy(&mut newer);
    // Hosts wait at most the hold time for an absent target; the volume's state may show the
    // absence later.
    let end = Instant::now() + PATIENCE;
    while new_host.write(0, 0, 1, &data(7)) != Status::Ok {
        assert!(Instant::now() < end, "the holder does not go on");
    }
    assert_eq!(registrants(&mut keeper), after);
    newer.stop();
    assert_eq!(registrants(&mut keeper), Vec::<Value>::new(), "free again");
    keeper.stop();
}
