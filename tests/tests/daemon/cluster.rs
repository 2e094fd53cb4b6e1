//! Three daemons as nodes of a cluster, with a real etcd: Debian's, or `NACRE_TEST_ETCD` names it.
//! Without it, these tests are skipped aloud.
//!
//! A fourth daemon is the host: it attaches the volume over all three nodes, and serves it to the
//! verified load.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use nacre_cluster_etcd_members::{Members, program};
use nacre_nvmf_wire::StatusCode;
use nacre_nvmf_wire::commands::reservation::{PersistChange, RegisterAction, ReservationType};
use nacre_random::Random;
use nacre_tests::daemon::{Daemon, Place, free_address};
use nacre_tests::{at_length, seed};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::ledger::BLOCK;
use crate::load::Load;
use crate::reservations::Host;
use crate::volumes::{NQN, patient};

const MIB: u64 = 1 << 20;
const SIZE: u64 = 24 * MIB;
const NAMES: [&str; 3] = ["a", "b", "c"];
/// Time for a volume to be served and in sync again.
const PATIENCE: Duration = Duration::from_secs(60);

struct Node {
    // Dropped before its place, which has its log: it prints the log when a test fails.
    daemon: Option<Daemon>,
    place: Place,
    name: &'static str,
    address: SocketAddr,
}

impl Node {
    fn new(etcd: &Members, name: &'static str) -> Self {
        let address = free_address("127.0.0.1");
        let place = Place::new()
            .with("NACRE_STORE_ENDPOINTS", &etcd.endpoints().urls[0])
            .with("NACRE_CLUSTER_NAME", "lab")
            .with("NACRE_CLUSTER_NODE", name)
            .with("NACRE_NVMF_LISTEN", format!("tcp://{address}"));
        Self {
            daemon: None,
            place,
            name,
            address,
        }
    }

    fn start(&mut self) {
        self.daemon = Some(self.place.start());
    }

    fn daemon(&mut self) -> &mut Daemon {
        self.daemon.as_mut().expect("it runs")
    }

    fn kill(&mut self) {
        self.daemon.take().expect("it runs").kill();
    }

    fn stop(&mut self) {
        self.daemon.take().expect("it runs").stop();
    }
}

struct Cluster {
    nodes: [Node; 3],
    etcd: Members,
}

impl Cluster {
    /// Three nodes, each with a device of the same name. `None`, said aloud: there is no etcd.
    fn start(test: &str) -> Option<Self> {
        let etcd = Members::start(program(test)?, 1, &[]);
        let mut nodes = NAMES.map(|name| Node::new(&etcd, name));
        let url = etcd.endpoints().urls[0].clone();
        let init = nodes[0]
            .place
            .nacre()
            .args(["cluster", "init", "lab", "--etcd", &url])
            .output();
        let init = init.expect("nacre runs");
        assert!(init.status.success(), "{init:?}");
        for node in &mut nodes {
            node.start();
            node.daemon().create_file("disk", BLOCK as u32, SIZE);
        }
        let mut cluster = Self { nodes, etcd };
        cluster.until("all nodes have joined", |status| {
            let nodes = status["nodes"].as_array().map_or(&[][..], Vec::as_slice);
            let described = nodes.iter().filter(|node| node["name"].is_string());
            described.count() == NAMES.len() && status["this_node"]["state"] == "joined"
        });
        Some(cluster)
    }

    fn any(&mut self) -> &mut Daemon {
        let mut running = self
            .nodes
            .iter_mut()
            .filter_map(|node| node.daemon.as_mut());
        running.next().expect("a node runs")
    }

