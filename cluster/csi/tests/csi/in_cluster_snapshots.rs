//! Snapshots and clones of volumes of a cluster: daemons with a pool each, and a real etcd. Without
//! etcd the tests are skipped aloud.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nacre_bdev::Status as IoStatus;
use nacre_cluster_csi::messages::controller::{
    ControllerCall, ControllerGetCapabilitiesResponse, ControllerPublishVolumeResponse,
    ControllerUnpublishVolumeRequest, CreateSnapshotRequest, CreateSnapshotResponse,
    CreateVolumeRequest, CreateVolumeResponse, DeleteSnapshotRequest, DeleteVolumeRequest,
    ListSnapshotsRequest, ListSnapshotsResponse, SnapshotInfo, Source, SourceId,
    VolumeContentSource, VolumeInfo,
};
use nacre_cluster_csi::messages::{CapacityRange, Mode, Nothing};
use nacre_cluster_etcd_members::{Members, program};
use nacre_tests::daemon::{Daemon, Place, free_address};
use nacre_tests::host::{Host, options};
use nacre_tests::target::nqn;
use serde_json::{Value, json};
use tonic::{Code, Status};

use crate::client::{HOST, MIB, Served, publish, texts, wanted};

const PATIENCE: Duration = Duration::from_secs(60);
const BLOCKS: usize = 4;
const CREATE: &str = "Controller/CreateSnapshot";
const CREATE_VOLUME: &str = "Controller/CreateVolume";

struct Node {
    name: &'static str,
    /// `None`: it was killed.
    daemon: Option<Daemon>,
    place: Place,
    address: SocketAddr,
}

impl Node {
    fn call(&mut self, method: &str, params: Value) -> Value {
        self.daemon.as_mut().expect("it runs").call(method, params)
    }

    fn try_call(&mut self, method: &str, params: Value) -> Result<Value, String> {
        let daemon = self.daemon.as_mut().expect("it runs");
        daemon
            .try_call(method, params)
            .map_err(|error| error.to_string())
    }

    fn lvols(&mut self) -> usize {
        let lvols = self.call("lvol_list", json!({}));
        lvols.as_array().expect("a list").len()
    }
}

struct Lab {
    nodes: Vec<Node>,
    /// At the first node.
    driver: Served,
    _etcd: Members,
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < end, "never: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

impl Lab {
    fn start(test: &str, names: &[&'static str]) -> Option<Self> {
        let etcd = Members::start(program(test)?, 1, &[]);
        let url = etcd.endpoints().urls[0].clone();
        let start = |name: &'static str| {
            let address = free_address("127.0.0.1");
            let place = Place::new()
                .with("NACRE_STORE_ENDPOINTS", &url)
                .with("NACRE_CLUSTER_NAME", "lab")
                .with("NACRE_CLUSTER_NODE", name)
                .with("NACRE_NVMF_LISTEN", format!("tcp://{address}"));
            if name == "a" {
                let init = ["cluster", "init", "lab", "--etcd", &url];
                let init = place.nacre().args(init).output().expect("nacre runs");
                assert!(init.status.success(), "{init:?}");
            }
            let mut daemon = place.start();
            daemon.create_file("of-pool", 4096, 128 << 20);
            daemon.call("pool_create", json!({ "name": "p", "disk": "of-pool" }));
            Node {
                name,
                daemon: Some(daemon),
                place,
                address,
            }
        };
        let mut nodes: Vec<Node> = names.iter().copied().map(start).collect();
        until("all pools are reported", || {
            let pools = nodes[0].call("cluster_get_pools", Value::Null);
            let pools = pools.as_array().map_or(&[][..], Vec::as_slice);
            let online = pools.iter().filter(|pool| pool["state"] == "online");
            online.count() == names.len()
        });
        let driver = Served::start(crate::controller::driver(nodes[0].place.socket()));
        Some(Self {
            nodes,
            driver,
            _etcd: etcd,
        })
    }

    fn at(&self, name: &str) -> usize {
        let found = self.nodes.iter().position(|node| node.name == name);
        found.expect("a node")
    }

