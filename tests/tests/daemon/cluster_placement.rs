//! Volumes of a cluster on pools that it chooses: created, grown, repaired, moved and deleted. Each
//! node has one pool.

use std::process::Stdio;
use std::time::{Duration, Instant};

use nacre_random::Random;
use nacre_tests::seed;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::ledger::BLOCK;
use crate::load::Load;
use crate::nodes::{Cluster, MIB, PATIENCE, SIZE, host};
use crate::volumes::{events, patient, volume};

const FOUR: [&str; 4] = ["a", "b", "c", "d"];
const POOL: u64 = 256 * MIB;
/// Size of the volume.
const BYTES: u64 = SIZE - MIB;

/// Four nodes with pools. `None`: there is no etcd, as the output says.
fn start(test: &str, replace_after: &str) -> Option<Cluster> {
    let settings = [("NACRE_CLUSTER_REPLACE_AFTER", replace_after)];
    let mut cluster = Cluster::start_with(test, &FOUR, &settings)?;
    for node in &mut cluster.nodes {
        node.daemon().create_file("of-pool", BLOCK as u32, POOL);
        let pool = json!({ "name": "p", "disk": "of-pool" });
        node.daemon().call("pool_create", pool);
    }
    all_pools_are_online(&mut cluster);
    Some(cluster)
}

/// A node that has joined reports its pool a little later.
fn all_pools_are_online(cluster: &mut Cluster) {
    wait("all pools are reported", || {
        let pools = cluster.any().call("cluster_get_pools", Value::Null);
        let pools = pools.as_array().cloned().unwrap_or_default();
        pools.len() == 4 && pools.iter().all(|pool| pool["state"] == "online")
    });
}

fn wait(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < end, "never: {what}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn create(cluster: &mut Cluster, count: usize) -> String {
    let settings = json!({ "read_policy": "round-robin", "settle_ms": 50 });
    let params = json!({
        "name": "v", "size": BYTES, "replica_count": count, "thin": true, "settings": settings,
    });
    let made = cluster.nodes[0].daemon().call("volume_create", params);
    assert_eq!(
        made["replicas"].as_array().map(Vec::len),
        Some(count),
        "{made:#}"
    );
    let params = json!({ "name": "v", "allow_any_host": true });
    let published = cluster.nodes[1].daemon().call("volume_publish", params);
    cluster.healthy();
    published["nqn"].as_str().expect("text").to_owned()
}

/// The nodes of the replicas in sync, as the node that serves the volume says.
fn nodes_of(cluster: &mut Cluster, holder: usize) -> Vec<String> {
    let found = volume(cluster.nodes[holder].daemon());
    let replicas = found["replicas"].as_array().cloned().unwrap_or_default();
    let good = replicas.iter().filter(|one| one["state"] == "in_sync");
    let mut nodes: Vec<String> = good
        .map(|one| one["node"].as_str().unwrap_or_default().to_owned())
        .collect();
    nodes.sort();
    if nodes.len() < replicas.len() {
        Vec::new()
    } else {
        nodes
    }
}

fn lvols(cluster: &mut Cluster, node: usize) -> usize {
    let lvols = cluster.nodes[node].daemon().call("lvol_list", Value::Null);
    lvols.as_array().map_or(0, Vec::len)
}

/// The place of a node among the nodes.
fn index(name: &str) -> usize {
    FOUR.iter().position(|one| *one == name).expect("a node")
}

