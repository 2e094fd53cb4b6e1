//! A cluster whose etcd loses everything and gets a backup, while all daemons run.

use std::time::{Duration, Instant};

use nacre_cluster_etcd_members::administer;
use nacre_nvmf_wire::StatusCode;
use serde_json::{Value, json};

use crate::ledger::BLOCK;
use crate::nodes::{Cluster, NAMES, PATIENCE};
use crate::reservations::Host;

/// Changes of etcd before it is lost: with the three nodes alone, the restored one would have as
/// many after minutes.
const CHANGES: usize = 4000;

/// Runs `nacre cluster` with these words, until it succeeds, and returns its output.
fn said(cluster: &Cluster, words: &[&str]) -> String {
    let end = Instant::now() + PATIENCE;
    loop {
        let mut command = cluster.nodes[0].place.nacre();
        let output = command.arg("cluster").args(words).output();
        let output = output.expect("nacre runs");
        if output.status.success() {
            return String::from_utf8(output.stdout).expect("text");
        }
        // Until etcd answers.
        assert!(Instant::now() < end, "{output:?}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn write(cluster: &mut Cluster, nqn: &str) {
    let end = Instant::now() + PATIENCE;
    loop {
        let holder = cluster.optimized(nqn);
        let mut host = Host::connect_to(nqn, cluster.nodes[holder].address(), 0xa);
        if host.write_block(BLOCK) == StatusCode::SUCCESS {
            return;
        }
        assert!(Instant::now() < end, "no node takes a write");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// The hosts of the volume by its publication.
fn is_open_to_all(cluster: &mut Cluster) -> bool {
    let volumes = cluster.any().call("cluster_get_volumes", Value::Null);
    volumes[0]["publication"]["any_host"] == true
}

/// Goal: nodes that run while etcd loses its data and gets a backup serve their volumes again,
/// without a restart, and a host has access only if the operator says so. Method: the lost etcd has
/// made far more changes than the restored one.
#[test]
fn nodes_run_while_etcd_is_restored() {
    let Some(mut cluster) = Cluster::start("nodes_run_while_etcd_is_restored", &NAMES) else {
        return;
    };
    let nqn = cluster.create(false);
    write(&mut cluster, &nqn);
    let file = cluster.nodes[0].place.path("lab.jsonl");
    let file = file.display().to_string();
    said(&cluster, &["backup", &file]);
    let url = cluster.etcd.endpoints().urls[0].clone();
    for _ in 0..CHANGES {
        administer(&url, "kv/put", "", r#"{"key":"eA==","value":"eQ=="}"#);
    }

    for publish in [true, false] {
        cluster.etcd.lose_all();
        let mut words = vec!["restore", &*file];
        if publish {
            words.push("--publish");
        }
        let restored = said(&cluster, &words);
        assert_eq!(
            restored.contains("No host has access to 1 volume"),
            !publish,
            "{restored}"
        );
        cluster.until("all nodes have joined", |status| {
            let nodes = status["nodes"].as_array().map_or(&[][..], Vec::as_slice);
            nodes.iter().filter(|node| node["lease"] == "good").count() == NAMES.len()
        });
        cluster.healthy();
        assert_eq!(is_open_to_all(&mut cluster), publish);
        if !publish {
            let params = json!({ "name": "v", "allow_any_host": true });
            cluster.any().call("volume_publish", params);
        }
        write(&mut cluster, &nqn);
    }
    for node in &mut cluster.nodes {
        node.stop();
    }
}
