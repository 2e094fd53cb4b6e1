//! The controller while its daemon fails: each failure has its code, nothing is left pending, and
//! the same call works afterwards.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use nacre_cluster_csi::messages::controller::{
    ControllerExpandVolumeRequest, ControllerExpandVolumeResponse,
    ControllerUnpublishVolumeRequest, DeleteVolumeRequest, GetCapacityRequest,
};
use nacre_cluster_csi::messages::identity::ProbeResponse;
use nacre_cluster_csi::messages::{CapacityRange, Mode, Nothing};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tonic::Code;

use crate::client::{HOST, MIB, OTHER, Orchestrator, publish, wanted};
use crate::scripted::{Reply, start};

const VOLUME: &str = "5f0c1c3e-8b3a-4c55-9d0b-6b3f3f1c0c01";
const CLUSTER: &str = "0b5c1d3a-77c3-4b51-8a3c-1f0e6d2b9c11";

fn volume(id: &str) -> Value {
    json!({
        "name": "v", "uuid": id, "block_size": 512, "num_blocks": 8192, "replicas": [{}],
        "settings": { "description": "" }, "subsystems": [],
    })
}

fn cluster() -> Value {
    json!({ "cluster": { "id": CLUSTER, "name": "lab", "lease_ms": 100 }, "problem": null })
}

/// Error scheme: each failure of the daemon is a canonical code, and the next call is free to
/// succeed.
#[test]
fn each_failure_has_its_code() {
    let failures: Vec<(fn() -> Reply, Code)> = vec![
        (|| Reply::Garbage, Code::Internal),
        (|| Reply::Cut, Code::Unavailable),
        (|| Reply::Silence, Code::DeadlineExceeded),
        (|| Reply::Result(json!({ "name": 7 })), Code::Internal),
        (|| Reply::Refuse(-28), Code::ResourceExhausted),
        (|| Reply::Refuse(-16), Code::FailedPrecondition),
        (|| Reply::Refuse(-11), Code::Unavailable),
        (|| Reply::Refuse(-22), Code::InvalidArgument),
        (|| Reply::Refuse(-13), Code::PermissionDenied),
        (|| Reply::Refuse(-110), Code::DeadlineExceeded),
        (|| Reply::Refuse(-5), Code::Internal),
        (|| Reply::Refuse(-32601), Code::Internal),
    ];
    for (at, (failure, code)) in failures.into_iter().enumerate() {
        let is_sick = Arc::new(AtomicBool::new(true));
        let sick = Arc::clone(&is_sick);
        let scripted = start(move |method, params| match method {
            "cluster_get_status" => Reply::Result(cluster()),
            "volume_get" => Reply::Refuse(-19),
            "cluster_get_volumes" => Reply::Result(json!([])),
            "volume_create" if sick.load(Ordering::Relaxed) => failure(),
            "volume_create" => Reply::Result(volume(params["uuid"].as_str().expect("an id"))),
            other => panic!("{other}"),
        });
        let asked = || wanted("v", 4 * MIB);
        scripted
            .driver
            .refused("Controller/CreateVolume", asked(), code);
        is_sick.store(false, Ordering::Relaxed);
        let made = scripted.driver.create(asked());
        assert!(made.is_ok(), "failure {at}: {made:?}");
    }
}

/// A daemon that is away: UNAVAILABLE, at once.
#[test]
fn a_daemon_that_is_away_is_unavailable() {
    let driver = crate::controller::driver("/nonexistent/nacre.sock".into());
    let served = crate::client::Served::start(driver);
    let began = Instant::now();
    served.refused(
        "Controller/CreateVolume",
        wanted("v", MIB),
        Code::Unavailable,
    );
    let capacity = "Controller/GetCapacity";
    served.refused(capacity, GetCapacityRequest::default(), Code::Unavailable);
    assert!(began.elapsed() < Duration::from_secs(20));
}

