//! Goal: a cluster of the designed size works: leases are renewed in time, the volumes of a lost
//! node are taken soon, and neither etcd nor the nodes need much of a processor. Method: many nodes
//! in one process on a real etcd, each with an engine that opens a volume at once.
//!
//! `cargo xtask cluster --scale` sets `NACRE_TEST_SCALE=100,10000`: so many nodes and volumes, with
//! bars. They are all on one machine, which should have a processor for every ten nodes. Without
//! the variable few of both, and no bars.
//!
//! One node is a process of its own, which is killed: the others see its lease end, fence it, and
//! take its volumes.

use std::collections::BTreeMap;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use arrayvec::ArrayVec;
use nacre_cluster_core::ids::MAX_REPLICAS;
use nacre_cluster_core::volume::HoldingState;
use nacre_cluster_core::{ExportId, Incarnation, NodeId, ReplicaId, VolumeId};
use nacre_cluster_etcd::{Client, Copies, Endpoints, Prefix, Txn};
use nacre_cluster_etcd_members::{Members, program};
use nacre_cluster_node::serving::{Answer, VolumeRole};
use nacre_cluster_node::{
    Cluster, Description, Export, Link, Me, Node, NodeKey, NodeState, Publication, Serving,
};
use serde_json::json;
use uuid::Uuid;

const LEASE: Duration = Duration::from_secs(2);
/// Nodes with a replica of a volume.
const REPLICAS: u64 = 3;
const PATIENCE: Duration = Duration::from_secs(900);
/// The name of the cluster, and of its keys.
const NAME: &str = "scale";
/// The process of the node that is killed gets the URL of etcd by this variable.
const LOST: &str = "NACRE_TEST_SCALE_LOST";
/// Time between two looks at the leases: the error of a measured renewal.
const LOOK: Duration = Duration::from_millis(2);
/// Bars of the designed size.
const RENEWAL_BAR: Duration = Duration::from_millis(100);
const TAKEN_BAR: Duration = Duration::from_secs(1);
const ETCD_BAR: f64 = 0.5;
/// Records that one transaction writes: etcd allows 128 operations.
const BATCH: u64 = 50;

/// An engine that opens and closes at once, and reaches all replicas.
struct AtOnce {
    link: Link,
    replicas: BTreeMap<VolumeId, ArrayVec<ReplicaId, MAX_REPLICAS>>,
}

impl Serving for AtOnce {
    fn reached(&mut self, volume: VolumeId) -> ArrayVec<ReplicaId, MAX_REPLICAS> {
        self.replicas.get(&volume).cloned().unwrap_or_default()
    }

    fn take(&mut self, volume: VolumeId, number: u64) {
        let sent = self.link.reports.send(volume, Answer::Opened { number });
        sent.expect("room for a report");
    }

    fn close(&mut self, volume: VolumeId, number: u64) {
        let sent = self.link.reports.send(volume, Answer::Drained { number });
        sent.expect("room for a report");
    }

    fn abort(&mut self, _: VolumeId) {}

    fn drop_all(&mut self, _: VolumeId) {}

    fn show(&mut self, volume: VolumeId, role: &VolumeRole) {
        let replicas = role.record.replicas.iter().map(|replica| replica.id);
        self.replicas.insert(volume, replicas.collect());
    }

    fn forget(&mut self, volume: VolumeId) {
        self.replicas.remove(&volume);
    }

    fn publish(&mut self, _: VolumeId, _: Option<&Publication>) {}

    fn nodes(&mut self, _: &BTreeMap<NodeId, NodeKey>, _: &BTreeMap<NodeId, Incarnation>) {}

    fn exports(&mut self, _: &BTreeMap<ExportId, Export>) {}
}

fn node(number: u64) -> NodeId {
    NodeId(Uuid::from_u64_pair(1, number))
}

