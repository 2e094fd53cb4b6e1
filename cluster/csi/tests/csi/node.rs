//! `csi.v1.Node` on a machine in a directory.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nacre_cluster_csi::messages::node::{
    NodeExpandVolumeRequest, NodeExpandVolumeResponse, NodeGetCapabilitiesResponse,
    NodeGetInfoResponse, NodeGetVolumeStatsRequest, NodeGetVolumeStatsResponse,
    NodePublishVolumeRequest, NodeStageVolumeRequest, NodeUnpublishVolumeRequest,
    NodeUnstageVolumeRequest, Unit,
};
use nacre_cluster_csi::messages::{AccessType, CapacityRange, Mode, Nothing, VolumeCapability};
use nacre_cluster_csi::node::{HostId, Reconnector};
use nacre_cluster_csi::{Driver, Identity, Node};
use tonic::Code;
use uuid::Uuid;

use crate::client::{HOST, Served, block, mount, texts};
use crate::machine::{Directory, NQN, SIZE};

pub(crate) const VOLUME: Uuid = Uuid::from_u128(0x5f0c_1c3e_8b3a_4c55_9d0b_6b3f_3f1c_0c01);
const ABSENT: &str = "00000000-0000-4000-8000-000000000000";
pub(crate) const STAGE: &str = "Node/NodeStageVolume";
pub(crate) const UNSTAGE: &str = "Node/NodeUnstageVolume";
pub(crate) const PUBLISH: &str = "Node/NodePublishVolume";
pub(crate) const UNPUBLISH: &str = "Node/NodeUnpublishVolume";

pub(crate) struct World {
    driver: Served,
    pub(crate) node: Arc<Node>,
    pub(crate) machine: Arc<Directory>,
    path_time: Duration,
}

impl std::ops::Deref for World {
    type Target = Served;

    fn deref(&self) -> &Served {
        &self.driver
    }
}

fn serve(machine: &Arc<Directory>, path_time: Duration) -> (Served, Arc<Node>) {
    let me = HostId {
        nqn: HOST.to_owned(),
        id: Uuid::from_u128(1),
    };
    let node = Node::new(machine.clone(), me, &machine.path("state")).expect("a directory");
    let node = node.with_flush_time(Duration::from_millis(300));
    let node = Arc::new(node.with_path_time(path_time));
    let driver = Driver {
        identity: Identity::new(|| Ok(true)),
        controller: None,
        node: Some(Arc::clone(&node)),
    };
    (Served::start(driver), node)
}

impl World {
    pub(crate) fn new() -> Self {
        Self::with_path_time(Duration::from_secs(20))
    }

    /// The driver waits so long for the kernel to connect or to delete a path.
    pub(crate) fn with_path_time(path_time: Duration) -> Self {
        let machine = Arc::new(Directory::new(VOLUME));
        fs::create_dir(machine.path("staging dir")).expect("the orchestrator makes it");
        let (driver, node) = serve(&machine, path_time);
        Self {
            driver,
            node,
            machine,
            path_time,
        }
    }

    /// The driver dies and starts again.
    pub(crate) fn restart(&mut self) {
        let (driver, node) = serve(&self.machine, self.path_time);
        self.driver = driver;
        self.node = node;
    }

    pub(crate) fn staging(&self) -> String {
        self.machine
            .path("staging dir")
            .to_str()
            .expect("text")
            .to_owned()
    }

    pub(crate) fn target(&self) -> String {
        self.machine
            .path("target")
            .to_str()
            .expect("text")
            .to_owned()
    }

    pub(crate) fn staged(&self, capability: VolumeCapability) -> NodeStageVolumeRequest {
        NodeStageVolumeRequest {
            volume_id: VOLUME.to_string(),
            publish_context: texts(&[
                ("nqn", NQN),
                ("uuid", &VOLUME.to_string()),
                ("addresses", "tcp://192.0.2.1:4420,tcp://192.0.2.2:4420"),
            ]),
            staging_target_path: self.staging(),
            volume_capability: Some(capability),
            ..Default::default()
        }
    }

    pub(crate) fn stage(&self, capability: VolumeCapability) {
        let _: Nothing = self.call(STAGE, self.staged(capability)).expect("staged");
    }