    fn until(&mut self, what: &str, done: impl Fn(&Value) -> bool) -> Value {
        let end = Instant::now() + PATIENCE;
        loop {
            let status = self.any().call("cluster_get_status", Value::Null);
            if done(&status) {
                return status;
            }
            assert!(Instant::now() < end, "never: {what}: {status:#}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// The index of the node that serves the one volume, once all replicas are in sync.
    fn healthy(&mut self) -> usize {
        let status = self.until("healthy", |status| status["volumes"]["healthy"] == 1);
        Self::holder(&status).expect("a node serves it")
    }

    /// Each other node says in its list that it is a standby, soon.
    fn are_standbys(&mut self, holder: usize) {
        let end = Instant::now() + PATIENCE;
        for index in (0..NAMES.len()).filter(|index| *index != holder) {
            let daemon = self.nodes[index].daemon();
            loop {
                let volume = daemon.call("volume_get", json!({ "name": "v" }));
                let why = volume["why"].as_str().unwrap_or_default();
                if volume["state"] == "standby" && why.ends_with(" serves it") {
                    break;
                }
                assert!(Instant::now() < end, "no standby: {volume:#}");
                std::thread::sleep(Duration::from_millis(50));
            }
        }
    }

    /// The node that shows hosts an optimized path, as soon as there is one.
    fn optimized(&mut self, nqn: &str) -> usize {
        let end = Instant::now() + PATIENCE;
        loop {
            for (index, node) in self.nodes.iter_mut().enumerate() {
                let params = json!({ "nqn": nqn });
                let listeners = node
                    .daemon()
                    .try_call("nvmf_subsystem_get_listeners", params);
                let state = |all: Value| all[0]["ana_states"][0]["ana_state"] == "optimized";
                if listeners.is_ok_and(state) {
                    return index;
                }
            }
            assert!(Instant::now() < end, "never optimized");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn holder(status: &Value) -> Option<usize> {
        let nodes = status["nodes"].as_array()?;
        let holder = nodes.iter().find(|node| node["held"] == 1)?;
        NAMES.iter().position(|name| holder["name"] == **name)
    }

    /// Creates volume "v" with a replica on each node, and publishes it. `force`: the devices have
    /// data.
    fn create(&mut self, force: bool) -> String {
        let devices = NAMES.map(|name| format!("{name}:disk"));
        // Reads go to all replicas in sync, so that a stale one would be noticed.
        let settings = json!({ "read_policy": "round-robin", "settle_ms": 50 });
        let mut params = json!({ "name": "v", "devices": devices, "settings": settings });
        if force {
            params["force"] = true.into();
        }
        self.nodes[0].daemon().call("volume_create", params);
        let params = json!({ "name": "v", "allow_any_host": true });
        let published = self.nodes[1].daemon().call("volume_publish", params);
        let addresses = published["listen_addresses"].as_array().expect("a list");
        assert_eq!(addresses.len(), NAMES.len(), "{published}");
        let holder = self.healthy();
        self.are_standbys(holder);
        published["nqn"].as_str().expect("text").to_owned()
    }
}

/// A daemon that attaches the volume over all nodes, and serves it at the address.
fn host(cluster: &Cluster, nqn: &str) -> (Daemon, SocketAddr, Place) {
    let place = Place::new()
        .with("NACRE_REPLICATION_KEEP_ALIVE_MS", 1000)
        .with("NACRE_REPLICATION_FAST_FAIL_MS", 0);
    let mut daemon = place.start();
    for node in &cluster.nodes {
        let params = json!({
            "name": "v", "trtype": "TCP", "traddr": node.address.ip().to_string(),
            "trsvcid": node.address.port().to_string(), "subnqn": nqn,
            "ctrlr_loss_timeout_sec": -1, "reconnect_delay_sec": 1,
        });
        // A node shows a new volume after its first holder has opened it.
        let end = Instant::now() + PATIENCE;
        while let Err(error) = daemon.try_call("bdev_nvme_attach_controller", params.clone()) {
            assert!(Instant::now() < end, "{error}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }
    daemon.create_subsystem(NQN);
    daemon.add_namespace(NQN, "vn1");
    let address = daemon.listen(NQN, "127.0.0.1:0");
    (daemon, address, place)
}

/// The acts of a round, on the node that serves the volume.
#[derive(Debug, Clone, Copy)]
enum Act {
    Kill,
    /// Stopped for longer than its lease, then it goes on.
    Pause,
    /// An operator moves the volume.
    Move,
    /// The daemon ends in order.
    Stop,
}

fn act(cluster: &mut Cluster, act: Act, holder: usize, rng: &mut Random) {
    std::thread::sleep(Duration::from_micros(rng.below(200_000)));
    let to = (holder + 1 + rng.below(2) as usize) % NAMES.len();
    match act {
        Act::Kill | Act::Stop => {
            let node = &mut cluster.nodes[holder];
            if matches!(act, Act::Kill) {
                node.kill();
            } else {
                node.stop();
            }
            cluster.until("another node serves it", |status| {
                Cluster::holder(status).is_some_and(|now| now != holder)
            });
            cluster.nodes[holder].start();
        }
        Act::Pause => {
            cluster.nodes[holder].daemon().signal(Signal::STOP);
            std::thread::sleep(Duration::from_millis(4000 + rng.below(1500)));
            cluster.nodes[holder].daemon().signal(Signal::CONT);
        }
        Act::Move => {
            let params = json!({ "volume": "v", "node": cluster.nodes[to].name, "wait_s": 20 });
            cluster.nodes[to]
                .daemon()
                .call("cluster_move_volume", params);
        }
    }
}

/// Goal: whatever happens to the node that serves a volume, no acknowledged write is lost, no read
/// is stale, no I/O fails, and the replicas are equal afterwards. Method: verified load over a host
/// with a path to each node; the holder is killed, paused, asked to hand over, and stopped.
#[test]
fn a_volume_outlives_its_node() {
    const NAME: &str = "a_volume_outlives_its_node";
    let Some(mut cluster) = Cluster::start(NAME) else {
        return;
    };
    let mut rng = seed::announced(NAME);
    let nqn = cluster.create(false);
    let (daemon, address, _place) = host(&cluster, &nqn);
    let mut load = Load::start(address, patient(), 1, &mut rng);
    load.run(300);
    for round in 0..at_length(1, 6) {
        for what in [Act::Kill, Act::Move, Act::Pause, Act::Stop] {
            let mut acting = Random::new(rng.draw());
            load.run_during(|| {
                let holder = cluster.healthy();
                let began = Instant::now();
                act(&mut cluster, what, holder, &mut acting);
                println!(
                    "round {round}: {what:?} of {}, {:?}",
                    NAMES[holder],
                    began.elapsed()
                );
                cluster.healthy();
            });
            load.run(200);
        }
    }
    load.drain();
    load.check_all("after the load");
    let holder = cluster.healthy();
    let serving = cluster.nodes[holder].daemon();
    crate::volumes::verify_bytes(serving, SIZE - MIB);
    load.check_all("after all is equal");
    drop(load);
    daemon.stop();

    // The devices are free after the deletion.
    let other = cluster.nodes[(holder + 1) % NAMES.len()].daemon();
    let refused = other.try_call("volume_delete", json!({ "name": "v" }));
    let refused = refused.expect_err("it is published").to_string();
    assert!(refused.contains("is published"), "{refused}");
    other.call("volume_unpublish", json!({ "name": "v" }));
    other.call("volume_delete", json!({ "name": "v" }));
    assert_eq!(other.call("volume_list", Value::Null), json!([]));
    cluster.create(true);
    for node in &mut cluster.nodes {
        node.stop();
    }
}

/// Goal: reservations move with the volume, also those that do not persist through power loss, and
/// end when it is unpublished. Method: the volume moves by a killed node and by an operator.
#[test]
fn reservations_move_with_the_volume() {
    let Some(mut cluster) = Cluster::start("reservations_move_with_the_volume") else {
        return;
    };
    let nqn = cluster.create(false);
    let holder = cluster.optimized(&nqn);
    let (a, b, mine) = (0xa, 0xb, (1, 1, 0, 10));
    let mut host = Host::connect_to(&nqn, cluster.nodes[holder].address, a);
    let registered = host.register(RegisterAction::Register, PersistChange::Keep, 10);
    assert_eq!(registered, Some(StatusCode::SUCCESS));
    assert_eq!(
        host.acquire(ReservationType::WriteExclusive),
        StatusCode::SUCCESS
    );
    let mut rng = Random::new(1);
    for what in [Act::Kill, Act::Move] {
        let holder = cluster.healthy();
        act(&mut cluster, what, holder, &mut rng);
        cluster.healthy();
        let holder = cluster.optimized(&nqn);
        let address = cluster.nodes[holder].address;
        let mut a = Host::connect_to(&nqn, address, a);
        let mut b = Host::connect_to(&nqn, address, b);
        let conflict = StatusCode::RESERVATION_CONFLICT.with_dnr();
        assert_eq!(b.write_block(BLOCK), conflict, "{what:?}");
        assert_eq!(a.write_block(BLOCK), StatusCode::SUCCESS, "{what:?}");
        let (_, kind, registrants, persists, key) = a.report();
        assert_eq!((kind, registrants, persists, key), mine, "{what:?}");
    }
    let any = cluster.any();
    any.call("volume_unpublish", json!({ "name": "v" }));
    let params = json!({ "name": "v", "allow_any_host": true });
    any.call("volume_publish", params);
    // The stored reservation, if there were one, has been loaded.
    let holder = cluster.optimized(&nqn);
    let daemon = cluster.nodes[holder].daemon();
    let params = json!({ "nqn": nqn, "nsid": 1 });
    let now = daemon.call("nvmf_ns_get_reservation", params);
    assert_eq!(now["registrants"], json!([]), "{now}");
    for node in &mut cluster.nodes {
        node.stop();
    }
}

/// Goal: I/O goes on while etcd is away, and the loss of a node then makes it wait, without an
/// error. Method: etcd is killed under verified load for longer than the lease; then once more, and
/// the holder with it.
#[test]
fn etcd_is_away() {
    const NAME: &str = "etcd_is_away";
    let Some(mut cluster) = Cluster::start(NAME) else {
        return;
    };
    let mut rng = seed::announced(NAME);
    let nqn = cluster.create(false);
    let (daemon, address, _place) = host(&cluster, &nqn);
    let mut load = Load::start(address, patient(), 1, &mut rng);
    load.run(300);
    let before = load.count();
    load.run_during(|| {
        cluster.etcd.kill(0);
        std::thread::sleep(Duration::from_secs(6));
    });
    let during = load.count() - before;
    assert!(during > 1000, "{during} I/Os without etcd");
    load.run_during(|| {
        cluster.etcd.run_all();
        cluster.healthy();
    });
    load.run(200);
    load.run_during(|| {
        let holder = cluster.healthy();
        cluster.etcd.kill(0);
        std::thread::sleep(Duration::from_secs(3));
        cluster.nodes[holder].kill();
        std::thread::sleep(Duration::from_secs(3));
        cluster.etcd.run_all();
        cluster.until("another node serves it", |status| {
            Cluster::holder(status).is_some_and(|now| now != holder)
        });
        cluster.nodes[holder].start();
        cluster.healthy();
    });
    load.run(200);
    load.drain();
    load.check_all("after the load");
    drop(load);
    daemon.stop();
    for node in &mut cluster.nodes {
        node.stop();
    }
}
