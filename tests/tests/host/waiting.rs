//! Tests of I/O that waits for a connection, a namespace or access: the time limits, and the
//! guarantees afterwards.

use std::sync::Arc;
use std::time::Duration;

use nacre_bdev::{Bdev, Op, Status};
use nacre_nvmf::host::{HostOptions, IoQueue};
use nacre_nvmf::transport::{Address, TransportType};
use nacre_nvmf_wire::log::ana::AnaState;
use nacre_reactor::Nanos;
use nacre_tests::target::{SUBNQN, nqn, ram};

use super::rig::{BLOCKS, World, bytes, options};

const LIMIT: Duration = Duration::from_secs(5);

fn impatient(queues: u16) -> HostOptions {
    let mut options = options(queues);
    options.fast_io_fail = Some(LIMIT);
    options.wait_for_access = true;
    options.loss_timeout = None;
    options
}

fn losses(world: &World) -> u64 {
    world.controller().link().losses()
}

fn set_access(world: &World, state: AnaState) {
    let address = Address::Loopback("here".into());
    let changed =
        world
            .target()
            .set_ana_state(&nqn(SUBNQN), TransportType::Loopback, &address, None, state);
    assert_eq!(changed.ok(), Some(true));
}

/// Goal: whenever and however a connection ends, the loss is counted before the first completion on
/// the next connection. Without a loss the counter stays.
#[test]
fn a_loss_is_counted_before_the_next_answer() {
    let mut world = World::connected(2);
    assert_eq!(
        losses(&world),
        0,
        "the first connection does not count as a loss"
    );
    for round in 0..40u64 {
        let before = losses(&world);
        let served = [world.queues[0].stats(), world.queues[1].stats()];
        assert_eq!(world.write(0, round, 1, 1), Status::Ok);
        assert_eq!(losses(&world), before, "nothing was lost");
        // I/O in flight is answered over the next connection.
        world.tap.hold(true);
        let tokens = [
            world.submit_write(0, round, 1, 2),
            world.submit_write(1, round + 100, 1, 2),
        ];
        (0..round % 9).for_each(|_| world.turn());
        match round % 4 {
            0 => {
                world.kill_target();
                (0..round).for_each(|_| world.turn());
                world.revive_target();
            }
            1 => world.faults(0).break_now(),
            2 => world.faults(1).break_now(),
            _ => world.controller().link().request_reset(),
        }
        // Hold completions until then, so that none comes from the old connection.
        (0..100).for_each(|_| world.turn());
        world.tap.hold(false);
        for (queue, token) in tokens.into_iter().enumerate() {
            world.until("a completion", |w| {
                let answered = w.completions.contains_key(&token);
                let renewed = w.queues[queue].stats().connections > served[queue].connections;
                assert!(
                    !answered || !renewed || losses(w) > before,
                    "round {round}: a completion on the new connection, and the loss is not counted"
                );
                answered
            });
            assert_eq!(world.wait(token).status, Status::Ok);
        }
        assert!(losses(&world) > before, "round {round}");
        world.until("live", |w| w.queues.iter().all(IoQueue::is_live));
    }
    world.assert_buffers_back(0);
}

