//! Changes of a volume of a cluster, by operators: replicas, size, name, limits, publication. Three
//! nodes have its replicas, and a fourth one is the spare.

use std::time::{Duration, Instant};

use nacre_cluster_etcd_members::administer;
use nacre_random::Random;
use nacre_tests::daemon::Daemon;
use nacre_tests::seed;
use serde_json::{Value, json};

use crate::load::Load;
use crate::nodes::{Cluster, MIB, NAMES, Node, PATIENCE, SIZE, host};
use crate::volumes::{patient, volume};

const WITH_SPARE: [&str; 4] = ["a", "b", "c", "d"];

/// The nodes and states of the volume's replicas.
fn replicas(volume: &Value) -> Vec<(String, String)> {
    let replicas = volume["replicas"].as_array().expect("a list");
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let mut found: Vec<_> = replicas
        .iter()
        .map(|replica| (text(&replica["node"]), text(&replica["state"])))
        .collect();
    found.sort();
    found
}

fn in_sync(nodes: &[&str]) -> Vec<(String, String)> {
    let one = |node: &&str| ((*node).to_owned(), "in_sync".to_owned());
    nodes.iter().map(one).collect()
}

fn until(daemon: &mut Daemon, what: &str, done: impl Fn(&Value) -> bool) -> Value {
    let end = Instant::now() + PATIENCE;
    loop {
        let found = volume(daemon);
        if done(&found) {
            return found;
        }
        assert!(Instant::now() < end, "never: {what}: {found:#}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Goal: the replica of a node that is lost for good is replaced by one on the spare node, and the
/// volume outlives the next loss. Method: verified load; a node without the volume is killed, its
/// replica is replaced, then the holder is killed, so that only one former replica and the new one
/// are left.
#[test]
fn a_lost_node_is_replaced() {
    const NAME: &str = "a_lost_node_is_replaced";
    let Some(mut cluster) = Cluster::start(NAME, &WITH_SPARE) else {
        return;
    };
    let mut rng = seed::announced(NAME);
    let nqn = cluster.create(false);
    let (daemon, address, _place) = host(&cluster, &nqn);
    let mut load = Load::start(address, patient(), 1, &mut rng);
    load.run(300);
    let mut acting = Random::new(rng.draw());
    load.run_during(|| {
        let holder = cluster.healthy();
        let lost = (holder + 1 + acting.below(2) as usize) % NAMES.len();
        let name = cluster.nodes[lost].name;
        cluster.nodes[lost].kill();
        let other = (0..NAMES.len())
            .find(|at| ![holder, lost].contains(at))
            .expect("three nodes");

        // Only the holder changes replicas; the refusal names it.
        let params = json!({ "name": "v", "replica": format!("{name}:disk"), "device": "d:disk" });
        let began = Instant::now();
        let refused = cluster.nodes[other]
            .daemon()
            .try_call("volume_replace_replica", params.clone());
        let refused = refused.expect_err("another node serves it").to_string();
        let holder_name = cluster.nodes[holder].name;
        assert!(
            refused.contains(&format!("node {holder_name} serves volume")),
            "{refused}"
        );
        let serving = cluster.nodes[holder].daemon();
        serving.call("volume_replace_replica", params);
        println!("the replacement was begun after {:?}", began.elapsed());
        let mut left = ["a", "b", "c", "d"].to_vec();
        left.retain(|node| *node != name);
        let found = until(serving, "the new replica is in sync", |volume| {
            replicas(volume) == in_sync(&left)
        });
        assert_eq!(found["state"], "healthy", "{found:#}");
        println!("{name} is replaced by d after {:?}", began.elapsed());

        // The device on the lost node waits for it, and operators see that.
        until_waits(&mut cluster.nodes[other], name);
        // Nothing names the lost node: it is removed once its lease is over.
        let end = Instant::now() + PATIENCE;
        let remove = json!({ "node": name });
        let remaining = cluster.nodes[other].daemon();
        while let Err(error) = remaining.try_call("cluster_remove_node", remove.clone()) {
            assert!(error.to_string().contains("has a lease"), "{error}");
            assert!(Instant::now() < end, "{error}");
            std::thread::sleep(Duration::from_millis(100));
        }
        cluster.nodes[holder].kill();
        let began = Instant::now();
        cluster.until_moved(holder);
        println!("taken after {:?}", began.elapsed());
        cluster.nodes[holder].start();
        cluster.healthy();
    });
    load.run(300);
    load.drain();
    load.check_all("after the load");
    crate::volumes::verify_bytes(cluster.serving(), SIZE - MIB);
    load.check_all("after all is equal");
    drop(load);
    daemon.stop();
}

/// Waits until the removal of the former replica's device waits for this node, and for it only.
fn until_waits(on: &mut Node, node: &str) {
    let end = Instant::now() + PATIENCE;
    loop {
        let status = on.daemon().call("cluster_get_status", Value::Null);
        let volumes = on.daemon().call("cluster_get_volumes", Value::Null);
        let first = &status["removals"]["first"];
        let is_it = |one: &Value| {
            one["node_name"] == node
                && one["waits_for"] == "node_away"
                && one["removed"] == "device"
                && one["device"] == "disk"
        };
        let all = first.as_array().expect("a list");
        if all.len() == 1 && is_it(&all[0]) && volumes[0]["removals"] == *first {
            return;
        }
        assert!(Instant::now() < end, "{status:#} {volumes:#}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn bdev(daemon: &mut Daemon, name: &str) -> Value {
    let found = daemon.call("bdev_get_bdevs", json!({ "name": name }));
    found[0].clone()
}

/// Namespaces of the volume's subsystem on a node.
fn namespaces(daemon: &mut Daemon, nqn: &str) -> usize {
    let subsystem = daemon.subsystem(nqn);
    subsystem["namespaces"].as_array().map_or(0, Vec::len)
}

/// Goal: hosts see the new size of a volume on all paths, and the next holder serves it. Method:
/// the devices and the volume grow under load, and the holder is killed.
#[test]
fn a_volume_grows() {
    const NAME: &str = "a_volume_grows";
    const NEW: u64 = 40 * MIB;
    let Some(mut cluster) = Cluster::start(NAME, &NAMES) else {
        return;
    };
    let mut rng = seed::announced(NAME);
    let nqn = cluster.create(false);
    let (mut daemon, address, _place) = host(&cluster, &nqn);
    let mut load = Load::start(address, patient(), 1, &mut rng);
    load.run(300);
    let old = bdev(&mut daemon, "vn1")["num_blocks"]
        .as_u64()
        .expect("a number");
    load.run_during(|| {
        let holder = cluster.healthy();
        for node in &mut cluster.nodes {
            let file = node.place.path("disk.img");
            let file = std::fs::File::options().write(true).open(file);
            file.expect("its file").set_len(NEW).expect("room");
            node.daemon()
                .call("bdev_uring_rescan", json!({ "name": "disk" }));
        }
        let standby = cluster.nodes[(holder + 1) % NAMES.len()].daemon();
        let refused = standby.try_call("volume_grow", json!({ "name": "v" }));
        let refused = refused.expect_err("another node serves it").to_string();
        assert!(refused.contains("serves volume"), "{refused}");
        let serving = cluster.nodes[holder].daemon();
        // The other nodes notice the new size of a device after its node.
        let end = Instant::now() + PATIENCE;
        let blocks = (NEW - MIB) / old_block();
        let grown = loop {
            match serving.try_call("volume_grow", json!({ "name": "v", "num_blocks": blocks })) {
                Ok(grown) => break grown,
                Err(error) => assert!(Instant::now() < end, "{error}"),
            }
            std::thread::sleep(Duration::from_millis(50));
        };
        assert_eq!(grown["num_blocks"], blocks, "{grown:#}");
        let began = Instant::now();
        for node in &mut cluster.nodes {
            let name = node.name;
            until(node.daemon(), "a node sees the new size", |volume| {
                volume["num_blocks"] == blocks
            });
            assert_eq!(bdev(node.daemon(), "v")["num_blocks"], blocks, "on {name}");
            assert_eq!(namespaces(node.daemon(), &nqn), 1, "on {name}");
        }
        println!("all nodes show the new size after {:?}", began.elapsed());
        let end = Instant::now() + PATIENCE;
        while bdev(&mut daemon, "vn1")["num_blocks"] != blocks {
            assert!(Instant::now() < end, "the host does not see the new size");
            std::thread::sleep(Duration::from_millis(20));
        }
        println!("the host sees the new size after {:?}", began.elapsed());
        assert!(old < blocks);
        cluster.healthy();
        cluster.nodes[holder].kill();
        cluster.until_moved(holder);
        cluster.nodes[holder].start();
        cluster.healthy();
    });
    load.run(300);
    load.drain();
    load.check_all("after the load");
    // Beyond the former size, replicas are equal, too.
    crate::volumes::verify_bytes(cluster.serving(), NEW - MIB);
    assert_eq!(
        bdev(&mut daemon, "vn1")["num_blocks"],
        (NEW - MIB) / old_block()
    );
    drop(load);
    daemon.stop();
}

fn old_block() -> u64 {
    crate::ledger::BLOCK as u64
}

/// Goal: a name, limits and hosts of a volume hold on all nodes, and over a move. Method: each is
/// changed under load while the volume moves.
#[test]
fn name_limits_and_hosts() {
    const NAME: &str = "name_limits_and_hosts";
    let Some(mut cluster) = Cluster::start(NAME, &NAMES) else {
        return;
    };
    let mut rng = seed::announced(NAME);
    let nqn = cluster.create(false);
    let (daemon, address, _place) = host(&cluster, &nqn);
    let mut load = Load::start(address, patient(), 1, &mut rng);
    load.run(300);
    load.run_during(|| {
        let holder = cluster.healthy();
        let next = (holder + 1) % NAMES.len();
        let rename = json!({ "name": "v", "new_name": "w" });
        let refused = cluster.nodes[next]
            .daemon()
            .try_call("volume_rename", rename.clone());
        let refused = refused.expect_err("another node serves it").to_string();
        assert!(refused.contains("serves volume"), "{refused}");
        cluster.nodes[holder].daemon().call("volume_rename", rename);
        for node in &mut cluster.nodes {
            let end = Instant::now() + PATIENCE;
            while node
                .daemon()
                .try_call("volume_get", json!({ "name": "w" }))
                .is_err()
            {
                assert!(
                    Instant::now() < end,
                    "{} does not know its new name",
                    node.name
                );
                std::thread::sleep(Duration::from_millis(20));
            }
            assert_eq!(namespaces(node.daemon(), &nqn), 1, "on {}", node.name);
            let limit = json!({ "name": "w", "rw_mbytes_per_sec": 900 });
            node.daemon().call("bdev_set_qos_limit", limit);
        }
        for at in [next, holder] {
            let to = cluster.nodes[at].name;
            let params = json!({ "volume": "w", "node": to, "wait_s": 20 });
            cluster.nodes[at]
                .daemon()
                .call("cluster_move_volume", params);
            cluster.healthy();
            for node in &mut cluster.nodes {
                // The former holder's block device makes room for a placeholder.
                let end = Instant::now() + PATIENCE;
                while namespaces(node.daemon(), &nqn) != 1 {
                    assert!(Instant::now() < end, "no namespace on {}", node.name);
                    std::thread::sleep(Duration::from_millis(20));
                }
                let found = bdev(node.daemon(), "w");
                let limits = &found["assigned_rate_limits"];
                assert_eq!(
                    limits["rw_mbytes_per_sec"], 900,
                    "on {}: {found:#}",
                    node.name
                );
            }
        }
        let back = json!({ "name": "w", "new_name": "v" });
        // The holder in the record may be opening it.
        let end = Instant::now() + PATIENCE;
        while let Err(error) = cluster.serving().try_call("volume_rename", back.clone()) {
            assert!(error.to_string().contains("is being opened"), "{error}");
            assert!(Instant::now() < end, "{error}");
            std::thread::sleep(Duration::from_millis(50));
        }
    });
    load.run(300);
    load.drain();
    load.check_all("after the load");
    drop(load);
    daemon.stop();
}

/// The host NQNs that are connected to the volume on a node.
fn connected(daemon: &mut Daemon, nqn: &str) -> Vec<String> {
    let found = daemon.try_call("nvmf_subsystem_get_controllers", json!({ "nqn": nqn }));
    let found = found.unwrap_or_default();
    let controllers = found.as_array().map_or(&[][..], Vec::as_slice);
    let hosts = controllers.iter().filter_map(|one| one["hostnqn"].as_str());
    hosts.map(str::to_owned).collect()
}

fn until_connected(cluster: &mut Cluster, nqn: &str, what: &str, done: impl Fn(&[String]) -> bool) {
    let end = Instant::now() + PATIENCE;
    for node in &mut cluster.nodes {
        loop {
            let hosts = connected(node.daemon(), nqn);
            if done(&hosts) {
                break;
            }
            assert!(
                Instant::now() < end,
                "never: {what} on {}: {hosts:?}",
                node.name
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Goal: a published volume admits exactly the hosts that operators name, on all nodes; it is
/// unpublished in use, and published again with its data. Method: hosts are named, removed and
/// named again, first under load.
#[test]
fn hosts_and_publication() {
    const NAME: &str = "hosts_and_publication";
    const STRANGER: &str = "nqn.2014-08.org.nvmexpress:uuid:00000000-0000-0000-0000-0000000000ff";
    let Some(mut cluster) = Cluster::start(NAME, &NAMES) else {
        return;
    };
    let mut rng = seed::announced(NAME);
    let nqn = cluster.create(false);
    let (daemon, address, _place) = host(&cluster, &nqn);
    let mut load = Load::start(address, patient(), 1, &mut rng);
    load.run(300);
    let ours = connected(cluster.serving(), &nqn).remove(0);
    let publish = |hosts: &[&str]| json!({ "name": "v", "hosts": hosts });
    load.run_during(|| {
        // From any host to this one.
        let named = publish(&[&ours, STRANGER]);
        let published = cluster.nodes[2].daemon().call("volume_publish", named);
        assert_eq!(published["nqn"], nqn.as_str());
        std::thread::sleep(Duration::from_millis(300));
        until_connected(&mut cluster, &nqn, "still connected", |hosts| {
            hosts.contains(&ours)
        });
        cluster.healthy();
    });
    load.run(300);
    load.drain();
    // By hand, on one node, the cluster would take the permission again.
    let by_hand = json!({ "nqn": nqn, "host": "nqn.2026-01.org.example:by-hand" });
    let refused = cluster.nodes[1]
        .daemon()
        .try_call("nvmf_subsystem_add_host", by_hand);
    let refused = refused.expect_err("not published to it").to_string();
    assert!(
        refused.contains("volume \"v\"") && refused.contains("volume_publish"),
        "{refused}"
    );
    // Without the host in the list, it is disconnected everywhere, and does not come in again.
    cluster.nodes[1]
        .daemon()
        .call("volume_publish", publish(&[STRANGER]));
    until_connected(&mut cluster, &nqn, "disconnected", <[String]>::is_empty);
    std::thread::sleep(Duration::from_millis(1500));
    until_connected(&mut cluster, &nqn, "kept out", <[String]>::is_empty);
    cluster.nodes[0]
        .daemon()
        .call("volume_publish", publish(&[&ours]));
    until_connected(&mut cluster, &nqn, "connected again", |hosts| {
        hosts.contains(&ours)
    });
    load.run(100);
    load.drain();
    load.check_all("after the host came back");

    // Unpublished in use: no node shows it or holds it.
    cluster.nodes[1]
        .daemon()
        .call("volume_unpublish", json!({ "name": "v" }));
    cluster.until("released", |status| {
        status["volumes"]["without_holder"] == 1
    });
    for node in &mut cluster.nodes {
        let found = node
            .daemon()
            .try_call("nvmf_get_subsystems", json!({ "nqn": nqn }));
        assert!(found.is_err(), "{} still shows it: {found:?}", node.name);
        let refused = node
            .daemon()
            .try_call("volume_grow", json!({ "name": "v" }));
        let refused = refused.expect_err("no node serves it").to_string();
        assert!(refused.contains("no node serves volume"), "{refused}");
    }
    let published = cluster.nodes[2]
        .daemon()
        .call("volume_publish", publish(&[&ours]));
    assert_eq!(published["nqn"], nqn.as_str());
    cluster.healthy();
    until_connected(&mut cluster, &nqn, "connected again", |hosts| {
        hosts.contains(&ours)
    });
    load.run(100);
    load.drain();
    load.check_all("after it was published again");
    drop(load);
    daemon.stop();
}

/// Goal: a creation that dies between its steps leaves nothing behind. Method: a device of a node
/// that stands still is named, so that the creation waits; then the daemon that creates is killed.
#[test]
fn a_creation_that_dies() {
    const NAME: &str = "a_creation_that_dies";
    let Some(mut cluster) = Cluster::start(NAME, &WITH_SPARE) else {
        return;
    };
    let exports = |daemon: &mut Daemon| {
        let subsystems = daemon.call("nvmf_get_subsystems", Value::Null);
        let subsystems = subsystems.as_array().expect("a list");
        let of_node = |subsystem: &&Value| {
            let nqn = subsystem["nqn"].as_str().unwrap_or_default();
            nqn.starts_with("nqn.2025-01.io.nacre:node:")
        };
        let of_node = subsystems.iter().find(of_node).expect("the node's own");
        of_node["namespaces"].as_array().map_or(0, Vec::len)
    };
    let until_exports = |daemon: &mut Daemon, count: usize| {
        let end = Instant::now() + PATIENCE;
        while exports(daemon) != count {
            assert!(Instant::now() < end, "never {count} exports");
            std::thread::sleep(Duration::from_millis(50));
        }
    };
    cluster.nodes[2].kill();
    let mut creating = cluster.nodes[3].daemon().connect();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let devices = NAMES.map(|name| format!("{name}:disk"));
            let params = json!({ "name": "v", "devices": devices });
            creating
                .call_by_name("volume_create", params)
                .expect_err("killed")
        });
        for at in [0, 1] {
            until_exports(cluster.nodes[at].daemon(), 1);
        }
        cluster.nodes[3].kill();
    });
    let began = Instant::now();
    for at in [0, 1] {
        until_exports(cluster.nodes[at].daemon(), 0);
    }
    println!("the exports ended after {:?}", began.elapsed());
    // The node that was off does not export it either.
    cluster.nodes[2].start();
    cluster.nodes[3].start();
    cluster.create(false);
    for node in &mut cluster.nodes[..3] {
        assert_eq!(exports(node.daemon()), 1, "on {}", node.name);
    }
    // A cordoned node gets no new replicas.
    let creating = cluster.nodes[3].daemon();
    let replica = json!({ "name": "w", "devices": ["d:disk"] });
    // The node sees the change in etcd.
    let cordon = |daemon: &mut Daemon, on: bool| {
        daemon.call("cluster_set_cordon", json!({ "node": "d", "cordon": on }));
        let end = Instant::now() + PATIENCE;
        loop {
            let status = daemon.call("cluster_get_status", Value::Null);
            let nodes = status["nodes"].as_array().map_or(&[][..], Vec::as_slice);
            if nodes
                .iter()
                .any(|node| node["name"] == "d" && node["cordon"] == on)
            {
                return;
            }
            assert!(Instant::now() < end, "never: cordon {on}: {status:#}");
            std::thread::sleep(Duration::from_millis(50));
        }
    };
    cordon(creating, true);
    let refused = creating.try_call("volume_create", replica);
    let refused = refused.expect_err("it is cordoned").to_string();
    assert!(refused.contains("node d is cordoned"), "{refused}");
    cordon(creating, false);
    // A creation that is refused ends its exports, too.
    let refused = cluster.nodes[3].daemon().try_call(
        "volume_create",
        json!({ "name": "w", "devices": ["d:disk", "a:none"] }),
    );
    let refused = refused.expect_err("no such device").to_string();
    assert!(refused.contains("a:none cannot be a replica"), "{refused}");
    until_exports(cluster.nodes[3].daemon(), 0);
}

/// Text of the keys in etcd's JSON.
fn base64(text: &str) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut coded = String::new();
    for part in text.as_bytes().chunks(3) {
        let bits = (0..3).fold(0_usize, |bits, at| {
            bits << 8 | usize::from(part.get(at).copied().unwrap_or_default())
        });
        for at in 0..4 {
            let digit = DIGITS[bits >> (18 - 6 * at) & 63];
            coded.push(if at <= part.len() {
                char::from(digit)
            } else {
                '='
            });
        }
    }
    coded
}

/// Goal: an export whose key vanishes from etcd loses its namespace, and no data; an etcd that is
/// away changes nothing. Method: etcd stops and comes back, then the key of one replica is deleted
/// behind the back of the nodes.
#[test]
fn an_export_without_a_key_is_withdrawn() {
    let name = "an_export_without_a_key_is_withdrawn";
    let Some(mut cluster) = Cluster::start(name, &NAMES) else {
        return;
    };
    cluster.create(false);
    let holder = cluster.healthy();
    let index = (holder + 1) % NAMES.len();
    let status = cluster.any().call("cluster_get_status", Value::Null);
    let nodes = status["nodes"].as_array().expect("a list");
    let node = nodes.iter().find(|node| node["name"] == NAMES[index]);
    let id = node.expect("the node")["id"]
        .as_str()
        .expect("text")
        .to_owned();
    let all = cluster.nodes[index]
        .daemon()
        .call("nvmf_get_subsystems", Value::Null);
    let mut nqns = all
        .as_array()
        .expect("a list")
        .iter()
        .map(|one| one["nqn"].as_str());
    let nqn = nqns.find_map(|nqn| nqn.filter(|nqn| nqn.ends_with(&id)));
    let nqn = nqn.expect("the subsystem of the node").to_owned();
    let count = |cluster: &mut Cluster| namespaces(cluster.nodes[index].daemon(), &nqn);
    assert_eq!(count(&mut cluster), 1);

    cluster.etcd.kill(0);
    let end = Instant::now() + Duration::from_secs(4);
    while Instant::now() < end {
        assert_eq!(count(&mut cluster), 1, "etcd is away");
        std::thread::sleep(Duration::from_millis(200));
    }
    cluster.etcd.run_all();
    cluster.healthy();
    assert_eq!(count(&mut cluster), 1);

    let url = cluster.etcd.endpoints().urls[0].clone();
    let range = json!({
        "key": base64(&format!("/nacre/lab/member/{id}/")),
        "range_end": base64(&format!("/nacre/lab/member/{id}0")),
    });
    let said = administer(&url, "kv/deleterange", "", &range.to_string());
    assert!(said.contains(r#""deleted":"1""#), "{said}");
    let end = Instant::now() + PATIENCE;
    while count(&mut cluster) > 0 {
        assert!(Instant::now() < end, "the namespace stays");
        std::thread::sleep(Duration::from_millis(50));
    }
    let disk = bdev(cluster.nodes[index].daemon(), "disk");
    assert_eq!(disk["name"], "disk");
    cluster.until("the replica is out", |status| {
        status["volumes"]["degraded"] == 1
    });
}