    pub(crate) fn unstaged(&self) -> NodeUnstageVolumeRequest {
        NodeUnstageVolumeRequest {
            volume_id: VOLUME.to_string(),
            staging_target_path: self.staging(),
        }
    }

    pub(crate) fn unstage(&self) {
        let _: Nothing = self.call(UNSTAGE, self.unstaged()).expect("unstaged");
    }

    pub(crate) fn published(&self, capability: VolumeCapability) -> NodePublishVolumeRequest {
        NodePublishVolumeRequest {
            volume_id: VOLUME.to_string(),
            staging_target_path: self.staging(),
            target_path: self.target(),
            volume_capability: Some(capability),
            ..Default::default()
        }
    }

    pub(crate) fn publish(&self, capability: VolumeCapability) {
        let _: Nothing = self
            .call(PUBLISH, self.published(capability))
            .expect("published");
    }

    pub(crate) fn unpublish(&self) {
        let asked = NodeUnpublishVolumeRequest {
            volume_id: VOLUME.to_string(),
            target_path: self.target(),
        };
        let _: Nothing = self.call(UNPUBLISH, asked).expect("unpublished");
    }
}

pub(crate) fn writer() -> VolumeCapability {
    mount(Mode::SingleNodeWriter)
}

pub(crate) fn of_type(fs_type: &str, flags: &[&str]) -> VolumeCapability {
    let mut capability = writer();
    if let Some(AccessType::Mount(mount)) = &mut capability.access_type {
        mount.fs_type = fs_type.to_owned();
        mount.mount_flags = flags.iter().map(|flag| (*flag).to_owned()).collect();
    }
    capability
}

/// NodeStageVolume: idempotent; all paths are connected, a blank device is formatted once.
/// NodeUnstageVolume: idempotent, undoes it.
#[test]
fn stage_and_unstage_are_idempotent() {
    let world = World::new();
    for _ in 0..2 {
        world.stage(of_type("ext4", &["noatime"]));
        assert_eq!(world.machine.controllers().len(), 2);
        assert_eq!(world.machine.mount_count(), 1);
        let options = world.machine.options_at(Path::new(&world.staging()));
        assert_eq!(options.as_deref(), Some("rw,noatime"));
    }
    assert_eq!(world.machine.runs("mkfs"), 1);
    for _ in 0..2 {
        world.unstage();
        assert_eq!(world.machine.controllers(), Vec::<String>::new());
        assert_eq!(world.machine.mount_count(), 0);
    }
    world.stage(writer());
    assert_eq!(world.machine.runs("mkfs"), 1, "its data stay");
    world.unstage();
    let left = fs::read_dir(world.machine.path("state"))
        .expect("a directory")
        .count();
    assert_eq!(left, 0, "no record is left");
}

/// NodeStageVolume: only what reads blank is formatted.
#[test]
fn only_a_blank_device_is_formatted() {
    for (contents, says) in [
        (&b"GPT"[..], "partition table"),
        (b"data", "without a signature"),
        (b"FS:xfs\0", "xfs"),
    ] {
        let world = World::new();
        let mut disk = vec![0; SIZE as usize];
        disk[..contents.len()].copy_from_slice(contents);
        fs::write(world.machine.disk(), &disk).expect("written");
        let asked = world.staged(writer());
        let why = world.refused(STAGE, asked, Code::FailedPrecondition);
        assert!(why.contains(says), "{why}");
        assert_eq!(world.machine.runs("mkfs"), 0);
        assert_eq!(fs::read(world.machine.disk()).expect("read"), disk);
        world.unstage();
    }
    // Data in the last MiB only.
    let world = World::new();
    let mut disk = vec![0; SIZE as usize];
    disk[SIZE as usize - 1] = 1;
    fs::write(world.machine.disk(), &disk).expect("written");
    world.refused(STAGE, world.staged(writer()), Code::FailedPrecondition);
    // blkid finds several signatures.
    disk[..9].copy_from_slice(b"AMBIGUOUS");
    fs::write(world.machine.disk(), &disk).expect("written");
    world.refused(STAGE, world.staged(writer()), Code::FailedPrecondition);
    assert_eq!(world.machine.runs("mkfs"), 0);
    // A blank volume is nothing to read.
    let world = World::new();
    let reader = world.staged(mount(Mode::SingleNodeReaderOnly));
    world.refused(STAGE, reader, Code::FailedPrecondition);
}

