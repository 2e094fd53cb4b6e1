//! `csi.v1.Controller` against two daemons in a cluster with a real etcd. Without etcd it is
//! skipped aloud.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use nacre_cluster_csi::messages::controller::{
    ControllerExpandVolumeRequest, ControllerExpandVolumeResponse, ControllerPublishVolumeResponse,
    ControllerUnpublishVolumeRequest, CreateSnapshotRequest, CreateVolumeRequest,
    DeleteVolumeRequest, GetCapacityRequest, GetCapacityResponse, ListVolumesRequest,
    ListVolumesResponse,
};
use nacre_cluster_csi::messages::{CapacityRange, Mode, Nothing};
use nacre_cluster_etcd_members::{Members, program};
use nacre_tests::daemon::{Daemon, Place, free_address};
use serde_json::{Value, json};
use tonic::{Code, Status};

use crate::client::{HOST, MIB, OTHER, Served, block, publish, texts, wanted};

const PATIENCE: Duration = Duration::from_secs(60);

struct Node {
    daemon: Daemon,
    place: Place,
    address: SocketAddr,
}

fn start(etcd: &Members, name: &str) -> Node {
    let address = free_address("127.0.0.1");
    let url = &etcd.endpoints().urls[0];
    let place = Place::new()
        .with("NACRE_STORE_ENDPOINTS", url)
        .with("NACRE_CLUSTER_NAME", "lab")
        .with("NACRE_CLUSTER_NODE", name)
        .with("NACRE_NVMF_LISTEN", format!("tcp://{address}"));
    if name == "a" {
        let init = ["cluster", "init", "lab", "--etcd", url];
        let init = place.nacre().args(init).output().expect("nacre runs");
        assert!(init.status.success(), "{init:?}");
    }
    let mut daemon = place.start();
    daemon.create_file("disk", 4096, 24 << 20);
    Node {
        daemon,
        place,
        address,
    }
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < end, "never: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Goal: a volume of a storage class is made on pools that the cluster chooses, grows with them,
/// and leaves nothing. Method: two nodes with a pool each, and a driver at one of them.
#[test]
fn the_cluster_chooses_the_pools() {
    let Some(program) = program("the_cluster_chooses_the_pools") else {
        return;
    };
    let etcd = Members::start(program, 1, &[]);
    let mut nodes = [start(&etcd, "a"), start(&etcd, "b")];
    for node in &mut nodes {
        node.daemon.create_file("of-pool", 4096, 128 << 20);
        let pool = json!({ "name": "p", "disk": "of-pool" });
        node.daemon.call("pool_create", pool);
    }
    let [a, b] = &mut nodes;
    until("both pools are reported", || {
        let pools = a.daemon.call("cluster_get_pools", Value::Null);
        let pools = pools.as_array().map_or(&[][..], Vec::as_slice);
        pools
            .iter()
            .filter(|pool| pool["state"] == "online")
            .count()
            == 2
    });
    let driver = Served::start(crate::controller::driver(a.place.socket()));
    let capacity = |replicas: &str| {
        let asked = GetCapacityRequest {
            parameters: texts(&[("replicas", replicas)]),
            ..Default::default()
        };
        let found: GetCapacityResponse = driver
            .call("Controller/GetCapacity", asked)
            .expect("a number");
        found.available_capacity
    };
    assert_eq!(capacity("3"), 0);
    let room = capacity("2");
    assert!(room > 64 * MIB && room < 128 * MIB, "{room}");
    let ignored = CreateVolumeRequest {
        parameters: texts(&[("pool", "p")]),
        ..wanted("data", 8 * MIB)
    };
    let call = "Controller/CreateVolume";
    let why = driver.refused(call, ignored, Code::InvalidArgument);
    assert!(why.contains("pool"), "{why}");
    let request = |replicas: &str| CreateVolumeRequest {
        parameters: texts(&[("replicas", replicas), ("thin", "true")]),
        ..wanted("data", 8 * MIB)
    };
    let (id, bytes) = driver.create(request("2")).expect("made");
    assert_eq!(bytes, 8 * MIB);
    assert_eq!(driver.create(request("2")).expect("again").0, id);
    driver.refused("Controller/CreateVolume", request("1"), Code::AlreadyExists);
    let other = CreateVolumeRequest {
        name: "more".to_owned(),
        ..request("3")
    };
    driver.refused("Controller/CreateVolume", other, Code::ResourceExhausted);
    let lvols = |daemon: &mut Daemon| {
        let lvols = daemon.call("lvol_list", json!({}));
        lvols.as_array().expect("a list").len()
    };
    assert_eq!((lvols(&mut a.daemon), lvols(&mut b.daemon)), (1, 1));

    // A volume that is in use grows with its lvols.
    let asked = publish(&id, HOST, Mode::SingleNodeWriter);
    let call = "Controller/ControllerPublishVolume";
    let _: ControllerPublishVolumeResponse = driver.call(call, asked).expect("published");
    until("it is healthy", || {
        let volumes = a.daemon.call("cluster_get_volumes", Value::Null);
        volumes[0]["state"] == "healthy"
    });
    let asked = ControllerExpandVolumeRequest {
        volume_id: id.clone(),
        capacity_range: Some(CapacityRange {
            required_bytes: 16 * MIB,
            limit_bytes: 0,
        }),
        volume_capability: Some(block(Mode::SingleNodeWriter)),
    };
    let call = "Controller/ControllerExpandVolume";
    // The node may still be opening the volume; an orchestrator calls again as well.
    until("it has grown", || {
        let grown: Result<ControllerExpandVolumeResponse, Status> =
            driver.call(call, asked.clone());
        match grown {
            Ok(grown) => grown.capacity_bytes == 16 * MIB,
            Err(refused) if refused.code() == Code::Unavailable => false,
            Err(refused) => panic!("{refused}"),
        }
    });

    let asked = ControllerUnpublishVolumeRequest {
        volume_id: id.clone(),
        node_id: HOST.to_owned(),
    };
    let call = "Controller/ControllerUnpublishVolume";
    let _: Nothing = driver.call(call, asked).expect("cut off");
    let asked = DeleteVolumeRequest { volume_id: id };
    let _: Nothing = driver
        .call("Controller/DeleteVolume", asked)
        .expect("deleted");
    until("the lvols are gone", || {
        (lvols(&mut a.daemon), lvols(&mut b.daemon)) == (0, 0)
    });
}

/// Goal: publications of a cluster gain and lose hosts one by one, on all nodes, whichever node the
/// driver asks. Method: two drivers, one at each node, publish one volume by turns.
#[test]
fn a_volume_of_a_cluster_is_published() {
    let Some(program) = program("a_volume_of_a_cluster_is_published") else {
        return;
    };
    let etcd = Members::start(program, 1, &[]);
    let mut a = start(&etcd, "a");
    let b = start(&etcd, "b");
    until("both nodes have joined", || {
        let nodes = a.daemon.call("cluster_get_nodes", Value::Null);
        let nodes = nodes.as_array().map_or(&[][..], Vec::as_slice);
        nodes.iter().filter(|node| node["name"].is_string()).count() == 2
    });
    let params = json!({ "name": "v", "devices": ["a:disk", "b:disk"] });
    let made = a.daemon.call("volume_create", params);
    let id = made["uuid"].as_str().expect("an id").to_owned();
    let driver = |node: &Node| Served::start(crate::controller::driver(node.place.socket()));
    let (first, second) = (driver(&a), driver(&b));

    let asked = |host| publish(&id, host, Mode::MultiNodeMultiWriter);
    let call = "Controller/ControllerPublishVolume";
    let context = |driver: &Served, host| {
        let answer = driver.call::<_, ControllerPublishVolumeResponse>(call, asked(host));
        answer.expect("published").publish_context
    };
    let of_first = context(&first, HOST);
    for node in [&a, &b] {
        let address = format!("tcp://{}", node.address);
        assert!(of_first["addresses"].contains(&address), "{of_first:?}");
    }
    assert_eq!(context(&second, OTHER), of_first);
    assert_eq!(
        context(&second, HOST),
        of_first,
        "idempotent on another node"
    );
    let single = publish(&id, HOST, Mode::SingleNodeWriter);
    first.refused(call, single, Code::FailedPrecondition);
    let hosts = |driver: &Served| {
        let found: ListVolumesResponse = driver
            .call("Controller/ListVolumes", ListVolumesRequest::default())
            .expect("a list");
        assert_eq!(found.entries.len(), 1);
        found.entries[0]
            .status
            .clone()
            .expect("a status")
            .published_node_ids
    };
    assert_eq!(hosts(&first), [HOST, OTHER]);

    let unpublish = |driver: &Served, host: &str| {
        let asked = ControllerUnpublishVolumeRequest {
            volume_id: id.clone(),
            node_id: host.to_owned(),
        };
        let _: Nothing = driver
            .call("Controller/ControllerUnpublishVolume", asked)
            .expect("cut off");
    };
    unpublish(&second, HOST);
    assert_eq!(hosts(&first), [OTHER]);
    // The call that removed the host may have failed before the host was cut off.
    unpublish(&first, HOST);
    let delete = || DeleteVolumeRequest {
        volume_id: id.clone(),
    };
    first.refused(
        "Controller/DeleteVolume",
        delete(),
        Code::FailedPrecondition,
    );
    unpublish(&first, OTHER);
    assert_eq!(hosts(&second), Vec::<String>::new());
    for driver in [&first, &second] {
        let _: Nothing = driver
            .call("Controller/DeleteVolume", delete())
            .expect("deleted");
    }
    assert_eq!(a.daemon.call("cluster_get_volumes", Value::Null), json!([]));
    unpublish(&first, HOST);

    // Replicas on devices that an operator made have no snapshots.
    let params = json!({ "name": "w", "devices": ["a:disk"], "force": true });
    let made = a.daemon.call("volume_create", params);
    let asked = CreateSnapshotRequest {
        source_volume_id: made["uuid"].as_str().expect("an id").to_owned(),
        name: "s".to_owned(),
        ..Default::default()
    };
    let call = "Controller/CreateSnapshot";
    let why = first.refused(call, asked, Code::FailedPrecondition);
    assert!(why.contains("no lvol of a pool"), "{why}");
    let left = a.daemon.call("volume_snapshot_list", json!({}));
    assert_eq!(left, json!([]));

    // No node has a pool.
    let asked = GetCapacityRequest::default();
    let found: GetCapacityResponse = first
        .call("Controller/GetCapacity", asked)
        .expect("a number");
    assert_eq!(found.available_capacity, 0);
}

/// ControllerUnpublishVolume: a silent node that serves the volume is fenced before the answer. One
/// whose volume no other node takes is named, and there is no answer. Method: the node that serves
/// both volumes is frozen; one of them has its only replica there.
#[test]
fn a_frozen_node_is_fenced_before_the_answer() {
    let Some(program) = program("a_frozen_node_is_fenced_before_the_answer") else {
        return;
    };
    let etcd = Members::start(program, 1, &[]);
    let mut a = start(&etcd, "a");
    let mut b = start(&etcd, "b");
    b.daemon.create_file("second", 4096, 24 << 20);
    until("both nodes have joined", || {
        let nodes = a.daemon.call("cluster_get_nodes", Value::Null);
        let nodes = nodes.as_array().map_or(&[][..], Vec::as_slice);
        nodes.iter().filter(|node| node["name"].is_string()).count() == 2
    });
    let driver = Served::start(crate::controller::driver(a.place.socket()));
    let mut made = |name: &str, devices: Value| {
        let params = json!({ "name": name, "devices": devices });
        let made = a.daemon.call("volume_create", params);
        let id = made["uuid"].as_str().expect("an id").to_owned();
        let call = "Controller/ControllerPublishVolume";
        let asked = publish(&id, HOST, Mode::SingleNodeWriter);
        let _: ControllerPublishVolumeResponse = driver.call(call, asked).expect("published");
        let moved = json!({ "volume": name, "node": "b" });
        until("it is served by b", || {
            a.daemon
                .try_call("cluster_move_volume", moved.clone())
                .is_ok()
        });
        id
    };
    let both = made("both", json!(["a:disk", "b:disk"]));
    let only = made("only", json!(["b:second"]));
    let unpublish = |id: &str| ControllerUnpublishVolumeRequest {
        volume_id: id.to_owned(),
        node_id: HOST.to_owned(),
    };
    let call = "Controller/ControllerUnpublishVolume";
    let began = Instant::now();
    b.daemon.freeze();
    let _: Nothing = driver.call(call, unpublish(&both)).expect("cut off");
    // The last renewal was at most a fifth of the lease ago.
    let took = began.elapsed();
    assert!(took >= Duration::from_millis(1500), "{took:?}");
    let nodes = a.daemon.call("cluster_get_nodes", Value::Null);
    let nodes = nodes.as_array().expect("a list");
    let lease = |name: &str| nodes.iter().find(|node| node["name"] == name);
    assert_eq!(lease("b").expect("a node")["lease"], "none");
    let why = driver.refused(call, unpublish(&only), Code::DeadlineExceeded);
    let is_named =
        why.contains("no node has opened the volume") || why.contains("node b has no lease");
    assert!(is_named, "{why}");
}