/// Idempotency: the daemon dies after it has made the volume and before it answers; the repeated
/// call finds the volume, and makes no second one.
#[test]
fn an_unanswered_creation_is_found_again() {
    let made = Arc::new(Mutex::new(Vec::<Value>::new()));
    let all = Arc::clone(&made);
    let scripted = start(move |method, params| match method {
        "cluster_get_status" => Reply::Result(cluster()),
        "volume_get" => match all.lock().first() {
            Some(_) => Reply::Result(volume(params["name"].as_str().expect("an id"))),
            None => Reply::Refuse(-19),
        },
        "cluster_get_volumes" => Reply::Result(json!([])),
        "volume_create" => {
            all.lock().push(params.clone());
            Reply::Cut
        }
        other => panic!("{other}"),
    });
    let asked = || wanted("v", 4 * MIB);
    scripted
        .driver
        .refused("Controller/CreateVolume", asked(), Code::Unavailable);
    scripted.driver.create(asked()).expect("it is there");
    let made = made.lock();
    assert_eq!(made.len(), 1);
    // The contract with the cluster's placement.
    let only = &made[0];
    assert_eq!(
        (&only["size"], &only["replica_count"]),
        (&json!(4 << 20), &json!(1))
    );
    // Left out: the default of the method, which keeps room for the whole size.
    assert_ne!(only["thin"], true);
    assert!(only.get("devices").is_none() && only.get("replicas").is_none());
}

/// A cluster whose etcd is silent has no id: a volume made now would have another id later.
#[test]
fn nothing_is_made_without_the_id_of_the_cluster() {
    let scripted = start(|method, _| match method {
        "cluster_get_status" => {
            Reply::Result(json!({ "cluster": null, "problem": "etcd has not answered" }))
        }
        other => panic!("{other}"),
    });
    let asked = wanted("v", MIB);
    let why = scripted
        .driver
        .refused("Controller/CreateVolume", asked, Code::Unavailable);
    assert!(why.contains("etcd"), "{why}");
}

/// "Operation pending for volume": ABORTED, and other volumes are served meanwhile.
#[test]
fn a_second_call_for_a_volume_is_aborted() {
    let scripted = start(|method, params| match method {
        "cluster_get_status" => Reply::Result(cluster()),
        "volume_get" if params["name"] == VOLUME => {
            Reply::Late(Duration::from_millis(400), volume(VOLUME))
        }
        "volume_get" => Reply::Refuse(-19),
        "cluster_get_volumes" => Reply::Result(json!([])),
        "volume_delete" => Reply::Result(true.into()),
        other => panic!("{other}"),
    });
    let delete = |id: &str| DeleteVolumeRequest {
        volume_id: id.to_owned(),
    };
    let socket = &scripted.driver.socket;
    std::thread::scope(|scope| {
        let first = scope.spawn(|| {
            let slow = Orchestrator::connect(socket);
            slow.call::<_, Nothing>("Controller/DeleteVolume", delete(VOLUME))
        });
        std::thread::sleep(Duration::from_millis(150));
        scripted
            .driver
            .refused("Controller/DeleteVolume", delete(VOLUME), Code::Aborted);
        let other = delete(CLUSTER);
        let other = scripted
            .driver
            .call::<_, Nothing>("Controller/DeleteVolume", other);
        assert!(other.is_ok(), "{other:?}");
        assert!(!first.is_finished());
        assert!(first.join().expect("no panic").is_ok());
    });
    let again = scripted
        .driver
        .call::<_, Nothing>("Controller/DeleteVolume", delete(VOLUME));
    assert!(again.is_ok(), "{again:?}");
}

/// Concurrency is bounded: more calls than places are refused, and places are free again.
#[test]
fn too_many_calls_are_refused() {
    let scripted = start(|method, _| match method {
        "cluster_get_status" => Reply::Result(cluster()),
        "volume_get" => Reply::Silence,
        other => panic!("{other}"),
    });
    let socket = &scripted.driver.socket;
    let (refused, late) = (AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for at in 0..80_u128 {
            let (refused, late) = (&refused, &late);
            scope.spawn(move || {
                let volume_id = uuid::Uuid::from_u128(at).to_string();
                let asked = DeleteVolumeRequest { volume_id };
                let one = Orchestrator::connect(socket);
                let answer = one.call::<_, Nothing>("Controller/DeleteVolume", asked);
                match answer.expect_err("the daemon is silent").code() {
                    Code::Unavailable => refused.fetch_add(1, Ordering::Relaxed),
                    Code::DeadlineExceeded => late.fetch_add(1, Ordering::Relaxed),
                    other => panic!("{other:?}"),
                };
            });
        }
    });
    assert_eq!(refused.into_inner() + late.into_inner(), 80);
    let asked = DeleteVolumeRequest {
        volume_id: VOLUME.to_owned(),
    };
    scripted
        .driver
        .refused("Controller/DeleteVolume", asked, Code::DeadlineExceeded);
}

