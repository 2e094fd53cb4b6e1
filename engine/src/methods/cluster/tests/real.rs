//! Goal: an operator's acts reach etcd and the nodes, and a silent etcd delays no call beyond its
//! limit. Method: a real etcd, and nodes that serve no volumes. Without etcd, the test is skipped
//! aloud.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use nacre_cluster_core::{ExportId, Incarnation, NodeId, ReplicaId, VolumeId};
use nacre_cluster_etcd::{Client, Copies, Prefix, Txn};
use nacre_cluster_etcd_members::{Members, program};
use nacre_cluster_node::{
    Description, Export, Me, Node, NodeKey, NodeState, Publication, SNAPSHOTS, Serving, VolumeRole,
};
use serde_json::{Value, json};
use uuid::Uuid;

use super::super::init::init;
use super::super::nodes::{DrainParams, drain};
use super::super::status::{ClusterStatus, look};
use super::super::volumes::{volume, volumes};
use super::super::{LIMIT, node, within};
use crate::config::settings::VolumeStoreSettings;

const ANT: Uuid = Uuid::from_u128(1);
const BEE: Uuid = Uuid::from_u128(2);

/// A node without devices.
struct Nothing;

impl Serving for Nothing {
    fn reached(&mut self, _: VolumeId) -> arrayvec::ArrayVec<ReplicaId, 5> {
        arrayvec::ArrayVec::new()
    }
    fn take(&mut self, _: VolumeId, _: u64) {}
    fn close(&mut self, _: VolumeId, _: u64) {}
    fn abort(&mut self, _: VolumeId) {}
    fn drop_all(&mut self, _: VolumeId) {}
    fn show(&mut self, _: VolumeId, _: &VolumeRole) {}
    fn forget(&mut self, _: VolumeId) {}
    fn publish(&mut self, _: VolumeId, _: Option<&Publication>) {}
    fn nodes(&mut self, _: &BTreeMap<NodeId, NodeKey>, _: &BTreeMap<NodeId, Incarnation>) {}
    fn exports(&mut self, _: &BTreeMap<ExportId, Export>) {}
}

pub(in crate::methods) fn start(etcd: &Members, id: Uuid, name: &str) -> Node {
    let me = Me {
        id: NodeId(id),
        machine: Some(Uuid::from_u128(77)),
        process: Uuid::new_v4(),
        cluster: None,
        description: Description {
            name: name.to_owned(),
            version: "0.1.0".to_owned(),
            features: vec![SNAPSHOTS.to_owned()],
            ..Description::default()
        },
        is_balanced: false,
    };
    let prefix = Prefix::new("lab").expect("a name");
    let node = Node::start(&etcd.endpoints(), prefix, me, |_| Box::new(Nothing)).expect("a thread");
    let state = node.wait(Duration::from_secs(20));
    assert!(matches!(state, NodeState::In { .. }), "{state:?}");
    node
}

fn run<T>(work: impl Future<Output = T>) -> T {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_all().build().expect("a runtime");
    runtime.block_on(work)
}

fn page(of: &Node) -> Value {
    let read = run(look(&of.operator()));
    serde_json::to_value(ClusterStatus::of(read, Some(of.state()))).expect("plain data")
}

