//! Goal: of three nodes on a real etcd, never two serve one volume at one time, and a volume does
//! not stay without a holder. Method: each node is a process with a stand-in for the engine, which
//! writes the time of each answer. Without etcd, the tests are skipped aloud.

mod backup;
mod cases;
mod fake;
mod machine;
mod operators;
mod process;

use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nacre_cluster_core::{BootTime, Incarnation, NodeId, VolumeId};
use nacre_cluster_etcd::{Client, Copies, Txn};
use nacre_cluster_etcd_members::{Certificates, Members, program};
use nacre_cluster_node::{Cluster, NodeStatus, Operator, Status, clock};
use parking_lot::{Mutex, MutexGuard};
use serde_json::{Value, json};
use uuid::Uuid;

use fake::{Served, served};
use machine::{Machine, ROUNDS, Span, Verdict, longest_took, verdict};
use process::{Process, Start, prefix};

/// Longest wait of a test for a state.
const PATIENCE: Duration = Duration::from_secs(20);
const NODES: [u128; 3] = [1, 2, 3];
/// Longest time without an answer, and from a fence to the answer of the next holder.
const BAR: Duration = Duration::from_millis(500);
const LEASE: Duration = Duration::from_secs(2);

fn node(number: u128) -> NodeId {
    NodeId(Uuid::from_u128(number))
}

fn volume(number: u128) -> VolumeId {
    VolumeId(Uuid::from_u128(100 + number))
}

/// The node that a test kills, stops or drains, and the volumes that it holds before.
struct Victim {
    /// Its place in `Lab::nodes`.
    index: usize,
    id: NodeId,
    held: Vec<VolumeId>,
}

/// A cluster of etcd members and nodes.
struct Lab {
    machine: Machine,
    nodes: Vec<Process>,
    etcd: Members,
    dir: tempfile::TempDir,
    client: Arc<Client>,
    operator: Operator,
    runtime: tokio::runtime::Runtime,
    volumes: Vec<VolumeId>,
    /// Tests run one at a time, because each of them measures times.
    _turn: MutexGuard<'static, ()>,
}

static TURN: Mutex<()> = Mutex::new(());

impl Lab {
    /// `None`: there is no etcd, as the output says.
    fn start(test: &str, members: usize, volumes: u128) -> Option<Self> {
        let lab = Self::without_nodes(test, members, &[])?;
        Some(lab.with_nodes(volumes))
    }

    fn with_nodes(mut self, volumes: u128) -> Self {
        let lab = &mut self;
        lab.init();
        lab.create(volumes);
        for number in NODES {
            lab.run(Start::node(number));
        }
        lab.settle();
        self
    }

    fn without_nodes(test: &str, members: usize, arguments: &[&str]) -> Option<Self> {
        let program = program(test)?;
        let turn = TURN.lock();
        Some(Self::on(Members::start(program, members, arguments), turn))
    }

    /// An etcd that demands certificates.
    fn with_tls(test: &str) -> Option<(Self, Certificates)> {
        let program = program(test)?;
        let turn = TURN.lock();
        let (etcd, certificates) = Members::start_with_tls(test, program)?;
        Some((Self::on(etcd, turn), certificates))
    }

    fn on(etcd: Members, turn: MutexGuard<'static, ()>) -> Self {
        let mut builder = tokio::runtime::Builder::new_current_thread();
        let runtime = builder.enable_all().build();
        let runtime = runtime.expect("a runtime");
        let client = {
            let _entered = runtime.enter();
            Arc::new(Client::new(&etcd.endpoints()).expect("endpoints"))
        };
        let dir = tempfile::tempdir().expect("a folder");
        Self {
            machine: Machine::observe(dir.path()),
            nodes: Vec::new(),
            operator: Operator::new(Arc::clone(&client), prefix()),
            etcd,
            dir,
            client,
            runtime,
            volumes: Vec::new(),
            _turn: turn,
        }
    }

    fn init(&self) {
        let cluster = Cluster::new("lab", LEASE).expect("valid");
        let made = self.runtime.block_on(cluster.init(&self.client, &prefix()));
        made.expect("a new cluster");
    }