/// A format that ended half way is finished, also after the driver died. What another node wrote
/// meanwhile stays.
#[test]
fn an_interrupted_format_is_finished() {
    for other_node_formatted in [false, true] {
        let mut world = World::new();
        world.machine.break_program(Some("mkfs.ext4"));
        world.refused(STAGE, world.staged(writer()), Code::DeadlineExceeded);
        world.machine.break_program(None);
        world.restart();
        if other_node_formatted {
            let mut disk = vec![0; SIZE as usize];
            disk[..17].copy_from_slice(b"FS:ext4\0 and data");
            fs::write(world.machine.disk(), &disk).expect("written");
        }
        world.stage(writer());
        let disk = fs::read(world.machine.disk()).expect("read");
        let expected: &[u8] = if other_node_formatted {
            b"FS:ext4\0 and data"
        } else {
            b"FS:ext4\0"
        };
        assert!(disk.starts_with(expected));
        assert_eq!(
            world.machine.runs("mkfs"),
            2 - usize::from(other_node_formatted)
        );
    }
}

/// NodeStageVolume: required fields; NOT_FOUND; ALREADY_EXISTS for another capability at the path;
/// FAILED_PRECONDITION beyond the volume's capabilities.
#[test]
fn a_wrong_stage_is_refused() {
    let world = World::new();
    let good = || world.staged(writer());
    let context = |nqn: &str, uuid: &str, addresses: &str| {
        texts(&[("nqn", nqn), ("uuid", uuid), ("addresses", addresses)])
    };
    let id = VOLUME.to_string();
    let address = "tcp://192.0.2.1:4420";
    for bad in [
        NodeStageVolumeRequest {
            volume_id: String::new(),
            ..good()
        },
        NodeStageVolumeRequest {
            staging_target_path: String::new(),
            ..good()
        },
        NodeStageVolumeRequest {
            staging_target_path: "relative".into(),
            ..good()
        },
        NodeStageVolumeRequest {
            staging_target_path: "/a/../b".into(),
            ..good()
        },
        NodeStageVolumeRequest {
            volume_capability: None,
            ..good()
        },
        NodeStageVolumeRequest {
            publish_context: texts(&[]),
            ..good()
        },
        NodeStageVolumeRequest {
            publish_context: context(NQN, ABSENT, address),
            ..good()
        },
        NodeStageVolumeRequest {
            publish_context: context("nqn.a,b=c", &id, address),
            ..good()
        },
        NodeStageVolumeRequest {
            publish_context: context(NQN, &id, "fc://1"),
            ..good()
        },
    ] {
        world.refused(STAGE, bad, Code::InvalidArgument);
    }
    let unknown = NodeStageVolumeRequest {
        volume_id: "v".into(),
        ..good()
    };
    world.refused(STAGE, unknown, Code::NotFound);
    for beyond in [
        mount(Mode::MultiNodeMultiWriter),
        of_type("ntfs", &[]),
        of_type("", &["-x"]),
    ] {
        world.refused(STAGE, world.staged(beyond), Code::FailedPrecondition);
    }
    world.stage(writer());
    for other in [
        of_type("xfs", &[]),
        of_type("ext4", &["ro"]),
        block(Mode::SingleNodeWriter),
    ] {
        world.refused(STAGE, world.staged(other), Code::AlreadyExists);
    }
    let bad = NodeUnstageVolumeRequest {
        volume_id: String::new(),
        ..world.unstaged()
    };
    world.refused(UNSTAGE, bad, Code::InvalidArgument);
    let bad = NodeUnstageVolumeRequest {
        staging_target_path: String::new(),
        ..world.unstaged()
    };
    world.refused(UNSTAGE, bad, Code::InvalidArgument);
}