/// The page, once `is_met` holds.
fn until(of: &Node, what: &str, is_met: impl Fn(&Value) -> bool) -> Value {
    let end = Instant::now() + Duration::from_secs(20);
    loop {
        let page = page(of);
        if is_met(&page) {
            return page;
        }
        assert!(Instant::now() < end, "never {what}: {page:#}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// A volume that an earlier incarnation of bee held, and its publication.
fn volume_keys() -> [(String, Value); 2] {
    let prefix = Prefix::new("lab").expect("a name");
    let id = VolumeId(Uuid::from_u128(9));
    let record = json!({
        "v": 1, "name": "v", "epoch": 4, "serving": 4, "revision": 7, "holder": BEE,
        "incarnation": 1, "members": [
            { "id": ANT, "node": ANT, "state": { "state": "in_sync" } },
            { "id": BEE, "node": BEE, "state": { "state": "out" } },
        ],
    });
    let publication = json!({ "v": 1, "nqn": "nqn.a", "slots": { BEE.to_string(): 1 } });
    [
        (prefix.core_volume(id), record),
        (prefix.publication(id), publication),
    ]
}

#[test]
fn acts_of_operators_on_a_real_etcd() {
    let Some(program) = program("acts_of_operators_on_a_real_etcd") else {
        return;
    };
    let etcd = Members::start(program, 1, &[]);
    let store = VolumeStoreSettings {
        endpoints: etcd.endpoints().urls.clone(),
        ..VolumeStoreSettings::default()
    };
    let lease = Duration::from_secs(2);
    let created = init(&store, "lab", lease).expect("a new cluster");
    let again = init(&store, "lab", lease)
        .expect_err("it is there")
        .to_string();
    assert!(again.contains(&created.id.to_string()), "{again}");

    let (ant, bee) = (start(&etcd, ANT, "ant"), start(&etcd, BEE, "bee"));
    let shown = until(&ant, "two described nodes", |page| {
        page["nodes"][0]["name"] == "ant" && page["nodes"][1]["name"] == "bee"
    });
    assert_eq!(shown["cluster"]["id"], created.id.to_string());
    assert_eq!(shown["this_node"]["state"], "joined");
    assert_eq!(shown["etcd"][0]["is_leader"], true);
    assert_eq!(shown["nodes"][0]["this_node"], true);
    assert_eq!(shown["nodes"][1]["this_node"], false);
    assert_eq!(shown["nodes"][1]["lease"], "good");
    assert_eq!(shown["volumes"]["healthy"], 0);
    assert_eq!(shown["has_snapshots"], true);

    let operator = ant.operator();
    let found = run(node(&operator, "bee")).expect("a node");
    assert_eq!(found, NodeId(BEE));
    let unknown = run(node(&operator, "cow"))
        .expect_err("no node")
        .to_string();
    assert!(unknown.contains("\"ant\""), "{unknown}");
    // A client works in one runtime only.
    let transact = |txn| {
        run(async {
            let client = Client::new(&etcd.endpoints()).expect("endpoints");
            client.transact(txn, Copies::One).await
        })
    };
    let keys = volume_keys();
    let put = keys.iter().fold(Txn::default(), |txn, (key, value)| {
        txn.put(key, value.to_string().into_bytes())
    });
    transact(put).expect("put");
    let shown = serde_json::to_value(run(volumes(&operator, &|_| Vec::new())).expect("volumes"));
    assert_eq!(
        shown.expect("plain data"),
        json!([{
            "id": Uuid::from_u128(9), "name": "v", "state": "without_holder",
            "holder": { "id": BEE, "name": "bee" }, "lease_stands": false,
            "replicas": 2, "in_sync": 1, "nodes": [{ "id": BEE, "name": "bee" }],
            "publication": {
                "nqn": "nqn.a", "hosts": [], "any_host": false, "listen_addresses": [],
            },
            "removals": [],
        }])
    );
    assert_eq!(
        run(volume(&operator, "v")),
        Ok(VolumeId(Uuid::from_u128(9)))
    );
    let unknown = run(volume(&operator, "w")).expect_err("no volume");
    assert!(
        unknown.to_string().contains("its volumes are \"v\""),
        "{unknown}"
    );
    let delete = keys
        .iter()
        .fold(Txn::default(), |txn, (key, _)| txn.delete(key));
    transact(delete).expect("deleted");
    run(within(LIMIT, operator.set_cordon(found, true))).expect("a cordon");
    let params = DrainParams {
        node: "bee".to_owned(),
        drain: Some(true),
        wait_s: 5,
    };
    let drained = run(drain(&operator, &params, LIMIT)).expect("nothing to hand over");
    let drained = serde_json::to_value(drained).expect("plain data");
    assert_eq!(drained, json!({ "node": BEE, "drain": true, "held": 0 }));
    let shown = page(&ant);
    let of_bee = &shown["nodes"][1];
    assert_eq!(
        (&of_bee["cordon"], &of_bee["drain"]),
        (&json!(true), &json!(true))
    );

    let lives = run(within(LIMIT, operator.remove(found))).expect_err("it has a lease");
    assert!(lives.to_string().contains("has a lease"), "{lives}");
    drop(bee);
    until(&ant, "no lease of bee", |page| {
        page["nodes"][1]["lease"] == "none"
    });
    let off = run(within(LIMIT, operator.fence_off(found))).expect_err("nothing to fence");
    assert!(off.to_string().contains("no lease"), "{off}");
    run(within(LIMIT, operator.remove(found))).expect("removed");
    assert_eq!(page(&ant)["nodes"].as_array().map(Vec::len), Some(1));

    // Silent: connections stay, and nothing is answered.
    etcd.stop(0);
    let begun = Instant::now();
    let shown = page(&ant);
    assert!(
        begun.elapsed() < LIMIT + Duration::from_secs(30),
        "{:?}",
        begun.elapsed()
    );
    assert!(shown["problem"].is_string(), "{shown:#}");
    assert_eq!(shown["this_node"]["state"], "joined");
    etcd.go_on(0);
}