    /// Creates volumes with a replica on each node.
    fn create(&mut self, count: u128) {
        for number in 0..count {
            let id = volume(number);
            let replica = |node: u128| {
                json!({
                    "id": Uuid::from_u128(1000 * (number + 1) + node),
                    "node": Uuid::from_u128(node),
                    "slot": node, "device": "d", "state": { "state": "in_sync" },
                })
            };
            let record = json!({
                "v": 1, "id": id.0, "name": format!("v{number}"), "epoch": 0, "serving": 0,
                "block_size": 4096, "blocks": 1024, "region_shift": 22, "revision": 0, "holder": null, "later": "kept",
                "members": NODES.map(replica),
            });
            let key = prefix().core_volume(id);
            let slots =
                NODES.map(|node| (Uuid::from_u128(node).to_string(), Value::from(node as u8)));
            let slots = serde_json::Map::<String, Value>::from_iter(slots);
            let publication = json!({ "v": 1, "nqn": "nqn.test", "slots": slots }).to_string();
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

    /// Waits until all volumes are served, with all replicas.
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

    /// The node that holds most volumes.
    fn victim(&self) -> Victim {
        let held = |index: &usize| self.holds(self.nodes[*index].id).len();
        let index = (0..self.nodes.len()).max_by_key(held).expect("nodes");
        let id = self.nodes[index].id;
        let held = self.holds(id);
        assert!(!held.is_empty());
        Victim { index, id, held }
    }

    /// Starts the victim again, on its data directory.
    fn restart(&mut self, victim: &Victim) {
        self.nodes[victim.index].restart();
        self.settle();
    }

    fn incarnation(&self, id: NodeId) -> Option<Incarnation> {
        self.node_status(id).lease.map(|lease| lease.incarnation)
    }

    fn wait_joined_again(&self, id: NodeId, old: Option<Incarnation>) {
        assert!(old.is_some());
        self.wait("a new incarnation", || self.incarnation(id) > old);
    }

    /// The first answer of another node than the victim, after `since`.
    fn taken(&self, id: VolumeId, victim: NodeId, since: BootTime) -> Option<Served> {
        let served = self.served(id).into_iter();
        let mut others = served.filter(|s| s.at > since && s.node != victim);
        others.next()
    }

    /// Waits until other nodes serve the victim's volumes; returns the time until the last one is.
    fn wait_taken(&self, victim: &Victim, since: BootTime) -> Span {
        let taken = || {
            let held = victim.held.iter();
            let first = held.map(|id| Some(self.taken(*id, victim.id, since)?.at));
            first.collect::<Option<Vec<BootTime>>>()
        };
        self.wait("other nodes serve", || taken().is_some());
        let taken = taken().into_iter().flatten();
        Span {
            from: since,
            to: taken.max().expect("volumes"),
        }
    }

    /// Kills the node with most volumes, and starts it again once others serve them: a process that
    /// starts on the same data directory takes part at once. Returns the time of the takes.
    fn fail_over(&mut self) -> Span {
        let victim = self.victim();
        let since = clock::now();
        self.nodes[victim.index].kill();
        let taken = self.wait_taken(&victim, since);
        self.restart(&victim);
        taken
    }

    /// Kills the node with most volumes, and starts it again at once. Returns the time until it has
    /// replaced its lease.
    fn replace_lease(&mut self) -> Span {
        let victim = self.victim();
        let old = self.incarnation(victim.id);
        let from = clock::now();
        self.nodes[victim.index].kill();
        self.nodes[victim.index].restart();
        self.wait_joined_again(victim.id, old);
        let to = clock::now();
        self.settle();
        Span { from, to }
    }

    /// The longest time without an answer for one of the volumes, from `since` until now.
    fn longest_gap(&self, volumes: &[VolumeId], since: BootTime) -> Span {
        let now = clock::now();
        let gaps = volumes.iter().map(|id| {
            let served = self.served(*id).into_iter().map(|s| s.at);
            let served = served.filter(|at| (since..now).contains(at));
            let times = [since].into_iter().chain(served).chain([now]);
            let times: Vec<BootTime> = times.collect();
            let spans = times.windows(2).map(|pair| Span {
                from: pair[0],
                to: pair[1],
            });
            spans.max_by_key(|span| span.length()).expect("a span")
        });
        gaps.max_by_key(|span| span.length()).expect("volumes")
    }

    /// Holds the time of `round`, less the machine's longest stall, to the bar. A late round with a
    /// long stall is repeated, except the last one.
    fn measure(&mut self, what: &str, bar: Duration, round: impl FnMut(&mut Self) -> Span) {
        self.hold(what, bar, round, |_| Duration::ZERO);
    }

    /// As [`Lab::measure`], for a time that depends on answers of etcd: its stalls count, too.
    fn measure_with_etcd(
        &mut self,
        what: &str,
        bar: Duration,
        round: impl FnMut(&mut Self) -> Span,
    ) {
        self.hold(what, bar, round, longest_took);
    }

    fn hold(
        &mut self,
        what: &str,
        bar: Duration,
        mut round: impl FnMut(&mut Self) -> Span,
        stall_of_etcd: impl Fn(&str) -> Duration,
    ) {
        for number in 1..=ROUNDS {
            let before = self.log_of_etcd().len();
            let span = round(self);
            let log = self.log_of_etcd();
            let log = log.get(before..).unwrap_or_default();
            let stall = self.machine.longest_stall(span).max(stall_of_etcd(log));
            let length = span.length();
            let found = format!("{what}: {length:?}, bar {bar:?}, stall {stall:?}");
            println!("{found}");
            match verdict(length, bar, stall) {
                Verdict::Met => return,
                Verdict::Void if number < ROUNDS => {
                    // The harness captures only the print macros.
                    let _ = writeln!(std::io::stderr().lock(), "REPEATED: {found}");
                }
                Verdict::Void | Verdict::Missed => {
                    let said: Vec<String> = self.nodes.iter().map(Process::said).collect();
                    panic!("{found}, round {number}\n{}", said.join("\n"));
                }
            }
        }
    }

    /// The log of etcd's first member.
    fn log_of_etcd(&self) -> String {
        std::fs::read_to_string(self.etcd.dir().join("m0.log")).unwrap_or_default()
    }

    /// The last answer for each volume.
    fn last_answers(&self) -> Vec<Served> {
        let last = |id: &VolumeId| *self.served(*id).last().expect("served");
        self.volumes.iter().map(last).collect()
    }

    /// No volume has another holder or epoch than `before`.
    fn check_no_take(&self, before: &[Served]) {
        let holders = |answers: &[Served]| -> Vec<(NodeId, u64)> {
            answers.iter().map(|s| (s.node, s.epoch)).collect()
        };
        let said: Vec<String> = self.nodes.iter().map(Process::said).collect();
        let said = said.join("\n");
        assert_eq!(holders(&self.last_answers()), holders(before), "{said}");
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
