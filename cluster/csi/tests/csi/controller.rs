//! `csi.v1.Controller` against a real daemon with two pools, in no cluster.

use nacre_cluster_csi::messages::controller::{
    ControllerCall, ControllerExpandVolumeRequest, ControllerExpandVolumeResponse,
    ControllerGetCapabilitiesResponse, ControllerPublishVolumeResponse,
    ControllerUnpublishVolumeRequest, CreateVolumeRequest, DeleteVolumeRequest, GetCapacityRequest,
    GetCapacityResponse, ListVolumesRequest, ListVolumesResponse,
    ValidateVolumeCapabilitiesRequest, ValidateVolumeCapabilitiesResponse,
};
use nacre_cluster_csi::messages::{CapacityRange, Mode, Nothing, Texts};
use nacre_cluster_csi::{Controller, Daemon, Driver, Identity};
use nacre_engine_rpc::client::Client;
use nacre_tests::daemon::{Daemon as Process, Place};
use serde_json::{Value, json};
use tonic::Code;

use crate::client::{HOST, MIB, OTHER, Served, block, mount, publish, texts, wanted};

const PATIENCE: std::time::Duration = std::time::Duration::from_secs(60);
const ABSENT: &str = "5f0c1c3e-8b3a-4c55-9d0b-6b3f3f1c0c01";

pub(crate) struct World {
    driver: Served,
    pub process: Process,
    _place: Place,
}

impl std::ops::Deref for World {
    type Target = Served;

    fn deref(&self) -> &Served {
        &self.driver
    }
}

pub(crate) fn driver(socket: std::path::PathBuf) -> Driver {
    let daemon = Daemon::new(move || Client::connect(&socket, PATIENCE));
    Driver {
        identity: Identity::new(|| Ok(true)),
        controller: Some(Controller::new(daemon)),
        node: None,
    }
}

impl World {
    pub(crate) fn new() -> Self {
        let address = nacre_tests::daemon::free_address("127.0.0.1");
        let place = Place::new().with("NACRE_NVMF_LISTEN", format!("tcp://{address}"));
        let mut process = place.start();
        for name in ["one", "two"] {
            process.create_ram(name, 4096, 64 << 20);
            process.call(
                "pool_create",
                json!({ "name": format!("pool-{name}"), "disk": name }),
            );
        }
        Self {
            driver: Served::start(driver(place.socket())),
            process,
            _place: place,
        }
    }

    pub(crate) fn volume(&self, name: &str) -> String {
        self.create(wanted(name, 4 * MIB)).expect("it is made").0
    }

    fn hosts(&mut self, id: &str) -> Vec<String> {
        let volume = self.process.call("volume_get", json!({ "name": id }));
        let Some(nqn) = volume["subsystems"][0].as_str() else {
            return Vec::new();
        };
        let found = self.process.subsystem(nqn);
        let hosts = found["hosts"].as_array().expect("a list");
        hosts
            .iter()
            .map(|host| host["nqn"].as_str().expect("an NQN").to_owned())
            .collect()
    }