/// One path is enough to stage; the reconnector connects the other one when it answers, with pauses
/// that grow. No path at all: UNAVAILABLE.
#[test]
fn missing_paths_are_connected_again() {
    let mut world = World::new();
    for address in ["192.0.2.1", "192.0.2.2"] {
        world.machine.set_down(address, true);
    }
    world.refused(STAGE, world.staged(writer()), Code::Unavailable);
    world.machine.set_down("192.0.2.1", false);
    world.stage(writer());
    assert_eq!(world.machine.controllers().len(), 1);
    world.restart();
    let (mut reconnector, start) = (Reconnector::default(), Instant::now());
    assert_eq!(reconnector.connect_missing(&world.node, start), 0);
    world.machine.set_down("192.0.2.2", false);
    assert_eq!(
        reconnector.connect_missing(&world.node, start + Duration::from_secs(1)),
        0,
        "it pauses"
    );
    assert_eq!(
        reconnector.connect_missing(&world.node, start + Duration::from_secs(6)),
        1
    );
    assert_eq!(world.machine.controllers().len(), 2);
    assert_eq!(
        reconnector.connect_missing(&world.node, start + Duration::from_secs(12)),
        0
    );
    // The kernel gave one up.
    let first = world.machine.controllers().remove(0);
    nacre_cluster_csi::node::Host::disconnect(&*world.machine, &first)
        .expect("the controller disconnects");
    assert_eq!(
        reconnector.connect_missing(&world.node, start + Duration::from_secs(18)),
        1
    );
    world.unstage();
    assert_eq!(
        reconnector.connect_missing(&world.node, start + Duration::from_secs(300)),
        0
    );
    assert!(
        world.machine.controllers().is_empty(),
        "an unstaged volume stays disconnected"
    );
}

/// A mount whose device is gone for good is replaced at the next stage.
#[test]
fn a_dead_mount_is_replaced() {
    let world = World::new();
    world.stage(writer());
    world.machine.lose_all_paths();
    world.refused(PUBLISH, world.published(writer()), Code::FailedPrecondition);
    world.stage(writer());
    assert_eq!(world.machine.mount_count(), 1);
    assert_eq!(world.machine.runs("umount -l"), 1);
    assert_eq!(world.machine.runs("mkfs"), 1);
    world.publish(writer());
}

/// NodeUnstageVolume while the file system does not end: an error, the paths stay, and the same
/// call works later.
#[test]
fn paths_stay_while_data_is_not_written() {
    let world = World::new();
    world.stage(writer());
    world.machine.break_program(Some("umount"));
    world.refused(UNSTAGE, world.unstaged(), Code::DeadlineExceeded);
    assert_eq!(world.machine.controllers().len(), 2);
    world.machine.break_program(None);
    world.unstage();
    assert!(world.machine.controllers().is_empty());
}

/// "All NodeUnpublishVolume MUST be called … before NodeUnstageVolume": a used device is kept.
/// And the driver finds the staged volume after the loss of its records.
#[test]
fn a_published_volume_is_not_disconnected() {
    for capability in [writer(), block(Mode::SingleNodeWriter)] {
        let mut world = World::new();
        world.stage(capability.clone());
        world.publish(capability);
        world.refused(UNSTAGE, world.unstaged(), Code::FailedPrecondition);
        assert_eq!(world.machine.controllers().len(), 2);
        world.unpublish();
        fs::remove_dir_all(world.machine.path("state")).expect("its records are lost");
        world.restart();
        world.unstage();
        assert!(world.machine.controllers().is_empty());
    }
}

/// NodePublishVolume: idempotent; ALREADY_EXISTS for another readonly flag. NodeUnpublishVolume:
/// idempotent, "The SP MUST delete the file or directory it created".
#[test]
fn publish_and_unpublish_are_idempotent() {
    let world = World::new();
    world.stage(writer());
    let target = world.target();
    for is_read_only in [false, true] {
        let asked = || NodePublishVolumeRequest {
            readonly: is_read_only,
            ..world.published(writer())
        };
        for _ in 0..2 {
            let _: Nothing = world.call(PUBLISH, asked()).expect("published");
            assert_eq!(world.machine.mount_count(), 2);
        }
        let options = world
            .machine
            .options_at(Path::new(&target))
            .expect("a mount");
        assert_eq!(options == "ro", is_read_only);
        let other = NodePublishVolumeRequest {
            readonly: !is_read_only,
            ..asked()
        };
        world.refused(PUBLISH, other, Code::AlreadyExists);
        for _ in 0..2 {
            world.unpublish();
            assert!(!Path::new(&target).exists());
            assert_eq!(world.machine.mount_count(), 1);
        }
    }
}

