//! Snapshots and clones, of a real daemon with two pools in no cluster, and of a scripted one.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use nacre_bdev::Status as IoStatus;
use nacre_cluster_csi::messages::controller::{
    ControllerCall, ControllerGetCapabilitiesResponse, ControllerPublishVolumeResponse,
    CreateSnapshotRequest, CreateSnapshotResponse, CreateVolumeRequest, CreateVolumeResponse,
    DeleteSnapshotRequest, ListSnapshotsRequest, ListSnapshotsResponse, SnapshotInfo, Source,
    SourceId, VolumeContentSource, VolumeInfo,
};
use nacre_cluster_csi::messages::{CapacityRange, Mode, Nothing};
use nacre_tests::host::{Host, options};
use nacre_tests::target::nqn;
use serde_json::{Value, json};
use tonic::{Code, Status};
use uuid::Uuid;

use crate::client::{HOST, MIB, Orchestrator, publish, texts, wanted};
use crate::controller::World;
use crate::scripted::{Reply, start};

const ABSENT: &str = "5f0c1c3e-8b3a-4c55-9d0b-6b3f3f1c0c01";
const AWAY: &str = "5f0c1c3e-8b3a-4c55-9d0b-6b3f3f1c0c02";
const CREATE: &str = "Controller/CreateSnapshot";
const CREATE_VOLUME: &str = "Controller/CreateVolume";
const BLOCKS: usize = 4;

fn asked(volume: &str, name: &str) -> CreateSnapshotRequest {
    CreateSnapshotRequest {
        source_volume_id: volume.to_owned(),
        name: name.to_owned(),
        ..Default::default()
    }
}

fn made(driver: &Orchestrator, volume: &str, name: &str) -> SnapshotInfo {
    let answer = driver.call::<_, CreateSnapshotResponse>(CREATE, asked(volume, name));
    answer.expect("it is made").snapshot.expect("a snapshot")
}

fn delete(driver: &Orchestrator, id: &str) {
    let asked = DeleteSnapshotRequest {
        snapshot_id: id.to_owned(),
    };
    let deleted = driver.call::<_, Nothing>("Controller/DeleteSnapshot", asked);
    deleted.expect("deleted");
}

fn list(
    driver: &Orchestrator,
    asked: ListSnapshotsRequest,
) -> Result<(Vec<String>, String), Status> {
    let found: ListSnapshotsResponse = driver.call("Controller/ListSnapshots", asked)?;
    let ids = found.entries.into_iter().filter_map(|one| one.snapshot);
    Ok((ids.map(|one| one.snapshot_id).collect(), found.next_token))
}

fn all(driver: &Orchestrator) -> Vec<String> {
    list(driver, ListSnapshotsRequest::default())
        .expect("a list")
        .0
}

fn of_snapshot(id: &str) -> VolumeContentSource {
    let source = Source::Snapshot(SourceId { id: id.to_owned() });
    VolumeContentSource {
        source: Some(source),
    }
}

fn of_volume(id: &str) -> VolumeContentSource {
    let source = Source::Volume(SourceId { id: id.to_owned() });
    VolumeContentSource {
        source: Some(source),
    }
}

/// Two thin replicas, with these contents.
fn with_source(name: &str, bytes: i64, source: VolumeContentSource) -> CreateVolumeRequest {
    CreateVolumeRequest {
        parameters: texts(&[("replicas", "2"), ("thin", "true")]),
        volume_content_source: Some(source),
        ..wanted(name, bytes)
    }
}

fn volume(driver: &Orchestrator, asked: CreateVolumeRequest) -> VolumeInfo {
    let answer = driver.call::<_, CreateVolumeResponse>(CREATE_VOLUME, asked);
    answer.expect("it is made").volume.expect("a volume")
}

