//! Tests of `nacre cluster`: against a scripted daemon, and `init` against a real etcd.

use nacre_cluster_etcd_members::{Members, program};
use serde_json::{Value, json};

use super::fake::{Fake, cells, nacre};

const ANT: &str = "6f1c1f0a-3c5b-4f0e-9d5e-0f5d7b1c2a31";
const BEE: &str = "6f1c1f0a-3c5b-4f0e-9d5e-0f5d7b1c2a32";

fn node(id: &str, name: &str, lease: &str, held: u64) -> Value {
    json!({
        "id": id, "name": name, "this_node": name == "ant", "lease": lease, "incarnation": 7,
        "lease_age_ms": 212, "cordon": false, "drain": name == "bee", "held": held, "replicas": 3,
        "in_sync": 2, "version": "0.1.0", "labels": {},
    })
}

fn status(problem: Option<&str>) -> Value {
    let this = json!({ "state": "joined", "lease_is_good": true, "incarnation": 7 });
    if problem.is_some() {
        return json!({
            "this_node": this, "problem": problem, "cluster": null, "etcd": [], "nodes": [],
            "volumes": null, "operations": null,
        });
    }
    json!({
        "this_node": this, "problem": null,
        "cluster": { "name": "lab", "id": ANT, "lease_ms": 2000 },
        "etcd": [{
            "endpoint": "http://h:1", "latency_us": 1840, "error": null, "version": "3.5.28",
            "is_leader": true, "has_leader": true, "size_bytes": 1 << 20, "in_use_bytes": 1 << 19,
            "quota_bytes": null, "alarms": [],
        }],
        "nodes": [node(ANT, "ant", "good", 2), node(BEE, "bee", "late", 0)],
        "volumes": { "healthy": 1, "degraded": 1, "without_holder": 0, "unreadable": 0 },
        "operations": 1,
    })
}

#[test]
fn the_cluster_is_shown_on_one_page() {
    let daemon = Fake::play(|method, _| match method {
        "cluster_get_status" => Ok(status(None)),
        "cluster_get_nodes" => Ok(json!([node(ANT, "ant", "good", 2)])),
        _ => Ok(json!({ "last": 3, "events": [{
            "number": 3, "time": "2026-11-27T10:00:00Z", "event": "node_gone",
            "text": format!("the lease of node {ANT} is over"), "node": ANT,
        }]})),
    });
    let page = daemon.nacre("cluster status").printed();
    for expected in [
        &format!("cluster    lab, id {ANT}, lease 2s"),
        "this node  joined, its lease is good",
        "volumes    1 healthy, 1 degraded, 0 without a holder",
        "moves      1 in progress",
    ] {
        assert!(page.contains(expected), "{expected} in {page}");
    }
    let tables: Vec<&str> = page.split("\n\n").collect();
    assert_eq!(
        cells(tables[1])[0][..5],
        ["http://h:1", "leader", "3.5.28", "1.8", "ms"]
    );
    let nodes = cells(tables[2]);
    assert_eq!(
        nodes[0],
        [
            "ant", "(this)", "good", "212", "ms", "2", "3", "2", "0.1.0", ANT
        ]
    );
    assert_eq!(nodes[1][..2], ["bee", "late"]);
    assert!(nodes[1].contains(&"drain"));
    assert_eq!(
        tables[3],
        "LAST DECISIONS OF THIS NODE\n    3  2026-11-27T10:00:00Z  node_gone              the lease of \
         node ant is over\n"
    );
    assert_eq!(
        daemon.nacre("cluster status --json").json()["operations"],
        1
    );
    assert_eq!(cells(&daemon.nacre("cluster nodes").printed()).len(), 1);
    assert_eq!(
        daemon.nacre("cluster events --after 2").printed(),
        "    3  2026-11-27T10:00:00Z  node_gone              the lease of node ant is over\n"
    );
    let asked = daemon.asked();
    assert_eq!(asked.last().unwrap().1, json!({ "after": 2 }));
}

/// The page of a silent etcd still has this node, and the command fails.
#[test]
fn a_status_without_etcd_fails() {
    let daemon = Fake::play(|_, _| Ok(status(Some("etcd has not answered within 5 s"))));
    let outcome = daemon.nacre("cluster status");
    assert_eq!(outcome.code, 1, "{outcome:?}");
    for expected in [
        "this node  joined",
        "problem    etcd has not answered within 5 s",
    ] {
        assert!(outcome.out.contains(expected), "{outcome:?}");
    }
}