/// Block volumes: the device at the target path, as a file.
#[test]
fn a_block_volume_is_a_file() {
    let world = World::new();
    let capability = || block(Mode::MultiNodeMultiWriter);
    world.stage(capability());
    assert_eq!(
        (world.machine.mount_count(), world.machine.runs("mkfs")),
        (0, 0)
    );
    for _ in 0..2 {
        world.publish(capability());
    }
    assert_eq!(world.machine.mount_count(), 1);
    assert!(Path::new(&world.target()).is_file());
    let stats = NodeGetVolumeStatsRequest {
        volume_id: VOLUME.to_string(),
        volume_path: world.target(),
        ..Default::default()
    };
    let found: NodeGetVolumeStatsResponse = world
        .call("Node/NodeGetVolumeStats", stats)
        .expect("its size");
    assert_eq!(
        found.usage.iter().map(|one| one.total).collect::<Vec<_>>(),
        [SIZE as i64]
    );
    world.unpublish();
    assert!(!Path::new(&world.target()).exists());
    let read_only = NodePublishVolumeRequest {
        readonly: true,
        ..world.published(capability())
    };
    world.refused(PUBLISH, read_only, Code::InvalidArgument);
    world.refused(PUBLISH, world.published(writer()), Code::FailedPrecondition);
}

/// NodePublishVolume: required fields; FAILED_PRECONDITION without a staging path or a stage; one
/// writer only with SINGLE_NODE_SINGLE_WRITER.
#[test]
fn a_wrong_publish_is_refused() {
    let world = World::new();
    world.refused(PUBLISH, world.published(writer()), Code::FailedPrecondition);
    world.stage(writer());
    let good = || world.published(writer());
    for (bad, code) in [
        (
            NodePublishVolumeRequest {
                volume_id: String::new(),
                ..good()
            },
            Code::InvalidArgument,
        ),
        (
            NodePublishVolumeRequest {
                target_path: String::new(),
                ..good()
            },
            Code::InvalidArgument,
        ),
        (
            NodePublishVolumeRequest {
                volume_capability: None,
                ..good()
            },
            Code::InvalidArgument,
        ),
        (
            NodePublishVolumeRequest {
                staging_target_path: String::new(),
                ..good()
            },
            Code::FailedPrecondition,
        ),
        (
            NodePublishVolumeRequest {
                staging_target_path: "/elsewhere".into(),
                ..good()
            },
            Code::FailedPrecondition,
        ),
        (
            NodePublishVolumeRequest {
                volume_id: "v".into(),
                ..good()
            },
            Code::NotFound,
        ),
        (
            NodePublishVolumeRequest {
                volume_id: ABSENT.into(),
                ..good()
            },
            Code::FailedPrecondition,
        ),
    ] {
        world.refused(PUBLISH, bad, code);
    }
    world.machine.break_program(Some("mount"));
    world.refused(PUBLISH, good(), Code::Internal);
    assert!(
        !Path::new(&world.target()).exists(),
        "nothing is left of it"
    );
    world.machine.break_program(None);
    let single = || world.published(mount(Mode::SingleNodeSingleWriter));
    let _: Nothing = world.call(PUBLISH, single()).expect("the first");
    let _: Nothing = world.call(PUBLISH, single()).expect("again");
    let second = NodePublishVolumeRequest {
        target_path: format!("{}-2", world.target()),
        ..single()
    };
    world.refused(PUBLISH, second.clone(), Code::FailedPrecondition);
    let several = NodePublishVolumeRequest {
        volume_capability: Some(mount(Mode::SingleNodeMultiWriter)),
        ..second
    };
    let _: Nothing = world.call(PUBLISH, several).expect("several writers");
    let bad = NodeUnpublishVolumeRequest::default();
    world.refused(UNPUBLISH, bad, Code::InvalidArgument);
    let bad = NodeUnpublishVolumeRequest {
        volume_id: VOLUME.to_string(),
        ..Default::default()
    };
    world.refused(UNPUBLISH, bad, Code::InvalidArgument);
}

