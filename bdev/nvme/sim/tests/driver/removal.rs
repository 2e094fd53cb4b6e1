//! Tests of drives that are removed, with and without notice, and return.

use std::sync::Arc;
use std::time::Duration;

use nacre_bdev::{Bdev, Op, Status};
use nacre_bdev_nvme::{AttachError, ControlError, DriveOptions, Event, Function, State};
use nacre_bdev_nvme_sim::{Action, CacheSurvival, Config, Drive, Identity, Pace, Rule, Target};

use super::rig::Rig;

fn slow() -> Config {
    Config {
        pace: Pace {
            latency: (Duration::from_micros(100), Duration::from_millis(4)),
            ..Pace::default()
        },
        ..Config::default()
    }
}

/// Goal: whichever part detects the removal first, all present and later I/O completes with Gone,
/// once. When the drive returns, the same bdevs continue and report that data may have been lost.
#[test]
fn a_removed_drive_returns() {
    for notified in [false, true] {
        let mut rig = Rig::new(slow());
        let (controller, bdev, mut queue) = rig.one(DriveOptions::new("nvme0"));
        let write = rig.write(0, 1, 1);
        rig.run(&mut *queue, write);
        let flush = rig.io(Op::Flush, 0, 0);
        rig.run(&mut *queue, flush);
        let write = rig.write(0, 1, 2);
        rig.run(&mut *queue, write);
        for at in 0..20u64 {
            let write = rig.write(10 + at, 1, 3);
            rig.submit(&mut *queue, write);
        }
        rig.turn(&mut *queue);
        rig.drive.pull(CacheSurvival::Nothing);
        if notified {
            controller.removed();
        }
        let began = rig.core.now();
        let statuses = rig.run_until_idle(&mut *queue);
        assert_eq!(statuses.len(), 20);
        assert!(
            statuses
                .iter()
                .all(|status| matches!(status, Status::Gone | Status::Ok)),
            "{statuses:?}"
        );
        assert!(statuses.contains(&Status::Gone));
        assert!(rig.core.now().since(began) < Duration::from_secs(10));
        rig.until(&mut *queue, |_| controller.status().state == State::Removed);
        let read = rig.read(0, 1);
        assert_eq!(rig.status(&mut *queue, read), Status::Gone);
        assert_eq!(bdev.losses(), 0);

        let function: Arc<dyn Function> = rig.drive.plug();
        let back = controller.clone();
        let returned = rig
            .core
            .block_on(async move { back.returned(function).await });
        assert!(
            returned.is_ok(),
            "{:?}",
            returned.err().map(|e| e.to_string())
        );
        assert_eq!(controller.status().state, State::Live);
        assert_eq!((bdev.losses(), controller.status().losses), (1, 1));
        assert_eq!(rig.values(&mut *queue, 0, 1), [1], "what was flushed");
        let write = rig.write(0, 1, 4);
        assert_eq!(rig.status(&mut *queue, write), Status::Ok);
        let same = controller.namespaces().remove(0);
        assert!(Arc::ptr_eq(&same, &bdev));
        rig.end(&controller, queue);
    }
}

/// Goal: a removal during any command of the control ends in the state Removed, not in a hang.
#[test]
fn a_drive_removed_during_a_reset() {
    let mut rig = Rig::new(Config::default());
    let (controller, _bdev, mut queue) = rig.one(DriveOptions::new("nvme0"));
    rig.drive
        .inject(Rule::next(Target::Admin, Action::Pulled).after(3));
    let handle = controller.clone();
    let reset = rig.core.block_on(async move { handle.reset().await });
    assert!(reset.is_err());
    rig.until(&mut *queue, |_| controller.status().state == State::Removed);
    let read = rig.read(0, 1);
    assert_eq!(rig.status(&mut *queue, read), Status::Gone);
    drop(queue);
    rig.detach(&controller);
    assert_eq!(controller.status().state, State::Detached);
    rig.drive.check();
}