/// A cluster of one volume, as the scripted daemon gives it.
#[derive(Clone)]
struct Shown {
    hosts: Arc<Mutex<Vec<String>>>,
    any_host: bool,
    /// The node that has not confirmed the publication, and why.
    unconfirmed: Arc<Mutex<Option<&'static str>>>,
    /// Calls in which the host is still connected.
    looks: Arc<AtomicUsize>,
}

impl Shown {
    fn to(hosts: &[&str]) -> Self {
        let hosts = hosts.iter().map(|host| (*host).to_owned()).collect();
        Self {
            hosts: Arc::new(Mutex::new(hosts)),
            any_host: false,
            unconfirmed: Arc::default(),
            looks: Arc::default(),
        }
    }

    fn answer(&self, method: &str, params: &Value) -> Reply {
        let node = json!({ "id": CLUSTER, "name": "a" });
        Reply::Result(match method {
            "cluster_get_status" => cluster(),
            "volume_get" => volume(VOLUME),
            "cluster_get_nodes" => json!([{ "id": CLUSTER, "this_node": true }]),
            "cluster_get_unconfirmed" => {
                assert_eq!(params["volume"], VOLUME);
                let found = self.unconfirmed.lock().into_iter();
                let found =
                    found.map(|reason| json!({ "id": OTHER_NODE, "name": "b", "reason": reason }));
                found.collect::<Vec<_>>().into()
            }
            "cluster_get_volumes" => json!([{
                "id": VOLUME,
                "nodes": [node, { "id": OTHER_NODE, "name": null }],
                "holder": node,
                "lease_stands": true,
                "publication": {
                    "nqn": "nqn.v", "hosts": *self.hosts.lock(), "any_host": self.any_host,
                    "listen_addresses":
                        [{ "trtype": "TCP", "traddr": "192.0.2.1", "trsvcid": "4420" }],
                },
            }]),
            "volume_publish" => {
                let nodes = json!([CLUSTER]);
                assert_eq!(
                    params["nodes"], nodes,
                    "nodes stay, but for one that has left"
                );
                *self.hosts.lock() =
                    serde_json::from_value(params["hosts"].clone()).expect("texts");
                json!({})
            }
            "volume_get_connections" => {
                let is_connected = self.looks.fetch_add(1, Ordering::Relaxed) < 2;
                let connection = json!([{ "host": HOST }]);
                if is_connected { connection } else { json!([]) }
            }
            "volume_unpublish" => true.into(),
            other => panic!("{other}"),
        })
    }
}

const OTHER_NODE: &str = "7d0c1d3a-77c3-4b51-8a3c-1f0e6d2b9c22";
const UNPUBLISH: &str = "Controller/ControllerUnpublishVolume";

fn unpublished(host: &str) -> ControllerUnpublishVolumeRequest {
    ControllerUnpublishVolumeRequest {
        volume_id: VOLUME.to_owned(),
        node_id: host.to_owned(),
    }
}