/// Goal: a volume on pools heals by itself when a node is lost, leaves an evicted node, grows, and
/// leaves no lvol behind. Method: verified load over all of it.
#[test]
fn a_placed_volume_heals_moves_grows_and_goes() {
    const NAME: &str = "a_placed_volume_heals_moves_grows_and_goes";
    let Some(mut cluster) = start(NAME, "10s") else {
        return;
    };
    let mut rng = seed::announced(NAME);
    let nqn = create(&mut cluster, 3);
    let (daemon, address, _place) = host(&cluster, &nqn);
    let mut load = Load::start(address, patient(), 1, &mut rng);
    load.run(300);
    let mut acting = Random::new(rng.draw());
    load.run_during(|| {
        let holder = cluster.healthy();
        let before = nodes_of(&mut cluster, holder);
        assert_eq!(before.len(), 3);
        let others: Vec<&String> = before.iter().filter(|one| **one != FOUR[holder]).collect();
        let lost = others[acting.index(others.len())].clone();
        cluster.nodes[index(&lost)].kill();
        let began = Instant::now();
        let left: Vec<&str> = FOUR.into_iter().filter(|one| *one != lost).collect();
        wait("the lost replica is replaced", || {
            nodes_of(&mut cluster, holder) == left
        });
        println!("{lost} is replaced after {:?}", began.elapsed());
        cluster.healthy();

        // The former replica is not needed any more: its lvol goes.
        cluster.nodes[index(&lost)].start();
        wait("its lvol is deleted", || {
            lvols(&mut cluster, index(&lost)) == 0
        });

        let evicted = FOUR[holder];
        let params = json!({ "node": evicted, "evict": true, "wait_s": 60 });
        let other = (holder + 1) % FOUR.len();
        let began = Instant::now();
        let reply = cluster.nodes[other].daemon().call("cluster_evict", params);
        println!("{evicted} is evicted after {:?}", began.elapsed());
        for key in ["held", "moving"] {
            assert_eq!(reply[key], 0, "{reply:#}");
        }
        assert_eq!(reply["stuck"], json!([]));
        let left: Vec<&str> = FOUR.into_iter().filter(|one| *one != evicted).collect();
        let now = cluster.healthy();
        assert_ne!(now, holder);
        wait("the others have it", || nodes_of(&mut cluster, now) == left);
        wait("its lvol is deleted", || lvols(&mut cluster, holder) == 0);
        let params = json!({ "node": evicted, "evict": false });
        cluster.nodes[other].daemon().call("cluster_evict", params);

        let grow = json!({ "name": "v", "size": 2 * BYTES });
        let grown = cluster.nodes[now].daemon().call("volume_grow", grow);
        let blocks = grown["num_blocks"].as_u64().expect("a number");
        assert_eq!(
            blocks * grown["block_size"].as_u64().expect("a number"),
            2 * BYTES
        );
    });
    load.run(200);
    load.drain();
    load.check_all("after the load");
    let serving = cluster.serving();
    crate::volumes::verify_bytes(serving, 2 * BYTES);
    load.check_all("after all is equal");
    drop(load);
    daemon.stop();

    let any = cluster.any();
    let next = any.call("cluster_next_upgrade", json!({ "version": "99" }));
    assert_eq!(
        (next["left"].as_u64(), next["node"]["is_drained"].as_bool()),
        (Some(4), Some(false))
    );
    any.call("volume_unpublish", json!({ "name": "v" }));
    any.call("volume_delete", json!({ "name": "v" }));
    for node in 0..FOUR.len() {
        assert_eq!(lvols(&mut cluster, node), 0, "{node}");
    }
    for node in &mut cluster.nodes {
        node.stop();
    }
}

