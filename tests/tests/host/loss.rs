//! Tests of connections that are lost under I/O: no I/O is lost, and none is executed twice after
//! its completion.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use nacre_bdev::{Op, Queue, Status};
use nacre_nvmf::host::ControllerState;

use super::rig::{World, bytes, options};

/// Goal: writes and reads in flight survive a target that is killed and restarted. Each completes
/// once, in order of submission, with the right data.
#[test]
fn io_survives_a_restarted_target() {
    let mut world = World::connected(2);
    assert_eq!(world.write(0, 500, 8, 42), Status::Ok);
    world.tap.take_log();
    world.tap.hold(true);
    let mut tokens = Vec::new();
    for at in 0..6u64 {
        tokens.push(world.submit_write(0, at * 8, 8, at as u8));
        tokens.push(world.submit_read(0, 500, 8));
    }
    for _ in 0..50 {
        world.turn();
    }
    let before = world.tap.take_log();
    assert_eq!(before.len(), 12, "all of them are with the device");
    world.kill_target();
    world.tap.hold(false);
    world.pass(Duration::from_secs(3));
    assert!(world.completions.is_empty(), "nothing is given up");
    assert_eq!(world.queues[0].inflight(), 12);

    world.revive_target();
    world.until("all back", |w| w.completions.len() == 12);
    assert_eq!(world.tap.take_log(), before, "again, in the same order");
    assert_eq!(world.order[1..], tokens, "and completed in it");
    for token in tokens {
        let back = world.completions.remove(&token).unwrap();
        assert_eq!(back.status, Status::Ok);
        assert_eq!(back.data.len(), 1, "its buffer came back with it");
    }
    for at in 0..6u64 {
        assert_eq!(world.read(1, at * 8, 8), bytes(8, at as u8));
    }
    let stats = world.queues[0].stats();
    assert_eq!((stats.connections, stats.losses, stats.resent), (2, 1, 12));
    world.assert_buffers_back(0);
}

/// Goal: if only the I/O connection breaks, at any moment, reads and writes continue without
/// errors. The association is replaced, so that no command of the old queue is applied late.
#[test]
fn io_connections_that_break() {
    let mut world = World::connected(2);
    for round in 0..60u64 {
        let generation = world.controller().link().generation();
        let losses = world.queues[0].stats().losses;
        let token = world.submit_write(0, round * 8, 8, round as u8);
        for _ in 0..round % 7 {
            world.turn();
        }
        let done = world.completions.contains_key(&token);
        world.faults(1).break_now();
        world.until("noticed", |w| w.queues[0].stats().losses > losses);
        assert_eq!(world.wait(token).status, Status::Ok);
        world.until("live", |w| w.queues.iter().all(|q| q.is_live()));
        assert_eq!(world.read(1, round * 8, 8), bytes(8, round as u8));
        if !done {
            let now = world.controller().link().generation();
            assert_ne!(now, generation, "round {round}");
        }
    }
    world.assert_buffers_back(0);
}

/// Goal: if an I/O connection breaks while the controller's core sleeps, the core is woken. Until
/// it has ended the association, commands that the target may still execute, or has executed, are
/// not resent.
#[test]
fn nothing_is_sent_again_into_the_same_association() {
    let mut world = World::connected(1);
    let woken = Arc::new(AtomicUsize::new(0));
    let theirs = Arc::clone(&woken);
    let link = Arc::clone(world.controller().link());
    link.set_waker(move || {
        theirs.fetch_add(1, Ordering::Relaxed);
    });
    let token = world.submit_write(0, 7, 1, 1);
    // Only the target runs, not the queue: the answer is on its way when the connection breaks.
    let queue = world.queues.remove(0);
    (0..50).for_each(|_| world.turn());
    world.queues.insert(0, queue);
    assert_eq!(world.tap.take_log(), [(Op::Write, 7)]);
    let (controller, generation) = (world.controller.take(), link.generation());
    world.faults(1).break_now();
    world.pass(Duration::from_secs(1));
    assert_eq!(
        link.generation(),
        generation,
        "the association has not ended yet"
    );
    assert_eq!(world.tap.take_log(), [], "sent again beside itself");
    assert_eq!(woken.load(Ordering::Relaxed), 1);

    world.controller = controller;
    assert_eq!(world.wait(token).status, Status::Ok);
    assert_ne!(link.generation(), generation);
    assert_eq!(world.read(0, 7, 1), bytes(1, 1));
    // A queue without commands in flight reconnects at once.
    let controller = world.controller.take();
    world.faults(1).break_now();
    world.until("back", |w| w.queues[0].stats().connections == 3);
    world.controller = controller;
    assert_eq!(woken.load(Ordering::Relaxed), 1);
    world.assert_buffers_back(0);
}

