//! Goal: a cluster of the designed size works: leases are renewed in time, the volumes of a lost
//! node are taken soon, and neither etcd nor the nodes need much of a processor. Method: many nodes
//! in one process on a real etcd, each with an engine that opens a volume at once.
//!
//! `NACRE_TEST_SCALE=100,10000`: so many nodes and volumes, with bars. They are all on one machine,
//! which should have a processor for every ten nodes. Otherwise few of both.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use arrayvec::ArrayVec;
use nacre_cluster_core::ids::MAX_REPLICAS;
use nacre_cluster_core::volume::HoldingState;
use nacre_cluster_core::{ExportId, Incarnation, NodeId, ReplicaId, VolumeId};
use nacre_cluster_etcd::{Client, Copies, Prefix, Txn};
use nacre_cluster_etcd_members::{Members, program};
use nacre_cluster_node::serving::{Answer, VolumeRole};
use nacre_cluster_node::{
    Cluster, Description, Export, Link, Me, Node, NodeKey, NodeState, Operator, Publication,
    Serving,
};
use serde_json::json;
use uuid::Uuid;

const LEASE: Duration = Duration::from_secs(2);
/// Nodes with a replica of a volume.
const REPLICAS: u64 = 3;
const PATIENCE: Duration = Duration::from_secs(900);
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

fn start(etcd: &Members, prefix: &Prefix, number: u64) -> Node {
    let me = Me {
        id: node(number),
        machine: Some(node(number).0),
        process: Uuid::from_u64_pair(4, number),
        cluster: None,
        description: Description {
            name: format!("n{number}"),
            ..Description::default()
        },
    };
    let started = Node::start(&etcd.endpoints(), prefix.clone(), me, |link| {
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

#[test]
fn a_cluster_of_the_designed_size() {
    let Some(program) = program("a_cluster_of_the_designed_size") else {
        return;
    };
    let scale = scale();
    let (nodes, volumes) = scale.unwrap_or((8, 200));
    let etcd = Members::start(program, 1, &[]);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    let prefix = Prefix::new("scale").expect("a name");
    let client = {
        let _entered = runtime.enter();
        std::sync::Arc::new(Client::new(&etcd.endpoints()).expect("endpoints"))
    };
    runtime.block_on(async {
        let cluster = Cluster::new("scale", LEASE).expect("valid");
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
    let running: Vec<Node> = (0..nodes).map(|at| start(&etcd, &prefix, at)).collect();
    let until = |what: &str, is_so: &dyn Fn() -> bool| {
        let began = Instant::now();
        while !is_so() {
            assert!(began.elapsed() < PATIENCE, "never: {what}");
            std::thread::sleep(Duration::from_millis(10));
        }
        began.elapsed()
    };
    let all = volumes as usize;
    let sum = |of: &[Node]| of.iter().map(held).sum::<usize>();
    let taken = until("all volumes are held", &|| sum(&running) == all);
    std::thread::sleep(LEASE);

    // Quiet.
    let quiet = Duration::from_secs(if scale.is_some() { 10 } else { 4 });
    let mine = std::process::id();
    let before = (used(etcd.pid(0)), used(mine), Instant::now());
    let renewals = || running.iter().map(Node::renewals).sum::<u64>();
    let renewed = renewals();
    let mut left = Vec::new();
    while before.2.elapsed() < quiet {
        left.extend(running.iter().map(Node::lease_left));
        std::thread::sleep(Duration::from_millis(20));
    }
    let took = before.2.elapsed();
    let (by_etcd, by_nodes) = (used(etcd.pid(0)) - before.0, used(mine) - before.1);
    let renewed = renewals() - renewed;
    left.sort();
    // A renewal is sent each fifth of the lease, and a node counts on 19 of 20 parts of the lease
    // from the sending on.
    let late = |left: Duration| (LEASE * 15 / 20).saturating_sub(left);
    let (worst, percentile) = (late(left[0]), late(left[left.len() / 100]));
    let share = |used: Duration| used.as_secs_f64() / took.as_secs_f64();

    // A loss.
    let lost = &running[0];
    let NodeState::In { incarnation, .. } = lost.state() else {
        panic!("it has not joined: {:?}", lost.state());
    };
    let its = held(lost);
    let operator = {
        let _entered = runtime.enter();
        Operator::new(std::sync::Arc::clone(&client), prefix.clone())
    };
    let fenced = runtime.block_on(operator.fence_off(node(0)));
    assert_eq!(fenced, Ok(incarnation));
    let moved = until("other nodes hold the volumes of the lost node", &|| {
        let is_over =
            !matches!(lost.state(), NodeState::In { incarnation: of, .. } if of == incarnation);
        is_over && sum(&running) == all
    });
    let is_good = |node: &&Node| matches!(node.state(), NodeState::In { is_good: true, .. });
    let good = running.iter().skip(1).filter(is_good).count();
    println!(
        "{nodes} nodes, {volumes} volumes: all taken after {taken:.2?}; {:.0} renewals/s, late by {percentile:.0?} \
         (99 of 100), {worst:.0?} (worst); etcd {:.3} of a processor, a node {:.4}; {its} volumes of a lost node \
         taken after {moved:.2?}",
        renewed as f64 / took.as_secs_f64(),
        share(by_etcd),
        share(by_nodes) / nodes as f64,
    );
    assert_eq!(good as u64, nodes - 1, "all but the lost one");
    assert!(
        renewed as f64 > nodes as f64 * took.as_secs_f64() * 2.0,
        "{renewed} renewals"
    );
    if scale.is_some() {
        assert!(percentile < Duration::from_millis(100), "{percentile:?}");
        assert!(moved < Duration::from_secs(1), "{moved:?}");
        assert!(share(by_etcd) < 0.5, "{}", share(by_etcd));
    }
}