/// A host with the volume.
fn host(world: &World, id: &str) -> Host {
    let published: ControllerPublishVolumeResponse = world
        .call(
            "Controller/ControllerPublishVolume",
            publish(id, HOST, Mode::SingleNodeWriter),
        )
        .expect("published");
    let context = published.publish_context;
    let addresses = context["addresses"].replace("tcp://", "");
    let address: SocketAddr = addresses.parse().expect("one address");
    let mut options = options(&context["nqn"]);
    options.hostnqn = nqn(HOST);
    Host::connected(address, options, &[1])
}

fn write(host: &mut Host, byte: u8) {
    let written = host.write(0, 0, BLOCKS as u32, &vec![byte; BLOCKS * 4096]);
    assert_eq!(written, IoStatus::Ok);
    assert_eq!(host.flush(0), IoStatus::Ok);
}

fn read(world: &World, id: &str) -> Vec<u8> {
    let mut host = host(world, id);
    let data = host.read(0, 0, BLOCKS as u32, BLOCKS * 4096);
    host.disconnect();
    world.unpublish(id, HOST);
    data
}

/// Goal: a snapshot has the contents of its moment while a host writes. A volume of it, and a clone
/// of a volume, have the contents of their sources, with all their replicas. Snapshots outlive
/// their volume (DeleteVolume), and clones their sources. Method: a host over NVMe/TCP.
#[test]
fn volumes_have_the_contents_of_their_sources() {
    let mut world = World::new();
    let first = CreateVolumeRequest {
        parameters: texts(&[("replicas", "2"), ("thin", "true")]),
        ..wanted("data", 4 * MIB)
    };
    let source = volume(&world, first).volume_id;
    let mut writer = host(&world, &source);
    write(&mut writer, 0xA1);
    let snapshot = made(&world, &source, "monday");
    assert_eq!(snapshot.size_bytes, 4 * MIB);
    assert_eq!(snapshot.source_volume_id, source);
    assert!(snapshot.ready_to_use);
    assert!(snapshot.creation_time.is_some_and(|time| time.seconds > 0));
    write(&mut writer, 0xB2);

    // Larger than its source.
    let restored = volume(
        &world,
        with_source("restored", 8 * MIB, of_snapshot(&snapshot.snapshot_id)),
    );
    assert_eq!(restored.capacity_bytes, 8 * MIB);
    let expected = Some(of_snapshot(&snapshot.snapshot_id));
    assert_eq!(restored.content_source, expected, "MUST be in the answer");
    let clone = volume(&world, with_source("clone", 0, of_volume(&source)));
    assert_eq!(clone.capacity_bytes, 4 * MIB, "as its source");
    assert_eq!(clone.content_source, Some(of_volume(&source)));
    assert_eq!(
        all(&world),
        std::slice::from_ref(&snapshot.snapshot_id),
        "a clone leaves no snapshot"
    );
    for id in [&restored.volume_id, &clone.volume_id] {
        world.until_healthy(id);
    }
    assert_eq!(read(&world, &restored.volume_id), [0xA1; BLOCKS * 4096]);
    assert_eq!(read(&world, &clone.volume_id), [0xB2; BLOCKS * 4096]);
    write(&mut writer, 0xC3);
    writer.disconnect();
    world.unpublish(&source, HOST);

    world.delete(&source);
    assert_eq!(all(&world), std::slice::from_ref(&snapshot.snapshot_id));
    let late = with_source("late", 4 * MIB, of_snapshot(&snapshot.snapshot_id));
    let late = volume(&world, late).volume_id;
    delete(&world, &snapshot.snapshot_id);
    assert_eq!(read(&world, &late), [0xA1; BLOCKS * 4096]);
    assert_eq!(read(&world, &clone.volume_id), [0xB2; BLOCKS * 4096]);
    for id in [&restored.volume_id, &clone.volume_id, &late] {
        world.delete(id);
    }
    let left = world.process.call("lvol_list", json!({}));
    assert_eq!(left, json!([]));
}

