//! Goal: of three nodes on a real etcd, never two serve one volume at one time, and a volume does
//! not stay without a holder. Method: each node is a process with a stand-in for the engine, which
//! writes the time of each answer. Without etcd, the tests are skipped aloud.

mod cases;
mod fake;
mod operators;
mod process;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nacre_cluster_core::{BootTime, NodeId, VolumeId};
use nacre_cluster_etcd::{Client, Copies, Txn};
use nacre_cluster_etcd_members::{Members, program};
use nacre_cluster_node::{Cluster, NodeStatus, Operator, Status, clock};
use parking_lot::{Mutex, MutexGuard};
use serde_json::{Value, json};
use uuid::Uuid;

use fake::{Served, served};
use process::{Process, Start, prefix};

/// Longest wait of a test for a state.
const PATIENCE: Duration = Duration::from_secs(20);
const NODES: [u128; 3] = [1, 2, 3];

fn node(number: u128) -> NodeId {
    NodeId(Uuid::from_u128(number))
}

fn volume(number: u128) -> VolumeId {
    VolumeId(Uuid::from_u128(100 + number))
}

/// A cluster of etcd members and nodes.
struct Lab {
    nodes: Vec<Process>,
    etcd: Members,
    dir: tempfile::TempDir,
    client: Arc<Client>,
    operator: Operator,
    runtime: tokio::runtime::Runtime,
    volumes: Vec<VolumeId>,
    /// Each test measures times: one at a time has the machine.
    _turn: MutexGuard<'static, ()>,
}

static TURN: Mutex<()> = Mutex::new(());

impl Lab {
    /// `None`, said aloud: there is no etcd.
    fn start(test: &str, members: usize, volumes: u128, has_guardian: bool) -> Option<Self> {
        let lab = Self::without_nodes(test, members, &[])?;
        Some(lab.with_nodes(volumes, has_guardian))
    }

    fn with_nodes(mut self, volumes: u128, has_guardian: bool) -> Self {
        let lab = &mut self;
        lab.init();
        lab.create(volumes);
        for number in NODES {
            lab.run(Start {
                has_guardian,
                ..Start::node(number)
            });
        }
        lab.settle();
        self
    }

    fn without_nodes(test: &str, members: usize, arguments: &[&str]) -> Option<Self> {
        let program = program(test)?;
        let turn = TURN.lock();
        let etcd = Members::start(program, members, arguments);
        let mut builder = tokio::runtime::Builder::new_current_thread();
        let runtime = builder.enable_all().build();
        let runtime = runtime.expect("a runtime");
        let client = {
            let _entered = runtime.enter();
            Arc::new(Client::new(&etcd.endpoints()).expect("endpoints"))
        };
        Some(Self {
            nodes: Vec::new(),
            operator: Operator::new(Arc::clone(&client), prefix()),
            etcd,
            dir: tempfile::tempdir().expect("a folder"),
            client,
            runtime,
            volumes: Vec::new(),
            _turn: turn,
        })
    }

    fn init(&self) {
        let cluster = Cluster::new("lab", Duration::from_secs(2)).expect("valid");
        let made = self.runtime.block_on(cluster.init(&self.client, &prefix()));
        made.expect("a new cluster");
    }

    /// Creates volumes with a member on each node.
    fn create(&mut self, count: u128) {
        for number in 0..count {
            let id = volume(number);
            let member = |node: u128| {
                json!({
                    "id": Uuid::from_u128(1000 * (number + 1) + node),
                    "node": Uuid::from_u128(node),
                    "slot": node, "device": "d", "state": { "state": "in_sync" },
                })
            };
            let record = json!({
                "v": 1, "id": id.0, "name": format!("v{number}"), "epoch": 0, "serving": 0,
                "revision": 0, "holder": null, "later": "kept",
                "members": NODES.map(member),
            });
            let key = prefix().core_volume(id);
            let slots =
                NODES.map(|node| (Uuid::from_u128(node).to_string(), Value::from(node as u8)));
            let slots = serde_json::Map::<String, Value>::from_iter(slots);
            let publication = json!({ "v": 1, "slots": slots }).to_string();
            let [published, ..] = prefix().of_volume(id.0);
            let txn = Txn::default()
                .put(&key, record.to_string().into_bytes())
                .put(&published, publication.into_bytes());
            let made = self.client.transact(txn, Copies::One);
            assert!(self.runtime.block_on(made).expect("an answer").is_made);
            self.volumes.push(id);
        }
    }