/// Goal: each command calls its method, and sends only the parameters that were given.
#[test]
fn commands_are_calls() {
    let daemon = Fake::play(|_, _| Ok(json!({ "held": 0 })));
    for (words, method, params) in [
        (
            "cordon ant",
            "cluster_set_cordon",
            json!({ "node": "ant", "cordon": true }),
        ),
        (
            "uncordon ant",
            "cluster_set_cordon",
            json!({ "node": "ant", "cordon": false }),
        ),
        (
            "drain ant --wait",
            "cluster_drain",
            json!({ "node": "ant", "drain": true, "wait_s": 0 }),
        ),
        (
            "undrain ant",
            "cluster_drain",
            json!({ "node": "ant", "drain": false, "wait_s": 0 }),
        ),
        (
            "fence bee --off",
            "cluster_fence",
            json!({ "node": "bee", "off": true }),
        ),
        (
            "remove bee",
            "cluster_remove_node",
            json!({ "node": "bee" }),
        ),
        (
            "move v --to bee --wait 1500ms",
            "cluster_move_volume",
            json!({ "volume": "v", "node": "bee", "wait_s": 2 }),
        ),
    ] {
        let outcome = daemon.nacre(&format!("cluster {words}"));
        assert_eq!(outcome.code, 0, "{words}: {outcome:?}");
        assert_eq!(daemon.asked(), [(method.to_owned(), params)], "{words}");
    }
    let outcome = daemon.nacre("cluster fence bee");
    assert_eq!(outcome.code, 2);
    assert!(outcome.err.contains("--off"), "{outcome:?}");
    assert_eq!(daemon.asked(), []);
}

#[test]
fn a_drain_waits_until_no_volume_is_left() {
    let left = std::sync::atomic::AtomicU64::new(3);
    let daemon = Fake::play(move |_, params| {
        let held = left.fetch_sub(1, std::sync::atomic::Ordering::Relaxed);
        Ok(json!({ "node": params["node"], "drain": true, "held": held }))
    });
    let outcome = daemon.nacre("cluster drain ant --wait=1m");
    assert_eq!(
        (outcome.code, outcome.out.as_str()),
        (0, "ant serves no volume\n")
    );
    assert_eq!(
        outcome.err,
        "3 volumes to hand over\n2 volumes to hand over\n1 volume to hand over\n"
    );
    let waits: Vec<_> = daemon
        .asked()
        .into_iter()
        .map(|call| call.1["wait_s"].clone())
        .collect();
    assert_eq!(waits, [0, 5, 5, 5]);

    let full = Fake::play(|_, _| Ok(json!({ "held": 2 })));
    let refused = full.nacre("cluster drain ant --wait=0s");
    assert_eq!(
        refused.failed(1),
        "error: ant still serves 2 volumes: no other node can take them now. `nacre cluster status` shows the nodes; the drain goes on"
    );
    let begun = full.nacre("cluster drain ant").printed();
    assert_eq!(
        begun,
        "2 volumes to hand over: `nacre cluster nodes` shows the progress\n"
    );
}

/// Goal: a cluster is created once, by options or by the configuration, and the printed text is the
/// configuration of a node.
#[test]
fn init_creates_a_cluster_in_etcd() {
    let Some(etcd) = program("init_creates_a_cluster_in_etcd") else {
        return;
    };
    let etcd = Members::start(etcd, 1, &[]);
    let url = &etcd.endpoints().urls[0];
    let dir = tempfile::tempdir().unwrap();
    let run = |words: &str| nacre(&format!("cluster init {words}"), &dir.path().join("none"));

    let made = run(&format!("lab --etcd {url} --lease 3s --json")).json();
    assert_eq!(
        (&made["name"], &made["lease_ms"]),
        (&json!("lab"), &json!(3000))
    );
    let id = made["id"].as_str().unwrap();
    let again = run(&format!("lab --etcd {url}")).failed(1);
    assert!(
        again.contains("exists already") && again.contains(id),
        "{again}"
    );

    let file = dir.path().join("nacre.toml");
    std::fs::write(&file, made["configuration"].as_str().unwrap()).unwrap();
    let of_file = run(&format!("lab -c {}", file.display())).failed(1);
    assert!(of_file.contains(id), "{of_file}");
    let other = run(&format!("den -c {}", file.display())).failed(1);
    assert!(other.contains("the configuration has \"lab\""), "{other}");
    std::fs::write(&file, format!("[store]\nendpoints = [\"{url}\"]\n")).unwrap();
    let text = run(&format!("den -c {}", file.display()));
    // A store without a prefix is no daemon's, and has no cluster yet.
    let text = text.printed();
    for expected in [
        "Created cluster den, id ",
        "lease 2s.",
        "[cluster]\nname = \"den\"",
    ] {
        assert!(text.contains(expected), "{expected} in {text}");
    }
}

#[test]
fn init_refuses_wrong_arguments() {
    let dir = tempfile::tempdir().unwrap();
    let run = |words: &str| nacre(&format!("cluster init {words}"), &dir.path().join("none"));
    for (words, code, expected) in [
        (
            "a/b --etcd http://127.0.0.1:1",
            1,
            "cluster.name: \"a/b\" is not",
        ),
        ("lab --etcd http://127.0.0.1:1 --lease 31s", 1, "30"),
        (
            "lab --etcd https://127.0.0.1:1",
            1,
            "store.ca: it is missing",
        ),
        ("lab --etcd 127.0.0.1:1", 1, "store.endpoints"),
        ("lab --ca /a", 2, "--etcd"),
    ] {
        let outcome = run(words);
        assert_eq!(outcome.code, code, "{words}: {outcome:?}");
        assert!(outcome.err.contains(expected), "{words}: {outcome:?}");
    }
    let file = dir.path().join("nacre.toml");
    std::fs::write(&file, "").unwrap();
    let refused = run(&format!("lab -c {}", file.display())).failed(1);
    assert!(
        refused.contains("store.endpoints: it is empty"),
        "{refused}"
    );
}