/// Goal: the same at every admin command: of bring-up, of a reset, of the return. Method: the drive
/// is removed at the first command, then at the second, and so on.
#[test]
fn a_drive_removed_at_every_admin_command() {
    let pulled = |at| Rule::next(Target::Admin, Action::Pulled).after(at);
    let mut last = 0;
    for at in 0.. {
        let mut rig = Rig::new(Config::default());
        rig.drive.inject(pulled(at));
        let began = rig.core.now();
        let Err(error) = rig.try_attach(DriveOptions::new("a")) else {
            break;
        };
        let is_expected = matches!(
            error,
            AttachError::Control(ControlError::Gone) | AttachError::Gone { .. }
        );
        assert!(is_expected, "at {at}: {error}");
        assert!(
            rig.core.now().since(began) < Duration::from_secs(10),
            "at {at}"
        );
        rig.drive.check();
        last = at;
    }
    assert!(last > 8, "{last} commands are too few");

    for again in [false, true] {
        for at in 0.. {
            let mut rig = Rig::new(Config::default());
            let (controller, _bdev, mut queue) = rig.one(DriveOptions::new("nvme0"));
            let write = rig.write(0, 1, 7).flags(nacre_bdev::Flags::FUA);
            assert_eq!(rig.status(&mut *queue, write), Status::Ok);
            if again {
                rig.drive.pull(CacheSurvival::Nothing);
                rig.until(&mut *queue, |_| controller.status().state == State::Removed);
            }
            rig.drive.inject(pulled(at));
            let function = again.then(|| rig.drive.plug());
            let handle = controller.clone();
            let came = rig.core.block_on(async move {
                match function {
                    Some(function) => handle.returned(function).await.is_ok(),
                    None => handle.reset().await.is_ok(),
                }
            });
            rig.turn(&mut *queue);
            let present = rig.drive.is_present();
            if !present {
                rig.until(&mut *queue, |_| controller.status().state == State::Removed);
                let read = rig.read(0, 1);
                assert_eq!(rig.status(&mut *queue, read), Status::Gone, "at {at}");
                rig.drive.heal();
                let function: Arc<dyn Function> = rig.drive.plug();
                let back = controller.clone();
                let returned = rig
                    .core
                    .block_on(async move { back.returned(function).await });
                assert!(
                    returned.is_ok(),
                    "at {at}: {:?}",
                    returned.err().map(|e| e.to_string())
                );
            }
            assert_eq!(rig.values(&mut *queue, 0, 1), [7], "at {at}");
            rig.drive.heal();
            rig.end(&controller, queue);
            if present {
                assert!(came && at > 4, "{at} commands are too few");
                break;
            }
        }
    }
}

/// Goal: the same at every I/O command: each I/O ends once, none succeeds without its effect, and
/// the drive works after its return.
#[test]
fn a_drive_removed_at_every_io_command() {
    for at in 0.. {
        let mut rig = Rig::new(Config {
            pace: Pace {
                latency: (Duration::ZERO, Duration::from_micros(300)),
                ..Pace::default()
            },
            ..Config::default()
        });
        let (controller, _bdev, mut queue) = rig.one(DriveOptions::new("nvme0"));
        rig.drive
            .inject(Rule::next(Target::Io, Action::Pulled).after(at));
        let mut submitted = Vec::new();
        for round in 0..3u64 {
            let lba = round * 40;
            for op in Op::ALL {
                let lba = lba + 4 * op.index() as u64;
                let mut io = rig
                    .io(op, lba, 2)
                    .source(lba + 1)
                    .flags(nacre_bdev::Flags::FUA);
                for _ in 0..op.data_len(1) {
                    io = io.with(rig.buf(1024, 0));
                }
                submitted.push((op, lba, rig.submit(&mut *queue, io)));
            }
            rig.turn(&mut *queue);
        }
        let count = submitted.len();
        rig.until(&mut *queue, |rig| rig.ended.len() == count);
        let statuses: Vec<Status> = submitted
            .iter()
            .map(|(.., token)| rig.ended[token].status)
            .collect();
        rig.ended.clear();
        let fits = |status: &Status| matches!(status, Status::Ok | Status::Gone);
        assert!(statuses.iter().all(fits), "at {at}: {statuses:?}");
        if rig.drive.is_present() {
            assert!(statuses.iter().all(|status| *status == Status::Ok));
            assert!(at > 24, "{at} commands are too few");
            rig.drive.heal();
            rig.end(&controller, queue);
            return;
        }
        assert!(statuses.contains(&Status::Gone), "at {at}");
        rig.until(&mut *queue, |_| controller.status().state == State::Removed);
        let function: Arc<dyn Function> = rig.drive.plug();
        let back = controller.clone();
        let returned = rig
            .core
            .block_on(async move { back.returned(function).await });
        assert!(returned.is_ok(), "at {at}");
        let write = rig.write(0, 4, 9);
        assert_eq!(rig.status(&mut *queue, write), Status::Ok, "at {at}");
        assert_eq!(rig.values(&mut *queue, 0, 4), [9; 4], "at {at}");
        rig.end(&controller, queue);
    }
}