/// ControllerUnpublishVolume: answered only when the host is cut off. The same for a host that an
/// earlier call removed.
/// ControllerPublishVolume: a publication that another program replaces meanwhile is looked at
/// again.
#[test]
fn a_host_is_cut_off_before_the_answer() {
    let shown = Shown::to(&[HOST, OTHER]);
    let stolen = Arc::new(AtomicBool::new(true));
    let answers = shown.clone();
    let scripted = start(move |method, params| {
        let is_addition = params["hosts"].as_array().map(Vec::len) > Some(1);
        if method == "volume_publish" && is_addition && stolen.swap(false, Ordering::Relaxed) {
            // The first addition is lost to another program.
            return Reply::Result(json!({}));
        }
        answers.answer(method, params)
    });
    for _ in 0..2 {
        let _: Nothing = scripted
            .driver
            .call(UNPUBLISH, unpublished(HOST))
            .expect("cut off");
        assert!(
            shown.looks.load(Ordering::Relaxed) >= 3,
            "until no connection is left"
        );
        assert_eq!(*shown.hosts.lock(), [OTHER]);
        shown.looks.store(0, Ordering::Relaxed);
    }
    let asked = publish(VOLUME, HOST, Mode::MultiNodeMultiWriter);
    let _: nacre_cluster_csi::messages::controller::ControllerPublishVolumeResponse = scripted
        .driver
        .call("Controller/ControllerPublishVolume", asked)
        .expect("the second try");
    assert_eq!(*shown.hosts.lock(), [OTHER, HOST]);
    assert!(scripted.calls.load(Ordering::Relaxed) > 0);
}

/// ControllerUnpublishVolume: in a cluster, not before every node that may still let the host in
/// has confirmed that it is cut off, or is fenced. The host is not connected to this node.
#[test]
fn a_silent_node_delays_the_answer() {
    for reason in [
        "not_in_effect",
        "not_known",
        "serves_without_lease",
        "not_opened",
        "later",
    ] {
        let shown = Shown::to(&[HOST]);
        shown.looks.store(2, Ordering::Relaxed);
        *shown.unconfirmed.lock() = Some(reason);
        let (answers, back) = (shown.clone(), shown.clone());
        let scripted = start(move |method, params| answers.answer(method, params));
        let began = Instant::now();
        let later = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(500));
            *back.unconfirmed.lock() = None;
        });
        let _: Nothing = scripted
            .driver
            .call(UNPUBLISH, unpublished(HOST))
            .expect("cut off");
        assert!(began.elapsed() >= Duration::from_millis(500), "{reason}");
        later.join().expect("no panic");
    }
}

/// ControllerUnpublishVolume: a node that does not confirm makes the call fail with a code after
/// which the orchestrator calls again, and never with success. The text names the node.
#[test]
fn a_node_that_never_confirms_fails_the_call() {
    let shown = Shown::to(&[HOST]);
    shown.looks.store(2, Ordering::Relaxed);
    *shown.unconfirmed.lock() = Some("serves_without_lease");
    let scripted = start(move |method, params| shown.answer(method, params));
    let asked = unpublished(HOST);
    let why = scripted
        .driver
        .refused(UNPUBLISH, asked, Code::DeadlineExceeded);
    assert!(why.contains("node b has no lease"), "{why}");
}

/// Only an answer that the volume has no device here says that no host is connected.
#[test]
fn an_unknown_connection_is_no_cut_off() {
    for (code, expected) in [(-19, None), (-11, None), (-5, Some(Code::Internal))] {
        let shown = Shown::to(&[]);
        let scripted = start(move |method, params| match method {
            "volume_get_connections" => Reply::Refuse(code),
            _ => shown.answer(method, params),
        });
        match expected {
            Some(expected) => {
                let _ = scripted
                    .driver
                    .refused(UNPUBLISH, unpublished(HOST), expected);
            }
            None => {
                let _: Nothing = scripted
                    .driver
                    .call(UNPUBLISH, unpublished(HOST))
                    .expect("no device");
            }
        }
    }
}

/// A volume that any host may use has no host that can be cut off: it is neither published nor
/// reported as unpublished.
#[test]
fn a_volume_for_any_host_is_refused() {
    let shown = Shown {
        any_host: true,
        ..Shown::to(&[])
    };
    let scripted = start(move |method, params| shown.answer(method, params));
    let asked = publish(VOLUME, HOST, Mode::MultiNodeMultiWriter);
    let call = "Controller/ControllerPublishVolume";
    scripted
        .driver
        .refused(call, asked, Code::FailedPrecondition);
    scripted
        .driver
        .refused(UNPUBLISH, unpublished(HOST), Code::FailedPrecondition);
}

