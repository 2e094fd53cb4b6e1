//! Daemons as nodes of a cluster, with a real etcd: Debian's, or `NACRE_TEST_ETCD` names it.
//! Without it, these tests are skipped aloud.
//!
//! One more daemon is the host: it attaches the volume over all nodes, and serves it to the
//! verified load.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use nacre_cluster_etcd_members::{Members, program};
use nacre_tests::daemon::{Daemon, Place, free_address};
use serde_json::{Value, json};

use crate::ledger::BLOCK;
use crate::volumes::NQN;

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const SIZE: u64 = 24 * MIB;
/// The nodes with replicas of the volume.
pub(crate) const NAMES: [&str; 3] = ["a", "b", "c"];
/// Time for a volume to be served and in sync again.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) struct Node {
    // Dropped before its place, which has its log: it prints the log when a test fails.
    daemon: Option<Daemon>,
    pub place: Place,
    pub name: &'static str,
    address: SocketAddr,
}

impl Node {
    fn new(etcd: &Members, name: &'static str, settings: &[(&str, &str)]) -> Self {
        let address = free_address("127.0.0.1");
        let place = Place::new()
            .with("NACRE_STORE_ENDPOINTS", &etcd.endpoints().urls[0])
            .with("NACRE_CLUSTER_NAME", "lab")
            .with("NACRE_CLUSTER_NODE", name)
            .with("NACRE_NVMF_LISTEN", format!("tcp://{address}"));
        let set = |place: Place, (name, value): &(&str, &str)| place.with(name, value);
        let place = settings.iter().fold(place, set);
        Self {
            daemon: None,
            place,
            name,
            address,
        }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    pub(crate) fn start(&mut self) {
        self.daemon = Some(self.place.start());
    }

    pub(crate) fn daemon(&mut self) -> &mut Daemon {
        self.daemon.as_mut().expect("it runs")
    }

    pub(crate) fn kill(&mut self) {
        self.daemon.take().expect("it runs").kill();
    }

    pub(crate) fn stop(&mut self) {
        self.daemon.take().expect("it runs").stop();
    }
}

pub(crate) struct Cluster {
    pub nodes: Vec<Node>,
    pub etcd: Members,
}

impl Cluster {
    /// Nodes of these names, each with a device "disk". `None`: there is no etcd, as the output
    /// says.
    pub(crate) fn start(test: &str, names: &[&'static str]) -> Option<Self> {
        Self::start_with(test, names, &[])
    }

    /// As [`Cluster::start`], with variables of the nodes' environment.
    pub(crate) fn start_with(
        test: &str,
        names: &[&'static str],
        settings: &[(&str, &str)],
    ) -> Option<Self> {
        let etcd = Members::start(program(test)?, 1, &[]);
        let nodes = names.iter().map(|name| Node::new(&etcd, name, settings));
        let mut nodes: Vec<Node> = nodes.collect();
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
            described.count() == names.len() && status["this_node"]["state"] == "joined"
        });
        Some(cluster)
    }

    pub(crate) fn any(&mut self) -> &mut Daemon {
        let mut running = self
            .nodes
            .iter_mut()
            .filter_map(|node| node.daemon.as_mut());
        running.next().expect("a node runs")
    }

    pub(crate) fn until(&mut self, what: &str, done: impl Fn(&Value) -> bool) -> Value {
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
    pub(crate) fn healthy(&mut self) -> usize {
        let status = self.until("healthy", |status| status["volumes"]["healthy"] == 1);
        self.holder(&status).expect("a node serves it")
    }

    /// Each other node says in its list that it is a standby, soon.
    fn are_standbys(&mut self, holder: usize) {
        let end = Instant::now() + PATIENCE;
        for index in (0..self.nodes.len()).filter(|index| *index != holder) {
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
    pub(crate) fn optimized(&mut self, nqn: &str) -> usize {
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

    pub(crate) fn holder(&self, status: &Value) -> Option<usize> {
        let nodes = status["nodes"].as_array()?;
        let holder = nodes.iter().find(|node| node["held"] == 1)?;
        let is_it = |node: &Node| holder["name"] == node.name;
        self.nodes.iter().position(is_it)
    }

    /// Waits until another node serves the volume.
    pub(crate) fn until_moved(&mut self, from: usize) {
        let from = self.nodes[from].name;
        self.until("another node serves it", |status| {
            let nodes = status["nodes"].as_array().map_or(&[][..], Vec::as_slice);
            let mut holders = nodes.iter().filter(|node| node["held"] == 1);
            holders.any(|node| node["name"] != from)
        });
    }

    /// The node that serves the volume.
    pub(crate) fn serving(&mut self) -> &mut Daemon {
        let holder = self.healthy();
        self.nodes[holder].daemon()
    }

    /// Creates volume "v" with a replica on each node, and publishes it. `force`: the devices have
    /// data.
    pub(crate) fn create(&mut self, force: bool) -> String {
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
        assert_eq!(addresses.len(), self.nodes.len(), "{published}");
        let holder = self.healthy();
        self.are_standbys(holder);
        published["nqn"].as_str().expect("text").to_owned()
    }
}

/// A daemon that attaches the volume over all nodes, and serves it at the address.
pub(crate) fn host(cluster: &Cluster, nqn: &str) -> (Daemon, SocketAddr, Place) {
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
