//! A volume over three daemons: a local file and two remote namespaces over TCP. Each of the three
//! daemons is killed, frozen and disconnected at random moments under verified load.

use std::fs::File;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::process::Command;
use std::time::{Duration, Instant};

use nacre_tests::daemon::{Daemon, Place};
use nacre_tests::seed;
use nacre_tests::{at_length, skip};
use rustix::process::Signal;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use serde_json::json;

use crate::ledger::BLOCK;
use crate::load::Load;
use crate::volumes::{HOLD_MS, events, healthy, patient, publish, replica, until, verify_bytes};

const MIB: u64 = 1 << 20;
/// Size of each replica; the load uses the first four MiB.
const SIZE: u64 = 24 * MIB;
/// The deadline of a replica's I/O.
const DEADLINE: Duration = Duration::from_millis(500);

/// A daemon that exports one disk.
struct DiskExporter {
    // Dropped before its place, which has its log: it prints the log when a test fails.
    daemon: Option<Daemon>,
    place: Place,
    address: SocketAddr,
    name: String,
}

impl DiskExporter {
    fn start(place: Place, ip: &str, name: &str) -> Self {
        Self::start_with(place, ip, name, SIZE)
    }

    fn start_with(place: Place, ip: &str, name: &str, bytes: u64) -> Self {
        let mut daemon = place.start();
        let nqn = format!("nqn.2025-01.io.nacre:{name}");
        daemon.create_file("disk", BLOCK as u32, bytes);
        daemon.create_subsystem(&nqn);
        daemon.add_namespace(&nqn, "disk");
        let address = daemon.listen(&nqn, &format!("{ip}:0"));
        Self {
            daemon: Some(daemon),
            place,
            address,
            name: name.to_owned(),
        }
    }

    fn daemon(&self) -> &Daemon {
        self.daemon.as_ref().expect("it runs")
    }

    fn kill(&mut self) {
        self.daemon.take().expect("it runs").kill();
    }

    fn restart(&mut self) {
        self.daemon = Some(self.place.start());
    }

    /// The name of the attached bdev.
    fn device(&self) -> String {
        format!("{}n1", self.name)
    }

    fn attach_to(&self, holder: &mut Daemon) {
        let params = json!({
            "name": self.name, "trtype": "TCP", "traddr": self.address.ip().to_string(),
            "trsvcid": self.address.port().to_string(),
            "subnqn": format!("nqn.2025-01.io.nacre:{}", self.name),
            "ctrlr_loss_timeout_sec": -1, "reconnect_delay_sec": 1,
        });
        let devices = holder.call("bdev_nvme_attach_controller", params);
        assert_eq!(devices, json!([self.device()]));
    }
}

/// Starts a daemon with volume "v" over a file and the keepers' namespaces. Returns its address.
fn hold(place: &Place, keepers: &[DiskExporter]) -> (Daemon, SocketAddr) {
    let mut daemon = place.start();
    daemon.create_file("here", BLOCK as u32, SIZE);
    let mut devices = vec!["here".to_owned()];
    for keeper in keepers {
        keeper.attach_to(&mut daemon);
        devices.push(keeper.device());
    }
    // Reads go to all replicas in sync, so that a stale one would be noticed.
    let settings = json!({
        "read_policy": "round-robin", "settle_ms": 50, "frozen_hold_ms": HOLD_MS,
        "deadline_ms": DEADLINE.as_millis() as u64,
    });
    daemon.call(
        "volume_create",
        json!({ "name": "v", "devices": devices, "settings": settings }),
    );
    healthy(&mut daemon);
    let address = publish(&mut daemon);
    (daemon, address)
}

