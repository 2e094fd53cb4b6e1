//! I/O that does not complete in time: abort, then reset of the queue, the controller, the
//! function, and finally failure.

use std::time::Duration;

use nacre_bdev::{Op, Status};
use nacre_bdev_nvme::{ActionOnTimeout, DriveOptions, Event, State, TimeoutAction};
use nacre_bdev_nvme_sim::{Action, Config, Rule, Target};
use nacre_nvmf_wire::StatusCode;
use nacre_nvmf_wire::opcode::{admin, io};

use super::rig::Rig;

fn options() -> DriveOptions {
    DriveOptions {
        timeout: Duration::from_secs(4),
        admin_timeout: Duration::from_secs(2),
        ..DriveOptions::new("nvme0")
    }
}

fn never(deaf: bool) -> Action {
    Action::Never { done: false, deaf }
}

fn actions(rig: &Rig) -> Vec<TimeoutAction> {
    let events = rig.events.take().into_iter();
    events
        .filter_map(|event| match event {
            Event::Timeout(timeout) if timeout.qid != 0 => Some(timeout.action),
            _ => None,
        })
        .collect()
}

/// Goal: a hanging command is aborted and sent again; the layers above see only a delay.
#[test]
fn an_abort_helps() {
    let mut rig = Rig::new(Config::default());
    let (controller, _bdev, mut queue) = rig.one(options());
    rig.drive
        .inject(Rule::next(Target::IoOp(io::WRITE), never(false)));
    let began = rig.core.now();
    let write = rig.write(0, 1, 5);
    let token = rig.submit(&mut *queue, write);
    let status = rig.wait(&mut *queue, token).status;
    assert!(rig.core.now().since(began) >= Duration::from_secs(4));
    assert_eq!(status, Status::Ok);
    assert_eq!(rig.values(&mut *queue, 0, 1), [5]);
    let report = controller.status();
    assert!(report.timeouts >= 1 && report.aborts >= 1, "{report:?}");
    assert_eq!((report.queue_resets, report.resets), (0, 0));
    assert_eq!(actions(&rig), [TimeoutAction::Abort]);
    assert_eq!(rig.drive.stats().admin[usize::from(admin::ABORT)], 1);
    rig.end(&controller, queue);
}

/// Goal: if aborts fail, the queue is recreated, and its I/O continues.
#[test]
fn a_new_queue_helps() {
    for deletion_completes in [true, false] {
        let mut rig = Rig::new(Config {
            deletion_completes,
            ..Config::default()
        });
        let (controller, _bdev, mut queue) = rig.one(options());
        rig.drive
            .inject(Rule::next(Target::IoOp(io::WRITE), never(true)).times(3));
        for at in 0..6u64 {
            let write = rig.write(at, 1, at as u8 + 1);
            rig.submit(&mut *queue, write);
        }
        let statuses = rig.run_until_idle(&mut *queue);
        assert_eq!(statuses, vec![Status::Ok; 6]);
        assert_eq!(rig.values(&mut *queue, 0, 6), [1, 2, 3, 4, 5, 6]);
        let report = controller.status();
        assert!(report.queue_resets >= 1 && report.aborts >= 1, "{report:?}");
        assert_eq!(report.resets, 0, "{report:?}");
        assert_eq!(rig.drive.stats().controller_resets, 0);
        rig.end(&controller, queue);
    }
}

/// Goal: if the queue cannot be recreated, the controller is reset.
#[test]
fn a_controller_reset_helps() {
    let mut rig = Rig::new(Config::default());
    let (controller, _bdev, mut queue) = rig.one(options());
    let write = rig.write(0, 1, 1);
    rig.run(&mut *queue, write);
    rig.drive
        .inject(Rule::next(Target::IoOp(io::WRITE), never(true)));
    let refused = Action::Status(StatusCode::INTERNAL_ERROR);
    rig.drive
        .inject(Rule::next(Target::AdminOp(admin::DELETE_IO_SQ), refused));
    let write = rig.write(0, 1, 5);
    assert_eq!(rig.status(&mut *queue, write), Status::Ok);
    let report = controller.status();
    assert!(report.resets >= 1, "{report:?}");
    assert_eq!(report.function_resets, 0);
    assert_eq!(report.state, State::Live);
    assert_eq!(rig.values(&mut *queue, 0, 1), [5]);
    rig.end(&controller, queue);
}

/// Goal: if admin commands time out too, the controller is reset; if it cannot be disabled, the
/// function is reset.
#[test]
fn a_function_reset_helps() {
    let mut rig = Rig::new(Config::default());
    let (controller, _bdev, mut queue) = rig.one(options());
    let write = rig.write(0, 1, 1);
    rig.run(&mut *queue, write);
    rig.drive
        .inject(Rule::next(Target::IoOp(io::WRITE), never(true)));
    rig.drive
        .inject(Rule::next(Target::AdminOp(admin::ABORT), never(true)).times(8));
    rig.drive.inject(Rule::next(
        Target::AdminOp(admin::DELETE_IO_SQ),
        never(true),
    ));
    rig.drive.never_disabled(true);
    let write = rig.write(0, 1, 5);
    let token = rig.submit(&mut *queue, write);
    rig.until(&mut *queue, |rig| rig.drive.stats().function_resets > 0);
    rig.drive.never_disabled(false);
    assert_eq!(rig.wait(&mut *queue, token).status, Status::Ok);
    let report = controller.status();
    assert!(report.function_resets >= 1, "{report:?}");
    assert_eq!(report.state, State::Live);
    assert_eq!(rig.values(&mut *queue, 0, 1), [5]);
    rig.end(&controller, queue);
}

