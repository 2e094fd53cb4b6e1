//! `csi.v1.Node` with records of staged volumes that are damaged, or of other releases.

use std::fs;
use std::path::PathBuf;
use std::time::Instant;

use nacre_cluster_csi::messages::{Mode, Nothing};
use nacre_cluster_csi::node::{HostId, HostIdError, Reconnector};
use serde_json::{Value, json};
use tonic::Code;

use crate::client::{block, mount};
use crate::node::{STAGE, UNSTAGE, VOLUME, World, of_type, writer};

fn path(world: &World) -> PathBuf {
    world.machine.path("state").join(format!("{VOLUME}.json"))
}

fn record(world: &World) -> Value {
    let bytes = fs::read(path(world)).expect("a record");
    serde_json::from_slice(&bytes).expect("JSON")
}

/// Writes the record of a staged volume as the first release did.
fn make_first(world: &World) {
    let new = record(world);
    let first = json!({
        "nqn": new["nqn"],
        "uuid": new["uuid"],
        "portals": new["addresses"],
        "staging": new["staging"],
        "fs_type": new["fs_type"],
        "flags": new["flags"],
        "is_formatting": new["is_formatting"],
    });
    fs::write(path(world), first.to_string()).expect("written");
}

/// Goal: the first release kept no NQN. A new one is refused while volumes are connected with the
/// former one, because no call would disconnect them. Method: connections have another NQN.
#[test]
fn connections_of_another_nqn_are_not_left() {
    let world = World::new();
    world.stage(writer());
    make_first(&world);
    let state = world.machine.path("state");
    let _ = fs::remove_file(state.join("host"));
    let find = |nqn: &str| HostId::find(&*world.machine, &state, Some(nqn), None);
    let refused = find("nqn.2025-01.io.example:new").expect_err("connected");
    let HostIdError::Connected { kept, .. } = refused else {
        panic!("{refused}");
    };
    find(&kept).expect("the NQN of the connections");
}

/// Goal: a block volume that the first release staged for writing is not made read-only under its
/// user. Method: NodeStageVolume for reading, with a record without the mode.
#[test]
fn a_device_of_the_first_release_keeps_its_mode() {
    let mut world = World::new();
    world.stage(block(Mode::SingleNodeWriter));
    make_first(&world);
    world.restart();
    let asked = world.staged(block(Mode::SingleNodeReaderOnly));
    let refused = world
        .call::<_, Nothing>(STAGE, asked)
        .expect_err("other use");
    assert_eq!(refused.code(), Code::AlreadyExists);
    assert!(!world.machine.has_run("blockdev --setro"));
}

/// Goal: an update of the driver keeps the staged volumes. Method: the record is written as the
/// first release did; the reconnector and all calls work.
#[test]
fn records_of_the_first_release_count() {
    for capability in [
        writer(),
        of_type("ext4", &["noatime"]),
        mount(Mode::SingleNodeReaderOnly),
        block(Mode::SingleNodeWriter),
    ] {
        let mut world = World::new();
        // A blank volume is not staged for reading.
        world.stage(writer());
        world.unstage();
        world.stage(capability.clone());
        make_first(&world);
        world.machine.set_down("192.0.2.1", true);
        world.restart();
        let first = world.machine.controllers().remove(0);
        nacre_cluster_csi::node::Host::disconnect(&*world.machine, &first)
            .expect("the controller disconnects");
        world.machine.set_down("192.0.2.1", false);
        let mut reconnector = Reconnector::default();
        assert_eq!(reconnector.connect_missing(&world.node, Instant::now()), 1);
        world.stage(capability.clone());
        assert!(record(&world)["v"].as_u64() > Some(0));
        world.publish(capability);
        world.unpublish();
        world.unstage();
        assert!(world.machine.controllers().is_empty());
        assert!(!path(&world).exists());
    }
    // It still refuses another way, and ends with the machine.
    let mut world = World::new();
    world.stage(writer());
    make_first(&world);
    world.restart();
    let other = world.staged(of_type("ext4", &["noatime"]));
    world.refused(STAGE, other, Code::AlreadyExists);
    world.machine.reboot();
    world.restart();
    assert!(!path(&world).exists());
}

/// Goal: the mark of a format does not outlive the update. The record does not name its boot, and
/// another node may have used the volume since.
#[test]
fn a_format_of_the_first_release_is_not_repeated() {
    let mut world = World::new();
    world.machine.break_program(Some("mkfs.ext4"));
    world.refused(STAGE, world.staged(writer()), Code::DeadlineExceeded);
    world.machine.break_program(None);
    assert_eq!(record(&world)["is_formatting"], true);
    make_first(&world);
    world.restart();
    world.refused(STAGE, world.staged(writer()), Code::FailedPrecondition);
    assert_eq!(world.machine.runs("mkfs"), 1);
}

/// Goal: an attachment that the controller of the first release made is staged.
#[test]
fn a_context_of_the_first_release_is_staged() {
    let world = World::new();
    let mut asked = world.staged(writer());
    let addresses = asked.publish_context.remove("addresses").expect("some");
    let former = "portals".to_owned();
    asked.publish_context.insert(former, addresses);
    let _: Nothing = world.call(STAGE, asked).expect("staged");
    assert_eq!(world.machine.controllers().len(), 2);
}

/// Goal: a record that is damaged, or of a later version, is refused before anything changes, also
/// after a restart. The error names the file, and for a later version the remedy.
#[test]
fn an_unreadable_record_changes_nothing() {
    let mut world = World::new();
    world.stage(writer());
    let mut later = record(&world);
    later["v"] = json!(later["v"].as_u64().expect("a number") + 1);
    // Fields that this version does not know.
    later["addresses"] = json!({ "tcp": ["192.0.2.1"] });
    let good = record(&world).to_string();
    for (text, remedy) in [
        ("damaged".to_owned(), "remove the file"),
        (later.to_string(), "run the later driver"),
    ] {
        fs::write(path(&world), &text).expect("written");
        for _ in 0..2 {
            let asked = world.staged(writer());
            for why in [
                world.refused(UNSTAGE, world.unstaged(), Code::Internal),
                world.refused(STAGE, asked, Code::Internal),
            ] {
                assert!(why.contains(path(&world).to_str().expect("text")), "{why}");
                assert!(why.contains(remedy), "{why}");
            }
            assert_eq!(world.machine.mount_count(), 1);
            assert_eq!(world.machine.runs("umount"), 0);
            assert_eq!(world.machine.controllers().len(), 2);
            assert_eq!(fs::read_to_string(path(&world)).expect("read"), text);
            world.restart();
        }
    }
    fs::write(path(&world), good).expect("written");
    world.unstage();
}