/// Goal: whichever daemon is killed or frozen, and whenever, no acknowledged write is lost, no read
/// is stale, and the replicas are equal afterwards. Method: verified load over two queues; at
/// random moments kill -9 of the holder or of a keeper, or a keeper that is stopped for longer than
/// its deadline; each time it returns by itself.
#[test]
fn any_of_three_daemons_dies() {
    let mut rng = seed::announced("any_of_three_daemons_dies");
    let mut keepers =
        ["one", "two"].map(|name| DiskExporter::start(Place::new(), "127.0.0.1", name));
    let place = Place::new().on_cores(2);
    let (mut holder, address) = hold(&place, &keepers);
    let mut load = Load::start(address, patient(), 1, &mut rng);
    load.run(500);
    for round in 0..at_length(3, 12) {
        let after = Duration::from_micros(rng.below(100_000));
        let keeper = &mut keepers[rng.below(2) as usize];
        let away = Duration::from_millis(rng.below(1500));
        holder = load.run_during(|| {
            std::thread::sleep(after);
            match round % 3 {
                0 => {
                    keeper.kill();
                    std::thread::sleep(away);
                    keeper.restart();
                }
                1 => {
                    keeper.daemon().signal(Signal::STOP);
                    std::thread::sleep(DEADLINE * 2 + away);
                    keeper.daemon().signal(Signal::CONT);
                }
                _ => {
                    holder.kill();
                    holder = place.start();
                }
            }
            holder
        });
        load.run(200);
        load.until_connected();
        // Sometimes the next failure comes before the volume is healthy again.
        if rng.below(3) > 0 {
            holder = load.run_during(|| {
                healthy(&mut holder);
                holder
            });
        }
    }
    load.drain();
    load.check_all("after the load");
    verify_bytes(&mut holder, SIZE - MIB);
    load.check_all("after all is equal");
    holder.stop();
}

/// Goal: a remote replica that was gone for long gets only the missed regions. Method: a keeper
/// is killed, a known part of the volume is written from time to time, the keeper returns; the
/// copied bytes are counted.
#[test]
fn a_returning_keeper_gets_only_missed_regions() {
    let mut rng = seed::announced("a_returning_keeper_gets_only_missed_regions");
    let mut keepers = [DiskExporter::start(Place::new(), "127.0.0.1", "one")];
    let place = Place::new();
    let (mut holder, address) = hold(&place, &keepers);
    let device = keepers[0].device();
    let mut load = Load::start(address, patient(), 1, &mut rng);
    load.run(300);
    keepers[0].kill();
    // Retries with growing delays reach the longest delay, 10 s, after 16 s.
    let away = Duration::from_secs(at_length(25, 40));
    let since = Instant::now();
    while since.elapsed() < away {
        load.run(50);
        load.drain();
        let pause = Instant::now();
        while pause.elapsed() < Duration::from_secs(2) {
            load.turn();
        }
    }
    let without = until(&mut holder, "it is out", |v| {
        replica(v, &device)["state"] == "out"
    });
    let region = without["region_size"].as_u64().expect("a size");
    let missed = without["dirty_regions"].as_u64().expect("a count") * region;
    assert!((1..=6 * MIB).contains(&missed), "{missed}");
    keepers[0].restart();
    healthy(&mut holder);
    let ended = events(&mut holder, "replica_resync_end");
    let facts = &ended.last().expect("it was copied to")["facts"];
    assert_eq!(facts["kind"], "partial", "{facts}");
    assert!(
        facts["bytes"].as_u64().expect("a count") <= missed,
        "{facts}"
    );
    load.check_all("after its return");
    verify_bytes(&mut holder, SIZE - MIB);
    holder.stop();
}

/// Goal: the deepest stack of devices wakes a sleeping core. Method: a volume on a pool on a remote
/// device, under verified load; the log has no refused watch (`Daemon::stop` looks).
#[test]
fn a_volume_on_a_pool_on_a_remote_device() {
    let mut rng = seed::announced("a_volume_on_a_pool_on_a_remote_device");
    let ip = "127.0.0.1";
    let mut keeper = DiskExporter::start_with(Place::new().on_cores(1), ip, "keeper", 256 * MIB);
    let place = Place::new().on_cores(1);
    let mut daemon = place.start();
    keeper.attach_to(&mut daemon);
    let pool = json!({ "name": "p", "disk": keeper.device() });
    daemon.call("pool_create", pool);
    let lvol = json!({ "pool": "p", "name": "a", "size": SIZE });
    daemon.call("lvol_create", lvol);
    daemon.call("volume_create", json!({ "name": "v", "devices": ["p/a"] }));
    healthy(&mut daemon);
    let address = publish(&mut daemon);
    let mut load = Load::start(address, patient(), 1, &mut rng);
    load.run(200);
    load.drain();
    load.check_all("after all");
    drop(load);
    daemon.stop();
    keeper.daemon.take().expect("it runs").stop();
}