/// The processor time that a process has used.
fn used(pid: u32) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("it runs");
    let after = stat.rsplit(')').next().expect("a name in brackets");
    let ticks = after.split_whitespace().skip(11).take(2);
    let ticks: u64 = ticks
        .map(|field| field.parse::<u64>().expect("a number"))
        .sum();
    Duration::from_millis(ticks * 10)
}

/// The record and the publication of volume `number`: on three of the nodes in turn.
fn put(txn: Txn, prefix: &Prefix, number: u64, nodes: u64) -> Txn {
    let id = Uuid::from_u64_pair(2, number);
    let places: Vec<Uuid> = (0..REPLICAS)
        .map(|at| node((number + at * (1 + number % 7)) % nodes).0)
        .collect();
    let replicas = places.iter().zip(0u64..).map(|(place, slot)| {
        json!({
            "id": Uuid::from_u64_pair(3, number * REPLICAS + slot), "node": place, "slot": slot,
            "device": Uuid::from_u64_pair(3, number * REPLICAS + slot),
            "state": { "state": "in_sync" }, "node_device": "pool0/lvol",
        })
    });
    let record = json!({
        "v": 1, "id": id, "name": format!("v{number}"), "epoch": 0, "serving": 0, "block_size": 4096,
        "blocks": 1 << 20, "region_shift": 22, "revision": 0, "holder": null,
        "members": replicas.collect::<Vec<_>>(),
    });
    let slots = places.iter().zip(0u8..);
    let slots: BTreeMap<Uuid, u8> = slots.map(|(place, slot)| (*place, slot)).collect();
    let publication = json!({ "v": 1, "nqn": format!("nqn.test:{id}"), "slots": slots });
    let [published, ..] = prefix.of_volume(id);
    txn.put(
        &prefix.core_volume(VolumeId(id)),
        record.to_string().into_bytes(),
    )
    .put(&published, publication.to_string().into_bytes())
}

fn start(etcd: &Endpoints, prefix: &Prefix, number: u64) -> Node {
    let me = Me {
        id: node(number),
        machine: Some(node(number).0),
        process: Uuid::from_u64_pair(4, number),
        cluster: None,
        description: Description {
            name: format!("n{number}"),
            ..Description::default()
        },
        is_balanced: false,
    };
    let started = Node::start(etcd, prefix.clone(), me, |link| {
        Box::new(AtOnce {
            link,
            replicas: BTreeMap::new(),
        })
    });
    started.expect("a thread")
}

/// The number of volumes that the node holds.
fn held(node: &Node) -> usize {
    let volumes = node.volumes().into_iter();
    volumes
        .filter(|(_, state)| *state == HoldingState::Holding)
        .count()
}

/// Nodes and volumes.
fn scale() -> Option<(u64, u64)> {
    let text = std::env::var("NACRE_TEST_SCALE").ok()?;
    let numbers = text.split_once(',');
    let numbers = numbers.and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
    Some(numbers.expect("NACRE_TEST_SCALE=NODES,VOLUMES"))
}

/// A node in a process of its own, number 0. It is killed when it is dropped.
struct LostNode(Child);

impl LostNode {
    fn start(etcd: &Endpoints) -> Self {
        let mut command = Command::new(std::env::current_exe().expect("this test"));
        command.args(["--exact", "a_cluster_of_the_designed_size", "--nocapture"]);
        command.env(LOST, &etcd.urls[0]).stdin(Stdio::null());
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        Self(child.expect("this test starts again"))
    }

    fn kill(&mut self) {
        self.0.kill().expect("our child");
        self.0.wait().expect("our child");
    }
}