/// ControllerGetCapabilities: CREATE_DELETE_SNAPSHOT, LIST_SNAPSHOTS and CLONE_VOLUME.
#[test]
fn a_daemon_alone_has_snapshots() {
    let world = World::new();
    let found: ControllerGetCapabilitiesResponse = world
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
}

/// CreateSnapshot: idempotent by name; ALREADY_EXISTS for another volume. DeleteSnapshot: OK for
/// one that is not there, also after its volume; nothing else is deleted by its id. Field
/// requirements: INVALID_ARGUMENT. NOT_FOUND: there is no such volume.
#[test]
fn snapshots_are_made_and_deleted_once() {
    let mut world = World::new();
    let (one, two) = (world.volume("first"), world.volume("second"));
    let first = made(&world, &one, "s");
    assert_eq!(made(&world, &one, "s"), first);
    world.refused(CREATE, asked(&two, "s"), Code::AlreadyExists);
    assert_ne!(made(&world, &two, "t").snapshot_id, first.snapshot_id);
    for (bad, code) in [
        (asked(&one, ""), Code::InvalidArgument),
        (asked("", "u"), Code::InvalidArgument),
        (asked(&one, "a\u{7}"), Code::InvalidArgument),
        (asked(&one, &"x".repeat(129)), Code::InvalidArgument),
        (asked(ABSENT, "u"), Code::NotFound),
        (asked("no id", "u"), Code::NotFound),
        (
            CreateSnapshotRequest {
                parameters: texts(&[("color", "red")]),
                ..asked(&one, "u")
            },
            Code::InvalidArgument,
        ),
    ] {
        world.refused(CREATE, bad, code);
    }
    let foreign = CreateSnapshotRequest {
        parameters: texts(&[("csi.storage.k8s.io/volumesnapshot/name", "s")]),
        ..asked(&one, "s")
    };
    let again: CreateSnapshotResponse = world.call(CREATE, foreign).expect("idempotent");
    assert_eq!(again.snapshot, Some(first.clone()));

    let lvols = world.process.call("lvol_list", json!({}));
    let lvols = lvols.as_array().expect("a list");
    let of_volume = lvols.iter().find(|lvol| lvol["snapshot"] == false);
    let of_volume = of_volume.expect("an lvol")["uuid"]
        .as_str()
        .expect("an id")
        .to_owned();
    for id in [
        &first.snapshot_id,
        &first.snapshot_id,
        ABSENT,
        "no id",
        &of_volume,
    ] {
        delete(&world, id);
    }
    let empty = DeleteSnapshotRequest::default();
    world.refused("Controller/DeleteSnapshot", empty, Code::InvalidArgument);
    assert_eq!(all(&world).len(), 1);
    let left = world.process.call("lvol_list", json!({}));
    assert_eq!(left.as_array().expect("a list").len(), lvols.len() - 1);
}

