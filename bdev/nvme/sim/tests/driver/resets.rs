//! Tests of controller resets under load, requested or not: every I/O completes exactly once, and
//! the stored data is right.

use std::time::Duration;

use nacre_bdev::{Op, Status};
use nacre_bdev_nvme::{ControlError, DriveOptions, Event, ResetReason, State};
use nacre_bdev_nvme_sim::{Action, Config, Pace, Rule, Target};
use nacre_nvmf_wire::StatusCode;
use nacre_nvmf_wire::opcode::admin;

use super::rig::Rig;

fn slow() -> Config {
    Config {
        pace: Pace {
            latency: (Duration::from_micros(100), Duration::from_millis(4)),
            ready_after: Duration::from_millis(30),
            disabled_after: Duration::from_millis(15),
            ..Pace::default()
        },
        ..Config::default()
    }
}

fn reasons(rig: &Rig) -> Vec<ResetReason> {
    let events = rig.events.take().into_iter();
    events
        .filter_map(|event| match event {
            Event::Reset { reason } => Some(reason),
            _ => None,
        })
        .collect()
}

/// Goal: a controller that fetches an admin command while it is being disabled reads valid memory.
/// Method: commands and the reset are issued in one turn of the reactor, and disabling takes time;
/// the same for a drive that the system wrongly reports as removed.
#[test]
fn commands_that_a_reset_overtakes() {
    let mut rig = Rig::new(slow());
    let controller = rig.attach();
    for _ in 0..3 {
        let handle = controller.clone();
        let log = rig.core.spawn_local(async move { handle.health().await });
        let handle = controller.clone();
        let reset = rig.core.spawn_local(async move { handle.reset().await });
        rig.core.block_on(reset).unwrap().unwrap();
        let refused = rig.core.block_on(log).unwrap().unwrap_err();
        assert!(matches!(refused, ControlError::Reset { .. }), "{refused}");
    }
    let handle = controller.clone();
    let log = rig.core.spawn_local(async move { handle.health().await });
    controller.removed();
    assert!(rig.core.block_on(log).unwrap().is_err());
    for _ in 0..100 {
        rig.core.turn();
    }
    assert_eq!(controller.status().state, State::Removed);
    rig.drive.check();
}

/// Goal: resets under load succeed repeatedly.
#[test]
fn repeated_resets_under_load() {
    for shadow_doorbells in [false, true] {
        let mut rig = Rig::new(Config {
            shadow_doorbells,
            ..slow()
        });
        let options = DriveOptions {
            retry_limit: 20,
            ..DriveOptions::new("nvme0")
        };
        let (controller, bdev, mut queue) = rig.one(options);
        for round in 1..=12u8 {
            let mut tokens = Vec::new();
            for at in 0..30u64 {
                let write = rig.write(at * 3, 3, round.wrapping_add(at as u8));
                tokens.push(rig.submit(&mut *queue, write));
                if at % 10 == 9 {
                    rig.turn(&mut *queue);
                }
            }
            let handle = controller.clone();
            let task = rig.core.spawn_local(async move { handle.reset().await });
            for _ in 0..u32::from(round) {
                rig.turn(&mut *queue);
            }
            let statuses = rig.run_until_idle(&mut *queue);
            assert_eq!(statuses, vec![Status::Ok; 30]);
            let reset = rig.core.block_on(task);
            assert_eq!(reset.expect("it runs"), Ok(()));
            for at in 0..30u64 {
                let stored = rig.drive.stored(1, at * 3, 3).unwrap();
                assert!(
                    stored
                        .iter()
                        .all(|byte| *byte == round.wrapping_add(at as u8))
                );
            }
        }
        let status = controller.status();
        assert_eq!((status.state, status.resets), (State::Live, 12));
        assert_eq!(reasons(&rig), [ResetReason::UserRequest; 12]);
        assert_eq!(status.losses, 0, "a cache survives a controller reset");
        assert_eq!(nacre_bdev::Bdev::losses(&*bdev), 0);
        rig.end(&controller, queue);
    }
}