impl Drop for LostNode {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The process of [`LostNode`]: runs until it is killed, or the test that started it is gone.
fn be_lost(url: String) {
    let endpoints = Endpoints {
        urls: vec![url],
        tls: None,
        credentials: None,
        deadline: Duration::from_secs(5),
    };
    let _node = start(&endpoints, &Prefix::new(NAME).expect("a name"), 0);
    std::thread::sleep(PATIENCE);
}

/// The times from the sending of renewals until etcd's answers, by the time that is left of each
/// lease. Just before an answer it is the least.
struct Renewals {
    /// The time left at the last look, and the least of this renewal.
    last: Vec<(Duration, Duration)>,
    took: Vec<Duration>,
}

impl Renewals {
    fn new(nodes: &[Node]) -> Self {
        let left = nodes.iter().map(|node| (node.lease_left(), LEASE));
        Self {
            last: left.collect(),
            took: Vec::new(),
        }
    }

    fn look(&mut self, nodes: &[Node]) {
        // A renewal is sent each fifth of the lease, and a node counts on 19 of 20 parts of the
        // lease from the sending on.
        let at_once = LEASE * 15 / 20;
        for (node, (last, least)) in nodes.iter().zip(&mut self.last) {
            let left = node.lease_left();
            if left > *last {
                if *least < LEASE {
                    self.took.push(at_once.saturating_sub(*least));
                }
                *least = LEASE;
            }
            *least = left.min(*least);
            *last = left;
        }
    }

