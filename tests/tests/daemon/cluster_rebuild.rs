//! A cluster whose etcd loses everything, without a backup: the store is rebuilt from the labels of
//! replicas and the nodes' copies.

use std::io::{BufRead, BufReader};
use std::net::TcpStream;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use nacre_cluster_etcd_members::administer;
use nacre_tests::seed;
use serde_json::{Value, json};

use crate::load::Load;
use crate::nodes::{Cluster, NAMES, PATIENCE, host};
use crate::volumes::patient;

/// `nacre cluster rebuild-store lab`, with more words.
fn command(cluster: &Cluster, words: &[&str]) -> Command {
    let url = &cluster.etcd.endpoints().urls[0];
    let mut command = cluster.nodes[0].place.nacre();
    command
        .args([
            "cluster",
            "rebuild-store",
            "lab",
            "--etcd",
            url,
            "--publish",
        ])
        .args(words);
    command
}

fn run(cluster: &Cluster, words: &[&str]) -> Output {
    command(cluster, words).output().expect("nacre runs")
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Runs the command until it succeeds, and returns its output as JSON.
fn rebuilt(cluster: &Cluster, words: &[&str]) -> Value {
    let mut all = vec!["--json"];
    all.extend(words);
    let output = run(cluster, &all);
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).expect("JSON")
}

/// Waits until the new etcd answers.
fn until_etcd_answers(cluster: &Cluster) {
    let url = cluster.etcd.endpoints().urls[0].clone();
    let address = url.strip_prefix("http://").expect("a URL");
    let end = Instant::now() + PATIENCE;
    let does_answer = || {
        let said = administer(&url, "kv/range", "", r#"{"key":"eA=="}"#);
        said.contains("\"revision\"")
    };
    while TcpStream::connect(address).is_err() || !does_answer() {
        assert!(Instant::now() < end, "etcd never answers");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Kills a rebuild after its first keys, and before the last one.
fn interrupted(cluster: &Cluster) {
    let mut command = command(cluster, &[]);
    let mut child = command.stderr(Stdio::piped()).spawn().expect("nacre runs");
    let said = BufReader::new(child.stderr.take().expect("a pipe"));
    let lines = said.lines().map_while(Result::ok);
    let all = lines.inspect(|line| println!("{line}"));
    let last = all.into_iter().find(|line| line == "3 nodes reported");
    assert!(last.is_some(), "{child:?}");
    // The keys are there at once, and `meta` follows one lease after the begin.
    std::thread::sleep(Duration::from_millis(300));
    child.kill().expect("killed");
    child.wait().expect("ended");
}

/// The publication, and the states of the replicas by node.
fn shown(cluster: &mut Cluster) -> (Value, Vec<(String, String)>) {
    let volumes = cluster.any().call("cluster_get_volumes", Value::Null);
    let holder = cluster.healthy();
    let params = json!({ "name": "v" });
    let volume = cluster.nodes[holder].daemon().call("volume_get", params);
    let replicas = volume["replicas"].as_array().cloned().unwrap_or_default();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let mut states: Vec<_> = replicas
        .iter()
        .map(|one| (text(&one["node"]), text(&one["state"])))
        .collect();
    states.sort();
    let mut publication = volumes[0]["publication"].clone();
    publication["id"] = volumes[0]["id"].clone();
    (publication, states)
}

/// Waits until the copies of the running nodes have the publication.
fn until_copied(cluster: &Cluster, nqn: &str) {
    let end = Instant::now() + PATIENCE;
    let is_copied = |index: usize| {
        let file = cluster.nodes[index].place.path("data/cluster-copy.json");
        std::fs::read_to_string(file).is_ok_and(|text| text.contains(nqn))
    };
    while !(0..cluster.nodes.len()).all(is_copied) {
        assert!(Instant::now() < end, "no copies");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Goal: etcd loses everything, and there is no backup; `rebuild-store` returns every acknowledged
/// write, with the same NQN and UUID. Method: verified load. One node is killed before, so that its
/// replica is stale, and starts with the empty etcd; the others go on running. The rebuild names
/// the node while it is missing; another one is killed before its last key, and repeated. Then etcd
/// is lost again, with a node that never returns.
#[test]
fn the_store_is_rebuilt_without_a_backup() {
    const NAME: &str = "the_store_is_rebuilt_without_a_backup";
    let Some(mut cluster) = Cluster::start(NAME, &NAMES) else {
        return;
    };
    let mut rng = seed::announced(NAME);
    let nqn = cluster.create(false);
    let (daemon, address, _place) = host(&cluster, &nqn);
    let mut load = Load::start(address, patient(), 1, &mut rng);
    load.run(300);
    until_copied(&cluster, &nqn);
    let (before, _) = shown(&mut cluster);
    let stale = NAMES.len() - 1;
    load.run_during(|| {
        cluster.nodes[stale].kill();
        cluster.until("the replica of c is out", |status| {
            status["volumes"]["degraded"] == 1
        });
    });
    // The stale replica lacks these writes.
    load.run(300);
    load.run_during(|| {
        cluster.etcd.lose_all();
        until_etcd_answers(&cluster);
        let lost = cluster.any().call("cluster_get_status", Value::Null);
        let problem = lost["problem"].as_str().unwrap_or_default();
        for word in ["lost its data", "`restore`", "`rebuild-store`"] {
            assert!(problem.contains(word), "{lost:#}");
        }
        assert!(!lost.to_string().contains("`init`"), "{lost:#}");
        let refused = run(&cluster, &["--wait", "3s"]);
        let said = stderr(&refused);
        assert!(!refused.status.success(), "{refused:?}");
        println!("{said}");
        assert!(said.contains("2 nodes reported; waiting for c"), "{said}");
        assert!(said.contains("have not reported within 3 s: c. "), "{said}");
        cluster.nodes[stale].start();
        interrupted(&cluster);
        let unready = cluster.any().call("cluster_get_status", Value::Null);
        assert_ne!(unready["this_node"]["state"], "joined", "{unready:#}");
        let done = rebuilt(&cluster, &[]);
        assert_eq!(done["is_repeated"], true, "{done:#}");
        assert_eq!((&done["volumes"], &done["nodes"]), (&json!(1), &json!(3)));
        assert_eq!(done["notes"], json!([]));
        cluster.healthy();
    });
    let (after, states) = shown(&mut cluster);
    assert_eq!(after, before);
    let expected = NAMES.map(|name| (name.to_owned(), "in_sync".to_owned()));
    assert_eq!(states, expected);
    load.run(300);
    load.drain();
    load.check_all("after the rebuild");

    // The same with a node that is lost for good.
    until_copied(&cluster, &nqn);
    load.run_during(|| {
        cluster.nodes[stale].kill();
        cluster.etcd.lose_all();
        until_etcd_answers(&cluster);
        let refused = run(&cluster, &["--wait", "2s", "--without", "d"]);
        assert!(stderr(&refused).contains("waiting for c"), "{refused:?}");
        let done = run(&cluster, &["--without", "c"]);
        let (out, said) = (String::from_utf8_lossy(&done.stdout), stderr(&done));
        println!("{said}{out}");
        assert!(done.status.success(), "{done:?}");
        assert!(out.starts_with("Rebuilt cluster lab, id "), "{out}");
        assert!(said.contains("2 nodes reported\n"), "{said}");
        cluster.until("served by the rest", |status| {
            status["volumes"]["degraded"] == 1
        });
    });
    load.run(300);
    load.drain();
    load.check_all("after the second rebuild");
    daemon.stop();
    for node in &mut cluster.nodes[..stale] {
        node.stop();
    }
}