/// Goal: reconnect delays double up to a limit, and restart after a success.
#[test]
fn back_off() {
    let mut world = World::connected(1);
    world.kill_target();
    world.net.borrow_mut().dials.clear();
    world.pass(Duration::from_secs(60));
    let gaps = |world: &World| -> Vec<f64> {
        let net = world.net.borrow();
        let times: Vec<_> = net.dials.iter().filter(|d| d.0 == 0).map(|d| d.1).collect();
        times
            .windows(2)
            .map(|w| w[1].since(w[0]).as_secs_f64())
            .collect()
    };
    let found = gaps(&world);
    let expected = [1.0, 2.0, 4.0, 8.0, 10.0, 10.0, 10.0, 10.0];
    assert!(found.len() >= 7, "{found:?}");
    for (found, expected) in found.iter().zip(expected) {
        assert!(
            (found - expected).abs() < 0.05,
            "{found} instead of {expected}"
        );
    }
    world.revive_target();
    world.until("live", |w| w.controller().is_live());
    world.kill_target();
    world.net.borrow_mut().dials.clear();
    world.until("tried", |w| w.net.borrow().dials.len() >= 2);
    assert!((gaps(&world)[0] - 1.0).abs() < 0.05, "{:?}", gaps(&world));
}

#[test]
fn a_target_lost_past_the_loss_timeout() {
    let mut options = options(1);
    options.loss_timeout = Some(Duration::from_secs(30));
    let mut world = World::connected_with(options);
    let token = world.submit_write(0, 0, 1, 1);
    world.kill_target();
    let lost_at = world.now;
    world.until("given up", |w| {
        matches!(w.controller().state(), ControllerState::Failed(_))
    });
    let took = world.now.since(lost_at);
    let expected = Duration::from_secs(30);
    assert!(
        took.abs_diff(expected) < Duration::from_millis(100),
        "{took:?}"
    );
    assert_eq!(world.wait(token).status, Status::Gone);
    // Later I/O fails at once, and the controller does not recover.
    world.revive_target();
    assert_eq!(world.write(0, 0, 1, 1), Status::Gone);
    world.pass(Duration::from_secs(20));
    assert!(matches!(
        world.controller().state(),
        ControllerState::Failed(_)
    ));
    world.assert_buffers_back(0);
}

/// Goal: a permanent refusal on reconnect is final.
#[test]
fn refused_on_return() {
    let mut world = World::connected(1);
    let token = world.submit_write(0, 0, 1, 1);
    world.tap.hold(true);
    world.kill_target();
    world.start_target();
    let subnqn = world.controller().options().subnqn.clone();
    world.target().delete_subsystem(&subnqn).unwrap();
    assert_eq!(world.wait(token).status, Status::Gone);
    // Without a listener the connection fails without an answer: the host retries.
    assert!(matches!(
        world.controller().state(),
        ControllerState::Failed(_)
    ));
}

/// Goal: a command that times out ends the association, and the next association executes it.
#[test]
fn a_command_that_takes_too_long() {
    let mut options = options(1);
    options.io_timeout = Duration::from_secs(5);
    let mut world = World::connected_with(options);
    let generation = world.controller().link().generation();
    world.tap.hold(true);
    let write = world.submit_write(0, 3, 1, 77);
    let read = world.submit_read(0, 3, 1);
    world.pass(Duration::from_secs(4));
    assert_eq!(world.controller().link().generation(), generation);
    world.pass(Duration::from_secs(2));
    assert_ne!(world.controller().link().generation(), generation);
    world.tap.hold(false);
    assert_eq!(world.wait(write).status, Status::Ok);
    assert_eq!(world.wait(read).status, Status::Ok);
    assert_eq!(world.read(0, 3, 1), bytes(1, 77));
    assert!(world.queues[0].stats().losses >= 1);
    world.assert_buffers_back(0);
}

/// Goal: an I/O that is not idempotent is not resent; it ends with an unknown result instead.
#[test]
fn io_that_is_not_repeatable() {
    let mut world = World::connected(1);
    assert_eq!(world.write(0, 0, 8, 1), Status::Ok);
    assert_eq!(world.write(0, 100, 1, 1), Status::Ok);
    // The swap happened but its answer is lost: resent, it would compare with its own data.
    let (expected, new) = (world.buf(1, 1), world.buf(1, 2));
    let io = world.io(Op::CompareAndWrite, 100, 1);
    let swap = world.submit(0, io.with(expected).with(new));
    let overlapping = world.io(Op::Copy, 2, 4).source(0);
    let overlapping = world.submit(0, overlapping);
    let apart = world.io(Op::Copy, 200, 4).source(100);
    let apart = world.submit(0, apart);
    world.faults(1).stall(true);
    world.faults(1).stall(false);
    // Only the target runs and executes them, not the host.
    let queue = world.queues.remove(0);
    for _ in 0..20 {
        world.turn();
    }
    world.queues.insert(0, queue);
    world.faults(1).break_now();
    assert_eq!(world.wait(swap).status, Status::DeviceError);
    assert_eq!(world.wait(overlapping).status, Status::DeviceError);
    assert_eq!(world.wait(apart).status, Status::Ok);
    assert_eq!(world.read(0, 100, 1), bytes(1, 2));
    world.assert_buffers_back(0);
}

/// Goal: queues survive the drop of their controller object.
#[test]
fn without_a_controller() {
    let mut world = World::connected(1);
    world.tap.hold(true);
    let token = world.submit_write(0, 0, 1, 1);
    world.turn();
    world.controller = None;
    assert_eq!(world.wait(token).status, Status::Gone);
    drop(world.queues.remove(0));
    world.assert_buffers_back(0);
}
