//! The controller while its daemon fails: each failure has its code, nothing is left pending, and
//! the same call works afterwards.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use nacre_cluster_csi::messages::controller::{
    ControllerUnpublishVolumeRequest, DeleteVolumeRequest,
};
use nacre_cluster_csi::messages::{Mode, Nothing};
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
    served.refused(
        "Controller/ControllerGetCapabilities",
        Nothing {},
        Code::Unavailable,
    );
    assert!(began.elapsed() < Duration::from_secs(5));
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
    assert_eq!(only["thin"], false);
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

/// ControllerUnpublishVolume: answered only when the host is cut off; in a cluster not before every
/// node has heard of it or is fenced. ControllerPublishVolume: a publication that another program
/// replaces meanwhile is looked at again.
#[test]
fn a_host_is_cut_off_before_the_answer() {
    let hosts = Arc::new(Mutex::new(vec![HOST.to_owned(), OTHER.to_owned()]));
    let looks = Arc::new(AtomicUsize::new(0));
    let (all, seen) = (Arc::clone(&hosts), Arc::clone(&looks));
    let stolen = Arc::new(AtomicBool::new(true));
    let scripted = start(move |method, params| match method {
        "cluster_get_status" => Reply::Result(cluster()),
        "volume_get" => Reply::Result(volume(VOLUME)),
        "cluster_get_volumes" => Reply::Result(json!([{
            "id": VOLUME,
            "nodes": [{ "id": CLUSTER, "name": "a" }],
            "publication": {
                "nqn": "nqn.v", "hosts": *all.lock(), "any_host": false,
                "listen_addresses": [{ "trtype": "TCP", "traddr": "192.0.2.1", "trsvcid": "4420" }],
            },
        }])),
        "volume_publish" => {
            assert_eq!(params["nodes"], json!([CLUSTER]), "the nodes stay");
            let wanted = serde_json::from_value(params["hosts"].clone()).expect("texts");
            // The first addition is lost to another program.
            let is_addition = params["hosts"].as_array().map(Vec::len) > Some(1);
            if !(is_addition && stolen.swap(false, Ordering::Relaxed)) {
                *all.lock() = wanted;
            }
            Reply::Result(json!({}))
        }
        "volume_get_connections" => {
            let is_connected = seen.fetch_add(1, Ordering::Relaxed) < 2;
            let connection = json!([{ "host": HOST }]);
            Reply::Result(if is_connected { connection } else { json!([]) })
        }
        other => panic!("{other}"),
    });
    let began = Instant::now();
    let asked = ControllerUnpublishVolumeRequest {
        volume_id: VOLUME.to_owned(),
        node_id: HOST.to_owned(),
    };
    let _: Nothing = scripted
        .driver
        .call("Controller/ControllerUnpublishVolume", asked)
        .expect("cut off");
    assert!(began.elapsed() >= Duration::from_millis(200), "two leases");
    assert!(
        looks.load(Ordering::Relaxed) >= 3,
        "until no connection is left"
    );
    assert_eq!(*hosts.lock(), [OTHER]);
    let asked = publish(VOLUME, HOST, Mode::MultiNodeMultiWriter);
    let _: nacre_cluster_csi::messages::controller::ControllerPublishVolumeResponse = scripted
        .driver
        .call("Controller/ControllerPublishVolume", asked)
        .expect("the second try");
    assert_eq!(*hosts.lock(), [OTHER, HOST]);
    assert!(scripted.calls.load(Ordering::Relaxed) > 0);
}