    /// Waits until all replicas of a volume are in sync.
    pub(crate) fn until_healthy(&mut self, id: &str) {
        let end = std::time::Instant::now() + PATIENCE;
        while self.process.call("volume_get", json!({ "name": id }))["state"] != "healthy" {
            assert!(std::time::Instant::now() < end, "{id} is not healthy");
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }

    pub(crate) fn delete(&self, id: &str) {
        let asked = DeleteVolumeRequest {
            volume_id: id.to_owned(),
        };
        let _: Nothing = self
            .call("Controller/DeleteVolume", asked)
            .expect("deleted");
    }

    pub(crate) fn unpublish(&self, id: &str, host: &str) {
        let _: Nothing = self
            .call(
                "Controller/ControllerUnpublishVolume",
                unpublished(id, host),
            )
            .expect("cut off");
    }

    fn list(&self, max_entries: i32, token: &str) -> ListVolumesResponse {
        let asked = ListVolumesRequest {
            max_entries,
            starting_token: token.to_owned(),
        };
        self.call("Controller/ListVolumes", asked).expect("a list")
    }
}

fn unpublished(id: &str, host: &str) -> ControllerUnpublishVolumeRequest {
    ControllerUnpublishVolumeRequest {
        volume_id: id.to_owned(),
        node_id: host.to_owned(),
    }
}

/// CreateVolume: "This operation MUST be idempotent"; ALREADY_EXISTS for an incompatible request.
#[test]
fn create_is_idempotent_and_refuses_another_request() {
    let mut world = World::new();
    let two = || CreateVolumeRequest {
        parameters: texts(&[("replicas", "2"), ("csi.storage.k8s.io/pv/name", "v")]),
        ..wanted("v", 3 * MIB + 1)
    };
    let made = world.create(two()).expect("it is made");
    assert_eq!(made.1, 4 * MIB, "whole MiB, at least what is required");
    assert_eq!(world.create(two()).expect("again"), made);
    let found = world.process.call("volume_get", json!({ "name": made.0 }));
    assert_eq!(found["replicas"].as_array().map(Vec::len), Some(2));
    assert_eq!(
        (&found["name"], &found["uuid"]),
        (&json!("v"), &json!(made.0))
    );
    for other in [
        CreateVolumeRequest {
            parameters: Texts::new(),
            ..two()
        },
        CreateVolumeRequest {
            parameters: texts(&[("replicas", "2"), ("thin", "true")]),
            ..two()
        },
        CreateVolumeRequest {
            capacity_range: Some(CapacityRange {
                required_bytes: 8 * MIB,
                limit_bytes: 0,
            }),
            ..two()
        },
        CreateVolumeRequest {
            capacity_range: Some(CapacityRange {
                required_bytes: 1,
                limit_bytes: 2 * MIB,
            }),
            ..two()
        },
    ] {
        world.refused("Controller/CreateVolume", other, Code::AlreadyExists);
    }
    assert_eq!(world.list(0, "").entries.len(), 1);
    world.delete(&made.0);
    let anew = world.create(two()).expect("the name is free");
    assert_eq!(anew.0, made.0, "the id follows from the name");
}

/// CreateVolume, size limits: each name of up to 128 bytes is a volume of its own.
#[test]
fn each_name_of_the_interface_is_a_volume() {
    let world = World::new();
    let names = [
        "a b",
        "größe",
        &"x".repeat(128),
        &"x".repeat(127),
        "tab\there",
        ABSENT,
    ];
    let mut ids: Vec<String> = names.iter().map(|name| world.volume(name)).collect();
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), names.len());
    for bad in ["", &"x".repeat(129), "bell\u{7}", "c1\u{85}"] {
        let asked = wanted(bad, MIB);
        world.refused("Controller/CreateVolume", asked, Code::InvalidArgument);
    }
}

/// CreateVolume, error scheme: missing and unsupported fields; OUT_OF_RANGE for capacities; no
/// source of contents; RESOURCE_EXHAUSTED where no pool can take it.
#[test]
fn a_wrong_creation_is_refused() {
    let world = World::new();
    let good = || wanted("v", MIB);
    let range = |required_bytes, limit_bytes| {
        Some(CapacityRange {
            required_bytes,
            limit_bytes,
        })
    };
    for bad in [
        CreateVolumeRequest {
            volume_capabilities: Vec::new(),
            ..good()
        },
        CreateVolumeRequest {
            volume_capabilities: vec![Default::default()],
            ..good()
        },
        CreateVolumeRequest {
            volume_capabilities: vec![mount(Mode::Unknown)],
            ..good()
        },
        CreateVolumeRequest {
            volume_capabilities: vec![mount(Mode::MultiNodeMultiWriter)],
            ..good()
        },
        CreateVolumeRequest {
            parameters: texts(&[("colour", "blue")]),
            ..good()
        },
        CreateVolumeRequest {
            parameters: texts(&[("pool", "nowhere")]),
            ..good()
        },
        CreateVolumeRequest {
            parameters: texts(&[("class", &"x".repeat(5000))]),
            ..good()
        },
        CreateVolumeRequest {
            parameters: texts(&[("class", "fast")]),
            ..good()
        },
        CreateVolumeRequest {
            parameters: texts(&[("spread", "zone")]),
            ..good()
        },
        CreateVolumeRequest {
            parameters: texts(&[("strictSpread", "true")]),
            ..good()
        },
        CreateVolumeRequest {
            parameters: texts(&[("nodes", "ant")]),
            ..good()
        },
        CreateVolumeRequest {
            mutable_parameters: texts(&[("a", "b")]),
            ..good()
        },
    ] {
        world.refused("Controller/CreateVolume", bad, Code::InvalidArgument);
    }
    for (least, most) in [(-1, 0), (0, -1), (2, 1), (1, 5), (i64::MAX, 0)] {
        let bad = CreateVolumeRequest {
            capacity_range: range(least, most),
            ..good()
        };
        world.refused("Controller/CreateVolume", bad, Code::OutOfRange);
    }
    for parameters in [texts(&[("replicas", "3")]), texts(&[("replicas", "2")])] {
        let bad = CreateVolumeRequest {
            capacity_range: range(1 << 40, 0),
            parameters,
            ..good()
        };
        world.refused("Controller/CreateVolume", bad, Code::ResourceExhausted);
    }
    assert!(world.list(0, "").entries.is_empty(), "nothing is left");
}