    fn kill(&mut self, name: &str) {
        let at = self.at(name);
        self.nodes[at].daemon.take().expect("it runs").kill();
        until("its lease is over", || self.lease(name) == "none");
    }

    fn start_again(&mut self, name: &str) {
        let at = self.at(name);
        let daemon = self.nodes[at].place.start();
        self.nodes[at].daemon = Some(daemon);
    }

    fn lease(&mut self, name: &str) -> String {
        let nodes = self.nodes[0].call("cluster_get_nodes", Value::Null);
        let mut nodes = nodes.as_array().expect("a list").iter();
        let node = nodes.find(|node| node["name"] == name).expect("a node");
        node["lease"].as_str().expect("a word").to_owned()
    }

    fn in_cluster(&mut self, id: &str) -> Value {
        let all = self.nodes[0].call("cluster_get_volumes", Value::Null);
        let mut all = all.as_array().expect("a list").iter();
        let found = all.find(|volume| volume["id"] == id);
        found.cloned().unwrap_or_default()
    }

    fn until_healthy(&mut self, id: &str) {
        until("it is healthy", || {
            self.in_cluster(id)["state"] == "healthy"
        });
    }

    fn holder(&mut self, id: &str) -> usize {
        let volume = self.in_cluster(id);
        self.at(volume["holder"]["name"].as_str().expect("a holder"))
    }

    fn hand_over(&mut self, id: &str, to: &str) {
        let params = json!({ "volume": id, "node": to });
        until("it is moved", || {
            let moved = self.nodes[0].try_call("cluster_move_volume", params.clone());
            moved.is_ok()
        });
    }

    fn publish(&mut self, id: &str) -> String {
        let asked = publish(id, HOST, Mode::SingleNodeWriter);
        let call = "Controller/ControllerPublishVolume";
        let published: ControllerPublishVolumeResponse =
            self.driver.call(call, asked).expect("published");
        self.until_healthy(id);
        published.publish_context["nqn"].clone()
    }

    fn unpublish(&self, id: &str) {
        let asked = ControllerUnpublishVolumeRequest {
            volume_id: id.to_owned(),
            node_id: HOST.to_owned(),
        };
        let call = "Controller/ControllerUnpublishVolume";
        let _: Nothing = self.driver.call(call, asked).expect("cut off");
    }

    /// A host at the node that serves the volume. A node that has just taken it needs a moment
    /// until its subsystem is complete, and refuses hosts before.
    fn host(&mut self, id: &str, subsystem: &str) -> Host {
        let is_there = |of: &Value| of.as_array().is_some_and(|all| !all.is_empty());
        until("it is served", || {
            let at = self.holder(id);
            let all = self.nodes[at].call("nvmf_get_subsystems", Value::Null);
            let mut all = all.as_array().expect("a list").iter();
            let served = all.find(|one| one["nqn"] == subsystem);
            served.is_some_and(|one| {
                is_there(&one["namespaces"]) && is_there(&one["listen_addresses"])
            })
        });
        let at = self.holder(id);
        let mut options = options(subsystem);
        options.hostnqn = nqn(HOST);
        Host::connected(self.nodes[at].address, options, &[1])
    }

    fn write(&mut self, id: &str, subsystem: &str, byte: u8) {
        // A node that has just taken the volume answers with a status of its path, and the host
        // tries again.
        until("it is written", || {
            let mut host = self.host(id, subsystem);
            let written = host.write(0, 0, BLOCKS as u32, &vec![byte; BLOCKS * 4096]);
            host.disconnect();
            written == IoStatus::Ok
        });
    }

    /// The contents of a volume that is not published, from all of its nodes.
    fn read(&mut self, id: &str) -> Vec<u8> {
        let subsystem = self.publish(id);
        let read = |lab: &mut Self| {
            let mut host = lab.host(id, &subsystem);
            let data = host.read(0, 0, BLOCKS as u32, BLOCKS * 4096);
            host.disconnect();
            data
        };
        let data = read(self);
        let at = self.holder(id);
        let compared = self.nodes[at].call("volume_verify", json!({ "name": id }));
        assert_ne!(compared, Value::Null);
        until("the replicas are compared", || {
            let found = self.nodes[at].call("volume_get", json!({ "name": id }));
            let verify = &found["verify"];
            assert_eq!(verify["different_blocks"], 0, "{verify}");
            verify["running"] == false
        });
        self.unpublish(id);
        data
    }