/// Goal: when many nodes go at once, nothing is replaced until an operator says so. Method: two of
/// four nodes are killed, one of them with a replica.
#[test]
fn many_lost_nodes_set_the_brake() {
    let Some(mut cluster) = start("many_lost_nodes_set_the_brake", "10s") else {
        return;
    };
    create(&mut cluster, 2);
    let holder = cluster.healthy();
    let with = nodes_of(&mut cluster, holder);
    let lost = with
        .iter()
        .find(|one| **one != FOUR[holder])
        .expect("two")
        .clone();
    let mut spare = FOUR
        .into_iter()
        .filter(|one| !with.iter().any(|node| node == one));
    let (spare, other) = (spare.next().expect("two"), spare.next().expect("two"));
    cluster.nodes[index(&lost)].kill();
    cluster.nodes[index(other)].kill();
    let status = cluster.until("the brake is set", |status| {
        status["brake"]["gone"].is_array()
    });
    let brake = &status["brake"];
    assert_eq!(
        (brake["gone"].as_array().map(Vec::len), &brake["of"]),
        (Some(2), &json!(4))
    );
    // The live node with the lowest id reports it, once, and no node its end.
    let live = [holder, index(spare)];
    let reported = |cluster: &mut Cluster, kind: &str| -> Vec<Value> {
        let of = live.iter();
        of.flat_map(|node| events(cluster.nodes[*node].daemon(), kind))
            .collect()
    };
    wait("the brake is reported", || {
        !reported(&mut cluster, "cluster_brake").is_empty()
    });
    let set = reported(&mut cluster, "cluster_brake");
    assert_eq!(set.len(), 1, "{set:#?}");
    assert_eq!(set[0]["facts"]["of"], 4);
    assert_eq!(set[0]["facts"]["gone"].as_array().map(Vec::len), Some(2));
    let text = set[0].to_string();
    for part in ["2 of 4 nodes", &lost, other, "nacre cluster repair --go"] {
        assert!(text.contains(part), "{part} in {text}");
    }
    let released = reported(&mut cluster, "cluster_brake_released");
    assert_eq!(released, [] as [Value; 0]);
    let refused = cluster.nodes[holder]
        .daemon()
        .try_call("cluster_next_upgrade", json!({ "version": "99" }));
    let refused = refused.expect_err("the brake").to_string();
    assert!(refused.contains("at once"), "{refused}");
    std::thread::sleep(Duration::from_secs(14));
    let found = volume(cluster.nodes[holder].daemon());
    assert_eq!(
        found["replicas"].as_array().map(Vec::len),
        Some(2),
        "{found:#}"
    );
    assert_eq!(lvols(&mut cluster, index(spare)), 0);

    let go = json!({ "go": true });
    let released = cluster.nodes[index(spare)]
        .daemon()
        .call("cluster_repair", go);
    assert_eq!(released["released"], true, "{released}");
    let end = reported(&mut cluster, "cluster_brake_released");
    assert_eq!(end.len(), 1, "{end:#?}");
    assert!(end[0].to_string().contains("an operator released"));
    let mut left = [FOUR[holder], spare];
    left.sort();
    wait("the replica is replaced", || {
        nodes_of(&mut cluster, holder) == left
    });
}

/// Goal: a creation whose daemon dies leaves no lvol and no promise, and wishes that no pool meets
/// are refused with the demand. Method: the node that shall make the lvol is stopped until the
/// maker is dead; then it makes the lvol, and finds that its replica is not wanted.
#[test]
fn a_creation_that_dies_leaves_nothing() {
    let Some(mut cluster) = start("a_creation_that_dies_leaves_nothing", "off") else {
        return;
    };
    let refused = |cluster: &mut Cluster, params: Value| {
        let daemon = cluster.nodes[0].daemon();
        let refused = daemon.try_call("volume_create", params);
        refused.expect_err("a refusal").to_string()
    };
    let size = 1024 * MIB;
    let large = json!({ "name": "v", "size": size, "replica_count": 3 });
    let text = refused(&mut cluster, large);
    assert!(text.contains("have a pool with room for"), "{text}");
    let class = json!({ "name": "v", "size": BYTES, "replica_count": 1, "class": "nvme" });
    let text = refused(&mut cluster, class);
    assert!(text.contains("have a pool of class"), "{text}");
    let both = json!({ "name": "v", "size": BYTES, "replica_count": 1, "devices": ["a:disk"] });
    let text = refused(&mut cluster, both);
    assert!(text.contains("leave one of them out"), "{text}");

    cluster.nodes[3].daemon().signal(Signal::STOP);
    let mut command = cluster.nodes[0].place.nacre();
    command.args([
        "volume",
        "create",
        "v",
        "--replicas",
        "1",
        "--size",
        "20MiB",
        "--on",
        "d",
    ]);
    let socket = cluster.nodes[0].place.socket();
    command.arg("-r").arg(socket);
    let mut creation = command.stderr(Stdio::null()).spawn().expect("nacre runs");
    let promised = |cluster: &mut Cluster| {
        let pools = cluster.nodes[1]
            .daemon()
            .call("cluster_get_pools", Value::Null);
        let pools = pools.as_array().cloned().unwrap_or_default();
        let promised = pools
            .iter()
            .filter_map(|pool| pool["promised_bytes"].as_u64());
        promised.sum::<u64>()
    };
    wait("the space is promised", || promised(&mut cluster) > 0);
    cluster.nodes[0].kill();
    assert!(!creation.wait().expect("it ends").success());
    cluster.nodes[3].daemon().signal(Signal::CONT);
    wait("nothing is promised", || promised(&mut cluster) == 0);
    wait("no lvol is left", || lvols(&mut cluster, 3) == 0);
    cluster.nodes[0].start();
    cluster.until("joined", |status| status["this_node"]["state"] == "joined");
    all_pools_are_online(&mut cluster);
    create(&mut cluster, 4);
}