/// DeleteVolume: idempotent, OK for a volume that is not there; FAILED_PRECONDITION if in use.
#[test]
fn delete_is_idempotent_and_refuses_a_volume_in_use() {
    let mut world = World::new();
    let id = world.volume("v");
    let _: ControllerPublishVolumeResponse = world
        .call(
            "Controller/ControllerPublishVolume",
            publish(&id, HOST, Mode::SingleNodeWriter),
        )
        .expect("published");
    let asked = DeleteVolumeRequest {
        volume_id: id.clone(),
    };
    let why = world.refused("Controller/DeleteVolume", asked, Code::FailedPrecondition);
    assert!(why.contains(HOST), "{why}");
    world.unpublish(&id, HOST);
    for id in [&id, &id, ABSENT, "no-uuid"] {
        world.delete(id);
    }
    let missing = DeleteVolumeRequest::default();
    world.refused("Controller/DeleteVolume", missing, Code::InvalidArgument);
    let pools = world.process.call("lvol_list", Value::Null);
    assert_eq!(pools, json!([]), "its space is free");
}

/// ControllerPublishVolume: idempotent; refused for a second node unless the volume is shared;
/// NOT_FOUND for volume and node; the context says where the volume is.
#[test]
fn publish_is_for_one_node_at_a_time() {
    const PUBLISH: &str = "Controller/ControllerPublishVolume";
    let mut world = World::new();
    let id = world.volume("v");
    let asked = || publish(&id, HOST, Mode::SingleNodeWriter);
    let first: ControllerPublishVolumeResponse = world.call(PUBLISH, asked()).expect("published");
    let again: ControllerPublishVolumeResponse = world.call(PUBLISH, asked()).expect("again");
    assert_eq!(first, again);
    let context = &first.publish_context;
    assert_eq!(context.get("uuid"), Some(&id));
    assert_eq!(
        context.get("nqn").map(String::as_str),
        Some("nqn.2025-01.io.nacre:v")
    );
    assert!(
        context["addresses"].starts_with("tcp://127.0.0.1:"),
        "{context:?}"
    );
    let second = publish(&id, OTHER, Mode::SingleNodeWriter);
    let why = world.refused(PUBLISH, second, Code::FailedPrecondition);
    assert!(why.contains(HOST), "the text names the node: {why}");
    assert_eq!(world.hosts(&id), [HOST]);
    let shared = publish(&id, OTHER, Mode::MultiNodeMultiWriter);
    let _: ControllerPublishVolumeResponse = world.call(PUBLISH, shared).expect("shared");
    assert_eq!(world.hosts(&id), [HOST, OTHER]);
    world.unpublish(&id, HOST);
    assert_eq!(world.hosts(&id), [OTHER]);

    let good = asked();
    for (bad, code) in [
        (
            publish("", HOST, Mode::SingleNodeWriter),
            Code::InvalidArgument,
        ),
        (
            publish(&id, "", Mode::SingleNodeWriter),
            Code::InvalidArgument,
        ),
        (
            publish(&id, &"x".repeat(257), Mode::SingleNodeWriter),
            Code::InvalidArgument,
        ),
        (
            publish(ABSENT, HOST, Mode::SingleNodeWriter),
            Code::NotFound,
        ),
        (publish("v", HOST, Mode::SingleNodeWriter), Code::NotFound),
        (
            publish(&id, "some-node", Mode::SingleNodeWriter),
            Code::NotFound,
        ),
    ] {
        world.refused(PUBLISH, bad, code);
    }
    let mut bad = good.clone();
    bad.volume_capability = None;
    world.refused(PUBLISH, bad, Code::InvalidArgument);
    let mut bad = good.clone();
    bad.volume_capability = Some(mount(Mode::MultiNodeMultiWriter));
    world.refused(PUBLISH, bad, Code::InvalidArgument);
    let bad = nacre_cluster_csi::messages::controller::ControllerPublishVolumeRequest {
        readonly: true,
        ..good
    };
    world.refused(PUBLISH, bad, Code::InvalidArgument);
}