/// Goal: I/O waits up to its limit; later I/O fails at once; when the target returns, however late,
/// I/O is served again.
#[test]
fn io_fails_after_the_fast_fail_time() {
    let mut world = World::connected_with(impatient(2));
    assert_eq!(world.write(0, 5, 1, 3), Status::Ok);
    world.tap.hold(true);
    let under_way = world.submit_write(0, 0, 1, 1);
    (0..50).for_each(|_| world.turn());
    world.kill_target();
    let lost_at = world.now;
    let waiting = world.submit_read(1, 0, 1);
    world.pass(LIMIT - Duration::from_millis(100));
    assert!(world.completions.is_empty(), "not yet");
    for token in [under_way, waiting] {
        let ended = world.wait(token);
        assert_eq!(ended.status, Status::Gone);
        assert_eq!(ended.data.len(), 1, "with its buffer");
    }
    let took = world.now.since(lost_at);
    assert!(took < LIMIT + Duration::from_millis(100), "{took:?}");
    assert!(world.controller().link().is_away());

    // From now on I/O fails at once: within a turn.
    let start = world.now;
    assert_eq!(world.write(0, 0, 1, 1), Status::Gone);
    assert!(world.now.since(start) < Duration::from_millis(50));
    // A queue opened meanwhile does not start a new wait.
    world.queues.remove(1);
    world.open_queue(2, 1);
    assert_eq!(world.write(1, 0, 1, 1), Status::Gone);

    world.pass(Duration::from_secs(600));
    world.tap.hold(false);
    world.revive_target();
    world.until("live", |w| w.queues.iter().all(IoQueue::is_live));
    assert!(!world.controller().link().is_away());
    assert_eq!(world.read(0, 5, 1), bytes(1, 3));
    assert_eq!(world.write(1, 0, 1, 1), Status::Ok);
    world.assert_buffers_back(0);
}

/// Goal: the same limit applies if the association lives but an I/O queue is refused.
#[test]
fn fast_fail_of_one_queue() {
    let mut world = World::connected_with(impatient(1));
    // Beyond the granted number.
    world.open_queue(200, 1);
    let token = world.submit_write(1, 0, 1, 1);
    world.pass(LIMIT - Duration::from_millis(100));
    assert!(world.completions.is_empty(), "not yet");
    assert_eq!(world.wait(token).status, Status::Gone);
    assert_eq!(world.write(0, 0, 1, 1), Status::Ok, "the other is served");
}

/// Goal: without ANA access I/O waits, in order. It runs as soon as the target reports access, and
/// fails if that takes too long.
#[test]
fn io_waits_without_ana_access() {
    let mut world = World::connected_with(impatient(1));
    let losses_before = losses(&world);
    assert_eq!(world.write(0, 0, 8, 1), Status::Ok);
    set_access(&world, AnaState::Inaccessible);
    world.tap.take_log();
    let mut tokens = Vec::new();
    for at in 0..4u64 {
        tokens.push(world.submit_write(0, at, 1, 20 + at as u8));
    }
    // A fused pair: both halves are refused, and both are resent.
    let (expected, new) = (world.buf(1, 1), world.buf(1, 9));
    let io = world.io(Op::CompareAndWrite, 7, 1).with(expected).with(new);
    let swap = world.submit(0, io);
    world.pass(Duration::from_secs(2));
    let link = Arc::clone(world.controller().link());
    let access = || {
        let state = link.state();
        state.access(&state.namespaces[&1])
    };
    assert_eq!(access(), AnaState::Inaccessible);
    assert!(world.completions.is_empty());
    assert!(world.tap.take_log().is_empty(), "the device saw nothing");

    let changed = world.now;
    set_access(&world, AnaState::NonOptimized);
    // Block 7 holds the pattern of eight blocks and is compared with that of one: it differs.
    assert_eq!(world.wait(swap).status, Status::Miscompare);
    for token in tokens {
        assert_eq!(world.wait(token).status, Status::Ok);
    }
    assert!(world.now.since(changed) < Duration::from_millis(100));
    assert_eq!(access(), AnaState::NonOptimized);
    assert_eq!(world.read(0, 2, 1), bytes(1, 22));

    set_access(&world, AnaState::Change);
    let start = world.now;
    assert_eq!(world.write(0, 0, 1, 1), Status::Gone);
    let took = world.now.since(start);
    assert!(took >= LIMIT, "{took:?}");
    assert!(took < LIMIT + Duration::from_millis(500), "{took:?}");
    let start = world.now;
    assert_eq!(world.write(0, 0, 1, 1), Status::Gone);
    assert!(world.now.since(start) < Duration::from_millis(50));

    set_access(&world, AnaState::Optimized);
    world.until("known", |_| access() == AnaState::Optimized);
    assert_eq!(world.write(0, 0, 1, 1), Status::Ok);
    set_access(&world, AnaState::PersistentLoss);
    let start = world.now;
    assert_eq!(
        world.write(0, 0, 1, 1),
        Status::Gone,
        "not worth waiting for"
    );
    assert!(world.now.since(start) < Duration::from_millis(50));
    world.until("known", |_| access() == AnaState::PersistentLoss);
    assert_eq!(losses(&world), losses_before, "no connection ended");
    world.assert_buffers_back(0);
}