    fn run(&mut self, how: Start) {
        let process = Process::start(self.dir.path(), &self.etcd.endpoints(), how);
        self.nodes.push(process);
    }

    /// Waits until all volumes are served, with all members.
    fn settle(&self) {
        self.wait("all volumes are healthy", || {
            let status = self.status();
            let leases = status.nodes.iter().filter(|node| node.lease.is_some());
            status.volumes.healthy == self.volumes.len()
                && leases.count() == self.nodes.len()
                && self.volumes.iter().all(|id| self.is_served_now(*id))
        });
    }

    fn is_served_now(&self, id: VolumeId) -> bool {
        let now = clock::now();
        let last = self.served(id).last().copied();
        last.is_some_and(|last| now.since(last.at) < Duration::from_millis(200))
    }

    fn status(&self) -> Status {
        let status = self.runtime.block_on(self.operator.status());
        status.expect("a status")
    }

    fn node_status(&self, id: NodeId) -> NodeStatus {
        let status = self.status();
        let found = status.nodes.into_iter().find(|node| node.id == id);
        found.expect("a node of the cluster")
    }

    fn wait(&self, what: &str, is_so: impl Fn() -> bool) {
        let began = Instant::now();
        while !is_so() {
            if began.elapsed() >= PATIENCE {
                let said = self.nodes.iter().map(Process::said);
                let said: Vec<String> = said.collect();
                panic!("not within {PATIENCE:?}: {what}\n{}", said.join("\n"));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn ids(&self) -> Vec<NodeId> {
        NODES.map(node).to_vec()
    }

    fn dir(&self) -> &Path {
        self.dir.path()
    }

    fn served(&self, id: VolumeId) -> Vec<Served> {
        served(self.dir(), &self.ids(), id)
    }

    /// The node that answered last.
    fn holder(&self, id: VolumeId) -> NodeId {
        self.served(id).last().expect("it was served").node
    }

    fn holds(&self, id: NodeId) -> Vec<VolumeId> {
        let volumes = self.volumes.iter().copied();
        volumes
            .filter(|volume| self.holder(*volume) == id)
            .collect()
    }

    /// The node that holds most volumes, as an index of `nodes`.
    fn busiest(&self) -> usize {
        let held = |index: &usize| self.holds(self.nodes[*index].id).len();
        (0..self.nodes.len()).max_by_key(held).expect("nodes")
    }

    /// The time from `since` to the first answer of another node than `not`.
    fn taken_after(&self, id: VolumeId, not: NodeId, since: BootTime) -> Option<Duration> {
        let served = self.served(id);
        let first = served.iter().find(|s| s.at > since && s.node != not);
        first.map(|first| first.at.since(since))
    }

    /// Waits until other nodes than `not` serve these volumes; returns the longest time.
    fn wait_taken(&self, volumes: &[VolumeId], not: NodeId, since: BootTime) -> Duration {
        self.wait("other nodes serve", || {
            let taken = |id: &VolumeId| self.taken_after(*id, not, since).is_some();
            volumes.iter().all(taken)
        });
        let times = volumes.iter().map(|id| self.taken_after(*id, not, since));
        let times: Vec<Duration> = times.map(|time| time.expect("taken")).collect();
        println!("{} volumes taken after {times:?}", volumes.len());
        times.into_iter().max().expect("volumes")
    }

    /// Longest time without an answer for the volume, since `since`.
    fn longest_gap(&self, id: VolumeId, since: BootTime) -> Duration {
        let served = self.served(id);
        let times: Vec<BootTime> = served
            .iter()
            .map(|s| s.at)
            .filter(|at| *at >= since)
            .collect();
        let gaps = times.windows(2).map(|pair| pair[1].since(pair[0]));
        gaps.max().unwrap_or_default()
    }

    /// The property: the answers of two epochs never interleave, and an epoch has one node.
    fn check(&self) {
        for id in &self.volumes {
            let served = self.served(*id);
            assert!(!served.is_empty());
            for pair in served.windows(2) {
                let is_same = pair[0].epoch == pair[1].epoch && pair[0].node == pair[1].node;
                let is_later = pair[0].epoch < pair[1].epoch;
                assert!(is_same || is_later, "two nodes serve {id:?}: {pair:?}");
            }
        }
    }
}
