//! Discovery in a cluster: each node lists the ports of all nodes that show a volume.

use std::time::{Duration, Instant};

use nacre_tests::daemon::Place;
use serde_json::{Value, json};

use crate::nodes::{Cluster, NAMES, PATIENCE};

const HOST: &str = "nqn.2025-01.io.nacre:host";
const OTHER: &str = "nqn.2025-01.io.nacre:other";

/// The ports of the volume in the log of a node: PORTID and port. Also GENCTR.
fn listed(cluster: &Cluster, node: usize, host: &str, nqn: &str) -> (u64, Vec<(u64, u16)>) {
    let uri = format!("tcp://{}", cluster.nodes[node].address());
    let args = ["discover", &uri, "--hostnqn", host, "--json"];
    let end = Instant::now() + PATIENCE;
    let output = loop {
        let output = cluster.nodes[node].place.nacre().args(args).output();
        let output = output.expect("nacre runs");
        // A node opens its listener after it has joined, which takes time on a busy machine.
        let is_early = String::from_utf8_lossy(&output.stderr).contains("Connection refused");
        if !is_early || Instant::now() > end {
            break output;
        }
        std::thread::sleep(Duration::from_millis(100));
    };
    assert!(output.status.success(), "{output:?}");
    let log: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let records = log["records"].as_array().expect("a list");
    let mut ports = Vec::new();
    for record in records.iter().filter(|record| record["subnqn"] == nqn) {
        let port = record["trsvcid"]
            .as_str()
            .and_then(|port| port.parse().ok());
        ports.push((
            record["portid"].as_u64().expect("a number"),
            port.expect("a port"),
        ));
    }
    ports.sort_unstable();
    (log["genctr"].as_u64().expect("a number"), ports)
}

/// The log of the node, once it has the ports of these nodes.
fn until_listed(
    cluster: &Cluster,
    node: usize,
    host: &str,
    nqn: &str,
    nodes: &[usize],
) -> (u64, Vec<(u64, u16)>) {
    let port = |node: &usize| cluster.nodes[*node].address().port();
    let mut expected: Vec<u16> = nodes.iter().map(port).collect();
    expected.sort_unstable();
    let end = Instant::now() + PATIENCE;
    loop {
        let found = listed(cluster, node, host, nqn);
        let mut ports: Vec<u16> = found.1.iter().map(|(_, port)| *port).collect();
        ports.sort_unstable();
        if ports == expected {
            return found;
        }
        assert!(Instant::now() < end, "never {expected:?}: {found:?}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Goal: one node is enough for a host to find its paths to all nodes. That node need not show the
/// volume, and another node may be away. The logs of other hosts do not have the volume.
/// Method: a volume on two of three nodes, then on all; a daemon that follows the discovery service
/// of one node is the host.
#[test]
fn each_node_lists_the_ports_of_all() {
    let Some(mut cluster) = Cluster::start("each_node_lists_the_ports_of_all", &NAMES) else {
        return;
    };
    let devices = ["a:disk", "b:disk"];
    let params = json!({ "name": "v", "devices": devices });
    cluster.nodes[0].daemon().call("volume_create", params);
    let publish = |cluster: &mut Cluster, nodes: &[&str], hosts: &[&str]| {
        let params = json!({ "name": "v", "hosts": hosts, "nodes": nodes });
        cluster.nodes[0].daemon().call("volume_publish", params)
    };
    let published = publish(&mut cluster, &["a", "b"], &[HOST]);
    let nqn = published["nqn"].as_str().expect("text").to_owned();
    cluster.healthy();
    let mut logs = Vec::new();
    for node in 0..3 {
        let (genctr, ports) = until_listed(&cluster, node, HOST, &nqn, &[0, 1]);
        assert_eq!(listed(&cluster, node, OTHER, &nqn).1, []);
        assert_eq!(listed(&cluster, node, HOST, &nqn).0, genctr, "no change");
        logs.push((genctr, ports));
    }
    assert_eq!(logs[0].1, logs[1].1, "the same PORTID from each node");
    assert_eq!(logs[0].1, logs[2].1);

    // A host that follows node c, which does not show the volume, gets a path to each node.
    let mut host = Place::new().start();
    let address = cluster.nodes[2].address();
    let params = json!({
        "name": "lab", "trtype": "TCP", "traddr": address.ip().to_string(),
        "trsvcid": address.port().to_string(), "hostnqn": HOST, "wait_for_attach": true,
    });
    host.call("bdev_nvme_start_discovery", params);
    let mut until_attached = |count: usize| {
        let end = Instant::now() + PATIENCE;
        loop {
            let info = host.call("bdev_nvme_get_discovery_info", Value::Null);
            let paths = info[0]["paths"].as_array().map_or(0, Vec::len);
            if paths == count {
                return;
            }
            assert!(Instant::now() < end, "never {count} paths: {info:#}");
            std::thread::sleep(Duration::from_millis(50));
        }
    };
    until_attached(2);
    // The log changes, and the event brings the host to read it.
    publish(&mut cluster, &["a", "b", "c"], &[HOST]);
    for (node, (before, _)) in logs.iter().enumerate() {
        let (genctr, ports) = until_listed(&cluster, node, HOST, &nqn, &[0, 1, 2]);
        assert!(genctr > *before, "{genctr}");
        let slots: Vec<u64> = ports.iter().map(|(id, _)| id >> 11).collect();
        assert_eq!(slots, [1, 2, 3]);
    }
    until_attached(3);

    // A node that is away is listed: its path works when it returns.
    cluster.nodes[0].kill();
    cluster.until("node a has no lease", |status| {
        let nodes = status["nodes"].as_array().map_or(&[][..], Vec::as_slice);
        let a = nodes.iter().find(|node| node["name"] == "a");
        a.is_some_and(|a| a["lease"] == "none")
    });
    for node in [1, 2] {
        until_listed(&cluster, node, HOST, &nqn, &[0, 1, 2]);
    }
    cluster.nodes[0].start();
    until_listed(&cluster, 0, HOST, &nqn, &[0, 1, 2]);
    cluster.healthy();

    publish(&mut cluster, &["a", "b", "c"], &[OTHER]);
    for node in 0..3 {
        until_listed(&cluster, node, HOST, &nqn, &[]);
        until_listed(&cluster, node, OTHER, &nqn, &[0, 1, 2]);
    }
    let unpublish = json!({ "name": "v" });
    cluster.any().call("volume_unpublish", unpublish);
    for node in 0..3 {
        until_listed(&cluster, node, OTHER, &nqn, &[]);
    }
    for node in &mut cluster.nodes {
        node.stop();
    }
}