/// A volume that the daemon does not list, and the cluster has, is neither deleted nor absent.
#[test]
fn the_cluster_decides_whether_a_volume_exists() {
    let is_there = Arc::new(AtomicBool::new(true));
    let there = Arc::clone(&is_there);
    let scripted = start(move |method, _| match method {
        "cluster_get_status" => Reply::Result(cluster()),
        "volume_get" | "volume_get_connections" => Reply::Refuse(-19),
        "cluster_get_volumes" if there.load(Ordering::Relaxed) => Reply::Result(json!([{
            "id": VOLUME, "holder": null, "lease_stands": false, "nodes": [],
            "publication": null,
        }])),
        "cluster_get_volumes" | "cluster_get_unconfirmed" => Reply::Result(json!([])),
        other => panic!("{other}"),
    });
    let delete = || DeleteVolumeRequest {
        volume_id: VOLUME.to_owned(),
    };
    let (deletion, publication) = (
        "Controller/DeleteVolume",
        "Controller/ControllerPublishVolume",
    );
    let published = || publish(VOLUME, HOST, Mode::SingleNodeWriter);
    let driver = &scripted.driver;
    driver.refused(deletion, delete(), Code::Unavailable);
    driver.refused(publication, published(), Code::Unavailable);
    driver.refused(UNPUBLISH, unpublished(HOST), Code::Unavailable);
    is_there.store(false, Ordering::Relaxed);
    let _: Nothing = driver.call(deletion, delete()).expect("it is gone");
    driver.refused(publication, published(), Code::NotFound);
    let _: Nothing = driver.call(UNPUBLISH, unpublished(HOST)).expect("gone");
}

/// ControllerExpandVolume: by the id of the volume. ABORTED if another node took it meanwhile.
#[test]
fn a_volume_that_moved_is_grown_later() {
    let is_moved = Arc::new(AtomicBool::new(true));
    let moved = Arc::clone(&is_moved);
    let shown = Shown::to(&[HOST]);
    let scripted = start(move |method, params| match method {
        "volume_grow" => {
            assert_eq!(params["name"], VOLUME);
            if moved.swap(false, Ordering::Relaxed) {
                Reply::Refuse(-1)
            } else {
                let mut grown = volume(VOLUME);
                grown["num_blocks"] = 16384.into();
                Reply::Result(grown)
            }
        }
        _ => shown.answer(method, params),
    });
    let asked = || ControllerExpandVolumeRequest {
        volume_id: VOLUME.to_owned(),
        capacity_range: Some(CapacityRange {
            required_bytes: 8 * MIB,
            limit_bytes: 0,
        }),
        volume_capability: None,
    };
    let call = "Controller/ControllerExpandVolume";
    scripted.driver.refused(call, asked(), Code::Aborted);
    let grown: ControllerExpandVolumeResponse = scripted.driver.call(call, asked()).expect("now");
    assert_eq!(grown.capacity_bytes, 8 * MIB);
}

/// A daemon that comes back in another cluster: new volumes have ids of that one.
#[test]
fn the_cluster_is_asked_anew() {
    let is_other = Arc::new(AtomicBool::new(false));
    let other = Arc::clone(&is_other);
    let scripted = start(move |method, params| match method {
        "cluster_get_status" => {
            let mut found = cluster();
            if other.load(Ordering::Relaxed) {
                found["cluster"]["id"] = OTHER_NODE.into();
            }
            Reply::Result(found)
        }
        "volume_get" => Reply::Refuse(-19),
        "cluster_get_volumes" => Reply::Result(json!([])),
        "volume_create" => Reply::Result(volume(params["uuid"].as_str().expect("an id"))),
        other => panic!("{other}"),
    });
    let asked = || wanted("v", 4 * MIB);
    let first = scripted.driver.create(asked()).expect("made");
    is_other.store(true, Ordering::Relaxed);
    let second = scripted.driver.create(asked()).expect("made");
    assert_ne!(first.0, second.0);
}