/// A subsystem that an operator made for any host: the driver cannot cut off a host of it.
#[test]
fn a_volume_for_any_host_is_not_published() {
    let mut world = World::new();
    let id = world.volume("v");
    let nqn = "nqn.2025-01.io.example:open";
    let create = json!({ "nqn": nqn, "allow_any_host": true });
    world.process.call("nvmf_create_subsystem", create);
    let namespace = json!({ "nqn": nqn, "namespace": { "bdev_name": "v" } });
    world.process.call("nvmf_subsystem_add_ns", namespace);
    let asked = publish(&id, HOST, Mode::MultiNodeMultiWriter);
    let call = "Controller/ControllerPublishVolume";
    world.refused(call, asked, Code::FailedPrecondition);
    let call = "Controller/ControllerUnpublishVolume";
    world.refused(call, unpublished(&id, HOST), Code::FailedPrecondition);
}

/// ControllerUnpublishVolume: idempotent; without a node from all nodes; OK for a volume or node
/// that is gone.
#[test]
fn unpublish_is_idempotent() {
    let mut world = World::new();
    let id = world.volume("v");
    for host in [HOST, OTHER] {
        let asked = publish(&id, host, Mode::MultiNodeMultiWriter);
        let _: ControllerPublishVolumeResponse = world
            .call("Controller/ControllerPublishVolume", asked)
            .expect("published");
    }
    world.unpublish(&id, "nqn.2025-01.io.example:never");
    assert_eq!(world.hosts(&id).len(), 2);
    world.unpublish(&id, "");
    assert_eq!(world.hosts(&id), Vec::<String>::new());
    let volume = world.process.call("volume_get", json!({ "name": id }));
    assert_eq!(
        volume["subsystems"],
        json!([]),
        "nothing is left of the publication"
    );
    for id in [&id, ABSENT, "no-uuid"] {
        world.unpublish(id, HOST);
    }
    let missing = unpublished("", HOST);
    world.refused(
        "Controller/ControllerUnpublishVolume",
        missing,
        Code::InvalidArgument,
    );
}

/// ValidateVolumeCapabilities: confirmed only if all are supported; NOT_FOUND.
#[test]
fn capabilities_are_confirmed_if_all_are_supported() {
    const VALIDATE: &str = "Controller/ValidateVolumeCapabilities";
    let world = World::new();
    let id = world.volume("v");
    let ask = |modes| ValidateVolumeCapabilitiesRequest {
        volume_id: id.clone(),
        volume_capabilities: modes,
        ..Default::default()
    };
    let good = vec![
        mount(Mode::SingleNodeWriter),
        block(Mode::MultiNodeMultiWriter),
    ];
    let found: ValidateVolumeCapabilitiesResponse =
        world.call(VALIDATE, ask(good.clone())).expect("an answer");
    assert_eq!(
        found.confirmed.expect("confirmed").volume_capabilities,
        good
    );
    let bad = vec![
        mount(Mode::SingleNodeWriter),
        mount(Mode::MultiNodeMultiWriter),
    ];
    for bad in [
        ask(bad),
        ValidateVolumeCapabilitiesRequest {
            volume_context: texts(&[("a", "b")]),
            ..ask(good.clone())
        },
        ValidateVolumeCapabilitiesRequest {
            parameters: texts(&[("replicas", "2")]),
            ..ask(good.clone())
        },
    ] {
        let found: ValidateVolumeCapabilitiesResponse =
            world.call(VALIDATE, bad).expect("an answer");
        assert!(found.confirmed.is_none() && !found.message.is_empty());
    }
    world.refused(VALIDATE, ask(Vec::new()), Code::InvalidArgument);
    let absent = ValidateVolumeCapabilitiesRequest {
        volume_id: ABSENT.to_owned(),
        ..ask(good)
    };
    world.refused(VALIDATE, absent, Code::NotFound);
}

