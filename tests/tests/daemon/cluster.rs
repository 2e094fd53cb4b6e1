//! Three daemons as nodes of a cluster: the node that serves a volume is lost, paused, asked to
//! hand over, and stopped, and etcd is lost.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use nacre_nvmf_wire::StatusCode;
use nacre_nvmf_wire::commands::reservation::{PersistChange, RegisterAction, ReservationType};
use nacre_random::Random;
use nacre_tests::{at_length, seed};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::ledger::BLOCK;
use crate::load::Load;
use crate::nodes::{Cluster, MIB, NAMES, PATIENCE, SIZE, host};
use crate::reservations::Host;
use crate::volumes::patient;

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
            cluster.until_moved(holder);
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
    let Some(mut cluster) = Cluster::start(NAME, &NAMES) else {
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
/// end when it is unpublished. A node whose lease is in doubt answers nothing from them. Method:
/// the volume moves by a killed node and by an operator; then etcd is killed.
#[test]
fn reservations_move_with_the_volume() {
    let Some(mut cluster) = Cluster::start("reservations_move_with_the_volume", &NAMES) else {
        return;
    };
    let nqn = cluster.create(false);
    let holder = cluster.optimized(&nqn);
    let (a, b, mine) = (0xa, 0xb, (1, 1, 0, 10));
    let mut host = Host::connect_to(&nqn, cluster.nodes[holder].address(), a);
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
        let address = cluster.nodes[holder].address();
        let mut a = Host::connect_to(&nqn, address, a);
        let mut b = Host::connect_to(&nqn, address, b);
        let conflict = StatusCode::RESERVATION_CONFLICT.with_dnr();
        assert_eq!(b.write_block(BLOCK), conflict, "{what:?}");
        assert_eq!(a.write_block(BLOCK), StatusCode::SUCCESS, "{what:?}");
        let (_, kind, registrants, persists, key) = a.report();
        assert_eq!((kind, registrants, persists, key), mine, "{what:?}");
    }
    // A change that etcd does not have is no change.
    let holder = cluster.healthy();
    let mut host = Host::connect_to(&nqn, cluster.nodes[holder].address(), b);
    cluster.etcd.kill(0);
    let register = |host: &mut Host| {
        let answer = host.register(RegisterAction::Register, PersistChange::Keep, 11);
        answer.expect("it is connected")
    };
    let refused = register(&mut host);
    assert_eq!(refused, StatusCode::ANA_TRANSITION, "without etcd");
    // The lease is over: another node may have changed the reservation.
    let refused = host.write_block(BLOCK);
    assert_eq!(refused, StatusCode::ANA_TRANSITION, "no conflict");
    cluster.etcd.run_all();
    let holder = cluster.optimized(&nqn);
    let mut host = Host::connect_to(&nqn, cluster.nodes[holder].address(), b);
    // The node renews its lease first.
    let end = Instant::now() + PATIENCE;
    let report = loop {
        match host.try_report() {
            Ok(report) => break report,
            Err(status) => assert_eq!(status, StatusCode::ANA_TRANSITION),
        }
        assert!(Instant::now() < end, "no lease");
        std::thread::sleep(Duration::from_millis(50));
    };
    assert_eq!(report.2, 1, "registrants");
    assert_eq!(register(&mut host), StatusCode::SUCCESS);
    assert_eq!(host.report().2, 2, "registrants");
    let any = cluster.any();
    any.call("volume_unpublish", json!({ "name": "v" }));
    let params = json!({ "name": "v", "allow_any_host": true });
    any.call("volume_publish", params);
    // The holder may not have seen yet that the volume was unpublished.
    let end = Instant::now() + PATIENCE;
    loop {
        let holder = cluster.optimized(&nqn);
        let daemon = cluster.nodes[holder].daemon();
        let params = json!({ "nqn": nqn, "nsid": 1 });
        let now = daemon.try_call("nvmf_ns_get_reservation", params);
        if now
            .as_ref()
            .is_ok_and(|now| now["registrants"] == json!([]))
        {
            break;
        }
        assert!(Instant::now() < end, "{now:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
    for node in &mut cluster.nodes {
        node.stop();
    }
}

/// The host identifiers with which node `from` is connected to the exports of node `to`.
fn host_ids(cluster: &mut Cluster, from: usize, to: usize) -> BTreeSet<String> {
    let status = cluster.any().call("cluster_get_status", Value::Null);
    let names = [from, to].map(|index| cluster.nodes[index].name);
    let [from, of] = names.map(|name| {
        let nodes = status["nodes"].as_array().expect("a list");
        let node = nodes.iter().find(|node| node["name"] == name);
        node.expect("it is there")["id"]
            .as_str()
            .expect("text")
            .to_owned()
    });
    let params = json!({ "nqn": format!("nqn.2025-01.io.nacre:node:{of}") });
    let daemon = cluster.nodes[to].daemon();
    let controllers = daemon.call("nvmf_subsystem_get_controllers", params);
    let controllers = controllers.as_array().expect("a list");
    let is_from = |one: &&Value| {
        one["hostnqn"]
            .as_str()
            .is_some_and(|nqn| nqn.ends_with(&from))
    };
    let ids = controllers.iter().filter(is_from).map(|one| &one["hostid"]);
    ids.map(|id| id.as_str().expect("text").to_owned())
        .collect()
}

/// Goal: late commands of a killed daemon do not pass the reservations of the next one at the
/// replicas. Method: each process of a node connects with a host identifier of its own.
#[test]
fn each_process_is_a_host() {
    let Some(mut cluster) = Cluster::start("each_process_is_a_host", &NAMES[..2]) else {
        return;
    };
    let mut seen = BTreeSet::new();
    for round in 1..=3 {
        let end = Instant::now() + PATIENCE;
        while seen.len() < round {
            assert!(
                Instant::now() < end,
                "process {round} has no identifier of its own: {seen:?}"
            );
            seen.append(&mut host_ids(&mut cluster, 0, 1));
            std::thread::sleep(Duration::from_millis(50));
        }
        assert_eq!(seen.len(), round, "one for each process");
        cluster.nodes[0].kill();
        cluster.nodes[0].start();
    }
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
    let Some(mut cluster) = Cluster::start(NAME, &NAMES) else {
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
    assert!(during > 100, "{during} I/Os without etcd");
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
        cluster.until_moved(holder);
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