    fn volume(&self, name: &str, bytes: i64, source: Option<Source>, nodes: &str) -> VolumeInfo {
        let made = self.try_volume(name, bytes, source, nodes);
        made.expect("it is made")
    }

    fn try_volume(
        &self,
        name: &str,
        bytes: i64,
        source: Option<Source>,
        nodes: &str,
    ) -> Result<VolumeInfo, Status> {
        let count = nodes.split(',').count().to_string();
        let mut parameters = texts(&[("replicas", &count), ("thin", "true")]);
        if !nodes.starts_with('*') {
            parameters.insert("nodes".to_owned(), nodes.to_owned());
        }
        let asked = CreateVolumeRequest {
            parameters,
            volume_content_source: source.map(|source| VolumeContentSource {
                source: Some(source),
            }),
            ..wanted(name, bytes)
        };
        let answer: CreateVolumeResponse = self.driver.call(CREATE_VOLUME, asked)?;
        Ok(answer.volume.expect("a volume"))
    }

    fn delete_volume(&self, id: &str) {
        let asked = DeleteVolumeRequest {
            volume_id: id.to_owned(),
        };
        let call = "Controller/DeleteVolume";
        let _: Nothing = self.driver.call(call, asked).expect("deleted");
    }

    fn snapshot(&self, volume: &str, name: &str) -> SnapshotInfo {
        snapshot(&self.driver, volume, name)
    }

    fn delete_snapshot(&self, id: &str) {
        let asked = DeleteSnapshotRequest {
            snapshot_id: id.to_owned(),
        };
        let call = "Controller/DeleteSnapshot";
        let _: Nothing = self.driver.call(call, asked).expect("deleted");
    }