/// ListVolumes: no more than max_entries, next_token for the rest, all volumes in the end; ABORTED
/// for a token that is not valid; published nodes.
#[test]
fn volumes_are_listed_in_pages() {
    let world = World::new();
    let mut ids: Vec<String> = (0..5).map(|at| world.volume(&format!("v{at}"))).collect();
    ids.sort();
    let asked = publish(&ids[3], HOST, Mode::SingleNodeWriter);
    let _: ControllerPublishVolumeResponse = world
        .call("Controller/ControllerPublishVolume", asked)
        .expect("published");
    let mut found = Vec::new();
    let mut token = String::new();
    loop {
        let page = world.list(2, &token);
        assert!(page.entries.len() <= 2);
        found.extend(page.entries);
        token = page.next_token;
        if token.is_empty() {
            break;
        }
        // The volume of the token is gone: the next page is the same.
        if found.len() == 2 {
            world.delete(&ids[1]);
        }
    }
    let listed = found
        .iter()
        .map(|entry| &entry.volume.as_ref().expect("one").volume_id);
    assert_eq!(listed.cloned().collect::<Vec<_>>(), ids);
    for (at, entry) in found.iter().enumerate() {
        let nodes = &entry.status.as_ref().expect("a status").published_node_ids;
        let expected: &[&str] = if at == 3 { &[HOST] } else { &[] };
        assert_eq!(nodes, expected);
    }
    let bad = ListVolumesRequest {
        max_entries: 0,
        starting_token: "9".to_owned(),
    };
    world.refused("Controller/ListVolumes", bad, Code::Aborted);
    let bad = ListVolumesRequest {
        max_entries: -1,
        ..Default::default()
    };
    world.refused("Controller/ListVolumes", bad, Code::InvalidArgument);
}

/// GetCapacity: considers parameters and capabilities; never negative.
#[test]
fn capacity_follows_the_parameters() {
    let mut world = World::new();
    let free = |world: &mut World| {
        let pools = world.process.call("pool_list", Value::Null);
        let free = pools.as_array().expect("a list").iter();
        free.map(|pool| {
            let of = |key: &str| pool[key].as_i64().expect("a number");
            of("free_bytes") - of("reserved_bytes")
        })
        .collect::<Vec<_>>()
    };
    let thick = CreateVolumeRequest {
        parameters: texts(&[("pool", "pool-one")]),
        ..wanted("v", 8 * MIB)
    };
    world.create(thick).expect("it is made");
    let free = free(&mut world);
    let ask = |parameters: &[(&str, &str)], capability| {
        let asked = GetCapacityRequest {
            parameters: texts(parameters),
            volume_capabilities: vec![capability],
            ..Default::default()
        };
        let found: GetCapacityResponse =
            world.call("Controller/GetCapacity", asked).expect("known");
        found.available_capacity
    };
    let mounted = || mount(Mode::SingleNodeWriter);
    assert_ne!(free[0], free[1]);
    assert_eq!(ask(&[], mounted()), *free.iter().max().expect("two"));
    assert_eq!(
        ask(&[("pool", "pool-one")], mounted()),
        *free.iter().min().expect("two")
    );
    assert_eq!(
        ask(&[("replicas", "2")], mounted()),
        *free.iter().min().expect("two")
    );
    assert_eq!(ask(&[("replicas", "3")], mounted()), 0);
    assert_eq!(ask(&[], mount(Mode::MultiNodeMultiWriter)), 0);
}