/// Goal: a network without traffic is handled like a dead keeper: hosts notice nothing, and the
/// volume is healthy when traffic returns. Method: the keeper lives in a network namespace. Its
/// cable is cut under load for longer than the deadline, and then long enough to lose the
/// connection.
#[test]
fn a_network_without_traffic() {
    const TEST: &str = "a_network_without_traffic";
    let Some(cable) = Cable::new() else {
        return skip(TEST, "it takes root to make a network namespace");
    };
    let mut rng = seed::announced(TEST);
    // The load runs in the network namespace of the volume's daemon.
    cable.enter_near();
    let keepers = [
        DiskExporter::start(Place::new().in_network(&cable.far), FAR, "far"),
        DiskExporter::start(Place::new().in_network(&cable.near), "127.0.0.1", "near"),
    ];
    let device = keepers[0].device();
    let place = Place::new().in_network(&cable.near);
    let (mut holder, address) = hold(&place, &keepers);
    let mut load = Load::start(address, patient(), 1, &mut rng);
    load.run(300);
    for away in [DEADLINE * 3, Duration::from_secs(12)] {
        holder = load.run_during(|| {
            cable.cut(true);
            std::thread::sleep(away);
            until(&mut holder, "it is out", |v| {
                replica(v, &device)["state"] == "out"
            });
            cable.cut(false);
            healthy(&mut holder);
            holder
        });
        load.run(200);
    }
    load.drain();
    load.check_all("after the load");
    verify_bytes(&mut holder, SIZE - MIB);
    holder.stop();
}

const NEAR: &str = "10.97.31.1";
const FAR: &str = "10.97.31.2";

/// Two network namespaces with a cable between them, removed on drop.
struct Cable {
    near: String,
    far: String,
}

impl Cable {
    /// `None`: this user or machine cannot create them.
    fn new() -> Option<Self> {
        let name = |end: &str| format!("nacre-{end}-{}", std::process::id());
        let cable = Self {
            near: name("near"),
            far: name("far"),
        };
        let (near, far) = (&cable.near, &cable.far);
        let made = ip(&format!("netns add {near}"))
            && ip(&format!("netns add {far}"))
            && ip(&format!(
                "link add end0 netns {near} type veth peer name end1 netns {far}"
            ));
        made.then_some(())?;
        for (end, device, address) in [(near, "end0", NEAR), (far, "end1", FAR)] {
            for words in [
                format!("-n {end} address add {address}/24 dev {device}"),
                format!("-n {end} link set {device} up"),
                format!("-n {end} link set lo up"),
            ] {
                assert!(ip(&words), "ip {words}");
            }
        }
        Some(cable)
    }

    /// Drops all traffic, without notice to the ends.
    fn cut(&self, cut: bool) {
        let state = if cut { "down" } else { "up" };
        assert!(ip(&format!("-n {} link set end1 {state}", self.far)));
    }

    /// Sockets of this thread belong to the near end from now on.
    fn enter_near(&self) {
        let file = File::open(format!("/run/netns/{}", self.near)).expect("it was made");
        let network = Some(LinkNameSpaceType::Network);
        move_into_link_name_space(file.as_fd(), network).expect("its creator may enter it");
    }
}

impl Drop for Cable {
    fn drop(&mut self) {
        for end in [&self.near, &self.far] {
            ip(&format!("netns del {end}"));
        }
    }
}

fn ip(words: &str) -> bool {
    let output = Command::new("ip").args(words.split(' ')).output();
    output.is_ok_and(|output| output.status.success())
}
