//! `csi.v1.Node` where volumes share a subsystem, and where the kernel hangs.

use std::fs;
use std::time::{Duration, Instant};

use nacre_cluster_csi::messages::node::{NodeStageVolumeRequest, NodeUnstageVolumeRequest};
use nacre_cluster_csi::messages::{Mode, Nothing};
use nacre_cluster_csi::node::Reconnector;
use tonic::Code;
use uuid::Uuid;

use crate::client::block;
use crate::machine::NQN;
use crate::node::{STAGE, UNSTAGE, VOLUME, World, writer};

/// Another namespace of the subsystem.
const SECOND: Uuid = Uuid::from_u128(0x5f0c_1c3e_8b3a_4c55_9d0b_6b3f_3f1c_0c02);
const SHORT: Duration = Duration::from_millis(500);
const PATIENCE: Duration = Duration::from_secs(20);

fn second_staged(world: &World) -> NodeStageVolumeRequest {
    let mut asked = world.staged(block(Mode::SingleNodeWriter));
    asked.volume_id = SECOND.to_string();
    asked.staging_target_path += "-2";
    let uuid = asked.publish_context.get_mut("uuid").expect("one");
    *uuid = SECOND.to_string();
    asked
}

fn second_unstaged(world: &World) -> NodeUnstageVolumeRequest {
    let mut asked = world.unstaged();
    asked.volume_id = SECOND.to_string();
    asked.staging_target_path += "-2";
    asked
}

/// NodeUnstageVolume: the paths of a subsystem stay while another staged volume is in it.
#[test]
fn volumes_of_one_subsystem_share_its_paths() {
    let mut world = World::new();
    for is_second_last in [true, false] {
        world.machine.add_device("nvme0n2", NQN, SECOND);
        world.stage(writer());
        let _: Nothing = world.call(STAGE, second_staged(&world)).expect("staged");
        world.restart();
        if is_second_last {
            world.unstage();
            assert_eq!(world.machine.mount_count(), 0);
        } else {
            let asked = second_unstaged(&world);
            let _: Nothing = world.call(UNSTAGE, asked).expect("unstaged");
        }
        assert_eq!(world.machine.controllers().len(), 2, "the other volume's");
        if is_second_last {
            let asked = second_unstaged(&world);
            let _: Nothing = world.call(UNSTAGE, asked).expect("unstaged");
        } else {
            world.unstage();
        }
        assert!(world.machine.controllers().is_empty());
        world.machine.remove_device("nvme0n2");
    }
}

/// NodeUnstageVolume: the paths stay for a namespace of the subsystem that is in use without a
/// record: an administrator mounted it, or its record is lost.
#[test]
fn a_namespace_without_a_record_keeps_its_paths() {
    let world = World::new();
    world.stage(writer());
    world.machine.add_device("nvme0n2", NQN, SECOND);
    let by_hand = world.machine.path("by-hand");
    world.machine.mount_other("259:99", &by_hand);
    world.unstage();
    assert_eq!(world.machine.controllers().len(), 2);
    // A namespace without a user keeps no paths.
    world.machine.remove_device("nvme0n2");
    world
        .machine
        .add_device("nvme0n3", "nqn.2025-01.io.example:other", SECOND);
    world.stage(writer());
    world.unstage();
    assert!(world.machine.controllers().is_empty());
}

/// NodeUnstageVolume of a block volume for reading, whose device stays: it can be staged for
/// writing next time.
#[test]
fn a_device_that_stays_takes_writes_again() {
    let world = World::new();
    world.machine.add_device("nvme0n2", NQN, SECOND);
    world.stage(block(Mode::MultiNodeReaderOnly));
    let _: Nothing = world.call(STAGE, second_staged(&world)).expect("staged");
    world.unstage();
    assert_eq!(world.machine.controllers().len(), 2);
    assert_eq!(world.machine.runs("blockdev --setrw"), 1);
    let ro = fs::read_to_string(world.machine.path("sys/class/block/nvme0n1/ro"));
    assert_eq!(ro.expect("read"), "0");
}

/// NodeUnstageVolume: a damaged record of another volume does not name its subsystem. Its
/// device does.
#[test]
fn a_damaged_record_of_another_volume_keeps_its_paths() {
    let world = World::new();
    world.machine.add_device("nvme0n2", NQN, SECOND);
    let record = world.machine.path("state").join(format!("{SECOND}.json"));
    fs::write(&record, "damaged").expect("written");
    world.stage(writer());
    world.unstage();
    assert_eq!(world.machine.controllers().len(), 2);
    world.machine.remove_device("nvme0n2");
    world.unstage();
    assert!(world.machine.controllers().is_empty());
    assert!(record.exists());
}