/// Goal: another drive in the same slot is not mistaken for the removed one.
#[test]
fn another_drive() {
    let mut rig = Rig::new(Config::default());
    let (controller, _bdev, mut queue) = rig.one(DriveOptions::new("nvme0"));
    let function: Arc<dyn Function> = rig.drive.plug();
    let early = controller.clone();
    // The drive was removed and returned at once, unnoticed by the driver: the driver must treat it
    // as removed first.
    controller.removed();
    rig.until(&mut *queue, |_| early.status().state == State::Removed);
    drop(function);
    let iommu = rig.drive.iommu().clone();
    let other = Drive::new(Config {
        identity: Identity {
            serial: "OTHER".to_owned(),
            ..Identity::default()
        },
        iommu,
        ..Config::default()
    });
    rig.core
        .add_poller(Box::new(nacre_bdev_nvme_sim::Ticker(other.clone())))
        .unwrap();
    let function: Arc<dyn Function> = other.plug();
    let back = controller.clone();
    let returned = rig
        .core
        .block_on(async move { back.returned(function).await });
    assert!(
        matches!(
            &returned,
            Err(AttachError::OtherDrive { expected, found, .. })
                if expected == "SIM0001" && found == "OTHER"
        ),
        "{:?}",
        returned.err().map(|error| error.to_string())
    );
    assert_eq!(controller.status().state, State::Removed);
    assert!(other.is_given_back());
    other.check();
    let function: Arc<dyn Function> = rig.drive.plug();
    let back = controller.clone();
    let returned = rig
        .core
        .block_on(async move { back.returned(function).await });
    assert!(returned.is_ok());
    let write = rig.write(0, 1, 4);
    assert_eq!(rig.status(&mut *queue, write), Status::Ok);
    rig.end(&controller, queue);
}

/// Goal: only a removed drive can return.
#[test]
fn only_a_removed_drive_can_return() {
    let mut rig = Rig::new(Config::default());
    let (controller, _bdev, mut queue) = rig.one(DriveOptions::new("nvme0"));
    let write = rig.write(0, 1, 4);
    rig.run(&mut *queue, write);
    let other = Drive::new(Config {
        iommu: rig.drive.iommu().clone(),
        ..Config::default()
    });
    let function: Arc<dyn Function> = other.plug();
    let back = controller.clone();
    let returned = rig
        .core
        .block_on(async move { back.returned(function).await });
    assert!(matches!(returned, Err(AttachError::NotRemoved { .. })));
    let read = rig.read(0, 1);
    assert_eq!(rig.status(&mut *queue, read), Status::Ok);
    rig.end(&controller, queue);
}

/// Goal: the removal of a drive without I/O is detected and reported.
#[test]
fn removal_is_detected_while_idle() {
    let mut rig = Rig::new(Config::default());
    let (controller, _bdev, mut queue) = rig.one(DriveOptions::new("nvme0"));
    rig.events.take();
    rig.drive.pull(CacheSurvival::All);
    rig.until(&mut *queue, |_| controller.status().state == State::Removed);
    let removed =
        |event: &Event| matches!(event, Event::State(status) if status.state == State::Removed);
    assert!(rig.events.take().iter().any(removed));
    drop(queue);
    rig.detach(&controller);
    rig.drive.check();
}