    fn snapshots(&self) -> Vec<SnapshotInfo> {
        listed(&self.driver)
    }
}

fn snapshot(driver: &Served, volume: &str, name: &str) -> SnapshotInfo {
    let answer = driver.call(CREATE, asked(volume, name));
    let answer: CreateSnapshotResponse = answer.expect("it is made");
    answer.snapshot.expect("a snapshot")
}

fn listed(driver: &Served) -> Vec<SnapshotInfo> {
    let asked = ListSnapshotsRequest::default();
    let found: ListSnapshotsResponse = driver
        .call("Controller/ListSnapshots", asked)
        .expect("a list");
    let found = found.entries.into_iter().filter_map(|one| one.snapshot);
    found.collect()
}

fn asked(volume: &str, name: &str) -> CreateSnapshotRequest {
    CreateSnapshotRequest {
        source_volume_id: volume.to_owned(),
        name: name.to_owned(),
        ..Default::default()
    }
}

fn of_snapshot(id: &str) -> Option<Source> {
    Some(Source::Snapshot(SourceId { id: id.to_owned() }))
}

fn of_volume(id: &str) -> Option<Source> {
    Some(Source::Volume(SourceId { id: id.to_owned() }))
}

/// Goal: a snapshot has the writes of its moment, whichever node serves the volume and whichever
/// node the driver asks; volumes of it and clones have these contents on all their replicas, and
/// outlive their sources. CreateSnapshot: idempotent by name, ALREADY_EXISTS for another volume,
/// NOT_FOUND without one. Method: three nodes, a host over NVMe/TCP, a move between two snapshots.
#[test]
fn volumes_of_a_cluster_have_snapshots_and_clones() {
    let name = "volumes_of_a_cluster_have_snapshots_and_clones";
    let Some(mut lab) = Lab::start(name, &["a", "b", "c"]) else {
        return;
    };
    let found: ControllerGetCapabilitiesResponse = lab
        .driver
        .call("Controller/ControllerGetCapabilities", Nothing {})
        .expect("capabilities");
    let kinds = found.capabilities.iter().filter_map(|one| one.rpc);
    let kinds: Vec<i32> = kinds.map(|rpc| rpc.kind).collect();
    for call in [
        ControllerCall::CreateDeleteSnapshot,
        ControllerCall::ListSnapshots,
        ControllerCall::CloneVolume,
    ] {
        assert!(kinds.contains(&call.into()), "{call:?}");
    }
    let source = lab.volume("data", 8 * MIB, None, "b,c").volume_id;
    let subsystem = lab.publish(&source);
    lab.write(&source, &subsystem, 0xA1);
    let monday = lab.snapshot(&source, "monday");
    assert_eq!((monday.size_bytes, monday.ready_to_use), (8 * MIB, true));
    assert_eq!(monday.source_volume_id, source);
    assert!(monday.creation_time.is_some_and(|time| time.seconds > 0));
    let shown = lab.nodes[0].call("volume_snapshot_list", json!({}));
    let mut nodes: Vec<_> = shown[0]["lvols"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|lvol| lvol["node"].clone())
        .collect();
    nodes.sort_by_key(Value::to_string);
    assert_eq!(nodes, ["b", "c"], "one of each replica: {shown:#}");
    lab.write(&source, &subsystem, 0xB2);
    let other = if lab.holder(&source) == lab.at("b") {
        "c"
    } else {
        "b"
    };
    lab.hand_over(&source, other);
    lab.until_healthy(&source);
    let tuesday = lab.snapshot(&source, "tuesday");
    lab.write(&source, &subsystem, 0xC3);

    assert_eq!(lab.snapshot(&source, "monday"), monday, "idempotent");
    let elsewhere = Served::start(crate::controller::driver(lab.nodes[2].place.socket()));
    assert_eq!(listed(&elsewhere), lab.snapshots());
    assert_eq!(lab.snapshots().len(), 2);
    let empty = lab.volume("empty", 8 * MIB, None, "*").volume_id;
    let refused = lab
        .driver
        .refused(CREATE, asked(&empty, "monday"), Code::AlreadyExists);
    assert!(refused.contains("monday"), "{refused}");
    let absent = "5f0c1c3e-8b3a-4c55-9d0b-6b3f3f1c0c01";
    lab.driver
        .refused(CREATE, asked(absent, "x"), Code::NotFound);

    let restored = lab.volume(
        "restored",
        16 * MIB,
        of_snapshot(&monday.snapshot_id),
        "*,*",
    );
    assert_eq!(restored.capacity_bytes, 16 * MIB, "larger than its source");
    let again = lab.volume(
        "restored",
        16 * MIB,
        of_snapshot(&monday.snapshot_id),
        "*,*",
    );
    assert_eq!(again, restored, "idempotent");
    let late = lab.volume("late", 0, of_snapshot(&tuesday.snapshot_id), "*,*,*");
    let clone = lab.volume("clone", 0, of_volume(&source), "*,*");
    assert_eq!(clone.capacity_bytes, 8 * MIB, "as its source");
    assert_eq!(lab.snapshots().len(), 2, "a clone leaves no snapshot");
    let small = CreateVolumeRequest {
        capacity_range: Some(CapacityRange {
            required_bytes: 0,
            limit_bytes: 4 * MIB,
        }),
        volume_content_source: Some(VolumeContentSource {
            source: of_snapshot(&monday.snapshot_id),
        }),
        ..wanted("small", 0)
    };
    lab.driver.refused(CREATE_VOLUME, small, Code::OutOfRange);
    let lost = lab.try_volume("lost", 0, of_snapshot(absent), "*");
    assert_eq!(lost.expect_err("no source").code(), Code::NotFound);

    lab.unpublish(&source);
    lab.delete_volume(&source);
    assert_eq!(lab.snapshots().len(), 2, "they outlive their volume");
    for (id, byte) in [
        (&restored.volume_id, 0xA1),
        (&late.volume_id, 0xB2),
        (&clone.volume_id, 0xC3),
    ] {
        assert_eq!(lab.read(id), [byte; BLOCKS * 4096]);
    }
    for one in [&monday, &tuesday] {
        lab.delete_snapshot(&one.snapshot_id);
        lab.delete_snapshot(&one.snapshot_id);
    }
    assert_eq!(lab.snapshots(), []);
    assert_eq!(lab.read(&restored.volume_id), [0xA1; BLOCKS * 4096]);
    for id in [
        &restored.volume_id,
        &late.volume_id,
        &clone.volume_id,
        &empty,
    ] {
        lab.delete_volume(id);
    }
    until("nothing is left in the pools", || {
        lab.nodes.iter_mut().map(Node::lvols).sum::<usize>() == 0
    });
}

/// Goal: a snapshot outlives the node that served its volume, and a volume of it is in sync on all
/// its replicas at once. All lvols have the same contents, although hosts write while they are cut.
/// Method: a host that writes without a pause during several snapshots; the volumes of each are
/// compared block by block; one node is killed.
#[test]
fn a_snapshot_is_on_all_replicas() {
    let Some(mut lab) = Lab::start("a_snapshot_is_on_all_replicas", &["a", "b", "c"]) else {
        return;
    };
    let source = lab.volume("data", 8 * MIB, None, "a,b,c").volume_id;
    let subsystem = lab.publish(&source);
    lab.write(&source, &subsystem, 0);
    let mut host = lab.host(&source, &subsystem);
    let (driver, ends) = (&lab.driver, &AtomicBool::new(false));
    let made = std::thread::scope(|scope| {
        let made = scope.spawn(|| {
            let made = ["one", "two", "three"].map(|name| snapshot(driver, &source, name));
            ends.store(true, Ordering::Relaxed);
            made
        });
        let mut rounds = 0_u32;
        while !ends.load(Ordering::Relaxed) && !made.is_finished() {
            rounds += 1;
            for block in 0..BLOCKS as u64 {
                let data = vec![rounds as u8; 4096];
                assert_eq!(host.write(0, block, 1, &data), IoStatus::Ok);
            }
        }
        assert!(rounds > 1);
        made.join().expect("they are made")
    });
    host.disconnect();
    for (at, one) in made.iter().enumerate() {
        let of = of_snapshot(&one.snapshot_id);
        let id = lab.volume(&format!("of-{at}"), 0, of, "a,b,c").volume_id;
        let found = lab.nodes[0].call("volume_get", json!({ "name": id }));
        let states = found["replicas"].as_array().expect("a list").iter();
        let states: Vec<_> = states.map(|one| one["state"].clone()).collect();
        assert_eq!(states, ["in_sync"; 3], "{found:#}");
        // Compares the replicas. Blocks are written in order: none is newer than one before it.
        let data = lab.read(&id);
        let rounds: Vec<u8> = data.chunks(4096).map(|block| block[0]).collect();
        for pair in rounds.windows(2) {
            assert!(pair[0].wrapping_sub(pair[1]) <= 1, "{rounds:?}");
        }
    }
    lab.unpublish(&source);
    lab.kill("b");
    let listed = lab.snapshots();
    assert!(listed.iter().all(|one| one.ready_to_use), "{listed:?}");
    let left = lab.volume("left", 0, of_snapshot(&made[0].snapshot_id), "*");
    assert_eq!(lab.read(&left.volume_id).len(), BLOCKS * 4096);
}

/// Goal: a replica that lacks writes is never cut. Method: the replica on the node that serves the
/// volume, which would be cut first, is taken offline before a write.
#[test]
fn a_replica_that_is_not_in_sync_is_not_cut() {
    let Some(mut lab) = Lab::start("a_replica_that_is_not_in_sync_is_not_cut", &["a", "b"]) else {
        return;
    };
    let source = lab.volume("data", 8 * MIB, None, "a,b").volume_id;
    let subsystem = lab.publish(&source);
    lab.write(&source, &subsystem, 0xA1);
    lab.hand_over(&source, "a");
    lab.until_healthy(&source);
    let found = lab.nodes[0].call("volume_get", json!({ "name": source }));
    let mut replicas = found["replicas"].as_array().expect("a list").iter();
    let own = replicas
        .find(|replica| replica["node"] == "a")
        .expect("a replica");
    let params = json!({ "name": source, "replica": own["id"] });
    until("the volume is open", || {
        let offline = lab.nodes[0].try_call("volume_offline_replica", params.clone());
        offline.is_ok()
    });
    lab.write(&source, &subsystem, 0xB2);
    let snapshot = lab.snapshot(&source, "s");
    let listed = lab.nodes[0].call("volume_snapshot_list", json!({}));
    assert_eq!(listed[0]["lvols"].as_array().map(Vec::len), Some(1));
    assert_eq!(listed[0]["lvols"][0]["node"], "b", "{listed:#}");
    lab.nodes[0].call("volume_online_replica", params);
    let made = lab.volume("made", 0, of_snapshot(&snapshot.snapshot_id), "*");
    assert_eq!(lab.read(&made.volume_id), [0xB2; BLOCKS * 4096]);
    // From the node's command line, by the names of both.
    let own = lab.nodes[0].call(
        "volume_snapshot_create",
        json!({ "volume": source, "name": "own" }),
    );
    assert_eq!(own["state"], "ready", "{own:#}");
    assert_eq!(
        lab.snapshots().len(),
        1,
        "the driver leaves those of others alone"
    );
    lab.delete_snapshot(own["uuid"].as_str().expect("an id"));
    let own = json!({ "snapshot": "own" });
    lab.nodes[1].call("volume_snapshot_delete", own.clone());
    let refused = lab.nodes[1].try_call("volume_snapshot_delete", own);
    assert!(
        refused
            .expect_err("it is gone")
            .contains("there is no snapshot")
    );
}

/// Goal: a snapshot of a node that is away is shown as such, and cannot be used; its deletion is
/// recorded, and done when the node returns, or ends with the eviction of the node. A volume that
/// no node serves has snapshots, too. Method: the node with the only replica is killed.
#[test]
fn snapshots_of_a_node_that_is_away() {
    let Some(mut lab) = Lab::start("snapshots_of_a_node_that_is_away", &["a", "b"]) else {
        return;
    };
    let source = lab.volume("data", 8 * MIB, None, "b").volume_id;
    let first = lab.snapshot(&source, "first");
    let second = lab.snapshot(&source, "second");
    assert_eq!(lab.nodes[1].lvols(), 3);
    lab.kill("b");
    let all = lab.snapshots();
    assert!(all.iter().all(|one| !one.ready_to_use), "{all:?}");
    let refused = lab.try_volume("v", 0, of_snapshot(&first.snapshot_id), "*");
    let refused = refused.expect_err("its node is away");
    assert_eq!(refused.code(), Code::Unavailable);
    let why = refused.message();
    assert!(why.contains("node b") && why.contains("no lease"), "{why}");
    lab.delete_snapshot(&first.snapshot_id);
    lab.delete_snapshot(&first.snapshot_id);
    assert_eq!(lab.snapshots().len(), 1);
    lab.driver
        .refused(CREATE, asked(&source, "first"), Code::Unavailable);
    let listed = lab.nodes[0].call("volume_snapshot_list", json!({ "uuid": first.snapshot_id }));
    assert_eq!(listed[0]["state"], "deleting", "{listed:#}");

    lab.start_again("b");
    until("it is deleted", || lab.nodes[1].lvols() == 2);
    until("the other one is there again", || {
        lab.snapshots().iter().any(|one| one.ready_to_use)
    });
    let made = lab.volume("v", 0, of_snapshot(&second.snapshot_id), "*");
    lab.delete_volume(&made.volume_id);

    // It never returns.
    lab.kill("b");
    lab.nodes[0].call(
        "cluster_evict",
        json!({ "node": "b", "evict": true, "wait_s": 0 }),
    );
    lab.delete_snapshot(&second.snapshot_id);
    let listed = lab.nodes[0].call("volume_snapshot_list", json!({}));
    assert_eq!(listed, json!([]));
}