/// ABORTED: calls that connect or disconnect a subsystem exclude each other, also for different
/// volumes.
#[test]
fn a_subsystem_has_one_call_at_a_time() {
    let world = World::new();
    world.machine.add_device("nvme0n2", NQN, SECOND);
    let _: Nothing = world.call(STAGE, second_staged(&world)).expect("staged");
    let first = world.machine.controllers().remove(0);
    nacre_cluster_csi::node::Host::disconnect(&*world.machine, &first)
        .expect("the controller disconnects");
    let end = world.machine.silence("192.0.2.1");
    std::thread::scope(|scope| {
        let call = scope.spawn(|| world.stage(writer()));
        world.machine.until_hanging(1);
        let why = world.refused(STAGE, second_staged(&world), Code::Aborted);
        assert!(why.contains(NQN), "{why}");
        world.refused(UNSTAGE, second_unstaged(&world), Code::Aborted);
        let mut reconnector = Reconnector::default();
        assert_eq!(reconnector.connect_missing(&world.node, Instant::now()), 0);
        drop(end);
        call.join().expect("no panic");
    });
    assert_eq!(world.machine.controllers().len(), 2);
    let _: Nothing = world.call(STAGE, second_staged(&world)).expect("again");
}

/// A connection that hangs in the kernel costs no connected path: the volume can be staged again,
/// and the reconnector goes on. The paths stay until the connection has ended, because its
/// controller would come later.
#[test]
fn a_connection_that_hangs_costs_no_connected_path() {
    let world = World::with_path_time(SHORT);
    world.machine.set_down("192.0.2.1", true);
    world.stage(writer());
    assert_eq!(world.machine.controllers().len(), 1);
    world.machine.set_down("192.0.2.1", false);
    let end = world.machine.silence("192.0.2.1");
    let (mut reconnector, start) = (Reconnector::default(), Instant::now());
    // No second write to the kernel, and no wait for the first one.
    for later in [0, 100] {
        let now = start + Duration::from_secs(later);
        assert_eq!(reconnector.connect_missing(&world.node, now), 0);
        world.machine.until_hanging(1);
    }
    let asked = Instant::now();
    world.stage(writer());
    assert!(asked.elapsed() < PATIENCE);
    let why = world.refused(UNSTAGE, world.unstaged(), Code::DeadlineExceeded);
    assert!(why.contains("192.0.2.1"), "{why}");
    assert_eq!(world.machine.controllers().len(), 1);
    drop(end);
    world.machine.until_hanging(0);
    until(|| world.call::<_, Nothing>(UNSTAGE, world.unstaged()).is_ok());
    assert!(world.machine.controllers().is_empty());
}

/// NodeStageVolume without any path: the cause, and DEADLINE_EXCEEDED. The volume is not pending
/// after that, and a call that comes later works.
#[test]
fn hanging_connections_end_the_call() {
    let world = World::with_path_time(SHORT);
    let ends = ["192.0.2.1", "192.0.2.2"].map(|address| world.machine.silence(address));
    for cause in ["no answer within", "has not ended"] {
        let why = world.refused(STAGE, world.staged(writer()), Code::DeadlineExceeded);
        assert!(why.contains(cause), "{why}");
    }
    // The second address is not tried: the kernel would wait for the first one.
    world.machine.until_hanging(1);
    drop(ends);
    world.machine.until_hanging(0);
    until(|| {
        let staged = world.call::<_, Nothing>(STAGE, world.staged(writer()));
        staged.is_ok() && world.machine.controllers().len() == 2
    });
    until(|| world.call::<_, Nothing>(UNSTAGE, world.unstaged()).is_ok());
}

/// NodeUnstageVolume: a controller whose deletion hangs costs itself. The others go, and a later
/// call finishes.
#[test]
fn a_deletion_that_hangs_costs_its_controller() {
    let world = World::with_path_time(SHORT);
    world.stage(writer());
    let first = world.machine.controllers().remove(0);
    let end = world.machine.silence(&first);
    for cause in ["no answer within", "has not ended"] {
        let why = world.refused(UNSTAGE, world.unstaged(), Code::DeadlineExceeded);
        assert!(why.contains(cause) && why.contains(&first), "{why}");
        assert_eq!(world.machine.controllers(), std::slice::from_ref(&first));
    }
    world.machine.until_hanging(1);
    drop(end);
    until(|| world.call::<_, Nothing>(UNSTAGE, world.unstaged()).is_ok());
    assert!(world.machine.controllers().is_empty());
    let record = world.machine.path("state").join(format!("{VOLUME}.json"));
    assert!(!record.exists());
}

fn until(is_true: impl Fn() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !is_true() {
        assert!(Instant::now() < end, "it stays refused");
        std::thread::sleep(Duration::from_millis(5));
    }
}
