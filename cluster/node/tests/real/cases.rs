//! Failures of nodes and of etcd.

use std::time::Duration;

use nacre_cluster_etcd::{Copies, Txn};
use nacre_cluster_node::clock;
use rustix::process::Signal;

use crate::fake::Served;
use crate::process::{Start, prefix};
use crate::{Lab, node};

const LEASE: Duration = Duration::from_secs(2);
/// A busy machine may take so long for what takes milliseconds: less than a lease.
pub(crate) const BUSY: Duration = Duration::from_millis(1200);

/// The guardian gives the lease of a killed process back: no node waits for its end.
#[test]
fn a_killed_holder_with_a_guardian() {
    let Some(mut lab) = Lab::start("a_killed_holder_with_a_guardian", 1, 6, true) else {
        return;
    };
    for _ in 0..3 {
        let victim = lab.busiest();
        let (id, held) = (lab.nodes[victim].id, lab.holds(lab.nodes[victim].id));
        assert!(!held.is_empty());
        let since = clock::now();
        lab.nodes[victim].kill();
        let longest = lab.wait_taken(&held, id, since);
        println!("killed with a guardian: {longest:?}");
        assert!(longest < BUSY, "{longest:?}");
        let how = Start {
            has_guardian: true,
            ..Start::node(id.0.as_u128())
        };
        lab.nodes[victim].restart(how);
        lab.settle();
    }
    lab.check();
}

/// Without a guardian, observers fence the node a lease after its last renewal.
#[test]
fn a_killed_holder_without_a_guardian() {
    let Some(mut lab) = Lab::start("a_killed_holder_without_a_guardian", 3, 6, false) else {
        return;
    };
    let victim = lab.busiest();
    let (id, held) = (lab.nodes[victim].id, lab.holds(lab.nodes[victim].id));
    let since = clock::now();
    lab.nodes[victim].kill();
    let longest = lab.wait_taken(&held, id, since);
    println!("killed without a guardian: {longest:?}");
    assert!(longest < LEASE + BUSY, "{longest:?}");
    // A process that starts on the same data directory takes part at once.
    lab.nodes[victim].restart(Start::node(id.0.as_u128()));
    lab.settle();
    lab.check();
}

/// A node that is killed and started at once finds its own lease, and replaces it.
#[test]
fn a_restart_finds_its_own_lease() {
    let Some(mut lab) = Lab::start("a_restart_finds_its_own_lease", 1, 3, false) else {
        return;
    };
    let victim = lab.busiest();
    let (id, held) = (lab.nodes[victim].id, lab.holds(lab.nodes[victim].id));
    let old = lab.node_status(id).lease.expect("a lease").incarnation;
    let since = clock::now();
    lab.nodes[victim].kill();
    lab.nodes[victim].restart(Start::node(id.0.as_u128()));
    lab.wait("a new incarnation", || {
        let lease = lab.node_status(id).lease;
        lease.is_some_and(|lease| lease.incarnation > old)
    });
    let took = clock::now().since(since);
    println!("its own lease replaced {took:?} after the kill");
    assert!(took < LEASE, "{took:?}");
    for volume in held {
        lab.wait("served again", || lab.is_served_now(volume));
    }
    lab.settle();
    lab.check();
}

/// A holder that is stopped answers nothing once another node has taken, and joins again when it
/// goes on. Meanwhile the history was compacted, so that its watches have lost changes.
#[test]
fn a_stopped_holder_goes_on() {
    let Some(lab) = Lab::start("a_stopped_holder_goes_on", 1, 6, true) else {
        return;
    };
    for _ in 0..2 {
        let victim = lab.busiest();
        let (id, held) = (lab.nodes[victim].id, lab.holds(lab.nodes[victim].id));
        let old = lab.node_status(id).lease.expect("a lease").incarnation;
        let since = clock::now();
        lab.nodes[victim].signal(Signal::STOP);
        let longest = lab.wait_taken(&held, id, since);
        println!("stopped: {longest:?}");
        assert!(longest < LEASE + BUSY, "{longest:?}");
        lab.runtime.block_on(async {
            let page = lab.client.list(&prefix().leases()).await.expect("a list");
            let compacted = lab.client.compact(page.revision).await;
            compacted.expect("compacted");
        });
        let went_on = clock::now();
        lab.nodes[victim].signal(Signal::CONT);
        lab.wait("a new incarnation", || {
            let lease = lab.node_status(id).lease;
            lease.is_some_and(|lease| lease.incarnation > old)
        });
        println!(
            "joined again {:?} after it went on",
            clock::now().since(went_on)
        );
        lab.settle();
        for volume in held {
            let late = |s: &&Served| s.at > went_on && s.node == id;
            let served = lab.served(volume);
            let taken = served.iter().find(|s| s.at > since && s.node != id);
            let epoch = taken.expect("taken").epoch;
            // It may hold the volume again, but in a later epoch.
            assert!(served.iter().filter(late).all(|s| s.epoch > epoch));
        }
        lab.check();
    }
}

