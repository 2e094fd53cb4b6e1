//! Failures of nodes and of etcd.

use nacre_cluster_core::ids::MAX_NODES;
use nacre_cluster_etcd::{Copies, Endpoints, Txn};
use nacre_cluster_etcd_members::administer;
use nacre_cluster_node::clock;
use rustix::process::Signal;

use crate::process::{Process, Start, prefix};
use crate::{BAR, LEASE, Lab, NODES, node};

/// Observers fence a killed node a lease after its last renewal.
#[test]
fn a_killed_holder() {
    let Some(mut lab) = Lab::start("a_killed_holder", 3, 6) else {
        return;
    };
    lab.measure_with_etcd("killed", LEASE + BAR, Lab::fail_over);
    lab.check();
}

/// A node that is killed and started at once finds its own lease, and replaces it.
#[test]
fn a_restart_finds_its_own_lease() {
    let Some(mut lab) = Lab::start("a_restart_finds_its_own_lease", 1, 3) else {
        return;
    };
    lab.measure_with_etcd(
        "its own lease replaced after the kill",
        LEASE,
        Lab::replace_lease,
    );
    lab.check();
}

/// A holder that is stopped answers nothing once another node has taken, and joins again when it
/// goes on. Meanwhile the history was compacted, so that its watches have lost changes.
#[test]
fn a_stopped_holder_joins_again_when_it_continues() {
    let Some(mut lab) = Lab::start("a_stopped_holder_joins_again_when_it_continues", 1, 6) else {
        return;
    };
    for _ in 0..2 {
        lab.measure_with_etcd("stopped", LEASE + BAR, |lab| {
            let victim = lab.victim();
            let old = lab.incarnation(victim.id);
            let since = clock::now();
            lab.nodes[victim.index].signal(Signal::STOP);
            let taken = lab.wait_taken(&victim, since);
            lab.runtime.block_on(async {
                let page = lab.client.list(&prefix().leases()).await.expect("a list");
                let compacted = lab.client.compact(page.revision).await;
                compacted.expect("compacted");
            });
            let went_on = clock::now();
            lab.nodes[victim.index].signal(Signal::CONT);
            lab.wait_joined_again(victim.id, old);
            println!(
                "joined again {:?} after it went on",
                clock::now().since(went_on)
            );
            lab.settle();
            for volume in victim.held {
                let taken = lab.taken(volume, victim.id, since).expect("taken");
                // The victim may hold the volume again, but in a later epoch.
                let served = lab.served(volume).into_iter();
                let mut late = served.filter(|s| s.at > went_on && s.node == victim.id);
                assert!(late.all(|s| s.epoch > taken.epoch));
            }
            taken
        });
        lab.check();
    }
}

/// Without etcd the holders go on by confirmation, and no node takes. When etcd is back, no node is
/// fenced for its silence.
#[test]
fn etcd_is_away() {
    let Some(mut lab) = Lab::start("etcd_is_away", 1, 6) else {
        return;
    };
    lab.measure("longest gap without etcd", BAR, |lab| {
        let before = lab.last_answers();
        let since = clock::now();
        lab.etcd.kill(0);
        std::thread::sleep(3 * LEASE);
        lab.check_no_take(&before);
        let gap = lab.longest_gap(&lab.volumes, since);
        let (away, back) = (noted(lab, "StoreAway"), noted(lab, "StoreBack"));
        assert!(away.iter().zip(&back).all(|(away, back)| *away == back + 1));
        lab.etcd.run_all();
        std::thread::sleep(2 * LEASE);
        lab.settle();
        lab.check_no_take(&before);
        lab.wait("each node notes that etcd is back", || {
            noted(lab, "StoreBack") == away
        });
        gap
    });
    lab.check();
}

/// The events of this kind that each node has noted.
fn noted(lab: &Lab, kind: &str) -> Vec<usize> {
    let count = |process: &Process| {
        let said = process.said();
        said.lines().filter(|line| line.starts_with(kind)).count()
    };
    lab.nodes.iter().map(count).collect()
}

/// An etcd that lost its data is another one: nodes end their service, and write nothing to it.
#[test]
fn etcd_loses_its_data() {
    let Some(mut lab) = Lab::start("etcd_loses_its_data", 1, 3) else {
        return;
    };
    lab.etcd.kill(0);
    let lost = std::fs::remove_dir_all(lab.etcd.dir().join("m0"));
    lost.expect("removed");
    lab.etcd.run_all();
    lab.wait("the nodes miss their cluster", || {
        let misses = |said: String| said.starts_with("Joining") && said.contains("LostCluster");
        lab.nodes.iter().all(|process| misses(process.said()))
    });
    let leases = lab.runtime.block_on(lab.client.list(&prefix().leases()));
    assert_eq!(leases.expect("a list").keys, []);
    lab.check();
}