/// NodeUnpublishVolume keeps data that it did not mount.
#[test]
fn unpublish_keeps_foreign_data() {
    let world = World::new();
    let target = world.machine.path("target");
    fs::create_dir(&target).expect("made");
    fs::write(target.join("data"), "data").expect("written");
    let asked = NodeUnpublishVolumeRequest {
        volume_id: VOLUME.to_string(),
        target_path: world.target(),
    };
    world.refused(UNPUBLISH, asked, Code::Internal);
    assert!(target.join("data").exists());
}

/// NodeGetVolumeStats: usage of a file system in bytes and inodes; NOT_FOUND.
#[test]
fn usage_is_returned() {
    const STATS: &str = "Node/NodeGetVolumeStats";
    let world = World::new();
    world.stage(writer());
    world.publish(writer());
    let ask = |volume_id: &str, volume_path: &str| NodeGetVolumeStatsRequest {
        volume_id: volume_id.to_owned(),
        volume_path: volume_path.to_owned(),
        ..Default::default()
    };
    let id = VOLUME.to_string();
    let found: NodeGetVolumeStatsResponse = world
        .call(STATS, ask(&id, &world.target()))
        .expect("its usage");
    let units: Vec<Unit> = found.usage.iter().map(|one| one.unit()).collect();
    assert_eq!(units, [Unit::Bytes, Unit::Inodes]);
    for one in &found.usage {
        assert!(one.available >= 0 && one.used >= 0 && one.total >= one.available);
    }
    for (id, path, code) in [
        (id.as_str(), "/nowhere", Code::NotFound),
        (ABSENT, &*world.target(), Code::NotFound),
        ("v", &*world.target(), Code::NotFound),
        ("", &*world.target(), Code::InvalidArgument),
        (id.as_str(), "", Code::InvalidArgument),
    ] {
        world.refused(STATS, ask(id, path), code);
    }
}

/// NodeExpandVolume: idempotent, after the controller's part; the file system grows.
/// NodeStageVolume grows it, too: its contents may be those of a smaller volume.
#[test]
fn expand_grows_the_file_system() {
    const EXPAND: &str = "Node/NodeExpandVolume";
    for (fs_type, program) in [("ext4", "resize2fs"), ("xfs", "xfs_growfs")] {
        let world = World::new();
        world.stage(of_type(fs_type, &[]));
        assert_eq!(world.machine.runs(program), 1);
        world.publish(of_type(fs_type, &[]));
        let ask = |volume_path: &str| NodeExpandVolumeRequest {
            volume_id: VOLUME.to_string(),
            volume_path: volume_path.to_owned(),
            capacity_range: Some(CapacityRange {
                required_bytes: 2 * SIZE as i64,
                limit_bytes: 0,
            }),
            ..Default::default()
        };
        // The kernel sees the new size a moment later.
        let machine = Arc::clone(&world.machine);
        let later = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(200));
            machine.set_size(2 * SIZE);
        });
        for _ in 0..2 {
            let found: NodeExpandVolumeResponse =
                world.call(EXPAND, ask(&world.target())).expect("it grows");
            assert_eq!(found.capacity_bytes, 2 * SIZE as i64);
        }
        later.join().expect("no panic");
        assert_eq!(world.machine.runs(program), 3);
        world.refused(EXPAND, ask("/nowhere"), Code::NotFound);
        world.refused(EXPAND, ask(""), Code::InvalidArgument);
    }
}

/// NodeGetInfo: the id by which the controller publishes. NodeGetCapabilities. accessible_topology:
/// "A plugin that returns this field MUST also set the VOLUME_ACCESSIBILITY_CONSTRAINTS".
#[test]
fn a_node_returns_its_id() {
    let world = World::new();
    let info: NodeGetInfoResponse = world
        .call("Node/NodeGetInfo", Nothing {})
        .expect("an answer");
    assert_eq!(info.node_id, HOST);
    assert!(info.max_volumes_per_node >= 0 && info.node_id.len() <= 192);
    assert_eq!(info.accessible_topology, None);
    let found: NodeGetCapabilitiesResponse = world
        .call("Node/NodeGetCapabilities", Nothing {})
        .expect("an answer");
    assert_eq!(found.capabilities.len(), 4);
}