/// Without etcd the holders go on by assent, and no node takes. When etcd is back, no node is
/// fenced for its silence.
#[test]
fn etcd_is_away() {
    let Some(mut lab) = Lab::start("etcd_is_away", 1, 6, true) else {
        return;
    };
    let last = |id| *lab.served(id).last().expect("served");
    let before: Vec<Served> = lab.volumes.iter().map(|id| last(*id)).collect();
    let since = clock::now();
    lab.etcd.kill(0);
    std::thread::sleep(3 * LEASE);
    for (id, before) in lab.volumes.iter().zip(&before) {
        let last = *lab.served(*id).last().expect("served");
        assert_eq!((last.node, last.epoch), (before.node, before.epoch));
        let gap = lab.longest_gap(*id, since);
        println!("longest gap without etcd: {gap:?}");
        assert!(gap < LEASE, "{gap:?}");
        assert!(lab.is_served_now(*id));
    }
    lab.etcd.run_all();
    std::thread::sleep(2 * LEASE);
    lab.settle();
    for (id, before) in lab.volumes.iter().zip(&before) {
        let last = *lab.served(*id).last().expect("served");
        assert_eq!((last.node, last.epoch), (before.node, before.epoch));
    }
    lab.check();
}

/// An etcd without space refuses renewals and fences alike: holders go on by assent.
#[test]
fn etcd_is_full() {
    let quota = ["--quota-backend-bytes", "16777216"];
    let Some(lab) = Lab::without_nodes("etcd_is_full", 1, &quota) else {
        return;
    };
    let lab = lab.with_nodes(3, false);
    let last = |id| *lab.served(id).last().expect("served");
    let before: Vec<Served> = lab.volumes.iter().map(|id| last(*id)).collect();
    let refused = lab.runtime.block_on(async {
        for number in 0..100 {
            let txn = Txn::default().put(&format!("/fill/{number}"), vec![7; 1 << 20]);
            if let Err(error) = lab.client.transact(txn, Copies::One).await {
                return Some(error);
            }
        }
        None
    });
    assert_eq!(refused, Some(nacre_cluster_etcd::Error::Full));
    let since = clock::now();
    std::thread::sleep(3 * LEASE);
    for (id, before) in lab.volumes.iter().zip(&before) {
        let last = last(*id);
        assert_eq!((last.node, last.epoch), (before.node, before.epoch));
        let gap = lab.longest_gap(*id, since);
        println!("longest gap with a full etcd: {gap:?}");
        assert!(gap < LEASE, "{gap:?}");
    }
    let said = lab.nodes[0].said();
    assert!(
        said.contains("is_good: false") && said.contains("no space"),
        "{said}"
    );
    lab.check();
}

/// The leader of etcd dies: the lease bridges the election, or assent does.
#[test]
fn a_member_of_etcd_dies() {
    let Some(mut lab) = Lab::start("a_member_of_etcd_dies", 3, 3, false) else {
        return;
    };
    let since = clock::now();
    let status = lab.status();
    let leader = status.etcd.iter().position(|member| {
        let status = member.status.as_ref();
        status.is_ok_and(|status| status.is_leader)
    });
    lab.etcd.kill(leader.expect("a leader"));
    std::thread::sleep(2 * LEASE);
    lab.settle();
    for id in &lab.volumes {
        let gap = lab.longest_gap(*id, since);
        println!("longest gap without the leader: {gap:?}");
        assert!(gap < LEASE, "{gap:?}");
        let epochs: Vec<u64> = lab.served(*id).iter().map(|s| s.epoch).collect();
        assert_eq!(epochs.first(), epochs.last(), "no take");
    }
    lab.check();
}

/// A copied data directory on another machine, and on a clone with the same machine's id.
#[test]
fn two_nodes_with_one_id() {
    let Some(mut lab) = Lab::start("two_nodes_with_one_id", 1, 3, false) else {
        return;
    };
    lab.run(Start {
        machine: 99,
        is_copy: true,
        ..Start::node(1)
    });
    let copy = lab.nodes.len() - 1;
    lab.wait("the copy stays out", || {
        let said = lab.nodes[copy].said();
        said.starts_with("Out") && said.contains("InUse")
    });
    println!("{}", lab.nodes[copy].said());
    assert!(lab.node_status(node(1)).lease.is_some());
    lab.nodes.pop();
    lab.settle();
    // A clone takes the lease for that of an earlier process, and fences the first one. That one
    // joins again, and the clone sees that it renews.
    lab.run(Start {
        is_copy: true,
        ..Start::node(1)
    });
    lab.wait("the clone stays out", || {
        let said = lab.nodes[copy].said();
        said.starts_with("Out") && said.contains("InUse")
    });
    println!("{}", lab.nodes[copy].said());
    lab.nodes.pop();
    lab.settle();
    lab.check();
}

/// A node that leaves hands its volumes over first.
#[test]
fn a_node_leaves() {
    let Some(mut lab) = Lab::start("a_node_leaves", 1, 6, true) else {
        return;
    };
    let victim = lab.busiest();
    let (id, held) = (lab.nodes[victim].id, lab.holds(lab.nodes[victim].id));
    let since = clock::now();
    lab.nodes[victim].leave();
    println!("left after {:?}", clock::now().since(since));
    assert_eq!(lab.node_status(id).lease, None, "the lease is given back");
    lab.wait_taken(&held, id, since);
    for volume in &held {
        let gap = lab.longest_gap(*volume, since);
        println!("longest gap of a hand-over: {gap:?}");
        assert!(gap < BUSY, "{gap:?}");
    }
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
    for number in crate::NODES {
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