/// An etcd without space refuses renewals and fences alike: holders go on by confirmation. Once an
/// operator has made space, leases are good again, and no volume has moved.
#[test]
fn etcd_is_full() {
    let quota = ["--quota-backend-bytes", "16777216"];
    let Some(lab) = Lab::without_nodes("etcd_is_full", 1, &quota) else {
        return;
    };
    let mut lab = lab.with_nodes(3);
    let before = lab.last_answers();
    let fill = |number: usize| format!("/fill/{number}");
    let (count, refused) = lab.runtime.block_on(async {
        for number in 0..100 {
            let txn = Txn::default().put(&fill(number), vec![7; 1 << 20]);
            if let Err(error) = lab.client.transact(txn, Copies::One).await {
                return (number, Some(error));
            }
        }
        (100, None)
    });
    assert_eq!(refused, Some(nacre_cluster_etcd::Error::Full));
    lab.measure("longest gap with a full etcd", BAR, |lab| {
        let since = clock::now();
        std::thread::sleep(3 * LEASE);
        lab.check_no_take(&before);
        lab.longest_gap(&lab.volumes, since)
    });
    let said = lab.nodes[0].said();
    let is_away = |line: &str| line.starts_with("StoreAway") && line.contains("no space");
    assert!(
        said.contains("is_good: false") && said.lines().any(is_away),
        "{said}"
    );
    lab.runtime.block_on(async {
        let txn = (0..count).fold(Txn::default(), |txn, number| txn.delete(&fill(number)));
        let deleted = lab.client.transact(txn, Copies::One).await;
        let compacted = lab.client.compact(deleted.expect("deleted").revision).await;
        compacted.expect("compacted");
    });
    let url = &lab.etcd.endpoints().urls[0];
    administer(url, "maintenance/defragment", "", "{}");
    let alarms = administer(url, "maintenance/alarm", "", r#"{"action":"GET"}"#);
    let (_, member) = alarms.split_once(r#""memberID":""#).expect("an alarm");
    let (member, _) = member.split_once('"').expect("its end");
    let disarm = format!(r#"{{"action":"DEACTIVATE","memberID":"{member}","alarm":"NOSPACE"}}"#);
    administer(url, "maintenance/alarm", "", &disarm);
    lab.wait("the leases are good again", || {
        let is_good = |said: String| said.contains("is_good: true");
        lab.nodes.iter().all(|process| is_good(process.said()))
    });
    std::thread::sleep(2 * LEASE);
    lab.settle();
    lab.check_no_take(&before);
    lab.check();
}

/// The leader of etcd dies: the lease bridges the election, or confirmation does.
#[test]
fn a_member_of_etcd_dies() {
    let Some(mut lab) = Lab::start("a_member_of_etcd_dies", 3, 3) else {
        return;
    };
    lab.measure("longest gap without the leader", BAR, |lab| {
        let before = lab.last_answers();
        let since = clock::now();
        let status = lab.status();
        let leader = status.etcd.iter().position(|member| {
            let status = member.status.as_ref();
            status.is_ok_and(|status| status.is_leader)
        });
        lab.etcd.kill(leader.expect("a leader"));
        std::thread::sleep(2 * LEASE);
        lab.settle();
        let gap = lab.longest_gap(&lab.volumes, since);
        lab.check_no_take(&before);
        lab.etcd.run_all();
        gap
    });
    lab.check();
}

/// A copied data directory on another machine, and on a clone with the same machine's id.
#[test]
fn two_nodes_with_one_id() {
    let Some(mut lab) = Lab::start("two_nodes_with_one_id", 1, 3) else {
        return;
    };
    let copy = lab.nodes.len();
    // A clone with the same machine's id takes the lease for that of an earlier process, and
    // fences the first process. The first process joins again, and the clone sees its renewals.
    for machine in [99, 1] {
        lab.run(Start {
            machine,
            is_copy: true,
            ..Start::node(1)
        });
        lab.wait("the copy stays out", || {
            let said = lab.nodes[copy].said();
            said.starts_with("Out") && said.contains("InUse")
        });
        let said = lab.nodes[copy].said();
        let is_event = |line: &str| {
            let text = "renews the lease of this node's id";
            line.starts_with("NodeExcluded") && line.contains(text)
        };
        assert!(said.lines().any(is_event), "{said}");
        println!("{}", lab.nodes[copy].said());
        lab.nodes.pop();
        lab.settle();
        assert!(lab.incarnation(node(1)).is_some());
    }
    lab.check();
}

/// Goal: a cluster has at most 128 nodes, also when two join at the same time as the last one. The
/// other one gives its lease back, stays out and says why; a node of the cluster returns.
/// Method: descriptions of other nodes, and nodes that start at once.
#[test]
fn a_cluster_has_a_limit_of_nodes() {
    let Some(mut lab) = Lab::without_nodes("a_cluster_has_a_limit_of_nodes", 1, &[]) else {
        return;
    };
    lab.init();
    let others: Vec<u128> = (1000..1000 + MAX_NODES as u128 - 1).collect();
    for batch in others.chunks(100) {
        let txn = batch.iter().fold(Txn::default(), |txn, number| {
            txn.put(
                &prefix().node(node(*number)),
                br#"{ "v": 1, "name": "" }"#.to_vec(),
            )
        });
        let made = lab.runtime.block_on(lab.client.transact(txn, Copies::One));
        assert!(made.expect("an answer").is_made);
    }
    for number in NODES {
        lab.run(Start::node(number));
    }
    let is_in = |process: &Process| process.said().starts_with("In");
    let is_out = |process: &Process| {
        let said = process.said();
        let is_event =
            |line: &str| line.starts_with("NodeExcluded") && line.contains("has 128 nodes");
        said.starts_with("Out") && said.contains("TooManyNodes") && said.lines().any(is_event)
    };
    let count = |lab: &Lab, is_so: &dyn Fn(&Process) -> bool| {
        lab.nodes.iter().filter(|process| is_so(process)).count()
    };
    lab.wait("one is in, and two stay out", || {
        count(&lab, &is_in) == 1 && count(&lab, &is_out) == 2
    });
    let described = |lab: &Lab| {
        lab.status()
            .nodes
            .iter()
            .filter(|one| one.key.is_some())
            .count()
    };
    lab.wait("one is described", || described(&lab) == MAX_NODES);
    lab.wait("the others have no lease", || {
        let status = lab.status();
        status
            .nodes
            .iter()
            .filter(|one| one.lease.is_some())
            .count()
            == 1
    });
    // A node of the full cluster returns, and one that was out gets the place of a removed one.
    let inside = lab.nodes.iter().position(is_in).expect("one");
    lab.nodes[inside].kill();
    lab.nodes[inside].restart();
    lab.wait("it is in again", || is_in(&lab.nodes[inside]));
    let removed = lab.runtime.block_on(lab.operator.remove(node(1000)));
    removed.expect("removed");
    let outside = (inside + 1) % NODES.len();
    lab.nodes[outside].kill();
    lab.nodes[outside].restart();
    lab.wait("it has the place", || is_in(&lab.nodes[outside]));
    lab.wait("it is described", || described(&lab) == MAX_NODES);
}

/// A node that leaves hands its volumes over first.
#[test]
fn a_node_leaves() {
    let Some(mut lab) = Lab::start("a_node_leaves", 1, 6) else {
        return;
    };
    lab.measure_with_etcd("longest gap of a handover", BAR, |lab| {
        let victim = lab.victim();
        let since = clock::now();
        lab.nodes[victim.index].leave();
        println!("left after {:?}", clock::now().since(since));
        assert_eq!(lab.incarnation(victim.id), None, "the lease is given back");
        lab.wait_taken(&victim, since);
        let gap = lab.longest_gap(&victim.held, since);
        lab.restart(&victim);
        gap
    });
    lab.check();
}

/// Nodes that start before etcd wait, and say why.
#[test]
fn a_start_without_etcd() {
    let Some(mut lab) = Lab::without_nodes("a_start_without_etcd", 1, &[]) else {
        return;
    };
    lab.init();
    lab.create(3);
    lab.etcd.kill(0);
    for number in NODES {
        lab.run(Start::node(number));
    }
    lab.wait("they say why they wait", || {
        let waits = |said: String| said.starts_with("Joining") && said.contains("Unanswered");
        lab.nodes.iter().all(|process| waits(process.said()))
    });
    lab.etcd.run_all();
    lab.settle();
    lab.check();
}

/// Nodes with certificates take over from a killed one that is started again, and return after a
/// restart of etcd. A node with a certificate of another authority stays out, and says why.
#[test]
fn certificates() {
    let Some((lab, certificates)) = Lab::with_tls("certificates") else {
        return;
    };
    let mut lab = lab.with_nodes(3);
    lab.measure_with_etcd(
        "its own lease replaced, with TLS",
        LEASE,
        Lab::replace_lease,
    );
    let endpoints = Endpoints {
        tls: Some(certificates.tls("other")),
        ..lab.etcd.endpoints()
    };
    let stranger = Process::start(lab.dir(), &endpoints, Start::node(4));
    lab.wait("the stranger says why it waits", || {
        let said = stranger.said().to_lowercase();
        said.starts_with("joining") && said.contains("certificate")
    });
    let stored = lab
        .runtime
        .block_on(lab.client.get(&prefix().lease(node(4))));
    assert_eq!(stored, Ok(None));
    drop(stranger);
    // A restart moves no volume.
    lab.settle();
    let before = lab.last_answers();
    lab.etcd.kill(0);
    std::thread::sleep(LEASE);
    lab.etcd.run_all();
    std::thread::sleep(2 * LEASE);
    lab.settle();
    lab.check_no_take(&before);
    lab.check();
}