/// Probe: while as many calls run as may, and while the daemon is silent. It takes no place of a
/// call.
#[test]
fn a_busy_driver_is_probed() {
    let scripted = start(|method, _| match method {
        "cluster_get_status" => Reply::Result(cluster()),
        "volume_get" => Reply::Silence,
        other => panic!("{other}"),
    });
    let socket = &scripted.driver.socket;
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for at in 0..80_u128 {
            let is_over = &is_over;
            scope.spawn(move || {
                let one = Orchestrator::connect(socket);
                while !is_over.load(Ordering::Relaxed) {
                    let volume_id = uuid::Uuid::from_u128(at).to_string();
                    let asked = DeleteVolumeRequest { volume_id };
                    let answer = one.call::<_, Nothing>("Controller/DeleteVolume", asked);
                    let _ = answer.expect_err("the daemon is silent");
                }
            });
        }
        let probe = Orchestrator::connect(socket);
        for _ in 0..40 {
            let answer: Result<ProbeResponse, _> = probe.call("Identity/Probe", Nothing {});
            let ready = answer.map(|answer| answer.ready.is_some_and(|ready| ready.value));
            is_over.store(ready.is_err(), Ordering::Relaxed);
            assert!(ready.expect("an answer"));
            std::thread::sleep(Duration::from_millis(20));
        }
        is_over.store(true, Ordering::Relaxed);
    });
}

/// Readiness: a daemon that does not answer costs a probe a bounded time.
#[test]
fn a_silent_daemon_is_not_ready() {
    let dir = tempfile::tempdir().expect("a directory");
    let socket = dir.path().join("nacre.sock");
    let _silent = std::os::unix::net::UnixListener::bind(&socket).expect("a socket");
    let patience = Duration::from_secs(60);
    let connect = move || nacre_engine_rpc::client::Client::connect(&socket, patience);
    let daemon = nacre_cluster_csi::Daemon::new(connect);
    let began = Instant::now();
    for _ in 0..3 {
        assert!(!daemon.is_ready());
    }
    assert!(began.elapsed() < Duration::from_secs(10));
}

/// Readiness: a look that died does not keep later probes from looking.
#[test]
fn a_look_that_died_is_repeated() {
    let looks = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&looks);
    let daemon = nacre_cluster_csi::Daemon::new(move || {
        let look = count.fetch_add(1, Ordering::Relaxed);
        panic!("look {look} dies");
    });
    let end = Instant::now() + Duration::from_secs(20);
    while looks.load(Ordering::Relaxed) < 3 {
        assert!(!daemon.is_ready());
        assert!(Instant::now() < end, "it looks no more");
    }
}

/// The end of the driver: a call whose caller has left goes on, and the driver waits for its end.
#[test]
fn the_end_waits_for_calls_without_a_caller() {
    let is_deleted = Arc::new(AtomicBool::new(false));
    let deleted = Arc::clone(&is_deleted);
    let scripted = start(move |method, _| match method {
        "cluster_get_status" => Reply::Result(cluster()),
        "volume_get" => Reply::Late(Duration::from_millis(400), volume(VOLUME)),
        "cluster_get_volumes" => Reply::Result(json!([])),
        "volume_delete" => {
            deleted.store(true, Ordering::Relaxed);
            Reply::Result(true.into())
        }
        other => panic!("{other}"),
    });
    let driver = crate::controller::driver(scripted.daemon.clone());
    let dir = tempfile::tempdir().expect("a directory");
    let socket = dir.path().join("csi.sock");
    let endpoint: nacre_cluster_csi::Endpoint =
        socket.to_str().expect("text").parse().expect("a socket");
    let (end, ended) = tokio::sync::oneshot::channel::<()>();
    let serve = move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        let served = runtime.block_on(nacre_cluster_csi::serve(
            &endpoint,
            Arc::new(driver),
            async {
                let _ = ended.await;
            },
        ));
        // A runtime that is dropped would wait for the call itself.
        runtime.shutdown_background();
        served
    };
    let server = std::thread::spawn(serve);
    while !socket.exists() {
        std::thread::sleep(Duration::from_millis(5));
    }
    let asked = DeleteVolumeRequest {
        volume_id: VOLUME.to_owned(),
    };
    let caller = Orchestrator::connect(&socket);
    caller.leave("Controller/DeleteVolume", asked, Duration::from_millis(150));
    end.send(()).expect("the server runs");
    let served = server.join().expect("no panic");
    assert!(served.is_ok(), "{served:?}");
    assert!(is_deleted.load(Ordering::Relaxed));
}