/// ControllerExpandVolume: idempotent; the volume has at least the size; OUT_OF_RANGE.
#[test]
fn expand_is_idempotent() {
    const EXPAND: &str = "Controller/ControllerExpandVolume";
    let world = World::new();
    let id = world.volume("v");
    let ask = |required_bytes, limit_bytes| ControllerExpandVolumeRequest {
        volume_id: id.clone(),
        capacity_range: Some(CapacityRange {
            required_bytes,
            limit_bytes,
        }),
        volume_capability: Some(mount(Mode::SingleNodeWriter)),
    };
    for _ in 0..2 {
        let found: ControllerExpandVolumeResponse =
            world.call(EXPAND, ask(7 * MIB + 1, 0)).expect("it grows");
        assert_eq!(
            (found.capacity_bytes, found.node_expansion_required),
            (8 * MIB, true)
        );
    }
    let raw = ControllerExpandVolumeRequest {
        volume_capability: Some(block(Mode::SingleNodeWriter)),
        ..ask(MIB, 0)
    };
    let found: ControllerExpandVolumeResponse = world.call(EXPAND, raw).expect("it is larger");
    assert_eq!(
        (found.capacity_bytes, found.node_expansion_required),
        (8 * MIB, false)
    );
    for (least, most) in [(1, 4 * MIB), (-1, 0), (i64::MAX, 0)] {
        world.refused(EXPAND, ask(least, most), Code::OutOfRange);
    }
    let none = ControllerExpandVolumeRequest {
        capacity_range: None,
        ..ask(1, 0)
    };
    world.refused(EXPAND, none, Code::InvalidArgument);
    let absent = ControllerExpandVolumeRequest {
        volume_id: ABSENT.to_owned(),
        ..ask(1, 0)
    };
    world.refused(EXPAND, absent, Code::NotFound);
    let bad = ControllerExpandVolumeRequest {
        volume_capability: Some(mount(Mode::MultiNodeMultiWriter)),
        ..ask(1, 0)
    };
    world.refused(EXPAND, bad, Code::InvalidArgument);
}

/// ControllerGetCapabilities: each advertised call works.
#[test]
fn capabilities_are_those_that_work() {
    let world = World::new();
    let found: ControllerGetCapabilitiesResponse = world
        .call("Controller/ControllerGetCapabilities", Nothing {})
        .expect("an answer");
    let calls = found
        .capabilities
        .iter()
        .map(|one| one.rpc.expect("a call").kind());
    let calls: Vec<ControllerCall> = calls.collect();
    for expected in [
        ControllerCall::CreateDeleteVolume,
        ControllerCall::PublishUnpublishVolume,
        ControllerCall::ListVolumes,
        ControllerCall::ListVolumesPublishedNodes,
        ControllerCall::GetCapacity,
        ControllerCall::ExpandVolume,
    ] {
        assert!(calls.contains(&expected), "{expected:?}");
    }
}

/// Concurrency: calls for different volumes run at once, and calls for one volume lose nothing.
#[test]
fn concurrent_calls_lose_nothing() {
    let mut world = World::new();
    let id = world.volume("v");
    let hosts: Vec<String> = (0..8)
        .map(|at| format!("nqn.2025-01.io.example:h{at}"))
        .collect();
    let socket = &world.driver.socket;
    std::thread::scope(|scope| {
        for host in &hosts {
            let id = &id;
            scope.spawn(move || {
                let orchestrator = crate::client::Orchestrator::connect(socket);
                loop {
                    let asked = publish(id, host, Mode::MultiNodeMultiWriter);
                    let answer = orchestrator.call::<_, ControllerPublishVolumeResponse>(
                        "Controller/ControllerPublishVolume",
                        asked,
                    );
                    match answer {
                        Ok(_) => break,
                        Err(refused) => assert_eq!(refused.code(), Code::Aborted, "{refused:?}"),
                    }
                    std::thread::sleep(std::time::Duration::from_millis(2));
                }
            });
        }
    });
    let mut found = world.hosts(&id);
    found.sort();
    assert_eq!(found, hosts);
}
