//! Tests of namespaces that are added, removed and changed while a host is connected.

use std::sync::Arc;

use nacre_bdev::Status;
use nacre_tests::target::ram;

use super::rig::{BLOCKS, World};

#[test]
fn namespace_changes_reach_a_connected_host() {
    let mut world = World::connected(1);
    let link = world.controller().link().clone();
    let version = link.version();

    let second = world.add_namespace(ram("second", 4096, 1 << 20));
    world.until("added", |_| link.namespace(second).is_some());
    assert_eq!(link.namespace(second).unwrap().blocks, 256);
    assert_eq!(link.namespace(second).unwrap().block_size, 4096);
    assert_ne!(link.version(), version);
    assert!(link.namespace(1).is_some(), "the other stays");

    world.tap.resize(BLOCKS / 2);
    world.resized();
    world.until("resized", |_| {
        link.namespace(1).is_some_and(|n| n.blocks == BLOCKS / 2)
    });

    world.remove_namespace(second);
    world.until("removed", |_| link.namespace(second).is_none());
    assert!(link.namespace(1).is_some());
    assert!(
        world.controller().is_live(),
        "the association was not disturbed"
    );
}

/// Goal: after many changes in a row the host knows the final state.
#[test]
fn no_namespace_change_is_lost() {
    let mut world = World::connected(1);
    let link = world.controller().link().clone();
    for round in 0..20 {
        let added: Vec<u32> = (0..5)
            .map(|at| world.add_namespace(ram(&format!("r{round}-{at}"), 512, 65_536)))
            .collect();
        for _ in 0..round {
            world.turn();
        }
        for nsid in &added[..4] {
            world.remove_namespace(*nsid);
        }
        world.turn();
    }
    let there: Vec<u32> = {
        let subsystem = world
            .target()
            .subsystem(&super::rig::options(1).subnqn)
            .unwrap();
        let entries = subsystem.namespaces();
        entries.iter().map(|entry| entry.namespace.nsid).collect()
    };
    assert_eq!(there.len(), 21);
    world.until("all known", |_| {
        link.state()
            .namespaces
            .keys()
            .copied()
            .eq(there.iter().copied())
    });
}

/// Goal: the host reads more namespaces than one list holds, on a network where this takes longer
/// than the connect timeout.
#[test]
fn a_long_list() {
    let mut world = World::new();
    for at in 0..1100 {
        world.add_namespace(ram(&format!("r{at}"), 512, 4096));
    }
    let options = super::rig::options(1);
    let limit = options.connect_timeout.max(options.keep_alive);
    let began = world.now;
    world.connect(options);
    while !world.controller().is_live() {
        assert!(world.now.since(began) < limit * 20, "{}", world.failure());
        world.step(std::time::Duration::from_millis(10));
    }
    assert!(world.now.since(began) > limit);
    assert_eq!(world.controller().link().state().namespaces.len(), 1101);
}

/// Goal: I/O to a removed namespace ends with that error.
#[test]
fn io_to_a_removed_namespace() {
    let mut world = World::connected(1);
    assert_eq!(world.write(0, 0, 1, 1), Status::Ok);
    world.remove_namespace(1);
    assert_eq!(world.write(0, 0, 1, 2), Status::Gone);
}

/// Goal: I/O in flight never reaches another namespace with the same NSID.
#[test]
fn another_namespace_under_the_same_number() {
    let mut world = World::connected(1);
    world.tap.hold(true);
    let token = world.submit_write(0, 7, 1, 1);
    for _ in 0..100 {
        world.turn();
    }
    world.kill_target();
    world.start_target();
    let other = ram("other", 512, 1 << 20);
    assert_eq!(world.add_namespace(Arc::clone(&other)), 1);
    assert_eq!(world.wait(token).status, Status::Gone);
    assert!(!world.queues[0].is_live());
    world.queues.remove(0);
    world.open_queue(1, 1);
    world.until("the new queue", |w| w.queues[0].is_live());
    assert_eq!(world.read(0, 7, 1), vec![0; 512], "nothing was written");
}