    /// The 99th of a hundred, and the longest.
    fn ended(mut self) -> (Duration, Duration) {
        self.took.sort();
        let at = self.took.len() * 99 / 100;
        (self.took[at], *self.took.last().expect("renewals"))
    }
}

/// Prints a figure beside its bar. False: it is above.
fn row(what: &str, measured: &str, bar: &str, is_good: bool) -> bool {
    let verdict = if is_good { "ok" } else { "ABOVE" };
    println!("{what:<52} {measured:>10}   {bar:>8}   {verdict}");
    is_good
}

#[test]
fn a_cluster_of_the_designed_size() {
    if let Ok(url) = std::env::var(LOST) {
        return be_lost(url);
    }
    let Some(program) = program("a_cluster_of_the_designed_size") else {
        return;
    };
    let scale = scale();
    let (nodes, volumes) = scale.unwrap_or((8, 200));
    let etcd = Members::start(program, 1, &[]);
    let endpoints = etcd.endpoints();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    let prefix = Prefix::new(NAME).expect("a name");
    let client = {
        let _entered = runtime.enter();
        Arc::new(Client::new(&endpoints).expect("endpoints"))
    };
    runtime.block_on(async {
        let cluster = Cluster::new(NAME, LEASE).expect("valid");
        let made = cluster.init(&client, &prefix).await;
        made.expect("a new cluster");
        for first in (0..volumes).step_by(BATCH as usize) {
            let batch = first..(first + BATCH).min(volumes);
            let txn = batch.fold(Txn::default(), |txn, number| {
                put(txn, &prefix, number, nodes)
            });
            let made = client.transact(txn, Copies::One).await;
            assert!(made.expect("an answer").is_made);
        }
    });
    let mut lost = LostNode::start(&endpoints);
    let lease = prefix.lease(node(0));
    let has_lease = || {
        let found = runtime.block_on(client.get(&lease));
        found.map(|found| found.is_some()).ok()
    };
    let began = Instant::now();
    while has_lease() != Some(true) {
        assert!(began.elapsed() < PATIENCE, "the lost node has no lease");
        std::thread::sleep(LOOK);
    }
    let others: Vec<Node> = (1..nodes)
        .map(|at| start(&endpoints, &prefix, at))
        .collect();
    let until = |what: &str, is_so: &mut dyn FnMut() -> bool| {
        let began = Instant::now();
        while !is_so() {
            assert!(began.elapsed() < PATIENCE, "never: {what}");
            std::thread::sleep(Duration::from_millis(5));
        }
        began.elapsed()
    };
    // The lost node's part is in etcd only. `None`: etcd is busy.
    let its = || {
        let records = runtime.block_on(client.list(&prefix.volumes())).ok()?.keys;
        let held_by_it = |bytes: &[u8]| {
            let record: serde_json::Value = serde_json::from_slice(bytes).expect("a record");
            record["holder"] == json!(node(0).0)
        };
        Some(records.iter().filter(|kv| held_by_it(&kv.value)).count())
    };
    let all = volumes as usize;
    let sum = || others.iter().map(held).sum::<usize>();
    let (mut of_lost, mut looked) = (0, Instant::now());
    let taken = until("all volumes are held", &mut || {
        let of_others = sum();
        if of_others + of_lost < all && looked.elapsed() > Duration::from_secs(1) {
            of_lost = its().unwrap_or(of_lost);
            looked = Instant::now();
        }
        of_others + of_lost >= all
    });
    std::thread::sleep(LEASE);

    // Quiet.
    let quiet = Duration::from_secs(if scale.is_some() { 10 } else { 4 });
    let mine = std::process::id();
    let before = (used(etcd.pid(0)), used(mine), Instant::now());
    let count = || others.iter().map(Node::renewals).sum::<u64>();
    let renewed = count();
    let mut renewals = Renewals::new(&others);
    while before.2.elapsed() < quiet {
        renewals.look(&others);
        std::thread::sleep(LOOK);
    }
    let took = before.2.elapsed();
    let (by_etcd, by_nodes) = (used(etcd.pid(0)) - before.0, used(mine) - before.1);
    let renewed = count() - renewed;
    let (percentile, worst) = renewals.ended();
    let share = |used: Duration| used.as_secs_f64() / took.as_secs_f64();

    // A loss.
    of_lost = its().expect("an answer");
    assert_eq!(has_lease(), Some(true), "of the node that is lost");
    lost.kill();
    let fenced = until("the lost node is fenced", &mut || {
        has_lease() == Some(false)
    });
    let moved = until("other nodes hold the volumes of the lost node", &mut || {
        sum() == all
    });
    let is_good = |node: &&Node| matches!(node.state(), NodeState::In { is_good: true, .. });
    let good = others.iter().filter(is_good).count();
    let load = std::fs::read_to_string("/proc/loadavg").expect("the load");
    let load = load.split(' ').next().unwrap_or_default();
    let processors = std::thread::available_parallelism().map_or(0, usize::from);
    println!(
        "{nodes} nodes, {volumes} volumes of {REPLICAS} replicas, one etcd; load {load} on {processors} processors"
    );
    println!("{:<52} {:>10}   {:>8}", "", "measured", "bar");
    let bars = [
        row(
            "a renewal, 99 of 100",
            &format!("{percentile:.0?}"),
            &format!("{RENEWAL_BAR:.0?}"),
            percentile < RENEWAL_BAR,
        ),
        row(
            &format!("{of_lost} volumes of a dead node, taken after its fence"),
            &format!("{moved:.2?}"),
            &format!("{TAKEN_BAR:.0?}"),
            moved < TAKEN_BAR,
        ),
        row(
            "processors of etcd",
            &format!("{:.3}", share(by_etcd)),
            &ETCD_BAR.to_string(),
            share(by_etcd) < ETCD_BAR,
        ),
    ];
    println!(
        "all taken at the start after {taken:.2?}; {:.0} renewals/s, the longest {worst:.0?}; fenced {fenced:.2?} \
         after the death; a node uses {:.4} processors",
        renewed as f64 / took.as_secs_f64(),
        share(by_nodes) / (nodes - 1) as f64,
    );
    assert_eq!(good as u64, nodes - 1, "all but the lost one");
    assert!(of_lost > 0, "the lost node had volumes");
    assert!(
        renewed as f64 > (nodes - 1) as f64 * took.as_secs_f64() * 2.0,
        "{renewed} renewals"
    );
    // All at once: one after the other, each would hand its volumes to the next.
    let leaving = others
        .into_iter()
        .map(|node| std::thread::spawn(|| drop(node)));
    for left in leaving.collect::<Vec<_>>() {
        left.join().expect("it leaves");
    }
    if scale.is_some() {
        assert_eq!(bars, [true; 3], "the bars, in the order of the table");
    }
}