/// Goal: a snapshot of a pool that is away is neither gone nor made anew: UNAVAILABLE, until the
/// daemon forgets the pool. Method: the disk of the pool is removed.
#[test]
fn snapshots_of_a_pool_that_is_away() {
    const DELETE: &str = "Controller/DeleteSnapshot";
    let mut world = World::new();
    let first = CreateVolumeRequest {
        parameters: texts(&[("replicas", "2"), ("thin", "true")]),
        ..wanted("data", 4 * MIB)
    };
    let source = volume(&world, first).volume_id;
    let id = made(&world, &source, "s").snapshot_id;
    let lvol = world.process.call("lvol_get", json!({ "lvol": id }));
    let pool = lvol["pool"].as_str().expect("a name").to_owned();
    let disk = pool.trim_start_matches("pool-");
    let removed = world
        .process
        .call("bdev_malloc_delete", json!({ "name": disk }));
    assert_eq!(removed, true);
    let end = std::time::Instant::now() + std::time::Duration::from_secs(30);
    let pools = |world: &mut World| world.process.call("pool_list", json!({}));
    while pools(&mut world).as_array().expect("a list").len() == 2 {
        assert!(std::time::Instant::now() < end, "{pool} stays open");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let ask = |id: &str| DeleteSnapshotRequest {
        snapshot_id: id.to_owned(),
    };
    world.refused(DELETE, ask(&id), Code::Unavailable);
    world.refused(CREATE, asked(&source, "s"), Code::Unavailable);
    world.process.call("pool_export", json!({ "pool": pool }));
    delete(&world, &id);
    assert_ne!(made(&world, &source, "s").creation_time, None);
}

/// ListSnapshots: pages by max_entries and next_token; filters by snapshot and volume, where an
/// unknown one is an empty list; ABORTED for a strange token; INVALID_ARGUMENT for a negative
/// number.
#[test]
fn snapshots_are_listed_in_pages() {
    let world = World::new();
    let (one, two) = (world.volume("first"), world.volume("second"));
    for name in ["a", "b", "c"] {
        made(&world, &one, name);
    }
    made(&world, &two, "d");
    let page = |max_entries: i32, token: &str| {
        let asked = ListSnapshotsRequest {
            max_entries,
            starting_token: token.to_owned(),
            ..Default::default()
        };
        list(&world, asked)
    };
    let whole = all(&world);
    assert_eq!(whole.len(), 4);
    let (first, token) = page(3, "").expect("a page");
    assert_eq!(first, whole[..3]);
    // The token stays valid when the snapshot that it names goes.
    delete(&world, &first[2]);
    let (second, end) = page(3, &token).expect("a page");
    assert_eq!((&second[..], &*end), (&whole[3..], ""));
    assert_eq!(page(1, "x").expect_err("strange").code(), Code::Aborted);
    let negative = page(-1, "").expect_err("negative");
    assert_eq!(negative.code(), Code::InvalidArgument);
    let other = made(&world, &two, "e").snapshot_id;
    let of = |volume: &str, snapshot: &str| {
        let asked = ListSnapshotsRequest {
            source_volume_id: volume.to_owned(),
            snapshot_id: snapshot.to_owned(),
            ..Default::default()
        };
        list(&world, asked).expect("a list").0
    };
    assert!(of(&two, "").contains(&other) && !of(&one, "").contains(&other));
    assert_eq!(of("", &other), std::slice::from_ref(&other));
    assert_eq!(of(&one, &other), [""; 0]);
    assert_eq!(of("", ABSENT), [""; 0]);
    assert_eq!(of("no id", ""), [""; 0]);
}

/// CreateVolume: NOT_FOUND: no such source; OUT_OF_RANGE: smaller than its source; ALREADY_EXISTS:
/// the volume has another source; INVALID_ARGUMENT: no source is named, it has no pool below, or
/// the parameters exclude its pool. CreateSnapshot: FAILED_PRECONDITION without a pool below.
#[test]
fn sources_are_refused() {
    let mut world = World::new();
    let source = world.volume("v");
    let snapshot = made(&world, &source, "s").snapshot_id;
    let make = |name: &str, bytes, source| with_source(name, bytes, source);
    for absent in [
        of_snapshot(ABSENT),
        of_volume(ABSENT),
        of_snapshot("no id"),
        // A snapshot is no volume, and the other way round.
        of_snapshot(&source),
        of_volume(&snapshot),
    ] {
        world.refused(CREATE_VOLUME, make("new", 0, absent), Code::NotFound);
    }
    for unnamed in [
        VolumeContentSource::default(),
        of_snapshot(""),
        of_volume(""),
    ] {
        world.refused(
            CREATE_VOLUME,
            make("new", 0, unnamed),
            Code::InvalidArgument,
        );
    }
    let small = make("new", MIB, of_snapshot(&snapshot));
    world.refused(CREATE_VOLUME, small, Code::OutOfRange);
    let limited = CreateVolumeRequest {
        capacity_range: Some(CapacityRange {
            required_bytes: 0,
            limit_bytes: 2 * MIB,
        }),
        ..make("new", 0, of_volume(&source))
    };
    world.refused(CREATE_VOLUME, limited, Code::OutOfRange);
    let pool = world.process.call("lvol_get", json!({ "lvol": snapshot }));
    let other = match pool["pool"].as_str() {
        Some("pool-one") => "pool-two",
        _ => "pool-one",
    };
    let elsewhere = CreateVolumeRequest {
        parameters: texts(&[("pool", other)]),
        ..make("new", 0, of_snapshot(&snapshot))
    };
    let why = world.refused(CREATE_VOLUME, elsewhere, Code::InvalidArgument);
    assert!(why.contains("parameter pool"), "{why}");
    assert_eq!(
        all(&world),
        std::slice::from_ref(&snapshot),
        "no copy is left"
    );

    let taken = volume(&world, make("taken", 0, of_snapshot(&snapshot)));
    volume(&world, make("taken", 0, of_snapshot(&snapshot)));
    // A description of an operator names no source: the daemon's record of the volume does.
    for from in [of_snapshot(&snapshot), of_volume(&source)] {
        let name = format!("described-{}", from == of_volume(&source));
        let clone = volume(&world, make(&name, 0, from.clone()));
        let own = json!({ "name": clone.volume_id, "settings": { "description": "mine" } });
        world.process.call("volume_set", own);
        let again = volume(&world, make(&name, 0, from.clone()));
        assert_eq!(again, clone);
        assert_eq!(again.content_source, Some(from.clone()));
        assert_ne!(taken.volume_id, clone.volume_id);
        for other in [
            of_snapshot(&snapshot),
            of_volume(&source),
            of_volume(&again.volume_id),
        ] {
            if other != from {
                world.refused(CREATE_VOLUME, make(&name, 0, other), Code::AlreadyExists);
            }
        }
        let empty = CreateVolumeRequest {
            volume_content_source: None,
            ..make(&name, 4 * MIB, from)
        };
        world.refused(CREATE_VOLUME, empty, Code::AlreadyExists);
    }
    for other in [Some(of_volume(&source)), None] {
        let other = CreateVolumeRequest {
            volume_content_source: other,
            ..make("taken", 4 * MIB, of_snapshot(&snapshot))
        };
        world.refused(CREATE_VOLUME, other, Code::AlreadyExists);
    }

    world.process.create_ram("bare", 4096, 16 << 20);
    let bare = json!({ "name": "bare-volume", "devices": ["bare"] });
    let bare = world.process.call("volume_create", bare);
    let bare = bare["uuid"].as_str().expect("an id");
    world.refused(CREATE, asked(bare, "b"), Code::FailedPrecondition);
    let clone = make("of-bare", 0, of_volume(bare));
    world.refused(CREATE_VOLUME, clone, Code::InvalidArgument);
}

/// Goal: a replica that leaves the volume at the moment of a snapshot is noticed: the snapshot is
/// deleted, and made again. A replica that the volume does not reach has none. Method: a daemon
/// whose record changes with each look, for a while, and whose first replica is detached.
#[test]
fn a_replica_that_leaves_makes_no_snapshot() {
    for (changes, outcome) in [(2, None), (100, Some(Code::Unavailable))] {
        let looks = Arc::new(AtomicUsize::new(0));
        let state: Arc<parking_lot::Mutex<Option<Value>>> = Arc::default();
        let deleted = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&deleted);
        let scripted = start(move |method, params| {
            let mut state = state.lock();
            Reply::Result(match method {
                "cluster_get_status" => return Reply::Refuse(-95),
                "volume_get_records" => {
                    let revision = looks.fetch_add(1, Ordering::Relaxed).min(changes);
                    let replicas = [AWAY, ABSENT]
                        .map(|device| json!({ "device": device, "state": { "state": "in_sync" } }));
                    json!({
                        "holder": ABSENT,
                        "volumes": [{ "id": ABSENT, "revision": revision, "replicas": replicas }],
                    })
                }
                "state_get" => json!({ "objects": [] }),
                "volume_get" => json!({
                    "name": "v", "uuid": ABSENT, "block_size": 4096, "num_blocks": 1024,
                    "replicas": [
                        { "device": AWAY, "state": "in_sync", "attached": false },
                        { "device": ABSENT, "state": "in_sync", "attached": true },
                    ],
                    "settings": {}, "subsystems": [],
                }),
                "lvol_get" if params["lvol"] == ABSENT || params["lvol"] == AWAY => json!({
                    "uuid": params["lvol"], "name": "v", "pool": "p", "snapshot": false,
                }),
                "lvol_list" => json!([]),
                "lvol_get" => match &*state {
                    Some(found) => found.clone(),
                    None => return Reply::Refuse(-19),
                },
                "lvol_snapshot" => {
                    let new = &params["snapshots"][0];
                    assert_eq!(new["lvol"], ABSENT, "the volume reaches it");
                    *state = Some(json!({
                        "uuid": new["uuid"], "name": new["name"], "pool": "p", "snapshot": true,
                    }));
                    json!([])
                }
                "lvol_rename" => {
                    state.as_mut().expect("it is made")["name"] = params["new_name"].clone();
                    json!({})
                }
                "lvol_delete" => {
                    *state = None;
                    counted.fetch_add(1, Ordering::Relaxed);
                    true.into()
                }
                other => panic!("{other}"),
            })
        });
        match outcome {
            None => {
                assert_eq!(made(&scripted.driver, ABSENT, "s").source_volume_id, ABSENT);
                assert_eq!(deleted.load(Ordering::Relaxed), 1);
            }
            Some(code) => {
                scripted.driver.refused(CREATE, asked(ABSENT, "s"), code);
            }
        }
    }
}