/// Goal: if every reset fails, the controller has failed: every I/O ends once, and later I/O fails
/// immediately. A reset by an operator revives it.
#[test]
fn nothing_helps() {
    let mut rig = Rig::new(Config::default());
    let (controller, _bdev, mut queue) = rig.one(options());
    let write = rig.write(0, 1, 1);
    rig.run(&mut *queue, write);
    rig.drive
        .inject(Rule::always(Target::IoOp(io::WRITE), never(true)));
    rig.drive.inject(Rule::always(Target::Admin, never(true)));
    rig.drive.never_ready(true);
    for at in 0..5u64 {
        let write = rig.write(at, 1, 5);
        rig.submit(&mut *queue, write);
    }
    let statuses = rig.run_until_idle(&mut *queue);
    assert_eq!(statuses.len(), 5);
    assert!(
        statuses.iter().all(|status| !status.is_ok()),
        "{statuses:?}"
    );
    rig.until(&mut *queue, |_| {
        matches!(controller.status().state, State::Failed { .. })
    });
    let read = rig.read(0, 1);
    assert!(!rig.status(&mut *queue, read).is_ok());
    rig.drive.heal();
    let handle = controller.clone();
    let reset = rig.core.block_on(async move { handle.reset().await });
    assert_eq!(reset, Ok(()));
    assert_eq!(controller.status().state, State::Live);
    let write = rig.write(0, 1, 9);
    assert_eq!(rig.status(&mut *queue, write), Status::Ok);
    rig.end(&controller, queue);
}

/// Goal: the configured action on a timeout (immediate reset, or waiting) is executed.
#[test]
fn configured_timeout_actions() {
    let mut rig = Rig::new(Config::default());
    let (controller, _bdev, mut queue) = rig.one(DriveOptions {
        action_on_timeout: ActionOnTimeout::Reset,
        ..options()
    });
    rig.drive
        .inject(Rule::next(Target::IoOp(io::WRITE), never(false)));
    let write = rig.write(0, 1, 5);
    assert_eq!(rig.status(&mut *queue, write), Status::Ok);
    let report = controller.status();
    assert_eq!(
        (report.aborts, report.queue_resets, report.resets),
        (0, 0, 1)
    );
    rig.end(&controller, queue);

    let mut rig = Rig::new(Config::default());
    let (controller, _bdev, mut queue) = rig.one(DriveOptions {
        action_on_timeout: ActionOnTimeout::None,
        ..options()
    });
    rig.drive
        .inject(Rule::next(Target::IoOp(io::WRITE), Action::Hold));
    let write = rig.write(0, 1, 5);
    let token = rig.submit(&mut *queue, write);
    rig.pass(&mut *queue, Duration::from_secs(100));
    assert!(!rig.ended.contains_key(&token));
    let report = controller.status();
    assert!(
        report.timeouts >= 1 && report.aborts + report.resets == 0,
        "{report:?}"
    );
    rig.drive.release();
    assert_eq!(rig.wait(&mut *queue, token).status, Status::Ok);
    rig.end(&controller, queue);

    let mut rig = Rig::new(Config::default());
    let (controller, _bdev, mut queue) = rig.one(DriveOptions {
        timeout: Duration::ZERO,
        ..options()
    });
    rig.drive
        .inject(Rule::next(Target::IoOp(io::WRITE), Action::Hold));
    let write = rig.write(0, 1, 5);
    let token = rig.submit(&mut *queue, write);
    rig.pass(&mut *queue, Duration::from_secs(300));
    assert!(!rig.ended.contains_key(&token));
    assert_eq!(controller.status().timeouts, 0);
    rig.drive.release();
    assert_eq!(rig.wait(&mut *queue, token).status, Status::Ok);
    rig.end(&controller, queue);
}

/// Goal: a late completion, during its abort or afterwards, counts once.
#[test]
fn late_answers() {
    for by in [3900, 4000, 4010, 4600, 5000, 6000, 8000, 12000, 30000] {
        let mut rig = Rig::new(Config::default());
        let (controller, _bdev, mut queue) = rig.one(options());
        let late = Action::Late(Duration::from_millis(by));
        rig.drive.inject(Rule::next(Target::Io, late).times(2));
        rig.drive.fail_aborts(by % 2000 == 0);
        let write = rig.write(0, 1, 5);
        rig.submit(&mut *queue, write);
        let zeroes = rig.io(Op::WriteZeroes, 9, 1);
        rig.submit(&mut *queue, zeroes);
        assert_eq!(rig.run_until_idle(&mut *queue), [Status::Ok; 2], "{by}");
        rig.pass(&mut *queue, Duration::from_secs(60));
        assert_eq!(controller.status().protocol_errors, 0, "{by}");
        assert_eq!(rig.values(&mut *queue, 0, 1), [5]);
        rig.end(&controller, queue);
    }
}

/// Goal: a command that must not be repeated is not: a hanging compare-and-write ends with unknown
/// result.
#[test]
fn a_compare_and_write_is_not_retried() {
    let mut rig = Rig::new(Config::default());
    let (controller, _bdev, mut queue) = rig.one(options());
    let done = Action::Never {
        done: true,
        deaf: true,
    };
    rig.drive.inject(Rule::next(Target::Io, done));
    let (old, new) = (rig.buf(512, 0), rig.buf(512, 4));
    let swap = rig.io(Op::CompareAndWrite, 0, 1).with(old).with(new);
    let status = rig.status(&mut *queue, swap);
    assert_eq!(status, Status::Aborted);
    assert_eq!(rig.values(&mut *queue, 0, 1), [4]);
    rig.end(&controller, queue);
}