/// Goal: a controller that fails or resets itself is detected without a timeout of an I/O, and
/// continues.
#[test]
fn failures_of_the_controller() {
    for (action, during_io) in [
        (Action::Fatal, true),
        (Action::ResetItself, true),
        (Action::Fatal, false),
        (Action::ResetItself, false),
    ] {
        let mut rig = Rig::new(slow());
        let options = DriveOptions {
            timeout: Duration::from_secs(20),
            ..DriveOptions::new("nvme0")
        };
        let (controller, _bdev, mut queue) = rig.one(options);
        if during_io {
            rig.drive.inject(Rule::next(Target::Io, action).after(5));
        } else if action == Action::Fatal {
            rig.drive.make_fatal();
        } else {
            rig.drive.reset_itself();
        }
        let began = rig.core.now();
        for at in 0..10u64 {
            let write = rig.write(at, 1, at as u8 + 1);
            rig.submit(&mut *queue, write);
        }
        let statuses = rig.run_until_idle(&mut *queue);
        assert_eq!(statuses, vec![Status::Ok; 10], "{action:?}");
        assert!(
            rig.core.now().since(began) < Duration::from_secs(20),
            "{action:?} (with I/O: {during_io}) was noticed by the timeout only: {:?}",
            controller.status()
        );
        let values = rig.values(&mut *queue, 0, 10);
        assert_eq!(values, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
        let status = controller.status();
        assert_eq!(status.state, State::Live);
        assert!(status.resets >= 1);
        rig.end(&controller, queue);
    }
}

/// Goal: an I/O that fails with each reset is not retried forever.
#[test]
fn a_command_that_kills_the_controller() {
    let mut rig = Rig::new(Config::default());
    let options = DriveOptions {
        retry_limit: 2,
        ..DriveOptions::new("nvme0")
    };
    let (controller, _bdev, mut queue) = rig.one(options);
    let kill = nacre_nvmf_wire::opcode::io::WRITE;
    rig.drive
        .inject(Rule::always(Target::IoOp(kill), Action::Fatal));
    let write = rig.write(0, 1, 1);
    let status = rig.status(&mut *queue, write);
    assert_eq!(status, Status::DeviceError);
    rig.drive.heal();
    rig.until(&mut *queue, |_| controller.status().state == State::Live);
    let read = rig.read(0, 1);
    assert_eq!(rig.status(&mut *queue, read), Status::Ok);
    rig.end(&controller, queue);
}

/// Goal: a failed reset ends in a failed controller, with every I/O ended; another reset may
/// succeed.
#[test]
fn a_reset_that_fails() {
    let mut rig = Rig::new(Config::default());
    let (controller, _bdev, mut queue) = rig.one(DriveOptions {
        admin_timeout: Duration::from_secs(1),
        ..DriveOptions::new("nvme0")
    });
    let write = rig.write(0, 1, 1);
    rig.run(&mut *queue, write);
    let refused = Action::Status(StatusCode::INTERNAL_ERROR.with_dnr());
    rig.drive
        .inject(Rule::always(Target::AdminOp(admin::IDENTIFY), refused));
    rig.drive.inject(Rule::always(Target::Io, Action::Hold));
    let write = rig.write(0, 1, 2);
    let token = rig.submit(&mut *queue, write);
    rig.turn(&mut *queue);
    let handle = controller.clone();
    let task = rig.core.spawn_local(async move { handle.reset().await });
    let status = rig.wait(&mut *queue, token).status;
    assert!(!status.is_ok());
    assert!(rig.core.block_on(task).expect("it runs").is_err());
    assert!(matches!(controller.status().state, State::Failed { .. }));
    rig.drive.heal();
    let handle = controller.clone();
    let reset = rig.core.block_on(async move { handle.reset().await });
    assert_eq!(reset, Ok(()));
    let write = rig.write(0, 1, 3);
    assert_eq!(rig.status(&mut *queue, write), Status::Ok);
    assert_eq!(rig.values(&mut *queue, 0, 1), [3]);
    rig.end(&controller, queue);
}

/// Goal: changes found by a reset (fewer queues, a namespace gone or grown) are followed.
#[test]
fn another_controller_after_the_reset() {
    let mut rig = Rig::new(Config::default());
    let (controller, bdev, mut queue) = rig.one(DriveOptions::new("nvme0"));
    let write = rig.write(0, 1, 1);
    rig.run(&mut *queue, write);
    rig.drive.grant_queues(2);
    rig.drive.resize_namespace(1, 10_000);
    let handle = controller.clone();
    let reset = rig.core.block_on(async move { handle.reset().await });
    assert_eq!(reset, Ok(()));
    rig.pass(&mut *queue, Duration::from_secs(2));
    assert_eq!(controller.info().io_queues, 2);
    assert_eq!(nacre_bdev::Bdev::geometry(&*bdev).blocks, 10_000);
    let write = rig.write(9_999, 1, 1);
    assert_eq!(rig.status(&mut *queue, write), Status::Ok);
    let flush = rig.io(Op::Flush, 0, 0);
    assert_eq!(rig.status(&mut *queue, flush), Status::Ok);
    rig.end(&controller, queue);
}

/// Goal: detaching during a reset, or with I/O in flight, ends both.
#[test]
fn detach_during_a_reset() {
    let mut rig = Rig::new(slow());
    let (controller, _bdev, mut queue) = rig.one(DriveOptions::new("nvme0"));
    for at in 0..10u64 {
        let write = rig.write(at, 1, 1);
        rig.submit(&mut *queue, write);
    }
    rig.turn(&mut *queue);
    let handle = controller.clone();
    let reset = rig.core.spawn_local(async move { handle.reset().await });
    rig.turn(&mut *queue);
    let handle = controller.clone();
    let detach = rig.core.spawn_local(async move { handle.detach().await });
    let statuses = rig.run_until_idle(&mut *queue);
    assert_eq!(statuses.len(), 10);
    let _ = rig.core.block_on(reset);
    rig.core.block_on(detach).expect("it runs");
    let read = rig.read(0, 1);
    assert_eq!(rig.status(&mut *queue, read), Status::Gone);
    rig.end(&controller, queue);
    assert!(!rig.drive.is_bus_master());
}