/// Makes a snapshot of a replica, as a driver of this version names it.
fn left(world: &mut World, volume: &str, id: Uuid, kind: &str, seconds: u64) {
    let found = world.process.call("volume_get", json!({ "name": volume }));
    let replica = &found["replicas"][0]["device"];
    let volume = volume.replace('-', "");
    let name = format!("csi-{kind}-{volume}{seconds:08x}{:010x}0007", 8192);
    let new = json!({ "lvol": replica, "name": name, "uuid": id });
    let params = json!({ "snapshots": [new] });
    world.process.call("lvol_snapshot", params);
}

fn is_left(world: &mut World, id: Uuid) -> bool {
    let found = world.process.try_call("lvol_get", json!({ "lvol": id }));
    found.is_ok()
}

/// Goal: a copy whose clone was given up does not stay: DeleteVolume of the clone deletes it, and
/// so does a later snapshot once the copy is old. Method: copies as a killed driver leaves them.
#[test]
fn copies_do_not_outlive_their_calls() {
    let mut world = World::new();
    let source = world.volume("v");
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let now = now.expect("after 1970").as_secs();
    let clone = Uuid::from_u128(0xc10e);
    let its_copy = Uuid::new_v5(&clone, b"copy");
    left(&mut world, &source, its_copy, "copy", now);
    let [old, older, young] = [1, 2, 3].map(Uuid::from_u128);
    left(&mut world, &source, old, "copy", now - 4000);
    left(&mut world, &source, older, "cut", now - 5000);
    left(&mut world, &source, young, "copy", now - 60);

    world.delete(&clone.to_string());
    assert!(!is_left(&mut world, its_copy), "the clone is deleted");
    assert!(is_left(&mut world, old) && is_left(&mut world, young));
    made(&world, &source, "s");
    for id in [old, older] {
        assert!(!is_left(&mut world, id), "its call was given up");
    }
    assert!(is_left(&mut world, young), "its call may be under way");
}