/// Goal: a host without a wait option gets the error at once, and knows the ANA states from the
/// connect on.
#[test]
fn inaccessible_at_connect() {
    let mut world = World::new();
    set_access(&world, AnaState::Inaccessible);
    world.connect(options(1));
    world.until("live", |w| w.controller().is_live());
    let state = world.controller().link().state();
    assert_eq!(state.access(&state.namespaces[&1]), AnaState::Inaccessible);
    world.open_queue(1, 1);
    assert_eq!(world.write(0, 0, 1, 1), Status::Gone);
}

/// Goal: a queue bound to a namespace uses no other, not even as the first one it finds.
#[test]
fn another_identity_is_never_written_to() {
    let mut world = World::connected_with(impatient(1));
    let link = Arc::clone(world.controller().link());
    let known = link.namespace(1).unwrap();
    world.queues.clear();
    // The namespace is replaced while the host is connected.
    world.remove_namespace(1);
    let other = ram("other", 512, BLOCKS * 512);
    assert_eq!(world.add_namespace(Arc::clone(&other)), 1);
    world.until("replaced", |_| {
        link.namespace(1).is_some_and(|n| n.uuid != known.uuid)
    });
    let options = world.controller().options().clone();
    let (dial, memory) = (world.dial(), world.memory.clone());
    let queue = IoQueue::new(
        options,
        Arc::clone(&link),
        dial,
        memory,
        (1, 1),
        Nanos::ZERO,
    );
    world.queues.push(queue.unwrap().expecting(known.clone()));
    assert_eq!(world.write(0, 7, 1, 1), Status::Gone);

    // The original namespace returns under its NSID.
    world.remove_namespace(1);
    let tap: Arc<dyn Bdev> = world.tap.clone();
    assert_eq!(world.add_namespace(tap), 1);
    world.until("back", |_| {
        link.namespace(1).is_some_and(|n| n.uuid == known.uuid)
    });
    world.until("served", |w| w.queues[0].is_live());
    assert_eq!(world.write(0, 7, 1, 1), Status::Ok);

    // It is replaced under a connected queue: the host does not write to the new one.
    world.remove_namespace(1);
    assert_eq!(world.add_namespace(other), 1);
    world.until("noticed", |w| !w.queues[0].is_live());
    assert_eq!(world.write(0, 9, 1, 1), Status::Gone);
    world.pass(Duration::from_secs(30));
    assert_eq!(world.write(0, 9, 1, 1), Status::Gone);
    assert!(!world.queues[0].is_live());
}

/// Goal: growth is followed; a shrunken namespace has lost data, so it is treated as a different
/// one.
#[test]
fn growth_is_followed_and_shrinking_refused() {
    let mut world = World::connected_with(impatient(1));
    world.kill_target();
    world.tap.resize(BLOCKS / 2);
    world.revive_target();
    assert_eq!(world.write(0, 0, 1, 1), Status::Gone);
    let link = Arc::clone(world.controller().link());
    let found = link.namespace(1).unwrap();
    let why = found.difference(&nacre_nvmf::host::NamespaceInfo {
        blocks: 7,
        ..found.clone()
    });
    assert_eq!(why.as_deref(), Some("it had 2048 blocks, and has 7 now"));

    world.tap.resize(BLOCKS);
    world.resized();
    world.until("served again", |w| w.queues[0].is_live());
    assert_eq!(world.write(0, BLOCKS - 1, 1, 1), Status::Ok);
}
